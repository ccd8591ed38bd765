//! Slabs: extents of the pool that hold evicted pages, shared by the volumes of one run.
//!
//! A [`Location`] is a slab's number and a page in it. Each has a count of the volumes that refer to it (a fork shares them)
//! and the CRC32C of what was written there. A slab has one to three copies, on distinct nodes. One sender fills slabs, in the
//! order of eviction, and says which copies there are; anyone may release. The records lie in memory that can outlive the daemon.

use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::sync::{Mutex, PoisonError};

use aquifer_fabric::{Key, Memory, RemoteAddr};
use aquifer_pool::{Extent, NodeId, SizeClass};

use crate::page::{Location, PAGE_BYTES};

mod page_records;
mod recovery;
#[cfg(test)]
mod tests;
mod vacating;

pub(crate) use recovery::UnfinishedReplica;

/// Pages of the largest slab (2 MiB); a slab's number begins above the bits that count them.
pub const SLAB_PAGES_MAX: u32 = 512;
/// Slabs that one run may have: 128 GiB of the largest.
pub const SLABS_MAX: u32 = 1 << 16;
/// SlabReplicas that a slab may have.
pub const REPLICAS_MAX: usize = 3;

const ENTRY_BYTES: usize = 64;
/// Address and description of one copy.
const REPLICA_BYTES: usize = 16;
const LIVE_OFFSET: usize = REPLICAS_MAX * REPLICA_BYTES;
const RECORDS_OFFSET: usize = LIVE_OFFSET + 4;
const _: () = assert!(RECORDS_OFFSET + REPLICAS_MAX * 4 == ENTRY_BYTES);
const PAGES_OFFSET: usize = SLABS_MAX as usize * ENTRY_BYTES;
/// One more than the highest slab that ever had a copy; behind everything else.
const USED_OFFSET: usize = PAGES_OFFSET + page_records::BYTES;
const MEMORY_BYTES: usize = USED_OFFSET + 8;
const GENERATION_SHIFT: u32 = 56;
/// It is no copy yet, or none any more: its extent is taken, but nobody reads or writes pages there.
const UNFINISHED: u64 = 1 << 55;
/// Damaged pages that may wait for their repair; what is found beyond is found again.
const DAMAGED_MAX: usize = 1024;

/// So many slabs that have become empty are worth waking the sender.
const EMPTIED_TO_TELL: usize = 64;

/// A slab's number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlabId(pub u32);

impl Location {
    /// Page `index` of a slab.
    ///
    /// # Panics
    /// If there is no such slab or page.
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

    /// The page within the slab.
    #[must_use]
    pub fn index(self) -> u32 {
        self.0 % SLAB_PAGES_MAX
    }
}

/// The copies of a slab that hold all of its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlabReplicas {
    /// By their place in the slab's record, which does not change while a copy is there.
    list: [Option<Extent>; REPLICAS_MAX],
}

impl SlabReplicas {
    /// The copies with their places in the record.
    pub fn placed(self) -> impl Iterator<Item = (usize, Extent)> {
        self.list.into_iter().enumerate().filter_map(|(place, copy)| copy.map(|copy| (place, copy)))
    }

    /// The copies.
    pub fn iter(self) -> impl Iterator<Item = Extent> {
        self.list.into_iter().flatten()
    }

    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        self.iter().count()
    }

    /// Whether the slab is not in use.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The copy on a node.
    #[must_use]
    pub fn on(self, node: NodeId) -> Option<Extent> {
        self.iter().find(|copy| copy.node == node)
    }

    /// The copy at a place of the record.
    #[must_use]
    pub fn at(self, place: usize) -> Option<Extent> {
        self.list[place]
    }

    /// The size of each.
    #[must_use]
    pub fn class(self) -> Option<SizeClass> {
        self.iter().next().map(|copy| copy.class)
    }
}

/// Where page `index` of a copy is.
#[must_use]
pub fn page_of(copy: &Extent, index: u32) -> RemoteAddr {
    RemoteAddr { addr: copy.addr + u64::from(index) * PAGE_BYTES as u64, key: copy.key }
}

