//! Keys that the registered memory itself names: a table of entries, one of which says for each run of pages which key opens it, and to whom.
//!
//! Whoever may write the table binds and strikes keys with one WRITE or CAS, without the target's processor (FineMem's memory windows). A key of a
//! table says how long its run is; where the run begins follows from the address, since runs are aligned to their length. An
//! entry holds for whoever looks after it was written; who must know that nobody looks at an old one any more asks the target ([`crate::Target::expel`]).

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::Memory;
use crate::keys::Grant;
use crate::memory::u64_from;
use crate::target::{Access, Identity, Scope, TargetError, Tenant};
use crate::work::Key;

/// Bytes of the shortest run.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of the longest run: each has its own row of entries.
pub const ROW_BYTES: u64 = PAGE_BYTES << CLASS_MAX;
/// Entries of a row: one for the whole (0), 16 for runs that begin at a multiple of 128 KiB (16 … 31), 512 for those that begin at a page (32 … 543).
pub const ROW_ENTRIES: u64 = 544;
/// Runs are of 4 KiB · 2^class, with a class up to this.
pub const CLASS_MAX: u8 = 9;

/// From this class on a run is spoken for by the entry of its first 128 KiB.
const MIDDLE_CLASS: u8 = 5;
const MIDDLE_FIRST: u64 = 16;
const PAGES_FIRST: u64 = 32;

/// Set in the keys of tables, clear in those of windows.
const TABLE_BIT: u32 = 1 << 31;
const CLASS_SHIFT: u32 = 27;
/// The bits of a table's key that are random.
const RANDOM_MASK: u32 = (1 << CLASS_SHIFT) - 1;

/// Where a region has its table, as offsets in the region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyTable {
    /// The first row, before the data: [`ROW_ENTRIES`] words of 8 bytes for each [`ROW_BYTES`] of it.
    pub entries_at: u64,
    /// What its keys open: from a multiple of [`ROW_BYTES`] to another.
    pub data: Range<u64>,
}

/// An entry: which key opens the run, and to which tenant. The lower half is the key, 0 for none; the upper half is whose memory it is, 0 for nobody's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct KeyEntry(pub u64);

impl KeyEntry {
    /// The key opens the run to the tenant.
    #[must_use]
    pub const fn open(key: Key, tenant: Tenant) -> Self {
        Self(((owner(tenant) as u64) << 32) | key.0 as u64)
    }

    /// The tenant's memory, which no key opens.
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

    /// The same memory, which no key opens.
    #[must_use]
    pub const fn without_key(self) -> Self {
        Self(self.0 >> 32 << 32)
    }

    /// Whether it is nobody's: clean.
    #[must_use]
    pub const fn is_unowned(self) -> bool {
        self.0 >> 32 == 0
    }

    /// Whether it is this tenant's.
    #[must_use]
    pub const fn is_owned_by(self, tenant: Tenant) -> bool {
        self.0 >> 32 == owner(tenant) as u64
    }
}

/// TenantTable are user ids, and the last one is no user's.
const fn owner(tenant: Tenant) -> u32 {
    tenant.0.wrapping_add(1)
}

impl Key {
    /// A key for a run of 4 KiB · 2^`class`, with these random bits.
    #[must_use]
    pub const fn of_run(class: u8, random: u32) -> Self {
        Self(TABLE_BIT | (class as u32) << CLASS_SHIFT | (random & RANDOM_MASK))
    }

    /// The class of the run that it opens; `None` if it is no key of a table.
    #[must_use]
    pub fn class(self) -> Option<u8> {
        let class = u8::try_from((self.0 & !TABLE_BIT) >> CLASS_SHIFT).ok()?;
        (self.is_table_key() && class <= CLASS_MAX).then_some(class)
    }

    /// Whether a table names it, and not the target.
    #[must_use]
    pub const fn is_table_key(self) -> bool {
        self.0 & TABLE_BIT != 0
    }

    /// The run that it opens at an address; `None` if it is no key of a table.
    #[inline]
    pub fn run(self, addr: u64) -> Option<Range<u64>> {
        let bytes = PAGE_BYTES << self.class()?;
        let start = addr & !(bytes - 1);
        Some(start..start.checked_add(bytes)?)
    }
}

/// The number of the entry, within its row, that speaks for the run of this length at this offset in the row.
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

/// A table and the region that it is of.
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
    /// A table in the region that begins at `base`.
    pub fn at(region: usize, base: u64, table: &KeyTable) -> Self {
        Self { region, base, table: table.clone() }
    }

    /// Whether such a table can be in a region of so many bytes.
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

    /// Whether an address is of its data.
    #[inline]
    pub fn holds(&self, addr: u64) -> bool {
        addr.checked_sub(self.base).is_some_and(|offset| self.table.data.contains(&offset))
    }

    /// What the key opens to `who` at that address, now. `memory` is the region's.
    #[inline]
    pub fn grant(&self, memory: &Memory, who: Identity, key: Key, addr: u64) -> Option<Grant> {
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
        let entry = memory.atomic_u64(usize::try_from(at).ok()?).load(Ordering::Acquire);
        let opens = entry == KeyEntry::open(key, who.tenant).0;
        let grant = Grant {
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
        // The second row, the 17th page of the 4th 128 KiB.
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
            let grant = opened(key, of(7), data + inside).expect("it is open");
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
    fn what_is_no_key_or_not_of_the_data_is_refused() {
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
        // Entries that are all zero open nothing, not even to the last tenant, whose owner would be 0.
        assert_eq!(at(BASE + ROW_BYTES, Key::of_run(0, 0)), None);
        assert_eq!(placed.grant(&memory, of(u32::MAX), Key(TABLE_BIT), BASE + ROW_BYTES), None);
    }
}
