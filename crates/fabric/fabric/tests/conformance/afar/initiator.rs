//! The program that holds endpoints for the tests on the other machine.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Identity, LocalKey, LocalSlice, Memory, PostError, Verb, Work,
};

use super::calls::{CONNECT, IS_BROKEN, POLL, POST, RECEIVE, REGISTER};
use super::words::Message;

type Connect = fn(SocketAddr, Identity) -> Result<Box<dyn Endpoint>, EndpointError>;

/// Holds an endpoint, made by `connect`, for each connection. Does not return.
pub fn serve(listener: &TcpListener, connect: Connect) -> ! {
    loop {
        let (stream, _) = listener.accept().expect("a listener accepts");
        std::thread::spawn(move || {
            let ended = hold(stream, connect);
            assert!(
                ended.is_err_and(|error| error.kind() == io::ErrorKind::UnexpectedEof),
                "the tests have ended"
            );
        });
    }
}

/// An endpoint and its operations in flight.
struct HeldEndpoint {
    endpoint: Box<dyn Endpoint>,
    locals: Vec<(LocalKey, Arc<Memory>)>,
    posted: VecDeque<Work>,
}

fn hold(mut stream: TcpStream, connect: Connect) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut ask = Message::receive(&mut stream)?;
    assert_eq!(ask.read(), CONNECT);
    let address = ask.read_text().parse().expect("an address");
    let made = connect(address, ask.read_identity());
    let mut answer = Message::default();
    answer.failure(&made);
    if let Ok(endpoint) = &made {
        answer.limits(&endpoint.limits());
        answer.put(endpoint.regions().len() as u64);
        endpoint.regions().iter().for_each(|region| answer.region(region));
    }
    answer.write(&mut stream)?;
    let Ok(endpoint) = made else { return Err(io::ErrorKind::UnexpectedEof.into()) };
    let mut held = HeldEndpoint { endpoint, locals: Vec::new(), posted: VecDeque::new() };
    loop {
        let mut ask = Message::receive(&mut stream)?;
        held.obey(&mut ask).write(&mut stream)?;
    }
}

impl HeldEndpoint {
    fn obey(&mut self, ask: &mut Message) -> Message {
        let mut answer = Message::default();
        match ask.read() {
            REGISTER => {
                let memory = Arc::new(Memory::create("local", ask.read_usize()).expect("memory"));
                let made = self.endpoint.register_local(Arc::clone(&memory));
                answer.failure(&made);
                if let Ok(key) = made {
                    self.locals.push((key, memory));
                    answer.put(key.0.into());
                }
            }
            POST => answer.put(self.post(ask)),
            POLL => self.poll(ask.read_usize(), &mut answer),
            RECEIVE => {
                let mut message = Vec::new();
                answer.put(self.endpoint.receive(&mut message).into());
                answer.bytes(&message);
            }
            IS_BROKEN => answer.put(self.endpoint.is_broken().into()),
            other => panic!("call {other} is not known"),
        }
        answer
    }

    fn memory(&self, slice: LocalSlice) -> Option<&Arc<Memory>> {
        self.locals.iter().find(|(key, _)| *key == slice.key).map(|(_, memory)| memory)
    }

    fn post(&mut self, ask: &mut Message) -> u64 {
        let count = ask.read();
        let mut batch = Vec::new();
        for _ in 0..count {
            let work = ask.read_work();
            let bytes = ask.read_bytes();
            if let Verb::Write { local, .. } | Verb::Send { local } = work.verb
                && !bytes.is_empty()
            {
                let memory = self.memory(local).expect("whose bytes came");
                memory.write(usize::try_from(local.offset).expect("inside"), bytes);
            }
            batch.push(work);
        }
        let accepted = match self.endpoint.post(&batch) {
            Ok(()) => batch.len(),
            Err(PostError::QueueFull { accepted }) => accepted,
        };
        self.posted.extend(&batch[..accepted]);
        accepted as u64
    }

    /// Answers with completions, and with the bytes of READs that have ended.
    fn poll(&mut self, max: usize, answer: &mut Message) {
        let mut done = Vec::new();
        self.endpoint.poll(&mut done, max);
        let read: Vec<LocalSlice> = done.iter().flat_map(|end| self.ended(end)).collect();
        answer.put(read.len() as u64);
        for slice in read {
            let mut bytes = vec![0; slice.len as usize];
            let memory = self.memory(slice).expect("the READ has a destination");
            memory.read(usize::try_from(slice.offset).expect("inside"), &mut bytes);
            answer.slice(slice);
            answer.bytes(&bytes);
        }
        answer.put(done.len() as u64);
        done.iter().for_each(|end| answer.completion(end));
    }

    /// The destinations of the READs that this completion stands for. Work ends in order, and
    /// unsignalled work completes only if it fails.
    fn ended(&mut self, end: &Completion) -> Vec<LocalSlice> {
        let mut read = Vec::new();
        while let Some(work) = self.posted.pop_front() {
            let is_it = work.id == end.id && (work.signalled || end.outcome.is_err());
            if let Verb::Read { local, .. } = work.verb
                && (!is_it || end.outcome.is_ok())
            {
                read.push(local);
            }
            if is_it {
                return read;
            }
        }
        panic!("{end:?} is of no work that was posted")
    }
}
