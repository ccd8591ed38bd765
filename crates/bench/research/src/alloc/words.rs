//! Metadata of the nodes in the cost model, and the effects of clients' operations on it.

use aquifer_bench::support::one_sided_array::Touch;
use aquifer_pool::SizeClass;
use aquifer_pool::layout::SECTION_ENTRIES;
use aquifer_pool::op::{Action, WordAccess, WordAt};
use aquifer_pool::size::{SECTION_CHUNKS, SECTION_SPANS};

use super::allocators::Allocator;

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
    pub fn new(allocator: Allocator, sections: u32, nodes: usize) -> Self {
        Self { nodes: (0..nodes).map(|_| NodeWords::new(allocator, sections)).collect() }
    }
}

impl NodeWords {
    /// Metadata of free memory.
    pub fn new(allocator: Allocator, sections: u32) -> Self {
        let of = |is_used: bool, each: u32| if is_used { (sections * each) as usize } else { 0 };
        let (ours, array) =
            (matches!(allocator, Allocator::Pool | Allocator::Part(_)), allocator == Allocator::Array);
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

    /// Carries out the operations of one doorbell of an array client, and writes the outcomes to
    /// `results`.
    pub fn touch(&mut self, touches: &[Touch], results: &mut Vec<u16>) -> Arrived {
        results.clear();
        let mut arrived = plain(touches.len() as u64);
        for touch in touches {
            match *touch {
                Touch::Clear { entry } => self.owners[entry as usize] = 0,
                Touch::Read { first, count } => {
                    results.extend_from_slice(&self.owners[first as usize..][..count as usize]);
                }
                Touch::Claim { entry, host } => {
                    let owner = &mut self.owners[entry as usize];
                    results.push(*owner);
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

    /// Carries out an action of the pool, and writes the outcomes to `results`.
    pub fn carry_out(&mut self, action: &Action, results: &mut Vec<u64>) -> Arrived {
        results.clear();
        let mut arrived = plain(action.accesses().len() as u64);
        for access in action.accesses() {
            match *access {
                WordAccess::Cas { at, expected, desired } => {
                    let found = self.swap(at, expected, desired);
                    results.push(found);
                    arrived.swaps += 1;
                    arrived.lost += u64::from(found != expected);
                }
                WordAccess::Probe { at } => results.push(self.words(at, 1)[0]),
                WordAccess::Read { at, count } => results.extend_from_slice(self.words(at, count as usize)),
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

#[cfg(test)]
mod tests {
    use aquifer_bench::support::one_sided_array::{ArrayClient, ArrayProgress, Held};

    use super::*;

    fn run(client: &mut ArrayClient, words: &mut NodeWords) -> Result<Option<Held>, String> {
        let mut results = Vec::new();
        loop {
            words.touch(client.touches(), &mut results);
            match client.complete(&results)? {
                ArrayProgress::LostRace => {}
                ArrayProgress::Allocated(held) => return Ok(Some(held)),
                ArrayProgress::Freed => return Ok(None),
            }
        }
    }

    #[test]
    fn two_clients_with_the_same_start_own_different_entries() {
        let mut words = NodeWords::new(Allocator::Array, 1);
        // With these seeds both start at the first entry.
        let mut clients = [1, 2].map(|host| ArrayClient::new(host, 1, 1, u64::from(host)));
        let mut owners = [0; SECTION_CHUNKS as usize];
        let class = SizeClass::new(2).unwrap();
        let mut held = Vec::new();
        for turn in 0..SECTION_CHUNKS / class.chunks() {
            let number = (turn % 2) as usize;
            assert!(clients[number].start_allocation(0, class));
            let got = run(&mut clients[number], &mut words).unwrap().unwrap();
            for entry in got.first..got.first + 4 {
                assert_eq!(std::mem::replace(&mut owners[entry as usize], number + 1), 0);
            }
            held.push((number, got));
        }
        let full = if clients[0].start_allocation(0, class) {
            run(&mut clients[0], &mut words)
        } else {
            Err(String::new())
        };
        assert!(full.is_err(), "nothing is left");
        for (number, held) in held {
            clients[number].start_free(held);
            assert_eq!(run(&mut clients[number], &mut words), Ok(None));
        }
        assert!(
            (0..2).all(|_| clients[0].start_allocation(0, class) && run(&mut clients[0], &mut words).is_ok())
        );
    }

    #[test]
    fn entries_that_others_have_freed_are_found() {
        let mut words = NodeWords::new(Allocator::Array, 1);
        let mut clients = [1, 2].map(|host| ArrayClient::new(host, 1, 1, 0));
        // The other client owns all entries, and this one learns that.
        assert!(clients[1].start_allocation(0, SizeClass::SECTION));
        let all = run(&mut clients[1], &mut words).unwrap().unwrap();
        assert!(clients[0].start_allocation(0, SizeClass::SPAN));
        assert!(run(&mut clients[0], &mut words).is_err(), "the other client owns all");
        clients[1].start_free(all);
        run(&mut clients[1], &mut words).unwrap();
        assert!(clients[0].start_allocation(0, SizeClass::SPAN), "it discards known owners");
        assert!(run(&mut clients[0], &mut words).unwrap().is_some());
    }
}
