//! Carries out hand-overs and pulls: what the state machines decide, with memory, the fabric and
//! the directory.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_arena::SEGMENT_BYTES_MAX;
use aquifer_arena::calls::{SegmentStatus, Tenure};
use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_directory::{Directory, DirectoryRetries, Lease};
use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{ClusterKey, Host, Identity, Limits, REGIONS_LIMIT, TargetError, Tenant};
use aquifer_keeper::KeeperStore;
use parking_lot::Mutex;

use super::SegmentKey;
use super::answers::Handler;
use super::arrivals::Arrivals;
use super::error::SegmentError;
use super::jobs::JobQueue;
use super::kept::{HostLease, KeptSegment};
use super::memories::Memories;
use super::memory::{PAGE_BYTES, SegmentMemory};
use super::open_processes::OpenProcesses;
use super::pace::Pace;
use super::peers::Peers;
use super::precedence::Precedence;
use super::programs::ProcessIdentity;
use super::registry::{Creation, Registry};
use super::restores::Restores;
use super::segment_table::{SegmentTable, SharedSegment};
use super::served::ServedFaults;
use super::shared::{Arrival, HostShared, Segment};
use super::statistics::Statistics;
use super::wire::MESSAGE_BYTES_MAX;
use crate::pulling::lineage::LINKS_MAX;
use aquifer_ownership::{Evidence, Holder, Holding, Input, Life, Stage};

/// Longest wait for the outcome of a hand-over. After that it is found out in the background.
const OUTCOME_PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait for the directory to be told what has happened to a segment.
const SETTLE_PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for a process that has received a segment to have its faults served.
const ARMING_PATIENCE: Duration = Duration::from_secs(5);
/// Interval of looks at it.
const LOOK: Duration = Duration::from_millis(50);
/// The tenant of agents among themselves. No user has this number.
const AGENTS: Tenant = Tenant(u32::MAX);

/// What the segments of a host need.
#[derive(Clone, Debug)]
pub struct SegmentOptions {
    /// This host, from the claim of its number on: restarts of its agent are the same life.
    pub life: Life,
    /// Where agents of other hosts connect. `None`: segments stay on this host.
    pub listen: Option<SocketAddr>,
    /// The cluster's key, which they must have.
    pub key: ClusterKey,
    /// Most bytes of segments of one tenant on this host.
    pub bytes_per_tenant: u64,
    /// Bytes per second that are pulled ahead of all programs together. `None`: as many as come.
    pub pull_rate: Option<u64>,
    /// How long processes may have segments after this process of the agent has ended. Before that,
    /// no other host may take the life of this one for ended.
    pub grace: Duration,
    /// The folder with the sockets of the services of this machine.
    pub sockets: PathBuf,
    /// The descriptors of this process, which are charged to tenants.
    pub descriptors: Arc<DescriptorShares>,
    /// Whether the start waits for the directory.
    pub retries: DirectoryRetries,
    /// The lease of the host, without which programs are not served.
    pub lease: Arc<dyn HostLease>,
}

/// The segments of a host.
#[derive(Debug)]
pub struct SegmentHost {
    pub(super) shared: Arc<HostShared>,
    worker: Option<JoinHandle<()>>,
    lease: Arc<dyn HostLease>,
    grace: Duration,
    pub(super) sockets: PathBuf,
}

