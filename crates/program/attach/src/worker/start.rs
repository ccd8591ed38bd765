//! Starts the worker.

use core::mem::zeroed;
use core::ptr::{self, null_mut};
use core::sync::atomic::Ordering;

use super::{STACK_BYTES, Worker, main};
use crate::fatal;
use crate::raw::{close, spawn, syscall};

/// State of a worker that is starting.
pub(super) const STARTING: u32 = 0;
/// State of a worker that has confined itself and has its own descriptors, so that the program may
/// close its copies.
pub(super) const READY: u32 = 1;

/// Error of a start when the user has too many processes.
const AGAIN: isize = -(libc::EAGAIN as isize);
/// Size of the stack of the intermediate process, which only starts the worker.
const INTERMEDIATE_STACK_BYTES: usize = STACK_BYTES / 2;

/// Starts a worker on the stack whose lower end is `stack`, and waits until it is ready. Ends the
/// program if that fails.
///
/// The worker must not be a child of the program, because the program would see it when it waits
/// for any child. So an intermediate process starts the worker and ends. But a process that loses
/// its parent becomes a child of the program if the program is the first process of its PID
/// namespace, or a subreaper. Then the program starts the worker as its child. The end of this
/// child sends no signal, and only `wait` with `__WALL` returns it.
pub fn start(stack: usize, worker: Worker) {
    let worker_at = stack as *mut Worker;
    // SAFETY: the lower end of the worker's stack has room for a `Worker` and has no other user.
    // The worker uses the stack from its upper end.
    let state = unsafe {
        ptr::write(worker_at, worker);
        // The worker inherits the signal mask, and keeps all signals blocked.
        let mut all: libc::sigset_t = zeroed();
        let mut old: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let mut result = if is_reaper() { AGAIN } else { spawn_by_intermediate(worker_at) };
        if result == AGAIN {
            // The intermediate process counts against the user's limit, too. Try without it.
            result = spawn_worker(worker_at);
        }
        if result < 0 {
            fatal::exit("the worker process cannot be started", -result);
        }
        let state = wait_until_ready(&*worker_at);
        close((*worker_at).pidfd);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, null_mut());
        state
    };
    if state != READY {
        fatal::exit("the worker process cannot confine itself", -(state as i32 as isize));
    }
}

/// Whether a process that loses its parent can become a child of this one.
pub fn is_reaper() -> bool {
    let mut is_subreaper = 0i32;
    // SAFETY: the kernel writes an integer.
    unsafe {
        let result_at = (&raw mut is_subreaper) as usize;
        syscall(libc::SYS_prctl, [libc::PR_GET_CHILD_SUBREAPER as usize, result_at, 0, 0, 0, 0]);
        is_subreaper != 0 || syscall(libc::SYS_getpid, [0; 6]) == 1
    }
}

/// Starts the worker as a child of the calling process. Returns its process number, or a negative
/// errno.
///
/// # Safety
/// `worker_at` must point to a `Worker` at the lower end of a stack that nothing else uses.
unsafe fn spawn_worker(worker_at: *mut Worker) -> isize {
    // SAFETY: the caller is responsible for the stack, and `main` never returns. The worker does
    // not access the field `pidfd`.
    unsafe {
        let pidfd = &raw mut (*worker_at).pidfd;
        spawn(libc::CLONE_PIDFD, worker_at as usize + STACK_BYTES, main, worker_at as usize, pidfd)
    }
}

/// Starts the worker as a child of an intermediate process, and waits for the end of that process.
/// Returns the worker's process number, or a negative errno.
///
/// # Safety
/// As of [`spawn_worker`].
unsafe fn spawn_by_intermediate(worker_at: *mut Worker) -> isize {
    // SAFETY: the intermediate process uses the lower half of the stack, above the `Worker`, while
    // the worker begins to use the upper half. This process continues when the intermediate one has
    // ended.
    unsafe {
        let stack_top = worker_at as usize + INTERMEDIATE_STACK_BYTES;
        // The two processes share their descriptors, so that this one gets the worker's pidfd.
        let flags = libc::CLONE_VFORK | libc::CLONE_FILES;
        let pid = spawn(flags, stack_top, run_intermediate, worker_at as usize, null_mut());
        if pid < 0 {
            return pid;
        }
        // This fails if another thread has waited for the process already.
        syscall(libc::SYS_wait4, [pid as usize, 0, libc::__WALL as usize, 0, 0, 0]);
        (*worker_at).spawn_result
    }
}

/// Entry of the intermediate process.
extern "C" fn run_intermediate(worker_at: usize) -> ! {
    let worker_at = worker_at as *mut Worker;
    // SAFETY: the starting thread is suspended until this process ends, and nothing else uses the
    // stack.
    unsafe {
        (*worker_at).spawn_result = spawn_worker(worker_at);
    }
    super::exit()
}

/// Waits until the worker is ready or has failed, and returns its state. Ends the program if the
/// worker was killed, also if that was after it had become ready: the end of the first process of
/// a PID namespace kills all others.
fn wait_until_ready(worker: &Worker) -> u32 {
    loop {
        // Before the state: a worker that has failed stores its state, and ends.
        let has_ended = has_ended(worker);
        let state = worker.state.load(Ordering::Acquire);
        if state != READY && state != STARTING || state == READY && !has_ended {
            return state;
        }
        if has_ended {
            fatal::exit(
                "the worker process was killed: a sandbox of the program forbids its system calls, or the \
                 program has unshared its PID namespace and executed another program (use unshare --fork)",
                0,
            );
        }
        // SAFETY: lets other threads run.
        unsafe {
            syscall(libc::SYS_sched_yield, [0; 6]);
        }
    }
}

fn has_ended(worker: &Worker) -> bool {
    let mut pidfd = libc::pollfd { fd: worker.pidfd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel writes to the one entry.
    unsafe { syscall(libc::SYS_poll, [(&raw mut pidfd) as usize, 1, 0, 0, 0, 0]) == 1 }
}
