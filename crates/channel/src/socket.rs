//! The sockets that frames travel over: listening, accepting, and waiting for what comes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

use crate::frames::frame_socket;

const BACKLOG: i32 = 256;
/// A peer that says nothing for so long is not waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Listen at a path, with the mode that says who can reach it. A socket left by a dead process is replaced.
///
/// # Errors
/// The system's.
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

/// Who is at the other end, as the kernel says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
}

/// The next connection.
///
/// # Errors
/// The system's.
pub fn accept(listener: &OwnedFd) -> io::Result<(OwnedFd, Peer)> {
    let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
    let peer = socket_peercred(&socket)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(io::Error::other)?;
    Ok((socket, Peer { pid, uid: peer.uid.as_raw() }))
}

/// Wait until there is something to read or the other end hangs up; false if neither within `patience`.
///
/// # Errors
/// The system's.
pub fn wait_readable(fds: &[&OwnedFd], patience: Duration) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut entries: Vec<_> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let patience = rustix::fs::Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    match poll(&mut entries, Some(&patience)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
