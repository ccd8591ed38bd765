//! One connection of the load: sends a batch of requests, and checks the replies.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use super::items::Items;
use super::replies::{self, Reply};

/// First length of the buffer for replies.
const REPLY_BYTES: usize = 64 << 10;

/// A request for one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    Get(u32),
    Set(u32),
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Sent {
    operation: Operation,
    /// The version that was set, or the oldest version that a get may return.
    version: u32,
}

/// Replies by their kind.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    pub hits: u64,
    pub misses: u64,
    pub sets: u64,
    /// Sets that the server has refused.
    pub refused: u64,
}

impl Counts {
    /// Number of all requests.
    pub fn requests(&self) -> u64 {
        self.hits + self.misses + self.sets + self.refused
    }

    /// Adds other counts.
    pub fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.sets += other.sets;
        self.refused += other.refused;
    }
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    written: usize,
    buffer: Vec<u8>,
    /// The part of the buffer with received bytes that are not yet parsed.
    unparsed: std::ops::Range<usize>,
    batch: Vec<Sent>,
    answered: usize,
    /// The replies to the batch.
    counts: Counts,
    /// Keys of the last batch that the server did not have.
    missed: Vec<u32>,
    sent_ms: u32,
}

impl Connection {
    /// A connection over a stream, which must be non-blocking.
    pub fn over(stream: TcpStream) -> Self {
        Self {
            stream,
            request: Vec::new(),
            written: 0,
            buffer: vec![0; REPLY_BYTES],
            unparsed: 0..0,
            batch: Vec::new(),
            answered: 0,
            counts: Counts::default(),
            missed: Vec::new(),
            sent_ms: 0,
        }
    }

    /// The stream.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Prepares a batch of at most `depth` requests, and returns their number. Sets of the keys
    /// that the last batch did not find come first.
    pub fn fill(
        &mut self,
        depth: usize,
        items: &mut Items,
        operations: &mut dyn Iterator<Item = Operation>,
        now_ms: u32,
    ) -> usize {
        self.request.clear();
        self.batch.clear();
        (self.written, self.answered, self.sent_ms) = (0, 0, now_ms);
        self.counts = Counts::default();
        let missed = self.missed.drain(..).map(Operation::Set);
        for operation in missed.chain(operations).take(depth) {
            let version = match operation {
                Operation::Get(key) => items.push_get(key, &mut self.request),
                Operation::Set(key) => items.push_set(key, &mut self.request),
            };
            self.batch.push(Sent { operation, version });
        }
        self.batch.len()
    }

