//! Waiting for the other side of a session's ring, and waking it.
//!
//! A side polls the ring for a moment and then sleeps at the session's socket, where it also
//! notices that the other side has closed. The other side wakes it by a packet of one byte.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// The packet that wakes the other side.
const WAKEUP: [u8; 1] = [0];
/// Maximum bytes of a packet to a session. Longer packets are truncated.
const PACKET_BYTES_MAX: usize = 4096;
/// Polls between two reads of the clock.
const POLLS_PER_CLOCK_READ: usize = 64;

/// Polls a condition until it holds, or for `limit`; returns whether it holds.
///
/// Yields the processor between rounds.
pub fn poll_until(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..POLLS_PER_CLOCK_READ {
            if holds() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() >= limit {
            return false;
        }
        std::thread::yield_now();
    }
}

/// Wakes the other side.
///
/// Errors are ignored: if the socket is full, it holds wakeups that the other side has not received
/// yet; if the other side is gone, [`receive`] reports it.
pub fn notify(socket: impl AsFd) {
    while send(&socket, &WAKEUP, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) == Err(Errno::INTR) {}
}

/// The result of [`receive`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WakeupEvent {
    /// No packet is waiting.
    Nothing,
    /// The other side woke this one.
    Wakeup,
    /// Another packet, which may be a frame.
    Packet(Vec<u8>),
    /// The other side has closed the socket.
    Closed,
}

/// Sleeps until the socket or `other` is readable, or for `limit`.
///
/// May return early; the caller must check its condition again.
pub fn wait(socket: BorrowedFd<'_>, other: Option<BorrowedFd<'_>>, limit: Duration) {
    let entry = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut entries = [entry(socket), entry(other.unwrap_or(socket))];
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // The outcome does not matter, because the caller checks its condition.
    let _outcome = poll(&mut entries, Some(&limit));
}

/// Receives one packet without waiting.
pub fn receive(socket: impl AsFd) -> WakeupEvent {
    let mut bytes = [0; PACKET_BYTES_MAX];
    match recv(&socket, &mut bytes, RecvFlags::DONTWAIT) {
        Ok((0, _)) => WakeupEvent::Closed,
        Ok((1, _)) => WakeupEvent::Wakeup,
        Ok((length, _)) => WakeupEvent::Packet(bytes[..length].to_vec()),
        Err(Errno::AGAIN | Errno::INTR) => WakeupEvent::Nothing,
        Err(_) => WakeupEvent::Closed,
    }
}
