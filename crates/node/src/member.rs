//! The node as a member of the cluster: its lease and record, and its eye on the hosts' leases.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, NodeLife, NodeRecord, RequestedMemory};
use aquifer_directory::{
    Compare, Directory, DirectoryEntry, DirectoryError, KeyOperation, Lease, Transaction, WatchEvent,
    WatchEventKind,
};
use aquifer_fabric::{Host, Target};

use crate::epochs::Epochs;
use crate::error::NodeError;
use crate::fences::{Fence, Fences};
use crate::lending::{Lending, Told};
use crate::metrics::Events;
use crate::shutdown::Shutdown;

/// How often the record may change under us while we join.
const JOIN_ATTEMPTS: u32 = 8;
/// How long a request to stop may go unnoticed.
const TICK: Duration = Duration::from_millis(100);

/// A node's membership.
#[derive(Debug)]
pub(crate) struct Member {
    directory: Arc<dyn Directory>,
    record: NodeRecord,
    ttl: Duration,
    lease: Lease,
    kept_alive: Instant,
    fences: Fences,
    epochs: Arc<Epochs>,
    lending: Arc<Lending>,
    events: Arc<Events>,
}

/// A node that has a lease and shuts out whom it must, and is not announced yet.
#[derive(Debug)]
pub(crate) struct Newcomer {
    directory: Arc<dyn Directory>,
    ttl: Duration,
    lease: Lease,
    fences: Fences,
    epochs: Arc<Epochs>,
    events: Arc<Events>,
}

impl Newcomer {
    /// Take a lease, and fence all hosts whose leases are known to be over: those of `epochs` that are not there any more included.
    ///
    /// # Errors
    /// The directory's.
    pub fn new(
        directory: Arc<dyn Directory>,
        ttl: Duration,
        epochs: Arc<Epochs>,
        target: &dyn Target,
    ) -> Result<Self, NodeError> {
        let lease = directory.lease_grant(ttl)?;
        let seen = epochs.all();
        // Whoever was seen has shut out who was there under its number before, as far as the process before this one is concerned.
        for (host, epoch) in &seen {
            epoch.checked_sub(1).into_iter().for_each(|epoch| target.fence(*host, epoch));
        }
        let (fences, events) = (Fences::after(seen), Arc::default());
        let mut newcomer = Self { directory, ttl, lease, fences, epochs, events };
        learn_hosts(&*newcomer.directory, &mut newcomer.fences, &newcomer.epochs, target, &newcomer.events)?;
        Ok(newcomer)
    }

    /// The lease's epoch.
    pub const fn epoch(&self) -> u64 {
        self.lease.epoch
    }

    /// Put the record under the lease.
    ///
    /// # Errors
    /// If the directory fails, or another node has the number.
    pub fn join(self, record: NodeRecord, lending: Arc<Lending>) -> Result<Member, NodeError> {
        let Self { directory, ttl, mut lease, fences, epochs, events } = self;
        // To register memory that a device pins may have taken longer than the lease lasts.
        let kept_alive = Instant::now();
        match directory.lease_keep_alive(lease.id) {
            Err(DirectoryError::LeaseGone(_)) => lease = directory.lease_grant(ttl)?,
            outcome => outcome?,
        }
        let member = Member { directory, record, ttl, lease, kept_alive, fences, epochs, lending, events };
        if let Err(error) = member.put_record() {
            member.go();
            return Err(error);
        }
        Ok(member)
    }
}

impl Member {
    /// The record as it is in the directory. Its epoch tells one life of the node's memory from the next; it stays
    /// when the lease must be renewed.
    #[must_use]
    pub const fn record(&self) -> &NodeRecord {
        &self.record
    }

    /// What happened so far.
    pub(crate) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Go on with another connection to the directory.
    pub fn reconnected(&mut self, directory: Arc<dyn Directory>) {
        self.directory = directory;
        // Whether the lease outlived the break is the first thing to find out.
        self.kept_alive = Instant::now().checked_sub(self.ttl).unwrap_or(self.kept_alive);
    }

    /// End the lease, and with it the record: the memory is gone.
    pub fn leave(&self) {
        if let Err(error) = self.forget_life() {
            tracing::debug!(%error, "it stays in the directory that this memory may come back");
        }
        self.go();
    }

