//! Records of copies, and restores: a fenced host cannot change a record, and only one host
//! restores a segment.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use aquifer_arena::copies::{CopyRecord, CopyTree, FORMER_MAX, FormerRoot, WordPair};
use aquifer_segments::host::{SegmentError, SegmentHost, SegmentKey};
use support::{Records, TestKeeper, name, open};

const TENANT: u32 = 1000;
const SEGMENT: SegmentKey = SegmentKey { tenant: TENANT, id: 5 };
const BYTES: u64 = 1 << 20;

struct Cluster {
    records: Records,
    keepers: Vec<Arc<TestKeeper>>,
}

impl Cluster {
    fn new() -> Self {
        Self { records: Records::new(), keepers: Vec::new() }
    }

    fn start(&mut self, host: u16) -> SegmentHost {
        let keeper = Arc::<TestKeeper>::default();
        let started = self.records.start(host, 2 * BYTES, &keeper);
        open(&started, TENANT);
        self.keepers.push(keeper);
        started
    }
}

fn record(revision: u64, version: u64) -> CopyRecord {
    let roots = [WordPair([1, 2]), WordPair([3, 4])];
    let trees = vec![CopyTree { node: 1, roots, current: 0, sum: WordPair([5, 6]) }];
    CopyRecord { revision, bytes: BYTES, version, synced_at_s: 7, trees, former: Vec::new() }
}

fn restore(host: &SegmentHost) -> Result<u64, SegmentError> {
    let restoring = host.begin_restore(SEGMENT, &name(host))?;
    restoring.data.write(0, &[9; 100]);
    let arrival = host.finish_restore(SEGMENT, &name(host))?;
    let mut bytes = [0; 101];
    arrival.data.read(0, &mut bytes);
    assert!(bytes[..100] == [9; 100] && bytes[100] == 0 && !arrival.is_partial);
    assert_eq!((arrival.address, arrival.data.len() as u64), (restoring.address, BYTES));
    Ok(arrival.address)
}

#[test]
fn a_segment_with_copies_outlives_its_host() {
    let mut cluster = Cluster::new();
    let (first, second) = (cluster.start(1), cluster.start(2));
    let address = first.allocate(SEGMENT, BYTES, &name(&first)).unwrap().address;
    assert!(matches!(second.copies(SEGMENT), Err(SegmentError::NotOwned(_))));
    assert!(first.copies(SEGMENT).unwrap().record.is_none());
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    // A retry of the same change succeeds; another change from an outdated revision fails.
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    let changed = first.set_copies(SEGMENT, 0, Some(&record(1, 2)));
    assert!(matches!(changed, Err(SegmentError::CopiesChanged(_))));
    first.set_copies(SEGMENT, 1, Some(&record(2, 2))).unwrap();
    let refused = second.set_copies(SEGMENT, 2, Some(&record(3, 3)));
    assert!(matches!(refused, Err(SegmentError::NotOwned(_))));
    assert!(matches!(restore(&second), Err(SegmentError::Exists(_))));

    cluster.records.end_life(1);
    // The first host is fenced, but still runs.
    let fenced = first.set_copies(SEGMENT, 2, Some(&record(3, 3)));
    assert!(matches!(fenced, Err(SegmentError::NotOwned(_))));
    // The number and the addresses of the segment are not free.
    let exists = second.allocate(SEGMENT, BYTES, &name(&second));
    assert!(matches!(exists, Err(SegmentError::HasCopies(_))));
    let other = second.allocate(SegmentKey { id: 6, ..SEGMENT }, BYTES, &name(&second)).unwrap();
    assert!(other.address.abs_diff(address) >= BYTES);
    assert_eq!(restore(&second).unwrap(), address);
    assert_eq!(second.copies(SEGMENT).unwrap().record, Some(record(2, 2)));
    assert!(matches!(restore(&second), Err(SegmentError::Exists(_))));
    second.set_copies(SEGMENT, 2, Some(&record(3, 3))).unwrap();
    let short = CopyRecord { bytes: BYTES / 2, ..record(4, 4) };
    assert!(matches!(second.set_copies(SEGMENT, 3, Some(&short)), Err(SegmentError::NotOwned(_))));
    // The segment is released, and restored by the same host.
    second.give_up(SEGMENT).unwrap();
    assert_eq!(restore(&second).unwrap(), address);
    // Without copies, the number and the addresses are free.
    second.set_copies(SEGMENT, 3, None).unwrap();
    second.deallocate(SEGMENT).unwrap();
    assert_eq!(second.allocate(SEGMENT, BYTES, &name(&second)).unwrap().address, address);
}

