//! The nodes' memory in the model, as far as it matters, and what clients' operations do to it.

use aquifer_pool::SizeClass;
use aquifer_pool::layout::SECTION_ENTRIES;
use aquifer_pool::op::{Action, StepResult, Strikes, WordAt, Writes};
use aquifer_pool::size::{SECTION_CHUNKS, SECTION_SPANS};

use super::array::Touch;
use super::ways::Way;

/// What a client's operations did at the node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrived {
    /// At which, if it was an RPC.
    pub node: usize,
    /// So many operations.
    pub operations: u64,
    /// Of them CASes.
    pub swaps: u64,
    /// CASes that found something else.
    pub lost: u64,
    /// It was an RPC, about an extent of this size.
    pub rpc: Option<SizeClass>,
}

/// The nodes' memory, as far as it matters.
#[derive(Debug)]
pub struct World {
    pub nodes: Vec<NodeWords>,
}

/// The metadata of a node.
#[derive(Clone, Debug, Default)]
pub struct NodeWords {
    pub sections: Vec<u64>,
    pub spans: Vec<u64>,
    pub logs: Vec<u64>,
    pub keys: Vec<u64>,
    /// Of the array: who has a chunk.
    owners: Vec<u16>,
}

impl World {
    /// All free.
    pub fn new(way: Way, sections: u32, nodes: usize) -> Self {
        Self { nodes: (0..nodes).map(|_| NodeWords::new(way, sections)).collect() }
    }
}

impl NodeWords {
    /// All free.
    pub fn new(way: Way, sections: u32) -> Self {
        let of = |is_used: bool, each: u32| if is_used { (sections * each) as usize } else { 0 };
        let (ours, array) = (matches!(way, Way::Ours | Way::Part(_)), way == Way::Array);
        Self {
            sections: vec![0; of(ours, 1)],
            spans: vec![0; of(ours, SECTION_SPANS)],
            logs: vec![0; of(ours, SECTION_ENTRIES)],
            keys: vec![0; of(ours, SECTION_ENTRIES)],
            owners: vec![0; of(array, SECTION_CHUNKS)],
        }
    }

    fn words(&mut self, at: WordAt, count: usize) -> &mut [u64] {
        let (all, first) = match at {
            WordAt::Section(index) => (&mut self.sections, index),
            WordAt::Span(index) => (&mut self.spans, index),
            WordAt::Log(index) => (&mut self.logs, index),
            WordAt::Key(index) => (&mut self.keys, index),
        };
        &mut all[first as usize..][..count]
    }

    fn swap(&mut self, at: WordAt, expected: u64, desired: u64) -> u64 {
        let word = &mut self.words(at, 1)[0];
        let found = *word;
        if found == expected {
            *word = desired;
        }
        found
    }

    /// Do what a client of the array wants done, all of one doorbell; what it hears.
    pub fn touch(&mut self, touches: &[Touch], heard: &mut Vec<u16>) -> Arrived {
        heard.clear();
        let mut arrived = plain(touches.len() as u64);
        for touch in touches {
            match *touch {
                Touch::Clear { entry } => self.owners[entry as usize] = 0,
                Touch::Read { first, count } => {
                    heard.extend_from_slice(&self.owners[first as usize..][..count as usize]);
                }
                Touch::Take { entry, host } => {
                    let owner = &mut self.owners[entry as usize];
                    heard.push(*owner);
                    arrived.swaps += 1;
                    arrived.lost += u64::from(*owner != 0);
                    if *owner == 0 {
                        *owner = host;
                    }
                }
            }
        }
        arrived
    }

    /// How many operations that takes.
    fn write(&mut self, writes: &Writes) -> u64 {
        self.write_parts(writes.parts().map(|part| (part.at, part.words())))
    }

    fn write_parts(&mut self, parts: impl Iterator<Item = (WordAt, impl Iterator<Item = u64>)>) -> u64 {
        let mut operations = 0;
        for (at, values) in parts {
            let values: Vec<u64> = values.collect();
            self.words(at, values.len()).copy_from_slice(&values);
            operations += 1;
        }
        operations
    }

