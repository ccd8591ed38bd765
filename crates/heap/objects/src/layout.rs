//! Layout of the words of a heap: its bytes, the names of its blocks, and the records from which
//! the next process of the service restores it.
//!
//! The formats are in `docs/formats/objects.md`.

use crate::class::{BLOCK_ORDERS, Class, ClassId, Classes, FRAME_BYTES, SLOT_BYTES_MAX};
use crate::pointer::BlockAddress;
use crate::slot::Words;
use crate::space::{FrameRun, addresses_max};

/// Words of a frame.
pub const FRAME_WORDS: u64 = FRAME_BYTES / 8;
/// The first word of the memory with the bytes of objects.
pub const DATA: u64 = 0;
/// The first word of the memory that clients translate addresses with.
pub const NAMES: u64 = 1 << 56;
/// The first word of the memory that only the service maps.
pub const RECORDS: u64 = 2 << 56;

/// The value of the first word of the records: a magic number, and the version of the format.
pub const FORMAT: u64 = u64::from_le_bytes(*b"AQHEAP\x00\x02");

pub(crate) const FORMAT_AT: u64 = RECORDS;
pub(crate) const FRAMES_MAX_AT: u64 = RECORDS + 1;
/// A bound of the object numbers: all numbers below are reserved.
pub(crate) const NUMBERS_AT: u64 = RECORDS + 2;
/// A bound of the frames: all blocks are in the frames below.
pub(crate) const FRAMES_HIGH_AT: u64 = RECORDS + 3;
/// A bound of the addresses for each block size: all addresses in use are below.
const ADDRESSES_HIGH_AT: u64 = RECORDS + 4;
/// The merge in progress: [`MERGING`], the source, the first destination, the second plus 1 or 0.
/// The replacement in progress: [`REPLACING`], the block that is replaced, and the one that
/// replaces it.
pub(crate) const MERGE_AT: u64 = RECORDS + 24;
pub(crate) const MERGING: u64 = 1;
pub(crate) const REPLACING: u64 = 2;
/// The write in progress: the slot plus 1, the number of the object, the number of words, and the
/// first of them.
pub(crate) const WRITE_AT: u64 = RECORDS + 28;
/// The root: the number of an object or 0, its address, and its class.
pub(crate) const ROOT_AT: u64 = RECORDS + 20;
pub(crate) const WRITE_BYTES_AT: u64 = RECORDS + 32;
const _: () = assert!(ADDRESSES_HIGH_AT + BLOCK_ORDERS as u64 <= ROOT_AT);
const BLOCKS_AT: u64 = RECORDS + 9 * FRAME_WORDS;
const _: () = assert!(WRITE_BYTES_AT + SLOT_BYTES_MAX as u64 / 8 <= BLOCKS_AT);

const USED: u64 = 1 << 63;
/// Most slots of a frame.
const HOMES_PER_FRAME: u64 = 256;

/// The memory of a heap, in words.
pub trait HeapWords: Words {
    /// Makes words zero, and returns their pages to the system.
    fn discard(&mut self, at: u64, words: u64);

    /// Loads words without allocating pages that do not exist.
    fn peek(&mut self, at: u64, out: &mut [u64]);
}

impl<W: HeapWords> HeapWords for &mut W {
    fn discard(&mut self, at: u64, words: u64) {
        (**self).discard(at, words);
    }

    fn peek(&mut self, at: u64, out: &mut [u64]) {
        (**self).peek(at, out);
    }
}

/// The places of the words of a heap with some number of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    frames_max: u32,
}

impl Layout {
    /// Creates the layout of a heap of at most `frames_max` frames.
    #[must_use]
    pub const fn new(frames_max: u32) -> Self {
        Self { frames_max }
    }

    /// The most frames of the heap.
    #[must_use]
    pub const fn frames_max(self) -> u32 {
        self.frames_max
    }

    /// Words of all names, in whole frames.
    #[must_use]
    pub fn name_words(self) -> u64 {
        self.names_before(BLOCK_ORDERS).next_multiple_of(FRAME_WORDS)
    }

