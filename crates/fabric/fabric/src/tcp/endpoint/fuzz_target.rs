//! The fuzz target for the bytes that a target sends to an initiator.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::RecvFlags;

use super::*;
use crate::tcp::wire::AnswerHead;
use crate::work::{Key, LocalKey};

const MEMORY_BYTES: usize = 4096;
/// Bytes of the memory that no READ may write.
const UNTOUCHED: u8 = 0xA5;
/// The destinations of READs in the memory. The second one is padded on the wire.
const READS: [(u64, u32); 3] = [(64, 16), (128, 100), (1024, 2048)];
/// Numbers of the READs among the operations.
const READ_IDS: [u64; 3] = [0, 2, 3];
const MESSAGE_BYTES_MAX: u32 = 64;
const RECEIVE_DEPTH: usize = 4;

/// The state of an endpoint after it has handled its input.
struct Received {
    done: Vec<Completion>,
    messages: Vec<Vec<u8>>,
    memory: Vec<u8>,
    has_farewell: bool,
    is_violated: bool,
}

impl Received {
    /// The bytes of READ number `at`, if it has succeeded. The destination of a failed READ may
    /// have any bytes.
    fn read(&self, at: usize) -> Option<&[u8]> {
        let (offset, len) = READS[at];
        let is_done = |done: &&Completion| done.id == READ_IDS[at] && done.outcome == Ok(len.into());
        let start = usize::try_from(offset).ok()?;
        self.done.iter().find(is_done).map(|_| &self.memory[start..start + len as usize])
    }

    #[track_caller]
    fn assert_same(&self, other: &Self, difference: &str) {
        assert_eq!(self.done, other.done, "{difference}");
        assert_eq!(self.messages, other.messages, "{difference}");
        assert_eq!(self.has_farewell, other.has_farewell, "{difference}");
        assert_eq!(self.is_violated, other.is_violated, "{difference}");
        for at in 0..READS.len() {
            assert_eq!(self.read(at), other.read(at), "READ {at}: {difference}");
        }
    }
}

pub(super) fn endpoint(memory: &Arc<Memory>) -> (TcpEndpoint, UnixStream) {
    let (near, far) = UnixStream::pair().expect("the system has descriptors");
    let limits = Limits {
        queue_depth: 16,
        transfer_bytes_max: 4096,
        message_bytes_max: MESSAGE_BYTES_MAX,
        receive_depth: RECEIVE_DEPTH,
        local_regions_max: 1,
    };
    let welcome = Welcome { session: [0; 16], done: 0, encrypt: false, limits, regions: Vec::new() };
    let who = Identity { host: crate::Host(1), epoch: 1, tenant: crate::Tenant(1) };
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let credential = Credential::Member(ClusterKey([0; 32]));
    let parts = (address, credential, who, ConnectOptions::default());
    let mut endpoint = TcpEndpoint::over(TcpStream::from(OwnedFd::from(near)), None, welcome, parts);
    endpoint.locals.add(Arc::clone(memory), 1).expect("the memory is the first");
    let remote = RemoteAddr { addr: 0, key: Key(1) };
    let read = |(offset, len)| Verb::Read { local: LocalSlice { key: LocalKey(1), offset, len }, remote };
    let verbs = [
        read(READS[0]),
        Verb::FetchAdd { remote, add: 1 },
        read(READS[1]),
        read(READS[2]),
        Verb::CompareSwap { remote, expected: 1, desired: 2 },
    ];
    for (verb, id) in verbs.into_iter().zip(0..) {
        endpoint.pending.push_back(PendingWork { work: Work { id, verb, signalled: true }, outcome: None });
    }
    (endpoint, far)
}

pub(super) fn fresh_memory() -> Arc<Memory> {
    let memory = Memory::private("fuzz", MEMORY_BYTES).expect("the system has memory");
    memory.write(0, &[UNTOUCHED; MEMORY_BYTES]);
    Arc::new(memory)
}

