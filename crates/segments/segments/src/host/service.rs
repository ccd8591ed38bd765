//! The interface of a host's segments: allocation, hand-overs, pulls and deallocation.

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
use super::peers::Peers;
use super::precedence::Precedence;
use super::programs::ProcessIdentity;
use super::pull_rate_limiter::PullRateLimiter;
use super::registry::{Creation, Registry};
use super::restores::Restores;
use super::segment_table::{SegmentTable, SharedSegment};
use super::served::ServedFaults;
use super::shared::{Arrival, HostShared, Segment};
use super::statistics::Statistics;
use super::wire::MESSAGE_BYTES_MAX;
use crate::pulling::lineage::LINKS_MAX;
use aquifer_ownership::{Evidence, Holder, Holding, Input, Life, Stage};

/// Time for which a call waits for the outcome of a hand-over.
const OUTCOME_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which a call waits until the directory has recorded this host as the owner.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a call waits until a process that has received a segment sends its userfaultfd.
const ARMING_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks for the outcome of a hand-over.
const OUTCOME_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The tenant of connections between agents. No user has this number.
const AGENTS: Tenant = Tenant(u32::MAX);

/// The parameters of [`SegmentHost::start`].
#[derive(Clone, Debug)]
pub struct SegmentOptions {
    /// The life of this host, which outlasts restarts of its agent.
    pub life: Life,
    /// The address at which agents of other hosts connect. `None`: segments stay on this host.
    pub listen: Option<SocketAddr>,
    /// The cluster's key, with which other agents prove that they belong to the cluster.
    pub key: ClusterKey,
    /// Maximum of bytes of segments of one tenant on this host.
    pub bytes_per_tenant: u64,
    /// Limit on bytes per second that are pulled ahead of all programs together. `None`: no limit.
    pub pull_rate: Option<u64>,
    /// Time for which processes may use segments after this process of the agent has ended. Other
    /// hosts must not treat this life as ended before.
    pub grace: Duration,
    /// The folder with the sockets of the services of this machine.
    pub sockets: PathBuf,
    /// The descriptors of this process, which are charged to tenants.
    pub descriptors: Arc<DescriptorShares>,
    /// Whether and how long the start retries requests to the directory.
    pub retries: DirectoryRetries,
    /// The lease of the host. Programs are served only while it is valid.
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
    /// Starts to serve segments to agents with the cluster's key, among them the segments that an
    /// earlier process of the agent has left.
    ///
    /// # Errors
    /// If the host cannot listen at the address, or the directory fails.
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
            pull_limiter: PullRateLimiter::new(pull_rate),
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

