//! Carries out hand-overs and pulls: what the state machines decide, with memory, the fabric and
//! the directory.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_arena::SEGMENT_BYTES_MAX;
use aquifer_arena::calls::SegmentStatus;
use aquifer_directory::{Directory, Lease};
use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{ClusterKey, Host, Identity, Limits, TargetError, Tenant};

use super::SegmentKey;
use super::answers::Handler;
use super::error::{PROCESS_NAME_MAX, SegmentError};
use super::memory::{PAGE_BYTES, SegmentMemory};
use super::peer::PAGES_MAX;
use super::registry::{Creation, Registry};
use super::shared::{Arrival, HostShared, Segment, lock};
use super::wire::MESSAGE_BYTES_MAX;
use crate::ownership::{Holder, Holding, Input, Life, Stage};
use crate::pulling::lineage::LINKS_MAX;
use crate::pulling::{Puller, Step};

/// The tenant of agents among themselves. No user has this number.
const AGENTS: Tenant = Tenant(u32::MAX);

/// What the segments of a host need.
#[derive(Clone, Debug)]
pub struct SegmentOptions {
    /// The number of the host.
    pub host: u16,
    /// Where agents of other hosts connect. `None`: segments stay on this host.
    pub listen: Option<SocketAddr>,
    /// The cluster's key, which they must have.
    pub key: ClusterKey,
    /// Most bytes of segments of one tenant on this host.
    pub bytes_per_tenant: u64,
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
        options: &SegmentOptions,
        directory: Arc<dyn Directory>,
        lease: Lease,
    ) -> Result<Self, SegmentError> {
        let SegmentOptions { host, listen, ref key, bytes_per_tenant } = *options;
        let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let target =
            TcpTarget::listen(listen.unwrap_or(local), key, TcpOptions { limits, ..TcpOptions::default() })?;
        let own = Life { host, epoch: lease.epoch };
        let registry = Registry::new(directory);
        let address = listen.map(|_| target.address());
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
            bytes_per_tenant,
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

    /// Allocates a segment of `bytes` bytes, whole pages, all zeros, for a process of this host.
    ///
    /// # Errors
    /// If there is one with this key, the length is not possible, the tenant has too much, or the
    /// system refuses.
    pub fn allocate(&self, segment: SegmentKey, bytes: u64, process: &str) -> Result<Arrival, SegmentError> {
        let shared = &self.shared;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || bytes > SEGMENT_BYTES_MAX as u64 {
            return Err(SegmentError::Length(bytes));
        }
        let mut memory = shared.new_memory(segment, bytes)?;
        let (address, generation) = match shared.registry.create(segment, shared.own, bytes) {
            Ok(Creation::Created { address, generation }) => (address, generation),
            failed => {
                memory.close(&shared.target);
                return Err(match failed? {
                    Creation::Exists => SegmentError::Exists(segment),
                    Creation::Busy => SegmentError::Busy(segment),
                    _ => SegmentError::Full,
                });
            }
        };
        let is_begun = memory.begin_map(generation, &[], true);
        debug_assert!(is_begun, "there is no other map");
        let copies = Vec::from_iter(shared.own_place(&memory, generation));
        let holder = Holder::owner(shared.own, generation);
        let process = process.to_owned();
        let new =
            Segment { holder, memory: Some(memory), copies, address, process, ..Segment::absent(shared.own) };
        let arrival = new.arrival(segment).expect("it has memory");
        let former = lock(&shared.segments).insert(segment, Arc::new(Mutex::new(new)));
        // A copy of a segment that had this number and was deallocated.
        let copy = former.and_then(|former| lock(&former).memory.take());
        copy.iter().for_each(|copy| copy.close(&shared.target));
        Ok(arrival)
    }

    /// Deallocates a segment, which no process uses any more: its number and its addresses can be
    /// used again.
    ///
    /// # Errors
    /// If it is not owned here, or is being handed over.
    pub fn deallocate(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let shared = &self.shared;
        let entry = self.owned(segment)?;
        self.settle(segment, &entry);
        if !shared.registry.remove(segment, shared.own)? {
            return Err(SegmentError::Busy(segment));
        }
        let memory = {
            let mut entry = lock(&entry);
            let holder = entry.holder.deallocated().ok_or(SegmentError::Busy(segment))?;
            let memory = entry.memory.take();
            let others = std::mem::take(&mut entry.copies);
            *entry = Segment { holder, copies: others, ..Segment::absent(shared.own) };
            memory
        };
        shared.release_copies(segment, &entry);
        memory.iter().for_each(|memory| memory.close(&shared.target));
        Ok(())
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
        if !lock(&shared.processes).insert((tenant, process.to_owned())) {
            return Err(SegmentError::NameTaken(process.to_owned()));
        }
        // What an earlier process of this name has left.
        let left = self.list(tenant).into_iter().filter(|status| status.process == process);
        let left = left.map(|status| (process.to_owned(), SegmentKey { tenant, id: status.id }));
        let left: Vec<_> = left.collect();
        let mut arrived = lock(&shared.arrived);
        arrived.retain(|arrived| !left.contains(arrived));
        arrived.extend(left);
        drop(arrived);
        shared.has_arrived.notify_all();
        Ok(())
    }

    /// Has a process accept no more segments.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn close_process(&self, tenant: u32, process: &str) -> Result<(), SegmentError> {
        if lock(&self.shared.processes).remove(&(tenant, process.to_owned())) {
            let is_its = |(name, segment): &(String, SegmentKey)| name == process && segment.tenant == tenant;
            lock(&self.shared.arrived).retain(|arrived| !is_its(arrived));
            self.shared.registry.remove_process(tenant, process)?;
        }
        Ok(())
    }

    /// Prepares a hand-over to another process of the same tenant: all that is slow. A hand-over
    /// that is prepared already is taken back.
    ///
    /// # Errors
    /// If the segment is not owned here, there is no such process, or it is not prepared. Then no
    /// hand-over is prepared.
    pub fn connect(&self, segment: SegmentKey, process: &str) -> Result<(), SegmentError> {
        self.abort(segment)?;
        let entry = self.owned(segment)?;
        let to = self.shared.registry.find_process(segment.tenant, process)?;
        let to = to.filter(|_| lock(&entry).process != process);
        let to = to.ok_or_else(|| SegmentError::NoProcess(process.to_owned()))?;
        process.clone_into(&mut lock(&entry).target);
        if to == self.shared.own {
            return Ok(());
        }
        let connected = self.connect_to_host(segment, &entry, to);
        if connected.is_err() {
            lock(&entry).target.clear();
        }
        connected
    }

    /// Prepares a hand-over to the target of a segment, a process of another host.
    fn connect_to_host(
        &self,
        segment: SegmentKey,
        entry: &Mutex<Segment>,
        to: Life,
    ) -> Result<(), SegmentError> {
        if self.shared.registry.address(to)?.is_none() {
            return Err(SegmentError::Unreachable(lock(entry).target.clone()));
        }
        if lock(entry).copies.len() >= LINKS_MAX {
            return Err(SegmentError::Scattered(segment));
        }
        self.settle(segment, entry);
        self.shared.run(segment, entry, Input::Connect(to));
        if matches!(lock(entry).holder.holding(), Holding::Owned { stage: Stage::Preparing(_), .. }) {
            // There was no answer.
            self.shared.run(segment, entry, Input::Abort);
        }
        match lock(entry).holder.holding() {
            Holding::Owned { stage: Stage::Ready(ready), .. } if ready == to => Ok(()),
            _ => Err(SegmentError::Declined(segment)),
        }
    }

    /// If the segment has just arrived, the worker may not have confirmed it yet.
    fn settle(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        if lock(entry).is_unsettled() {
            self.shared.run(segment, entry, Input::Tick);
        }
    }

    /// Hands a segment over that is prepared. The program must not have access any more.
    ///
    /// # Errors
    /// [`SegmentError::Declined`]: the segment is still owned here. [`SegmentError::Unknown`]: it
    /// may have arrived.
    pub fn transfer(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let is_ready = matches!(lock(&entry).holder.holding(), Holding::Owned { stage: Stage::Ready(_), .. });
        if !is_ready {
            return self.pass_on(segment, &entry);
        }
        self.shared.run(segment, &entry, Input::Transfer);
        if matches!(lock(&entry).holder.holding(), Holding::Sent { .. }) {
            self.shared.run(segment, &entry, Input::Tick);
        }
        match lock(&entry).holder.holding() {
            Holding::Owned { .. } => {
                // The process, which waits for this answer, still has it.
                lock(&self.shared.arrived).retain(|(_, arrived)| *arrived != segment);
                Err(SegmentError::Declined(segment))
            }
            Holding::Sent { .. } => Err(SegmentError::Unknown(segment)),
            Holding::Absent | Holding::Prepared { .. } => Ok(()),
        }
    }

    /// Hands a segment over to another process of this host.
    fn pass_on(&self, segment: SegmentKey, entry: &Mutex<Segment>) -> Result<(), SegmentError> {
        let mut entry = lock(entry);
        let target = std::mem::take(&mut entry.target);
        if !lock(&self.shared.processes).contains(&(segment.tenant, target.clone())) {
            return Err(SegmentError::Declined(segment));
        }
        entry.process.clone_from(&target);
        lock(&self.shared.arrived).push_back((target, segment));
        self.shared.has_arrived.notify_all();
        Ok(())
    }

    /// Takes a prepared hand-over back.
    ///
    /// # Errors
    /// If the segment is not owned here.
    pub fn abort(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        lock(&entry).target.clear();
        self.shared.run(segment, &entry, Input::Abort);
        Ok(())
    }

    /// Waits for a segment that is handed over to a process of this host, or that an earlier
    /// process of its name has left. If it is partial, each page must be pulled before it is
    /// touched.
    #[must_use]
    pub fn receive(&self, tenant: u32, process: &str, timeout: Duration) -> Option<Arrival> {
        let is_its = |(name, segment): &(String, SegmentKey)| name == process && segment.tenant == tenant;
        let arrived = lock(&self.shared.arrived);
        let must_wait = |arrived: &mut VecDeque<(String, SegmentKey)>| !arrived.iter().any(is_its);
        let waited = self.shared.has_arrived.wait_timeout_while(arrived, timeout, must_wait);
        let mut arrived = waited.unwrap_or_else(PoisonError::into_inner).0;
        let at = arrived.iter().position(is_its)?;
        let (_, segment) = arrived.remove(at)?;
        drop(arrived);
        let entry = self.owned(segment).ok()?;
        let entry = lock(&entry);
        entry.arrival(segment)
    }

    /// Has a segment arrive again, because its process has not got it.
    pub fn return_arrival(&self, segment: SegmentKey, process: &str) {
        lock(&self.shared.arrived).push_front((process.to_owned(), segment));
        self.shared.has_arrived.notify_all();
    }

    /// Whether a process is open.
    #[must_use]
    pub fn has_process(&self, tenant: u32, process: &str) -> bool {
        self.shared.has_process(tenant, process)
    }

    /// The segments of a tenant that are owned here.
    #[must_use]
    pub fn list(&self, tenant: u32) -> Vec<SegmentStatus> {
        let entries: Vec<_> =
            lock(&self.shared.segments).iter().map(|(key, entry)| (*key, Arc::clone(entry))).collect();
        let of_tenant = entries.into_iter().filter(|(segment, _)| segment.tenant == tenant);
        let status = |(segment, entry): (SegmentKey, Arc<Mutex<Segment>>)| {
            let entry = lock(&entry);
            let bytes = entry.bytes().filter(|_| entry.holder.has_access())?;
            let missing = entry.puller.as_ref().map_or(0, Puller::missing);
            let process = entry.process.clone();
            let missing_bytes = u64::from(missing) * PAGE_BYTES;
            Some(SegmentStatus { id: segment.id, address: entry.address, bytes, missing_bytes, process })
        };
        of_tenant.filter_map(status).collect()
    }

    /// The first address of a segment in a program, and its length.
    ///
    /// # Errors
    /// If it is not owned here.
    pub fn place(&self, segment: SegmentKey) -> Result<(usize, usize), SegmentError> {
        let entry = self.owned(segment)?;
        let entry = lock(&entry);
        let bytes = entry.bytes().ok_or(SegmentError::NotOwned(segment))?;
        let as_size = |value| usize::try_from(value).map_err(|_| SegmentError::Length(bytes));
        Ok((as_size(entry.address)?, as_size(bytes)?))
    }

    /// Whether a process of this host owns a segment.
    #[must_use]
    pub fn is_owned_by(&self, segment: SegmentKey, process: &str) -> bool {
        self.owned(segment).is_ok_and(|entry| lock(&entry).process == process)
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
            let step = {
                let mut entry = lock(&entry);
                // Otherwise a READ could begin after the hand-over, and end in a later generation.
                if !entry.holder.has_access() {
                    return Err(SegmentError::NotOwned(segment));
                }
                match &mut entry.puller {
                    None => return Ok(()),
                    Some(puller) => puller.demand(page),
                }
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
