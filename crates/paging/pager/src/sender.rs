//! The sender of a run: writes evicted pages to all replicas of their slabs, and maintains
//! replicas.
//!
//! The front end copies a batch into its block of the mempool. [`Sender::stage`] examines the
//! pages, and [`Sender::advance`] posts WRITEs and collects acknowledgements without waiting.
//! Several batches are in flight at once, and adjacent pages are written by one WRITE. A page is
//! written to another slab if a replica of its slab does not acknowledge it.
//!
//! - `collect` applies what has completed.
//! - `confirm` checks that the clean copies of unchanged pages still exist.
//! - `heal` makes missing replicas and repairs damaged pages.
//! - `migrate` moves replicas off memory that nodes recall.
//! - `suspend` avoids waiting for nodes that are away.
//! - `repack` chooses sparse slabs to be vacated.

mod batch;
mod collect;
mod confirm;
mod copy_task;
mod heal;
mod migrate;
mod repack;
mod suspend;

pub use migrate::RecalledBytes;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use aquifer_fabric::{Completion, Endpoint, EndpointError, PollFd, Verb, Work};
use aquifer_pool::{NodeClass, NodeId, OperationGuard, PoolClient, PoolError};

use crate::allowance::Allowance;
use crate::digest::{Digest, Digester, Digests};
use crate::filler::{Filler, FreePages, NoRoom, node_class};
use crate::integrity::{is_zero, page_crc};
use crate::mempool::{BLOCK_PAGES, BlockId, Mempool, MempoolUser};
use crate::move_rate::MoveRate;
use crate::mutation::Mutation;
use crate::node_joiner::connect_slab_nodes;
use crate::page::{Location, PAGE_BYTES};
use crate::ports::{Connector, Ports};
use crate::slabs::{SlabId, SlabReplicas, SlabSet, page_of};
use crate::view;
use crate::volume::StageOutcome;
use batch::{BatchWrite, GroupKind, bits};
use heal::Healer;
use repack::Repacker;

/// Maximum number of batches in flight.
pub const BATCHES_MAX: usize = 64;

/// Work ids from this one on belong to the healer.
const HEAL_WORK_ID: u64 = 1 << 62;
/// The pool is short of memory if less than 1/`FREE_DIVISOR` of it is free.
const FREE_DIVISOR: u64 = 4;
/// The time for which the healer begins no task because a node is to be added.
const HEALER_PAUSE: Duration = Duration::from_secs(2);
/// The number of the mempool among the local memories of the ports.
const MEMPOOL: usize = 0;

/// Whether operations can be posted to all replicas of a slab.
enum PostReadiness {
    Open,
    Full,
    /// A node could not be reached and was dropped, so the set of the slab's replicas has changed.
    NodeGone,
}

/// A batch that is acknowledged by the memory nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrittenBatch {
    /// The owner that was passed to [`Sender::stage`].
    pub owner: u64,
    /// The block in which the batch is.
    pub block: BlockId,
    /// The number of pages of the batch.
    pub count: usize,
    /// The location of each page; `None` for a page that was not written.
    pub locations: [Option<Location>; BLOCK_PAGES],
}

