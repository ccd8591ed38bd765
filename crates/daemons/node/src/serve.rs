//! The life of the daemon, from the creation of the memory to the end of the lease.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::NodeRecord;
use aquifer_directory::{ConnectDirectory, FailureLog};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Admission, FabricAddress, Host, Target, TargetError, VerbsProvider, WITHOUT_VERBS};
use aquifer_metrics::{MetricsAddress, MetricsListener, MetricsServer};
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{NodeId, NodeMemory, NodeMemoryError};

use crate::clearer::Clearer;
use crate::error::NodeError;
use crate::heap_socket::HeapSocket;
use crate::heap_spans::HeapSpans;
use crate::host_epochs::HostEpochs;
use crate::kept_memory::{KeepOptions, MemoryKeeper};
use crate::lending::Lending;
use crate::maintenance::MaintenanceThread;
use crate::membership::{JoiningNode, NodeMembership, WatchEnd};
use crate::memory::AvailableMemory;
use crate::metrics;
use crate::opened_memory::{OpenedMemory, create, initial_lent_bytes, reopen};
use crate::resizer::Resizer;
use crate::self_client::{SelfAddress, SelfClient};
use crate::shutdown::Shutdown;

/// Usual lifetime of a node's lease without a keep-alive.
pub const LEASE_TTL: Duration = Duration::from_secs(5);
/// Interval at which a node that drains before its stop looks whether it is empty.
const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Options of a node.
pub struct NodeOptions {
    /// The node's number in the cluster.
    pub id: u16,
    /// Memory to lend, rounded down to 2 MiB. Metadata takes 0.5 % and up to 2 MiB in addition.
    pub memory_bytes: u64,
    /// The most memory that can be requested at run time. Over verbs it must be `memory_bytes`,
    /// because all memory is pinned.
    pub memory_bytes_max: u64,
    /// Memory that stays available to the machine: the node lends less of its free memory when less
    /// is available, and more again later. `None`: the node lends the requested amount.
    pub keep_free_bytes: Option<u64>,
    /// Measures the memory of the machine that is available; usually
    /// [`aquifer_host_memory::available_bytes`].
    pub available_bytes: fn() -> io::Result<u64>,
    /// Whether the node lends less when the kernel reports that processes wait for memory.
    pub watches_pressure: bool,
    /// Address at which the fabric listens.
    pub listen: ListenAddress,
    /// Address at which hosts reach the node, if it differs from `listen`: behind a relay, or if
    /// the node listens at all addresses.
    pub advertise: Option<SocketAddr>,
    /// Connects to the directory.
    pub connect: ConnectDirectory,
    /// Lifetime of the lease without a keep-alive; usually [`LEASE_TTL`].
    pub lease_ttl: Duration,
    /// Longest time for which a node that is asked to stop waits until hosts have moved their pages
    /// to other nodes. `None`: it stops at once.
    pub drain_on_stop: Option<Duration>,
    /// Address at which metrics are served, if any.
    pub metrics: Option<MetricsAddress>,
    /// The keeper that holds the memory when the process ends, if any.
    pub keep: Option<KeepOptions>,
    /// Socket at which the service of heaps on this machine requests memory, if any.
    pub heaps: Option<PathBuf>,
    /// Directory on whose file system the node keeps its data, instead of in memory. Such a node
    /// listens over TCP, reserves room for `memory_bytes_max`, and has nothing for heaps.
    pub disk: Option<PathBuf>,
}

/// A fabric, and the address at which it listens.
#[derive(Clone, Debug)]
pub enum ListenAddress {
    /// Shared memory of this machine, at a Unix socket.
    Shm(PathBuf, shm::ShmOptions),
    /// TCP, for hosts that have the cluster key.
    Tcp(SocketAddr, ClusterKey, Box<tcp::TcpOptions>),
    /// TCP, on a socket that already listens.
    TcpOn(Arc<TcpListener>, ClusterKey, Box<tcp::TcpOptions>),
    /// The RDMA device with this address, for hosts that have the cluster key.
    Verbs(SocketAddr, ClusterKey),
}

