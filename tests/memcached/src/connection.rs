//! A connection that sends a batch and reads until the end of its replies.
//!
//! The end is found by a request after the batch, whose reply is unique, or by the end of the
//! stream. It is never found by a timeout.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::escape::escape;

/// The time without progress of a server after which its connection has stalled.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of empty lines that complete a value. A server answers the surplus lines with errors.
pub const FILL_LINES: usize = 600;
/// Most bytes that one call receives.
const READ_BYTES: usize = 64 << 10;

/// The means to find the end of a batch's replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The reply to a last request: a meta get of a key that is in no script, with an opaque that
    /// is new each time. The batch must end where the server awaits a command.
    Sentinel,
    /// A sentinel after [`FILL_LINES`] empty lines, for batches that may end within a value.
    FilledSentinel,
    /// The end of the stream, after the writing side was closed.
    HalfClose,
}

/// The answer of a server to a batch.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Answer {
    /// The bytes, without the reply to the sentinel.
    pub bytes: Vec<u8>,
    /// Whether the server closed the connection.
    pub is_closed: bool,
    /// Whether the server stopped before the end of the batch was found.
    pub is_stalled: bool,
}

/// A connection to a server.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

impl Connection {
    /// Uses a connected socket, which must be non-blocking.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Sends the writes of a batch, and reads the replies meanwhile.
    pub fn exchange(&mut self, writes: &[&[u8]], end: End) -> Answer {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let key = format!("~sentinel-{number}~");
        let sentinel = format!("mg {key} O{number} k\r\n").into_bytes();
        let sentinel_reply = format!("EN O{number} k{key}\r\n").into_bytes();
        let fill = b"\r\n".repeat(FILL_LINES);
        let mut queue: Vec<&[u8]> = writes.to_vec();
        match end {
            End::Sentinel => queue.push(&sentinel),
            End::FilledSentinel => queue.extend([fill.as_slice(), &sentinel]),
            End::HalfClose => {}
        }
        let mut unsent = queue.into_iter().peekable();
        let mut sent_of_first = 0;
        let mut is_write_open = true;
        let mut answer = Answer::default();
        let mut buffer = vec![0; READ_BYTES];
        loop {
            if is_write_open && unsent.peek().is_none() {
                is_write_open = false;
                if end == End::HalfClose {
                    // Fails if the server has closed the connection.
                    let _ = shutdown(&self.socket, Shutdown::Write);
                }
            }
            let ready = self.wait(is_write_open);
            if ready.is_empty() {
                answer.is_stalled = true;
                return answer;
            }
            if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                match recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                    Ok((_, 0)) | Err(Errno::CONNRESET) => {
                        answer.is_closed = true;
                        return answer;
                    }
                    Ok((_, received)) => answer.bytes.extend_from_slice(&buffer[..received]),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(error) => panic!("cannot receive: {error}"),
                }
                if end != End::HalfClose && !is_write_open && answer.bytes.ends_with(&sentinel_reply) {
                    answer.bytes.truncate(answer.bytes.len() - sentinel_reply.len());
                    return answer;
                }
            }
            if is_write_open && ready.contains(PollFlags::OUT) {
                let first = unsent.peek().expect("the writing side is open while writes are unsent");
                match send(&self.socket, &first[sent_of_first..], SendFlags::NOSIGNAL) {
                    Ok(sent) => sent_of_first += sent,
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    // The server closed the connection: nothing more can be sent.
                    Err(Errno::PIPE | Errno::CONNRESET) => is_write_open = false,
                    Err(error) => panic!("cannot send: {error}"),
                }
                if sent_of_first == first.len() {
                    unsent.next();
                    sent_of_first = 0;
                    // The server may read the part alone.
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Waits until the server has sent bytes or closed the connection or, if `for_writing`, until
    /// it accepts bytes. Returns no flags if it has stalled.
    fn wait(&self, for_writing: bool) -> PollFlags {
        let wanted = if for_writing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut polled = [PollFd::new(&self.socket, wanted)];
        let seconds = i64::try_from(STALL_TIMEOUT.as_secs()).expect("the timeout is short");
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        loop {
            match poll(&mut polled, Some(&timeout)) {
                Ok(_) => return polled[0].revents(),
                Err(Errno::INTR) => {}
                Err(error) => panic!("cannot poll: {error}"),
            }
        }
    }

    /// Sends requests after which the server awaits a command, and returns its replies.
    ///
    /// # Panics
    /// If the server stalls or closes the connection.
    pub fn request(&mut self, bytes: impl AsRef<[u8]>) -> Vec<u8> {
        let bytes = bytes.as_ref();
        let answer = self.exchange(&[bytes], End::Sentinel);
        let received = escape(&answer.bytes);
        assert!(!answer.is_stalled, "no answer to {} but {received}", escape(bytes));
        assert!(!answer.is_closed, "the server closed the connection after {}: {received}", escape(bytes));
        answer.bytes
    }

    /// Sends bytes and waits until the kernel has accepted all of them.
    ///
    /// # Panics
    /// If the server closed the connection, or stalls.
    pub fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::AGAIN | Errno::INTR) => {
                    assert!(!self.wait(true).is_empty(), "the server accepts nothing more");
                }
                Err(error) => panic!("cannot send: {error}"),
            }
        }
    }

    /// Reads at least one and at most `most` bytes; none at the end of the stream.
    ///
    /// # Panics
    /// If the server stalls.
    pub fn receive(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        loop {
            match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((_, received)) => {
                    bytes.truncate(received);
                    return bytes;
                }
                Err(Errno::CONNRESET) => return Vec::new(),
                Err(Errno::AGAIN | Errno::INTR) => {
                    assert!(!self.wait(false).is_empty(), "the server sends nothing more");
                }
                Err(error) => panic!("cannot receive: {error}"),
            }
        }
    }

    /// Reads this many bytes.
    ///
    /// # Panics
    /// If the stream ends before, or the server stalls.
    pub fn receive_exactly(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            let received = self.receive(length - bytes.len());
            assert!(!received.is_empty(), "the stream ended after {} of {length} bytes", bytes.len());
            bytes.extend(received);
        }
        bytes
    }

    /// Reads up to and including this text.
    ///
    /// # Panics
    /// If the stream ends before, or the server stalls.
    pub fn receive_until(&mut self, end: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        while !bytes.ends_with(end) {
            let received = self.receive(1);
            assert!(!received.is_empty(), "the stream ended after {}", escape(&bytes));
            bytes.extend(received);
        }
        bytes
    }

    /// Waits until the server has sent bytes that were not received.
    ///
    /// # Panics
    /// If the server stalls.
    pub fn wait_for_bytes(&self) {
        assert!(!self.wait(false).is_empty(), "the server sends nothing");
    }
}