/// Counters of a sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SenderStats {
    /// WRITEs posted.
    pub writes: u64,
    /// Pages written, counted once per replica.
    pub pages: u64,
    /// Pages that were all zeros.
    pub zero_pages: u64,
    /// Pages that were unchanged, and so not written.
    pub unchanged_pages: u64,
    /// Slabs that hold pages and have fewer replicas than requested at present, on nodes that are
    /// not suspended.
    pub degraded_slabs: u64,
    /// Slabs of which a missing replica was made.
    pub copied_slabs: u64,
    /// Damaged pages that were written again from a good replica.
    pub repaired_pages: u64,
    /// Sparse slabs that were vacated.
    pub vacated_slabs: u64,
    /// Slabs of which a replica was moved because its node recalls the memory.
    pub moved_slabs: u64,
    /// Bytes that were copied to move replicas.
    pub moved_bytes: u64,
    /// Bytes of replicas that nodes recall at present.
    pub recalled_bytes: u64,
    /// Bytes of disk nodes that the run's slabs occupy.
    pub backup_bytes: u64,
    /// Slabs that are on a disk because memory nodes had no room for their replicas.
    pub displaced_slabs: u64,
    /// Slabs that were on a disk so far because memory nodes had no room.
    pub displaced_slabs_total: u64,
    /// Slabs of which a replica in memory has replaced the backup.
    pub returned_slabs: u64,
    /// Operations that failed because of the disk of a node.
    pub disk_errors: u64,
    /// Number of times that the operations of a node were abandoned because it did not answer.
    pub node_timeouts: u64,
    /// Pages that were written again because a replica had not acknowledged them.
    pub rewritten_pages: u64,
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
    /// Nodes on which an operation failed, to be dropped.
    lost: Vec<NodeId>,
    /// Nodes that were found to be away, to be suspended.
    away: Vec<NodeId>,
    /// Nodes whose disk could not be written, with the time at which that is tried again.
    unwritable: Vec<(NodeId, Duration)>,
    /// Nodes that have answered a probe.
    answering: Vec<NodeId>,
    /// The time of the last check for unanswered operations.
    unanswered_checked_at: Duration,
    answer_waits: suspend::AnswerWaits,
    /// The number of slabs that hold pages and have a replica on a suspended node, and no replica
    /// missing, as counted last.
    suspended_slabs: usize,
    /// Nodes that were dropped while operations to them were in flight. A leak scan must not free
    /// extents of such a node before the operations have ended.
    draining_nodes: Vec<(NodeId, OperationGuard)>,
    healer: Healer,
    repacker: Repacker,
    digester: Digester,
    digests: Digests,
    is_pool_short: Arc<AtomicBool>,
    move_rate: Arc<MoveRate>,
    /// The run's memory that nodes recall.
    recalled: Vec<RecalledBytes>,
    /// Bytes of the pool that the run had when the pool's free memory was last checked.
    bytes_at_check: u64,
    stats: SenderStats,
}

impl Sender {
    /// A sender that writes from the mempool to slabs of `pool`. Adopts recovered slabs; `seed`
    /// distributes runs over the nodes.
    #[must_use]
    pub fn new(
        slabs: Arc<SlabSet>,
        mempool: &Mempool,
        connector: Arc<dyn Connector>,
        mut pool: PoolClient,
        seed: u64,
    ) -> Self {
        pool.register_ledger(&slabs);
        if slabs.may_have_several_copies() {
            pool.set_answer_timeout(suspend::answer_timeout(&connector));
        }
        let mut filler = Filler::new(Arc::clone(&slabs), seed);
        connect_slab_nodes(&filler, &mut pool, &*connector);
        let nodes = filler.adopt_recovered(&mut pool);
        let mut sender = Self {
            filler,
            slabs,
            ports: Ports::new(connector, Arc::clone(mempool.memory())),
            pool,
            batches: Vec::with_capacity(BATCHES_MAX),
            next_batch_number: 0,
            completions: Vec::with_capacity(BLOCK_PAGES),
            lost: Vec::new(),
            away: Vec::new(),
            unwritable: Vec::new(),
            answering: Vec::new(),
            unanswered_checked_at: Duration::ZERO,
            answer_waits: suspend::AnswerWaits::default(),
            suspended_slabs: 0,
            draining_nodes: Vec::new(),
            healer: Healer::new(nodes),
            repacker: Repacker::default(),
            digester: Digester::new(),
            digests: Digests::default(),
            is_pool_short: Arc::clone(mempool.pool_short_flag()),
            move_rate: Arc::default(),
            recalled: Vec::new(),
            bytes_at_check: 0,
            stats: SenderStats::default(),
        };
        let nodes: Vec<NodeId> = sender.pool.nodes().collect();
        nodes.into_iter().for_each(|node| sender.open_port_early(node));
        sender
    }

