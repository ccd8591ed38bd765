//! Starts the worker.

use core::mem::zeroed;
use core::ptr::{self, null_mut};
use core::sync::atomic::{AtomicU32, Ordering};

use super::{STACK_BYTES, Worker, main};
use crate::raw::{spawn, syscall};
use crate::say;

/// The worker is starting.
pub(super) const STARTING: u32 = 0;
/// The worker has its own descriptors, and the program may close its copies.
pub(super) const READY: u32 = 1;

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
        let result = if adopts_orphans() { spawn_worker(place) } else { spawn_between(place) };
        if result < 0 {
            say::fail("the worker process cannot be started", -result);
        }
        let state = wait_until_ready(&*place);
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
    // SAFETY: the caller answers for the stack; the entry never returns.
    let result = unsafe { spawn(0, place as usize + STACK_BYTES, main, place as usize) };
    if result > 0 {
        // SAFETY: the worker is there, and this field is atomic.
        unsafe { &*place }.process.store(result as u32, Ordering::Release);
    }
    result
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
        let between = spawn(libc::CLONE_VFORK, top, between, place as usize);
        if between < 0 {
            return between;
        }
        // Another thread may have waited for it already.
        syscall(libc::SYS_wait4, [between as usize, 0, libc::__WALL as usize, 0, 0, 0]);
        match (*place).process.load(Ordering::Acquire) {
            0 => (*place).state.load(Ordering::Acquire) as i32 as isize,
            process => process as isize,
        }
    }
}

/// The entry of the process in between.
extern "C" fn between(place: usize) -> ! {
    let place = place as *mut Worker;
    // SAFETY: the program's thread is stopped until this process ends, and nothing else uses the stack.
    unsafe {
        let result = spawn_worker(place);
        if result < 0 {
            (*place).state.store(result as u32, Ordering::Release);
        }
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
        let process = worker.process.load(Ordering::Acquire) as usize;
        // SAFETY: lets others run, and looks whether there is such a process.
        let is_gone = unsafe {
            syscall(libc::SYS_sched_yield, [0; 6]);
            let reaped =
                syscall(libc::SYS_wait4, [process, 0, (libc::WNOHANG | libc::__WALL) as usize, 0, 0, 0]);
            reaped > 0 || syscall(libc::SYS_kill, [process, 0, 0, 0, 0, 0]) == -(libc::ESRCH as isize)
        };
        if is_gone && worker.state.load(Ordering::Acquire) == STARTING {
            say::fail("the worker process was killed: a sandbox of the program may not allow it", 0);
        }
    }
}

/// See [`super::leave::thread_word`].
pub(super) fn thread_word() -> *const AtomicU32 {
    super::leave::thread_word()
}
