//! Connections of programs, of `aquifer run` and of other commands, each with a thread.
//!
//! The gateway has accepted the connections, and has received the first packet of each.
//!
//! Every user of the host may connect to the shared socket. Only a user's own runs are visible to
//! it; all runs are visible to root and to the agent's own user.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_channel::peer::{PeerCredentials, PeerProcess};
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{receive_frame, send_frame};
use aquifer_directory::FailureLog;
use aquifer_extents::SessionService;
use aquifer_faults::serve::{OpenRunError, PagingService, Run, RunOwner};
use aquifer_gateway::{Introduction, ListenerKind, UserChannel};
use aquifer_host::cluster_access::ClusterAccess;
use aquifer_host::nodes::NodeRegistry;
use aquifer_ipc::size::ByteSize;
use aquifer_ipc::{Frame, OpenRun, SetLimit};
use aquifer_pager::{Backup, REPLICAS_MAX};
use aquifer_report::RunStatistics;
use aquifer_segments::host::{SegmentHost, programs};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Mode, OFlags};

use crate::heap_tickets::HeapTickets;
use crate::memory_governor::MemoryGovernor;
use crate::node_watch::NodeWatch;
use crate::report::status;
use crate::swap_servers::SwapServers;

/// Pause after a connection could not be received from the gateway.
const ADMIT_PAUSE: Duration = Duration::from_millis(20);
/// Longest wait for notices of a run before its connection is checked again.
const NOTICES_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time for which the owner of a closing run waits for complete statistics.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest time that a monitor needs to free a program's memory after the program has ended.
pub(crate) const RUN_END_TIMEOUT: Duration = Duration::from_secs(10);
const OTHER_USERS_AGENT: &str =
    "this agent is another user's: use an agent of your own, or the agent's shared socket";
/// Descriptors of a connection and of its thread: the socket, the process at the other end, a
/// userfaultfd.
const CONNECTION_DESCRIPTORS: usize = 4;
/// Descriptors of a user's relay: its socket, and one for the thread that receives from it.
const RELAY_DESCRIPTORS: usize = 2;
/// Most connections of one user at once. Each run is one.
const CONNECTIONS_PER_USER_MAX: usize = 2048;
/// Most connections of one user at once at sockets of connect-back requests, which are open to all
/// users for some time.
const CONNECT_BACK_CONNECTIONS_PER_USER_MAX: usize = 512;

/// Why a run is not opened, as a sentence for its user.
#[derive(Debug, thiserror::Error)]
enum RunRefusal {
    #[error(
        "the cluster has no memory node: start the nodes that have stopped (aquifer up), or another one \
         (aquifer node --id NUMBER --memory SIZE)"
    )]
    NoNodes,
    #[error(
        "--replicas {replicas} wants each page on {replicas} memory nodes, and the cluster has \
         {count}: start more (aquifer node --id NUMBER --memory SIZE), or ask for fewer replicas"
    )]
    TooFewNodes { replicas: usize, count: usize },
    #[error("no memory node accepts this host, so that the program's pages would find no room: {0}")]
    NotAccepted(String),
    #[error(
        "the limit while the host has idle memory, {}, is less than that of --local, {}: give at least as \
         much, or auto",
        ByteSize(*max),
        ByteSize(*limit)
    )]
    MaxBelowLimit { max: u64, limit: u64 },
    #[error(transparent)]
    Open(#[from] OpenRunError),
    #[error("the owner of the run has closed the connection: {0}")]
    Send(#[from] io::Error),
}

/// Connections that are counted together: those of a user, by its id, at the sockets of
/// connect-back requests or at the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Counted {
    uid: u32,
    is_connect_back: bool,
}

impl Counted {
    fn limit(self) -> usize {
        if self.is_connect_back { CONNECT_BACK_CONNECTIONS_PER_USER_MAX } else { CONNECTIONS_PER_USER_MAX }
    }
}

/// The connections to the agent, and the services that they use.
#[derive(Debug)]
pub(crate) struct Connections {
    pub service: Arc<PagingService>,
    pub sessions: Arc<SessionService>,
    pub nodes: Arc<NodeRegistry>,
    /// Free memory of the nodes, for reports.
    node_watch: NodeWatch,
    pub swap_servers: Arc<SwapServers>,
    /// Access to the cluster for servers of swap devices.
    access: ClusterAccess,
    heap_tickets: HeapTickets,
    segments: Arc<SegmentHost>,
    memory: LentMemory,
    descriptors: Arc<DescriptorShares>,
    /// Number of open connections.
    counts: Mutex<HashMap<Counted, usize>>,
    /// Limits the log lines about connections that were lost.
    admit_failures: Mutex<FailureLog>,
}

