//! A memory node of the simulation: its process, its memory, its lease, and the hosts that it
//! fences.

use std::collections::BTreeMap;

use aquifer_directory::names::{self, AgentRecord, LifeRecord, NodeRecord};
use aquifer_directory::sim::SimDirectory;
use aquifer_directory::{Compare, Directory, DirectoryError, KeyOperation, Lease, Transaction};
use aquifer_fabric::sim::{SimFabric, SimTarget};
use aquifer_fabric::{Host, Target};
use aquifer_node::LEASE_TTL;
use aquifer_node::fences::LiveHosts;
use aquifer_node::recovered_hosts::fence_recovered;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{NodeId, NodeMemory};

use super::machine::Acceptors;

/// Sections of a node.
const SECTIONS: u64 = 2;
/// Time between two absences up to which hosts may take them for one, in milliseconds.
const NOTICED_MS: u64 = 10_000;
/// Interval between keep-alives, in milliseconds.
const RENEWAL_MS: u64 = LEASE_TTL.as_secs() * 1_000 / 3;

#[derive(Debug)]
pub struct SimNode {
    pub id: NodeId,
    pub directory: SimDirectory,
    pub is_cut: bool,
    pub is_running: bool,
    pub is_stopped: bool,
    pub kept_ms: u64,
    pub memory: Option<LentMemory>,
    /// Time since which no host reaches the process, in milliseconds.
    pub unreachable_since_ms: Option<u64>,
    /// Begin and end of the last absence, in milliseconds.
    last_absence_ms: Option<(u64, u64)>,
    absences: Absences,
    /// Time at which the process was last stopped or killed.
    process_ended_ms: u64,
    fabric: SimFabric,
    acceptors: Acceptors,
    lease: Option<Lease>,
    renewed_ms: u64,
    hosts: LiveHosts,
    /// The version of the record of recovered hosts up to which they are fenced.
    recovered_version: u64,
    /// Hosts that processes with this memory have seen, kept with the memory.
    seen: BTreeMap<Host, u64>,
}

/// One life of a node's memory.
#[derive(Debug)]
pub struct LentMemory {
    pub target: SimTarget,
    pub life: u64,
    _memory: NodeMemory,
}

/// Counts of a node's absences: all, and those of at least the time for which its memory is kept.
#[derive(Clone, Copy, Debug, Default)]
struct Absences {
    all: u64,
    long: u64,
}

/// A node's life and absences at the time when a host connected.
#[derive(Clone, Copy, Debug)]
pub struct NodeSnapshot {
    pub id: NodeId,
    pub life: u64,
    absences: Absences,
}

impl SimNode {
    /// A node that has not started.
    pub fn new(
        fabric: &SimFabric,
        acceptors: &Acceptors,
        id: NodeId,
        directory: SimDirectory,
        kept_ms: u64,
    ) -> Self {
        Self {
            id,
            directory,
            is_cut: false,
            is_running: false,
            is_stopped: false,
            kept_ms,
            memory: None,
            unreachable_since_ms: None,
            last_absence_ms: None,
            absences: Absences::default(),
            process_ended_ms: 0,
            fabric: fabric.clone(),
            acceptors: acceptors.clone(),
            lease: None,
            renewed_ms: 0,
            hosts: LiveHosts::default(),
            recovered_version: 0,
            seen: BTreeMap::new(),
        }
    }

    /// Starts a process, with the memory of the previous process if that is kept.
    pub fn start(&mut self, now_ms: u64) -> Result<(), DirectoryError> {
        let lease = self.directory.lease_grant(LEASE_TTL)?;
        let live = self.list_hosts()?;
        if self.memory.is_none() {
            let target = self.fabric.add_node();
            let memory =
                NodeMemory::create(&target, self.id, SECTIONS * SECTION_BYTES).expect("a small pool");
            self.memory = Some(LentMemory { target, life: lease.epoch, _memory: memory });
            self.seen.clear();
        }
        let target = self.memory.as_ref().expect("the node has memory").target.clone();
        self.fabric.restart_node(target.node());
        self.seen.iter().for_each(|(host, epoch)| target.fence(*host, epoch.saturating_sub(1)));
        self.hosts = LiveHosts::new(self.seen.clone());
        // A process that cannot fence opens nothing.
        let fenced = fence_recovered(&self.directory, &target);
        self.recovered_version = fenced.inspect_err(|_| self.fabric.crash_node(target.node()))?;
        self.acceptors.open(self.address(), target);
        self.is_running = true;
        self.continue_reachable(now_ms);
        self.apply(&live);
        (self.lease, self.renewed_ms) = (Some(lease), now_ms);
        if self.put_record(lease).is_err() {
            self.lease = None;
        }
        Ok(())
    }

    /// Kills the process. The keeper holds memory that is kept.
    pub fn kill(&mut self, now_ms: u64) {
        if !self.is_running {
            return;
        }
        if let Some(memory) = &self.memory {
            self.fabric.stop_node(memory.target.node(), false);
            self.fabric.crash_node(memory.target.node());
        }
        (self.is_running, self.is_stopped, self.lease) = (false, false, None);
        self.note_unreachable(now_ms);
        if self.kept_ms == 0 {
            self.memory = None;
        }
    }

    /// Suspends the process, or resumes it.
    pub fn set_stopped(&mut self, is_stopped: bool, now_ms: u64) {
        if !self.is_running || self.is_stopped == is_stopped {
            return;
        }
        self.is_stopped = is_stopped;
        let memory = self.memory.as_ref().expect("the node runs");
        self.fabric.stop_node(memory.target.node(), is_stopped);
        if is_stopped {
            self.note_unreachable(now_ms);
        } else {
            self.continue_reachable(now_ms);
        }
    }

