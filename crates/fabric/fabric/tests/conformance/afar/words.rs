//! The messages between the two machines: words of 8 bytes, and bytes with their length. Both
//! programs use this module.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::TcpStream;

use aquifer_fabric::handshake::{Refusal, RefusalCode};
use aquifer_fabric::{
    Completion, EndpointError, Host, Identity, Key, Limits, LocalKey, LocalSlice, Region, RemoteAddr, Tenant,
    Verb, Work, WorkError,
};

const REFUSALS: [RefusalCode; 8] = [
    RefusalCode::Other,
    RefusalCode::GoingAway,
    RefusalCode::TryAgain,
    RefusalCode::Fenced,
    RefusalCode::NoRoom,
    RefusalCode::SessionEnded,
    RefusalCode::WrongKey,
    RefusalCode::TicketExpired,
];

const ERRORS: [WorkError; 9] = [
    WorkError::RemoteAccess,
    WorkError::LocalAccess,
    WorkError::Misaligned,
    WorkError::TooLong,
    WorkError::ReceiverNotReady,
    WorkError::Fenced,
    WorkError::PeerGone,
    WorkError::Timeout,
    WorkError::Flushed,
];

/// A message, which is read in the order in which it was written.
#[derive(Debug, Default)]
pub struct Message {
    bytes: Vec<u8>,
    taken: usize,
}

/// Sends a message and receives the answer.
pub fn call(stream: &RefCell<TcpStream>, ask: &Message) -> Message {
    let mut stream = stream.borrow_mut();
    ask.write(&mut *stream).expect("the other machine receives");
    Message::receive(&mut *stream).expect("the other machine answers")
}

