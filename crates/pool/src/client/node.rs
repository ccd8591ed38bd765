//! One node as a client sees it: its endpoint, its layout, and what is remembered of its words.

use aquifer_fabric::{Endpoint, Key, KeyEntry, Late, Tenant, WorkError};

use super::wire::Wire;
use super::{Extent, NodeId, draws};
use crate::cache::NodeCache;
use crate::error::PoolError;
use crate::op::{Action, Grant, Machine, OpError, READ_WORDS_MAX, Step, StepResult, WordAt};
use crate::size::CHUNK_BYTES;

#[derive(Debug)]
pub(super) struct Node {
    id: NodeId,
    pub(super) wire: Wire,
    pub(super) cache: NodeCache,
    pub(super) words: Vec<u64>,
    is_given_up: bool,
}

/// Why an operation came to nothing.
#[derive(Debug)]
pub(super) enum Failure {
    Op(OpError),
    Work(WorkError),
}

impl Failure {
    /// The error, told of this extent.
    pub(super) fn of(self, node: NodeId, addr: u64, bytes: u64) -> PoolError {
        match self {
            Self::Work(cause) => lost(node, cause),
            Self::Op(OpError::Full) => PoolError::Full { node, bytes },
            Self::Op(OpError::NotAllocated) => PoolError::NotAllocated { node, addr, bytes },
            Self::Op(OpError::NotOurs(owner)) => PoolError::NotOurs { node, addr, owner },
            Self::Op(OpError::Busy { attempts }) => PoolError::Busy { node, attempts },
            Self::Op(OpError::Damaged { at, word, cause }) => PoolError::Damaged { node, at, word, cause },
        }
    }
}

/// The node, or the way to it, failed.
pub(super) fn lost(node: NodeId, cause: WorkError) -> PoolError {
    match cause {
        WorkError::Away => PoolError::Away { node },
        cause => PoolError::NodeGone { node, cause },
    }
}

impl Node {
    /// Read the header, make sure that we understand it, and read all control words.
    pub(super) fn open(
        id: NodeId,
        endpoint: Box<dyn Endpoint>,
        begin_at: u64,
        tenant: Tenant,
    ) -> Result<Self, PoolError> {
        let wire = Wire::open(id, endpoint)?;
        let cache = NodeCache::new(wire.layout(), begin_at, tenant, draws::SYSTEM);
        let words = Vec::with_capacity(READ_WORDS_MAX as usize);
        let mut node = Self { id, wire, cache, words, is_given_up: false };
        node.refresh()?;
        Ok(node)
    }

    /// Take what has come of itself: what it was is kept for who waits for it, and a break shows.
    pub(super) fn tend(&mut self) {
        self.wire.tend();
    }

    /// Something is begun: if the connection is there, its break is another than that of one before it.
    pub(super) fn begin(&mut self) {
        self.is_given_up &= self.wire.is_down();
    }

    /// What of its connection may yet take effect when that is given up; said once.
    pub(super) fn take_late(&mut self) -> Option<Box<dyn Late>> {
        let late = self.wire.late().filter(|_| !self.is_given_up)?;
        self.is_given_up = true;
        Some(late)
    }

    pub(super) const fn region_key(&self) -> Key {
        self.wire.key()
    }

    pub(super) fn into_endpoint(self) -> Box<dyn Endpoint> {
        self.wire.into_endpoint()
    }

    pub(super) fn endpoint(&mut self) -> &mut Box<dyn Endpoint> {
        self.wire.endpoint()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.cache.free_chunks() * CHUNK_BYTES
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.cache.lent_chunks() * CHUNK_BYTES
    }

    pub(super) const fn sections(&self) -> u32 {
        self.wire.layout().sections()
    }

    pub(super) fn chunk_of(&self, addr: u64) -> Option<u32> {
        self.wire.layout().chunk_of(addr.checked_sub(self.wire.base())?)
    }

    /// Run a machine to its end.
    pub(super) fn run<M: Machine>(&mut self, mut machine: M) -> Result<M::Output, Failure> {
        let mut step = machine.start(&mut self.cache);
        loop {
            let action = match step {
                Step::Done(result) => return result.map_err(Failure::Op),
                Step::Post(action) => action,
            };
            let result = match self.wire.carry_out(&action, &mut self.words) {
                Ok(result) => result,
                Err(error) => {
                    self.cache.unsettle_all();
                    return Err(Failure::Work(error));
                }
            };
            step = machine.step(&mut self.cache, result);
        }
    }

    /// Read all control words again.
    pub(super) fn refresh(&mut self) -> Result<(), PoolError> {
        let layout = *self.wire.layout();
        for first in (0..layout.sections()).step_by(READ_WORDS_MAX as usize) {
            let count = READ_WORDS_MAX.min(layout.sections() - first);
            self.read(WordAt::Section(first), count)?;
            // A torn word is no damage; whoever wants to change it finds out.
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
        let done = self.wire.carry_out(&Action::read(at, count), &mut self.words);
        done.map(drop).map_err(|cause| lost(self.id, cause))
    }

    /// What was granted there, with the key that it has now.
    pub(super) fn with_key(&mut self, grant: Grant) -> Result<Grant, PoolError> {
        self.read(WordAt::key_of(grant), 1)?;
        let key = self.words.first().map_or(Key(0), |entry| KeyEntry(*entry).key());
        Ok(Grant { key, ..grant })
    }

    /// What was granted, as users know it.
    pub(super) fn extent(&self, grant: Grant) -> Extent {
        let addr = self.wire.base() + self.wire.layout().chunk_data_at(grant.chunk);
        Extent { node: self.id, addr, class: grant.class, key: grant.key }
    }
}
