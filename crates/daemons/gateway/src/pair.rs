//! A connection whose packets a relay copies between the user and the daemon.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aquifer_ipc::Frame;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

use crate::messages::{receive_packet, send_parts};
use crate::user_socket::{self, Received};

/// Maximum number of packets that are copied in one direction in a turn of the relay.
const PACKETS_PER_TURN_MAX: usize = 16;

/// An error: a user has sent a descriptor that only the end of the process may close.
#[derive(Debug)]
pub(crate) struct ForeignDescriptor;

/// A packet with descriptors.
#[derive(Debug)]
struct Packet {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// A connection of a user, and the socket to the daemon that carries its packets.
#[derive(Debug)]
pub(crate) struct Pair {
    user: OwnedFd,
    /// The user that has made the connection.
    uid: u32,
    /// Whether a frame may bring a userfaultfd.
    may_carry: fn(&Frame) -> bool,
    daemon: OwnedFd,
    /// A packet for which the user's queue has no room.
    to_user: Option<Packet>,
    /// A packet for which the daemon's queue has no room.
    to_daemon: Option<Packet>,
}

impl Pair {
    /// Creates a pair of sockets for a connection, and passes one end to `introduce`.
    ///
    /// # Errors
    /// The cause, with the user's socket.
    pub fn new(
        user: OwnedFd,
        uid: u32,
        may_carry: fn(&Frame) -> bool,
        introduce: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> Result<Self, (io::Error, OwnedFd)> {
        let make = || {
            let flags = SocketFlags::CLOEXEC;
            let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            introduce(other.as_fd())?;
            Ok(own)
        };
        match make() {
            Ok(daemon) => Ok(Self { user, uid, may_carry, daemon, to_user: None, to_daemon: None }),
            Err(error) => Err((error, user)),
        }
    }

    /// The ends to poll, with the events. An end that cannot make progress is left out, because
    /// the kernel reports a hang-up in any case.
    pub fn polled(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let flags = |can_read: bool, can_write: bool| {
            let read = if can_read { PollFlags::IN } else { PollFlags::empty() };
            if can_write { read | PollFlags::OUT } else { read }
        };
        let user = (self.user.as_fd(), flags(self.to_daemon.is_none(), self.to_user.is_some()));
        let daemon = (self.daemon.as_fd(), flags(self.to_user.is_none(), self.to_daemon.is_some()));
        [user, daemon].into_iter().filter(|(_, flags)| !flags.is_empty()).collect()
    }

    /// Copies waiting packets. Returns false if the connection has ended.
    ///
    /// # Errors
    /// If the user has sent a descriptor that must not be closed here.
    pub fn copy(&mut self, buffer: &mut [u8]) -> Result<bool, ForeignDescriptor> {
        Ok(self.copy_to_daemon(buffer)? && self.copy_to_user(buffer))
    }

    fn copy_to_daemon(&mut self, buffer: &mut [u8]) -> Result<bool, ForeignDescriptor> {
        for _ in 0..PACKETS_PER_TURN_MAX {
            let packet = match self.to_daemon.take() {
                Some(packet) => packet,
                None => match user_socket::receive(&self.user, self.uid, self.may_carry, buffer) {
                    Received::Nothing => return Ok(true),
                    Received::Packet(bytes, userfaultfd) => {
                        Packet { bytes, descriptors: userfaultfd.into_iter().collect() }
                    }
                    Received::Closed | Received::Refused => return Ok(false),
                    Received::Foreign(descriptors) => return Err(keep_until_end(descriptors)),
                },
            };
            match send(&self.daemon, packet) {
                Sent::Yes => {}
                Sent::Full(packet) => {
                    self.to_daemon = Some(packet);
                    return Ok(true);
                }
                Sent::Closed => return Ok(false),
            }
        }
        Ok(true)
    }

    fn copy_to_user(&mut self, buffer: &mut [u8]) -> bool {
        for _ in 0..PACKETS_PER_TURN_MAX {
            let packet = match self.to_user.take() {
                Some(packet) => packet,
                None => match receive_packet(&self.daemon, buffer, RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return false,
                    Ok((len, descriptors)) => Packet { bytes: buffer[..len].to_vec(), descriptors },
                    Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
                },
            };
            match send(&self.user, packet) {
                Sent::Yes => {}
                Sent::Full(packet) => {
                    self.to_user = Some(packet);
                    return true;
                }
                Sent::Closed => return false,
            }
        }
        true
    }

    /// Closes both ends.
    pub fn close(self) {
        user_socket::close(self.user);
    }
}

/// Leaves descriptors open until this process ends, which closes them.
pub(crate) fn keep_until_end(descriptors: Vec<OwnedFd>) -> ForeignDescriptor {
    std::mem::forget(descriptors);
    ForeignDescriptor
}

/// The outcome of a send.
enum Sent {
    Yes,
    Full(Packet),
    Closed,
}

fn send(socket: &OwnedFd, packet: Packet) -> Sent {
    let descriptors: Vec<_> = packet.descriptors.iter().map(AsFd::as_fd).collect();
    let sent = send_parts(socket, &[IoSlice::new(&packet.bytes)], &descriptors, SendFlags::DONTWAIT);
    match sent {
        Ok(()) => Sent::Yes,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::Full(packet),
        Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => Sent::Full(packet),
        Err(_) => Sent::Closed,
    }
}
