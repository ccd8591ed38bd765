//! Listening, accepting and waiting at sockets for frames.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

use crate::frames::frame_socket;
use crate::peer::{PeerCredentials, peer_credentials};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 256;
/// Timeout of each send and receive on an accepted connection.
const IO_TIMEOUT: Duration = Duration::from_secs(5);

/// Listens at a path with this file mode. Replaces the socket of a process that has ended.
///
/// # Errors
/// If a system call fails, or the path is too long.
pub fn listen_at(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = frame_socket()?;
    let address = SocketAddrUnix::new(path)?;
    bind(&socket, &address)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Waits for a connection and accepts it. Sends and receives on it time out after 5 s.
///
/// # Errors
/// If a system call fails.
pub fn accept(listener: &OwnedFd) -> io::Result<(OwnedFd, PeerCredentials)> {
    let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
    let peer = peer_credentials(&socket)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(IO_TIMEOUT))?;
    set_socket_timeout(&socket, Timeout::Send, Some(IO_TIMEOUT))?;
    Ok((socket, peer))
}

/// Waits until a descriptor is readable or its other end is closed. Returns false after `timeout`,
/// or if a signal interrupts the call.
///
/// # Errors
/// If the system call fails.
pub fn wait_readable(fds: &[&OwnedFd], timeout: Duration) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut entries: Vec<_> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let timeout = rustix::fs::Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    match poll(&mut entries, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
