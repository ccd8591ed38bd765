//! The system calls on userfaultfds of segments, and on `/proc/self/pagemap`.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use aquifer_uffd::*;

/// Features for serving faults: missing and minor faults of shared memory, poison, and events of
/// `mremap`, with which a registered mapping can be moved fast.
const FEATURES: u64 =
    UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_POISON;
/// Features for tracking writes: write-protection of shared memory, of pages that do not exist yet,
/// and without messages.
const WRITE_TRACKING_FEATURES: u64 =
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC;
/// Flags of a scan that write-protects the pages which it finds, and that fails unless the kernel
/// tracks writes.
const SCAN_FLAGS: u64 = PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC;

/// Opens a userfaultfd for this process, with `/dev/userfaultfd` if it is given. With
/// `raises_sigbus`, the touch of a missing page raises SIGBUS instead of waiting.
pub fn open(device: Option<BorrowedFd<'_>>, raises_sigbus: bool) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let fd = match device {
        // SAFETY: the request takes flags and returns a new descriptor.
        Some(device) => unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as libc::Ioctl, flags) },
        // SAFETY: the call takes flags and returns a new descriptor.
        None => unsafe { i32::try_from(libc::syscall(libc::SYS_userfaultfd, flags)).unwrap_or(-1) },
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has created it for this call.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
    let features = if raises_sigbus { FEATURES | UFFD_FEATURE_SIGBUS } else { FEATURES };
    let mut argument = uffdio_api { api: UFFD_API, features, ioctls: 0 };
    request(&uffd, UFFDIO_API, &raw mut argument)?;
    Ok(uffd)
}

/// Opens a userfaultfd with which the kernel tracks writes.
pub fn open_for_write_tracking() -> io::Result<OwnedFd> {
    // Any user may have a userfaultfd that does not serve the kernel's own accesses.
    let flags = libc::O_CLOEXEC | UFFD_USER_MODE_ONLY;
    // SAFETY: the call takes flags and returns a new descriptor.
    let fd = unsafe { i32::try_from(libc::syscall(libc::SYS_userfaultfd, flags)).unwrap_or(-1) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has created it for this call.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut argument = uffdio_api { api: UFFD_API, features: WRITE_TRACKING_FEATURES, ioctls: 0 };
    request(&uffd, UFFDIO_API, &raw mut argument)?;
    Ok(uffd)
}

/// Begins to track writes to a range.
pub fn track_writes(uffd: &OwnedFd, address: usize, bytes: usize) -> io::Result<()> {
    let mode = UFFDIO_REGISTER_MODE_WP;
    let mut argument = uffdio_register { range: range(address, bytes), mode, ioctls: 0 };
    request(uffd, UFFDIO_REGISTER, &raw mut argument)
}

/// A range of pages that were written, in the layout of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct WrittenRange {
    start: u64,
    end: u64,
    categories: u64,
}

impl WrittenRange {
    /// The first address of the range.
    pub fn start(&self) -> usize {
        usize::try_from(self.start).unwrap_or(usize::MAX)
    }

    /// The address after the range.
    pub fn end(&self) -> usize {
        usize::try_from(self.end).unwrap_or(usize::MAX)
    }
}

/// Finds the pages of `addresses` that were written since they were found last, and protects them
/// again. Returns the number of `ranges` that were filled in, and the address at which the scan
/// ended.
pub fn scan_written(
    pagemap: BorrowedFd<'_>,
    addresses: Range<usize>,
    ranges: &mut [WrittenRange],
) -> io::Result<(usize, usize)> {
    let mut argument = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: SCAN_FLAGS,
        start: addresses.start as u64,
        end: addresses.end as u64,
        walk_end: 0,
        vec: ranges.as_mut_ptr().expose_provenance() as u64,
        vec_len: ranges.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_WRITTEN,
    };
    // SAFETY: the request writes at most `vec_len` ranges, whose layout is the kernel's, and the
    // argument, both alive for the call. It changes no memory.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
    if found < 0 {
        return Err(io::Error::last_os_error());
    }
    let found = usize::try_from(found).unwrap_or(0).min(ranges.len());
    Ok((found, usize::try_from(argument.walk_end).unwrap_or(addresses.end)))
}

/// Registers a range for missing and minor faults.
pub fn register(uffd: &OwnedFd, address: usize, bytes: usize) -> io::Result<()> {
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR;
    let mut argument = uffdio_register { range: range(address, bytes), mode, ioctls: 0 };
    request(uffd, UFFDIO_REGISTER, &raw mut argument)
}

/// Ends the registration of a range.
pub fn unregister(uffd: &OwnedFd, address: usize, bytes: usize) -> io::Result<()> {
    let mut argument = range(address, bytes);
    request(uffd, UFFDIO_UNREGISTER, &raw mut argument)
}

/// Maps pages whose bytes are in the file, and wakes the threads that wait for them. Returns the
/// number of bytes from `address` on that were mapped: fewer than `bytes` if the next page is
/// mapped already, or cannot be.
pub fn resume(uffd: &OwnedFd, address: usize, bytes: usize) -> io::Result<usize> {
    let mut argument = uffdio_continue { range: range(address, bytes), mode: 0, mapped: 0 };
    match (request(uffd, UFFDIO_CONTINUE, &raw mut argument), usize::try_from(argument.mapped)) {
        (_, Ok(filled)) if filled > 0 => Ok(filled),
        (result, _) => result.map(|()| 0),
    }
}

/// Maps a page of zeros where the file has a hole, and wakes the threads that wait for it.
pub fn fill_with_zeros(uffd: &OwnedFd, address: usize) -> io::Result<()> {
    let mut argument = uffdio_zeropage { range: range(address, 4096), mode: 0, zeropage: 0 };
    request(uffd, UFFDIO_ZEROPAGE, &raw mut argument)
}

/// Marks a page as lost: each touch of it raises SIGBUS.
pub fn poison(uffd: &OwnedFd, address: usize) -> io::Result<()> {
    let mut argument = uffdio_poison { range: range(address, 4096), mode: 0, updated: 0 };
    request(uffd, UFFDIO_POISON, &raw mut argument)
}

/// Wakes the threads that wait for pages, so that they touch the pages again.
pub fn wake(uffd: &OwnedFd, address: usize, bytes: usize) -> io::Result<()> {
    let mut argument = range(address, bytes);
    request(uffd, UFFDIO_WAKE, &raw mut argument)
}

fn range(address: usize, bytes: usize) -> uffdio_range {
    uffdio_range { start: address as u64, len: bytes as u64 }
}

fn request<T>(uffd: &OwnedFd, request: u64, argument: *mut T) -> io::Result<()> {
    // SAFETY: each caller passes the argument type that its request reads and writes, alive for the
    // call. The requests change mappings of segments only, as intended.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), request, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
