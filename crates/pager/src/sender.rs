//! Writes evicted pages to the memory nodes: coalesced, several batches at once, to every copy of a slab, and again elsewhere if
//! no copy is left.
//!
//! The front end copies a batch into its block of the mempool; [`Sender::stage`] looks at what is there, and
//! [`Sender::advance`] posts writes and collects acknowledgements without waiting. `confirm` asks for the copies of what needs no writing,
//! for it is unchanged; `heal` makes copies that are missing; `repack` has sparse slabs emptied.

mod confirm;
mod heal;
mod repack;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use aquifer_fabric::{Completion, Endpoint, PollFd, Verb, Work};
use aquifer_pool::{NodeId, PoolClient, PoolError, UnderWay};

use crate::digest::{Digest, Digester, Digests};
use crate::filler::{Filler, FreePages, NoRoom, SlabSizing};
use crate::integrity::{is_zero, page_crc};
use crate::mempool::{BLOCK_PAGES, BlockId, Mempool};
use crate::mutation::Mutation;
use crate::node_joiner::connect_slab_nodes;
use crate::page::{Location, PAGE_BYTES};
use crate::ports::{Connector, Ports};
use crate::slabs::{SlabId, SlabReplicas, SlabSet, page_of};
use crate::view;
use crate::volume::StageOutcome;
use heal::Healer;
use repack::Repacker;

/// Batches that may await acknowledgement at once.
pub const BATCHES_MAX: usize = 64;

/// Work ids from this one on are the healer's.
const HEAL_WORK_ID: u64 = 1 << 62;
/// The pool is short of memory if less than this part of it is free.
const FREE_DIVISOR: u64 = 4;
/// The mempool, among the local memories of the ports.
const MEMPOOL: usize = 0;

/// A batch on its way. Consecutive pages that go to consecutive places are a *run*, known by its first page; so are pages whose copies are
/// asked for group_slabs.
#[derive(Debug)]
struct BatchWrite {
    number: u64,
    owner: u64,
    block: BlockId,
    count: usize,
    crcs: [u32; BLOCK_PAGES],
    digests: [Digest; BLOCK_PAGES],
    locations: [Option<Location>; BLOCK_PAGES],
    /// Its program has ended: nothing more of it need be written.
    is_abandoned: bool,
    /// Pages with data that are not posted yet.
    unposted: u64,
    /// Pages that are what they were, and whose copies have not been asked for yet.
    unchanged: u64,
    /// WRITEs and READs under way.
    outstanding: usize,
    /// By run: its pages, what of it is under way, and the copies that have acknowledged it (a bit for each place in the slab's record).
    run_pages: [u64; BLOCK_PAGES],
    run_outstanding: [u8; BLOCK_PAGES],
    run_acknowledged: [u8; BLOCK_PAGES],
    /// Runs of which at least one WRITE, or READ, has failed.
    failed_runs: u64,
    /// Runs that no copy has acknowledged yet.
    awaited_runs: u64,
}

impl BatchWrite {
    /// A run is on its way to some copies.
    fn begin_run(&mut self, first: usize, pages: u64) {
        self.run_pages[first] = pages;
        self.run_acknowledged[first] = 0;
        self.awaited_runs |= 1 << first;
    }

    fn posted(&mut self, first: usize) {
        self.run_outstanding[first] += 1;
        self.outstanding += 1;
    }

    fn id(&self, place: usize, first: usize) -> u64 {
        self.number << 16 | (place as u64) << 8 | first as u64
    }

    /// The places of these pages are worth nothing: they are written to others, if anybody wants them.
    fn write_anew(&mut self, slabs: &SlabSet, pages: u64) {
        for index in bits(pages) {
            slabs.release(self.locations[index].take().expect("it has a location"));
        }
        if !self.is_abandoned {
            self.unposted |= pages;
        }
    }
}

/// The numbers of the bits that are set.
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        mask &= mask - 1;
        Some(bit)
    })
}

/// What is to be known of the ways to copies before anything is posted to them.
enum PostReadiness {
    Open,
    Full,
    /// A node is lost: there are other copies than there were.
    NodeGone,
}

