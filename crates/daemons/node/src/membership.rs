//! The node's membership in the cluster: its lease and record, and the watches over the leases of
//! hosts and over requests to change how much it lends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, LifeRecord, MemoryHolder, NodeRecord, RequestedMemory};
use aquifer_directory::{
    Compare, Directory, DirectoryEntry, DirectoryError, FailureLog, KeyOperation, Lease, Transaction,
    WatchEvent, WatchEventKind,
};
use aquifer_fabric::{Host, Target};
use aquifer_pool::NodeMemory;

use crate::error::NodeError;
use crate::fences::{Fence, LiveHosts};
use crate::host_epochs::HostEpochs;
use crate::lending::{Lending, LendingStatus};
use crate::metrics::NodeCounters;
use crate::recovered_hosts::fence_recovered;
use crate::shutdown::Shutdown;

/// Maximum number of attempts to write the record while other processes change it.
const JOIN_ATTEMPTS: u32 = 8;
/// Longest time for which a request to stop goes unnoticed.
const TICK: Duration = Duration::from_millis(100);

/// Interval at which the record shows how much memory in use the node recalls.
const RECALLED_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between checks whether a node is unused, once it was asked to end then.
const UNUSED_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The reason why a node has stopped following the directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WatchEnd {
    /// The node was asked to stop.
    Requested,
    /// The node was asked to end when no host uses its memory, and no host does.
    Unused,
    /// The node was drained by force: it ends although hosts use its memory.
    Forced,
}

/// A node's membership.
#[derive(Debug)]
pub(crate) struct NodeMembership {
    directory: Arc<dyn Directory>,
    record: NodeRecord,
    ttl: Duration,
    lease: Lease,
    /// The time of the last keep-alive.
    kept_alive_at: Instant,
    hosts: LiveHosts,
    epochs: Arc<HostEpochs>,
    /// The version of the record of recovered hosts that were fenced.
    recovered_version: u64,
    lending: Arc<Lending>,
    counters: Arc<NodeCounters>,
    /// Limits the log lines about invalid records: they are read again after each failure.
    invalid_records: FailureLog,
    /// The time since when the directory has no host.
    without_hosts_since: Option<Instant>,
    /// The time at which [`NodeRecord::recalled_bytes`] was last updated.
    recalled_updated_at: Option<Instant>,
    /// Whether the node was drained by force.
    is_forced: bool,
}

/// A node that has a lease and has fenced hosts, but has no record yet.
#[derive(Debug)]
pub(crate) struct JoiningNode {
    directory: Arc<dyn Directory>,
    ttl: Duration,
    lease: Lease,
    hosts: LiveHosts,
    epochs: Arc<HostEpochs>,
    /// The version of the record of recovered hosts that were fenced.
    recovered_version: u64,
    counters: Arc<NodeCounters>,
    invalid_records: FailureLog,
}

impl JoiningNode {
    /// Acquires a lease, and fences all hosts whose leases are known to have ended: hosts of
    /// `epochs` that are not in the directory any more, and all hosts that were recovered.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn new(
        directory: Arc<dyn Directory>,
        ttl: Duration,
        epochs: Arc<HostEpochs>,
        target: &dyn Target,
    ) -> Result<Self, NodeError> {
        let lease = directory.lease_grant(ttl)?;
        let seen = epochs.all();
        // The earlier process has fenced the smaller epochs of each host that it has seen.
        for (host, epoch) in &seen {
            epoch.checked_sub(1).into_iter().for_each(|epoch| target.fence(*host, epoch));
        }
        let (mut hosts, counters) = (LiveHosts::new(seen), Arc::default());
        let mut invalid_records = FailureLog::default();
        list_hosts(&*directory, &mut hosts, &epochs, target, &counters, &mut invalid_records)?;
        let recovered_version = fence_recovered(&*directory, target)?;
        Ok(Self { directory, ttl, lease, hosts, epochs, recovered_version, counters, invalid_records })
    }

    /// The epoch of the lease.
    pub const fn epoch(&self) -> u64 {
        self.lease.epoch
    }

    /// Puts the node's record into the directory under the lease.
    ///
    /// # Errors
    /// If the directory fails, or another node has the number.
    pub fn join(
        self,
        record: NodeRecord,
        lending: Arc<Lending>,
        target: &dyn Target,
    ) -> Result<NodeMembership, NodeError> {
        let Self { directory, ttl, mut lease, hosts, epochs, recovered_version, counters, invalid_records } =
            self;
        // Registering memory that a device pins may take longer than the lease lasts.
        let kept_alive_at = Instant::now();
        match directory.lease_keep_alive(lease.id) {
            Err(DirectoryError::LeaseGone(_)) => lease = directory.lease_grant(ttl)?,
            outcome => outcome?,
        }
        let mut membership = NodeMembership {
            directory,
            record,
            ttl,
            lease,
            kept_alive_at,
            hosts,
            epochs,
            recovered_version,
            lending,
            counters,
            invalid_records,
            without_hosts_since: None,
            is_forced: false,
            recalled_updated_at: None,
        };
        match membership.put_record(target) {
            Ok(()) => Ok(membership),
            Err(error) => {
                membership.end_lease();
                Err(error)
            }
        }
    }
}

