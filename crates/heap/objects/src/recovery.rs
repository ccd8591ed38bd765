//! Restores a heap from its memory after the service was killed, between any two stores.
//!
//! Operations in progress are completed or undone, so that each object exists once and whole:
//!
//! 1. A write in progress is completed. An object that was to be freed is unlocked.
//! 2. A merge is completed if all objects were copied, and undone otherwise. So is the replacement
//!    of a large object.
//! 3. Blocks without objects are freed, with the addresses that name them.

use std::collections::{BTreeMap, HashSet};

use crate::block::ObjectRecord;
use crate::class::{BLOCK_ORDERS, Class, ClassId, Classes};
use crate::header::{Header, Lock, ObjectNumber};
use crate::heap::{Mover, RestoredBlock};
use crate::layout::{
    FORMAT, FORMAT_AT, FRAMES_HIGH_AT, FRAMES_MAX_AT, HeapWords, Layout, MERGE_AT, MERGING, REPLACING,
    WRITE_AT, WRITE_BYTES_AT, block_word, decode_block, decode_second, named_frame, slot_word,
};
use crate::ledger::Ledger;
use crate::mutation::Mutation;
use crate::pointer::BlockAddress;
use crate::slot;
use crate::space::{FrameRun, addresses_max};

/// Why a heap cannot be restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Damage {
    /// The records are not those of a heap of this size and version.
    #[error("the heap's records are of another version or size")]
    Format,
    /// A record contradicts another one.
    #[error("the record of {what} {number} is invalid")]
    Record {
        /// The subject of the record.
        what: &'static str,
        /// The number of the subject.
        number: u64,
    },
}

/// The restored state of a heap.
#[derive(Debug)]
pub struct Restored {
    /// The classes of all addresses that were ever used, for each block size.
    pub addresses: [Vec<ClassId>; BLOCK_ORDERS],
    /// The blocks with objects, in the order of their frames.
    pub blocks: Vec<RestoredBlock>,
}

/// Restores a heap.
///
/// # Errors
/// If the records are damaged. Then the memory cannot be used.
pub fn recover<W: HeapWords>(words: &mut W, layout: Layout, classes: &Classes) -> Result<Restored, Damage> {
    let mut recovery = Recovery { ledger: Ledger::reopen(words, layout), layout, classes };
    let ledger = &mut recovery.ledger;
    let format = (ledger.words.load(FORMAT_AT), ledger.words.load(FRAMES_MAX_AT));
    if format != (FORMAT, layout.frames_max().into()) {
        return Err(Damage::Format);
    }
    let high = recovery.high()?;
    recovery.complete_write();
    let mut blocks = recovery.blocks()?;
    recovery.add_names(&mut blocks, &high)?;
    match recovery.load(MERGE_AT) {
        0 => {}
        MERGING => recovery.end_merge(&mut blocks)?,
        REPLACING => recovery.end_replacement(&mut blocks)?,
        number => return Err(Damage::Record { what: "merge", number }),
    }
    for block in blocks.values_mut() {
        recovery.find_objects(block)?;
    }
    let (blocks, empty): (Vec<_>, Vec<_>) = blocks.into_values().partition(|block| !block.objects.is_empty());
    recovery.free_blocks(&empty, &blocks);
    let addresses = std::array::from_fn(|order| recovery.classes(order, high[order]));
    Ok(Restored { addresses, blocks })
}

/// The blocks by their first frames.
type Blocks = BTreeMap<u32, RestoredBlock>;

struct Recovery<'a, W> {
    ledger: Ledger<&'a mut W>,
    layout: Layout,
    classes: &'a Classes,
}

