//! Errors for C: a negative errno, and a text for each thread.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};

use aquifer_client::Error;
use aquifer_containers::HeapFault;
use aquifer_objects::client::ClientError;
use aquifer_objects::wire::Refused;

// Numbers of Linux on x86-64.
const ENOENT: c_int = 2;
const EIO: c_int = 5;
const ECHILD: c_int = 10;
const EAGAIN: c_int = 11;
const ENOMEM: c_int = 12;
const EACCES: c_int = 13;
const EBUSY: c_int = 16;
const EINVAL: c_int = 22;
const EFBIG: c_int = 27;
const EPIPE: c_int = 32;
const ENODATA: c_int = 61;
const EPROTOTYPE: c_int = 91;
const ECONNRESET: c_int = 104;
const ENOTCONN: c_int = 107;
const ETIMEDOUT: c_int = 110;
const ESTALE: c_int = 116;
const EDQUOT: c_int = 122;
const ECANCELED: c_int = 125;

/// Size in bytes of the buffer for the text of an error and its terminating zero.
const TEXT_BYTES: usize = 1024;

thread_local! {
    /// Text of the last error of this thread, which ends with a zero. Its address does not change,
    /// so a program that keeps the pointer reads a later text, and never freed memory.
    static LAST: UnsafeCell<[u8; TEXT_BYTES]> = const { UnsafeCell::new([0; TEXT_BYTES]) };
}

/// Stores the text of an error for [`last_text`].
pub(crate) fn store_text(error: &dyn std::fmt::Display) {
    let text = error.to_string().replace('\0', " ");
    let end = text.floor_char_boundary(TEXT_BYTES - 1);
    LAST.with(|last| {
        // SAFETY: only this thread accesses the buffer, and no reference to it is kept.
        let last = unsafe { &mut *last.get() };
        last[..end].copy_from_slice(&text.as_bytes()[..end]);
        last[end] = 0;
    });
}

/// The text of the last error of this thread; empty if there was none.
pub(crate) fn last_text() -> *const c_char {
    LAST.with(|last| last.get().cast())
}

/// The return value of a function: 0, or a negative errno.
pub(crate) fn return_value(outcome: Result<(), Error>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            store_text(&error);
            -errno(&error)
        }
    }
}

/// The return value for an invalid argument.
pub(crate) fn invalid_argument() -> c_int {
    store_text(&"an argument is not valid: a null pointer, an impossible length, or not UTF-8");
    -EINVAL
}

/// The return value in a forked child.
pub(crate) fn forked() -> c_int {
    return_value(Err(Error::Forked))
}

/// The return value of a read of an object that was changed meanwhile.
pub(crate) fn again() -> c_int {
    store_text(&"the object was changed during the read: try again");
    -EAGAIN
}

/// The return value of an operation for which a queue has no room.
pub(crate) fn queue_full() -> c_int {
    store_text(&"the queue is full: take the completions of operations first");
    -EAGAIN
}

/// The return value of a read of an object that was moved.
pub(crate) fn stale() -> c_int {
    store_text(&"the object was moved: correct the pointer with aquifer_heap_get");
    -ESTALE
}

/// The return value of the close of a process that has segments.
pub(crate) fn busy() -> c_int {
    store_text(&"the process has segments: hand over or free each of them first");
    -EBUSY
}

/// The return value of a hand-over that did not take place. The caller stores the text.
pub(crate) const fn still_owned() -> c_int {
    -EAGAIN
}

/// The errno of a segment without the expected containers.
pub(crate) const fn containers_errno(error: &HeapFault) -> c_int {
    match error {
        HeapFault::NoContainers => ENODATA,
        HeapFault::Mismatch { .. } => EPROTOTYPE,
        HeapFault::TooSmall { .. } => ENOMEM,
        HeapFault::LongDescription { .. } => EINVAL,
    }
}

/// The errno of an error of a segment.
pub(crate) const fn segment_errno(error: &aquifer_client::segments::Error) -> c_int {
    use aquifer_client::segments::{CopyError, Error};
    match error {
        Error::NoAgent(_) => ENOTCONN,
        Error::Copies(CopyError::None) => ENODATA,
        Error::Copies(CopyError::Count(_)) => EINVAL,
        Error::Failed(_) | Error::Copies(_) | Error::Owned(_) => EACCES,
        Error::Forked => ECHILD,
        Error::Agent(_) | Error::Gone(_) => EPIPE,
        Error::Answer => EIO,
        Error::Arena(_) | Error::System(_) | Error::Memory(_) => ENOMEM,
    }
}

/// The errno of a heap's error.
pub(crate) fn heap_errno(error: &ClientError) -> c_int {
    match error {
        ClientError::Refused(Refused::NoObject) => ENOENT,
        ClientError::Refused(Refused::Full) | ClientError::Memory(_) => ENOMEM,
        ClientError::Refused(Refused::TooLarge) => EFBIG,
        ClientError::Refused(Refused::Busy) => EAGAIN,
        ClientError::Refused(Refused::Changed) => ECANCELED,
        ClientError::Refused(Refused::Invalid) => EINVAL,
        ClientError::Refused(Refused::Closed) => EDQUOT,
        ClientError::Connection(_) => ECONNRESET,
        ClientError::Timeout => ETIMEDOUT,
        ClientError::Access(_) | ClientError::Endpoint(_) | ClientError::TooShallow => ENOTCONN,
        ClientError::Answer => EIO,
    }
}

fn errno(error: &Error) -> c_int {
    match error {
        Error::Size { .. } | Error::OutOfRange { .. } => EINVAL,
        Error::PoolFull | Error::TooManyExtents | Error::Io(_) => ENOMEM,
        Error::QuotaExceeded => EDQUOT,
        Error::AccessDenied | Error::Refused(_) => EACCES,
        Error::TooManyWrongKeys => EAGAIN,
        Error::DataLost | Error::Failed | Error::Protocol(_) => EIO,
        Error::Forked => ECHILD,
        Error::SessionEnded(_) | Error::AgentGone => EPIPE,
        Error::NoAgent(_) => ENOTCONN,
    }
}
