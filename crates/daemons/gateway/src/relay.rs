//! The relay of one user: receives the first packet of each connection, and introduces the
//! connection to the daemon.

use std::collections::VecDeque;
use std::io::{ErrorKind, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use aquifer_arena::calls::Call;
use aquifer_channel::passrights::refuse_descriptors;
use aquifer_channel::peer::peer_pidfd;
use aquifer_channel::try_send_frame;
use aquifer_ipc::Frame;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_passcred, set_socket_timeout};
use rustix::net::{SendFlags, Shutdown, shutdown};

use crate::messages::{self, Connection, IntroductionRecord, ListenerKind, MESSAGE_BYTES_MAX};
use crate::pair::{ForeignDescriptor, Pair, keep_until_end};
use crate::user_socket::{self, BUFFER_BYTES, Received};

/// Timeout of the first packet of a connection.
const FIRST_PACKET_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of each send and receive of the daemon on a connection.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections without a first packet.
const WAITING_MAX: usize = 1024;
/// Time without connections after which a relay ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The relay process of one user.
#[derive(Debug)]
pub(crate) struct Relay {
    uid: u32,
    /// The socket from the gateway; `None` once the gateway has ended.
    gateway: Option<OwnedFd>,
    /// The socket to the daemon; `None` once the daemon has ended.
    daemon: Option<OwnedFd>,
    /// Delivers a byte for each connection that the gateway has no reference to any more. `None`
    /// once the gateway has no reference to any connection.
    releases: Option<PipeReader>,
    /// Number of connections that the gateway has released, some of which may not have been
    /// received yet.
    released: usize,
    /// Connections that the gateway may still have: if this process closed one, the gateway could
    /// be the last to close it.
    received: VecDeque<WaitingConnection>,
    waiting: Vec<WaitingConnection>,
    pairs: Vec<Pair>,
    buffer: Box<[u8]>,
    last_used: Instant,
}

/// A connection whose first packet has not arrived.
#[derive(Debug)]
struct WaitingConnection {
    connection: Connection,
    socket: OwnedFd,
    since: Instant,
}

/// The descriptors that are readable, or writable if they were full.
#[derive(Debug, Default)]
struct Ready {
    gateway: bool,
    releases: bool,
    daemon: bool,
    waiting: Vec<bool>,
    pairs: Vec<bool>,
}

impl Relay {
    pub(crate) fn new(uid: u32, gateway: OwnedFd, daemon: OwnedFd, releases: PipeReader) -> Self {
        Self {
            uid,
            gateway: Some(gateway),
            daemon: Some(daemon),
            releases: Some(releases),
            released: 0,
            received: VecDeque::new(),
            waiting: Vec::new(),
            pairs: Vec::new(),
            buffer: vec![0; MESSAGE_BYTES_MAX.max(BUFFER_BYTES)].into_boxed_slice(),
            last_used: Instant::now(),
        }
    }

    /// Serves the user as long as the gateway runs, or a connection is copied.
    pub(crate) fn run(mut self) {
        user_socket::catch_alarm();
        while self.gateway.is_some() || self.has_connections() {
            if let Err(ForeignDescriptor) = self.turn() {
                let connections = self.pairs.len();
                tracing::warn!(
                    uid = self.uid,
                    connections,
                    "ended the relay of a user that has sent another descriptor than a userfaultfd"
                );
                return self.await_releases();
            }
        }
    }

    fn has_connections(&self) -> bool {
        !self.received.is_empty() || !self.waiting.is_empty() || !self.pairs.is_empty()
    }

    /// Waits until the gateway has no reference to a connection that it has sent: the end of this
    /// process closes them.
    fn await_releases(&mut self) {
        self.refuse_more();
        while self.gateway.is_some() {
            self.receive_connection();
        }
        while !self.received.is_empty() {
            self.receive_releases();
        }
    }

    /// Waits for packets, and handles them.
    fn turn(&mut self) -> Result<(), ForeignDescriptor> {
        let ready = self.wait();
        self.introduce_ready(&ready.waiting)?;
        self.copy_ready(&ready.pairs)?;
        if ready.daemon {
            // The next daemon does not know the connections that were not introduced.
            self.waiting.drain(..).for_each(|waiting| user_socket::close(waiting.socket));
            self.daemon = None;
            self.refuse_more();
        }
        if ready.releases {
            self.receive_releases();
        }
        if ready.gateway {
            self.receive_connection();
        }
        if self.has_connections() {
            self.last_used = Instant::now();
        } else if self.last_used.elapsed() >= IDLE_TIMEOUT {
            self.refuse_more();
        }
        Ok(())
    }

