//! Processes between the cache and other users that connect at its Unix socket.
//!
//! A message at a Unix socket can carry descriptors. The last close of one can wait for as long as
//! its sender wants, as that of a TCP socket with `SO_LINGER`, even if it was never received. Where
//! the kernel has `SO_PASSRIGHTS`, the socket accepts no descriptors. Elsewhere a process accepts
//! the connections, and a relay for each user copies bytes between them and sockets of its own,
//! which it passes to the cache. So only the relay of the user waits.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use aquifer_cache::server::Listener;
use aquifer_channel::passrights::refuse_descriptors;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType, sendmsg, shutdown, socketpair, sockopt,
};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::process;

/// Most relays, so most users at a time.
const RELAYS_MAX: usize = 256;
/// Most connections of one user.
const CONNECTIONS_MAX: usize = 1024;
/// Connections that are accepted before others are served.
const ACCEPTS_PER_TURN_MAX: usize = 16;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);
/// Time without connections after which a relay ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are copied at a time.
const COPY_BYTES: usize = 64 << 10;

/// Has a listener get no descriptors of other users: by the kernel, or by a relay process that
/// accepts in its place. Must be called before the first thread.
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

/// Accepts connections and passes each to the relay of its user, until the cache ends.
fn accept_all(listener: BorrowedFd<'_>, cache: &OwnedFd) {
    let mut relays: BTreeMap<u32, OwnedFd> = BTreeMap::new();
    loop {
        let mut polled = vec![
            PollFd::from_borrowed_fd(cache.as_fd(), PollFlags::empty()),
            PollFd::from_borrowed_fd(listener, PollFlags::IN),
        ];
        // Their ends are reported without being asked for.
        polled.extend(relays.values().map(|relay| PollFd::new(relay, PollFlags::empty())));
        if poll(&mut polled, None).is_err() {
            continue;
        }
        let mut events = polled.iter().map(PollFd::revents).collect::<Vec<_>>().into_iter();
        if events.next().is_none_or(|events| !events.is_empty()) {
            return;
        }
        let has_connections = events.next().is_some_and(|events| !events.is_empty());
        relays.retain(|_, _| events.next().is_none_or(|events| events.is_empty()));
        if has_connections {
            accept_some(listener, cache, &mut relays);
        }
    }
}

fn accept_some(listener: BorrowedFd<'_>, cache: &OwnedFd, relays: &mut BTreeMap<u32, OwnedFd>) {
    for _ in 0..ACCEPTS_PER_TURN_MAX {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Ok(connection) => {
                if let Err(error) = pass_on(&connection, cache, relays) {
                    tracing::warn!(%error, "refused a connection at the Unix socket");
                    let _ended = shutdown(&connection, Shutdown::Both);
                }
                // It is the last reference if the relay has ended.
                process::close_without_lingering(connection);
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

/// Passes a connection to the relay of its user.
fn pass_on(connection: &OwnedFd, cache: &OwnedFd, relays: &mut BTreeMap<u32, OwnedFd>) -> io::Result<()> {
    let uid = sockopt::socket_peercred(connection)?.uid.as_raw();
    loop {
        if !relays.contains_key(&uid) {
            if relays.len() >= RELAYS_MAX {
                return Err(io::Error::other(format!("{RELAYS_MAX} users have connections")));
            }
            let (own, of_relay) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            if process::fork()? {
                drop((own, std::mem::take(relays)));
                set_parent_process_death_signal(Some(Signal::KILL))?;
                Relay { cache, control: &of_relay, pairs: Vec::new(), last_used: Instant::now() }.run();
                std::process::exit(0);
            }
            relays.insert(uid, own);
        }
        match send_descriptor(&relays[&uid], connection.as_fd(), SendFlags::DONTWAIT) {
            // It ends because it had no connections.
            Err(Errno::PIPE | Errno::CONNRESET) => drop(relays.remove(&uid)),
            Err(Errno::AGAIN) => return Err(io::Error::other(format!("user {uid} has too many"))),
            sent => return Ok(sent?),
        }
    }
}

fn send_descriptor(socket: &OwnedFd, descriptor: BorrowedFd<'_>, flags: SendFlags) -> Result<(), Errno> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, flags)).map(drop)
}

/// The process of one user.
struct Relay<'a> {
    cache: &'a OwnedFd,
    /// The user's connections come here.
    control: &'a OwnedFd,
    pairs: Vec<Pair>,
    last_used: Instant,
}

impl Relay<'_> {
    fn run(mut self) {
        let mut buffer = vec![0; COPY_BYTES];
        let mut has_ended = false;
        while !has_ended || !self.pairs.is_empty() {
            let accepts = !has_ended && self.pairs.len() < CONNECTIONS_MAX;
            let control = if accepts { PollFlags::IN } else { PollFlags::empty() };
            let mut polled = vec![PollFd::new(self.control, control)];
            for pair in &self.pairs {
                polled.extend(pair.polled().map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
            }
            let timeout = Timespec::try_from(IDLE_TIMEOUT).unwrap_or_default();
            if poll(&mut polled, Some(&timeout)).is_err() {
                continue;
            }
            let has_connection = accepts && !polled[0].revents().is_empty();
            self.pairs.retain_mut(|pair| pair.copy(&mut buffer));
            if has_connection {
                has_ended = !self.receive();
            }
            if !self.pairs.is_empty() {
                self.last_used = Instant::now();
            } else if self.last_used.elapsed() >= IDLE_TIMEOUT {
                // What was sent before is received, and then the end.
                let _refused = shutdown(self.control, Shutdown::Read);
            }
        }
    }

    /// Receives a connection, and passes a socket for it to the cache. Returns false after the last
    /// one.
    fn receive(&mut self) -> bool {
        let user = match aquifer_cache::server::receive_socket(self.control.as_fd()) {
            Ok(Some(user)) => user,
            Ok(None) => return false,
            Err(_) => return true,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        // If the cache has ended, so does this process.
        if let Ok((own, of_cache)) = pair
            && send_descriptor(self.cache, of_cache.as_fd(), SendFlags::empty()).is_ok()
        {
            self.pairs.push(Pair { user: End::new(user), cache: End::new(own) });
        }
        true
    }
}

/// A connection of a user, and its copy to the cache.
struct Pair {
    user: End,
    cache: End,
}

/// One end of a pair, and the bytes that have come from it and not yet gone to the other one.
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

/// The connection is to be closed.
struct Broken;

impl Drop for Pair {
    fn drop(&mut self) {
        // This process has inherited another reference to its first connection.
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

    /// Copies what can be copied. Returns false if the connection has ended.
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
