//! Descriptors for a process at or near its limit of open files.
//!
//! The limit is raised for a moment. If that is not permitted, a new thread attaches the process:
//! the thread has a copy of the descriptors and closes them. The process waits for the thread.

use core::mem::zeroed;
use core::ptr::{null, null_mut};
use core::sync::atomic::AtomicU32;

use crate::attach::{Attached, advise, attach_here, map};
use crate::fatal;
use crate::raw::{close, spawn, syscall};

/// Number of free descriptors with which a process is attached without a new thread.
pub const NEEDED: usize = 10;
/// Number of descriptors that are open at once while a thread attaches the process, in addition to
/// that for messages: two userfaultfds, the socket, and the control memory. The worker's pidfd
/// opens after the last of them is closed.
const NEEDED_MIN: usize = 4;
const STACK_BYTES: usize = 32 * 4096;

/// The limit of open files before it was raised, if it was.
pub struct Limit(Option<libc::rlimit64>);

impl Limit {
    /// Raises the limit as far as this process may.
    pub fn raise() -> Self {
        let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call writes one struct.
        let is_known = unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, null(), &raw mut limit) } == 0;
        let enough = limit.rlim_cur.saturating_add(NEEDED as u64);
        let to_maximum = libc::rlimit64 { rlim_cur: limit.rlim_max.min(enough), ..limit };
        // Only root may raise the hard limit.
        let beyond = libc::rlimit64 { rlim_cur: enough, rlim_max: limit.rlim_max.max(enough) };
        // SAFETY: the call reads one struct.
        let set =
            |limit: &libc::rlimit64| unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, limit, null_mut()) };
        let has_changed = is_known && (set(&beyond) == 0 || set(&to_maximum) == 0);
        Self(has_changed.then_some(limit))
    }

    /// Restores the limit. Open files stay open.
    pub fn restore(self) {
        if let Some(limit) = self.0 {
            // SAFETY: the call reads one struct.
            unsafe {
                libc::prlimit64(0, libc::RLIMIT_NOFILE, &raw const limit, null_mut());
            }
        }
    }
}

/// Whether the caller can open `count` more descriptors, at most [`NEEDED`].
pub fn are_available(count: usize) -> bool {
    let mut opened = [-1isize; NEEDED];
    let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as usize;
    // SAFETY: descriptors that nothing else uses are opened.
    let has_room = opened[..count].iter_mut().all(|fd| unsafe {
        *fd = syscall(libc::SYS_socket, [libc::AF_UNIX as usize, kind, 0, 0, 0, 0]);
        *fd != -(libc::EMFILE as isize)
    });
    opened.iter().filter(|fd| **fd >= 0).for_each(|fd| close(*fd as i32));
    has_room
}

/// The parameters of the thread that attaches, at the lower end of its stack.
struct Attaching {
    attached: Attached,
    thread_word: *const AtomicU32,
}

/// Attaches this process by a thread that has its own descriptors.
pub fn attach_by_thread(attached: Attached, thread_word: *const AtomicU32) {
    let stack = map(STACK_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    advise(stack, STACK_BYTES, libc::MADV_DONTFORK);
    // For the agent, the thread is this process, and its children are this process's.
    let flags = libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_FS | libc::CLONE_VFORK;
    // SAFETY: the lower end of the stack has room for an `Attaching`, and no other user. The thread
    // uses the stack from its upper end, and the thread control block of this thread, which is
    // suspended until it has ended.
    let result = unsafe {
        (stack as *mut Attaching).write(Attaching { attached, thread_word });
        // A handler of the program must not run in it.
        let mut all: libc::sigset_t = zeroed();
        let mut old: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = spawn(flags, stack + STACK_BYTES, main, stack, null_mut());
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, null_mut());
        result
    };
    if result < 0 {
        fatal::exit("no thread can be started that attaches this process", -result);
    }
    // SAFETY: the thread has ended, and nothing else uses its stack.
    unsafe {
        syscall(libc::SYS_munmap, [stack, STACK_BYTES, 0, 0, 0, 0]);
    }
}

/// Entry of the thread.
extern "C" fn main(stack: usize) -> ! {
    // SAFETY: `attach_by_thread` has written an `Attaching` there. The descriptors are copies of
    // the process's; the one for messages stays open.
    unsafe {
        let attaching = &*(stack as *const Attaching);
        syscall(libc::SYS_close_range, [0, libc::STDOUT_FILENO as usize, 0, 0, 0, 0]);
        syscall(libc::SYS_close_range, [libc::STDERR_FILENO as usize + 1, u32::MAX as usize, 0, 0, 0, 0]);
        if !are_available(NEEDED_MIN) {
            end_for_limit();
        }
        attach_here(attaching.attached, attaching.thread_word);
        loop {
            syscall(libc::SYS_exit, [0; 6]);
        }
    }
}

/// Ends the process, which may not have the descriptors by which it is attached.
fn end_for_limit() -> ! {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes one struct.
    unsafe { libc::prlimit64(0, libc::RLIMIT_NOFILE, null(), &raw mut limit) };
    fatal::exit_with(&format_args!(
        "a process that may have {} open files cannot be paged: it needs {} to begin (raise RLIMIT_NOFILE, \
         ulimit -Hn)",
        limit.rlim_max,
        NEEDED_MIN + 1
    ))
}
