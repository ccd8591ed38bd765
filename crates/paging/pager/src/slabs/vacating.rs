//! Marks on slabs that are being vacated, so that their memory can be freed. The sender sets the
//! marks, and the volumes that refer to pages in marked slabs move those pages to other slabs.
//!
//! A mark is only advice: the data are correct whether or not a page is moved. Marks do not outlive
//! the agent.

use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::{SLABS_MAX, SlabId, SlabSet};
use crate::page::Location;

const WORDS: usize = (SLABS_MAX / u64::BITS) as usize;

/// One bit for each slab, and the number of the current round.
#[derive(Debug)]
pub(super) struct Marks {
    slabs: Box<[AtomicU64]>,
    /// The number of the current round; 0 between rounds.
    round: AtomicU64,
    rounds: AtomicU64,
}

impl Default for Marks {
    fn default() -> Self {
        let slabs = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { slabs, round: AtomicU64::new(0), rounds: AtomicU64::new(0) }
    }
}

impl Marks {
    fn word(&self, slab: SlabId) -> (&AtomicU64, u64) {
        (&self.slabs[(slab.0 / u64::BITS) as usize], 1 << (slab.0 % u64::BITS))
    }
}

impl SlabSet {
    /// Marks slabs to be vacated. Volumes move their pages when the round begins.
    pub(crate) fn mark(&self, slabs: &[SlabId]) {
        for slab in slabs {
            let (word, bit) = self.marks.word(*slab);
            word.fetch_or(bit, Relaxed);
        }
    }

    /// Begins a round with a new number, by which volumes detect that they have not searched for
    /// its pages yet.
    pub(crate) fn begin_vacating(&self) {
        let round = self.marks.rounds.fetch_add(1, Relaxed) + 1;
        self.marks.round.store(round, Release);
    }

    /// Removes the mark of a slab whose number is used for another slab.
    pub(crate) fn unmark(&self, slab: SlabId) {
        let (word, bit) = self.marks.word(slab);
        word.fetch_and(!bit, Relaxed);
    }

    /// Ends the round, and removes all marks.
    pub(crate) fn end_vacating(&self) {
        self.marks.round.store(0, Relaxed);
        self.marks.slabs.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// The number of the current round, if there is one.
    #[must_use]
    pub fn vacating_round(&self) -> Option<u64> {
        Some(self.marks.round.load(Acquire)).filter(|round| *round != 0)
    }

    /// Whether a slab is marked.
    #[must_use]
    pub fn is_vacating(&self, slab: SlabId) -> bool {
        let (word, bit) = self.marks.word(slab);
        word.load(Relaxed) & bit != 0
    }

    /// Whether a page should be moved by the volume that refers to it: its slab is marked, and it
    /// has one reference.
    ///
    /// A shared page stays: each volume would move it, and it would exist twice.
    #[must_use]
    pub fn is_to_move(&self, location: Location) -> bool {
        self.is_vacating(location.slab()) && self.references(location).load(Relaxed) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unshared_pages_of_marked_slabs_are_to_move() {
        let slabs = SlabSet::new().unwrap();
        let (alone, shared, elsewhere) =
            (Location::new(SlabId(70), 1), Location::new(SlabId(70), 2), Location::new(SlabId(71), 1));
        for location in [alone, shared, elsewhere] {
            slabs.occupy(location, 1);
        }
        slabs.retain(shared);
        assert_eq!(slabs.vacating_round(), None);
        slabs.mark(&[SlabId(70)]);
        slabs.begin_vacating();
        assert_eq!(
            [alone, shared, elsewhere].map(|location| slabs.is_to_move(location)),
            [true, false, false]
        );
        let round = slabs.vacating_round();
        slabs.end_vacating();
        assert!(!slabs.is_to_move(alone) && slabs.vacating_round().is_none());
        slabs.mark(&[SlabId(71)]);
        slabs.begin_vacating();
        assert!(!slabs.is_to_move(alone) && slabs.is_to_move(elsewhere));
        assert!(slabs.vacating_round() > round, "another round");
    }
}
