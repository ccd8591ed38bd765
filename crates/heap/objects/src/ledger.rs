//! Writes the decisions of a heap into its memory, in an order from which [`crate::recovery`] can
//! restore the heap if the process is killed between any two stores.

use std::ops::Range;

use crate::class::{BLOCK_ORDER_MAX, Class, ClassId};
use crate::header::{Header, Lock, ObjectNumber};
use crate::heap::{Mover, Replacement};
use crate::layout::{
    DATA, FORMAT, FORMAT_AT, FRAME_WORDS, FRAMES_HIGH_AT, FRAMES_MAX_AT, HeapWords, Layout, MERGE_AT,
    MERGING, NUMBERS_AT, REPLACING, ROOT_AT, WRITE_AT, WRITE_BYTES_AT, block_word, decode_second, name_word,
    second_word, slot_word,
};
use crate::mutation::Mutation;
use crate::pointer::BlockAddress;
use crate::slot::{self, LockRefused};
use crate::space::FrameRun;

/// Numbers of objects that are reserved at once.
const NUMBERS_RESERVED: u64 = 1 << 16;

/// Writes a heap's records into its memory.
#[derive(Debug)]
pub struct Ledger<W> {
    /// The memory.
    pub words: W,
    layout: Layout,
    /// Object numbers below are reserved.
    numbers_end: u64,
}

impl<W: HeapWords> Ledger<W> {
    /// Creates the ledger of a new heap, whose memory must be all zeros.
    pub fn create(mut words: W, layout: Layout) -> Self {
        words.store(FRAMES_MAX_AT, layout.frames_max().into());
        words.store(NUMBERS_AT, 1);
        words.store(FORMAT_AT, FORMAT);
        Self { words, layout, numbers_end: 1 }
    }

    /// Creates the ledger of a restored heap.
    pub fn reopen(words: W, layout: Layout) -> Self {
        Self { words, layout, numbers_end: 1 }
    }

    /// The first number that no object of an earlier process can have.
    pub fn first_number(&mut self) -> u64 {
        self.numbers_end = self.words.load(NUMBERS_AT);
        self.numbers_end
    }

    /// Reserves the next object number. Must be called before each allocation.
    pub fn reserve_number(&mut self, next: u64) {
        if next >= self.numbers_end && !Mutation::ReserveNoNumbers.is_active() {
            self.numbers_end = next + NUMBERS_RESERVED;
            self.words.store(NUMBERS_AT, self.numbers_end);
        }
    }

    /// Writes a new object into a free slot.
    pub fn create_object(&mut self, at: u64, number: ObjectNumber, payload: &[u64]) {
        slot::create(&mut self.words, at, number, payload);
    }

    /// Replaces words of an object, from `first` on; those of its bytes begin at 0. A process that
    /// is killed meanwhile leaves the words in the records, and the write is completed by the next
    /// one.
    ///
    /// # Errors
    /// If the object is locked, or not there.
    pub fn write_object(
        &mut self,
        at: u64,
        number: ObjectNumber,
        first: u64,
        payload: &[u64],
    ) -> Result<(), LockRefused> {
        let words = &mut self.words;
        for (word, bytes) in (WRITE_BYTES_AT..).zip(payload) {
            words.store(word, *bytes);
        }
        words.store(WRITE_AT + 1, number.get());
        words.store(WRITE_AT + 2, payload.len() as u64);
        words.store(WRITE_AT + 3, first);
        if !Mutation::WriteUnrecorded.is_active() {
            words.store(WRITE_AT, at + 1);
        }
        let locked = slot::lock(words, at, number, Lock::Writing);
        if let Ok(header) = locked {
            slot::write(words, at, header, first, payload);
        }
        words.store(WRITE_AT, 0);
        locked.map(drop)
    }

    /// Frees the slot of an object. The caller must then remove the object from the heap.
    ///
    /// # Errors
    /// If the object is locked, or not there.
    pub fn free_object(&mut self, at: u64, number: ObjectNumber) -> Result<(), LockRefused> {
        slot::lock(&mut self.words, at, number, Lock::Writing)?;
        slot::free(&mut self.words, at);
        Ok(())
    }

    /// The root of the heap: the number, the address and the class of an object.
    pub fn root(&mut self) -> Option<(ObjectNumber, u64, ClassId)> {
        let [number, address, class] = [0, 1, 2].map(|word| self.words.load(ROOT_AT + word));
        Some((ObjectNumber::new(number)?, address, ClassId(u8::try_from(class).ok()?)))
    }

    /// Records the root of the heap.
    pub fn set_root(&mut self, number: ObjectNumber, address: u64, class: ClassId) {
        self.words.store(ROOT_AT + 1, address);
        self.words.store(ROOT_AT + 2, class.0.into());
        self.words.store(ROOT_AT, number.get());
    }

    /// Raises a bound, if `end` is above it.
    fn raise(&mut self, at: u64, end: u64) {
        if self.words.load(at) < end {
            self.words.store(at, end);
        }
    }

    pub(crate) fn set_home(&mut self, at: (FrameRun, u32), home: Option<u32>) {
        let (word, bit) = self.layout.home_at(at.0, at.1);
        let others = self.words.load(word) & !(u64::from(u32::MAX) << bit);
        let home = home.map_or(0, |number| u64::from(number) + 1);
        self.words.store(word, others | home << bit);
    }

