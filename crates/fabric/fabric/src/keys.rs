//! Key numbers, the ranges that keys grant, and the placement of regions, for all providers.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::mutation::Mutation;
use crate::target::{Access, Identity, Scope, TargetError, WindowSpec};
use crate::work::{Key, WorkError};

/// The low bits of a key: its slot.
const INDEX_BITS: u32 = 17;
/// The greatest tag. A tag is in the bits above the slot, except the highest bit, which marks keys
/// of key tables. A tag is never zero, so no key is zero.
const TAG_MAX: u32 = (1 << (31 - INDEX_BITS)) - 1;
/// The greatest number of regions of one target.
pub const REGIONS_LIMIT: usize = 65_536;
/// The greatest number of windows of one target.
pub const WINDOWS_LIMIT: usize = KEYS_LIMIT - REGIONS_LIMIT;
/// The number of key slots: of regions, then of windows.
pub const KEYS_LIMIT: usize = 1 << INDEX_BITS;
/// The default of the greatest number of regions of one target.
pub const REGIONS_DEFAULT: usize = 64;
/// Alignment of regions in bytes, and the least unregistered space between two regions.
const REGION_ALIGN: u64 = 2 << 20;

/// The slot and the tag of a key.
#[inline]
pub fn split(key: Key) -> (usize, u32) {
    ((key.0 & ((1 << INDEX_BITS) - 1)) as usize, key.0 >> INDEX_BITS)
}

/// A key together with the run that it opens. Two runs may have the same key in their table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KeyId {
    /// The key.
    pub key: Key,
    /// First address of the run that a key of a key table opens; 0 for other keys.
    pub start: u64,
}

impl KeyId {
    /// The identity of a key that is used at an address.
    pub fn at(key: Key, addr: u64) -> Self {
        Self { key, start: key.run(addr).map_or(0, |run| run.start) }
    }
}

/// The right that an operation needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Right {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// Compare-and-swap and fetch-and-add.
    Atomic,
}

/// The range that one bound key opens, and for which operations and endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyGrant {
    /// First address.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Operations that the key allows.
    pub access: Access,
    /// Endpoints that may use the key.
    pub scope: Scope,
    /// Index of the region that holds the range.
    pub region: usize,
}

impl KeyGrant {
    /// Checks that an endpoint may access `len` bytes at `addr` with this right.
    #[inline]
    pub fn check(&self, who: Identity, right: Right, addr: u64, len: u64) -> Result<(), WorkError> {
        if admits(self.scope, who) {
            covers((self.base, self.len), self.access, right, addr, len)
        } else {
            Err(WorkError::RemoteAccess)
        }
    }
}

/// Checks whether a range of `bytes` bytes from `base` with these rights permits an access of `len`
/// bytes at `addr`.
#[inline]
pub fn covers(
    (base, bytes): (u64, u64),
    access: Access,
    right: Right,
    addr: u64,
    len: u64,
) -> Result<(), WorkError> {
    let allowed = match right {
        Right::Read => access.read,
        Right::Write => access.write,
        Right::Atomic => access.atomic,
    };
    // Differences rather than sums: an address near 2^64 must not wrap into the range.
    let ends_inside = |offset| len <= bytes - offset || Mutation::IgnoreRangeEnd.is_active();
    let inside = addr >= base && addr - base <= bytes && ends_inside(addr - base);
    if allowed && inside { Ok(()) } else { Err(WorkError::RemoteAccess) }
}

/// Whether an endpoint with this identity is in the scope.
#[inline]
pub fn admits(scope: Scope, who: Identity) -> bool {
    match scope {
        Scope::Anyone => true,
        Scope::Tenant(tenant) => tenant == who.tenant,
        Scope::Host(host) => host == who.host,
    }
}

/// The allocator of key slots: the free slots, and the last tag of each.
///
/// A slot's tag cycles through all tags by a secret step, and slots are reused oldest first. So a
/// stale key stays invalid for as long as the bits allow.
#[derive(Debug)]
pub struct KeySlots {
    tags: Vec<u32>,
    free_windows: VecDeque<usize>,
    /// Free slots of regions below `regions_used`.
    free_regions: VecDeque<usize>,
    /// The first slot of a region that was never used.
    regions_used: usize,
    regions_max: usize,
    windows_max: usize,
    secret: u64,
}

impl KeySlots {
    /// Creates slots for the given numbers of regions and windows. `secret` makes tags hard to
    /// guess.
    pub fn new(regions_max: usize, windows_max: usize, secret: u64) -> Self {
        assert!(regions_max <= REGIONS_LIMIT, "at most {REGIONS_LIMIT} regions");
        assert!(windows_max <= WINDOWS_LIMIT, "at most {WINDOWS_LIMIT} windows");
        Self {
            tags: vec![0; regions_max],
            free_windows: VecDeque::new(),
            free_regions: VecDeque::new(),
            regions_used: 0,
            regions_max,
            windows_max,
            secret,
        }
    }

