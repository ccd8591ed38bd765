//! The way back to a node that is away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::Tenant;
use aquifer_fabric::reconnecting::{Reconnect, ReconnectOutcome};
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

impl Reconnect for Back {
    fn attempt(&self) -> ReconnectOutcome {
        match self.nodes.standing(self.node, Instant::now()) {
            Standing::Here(place) if place.epoch != self.epoch => {
                tracing::warn!(node = self.node.0, "a memory node has come back without its memory");
                ReconnectOutcome::Gone
            }
            Standing::Here(place) => match self.nodes.reach(&place, self.tenant) {
                Ok(endpoint) => ReconnectOutcome::Connected(endpoint),
                Err(error) if error.is_fence() => {
                    tracing::warn!(node = self.node.0, %error, "a memory node is back, and not for this host");
                    ReconnectOutcome::Gone
                }
                Err(_) => ReconnectOutcome::Retry,
            },
            Standing::Away => ReconnectOutcome::Retry,
            // It was there once, and was waited for since.
            Standing::Unknown => ReconnectOutcome::Gone,
        }
    }

    fn timeout(&self) -> Duration {
        self.kept
    }
}
