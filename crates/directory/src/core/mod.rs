//! The directory as a state machine: no clock, no disk, no threads. Time is passed in.
//!
//! Changes take two steps, so that they are durable before anyone can see them: a `plan_…`
//! function checks a request against the state and says what would change, as a [`Delta`]; the
//! edge writes the delta down, then [`Core::apply`] makes it true. Replaying what was written
//! down, [`Core::restore`], gives the same state after a restart.
//!
//! What does not survive a restart, by choice: the past changes (older watchers get
//! [`DirectoryError::Compacted`]) and how long ago a lease was kept alive (each lease gets its
//! full time again, so that a restart ends nobody's lease early).

pub mod check;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound as Edge;

use crate::error::{Bound, DirectoryError};
use crate::model::{Entry, Event, EventKind, Lease, LeaseId, Listing, Operation, Transaction};
use crate::model::{TransactionOutcome, limits};

pub use history::Cursor;
use history::History;

/// A key's record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// What it holds.
    pub value: Vec<u8>,
    /// Revision of its last change.
    pub version: u64,
    /// The lease it ends with.
    pub lease: Option<LeaseId>,
}

/// One row that changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// A key is set.
    Put {
        /// The key.
        key: String,
        /// Its record, whose version is the delta's revision.
        record: Record,
    },
    /// A key is deleted.
    Delete {
        /// The key.
        key: String,
    },
    /// A lease begins.
    Grant {
        /// Its name.
        id: LeaseId,
        /// Its life without a keep-alive.
        ttl_ms: u64,
    },
    /// A lease ends. The deletions of its keys precede this.
    End {
        /// Its name.
        id: LeaseId,
    },
}

/// What a request would change: all of it or nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Delta {
    /// The directory's revision afterwards.
    pub revision: u64,
    /// The last fencing epoch granted, afterwards.
    pub epoch: u64,
    /// The rows, in order.
    pub changes: Vec<Change>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct LeaseState {
    ttl_ms: u64,
    deadline_ms: u64,
    keys: BTreeSet<String>,
}

/// The state. See the module.
#[derive(Debug, Default)]
pub struct Core {
    entries: BTreeMap<String, Record>,
    leases: BTreeMap<LeaseId, LeaseState>,
    deadlines: BTreeSet<(u64, LeaseId)>,
    revision: u64,
    epoch: u64,
    bytes: usize,
    history: History,
}

impl Core {
    /// An empty directory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The directory that was written down. Its leases get their full time from `now_ms` on; its past is not kept.
    ///
    /// # Errors
    /// A sentence on what contradicts itself.
    pub fn restore(
        revision: u64,
        epoch: u64,
        leases: impl IntoIterator<Item = (LeaseId, u64)>,
        entries: impl IntoIterator<Item = (String, Record)>,
        now_ms: u64,
    ) -> Result<Self, String> {
        let mut core = Self { revision, epoch, ..Self::default() };
        for (id, ttl_ms) in leases {
            if id.0 > epoch {
                return Err(format!("lease {id} is newer than the last one granted, {epoch}"));
            }
            core.begin_lease(id, ttl_ms, now_ms);
        }
        for (key, record) in entries {
            if record.version == 0 || record.version > revision {
                return Err(format!("\"{key}\" has version {}, beyond revision {revision}", record.version));
            }
            if record.lease.is_some_and(|id| !core.leases.contains_key(&id)) {
                return Err(format!("\"{key}\" is attached to a lease that does not exist"));
            }
            core.insert(key, record);
        }
        core.history = History::after(revision);
        Ok(core)
    }

    /// Revision of the last change; 0 before the first.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The entry at a key.
    ///
    /// # Errors
    /// An unfit key.
    pub fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError> {
        check::key(key)?;
        Ok(self.entries.get(key).map(|record| entry(key, record)))
    }

