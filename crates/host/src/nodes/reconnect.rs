//! Reconnects to a node that was away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::Tenant;
use aquifer_fabric::reconnecting::{Reconnect, ReconnectOutcome};
use aquifer_pool::NodeId;

use super::NodeRegistry;
use super::view::NodeState;

/// Reconnects a tenant to one life of a node's memory.
#[derive(Debug)]
pub(super) struct Reconnector {
    pub nodes: Arc<NodeRegistry>,
    pub node: NodeId,
    pub tenant: Tenant,
    /// The life's epoch. Another epoch is other memory.
    pub epoch: u64,
    /// The time for which the memory is kept.
    pub grace: Duration,
}

impl Reconnect for Reconnector {
    fn attempt(&self) -> ReconnectOutcome {
        match self.nodes.state(self.node, Instant::now()) {
            NodeState::Present(present) | NodeState::Suspect(present) if present.epoch != self.epoch => {
                tracing::warn!(
                    node = self.node.0,
                    tenant = self.tenant.0,
                    "memory node returned with new memory; what was on it is lost"
                );
                ReconnectOutcome::Gone
            }
            NodeState::Present(present) | NodeState::Suspect(present) => {
                match self.nodes.open_endpoint(&present, self.tenant) {
                    Ok(endpoint) => ReconnectOutcome::Connected(endpoint),
                    Err(error) if error.is_fence() => {
                        tracing::warn!(
                            node = self.node.0,
                            tenant = self.tenant.0,
                            %error,
                            "memory node returned and has fenced this host"
                        );
                        ReconnectOutcome::Fenced
                    }
                    Err(_) => ReconnectOutcome::Retry,
                }
            }
            NodeState::Away => ReconnectOutcome::Retry,
            // It was present once, so its grace time has passed.
            NodeState::Unknown => ReconnectOutcome::Gone,
        }
    }

    fn timeout(&self) -> Duration {
        self.grace
    }
}
