//! What a host has of the pool, and who on it knows of what.
//!
//! Memory can be a host's without anybody there knowing of it: an agent was killed between taking it and writing that down, or a node was given up while it
//! stood still. Nobody else may take it, and nobody here gives it back. So a node in *doubt* is *audited*: everything that it says is ours is compared with all
//! *ledgers*, and what is in none goes back. Others work on meanwhile: what they had begun when the node was asked is waited for. What was sent over
//! connections that are given up by now, and is perhaps on its way yet, is ended before.

mod eras;

use std::collections::{BTreeSet, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_fabric::{EndpointError, Late};

use crate::client::{Extent, NodeId, PoolClient};
use crate::error::PoolError;
use crate::op::{Held, Recovered};
use eras::Eras;

/// Who writes down what it has of the pool: from before the [`UnderWay`] ends under which it was taken, until it is given back.
pub trait Ledger: Send + Sync + Debug {
    /// Everything that is written down.
    fn extents(&self, each: &mut dyn FnMut(Extent));
}

/// See above; one for all clients of a host.
#[derive(Debug, Default)]
pub struct Custody {
    ledgers: Mutex<Vec<Weak<dyn Ledger>>>,
    doubtful: Mutex<BTreeSet<NodeId>>,
    late: Mutex<Vec<(NodeId, Box<dyn Late>)>>,
    eras: Eras,
    auditing: Mutex<()>,
}

/// While this lives, its owner takes memory and writes it down, or gives it back.
#[derive(Debug)]
pub struct UnderWay {
    custody: Arc<Custody>,
    era: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.custody.eras.leave(self.era);
    }
}

impl Custody {
    /// What is written down there is known of, as long as anybody has it.
    pub fn enter<L: Ledger + 'static>(&self, ledger: &Arc<L>) {
        let ledger = Arc::downgrade(ledger) as Weak<dyn Ledger>;
        let mut ledgers = lock(&self.ledgers);
        ledgers.retain(|other| other.strong_count() > 0 && !Weak::ptr_eq(other, &ledger));
        ledgers.push(ledger);
    }

    /// Memory is about to be taken, and written down before this is dropped; or to be given back.
    #[must_use]
    pub fn under_way(self: &Arc<Self>) -> UnderWay {
        UnderWay { era: self.eras.enter(), custody: Arc::clone(self) }
    }

    /// Something of a node may be ours without anybody knowing.
    pub fn doubt(&self, node: NodeId) {
        lock(&self.doubtful).insert(node);
    }

    /// A connection to a node is given up, and something of it may yet take effect there.
    pub(crate) fn give_up(&self, node: NodeId, late: Box<dyn Late>) {
        lock(&self.late).push((node, late));
    }

    /// See that nothing that was given up takes effect any more.
    fn end_late(&self, node: NodeId) -> Result<(), EndpointError> {
        // Not under the lock: this waits for the node.
        let mut late: Vec<_> = lock(&self.late).extract_if(.., |(other, _)| *other == node).collect();
        let mut outcome = Ok(());
        late.retain_mut(|(_, late)| {
            if outcome.is_ok() {
                outcome = late.end();
            }
            outcome.is_err()
        });
        lock(&self.late).append(&mut late);
        outcome
    }

    fn has_late(&self, node: NodeId) -> bool {
        lock(&self.late).iter().any(|(other, _)| *other == node)
    }

    /// Whether a node is in doubt.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        !lock(&self.doubtful).is_empty()
    }

    /// The nodes in doubt since the last call.
    #[must_use]
    pub fn take_doubtful(&self) -> BTreeSet<NodeId> {
        std::mem::take(&mut *lock(&self.doubtful))
    }

    /// Give back what `pool`'s host has of a node without anybody knowing of it. All who have anything of the node must have entered their ledgers. `pause` is
    /// called while others are at it; if it says false the audit is given up, and the answer is `None`; so it is if a connection broke meanwhile.
    ///
    /// # Errors
    /// As for [`PoolClient::recover`], or if the node does not end what was given up; then some is not given back yet.
    pub fn audit(
        &self,
        pool: &mut PoolClient,
        node: NodeId,
        mut pause: impl FnMut() -> bool,
    ) -> Result<Option<Recovered>, PoolError> {
        let _alone = lock(&self.auditing);
        self.end_late(node).map_err(|cause| PoolError::Endpoint { node, cause })?;
        // Of an audit before, which was given up.
        let mut is_quiet = self.wait_for(self.eras.before(), &mut pause);
        let mut held: HashSet<Held> = pool.held(node)?.into_iter().collect();
        is_quiet = is_quiet && self.wait_for(self.eras.begin_next(), &mut pause);
        let known = self.known(node);
        held.retain(|held| pool.address_of(node, held).is_none_or(|addr| !known.contains(&addr)));
        if held.iter().any(Held::is_between) {
            // One that was being given back may be one that is being taken by now, and look the same. By the next look it has changed.
            let again: HashSet<Held> = pool.held(node)?.into_iter().collect();
            held.retain(|held| again.contains(held));
            is_quiet = is_quiet && self.wait_for(self.eras.begin_next(), &mut pause);
        }
        // What others could not finish because a connection broke is as uncertain as what is under way.
        if !is_quiet || self.has_late(node) {
            return Ok(None);
        }
        pool.give_back_held(node, &held).map(Some)
    }

    /// Until an era is over, or `pause` says that it is not to be waited for.
    fn wait_for(&self, era: u64, pause: &mut impl FnMut() -> bool) -> bool {
        while !self.eras.is_over(era) {
            if !pause() {
                return false;
            }
        }
        true
    }

    /// Where what is written down of a node is.
    fn known(&self, node: NodeId) -> HashSet<u64> {
        let ledgers: Vec<Arc<dyn Ledger>> = lock(&self.ledgers).iter().filter_map(Weak::upgrade).collect();
        let mut known = HashSet::new();
        for ledger in ledgers {
            ledger.extents(&mut |extent| known.extend(Some(extent.addr).filter(|_| extent.node == node)));
        }
        known
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
