//! The memory nodes of a schedule, over the simulated fabric.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_fabric::reconnecting::AwayPolicy;
use aquifer_fabric::sim::{Rng, SimFabric, SimNodeId, SimOptions, SimTarget};
use aquifer_fabric::{Endpoint, EndpointError, Host, Identity, KeyEntry, Memory, PageStore, Target, Tenant};
use aquifer_pager::{Backup, Connector, CopyPolicy, PAGE_BYTES, Sender, page_of};
use aquifer_pool::op::{Grant, Recovered, WordAt};
use aquifer_pool::{
    CreateStore, Extent, FigureTable, Layout, LeakDetector, NodeId, NodeMemory, PoolClient, ScanProgress,
    SizeClass,
};

use super::absence::{self, NodeAbsence};
use super::disk::{DiskNode, SimDisk};
use super::focus::Focus;

/// Bytes of a node: one section. With more sections, a client's first section would depend on the
/// number of earlier clients.
const NODE_BYTES: u64 = 2 << 20;

/// The sender and the fetchers are different hosts, so that one can be slow without the other.
pub const SENDER: u16 = 1;
pub const FETCHERS: u16 = 4;

#[derive(Debug)]
struct SimConnector {
    fabric: SimFabric,
    nodes: SimNodes,
    host: Host,
    epoch: u64,
    /// Set if nodes may be away and return with their memory.
    absence: Option<NodeAbsence>,
    /// Whether operations that write pages do not wait for a node that is away.
    has_replicas: bool,
}

impl SimConnector {
    fn connect_in(&self, node: NodeId, policy: AwayPolicy) -> Result<Box<dyn Endpoint>, EndpointError> {
        let who = Identity { host: self.host, epoch: self.epoch, tenant: Tenant(0) };
        let node = node_of(&self.nodes, usize::from(node.0));
        match &self.absence {
            Some(absence) => absence::connect(&self.fabric, absence, node, who, policy),
            None if self.has_replicas && policy == AwayPolicy::Fail => {
                absence::connect(&self.fabric, &NodeAbsence::default(), node, who, policy)
            }
            None => self.fabric.connect(node, who),
        }
    }
}

/// Indexed by node number: the simulated node that has this number now.
type SimNodes = Arc<Mutex<Vec<SimNodeId>>>;

fn node_of(nodes: &SimNodes, number: usize) -> SimNodeId {
    nodes.lock().unwrap_or_else(PoisonError::into_inner)[number]
}

impl Connector for SimConnector {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, AwayPolicy::Wait)
    }

    fn connect_without_waiting(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect_in(node, AwayPolicy::Fail)
    }

    fn connect_lazily(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        let fails = self.has_replicas && self.host == Host(SENDER);
        self.connect_in(node, if fails { AwayPolicy::Fail } else { AwayPolicy::Wait })
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.fabric.now_ns())
    }
}

/// The approximate time of an operation on a slow node: longer than a READ waits if there is
/// another replica.
const SLOW_NS: u64 = 400_000_000;

/// Operations that a dead sender has in flight may be slower than others by one of these factors.
const STRAY_FACTORS: [u64; 3] = [1, 2, 8];

/// Decides whether nodes may be away, by the seed only, so that other schedules do not change.
const ABSENCES: u64 = 0x61AB_5EAC;

/// Creates the memory of a node, and its store if it is the one with a disk.
fn new_memory(target: &SimTarget, id: NodeId, disk: Option<&DiskNode>) -> NodeMemory {
    let store = disk.map(|disk| Arc::clone(&disk.store) as Arc<dyn PageStore>);
    let create = |_: &Layout| Ok(Arc::clone(store.as_ref().expect("it is a disk node")));
    let create: Option<CreateStore<'_>> = if store.is_some() { Some(&create) } else { None };
    NodeMemory::create_resizable(target, id, NODE_BYTES, NODE_BYTES, create).expect("memory")
}

