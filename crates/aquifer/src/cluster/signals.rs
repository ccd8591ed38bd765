//! Request to stop a daemon: SIGTERM or SIGINT, read from a signalfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::thread;

use rustix::event::{PollFd, PollFlags};

/// Descriptor that becomes readable when the daemon receives SIGTERM or SIGINT.
#[derive(Debug)]
pub struct StopSignal {
    descriptor: OwnedFd,
}

impl StopSignal {
    /// Blocks the signals, so that they arrive at the descriptor only.
    ///
    /// Must be called before the first thread starts: threads inherit the blocked signals.
    ///
    /// # Errors
    /// If the system has no descriptor.
    pub fn install() -> io::Result<Self> {
        // SAFETY: an all-zero sigset_t is a valid object, which sigemptyset then initialises.
        let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is valid and the signals exist.
        let descriptor = unsafe {
            libc::sigemptyset(&raw mut signals);
            libc::sigaddset(&raw mut signals, libc::SIGTERM);
            libc::sigaddset(&raw mut signals, libc::SIGINT);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
            libc::signalfd(-1, &raw const signals, libc::SFD_CLOEXEC)
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just opened and has no other owner.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Self { descriptor })
    }

    /// Calls `stop` on a thread of its own when a signal arrives.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn on_stop(self, stop: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let wait = move || {
            // If waiting fails the daemon stops as well: it must not run without a way to stop it.
            let _failed = wait(self.descriptor.as_fd());
            stop();
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn wait(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            waited => return Ok(waited.map(drop)?),
        }
    }
}
