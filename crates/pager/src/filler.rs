//! Where the next evicted pages go: slabs are filled in the request of eviction, holes of sparse ones first.

mod empty;
mod slab_list;
mod sparse;
#[cfg(test)]
mod tests;

pub use empty::SlabSizing;
use slab_list::SlabList;
pub use sparse::GainThreshold;

use std::sync::Arc;

use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};

use crate::page::Location;
use crate::slabs::{SLAB_PAGES_MAX, SLABS_MAX, SlabId, SlabSet, UnfinishedReplica};

/// A fresh slab has this part of what the run has on memory nodes, from 4 KiB to 2 MiB: so little is wasted, and there are few slabs.
const SLAB_DIVISOR: u64 = 16;
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
    /// A node is away, and the others have no room. It may come back.
    #[error("memory node {} is away", .0.0)]
    Away(NodeId),
    /// No node has room; the last answer.
    #[error("the pool is full: {0}")]
    Pool(PoolError),
}

/// Consecutive free pages of one slab, now taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FreePages {
    /// The first page.
    pub first: Location,
    /// How many.
    pub pages: u32,
}

#[derive(Debug)]
struct OpenSlab {
    slab: SlabId,
    cursor: u32,
    pages: u32,
}

/// Extents that are wanted of the pool.
#[derive(Clone, Copy, Debug)]
struct ExtentRequest {
    class: SizeClass,
    /// On so many nodes.
    nodes: usize,
    /// Of each of them up to so many, at least one.
    each: u32,
}

