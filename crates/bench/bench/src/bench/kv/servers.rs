//! The servers: services of heaps, redis and memcached, on free ports of this machine.

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::{Cluster, aquifer_program};
use aquifer_bench::support::{folder, interrupt, procs};
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_kv::KvStore;
use aquifer_objects::access::request_access;
use aquifer_objects::client::{HeapClient, HeapRoute};
use tempfile::TempDir;

use super::cached::Memcached;
use super::stores::{self, AquiferStore, ComparedStore, MemcachedStore, RedisStore};
use super::tls::Certificate;
use crate::bench::apps::find_program;
use crate::bench::apps::resp::Client;

const HEAP_BYTES: u64 = 1 << 30;
/// The node whose service does not encrypt.
const PLAIN_NODE: u16 = 2;
/// Time within which a server must accept connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A process that is killed when dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(program: &Path, arguments: &[String], folder: &Path, port: u16) -> Result<Self, BenchError> {
        let log = folder.join(format!("{port}.log"));
        let output = File::create(&log).map_err(BenchError::io("create", &log))?;
        let error = output.try_clone().map_err(BenchError::io("open", &log))?;
        let child = Command::new(program)
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(error)
            .spawn()
            .map_err(BenchError::io("start", program))?;
        Ok(Self { child, port })
    }

    fn connect(&mut self, program: &str) -> Result<TcpStream, BenchError> {
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let stream = wait_for(|| TcpStream::connect(address).ok()).ok_or_else(|| BenchError::Server {
            program: program.into(),
            reason: "the server does not answer".into(),
        })?;
        stream.set_nodelay(true).map_err(BenchError::io("set up", Path::new(program)))?;
        Ok(stream)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for<T>(mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        let reached = attempt();
        if reached.is_some() || began.elapsed() > START_TIMEOUT || interrupt::is_requested() {
            return reached;
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// All servers.
pub struct Servers {
    // Declared before the cluster, so that it is dropped before the directory that it uses.
    _plain: Server,
    plain_pid: u32,
    cluster: Cluster,
    folder: TempDir,
    certificate: Certificate,
    memcached: Option<PathBuf>,
    redis: Option<PathBuf>,
}

impl Servers {
    /// Starts the services of heaps.
    ///
    /// # Errors
    /// If a service cannot be started.
    pub fn start() -> Result<Self, BenchError> {
        let cluster = Cluster::up_with_heaps(64 << 20, HEAP_BYTES)?;
        let folder = folder::temporary()?;
        let port = free_port()?;
        let state = cluster.state().display().to_string();
        let (node, memory) = (PLAIN_NODE.to_string(), HEAP_BYTES.to_string());
        let arguments = [
            "--state",
            &state,
            "heap-service",
            "--id",
            &node,
            "--memory",
            &memory,
            "--own-memory",
            "--encrypt=false",
            "--listen",
            &format!("127.0.0.1:{port}"),
        ];
        let plain = Server::start(&aquifer_program()?, &arguments.map(String::from), folder.path(), port)?;
        let certificate = Certificate::make(folder.path())?;
        let (memcached, redis) = (find_program("memcached"), find_program("redis-server"));
        let plain_pid = plain.child.id();
        Ok(Self { _plain: plain, plain_pid, cluster, folder, certificate, memcached, redis })
    }

    /// The peers that are not installed.
    pub fn missing(&self) -> impl Iterator<Item = &'static str> {
        let peers = [("memcached", self.memcached.is_none()), ("redis", self.redis.is_none())];
        peers.into_iter().filter(|(_, is_missing)| *is_missing).map(|(name, _)| name)
    }

    /// Connections to all stores, each without keys.
    ///
    /// # Errors
    /// If a store cannot be used.
    pub fn stores(&self) -> Result<Vec<Box<dyn ComparedStore>>, BenchError> {
        let mut stores: Vec<Box<dyn ComparedStore>> = Vec::new();
        let agent = self.cluster.state().join("agent.sock");
        let shared = HeapClient::connect_at(agent.clone(), Some(1)).map_err(heap_error)?;
        let remote = HeapClient::connect_remotely(agent.clone(), Some(1)).map_err(heap_error)?;
        let plain = self.connect_plain(agent)?;
        let service = self.service_pid()?;
        for (name, client, service) in [
            (stores::SHARED, shared, service),
            (stores::TCP, remote, service),
            (stores::PLAIN, plain, self.plain_pid),
        ] {
            stores.push(Box::new(AquiferStore { name, store: new_store(client, name)?, service }));
        }
        if let Some(program) = &self.memcached {
            self.add_memcached(program, &mut stores)?;
        }
        if let Some(program) = &self.redis {
            self.add_redis(program, &mut stores)?;
        }
        Ok(stores)
    }

    fn service_pid(&self) -> Result<u32, BenchError> {
        let is_service = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            words.any(|word| word == b"heap-service") && *pid != self.plain_pid
        };
        let pids = procs::with_argument(self.cluster.state());
        pids.into_iter().find(is_service).ok_or_else(|| heap_error("the service of the heap has ended"))
    }

    fn connect_plain(&self, agent: PathBuf) -> Result<HeapClient, BenchError> {
        let options = ConnectOptions { encrypt: false, ..ConnectOptions::default() };
        let connect = move || {
            let (access, _) = request_access(&agent, Some(PLAIN_NODE))?;
            access.connect_with(options.clone()).map(HeapRoute::Remote)
        };
        wait_for(|| HeapClient::connect_by(Box::new(connect.clone())).ok())
            .ok_or_else(|| heap_error("the plain service does not answer"))
    }

    fn add_memcached(
        &self,
        program: &Path,
        stores: &mut Vec<Box<dyn ComparedStore>>,
    ) -> Result<(), BenchError> {
        let user = ["-u", "daemon"].map(String::from);
        for (name, is_encrypted) in [(stores::MEMCACHED, false), (stores::MEMCACHED_TLS, true)] {
            let port = free_port()?;
            let mut arguments: Vec<String> =
                ["-l", "127.0.0.1", "-m", "1024", "-p", &port.to_string()].map(String::from).to_vec();
            if rustix::process::geteuid().is_root() {
                arguments.extend(user.clone());
            }
            if is_encrypted {
                let (key, chain) = (self.certificate.key.display(), self.certificate.certificate.display());
                arguments.extend(["-Z".into(), "-o".into(), format!("ssl_chain_cert={chain},ssl_key={key}")]);
                arguments.extend(["-o".into(), "ssl_min_version=3".into()]);
            }
            let mut server = Server::start(program, &arguments, self.folder.path(), port)?;
            let (stream, pid) = (server.connect(name)?, server.child.id());
            stores.push(if is_encrypted {
                let client = Memcached::over(self.certificate.connect(stream)?);
                Box::new(Served { store: MemcachedStore { name, client, server: pid }, _server: server })
            } else {
                let client = Memcached::over(stream);
                Box::new(Served { store: MemcachedStore { name, client, server: pid }, _server: server })
            });
        }
        Ok(())
    }

    fn add_redis(&self, program: &Path, stores: &mut Vec<Box<dyn ComparedStore>>) -> Result<(), BenchError> {
        for (name, is_encrypted) in [(stores::REDIS, false), (stores::REDIS_TLS, true)] {
            let port = free_port()?;
            let number = port.to_string();
            let mut arguments =
                ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"].map(String::from).to_vec();
            if is_encrypted {
                let (key, chain) = (self.certificate.key.display(), self.certificate.certificate.display());
                let tls = ["--port", "0", "--tls-port", &number, "--tls-auth-clients", "no"];
                arguments.extend(tls.map(String::from));
                arguments.extend(["--tls-key-file".into(), key.to_string()]);
                arguments.extend(["--tls-cert-file".into(), chain.to_string()]);
                arguments.extend(["--tls-ca-cert-file".into(), chain.to_string()]);
            } else {
                arguments.extend(["--port", &number].map(String::from));
            }
            let mut server = Server::start(program, &arguments, self.folder.path(), port)?;
            let (stream, pid) = (server.connect(name)?, server.child.id());
            stores.push(if is_encrypted {
                let client = Client::over(self.certificate.connect(stream)?);
                Box::new(Served { store: RedisStore { name, client, server: pid }, _server: server })
            } else {
                let client = Client::over(stream);
                Box::new(Served { store: RedisStore { name, client, server: pid }, _server: server })
            });
        }
        Ok(())
    }
}

/// A store, and the process of its server.
struct Served<W> {
    store: W,
    _server: Server,
}

impl<W: ComparedStore> ComparedStore for Served<W> {
    fn name(&self) -> &'static str {
        self.store.name()
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), BenchError> {
        self.store.put(key, value)
    }

    fn get(&mut self, key: &[u8], out: &mut Vec<u8>) -> Result<bool, BenchError> {
        self.store.get(key, out)
    }

    fn get_many(&mut self, keys: &[&[u8]], found: stores::Found<'_>) -> Result<(), BenchError> {
        self.store.get_many(keys, found)
    }

    fn server_cpu_ns(&self) -> u64 {
        self.store.server_cpu_ns()
    }
}

/// Replaces the store of this name by one without keys.
fn new_store(mut client: HeapClient, name: &str) -> Result<KvStore<HeapClient>, BenchError> {
    let opened = KvStore::create(&mut client, name, 100_000);
    if let Err(aquifer_kv::KvError::Exists) = opened {
        return KvStore::open(client, name).map_err(heap_error);
    }
    opened.map_err(heap_error)?;
    KvStore::open(client, name).map_err(heap_error)
}

fn free_port() -> Result<u16, BenchError> {
    let listener = TcpListener::bind("127.0.0.1:0");
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(BenchError::io("find a port at", Path::new("127.0.0.1")))
}

fn heap_error(error: impl std::fmt::Display) -> BenchError {
    BenchError::Heap { reason: error.to_string() }
}