    /// Words of the records, in whole frames.
    #[must_use]
    pub fn record_words(self) -> u64 {
        self.homes_at() - RECORDS + u64::from(self.frames_max) * HOMES_PER_FRAME / 2
    }

    /// The number of names of blocks smaller than `order`.
    #[must_use]
    pub fn names_before(self, order: usize) -> u64 {
        (0..order).map(|order| addresses_max(self.frames_max, u8::try_from(order).expect("few"))).sum()
    }

    /// The name of an address: 0, or the number of the first frame of its block plus 1.
    pub(crate) fn name_at(self, name: BlockAddress) -> u64 {
        NAMES + self.names_before(usize::from(name.order)) + u64::from(name.number)
    }

    /// The class of an address, and the second block that it names.
    pub(crate) fn second_at(self, name: BlockAddress) -> u64 {
        self.name_at(name) - NAMES + self.seconds_at()
    }

    /// Whether a word is the second name of an address.
    #[must_use]
    pub fn is_second_name(self, at: u64) -> bool {
        (self.seconds_at()..self.homes_at()).contains(&at)
    }

    /// The word with the record of the block that begins in a frame.
    pub(crate) fn block_at(self, frame: u32) -> u64 {
        BLOCKS_AT + u64::from(frame)
    }

    pub(crate) fn addresses_high_at(self, order: u8) -> u64 {
        ADDRESSES_HIGH_AT + u64::from(order)
    }

    /// The home of the object in a slot: the word, and the bit of its lowest bit.
    pub(crate) fn home_at(self, frames: FrameRun, slot: u32) -> (u64, u32) {
        let number = u64::from(frames.first) * HOMES_PER_FRAME + u64::from(slot);
        (self.homes_at() + number / 2, if number.is_multiple_of(2) { 0 } else { 32 })
    }

    /// The words of the homes of all slots that some frames can have.
    pub(crate) fn homes_of(self, frames: FrameRun) -> (u64, u64) {
        (self.home_at(frames, 0).0, HOMES_PER_FRAME / 2 * u64::from(frames.count))
    }

    fn seconds_at(self) -> u64 {
        BLOCKS_AT + u64::from(self.frames_max).next_multiple_of(FRAME_WORDS)
    }

    fn homes_at(self) -> u64 {
        self.seconds_at() + self.name_words()
    }
}

/// The first word of a slot.
#[must_use]
pub fn slot_word(frames: FrameRun, slot: u32, class: Class) -> u64 {
    DATA + u64::from(frames.first) * FRAME_WORDS + u64::from(slot) * u64::from(class.slot_bytes / 8)
}

/// The word of a name.
pub(crate) fn name_word(named: Option<FrameRun>) -> u64 {
    named.map_or(0, |frames| u64::from(frames.first) + 1)
}

/// The class of an address, and the second block that it names: none, or the number of its first
/// frame plus 1.
pub(crate) fn second_word(class: ClassId, second: Option<FrameRun>) -> u64 {
    u64::from(class.0) << 32 | name_word(second)
}

pub(crate) fn decode_second(word: u64) -> (ClassId, Option<u32>) {
    let class = u8::try_from(word >> 32 & 0xff).expect("8 bits");
    (ClassId(class), named_frame(word & u64::from(u32::MAX)))
}

/// The first frame that a word names.
pub(crate) fn named_frame(word: u64) -> Option<u32> {
    word.checked_sub(1).and_then(|frame| u32::try_from(frame).ok())
}

/// The record of a block: its class, and the address with which it was made.
pub(crate) fn block_word(class: ClassId, address: BlockAddress) -> u64 {
    USED | u64::from(class.0) << 32 | u64::from(address.number)
}

/// The class and the address in a record; `None` if no block begins there.
pub(crate) fn decode_block(word: u64, classes: &Classes) -> Option<(ClassId, Class, BlockAddress)> {
    let class = ClassId(u8::try_from((word & !USED) >> 32).ok()?);
    let shape = classes.get(class).filter(|_| word & USED != 0)?;
    let number = u32::try_from(word & u64::from(u32::MAX)).expect("32 bits");
    Some((class, shape, BlockAddress { order: shape.order, number }))
}