impl<W: HeapWords> Recovery<'_, W> {
    fn load(&mut self, at: u64) -> u64 {
        self.ledger.words.load(at)
    }

    fn high(&mut self) -> Result<[u32; BLOCK_ORDERS], Damage> {
        let mut high = [0; BLOCK_ORDERS];
        for (order, high) in (0..).zip(&mut high) {
            let count = self.load(self.layout.addresses_high_at(order));
            let is_possible = count <= addresses_max(self.layout.frames_max(), order);
            let count = u32::try_from(count).ok().filter(|_| is_possible);
            *high = count.ok_or(Damage::Record { what: "addresses of size", number: order.into() })?;
        }
        Ok(high)
    }

    /// Completes the write that was in progress, if its object was locked for it.
    fn complete_write(&mut self) {
        let Some(at) = self.load(WRITE_AT).checked_sub(1) else { return };
        let [number, len, first] = [1, 2, 3].map(|word| self.load(WRITE_AT + word));
        let header = Header::from_word(self.load(at));
        let is_locked = header == header.with_lock(Lock::Writing);
        if is_locked && header.number() == ObjectNumber::new(number) {
            let payload: Vec<u64> = (0..len).map(|word| self.load(WRITE_BYTES_AT + word)).collect();
            slot::write(&mut self.ledger.words, at, header.with_lock(Lock::Open), first, &payload);
        }
        self.ledger.words.store(WRITE_AT, 0);
    }

    fn blocks(&mut self) -> Result<Blocks, Damage> {
        let mut blocks = Blocks::new();
        let end = self.load(FRAMES_HIGH_AT);
        let end = u32::try_from(end).ok().filter(|end| *end <= self.layout.frames_max());
        let end = end.ok_or(Damage::Record { what: "frames", number: 0 })?;
        let mut first = 0;
        while first < end {
            let word = self.load(self.layout.block_at(first));
            let Some((class, shape, address)) = decode_block(word, self.classes) else {
                first += 1;
                continue;
            };
            let frames = FrameRun { first, count: shape.frames() };
            if frames.end() > end {
                return Err(Damage::Record { what: "block", number: first.into() });
            }
            blocks.insert(
                first,
                RestoredBlock { frames, class, address, names: Vec::new(), objects: Vec::new() },
            );
            first = frames.end();
        }
        Ok(blocks)
    }

    fn add_names(&mut self, blocks: &mut Blocks, high: &[u32; BLOCK_ORDERS]) -> Result<(), Damage> {
        for (order, high) in (0..).zip(high) {
            for number in 0..*high {
                let name = BlockAddress { order, number };
                let named = self.named(name);
                for (frame, is_second) in named.into_iter().zip([false, true]) {
                    let Some(frame) = frame else { continue };
                    let damage = Damage::Record { what: "address", number: number.into() };
                    let block = blocks.get_mut(&frame).filter(|block| block.address.order == order);
                    let block = block.ok_or(damage)?;
                    // Between the two stores of a change, both words may name one block.
                    if !block.names.iter().any(|(other, _)| *other == name) {
                        block.names.push((name, is_second));
                    }
                }
            }
        }
        Ok(())
    }

    /// The first frames of the blocks that an address names.
    fn named(&mut self, name: BlockAddress) -> [Option<u32>; 2] {
        let (_, second) = decode_second(self.load(self.layout.second_at(name)));
        [named_frame(self.load(self.layout.name_at(name))), second]
    }

    /// The classes of the first addresses of a size.
    fn classes(&mut self, order: usize, count: u32) -> Vec<ClassId> {
        let order = u8::try_from(order).expect("there are few");
        let mut class_of =
            |number| decode_second(self.load(self.layout.second_at(BlockAddress { order, number }))).0;
        (0..count).map(&mut class_of).collect()
    }

    /// Completes the merge that was in progress, or undoes it.
    fn end_merge(&mut self, blocks: &mut Blocks) -> Result<(), Damage> {
        let damage = Damage::Record { what: "merge", number: 0 };
        let source = u32::try_from(self.load(MERGE_AT + 1)).map_err(|_| damage)?;
        let into = [u32::try_from(self.load(MERGE_AT + 2)).ok(), named_frame(self.load(MERGE_AT + 3))];
        let into: Vec<u32> = into.into_iter().flatten().filter(|frame| blocks.contains_key(frame)).collect();
        if blocks.contains_key(&source) && !into.is_empty() {
            let shape = self.classes.get(blocks[&source].class).ok_or(damage)?;
            let numbers = self.numbers(blocks[&source].frames, shape);
            let copies: Vec<(FrameRun, u32)> = into
                .iter()
                .flat_map(|frame| {
                    let frames = blocks[frame].frames;
                    let slots = self.headers(frames, shape).into_iter();
                    let copied = slots.filter(|(_, header)| {
                        header.number().is_some_and(|number| numbers.contains(&number))
                    });
                    copied.map(|(slot, _)| (frames, slot)).collect::<Vec<_>>()
                })
                .collect();
            if copies.len() == numbers.len() || Mutation::TrustCopies.is_active() {
                self.complete_merge(blocks, source, &into);
            } else {
                // The objects of the source are unlocked with the others.
                for (frames, slot) in copies {
                    self.ledger.words.store(slot_word(frames, slot, shape), Header::FREE.word());
                }
                for frame in into {
                    self.clear_unused_homes(blocks[&frame].frames, shape);
                }
            }
        } else if blocks.contains_key(&source) {
            return Err(Damage::Record { what: "merge of block", number: source.into() });
        }
        self.ledger.end_merge();
        Ok(())
    }

    /// Completes the replacement that was in progress if the object is in its new place, and undoes
    /// it otherwise.
    fn end_replacement(&mut self, blocks: &mut Blocks) -> Result<(), Damage> {
        let damage = Damage::Record { what: "replacement", number: 0 };
        let frame = |word: u64| u32::try_from(word).map_err(|_| damage);
        let (target, staged) = (frame(self.load(MERGE_AT + 1))?, frame(self.load(MERGE_AT + 2))?);
        // Without a record of the target, the replacement was complete.
        if let Some(RestoredBlock { frames, class, address, .. }) = blocks.get(&target).cloned() {
            let shape = self.classes.get(class).ok_or(damage)?;
            let block = blocks.get_mut(&staged).filter(|block| block.class == class).ok_or(damage)?;
            let mut header = |frames| Header::from_word(self.load(slot_word(frames, 0, shape)));
            // The target may be cleared already.
            let is_there =
                header(block.frames).number() == header(frames).number() || header(frames).number().is_none();
            if is_there || Mutation::TrustReplacement.is_active() {
                self.ledger.map_address(address, [Some(block.frames), None]);
                self.ledger.words.store(self.layout.block_at(staged), block_word(class, address));
                for (name, _) in block.names.iter().filter(|(name, _)| *name != address) {
                    self.ledger.map_address(*name, [None; 2]);
                }
                block.address = address;
                block.names = vec![(address, false)];
                blocks.remove(&target);
                self.ledger.free(frames);
            }
        }
        self.ledger.end_merge();
        Ok(())
    }

    /// Makes all addresses of the source name the destinations, and frees the source.
    fn complete_merge(&mut self, blocks: &mut Blocks, source: u32, into: &[u32]) {
        let source = blocks.remove(&source).expect("the source was found");
        for (name, _) in &source.names {
            let named = self.named(*name).into_iter().flatten();
            let mut next: Vec<u32> = Vec::with_capacity(3);
            for frame in
                named.flat_map(|frame| if frame == source.frames.first { into.to_vec() } else { vec![frame] })
            {
                if !next.contains(&frame) {
                    next.push(frame);
                }
            }
            let run = |at: usize| next.get(at).map(|first| FrameRun { first: *first, ..source.frames });
            self.ledger.map_address(*name, [run(0), run(1)]);
            for (frame, is_second) in next.iter().zip([false, true]) {
                let Some(block) = blocks.get_mut(frame) else { continue };
                block.names.retain(|(other, _)| other != name);
                block.names.push((*name, is_second));
            }
        }
        self.ledger.free(source.frames);
    }

    fn numbers(&mut self, frames: FrameRun, shape: Class) -> HashSet<ObjectNumber> {
        self.headers(frames, shape).into_iter().filter_map(|(_, header)| header.number()).collect()
    }

    /// The slots that are in use.
    fn headers(&mut self, frames: FrameRun, shape: Class) -> Vec<(u32, Header)> {
        // In a block with one slot only the header is needed.
        let words = if shape.is_single() { 1 } else { shape.block_bytes() / 8 };
        let mut words = vec![0; usize::try_from(words).expect("at most 1 MiB")];
        self.ledger.words.peek(slot_word(frames, 0, shape), &mut words);
        let slots = (0..shape.slots()).zip(words.chunks(shape.slot_bytes as usize / 8));
        slots
            .map(|(slot, words)| (slot, Header::from_word(words[0])))
            .filter(|(_, header)| header.number().is_some())
            .collect()
    }

    /// Finds the objects of a block, and unlocks them.
    fn find_objects(&mut self, block: &mut RestoredBlock) -> Result<(), Damage> {
        let class: ClassId = block.class;
        let shape =
            self.classes.get(class).ok_or(Damage::Record { what: "class", number: class.0.into() })?;
        let homes = if block.names.len() > 1 { self.homes(block.frames, shape) } else { Vec::new() };
        let headers = self.headers(block.frames, shape);
        for (slot, header) in &headers {
            if !header.is_open() {
                let open = header.with_lock(Lock::Open).word();
                self.ledger.words.store(slot_word(block.frames, *slot, shape), open);
            }
            let Some(number) = header.number() else { continue };
            let home = homes.get(*slot as usize).copied().and_then(named_frame);
            let home = home.map_or(block.address, |number| BlockAddress { number, ..block.address });
            if !block.names.iter().any(|(name, _)| *name == home) {
                return Err(Damage::Record { what: "object", number: number.get() });
            }
            block.objects.push((*slot, ObjectRecord { id: number.get(), home }));
        }
        if !homes.is_empty() {
            self.clear_unused_homes(block.frames, shape);
        }
        Ok(())
    }

    /// Clears the homes of free slots. A process that was killed while it freed or copied an object
    /// leaves such homes.
    fn clear_unused_homes(&mut self, frames: FrameRun, shape: Class) {
        let headers = self.headers(frames, shape);
        for (slot, home) in (0..).zip(self.homes(frames, shape)) {
            if home != 0 && headers.binary_search_by_key(&slot, |(other, _)| *other).is_err() {
                self.ledger.set_home((frames, slot), None);
            }
        }
    }

    /// The number of each slot's home plus 1; 0 for the address with which the block was made.
    fn homes(&mut self, frames: FrameRun, shape: Class) -> Vec<u64> {
        let (at, words) = self.layout.homes_of(frames);
        let mut found = vec![0; usize::try_from(words).expect("few")];
        self.ledger.words.peek(at, &mut found);
        let both = found.iter().flat_map(|word| [word & u64::from(u32::MAX), word >> 32]);
        both.take(shape.slots() as usize).collect()
    }

    /// Frees blocks without objects, and the addresses that name no other block.
    fn free_blocks(&mut self, empty: &[RestoredBlock], others: &[RestoredBlock]) {
        let others: BTreeMap<u32, FrameRun> =
            others.iter().map(|block| (block.frames.first, block.frames)).collect();
        let frames_of = |first: Option<u32>| others.get(&first?).copied();
        for block in empty {
            for (name, _) in &block.names {
                let mut rest = self.named(*name).into_iter().filter_map(&frames_of);
                let rest = [rest.next(), rest.next()];
                self.ledger.map_address(*name, rest);
            }
            self.ledger.free(block.frames);
        }
    }
}
