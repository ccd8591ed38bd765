//! Key tables: entries in a region's own memory, each with the key that opens a run of pages, and
//! the tenant that owns the run.
//!
//! A host with write access to the table binds or revokes a key by one WRITE or CAS, without the
//! target's processor (FineMem's memory windows). A key of a table encodes the length of its run.
//! The start of the run follows from the address, since a run is aligned to its length.
//!
//! An entry applies to every access that begins after the entry was written.
//! [`crate::Target::expel`] waits for accesses that began before.

use std::ops::Range;

use crate::Memory;
use crate::keys::KeyGrant;
use crate::memory::u64_from;
use crate::target::{Access, Identity, Scope, TargetError, Tenant};
use crate::work::Key;

/// Length of the shortest run, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Length of the longest run, in bytes. Each such range has a row of entries.
pub const ROW_BYTES: u64 = PAGE_BYTES << CLASS_MAX;
/// Number of entries in a row: one for the whole row (0), 16 for runs that begin at a multiple of
/// 128 KiB (16 … 31), 512 for runs that begin at any page (32 … 543).
pub const ROW_ENTRIES: u64 = 544;
/// The greatest class. A run has 4 KiB · 2^class bytes.
pub const CLASS_MAX: u8 = 9;

/// The least class of runs whose entry is that of their first 128 KiB.
const MIDDLE_CLASS: u8 = 5;
const MIDDLE_FIRST: u64 = 16;
const PAGES_FIRST: u64 = 32;

/// The bit that is set in keys of key tables and clear in keys of windows.
const TABLE_BIT: u32 = 1 << 31;
const CLASS_SHIFT: u32 = 27;
/// The bits of a table's key that are random.
const RANDOM_MASK: u32 = (1 << CLASS_SHIFT) - 1;

/// The place of a key table, as offsets in its region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyTable {
    /// The first row, which lies before the data. Each [`ROW_BYTES`] of data has [`ROW_ENTRIES`]
    /// words of 8 bytes.
    pub entries_at: u64,
    /// The range that the keys open. Both ends are multiples of [`ROW_BYTES`].
    pub data: Range<u64>,
}

/// An entry: the key that opens the run, and the tenant that owns it. The lower half is the key, 0
/// for none. The upper half is the owner, 0 for none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct KeyEntry(pub u64);

impl KeyEntry {
    /// Creates an entry whose key opens the run to the tenant.
    #[must_use]
    pub const fn open(key: Key, tenant: Tenant) -> Self {
        Self(((owner(tenant) as u64) << 32) | key.0 as u64)
    }

    /// Creates an entry of a run that the tenant owns and no key opens.
    #[must_use]
    pub const fn closed(tenant: Tenant) -> Self {
        Self::open(Key(0), tenant)
    }

    /// The key; [`Key`] zero if there is none.
    #[must_use]
    pub const fn key(self) -> Key {
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        Key(self.0 as u32)
    }

    /// The entry with the same owner and without a key.
    #[must_use]
    pub const fn without_key(self) -> Self {
        Self(self.0 >> 32 << 32)
    }

    /// Whether no tenant owns the run: its memory has been cleared.
    #[must_use]
    pub const fn is_unowned(self) -> bool {
        self.0 >> 32 == 0
    }

    /// The tenant that owns the run, if any does.
    #[must_use]
    pub fn tenant(self) -> Option<Tenant> {
        let owner = u32::try_from(self.0 >> 32).expect("32 bits");
        (!self.is_unowned()).then(|| Tenant(owner.wrapping_sub(1)))
    }

    /// Whether this tenant owns the run.
    #[must_use]
    pub const fn is_owned_by(self, tenant: Tenant) -> bool {
        self.0 >> 32 == owner(tenant) as u64
    }
}

/// The owner field of a tenant. Tenants are user ids, and the greatest id is not a user, so the sum
/// does not reach 0.
const fn owner(tenant: Tenant) -> u32 {
    tenant.0.wrapping_add(1)
}

