//! A descriptor that wakes a thread waiting in poll or epoll.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

/// An eventfd that is readable from [`Self::wake`] until [`Self::clear`].
#[derive(Debug)]
pub struct WakeFd(OwnedFd);

impl WakeFd {
    /// Creates a descriptor that is not readable yet.
    ///
    /// # Errors
    /// If the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wakes a waiting thread.
    pub fn wake(&self) {
        // Writing to an eventfd fails only when its count is full, and then it is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable. Does nothing if it already is.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
