//! Protection of a swap server: it must not wait for swap, and must not be killed to free memory.

use std::fs;
use std::io;

use aquifer_faults::serve::priority::{URGENT, set_niceness};

const OOM_SCORE: &str = "/proc/self/oom_score_adj";
/// The option `PR_SET_IO_FLUSHER` of `linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;
/// The score of a process that the out-of-memory killer spares.
const OOM_SCORE_MIN: &str = "-1000";

/// Clears the flag of [`protect`] for the calling thread, so that its allocations may cause
/// swapping: the kernel swaps nothing out for a thread that serves swap.
pub(crate) fn permit_swapping() {
    // SAFETY: the call takes numbers only. It fails where protect() has not set the flag.
    let _ = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 0, 0, 0, 0) };
}

/// Why a process cannot be protected.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    /// Memory cannot be locked.
    #[error(
        "the swap server cannot lock its memory (mlockall: {0}): run as root, or allow it with ulimit -l \
         unlimited"
    )]
    Lock(io::Error),
}

/// Protects this process, which serves memory of other processes.
///
/// All present and future memory of the process is locked as it is touched. The out-of-memory
/// killer spares the process. `PR_SET_IO_FLUSHER` declares that memory of other processes waits for
/// this one, so that its own allocations do not wait for that memory.
///
/// # Errors
/// If memory cannot be locked.
pub fn protect() -> Result<(), ProtectError> {
    // In a container root may lack the rights to this and to PR_SET_IO_FLUSHER. Without them the
    // server is as safe as other processes; if it dies, its run ends.
    if let Err(error) = fs::write(OOM_SCORE, OOM_SCORE_MIN) {
        tracing::warn!(
            file = OOM_SCORE,
            %error,
            "setting the OOM score failed; the kernel may kill this swap server when memory is short"
        );
    }
    // Threads that are started later inherit the priority.
    set_niceness(URGENT);
    // SAFETY: the call takes flags only. MCL_ONFAULT locks pages when they are touched, so that
    // large sparse tables need no more memory than before.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        return Err(ProtectError::Lock(io::Error::last_os_error()));
    }
    // SAFETY: the call takes numbers only. Threads that are started later inherit the flag.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let error = io::Error::last_os_error();
        tracing::warn!(
            %error,
            "PR_SET_IO_FLUSHER failed; this swap server may wait for memory that waits for it"
        );
    }
    Ok(())
}
