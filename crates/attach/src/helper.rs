//! Attaches a forked child that can have no more descriptors.
//!
//! A helper, a process that shares the child's memory and has copies of its descriptors, closes the
//! copies, attaches the child, and ends. The child waits for it.

use core::mem::zeroed;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use aquifer_ipc::EXIT_FAILED;

use crate::attach::{advise, attach_here, map};
use crate::fatal;
use crate::raw::{spawn, syscall};

const STACK_BYTES: usize = 32 * 4096;

/// Whether a helper runs the code of this library now. The child itself does not run meanwhile, nor
/// do other threads: it has only one.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// What the helper needs to know, at the lower end of its stack.
struct Helper {
    number: u64,
    thread_word: *const AtomicU32,
    is_done: AtomicBool,
}

/// Whether the calling process is a helper.
pub fn is_used() -> bool {
    IS_USED.load(Ordering::Relaxed)
}

/// Attaches this child by a helper. Ends the program if that fails.
pub fn run(number: u64, thread_word: *const AtomicU32) {
    let stack = map(STACK_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    advise(stack, STACK_BYTES, libc::MADV_DONTFORK);
    let helper = stack as *mut Helper;
    IS_USED.store(true, Ordering::Relaxed);
    // SAFETY: the lower end of the stack has room for a `Helper`, and no other user. The helper
    // uses the stack from its upper end, while this thread is suspended.
    let (result, is_done) = unsafe {
        helper.write(Helper { number, thread_word, is_done: AtomicBool::new(false) });
        // A handler of the program must not run in the helper.
        let mut all: libc::sigset_t = zeroed();
        let mut old: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = spawn(libc::CLONE_VFORK, stack + STACK_BYTES, main, stack, null_mut());
        if result > 0 {
            syscall(libc::SYS_wait4, [result as usize, 0, libc::__WALL as usize, 0, 0, 0]);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, null_mut());
        (result, (*helper).is_done.load(Ordering::Acquire))
    };
    IS_USED.store(false, Ordering::Relaxed);
    if result < 0 {
        fatal::exit("no process can be started that attaches this one", -result);
    }
    if !is_done {
        // The helper has said why.
        // SAFETY: ends the process without running the program's exit handlers.
        unsafe { libc::_exit(EXIT_FAILED) };
    }
    // SAFETY: the helper has ended, and nothing else uses its stack.
    unsafe {
        syscall(libc::SYS_munmap, [stack, STACK_BYTES, 0, 0, 0, 0]);
    }
}

/// Entry of the helper.
extern "C" fn main(stack: usize) -> ! {
    // SAFETY: `run` has written a `Helper` there. The descriptors are copies of the child's; the
    // one for messages stays open.
    unsafe {
        let helper = &*(stack as *const Helper);
        syscall(libc::SYS_close_range, [0, libc::STDOUT_FILENO as usize, 0, 0, 0, 0]);
        syscall(libc::SYS_close_range, [libc::STDERR_FILENO as usize + 1, u32::MAX as usize, 0, 0, 0, 0]);
        attach_here(-1, helper.number, helper.thread_word);
        helper.is_done.store(true, Ordering::Release);
        loop {
            syscall(libc::SYS_exit_group, [0; 6]);
        }
    }
}
