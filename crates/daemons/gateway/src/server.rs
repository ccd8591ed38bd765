//! The gateway process: accepts connections, and passes each to the relay of its user.

use std::collections::BTreeMap;
use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use aquifer_channel::owners::owner;
use aquifer_channel::peer::{PeerCredentials, peer_credentials};
use aquifer_channel::try_send_frame;
use aquifer_ipc::Frame;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, accept_with, shutdown, socketpair,
};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, waitpid};

use crate::child;
use crate::closers::RefusedConnections;
use crate::messages::{self, Connection, ListenerKind, MESSAGE_BYTES_MAX, Order, RelayStarted};
use crate::relay::Relay;
use crate::user_socket;

/// Maximum number of processes that serve a user or wait for its descriptors.
const RELAYS_PER_USER_MAX: usize = 4;
/// Maximum number of such processes of a user with all of its subordinate ids, or of a container of
/// root.
const RELAYS_PER_OWNER_MAX: usize = 64;
/// Maximum number of such processes of all users.
const RELAYS_MAX: usize = 1024;
/// Maximum number of connections that are accepted at a listener in a turn.
const ACCEPTS_PER_TURN_MAX: usize = 16;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Interval at which ended relays are reaped.
const REAP_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between log lines about refused connections.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A socket at which connections are accepted.
#[derive(Debug)]
struct Listener {
    kind: ListenerKind,
    socket: OwnedFd,
}

/// The relays of a user.
#[derive(Debug, Default)]
struct UserRelays {
    /// The relay that receives connections.
    current: Option<RelayEnd>,
    /// The owner of the user's id.
    owner: u32,
    /// All relays that have not ended. A relay may take long to close a user's descriptors.
    processes: Vec<Pid>,
}

/// The gateway's end of a relay.
#[derive(Debug)]
struct RelayEnd {
    connections: OwnedFd,
    /// Receives a byte for each connection that the gateway has no reference to any more.
    released: PipeWriter,
}

/// The state of the gateway process.
///
/// The process never does the last close of a connection: no signal ends the wait of a userfaultfd
/// in the queue whose memory is locked.
#[derive(Debug)]
struct Server {
    daemon: OwnedFd,
    listeners: BTreeMap<u64, Listener>,
    relays: BTreeMap<u32, UserRelays>,
    refused: RefusedConnections,
    buffer: Box<[u8]>,
    next_log: Instant,
}

/// Serves as the gateway of the daemon at the other end of a socket until the daemon ends.
///
/// Must be called in a process with one thread. The process also ends with its parent.
pub fn serve(daemon: OwnedFd) {
    // The gateway of a killed daemon must not accept connections.
    let _set = set_parent_process_death_signal(Some(Signal::KILL));
    user_socket::catch_alarm();
    let mut server = Server {
        daemon,
        listeners: BTreeMap::new(),
        relays: BTreeMap::new(),
        refused: RefusedConnections::default(),
        buffer: vec![0; MESSAGE_BYTES_MAX].into_boxed_slice(),
        next_log: Instant::now(),
    };
    while server.turn() {}
}

impl Server {
    /// Waits for connections and orders, and handles them. Returns false if the daemon has ended.
    fn turn(&mut self) -> bool {
        let Some((has_order, ready)) = self.wait() else { return true };
        if has_order && !self.handle_order() {
            return false;
        }
        for listener in ready {
            self.accept(listener);
        }
        self.reap();
        self.close_refused();
        true
    }

    /// Whether there is an order, and the listeners with connections; `None` after an error.
    fn wait(&self) -> Option<(bool, Vec<u64>)> {
        let mut polled = vec![PollFd::new(&self.daemon, PollFlags::IN)];
        polled.extend(self.listeners.values().map(|listener| PollFd::new(&listener.socket, PollFlags::IN)));
        let timeout = Timespec::try_from(REAP_INTERVAL).unwrap_or_default();
        let is_idle = self.relays.is_empty() && self.refused.is_empty();
        let timeout = if is_idle { None } else { Some(&timeout) };
        poll(&mut polled, timeout).ok()?;
        let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
        let has_order = ready.next().unwrap_or(false);
        let ready = self.listeners.keys().zip(ready).filter(|(_, ready)| *ready);
        Some((has_order, ready.map(|(listener, _)| *listener).collect()))
    }

