//! The directory's records of segments, of the hosts that serve segments, and of processes.

use std::net::SocketAddr;
use std::sync::Arc;

use aquifer_directory::names::{self, HolderRecord, SegmentHostRecord};
use aquifer_directory::{Compare, Directory, DirectoryError, KeyOperation, Lease, LeaseId, Transaction};
use serde::{Deserialize, Serialize};

use super::ranges::RangesRecord;
use aquifer_ownership::{Change, Evidence, Life, SegmentRecord, transaction};

/// Maximum number of attempts of a transaction that fails because another host has changed the same
/// records.
pub(super) const ATTEMPTS_MAX: u32 = 16;

/// The key of a segment: its tenant, and the number that the tenant gave it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct SegmentKey {
    /// The tenant.
    pub tenant: u32,
    /// The number.
    pub id: u64,
}

impl std::fmt::Display for SegmentKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} of user {}", self.id, self.tenant)
    }
}

impl SegmentKey {
    pub(super) fn name(self) -> String {
        names::segment_key(self.tenant, self.id)
    }

    fn of_name(name: &str) -> Option<Self> {
        let (tenant, id) = name.strip_prefix(names::SEGMENTS)?.split_once('/')?;
        Some(Self { tenant: tenant.parse().ok()?, id: id.parse().ok()? })
    }

    pub(super) fn copies_name(self) -> String {
        names::segment_copies_key(self.tenant, self.id)
    }

    pub(super) fn ranges_name(self) -> String {
        names::segment_ranges_key(self.tenant)
    }
}

/// The result of a request for a new segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Creation {
    /// The segment was created.
    Created {
        /// The segment's first address.
        address: u64,
        /// The number above which the segment's hand-overs are numbered.
        generation: u64,
    },
    /// A segment with this key exists.
    Exists,
    /// A lost segment with this key has copies, from which it can be restored.
    HasCopies,
    /// The tenant has no addresses left, or the maximum number of segments.
    Full,
    /// Each attempt failed because another host changed the tenant's addresses.
    Busy,
}

/// Access to the directory's records for one host.
#[derive(Clone, Debug)]
pub struct Registry {
    pub(super) directory: Arc<dyn Directory>,
}

impl Registry {
    /// Accesses the records in a directory.
    #[must_use]
    pub fn new(directory: Arc<dyn Directory>) -> Self {
        Self { directory }
    }

