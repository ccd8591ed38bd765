//! Makes the kernel report changes of memory for which it raises no event.
//!
//! Interposes the functions of libc that make such changes. A change that the program makes by a
//! system call in its own code is missed. `docs/formats/paging.md` has the list of all changes.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::attach;
use crate::next::fail_with_errno;
use crate::populate::madvise_in_pieces;
use crate::raw::syscall;

/// Drops the contents of pages, and makes accesses to them raise SIGSEGV. Since Linux 6.13.
const MADV_GUARD_INSTALL: c_int = 102;
/// Flag of `shmat`: the segment replaces the mappings at its address.
const SHM_REMAP: c_int = 0o40000;
const PAGE: usize = 4096;
/// Error for a page that has a guard or cannot be read.
const FAULT: isize = -(libc::EFAULT as isize);
/// Most ranges of one call of `process_madvise`.
const RANGES_MAX: usize = 1024;

/// Whether the program may have memory that is absent or empty in its forked children. A child
/// inherits the value.
static HAS_FORK_ADVICE: AtomicBool = AtomicBool::new(false);

/// Whether the program may have memory that is absent or empty in its forked children.
pub fn has_fork_advice() -> bool {
    HAS_FORK_ADVICE.load(Ordering::Acquire)
}

/// Reports to the agent the first advice that changes the memory of forked children. Must be called
/// before the kernel gets the advice.
pub fn before_madvise(advice: c_int) {
    if matches!(advice, libc::MADV_DONTFORK | libc::MADV_WIPEONFORK)
        && !HAS_FORK_ADVICE.swap(true, Ordering::AcqRel)
    {
        attach::report_fork_advice();
    }
}

/// Makes the kernel report an advice about a range. Must be called after the advice, with the
/// kernel's result.
///
/// If the advice was to install guards, the function drops the pages once more, so that the kernel
/// reports the drop as an event. The guards stay. After an error the kernel may have applied the
/// advice to a part of the range. Only pages with guards are dropped then.
///
/// # Safety
/// The kernel must have been given that advice by the caller.
pub unsafe fn after_madvise(address: usize, length: usize, advice: c_int, result: isize) {
    if advice != MADV_GUARD_INSTALL {
        return;
    }
    // SAFETY: the caller has just dropped the contents of these pages.
    unsafe { if result >= 0 { drop_pages(address, length) } else { drop_guarded_pages(address, length) } }
}

unsafe fn drop_pages(address: usize, length: usize) {
    // SAFETY: the caller does not need the contents.
    unsafe {
        syscall(libc::SYS_madvise, [address, length, libc::MADV_DONTNEED as usize, 0, 0, 0]);
    }
}

/// Drops those pages of a range that have guards. Memory without read permission counts as guarded.
unsafe fn drop_guarded_pages(address: usize, length: usize) {
    let Some(end) = address.checked_add(length).filter(|_| address.is_multiple_of(PAGE)) else { return };
    for page in (address..end).step_by(PAGE) {
        // SAFETY: the first call changes no byte. A page with a guard has no contents.
        unsafe {
            let populate = libc::MADV_POPULATE_READ as usize;
            if syscall(libc::SYS_madvise, [page, PAGE, populate, 0, 0, 0]) == FAULT {
                drop_pages(page, PAGE);
            }
        }
    }
}

/// Maps anonymous memory where a `shmat` will replace memory, because the kernel reports that
/// change. Must be called before `shmat`.
///
/// Nothing is replaced if the segment cannot be attached.
///
/// # Safety
/// As of the system call `shmat`.
pub unsafe fn before_shmat(segment: c_int, address: usize, flags: c_int) {
    let is_valid = address != 0 && (address.is_multiple_of(PAGE) || flags & libc::SHM_RND != 0);
    if flags & SHM_REMAP == 0 || !is_valid {
        return;
    }
    // SAFETY: the kernel writes the struct. The trial maps the segment at a free address. The
    // caller allows the range to be replaced.
    unsafe {
        let trial = syscall(libc::SYS_shmat, [segment as usize, 0, (flags & !SHM_REMAP) as usize, 0, 0, 0]);
        if (-4095..0).contains(&trial) {
            return;
        }
        let mut status: libc::shmid_ds = core::mem::zeroed();
        let status_at = (&raw mut status) as usize;
        let is_known =
            syscall(libc::SYS_shmctl, [segment as usize, libc::IPC_STAT as usize, status_at, 0, 0, 0]) == 0;
        syscall(libc::SYS_shmdt, [trial as usize, 0, 0, 0, 0, 0]);
        if is_known {
            let length = status.shm_segsz.next_multiple_of(PAGE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let start = address / PAGE * PAGE;
            syscall(libc::SYS_mmap, [start, length, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0]);
        }
    }
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else. Memory is populated in pieces.
///
/// # Safety
/// As of libc's `madvise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    before_madvise(advice);
    // SAFETY: the caller is responsible for the call. The second call drops again what the first
    // has dropped.
    let result = unsafe {
        let result = madvise_in_pieces(address as usize, length, advice);
        after_madvise(address as usize, length, advice, result);
        result
    };
    if result < 0 { fail_with_errno(-result as c_int) } else { 0 }
}

/// [`after_madvise`] for each range of `process_madvise`, whose result is the number of bytes to
/// which the kernel has applied the advice.
///
/// The ranges are those of this process, because the kernel refuses advice that drops contents of
/// another process.
///
/// # Safety
/// As of the system call `process_madvise`.
pub unsafe fn after_process_madvise(ranges: usize, count: usize, advice: c_int, result: isize) {
    if advice != MADV_GUARD_INSTALL || result == FAULT || count > RANGES_MAX {
        // The kernel has read no ranges.
        return;
    }
    let mut applied = usize::try_from(result).unwrap_or(0);
    for at in 0..count {
        // SAFETY: the kernel has read the same ranges.
        unsafe {
            let libc::iovec { iov_base, iov_len } = *(ranges as *const libc::iovec).add(at);
            if applied < iov_len {
                // The kernel has ended here.
                return drop_guarded_pages(iov_base as usize, iov_len);
            }
            drop_pages(iov_base as usize, iov_len);
            applied -= iov_len;
        }
    }
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else.
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
    // SAFETY: the caller is responsible for the call. The second call drops again what the first
    // has dropped.
    let result = unsafe {
        let arguments = [pidfd as usize, ranges as usize, count, advice as usize, flags as usize, 0];
        let result = syscall(libc::SYS_process_madvise, arguments);
        after_process_madvise(ranges as usize, count, advice, result);
        result
    };
    if result < 0 { fail_with_errno(-result as c_int) as isize } else { result }
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else.
///
/// # Safety
/// As of libc's `shmat`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shmat(segment: c_int, address: *const c_void, flags: c_int) -> *mut c_void {
    // SAFETY: the caller is responsible for the call, which may replace what is mapped at the
    // address.
    let result = unsafe {
        before_shmat(segment, address as usize, flags);
        syscall(libc::SYS_shmat, [segment as usize, address as usize, flags as usize, 0, 0, 0])
    };
    let is_error = (-4095..0).contains(&result);
    if is_error { fail_with_errno(-result as c_int) as isize as *mut c_void } else { result as *mut c_void }
}
