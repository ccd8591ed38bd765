//! The description of memory that an owner registers at a target.

use std::sync::Arc;

use crate::Memory;
use crate::key_table::{KeyTable, PlacedTable};
use crate::keys::{AddressSpace, KeyGrant, KeySlots};
use crate::memory::u64_from;
use crate::page_store::StoredPages;
use crate::target::{Access, Region, Scope, TargetError};
use crate::unit_map::UnitMap;
use crate::work::Key;

/// The description of memory that is to be registered.
#[derive(Debug)]
pub struct Registration {
    /// The memory.
    pub memory: Arc<Memory>,
    /// The translation table of a movable region: the place in the memory of the bytes of each
    /// unit of the region's addresses. The region has the addresses of the map, however
    /// large the memory is.
    ///
    /// An access is translated unit by unit. It loads the word of each unit once, and fails with
    /// [`crate::WorkError::RemoteAccess`] at a unit that is not there or not inside the memory. A
    /// WRITE that fails so may have written the units before. A word applies to every access that
    /// begins after it was stored; [`crate::Target::expel`] waits for those that began before.
    pub map: Option<UnitMap>,
    /// The part of the region that is stored elsewhere than in the memory. A movable region has
    /// none. Atomics do not reach it, and only the providers [`crate::tcp`] and [`crate::sim`]
    /// support it.
    pub stored: Option<StoredPages>,
    /// Rights of the region's own key.
    pub access: Access,
    /// Endpoints that may use the region's own key.
    pub scope: Scope,
    /// The key table, if the region has one. The region's own key then opens only the part before
    /// the table's data. A movable region has none.
    pub table: Option<KeyTable>,
    /// The key that the region had at an earlier target, for memory that keeps its key. A movable
    /// region then has the same addresses. To keep the addresses of others as well, all memory of
    /// the earlier target must be registered again in the same order.
    pub key: Option<Key>,
}

impl Registration {
    /// Describes memory without key table and translation, under a new key.
    #[must_use]
    pub fn plain(memory: Arc<Memory>, access: Access, scope: Scope) -> Self {
        Self { memory, map: None, stored: None, access, scope, table: None, key: None }
    }

    /// Checks the registration, and returns the number of addresses.
    pub(crate) fn check(&self) -> Result<u64, TargetError> {
        let is_changed = self.access.write || self.access.atomic || self.table.is_some();
        if is_changed && !self.memory.is_writable() {
            return Err(TargetError::ReadOnly);
        }
        let len = match &self.map {
            Some(map) => map.check()?,
            None => u64_from(self.memory.len()),
        };
        if let Some(table) = &self.table {
            PlacedTable::at(0, 0, table).check(len)?;
        }
        if let Some(stored) = &self.stored
            && (self.map.is_some() || !stored.fits(len))
        {
            return Err(TargetError::OutOfRange { start: stored.range.start, end: stored.range.end });
        }
        Ok(len)
    }

    /// Checks that the whole region is in memory, for a provider whose peers access the memory by
    /// themselves.
    ///
    /// # Errors
    /// [`TargetError::Unsupported`].
    pub fn check_is_in_memory(&self, provider: &'static str) -> Result<(), TargetError> {
        let what = "regions that are not in memory";
        if self.stored.is_some() { Err(TargetError::Unsupported { what, provider }) } else { Ok(()) }
    }

    /// Places the region, which has `len` addresses, and describes it and its own key. The key of a
    /// region with a key table opens only the part before the table's data.
    pub(crate) fn place(
        &self,
        len: u64,
        keys: &mut KeySlots,
        space: &mut AddressSpace,
    ) -> Result<(usize, Region, KeyGrant), TargetError> {
        let (slot, key) = keys.allocate_region(self.key)?;
        let range = match &self.map {
            Some(_) => space.place_movable(slot, len),
            None => space.place(slot, len).ok_or_else(|| {
                keys.release_region(slot);
                TargetError::Full { what: "addresses", limit: usize::MAX }
            })?,
        };
        let opened = self.table.as_ref().map_or(len, |table| table.data.start);
        let Self { access, scope, .. } = *self;
        let grant = KeyGrant { base: range.start, len: opened, access, scope, region: slot };
        Ok((slot, Region { base: range.start, len, key }, grant))
    }
}
