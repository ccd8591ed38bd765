//! Where the next evicted pages go: slabs are filled in the order of eviction, holes of sparse ones first.

use std::sync::Arc;

use aquifer_pool::{NodeId, PoolClient, PoolError, SizeClass};

use crate::page::Location;
use crate::slabs::{SLABS_MAX, SlabId, SlabSet};

/// A run small as this takes small slabs, so that it wastes little; a large one takes large slabs.
const SMALL_SLAB_UNTIL_BYTES: u64 = 4 << 20;
const MIDDLE_SLAB_UNTIL_BYTES: u64 = 32 << 20;
/// Classes to fall back to when the pool has no room for the wanted one.
const FALLBACK_CLASSES: [u8; 3] = [7, 5, 0];

/// Why evicted pages cannot be written anywhere.
#[derive(Debug, thiserror::Error)]
pub enum NoRoom {
    /// No memory node is connected.
    #[error("no memory node can be reached")]
    NoNodes,
    /// The run has all the slabs it may have.
    #[error("a program can have at most {SLABS_MAX} slabs on memory nodes")]
    TooManySlabs,
    /// No node has room; the last answer.
    #[error("the pool is full: {0}")]
    Pool(#[from] PoolError),
}

/// Consecutive free pages of one slab, now taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// The first page.
    pub first: Location,
    /// How many.
    pub pages: u32,
    /// The node they are on.
    pub node: NodeId,
}

#[derive(Debug)]
struct Open {
    slab: SlabId,
    node: NodeId,
    cursor: u32,
    pages: u32,
}

/// Chooses slabs and pages for one sender.
#[derive(Debug)]
pub struct Filler {
    slabs: Arc<SlabSet>,
    open: Option<Open>,
    in_use: Vec<SlabId>,
    free_numbers: Vec<SlabId>,
    used_numbers: u32,
    random: u64,
}

impl Filler {
    /// A filler for the slabs of one run; `seed` spreads runs over the nodes.
    #[must_use]
    pub fn new(slabs: Arc<SlabSet>, seed: u64) -> Self {
        // Some may be there from before a restart.
        let has_slabs = slabs.bytes().0 > 0;
        let in_use: Vec<SlabId> =
            if has_slabs { slabs.in_use().map(|(slab, _)| slab).collect() } else { Vec::new() };
        let used_numbers = in_use.last().map_or(0, |slab| slab.0 + 1);
        let mut known = in_use.iter().copied().peekable();
        let free_numbers =
            (0..used_numbers).map(SlabId).filter(|slab| known.next_if_eq(slab).is_none()).collect();
        Self { slabs, open: None, in_use, free_numbers, used_numbers, random: seed | 1 }
    }

    /// Up to `want` consecutive free pages. The caller occupies them before it asks again.
    ///
    /// # Errors
    /// If the pool has no room on any node, or no node is left.
    pub fn room(&mut self, pool: &mut PoolClient, want: u32) -> Result<Room, NoRoom> {
        loop {
            if let Some(open) = &mut self.open {
                let at = |index| Location::new(open.slab, index);
                let first = (open.cursor..open.pages).find(|index| self.slabs.is_free(at(*index)));
                if let Some(first) = first {
                    let limit = open.pages.min(first + want);
                    let end = (first..limit).find(|index| !self.slabs.is_free(at(*index))).unwrap_or(limit);
                    let room = Room { first: at(first), pages: end - first, node: open.node };
                    open.cursor = end;
                    return Ok(room);
                }
            }
            self.open = Some(self.next_slab(pool)?);
        }
    }

    /// A node is gone: nothing more is written there.
    pub fn forget_node(&mut self, node: NodeId) {
        if self.open.as_ref().is_some_and(|open| open.node == node) {
            self.open = None;
        }
        let slabs = &self.slabs;
        self.in_use.retain(|slab| slabs.extent(*slab).is_some_and(|extent| extent.node != node));
    }