/// The services for the programs of this host.
#[derive(Debug)]
pub(crate) struct Services {
    pub paging: Arc<PagingService>,
    pub sessions: Arc<SessionService>,
    pub segments: Arc<SegmentHost>,
    pub swap_servers: Arc<SwapServers>,
}

/// The idle memory of the host, for elastic runs.
#[derive(Debug)]
pub(crate) struct LentMemory {
    pub governor: Arc<MemoryGovernor>,
    /// See [`crate::AgentOptions::limit_max_bytes`].
    pub limit_max_bytes: Option<u64>,
    /// See [`crate::AgentOptions::backups`].
    pub backups: (Backup, BTreeMap<u32, Backup>),
}

impl LentMemory {
    /// The request, with the agent's choice where the user has made none.
    fn complete(&self, open: &OpenRun, uid: u32) -> OpenRun {
        let (default, of_users) = &self.backups;
        let backup = of_users.get(&uid).unwrap_or(default).code();
        OpenRun {
            limit_max_bytes: open.limit_max_bytes.or(self.limit_max_bytes),
            backup: open.backup.or(Some(backup)),
            ..open.clone()
        }
    }
}

impl Connections {
    pub fn new(
        services: &Services,
        nodes: &Arc<NodeRegistry>,
        access: ClusterAccess,
        heap_tickets: HeapTickets,
        memory: LentMemory,
    ) -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            service: Arc::clone(&services.paging),
            sessions: Arc::clone(&services.sessions),
            nodes: Arc::clone(nodes),
            swap_servers: Arc::clone(&services.swap_servers),
            access,
            descriptors: Arc::clone(&heap_tickets.descriptors),
            heap_tickets,
            segments: Arc::clone(&services.segments),
            memory,
            counts: Mutex::default(),
            admit_failures: Mutex::default(),
            node_watch: NodeWatch::start(nodes)?,
        }))
    }

    /// Serves the connections of a user that its relay introduces, each in a thread, until the
    /// relay ends.
    pub fn admit_all(self: &Arc<Self>, mut channel: UserChannel) {
        let uid = channel.uid;
        let _charge = match self.descriptors.charge_reserved(uid, RELAY_DESCRIPTORS) {
            Ok(charge) => charge,
            // Admitted, so that the user's programs get the reason for their refusal. A user
            // has few relays under its own id.
            Err(error) if error.owner == uid => self.descriptors.charge_always(uid, RELAY_DESCRIPTORS),
            // The relay observes the end of its channel.
            Err(error) => return tracing::warn!(%error, uid, "refused a relay"),
        };
        loop {
            match channel.next_introduction() {
                Ok(Some(introduction)) => self.admit(channel.uid, introduction),
                Ok(None) => return,
                Err(error) => {
                    let failures = self.admit_failures.lock().record(Instant::now());
                    if let Some(failures) = failures {
                        tracing::warn!(%error, failures, uid = channel.uid, "lost a connection");
                    }
                    std::thread::sleep(ADMIT_PAUSE);
                }
            }
        }
    }

    /// Serves a connection in a thread.
    fn admit(self: &Arc<Self>, uid: u32, introduction: Introduction) {
        let Introduction { kind, pid, process, socket, packet, userfaultfd } = introduction;
        let peer = PeerProcess { pid, uid, pidfd: process };
        let is_permitted = match kind {
            ListenerKind::Shared => true,
            ListenerKind::Own => is_own_user(uid),
            ListenerKind::ConnectBack { .. } => false,
        };
        let counted = Counted { uid, is_connect_back: matches!(kind, ListenerKind::ConnectBack { .. }) };
        if !self.count_in(counted) {
            let limit = counted.limit();
            tracing::warn!(uid, limit, "refused a connection: the user has too many");
            refuse(&socket, &format!("you have {limit} connections to this agent: end some programs first"));
            return;
        }
        let charge = match self.descriptors.charge(uid, CONNECTION_DESCRIPTORS) {
            Ok(charge) => charge,
            Err(error) => {
                tracing::warn!(uid, %error, "refused a connection");
                refuse(&socket, &error.to_string());
                return self.count_out(counted);
            }
        };
        let connections = Arc::clone(self);
        let name = format!("connection-{pid}");
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            connections.serve(socket, peer, &packet, userfaultfd, is_permitted);
            connections.count_out(counted);
            drop(charge);
        });
        if let Err(error) = spawned {
            tracing::error!(uid, pid, %error, "dropped a connection: cannot start a thread for it");
            self.count_out(counted);
        }
    }

    /// True if there is no connection, no run and no session.
    pub fn is_unused(&self) -> bool {
        self.lock_counts().is_empty() && self.service.runs().is_empty() && self.sessions.sessions().is_empty()
    }

    /// Counts a new connection of a user; false if the user has too many.
    fn count_in(&self, counted: Counted) -> bool {
        let mut counts = self.lock_counts();
        let count = counts.entry(counted).or_default();
        let has_room = *count < counted.limit();
        *count += usize::from(has_room);
        has_room
    }

    fn count_out(&self, counted: Counted) {
        let mut counts = self.lock_counts();
        if let Some(count) = counts.get_mut(&counted) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&counted);
            }
        }
    }

    fn lock_counts(&self) -> MutexGuard<'_, HashMap<Counted, usize>> {
        self.counts.lock()
    }

    /// Serves one connection, of which the first packet was received.
    ///
    /// `is_permitted` is false for another user at the agent's own socket, and for all users at the
    /// socket of a connect-back request. Only a program of a run may connect so; the token that it
    /// sends identifies the run.
    fn serve(
        &self,
        socket: OwnedFd,
        peer: PeerProcess,
        packet: &[u8],
        userfaultfd: Option<OwnedFd>,
        is_permitted: bool,
    ) {
        let PeerProcess { pid, uid, .. } = peer;
        let answer = match Frame::parse(packet) {
            Ok(frame) if !is_permitted && !matches!(frame, Frame::Hello(_) | Frame::DeviceRequest(_)) => {
                tracing::warn!(uid, pid, "refused a request of another user");
                Frame::Refused(OTHER_USERS_AGENT.into())
            }
            Ok(Frame::Hello(hello)) => {
                if let Err(error) = self.service.attach_program(hello, userfaultfd, socket, peer) {
                    tracing::warn!(uid, pid, %error, "refused a program");
                }
                return;
            }
            Ok(Frame::OpenRun(open)) => {
                let socket = Arc::new(socket);
                match self.open_run(&socket, &open, peer) {
                    Ok(run) => serve_run(&socket, &self.service, &run),
                    Err(error) => refuse(&socket, &error.to_string()),
                }
                return;
            }
            Ok(Frame::OpenSession) => {
                if let Err(error) = self.sessions.open(&socket, peer) {
                    refuse(&socket, &error.to_string());
                }
                return;
            }
            // The answer gives access to the whole pool.
            Ok(Frame::ClusterAccessRequest) if is_trusted(uid) => {
                return self.swap_servers.serve(socket, &self.access);
            }
            Ok(Frame::DeviceRequest(token)) => {
                return if self.service.run(token).is_some() {
                    send_device(&socket)
                } else {
                    refuse(&socket, OTHER_USERS_AGENT)
                };
            }
            Ok(Frame::StatusRequest) => {
                let is_visible = |tenant| is_visible(tenant, uid);
                let host = self.nodes.host();
                let swap = self.swap_servers.reports();
                let watches = (&self.node_watch, &*self.memory.governor);
                let status = status(&self.service, &self.sessions, swap, host, watches, is_visible);
                Frame::StatusReport(crate::report::fitting_json(status))
            }
            Ok(Frame::HeapAccessRequest(node)) => {
                if let Err(error) = self.heap_tickets.answer(&socket, uid, node) {
                    tracing::debug!(pid, %error, "a program has not got access to heaps");
                }
                return;
            }
            Ok(Frame::SegmentCall(first)) => {
                let peer = PeerCredentials { pid, uid };
                return programs::serve(&self.segments, &Arc::new(socket), peer, &first);
            }
            Ok(Frame::SetLimit(set)) => self.set_limit(set, uid),
            Ok(_) => Frame::Refused("this request is not for an agent".into()),
            Err(error) => Frame::Refused(error.to_string()),
        };
        if let Err(error) = send_frame(&socket, &answer, &[]) {
            tracing::debug!(pid, %error, "a peer closed its connection before the answer");
        }
    }

    /// Opens a run and sends its token to its owner.
    fn open_run(
        &self,
        socket: &Arc<OwnedFd>,
        open: &OpenRun,
        peer: PeerProcess,
    ) -> Result<Arc<Run>, RunRefusal> {
        if self.nodes.require(1).is_err() {
            return Err(RunRefusal::NoNodes);
        }
        if let Some(reason) = self.nodes.lasting_failure(peer.uid) {
            return Err(RunRefusal::NotAccepted(reason));
        }
        let replicas = usize::try_from(open.replicas).unwrap_or(usize::MAX);
        if (2..=REPLICAS_MAX).contains(&replicas)
            && let Err(count) = self.nodes.require(replicas)
        {
            return Err(RunRefusal::TooFewNodes { replicas, count });
        }
        let PeerProcess { pid, uid, pidfd } = peer;
        let owner = RunOwner { socket: Arc::clone(socket), pid, process: pidfd.map(Arc::new) };
        check_max(open.limit_bytes, open.limit_max_bytes)?;
        let run = self.service.open_run(&self.memory.complete(open, uid), owner, uid)?;
        if run.limit_max_bytes().is_some() {
            self.memory.governor.look_now();
        }
        if let Err(error) = send_frame(socket, &Frame::RunOpened(run.token()), &[]) {
            self.service.close_run(&run);
            return Err(error.into());
        }
        Ok(run)
    }

    fn set_limit(&self, set: SetLimit, uid: u32) -> Frame {
        if let Err(refusal) = check_max(set.limit_bytes, set.limit_max_bytes) {
            return Frame::Refused(refusal.to_string());
        }
        let mut runs = self.service.runs().into_iter();
        if let Some(run) = runs.find(|run| is_visible(run.tenant(), uid) && run.has_process(set.pid)) {
            run.set_limit(set.limit_bytes, set.limit_max_bytes);
            self.memory.governor.look_now();
            return Frame::Statistics(statistics_json(&run.report()));
        }
        match self.swap_servers.set_limit(set, |tenant| is_visible(tenant, uid)) {
            Some(Ok(statistics)) => Frame::Statistics(statistics_json(&statistics)),
            Some(Err(reason)) => Frame::Refused(reason),
            None => Frame::Refused(format!(
                "process {} does not run on the pool: aquifer status shows which do",
                set.pid
            )),
        }
    }
}

