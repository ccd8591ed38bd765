//! The calls of userfaultfd that must be made inside the program.

use aquifer_uffd::*;

use crate::raw::{close, syscall};

const PAGE: u64 = 4096;
const FLAGS: usize = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;

/// Features for the staging buffers: no events, and an access to a missing page raises SIGBUS. The
/// access must not wait, because no process resolves faults there.
pub const STAGING_FEATURES: u64 = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MOVE;

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
    let fd =
        unsafe { syscall(libc::SYS_ioctl, [device as usize, USERFAULTFD_IOC_NEW as usize, FLAGS, 0, 0, 0]) };
    close(device);
    fd as i32
}

/// Enables features of a userfaultfd. Returns 0 or a negative errno.
///
/// The agent enables those of the program's own userfaultfd, because some need privileges.
pub fn enable(fd: i32, features: u64) -> isize {
    let mut argument = uffdio_api { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: the argument has the layout that this request reads and writes.
    unsafe {
        syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_API as usize, &raw mut argument as usize, 0, 0, 0])
    }
}

/// Registers `len` bytes at `start` for faults on missing pages. Returns 0 or a negative errno.
pub fn register(fd: i32, start: usize, len: usize) -> isize {
    let range = uffdio_range { start: start as u64, len: len as u64 };
    let mut argument = uffdio_register { range, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
    // SAFETY: the argument has the layout that this request reads and writes.
    unsafe {
        syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_REGISTER as usize, &raw mut argument as usize, 0, 0, 0])
    }
}

/// Moves pages. Returns the number of pages that the kernel has counted, and 0 or the negative
/// errno that ended the call.
///
/// The kernel may have moved more pages: see [`crate::batch`].
pub fn move_pages(fd: i32, to: usize, from: usize, pages: usize) -> (usize, isize) {
    let len = pages as u64 * PAGE;
    let mut argument = uffdio_move { dst: to as u64, src: from as u64, len, mode: 0, move_: 0 };
    // SAFETY: the argument has the layout that this request reads and writes. A page keeps its
    // bytes when it is moved, and the agent resolves faults at its old address with these bytes.
    let result = unsafe {
        syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_MOVE as usize, &raw mut argument as usize, 0, 0, 0])
    };
    let moved = if result == 0 { len } else { argument.move_.max(0) as u64 };
    ((moved / PAGE) as usize, result)
}

/// Removes the write protection of pages, and wakes the threads that wait to write to them. Returns
/// 0 or a negative errno.
pub fn unprotect(fd: i32, start: usize, len: usize) -> isize {
    let range = uffdio_range { start: start as u64, len: len as u64 };
    let mut argument = uffdio_writeprotect { range, mode: 0 };
    // SAFETY: the argument has the layout that this request reads. No byte of the program changes.
    unsafe {
        syscall(
            libc::SYS_ioctl,
            [fd as usize, UFFDIO_WRITEPROTECT as usize, &raw mut argument as usize, 0, 0, 0],
        )
    }
}