    /// Sets the user whose programs keep no clean copies while this sender finds the pool short.
    pub fn set_mempool_user(&mut self, user: &MempoolUser) {
        self.is_pool_short = Arc::clone(user.pool_short_flag());
    }

    /// Sets the memory that may be allocated from now on.
    pub fn set_allowance(&mut self, allowance: Allowance) {
        self.filler.set_allowance(allowance);
    }

    /// Free and lent bytes of all nodes of a class, as far as this sender knows.
    #[must_use]
    pub fn pool_bytes(&self, class: NodeClass) -> (u64, u64) {
        let nodes = || self.pool.nodes().filter(|node| node_class(&self.pool, *node) == class);
        let sum = |of: fn(&PoolClient, NodeId) -> u64| nodes().map(|node| of(&self.pool, node)).sum();
        (sum(PoolClient::free_bytes), sum(PoolClient::total_bytes))
    }

    /// Reads the free memory of all nodes that are not away.
    pub fn refresh_pool_bytes(&mut self) {
        let nodes: Vec<NodeId> = self.pool.nodes().collect();
        for node in nodes {
            if let Err(error) = self.pool.refresh(node) {
                tracing::debug!(node = node.0, %error, "reading the free memory of a memory node failed");
            }
        }
    }

    /// The counters so far.
    #[must_use]
    pub fn stats(&self) -> SenderStats {
        let degraded_slabs = self.filler.degraded_with_pages() + self.suspended_slabs;
        SenderStats {
            degraded_slabs: degraded_slabs as u64,
            backup_bytes: self.slabs.backup_bytes(),
            displaced_slabs: self.filler.displaced_count() as u64,
            displaced_slabs_total: self.filler.displaced_total(),
            ..self.stats
        }
    }

    /// The client of the pool from which slabs are allocated.
    pub fn pool(&mut self) -> &mut PoolClient {
        &mut self.pool
    }

    /// Whether another batch can be staged.
    #[must_use]
    pub fn has_capacity(&self) -> bool {
        self.batches.len() < BATCHES_MAX
    }

