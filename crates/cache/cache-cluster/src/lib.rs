//! Servers of [`aquifer_cache`] that are one cache: any server answers for any key, and partitions
//! move between servers under full load (RaMP, section 5).
//!
//! - [`records`]: the servers and the owners of partitions, in the directory. [`lease`]: the time
//!   until which a server may serve.
//! - [`wire`] and [`channel`]: messages between servers. [`memories`] and [`copying`]: the copy of
//!   a partition's memory to another server.
//! - `member`: state that the threads of a server share. `handover_source`, `handover_target`: the
//!   two sides of a hand-over, whose decisions are those of [`aquifer_ownership`].
//! - `watching`: follows the directory. [`lost`]: partitions that no server owns, which `watching`
//!   claims.
//! - [`keeping`]: partitions that outlive a server, because the machine's keeper holds them.
//! - [`placement`]: plans the owners of partitions. `balancing`: moves them.

#![forbid(unsafe_code)]

mod balancing;
pub mod channel;
pub mod copying;
#[cfg(test)]
mod golden_tests;
mod handover_source;
mod handover_target;
pub mod keeping;
pub mod lease;
mod load;
pub mod lost;
mod member;
pub mod memories;
mod peers;
pub mod placement;
pub mod records;
mod watching;
pub mod wire;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_cache::server::{Server, ServerHandle, ServerOptions};
use aquifer_cache::store::StoreOptions;
use aquifer_cache::store::hash::{HashSecret, KeyHasher};
use aquifer_directory::Directory;
use aquifer_fabric::{ClusterKey, TargetError};
use parking_lot::RwLock;

use self::channel::{Access, Channels, Interference};
use self::keeping::{Kept, Records};
use self::lease::{KeptLease, ServingDeadline};
use self::load::Loads;
use self::lost::LostPartitions;
use self::member::{Member, slots};
use self::memories::Memories;
use self::peers::PeerConnector;
use self::records::{CacheSettings, JoinError, Registry, ServerRecord};
use self::watching::Watcher;

/// Options of a server of the cluster.
#[derive(Debug)]
pub struct ClusterOptions {
    /// The name of the cache.
    pub name: String,
    /// The directory.
    pub directory: Arc<dyn Directory>,
    /// The cluster key, which all servers hold.
    pub key: ClusterKey,
    /// Whether this server requires that its traffic with others is encrypted.
    pub encrypt: bool,
    /// Address on which this server listens for other servers; port 0 stands for any.
    pub listen: SocketAddr,
    /// Address by which other servers connect to this one, if it differs from that of `listen`.
    pub advertise: Option<IpAddr>,
    /// Path of the socket at which servers of this machine read the memory of partitions that move.
    pub memory_socket: PathBuf,
    /// Socket of the machine's keeper. When this server stops, the keeper holds the partitions that
    /// were not handed over, for the next server.
    pub keeper: Option<PathBuf>,
    /// Time after the end of a server's lease for which others do not claim its partitions. If the
    /// directory was unavailable or the server was suspended, it joins again with its items.
    pub return_time: Duration,
    /// Fault injection, in tests.
    pub interference: Option<Arc<dyn Interference>>,
}

/// Why a server of the cluster cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The server cannot join the cache.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The memory of partitions cannot be offered.
    #[error("the memory of partitions cannot be offered: {0}")]
    Memory(#[from] TargetError),
}

/// Counts of a server's partitions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClusterCounts {
    /// Partitions that are here.
    pub here: usize,
    /// Partitions that were handed over to other servers.
    pub given: u64,
    /// Partitions that were received from other servers.
    pub received: u64,
}

/// A running server of the cluster.
#[derive(Debug)]
pub struct ClusterServer {
    server: Server,
    member: Arc<Member>,
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
    /// The keeper's socket, and the identity of the cache.
    keeper: Option<(PathBuf, u64)>,
}

