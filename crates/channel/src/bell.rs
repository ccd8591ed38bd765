//! Waiting for the other side of a ring. Who has looked in vain for a moment sleeps at the session's socket, where the other side rings: so
//! its end is noticed there, too.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// What wakes who sleeps: a packet of one byte.
const STROKE: [u8; 1] = [0];
/// Longer packets are cut; nobody sends any to a session.
const PACKET_BYTES_MAX: usize = 4096;

/// Look again and again, letting others run, for so long; whether it was found.
pub fn look(limit: Duration, mut is_there: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if is_there() {
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

/// Wake the other side. If there is no room for a stroke there are others, which it has not heard yet; if it is gone, who waits for it finds out.
pub fn ring(socket: impl AsFd) {
    while send(&socket, &STROKE, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) == Err(Errno::INTR) {}
}

/// What was heard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// Nothing.
    Nothing,
    /// The other side rings.
    Stroke,
    /// A packet of other bytes: a frame, perhaps.
    Packet(Vec<u8>),
    /// The other side is gone.
    End,
}

/// Sleep until something is heard, or `other` can be read, or for so long.
pub fn sleep(socket: BorrowedFd<'_>, other: Option<BorrowedFd<'_>>, patience: Duration) {
    let entry = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    let mut entries = [entry(socket), entry(other.unwrap_or(socket))];
    let patience = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    // Whoever sleeps looks again afterwards, whatever woke him.
    let _woken = poll(&mut entries, Some(&patience));
}

/// Hear one packet, without waiting.
pub fn hear(socket: impl AsFd) -> Heard {
    let mut bytes = [0; PACKET_BYTES_MAX];
    match recv(&socket, &mut bytes, RecvFlags::DONTWAIT) {
        Ok((0, _)) => Heard::End,
        Ok((1, _)) => Heard::Stroke,
        Ok((length, _)) => Heard::Packet(bytes[..length].to_vec()),
        Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
        Err(_) => Heard::End,
    }
}
