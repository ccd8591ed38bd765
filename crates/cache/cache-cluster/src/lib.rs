//! Servers of [`aquifer_cache`] that are one cache: any server answers for any key, and partitions
//! move between servers under full load (RaMP, section 5).
//!
//! - [`records`]: which servers there are and which has a partition, in the directory. [`lease`]:
//!   how long a server may serve.
//! - [`wire`] and [`channel`]: what servers ask each other. [`memories`] and [`copying`]: how the
//!   memory of a partition gets to another server.
//! - `member`: what the threads of a server share. `giving`, `receiving`: the two sides of a
//!   hand-over, whose decisions are those of [`aquifer_ownership`].
//! - `watching`: follows the directory, and claims partitions that no server has.
//! - `keeping`: partitions that outlive a server, because the machine's keeper holds them.
//! - [`placement`]: which server is to have a partition. `balancing`: has them moved.

#![forbid(unsafe_code)]

mod balancing;
pub mod channel;
pub mod copying;
mod giving;
#[cfg(test)]
mod golden_tests;
pub mod keeping;
pub mod lease;
mod load;
pub mod lost;
mod member;
pub mod memories;
mod peers;
pub mod placement;
mod receiving;
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
use self::member::{Member, seats};
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
    /// The key that all servers hold.
    pub key: ClusterKey,
    /// Whether this server requires that its traffic with others is encrypted.
    pub encrypt: bool,
    /// Where other servers reach this one, with port 0 for any.
    pub listen: SocketAddr,
    /// The address at which they do, if it is another one.
    pub advertise: Option<IpAddr>,
    /// The path of the socket for servers of this machine.
    pub memory_socket: PathBuf,
    /// The socket of the machine's keeper. It holds what this server cannot give to others when it
    /// ends, for the next one.
    pub keeper: Option<PathBuf>,
    /// Time for which partitions of a server whose lease has ended are left to it: if the directory
    /// was away, or the server was stopped for a moment, it joins again with its items.
    pub return_time: Duration,
    /// What loses messages, in tests.
    pub interference: Option<Arc<dyn Interference>>,
}

/// Why a server of the cluster cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It cannot join.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The system refuses.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The memory of partitions cannot be offered.
    #[error("the memory of partitions cannot be offered: {0}")]
    Memory(#[from] TargetError),
}

/// The partitions of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClusterCounts {
    /// Partitions that are here.
    pub here: usize,
    /// Partitions that were given to other servers.
    pub given: u64,
    /// Partitions that were received from other servers.
    pub received: u64,
}

/// A server of the cluster that runs.
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
    /// Starts a server and joins the cache. The server gets partitions soon.
    ///
    /// # Errors
    /// If it cannot join, or the system refuses.
    pub fn start(mut options: ServerOptions, cluster: ClusterOptions) -> Result<Self, StartError> {
        let system = |what| move |source| StartError::System { what, source };
        let registry = Registry::new(Arc::clone(&cluster.directory), &cluster.name);
        let StoreOptions { partitions, has_cas, limit, .. } = options.store;
        let id = random_id().map_err(system("no random numbers"))?;
        let hash_secret = HashSecret::random().map_err(system("no random numbers"))?;
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
            seats: seats(partitions, own.life()),
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
        let for_settling = Arc::clone(&member);
        let threads = vec![
            spawn("cache-watch", Box::new(move || watcher.run()))?,
            spawn("cache-peers", Box::new(move || peers::serve(&for_peers, &listener)))?,
            spawn("cache-settle", Box::new(move || for_settling.settle_all()))?,
            spawn("cache-balance", Box::new(move || for_balance.balance()))?,
        ];
        let keeper = cluster.keeper.map(|keeper| (keeper, settings.id));
        Ok(Self { server, member, address, threads, keeper })
    }

    /// What other threads of the process use of the server.
    #[must_use]
    pub fn handle(&self) -> ServerHandle {
        self.server.handle()
    }

    /// The number of the server.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.member.life().host
    }

    /// Where other servers reach it.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Partitions that are on this server, those that were given to others, and those that were
    /// received from others.
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

    /// Gives all partitions to other servers, as far as there are such and as it is possible within
    /// this time. Returns how many are left.
    pub fn drain(&self, time: Duration) -> usize {
        self.member.give_all(time)
    }

    /// Ends the server. Partitions that it still has begin anew on other servers, or go on here if
    /// there are none and a keeper runs.
    pub fn stop(self) {
        self.member.stops.store(true, Ordering::Release);
        // The thread that accepts looks at the flag when it has accepted.
        let _awake = TcpStream::connect(self.address);
        for thread in self.threads {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a thread of the cluster has panicked");
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

/// A random number other than 0.
fn random_id() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes).max(1))
}