/// The slabs of one run.
#[derive(Debug)]
pub struct SlabSet {
    memory: Memory,
    replicas_wanted: usize,
    emptied: Mutex<Vec<SlabId>>,
    /// Nobody has told the sender of them yet.
    is_untold: AtomicBool,
    damaged: Mutex<Vec<(Location, NodeId)>>,
    /// A bit for every 64th node: it is slow to answer just now. A hint.
    slow: AtomicU64,
    marks: vacating::Marks,
    pages: AtomicU64,
    bytes: AtomicU64,
    bytes_peak: AtomicU64,
}

impl SlabSet {
    /// No slabs yet; each will have one copy.
    ///
    /// # Errors
    /// If the system gives no address space for the records.
    pub fn new() -> std::io::Result<Self> {
        Self::with_replicas(1)
    }

    /// No slabs yet; each is to have so many copies.
    ///
    /// # Errors
    /// If the system gives no address space for the records.
    ///
    /// # Panics
    /// If there are none, or more than [`REPLICAS_MAX`].
    pub fn with_replicas(replicas: usize) -> std::io::Result<Self> {
        assert!((1..=REPLICAS_MAX).contains(&replicas), "{replicas} replicas");
        Ok(Self {
            memory: Memory::create("aquifer-slabs", MEMORY_BYTES)?,
            replicas_wanted: replicas,
            emptied: Mutex::new(Vec::new()),
            is_untold: AtomicBool::new(false),
            damaged: Mutex::new(Vec::new()),
            slow: AtomicU64::new(0),
            marks: vacating::Marks::default(),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bytes_peak: AtomicU64::new(0),
        })
    }

    /// SlabReplicas that each slab is to have.
    #[must_use]
    pub fn replicas_wanted(&self) -> usize {
        self.replicas_wanted
    }

