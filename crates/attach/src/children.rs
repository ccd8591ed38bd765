//! Children that are made without libc's `fork`, so that nothing that was registered with it is called in them.
//!
//! Stands in for libc's functions that make such children. A program that has the system call in code of its own is not seen; its
//! child is attached late, when it starts a thread or makes a child itself, or never.

use core::ffi::{c_int, c_long, c_void};
use core::mem::transmute;

use crate::attach::attach_if_forked;
use crate::memory;
use crate::next::{Next, fail};

type Work = extern "C" fn(*mut c_void) -> c_int;
type Clone =
    unsafe extern "C" fn(Work, *mut c_void, c_int, *mut c_void, *mut c_int, *mut c_void, *mut c_int) -> c_int;
type Fork = unsafe extern "C" fn() -> libc::pid_t;

static NEXT_CLONE: Next = Next::new(c"clone");
static NEXT_FORK: Next = Next::new(c"_Fork");

/// Look libc's functions up while that is allowed: a signal handler may be what calls them.
pub fn find_next() {
    NEXT_CLONE.address();
    NEXT_FORK.address();
}

/// What a child of `clone` does, in the copy of its parent's memory.
#[repr(C)]
struct Start {
    work: Work,
    argument: *mut c_void,
}

extern "C" fn begin(start: *mut c_void) -> c_int {
    // Before all else: a parent that ran on this very stack has it further down, where calls from here will write.
    // SAFETY: the child has a copy of its parent's stack, in which this is.
    let Start { work, argument } = unsafe { core::ptr::read(start.cast()) };
    attach_if_forked();
    work(argument)
}

/// Stands in for libc's function of this name, whose last three arguments need not be there: then they are not looked at.
///
/// # Safety
/// As of libc's `clone`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    work: Work,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_int,
    tls: *mut c_void,
    child: *mut c_int,
) -> c_int {
    let next = NEXT_CLONE.address();
    if next.is_null() {
        return fail(libc::ENOSYS);
    }
    // SAFETY: the next definition of this name is libc's, which has the type `Clone`; the rest is passed on as it came. A child with
    // memory of its own finds `start` in its copy of this stack, whatever becomes of this one.
    unsafe {
        let clone: Clone = transmute::<*mut c_void, Clone>(next);
        if flags & libc::CLONE_VM != 0 || stack.is_null() {
            return clone(work, stack, flags, argument, parent, tls, child);
        }
        let mut start = Start { work, argument };
        clone(begin, stack, flags, (&raw mut start).cast(), parent, tls, child)
    }
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `_Fork`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> libc::pid_t {
    let next = NEXT_FORK.address();
    if next.is_null() {
        return fail(libc::ENOSYS);
    }
    // SAFETY: the next definition of this name is libc's, which has the type `Fork`.
    let pid = unsafe { transmute::<*mut c_void, Fork>(next)() };
    if pid == 0 {
        attach_if_forked();
    }
    pid
}

/// Stands in for libc's function of this name. Whatever call it was that made this process another one, its result is 0.
///
/// # Safety
/// As of the system call that is made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // SAFETY: the caller answers for it.
    let result = unsafe {
        match number {
            libc::SYS_madvise => memory::before_madvise(c as c_int),
            libc::SYS_process_madvise => memory::before_madvise(d as c_int),
            libc::SYS_shmat => memory::before_shmat(a as c_int, b, c as c_int),
            _ => {}
        }
        crate::raw::syscall(number, [a, b, c, d, e, f])
    };
    if result == 0 {
        attach_if_forked();
    }
    // SAFETY: the kernel has got the same advice.
    unsafe {
        match number {
            libc::SYS_madvise => memory::after_madvise(a, b, c as c_int, result),
            libc::SYS_process_madvise => memory::after_process_madvise(b, c, d as c_int, result),
            _ => {}
        }
    }
    if (-4095..0).contains(&result) { c_long::from(fail(-result as c_int)) } else { result as c_long }
}
