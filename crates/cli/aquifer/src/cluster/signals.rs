//! Requests to stop a daemon: SIGTERM or SIGINT, read from a signalfd, or a deleted lock file.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::daemon::Daemon;
use super::lock::{EndingMark, FileLock, LockWatch};

/// A request to stop a daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopRequest {
    /// The daemon received SIGTERM or SIGINT.
    Now,
    /// The daemon's lock file was deleted, so `aquifer down` cannot find the daemon. It must serve
    /// its present users, and end after them.
    WhenUnused,
}

/// Descriptors that become readable when the daemon is to stop.
#[derive(Debug)]
pub struct StopSignal {
    descriptor: OwnedFd,
    lock: Option<(Daemon, LockWatch)>,
    ending: Option<EndingMark>,
}

impl StopSignal {
    /// Blocks the signals, so that they arrive at the descriptor only.
    ///
    /// Must be called before the first thread starts: threads inherit the blocked signals.
    ///
    /// # Errors
    /// If the system has no descriptor.
    pub fn install() -> io::Result<Self> {
        Self::install_with(&[])
    }

    /// Does the same as [`Self::install`], and treats signals in `more` as requests to stop, too.
    ///
    /// # Errors
    /// If the system has no descriptor.
    pub fn install_with(more: &[Signal]) -> io::Result<Self> {
        // SAFETY: an all-zero sigset_t is a valid object, which sigemptyset then initialises.
        let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is valid and the signals exist.
        let descriptor = unsafe {
            libc::sigemptyset(&raw mut signals);
            libc::sigaddset(&raw mut signals, libc::SIGTERM);
            libc::sigaddset(&raw mut signals, libc::SIGINT);
            for signal in more {
                libc::sigaddset(&raw mut signals, signal.as_raw());
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
            libc::signalfd(-1, &raw const signals, libc::SFD_CLOEXEC)
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened and has no other owner.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Self { descriptor, lock: None, ending: None })
    }

    /// Also watches the daemon's lock file, and writes there when the daemon is asked to stop. A
    /// failure is logged.
    pub fn watch_lock(&mut self, daemon: Daemon, lock: &FileLock) {
        match lock.ending_mark() {
            Ok(ending) => self.ending = Some(ending),
            Err(error) => {
                tracing::warn!(%daemon, %error, "the lock file will not show that this process ends")
            }
        }
        match lock.watch() {
            Ok(watch) => self.lock = Some((daemon, watch)),
            Err(error) => {
                tracing::warn!(%daemon, %error, "cannot watch the lock file; its deletion goes unnoticed");
            }
        }
    }

    /// Waits for the next request; returns `None` after `timeout`.
    ///
    /// If waiting fails the request is [`StopRequest::Now`]: a daemon must not run without a way to
    /// stop it.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Option<StopRequest> {
        self.wait_or(&[], timeout)
    }

    /// Does the same as [`Self::wait`], and also returns `None` when one of `others` is readable.
    pub fn wait_or(&mut self, others: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Option<StopRequest> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        loop {
            // The file may have been deleted before it was watched.
            if let Some((daemon, _)) = self.lock.take_if(|(_, watch)| watch.is_deleted()) {
                tracing::warn!(
                    %daemon,
                    "the lock file of this daemon was deleted; ending when no process uses it any more"
                );
                return Some(StopRequest::WhenUnused);
            }
            let mut entries = vec![PollFd::new(&self.descriptor, PollFlags::IN)];
            entries.extend(others.iter().map(|other| PollFd::from_borrowed_fd(*other, PollFlags::IN)));
            entries.extend(self.lock.iter().map(|(_, watch)| PollFd::new(watch, PollFlags::IN)));
            match rustix::event::poll(&mut entries, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) => return None,
                Ok(_) if entries[0].revents().is_empty() => {
                    if entries[1..=others.len()].iter().any(|other| !other.revents().is_empty()) {
                        return None;
                    }
                }
                Ok(_) | Err(_) => {
                    self.ending.iter().for_each(EndingMark::write);
                    return Some(StopRequest::Now);
                }
            }
        }
    }

    /// Removes the signal that was found, so that the next one is found, too. Returns false if that
    /// fails.
    fn consume_signal(&self) -> bool {
        let mut signal = [0; size_of::<libc::signalfd_siginfo>()];
        rustix::io::read(&self.descriptor, &mut signal).is_ok()
    }

    /// Calls `handle` for each request on a thread of its own. A request to stop now may come
    /// again.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn on_request(mut self, mut handle: impl FnMut(StopRequest) + Send + 'static) -> io::Result<()> {
        let wait = move || {
            while let Some(request) = self.wait(None) {
                handle(request);
                if request == StopRequest::Now && !self.consume_signal() {
                    return;
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }
}
