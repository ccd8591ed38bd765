//! The directory's records of segments, and of the hosts that have them.

use std::net::SocketAddr;
use std::sync::Arc;

use aquifer_directory::names::{self, SegmentHostRecord};
use aquifer_directory::{Compare, Directory, DirectoryError, KeyOperation, Lease, LeaseId, Transaction};
use serde::{Deserialize, Serialize};

use crate::ownership::{Change, Life, Retraction, SegmentRecord};

/// Attempts of a transaction while others change the same records.
const ATTEMPTS_MAX: u32 = 16;

/// A segment: its tenant, and the number that the tenant gave it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SegmentKey {
    /// The tenant.
    pub tenant: u32,
    /// The number.
    pub id: u64,
}

impl SegmentKey {
    fn name(self) -> String {
        names::segment_key(self.tenant, self.id)
    }
}

/// The records, as one host reads and writes them.
#[derive(Clone, Debug)]
pub struct Registry {
    directory: Arc<dyn Directory>,
}

impl Registry {
    /// The records in a directory.
    #[must_use]
    pub fn new(directory: Arc<dyn Directory>) -> Self {
        Self { directory }
    }

    /// Records that a host serves segments at an address, while its lease lasts.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn join(&self, own: Life, address: SocketAddr, lease: Lease) -> Result<(), DirectoryError> {
        let record = SegmentHostRecord { host: own.host, epoch: own.epoch, address: address.to_string() };
        let key = names::segment_host_key(own.host);
        self.directory.put(&key, &names::encode(&record), Some(lease.id)).map(drop)
    }

    /// The address of a host; `None` if its lease has ended.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn address(&self, life: Life) -> Result<Option<SocketAddr>, DirectoryError> {
        Ok(self.host(life)?.and_then(|(record, _)| record.address.parse().ok()))
    }

    /// Records that a process of a tenant is on a host. Returns false if another host has one of
    /// this name.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn add_process(
        &self,
        tenant: u32,
        process: &str,
        own: Life,
        lease: LeaseId,
    ) -> Result<bool, DirectoryError> {
        let key = names::segment_process_key(tenant, process);
        let compares = vec![Compare::absent(&key)];
        let operations = vec![KeyOperation::put(&key, names::encode(&own), Some(lease))];
        let is_new = self.directory.transaction(&Transaction { compares, operations })?.is_committed();
        Ok(is_new || self.find_process(tenant, process)? == Some(own))
    }

    /// Ends the record of a process.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn remove_process(&self, tenant: u32, process: &str) -> Result<(), DirectoryError> {
        self.directory.delete(&names::segment_process_key(tenant, process)).map(drop)
    }

    /// The host of a process; `None` if there is no such process.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn find_process(&self, tenant: u32, process: &str) -> Result<Option<Life>, DirectoryError> {
        let entry = self.directory.get(&names::segment_process_key(tenant, process))?;
        entry.map(|entry| names::decode(&entry)).transpose()
    }

    /// Records a new segment. Returns false if there is one with this key.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn create(&self, segment: SegmentKey, record: &SegmentRecord) -> Result<bool, DirectoryError> {
        let compares = vec![Compare::absent(segment.name())];
        let operations = vec![KeyOperation::put(segment.name(), names::encode(record), None)];
        Ok(self.directory.transaction(&Transaction { compares, operations })?.is_committed())
    }

    /// The record of a segment, and whether a lease lasts.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn observe(
        &self,
        segment: SegmentKey,
        other: Option<Life>,
    ) -> Result<Option<(SegmentRecord, bool)>, DirectoryError> {
        // In this order: a target that confirms and then dies is seen to have confirmed.
        let lives = other.map_or(Ok(true), |life| Ok::<_, DirectoryError>(self.host(life)?.is_some()))?;
        let Some(entry) = self.directory.get(&segment.name())? else { return Ok(None) };
        Ok(Some((names::decode(&entry)?, lives)))
    }

    /// Carries out a transaction. Returns whether it was carried out.
    ///
    /// # Errors
    /// Those of the directory. Then it may have been carried out.
    pub fn carry_out(&self, segment: SegmentKey, change: &Change) -> Result<bool, DirectoryError> {
        for _ in 0..ATTEMPTS_MAX {
            let Some(entry) = self.directory.get(&segment.name())? else { return Ok(false) };
            let mut record: SegmentRecord = names::decode(&entry)?;
            let mut compares = vec![Compare::version(segment.name(), entry.version)];
            let (author, fenced) = match *change {
                Change::Intend { owner, .. } => (owner, None),
                Change::Confirm { to, .. } => (to, None),
                Change::Retract { owner, because: Retraction::Refused, .. } => (owner, None),
                Change::Retract { owner, because: Retraction::Fenced, .. } => (owner, record.intent),
            };
            let mut lives = vec![(author, self.lease_of(author, &mut compares)?)];
            if let Some(target) = fenced {
                lives.push((target, self.lease_of(target, &mut compares)?));
            }
            let lives = |life: Life| lives.iter().any(|(other, lives)| *other == life && *lives);
            if !record.apply(change, lives) {
                return Ok(false);
            }
            let operations = vec![KeyOperation::put(segment.name(), names::encode(&record), None)];
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a lease lasts; a transaction with the compare fails if that changes.
    fn lease_of(&self, life: Life, compares: &mut Vec<Compare>) -> Result<bool, DirectoryError> {
        let key = names::segment_host_key(life.host);
        let entry = self.directory.get(&key)?;
        compares.push(match &entry {
            Some(entry) => Compare::version(key, entry.version),
            None => Compare::absent(key),
        });
        let record = entry.map(|entry| names::decode::<SegmentHostRecord>(&entry)).transpose()?;
        Ok(record.is_some_and(|record| record.epoch == life.epoch))
    }

    fn host(&self, life: Life) -> Result<Option<(SegmentHostRecord, u64)>, DirectoryError> {
        let Some(entry) = self.directory.get(&names::segment_host_key(life.host))? else { return Ok(None) };
        let record: SegmentHostRecord = names::decode(&entry)?;
        Ok((record.epoch == life.epoch).then_some((record, entry.version)))
    }
}
