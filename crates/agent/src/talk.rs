//! Conversations with programs, with `aquifer run` and with whoever asks, a thread for each.
//!
//! Every user of the host may come by the shared socket. One user's runs and figures are closed to another; the agent's own user, and
//! root, see all.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_channel::socket::{PeerCredentials, accept, wait_readable};
use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_extents::SessionService;
use aquifer_faults::serve::{PagingService, Run, RunReport};
use aquifer_host::lent::Lent;
use aquifer_host::nodes::Nodes;
use aquifer_ipc::{Frame, OpenRun, SetLimit};
use aquifer_pager::REPLICAS_MAX;
use rustix::fs::{Mode, OFlags};

use crate::borrowers::Borrowers;
use crate::report::{run_statistics, status};

/// How soon a run's owner hears that it was ended.
const NEWS_TICK: Duration = Duration::from_millis(50);
/// How long a run's owner waits, at most, for figures that are complete.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// After a program's end its monitor needs this long, at most, to give everything back.
pub(crate) const SETTLE: Duration = Duration::from_secs(10);
const NOT_YOURS: &str = "this agent is another user's";
/// Conversations of one user at once; each run is one.
const TALKS_PER_USER_MAX: usize = 512;

/// What conversations are about.
#[derive(Debug)]
pub(crate) struct Talks {
    pub service: Arc<PagingService>,
    pub sessions: Arc<SessionService>,
    pub nodes: Arc<Nodes>,
    /// Servers of blocks on this host, and what they are told.
    pub borrowers: Borrowers,
    lent: Lent,
    /// By user, those under way.
    talking: Mutex<HashMap<u32, usize>>,
}

impl Talks {
    pub fn new(
        service: &Arc<PagingService>,
        sessions: &Arc<SessionService>,
        nodes: &Arc<Nodes>,
        lent: Lent,
    ) -> Arc<Self> {
        Arc::new(Self {
            service: Arc::clone(service),
            sessions: Arc::clone(sessions),
            nodes: Arc::clone(nodes),
            borrowers: Borrowers::default(),
            lent,
            talking: Mutex::default(),
        })
    }