impl SegmentHost {
    /// Serves segments at an address, to agents with the cluster's key, and those that an earlier
    /// process of the agent has left.
    ///
    /// # Errors
    /// If it cannot listen, or the directory fails.
    pub fn start(
        options: &SegmentOptions,
        directory: Arc<dyn Directory>,
        lease: Lease,
        keeper: Arc<dyn KeeperStore>,
        kept: Vec<KeptSegment>,
    ) -> Result<Self, SegmentError> {
        let SegmentOptions {
            life: own,
            listen,
            ref key,
            bytes_per_tenant,
            pull_rate,
            grace,
            ref sockets,
            ..
        } = *options;
        let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let tcp = TcpOptions { limits, regions_max: REGIONS_LIMIT, ..TcpOptions::default() };
        let target = TcpTarget::listen(listen.unwrap_or(local), key, tcp)?;
        let registry = Registry::new(directory);
        let address = listen.map(|_| target.address());
        let (jobs, next_job) = JobQueue::new();
        let next_number = 1 + kept.iter().map(|kept| kept.number).max().unwrap_or(0);
        let descriptors = Arc::clone(&options.descriptors);
        let memories = Memories::new(target, keeper, next_number, bytes_per_tenant, descriptors);
        let shared = Arc::new(HostShared {
            own,
            identity: Identity { host: Host(own.host), epoch: own.epoch, tenant: AGENTS },
            key: key.clone(),
            registry,
            segments: SegmentTable::default(),
            memories,
            restores: Restores::default(),
            creating: Mutex::default(),
            peers: Peers::default(),
            lease: lease.id,
            processes: OpenProcesses::default(),
            arrivals: Arrivals::default(),
            precedence: Precedence::default(),
            pace: Pace::new(pull_rate),
            statistics: Statistics::default(),
            jobs,
        });
        shared.restore(kept, &options.retries)?;
        shared.memories.target().answer_messages(Arc::new(Handler(Arc::downgrade(&shared))));
        let own_shared = Arc::clone(&shared);
        let work = move || own_shared.work(&next_job);
        let worker = std::thread::Builder::new().name("segments".into()).spawn(work);
        let worker = worker
            .map_err(|source| TargetError::System { what: "cannot start a thread for segments", source })?;
        let (own_lease, sockets) = (Arc::clone(&options.lease), sockets.clone());
        let started = Self { shared, worker: Some(worker), lease: own_lease, grace, sockets };
        options.retries.repeat(|| started.shared.registry.join(own, address, lease))?;
        Ok(started)
    }

