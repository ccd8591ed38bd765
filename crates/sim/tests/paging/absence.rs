//! Nodes whose processes end and return, and whose memory is kept meanwhile.

use std::sync::{Arc, Mutex, PoisonError};

use aquifer_fabric::reconnecting::{AwayPolicy, Reconnect, ReconnectOutcome, ReconnectingEndpoint};
use aquifer_fabric::sim::{SimFabric, SimNodeId};
use aquifer_fabric::{Endpoint, EndpointError, Identity};

/// The node that is away, and the number of attempts to reach it until it returns. Clones share one
/// state.
#[derive(Clone, Debug, Default)]
pub struct NodeAbsence(Arc<Mutex<Option<(SimNodeId, u64)>>>);

impl NodeAbsence {
    /// Begins the absence of a node, if no node is away. Returns whether it did.
    pub fn begin(&self, fabric: &SimFabric, node: SimNodeId, attempts: u64) -> bool {
        let mut away = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let goes = away.is_none();
        if goes {
            fabric.crash_node(node);
            *away = Some((node, attempts));
        }
        goes
    }

    /// Ends the absence, if there is one.
    pub fn end(&self, fabric: &SimFabric) {
        if let Some((node, _)) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            fabric.restart_node(node);
        }
    }

    /// Whether a node is away.
    pub fn is_active(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Counts an attempt to reach a node, and returns whether the node is still away.
    fn try_reach(&self, fabric: &SimFabric, node: SimNodeId) -> bool {
        let mut away = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, attempts)) = away.as_mut().filter(|(other, _)| *other == node) else { return false };
        *attempts = attempts.saturating_sub(1);
        if *attempts > 0 {
            return true;
        }
        *away = None;
        fabric.restart_node(node);
        false
    }
}

#[derive(Debug)]
struct NodeReturn {
    fabric: SimFabric,
    absence: NodeAbsence,
    node: SimNodeId,
    who: Identity,
}

impl Reconnect for NodeReturn {
    fn attempt(&self) -> ReconnectOutcome {
        if self.absence.try_reach(&self.fabric, self.node) {
            return ReconnectOutcome::Retry;
        }
        // The node was dead, is partitioned, or has fenced this host.
        self.fabric.connect(self.node, self.who).map_or(ReconnectOutcome::Gone, ReconnectOutcome::Connected)
    }

    fn is_blocking(&self) -> bool {
        false
    }
}

/// Connects to a node with an endpoint that survives the node's absence. With [`AwayPolicy::Wait`]
/// it waits until the node returns.
///
/// # Errors
/// If the node cannot be reached and is not away.
pub fn connect(
    fabric: &SimFabric,
    absence: &NodeAbsence,
    node: SimNodeId,
    who: Identity,
    policy: AwayPolicy,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    if policy == AwayPolicy::Wait {
        while absence.try_reach(fabric, node) {}
    }
    let endpoint = fabric.connect(node, who)?;
    let again = NodeReturn { fabric: fabric.clone(), absence: absence.clone(), node, who };
    Ok(Box::new(ReconnectingEndpoint::new(endpoint, Arc::new(again), policy)))
}
