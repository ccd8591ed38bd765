//! Messages between an endpoint and its target: two rings of fixed slots in shared memory.
//!
//! Each side keeps its own count in private memory, and accepts the peer's count only within
//! bounds. A peer that writes anything else only loses its connection.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::Memory;
use crate::memory::{copy, u64_from};
use crate::mutation::Mutation;
use crate::work::Limits;

/// The consumer's count. The producer's count is on another cache line.
const TAKEN_IN: usize = 0;
const PUT_IN: usize = 64;
const SLOTS_IN: usize = 128;

const STAMP_IN: usize = 0;
const LEN_IN: usize = 8;
const BYTES_IN: usize = 16;

/// An impossible count or length that the peer wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RingCorrupt;

/// One end of a ring.
#[derive(Debug)]
pub(super) struct MessageRing {
    memory: Arc<Memory>,
    at: usize,
    depth: u64,
    message_bytes_max: u32,
    /// Number of messages that this side has put or taken.
    count: u64,
}

/// The direction of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    ToTarget,
    ToInitiator,
}

/// Bytes of the memory that contains both rings.
pub(super) fn mailbox_bytes(limits: &Limits) -> usize {
    2 * ring_bytes(limits)
}

fn ring_bytes(limits: &Limits) -> usize {
    SLOTS_IN + limits.receive_depth * slot_bytes(limits.message_bytes_max)
}

fn slot_bytes(message_bytes_max: u32) -> usize {
    (BYTES_IN + message_bytes_max as usize).next_multiple_of(64)
}

impl MessageRing {
    /// Opens one end of a ring in fresh memory of [`mailbox_bytes`].
    pub fn new(memory: &Arc<Memory>, limits: &Limits, direction: Direction) -> Self {
        let at = match direction {
            Direction::ToTarget => 0,
            Direction::ToInitiator => ring_bytes(limits),
        };
        Self {
            memory: Arc::clone(memory),
            at,
            depth: u64_from(limits.receive_depth),
            message_bytes_max: limits.message_bytes_max,
            count: 0,
        }
    }

    /// Puts a message into the ring. Returns false if there is no room.
    ///
    /// # Safety
    /// `len` bytes at `from` must be mapped. `len` must not exceed the limit.
    pub unsafe fn put(&mut self, stamp: u64, from: *const u8, len: u32) -> Result<bool, RingCorrupt> {
        assert!(len <= self.message_bytes_max, "the caller checks the length");
        let taken = self.memory.atomic_u64(self.at + TAKEN_IN).load(Ordering::Acquire);
        let waiting = self.count.checked_sub(taken).filter(|&n| n <= self.depth).ok_or(RingCorrupt)?;
        if waiting == self.depth {
            return Ok(false);
        }
        let slot = self.slot(self.count);
        self.memory.atomic_u64(slot + STAMP_IN).store(stamp, Ordering::Relaxed);
        self.memory.atomic_u32(slot + LEN_IN).store(len, Ordering::Relaxed);
        // SAFETY: the slot lies inside the mailbox, as `new` laid it out; the caller guarantees the
        // source.
        unsafe { copy(self.memory.as_ptr().add(slot + BYTES_IN), from, len as usize) };
        self.count += 1;
        self.memory.atomic_u64(self.at + PUT_IN).store(self.count, Ordering::Release);
        Ok(true)
    }

    /// The stamp of the oldest waiting message.
    pub fn oldest_stamp(&self) -> Result<Option<u64>, RingCorrupt> {
        let put = self.memory.atomic_u64(self.at + PUT_IN).load(Ordering::Acquire);
        let waiting = put.checked_sub(self.count).filter(|&n| n <= self.depth).ok_or(RingCorrupt)?;
        if waiting == 0 {
            return Ok(None);
        }
        let slot = self.slot(self.count);
        self.message_len(slot)?;
        let stamp = self.memory.atomic_u64(slot + STAMP_IN);
        Ok(Some(stamp.load(Ordering::Relaxed)))
    }

