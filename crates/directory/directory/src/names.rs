//! The keys that Aquifer uses, and the records that they hold.
//!
//! A record is JSON, so that people can read it.
//! `docs/formats/directory.md` lists keys and fields; the names of fields in JSON are public.

mod recalled;
mod recoveries;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::model::{Compare, DirectoryEntry, KeyOperation, Lease, Transaction, TransactionOutcome};
use crate::mutation::Mutation;
use crate::{Directory, DirectoryError};
pub use recalled::{
    RECALLED, RECALLED_RUNS_MAX, RecalledRecord, RecalledRun, recalled_key, recalled_records,
};
pub use recoveries::{RecoveredHosts, claim_dead_host, dead_hosts, finish_recovery, recovered_hosts};

/// Prefix of the keys of live memory nodes.
pub const NODES: &str = "nodes/";
/// Prefix of the keys of live host agents.
pub const AGENTS: &str = "agents/";
/// Prefix of the keys of hosts that may own memory, alive or dead.
///
/// A key stays until its host owns no memory any more.
pub const HOLDERS: &str = "holders/";
/// Prefix of the keys of node memory that exists, whether or not its node runs.
///
/// A key stays until the memory is gone.
pub const LIVES: &str = "lives/";
/// Prefix of the keys of live services of heaps.
pub const HEAPS: &str = "heaps/";
/// Prefix of the keys of live hosts that have segments.
pub const SEGMENT_HOSTS: &str = "segment-hosts/";
/// Prefix of the keys of processes that have segments.
pub const SEGMENT_PROCESSES: &str = "segment-processes/";
/// Prefix of the keys of the addresses of segments.
pub const SEGMENT_RANGES: &str = "segment-ranges/";
/// Prefix of the keys of copies of segments.
pub const SEGMENT_COPIES: &str = "segment-copies/";
/// Prefix of the keys of segments.
pub const SEGMENTS: &str = "segments/";
/// Prefix of the keys of caches: their settings, servers and partitions.
pub const CACHES: &str = "caches/";
/// Prefix of the keys with the memory that nodes are requested to lend.
pub const REQUESTED_MEMORY: &str = "wanted/";
/// The key of the hosts that were recovered.
pub const RECOVERED_HOSTS: &str = "hosts/recovered";
/// The key of the host number at which the next search for a free number starts.
const NEXT_HOST: &str = "hosts/next";

/// The greatest host number.
///
/// The pool's log has 12 bits for it, and the two greatest numbers of 12 bits are the node's own
/// (`Host::NODE` and `Host::HEAPS`).
pub const HOST_MAX: u16 = 4093;

/// Attempts to claim a host number while other hosts claim numbers at the same time.
const CLAIM_ATTEMPTS_MAX: u32 = 256;

/// The key of a memory node.
#[must_use]
pub fn node_key(id: u16) -> String {
    format!("{NODES}{id}")
}

/// The key of the service of heaps on a node.
#[must_use]
pub fn heaps_key(node: u16) -> String {
    format!("{HEAPS}{node}")
}

/// The key of a host that has segments.
#[must_use]
pub fn segment_host_key(host: u16) -> String {
    format!("{SEGMENT_HOSTS}{host}")
}

/// The key of a process of a tenant that has segments.
#[must_use]
pub fn segment_process_key(tenant: u32, process: &str) -> String {
    format!("{SEGMENT_PROCESSES}{tenant}/{process}")
}

/// The key of the addresses of a tenant's segments.
#[must_use]
pub fn segment_ranges_key(tenant: u32) -> String {
    format!("{SEGMENT_RANGES}{tenant}")
}

/// The key of the copies of a segment of a tenant.
#[must_use]
pub fn segment_copies_key(tenant: u32, id: u64) -> String {
    format!("{SEGMENT_COPIES}{tenant}/{id}")
}

/// The key of a segment of a tenant.
#[must_use]
pub fn segment_key(tenant: u32, id: u64) -> String {
    format!("{SEGMENTS}{tenant}/{id}")
}

