//! The agent's life: a place in the directory, a socket for programs, a thread for each conversation.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use aquifer_fabric::tcp::{ClusterKey, ConnectOptions};
use aquifer_fabric::{Identity, Tenant};
use aquifer_faults::serve::attach::{AttachError, receive_frame, send_frame};
use aquifer_faults::serve::{Restored, Run, RunReport, Service, Surroundings};
use aquifer_ipc::{Frame, KeptKind, OpenRun, Put, SetLimit};
use aquifer_pager::Connector;
use aquifer_pool::PoolClient;

use crate::keeper::KeeperPort;
use crate::lent::{Borrowers, Lent};
use crate::membership::{Membership, MembershipError};
use crate::nodes::Nodes;
use crate::place::Place;
use crate::report::{RunStatistics, status};
use crate::socket::{accept_own, raise_descriptor_limit, wait_readable};

/// How often to look whether to stop.
const TICK: Duration = Duration::from_millis(100);
/// How soon a run's owner hears that it was ended.
const NEWS_TICK: Duration = Duration::from_millis(50);
/// How long a run's owner waits, at most, for figures that are complete.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// After a program's end its monitor needs this long, at most, to give everything back.
const SETTLE: Duration = Duration::from_secs(10);

/// How to run an agent.
#[derive(Debug)]
pub struct AgentOptions {
    /// Where programs and `aquifer run` find it.
    pub socket: PathBuf,
    /// Where the keeper listens.
    pub keeper: PathBuf,
    /// The cluster's directory.
    pub directory: Arc<dyn aquifer_directory::Directory>,
    /// Where that is, for servers of blocks on this host: told to them as it is.
    pub directory_place: String,
    /// Most that the mempool may take, in bytes. It grows as it is used.
    pub mempool_bytes: usize,
    /// The cluster's key, for nodes on other machines.
    pub key: Option<ClusterKey>,
    /// How those are connected to.
    pub connect: ConnectOptions,
    /// A socket that listens at `socket` already.
    pub listener: Option<OwnedFd>,
}

