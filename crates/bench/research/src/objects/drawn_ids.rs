//! Random ids that are unique in one block (§3.1.2).

use aquifer_objects::block::{Block, BlockId};

use super::id_mode::IdMode;

/// The most random ids that are tried for an object.
const DRAWS_MAX: u32 = 64;

/// The ids that were drawn for a block: those of its objects, and perhaps some that are free again.
#[derive(Debug)]
pub struct DrawnIds {
    block: BlockId,
    bits: Vec<u64>,
}

impl DrawnIds {
    fn of(id: BlockId, block: &Block, ids: u64) -> Self {
        let words = usize::try_from(ids.div_ceil(64)).expect("at most 2^32 ids");
        let mut drawn = Self { block: id, bits: vec![0; words] };
        for (_, record) in block.objects() {
            drawn.insert(record.id);
        }
        drawn
    }

    /// Adds an id. Returns whether it is new.
    fn insert(&mut self, id: u64) -> bool {
        let word = &mut self.bits[usize::try_from(id / 64).expect("ids of these modes are small")];
        let bit = 1 << (id % 64);
        std::mem::replace(word, *word | bit) & bit == 0
    }

    /// Draws an id that is new: a random one, or the next one that is free if most are in use.
    fn draw(&mut self, ids: u64, draw: &mut impl FnMut() -> u64) -> Option<u64> {
        let random = (0..DRAWS_MAX).map(|_| draw() % ids).find(|id| self.insert(*id));
        random.or_else(|| {
            let first = draw() % ids;
            (first..ids).chain(0..first).find(|id| self.insert(*id))
        })
    }
}

/// An id for a new object, which is not in its slot yet: the slot, or a random number.
///
/// `drawn` has the ids of the block that was filled last, and `draw` returns random numbers.
pub fn new_id(
    (block_id, block, slot): (BlockId, &Block, u32),
    mode: IdMode,
    drawn: &mut Option<DrawnIds>,
    draw: &mut impl FnMut() -> u64,
) -> u64 {
    let IdMode::Random { bits } = mode else { return u64::from(slot) };
    let ids = 1 << bits;
    if !mode.can_compact(block.slots()) {
        // The class is not compacted, so its ids need not be unique.
        return draw() % ids;
    }
    if let Some(drawn) = drawn.as_mut().filter(|drawn| drawn.block == block_id)
        && let Some(id) = drawn.draw(ids, draw)
    {
        return id;
    }
    let drawn = drawn.insert(DrawnIds::of(block_id, block, ids));
    drawn.draw(ids, draw).expect("a block has no more slots than there are ids")
}
