//! A node whose memory is some words, on which actions happen at once.

use aquifer_fabric::{Host, Tenant};
use aquifer_pool::cache::{NodeCache, Nonces, begin_at};
use aquifer_pool::layout::{Layout, SECTION_ENTRIES};
use aquifer_pool::op::{Action, Machine, OpError, Step, StepResult, Strikes, WordAt, Writes};
use aquifer_pool::size::SECTION_SPANS;
use aquifer_pool::word::{SectionWord, SpanState};

/// A node's words, on which actions happen at once.
pub struct Words {
    pub sections: Vec<u64>,
    pub spans: Vec<u64>,
    pub log: Vec<u64>,
    pub keys: Vec<u64>,
    pub longest_read: u32,
}

impl Words {
    pub fn new(sections: u32) -> (Self, NodeCache) {
        let layout = Layout::new(1, sections).expect("a layout");
        let words = Self {
            sections: vec![0; sections as usize],
            spans: vec![0; (sections * SECTION_SPANS) as usize],
            log: vec![0; (sections * SECTION_ENTRIES) as usize],
            keys: vec![0; (sections * SECTION_ENTRIES) as usize],
            longest_read: 0,
        };
        (words, NodeCache::new(&layout, begin_at(Host(1), 0), Tenant(0), Nonces::default()))
    }

    pub fn at(&mut self, at: WordAt, count: u32) -> &mut [u64] {
        match at {
            WordAt::Section(index) => &mut self.sections[index as usize..][..count as usize],
            WordAt::Span(index) => &mut self.spans[index as usize..][..count as usize],
            WordAt::Log(index) => &mut self.log[index as usize..][..count as usize],
            WordAt::Key(index) => &mut self.keys[index as usize..][..count as usize],
        }
    }

    pub fn carry_out<M: Machine>(
        &mut self,
        op: &mut M,
        cache: &mut NodeCache,
        action: Action,
    ) -> Step<M::Output> {
        match action {
            Action::Cas { at, expected, desired } => {
                op.step(cache, StepResult::Found(self.swap(at, expected, desired)))
            }
            Action::CasThen { at, expected, desired, then }
            | Action::CasProbe { at, expected, desired, probe: then } => {
                let found = self.swap(at, expected, desired);
                op.step(cache, StepResult::FoundThen(found, self.at(then, 1)[0]))
            }
            Action::WriteThen { writes, at, expected, desired } => {
                self.write(&writes);
                op.step(cache, StepResult::Found(self.swap(at, expected, desired)))
            }
            Action::PlantThen { plant, at, expected, desired } => {
                self.write_parts(plant.writes());
                op.step(cache, StepResult::Found(self.swap(at, expected, desired)))
            }
            Action::Chain(chain) => {
                let found: Vec<u64> =
                    chain.swaps().map(|(at, expected, desired)| self.swap(at, expected, desired)).collect();
                op.step(cache, StepResult::Chained(chain.outcome(found)))
            }
            Action::Survey { section, count } => {
                let first = section * SECTION_SPANS;
                let mut words = self.at(WordAt::Span(first), count * SECTION_SPANS).to_vec();
                for span in (first..).step_by(SECTION_SPANS as usize).take(count as usize) {
                    words.extend_from_slice(self.at(WordAt::span_key(span), SECTION_SPANS));
                }
                op.step(cache, StepResult::Words(&words))
            }
            Action::Probe { at } => op.step(cache, StepResult::Found(self.at(at, 1)[0])),
            Action::Read { at, count } => {
                self.longest_read = self.longest_read.max(count);
                op.step(cache, StepResult::Words(self.at(at, count)))
            }
            Action::Write(writes) => {
                self.write(&writes);
                op.step(cache, StepResult::Written)
            }
            Action::Strike(strikes) => {
                let struck = self.strike(strikes);
                op.step(cache, StepResult::Struck(struck))
            }
            Action::StrikeThen(strikes) => {
                let struck = self.strike(strikes);
                let count = u32::try_from(Strikes::MAX).expect("few");
                op.step(cache, StepResult::StruckThen(struck, self.at(strikes.log(), count)))
            }
        }
    }

    fn strike(&mut self, strikes: Strikes) -> u32 {
        let swap = |(at, expected, desired)| self.swap(at, expected, desired);
        let found: Vec<u64> = strikes.swaps().map(swap).collect();
        strikes.struck(found)
    }

    fn write(&mut self, writes: &Writes) {
        self.write_parts(writes.parts().map(|part| (part.at, part.words())));
    }

    fn write_parts(&mut self, parts: impl Iterator<Item = (WordAt, impl Iterator<Item = u64>)>) {
        for (at, values) in parts {
            let values: Vec<u64> = values.collect();
            self.at(at, u32::try_from(values.len()).expect("few words")).copy_from_slice(&values);
        }
    }

    pub fn swap(&mut self, at: WordAt, expected: u64, desired: u64) -> u64 {
        let word = &mut self.at(at, 1)[0];
        let found = *word;
        if found == expected {
            *word = desired;
        }
        found
    }

    pub fn section_state(&self, span: u8) -> SpanState {
        SectionWord(self.sections[0]).state(span)
    }

    pub fn run<M: Machine>(&mut self, cache: &mut NodeCache, mut op: M) -> (Result<M::Output, OpError>, u32) {
        let mut actions = 0;
        let mut step = op.start(cache);
        loop {
            match step {
                Step::Done(result) => return (result, actions),
                Step::Post(action) => step = self.carry_out(&mut op, cache, action),
            }
            actions += 1;
        }
    }
}
