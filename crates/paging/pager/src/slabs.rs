//! Slabs: extents of the pool that hold evicted pages, shared by the volumes of one run.
//!
//! A [`Location`] is a slab's number and a page in the slab. Each location has a reference count
//! (volumes share locations after a fork) and the CRC32C of its bytes. A slab has one to three
//! replicas, on distinct nodes. One sender fills the slabs and changes their replicas; any thread
//! may release a location. The records are in memory that can outlive the daemon. Format:
//! `docs/formats/paging.md`, "Slab records".

use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::sync::{Arc, OnceLock};

use aquifer_fabric::{Key, Memory, RemoteAddr};
use aquifer_pool::{Extent, NodeId, SizeClass};
use parking_lot::Mutex;

use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::page_cache::CacheIndex;

mod activity;
mod page_records;
mod recovery;
mod spare_place;
#[cfg(test)]
mod tests;
mod vacating;

pub(crate) use page_records::{LOCATIONS_MAX, number_of as location_number};
pub(crate) use recovery::UnfinishedReplica;

/// Number of pages of the largest slab (2 MiB). In a [`Location`] the slab's number begins above
/// the bits for this number.
pub const SLAB_PAGES_MAX: u32 = 512;
/// Maximum number of slabs of one run: 128 GiB with slabs of the largest size.
pub const SLABS_MAX: u32 = 1 << 16;
/// Maximum number of replicas of a slab.
pub const REPLICAS_MAX: usize = 3;

const ENTRY_BYTES: usize = 64;
/// Bytes of the record of one replica: address and description.
const REPLICA_BYTES: usize = 16;
const LIVE_OFFSET: usize = REPLICAS_MAX * REPLICA_BYTES;
const RECORDS_OFFSET: usize = LIVE_OFFSET + 4;
const _: () = assert!(RECORDS_OFFSET + REPLICAS_MAX * 4 == ENTRY_BYTES);
const PAGES_OFFSET: usize = SLABS_MAX as usize * ENTRY_BYTES;
/// Offset of the number of slabs in use, behind all other records: one more than the highest number
/// of a slab that ever had a replica.
const USED_OFFSET: usize = PAGES_OFFSET + page_records::BYTES;
const MEMORY_BYTES: usize = USED_OFFSET + 8;
const GENERATION_SHIFT: u32 = 56;
/// Bit of a description: the extent is not a complete replica, or is being freed. It is neither
/// read nor written.
const UNFINISHED: u64 = 1 << 55;
/// Maximum number of damaged pages that wait for their repair. Further ones are reported when they
/// are read again.
const DAMAGED_MAX: usize = 1024;

/// Number of emptied slabs for which the sender is woken.
const EMPTIED_WAKE_COUNT: usize = 64;

/// The number of a slab.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlabId(pub u32);

impl Location {
    /// The location of page `index` of a slab.
    ///
    /// # Panics
    /// If there can be no such slab or page.
    #[must_use]
    pub fn new(slab: SlabId, index: u32) -> Self {
        assert!(slab.0 < SLABS_MAX && index < SLAB_PAGES_MAX, "{slab:?} page {index}");
        Self(slab.0 * SLAB_PAGES_MAX + index)
    }

    /// The slab.
    #[must_use]
    pub fn slab(self) -> SlabId {
        SlabId(self.0 / SLAB_PAGES_MAX)
    }

    /// The index of the page in the slab.
    #[must_use]
    pub fn index(self) -> u32 {
        self.0 % SLAB_PAGES_MAX
    }
}

/// The complete replicas of a slab: each holds all pages of the slab.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlabReplicas {
    /// Indexed by the place in the slab's record. A replica keeps its place while it exists.
    list: [Option<Extent>; REPLICAS_MAX],
}

impl SlabReplicas {
    /// The replicas with their places in the slab's record.
    pub fn placed(self) -> impl Iterator<Item = (usize, Extent)> {
        self.list
            .into_iter()
            .enumerate()
            .filter_map(|(place, replica)| replica.map(|replica| (place, replica)))
    }

    /// The replicas.
    pub fn iter(self) -> impl Iterator<Item = Extent> {
        self.list.into_iter().flatten()
    }

    /// The number of replicas.
    #[must_use]
    pub fn len(self) -> usize {
        self.iter().count()
    }