    /// The entries under a prefix.
    ///
    /// # Errors
    /// An unfit prefix; a listing beyond its limits.
    pub fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        check::prefix(prefix)?;
        let range = self.entries.range::<str, _>((Edge::Included(prefix), Edge::Unbounded));
        let mut listing = Listing { revision: self.revision, entries: Vec::new() };
        let mut bytes = 0;
        for (key, record) in range.take_while(|(key, _)| key.starts_with(prefix)) {
            bytes += key.len() + record.value.len();
            check::limit(Bound::ListBytes, bytes, limits::LIST_BYTES_MAX)?;
            check::limit(Bound::ListEntries, listing.entries.len() + 1, limits::LIST_ENTRIES_MAX)?;
            listing.entries.push(entry(key, record));
        }
        Ok(listing)
    }

    /// What a transaction comes to, and what it would change.
    ///
    /// # Errors
    /// A limit, a lease that is gone, a key changed twice.
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
                Operation::Put { key, value, lease } => {
                    if let Some(id) = lease {
                        self.lease(*id)?;
                    }
                    let record = Record { value: value.clone(), version: revision, lease: *lease };
                    changes.push(Change::Put { key: key.clone(), record });
                }
                Operation::Delete { key } if self.entries.contains_key(key) => {
                    changes.push(Change::Delete { key: key.clone() });
                }
                Operation::Delete { .. } => {}
            }
        }
        if changes.is_empty() {
            return Ok((TransactionOutcome::Committed { revision: self.revision }, None));
        }
        self.check_room(&changes)?;
        let delta = Delta { revision, epoch: self.epoch, changes };
        Ok((TransactionOutcome::Committed { revision }, Some(delta)))
    }

    /// A new lease. Its name is its epoch: names are never used again.
    ///
    /// # Errors
    /// A life out of bounds; too many leases.
    pub fn plan_grant(&self, ttl_ms: u64) -> Result<(Lease, Delta), DirectoryError> {
        check::ttl(ttl_ms)?;
        check::limit(Bound::Leases, self.leases.len() + 1, limits::LEASES_MAX)?;
        let epoch = self.epoch + 1;
        let id = LeaseId(epoch);
        let delta = Delta { revision: self.revision, epoch, changes: vec![Change::Grant { id, ttl_ms }] };
        Ok((Lease { id, epoch }, delta))
    }

    /// The end of a lease and its keys.
    ///
    /// # Errors
    /// The lease is gone.
    pub fn plan_end(&self, id: LeaseId) -> Result<Delta, DirectoryError> {
        let keys = &self.lease(id)?.keys;
        // The deletions share one revision, as a transaction's do.
        let revision = self.revision + u64::from(!keys.is_empty());
        let mut changes: Vec<_> = keys.iter().map(|key| Change::Delete { key: key.clone() }).collect();
        changes.push(Change::End { id });
        Ok(Delta { revision, epoch: self.epoch, changes })
    }

    /// The end of the lease whose time is up first, if any is. To be called until it says `None`, before anything else is asked.
    #[must_use]
    pub fn plan_expiry(&self, now_ms: u64) -> Option<Delta> {
        let (deadline_ms, id) = self.deadlines.first()?;
        if *deadline_ms > now_ms {
            return None;
        }
        Some(self.plan_end(*id).expect("a deadline belongs to a lease"))
    }

    /// When the next lease ends, if none is kept alive before.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline_ms, _)| *deadline_ms)
    }

    /// Begin a lease's time anew.
    ///
    /// # Errors
    /// The lease is gone.
    pub fn keep_alive(&mut self, id: LeaseId, now_ms: u64) -> Result<(), DirectoryError> {
        let lease = self.leases.get_mut(&id).ok_or(DirectoryError::LeaseGone(id))?;
        self.deadlines.remove(&(lease.deadline_ms, id));
        lease.deadline_ms = now_ms.saturating_add(lease.ttl_ms);
        self.deadlines.insert((lease.deadline_ms, id));
        Ok(())
    }

    /// Let a lease's time be up at once; for fault injection.
    ///
    /// # Errors
    /// The lease is gone.
    pub fn expire_now(&mut self, id: LeaseId) -> Result<(), DirectoryError> {
        let lease = self.leases.get_mut(&id).ok_or(DirectoryError::LeaseGone(id))?;
        self.deadlines.remove(&(lease.deadline_ms, id));
        lease.deadline_ms = 0;
        self.deadlines.insert((0, id));
        Ok(())
    }

    /// Make a planned delta true. It must have been planned on this very state.
    pub fn apply(&mut self, delta: &Delta, now_ms: u64) {
        assert!(delta.revision >= self.revision, "revisions only grow");
        assert!(delta.epoch >= self.epoch, "epochs only grow");
        self.revision = delta.revision;
        self.epoch = delta.epoch;
        for change in &delta.changes {
            match change {
                Change::Put { key, record } => {
                    self.insert(key.clone(), record.clone());
                    let kind = EventKind::Put { value: record.value.clone(), lease: record.lease };
                    self.history.push(Event { revision: delta.revision, key: key.clone(), kind });
                }
                Change::Delete { key } => {
                    self.remove(key);
                    let event = Event { revision: delta.revision, key: key.clone(), kind: EventKind::Delete };
                    self.history.push(event);
                }
                Change::Grant { id, ttl_ms } => self.begin_lease(*id, *ttl_ms, now_ms),
                Change::End { id } => self.end_lease(*id),
            }
        }
    }

    /// Where a watcher from `from_revision` on begins; 0 = after the last change.
    ///
    /// # Errors
    /// Changes since then are no longer kept; an unfit prefix.
    pub fn watch(&self, prefix: &str, from_revision: u64) -> Result<Cursor, DirectoryError> {
        check::prefix(prefix)?;
        self.history.cursor(prefix, from_revision)
    }

    /// The watcher's next event.
    ///
    /// # Errors
    /// The watcher fell behind what is kept.
    pub fn next_event(&self, cursor: &mut Cursor) -> Result<Option<Event>, DirectoryError> {
        self.history.next(cursor)
    }

    fn lease(&self, id: LeaseId) -> Result<&LeaseState, DirectoryError> {
        self.leases.get(&id).ok_or(DirectoryError::LeaseGone(id))
    }

    fn check_room(&self, changes: &[Change]) -> Result<(), DirectoryError> {
        let (mut keys, mut bytes) = (self.entries.len(), self.bytes);
        let mut grows = false;
        for change in changes {
            let (key, added) = match change {
                Change::Put { key, record } => (key, Some(key.len() + record.value.len())),
                Change::Delete { key } => (key, None),
                Change::Grant { .. } | Change::End { .. } => continue,
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
            check::limit(Bound::Keys, keys, limits::KEYS_MAX)?;
            check::limit(Bound::StoreBytes, bytes, limits::STORE_BYTES_MAX)?;
        }
        Ok(())
    }

    fn insert(&mut self, key: String, record: Record) {
        self.remove(&key);
        if let Some(id) = record.lease {
            let lease = self.leases.get_mut(&id).expect("a record's lease was checked when it was planned");
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
        let lease = self.leases.remove(&id).expect("the end of a lease is planned while it lives");
        assert!(lease.keys.is_empty(), "the keys of a lease are deleted before it ends");
        self.deadlines.remove(&(lease.deadline_ms, id));
    }
}

fn entry(key: &str, record: &Record) -> Entry {
    Entry { key: key.to_owned(), value: record.value.clone(), version: record.version, lease: record.lease }
}

#[cfg(test)]
mod tests;
