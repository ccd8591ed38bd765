//! Processes between the cache and other users that connect at its Unix socket.
//!
//! A message at a Unix socket can carry descriptors. The last close of a descriptor can wait for as
//! long as its sender wants, such as the close of a TCP socket with `SO_LINGER`, even if it was
//! never received. Where the kernel has `SO_PASSRIGHTS`, the socket accepts no descriptors.
//! Elsewhere a process accepts the connections, and a relay for each user copies bytes between them
//! and sockets of its own, which it passes to the cache. So only the relay of that user waits.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, PipeReader, PipeWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use aquifer_cache::server::Listener;
use aquifer_channel::passrights::refuse_descriptors;
use aquifer_channel::peer::peer_credentials;
use aquifer_gateway::{RefusedConnections, start_child};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType, sendmsg, shutdown, socketpair,
};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::process;

/// Maximum number of relays, and thus of users, at a time.
const RELAYS_MAX: usize = 256;
/// Most connections of one user.
const CONNECTIONS_MAX: usize = 1024;
/// Connections that are accepted before others are served.
const ACCEPTS_PER_TURN_MAX: usize = 16;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Interval at which refused connections are closed while some wait.
const CLOSER_INTERVAL: Duration = Duration::from_secs(1);
/// Time without connections after which a relay ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are copied at a time.
const COPY_BYTES: usize = 64 << 10;