    /// Pages that are on memory nodes and referred to.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Bytes of pool memory taken by all copies of slabs: now, and the most there ever were.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.bytes_peak.load(Relaxed))
    }

    /// The copies of a slab that hold all of its pages, as far as anybody knows. Who refers to a page of it finds at least one.
    #[must_use]
    pub fn replicas(&self, slab: SlabId) -> SlabReplicas {
        let mut copies = SlabReplicas::default();
        // If one copy comes and another goes while they are looked at, one by one, both may be missed: then they are looked at again.
        for _ in 0..self.replicas_wanted {
            for (place, copy) in copies.list.iter_mut().enumerate().take(self.replicas_wanted) {
                *copy = self.replica(slab, place);
            }
            if !copies.is_empty() {
                break;
            }
        }
        copies
    }

    /// What a page's bytes must sum to. The caller must refer to it.
    #[must_use]
    pub fn crc(&self, location: Location) -> u32 {
        self.crc_word(location).load(Acquire)
    }

    /// The copy on that node is not what was written: the sender should repair it.
    pub fn report_damage(&self, location: Location, node: NodeId) {
        let mut damaged = self.damaged.lock().unwrap_or_else(PoisonError::into_inner);
        if damaged.len() < DAMAGED_MAX && !damaged.contains(&(location, node)) {
            damaged.push((location, node));
        }
    }

    /// A reported page that was not repaired yet.
    pub(crate) fn pop_damaged(&self) -> Option<(Location, NodeId)> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Whether a node is slow to answer just now: others are to be asked first.
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

    /// One more volume refers to the page.
    pub fn retain(&self, location: Location) {
        let before = self.references(location).fetch_add(1, Relaxed);
        assert!(before > 0, "{location:?} was free");
    }

    /// One volume fewer refers to the page; the last one frees it.
    pub fn release(&self, location: Location) {
        let before = self.references(location).fetch_sub(1, AcqRel);
        assert!(before > 0, "{location:?} was released more often than it was referred to");
        if before == 1 {
            self.pages.fetch_sub(1, Relaxed);
            if self.live(location.slab()).fetch_sub(1, AcqRel) == 1 {
                let mut emptied = self.emptied.lock().unwrap_or_else(PoisonError::into_inner);
                emptied.push(location.slab());
                if emptied.len() == EMPTIED_TO_TELL {
                    self.is_untold.store(true, Relaxed);
                }
            }
        }
    }

    /// Slabs that became empty since the last call (some may have been refilled since).
    pub(crate) fn drain_emptied(&self) -> Vec<SlabId> {
        std::mem::take(&mut *self.emptied.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether many slabs have become empty, and nobody has told the sender yet. The caller does; of fewer it learns when it looks of itself.
    #[must_use]
    pub fn consume_emptied_notification(&self) -> bool {
        self.is_untold.load(Relaxed) && self.is_untold.swap(false, Relaxed)
    }

    /// Whether slabs have become empty.
    #[must_use]
    pub fn has_emptied_slabs(&self) -> bool {
        !self.emptied.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Record fresh extents, of one size, under a free number.
    pub(crate) fn publish(&self, slab: SlabId, copies: &[Extent]) {
        assert!((1..=self.replicas_wanted).contains(&copies.len()), "{} copies", copies.len());
        self.unmark(slab);
        for copy in copies {
            self.add_replica(slab, *copy);
        }
    }

    /// Record a copy that holds all that the others hold.
    pub(crate) fn add_replica(&self, slab: SlabId, copy: Extent) {
        let place = self.begin_replica(slab, copy);
        self.finish_replica(slab, place);
    }

    /// Note that an extent is taken for a copy that is not whole yet, so that another agent could give it back; returns its place.
    pub(crate) fn begin_replica(&self, slab: SlabId, copy: Extent) -> usize {
        let copies = self.replicas(slab);
        assert!(copies.on(copy.node).is_none(), "{slab:?} has a copy on node {} already", copy.node);
        let is_free = |place: &usize| copies.at(*place).is_none() && self.unfinished(slab, *place).is_none();
        let place = (0..self.replicas_wanted).find(is_free).expect("no more copies than are wanted");
        let entry = Self::replica_offset(slab, place);
        let meta = self.memory.atomic_u64(entry + 8);
        let generation = (meta.load(Relaxed) >> GENERATION_SHIFT).wrapping_add(1) << GENERATION_SHIFT;
        let described = u64::from(copy.key.0)
            | u64::from(copy.node.0) << 32
            | u64::from(copy.class.k() + 1) << 48
            | UNFINISHED
            | generation;
        self.memory.atomic_u32(USED_OFFSET).fetch_max(slab.0 + 1, Relaxed);
        self.record(slab, place).store(0, Relaxed);
        // Readers that see this address see that there was no copy, or the new one: never the old one with it.
        self.memory.atomic_u64(entry).store(copy.addr, Release);
        meta.store(described, Release);
        place
    }

    /// The copy at a place holds all that the others hold.
    pub(crate) fn finish_replica(&self, slab: SlabId, place: usize) {
        let copy = self.unfinished(slab, place).expect("it was begun");
        let meta = self.memory.atomic_u64(Self::replica_offset(slab, place) + 8);
        meta.store(meta.load(Relaxed) & !UNFINISHED, Release);
        let bytes = copy.class.bytes();
        let now = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        self.bytes_peak.fetch_max(now, Relaxed);
    }

    /// The copy that was begun, if one was, and its place.
    pub(crate) fn unfinished_replica(&self, slab: SlabId) -> Option<(usize, Extent)> {
        (0..self.replicas_wanted).find_map(|place| Some((place, self.unfinished(slab, place)?)))
    }

    /// What is at a place goes back to the pool: it is no copy from now on, but noted until [`Self::clear`], so that another agent could go on. `record` is what
    /// [`PoolClient::last_record`](aquifer_pool::PoolClient::last_record) says.
    pub(crate) fn begin_free(&self, slab: SlabId, place: usize, record: u32) {
        self.record(slab, place).store(record, Relaxed);
        if let Some(copy) = self.replica(slab, place) {
            self.memory.atomic_u64(Self::replica_offset(slab, place) + 8).fetch_or(UNFINISHED, Release);
            self.bytes.fetch_sub(copy.class.bytes(), Relaxed);
        }
    }

    /// The node is dead: forget the copy that was there. The last copy stays, so that its readers learn what became of it; then, and if
    /// there was none, this is false.
    pub(crate) fn drop_replica(&self, slab: SlabId, node: NodeId) -> bool {
        let copies = self.replicas(slab);
        let found = copies.placed().find(|(_, copy)| copy.node == node);
        let Some((place, copy)) = found.filter(|_| copies.len() > 1) else {
            return false;
        };
        self.forget_replica(slab, place, copy);
        true
    }

    /// Forget a slab that holds no pages.
    pub(crate) fn remove_slab(&self, slab: SlabId) {
        let copies = self.replicas(slab);
        assert!(copies.is_empty() || self.live_pages(slab) == 0, "{slab:?} still holds pages");
        for (place, copy) in copies.placed() {
            self.forget_replica(slab, place, copy);
        }
    }

    fn forget_replica(&self, slab: SlabId, place: usize, copy: Extent) {
        self.clear(slab, place);
        self.bytes.fetch_sub(copy.class.bytes(), Relaxed);
    }

    /// Forget what is at a place.
    pub(crate) fn clear(&self, slab: SlabId, place: usize) {
        let meta = self.memory.atomic_u64(Self::replica_offset(slab, place) + 8);
        meta.store(meta.load(Relaxed) & u64::MAX << GENERATION_SHIFT, Release);
    }

    fn replica(&self, slab: SlabId, place: usize) -> Option<Extent> {
        self.extent_at(slab, place, |stage| stage == 0)
    }

    fn unfinished(&self, slab: SlabId, place: usize) -> Option<Extent> {
        self.extent_at(slab, place, |stage| stage == UNFINISHED)
    }

    /// What is at a place, however far it is: it may come further, or begin to go back, while it is looked at.
    fn noted(&self, slab: SlabId, place: usize) -> Option<Extent> {
        self.extent_at(slab, place, |_| true)
    }

    /// The copy at a place, if it is as far as asked.
    fn extent_at(&self, slab: SlabId, place: usize, is_asked: impl Fn(u64) -> bool) -> Option<Extent> {
        let entry = Self::replica_offset(slab, place);
        loop {
            let meta = self.memory.atomic_u64(entry + 8).load(Acquire);
            let k = u8::try_from(meta >> 48 & 0x7f).expect("7 bits").checked_sub(1)?;
            if !is_asked(meta & UNFINISHED) {
                return None;
            }
            let addr = self.memory.atomic_u64(entry).load(Acquire);
            if self.memory.atomic_u64(entry + 8).load(Relaxed) == meta {
                return Some(Extent {
                    node: NodeId(u16::try_from(meta >> 32 & 0xffff).expect("16 bits")),
                    addr,
                    class: SizeClass::new(k).expect("published classes are valid"),
                    key: Key(u32::try_from(meta & 0xffff_ffff).expect("32 bits")),
                });
            }
            // A new copy has come to this place meanwhile.
        }
    }

    /// Pages of the slab that are referred to.
    pub(crate) fn live_pages(&self, slab: SlabId) -> u32 {
        self.live(slab).load(Acquire)
    }

    /// Whether a page of a slab is free to be filled. Only the sender fills, so free stays free for it.
    pub(crate) fn is_free(&self, location: Location) -> bool {
        self.references(location).load(Acquire) == 0
    }

    /// The sender takes a free page for one volume.
    pub(crate) fn occupy(&self, location: Location, crc: u32) {
        self.crc_word(location).store(crc, Release);
        self.live(location.slab()).fetch_add(1, AcqRel);
        self.pages.fetch_add(1, Relaxed);
        let before = self.references(location).swap(1, AcqRel);
        assert_eq!(before, 0, "{location:?} was in use");
    }

    /// The slabs that may have copies: whoever recovers them need not look at, and thereby get, the memory of all others.
    fn numbers(&self) -> impl Iterator<Item = SlabId> + use<> {
        (0..self.memory.atomic_u32(USED_OFFSET).load(Relaxed).min(SLABS_MAX)).map(SlabId)
    }

    fn replica_offset(slab: SlabId, place: usize) -> usize {
        slab.0 as usize * ENTRY_BYTES + place * REPLICA_BYTES
    }

    fn live(&self, slab: SlabId) -> &AtomicU32 {
        self.memory.atomic_u32(slab.0 as usize * ENTRY_BYTES + LIVE_OFFSET)
    }

    /// What an extent's control word said when its return was begun; 0: that was not begun.
    fn record(&self, slab: SlabId, place: usize) -> &AtomicU32 {
        self.memory.atomic_u32(slab.0 as usize * ENTRY_BYTES + RECORDS_OFFSET + place * 4)
    }

    fn references(&self, location: Location) -> &AtomicU32 {
        self.memory.atomic_u32(PAGES_OFFSET + page_records::offset_of(location))
    }

    fn crc_word(&self, location: Location) -> &AtomicU32 {
        self.memory.atomic_u32(PAGES_OFFSET + page_records::offset_of(location) + 4)
    }
}
