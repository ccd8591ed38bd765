//! Slabs: extents of the pool that hold evicted pages, shared by the volumes of one run.
//!
//! A [`Location`] is a slab's number and a page in the slab. Each location has a reference count
//! (volumes share locations after a fork) and the CRC32C of its bytes. A slab has up to three
//! replicas in memory and a backup on a disk, all on distinct nodes. One sender fills the slabs and
//! changes their replicas; any thread may release a location. The records are in memory that can
//! outlive the daemon. Format: `docs/formats/paging.md`, "Slab records".

use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::sync::{Arc, OnceLock};

use aquifer_fabric::{Key, Memory};
use aquifer_pool::{Extent, NodeClass, NodeId, SizeClass};
use parking_lot::Mutex;

use crate::copy_policy::CopyPolicy;
use crate::mutation::Mutation;
use crate::page::Location;
use crate::page_cache::CacheIndex;

mod activity;
mod page_records;
mod places;
mod recovery;
mod replicas;
mod spare_place;
#[cfg(test)]
mod tests;
mod vacating;

pub(crate) use page_records::{LOCATIONS_MAX, number_of as location_number};
pub use places::is_backup_place;
pub(crate) use recovery::UnfinishedReplica;
pub use replicas::{SlabReplicas, page_of};

/// Number of pages of the largest slab (2 MiB). In a [`Location`] the slab's number begins above
/// the bits for this number.
pub const SLAB_PAGES_MAX: u32 = 512;
/// Maximum number of slabs of one run: 128 GiB with slabs of the largest size.
pub const SLABS_MAX: u32 = 1 << 16;
/// Maximum number of replicas of a slab in memory. They have the first places of its record.
pub const REPLICAS_MAX: usize = 3;
/// The places of a slab's record for a backup on a disk, and for the one that replaces it.
const BACKUP_PLACES: Range<usize> = REPLICAS_MAX..REPLICAS_MAX + 2;
/// The place for a replica in memory that replaces one of [`REPLICAS_MAX`].
const SPARE_PLACE: usize = BACKUP_PLACES.end;
/// Number of places for replicas in a slab's record.
const PLACES: usize = SPARE_PLACE + 1;

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
/// Offset of the records of the further places, behind the first [`REPLICAS_MAX`], and bytes of one
/// of them.
const FURTHER_OFFSET: usize = (USED_OFFSET + 8).next_multiple_of(4096);
const FURTHER_BYTES: usize = 24;
const MEMORY_BYTES: usize = FURTHER_OFFSET + SLABS_MAX as usize * (PLACES - REPLICAS_MAX) * FURTHER_BYTES;
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

