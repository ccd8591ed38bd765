//! The functions that ours stand in for: libc's, or those of another library in between.

use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// The next definition of a name.
pub struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(null_mut()) }
    }

    /// Its address; null if there is none. The first call looks it up, which not every place allows: a signal handler, or a child of a fork.
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        // SAFETY: looks a name up.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Release);
        found
    }
}

/// Fail as libc's functions do.
pub fn fail(error: i32) -> i32 {
    // SAFETY: libc's errno is always there.
    unsafe { *libc::__errno_location() = error };
    -1
}
