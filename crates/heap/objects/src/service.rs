//! The service of heaps: answers the requests of clients.
//!
//! Each heap has a lock, and its requests are answered in the threads of the target. Direct reads
//! take no lock of a heap: over TCP a thread of the target serves them, over RDMA the device, and a
//! program of the same machine reads the memory itself.

mod budget;
mod closing;
mod heat;
pub mod report;
mod tenant_heap;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use aquifer_fabric::{Key, MessageHandler, Region, Scope, Sender, Target, TargetError, Tenant};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::bytes::HeapBytes;
use crate::class::{BLOCK_ORDERS, FRAME_BYTES};
use crate::recovery::Damage;
use crate::wire::{Answer, BlockRegion, Refused, Request};
use budget::FrameBudget;
pub use budget::FrameSource;
use closing::{Closing, Registered};
use report::HeapReport;
use tenant_heap::{MERGES_PER_STEP, TenantHeap};

/// The tenant whose endpoints may see and change all heaps. No user has this number.
pub const OPERATOR: Tenant = Tenant(u32::MAX);
/// The kind of targets that tickets for heaps open.
pub const TICKET_SERVICE: u8 = 1;
/// Longest message: an object with its header, or regions.
pub const MESSAGE_BYTES_MAX: u32 = 40_000;
/// Most heaps of a node. Each has one region for each block size.
pub const HEAPS_MAX: usize = 4096;
/// Interval at which released addresses are freed: one to two intervals after their release.
const RELEASE_INTERVAL: Duration = Duration::from_secs(30);
/// Longest time of compaction in one call of [`HeapService::maintain`].
const COMPACTION_TIME: Duration = Duration::from_millis(20);
/// Interval at which free frames are searched for pages that reads have created.
const CLEAR_INTERVAL: Duration = Duration::from_secs(1);

