//! The daemon's end: starts the gateway, and receives the connections.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};

use crate::messages::{self, IntroductionRecord, ListenerKind, MESSAGE_BYTES_MAX, Order, RelayStarted};

/// A gateway process.
#[derive(Debug)]
pub struct Gateway {
    control: OwnedFd,
    /// The process; `None` only while this is dropped.
    process: Option<Child>,
}

/// The socket at which the relay of one user introduces connections.
#[derive(Debug)]
pub struct UserChannel {
    /// The user.
    pub uid: u32,
    socket: OwnedFd,
    buffer: Box<[u8]>,
}

/// A connection of a user. The queue of its socket has no descriptor of the user.
#[derive(Debug)]
pub struct Introduction {
    /// The listener at which the user has connected.
    pub kind: ListenerKind,
    /// Process id of the other end, for messages; 0 if the process is in a PID namespace that the
    /// daemon does not see.
    pub pid: u32,
    /// A pidfd of that process; `None` if it has ended.
    pub process: Option<OwnedFd>,
    /// The connection.
    pub socket: OwnedFd,
    /// The first packet, which may be anything.
    pub packet: Vec<u8>,
    /// The userfaultfd of the first packet, if it carries one.
    pub userfaultfd: Option<OwnedFd>,
}

impl Gateway {
    /// Starts a gateway by a command that calls [`crate::serve`] with its standard input. The
    /// gateway lives as long as the calling thread.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let (control, of_gateway) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let process = command.stdin(of_gateway).spawn()?;
        Ok(Self { control, process: Some(process) })
    }

    /// Accepts connections at `socket`, under the number `listener`.
    ///
    /// # Errors
    /// If the gateway has ended.
    pub fn listen(&self, listener: u64, kind: ListenerKind, socket: impl AsFd) -> io::Result<()> {
        let order = Order::Listen { listener, kind };
        messages::send(&self.control, &order, &[], &[socket.as_fd()], SendFlags::empty())
    }

    /// Closes a listener.
    ///
    /// # Errors
    /// If the gateway has ended.
    pub fn close(&self, listener: u64) -> io::Result<()> {
        messages::send(&self.control, &Order::Close { listener }, &[], &[], SendFlags::empty())
    }

    /// The descriptor that is readable when [`Self::next_user`] returns without waiting.
    #[must_use]
    pub fn poll_fd(&self) -> &OwnedFd {
        &self.control
    }

    /// Waits for the next user, or the next relay of a user.
    ///
    /// # Errors
    /// If the gateway has ended.
    pub fn next_user(&self) -> io::Result<UserChannel> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX].into_boxed_slice();
        let received = messages::receive::<RelayStarted>(&self.control, &mut buffer)?;
        let (RelayStarted { uid }, _, mut descriptors) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
        let socket = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
        Ok(UserChannel { uid, socket, buffer })
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // The gateway's relays copy connections of programs, and end with these connections.
        let _ended = self.process.as_mut().map(Child::kill);
        // Reaped in a thread, because the end of the process closes connections, which may wait.
        if let Some(mut process) = self.process.take() {
            let _reaper = std::thread::Builder::new().name("reap".into()).spawn(move || process.wait());
        }
    }
}

impl UserChannel {
    /// Waits for the next connection; `None` once the relay has ended.
    ///
    /// # Errors
    /// If the process has too many open files, or the relay violates the protocol.
    pub fn next_introduction(&mut self) -> io::Result<Option<Introduction>> {
        let received = messages::receive::<IntroductionRecord>(&self.socket, &mut self.buffer)?;
        let Some((record, packet, descriptors)) = received else { return Ok(None) };
        let IntroductionRecord { kind, pid, has_process } = record;
        let mut descriptors = descriptors.into_iter();
        let socket = descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
        let process = if has_process { descriptors.next() } else { None };
        Ok(Some(Introduction { kind, pid, process, socket, packet, userfaultfd: descriptors.next() }))
    }
}
