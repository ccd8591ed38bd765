//! Endpoints to the memory nodes, opened when first needed.

use std::fmt::Debug;
use std::sync::Arc;

use aquifer_fabric::{Endpoint, EndpointError, LocalKey, LocalSlice, Memory};
use aquifer_pool::NodeId;

/// Opens endpoints to memory nodes; the edge knows how to reach them.
pub trait Connector: Send + Sync + Debug {
    /// Connect to a node.
    ///
    /// # Errors
    /// If it cannot be reached, or refuses.
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError>;
}

/// An endpoint with the local memory that it moves pages from or to.
#[derive(Debug)]
pub struct Port {
    /// The endpoint.
    pub endpoint: Box<dyn Endpoint>,
    local: LocalKey,
}

impl Port {
    /// A range of the local memory.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> LocalSlice {
        LocalSlice {
            key: self.local,
            offset: offset as u64,
            len: u32::try_from(len).expect("transfers are far below 4 GiB"),
        }
    }
}

/// The ports of one thread, one for each node.
#[derive(Debug)]
pub struct Ports {
    connector: Arc<dyn Connector>,
    memory: Arc<Memory>,
    open: Vec<(NodeId, Port)>,
}

impl Ports {
    /// No ports yet; they will move bytes from and to `memory`.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>, memory: Arc<Memory>) -> Self {
        Self { connector, memory, open: Vec::new() }
    }

    /// The local memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The port to a node.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub fn port(&mut self, node: NodeId) -> Result<&mut Port, EndpointError> {
        let at = match self.open.iter().position(|(number, _)| *number == node) {
            Some(at) => at,
            None => {
                let mut endpoint = self.connector.connect(node)?;
                let local = endpoint.register_local(Arc::clone(&self.memory))?;
                self.open.push((node, Port { endpoint, local }));
                self.open.len() - 1
            }
        };
        Ok(&mut self.open[at].1)
    }

    /// All open ports.
    pub fn open_ports(&mut self) -> impl Iterator<Item = (NodeId, &mut Port)> {
        self.open.iter_mut().map(|(node, port)| (*node, port))
    }

    /// Close the port to a node, so that the next use connects afresh.
    pub fn close(&mut self, node: NodeId) {
        self.open.retain(|(number, _)| *number != node);
    }
}
