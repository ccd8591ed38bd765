//! System calls that an attacker makes without the help of the shim.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

pub const PAGE: usize = 4096;
const DEVICE_NEW: u64 = 0xaa00;

/// Maps anonymous memory at an address.
pub fn map_at(address: usize, bytes: usize) {
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
    );
    // SAFETY: maps memory where nothing is.
    let mapped = unsafe { libc::mmap(address as *mut c_void, bytes, protection, flags, -1, 0) };
    assert_eq!(mapped as usize, address, "{}", io::Error::last_os_error());
}

/// Maps anonymous memory that the system does not account for; returns its address.
pub fn reserve(bytes: usize) -> usize {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    mapped as usize
}

/// Writes to a byte of a mapping.
pub fn touch(address: usize) {
    // SAFETY: the address is in a mapping of this process.
    unsafe { (address as *mut u8).write_volatile(1) };
}

/// The words of a page of a mapping.
pub fn words<'a>(page: usize) -> &'a mut [u64] {
    // SAFETY: the page is in a mapping of this process, and each caller has one slice at a time.
    unsafe { std::slice::from_raw_parts_mut(page as *mut u64, PAGE / size_of::<u64>()) }
}

/// Discards pages of anonymous memory, which are zero afterwards.
pub fn discard(address: usize, bytes: usize) {
    // SAFETY: the range is in a mapping of this process, and no reference into it exists.
    let discarded = unsafe { libc::madvise(address as *mut c_void, bytes, libc::MADV_DONTNEED) };
    assert_eq!(discarded, 0, "{}", io::Error::last_os_error());
}

/// A userfaultfd of the calling process, from the open device.
pub fn userfaultfd(device: &OwnedFd) -> OwnedFd {
    // SAFETY: creates a descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), DEVICE_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A userfaultfd of the calling process that needs no device: for faults in user mode only.
pub fn userfaultfd_of_user_mode() -> OwnedFd {
    const USER_MODE_ONLY: i32 = 1;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: creates a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("a descriptor")) }
}

/// Maps the first page of a file. Returns whether that was possible.
pub fn map_file(file: &std::fs::File) -> bool {
    // SAFETY: a new mapping.
    let mapped = unsafe {
        libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
    };
    mapped != libc::MAP_FAILED
}

/// Forks. The child runs `child` and then waits to be killed.
pub fn fork(child: impl FnOnce()) -> i32 {
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        child();
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }
    pid
}

pub fn kill(pid: i32) {
    // SAFETY: signals a child of this process.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

pub fn wait(pid: i32) {
    // SAFETY: waits for a child of this process.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
}

/// Lets the kernel clear no word when the calling thread ends.
pub fn clear_no_word() {
    // SAFETY: the kernel does nothing with the address 0.
    unsafe { libc::syscall(libc::SYS_set_tid_address, 0) };
}

/// Writes to the memory of a process of this user. Returns whether all was written.
pub fn write_memory(process: i32, address: usize, bytes: &[u8]) -> bool {
    let from = libc::iovec { iov_base: bytes.as_ptr() as *mut c_void, iov_len: bytes.len() };
    let to = libc::iovec { iov_base: address as *mut c_void, iov_len: bytes.len() };
    // SAFETY: the kernel reads `bytes`, and refuses addresses that are not mapped. In this process
    // it writes to memory that the caller names, which has atomic integers only.
    let written = unsafe { libc::process_vm_writev(process, &raw const from, 1, &raw const to, 1, 0) };
    usize::try_from(written) == Ok(bytes.len())
}

/// The ids of all processes, read without libc's functions, which hide the worker.
pub fn processes() -> impl Iterator<Item = i32> {
    let proc = rustix::fs::open("/proc", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("proc");
    let entries = rustix::fs::Dir::new(proc).expect("a folder").flatten();
    entries.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
}

/// The userfaultfds of the worker of this process, which shares its memory.
pub fn steal_userfaultfds() -> Vec<OwnedFd> {
    let mut stolen = Vec::new();
    for pid in processes().filter(|pid| shares_memory(*pid)) {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let is_uffd = std::fs::read_link(entry.path())
                .is_ok_and(|target| target.as_os_str() == "anon_inode:[userfaultfd]");
            let fd = entry.file_name().to_string_lossy().parse::<i32>();
            stolen.extend(fd.ok().filter(|_| is_uffd).and_then(|fd| steal(pid, fd)));
        }
    }
    stolen
}

fn shares_memory(pid: i32) -> bool {
    const KCMP_VM: i32 = 1;
    let own = i32::try_from(std::process::id()).expect("a process number");
    // SAFETY: compares two processes.
    pid != own && unsafe { libc::syscall(libc::SYS_kcmp, own, pid, KCMP_VM, 0, 0) } == 0
}

/// A descriptor of another process of this user.
fn steal(pid: i32, fd: i32) -> Option<OwnedFd> {
    // SAFETY: creates descriptors.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        let stolen = libc::syscall(libc::SYS_pidfd_getfd, pidfd, fd, 0);
        libc::close(i32::try_from(pidfd).ok()?);
        i32::try_from(stolen).ok().filter(|fd| *fd >= 0).map(|fd| OwnedFd::from_raw_fd(fd))
    }
}

/// Lets this process have as many descriptors as it may.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("up to the hard limit");
}
