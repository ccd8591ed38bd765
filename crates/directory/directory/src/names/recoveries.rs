//! Dead hosts: the claim of their numbers, and the record of those that were recovered.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    AGENTS, AgentRecord, CLAIM_ATTEMPTS_MAX, DeadHost, HOLDERS, HolderRecord, NodeLife, RECOVERED_HOSTS,
    agent_key, decode, encode, holder_key, host_of_agent_key, write_host,
};
use crate::model::{Compare, KeyOperation, Lease, Transaction};
use crate::{Directory, DirectoryError};

/// The hosts that were recovered, at `hosts/recovered`.
///
/// A node that starts later has never seen their epochs. The node fences them before it has a
/// record, so that a process of a recovered host that resumes late cannot allocate there.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RecoveredHosts {
    /// The epoch of the last recovery of each host, by the host's number. All smaller epochs have
    /// ended.
    pub epochs: BTreeMap<u16, u64>,
}

/// Hosts that may own memory and whose leases have ended. Hosts with invalid records are omitted:
/// their records stay, and their numbers are not reused.
///
/// # Errors
/// An error of the directory.
pub fn dead_hosts(directory: &dyn Directory) -> Result<Vec<DeadHost>, DirectoryError> {
    // Holders are read first, so that a host that registers between the two reads counts as alive.
    let holders = directory.list(HOLDERS)?;
    let alive: Vec<u16> =
        directory.list(AGENTS)?.entries.iter().filter_map(|entry| host_of_agent_key(&entry.key)).collect();
    let hosts = holders.entries.iter().filter_map(|entry| {
        let record = decode::<HolderRecord>(entry).ok()?;
        Some(DeadHost { record, version: entry.version })
    });
    Ok(hosts.filter(|dead| !alive.contains(&dead.record.host)).collect())
}

/// Claims a dead host's number under a new lease, to free the host's memory.
///
/// Nodes that receive the new epoch refuse operations of the dead host that are still in flight.
/// No other process can claim the number while the lease lasts.
///
/// # Errors
/// [`DirectoryError::Taken`] if the host is alive or has been since it was listed, or another
/// process has claimed its number; an error of the directory.
pub fn claim_dead_host(
    directory: &dyn Directory,
    lease: Lease,
    dead: &DeadHost,
    address: &str,
) -> Result<AgentRecord, DirectoryError> {
    let DeadHost { record: dead, version } = dead;
    let record = AgentRecord {
        host: dead.host,
        address: address.to_owned(),
        epoch: lease.epoch,
        claim_epoch: lease.epoch,
        is_recovery: true,
    };
    let listed = Compare::version(holder_key(dead.host), *version);
    let compares = vec![listed, Compare::absent(agent_key(dead.host))];
    write_host(directory, lease, record, (0, dead.remaining_lives.clone()), compares)
}

/// Records that a dead host owns memory in `remaining_lives` only, and ends the claim.
///
/// If no lives remain, the number is free for another host.
/// `record` is the result of [`claim_dead_host`].
///
/// # Errors
/// [`DirectoryError::Taken`] if the claim has ended; an error of the directory.
pub fn finish_recovery(
    directory: &dyn Directory,
    record: &AgentRecord,
    remaining_lives: Vec<NodeLife>,
) -> Result<(), DirectoryError> {
    let (key, holder) = (agent_key(record.host), holder_key(record.host));
    let taken = || DirectoryError::Taken { key: key.clone() };
    let entry = directory.get(&key)?.ok_or_else(taken)?;
    if decode::<AgentRecord>(&entry)?.epoch != record.epoch {
        return Err(taken());
    }
    let holder_operation = if remaining_lives.is_empty() {
        KeyOperation::delete(&holder)
    } else {
        let record = HolderRecord {
            host: record.host,
            claim_epoch: record.claim_epoch,
            grace_ms: 0,
            remaining_lives: Some(remaining_lives),
        };
        KeyOperation::put(&holder, encode(&record), None)
    };
    for _ in 0..CLAIM_ATTEMPTS_MAX {
        let (mut recovered, version) = recovered_hosts(directory)?;
        let last = recovered.epochs.entry(record.host).or_insert(record.epoch);
        *last = record.epoch.max(*last);
        let transaction = Transaction {
            compares: vec![Compare::version(&key, entry.version), Compare::version(RECOVERED_HOSTS, version)],
            operations: vec![
                holder_operation.clone(),
                KeyOperation::delete(&key),
                KeyOperation::put(RECOVERED_HOSTS, encode(&recovered), None),
            ],
        };
        if directory.transaction(&transaction)?.is_committed() {
            return Ok(());
        }
        // Either the claim has ended, or another recovery has ended.
        if directory.get(&key)?.is_none_or(|now| now.version != entry.version) {
            break;
        }
    }
    Err(taken())
}

/// The hosts that were recovered, and the version of their record. A record that is not valid
/// counts as empty, and the next recovery replaces it.
///
/// # Errors
/// An error of the directory.
pub fn recovered_hosts(directory: &dyn Directory) -> Result<(RecoveredHosts, u64), DirectoryError> {
    let Some(entry) = directory.get(RECOVERED_HOSTS)? else { return Ok((RecoveredHosts::default(), 0)) };
    let hosts = decode(&entry).unwrap_or_else(|error| {
        tracing::warn!(%error, "ignored the record of recovered hosts");
        RecoveredHosts::default()
    });
    Ok((hosts, entry.version))
}
