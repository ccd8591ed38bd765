//! The few userfaultfd calls that must be made from inside the program.

use crate::raw::syscall;

const API: u64 = 0xaa;
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_MOVE: usize = 0xc028_aa05;
const DEVICE_NEW: usize = 0xaa00;

const EVENT_FORK: u64 = 1 << 1;
const EVENT_REMAP: u64 = 1 << 2;
const EVENT_REMOVE: u64 = 1 << 3;
const EVENT_UNMAP: u64 = 1 << 6;
const SIGBUS: u64 = 1 << 7;
const THREAD_ID: u64 = 1 << 8;
const POISON: u64 = 1 << 14;
const MOVE: u64 = 1 << 16;

/// What the agent needs to hear: everything that changes which pages there are.
pub const PAGED: u64 = EVENT_FORK | EVENT_REMAP | EVENT_REMOVE | EVENT_UNMAP | THREAD_ID | POISON | MOVE;
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

/// Open a userfaultfd with these features; negative errno if the kernel will not.
pub fn open(features: u64) -> i32 {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    // SAFETY: opens a descriptor and touches no memory.
    let mut fd = unsafe { syscall(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]) };
    if fd < 0 {
        // SAFETY: the path is a valid C string; opens descriptors only.
        unsafe {
            let path = c"/dev/userfaultfd".as_ptr();
            let device = syscall(
                libc::SYS_openat,
                [libc::AT_FDCWD as usize, path as usize, (libc::O_RDWR | libc::O_CLOEXEC) as usize, 0, 0, 0],
            );
            if device >= 0 {
                fd = syscall(libc::SYS_ioctl, [device as usize, DEVICE_NEW, flags, 0, 0, 0]);
                syscall(libc::SYS_close, [device as usize, 0, 0, 0, 0, 0]);
            }
        }
    }
    if fd < 0 {
        return fd as i32;
    }
    let mut argument = ApiArgument { api: API, features, ioctls: 0 };
    // SAFETY: the argument is of the layout that this request reads and writes.
    let result =
        unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_API, &raw mut argument as usize, 0, 0, 0]) };
    if result < 0 {
        close(fd as i32);
        return result as i32;
    }
    fd as i32
}

/// Register `len` bytes at `start` for missing faults; 0 or negative errno.
pub fn register(fd: i32, start: usize, len: usize) -> isize {
    let mut argument = RegisterArgument { start: start as u64, len: len as u64, mode: 1, ioctls: 0 };
    // SAFETY: the argument is of the layout that this request reads and writes.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_REGISTER, &raw mut argument as usize, 0, 0, 0]) }
}

/// Move pages; returns how many bytes were moved, and 0 or the negative errno that ended it.
pub fn move_pages(fd: i32, to: usize, from: usize, len: usize) -> (usize, isize) {
    let mut argument = MoveArgument { dst: to as u64, src: from as u64, len: len as u64, mode: 0, moved: 0 };
    // SAFETY: the argument is of the layout that this request reads and writes. Moving pages of the program keeps
    // every byte: the agent serves faults on the old place with the content at the new one.
    let result =
        unsafe { syscall(libc::SYS_ioctl, [fd as usize, UFFDIO_MOVE, &raw mut argument as usize, 0, 0, 0]) };
    if result == 0 { (len, 0) } else { (argument.moved.max(0) as usize, result) }
}

/// Close a descriptor.
pub fn close(fd: i32) {
    // SAFETY: closes a descriptor that this library opened.
    unsafe {
        syscall(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]);
    }
}