/// A batch that all memory nodes have acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrittenBatch {
    /// Whose batch.
    pub owner: u64,
    /// The block that it lies in.
    pub block: BlockId,
    /// Pages of the batch.
    pub count: usize,
    /// Where each page is now; `None` for those that needed no place.
    pub locations: [Option<Location>; BLOCK_PAGES],
}

/// What was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SenderStats {
    /// WRITEs posted.
    pub writes: u64,
    /// Pages written, each copy counted.
    pub pages: u64,
    /// Pages found to be all zeros.
    pub zero_pages: u64,
    /// Pages found to be what they were when they came from memory nodes: they are not written again.
    pub unchanged_pages: u64,
    /// Slabs that hold pages and have fewer copies than they should have, now.
    pub degraded_slabs: u64,
    /// Slabs of which a missing copy was made.
    pub copied_slabs: u64,
    /// Damaged pages that were written anew from a good copy.
    pub repaired_pages: u64,
    /// Sparse slabs whose pages were moved to others.
    pub vacated_slabs: u64,
}

/// The sender of one run. One thread uses it.
#[derive(Debug)]
pub struct Sender {
    slabs: Arc<SlabSet>,
    ports: Ports,
    pool: PoolClient,
    filler: Filler,
    batches: Vec<BatchWrite>,
    next_batch_number: u64,
    completions: Vec<Completion>,
    lost: Vec<NodeId>,
    /// Nodes that were given up while something was under way to them: until that has ended no audit takes what was there for forgotten.
    late_nodes: Vec<(NodeId, UnderWay)>,
    healer: Healer,
    repacker: Repacker,
    digester: Digester,
    digests: Digests,
    is_pool_short: Arc<AtomicBool>,
    /// Bytes of the pool that the run had when its free memory was last looked at.
    bytes_seen: u64,
    stats: SenderStats,
}

impl Sender {
    /// A sender that writes from the mempool to slabs that it takes from `pool`.
    #[must_use]
    pub fn new(
        slabs: Arc<SlabSet>,
        mempool: &Mempool,
        connector: Arc<dyn Connector>,
        mut pool: PoolClient,
        seed: u64,
    ) -> Self {
        pool.enter(&slabs);
        let mut filler = Filler::new(Arc::clone(&slabs), seed);
        connect_slab_nodes(&filler, &mut pool, &*connector);
        let nodes = filler.adopt_recovered(&mut pool);
        Self {
            filler,
            slabs,
            ports: Ports::new(connector, Arc::clone(mempool.memory())),
            pool,
            batches: Vec::with_capacity(BATCHES_MAX),
            next_batch_number: 0,
            completions: Vec::with_capacity(BLOCK_PAGES),
            lost: Vec::new(),
            late_nodes: Vec::new(),
            healer: Healer::new(nodes),
            repacker: Repacker::default(),
            digester: Digester::new(),
            digests: Digests::default(),
            is_pool_short: Arc::clone(mempool.pool_short_flag()),
            bytes_seen: 0,
            stats: SenderStats::default(),
        }
    }

    /// How large slabs are from now on; to be said before there are any.
    pub fn set_slab_sizing(&mut self, grain: SlabSizing) {
        self.filler.set_slab_sizing(grain);
    }

