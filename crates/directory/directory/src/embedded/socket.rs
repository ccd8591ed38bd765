//! Unix sockets of the server and its clients: mode, peer check, and waiting with a timeout.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Listens at `path` with mode 0600, and replaces a socket file without a listener.
pub(super) fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixStream::connect(path) {
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens at this path")),
        // The same error as for a file that is not a socket.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the file exists and is not a socket",
                ));
            }
            std::fs::remove_file(path)?;
        }
        Err(_) => {}
    }
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file inherits the socket's mode, so other users cannot connect at any time.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket.into())
}

/// Why a peer is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum PeerError {
    #[error("the user of the peer is unknown: {0}")]
    UnknownUser(#[from] rustix::io::Errno),
    #[error("the peer runs as user {peer}, not as user {own}")]
    OtherUser { peer: u32, own: u32 },
}

/// Checks that the peer runs under the same user.
pub(super) fn check_peer(stream: &UnixStream) -> Result<(), PeerError> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?.uid.as_raw();
    let own = rustix::process::geteuid().as_raw();
    if peer == own { Ok(()) } else { Err(PeerError::OtherUser { peer, own }) }
}

/// Waits until a descriptor is readable or closed. Returns for each whether it is.
///
/// After `timeout` all results are false.
pub(super) fn wait_readable<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut polled = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        let remaining = end.map(|end| end.saturating_duration_since(Instant::now()));
        let remaining = remaining.and_then(|remaining| Timespec::try_from(remaining).ok());
        match rustix::event::poll(&mut polled, remaining.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(polled.map(|fd| !fd.revents().is_empty())),
        }
    }
}

/// Whether `stream` is readable or closed now.
pub(super) fn is_readable(stream: &UnixStream) -> bool {
    wait_readable([stream.as_fd()], Some(Duration::ZERO)).is_ok_and(|[readable]| readable)
}
