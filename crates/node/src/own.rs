//! The node as a host at its own memory: it takes and gives back by the same operations over the same fabric as any other.

use std::ops::Range;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{EndpointError, FabricAddress, Host, Identity, Tenant};
use aquifer_pool::word::AlignedRun;
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError};

/// Nobody's user id.
const NOBODY: Tenant = Tenant(u32::MAX);

/// Sections that are set right at once, so that one that is damaged leaves few others as they are.
const SECTIONS_AT_ONCE: u32 = 512;

/// Where the node reaches itself.
#[derive(Debug)]
pub(crate) struct Own {
    pub reach: FabricAddress,
    pub key: Option<ClusterKey>,
}

/// A connection to itself that is made anew when it broke.
#[derive(Debug)]
pub(crate) struct OwnPool {
    own: Own,
    node: NodeId,
    pool: Option<PoolClient>,
    /// Connections made so far; each is an epoch.
    connections: u64,
    /// The sections that are being changed. If the connection breaks meanwhile nobody knows how far that went.
    changing: Range<u32>,
}

impl OwnPool {
    /// Not connected yet. Of `unsure` sections nobody knows how far a process before this one had come with a change.
    pub const fn new(own: Own, node: NodeId, unsure: Range<u32>) -> Self {
        Self { own, node, pool: None, connections: 0, changing: unsure }
    }

    /// Whether a connection broke: what was being changed then is to be set right.
    pub fn is_broken(&self) -> bool {
        self.pool.is_none() && (self.connections > 0 || !self.changing.is_empty())
    }

    /// Something failed: connect anew, for what comes next.
    pub fn give_up(&mut self) {
        self.pool = None;
    }

    /// Connect, if it is not connected. What it was about to take or give back in a section when an earlier connection broke is given back: it is as it was, or clear.
    ///
    /// # Errors
    /// If it cannot.
    pub fn connect(&mut self) -> Result<&mut PoolClient, OwnError> {
        if self.pool.is_none() {
            self.connections += 1;
            // The new epoch fences the one before.
            let who = Identity { host: Host::NODE, epoch: self.connections, tenant: NOBODY };
            let endpoint = self.own.reach.connect(who, self.own.key.as_ref(), &ConnectOptions::default())?;
            let mut pool = PoolClient::new(who.host, who.tenant);
            pool.add_node(self.node, endpoint)?;
            while !self.changing.is_empty() {
                let part = self.changing.start..self.changing.end.min(self.changing.start + SECTIONS_AT_ONCE);
                match pool.recover_within(self.node, who.host, part.clone()) {
                    // It stays so: other sections shall not wait for it.
                    Err(error @ PoolError::Damaged { .. }) => {
                        tracing::warn!(%error, "a section is not used any more");
                    }
                    outcome => drop(outcome?),
                }
                self.changing.start = part.end;
            }
            self.pool = Some(pool);
        }
        Ok(self.pool.as_mut().expect("it is connected"))
    }

    /// Take or give back something in a section, and whatever belongs to it: if that breaks, what the node has of the section is given back.
    ///
    /// # Errors
    /// Those of the change.
    pub fn change<T>(
        &mut self,
        section: u32,
        change: impl FnOnce(&mut PoolClient, NodeId) -> Result<T, OwnError>,
    ) -> Result<T, OwnError> {
        let node = self.node;
        self.connect()?;
        self.changing = section..section + 1;
        let changed = change(self.pool.as_mut().expect("it is connected"), node);
        if changed.as_ref().map_or_else(OwnError::is_damage, |_| true) {
            self.changing = 0..0;
        }
        changed
    }
}

/// Take this group of a section's spans. `None` if somebody has something of it, or it cannot be had just now.
///
/// # Errors
/// As [`PoolClient::take_group`].
pub(crate) fn take_group(
    pool: &mut PoolClient,
    node: NodeId,
    section: u32,
    group: AlignedRun,
) -> Result<Option<Extent>, OwnError> {
    match pool.allocate_group(node, section, group) {
        // Nothing was changed. Others shall not wait for this one.
        Err(PoolError::Busy { .. }) => Ok(None),
        outcome => Ok(outcome?),
    }
}

/// Why the node cannot do what it wants to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnError {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The system did not take pages back.
    #[error("the system does not take memory back: {0}")]
    System(#[from] std::io::Error),
}

impl OwnError {
    /// Whether something is wrong in the memory itself: it stays so until somebody changes it.
    pub const fn is_damage(&self) -> bool {
        let Self::Pool(error) = self else { return false };
        matches!(
            error,
            PoolError::Damaged { .. } | PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }
        )
    }
}
