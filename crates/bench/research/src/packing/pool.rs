//! Memory nodes of the simulation: the product's state machines on words of this process, and a
//! record of owners that checks them.

use aquifer_fabric::{Host, Tenant};
use aquifer_pool::SizeClass;
use aquifer_pool::cache::{NodeCache, NumberSource, search_start};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{AllocOp, FreeOp, Grant, OpError, StateMachine, Step, StepResult};
use aquifer_pool::size::SECTION_CHUNKS;

use crate::alloc::allocators::Allocator;
use crate::alloc::words::NodeWords;

/// Number of memory nodes.
const NODES: usize = 4;

/// An extent of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    node: usize,
    grant: Grant,
}

impl Extent {
    /// Number of pages.
    pub fn pages(&self) -> u64 {
        u64::from(self.grant.class.chunks())
    }
}

#[derive(Debug)]
struct Node {
    words: NodeWords,
    /// Each host's cache of its words.
    caches: Vec<NodeCache>,
    /// Owner of each chunk.
    owners: Vec<u16>,
    free_pages: u64,
    /// From this size class on, no extent was free at the last attempt.
    ///
    /// A free raises it above the class of the freed extent. Larger extents that joined from
    /// smaller ones are found after [`SimulatedPool::recheck`].
    full_from: u8,
}

/// The pool of all nodes.
#[derive(Debug)]
pub struct SimulatedPool {
    nodes: Vec<Node>,
    /// Number of allocations, and of sequential operations on nodes for allocations and frees.
    pub taken: u64,
    pub trips: u64,
}

impl SimulatedPool {
    /// A pool with this number of sections in all.
    pub fn new(sections: u32, hosts: usize) -> Self {
        let each = sections / 4;
        let node = |number: usize| {
            let layout = Layout::new(u16::try_from(number + 1).unwrap_or(1), each);
            let layout = layout.expect("the sections fit into a layout");
            let cache = |host: usize| {
                let search_start = search_start(number_of(host), number as u64);
                NodeCache::new(&layout, search_start, Tenant(0), NumberSource::counted(1, 64))
            };
            Node {
                words: NodeWords::new(Allocator::Pool, each),
                caches: (0..hosts).map(cache).collect(),
                owners: vec![0; (each * SECTION_CHUNKS) as usize],
                free_pages: u64::from(each * SECTION_CHUNKS),
                full_from: SizeClass::COUNT,
            }
        };
        Self { nodes: (0..NODES).map(node).collect(), taken: 0, trips: 0 }
    }

    /// Number of pages of all nodes.
    pub fn pages(&self) -> u64 {
        self.nodes.iter().map(|node| node.owners.len() as u64).sum()
    }

    /// Number of free pages.
    pub fn free_pages(&self) -> u64 {
        self.nodes.iter().map(|node| node.free_pages).sum()
    }

    /// Allocates an extent for a host, from the node with most free memory, or another; `None` if
    /// none has one of this size.
    ///
    /// # Errors
    /// If an allocator fails, or allocates a page that is not free.
    pub fn allocate(&mut self, host: usize, class: SizeClass) -> Result<Option<Extent>, String> {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        order.sort_by_key(|node| std::cmp::Reverse(self.nodes[*node].free_pages));
        for number in order {
            let node = &mut self.nodes[number];
            if node.full_from <= class.k() || node.free_pages < u64::from(class.chunks()) {
                continue;
            }
            match node.run(host, AllocOp::new(number_of(host), class), &mut self.trips) {
                Ok(grant) => {
                    node.note(grant, 0, number_of(host).0)?;
                    node.free_pages -= u64::from(class.chunks());
                    self.taken += 1;
                    return Ok(Some(Extent { node: number, grant }));
                }
                Err(OpError::Full) => node.full_from = node.full_from.min(class.k()),
                Err(error) => return Err(format!("an allocation failed: {error:?}")),
            }
        }
        Ok(None)
    }

