//! Each new thread asks that its control block stay resident, then runs as it would have.

use core::ffi::c_void;
use core::mem::transmute;

use crate::attach::pin_self;
use crate::next::Next;

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
type Create =
    unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Routine, *mut c_void) -> i32;

static NEXT: Next = Next::new(c"pthread_create");

#[repr(C)]
struct Start {
    routine: Routine,
    argument: *mut c_void,
}

extern "C" fn begin(argument: *mut c_void) -> *mut c_void {
    pin_self();
    let start: *mut Start = argument.cast();
    // SAFETY: `pthread_create` below made it for this thread alone.
    let Start { routine, argument } = unsafe { core::ptr::read(start) };
    // SAFETY: it came from malloc and is used no more.
    unsafe { libc::free(start.cast()) };
    routine(argument)
}

/// Stands in for libc's function of this name.
///
/// # Safety
/// As of libc's `pthread_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> i32 {
    // SAFETY: the next definition of this name is libc's, which has the type `Create`; the rest is passed on as it came.
    unsafe {
        let next = NEXT.address();
        if next.is_null() {
            return libc::EAGAIN;
        }
        let create: Create = transmute::<*mut c_void, Create>(next);
        let start: *mut Start = libc::malloc(size_of::<Start>()).cast();
        if start.is_null() {
            return libc::EAGAIN;
        }
        core::ptr::write(start, Start { routine, argument });
        let result = create(thread, attributes, begin, start.cast());
        if result != 0 {
            libc::free(start.cast());
        }
        result
    }
}
