//! Nodes whose processes end and come back, and whose memory is kept meanwhile.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_fabric::lasting::{Again, Attempt, LastingEndpoint, Manner};
use aquifer_fabric::sim::{Node, SimFabric};
use aquifer_fabric::{Endpoint, EndpointError, Identity};

/// Which node is away, and how often it is looked for in vain before it is back. Clones are handles to the same.
#[derive(Clone, Debug, Default)]
pub struct Absence(Arc<Mutex<Option<(Node, u64)>>>);

impl Absence {
    /// A node goes away, if none is. Whether it did.
    pub fn begin(&self, fabric: &SimFabric, node: Node, looks: u64) -> bool {
        let mut away = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let goes = away.is_none();
        if goes {
            fabric.crash_node(node);
            *away = Some((node, looks));
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
    pub fn is_on(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Somebody looks for a node; whether that is away still.
    fn look_for(&self, fabric: &SimFabric, node: Node) -> bool {
        let mut away = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, looks)) = away.as_mut().filter(|(other, _)| *other == node) else { return false };
        *looks = looks.saturating_sub(1);
        if *looks > 0 {
            return true;
        }
        *away = None;
        fabric.restart_node(node);
        false
    }
}

#[derive(Debug)]
struct SimAgain {
    fabric: SimFabric,
    absence: Absence,
    node: Node,
    who: Identity,
}

impl Again for SimAgain {
    fn attempt(&self) -> Attempt {
        if self.absence.look_for(&self.fabric, self.node) {
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
    absence: &Absence,
    node: Node,
    who: Identity,
    manner: Manner,
) -> Result<Box<dyn Endpoint>, EndpointError> {
    if manner == Manner::Wait {
        while absence.look_for(fabric, node) {}
    }
    let endpoint = fabric.connect(node, who)?;
    let again = SimAgain { fabric: fabric.clone(), absence: absence.clone(), node, who };
    Ok(Box::new(LastingEndpoint::new(endpoint, Arc::new(again), manner)))
}
