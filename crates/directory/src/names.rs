//! The keys that Aquifer uses, and the records behind them: JSON, so that a person can read them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::model::{Compare, Entry, Lease, Operation, Transaction, TransactionOutcome};
use crate::{Directory, DirectoryError};

/// Prefix of the memory nodes' keys.
pub const NODES: &str = "nodes/";
/// Prefix of the host agents' keys.
pub const AGENTS: &str = "agents/";
/// Prefix of the hosts that may hold memory, alive or dead: the record stays until nothing of theirs is left.
pub const HOLDERS: &str = "holders/";
/// Prefix of the memory nodes whose memory exists, present or not: the record stays until the memory is gone.
pub const LIVES: &str = "lives/";
/// Prefix of what memory nodes are asked to lend.
pub const WANTED: &str = "wanted/";
/// Where the search for a free host number goes on.
const NEXT_HOST: &str = "hosts/next";

/// The greatest host number: the pool's logs give it 12 bits, and the one above is a node's own (`Host::NODE`).
pub const HOST_MAX: u16 = 4094;

/// How often a host number is tried for, against others who take one at the same time.
const CLAIM_ATTEMPTS_MAX: u32 = 256;

/// The key of a memory node.
#[must_use]
pub fn node(id: u16) -> String {
    format!("{NODES}{id}")
}

/// The key of a host's agent.
#[must_use]
pub fn agent(host: u16) -> String {
    format!("{AGENTS}{host}")
}

/// The key of a host that may hold memory.
#[must_use]
pub fn holder(host: u16) -> String {
    format!("{HOLDERS}{host}")
}

/// The key of a node's memory.
#[must_use]
pub fn life(node: u16) -> String {
    format!("{LIVES}{node}")
}

/// The key of what a memory node is asked to lend.
#[must_use]
pub fn wanted(node: u16) -> String {
    format!("{WANTED}{node}")
}

/// The host number in an agent's key; `None` if it is no such key.
#[must_use]
pub fn host_of(key: &str) -> Option<u16> {
    let number: u16 = key.strip_prefix(AGENTS)?.parse().ok()?;
    (agent(number) == key && (1..=HOST_MAX).contains(&number)).then_some(number)
}

/// A memory node, at `nodes/{id}` while it lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its number.
    pub id: u16,
    /// How to reach its memory: `shm`.
    pub fabric: String,
    /// Where, in the fabric's terms.
    pub address: String,
    /// How much it lends.
    pub memory_bytes: u64,
    /// The most that it could be asked to lend.
    #[serde(default)]
    pub memory_bytes_max: u64,
    /// What it was asked to lend when it said so.
    #[serde(default)]
    pub memory_bytes_wanted: u64,
    /// Why that is not the same, if it is known.
    #[serde(default)]
    pub held_up: Option<HeldUp>,
    /// For so long after its end its memory is kept, for it to come back with, in milliseconds; 0: not at all.
    #[serde(default)]
    pub kept_ms: u64,
    /// Fencing epoch of its first lease with this memory.
    pub epoch: u64,
}

/// Why a memory node does not lend what it was asked to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeldUp {
    /// Memory is never taken from those who use it.
    #[error("the rest is in use, and follows when it is given back")]
    InUse,
    /// The machine has no more.
    #[error("its machine has no more memory to spare; it goes on when there is")]
    NoMemory,
    /// The RDMA device keeps what it was once given.
    #[error("over verbs memory is pinned for good: start the node anew with another --memory")]
    Pinned,
    /// It goes wrong.
    #[error("it fails; its log says at what")]
    Failing,
    /// Something that later versions know.
    #[error("it does not say why in words that this version knows")]
    #[serde(other)]
    Other,
}

/// What a memory node is asked to lend, at `wanted/{node}`. It holds for one life of the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WantedRecord {
    /// The node's number.
    pub node: u16,
    /// That of [`NodeRecord::epoch`].
    pub epoch: u64,
    /// How much.
    pub memory_bytes: u64,
}

/// A node's memory from one start to its end, at `lives/{node}`. A node that is out of reach for a while comes back with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Life {
    /// The node's number.
    pub node: u16,
    /// That of [`NodeRecord::epoch`].
    pub epoch: u64,
    /// That of [`NodeRecord::kept_ms`].
    #[serde(default)]
    pub kept_ms: u64,
}

impl Life {
    /// Whether it is the same life of the same node.
    #[must_use]
    pub const fn is(&self, other: &Self) -> bool {
        self.node == other.node && self.epoch == other.epoch
    }
}

/// A host that may hold memory, at `holders/{host}`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HolderRecord {
    /// Its number.
    pub host: u16,
    /// That of [`AgentRecord::claimed`].
    pub claimed: u64,
    /// For so long after its lease it may still come back for what it holds, in milliseconds.
    pub grace_ms: u64,
    /// It is dead, and only in these lives may something of it be left; absent: in any.
    pub left_in: Option<Vec<Life>>,
}

