//! Endpoints on another machine, so that the suite runs between two machines: the tests and the
//! target on this one, the initiators on the other.
//!
//! Each endpoint is one TCP connection. A call is a message and an answer. Local memory is on the
//! other machine; the bytes that matter are copied along.

mod calls;
#[expect(dead_code, reason = "answers are encoded in the other program, `initiators`")]
mod words;

use std::cell::RefCell;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Identity, Limits, LocalKey, LocalSlice, Memory, PostError, Region,
    Verb, Work,
};
use calls::{CONNECT, IS_BROKEN, POLL, POST, RECEIVE, REGISTER};
use words::{Message, call};

/// An endpoint that another machine holds for this one.
#[derive(Debug)]
pub struct RemoteEndpoint {
    stream: RefCell<TcpStream>,
    limits: Limits,
    regions: Vec<Region>,
    /// The local memories by key. The other machine has memories of the same lengths.
    locals: Vec<(LocalKey, Arc<Memory>)>,
}

/// Makes the machine at `initiators` connect to the target at `address`.
pub fn connect(
    initiators: SocketAddr,
    address: SocketAddr,
    who: Identity,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    let stream = TcpStream::connect(initiators).expect("the other machine listens");
    stream.set_nodelay(true).expect("a socket");
    let mut ask = Message::of(CONNECT);
    ask.text(&address.to_string());
    ask.identity(who);
    let stream = RefCell::new(stream);
    let mut answer = call(&stream, &ask);
    answer.outcome()?;
    let limits = answer.read_limits();
    let regions = (0..answer.read()).map(|_| answer.read_region()).collect();
    Ok(Box::new(RemoteEndpoint { stream, limits, regions, locals: Vec::new() }))
}

impl RemoteEndpoint {
    /// The memory that a slice names, if the slice is inside it.
    fn local(&self, slice: LocalSlice) -> Option<&Arc<Memory>> {
        let (_, memory) = self.locals.iter().find(|(key, _)| *key == slice.key)?;
        let end = slice.offset.checked_add(u64::from(slice.len))?;
        (end <= memory.len() as u64).then_some(memory)
    }

    fn source(&self, verb: &Verb) -> Vec<u8> {
        let (Verb::Write { local, .. } | Verb::Send { local }) = *verb else { return Vec::new() };
        let Some(memory) = self.local(local) else { return Vec::new() };
        let mut bytes = vec![0; local.len as usize];
        memory.read(usize::try_from(local.offset).expect("inside"), &mut bytes);
        bytes
    }
}

impl Endpoint for RemoteEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let mut ask = Message::of(POST);
        ask.put(batch.len() as u64);
        for work in batch {
            ask.work(work);
            ask.bytes(&self.source(&work.verb));
        }
        let accepted = usize::try_from(call(&self.stream, &ask).read()).expect("a number of works");
        if accepted == batch.len() { Ok(()) } else { Err(PostError::QueueFull { accepted }) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut ask = Message::of(POLL);
        ask.put(max as u64);
        let mut answer = call(&self.stream, &ask);
        for _ in 0..answer.read() {
            let slice = answer.read_slice();
            let bytes = answer.read_bytes();
            if let Some(memory) = self.local(slice) {
                memory.write(usize::try_from(slice.offset).expect("inside"), bytes);
            }
        }
        let count = usize::try_from(answer.read()).expect("a number of completions");
        out.extend((0..count).map(|_| answer.read_completion()));
        count
    }

    fn register_local(&mut self, memory: Arc<Memory>) -> Result<LocalKey, EndpointError> {
        let mut ask = Message::of(REGISTER);
        ask.put(memory.len() as u64);
        let mut answer = call(&self.stream, &ask);
        answer.outcome()?;
        let key = LocalKey(u32::try_from(answer.read()).expect("a local key"));
        self.locals.push((key, memory));
        Ok(key)
    }

    fn receive(&mut self, out: &mut Vec<u8>) -> bool {
        let mut answer = call(&self.stream, &Message::of(RECEIVE));
        let is_there = answer.read() != 0;
        out.extend_from_slice(answer.read_bytes());
        is_there
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn is_broken(&self) -> bool {
        call(&self.stream, &Message::of(IS_BROKEN)).read() != 0
    }
}