/// The key of a host's agent.
#[must_use]
pub fn agent_key(host: u16) -> String {
    format!("{AGENTS}{host}")
}

/// The key of a host that may own memory.
#[must_use]
pub fn holder_key(host: u16) -> String {
    format!("{HOLDERS}{host}")
}

/// The key of a node's memory.
#[must_use]
pub fn life_key(node: u16) -> String {
    format!("{LIVES}{node}")
}

/// The key of the memory that a node is requested to lend.
#[must_use]
pub fn requested_memory_key(node: u16) -> String {
    format!("{REQUESTED_MEMORY}{node}")
}

/// The host number in an agent's key; `None` if it is another key.
#[must_use]
pub fn host_of_agent_key(key: &str) -> Option<u16> {
    let number: u16 = key.strip_prefix(AGENTS)?.parse().ok()?;
    let is_canonical = agent_key(number) == key || Mutation::AcceptOtherDigits.is_active();
    (is_canonical && (1..=HOST_MAX).contains(&number)).then_some(number)
}

/// A memory node, at `nodes/{id}` while the node's lease lasts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The node's number.
    pub id: u16,
    /// The fabric that reaches the node's memory, such as `shm`.
    pub fabric: String,
    /// The node's address in that fabric.
    pub address: String,
    /// Memory that the node lends.
    pub memory_bytes: u64,
    /// The most memory that the node can be requested to lend.
    #[serde(default)]
    pub memory_bytes_max: u64,
    /// The memory that the node was requested to lend when it wrote this record.
    #[serde(default, rename = "memory_bytes_wanted")]
    pub requested_memory_bytes: u64,
    /// The reason why the node does not lend the requested memory, if known.
    #[serde(default, rename = "held_up")]
    pub resize_blocker: Option<ResizeBlocker>,
    /// Memory in use that the node recalls, as of at most a second ago.
    #[serde(default)]
    pub recalled_bytes: u64,
    /// The users that have this memory, those with the most first, and at most
    /// [`MEMORY_HOLDERS_MAX`] of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recalled_from: Vec<MemoryHolder>,
    /// Time for which the memory outlives the node's process, in milliseconds; 0 if it does not.
    #[serde(default)]
    pub kept_ms: u64,
    /// Fencing epoch of the node's first lease with this memory.
    pub epoch: u64,
    /// Whether what the node lends is on a disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_disk: bool,
}

/// Most users in [`NodeRecord::recalled_from`].
pub const MEMORY_HOLDERS_MAX: usize = 8;

/// A user of a node's memory, and how much the user has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryHolder {
    /// The user's id; `None` for heaps.
    pub tenant: Option<u32>,
    /// Bytes, in units of spans.
    pub bytes: u64,
}

/// Why a memory node does not lend the memory that it is requested to lend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResizeBlocker {
    /// Hosts use the memory that the node is to withdraw.
    #[error(
        "the rest is in use; pages are moved to other nodes, and what cannot move must be freed by its users"
    )]
    InUse,
    /// The machine has too little free memory.
    #[error("its machine has no more free memory; the node continues when there is some")]
    NoMemory,
    /// Memory that is registered with an RDMA device cannot be withdrawn.
    #[error("verbs pins memory at registration: restart the node with another --memory")]
    Pinned,
    /// The resize failed with an error.
    #[error("resizing fails; the node's log has the error")]
    Failing,
    /// A reason that a later version writes.
    #[error("the node reports a reason that this version does not know")]
    #[serde(other)]
    Other,
}

/// The memory that a node is requested to lend, at `wanted/{node}`.
///
/// The request is valid for one life of the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RequestedMemory {
    /// The node's number.
    pub node: u16,
    /// The life's [`NodeRecord::epoch`].
    pub epoch: u64,
    /// The requested memory.
    pub memory_bytes: u64,
    /// The memory that was requested before, if the node is being drained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drained_from: Option<u64>,
    /// Whether the node ends at once, and what is still in use is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_forced: bool,
}