/// The slabs of one run.
#[derive(Debug)]
pub struct SlabSet {
    memory: Memory,
    policy: CopyPolicy,
    /// Set before the first backup is recorded. Until then nothing looks for backups.
    has_backups: AtomicBool,
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
    backup_bytes: AtomicU64,
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
        Self::with_policy(CopyPolicy::in_memory(replicas))
    }

    /// Creates an empty set, whose slabs will have the copies of this policy.
    ///
    /// # Errors
    /// If the system gives no address space for the records.
    ///
    /// # Panics
    /// If there are 0 or more than [`REPLICAS_MAX`] replicas.
    pub fn with_policy(policy: CopyPolicy) -> std::io::Result<Self> {
        assert!((1..=REPLICAS_MAX).contains(&policy.replicas), "{policy:?}");
        Ok(Self {
            memory: Memory::create("aquifer-slabs", MEMORY_BYTES)?,
            policy,
            has_backups: AtomicBool::new(false),
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
            backup_bytes: AtomicU64::new(0),
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

    /// The number of replicas in memory that each slab is to have.
    #[must_use]
    pub fn replicas_wanted(&self) -> usize {
        self.policy.replicas
    }

    /// The copies that each slab is to have.
    #[must_use]
    pub fn policy(&self) -> CopyPolicy {
        self.policy
    }

    /// Whether a slab may have several copies, so that operations need not wait for one node.
    pub(crate) fn may_have_several_copies(&self) -> bool {
        self.policy.copies() > 1
    }

    /// The number of locations in use.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Bytes of disk nodes that backups occupy.
    #[must_use]
    pub fn backup_bytes(&self) -> u64 {
        self.backup_bytes.load(Relaxed)
    }

    /// Bytes of memory nodes that replicas occupy: the present number and the peak.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.bytes_peak.load(Relaxed))
    }

    /// The complete replicas of a slab, as far as known. A slab with a referenced page has at least
    /// one.
    #[must_use]
    pub fn replicas(&self, slab: SlabId) -> SlabReplicas {
        let mut states_before = None;
        loop {
            let mut replicas = SlabReplicas::default();
            for place in self.places() {
                replicas.list[place] = self.replica(slab, place);
            }
            if !replicas.is_empty() {
                return replicas;
            }
            // If one replica is added while another is dropped, one pass over the places may miss
            // both. There is none if two passes find the same states, and none of them complete.
            let state = |place| self.state(slab, place).load(Acquire);
            let states: [u64; PLACES] = std::array::from_fn(|place| self.has_place(place).map_or(0, state));
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
    pub(crate) fn publish(&self, slab: SlabId, replicas: &[Extent], backup: Option<Extent>) {
        let copies = replicas.len() + usize::from(backup.is_some());
        assert!(copies > 0 && replicas.len() <= self.policy.replicas, "{} replicas", replicas.len());
        self.unmark(slab);
        self.activity.prepare(slab);
        for replica in replicas {
            self.add_replica(slab, *replica, NodeClass::Memory);
        }
        if let Some(backup) = backup {
            self.add_replica(slab, backup, NodeClass::Disk);
        }
    }

    /// Records a complete replica on a node of this class.
    pub(crate) fn add_replica(&self, slab: SlabId, replica: Extent, class: NodeClass) {
        let place = self.begin_replica(slab, replica, class);
        self.finish_replica(slab, place);
    }

    /// Records an extent that is to become a replica, on a node of this class, and returns its
    /// place.
    ///
    /// The extent is recorded before its pages are complete, so that a later agent can free it.
    pub(crate) fn begin_replica(&self, slab: SlabId, replica: Extent, class: NodeClass) -> usize {
        self.has_backups.fetch_or(class == NodeClass::Disk, AcqRel);
        let replicas = self.replicas(slab);
        assert!(
            replicas.on(replica.node).is_none(),
            "{slab:?} has a replica on node {} already",
            replica.node
        );
        let is_free =
            |place: &usize| replicas.at(*place).is_none() && self.unfinished(slab, *place).is_none();
        let found = match class {
            NodeClass::Memory => self.memory_places().find(is_free),
            NodeClass::Disk => BACKUP_PLACES.into_iter().find(is_free),
        };
        let place = found.expect("no more replicas than places");
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
        self.count_replica(place, replica);
    }

    /// Counts the bytes of a complete replica.
    fn count_replica(&self, place: usize, replica: Extent) {
        let bytes = replica.class.bytes();
        if is_backup_place(place) {
            self.backup_bytes.fetch_add(bytes, Relaxed);
        } else {
            let now = self.bytes.fetch_add(bytes, Relaxed) + bytes;
            self.bytes_peak.fetch_max(now, Relaxed);
        }
    }

    /// Counts the bytes of a replica that is dropped.
    fn uncount_replica(&self, place: usize, replica: Extent) {
        let bytes = if is_backup_place(place) { &self.backup_bytes } else { &self.bytes };
        bytes.fetch_sub(replica.class.bytes(), Relaxed);
    }

    /// The replica that is not complete yet, and its place, if there is one.
    pub(crate) fn unfinished_replica(&self, slab: SlabId) -> Option<(usize, Extent)> {
        self.places().find_map(|place| Some((place, self.unfinished(slab, place)?)))
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
            self.uncount_replica(place, replica);
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
        self.uncount_replica(place, replica);
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

    fn live(&self, slab: SlabId) -> &AtomicU32 {
        self.memory.atomic_u32(slab.0 as usize * ENTRY_BYTES + LIVE_OFFSET)
    }

    /// The inline log in the control word of an extent when its free was begun; 0 if no free was
    /// begun.
    fn inline_log(&self, slab: SlabId, place: usize) -> &AtomicU32 {
        let at = if place >= REPLICAS_MAX {
            Self::replica_offset(slab, place) + REPLICA_BYTES
        } else {
            slab.0 as usize * ENTRY_BYTES + RECORDS_OFFSET + place * 4
        };
        self.memory.atomic_u32(at)
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
