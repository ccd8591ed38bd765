//! The keys that Aquifer uses, and the records behind them: JSON, so that a person can read them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::model::{Compare, Entry, Lease, Operation, Transaction, TransactionOutcome};
use crate::{Directory, DirectoryError};

/// Prefix of the memory nodes' keys.
pub const NODES: &str = "nodes/";
/// Prefix of the host agents' keys.
pub const AGENTS: &str = "agents/";
/// Where the search for a free host number goes on.
const NEXT_HOST: &str = "hosts/next";

/// The greatest host number: the pool's logs give it 12 bits.
pub const HOST_MAX: u16 = 4095;

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
    /// Fencing epoch of its lease.
    pub epoch: u64,
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

/// All living host agents.
///
/// # Errors
/// The directory's; a record that makes no sense.
pub fn agents(directory: &dyn Directory) -> Result<Vec<AgentRecord>, DirectoryError> {
    directory.list(AGENTS)?.entries.iter().map(decode).collect()
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
/// [`DirectoryError::Taken`] if another host has the number meanwhile; the directory's.
pub fn reclaim_host(
    directory: &dyn Directory,
    lease: Lease,
    before: &AgentRecord,
) -> Result<AgentRecord, DirectoryError> {
    let key = agent(before.host);
    let record = AgentRecord { epoch: lease.epoch, ..before.clone() };
    let compare = match directory.get(&key)? {
        // The lease of before has ended, and nobody has taken the number since.
        None => Compare::absent(&key),
        Some(entry) if decode::<AgentRecord>(&entry)?.epoch == before.epoch => {
            Compare::version(&key, entry.version)
        }
        Some(_) => return Err(DirectoryError::Taken { key }),
    };
    let put = Operation::put(&key, encode(&record), Some(lease.id));
    let transaction = Transaction { compares: vec![compare], operations: vec![put] };
    match directory.transaction(&transaction)? {
        TransactionOutcome::Committed { .. } => Ok(record),
        TransactionOutcome::Conflict { .. } => Err(DirectoryError::Taken { key }),
    }
}

/// Take a free host number for as long as the lease lives, and announce its agent.
///
/// Numbers are given out in turn, so that a dead host's number, under which the pool's logs know what it
/// held, comes back as late as can be.
///
/// # Errors
/// [`DirectoryError::Taken`] if none of the 4095 is free; the directory's.
pub fn claim_host(
    directory: &dyn Directory,
    lease: Lease,
    address: &str,
) -> Result<AgentRecord, DirectoryError> {
    for _ in 0..CLAIM_ATTEMPTS_MAX {
        let next = directory.get(NEXT_HOST)?;
        let (start, version) = match &next {
            Some(entry) => (decode::<u16>(entry)?.clamp(1, HOST_MAX), entry.version),
            None => (1, 0),
        };
        let taken: Vec<_> =
            directory.list(AGENTS)?.entries.iter().filter_map(|entry| host_of(&entry.key)).collect();
        let Some(host) = (start..=HOST_MAX).chain(1..start).find(|host| !taken.contains(host)) else { break };
        let record = AgentRecord { host, address: address.to_owned(), epoch: lease.epoch };
        let following = if host == HOST_MAX { 1 } else { host + 1 };
        let transaction = Transaction {
            compares: vec![Compare::version(NEXT_HOST, version), Compare::absent(agent(host))],
            operations: vec![
                Operation::put(agent(host), encode(&record), Some(lease.id)),
                Operation::put(NEXT_HOST, encode(&following), None),
            ],
        };
        if directory.transaction(&transaction)?.is_committed() {
            return Ok(record);
        }
    }
    Err(DirectoryError::Taken { key: format!("{AGENTS}1..={HOST_MAX}") })
}
