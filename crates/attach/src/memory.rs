//! Changes of memory that the kernel does not report as events.
//!
//! Interposes the functions of libc that make them. `docs/formats/paging.md` has the list of all
//! changes, and what becomes of those that a program makes by system calls in its own code.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::attach;
use crate::next::fail;
use crate::raw::syscall;

/// Drops the contents, and lets accesses fail. Since Linux 6.13.
const MADV_GUARD_INSTALL: c_int = 102;
/// The new memory replaces what is mapped at its address.
const SHM_REMAP: c_int = 0o40000;
const PAGE: usize = 4096;
/// Errors of `madvise` after which it may have dropped contents. After a hole it goes on.
const FOLLOWED_IN_PART: [isize; 3] =
    [-(libc::ENOMEM as isize), -(libc::EAGAIN as isize), -(libc::EINTR as isize)];

/// Whether memory may exist that a forked child does not get, or gets empty. Children inherit it.
static HAS_FORK_ADVICE: AtomicBool = AtomicBool::new(false);

pub fn has_fork_advice() -> bool {
    HAS_FORK_ADVICE.load(Ordering::Acquire)
}

/// Notes an advice before the kernel gets it.
pub fn before_madvise(advice: c_int) {
    if matches!(advice, libc::MADV_DONTFORK | libc::MADV_WIPEONFORK)
        && !HAS_FORK_ADVICE.swap(true, Ordering::AcqRel)
    {
        attach::report_fork_advice();
    }
}

/// What an advice needs when the kernel has followed it, with this result: the agent must learn that
/// contents were dropped. Guards stay when their pages are dropped once more.
///
/// The kernel may have followed it in part. It has not if it does not know the advice (`EINVAL`).
pub unsafe fn after_madvise(address: usize, length: usize, advice: c_int, result: isize) {
    let is_done = result >= 0 || FOLLOWED_IN_PART.contains(&result);
    if advice == MADV_GUARD_INSTALL && is_done {
        // SAFETY: drops pages whose contents the caller has just dropped.
        unsafe {
            syscall(libc::SYS_madvise, [address, length, libc::MADV_DONTNEED as usize, 0, 0, 0]);
        }
    }
}

/// Has the agent learn that `shmat` will replace memory: maps other memory there, which is reported.
///
/// Nothing is replaced if the segment cannot be attached.
pub unsafe fn before_shmat(segment: c_int, address: usize, flags: c_int) {
    let is_valid = address != 0 && (address.is_multiple_of(PAGE) || flags & libc::SHM_RND != 0);
    if flags & SHM_REMAP == 0 || !is_valid {
        return;
    }
    // SAFETY: the kernel writes the struct; the first mapping is a new one; the caller lets the range be
    // replaced.
    unsafe {
        let trial = syscall(libc::SYS_shmat, [segment as usize, 0, (flags & !SHM_REMAP) as usize, 0, 0, 0]);
        if (-4095..0).contains(&trial) {
            return;
        }
        let mut about: libc::shmid_ds = core::mem::zeroed();
        let place = (&raw mut about) as usize;
        let is_known =
            syscall(libc::SYS_shmctl, [segment as usize, libc::IPC_STAT as usize, place, 0, 0, 0]) == 0;
        syscall(libc::SYS_shmdt, [trial as usize, 0, 0, 0, 0, 0]);
        if is_known {
            let length = about.shm_segsz.next_multiple_of(PAGE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let start = address / PAGE * PAGE;
            syscall(libc::SYS_mmap, [start, length, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0]);
        }
    }
}

/// Interposes libc's function of this name. libc's only makes the system call, too.
///
/// # Safety
/// As of libc's `madvise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    before_madvise(advice);
    // SAFETY: the caller answers for the call, and the second one drops what the first has dropped.
    let result = unsafe {
        let result = syscall(libc::SYS_madvise, [address as usize, length, advice as usize, 0, 0, 0]);
        after_madvise(address as usize, length, advice, result);
        result
    };
    if result < 0 { fail(-result as c_int) } else { 0 }
}

/// The same for the ranges of `process_madvise`. For another process the kernel takes no advice that
/// drops contents.
///
/// # Safety
/// As of the system call.
pub unsafe fn after_process_madvise(ranges: usize, count: usize, advice: c_int, result: isize) {
    if advice != MADV_GUARD_INSTALL {
        return;
    }
    for at in 0..count {
        // SAFETY: the kernel has read the same ranges.
        unsafe {
            let libc::iovec { iov_base, iov_len } = *(ranges as *const libc::iovec).add(at);
            after_madvise(iov_base as usize, iov_len, advice, result);
        }
    }
}

/// Interposes libc's function of this name. libc's only makes the system call, too.
///
/// # Safety
/// As of libc's `process_madvise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    pidfd: c_int,
    ranges: *const libc::iovec,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    before_madvise(advice);
    // SAFETY: the caller answers for the call, and the second one drops what the first has dropped.
    let result = unsafe {
        let arguments = [pidfd as usize, ranges as usize, count, advice as usize, flags as usize, 0];
        let result = syscall(libc::SYS_process_madvise, arguments);
        after_process_madvise(ranges as usize, count, advice, result);
        result
    };
    if result < 0 { fail(-result as c_int) as isize } else { result }
}

/// Interposes libc's function of this name. libc's only makes the system call, too.
///
/// # Safety
/// As of libc's `shmat`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmat(segment: c_int, address: *const c_void, flags: c_int) -> *mut c_void {
    // SAFETY: the caller answers for the call, which replaces what is mapped at the address.
    let result = unsafe {
        before_shmat(segment, address as usize, flags);
        syscall(libc::SYS_shmat, [segment as usize, address as usize, flags as usize, 0, 0, 0])
    };
    let is_error = (-4095..0).contains(&result);
    if is_error { fail(-result as c_int) as isize as *mut c_void } else { result as *mut c_void }
}
