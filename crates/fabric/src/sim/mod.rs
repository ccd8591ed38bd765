//! Provider for tests: a whole fabric in one thread, in virtual time, from one seed.
//!
//! Posting only puts work into op; [`SimFabric::step`] lets the next thing happen. Each
//! operation takes effect at the node after a random delay and completes after another one, in
//! order per endpoint and in any order across endpoints. Nodes and hosts crash, links are cut,
//! hosts are slow, all on command. The same seed and the same calls give the same history.

mod endpoint;
mod link;
mod rng;
mod target;
mod world;

pub use endpoint::SimEndpoint;
pub use rng::Rng;
pub use target::SimTarget;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::target::{Host, Identity};
use crate::work::{Endpoint, EndpointError, Limits};
use world::FabricWorld;

/// A memory node of a simulated fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Node(pub usize);

/// How a simulated fabric behaves.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Time from the host to the node, and again back.
    pub delay_ns: Range<u64>,
    /// Time until the loss of a peer is noticed.
    pub timeout_ns: u64,
    /// What was not answered in time may be on the wire yet, and take effect later, unless the node is asked to end it.
    pub has_strays: bool,
    /// Polling an endpoint that has work under way but nothing done lets the next thing happen:
    /// for code that polls in a loop until its work is done.
    pub step_on_poll: bool,
    /// Endpoints of one node.
    pub endpoints_max: usize,
    /// Regions of one node.
    pub regions_max: usize,
    /// Windows of one node.
    pub windows_max: usize,
    /// What one endpoint can bear.
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

/// A simulated fabric; clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct SimFabric {
    world: Arc<Mutex<FabricWorld>>,
}

impl SimFabric {
    /// A fabric without nodes, at time zero.
    #[must_use]
    pub fn new(seed: u64, options: SimOptions) -> Self {
        Self { world: Arc::new(Mutex::new(FabricWorld::new(seed, options))) }
    }

    /// Start a memory node.
    #[must_use]
    pub fn add_node(&self) -> SimTarget {
        SimTarget { world: Arc::clone(&self.world), node: self.lock().add_node() }
    }

    /// Connect to a node. It takes no time.
    ///
    /// # Errors
    /// If the node is dead, cut off, has fenced this host or has no room.
    pub fn connect(&self, node: Node, who: Identity) -> Result<Box<dyn Endpoint>, EndpointError> {
        Ok(Box::new(self.connect_endpoint(node, who)?))
    }

    /// As [`Self::connect`], for callers that want static dispatch.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_endpoint(&self, node: Node, who: Identity) -> Result<SimEndpoint, EndpointError> {
        let mut world = self.lock();
        let (id, regions) = world.connect(node, who)?;
        let limits = world.options.limits;
        drop(world);
        Ok(SimEndpoint { world: Arc::clone(&self.world), id, regions, limits })
    }

    /// Let the next thing happen; false if nothing is under way.
    pub fn step(&self) -> bool {
        self.lock().step()
    }

    /// Let everything happen that is under way.
    pub fn run(&self) {
        while self.step() {}
    }

    /// Virtual time, in nanoseconds.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.lock().now_ns
    }

    /// When the next thing happens, if anything is under way.
    #[must_use]
    pub fn next_event_ns(&self) -> Option<u64> {
        self.lock().next_event_ns()
    }

    /// Let everything happen up to and at a time, which is the present then.
    pub fn advance_to(&self, time_ns: u64) {
        let mut world = self.lock();
        while world.next_event_ns().is_some_and(|next| next <= time_ns) {
            world.step();
        }
        world.now_ns = world.now_ns.max(time_ns);
    }

    /// A node dies. Of the work under way to it a random prefix per endpoint has taken effect;
    /// its endpoints notice after a while.
    pub fn crash_node(&self, node: Node) {
        self.lock().crash_node(node);
    }

    /// A node that died is there again, and has its memory and its keys. Of whom it had fenced it knows nothing.
    pub fn restart_node(&self, node: Node) {
        self.lock().restart_node(node);
    }

    /// A host dies. Of the work that it has posted a random prefix per endpoint is on the wire
    /// and will still take effect, each at its own time; the rest never will.
    pub fn crash_host(&self, host: Host) {
        self.lock().crash_host(host);
    }

    /// Cut or mend the link between a host and a node. Work that meets the cut ends with
    /// [`crate::WorkError::Timeout`].
    pub fn partition(&self, host: Host, node: Node, cut: bool) {
        self.lock().partition(host, node, cut);
    }

    /// From now on everything that a host posts takes `factor` times as long; 1 is normal.
    pub fn slow(&self, host: Host, factor: u64) {
        self.lock().slow(host, factor);
    }

    /// From now on everything that is posted to a node takes `factor` times as long; 1 is normal.
    pub fn slow_node(&self, node: Node, factor: u64) {
        self.lock().slow_node(node, factor);
    }

    fn lock(&self) -> MutexGuard<'_, FabricWorld> {
        lock(&self.world)
    }
}

fn lock(world: &Mutex<FabricWorld>) -> MutexGuard<'_, FabricWorld> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}
