//! A duel of two orders, which decides whether the oldest or the newest cached blocks of a run are
//! dropped.
//!
//! Programs that walk through more memory than is cached, again and again, find nothing if the
//! oldest block goes: it is the next one that they want. Most others want what they used last. So
//! one block in [`SAMPLE_DIVISOR`] is in a sample whose oldest block goes, as many are in a sample
//! whose newest block goes, and the blocks of neither follow the sample with more hits.

use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Each sample has one block in this number.
pub(super) const SAMPLE_DIVISOR: usize = 32;
/// Number of hits by which one sample can be ahead.
const LEAD_MAX: i32 = 1024;
/// Number of hits by which the sample of the other order must be ahead until the order changes.
const LEAD_MIN: i32 = 64;

/// The group of a cached block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Group {
    /// The sample of which the oldest block is dropped.
    Oldest,
    /// The sample of which the newest block is dropped.
    Newest,
    /// The blocks that are dropped in the order of the better sample.
    #[default]
    Rest,
}

impl Group {
    /// All groups.
    pub const ALL: [Self; 3] = [Self::Oldest, Self::Newest, Self::Rest];

    /// The group of the block with this sequence number. It is spread, so that it has nothing to do
    /// with a period in the program.
    pub(super) fn of(sequence: u64) -> Self {
        const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
        match sequence.wrapping_mul(GOLDEN_RATIO) >> 59 {
            0 => Self::Oldest,
            16 => Self::Newest,
            _ => Self::Rest,
        }
    }
}

/// The end of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    Oldest,
    Newest,
}

/// The score of the two samples of one run.
#[derive(Debug, Default)]
pub(crate) struct Duel {
    /// Hits of the sample whose oldest block goes, less those of the other one.
    lead: AtomicI32,
    /// 1 while the newest blocks of the rest go.
    gives_newest: AtomicI32,
}

impl Duel {
    /// Counts a hit in a block of this group.
    pub(crate) fn hit(&self, group: Group) {
        let change = match group {
            Group::Oldest => 1,
            Group::Newest => -1,
            Group::Rest => return,
        };
        // Two hits at once may count as one: the score is a guide.
        let lead = (self.lead.load(Relaxed) + change).clamp(-LEAD_MAX, LEAD_MAX);
        self.lead.store(lead, Relaxed);
        if lead <= -LEAD_MIN {
            self.gives_newest.store(1, Relaxed);
        } else if lead >= LEAD_MIN {
            self.gives_newest.store(0, Relaxed);
        }
    }

    /// The end at which blocks of the rest are dropped.
    pub(super) fn end(&self) -> End {
        if self.gives_newest.load(Relaxed) == 0 { End::Oldest } else { End::Newest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_samples_are_small_and_of_one_size() {
        let count = |group| (0..32_000).filter(|sequence| Group::of(*sequence) == group).count();
        assert!((950..1050).contains(&count(Group::Oldest)) && (950..1050).contains(&count(Group::Newest)));
    }

    #[test]
    fn the_better_sample_decides_and_a_small_lead_changes_nothing() {
        let duel = Duel::default();
        assert_eq!(duel.end(), End::Oldest);
        (1..LEAD_MIN).for_each(|_| duel.hit(Group::Newest));
        assert_eq!(duel.end(), End::Oldest);
        duel.hit(Group::Newest);
        assert_eq!(duel.end(), End::Newest);
        (0..10).for_each(|_| duel.hit(Group::Oldest));
        assert_eq!(duel.end(), End::Newest, "it was ahead only for a moment");
        (0..5000).for_each(|_| duel.hit(Group::Newest));
        (0..LEAD_MAX + LEAD_MIN).for_each(|_| duel.hit(Group::Oldest));
        assert_eq!(duel.end(), End::Oldest);
    }
}
