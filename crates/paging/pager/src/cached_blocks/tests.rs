//! Tests of the page cache: which blocks are given away, and what readers find.

use std::sync::Arc;

use aquifer_fabric::Key;
use aquifer_mutation::Mutations;
use aquifer_pool::{Extent, NodeId, SizeClass};

use crate::cache_shares::CacheShares;
use crate::mempool::{BLOCK_BYTES, BLOCK_PAGES, BlockId, Mempool, MempoolUser};
use crate::mutation::Mutation;
use crate::page::{Location, PAGE_BYTES};
use crate::slabs::{SlabId, SlabSet};

/// The number of pages that are cached in a block with the measured one: so many that no two blocks
/// are merged.
const PAGES: u32 = 50;

/// A run of a user, each of whose slabs has [`PAGES`] pages in use.
struct TestRun {
    mempool: Arc<Mempool>,
    user: Arc<MempoolUser>,
    slabs: SlabSet,
}

impl TestRun {
    fn new(mempool: &Arc<Mempool>, uid: u32) -> Self {
        let slabs = SlabSet::new().unwrap();
        slabs.set_cache(mempool.new_cache_index().unwrap());
        Self { mempool: Arc::clone(mempool), user: mempool.user(uid), slabs }
    }

    /// Occupies pages of a new slab. Returns the first.
    fn occupy(&self, slab: u32) -> Location {
        let extent = Extent { node: NodeId(1), addr: 0, class: SizeClass::new(6).unwrap(), key: Key(7) };
        self.slabs.publish(SlabId(slab), &[extent], None);
        (0..PAGES).for_each(|page| self.slabs.occupy(Location::new(SlabId(slab), page), 0));
        Location::new(SlabId(slab), 0)
    }

    /// Fills a block with the bytes of a new slab's pages, and passes it to the cache. Returns the
    /// first page, which is in slot 3.
    fn cache(&self, slab: u32) -> Location {
        let location = self.occupy(slab);
        self.cache_again(location, slab, PAGES);
        location
    }

    /// Caches the first `pages` pages of a slab, of which the first has a value.
    fn cache_again(&self, location: Location, value: u32, pages: u32) {
        let block = self.mempool.allocate(&self.user, 1).expect("a block is free");
        self.write(block, value);
        let index = self.slabs.cache().expect("it was set");
        self.mempool.free_to_cache(&self.user, block, index, &entries(location, pages));
    }

    /// Drops the pages of a slab from the cache, because a program holds them.
    fn uncache(&self, location: Location) {
        (0..PAGES).for_each(|page| self.slabs.uncache_held(Location(location.0 + page)));
    }

    fn write(&self, block: BlockId, value: u32) {
        self.mempool.memory().write(block.slot(3).offset(), &value.to_ne_bytes());
    }

    /// The value in the cached page of a location.
    fn read(&self, location: Location) -> Option<u32> {
        let pinned = self.slabs.cache()?.pin(location)?;
        let mut value = [0; 4];
        self.mempool.memory().read(pinned.slot().offset(), &mut value);
        Some(u32::from_ne_bytes(value))
    }
}

/// The slots and locations of the first `pages` pages of a slab.
fn entries(location: Location, pages: u32) -> Vec<(usize, Location)> {
    (0..pages).map(|page| (3 + page as usize, Location(location.0 + page))).collect()
}

fn mempool(blocks: usize) -> Arc<Mempool> {
    Arc::new(Mempool::new(blocks * BLOCK_PAGES * PAGE_BYTES).unwrap())
}

/// Drops blocks of the cache.
fn drop_blocks(mempool: &Mempool, blocks: usize) {
    let before = mempool.cached_block_count();
    while before - mempool.cached_block_count() < blocks {
        assert!(mempool.release_block_memory().unwrap(), "all blocks are pinned or in use");
    }
}

#[test]
fn a_cached_page_is_found_until_its_block_is_needed() {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let locations: Vec<_> = (0..4).map(|slab| run.cache(slab)).collect();
    assert_eq!(
        locations.iter().map(|location| run.read(*location)).collect::<Vec<_>>(),
        [Some(0), Some(1), Some(2), Some(3)]
    );
    assert_eq!((mempool.cached_block_count(), mempool.free_block_count()), (4, 8));
    let owned: Vec<_> = std::iter::from_fn(|| mempool.allocate(&run.user, 1)).collect();
    assert_eq!(owned.len(), 4, "four are kept for the next user");
    assert!(locations.iter().all(|location| run.read(*location).is_none()));
}

#[test]
fn the_oldest_block_is_given_away_first() {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let locations: Vec<_> = (0..3).map(|slab| run.cache(slab)).collect();
    drop_blocks(&mempool, 1);
    assert_eq!(run.read(locations[0]), None);
    assert_eq!((run.read(locations[1]), run.read(locations[2])), (Some(1), Some(2)));
    drop_blocks(&mempool, 2);
    assert_eq!(mempool.cached_block_count(), 0);
}

