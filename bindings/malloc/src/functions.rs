//! What libc calls by these names, as its manual lists for those who replace it ("Replacing
//! malloc"), and `malloc_trim`.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use libmimalloc_sys::{
    mi_calloc, mi_collect, mi_free, mi_malloc, mi_malloc_aligned, mi_posix_memalign, mi_realloc,
    mi_usable_size,
};

use crate::arena::prepare;

const PAGE_BYTES: usize = 4096;

/// As libc's functions fail: mimalloc leaves errno as it was.
fn told(address: *mut c_void) -> *mut c_void {
    if address.is_null() { fail(libc::ENOMEM) } else { address }
}

#[cold]
fn fail(error: c_int) -> *mut c_void {
    // SAFETY: libc's errno is always there.
    unsafe { *libc::__errno_location() = error };
    null_mut()
}

/// Stands in for libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    prepare();
    // SAFETY: any size will do.
    told(unsafe { mi_malloc(bytes) })
}

/// Stands in for libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    prepare();
    // SAFETY: any sizes will do.
    told(unsafe { mi_calloc(count, bytes) })
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(address: *mut c_void) {
    // SAFETY: the caller answers for it.
    unsafe { mi_free(address) }
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `realloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(address: *mut c_void, bytes: usize) -> *mut c_void {
    prepare();
    if bytes == 0 && !address.is_null() {
        // Programs free by this.
        // SAFETY: the caller answers for it.
        unsafe { mi_free(address) };
        return null_mut();
    }
    // SAFETY: the caller answers for it.
    told(unsafe { mi_realloc(address, bytes) })
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `reallocarray`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(address: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
    match count.checked_mul(bytes) {
        // SAFETY: the caller answers for it.
        Some(bytes) => unsafe { realloc(address, bytes) },
        None => fail(libc::ENOMEM),
    }
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `posix_memalign`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: usize, bytes: usize) -> c_int {
    prepare();
    // SAFETY: the caller answers for it.
    unsafe { mi_posix_memalign(out, alignment, bytes) }
}

/// Stands in for libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    if !alignment.is_power_of_two() {
        return fail(libc::EINVAL);
    }
    prepare();
    // SAFETY: a power of two and any size.
    told(unsafe { mi_malloc_aligned(bytes, alignment) })
}

/// Stands in for libc's function of this name, which takes any alignment and rounds it up.
#[unsafe(no_mangle)]
pub extern "C" fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    alignment
        .checked_next_power_of_two()
        .map_or_else(|| fail(libc::EINVAL), |alignment| aligned_alloc(alignment, bytes))
}

/// Stands in for libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: usize) -> *mut c_void {
    aligned_alloc(PAGE_BYTES, bytes)
}

/// Stands in for libc's function of this name.
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    bytes.checked_next_multiple_of(PAGE_BYTES).map_or_else(|| fail(libc::ENOMEM), |bytes| valloc(bytes))
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `malloc_usable_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(address: *mut c_void) -> usize {
    // SAFETY: the caller answers for it.
    unsafe { mi_usable_size(address) }
}

/// Stands in for libc's function of this name: gives back at once what the calling thread has freed
/// and would give back by and by. Says 1, as libc's does when it could give something back: whether
/// it could is not known.
#[unsafe(no_mangle)]
pub extern "C" fn malloc_trim(_kept: usize) -> c_int {
    // SAFETY: nothing in use is touched.
    unsafe { mi_collect(true) };
    1
}
