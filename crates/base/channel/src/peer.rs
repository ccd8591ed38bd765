//! The process at the other end of a Unix socket, as the kernel reports it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `SO_PEERPIDFD`, since Linux 6.5. libc does not define it on all targets.
const SO_PEERPIDFD: libc::c_int = 77;

/// The ids of the process that connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerCredentials {
    /// Process id, for logs only: another process may get it after this one has ended. 0 if the
    /// process is in a PID namespace that this process does not see.
    pub pid: u32,
    /// User id.
    pub uid: u32,
}

/// The process that connected, with a pidfd that never refers to another process.
#[derive(Debug)]
pub struct PeerProcess {
    /// Process id, for logs only, as in [`PeerCredentials`].
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// A pidfd; `None` if the process has ended.
    pub pidfd: Option<OwnedFd>,
}

/// The process that connected, and its user at that time.
///
/// # Errors
/// If the descriptor is not a Unix socket.
pub fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    get_option(socket, libc::SO_PEERCRED, &mut peer)?;
    Ok(PeerCredentials { pid: u32::try_from(peer.pid).unwrap_or(0), uid: peer.uid })
}

/// A pidfd of the process that connected. It never refers to another process.
///
/// # Errors
/// `ESRCH` or `EINVAL` if that process has ended, `EMFILE` or `ENFILE` if there is no descriptor.
pub fn peer_pidfd(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    get_option(socket, SO_PEERPIDFD, &mut fd)?;
    // SAFETY: the kernel has created this descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn get_option<T: Copy>(socket: impl AsFd, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(size_of::<T>()).expect("a small struct");
    // SAFETY: the kernel writes at most `length` bytes at `value`. Both callers pass plain
    // integers, for which any bytes are valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &raw mut length,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn this_process_is_its_own_peer() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = peer_credentials(&one).unwrap();
        assert_eq!((peer.pid, peer.uid), (std::process::id(), rustix::process::geteuid().as_raw()));
        let pidfd = peer_pidfd(&one).unwrap();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap();
        assert!(info.contains(&format!("Pid:\t{}\n", peer.pid)), "{info}");
    }

    #[test]
    fn other_descriptors_have_no_peer() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(peer_credentials(&file).is_err());
        assert!(peer_pidfd(&file).is_err());
    }
}
