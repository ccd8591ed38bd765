//! Metadata of the nodes in the cost model, and the effects of clients' operations on it.

use aquifer_pool::SizeClass;
use aquifer_pool::layout::SECTION_ENTRIES;
use aquifer_pool::op::{Action, WordAccess, WordAt};
use aquifer_pool::size::{SECTION_CHUNKS, SECTION_SPANS};

use super::array::Touch;
use super::ways::Way;

/// Counts of a client's operations at a node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrived {
    /// The node, if it was an RPC.
    pub node: usize,
    /// Number of operations.
    pub operations: u64,
    /// Number of CASes among them.
    pub swaps: u64,
    /// Number of failed CASes.
    pub lost: u64,
    /// Size of the extent, if it was an RPC.
    pub rpc: Option<SizeClass>,
}

/// Metadata of all nodes.
#[derive(Debug)]
pub struct World {
    pub nodes: Vec<NodeWords>,
}

/// Metadata of a node.
#[derive(Clone, Debug, Default)]
pub struct NodeWords {
    pub sections: Vec<u64>,
    pub spans: Vec<u64>,
    pub logs: Vec<u64>,
    pub keys: Vec<u64>,
    /// Owners of the chunks, for the one-sided array.
    owners: Vec<u16>,
}

impl World {
    /// Metadata of free memory.
    pub fn new(way: Way, sections: u32, nodes: usize) -> Self {
        Self { nodes: (0..nodes).map(|_| NodeWords::new(way, sections)).collect() }
    }
}

impl NodeWords {
    /// Metadata of free memory.
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

    /// Carries out the operations of one doorbell of an array client, and returns the results.
    pub fn touch(&mut self, touches: &[Touch], heard: &mut Vec<u16>) -> Arrived {
        heard.clear();
        let mut arrived = plain(touches.len() as u64);
        for touch in touches {
            match *touch {
                Touch::Clear { entry } => self.owners[entry as usize] = 0,
                Touch::Read { first, count } => {
                    heard.extend_from_slice(&self.owners[first as usize..][..count as usize]);
                }
                Touch::Claim { entry, host } => {
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

    /// Carries out an action of the pool, and writes the results to `heard`.
    pub fn carry_out(&mut self, action: &Action, heard: &mut Vec<u64>) -> Arrived {
        heard.clear();
        let mut arrived = plain(action.accesses().len() as u64);
        for access in action.accesses() {
            match *access {
                WordAccess::Cas { at, expected, desired } => {
                    let found = self.swap(at, expected, desired);
                    heard.push(found);
                    arrived.swaps += 1;
                    arrived.lost += u64::from(found != expected);
                }
                WordAccess::Probe { at } => heard.push(self.words(at, 1)[0]),
                WordAccess::Read { at, count } => heard.extend_from_slice(self.words(at, count as usize)),
                WordAccess::Write { at, others, .. } => {
                    let words = self.words(at, usize::from(others) + 1);
                    words.iter_mut().zip(access.written()).for_each(|(word, value)| *word = value);
                }
            }
        }
        arrived
    }
}

pub fn plain(operations: u64) -> Arrived {
    Arrived { operations, ..Arrived::default() }
}