impl Key {
    /// Creates a key for a run of 4 KiB · 2^`class`, with the given random bits.
    #[must_use]
    pub const fn of_run(class: u8, random: u32) -> Self {
        Self(TABLE_BIT | (class as u32) << CLASS_SHIFT | (random & RANDOM_MASK))
    }

    /// The class of the run that the key opens; `None` if it is not a key of a key table.
    #[must_use]
    pub fn class(self) -> Option<u8> {
        let class = u8::try_from((self.0 & !TABLE_BIT) >> CLASS_SHIFT).ok()?;
        (self.is_table_key() && class <= CLASS_MAX).then_some(class)
    }

    /// Whether this is a key of a key table.
    #[must_use]
    pub const fn is_table_key(self) -> bool {
        self.0 & TABLE_BIT != 0
    }

    /// The run that the key opens at an address; `None` if it is not a key of a key table.
    #[inline]
    pub fn run(self, addr: u64) -> Option<Range<u64>> {
        let bytes = PAGE_BYTES << self.class()?;
        let start = addr & !(bytes - 1);
        Some(start..start.checked_add(bytes)?)
    }
}

/// The index, within its row, of the entry for a run of `bytes` bytes at `offset` in the row.
#[inline]
const fn entry_index(bytes: u64, offset: u64) -> u64 {
    if bytes == ROW_BYTES {
        0
    } else if bytes >= PAGE_BYTES << MIDDLE_CLASS {
        MIDDLE_FIRST + offset / (PAGE_BYTES << MIDDLE_CLASS)
    } else {
        PAGES_FIRST + offset / PAGE_BYTES
    }
}

/// A key table and the region that contains it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacedTable {
    /// Index of the region.
    pub region: usize,
    /// The region's first address.
    pub base: u64,
    /// The table.
    pub table: KeyTable,
}

impl PlacedTable {
    /// Places the table of the region that begins at `base`.
    pub fn at(region: usize, base: u64, table: &KeyTable) -> Self {
        Self { region, base, table: table.clone() }
    }

    /// Checks whether the table fits a region of `len` bytes.
    pub fn check(&self, len: u64) -> Result<(), TargetError> {
        let Range { start, end } = self.table.data;
        if self.fits(len) { Ok(()) } else { Err(TargetError::BadTable { start, end }) }
    }

    fn fits(&self, len: u64) -> bool {
        let KeyTable { entries_at, data } = &self.table;
        let is_aligned = [self.base, data.start, data.end].iter().all(|at| at.is_multiple_of(ROW_BYTES));
        let rows = data.end.saturating_sub(data.start) / ROW_BYTES;
        let end = rows.checked_mul(ROW_ENTRIES * 8).and_then(|bytes| entries_at.checked_add(bytes));
        is_aligned
            && rows > 0
            && data.end <= len
            && entries_at.is_multiple_of(8)
            && end.is_some_and(|end| end <= data.start)
    }

    /// Whether an address is in the range that the table's keys open.
    #[inline]
    pub fn holds(&self, addr: u64) -> bool {
        addr.checked_sub(self.base).is_some_and(|offset| self.table.data.contains(&offset))
    }

