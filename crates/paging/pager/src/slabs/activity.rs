//! When each slab was last read or written, so that the slabs that are needed least are moved first
//! (Valet, section 3.5). The host keeps it: a node does not see one-sided operations.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::{SLABS_MAX, SlabId, SlabSet};

/// Slabs of one part of the table, which is allocated when the first of them is used.
const PART_SLABS: usize = 1024;
const PARTS: usize = SLABS_MAX as usize / PART_SLABS;

/// The ticks at which slabs were last used.
#[derive(Debug)]
pub(super) struct Activity {
    /// The number of the current tick.
    tick: AtomicU32,
    parts: [OnceLock<Box<[AtomicU32]>>; PARTS],
}

impl Default for Activity {
    fn default() -> Self {
        Self { tick: AtomicU32::new(1), parts: [const { OnceLock::new() }; PARTS] }
    }
}

impl Activity {
    /// Allocates the part of a slab.
    pub(super) fn prepare(&self, slab: SlabId) {
        let new = || (0..PART_SLABS).map(|_| AtomicU32::new(0)).collect();
        self.parts[slab.0 as usize / PART_SLABS].get_or_init(new);
    }

    fn place(&self, slab: SlabId) -> Option<&AtomicU32> {
        let part = self.parts[slab.0 as usize / PART_SLABS].get()?;
        Some(&part[slab.0 as usize % PART_SLABS])
    }
}

impl SlabSet {
    /// Begins the next tick.
    pub(crate) fn tick(&self) {
        self.activity.tick.fetch_add(1, Relaxed);
    }

    /// Records that a slab is read or written now.
    pub(crate) fn touch(&self, slab: SlabId) {
        let tick = self.activity.tick.load(Relaxed);
        // Several slabs share a cache line, which other threads read.
        if let Some(place) = self.activity.place(slab).filter(|place| place.load(Relaxed) != tick) {
            place.store(tick, Relaxed);
        }
    }

    /// The tick at which a slab was last read or written; 0 if that is not known.
    pub(crate) fn touched_at(&self, slab: SlabId) -> u32 {
        self.activity.place(slab).map_or(0, |place| place.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slab_that_was_used_last_has_the_latest_tick() {
        let slabs = SlabSet::new().unwrap();
        let (early, late) = (SlabId(3), SlabId(SLABS_MAX - 1));
        slabs.touch(early);
        assert_eq!(slabs.touched_at(early), 0, "its part is not allocated");
        slabs.activity.prepare(early);
        slabs.activity.prepare(late);
        slabs.touch(early);
        slabs.tick();
        slabs.touch(late);
        assert!(0 < slabs.touched_at(early) && slabs.touched_at(early) < slabs.touched_at(late));
    }
}