impl RequestedMemory {
    /// Creates a request to a life of a node, which is not a drain.
    #[must_use]
    pub const fn new(node: u16, epoch: u64, memory_bytes: u64) -> Self {
        Self { node, epoch, memory_bytes, drained_from: None, is_forced: false }
    }
}

/// A life: one lifetime of a node's memory.
///
/// A life begins when a process of the node creates the memory, and ends when that memory is gone.
/// The identity of a life is the node's number and the fencing epoch of the node's first lease in
/// it. A process that takes over the memory of the previous process continues the life. A process
/// that creates new memory begins another life, without the extents of hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeLife {
    /// The node's number.
    pub node: u16,
    /// The life's [`NodeRecord::epoch`].
    pub epoch: u64,
    /// The life's [`NodeRecord::kept_ms`].
    #[serde(default)]
    pub kept_ms: u64,
}

impl NodeLife {
    /// Whether both are the same life of the same node.
    #[must_use]
    pub const fn is_same(&self, other: &Self) -> bool {
        self.node == other.node && self.epoch == other.epoch
    }
}

/// A life and the address of its node, at `lives/{node}`.
///
/// A host process that starts while the node is cut off from the directory finds the node by this
/// record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LifeRecord {
    /// The life.
    #[serde(flatten)]
    pub life: NodeLife,
    /// The node's [`NodeRecord::fabric`]; empty if an earlier version has written the record.
    #[serde(default)]
    pub fabric: String,
    /// The node's [`NodeRecord::address`]; empty if an earlier version has written the record.
    #[serde(default)]
    pub address: String,
}

impl LifeRecord {
    /// The record of the life of a node with this record.
    #[must_use]
    pub fn of(record: &NodeRecord) -> Self {
        let NodeRecord { id, epoch, kept_ms, .. } = *record;
        let life = NodeLife { node: id, epoch, kept_ms };
        Self { life, fabric: record.fabric.clone(), address: record.address.clone() }
    }
}

/// A service of heaps, at `heaps/{node}` while its lease lasts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeapsRecord {
    /// The number of the service's node.
    pub node: u16,
    /// The TCP address at which clients reach the service.
    pub address: String,
    /// The address of the RDMA device that serves reads, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Memory that all heaps together may take.
    pub memory_bytes: u64,
    /// Time for which the heaps outlive the process, in milliseconds.
    pub kept_ms: u64,
    /// Fencing epoch of the lease.
    pub epoch: u64,
}

/// A host that has segments, at `segment-hosts/{host}` while its lease lasts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SegmentHostRecord {
    /// The number of the host.
    pub host: u16,
    /// Fencing epoch of the lease.
    pub epoch: u64,
    /// The TCP address at which other hosts reach the host's segments; empty if they cannot.
    pub address: String,
}

/// A host that may own memory, at `holders/{host}`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HolderRecord {
    /// The host's number.
    pub host: u16,
    /// The host's [`AgentRecord::claim_epoch`].
    #[serde(rename = "claimed")]
    pub claim_epoch: u64,
    /// Time after the end of its lease in which the host may resume, in milliseconds.
    pub grace_ms: u64,
    /// The lives in which a dead host may still own memory; `None` if it may in any.
    #[serde(rename = "left_in")]
    pub remaining_lives: Option<Vec<NodeLife>>,
}

/// A host that may own memory and whose lease has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeadHost {
    /// The record of the host.
    pub record: HolderRecord,
    /// The version of the record, which changes if the host resumes.
    pub version: u64,
}

/// A host agent, at `agents/{host}` while the agent's lease lasts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AgentRecord {
    /// The host's number.
    pub host: u16,
    /// The socket at which programs reach the agent.
    pub address: String,
    /// Fencing epoch of the agent's lease.
    pub epoch: u64,
    /// The epoch under which the number was claimed; agents that resume the host keep it.
    #[serde(rename = "claimed")]
    pub claim_epoch: u64,
    /// Whether the holder of the number is a recovery, which frees the memory of a dead host.
    #[serde(rename = "is_successor")]
    pub is_recovery: bool,
}

