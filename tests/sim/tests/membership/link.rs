//! A host's connection to one node, and what the host owns there.

use std::sync::Arc;

use aquifer_fabric::reconnecting::AwayPolicy;
use aquifer_fabric::sim::Rng;
use aquifer_fabric::{
    Completion, Endpoint, EndpointError, LocalKey, LocalSlice, Memory, RemoteAddr, Tenant, Verb, Work,
    WorkError,
};
use aquifer_host::nodes::{EndpointPurpose, NodeRegistry};
use aquifer_pool::{Extent, PoolClient, PoolError, SizeClass};

use super::node::NodeSnapshot;

pub const TENANT: Tenant = Tenant(1);
/// Largest number of extents of a connection.
const EXTENTS_MAX: usize = 8;
/// Polls for one operation: more than the events of all operations that can be in flight.
const POLLS: u32 = 200;

/// The outcome of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    /// The operation waits for the node, or for the next process of the host.
    Waits,
    /// The node has no room.
    Full,
    /// The host treats its memory on the node as lost.
    Lost(String),
    /// An error that must not happen.
    Wrong(String),
}

impl From<PoolError> for Outcome {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Full { .. } => Self::Full,
            PoolError::Away { .. } => Self::Waits,
            PoolError::NodeGone { cause, .. } => Self::Lost(cause.to_string()),
            other => Self::Wrong(other.to_string()),
        }
    }
}

/// An extent with its content, if it was written. `other` is the content of a write with an unknown
/// outcome.
#[derive(Clone, Copy, Debug)]
pub struct HeldExtent {
    extent: Extent,
    content: Option<u64>,
    other: Option<u64>,
}

/// Extents of a connection that has ended.
#[derive(Debug)]
pub struct OrphanedExtents {
    pub seen: NodeSnapshot,
    extents: Vec<HeldExtent>,
}

#[derive(Clone, Copy, Debug)]
enum Pending {
    Write { index: usize, content: u64 },
    Read { index: usize },
}

#[derive(Debug)]
pub struct NodeLink {
    pub seen: NodeSnapshot,
    pub extents: Vec<HeldExtent>,
    /// Time since which an operation waits, in milliseconds.
    pub waits_since_ms: Option<u64>,
    /// Whether the host has connected to new memory by the record of the previous memory.
    pub has_stale_record: bool,
    pool: PoolClient,
    data: Box<dyn Endpoint>,
    local: Arc<Memory>,
    local_key: LocalKey,
    pending: Option<Pending>,
}

impl NodeLink {
    /// Connects to a node, if that is possible now.
    pub fn open(nodes: &NodeRegistry, seen: NodeSnapshot) -> Result<Self, Outcome> {
        let connect = |purpose, policy| {
            nodes.try_connect(seen.id, TENANT, purpose, policy).map_err(|failure| {
                match failure.is_temporary {
                    true => Outcome::Waits,
                    false => Outcome::Lost(failure.error.to_string()),
                }
            })
        };
        let mut data = connect(EndpointPurpose::Write, AwayPolicy::Wait)?;
        let mut pool = nodes.unconnected_client(TENANT);
        pool.add_node(seen.id, connect(EndpointPurpose::Allocate, AwayPolicy::Fail)?)?;
        let local = Arc::new(Memory::create("content", 4096).expect("memory"));
        let registered: Result<LocalKey, EndpointError> = data.register_local(Arc::clone(&local));
        let local_key = registered.expect("room for one");
        Ok(Self {
            seen,
            extents: Vec::new(),
            waits_since_ms: None,
            has_stale_record: false,
            pool,
            data,
            local,
            local_key,
            pending: None,
        })
    }

    /// Takes over the extents of a connection that has ended.
    pub fn adopt(&mut self, left: OrphanedExtents) {
        (self.seen, self.extents) = (left.seen, left.extents);
    }

    /// Ends the connection, with its process. The outcome of a write in flight is unknown.
    pub fn leave(mut self) -> OrphanedExtents {
        if let Some(Pending::Write { index, content }) = self.pending {
            self.extents[index].other = Some(content);
        }
        OrphanedExtents { seen: self.seen, extents: self.extents }
    }