    /// What was written so far.
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        let holds_pages = |slab: &SlabId| self.slabs.live_pages(*slab) > 0;
        let degraded = self.filler.degraded().filter(holds_pages).count();
        SenderStats { degraded_slabs: degraded as u64, ..self.stats }
    }

    /// The pool that slabs are taken from.
    pub fn pool(&mut self) -> &mut PoolClient {
        &mut self.pool
    }

    /// Whether another batch can be staged.
    #[must_use]
    pub fn has_capacity(&self) -> bool {
        self.batches.len() < BATCHES_MAX
    }

    /// Whether nothing awaits acknowledgement.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.batches.is_empty() && !self.healer.is_waiting()
    }

    /// Look at a batch that now lies in its block: which pages are zero, which need writing (and are from now on, until
    /// [`WrittenBatch`] names them). `readable(i)` says whether page `i` could be copied.
    pub fn stage(
        &mut self,
        owner: u64,
        block: BlockId,
        count: usize,
        readable: impl Fn(usize) -> bool,
        found: &mut Vec<StageOutcome>,
    ) {
        self.stage_pages(owner, block, count, readable, None, found);
    }

    /// As [`Self::stage`], for pages that may come back and leave again: page `i` came from `copies[i]`, if there is one, to which the caller
    /// refers. What is [`StageOutcome::Unchanged`] the sender refers to from now on.
    pub fn stage_with_clean_copies(
        &mut self,
        owner: u64,
        block: BlockId,
        count: usize,
        readable: impl Fn(usize) -> bool,
        copies: &[Option<Location>],
        found: &mut Vec<StageOutcome>,
    ) {
        self.stage_pages(owner, block, count, readable, Some(copies), found);
    }

    fn stage_pages(
        &mut self,
        owner: u64,
        block: BlockId,
        count: usize,
        readable: impl Fn(usize) -> bool,
        copies: Option<&[Option<Location>]>,
        found: &mut Vec<StageOutcome>,
    ) {
        assert!(count <= BLOCK_PAGES && self.has_capacity());
        let mut batch = BatchWrite {
            number: self.next_batch_number,
            owner,
            block,
            count,
            crcs: [0; BLOCK_PAGES],
            digests: [0; BLOCK_PAGES],
            locations: [None; BLOCK_PAGES],
            is_abandoned: false,
            unposted: 0,
            unchanged: 0,
            outstanding: 0,
            run_pages: [0; BLOCK_PAGES],
            run_outstanding: [0; BLOCK_PAGES],
            run_acknowledged: [0; BLOCK_PAGES],
            failed_runs: 0,
            awaited_runs: 0,
        };
        self.next_batch_number += 1;
        found.clear();
        for index in 0..count {
            let what = if readable(index) {
                let bytes = view::page(self.ports.memory(MEMPOOL), block.slot(index).offset());
                if is_zero(bytes) {
                    self.stats.zero_pages += 1;
                    StageOutcome::Zeros
                } else {
                    batch.crcs[index] = page_crc(bytes);
                    if copies.is_some() {
                        batch.digests[index] = self.digester.digest(bytes);
                    }
                    let copy = copies.and_then(|copies| copies.get(index).copied().flatten());
                    batch.locations[index] = copy.filter(|copy| self.is_at(*copy, batch.digests[index]));
                    if batch.locations[index].is_some() {
                        self.stats.unchanged_pages += 1;
                        batch.unchanged |= 1 << index;
                        StageOutcome::Unchanged
                    } else {
                        batch.unposted |= 1 << index;
                        StageOutcome::Data
                    }
                }
            } else {
                StageOutcome::Unreadable
            };
            found.push(what);
        }
        self.batches.push(batch);
    }

    /// Post what is unposted, collect what is acknowledged, return empty slabs, choose sparse ones to be emptied. Never waits.
    ///
    /// # Errors
    /// If there is no room on any memory node: the batches stay staged and are tried again at the next call.
    pub fn advance(&mut self, done: &mut Vec<WrittenBatch>) -> Result<(), NoRoom> {
        if self.slabs.has_emptied_slabs() {
            self.filler.collect_emptied(&mut self.pool);
        }
        self.collect();
        self.confirm_all();
        let result = self.post_all();
        self.ports.open_ports().for_each(|(_, port)| port.flush());
        self.update_pool_shortage(result.is_err());
        self.collect();
        self.heal(result.is_err());
        self.repack(result.is_err());
        let (early, first) = (Mutation::AcknowledgeEarly.is_active(), Mutation::AcknowledgeFirst.is_active());
        self.batches.retain(|batch| {
            let is_acknowledged = batch.outstanding == 0 || early || first && batch.awaited_runs == 0;
            let finished = batch.unposted | batch.unchanged == 0 && is_acknowledged;
            if finished {
                let BatchWrite { owner, block, count, locations, .. } = *batch;
                done.push(WrittenBatch { owner, block, count, locations });
            }
            !finished
        });
        result
    }

    /// A program has ended: what of its pages is not posted yet need not be. Its batches are still reported as written.
    pub fn abandon(&mut self, owner: u64) {
        for batch in self.batches.iter_mut().filter(|batch| batch.owner == owner) {
            batch.is_abandoned = true;
            batch.unposted = 0;
            batch.unchanged = 0;
        }
    }

    /// What to poll for when all batches wait for acknowledgements; `None` if a node answers at once.
    pub fn poll_fds(&mut self) -> Option<Vec<PollFd<'_>>> {
        let busy = self.ports.open_ports().filter(|(_, port)| port.in_flight > 0);
        busy.map(|(_, port)| port.endpoint.poll_fd()).collect()
    }

    /// Whether a memory node is in use.
    #[must_use]
    pub fn uses_node(&self, node: NodeId) -> bool {
        self.pool.nodes().any(|other| other == node)
    }

    /// A memory node has come, or has come back: write to it from now on. Not yet, if something is under way to what it was before; the
    /// endpoint is dropped then.
    ///
    /// What was on it before is not touched; an audit gives it back.
    ///
    /// # Errors
    /// If it is not a memory node, or there are too many.
    pub fn add_node(&mut self, node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError> {
        let is_busy = self.ports.open_port(node).is_some_and(|port| port.in_flight > 0);
        let is_busy = (is_busy || self.is_healing()) && !Mutation::AddBusyNode.is_active();
        if is_busy || self.uses_node(node) {
            return Ok(());
        }
        self.ports.close(node);
        self.pool.add_node(node, endpoint)?;
        tracing::info!(node = node.0, "a memory node is taken in");
        self.healer.node_added(node);
        Ok(())
    }

    /// The run has ended: all slabs go back. Nothing may be under way: see [`Self::stop_healing`], [`Self::is_idle`].
    pub fn close(&mut self) {
        self.batches.clear();
        self.end_healing();
        self.filler.close(&mut self.pool);
    }

    fn post_all(&mut self) -> Result<(), NoRoom> {
        for at in 0..self.batches.len() {
            while self.batches[at].unposted != 0 {
                let first = self.batches[at].unposted.trailing_zeros();
                let want = (self.batches[at].unposted >> first).trailing_ones();
                let room = self.filler.find_free_pages(&mut self.pool, want);
                let gone = self.filler.drain_gone_nodes();
                if !gone.is_empty() {
                    // The room may be on one of them.
                    gone.into_iter().for_each(|node| self.drop_node(node));
                    continue;
                }
                if !self.post(at, first as usize, room?) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Post a run to every copy of its slab; false if a node's queue is full.
    fn post(&mut self, at: usize, first: usize, room: FreePages) -> bool {
        let copies = self.slabs.replicas(room.first.slab());
        assert!(!copies.is_empty(), "room is on some node");
        match self.post_readiness(copies) {
            PostReadiness::Open => {}
            PostReadiness::Full => return false,
            PostReadiness::NodeGone => return true,
        }
        let batch = &mut self.batches[at];
        let pages = room.pages as usize;
        let mask = (u64::MAX >> (BLOCK_PAGES - pages)) << first;
        for (place, copy) in copies.placed() {
            let port = self.ports.open_port(copy.node).expect("it was opened just now");
            let local = port.slice(batch.block.slot(first).offset(), pages * PAGE_BYTES);
            let remote = page_of(&copy, room.first.index());
            let id = batch.id(place, first);
            let work = Work { id, verb: Verb::Write { local, remote }, signalled: true };
            port.queue(work);
            batch.posted(first);
            self.stats.writes += 1;
            self.stats.pages += pages as u64;
        }
        for offset in 0..room.pages {
            let index = first + offset as usize;
            let location = Location(room.first.0 + offset);
            self.slabs.occupy(location, batch.crcs[index]);
            self.digests.set(location, batch.digests[index]);
            batch.locations[index] = Some(location);
        }
        batch.unposted &= !mask;
        batch.begin_run(first, mask);
        true
    }

    /// While the pool has little memory left, nobody here is to keep copies there of what is resident.
    fn update_pool_shortage(&mut self, is_full: bool) {
        let bytes = self.slabs.bytes().0;
        if is_full {
            self.is_pool_short.store(true, Relaxed);
            self.bytes_seen = bytes;
        } else if bytes != self.bytes_seen {
            self.bytes_seen = bytes;
            let sum = |of: fn(&PoolClient, NodeId) -> u64| -> u64 {
                self.pool.nodes().map(|node| of(&self.pool, node)).sum()
            };
            let is_short = sum(PoolClient::free_bytes) < sum(PoolClient::total_bytes) / FREE_DIVISOR;
            self.is_pool_short.store(is_short, Relaxed);
        }
    }

    /// Whether one more message can be posted to each copy. A node that cannot be reached is lost by that.
    fn post_readiness(&mut self, copies: SlabReplicas) -> PostReadiness {
        for copy in copies.iter() {
            match self.ports.port(copy.node) {
                Ok(port) if port.has_capacity() => {}
                Ok(_) => return PostReadiness::Full,
                Err(error) => {
                    tracing::warn!(node = copy.node.0, %error, "a memory node cannot be reached any more");
                    self.drop_node(copy.node);
                    return PostReadiness::NodeGone;
                }
            }
        }
        PostReadiness::Open
    }

    fn collect(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        for (node, port) in self.ports.open_ports() {
            completions.clear();
            while port.in_flight > completions.len() && port.endpoint.poll(&mut completions, BLOCK_PAGES) > 0
            {
            }
            port.in_flight -= completions.len();
            for completion in &completions {
                let is_done = if completion.id >= HEAL_WORK_ID {
                    self.healer.apply_completion(
                        &self.slabs,
                        node,
                        self.filler.any_replica_on(node),
                        completion,
                    )
                } else {
                    Self::apply_completion(&mut self.batches, completion)
                };
                if !is_done && !self.lost.contains(&node) {
                    self.lost.push(node);
                }
            }
        }
        self.completions = completions;
        let ports = &mut self.ports;
        self.late_nodes.retain(|(node, _)| ports.open_port(*node).is_some_and(|port| port.in_flight > 0));
        for node in std::mem::take(&mut self.lost) {
            self.drop_node(node);
        }
        self.retry_failed_runs();
    }

    /// Book one completion; false if its write failed.
    fn apply_completion(batches: &mut [BatchWrite], completion: &Completion) -> bool {
        let number = completion.id >> 16;
        let place = completion.id >> 8 & 0xff;
        let first = usize::try_from(completion.id & 0xff).expect("8 bits");
        let is_done = completion.outcome.is_ok();
        let Some(batch) = batches.iter_mut().find(|batch| batch.number == number) else {
            return is_done;
        };
        batch.outstanding -= 1;
        batch.run_outstanding[first] -= 1;
        if is_done {
            batch.run_acknowledged[first] |= 1 << place;
            batch.awaited_runs &= !(1 << first);
        } else {
            batch.failed_runs |= 1 << first;
        }
        is_done
    }

    /// A run that failed somewhere, and of which no copy is left that has acknowledged it, is written anew.
    fn retry_failed_runs(&mut self) {
        for batch in &mut self.batches {
            for first in bits(batch.failed_runs) {
                if batch.run_outstanding[first] > 0 {
                    continue;
                }
                batch.failed_runs &= !(1 << first);
                batch.awaited_runs &= !(1 << first);
                let slab = batch.locations[first].expect("it was posted to a location").slab();
                let acknowledged = batch.run_acknowledged[first];
                if self.slabs.replicas(slab).placed().any(|(place, _)| acknowledged & 1 << place != 0) {
                    continue;
                }
                batch.write_anew(&self.slabs, batch.run_pages[first]);
            }
        }
    }

    /// Whether WRITEs to a slab are under way.
    fn is_writing(&self, slab: SlabId) -> bool {
        self.batches.iter().any(|batch| {
            (0..batch.count).any(|first| {
                batch.run_outstanding[first] > 0
                    && batch.locations[first].is_some_and(|location| location.slab() == slab)
            })
        })
    }

    fn drop_node(&mut self, node: NodeId) {
        if self.ports.open_port(node).is_some_and(|port| port.in_flight > 0) {
            // A device may send it again, and over RDMA a key that was struck out still opens what an endpoint has in use.
            self.late_nodes.push((node, self.pool.under_way()));
        }
        // The port stays: what it still has under way comes back as failed.
        let was_whole = self.filler.degraded_count() == 0;
        self.filler.forget_node(node);
        for slab in self.filler.drain_unreachable() {
            self.digests.forget(slab);
        }
        if self.pool.remove_node(node).is_some() {
            tracing::warn!(
                node = node.0,
                "a memory node is lost; its pages are written elsewhere from now on"
            );
        }
        let missing = self.filler.degraded_count();
        if was_whole && missing > 0 {
            tracing::warn!(slabs = missing, "slabs have fewer copies than they should have; making new ones");
        }
        self.slabs.set_slow(node, false);
        self.healer.search_soon();
    }
}
