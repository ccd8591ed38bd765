//! SimNodes whose processes end and come back, and whose memory is kept meanwhile.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_fabric::lasting::{Again, Attempt, LastingEndpoint, Manner};
use aquifer_fabric::sim::{Node, SimFabric};
use aquifer_fabric::{Endpoint, EndpointError, Identity};

/// Which node is away, and how often it is looked for in vain before it is back. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct NodeAbsence(Arc<Mutex<Option<(Node, u64)>>>);

impl NodeAbsence {
    /// A node goes away, if none is. Whether it did.
    pub fn begin(&self, fabric: &SimFabric, node: Node, attempts: u64) -> bool {
        let mut away = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let goes = away.is_none();
        if goes {
            fabric.crash_node(node);
            *away = Some((node, attempts));
        }
        goes
    }

    /// Whoever is away is back.
    pub fn end(&self, fabric: &SimFabric) {
        if let Some((node, _)) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            fabric.restart_node(node);
        }
    }

    /// Whether a node is away.
    pub fn is_active(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Somebody attempts for a node; whether that is away still.
    fn try_reach(&self, fabric: &SimFabric, node: Node) -> bool {
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
    node: Node,
    who: Identity,
}

impl Again for NodeReturn {
    fn attempt(&self) -> Attempt {
        if self.absence.try_reach(&self.fabric, self.node) {
            return Attempt::NotYet;
        }
        // It was dead, or cut off, or has shut us out.
        self.fabric.connect(self.node, self.who).map_or(Attempt::Never, Attempt::Here)
    }

    fn patience(&self) -> Duration {
        Duration::MAX
    }

    fn takes_time(&self) -> bool {
        false
    }
}

/// An endpoint that outlives the node's absence.
///
/// # Errors
/// If the node cannot be reached, and is not away; whoever connects to wait waits until it is back.
pub fn connect(
    fabric: &SimFabric,
    absence: &NodeAbsence,
    node: Node,
    who: Identity,
    manner: Manner,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    if manner == Manner::Wait {
        while absence.try_reach(fabric, node) {}
    }
    let endpoint = fabric.connect(node, who)?;
    let again = NodeReturn { fabric: fabric.clone(), absence: absence.clone(), node, who };
    Ok(Box::new(LastingEndpoint::new(endpoint, Arc::new(again), manner)))
}