    /// Frees an extent.
    ///
    /// # Errors
    /// If the allocator fails, or the extent is not of this host.
    pub fn free(&mut self, host: usize, extent: Extent) -> Result<(), String> {
        let Extent { node, grant } = extent;
        let node = &mut self.nodes[node];
        node.note(grant, number_of(host).0, 0)?;
        node.free_pages += u64::from(grant.class.chunks());
        node.full_from = node.full_from.max(grant.class.k() + 1);
        let given = node.run(host, FreeOp::new(number_of(host), grant), &mut self.trips);
        given.and_then(|outcomes| outcomes[0]).map_err(|error| format!("a free failed: {error:?}"))
    }

    /// Discards the records of full nodes, because freed small extents may have joined.
    pub fn recheck(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.full_from = SizeClass::COUNT);
    }

    /// Whether all pages are free, by the record of owners and by the nodes' words.
    pub fn is_all_free(&self) -> bool {
        // The lower half of a section's word is zero if all its spans are free.
        let is_free = |node: &Node| {
            node.owners.iter().all(|owner| *owner == 0)
                && node.words.sections.iter().all(|word| word & 0xffff_ffff == 0)
                && node.words.spans.iter().all(|word| word & 0xffff_ffff == 0)
        };
        self.nodes.iter().all(is_free)
    }
}

/// Hosts are counted from 1.
fn number_of(host: usize) -> Host {
    Host(u16::try_from(host + 1).unwrap_or(u16::MAX))
}

impl Node {
    /// Changes the owner of each chunk of an extent from `from` to `to`.
    fn note(&mut self, grant: Grant, from: u16, to: u16) -> Result<(), String> {
        for chunk in grant.chunk..grant.chunk + grant.class.chunks() {
            let owner = std::mem::replace(&mut self.owners[chunk as usize], to);
            if owner != from {
                return Err(format!("chunk {chunk} went from {from} to {to}, and was {owner}'s"));
            }
        }
        Ok(())
    }

    fn run<M: StateMachine>(
        &mut self,
        host: usize,
        mut machine: M,
        trips: &mut u64,
    ) -> Result<M::Output, OpError> {
        let (cache, mut results) = (&mut self.caches[host], Vec::new());
        let mut step = machine.start(cache);
        loop {
            match step {
                Step::Done(outcome) => return outcome,
                Step::Post(action) => {
                    self.words.carry_out(&action, &mut results);
                    *trips += 1;
                    step = machine.step(cache, StepResult(&results));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn another_hosts_extent_cannot_be_freed() {
        let mut pool = SimulatedPool::new(8, 2);
        let extent = pool.allocate(0, SizeClass::SPAN).unwrap().unwrap();
        assert!(pool.free(1, extent).unwrap_err().contains("was 1's"));
        let mut pool = SimulatedPool::new(8, 2);
        let extent = pool.allocate(0, SizeClass::SPAN).unwrap().unwrap();
        pool.free(0, extent).unwrap();
        assert!(pool.free(0, extent).is_err(), "once is enough");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
        #[test]
        fn the_record_and_the_words_agree(
            requests in prop::collection::vec((0..SizeClass::COUNT, 0..3_usize, any::<u16>()), 1..300)
        ) {
            let mut pool = SimulatedPool::new(8, 3);
            let mut held: Vec<(usize, Extent)> = Vec::new();
            for (k, host, at) in requests {
                if at % 3 == 0 && !held.is_empty() {
                    let (host, extent) = held.swap_remove(usize::from(at) % held.len());
                    pool.free(host, extent).unwrap();
                } else if let Some(extent) = pool.allocate(host, SizeClass::new(k).unwrap()).unwrap() {
                    held.push((host, extent));
                }
                let sum: u64 = held.iter().map(|(_, extent)| extent.pages()).sum();
                prop_assert_eq!(pool.free_pages() + sum, pool.pages());
                prop_assert_eq!(pool.is_all_free(), held.is_empty());
            }
            for (host, extent) in held {
                pool.free(host, extent).unwrap();
            }
            prop_assert!(pool.is_all_free());
        }
    }
}
