//! Unix sockets that keep message boundaries, for this user only or for all.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use aquifer_channel::frames::frame_socket;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

const BACKLOG: i32 = 256;
/// A peer that says nothing for so long is not waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Listen at a path that only this user can reach, or everybody. A socket left by a dead process is replaced.
fn listen_at(path: &Path, mode: u32) -> io::Result<OwnedFd> {
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

/// Listen at a path for this user, unless there is a socket that does so already.
pub fn listen_or_take(path: &Path, given: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    given.map_or_else(|| listen_at(path, 0o600), OwnedFd::try_clone)
}

/// The same for programs of this user's, which may have become somebody else if the user is root.
pub fn listen_for_programs(path: &Path, given: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    let mode = if rustix::process::geteuid().is_root() { 0o666 } else { 0o600 };
    given.map_or_else(|| listen_at(path, mode), OwnedFd::try_clone)
}

/// Listen at a path for all users of this host.
pub fn listen_shared(path: &Path) -> io::Result<OwnedFd> {
    listen_at(path, 0o666)
}

/// Each paged program needs a dozen descriptors: allow as many as the system lets us.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, wanted) {
        tracing::warn!(%error, ?limit, "the limit of open files stays: it bounds how many programs can be paged");
    }
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
pub fn accept(listener: &OwnedFd) -> io::Result<(OwnedFd, Peer)> {
    let socket = accept_with(listener, SocketFlags::CLOEXEC)?;
    let peer = socket_peercred(&socket)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(io::Error::other)?;
    Ok((socket, Peer { pid, uid: peer.uid.as_raw() }))
}

/// The next connection and its process id. One of another user is turned away: `None`.
pub fn accept_own(listener: &OwnedFd) -> io::Result<Option<(OwnedFd, u32)>> {
    let (socket, peer) = accept(listener)?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        tracing::warn!(uid = peer.uid, "a connection of another user was turned away");
        return Ok(None);
    }
    Ok(Some((socket, peer.pid)))
}

/// Wait until there is something to read or the other end hangs up; false if neither within `patience`.
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
