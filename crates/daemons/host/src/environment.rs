//! The clock and the connections of a host.
//!
//! A simulator replaces both: then its time is virtual, and its nodes are simulated.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{ClusterKey, Endpoint, EndpointError, FabricAddress, Identity};
use aquifer_pool::NodeClass;

/// Time for which a wait for an answer of a disk node polls before it sleeps: longer than a read of
/// a fast disk takes (decision 5).
const DISK_SPIN_TIME: Duration = Duration::from_micros(300);

/// A monotonic clock, and a way to connect to memory nodes.
pub trait HostEnvironment: Send + Sync + Debug {
    /// The time now. Never decreases.
    fn now(&self) -> Instant;

    /// Connects to the node at an address.
    ///
    /// # Errors
    /// If no node answers there, or the node refuses the connection.
    fn connect(
        &self,
        address: &FabricAddress,
        class: NodeClass,
        identity: Identity,
    ) -> Result<Box<dyn Endpoint>, EndpointError>;

    /// Whether an attempt to connect may block. If so, separate threads reconnect to nodes that
    /// were away; otherwise the thread that polls the endpoint does.
    fn is_blocking(&self) -> bool {
        true
    }
}

/// The clock and the networks of this machine.
#[derive(Debug)]
pub(crate) struct SystemEnvironment {
    /// The cluster key, required by nodes on other machines.
    pub key: Option<ClusterKey>,
    pub options: ConnectOptions,
}

impl HostEnvironment for SystemEnvironment {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn connect(
        &self,
        address: &FabricAddress,
        class: NodeClass,
        identity: Identity,
    ) -> Result<Box<dyn Endpoint>, EndpointError> {
        let spin_time = match class {
            NodeClass::Memory => self.options.spin_time,
            NodeClass::Disk => DISK_SPIN_TIME,
        };
        let options = ConnectOptions { spin_time, ..self.options.clone() };
        address.connect(identity, self.key.as_ref(), &options)
    }
}