#[test]
fn the_user_with_the_most_blocks_gives_one_up() {
    let mempool = mempool(64);
    let (first, second) = (TestRun::new(&mempool, 1), TestRun::new(&mempool, 2));
    let of_second = second.cache(0);
    let of_first: Vec<_> = (0..4).map(|slab| first.cache(slab)).collect();
    drop_blocks(&mempool, 3);
    assert_eq!(second.read(of_second), Some(0), "the other user had more");
    assert_eq!(first.read(of_first[3]), Some(3));
}

#[test]
fn a_block_without_entries_is_given_away_first() {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let locations: Vec<_> = (0..3).map(|slab| run.cache(slab)).collect();
    run.uncache(locations[1]);
    drop_blocks(&mempool, 1);
    assert_eq!((run.read(locations[0]), run.read(locations[2])), (Some(0), Some(2)));
}

#[test]
fn emptied_blocks_are_used_again_before_free_ones() {
    let mempool = mempool(64);
    let run = TestRun::new(&mempool, 1);
    let block = mempool.allocate(&run.user, 0).unwrap();
    let index = run.slabs.cache().unwrap();
    let location = run.occupy(1);
    // The page returns to its program each time.
    (0..1000).fold(block, |block, _| {
        let other = mempool.exchange(&run.user, block, index, &entries(location, PAGES));
        run.uncache(location);
        other
    });
    let backed = mempool.backed_bytes() / BLOCK_BYTES as u64;
    assert!(backed <= 3, "{backed} blocks were used");
}

#[test]
fn a_page_of_two_programs_stays_when_one_holds_it() {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let location = run.cache(5);
    run.slabs.retain(location);
    run.slabs.uncache_held(location);
    assert_eq!(run.read(location), Some(5));
    run.slabs.release(location);
    run.slabs.uncache_held(location);
    assert_eq!(run.read(location), None);
}

fn read_after_release() -> Option<u32> {
    let run = TestRun::new(&mempool(8), 1);
    let location = run.cache(5);
    run.slabs.release(location);
    run.slabs.occupy(location, 0);
    run.read(location)
}

#[test]
fn a_location_that_gets_new_bytes_is_not_cached() {
    assert_eq!(read_after_release(), None);
    assert_eq!(Mutation::KeepStale.while_active(read_after_release), Some(5), "the mutation is noticed");
}

/// Whether a pinned page keeps its bytes while all blocks are allocated and written.
fn is_pinned_page_kept() -> bool {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let locations: Vec<_> = (0..4).map(|slab| run.cache(slab)).collect();
    let index = run.slabs.cache().unwrap();
    let pinned = index.pin(locations[0]).expect("it is cached");
    while let Some(block) = run.mempool.allocate(&run.user, 1) {
        run.write(block, 99);
    }
    let mut value = [0; 4];
    mempool.memory().read(pinned.slot().offset(), &mut value);
    u32::from_ne_bytes(value) == 0
}

/// Accesses pages, each of which is cached again after its access. Returns how many of the last
/// half of the accesses found their page.
fn hits(accesses: &[u32]) -> usize {
    let mempool = mempool(64);
    let run = TestRun::new(&mempool, 1);
    let pages: Vec<_> = (0..100).map(|slab| run.occupy(slab)).collect();
    let mut hits = 0;
    for (at, slab) in accesses.iter().enumerate() {
        let location = pages[*slab as usize];
        if run.read(location).is_some() {
            run.uncache(location);
            hits += usize::from(at >= accesses.len() / 2);
        }
        run.cache_again(location, *slab, PAGES);
    }
    hits
}

#[test]
fn a_loop_through_more_than_is_cached_finds_a_part_of_it() {
    let accesses: Vec<_> = (0..60_000).map(|at| at % 100).collect();
    let found = hits(&accesses);
    assert!(found > 12_000, "{found} of 30,000; the cache has room for some 55 of 100 pages");
}

#[test]
fn a_program_that_returns_to_its_last_pages_finds_them() {
    let mut seed = 1u64;
    let mut random = move |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from((seed >> 33) % below).unwrap()
    };
    // A window of 40 pages that moves on slowly.
    let accesses: Vec<_> = (0..60_000).map(|at| (at / 500 + random(40)) % 100).collect();
    let found = hits(&accesses);
    assert!(found > 28_000, "{found} of 30,000");
}

#[test]
fn sparse_blocks_are_merged_and_keep_their_pages() {
    let mempool = mempool(64);
    let run = TestRun::new(&mempool, 1);
    let pages: Vec<_> = (0..20).map(|slab| run.occupy(slab)).collect();
    (0..20).zip(&pages).for_each(|(slab, location)| run.cache_again(*location, slab, 20));
    drop_blocks(&mempool, 10);
    let found = pages.iter().filter(|location| run.read(**location).is_some()).count();
    assert!(found >= 18, "{found} of 20 slabs, in half of the blocks");
    for (slab, location) in (0..20).zip(&pages) {
        assert!([None, Some(slab)].contains(&run.read(*location)), "slab {slab}");
    }
    drop_blocks(&mempool, 10);
    assert!(pages.iter().all(|location| run.read(*location).is_none()));
}

