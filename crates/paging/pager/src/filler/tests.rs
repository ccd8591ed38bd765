//! Tests of the filler: sizes of slabs, and which are filled, kept, freed and vacated.

use std::sync::Arc;

use aquifer_fabric::sim::{SimFabric, SimOptions, SimTarget};
use aquifer_fabric::{Host, Identity, Tenant};
use aquifer_pool::{NodeId, NodeMemory, PoolClient, SizeClass};

use super::{Filler, GainThreshold, NoRoom};
use crate::page::Location;
use crate::slabs::{SlabId, SlabSet};

struct FillerTest {
    _nodes: Vec<(SimTarget, NodeMemory)>,
    slabs: Arc<SlabSet>,
    pool: PoolClient,
    filler: Filler,
}

fn new_test(node_bytes: u64) -> FillerTest {
    new_test_of(1, node_bytes)
}

fn new_test_of(nodes: u16, node_bytes: u64) -> FillerTest {
    let fabric = SimFabric::new(7, SimOptions { step_on_poll: true, ..SimOptions::default() });
    let mut pool = PoolClient::new(Host(1), Tenant(0));
    let who = Identity { host: Host(1), epoch: 1, tenant: Tenant(0) };
    let lend = |node| {
        let target = fabric.add_node();
        let node_memory = NodeMemory::create(&target, node, node_bytes).unwrap();
        pool.add_node(node, fabric.connect(target.node(), who).unwrap()).unwrap();
        (target, node_memory)
    };
    let nodes = (0..nodes).map(NodeId).map(lend).collect();
    let slabs = Arc::new(SlabSet::new().unwrap());
    let filler = Filler::new(Arc::clone(&slabs), 3);
    FillerTest { _nodes: nodes, slabs, pool, filler }
}

impl FillerTest {
    /// Fills `pages` pages, at most `want` consecutive ones at a time.
    fn fill(&mut self, pages: u32, want: u32) -> Result<Vec<Location>, NoRoom> {
        let mut filled = Vec::new();
        while filled.len() < pages as usize {
            let left = pages - u32::try_from(filled.len()).unwrap();
            let room = self.filler.find_free_pages(&mut self.pool, want.min(left))?;
            for index in 0..room.pages {
                let location = Location(room.first.0 + index);
                self.slabs.occupy(location, 1);
                filled.push(location);
            }
        }
        Ok(filled)
    }

    fn release(&mut self, locations: &[Location]) {
        locations.iter().for_each(|location| self.slabs.release(*location));
        self.filler.collect_emptied(&mut self.pool);
        while self.filler.trim_empty(&mut self.pool, false) {}
    }

    fn chunks(&self, slab: SlabId) -> u32 {
        self.slabs.replicas(slab).class().map_or(0, SizeClass::chunks)
    }

    fn held_pages(&self) -> u64 {
        self.slabs.bytes().0 / 4096
    }
}

#[test]
fn slabs_grow_with_the_pages_of_the_run() {
    let mut test = new_test(64 << 20);
    for (want, chunks) in [(1, 1), (3, 4), (64, 64)] {
        let last = test.fill(want, want).unwrap().pop().unwrap();
        assert_eq!(test.chunks(last.slab()), chunks, "for {want} pages");
    }
    test.fill(4096, 64).unwrap();
    assert!(test.held_pages() < 4096 * 5 / 4, "{} pages are held for 4164", test.held_pages());
    let last = test.fill(512, 64).unwrap().pop().unwrap();
    assert_eq!(test.chunks(last.slab()), 256, "a sixteenth");
}

#[test]
fn few_empty_slabs_are_kept_and_none_while_the_pool_is_short() {
    let mut test = new_test(16 << 20);
    let filled = test.fill(1024, 1).unwrap();
    let slab_pages: Vec<u32> = filled.iter().map(|location| test.chunks(location.slab())).collect();
    assert!(slab_pages.iter().all(|pages| *pages <= 64));
    let held_pages = test.held_pages();
    test.release(&filled[..128]);
    let kept = test.held_pages() - (held_pages - 128);
    assert!((1..=112).contains(&kept), "{kept} pages are kept of 896");
    let bytes_peak_before = test.slabs.bytes().1;
    test.fill(u32::try_from(kept).unwrap(), 1).unwrap();
    assert_eq!(test.slabs.bytes().1, bytes_peak_before, "no new slab was allocated");
    let again = test.fill(64, 64).unwrap();
    test.release(&again);
    test.release(&filled[128..192]);
    while test.filler.trim_empty(&mut test.pool, true) {}
    let open_pages = u64::from(test.chunks(again[63].slab()));
    assert_eq!(test.held_pages(), test.slabs.pages() + open_pages, "all empty slabs are freed");
    test.fill(65, 1).unwrap();
    assert!(
        test.held_pages() <= test.slabs.pages() + 63,
        "a slab that was empty while it was open is filled again"
    );
    test.release(&filled[192..]);
    test.filler.close(&mut test.pool);
}

#[test]
fn the_emptiest_slabs_are_vacated_as_far_as_the_others_have_holes() {
    let mut test = new_test(16 << 20);
    let filled = test.fill(2048, 64).unwrap();
    assert!(test.filler.slabs_to_vacate(GainThreshold::Normal).is_empty(), "all slabs are full");
    // One of each eight pages stays in use.
    let gone: Vec<Location> = filled.iter().copied().filter(|location| location.0 % 8 != 0).collect();
    test.release(&gone);
    let chosen = test.filler.slabs_to_vacate(GainThreshold::Normal);
    let held_pages =
        |slabs: &[SlabId]| -> u64 { slabs.iter().map(|slab| u64::from(test.chunks(*slab))).sum() };
    assert!(
        held_pages(&chosen) > test.held_pages() * 3 / 4,
        "{} of {}",
        held_pages(&chosen),
        test.held_pages()
    );
    let short = test.filler.slabs_to_vacate(GainThreshold::PoolShort);
    let moved: u32 = short.iter().map(|slab| test.slabs.live_pages(*slab)).sum();
    let others = test.filler.movable_slabs().into_iter().filter(|slab| !short.contains(slab));
    let room: u32 = others.map(|slab| test.chunks(slab) - test.slabs.live_pages(slab)).sum();
    assert!(moved > 0 && moved <= room, "{moved} pages fit into {room} holes without a new slab");
}

#[test]
fn a_marked_slab_is_not_filled_until_the_round_is_over() {
    let mut test = new_test(4 << 20);
    let filled = test.fill(64, 64).unwrap();
    test.fill(64, 64).unwrap();
    test.release(&filled[1..]);
    let sparse = filled[0].slab();
    test.slabs.mark(&[sparse]);
    assert!(test.fill(64, 64).unwrap().iter().all(|location| location.slab() != sparse));
    test.slabs.end_vacating();
    assert!(test.fill(64, 64).unwrap().iter().any(|location| location.slab() == sparse));
}

#[test]
fn a_full_pool_is_used_up_to_its_last_hole() {
    let mut test = new_test(2 << 20);
    let filled = test.fill(512, 64).unwrap();
    assert!(matches!(test.fill(1, 1), Err(NoRoom::Pool(_))));
    // Every slab is more than half full.
    let holes: Vec<Location> = filled.iter().copied().filter(|location| location.0 % 4 == 0).collect();
    test.release(&holes);
    let again = test.fill(u32::try_from(holes.len()).unwrap(), 64).unwrap();
    assert_eq!(again.len(), holes.len());
    assert!(matches!(test.fill(1, 1), Err(NoRoom::Pool(_))));
}
