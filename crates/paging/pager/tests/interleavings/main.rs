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

/// The cache, and the location whose bytes each block has in its first slot.
struct Model {
    states: std::sync::Arc<BlockStates>,
    index: CacheIndex,
    bytes: Vec<AtomicU32>,
}

impl Model {
    fn cache(&self, block: u32, location: u32) {
        let block = BlockId(block);
        self.bytes[block.0 as usize].store(location, SeqCst);
        self.states.begin(block, 1, cached_blocks::duel::Group::Rest);
        self.index.insert(Location(location), block.slot(0));
        self.states.finish(block);
    }

    /// Removes a block, forgets its page, and caches another in it.
    fn reuse(&self, block: u32, location: u32) {
        if self.states.try_remove(BlockId(block)) {
            let old = self.bytes[block as usize].load(SeqCst);
            self.index.remove_from(Location(old), BlockId(block).slot(0));
            self.cache(block, location);
        }
    }

    fn read(&self, location: u32) {
        if let Some(pinned) = self.index.pin(Location(location)) {
            let (block, _) = pinned.slot().block();
            for _ in 0..2 {
                let found = self.bytes[block.0 as usize].load(SeqCst);
                assert_eq!(found, location, "{block:?} has other bytes while it is pinned");
            }
        }
    }
}

fn play() {
    let states = std::sync::Arc::new(BlockStates::new(BLOCKS as usize));
    let index = CacheIndex::new(std::sync::Arc::clone(&states)).expect("memory");
    let bytes = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
    let model = Arc::new(Model { states, index, bytes });
    (0..BLOCKS).for_each(|block| model.cache(block, block));
    let readers = (0..2).map(|reader| {
        let model = Arc::clone(&model);
        thread::spawn(move || (0..4).for_each(|turn| model.read((reader + turn) % LOCATIONS)))
    });
    let readers: Vec<_> = readers.collect();
    for step in 0..6 {
        model.reuse(step % BLOCKS, (step + 2) % LOCATIONS);
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
