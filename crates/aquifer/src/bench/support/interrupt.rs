//! Ctrl-C and its like set a flag; whoever waits looks at it, and leaves by the way that cleans up.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::bench::BenchError;

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_signal: libc::c_int) {
    ASKED.store(true, Ordering::SeqCst);
}

/// From now on SIGINT, SIGTERM and SIGHUP only set the flag.
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

/// Whether a signal has come.
pub fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// # Errors
/// [`BenchError::Interrupted`], if a signal has come.
pub fn check() -> Result<(), BenchError> {
    if asked() { Err(BenchError::Interrupted) } else { Ok(()) }
}
