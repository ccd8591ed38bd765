//! The daemon's life, from the memory to the last keep-alive.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use aquifer_directory::names::NodeRecord;
use aquifer_directory::{Directory, DirectoryError};
use aquifer_fabric::ClusterKey;
use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{FabricAddress, Target, TargetError, VerbsProvider, WITHOUT_VERBS};
use aquifer_metrics::{MetricsAddress, MetricsListener};
use aquifer_pool::NodeMemoryError;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{NodeId, NodeMemory};

use crate::caretaker::Caretaker;
use crate::clearer::Clearer;
use crate::epochs::Epochs;
use crate::error::NodeError;
use crate::keeping::{Before, Keep, Kept};
use crate::lending::Lending;
use crate::member::{Member, Newcomer};
use crate::memory::{affordable_bytes, available_bytes};
use crate::metrics;
use crate::own::{Own, OwnPool};
use crate::resizer::Resizer;
use crate::shutdown::Shutdown;

/// How long a node that says nothing counts as alive.
pub const LEASE_TTL: Duration = Duration::from_secs(5);

/// Connects to the directory; called again whenever the connection is lost.
pub type Connect = Box<dyn Fn() -> Result<Arc<dyn Directory>, DirectoryError> + Send>;

/// How a node is set up.
pub struct NodeOptions {
    /// Its number in the cluster.
    pub id: u16,
    /// How much it lends, rounded down to 2 MiB; the metadata comes on top (0.5 %, and up to 2 MiB more).
    pub memory_bytes: u64,
    /// The most that it may be asked to lend at run time. Over verbs all memory is pinned: it lends what it lends.
    pub memory_bytes_max: u64,
    /// It lends less, as far as nobody uses it, when its machine has less than so much available; and more again when there is more. `None`: it lends what it is told.
    pub keep_free_bytes: Option<u64>,
    /// Where the fabric listens.
    pub listen: Listen,
    /// Where others reach it over TCP, if that is not where it listens: behind a relay, or listening at every address.
    pub advertise: Option<SocketAddr>,
    /// The directory.
    pub connect: Connect,
    /// How long it counts as alive when it says nothing; [`LEASE_TTL`] as a rule.
    pub lease_ttl: Duration,
    /// Where its figures are served, if anywhere.
    pub metrics: Option<MetricsAddress>,
    /// Where its memory is kept when its process ends, if anywhere.
    pub keep: Option<Keep>,
}

/// How the fabric listens.
#[derive(Clone, Debug)]
pub enum Listen {
    /// For this machine, at a Unix socket.
    Shm(PathBuf, shm::Options),
    /// For all who have the cluster's key, at an address of this machine.
    Tcp(SocketAddr, ClusterKey, Box<tcp::Options>),
    /// The same, on a socket that listens already.
    TcpOn(Arc<TcpListener>, ClusterKey, Box<tcp::Options>),
    /// For all who have the cluster's key, over the RDMA device with that address.
    Verbs(SocketAddr, ClusterKey),
}

impl Listen {
    fn start(&self) -> Result<(Arc<dyn Target>, FabricAddress), TargetError> {
        Ok(match self {
            Self::Shm(path, options) => {
                (Arc::new(ShmTarget::listen(path, options.clone())?), FabricAddress::Shm(path.clone()))
            }
            Self::Tcp(address, key, options) => {
                reached(TcpTarget::listen(*address, key, (**options).clone())?)
            }
            Self::TcpOn(listener, key, options) => {
                let listener = listener
                    .try_clone()
                    .map_err(|source| TargetError::System { what: "cannot listen", source })?;
                reached(TcpTarget::listen_on(listener, key, (**options).clone())?)
            }
            Self::Verbs(address, key) => {
                let verbs = VerbsProvider::installed().ok_or_else(|| TargetError::System {
                    what: "cannot open an RDMA device",
                    source: io::Error::new(io::ErrorKind::Unsupported, WITHOUT_VERBS),
                })?;
                let (target, address) = (verbs.listen)(*address, key)?;
                (target, FabricAddress::Verbs(address))
            }
        })
    }
}

