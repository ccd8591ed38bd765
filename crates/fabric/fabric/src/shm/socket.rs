//! Unix sockets of type SEQPACKET: whole messages with descriptors, and a hang-up when the peer
//! dies.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, PidfdFlags};

use super::handshake::MESSAGE_BYTES_MAX;
use crate::handshake::HANDSHAKE_TIMEOUT;

/// Bound of the connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Bound of the descriptors of one message. Two are sent: control memory and mailbox, or the memory
/// and the words of a region.
const DESCRIPTORS_MAX: usize = 4;

/// Listens at `path`, for this user only. Replaces a socket on which no process listens. Also
/// returns the inode of the socket, by which it can be recognised.
pub(super) fn listen(path: &Path) -> io::Result<(OwnedFd, u64)> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // Linux gives the file the mode of the socket, so other users can never connect.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    match rustix::net::bind(&socket, &address) {
        Err(rustix::io::Errno::ADDRINUSE) if is_abandoned(path, &address)? => {
            std::fs::remove_file(path)?;
            rustix::net::bind(&socket, &address)?;
        }
        other => other?,
    }
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
    let inode = std::fs::symlink_metadata(path)?.ino();
    rustix::net::listen(&socket, BACKLOG)?;
    Ok((socket, inode))
}

/// Whether the file is a socket on which no process listens.
fn is_abandoned(path: &Path, address: &SocketAddrUnix) -> io::Result<bool> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok(rustix::net::connect(&probe, address) == Err(rustix::io::Errno::CONNREFUSED))
}

/// Connects to `path`. Connecting, sending and receiving time out after [`HANDSHAKE_TIMEOUT`].
pub(super) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for timeout in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&socket, timeout, Some(HANDSHAKE_TIMEOUT))?;
    }
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Sends one message with descriptors.
pub(super) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one message with descriptors. An empty message is the end of the connection. A message
/// that is too long for the buffer is truncated, and then does not parse.
pub(super) fn receive(socket: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    bytes.truncate(received.bytes);
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel truncates the descriptors of a message at the process's limit.
        return Err(rustix::io::Errno::MFILE.into());
    }
    Ok((bytes, fds))
}

/// The process of a peer.
pub(super) struct PeerProcess {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
}

/// The process of the peer; `None` if it is this process or cannot be opened. The process holds its
/// socket, so while the socket is connected its id is not reused.
pub(super) fn peer_process(socket: &OwnedFd) -> Option<PeerProcess> {
    let pid = sockopt::socket_peercred(socket).ok()?.pid;
    if pid == rustix::process::getpid() {
        return None;
    }
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
    (!is_hung_up(socket)).then_some(PeerProcess { pid, pidfd })
}

/// The process id of the peer; 0 if it is unknown.
pub(super) fn peer_pid(socket: &OwnedFd) -> u32 {
    let pid = sockopt::socket_peercred(socket).map(|peer| peer.pid.as_raw_nonzero().get());
    pid.ok().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0)
}

/// Whether the peer has hung up.
pub(super) fn is_hung_up(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The user id of the peer when the connection was made.
pub(super) fn peer_uid(socket: &OwnedFd) -> io::Result<u32> {
    Ok(sockopt::socket_peercred(socket)?.uid.as_raw())
}
