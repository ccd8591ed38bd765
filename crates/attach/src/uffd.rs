//! The few userfaultfd calls that must be made from inside the program.

use crate::raw::syscall;

const PAGE: u64 = 4096;
const API: u64 = 0xaa;
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
pub const UFFDIO_WRITEPROTECT: usize = 0xc018_aa06;
pub const UFFDIO_MOVE: usize = 0xc028_aa05;
const DEVICE_NEW: usize = 0xaa00;
const FLAGS: usize = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;

const SIGBUS: u64 = 1 << 7;
const MOVE: u64 = 1 << 16;

/// For the staging area: no events, and whoever touches a missing page there gets an error instead of waiting for nobody.
pub const STAGING: u64 = SIGBUS | MOVE;

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

/// Make a userfaultfd, whose features are still to be chosen; negative errno if this user may not.
pub fn create() -> i32 {
    // SAFETY: opens a descriptor and touches no memory.
    let fd = unsafe { syscall(libc::SYS_userfaultfd, [FLAGS, 0, 0, 0, 0, 0]) };
    if fd >= 0 {
        return fd as i32;
    }
    // SAFETY: the path is a valid C string; opens a descriptor only.
    let device = unsafe {
        let path = c"/dev/userfaultfd".as_ptr();
        syscall(
            libc::SYS_openat,
            [libc::AT_FDCWD as usize, path as usize, (libc::O_RDWR | libc::O_CLOEXEC) as usize, 0, 0, 0],
        )
    };
    if device < 0 { fd as i32 } else { create_from(device as i32) }
}

/// Make one from the open device, which is closed.
pub fn create_from(device: i32) -> i32 {
    // SAFETY: opens a descriptor and touches no memory.
    let fd = unsafe { syscall(libc::SYS_ioctl, [device as usize, DEVICE_NEW, FLAGS, 0, 0, 0]) };
    close(device);
    fd as i32
}

/// Choose its features; 0 or negative errno. Those of the program's own are the agent's to choose: some take rights.
pub fn enable(fd: i32, features: u64) -> isize {
    let mut argument = ApiArgument { api: API, features, ioctls: 0 };
    // SAFETY: the argument is of the layout that this request reads and writes.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_API, &raw mut argument as usize, 0, 0, 0]) }
}

/// Register `len` bytes at `start` for missing faults; 0 or negative errno.
pub fn register(fd: i32, start: usize, len: usize) -> isize {
    let mut argument = RegisterArgument { start: start as u64, len: len as u64, mode: 1, ioctls: 0 };
    // SAFETY: the argument is of the layout that this request reads and writes.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_REGISTER, &raw mut argument as usize, 0, 0, 0]) }
}

/// Move pages; returns how many the kernel counted (it may have moved more, see [`crate::batch`]), and 0 or the negative errno that ended it.
pub fn move_pages(fd: i32, to: usize, from: usize, pages: usize) -> (usize, isize) {
    let len = pages as u64 * PAGE;
    let mut argument = MoveArgument { dst: to as u64, src: from as u64, len, mode: 0, moved: 0 };
    // SAFETY: the argument is of the layout that this request reads and writes. Moving pages of the program keeps
    // every byte: the agent serves faults on the old place with the content at the new one.
    let result =
        unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_MOVE, &raw mut argument as usize, 0, 0, 0]) };
    let moved = if result == 0 { len } else { argument.moved.max(0) as u64 };
    ((moved / PAGE) as usize, result)
}

/// Let pages be written that were protected, and wake who waits for that; 0 or negative errno.
pub fn unprotect(fd: i32, start: usize, len: usize) -> isize {
    let mut argument = ProtectArgument { start: start as u64, len: len as u64, mode: 0 };
    // SAFETY: the argument is of the layout that this request reads; no byte of the program's is changed.
    unsafe {
        syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_WRITEPROTECT, &raw mut argument as usize, 0, 0, 0])
    }
}

/// Close a descriptor.
pub fn close(fd: i32) {
    // SAFETY: closes a descriptor that this library opened.
    unsafe {
        syscall(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
    }
}