#[test]
fn one_of_several_hosts_restores_a_segment() {
    let mut cluster = Cluster::new();
    let (first, second, third) = (cluster.start(1), cluster.start(2), cluster.start(3));
    first.allocate(SEGMENT, BYTES, &name(&first)).unwrap();
    let none = || second.begin_restore(SEGMENT, &name(&second));
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    assert!(matches!(none(), Err(SegmentError::Exists(_))));
    cluster.records.end_life(1);
    second.begin_restore(SEGMENT, &name(&second)).unwrap();
    // A second attempt of the same process replaces the first one; another process waits for it.
    second.open_process(TENANT, "other", None, &[]).unwrap();
    assert!(matches!(second.begin_restore(SEGMENT, "other"), Err(SegmentError::Exists(_))));
    assert!(matches!(second.finish_restore(SEGMENT, "other"), Err(SegmentError::NotRestoring(_))));
    second.begin_restore(SEGMENT, &name(&second)).unwrap();
    assert_eq!(cluster.keepers[1].len(), 1);
    // The memory of the restore is charged.
    let full = second.allocate(SegmentKey { id: 6, ..SEGMENT }, 2 * BYTES, &name(&second));
    assert!(matches!(full, Err(SegmentError::Limit { .. })));
    third.begin_restore(SEGMENT, &name(&third)).unwrap();
    third.finish_restore(SEGMENT, &name(&third)).unwrap();
    let late = second.finish_restore(SEGMENT, &name(&second));
    assert!(matches!(late, Err(SegmentError::Exists(_))));
    assert_eq!(cluster.keepers[1].len(), 0, "its memory is freed");
    // The restores of a process that ends are aborted.
    cluster.records.end_life(3);
    second.begin_restore(SEGMENT, &name(&second)).unwrap();
    second.end_restores(TENANT, &name(&second));
    assert_eq!(cluster.keepers[1].len(), 0);
    // The copies have changed since they were read.
    second.begin_restore(SEGMENT, &name(&second)).unwrap();
    let freed = CopyRecord { trees: Vec::new(), ..record(2, 1) };
    second.set_copies(SEGMENT, 1, Some(&freed)).unwrap();
    let changed = second.finish_restore(SEGMENT, &name(&second));
    assert!(matches!(changed, Err(SegmentError::CopiesChanged(_))));
    assert!(matches!(restore(&second), Err(SegmentError::NoCopies(_))));
}

#[test]
fn a_segment_whose_host_dies_during_a_hand_over_can_be_restored() {
    let mut cluster = Cluster::new();
    let (first, second, third) = (cluster.start(1), cluster.start(2), cluster.start(3));
    let address = first.allocate(SEGMENT, BYTES, &name(&first)).unwrap().address;
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    first.connect(SEGMENT, &name(&second)).unwrap();
    cluster.records.end_life(1);
    // The second host could still receive the segment, so it is fenced first.
    assert_eq!(restore(&third).unwrap(), address);
    drop(first);
    // The target of the hand-over itself restores the segment.
    third.connect(SEGMENT, &name(&second)).unwrap();
    cluster.records.end_life(3);
    assert_eq!(restore(&second).unwrap(), address);
    // Without copies, the number can be used again at once.
    let fourth = cluster.start(4);
    second.set_copies(SEGMENT, 1, None).unwrap();
    second.connect(SEGMENT, &name(&fourth)).unwrap();
    cluster.records.end_life(2);
    assert_eq!(fourth.allocate(SEGMENT, BYTES, &name(&fourth)).unwrap().address, address);
}