impl ListenAddress {
    /// Starts a target. Returns it with the address at which hosts reach it.
    fn start(&self) -> Result<(Arc<dyn Target>, FabricAddress), TargetError> {
        Ok(match self {
            Self::Shm(path, options) => {
                (Arc::new(ShmTarget::listen(path, options.clone())?), FabricAddress::Shm(path.clone()))
            }
            Self::Tcp(address, key, options) => {
                with_address(TcpTarget::listen(*address, key, (**options).clone())?)
            }
            Self::TcpOn(listener, key, options) => {
                let listener = listener
                    .try_clone()
                    .map_err(|source| TargetError::System { what: "cannot listen", source })?;
                with_address(TcpTarget::listen_on(listener, key, (**options).clone())?)
            }
            Self::Verbs(address, key) => {
                let verbs = VerbsProvider::installed().ok_or_else(|| TargetError::System {
                    what: "cannot open an RDMA device",
                    source: io::Error::new(io::ErrorKind::Unsupported, WITHOUT_VERBS),
                })?;
                let (target, address) = (verbs.listen)(*address, key, Admission::Members)?;
                (target, FabricAddress::Verbs(address))
            }
        })
    }

    /// The key that hosts must have.
    const fn key(&self) -> Option<&ClusterKey> {
        match self {
            Self::Shm(..) => None,
            Self::Tcp(_, key, _) | Self::TcpOn(_, key, _) | Self::Verbs(_, key) => Some(key),
        }
    }
}

fn with_address(target: TcpTarget) -> (Arc<dyn Target>, FabricAddress) {
    let address = FabricAddress::Tcp(target.address());
    (Arc::new(target), address)
}

impl fmt::Debug for NodeOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeOptions")
            .field("id", &self.id)
            .field("memory_bytes", &self.memory_bytes)
            .field("memory_bytes_max", &self.memory_bytes_max)
            .field("keep_free_bytes", &self.keep_free_bytes)
            .field("listen", &self.listen)
            .field("advertise", &self.advertise)
            .field("lease_ttl", &self.lease_ttl)
            .field("drain_on_stop", &self.drain_on_stop)
            .field("metrics", &self.metrics)
            .field("keep", &self.keep)
            .field("heaps", &self.heaps)
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

impl NodeOptions {
    /// Options with default values for all but the arguments.
    #[must_use]
    pub fn new(id: u16, memory_bytes: u64, listen: ListenAddress, connect: ConnectDirectory) -> Self {
        let memory_bytes_max = memory_bytes;
        Self {
            id,
            memory_bytes,
            memory_bytes_max,
            keep_free_bytes: None,
            available_bytes: aquifer_host_memory::available_bytes,
            watches_pressure: true,
            listen,
            advertise: None,
            connect,
            lease_ttl: LEASE_TTL,
            drain_on_stop: None,
            metrics: None,
            keep: None,
            heaps: None,
            disk: None,
        }
    }
}

/// Serves until `shutdown` is requested.
///
/// Calls `ready` once, with the node's record, when the node is in the directory and can be
/// used. If the directory fails later, the node continues to serve and reconnects to it.
///
/// # Errors
/// If the node cannot start.
pub fn serve(
    options: &NodeOptions,
    shutdown: &Shutdown,
    ready: impl FnOnce(&NodeRecord),
) -> Result<(), NodeError> {
    let mut node = RunningNode::start(options)?;
    ready(node.membership.record());
    let end = node.follow_directory(options, shutdown);
    if end == WatchEnd::Forced {
        let bytes = node.lending.recalled().0;
        tracing::warn!(node = options.id, bytes, "drained by force; memory in use is lost");
    }
    let may_drain = end == WatchEnd::Requested && !is_pinned(options);
    if let Some(time) = options.drain_on_stop.filter(|_| may_drain && node.membership.has_hosts()) {
        node.drain(options, shutdown, time);
    }
    node.stop(end);
    Ok(())
}

