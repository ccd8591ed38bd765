//! Connect-back requests: a forked child connects to the agent although the agent's socket has no
//! name where the child is. That is so after `chroot`, in another mount or network namespace, or in
//! a user namespace in which the agent's user has no number.
//!
//! The child faults on a page of its own memory to request that the agent listens in the child's
//! network namespace ([`aquifer_ipc::connect_back_page`]). The contents of the page need no proof:
//! only the agent has that memory's userfaultfd, since the fork. The listener at the name proves by
//! the secret that it is the agent.

use core::mem::{offset_of, zeroed};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

use aquifer_ipc::{
    CONNECT_BACK_REQUESTS_MAX, SOCKET_NAME_BYTES, SOCKET_SECRET_BYTES, connect_back_page, socket_address,
};

use crate::raw::{close, syscall};

/// Maximum number of connect-back requests for one connection.
const ATTEMPTS: usize = 8;
/// Timeout of the agent's secret. An agent that is stopped may take longer: then the child sends
/// another request.
const SECRET_TIMEOUT: libc::timeval = libc::timeval { tv_sec: 20, tv_usec: 0 };
/// Value of [`LAST_PAGE`] if no request has a socket that may still be open.
const NO_PAGE: usize = 0;

/// The number of the next connect-back request of this process.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// The address of the page with the name of the last socket at which the agent answered.
static LAST_PAGE: AtomicUsize = AtomicUsize::new(NO_PAGE);

/// Resets the state for a new child, which has sent no connect-back request yet.
pub fn begin() {
    NEXT.store(0, Ordering::Relaxed);
    LAST_PAGE.store(NO_PAGE, Ordering::Relaxed);
}

/// Connects to the agent at the socket of a connect-back request. Returns a positive errno if that
/// fails.
///
/// `canary` is the address of this child's canary.
pub fn connect(canary: usize) -> Result<i32, isize> {
    let mut result = match LAST_PAGE.load(Ordering::Relaxed) {
        NO_PAGE => Err(libc::ENOENT as isize),
        page => enter(page),
    };
    for _ in 0..ATTEMPTS {
        let number = NEXT.load(Ordering::Relaxed);
        if result.is_ok() || number == CONNECT_BACK_REQUESTS_MAX {
            break;
        }
        NEXT.store(number + 1, Ordering::Relaxed);
        let page = canary + connect_back_page(number);
        result = enter(page);
        LAST_PAGE.store(if result.is_ok() { page } else { NO_PAGE }, Ordering::Relaxed);
    }
    result
}

/// Connects to the socket whose name is in a page, and checks that the agent listens there. The
/// agent writes name and secret there when they are read.
fn enter(page: usize) -> Result<i32, isize> {
    // SAFETY: these pages belong to this library, and only the agent writes there.
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
    // Later packets have no timeout, as at the agent's other sockets.
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
