//! The page cache in random interleavings of threads: a reader that has pinned a page finds its
//! bytes, while another thread takes blocks out of the cache and caches other pages in them.

use std::panic::catch_unwind;

use aquifer_mutation::Mutations as _;
use aquifer_pager::{BlockId, Location, Mutation};
use page_cache::{BlockStates, CacheIndex};
use shuttle::sync::Arc;
use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;
use sync::Ordering::SeqCst;

// The page cache with the words of shuttle.
#[expect(dead_code, reason = "the test does without the order of the blocks")]
#[path = "../../src/page_cache.rs"]
mod page_cache;

mod cached_blocks;

mod mempool {
    pub use aquifer_pager::BlockId;
}

mod mutation {
    pub use aquifer_pager::Mutation;
}

mod page {
    pub use aquifer_pager::{Location, Slot};
}

mod slabs {
    use aquifer_pager::Location;

    pub const LOCATIONS_MAX: usize = 8;

    pub fn location_number(location: Location) -> usize {
        location.0 as usize
    }
}

mod sync {
    use parking_lot::Mutex as Lock;
    pub use shuttle::sync::atomic::{AtomicU32, Ordering};

    /// The words of an index.
    #[derive(Debug)]
    pub struct Memory(Vec<AtomicU32>);

    impl Memory {
        pub fn private(_name: &str, len: usize) -> std::io::Result<Self> {
            Ok(Self((0..len / 4).map(|_| AtomicU32::new(0)).collect()))
        }

        pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
            &self.0[offset / 4]
        }
    }

    /// A lock that is never held over an access to another word.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(Lock<T>);

    impl<T> Mutex<T> {
        pub fn lock(&self) -> parking_lot::MutexGuard<'_, T> {
            self.0.lock()
        }
    }
}

const SCHEDULES: usize = 3000;
const BLOCKS: u32 = 2;
const LOCATIONS: u32 = 3;

/// The cache, and the location whose bytes each of the two slots of each block has.
struct Model {
    states: std::sync::Arc<BlockStates>,
    index: CacheIndex,
    bytes: Vec<AtomicU32>,
}

fn place(slot: aquifer_pager::Slot) -> usize {
    let (block, at) = slot.block();
    block.0 as usize * 2 + at
}

impl Model {
    fn cache(&self, block: u32, location: u32) {
        let block = BlockId(block);
        self.bytes[place(block.slot(0))].store(location, SeqCst);
        self.states.begin(block, 1, cached_blocks::duel::Group::Rest);
        self.index.insert(Location(location), block.slot(0));
        self.states.finish(block);
    }

    /// Removes a block, forgets its page, and caches another in it.
    fn reuse(&self, block: u32, location: u32) {
        if self.states.try_remove(BlockId(block)) {
            for at in 0..2 {
                let slot = BlockId(block).slot(at);
                self.index.remove_from(Location(self.bytes[place(slot)].load(SeqCst)), slot);
            }
            self.cache(block, location);
        }
    }

    /// Moves the page in the first slot of a block to the second slot of the other one, if that is
    /// free, and caches another page in the block.
    fn merge(&self, block: u32, location: u32) {
        let (source, target) = (BlockId(block), BlockId(1 - block));
        let (from, to) = (source.slot(0), target.slot(1));
        let moved = Location(self.bytes[place(from)].load(SeqCst));
        let is_there =
            |slot| self.index.slot_of(Location(self.bytes[place(slot)].load(SeqCst))) == Some(slot);
        if !is_there(from) || is_there(to) || is_there(source.slot(1)) {
            return;
        }
        let copy = |from, to| self.bytes[place(to)].store(self.bytes[place(from)].load(SeqCst), SeqCst);
        if !self.states.try_remove(source) {
        } else if self.index.move_entries(target, &[(moved, from, to)], copy) {
            self.cache(block, location);
        } else {
            self.states.finish(source);
        }
    }

    fn read(&self, location: u32) {
        if let Some(pinned) = self.index.pin(Location(location)) {
            for _ in 0..2 {
                let found = self.bytes[place(pinned.slot())].load(SeqCst);
                assert_eq!(found, location, "{:?} has other bytes while it is pinned", pinned.slot());
            }
        }
    }
}

fn play() {
    let states = std::sync::Arc::new(BlockStates::new(BLOCKS as usize));
    let index = CacheIndex::new(std::sync::Arc::clone(&states)).expect("memory");
    let bytes = (0..2 * BLOCKS).map(|_| AtomicU32::new(0)).collect();
    let model = Arc::new(Model { states, index, bytes });
    (0..BLOCKS).for_each(|block| model.cache(block, block));
    let readers = (0..2).map(|reader| {
        let model = Arc::clone(&model);
        thread::spawn(move || (0..4).for_each(|turn| model.read((reader + turn) % LOCATIONS)))
    });
    let mut readers: Vec<_> = readers.collect();
    // A program gets a page from the cache, or releases its location.
    readers.push({
        let model = Arc::clone(&model);
        thread::spawn(move || (0..LOCATIONS).for_each(|location| model.index.remove(Location(location))))
    });
    for step in 0..6 {
        if step % 2 == 0 {
            model.merge(step / 2 % BLOCKS, (step + 2) % LOCATIONS);
        } else {
            model.reuse(step % BLOCKS, (step + 2) % LOCATIONS);
        }
    }
    readers.into_iter().for_each(|reader| reader.join().expect("it has ended"));
}

#[test]
fn a_pinned_page_keeps_its_bytes() {
    shuttle::check_random(play, SCHEDULES);
}

#[test]
fn a_block_that_is_taken_while_it_is_pinned_is_noticed() {
    let broken = || catch_unwind(|| shuttle::check_random(play, SCHEDULES)).is_err();
    assert!(Mutation::PunchPinned.while_active(broken), "the mutation was not noticed");
}