#[test]
fn pinned_blocks_are_not_merged() {
    let mempool = mempool(64);
    let run = TestRun::new(&mempool, 1);
    let pages: Vec<_> = (0..4).map(|slab| run.occupy(slab)).collect();
    (0..4).zip(&pages).for_each(|(slab, location)| run.cache_again(*location, slab, 5));
    let index = run.slabs.cache().unwrap();
    let pinned: Vec<_> = pages.iter().map(|location| index.pin(*location).expect("it is cached")).collect();
    let slots: Vec<_> = pinned.iter().map(|pinned| pinned.slot()).collect();
    while mempool.allocate(&run.user, 1).is_some() {}
    assert_eq!(pages.iter().map(|location| index.slot_of(*location).unwrap()).collect::<Vec<_>>(), slots);
}

/// Random accesses to pages of which all fit into the cache, if its blocks have no holes.
#[test]
fn a_cache_with_room_for_all_pages_has_most_of_them() {
    let mempool = mempool(64);
    let run = TestRun::new(&mempool, 1);
    mempool.set_cache_shares(CacheShares {
        bytes_per_user: Some(40 * BLOCK_BYTES as u64),
        ..CacheShares::default()
    });
    let mut seed = 1u64;
    let mut random = move |below: u32| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from((seed >> 33) % u64::from(below)).unwrap()
    };
    let slabs: Vec<_> = (0..48).map(|slab| run.occupy(slab)).collect();
    let pages: Vec<_> =
        slabs.iter().flat_map(|first| (0..PAGES).map(|page| Location(first.0 + page))).collect();
    let mut out = Vec::new();
    let (mut hits, mut accesses) = (0, 0);
    let index = run.slabs.cache().expect("it was set");
    for turn in 0..60_000 {
        let location = pages[random(48 * PAGES) as usize];
        if out.iter().any(|(_, other)| *other == location) {
            continue;
        }
        if run.slabs.cache().and_then(|cache| cache.pin(location)).is_some() {
            run.slabs.uncache_held(location);
            hits += usize::from(turn > 30_000);
        }
        accesses += usize::from(turn > 30_000);
        out.push((out.len(), location));
        if out.len() == BLOCK_PAGES {
            let block = mempool.allocate(&run.user, 1).expect("a block is free");
            mempool.free_to_cache(&run.user, block, index, &out);
            out.clear();
        }
    }
    assert!(hits * 100 > accesses * 75, "{hits} of {accesses}; all 38 blocks of pages fit");
}

#[test]
fn users_share_the_cache_by_weight_up_to_a_limit() {
    let mempool = mempool(64);
    let weights = [(2, 3)].into();
    mempool.set_cache_shares(CacheShares { bytes_per_user: None, weights });
    let (first, second) = (TestRun::new(&mempool, 1), TestRun::new(&mempool, 2));
    let counts = || [&first, &second].map(|run| mempool.cached_blocks_of(&run.user));
    (0..24).for_each(|slab| _ = (first.cache(slab), second.cache(slab)));
    drop_blocks(&mempool, 24);
    assert_eq!(counts(), [6, 18]);
    let bytes = Some(10 * BLOCK_BYTES as u64);
    mempool.set_cache_shares(CacheShares { bytes_per_user: bytes, ..CacheShares::default() });
    (30..40).for_each(|slab| _ = first.cache(slab));
    assert_eq!(counts(), [10, 18], "a block that is cached above the limit replaces another");
    assert_eq!(first.read(first.cache(50)), Some(50));
}

#[test]
fn a_pinned_block_is_not_given_away() {
    assert!(is_pinned_page_kept());
    assert!(!Mutation::PunchPinned.while_active(is_pinned_page_kept), "the mutation is noticed");
}

#[test]
fn a_pinned_block_does_not_take_the_guarantee_of_others() {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let locations: Vec<_> = (0..4).map(|slab| run.cache(slab)).collect();
    let index = run.slabs.cache().unwrap();
    let _pinned: Vec<_> = locations.iter().map(|location| index.pin(*location).unwrap()).collect();
    let second = mempool.user(2);
    assert_eq!(std::iter::from_fn(|| mempool.allocate(&second, 1)).count(), 4);
}

#[test]
fn a_run_that_has_ended_has_no_cached_block() {
    let mempool = mempool(64);
    let (run, other) = (TestRun::new(&mempool, 1), TestRun::new(&mempool, 1));
    for slab in 0..4 {
        run.cache(slab);
    }
    let of_other = other.cache(0);
    mempool.forget_cached(&run.user, &run.slabs);
    assert_eq!((mempool.cached_block_count(), other.read(of_other)), (1, Some(0)));
}

#[test]
fn a_block_is_exchanged_for_another() {
    let mempool = mempool(8);
    let run = TestRun::new(&mempool, 1);
    let block = mempool.allocate(&run.user, 0).unwrap();
    let index = run.slabs.cache().unwrap();
    assert_eq!(mempool.exchange(&run.user, block, index, &[]), block, "no page is worth keeping");
    let location = run.occupy(9);
    run.write(block, 9);
    let other = mempool.exchange(&run.user, block, index, &entries(location, PAGES));
    assert_ne!(other, block);
    assert_eq!((run.read(location), run.user.blocks()), (Some(9), 1));
}