    /// Handles an order of the daemon. Returns false if the daemon has ended.
    fn handle_order(&mut self) -> bool {
        match messages::receive::<Order>(&self.daemon, &mut self.buffer) {
            Ok(Some((Order::Listen { listener, kind }, _, mut descriptors))) => {
                if let Some(socket) = descriptors.pop() {
                    let _nonblocking = rustix::io::ioctl_fionbio(&socket, true);
                    user_socket::request_senders(&socket);
                    self.listeners.insert(listener, Listener { kind, socket });
                }
                true
            }
            Ok(Some((Order::Close { listener }, ..))) => {
                if let Some(listener) = self.listeners.remove(&listener) {
                    self.close_listener(&listener.socket);
                }
                true
            }
            Ok(None) => false,
            Err(error) => {
                tracing::error!(%error, "cannot receive an order of the daemon");
                false
            }
        }
    }

    /// Empties the queue of a listener and closes it. The daemon may do the last close.
    fn close_listener(&mut self, socket: &OwnedFd) {
        // No user can connect any more.
        let _was_closed = shutdown(socket, Shutdown::Both);
        loop {
            match accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(connection) => self.refuse(connection),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return,
            }
        }
    }

    /// Refuses a connection. Its queue may have descriptors.
    fn refuse(&mut self, socket: OwnedFd) {
        self.refused.add(socket);
    }

    /// Starts a closer for refused connections, if necessary.
    fn close_refused(&mut self) {
        if let Err(error) = self.refused.close() {
            self.log_refusal(None, &error);
        }
    }

    /// Accepts connections at a listener.
    fn accept(&mut self, listener: u64) {
        for _ in 0..ACCEPTS_PER_TURN_MAX {
            let Some(Listener { kind, socket }) = self.listeners.get(&listener) else { return };
            let kind = *kind;
            match accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(socket) => match peer_credentials(&socket) {
                    Ok(peer) if is_admitted(kind, peer.uid) => self.pass_on(kind, peer, socket),
                    _ => self.refuse(socket),
                },
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                Err(error) => {
                    self.log_refusal(None, &error.into());
                    // The listener stays readable, so an immediate retry would only use CPU time.
                    std::thread::sleep(ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// Passes a connection to the relay of its user.
    fn pass_on(&mut self, kind: ListenerKind, peer: PeerCredentials, socket: OwnedFd) {
        let PeerCredentials { uid, pid } = peer;
        match self.send_to_relay(uid, &Connection { kind, pid }, &socket) {
            Ok(()) => {
                // This is the last reference only if the relay was killed meanwhile.
                user_socket::close_reference(socket);
                self.release_last(uid);
            }
            Err(error) => {
                self.log_refusal(Some(uid), &error);
                let refusal =
                    Frame::Refused(format!("the agent accepts no connections of user {uid}: {error}"));
                let _closed = try_send_frame(&socket, &refusal, &[]);
                self.refuse(socket);
            }
        }
    }

    /// Sends a connection to the relay of its user.
    fn send_to_relay(&mut self, uid: u32, connection: &Connection, socket: &OwnedFd) -> io::Result<()> {
        loop {
            let relay = self.relay_of(uid)?;
            match messages::send(&relay.connections, connection, &[], &[socket.as_fd()], SendFlags::DONTWAIT)
            {
                // The relay ends because it had no connections, and has not received this one.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.forget_relay(uid),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::other("its relay has not received earlier connections yet"));
                }
                sent => return sent,
            }
        }
    }

    /// Notifies the relay of a user that it may close the connection that was sent to it last.
    fn release_last(&mut self, uid: u32) {
        let current = self.relays.get_mut(&uid).and_then(|relays| relays.current.as_mut());
        if current.is_some_and(|relay| relay.released.write_all(&[1]).is_err()) {
            // A relay without a gateway may close all connections.
            self.forget_relay(uid);
        }
    }

    /// Returns the relay that receives the connections of a user. Starts one if there is none.
    fn relay_of(&mut self, uid: u32) -> io::Result<&RelayEnd> {
        if self.relays.get(&uid).is_none_or(|relays| relays.current.is_none()) {
            let current = self.start_relay(uid)?;
            self.relays.entry(uid).or_default().current = Some(current);
        }
        self.relays.get(&uid).and_then(|relays| relays.current.as_ref()).ok_or(io::ErrorKind::NotFound.into())
    }

    fn forget_relay(&mut self, uid: u32) {
        self.relays.entry(uid).or_default().current = None;
    }

    /// Starts a relay for a user. Returns the gateway's end.
    fn start_relay(&mut self, uid: u32) -> io::Result<RelayEnd> {
        self.reap();
        let of_all: usize = self.relays.values().map(|relays| relays.processes.len()).sum();
        let of_user = self.relays.get(&uid).map_or(0, |relays| relays.processes.len());
        if of_user >= RELAYS_PER_USER_MAX {
            return Err(io::Error::other("its relays wait for the descriptors that it has sent"));
        }
        // Counts by owner: a user could use up all relays by its subordinate ids.
        let owner = owner(uid);
        let same_owner = self.relays.values().filter(|relays| relays.owner == owner);
        if same_owner.map(|relays| relays.processes.len()).sum::<usize>() >= RELAYS_PER_OWNER_MAX {
            return Err(io::Error::other(format!(
                "{RELAYS_PER_OWNER_MAX} relays run already for ids of user {owner} (/etc/subuid)"
            )));
        }
        if of_all >= RELAYS_MAX {
            return Err(io::Error::other(format!("{RELAYS_MAX} relays of users run already")));
        }
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let ((gateway, relay), (daemon, of_daemon)) = (pair()?, pair()?);
        let (reader, released) = io::pipe()?;
        rustix::io::ioctl_fionbio(&released, true)?;
        let kept = [relay.as_raw_fd(), daemon.as_raw_fd(), reader.as_raw_fd()];
        let process = child::start(&kept, || Relay::new(uid, relay, daemon, reader).run())?;
        let relays = self.relays.entry(uid).or_default();
        relays.owner = owner;
        relays.processes.push(process);
        let started = RelayStarted { uid };
        messages::send(&self.daemon, &started, &[], &[of_daemon.as_fd()], SendFlags::empty())?;
        Ok(RelayEnd { connections: gateway, released })
    }

    /// Removes relays that have ended.
    fn reap(&mut self) {
        while let Ok(Some((process, _))) = waitpid(None, WaitOptions::NOHANG) {
            self.relays.retain(|_, relays| {
                relays.processes.retain(|other| *other != process);
                !relays.processes.is_empty()
            });
        }
    }

    /// Logs that a connection was not accepted, at most once in an interval.
    fn log_refusal(&mut self, uid: Option<u32>, error: &io::Error) {
        if Instant::now() >= self.next_log {
            self.next_log = Instant::now() + LOG_INTERVAL;
            tracing::warn!(uid, %error, "refused a connection");
        }
    }
}

/// Whether a user may connect at a listener. A child that has sent a connect-back request gets its
/// secret, and a process with the secret could listen at the socket's name later, as if it were the
/// agent.
fn is_admitted(kind: ListenerKind, uid: u32) -> bool {
    match kind {
        ListenerKind::Own | ListenerKind::Shared => true,
        ListenerKind::ConnectBack { users, .. } => [uid, u32::MAX].iter().any(|user| users.contains(user)),
    }
}
