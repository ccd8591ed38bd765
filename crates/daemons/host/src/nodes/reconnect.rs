//! Reconnects to a node that was away.

use std::sync::Arc;

use aquifer_fabric::Tenant;
use aquifer_fabric::reconnecting::{Reconnect, ReconnectOutcome};
use aquifer_pool::NodeId;

use super::NodeRegistry;
use super::connect::may_return;
use super::view::{NodeState, PresentNode};

/// Reconnects a tenant to one life of a node's memory.
#[derive(Debug)]
pub(super) struct Reconnector {
    pub nodes: Arc<NodeRegistry>,
    pub node: NodeId,
    pub tenant: Tenant,
    /// The epoch of the life. Another epoch is other memory.
    pub epoch: u64,
}

impl Reconnector {
    fn connect(&self, to: &PresentNode, is_suspect: bool) -> ReconnectOutcome {
        if to.epoch != self.epoch {
            tracing::warn!(
                node = self.node.0,
                tenant = self.tenant.0,
                "memory node returned with new memory; what was on it is lost"
            );
            return ReconnectOutcome::Gone;
        }
        match self.nodes.open_endpoint(self.node, to, self.tenant) {
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
            // Without kept memory, a process that has ended or does not answer is lost, as for
            // a new connection.
            Err(error) if to.grace.is_zero() && !may_return(to, is_suspect, &error) => ReconnectOutcome::Gone,
            Err(_) => ReconnectOutcome::Retry,
        }
    }
}

impl Reconnect for Reconnector {
    fn is_blocking(&self) -> bool {
        self.nodes.environment.is_blocking()
    }

    fn attempt(&self) -> ReconnectOutcome {
        match self.nodes.awaited_state(self.node) {
            NodeState::Present(node) | NodeState::Away(Some(node)) => self.connect(&node, false),
            NodeState::Suspect(node) => self.connect(&node, true),
            NodeState::Away(None) => ReconnectOutcome::Retry,
            // The node was present before, so its memory is lost.
            NodeState::Unknown => {
                tracing::warn!(
                    node = self.node.0,
                    tenant = self.tenant.0,
                    "memory node did not return within its grace time; what was on it is lost"
                );
                ReconnectOutcome::Gone
            }
        }
    }
}
