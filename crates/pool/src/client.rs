//! The edge: runs the machines over fabric endpoints.

mod draws;
mod lanes;
mod node;
mod recovery;
mod wire;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_fabric::{Endpoint, Host, Key, Tenant};

use crate::cache::{NO_RECORD, begin_at};
use crate::custody::{Custody, Ledger, UnderWay};
use crate::error::PoolError;
use crate::op::{
    AllocManyOp, AllocOp, FreeOp, Grant, Held, HeldOp, Machine, OpError, RecoverOp, Recovered, Several,
    StretchOp,
};
use crate::size::{SECTION_BYTES, SizeClass};
use crate::word::Run;
use node::{Failure, Node};
pub use recovery::recover_node;

/// Work ids from this one on are the pool's; who shares its endpoints uses smaller ones.
pub const POOL_WORK_ID: u64 = 1 << 63;
/// Most nodes of one client.
pub const NODES_MAX: usize = 256;

/// A node of the cluster, as the directory numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u16);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Memory of a node that a host has taken.
///
/// It is not cleared when it is taken: it may hold what its last owner, of the same tenant, left there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Whose memory.
    pub node: NodeId,
    /// Its address in the node's region.
    pub addr: u64,
    /// Its size.
    pub class: SizeClass,
    /// Opens it for READ and WRITE.
    pub key: Key,
}

/// Neighbouring sections of a node that a host has taken together: an extent larger than any class. One key opens them all, and each is given back by itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stretch {
    /// The first section.
    pub first: Extent,
    /// How many there are.
    pub sections: u32,
}

impl Stretch {
    /// The sections, in the order of their addresses.
    pub fn extents(self) -> impl Iterator<Item = Extent> {
        let place = move |section| self.first.addr + u64::from(section) * SECTION_BYTES;
        (0..self.sections).map(move |section| Extent { addr: place(section), ..self.first })
    }
}

/// Takes and gives back extents of nodes. One thread uses a client at a time; many clients work at once.
#[derive(Debug)]
pub struct PoolClient {
    host: Host,
    tenant: Tenant,
    nodes: BTreeMap<NodeId, Node>,
    custody: Arc<Custody>,
}

impl PoolClient {
    /// A client of this host, as yet without nodes, that takes memory for a tenant. It is opened to endpoints of that tenant.
    #[must_use]
    pub fn new(host: Host, tenant: Tenant) -> Self {
        Self::in_custody(host, tenant, Arc::default())
    }

    /// The same of a host that has several, which know of each other's extents.
    #[must_use]
    pub const fn in_custody(host: Host, tenant: Tenant, custody: Arc<Custody>) -> Self {
        Self { host, tenant, nodes: BTreeMap::new(), custody }
    }

