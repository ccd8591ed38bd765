//! Priorities of threads: threads on which others wait run before threads that compute.

use std::io;

/// Niceness of threads that faulting threads wait for, and of the sampler.
pub const URGENT: i32 = -15;
/// Niceness of threads that make room.
pub const ELEVATED: i32 = -5;
/// Niceness of threads whose work delays only the program that has caused it.
pub const USUAL: i32 = 0;

/// Requested time slice in ns. A thread with a short slice need not wait until the running thread
/// has used up its own (Linux 6.12).
const SHORT_SLICE_NS: u64 = 100_000;

/// The kernel's `struct sched_attr`, first version.
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const NORMAL: u32 = 0;

/// Sets the niceness and a short time slice of the calling thread.
///
/// Without the permission to do so, the thread keeps its priority. It is slower, but correct.
pub fn set_niceness(niceness: i32) {
    if let Err(error) = set(niceness) {
        tracing::debug!(%error, niceness, "cannot raise the priority of a thread");
    }
}

fn set(niceness: i32) -> io::Result<()> {
    let attributes = Attributes {
        size: 48,
        policy: NORMAL,
        flags: 0,
        nice: niceness,
        priority: 0,
        runtime: SHORT_SLICE_NS,
        deadline: 0,
        period: 0,
    };
    // SAFETY: changes only the calling thread; the structure has the size that it names.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