    /// Give slabs that have become empty back to the pool. Returns how many.
    pub fn return_empty(&mut self, pool: &mut PoolClient) -> usize {
        let mut returned = 0;
        for slab in self.slabs.take_emptied() {
            let is_open = self.open.as_ref().is_some_and(|open| open.slab == slab);
            if self.slabs.live_pages(slab) == 0 && !is_open {
                returned += usize::from(self.return_slab(pool, slab));
            }
        }
        returned
    }

    /// The run has ended: give everything back that no volume refers to.
    pub fn close(&mut self, pool: &mut PoolClient) {
        self.open = None;
        for slab in self.in_use.clone() {
            if self.slabs.live_pages(slab) == 0 {
                self.return_slab(pool, slab);
            }
        }
    }

    fn return_slab(&mut self, pool: &mut PoolClient, slab: SlabId) -> bool {
        let Some(extent) = self.slabs.withdraw(slab) else {
            return false;
        };
        self.in_use.retain(|other| *other != slab);
        self.free_numbers.push(slab);
        if let Err(error) = pool.free(extent) {
            tracing::warn!(%error, ?extent, "a slab could not be given back; its node's recovery will find it");
        }
        true
    }

    /// The emptiest slab that is at most half full, else a fresh one.
    fn next_slab(&mut self, pool: &mut PoolClient) -> Result<Open, NoRoom> {
        let previous = self.open.take().map(|open| open.slab);
        let sparse = self
            .in_use
            .iter()
            .filter(|slab| Some(**slab) != previous)
            .filter_map(|slab| {
                let extent = self.slabs.extent(*slab)?;
                let live = self.slabs.live_pages(*slab);
                (live * 2 <= extent.class.chunks()).then_some((
                    live * 1024 / extent.class.chunks(),
                    *slab,
                    extent,
                ))
            })
            .min_by_key(|(fill, _, _)| *fill);
        if let Some((_, slab, extent)) = sparse {
            return Ok(Open { slab, node: extent.node, cursor: 0, pages: extent.class.chunks() });
        }
        self.fresh_slab(pool)
    }

    fn fresh_slab(&mut self, pool: &mut PoolClient) -> Result<Open, NoRoom> {
        let slab = match self.free_numbers.pop() {
            Some(slab) => slab,
            None if self.used_numbers < SLABS_MAX => {
                self.used_numbers += 1;
                SlabId(self.used_numbers - 1)
            }
            None => return Err(NoRoom::TooManySlabs),
        };
        match self.allocate(pool) {
            Ok(extent) => {
                self.slabs.publish(slab, extent);
                self.in_use.push(slab);
                Ok(Open { slab, node: extent.node, cursor: 0, pages: extent.class.chunks() })
            }
            Err(error) => {
                self.free_numbers.push(slab);
                Err(error)
            }
        }
    }

    fn wanted_class(&self) -> u8 {
        match self.slabs.bytes().0 {
            0..SMALL_SLAB_UNTIL_BYTES => 5,
            SMALL_SLAB_UNTIL_BYTES..MIDDLE_SLAB_UNTIL_BYTES => 7,
            _ => 9,
        }
    }

    /// Power of two choices on free memory; if the chosen node is full, the others in the order of what they have.
    fn allocate(&mut self, pool: &mut PoolClient) -> Result<aquifer_pool::Extent, NoRoom> {
        let wanted = self.wanted_class();
        let mut last_error = NoRoom::NoNodes;
        for k in std::iter::once(wanted).chain(FALLBACK_CLASSES.into_iter().filter(|k| *k < wanted)) {
            let class = SizeClass::new(k).expect("a valid class");
            for node in self.choices(pool) {
                match pool.allocate(node, class) {
                    Ok(extent) => return Ok(extent),
                    Err(error) => last_error = error.into(),
                }
            }
        }
        Err(last_error)
    }

    fn choices(&mut self, pool: &mut PoolClient) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = pool.nodes().collect();
        nodes.sort_unstable_by_key(|node| std::cmp::Reverse(pool.free_bytes(*node)));
        if nodes.len() > 2 {
            let (one, other) = (self.draw(nodes.len()), self.draw(nodes.len()));
            // Sorted by free memory, so the better of the two is the earlier.
            let chosen = nodes.remove(one.min(other));
            nodes.insert(0, chosen);
        }
        nodes
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % below
    }
}