    /// Whether there is no replica: the slab is not in use.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The replica on a node.
    #[must_use]
    pub fn on(self, node: NodeId) -> Option<Extent> {
        self.iter().find(|replica| replica.node == node)
    }

    /// The replica at a place of the slab's record.
    #[must_use]
    pub fn at(self, place: usize) -> Option<Extent> {
        self.list[place]
    }

    /// The size class of the replicas, which is the same for all.
    #[must_use]
    pub fn class(self) -> Option<SizeClass> {
        self.iter().next().map(|replica| replica.class)
    }
}

/// The remote address of page `index` of a replica.
#[must_use]
pub fn page_of(replica: &Extent, index: u32) -> RemoteAddr {
    RemoteAddr { addr: replica.addr + u64::from(index) * PAGE_BYTES as u64, key: replica.key }
}

/// The slabs of one run.
#[derive(Debug)]
pub struct SlabSet {
    memory: Memory,
    replicas_wanted: usize,
    emptied: Mutex<Vec<SlabId>>,
    /// Set when many slabs have become empty and the sender is not notified yet.
    needs_notification: AtomicBool,
    damaged: Mutex<Vec<(Location, NodeId)>>,
    /// Bit `n % 64` is set while node `n` is slow. It only guides the choice of a replica.
    slow: AtomicU64,
    marks: vacating::Marks,
    activity: activity::Activity,
    /// The pages that are cached on this host; not set if none may be.
    cache: OnceLock<Arc<CacheIndex>>,
    pages: AtomicU64,
    bytes: AtomicU64,
    bytes_peak: AtomicU64,
}

impl SlabSet {
    /// Creates an empty set, whose slabs will have one replica.
    ///
    /// # Errors
    /// If the system gives no address space for the records.
    pub fn new() -> std::io::Result<Self> {
        Self::with_replicas(1)
    }

    /// Creates an empty set, whose slabs will have this number of replicas.
    ///
    /// # Errors
    /// If the system gives no address space for the records.
    ///
    /// # Panics
    /// If `replicas` is 0 or more than [`REPLICAS_MAX`].
    pub fn with_replicas(replicas: usize) -> std::io::Result<Self> {
        assert!((1..=REPLICAS_MAX).contains(&replicas), "{replicas} replicas");
        Ok(Self {
            memory: Memory::create("aquifer-slabs", MEMORY_BYTES)?,
            replicas_wanted: replicas,
            emptied: Mutex::new(Vec::new()),
            needs_notification: AtomicBool::new(false),
            damaged: Mutex::new(Vec::new()),
            slow: AtomicU64::new(0),
            marks: vacating::Marks::default(),
            activity: activity::Activity::default(),
            cache: OnceLock::new(),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bytes_peak: AtomicU64::new(0),
        })
    }

    /// Lets pages of these slabs be cached on this host. Only the first call has an effect.
    pub fn set_cache(&self, index: CacheIndex) {
        let _set_before = self.cache.set(Arc::new(index));
    }

    /// The pages that are cached on this host; `None` if none may be.
    #[must_use]
    pub fn cache(&self) -> Option<&Arc<CacheIndex>> {
        self.cache.get()
    }

    /// Drops a page from the cache that a program holds now, unless another program has it, too.
    pub(crate) fn uncache_held(&self, location: Location) {
        if let Some(cache) = self.cache()
            && self.references(location).load(Relaxed) == 1
        {
            cache.remove_hit(location);
        }
    }

    /// The number of replicas that each slab is to have.
    #[must_use]
    pub fn replicas_wanted(&self) -> usize {
        self.replicas_wanted
    }