/// A host agent, at `agents/{host}` while it lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AgentRecord {
    /// Its host number.
    pub host: u16,
    /// Where programs reach it.
    pub address: String,
    /// Fencing epoch of its lease.
    pub epoch: u64,
    /// The epoch under which the number was claimed: agents that go on one after another under the number share it.
    pub claimed: u64,
    /// It is no agent, but gives back what a dead one held.
    pub is_successor: bool,
}

/// Read a record.
///
/// # Errors
/// The value is no such record.
pub fn decode<T: DeserializeOwned>(entry: &Entry) -> Result<T, DirectoryError> {
    serde_json::from_slice(&entry.value).map_err(|error| DirectoryError::Protocol {
        why: format!("the record at \"{}\": {error}", entry.key),
    })
}

/// A record as a value.
#[must_use]
pub fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("plain structs are JSON")
}

/// All living memory nodes.
///
/// # Errors
/// The directory's; a record that makes no sense.
pub fn nodes(directory: &dyn Directory) -> Result<Vec<NodeRecord>, DirectoryError> {
    directory.list(NODES)?.entries.iter().map(decode).collect()
}

/// All memory that exists, of nodes that are there and of nodes that may come back.
///
/// # Errors
/// The directory's; a record that makes no sense.
pub fn lives(directory: &dyn Directory) -> Result<Vec<Life>, DirectoryError> {
    directory.list(LIVES)?.entries.iter().map(decode).collect()
}

/// All living host agents.
///
/// # Errors
/// The directory's; a record that makes no sense.
pub fn agents(directory: &dyn Directory) -> Result<Vec<AgentRecord>, DirectoryError> {
    let records = directory.list(AGENTS)?;
    let records = records.entries.iter().map(decode::<AgentRecord>);
    records.filter(|record| !record.as_ref().is_ok_and(|record| record.is_successor)).collect()
}

/// Announce a memory node for as long as its lease lives.
///
/// # Errors
/// [`DirectoryError::Taken`] if a living node has this number; the directory's.
pub fn register_node(
    directory: &dyn Directory,
    lease: Lease,
    record: &NodeRecord,
) -> Result<(), DirectoryError> {
    let key = node(record.id);
    let transaction = Transaction {
        compares: vec![Compare::absent(&key)],
        operations: vec![Operation::put(&key, encode(record), Some(lease.id))],
    };
    match directory.transaction(&transaction)? {
        TransactionOutcome::Committed { .. } => Ok(()),
        TransactionOutcome::Conflict { .. } => Err(DirectoryError::Taken { key }),
    }
}

/// Take a host number again, under a new lease: an agent goes on where one before it, with this record, was stopped. What that one
/// still has under way is refused from now on, for its epoch is over.
///
/// # Errors
/// [`DirectoryError::Taken`] if another has the number meanwhile, or has given back what it held; the directory's.
pub fn reclaim_host(
    directory: &dyn Directory,
    lease: Lease,
    before: &AgentRecord,
    grace_ms: u64,
) -> Result<AgentRecord, DirectoryError> {
    let (key, holder) = (agent(before.host), holder(before.host));
    let record = AgentRecord { epoch: lease.epoch, ..before.clone() };
    let mut attempts = 0;
    loop {
        let held = match directory.get(&holder)? {
            Some(entry) if decode::<HolderRecord>(&entry)?.claimed == before.claimed => {
                Compare::version(&holder, entry.version)
            }
            _ => return Err(DirectoryError::Taken { key: holder }),
        };
        let alive = match directory.get(&key)? {
            // The lease of before has ended, and nobody has taken the number since.
            None => Compare::absent(&key),
            Some(entry) if decode::<AgentRecord>(&entry)?.claimed == before.claimed => {
                Compare::version(&key, entry.version)
            }
            Some(_) => return Err(DirectoryError::Taken { key }),
        };
        let taken = take_number(directory, lease, record.clone(), (grace_ms, None), vec![held, alive]);
        attempts += 1;
        // Its lease may have ended in between: that is nobody's taking it.
        if !matches!(taken, Err(DirectoryError::Taken { .. })) || attempts == CLAIM_ATTEMPTS_MAX {
            return taken;
        }
    }
}

/// Announce a host's agent under its lease, and for good that the host may hold memory.
fn take_number(
    directory: &dyn Directory,
    lease: Lease,
    record: AgentRecord,
    (grace_ms, left_in): (u64, Option<Vec<Life>>),
    compares: Vec<Compare>,
) -> Result<AgentRecord, DirectoryError> {
    let key = agent(record.host);
    let held = HolderRecord { host: record.host, claimed: record.claimed, grace_ms, left_in };
    let operations = vec![
        Operation::put(&key, encode(&record), Some(lease.id)),
        Operation::put(holder(record.host), encode(&held), None),
    ];
    match directory.transaction(&Transaction { compares, operations })? {
        TransactionOutcome::Committed { .. } => Ok(record),
        TransactionOutcome::Conflict { .. } => Err(DirectoryError::Taken { key }),
    }
}

