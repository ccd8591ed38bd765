//! Frames over sequenced-packet Unix sockets, with the descriptors that come with them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use aquifer_ipc::{FRAME_BYTES_MAX, Frame, FrameError, Put};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

/// Descriptors that may come with a frame.
const FDS_MAX: usize = 8;

/// Something that a keeper holds, as it comes back.
#[derive(Debug)]
pub struct Kept {
    /// What it is.
    pub put: Put,
    /// The descriptors with which it was put. Behind them a program whose process is known has a pidfd.
    pub fds: Vec<OwnedFd>,
}

/// Why no frame was received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The socket failed.
    #[error("the connection failed: {0}")]
    System(#[from] io::Error),
    /// What came is not a frame.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The other end has closed.
    #[error("the other end has closed the connection")]
    Closed,
}

/// A socket for frames, as yet without a name or a peer.
///
/// # Errors
/// The system's.
pub fn frame_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Connect to who listens at a path.
///
/// # Errors
/// If nobody does.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = frame_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Send one frame with descriptors.
///
/// # Errors
/// If the other end is gone.
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

/// The same, if that can be done at once.
///
/// # Errors
/// If the other end is gone, or has heard nothing for so long that there is no room.
pub fn try_send_frame(socket: impl AsFd, frame: &Frame, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_with(socket, frame, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// Receive one frame with its descriptors.
///
/// # Errors
/// If the other end is gone or sends anything but a frame.
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
    Ok((Frame::parse(&bytes[..received.bytes])?, fds))
}
