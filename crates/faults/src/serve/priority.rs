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
const FIRST_IN_FIRST_OUT: u32 = 1;

/// Change the calling thread's niceness, and let it run at once when it wakes. Without the right to, it stays as it is: slower, not wrong.
pub fn set_niceness(niceness: i32) {
    if let Err(error) = set(NORMAL, niceness) {
        tracing::debug!(%error, niceness, "no right to a higher priority");
    }
}

/// While it lives the calling thread, an urgent one, gives its core to no common thread.
#[derive(Debug)]
pub(super) struct KeptCore(());

impl KeptCore {
    /// Keep it, for a few microseconds. Nothing without the right to.
    pub(super) fn keep() -> Option<Self> {
        set(FIRST_IN_FIRST_OUT, 0).ok().map(Self)
    }
}

impl Drop for KeptCore {
    fn drop(&mut self) {
        // Where a thread may keep its core and may not be urgent, it is as before with the niceness that all have.
        if set(NORMAL, URGENT).is_err() {
            set_niceness(0);
        }
    }
}

fn set(policy: u32, niceness: i32) -> io::Result<()> {
    let attributes = Attributes {
        size: 48,
        policy,
        flags: 0,
        nice: niceness,
        priority: u32::from(policy == FIRST_IN_FIRST_OUT),
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

/// How often the calling thread has lost its core so far, whether it gave it up or not.
pub(super) fn times_switched() -> i64 {
    // SAFETY: a structure of integers, for which zeros are values.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is the kernel's to fill; it cannot fail with these arguments.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nvcsw + usage.ru_nivcsw
}
