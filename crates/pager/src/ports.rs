//! Endpoints to the memory nodes, opened when first needed.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Endpoint, EndpointError, LocalKey, LocalSlice, Memory, Work};
use aquifer_pool::NodeId;

/// Opens endpoints to memory nodes; the edge knows how to reach them.
pub trait Connector: Send + Sync + Debug {
    /// Connect to a node.
    ///
    /// # Errors
    /// If it cannot be reached, or refuses.
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError>;

    /// The same for who has other nodes to turn to, and does not wait for one that is away.
    ///
    /// # Errors
    /// As [`Self::connect`].
    fn connect_without_waiting(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect(node)
    }

    /// The same for who has others to attend to meanwhile: to a node that is away, an endpoint that waits for it, if there can be one.
    ///
    /// # Errors
    /// As [`Self::connect`].
    fn connect_lazily(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect(node)
    }

    /// A clock, to know when a node has been silent for too long.
    fn now(&self) -> Duration {
        static START: std::sync::LazyLock<std::time::Instant> =
            std::sync::LazyLock::new(std::time::Instant::now);
        START.elapsed()
    }
}

/// An endpoint with the local memories that it moves pages from or to.
#[derive(Debug)]
pub struct Port {
    /// The endpoint.
    pub endpoint: Box<dyn Endpoint>,
    locals: Vec<LocalKey>,
    /// Posted by the next [`Port::flush`].
    queued: Vec<Work>,
    /// Operations queued or posted and not yet polled, as its user counts them.
    pub in_flight: usize,
}

impl Port {
    /// A range of the first local memory.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> LocalSlice {
        self.slice_of(0, offset, len)
    }

    /// A range of one of the local memories.
    #[must_use]
    pub fn slice_of(&self, memory: usize, offset: usize, len: usize) -> LocalSlice {
        LocalSlice {
            key: self.locals[memory],
            offset: offset as u64,
            len: u32::try_from(len).expect("transfers are far below 4 GiB"),
        }
    }

    /// Post this with what else is queued, all at once; there must be room for it.
    pub fn queue(&mut self, work: Work) {
        self.queued.push(work);
        self.in_flight += 1;
    }

    /// Post what is queued.
    pub fn flush(&mut self) {
        if !self.queued.is_empty() {
            self.endpoint.post(&self.queued).expect("there was room for each");
            self.queued.clear();
        }
    }

    /// Whether one more operation can be posted.
    #[must_use]
    pub fn has_capacity(&self) -> bool {
        self.in_flight < self.endpoint.limits().queue_depth
    }
}

/// The ports of one thread, one for each node.
#[derive(Debug)]
pub struct Ports {
    connector: Arc<dyn Connector>,
    memories: Vec<Arc<Memory>>,
    open: Vec<(NodeId, Port)>,
}

impl Ports {
    /// No ports yet; they will move bytes from and to `memory`, which is number 0.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>, memory: Arc<Memory>) -> Self {
        Self { connector, memories: vec![memory], open: Vec::new() }
    }

    /// One more memory to move bytes from and to; returns its number. There should be few.
    ///
    /// # Errors
    /// If an endpoint does not take it.
    pub fn add_memory(&mut self, memory: Arc<Memory>) -> Result<usize, EndpointError> {
        let mut keys = Vec::with_capacity(self.open.len());
        for (_, port) in &mut self.open {
            keys.push(port.endpoint.register_local(Arc::clone(&memory))?);
        }
        for ((_, port), key) in self.open.iter_mut().zip(keys) {
            port.locals.push(key);
        }
        self.memories.push(memory);
        Ok(self.memories.len() - 1)
    }

    /// A local memory.
    #[must_use]
    pub fn memory(&self, number: usize) -> &Arc<Memory> {
        &self.memories[number]
    }

    /// How many local memories there are.
    #[must_use]
    pub fn memory_count(&self) -> usize {
        self.memories.len()
    }

    /// The connector's clock.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.connector.now()
    }

    /// The port to a node.
    ///
    /// # Errors
    /// If it cannot be reached.
    pub fn port(&mut self, node: NodeId) -> Result<&mut Port, EndpointError> {
        let at = match self.open.iter().position(|(number, _)| *number == node) {
            Some(at) => at,
            None => {
                let mut endpoint = self.connector.connect_lazily(node)?;
                let mut locals = Vec::with_capacity(self.memories.len());
                for memory in &self.memories {
                    locals.push(endpoint.register_local(Arc::clone(memory))?);
                }
                self.open.push((node, Port { endpoint, locals, queued: Vec::new(), in_flight: 0 }));
                self.open.len() - 1
            }
        };
        Ok(&mut self.open[at].1)
    }

    /// The port to a node, if it is open.
    pub fn open_port(&mut self, node: NodeId) -> Option<&mut Port> {
        self.open.iter_mut().find(|(number, _)| *number == node).map(|(_, port)| port)
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