/// Refuses a limit for idle memory that is below the limit itself.
fn check_max(limit: u64, max: Option<u64>) -> Result<(), RunRefusal> {
    match max {
        Some(max) if max < limit => Err(RunRefusal::MaxBelowLimit { max, limit }),
        _ => Ok(()),
    }
}

/// True if the runs of a tenant are visible to a user.
fn is_visible(tenant: u32, uid: u32) -> bool {
    uid == tenant || is_trusted(uid)
}

/// True for root and for the agent's own user.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || is_own_user(uid)
}

fn is_own_user(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

/// Sends `/dev/userfaultfd` to a program that may not create a userfaultfd of its own memory.
fn send_device(socket: &OwnedFd) {
    match rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => {
            if let Err(error) = send_frame(socket, &Frame::Device, &[device.as_fd()]) {
                tracing::debug!(%error, "a program closed its connection before the device was sent");
            }
        }
        Err(error) => refuse(
            socket,
            &format!(
                "this user may not use userfaultfd, nor may the agent ({error}): give access to \
                 /dev/userfaultfd, or set the sysctl vm.unprivileged_userfaultfd=1, or use an agent of root \
                 with --agent SOCKET, or after `aquifer down` if this is the agent of your own cluster"
            ),
        ),
    }
}

fn refuse(socket: &OwnedFd, reason: &str) {
    if let Err(error) = send_frame(socket, &Frame::Refused(reason.to_owned()), &[]) {
        tracing::debug!(%error, reason, "a peer closed its connection before the refusal");
    }
}