/// Why an agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// No keeper.
    #[error("the keeper at {path} cannot be reached: {source}. Start it first (aquifer keeper), or use aquifer up", path = path.display())]
    Keeper {
        /// Where it should be.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No socket.
    #[error("cannot listen at {path}: {source}", path = path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No threads.
    #[error("the agent has no threads or descriptors to serve programs: {0}")]
    Threads(io::Error),
    /// No memory.
    #[error("no memory for the mempool: {0}")]
    Mempool(io::Error),
    /// The directory could not be reached for too long.
    #[error("this host's lease has ended: start the agent again")]
    LeaseLost,
    /// The directory.
    #[error(transparent)]
    Membership(#[from] MembershipError),
}

#[derive(Debug)]
struct Host {
    nodes: Arc<Nodes>,
    keeper: KeeperPort,
    borrowers: Borrowers,
    lent: Lent,
}

impl Surroundings for Host {
    fn connector(&self) -> Arc<dyn Connector> {
        Arc::clone(&self.nodes) as Arc<dyn Connector>
    }

    fn pool(&self) -> PoolClient {
        self.nodes.pool()
    }

    fn keep(&self, put: &Put, fds: &[BorrowedFd<'_>]) {
        self.keeper.keep(put, fds);
    }

    fn unkeep(&self, kind: KeptKind, id: u64) {
        self.keeper.unkeep(kind, id);
    }
}

/// Serve programs until `stop`; then end them, with a message, and give all memory back. If an agent before this one was killed, go on
/// with its programs.
///
/// # Errors
/// If something it needs is missing at the start.
pub fn serve(options: &AgentOptions, stop: &AtomicBool, ready: impl FnOnce()) -> Result<(), AgentError> {
    raise_descriptor_limit();
    let (keeper, kept) = KeeperPort::connect(&options.keeper)
        .map_err(|source| AgentError::Keeper { path: options.keeper.clone(), source })?;
    let place = Place::find(options, &kept)?;
    let mut membership =
        Membership::join(Arc::clone(&options.directory), &options.socket, place.before.as_ref())?;
    let tenant = Tenant(rustix::process::geteuid().as_raw());
    let identity = Identity { host: membership.host(), epoch: membership.epoch(), tenant };
    let nodes = Nodes::new(identity, options.key.clone(), options.connect.clone());
    membership.watch_nodes(&nodes)?;
    let Place { before, mempool, listener } = place;
    let record = serde_json::to_string(membership.record()).expect("plain structs are JSON");
    keeper.keep(
        &Put { kind: KeptKind::Host, id: 0, pid: 0, record },
        &[mempool.memory().fd(), listener.as_fd()],
    );
    let mempool = Arc::new(mempool);
    let host = Arc::new(Host {
        nodes: Arc::clone(&nodes),
        keeper,
        borrowers: Borrowers::default(),
        lent: Lent::new(&options.directory_place, options.connect.encrypt, options.key.as_ref()),
    });
    let service =
        Service::new(Arc::clone(&host) as Arc<dyn Surroundings>, mempool).map_err(AgentError::Threads)?;
    let restored = if before.is_some() { service.restore(kept) } else { service.refuse(kept) };
    for Restored { run, owner } in restored {
        let service = Arc::clone(&service);
        let spawned = std::thread::Builder::new()
            .name("talk-again".into())
            .spawn(move || attend(&owner, &service, &run));
        spawned.map_err(AgentError::Threads)?;
    }
    ready();
    let mut ticks = 0u32;
    while !stop.load(Relaxed) {
        if wait_readable(&[&listener], TICK).unwrap_or(false) {
            accept(&listener, &service, &host, identity);
        }
        if membership.is_lost() {
            let reason = "this host's lease has ended, and the memory nodes refuse it";
            end_runs(&service, reason);
            host.borrowers.end(reason);
            return Err(AgentError::LeaseLost);
        }
        ticks = ticks.wrapping_add(1);
        if ticks.is_multiple_of(10) {
            host.keeper.refresh();
        }
    }
    end_runs(&service, "the agent is stopping");
    host.borrowers.end("the agent is stopping");
    if options.listener.is_none() {
        let _ = std::fs::remove_file(&options.socket);
    }
    host.keeper.unkeep(KeptKind::Host, 0);
    membership.leave();
    Ok(())
}

fn end_runs(service: &Service, reason: &str) {
    for run in service.runs() {
        run.end(reason);
        if !run.wait_empty(SETTLE) {
            tracing::error!("some programs would not end");
        }
        service.close_run(&run);
    }
}

fn accept(listener: &OwnedFd, service: &Arc<Service>, host: &Arc<Host>, identity: Identity) {
    let (socket, pid) = match accept_own(listener) {
        Ok(Some(accepted)) => accepted,
        Ok(None) => return,
        Err(error) => {
            tracing::warn!(%error, "a connection failed");
            return;
        }
    };
    let (service, host) = (Arc::clone(service), Arc::clone(host));
    let spawned = std::thread::Builder::new()
        .name(format!("talk-{pid}"))
        .spawn(move || converse(socket, pid, &service, &host, identity));
    if let Err(error) = spawned {
        tracing::error!(%error, "no thread for a connection");
    }
}

fn converse(socket: OwnedFd, pid: u32, service: &Arc<Service>, host: &Host, identity: Identity) {
    let nodes = &*host.nodes;
    let answer = match receive_frame(&socket) {
        Ok((Frame::Hello(hello), fds)) => {
            if let Err(error) = service.welcome(hello, fds, socket, pid) {
                tracing::warn!(pid, %error, "a program was refused");
            }
            return;
        }
        Ok((Frame::OpenRun(open), _)) => {
            match open_run(&socket, service, nodes, &open) {
                Ok(run) => attend(&socket, service, &run),
                Err(reason) => refuse(&socket, &reason),
            }
            return;
        }
        Ok((Frame::Borrow, _)) => return host.borrowers.attend(socket, &host.lent),
        Ok((Frame::Status, _)) => {
            let status = status(identity.host.0, service, nodes);
            Frame::StatusIs(serde_json::to_string(&status).expect("figures can be written"))
        }
        Ok((Frame::SetLimit(set), _)) => set_limit(service, set),
        Ok(_) => Frame::Refused("that is not for an agent".into()),
        Err(AttachError::Closed) => return,
        Err(error) => Frame::Refused(error.to_string()),
    };
    if let Err(error) = send_frame(&socket, &answer, &[]) {
        tracing::debug!(pid, %error, "nobody waited for an answer");
    }
}

fn set_limit(service: &Service, set: SetLimit) -> Frame {
    let Some(run) = service.runs().into_iter().find(|run| run.has_process(set.pid)) else {
        return Frame::Refused(format!(
            "process {} does not run on the pool: aquifer status shows which do",
            set.pid
        ));
    };
    run.set_limit(set.limit_bytes);
    Frame::Statistics(statistics(&run.report()))
}

fn refuse(socket: &OwnedFd, reason: &str) {
    if let Err(error) = send_frame(socket, &Frame::Refused(reason.to_owned()), &[]) {
        tracing::debug!(%error, "nobody waited for a refusal");
    }
}

fn open_run(
    socket: &OwnedFd,
    service: &Arc<Service>,
    nodes: &Nodes,
    open: &OpenRun,
) -> Result<Arc<Run>, String> {
    if nodes.count() == 0 {
        return Err("the cluster has no memory node: start one (aquifer node), or start the cluster anew (aquifer up)".into());
    }
    let run = service.open_run(&open.name, open.limit_bytes, socket.as_fd())?;
    match send_frame(socket, &Frame::RunOpened(run.token()), &[]) {
        Ok(()) => Ok(run),
        Err(error) => {
            service.close_run(&run);
            Err(error.to_string())
        }
    }
}

/// Attend to a run until nobody is left in it.
fn attend(socket: &OwnedFd, service: &Arc<Service>, run: &Arc<Run>) {
    let mut told_end = false;
    loop {
        tell(socket, run, &mut told_end);
        if !wait_readable(&[socket], NEWS_TICK).unwrap_or(true) {
            continue;
        }
        let is_closing = matches!(receive_frame(socket), Ok((Frame::CloseRun, _)));
        // The program's end is known before its monitor has given everything back.
        let mut is_empty = run.wait_empty(if is_closing { CLOSE_PATIENCE } else { Duration::ZERO });
        if is_closing {
            tell(socket, run, &mut told_end);
            let _ = send_frame(socket, &Frame::Statistics(statistics(&run.report())), &[]);
        }
        // Programs left in the background stay under their limit until they end.
        while !is_empty {
            is_empty = run.wait_empty(SETTLE);
        }
        service.close_run(run);
        return;
    }
}

/// Tell the run's owner what there is to tell. Whether it still listens is its own affair.
fn tell(socket: &OwnedFd, run: &Run, told_end: &mut bool) {
    for news in run.take_news() {
        let _ = send_frame(socket, &Frame::News(news), &[]);
    }
    if let Some(reason) = run.reason().filter(|_| !*told_end) {
        let _ = send_frame(socket, &Frame::Ended(reason), &[]);
        *told_end = true;
    }
}

fn statistics(report: &RunReport) -> String {
    serde_json::to_string(&RunStatistics::from(report.clone())).expect("figures can be written")
}
