//! How a forked child reaches the agent where the agent's socket has no name: after `chroot`, in
//! another mount or network namespace, or in a user namespace in which the agent's user has no
//! number.
//!
//! The child tells the agent by a fault on its own memory to listen where the child is
//! ([`aquifer_ipc::knock_page`]). The agent has that memory's userfaultfd since the fork, and no
//! other process has, so that the name of the socket needs no other proof.

use core::mem::{offset_of, zeroed};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

use aquifer_ipc::{KNOCKS_MAX, SOCKET_NAME_BYTES, knock_page, socket_address};

use crate::raw::{close, syscall};

/// Knocks for one connection.
const ATTEMPTS: usize = 8;
/// The value of [`LAST_PAGE`] if there was no knock.
const NO_PAGE: usize = 0;

/// The next knock of this process.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// The address of the page with the name of the last socket.
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
        LAST_PAGE.store(page, Ordering::Relaxed);
    }
    result
}

/// Connects to the socket whose name is in a page. The agent writes it there when it is read.
fn enter(page: usize) -> Result<i32, isize> {
    // SAFETY: the pages for knocks belong to this library, and only the agent writes there.
    let name: [u8; SOCKET_NAME_BYTES] = unsafe { ptr::read_volatile(page as *const [u8; SOCKET_NAME_BYTES]) };
    if name == [0; SOCKET_NAME_BYTES] {
        return Err(libc::ENOENT as isize);
    }
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
        let result = syscall(libc::SYS_connect, [socket as usize, address_at, length, 0, 0, 0]);
        if result < 0 {
            close(socket as i32);
            return Err(-result);
        }
        Ok(socket as i32)
    }
}