impl Message {
    pub fn of(word: u64) -> Self {
        let mut message = Self::default();
        message.put(word);
        message
    }

    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&[&(self.bytes.len() as u64).to_le_bytes(), &self.bytes[..]].concat())
    }

    pub fn receive(from: &mut impl Read) -> io::Result<Self> {
        let mut len = [0; 8];
        from.read_exact(&mut len)?;
        let mut bytes = vec![0; usize::try_from(u64::from_le_bytes(len)).expect("a length")];
        from.read_exact(&mut bytes)?;
        Ok(Self { bytes, taken: 0 })
    }

    pub fn put(&mut self, word: u64) {
        self.bytes.extend_from_slice(&word.to_le_bytes());
    }

    pub fn read(&mut self) -> u64 {
        let word = self.bytes[self.taken..self.taken + 8].try_into().expect("8 bytes");
        self.taken += 8;
        u64::from_le_bytes(word)
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.put(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    pub fn read_bytes(&mut self) -> &[u8] {
        let len = self.read_usize();
        self.taken += len;
        &self.bytes[self.taken - len..self.taken]
    }

    pub fn read_usize(&mut self) -> usize {
        usize::try_from(self.read()).expect("a length")
    }

    fn read_u32(&mut self) -> u32 {
        u32::try_from(self.read()).expect("a short number")
    }

    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub fn read_text(&mut self) -> String {
        String::from_utf8_lossy(self.read_bytes()).into_owned()
    }

    pub fn identity(&mut self, who: Identity) {
        [u64::from(who.host.0), who.epoch, u64::from(who.tenant.0)]
            .into_iter()
            .for_each(|word| self.put(word));
    }

    pub fn read_identity(&mut self) -> Identity {
        let host = Host(u16::try_from(self.read()).expect("a host"));
        let epoch = self.read();
        let tenant = self.read().try_into().map(Tenant).expect("a tenant");
        Identity { host, epoch, tenant }
    }

    pub fn limits(&mut self, limits: &Limits) {
        let Limits { queue_depth, transfer_bytes_max, message_bytes_max, receive_depth, local_regions_max } =
            *limits;
        for number in [queue_depth, receive_depth, local_regions_max] {
            self.put(number as u64);
        }
        self.put(transfer_bytes_max.into());
        self.put(message_bytes_max.into());
    }

    pub fn read_limits(&mut self) -> Limits {
        let [queue_depth, receive_depth, local_regions_max] = [(); 3].map(|()| self.read_usize());
        let [transfer_bytes_max, message_bytes_max] = [(); 2].map(|()| self.read_u32());
        Limits { queue_depth, transfer_bytes_max, message_bytes_max, receive_depth, local_regions_max }
    }

    pub fn region(&mut self, region: &Region) {
        [region.base, region.len, region.key.0.into()].into_iter().for_each(|word| self.put(word));
    }

    pub fn read_region(&mut self) -> Region {
        let [base, len] = [(); 2].map(|()| self.read());
        Region { base, len, key: Key(self.read_u32()) }
    }

    pub fn slice(&mut self, slice: LocalSlice) {
        [slice.key.0.into(), slice.offset, slice.len.into()].into_iter().for_each(|word| self.put(word));
    }

    pub fn read_slice(&mut self) -> LocalSlice {
        let key = LocalKey(self.read_u32());
        LocalSlice { key, offset: self.read(), len: self.read_u32() }
    }

    fn remote(&mut self, remote: RemoteAddr) {
        self.put(remote.addr);
        self.put(remote.key.0.into());
    }

    fn read_remote(&mut self) -> RemoteAddr {
        RemoteAddr { addr: self.read(), key: Key(self.read_u32()) }
    }

    pub fn work(&mut self, work: &Work) {
        self.put(work.id);
        self.put(work.signalled.into());
        match work.verb {
            Verb::Read { local, remote } => {
                self.put(0);
                self.slice(local);
                self.remote(remote);
            }
            Verb::Write { local, remote } => {
                self.put(1);
                self.slice(local);
                self.remote(remote);
            }
            Verb::CompareSwap { remote, expected, desired } => {
                self.put(2);
                self.remote(remote);
                self.put(expected);
                self.put(desired);
            }
            Verb::FetchAdd { remote, add } => {
                self.put(3);
                self.remote(remote);
                self.put(add);
            }
            Verb::Send { local } => {
                self.put(4);
                self.slice(local);
            }
        }
    }

    pub fn read_work(&mut self) -> Work {
        let (id, signalled) = (self.read(), self.read() != 0);
        let verb = match self.read() {
            0 => Verb::Read { local: self.read_slice(), remote: self.read_remote() },
            1 => Verb::Write { local: self.read_slice(), remote: self.read_remote() },
            2 => {
                let remote = self.read_remote();
                Verb::CompareSwap { remote, expected: self.read(), desired: self.read() }
            }
            3 => Verb::FetchAdd { remote: self.read_remote(), add: self.read() },
            _ => Verb::Send { local: self.read_slice() },
        };
        Work { id, verb, signalled }
    }

    pub fn completion(&mut self, done: &Completion) {
        self.put(done.id);
        match done.outcome {
            Ok(value) => {
                self.put(ERRORS.len() as u64);
                self.put(value);
            }
            Err(error) => {
                let at = ERRORS.iter().position(|known| *known == error);
                self.put(at.expect("all are known") as u64);
                self.put(0);
            }
        }
    }

    pub fn read_completion(&mut self) -> Completion {
        let (id, kind, value) = (self.read(), self.read_usize(), self.read());
        Completion { id, outcome: ERRORS.get(kind).map_or(Ok(value), |error| Err(*error)) }
    }

    /// Appends the reason why an endpoint could not connect, or success.
    pub fn failure<T>(&mut self, outcome: &Result<T, EndpointError>) {
        match outcome {
            Ok(_) => self.put(0),
            Err(EndpointError::Refused { refusal, .. }) => {
                self.put(1);
                self.put(refusal.code as u64);
                self.text(&refusal.reason);
            }
            Err(EndpointError::TooManyLocal { limit }) => {
                self.put(2);
                self.put(*limit as u64);
            }
            Err(error) => {
                self.put(3);
                self.text(&error.to_string());
            }
        }
    }

    pub fn outcome(&mut self) -> Result<(), EndpointError> {
        let address = String::from("the target");
        match self.read() {
            0 => Ok(()),
            1 => {
                let (code, reason) = (self.read(), self.read_text());
                let code =
                    REFUSALS.into_iter().find(|known| *known as u64 == code).expect("the code is known");
                Err(EndpointError::Refused { address, refusal: Refusal { code, reason } })
            }
            2 => Err(EndpointError::TooManyLocal { limit: self.read_usize() }),
            _ => Err(EndpointError::Unreachable { address, source: io::Error::other(self.read_text()) }),
        }
    }
}