impl NodeMembership {
    /// The node's record in the directory. Its epoch identifies the life of the node's memory, and
    /// stays when the lease is replaced.
    #[must_use]
    pub const fn record(&self) -> &NodeRecord {
        &self.record
    }

    /// The node's counters.
    pub(crate) fn counters(&self) -> &Arc<NodeCounters> {
        &self.counters
    }

    /// Continues with another connection to the directory.
    pub fn set_directory(&mut self, directory: Arc<dyn Directory>) {
        self.directory = directory;
        // The next keep-alive is due at once: the lease may have ended meanwhile.
        self.kept_alive_at = Instant::now().checked_sub(self.ttl).unwrap_or(self.kept_alive_at);
    }

    /// Leaves the cluster and deletes the record of the memory, which is lost.
    pub fn leave(&self) {
        if let Err(error) = self.delete_life() {
            tracing::debug!(%error, "deleting the record of the node's memory failed");
        }
        self.end_lease();
    }

    /// Ends the lease, and with it the node's record. Kept memory may return.
    pub fn end_lease(&self) {
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "revoking the lease failed; it expires by itself");
        }
    }

    /// Deletes the record of the memory's life, unless the record is of another life.
    fn delete_life(&self) -> Result<(), DirectoryError> {
        let key = names::life_key(self.record.id);
        if let Some(entry) = self.directory.get(&key)?
            && names::decode::<LifeRecord>(&entry)?.life.is_same(&LifeRecord::of(&self.record).life)
        {
            let compares = vec![Compare::version(&key, entry.version)];
            let operations = vec![KeyOperation::delete(&key)];
            self.directory.transaction(&Transaction { compares, operations })?;
        }
        Ok(())
    }

    /// Writes the node's record under the lease, and the record of its life, once all hosts that
    /// were recovered before are fenced. Recoveries that end later have seen the node.
    fn put_record(&mut self, target: &dyn Target) -> Result<(), NodeError> {
        let key = names::node_key(self.record.id);
        let (value, life) = (names::encode(&self.record), names::encode(&LifeRecord::of(&self.record)));
        for _ in 0..JOIN_ATTEMPTS {
            let compare = match self.directory.get(&key)? {
                None => Compare::absent(&key),
                Some(entry) => Compare::version(&key, self.replaceable(&entry)?),
            };
            let operations = vec![
                KeyOperation::put(&key, value.clone(), Some(self.lease.id)),
                KeyOperation::put(names::life_key(self.record.id), life.clone(), None),
            ];
            let recovered = Compare::version(names::RECOVERED_HOSTS, self.recovered_version);
            let transaction = Transaction { compares: vec![compare, recovered], operations };
            if self.directory.transaction(&transaction)?.is_committed() {
                return Ok(());
            }
            self.recovered_version = fence_recovered(&*self.directory, target)?;
        }
        Err(NodeError::Contended { id: self.record.id, attempts: JOIN_ATTEMPTS })
    }

    /// Returns the version of a record that may be replaced, which has this node's address. Only
    /// one process can listen at an address, and this process does, so the process that has written
    /// the record has ended.
    fn replaceable(&self, entry: &DirectoryEntry) -> Result<u64, NodeError> {
        let address = match names::decode::<NodeRecord>(entry) {
            Ok(record) if record.address == self.record.address => return Ok(entry.version),
            Ok(record) => record.address,
            Err(_) => "an unreadable address".to_owned(),
        };
        Err(NodeError::IdTaken { id: self.record.id, address })
    }

    /// Whether any host is alive, as far as is known.
    pub fn has_hosts(&self) -> bool {
        self.directory.list(names::AGENTS).map_or(true, |listing| !listing.entries.is_empty())
    }

    /// Reads the requested memory from the directory.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn load_request(&mut self) -> Result<(), DirectoryError> {
        if let Some(entry) = self.directory.get(&names::requested_memory_key(self.record.id))? {
            self.apply_request(&entry);
        }
        Ok(())
    }

    /// Applies a request to lend more or less.
    fn apply_request(&mut self, entry: &DirectoryEntry) {
        match own_request(entry, &self.record) {
            Ok(Some(request)) => {
                self.is_forced |= request.is_forced;
                let bytes = request.memory_bytes;
                if self.lending.requested_bytes() != bytes {
                    tracing::info!(node = self.record.id, bytes, "memory requested");
                    self.lending.request(bytes);
                }
            }
            Ok(None) => {}
            Err(error) => {
                if let Some(failures) = self.invalid_records.record(Instant::now()) {
                    tracing::warn!(
                        key = entry.key,
                        %error,
                        failures,
                        "ignored unreadable request for memory"
                    );
                }
            }
        }
    }

    /// The memory in use that the node recalls, for its record. It changes all the time while
    /// pages are moved, so the record has it as of some moment of the last second.
    fn recalled(&mut self) -> (u64, Vec<MemoryHolder>) {
        let (before, (now, holders)) = (self.record.recalled_bytes, self.lending.recalled());
        let is_due = self.recalled_updated_at.is_none_or(|at| at.elapsed() >= RECALLED_INTERVAL);
        if now == before || now != 0 && before != 0 && !is_due {
            return (before, self.record.recalled_from.clone());
        }
        self.recalled_updated_at = Some(Instant::now());
        (now, holders)
    }

    /// Writes into the directory how much is lent, if it has changed.
    fn update_record(&mut self, target: &dyn Target) -> Result<(), NodeError> {
        let LendingStatus { lent_bytes, requested_bytes, blocker } = self.lending.status();
        let (recalled_bytes, recalled_from) = self.recalled();
        let updated = NodeRecord {
            recalled_bytes,
            recalled_from,
            memory_bytes: lent_bytes,
            requested_memory_bytes: requested_bytes,
            resize_blocker: blocker,
            ..self.record.clone()
        };
        if updated != self.record {
            let before = std::mem::replace(&mut self.record, updated);
            // After a failure the record is written over the next connection.
            if let Err(error) = self.put_record(target) {
                self.record = before;
                return Err(error);
            }
        }
        Ok(())
    }

    /// True if no host has a lease, and no host can resume with extents in this memory: all of it
    /// is free, or the grace times of all hosts have passed.
    ///
    /// After the same times, other hosts would free the extents.
    fn is_unused(&mut self, node_memory: &NodeMemory) -> Result<bool, NodeError> {
        // Recoveries are included: they access the memory.
        if !self.directory.list(names::AGENTS)?.entries.is_empty() {
            self.without_hosts_since = None;
            return Ok(false);
        }
        let since = *self.without_hosts_since.get_or_insert_with(Instant::now);
        if node_memory.free_bytes() == node_memory.lent_bytes() {
            return Ok(true);
        }
        let dead = names::dead_hosts(&*self.directory)?;
        let grace_ms = dead.iter().map(|host| host.record.grace_ms).max().unwrap_or(0);
        Ok(since.elapsed() >= Duration::from_millis(grace_ms))
    }

    /// Keeps the lease alive, fences hosts whose leases end, and applies requests, until `shutdown`
    /// is requested, or, with [`Shutdown::request_when_unused`], until no host uses the memory.
    ///
    /// # Errors
    /// If the directory fails, or its events were not received fast enough. The caller can call
    /// again, if necessary after [`set_directory`](Self::set_directory).
    pub fn watch(
        &mut self,
        target: &dyn Target,
        node_memory: &NodeMemory,
        shutdown: &Shutdown,
    ) -> Result<WatchEnd, NodeError> {
        self.keep_alive(target)?;
        let revision = list_hosts(
            &*self.directory,
            &mut self.hosts,
            &self.epochs,
            target,
            &self.counters,
            &mut self.invalid_records,
        )?;
        let mut watch = self.directory.watch(names::AGENTS, revision + 1)?;
        self.load_request()?;
        let request_key = names::requested_memory_key(self.record.id);
        let mut requests = self.directory.watch(&request_key, revision + 1)?;
        let tick = TICK.min(self.ttl / 8);
        let mut checked_at = None;
        while !shutdown.is_requested() {
            self.keep_alive(target)?;
            if let Some(event) = watch.next(tick)? {
                self.apply_host_event(&event, target);
            }
            while let Some(WatchEvent { key, kind, revision: version }) = requests.next(Duration::ZERO)? {
                if let (true, WatchEventKind::Put { value, lease }) = (key == request_key, kind) {
                    self.apply_request(&DirectoryEntry { key, value, version, lease });
                }
            }
            if self.is_forced {
                return Ok(WatchEnd::Forced);
            }
            self.update_record(target)?;
            let is_due = checked_at.is_none_or(|at: Instant| at.elapsed() >= UNUSED_CHECK_INTERVAL);
            if shutdown.is_requested_when_unused() && is_due {
                checked_at = Some(Instant::now());
                if self.is_unused(node_memory)? {
                    return Ok(WatchEnd::Unused);
                }
            }
        }
        Ok(WatchEnd::Requested)
    }

    /// Fences a host if its lease has ended or was replaced.
    fn apply_host_event(&mut self, event: &WatchEvent, target: &dyn Target) {
        let key = event.key.clone();
        let fence = match event.kind.clone() {
            WatchEventKind::Put { value, lease } => {
                let entry = DirectoryEntry { key, value, version: event.revision, lease };
                host_and_epoch(&entry, &mut self.invalid_records).and_then(|(host, epoch)| {
                    self.epochs.record(host, epoch);
                    self.hosts.add(host, epoch)
                })
            }
            WatchEventKind::Delete => {
                names::host_of_agent_key(&key).and_then(|host| self.hosts.remove(Host(host)))
            }
        };
        if let Some(fence) = fence {
            set_fence(target, fence, &self.counters);
        }
    }

    /// Sends a keep-alive if one is due. If the lease has ended, acquires a new one: the memory is
    /// still valid, and connections of hosts do not depend on the lease.
    fn keep_alive(&mut self, target: &dyn Target) -> Result<(), NodeError> {
        if self.kept_alive_at.elapsed() < self.ttl / 3 {
            return Ok(());
        }
        match self.directory.lease_keep_alive(self.lease.id) {
            Ok(()) => NodeCounters::increment(&self.counters.renewals),
            Err(DirectoryError::LeaseGone(_)) => {
                NodeCounters::increment(&self.counters.renewal_failures);
                tracing::warn!(node = self.record.id, "lease of this node ended; acquiring a new one");
                self.lease = self.directory.lease_grant(self.ttl)?;
                self.put_record(target)?;
            }
            Err(error) => {
                NodeCounters::increment(&self.counters.renewal_failures);
                return Err(error.into());
            }
        }
        self.kept_alive_at = Instant::now();
        Ok(())
    }
}