/// Chooses slabs and pages for one sender.
#[derive(Debug)]
pub struct Filler {
    slabs: Arc<SlabSet>,
    open: Option<OpenSlab>,
    sizing: SlabSizing,
    in_use: SlabList,
    /// Those in use with fewer copies than they should have.
    degraded: SlabList,
    /// Empty ones that are kept.
    empty: SlabList,
    /// Sparse ones that were found when it was looked for them last, the emptiest last; and how many slabs are to be filled before the next look.
    candidates: Vec<SlabId>,
    fills_until_search: usize,
    /// Not to be filled, nor given back, while it is copied.
    copying: Option<SlabId>,
    /// Nodes that turned out to be gone.
    gone_nodes: Vec<NodeId>,
    /// Slabs of which no copy is left.
    unreachable: Vec<SlabId>,
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
        let numbers: Vec<SlabId> =
            if has_slabs { slabs.in_use().map(|(slab, _)| slab).collect() } else { Vec::new() };
        let used_numbers = numbers.last().map_or(0, |slab| slab.0 + 1);
        let in_use: SlabList = numbers.into_iter().collect();
        let free_numbers = (0..used_numbers).map(SlabId).filter(|slab| !in_use.contains(*slab)).collect();
        let wanted = slabs.replicas_wanted();
        let degraded = in_use.iter().filter(|slab| slabs.replicas(*slab).len() < wanted).collect();
        Self {
            slabs,
            open: None,
            sizing: SlabSizing::AsNeeded,
            in_use,
            degraded,
            empty: SlabList::default(),
            candidates: Vec::new(),
            fills_until_search: 0,
            copying: None,
            gone_nodes: Vec::new(),
            unreachable: Vec::new(),
            free_numbers,
            used_numbers,
            random: seed | 1,
        }
    }

    /// Up to `want` consecutive free pages. The caller occupies them before it asks again.
    ///
    /// # Errors
    /// If the pool has no room on any node, or no node is left.
    pub fn find_free_pages(&mut self, pool: &mut PoolClient, want: u32) -> Result<FreePages, NoRoom> {
        loop {
            if let Some(open) = &mut self.open {
                let at = |index| Location::new(open.slab, index);
                let first = (open.cursor..open.pages).find(|index| self.slabs.is_free(at(*index)));
                if let Some(first) = first {
                    let limit = open.pages.min(first + want);
                    let end = (first..limit).find(|index| !self.slabs.is_free(at(*index))).unwrap_or(limit);
                    let room = FreePages { first: at(first), pages: end - first };
                    open.cursor = end;
                    return Ok(room);
                }
            }
            self.open = Some(self.next_slab(pool, want)?);
        }
    }

    /// A node is gone: nothing more is written there. Slabs that were nowhere else are left to those who look for their pages, if there are
    /// any.
    pub fn forget_node(&mut self, node: NodeId) {
        self.open.take_if(|open| self.slabs.replicas(open.slab).on(node).is_some());
        self.forget_replicas(|copy| copy.node == node);
    }

    /// SlabReplicas that are lost are read no more. An empty slab that has no other is forgotten.
    fn forget_replicas(&mut self, mut is_lost: impl FnMut(Extent) -> bool) {
        let slabs = Arc::clone(&self.slabs);
        for slab in self.in_use.iter().collect::<Vec<_>>() {
            let mut copies = slabs.replicas(slab).iter();
            if copies.all(|copy| !is_lost(copy) || slabs.drop_replica(slab, copy.node)) {
                continue;
            }
            self.in_use.remove(slab);
            self.empty.remove(slab);
            self.unreachable.push(slab);
            slabs.unmark(slab);
            if slabs.live_pages(slab) == 0 && self.copying != Some(slab) {
                slabs.remove_slab(slab);
                self.free_numbers.push(slab);
            }
        }
        self.update_degraded();
    }

    /// After a restart: what is on nodes that this client does not reach is as good as gone. What was begun and is not whole goes back.
    /// Returns the nodes that slabs are on.
    pub fn adopt_recovered(&mut self, pool: &mut PoolClient) -> Vec<NodeId> {
        self.slabs.unfinished_replicas().for_each(|left| self.free_unfinished(pool, left));
        // SlabReplicas that are not in the memory that their nodes have now are gone. Of a node that does not answer nothing is known, which is not
        // the same.
        self.forget_replicas(|copy| !pool.is_current(copy).unwrap_or(true));
        let mut nodes = self.nodes();
        nodes.retain(|node| {
            let is_known = pool.nodes().any(|other| other == *node);
            if !is_known {
                self.forget_node(*node);
                pool.doubt(*node);
            }
            is_known
        });
        nodes
    }

    /// The nodes that slabs are on.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = Vec::new();
        for copy in self.in_use.iter().flat_map(|slab| self.slabs.replicas(slab).iter()) {
            if !nodes.contains(&copy.node) {
                nodes.push(copy.node);
            }
        }
        nodes
    }

    fn free_unfinished(&self, pool: &mut PoolClient, left: UnfinishedReplica) {
        let UnfinishedReplica { slab, place, extent, record } = left;
        if record == 0 {
            free_recorded(&self.slabs, pool, &mut [RecordedReplica { slab, place, extent }]);
            return;
        }
        match pool.free_begun(extent, record) {
            Ok(true) => {}
            Ok(false) => tracing::info!(?extent, "a slab was given back, as far as anybody knows"),
            Err(error) => {
                tracing::warn!(%error, ?extent, "a slab could not be given back yet; it is looked for when its node answers")
            }
        }
        self.slabs.clear(slab, place);
    }

    fn update_degraded(&mut self) {
        let wanted = self.slabs.replicas_wanted();
        self.degraded = self.in_use.iter().filter(|slab| self.slabs.replicas(*slab).len() < wanted).collect();
    }

    /// Any copy that is on a node.
    #[must_use]
    pub fn any_replica_on(&self, node: NodeId) -> Option<Extent> {
        self.in_use.iter().find_map(|slab| self.slabs.replicas(slab).on(node))
    }

    /// Slabs with fewer copies than they should have.
    pub fn degraded(&self) -> impl Iterator<Item = SlabId> {
        self.degraded.iter()
    }

    /// How many they are.
    #[must_use]
    pub fn degraded_count(&self) -> usize {
        self.degraded.len()
    }

    /// Nodes that turned out to be gone since the last call.
    pub fn drain_gone_nodes(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.gone_nodes)
    }

    /// Slabs of which no copy is left since the last call.
    pub fn drain_unreachable(&mut self) -> Vec<SlabId> {
        std::mem::take(&mut self.unreachable)
    }

    /// From now on the slab is neither filled nor given back.
    pub fn begin_copying(&mut self, slab: SlabId) {
        self.open.take_if(|open| open.slab == slab);
        self.copying = Some(slab);
    }

    /// The slab that was set aside has all the copies that it will have for now.
    pub fn end_copying(&mut self, pool: &mut PoolClient, slab: SlabId) {
        self.copying = None;
        self.restore_slab(pool, slab);
        if self.slabs.replicas(slab).len() == self.slabs.replicas_wanted() {
            self.degraded.remove(slab);
        }
        if self.slabs.live_pages(slab) == 0 {
            self.free_slabs(pool, &[slab]);
        }
    }

    /// The last node that had a slab died while a copy was made that became whole all the same: it is not lost.
    fn restore_slab(&mut self, pool: &PoolClient, slab: SlabId) {
        let is_here = |copy: &Extent| pool.nodes().any(|node| node == copy.node);
        let copies = self.slabs.replicas(slab);
        if self.in_use.contains(slab) || !copies.iter().any(|copy| is_here(&copy)) {
            return;
        }
        for copy in copies.iter().filter(|copy| !is_here(copy)) {
            self.slabs.drop_replica(slab, copy.node);
            pool.doubt(copy.node);
        }
        self.in_use.insert(slab);
        self.update_degraded();
    }

    /// An extent for one more copy of a slab, on a node that has none.
    pub fn allocate_replica(&mut self, pool: &mut PoolClient, slab: SlabId) -> Option<Extent> {
        let copies = self.slabs.replicas(slab);
        let request = ExtentRequest { class: copies.class()?, nodes: 1, each: 1 };
        self.allocate_on_nodes(pool, request, |node| copies.on(node).is_none(), &mut NoRoom::NoNodes).pop()
    }

    /// The emptiest slab that is at most half full, else a fresh one; with as many copies as there are nodes for. If there is no room for all
    /// of them, what there is: programs go on, and the copies are made when there is room. If there is none at all, the holes of others.
    fn next_slab(&mut self, pool: &mut PoolClient, want: u32) -> Result<OpenSlab, NoRoom> {
        let previous = self.open.take().map(|open| open.slab);
        // What became empty while it was open was not given back.
        if let Some(slab) = previous.filter(|slab| self.slabs.live_pages(*slab) == 0) {
            self.empty.insert(slab);
        }
        let copies = self.slabs.replicas_wanted().min(pool.nodes().count()).max(1);
        if let Some(open) = self.sparse_slab(previous, copies).or_else(|| self.empty_slab(copies)) {
            return Ok(open);
        }
        if let SlabSizing::Fixed { class, group_slabs } = self.sizing {
            let fresh = match group_slabs {
                1 => self.allocate_fixed_slabs(pool, class),
                _ => self.allocate_slab_group(pool, class, group_slabs),
            };
            return fresh.or_else(|refused| self.slab_with_holes().ok_or(refused));
        }
        let refused = match self.fresh_slab(pool, want, copies, copies) {
            Err(refused) => refused,
            outcome => return outcome,
        };
        if copies > 1 {
            if let Some(open) = self.sparse_slab(previous, 1).or_else(|| self.empty_slab(1)) {
                return Ok(open);
            }
            if let Ok(open) = self.fresh_slab(pool, want, copies, 1) {
                return Ok(open);
            }
        }
        self.slab_with_holes().ok_or(refused)
    }

    fn fresh_slab(
        &mut self,
        pool: &mut PoolClient,
        want: u32,
        copies: usize,
        copies_min: usize,
    ) -> Result<OpenSlab, NoRoom> {
        let slab = self.free_number()?;
        let _under_way = pool.under_way();
        match self.allocate(pool, want, copies, copies_min) {
            Ok(extents) => {
                self.publish_slab(slab, &extents);
                Ok(OpenSlab { slab, cursor: 0, pages: extents[0].class.chunks() })
            }
            Err(error) => {
                self.free_numbers.push(slab);
                Err(error)
            }
        }
    }

    fn free_number(&mut self) -> Result<SlabId, NoRoom> {
        match self.free_numbers.pop() {
            Some(slab) => Ok(slab),
            None if self.used_numbers < SLABS_MAX => {
                self.used_numbers += 1;
                Ok(SlabId(self.used_numbers - 1))
            }
            None => Err(NoRoom::TooManySlabs),
        }
    }

    fn publish_slab(&mut self, slab: SlabId, extents: &[Extent]) {
        self.slabs.publish(slab, extents);
        self.in_use.insert(slab);
        if extents.len() < self.slabs.replicas_wanted() {
            self.degraded.insert(slab);
        }
    }

    /// Large enough for what is to be written, at most 64 pages, and not above the part.
    fn wanted_class(&self, want: u32) -> u8 {
        let part = (self.slabs.pages() / SLAB_DIVISOR).clamp(1, SLAB_PAGES_MAX.into());
        let k = part.ilog2().max(want.next_power_of_two().ilog2());
        u8::try_from(k).expect("at most 9")
    }

    /// Extents of one size on distinct nodes: as many as wanted, of the largest size for which there are at least `copies_min`.
    fn allocate(
        &mut self,
        pool: &mut PoolClient,
        want: u32,
        copies: usize,
        copies_min: usize,
    ) -> Result<Vec<Extent>, NoRoom> {
        let wanted = self.wanted_class(want);
        let mut refused = NoRoom::NoNodes;
        for k in std::iter::once(wanted).chain(FALLBACK_CLASSES.into_iter().filter(|k| *k < wanted)) {
            let class = SizeClass::new(k).expect("a valid class");
            let request = ExtentRequest { class, nodes: copies, each: 1 };
            let taken = self.allocate_on_nodes(pool, request, |_| true, &mut refused);
            if taken.len() >= copies_min {
                return Ok(taken);
            }
            taken.iter().for_each(|extent| free_extents(pool, extent.node, &[*extent]));
        }
        Err(refused)
    }

    /// A node where an extent of that size was left, else power of two choices on free memory, for each node anew; if the chosen one is full, the
    /// others in the request of what they have, those that are slow just now last. What there is of what was ordered.
    fn allocate_on_nodes(
        &mut self,
        pool: &mut PoolClient,
        request: ExtentRequest,
        may_be_on: impl Fn(NodeId) -> bool,
        refused: &mut NoRoom,
    ) -> Vec<Extent> {
        let mut taken = Vec::new();
        let mut found = 0;
        let mut nodes: Vec<NodeId> = pool.nodes().filter(|node| may_be_on(*node)).collect();
        nodes.sort_unstable_by_key(|node| {
            (self.slabs.is_slow(*node), std::cmp::Reverse(pool.free_bytes(*node)))
        });
        let mut is_first_choice = true;
        while found < request.nodes && !nodes.is_empty() {
            let at = if is_first_choice { self.choose(&nodes) } else { 0 };
            let node = nodes.remove(at);
            is_first_choice = false;
            match pool.allocate_many(node, request.class, request.each) {
                Ok(extents) => {
                    taken.extend(extents);
                    found += 1;
                    is_first_choice = true;
                }
                Err(error) => {
                    if let PoolError::NodeGone { node, .. } = error {
                        self.gone_nodes.push(node);
                    }
                    match error {
                        PoolError::Away { node } => *refused = NoRoom::Away(node),
                        // Who is away may have room.
                        _ if matches!(refused, NoRoom::Away(_)) => {}
                        error => *refused = NoRoom::Pool(error),
                    }
                }
            }
        }
        taken
    }

    /// Which of some nodes, the better first.
    fn choose(&mut self, nodes: &[NodeId]) -> usize {
        match nodes.len() {
            0..=2 => 0,
            // They come in the request of their free memory, so the better of the two is the earlier.
            count => self.random_below(count).min(self.random_below(count)),
        }
    }

    fn random_below(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).expect("31 bits") % below
    }
}

