//! The hosts, the nodes, the directory, and time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord};
use aquifer_directory::sim::{DirectoryWorld, SimDirectory};
use aquifer_directory::{Directory, DirectoryRetries};
use aquifer_fabric::sim::{Rng, SimFabric, SimOptions};
use aquifer_host::membership::{Renewal, renew};
use aquifer_pool::NodeId;

use super::counts::MembershipCounts;
use super::host::SimHost;
use super::link::OrphanedExtents;
use super::machine::{Acceptors, SimMachine};
use super::node::SimNode;

/// Interval between keep-alives of a host, in milliseconds.
const RENEWAL_MS: u64 = 3_000;
/// Timeout of an operation in nanoseconds, as over TCP.
const ANSWER_TIMEOUT_NS: u64 = 10_000_000_000;
/// Time for the operations of a turn in nanoseconds; they take microseconds.
const TURN_NS: u64 = 100_000_000;

/// The grace times of a schedule, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct GracePeriods {
    pub host_ms: u64,
    /// Grace time of each node; 0 for memory that is not kept.
    pub nodes_ms: [u64; 3],
}

/// The machine of a host.
#[derive(Debug)]
pub struct HostMachine {
    pub machine: Arc<SimMachine>,
    /// The process of the host; `None` if none runs.
    pub host: Option<SimHost>,
    /// The record and the extents of an ended process, for the next one.
    pub left: Option<(AgentRecord, Vec<OrphanedExtents>)>,
    /// The attempts of the next process to take over.
    pub takeover: Option<Takeover>,
    pub is_cut: bool,
    pub is_stopped: bool,
    pub is_suspended: bool,
}

/// A process that takes over from the previous one.
#[derive(Debug)]
pub struct Takeover {
    pub retries: DirectoryRetries,
    pub began_ms: u64,
    pub attempts: u64,
}

impl HostMachine {
    pub fn is_halted(&self) -> bool {
        self.is_stopped || self.is_suspended
    }
}

#[derive(Debug)]
pub struct World {
    pub rng: Rng,
    pub fabric: SimFabric,
    pub directory: DirectoryWorld,
    /// Access to the directory that is never cut off.
    pub direct: SimDirectory,
    pub nodes: Vec<SimNode>,
    pub machines: Vec<HostMachine>,
    pub grace: GracePeriods,
    pub now_ms: u64,
    pub all_cut: bool,
    /// Whether the directory's process is stopped: it answers nothing, and leases do not expire.
    pub is_directory_stopped: bool,
    /// The greatest epoch under which a recovery freed a host's memory, by node life and host
    /// number.
    pub freed: BTreeMap<(u64, u16), u64>,
    /// Times of deaths, in milliseconds, by the host's number and the version of its record.
    pub deaths: BTreeMap<(u16, u64), u64>,
    /// Times at which recoveries have claimed hosts, in milliseconds, by the host's number and the
    /// epoch of its own claim.
    pub claims: BTreeMap<(u16, u64), u64>,
    pub content: u64,
    pub counts: MembershipCounts,
}

impl World {
    pub fn new(seed: u64, grace: GracePeriods, nodes: u16, hosts: usize) -> Self {
        let mut rng = Rng::new(seed);
        let options = SimOptions {
            step_on_poll: true,
            has_strays: true,
            timeout_ns: ANSWER_TIMEOUT_NS,
            ..SimOptions::default()
        };
        let fabric = SimFabric::new(rng.next_u64(), options);
        fabric.limit_polls(TURN_NS);
        let directory = DirectoryWorld::new(rng.next_u64());
        let acceptors = Acceptors::default();
        let node = |id: u16| {
            let access = directory.host(100 + u64::from(id));
            let kept_ms = grace.nodes_ms[usize::from(id) - 1];
            SimNode::new(&fabric, &acceptors, NodeId(id), access, kept_ms)
        };
        let machine = || HostMachine {
            machine: SimMachine::new(&fabric, &acceptors),
            host: None,
            left: None,
            takeover: None,
            is_cut: false,
            is_stopped: false,
            is_suspended: false,
        };
        Self {
            nodes: (1..=nodes).map(node).collect(),
            machines: (0..hosts).map(|_| machine()).collect(),
            direct: directory.host(0),
            rng,
            fabric,
            directory,
            grace,
            now_ms: 0,
            all_cut: false,
            is_directory_stopped: false,
            freed: BTreeMap::new(),
            deaths: BTreeMap::new(),
            claims: BTreeMap::new(),
            content: 0,
            counts: MembershipCounts::default(),
        }
    }

