//! Slots of registered memory for messages and results.

use std::io;
use std::sync::Arc;

use super::sys::device::Device;
use super::sys::queue_pair::LocalPiece;
use super::sys::registration::{Registration, RegistrationUse};
use aquifer_fabric::Memory;
use aquifer_fabric::memory::u64_from;

/// Bit of the completion id of a received message, which also has the message's slot.
pub(super) const RECEIVED_BIT: u64 = 1 << 62;
/// Bit of the completion id of a sent message, which also has the message's slot.
pub(super) const SENT_BIT: u64 = 1 << 63;

/// The slot in a completion id.
pub(super) fn slot_of(id: u64) -> u32 {
    u32::try_from(id & u64::from(u32::MAX)).expect("32 bits")
}

/// A set of slots of one size.
#[derive(Debug)]
pub(super) struct MessageSlots {
    registration: Registration,
    base: u64,
    slot_bytes: usize,
    free: Vec<u32>,
}

impl MessageSlots {
    /// Creates `count` free slots.
    ///
    /// # Errors
    /// If there is no memory, or the device does not accept it.
    pub fn new(device: &'static Device, name: &str, count: u32, slot_bytes: usize) -> io::Result<Self> {
        let memory = Arc::new(Memory::create(name, count as usize * slot_bytes)?);
        let base = u64_from(memory.as_ptr().addr());
        let range = 0..memory.len();
        let registration = Registration::new(device, memory, range, base, RegistrationUse::Local)?;
        Ok(Self { registration, base, slot_bytes, free: (0..count).collect() })
    }

    pub fn allocate(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }

    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// The first `len` bytes of a slot.
    pub fn piece(&self, slot: u32, len: usize) -> LocalPiece {
        assert!(len <= self.slot_bytes, "{len} bytes in a place of {}", self.slot_bytes);
        LocalPiece {
            addr: self.base + u64_from(slot as usize * self.slot_bytes),
            len: u32::try_from(len).expect("a short message"),
            key: self.registration.local_key(),
        }
    }

    /// The whole slot.
    pub fn whole(&self, slot: u32) -> LocalPiece {
        self.piece(slot, self.slot_bytes)
    }

    pub fn write(&self, slot: u32, bytes: &[u8]) {
        self.registration.memory().write(slot as usize * self.slot_bytes, bytes);
    }

    /// Copies the first `len` bytes of a slot to `out`, which is replaced.
    pub fn read(&self, slot: u32, len: usize, out: &mut Vec<u8>) {
        out.clear();
        out.resize(len.min(self.slot_bytes), 0);
        self.registration.memory().read(slot as usize * self.slot_bytes, out);
    }
}