/// The memory nodes and the faults that were injected.
#[derive(Debug)]
pub struct SimCluster {
    pub fabric: SimFabric,
    sender_factor: u64,
    pub replicas: usize,
    nodes: SimNodes,
    slow: Option<SimNodeId>,
    slow_factor: u64,
    targets: Vec<SimTarget>,
    node_memories: Vec<NodeMemory>,
    alive: Vec<bool>,
    /// Whether a node has died so far.
    pub has_lost_node: bool,
    pub damaged: Vec<bool>,
    /// The node that is partitioned from our hosts now, and the one that ever was.
    cut: Option<usize>,
    ever_cut: Option<usize>,
    /// Set if nodes may be away and return with their memory, and whether any node was away.
    absence: Option<NodeAbsence>,
    pub was_away: bool,
    /// The last node, if it is a disk node.
    pub disk: Option<DiskNode>,
    /// Nodes that have fenced our host, because they learned that its lease ended.
    fenced: Vec<bool>,
    /// The epoch of the agent that connects.
    pub epoch: u64,
    /// The figures of nodes that want memory back.
    pub figures: Arc<FigureTable>,
    /// The ledgers of our host.
    pub leak_detector: Arc<LeakDetector>,
    other_host: PoolClient,
    other_extents: Vec<Extent>,
}

impl SimCluster {
    pub fn new(seed: u64, rng: &mut Rng, focus: Focus) -> Self {
        let slowest_ns = [2_000, 20_000, 200_000][rng.index(3)];
        let options = SimOptions { step_on_poll: true, delay_ns: 500..slowest_ns, ..SimOptions::default() };
        let fabric = SimFabric::new(seed, options);
        let is_slow = match focus {
            Focus::Replicas => true,
            Focus::Writes => rng.chance(1, 2),
            _ => rng.chance(1, 4),
        };
        let sender_factor = if is_slow { 100 } else { 1 };
        fabric.slow(Host(SENDER), sender_factor);
        let replicas = match focus {
            Focus::Replicas | Focus::Writes => 2 + rng.index(2),
            Focus::Absences => 1,
            _ => [1, 1, 1, 2, 2, 3][rng.index(6)],
        };
        let memory_nodes = (replicas + rng.index(3)).max(2);
        // Schedules of events and address ranges need no further nodes.
        let is_of_ranges = [Focus::Events, Focus::Reuse].contains(&focus);
        let disk = DiskNode::of(seed, memory_nodes).filter(|_| !is_of_ranges);
        let count = memory_nodes + usize::from(disk.is_some());
        let targets: Vec<_> = (0..count).map(|_| fabric.add_node()).collect();
        let node_memories = (0..)
            .zip(&targets)
            .map(|(id, target)| {
                let disk = disk.as_ref().filter(|disk| disk.node == NodeId(id));
                new_memory(target, NodeId(id), disk)
            })
            .collect();
        let may_be_away = match focus {
            Focus::Replicas | Focus::Writes => false,
            Focus::Absences => true,
            _ => Rng::new(seed ^ ABSENCES).chance(1, 4),
        };
        let mut cluster = Self {
            fabric,
            sender_factor,
            replicas,
            slow: None,
            slow_factor: SLOW_NS / slowest_ns,
            nodes: Arc::new(Mutex::new(targets.iter().map(SimTarget::node).collect())),
            targets,
            node_memories,
            alive: vec![true; count],
            has_lost_node: false,
            damaged: vec![false; count],
            cut: None,
            ever_cut: None,
            absence: may_be_away.then(NodeAbsence::default),
            was_away: false,
            disk,
            fenced: vec![false; count],
            epoch: 1,
            figures: Arc::default(),
            leak_detector: Arc::default(),
            other_host: PoolClient::new(Host(2), Tenant(0)),
            other_extents: Vec::new(),
        };
        cluster.other_host = cluster.pool(2);
        cluster
    }

    pub fn connector(&self, host: u16) -> Arc<dyn Connector> {
        Arc::new(SimConnector {
            fabric: self.fabric.clone(),
            nodes: Arc::clone(&self.nodes),
            host: Host(host),
            epoch: self.epoch,
            absence: self.absence.clone(),
            has_replicas: self.policy().copies() > 1,
        })
    }

    /// The copies that pages of our host are to have.
    pub fn policy(&self) -> CopyPolicy {
        let backup = self.disk.as_ref().map_or(Backup::Never, |disk| disk.backup);
        CopyPolicy { replicas: self.replicas, backup }
    }

    /// The memory with the data of a node, at the offsets of its region.
    fn data_of(&self, node: usize) -> &Memory {
        match &self.disk {
            Some(disk) if usize::from(disk.node.0) == node => disk.store.memory(),
            _ => &self.node_memories[node].memory,
        }
    }

