//! Populates memory in pieces, because one system call that makes many pages resident would exceed
//! the limit: it holds the lock of the address space, and the agent cannot register memory that is
//! mapped or filled meanwhile.
//!
//! Between two pieces the agent registers new mappings. Then each page waits for room like a fault
//! (`docs/formats/paging.md`, "Waiting for room"), also within the kernel.

use core::ffi::{c_int, c_void};
use core::mem::transmute;

use crate::attach;
use crate::next::{NextSymbol, fail_with_errno};
use crate::raw::syscall;

type LibcMmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;

static NEXT_MMAP: NextSymbol = NextSymbol::new(c"mmap64");

const PAGE: usize = 4096;
/// Bytes that are populated at once: less than a tenth of the bytes by which a run may exceed its
/// limit.
const PIECE_BYTES: usize = 1 << 20;
/// A signal has interrupted the call.
const INTERRUPTED: isize = -(libc::EINTR as isize);
/// `MLOCK_ONFAULT`: pages are locked when they are accessed.
const MLOCK_ONFAULT: c_int = 1;

/// Looks up libc's function in advance, because a signal handler may be the first to call it.
pub fn look_up_next_symbol() {
    NEXT_MMAP.address();
}

/// Whether an advice makes pages resident.
fn populates(advice: c_int) -> bool {
    matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE)
}

/// `madvise` as a system call, which populates in pieces. Returns the kernel's result.
///
/// # Safety
/// As of the system call.
pub unsafe fn madvise_in_pieces(address: usize, length: usize, advice: c_int) -> isize {
    // SAFETY: as of the caller.
    let madvise = |address: usize, length: usize| unsafe {
        syscall(libc::SYS_madvise, [address, length, advice as usize, 0, 0, 0])
    };
    let is_one_piece = length <= PIECE_BYTES || address.checked_add(length).is_none();
    if is_one_piece || !populates(advice) || !attach::is_attached() {
        return madvise(address, length);
    }
    let mut done = 0;
    while done < length {
        let piece = PIECE_BYTES.min(length - done);
        let result = madvise(address + done, piece);
        if result < 0 {
            return result;
        }
        done += piece;
    }
    0
}

/// Populates a range as far as that is possible, as `mmap` does.
fn populate(address: usize, length: usize, advice: c_int) {
    loop {
        // SAFETY: makes pages resident, and changes no byte.
        let result = unsafe { madvise_in_pieces(address, length, advice) };
        if result != INTERRUPTED {
            return;
        }
    }
}

/// `mmap` as a system call, which populates private memory in pieces. Returns the kernel's result.
///
/// # Safety
/// As of the system call.
pub unsafe fn map_in_pieces(
    address: usize,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: usize,
) -> isize {
    let others = libc::MAP_NONBLOCK | libc::MAP_LOCKED | libc::MAP_HUGETLB;
    let populates = flags & (libc::MAP_POPULATE | others) == libc::MAP_POPULATE;
    let is_private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
    let in_pieces = populates && is_private && length > PIECE_BYTES && attach::is_attached();
    let kept = if in_pieces { flags & !libc::MAP_POPULATE } else { flags };
    // SAFETY: as of the caller.
    let result = unsafe {
        syscall(libc::SYS_mmap, [address, length, protection as usize, kept as usize, fd as usize, offset])
    };
    if in_pieces && !(-4095..0).contains(&result) {
        let advice = if protection & libc::PROT_WRITE != 0 {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        populate(result as usize, length, advice);
    }
    result
}

/// Makes pages resident that are about to be locked, so that the lock finds them there.
fn populate_to_lock(address: usize, length: usize) {
    let start = address / PAGE * PAGE;
    let Some(end) = address.checked_add(length).and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return;
    };
    if end - start > PIECE_BYTES && attach::is_attached() {
        // Fails at memory that cannot be written. The lock populates the rest.
        populate(start, end - start, libc::MADV_POPULATE_WRITE);
    }
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `mmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // Other libraries map memory before this one looks up libc's function, also while they look up
    // another one.
    let next = NEXT_MMAP.resolved();
    // SAFETY: the caller is responsible for the call. The next definition of this name is libc's,
    // or that of a tool which must know of each mapping; it has the type `LibcMmap`.
    let result = unsafe {
        if flags & libc::MAP_POPULATE == 0 && !next.is_null() {
            return transmute::<*mut c_void, LibcMmap>(next)(address, length, protection, flags, fd, offset);
        }
        map_in_pieces(address as usize, length, protection, flags, fd, offset as usize)
    };
    let is_error = (-4095..0).contains(&result);
    if is_error { fail_with_errno(-result as c_int) as isize as *mut c_void } else { result as *mut c_void }
}

/// Interposes libc's function of this name, which is the same as `mmap`.
///
/// # Safety
/// As of libc's `mmap64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as of the caller.
    unsafe { mmap(address, length, protection, flags, fd, offset) }
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else.
///
/// # Safety
/// As of libc's `mlock`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, length: usize) -> c_int {
    populate_to_lock(address as usize, length);
    // SAFETY: as of the caller.
    let result = unsafe { syscall(libc::SYS_mlock, [address as usize, length, 0, 0, 0, 0]) };
    if result < 0 { fail_with_errno(-result as c_int) } else { 0 }
}

/// Interposes libc's function of this name. Makes the system call itself, because libc's function
/// does nothing else.
///
/// # Safety
/// As of libc's `mlock2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, length: usize, flags: c_int) -> c_int {
    if flags & MLOCK_ONFAULT == 0 {
        populate_to_lock(address as usize, length);
    }
    // SAFETY: as of the caller.
    let result = unsafe { syscall(libc::SYS_mlock2, [address as usize, length, flags as usize, 0, 0, 0]) };
    if result < 0 { fail_with_errno(-result as c_int) } else { 0 }
}
