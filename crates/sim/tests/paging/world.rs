//! The state of one schedule apart from the monitors: processes, sender, cluster and random
//! numbers.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use aquifer_fabric::Endpoint;
use aquifer_fabric::sim::Rng;
use aquifer_faults::{Areas, EvictedBatch, SenderEvent};
use aquifer_pager::{
    BLOCK_PAGES, BlockId, Budget, Memory, Mempool, PageNumber, Sender, SlabId, SlabReplicas, SlabSet,
    StageOutcome, Volume, WrittenBatch,
};
use aquifer_pool::{Extent, NodeId};

use super::cluster::{SENDER, SimCluster};
use super::focus::Focus;
use super::memory::{encode, index};
use super::process::SimProcess;

/// More slabs than any schedule has.
const SLABS_MAX: u32 = 256;

/// How often things happened in a schedule, or in all. A simulator that never does a thing cannot
/// find its bugs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PagingCounts {
    pub evictions: u64,
    pub zero_fills: u64,
    pub staging_fills: u64,
    pub remote_fills: u64,
    pub busy: u64,
    pub kept: u64,
    pub absent: u64,
    pub privatised: u64,
    pub forks: u64,
    pub remaps: u64,
    pub kills: u64,
    pub crashes: u64,
    /// Nodes that returned without their memory, and those of them that the sender added.
    pub returns: u64,
    pub joined: u64,
    /// Extents and spans that the leak scan freed.
    pub leaks_freed: u64,
    pub damages: u64,
    pub lost: u64,
    pub full: u64,
    pub slow: u64,
    pub late: u64,
    pub unchanged: u64,
    pub copied: u64,
    pub repaired: u64,
    /// Pages that were moved out of slabs that were being vacated.
    pub repacked: u64,
    /// Nodes that died while all pages had other replicas, and those of them that died after
    /// replicas of an earlier dead node had been made.
    pub survived: u64,
    pub survived_after_healing: u64,
    pub restarts: u64,
    /// Partitions of a node.
    pub cuts: u64,
    /// Nodes that fenced our host.
    pub expiries: u64,
    pub absences: u64,
    /// Forks after which pages were write-protected, and answers that permitted writes.
    pub protections: u64,
    pub unprotected: u64,
    /// Workers that would have waited for ever.
    pub stuck_workers: u64,
}

