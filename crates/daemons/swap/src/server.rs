//! The server of one run's swap device.
//!
//! The server is a process of its own. It owns the cgroup, the volume and the loop device, and
//! removes them when no program is left in the cgroup. `aquifer run --swap` connects to it as other
//! runs do to the agent. A failure of the device ends the programs of the cgroup and no others.

mod limit;
mod statistics;

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
use aquifer_faults::serve::MORE_MEMORY_ADVICE;
use aquifer_host::cluster_access::{ClusterAccess, ClusterAccessError, MalformedKey, request_cluster_access};
use aquifer_host::leak_scan::LeakScanner;
use aquifer_host::membership::{Membership, MembershipError};
use aquifer_host::nodes::{AfterFence, EndpointPurpose, NodeRegistry};
use aquifer_ipc::Frame;
use aquifer_ipc::size::ByteSize;
use aquifer_pager::{Budget, Connector, LIMIT_BYTES_MIN, Mempool, MoveRate, PAGE_BYTES};
use aquifer_pool::PoolClient;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent_watch::{AgentRequest, AgentWatch};
use crate::protect::{ProtectError, protect};
use crate::setup::cgroup::Cgroup;
use crate::setup::oom_wait::OomWait;
use crate::setup::record::SetupRecord;
use crate::setup::{SetupError, loop_device, mount};
use limit::DeviceLimit;
use statistics::Reports;

/// Longest time between two turns of the main loop.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Timeout of a write to the device that waits for room in the mempool.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a run waits for programs in the background after the end of its program.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Default size of the device as a multiple of the run's limit.
const SIZE_PER_LIMIT: u64 = 8;
/// Largest default size of the device as a multiple of the pool's free memory. While the device is
/// less than half full, the kernel keeps the copies of pages that it has read back, and need not
/// write these pages again. With 2, that lasts until the pool is full.
const SIZE_PER_FREE: u64 = 2;
/// Smallest size of a device.
const SIZE_BYTES_MIN: u64 = 1 << 20;

