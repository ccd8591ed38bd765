//! The calls of userfaultfd that must be made inside the program.

use crate::raw::{close, syscall};

const PAGE: u64 = 4096;
const API: u64 = 0xaa;
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
pub const UFFDIO_WRITEPROTECT: usize = 0xc018_aa06;
pub const UFFDIO_MOVE: usize = 0xc028_aa05;
const USERFAULTFD_IOC_NEW: usize = 0xaa00;
const FLAGS: usize = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
const REGISTER_MODE_MISSING: u64 = 1;

const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_MOVE: u64 = 1 << 16;

/// Features for the staging buffers: no events, and an access to a missing page raises SIGBUS. It
/// must not wait, because no process resolves faults there.
pub const STAGING_FEATURES: u64 = FEATURE_SIGBUS | FEATURE_MOVE;

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArgument {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct MoveArgument {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

#[repr(C)]
struct ProtectArgument {
    start: u64,
    len: u64,
    mode: u64,
}

/// Opens a userfaultfd without any feature yet. Returns a negative errno if this user must not.
pub fn create() -> i32 {
    // SAFETY: opens a descriptor and accesses no memory.
    let fd = unsafe { syscall(libc::SYS_userfaultfd, [FLAGS, 0, 0, 0, 0, 0]) };
    if fd >= 0 {
        return fd as i32;
    }
    // SAFETY: the path is a valid C string; the call only opens a descriptor.
    let device = unsafe {
        let path = c"/dev/userfaultfd".as_ptr();
        syscall(
            libc::SYS_openat,
            [libc::AT_FDCWD as usize, path as usize, (libc::O_RDWR | libc::O_CLOEXEC) as usize, 0, 0, 0],
        )
    };
    if device < 0 { fd as i32 } else { create_from(device as i32) }
}

/// Opens a userfaultfd by the open device `/dev/userfaultfd`, and closes the device. Returns a
/// negative errno on failure.
pub fn create_from(device: i32) -> i32 {
    // SAFETY: opens a descriptor and accesses no memory.
    let fd = unsafe { syscall(libc::SYS_ioctl, [device as usize, USERFAULTFD_IOC_NEW, FLAGS, 0, 0, 0]) };
    close(device);
    fd as i32
}

/// Enables features of a userfaultfd. Returns 0 or a negative errno.
///
/// The agent enables those of the program's own userfaultfd, because some need privileges.
pub fn enable(fd: i32, features: u64) -> isize {
    let mut argument = ApiArgument { api: API, features, ioctls: 0 };
    // SAFETY: the argument has the layout that this request reads and writes.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_API, &raw mut argument as usize, 0, 0, 0]) }
}

/// Registers `len` bytes at `start` for faults on missing pages. Returns 0 or a negative errno.
pub fn register(fd: i32, start: usize, len: usize) -> isize {
    let mut argument =
        RegisterArgument { start: start as u64, len: len as u64, mode: REGISTER_MODE_MISSING, ioctls: 0 };
    // SAFETY: the argument has the layout that this request reads and writes.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_REGISTER, &raw mut argument as usize, 0, 0, 0]) }
}

/// Moves pages. Returns the number of pages that the kernel has counted, and 0 or the negative
/// errno that ended the call.
///
/// The kernel may have moved more pages: see [`crate::batch`].
pub fn move_pages(fd: i32, to: usize, from: usize, pages: usize) -> (usize, isize) {
    let len = pages as u64 * PAGE;
    let mut argument = MoveArgument { dst: to as u64, src: from as u64, len, mode: 0, moved: 0 };
    // SAFETY: the argument has the layout that this request reads and writes. A page keeps its
    // bytes when it is moved, and the agent resolves faults at its old address with these bytes.
    let result =
        unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_MOVE, &raw mut argument as usize, 0, 0, 0]) };
    let moved = if result == 0 { len } else { argument.moved.max(0) as u64 };
    ((moved / PAGE) as usize, result)
}

/// Removes the write protection of pages, and wakes the threads that wait to write to them. Returns
/// 0 or a negative errno.
pub fn unprotect(fd: i32, start: usize, len: usize) -> isize {
    let mut argument = ProtectArgument { start: start as u64, len: len as u64, mode: 0 };
    // SAFETY: the argument has the layout that this request reads. No byte of the program changes.
    unsafe {
        syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_WRITEPROTECT, &raw mut argument as usize, 0, 0, 0])
    }
}