fn received(endpoint: &TcpEndpoint, memory: &Memory, is_violated: bool) -> Received {
    let mut bytes = vec![0; MEMORY_BYTES];
    memory.read(0, &mut bytes);
    Received {
        done: endpoint.done.iter().copied().collect(),
        messages: endpoint.messages.iter().cloned().collect(),
        memory: bytes,
        has_farewell: endpoint.has_farewell,
        is_violated,
    }
}

/// Handles the bytes as they would arrive from a socket.
fn from_socket(bytes: &[u8]) -> Received {
    use std::io::Write;
    let memory = fresh_memory();
    let (mut endpoint, mut far) = endpoint(&memory);
    far.write_all(bytes).expect("the socket has room");
    let is_empty = |stream: &TcpStream| {
        rustix::net::recv(stream, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK).is_err()
    };
    let mut is_violated = false;
    while !is_violated && !is_empty(&endpoint.stream) {
        is_violated = endpoint.receive_some();
    }
    received(&endpoint, &memory, is_violated)
}

/// Handles the bytes in the given parts.
fn from_parts(parts: [&[u8]; 2]) -> Received {
    let memory = fresh_memory();
    let (mut endpoint, _far) = endpoint(&memory);
    let mut input = Vec::new();
    for part in parts {
        input.extend_from_slice(part);
        match endpoint.handle_answers(&input) {
            Some(used) => drop(input.drain(..used)),
            None => return received(&endpoint, &memory, true),
        }
    }
    received(&endpoint, &memory, false)
}

/// Handles the bytes of a target, in three ways that must agree.
///
/// The first byte selects where the input is cut. Returns whether all of it follows the protocol.
///
/// # Panics
/// If a check fails.
pub fn handle(bytes: &[u8]) -> bool {
    let Some((cut, bytes)) = bytes.split_first() else { return false };
    let (first, rest) = bytes.split_at(usize::from(*cut).min(bytes.len()));
    let whole = from_parts([bytes, &[]]);
    from_parts([first, rest]).assert_same(&whole, "in two parts, and at once");
    let direct = from_socket(bytes);
    // Bytes that are received directly may be in place although an error follows.
    if !whole.is_violated {
        direct.assert_same(&whole, "from a socket, and as one buffer");
    }
    assert!(whole.messages.len() <= RECEIVE_DEPTH);
    assert!(whole.messages.iter().all(|message| message.len() <= MESSAGE_BYTES_MAX as usize));
    for received in [&whole, &direct] {
        for (at, byte) in received.memory.iter().enumerate() {
            let is_read =
                |(offset, len): &(u64, u32)| (*offset..offset + u64::from(*len)).contains(&(at as u64));
            assert!(*byte == UNTOUCHED || READS.iter().any(is_read), "byte {at} was written");
        }
    }
    !whole.is_violated
}

/// Bytes that a target may send.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let answer = |outcome, data: &[u8]| {
        let len = u32::try_from(data.len()).expect("the data is short");
        let mut bytes = AnswerHead::new(wire::ANSWER, outcome, len).as_bytes().to_vec();
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    };
    let read = |len: u8| answer(Ok(u64::from(len)), &vec![7; usize::from(len)]);
    let message = |len: u8| {
        let head = AnswerHead::new(wire::MESSAGE, Ok(0), len.into());
        [head.as_bytes(), &vec![9; usize::from(len).next_multiple_of(8)]].concat()
    };
    let farewell = AnswerHead::new(wire::FAREWELL, Ok(1), 0).as_bytes().to_vec();
    let failed = |error| answer(Err(error), &[]);
    vec![
        ("answers", [&[20], &read(16)[..], &answer(Ok(5), &[]), &read(100)].concat()),
        ("errors", [&[9], &failed(WorkError::RemoteAccess)[..], &failed(WorkError::Fenced)].concat()),
        ("messages", [&[30], &message(5)[..], &read(16), &message(64)].concat()),
        ("farewell", [&[0], &read(16)[..], &farewell].concat()),
    ]
}
