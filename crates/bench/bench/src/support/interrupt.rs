//! Signals that ask to stop, such as Ctrl-C. They set a flag, which loops check, so that benches
//! clean up before they end.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::BenchError;

/// Exit code after SIGINT, as shells have it: 128 + the signal's number.
const EXIT_INTERRUPTED: u8 = 130;

static REQUESTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_signal: libc::c_int) {
    REQUESTED.store(true, Ordering::SeqCst);
}

/// Makes SIGINT, SIGTERM and SIGHUP set the flag.
pub fn install() {
    let handler: extern "C" fn(libc::c_int) = on_signal;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero sigaction is a valid one; the handler only stores into an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Whether a signal has asked to stop.
pub fn is_requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Prints the message of an interruption and turns it into its exit code.
///
/// # Errors
/// Every other error.
pub fn outcome(result: Result<ExitCode, BenchError>) -> Result<ExitCode, BenchError> {
    match result {
        Err(error @ BenchError::Interrupted) => {
            aquifer::say::say_error!("{error}");
            Ok(ExitCode::from(EXIT_INTERRUPTED))
        }
        other => other,
    }
}

/// Fails if a signal has arrived.
///
/// # Errors
/// [`BenchError::Interrupted`].
pub fn check() -> Result<(), BenchError> {
    if is_requested() { Err(BenchError::Interrupted) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_interruption_becomes_an_exit_code() {
        let code = outcome(Err(BenchError::Interrupted)).unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(130)));
        assert!(outcome(Err(BenchError::Missing { what: "sqlite3" })).is_err());
        assert!(outcome(Ok(ExitCode::SUCCESS)).is_ok());
    }
}
