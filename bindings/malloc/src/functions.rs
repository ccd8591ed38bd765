//! Replacements of libc's allocation functions: those that the manual of glibc lists in "Replacing
//! malloc", and `malloc_trim`.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use libmimalloc_sys::{
    mi_calloc, mi_collect, mi_free, mi_malloc, mi_malloc_aligned, mi_posix_memalign, mi_realloc,
    mi_usable_size,
};

use crate::arena::prepare;

const PAGE_BYTES: usize = 4096;

/// Sets errno if an allocation has failed, because mimalloc does not.
fn or_enomem(address: *mut c_void) -> *mut c_void {
    if address.is_null() { fail(libc::ENOMEM) } else { address }
}

#[cold]
fn fail(error: c_int) -> *mut c_void {
    // SAFETY: libc returns a valid pointer to the thread's errno.
    unsafe { *libc::__errno_location() = error };
    null_mut()
}

/// Replaces libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    prepare();
    // SAFETY: each size is valid.
    or_enomem(unsafe { mi_malloc(bytes) })
}

/// Replaces libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    prepare();
    // SAFETY: all sizes are valid.
    or_enomem(unsafe { mi_calloc(count, bytes) })
}

/// Replaces libc's function of this name.
///
/// # Safety
/// As of libc's `free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(address: *mut c_void) {
    // SAFETY: the caller keeps the function's contract.
    unsafe { mi_free(address) }
}

/// Replaces libc's function of this name.
///
/// # Safety
/// As of libc's `realloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(address: *mut c_void, bytes: usize) -> *mut c_void {
    prepare();
    if bytes == 0 && !address.is_null() {
        // As in glibc, this frees the block.
        // SAFETY: the caller keeps the function's contract.
        unsafe { mi_free(address) };
        return null_mut();
    }
    // SAFETY: the caller keeps the function's contract.
    or_enomem(unsafe { mi_realloc(address, bytes) })
}

/// Replaces libc's function of this name.
///
/// # Safety
/// As of libc's `reallocarray`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(address: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
    match count.checked_mul(bytes) {
        // SAFETY: the caller keeps the function's contract.
        Some(bytes) => unsafe { realloc(address, bytes) },
        None => fail(libc::ENOMEM),
    }
}

/// Replaces libc's function of this name.
///
/// # Safety
/// As of libc's `posix_memalign`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, bytes: usize) -> c_int {
    prepare();
    // SAFETY: the caller keeps the function's contract.
    unsafe { mi_posix_memalign(out, alignment, bytes) }
}

/// Replaces libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    if !alignment.is_power_of_two() {
        return fail(libc::EINVAL);
    }
    prepare();
    // SAFETY: a power of two and any size.
    or_enomem(unsafe { mi_malloc_aligned(bytes, alignment) })
}

/// Replaces libc's function of this name. Rounds the alignment up to a power of two.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    alignment
        .checked_next_power_of_two()
        .map_or_else(|| fail(libc::EINVAL), |alignment| aligned_alloc(alignment, bytes))
}

/// Replaces libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: usize) -> *mut c_void {
    aligned_alloc(PAGE_BYTES, bytes)
}

/// Replaces libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    bytes.checked_next_multiple_of(PAGE_BYTES).map_or_else(|| fail(libc::ENOMEM), |bytes| valloc(bytes))
}

/// Replaces libc's function of this name.
///
/// # Safety
/// As of libc's `malloc_usable_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(address: *mut c_void) -> usize {
    // SAFETY: the caller keeps the function's contract.
    unsafe { mi_usable_size(address) }
}

/// Replaces libc's function of this name: returns memory that the calling thread has freed to the
/// system.
///
/// Always returns 1, glibc's value for returned memory, since mimalloc does not report whether it
/// returned any.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_kept: usize) -> c_int {
    // SAFETY: the call does not change memory that is in use.
    unsafe { mi_collect(true) };
    1
}
