//! The memory of a heap in words, and the translation of block addresses to it.

use std::collections::HashMap;

use aquifer_objects::class::{Class, FRAME_BYTES};
use aquifer_objects::pointer::BlockAddress;
use aquifer_objects::space::FrameRun;

const FRAME_WORDS: u64 = FRAME_BYTES / 8;

/// Memory and translation, as readers see them.
#[derive(Debug)]
pub struct HeapMemory {
    words: Vec<u64>,
    named: HashMap<BlockAddress, Vec<FrameRun>>,
}

impl HeapMemory {
    pub fn new(frames: u32) -> Self {
        let words = vec![0; usize::try_from(u64::from(frames) * FRAME_WORDS).expect("a small heap")];
        Self { words, named: HashMap::new() }
    }

    pub fn load(&self, at: u64) -> u64 {
        self.words[usize::try_from(at).expect("inside")]
    }

    pub fn store(&mut self, at: u64, word: u64) {
        self.words[usize::try_from(at).expect("inside")] = word;
    }

    /// The memory that an address names now.
    pub fn named(&self, address: BlockAddress) -> Vec<FrameRun> {
        self.named.get(&address).cloned().unwrap_or_default()
    }

    pub fn name(&mut self, address: BlockAddress, named: &[FrameRun]) {
        if named.is_empty() {
            self.named.remove(&address);
        } else {
            self.named.insert(address, named.to_vec());
        }
    }

    /// Frees the memory of a block: it reads as zeros, and may be used again at once.
    pub fn free(&mut self, frames: FrameRun) {
        let first = usize::try_from(u64::from(frames.first) * FRAME_WORDS).expect("inside");
        let len = usize::try_from(FRAME_WORDS << frames.order).expect("inside");
        self.words[first..first + len].fill(0);
    }
}

/// The first word of a slot.
pub fn slot_word(frames: FrameRun, slot: u32, class: Class) -> u64 {
    u64::from(frames.first) * FRAME_WORDS + u64::from(slot) * u64::from(class.slot_bytes) / 8
}