    /// The range that the key opens to this endpoint at an address, by the
    /// current entry. `memory` must be the region's.
    #[inline]
    pub fn grant(&self, memory: &Memory, who: Identity, key: Key, addr: u64) -> Option<KeyGrant> {
        let run = key.run(addr)?;
        let data = &self.table.data;
        let offset = run.start.checked_sub(self.base)?.checked_sub(data.start)?;
        if offset >= data.end - data.start {
            return None;
        }
        let bytes = run.end - run.start;
        let number = offset / ROW_BYTES * ROW_ENTRIES + entry_index(bytes, offset % ROW_BYTES);
        let at = self.table.entries_at.checked_add(number.checked_mul(8)?)?;
        if at.checked_add(8)? > u64_from(memory.len()) || !at.is_multiple_of(8) {
            return None;
        }
        let entry = memory.load_u64(usize::try_from(at).ok()?);
        let opens = entry == KeyEntry::open(key, who.tenant).0;
        let grant = KeyGrant {
            base: run.start,
            len: bytes,
            access: Access::READ_WRITE,
            scope: Scope::Tenant(who.tenant),
            region: self.region,
        };
        opens.then_some(grant)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::keys::Right;
    use crate::target::Host;

    const BASE: u64 = 4 * ROW_BYTES;

    fn placed() -> (PlacedTable, Memory) {
        let table = KeyTable { entries_at: 4096, data: ROW_BYTES..3 * ROW_BYTES };
        let memory = Memory::create("test", usize::try_from(3 * ROW_BYTES).unwrap()).unwrap();
        (PlacedTable { region: 3, base: BASE, table }, memory)
    }

    fn of(tenant: u32) -> Identity {
        Identity { host: Host(1), epoch: 1, tenant: Tenant(tenant) }
    }

    fn put(memory: &Memory, number: u64, entry: KeyEntry) {
        memory.atomic_u64(usize::try_from(4096 + number * 8).unwrap()).store(entry.0, Ordering::SeqCst);
    }

    #[test]
    fn each_class_has_its_entry_and_opens_its_run_alone() {
        let (placed, memory) = placed();
        assert!(placed.fits(3 * ROW_BYTES) && !placed.fits(3 * ROW_BYTES - 1));
        let data = BASE + ROW_BYTES;
        // The second row, the 17th page of its fourth 128 KiB.
        let inside = ROW_BYTES + 3 * (128 << 10) + 16 * PAGE_BYTES;
        for class in 0..=CLASS_MAX {
            let bytes = PAGE_BYTES << class;
            let key = Key::of_run(class, 0xfff_fff7);
            let start = inside / bytes * bytes;
            let within = start % ROW_BYTES;
            let number = ROW_ENTRIES
                + match class {
                    9 => 0,
                    5..=8 => 16 + within / (128 << 10),
                    _ => 32 + within / PAGE_BYTES,
                };
            put(&memory, number, KeyEntry::open(key, Tenant(7)));
            let opened = |key, who, addr| placed.grant(&memory, who, key, addr);
            let grant = opened(key, of(7), data + inside).expect("the key opens the run");
            assert_eq!((grant.base, grant.len, grant.region), (data + start, bytes, 3));
            assert!(grant.check(of(7), Right::Write, data + start, bytes).is_ok());
            assert!(grant.check(of(7), Right::Write, data + start, bytes + 1).is_err());
            assert!(grant.check(of(7), Right::Atomic, data + start, 8).is_err());
            assert_eq!(opened(key, of(8), data + inside), None, "another tenant");
            assert_eq!(opened(Key(key.0 ^ 1), of(7), data + inside), None, "another key");
            assert_eq!(opened(Key(key.0 ^ 1 << CLASS_SHIFT), of(7), data + inside), None, "another class");
            assert_eq!(opened(key, of(7), data + inside - ROW_BYTES), None, "another row");
            put(&memory, number, KeyEntry::closed(Tenant(7)));
            assert_eq!(opened(key, of(7), data + inside), None, "struck");
        }
    }

    #[test]
    fn keys_of_other_kinds_and_addresses_outside_the_data_are_refused() {
        let (placed, memory) = placed();
        let at = |addr, key| placed.grant(&memory, of(0), key, addr);
        for addr in [0, BASE - 1, BASE, BASE + ROW_BYTES - 1, BASE + 3 * ROW_BYTES, u64::MAX, u64::MAX - 4095]
        {
            for class in 0..16 {
                assert_eq!(at(addr, Key::of_run(class, 0)), None, "{addr:#x}");
            }
            assert_eq!(at(addr, Key(0)), None);
        }
        assert!(!Key(0x7fff_ffff).is_table_key() && Key::of_run(0, 0).is_table_key());
        // An entry of zeros opens nothing, not even to the last tenant, whose owner field would be
        // 0.
        assert_eq!(at(BASE + ROW_BYTES, Key::of_run(0, 0)), None);
        assert_eq!(placed.grant(&memory, of(u32::MAX), Key(TABLE_BIT), BASE + ROW_BYTES), None);
    }
}
