//! Direct connections to the agent's socket.

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

/// Time to wait for an answer of the agent.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to the agent.
#[derive(Debug)]
pub struct Connection(OwnedFd);

impl Connection {
    /// Connects to a sequenced-packet Unix socket.
    ///
    /// # Errors
    /// If no process listens.
    pub fn open(path: &Path) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self(socket))
    }

    /// Sends bytes as one packet.
    ///
    /// # Errors
    /// If the other end has closed the connection.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut rustix::net::SendAncillaryBuffer::default(),
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// If the other end has closed the connection.
    pub fn send_frame(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        self.send(&bytes)
    }

    /// Receives a frame; `None` if the other end has closed the connection.
    ///
    /// # Errors
    /// If none arrives in time, or the packet is not a valid frame.
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