/// Reads a record.
///
/// # Errors
/// [`DirectoryError::Protocol`] if the value is not such a record.
pub fn decode<T: DeserializeOwned>(entry: &DirectoryEntry) -> Result<T, DirectoryError> {
    serde_json::from_slice(&entry.value).map_err(|error| DirectoryError::Protocol {
        why: format!("the record at \"{}\" is not valid: {error}", entry.key),
    })
}

/// Writes a record as a value.
#[must_use]
pub fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("plain structs are JSON")
}

/// All live memory nodes.
///
/// # Errors
/// An error of the directory, or a record that is not valid.
pub fn nodes(directory: &dyn Directory) -> Result<Vec<NodeRecord>, DirectoryError> {
    directory.list(NODES)?.entries.iter().map(decode).collect()
}

/// All live services of heaps.
///
/// # Errors
/// An error of the directory, or a record that is not valid.
pub fn heaps(directory: &dyn Directory) -> Result<Vec<HeapsRecord>, DirectoryError> {
    directory.list(HEAPS)?.entries.iter().map(decode).collect()
}

/// Writes the record of a service of heaps, which lasts as long as the lease. Replaces the record
/// of an earlier process of the same node: by the keeper, only one process owns the heaps.
///
/// # Errors
/// An error of the directory.
pub fn register_heaps(
    directory: &dyn Directory,
    lease: Lease,
    record: &HeapsRecord,
) -> Result<(), DirectoryError> {
    let operations = vec![KeyOperation::put(heaps_key(record.node), encode(record), Some(lease.id))];
    directory.transaction(&Transaction { compares: Vec::new(), operations }).map(drop)
}

/// The life of each node whose memory exists, whether or not the node runs.
///
/// # Errors
/// An error of the directory, or a record that is not valid.
pub fn lives(directory: &dyn Directory) -> Result<Vec<LifeRecord>, DirectoryError> {
    directory.list(LIVES)?.entries.iter().map(decode).collect()
}

/// All live host agents, without recoveries.
///
/// # Errors
/// An error of the directory, or a record that is not valid.
pub fn agents(directory: &dyn Directory) -> Result<Vec<AgentRecord>, DirectoryError> {
    let records = directory.list(AGENTS)?;
    let records = records.entries.iter().map(decode::<AgentRecord>);
    records.filter(|record| !record.as_ref().is_ok_and(|record| record.is_recovery)).collect()
}

/// Writes the record of a memory node, which lasts as long as the lease.
///
/// # Errors
/// [`DirectoryError::Taken`] if a live node has the number; an error of the directory.
pub fn register_node(
    directory: &dyn Directory,
    lease: Lease,
    record: &NodeRecord,
) -> Result<(), DirectoryError> {
    let key = node_key(record.id);
    let transaction = Transaction {
        compares: vec![Compare::absent(&key)],
        operations: vec![KeyOperation::put(&key, encode(record), Some(lease.id))],
    };
    match directory.transaction(&transaction)? {
        TransactionOutcome::Committed { .. } => Ok(()),
        TransactionOutcome::Conflict { .. } => Err(DirectoryError::Taken { key }),
    }
}

/// Takes over a host's number under a new lease, for an agent that resumes the host `before`.
///
/// The new epoch is greater, so nodes refuse operations of the previous agent that are still in
/// flight.
///
/// # Errors
/// [`DirectoryError::Taken`] if another process has claimed the number, or a recovery has freed
/// the host's memory; an error of the directory.
pub fn resume_host(
    directory: &dyn Directory,
    lease: Lease,
    before: &AgentRecord,
    grace_ms: u64,
) -> Result<AgentRecord, DirectoryError> {
    let (key, holder) = (agent_key(before.host), holder_key(before.host));
    let record = AgentRecord { epoch: lease.epoch, ..before.clone() };
    let mut attempts = 0;
    loop {
        let holder_compare = match directory.get(&holder)? {
            Some(entry) if decode::<HolderRecord>(&entry)?.claim_epoch == before.claim_epoch => {
                Compare::version(&holder, entry.version)
            }
            _ => return Err(DirectoryError::Taken { key: holder }),
        };
        let agent_compare = match directory.get(&key)? {
            // The previous lease has ended, and no other process has claimed the number.
            None => Compare::absent(&key),
            Some(entry) if decode::<AgentRecord>(&entry)?.claim_epoch == before.claim_epoch => {
                Compare::version(&key, entry.version)
            }
            Some(_) => return Err(DirectoryError::Taken { key }),
        };
        let compares = vec![holder_compare, agent_compare];
        let written = write_host(directory, lease, record.clone(), (grace_ms, None), compares);
        attempts += 1;
        // A conflict can also mean that the previous lease ended after the read of its key.
        if !matches!(written, Err(DirectoryError::Taken { .. })) || attempts == CLAIM_ATTEMPTS_MAX {
            return written;
        }
    }
}

