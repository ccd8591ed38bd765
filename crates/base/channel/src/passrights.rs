//! `SO_PASSRIGHTS`: whether a Unix socket accepts descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `SO_PASSRIGHTS`, since Linux 6.16. libc does not define it on all targets.
const SO_PASSRIGHTS: libc::c_int = 83;
/// Environment variable with which tests run as on a kernel without the option.
#[cfg(debug_assertions)]
const WITHOUT_VARIABLE: &str = "AQUIFER_TEST_NO_PASSRIGHTS";

/// Makes sends of descriptors to a socket fail with `EPERM`. Sockets that are accepted at a
/// listener inherit the setting. Packets that are in the queue already keep their descriptors.
///
/// Returns false if the kernel does not support the option.
pub fn refuse_descriptors(socket: impl AsFd) -> bool {
    #[cfg(debug_assertions)]
    if std::env::var_os(WITHOUT_VARIABLE).is_some() {
        return false;
    }
    set(socket, false).is_ok()
}

fn set(socket: impl AsFd, accepts: bool) -> io::Result<()> {
    let value = libc::c_int::from(accepts);
    // SAFETY: the kernel reads one integer.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            std::ptr::from_ref(&value).cast(),
            libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(0),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
