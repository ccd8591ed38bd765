//! A node whose memory is a few words, and a driver that executes actions on them at once.

use aquifer_fabric::{Host, Tenant};
use aquifer_pool::cache::{NodeCache, NumberSource, search_start};
use aquifer_pool::layout::{Layout, SECTION_ENTRIES};
use aquifer_pool::op::{Action, FreeOp, OpError, StateMachine, Step, StepResult, WordAccess, WordAt};
use aquifer_pool::size::SECTION_SPANS;
use aquifer_pool::word::{SectionWord, SpanState};

/// The words of a node.
pub struct TestWords {
    pub sections: Vec<u64>,
    pub spans: Vec<u64>,
    pub log: Vec<u64>,
    pub keys: Vec<u64>,
    pub longest_read: u32,
}

impl TestWords {
    /// Creates zero words of a node with this number of sections, and a cache for them.
    pub fn new(sections: u32) -> (Self, NodeCache) {
        let layout = Layout::new(1, sections).expect("a layout");
        let words = Self {
            sections: vec![0; sections as usize],
            spans: vec![0; (sections * SECTION_SPANS) as usize],
            log: vec![0; (sections * SECTION_ENTRIES) as usize],
            keys: vec![0; (sections * SECTION_ENTRIES) as usize],
            longest_read: 0,
        };
        (words, NodeCache::new(&layout, search_start(Host(1), 0), Tenant(0), NumberSource::counted(1, 64)))
    }

    /// The `count` words from a place on.
    pub fn at(&mut self, at: WordAt, count: u32) -> &mut [u64] {
        match at {
            WordAt::Section(index) => &mut self.sections[index as usize..][..count as usize],
            WordAt::Span(index) => &mut self.spans[index as usize..][..count as usize],
            WordAt::Log(index) => &mut self.log[index as usize..][..count as usize],
            WordAt::Key(index) => &mut self.keys[index as usize..][..count as usize],
        }
    }

    /// Executes an action and returns the next step.
    pub fn execute<M: StateMachine>(
        &mut self,
        op: &mut M,
        cache: &mut NodeCache,
        action: &Action,
    ) -> Step<M::Output> {
        let answer = self.answer(action);
        op.step(cache, StepResult(&answer))
    }

    /// Executes an action; returns its answer.
    pub fn answer(&mut self, action: &Action) -> Vec<u64> {
        let mut answer = Vec::new();
        for access in action.accesses() {
            match *access {
                WordAccess::Cas { at, expected, desired } => answer.push(self.swap(at, expected, desired)),
                WordAccess::Probe { at } => answer.push(self.at(at, 1)[0]),
                WordAccess::Read { at, count } => {
                    self.longest_read = self.longest_read.max(count);
                    answer.extend_from_slice(self.at(at, count));
                }
                WordAccess::Write { at, .. } => {
                    let words: Vec<u64> = access.written().collect();
                    let count = u32::try_from(words.len()).expect("few words");
                    self.at(at, count).copy_from_slice(&words);
                }
            }
        }
        answer
    }

    /// Runs a free of one extent; returns its outcome and the number of actions.
    pub fn free(&mut self, cache: &mut NodeCache, op: FreeOp) -> (Result<(), OpError>, u32) {
        let (outcomes, actions) = self.run(cache, op);
        (outcomes.and_then(|outcomes| outcomes[0]), actions)
    }

    /// Compares and swaps a word; returns the word that was found.
    pub fn swap(&mut self, at: WordAt, expected: u64, desired: u64) -> u64 {
        let word = &mut self.at(at, 1)[0];
        let found = *word;
        if found == expected {
            *word = desired;
        }
        found
    }

    /// The state of a span of section 0.
    pub fn section_state(&self, span: u8) -> SpanState {
        SectionWord(self.sections[0]).state(span)
    }

    /// Runs an operation to its end; returns its result and the number of actions.
    pub fn run<M: StateMachine>(
        &mut self,
        cache: &mut NodeCache,
        mut op: M,
    ) -> (Result<M::Output, OpError>, u32) {
        let mut actions = 0;
        let mut step = op.start(cache);
        loop {
            match step {
                Step::Done(result) => return (result, actions),
                Step::Post(action) => step = self.execute(&mut op, cache, &action),
            }
            actions += 1;
        }
    }
}
