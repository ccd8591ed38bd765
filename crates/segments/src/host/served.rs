//! The faults of a program's segment, and the threads that serve them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use aquifer_arena::PageFaults;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::shared::{HostShared, lock};
use super::{SegmentError, SegmentKey};

/// Most threads for one tenant, two for each segment that it can have.
const THREADS_PER_TENANT_MAX: u32 = 2048;

/// Faults that are served. Its threads end after it is dropped.
#[derive(Debug)]
pub(super) struct ServedFaults {
    pub faults: Arc<PageFaults>,
    stop: Arc<OwnedFd>,
}

impl ServedFaults {
    fn new(faults: PageFaults) -> Result<Self, SegmentError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| SegmentError::Thread(error.into()))?;
        Ok(Self { faults: Arc::new(faults), stop: Arc::new(stop) })
    }

    fn start(&self, host: &Arc<HostShared>, segment: SegmentKey, pulls: bool) -> Result<(), SegmentError> {
        self.spawn("segment-faults", host, segment, move |host, faults, stop| {
            serve(host, segment, faults, stop)
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
        let (faults, stop) = (Arc::clone(&self.faults), Arc::clone(&self.stop));
        let serving = Serving::begin(host, segment.tenant)?;
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || run(&serving.host, &faults, &stop)).map_err(SegmentError::Thread)?;
        Ok(())
    }
}

impl Drop for ServedFaults {
    /// The threads end by themselves. They are not waited for: the descriptor is the program's too,
    /// which can make them wait.
    fn drop(&mut self) {
        let written = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        debug_assert!(written.is_ok(), "a counter can be incremented");
    }
}

/// A thread that serves faults of a tenant, until it is dropped.
struct Serving {
    host: Arc<HostShared>,
    tenant: u32,
}

impl Serving {
    /// # Errors
    /// If the tenant has too many.
    fn begin(host: &Arc<HostShared>, tenant: u32) -> Result<Self, SegmentError> {
        let mut serving = lock(&host.serving);
        let count = serving.entry(tenant).or_default();
        if *count >= THREADS_PER_TENANT_MAX {
            return Err(SegmentError::Thread(io::Error::other("this user has too many")));
        }
        *count += 1;
        Ok(Self { host: Arc::clone(host), tenant })
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let mut serving = lock(&self.host.serving);
        if let Some(count) = serving.get_mut(&self.tenant) {
            *count -= 1;
        }
        serving.retain(|_, count| *count > 0);
    }
}

/// Whether a descriptor of a program is a userfaultfd: others could wait for ever.
fn is_userfaultfd(fd: &OwnedFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
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
        if !is_userfaultfd(&uffd) {
            return Err(SegmentError::Thread(io::Error::other("the descriptor is no userfaultfd")));
        }
        let entry = lock(&self.segments).get(&segment).cloned();
        let entry = entry.ok_or(SegmentError::NotOwned(segment))?;
        let (address, bytes) = lock(&entry).place().ok_or(SegmentError::NotOwned(segment))?;
        let served = ServedFaults::new(PageFaults::new(uffd, address, bytes))?;
        let mut entry = lock(&entry);
        if !entry.may_serve() {
            return Err(SegmentError::NotOwned(segment));
        }
        // The threads wait for the lock, and then the segment has its faults: what they pull is
        // seen.
        served.start(self, segment, pulls)?;
        // An earlier process of the agent may have read touches of threads that wait.
        let _has_ended = served.faults.wake_all();
        entry.served = Some(served);
        entry.is_arming = false;
        entry.pulled.notify_all();
        Ok(())
    }

    /// Whether the faults of a process's segment may be served.
    pub(super) fn may_serve(&self, segment: SegmentKey, process: &str) -> bool {
        let entry = lock(&self.segments).get(&segment).cloned();
        entry.is_some_and(|entry| {
            let entry = lock(&entry);
            entry.may_serve() && entry.process == process
        })
    }

    /// Ends the serving of a segment's faults.
    pub(super) fn end_faults(&self, segment: SegmentKey) {
        if let Some(entry) = lock(&self.segments).get(&segment).cloned() {
            lock(&entry).served = None;
        }
    }
}
