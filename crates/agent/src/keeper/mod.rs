//! The keeper: a small process that holds what must outlive the agent.
//!
//! When the last reference to a userfaultfd closes, the kernel answers missing pages with zeros. So the agent's death must not
//! close it: the keeper has another reference. Programs then wait. The agent that comes next takes back all there is, with the memory in
//! which the one before kept its books, and goes on. If none comes within the grace time, the keeper ends the programs; none ever
//! reads a zero that it did not write.
//!
//! - [`held`]: what is held, and for whom. `port` is the agent's end of the connection.

mod held;
mod port;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_channel::{ReceiveError, receive_frame, send_frame};
use aquifer_ipc::{Frame, KeptKind};

use self::held::Held;
use crate::socket::{accept_own, listen_or_take, raise_descriptor_limit, wait_readable};

pub(crate) use port::KeeperPort;

/// How often to look around.
const TICK: Duration = Duration::from_millis(100);
/// Connections at once: the agent's, that of its shadow, and those of the next agent.
const CONNECTIONS_MAX: usize = 16;

/// How to run a keeper.
#[derive(Debug)]
pub struct KeeperOptions {
    /// Where it listens.
    pub socket: PathBuf,
    /// How long programs wait for an agent that died.
    pub grace: Duration,
    /// A socket that listens at `socket` already.
    pub listener: Option<OwnedFd>,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    pid: u32,
}

#[derive(Debug)]
struct Keeper {
    grace: Duration,
    connections: Vec<Connection>,
    /// The agent's process, while it is connected: what is held is its own.
    owner: Option<u32>,
    /// When programs are ended if no agent comes.
    deadline: Option<Instant>,
    held: Held,
}

/// Hold things until `stop`.
///
/// # Errors
/// If it cannot listen.
pub fn serve(options: &KeeperOptions, stop: &AtomicBool, ready: impl FnOnce()) -> io::Result<()> {
    raise_descriptor_limit();
    let listener = listen_or_take(&options.socket, options.listener.as_ref())?;
    let mut keeper = Keeper {
        grace: options.grace,
        connections: Vec::new(),
        owner: None,
        deadline: None,
        held: Held::default(),
    };
    ready();
    while !stop.load(Relaxed) {
        keeper.turn(&listener)?;
    }
    // An agent that lives has descriptors of its own. Programs that none serves are ended before theirs close.
    if keeper.owner.is_none() {
        keeper.held.end_all(options.grace);
    }
    if options.listener.is_none() {
        let _ = std::fs::remove_file(&options.socket);
    }
    Ok(())
}

impl Keeper {
    fn turn(&mut self, listener: &OwnedFd) -> io::Result<()> {
        let mut fds = vec![listener];
        fds.extend(self.connections.iter().map(|connection| &connection.socket));
        if wait_readable(&fds, TICK)? {
            self.accept(listener)?;
            self.hear();
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.deadline = None;
            self.held.end_all(self.grace);
        }
        Ok(())
    }

    fn accept(&mut self, listener: &OwnedFd) -> io::Result<()> {
        if self.connections.len() < CONNECTIONS_MAX
            && wait_readable(&[listener], Duration::ZERO)?
            && let Some((socket, pid)) = accept_own(listener)?
        {
            self.connections.push(Connection { socket, pid });
        }
        Ok(())
    }

    /// One message of each connection that has one; those that have ended go.
    fn hear(&mut self) {
        for connection in std::mem::take(&mut self.connections) {
            let is_silent = !wait_readable(&[&connection.socket], Duration::ZERO).unwrap_or(true);
            if is_silent || self.heed(&connection) {
                self.connections.push(connection);
            } else if self.owner == Some(connection.pid) {
                self.lose_owner();
            }
        }
    }

    /// One message; false if the connection is over.
    fn heed(&mut self, connection: &Connection) -> bool {
        let is_owner = self.owner == Some(connection.pid);
        match receive_frame(&connection.socket) {
            Ok((Frame::Put(put), fds)) if is_owner || put.kind == KeptKind::Orphan => self.held.put(put, fds),
            Ok((Frame::Drop(kind, id), _)) if is_owner => self.held.drop(kind, id),
            Ok((Frame::Take, _)) => return self.give(connection),
            Ok((Frame::Taken, _)) => return send_frame(&connection.socket, &Frame::Taken, &[]).is_ok(),
            Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Ok((frame, _)) => {
                tracing::warn!(
                    pid = connection.pid,
                    ?frame,
                    "this is not for a keeper, or not from its agent"
                );
            }
            Err(ReceiveError::Frame(error)) => {
                tracing::warn!(pid = connection.pid, %error, "a message is unintelligible");
            }
            Err(_) => return false,
        }
        true
    }

    /// An agent takes over, unless another one has everything and lives.
    fn give(&mut self, connection: &Connection) -> bool {
        if let Some(owner) = self.owner.filter(|owner| *owner != connection.pid) {
            let reason = format!("the agent that runs as process {owner} has its programs still");
            return send_frame(&connection.socket, &Frame::Refused(reason), &[]).is_ok();
        }
        for (put, fds) in self.held.iter() {
            if let Err(error) = send_frame(&connection.socket, &Frame::Put(put.clone()), &fds) {
                tracing::error!(%error, "an agent that wanted to take over is gone");
                return false;
            }
        }
        self.owner = Some(connection.pid);
        self.deadline = None;
        send_frame(&connection.socket, &Frame::Taken, &[]).is_ok()
    }

    fn lose_owner(&mut self) {
        self.owner = None;
        let programs = self.held.programs();
        if !self.held.is_empty() {
            tracing::warn!(programs, grace = ?self.grace, "the agent is gone; its programs wait");
            self.deadline = Some(Instant::now() + self.grace);
        }
    }
}
