//! The server: listening sockets, threads, and their connections.
//!
//! A thread accepts connections and distributes them to worker threads. A worker receives from all
//! of its connections that are ready, executes their requests, and then sends all replies.

mod acceptor;
mod connection;
mod dealing;
mod listeners;
mod memory_file;
mod overflow;
pub mod peers;
mod report;
mod source;
mod stream;
mod tls;
mod worker;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use dealing::WorkerHandle;
pub use listeners::{Listener, ListenerAddress, receive_socket};
pub use overflow::{RemoteError, RemoteMemory, RemoteRead};
pub use tls::{TlsFiles, TlsSettings};

use crate::clock::Clock;
use crate::commands::{Protocol, Service};
use crate::counters::{Counters, Sums};
use crate::store::{Store, StoreOptions};
use crate::tokens::Tokens;
use acceptor::Acceptor;
use aquifer_latency::LatencyHistogram;
use overflow::Overflow;
use peers::{Connector, NoConnector};
use report::Report;
use worker::Worker;

/// Options of a server.
#[derive(Debug)]
pub struct ServerOptions {
    /// Sockets that listen.
    pub listeners: Vec<Listener>,
    /// The options of the store.
    pub store: StoreOptions,
    /// Most connections at a time.
    pub connections_max: usize,
    /// The file in which the items outlive the server, or none.
    pub memory_file: Option<PathBuf>,
    /// Largest item, in bytes as memcached counts them.
    pub item_size_max: usize,
    /// Requests of a connection after which other connections are served; 0 for no limit.
    pub requests_per_turn: usize,
    /// Seconds without a request after which a connection is closed, or 0.
    pub idle_timeout_s: u32,
    /// The tokens of which a client must show one, if clients must authenticate.
    pub tokens: Option<Tokens>,
    /// Certificates, if connections are encrypted.
    pub tls: Option<TlsSettings>,
    /// The protocol of all connections, or none if the first byte of each determines it.
    pub protocol: Option<Protocol>,
    /// Whether clients may flush all items.
    pub flush_is_enabled: bool,
    /// Whether clients may list keys.
    pub dump_is_enabled: bool,
    /// Whether clients may stop the server.
    pub shutdown_is_enabled: bool,
    /// The verbosity of the log, from 0 to 2.
    pub verbosity: u32,
    /// The pool for items that do not fit in memory, if the store's options have one.
    pub pool: Option<Box<dyn RemoteMemory>>,
    /// The time for which a request waits if the pool does not answer. After it, items there are
    /// reported as missing.
    pub pool_wait: Duration,
    /// Memory of partitions that an earlier server has kept, by partition number. Unused with
    /// [`Self::memory_file`].
    pub kept: BTreeMap<usize, OwnedFd>,
    /// The connector to other servers, in a cluster. All partitions are absent at first then.
    pub connector: Option<Arc<dyn Connector>>,
    /// The time after which a request fails if no server may answer for its partition.
    pub partition_timeout: Duration,
    /// The version of the program.
    pub version: &'static str,
}

/// Default time after which a request ends if no server may answer for its partition: a read finds
/// nothing, and a change fails.
pub const PARTITION_TIMEOUT: Duration = Duration::from_millis(100);
/// Default time for which a request waits for a pool that does not answer.
pub const POOL_WAIT: Duration = Duration::from_millis(100);

/// The time for which a stopping server waits for the end of the thread that uses the pool.
const POOL_THREAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which a stopping server checks whether the thread that uses the pool has ended.
const POOL_THREAD_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The state that the threads of a server share.
#[derive(Debug)]
struct Common {
    store: Store,
    clock: Clock,
    /// The time at which the server started. `clock` may continue that of an earlier server.
    started: Instant,
    options: StoreOptions,
    /// Whether the items are in a file, for a later server.
    has_file: bool,
    counters: Box<[Counters]>,
    item_size_max: usize,
    requests_per_turn: usize,
    idle_timeout_s: u32,
    connections_max: usize,
    connections: AtomicU64,
    connections_total: AtomicU64,
    connections_rejected: AtomicU64,
    listeners: Vec<ListenerAddress>,
    backlog: i32,
    tls: Option<TlsSettings>,
    connector: Arc<dyn Connector>,
    partition_timeout: Duration,
    version: &'static str,
    stops: AtomicBool,
}

