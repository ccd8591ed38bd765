//! Serves the faults of a program in which pages of a segment are missing.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_arena::PageFaults;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::{SegmentError, SegmentHost, SegmentKey};

/// A request to stop, for threads that wait for faults.
#[derive(Debug)]
pub struct StopEvent {
    is_requested: AtomicBool,
    event: OwnedFd,
}

impl StopEvent {
    /// An event that has not happened.
    ///
    /// # Errors
    /// If there is no descriptor for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { is_requested: AtomicBool::new(false), event: eventfd(0, EventfdFlags::CLOEXEC)? })
    }

    /// Requests all threads to stop.
    pub fn request(&self) {
        self.is_requested.store(true, Ordering::SeqCst);
        let written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        debug_assert!(written.is_ok(), "a counter can be incremented");
    }

    /// Whether the threads are to stop.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::SeqCst)
    }
}

/// Pulls each page that a thread of the program touches, until `stop`, or until the program has
/// ended.
pub fn serve(host: &SegmentHost, segment: SegmentKey, faults: &PageFaults, stop: &StopEvent) {
    let mut pages = Vec::new();
    while !stop.is_requested() {
        let ready =
            poll(&mut [PollFd::new(faults, PollFlags::IN), PollFd::new(&stop.event, PollFlags::IN)], None);
        match ready {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        if faults.read(&mut pages).is_err() {
            return;
        }
        for page in pages.drain(..) {
            let served = match host.pull(segment, page) {
                Ok(()) => faults.resume(page),
                Err(error @ SegmentError::Lost { .. }) => {
                    tracing::error!(%error, "a program gets SIGBUS");
                    faults.poison(page)
                }
                // It was handed over: the mapping is gone, and with it those that waited.
                Err(_) => Ok(()),
            };
            if let Err(error) = served {
                tracing::debug!(%error, page, "a page of a segment is not where it was touched");
            }
        }
    }
}