    /// What is written down there is known of by the host, as long as anybody has it.
    pub fn enter<L: Ledger + 'static>(&self, ledger: &Arc<L>) {
        self.custody.enter(ledger);
    }

    /// To be held while extents are taken, until they are written down in a ledger or given back.
    #[must_use]
    pub fn under_way(&self) -> UnderWay {
        self.custody.under_way()
    }

    /// Something of a node may be ours without anybody knowing: it could not be given back.
    pub fn doubt(&self, node: NodeId) {
        self.custody.doubt(node);
    }

    /// Use a node over this endpoint, which then is the pool's and its user's together (see [`PoolClient::endpoint`]).
    ///
    /// # Errors
    /// If the node's memory has another format or version; if the endpoint fails; at [`NODES_MAX`].
    pub fn add_node(&mut self, id: NodeId, endpoint: Box<dyn Endpoint>) -> Result<(), PoolError> {
        /// Tells clients of one host apart, so that they too begin at different places.
        static CLIENTS: AtomicU64 = AtomicU64::new(0);
        if self.nodes.contains_key(&id) {
            return Err(PoolError::NodeExists { node: id });
        }
        if self.nodes.len() >= NODES_MAX {
            return Err(PoolError::TooManyNodes { limit: NODES_MAX });
        }
        let begin_at = begin_at(self.host, CLIENTS.fetch_add(1, Ordering::Relaxed));
        self.nodes.insert(id, Node::open(id, endpoint, begin_at, self.tenant)?);
        Ok(())
    }

    /// Forget a node, and give its endpoint back. Extents taken from it stay taken, until the node is audited.
    pub fn remove_node(&mut self, id: NodeId) -> Option<Box<dyn Endpoint>> {
        let mut node = self.nodes.remove(&id)?;
        if let Some(late) = node.take_late() {
            self.custody.give_up(id, node.region_key(), late);
        }
        self.custody.doubt(id);
        Some(node.into_endpoint())
    }

    /// Run a machine to its end.
    fn run<M: Machine>(&mut self, id: NodeId, machine: M) -> Result<Result<M::Output, Failure>, PoolError> {
        self.at_node(id, |node| node.run(machine))
    }

    /// Have a node do something. If its connection breaks, the host hears of it before anybody takes this for ended.
    fn at_node<T>(
        &mut self,
        id: NodeId,
        work: impl FnOnce(&mut Node) -> Result<T, Failure>,
    ) -> Result<Result<T, Failure>, PoolError> {
        let _under_way = self.custody.under_way();
        let node = self.nodes.get_mut(&id).ok_or(PoolError::NoSuchNode { node: id })?;
        node.begin();
        let outcome = work(node);
        if let Err(Failure::Work(_)) = outcome
            && let Some(late) = node.take_late()
        {
            self.custody.give_up(id, node.region_key(), late);
        }
        Ok(outcome)
    }

    /// The nodes in use.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.keys().copied()
    }

    /// How many sections a node has, lent or not; 0 for a node that is not in use.
    #[must_use]
    pub fn sections(&self, id: NodeId) -> u32 {
        self.nodes.get(&id).map_or(0, Node::sections)
    }

    /// Bytes that a node has free, by what this client has seen last; 0 for a node that is not in use.
    #[must_use]
    pub fn free_bytes(&self, id: NodeId) -> u64 {
        self.nodes.get(&id).map_or(0, Node::free_bytes)
    }

    /// Bytes that a node lends in all, by what this client has seen last; 0 for a node that is not in use.
    #[must_use]
    pub fn total_bytes(&self, id: NodeId) -> u64 {
        self.nodes.get(&id).map_or(0, Node::total_bytes)
    }

    /// Read all control words of a node again, so that [`PoolClient::free_bytes`] is true at that time.
    ///
    /// # Errors
    /// If the node is gone.
    pub fn refresh(&mut self, id: NodeId) -> Result<(), PoolError> {
        self.node(id)?.refresh()
    }

    /// The key of a node's memory, which another life of the node does not have.
    pub(crate) fn life_of(&self, id: NodeId) -> Key {
        self.nodes.get(&id).map_or(Key(0), Node::region_key)
    }

    /// All that this host has in these sections, whichever of its clients took it, as words and log tell.
    ///
    /// # Errors
    /// As for [`Self::recover`].
    pub(crate) fn held(&mut self, id: NodeId, sections: Range<u32>) -> Result<Vec<Held>, PoolError> {
        let op = HeldOp::new(self.host, sections);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// Give back these of the things that this host has in a section, as far as they are still the same.
    ///
    /// # Errors
    /// As for [`Self::recover`].
    pub(crate) fn give_back_held(
        &mut self,
        id: NodeId,
        section: u32,
        these: Vec<Held>,
    ) -> Result<Recovered, PoolError> {
        let op = RecoverOp::only(self.host, these).within(section..section + 1);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// Where an extent is; `None` if it is none.
    pub(crate) fn address_of(&self, id: NodeId, held: &Held) -> Option<u64> {
        match held {
            Held::Extent(grant) | Held::Unkeyed { grant, .. } => {
                self.nodes.get(&id).map(|node| node.extent(*grant).addr)
            }
            Held::Span { .. } => None,
        }
    }

    /// Take an extent of a node.
    ///
    /// # Errors
    /// [`PoolError::Full`] if there is none; [`PoolError::NodeGone`] or [`PoolError::Away`], and then nobody knows whether one was taken
    /// (the node's inline log does).
    pub fn allocate(&mut self, id: NodeId, class: SizeClass) -> Result<Extent, PoolError> {
        let grant = self.take(id, AllocOp::new(self.host, class), class.bytes())?;
        Ok(self.node(id)?.extent(grant))
    }

    /// Allocate up to `count` extents of a node: as many as it has, at least one. That takes one trip to the node for each, and one more.
    ///
    /// # Errors
    /// As for [`Self::allocate`].
    pub fn allocate_many(
        &mut self,
        id: NodeId,
        class: SizeClass,
        count: u32,
    ) -> Result<Vec<Extent>, PoolError> {
        let taken = self.take(id, AllocManyOp::new(self.host, class, count), class.bytes())?;
        let Several { grants, failure } = taken;
        if let Some(error) = failure {
            let error = Failure::Op(error).of(id, 0, class.bytes());
            tracing::debug!(node = id.0, %error, "there were fewer extents than were asked for");
            self.custody.doubt(id);
        }
        let node = self.node(id)?;
        Ok(grants.into_iter().map(|grant| node.extent(grant)).collect())
    }

    /// Take neighbouring sections of a node, all or none.
    ///
    /// # Errors
    /// As for [`Self::allocate`].
    pub fn allocate_stretch(&mut self, id: NodeId, sections: u32) -> Result<Stretch, PoolError> {
        let op = StretchOp::new(self.host, sections);
        let grant = self.take(id, op, u64::from(sections) * SECTION_BYTES)?;
        Ok(Stretch { first: self.node(id)?.extent(grant), sections })
    }

    /// If a stretch of so many sections is to be had once the node has cleared what it is clearing, or is about to: how many sections are left to be cleared, by what this client
    /// has seen last. Those that the node lends no more look the same. `None` if there is no place for it.
    #[must_use]
    pub fn sections_to_clear(&self, id: NodeId, sections: u32) -> Option<u32> {
        self.nodes.get(&id)?.cache.sections_to_clear(sections)
    }

    fn take<M: Machine>(&mut self, id: NodeId, op: M, bytes: u64) -> Result<M::Output, PoolError> {
        let taken = self.run(id, op)?.map_err(|failure| failure.of(id, 0, bytes));
        if !matches!(taken, Ok(_) | Err(PoolError::Full { .. })) {
            // It may have got half way.
            self.custody.doubt(id);
        }
        taken
    }

    /// Have the connections to the nodes looked after: a node that went away is looked for again, and a broken connection is noticed. To be called now and then while nothing
    /// else is asked of the nodes.
    pub fn tend(&mut self) {
        self.nodes.values_mut().for_each(Node::tend);
    }

    /// Take this group of a section's spans, whoever had them last: for the node itself, which clears them or lends them no more. No key opens it. `None` if it
    /// is not free.
    ///
    /// # Errors
    /// As for [`Self::allocate`].
    pub fn take_group(&mut self, id: NodeId, section: u32, group: Run) -> Result<Option<Extent>, PoolError> {
        match self.run(id, AllocOp::of_group(self.host, section, group))? {
            Ok(grant) => Ok(Some(self.node(id)?.extent(grant))),
            Err(Failure::Op(OpError::Full)) => Ok(None),
            Err(failure) => Err(failure.of(id, 0, 0)),
        }
    }

    /// Whether an extent is in the memory that its node has now. A node that came back without its memory has other keys.
    ///
    /// # Errors
    /// If the node is not known, or is gone.
    pub fn is_current(&mut self, extent: Extent) -> Result<bool, PoolError> {
        let node = self.node(extent.node)?;
        let Some(chunk) = node.chunk_of(extent.addr) else { return Ok(false) };
        let grant = Grant { chunk, class: extent.class, key: Key(0) };
        Ok(node.with_key(grant)?.key == extent.key)
    }

    /// Give an extent back.
    ///
    /// # Errors
    /// [`PoolError::NotAllocated`] or [`PoolError::NotOurs`], as far as the node's words tell, and nothing was changed.
    pub fn free(&mut self, extent: Extent) -> Result<(), PoolError> {
        self.give_back(extent, |op| op)
    }

    /// Give several extents of a node back, those in different sections at once. What came of each, as for [`Self::free`].
    ///
    /// # Errors
    /// If the node is not known, gone or away: then nobody knows of any of them whether it was given back.
    ///
    /// # Panics
    /// If one is on another node.
    pub fn free_many(
        &mut self,
        id: NodeId,
        extents: &[Extent],
    ) -> Result<Vec<Result<(), PoolError>>, PoolError> {
        assert!(extents.iter().all(|extent| extent.node == id), "all are on node {id}");
        let host = self.host;
        let outcomes = self.at_node(id, |node| {
            // What is no place of the node's is nobody's.
            let chunk = |node: &Node, addr| node.chunk_of(addr).unwrap_or(u32::MAX);
            let grant = |extent: &Extent| Grant {
                chunk: chunk(node, extent.addr),
                class: extent.class,
                key: extent.key,
            };
            let grants: Vec<Grant> = extents.iter().map(grant).collect();
            node.free_all(host, &grants)
        });
        let outcomes = outcomes.inspect_err(|_| self.custody.doubt(id))?;
        let outcomes = outcomes.map_err(|failure| failure.of(id, 0, 0)).map(|outcomes| {
            let told = |(extent, outcome): (&Extent, Result<(), OpError>)| {
                outcome.map_err(|error| Failure::Op(error).of(id, extent.addr, extent.class.bytes()))
            };
            extents.iter().zip(outcomes).map(told).collect::<Vec<_>>()
        });
        if outcomes.as_ref().map_or(true, |outcomes| !outcomes.iter().all(is_known)) {
            self.custody.doubt(id);
        }
        outcomes
    }

    fn give_back(&mut self, extent: Extent, how: impl FnOnce(FreeOp) -> FreeOp) -> Result<(), PoolError> {
        let freed = self.try_give_back(extent, how);
        if !is_known(&freed) {
            self.custody.doubt(extent.node);
        }
        freed
    }

    fn try_give_back(&mut self, extent: Extent, how: impl FnOnce(FreeOp) -> FreeOp) -> Result<(), PoolError> {
        let host = self.host;
        let node = self.node(extent.node)?;
        let (addr, bytes) = (extent.addr, extent.class.bytes());
        let chunk = node.chunk_of(addr).ok_or(PoolError::NotAllocated { node: extent.node, addr, bytes })?;
        let grant = Grant { chunk, class: extent.class, key: extent.key };
        let op = how(FreeOp::new(host, grant));
        let outcome = match self.run(extent.node, op)? {
            Ok(outcomes) => outcomes[0].map_err(Failure::Op),
            Err(failure) => Err(failure),
        };
        outcome.map_err(|failure| failure.of(extent.node, addr, bytes))
    }

    /// Give back all that a dead host held of a node, for anyone to take. Two that do it at once, or one after another that died over it, do no harm.
    ///
    /// The host must be fenced at the node: what it may yet have under way must not arrive.
    ///
    /// # Errors
    /// [`PoolError::NodeGone`]; [`PoolError::Busy`], and then some is not given back yet; [`PoolError::Damaged`].
    pub fn recover(&mut self, id: NodeId, dead: Host) -> Result<Recovered, PoolError> {
        let host = self.host;
        self.run(id, RecoverOp::new(host, dead))?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// The same for what is in these sections.
    ///
    /// # Errors
    /// As for [`Self::recover`].
    pub fn recover_within(
        &mut self,
        id: NodeId,
        dead: Host,
        sections: Range<u32>,
    ) -> Result<Recovered, PoolError> {
        let op = RecoverOp::new(self.host, dead).within(sections);
        self.run(id, op)?.map_err(|failure| failure.of(id, 0, 0))
    }

    /// The record in an extent's control word, as far as this client has seen: for [`Self::free_begun`]. Never 0.
    #[must_use]
    pub fn last_record(&self, extent: Extent) -> u32 {
        let record = |node: &Node| {
            let chunk = node.chunk_of(extent.addr)?;
            Some(node.cache.last_record(Grant { chunk, class: extent.class, key: extent.key }))
        };
        self.nodes.get(&extent.node).and_then(record).unwrap_or(NO_RECORD)
    }

    /// Give an extent back of which that was begun when its control word had that record, by one that was killed over it: which leaves open whether it was
    /// done, and whose the place is by now. Returns whether it was given back now; if not, it was before, or others have changed the word since, and an audit finds out.
    ///
    /// # Errors
    /// As for [`Self::free`].
    pub fn free_begun(&mut self, extent: Extent, record: u32) -> Result<bool, PoolError> {
        match self.give_back(extent, |op| op.resumed(record)) {
            Err(PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }) => {}
            given_back => return given_back.map(|()| true),
        }
        // Something else of the word has changed, perhaps. If its key was not struck out it is ours still; but what the dead one has posted may strike it out just now.
        if self.is_current(extent).inspect_err(|_| self.custody.doubt(extent.node))? {
            match self.free(extent) {
                Err(PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }) => {}
                given_back => return given_back.map(|()| true),
            }
        }
        self.custody.doubt(extent.node);
        Ok(false)
    }

    /// The endpoint to a node, for the user's own READs and WRITEs. Its work ids must be below [`POOL_WORK_ID`];
    /// completions that the pool meets while it waits for its own are kept for the next poll.
    pub fn endpoint(&mut self, id: NodeId) -> Option<&mut Box<dyn Endpoint>> {
        self.nodes.get_mut(&id).map(Node::endpoint)
    }

    fn node(&mut self, id: NodeId) -> Result<&mut Node, PoolError> {
        self.nodes.get_mut(&id).ok_or(PoolError::NoSuchNode { node: id })
    }
}

/// Whether it is certain that what was to be given back is free, or was not ours.
const fn is_known(freed: &Result<(), PoolError>) -> bool {
    matches!(freed, Ok(()) | Err(PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }))
}
