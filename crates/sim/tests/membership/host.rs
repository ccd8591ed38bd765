//! A host of the simulation: its lease, what it owns on each node, and the recovery that it is at.

use std::sync::Arc;
use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord, DeadHost};
use aquifer_directory::sim::SimDirectory;
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::sim::SimFabric;
use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Host, Identity, LocalKey, LocalSlice, Memory, RemoteAddr, Tenant,
    Verb, Work, WorkError,
};
use aquifer_host::recovery::{GraceTimes, RecoveryClaim};
use aquifer_pool::{Extent, PoolClient, PoolError, SizeClass};

use super::node::SimNode;

pub const TENANT: Tenant = Tenant(1);
pub const LEASE_TTL: Duration = Duration::from_secs(15);
/// How long after the end of its lease a host may resume, in milliseconds.
pub const GRACE_MS: u64 = 2_000;
/// How long the lease of a recovery lasts: so short that recoveries often overtake each other.
const RECOVERY_TTL: Duration = Duration::from_secs(4);

/// A process that is a host of the pool, from its start to its end.
#[derive(Debug)]
pub struct SimHost {
    pub directory: SimDirectory,
    pub lease: Lease,
    pub record: AgentRecord,
    pub links: Vec<NodeLink>,
    pub recovery: Option<RecoveryClaim>,
    pub grace_times: GraceTimes,
    /// Turns for which it is stopped (SIGSTOP).
    pub stopped_turns: u32,
    pub renewed_ms: u64,
}

/// A host's connection to one node.
#[derive(Debug)]
pub struct NodeLink {
    pub pool: PoolClient,
    data: Box<dyn Endpoint>,
    local: Arc<Memory>,
    local_key: LocalKey,
    /// Extents with their content.
    pub extents: Vec<(Extent, u64)>,
    /// A write that was posted and not waited for: the extent's index and its new content.
    pending: Option<(usize, u64)>,
    pub is_fenced: bool,
}

/// Why an operation on a node fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The node has fenced the host.
    Fenced,
    /// The node has no room.
    Full,
    /// Something that must not happen.
    Wrong(String),
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Full { .. } => Self::Full,
            PoolError::NodeGone { cause: WorkError::Fenced | WorkError::Flushed, .. } => Self::Fenced,
            other => Self::Wrong(other.to_string()),
        }
    }
}

impl From<EndpointError> for Failure {
    fn from(error: EndpointError) -> Self {
        if error.is_fence() { Self::Fenced } else { Self::Wrong(error.to_string()) }
    }
}

impl SimHost {
    /// Joins the cluster and connects to all nodes.
    pub fn join(directory: SimDirectory, now_ms: u64) -> Result<Self, DirectoryError> {
        let lease = directory.lease_grant(LEASE_TTL)?;
        let record = names::claim_host(&directory, lease, "a host", GRACE_MS)?;
        Ok(Self::new(directory, lease, record, now_ms))
    }

    fn new(directory: SimDirectory, lease: Lease, record: AgentRecord, renewed_ms: u64) -> Self {
        Self {
            directory,
            lease,
            record,
            links: Vec::new(),
            recovery: None,
            grace_times: GraceTimes::default(),
            stopped_turns: 0,
            renewed_ms,
        }
    }

    /// Takes over the number of the process before, which has ended.
    pub fn resume(
        directory: SimDirectory,
        before: &AgentRecord,
        now_ms: u64,
    ) -> Result<Self, DirectoryError> {
        let lease = directory.lease_grant(LEASE_TTL)?;
        let record = names::resume_host(&directory, lease, before, GRACE_MS)?;
        Ok(Self::new(directory, lease, record, now_ms))
    }

