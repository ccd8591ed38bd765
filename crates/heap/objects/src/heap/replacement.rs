//! Replacement of a large object's bytes and block by those of another object.

use super::{Heap, HeapError, Mover};
use crate::block::{Block, BlockId, ObjectRecord};
use crate::class::{Class, ClassId};
use crate::header::ObjectNumber;
use crate::pointer::BlockAddress;
use crate::space::FrameRun;

/// The replacement of a large object's bytes by those of another one, by an exchange of their
/// blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replacement {
    /// The object.
    pub number: ObjectNumber,
    /// The class of both objects.
    pub class: (ClassId, Class),
    /// The object's block.
    pub target: FrameRun,
    /// The block of the other object.
    pub staged: FrameRun,
    /// The object's address.
    pub address: BlockAddress,
    /// The address of the other object, which is freed.
    pub staged_address: BlockAddress,
    /// Words of the other object, after its header, that replace the object's. The others stay.
    pub written: u32,
}

impl Heap {
    /// Replaces the bytes of a large object by those of another one of its class, and frees that
    /// one. `written` is [`Replacement::written`].
    ///
    /// # Errors
    /// If one of the objects does not exist, or they are not of one class of large objects.
    pub fn replace(
        &mut self,
        target: (u64, u64),
        staged: (u64, u64),
        written: u32,
        mover: &mut impl Mover,
    ) -> Result<(), HeapError> {
        let (to, from) = (self.locate(target.0, target.1)?, self.locate(staged.0, staged.1)?);
        let class = self.class_of(to.block).filter(|class| Some(*class) == self.class_of(from.block));
        let class = class.ok_or(HeapError::NoClass)?;
        let shape = self.settings.classes.get(class).filter(|shape| shape.is_single());
        let shape = shape.filter(|_| to.block != from.block).ok_or(HeapError::NoClass)?;
        let address_of = |id: BlockId| self.block(id).expect("the object's block was found").address();
        let (address, staged_address) = (address_of(to.block), address_of(from.block));
        mover.replace(&Replacement {
            number: ObjectNumber::new(target.1).ok_or(HeapError::NoObject)?,
            class: (class, shape),
            target: to.frames,
            staged: from.frames,
            address,
            staged_address,
            written,
        });
        self.workers[usize::from(to.worker)].remove(to.block);
        let local = &mut self.workers[usize::from(from.worker)];
        let mut block = Block::new(address, class, shape.slots());
        block.put(0, ObjectRecord { id: target.1, home: address });
        local.remove(from.block);
        local.add(from.block, block);
        self.addresses.rename(address, to.block, &[from.block]);
        self.addresses.remove_homed(staged_address);
        self.addresses.rename(staged_address, from.block, &[]);
        self.addresses.release(staged_address);
        self.uncount_object(class, shape);
        self.free_block(to.block, class, shape, mover);
        mover.end_merge();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::HeapBytes;
    use crate::class::Classes;
    use crate::heap::{Allocated, HeapSettings};
    use crate::layout::slot_word;
    use crate::ledger::Ledger;
    use crate::slot::Words;

    #[test]
    fn the_words_that_are_not_replaced_are_those_of_the_object() {
        let bytes = HeapBytes::create(64).unwrap();
        let layout = bytes.layout();
        let classes = Classes::standard().clone();
        let class = classes.class_for(40_000).unwrap();
        let shape = classes.get(class).unwrap();
        let settings = HeapSettings { classes, may_split: false, workers: 1, frames_max: 64 };
        let (mut heap, mut ledger) = (Heap::new(settings), Ledger::create(bytes, layout));
        let mut next = 0;
        let mut allocate = |payload: &[u64]| {
            let mut draw = || {
                next += 1;
                next
            };
            let allocated = heap.allocate(0, class, &mut draw, &mut ledger).unwrap();
            let at = slot_word(allocated.frames, 0, shape);
            ledger.create_object(at, ObjectNumber::new(allocated.id).unwrap(), payload);
            (allocated, at)
        };
        let mut target = vec![1; 4000];
        target[3000] = 0;
        let (object, _) = allocate(&target);
        // The other one has words behind those that are to be replaced.
        let (staged, at) = allocate(&[2; 4500]);
        let of = |allocated: Allocated| (allocated.address, allocated.id);
        heap.replace(of(object), of(staged), 2, &mut ledger).unwrap();
        let found: Vec<u64> = (1..=4500).map(|word| ledger.words.load(at + word)).collect();
        target.resize(4500, 0);
        target[..2].fill(2);
        assert!(found == target, "{:?}", found.iter().zip(&target).position(|(one, other)| one != other));
        assert_eq!(heap.locate(object.address, object.id).unwrap().frames, staged.frames);
        assert!(heap.locate(staged.address, staged.id).is_err());
        assert_eq!((heap.usage().objects, heap.used_frames()), (1, shape.frames()));
    }
}