impl Common {
    /// Latencies of hits that needed no item of the pool.
    fn local_times(&self) -> LatencyHistogram {
        let times = LatencyHistogram::default();
        self.counters.iter().for_each(|counters| times.merge(&counters.local_times));
        times
    }

    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for counters in &self.counters {
            sums.add(counters);
        }
        sums
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    common: Arc<Common>,
    acceptor: JoinHandle<()>,
    wake_acceptor: acceptor::Waker,
    workers: Vec<(Arc<WorkerHandle>, JoinHandle<()>)>,
    overflow: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the threads of a server.
    ///
    /// # Errors
    /// If the system has no memory, descriptors or threads for it.
    ///
    /// # Panics
    /// If the options have no threads or no listeners.
    pub fn start(options: ServerOptions) -> io::Result<Self> {
        let threads = options.store.threads;
        assert!(threads > 0 && !options.listeners.is_empty());
        let mut clock = Clock::start();
        let store = if let Some(path) = &options.memory_file {
            let file = memory_file::open(path, Store::file_bytes(&options.store), options.store.limit)?;
            let (store, seconds) = Store::open(&options.store, file)?;
            clock = seconds.map_or(clock, |(now_s, unix_s)| Clock::resume(now_s, unix_s));
            store
        } else {
            let now_s = clock.now_s();
            Store::with_kept(&options.store, options.kept, now_s, clock.unix_s(now_s))?
        };
        if options.connector.is_some() {
            store.begin_absent();
        }
        let common = Arc::new(Common {
            store,
            clock,
            started: Instant::now(),
            options: options.store,
            has_file: options.memory_file.is_some(),
            counters: (0..threads).map(|_| Counters::new(options.store.partitions)).collect(),
            item_size_max: options.item_size_max,
            requests_per_turn: if options.requests_per_turn == 0 {
                usize::MAX
            } else {
                options.requests_per_turn
            },
            idle_timeout_s: options.idle_timeout_s,
            connections_max: options.connections_max,
            connections: AtomicU64::new(0),
            connections_total: AtomicU64::new(0),
            connections_rejected: AtomicU64::new(0),
            listeners: options.listeners.iter().map(|listener| listener.address().clone()).collect(),
            backlog: options.listeners[0].backlog(),
            tls: options.tls,
            connector: options.connector.unwrap_or_else(|| Arc::new(NoConnector)),
            partition_timeout: options.partition_timeout,
            version: options.version,
            stops: AtomicBool::new(false),
        });
        let handles =
            (0..threads).map(|_| WorkerHandle::new().map(Arc::new)).collect::<io::Result<Vec<_>>>()?;
        let service = Arc::new(Service {
            tokens: options.tokens,
            protocol: options.protocol,
            flush_is_enabled: options.flush_is_enabled,
            dump_is_enabled: options.dump_is_enabled,
            shutdown_is_enabled: options.shutdown_is_enabled,
            verbosity: AtomicU32::new(options.verbosity),
            report: Box::new(Report::new(Arc::clone(&common), handles.clone())),
        });
        let mut workers = Vec::new();
        for (thread, handle) in handles.iter().enumerate() {
            let worker = Worker::new(thread, Arc::clone(handle), Arc::clone(&common), Arc::clone(&service))?;
            workers.push((Arc::clone(handle), spawn(&format!("cache-{thread}"), move || worker.run())?));
        }
        common.store.pool().set_wait(options.pool_wait);
        let overflow = options.pool.map(|memory| {
            let overflow = Overflow::new(memory, Arc::clone(&common), handles.clone(), options.store.pool);
            spawn("cache-pool", move || overflow.run())
        });
        let overflow = overflow.transpose()?;
        let acceptor = Acceptor::new(options.listeners, handles, Arc::clone(&common), service)?;
        let wake_acceptor = acceptor.waker();
        let acceptor = spawn("cache-accept", move || acceptor.run())?;
        Ok(Self { common, acceptor, wake_acceptor, workers, overflow })
    }