    pub fn connect(&mut self, fabric: &SimFabric, nodes: &[SimNode]) -> Result<(), Failure> {
        let (host, epoch) = (Host(self.record.host), self.record.epoch);
        let identity = Identity { host, epoch, tenant: TENANT };
        self.links =
            nodes.iter().map(|node| NodeLink::open(fabric, node, identity)).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Takes over what the process before has, once this one is connected.
    pub fn inherit(&mut self, before: Vec<NodeLink>) -> Result<(), Failure> {
        self.links.iter_mut().zip(before).try_for_each(|(link, before)| link.inherit(before))
    }

    /// The dead hosts whose grace time has passed.
    pub fn list_due(&mut self, now: Duration) -> Vec<DeadHost> {
        let Ok(mut dead) = names::dead_hosts(&self.directory) else { return Vec::new() };
        self.grace_times.list(&dead, now);
        dead.retain(|dead| self.grace_times.is_due(dead, now));
        dead
    }

    /// Claims a dead host, if it can be recovered now.
    pub fn claim(&self, dead: &DeadHost) -> Result<Option<RecoveryClaim>, DirectoryError> {
        RecoveryClaim::claim(&self.directory, RECOVERY_TTL, dead, "a recovery")
    }
}

impl NodeLink {
    fn open(fabric: &SimFabric, node: &SimNode, identity: Identity) -> Result<Self, Failure> {
        let mut pool = PoolClient::new(identity.host, TENANT);
        pool.add_node(node.id, fabric.connect(node.target.node(), identity)?)?;
        let mut data = fabric.connect(node.target.node(), identity)?;
        let local = Arc::new(Memory::create("content", 4096).expect("memory"));
        let local_key = data.register_local(Arc::clone(&local)).expect("room for one");
        Ok(Self { pool, data, local, local_key, extents: Vec::new(), pending: None, is_fenced: false })
    }

    /// Allocates an extent and writes its content.
    pub fn allocate(&mut self, class: SizeClass, content: u64) -> Result<(), Failure> {
        self.settle()?;
        let node = self.pool.nodes().next().expect("it has one node");
        let extent = self.pool.allocate(node, class)?;
        self.write(extent, content)?;
        self.extents.push((extent, content));
        Ok(())
    }

    pub fn free(&mut self, index: usize) -> Result<(), Failure> {
        self.settle()?;
        let (extent, _) = self.extents.swap_remove(index);
        Ok(self.pool.free(extent)?)
    }

    /// Writes new content and waits.
    pub fn rewrite(&mut self, index: usize, content: u64) -> Result<(), Failure> {
        self.post_rewrite(index, content)?;
        self.settle()
    }

    /// Writes new content and does not wait.
    pub fn post_rewrite(&mut self, index: usize, content: u64) -> Result<(), Failure> {
        self.settle()?;
        self.post_write(self.extents[index].0, content);
        self.pending = Some((index, content));
        Ok(())
    }

    /// Reads an extent and compares its content.
    pub fn check(&mut self, index: usize) -> Result<(), Failure> {
        self.settle()?;
        let (extent, content) = self.extents[index];
        let found = self.read(extent)?;
        if found == content {
            return Ok(());
        }
        Err(Failure::Wrong(format!("{extent:?} has {found:#x}, and {content:#x} was written")))
    }

    /// Takes over the extents of the process before. A write that it has not waited for may have
    /// been done or not.
    fn inherit(&mut self, before: Self) -> Result<(), Failure> {
        self.extents = before.extents;
        if let Some((index, content)) = before.pending
            && self.read(self.extents[index].0)? == content
        {
            self.extents[index].1 = content;
        }
        Ok(())
    }

    fn read(&mut self, extent: Extent) -> Result<u64, Failure> {
        let (local, remote) = (self.local_slice(8), RemoteAddr { addr: extent.addr, key: extent.key });
        self.post(Verb::Read { local, remote });
        self.wait()?;
        let mut found = [0; 8];
        self.local.read(8, &mut found);
        Ok(u64::from_le_bytes(found))
    }

    /// Waits for the write that was not waited for.
    fn settle(&mut self) -> Result<(), Failure> {
        let Some((index, content)) = self.pending else { return Ok(()) };
        self.wait()?;
        self.extents[index].1 = content;
        self.pending = None;
        Ok(())
    }

    fn write(&mut self, extent: Extent, content: u64) -> Result<(), Failure> {
        self.post_write(extent, content);
        self.wait()
    }

    fn post_write(&mut self, extent: Extent, content: u64) {
        self.local.write(0, &content.to_le_bytes());
        let remote = RemoteAddr { addr: extent.addr, key: extent.key };
        self.post(Verb::Write { local: self.local_slice(0), remote });
    }

    fn local_slice(&self, offset: u64) -> LocalSlice {
        LocalSlice { key: self.local_key, offset, len: 8 }
    }

    fn post(&mut self, verb: Verb) {
        self.data.post(&[Work { id: 1, verb, signalled: true }]).expect("one fits");
    }

    fn wait(&mut self) -> Result<(), Failure> {
        let mut completions: Vec<Completion> = Vec::new();
        while self.data.poll(&mut completions, 1) == 0 {}
        match completions[0].outcome {
            Ok(_) => Ok(()),
            Err(WorkError::Fenced | WorkError::Flushed) => Err(Failure::Fenced),
            Err(error) => Err(Failure::Wrong(format!("an access of its own memory failed: {error}"))),
        }
    }
}
