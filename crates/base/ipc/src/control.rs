//! Control memory: commands from the agent to a program's worker, and pages that must stay
//! resident.
//!
//! The agent writes a batch of addresses and increments `command`. The worker moves those pages out
//! of the program and stores the same number in `done`.
//! Each side bounds the counts that the other side writes, and only compares statuses.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

/// Maximum number of pages in one command.
pub const BATCH_PAGES_MAX: usize = 64;
/// Staging buffers, each of [`BATCH_PAGES_MAX`] pages.
pub const STAGING_BUFFERS: usize = 4;
/// Maximum number of pages that a program can pin.
pub const PINS_MAX: usize = 8192;
/// Status of a page that is in the staging buffer.
pub const STATUS_MOVED: u32 = 0;
/// Status of a page that the worker has not processed yet.
pub const STATUS_PENDING: u32 = u32::MAX;
/// Value of [`WorkerControl::process_ended`] that the agent writes. Another process may have the
/// memory.
pub const PROCESS_ENDED: u32 = 1;
/// Value of [`WorkerControl::process_ended`] that the worker writes. It waits until the agent has
/// emptied the staging buffers.
pub const WORKER_IS_LAST: u32 = 2;
/// Version of the layout of control memory.
pub const CONTROL_VERSION: u32 = 21;
/// First word of control memory.
pub const CONTROL_MAGIC: u32 = 0x4151_4354;
/// Size of control memory, in whole pages.
pub const CONTROL_BYTES: usize = size_of::<WorkerControl>().next_multiple_of(4096);

/// Layout of control memory. Both sides map it.
#[repr(C)]
#[derive(Debug)]
pub struct WorkerControl {
    /// [`CONTROL_MAGIC`].
    pub magic: AtomicU32,
    /// [`CONTROL_VERSION`].
    pub version: AtomicU32,
    /// Number of the newest command. The worker waits on this futex.
    pub command: AtomicU32,
    /// Number of the newest completed command. The agent waits on this futex.
    pub done: AtomicU32,
    /// Number of the worker's process in its own PID namespace; 0 before it runs, and after it has
    /// ended by itself.
    pub worker: AtomicU32,
    /// The core on which the worker should run, plus 1; 0 for any.
    pub core: AtomicU32,
    /// The staging buffer that the command fills.
    pub buffer: AtomicU32,
    /// [`PROCESS_ENDED`] when the program's process has ended, [`WORKER_IS_LAST`] when no process
    /// but the worker has the memory, else 0.
    pub process_ended: AtomicU32,
    /// 1 if the program may have memory that is absent or empty in its forked children.
    pub has_fork_advice: AtomicU32,
    /// 1 while the agent acts on the pins that it has read, else 0. See [`Self::lock_pins`].
    pub pins_locked: AtomicU32,
    /// The last command of each staging buffer. The record stays until the agent has copied the
    /// buffer, so that the next agent knows which pages are in it.
    pub batches: [BatchRecord; STAGING_BUFFERS],
    /// Entries of `pins` in use. Only the program increments it.
    pub pin_count: AtomicU32,
    /// 1 if the program had more pages to pin than `pins` has room for.
    pub pins_overflowed: AtomicU32,
    /// Numbers of pages that must stay resident. The kernel writes to them when a thread ends and
    /// cannot fault any more.
    pub pins: [AtomicU64; PINS_MAX],
}

/// The pages of one command, and the status of each.
#[repr(C)]
#[derive(Debug)]
pub struct BatchRecord {
    /// Number of pages; 0 if the buffer is empty.
    pub count: AtomicU32,
    /// Padding that aligns 8-byte fields.
    pub reserved: AtomicU32,
    /// Addresses of the pages.
    pub addresses: [AtomicU64; BATCH_PAGES_MAX],
    /// Status of each page: [`STATUS_MOVED`], [`STATUS_PENDING`], or an errno.
    pub statuses: [AtomicU32; BATCH_PAGES_MAX],
}

impl WorkerControl {
    /// Initialises fresh, zeroed memory.
    pub fn initialise(&self) {
        self.version.store(CONTROL_VERSION, Relaxed);
        self.magic.store(CONTROL_MAGIC, Release);
    }

    /// Whether the memory was initialised by a build with this version.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.magic.load(Acquire) == CONTROL_MAGIC && self.version.load(Relaxed) == CONTROL_VERSION
    }

    /// Locks the pins: a page that is pinned from now on may still be evicted or write-protected,
    /// but its thread waits for [`Self::unlock_pins`] and touches the page then.
    pub fn lock_pins(&self) {
        self.pins_locked.store(1, Relaxed);
        // Either the agent reads a pin after this, or the thread that stores the pin sees the lock.
        fence(SeqCst);
    }

    /// Unlocks the pins: the pages have been moved or write-protected.
    pub fn unlock_pins(&self) {
        self.pins_locked.store(0, Release);
    }

    /// Whether a thread that has pinned a page must wait before it touches the page.
    #[must_use]
    pub fn are_pins_locked(&self) -> bool {
        fence(SeqCst);
        self.pins_locked.load(Acquire) != 0
    }

    /// Pins a page: it is not evicted once the thread has touched it, which must be done when
    /// [`Self::are_pins_locked`] is false. Threads of the program may call this concurrently.
    pub fn pin(&self, page: u64) {
        let known = (self.pin_count.load(Acquire) as usize).min(PINS_MAX);
        if self.pins[..known].iter().any(|pin| pin.load(Relaxed) == page) {
            return;
        }
        let at = self.pin_count.fetch_add(1, Relaxed) as usize;
        match self.pins.get(at) {
            Some(pin) => pin.store(page, Release),
            None => self.pins_overflowed.store(1, Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Box<WorkerControl> {
        // SAFETY: every field is an atomic integer or an array of them, for which all bits zero are
        // valid.
        unsafe { Box::<WorkerControl>::new_zeroed().assume_init() }
    }

    #[test]
    fn pins_are_a_bounded_set() {
        let control = fresh();
        control.pin(7);
        control.pin(7);
        assert_eq!(control.pin_count.load(Relaxed), 1);
        for page in 0..PINS_MAX as u64 {
            control.pin(1000 + page);
        }
        assert_eq!(control.pins_overflowed.load(Relaxed), 1);
        control.pin(8);
        assert_eq!(control.pins[PINS_MAX - 1].load(Relaxed), 1000 + PINS_MAX as u64 - 2);
    }

    #[test]
    fn only_this_version_is_valid() {
        let control = fresh();
        assert!(!control.is_valid());
        control.initialise();
        assert!(control.is_valid());
        control.version.store(99, Relaxed);
        assert!(!control.is_valid());
    }
}
