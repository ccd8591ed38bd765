//! Carries out hand-overs and pulls: what the state machines decide, with memory, the fabric and
//! the directory.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{ClusterKey, Host, Identity, Limits, Memory, TargetError, Tenant};

use super::SegmentKey;
use super::answers::Handler;
use super::memory::{PAGE_BYTES, SegmentMemory};
use super::peer::PAGES_MAX;
use super::registry::Registry;
use super::shared::{HostShared, Segment, lock};
use super::wire::MESSAGE_BYTES_MAX;
use crate::ownership::{Holder, Holding, Input, Life, SegmentRecord, Stage};
use crate::pulling::Step;
use crate::pulling::lineage::LINKS_MAX;

/// Length of the longest name of a process.
const PROCESS_NAME_MAX: usize = 64;
/// The tenant of agents among themselves. No user has this number.
const AGENTS: Tenant = Tenant(u32::MAX);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// There is one already.
    #[error("segment {0:?} exists already")]
    Exists(SegmentKey),
    /// The process does not own it.
    #[error("segment {0:?} is not here: it was handed over, or there is none")]
    NotOwned(SegmentKey),
    /// The length is not possible.
    #[error("a segment of {0} bytes is not possible: give whole pages of 4096 bytes")]
    Length(u64),
    /// The name of a process is not possible.
    #[error("{0:?} is no name of a process: give 1 to {PROCESS_NAME_MAX} of a-z, A-Z, 0-9 and ._-")]
    Name(String),
    /// Another process has the name.
    #[error("a process on another host has the name {0:?} already: choose another")]
    NameTaken(String),
    /// There is no process of this name on another host.
    #[error("no process of this tenant on another host has the name {0:?}")]
    NoProcess(String),
    /// The target is not prepared.
    #[error("the target does not accept segment {0:?}: it is away, or busy with it")]
    Declined(SegmentKey),
    /// Too many hosts still have pages of it.
    #[error("segment {0:?} has moved {LINKS_MAX} times before all of it was pulled: pull it first")]
    Scattered(SegmentKey),
    /// Whether it has arrived is not known yet.
    #[error("whether segment {0:?} has arrived is not known yet; it is found out in the background")]
    Unknown(SegmentKey),
    /// A page was at a host that has died.
    #[error("page {page} of segment {segment:?} is lost: the host that had it has died")]
    Lost {
        /// The segment.
        segment: SegmentKey,
        /// The page.
        page: u32,
    },
    /// The directory failed.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The fabric or the system failed.
    #[error(transparent)]
    Target(#[from] TargetError),
}

/// The segments of a host.
#[derive(Debug)]
pub struct SegmentHost {
    shared: Arc<HostShared>,
    worker: Option<JoinHandle<()>>,
}

impl SegmentHost {
    /// Serves segments at an address, to agents with the cluster's key.
    ///
    /// # Errors
    /// If it cannot listen, or the directory fails.
    pub fn start(
        host: u16,
        listen: SocketAddr,
        key: &ClusterKey,
        directory: Arc<dyn Directory>,
        lease: Lease,
    ) -> Result<Self, SegmentError> {
        let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
        let target = TcpTarget::listen(listen, key, TcpOptions { limits, ..TcpOptions::default() })?;
        let own = Life { host, epoch: lease.epoch };
        let registry = Registry::new(directory);
        let address = target.address();
        let (jobs, next_job) = channel();
        let shared = Arc::new(HostShared {
            own,
            identity: Identity { host: Host(host), epoch: lease.epoch, tenant: AGENTS },
            key: key.clone(),
            registry,
            target,
            segments: Mutex::default(),
            peers: Mutex::default(),
            lease: lease.id,
            processes: Mutex::default(),
            arrived: Mutex::default(),
            has_arrived: Condvar::new(),
            jobs: Mutex::new(Some(jobs)),
        });
        shared.target.answer_messages(Arc::new(Handler(Arc::downgrade(&shared))));
        let own_shared = Arc::clone(&shared);
        let work = move || own_shared.work(&next_job);
        let worker = std::thread::Builder::new().name("segments".into()).spawn(work);
        let worker = worker
            .map_err(|source| TargetError::System { what: "cannot start a thread for segments", source })?;
        let started = Self { shared, worker: Some(worker) };
        started.shared.registry.join(own, address, lease)?;
        Ok(started)
    }

