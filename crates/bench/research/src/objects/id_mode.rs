//! Ids that identify the objects of one block, and blocks that can be merged, in the paper and in
//! Mesh (§3.1.2, §3.4). The product has [`IdMode::Numbers`] only.

use aquifer_objects::block::Block;

/// How objects get their ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IdMode {
    /// The slot is the id: objects keep their offsets, as in Mesh and CoRM-0.
    Offsets,
    /// Random numbers of this many bits, unique in their block, as in CoRM-8, -12 and -16.
    Random {
        /// Number of bits, at most 32.
        bits: u8,
    },
    /// Numbers that are unique in the heap for ever.
    Numbers,
}

impl IdMode {
    /// Whether blocks with this number of slots are compacted at all: with fewer ids than slots
    /// they are not (§4.4.1).
    pub fn can_compact(self, slots: u32) -> bool {
        match self {
            Self::Offsets | Self::Numbers => true,
            Self::Random { bits } => u64::from(slots) <= 1 << bits,
        }
    }
}

/// The ids of one block, to be compared with those of many others.
#[derive(Debug, Default)]
pub struct IdSet {
    bits: Vec<u64>,
    ids: Vec<u64>,
}

impl IdSet {
    /// Replaces the ids by those of a block.
    pub fn fill(&mut self, block: &Block, mode: IdMode) {
        for id in self.ids.drain(..) {
            self.bits[word(id)] = 0;
        }
        if let IdMode::Random { bits } = mode {
            self.bits.resize((1_usize << bits).div_ceil(64), 0);
            self.ids.extend(block.objects().map(|(_, record)| record.id));
            for id in &self.ids {
                self.bits[word(*id)] |= 1 << (id % 64);
            }
        }
    }

    /// Whether no object of `other` has one of these ids.
    fn is_disjoint(&self, other: &Block) -> bool {
        other.objects().all(|(_, record)| self.bits[word(record.id)] >> (record.id % 64) & 1 == 0)
    }
}

fn word(id: u64) -> usize {
    usize::try_from(id / 64).expect("ids of these modes are small")
}

/// Whether all objects of `source`, whose ids are `ids`, can be in `destination`, too.
pub fn can_merge(mode: IdMode, source: &Block, ids: &IdSet, destination: &Block) -> bool {
    source.live() <= destination.free()
        && match mode {
            IdMode::Numbers => true,
            IdMode::Offsets => {
                source.used().iter().zip(destination.used()).all(|(one, other)| one & other == 0)
            }
            IdMode::Random { .. } => ids.is_disjoint(destination),
        }
}

/// The probability that two random blocks with these numbers of objects have no id in common
/// (§3.4).
pub fn merge_probability(slots: u32, ids: u64, objects: (u32, u32)) -> f64 {
    let (one, other) = objects;
    if u64::from(one) + u64::from(other) > u64::from(slots) {
        return 0.0;
    }
    // C(ids - one, other) / C(ids, other), factor by factor.
    #[expect(clippy::cast_precision_loss, reason = "numbers of ids are far below 2^52")]
    let factor = |at: u32| {
        let left = ids.saturating_sub(u64::from(at)) as f64;
        let free = ids.saturating_sub(u64::from(at) + u64::from(one)) as f64;
        if left == 0.0 { 0.0 } else { free / left }
    };
    (0..other).map(factor).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_objects::block::ObjectRecord;
    use aquifer_objects::class::ClassId;
    use aquifer_objects::pointer::BlockAddress;

    fn block(objects: &[(u32, u64)]) -> Block {
        let home = BlockAddress { order: 0, number: 0 };
        let mut block = Block::new(home, ClassId(0), 8);
        for (slot, id) in objects {
            block.put(*slot, ObjectRecord { id: *id, home });
        }
        block
    }

    fn merges(mode: IdMode, one: &Block, other: &Block) -> bool {
        let mut ids = IdSet::default();
        ids.fill(one, mode);
        can_merge(mode, one, &ids, other)
    }

    #[test]
    fn each_mode_has_its_own_conflicts() {
        let random = IdMode::Random { bits: 8 };
        let (one, other) = (block(&[(0, 5), (1, 200)]), block(&[(1, 7), (2, 9)]));
        assert!(!merges(IdMode::Offsets, &one, &other), "slot 1");
        assert!(merges(random, &one, &other) && merges(IdMode::Numbers, &one, &other));
        let clash = block(&[(6, 200)]);
        assert!(!merges(random, &one, &clash), "id 200");
        assert!(merges(IdMode::Offsets, &one, &clash));
        let large = block(&[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]);
        for mode in [IdMode::Offsets, random, IdMode::Numbers] {
            assert!(!merges(mode, &one, &large), "there is no room");
        }
        let mut ids = IdSet::default();
        ids.fill(&one, random);
        ids.fill(&other, random);
        assert!(can_merge(random, &other, &ids, &clash), "of the block that was filled in last");
    }

    #[test]
    fn the_probability_is_that_of_the_paper() {
        // One object in each of two blocks with 16 slots: Mesh has 16 ids.
        assert!((merge_probability(16, 16, (1, 1)) - 15.0 / 16.0).abs() < 1e-12);
        // C(12, 2) / C(16, 2) = 66 / 120.
        assert!((merge_probability(16, 16, (4, 2)) - 66.0 / 120.0).abs() < 1e-12);
        assert!((merge_probability(16, 16, (2, 4)) - 66.0 / 120.0).abs() < 1e-12, "it is symmetrical");
        assert!(merge_probability(16, 1 << 16, (9, 8)) == 0.0, "they do not fit into one block");
        assert!(merge_probability(16, 16, (8, 8)) > 0.0 && merge_probability(16, 8, (8, 8)) == 0.0);
    }
}