/// A node that is in the directory.
struct RunningNode {
    target: Arc<dyn Target>,
    node_memory: NodeMemory,
    membership: NodeMembership,
    lending: Arc<Lending>,
    maintenance: MaintenanceThread,
    heaps: Option<HeapSocket>,
    _metrics: Option<MetricsServer>,
    keeper: Option<Arc<MemoryKeeper>>,
}

impl RunningNode {
    fn start(options: &NodeOptions) -> Result<Self, NodeError> {
        check_options(options)?;
        let listener = options.metrics.as_ref().map(MetricsListener::bind).transpose()?;
        let (keeper, restored) = match &options.keep {
            Some(keep) => {
                let (keeper, restored) = MemoryKeeper::connect(keep, options.id)?;
                (Some(Arc::new(keeper)), restored)
            }
            None => (None, None),
        };
        // Determined first, so that a failure needs no cleanup.
        let lent_bytes = if restored.is_some() { None } else { Some(initial_lent_bytes(options)?) };
        // Connects to the directory first, without which no host would find the memory.
        let directory = (options.connect)()?;
        let (target, own_address) = options.listen.start().map_err(NodeError::Listen)?;
        let (restored, epochs) = match restored {
            Some((restored, epochs)) => (Some(restored), epochs),
            None => (None, HostEpochs::new().map_err(NodeError::HostEpochs)?),
        };
        let epochs = Arc::new(epochs);
        // Hosts are fenced before the memory is opened, so that a fenced host cannot access kept
        // memory.
        let joining = JoiningNode::new(directory, options.lease_ttl, Arc::clone(&epochs), &*target)?;
        let keeper_ref = keeper.as_deref();
        let opened =
            match restored.and_then(|restored| reopen(options, restored, keeper_ref, &epochs, &*target)) {
                Some(opened) => opened,
                None => create(options, lent_bytes, joining.epoch(), keeper_ref, &epochs, &*target)?,
            };
        let address = match options.advertise {
            Some(advertised) => own_address.clone().at(advertised),
            None => own_address.clone(),
        };
        let (membership, lending) = join_cluster(options, joining, &address, &opened, &*target)?;
        tracing::info!(
            node = options.id,
            bytes = opened.node_memory.lent_bytes(),
            is_restored = opened.is_restored,
            address = address.address(),
            "lending memory"
        );
        let own = SelfAddress { address: own_address, key: options.listen.key().cloned() };
        let maintenance =
            start_maintenance(options, own.clone(), &opened, &target, &lending, &membership, keeper.clone())
                .map_err(NodeError::Maintenance)
                .inspect_err(|_| abandon(&membership, keeper.as_deref()))?;
        let heaps = start_heaps(options, own, &opened, &target, &membership)
            .inspect_err(|_| abandon(&membership, keeper.as_deref()))?;
        let OpenedMemory { node_memory, disk, .. } = opened;
        let serve_metrics = |listener| {
            let counters = Arc::clone(membership.counters());
            let lending = Arc::clone(&lending);
            metrics::serve(listener, node_memory.clone(), disk, Arc::clone(&target), lending, counters)
        };
        let metrics = listener
            .map(serve_metrics)
            .transpose()
            .inspect_err(|_| abandon(&membership, keeper.as_deref()))?;
        Ok(Self { target, node_memory, membership, lending, maintenance, heaps, _metrics: metrics, keeper })
    }

