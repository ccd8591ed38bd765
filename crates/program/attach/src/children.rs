//! Attaches forked children that are created without libc's `fork`, since no handler of
//! `pthread_atfork` runs in them.
//!
//! Interposes the functions of libc that create such children. A child that the program creates by
//! a system call in its own code is attached when it starts a thread or creates a child itself, or
//! never.

use core::ffi::{c_int, c_long, c_void};
use core::mem::transmute;

use crate::attach::{attach_if_forked, pin_cleared_word};
use crate::hidden;
use crate::memory;
use crate::moves::move_mappings;
use crate::next::{NextSymbol, fail_with_errno};
use crate::populate::{madvise_in_pieces, map_in_pieces};

type ChildRoutine = extern "C" fn(*mut c_void) -> c_int;
type LibcClone = unsafe extern "C" fn(
    ChildRoutine,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_int,
    *mut c_void,
    *mut c_int,
) -> c_int;
type LibcFork = unsafe extern "C" fn() -> libc::pid_t;

static NEXT_CLONE: NextSymbol = NextSymbol::new(c"clone");
static NEXT_FORK: NextSymbol = NextSymbol::new(c"_Fork");

/// The first three fields of the kernel's `struct clone_args`: flags, pidfd, child_tid.
const CLONE_ARGS_BYTES: usize = 24;

/// Looks up libc's functions in advance, because a signal handler may be the first to call them.
pub fn look_up_next_symbols() {
    NEXT_CLONE.address();
    NEXT_FORK.address();
}

/// The routine that the program runs in a child of `clone`, and its argument.
#[repr(C)]
struct ChildStart {
    routine: ChildRoutine,
    argument: *mut c_void,
}

/// The routine of each child of `clone` that has its own copy of the memory.
extern "C" fn start_child(start: *mut c_void) -> c_int {
    // This read must come first. If the parent ran on the stack that it gives the child, `start` is
    // on the same stack, where later calls of the child overwrite it.
    // SAFETY: the child has a copy of its parent's stack, and `start` is in it.
    let ChildStart { routine, argument } = unsafe { core::ptr::read(start.cast()) };
    attach_if_forked();
    routine(argument)
}

/// Interposes libc's function of this name. The caller may omit the last three arguments if
/// `flags` does not request them.
///
/// # Safety
/// As of libc's `clone`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    routine: ChildRoutine,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_int,
    tls: *mut c_void,
    child: *mut c_int,
) -> c_int {
    let next = NEXT_CLONE.address();
    if next.is_null() {
        return fail_with_errno(libc::ENOSYS);
    }
    // SAFETY: the next definition of this name is libc's, which has the type `LibcClone`. The other
    // arguments are passed on unchanged. A child with its own memory finds `start` in its copy of
    // this stack, even if the parent has returned.
    unsafe {
        let clone: LibcClone = transmute::<*mut c_void, LibcClone>(next);
        if flags & libc::CLONE_VM != 0 || stack.is_null() {
            pin_cleared_word(u64::from(flags.cast_unsigned()), child as usize);
            return clone(routine, stack, flags, argument, parent, tls, child);
        }
        let mut start = ChildStart { routine, argument };
        clone(start_child, stack, flags, (&raw mut start).cast(), parent, tls, child)
    }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `_Fork`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> libc::pid_t {
    let next = NEXT_FORK.address();
    if next.is_null() {
        return fail_with_errno(libc::ENOSYS);
    }
    // SAFETY: the next definition of this name is libc's, which has the type `LibcFork`.
    let pid = unsafe { transmute::<*mut c_void, LibcFork>(next)() };
    if pid == 0 {
        attach_if_forked();
    }
    pid
}

/// Interposes libc's function of this name.
///
/// A system call that creates a process returns 0 in it, whichever call it is. So after a result of
/// 0 this function checks whether the process is a child that is not attached yet.
///
/// # Safety
/// As of the system call.
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
    // SAFETY: the caller is responsible for the call.
    let result = unsafe {
        match number {
            libc::SYS_madvise => memory::before_madvise(c as c_int),
            libc::SYS_process_madvise => memory::before_madvise(d as c_int),
            libc::SYS_shmat => memory::before_shmat(a as c_int, b, c as c_int),
            libc::SYS_clone => pin_cleared_word(a as u64, d),
            libc::SYS_clone3 if b >= CLONE_ARGS_BYTES => {
                let arguments = a as *const u64;
                pin_cleared_word(*arguments, *arguments.add(2) as usize);
            }
            libc::SYS_set_tid_address => pin_cleared_word(u64::MAX, a),
            _ => {}
        }
        match number {
            libc::SYS_madvise => madvise_in_pieces(a, b, c as c_int),
            libc::SYS_mmap => map_in_pieces(a, b, c as c_int, d as c_int, e as c_int, f),
            libc::SYS_mremap => move_mappings(a, b, c, d as c_int, e),
            libc::SYS_wait4 => hidden::raw_wait4_without_workers(a as c_int, b, c as c_int, d),
            libc::SYS_waitid => {
                hidden::raw_waitid_without_workers(a as u32, b as u32, c as *mut _, d as c_int, e)
            }
            libc::SYS_kill => hidden::raw_kill_without_workers(a as c_int, b as c_int),
            _ => crate::raw::syscall(number, [a, b, c, d, e, f]),
        }
    };
    if result == 0 {
        attach_if_forked();
    }
    // SAFETY: the kernel was given the same advice.
    unsafe {
        match number {
            libc::SYS_madvise => memory::after_madvise(a, b, c as c_int, result),
            libc::SYS_process_madvise => memory::after_process_madvise(b, c, d as c_int, result),
            _ => {}
        }
    }
    if (-4095..0).contains(&result) {
        c_long::from(fail_with_errno(-result as c_int))
    } else {
        result as c_long
    }
}