/// Lists the hosts, and fences those whose leases have ended. Returns the directory's revision.
fn list_hosts(
    directory: &dyn Directory,
    hosts: &mut LiveHosts,
    epochs: &HostEpochs,
    target: &dyn Target,
    counters: &NodeCounters,
    invalid_records: &mut FailureLog,
) -> Result<u64, DirectoryError> {
    let listing = directory.list(names::AGENTS)?;
    let live: BTreeMap<Host, u64> =
        listing.entries.iter().filter_map(|entry| host_and_epoch(entry, invalid_records)).collect();
    live.iter().for_each(|(host, epoch)| epochs.record(*host, *epoch));
    for fence in hosts.replace(&live) {
        set_fence(target, fence, counters);
    }
    Ok(listing.revision)
}

fn set_fence(target: &dyn Target, fence: Fence, counters: &NodeCounters) {
    tracing::debug!(host = fence.host.0, epoch = fence.epoch, "fenced a host");
    target.fence(fence.host, fence.epoch);
    NodeCounters::increment(&counters.fences);
}

/// The request in an entry, if it is for this life of the node. It asks for no more than the node
/// can lend.
fn own_request(
    entry: &DirectoryEntry,
    record: &NodeRecord,
) -> Result<Option<RequestedMemory>, DirectoryError> {
    let request = names::decode::<RequestedMemory>(entry)?;
    let is_own = (request.node, request.epoch) == (record.id, record.epoch);
    let memory_bytes = request.memory_bytes.min(record.memory_bytes_max);
    Ok(is_own.then_some(RequestedMemory { memory_bytes, ..request }))
}