/// Why a swap device cannot be set up.
#[derive(Debug, thiserror::Error)]
enum SwapError {
    #[error(
        "a limit of {limit_bytes} bytes is too small for any program: give at least {LIMIT_BYTES_MIN} \
         (--local 8M)"
    )]
    TooSmall { limit_bytes: u64 },
    #[error(
        "a swap device of {0} is not between {min} and {max}: choose another --swap-size",
        min = ByteSize(SIZE_BYTES_MIN),
        max = ByteSize(VOLUME_BYTES_MAX)
    )]
    Size(ByteSize),
    #[error("the pool is full: {0} are free on all memory nodes together; {MORE_MEMORY_ADVICE}")]
    Full(ByteSize),
    #[error(
        "the cluster has no memory node: start the nodes that have stopped (aquifer up), or another one \
         (aquifer node --id NUMBER --memory SIZE)"
    )]
    NoNodes,
    #[error(transparent)]
    Key(#[from] MalformedKey),
    #[error(transparent)]
    Access(#[from] ClusterAccessError),
    #[error(transparent)]
    Directory(DirectoryConnectError),
    #[error(transparent)]
    Membership(#[from] MembershipError),
    #[error(transparent)]
    Protect(#[from] ProtectError),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error("no memory for the swap device: {0}")]
    Memory(#[from] aquifer_pager::TableError),
    #[error("the swap device cannot be served: {0}; check that FUSE is available (/dev/fuse)")]
    Serve(#[from] io::Error),
}

/// Options of a swap device.
#[derive(Clone, Debug)]
pub struct SwapDeviceOptions {
    /// The program's name, for messages.
    pub name: String,
    /// The run's limit of resident memory.
    pub limit_bytes: u64,
    /// The device's size; `None` for the default.
    pub size_bytes: Option<u64>,
    /// The socket of this machine's agent.
    pub agent_socket: PathBuf,
    /// The folder below which the device's file is mounted.
    pub folder: PathBuf,
}

/// Why the directory cannot be reached.
pub type DirectoryConnectError = Box<dyn std::error::Error + Send + Sync>;

/// Serves a swap device for the run at the other end of `run`, until its programs have ended.
/// `connect` connects to the directory that the agent describes.
///
/// A device that cannot be set up is reported to the run, and the exit code is a failure.
///
/// # Errors
/// If the run cannot be notified.
pub fn serve(
    run: OwnedFd,
    options: &SwapDeviceOptions,
    connect: impl FnOnce(&str) -> Result<Arc<dyn Directory>, DirectoryConnectError>,
) -> io::Result<ExitCode> {
    match DeviceServer::start(options, connect) {
        Ok(server) => {
            let opened = Frame::SwapOpened(server.record.name().to_owned());
            let procs = server.cgroup.procs().map_err(io::Error::other)?;
            send_frame(&run, &opened, &[procs.as_fd()])?;
            drop(procs);
            server.run(run);
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            tracing::error!(name = options.name, %error, "setting up the swap device failed");
            send_frame(&run, &Frame::Refused(error.to_string()), &[])?;
            Ok(ExitCode::FAILURE)
        }
    }
}

/// A swap device in use.
struct DeviceServer {
    name: String,
    limit: DeviceLimit,
    volume: Arc<BlockVolume>,
    pump: PumpThread,
    front: JoinHandle<io::Result<()>>,
    cgroup: Arc<Cgroup>,
    record: SetupRecord,
    /// The membership of the server, a host of its own. Its number and extents end with the device.
    membership: Membership,
    leak_scanner: LeakScanner,
    agent: AgentWatch,
    reports: Reports,
    oom_wait: OomWait,
}

impl DeviceServer {
    fn start(
        options: &SwapDeviceOptions,
        connect: impl FnOnce(&str) -> Result<Arc<dyn Directory>, DirectoryConnectError>,
    ) -> Result<Self, SwapError> {
        if options.limit_bytes < LIMIT_BYTES_MIN {
            return Err(SwapError::TooSmall { limit_bytes: options.limit_bytes });
        }
        protect()?;
        let path = options.agent_socket.clone();
        let (socket, access) = request_cluster_access(&path)?;
        let (membership, nodes, tenant) = join_cluster(options, connect, &access)?;
        let mut pool = nodes.pool_client(tenant.0);
        let bytes = device_bytes(options, free_bytes(&mut pool))?;
        let budget = Arc::new(Budget::new(options.limit_bytes));
        // The share of the mempool counts against the limit, as in other runs.
        let resident_bytes = budget.resident_max() * PAGE_BYTES as u64;
        let share_bytes = usize::try_from(options.limit_bytes - resident_bytes).map_err(io::Error::other)?;
        let mempool = Arc::new(Mempool::new(share_bytes)?);
        let connector: Arc<dyn Connector> = nodes.connector(tenant.0, EndpointPurpose::Write);
        let volume = BlockVolume::new(bytes, mempool, budget, WRITE_TIMEOUT)?;
        // Any early return after this drops the record, which undoes its steps.
        let mut record = SetupRecord::create()?;
        let cgroup = Arc::new(Cgroup::create(&mut record, resident_bytes, bytes)?);
        cgroup.set_oom_waits(true)?;
        let folder = mount::create(&mut record, &options.folder)?;
        let front = start_front(&volume, &connector, &folder)?;
        let mover = Mover::new(Arc::clone(&volume), Arc::clone(&connector))?;
        let mut pump = Pump::new(Arc::clone(&volume), connector, pool, seed()?);
        pump.set_move_rate(&Arc::new(MoveRate::of_this_host()));
        let known = Arc::clone(&nodes);
        let pump = PumpThread::start(pump, mover, move || known.list())?;
        let leak_scanner = LeakScanner::start(nodes, tenant, false)?;
        loop_device::swap_on(&mut record, &folder.join(FILE), bytes)?;
        let limit = DeviceLimit::new(options.limit_bytes, resident_bytes, bytes, &cgroup)?;
        tracing::info!(name = options.name, bytes, record = record.name(), "swap device in use");
        Ok(Self {
            name: options.name.clone(),
            limit,
            volume,
            pump,
            front,
            cgroup,
            record,
            membership,
            leak_scanner,
            agent: AgentWatch::new(path, socket, &access),
            reports: Reports::default(),
            oom_wait: OomWait::default(),
        })
    }

    /// Serves until no program is left in the cgroup, and then undoes the setup.
    fn run(mut self, run: OwnedFd) {
        self.reports.set_runner(&run);
        let mut run = Some(run);
        let mut closing_since = None;
        let mut is_ended = false;
        loop {
            self.wait(run.as_ref());
            self.send_notices(run.as_ref());
            self.poll_oom_wait();
            let ended_by_agent = self.poll_agent();
            self.report();
            if let Some(reason) = ended_by_agent.or_else(|| self.failure()).filter(|_| !is_ended) {
                is_ended = true;
                self.end(run.as_ref(), &reason);
            }
            if closing_since.is_none() && run.as_ref().is_some_and(is_readable) {
                if !matches!(run.as_ref().map(receive_frame), Some(Ok((Frame::CloseRun, _)))) {
                    // `aquifer run` was killed.
                    run = None;
                    if !is_ended {
                        is_ended = true;
                        self.end(None, "the process that started it was killed");
                    }
                }
                closing_since = Some(Instant::now());
            }
            let Some(since) = closing_since else { continue };
            if self.is_empty() {
                break;
            }
            if since.elapsed() > CLOSE_TIMEOUT && run.is_some() {
                // Programs in the background stay under their limit until they end. `aquifer run`
                // does not wait for that.
                let run = run.take();
                self.final_frames().iter().for_each(|frame| send(run.as_ref(), frame));
            }
        }
        self.finish(run.as_ref());
    }

    /// Waits for at most a tick for a frame of the run or of the agent.
    fn wait(&self, run: Option<&OwnedFd>) {
        let mut polled: Vec<_> = run
            .into_iter()
            .chain(self.agent.socket())
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        // The outcome is not needed, because the caller checks each socket.
        let _ = poll(&mut polled, Some(&TICK));
    }

    fn poll_oom_wait(&mut self) {
        if let Err(error) = self.oom_wait.poll(&self.cgroup) {
            tracing::error!(%error, "waking programs that wait for memory failed; they may hang");
        }
    }

    /// Handles the agent's request. Returns the reason if the run must end.
    fn poll_agent(&mut self) -> Option<String> {
        match self.agent.poll()? {
            AgentRequest::End(reason) => Some(reason),
            AgentRequest::SetLimit(set) => {
                self.limit.set(set.limit_bytes);
                self.reports.require();
                if let Err(error) = self.oom_wait.reset(&self.cgroup) {
                    tracing::error!(%error, "programs that wait for memory may be killed");
                }
                None
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.cgroup.processes().map(|processes| processes.is_empty()).unwrap_or_else(|error| {
            tracing::error!(%error, "reading the cgroup failed; treating it as empty");
            true
        })
    }

    /// The reason why the run must end, if there is one.
    fn failure(&self) -> Option<String> {
        if self.membership.is_lost() {
            return Some("the lease of its swap device has ended, and the memory nodes refuse it".into());
        }
        if let Some(reason) = self.volume.last_refusal() {
            // The kernel keeps a page that it cannot write, so the program would hardly make
            // progress.
            return Some(format!("{reason}. Run it with a larger --local, {MORE_MEMORY_ADVICE}"));
        }
        // The file stays mounted while programs run, so the front end ends only by a failure.
        self.front.is_finished().then(|| "its swap device has failed: the FUSE server has ended".into())
    }

    fn send_notices(&mut self, run: Option<&OwnedFd>) {
        for message in self.volume.drain_messages().into_iter().chain(self.limit.drain_notice()) {
            send(run, &Frame::Notice(format!("{}: {message}", self.name)));
        }
    }

    /// Kills all programs of the run, and notifies the run of the reason.
    fn end(&self, run: Option<&OwnedFd>, reason: &str) {
        tracing::error!(reason, "ending the run");
        send(run, &Frame::Ended(reason.to_owned()));
        if let Err(error) = self.cgroup.kill_all() {
            tracing::error!(%error, "killing the programs of the run failed");
        }
    }

    /// The last frames that the run gets.
    fn final_frames(&self) -> Vec<Frame> {
        let mut frames = Vec::new();
        if self.cgroup.usage().is_ok_and(|usage| usage.oom_kills > 0) {
            frames.push(Frame::Ended(format!(
                "it needed more memory than its limit and its swap device of {} have, and the kernel killed \
                 it: give it a larger --local or --swap-size",
                ByteSize(self.volume.bytes())
            )));
        }
        let statistics = serde_json::to_string(&self.statistics()).expect("numbers can be written");
        frames.push(Frame::Statistics(statistics));
        frames
    }

    /// Undoes the setup, frees all memory, and then sends the last frames.
    fn finish(mut self, run: Option<&OwnedFd>) {
        self.send_notices(run);
        let final_frames = self.final_frames();
        if let Err(error) = self.record.undo() {
            tracing::error!(record = self.record.name(), %error, "removing the swap device failed");
            send(run, &Frame::Notice(format!("the swap device could not be removed completely: {error}")));
        }
        if let Ok(Err(error)) = self.front.join() {
            tracing::debug!(%error, "the FUSE server ended with an error when the file was unmounted");
        }
        self.pump.stop();
        drop(self.leak_scanner);
        self.membership.leave();
        final_frames.iter().for_each(|frame| send(run, frame));
    }
}

/// Joins the cluster as a host of its own, and finds the memory nodes.
fn join_cluster(
    options: &SwapDeviceOptions,
    connect: impl FnOnce(&str) -> Result<Arc<dyn Directory>, DirectoryConnectError>,
    access: &ClusterAccess,
) -> Result<(Membership, Arc<NodeRegistry>, Tenant), SwapError> {
    let name = format!("swap of {}", options.name);
    let directory = connect(&access.directory).map_err(SwapError::Directory)?;
    let mut membership =
        Membership::join(Arc::clone(&directory), Path::new(&name), None, Duration::ZERO, || {})?;
    let tenant = Tenant(rustix::process::geteuid().as_raw());
    let identity = Identity { host: membership.host(), epoch: membership.epoch(), tenant };
    let connect = ConnectOptions { encrypt: access.encrypt, ..ConnectOptions::default() };
    let nodes = NodeRegistry::new(directory, identity, access.key()?, connect, AfterFence::Fail);
    membership.watch_nodes(&nodes)?;
    if nodes.require(1).is_err() {
        return Err(SwapError::NoNodes);
    }
    Ok((membership, nodes, tenant))
}

/// Mounts the volume's file at `folder`, and serves it in a thread.
fn start_front(
    volume: &Arc<BlockVolume>,
    connector: &Arc<dyn Connector>,
    folder: &Path,
) -> Result<JoinHandle<io::Result<()>>, SwapError> {
    let front = FuseServer::mount(Arc::clone(volume), connector, folder)?;
    Ok(std::thread::Builder::new().name("front".into()).spawn(move || front.serve())?)
}

/// The size of the device, in whole pages.
fn device_bytes(options: &SwapDeviceOptions, free_bytes: u64) -> Result<u64, SwapError> {
    let (by_limit, by_pool) =
        (options.limit_bytes.saturating_mul(SIZE_PER_LIMIT), free_bytes * SIZE_PER_FREE);
    let requested = options.size_bytes.unwrap_or(by_limit.min(by_pool).min(VOLUME_BYTES_MAX));
    let bytes = requested / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    if (SIZE_BYTES_MIN..=VOLUME_BYTES_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    Err(match options.size_bytes {
        None if bytes < SIZE_BYTES_MIN => SwapError::Full(ByteSize(free_bytes)),
        _ => SwapError::Size(ByteSize(requested)),
    })
}

/// The total of the free memory of all nodes, in bytes. Swap devices use no disk nodes.
fn free_bytes(pool: &mut PoolClient) -> u64 {
    let nodes: Vec<_> = pool.nodes().filter(|node| !pool.is_disk(*node)).collect();
    let free = nodes.into_iter().map(|node| match pool.refresh(node) {
        Ok(()) => pool.free_bytes(node),
        Err(error) => {
            tracing::warn!(node = node.0, %error, "reading the free memory of a memory node failed");
            0
        }
    });
    free.sum()
}

/// Returns a random seed, so that devices are spread over the nodes.
fn seed() -> io::Result<u64> {
    let mut seed = [0; 8];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(seed))
}

pub(crate) fn is_readable(socket: &OwnedFd) -> bool {
    wait_readable(&[socket], Duration::ZERO).unwrap_or(false)
}

/// Sends a frame to the run, if `aquifer run` has not ended.
fn send(run: Option<&OwnedFd>, frame: &Frame) {
    if let Some(run) = run
        && let Err(error) = send_frame(run, frame, &[])
    {
        tracing::debug!(%error, "sending to the run failed: it has closed the connection");
    }
}
