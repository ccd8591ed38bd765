//! The daemon's main function and options.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_directory::names::HeapsRecord;
use aquifer_directory::{ConnectDirectory, DirectoryError};
use aquifer_fabric::tcp::{TcpOptions, TcpTarget};
use aquifer_fabric::{Admission, ClusterKey, Limits, Target, TargetError, VerbsProvider, WITHOUT_VERBS};
use aquifer_metrics::{MetricsAddress, MetricsError, MetricsListener, MetricsServer};
use aquifer_objects::class::BLOCK_ORDERS;
use aquifer_objects::service::{FrameSource, HEAPS_MAX, HeapService, MESSAGE_BYTES_MAX, TICKET_SERVICE};
use rustix::process::{Resource, getrlimit};

use crate::kept::{HeapKeeperClient, ServiceKeeper};
use crate::membership::Membership;
use crate::metrics;
use crate::node_spans::NodeSpans;
use crate::shared::SharedPrograms;

/// Usual lifetime of the lease without a keep-alive.
pub const LEASE_TTL: Duration = Duration::from_secs(5);
/// Interval of compaction, of reconnecting to the keeper, and of checks whether a keep-alive of the
/// lease is due.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which a request to stop is polled.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Largest number of endpoints of all programs.
const ENDPOINTS_MAX: usize = 8192;
/// Descriptors of the process's limit for each endpoint.
const DESCRIPTORS_PER_ENDPOINT: u64 = 4;
/// A tenant may have 1/32 of the endpoints. Agents issue tickets for few ids of one user, so a user
/// cannot use up the endpoints of others.
const TENANT_ENDPOINTS_DIVISOR: usize = 32;
/// Endpoints that each tenant may have at least.
const TENANT_ENDPOINTS_MIN: usize = 16;

impl fmt::Debug for HeapsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapsOptions")
            .field("node", &self.node)
            .field("memory_bytes", &self.memory_bytes)
            .field("node_socket", &self.node_socket)
            .field("listen", &self.listen)
            .field("advertise", &self.advertise)
            .field("device", &self.device)
            .field("threads", &self.threads)
            .field("encrypt", &self.encrypt)
            .field("lease_ttl", &self.lease_ttl)
            .field("keeper", &self.keeper)
            .field("socket", &self.socket)
            .field("grace", &self.grace)
            .field("metrics", &self.metrics)
            .finish_non_exhaustive()
    }
}

/// The socket on which a service listens.
#[derive(Debug)]
pub enum HeapsListen {
    /// A new socket at this address.
    At(SocketAddr),
    /// A socket that already listens.
    On(TcpListener),
}

/// An RDMA device that serves the memory of heaps.
#[derive(Clone, Copy, Debug)]
pub struct DeviceOptions {
    /// Address of the device.
    pub address: SocketAddr,
    /// Bytes of memory of each heap, which is pinned.
    pub heap_bytes: u64,
}

/// Options of a service of heaps.
pub struct HeapsOptions {
    /// The number of the node whose memory the heaps use.
    pub node: u16,
    /// Limit of the memory of all heaps together, in bytes.
    pub memory_bytes: u64,
    /// Socket of the node that lends the memory of the heaps. `None`: the heaps have memory of
    /// their own, in addition to the memory that the node lends.
    pub node_socket: Option<PathBuf>,
    /// The socket for clients.
    pub listen: HeapsListen,
    /// Address by which clients connect, if it differs from `listen`.
    pub advertise: Option<SocketAddr>,
    /// The RDMA device that serves reads, if any.
    pub device: Option<DeviceOptions>,
    /// The key from which the secrets of tickets are derived.
    pub key: ClusterKey,
    /// Number of threads that answer requests.
    pub threads: Option<usize>,
    /// Whether the service requires encryption ([`TcpOptions::encrypt`]).
    pub encrypt: Option<bool>,
    /// Connects to the directory.
    pub connect: ConnectDirectory,
    /// Lifetime of the lease without a keep-alive; usually [`LEASE_TTL`].
    pub lease_ttl: Duration,
    /// The keeper's socket.
    pub keeper: PathBuf,
    /// The socket at which the agent of this machine opens heaps for programs.
    pub socket: PathBuf,
    /// The time for which the keeper holds the heaps after the process has ended.
    pub grace: Duration,
    /// Address at which metrics are served, if any.
    pub metrics: Option<MetricsAddress>,
}

