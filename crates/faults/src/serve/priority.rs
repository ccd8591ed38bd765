//! Threads that others wait for run before those that merely compute.

/// For threads that a faulting thread waits for, and for the sampler, on whose punctuality limits depend.
pub(crate) const URGENT: i32 = -15;
/// For threads that only make room.
pub(crate) const BUSY: i32 = -5;

/// Change the calling thread's niceness. Without the right to, it stays as it is: slower, not wrong.
pub(crate) fn set_niceness(niceness: i32) {
    // SAFETY: changes the scheduling of the calling thread only.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, niceness) };
    if result < 0 {
        tracing::debug!(error = %std::io::Error::last_os_error(), niceness, "no right to a higher priority");
    }
}