    /// A handle for other threads of the process.
    #[must_use]
    pub fn handle(&self) -> ServerHandle {
        let workers = self.workers.iter().map(|(handle, _)| Arc::clone(handle)).collect();
        ServerHandle { common: Arc::clone(&self.common), workers }
    }

    /// The addresses of the server's listeners.
    #[must_use]
    pub fn addresses(&self) -> &[ListenerAddress] {
        &self.common.listeners
    }

    /// Closes all connections and ends the threads. Completes the file of the items, if there is
    /// one.
    pub fn stop(self) {
        if let Some(common) = self.end()
            && common.has_file
        {
            let now_s = common.clock.now_s();
            common.store.complete(&common.options, now_s, common.clock.unix_s(now_s));
        }
    }

    /// Stops like [`Self::stop`], and completes partitions for a later server with the same
    /// options. Returns their memory by partition number.
    #[must_use]
    pub fn stop_and_keep(self, partitions: &[usize]) -> BTreeMap<usize, OwnedFd> {
        let Some(common) = self.end() else { return BTreeMap::new() };
        let now_s = common.clock.now_s();
        let unix_s = common.clock.unix_s(now_s);
        let keep = |partition: &usize| {
            let kept = common.store.keep(&common.options, *partition, now_s, unix_s);
            let kept = kept.inspect_err(|error| tracing::warn!(%error, partition, "cannot keep a partition"));
            Some((*partition, kept.ok()??))
        };
        partitions.iter().filter_map(keep).collect()
    }

    /// Closes all connections and ends the threads. `None` if a thread has panicked.
    fn end(self) -> Option<Arc<Common>> {
        self.common.stops.store(true, Ordering::SeqCst);
        self.wake_acceptor.wake();
        for (handle, _) in &self.workers {
            handle.wake();
        }
        self.common.store.pool().stop();
        let threads = self.workers.into_iter().map(|(_, thread)| thread).chain([self.acceptor]);
        // The thread may wait for the agent in a read of the pool. It ends with the process then.
        let deadline = Instant::now() + POOL_THREAD_TIMEOUT;
        let overflow = self.overflow;
        while overflow.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(POOL_THREAD_POLL_INTERVAL);
        }
        let threads = threads.chain(overflow.filter(JoinHandle::is_finished));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the cache server has panicked");
                return None;
            }
        }
        Some(self.common)
    }
}

/// A handle of a server for other threads of the process.
#[derive(Clone, Debug)]
pub struct ServerHandle {
    common: Arc<Common>,
    workers: Arc<[Arc<WorkerHandle>]>,
}

impl ServerHandle {
    /// The items.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.common.store
    }

    /// The current second of the server's clock.
    #[must_use]
    pub fn now_s(&self) -> u32 {
        self.common.clock.now_s()
    }

    /// Sums of the counters since the server started.
    #[must_use]
    pub fn sums(&self) -> Sums {
        self.common.sums()
    }

    /// Latencies of hits that needed no item of the pool: from the start to the end of the turn in
    /// which the request is read. Empty without a pool.
    #[must_use]
    pub fn local_times(&self) -> LatencyHistogram {
        self.common.local_times()
    }

    /// The number of open connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.common.connections.load(Ordering::Relaxed)
    }

    /// The number of requests for each partition.
    #[must_use]
    pub fn partition_requests(&self) -> Vec<u64> {
        let sums = |partition| self.common.counters.iter().map(|counters| counters.requests(partition)).sum();
        (0..self.common.store.partitions().len()).map(sums).collect()
    }

    /// The threads that serve connections.
    #[must_use]
    pub fn workers(&self) -> &[Arc<WorkerHandle>] {
        &self.workers
    }

    /// Wakes the workers, which retry requests that wait for partitions.
    pub fn wake(&self) {
        self.workers.iter().for_each(|worker| worker.wake());
    }

    /// The addresses of the server's listeners.
    #[must_use]
    pub fn addresses(&self) -> &[ListenerAddress] {
        &self.common.listeners
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}

/// The other end of a connection, for statistics.
#[derive(Clone, Debug)]
pub enum Peer {
    /// A peer of another machine, or of this machine over TCP.
    Tcp(SocketAddr),
    /// A peer of this machine, at the Unix socket with this path.
    Unix(PathBuf),
}
