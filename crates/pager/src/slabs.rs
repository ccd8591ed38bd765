//! Slabs: extents of the pool that hold evicted pages, shared by the volumes of one run.
//!
//! A [`Location`] is a slab's number and a page in it. Each has a count of the volumes that refer to it (a fork shares them)
//! and the CRC32C of what was written there. One sender fills slabs, in the order of eviction; anyone may release.
//! The records lie in memory that can outlive the daemon.

use std::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Mutex, PoisonError};

use aquifer_fabric::{Key, Memory, RemoteAddr};
use aquifer_pool::{Extent, NodeId, SizeClass};

use crate::page::{Location, PAGE_BYTES};

mod recovery;

/// Pages of the largest slab (2 MiB); a slab's number begins above the bits that count them.
pub const SLAB_PAGES_MAX: u32 = 512;
/// Slabs that one run may have: 128 GiB of the largest.
pub const SLABS_MAX: u32 = 1 << 16;

const ENTRY_BYTES: usize = 32;
const PAGES_OFFSET: usize = SLABS_MAX as usize * ENTRY_BYTES;
const PAGE_RECORD_BYTES: usize = 8;

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

/// Where a page's bytes are, and what they must sum to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The memory node.
    pub node: NodeId,
    /// Address and key there.
    pub remote: RemoteAddr,
    /// CRC32C of the page.
    pub crc: u32,
}

/// The slabs of one run.
#[derive(Debug)]
pub struct SlabSet {
    memory: Memory,
    emptied: Mutex<Vec<SlabId>>,
    pages: AtomicU64,
    bytes: AtomicU64,
    bytes_peak: AtomicU64,
}

impl SlabSet {
    /// No slabs yet.
    ///
    /// # Errors
    /// If the system gives no address space for the records.
    pub fn new() -> std::io::Result<Self> {
        let pages = SLABS_MAX as usize * SLAB_PAGES_MAX as usize;
        Ok(Self {
            memory: Memory::create("aquifer-slabs", PAGES_OFFSET + pages * PAGE_RECORD_BYTES)?,
            emptied: Mutex::new(Vec::new()),
            pages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bytes_peak: AtomicU64::new(0),
        })
    }

    /// Pages that are on memory nodes and referred to.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Bytes of pool memory taken by slabs: now, and the most there ever were.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.bytes_peak.load(Relaxed))
    }

    /// Where a page is. The caller must refer to it.
    #[must_use]
    pub fn place(&self, location: Location) -> Place {
        let entry = self.entry(location.slab());
        let addr = self.memory.atomic_u64(entry).load(Relaxed);
        let meta = self.memory.atomic_u64(entry + 8).load(Relaxed);
        Place {
            node: NodeId(u16::try_from(meta >> 32 & 0xffff).expect("16 bits")),
            remote: RemoteAddr {
                addr: addr + u64::from(location.index()) * PAGE_BYTES as u64,
                key: Key(u32::try_from(meta & 0xffff_ffff).expect("32 bits")),
            },
            crc: self.crc(location).load(Acquire),
        }
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
                self.emptied.lock().unwrap_or_else(PoisonError::into_inner).push(location.slab());
            }
        }
    }

    /// Slabs that became empty since the last call (some may have been refilled since).
    pub(crate) fn take_emptied(&self) -> Vec<SlabId> {
        std::mem::take(&mut *self.emptied.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether slabs have become empty.
    #[must_use]
    pub fn has_emptied(&self) -> bool {
        !self.emptied.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Record a fresh extent under a free number.
    pub(crate) fn publish(&self, slab: SlabId, extent: Extent) {
        let entry = self.entry(slab);
        let meta =
            u64::from(extent.key.0) | u64::from(extent.node.0) << 32 | u64::from(extent.class.k() + 1) << 48;
        self.memory.atomic_u64(entry).store(extent.addr, Relaxed);
        self.memory.atomic_u64(entry + 8).store(meta, Release);
        let bytes = extent.class.bytes();
        let now = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        self.bytes_peak.fetch_max(now, Relaxed);
    }

    /// Forget a slab and return its extent; `None` if it is not in use.
    pub(crate) fn withdraw(&self, slab: SlabId) -> Option<Extent> {
        let extent = self.extent(slab)?;
        assert_eq!(self.live_pages(slab), 0, "{slab:?} still holds pages");
        self.memory.atomic_u64(self.entry(slab) + 8).store(0, Release);
        self.bytes.fetch_sub(extent.class.bytes(), Relaxed);
        Some(extent)
    }

    /// The extent of a slab, if it is in use.
    pub(crate) fn extent(&self, slab: SlabId) -> Option<Extent> {
        let entry = self.entry(slab);
        let meta = self.memory.atomic_u64(entry + 8).load(Acquire);
        let k = u8::try_from(meta >> 48 & 0xff).expect("8 bits").checked_sub(1)?;
        Some(Extent {
            node: NodeId(u16::try_from(meta >> 32 & 0xffff).expect("16 bits")),
            addr: self.memory.atomic_u64(entry).load(Relaxed),
            class: SizeClass::new(k).expect("published classes are valid"),
            key: Key(u32::try_from(meta & 0xffff_ffff).expect("32 bits")),
        })
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
        self.crc(location).store(crc, Release);
        self.live(location.slab()).fetch_add(1, AcqRel);
        self.pages.fetch_add(1, Relaxed);
        let before = self.references(location).swap(1, AcqRel);
        assert_eq!(before, 0, "{location:?} was in use");
    }

    fn entry(&self, slab: SlabId) -> usize {
        slab.0 as usize * ENTRY_BYTES
    }

    fn live(&self, slab: SlabId) -> &AtomicU32 {
        self.memory.atomic_u32(self.entry(slab) + 16)
    }

    fn references(&self, location: Location) -> &AtomicU32 {
        self.memory.atomic_u32(PAGES_OFFSET + location.0 as usize * PAGE_RECORD_BYTES)
    }

    fn crc(&self, location: Location) -> &AtomicU32 {
        self.memory.atomic_u32(PAGES_OFFSET + location.0 as usize * PAGE_RECORD_BYTES + 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(node: u16) -> Extent {
        Extent { node: NodeId(node), addr: 0x20_0000, class: SizeClass::new(5).unwrap(), key: Key(77) }
    }

    #[test]
    fn a_slab_comes_and_goes_with_its_pages() {
        let slabs = SlabSet::new().unwrap();
        slabs.publish(SlabId(3), extent(2));
        let location = Location::new(SlabId(3), 31);
        slabs.occupy(location, 0xabcd);
        slabs.retain(location);
        assert_eq!(
            slabs.place(location),
            Place {
                node: NodeId(2),
                remote: RemoteAddr { addr: 0x20_0000 + 31 * 4096, key: Key(77) },
                crc: 0xabcd
            }
        );
        slabs.release(location);
        assert!(!slabs.has_emptied(), "the other volume still refers to it");
        slabs.release(location);
        assert_eq!(slabs.take_emptied(), vec![SlabId(3)]);
        assert_eq!(slabs.withdraw(SlabId(3)), Some(extent(2)));
        assert_eq!(slabs.withdraw(SlabId(3)), None);
        assert_eq!(slabs.bytes(), (0, 128 << 10));
    }

    #[test]
    #[should_panic(expected = "released more often")]
    fn a_release_too_many_is_noticed() {
        let slabs = SlabSet::new().unwrap();
        slabs.release(Location::new(SlabId(0), 0));
    }
}