/// Why a service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum HeapsError {
    /// The connection to the keeper failed.
    #[error("the keeper at {path} cannot hold heaps: {source}", path = path.display())]
    Keeper {
        /// Socket of the keeper.
        path: PathBuf,
        /// The error of the connection.
        source: io::Error,
    },
    /// The node lends no memory to heaps.
    #[error("node {node} lends no memory to heaps: {reason}; use memory of their own with --own-memory")]
    Node {
        /// The node.
        node: u16,
        /// Reason of the refusal.
        reason: String,
    },
    /// The socket for clients cannot be opened.
    #[error("cannot listen for clients: {0}")]
    Listen(#[from] TargetError),
    /// The socket for programs of this machine cannot be made.
    #[error("cannot listen at {path}: {source}", path = path.display())]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory failed.
    #[error("cannot join the cluster: {0}")]
    Directory(#[from] DirectoryError),
    /// Metrics cannot be served.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

/// Serves heaps until `stop` is set, or until `when_unused` is set and no heap has an object.
///
/// `ready` is called once, when programs can use the service.
///
/// # Errors
/// If the service cannot start.
pub fn serve(
    options: HeapsOptions,
    stop: &AtomicBool,
    when_unused: &AtomicBool,
    ready: impl FnOnce(),
) -> Result<(), HeapsError> {
    let listener = options.metrics.as_ref().map(MetricsListener::bind).transpose()?;
    let (keeper, kept) = HeapKeeperClient::connect(&options.keeper, options.node, options.grace)
        .map_err(|source| HeapsError::Keeper { path: options.keeper.clone(), source })?;
    let (tcp, address) = listen(&options)?;
    let target: Arc<dyn Target> = Arc::clone(&tcp) as _;
    let holder = Box::new(ServiceKeeper(Arc::clone(&keeper)));
    let kept_ms = u64::try_from(options.grace.as_millis()).unwrap_or(u64::MAX);
    let spans = options.node_socket.as_ref().map(|path| Arc::new(NodeSpans::new(path, kept_ms)));
    let source = spans.clone().map(|spans| spans as Arc<dyn FrameSource>);
    let service = Arc::new(HeapService::new(options.node, options.memory_bytes, source, Some(holder)));
    tcp.answer_messages(Arc::clone(&service) as _);
    let device = options.device.map(|device| open_device(&options, device)).transpose()?;
    if let (Some((target, _)), Some(DeviceOptions { heap_bytes, .. })) = (&device, options.device) {
        service.serve_by_devices(target, heap_bytes);
    }
    for heap in kept {
        let (number, uid) = (heap.record.heap, heap.record.tenant);
        match service.restore(&*target, &heap.record, heap.bytes) {
            Ok(()) => tracing::info!(node = options.node, uid, "restored a heap"),
            Err(error) => {
                tracing::error!(node = options.node, uid, %error, "cannot restore a kept heap; it is lost");
                keeper.release(number);
            }
        }
    }
    service.reserve_restored();
    if let Some(reason) = spans.and_then(|spans| spans.refusal()) {
        return Err(HeapsError::Node { node: options.node, reason });
    }
    service.open_through(&target);
    answer_early_messages(&*target, &service);
    let _programs = SharedPrograms::start(&options.socket, Arc::clone(&service))
        .map_err(|source| HeapsError::Socket { path: options.socket.clone(), source })?;
    let record = HeapsRecord {
        node: options.node,
        address: address.to_string(),
        device: device.as_ref().map(|(_, address)| address.to_string()),
        memory_bytes: options.memory_bytes,
        kept_ms,
        epoch: 0,
    };
    let targets: Vec<Arc<dyn Target>> =
        std::iter::once(target).chain(device.as_ref().map(|(device, _)| Arc::clone(device))).collect();
    let membership = Membership::join(options.connect, record, options.lease_ttl, targets, Instant::now())?;
    let membership = KeptMembership::start(membership)
        .map_err(|source| TargetError::System { what: "cannot start a thread for the lease", source })?;
    let _metrics: Option<MetricsServer> =
        listener.map(|listener| metrics::serve(listener, Arc::clone(&service))).transpose()?;
    tracing::info!(node = options.node, bytes = options.memory_bytes, %address, "serving heaps");
    ready();
    let mut maintained = Instant::now();
    let must_end =
        || stop.load(Ordering::Relaxed) || when_unused.load(Ordering::Relaxed) && is_unused(&service);
    while !must_end() {
        if maintained.elapsed() >= MAINTENANCE_INTERVAL {
            maintained = Instant::now();
            service.maintain();
            keeper.reconnect_if_closed();
        }
        std::thread::sleep(STOP_POLL_INTERVAL);
    }
    drop(membership);
    Ok(())
}

/// A membership that a thread keeps, so that a node that does not answer costs no lease. The record
/// is removed when it is dropped.
struct KeptMembership {
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl KeptMembership {
    fn start(mut membership: Membership) -> io::Result<Self> {
        let stops = Arc::new(AtomicBool::new(false));
        let must_stop = Arc::clone(&stops);
        let keep = move || {
            while !must_stop.load(Ordering::Acquire) {
                membership.renew(Instant::now());
                std::thread::park_timeout(MAINTENANCE_INTERVAL);
            }
            membership.leave();
        };
        let thread = std::thread::Builder::new().name("heaps-lease".into()).spawn(keep)?;
        Ok(Self { stops, thread: Some(thread) })
    }
}

impl Drop for KeptMembership {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        if thread.join().is_err() {
            tracing::error!("the thread that kept the lease of the service has panicked");
        }
    }
}

/// Answers the messages that arrived before `service` answered the target's messages.
fn answer_early_messages(target: &dyn Target, service: &HeapService) {
    let (mut message, mut answer) = (Vec::new(), Vec::new());
    while let Some(from) = target.receive(&mut message) {
        service.answer(from.who.tenant, &message, &mut answer);
        target.reply(from.endpoint, &answer);
        message.clear();
        answer.clear();
    }
}

fn is_unused(service: &HeapService) -> bool {
    let mut reports = service.tenants().into_iter().filter_map(|tenant| service.report(tenant));
    reports.all(|report| report.objects == 0)
}

/// Opens the device that serves reads. Returns its target and address.
fn open_device(
    options: &HeapsOptions,
    device: DeviceOptions,
) -> Result<(Arc<dyn Target>, SocketAddr), HeapsError> {
    let verbs = VerbsProvider::installed().ok_or_else(|| TargetError::System {
        what: "cannot open an RDMA device",
        source: io::Error::new(io::ErrorKind::Unsupported, WITHOUT_VERBS),
    })?;
    Ok((verbs.listen)(device.address, &options.key, Admission::Tickets(TICKET_SERVICE))?)
}

/// Returns the limit of endpoints of all programs, by the process's limit of descriptors.
fn endpoints_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / DESCRIPTORS_PER_ENDPOINT).unwrap_or(usize::MAX).min(ENDPOINTS_MAX)
}

fn listen(options: &HeapsOptions) -> Result<(Arc<TcpTarget>, SocketAddr), HeapsError> {
    let defaults = TcpOptions::default();
    let endpoints_max = endpoints_max();
    let tcp = TcpOptions {
        endpoints_max,
        endpoints_per_tenant_max: (endpoints_max / TENANT_ENDPOINTS_DIVISOR).max(TENANT_ENDPOINTS_MIN),
        admission: Admission::Tickets(TICKET_SERVICE),
        limits: Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() },
        regions_max: HEAPS_MAX * BLOCK_ORDERS,
        threads: options.threads.unwrap_or(defaults.threads),
        encrypt: options.encrypt.unwrap_or(defaults.encrypt),
        ..defaults
    };
    let target = match &options.listen {
        HeapsListen::At(address) => TcpTarget::listen(*address, &options.key, tcp)?,
        HeapsListen::On(listener) => {
            let listener = listener
                .try_clone()
                .map_err(|source| TargetError::System { what: "cannot listen", source })?;
            TcpTarget::listen_on(listener, &options.key, tcp)?
        }
    };
    let address = options.advertise.unwrap_or_else(|| target.address());
    Ok((Arc::new(target), address))
}