/// Prevents that a listener receives descriptors of other users: by the kernel, or by a relay
/// process that accepts in its place. Must be called before the first thread.
///
/// # Errors
/// If the process cannot be started.
pub fn protect(listener: Listener, is_open_to_others: bool) -> io::Result<Listener> {
    if refuse_descriptors(&listener) || !is_open_to_others {
        return Ok(listener);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (of_cache, of_relays) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::io::ioctl_fionbio(&of_relays, false)?;
    if process::fork()? {
        drop(of_cache);
        set_parent_process_death_signal(Some(Signal::KILL))?;
        process::ignore_stop_signals();
        accept_all(listener.as_fd(), &of_relays);
        std::process::exit(0);
    }
    Ok(listener.relayed(of_cache))
}

/// The relays of all users, and the refused connections.
#[derive(Default)]
struct Relays {
    of_users: BTreeMap<u32, RelayEnd>,
    refused: RefusedConnections,
}

/// The acceptor's end of a relay.
struct RelayEnd {
    connections: OwnedFd,
    /// Receives a byte for each connection that the acceptor has no reference to any more.
    released: PipeWriter,
}

/// Accepts connections and passes each to the relay of its user, until the cache ends.
///
/// The last close of a connection is never made by this process: no signal ends the wait of a
/// userfaultfd in the queue whose memory is locked.
fn accept_all(listener: BorrowedFd<'_>, cache: &OwnedFd) {
    let mut relays = Relays::default();
    loop {
        let mut polled = vec![
            PollFd::from_borrowed_fd(cache.as_fd(), PollFlags::empty()),
            PollFd::from_borrowed_fd(listener, PollFlags::IN),
        ];
        // The kernel reports hang-ups without a requested event.
        let ends = relays.of_users.values();
        polled.extend(ends.map(|relay| PollFd::new(&relay.connections, PollFlags::empty())));
        let timeout = Timespec::try_from(CLOSER_INTERVAL).unwrap_or_default();
        let timeout = if relays.refused.is_empty() { None } else { Some(&timeout) };
        if poll(&mut polled, timeout).is_err() {
            continue;
        }
        let mut events = polled.iter().map(PollFd::revents).collect::<Vec<_>>().into_iter();
        if events.next().is_none_or(|events| !events.is_empty()) {
            return;
        }
        let has_connections = events.next().is_some_and(|events| !events.is_empty());
        relays.of_users.retain(|_, _| events.next().is_none_or(|events| events.is_empty()));
        if has_connections {
            accept_some(listener, cache, &mut relays);
        }
        if let Err(error) = relays.refused.close() {
            tracing::warn!(%error, "cannot close refused connections");
        }
    }
}

fn accept_some(listener: BorrowedFd<'_>, cache: &OwnedFd, relays: &mut Relays) {
    for _ in 0..ACCEPTS_PER_TURN_MAX {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Ok(connection) => {
                if let Err((error, connection)) = relays.pass_on(connection, cache) {
                    tracing::warn!(%error, "refused a connection at the Unix socket");
                    relays.refused.add(connection);
                }
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection at the Unix socket");
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
    }
}

impl Relays {
    /// Passes a connection to the relay of its user.
    fn pass_on(&mut self, connection: OwnedFd, cache: &OwnedFd) -> Result<(), (io::Error, OwnedFd)> {
        let uid = match self.send(&connection, cache) {
            Ok(uid) => uid,
            Err(error) => return Err((error, connection)),
        };
        // This is the last reference only if the relay was killed meanwhile.
        process::close_without_lingering(connection);
        let relay = self.of_users.get_mut(&uid);
        if relay.is_some_and(|relay| relay.released.write_all(&[1]).is_err()) {
            // Without the byte, the relay may close all connections.
            self.of_users.remove(&uid);
        }
        Ok(())
    }

    /// Sends a connection to the relay of its user. Returns the user.
    fn send(&mut self, connection: &OwnedFd, cache: &OwnedFd) -> io::Result<u32> {
        let uid = peer_credentials(connection)?.uid;
        loop {
            if !self.of_users.contains_key(&uid) {
                if self.of_users.len() >= RELAYS_MAX {
                    return Err(io::Error::other(format!("{RELAYS_MAX} users have connections")));
                }
                self.of_users.insert(uid, start_relay(cache)?);
            }
            let relay = &self.of_users[&uid].connections;
            match send_descriptor(relay, connection.as_fd(), SendFlags::DONTWAIT) {
                // The relay ends because it had no connections.
                Err(Errno::PIPE | Errno::CONNRESET) => drop(self.of_users.remove(&uid)),
                Err(Errno::AGAIN) => return Err(io::Error::other(format!("user {uid} has too many"))),
                sent => return Ok(sent.map(|()| uid)?),
            }
        }
    }
}

/// Starts the relay of a user.
fn start_relay(cache: &OwnedFd) -> io::Result<RelayEnd> {
    let flags = SocketFlags::CLOEXEC;
    let (connections, control) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let (releases, released) = io::pipe()?;
    rustix::io::ioctl_fionbio(&released, true)?;
    let kept = [cache.as_raw_fd(), control.as_raw_fd(), releases.as_raw_fd()];
    start_child(&kept, || {
        // The relay ends with the acceptor.
        let _set = set_parent_process_death_signal(Some(Signal::KILL));
        Relay::new(cache, control, releases).run();
    })?;
    Ok(RelayEnd { connections, released })
}

fn send_descriptor(socket: &OwnedFd, descriptor: BorrowedFd<'_>, flags: SendFlags) -> Result<(), Errno> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, flags)).map(drop)
}

/// The relay process of one user.
struct Relay<'a> {
    cache: &'a OwnedFd,
    /// The socket at which the user's connections are received.
    control: OwnedFd,
    /// Delivers a byte for each connection that the acceptor has no reference to any more. `None`
    /// once the acceptor has no reference to any connection.
    releases: Option<PipeReader>,
    /// Number of connections that the acceptor has released, less those that were received and
    /// admitted. Negative while a lost connection is not released.
    released: isize,
    /// Connections that the acceptor may still have: if this process closed one, the acceptor could
    /// be the last to close it.
    received: VecDeque<OwnedFd>,
    pairs: Vec<Pair>,
    last_used: Instant,
}

impl<'a> Relay<'a> {
    fn new(cache: &'a OwnedFd, control: OwnedFd, releases: PipeReader) -> Self {
        Self {
            cache,
            control,
            releases: Some(releases),
            released: 0,
            received: VecDeque::new(),
            pairs: Vec::new(),
            last_used: Instant::now(),
        }
    }

    fn run(mut self) {
        let mut buffer = vec![0; COPY_BYTES];
        let mut has_ended = false;
        while !has_ended || !self.received.is_empty() || !self.pairs.is_empty() {
            let accepts = !has_ended && self.pairs.len() + self.received.len() < CONNECTIONS_MAX;
            let control = if accepts { PollFlags::IN } else { PollFlags::empty() };
            let mut polled = vec![PollFd::new(&self.control, control)];
            let releases = self.releases.as_ref();
            polled.extend(releases.map(|releases| PollFd::new(releases, PollFlags::IN)));
            for pair in &self.pairs {
                polled.extend(pair.polled().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
            }
            let timeout = Timespec::try_from(IDLE_TIMEOUT).unwrap_or_default();
            if poll(&mut polled, Some(&timeout)).is_err() {
                continue;
            }
            let has_connection = accepts && !polled[0].revents().is_empty();
            let has_release = releases.is_some() && !polled[1].revents().is_empty();
            self.pairs.retain_mut(|pair| pair.copy(&mut buffer));
            if has_connection {
                has_ended = !self.receive();
            }
            if has_release {
                self.receive_releases();
            }
            self.admit_released();
            if !self.pairs.is_empty() || !self.received.is_empty() {
                self.last_used = Instant::now();
            } else if self.last_used.elapsed() >= IDLE_TIMEOUT {
                // Messages that were sent before are still received.
                let _refused = shutdown(&self.control, Shutdown::Read);
            }
        }
    }

    /// Receives a connection. Returns false after the last one.
    fn receive(&mut self) -> bool {
        match aquifer_cache::server::receive_socket(self.control.as_fd()) {
            Ok(Some(user)) => self.received.push_back(user),
            Ok(None) => return false,
            // This process has no free descriptor, so the connection is lost.
            Err(Errno::MFILE) => self.released -= 1,
            Err(_) => {}
        }
        true
    }

    /// Receives which connections the acceptor has released.
    fn receive_releases(&mut self) {
        let Some(releases) = &mut self.releases else { return };
        match releases.read(&mut [0; 256]) {
            Ok(released @ 1..) => self.released += released.cast_signed(),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The acceptor has ended, or sends no more to this relay.
            Ok(0) | Err(_) => self.releases = None,
        }
    }

    /// Passes a socket to the cache for each connection that the acceptor has released.
    fn admit_released(&mut self) {
        let released = if self.releases.is_none() { isize::MAX } else { self.released.max(0) };
        let taken = released.unsigned_abs().min(self.received.len());
        self.released -= taken.cast_signed();
        for user in self.received.drain(..taken) {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            // If the cache has ended, so does this process.
            if let Ok((own, of_cache)) = pair
                && send_descriptor(self.cache, of_cache.as_fd(), SendFlags::empty()).is_ok()
            {
                self.pairs.push(Pair { user: End::new(user), cache: End::new(own) });
            }
        }
    }
}

/// A connection of a user, and the socket to the cache that carries its bytes.
struct Pair {
    user: End,
    cache: End,
}

/// One end of a pair, and the bytes that it has received and that were not sent to the other end
/// yet.
struct End {
    socket: OwnedFd,
    bytes: Vec<u8>,
    has_ended: bool,
}

impl End {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, bytes: Vec::new(), has_ended: false }
    }
}