    /// Records that a host serves segments, until the lease ends. Without an address, other hosts
    /// cannot hand segments over to it.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn join(&self, own: Life, address: Option<SocketAddr>, lease: Lease) -> Result<(), DirectoryError> {
        let address = address.map_or_else(String::new, |address| address.to_string());
        let record = SegmentHostRecord { host: own.host, epoch: own.epoch, address };
        let key = names::segment_host_key(own.host);
        self.directory.put(&key, &names::encode(&record), Some(lease.id)).map(drop)
    }

    /// The address of a host; `None` if it has none, or its agent is away.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn address(&self, life: Life) -> Result<Option<SocketAddr>, DirectoryError> {
        Ok(self.host(life)?.and_then(|(record, _)| record.address.parse().ok()))
    }

    /// Records that a process of a tenant is on a host. Returns false if another host has a process
    /// with this name.
    ///
    /// # Errors
    /// If the directory fails.
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
        let new = Transaction { compares, operations };
        if self.directory.transaction(&new)?.is_committed() {
            return Ok(true);
        }
        // An earlier process of this agent may have written it, under its lease.
        let Some(entry) = self.directory.get(&key)? else { return Ok(false) };
        if names::decode::<Life>(&entry)? != own {
            return Ok(false);
        }
        let compares = vec![Compare::version(&key, entry.version)];
        Ok(self.directory.transaction(&Transaction { compares, ..new })?.is_committed())
    }

    /// Removes the record of a process.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn remove_process(&self, tenant: u32, process: &str) -> Result<(), DirectoryError> {
        self.directory.delete(&names::segment_process_key(tenant, process)).map(drop)
    }

    /// The host of a process; `None` if there is no such process.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn find_process(&self, tenant: u32, process: &str) -> Result<Option<Life>, DirectoryError> {
        let entry = self.directory.get(&names::segment_process_key(tenant, process))?;
        entry.map(|entry| names::decode(&entry)).transpose()
    }

    /// Records a new segment of an owner, and grants it addresses. Replaces a lost segment without
    /// copies.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn create(
        &self,
        segment: SegmentKey,
        owner: Life,
        bytes: u64,
        evidence: Evidence,
    ) -> Result<Creation, DirectoryError> {
        for _ in 0..ATTEMPTS_MAX {
            let (mut ranges, compare) = self.ranges(segment.tenant)?;
            let (copies, copies_compare) = self.copies_entry(segment)?;
            let mut compares = vec![compare, copies_compare];
            let Some(last) = self.next_generation_if_lost(segment, evidence, &mut compares)? else {
                return Ok(Creation::Exists);
            };
            if copies.is_some_and(|copies| copies.has_copies()) {
                return Ok(Creation::HasCopies);
            }
            // The bytes of the former segment are lost with its owner.
            ranges.remove(segment.id, last);
            let Some(address) = ranges.grant(segment.id, bytes) else { return Ok(Creation::Full) };
            let record = SegmentRecord::new(owner, ranges.generation);
            let operations = vec![
                KeyOperation::put(segment.name(), names::encode(&record), None),
                KeyOperation::put(segment.ranges_name(), names::encode(&ranges), None),
            ];
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(Creation::Created { address, generation: ranges.generation });
            }
        }
        Ok(Creation::Busy)
    }

    /// Removes the record of a segment that its owner deallocates, and frees its addresses if there
    /// is no record of copies. Returns false if the segment has another owner or is being handed
    /// over, or if each attempt failed because another host changed the tenant's addresses.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn remove(&self, segment: SegmentKey, owner: Life) -> Result<bool, DirectoryError> {
        for _ in 0..ATTEMPTS_MAX {
            let Some(entry) = self.directory.get(&segment.name())? else { return Ok(true) };
            let record: SegmentRecord = names::decode(&entry)?;
            if record.owner != owner || record.intent.is_some() {
                return Ok(false);
            }
            let (mut ranges, compare) = self.ranges(segment.tenant)?;
            let (copies, copies_compare) = self.copies_entry(segment)?;
            match copies.is_some() {
                true => ranges.retire(record.generation),
                false => ranges.remove(segment.id, record.generation),
            }
            let compares = vec![compare, copies_compare, Compare::version(segment.name(), entry.version)];
            let operations = vec![
                KeyOperation::delete(segment.name()),
                KeyOperation::put(segment.ranges_name(), names::encode(&ranges), None),
            ];
            if self.directory.transaction(&Transaction { compares, operations })?.is_committed() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the number after the last hand-over of a segment that no live host owns, or 0 if
    /// there is no record of it. `None` if a live host may own the segment. A transaction with the
    /// compares fails if that changes.
    pub(super) fn next_generation_if_lost(
        &self,
        segment: SegmentKey,
        evidence: Evidence,
        compares: &mut Vec<Compare>,
    ) -> Result<Option<u64>, DirectoryError> {
        let Some(entry) = self.directory.get(&segment.name())? else {
            compares.push(Compare::absent(segment.name()));
            return Ok(Some(0));
        };
        let record: SegmentRecord = names::decode(&entry)?;
        let mut live = Vec::new();
        for life in std::iter::once(record.owner).chain(record.intent) {
            if self.life_of(life, compares)? {
                live.push(life);
            }
        }
        compares.push(Compare::version(segment.name(), entry.version));
        let is_lost = record.is_lost(evidence, |life| live.contains(&life));
        Ok(is_lost.then_some(record.generation + 1))
    }

    /// Returns the addresses of a tenant's segments. A transaction with the compare fails if they
    /// change.
    pub(super) fn ranges(&self, tenant: u32) -> Result<(RangesRecord, Compare), DirectoryError> {
        let key = names::segment_ranges_key(tenant);
        Ok(match self.directory.get(&key)? {
            Some(entry) => (names::decode(&entry)?, Compare::version(key, entry.version)),
            None => (RangesRecord::default(), Compare::absent(key)),
        })
    }

    /// Returns the record of a segment, and whether the life `other` lasts; true if there is none.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn observe(
        &self,
        segment: SegmentKey,
        other: Option<Life>,
    ) -> Result<Option<(SegmentRecord, bool)>, DirectoryError> {
        // The record is read last, so that it has the confirmation of a target that has confirmed
        // and then died.
        let lives = other.map_or(Ok(true), |life| self.lives(life))?;
        let Some(entry) = self.directory.get(&segment.name())? else { return Ok(None) };
        Ok(Some((names::decode(&entry)?, lives)))
    }

    /// Carries out a change of a segment's record. Returns whether its conditions held.
    ///
    /// # Errors
    /// If the directory fails. Then the change may have been carried out.
    pub fn carry_out(&self, segment: SegmentKey, change: &Change) -> Result<bool, DirectoryError> {
        transaction::carry_out(&*self.directory, &segment.name(), change, |life, compares| {
            self.life_of(life, compares)
        })
    }

    /// Whether a life lasts. A life ends when other hosts recover its host, which they do only
    /// after its agent has been away for its grace time.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn lives(&self, life: Life) -> Result<bool, DirectoryError> {
        self.life_of(life, &mut Vec::new())
    }

    /// Lists the segments whose records name the given owner.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn segments_of(&self, owner: Life) -> Result<Vec<SegmentKey>, DirectoryError> {
        let listing = self.directory.list(names::SEGMENTS)?;
        let mut keys = Vec::new();
        for entry in &listing.entries {
            let record: SegmentRecord = names::decode(entry)?;
            keys.extend(SegmentKey::of_name(&entry.key).filter(|_| record.owner == owner));
        }
        Ok(keys)
    }

    /// Returns the record of a segment.
    ///
    /// # Errors
    /// If the directory fails.
    pub fn find(&self, segment: SegmentKey) -> Result<Option<SegmentRecord>, DirectoryError> {
        self.directory.get(&segment.name())?.map(|entry| names::decode(&entry)).transpose()
    }

    /// Whether a life lasts. A transaction with the compare fails if that changes.
    pub(super) fn life_of(&self, life: Life, compares: &mut Vec<Compare>) -> Result<bool, DirectoryError> {
        let key = names::holder_key(life.host);
        let entry = self.directory.get(&key)?;
        compares.push(match &entry {
            Some(entry) => Compare::version(key, entry.version),
            None => Compare::absent(key),
        });
        let record = entry.map(|entry| names::decode::<HolderRecord>(&entry)).transpose()?;
        Ok(record.is_some_and(|record| record.claim_epoch == life.epoch))
    }

    /// Returns the record of a life's host, and its version.
    fn host(&self, life: Life) -> Result<Option<(SegmentHostRecord, u64)>, DirectoryError> {
        let Some(entry) = self.directory.get(&names::segment_host_key(life.host))? else { return Ok(None) };
        let record: SegmentHostRecord = names::decode(&entry)?;
        Ok((record.epoch == life.epoch).then_some((record, entry.version)))
    }
}
