//! One node of a client: its endpoint, its layout, and its cached words.

use aquifer_fabric::{Endpoint, Key, KeyEntry, Tenant, WorkError};

use super::connection::NodeConnection;
use super::{Extent, NodeId, random};
use crate::cache::NodeCache;
use crate::error::PoolError;
use crate::figures::{NodeFigures, RecalledMemory};
use crate::layout::Layout;
use crate::op::{Action, Grant, OpError, READ_WORDS_MAX, StateMachine, Step, StepResult, WordAt};
use crate::size::CHUNK_BYTES;

/// A node and the connection to it.
#[derive(Debug)]
pub(super) struct ClientNode {
    id: NodeId,
    pub(super) connection: NodeConnection,
    pub(super) cache: NodeCache,
    /// The answer to the last action.
    pub(super) words: Vec<u64>,
    allocated: AllocatedSince,
}

/// Bytes that a client has allocated since a read of a node's figures.
#[derive(Clone, Copy, Debug, Default)]
struct AllocatedSince {
    /// The number of the read.
    read: u64,
    bytes: u64,
}

/// Why an operation failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The operation failed by the node's words.
    Op(OpError),
    /// The connection or the node failed.
    Work(WorkError),
}

impl Failure {
    /// The error, with the address and size of the extent.
    pub(super) fn of(self, node: NodeId, addr: u64, bytes: u64) -> PoolError {
        match self {
            Self::Work(cause) => connection_error(node, cause),
            Self::Op(OpError::Full) => PoolError::Full { node, bytes },
            Self::Op(OpError::NotAllocated) => PoolError::NotAllocated { node, addr, bytes },
            Self::Op(OpError::NotOurs(owner)) => PoolError::NotOurs { node, addr, owner },
            Self::Op(OpError::Busy { attempts }) => PoolError::Busy { node, attempts },
            Self::Op(OpError::Damaged { at, word, cause }) => PoolError::Damaged { node, at, word, cause },
        }
    }
}

/// The error for a failed connection or node.
pub(super) fn connection_error(node: NodeId, cause: WorkError) -> PoolError {
    match cause {
        WorkError::Away => PoolError::Away { node },
        cause => PoolError::NodeGone { node, cause },
    }
}

impl ClientNode {
    /// Reads and checks the header, and reads all control words.
    pub(super) fn open(
        id: NodeId,
        endpoint: Box<dyn Endpoint>,
        search_start: u64,
        tenant: Tenant,
    ) -> Result<Self, PoolError> {
        let connection = NodeConnection::open(id, endpoint)?;
        let cache = NodeCache::new(connection.layout(), search_start, tenant, random::SYSTEM);
        let words = Vec::with_capacity(READ_WORDS_MAX as usize);
        let mut node = Self { id, connection, cache, words, allocated: AllocatedSince::default() };
        node.refresh()?;
        Ok(node)
    }

    /// Polls the connection, to detect a break. The user's completions are kept.
    pub(super) fn poll(&mut self) {
        self.connection.poll();
    }

    pub(super) const fn region_key(&self) -> Key {
        self.connection.key()
    }

    pub(super) fn into_endpoint(self) -> Box<dyn Endpoint> {
        self.connection.into_endpoint()
    }

    pub(super) fn endpoint(&mut self) -> &mut Box<dyn Endpoint> {
        self.connection.endpoint()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.cache.free_chunks() * CHUNK_BYTES
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.cache.lent_chunks() * CHUNK_BYTES
    }

    /// Bytes that this client has allocated since this read of the node's figures.
    pub(super) fn allocated_since(&self, read: u64) -> u64 {
        if self.allocated.read == read { self.allocated.bytes } else { 0 }
    }

    /// Counts an allocation after this read of the node's figures.
    pub(super) fn count_allocated(&mut self, read: u64, bytes: u64) {
        self.allocated = AllocatedSince { read, bytes: self.allocated_since(read) + bytes };
    }

    /// The memory that the node recalls by these figures.
    pub(super) fn recalled_memory(&self, figures: &NodeFigures) -> Option<RecalledMemory> {
        RecalledMemory::of(self.id, figures, self.connection.base(), self.connection.layout())
    }

    pub(super) fn read_figures(&mut self) -> Result<Option<NodeFigures>, PoolError> {
        self.connection.read_figures().map_err(|cause| connection_error(self.id, cause))
    }

    pub(super) const fn layout(&self) -> &Layout {
        self.connection.layout()
    }

    pub(super) const fn sections(&self) -> u32 {
        self.connection.layout().sections()
    }

    pub(super) fn chunk_of(&self, addr: u64) -> Option<u32> {
        self.connection.layout().chunk_of(addr.checked_sub(self.connection.base())?)
    }

    /// Runs a state machine to its end.
    pub(super) fn run<M: StateMachine>(&mut self, mut machine: M) -> Result<M::Output, Failure> {
        let mut step = machine.start(&mut self.cache);
        loop {
            let action = match step {
                Step::Done(result) => return result.map_err(Failure::Op),
                Step::Post(action) => action,
            };
            let result = match self.connection.execute_action(&action, &mut self.words) {
                Ok(result) => result,
                Err(error) => {
                    self.cache.forget_saved_records();
                    return Err(Failure::Work(error));
                }
            };
            step = machine.step(&mut self.cache, result);
        }
    }

    /// Reads all control words.
    pub(super) fn refresh(&mut self) -> Result<(), PoolError> {
        let layout = *self.connection.layout();
        for first in (0..layout.sections()).step_by(READ_WORDS_MAX as usize) {
            let count = READ_WORDS_MAX.min(layout.sections() - first);
            self.read(WordAt::Section(first), count)?;
            // A READ may tear a word. Damage is found by the CAS, which does not.
            self.cache.learn_sections(first, count, StepResult(&self.words)).ok();
        }
        for first in (0..layout.spans()).step_by(READ_WORDS_MAX as usize) {
            let count = READ_WORDS_MAX.min(layout.spans() - first);
            self.read(WordAt::Span(first), count)?;
            self.cache.learn_spans(first, count, StepResult(&self.words)).ok();
        }
        Ok(())
    }

    fn read(&mut self, at: WordAt, count: u32) -> Result<(), PoolError> {
        let done = self.connection.execute_action(&Action::read(at, count), &mut self.words);
        done.map(drop).map_err(|cause| connection_error(self.id, cause))
    }

    /// The grant, with the key that is in its entry now.
    pub(super) fn with_key(&mut self, grant: Grant) -> Result<Grant, PoolError> {
        self.read(WordAt::key_of(grant), 1)?;
        let key = self.words.first().map_or(Key(0), |entry| KeyEntry(*entry).key());
        Ok(Grant { key, ..grant })
    }

    /// The extent that was granted.
    pub(super) fn extent(&self, grant: Grant) -> Extent {
        let addr = self.connection.base() + self.connection.layout().chunk_data_at(grant.chunk);
        Extent { node: self.id, addr, class: grant.class, key: grant.key }
    }
}
