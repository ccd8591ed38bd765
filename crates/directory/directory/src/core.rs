//! The directory as a state machine, without clock, disk or threads. Time is an argument.
//!
//! A change takes two steps, so that it is durable before it is visible.
//! A `plan_…` function checks a request against the state and returns the changes as a [`Delta`].
//! The edge makes the delta durable, and then calls [`Core::apply`].
//! After a restart, [`Core::restore`] makes the same state from the stored rows.
//!
//! A restart loses two things:
//!
//! - Past changes: a watch from a revision before the restart gets [`DirectoryError::Compacted`].
//! - The times of keep-alives: each lease gets its full time to live again, so that a restart ends
//!   no lease early.

pub mod check;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::error::{DirectoryError, LimitKind};
use crate::model::{
    DirectoryEntry, KeyOperation, Lease, LeaseId, Listing, Transaction, WatchEvent, WatchEventKind,
};
use crate::model::{TransactionOutcome, limits};

pub use history::Cursor;
use history::History;

/// The value of a key, with its version and lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredValue {
    /// The value.
    pub value: Vec<u8>,
    /// Revision of the last change.
    pub version: u64,
    /// The lease with whose end the key is deleted.
    pub lease: Option<LeaseId>,
}

/// A change of one row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RowChange {
    /// A key is set.
    Put {
        /// The key.
        key: String,
        /// The new value. Its version must be the delta's revision.
        record: StoredValue,
    },
    /// A key is deleted.
    Delete {
        /// The key.
        key: String,
    },
    /// A lease is granted.
    Grant {
        /// The lease.
        id: LeaseId,
        /// The time to live, in milliseconds.
        ttl_ms: u64,
    },
    /// A lease ends. Must follow the deletions of its keys.
    End {
        /// The lease.
        id: LeaseId,
    },
}

/// The changes of a request, which are applied all or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Delta {
    /// The directory's revision after the changes.
    pub revision: u64,
    /// The last granted fencing epoch after the changes.
    pub epoch: u64,
    /// The changes, in order.
    pub changes: Vec<RowChange>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct LeaseState {
    ttl_ms: u64,
    deadline_ms: u64,
    keys: BTreeSet<String>,
}

/// A contradiction between stored rows.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RestoreError {
    /// A lease was granted after the last grant.
    #[error("lease {id} is greater than the last granted epoch {epoch}")]
    LeaseAfterEpoch {
        /// The lease.
        id: LeaseId,
        /// The last granted epoch.
        epoch: u64,
    },
    /// A version is not a revision of the directory.
    #[error("\"{key}\" has version {version}, which is not between 1 and revision {revision}")]
    Version {
        /// The key.
        key: String,
        /// The key's version.
        version: u64,
        /// The revision of the last change.
        revision: u64,
    },
    /// A key's lease does not exist.
    #[error("\"{key}\" is attached to a lease that does not exist")]
    NoLease {
        /// The key.
        key: String,
    },
}

/// The state of a directory.
#[derive(Debug, Default)]
pub struct Core {
    entries: BTreeMap<String, StoredValue>,
    leases: BTreeMap<LeaseId, LeaseState>,
    deadlines: BTreeSet<(u64, LeaseId)>,
    revision: u64,
    epoch: u64,
    bytes: usize,
    history: History,
}

impl Core {
    /// Creates an empty directory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the state from stored rows. Each lease gets its full time to live from `now_ms`.
    ///
    /// # Errors
    /// The first contradiction between the rows.
    pub fn restore(
        revision: u64,
        epoch: u64,
        leases: impl IntoIterator<Item = (LeaseId, u64)>,
        entries: impl IntoIterator<Item = (String, StoredValue)>,
        now_ms: u64,
    ) -> Result<Self, RestoreError> {
        let mut core = Self { revision, epoch, ..Self::default() };
        for (id, ttl_ms) in leases {
            if id.0 > epoch {
                return Err(RestoreError::LeaseAfterEpoch { id, epoch });
            }
            core.begin_lease(id, ttl_ms, now_ms);
        }
        for (key, record) in entries {
            if record.version == 0 || record.version > revision {
                return Err(RestoreError::Version { key, version: record.version, revision });
            }
            if record.lease.is_some_and(|id| !core.leases.contains_key(&id)) {
                return Err(RestoreError::NoLease { key });
            }
            core.insert(key, record);
        }
        core.history = History::after(revision);
        Ok(core)
    }

    /// The last epoch of a lease.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// All leases, with their times to live in milliseconds.
    pub fn leases(&self) -> impl Iterator<Item = (LeaseId, u64)> {
        self.leases.iter().map(|(id, lease)| (*id, lease.ttl_ms))
    }

