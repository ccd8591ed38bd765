//! An unordered set of slabs with insertion and removal in constant time. A run may have tens of
//! thousands of slabs.

use crate::slabs::SlabId;

const NOWHERE: u32 = u32::MAX;

/// A set of slabs, as a vector and the index of each slab in it.
#[derive(Debug, Default)]
pub(super) struct SlabList {
    slabs: Vec<SlabId>,
    /// Indexed by slab number: the position in `slabs`, or [`NOWHERE`].
    places: Vec<u32>,
}

impl SlabList {
    pub fn iter(&self) -> impl Iterator<Item = SlabId> {
        self.slabs.iter().copied()
    }

    pub fn len(&self) -> usize {
        self.slabs.len()
    }

    pub fn contains(&self, slab: SlabId) -> bool {
        self.places.get(slab.0 as usize).is_some_and(|place| *place != NOWHERE)
    }

    pub fn insert(&mut self, slab: SlabId) {
        if self.contains(slab) {
            return;
        }
        let number = slab.0 as usize;
        if self.places.len() <= number {
            self.places.resize(number + 1, NOWHERE);
        }
        self.places[number] = u32::try_from(self.slabs.len()).expect("there are at most 2^16 slabs");
        self.slabs.push(slab);
    }

    pub fn remove(&mut self, slab: SlabId) {
        if !self.contains(slab) {
            return;
        }
        let place = std::mem::replace(&mut self.places[slab.0 as usize], NOWHERE);
        self.slabs.swap_remove(place as usize);
        if let Some(moved) = self.slabs.get(place as usize) {
            self.places[moved.0 as usize] = place;
        }
    }

    pub fn pop(&mut self) -> Option<SlabId> {
        let last = self.slabs.last().copied()?;
        self.remove(last);
        Some(last)
    }
}

impl FromIterator<SlabId> for SlabList {
    fn from_iter<I: IntoIterator<Item = SlabId>>(slabs: I) -> Self {
        let mut list = Self::default();
        slabs.into_iter().for_each(|slab| list.insert(slab));
        list
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(operations in prop::collection::vec((0u32..3, 0u32..40), 0..200)) {
            let mut list = SlabList::default();
            let mut model = BTreeSet::new();
            for (what, number) in operations {
                match what {
                    0 => {
                        list.remove(SlabId(number));
                        model.remove(&number);
                    }
                    1 => {
                        list.insert(SlabId(number));
                        model.insert(number);
                    }
                    _ => {
                        let popped = list.pop();
                        prop_assert!(popped.map_or(model.is_empty(), |slab| model.remove(&slab.0)));
                    }
                }
                prop_assert_eq!(list.contains(SlabId(number)), model.contains(&number));
            }
            prop_assert_eq!(list.len(), model.len());
            prop_assert_eq!(list.iter().map(|slab| slab.0).collect::<BTreeSet<_>>(), model);
        }
    }
}
