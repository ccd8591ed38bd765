//! The claim of a dead host's number, under which its memory is freed.

use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord, DeadHost, HolderRecord, LifeRecord, NodeLife};
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::{Host, Identity, Tenant};
use aquifer_pool::NodeId;

use crate::mutation::Mutation;

/// A dead host whose number was claimed, and the nodes on which it may own memory.
#[derive(Debug)]
pub struct RecoveryClaim {
    dead: HolderRecord,
    lease: Lease,
    record: AgentRecord,
    /// Lives of nodes that are present, on which the host is not recovered yet.
    present: Vec<NodeLife>,
    away: Vec<NodeLife>,
}

impl RecoveryClaim {
    /// Claims the number of a dead host under a new lease that lasts for `ttl` without a
    /// keep-alive. `None` if no memory can be freed now, because all nodes that are left are away.
    ///
    /// # Errors
    /// [`DirectoryError::Taken`] if another host has the number now, or an error of the directory.
    pub fn claim(
        directory: &dyn Directory,
        ttl: Duration,
        dead: &DeadHost,
        address: &str,
    ) -> Result<Option<Self>, DirectoryError> {
        if !AffectedLives::read(directory, &dead.record)?.has_work() {
            return Ok(None);
        }
        let lease = directory.lease_grant(ttl)?;
        let claim = Self::claim_under(directory, lease, dead, address);
        if claim.is_err() {
            revoke(directory, lease);
        }
        claim.map(Some)
    }

    fn claim_under(
        directory: &dyn Directory,
        lease: Lease,
        dead: &DeadHost,
        address: &str,
    ) -> Result<Self, DirectoryError> {
        let record = names::claim_dead_host(directory, lease, dead, address)?;
        // Nodes that have joined since are affected, too.
        let AffectedLives { present, away, .. } = AffectedLives::read(directory, &dead.record)?;
        Ok(Self { dead: dead.record.clone(), lease, record, present, away })
    }

    /// The lease of the claim, which the caller keeps alive.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// The nodes on which the host is not recovered yet, and can be now.
    pub fn present(&self) -> impl Iterator<Item = NodeId> {
        self.present.iter().map(|life| NodeId(life.node))
    }

    /// The nodes that are away. They are recovered when they return.
    pub fn away(&self) -> impl Iterator<Item = NodeId> {
        self.away.iter().map(|life| NodeId(life.node))
    }

    /// Records that all memory of the host on a node is freed.
    pub fn recovered(&mut self, node: NodeId) {
        self.present.retain(|life| life.node != node.0);
    }

    /// The identity under which the host's memory is freed: the dead host's number with the claim's
    /// epoch. A node that accepts the connection thereby fences the dead host, before anything on
    /// the node is freed.
    #[must_use]
    pub fn identity(&self, tenant: Tenant) -> Identity {
        let claimed = self.record.epoch;
        let epoch = if Mutation::FreeBeforeFence.is_active() { self.dead.claim_epoch } else { claimed };
        Identity { host: Host(self.record.host), epoch, tenant }
    }

    /// Ends the claim and its lease. Nodes that are away or not recovered are left to later
    /// recoveries.
    ///
    /// # Errors
    /// [`DirectoryError::Taken`] if the claim has ended, or an error of the directory.
    pub fn finish(self, directory: &dyn Directory) -> Result<(), DirectoryError> {
        let away = self.away.into_iter().filter(|_| !Mutation::ForgetNodesAway.is_active());
        let present = self.present.into_iter().filter(|_| !Mutation::ForgetNodesLeft.is_active());
        let finished = names::finish_recovery(directory, &self.record, away.chain(present).collect());
        if Mutation::ForgetRecovered.is_active() {
            directory.delete(names::RECOVERED_HOSTS)?;
        }
        revoke(directory, self.lease);
        finished
    }
}

/// Ends the lease of a claim. After a success it is not needed any more, and after a failure
/// another host can try at once.
fn revoke(directory: &dyn Directory, lease: Lease) {
    if let Err(error) = directory.lease_revoke(lease.id) {
        tracing::debug!(%error, "revoking the lease of a recovery failed; it expires by itself");
    }
}

/// The lives of nodes on which a dead host may own memory.
#[derive(Default)]
struct AffectedLives {
    present: Vec<NodeLife>,
    away: Vec<NodeLife>,
    /// The number of lives that an earlier recovery has not completed; `None` if there was none.
    left_count: Option<usize>,
}

impl AffectedLives {
    fn read(directory: &dyn Directory, dead: &HolderRecord) -> Result<Self, DirectoryError> {
        // The lives must be read first: a node writes its life together with its record.
        let lives = names::lives(directory)?;
        let nodes = names::nodes(directory)?;
        let mut affected =
            Self { left_count: dead.remaining_lives.as_ref().map(Vec::len), ..Self::default() };
        for LifeRecord { life, .. } in lives {
            let is_left = |lives: &Vec<NodeLife>| lives.iter().any(|left| left.is_same(&life));
            if dead.remaining_lives.as_ref().is_some_and(|lives| !is_left(lives)) {
                continue;
            }
            match nodes.iter().find(|node| node.id == life.node) {
                Some(node) if node.epoch == life.epoch => affected.present.push(life),
                // The node has new memory, so this life has ended.
                Some(_) => {}
                None => affected.away.push(life),
            }
        }
        Ok(affected)
    }

    /// True if a recovery can free memory or finish now.
    fn has_work(&self) -> bool {
        !self.present.is_empty() || self.left_count.is_none_or(|count| count > self.away.len())
    }
}