/// The host and the epoch in a host's record; `None` if it is unreadable.
fn host_and_epoch(entry: &DirectoryEntry, invalid_records: &mut FailureLog) -> Option<(Host, u64)> {
    let host = names::host_of_agent_key(&entry.key)?;
    match names::decode::<AgentRecord>(entry) {
        Ok(record) if record.host == host => Some((Host(host), record.epoch)),
        _ => {
            if let Some(failures) = invalid_records.record(Instant::now()) {
                tracing::warn!(key = entry.key, failures, "ignored host: unreadable record in the directory");
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_directory::sim::DirectoryWorld;
    use aquifer_fabric::sim::{SimFabric, SimOptions};
    use aquifer_fabric::{Identity, Tenant};

    use super::*;

    /// Lets a host die and recovers it. Returns its number and its last epoch.
    fn recover_a_host(directory: &dyn Directory) -> (u16, u64) {
        let ttl = Duration::from_secs(9);
        let lease = directory.lease_grant(ttl).unwrap();
        let host = names::claim_host(directory, lease, "/there", 0).unwrap();
        directory.lease_revoke(lease.id).unwrap();
        let dead = names::dead_hosts(directory).unwrap();
        let dead = dead.iter().find(|dead| dead.record.host == host.host).unwrap();
        let claim =
            names::claim_dead_host(directory, directory.lease_grant(ttl).unwrap(), dead, "/here").unwrap();
        names::finish_recovery(directory, &claim, Vec::new()).unwrap();
        (host.host, host.epoch)
    }

    #[test]
    fn hosts_that_were_recovered_before_a_node_joins_cannot_connect() {
        let world = DirectoryWorld::new(1);
        let directory: Arc<dyn Directory> = Arc::new(world.host(1));
        let fabric = SimFabric::new(1, SimOptions::default());
        let target = fabric.add_node();
        let connect = |(host, epoch)| {
            let who = Identity { host: Host(host), epoch, tenant: Tenant(0) };
            fabric.connect(target.node(), who)
        };
        let before = recover_a_host(&*directory);
        let ttl = Duration::from_secs(9);
        let epochs = Arc::new(HostEpochs::new().unwrap());
        let joining = JoiningNode::new(Arc::clone(&directory), ttl, epochs, &target).unwrap();
        assert!(connect(before).is_err_and(|error| error.is_fence()));
        // Its recovery has not seen the node, which has no record yet.
        let meanwhile = recover_a_host(&*directory);
        assert!(connect(meanwhile).is_ok());
        let lending = Arc::new(Lending::new(10, 10));
        let joined = joining.join(node_record(), lending, &target).unwrap();
        assert!(connect(meanwhile).is_err_and(|error| error.is_fence()));
        let epoch = directory.lease_grant(ttl).unwrap().epoch;
        assert!(connect((meanwhile.0, epoch)).is_ok(), "the number has another host");
        joined.leave();
    }

    fn node_record() -> NodeRecord {
        NodeRecord {
            id: 3,
            fabric: "shm".to_owned(),
            address: "/there".to_owned(),
            memory_bytes: 10,
            memory_bytes_max: 50,
            requested_memory_bytes: 10,
            resize_blocker: None,
            recalled_bytes: 0,
            recalled_from: Vec::new(),
            kept_ms: 0,
            epoch: 7,
            is_disk: false,
        }
    }

    #[test]
    fn a_request_is_for_one_life_of_one_node() {
        let record = node_record();
        let of = |value: Vec<u8>| {
            own_request(
                &DirectoryEntry { key: names::requested_memory_key(3), value, version: 1, lease: None },
                &record,
            )
            .map(|request| request.map(|request| request.memory_bytes))
        };
        let asked = |node, epoch, memory_bytes| {
            of(names::encode(&RequestedMemory::new(node, epoch, memory_bytes))).expect("it can be read")
        };
        assert_eq!(asked(3, 7, 20), Some(20));
        assert_eq!(asked(3, 7, 0), Some(0));
        assert_eq!(asked(3, 7, u64::MAX), Some(50), "at most memory_bytes_max");
        for (node, epoch) in [(3, 6), (3, 8), (2, 7)] {
            assert_eq!(asked(node, epoch, 20), None, "{node}, {epoch}");
        }
        for odd in [&b""[..], b"{", b"null", br#"{"node":3,"epoch":7,"memory_bytes":-1}"#, b"\xff"] {
            assert!(of(odd.to_vec()).is_err());
        }
    }
}
