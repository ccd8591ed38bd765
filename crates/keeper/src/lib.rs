//! The keeper: a small process that holds what must outlive the agent, and what must outlive a memory node.
//!
//! When the last reference to a userfaultfd closes, the kernel answers missing pages with zeros. So the agent's death must not
//! close it: the keeper has another reference. Programs then wait. The agent that comes next takes back all there is, with the memory in
//! which the one before kept its books, and goes on. If none comes within the grace time, the keeper ends the programs; none ever
//! reads a zero that it did not write.
//!
//! In the same way it holds the memory that a node lends. The node that comes next under the number goes on with it; if none comes in time, the system has it back.
//!
//! It also logs how daemons of a local cluster end, which a daemon that is killed cannot.
//!
//! - `held`: what is held, and for whom. `exit_watcher`: how daemons end. [`KeeperPort`] is the daemons' end of the connection.

mod exit_status;
mod exit_watcher;
mod held;
mod port;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_channel::socket::{accept, listen_at, wait_readable};
use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind, KeeperShare};

use self::exit_watcher::ExitWatcher;
use self::held::Held;
pub use port::KeeperPort;

/// How often to look around.
const TICK: Duration = Duration::from_millis(100);
/// Connections at once: the agent's, that of its shadow, those of the next agent; and those of nodes.
const CONNECTIONS_MAX: usize = 64;

/// How to run a keeper.
#[derive(Debug)]
pub struct KeeperOptions {
    /// Where it listens.
    pub socket: PathBuf,
    /// How long programs wait for an agent that died, and memory for its node.
    pub grace: Duration,
    /// A socket that listens at `socket` already.
    pub listener: Option<OwnedFd>,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    number: u64,
    pid: u32,
    /// Whose owner is at the other end.
    share: Option<KeeperShare>,
}

/// What one daemon has here, or had.
#[derive(Debug, Default)]
struct Part {
    /// The daemon, while it is connected: the number of its connection, and its process.
    owner: Option<(u64, u32)>,
    /// When it is given up if no other daemon comes.
    deadline: Option<Instant>,
    held: Held,
}

#[derive(Debug)]
struct Keeper {
    grace: Duration,
    connections: Vec<Connection>,
    connected: u64,
    parts: BTreeMap<KeeperShare, Part>,
    exits: ExitWatcher,
}

/// Hold things until `stop`.
///
/// # Errors
/// If it cannot listen.
pub fn serve(options: &KeeperOptions, stop: &AtomicBool, ready: impl FnOnce()) -> io::Result<()> {
    let listener = match &options.listener {
        Some(given) => given.try_clone()?,
        None => listen_at(&options.socket, 0o600)?,
    };
    let mut keeper = Keeper {
        grace: options.grace,
        connections: Vec::new(),
        connected: 0,
        parts: BTreeMap::new(),
        exits: ExitWatcher::default(),
    };
    ready();
    while !stop.load(Relaxed) {
        keeper.turn(&listener)?;
    }
    // A daemon that lives has descriptors of its own. Programs that none serves are ended before theirs close.
    for part in keeper.parts.values_mut().filter(|part| part.owner.is_none()) {
        part.held.end_all(options.grace);
    }
    if options.listener.is_none() {
        let _ = std::fs::remove_file(&options.socket);
    }
    Ok(())
}

/// The next connection and its process id. One of another user is turned away: `None`.
fn accept_own(listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32)>> {
    let (socket, peer) = accept(listener)?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        tracing::warn!(uid = peer.uid, "a connection of another user was turned away");
        return Ok(None);
    }
    Ok(Some((socket, peer.pid)))
}