    /// Partitions a node from our hosts, or ends the partition. Returns whether it is partitioned
    /// now.
    ///
    /// It is always the same node, so that with replicas the other nodes have all pages.
    pub fn cut(&mut self, rng: &mut Rng) -> bool {
        let node = *self.ever_cut.get_or_insert_with(|| rng.index(self.targets.len()));
        self.cut = if self.cut.is_none() { Some(node) } else { None };
        for host in [SENDER, FETCHERS] {
            self.fabric.partition(Host(host), node_of(&self.nodes, node), self.cut.is_some());
        }
        self.cut.is_some()
    }

    /// Whether a node is partitioned now.
    pub fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Ends our lease at one more node, which fences our host until it has a new lease. Returns the
    /// node; `None` if all have.
    pub fn fence_one(&mut self, rng: &mut Rng) -> Option<NodeId> {
        let first = rng.index(self.fenced.len());
        let others = (0..self.fenced.len()).map(|turn| (first + turn) % self.fenced.len());
        let node = others.into_iter().find(|node| !self.fenced[*node])?;
        for host in [SENDER, FETCHERS] {
            self.targets[node].fence(Host(host), self.epoch);
        }
        self.fenced[node] = true;
        Some(NodeId(u16::try_from(node).expect("few nodes")))
    }

    /// Whether a node has fenced our host.
    pub fn refuses(&self, node: NodeId) -> bool {
        self.fenced[usize::from(node.0)]
    }

    /// Whether all nodes have fenced our host.
    pub fn is_fenced_everywhere(&self) -> bool {
        self.fenced.iter().all(|refuses| *refuses)
    }

    /// Whether the sender may have dropped a node that was partitioned from it.
    pub fn was_cut(&self, node: NodeId) -> bool {
        self.ever_cut == Some(usize::from(node.0))
    }

    /// Whether any node may have failed for the sender.
    pub fn has_faults(&self) -> bool {
        self.ever_cut.is_some() || self.fenced.contains(&true) || self.has_lost_node
    }

    /// A pool client that is connected to all nodes that are alive.
    pub fn pool(&self, host: u16) -> PoolClient {
        let connector = self.connector(host);
        let leak_detector = if host == SENDER { Arc::clone(&self.leak_detector) } else { Arc::default() };
        let mut pool = PoolClient::with_leak_detector(Host(host), Tenant(0), leak_detector);
        if host == SENDER {
            pool.set_figures(Arc::clone(&self.figures));
        }
        for (id, alive) in (0..).zip(&self.alive) {
            let is_cut = self.cut == Some(usize::from(id)) && [SENDER, FETCHERS].contains(&host);
            if *alive && !is_cut {
                // An agent that starts waits for nodes that are away.
                self.absence.iter().for_each(|absence| absence.end(&self.fabric));
                let endpoint = connector.connect_without_waiting(NodeId(id)).expect("it is alive");
                pool.add_node(NodeId(id), endpoint).expect("a good node");
            }
        }
        // Maintenance of pools other than the sender's is not simulated.
        pool
    }

    /// Kills a node, unless it is the last one. Returns whether it did.
    pub fn crash(&mut self, rng: &mut Rng) -> bool {
        let victim = rng.index(self.alive.len());
        let dies = self.living() > 1 && self.alive[victim];
        if dies {
            self.fabric.crash_node(node_of(&self.nodes, victim));
            self.alive[victim] = false;
            self.has_lost_node = true;
        }
        dies
    }

    /// Whether all operations of the sender are slow.
    pub fn has_slow_sender(&self) -> bool {
        self.sender_factor > 1
    }

    /// Whether nodes may be away.
    pub fn keeps_memory(&self) -> bool {
        self.absence.is_some()
    }

    /// Begins the absence of a node, which ends after some attempts to reach it, or ends the
    /// present absence. Returns whether one began.
    pub fn begin_absence(&mut self, rng: &mut Rng) -> bool {
        let Some(absence) = &self.absence else { return false };
        if absence.is_active() {
            absence.end(&self.fabric);
            return false;
        }
        self.was_away = true;
        let node = node_of(&self.nodes, rng.index(self.targets.len()));
        // With replicas the sender tries to reach the node in each turn.
        let most = if self.replicas > 1 { 600 } else { 60 };
        absence.begin(&self.fabric, node, 1 + rng.below(most))
    }