    /// Makes a range of words of one slot equal to those of another one. A page that was never
    /// written in either stays without memory.
    fn copy_words(&mut self, from: u64, to: u64, range: Range<u64>) {
        let mut part = range.start..range.start;
        while part.end < range.end {
            part = part.end..range.end.min(part.end + FRAME_WORDS);
            let len = usize::try_from(part.end - part.start).expect("a frame");
            let (mut wanted, mut found) = (vec![0; len], vec![0; len]);
            self.words.peek(from + part.start, &mut wanted);
            self.words.peek(to + part.start, &mut found);
            for ((word, wanted), found) in part.clone().zip(wanted).zip(found) {
                if wanted != found {
                    self.words.store(to + word, wanted);
                }
            }
        }
    }

    fn clear_homes(&mut self, frames: FrameRun) {
        let (at, words) = self.layout.homes_of(frames);
        // The only object of a larger block has never moved.
        if frames.count > 1 << BLOCK_ORDER_MAX {
            return;
        }
        let mut found = vec![0; usize::try_from(words).expect("few")];
        self.words.peek(at, &mut found);
        if found.iter().any(|home| *home != 0) {
            self.words.discard(at, words);
        }
    }
}

impl<W: HeapWords> Mover for Ledger<W> {
    fn add(&mut self, frames: FrameRun, class: ClassId, address: BlockAddress) {
        self.raise(FRAMES_HIGH_AT, frames.end().into());
        self.words.store(self.layout.second_at(address), second_word(class, None));
        self.raise(self.layout.addresses_high_at(address.order), u64::from(address.number) + 1);
        self.words.store(self.layout.block_at(frames.first), block_word(class, address));
        self.words.store(self.layout.name_at(address), name_word(Some(frames)));
    }

    fn begin_merge(&mut self, source: FrameRun, into: &[FrameRun]) {
        self.words.store(MERGE_AT + 1, source.first.into());
        self.words.store(MERGE_AT + 2, into[0].first.into());
        self.words.store(MERGE_AT + 3, name_word(into.get(1).copied()));
        if !Mutation::MergeUnrecorded.is_active() {
            self.words.store(MERGE_AT, MERGING);
        }
    }

    fn lock(&mut self, source: FrameRun, objects: &[(u32, u64)], class: Class) {
        for (slot, id) in objects {
            let number = ObjectNumber::new(*id).expect("a heap has numbers");
            let at = slot_word(source, *slot, class);
            // The service has one worker under one lock, so no write is in progress (decision 21).
            // With several workers, another one would write for some microseconds at most.
            while slot::lock(&mut self.words, at, number, Lock::Moving).is_err() {
                std::hint::spin_loop();
            }
        }
    }

    fn copy(&mut self, from: (FrameRun, u32), to: (FrameRun, u32), class: Class, home: Option<u32>) {
        if home.is_some() && !Mutation::ForgetHome.is_active() {
            self.set_home(to, home);
        }
        let (from, to) = (slot_word(from.0, from.1, class), slot_word(to.0, to.1, class));
        slot::copy(&mut self.words, from, to, u64::from(class.slot_bytes / 8));
    }

    fn rehome(&mut self, at: (FrameRun, u32), home: Option<u32>) {
        self.set_home(at, home);
    }

    fn map_address(&mut self, address: BlockAddress, named: [Option<FrameRun>; 2]) {
        let (first_at, second_at) = (self.layout.name_at(address), self.layout.second_at(address));
        let last = self.words.load(second_at);
        let (class, _) = decode_second(last);
        let (first, second) = (name_word(named[0]), second_word(class, named[1]));
        // In this order each block has a name at any time.
        if named[1].is_some() {
            self.words.store(second_at, second);
        }
        self.words.store(first_at, first);
        if named[1].is_none() && second != last {
            self.words.store(second_at, second);
        }
    }

    fn free(&mut self, frames: FrameRun) {
        let record_at = self.layout.block_at(frames.first);
        if Mutation::ForgetBlockEarly.is_active() {
            self.words.store(record_at, 0);
        }
        // Without a record, the memory must be all zeros.
        self.words
            .discard(DATA + u64::from(frames.first) * FRAME_WORDS, FRAME_WORDS * u64::from(frames.count));
        self.clear_homes(frames);
        self.words.store(record_at, 0);
    }

    fn clear(&mut self, frames: FrameRun) {
        self.words
            .discard(DATA + u64::from(frames.first) * FRAME_WORDS, FRAME_WORDS * u64::from(frames.count));
        let (at, words) = self.layout.homes_of(frames);
        // The words of a smaller run share a page with those of others.
        if words >= FRAME_WORDS {
            self.words.discard(at, words);
        }
    }

    fn replace(&mut self, replacement: &Replacement) {
        let Replacement { target, staged, number, written, .. } = *replacement;
        let (class, shape) = replacement.class;
        let (from, to) = (slot_word(target, 0, shape), slot_word(staged, 0, shape));
        self.words.store(MERGE_AT + 1, target.first.into());
        self.words.store(MERGE_AT + 2, staged.first.into());
        if !Mutation::ReplaceUnrecorded.is_active() {
            self.words.store(MERGE_AT, REPLACING);
        }
        self.lock(target, &[(0, number.get())], shape);
        self.copy_words(from, to, 1 + u64::from(written)..u64::from(shape.slot_bytes / 8));
        // After this store a killed replacement is completed, not undone.
        let header = Header::from_word(self.words.load(from)).with_lock(Lock::Open);
        let next = if Mutation::KeepVersion.is_active() { header } else { header.next_version() };
        self.words.store(to, next.word());
        self.map_address(replacement.address, [Some(staged), None]);
        self.words.store(self.layout.block_at(staged.first), block_word(class, replacement.address));
        self.map_address(replacement.staged_address, [None; 2]);
    }

    fn end_merge(&mut self) {
        self.words.store(MERGE_AT, 0);
    }
}