    /// Sends as much of the batch as the socket accepts. Returns true if all of it was sent.
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn write(&mut self) -> Result<bool, String> {
        while self.written < self.request.len() {
            match self.stream.write(&self.request[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(true)
    }

    /// Reads once and checks the replies. Returns true if the batch is complete.
    ///
    /// # Errors
    /// If the connection breaks, or a reply is wrong.
    pub fn read(&mut self, items: &mut Items, sets_missed: bool, now_ms: u32) -> Result<bool, String> {
        match self.stream.read(&mut self.buffer[self.unparsed.end..]) {
            Ok(0) => return Err("the server closed a connection".into()),
            Ok(bytes) => self.unparsed.end += bytes,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error.to_string()),
        }
        while self.answered < self.batch.len() {
            let Some((reply, bytes)) = replies::parse(&self.buffer[self.unparsed.clone()])? else {
                self.make_room();
                return Ok(false);
            };
            let sent = self.batch[self.answered];
            match (sent.operation, reply) {
                (Operation::Get(key), Reply::Value { key: found, value }) => {
                    items.check(key, sent.version, self.sent_ms, (found, value))?;
                    self.counts.hits += 1;
                }
                (Operation::Get(key), Reply::Missing) => {
                    self.counts.misses += 1;
                    if sets_missed {
                        self.missed.push(key);
                    }
                }
                (Operation::Set(key), Reply::Stored | Reply::Refused) => {
                    items.end_set(key, sent.version, now_ms);
                    let counts = &mut self.counts;
                    let count = if reply == Reply::Stored { &mut counts.sets } else { &mut counts.refused };
                    *count += 1;
                }
                (operation, reply) => return Err(format!("{operation:?} got the reply {reply:?}")),
            }
            self.unparsed.start += bytes;
            self.answered += 1;
        }
        if !self.unparsed.is_empty() {
            return Err(format!("{} bytes after the last reply", self.unparsed.len()));
        }
        self.unparsed = 0..0;
        Ok(true)
    }

    /// Counts of the replies to the batch that were received.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Moves the unparsed bytes to the start of the buffer, and enlarges a full buffer.
    fn make_room(&mut self) {
        if self.unparsed.end < self.buffer.len() {
            return;
        }
        let length = self.unparsed.len();
        self.buffer.copy_within(self.unparsed.clone(), 0);
        self.unparsed = 0..length;
        if length == self.buffer.len() {
            self.buffer.resize(2 * length, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::items::{Lengths, Lifetime};
    use super::*;

    /// Sends a batch to a server that replies with `reply`.
    fn exchange(
        operations: &[Operation],
        reply: &[u8],
        sets_missed: bool,
    ) -> (Result<bool, String>, Counts, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let mut items = Items::new(3, Lengths::Fixed(20), Lifetime::Unlimited);
        let mut connection = Connection::over(stream);
        assert_eq!(connection.fill(8, &mut items, &mut operations.iter().copied(), 0), operations.len());
        assert_eq!(connection.write(), Ok(true));
        // A server that closes with unread bytes resets the connection.
        assert!(server.read(&mut [0; 4096]).unwrap() > 0);
        server.write_all(reply).unwrap();
        drop(server);
        let mut read = Ok(false);
        while read == Ok(false) {
            read = connection.read(&mut items, sets_missed, 0);
        }
        (read, connection.counts(), connection)
    }

    #[test]
    fn replies_are_counted_by_their_kind() {
        let operations = [Operation::Get(0), Operation::Set(1), Operation::Set(2)];
        let reply = b"END\r\nSTORED\r\nSERVER_ERROR out of memory\r\n";
        let (read, counts, _) = exchange(&operations, reply, false);
        assert_eq!((read, counts.requests()), (Ok(true), 3));
        assert_eq!(counts, Counts { hits: 0, misses: 1, sets: 1, refused: 1 });
    }

    #[test]
    fn a_missed_key_is_set_by_the_next_batch() {
        let (read, _, mut connection) = exchange(&[Operation::Get(2)], b"END\r\n", true);
        assert_eq!(read, Ok(true));
        let mut items = Items::new(3, Lengths::Fixed(20), Lifetime::Unlimited);
        assert_eq!(connection.fill(8, &mut items, &mut std::iter::empty(), 0), 1);
        assert!(connection.request.starts_with(b"set "));
        assert_eq!(connection.fill(8, &mut items, &mut std::iter::empty(), 0), 0);
    }

    #[test]
    fn wrong_replies_fail() {
        for (operation, reply, what) in [
            (Operation::Get(0), "STORED\r\n", "got the reply"),
            (Operation::Set(0), "END\r\n", "got the reply"),
            (Operation::Set(0), "STORED\r\nEND\r\n", "after the last"),
            (Operation::Get(0), "VALUE x 0 1\r\nx\r\nEND\r\n", "the item of"),
            (Operation::Get(0), "", "closed"),
        ] {
            let (read, _, _) = exchange(&[operation], reply.as_bytes(), false);
            assert!(read.as_ref().is_err_and(|error| error.contains(what)), "{reply}: {read:?}");
        }
    }

    #[test]
    fn a_full_buffer_is_enlarged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut connection = Connection::over(stream);
        connection.unparsed = 10..REPLY_BYTES;
        connection.make_room();
        assert_eq!(
            (connection.unparsed.clone(), connection.buffer.len()),
            (0..REPLY_BYTES - 10, REPLY_BYTES)
        );
        connection.unparsed = 0..REPLY_BYTES;
        connection.make_room();
        assert_eq!((connection.unparsed.clone(), connection.buffer.len()), (0..REPLY_BYTES, 2 * REPLY_BYTES));
    }
}
