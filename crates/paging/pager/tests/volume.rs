//! Rules of a volume that show only after several steps.

use std::sync::Arc;

use aquifer_pager::{Budget, Mempool, PageState, SlabSet, StageOutcome, Volume};

fn volume() -> (Volume, Arc<Budget>) {
    let budget = Arc::new(Budget::new(16 << 20));
    let slabs = Arc::new(SlabSet::new().unwrap());
    let mempool = Arc::new(Mempool::new(1 << 20).unwrap());
    (Volume::new(slabs, mempool, Arc::clone(&budget)).unwrap(), budget)
}

#[test]
fn a_stale_queue_entry_does_not_count_a_shared_page() {
    let (mut parent, _) = volume();
    parent.hold(7, true);
    let mut child = parent.clone_for_fork().unwrap();
    // Page 3 belonged to the child and was discarded; its entry in the resident queue remains. Then
    // the shared page is moved to its number.
    child.hold(3, true);
    child.discard(3, 4);
    child.move_range(7, 3, 1);
    assert_eq!(child.held(), 0, "shared pages are not counted");

    let mut victims = Vec::new();
    child.pick_victims(64, false, |_| false, &mut victims);
    assert!(victims.is_empty(), "shared pages are evicted last");
    child.pick_victims(64, true, |_| false, &mut victims);
    assert_eq!(victims, [3]);
    child.vanished(3);
    assert_eq!(child.held(), 0);
}

#[test]
fn a_doubtful_page_is_not_picked_before_it_is_held_again() {
    let (mut volume, budget) = volume();
    volume.mark_doubtful(5);
    assert_eq!(volume.state(5), PageState::Doubtful);
    let mut victims = Vec::new();
    volume.pick_victims(64, true, |_| false, &mut victims);
    assert!(victims.is_empty());
    volume.hold(5, true);
    volume.mark_doubtful(5);
    assert_eq!(volume.state(5), PageState::Held, "a held page does not become doubtful");
    volume.pick_victims(64, true, |_| false, &mut victims);
    assert_eq!(victims, [5]);
    volume.vanished(5);
    assert_eq!(budget.held(), 0);
}

/// Evicts the first page of the resident queue into the mempool, and returns it.
fn stage_one(volume: &mut Volume) -> u64 {
    let mut victims = Vec::new();
    volume.pick_victims(1, false, |_| false, &mut victims);
    let block = volume.allocate_block().unwrap();
    volume.left(block, &victims);
    volume.staged(block, &[StageOutcome::Data]);
    victims[0]
}

/// Evicts this number of pages of the resident queue, which then vanish.
fn drop_pages(volume: &mut Volume, count: usize) {
    let mut victims = Vec::new();
    while victims.len() < count {
        let mut batch = Vec::new();
        volume.pick_victims(count - victims.len(), false, |_| false, &mut batch);
        batch.iter().for_each(|page| volume.vanished(*page));
        victims.append(&mut batch);
    }
}

#[test]
fn a_page_that_faults_again_soon_stays_longer_than_others() {
    let (mut volume, _) = volume();
    (0..1000).for_each(|page| volume.hold(page, true));
    assert_eq!([stage_one(&mut volume), stage_one(&mut volume), stage_one(&mut volume)], [0, 1, 2]);
    volume.hold(0, true);
    volume.hold(1, false);
    drop_pages(&mut volume, 600);
    volume.hold(2, true);
    drop_pages(&mut volume, 397);
    let mut order = Vec::new();
    while volume.held() > 0 {
        let mut next = Vec::new();
        volume.pick_victims(1, false, |_| false, &mut next);
        volume.vanished(next[0]);
        order.append(&mut next);
    }
    assert_eq!(order, [1, 2, 0]);
}

#[test]
fn an_idle_program_passes_blocks_to_a_program_that_lacks_them() {
    let (mut parent, budget) = volume();
    parent.hold(1, true);
    let mut child = parent.clone_for_fork().unwrap();
    for page in 1..=4 {
        parent.hold(page, true);
        let mut victims = Vec::new();
        parent.pick_victims(1, false, |_| false, &mut victims);
        let block = parent.allocate_block().unwrap();
        parent.left(block, &victims);
        parent.staged(block, &[StageOutcome::Zeros]);
        parent.written(block, &[None]);
    }
    assert!(!parent.pass_block(), "no relative is queued");
    assert!(child.allocate_block().is_none() && child.queue_for_block() && child.lacks_block());
    assert!(!child.queue_for_block(), "a volume is queued once");
    assert!(parent.pass_block() && budget.consume_block_notification());
    assert!(!parent.pass_block(), "one block is passed for each queue entry");
    let first = child.allocate_block().expect("the parent passed a block");
    // The fair share of each is two of four blocks. The parent owns three, so it passes one, and no
    // more.
    assert!(child.allocate_block().is_none() && child.queue_for_block() && parent.pass_block());
    assert!(budget.consume_block_notification());
    let second = child.allocate_block().expect("the parent passed a block");
    assert!(child.allocate_block().is_none() && child.queue_for_block() && !parent.pass_block());
    [first, second].into_iter().for_each(|block| child.free_block(block));
    assert!(!child.lacks_block() && budget.consume_block_notification());
}