    /// Takes the oldest message and appends it to `out`. Returns false if there is none.
    pub fn pop(&mut self, out: &mut Vec<u8>) -> Result<bool, RingCorrupt> {
        if self.oldest_stamp()?.is_none() {
            return Ok(false);
        }
        let slot = self.slot(self.count);
        let len = self.message_len(slot)?;
        let old_len = out.len();
        out.resize(old_len + len as usize, 0);
        self.memory.read(slot + BYTES_IN, &mut out[old_len..]);
        self.count += 1;
        self.memory.atomic_u64(self.at + TAKEN_IN).store(self.count, Ordering::Release);
        Ok(true)
    }

    fn message_len(&self, slot: usize) -> Result<u32, RingCorrupt> {
        let len = self.memory.atomic_u32(slot + LEN_IN).load(Ordering::Relaxed);
        let is_short = len <= self.message_bytes_max || Mutation::TrustSlotLength.is_active();
        if is_short { Ok(len) } else { Err(RingCorrupt) }
    }

    fn slot(&self, count: u64) -> usize {
        let index = usize::try_from(count % self.depth).unwrap_or(0);
        self.at + SLOTS_IN + index * slot_bytes(self.message_bytes_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            queue_depth: 1,
            transfer_bytes_max: 1,
            message_bytes_max: 100,
            receive_depth: 3,
            local_regions_max: 1,
        }
    }

    fn put(ring: &mut MessageRing, stamp: u64, bytes: &[u8]) -> Result<bool, RingCorrupt> {
        let len = u32::try_from(bytes.len()).unwrap();
        // SAFETY: the pointer and the length are those of a slice.
        unsafe { ring.put(stamp, bytes.as_ptr(), len) }
    }

    #[test]
    fn messages_come_out_in_order_and_the_ring_is_bounded() {
        let memory = Arc::new(Memory::create("mail", mailbox_bytes(&limits())).unwrap());
        let mut sender = MessageRing::new(&memory, &limits(), Direction::ToInitiator);
        let mut receiver = MessageRing::new(&memory, &limits(), Direction::ToInitiator);
        for round in 0..10_u8 {
            for n in 0..3 {
                assert_eq!(put(&mut sender, u64::from(n), &[round, n]), Ok(true));
            }
            assert_eq!(put(&mut sender, 9, &[0; 100]), Ok(false));
            for n in 0..3 {
                let mut out = Vec::new();
                assert_eq!(receiver.oldest_stamp(), Ok(Some(u64::from(n))));
                assert_eq!(receiver.pop(&mut out), Ok(true));
                assert_eq!(out, [round, n]);
            }
            assert_eq!(receiver.pop(&mut Vec::new()), Ok(false));
        }
    }

    #[test]
    fn a_corrupted_ring_is_detected() {
        let memory = Arc::new(Memory::create("mail", mailbox_bytes(&limits())).unwrap());
        let mut sender = MessageRing::new(&memory, &limits(), Direction::ToTarget);
        let mut receiver = MessageRing::new(&memory, &limits(), Direction::ToTarget);
        memory.atomic_u64(PUT_IN).store(4, Ordering::Relaxed);
        assert_eq!(receiver.pop(&mut Vec::new()), Err(RingCorrupt));
        memory.atomic_u64(PUT_IN).store(1, Ordering::Relaxed);
        memory.atomic_u32(SLOTS_IN + LEN_IN).store(101, Ordering::Relaxed);
        assert_eq!(receiver.oldest_stamp(), Err(RingCorrupt));
        assert_eq!(receiver.pop(&mut Vec::new()), Err(RingCorrupt));
        memory.atomic_u64(TAKEN_IN).store(1, Ordering::Relaxed);
        assert_eq!(put(&mut sender, 0, b"x"), Err(RingCorrupt));
    }
}
