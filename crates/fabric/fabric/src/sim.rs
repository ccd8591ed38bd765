//! Provider for tests: a whole fabric in one thread and in virtual time, determined by a seed.
//!
//! Posting only puts operations in flight; [`SimFabric::step`] plays the next event. An operation
//! takes effect at the node after a random delay and completes after another one. This is in order
//! for one endpoint, and in any order across endpoints. Tests crash nodes and hosts, cut links and
//! slow hosts down. The same seed and the same calls give the same history.

mod endpoint;
mod link;
mod rng;
mod target;
mod world;

pub use endpoint::SimEndpoint;
pub use rng::Rng;
pub use target::SimTarget;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::target::{Host, Identity};
use crate::work::{Endpoint, EndpointError, Limits};
use world::FabricWorld;

/// A memory node of a simulated fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SimNodeId(pub usize);

/// The options of a simulated fabric.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// The delay of each direction between host and node.
    pub delay_ns: Range<u64>,
    /// The time until the loss of a peer is detected.
    pub timeout_ns: u64,
    /// Whether operations may still take effect after their timeout, unless they are drained.
    pub has_strays: bool,
    /// Whether polling an endpoint without completions plays the next event if operations are in
    /// flight. This is for code that polls until its work is done.
    pub step_on_poll: bool,
    /// Greatest number of endpoints of one node.
    pub endpoints_max: usize,
    /// Greatest number of regions of one node.
    pub regions_max: usize,
    /// Greatest number of windows of one node.
    pub windows_max: usize,
    /// The limits of one endpoint.
    pub limits: Limits,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            delay_ns: 500..20_000,
            timeout_ns: 1_000_000,
            has_strays: false,
            step_on_poll: false,
            endpoints_max: 256,
            regions_max: 64,
            windows_max: 65_536,
            limits: Limits::default(),
        }
    }
}

/// A simulated fabric. A clone is a handle to the same fabric.
#[derive(Clone, Debug)]
pub struct SimFabric {
    world: Arc<Mutex<FabricWorld>>,
}

impl SimFabric {
    /// Creates a fabric without nodes, at time zero.
    #[must_use]
    pub fn new(seed: u64, options: SimOptions) -> Self {
        Self { world: Arc::new(Mutex::new(FabricWorld::new(seed, options))) }
    }

    /// Adds a memory node.
    #[must_use]
    pub fn add_node(&self) -> SimTarget {
        SimTarget { world: Arc::clone(&self.world), node: self.world.lock().add_node() }
    }

    /// Connects to a node. This takes no virtual time.
    ///
    /// # Errors
    /// If the node is dead, cut off or full, or has fenced this host.
    pub fn connect(&self, node: SimNodeId, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        Ok(Box::new(self.connect_endpoint(node, who)?))
    }

    /// Connects like [`Self::connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// The errors of [`Self::connect`].
    pub fn connect_endpoint(&self, node: SimNodeId, who: Identity) -> Result<SimEndpoint, EndpointError> {
        let mut world = self.world.lock();
        let (id, regions) = world.connect(node, who)?;
        let limits = world.options.limits;
        drop(world);
        Ok(SimEndpoint { world: Arc::clone(&self.world), id, regions, limits })
    }

    /// Plays the next event. Returns false if there is none.
    pub fn step(&self) -> bool {
        self.world.lock().step()
    }

    /// Plays all events.
    pub fn run(&self) {
        while self.step() {}
    }

    /// Virtual time, in nanoseconds.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.world.lock().now_ns
    }

    /// The time of the next event.
    #[must_use]
    pub fn next_event_ns(&self) -> Option<u64> {
        self.world.lock().next_event_ns()
    }

    /// Plays all events up to and including a time, and sets the clock to it.
    pub fn advance_to(&self, time_ns: u64) {
        let mut world = self.world.lock();
        while world.next_event_ns().is_some_and(|next| next <= time_ns) {
            world.step();
        }
        world.now_ns = world.now_ns.max(time_ns);
    }

    /// Crashes a node. A random prefix of each endpoint's operations in flight has taken effect.
    /// The endpoints detect the crash after some time.
    pub fn crash_node(&self, node: SimNodeId) {
        self.world.lock().crash_node(node);
    }

    /// Restarts a crashed node with its memory and its keys, but without its fences.
    pub fn restart_node(&self, node: SimNodeId) {
        self.world.lock().restart_node(node);
    }

    /// Crashes a host. A random prefix of each endpoint's operations is on the wire and takes
    /// effect later. The rest never does.
    pub fn crash_host(&self, host: Host) {
        self.world.lock().crash_host(host);
    }

    /// Cuts or restores the link between a host and a node. Operations that meet a cut link end
    /// with [`crate::WorkError::Timeout`].
    pub fn partition(&self, host: Host, node: SimNodeId, cut: bool) {
        self.world.lock().partition(host, node, cut);
    }

    /// Stops the process of a node, or resumes it. Operations wait for a stopped node, and end with
    /// [`crate::WorkError::Timeout`] if it is not resumed in time. Attempts to connect time out.
    pub fn stop_node(&self, node: SimNodeId, is_stopped: bool) {
        self.world.lock().stop_node(node, is_stopped);
    }

    /// Sets the time after which polls play no event, with [`SimOptions::step_on_poll`].
    pub fn limit_polls(&self, until_ns: u64) {
        self.world.lock().polled_until_ns = until_ns;
    }

    /// Multiplies the delays of everything that a host posts from now on; 1 is normal.
    pub fn slow(&self, host: Host, factor: u64) {
        self.world.lock().slow(host, factor);
    }

    /// Multiplies the delays of everything that is posted to a node from now on; 1 is normal.
    pub fn slow_node(&self, node: SimNodeId, factor: u64) {
        self.world.lock().slow_node(node, factor);
    }
}