    /// Whether the host's lease lasts for sure.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.lease.lasts()
    }

    /// Waits until the faults of a segment are served whose process has just received it, but not
    /// for ever.
    pub(super) fn await_arming(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let mut entry = entry.lock();
        let pulled = Arc::clone(&entry.pulled);
        let _late = pulled.wait_while_for(&mut entry, |entry| entry.is_arming, ARMING_PATIENCE);
        Ok(())
    }

    /// How long processes may have segments after this process of the agent has ended.
    #[must_use]
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// This host.
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
        let memory = shared.memories.allocate(segment, bytes)?;
        let _alone = shared.creating.lock();
        let mut created = shared.registry.create(segment, shared.own, bytes, Evidence::default());
        if let Ok(Creation::Exists) = created
            && let Ok(evidence) = shared.evidence(segment)
        {
            created = shared.registry.create(segment, shared.own, bytes, evidence);
        }
        let (address, generation) = match created {
            Ok(Creation::Created { address, generation }) => (address, generation),
            failed => {
                shared.memories.free_now(&memory);
                return Err(match failed? {
                    Creation::Exists => SegmentError::Exists(segment),
                    Creation::HasCopies => SegmentError::HasCopies(segment),
                    Creation::Busy => SegmentError::Busy(segment),
                    _ => SegmentError::Full,
                });
            }
        };
        Ok(self.own_new(segment, process, memory, address, generation))
    }

    /// Has a process own a segment with this memory, which is all there is of it.
    pub(super) fn own_new(
        &self,
        segment: SegmentKey,
        process: &str,
        mut memory: SegmentMemory,
        address: u64,
        generation: u64,
    ) -> Arrival {
        let shared = &self.shared;
        let is_begun = memory.begin_map(generation, &[], true);
        debug_assert!(is_begun, "there is no other map");
        let copies = Vec::from_iter(shared.own_place(&memory, generation));
        let holder = Holder::owner(shared.own, generation);
        let identity = shared.processes.identity(segment.tenant, process);
        let process = process.to_owned();
        let mut new = Segment {
            holder,
            memory: Some(memory),
            copies,
            address,
            process,
            identity,
            ..Segment::absent(shared.own)
        };
        new.save();
        let arrival = new.arrival(segment).expect("it has memory");
        let former = shared.segments.replace(segment, new);
        // A copy of a segment that had this number and was deallocated.
        let copy = former.and_then(|former| former.lock().memory.take());
        copy.iter().for_each(|copy| shared.memories.free(copy));
        arrival
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
            let mut entry = entry.lock();
            let holder = entry.holder.deallocated().ok_or(SegmentError::Busy(segment))?;
            let memory = entry.memory.take();
            let others = std::mem::take(&mut entry.copies);
            entry.pulled.notify_all();
            let pulled = Arc::clone(&entry.pulled);
            *entry = Segment { holder, copies: others, pulled, ..Segment::absent(shared.own) };
            memory
        };
        shared.release_copies(segment, &entry);
        memory.iter().for_each(|memory| shared.memories.free_now(memory));
        Ok(())
    }

    /// Whether there is no such segment, here or on another host.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn is_gone(&self, segment: SegmentKey) -> Result<bool, SegmentError> {
        Ok(!self.owns(segment) && self.shared.registry.find(segment)?.is_none())
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
        let to = to.filter(|_| entry.lock().process != process);
        let to = to.ok_or_else(|| SegmentError::NoProcess(process.to_owned()))?;
        process.clone_into(&mut entry.lock().target);
        if to == self.shared.own {
            return Ok(());
        }
        let connected = self.connect_to_host(segment, &entry, to);
        if connected.is_err() {
            entry.lock().target.clear();
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
            return Err(SegmentError::Unreachable(entry.lock().target.clone()));
        }
        if entry.lock().copies.len() >= LINKS_MAX {
            return Err(SegmentError::Scattered(segment));
        }
        self.settle(segment, entry);
        self.shared.run(segment, entry, Input::Connect(to));
        if matches!(entry.lock().holder.holding(), Holding::Owned { stage: Stage::Preparing(_), .. }) {
            // There was no answer.
            self.shared.run(segment, entry, Input::Abort);
        }
        match entry.lock().holder.holding() {
            Holding::Owned { stage: Stage::Ready(ready), .. } if ready == to => Ok(()),
            _ => Err(SegmentError::Declined(segment)),
        }
    }

    /// If the segment has just arrived, or the agent was restarted, the worker may not have told
    /// the directory yet.
    pub(super) fn settle(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        if entry.lock().is_unsettled() {
            self.shared.run(segment, entry, Input::Tick);
        }
        let mut entry = entry.lock();
        let changed = Arc::clone(&entry.pulled);
        let must_wait = |entry: &mut Segment| {
            entry.is_unsettled()
                || matches!(entry.holder.holding(), Holding::Owned { stage: Stage::Retracting, .. })
        };
        let _late = changed.wait_while_for(&mut entry, must_wait, SETTLE_PATIENCE);
    }

    /// Hands a segment over that is prepared. The program must not have access any more.
    ///
    /// # Errors
    /// [`SegmentError::Declined`]: the segment is still owned here. [`SegmentError::Unknown`]: it
    /// may have arrived.
    pub fn transfer(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let is_ready = matches!(entry.lock().holder.holding(), Holding::Owned { stage: Stage::Ready(_), .. });
        if !is_ready {
            return self.pass_on(segment, &entry);
        }
        let began = Instant::now();
        entry.lock().is_awaited = true;
        self.shared.run(segment, &entry, Input::Transfer);
        self.await_outcome(segment, &entry)?;
        self.shared.statistics.transfers.record(began.elapsed());
        Ok(())
    }

    /// Whether a process has, or had last, a segment for this tenure.
    #[must_use]
    pub fn is_tenure(&self, segment: SegmentKey, process: &str, tenure: Tenure) -> bool {
        let entry = self.shared.segments.get(segment);
        entry.is_some_and(|entry| {
            let entry = entry.lock();
            entry.process == process && entry.tenure() == tenure
        })
    }

    /// Waits for the outcome of a hand-over that an earlier process of the agent has begun.
    ///
    /// # Errors
    /// Those of [`Self::transfer`].
    pub fn transfer_again(&self, segment: SegmentKey, process: &str) -> Result<(), SegmentError> {
        let entry = self.shared.segments.get(segment);
        // It is not here any more: it has arrived.
        let Some(entry) = entry else { return Ok(()) };
        {
            let mut entry = entry.lock();
            if entry.process != process {
                // It is another process's of this host.
                return Ok(());
            }
            entry.is_awaited = true;
        }
        self.await_outcome(segment, &entry)
    }

    /// Waits until it is known whether a segment has arrived, but not for ever.
    fn await_outcome(&self, segment: SegmentKey, entry: &Mutex<Segment>) -> Result<(), SegmentError> {
        let until = Instant::now() + OUTCOME_PATIENCE;
        if matches!(entry.lock().holder.holding(), Holding::Sent { .. }) {
            self.shared.run(segment, entry, Input::Tick);
        }
        let mut entry = entry.lock();
        while matches!(entry.holder.holding(), Holding::Sent { .. }) && Instant::now() < until {
            // The worker asks for it.
            let changed = Arc::clone(&entry.pulled);
            changed.wait_for(&mut entry, LOOK);
        }
        entry.is_awaited = false;
        let statistics = &self.shared.statistics;
        match entry.holder.holding() {
            Holding::Owned { .. } => {
                statistics.declined.fetch_add(1, Relaxed);
                Err(SegmentError::Declined(segment))
            }
            Holding::Sent { .. } => Err(SegmentError::Unknown(segment)),
            Holding::Absent | Holding::Prepared { .. } => {
                statistics.handed_over.fetch_add(1, Relaxed);
                Ok(())
            }
        }
    }

    /// Hands a segment over to another process of this host.
    fn pass_on(&self, segment: SegmentKey, entry: &Mutex<Segment>) -> Result<(), SegmentError> {
        let target = {
            let mut entry = entry.lock();
            let target = std::mem::take(&mut entry.target);
            if !self.has_process(segment.tenant, &target) {
                return Err(SegmentError::Declined(segment));
            }
            entry.identity = self.shared.processes.identity(segment.tenant, &target);
            entry.process.clone_from(&target);
            entry.passes += 1;
            entry.save();
            (entry.served, entry.is_awaited) = (None, false);
            target
        };
        self.shared.arrive(segment, &target);
        Ok(())
    }

    /// Takes a prepared hand-over back.
    ///
    /// # Errors
    /// If the segment is not owned here.
    pub fn abort(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        entry.lock().target.clear();
        self.shared.run(segment, &entry, Input::Abort);
        Ok(())
    }

    /// The segments of a tenant that are owned here.
    #[must_use]
    pub fn list(&self, tenant: u32) -> Vec<SegmentStatus> {
        self.list_all().into_iter().filter(|status| status.user == tenant).collect()
    }

    /// The segments that are owned here, by user and number.
    #[must_use]
    pub fn list_all(&self) -> Vec<SegmentStatus> {
        let status = |(segment, entry): (SegmentKey, SharedSegment)| {
            let status = entry.lock().status(segment)?;
            let is_open = self.shared.processes.contains(segment.tenant, &status.process);
            Some(SegmentStatus { is_open, ..status })
        };
        self.shared.segments.all().into_iter().filter_map(status).collect()
    }

    /// What was done since the start.
    #[must_use]
    pub fn statistics(&self) -> &Statistics {
        &self.shared.statistics
    }

    /// Requests the owner of a segment to hand it over to another process of the tenant.
    ///
    /// # Errors
    /// If the segment is not owned here, its process is not open, or there is no such process.
    pub fn request(&self, segment: SegmentKey, process: &str) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let owner = entry.lock().process.clone();
        if owner == process {
            return Ok(());
        }
        if !self.has_process(segment.tenant, &owner) {
            return Err(SegmentError::NoProcess(owner));
        }
        if self.shared.registry.find_process(segment.tenant, process)?.is_none() {
            return Err(SegmentError::NoProcess(process.to_owned()));
        }
        self.shared.request(segment, &owner, process);
        Ok(())
    }

    /// Frees a segment whose process has ended.
    ///
    /// # Errors
    /// If the process is open, or those of [`Self::deallocate`].
    pub fn free(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let (owner, identity) = {
            let entry = self.owned(segment)?;
            let entry = entry.lock();
            (entry.process.clone(), entry.identity)
        };
        if self.has_process(segment.tenant, &owner) || identity.is_some_and(ProcessIdentity::is_running) {
            return Err(SegmentError::InUse { segment, process: owner });
        }
        self.deallocate(segment)
    }

    /// Whether a process of this host owns a segment.
    #[must_use]
    pub fn is_owned_by(&self, segment: SegmentKey, process: &str) -> bool {
        self.owned(segment).is_ok_and(|entry| entry.lock().process == process)
    }

    /// Whether a segment is owned here.
    #[must_use]
    pub fn owns(&self, segment: SegmentKey) -> bool {
        self.owned(segment).is_ok()
    }

    /// The length of a segment that is owned here, in bytes.
    ///
    /// # Errors
    /// If it is not owned here.
    pub fn bytes(&self, segment: SegmentKey) -> Result<u64, SegmentError> {
        let entry = self.owned(segment)?;
        entry.lock().bytes().ok_or(SegmentError::NotOwned(segment))
    }

    /// Serves the faults of the mapping of a segment in a program, as it comes from this
    /// descriptor. With `pulls`, all pages are pulled ahead of the program.
    ///
    /// # Errors
    /// If it is not owned here, or there is no thread for it.
    pub fn serve_faults(&self, segment: SegmentKey, uffd: OwnedFd, pulls: bool) -> Result<(), SegmentError> {
        self.shared.serve_faults(segment, uffd, pulls)
    }

    /// Pulls a page, if it is not here.
    ///
    /// # Errors
    /// If the segment is not owned here, or the page is lost.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn pull(&self, segment: SegmentKey, page: u32) -> Result<(), SegmentError> {
        self.shared.pull(segment, page)
    }

    /// Pulls all pages that are not here. Then no other host has a part in the segment.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    pub fn pull_all(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        self.shared.pull_all(segment)
    }

    /// Gives up the pages that are not here: touches of them are SIGBUS from now on, at any later
    /// owner as well. Then no other host has a part in the segment.
    ///
    /// # Errors
    /// If the segment is not owned here.
    pub fn discard(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        self.shared.discard(segment)
    }

    /// Pulls all pages, and ends the serving of faults: touches are plain again.
    ///
    /// # Errors
    /// Those of [`Self::pull_all`].
    pub fn close(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        self.shared.pull_all(segment)?;
        let entry = self.owned(segment)?;
        let served = entry.lock().served.take();
        let faults = served.as_ref().and_then(ServedFaults::faults);
        let _was_complete = faults.map(|faults| faults.disarm());
        Ok(())
    }

    pub(super) fn owned(&self, segment: SegmentKey) -> Result<SharedSegment, SegmentError> {
        self.shared.owned(segment)
    }
}

impl Drop for SegmentHost {
    fn drop(&mut self) {
        let segments = self.shared.segments.all();
        segments.iter().for_each(|(segment, _)| self.shared.end_faults(*segment));
        self.shared.jobs.end();
        let ended = self.worker.take().map(JoinHandle::join);
        debug_assert!(ended.is_none_or(|ended| ended.is_ok()), "the thread of segments panicked");
    }
}
