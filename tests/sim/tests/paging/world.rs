//! The state of one schedule apart from the monitors: processes, sender, cluster and random
//! numbers.

use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use aquifer_fabric::Endpoint;
use aquifer_fabric::sim::Rng;
use aquifer_faults::send_loop::{NextStep, SendLoop, SendQueue, SentProgram};
use aquifer_faults::takeover::Origin;
use aquifer_faults::{
    Areas, EvictedBatch, FaultStats, Journal, MESSAGE_BYTES, SenderEvent, UffdMessage, to_bytes,
};
use aquifer_pager::{
    BlockId, Budget, Location, Memory, Mempool, MoveRate, NoRoom, PageNumber, Sender, SlabId, SlabReplicas,
    SlabSet, Volume,
};
use aquifer_pool::{Extent, NodeId};

use super::cluster::{SENDER, SimCluster};
use super::counts::PagingCounts;
use super::focus::Focus;
use super::memory::{encode, index};
use super::process::{KeptMemory, SentProcess, SimProcess};
use super::withdrawal::Withdrawal;

/// Largest number of messages of one read.
const MESSAGES_MAX: usize = 16;
/// More slabs than any schedule has.
const SLABS_MAX: u32 = 256;

impl SentProgram for SentProcess {
    fn id(&self) -> u64 {
        self.0.id as u64
    }

    /// Copies nothing of a process that has ended: its staging buffers are gone.
    fn copy_batch(&self, mempool: &Mempool, batch: &EvictedBatch) -> usize {
        if !self.0.is_alive.get() {
            return 0;
        }
        let staging = &self.0.staging.borrow()[batch.buffer];
        for (slot, position) in batch.positions.iter().enumerate() {
            let stamp = staging[usize::from(*position)].unwrap_or(0);
            mempool.memory().write(batch.block.slot(slot).offset(), &encode(stamp));
        }
        batch.positions.len()
    }

    fn push_event(&self, event: SenderEvent) {
        self.0.done.borrow_mut().push_back(event);
    }
}

/// A rate without limit, because the clock does not advance while nothing is in flight.
fn unlimited() -> Arc<MoveRate> {
    Arc::new(MoveRate::new(None))
}

/// Maps memory a second time.
pub fn reopen(memory: &Memory) -> Memory {
    let fd = memory.fd().try_clone_to_owned().expect("a descriptor");
    Memory::from_fd(fd, memory.len()).expect("it is sealed")
}

#[derive(Debug)]
pub struct PagingWorld {
    pub rng: Rng,
    pub processes: Vec<SimProcess>,
    pub cluster: SimCluster,
    pub mempool: Arc<Mempool>,
    pub slabs: Arc<SlabSet>,
    pub budget: Arc<Budget>,
    pub sending: SendLoop<SentProcess>,
    pub queue: SendQueue<SentProcess>,
    /// Children whose fork the parent's monitor has served.
    pub new_children: Vec<(usize, Volume, Areas, Journal)>,
    /// Memory that the keeper holds, by process.
    pub kept: Vec<Option<KeptMemory>>,
    /// The epoch of the present agent.
    pub epoch: u64,
    pub clock_ns: u64,
    /// Largest number of steps of the world during one call of a monitor.
    pub steps_per_call: u64,
    /// Number of times that monitors have waited for the sender.
    pub waits: u32,
    pub stamps: u64,
    /// Operations that threads may still begin.
    pub operations: u32,
    /// The range of numbers from which operations are drawn. A larger range has more touches.
    pub mix: u64,
    /// Whether programs move their memory often.
    pub moves_often: bool,
    /// Whether events of `madvise` may enter the queue some time after they were raised.
    pub late_events: bool,
    /// Whether a thread may change memory while another has made a change and not reported it.
    /// Otherwise memory may grow: see "What is not handled" in `docs/formats/paging.md`.
    pub changes_overlap: bool,
    /// Whether operations on the fabric stay in flight for long.
    is_fabric_slow: bool,
    pub is_winding_down: bool,
    pub agent_may_die: bool,
    pub failure: Option<String>,
    pub counts: PagingCounts,
    /// Whether reclaimed pages may stay in the page cache.
    has_cache: bool,
    /// Whether the run may have more or fewer pages beyond its limit at any time.
    is_elastic: bool,
    /// The counters of all monitors.
    pub stats: Arc<FaultStats>,
    /// The bias of the schedule.
    pub focus: Focus,
    joining: Option<(NodeId, Box<dyn Endpoint>)>,
    /// The slabs that a node had when it fenced our host. No later one can get there.
    fenced_slabs: HashSet<(u32, NodeId)>,
    /// Set if nodes may want their memory back.
    pub withdrawal: Option<Withdrawal>,
}

