//! Leak detection: finds extents that this host owns on a node and that no ledger of the host
//! names.
//!
//! A host can own memory without any process of the host having recorded it: an agent was killed
//! between the CAS and its own record, or a connection was abandoned while operations were in
//! flight. No other host may allocate that memory, and no part of this host frees it. A node that
//! may have such memory is *suspect*: a *leak scan* compares what its words record for this host
//! with all *ledgers*. What no ledger names is freed (U1 to U4 of `docs/formats/pool.md`).
//!
//! All clients of the host continue meanwhile. The scan waits for a grace period, that is, until
//! all operations have ended that had begun when the node's words were read. Before that it drains
//! the operations in flight on connections that were abandoned.

mod grace;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Weak};

use aquifer_fabric::{DrainHandle, EndpointError, Key};
use parking_lot::Mutex;

use crate::client::{Extent, NodeId, PoolClient};
use crate::error::PoolError;
use crate::op::{Holding, Recovered};
use grace::GracePeriods;

/// Sections that are scanned between two calls of the caller's `may_continue`.
const SECTIONS_PER_PART: u32 = 512;

/// A record of the extents that a part of this host owns.
///
/// An extent is in the ledger before the [`OperationGuard`] under which it was allocated is
/// dropped, and stays there until it is freed.
pub trait Ledger: Send + Sync + Debug {
    /// Calls `each` with every recorded extent.
    fn extents(&self, each: &mut dyn FnMut(Extent));
}

/// Finds and frees leaked memory. All clients of a host share one.
///
/// A node is *suspect* from the moment at which a part of the host reports that the host may have
/// leaked memory there ([`Self::suspect_leak`]) until [`Self::pop_suspects`] returns the node for a
/// leak scan.
#[derive(Debug, Default)]
pub struct LeakDetector {
    ledgers: Mutex<Vec<Weak<dyn Ledger>>>,
    /// The suspect nodes.
    suspects: Mutex<BTreeSet<NodeId>>,
    abandoned: Mutex<Vec<AbandonedConnection>>,
    grace: GracePeriods,
    /// Held during a scan: scans do not overlap.
    scanning: Mutex<()>,
}

/// A connection that was abandoned with operations in flight.
#[derive(Debug)]
struct AbandonedConnection {
    node: NodeId,
    /// The region key that the node's memory had. When that memory is gone, the operations cannot
    /// take effect any more.
    region_key: Key,
    drain: Box<dyn DrainHandle>,
}

/// A point at which the caller may cancel a leak scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScanProgress {
    /// The next part of the node is about to be scanned.
    NextPart,
    /// Operations of other threads have not ended yet. The scan asks again at once, so the callback
    /// should wait a little.
    Waiting {
        /// How often this was reported for the same grace period, counted from 1.
        attempt: u32,
    },
}

/// Marks an operation that allocates and records memory, or frees it. It ends when this is dropped.
#[derive(Debug)]
pub struct OperationGuard {
    leak_detector: Arc<LeakDetector>,
    generation: u64,
}

impl Drop for OperationGuard {
    fn drop(&mut self) {
        self.leak_detector.grace.end(self.generation);
    }
}

