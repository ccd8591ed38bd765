//! A block as the heap records it: its slots, and the objects in them.

use crate::class::ClassId;
use crate::pointer::BlockAddress;

/// The number of a block's memory in its heap. It is not its address: after a merge several
/// addresses name one block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// A block's record of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectRecord {
    /// The object's number. A number is never used twice in a heap, so the objects of any two
    /// blocks can be in one.
    pub id: u64,
    /// The block address of the allocation, or to which the object's pointers were released (§3.3).
    pub home: BlockAddress,
}

/// A block: its slots, and the addresses that name it.
#[derive(Clone, Debug)]
pub struct Block {
    class: ClassId,
    /// The address with which the block was made. New objects have it as their home.
    address: BlockAddress,
    /// All addresses that name the block, first the one with which it was made.
    names: Vec<BlockAddress>,
    records: Vec<Option<ObjectRecord>>,
    /// A bit for each slot that is in use.
    used: Vec<u64>,
    live: u32,
    /// No slot below is free.
    first_free: u32,
}

impl Block {
    /// Creates an empty block.
    #[must_use]
    pub fn new(address: BlockAddress, class: ClassId, slots: u32) -> Self {
        Self {
            class,
            address,
            names: vec![address],
            records: vec![None; slots as usize],
            used: vec![0; slots.div_ceil(64) as usize],
            live: 0,
            first_free: 0,
        }
    }

    /// The size class.
    #[must_use]
    pub fn class(&self) -> ClassId {
        self.class
    }

    /// The address with which the block was made.
    #[must_use]
    pub fn address(&self) -> BlockAddress {
        self.address
    }

    /// All addresses that name the block.
    #[must_use]
    pub fn names(&self) -> &[BlockAddress] {
        &self.names
    }

    /// Number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        u32::try_from(self.records.len()).expect("the number of slots is a u32")
    }

    /// Number of objects.
    #[must_use]
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Number of free slots.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.slots() - self.live
    }

    /// The object in a slot.
    #[must_use]
    pub fn record(&self, slot: u32) -> Option<ObjectRecord> {
        self.records.get(slot as usize).copied().flatten()
    }

    /// The slots that are in use, a bit for each.
    #[must_use]
    pub fn used(&self) -> &[u64] {
        &self.used
    }

    /// All objects with their slots, in ascending order.
    pub fn objects(&self) -> impl Iterator<Item = (u32, ObjectRecord)> + '_ {
        let objects = (0..).zip(&self.records);
        objects.filter_map(|(slot, record)| Some((slot, (*record)?)))
    }

    /// The slot of an object. The hint is tried first (§3.2).
    #[must_use]
    pub fn find(&self, id: u64, hint: u32) -> Option<u32> {
        let is_it = |slot: u32| self.record(slot).is_some_and(|record| record.id == id);
        if is_it(hint) {
            return Some(hint);
        }
        self.objects().find(|(_, record)| record.id == id).map(|(slot, _)| slot)
    }

    /// The lowest free slot.
    #[must_use]
    pub fn free_slot(&self) -> Option<u32> {
        let first_word = self.first_free / 64;
        let words = self.used.iter().enumerate().skip(first_word as usize);
        let slot = words
            .map(|(at, word)| (u32::try_from(at).expect("few words") * 64, word.trailing_ones()))
            .find_map(|(from, bit)| (bit < 64).then_some(from + bit))?;
        (slot < self.slots()).then_some(slot)
    }

    /// Puts an object into a free slot.
    ///
    /// # Panics
    /// If the slot is in use or does not exist.
    pub fn put(&mut self, slot: u32, record: ObjectRecord) {
        let place = &mut self.records[slot as usize];
        assert!(place.replace(record).is_none(), "slot {slot} is in use");
        self.used[slot as usize / 64] |= 1 << (slot % 64);
        self.live += 1;
        if slot == self.first_free {
            self.first_free = slot + 1;
        }
    }

    /// Frees a slot. Returns the object that was there.
    pub fn remove(&mut self, slot: u32) -> Option<ObjectRecord> {
        let record = self.records.get_mut(slot as usize)?.take()?;
        self.used[slot as usize / 64] &= !(1 << (slot % 64));
        self.live -= 1;
        self.first_free = self.first_free.min(slot);
        Some(record)
    }

    /// Changes the home of an object. Returns the old one.
    pub fn rehome(&mut self, slot: u32, home: BlockAddress) -> Option<BlockAddress> {
        let record = self.records.get_mut(slot as usize)?.as_mut()?;
        Some(std::mem::replace(&mut record.home, home))
    }

    /// Adds an address that names the block.
    pub fn add_name(&mut self, name: BlockAddress) {
        if !self.names.contains(&name) {
            self.names.push(name);
        }
    }

    /// Removes an address that named the block.
    pub fn remove_name(&mut self, name: BlockAddress) {
        self.names.retain(|other| *other != name);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::collections::btree_map::Entry;

    use proptest::prelude::*;

    use super::*;

    const HOME: BlockAddress = BlockAddress { order: 0, number: 3 };

    proptest! {
        #[test]
        fn a_block_is_a_map_of_slots(
            slots in 1_u32..200,
            steps in prop::collection::vec((any::<bool>(), 0_u32..200), 0..300),
        ) {
            let mut block = Block::new(HOME, ClassId(0), slots);
            let mut model = BTreeMap::new();
            for (at, (put, slot)) in (1..).zip(steps) {
                if put {
                    let lowest = (0..slots).find(|slot| !model.contains_key(slot));
                    prop_assert_eq!(block.free_slot(), lowest);
                    let slot = if at % 3 == 0 { slot % slots } else { lowest.unwrap_or(0) };
                    if let Entry::Vacant(place) = model.entry(slot) {
                        block.put(slot, ObjectRecord { id: at, home: HOME });
                        place.insert(at);
                    }
                } else {
                    prop_assert_eq!(block.remove(slot).map(|record| record.id), model.remove(&slot));
                }
                prop_assert_eq!(block.live() as usize, model.len());
            }
            let objects: Vec<(u32, u64)> = block.objects().map(|(slot, record)| (slot, record.id)).collect();
            prop_assert_eq!(objects, model.clone().into_iter().collect::<Vec<_>>());
            for (slot, id) in model {
                prop_assert_eq!(block.find(id, 0), Some(slot));
                prop_assert_eq!(block.used()[slot as usize / 64] >> (slot % 64) & 1, 1);
            }
        }
    }
}