    /// End the lease, and with it the record; the memory is kept, and may come back.
    pub fn go(&self) {
        // If the directory is gone the lease ends by itself.
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "the lease could not be ended");
        }
    }

    const fn life(&self) -> NodeLife {
        let NodeRecord { id, epoch, kept_ms, .. } = self.record;
        NodeLife { node: id, epoch, kept_ms }
    }

    /// Unless a later one is written down already.
    fn forget_life(&self) -> Result<(), DirectoryError> {
        let key = names::life_key(self.record.id);
        if let Some(entry) = self.directory.get(&key)?
            && names::decode::<NodeLife>(&entry)?.is_same(&self.life())
        {
            let compares = vec![Compare::version(&key, entry.version)];
            let operations = vec![KeyOperation::delete(&key)];
            self.directory.transaction(&Transaction { compares, operations })?;
        }
        Ok(())
    }

    fn put_record(&self) -> Result<(), NodeError> {
        let key = names::node_key(self.record.id);
        let value = names::encode(&self.record);
        for _ in 0..JOIN_ATTEMPTS {
            let compare = match self.directory.get(&key)? {
                None => Compare::absent(&key),
                Some(entry) => Compare::version(&key, self.replaceable(&entry)?),
            };
            let operations = vec![
                KeyOperation::put(&key, value.clone(), Some(self.lease.id)),
                KeyOperation::put(names::life_key(self.record.id), names::encode(&self.life()), None),
            ];
            let transaction = Transaction { compares: vec![compare], operations };
            if self.directory.transaction(&transaction)?.is_committed() {
                return Ok(());
            }
        }
        Err(NodeError::Contended { id: self.record.id, attempts: JOIN_ATTEMPTS })
    }

    /// The version of a record that we may replace: our own of an earlier life. Two cannot listen at one address, and we
    /// do, so whoever wrote it is dead.
    fn replaceable(&self, entry: &DirectoryEntry) -> Result<u64, NodeError> {
        let address = match names::decode::<NodeRecord>(entry) {
            Ok(record) if record.address == self.record.address => return Ok(entry.version),
            Ok(record) => record.address,
            Err(_) => "an address that cannot be read".to_owned(),
        };
        Err(NodeError::IdTaken { id: self.record.id, address })
    }

    /// Whatever was asked for while nobody listened.
    pub fn learn_wanted(&self) -> Result<(), DirectoryError> {
        if let Some(entry) = self.directory.get(&names::requested_memory_key(self.record.id))? {
            self.heed_wanted(&entry);
        }
        Ok(())
    }

    /// Somebody wants more or less to be lent.
    fn heed_wanted(&self, entry: &DirectoryEntry) {
        match wish(entry, &self.record) {
            Ok(Some(bytes)) if self.lending.wanted_bytes() != bytes => {
                tracing::info!(node = self.record.id, bytes, "asked to lend so much");
                self.lending.want(bytes);
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(key = entry.key, %error, "a wish cannot be read"),
        }
    }

    /// Say in the directory how much is lent by now.
    fn tell_lent(&mut self) -> Result<(), NodeError> {
        let Told { lent_bytes: memory_bytes, wanted_bytes: requested_memory_bytes, held_up: resize_blocker } =
            self.lending.told();
        let told = NodeRecord { memory_bytes, requested_memory_bytes, resize_blocker, ..self.record.clone() };
        if told != self.record {
            let before = std::mem::replace(&mut self.record, told);
            // What could not be said is said with the next connection.
            self.put_record().inspect_err(|_| self.record = before)?;
        }
        Ok(())
    }

    /// Keep the lease alive, fence hosts whose leases end, and heed how much is to be lent, until the end is asked for.
    ///
    /// # Errors
    /// If the directory fails, or we fell behind it; to be called again, with a new connection if need be.
    pub fn watch(&mut self, target: &dyn Target, shutdown: &Shutdown) -> Result<(), NodeError> {
        self.keep_alive()?;
        let revision = learn_hosts(&*self.directory, &mut self.fences, &self.epochs, target, &self.events)?;
        let mut watch = self.directory.watch(names::AGENTS, revision + 1)?;
        self.learn_wanted()?;
        let wanted_key = names::requested_memory_key(self.record.id);
        let mut wanted = self.directory.watch(&wanted_key, revision + 1)?;
        let tick = TICK.min(self.ttl / 8);
        while !shutdown.is_requested() {
            self.keep_alive()?;
            if let Some(event) = watch.next(tick)? {
                self.take_in(&event, target);
            }
            while let Some(WatchEvent { key, kind, revision: version }) = wanted.next(Duration::ZERO)? {
                if let (true, WatchEventKind::Put { value, lease }) = (key == wanted_key, kind) {
                    self.heed_wanted(&DirectoryEntry { key, value, version, lease });
                }
            }
            self.tell_lent()?;
        }
        Ok(())
    }

    fn take_in(&mut self, event: &WatchEvent, target: &dyn Target) {
        let key = event.key.clone();
        let fence = match event.kind.clone() {
            WatchEventKind::Put { value, lease } => {
                let entry = DirectoryEntry { key, value, version: event.revision, lease };
                lease_of(&entry).and_then(|(host, epoch)| {
                    self.epochs.note(host, epoch);
                    self.fences.present(host, epoch)
                })
            }
            WatchEventKind::Delete => {
                names::host_of_agent_key(&key).and_then(|host| self.fences.gone(Host(host)))
            }
        };
        if let Some(fence) = fence {
            shut_out(target, fence, &self.events);
        }
    }

    /// Keep the lease alive, if it is time. If it ended all the same, take a new one: the memory is still good, and
    /// those who use it are connected to it, not to the directory.
    fn keep_alive(&mut self) -> Result<(), NodeError> {
        if self.kept_alive.elapsed() < self.ttl / 3 {
            return Ok(());
        }
        match self.directory.lease_keep_alive(self.lease.id) {
            Ok(()) => Events::add(&self.events.renewals),
            Err(DirectoryError::LeaseGone(_)) => {
                Events::add(&self.events.renewal_failures);
                tracing::warn!(node = self.record.id, "the lease ended; taking a new one");
                self.lease = self.directory.lease_grant(self.ttl)?;
                self.put_record()?;
            }
            Err(error) => {
                Events::add(&self.events.renewal_failures);
                return Err(error.into());
            }
        }
        self.kept_alive = Instant::now();
        Ok(())
    }
}

