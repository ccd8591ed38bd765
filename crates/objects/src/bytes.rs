//! The memory of a heap: the words of its objects, and the translation tables of its block
//! addresses.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use aquifer_fabric::unit_map::UnitMap;
use aquifer_fabric::{Access, Memory, Region, Scope, Target, TargetError};

use crate::class::{BLOCK_ORDERS, Class, FRAME_BYTES};
use crate::header::{Lock, ObjectNumber};
use crate::heap::Mover;
use crate::pointer::BlockAddress;
use crate::slot::{self, Words};
use crate::space::{FrameRun, addresses_max};

/// The memory of one heap.
#[derive(Debug)]
pub struct HeapBytes {
    memory: Arc<Memory>,
    /// The translation table of each block size.
    maps: Vec<UnitMap>,
}

impl HeapBytes {
    /// Memory of `frames` frames, of which none takes memory yet.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create(frames: u32) -> io::Result<Self> {
        let bytes = u64::from(frames) * FRAME_BYTES;
        let memory = Arc::new(Memory::create("aquifer-heap", to_usize(bytes)?)?);
        let maps = (0..BLOCK_ORDERS).map(|order| {
            let order = u8::try_from(order).expect("there are nine");
            let units = addresses_max(frames, order);
            let words = Arc::new(Memory::create("aquifer-heap-map", to_usize(units * 8)?)?);
            Ok(UnitMap { words, at: 0, units, unit_bytes: FRAME_BYTES << order })
        });
        Ok(Self { memory, maps: maps.collect::<io::Result<_>>()? })
    }

    /// Registers the blocks of each size for READ.
    ///
    /// # Errors
    /// If the target refuses.
    pub fn register(&self, target: &dyn Target, scope: Scope) -> Result<Vec<Region>, TargetError> {
        let register = |map: &UnitMap| {
            target.register_movable(Arc::clone(&self.memory), map.clone(), Access::READ, scope, None)
        };
        self.maps.iter().map(register).collect()
    }

    /// Bytes that the heap takes.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        self.memory.allocated_bytes()
    }

    /// The number of addresses of blocks of a size.
    #[must_use]
    pub fn addresses(&self, order: u8) -> u64 {
        self.maps[usize::from(order)].units
    }

    /// Copies the bytes of an object after its header. It must be locked.
    pub fn read(&self, at: u64, out: &mut [u8]) {
        self.memory.read(byte(at) + 8, out);
    }
}

/// The first word of a slot.
#[must_use]
pub fn slot_word(frames: FrameRun, slot: u32, class: Class) -> u64 {
    u64::from(frames.first) * (FRAME_BYTES / 8) + u64::from(slot) * u64::from(class.slot_bytes / 8)
}

fn byte(word: u64) -> usize {
    usize::try_from(word * 8).expect("the memory is mapped")
}

fn to_usize(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(io::Error::other)
}

impl Words for &HeapBytes {
    fn load(&mut self, at: u64) -> u64 {
        self.memory.atomic_u64(byte(at)).load(Acquire)
    }

    fn store(&mut self, at: u64, word: u64) {
        self.memory.atomic_u64(byte(at)).store(word, Release);
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        // What follows must not be seen before the lock: the fence orders it behind the store.
        let swapped = self.memory.atomic_u64(byte(at)).compare_exchange(old, new, AcqRel, Acquire).is_ok();
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        swapped
    }
}

impl Mover for &HeapBytes {
    fn lock(&mut self, source: FrameRun, objects: &[(u32, u64)], class: Class) {
        for (slot, id) in objects {
            let number = ObjectNumber::new(*id).expect("a heap has numbers");
            let at = slot_word(source, *slot, class);
            // Another worker writes for some microseconds at most.
            while slot::lock(self, at, number, Lock::Moving).is_err() {
                std::hint::spin_loop();
            }
        }
    }

    fn copy(&mut self, from: (FrameRun, u32), to: (FrameRun, u32), class: Class) {
        let (from, to) = (slot_word(from.0, from.1, class), slot_word(to.0, to.1, class));
        slot::copy(self, from, to, u64::from(class.slot_bytes / 8));
    }

    fn name(&mut self, address: BlockAddress, named: &[FrameRun]) {
        let offset = named.first().map(|frames| u64::from(frames.first) * FRAME_BYTES);
        self.maps[usize::from(address.order)].store(address.number.into(), offset);
    }

    fn free(&mut self, frames: FrameRun) {
        let bytes = byte(FRAME_BYTES / 8) << frames.order;
        if let Err(error) = self.memory.punch(byte(u64::from(frames.first) * (FRAME_BYTES / 8)), bytes) {
            // It is used again all the same: a free slot is recognised by the heap's own tables.
            tracing::warn!(%error, bytes, "cannot return memory of a heap to the system");
        }
    }
}