    fn strike(&mut self, strikes: Strikes, heard: &mut Vec<u64>) -> Arrived {
        let mut arrived = plain(0);
        for (at, expected, desired) in strikes.swaps() {
            arrived.operations += 1;
            arrived.swaps += 1;
            heard.push(self.swap(at, expected, desired));
            arrived.lost += u64::from(heard.last() != Some(&expected));
        }
        arrived
    }

    /// Do what a machine of ours wants done; what it hears, and what that was.
    pub fn carry_out(&mut self, action: &Action, heard: &mut Vec<u64>) -> Arrived {
        heard.clear();
        match *action {
            Action::Cas { at, expected, desired } => {
                heard.push(self.swap(at, expected, desired));
                swapped(1, heard[0] != expected)
            }
            Action::CasThen { at, expected, desired, then }
            | Action::CasProbe { at, expected, desired, probe: then } => {
                heard.push(self.swap(at, expected, desired));
                heard.push(self.words(then, 1)[0]);
                swapped(2, heard[0] != expected)
            }
            Action::WriteThen { writes, at, expected, desired } => {
                let operations = self.write(&writes);
                heard.push(self.swap(at, expected, desired));
                swapped(operations + 1, heard[0] != expected)
            }
            Action::PlantThen { plant, at, expected, desired } => {
                let operations = self.write_parts(plant.writes());
                heard.push(self.swap(at, expected, desired));
                swapped(operations + 1, heard[0] != expected)
            }
            Action::Chain(chain) => {
                let mut arrived = plain(0);
                for (at, expected, desired) in chain.swaps() {
                    let found = self.swap(at, expected, desired);
                    heard.push(found);
                    arrived.operations += 1;
                    arrived.swaps += 1;
                    arrived.lost += u64::from(found != expected);
                }
                arrived
            }
            Action::Probe { at } => {
                heard.push(self.words(at, 1)[0]);
                plain(1)
            }
            Action::Read { at, count } => {
                heard.extend_from_slice(self.words(at, count as usize));
                plain(1)
            }
            Action::Survey { section, count } => {
                let (first, spans) = (section * SECTION_SPANS, SECTION_SPANS as usize);
                heard.extend_from_slice(self.words(WordAt::Span(first), spans * count as usize));
                for span in (first..).step_by(spans).take(count as usize) {
                    heard.extend_from_slice(self.words(WordAt::span_key(span), spans));
                }
                plain(1 + u64::from(count))
            }
            Action::Write(writes) => plain(self.write(&writes)),
            Action::Strike(strikes) => self.strike(strikes, heard),
            Action::StrikeThen(strikes) => {
                let arrived = self.strike(strikes, heard);
                heard.extend_from_slice(self.words(strikes.log(), Strikes::MAX));
                Arrived { operations: arrived.operations + 1, ..arrived }
            }
        }
    }
}

/// What a machine hears that wanted this done.
pub fn answer<'a>(action: &Action, heard: &'a [u64]) -> StepResult<'a> {
    match action {
        Action::Cas { .. } | Action::Probe { .. } | Action::WriteThen { .. } | Action::PlantThen { .. } => {
            StepResult::Found(heard[0])
        }
        Action::Chain(chain) => StepResult::Chained(chain.outcome(heard.iter().copied())),
        Action::CasThen { .. } | Action::CasProbe { .. } => StepResult::FoundThen(heard[0], heard[1]),
        Action::Read { .. } | Action::Survey { .. } => StepResult::Words(heard),
        Action::Write(_) => StepResult::Written,
        Action::Strike(strikes) => StepResult::Struck(strikes.struck(heard.iter().copied())),
        Action::StrikeThen(strikes) => {
            let words = &heard[strikes.swaps().count()..];
            StepResult::StruckThen(strikes.struck(heard.iter().copied()), words)
        }
    }
}

pub fn plain(operations: u64) -> Arrived {
    Arrived { operations, ..Arrived::default() }
}

fn swapped(operations: u64, is_lost: bool) -> Arrived {
    Arrived { swaps: 1, lost: u64::from(is_lost), ..plain(operations) }
}
