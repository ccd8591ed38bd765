//! Tests of slab records: replicas, references, and notifications of the sender.

use aquifer_fabric::RemoteAddr;

use super::*;

fn extent(node: u16) -> Extent {
    let addr = 0x20_0000 * u64::from(node);
    Extent { node: NodeId(node), addr, class: SizeClass::new(5).unwrap(), key: Key(77) }
}

fn nodes(slabs: &SlabSet, slab: SlabId) -> Vec<u16> {
    slabs.replicas(slab).iter().map(|replica| replica.node.0).collect()
}

#[test]
fn a_slab_is_emptied_by_the_release_of_its_last_page() {
    let slabs = SlabSet::new().unwrap();
    let slab = SlabId(3);
    slabs.publish(slab, &[extent(2)], None);
    let location = Location::new(slab, 31);
    slabs.occupy(location, 0xabcd);
    slabs.retain(location);
    assert_eq!(slabs.crc(location), 0xabcd);
    let replica = slabs.replicas(slab).iter().next().unwrap();
    assert_eq!(replica, extent(2));
    assert_eq!(page_of(&replica, 31), RemoteAddr { addr: 0x40_0000 + 31 * 4096, key: Key(77) });
    slabs.release(location);
    assert!(!slabs.has_emptied_slabs(), "the other volume still references the page");
    slabs.release(location);
    assert_eq!(slabs.drain_emptied(), vec![slab]);
    slabs.remove_slab(slab);
    assert!(slabs.replicas(slab).is_empty());
    assert_eq!(slabs.bytes(), (0, 128 << 10));
}

#[test]
fn the_sender_is_woken_once_for_many_emptied_slabs() {
    let slabs = SlabSet::new().unwrap();
    let count = u32::try_from(EMPTIED_WAKE_COUNT).unwrap();
    for round in 0..2 {
        for slab in (0..count).map(SlabId) {
            assert!(!slabs.consume_emptied_notification(), "round {round}, {slab:?}");
            slabs.publish(slab, &[extent(2)], None);
            slabs.occupy(Location::new(slab, 0), 0);
            slabs.release(Location::new(slab, 0));
        }
        assert!(slabs.consume_emptied_notification() && !slabs.consume_emptied_notification());
        assert_eq!(slabs.drain_emptied().len(), EMPTIED_WAKE_COUNT);
        (0..count).map(SlabId).for_each(|slab| slabs.remove_slab(slab));
    }
}

#[test]
fn all_replicas_but_the_last_can_be_dropped() {
    let slabs = SlabSet::with_replicas(3).unwrap();
    let slab = SlabId(0);
    slabs.publish(slab, &[extent(1), extent(2), extent(3)], None);
    assert_eq!(slabs.bytes().0, 3 * (128 << 10));
    assert!(!slabs.drop_replica(slab, NodeId(9)), "the slab has no replica there");
    assert!(slabs.drop_replica(slab, NodeId(1)));
    assert!(slabs.drop_replica(slab, NodeId(3)));
    assert!(!slabs.drop_replica(slab, NodeId(2)));
    assert_eq!(nodes(&slabs, slab), [2]);
    slabs.add_replica(slab, extent(7), NodeClass::Memory);
    assert_eq!(nodes(&slabs, slab), [7, 2]);
    assert_eq!(slabs.replicas(slab).at(0), Some(extent(7)));
    assert_eq!(slabs.bytes().0, 2 * (128 << 10));
}

#[test]
fn an_unfinished_replica_is_no_replica_yet() {
    let slabs = SlabSet::with_replicas(3).unwrap();
    let slab = SlabId(0);
    slabs.publish(slab, &[extent(1)], None);
    let place = slabs.begin_replica(slab, extent(2), NodeClass::Memory);
    assert_eq!(nodes(&slabs, slab), [1]);
    assert_eq!(slabs.unfinished_replica(slab), Some((place, extent(2))));
    slabs.clear(slab, place);
    assert_eq!(slabs.unfinished_replica(slab), None);
    assert_eq!(slabs.begin_replica(slab, extent(3), NodeClass::Memory), place);
    slabs.finish_replica(slab, place);
    assert_eq!(nodes(&slabs, slab), [1, 3]);
    assert_eq!(slabs.unfinished_replica(slab), None, "the replica is complete");
    assert_eq!(slabs.bytes().0, 2 * (128 << 10));
    slabs.begin_free(slab, place, 5);
    assert_eq!(nodes(&slabs, slab), [1]);
    assert_eq!(slabs.bytes().0, 128 << 10);
    assert_eq!(
        slabs.unfinished_replicas().collect::<Vec<_>>(),
        [UnfinishedReplica { slab, place, extent: extent(3), inline_log: 5 }]
    );
    slabs.clear(slab, place);
    assert_eq!(slabs.unfinished_replicas().count(), 0);
}

#[test]
fn readers_never_see_an_old_address_with_a_new_node() {
    let slabs = SlabSet::with_replicas(2).unwrap();
    let slab = SlabId(5);
    slabs.publish(slab, &[extent(1), extent(2)], None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..20_000u16 {
                let old = slabs.replicas(slab).at(1).unwrap().node;
                assert!(slabs.drop_replica(slab, old));
                slabs.add_replica(slab, extent(2 + round % 7), NodeClass::Memory);
            }
        });
        for _ in 0..20_000 {
            for replica in slabs.replicas(slab).iter() {
                assert_eq!(replica, extent(replica.node.0));
            }
        }
    });
}

#[test]
fn readers_always_see_a_replica_of_a_slab_that_is_moved() {
    let slabs = SlabSet::new().unwrap();
    let slab = SlabId(5);
    slabs.publish(slab, &[extent(1)], None);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..20_000u16 {
                let old = slabs.replicas(slab).iter().next().unwrap();
                slabs.add_replica(slab, extent(1 + (old.node.0 + round % 5) % 7), NodeClass::Memory);
                let (place, _) = slabs.replicas(slab).placed().find(|(_, replica)| *replica == old).unwrap();
                slabs.begin_free(slab, place, 1);
                slabs.clear(slab, place);
                slabs.leave_spare_place(slab);
            }
            is_done.store(true, Relaxed);
        });
        while !is_done.load(Relaxed) {
            let replicas = slabs.replicas(slab);
            assert!(!replicas.is_empty());
            replicas.iter().for_each(|replica| assert_eq!(replica, extent(replica.node.0)));
        }
    });
    assert_eq!(slabs.replicas(slab).placed().map(|(place, _)| place).collect::<Vec<_>>(), [0]);
    assert_eq!(slabs.bytes().0, 128 << 10);
}

#[test]
fn reports_of_damage_are_bounded_and_unique() {
    let slabs = SlabSet::with_replicas(2).unwrap();
    for _ in 0..2 {
        (0..5000).for_each(|index| slabs.report_damage(Location(index), NodeId(1)));
    }
    assert_eq!(std::iter::from_fn(|| slabs.pop_damaged()).count(), DAMAGED_MAX);
}

#[test]
fn a_slow_node_is_slow_until_it_answers() {
    let slabs = SlabSet::with_replicas(2).unwrap();
    slabs.set_slow(NodeId(3), true);
    assert!(slabs.is_slow(NodeId(3)) && !slabs.is_slow(NodeId(4)));
    slabs.set_slow(NodeId(3), false);
    assert!(!slabs.is_slow(NodeId(3)));
}

#[test]
#[should_panic(expected = "released more often")]
fn a_surplus_release_panics() {
    let slabs = SlabSet::new().unwrap();
    slabs.release(Location::new(SlabId(0), 0));
}
