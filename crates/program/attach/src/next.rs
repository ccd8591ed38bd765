//! The functions that this library interposes: those of libc, or of another library that also
//! interposes them.

use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The next definition of a symbol after the one in this library.
pub struct NextSymbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl NextSymbol {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(null_mut()) }
    }

    /// Returns the symbol's address if it was looked up, or null.
    pub fn resolved(&self) -> *mut c_void {
        self.address.load(Ordering::Acquire)
    }

    /// Returns the symbol's address, or null if there is no other definition.
    ///
    /// The first call searches the loaded libraries. It must not be made in a signal handler, nor
    /// in a forked child.
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        // SAFETY: only searches for a symbol.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Release);
        found
    }
}

/// Sets errno and returns -1, as functions of libc do when they fail.
pub fn fail_with_errno(errno: i32) -> i32 {
    // SAFETY: each thread has an errno.
    unsafe { *libc::__errno_location() = errno };
    -1
}