    /// Drops memory that the keeper has held for its time.
    pub fn keep(&mut self, now_ms: u64) {
        if !self.is_running && now_ms - self.process_ended_ms >= self.kept_ms {
            self.memory = None;
        }
    }

    fn note_unreachable(&mut self, now_ms: u64) {
        let since_ms = match self.last_absence_ms {
            Some((since_ms, back_ms)) if now_ms - back_ms <= NOTICED_MS => since_ms,
            _ => now_ms,
        };
        self.unreachable_since_ms.get_or_insert(since_ms);
        self.process_ended_ms = now_ms;
        self.absences.all += 1;
    }

    fn continue_reachable(&mut self, now_ms: u64) {
        let Some(since_ms) = self.unreachable_since_ms.take() else { return };
        self.last_absence_ms = Some((since_ms, now_ms));
        self.absences.long += u64::from(now_ms - since_ms >= self.kept_ms);
    }

    /// A snapshot for a host that connects now; `None` without memory.
    pub fn seen(&self) -> Option<NodeSnapshot> {
        let life = self.memory.as_ref()?.life;
        Some(NodeSnapshot { id: self.id, life, absences: self.absences })
    }

    /// Whether a host that has connected to the node may treat its memory there as lost.
    pub fn may_be_lost(&self, seen: &NodeSnapshot, now_ms: u64) -> bool {
        if self.memory.as_ref().is_none_or(|memory| memory.life != seen.life) {
            return true;
        }
        if self.kept_ms == 0 {
            return self.absences.all > seen.absences.all;
        }
        let is_long = self.unreachable_since_ms.is_some_and(|since| now_ms - since >= self.kept_ms);
        is_long || self.absences.long > seen.absences.long
    }

    /// The state of the node, for error messages.
    pub fn describe(&self) -> String {
        format!(
            "kept for {} ms, running: {}, stopped: {}, cut off: {}, unreachable since {:?} ms, {:?}",
            self.kept_ms,
            self.is_running,
            self.is_stopped,
            self.is_cut,
            self.unreachable_since_ms,
            self.absences
        )
    }

    /// Whether hosts reach the process.
    pub fn serves(&self) -> bool {
        self.is_running && !self.is_stopped
    }

    /// Whether the directory has the node.
    pub fn has_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Keeps the lease alive, and fences hosts whose leases have ended. Returns the fences.
    pub fn act(&mut self, now_ms: u64) -> Result<u64, DirectoryError> {
        if !self.serves() {
            return Ok(0);
        }
        if self.renewed_ms + RENEWAL_MS <= now_ms || self.lease.is_none() {
            self.renew(now_ms)?;
        }
        let live = self.list_hosts()?;
        Ok(self.apply(&live))
    }

    fn renew(&mut self, now_ms: u64) -> Result<(), DirectoryError> {
        let is_kept = match self.lease.map(|lease| self.directory.lease_keep_alive(lease.id)) {
            Some(Ok(())) => true,
            None | Some(Err(DirectoryError::LeaseGone(_))) => false,
            Some(Err(error)) => return Err(error),
        };
        if !is_kept {
            self.lease = None;
            let lease = self.directory.lease_grant(LEASE_TTL)?;
            self.put_record(lease)?;
            self.lease = Some(lease);
        }
        self.renewed_ms = now_ms;
        Ok(())
    }

    fn list_hosts(&self) -> Result<BTreeMap<Host, u64>, DirectoryError> {
        let listing = self.directory.list(names::AGENTS)?;
        let records = listing.entries.iter().map(names::decode::<AgentRecord>);
        records.map(|record| record.map(|record| (Host(record.host), record.epoch))).collect()
    }

    /// Fences hosts by a listing.
    fn apply(&mut self, live: &BTreeMap<Host, u64>) -> u64 {
        self.seen.extend(live);
        let target = &self.memory.as_ref().expect("the node runs").target;
        let fences = self.hosts.replace(live);
        fences.iter().for_each(|fence| target.fence(fence.host, fence.epoch));
        fences.len() as u64
    }

    fn address(&self) -> String {
        format!("node-{}", self.id.0)
    }

    /// Writes the records of the node and of its memory's life. Fences recovered hosts before.
    fn put_record(&mut self, lease: Lease) -> Result<(), DirectoryError> {
        let (id, kept_ms) = (self.id.0, self.kept_ms);
        let epoch = self.memory.as_ref().expect("the node runs").life;
        let record = NodeRecord {
            id,
            fabric: "shm".into(),
            address: self.address(),
            memory_bytes: SECTIONS * SECTION_BYTES,
            memory_bytes_max: SECTIONS * SECTION_BYTES,
            requested_memory_bytes: SECTIONS * SECTION_BYTES,
            resize_blocker: None,
            recalled_bytes: 0,
            recalled_from: Vec::new(),
            kept_ms,
            epoch,
            is_disk: false,
        };
        let operations = vec![
            KeyOperation::put(names::node_key(id), names::encode(&record), Some(lease.id)),
            KeyOperation::put(names::life_key(id), names::encode(&LifeRecord::of(&record)), None),
        ];
        loop {
            let compares = vec![Compare::version(names::RECOVERED_HOSTS, self.recovered_version)];
            let operations = operations.clone();
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(());
            }
            let target = &self.memory.as_ref().expect("the node runs").target;
            self.recovered_version = fence_recovered(&self.directory, target)?;
        }
    }
}