impl Listen {
    /// What whoever connects must prove to have.
    const fn key(&self) -> Option<&ClusterKey> {
        match self {
            Self::Shm(..) => None,
            Self::Tcp(_, key, _) | Self::TcpOn(_, key, _) | Self::Verbs(_, key) => Some(key),
        }
    }
}

fn reached(target: TcpTarget) -> (Arc<dyn Target>, FabricAddress) {
    let reach = FabricAddress::Tcp(target.address());
    (Arc::new(target), reach)
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
            .field("metrics", &self.metrics)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}

impl NodeOptions {
    /// A node with the usual lease and limits.
    #[must_use]
    pub fn new(id: u16, memory_bytes: u64, listen: Listen, connect: Connect) -> Self {
        let memory_bytes_max = memory_bytes;
        Self {
            id,
            memory_bytes,
            memory_bytes_max,
            keep_free_bytes: None,
            listen,
            advertise: None,
            connect,
            lease_ttl: LEASE_TTL,
            metrics: None,
            keep: None,
        }
    }
}

/// What a node tells when it serves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// Its record in the directory.
    pub record: NodeRecord,
}

/// Serve until the end is asked for. `ready` is called once, when the node is in the directory and can be used.
/// A directory that fails later on is connected to again and again; the memory is served all the while.
///
/// # Errors
/// If the node cannot begin to serve.
pub fn serve(
    options: &NodeOptions,
    shutdown: &Shutdown,
    ready: impl FnOnce(&Ready),
) -> Result<(), NodeError> {
    if options.memory_bytes > options.memory_bytes_max {
        let (bytes, bytes_max) = (options.memory_bytes, options.memory_bytes_max);
        return Err(NodeMemoryError::AboveMax { bytes, bytes_max }.into());
    }
    let is_pinned = matches!(options.listen, Listen::Verbs(..));
    if is_pinned && (options.memory_bytes_max != options.memory_bytes || options.keep_free_bytes.is_some()) {
        return Err(NodeError::Pinned { fabric: "verbs" });
    }
    let listener = options.metrics.as_ref().map(MetricsListener::bind).transpose()?;
    let (kept, before) = match &options.keep {
        Some(keep) => {
            let (kept, before) = Kept::open(keep, options.id)?;
            (Some(Arc::new(kept)), before)
        }
        None => (None, None),
    };
    // Found out before there is anything to be undone.
    let lent_bytes = if before.is_some() { None } else { Some(begin_with(options)?) };
    // Connected first: without a directory nobody would ever find the memory.
    let directory = (options.connect)()?;
    let (target, reach) = options.listen.start().map_err(NodeError::Listen)?;
    let (before, epochs) = match before {
        Some(Before { memory, key, epoch, epochs }) => (Some((memory, key, epoch)), epochs),
        None => (None, Epochs::new().map_err(NodeError::Epochs)?),
    };
    let epochs = Arc::new(epochs);
    // Before there is anything to be reached: who is shut out must not get at what was kept.
    let newcomer = Newcomer::new(directory, options.lease_ttl, Arc::clone(&epochs), &*target)?;
    let own = Own { reach: reach.clone(), key: options.listen.key().cloned() };
    let reach = match options.advertise {
        Some(address) => reach.at(address),
        None => reach,
    };
    let node = NodeId(options.id);
    let again = before.and_then(|(memory, key, epoch)| {
        if let Some(kept) = &kept {
            // First: whoever opens it after us must know of our peers, too.
            kept.keep(&memory, key, &epochs, &*target, epoch);
        }
        NodeMemory::reopen(&*target, node, memory, key)
            .inspect_err(|error| tracing::error!(node = options.id, %error, "what was in it is lost"))
            .map(|node_memory| (node_memory, epoch))
            .ok()
    });
    let is_again = again.is_some();
    let (node_memory, epoch) = match again {
        Some(again) => again,
        None => {
            let lent_bytes = lent_bytes.map_or_else(|| begin_with(options), Ok)?;
            let lent_bytes = lent_bytes / SECTION_BYTES * SECTION_BYTES;
            let node_memory =
                NodeMemory::create_resizable(&*target, node, lent_bytes, options.memory_bytes_max)?;
            let epoch = newcomer.epoch();
            if let Some(kept) = &kept {
                kept.keep(&node_memory.memory, node_memory.region.key, &epochs, &*target, epoch);
            }
            (node_memory, epoch)
        }
    };
    let memory_bytes_max = node_memory.layout.data_bytes();
    let lent_bytes = node_memory.lent_bytes();
    let wanted_bytes = (options.memory_bytes / SECTION_BYTES * SECTION_BYTES).min(memory_bytes_max);
    let grace = options.keep.as_ref().map_or(Duration::ZERO, |keep| keep.grace);
    let record = NodeRecord {
        id: options.id,
        fabric: reach.provider().to_owned(),
        address: reach.address(),
        memory_bytes: lent_bytes,
        memory_bytes_max,
        requested_memory_bytes: wanted_bytes,
        resize_blocker: None,
        kept_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
        epoch,
    };
    let lending = Arc::new(Lending::new(lent_bytes, wanted_bytes));
    let mut member = newcomer.join(record, Arc::clone(&lending))?;
    // What was wished of this life before counts from the beginning.
    let heard = member.learn_wanted().map_err(NodeError::from).inspect_err(|_| member.go());
    heard?;
    if is_again {
        tracing::info!(node = options.id, bytes = lent_bytes, "goes on with the memory that was kept");
    } else {
        tracing::info!(node = options.id, bytes = lent_bytes, "memory is lent");
    }
    let cleared_bytes = Arc::clone(&member.events().cleared_bytes);
    let clearer = Clearer::new(node_memory.clone(), Arc::clone(&target), cleared_bytes);
    let resizer = Resizer::new(
        node_memory.clone(),
        Arc::clone(&target),
        Arc::clone(&lending),
        is_pinned,
        options.keep_free_bytes,
        !is_again,
    );
    let unsure = if is_again { 0..node_memory.layout.sections() } else { 0..0 };
    let caretaker = Caretaker::start(OwnPool::new(own, node, unsure), clearer, resizer, kept.clone())
        .map_err(NodeError::Caretaker)
        .inspect_err(|_| give_up(&member, kept.as_deref()))?;
    let figures = |listener| {
        metrics::serve(
            listener,
            node_memory.clone(),
            Arc::clone(&target),
            lending,
            Arc::clone(member.events()),
        )
    };
    let served = listener.map(figures).transpose();
    let _metrics = served.inspect_err(|_| give_up(&member, kept.as_deref()))?;
    ready(&Ready { record: member.record().clone() });
    while !shutdown.is_requested() {
        let Err(error) = member.watch(&*target, shutdown) else {
            break;
        };
        tracing::warn!(node = options.id, %error, "lost the directory; trying again");
        if shutdown.wait(options.lease_ttl / 10) {
            break;
        }
        match (options.connect)() {
            Ok(directory) => member.reconnected(directory),
            Err(error) => {
                tracing::warn!(node = options.id, %error, "the directory is still out of reach")
            }
        }
    }
    let Some(kept) = kept else {
        member.leave();
        return Ok(());
    };
    // It lends nothing more meanwhile.
    drop(caretaker);
    if node_memory.lent_bytes() > 0 {
        member.go();
    } else {
        // Nobody can be about to take any of it.
        kept.forget();
        member.leave();
    }
    Ok(())
}

/// The node ends. What is kept may come back.
fn give_up(member: &Member, kept: Option<&Kept>) {
    match kept {
        Some(_) => member.go(),
        None => member.leave(),
    }
}

/// What a node lends at first: what it was told, or, if it looks after its machine, what there is of it.
fn begin_with(options: &NodeOptions) -> Result<u64, NodeError> {
    let available = available_bytes().map_err(NodeError::Unknown)?;
    match options.keep_free_bytes {
        Some(keep_free) => Ok(options.memory_bytes.min(affordable_bytes(0, available, keep_free))),
        None if options.memory_bytes > available => {
            Err(NodeError::NoMemory { asked: options.memory_bytes, available })
        }
        None => Ok(options.memory_bytes),
    }
}
