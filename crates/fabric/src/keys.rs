//! Key numbers, the ranges that keys grant, and the placement of regions. All providers share this.

use std::collections::VecDeque;
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
pub const REGIONS_LIMIT: usize = 64;
/// The greatest number of windows of one target.
pub const WINDOWS_LIMIT: usize = (1 << INDEX_BITS) - REGIONS_LIMIT;
/// Regions begin at multiples of this. At least as much unregistered space lies between them.
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
    /// Operations that it allows.
    pub access: Access,
    /// Initiators that it admits.
    pub scope: Scope,
    /// Index of the region that holds the range.
    pub region: usize,
}

impl KeyGrant {
    /// Checks whether `who` may access `len` bytes at `addr` with this right.
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
    regions: usize,
    regions_max: usize,
    windows_max: usize,
    secret: u64,
}

impl KeySlots {
    /// Slots for the given numbers of regions and windows. `secret` makes tags hard to guess.
    pub fn new(regions_max: usize, windows_max: usize, secret: u64) -> Self {
        assert!(regions_max <= REGIONS_LIMIT, "at most {REGIONS_LIMIT} regions");
        assert!(windows_max <= WINDOWS_LIMIT, "at most {WINDOWS_LIMIT} windows");
        Self {
            tags: vec![0; regions_max],
            free_windows: VecDeque::new(),
            regions: 0,
            regions_max,
            windows_max,
            secret,
        }
    }

    /// Allocates the key of the next region. `before` is the key that the region had at an earlier
    /// target, if any.
    pub fn allocate_region(&mut self, before: Option<Key>) -> Result<(usize, Key), TargetError> {
        let index = self.regions;
        if index == self.regions_max {
            return Err(TargetError::Full { what: "regions", limit: self.regions_max });
        }
        let key = match before {
            None => self.fresh(index),
            Some(key) if !key.is_table_key() && split(key).0 == index && split(key).1 != 0 => {
                self.tags[index] = split(key).1;
                key
            }
            Some(key) => return Err(TargetError::NoSuchKey(key)),
        };
        self.regions += 1;
        Ok((index, key))
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

    /// Releases the slot of an invalidated key. No access by the key may be in flight. The slot of
    /// a region is never reused.
    pub fn release(&mut self, index: usize) {
        if index >= self.regions_max {
            self.free_windows.push_back(index);
        }
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

/// The placement of regions in the target's address space.
#[derive(Debug, Default)]
pub struct AddressSpace {
    regions: Vec<Range<u64>>,
}

impl AddressSpace {
    /// Places a region. It never begins at zero, and never touches another region, so an access
    /// past its end hits nothing.
    pub fn place(&mut self, len: u64) -> Range<u64> {
        let end = self.regions.last().map_or(0, |region| region.end);
        let base = (end.div_ceil(REGION_ALIGN) + 1) * REGION_ALIGN;
        self.regions.push(base..base + len);
        base..base + len
    }

    /// The grant of a window, which must lie inside one region.
    pub fn grant(&self, window: &WindowSpec) -> Result<KeyGrant, TargetError> {
        let Range { start, end } = window.range;
        let holds = |region: &Range<u64>| region.start <= start && end <= region.end;
        match self.regions.iter().position(holds) {
            Some(region) if start < end => Ok(KeyGrant {
                base: start,
                len: end - start,
                access: window.access,
                scope: window.scope,
                region,
            }),
            _ => Err(TargetError::OutOfRange { start, end }),
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
    fn a_slot_goes_through_every_tag_before_one_comes_again() {
        for secret in 0..20 {
            let mut slots = KeySlots::new(1, 1, secret);
            let mut seen = HashSet::new();
            for _ in 0..TAG_MAX {
                let key = slots.allocate_window().unwrap();
                assert!(key.0 != 0 && split(key).0 == 1 && split(key).1 != 0);
                assert!(seen.insert(key), "{key:?} came again after {} binds", seen.len());
                slots.release(1);
            }
            assert!(!seen.insert(slots.allocate_window().unwrap()));
        }
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
