//! The CPU core on which the worker runs.
//!
//! The agent requests a core, and the worker sets its own affinity. The agent must not set it,
//! because it has rights that the program does not have.

use crate::raw::syscall;

/// Size of a set of cores. The kernel's sets are not larger.
const CORE_SET_BYTES: usize = 1024;

/// The cores of the calling process.
pub struct CoreAffinity {
    /// The cores on which the process may run at its start, a bit for each. Empty if the kernel
    /// does not return them.
    allowed: [u8; CORE_SET_BYTES],
    /// The last core that the agent has requested, plus 1; 0 for any.
    requested: u32,
}

impl CoreAffinity {
    pub fn of_this_process() -> Self {
        let mut allowed = [0; CORE_SET_BYTES];
        // SAFETY: the kernel writes at most CORE_SET_BYTES bytes.
        unsafe {
            syscall(libc::SYS_sched_getaffinity, [0, CORE_SET_BYTES, allowed.as_mut_ptr() as usize, 0, 0, 0]);
        }
        Self { allowed, requested: 0 }
    }

    /// Moves the process to core `requested` - 1, or lets it run on any allowed core if `requested`
    /// is 0.
    pub fn move_to(&mut self, requested: u32) {
        if requested == self.requested {
            return;
        }
        self.requested = requested;
        let mut set = self.allowed;
        if let Some(core) = requested.checked_sub(1) {
            set = [0; CORE_SET_BYTES];
            if let Some(byte) = set.get_mut(core as usize / 8) {
                *byte = 1 << (core % 8);
            }
        }
        // SAFETY: the kernel reads the set. It ignores cores that are not allowed, and refuses a
        // set without an allowed core.
        unsafe {
            syscall(libc::SYS_sched_setaffinity, [0, CORE_SET_BYTES, set.as_ptr() as usize, 0, 0, 0]);
        }
    }
}