    /// Allocates the slot and the key of a region. `before` is the key that the region had at an
    /// earlier target, if any; its slot must be free.
    pub fn allocate_region(&mut self, before: Option<Key>) -> Result<(usize, Key), TargetError> {
        if let Some(key) = before {
            let (index, tag) = split(key);
            let is_region = !key.is_table_key() && tag != 0 && index < self.regions_max;
            if !is_region || !self.claim_region(index) {
                return Err(TargetError::NoSuchKey(key));
            }
            self.tags[index] = tag;
            return Ok((index, key));
        }
        let full = TargetError::Full { what: "regions", limit: self.regions_max };
        let index = if self.regions_used < self.regions_max {
            self.regions_used += 1;
            self.regions_used - 1
        } else {
            self.free_regions.pop_front().ok_or(full)?
        };
        Ok((index, self.fresh(index)))
    }

    /// Allocates a certain slot of a region, if it is free.
    fn claim_region(&mut self, index: usize) -> bool {
        if index >= self.regions_used {
            self.free_regions.extend(self.regions_used..index);
            self.regions_used = index + 1;
            return true;
        }
        let at = self.free_regions.iter().position(|free| *free == index);
        at.is_some_and(|at| self.free_regions.remove(at).is_some())
    }

    /// Allocates a fresh key for a window.
    pub fn allocate_window(&mut self) -> Result<Key, TargetError> {
        let full = TargetError::Full { what: "windows", limit: self.windows_max };
        let unused = self.tags.len();
        let index = if unused < self.regions_max + self.windows_max {
            self.tags.push(0);
            unused
        } else {
            self.free_windows.pop_front().ok_or(full)?
        };
        Ok(self.fresh(index))
    }

    /// Releases the slot of a window's invalidated key. No access by the key may be in flight.
    pub fn release_window(&mut self, key: Key) {
        let (index, _) = split(key);
        if index >= self.regions_max {
            self.free_windows.push_back(index);
        }
    }

    /// Releases the slot of a region. No access to the region may be in flight.
    pub fn release_region(&mut self, index: usize) {
        self.free_regions.push_back(index);
    }

