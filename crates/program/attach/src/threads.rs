//! Pins the control block of each new thread, and then runs the thread's routine.

use core::ffi::c_void;
use core::mem::transmute;

use crate::attach::pin_thread_control_block;
use crate::next::NextSymbol;

type ThreadRoutine = extern "C" fn(*mut c_void) -> *mut c_void;
type PthreadCreate = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    ThreadRoutine,
    *mut c_void,
) -> i32;

static NEXT: NextSymbol = NextSymbol::new(c"pthread_create");

/// The routine that the program runs in a new thread, and its argument.
#[repr(C)]
struct ThreadStart {
    routine: ThreadRoutine,
    argument: *mut c_void,
}

/// The routine of each new thread.
extern "C" fn start_thread(argument: *mut c_void) -> *mut c_void {
    pin_thread_control_block();
    let start: *mut ThreadStart = argument.cast();
    // SAFETY: `pthread_create` below has allocated it for this thread alone.
    let ThreadStart { routine, argument } = unsafe { core::ptr::read(start) };
    // SAFETY: it was allocated by `malloc`, and nothing uses it any more.
    unsafe { libc::free(start.cast()) };
    routine(argument)
}

/// Interposes libc's function of this name.
///
/// # Safety
/// As of libc's `pthread_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: ThreadRoutine,
    argument: *mut c_void,
) -> i32 {
    // SAFETY: the next definition of this name is libc's, which has the type `PthreadCreate`. The
    // other arguments are passed on unchanged.
    unsafe {
        let next = NEXT.address();
        if next.is_null() {
            return libc::EAGAIN;
        }
        let create: PthreadCreate = transmute::<*mut c_void, PthreadCreate>(next);
        let start: *mut ThreadStart = libc::malloc(size_of::<ThreadStart>()).cast();
        if start.is_null() {
            return libc::EAGAIN;
        }
        core::ptr::write(start, ThreadStart { routine, argument });
        let result = create(thread, attributes, start_thread, start.cast());
        if result != 0 {
            libc::free(start.cast());
        }
        result
    }
}
