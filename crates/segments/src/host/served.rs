//! The faults of a program's segment, and the threads that serve them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use aquifer_arena::PageFaults;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::shared::{HostShared, lock};
use super::{SegmentError, SegmentKey};

/// Faults that are served. Its threads end when it is dropped, which must not be while the segment
/// is locked.
#[derive(Debug)]
pub(super) struct ServedFaults {
    pub faults: Arc<PageFaults>,
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl ServedFaults {
    fn new(faults: PageFaults) -> Result<Self, SegmentError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| SegmentError::Thread(error.into()))?;
        Ok(Self { faults: Arc::new(faults), stop: Arc::new(stop), threads: Vec::new() })
    }

    fn start(
        &mut self,
        host: &Arc<HostShared>,
        segment: SegmentKey,
        pulls: bool,
    ) -> Result<(), SegmentError> {
        self.spawn("segment-faults", host, move |host, faults, stop| serve(host, segment, faults, stop))?;
        if pulls {
            self.spawn("segment-pull", host, move |host, faults, stop| {
                pull_ahead(host, segment, faults, stop);
            })?;
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        name: &str,
        host: &Arc<HostShared>,
        run: impl FnOnce(&HostShared, &PageFaults, &OwnedFd) + Send + 'static,
    ) -> Result<(), SegmentError> {
        let (host, faults, stop) = (Arc::clone(host), Arc::clone(&self.faults), Arc::clone(&self.stop));
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || run(&host, &faults, &stop)).map_err(SegmentError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for ServedFaults {
    fn drop(&mut self) {
        let written = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        debug_assert!(written.is_ok(), "a counter can be incremented");
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "a thread that serves faults of segments panicked");
        }
    }
}

/// Pulls each page that a thread of the program touches, until `stop`, or until the program has
/// ended.
fn serve(host: &HostShared, segment: SegmentKey, faults: &PageFaults, stop: &OwnedFd) {
    let mut pages = Vec::new();
    loop {
        let mut fds = [PollFd::new(faults, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) if !fds[1].revents().is_empty() => return,
            Ok(_) => {}
        }
        if faults.read(&mut pages).is_err() {
            return;
        }
        match host.demand(segment, &pages) {
            // It was handed over: the mapping is gone, and with it those that waited.
            Ok(()) | Err(SegmentError::NotOwned(_)) => {}
            Err(error) => tracing::error!(%error, "a program gets SIGBUS"),
        }
        pages.clear();
    }
}

fn pull_ahead(host: &HostShared, segment: SegmentKey, faults: &PageFaults, stop: &OwnedFd) {
    let is_stopped = || {
        let mut fds = [PollFd::new(stop, PollFlags::IN)];
        poll(&mut fds, Some(&rustix::event::Timespec::default())).is_ok_and(|ready| ready > 0)
    };
    while !is_stopped() {
        match host.pull_ahead(segment) {
            Ok(true) => {}
            Ok(false) => {
                if host.pull_all(segment).is_ok() {
                    let _was_moved = faults.disarm();
                }
                return;
            }
            Err(SegmentError::NotOwned(_)) => return,
            // The page stays lost, and the program learns of it by SIGBUS if it touches it.
            Err(error) => return tracing::error!(%segment, %error, "cannot pull all pages"),
        }
    }
}

impl HostShared {
    /// Serves the faults of a mapping from now on, instead of those of an earlier one. With
    /// `pulls`, all pages are pulled ahead of the program; then its touches are plain again.
    pub(super) fn serve_faults(
        self: &Arc<Self>,
        segment: SegmentKey,
        uffd: OwnedFd,
        pulls: bool,
    ) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let (address, bytes) = lock(&entry).place().ok_or(SegmentError::NotOwned(segment))?;
        let mut served = ServedFaults::new(PageFaults::new(uffd, address, bytes))?;
        let (former, started) = {
            let mut entry = lock(&entry);
            if entry.holder.has_access() {
                // The threads wait for the lock, and then the segment has its faults: what they
                // pull is seen.
                let started = served.start(self, segment, pulls);
                (entry.served.replace(served), started)
            } else {
                (Some(served), Err(SegmentError::NotOwned(segment)))
            }
        };
        drop(former);
        if let Some(served) = &lock(&entry).served {
            // An earlier process of the agent may have read their touches.
            let _has_ended = served.faults.wake_all();
        }
        started.inspect_err(|_| self.end_faults(segment))
    }

    /// Ends the serving of a segment's faults.
    pub(super) fn end_faults(&self, segment: SegmentKey) {
        let entry = lock(&self.segments).get(&segment).cloned();
        let served = entry.and_then(|entry| lock(&entry).served.take());
        drop(served);
    }
}