    /// Whether the host's lease is known to be valid.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.lease.lasts()
    }

    /// Waits, for at most [`ARMING_TIMEOUT`], until the faults of a segment that a process has just
    /// received are served.
    pub(super) fn wait_until_armed(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let mut entry = entry.lock();
        let pulled = Arc::clone(&entry.pulled);
        let _late = pulled.wait_while_for(&mut entry, |entry| entry.is_arming, ARMING_TIMEOUT);
        Ok(())
    }

    /// Time for which processes may use segments after this process of the agent has ended.
    #[must_use]
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// The life of this host.
    #[must_use]
    pub fn life(&self) -> Life {
        self.shared.own
    }

    /// Allocates a segment of `bytes` zero bytes for a process of this host. The length must be a
    /// multiple of the page size.
    ///
    /// # Errors
    /// If a segment with this key exists, the length is not valid, the tenant would exceed a limit,
    /// or the system refuses.
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
        Ok(self.add_owned(segment, process, memory, address, generation))
    }

    /// Records a process as the owner of a new segment, all pages of which are in `memory`.
    pub(super) fn add_owned(
        &self,
        segment: SegmentKey,
        process: &str,
        mut memory: SegmentMemory,
        address: u64,
        generation: u64,
    ) -> Arrival {
        let shared = &self.shared;
        let is_begun = memory.begin_map(generation, &[], true);
        debug_assert!(is_begun, "new memory has no other map");
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
        let arrival = new.arrival(segment).expect("the segment has memory");
        let former = shared.segments.replace(segment, new);
        // The copy of a deallocated segment with the same number.
        let copy = former.and_then(|former| former.lock().memory.take());
        copy.iter().for_each(|copy| shared.memories.free(copy));
        arrival
    }

    /// Deallocates a segment, which no process may use any more. Its number and its addresses can
    /// be reused.
    ///
    /// # Errors
    /// If the segment is not owned here, or is being handed over.
    pub fn deallocate(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let shared = &self.shared;
        let entry = self.owned(segment)?;
        self.wait_until_confirmed(segment, &entry);
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

    /// Whether no host owns a segment with this key.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn is_gone(&self, segment: SegmentKey) -> Result<bool, SegmentError> {
        Ok(!self.owns(segment) && self.shared.registry.find(segment)?.is_none())
    }

    /// Prepares a hand-over to another process of the tenant, so that [`Self::transfer`] needs only
    /// one message. Retracts a hand-over that is prepared already.
    ///
    /// # Errors
    /// If the segment is not owned here, the process does not exist, or its host is not prepared.
    /// Then no hand-over is prepared.
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

    /// Prepares a hand-over of a segment to its target process, which is on another host.
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
        self.wait_until_confirmed(segment, entry);
        self.shared.run(segment, entry, Input::Connect(to));
        if matches!(entry.lock().holder.holding(), Holding::Owned { stage: Stage::Preparing(_), .. }) {
            // The target did not answer.
            self.shared.run(segment, entry, Input::Abort);
        }
        match entry.lock().holder.holding() {
            Holding::Owned { stage: Stage::Ready(ready), .. } if ready == to => Ok(()),
            _ => Err(SegmentError::Declined(segment)),
        }
    }

    /// Waits until the directory has recorded this host as the owner without an intent, at most for
    /// [`CONFIRM_TIMEOUT`]: a segment that has just arrived may not be recorded yet.
    pub(super) fn wait_until_confirmed(&self, segment: SegmentKey, entry: &Mutex<Segment>) {
        if entry.lock().needs_directory() {
            self.shared.run(segment, entry, Input::Tick);
        }
        let mut entry = entry.lock();
        let changed = Arc::clone(&entry.pulled);
        let must_wait = |entry: &mut Segment| {
            entry.needs_directory()
                || matches!(entry.holder.holding(), Holding::Owned { stage: Stage::Retracting, .. })
        };
        let _late = changed.wait_while_for(&mut entry, must_wait, CONFIRM_TIMEOUT);
    }

    /// Hands over a segment for which a hand-over is prepared. The program must have lost its
    /// access.
    ///
    /// # Errors
    /// [`SegmentError::Declined`]: the segment is still owned here. [`SegmentError::Unknown`]: it
    /// may have arrived at the target.
    pub fn transfer(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        let entry = self.owned(segment)?;
        let is_ready = matches!(entry.lock().holder.holding(), Holding::Owned { stage: Stage::Ready(_), .. });
        if !is_ready {
            return self.pass_on(segment, &entry);
        }
        let began = Instant::now();
        entry.lock().is_awaited = true;
        self.shared.run(segment, &entry, Input::Transfer);
        self.wait_for_outcome(segment, &entry)?;
        self.shared.statistics.transfers.record(began.elapsed());
        Ok(())
    }

    /// Whether `tenure` is the present or the last tenure of a segment on this host, and belongs to
    /// `process`.
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
    /// The errors of [`Self::transfer`].
    pub fn resume_transfer(&self, segment: SegmentKey, process: &str) -> Result<(), SegmentError> {
        let entry = self.shared.segments.get(segment);
        // Without an entry, the segment has arrived at the target.
        let Some(entry) = entry else { return Ok(()) };
        {
            let mut entry = entry.lock();
            if entry.process != process {
                // Another process of this host owns the segment: it has arrived.
                return Ok(());
            }
            entry.is_awaited = true;
        }
        self.wait_for_outcome(segment, &entry)
    }

    /// Waits until it is known whether a segment has arrived, at most for [`OUTCOME_TIMEOUT`].
    fn wait_for_outcome(&self, segment: SegmentKey, entry: &Mutex<Segment>) -> Result<(), SegmentError> {
        let until = Instant::now() + OUTCOME_TIMEOUT;
        if matches!(entry.lock().holder.holding(), Holding::Sent { .. }) {
            self.shared.run(segment, entry, Input::Tick);
        }
        let mut entry = entry.lock();
        while matches!(entry.holder.holding(), Holding::Sent { .. }) && Instant::now() < until {
            // The worker queries the target.
            let changed = Arc::clone(&entry.pulled);
            changed.wait_for(&mut entry, OUTCOME_POLL_INTERVAL);
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

    /// Retracts a prepared hand-over.
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

    /// Statistics since the start.
    #[must_use]
    pub fn statistics(&self) -> &Statistics {
        &self.shared.statistics
    }

    /// Requests the owner of a segment to hand it over to another process of the tenant.
    ///
    /// # Errors
    /// If the segment is not owned here, its process is not open, or the other process does not
    /// exist.
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
    /// If the process is open or still runs, and the errors of [`Self::deallocate`].
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
    /// If the segment is not owned here.
    pub fn bytes(&self, segment: SegmentKey) -> Result<u64, SegmentError> {
        let entry = self.owned(segment)?;
        entry.lock().bytes().ok_or(SegmentError::NotOwned(segment))
    }

    /// Serves the faults of a program's mapping of a segment, which are read from the given
    /// userfaultfd. With `pulls`, all pages are pulled ahead of the program.
    ///
    /// # Errors
    /// If the segment is not owned here, the descriptor is no userfaultfd, or no thread can be
    /// started.
    pub fn serve_faults(&self, segment: SegmentKey, uffd: OwnedFd, pulls: bool) -> Result<(), SegmentError> {
        self.shared.serve_faults(segment, uffd, pulls)
    }

    /// Pulls a page, if it is not present.
    ///
    /// # Errors
    /// If the segment is not owned here, or the page is lost.
    ///
    /// # Panics
    /// If the segment has no such page.
    pub fn pull(&self, segment: SegmentKey, page: u32) -> Result<(), SegmentError> {
        self.shared.pull(segment, page)
    }

    /// Pulls all pages that are not present. Then the segment does not depend on other hosts.
    ///
    /// # Errors
    /// If the segment is not owned here, or a page is lost.
    pub fn pull_all(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        self.shared.pull_all(segment)
    }

    /// Discards the pages that are not present: from now on, an access to them raises SIGBUS, at
    /// any later owner as well. Then the segment does not depend on other hosts.
    ///
    /// # Errors
    /// If the segment is not owned here.
    pub fn discard(&self, segment: SegmentKey) -> Result<(), SegmentError> {
        self.shared.discard(segment)
    }

    /// Pulls all pages, and stops serving faults: accesses do not fault any more.
    ///
    /// # Errors
    /// The errors of [`Self::pull_all`].
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