impl PagingWorld {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let focus = Focus::of(seed);
        let cluster = SimCluster::new(rng.next_u64(), &mut rng, focus);
        let blocks = 1 + rng.index(if focus == Focus::Writes { 2 } else { 6 });
        let mempool = Mempool::new(blocks * aquifer_pager::BLOCK_PAGES * aquifer_pager::PAGE_BYTES);
        let mempool = Arc::new(mempool.expect("memory"));
        let slabs = Arc::new(SlabSet::with_policy(cluster.policy()).expect("memory"));
        // Without a cache more reads reach memory nodes.
        let (has_cache, is_elastic) = match seed % 5 {
            2 => (true, false),
            3 => (false, true),
            4 => (true, true),
            _ => (false, false),
        };
        if has_cache {
            slabs.set_cache(mempool.new_cache_index().expect("memory"));
        }
        // The mempool share is four blocks. The monitor keeps 128 pages free, and most limits let
        // some pages be resident all the same.
        let moves_often =
            rng.chance(1, 6) || focus == Focus::Reuse || focus == Focus::Restarts && rng.chance(2, 3);
        let kind = if [Focus::Events, Focus::Absences, Focus::Writes, Focus::Reuse].contains(&focus) {
            0
        } else if moves_often {
            1 + rng.index(2)
        } else {
            rng.index(3)
        };
        let resident_max = [rng.below(12), 100 + rng.below(40), 130 + rng.below(60)][kind];
        let page = aquifer_pager::PAGE_BYTES as u64;
        let budget = Arc::new(Budget::new((4 * aquifer_pager::BLOCK_PAGES as u64 + resident_max) * page));
        let mut sender = Sender::new(
            Arc::clone(&slabs),
            &mempool,
            cluster.connector(SENDER),
            cluster.pool(SENDER),
            rng.next_u64(),
        );
        sender.set_move_rate(&unlimited());
        Self {
            processes: Vec::new(),
            cluster,
            sending: SendLoop::new(sender, Arc::clone(&mempool)),
            queue: SendQueue::default(),
            mempool,
            slabs,
            budget,
            new_children: Vec::new(),
            kept: Vec::new(),
            epoch: 1,
            clock_ns: 0,
            steps_per_call: 1 + rng.below(5),
            waits: 0,
            stamps: 0,
            operations: if [Focus::Events, Focus::Writes, Focus::Reuse].contains(&focus) { 300 } else { 20 }
                + u32::try_from(rng.below(180)).expect("small"),
            mix: match focus {
                Focus::Events => 30,
                Focus::Writes => 240,
                Focus::Reuse => 120,
                _ => [30, 40, 60, 120][rng.index(4)],
            },
            moves_often,
            changes_overlap: rng.chance(1, 2) || focus == Focus::Events,
            late_events: rng.chance(1, 3) || [Focus::Restarts, Focus::Events].contains(&focus),
            is_fabric_slow: rng.chance(1, 3) || focus == Focus::Writes,
            is_winding_down: false,
            agent_may_die: false,
            failure: None,
            counts: PagingCounts::default(),
            has_cache,
            is_elastic,
            stats: Arc::default(),
            joining: None,
            fenced_slabs: HashSet::new(),
            withdrawal: Withdrawal::of(seed),
            rng,
            focus,
        }
    }

    /// Runs up to `max` random steps of threads, sender, fabric and kernel.
    pub fn run_others(&mut self, max: u64) {
        if self.cluster.leak_detector.has_suspects() && self.rng.chance(1, 4) {
            self.counts.leaks_freed += self.cluster.scan_for_leaks();
        }
        for _ in 0..self.rng.below(max + 1) {
            self.clock_ns += self.rng.below(300_000);
            match self.rng.below(16) {
                0..10 => self.run_random_thread(),
                10..12 => self.run_sender(),
                12 if self.has_cache && self.rng.chance(1, 4) => {
                    let cached = self.mempool.cached_block_count();
                    self.mempool.set_backed_max(self.rng.below(6) * 256 * 1024);
                    let _released = self.mempool.release_block_memory().expect("a memfd has holes");
                    self.counts.cache_drops += (cached - self.mempool.cached_block_count()) as u64;
                }
                13 if self.is_elastic && self.rng.chance(1, 4) => {
                    let max = self.rng.below(60);
                    self.budget.set_borrowed(max, self.rng.below(max + 1));
                }
                12..15 => {
                    if !self.is_fabric_slow || self.rng.chance(1, 16) {
                        self.cluster.fabric.step();
                    }
                }
                _ => self.reclaim_lazy(),
            }
        }
    }

    /// The kernel drops a page after `MADV_FREE`. Shared pages are left out: see "What is not
    /// handled" in `docs/formats/paging.md`.
    fn reclaim_lazy(&mut self) {
        let process = self.rng.index(self.processes.len());
        let pages = &mut self.processes[process].pages;
        let lazy = |at: usize| pages[at].frame.is_some_and(|frame| frame.is_lazy && frame.is_exclusive);
        if let Some((at, _)) = super::memory::random_run(&mut self.rng, pages.len(), 1, lazy) {
            pages[at].frame = None;
            trace!("{process} lazily drops {at}");
        }
    }

    pub fn submit(&mut self, process: usize, job: EvictedBatch) {
        self.counts.evictions += job.positions.len() as u64;
        let program = self.sent_process(process);
        self.queue.push_batch(program, job);
    }

    pub fn submit_again(&mut self, process: usize, block: BlockId, slots: u64) {
        let program = self.sent_process(process);
        self.queue.push_block(program, block, slots);
    }

    fn sent_process(&self, process: usize) -> SentProcess {
        SentProcess(Rc::clone(&self.processes[process].sender_side))
    }

    /// Records that the keeper holds what another agent needs to serve a process.
    pub fn keep(&mut self, process: usize, table: &Memory, journal: &Journal, origin: Option<Origin>) {
        if self.kept.len() <= process {
            self.kept.resize_with(process + 1, || None);
        }
        let (table, journal) = (reopen(table), reopen(journal.memory()));
        self.kept[process] = Some(KeptMemory { table, journal, origin });
    }

    /// Records that a page is lost, also for children whose fork is not served yet, because they
    /// inherit the page.
    pub fn note_lost(&mut self, process: usize, page: PageNumber) {
        if index(page) >= self.processes[process].pages.len() {
            return;
        }
        self.processes[process].lost.insert(page);
        for child in process + 1..self.processes.len() {
            let is_served = self.kept.get(child).is_some_and(Option::is_some);
            if self.processes[child].parent == Some(process) && !is_served {
                self.note_lost(child, page);
            }
        }
    }

    /// Writes pending messages of a process to `buffer`, as the kernel does. Returns the bytes
    /// written. Threads run meanwhile, so that one read brings several moves.
    pub fn read_uffd(&mut self, process: usize, buffer: &mut [u8]) -> usize {
        let mut written = 0;
        for place in buffer.chunks_exact_mut(MESSAGE_BYTES).take(MESSAGES_MAX) {
            let Some(message) = self.processes[process].next_message() else { break };
            if let UffdMessage::Fork(child) = &message {
                self.processes[usize::try_from(*child).expect("a number")].is_started = true;
            }
            place.copy_from_slice(&to_bytes(&message));
            written += MESSAGE_BYTES;
            if self.rng.chance(1, 8) {
                self.run_others(1);
            } else if self.moves_often {
                self.run_others(6);
            }
        }
        written
    }

    /// Begins a new agent with what the previous one left. Its volumes are recovered before
    /// [`Self::finish_restart`].
    pub fn restart(&mut self) {
        self.count_sender_stats();
        self.counts.restarts += 1;
        self.epoch += 1;
        self.queue = SendQueue::default();
        self.new_children.clear();
        self.joining = None;
        self.check_cache();
        self.mempool = Arc::new(Mempool::recover(reopen(self.mempool.memory())));
        self.slabs = Arc::new(SlabSet::recover(reopen(self.slabs.memory()), self.slabs.policy()));
        if self.has_cache {
            self.slabs.set_cache(self.mempool.new_cache_index().expect("memory"));
        }
        let blocks = 4 * aquifer_pager::BLOCK_PAGES as u64;
        let limit = (self.budget.guaranteed() + blocks) * aquifer_pager::PAGE_BYTES as u64;
        self.budget = Arc::new(Budget::new(limit));
    }

    /// Begins the sender, when all volumes are recovered.
    pub fn finish_restart(&mut self) {
        self.slabs.finish_recovery();
        self.cluster.epoch = self.epoch;
        self.cluster.suspect_all();
        let mut sender = Sender::new(
            Arc::clone(&self.slabs),
            &self.mempool,
            self.cluster.connector(SENDER),
            self.cluster.pool(SENDER),
            self.rng.next_u64(),
        );
        sender.set_move_rate(&unlimited());
        let sending = SendLoop::new(sender, Arc::clone(&self.mempool));
        let dead = std::mem::replace(&mut self.sending, sending);
        self.cluster.close(dead.sender, &mut self.rng);
    }

    /// The cached pages must have had the bytes of their locations.
    pub fn check_cache(&mut self) {
        let damaged = self.mempool.damaged_cached_pages();
        if damaged > 0 {
            self.failure = Some(format!("{damaged} cached pages had other bytes than their locations"));
        }
    }

    /// Adds the counters of a sender that ends.
    pub fn count_sender_stats(&mut self) {
        let sent = self.sending.sender.stats();
        self.counts.unchanged += sent.unchanged_pages;
        self.counts.copied += sent.copied_slabs;
        self.counts.moved_slabs += sent.moved_slabs;
        self.counts.disk_errors += sent.disk_errors;
        self.counts.displaced += sent.displaced_slabs_total;
        self.counts.returned += sent.returned_slabs;
        self.counts.repaired += sent.repaired_pages;
        self.counts.dropped_nodes += sent.node_timeouts;
        self.counts.rewritten += sent.rewritten_pages;
    }

    /// Runs one turn of the sender's thread.
    pub fn run_sender(&mut self) {
        match self.sending.next_step(&mut self.queue) {
            NextStep::Stage(request) => self.sending.stage(request),
            NextStep::Poll => {}
            NextStep::End => unreachable!("the run goes on"),
        }
        if self.rng.chance(1, 8) {
            self.sending.sender.probe();
        }
        if self.cluster.has_faults() && self.rng.chance(1, 2) {
            self.join_nodes();
        }
        if !self.is_winding_down {
            self.repack();
        }
        if let Some(disk) = self.cluster.disk.as_mut().filter(|_| !self.is_winding_down) {
            self.counts.disk_failures += u64::from(disk.step());
        }
        if let Some(withdrawal) = self.withdrawal.as_mut().filter(|_| !self.is_winding_down) {
            self.counts.withdrawals += u64::from(withdrawal.step(&mut self.cluster));
        }
        let (_, result) = self.sending.advance();
        if let Err(error) = &result {
            trace!("the sender finds no room: {error}");
        }
        // With replicas, nodes that are slow to answer count as away for a while.
        // So does a node whose disk fails.
        let has_failed = self.cluster.disk.as_ref().is_some_and(|disk| disk.has_failed);
        let may_be_away = self.cluster.was_away || self.cluster.policy().copies() > 1 || has_failed;
        let is_excused = match result {
            Err(NoRoom::Away(_)) => may_be_away,
            _ => self.cluster.was_away,
        };
        assert!(
            result.is_ok()
                || is_excused
                || self.cluster.is_full()
                || self.cluster.has_faults()
                || self.is_withdrawn(),
            "{result:?}"
        );
    }

    /// Whether a node wants its memory back.
    pub fn is_withdrawn(&self) -> bool {
        self.withdrawal.as_ref().is_some_and(Withdrawal::is_active)
    }

    /// Whether what is on a node that wants its memory back can certainly be moved.
    pub fn has_room_elsewhere(&self) -> bool {
        let has_room = self.cluster.living() > self.cluster.replicas;
        has_room && !self.cluster.has_faults() && !self.cluster.was_away && self.cluster.disk.is_none()
    }

    /// Whether no node wants memory back in which our host has pages.
    pub fn is_emptied(&mut self) -> bool {
        let Some(withdrawal) = &mut self.withdrawal else { return true };
        withdrawal.is_empty(&mut self.cluster)
    }

    /// Ends the withdrawal, if there is one.
    pub fn end_withdrawal(&mut self) {
        if let Some(withdrawal) = &mut self.withdrawal {
            withdrawal.end(&mut self.cluster);
        }
    }

    /// Begins a round of vacating at times. During a round the sampler wakes the monitors.
    fn repack(&mut self) {
        if self.rng.chance(1, 16) {
            self.sending.sender.repack_all();
        }
        if self.slabs.vacating_round().is_some() && self.rng.chance(1, 4) {
            self.processes.iter_mut().for_each(|process| process.is_nudged = true);
        }
    }

    /// Restarts dead nodes at times, and connects to nodes that the sender does not use. A
    /// connected node is added to the sender at once or later.
    fn join_nodes(&mut self) {
        let often = if [Focus::Replicas, Focus::Writes].contains(&self.focus) { 2 } else { 8 };
        if self.rng.chance(1, often) {
            self.counts.returns += u64::from(self.cluster.replace_dead_node(&mut self.rng));
        }
        if self.joining.is_none()
            && let Some(node) = self.cluster.nodes().find(|node| !self.sending.sender.uses_node(*node))
        {
            self.joining = self
                .cluster
                .connector(SENDER)
                .connect_without_waiting(node)
                .ok()
                .map(|endpoint| (node, endpoint));
        }
        if let Some((node, endpoint)) = self.joining.take_if(|_| self.rng.chance(1, 2)) {
            let taken = self.sending.sender.add_node(node, endpoint);
            trace!("node {node:?} is added: {taken:?}, in use {}", self.sending.sender.uses_node(node));
            self.counts.joined += u64::from(taken.is_ok() && self.sending.sender.uses_node(node));
        }
    }

    /// Whether each slab has all its replicas on nodes that are alive.
    pub fn has_all_replicas(&mut self) -> bool {
        let lives = |copy: Extent| self.cluster.holds(&copy);
        let slabs = (0..SLABS_MAX).map(|slab| self.slabs.replicas(SlabId(slab)));
        self.sending.sender.stats().degraded_slabs == 0 && slabs.flat_map(SlabReplicas::iter).all(lives)
    }

    /// Damages a page on a node. With replicas, only while each slab has all of them: a damaged
    /// page without another replica is lost.
    pub fn damage(&mut self) {
        // A move would carry the damage of the only replica to another node.
        let copies = self.cluster.policy().copies();
        let may_move = copies == 1 && (self.withdrawal.is_some() || self.cluster.disk.is_some());
        if !may_move && (copies == 1 || self.has_all_replicas()) {
            self.counts.damages += u64::from(self.cluster.damage(&mut self.rng));
        }
    }

    /// Replicas that their nodes have lost, and the nodes that the sender uses.
    pub fn describe_missing_replicas(&self) -> String {
        let slabs = (0..SLABS_MAX)
            .flat_map(|slab| self.slabs.replicas(SlabId(slab)).iter().map(move |copy| (slab, copy)));
        let gone: Vec<_> = slabs.filter(|(_, copy)| !self.cluster.holds(copy)).collect();
        let known: Vec<_> =
            self.cluster.nodes().filter(|node| self.sending.sender.uses_node(*node)).collect();
        format!("replicas {gone:?} are lost, nodes {known:?} are in use, {:?}", self.sending.sender.stats())
    }

    /// Kills one node, or as many as the replicas tolerate, if no page is lost by that.
    pub fn crash(&mut self) {
        let replicas = self.cluster.replicas;
        if replicas > 1 && !self.has_all_replicas() {
            return;
        }
        let most = 1.max(replicas - 1);
        let was_hurt = self.cluster.has_lost_node;
        for _ in 0..1 + self.rng.index(most) {
            let dies = u64::from(self.cluster.crash(&mut self.rng));
            self.counts.crashes += dies;
            if replicas > 1 {
                self.counts.survived += dies;
                self.counts.survived_after_healing += if was_hurt { dies } else { 0 };
            }
        }
    }

    /// Ends the agent's lease at one more node. What is on that node is out of reach, whatever the
    /// replicas. When no node is left, the agent ends its programs.
    pub fn fence_one(&mut self) {
        if let Some(node) = self.cluster.fence_one(&mut self.rng) {
            self.counts.expiries += 1;
            let slabs = (0..SLABS_MAX).filter(|slab| self.slabs.replicas(SlabId(*slab)).on(node).is_some());
            self.fenced_slabs.extend(slabs.map(|slab| (slab, node)));
        }
        if self.cluster.is_fenced_everywhere() {
            (0..self.processes.len()).for_each(|process| self.kill(process));
        }
    }

    /// Whether a slab was on a node when the node fenced our host.
    pub fn was_fenced(&self, location: Location, node: NodeId) -> bool {
        self.fenced_slabs.contains(&(location.slab().0, node))
            // A WRITE before the fence may complete after it.
            || self.cluster.refuses(node) && self.has_bytes(location, node)
    }

    /// Whether a node has the bytes of a page that its slab's record names.
    fn has_bytes(&self, location: Location, node: NodeId) -> bool {
        let replica = self.slabs.replicas(location.slab()).on(node);
        replica.is_some_and(|replica| {
            self.cluster.crc_of(&replica, location.index()) == self.slabs.crc(location)
        })
    }

    /// Partitions a node if no page with replicas is lost by that, or ends the partition.
    pub fn cut(&mut self) {
        if self.cluster.is_cut() || self.cluster.replicas == 1 || self.has_all_replicas() {
            self.counts.cuts += u64::from(self.cluster.cut(&mut self.rng));
        }
    }

    /// Kills a process, whatever it is doing.
    pub fn kill(&mut self, process: usize) {
        if !self.processes[process].is_alive {
            return;
        }
        self.note_unreadable(process);
        for child in self.processes[process].die() {
            self.processes[child].die();
        }
        self.counts.kills += 1;
    }

    /// Records that pages in the staging buffers of a dying process are lost to children whose fork
    /// is being served.
    fn note_unreadable(&mut self, process: usize) {
        let leaving: Vec<u64> = (0..self.processes[process].pages.len()).map(super::memory::number).collect();
        let is_parting = self.queue.has_request_of(process as u64);
        let mut family = vec![process];
        // A child has a greater number than its parent.
        for child in process..self.processes.len() {
            let parent = self.processes[child].parent;
            if is_parting && parent.is_some_and(|parent| family.contains(&parent)) {
                family.push(child);
                self.processes[child].lost.extend(&leaving);
            }
        }
    }

    /// Children whose fork was not served.
    pub fn unserved_children(&self, process: usize) -> Vec<usize> {
        let is_served = |child: usize| self.kept.get(child).is_some_and(Option::is_some);
        let children = self.processes.iter().filter(|child| child.parent == Some(process) && child.is_alive);
        children.map(|child| child.id).filter(|child| !is_served(*child)).collect()
    }

    pub fn page(&mut self, process: usize, page: u64) -> &mut super::memory::ModelPage {
        &mut self.processes[process].pages[index(page)]
    }
}
