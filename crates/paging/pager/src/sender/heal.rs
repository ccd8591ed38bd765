//! The healer: makes missing replicas of slabs, moves replicas, repairs damaged pages from a good
//! replica, and probes nodes.
//!
//! The healer handles one slab at a time with one message in flight, and only when no batch waits
//! to be posted. A slab that is being copied is not filled, and copying begins when none of its
//! WRITEs is in flight. So the healer reads the written bytes. Pages that are released meanwhile
//! are copied needlessly, which is harmless. A new replica is marked complete when it has all
//! pages, and is read and written only then.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Completion, EndpointError, Memory, RemoteAddr, Verb, Work, WorkError};
use aquifer_pool::{Extent, NodeId, PoolClient};

use super::copy_task::{CHUNK_PAGES, CopyKind, CopyStep, CopyTask};
use super::{HEAL_WORK_ID, Sender};
use crate::filler::{Filler, RecordedReplica, free_extents, free_recorded, node_class};
use crate::integrity::page_crc;
use crate::mempool::BLOCK_PAGES;
use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::slabs::{SlabId, SlabSet, page_of};
use crate::view;

/// The offset in the buffer to which probes read, behind the pages.
pub(super) const PROBE_OFFSET: usize = BLOCK_PAGES * PAGE_BYTES;
pub(super) const PROBE_BYTES: usize = 8;
/// The work id of probes. The ids of copying are smaller.
const PROBE_WORK_ID: u64 = HEAL_WORK_ID | 1 << 61;

