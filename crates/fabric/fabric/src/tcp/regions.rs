//! The regions of a target, which its serving threads look up without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::key_table::PlacedTable;
use crate::unit_map::RegionMemory;

/// The address, memory and key table of a region.
#[derive(Debug)]
pub(super) struct RegionMapping {
    pub base: u64,
    pub memory: RegionMemory,
    pub table: Option<PlacedTable>,
}

/// The data of a key table: first address, end and slot of its region.
type TableRange = (u64, u64, usize);

/// The regions by slot, and the ranges of their key tables.
#[derive(Debug)]
pub(super) struct SharedRegions {
    slots: Box<[AtomicPtr<RegionMapping>]>,
    /// The ranges of the key tables, sorted by address.
    tables: Mutex<Arc<[TableRange]>>,
    /// Number of changes of `tables`.
    version: AtomicU64,
}

impl SharedRegions {
    pub fn new(slots: usize) -> Self {
        let slots = (0..slots).map(|_| AtomicPtr::default()).collect();
        Self { slots, tables: Mutex::default(), version: AtomicU64::new(1) }
    }

    /// Stores the region of a slot. Must be called with the target's lock held.
    pub fn insert(&self, slot: usize, mapping: RegionMapping) {
        if let Some(PlacedTable { base, table, .. }) = &mapping.table {
            let range = (base + table.data.start, base + table.data.end, slot);
            self.change_tables(|tables| tables.push(range));
        }
        let before = self.slots[slot].swap(Box::into_raw(Box::new(mapping)), Ordering::SeqCst);
        assert!(before.is_null(), "a slot is used by one region at a time");
    }

    /// The region in a slot.
    ///
    /// # Safety
    /// During the lifetime of the result, the `active` word of the calling session must be odd, or
    /// the target's lock held.
    #[inline]
    pub unsafe fn get(&self, slot: usize) -> Option<&RegionMapping> {
        let mapping = self.slots.get(slot)?.load(Ordering::Acquire);
        // SAFETY: the pointer is that of a box. Before it is freed it is made unreachable, and then
        // the lock and all `active` words are waited for.
        unsafe { mapping.as_ref() }
    }

    /// Removes the region from a slot. Must be called with the target's lock held.
    pub fn unlink(&self, slot: usize) -> UnlinkedRegion {
        self.change_tables(|tables| tables.retain(|(.., of)| *of != slot));
        UnlinkedRegion(self.slots[slot].swap(std::ptr::null_mut(), Ordering::SeqCst))
    }

    fn change_tables(&self, change: impl FnOnce(&mut Vec<TableRange>)) {
        let mut tables = self.tables.lock();
        let mut changed = tables.to_vec();
        change(&mut changed);
        changed.sort_unstable();
        *tables = changed.into();
        self.version.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for SharedRegions {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            // SAFETY: nothing refers to `self` any more, so no session uses its regions.
            unsafe { UnlinkedRegion(*slot.get_mut()).free() };
        }
    }
}

/// A region that no session finds any more. Sessions may still be using it.
#[derive(Debug)]
pub(super) struct UnlinkedRegion(*mut RegionMapping);

// SAFETY: it is a box that nothing else frees.
unsafe impl Send for UnlinkedRegion {}

impl UnlinkedRegion {
    /// Frees the region.
    ///
    /// # Safety
    /// Since the region was removed, the target's lock must have been released, and then every
    /// `active` word seen even or changed.
    pub unsafe fn free(self) {
        if !self.0.is_null() {
            // SAFETY: the pointer is that of a box, which no session uses by the caller's
            // guarantee.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
}

/// A session's copy of the ranges of all key tables.
#[derive(Debug, Default)]
pub(super) struct TableIndex {
    version: u64,
    tables: Arc<[TableRange]>,
}

impl TableIndex {
    /// The slot of the region whose key table covers an address.
    #[inline]
    pub fn find(&mut self, regions: &SharedRegions, addr: u64) -> Option<usize> {
        if regions.version.load(Ordering::Acquire) != self.version {
            let tables = regions.tables.lock();
            self.version = regions.version.load(Ordering::Acquire);
            self.tables = Arc::clone(&tables);
        }
        let at = self.tables.partition_point(|(start, ..)| *start <= addr).checked_sub(1)?;
        let (_, end, slot) = self.tables[at];
        (addr < end).then_some(slot)
    }
}