    pub fn has_room(&self) -> bool {
        self.extents.len() < EXTENTS_MAX
    }

    /// Whether an operation is in flight.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Runs a random operation on the memory of the node. Returns `Done` only if the node has
    /// answered.
    pub fn act(&mut self, rng: &mut Rng, content: u64) -> Outcome {
        let polled = self.poll_pending();
        if polled != Outcome::Done {
            return polled;
        }
        self.waits_since_ms = None;
        let count = self.extents.len();
        if count == 0 || self.has_room() && rng.chance(1, 3) {
            let class = [SizeClass::CHUNK, SizeClass::SPAN][rng.index(2)];
            return self.allocate(class, content);
        }
        let index = rng.index(count);
        match rng.below(6) {
            0 => self.free(index),
            1 | 2 => self.write(index, content),
            3 => {
                self.post_write(index, content);
                Outcome::Waits
            }
            _ => self.check(index),
        }
    }

    /// Allocates an extent and writes its content.
    pub fn allocate(&mut self, class: SizeClass, content: u64) -> Outcome {
        match self.pool.allocate(self.seen.id, class) {
            Ok(extent) => {
                self.extents.push(HeldExtent { extent, content: None, other: None });
                self.write(self.extents.len() - 1, content)
            }
            Err(error) => error.into(),
        }
    }

    /// Frees an extent. If the node is away, the outcome is unknown, and the extent is not used
    /// again.
    pub fn free(&mut self, index: usize) -> Outcome {
        let held = self.extents.swap_remove(index);
        self.pool.free(held.extent).map_or_else(Outcome::from, |()| Outcome::Done)
    }

    fn write(&mut self, index: usize, content: u64) -> Outcome {
        self.post_write(index, content);
        self.poll_pending()
    }

    fn post_write(&mut self, index: usize, content: u64) {
        self.local.write(0, &content.to_le_bytes());
        self.pending = Some(Pending::Write { index, content });
        self.post(Verb::Write { local: self.slice(0), remote: self.remote(index) });
    }

    /// Reads an extent and compares its content.
    pub fn check(&mut self, index: usize) -> Outcome {
        self.pending = Some(Pending::Read { index });
        self.post(Verb::Read { local: self.slice(8), remote: self.remote(index) });
        self.poll_pending()
    }

    /// Polls the operation in flight. Returns `Done` if none is in flight.
    pub fn poll_pending(&mut self) -> Outcome {
        let Some(pending) = self.pending else { return Outcome::Done };
        let Some(Completion { outcome, .. }) = self.poll() else { return Outcome::Waits };
        self.pending = None;
        match (outcome, pending) {
            (Err(WorkError::Fenced), _) => Outcome::Wrong("a fence has ended an operation".to_owned()),
            (Err(error), _) => Outcome::Lost(error.to_string()),
            (Ok(_), Pending::Write { index, content }) => {
                (self.extents[index].content, self.extents[index].other) = (Some(content), None);
                Outcome::Done
            }
            (Ok(_), Pending::Read { index }) => self.compare(index),
        }
    }

    fn compare(&self, index: usize) -> Outcome {
        let HeldExtent { extent, content, other } = self.extents[index];
        let mut bytes = [0; 8];
        self.local.read(8, &mut bytes);
        let found = u64::from_le_bytes(bytes);
        if content.is_none() || content == Some(found) || other == Some(found) {
            return Outcome::Done;
        }
        Outcome::Wrong(format!("{extent:?} has {found:#x}, and {content:x?} or {other:x?} was written"))
    }

    fn remote(&self, index: usize) -> RemoteAddr {
        let extent = self.extents[index].extent;
        RemoteAddr { addr: extent.addr, key: extent.key }
    }

    fn slice(&self, offset: u64) -> LocalSlice {
        LocalSlice { key: self.local_key, offset, len: 8 }
    }

    fn post(&mut self, verb: Verb) {
        self.data.post(&[Work { id: 1, verb, signalled: true }]).expect("one fits");
    }

    fn poll(&mut self) -> Option<Completion> {
        let mut completions = Vec::new();
        for _ in 0..POLLS {
            if self.data.poll(&mut completions, 1) > 0 || self.data.is_away() {
                break;
            }
        }
        completions.pop()
    }
}
