//! The memory of a heap in words, and what readers see of it.

use std::collections::HashMap;

use aquifer_objects::layout::{DATA, FRAME_WORDS, HeapWords, Layout, NAMES};
use aquifer_objects::pointer::BlockAddress;
use aquifer_objects::slot::Words;
use aquifer_objects::space::FrameRun;

/// Bytes, names and records of a heap. Words that were never stored are 0.
#[derive(Clone, Debug)]
pub struct HeapMemory {
    layout: Layout,
    data: Vec<u64>,
    others: HashMap<u64, u64>,
}

impl HeapMemory {
    pub fn new(layout: Layout) -> Self {
        let words = u64::from(layout.frames_max()) * FRAME_WORDS;
        Self { layout, data: vec![0; usize::try_from(words).expect("a small heap")], others: HashMap::new() }
    }

    pub fn get(&self, at: u64) -> u64 {
        match usize::try_from(at - DATA) {
            Ok(at) if at < self.data.len() => self.data[at],
            _ => self.others.get(&at).copied().unwrap_or(0),
        }
    }

    /// The memory that an address names first, as the fabric translates it.
    pub fn named(&self, address: BlockAddress) -> Option<FrameRun> {
        let at = NAMES + self.layout.names_before(usize::from(address.order)) + u64::from(address.number);
        let first = u32::try_from(self.get(at).checked_sub(1)?).expect("a frame");
        Some(FrameRun { first, count: 1 << address.order })
    }
}

impl Words for HeapMemory {
    fn load(&mut self, at: u64) -> u64 {
        self.get(at)
    }

    fn store(&mut self, at: u64, word: u64) {
        match usize::try_from(at - DATA) {
            Ok(at) if at < self.data.len() => self.data[at] = word,
            _ => {
                self.others.insert(at, word);
            }
        }
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        let is_old = self.get(at) == old;
        if is_old {
            self.store(at, new);
        }
        is_old
    }
}

impl HeapWords for HeapMemory {
    fn discard(&mut self, at: u64, words: u64) {
        (at..at + words).for_each(|at| self.store(at, 0));
    }

    fn peek(&mut self, at: u64, out: &mut [u64]) {
        (at..).zip(out).for_each(|(at, out)| *out = self.get(at));
    }
}