    /// Follows the directory until `shutdown` is requested, and reconnects to it when it fails.
    fn follow_directory(&mut self, options: &NodeOptions, shutdown: &Shutdown) -> WatchEnd {
        let (mut failure_log, mut connect_failure_log) = (FailureLog::default(), FailureLog::default());
        while !shutdown.is_requested() {
            let error = match self.membership.watch(&*self.target, &self.node_memory, shutdown) {
                Ok(end) => return end,
                Err(error) => error,
            };
            if let Some(failures) = failure_log.record(Instant::now()) {
                tracing::warn!(
                    node = options.id,
                    %error,
                    failures,
                    "connection to the directory failed; reconnecting"
                );
            }
            if shutdown.wait(options.lease_ttl / 10) {
                break;
            }
            match (options.connect)() {
                Ok(directory) => self.membership.set_directory(directory),
                Err(error) => {
                    if let Some(failures) = connect_failure_log.record(Instant::now()) {
                        tracing::warn!(
                            node = options.id,
                            %error,
                            failures,
                            "reconnecting to the directory failed; retrying"
                        );
                    }
                }
            }
        }
        WatchEnd::Requested
    }

    /// Serves until the node is empty, for at most `time`, or until `shutdown` is requested again.
    fn drain(&mut self, options: &NodeOptions, shutdown: &Shutdown, time: Duration) {
        tracing::info!(node = options.id, seconds = time.as_secs(), "draining before the stop");
        self.lending.stop();
        let (ended, deadline) = (Shutdown::new(), Instant::now() + time);
        let node_memory = self.node_memory.clone();
        std::thread::scope(|scope| {
            let waiting = ended.clone();
            scope.spawn(move || {
                let must_wait = || node_memory.lent_bytes() > 0 && Instant::now() < deadline;
                while must_wait() && !shutdown.is_repeated() && !waiting.wait(DRAIN_CHECK_INTERVAL) {}
                waiting.request();
            });
            self.follow_directory(options, &ended);
        });
        let left_bytes = self.node_memory.lent_bytes();
        if left_bytes > 0 {
            tracing::warn!(node = options.id, left_bytes, "stopping before the node is empty");
        }
    }

    /// Leaves the cluster. The memory is lost unless a keeper holds it and a host may use it.
    fn stop(self, end: WatchEnd) {
        let Some(keeper) = self.keeper else {
            self.membership.leave();
            return;
        };
        // After this no section can come online any more.
        drop((self.maintenance, self.heaps));
        if self.node_memory.lent_bytes() > 0 && end == WatchEnd::Requested {
            self.membership.end_lease();
        } else {
            // No host uses the memory or can allocate any of it, so it need not be kept.
            keeper.release();
            self.membership.leave();
        }
    }
}

/// The memory of a machine with a disk node does not limit what the node lends.
const fn unlimited_bytes() -> io::Result<u64> {
    Ok(u64::MAX >> 1)
}

/// True if the fabric pins memory, so that the lent memory cannot change.
const fn is_pinned(options: &NodeOptions) -> bool {
    matches!(options.listen, ListenAddress::Verbs(..))
}

fn check_options(options: &NodeOptions) -> Result<(), NodeError> {
    let (bytes, bytes_max) = (options.memory_bytes, options.memory_bytes_max);
    if bytes > bytes_max {
        return Err(NodeMemoryError::AboveMax { bytes, bytes_max }.into());
    }
    if is_pinned(options) && (bytes_max != bytes || options.keep_free_bytes.is_some()) {
        return Err(NodeError::Pinned { fabric: "verbs" });
    }
    if options.disk.is_some() {
        let is_tcp = matches!(options.listen, ListenAddress::Tcp(..) | ListenAddress::TcpOn(..));
        if !is_tcp {
            return Err(NodeError::DiskFabric);
        }
        if options.keep_free_bytes.is_some() || options.heaps.is_some() {
            return Err(NodeError::DiskOptions);
        }
    }
    Ok(())
}