    /// All entries.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &StoredValue)> {
        self.entries.iter().map(|(key, record)| (key.as_str(), record))
    }

    /// Revision of the last change; 0 before the first.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The entry of a key.
    ///
    /// # Errors
    /// The errors of [`check::key`].
    pub fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        check::key(key)?;
        Ok(self.entries.get(key).map(|record| entry(key, record)))
    }

    /// The entries under a prefix.
    ///
    /// # Errors
    /// The errors of [`check::prefix`]; [`DirectoryError::Limit`] for a listing over its limits.
    pub fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        check::prefix(prefix)?;
        let range = self.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        let mut listing = Listing { revision: self.revision, entries: Vec::new() };
        let mut bytes = 0;
        for (key, record) in range.take_while(|(key, _)| key.starts_with(prefix)) {
            bytes += key.len() + record.value.len();
            check::limit(LimitKind::ListBytes, bytes, limits::LIST_BYTES_MAX)?;
            check::limit(LimitKind::ListEntries, listing.entries.len() + 1, limits::LIST_ENTRIES_MAX)?;
            listing.entries.push(entry(key, record));
        }
        Ok(listing)
    }

    /// Plans a transaction: its outcome, and its changes if it has any.
    ///
    /// # Errors
    /// The errors of [`check::transaction`]; [`DirectoryError::LeaseGone`]; a limit of the store.
    pub fn plan_transaction(
        &self,
        transaction: &Transaction,
    ) -> Result<(TransactionOutcome, Option<Delta>), DirectoryError> {
        check::transaction(transaction)?;
        for compare in &transaction.compares {
            let version = self.entries.get(&compare.key).map_or(0, |record| record.version);
            if version != compare.version {
                return Ok((TransactionOutcome::Conflict { key: compare.key.clone(), version }, None));
            }
        }
        let revision = self.revision + 1;
        let mut changes = Vec::with_capacity(transaction.operations.len());
        for operation in &transaction.operations {
            match operation {
                KeyOperation::Put { key, value, lease } => {
                    if let Some(id) = lease {
                        self.lease(*id)?;
                    }
                    let record = StoredValue { value: value.clone(), version: revision, lease: *lease };
                    changes.push(RowChange::Put { key: key.clone(), record });
                }
                KeyOperation::Delete { key } if self.entries.contains_key(key) => {
                    changes.push(RowChange::Delete { key: key.clone() });
                }
                KeyOperation::Delete { .. } => {}
            }
        }
        if changes.is_empty() {
            return Ok((TransactionOutcome::Committed { revision: self.revision }, None));
        }
        self.check_room(&changes)?;
        let delta = Delta { revision, epoch: self.epoch, changes };
        Ok((TransactionOutcome::Committed { revision }, Some(delta)))
    }

    /// Plans the grant of a lease. The lease's number is its epoch, so numbers are not reused.
    ///
    /// # Errors
    /// The errors of [`check::ttl`]; [`DirectoryError::Limit`] for too many leases.
    pub fn plan_grant(&self, ttl_ms: u64) -> Result<(Lease, Delta), DirectoryError> {
        check::ttl(ttl_ms)?;
        check::limit(LimitKind::Leases, self.leases.len() + 1, limits::LEASES_MAX)?;
        let epoch = self.epoch + 1;
        let id = LeaseId(epoch);
        let delta = Delta { revision: self.revision, epoch, changes: vec![RowChange::Grant { id, ttl_ms }] };
        Ok((Lease { id, epoch }, delta))
    }

    /// Plans the end of a lease, and the deletion of its keys.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`].
    pub fn plan_end(&self, id: LeaseId) -> Result<Delta, DirectoryError> {
        let keys = &self.lease(id)?.keys;
        // All deletions have one revision.
        let revision = self.revision + u64::from(!keys.is_empty());
        let mut changes: Vec<_> = keys.iter().map(|key| RowChange::Delete { key: key.clone() }).collect();
        changes.push(RowChange::End { id });
        Ok(Delta { revision, epoch: self.epoch, changes })
    }

    /// Plans the end of one lease whose time is up.
    ///
    /// Must be called until it returns `None` before any other function is called.
    #[must_use]
    pub fn plan_expiry(&self, now_ms: u64) -> Option<Delta> {
        let (deadline_ms, id) = self.deadlines.first()?;
        if *deadline_ms > now_ms {
            return None;
        }
        Some(self.plan_end(*id).expect("a deadline belongs to a lease"))
    }

    /// The earliest deadline of a lease, in milliseconds.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline_ms, _)| *deadline_ms)
    }

    /// True if a lease has not ended.
    #[must_use]
    pub fn has_leases(&self) -> bool {
        !self.leases.is_empty()
    }

    /// Restarts a lease's time to live.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`].
    pub fn keep_alive(&mut self, id: LeaseId, now_ms: u64) -> Result<(), DirectoryError> {
        let lease = self.leases.get_mut(&id).ok_or(DirectoryError::LeaseGone(id))?;
        self.deadlines.remove(&(lease.deadline_ms, id));
        lease.deadline_ms = now_ms.saturating_add(lease.ttl_ms);
        self.deadlines.insert((lease.deadline_ms, id));
        Ok(())
    }

    /// Sets a lease's deadline into the past, for fault injection.
    ///
    /// # Errors
    /// [`DirectoryError::LeaseGone`].
    pub fn expire_now(&mut self, id: LeaseId) -> Result<(), DirectoryError> {
        let lease = self.leases.get_mut(&id).ok_or(DirectoryError::LeaseGone(id))?;
        self.deadlines.remove(&(lease.deadline_ms, id));
        lease.deadline_ms = 0;
        self.deadlines.insert((0, id));
        Ok(())
    }

    /// Applies a delta, which must have been planned on this state.
    pub fn apply(&mut self, delta: &Delta, now_ms: u64) {
        assert!(delta.revision >= self.revision, "revisions never decrease");
        assert!(delta.epoch >= self.epoch, "epochs never decrease");
        self.revision = delta.revision;
        self.epoch = delta.epoch;
        for change in &delta.changes {
            match change {
                RowChange::Put { key, record } => {
                    self.insert(key.clone(), record.clone());
                    let kind = WatchEventKind::Put { value: record.value.clone(), lease: record.lease };
                    self.history.push(WatchEvent { revision: delta.revision, key: key.clone(), kind });
                }
                RowChange::Delete { key } => {
                    self.remove(key);
                    let event = WatchEvent {
                        revision: delta.revision,
                        key: key.clone(),
                        kind: WatchEventKind::Delete,
                    };
                    self.history.push(event);
                }
                RowChange::Grant { id, ttl_ms } => self.begin_lease(*id, *ttl_ms, now_ms),
                RowChange::End { id } => self.end_lease(*id),
            }
        }
    }

    /// The position of a new watch from `from_revision`; 0 stands for after the last change.
    ///
    /// # Errors
    /// [`DirectoryError::Compacted`]; the errors of [`check::prefix`].
    pub fn watch(&self, prefix: &str, from_revision: u64) -> Result<Cursor, DirectoryError> {
        check::prefix(prefix)?;
        self.history.cursor(prefix, from_revision)
    }

    /// The next event of a watch; `None` if there is none yet.
    ///
    /// # Errors
    /// [`DirectoryError::Compacted`] if the event is no longer kept.
    pub fn next_event(&self, cursor: &mut Cursor) -> Result<Option<WatchEvent>, DirectoryError> {
        self.history.next(cursor)
    }

    fn lease(&self, id: LeaseId) -> Result<&LeaseState, DirectoryError> {
        self.leases.get(&id).ok_or(DirectoryError::LeaseGone(id))
    }

    /// Checks that the changes fit the limits of the store. Deletions alone always do.
    fn check_room(&self, changes: &[RowChange]) -> Result<(), DirectoryError> {
        let (mut keys, mut bytes) = (self.entries.len(), self.bytes);
        let mut grows = false;
        for change in changes {
            let (key, added) = match change {
                RowChange::Put { key, record } => (key, Some(key.len() + record.value.len())),
                RowChange::Delete { key } => (key, None),
                RowChange::Grant { .. } | RowChange::End { .. } => continue,
            };
            if let Some(old) = self.entries.get(key) {
                keys -= 1;
                bytes -= key.len() + old.value.len();
            }
            if let Some(added) = added {
                grows = true;
                keys += 1;
                bytes += added;
            }
        }
        if grows {
            check::limit(LimitKind::Keys, keys, limits::KEYS_MAX)?;
            check::limit(LimitKind::StoreBytes, bytes, limits::STORE_BYTES_MAX)?;
        }
        Ok(())
    }

    fn insert(&mut self, key: String, record: StoredValue) {
        self.remove(&key);
        if let Some(id) = record.lease {
            let lease =
                self.leases.get_mut(&id).expect("the lease of a value is checked when the change is planned");
            lease.keys.insert(key.clone());
        }
        self.bytes += key.len() + record.value.len();
        self.entries.insert(key, record);
    }

    fn remove(&mut self, key: &str) {
        let Some(old) = self.entries.remove(key) else { return };
        self.bytes -= key.len() + old.value.len();
        if let Some(lease) = old.lease.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.remove(key);
        }
    }

    fn begin_lease(&mut self, id: LeaseId, ttl_ms: u64, now_ms: u64) {
        let deadline_ms = now_ms.saturating_add(ttl_ms);
        self.leases.insert(id, LeaseState { ttl_ms, deadline_ms, keys: BTreeSet::new() });
        self.deadlines.insert((deadline_ms, id));
    }

    fn end_lease(&mut self, id: LeaseId) {
        let lease = self.leases.remove(&id).expect("the end of a lease is planned while the lease exists");
        assert!(lease.keys.is_empty(), "the keys of a lease are deleted before the lease ends");
        self.deadlines.remove(&(lease.deadline_ms, id));
    }
}

fn entry(key: &str, record: &StoredValue) -> DirectoryEntry {
    DirectoryEntry {
        key: key.to_owned(),
        value: record.value.clone(),
        version: record.version,
        lease: record.lease,
    }
}

#[cfg(test)]
mod tests;