/// Hosts that may hold memory and whose leases are gone.
///
/// # Errors
/// The directory's; a record that makes no sense.
pub fn dead_hosts(directory: &dyn Directory) -> Result<Vec<HolderRecord>, DirectoryError> {
    // In this order: who comes in between is in the second.
    let holders = directory.list(HOLDERS)?;
    let alive: Vec<u16> =
        directory.list(AGENTS)?.entries.iter().filter_map(|entry| host_of(&entry.key)).collect();
    let records = holders.entries.iter().map(decode::<HolderRecord>);
    records.filter(|record| record.as_ref().map_or(true, |record| !alive.contains(&record.host))).collect()
}

/// Take a dead host's number, under a new lease, to give back what it held: whatever it still has under way is refused wherever its
/// number comes with the new epoch. Nobody else can do so as long as the lease lives.
///
/// # Errors
/// [`DirectoryError::Taken`] if it is not dead, or another was faster; the directory's.
pub fn succeed_host(
    directory: &dyn Directory,
    lease: Lease,
    dead: &HolderRecord,
    address: &str,
) -> Result<AgentRecord, DirectoryError> {
    let holder = holder(dead.host);
    let held = match directory.get(&holder)? {
        Some(entry) if decode::<HolderRecord>(&entry)? == *dead => Compare::version(&holder, entry.version),
        _ => return Err(DirectoryError::Taken { key: holder }),
    };
    let record = AgentRecord {
        host: dead.host,
        address: address.to_owned(),
        epoch: lease.epoch,
        claimed: lease.epoch,
        is_successor: true,
    };
    let compares = vec![held, Compare::absent(agent(dead.host))];
    take_number(directory, lease, record, (0, dead.left_in.clone()), compares)
}

/// A dead host holds nothing any more but in these lives; if there are none its number may be given to another. Whoever says so has the number under its lease, and loses it.
///
/// # Errors
/// [`DirectoryError::Taken`] if another has it meanwhile; the directory's.
pub fn forget_host(
    directory: &dyn Directory,
    record: &AgentRecord,
    left_in: Vec<Life>,
) -> Result<(), DirectoryError> {
    let (key, holder) = (agent(record.host), holder(record.host));
    let taken = || DirectoryError::Taken { key: key.clone() };
    let entry = directory.get(&key)?.ok_or_else(taken)?;
    if decode::<AgentRecord>(&entry)?.epoch != record.epoch {
        return Err(taken());
    }
    let compares = vec![Compare::version(&key, entry.version)];
    let rest = if left_in.is_empty() {
        Operation::delete(&holder)
    } else {
        let left_in = Some(left_in);
        let held = HolderRecord { host: record.host, claimed: record.claimed, grace_ms: 0, left_in };
        Operation::put(&holder, encode(&held), None)
    };
    let operations = vec![rest, Operation::delete(&key)];
    match directory.transaction(&Transaction { compares, operations })? {
        TransactionOutcome::Committed { .. } => Ok(()),
        TransactionOutcome::Conflict { .. } => Err(taken()),
    }
}

/// Take a free host number for as long as the lease lives, and announce its agent. For `grace_ms` after that it may be reclaimed.
///
/// A dead host's number, under which the pool's logs know what it holds, is not given out before that was given back. Numbers are given out in turn, so that
/// one comes back as late as can be.
///
/// # Errors
/// [`DirectoryError::Taken`] if none of the 4094 is free; the directory's.
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
        let mut taken: Vec<u16> = Vec::new();
        for entry in directory.list(HOLDERS)?.entries {
            taken.push(decode::<HolderRecord>(&entry)?.host);
        }
        let Some(host) = (start..=HOST_MAX).chain(1..start).find(|host| !taken.contains(host)) else { break };
        let record = AgentRecord {
            host,
            address: address.to_owned(),
            epoch: lease.epoch,
            claimed: lease.epoch,
            is_successor: false,
        };
        let held = HolderRecord { host, claimed: lease.epoch, grace_ms, left_in: None };
        let following = if host == HOST_MAX { 1 } else { host + 1 };
        let transaction = Transaction {
            compares: vec![Compare::version(NEXT_HOST, version), Compare::absent(holder(host))],
            operations: vec![
                Operation::put(agent(host), encode(&record), Some(lease.id)),
                Operation::put(holder(host), encode(&held), None),
                Operation::put(NEXT_HOST, encode(&following), None),
            ],
        };
        if directory.transaction(&transaction)?.is_committed() {
            return Ok(record);
        }
    }
    Err(DirectoryError::Taken { key: format!("{AGENTS}1..={HOST_MAX}") })
}
