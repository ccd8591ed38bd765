//! The node's clients of its own memory: they allocate and free as [`Host::NODE`] or
//! [`Host::HEAPS`], by the same operations over the same fabric as other hosts.

use std::ops::Range;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{EndpointError, FabricAddress, Host, Identity, Tenant};
use aquifer_pool::op::Recovered;
use aquifer_pool::word::AlignedRun;
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError};

/// The tenant of the node itself; no user has this id.
const NODE_TENANT: Tenant = Tenant(u32::MAX);

/// Number of sections that are recovered together. A damaged section prevents the recovery of the
/// others of its part.
const SECTIONS_PER_RECOVERY: u32 = 512;

/// The address at which the node connects to itself.
#[derive(Clone, Debug)]
pub(crate) struct SelfAddress {
    pub address: FabricAddress,
    pub key: Option<ClusterKey>,
}

/// A pool client of the node's own memory, which reconnects after a failure.
#[derive(Debug)]
pub(crate) struct SelfClient {
    own: SelfAddress,
    node: NodeId,
    host: Host,
    pool: Option<PoolClient>,
    /// Number of connections so far. The epoch of a connection is its number.
    connections: u64,
    /// Sections with a change that may be incomplete.
    changing: Range<u32>,
    /// Sections in which a connection has freed what the node had allocated, for the node itself.
    recovered: Vec<Range<u32>>,
}

impl SelfClient {
    /// Creates a client that is not connected. An earlier process may have left changes of the
    /// `uncertain` sections incomplete.
    pub const fn new(own: SelfAddress, node: NodeId, host: Host, uncertain: Range<u32>) -> Self {
        Self { own, node, host, pool: None, connections: 0, changing: uncertain, recovered: Vec::new() }
    }

    /// True if a change may be incomplete, which the next [`connect`](Self::connect) undoes.
    pub fn has_unfinished_change(&self) -> bool {
        self.pool.is_none() && (self.connections > 0 || !self.changing.is_empty())
    }

    /// Closes the connection after a failure.
    pub fn disconnect(&mut self) {
        self.pool = None;
    }

    /// Connects, if there is no connection. Then frees what an incomplete change has allocated;
    /// that memory is unchanged or cleared.
    ///
    /// # Errors
    /// If the connection or the recovery fails.
    pub fn connect(&mut self) -> Result<&mut PoolClient, SelfClientError> {
        let host = self.host;
        self.connect_with(|pool, node, sections| pool.recover_within(node, host, sections))
    }

    /// Connects, if there is no connection. Then calls `finish` for the sections in which a change
    /// may be incomplete.
    ///
    /// # Errors
    /// If the connection or `finish` fails.
    pub fn connect_with(
        &mut self,
        finish: impl Fn(&mut PoolClient, NodeId, Range<u32>) -> Result<Recovered, PoolError>,
    ) -> Result<&mut PoolClient, SelfClientError> {
        if self.pool.is_none() {
            self.connections += 1;
            // The new epoch fences the last connection.
            let identity = Identity { host: self.host, epoch: self.connections, tenant: NODE_TENANT };
            let endpoint =
                self.own.address.connect(identity, self.own.key.as_ref(), &ConnectOptions::default())?;
            let mut pool = PoolClient::new(identity.host, identity.tenant);
            pool.add_node(self.node, endpoint)?;
            while !self.changing.is_empty() {
                let part =
                    self.changing.start..self.changing.end.min(self.changing.start + SECTIONS_PER_RECOVERY);
                match finish(&mut pool, self.node, part.clone()) {
                    // The damage is permanent, and must not delay other sections.
                    Err(error @ PoolError::Damaged { .. }) => {
                        tracing::warn!(node = self.node.0, %error, "damaged section is not used any more");
                    }
                    outcome => drop(outcome?),
                }
                self.changing.start = part.end;
                if self.host == Host::NODE {
                    self.recovered.push(part);
                }
            }
            self.pool = Some(pool);
        }
        Ok(self.pool.as_mut().expect("it is connected"))
    }

    /// Removes the sections in which connections since the last call have freed what the node had
    /// allocated.
    pub fn drain_recovered(&mut self) -> Vec<Range<u32>> {
        std::mem::take(&mut self.recovered)
    }

    /// Changes a section. If `change` fails for another reason than damage, the next
    /// [`connect`](Self::connect) frees what the node owns in the section.
    ///
    /// # Errors
    /// Those of `connect` and of `change`.
    pub fn change<T>(
        &mut self,
        section: u32,
        change: impl FnOnce(&mut PoolClient, NodeId) -> Result<T, SelfClientError>,
    ) -> Result<T, SelfClientError> {
        let node = self.node;
        self.connect()?;
        self.changing = section..section + 1;
        let changed = change(self.pool.as_mut().expect("it is connected"), node);
        if changed.as_ref().map_or_else(SelfClientError::is_damage, |_| true) {
            self.changing = 0..0;
        }
        changed
    }
}

/// Allocates a group of spans of a section. `None` if a host owns part of it or is changing it.
///
/// # Errors
/// Those of [`PoolClient::allocate_group`], except that the group is busy.
pub(crate) fn allocate_group(
    pool: &mut PoolClient,
    node: NodeId,
    section: u32,
    group: AlignedRun,
) -> Result<Option<Extent>, SelfClientError> {
    match pool.allocate_group(node, section, group) {
        // The group was not changed. The caller continues with other groups.
        Err(PoolError::Busy { .. }) => Ok(None),
        outcome => Ok(outcome?),
    }
}

/// An error of a change of the node's own memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SelfClientError {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Pages could not be released.
    #[error("cannot release pages to the system: {0}")]
    System(#[from] std::io::Error),
}

impl SelfClientError {
    /// True if the metadata itself is damaged, so that a retry is useless.
    pub const fn is_damage(&self) -> bool {
        let Self::Pool(error) = self else { return false };
        matches!(
            error,
            PoolError::Damaged { .. } | PoolError::NotAllocated { .. } | PoolError::NotOurs { .. }
        )
    }
}