#[test]
fn a_host_that_has_received_a_segment_keeps_it() {
    let mut cluster = Cluster::new();
    let (first, second, third) = (cluster.start(1), cluster.start(2), cluster.start(3));
    first.allocate(SEGMENT, BYTES, &name(&first)).unwrap();
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    first.connect(SEGMENT, &name(&second)).unwrap();
    first.transfer(SEGMENT).unwrap();
    cluster.records.end_life(1);
    assert!(matches!(restore(&third), Err(SegmentError::Exists(_))));
    assert!(second.owns(SEGMENT));
    // The new owner can change the record of the copies.
    second.set_copies(SEGMENT, 1, Some(&record(2, 2))).unwrap();
}

#[test]
fn copies_are_freed_when_no_host_has_the_segment() {
    let mut cluster = Cluster::new();
    let (first, second) = (cluster.start(1), cluster.start(2));
    let address = first.allocate(SEGMENT, BYTES, &name(&first)).unwrap().address;
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    cluster.records.end_life(1);
    let users = BTreeSet::from([TENANT]);
    let list = |above| second.list_copies(&users, above, 10).unwrap();
    let listed = list(None);
    assert_eq!((listed.len(), listed[0].version, listed[0].has_owner), (1, 1, false));
    assert!(list(Some((TENANT, 5))).is_empty());
    assert!(second.list_copies(&BTreeSet::from([TENANT + 1]), None, 10).unwrap().is_empty());
    let of = |node: u16| FormerRoot { node, root: WordPair([1, 2]), bytes: BYTES };
    let many = CopyRecord { former: vec![of(1); FORMER_MAX + 1], ..record(2, 1) };
    assert!(matches!(second.set_copies(SEGMENT, 1, Some(&many)), Err(SegmentError::CopyRecord(_))));
    // A host that is not the owner can only free recorded copies, and cannot create a record.
    let other = SegmentKey { id: 6, ..SEGMENT };
    let freed = CopyRecord { trees: Vec::new(), former: vec![of(1)], ..record(2, 1) };
    let made_up = CopyRecord { former: vec![of(2)], ..freed.clone() };
    let not_owned = [
        second.set_copies(SEGMENT, 1, Some(&record(2, 2))),
        second.set_copies(SEGMENT, 1, Some(&made_up)),
        second.set_copies(other, 0, Some(&record(1, 1))),
    ];
    assert!(not_owned.iter().all(|refused| matches!(refused, Err(SegmentError::NotOwned(_)))));
    second.set_copies(SEGMENT, 1, Some(&freed)).unwrap();
    assert_eq!((list(None)[0].nodes.len(), &list(None)[0].left_on[..]), (0, &[1][..]));
    assert!(matches!(restore(&second), Err(SegmentError::NoCopies(_))));
    // The roots that are left of the copies stay in the record, for the next owner to free.
    assert_eq!(second.allocate(SEGMENT, BYTES, &name(&second)).unwrap().address, address);
    assert_eq!(second.copies(SEGMENT).unwrap().record, Some(freed));
}

#[test]
fn a_segment_is_restored_after_its_agent_and_keeper_have_ended() {
    let mut cluster = Cluster::new();
    let first = cluster.start(1);
    let address = first.allocate(SEGMENT, BYTES, &name(&first)).unwrap().address;
    first.set_copies(SEGMENT, 0, Some(&record(1, 1))).unwrap();
    drop(first);
    // The keeper has ended, too.
    let again = cluster.records.start(1, 2 * BYTES, &Arc::default());
    open(&again, TENANT);
    assert!(!again.owns(SEGMENT));
    assert_eq!(restore(&again).unwrap(), address);
    // The agent and the keeper end during a hand-over, which the target may have received.
    let second = cluster.start(2);
    again.connect(SEGMENT, &name(&second)).unwrap();
    drop(again);
    let again = cluster.records.start(1, 2 * BYTES, &Arc::default());
    open(&again, TENANT);
    assert_eq!(restore(&again).unwrap(), address);
    again.connect(SEGMENT, &name(&second)).unwrap();
    again.transfer(SEGMENT).unwrap();
    drop(again);
    let again = cluster.records.start(1, 2 * BYTES, &Arc::default());
    open(&again, TENANT);
    assert!(matches!(restore(&again), Err(SegmentError::Exists(_))));
    assert!(second.owns(SEGMENT));
}