/// Why the healer has no buffer.
#[derive(Debug, thiserror::Error)]
enum BufferError {
    #[error("no memory: {0}")]
    System(#[from] std::io::Error),
    #[error("an endpoint refuses it: {0}")]
    Register(#[from] EndpointError),
}

/// The state of the healer.
#[derive(Debug, Default)]
pub(super) struct Healer {
    task: Option<CopyTask>,
    /// The number of the buffer among the local memories of the ports. It is created at first use.
    buffer: Option<usize>,
    /// Whether to search for a task at the next call of [`Sender::heal`].
    should_search: bool,
    is_stopped: bool,
    /// Number of consecutive searches that found no memory for a replica. Each search tries another
    /// slab.
    failed_searches: usize,
    /// Nodes of recovered slabs to which no operation was posted since the restart.
    unconfirmed: Vec<NodeId>,
    /// Nodes whose last probe has not completed, with the replica that the probe reads; `None` if
    /// it reads the header of the node.
    probed: Vec<(NodeId, Option<Extent>)>,
    /// Slabs with a replica that is to be moved, the next one last.
    recalled: Vec<SlabId>,
    /// Slabs that could not be copied because the disk of a node could not return all pages. They
    /// are tried again after all others.
    pub(super) unreadable: HashSet<SlabId>,
    /// The time before which no task begins.
    paused_until: Duration,
}

impl Healer {
    pub(super) fn new(unconfirmed: Vec<NodeId>) -> Self {
        Self { unconfirmed, ..Self::default() }
    }

    /// Searches for a task at the next call of [`Sender::heal`].
    pub(super) fn search_soon(&mut self) {
        self.should_search = true;
    }

    /// Sets the slabs with a replica that is to be moved, the next one last.
    pub(super) fn set_recalled(&mut self, slabs: Vec<SlabId>) {
        self.recalled = slabs;
    }

    /// Puts a slab back that is to be moved next.
    pub(super) fn push_recalled(&mut self, slab: SlabId) {
        self.recalled.push(slab);
    }

    /// Removes the next slab with a replica that is to be moved.
    pub(super) fn pop_recalled(&mut self) -> Option<SlabId> {
        self.recalled.pop()
    }

    /// Whether the next move, or the next step of the current one, is due at some time, and no
    /// completion announces it.
    pub(super) fn is_delayed(&self) -> bool {
        let is_delayed = |task: &CopyTask| matches!(task.step, CopyStep::Ready | CopyStep::Switching);
        match &self.task {
            Some(task) => task.is_move() && is_delayed(task),
            None => !self.recalled.is_empty(),
        }
    }

    /// Begins no task before this time.
    pub(super) fn pause_until(&mut self, time: Duration) {
        self.paused_until = time;
    }

    /// Resets the state of the previous node with this number.
    pub(super) fn node_added(&mut self, node: NodeId) {
        self.probed.retain(|(other, _)| *other != node);
        self.unconfirmed.retain(|other| *other != node);
        self.should_search = true;
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.task.as_ref().is_some_and(|task| matches!(task.step, CopyStep::Reading | CopyStep::Writing))
    }

    /// Whether a completion is of a probe.
    pub(super) const fn is_probe(completion: &Completion) -> bool {
        completion.id == PROBE_WORK_ID
    }

    /// Records the completion of a probe or of copying. Returns false if the node must be dropped.
    ///
    /// `replica` is the replica that a probe of the node would read now.
    pub(super) fn apply_completion(
        &mut self,
        slabs: &SlabSet,
        node: NodeId,
        replica: Option<Extent>,
        completion: &Completion,
    ) -> bool {
        let mut is_done = completion.outcome.is_ok();
        let is_of_disk = completion.outcome == Err(WorkError::Storage);
        if Self::is_probe(completion) {
            let read = self.probed.extract_if(.., |(other, _)| *other == node).last();
            let read = read.and_then(|(_, read)| read);
            if completion.outcome != Err(WorkError::Away) {
                slabs.set_slow(node, false);
            }
            // The slab was freed after the probe was posted, so its key is dead, and the failure
            // is none of the node.
            let was_freed = completion.outcome == Err(WorkError::RemoteAccess) && read != replica;
            return is_done || was_freed || is_of_disk;
        } else if let Some(task) = &mut self.task {
            is_done |= task.step == CopyStep::Writing && Mutation::MoveFenced.is_active();
            task.step = match (task.step, is_done) {
                (CopyStep::Reading, true) => CopyStep::Read,
                (CopyStep::Reading, false) if is_of_disk && Mutation::CopyUnreadable.is_active() => {
                    CopyStep::Read
                }
                (CopyStep::Reading, false) if is_of_disk => CopyStep::Unreadable,
                (CopyStep::Writing, true) => CopyStep::Written,
                _ => CopyStep::Failed,
            };
        }
        is_done || is_of_disk
    }
}

impl Sender {
    /// Probes the nodes, and searches for slabs that lack replicas.
    ///
    /// Must be called a few times a second, so that a dead node is detected while no page is
    /// evicted.
    pub fn probe(&mut self) {
        self.pool.maintain();
        self.slabs.tick();
        if !self.healer.is_stopped {
            self.update_recalled_memory();
        }
        self.resume_writable_nodes();
        if self.healer.is_stopped {
            return;
        }
        if self.slabs.may_have_several_copies() {
            self.probe_nodes();
        } else if self.filler.displaced_count() > 0 || self.filler.degraded_count() > 0 {
            self.healer.search_soon();
        }
    }

    fn probe_nodes(&mut self) {
        let Some(buffer) = self.buffer() else { return };
        self.healer.search_soon();
        self.count_suspended_slabs();
        for node in std::mem::take(&mut self.healer.unconfirmed) {
            if let Err(error) = self.ports.port(node) {
                self.drop_unreachable(node, &error);
            }
        }
        for (node, port) in self.ports.open_ports() {
            if !self.pool.nodes().any(|other| other == node) {
                continue;
            }
            if self.healer.probed.iter().any(|(other, _)| *other == node) {
                self.slabs.set_slow(node, true);
                continue;
            }
            // A replica is probed if there is one, because a node that returned without its memory
            // does not know the replica's key.
            let region = || port.endpoint.regions().first().map(|region| (region.base, region.key));
            let replica = self.filler.any_replica_on(node);
            let place = replica.map(|replica| (replica.addr, replica.key)).or_else(region);
            if let Some((addr, key)) = place.filter(|_| port.has_capacity()) {
                let local = port.slice_of(buffer, PROBE_OFFSET, PROBE_BYTES);
                let verb = Verb::Read { local, remote: RemoteAddr { addr, key } };
                let work = Work { id: PROBE_WORK_ID, verb, signalled: true };
                port.endpoint.post(&[work]).expect("its capacity was checked");
                port.in_flight += 1;
                self.healer.probed.push((node, replica));
            }
        }
    }

    /// Whether operations to a node that is away are in flight.
    pub fn is_awaiting_node(&mut self) -> bool {
        self.ports.open_ports().any(|(_, port)| port.in_flight > 0 && port.endpoint.is_away())
    }

    /// Whether a slab is being copied or a page is being repaired.
    #[must_use]
    pub fn is_healing(&self) -> bool {
        self.healer.task.is_some()
    }

    /// Stops making replicas and repairs. The next [`Self::advance`] after the operation in flight
    /// has completed abandons the current task.
    pub fn stop_healing(&mut self) {
        self.healer.is_stopped = true;
    }

    /// Abandons the current task, if there is one. It must have no operation in flight.
    pub(super) fn end_healing(&mut self) {
        if let Some(task) = self.healer.task.take() {
            self.abandon_task(&task);
        }
    }

    /// Advances the current task by one step, or begins one, if no batch waits to be posted.
    ///
    /// If the pool is full, the current task advances nevertheless, because it may own memory for
    /// which the batches wait.
    pub(super) fn heal(&mut self, is_pool_full: bool) {
        let is_busy = !is_pool_full && self.batches.iter().any(|batch| batch.unposted != 0);
        if is_busy || self.healer.is_waiting() || self.healer.task.is_none() && !self.begin_task(is_pool_full)
        {
            return;
        }
        let Some(mut task) = self.healer.task.take() else { return };
        let should_continue = match task.step {
            // The old replica is freed when no operation on it is in flight.
            CopyStep::Switching => self.is_writing(task.slab),
            _ if self.healer.is_stopped => false,
            CopyStep::Ready => self.is_writing_to(&task) || self.read_chunk(&mut task),
            CopyStep::Read if Mutation::DropBeforeCopied.is_active() && task.is_move() => {
                task.at = task.end;
                false
            }
            CopyStep::Read => self.write_chunk(&mut task),
            CopyStep::Unreadable => self.read_elsewhere(&mut task),
            CopyStep::Written => {
                self.stats.repaired_pages += u64::from(task.place.is_none());
                task.at += task.pages;
                task.failed_places = 0;
                task.is_read_again = false;
                task.chunk_pages = CHUNK_PAGES;
                if task.is_move() {
                    self.stats.moved_bytes += u64::from(task.pages) * PAGE_BYTES as u64;
                }
                self.read_chunk(&mut task)
            }
            CopyStep::Reading | CopyStep::Writing => true,
            CopyStep::Failed => false,
        };
        if should_continue || !self.healer.is_stopped && self.begin_switch(&mut task) {
            self.healer.task = Some(task);
        } else {
            self.end_task(&task);
        }
    }

    fn is_writing_to(&self, task: &CopyTask) -> bool {
        !Mutation::CopyWhileWriting.is_active() && self.is_writing(task.slab)
    }

    fn begin_task(&mut self, is_pool_full: bool) -> bool {
        let is_paused = self.ports.now() < self.healer.paused_until;
        if self.healer.is_stopped || is_paused {
            return false;
        }
        let mut task = None;
        if self.healer.should_search && !is_pool_full {
            task = self.next_repair().or_else(|| self.next_copy_task());
            self.healer.should_search = task.is_some();
            if task.is_none() {
                self.healer.unreadable.clear();
            }
        }
        // A move needs no memory beyond what it frees, so it need not wait until the run has room.
        let Some(task) = task.or_else(|| self.next_move()) else { return false };
        if !Mutation::CopyWhileWriting.is_active() {
            self.filler.begin_copying(task.slab);
        }
        if let Some(place) = task.place.filter(|_| Mutation::RecordUnfinished.is_active()) {
            self.slabs.finish_replica(task.slab, place);
        }
        self.healer.task = Some(task);
        true
    }

    /// The task to repair a page that a reader reported as damaged.
    fn next_repair(&mut self) -> Option<CopyTask> {
        while let Some((location, node)) = self.slabs.pop_damaged() {
            let replicas = self.slabs.replicas(location.slab());
            let can_be_repaired =
                replicas.len() > 1 && !self.slabs.is_free(location) && !self.filler.is_suspended(node);
            if let Some(to) = replicas.on(node).filter(|_| can_be_repaired) {
                let (slab, at) = (location.slab(), location.index());
                let damaged = replicas.placed().filter(|(_, replica)| replica.node == node);
                let failed_places = damaged.fold(0, |bits, (place, _)| bits | 1 << place);
                let task = CopyTask {
                    slab,
                    to,
                    place: None,
                    kind: CopyKind::Repair,
                    is_read_again: false,
                    at,
                    pages: 1,
                    chunk_pages: 1,
                    end: at + 1,
                    failed_places,
                    from: 0,
                    step: CopyStep::Ready,
                };
                return Some(task);
            }
        }
        None
    }

    /// The task to copy the slab with the fewest replicas for which a node has room.
    pub(super) fn next_copy_task(&mut self) -> Option<CopyTask> {
        let Self { filler, slabs, pool, healer, .. } = self;
        let can_be_copied = |slab: &SlabId| {
            let replicas = slabs.replicas(*slab);
            let is_target = |node| replicas.on(node).is_none() && !filler.is_suspended(node);
            slabs.live_pages(*slab) > 0
                && !healer.unreadable.contains(slab)
                && replicas.iter().any(|replica| !filler.is_suspended(replica.node))
                && pool.nodes().any(is_target)
        };
        let mut candidates: Vec<SlabId> = filler.degraded().filter(can_be_copied).collect();
        candidates.sort_by_key(|slab| slabs.replicas(*slab).len());
        let Some(slab) = candidates.get(self.healer.failed_searches % candidates.len().max(1)) else {
            return self.next_return();
        };
        self.healer.failed_searches += 1;
        let copy = self.begin_missing_copy(*slab)?;
        self.healer.failed_searches = 0;
        Some(CopyTask::new(*slab, copy, CopyKind::Missing))
    }

    /// Begins the copy that a slab lacks: a replica in memory if there is room for it, or else a
    /// backup.
    fn begin_missing_copy(&mut self, slab: SlabId) -> Option<(Extent, usize)> {
        let in_memory = if self.filler.lacks_replica(slab) {
            self.begin_copy(slab, |filler, pool| filler.allocate_replica(pool, slab))
        } else {
            None
        };
        if in_memory.is_some() || !self.filler.lacks_backup(slab) {
            return in_memory;
        }
        self.begin_copy(slab, |filler, pool| filler.allocate_backup(pool, slab))
    }

    /// Allocates the extent of a new replica by `allocate`, records the extent, and returns it with
    /// its place. The nodes that are found to be gone are dropped.
    pub(super) fn begin_copy(
        &mut self,
        slab: SlabId,
        allocate: impl FnOnce(&mut Filler, &mut PoolClient) -> Option<Extent>,
    ) -> Option<(Extent, usize)> {
        let _operation = self.pool.begin_operation();
        let to = allocate(&mut self.filler, &mut self.pool);
        let gone = self.filler.drain_gone_nodes();
        if gone.is_empty() {
            let to = to?;
            let class = node_class(&self.pool, to.node);
            return Some((to, self.slabs.begin_replica(slab, to, class)));
        }
        // The slab may have lost its last replica thereby, or may be removed. The next search
        // starts again.
        gone.into_iter().for_each(|node| self.drop_node(node));
        if let Some(to) = to {
            free_extents(&mut self.pool, to.node, &[to]);
        }
        None
    }

    /// Posts the READ of the next chunk that has pages in use. Returns false if there is no such
    /// chunk, or no replica is left to read.
    fn read_chunk(&mut self, task: &mut CopyTask) -> bool {
        let is_used = |index: &u32| !self.slabs.is_free(Location::new(task.slab, *index));
        let Some(at) = (task.at..task.end).find(is_used) else {
            task.at = task.end;
            return false;
        };
        task.at = at;
        task.pages = task.chunk_pages.min(task.end - at);
        let replicas = self.slabs.replicas(task.slab);
        let can_be_read = |(place, replica): &(usize, Extent)| {
            task.failed_places & 1 << place == 0 && !self.filler.is_suspended(replica.node)
        };
        let Some((place, from)) = replicas.placed().find(can_be_read) else { return false };
        task.from = place;
        task.step = CopyStep::Reading;
        self.move_chunk(task, &from)
    }

    /// Reads a chunk from another replica, because a disk could not return it; if there is none,
    /// page by page.
    fn read_elsewhere(&mut self, task: &mut CopyTask) -> bool {
        task.failed_places |= 1 << task.from;
        let others = self.slabs.replicas(task.slab);
        if others.placed().any(|(place, _)| task.failed_places & 1 << place == 0) {
            return self.read_chunk(task);
        }
        if task.pages > 1 {
            (task.chunk_pages, task.failed_places) = (1, 0);
            return self.read_chunk(task);
        }
        // The disk may return the page later. Until then a copy would lack it.
        self.healer.unreadable.insert(task.slab);
        false
    }

    /// Posts the WRITE of a chunk if its checksums match. Otherwise reads the chunk from another
    /// replica.
    fn write_chunk(&mut self, task: &mut CopyTask) -> bool {
        if !self.is_chunk_good(task) {
            task.failed_places |= 1 << task.from;
            let others = self.slabs.replicas(task.slab);
            if others.placed().any(|(place, _)| task.failed_places & 1 << place == 0) {
                return self.read_chunk(task);
            }
            if task.place.is_none() {
                return false;
            }
            if !task.is_read_again {
                task.is_read_again = true;
                task.failed_places = 0;
                return self.read_chunk(task);
            }
            // No replica is good. The damaged pages stay damaged, and their readers get an error;
            // the other pages are worth copying.
            tracing::warn!(slab = task.slab.0, "copying a slab with pages that are damaged in all replicas");
        }
        task.step = CopyStep::Writing;
        let to = task.to;
        self.move_chunk(task, &to)
    }

    fn is_chunk_good(&self, task: &CopyTask) -> bool {
        let Some(buffer) = self.healer.buffer else { return false };
        (task.at..task.at + task.pages).enumerate().all(|(position, index)| {
            let location = Location::new(task.slab, index);
            let bytes = view::page(self.ports.memory(buffer), position * PAGE_BYTES);
            self.slabs.is_free(location) || page_crc(bytes) == self.slabs.crc(location)
        })
    }

    /// Posts the READ or the WRITE of a chunk.
    fn move_chunk(&mut self, task: &mut CopyTask, replica: &Extent) -> bool {
        let Some(buffer) = self.buffer() else { return false };
        let port = match self.ports.port(replica.node) {
            Ok(port) => port,
            Err(error) => {
                self.drop_unreachable(replica.node, &error);
                return false;
            }
        };
        if !port.has_capacity() {
            // The queue is full. The next call retries, as if the previous step had just ended.
            task.step = if task.step == CopyStep::Reading { CopyStep::Ready } else { CopyStep::Read };
            return true;
        }
        let local = port.slice_of(buffer, 0, task.pages as usize * PAGE_BYTES);
        let remote = page_of(replica, task.at);
        let verb = if task.step == CopyStep::Reading {
            Verb::Read { local, remote }
        } else {
            Verb::Write { local, remote }
        };
        port.endpoint
            .post(&[Work { id: HEAL_WORK_ID, verb, signalled: true }])
            .expect("its capacity was checked");
        port.in_flight += 1;
        true
    }

    /// Whether a task has copied all pages to a node that is still there, of a slab that is still
    /// in use.
    pub(super) fn is_complete(&self, task: &CopyTask) -> bool {
        let is_known = self.pool.nodes().any(|node| node == task.to.node);
        task.at >= task.end && is_known && !self.slabs.replicas(task.slab).is_empty()
    }

    /// Ends a task, and marks the new replica as complete if all chunks were copied.
    fn end_task(&mut self, task: &CopyTask) {
        if task.step == CopyStep::Switching {
            self.end_move(task);
            return;
        }
        let Some(place) = task.place.filter(|_| self.is_complete(task)) else {
            self.abandon_task(task);
            return;
        };
        if !Mutation::RecordUnfinished.is_active() {
            self.slabs.finish_replica(task.slab, place);
        }
        if task.is_move() {
            self.stats.moved_slabs += 1;
        } else {
            self.stats.copied_slabs += 1;
        }
        self.filler.end_copying(&mut self.pool, task.slab);
        if self.filler.degraded_count() == 0 && !self.filler.has_suspended_nodes() {
            tracing::info!("all slabs have their replicas again");
        }
    }

    /// Abandons a task, and frees the extent of its incomplete replica.
    fn abandon_task(&mut self, task: &CopyTask) {
        if let Some((place, extent)) = task.place.and_then(|_| self.slabs.unfinished_replica(task.slab)) {
            let recorded = RecordedReplica { slab: task.slab, place, extent };
            free_recorded(&self.slabs, &mut self.pool, &mut [recorded]);
        }
        self.filler.end_copying(&mut self.pool, task.slab);
    }

    fn create_buffer(&mut self) -> Result<usize, BufferError> {
        let memory = Memory::private("aquifer-heal", PROBE_OFFSET + PAGE_BYTES)?;
        Ok(self.ports.add_memory(Arc::new(memory))?)
    }

    /// Returns the number of the healer's buffer, which is created if necessary; `None` if there is
    /// no memory for it yet.
    pub(super) fn buffer(&mut self) -> Option<usize> {
        if self.healer.buffer.is_none() {
            match self.create_buffer() {
                Ok(number) => self.healer.buffer = Some(number),
                Err(error) => tracing::warn!(%error, "cannot create the buffer to copy slabs; retrying"),
            }
        }
        self.healer.buffer
    }
}