    /// The number of locations in use.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Bytes of the pool that all replicas occupy: the present number and the peak.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.bytes_peak.load(Relaxed))
    }

    /// The number of places for replicas in a slab's record: one more than the replicas wanted, if
    /// the record has it, for a replica that is made before the one that it replaces is dropped.
    pub(crate) fn places(&self) -> usize {
        (self.replicas_wanted + 1).min(REPLICAS_MAX)
    }

    /// The complete replicas of a slab, as far as known. A slab with a referenced page has at least
    /// one.
    #[must_use]
    pub fn replicas(&self, slab: SlabId) -> SlabReplicas {
        let mut states_before = None;
        loop {
            let mut replicas = SlabReplicas::default();
            for (place, replica) in replicas.list.iter_mut().enumerate().take(self.places()) {
                *replica = self.replica(slab, place);
            }
            if !replicas.is_empty() {
                return replicas;
            }
            // If one replica is added while another is dropped, one pass over the places may miss
            // both. There is none if two passes find the same states, and none of them complete.
            let states: [u64; REPLICAS_MAX] =
                std::array::from_fn(|place| self.state(slab, place).load(Acquire));
            let is_none = |state: &u64| state & UNFINISHED != 0 || size_of(*state).is_none();
            if states.iter().all(is_none) && states_before == Some(states) {
                return replicas;
            }
            states_before = Some(states);
        }
    }

    /// The CRC32C of the page's bytes. The caller must hold a reference to the location.
    #[must_use]
    pub fn crc(&self, location: Location) -> u32 {
        self.crc_word(location).load(Acquire)
    }

    /// Reports that the replica on this node is damaged at this location, so that the sender
    /// repairs it.
    pub fn report_damage(&self, location: Location, node: NodeId) {
        let mut damaged = self.damaged.lock();
        if damaged.len() < DAMAGED_MAX && !damaged.contains(&(location, node)) {
            damaged.push((location, node));
        }
    }

    /// Removes a damaged page from the list of reports.
    pub(crate) fn pop_damaged(&self) -> Option<(Location, NodeId)> {
        self.damaged.lock().pop()
    }

    /// Whether a node is slow at present. Readers should prefer other nodes.
    #[must_use]
    pub fn is_slow(&self, node: NodeId) -> bool {
        self.slow.load(Relaxed) & Self::slow_bit(node) != 0
    }

    pub(crate) fn set_slow(&self, node: NodeId, is_slow: bool) {
        if is_slow {
            self.slow.fetch_or(Self::slow_bit(node), Relaxed);
        } else {
            self.slow.fetch_and(!Self::slow_bit(node), Relaxed);
        }
    }

    fn slow_bit(node: NodeId) -> u64 {
        1 << (node.0 % 64)
    }

    /// Adds a reference to a location that is in use.
    pub fn retain(&self, location: Location) {
        let before = self.references(location).fetch_add(1, Relaxed);
        assert!(before > 0, "{location:?} was free");
    }

    /// Removes a reference to a location. The location is free after the last.
    pub fn release(&self, location: Location) {
        let before = self.references(location).fetch_sub(1, AcqRel);
        assert!(before > 0, "{location:?} was released more often than retained");
        if before == 1 {
            self.uncache(location);
            self.pages.fetch_sub(1, Relaxed);
            if self.live(location.slab()).fetch_sub(1, AcqRel) == 1 {
                let mut emptied = self.emptied.lock();
                emptied.push(location.slab());
                if emptied.len() == EMPTIED_WAKE_COUNT {
                    self.needs_notification.store(true, Relaxed);
                }
            }
        }
    }

    /// Removes the slabs that became empty since the last call. Some may have been filled again
    /// since.
    pub(crate) fn drain_emptied(&self) -> Vec<SlabId> {
        std::mem::take(&mut *self.emptied.lock())
    }

    /// Returns true once after many slabs have become empty. The caller must then wake the sender.
    ///
    /// The sender finds fewer emptied slabs by itself, at its next call of
    /// [`Self::has_emptied_slabs`].
    #[must_use]
    pub fn consume_emptied_notification(&self) -> bool {
        self.needs_notification.load(Relaxed) && self.needs_notification.swap(false, Relaxed)
    }

    /// Whether slabs have become empty since the last [`Self::drain_emptied`].
    #[must_use]
    pub fn has_emptied_slabs(&self) -> bool {
        !self.emptied.lock().is_empty()
    }

    /// Records extents of one size as the replicas of a slab whose number is free.
    pub(crate) fn publish(&self, slab: SlabId, replicas: &[Extent]) {
        assert!((1..=self.replicas_wanted).contains(&replicas.len()), "{} replicas", replicas.len());
        self.unmark(slab);
        self.activity.prepare(slab);
        for replica in replicas {
            self.add_replica(slab, *replica);
        }
    }

    /// Records a complete replica.
    pub(crate) fn add_replica(&self, slab: SlabId, replica: Extent) {
        let place = self.begin_replica(slab, replica);
        self.finish_replica(slab, place);
    }

    /// Records an extent that is to become a replica, and returns its place.
    ///
    /// The extent is recorded before its pages are complete, so that a later agent can free it.
    pub(crate) fn begin_replica(&self, slab: SlabId, replica: Extent) -> usize {
        let replicas = self.replicas(slab);
        assert!(
            replicas.on(replica.node).is_none(),
            "{slab:?} has a replica on node {} already",
            replica.node
        );
        let is_free =
            |place: &usize| replicas.at(*place).is_none() && self.unfinished(slab, *place).is_none();
        let place = (0..self.places()).find(is_free).expect("no more replicas than places");
        self.memory.atomic_u32(USED_OFFSET).fetch_max(slab.0 + 1, Relaxed);
        self.record_replica(slab, place, replica, UNFINISHED);
        place
    }

    /// Records an extent at a free place. `stage` is [`UNFINISHED`], or 0 for a complete replica.
    fn record_replica(&self, slab: SlabId, place: usize, replica: Extent, stage: u64) {
        let meta = self.state(slab, place);
        let generation = (meta.load(Relaxed) >> GENERATION_SHIFT).wrapping_add(1) << GENERATION_SHIFT;
        let described = u64::from(replica.key.0)
            | u64::from(replica.node.0) << 32
            | u64::from(replica.class.k() + 1) << 48
            | stage
            | generation;
        self.inline_log(slab, place).store(0, Relaxed);
        // The address must be stored before the description: a reader that sees this address sees
        // no replica or the new one, but never the old one.
        self.memory.atomic_u64(Self::replica_offset(slab, place)).store(replica.addr, Release);
        meta.store(described, Release);
    }

    /// Marks the replica at a place as complete.
    pub(crate) fn finish_replica(&self, slab: SlabId, place: usize) {
        let replica = self.unfinished(slab, place).expect("it was begun");
        let meta = self.state(slab, place);
        meta.store(meta.load(Relaxed) & !UNFINISHED, Release);
        let bytes = replica.class.bytes();
        let now = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        self.bytes_peak.fetch_max(now, Relaxed);
    }

    /// The replica that is not complete yet, and its place, if there is one.
    pub(crate) fn unfinished_replica(&self, slab: SlabId) -> Option<(usize, Extent)> {
        (0..self.places()).find_map(|place| Some((place, self.unfinished(slab, place)?)))
    }

    /// Marks the replica at a place as being freed. It stays recorded until [`Self::clear`], so
    /// that a later agent can complete the free.
    ///
    /// `inline_log` is the result of
    /// [`PoolClient::last_record`](aquifer_pool::PoolClient::last_record).
    pub(crate) fn begin_free(&self, slab: SlabId, place: usize, inline_log: u32) {
        self.inline_log(slab, place).store(inline_log, Relaxed);
        if let Some(replica) = self.replica(slab, place) {
            self.state(slab, place).fetch_or(UNFINISHED, Release);
            self.bytes.fetch_sub(replica.class.bytes(), Relaxed);
        }
    }

    /// Drops the replica on a dead node. Returns false if there is none, or if it is the last one.
    ///
    /// The last replica stays recorded, so that its readers get the error of its node.
    pub(crate) fn drop_replica(&self, slab: SlabId, node: NodeId) -> bool {
        let replicas = self.replicas(slab);
        let found = replicas.placed().find(|(_, replica)| replica.node == node);
        let Some((place, replica)) = found.filter(|_| replicas.len() > 1) else {
            return false;
        };
        self.forget_replica(slab, place, replica);
        true
    }

    /// Removes the record of a slab that holds no pages.
    pub(crate) fn remove_slab(&self, slab: SlabId) {
        let replicas = self.replicas(slab);
        assert!(replicas.is_empty() || self.live_pages(slab) == 0, "{slab:?} still holds pages");
        for (place, replica) in replicas.placed() {
            self.forget_replica(slab, place, replica);
        }
    }

    fn forget_replica(&self, slab: SlabId, place: usize, replica: Extent) {
        self.clear(slab, place);
        self.bytes.fetch_sub(replica.class.bytes(), Relaxed);
    }

    /// Clears the record at a place.
    pub(crate) fn clear(&self, slab: SlabId, place: usize) {
        let meta = self.state(slab, place);
        meta.store(meta.load(Relaxed) & u64::MAX << GENERATION_SHIFT, Release);
    }

    fn replica(&self, slab: SlabId, place: usize) -> Option<Extent> {
        self.extent_at(slab, place, |stage| stage == 0)
    }

    fn unfinished(&self, slab: SlabId, place: usize) -> Option<Extent> {
        self.extent_at(slab, place, |stage| stage == UNFINISHED)
    }

    /// The extent at a place, complete or not: its state may change during the call.
    fn extent_at_place(&self, slab: SlabId, place: usize) -> Option<Extent> {
        self.extent_at(slab, place, |_| true)
    }

    /// The extent at a place, if `is_wanted` accepts its state.
    fn extent_at(&self, slab: SlabId, place: usize, is_wanted: impl Fn(u64) -> bool) -> Option<Extent> {
        let entry = Self::replica_offset(slab, place);
        loop {
            let meta = self.memory.atomic_u64(entry + 8).load(Acquire);
            let class = size_of(meta)?;
            if !is_wanted(meta & UNFINISHED) {
                return None;
            }
            let addr = self.memory.atomic_u64(entry).load(Acquire);
            if self.memory.atomic_u64(entry + 8).load(Relaxed) == meta {
                return Some(Extent {
                    node: NodeId(u16::try_from(meta >> 32 & 0xffff).expect("16 bits")),
                    addr,
                    class,
                    key: Key(u32::try_from(meta & 0xffff_ffff).expect("32 bits")),
                });
            }
            // A new replica was recorded at this place meanwhile.
        }
    }

    /// The number of locations of the slab that are in use.
    pub(crate) fn live_pages(&self, slab: SlabId) -> u32 {
        self.live(slab).load(Acquire)
    }

    /// Whether a location is free. Only the sender occupies locations, so for the sender a free one
    /// stays free.
    pub(crate) fn is_free(&self, location: Location) -> bool {
        self.references(location).load(Acquire) == 0
    }

    /// Drops a page from the cache, because its location is free.
    fn uncache(&self, location: Location) {
        if let Some(cache) = self.cache().filter(|_| !Mutation::KeepStale.is_active()) {
            cache.remove(location);
        }
    }

    /// Occupies a free location, with one reference. Only the sender may call this.
    pub(crate) fn occupy(&self, location: Location, crc: u32) {
        // The thread that released the location may not have dropped its page from the cache yet.
        self.uncache(location);
        self.crc_word(location).store(crc, Release);
        self.live(location.slab()).fetch_add(1, AcqRel);
        self.pages.fetch_add(1, Relaxed);
        let before = self.references(location).swap(1, AcqRel);
        assert_eq!(before, 0, "{location:?} was in use");
    }

    /// The slabs that may have a replica. A recovery must not read the records of all others,
    /// because that would allocate their memory.
    fn numbers(&self) -> impl Iterator<Item = SlabId> + use<> {
        (0..self.memory.atomic_u32(USED_OFFSET).load(Relaxed).min(SLABS_MAX)).map(SlabId)
    }

    /// The description of the replica at a place.
    fn state(&self, slab: SlabId, place: usize) -> &AtomicU64 {
        self.memory.atomic_u64(Self::replica_offset(slab, place) + 8)
    }

    fn replica_offset(slab: SlabId, place: usize) -> usize {
        slab.0 as usize * ENTRY_BYTES + place * REPLICA_BYTES
    }

    fn live(&self, slab: SlabId) -> &AtomicU32 {
        self.memory.atomic_u32(slab.0 as usize * ENTRY_BYTES + LIVE_OFFSET)
    }

    /// The inline log in the control word of an extent when its free was begun; 0 if no free was
    /// begun.
    fn inline_log(&self, slab: SlabId, place: usize) -> &AtomicU32 {
        self.memory.atomic_u32(slab.0 as usize * ENTRY_BYTES + RECORDS_OFFSET + place * 4)
    }

    fn references(&self, location: Location) -> &AtomicU32 {
        self.memory.atomic_u32(PAGES_OFFSET + page_records::offset_of(location))
    }

    fn crc_word(&self, location: Location) -> &AtomicU32 {
        self.memory.atomic_u32(PAGES_OFFSET + page_records::offset_of(location) + 4)
    }
}

/// The size class in the description of a replica; `None` if it describes none.
fn size_of(state: u64) -> Option<SizeClass> {
    let k = u8::try_from(state >> 48 & 0x7f).expect("7 bits").checked_sub(1)?;
    Some(SizeClass::new(k).expect("published classes are valid"))
}
