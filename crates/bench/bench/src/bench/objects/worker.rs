//! A peer of figure 11: a service whose transport thread passes each request to a worker and waits
//! for the answer, like servers that must not block their network threads.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender as Queue, channel};
use std::time::Duration;

use aquifer_bench::BenchError;
use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
use aquifer_fabric::{Admission, ClusterKey, Host, Limits, MessageHandler, Sender, Target, Tenant, Ticket};
use aquifer_objects::access::AccessError;
use aquifer_objects::client::{HeapClient, HeapRoute};
use aquifer_objects::service::{HeapService, MESSAGE_BYTES_MAX, TICKET_SERVICE};
use parking_lot::Mutex;

/// The memory of all heaps.
const MEMORY_BYTES: u64 = 256 << 20;
const NODE: u16 = 1;
const TENANT: Tenant = Tenant(1000);

/// The service, and a client of it.
pub struct WorkerHeap {
    pub client: HeapClient,
    _target: Arc<TcpTarget>,
}

impl WorkerHeap {
    /// Starts the service in this process.
    ///
    /// # Errors
    /// If there is no free port.
    pub fn start() -> Result<Self, BenchError> {
        let key = ClusterKey([17; 32]);
        let options = TcpOptions {
            limits: Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() },
            regions_max: 64,
            admission: Admission::Tickets(TICKET_SERVICE),
            ..TcpOptions::default()
        };
        let local = "127.0.0.1:0".parse().expect("it is an address");
        let target = Arc::new(TcpTarget::listen(local, &key, options).map_err(BenchError::heap)?);
        let service = Arc::new(HeapService::new(NODE, MEMORY_BYTES, None, None));
        service.open_through(&(Arc::clone(&target) as Arc<dyn Target>));
        target.answer_messages(Arc::new(Worker::start(service)));
        let address = target.address();
        let ticket =
            Ticket { tenant: TENANT, host: Host(1), epoch: 1, expiry_s: u64::MAX, service: TICKET_SERVICE };
        let connect = move || {
            let options =
                ConnectOptions { operation_time: Duration::from_secs(10), ..ConnectOptions::default() };
            let failed = |source| AccessError::Connect { node: NODE, source };
            let endpoint = tcp::connect_with_ticket(address, &ticket, &ticket.secret(&key), options);
            Ok(HeapRoute::Remote(endpoint.map_err(failed)?))
        };
        let client = HeapClient::connect_by(Box::new(connect)).map_err(BenchError::heap)?;
        Ok(Self { client, _target: target })
    }
}

/// A thread that answers requests, one at a time. It ends with its queue.
#[derive(Debug)]
struct Worker {
    queues: Mutex<Queues>,
}

#[derive(Debug)]
struct Queues {
    requests: Queue<(Tenant, Vec<u8>)>,
    answers: Receiver<Vec<u8>>,
}

impl Worker {
    fn start(service: Arc<HeapService>) -> Self {
        let (requests, queue) = channel::<(Tenant, Vec<u8>)>();
        let (done, answers) = channel();
        std::thread::spawn(move || {
            for (tenant, message) in queue {
                let mut answer = Vec::new();
                service.answer(tenant, &message, &mut answer);
                if done.send(answer).is_err() {
                    return;
                }
            }
        });
        Self { queues: Mutex::new(Queues { requests, answers }) }
    }
}

impl MessageHandler for Worker {
    fn handle(&self, from: Sender, message: &[u8], answer: &mut Vec<u8>) {
        let queues = self.queues.lock();
        let sent = queues.requests.send((from.who.tenant, message.to_vec()));
        let answered = sent.ok().and_then(|()| queues.answers.recv().ok());
        answer.extend_from_slice(&answered.expect("the worker ends after its queue"));
    }
}