    /// Waits until something is ready, or a timeout is due.
    fn wait(&self) -> Ready {
        let mut polled: Vec<PollFd<'_>> = Vec::new();
        let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let has_room = self.waiting.len() + self.received.len() < WAITING_MAX;
        let gateway = self.gateway.as_ref().filter(|_| has_room);
        polled.extend(gateway.map(|gateway| read(gateway.as_fd())));
        let releases = self.releases.as_ref();
        polled.extend(releases.map(|releases| read(releases.as_fd())));
        // The kernel reports a hang-up without a requested event.
        let daemon = self.daemon.as_ref();
        polled.extend(daemon.map(|daemon| PollFd::from_borrowed_fd(daemon.as_fd(), PollFlags::empty())));
        polled.extend(self.waiting.iter().map(|waiting| read(waiting.socket.as_fd())));
        let pairs: Vec<_> = self.pairs.iter().map(Pair::polled).collect();
        polled.extend(pairs.iter().flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)));
        let timeout = if self.waiting.is_empty() { IDLE_TIMEOUT } else { FIRST_PACKET_TIMEOUT };
        let timeout = Timespec::try_from(timeout).unwrap_or_default();
        // After an error no descriptor is ready, and the next turn polls again.
        let _outcome = poll(&mut polled, Some(&timeout));
        let mut results = polled.iter().map(|polled| !polled.revents().is_empty());
        let mut next = || results.next().unwrap_or(false);
        Ready {
            gateway: gateway.is_some() && next(),
            releases: releases.is_some() && next(),
            daemon: daemon.is_some() && next(),
            waiting: self.waiting.iter().map(|_| next()).collect(),
            pairs: pairs.iter().map(|polled| polled.iter().fold(false, |ready, _| next() || ready)).collect(),
        }
    }

    /// Receives a connection from the gateway.
    fn receive_connection(&mut self) {
        let Some(gateway) = &self.gateway else { return };
        let received = messages::receive::<Connection>(gateway, &mut self.buffer);
        let Ok(Some((connection, _, mut descriptors))) = received else {
            self.gateway = None;
            return;
        };
        let Some(socket) = descriptors.pop() else { return };
        // The setting is inherited only if the gateway had the listener when the user connected.
        user_socket::request_senders(&socket);
        if let ListenerKind::ConnectBack { secret, .. } = connection.kind {
            // Without the secret the child connects once more.
            let _ = rustix::net::send(&socket, &secret, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        self.received.push_back(WaitingConnection { connection, socket, since: Instant::now() });
        self.admit_released();
    }

    /// Receives which connections the gateway has released.
    fn receive_releases(&mut self) {
        let Some(releases) = &mut self.releases else { return };
        match releases.read(&mut [0; 256]) {
            Ok(released @ 1..) => self.released += released,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The gateway has ended, or sends no more to this relay.
            Ok(0) | Err(_) => self.releases = None,
        }
        self.admit_released();
    }

    /// Admits the connections that the gateway has released.
    fn admit_released(&mut self) {
        let released = if self.releases.is_none() { usize::MAX } else { self.released };
        let taken = released.min(self.received.len());
        self.released = self.released.saturating_sub(taken);
        self.waiting.extend(self.received.drain(..taken));
    }

    /// Introduces the connections whose first packet has arrived.
    fn introduce_ready(&mut self, ready: &[bool]) -> Result<(), ForeignDescriptor> {
        let mut ready = ready.iter();
        for waiting in std::mem::take(&mut self.waiting) {
            if ready.next().copied().unwrap_or(false) {
                self.introduce(waiting)?;
            } else if waiting.since.elapsed() >= FIRST_PACKET_TIMEOUT {
                let timeout_s = FIRST_PACKET_TIMEOUT.as_secs();
                let refusal = Frame::Refused(format!("no request has come within {timeout_s} s"));
                let _closed = try_send_frame(&waiting.socket, &refusal, &[]);
                user_socket::close(waiting.socket);
            } else {
                self.waiting.push(waiting);
            }
        }
        Ok(())
    }

    /// Receives the first packet of a connection, and introduces the connection to the daemon.
    fn introduce(&mut self, waiting: WaitingConnection) -> Result<(), ForeignDescriptor> {
        let WaitingConnection { connection, socket, since } = waiting;
        let received =
            user_socket::receive(&socket, self.uid, user_socket::is_program_hello, &mut self.buffer);
        let (packet, userfaultfd) = match received {
            Received::Packet(packet, userfaultfd) => (packet, userfaultfd),
            Received::Nothing => {
                self.waiting.push(WaitingConnection { connection, socket, since });
                return Ok(());
            }
            Received::Closed => {
                user_socket::close(socket);
                return Ok(());
            }
            Received::Refused => {
                tracing::warn!(
                    uid = self.uid,
                    pid = connection.pid,
                    "closed a connection with descriptors that are not part of its request"
                );
                user_socket::close(socket);
                return Ok(());
            }
            Received::Foreign(descriptors) => return Err(keep_until_end(descriptors)),
        };
        let Some(daemon) = &self.daemon else {
            user_socket::close(socket);
            return Ok(());
        };
        let process = peer_pidfd(&socket).ok();
        let has_process = process.is_some();
        let record = IntroductionRecord { kind: connection.kind, pid: connection.pid, has_process };
        let introduce = |socket: BorrowedFd<'_>| {
            set_socket_timeout(socket, Timeout::Recv, Some(IO_TIMEOUT))?;
            set_socket_timeout(socket, Timeout::Send, Some(IO_TIMEOUT))?;
            let descriptors: Vec<_> =
                [Some(socket), process.as_ref().map(AsFd::as_fd), userfaultfd.as_ref().map(AsFd::as_fd)]
                    .into_iter()
                    .flatten()
                    .collect();
            messages::send(daemon, &record, &packet, &descriptors, SendFlags::empty())
        };
        // If this succeeds, no descriptor can enter the queue any more, so the daemon may have the
        // socket.
        let brings_userfaultfds = may_bring_userfaultfd_later(&packet);
        let is_safe = !brings_userfaultfds
            && refuse_descriptors(&socket)
            && user_socket::is_drained(&socket)
            // The daemon does not read the sender of a packet.
            && set_socket_passcred(&socket, false).is_ok();
        if is_safe {
            // If the daemon has ended, so has the connection.
            let _closed = introduce(socket.as_fd());
            return Ok(());
        }
        // Otherwise the daemon, at the close of its socket, would close packets that no process
        // has received.
        let may_carry: fn(&Frame) -> bool =
            if brings_userfaultfds { user_socket::is_serve_call } else { |_| false };
        let pair = Pair::new(socket, self.uid, may_carry, introduce);
        match pair {
            Ok(pair) => self.pairs.push(pair),
            Err((error, socket)) => {
                tracing::warn!(uid = self.uid, %error, "cannot introduce a connection to the daemon");
                user_socket::close(socket);
            }
        }
        Ok(())
    }

    /// Copies packets of the connections that are ready.
    fn copy_ready(&mut self, ready: &[bool]) -> Result<(), ForeignDescriptor> {
        let mut ready = ready.iter();
        for mut pair in std::mem::take(&mut self.pairs) {
            if !ready.next().copied().unwrap_or(false) || pair.copy(&mut self.buffer)? {
                self.pairs.push(pair);
            } else {
                pair.close();
            }
        }
        Ok(())
    }

    /// Makes the gateway start another relay for the next connection.
    fn refuse_more(&mut self) {
        if let Some(gateway) = &self.gateway {
            // Messages that the gateway has sent before are still received.
            let _was_closed = shutdown(gateway, Shutdown::Read);
            self.last_used = Instant::now();
        }
    }
}

/// Whether later packets of a connection may bring a userfaultfd, by its first packet.
fn may_bring_userfaultfd_later(packet: &[u8]) -> bool {
    match Frame::parse(packet) {
        Ok(Frame::SegmentCall(json)) => !matches!(
            serde_json::from_str(&json),
            Ok(call) if !matches!(call, Call::Attend { .. })
        ),
        _ => false,
    }
}