/// Puts the node's record into the directory, and reads the request for the lent memory.
fn join_cluster(
    options: &NodeOptions,
    joining: JoiningNode,
    address: &FabricAddress,
    opened: &OpenedMemory,
    target: &dyn Target,
) -> Result<(NodeMembership, Arc<Lending>), NodeError> {
    let record = record(options, address, opened);
    let lending = Arc::new(Lending::new(record.memory_bytes, record.requested_memory_bytes));
    let mut membership = joining.join(record, Arc::clone(&lending), target)?;
    // A request for this life that was made before a restart is still valid.
    membership.load_request().map_err(NodeError::from).inspect_err(|_| membership.end_lease())?;
    Ok((membership, lending))
}

/// Starts the thread that clears memory and changes the amount of lent memory.
fn start_maintenance(
    options: &NodeOptions,
    own: SelfAddress,
    opened: &OpenedMemory,
    target: &Arc<dyn Target>,
    lending: &Arc<Lending>,
    membership: &NodeMembership,
    keeper: Option<Arc<MemoryKeeper>>,
) -> io::Result<MaintenanceThread> {
    let OpenedMemory { node_memory, is_restored, .. } = opened;
    let client = SelfClient::new(own, NodeId(options.id), Host::NODE, opened.uncertain());
    let cleared_bytes = Arc::clone(&membership.counters().cleared_bytes);
    let clearer = Clearer::new(node_memory.clone(), Arc::clone(target), cleared_bytes);
    let resizer = Resizer::new(
        node_memory.clone(),
        Arc::clone(target),
        Arc::clone(lending),
        is_pinned(options),
        AvailableMemory {
            keep_free_bytes: options.keep_free_bytes,
            measure: if options.disk.is_some() { unlimited_bytes } else { options.available_bytes },
            watches_pressure: options.watches_pressure,
        },
        !is_restored,
    );
    MaintenanceThread::start(client, clearer, resizer, keeper)
}

/// Starts the thread that holds memory for heaps, if this machine has a service of heaps.
fn start_heaps(
    options: &NodeOptions,
    own: SelfAddress,
    opened: &OpenedMemory,
    target: &Arc<dyn Target>,
    membership: &NodeMembership,
) -> Result<Option<HeapSocket>, NodeError> {
    let Some(path) = &options.heaps else { return Ok(None) };
    let spans = (!is_pinned(options)).then(|| {
        let client = SelfClient::new(own, NodeId(options.id), Host::HEAPS, opened.uncertain());
        let held_bytes = Arc::clone(&membership.counters().held_bytes);
        let (memory, target) = (opened.node_memory.clone(), Arc::clone(target));
        HeapSpans::new(memory, target, client, held_bytes, path.with_extension("held"), opened.epoch)
    });
    HeapSocket::start(path, spans).map(Some).map_err(|source| NodeError::Heaps { path: path.clone(), source })
}

/// The node's first record.
fn record(options: &NodeOptions, address: &FabricAddress, opened: &OpenedMemory) -> NodeRecord {
    let memory_bytes_max = opened.node_memory.layout.data_bytes();
    let requested_bytes = options.memory_bytes / SECTION_BYTES * SECTION_BYTES;
    let grace = options.keep.as_ref().map_or(Duration::ZERO, |keep| keep.grace);
    NodeRecord {
        id: options.id,
        fabric: address.provider().to_owned(),
        address: address.address(),
        memory_bytes: opened.node_memory.lent_bytes(),
        memory_bytes_max,
        requested_memory_bytes: requested_bytes.min(memory_bytes_max),
        resize_blocker: None,
        recalled_bytes: 0,
        recalled_from: Vec::new(),
        kept_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
        epoch: opened.epoch,
        is_disk: options.disk.is_some(),
    }
}

/// Leaves the cluster after a failure. Kept memory may return.
fn abandon(membership: &NodeMembership, keeper: Option<&MemoryKeeper>) {
    match keeper {
        Some(_) => membership.end_lease(),
        None => membership.leave(),
    }
}
