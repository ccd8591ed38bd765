//! Starts servers, and connects them with each other.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use aquifer_cache::commands::Protocol;
use aquifer_cache::server::peers::{Connector, PeerSocket};
use aquifer_cache::server::{Listener, ListenerAddress, Server, ServerHandle, ServerOptions, WorkerHandle};
use aquifer_cache::store::StoreOptions;
use aquifer_cache::store::hash::{HashSecret, KeyHasher};
use aquifer_cache::store::presence::Place;
use aquifer_tests_support::eventually::eventually;

pub const PARTITIONS: usize = 16;

/// The timeout of each wait of a test.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A network of servers of this process, connected by socket pairs.
#[derive(Debug, Default)]
pub struct Network {
    pub servers: Mutex<Vec<OnceLock<ServerHandle>>>,
    /// Whether bytes to servers are delayed until this is false.
    pub is_stalled: Arc<AtomicBool>,
    /// Whether the lease of the first server has ended.
    pub is_fenced: AtomicBool,
}

/// A connection between two servers; returns the sockets of its ends.
fn relay(is_stalled: &Arc<AtomicBool>) -> (UnixStream, UnixStream) {
    let ((near, from), (to, far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
    for (mut from, mut to, is_stalled) in
        [(from, to, Arc::clone(is_stalled)), (back.0, back.1, Arc::default())]
    {
        std::thread::spawn(move || {
            let mut bytes = [0; 64 << 10];
            while let Ok(len @ 1..) = from.read(&mut bytes) {
                eventually("the network to deliver", || (!is_stalled.load(Ordering::SeqCst)).then_some(()));
                if to.write_all(&bytes[..len]).is_err() {
                    break;
                }
            }
            let _closed = to.shutdown(Shutdown::Both);
        });
    }
    (near, far)
}

impl Network {
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>) {
        let servers = self.servers.lock().unwrap();
        let Some(target) = servers.get(usize::from(server)).and_then(OnceLock::get) else {
            worker.deal_link(server, None);
            return;
        };
        let (near, far) = relay(&self.is_stalled);
        let socket = |stream: UnixStream| {
            stream.set_nonblocking(true).unwrap();
            PeerSocket { socket: OwnedFd::from(stream), cipher: None }
        };
        target.workers()[0].deal_peer(socket(far));
        worker.deal_link(server, Some(socket(near)));
    }
}

/// The connector of one of the servers.
#[derive(Debug)]
struct Node {
    network: Arc<Network>,
    number: usize,
}

impl Connector for Node {
    fn connect(&self, server: u16, worker: Arc<WorkerHandle>) {
        self.network.connect(server, worker);
    }

    fn may_serve(&self) -> bool {
        self.number != 0 || !self.network.is_fenced.load(Ordering::SeqCst)
    }
}

const SECRET: HashSecret = HashSecret([1, 2]);

/// Servers of a cluster: partition `p` is on server `p % count`.
pub struct Servers(pub Vec<Server>, pub Arc<Network>);

impl Servers {
    pub fn start(count: usize) -> Self {
        Self::start_with(count, TEST_TIMEOUT)
    }

    pub fn start_with(count: usize, partition_timeout: Duration) -> Self {
        let network = Arc::new(Network::default());
        let servers: Vec<Server> = (0..count)
            .map(|number| {
                let listener = Listener::tcp((Ipv4Addr::LOCALHOST, 0).into(), 64).unwrap();
                let connector = Arc::new(Node { network: Arc::clone(&network), number });
                Server::start(options(listener, connector, partition_timeout)).unwrap()
            })
            .collect();
        let all = servers.iter().map(|server| server.handle().into()).collect();
        *network.servers.lock().unwrap() = all;
        for (number, server) in servers.iter().enumerate() {
            for partition in 0..PARTITIONS {
                let owner = partition % count;
                let store = server.handle();
                if owner == number {
                    store.store().begin_empty(partition, 1);
                } else {
                    store
                        .store()
                        .learn(partition, Place { server: u16::try_from(owner).unwrap(), generation: 1 });
                }
            }
        }
        Self(servers, network)
    }

    pub fn connect(&self, server: usize) -> Client {
        let ListenerAddress::Tcp(address) = self.0[server].addresses()[0] else { unreachable!() };
        Client::connect(address)
    }

    pub fn stop(self) {
        self.0.into_iter().for_each(Server::stop);
    }
}

fn options(listener: Listener, connector: Arc<Node>, partition_timeout: Duration) -> ServerOptions {
    ServerOptions {
        listeners: vec![listener],
        store: StoreOptions {
            limit: 64 << 20,
            partitions: PARTITIONS,
            threads: 2,
            has_cas: true,
            pool: 0,
            evicts: true,
            hasher: KeyHasher::new(SECRET),
        },
        memory_file: None,
        kept: BTreeMap::new(),
        connections_max: 64,
        item_size_max: 1 << 20,
        requests_per_turn: 0,
        idle_timeout_s: 0,
        tokens: None,
        tls: None,
        protocol: None::<Protocol>,
        flush_is_enabled: true,
        dump_is_enabled: true,
        shutdown_is_enabled: false,
        verbosity: 0,
        pool: None,
        pool_wait: TEST_TIMEOUT,
        partition_timeout,
        connector: Some(connector),
        version: "test",
    }
}

pub struct Client(pub BufReader<TcpStream>);

impl Client {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn send(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// Reads `expected.len()` bytes, and asserts that they are `expected`.
    pub fn expect(&mut self, expected: &str) {
        let mut got = vec![0; expected.len()];
        self.0.read_exact(&mut got).unwrap();
        assert_eq!(String::from_utf8_lossy(&got), expected);
    }

    pub fn ask(&mut self, request: &str, expected: &str) {
        self.send(request);
        self.expect(expected);
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }
}

pub fn partition_of(key: &str) -> usize {
    let hash = KeyHasher::new(SECRET).hash(key.as_bytes());
    usize::try_from(((hash >> 32) * PARTITIONS as u64) >> 32).unwrap()
}

/// The first key with a number of at least `from` whose partition is on this one of two servers.
pub fn key_on(server: usize, from: usize) -> String {
    (from..).map(|key| format!("key{key}")).find(|key| partition_of(key) % 2 == server).unwrap()
}