/// Read all hosts' leases, and fence those that are over; returns the directory's revision.
fn learn_hosts(
    directory: &dyn Directory,
    fences: &mut Fences,
    epochs: &Epochs,
    target: &dyn Target,
    events: &Events,
) -> Result<u64, DirectoryError> {
    let listing = directory.list(names::AGENTS)?;
    let alive: BTreeMap<Host, u64> = listing.entries.iter().filter_map(lease_of).collect();
    alive.iter().for_each(|(host, epoch)| epochs.note(*host, *epoch));
    for fence in fences.listed(&alive) {
        shut_out(target, fence, events);
    }
    Ok(listing.revision)
}

fn shut_out(target: &dyn Target, fence: Fence, events: &Events) {
    tracing::debug!(host = fence.host.0, epoch = fence.epoch, "fenced");
    target.fence(fence.host, fence.epoch);
    Events::add(&events.fences);
}

/// What a node with this record is asked to lend; `None` if it is asked of another, or of another life.
fn wish(entry: &DirectoryEntry, record: &NodeRecord) -> Result<Option<u64>, DirectoryError> {
    let wanted = names::decode::<RequestedMemory>(entry)?;
    let is_ours = (wanted.node, wanted.epoch) == (record.id, record.epoch);
    Ok(is_ours.then(|| wanted.memory_bytes.min(record.memory_bytes_max)))
}

/// The host whose lease a record tells of, and its epoch; `None` for what is no such record.
fn lease_of(entry: &DirectoryEntry) -> Option<(Host, u64)> {
    let host = names::host_of_agent_key(&entry.key)?;
    match names::decode::<AgentRecord>(entry) {
        Ok(record) if record.host == host => Some((Host(host), record.epoch)),
        _ => {
            tracing::warn!(key = entry.key, "the record of an agent cannot be read");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_is_of_one_life_of_one_node() {
        let record = NodeRecord {
            id: 3,
            fabric: "shm".to_owned(),
            address: "/there".to_owned(),
            memory_bytes: 10,
            memory_bytes_max: 50,
            requested_memory_bytes: 10,
            resize_blocker: None,
            kept_ms: 0,
            epoch: 7,
        };
        let of = |value: Vec<u8>| {
            wish(
                &DirectoryEntry { key: names::requested_memory_key(3), value, version: 1, lease: None },
                &record,
            )
        };
        let asked = |node, epoch, memory_bytes| {
            of(names::encode(&RequestedMemory { node, epoch, memory_bytes })).expect("it can be read")
        };
        assert_eq!(asked(3, 7, 20), Some(20));
        assert_eq!(asked(3, 7, 0), Some(0));
        assert_eq!(asked(3, 7, u64::MAX), Some(50), "no more than the most");
        for (node, epoch) in [(3, 6), (3, 8), (2, 7)] {
            assert_eq!(asked(node, epoch, 20), None, "{node}, {epoch}");
        }
        for odd in [&b""[..], b"{", b"null", br#"{"node":3,"epoch":7,"memory_bytes":-1}"#, b"\xff"] {
            assert!(of(odd.to_vec()).is_err());
        }
    }
}