impl LeakDetector {
    /// Registers a ledger until its last strong reference is dropped.
    pub fn register_ledger<L: Ledger + 'static>(&self, ledger: &Arc<L>) {
        let ledger = Arc::downgrade(ledger) as Weak<dyn Ledger>;
        let mut ledgers = self.ledgers.lock();
        ledgers.retain(|other| other.strong_count() > 0 && !Weak::ptr_eq(other, &ledger));
        ledgers.push(ledger);
    }

    /// Begins an operation that allocates memory and records it in a ledger, or that frees memory.
    #[must_use]
    pub fn begin_operation(self: &Arc<Self>) -> OperationGuard {
        OperationGuard { generation: self.grace.begin(), leak_detector: Arc::clone(self) }
    }

    /// Reports that this host may have leaked memory of a node. The node is suspect then.
    pub fn suspect_leak(&self, node: NodeId) {
        self.suspects.lock().insert(node);
    }

    /// Adds a connection that was abandoned with operations in flight; `region_key` is the key of
    /// the node's memory at that time.
    pub(crate) fn add_abandoned(&self, node: NodeId, region_key: Key, drain: Box<dyn DrainHandle>) {
        self.abandoned.lock().push(AbandonedConnection { node, region_key, drain });
    }

    /// U1: ends the operations of abandoned connections to the memory that the node has now.
    fn drain_abandoned(&self, node: NodeId, region_key: Key) -> Result<(), EndpointError> {
        // The lock is not held while this waits for the node.
        let of_node: Vec<AbandonedConnection> =
            self.abandoned.lock().extract_if(.., |connection| connection.node == node).collect();
        let mut outcome = Ok(());
        let mut undrained = Vec::new();
        for mut connection in of_node.into_iter().filter(|connection| connection.region_key == region_key) {
            if let Err(error) = connection.drain.drain() {
                undrained.push(connection);
                outcome = Err(error);
            }
        }
        self.abandoned.lock().append(&mut undrained);
        outcome
    }

    fn has_abandoned(&self, node: NodeId) -> bool {
        self.abandoned.lock().iter().any(|connection| connection.node == node)
    }

    /// Whether any node is suspect.
    #[must_use]
    pub fn has_suspects(&self) -> bool {
        !self.suspects.lock().is_empty()
    }

    /// Returns the suspect nodes, which then are not suspect any more: the caller must scan them.
    #[must_use]
    pub fn pop_suspects(&self) -> BTreeSet<NodeId> {
        std::mem::take(&mut *self.suspects.lock())
    }

    /// Leak scan: frees what the host of `pool` owns on a node and no ledger names.
    ///
    /// All parts of the host that own extents of the node must have registered their ledgers. The
    /// scan returns `None` if `may_continue` returned false, or if a connection to the node broke
    /// meanwhile; then the caller repeats it later.
    ///
    /// # Errors
    /// [`PoolError::NodeGone`], or an endpoint error if operations of an abandoned connection could
    /// not be drained. Some leaked memory may not be freed then.
    pub fn scan(
        &self,
        pool: &mut PoolClient,
        node: NodeId,
        mut may_continue: impl FnMut(ScanProgress) -> bool,
    ) -> Result<Option<Recovered>, PoolError> {
        let _exclusive = self.scanning.lock();
        self.drain_abandoned(node, pool.region_key(node))
            .map_err(|cause| PoolError::Endpoint { node, cause })?;
        // A cancelled scan may have left a generation that has not ended.
        if !self.wait_for(self.grace.previous_generation(), &mut may_continue) {
            return Ok(None);
        }
        let Some(mut leaked) = list_holdings(pool, node, &mut may_continue)? else { return Ok(None) };
        if !self.wait_for(self.grace.next_generation(), &mut may_continue) {
            return Ok(None);
        }
        leaked.retain(self.is_in_no_ledger(pool, node));
        if !leaked.is_empty() {
            // An extent without a key may have been in the middle of a free, and may have been
            // allocated again since with the same log entry. After the second pass it is in a
            // ledger or its entry has changed.
            let Some(again) = list_holdings(pool, node, &mut may_continue)? else { return Ok(None) };
            leaked.retain(|holding| again.contains(holding));
            if !self.wait_for(self.grace.next_generation(), &mut may_continue) {
                return Ok(None);
            }
            leaked.retain(self.is_in_no_ledger(pool, node));
        }
        // An operation that ended because its connection broke may still take effect.
        if self.has_abandoned(node) {
            return Ok(None);
        }
        free_leaked(pool, node, &leaked, &mut may_continue)
    }

    /// Waits until all operations of a generation have ended; false if the caller cancels.
    fn wait_for(&self, generation: u64, may_continue: &mut impl FnMut(ScanProgress) -> bool) -> bool {
        let mut attempt = 0;
        while !self.grace.is_drained(generation) {
            attempt += 1;
            if !may_continue(ScanProgress::Waiting { attempt }) {
                return false;
            }
        }
        true
    }

    /// A predicate: whether no ledger names a holding on `node`, by the ledgers' present contents.
    fn is_in_no_ledger<'a>(
        &self,
        pool: &'a PoolClient,
        node: NodeId,
    ) -> impl FnMut(&Holding) -> bool + use<'a> {
        let ledgers: Vec<Arc<dyn Ledger>> = self.ledgers.lock().iter().filter_map(Weak::upgrade).collect();
        let mut recorded = HashSet::new();
        for ledger in ledgers {
            ledger.extents(&mut |extent| recorded.extend(Some(extent.addr).filter(|_| extent.node == node)));
        }
        move |holding| pool.address_of(node, holding).is_none_or(|addr| !recorded.contains(&addr))
    }
}

/// U2: lists all that the host owns on a node; `None` if the caller cancels.
fn list_holdings(
    pool: &mut PoolClient,
    node: NodeId,
    may_continue: &mut impl FnMut(ScanProgress) -> bool,
) -> Result<Option<HashSet<Holding>>, PoolError> {
    let mut holdings = HashSet::new();
    let sections = pool.sections(node);
    for first in (0..sections).step_by(SECTIONS_PER_PART as usize) {
        if !may_continue(ScanProgress::NextPart) {
            return Ok(None);
        }
        let part = first..sections.min(first + SECTIONS_PER_PART);
        match pool.holdings(node, part.clone()) {
            Ok(found) => holdings.extend(found),
            Err(error) if error.is_of_one_word() => {
                for section in part {
                    let found = skip_damaged(section, pool.holdings(node, section..section + 1))?;
                    holdings.extend(found.unwrap_or_default());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Some(holdings))
}

/// U4: frees what was found leaked, section by section; `None` if the caller cancels.
fn free_leaked(
    pool: &mut PoolClient,
    node: NodeId,
    leaked: &HashSet<Holding>,
    may_continue: &mut impl FnMut(ScanProgress) -> bool,
) -> Result<Option<Recovered>, PoolError> {
    let mut by_section: BTreeMap<u32, Vec<Holding>> = BTreeMap::new();
    leaked.iter().for_each(|holding| by_section.entry(holding.section()).or_default().push(*holding));
    let mut freed = Recovered::default();
    for (section, holdings) in by_section {
        if !may_continue(ScanProgress::NextPart) {
            return Ok(None);
        }
        let outcome = skip_damaged(section, pool.free_holdings(node, section, holdings))?;
        freed.add(outcome.unwrap_or_default());
    }
    Ok(Some(freed))
}

/// Turns an error that concerns one word into `None`, so that one damaged section does not stop the
/// scan.
fn skip_damaged<T>(section: u32, outcome: Result<T, PoolError>) -> Result<Option<T>, PoolError> {
    match outcome {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_of_one_word() => {
            tracing::warn!(section, %error, "leak scan skipped a section");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