/// Writes a host's agent record under its lease, and its holder record without a lease.
fn write_host(
    directory: &dyn Directory,
    lease: Lease,
    record: AgentRecord,
    (grace_ms, remaining_lives): (u64, Option<Vec<NodeLife>>),
    compares: Vec<Compare>,
) -> Result<AgentRecord, DirectoryError> {
    let key = agent_key(record.host);
    let holder =
        HolderRecord { host: record.host, claim_epoch: record.claim_epoch, grace_ms, remaining_lives };
    let operations = vec![
        KeyOperation::put(&key, encode(&record), Some(lease.id)),
        KeyOperation::put(holder_key(record.host), encode(&holder), None),
    ];
    match directory.transaction(&Transaction { compares, operations })? {
        TransactionOutcome::Committed { .. } => Ok(record),
        TransactionOutcome::Conflict { .. } => Err(DirectoryError::Taken { key }),
    }
}

/// Claims a free host number, and writes the agent's record, which lasts as long as the lease.
///
/// For `grace_ms` after the end of the lease, an agent may resume the host.
/// The number of a dead host is not free until the host's memory is freed, because the pool's
/// logs name owners by their numbers.
/// Numbers are claimed in ascending order and start over at 1, so a number is reused late.
///
/// # Errors
/// [`DirectoryError::Taken`] if no number is free; an error of the directory.
pub fn claim_host(
    directory: &dyn Directory,
    lease: Lease,
    address: &str,
    grace_ms: u64,
) -> Result<AgentRecord, DirectoryError> {
    for _ in 0..CLAIM_ATTEMPTS_MAX {
        let next = directory.get(NEXT_HOST)?;
        let (start, version) = match &next {
            Some(entry) => (decode::<u16>(entry)?.clamp(1, HOST_MAX), entry.version),
            None => (1, 0),
        };
        // The number counts even if the record is invalid.
        let number = |key: &str| key.strip_prefix(HOLDERS)?.parse::<u16>().ok();
        let holders = directory.list(HOLDERS)?.entries;
        let taken: Vec<u16> = holders.iter().filter_map(|entry| number(&entry.key)).collect();
        let Some(host) = (start..=HOST_MAX).chain(1..start).find(|host| !taken.contains(host)) else { break };
        let record = AgentRecord {
            host,
            address: address.to_owned(),
            epoch: lease.epoch,
            claim_epoch: lease.epoch,
            is_recovery: false,
        };
        let holder = HolderRecord { host, claim_epoch: lease.epoch, grace_ms, remaining_lives: None };
        let following = if host == HOST_MAX { 1 } else { host + 1 };
        let transaction = Transaction {
            compares: vec![Compare::version(NEXT_HOST, version), Compare::absent(holder_key(host))],
            operations: vec![
                KeyOperation::put(agent_key(host), encode(&record), Some(lease.id)),
                KeyOperation::put(holder_key(host), encode(&holder), None),
                KeyOperation::put(NEXT_HOST, encode(&following), None),
            ],
        };
        if directory.transaction(&transaction)?.is_committed() {
            return Ok(record);
        }
    }
    Err(DirectoryError::Taken { key: format!("{AGENTS}1..={HOST_MAX}") })
}