/// What is noted at a place of a slab.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordedReplica {
    pub slab: SlabId,
    pub place: usize,
    pub extent: Extent,
}

/// Give back what is noted there, and forget it. It stays noted while that is under way.
pub(crate) fn free_recorded(slabs: &SlabSet, pool: &mut PoolClient, noted: &mut [RecordedReplica]) {
    noted.sort_unstable_by_key(|noted| noted.extent.node);
    for of_node in noted.chunk_by(|one, other| one.extent.node == other.extent.node) {
        let node = of_node[0].extent.node;
        let forget = || of_node.iter().for_each(|noted| slabs.clear(noted.slab, noted.place));
        if pool.nodes().any(|other| other == node) {
            for noted in of_node {
                slabs.begin_free(noted.slab, noted.place, pool.last_record(noted.extent));
            }
            let extents: Vec<Extent> = of_node.iter().map(|noted| noted.extent).collect();
            free_extents(pool, node, &extents);
            forget();
        } else {
            forget();
            pool.doubt(node);
        }
    }
}

/// Give extents back to their node.
pub(crate) fn free_extents(pool: &mut PoolClient, node: NodeId, extents: &[Extent]) {
    let outcomes = match pool.free_many(node, extents) {
        Ok(outcomes) => outcomes,
        Err(error) => vec![Err(error)],
    };
    for error in outcomes.into_iter().filter_map(Result::err) {
        if let PoolError::Away { .. } = error {
            tracing::debug!(%error, slabs = extents.len(), "slabs are given back when their node is back");
        } else {
            tracing::warn!(%error, "a slab could not be given back yet; it is looked for when its node answers");
        }
    }
}