    fn fresh(&mut self, index: usize) -> Key {
        let mix = mix(self.secret ^ (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let period = u64::from(TAG_MAX);
        // TAG_MAX is 3 * 43 * 127; a step that shares no factor with it visits every tag.
        let mut step = 1 + mix % (period - 1);
        while [3, 43, 127].iter().any(|factor| step.is_multiple_of(*factor)) {
            step += 1;
        }
        let last = match self.tags[index] {
            0 => (mix >> 32) % period,
            tag => u64::from(tag - 1),
        };
        let tag = u32::try_from((last + step) % period + 1).unwrap_or(1);
        self.tags[index] = tag;
        Key((tag << INDEX_BITS) | u32::try_from(index).unwrap_or(0))
    }
}

/// The first address of movable regions.
const MOVABLE_BASE: u64 = 1 << 62;
/// Addresses from the base of one movable region to that of the next.
const MOVABLE_STRIDE: u64 = 1 << 46;
const _: () = assert!(crate::unit_map::ADDRESSES_MAX + REGION_ALIGN <= MOVABLE_STRIDE);
const _: () = assert!(REGIONS_LIMIT as u64 <= MOVABLE_BASE / MOVABLE_STRIDE);

/// The placement of regions in the target's address space.
#[derive(Debug, Default)]
pub struct AddressSpace {
    /// The end and the slot of each region, by its base.
    regions: BTreeMap<u64, (u64, usize)>,
    /// The end of the last fixed region.
    fixed_end: u64,
}

impl AddressSpace {
    /// Places a fixed region behind all earlier ones. The region never begins at zero, and never
    /// touches another region, so an access past its end hits nothing. `None` if no addresses are
    /// left.
    pub fn place(&mut self, slot: usize, len: u64) -> Option<Range<u64>> {
        let base = (self.fixed_end.div_ceil(REGION_ALIGN) + 1) * REGION_ALIGN;
        let end = base.checked_add(len).filter(|end| *end <= MOVABLE_BASE - REGION_ALIGN)?;
        self.fixed_end = end;
        self.regions.insert(base, (end, slot));
        Some(base..end)
    }

    /// Places a movable region. Its base follows from its slot, so a region that is registered
    /// again under its old key has its old addresses.
    pub fn place_movable(&mut self, slot: usize, len: u64) -> Range<u64> {
        let base = MOVABLE_BASE + slot as u64 * MOVABLE_STRIDE;
        self.regions.insert(base, (base + len, slot));
        base..base + len
    }

    /// Removes the region with this base.
    pub fn remove(&mut self, base: u64) {
        self.regions.remove(&base);
    }

    /// The slot and the base of the region that contains `len` bytes at `addr`.
    pub fn find(&self, addr: u64, len: u64) -> Option<(usize, u64)> {
        let (&base, &(end, slot)) = self.regions.range(..=addr).next_back()?;
        (addr <= end && len <= end - addr).then_some((slot, base))
    }

    /// The grant of a window, which must lie inside one region.
    pub fn grant(&self, window: &WindowSpec) -> Result<KeyGrant, TargetError> {
        let Range { start, end } = window.range;
        let len = end.checked_sub(start).filter(|len| *len > 0);
        match len.and_then(|len| Some((len, self.find(start, len)?))) {
            Some((len, (region, _))) => {
                Ok(KeyGrant { base: start, len, access: window.access, scope: window.scope, region })
            }
            None => Err(TargetError::OutOfRange { start, end }),
        }
    }
}

/// The finaliser of splitmix64: each bit of the input changes half of the output bits on average.
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::target::{Host, Tenant};

    #[test]
    fn a_slot_uses_every_tag_before_one_is_reused() {
        for secret in 0..20 {
            let mut slots = KeySlots::new(1, 1, secret);
            let mut seen = HashSet::new();
            for _ in 0..TAG_MAX {
                let key = slots.allocate_window().unwrap();
                assert!(key.0 != 0 && split(key).0 == 1 && split(key).1 != 0);
                assert!(seen.insert(key), "{key:?} came again after {} binds", seen.len());
                slots.release_window(key);
            }
            assert!(!seen.insert(slots.allocate_window().unwrap()));
        }
    }

    #[test]
    fn slots_of_regions_are_reused_and_can_be_claimed() {
        let mut slots = KeySlots::new(3, 1, 7);
        let (first, key) = slots.allocate_region(None).unwrap();
        slots.release_region(first);
        let claimed = |slots: &mut KeySlots, key| slots.allocate_region(Some(key));
        assert_eq!(claimed(&mut slots, key).unwrap(), (0, key), "a free slot");
        assert!(claimed(&mut slots, key).is_err(), "the slot is in use");
        let last = Key(9 << INDEX_BITS | 2);
        assert_eq!(claimed(&mut slots, last).unwrap(), (2, last), "a slot that was never used");
        for wrong in [Key(0), Key(2), Key(9 << INDEX_BITS | 3), Key(1 << 31 | 9 << INDEX_BITS | 1)] {
            assert!(claimed(&mut slots, wrong).is_err(), "{wrong:?}");
        }
        let (passed_over, _) = slots.allocate_region(None).unwrap();
        assert_eq!(passed_over, 1);
        assert!(matches!(slots.allocate_region(None), Err(TargetError::Full { what: "regions", limit: 3 })));
        slots.release_region(0);
        let (again, fresh) = slots.allocate_region(None).unwrap();
        assert!(again == 0 && fresh != key, "a reused slot has a fresh tag");
    }

    #[test]
    fn regions_are_found_by_their_addresses() {
        let mut space = AddressSpace::default();
        let one = space.place(5, 4096).unwrap();
        let two = space.place(6, 100).unwrap();
        let three = space.place_movable(7, 8192);
        let four = space.place_movable(REGIONS_LIMIT - 1, crate::unit_map::ADDRESSES_MAX);
        for (range, slot) in [(&one, 5), (&two, 6), (&three, 7), (&four, REGIONS_LIMIT - 1)] {
            let len = range.end - range.start;
            for (addr, len) in [(range.start, len), (range.end - 1, 1), (range.end, 0)] {
                assert_eq!(space.find(addr, len), Some((slot, range.start)));
            }
            for (addr, len) in [(range.start - 1, 2), (range.end, 1), (range.start, len + 1)] {
                assert_eq!(space.find(addr, len), None);
            }
            assert_eq!(space.find(range.start, u64::MAX), None);
        }
        space.remove(two.start);
        assert_eq!(space.find(two.start, 1), None);
        assert!(space.place(6, 1).unwrap().start > two.end, "addresses of fixed regions are not reused");
        assert_eq!(space.place(6, u64::MAX), None);
        assert_eq!(space.place(6, MOVABLE_BASE), None);
    }

    #[test]
    fn a_range_is_checked_without_wrapping() {
        let access = Access::READ;
        let grant = KeyGrant { base: 100, len: 50, access, scope: Scope::Anyone, region: 0 };
        let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(1) };
        let check = |addr, len| grant.check(who, Right::Read, addr, len).is_ok();
        assert!(check(100, 50) && check(149, 1) && check(150, 0));
        assert!(!check(99, 1) && !check(100, 51) && !check(150, 1) && !check(151, 0));
        assert!(!check(120, u64::MAX) && !check(u64::MAX, 1) && !check(u64::MAX - 10, 121));
        assert!(grant.check(who, Right::Write, 100, 1).is_err());
    }
}
