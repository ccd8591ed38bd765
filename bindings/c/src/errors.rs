//! Errors as C has them: a number, and a sentence for each thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use aquifer_client::Error;

// As Linux has them on every architecture that we know.
const EIO: c_int = 5;
const ECHILD: c_int = 10;
const ENOMEM: c_int = 12;
const EACCES: c_int = 13;
const EINVAL: c_int = 22;
const EPIPE: c_int = 32;
const ENOTCONN: c_int = 107;
const EDQUOT: c_int = 122;

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Remember what happened.
pub(crate) fn explain(error: &dyn std::fmt::Display) {
    let text = error.to_string().replace('\0', " ");
    // There is no zero in it any more.
    LAST.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
}

/// What happened last in this thread.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// As a function returns it.
pub(crate) fn result(outcome: Result<(), Error>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            explain(&error);
            -number(&error)
        }
    }
}

/// The caller handed over nothing.
pub(crate) fn null() -> c_int {
    explain(&"a null pointer was handed over, or an impossible length");
    -EINVAL
}

fn number(error: &Error) -> c_int {
    match error {
        Error::Size { .. } | Error::OutOfRange { .. } => EINVAL,
        Error::Full | Error::TooMany | Error::System(_) => ENOMEM,
        Error::Quota => EDQUOT,
        Error::NotYours | Error::Refused(_) => EACCES,
        Error::Lost | Error::Failed | Error::Answer(_) => EIO,
        Error::Forked => ECHILD,
        Error::Ended(_) | Error::AgentGone => EPIPE,
        Error::NoAgent { .. } => ENOTCONN,
    }
}
