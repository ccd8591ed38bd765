//! Ports: one thread's endpoints to memory nodes, which are opened at first use.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::{Endpoint, EndpointError, LocalKey, LocalSlice, Memory, Work};
use aquifer_pool::NodeId;

/// Opens endpoints to memory nodes. The edge implements it.
pub trait Connector: Send + Sync + Debug {
    /// Connects to a node. Waits for a node that is away and whose memory is kept.
    ///
    /// # Errors
    /// If the node cannot be reached or refuses the connection.
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError>;

    /// Connects to a node, and fails at once if the node is away.
    ///
    /// For callers that can use another node. Operations on the endpoint fail, too, when the node
    /// goes away later.
    ///
    /// # Errors
    /// If the node cannot be reached, refuses the connection, or is away.
    fn connect_without_waiting(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect(node)
    }

    /// Connects to a node, and does not block if the node is away.
    ///
    /// For callers that serve several nodes. The endpoint to a node that is away queues READs and
    /// WRITEs until the node returns, if this connector has connected to it before.
    ///
    /// # Errors
    /// If the node cannot be reached or refuses the connection.
    fn connect_lazily(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        self.connect(node)
    }

    /// The time by a monotonic clock, against which the response times of nodes are measured.
    fn now(&self) -> Duration {
        static START: std::sync::LazyLock<std::time::Instant> =
            std::sync::LazyLock::new(std::time::Instant::now);
        START.elapsed()
    }
}

/// An endpoint to one node, with the local memory from and to which it transfers pages.
#[derive(Debug)]
pub struct Port {
    /// The endpoint.
    pub endpoint: Box<dyn Endpoint>,
    locals: Vec<LocalKey>,
    /// Operations that the next [`Port::flush`] posts.
    queued: Vec<Work>,
    /// Number of operations that are queued or posted, and whose completions are not yet polled.
    /// The user of the port decrements it.
    pub in_flight: usize,
    /// The time for which there were operations in flight and none has completed. The user of the
    /// port counts it.
    pub unanswered: Duration,
}

impl Port {
    /// A range of the first local memory, which has number 0.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> LocalSlice {
        self.slice_of(0, offset, len)
    }

    /// A range of the local memory with number `memory`.
    #[must_use]
    pub fn slice_of(&self, memory: usize, offset: usize, len: usize) -> LocalSlice {
        LocalSlice {
            key: self.locals[memory],
            offset: offset as u64,
            len: u32::try_from(len).expect("transfers are far below 4 GiB"),
        }
    }

    /// Queues an operation for the next [`Self::flush`]. The caller must have checked
    /// [`Self::has_capacity`].
    pub fn queue(&mut self, work: Work) {
        self.queued.push(work);
        self.in_flight += 1;
    }

    /// Posts all queued operations as one batch.
    pub fn flush(&mut self) {
        if !self.queued.is_empty() {
            self.endpoint.post(&self.queued).expect("the capacity was checked for each");
            self.queued.clear();
        }
    }

    /// Whether one more operation can be posted.
    #[must_use]
    pub fn has_capacity(&self) -> bool {
        self.in_flight < self.endpoint.limits().queue_depth
    }
}

/// The ports of one thread: at most one for each node.
#[derive(Debug)]
pub struct Ports {
    connector: Arc<dyn Connector>,
    memories: Vec<Arc<Memory>>,
    open: Vec<(NodeId, Port)>,
}

impl Ports {
    /// No open ports. `memory` becomes the local memory with number 0.
    #[must_use]
    pub fn new(connector: Arc<dyn Connector>, memory: Arc<Memory>) -> Self {
        Self { connector, memories: vec![memory], open: Vec::new() }
    }

    /// Registers one more local memory with all ports, and returns its number.
    ///
    /// Each local memory is registered with each endpoint, so there should be few.
    ///
    /// # Errors
    /// If an endpoint refuses to register it.
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

    /// The local memory with this number.
    #[must_use]
    pub fn memory(&self, number: usize) -> &Arc<Memory> {
        &self.memories[number]
    }

    /// The number of local memories.
    #[must_use]
    pub fn memory_count(&self) -> usize {
        self.memories.len()
    }

    /// The time by the connector's clock.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.connector.now()
    }

    /// The port to a node, which is opened if necessary.
    ///
    /// # Errors
    /// If the node cannot be reached.
    pub fn port(&mut self, node: NodeId) -> Result<&mut Port, EndpointError> {
        let at = match self.open.iter().position(|(number, _)| *number == node) {
            Some(at) => at,
            None => {
                let mut endpoint = self.connector.connect_lazily(node)?;
                let mut locals = Vec::with_capacity(self.memories.len());
                for memory in &self.memories {
                    locals.push(endpoint.register_local(Arc::clone(memory))?);
                }
                self.open.push((
                    node,
                    Port { endpoint, locals, queued: Vec::new(), in_flight: 0, unanswered: Duration::ZERO },
                ));
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

    /// Closes the port to a node. The next use opens a new one.
    pub fn close(&mut self, node: NodeId) {
        self.open.retain(|(number, _)| *number != node);
    }
}