    /// The number of nodes that are alive.
    pub fn living(&self) -> usize {
        self.alive.iter().filter(|alive| **alive).count()
    }

    /// Whether there are nodes for all copies of a page.
    pub fn can_have_all_copies(&self) -> bool {
        let is_disk = |node: &NodeId| self.disk.as_ref().is_some_and(|disk| disk.node == *node);
        let disks = self.nodes().filter(is_disk).count();
        let policy = self.policy();
        self.living() - disks >= policy.replicas && (policy.backup != Backup::Always || disks > 0)
    }

    /// Lets time pass, after which the sender writes to a disk again that has failed.
    pub fn await_disk(&self) {
        const STEP_NS: u64 = 1_000_000;
        if self.disk.as_ref().is_some_and(|disk| disk.has_failed) {
            self.fabric.advance_to(self.fabric.now_ns() + STEP_NS);
        }
    }

    /// Starts a dead node again, without its memory. Returns false if no node is dead.
    pub fn replace_dead_node(&mut self, rng: &mut Rng) -> bool {
        let dead: Vec<_> = (0..self.alive.len()).filter(|node| !self.alive[*node]).collect();
        if dead.is_empty() {
            return false;
        }
        let number = dead[rng.index(dead.len())];
        let target = self.fabric.add_node();
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)[number] = target.node();
        let id = NodeId(u16::try_from(number).expect("few nodes"));
        let disk = self.disk.as_mut().filter(|disk| disk.node == id);
        self.node_memories[number] = match disk {
            Some(disk) => {
                disk.store = Arc::new(SimDisk::new(disk.store.next_seed()));
                new_memory(&target, id, Some(disk))
            }
            None => new_memory(&target, id, None),
        };
        self.targets[number] = target;
        self.alive[number] = true;
        true
    }

    /// The nodes that are alive.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        (0..).zip(&self.alive).filter(|(_, alive)| **alive).map(|(id, _)| NodeId(id))
    }

    /// The memory of a node.
    pub fn node_memory(&self, node: NodeId) -> &NodeMemory {
        &self.node_memories[usize::from(node.0)]
    }

    /// The CRC32C of a page of an extent, as the node has it.
    pub fn crc_of(&self, extent: &Extent, index: u32) -> u32 {
        let node_memory = self.node_memory(extent.node);
        let mut page = [0; PAGE_BYTES];
        let offset = page_of(extent, index).addr - node_memory.region.base;
        self.data_of(usize::from(extent.node.0)).read(usize::try_from(offset).expect("small"), &mut page);
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &page).try_into().expect("32 bits")
    }

    /// Whether a node still has the bytes of an extent: it has not died since they were written.
    pub fn holds(&self, extent: &Extent) -> bool {
        let node = usize::from(extent.node.0);
        let node_memory = &self.node_memories[node];
        let mut entry = [0; 8];
        let chunk =
            node_memory.layout.chunk_of(extent.addr - node_memory.region.base).expect("it is of a pool");
        let grant = Grant { chunk, class: extent.class, key: extent.key };
        let at = node_memory.layout.word_at(WordAt::key_of(grant));
        node_memory.memory.read(usize::try_from(at).expect("small"), &mut entry);
        self.alive[node] && KeyEntry(u64::from_le_bytes(entry)).key() == extent.key
    }

    /// Drops a sender. Its operations in flight may take long.
    pub fn close(&self, sender: Sender, rng: &mut Rng) {
        let factor = STRAY_FACTORS[rng.index(STRAY_FACTORS.len())];
        self.fabric.slow(Host(SENDER), self.sender_factor * factor);
        drop(sender);
        self.fabric.slow(Host(SENDER), self.sender_factor);
    }

    /// Makes a node slow, or ends its slowness. Returns whether a node is slow now.
    pub fn slow(&mut self, rng: &mut Rng) -> bool {
        if let Some(node) = self.slow.take() {
            self.fabric.slow_node(node, 1);
            return false;
        }
        let node = node_of(&self.nodes, rng.index(self.targets.len()));
        self.fabric.slow_node(node, self.slow_factor);
        self.slow = Some(node);
        true
    }

    /// Flips a bit of stored bytes. With replicas it is always the same node, so that the other
    /// replicas are good.
    pub fn damage(&mut self, rng: &mut Rng) -> bool {
        let has_copies = self.policy().copies() > 1;
        let before = self.damaged.iter().position(|damaged| *damaged).filter(|_| has_copies);
        let node = before.unwrap_or_else(|| rng.index(self.node_memories.len()));
        let memory = self.data_of(node);
        let data = usize::try_from(self.node_memories[node].layout.data_at()).expect("small");
        let used = |at: usize| {
            let mut word = [0; 8];
            memory.read(data + at * PAGE_BYTES, &mut word);
            word != [0; 8]
        };
        let pages = memory.len().saturating_sub(data) / PAGE_BYTES;
        let Some((page, _)) = super::memory::random_run(rng, pages, 1, used) else {
            return false;
        };
        let offset = data + page * PAGE_BYTES + rng.index(PAGE_BYTES);
        let mut byte = [0];
        memory.read(offset, &mut byte);
        memory.write(offset, &[byte[0] ^ 1 << rng.index(8)]);
        self.damaged[node] = true;
        true
    }

    /// Allocates all free memory for another host. With replicas, often not on all nodes, so that
    /// some replicas can be created.
    pub fn fill_up(&mut self, rng: &mut Rng) {
        let mut nodes: Vec<_> = self.other_host.nodes().collect();
        // Often the disk node has room for what memory nodes refuse.
        if let Some(disk) = &mut self.disk
            && disk.rng.chance(3, 4)
        {
            nodes.retain(|node| *node != disk.node);
        }
        if self.replicas > 1 && rng.chance(3, 4) {
            nodes.remove(rng.index(nodes.len()));
        }
        for node in nodes {
            for k in [9, 7, 5, 2, 0] {
                let class = SizeClass::new(k).expect("a valid class");
                while let Ok(extent) = self.other_host.allocate(node, class) {
                    self.other_extents.push(extent);
                }
            }
        }
    }

    pub fn is_full(&self) -> bool {
        !self.other_extents.is_empty()
    }

    /// Frees the memory of the other host.
    pub fn free_room(&mut self) {
        for extent in std::mem::take(&mut self.other_extents) {
            let held = self.holds(&extent);
            let freed = self.other_host.free(extent);
            assert!(freed.is_ok() || !held, "{freed:?}");
        }
    }

    /// Runs the leak scan on the suspected nodes that can be reached. Returns the number of extents
    /// and half-open spans that it freed.
    pub fn scan_for_leaks(&mut self) -> u64 {
        let mut found = 0;
        for node in self.leak_detector.pop_suspects() {
            match self.scan_node(node) {
                Some(recovered) => found += recovered.extents + recovered.spans,
                // The node is scanned later.
                None => self.leak_detector.suspect_leak(node),
            }
        }
        found
    }

    fn scan_node(&self, node: NodeId) -> Option<Recovered> {
        let endpoint = self.connector(SENDER).connect_without_waiting(node).ok()?;
        let mut pool =
            PoolClient::with_leak_detector(Host(SENDER), Tenant(0), Arc::clone(&self.leak_detector));
        pool.add_node(node, endpoint).ok()?;
        self.leak_detector.scan(&mut pool, node, |pause| pause == ScanProgress::NextPart).ok()?
    }

    /// Makes all nodes reachable, and runs the leak scan on all suspected nodes. Returns the number
    /// of freed leaks.
    pub fn scan_all_for_leaks(&mut self) -> u64 {
        self.absence.iter().for_each(|absence| absence.end(&self.fabric));
        for host in [SENDER, FETCHERS] {
            for node in 0..self.targets.len() {
                self.fabric.partition(Host(host), node_of(&self.nodes, node), false);
            }
        }
        self.cut = None;
        // Nodes that have fenced our host accept a new epoch.
        self.epoch += 1;
        self.scan_for_leaks()
    }

    /// Suspects leaks on all nodes, because a new agent does not know the extents that the previous
    /// one leaked there.
    pub fn suspect_all(&mut self) {
        self.leak_detector = Arc::default();
        (0..).zip(&self.targets).for_each(|(id, _)| self.leak_detector.suspect_leak(NodeId(id)));
    }

    /// Bytes in use on nodes that are alive.
    pub fn used_bytes(&self) -> u64 {
        let mut pool = self.pool(3);
        let nodes: Vec<NodeId> = pool.nodes().collect();
        nodes
            .into_iter()
            .map(|node| {
                pool.refresh(node).expect("it is alive");
                pool.total_bytes(node) - pool.free_bytes(node)
            })
            .sum()
    }
}
