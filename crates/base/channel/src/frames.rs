//! Frames over sequenced-packet Unix sockets, with the descriptors that come with them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use aquifer_ipc::{FRAME_BYTES_MAX, Frame, FrameError, HeldItem};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

use crate::peer::peer_credentials;

/// Maximum number of descriptors in a frame.
const FDS_MAX: usize = 12;

/// Error: the keeper does not hold an item, for this reason.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct HoldRefused(pub String);

/// An item that the keeper returns to the daemon that claims its share.
#[derive(Debug)]
pub struct RestoredItem {
    /// The item.
    pub item: HeldItem,
    /// The descriptors that the keeper received with it.
    pub fds: Vec<OwnedFd>,
}

/// Why no frame was received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// A system call failed.
    #[error("cannot receive from the socket: {0}")]
    System(#[from] io::Error),
    /// The packet is not a frame of this version.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The kernel has cut the descriptors of a frame.
    #[error("the descriptors of a message were cut: this process has too many open files")]
    Cut,
    /// The other end has closed the connection.
    #[error("the other end has closed the connection")]
    Closed,
}

/// Creates a socket for frames, without an address or a peer.
///
/// # Errors
/// If the system call fails.
pub fn frame_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Connects to the process that listens at a path. The process must belong to this user or to
/// root: a process of another user must not get memory, or requests for memory.
///
/// # Errors
/// If no process listens there, or the path is too long.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    connect_socket(frame_socket()?, path)
}

/// Connects as [`connect`] does. No call on the socket waits longer than `timeout`: a process that
/// is stopped accepts as many connections as its queue has room for, and answers none.
///
/// # Errors
/// Those of [`connect`], and [`io::ErrorKind::WouldBlock`] after the timeout.
pub fn connect_with_timeout(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = frame_socket()?;
    set_timeout(&socket, Some(timeout))?;
    connect_socket(socket, path)
}

/// Limits the time for which a call on a socket waits; `None` for no limit. A timeout of zero
/// counts as 1 ms.
///
/// # Errors
/// If a system call fails.
pub fn set_timeout(socket: &OwnedFd, timeout: Option<Duration>) -> io::Result<()> {
    // For the kernel, zero is no limit.
    let timeout = timeout.map(|timeout| timeout.max(Duration::from_millis(1)));
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(socket, direction, timeout)?;
    }
    Ok(())
}

fn connect_socket(socket: OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    check_owner(&socket, path)?;
    Ok(socket)
}

/// Checks that the process that listens is one of root or of this user.
fn check_owner(socket: &OwnedFd, path: &Path) -> io::Result<()> {
    let (owner, own) = (peer_credentials(socket)?.uid, rustix::process::geteuid().as_raw());
    if [0, own].contains(&owner) {
        return Ok(());
    }
    let path = path.display();
    let reason = format!("user {owner} listens at {path}, and only root or user {own} is trusted there");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

/// Sends one frame with descriptors. Waits while the socket is full.
///
/// # Errors
/// If the other end has closed the connection.
pub fn send_frame(socket: impl AsFd, frame: &Frame, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, frame, fds, SendFlags::NOSIGNAL)
}

fn send_with(socket: impl AsFd, frame: &Frame, fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// Sends one frame with descriptors, without waiting.
///
/// # Errors
/// If the other end has closed the connection, or the socket is full.
pub fn try_send_frame(socket: impl AsFd, frame: &Frame, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, frame, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// Receives one frame with its descriptors. Waits for it.
///
/// # Errors
/// If the other end has closed the connection or sends something that is not a frame.
pub fn receive_frame(socket: impl AsFd) -> Result<(Frame, Vec<OwnedFd>), ReceiveError> {
    let mut bytes = vec![0; FRAME_BYTES_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other.map_err(io::Error::from)?,
        }
    };
    if received.bytes == 0 {
        return Err(ReceiveError::Closed);
    }
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(ReceiveError::Cut);
    }
    Ok((Frame::parse(&bytes[..received.bytes])?, fds))
}
