//! The page faults of a program's segment, and the threads that serve them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use aquifer_arena::PageFaults;
use aquifer_channel::descriptor_shares::THREAD_DESCRIPTORS;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::shared::HostShared;
use super::{SegmentError, SegmentKey};

/// The faults of one mapping while they are served. Its threads end after this is dropped.
///
/// The last close of a userfaultfd waits for the lock of its memory, which a hostile program can
/// hold for ever. So the thread that serves the faults has a reference until it must stop, and a
/// drop of this value is never the last close.
#[derive(Debug)]
pub(super) struct ServedFaults {
    /// The userfaultfd; `None` only during the drop.
    faults: Option<Arc<PageFaults>>,
    stop: Arc<OwnedFd>,
}

impl ServedFaults {
    fn new(faults: PageFaults) -> Result<Self, SegmentError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| SegmentError::Thread(error.into()))?;
        Ok(Self { faults: Some(Arc::new(faults)), stop: Arc::new(stop) })
    }

    /// Returns a reference to the faults. The caller must hold no lock when it drops it.
    pub(super) fn faults(&self) -> Option<Arc<PageFaults>> {
        self.faults.clone()
    }

    /// Wakes all waiting threads of the program, so that they fault again.
    pub(super) fn wake_all(&self) {
        // Fails if the program has ended.
        let _has_ended = self.faults.as_ref().map(|faults| faults.wake_all());
    }

    fn start(&self, host: &Arc<HostShared>, segment: SegmentKey, pulls: bool) -> Result<(), SegmentError> {
        self.spawn("segment-faults", host, segment, move |host, faults, stop| {
            serve(host, segment, faults, stop);
            wait_until_readable(stop);
        })?;
        if pulls {
            self.spawn("segment-pull", host, segment, move |host, faults, stop| {
                pull_ahead(host, segment, faults, stop);
            })?;
        }
        Ok(())
    }

    fn spawn(
        &self,
        name: &str,
        host: &Arc<HostShared>,
        segment: SegmentKey,
        run: impl FnOnce(&HostShared, &PageFaults, &OwnedFd) + Send + 'static,
    ) -> Result<(), SegmentError> {
        let Some(faults) = self.faults() else { return Ok(()) };
        let stop = Arc::clone(&self.stop);
        let (host, charge) =
            (Arc::clone(host), host.memories.descriptors().charge(segment.tenant, THREAD_DESCRIPTORS)?);
        let serve = move || {
            run(&host, &faults, &stop);
            // This may be the last close. The thread is charged until the close has returned.
            drop(faults);
            drop(charge);
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(serve).map(drop).map_err(SegmentError::Thread)
    }
}

impl Drop for ServedFaults {
    /// Stops the threads, but does not wait for their end: a hostile program can delay it.
    fn drop(&mut self) {
        // Before the thread is stopped, because its reference must be the last one.
        self.faults.take();
        let written = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        debug_assert!(written.is_ok(), "a counter can be incremented");
    }
}

/// Whether a descriptor of a program is a userfaultfd. A read of another one could block for ever.
fn is_userfaultfd(fd: &OwnedFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
}

fn wait_until_readable(fd: &OwnedFd) {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}

/// Pulls each page that a thread of the program touches, until `stop` is readable or the program
/// has ended.
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
        let began = Instant::now();
        match host.demand(segment, &pages) {
            Ok(true) => host.statistics.waits.record(began.elapsed()),
            // A wait for a READ of another thread is not recorded. If the segment was handed over,
            // the mapping is gone, and no thread waits in it.
            Ok(false) | Err(SegmentError::NotOwned(_)) => {}
            Err(error) => {
                tracing::error!(%segment, ?pages, %error, "pages of a segment are lost: access is SIGBUS");
            }
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
            // The page stays lost: the program receives SIGBUS if it touches the page.
            Err(error) => return tracing::error!(%segment, %error, "cannot pull all pages of a segment"),
        }
    }
}

impl HostShared {
    /// Starts to serve the faults of a mapping, and stops serving an earlier one. With `pulls`, all
    /// pages are pulled ahead of the program; after that, its accesses do not fault any more.
    pub(super) fn serve_faults(
        self: &Arc<Self>,
        segment: SegmentKey,
        uffd: OwnedFd,
        pulls: bool,
    ) -> Result<(), SegmentError> {
        if !is_userfaultfd(&uffd) {
            return Err(SegmentError::Thread(io::Error::other("the descriptor is no userfaultfd")));
        }
        let entry = self.segments.get(segment);
        let entry = entry.ok_or(SegmentError::NotOwned(segment))?;
        let (address, bytes) = entry.lock().place().ok_or(SegmentError::NotOwned(segment))?;
        let served = ServedFaults::new(PageFaults::new(uffd, address, bytes))?;
        let mut entry = entry.lock();
        if !entry.may_serve() {
            return Err(SegmentError::NotOwned(segment));
        }
        // The threads wait for the segment's lock. When they get it, `served` is set, so that the
        // pages that they pull are mapped in the program.
        served.start(self, segment, pulls)?;
        // An earlier process of the agent may have read faults of waiting threads and not served
        // them.
        served.wake_all();
        entry.served = Some(served);
        entry.is_arming = false;
        entry.pulled.notify_all();
        Ok(())
    }

    /// Whether the faults of a segment may be served for a process.
    pub(super) fn may_serve(&self, segment: SegmentKey, process: &str) -> bool {
        let entry = self.segments.get(segment);
        entry.is_some_and(|entry| {
            let entry = entry.lock();
            entry.may_serve() && entry.process == process
        })
    }

    /// Stops serving the faults of a segment.
    pub(super) fn end_faults(&self, segment: SegmentKey) {
        if let Some(entry) = self.segments.get(segment) {
            entry.lock().served = None;
        }
    }
}
