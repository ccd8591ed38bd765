//! The agent's socket, spoken to directly.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use aquifer_ipc::{FRAME_BYTES_MAX, Frame};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg,
    socket_with,
};

/// An agent that is silent for so long will say nothing.
const PATIENCE: Duration = Duration::from_secs(20);

/// One connection.
#[derive(Debug)]
pub struct Connection(OwnedFd);

impl Connection {
    /// Connect to a Unix socket of packets.
    ///
    /// # Errors
    /// If nobody listens.
    pub fn open(path: &Path) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self(socket))
    }

    /// Send bytes as they are.
    ///
    /// # Errors
    /// If the other end is gone.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut rustix::net::SendAncillaryBuffer::default(),
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }

    /// Send a frame.
    ///
    /// # Errors
    /// If the other end is gone.
    pub fn send_frame(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        self.send(&bytes)
    }

    /// The next answer; `None` if the other end has hung up.
    ///
    /// # Errors
    /// If there is none in time, or it is no frame.
    pub fn receive(&self) -> io::Result<Option<Frame>> {
        let mut bytes = vec![0; FRAME_BYTES_MAX + 1];
        let mut part = [IoSliceMut::new(&mut bytes)];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::default();
        let received = match recvmsg(&self.0, &mut part, &mut ancillary, RecvFlags::empty()) {
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => other?.bytes,
        };
        if received == 0 {
            return Ok(None);
        }
        Frame::parse(&bytes[..received]).map(Some).map_err(io::Error::other)
    }
}
