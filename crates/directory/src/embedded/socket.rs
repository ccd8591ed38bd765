//! Unix sockets as the server and its clients need them: private, checked at both ends, waited on with a bound.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Listen at `path`, mode 0600. A socket file that nobody listens on any more is replaced.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixStream::connect(path) {
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
        Err(_) => {}
    }
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file takes the socket's own mode, so that it is never open to others, not even for a moment.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket.into())
}

/// Refuse a peer that runs under another user.
pub(super) fn check_peer(stream: &UnixStream) -> Result<(), String> {
    let peer =
        rustix::net::sockopt::socket_peercred(stream).map_err(|error| format!("who is there? {error}"))?;
    let own = rustix::process::geteuid();
    if peer.uid == own {
        return Ok(());
    }
    Err(format!("it belongs to user {} and the caller is user {}", own.as_raw(), peer.uid.as_raw()))
}

/// Wait until one of `descriptors` has something to read or is closed; says which. `false` everywhere after `timeout`.
pub(super) fn wait_readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut polled = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match rustix::event::poll(&mut polled, left.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(polled.map(|fd| !fd.revents().is_empty())),
        }
    }
}

/// Whether `stream` has something to read or is closed, by now.
pub(super) fn is_readable(stream: &UnixStream) -> bool {
    wait_readable([stream.as_fd()], Some(Duration::ZERO)).is_ok_and(|[readable]| readable)
}
