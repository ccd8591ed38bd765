//! Listening, accepting and waiting at sockets for frames.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

use crate::exiting::is_exiting;
use crate::frames::frame_socket;
use crate::peer::{PeerCredentials, peer_credentials};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 256;
/// Timeout of each send and receive on an accepted connection.
const IO_TIMEOUT: Duration = Duration::from_secs(5);

/// Listens at a path with this file mode. Replaces the socket of a process that has ended.
///
/// # Errors
/// If a system call fails, the path is too long, something else than a socket is there, or a
/// process listens there.
pub fn listen_at(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    remove_dead_socket(path)?;
    let socket = frame_socket()?;
    let address = SocketAddrUnix::new(path)?;
    bind(&socket, &address)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Listens at a name in the abstract namespace of this thread's network namespace.
///
/// # Errors
/// If a system call fails, the name is too long, or another process listens there.
pub fn listen_at_name(name: &[u8]) -> io::Result<OwnedFd> {
    let socket = frame_socket()?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Removes a socket at which no process listens.
fn remove_dead_socket(path: &Path) -> io::Result<()> {
    let metadata = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    if !std::os::unix::fs::FileTypeExt::is_socket(&metadata.file_type()) {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path is a file that is not a socket"));
    }
    let socket = frame_socket()?;
    let listener = match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::CONNREFUSED) => return std::fs::remove_file(path),
        Ok(()) => peer_credentials(&socket)?.pid,
        // A socket of another type, or one whose queue is full.
        Err(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
    };
    // Process 0 is one that this process cannot see.
    if listener != 0 && is_exiting(listener) {
        // Another process, such as a shadow, has the descriptors of the listener, which has ended.
        return std::fs::remove_file(path);
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("another process listens there: {listener}")))
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

/// Receives a packet. Polls for `spin` before it waits, so that an answer that arrives at once need
/// not wake the receiver.
///
/// Returns `None` after `timeout`, and 0 bytes at the end of the connection.
///
/// # Errors
/// If the system call fails.
pub fn receive_soon(
    socket: &OwnedFd,
    bytes: &mut [u8],
    spin: Duration,
    timeout: Duration,
) -> io::Result<Option<usize>> {
    use rustix::io::Errno;
    use rustix::net::{RecvFlags, recv};
    let began = Instant::now();
    loop {
        match recv(socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((len, _)) => return Ok(Some(len)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let left = timeout.saturating_sub(began.elapsed());
        if left.is_zero() {
            return Ok(None);
        }
        if began.elapsed() >= spin {
            wait_readable(&[socket], left)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        std::fs::write(&path, "text").unwrap();
        assert_eq!(listen_at(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
        std::fs::remove_file(&path).unwrap();
        let first = listen_at(&path, 0o600).unwrap();
        assert_eq!(listen_at(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        let second = listen_at(&path, 0o600).unwrap();
        drop(second);
        // The listener is the process that has called listen, although another has the descriptor.
        let third = frame_socket().unwrap();
        std::fs::remove_file(&path).unwrap();
        bind(&third, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::io::fcntl_setfd(&third, rustix::io::FdFlags::empty()).unwrap();
        let listen = format!("import socket; socket.socket(fileno={}).listen()", third.as_raw_fd());
        let listened = std::process::Command::new("python3").args(["-c", &listen]).status().unwrap();
        assert!(listened.success());
        listen_at(&path, 0o600).unwrap();
    }
}
