//! Starts the worker.

use core::mem::zeroed;
use core::ptr::{self, null_mut};
use core::sync::atomic::Ordering;

use super::{STACK_BYTES, Worker, main};
use crate::raw::{spawn, syscall};
use crate::say;
use crate::uffd;

/// The worker is starting.
pub(super) const STARTING: u32 = 0;
/// The worker has its own descriptors, and the program may close its copies.
pub(super) const READY: u32 = 1;

/// The user may have no more processes.
const AGAIN: isize = -(libc::EAGAIN as isize);
/// Bytes of stack of the process in between, which does nothing but start the worker.
const STACK_BETWEEN_BYTES: usize = STACK_BYTES / 2;

/// Starts a worker, with its stack at `stack`, and waits until it runs. Ends the program if that
/// fails.
///
/// The worker is no child of the program, which would otherwise see it when it waits for children
/// of any kind. So a process in between starts it and ends. But the children of such a process
/// become children of the program if the program is the first one of its PID namespace, or has
/// asked for them: then the worker is a child that ends without a signal, and that `wait` does not
/// see.
pub fn start(stack: usize, worker: Worker) {
    let place = stack as *mut Worker;
    // SAFETY: the lower end of the worker's stack is large enough and has no other user; the worker
    // uses the stack from the other end. Signals are blocked while it starts, and so for ever.
    let state = unsafe {
        ptr::write(place, worker);
        let mut all: libc::sigset_t = zeroed();
        let mut old: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let mut result = if adopts_orphans() { AGAIN } else { spawn_between(place) };
        if result == AGAIN {
            // Without another process in between, which counts against the user's limit, too.
            result = spawn_worker(place);
        }
        if result < 0 {
            say::fail("the worker process cannot be started", -result);
        }
        let state = wait_until_ready(&*place);
        uffd::close((*place).pidfd);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, null_mut());
        state
    };
    if state != READY {
        say::fail("the worker process cannot confine itself", -(state as i32 as isize));
    }
}

/// Whether a process that loses its parent can become a child of this one.
fn adopts_orphans() -> bool {
    let mut is_reaper = 0i32;
    // SAFETY: the kernel writes an integer.
    unsafe {
        let place = (&raw mut is_reaper) as usize;
        syscall(libc::SYS_prctl, [libc::PR_GET_CHILD_SUBREAPER as usize, place, 0, 0, 0, 0]);
        is_reaper != 0 || syscall(libc::SYS_getpid, [0; 6]) == 1
    }
}

/// Starts the worker as a child of this process; its number, or a negative errno.
///
/// # Safety
/// Nothing else may use the stack at `place`.
unsafe fn spawn_worker(place: *mut Worker) -> isize {
    // SAFETY: the caller answers for the stack; the entry never returns. The worker does not use the field.
    unsafe {
        let pidfd = &raw mut (*place).pidfd;
        spawn(libc::CLONE_PIDFD, place as usize + STACK_BYTES, main, place as usize, pidfd)
    }
}

/// The same by a process in between.
///
/// # Safety
/// As of [`spawn_worker`].
unsafe fn spawn_between(place: *mut Worker) -> isize {
    // SAFETY: this process runs on when the one in between has ended. So that one can use the lower half of
    // the stack, above the `Worker`, while the worker begins to use the upper half.
    unsafe {
        let top = place as usize + STACK_BETWEEN_BYTES;
        // With this process' descriptors, so that the pidfd of the worker is one of this process.
        let flags = libc::CLONE_VFORK | libc::CLONE_FILES;
        let between = spawn(flags, top, between, place as usize, null_mut());
        if between < 0 {
            return between;
        }
        // Another thread may have waited for it already.
        syscall(libc::SYS_wait4, [between as usize, 0, libc::__WALL as usize, 0, 0, 0]);
        (*place).spawned
    }
}

/// The entry of the process in between.
extern "C" fn between(place: usize) -> ! {
    let place = place as *mut Worker;
    // SAFETY: the program's thread is stopped until this process ends, and nothing else uses the stack.
    unsafe {
        (*place).spawned = spawn_worker(place);
    }
    super::exit()
}

/// The state of a worker that has started, or has failed.
fn wait_until_ready(worker: &Worker) -> u32 {
    loop {
        let state = worker.state.load(Ordering::Acquire);
        if state != STARTING {
            return state;
        }
        let mut process = libc::pollfd { fd: worker.pidfd, events: libc::POLLIN, revents: 0 };
        // SAFETY: lets others run, and the kernel writes to the one entry.
        let has_ended = unsafe {
            syscall(libc::SYS_sched_yield, [0; 6]);
            syscall(libc::SYS_poll, [(&raw mut process) as usize, 1, 0, 0, 0, 0]) == 1
        };
        if has_ended && worker.state.load(Ordering::Acquire) == STARTING {
            say::fail(
                "the worker process was killed: a sandbox of the program does not allow it, or the program \
                 has unshared its PID namespace and executed another one (use unshare --fork)",
                0,
            );
        }
    }
}
