//! The serving process: a node with a pool, the one-sided array and an RPC server, over shared
//! memory and over TCP.

use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::serving;
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Access, Memory, MessageHandler, Scope, Target};
use aquifer_pool::size::{SECTION_BYTES, SECTION_CHUNKS};
use aquifer_pool::{NodeId, NodeMemory};
use parking_lot::Mutex;

use super::rpc::{Retired, RpcServer};
use super::{KEY, NODE_SECTIONS};

/// Number of the node.
pub const NODE: NodeId = NodeId(1);
/// Pause between two polls within `BUSY_TIME` of a request.
const BUSY_PAUSE: Duration = Duration::from_micros(50);
const BUSY_TIME: Duration = Duration::from_millis(20);
/// Pause between two polls later, when other allocators are measured.
const IDLE_PAUSE: Duration = Duration::from_millis(2);

/// Serves at `path`, and over TCP, until standard input ends.
///
/// # Errors
/// If it cannot listen, or there is too little memory.
pub fn serve_at(path: &Path) -> Result<(), BenchError> {
    let shm = ShmTarget::listen(path, shm::ShmOptions::default()).map_err(|error| failed(&error))?;
    let anywhere = ([127, 0, 0, 1], 0).into();
    let tcp =
        TcpTarget::listen(anywhere, &KEY, tcp::TcpOptions { encrypt: false, ..tcp::TcpOptions::default() })
            .map_err(|error| failed(&error))?;
    let (shm, tcp) = (Arc::new(shm), Arc::new(tcp));
    let rpc_server = lend(&*shm).map_err(|reason| BenchError::Fabric { reason })?;
    let serving = std::thread::spawn(move || serve_rpcs(&*shm, rpc_server));
    let address = tcp.address();
    let rpc_server = lend(&*tcp).map_err(|reason| BenchError::Fabric { reason })?;
    let retiring = answer_in_transport(&tcp, rpc_server);
    serving::ready(path, &address.to_string())?;
    for thread in [serving, retiring] {
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    Ok(())
}

/// Answers RPCs in the threads of the TCP target that receive them.
#[derive(Debug)]
struct TransportServer {
    target: Weak<TcpTarget>,
    rpc_server: Arc<Mutex<RpcServer>>,
    retired: Sender<Retired>,
}

impl MessageHandler for TransportServer {
    fn handle(&self, from: aquifer_fabric::Sender, message: &[u8], answer: &mut Vec<u8>) {
        let Some(target) = self.target.upgrade() else { return };
        let (bytes, retired) = self.rpc_server.lock().answer(&*target, from.who, message);
        answer.extend_from_slice(&bytes);
        if let Some(retired) = retired {
            // The receiver lives as long as the process.
            let _ = self.retired.send(retired);
        }
    }
}

/// Registers the RPC server with the target, whose threads answer the RPCs. The returned thread
/// invalidates windows of freed extents, which waits for those threads.
fn answer_in_transport(target: &Arc<TcpTarget>, rpc_server: RpcServer) -> JoinHandle<()> {
    let rpc_server = Arc::new(Mutex::new(rpc_server));
    let (sender, retired) = channel::<Retired>();
    target.answer_messages(Arc::new(TransportServer {
        target: Arc::downgrade(target),
        rpc_server: Arc::clone(&rpc_server),
        retired: sender,
    }));
    let target = Arc::clone(target);
    std::thread::spawn(move || {
        for retired in retired {
            if target.invalidate(retired.key).is_ok() {
                rpc_server.lock().reuse(retired);
            }
        }
    })
}

fn failed(error: &dyn std::fmt::Display) -> BenchError {
    BenchError::Fabric { reason: error.to_string() }
}

/// Registers the memory: the pool is the first region, then the array, then the memory of RPCs.
pub fn lend(target: &dyn Target) -> Result<RpcServer, String> {
    let show = |error: &dyn std::fmt::Display| error.to_string();
    NodeMemory::create(target, NODE, u64::from(NODE_SECTIONS) * SECTION_BYTES)
        .map_err(|error| show(&error))?;
    let create = |bytes: u64| {
        let bytes = usize::try_from(bytes).map_err(|error| show(&error))?;
        Memory::create("aquifer-bench", bytes).map(Arc::new).map_err(|error| show(&error))
    };
    let entries = create(u64::from(NODE_SECTIONS * SECTION_CHUNKS) * 8)?;
    target.register(entries, Access::ALL, Scope::Anyone).map_err(|error| show(&error))?;
    let handed_out = create(u64::from(NODE_SECTIONS) * SECTION_BYTES)?;
    let region =
        target.register(handed_out, Access::READ_WRITE, Scope::Anyone).map_err(|error| show(&error))?;
    Ok(RpcServer::new(NODE_SECTIONS, region.base, region.key))
}

/// Serves RPCs of a target without threads that receive messages, until the process ends.
pub fn serve_rpcs(target: &dyn Target, mut rpc_server: RpcServer) {
    let mut message = Vec::new();
    // Time for which the thread polls before it sleeps, as the fabric's threads do.
    let spin_time = tcp::TcpOptions::default().spin_time;
    let mut last = Instant::now();
    let mut polls_until = last + spin_time;
    loop {
        message.clear();
        if let Some(from) = target.receive(&mut message) {
            let (answer, retired) = rpc_server.answer(target, from.who, &message);
            if let Some(retired) = retired
                && target.invalidate(retired.key).is_ok()
            {
                rpc_server.reuse(retired);
            }
            target.reply(from.endpoint, &answer);
            last = Instant::now();
            polls_until = last + spin_time;
            continue;
        }
        let now = Instant::now();
        if now < polls_until {
            std::thread::yield_now();
        } else {
            target.wait(if now - last < BUSY_TIME { BUSY_PAUSE } else { IDLE_PAUSE });
            polls_until = Instant::now();
        }
    }
}