/// Serves the owner of a run until the run has ended, and closes the run.
pub(crate) fn serve_run(socket: &OwnedFd, service: &Arc<PagingService>, run: &Arc<Run>) {
    let mut end_is_sent = false;
    loop {
        send_notices(socket, run, &mut end_is_sent);
        if !wait_readable(&[socket, run.notices_fd()], NOTICES_TIMEOUT).unwrap_or(true)
            || !wait_readable(&[socket], Duration::ZERO).unwrap_or(true)
        {
            continue;
        }
        let is_closing = matches!(receive_frame(socket), Ok((Frame::CloseRun, _)));
        if !is_closing && !run.outlives_owner() && !run.programs().is_empty() {
            run.end("the process that started it was killed");
        }
        // The owner may request the statistics before the monitor has freed all memory of the
        // program.
        let mut is_empty = run.wait_empty(if is_closing { CLOSE_TIMEOUT } else { Duration::ZERO });
        if is_closing {
            send_notices(socket, run, &mut end_is_sent);
            let _ = send_frame(socket, &Frame::Statistics(statistics_json(&run.report())), &[]);
        }
        // Programs in the background stay under the run's limit until they end.
        while !is_empty {
            is_empty = run.wait_empty(RUN_END_TIMEOUT);
        }
        service.close_run(run);
        return;
    }
}

/// Sends the run's notices to its owner. An owner that has closed the connection needs none.
fn send_notices(socket: &OwnedFd, run: &Run, end_is_sent: &mut bool) {
    for notice in run.drain_notices() {
        let _ = send_frame(socket, &Frame::Notice(notice), &[]);
    }
    if let Some(reason) = run.end_reason().filter(|_| !*end_is_sent) {
        let _ = send_frame(socket, &Frame::Ended(reason), &[]);
        *end_is_sent = true;
    }
}

fn statistics_json(report: &RunStatistics) -> String {
    serde_json::to_string(report).expect("numbers can be written")
}
