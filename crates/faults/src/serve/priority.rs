//! Threads that others wait for run before those that merely compute.

use std::io;

/// For threads that a faulting thread waits for, and for the sampler, on whose punctuality limits depend.
pub const URGENT: i32 = -15;
/// For threads that only make room.
pub const BUSY: i32 = -5;

/// A thread that asks for so short a slice need not wait until the running one has used up its own (Linux 6.12).
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

/// Change the calling thread's niceness, and let it run at once when it wakes. Without the right to, it stays as it is: slower, not wrong.
pub fn set_niceness(niceness: i32) {
    if let Err(error) = set(niceness) {
        tracing::debug!(%error, niceness, "no right to a higher priority");
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
    // SAFETY: changes the scheduling of the calling thread only; the structure is of the size that it names.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
