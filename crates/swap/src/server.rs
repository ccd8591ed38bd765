//! The server of one run's swap device, in a process of its own: it owns the cgroup, the volume, the loop device, and undoes them when no
//! program is left in the cgroup. To `aquifer run --swap` it is what the agent is to other runs.
//!
//! What goes wrong with the device ends the programs of the cgroup, and nobody else.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_block::VOLUME_BYTES_MAX;
use aquifer_block::fuse::{FILE, FuseServer};
use aquifer_block::{BlockVolume, Mover, Pump, PumpThread};
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{receive_frame, send_frame};
use aquifer_directory::Directory;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{Identity, Tenant};
use aquifer_host::audit::Audits;
use aquifer_host::lent::{BorrowError, borrow};
use aquifer_host::membership::{Membership, MembershipError};
use aquifer_host::nodes::Nodes;
use aquifer_host::report::{LatencyUs, RunStatistics};
use aquifer_ipc::Frame;
use aquifer_ipc::size::ByteSize;
use aquifer_pager::{Budget, Connector, LIMIT_BYTES_MIN, Mempool, PAGE_BYTES};
use aquifer_pool::PoolClient;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::AgentWatch;
use crate::protect::{ProtectError, protect};
use crate::setup::cgroup::Cgroup;
use crate::setup::record::Record;
use crate::setup::want::Want;
use crate::setup::{SetupError, loop_device, mount};

/// How often to look around.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// A write waits so long for room, at most.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);
/// After its program's end the run waits so long for others that the program has left behind.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// The device has this many times the limit, unless something else is asked for.
const SIZE_PER_LIMIT: u64 = 8;
/// It has no more than this many times what the pool has free. Once: the pool would not be full before the device. Twice: while it is less
/// than half full the kernel leaves on it what it has read back, and need not write it again.
const SIZE_PER_FREE: u64 = 2;
/// Less makes no swap device.
const SIZE_BYTES_MIN: u64 = 1 << 20;