/// Why a heap cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenHeapError {
    /// The node has [`HEAPS_MAX`] heaps.
    #[error("the node has {HEAPS_MAX} heaps, which is its limit")]
    TooMany,
    /// There is no memory for the heap.
    #[error("cannot create the memory of a heap: {0}")]
    Memory(#[from] io::Error),
    /// The target refuses the heap's regions.
    #[error("cannot register a heap: {0}")]
    Register(#[from] TargetError),
    /// The heap's memory is damaged.
    #[error("the memory of a heap is damaged: {0}")]
    Damaged(#[from] Damage),
    /// The heap was closed, and no operator has opened it again.
    #[error("the heap was closed: its programs filled more memory than its limit; set a new limit")]
    Closed,
    /// There is no memory for another pinned heap.
    #[error("there is no memory left for another heap that devices serve")]
    NoReserve,
    /// The heap's memory would not outlive the process.
    #[error("the memory of a heap is not kept: {0}")]
    NotKept(String),
    /// The service has no target.
    #[error("the service has ended")]
    Ended,
}

/// Record of a heap, which the next process receives with the heap's memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeapRecord {
    /// The number of the heap on its node.
    pub heap: u16,
    /// The user.
    pub tenant: u32,
    /// Most memory that the heap's blocks may take.
    pub limit_bytes: u64,
    /// The keys of the heap's regions, the smallest blocks first.
    pub keys: [u32; BLOCK_ORDERS],
}

/// Holds the memory of heaps for the next process.
pub trait HeapKeeper: Send + Sync + std::fmt::Debug {
    /// Holds a heap, in place of its previous record and memory.
    ///
    /// # Errors
    /// The reason why the heap is not held.
    fn hold(&self, record: &HeapRecord, fds: [BorrowedFd<'_>; 3]) -> Result<(), String>;

    /// Releases a heap that has ended.
    fn release(&self, heap: u16);
}

/// The heaps of a node.
#[derive(Debug)]
pub struct HeapService {
    node: u16,
    budget: Arc<FrameBudget>,
    heaps: Mutex<BTreeMap<Tenant, Arc<Mutex<TenantHeap>>>>,
    /// The numbers of heaps. Has a lock of its own, so that opening a heap waits for no other heap.
    numbers: Mutex<BTreeSet<u16>>,
    target: OnceLock<Weak<dyn Target>>,
    keeper: Option<Box<dyn HeapKeeper>>,
    devices: OnceLock<Devices>,
    upkeep: Mutex<Upkeep>,
    closing: Closing,
}

/// A target that serves the memory of heaps by devices.
#[derive(Debug)]
struct Devices {
    target: Weak<dyn Target>,
    /// Frames of a heap: devices pin them all.
    frames: u32,
}

/// The heap of a program of this machine.
#[derive(Debug)]
pub struct HeapShare {
    /// The heap's bytes and its names, open for reading only.
    pub fds: [OwnedFd; 2],
    heap: Weak<Mutex<TenantHeap>>,
}

impl HeapShare {
    /// Whether the heap was closed. Its memory is then truncated, so an access by the program
    /// raises SIGBUS.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.heap.strong_count() == 0
    }
}

/// Times of the last maintenance.
#[derive(Debug)]
struct Upkeep {
    expired: Instant,
    cleared: Instant,
}

impl HeapService {
    /// Creates a service without heaps on a node. Its heaps may take `bytes` together: from
    /// `source`, or without one, in addition to the memory that the node lends.
    #[must_use]
    pub fn new(
        node: u16,
        bytes: u64,
        source: Option<Arc<dyn FrameSource>>,
        keeper: Option<Box<dyn HeapKeeper>>,
    ) -> Self {
        let frames = u32::try_from(bytes / FRAME_BYTES).unwrap_or(u32::MAX).max(1);
        let now = Instant::now();
        Self {
            node,
            budget: Arc::new(FrameBudget::new(frames, source)),
            heaps: Mutex::default(),
            numbers: Mutex::default(),
            target: OnceLock::new(),
            keeper,
            devices: OnceLock::new(),
            upkeep: Mutex::new(Upkeep { expired: now, cleared: now }),
            closing: Closing::default(),
        }
    }

    /// Opens heaps through this target from now on, after those of an earlier process were
    /// restored. Before that, all requests are refused. The target must pass its messages to the
    /// service.
    pub fn open_through(&self, target: &Arc<dyn Target>) {
        let _ = self.target.set(Arc::downgrade(target));
    }

    /// Registers the memory of all heaps with devices, too. A heap takes `bytes` bytes from the
    /// beginning, because devices pin its memory. Must be called before heaps are restored.
    pub fn serve_by_devices(&self, target: &Arc<dyn Target>, bytes: u64) {
        let _ = self.devices.set(Devices { target: Arc::downgrade(target), frames: frames(bytes).max(1) });
    }

    /// Restores a heap of an earlier process.
    ///
    /// # Errors
    /// If the memory is damaged, or the target refuses it.
    pub fn restore(
        &self,
        target: &dyn Target,
        record: &HeapRecord,
        bytes: HeapBytes,
    ) -> Result<(), OpenHeapError> {
        let (tenant, quota) = (Tenant(record.tenant), frames(record.limit_bytes));
        let keys = Some(record.keys.map(Key));
        let heap = TenantHeap::restore(
            record.heap,
            bytes,
            Arc::clone(&self.budget),
            quota,
            self.devices.get().is_some(),
        )?;
        self.register(target, tenant, heap, keys)?;
        Ok(())
    }

    /// Opens or creates the heap of a tenant. Only the tenant's endpoints can read it.
    ///
    /// # Errors
    /// If the system or the target refuses.
    fn open(&self, tenant: Tenant) -> Result<Arc<Mutex<TenantHeap>>, OpenHeapError> {
        let target = self.target.get().and_then(Weak::upgrade).ok_or(OpenHeapError::Ended)?;
        let mut heaps = self.heaps.lock();
        if let Some(heap) = heaps.get(&tenant) {
            return Ok(Arc::clone(heap));
        }
        if self.closing.is_closed(tenant) {
            return Err(OpenHeapError::Closed);
        }
        if heaps.len() >= HEAPS_MAX {
            return Err(OpenHeapError::TooMany);
        }
        let number = {
            let used = self.numbers.lock();
            (0..=u16::MAX).find(|number| !used.contains(number)).ok_or(OpenHeapError::TooMany)?
        };
        let budget = Arc::clone(&self.budget);
        let heap = match self.devices.get() {
            None => {
                let quota = self.budget.total() / 2;
                TenantHeap::create(number, HeapBytes::create(self.budget.total())?, budget, quota)
            }
            Some(Devices { frames, .. }) => {
                self.budget.reserve(*frames).map_err(|_| OpenHeapError::NoReserve)?;
                TenantHeap::create_pinned(number, HeapBytes::create(*frames)?, budget, *frames)
            }
        };
        let opened = self.register_in(&mut heaps, &*target, tenant, heap, None);
        match (&opened, self.devices.get()) {
            (Ok(_), _) => tracing::info!(node = self.node, uid = tenant.0, "opened a heap"),
            (Err(_), Some(Devices { frames, .. })) => self.budget.release(*frames),
            (Err(_), None) => {}
        }
        opened
    }

    fn register(
        &self,
        target: &dyn Target,
        tenant: Tenant,
        heap: TenantHeap,
        keys: Option<[Key; BLOCK_ORDERS]>,
    ) -> Result<Arc<Mutex<TenantHeap>>, OpenHeapError> {
        self.register_in(&mut self.heaps.lock(), target, tenant, heap, keys)
    }

    fn register_in(
        &self,
        heaps: &mut BTreeMap<Tenant, Arc<Mutex<TenantHeap>>>,
        target: &dyn Target,
        tenant: Tenant,
        mut heap: TenantHeap,
        keys: Option<[Key; BLOCK_ORDERS]>,
    ) -> Result<Arc<Mutex<TenantHeap>>, OpenHeapError> {
        let mut registered = Registered::default();
        let prepared = self.prepare(&mut heap, target, tenant, keys, &mut registered);
        if let Err(error) = prepared {
            self.closing.add_regions(registered);
            return Err(error);
        }
        self.numbers.lock().insert(heap.number);
        let heap = Arc::new(Mutex::new(heap));
        heaps.insert(tenant, Arc::clone(&heap));
        Ok(heap)
    }

    /// Registers the memory of a heap, and has the keeper hold it. Notes in `registered` what a
    /// failure leaves at the targets.
    fn prepare(
        &self,
        heap: &mut TenantHeap,
        target: &dyn Target,
        tenant: Tenant,
        keys: Option<[Key; BLOCK_ORDERS]>,
        registered: &mut Registered,
    ) -> Result<(), OpenHeapError> {
        let scope = Scope::Tenant(tenant);
        heap.ledger.words.register(target, scope, keys, &mut registered.regions)?;
        if let Some(devices) = self.devices.get() {
            let target = devices.target.upgrade().ok_or(OpenHeapError::Ended)?;
            heap.ledger.words.register_raw(&*target, scope, &mut registered.on_device)?;
            let [data, names] = &registered.on_device[..] else { unreachable!("both were registered") };
            heap.raw_regions = Some([data, names].map(|region| self.block_region(heap, region)));
        }
        heap.regions = registered.regions.iter().map(|region| self.block_region(heap, region)).collect();
        self.keep(tenant, heap).map_err(OpenHeapError::NotKept)
    }

    fn block_region(&self, heap: &TenantHeap, region: &Region) -> BlockRegion {
        BlockRegion { base: region.base, key: region.key.0, heap: heap.number, node: self.node }
    }

    fn keep(&self, tenant: Tenant, heap: &TenantHeap) -> Result<(), String> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        let mut keys = [0; BLOCK_ORDERS];
        keys.iter_mut().zip(&heap.regions).for_each(|(key, region)| *key = region.key);
        let limit_bytes = u64::from(heap.quota) * FRAME_BYTES;
        let record = HeapRecord { heap: heap.number, tenant: tenant.0, limit_bytes, keys };
        keeper.hold(&record, heap.ledger.words.fds())
    }

    /// Opens the heap of a tenant for a program of this machine. Returns its bytes and its names,
    /// open for reading only.
    ///
    /// # Errors
    /// If the heap cannot be opened.
    pub fn share(&self, tenant: Tenant) -> Result<HeapShare, OpenHeapError> {
        let heap = self.open(tenant)?;
        let fds = heap.lock().ledger.words.read_only_fds()?;
        Ok(HeapShare { fds, heap: Arc::downgrade(&heap) })
    }

    /// Answers a request of a tenant.
    pub fn answer(&self, tenant: Tenant, message: &[u8], answer: &mut Vec<u8>) {
        let Some(request) = Request::decode(message) else {
            return Answer::Refused(Refused::Invalid).encode(answer);
        };
        if self.target.get().is_none() {
            return Answer::Refused(Refused::Busy).encode(answer);
        }
        if tenant == OPERATOR {
            let mut json = Vec::new();
            return match self.answer_operator(request, &mut json) {
                Ok(_) if !json.is_empty() => Answer::Report(&json).encode(answer),
                Ok(done) => done.encode(answer),
                Err(refused) => Answer::Refused(refused).encode(answer),
            };
        }
        let heap = self.heaps.lock().get(&tenant).cloned();
        let heap = match (heap, request) {
            (Some(heap), _) => heap,
            (None, Request::Open | Request::OpenRaw) => match self.open(tenant) {
                Ok(heap) => heap,
                Err(OpenHeapError::Closed) => return Answer::Refused(Refused::Closed).encode(answer),
                Err(error) => {
                    tracing::warn!(uid = tenant.0, %error, "cannot open a heap");
                    return Answer::Refused(Refused::Full).encode(answer);
                }
            },
            (None, _) if self.closing.is_closed(tenant) => {
                return Answer::Refused(Refused::Closed).encode(answer);
            }
            (None, _) => return Answer::Refused(Refused::NoObject).encode(answer),
        };
        let mut read = Vec::new();
        let result = heap.lock().answer(request, &mut read);
        result.unwrap_or_else(Answer::Refused).encode(answer);
    }

    /// Requests the memory of restored heaps from the source. To be called after the last restore.
    pub fn reserve_restored(&self) {
        self.budget.rebalance();
    }

    /// Compacts, and returns memory, where that is due. To be called ten times a second.
    pub fn maintain(&self) {
        self.maintain_at(Instant::now());
    }

    /// Does the work of [`Self::maintain`] that is due at `now`.
    pub fn maintain_at(&self, now: Instant) {
        let heaps: Vec<_> =
            self.heaps.lock().iter().map(|(tenant, heap)| (*tenant, Arc::clone(heap))).collect();
        let (expires, clears) = self.due(now);
        let deadline = Instant::now() + COMPACTION_TIME;
        for (tenant, heap) in heaps {
            if expires {
                heap.lock().expire_released();
            }
            if clears {
                let mut heap = heap.lock();
                heap.update_heat();
                if heap.clear_free_frames() {
                    drop(heap);
                    self.close(tenant);
                    continue;
                }
            }
            // The lock is released after each step, so that requests are answered in between.
            while Instant::now() < deadline {
                let mut heap = heap.lock();
                let Some(class) = heap.fragmented_class() else { break };
                heap.compact_step(class, MERGES_PER_STEP);
            }
        }
        self.closing.end_unused();
        self.deregister_unused();
        self.budget.rebalance();
    }

    /// Whether released addresses are to be freed, and free memory to be cleared.
    fn due(&self, now: Instant) -> (bool, bool) {
        let mut upkeep = self.upkeep.lock();
        let is_due = |last: &mut Instant, interval| {
            let is_due = now.saturating_duration_since(*last) >= interval;
            *last = if is_due { now } else { *last };
            is_due
        };
        (is_due(&mut upkeep.expired, RELEASE_INTERVAL), is_due(&mut upkeep.cleared, CLEAR_INTERVAL))
    }

    /// Compacts a tenant's heap by at most `merges_max` merges. Returns the number of merges.
    pub fn compact(&self, tenant: Tenant, merges_max: u64) -> u64 {
        let Some(heap) = self.heaps.lock().get(&tenant).cloned() else { return 0 };
        let classes = heap.lock().classes();
        let mut merges = 0;
        for class in classes {
            while merges < merges_max {
                let step = heap.lock().compact_step(class, MERGES_PER_STEP.min(merges_max - merges));
                merges += step;
                if step == 0 {
                    break;
                }
            }
        }
        merges
    }

    /// The report on a tenant's heap; `None` if the tenant has none.
    #[must_use]
    pub fn report(&self, tenant: Tenant) -> Option<HeapReport> {
        let heap = self.heaps.lock().get(&tenant).cloned()?;
        let report = heap.lock().report(self.node, tenant.0);
        Some(report)
    }

    /// The tenants that have heaps.
    #[must_use]
    pub fn tenants(&self) -> Vec<Tenant> {
        self.heaps.lock().keys().copied().collect()
    }

    /// The memory that heaps have taken, and the memory that they may take together, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> (u64, u64) {
        let bytes = |frames: u32| u64::from(frames) * FRAME_BYTES;
        (bytes(self.budget.reserved()), bytes(self.budget.total()))
    }

    /// Changes the memory limit of a tenant's heap. Memory above the limit stays allocated.
    fn set_limit(&self, tenant: Tenant, bytes: u64) -> Result<(), Refused> {
        self.closing.reopen(tenant);
        let heap = self.open(tenant).map_err(|_| Refused::Full)?;
        let mut heap = heap.lock();
        heap.quota = frames(bytes).min(self.budget.total());
        self.keep(tenant, &heap).map_err(|_| Refused::Full)
    }

    /// Answers an operator.
    fn answer_operator(&self, request: Request<'_>, json: &mut Vec<u8>) -> Result<Answer<'static>, Refused> {
        match request {
            Request::Report { from } => {
                let tenant = self.tenants().into_iter().find(|tenant| tenant.0 >= from);
                let report = tenant.and_then(|tenant| self.report(tenant)).ok_or(Refused::NoObject)?;
                *json = serde_json::to_vec(&report).map_err(|_| Refused::Invalid)?;
                Ok(Answer::Done(0))
            }
            // A few merges at a time, so that the thread can serve other requests in between.
            Request::Compact { tenant } => {
                let merges = self.compact(Tenant(tenant), MERGES_PER_STEP);
                Ok(Answer::Done(u32::try_from(merges).unwrap_or(u32::MAX)))
            }
            Request::SetLimit { tenant, bytes } => {
                self.set_limit(Tenant(tenant), bytes).map(|()| Answer::Done(0))
            }
            _ => Err(Refused::Invalid),
        }
    }
}

impl MessageHandler for HeapService {
    fn handle(&self, from: Sender, message: &[u8], answer: &mut Vec<u8>) {
        self.answer(from.who.tenant, message, answer);
    }
}

fn frames(bytes: u64) -> u32 {
    u32::try_from(bytes / FRAME_BYTES).unwrap_or(u32::MAX)
}
