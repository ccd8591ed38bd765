//! Nodes whose processes end and return, and whose memory is kept meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer_fabric::reconnecting::{
    AwayPolicy, Reconnect, ReconnectOutcome, ReconnectingEndpoint, TargetDescription,
};
use aquifer_fabric::sim::{SimFabric, SimNodeId};
use aquifer_fabric::{Endpoint, EndpointError, Identity};

/// The node that is away. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct NodeAbsence(Arc<Mutex<AbsenceState>>);

#[derive(Debug, Default)]
struct AbsenceState {
    /// The node, and the number of attempts to reach it until it returns.
    away: Option<(SimNodeId, u64)>,
    /// The nodes that were connected to.
    contacts: HashMap<SimNodeId, TargetDescription>,
}

impl NodeAbsence {
    fn lock(&self) -> MutexGuard<'_, AbsenceState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the absence of a node, if no node is away. Returns whether it did.
    pub fn begin(&self, fabric: &SimFabric, node: SimNodeId, attempts: u64) -> bool {
        let mut state = self.lock();
        let goes = state.away.is_none();
        if goes {
            fabric.crash_node(node);
            state.away = Some((node, attempts));
        }
        goes
    }

    /// Ends the absence, if there is one.
    pub fn end(&self, fabric: &SimFabric) {
        if let Some((node, _)) = self.lock().away.take() {
            fabric.restart_node(node);
        }
    }

    /// Whether a node is away.
    pub fn is_active(&self) -> bool {
        self.lock().away.is_some()
    }

    fn is_away(&self, node: SimNodeId) -> bool {
        self.lock().away.is_some_and(|(away, _)| away == node)
    }

    /// Counts an attempt to reach a node, and returns whether the node is still away.
    fn try_reach(&self, fabric: &SimFabric, node: SimNodeId) -> bool {
        let mut state = self.lock();
        let Some((_, attempts)) = state.away.as_mut().filter(|(other, _)| *other == node) else {
            return false;
        };
        *attempts = attempts.saturating_sub(1);
        if *attempts > 0 {
            return true;
        }
        state.away = None;
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
/// it waits until the node returns. With [`AwayPolicy::Fail`] the node may be away if it was
/// connected to before.
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
    let again = Arc::new(NodeReturn { fabric: fabric.clone(), absence: absence.clone(), node, who });
    if absence.is_away(node)
        && let Some(target) = absence.lock().contacts.get(&node)
    {
        return Ok(Box::new(ReconnectingEndpoint::to_away_target(target.clone(), again, policy)));
    }
    let endpoint = fabric.connect(node, who)?;
    absence.lock().contacts.insert(node, TargetDescription::of(&*endpoint));
    Ok(Box::new(ReconnectingEndpoint::new(endpoint, Some(again), policy)))
}
