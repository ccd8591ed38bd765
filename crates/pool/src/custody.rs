//! What a host has of the pool, and who on it knows of what.
//!
//! Memory can be a host's without anybody there knowing of it: an agent was killed between taking it and writing that down, or a node was given up while it
//! stood still. Nobody else may take it, and nobody here gives it back. So a node in *doubt* is *audited*: everything that it says is ours is compared with all
//! *ledgers*, and what is in none goes back. Others work on meanwhile: what they had begun when the node was asked is waited for. What was sent over
//! connections that are given up by now, and is perhaps on its way yet, is ended before.

mod eras;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use aquifer_fabric::{EndpointError, Key, Late};

use crate::client::{Extent, NodeId, PoolClient};
use crate::error::PoolError;
use crate::op::{Held, Recovered};
use eras::Eras;

/// Sections that are looked at before it is asked whether to go on.
const SECTIONS_AT_ONCE: u32 = 512;

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
    late: Mutex<Vec<GivenUp>>,
    eras: Eras,
    auditing: Mutex<()>,
}

/// A connection that was given up.
#[derive(Debug)]
struct GivenUp {
    node: NodeId,
    /// The key of the memory that the node had then. With that memory everything goes that was on its way there.
    life: Key,
    late: Box<dyn Late>,
}

/// Where an audit may be given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pause {
    /// Between two parts of the node.
    Between,
    /// Others are at something that must be over first. It is asked for at once again: whoever is asked waits a little.
    Others {
        /// How often for the same thing, counted from one.
        asked: u32,
    },
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

    /// A connection to a node, with that memory, is given up, and something of it may yet take effect there.
    pub(crate) fn give_up(&self, node: NodeId, life: Key, late: Box<dyn Late>) {
        lock(&self.late).push(GivenUp { node, life, late });
    }

    /// See that nothing of what was given up takes effect any more in the memory that the node has now.
    fn end_late(&self, node: NodeId, life: Key) -> Result<(), EndpointError> {
        // Not under the lock: this waits for the node.
        let of_node: Vec<GivenUp> =
            lock(&self.late).extract_if(.., |given_up| given_up.node == node).collect();
        let mut outcome = Ok(());
        let mut left = Vec::new();
        for mut given_up in of_node.into_iter().filter(|given_up| given_up.life == life) {
            match given_up.late.end() {
                Ok(()) => {}
                Err(error) => {
                    left.push(given_up);
                    outcome = Err(error);
                }
            }
        }
        lock(&self.late).append(&mut left);
        outcome
    }

    fn has_late(&self, node: NodeId) -> bool {
        lock(&self.late).iter().any(|given_up| given_up.node == node)
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

    /// Give back what `pool`'s host has of a node without anybody knowing of it. All who have anything of the node must have entered their ledgers. `go_on` says
    /// whether to; if not, the audit is given up, and the answer is `None`. So it is if a connection broke meanwhile.
    ///
    /// # Errors
    /// [`PoolError::NodeGone`], or if the node does not end what was given up; then some is not given back yet.
    pub fn audit(
        &self,
        pool: &mut PoolClient,
        node: NodeId,
        mut go_on: impl FnMut(Pause) -> bool,
    ) -> Result<Option<Recovered>, PoolError> {
        let _alone = lock(&self.auditing);
        self.end_late(node, pool.life_of(node)).map_err(|cause| PoolError::Endpoint { node, cause })?;
        // Of an audit before, which was given up.
        if !self.wait_for(self.eras.before(), &mut go_on) {
            return Ok(None);
        }
        let Some(mut held) = list(pool, node, &mut go_on)? else { return Ok(None) };
        if !self.wait_for(self.eras.begin_next(), &mut go_on) {
            return Ok(None);
        }
        held.retain(self.unknown(pool, node));
        if !held.is_empty() {
            // One that was being given back may be one that was taken since, and look the same. Once more it cannot be: by then it is written down, or has changed.
            let Some(again) = list(pool, node, &mut go_on)? else { return Ok(None) };
            held.retain(|held| again.contains(held));
            if !self.wait_for(self.eras.begin_next(), &mut go_on) {
                return Ok(None);
            }
            held.retain(self.unknown(pool, node));
        }
        // What others could not finish because a connection broke is as uncertain as what is under way.
        if self.has_late(node) {
            return Ok(None);
        }
        give_back(pool, node, &held, &mut go_on)
    }

    /// Until an era is over; false if it is not to be waited for any longer.
    fn wait_for(&self, era: u64, go_on: &mut impl FnMut(Pause) -> bool) -> bool {
        let mut asked = 0;
        while !self.eras.is_over(era) {
            asked += 1;
            if !go_on(Pause::Others { asked }) {
                return false;
            }
        }
        true
    }

    /// Whether something of a node is in no ledger, by what they say now.
    fn unknown<'a>(&self, pool: &'a PoolClient, node: NodeId) -> impl FnMut(&Held) -> bool + use<'a> {
        let ledgers: Vec<Arc<dyn Ledger>> = lock(&self.ledgers).iter().filter_map(Weak::upgrade).collect();
        let mut known = HashSet::new();
        for ledger in ledgers {
            ledger.extents(&mut |extent| known.extend(Some(extent.addr).filter(|_| extent.node == node)));
        }
        move |held| pool.address_of(node, held).is_none_or(|addr| !known.contains(&addr))
    }
}

/// All that the host has of a node; `None` if that is no longer wanted.
fn list(
    pool: &mut PoolClient,
    node: NodeId,
    go_on: &mut impl FnMut(Pause) -> bool,
) -> Result<Option<HashSet<Held>>, PoolError> {
    let mut held = HashSet::new();
    let sections = pool.sections(node);
    for first in (0..sections).step_by(SECTIONS_AT_ONCE as usize) {
        if !go_on(Pause::Between) {
            return Ok(None);
        }
        let part = first..sections.min(first + SECTIONS_AT_ONCE);
        match pool.held(node, part.clone()) {
            Ok(found) => held.extend(found),
            Err(error) if error.is_of_one_word() => {
                for section in part {
                    held.extend(unless_damaged(pool.held(node, section..section + 1))?.unwrap_or_default());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Some(held))
}

fn give_back(
    pool: &mut PoolClient,
    node: NodeId,
    held: &HashSet<Held>,
    go_on: &mut impl FnMut(Pause) -> bool,
) -> Result<Option<Recovered>, PoolError> {
    let mut by_section: BTreeMap<u32, Vec<Held>> = BTreeMap::new();
    held.iter().for_each(|held| by_section.entry(held.section()).or_default().push(*held));
    let mut found = Recovered::default();
    for (section, there) in by_section {
        if !go_on(Pause::Between) {
            return Ok(None);
        }
        found.add(unless_damaged(pool.give_back_held(node, section, there))?.unwrap_or_default());
    }
    Ok(Some(found))
}

/// A section that cannot be told about keeps nobody from the others.
fn unless_damaged<T>(outcome: Result<T, PoolError>) -> Result<Option<T>, PoolError> {
    match outcome {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_of_one_word() => {
            tracing::warn!(%error, "a section is left out of an audit");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
