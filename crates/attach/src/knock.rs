//! How a forked child reaches the agent where the agent's socket has no name: after `chroot`, in
//! another mount name space, or in a user name space in which the agent's user has no number.
//!
//! The child has a pair of connected sockets, and tells the agent by faults on its own memory to
//! take one of them ([`aquifer_ipc::Knock`]). The agent has that memory's userfaultfd since the
//! fork, and no other process has, so that it needs no other proof.

use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

use aquifer_ipc::{KNOCK_OFFSET, KNOCKS_MAX, Knock};

use crate::helper;
use crate::raw::{close, syscall};

/// The next knock of this process.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// A pair of sockets of which the agent has to take one.
pub struct Knocking {
    canary: usize,
    /// The end for the agent.
    socket: i32,
}

/// Notes that this process is a new child, which has not knocked yet.
pub fn begin() {
    NEXT.store(0, Ordering::Relaxed);
}

/// Opens a pair of sockets. Returns the end of this process, or a positive errno.
///
/// `canary` is the address of this child's canary.
pub fn prepare(canary: usize) -> Result<(i32, Knocking), isize> {
    let mut pair = [-1i32; 2];
    let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as usize;
    // SAFETY: the kernel writes two descriptors.
    let result = unsafe {
        syscall(libc::SYS_socketpair, [libc::AF_UNIX as usize, kind, 0, pair.as_mut_ptr() as usize, 0, 0])
    };
    if result < 0 {
        return Err(-result);
    }
    Ok((pair[0], Knocking { canary, socket: pair[1] }))
}

impl Knocking {
    /// Waits until the agent has taken its end, or has refused to; then the pair has one end only.
    ///
    /// What this process has sent is in the socket already, because the agent does not wait for it.
    pub fn knock(&self) {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if number < KNOCKS_MAX {
            let knock = Knock { socket: self.socket as u32, is_child: u32::from(!helper::is_used()) };
            // SAFETY: the canary has `CANARY_BYTES` bytes, which this library has mapped. The agent
            // has filled its first page, and does not write there any more.
            unsafe {
                ptr::write_volatile((self.canary + KNOCK_OFFSET) as *mut Knock, knock);
                for page in Knock::pages(number) {
                    ptr::read_volatile((self.canary + page) as *const u8);
                }
            }
        }
        close(self.socket);
    }
}