impl PagingCounts {
    pub fn labelled(&self) -> [(&'static str, u64); 32] {
        [
            ("evictions", self.evictions),
            ("zero fills", self.zero_fills),
            ("fills from the mempool", self.staging_fills),
            ("fills from memory nodes", self.remote_fills),
            ("fills refused as busy", self.busy),
            ("pages that the worker left", self.kept),
            ("pages that were absent", self.absent),
            ("shared pages made private", self.privatised),
            ("forks", self.forks),
            ("remaps", self.remaps),
            ("kills", self.kills),
            ("crashed nodes", self.crashes),
            ("nodes that returned", self.returns),
            ("nodes that were added", self.joined),
            ("leaks that were freed", self.leaks_freed),
            ("damaged pages", self.damages),
            ("lost pages", self.lost),
            ("times the pool was full", self.full),
            ("slow nodes", self.slow),
            ("fetches with late READs", self.late),
            ("pages that left unchanged", self.unchanged),
            ("slabs copied", self.copied),
            ("pages repaired", self.repaired),
            ("pages moved", self.repacked),
            ("deaths that lost no page", self.survived),
            ("deaths after healing that lost no page", self.survived_after_healing),
            ("restarts of the agent", self.restarts),
            ("partitions of a node", self.cuts),
            ("nodes that fenced the host", self.expiries),
            ("nodes that were away", self.absences),
            ("forks that were protected", self.protections),
            ("writes to protected pages", self.unprotected),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        self.evictions += other.evictions;
        self.zero_fills += other.zero_fills;
        self.staging_fills += other.staging_fills;
        self.remote_fills += other.remote_fills;
        self.busy += other.busy;
        self.kept += other.kept;
        self.absent += other.absent;
        self.privatised += other.privatised;
        self.forks += other.forks;
        self.remaps += other.remaps;
        self.kills += other.kills;
        self.crashes += other.crashes;
        self.returns += other.returns;
        self.joined += other.joined;
        self.leaks_freed += other.leaks_freed;
        self.damages += other.damages;
        self.lost += other.lost;
        self.full += other.full;
        self.slow += other.slow;
        self.late += other.late;
        self.unchanged += other.unchanged;
        self.copied += other.copied;
        self.repaired += other.repaired;
        self.repacked += other.repacked;
        self.survived += other.survived;
        self.survived_after_healing += other.survived_after_healing;
        self.restarts += other.restarts;
        self.cuts += other.cuts;
        self.expiries += other.expiries;
        self.absences += other.absences;
        self.protections += other.protections;
        self.unprotected += other.unprotected;
        self.stuck_workers += other.stuck_workers;
    }
}

#[derive(Debug)]
enum SenderOrder {
    /// A batch in a staging buffer.
    Copy { process: usize, job: EvictedBatch },
    /// A block that must be written again since a restart.
    Again { process: usize, block: BlockId, slots: u64 },
}

impl SenderOrder {
    fn process(&self) -> usize {
        match self {
            Self::Copy { process, .. } | Self::Again { process, .. } => *process,
        }
    }
}

/// The same memory, mapped a second time.
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
    pub sender: Sender,
    orders: VecDeque<SenderOrder>,
    pub abandoned: Vec<u64>,
    /// Children whose fork the parent's monitor has served.
    pub new_children: Vec<(usize, Volume, Areas)>,
    /// Indexed by process: the page table that the keeper holds.
    pub kept: Vec<Option<Memory>>,
    /// The epoch of the present agent.
    pub epoch: u64,
    pub clock_ns: u64,
    /// Steps of the world between two calls of a monitor, at most.
    pub pace: u64,
    /// How often monitors have waited for the sender.
    pub waits: u32,
    pub stamps: u64,
    /// Operations that threads may still begin.
    pub operations: u32,
    /// Operations are drawn from this many numbers. The more, the more of them are touches.
    pub mix: u64,
    /// Programs move their memory often.
    pub moves_often: bool,
    /// Events of `madvise` may enter the queue some time after they were raised.
    pub late_events: bool,
    /// Operations on the fabric stay in flight for long.
    is_fabric_lazy: bool,
    pub is_winding_down: bool,
    pub agent_may_die: bool,
    pub failure: Option<String>,
    pub counts: PagingCounts,
    /// The bias of the schedule.
    pub focus: Focus,
    joining: Option<(NodeId, Box<dyn Endpoint>)>,
    written: Vec<WrittenBatch>,
    found: Vec<StageOutcome>,
}

impl PagingWorld {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let focus = Focus::of(seed);
        let cluster = SimCluster::new(rng.next_u64(), &mut rng, focus);
        let blocks = 1 + rng.index(if focus == Focus::Writes { 2 } else { 6 });
        let mempool = Mempool::new(blocks * aquifer_pager::BLOCK_PAGES * aquifer_pager::PAGE_BYTES);
        let mempool = Arc::new(mempool.expect("memory"));
        let slabs = Arc::new(SlabSet::with_replicas(cluster.replicas).expect("memory"));
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
        let sender = Sender::new(
            Arc::clone(&slabs),
            &mempool,
            cluster.connector(SENDER),
            cluster.pool(SENDER),
            rng.next_u64(),
        );
        Self {
            processes: Vec::new(),
            cluster,
            mempool,
            slabs,
            budget,
            sender,
            orders: VecDeque::new(),
            abandoned: Vec::new(),
            new_children: Vec::new(),
            kept: Vec::new(),
            epoch: 1,
            clock_ns: 0,
            pace: 1 + rng.below(5),
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
            late_events: rng.chance(1, 3) || [Focus::Restarts, Focus::Events].contains(&focus),
            is_fabric_lazy: rng.chance(1, 3) || focus == Focus::Writes,
            is_winding_down: false,
            agent_may_die: false,
            failure: None,
            counts: PagingCounts::default(),
            joining: None,
            written: Vec::new(),
            found: Vec::new(),
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
                0..10 => self.run_some_thread(),
                10..12 => self.run_sender(),
                12..15 => {
                    if !self.is_fabric_lazy || self.rng.chance(1, 16) {
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
        self.orders.push_back(SenderOrder::Copy { process, job });
    }

    pub fn submit_again(&mut self, process: usize, block: BlockId, slots: u64) {
        self.orders.push_back(SenderOrder::Again { process, block, slots });
    }

    /// Records that the keeper holds a page table.
    pub fn keep(&mut self, process: usize, table: &Memory) {
        if self.kept.len() <= process {
            self.kept.resize_with(process + 1, || None);
        }
        self.kept[process] = Some(reopen(table));
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

    /// Begins a new agent with what the previous one left. Its volumes are recovered before
    /// [`Self::finish_restart`].
    pub fn restart(&mut self) {
        self.count_sender_stats();
        self.counts.restarts += 1;
        self.epoch += 1;
        self.orders.clear();
        self.abandoned.clear();
        self.new_children.clear();
        self.joining = None;
        self.mempool = Arc::new(Mempool::recover(reopen(self.mempool.memory())));
        self.slabs = Arc::new(SlabSet::recover(reopen(self.slabs.memory()), self.cluster.replicas));
        let blocks = 4 * aquifer_pager::BLOCK_PAGES as u64;
        let limit = (self.budget.resident_max() + blocks) * aquifer_pager::PAGE_BYTES as u64;
        self.budget = Arc::new(Budget::new(limit));
    }

    /// Ends the recovery, when all volumes are recovered and own the blocks in `used`.
    pub fn finish_restart(&mut self, used: &HashSet<BlockId>) {
        self.mempool.finish_recovery(used);
        self.slabs.finish_recovery();
        self.cluster.epoch = self.epoch;
        self.cluster.suspect_all();
        let sender = Sender::new(
            Arc::clone(&self.slabs),
            &self.mempool,
            self.cluster.connector(SENDER),
            self.cluster.pool(SENDER),
            self.rng.next_u64(),
        );
        let dead = std::mem::replace(&mut self.sender, sender);
        self.cluster.close(dead, &mut self.rng);
    }

    /// Adds the counters of a sender that ends.
    pub fn count_sender_stats(&mut self) {
        let sent = self.sender.stats();
        self.counts.unchanged += sent.unchanged_pages;
        self.counts.copied += sent.copied_slabs;
        self.counts.repaired += sent.repaired_pages;
    }

    /// Runs one turn of the sender's thread.
    pub fn run_sender(&mut self) {
        for owner in std::mem::take(&mut self.abandoned) {
            self.sender.abandon(owner);
            for order in &mut self.orders {
                if let SenderOrder::Again { process, slots, .. } = order
                    && *process as u64 == owner
                {
                    *slots = 0;
                }
            }
        }
        if self.sender.has_capacity()
            && let Some(order) = self.next_order()
        {
            self.stage(&order);
        }
        if self.rng.chance(1, 8) {
            self.sender.probe();
        }
        if self.cluster.has_faults() && self.rng.chance(1, 2) {
            self.join_nodes();
        }
        if !self.is_winding_down {
            self.repack();
        }
        let mut written = std::mem::take(&mut self.written);
        let result = self.sender.advance(&mut written);
        assert!(
            result.is_ok() || self.cluster.is_full() || self.cluster.has_faults() || self.cluster.was_away,
            "{result:?}"
        );
        for written in written.drain(..) {
            let process = usize::try_from(written.owner).expect("an index");
            self.processes[process].done.push_back(SenderEvent::Written(Box::new(written)));
        }
        self.written = written;
    }

    /// Begins a round of vacating at times. During a round the sampler wakes the monitors.
    fn repack(&mut self) {
        if self.rng.chance(1, 16) {
            self.sender.repack_all();
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
            && let Some(node) = self.cluster.nodes().find(|node| !self.sender.uses_node(*node))
        {
            self.joining = self
                .cluster
                .connector(SENDER)
                .connect_without_waiting(node)
                .ok()
                .map(|endpoint| (node, endpoint));
        }
        if let Some((node, endpoint)) = self.joining.take_if(|_| self.rng.chance(1, 2)) {
            let taken = self.sender.add_node(node, endpoint);
            trace!("node {node:?} is added: {taken:?}, in use {}", self.sender.uses_node(node));
            self.counts.joined += u64::from(taken.is_ok() && self.sender.uses_node(node));
        }
    }

    /// Whether each slab has all its replicas on nodes that are alive.
    pub fn has_all_replicas(&mut self) -> bool {
        let lives = |copy: Extent| self.cluster.holds(&copy);
        let slabs = (0..SLABS_MAX).map(|slab| self.slabs.replicas(SlabId(slab)));
        self.sender.stats().degraded_slabs == 0 && slabs.flat_map(SlabReplicas::iter).all(lives)
    }

    /// Replicas that their nodes have lost, and the nodes that the sender uses.
    pub fn describe_missing_replicas(&self) -> String {
        let slabs = (0..SLABS_MAX)
            .flat_map(|slab| self.slabs.replicas(SlabId(slab)).iter().map(move |copy| (slab, copy)));
        let gone: Vec<_> = slabs.filter(|(_, copy)| !self.cluster.holds(copy)).collect();
        let known: Vec<_> = self.cluster.nodes().filter(|node| self.sender.uses_node(*node)).collect();
        format!("replicas {gone:?} are lost, nodes {known:?} are in use, {:?}", self.sender.stats())
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
        self.counts.expiries += u64::from(self.cluster.fence_one(&mut self.rng));
        if self.cluster.is_fenced_everywhere() {
            (0..self.processes.len()).for_each(|process| self.kill(process));
        }
    }

    /// Partitions a node if no page with replicas is lost by that, or ends the partition.
    pub fn cut(&mut self) {
        if self.cluster.is_cut() || self.cluster.replicas == 1 || self.has_all_replicas() {
            self.counts.cuts += u64::from(self.cluster.cut(&mut self.rng));
        }
    }

    /// Removes the next order. Orders of several programs come in any order after a restart.
    fn next_order(&mut self) -> Option<SenderOrder> {
        let first = self.orders.front()?.process();
        let other = self.orders.iter().position(|order| order.process() != first);
        match other.filter(|_| self.epoch > 1 && self.rng.chance(1, 2)) {
            Some(at) => self.orders.remove(at),
            None => self.orders.pop_front(),
        }
    }

    fn stage(&mut self, order: &SenderOrder) {
        match order {
            SenderOrder::Copy { process, job } => self.copy(*process, job),
            SenderOrder::Again { process, block, slots } => {
                let mut found = std::mem::take(&mut self.found);
                let is_wanted = |index: usize| slots >> index & 1 == 1;
                let owner = *process as u64;
                self.sender.stage_with_clean_copies(owner, *block, BLOCK_PAGES, is_wanted, &[], &mut found);
                self.found = found;
            }
        }
    }

    /// Copies a batch from its staging buffer into its block, and stages it.
    fn copy(&mut self, process: usize, job: &EvictedBatch) {
        let EvictedBatch { block, buffer, positions, clean_copies } = job;
        let number = process;
        let process = &self.processes[number];
        let alive = process.is_alive;
        if alive {
            for (slot, position) in positions.iter().enumerate() {
                let stamp = process.staging[*buffer][usize::from(*position)];
                let stamp = stamp.expect("a page waits where the monitor said");
                self.mempool.memory().write(block.slot(slot).offset(), &encode(stamp));
            }
        }
        let owner = number as u64;
        let mut found = std::mem::take(&mut self.found);
        self.sender.stage_with_clean_copies(
            owner,
            *block,
            positions.len(),
            |_| alive,
            clean_copies,
            &mut found,
        );
        self.processes[number].done.push_back(SenderEvent::Staged {
            block: *block,
            buffer: *buffer,
            found: found.clone(),
        });
        self.found = found;
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
        let is_parting = !self.orders.iter().all(|order| order.process() != process);
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

    pub fn page(&mut self, process: usize, page: u64) -> &mut super::memory::ModelPage {
        &mut self.processes[process].pages[index(page)]
    }

    pub fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }
}
