//! How a forked child reaches the agent where the agent's socket has no name: after `chroot`, in
//! another mount or network namespace, or in a user namespace in which the agent's user has no
//! number.
//!
//! The child tells the agent by a fault on its own memory to listen where the child is
//! ([`aquifer_ipc::knock_page`]). The agent has that memory's userfaultfd since the fork, and no
//! other process has, so that what is in the page needs no other proof. Who listens at the name
//! proves to be the agent by the secret.

use core::mem::{offset_of, zeroed};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

use aquifer_ipc::{KNOCKS_MAX, SOCKET_NAME_BYTES, SOCKET_SECRET_BYTES, knock_page, socket_address};

use crate::raw::{close, syscall};

/// Knocks for one connection.
const ATTEMPTS: usize = 8;
/// Time in which the agent sends its secret. An agent that is stopped may take longer: then the
/// child knocks once more.
const SECRET_TIMEOUT: libc::timeval = libc::timeval { tv_sec: 20, tv_usec: 0 };
/// Value of [`LAST_PAGE`] if there is no knock whose socket may still be there.
const NO_PAGE: usize = 0;

/// The next knock of this process.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// The address of the page with the name of the last socket that was the agent's.
static LAST_PAGE: AtomicUsize = AtomicUsize::new(NO_PAGE);

/// Notes that this process is a new child, which has not knocked yet.
pub fn begin() {
    NEXT.store(0, Ordering::Relaxed);
    LAST_PAGE.store(NO_PAGE, Ordering::Relaxed);
}

/// Connects to the agent at the socket of a knock. Returns a positive errno if that fails.
///
/// `canary` is the address of this child's canary.
pub fn connect(canary: usize) -> Result<i32, isize> {
    let mut result = match LAST_PAGE.load(Ordering::Relaxed) {
        NO_PAGE => Err(libc::ENOENT as isize),
        page => enter(page),
    };
    for _ in 0..ATTEMPTS {
        let number = NEXT.load(Ordering::Relaxed);
        if result.is_ok() || number == KNOCKS_MAX {
            break;
        }
        NEXT.store(number + 1, Ordering::Relaxed);
        let page = canary + knock_page(number);
        result = enter(page);
        LAST_PAGE.store(if result.is_ok() { page } else { NO_PAGE }, Ordering::Relaxed);
    }
    result
}

/// Connects to the socket whose name is in a page, and checks that the agent listens there. The
/// agent writes name and secret there when they are read.
fn enter(page: usize) -> Result<i32, isize> {
    // SAFETY: the pages for knocks belong to this library, and only the agent writes there.
    let (name, secret) =
        unsafe { ptr::read_volatile(page as *const ([u8; SOCKET_NAME_BYTES], [u8; SOCKET_SECRET_BYTES])) };
    if name == [0; SOCKET_NAME_BYTES] {
        return Err(libc::ENOENT as isize);
    }
    let socket = connect_to(name)?;
    if has_sent(socket, secret) {
        Ok(socket)
    } else {
        close(socket);
        Err(libc::EACCES as isize)
    }
}

/// Repeats a system call that signals interrupt.
fn uninterrupted(mut call: impl FnMut() -> isize) -> isize {
    loop {
        let result = call();
        if result != -(libc::EINTR as isize) {
            return result;
        }
    }
}

/// Whether the other end of a connection has sent the secret.
fn has_sent(socket: i32, secret: [u8; SOCKET_SECRET_BYTES]) -> bool {
    let mut found = [0; SOCKET_SECRET_BYTES];
    let set_timeout = |timeout: libc::timeval| {
        let at = (&raw const timeout) as usize;
        let arguments = [libc::SOL_SOCKET as usize, libc::SO_RCVTIMEO as usize, at, size_of_val(&timeout)];
        let [level, name, at, length] = arguments;
        // SAFETY: the kernel reads the timeout.
        unsafe { syscall(libc::SYS_setsockopt, [socket as usize, level, name, at, length, 0]) }
    };
    set_timeout(SECRET_TIMEOUT);
    let length = uninterrupted(|| {
        let at = found.as_mut_ptr() as usize;
        // SAFETY: the kernel writes no more than the buffer holds.
        unsafe {
            syscall(libc::SYS_recvfrom, [socket as usize, at, found.len(), libc::MSG_TRUNC as usize, 0, 0])
        }
    });
    // What follows is waited for like at the agent's other sockets.
    set_timeout(libc::timeval { tv_sec: 0, tv_usec: 0 });
    length == found.len() as isize && found == secret
}

/// Connects to a socket by its name.
fn connect_to(name: [u8; SOCKET_NAME_BYTES]) -> Result<i32, isize> {
    // SAFETY: plain integers.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = socket_address(name);
    for (to, from) in address.sun_path[1..].iter_mut().zip(bytes) {
        *to = from as libc::c_char;
    }
    let length = offset_of!(libc::sockaddr_un, sun_path) + 1 + bytes.len();
    let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as usize;
    // SAFETY: the kernel reads the address.
    unsafe {
        let socket = syscall(libc::SYS_socket, [libc::AF_UNIX as usize, kind, 0, 0, 0, 0]);
        if socket < 0 {
            return Err(-socket);
        }
        let address_at = (&raw const address) as usize;
        let result =
            uninterrupted(|| syscall(libc::SYS_connect, [socket as usize, address_at, length, 0, 0, 0]));
        if result < 0 {
            close(socket as i32);
            return Err(-result);
        }
        Ok(socket as i32)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixDatagram;

    use super::*;

    const SECRET: [u8; SOCKET_SECRET_BYTES] = *b"that of an agent";

    #[test]
    fn only_a_listener_that_sends_the_secret_first_is_the_agent() {
        let is_agent = |packet: &[u8]| {
            let (own, other) = UnixDatagram::pair().unwrap();
            other.send(packet).unwrap();
            has_sent(own.as_raw_fd(), SECRET)
        };
        assert!(is_agent(&SECRET));
        assert!(!is_agent(&[0; SOCKET_SECRET_BYTES]));
        assert!(!is_agent(&SECRET[..SOCKET_SECRET_BYTES - 1]));
        assert!(!is_agent(&[&SECRET[..], &[0]].concat()), "a longer packet");
        assert!(!is_agent(b""));
    }
}
