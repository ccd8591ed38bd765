//! Errors for C: a negative errno, and a text for each thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use aquifer_client::Error;

// Numbers of Linux on x86-64.
const EIO: c_int = 5;
const ECHILD: c_int = 10;
const ENOMEM: c_int = 12;
const EACCES: c_int = 13;
const EINVAL: c_int = 22;
const EPIPE: c_int = 32;
const ENOTCONN: c_int = 107;
const EDQUOT: c_int = 122;

thread_local! {
    /// Text of the last error of this thread.
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Stores the text of an error for [`last_text`].
pub(crate) fn store_text(error: &dyn std::fmt::Display) {
    let text = error.to_string().replace('\0', " ");
    // The text has no null byte, so the conversion does not fail.
    LAST.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
}

/// The text of the last error of this thread; empty if there was none.
pub(crate) fn last_text() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
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
    store_text(&"an argument is a null pointer or an impossible length");
    -EINVAL
}

fn errno(error: &Error) -> c_int {
    match error {
        Error::Size { .. } | Error::OutOfRange { .. } => EINVAL,
        Error::PoolFull | Error::TooManyExtents | Error::Io(_) => ENOMEM,
        Error::QuotaExceeded => EDQUOT,
        Error::AccessDenied | Error::Refused(_) => EACCES,
        Error::DataLost | Error::Failed | Error::Protocol(_) => EIO,
        Error::Forked => ECHILD,
        Error::SessionEnded(_) | Error::AgentGone => EPIPE,
        Error::NoAgent { .. } => ENOTCONN,
    }
}