impl ClusterServer {
    /// Starts a server and joins the cache. The server claims or receives partitions later, in its
    /// threads.
    ///
    /// # Errors
    /// [`StartError`], for each of its causes.
    pub fn start(mut options: ServerOptions, cluster: ClusterOptions) -> Result<Self, StartError> {
        let system = |what| move |source| StartError::System { what, source };
        let registry = Registry::new(Arc::clone(&cluster.directory), &cluster.name);
        let StoreOptions { partitions, has_cas, limit, .. } = options.store;
        let id = random_id().map_err(system("cannot get random numbers"))?;
        let hash_secret = HashSecret::random().map_err(system("cannot get random numbers"))?;
        let settings = registry.join(&CacheSettings { partitions, has_cas, id, hash_secret })?;
        options.store.hasher = KeyHasher::new(settings.hash_secret);
        let listener =
            TcpListener::bind(cluster.listen).map_err(system("cannot listen for other servers"))?;
        let address = listener.local_addr().map_err(system("cannot listen for other servers"))?;
        let for_memory = TcpListener::bind(SocketAddr::new(cluster.listen.ip(), 0))
            .map_err(system("cannot listen for other servers"))?;
        let memories = Memories::listen(for_memory, &cluster.memory_socket, &cluster.key, cluster.encrypt)?;
        let serving_deadline = Arc::new(ServingDeadline::passed());
        let connector = Arc::new(PeerConnector::new(Arc::clone(&serving_deadline)));
        options.connector = Some(Arc::clone(&connector) as _);
        let restored = cluster.keeper.as_deref().and_then(|keeper| Kept::restore(keeper, settings.id));
        let kept = restored.map(|(kept, memories)| {
            options.kept = memories;
            kept
        });
        let clients = options.listeners.iter().map(|listener| listener.address().to_string()).collect();
        let server = Server::start(options).map_err(system("cannot serve"))?;
        let at = |address: SocketAddr| match cluster.advertise {
            Some(ip) => SocketAddr::new(ip, address.port()),
            None => address,
        };
        let (machine, memory_socket) = memories.local();
        let own = ServerRecord {
            server: 0,
            epoch: 0,
            address: at(address),
            memory_address: at(memories.address()),
            machine,
            memory_socket,
            clients,
            memory_bytes: limit,
            drains: false,
        };
        let lease = KeptLease::grant(&cluster.directory, &serving_deadline)
            .map_err(|source| JoinError::Directory { name: cluster.name.clone(), source })?;
        let own = registry.add_server(&own, lease.lease())?;
        let access = Access { cache: cluster.name, key: cluster.key, encrypt: cluster.encrypt };
        let member = Arc::new(Member {
            server: OnceLock::from(server.handle()),
            registry,
            channels: Channels::new(access, cluster.interference),
            memories,
            serving_deadline,
            slots: slots(partitions, own.life()),
            servers: RwLock::new(BTreeMap::from([(own.server, own.clone())])),
            own: RwLock::new(own),
            loads: Loads::new(partitions),
            drains: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            attempts: AtomicU64::new(0),
            given: AtomicU64::new(0),
            received: AtomicU64::new(0),
        });
        connector.set_member(&member);
        if let Some(kept) = kept {
            member.resume(&kept.records);
            kept.release();
        }
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(run);
            spawned.map_err(system("cannot start a thread"))
        };
        let watcher = Watcher {
            member: Arc::clone(&member),
            lease,
            lost: LostPartitions::new(cluster.return_time),
            lives: BTreeMap::new(),
            kept: Records::new(),
        };
        let (for_peers, for_balance) = (Arc::clone(&member), Arc::clone(&member));
        let for_resolving = Arc::clone(&member);
        let threads = vec![
            spawn("cache-watch", Box::new(move || watcher.run()))?,
            spawn("cache-peers", Box::new(move || peers::serve(&for_peers, &listener)))?,
            spawn("cache-resolve", Box::new(move || for_resolving.resolve_all()))?,
            spawn("cache-balance", Box::new(move || for_balance.balance()))?,
        ];
        let keeper = cluster.keeper.map(|keeper| (keeper, settings.id));
        Ok(Self { server, member, address, threads, keeper })
    }

    /// A handle by which other threads of the process use the server.
    #[must_use]
    pub fn handle(&self) -> ServerHandle {
        self.server.handle()
    }

    /// The number of the server.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.member.life().host
    }

    /// The address on which the server listens for other servers.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Counts of the partitions that are here, handed over, and received.
    #[must_use]
    pub fn partitions(&self) -> ClusterCounts {
        let member = Arc::clone(&self.member);
        let here = member.server().store().partitions().iter().filter(|items| items.is_here()).count();
        ClusterCounts {
            here,
            given: member.given.load(Ordering::Relaxed),
            received: member.received.load(Ordering::Relaxed),
        }
    }

    /// Hands partitions over to other servers until none is left, no other server can have them, or
    /// `timeout` has passed. Returns how many are left.
    pub fn drain(&self, timeout: Duration) -> usize {
        self.member.drain_partitions(timeout)
    }

    /// Stops the server. If a keeper runs, it holds the memory of the partitions that are left, for
    /// the next server of this machine. Partitions that another server claims before begin without
    /// items.
    pub fn stop(self) {
        self.member.stops.store(true, Ordering::Release);
        // Wakes the thread that accepts connections: it checks the flag for each connection.
        let _awake = TcpStream::connect(self.address);
        for thread in self.threads {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a thread of the cache cluster panicked");
            }
        }
        let records = self.keeper.as_ref().and_then(|_| self.member.records_at_end());
        let (Some((keeper, cache)), Some(records)) = (self.keeper, records) else {
            return self.server.stop();
        };
        let partitions: Vec<usize> = records.keys().copied().collect();
        let memories = self.server.stop_and_keep(&partitions);
        keeping::hold(&keeper, cache, memories, &records);
    }
}

/// Returns a random number other than 0.
fn random_id() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes).max(1))
}
