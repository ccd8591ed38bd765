//! The faults of a program's segment, and the threads that serve them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use aquifer_arena::PageFaults;
use aquifer_channel::descriptor_shares::THREAD_DESCRIPTORS;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::shared::HostShared;
use super::{SegmentError, SegmentKey};

/// Faults that are served. Its threads end after it is dropped.
///
/// The last close of a userfaultfd waits for the lock of its memory, which a hostile program can
/// hold for ever. So the thread that serves the faults has a reference until it must stop,
/// and a drop of this value is never the last close.
#[derive(Debug)]
pub(super) struct ServedFaults {
    /// `None` only while it is dropped.
    faults: Option<Arc<PageFaults>>,
    stop: Arc<OwnedFd>,
}

impl ServedFaults {
    fn new(faults: PageFaults) -> Result<Self, SegmentError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| SegmentError::Thread(error.into()))?;
        Ok(Self { faults: Some(Arc::new(faults)), stop: Arc::new(stop) })
    }

    /// The faults, for requests of a thread that holds no lock when it drops them.
    pub(super) fn faults(&self) -> Option<Arc<PageFaults>> {
        self.faults.clone()
    }

    /// Wakes all threads of the program that wait, so that they touch their pages again.
    pub(super) fn wake_all(&self) {
        // Fails if the program has ended.
        let _has_ended = self.faults.as_ref().map(|faults| faults.wake_all());
    }

    fn start(&self, host: &Arc<HostShared>, segment: SegmentKey, pulls: bool) -> Result<(), SegmentError> {
        self.spawn("segment-faults", host, segment, move |host, faults, stop| {
            serve(host, segment, faults, stop);
            await_stop(stop);
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
            // This may be the last close. The thread counts until it has returned.
            drop(faults);
            drop(charge);
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(serve).map(drop).map_err(SegmentError::Thread)
    }
}

impl Drop for ServedFaults {
    /// The threads end by themselves. They are not waited for: the descriptor is the program's too,
    /// which can make them wait.
    fn drop(&mut self) {
        // Before the stop of the thread, which has the last reference.
        self.faults.take();
        let written = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        debug_assert!(written.is_ok(), "a counter can be incremented");
    }
}

/// Whether a descriptor of a program is a userfaultfd: others could wait for ever.
fn is_userfaultfd(fd: &OwnedFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
}

/// Waits until a descriptor is readable.
fn await_stop(stop: &OwnedFd) {
    let mut fds = [PollFd::new(stop, PollFlags::IN)];
    while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
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
        let began = Instant::now();
        match host.demand(segment, &pages) {
            Ok(true) => host.statistics.waits.record(began.elapsed()),
            // What another READ brings is not timed. Or the segment was handed over: the mapping is
            // gone, and with it those that waited.
            Ok(false) | Err(SegmentError::NotOwned(_)) => {}
            Err(error) => {
                tracing::error!(%segment, ?pages, %error, "pages of a segment are lost: a touch is SIGBUS");
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
        // The threads wait for the lock, and then the segment has its faults: what they pull is
        // seen.
        served.start(self, segment, pulls)?;
        // An earlier process of the agent may have read touches of threads that wait.
        served.wake_all();
        entry.served = Some(served);
        entry.is_arming = false;
        entry.pulled.notify_all();
        Ok(())
    }

    /// Whether the faults of a process's segment may be served.
    pub(super) fn may_serve(&self, segment: SegmentKey, process: &str) -> bool {
        let entry = self.segments.get(segment);
        entry.is_some_and(|entry| {
            let entry = entry.lock();
            entry.may_serve() && entry.process == process
        })
    }

    /// Ends the serving of a segment's faults.
    pub(super) fn end_faults(&self, segment: SegmentKey) {
        if let Some(entry) = self.segments.get(segment) {
            entry.lock().served = None;
        }
    }
}