/// Why there is no swap device.
#[derive(Debug, thiserror::Error)]
enum SwapError {
    #[error(
        "a limit of {limit_bytes} bytes is too small for any program: give at least {LIMIT_BYTES_MIN} (--local 8M)"
    )]
    TooSmall { limit_bytes: u64 },
    #[error("a swap device of {0} is not between {min} and {max}: choose another --swap-size", min = ByteSize(SIZE_BYTES_MIN), max = ByteSize(VOLUME_BYTES_MAX))]
    Size(ByteSize),
    #[error(
        "the pool is full: {0} are free on all memory nodes together. Give the pool more memory (aquifer up --memory)"
    )]
    Full(ByteSize),
    #[error(
        "the cluster has no memory node: start one (aquifer node), or start the cluster anew (aquifer up)"
    )]
    NoNodes,
    #[error("the cluster's key cannot be used: {0}")]
    Key(String),
    #[error(transparent)]
    Borrow(#[from] BorrowError),
    #[error(transparent)]
    Directory(DirectoryError),
    #[error(transparent)]
    Membership(#[from] MembershipError),
    #[error(transparent)]
    Protect(#[from] ProtectError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error("no memory for the swap device: {0}")]
    Memory(#[from] aquifer_pager::TableError),
    #[error("the swap device cannot be served (is there FUSE, /dev/fuse?): {0}")]
    Serve(#[from] io::Error),
}

/// What a swap device is to be.
#[derive(Clone, Debug)]
pub struct SwapOptions {
    /// The program's name, for people.
    pub name: String,
    /// The run's limit.
    pub limit_bytes: u64,
    /// The device's size, if not the default.
    pub size_bytes: Option<u64>,
    /// The socket of this machine's agent.
    pub agent_socket: PathBuf,
    /// The folder in which the device's file is mounted.
    pub folder: PathBuf,
}

/// Why the directory cannot be reached: a sentence.
pub type DirectoryError = Box<dyn std::error::Error + Send + Sync>;

/// Serves a swap device for the run at the other end of `run`, until its programs have ended. `connect` makes of the agent's
/// description of the directory a connection to it.
///
/// # Errors
/// If the run cannot be told whether there is a device. A device that cannot be made is reported to the run, and a failure.
pub fn serve(
    run: OwnedFd,
    options: &SwapOptions,
    connect: impl FnOnce(&str) -> Result<Arc<dyn Directory>, DirectoryError>,
) -> io::Result<ExitCode> {
    match Server::start(options, connect) {
        Ok(server) => {
            let opened = Frame::SwapOpened(server.record.name().to_owned());
            let procs = server.cgroup.procs().map_err(io::Error::other)?;
            send_frame(&run, &opened, &[procs.as_fd()])?;
            drop(procs);
            server.attend(run);
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            tracing::error!(%error, "no swap device");
            send_frame(&run, &Frame::Refused(error.to_string()), &[])?;
            Ok(ExitCode::FAILURE)
        }
    }
}

/// A swap device that is in use.
struct Server {
    name: String,
    limit_bytes: u64,
    volume: Arc<BlockVolume>,
    pump: PumpThread,
    front: JoinHandle<io::Result<()>>,
    cgroup: Cgroup,
    record: Record,
    /// Extents are this host's: a number of its own, which ends with the device.
    membership: Membership,
    audits: Audits,
    agent: AgentWatch,
    want: Want,
}

impl Server {
    fn start(
        options: &SwapOptions,
        connect: impl FnOnce(&str) -> Result<Arc<dyn Directory>, DirectoryError>,
    ) -> Result<Self, SwapError> {
        if options.limit_bytes < LIMIT_BYTES_MIN {
            return Err(SwapError::TooSmall { limit_bytes: options.limit_bytes });
        }
        protect()?;
        let path = options.agent_socket.clone();
        let (socket, lent) = borrow(&path)?;
        let name = format!("swap of {}", options.name);
        let directory = connect(&lent.directory).map_err(SwapError::Directory)?;
        let mut membership =
            Membership::join(Arc::clone(&directory), Path::new(&name), None, Duration::ZERO)?;
        let tenant = Tenant(rustix::process::geteuid().as_raw());
        let identity = Identity { host: membership.host(), epoch: membership.epoch(), tenant };
        let connect = ConnectOptions { encrypt: lent.encrypt, ..ConnectOptions::default() };
        let nodes = Nodes::new(directory, identity, lent.key().map_err(SwapError::Key)?, connect);
        membership.watch_nodes(&nodes)?;
        if nodes.at_least(1).is_err() {
            return Err(SwapError::NoNodes);
        }
        let mut pool = nodes.pool(tenant.0);
        let bytes = device_bytes(options, free_bytes(&mut pool))?;
        let budget = Arc::new(Budget::new(options.limit_bytes));
        // As for other runs, the share of the mempool comes out of the limit.
        let resident_bytes = budget.resident_max() * PAGE_BYTES as u64;
        let share_bytes = usize::try_from(options.limit_bytes - resident_bytes).map_err(io::Error::other)?;
        let mempool = Arc::new(Mempool::new(share_bytes)?);
        let connector: Arc<dyn Connector> = nodes.of(tenant.0);
        let volume = BlockVolume::new(bytes, mempool, budget, WRITE_PATIENCE)?;
        // From here on an early return drops the record, and that undoes what it holds.
        let mut record = Record::create()?;
        let cgroup = Cgroup::create(&mut record, resident_bytes, bytes)?;
        cgroup.set_waits_in_want(true)?;
        let folder = mount::create(&mut record, &options.folder)?;
        let front = start_front(&volume, &connector, &folder)?;
        let mover = Mover::new(Arc::clone(&volume), Arc::clone(&connector))?;
        let pump = PumpThread::start(Pump::new(Arc::clone(&volume), connector, pool, seed()?), mover)?;
        let audits = Audits::start(nodes, tenant, false)?;
        loop_device::swap_on(&mut record, &folder.join(FILE), bytes)?;
        tracing::info!(name = options.name, bytes, record = record.name(), "swap is on");
        Ok(Self {
            name: options.name.clone(),
            limit_bytes: options.limit_bytes,
            volume,
            pump,
            front,
            cgroup,
            record,
            membership,
            audits,
            agent: AgentWatch::new(path, socket),
            want: Want::default(),
        })
    }

    /// Attend to the run until nobody is left in its cgroup; then undo everything.
    fn attend(mut self, run: OwnedFd) {
        let mut run = Some(run);
        let mut closing = None;
        let mut is_ended = false;
        loop {
            self.wait(run.as_ref());
            self.tell_news(run.as_ref());
            self.heed_want();
            if let Some(reason) = self.agent.look().or_else(|| self.failure()).filter(|_| !is_ended) {
                is_ended = true;
                self.end(run.as_ref(), &reason);
            }
            if closing.is_none() && run.as_ref().is_some_and(is_readable) {
                if !matches!(run.as_ref().map(receive_frame), Some(Ok((Frame::CloseRun, _)))) {
                    // Whoever started the run is gone; its programs go on until they end.
                    run = None;
                }
                closing = Some(Instant::now());
            }
            let Some(since) = closing else { continue };
            if self.is_empty() {
                break;
            }
            if since.elapsed() > CLOSE_PATIENCE && run.is_some() {
                // Programs in the background stay under their limit until they end. Nobody waits for that.
                let run = run.take();
                self.last_words().iter().for_each(|word| tell(run.as_ref(), word));
            }
        }
        self.finish(run.as_ref());
    }

    fn wait(&self, run: Option<&OwnedFd>) {
        let mut polled: Vec<_> = run
            .into_iter()
            .chain(self.agent.socket())
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        // Any outcome means: look.
        let _ = poll(&mut polled, Some(&TICK));
    }

    fn heed_want(&mut self) {
        if let Err(error) = self.want.heed(&self.cgroup) {
            tracing::error!(%error, "programs in want of memory may wait for ever");
        }
    }

    fn is_empty(&self) -> bool {
        self.cgroup.is_empty().unwrap_or_else(|error| {
            tracing::error!(%error, "the cgroup cannot be looked at: it is taken for empty");
            true
        })
    }

    /// What the run cannot go on without.
    fn failure(&self) -> Option<String> {
        if self.membership.is_lost() {
            return Some("the lease of its swap device has ended, and the memory nodes refuse it".into());
        }
        if let Some(reason) = self.volume.last_refusal() {
            // The kernel keeps a page that it cannot write, so the program would do little but try.
            return Some(format!(
                "{reason}. Give the pool more memory (aquifer up --memory), or the program a larger --local"
            ));
        }
        // The file is unmounted only when no program is left.
        self.front.is_finished().then(|| "its swap device has failed: nobody serves it any more".into())
    }

    fn tell_news(&self, run: Option<&OwnedFd>) {
        for news in self.volume.drain_messages() {
            tell(run, &Frame::Notice(format!("{}: {news}", self.name)));
        }
    }

    /// End all programs of the run, and say why.
    fn end(&self, run: Option<&OwnedFd>, reason: &str) {
        tracing::error!(reason, "the run is ended");
        tell(run, &Frame::Ended(reason.to_owned()));
        if let Err(error) = self.cgroup.kill_all() {
            tracing::error!(%error, "some programs would not end");
        }
    }

    /// What the run hears last.
    fn last_words(&self) -> Vec<Frame> {
        let mut words = Vec::new();
        if self.cgroup.usage().is_ok_and(|usage| usage.oom_kills > 0) {
            words.push(Frame::Ended(format!(
                "it needed more memory than its limit and its swap device of {} have, and the kernel killed it: give it a larger \
                 --local or --swap-size",
                ByteSize(self.volume.bytes())
            )));
        }
        let statistics = serde_json::to_string(&self.statistics()).expect("figures can be written");
        words.push(Frame::Statistics(statistics));
        words
    }

    /// Undo everything and give all memory back, and only then let the run end.
    fn finish(mut self, run: Option<&OwnedFd>) {
        self.tell_news(run);
        let last_words = self.last_words();
        if let Err(error) = self.record.undo() {
            tracing::error!(%error, "something of the swap device is left");
            tell(run, &Frame::Notice(format!("something of the swap device is left: {error}")));
        }
        if let Ok(Err(error)) = self.front.join() {
            tracing::debug!(%error, "the file was unmounted while it was in use");
        }
        self.pump.stop();
        drop(self.audits);
        self.membership.leave();
        last_words.iter().for_each(|word| tell(run, word));
    }

    fn statistics(&self) -> RunStatistics {
        let usage = self.cgroup.usage().unwrap_or_default();
        let figures = self.volume.stats();
        let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
        let [p50, p99, p999] = figures.read_latency_ns.map(us);
        RunStatistics {
            name: self.name.clone(),
            tenant: rustix::process::geteuid().as_raw(),
            limit_bytes: self.limit_bytes,
            replicas: 1,
            degraded_slabs: 0,
            copied_slabs: 0,
            repaired_pages: 0,
            vacated_slabs: figures.vacated_slabs,
            repacked_pages: figures.repacked_pages,
            unchanged_pages: 0,
            processes: 0,
            programs: Vec::new(),
            faults: usage.major_faults,
            zero_pages: figures.zero_pages,
            mempool_hits: figures.mempool_hits,
            staging_hits: figures.staging_hits,
            remote_reads: figures.remote_reads,
            remote_read_trips: figures.remote_read_trips,
            prefetched: 0,
            remote_writes: figures.remote_writes,
            remote_write_trips: figures.remote_write_trips,
            evictions: figures.written_pages,
            lost_pages: figures.lost_pages,
            resident_bytes: usage.anonymous_bytes,
            resident_peak_bytes: usage.memory_peak_bytes,
            mempool_bytes: figures.mempool_bytes,
            remote_bytes: figures.remote_bytes,
            remote_peak_bytes: figures.remote_peak_bytes,
            fault_latency_us: LatencyUs { p50, p99, p999 },
        }
    }
}

fn start_front(
    volume: &Arc<BlockVolume>,
    connector: &Arc<dyn Connector>,
    folder: &Path,
) -> Result<JoinHandle<io::Result<()>>, SwapError> {
    let front = FuseServer::mount(Arc::clone(volume), connector, folder)?;
    Ok(std::thread::Builder::new().name("front".into()).spawn(move || front.serve())?)
}

fn device_bytes(options: &SwapOptions, free_bytes: u64) -> Result<u64, SwapError> {
    let (by_limit, by_pool) =
        (options.limit_bytes.saturating_mul(SIZE_PER_LIMIT), free_bytes * SIZE_PER_FREE);
    let wanted = options.size_bytes.unwrap_or(by_limit.min(by_pool).min(VOLUME_BYTES_MAX));
    let bytes = wanted / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if (SIZE_BYTES_MIN..=VOLUME_BYTES_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    Err(match options.size_bytes {
        None if bytes < SIZE_BYTES_MIN => SwapError::Full(ByteSize(free_bytes)),
        _ => SwapError::Size(ByteSize(wanted)),
    })
}

fn free_bytes(pool: &mut PoolClient) -> u64 {
    let nodes: Vec<_> = pool.nodes().collect();
    let free = nodes.into_iter().map(|node| match pool.refresh(node) {
        Ok(()) => pool.free_bytes(node),
        Err(error) => {
            tracing::warn!(node = node.0, %error, "a memory node does not tell what it has free");
            0
        }
    });
    free.sum()
}

/// Spreads devices over the nodes.
fn seed() -> io::Result<u64> {
    let mut seed = [0; 8];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(seed))
}

pub(crate) fn is_readable(socket: &OwnedFd) -> bool {
    wait_readable(&[socket], Duration::ZERO).unwrap_or(false)
}

/// Tell the run, if it still listens.
fn tell(run: Option<&OwnedFd>, frame: &Frame) {
    if let Some(run) = run
        && let Err(error) = send_frame(run, frame, &[])
    {
        tracing::debug!(%error, "the run does not listen any more");
    }
}
