//! Readers: each reads one object by its pointer, one word a step.

use aquifer_objects::class::Class;
use aquifer_objects::header::{Header, ObjectNumber};
use aquifer_objects::layout::slot_word;
use aquifer_objects::pointer::BlockAddress;
use aquifer_objects::slot::{ReadVerdict, verdict};
use aquifer_objects::space::FrameRun;

use super::memory::HeapMemory;

/// How a fabric translates addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Translation {
    /// The reader translates once, and checks at the end that the translation is the same.
    Once,
    /// The target translates each of three operations: header, bytes, header.
    Each,
}

/// A read in progress.
#[derive(Clone, Debug)]
pub struct DirectRead {
    pub object: usize,
    pub began: u64,
    number: ObjectNumber,
    address: u64,
    class: Class,
    translation: Translation,
    frames: Option<FrameRun>,
    before: Header,
    payload: Vec<u64>,
}

/// The outcome of a read.
#[derive(Clone, Debug)]
pub enum ReadOutcome {
    /// The bytes of the object.
    Bytes(Vec<u64>),
    /// A failure after which the client retries, or corrects the pointer.
    Invalid(ReadVerdict),
}

impl DirectRead {
    pub fn new(
        object: usize,
        began: u64,
        pointer: (u64, ObjectNumber, Class),
        translation: Translation,
    ) -> Self {
        let (address, number, class) = pointer;
        Self {
            object,
            began,
            number,
            address,
            class,
            translation,
            frames: None,
            before: Header::FREE,
            payload: Vec::new(),
        }
    }

    /// Runs one step. Returns the outcome with the last step.
    pub fn step(&mut self, memory: &HeapMemory) -> Option<ReadOutcome> {
        let words = self.class.slot_bytes / 8 - 1;
        let done = u32::try_from(self.payload.len()).expect("small");
        if self.frames.is_none() {
            let Some(frames) = self.translate(memory) else {
                return Some(ReadOutcome::Invalid(ReadVerdict::Elsewhere));
            };
            self.frames = Some(frames);
            self.before = Header::from_word(memory.get(self.word(frames, 0)));
            return None;
        }
        if done == 0 || done == words {
            if self.translation == Translation::Each {
                self.frames = self.translate(memory);
            } else if done == words && self.frames != self.translate(memory) {
                return Some(ReadOutcome::Invalid(ReadVerdict::Busy));
            }
        }
        let Some(frames) = self.frames else {
            return Some(ReadOutcome::Invalid(ReadVerdict::Elsewhere));
        };
        if done < words {
            self.payload.push(memory.get(self.word(frames, done + 1)));
            return None;
        }
        let after = Header::from_word(memory.get(self.word(frames, 0)));
        Some(match verdict(self.number, self.before, after) {
            ReadVerdict::Valid => ReadOutcome::Bytes(std::mem::take(&mut self.payload)),
            other => ReadOutcome::Invalid(other),
        })
    }

    fn translate(&self, memory: &HeapMemory) -> Option<FrameRun> {
        let (name, _) = BlockAddress::containing(self.address)?;
        memory.named(name)
    }

    fn word(&self, frames: FrameRun, word: u32) -> u64 {
        let (_, offset) = BlockAddress::containing(self.address).expect("it was translated");
        let slot = u32::try_from(offset / u64::from(self.class.slot_bytes)).expect("small");
        slot_word(frames, slot, self.class) + u64::from(word)
    }
}