    /// Whether no batch and no copying is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.batches.is_empty() && !self.healer.is_waiting()
    }

    /// Stages a batch that is in its block: determines which pages are zero, and begins to write
    /// the others.
    ///
    /// `readable(i)` is whether page `i` could be copied into the block. `found` receives an
    /// outcome for each page. The batch is in flight until [`Self::advance`] returns its
    /// [`WrittenBatch`].
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

    /// Stages a batch as [`Self::stage`] does. `copies[i]` is the clean copy of page `i`, if it has
    /// one.
    ///
    /// The caller holds a reference to each clean copy. For a page that is
    /// [`StageOutcome::Unchanged`] the reference passes to the sender.
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
        let mut batch = BatchWrite::new(self.next_batch_number, owner, block, count);
        self.next_batch_number += 1;
        found.clear();
        for index in 0..count {
            let outcome = if readable(index) {
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
            found.push(outcome);
        }
        self.batches.push(batch);
    }

    /// Does all work of the sender that is possible now, and never blocks: applies completions,
    /// posts READs and WRITEs, drops the nodes of failed operations, frees emptied slabs, and
    /// advances healing and repacking by one step. Must be called repeatedly.
    ///
    /// Appends the batches that are finished to `done`: all their pages are acknowledged, or they
    /// are abandoned and have no operation in flight.
    ///
    /// # Errors
    /// If no node has free memory. All of the above is done nevertheless. The pages without a
    /// location stay staged, and the next call retries.
    pub fn advance(&mut self, done: &mut Vec<WrittenBatch>) -> Result<(), NoRoom> {
        if self.slabs.has_emptied_slabs() {
            self.filler.collect_emptied(&mut self.pool);
        }
        self.collect();
        self.abandon_unanswered();
        self.confirm_all();
        let result = self.post_all();
        self.ports.open_ports().for_each(|(_, port)| port.flush());
        self.update_pool_shortage(result.is_err());
        self.collect();
        self.heal(result.is_err());
        self.repack(result.is_err());
        let (early, first) = (Mutation::AcknowledgeEarly.is_active(), Mutation::AcknowledgeFirst.is_active());
        self.batches.retain(|batch| {
            let is_acknowledged = batch.outstanding == 0 || early || first && batch.awaited_groups == 0;
            let finished = batch.unposted | batch.unchanged == 0 && is_acknowledged;
            if finished {
                let BatchWrite { owner, block, count, locations, .. } = *batch;
                done.push(WrittenBatch { owner, block, count, locations });
            }
            !finished
        });
        result
    }

    /// Abandons the pages of a program that has exited if they are not posted yet. Its batches are
    /// still reported as written.
    pub fn abandon(&mut self, owner: u64) {
        for batch in self.batches.iter_mut().filter(|batch| batch.owner == owner) {
            batch.is_abandoned = true;
            batch.unposted = 0;
            batch.unchanged = 0;
        }
    }

    /// The descriptors to poll while all batches wait for acknowledgements, or `None` if a fabric
    /// completes without a descriptor.
    pub fn poll_fds(&mut self) -> Option<Vec<PollFd<'_>>> {
        let busy = self.ports.open_ports().filter(|(_, port)| port.in_flight > 0);
        busy.map(|(_, port)| port.endpoint.poll_fd()).collect()
    }

    /// Whether the sender uses a memory node.
    #[must_use]
    pub fn uses_node(&self, node: NodeId) -> bool {
        self.pool.nodes().any(|other| other == node)
    }

    /// Adds a memory node that is new or has returned.
    ///
    /// Drops the endpoint instead if operations to the node's predecessor are in flight; the caller
    /// may try again. Extents that the run had on the predecessor are not touched: a leak scan
    /// frees them.
    ///
    /// # Errors
    /// If `node` is not a memory node, or there are too many.
    pub fn add_node(&mut self, node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError> {
        if self.is_healing() {
            // Otherwise a sender that moves slab after slab would never add a node.
            self.healer.pause_until(self.ports.now() + HEALER_PAUSE);
        }
        let is_busy = self.ports.open_port(node).is_some_and(|port| port.in_flight > 0);
        let is_busy = (is_busy || self.is_healing()) && !Mutation::AddBusyNode.is_active();
        if is_busy || self.uses_node(node) {
            return Ok(());
        }
        self.ports.close(node);
        let added = self.pool.add_node(node, endpoint);
        self.healer.pause_until(Duration::ZERO);
        added?;
        tracing::info!(node = node.0, "memory node added");
        self.open_port_early(node);
        self.healer.node_added(node);
        Ok(())
    }

    /// Frees all slabs, because the run has ended. No operation may be in flight: the caller must
    /// call [`Self::stop_healing`], and then [`Self::advance`] until [`Self::is_idle`].
    pub fn close(&mut self) {
        self.batches.clear();
        self.end_healing();
        self.filler.close(&mut self.pool);
    }

    /// Posts the unposted pages of all batches, as far as the queues of the nodes have room.
    fn post_all(&mut self) -> Result<(), NoRoom> {
        for at in 0..self.batches.len() {
            while self.batches[at].unposted != 0 {
                let first = self.batches[at].unposted.trailing_zeros();
                let want = (self.batches[at].unposted >> first).trailing_ones();
                let free_pages = self.filler.find_free_pages(&mut self.pool, want);
                let gone = self.filler.drain_gone_nodes();
                if !gone.is_empty() {
                    // The free pages may be on one of these nodes.
                    gone.into_iter().for_each(|node| self.drop_node(node));
                    continue;
                }
                if !self.post(at, first as usize, free_pages?) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Posts a page group to every replica of its slab. Returns false if the queue of a node is
    /// full.
    fn post(&mut self, at: usize, first: usize, free: FreePages) -> bool {
        let replicas = self.slabs.replicas(free.first.slab());
        assert!(!replicas.is_empty(), "free pages are on a node");
        match self.post_readiness(replicas) {
            PostReadiness::Open => {}
            PostReadiness::Full => return false,
            PostReadiness::NodeGone => return true,
        }
        self.slabs.touch(free.first.slab());
        let batch = &mut self.batches[at];
        let pages = free.pages as usize;
        let mask = (u64::MAX >> (BLOCK_PAGES - pages)) << first;
        for (place, replica) in replicas.placed() {
            let port = self.ports.open_port(replica.node).expect("its readiness was checked");
            let local = port.slice(batch.block.slot(first).offset(), pages * PAGE_BYTES);
            let remote = page_of(&replica, free.first.index());
            let id = batch.id(place, first);
            let work = Work { id, verb: Verb::Write { local, remote }, signalled: true };
            port.queue(work);
            batch.posted(first);
            self.stats.writes += 1;
            self.stats.pages += pages as u64;
        }
        for offset in 0..free.pages {
            let index = first + offset as usize;
            let location = Location(free.first.0 + offset);
            self.slabs.occupy(location, batch.crcs[index]);
            self.digests.set(location, batch.digests[index]);
            batch.locations[index] = Some(location);
        }
        batch.unposted &= !mask;
        batch.begin_group(first, mask, GroupKind::Write);
        true
    }

    /// Sets whether the pool is short of memory, which decides whether programs keep clean copies.
    fn update_pool_shortage(&mut self, is_full: bool) {
        let bytes = self.slabs.bytes().0;
        if is_full {
            self.is_pool_short.store(true, Relaxed);
            self.bytes_at_check = bytes;
        } else if bytes != self.bytes_at_check {
            self.bytes_at_check = bytes;
            let (free_bytes, lent_bytes) = self.pool_bytes(NodeClass::Memory);
            let is_short = free_bytes < lent_bytes / FREE_DIVISOR;
            self.is_pool_short.store(is_short, Relaxed);
        }
    }

    /// Whether one more operation can be posted to each replica. A node that cannot be reached is
    /// dropped.
    fn post_readiness(&mut self, replicas: SlabReplicas) -> PostReadiness {
        for replica in replicas.iter() {
            match self.ports.port(replica.node) {
                Ok(port) if port.has_capacity() => {}
                Ok(_) => return PostReadiness::Full,
                Err(error) => {
                    self.drop_unreachable(replica.node, &error);
                    return PostReadiness::NodeGone;
                }
            }
        }
        PostReadiness::Open
    }

    /// Whether WRITEs to a slab are in flight.
    fn is_writing(&self, slab: SlabId) -> bool {
        self.batches.iter().any(|batch| {
            (0..batch.count).any(|first| {
                batch.group_outstanding[first] > 0
                    && batch.locations[first].is_some_and(|location| location.slab() == slab)
            })
        })
    }

    fn drop_unreachable(&mut self, node: NodeId, error: &EndpointError) {
        tracing::warn!(node = node.0, %error, "cannot connect to memory node; dropping it");
        self.drop_node(node);
    }

    /// Drops a node: no page is read from or written to it any more.
    fn drop_node(&mut self, node: NodeId) {
        if self.ports.open_port(node).is_some_and(|port| port.in_flight > 0) {
            // A device may repeat the operation, and with RDMA a revoked key still opens memory
            // that an endpoint is using.
            self.draining_nodes.push((node, self.pool.begin_operation()));
        }
        // The port stays open, so that its operations complete as failed.
        let had_all_replicas = self.filler.degraded_count() == 0;
        self.filler.forget_node(node);
        for slab in self.filler.drain_unreachable() {
            self.digests.forget(slab);
        }
        if self.pool.remove_node(node).is_some() {
            tracing::warn!(node = node.0, "memory node lost; writing to other nodes");
        }
        let degraded = self.filler.degraded_count();
        if had_all_replicas && degraded > 0 {
            tracing::warn!(slabs = degraded, "slabs are degraded; making new replicas");
        }
        self.slabs.set_slow(node, false);
        self.healer.search_soon();
        self.count_suspended_slabs();
    }
}
