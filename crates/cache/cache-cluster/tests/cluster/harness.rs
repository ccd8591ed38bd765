//! A cluster of servers in this process, and requests to them.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_cache::server::{Listener, ListenerAddress, ServerOptions};
use aquifer_cache::store::StoreOptions;
use aquifer_cache::store::hash::{HashSecret, KeyHasher};
use aquifer_cache_cluster::channel::{Access, ask_at};
use aquifer_cache_cluster::wire::{Answer, Ask, ServerStatus};
use aquifer_cache_cluster::{ClusterOptions, ClusterServer};
use aquifer_directory::Directory;
use aquifer_directory::embedded::EmbeddedDirectory;
use aquifer_fabric::ClusterKey;
use aquifer_tests_support::eventually::eventually;

use crate::faults::{Faults, FaultyDirectory};
use tempfile::TempDir;

/// Partitions of the cache.
pub const PARTITIONS: usize = 16;
/// Read timeout of a client's connection.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// Options of the servers of a test.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Whether partitions move over shared memory, or over TCP.
    pub is_local: bool,
    /// Whether forwarded requests are encrypted.
    pub encrypt: bool,
    /// Bytes of memory of each server.
    pub limit: u64,
    /// Whether items are evicted.
    pub evicts: bool,
}

impl Default for Kind {
    fn default() -> Self {
        Self { is_local: true, encrypt: false, limit: 64 << 20, evicts: true }
    }
}

/// The servers of a cache.
pub struct Cluster {
    /// The servers, in the order of their starts.
    pub servers: Vec<ClusterServer>,
    pub directory: Arc<dyn Directory>,
    folder: TempDir,
    count: usize,
    /// Loses messages and answers of the directory.
    faults: Option<Arc<Faults>>,
    /// [`ClusterOptions::return_time`] of servers that are added from now on.
    pub return_time: Duration,
    /// Time for which requests wait for partitions, for servers that are added from now on.
    pub partition_timeout: Duration,
    /// The keeper of the machine, for servers that are added from now on.
    pub keeper: Option<PathBuf>,
}

impl Cluster {
    pub fn start(kind: Kind, servers: usize) -> Self {
        Self::start_with(kind, servers, None)
    }

    /// Starts servers that lose messages.
    pub fn start_with(kind: Kind, servers: usize, faults: Option<Arc<Faults>>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let directory = EmbeddedDirectory::open(&folder.path().join("directory")).unwrap();
        let directory: Arc<dyn Directory> = match &faults {
            Some(faults) => Arc::new(FaultyDirectory { inner: directory, faults: Arc::clone(faults) }),
            None => Arc::new(directory),
        };
        let mut cluster = Self {
            servers: Vec::new(),
            directory,
            folder,
            count: 0,
            faults,
            return_time: Duration::ZERO,
            partition_timeout: Duration::from_secs(60),
            keeper: None,
        };
        for _ in 0..servers {
            cluster.add(kind);
        }
        cluster.wait_until("all partitions have a server", |cluster| {
            servers == 0 || cluster.owners().iter().all(Option::is_some)
        });
        cluster
    }

    /// The folder of the cluster.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts another server.
    pub fn add(&mut self, kind: Kind) {
        self.count += 1;
        let memory_socket = if kind.is_local {
            self.folder.path().join(format!("{}.sock", self.count))
        } else {
            PathBuf::from("/proc/no-such-folder/memory.sock")
        };
        let cluster = ClusterOptions {
            name: "test".to_owned(),
            directory: Arc::clone(&self.directory),
            key: ClusterKey([7; 32]),
            encrypt: kind.encrypt,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            memory_socket,
            keeper: self.keeper.clone(),
            return_time: self.return_time,
            interference: self.faults.clone().map(|faults| faults as _),
        };
        self.servers.push(ClusterServer::start(options(kind, self.partition_timeout), cluster).unwrap());
    }

    pub fn clients(&self, server: usize) -> SocketAddr {
        let handle = self.servers[server].handle();
        match handle.addresses()[0] {
            ListenerAddress::Tcp(address) => address,
            ListenerAddress::Unix(_) => unreachable!(),
        }
    }

    pub fn connect(&self, server: usize) -> TcpStream {
        let stream = TcpStream::connect(self.clients(server)).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub fn ask(&self, server: usize, ask: &Ask) -> Answer {
        ask_server(self.servers[server].address(), ask)
    }

    pub fn status(&self, server: usize) -> ServerStatus {
        match self.ask(server, &Ask::Status) {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// Moves a partition.
    ///
    /// # Errors
    /// Why the server declined.
    pub fn move_to(&self, partition: usize, from: usize, to: usize) -> Result<(), String> {
        let to = self.servers[to].number();
        match self.ask(from, &Ask::Move { partition, to }) {
            Answer::Done => Ok(()),
            Answer::Declined(why) => Err(why),
            other => panic!("{other:?}"),
        }
    }

    /// The owner of each partition; `None` if no server or several have it.
    pub fn owners(&self) -> Vec<Option<usize>> {
        let mut owners = vec![Vec::new(); PARTITIONS];
        for server in 0..self.servers.len() {
            for partition in self.status(server).partitions {
                owners[partition.partition].push(server);
            }
        }
        owners.into_iter().map(|owners| if let [owner] = owners[..] { Some(owner) } else { None }).collect()
    }

    pub fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        eventually(what, || is_so(self).then_some(()));
    }

    pub fn stop(self) {
        self.servers.into_iter().for_each(ClusterServer::stop);
    }
}

/// Sends a request to the server at an address.
pub fn ask_server(address: SocketAddr, ask: &Ask) -> Answer {
    let access = Access { cache: "test".to_owned(), key: ClusterKey([7; 32]), encrypt: false };
    ask_at(address, &access, ask).unwrap()
}

fn options(kind: Kind, partition_timeout: Duration) -> ServerOptions {
    ServerOptions {
        listeners: vec![Listener::tcp((Ipv4Addr::LOCALHOST, 0).into(), 64).unwrap()],
        store: StoreOptions {
            limit: kind.limit,
            partitions: PARTITIONS,
            threads: 2,
            has_cas: true,
            pool: 0,
            evicts: kind.evicts,
            hasher: KeyHasher::new(HashSecret([1, 2])),
        },
        memory_file: None,
        kept: BTreeMap::new(),
        connections_max: 256,
        item_size_max: 1 << 20,
        requests_per_turn: 0,
        idle_timeout_s: 0,
        tokens: None,
        tls: None,
        protocol: None,
        flush_is_enabled: true,
        dump_is_enabled: true,
        shutdown_is_enabled: false,
        verbosity: 0,
        pool: None,
        pool_wait: Duration::from_secs(60),
        partition_timeout,
        connector: None,
        version: "test",
    }
}