/// An error after which the connection is closed.
struct Broken;

impl Drop for Pair {
    fn drop(&mut self) {
        // The user is notified, though the close may wait.
        let _ended = shutdown(&self.user.socket, Shutdown::Both);
    }
}

impl Pair {
    /// The ends to poll, with the events.
    fn polled(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let flags = |end: &End, other: &End| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, end.bytes.is_empty() && !end.has_ended);
            flags.set(PollFlags::OUT, !other.bytes.is_empty());
            flags
        };
        let ends = [(&self.user, &self.cache), (&self.cache, &self.user)];
        let polled = ends.map(|(end, other)| (end.socket.as_fd(), flags(end, other)));
        // The kernel reports a hang-up in any case, so an idle end is left out.
        polled.into_iter().filter(|(_, flags)| !flags.is_empty())
    }

    /// Copies bytes in both directions without blocking. Returns false if the connection has ended.
    fn copy(&mut self, buffer: &mut [u8]) -> bool {
        let copied = copy(&mut self.user, &self.cache, buffer)
            .and_then(|()| copy(&mut self.cache, &self.user, buffer));
        // The cache ends its side when it has sent all.
        copied.is_ok() && !(self.cache.has_ended && self.cache.bytes.is_empty())
    }
}

fn copy(from: &mut End, to: &End, buffer: &mut [u8]) -> Result<(), Broken> {
    if from.bytes.is_empty() && !from.has_ended {
        match rustix::net::recv(&from.socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => from.has_ended = true,
            Ok((len, _)) => from.bytes.extend_from_slice(&buffer[..len]),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(_) => return Err(Broken),
        }
        if from.has_ended {
            let _ended = shutdown(&to.socket, Shutdown::Write);
        }
    }
    if !from.bytes.is_empty() {
        match rustix::net::send(&to.socket, &from.bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => drop(from.bytes.drain(..sent)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => return Err(Broken),
        }
    }
    Ok(())
}