impl Keeper {
    fn turn(&mut self, listener: &OwnedFd) -> io::Result<()> {
        let mut fds = vec![listener];
        fds.extend(self.connections.iter().map(|connection| &connection.socket));
        fds.extend(self.exits.pidfds());
        if wait_readable(&fds, TICK)? {
            self.accept(listener)?;
            self.hear();
            self.exits.report_ended();
        }
        for (share, part) in &mut self.parts {
            if part.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                part.deadline = None;
                part.held.end_all(self.grace);
                tracing::warn!(?share, "nobody came back for what was kept; it is given up");
            }
        }
        self.parts.retain(|_, part| part.owner.is_some() || !part.held.is_empty());
        Ok(())
    }

    fn accept(&mut self, listener: &OwnedFd) -> io::Result<()> {
        if self.connections.len() < CONNECTIONS_MAX
            && wait_readable(&[listener], Duration::ZERO)?
            && let Some((socket, pid)) = accept_own(listener)?
        {
            self.connected += 1;
            self.connections.push(Connection { socket, number: self.connected, pid, share: None });
        }
        Ok(())
    }

    /// One message of each connection that has one; those that have ended go.
    fn hear(&mut self) {
        for mut connection in std::mem::take(&mut self.connections) {
            let is_silent = !wait_readable(&[&connection.socket], Duration::ZERO).unwrap_or(true);
            if is_silent || self.heed(&mut connection) {
                self.connections.push(connection);
            } else if let Some(share) = connection.share {
                self.lose_owner(share, connection.number);
            }
        }
    }

    /// One message; false if the connection is over.
    fn heed(&mut self, connection: &mut Connection) -> bool {
        let Connection { socket, pid, share, .. } = &*connection;
        let is_owner = |of: Option<KeeperShare>| of.is_some() && of == *share;
        match receive_frame(socket) {
            Ok((Frame::Hold(put), fds))
                if is_owner(KeeperShare::of(put.kind, put.id)) || put.kind == HeldKind::Orphan =>
            {
                self.put(put, fds);
            }
            Ok((Frame::Release(kind, id), _)) if is_owner(KeeperShare::of(kind, id)) => {
                if let Some(part) = share.and_then(|share| self.parts.get_mut(&share)) {
                    part.held.drop(kind, id);
                }
            }
            Ok((Frame::Claim(wanted), _)) if share.is_none_or(|share| share == wanted) => {
                return self.give(connection, wanted);
            }
            Ok((Frame::WatchDaemon { pid, name }, fds)) => {
                if let Some(pidfd) = fds.into_iter().next() {
                    self.exits.watch(name, pid, pidfd);
                }
            }
            Ok((Frame::Sync, _)) => return send_frame(socket, &Frame::Sync, &[]).is_ok(),
            Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok((frame, _)) => {
                tracing::warn!(pid, ?frame, "this is not for a keeper, or not from its owner");
            }
            Err(ReceiveError::Frame(error)) => {
                tracing::warn!(pid, %error, "a message is unintelligible");
            }
            Err(_) => return false,
        }
        true
    }

    fn put(&mut self, put: HeldItem, fds: Vec<OwnedFd>) {
        if let Some(share) = KeeperShare::of(put.kind, put.id) {
            self.parts.entry(share).or_default().held.put(put, fds);
        }
    }

    /// A daemon takes over, unless another one has everything and lives.
    fn give(&mut self, connection: &mut Connection, share: KeeperShare) -> bool {
        let part = self.parts.entry(share).or_default();
        if let Some((_, owner)) = part.owner.filter(|(_, owner)| *owner != connection.pid) {
            let reason = match share {
                KeeperShare::Agent => {
                    format!("the agent that runs as process {owner} has its programs still")
                }
                KeeperShare::Node(id) => {
                    format!("node {id}, which runs as process {owner}, has its memory still")
                }
            };
            return send_frame(&connection.socket, &Frame::Refused(reason), &[]).is_ok();
        }
        for (put, fds) in part.held.iter() {
            if let Err(error) = send_frame(&connection.socket, &Frame::Hold(put.clone()), &fds) {
                tracing::error!(%error, "a daemon that wanted to take over is gone");
                return false;
            }
        }
        part.owner = Some((connection.number, connection.pid));
        part.deadline = None;
        connection.share = Some(share);
        send_frame(&connection.socket, &Frame::Sync, &[]).is_ok()
    }

    fn lose_owner(&mut self, share: KeeperShare, number: u64) {
        // It may have another connection by now.
        let is_its = |part: &&mut Part| part.owner.is_some_and(|(owner, _)| owner == number);
        let Some(part) = self.parts.get_mut(&share).filter(is_its) else { return };
        part.owner = None;
        if !part.held.is_empty() {
            match share {
                KeeperShare::Agent => {
                    let programs = part.held.programs();
                    tracing::warn!(programs, grace = ?self.grace, "the agent is gone; its programs wait");
                }
                KeeperShare::Node(node) => {
                    tracing::warn!(node, grace = ?self.grace, "a memory node is gone; its memory is kept");
                }
            }
            part.deadline = Some(Instant::now() + self.grace);
        }
    }
}
