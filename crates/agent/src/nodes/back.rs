//! The way back to a node that is away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::Tenant;
use aquifer_fabric::lasting::{Again, Attempt};
use aquifer_pool::NodeId;

use super::Nodes;
use super::known::Standing;

/// To one life of a node, on behalf of one user.
#[derive(Debug)]
pub(super) struct Back {
    pub nodes: Arc<Nodes>,
    pub node: NodeId,
    pub tenant: Tenant,
    pub epoch: u64,
    pub kept: Duration,
}

impl Again for Back {
    fn attempt(&self) -> Attempt {
        match self.nodes.standing(self.node, Instant::now()) {
            Standing::Here(place) if place.epoch != self.epoch => {
                tracing::warn!(node = self.node.0, "a memory node has come back without its memory");
                Attempt::Never
            }
            Standing::Here(place) => {
                self.nodes.reach(&place, self.tenant).map_or(Attempt::NotYet, Attempt::Here)
            }
            Standing::Away | Standing::Unknown => Attempt::NotYet,
        }
    }

    fn patience(&self) -> Duration {
        self.kept
    }
}
