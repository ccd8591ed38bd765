//! Waking a thread that waits for descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

/// A descriptor that is readable from [`Self::wake`] to [`Self::clear`].
#[derive(Debug)]
pub struct WakeFd(OwnedFd);

impl WakeFd {
    /// One that is not readable yet.
    ///
    /// # Errors
    /// If there is no descriptor for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wakes whoever waits.
    pub fn wake(&self) {
        // Writing to an eventfd fails only when its count is full, and then it is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it unreadable. That it was so already is fine.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
