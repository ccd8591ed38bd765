//! The memory that the agent and a program's worker share: one command at a time, and the pages that must stay.
//!
//! The agent writes a batch of addresses and raises `command`; the worker takes those pages out of the program and raises
//! `done`. Either side treats what the other writes as untrusted: counts are bounded, statuses are only looked at.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Pages of one command.
pub const TAKE_PAGES_MAX: usize = 64;
/// Buffers of [`TAKE_PAGES_MAX`] pages that taken pages wait in until the agent has copied them.
pub const BUFFERS: usize = 4;
/// Pages that a program can ask never to be taken.
pub const PINS_MAX: usize = 8192;
/// The page waits in the buffer.
pub const STATUS_MOVED: u32 = 0;
/// The worker has not come to the page.
pub const STATUS_PENDING: u32 = u32::MAX;
/// First word of the memory.
pub const CONTROL_MAGIC: u32 = 0x4151_4354;
/// Bytes of the memory.
pub const CONTROL_BYTES: usize = size_of::<Control>().next_multiple_of(4096);

/// The shared memory, as both sides map it.
#[repr(C)]
#[derive(Debug)]
pub struct Control {
    /// [`CONTROL_MAGIC`].
    pub magic: AtomicU32,
    /// [`crate::VERSION`].
    pub version: AtomicU32,
    /// Number of the newest command; a futex the worker waits on.
    pub command: AtomicU32,
    /// Number of the newest command that is done; a futex the agent waits on.
    pub done: AtomicU32,
    /// The worker's thread id: it lives as long as the program, the first thread may not.
    pub worker: AtomicU32,
    /// Keeps the 8-byte fields aligned.
    pub reserved: AtomicU32,
    /// Which staging buffer the command fills.
    pub buffer: AtomicU32,
    /// Keeps the 8-byte fields aligned.
    pub reserved_too: AtomicU32,
    /// What each buffer was last filled with. It stays until the agent has copied it and empties the buffer, so that
    /// an agent that takes over knows which pages wait there.
    pub batches: [BatchRecord; BUFFERS],
    /// Entries of `pins` in use, raised by the program only.
    pub pin_count: AtomicU32,
    /// Whether the program had more to pin than there is room for.
    pub pins_overflowed: AtomicU32,
    /// Page numbers that must stay resident: the kernel writes there when a thread has ended and can no longer fault.
    pub pins: [AtomicU64; PINS_MAX],
}

/// The pages of one buffer, and what became of each.
#[repr(C)]
#[derive(Debug)]
pub struct BatchRecord {
    /// Pages of the command; 0 when the buffer is empty.
    pub count: AtomicU32,
    /// Keeps the 8-byte fields aligned.
    pub reserved: AtomicU32,
    /// Their addresses.
    pub addresses: [AtomicU64; TAKE_PAGES_MAX],
    /// What became of each: [`STATUS_MOVED`], [`STATUS_PENDING`], else an errno.
    pub statuses: [AtomicU32; TAKE_PAGES_MAX],
}

impl Control {
    /// Prepare fresh, zeroed memory.
    pub fn initialise(&self) {
        self.version.store(crate::VERSION.into(), Relaxed);
        self.magic.store(CONTROL_MAGIC, Release);
    }

    /// Whether it is what this version expects.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.magic.load(Acquire) == CONTROL_MAGIC && self.version.load(Relaxed) == crate::VERSION.into()
    }

    /// Ask that a page never be taken. Called by the program's threads, at once.
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

    fn fresh() -> Box<Control> {
        // SAFETY: every field is an atomic integer or an array of them, for which all bits zero are valid.
        unsafe { Box::<Control>::new_zeroed().assume_init() }
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
