//! The core on which the worker runs. The agent asks for one; it does not set it itself, because it
//! has rights that the program does not have.

use crate::raw::syscall;

/// Bytes of a set of cores: the kernel's are no larger.
const CORE_SET_BYTES: usize = 1024;

/// Where this process runs.
pub struct Cores {
    /// The cores that it may run on, a bit for each; empty if they are not known.
    allowed: [u8; CORE_SET_BYTES],
    /// The last core asked for, plus 1; 0 for any.
    current: u32,
}

impl Cores {
    pub fn of_this_process() -> Self {
        let mut allowed = [0; CORE_SET_BYTES];
        // SAFETY: the kernel writes at most as many bytes.
        unsafe {
            syscall(libc::SYS_sched_getaffinity, [0, CORE_SET_BYTES, allowed.as_mut_ptr() as usize, 0, 0, 0]);
        }
        Self { allowed, current: 0 }
    }

    /// Moves to the core `wanted` - 1, or to any if `wanted` is 0.
    pub fn follow(&mut self, wanted: u32) {
        if wanted == self.current {
            return;
        }
        self.current = wanted;
        let mut set = self.allowed;
        if let Some(core) = wanted.checked_sub(1) {
            set = [0; CORE_SET_BYTES];
            if let Some(byte) = set.get_mut(core as usize / 8) {
                *byte = 1 << (core % 8);
            }
        }
        // SAFETY: the kernel reads the set. It refuses an empty one, and leaves out cores that are not allowed.
        unsafe {
            syscall(libc::SYS_sched_setaffinity, [0, CORE_SET_BYTES, set.as_ptr() as usize, 0, 0, 0]);
        }
    }
}