    /// Whether no host and no node reaches the directory.
    pub fn is_unreachable(&self) -> bool {
        self.all_cut || self.is_directory_stopped
    }

    /// Applies the present cuts to the connections to the directory.
    pub fn apply_cuts(&self) {
        let is_unreachable = self.is_unreachable();
        for machine in &self.machines {
            if let Some(host) = &machine.host {
                host.directory.set_disconnected(machine.is_cut || is_unreachable);
            }
        }
        for node in &self.nodes {
            node.directory.set_disconnected(node.is_cut || is_unreachable);
        }
    }

    /// Advances the time and all running processes. A node acts only if `is_prompt` returns true.
    pub fn pass_time(&mut self, ms: u64, mut is_prompt: impl FnMut(&mut Rng) -> bool) -> Result<(), String> {
        self.now_ms += ms;
        if !self.is_directory_stopped {
            self.directory.advance(Duration::from_millis(ms));
        }
        self.fabric.advance_to(self.now_ms * 1_000_000);
        self.fabric.limit_polls(self.now_ms * 1_000_000 + TURN_NS);
        self.note_deaths();
        for index in 0..self.machines.len() {
            if !self.machines[index].is_suspended {
                self.machines[index].machine.advance(ms);
            }
            self.host_tick(index)?;
        }
        for index in 0..self.nodes.len() {
            self.nodes[index].keep(self.now_ms);
            if is_prompt(&mut self.rng) {
                self.node_tick(index);
            }
        }
        Ok(())
    }

    /// Advances a host: keeps its lease alive, applies changes of nodes, and polls its operations.
    pub fn host_tick(&mut self, index: usize) -> Result<(), String> {
        if self.machines[index].is_halted() {
            return Ok(());
        }
        self.renew(index)?;
        if let Some(host) = &mut self.machines[index].host {
            host.update_nodes();
        }
        self.poll_links(index)
    }

    pub fn node_tick(&mut self, index: usize) {
        // A node that is cut off fences no host.
        self.counts.fenced_by_nodes += self.nodes[index].act(self.now_ms).unwrap_or(0);
    }

    /// Keeps the lease of a host alive, if that is due. A host without a lease ends.
    fn renew(&mut self, index: usize) -> Result<(), String> {
        let now_ms = self.now_ms;
        let Some(host) = &mut self.machines[index].host else { return Ok(()) };
        if host.renewed_ms + RENEWAL_MS > now_ms {
            return Ok(());
        }
        host.renewed_ms = now_ms;
        if let Some((_, claim)) = host.worker.current() {
            // If this lease has ended, another host continues the recovery, and fences this one.
            let _ = host.directory.lease_keep_alive(claim.lease().id);
        }
        match renew(&host.directory, host.lease) {
            Renewal::Renewed => host.acknowledged_ms = now_ms,
            Renewal::Unknown(_) => {}
            Renewal::Ended => {
                self.counts.leases_lost += 1;
                if self.has_lease(index) {
                    return Err("a host with a valid lease has ended".to_owned());
                }
                self.end_host(index, true);
            }
        }
        Ok(())
    }

    /// Ends a host's process. If `is_resumed`, a next process takes over.
    pub fn end_host(&mut self, index: usize, is_resumed: bool) {
        let machine = &mut self.machines[index];
        let left = machine.host.take().map(SimHost::leave);
        machine.left = left.filter(|_| is_resumed);
        (machine.takeover, machine.is_stopped) = (None, false);
    }

    /// Whether the directory has a host's record with its epoch.
    pub fn has_lease(&self, index: usize) -> bool {
        let record = self.machines[index].host.as_ref().map(|host| &host.record).expect("the host runs");
        let agents = names::agents(&self.direct).expect("this access is never cut off");
        agents.iter().any(|agent| agent.host == record.host && agent.epoch == record.epoch)
    }

    /// Records the times of new deaths.
    pub fn note_deaths(&mut self) {
        for dead in names::dead_hosts(&self.direct).expect("this access is never cut off") {
            self.deaths.entry((dead.record.host, dead.version)).or_insert(self.now_ms);
        }
    }
}
