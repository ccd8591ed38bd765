//! What the kernel swaps to must never wait for swap itself, nor be ended to make room.

use std::fs;
use std::io;

use aquifer_faults::serve::priority::{URGENT, set_niceness};

const OOM_SCORE: &str = "/proc/self/oom_score_adj";
// linux/prctl.h
const PR_SET_IO_FLUSHER: libc::c_int = 57;
/// Never chosen when the kernel looks for somebody to kill.
const OOM_SCORE_MIN: &str = "-1000";

/// Why a process could not be protected.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    /// Locked memory.
    #[error(
        "the server of a swap device could not lock its memory (mlockall: {0}): run as root, or allow it with ulimit -l unlimited"
    )]
    Lock(io::Error),
}

/// Locks all memory that this process has and will have, as it is touched; keeps it from being killed; and tells the kernel that others' memory
/// waits for what it does, so that what it asks the kernel for is not made to wait for that memory.
pub fn protect() -> Result<(), ProtectError> {
    // In a container root may lack these two rights. Then the server is no worse off than other processes, and its death ends its run.
    if let Err(error) = fs::write(OOM_SCORE, OOM_SCORE_MIN) {
        tracing::warn!(%error, "this process may be killed when the machine is short of memory ({OOM_SCORE})");
    }
    // Threads that are started later inherit it.
    set_niceness(URGENT);
    // SAFETY: takes flags only. Locked on fault: large sparse tables take no more than they did.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        return Err(ProtectError::Lock(io::Error::last_os_error()));
    }
    // SAFETY: takes numbers only. Threads that are started later inherit it.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let error = io::Error::last_os_error();
        tracing::warn!(%error, "the kernel was not told that others' memory waits for this process");
    }
    Ok(())
}