    /// Take in the next who comes, from any user or only from our own.
    pub fn accept(self: &Arc<Self>, listener: &OwnedFd, is_shared: bool) {
        let (socket, peer) = match accept(listener) {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection failed");
                return;
            }
        };
        if !self.begin(peer.uid) {
            tracing::warn!(uid = peer.uid, "a user talks too much");
            refuse(&socket, "you have too many programs and requests under way on this host");
            return;
        }
        let talks = Arc::clone(self);
        let spawned = std::thread::Builder::new().name(format!("talk-{}", peer.pid)).spawn(move || {
            talks.converse(socket, peer, is_shared || is_own(peer.uid));
            talks.end(peer.uid);
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "no thread for a connection");
            self.end(peer.uid);
        }
    }

    fn begin(&self, uid: u32) -> bool {
        let mut talking = self.talking.lock().unwrap_or_else(PoisonError::into_inner);
        let count = talking.entry(uid).or_default();
        let has_room = *count < TALKS_PER_USER_MAX;
        *count += usize::from(has_room);
        has_room
    }

    fn end(&self, uid: u32) {
        let mut talking = self.talking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = talking.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                talking.remove(&uid);
            }
        }
    }

    /// Another user who comes by our own socket is a program of a run that has become somebody else, or has no business here.
    fn converse(&self, socket: OwnedFd, peer: PeerCredentials, is_at_home: bool) {
        let answer = match receive_frame(&socket) {
            Ok((frame, _)) if !is_at_home && !matches!(frame, Frame::Hello(_) | Frame::DeviceRequest(_)) => {
                tracing::warn!(uid = peer.uid, "another user was turned away");
                Frame::Refused(NOT_YOURS.into())
            }
            Ok((Frame::Hello(hello), fds)) => {
                if let Err(error) = self.service.attach_program(hello, fds, socket, peer.pid) {
                    tracing::warn!(pid = peer.pid, %error, "a program was refused");
                }
                return;
            }
            Ok((Frame::OpenRun(open), _)) => {
                match self.open_run(&socket, &open, peer.uid) {
                    Ok(run) => attend(&socket, &self.service, &run),
                    Err(reason) => refuse(&socket, &reason),
                }
                return;
            }
            Ok((Frame::OpenSession, _)) => {
                if let Err(error) = self.sessions.open(&socket, peer.uid, peer.pid) {
                    refuse(&socket, &error.to_string());
                }
                return;
            }
            // What they are told opens the whole pool.
            Ok((Frame::ClusterAccessRequest, _)) if is_trusted(peer.uid) => {
                return self.borrowers.attend(socket, &self.lent);
            }
            Ok((Frame::DeviceRequest(token), _)) => {
                return if self.service.run(token).is_some() {
                    lend_device(&socket)
                } else {
                    refuse(&socket, NOT_YOURS)
                };
            }
            Ok((Frame::StatusRequest, _)) => {
                let status =
                    status(&self.service, &self.sessions, &self.nodes, |tenant| may_see(peer.uid, tenant));
                Frame::StatusReport(serde_json::to_string(&status).expect("figures can be written"))
            }
            Ok((Frame::SetLimit(set), _)) => self.set_limit(set, peer.uid),
            Ok(_) => Frame::Refused("that is not for an agent".into()),
            Err(ReceiveError::Closed) => return,
            Err(error) => Frame::Refused(error.to_string()),
        };
        if let Err(error) = send_frame(&socket, &answer, &[]) {
            tracing::debug!(pid = peer.pid, %error, "nobody waited for an answer");
        }
    }

    fn open_run(&self, socket: &OwnedFd, open: &OpenRun, uid: u32) -> Result<Arc<Run>, String> {
        if self.nodes.at_least(1).is_err() {
            return Err("the cluster has no memory node: start one (aquifer node), or start the cluster anew (aquifer up)".into());
        }
        let replicas = usize::try_from(open.replicas).unwrap_or(usize::MAX);
        if (2..=REPLICAS_MAX).contains(&replicas)
            && let Err(there_are) = self.nodes.at_least(replicas)
        {
            return Err(format!(
                "--replicas {replicas} wants each page on {replicas} memory nodes, and the cluster has {there_are}: start more (aquifer node, aquifer up --nodes), or ask for fewer replicas"
            ));
        }
        let run = self
            .service
            .open_run(&open.name, open.limit_bytes, replicas, socket.as_fd(), uid)
            .map_err(|error| error.to_string())?;
        match send_frame(socket, &Frame::RunOpened(run.token()), &[]) {
            Ok(()) => Ok(run),
            Err(error) => {
                self.service.close_run(&run);
                Err(error.to_string())
            }
        }
    }

    fn set_limit(&self, set: SetLimit, uid: u32) -> Frame {
        let mut runs = self.service.runs().into_iter();
        let Some(run) = runs.find(|run| may_see(uid, run.tenant()) && run.has_process(set.pid)) else {
            return Frame::Refused(format!(
                "process {} does not run on the pool: aquifer status shows which do",
                set.pid
            ));
        };
        run.set_limit(set.limit_bytes);
        Frame::Statistics(statistics(&run.report()))
    }
}

/// One user's runs are closed to another.
fn may_see(uid: u32, tenant: u32) -> bool {
    uid == tenant || is_trusted(uid)
}

/// Our own user, and root.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || is_own(uid)
}

fn is_own(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

/// Let a program without the right to it make a userfaultfd of its own memory.
fn lend_device(socket: &OwnedFd) {
    match rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => {
            if let Err(error) = send_frame(socket, &Frame::Device, &[device.as_fd()]) {
                tracing::debug!(%error, "nobody waited for the device");
            }
        }
        Err(error) => refuse(
            socket,
            &format!(
                "this user may not use userfaultfd, nor may the agent ({error}): give access to /dev/userfaultfd, or \
                 set the sysctl vm.unprivileged_userfaultfd=1, or use an agent that runs as root"
            ),
        ),
    }
}

fn refuse(socket: &OwnedFd, reason: &str) {
    if let Err(error) = send_frame(socket, &Frame::Refused(reason.to_owned()), &[]) {
        tracing::debug!(%error, "nobody waited for a refusal");
    }
}

/// Attend to a run until nobody is left in it.
pub(crate) fn attend(socket: &OwnedFd, service: &Arc<PagingService>, run: &Arc<Run>) {
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
    for news in run.drain_notices() {
        let _ = send_frame(socket, &Frame::Notice(news), &[]);
    }
    if let Some(reason) = run.end_reason().filter(|_| !*told_end) {
        let _ = send_frame(socket, &Frame::Ended(reason), &[]);
        *told_end = true;
    }
}

fn statistics(report: &RunReport) -> String {
    serde_json::to_string(&run_statistics(report.clone())).expect("figures can be written")
}