    /// This host, for the time of its lease.
    #[must_use]
    pub fn life(&self) -> Life {
        self.shared.own
    }

    /// Allocates a segment of `bytes` bytes, whole pages, all zeros.
    ///
    /// # Errors
    /// If there is one with this key, the length is not possible, or the system refuses.
    pub fn allocate(&self, segment: SegmentKey, bytes: u64) -> Result<Arc<Memory>, SegmentError> {
        let shared = &self.shared;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(SegmentError::Length(bytes));
        }
        let mut memory = SegmentMemory::create(&shared.target, bytes)?;
        let is_begun = memory.begin_map(0, &[], true);
        debug_assert!(is_begun, "there is no other map");
        if !shared.registry.create(segment, &SegmentRecord::new(shared.own))? {
            memory.close(&shared.target);
            return Err(SegmentError::Exists(segment));
        }
        let copies = Vec::from_iter(shared.own_place(&memory, 0));
        let data = Arc::clone(&memory.data);
        let holder = Holder::owner(shared.own);
        let new = Segment { holder, memory: Some(memory), copies, puller: None, process: String::new() };
        lock(&shared.segments).insert(segment, Arc::new(Mutex::new(new)));
        Ok(data)
    }

    /// Has a process of a tenant accept segments here. Its name is its own in the tenant.
    ///
    /// # Errors
    /// If the name is not possible, or a process on another host has it.
    pub fn open_process(&self, tenant: u32, process: &str) -> Result<(), SegmentError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if process.is_empty() || process.len() > PROCESS_NAME_MAX || !process.bytes().all(is_plain) {
            return Err(SegmentError::Name(process.to_owned()));
        }
        let shared = &self.shared;
        if !shared.registry.add_process(tenant, process, shared.own, shared.lease)? {
            return Err(SegmentError::NameTaken(process.to_owned()));
        }
        lock(&shared.processes).insert((tenant, process.to_owned()));
        Ok(())
    }

    /// Has a process accept no more segments.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn close_process(&self, tenant: u32, process: &str) -> Result<(), SegmentError> {
        if lock(&self.shared.processes).remove(&(tenant, process.to_owned())) {
            self.shared.registry.remove_process(tenant, process)?;
        }
        Ok(())
    }

    /// Prepares a hand-over to a process of the same tenant: all that is slow.
    ///
    /// # Errors
    /// If the segment is not owned here, there is no such process on another host, or it is not
    /// prepared.
    pub fn connect(&self, segment: SegmentKey, process: &str) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let to = self.shared.registry.find_process(segment.tenant, process)?;
        let to = to.filter(|to| *to != self.shared.own);
        let to = to.ok_or_else(|| SegmentError::NoProcess(process.to_owned()))?;
        process.clone_into(&mut lock(&entry).process);
        if lock(&entry).copies.len() >= LINKS_MAX {
            return Err(SegmentError::Scattered(segment));
        }
        if lock(&entry).is_unsettled() {
            // It has just arrived, and the worker may not have confirmed it yet.
            self.shared.run(segment, &entry, Input::Tick);
        }
        self.shared.run(segment, &entry, Input::Connect(to));
        if matches!(lock(&entry).holder.holding(), Holding::Owned { stage: Stage::Preparing(_), .. }) {
            // There was no answer.
            self.shared.run(segment, &entry, Input::Abort);
        }
        match lock(&entry).holder.holding() {
            Holding::Owned { stage: Stage::Ready(ready), .. } if ready == to => Ok(()),
            _ => Err(SegmentError::Declined(segment)),
        }
    }

    /// Hands a segment over that is prepared. The program must not have access any more.
    ///
    /// # Errors
    /// [`SegmentError::Declined`]: the segment is still owned here. [`SegmentError::Unknown`]: it
    /// may have arrived.
    pub fn transfer(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        if !matches!(lock(&entry).holder.holding(), Holding::Owned { stage: Stage::Ready(_), .. }) {
            return Err(SegmentError::Declined(segment));
        }
        self.shared.run(segment, &entry, Input::Transfer);
        if matches!(lock(&entry).holder.holding(), Holding::Sent { .. }) {
            self.shared.run(segment, &entry, Input::Tick);
        }
        match lock(&entry).holder.holding() {
            Holding::Owned { .. } => Err(SegmentError::Declined(segment)),
            Holding::Sent { .. } => Err(SegmentError::Unknown(segment)),
            Holding::Absent | Holding::Prepared { .. } => Ok(()),
        }
    }

    /// Takes a prepared hand-over back.
    ///
    /// # Errors
    /// If the segment is not owned here.
    pub fn abort(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        self.shared.run(segment, &entry, Input::Abort);
        Ok(())
    }

    /// Waits for a segment that is handed over to a process of this host. Returns its key and its
    /// memory, of which each page must be pulled before it is touched.
    #[must_use]
    pub fn receive(
        &self,
        tenant: u32,
        process: &str,
        timeout: Duration,
    ) -> Option<(SegmentKey, Arc<Memory>)> {
        let is_its = |(name, segment): &(String, SegmentKey)| name == process && segment.tenant == tenant;
        let arrived = lock(&self.shared.arrived);
        let must_wait = |arrived: &mut VecDeque<(String, SegmentKey)>| !arrived.iter().any(is_its);
        let waited = self.shared.has_arrived.wait_timeout_while(arrived, timeout, must_wait);
        let mut arrived = waited.unwrap_or_else(PoisonError::into_inner).0;
        let at = arrived.iter().position(is_its)?;
        let (_, segment) = arrived.remove(at)?;
        drop(arrived);
        let entry = self.owned(segment).ok()?;
        let data = lock(&entry).memory.as_ref().map(|memory| Arc::clone(&memory.data))?;
        Some((segment, data))
    }

    /// Whether a segment is owned here.
    #[must_use]
    pub fn owns(&self, segment: SegmentKey) -> bool {
        self.owned(segment).is_ok()
    }

    /// Pulls a page, if it is not here.
    ///
    /// # Errors
    /// If the segment is not owned here, or the page is lost.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn pull(&self, segment: SegmentKey, page: u32) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        loop {
            let step = match &mut lock(&entry).puller {
                None => return Ok(()),
                Some(puller) => puller.demand(page),
            };
            match step {
                // Another thread reads it.
                None => std::thread::yield_now(),
                Some(step) => return self.shared.pull(segment, &entry, vec![step]),
            }
        }
    }

    /// Pulls all pages that are not here. Then no other host has a part in the segment.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    pub fn pull_all(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        while self.pull_ahead(segment)? {}
        let entry = self.owned(segment)?;
        // What other threads pull is waited for, and what they have lost is noticed.
        let pages = lock(&entry).memory.as_ref().map_or(0, SegmentMemory::pages);
        (0..pages).try_for_each(|page| self.pull(segment, page))?;
        self.shared.finish(segment, &entry);
        Ok(())
    }

    /// Pulls some pages ahead of the program, over a connection of its own, so that no thread that
    /// waits for a page waits for these. Returns whether there are more.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    pub fn pull_ahead(&self, segment: SegmentKey) -> Result<bool, SegmentError> {
        let entry = self.owned(segment)?;
        let steps: Vec<Step> = match &mut lock(&entry).puller {
            None => return Ok(false),
            Some(puller) => std::iter::from_fn(|| puller.ahead()).take(PAGES_MAX).collect(),
        };
        let are_more = steps.len() == PAGES_MAX;
        self.shared.pull(segment, &entry, steps)?;
        Ok(are_more)
    }

    fn owned(&self, segment: SegmentKey) -> Result<Arc<Mutex<Segment>>, SegmentError> {
        let entry = lock(&self.shared.segments).get(&segment).cloned();
        let is_owned = |entry: &Arc<Mutex<Segment>>| lock(entry).holder.has_access();
        entry.filter(is_owned).ok_or(SegmentError::NotOwned(segment))
    }
}

impl Drop for SegmentHost {
    fn drop(&mut self) {
        lock(&self.shared.jobs).take();
        let ended = self.worker.take().map(JoinHandle::join);
        debug_assert!(ended.is_none_or(|ended| ended.is_ok()), "the thread of segments panicked");
    }
}
