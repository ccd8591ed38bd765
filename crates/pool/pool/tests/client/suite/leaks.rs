//! Tests of leak scans.

use std::sync::{Arc, Mutex};

use aquifer_pool::op::Recovered;
use aquifer_pool::{Extent, LeakDetector, Ledger, PoolClient, ScanProgress};

use super::{NODE, bed, class};

/// Cancels a scan that must wait.
fn at_once(progress: ScanProgress) -> bool {
    progress == ScanProgress::NextPart
}

/// A ledger that a test fills.
#[derive(Debug, Default)]
struct TestLedger(Mutex<Vec<Extent>>);

impl Ledger for TestLedger {
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        self.0.lock().expect("no panic").iter().for_each(|extent| each(*extent));
    }
}

#[test]
fn a_leak_scan_frees_what_is_in_no_ledger() {
    let bed = bed(8);
    let mut before = bed.client(3);
    let allocate = |client: &mut PoolClient, k| client.allocate(NODE, class(k)).expect("room");
    let kept: Vec<Extent> = [0, 2, 5, 6, 9].map(|k| allocate(&mut before, k)).into();
    let leaked: Vec<Extent> = [0, 0, 2, 4, 5, 6, 8, 9].map(|k| allocate(&mut before, k)).into();
    let mut other = bed.client(4);
    let foreign: Vec<Extent> = [0, 3, 5, 9].map(|k| allocate(&mut other, k)).into();
    drop(before);
    let leak_detector = Arc::new(LeakDetector::default());
    let ledger = Arc::new(TestLedger(Mutex::new(kept.clone())));
    leak_detector.register_ledger(&ledger);
    let mut after = bed.client_in(3, &leak_detector);
    let freed =
        leak_detector.scan(&mut after, NODE, at_once).expect("the node lives").expect("no operation runs");
    assert_eq!((freed.extents, freed.spans), (leaked.len() as u64, 0));
    for extent in &leaked {
        assert!(after.free(*extent).is_err(), "{extent:?} was freed");
    }
    let again = leak_detector.scan(&mut after, NODE, at_once).expect("the node lives");
    assert_eq!(again, Some(Recovered::default()), "there is no more");
    for extent in kept {
        after.free(extent).expect("the scan has kept the extent");
    }
    for extent in foreign {
        other.free(extent).expect("the extent is another host's");
    }
    after.refresh(NODE).expect("the node lives");
    assert_eq!(after.free_bytes(NODE), after.total_bytes(NODE));
}

#[test]
fn a_leak_scan_does_not_free_an_extent_that_is_being_allocated() {
    let bed = bed(2);
    let leak_detector = Arc::new(LeakDetector::default());
    let ledger = Arc::new(TestLedger::default());
    leak_detector.register_ledger(&ledger);
    let (mut allocator, mut scanner) = (bed.client_in(3, &leak_detector), bed.client_in(3, &leak_detector));
    let operation = allocator.begin_operation();
    let extent = allocator.allocate(NODE, class(1)).expect("room");
    assert_eq!(
        leak_detector.scan(&mut scanner, NODE, at_once).expect("the node lives"),
        None,
        "the scan must wait"
    );
    assert_eq!(
        leak_detector.scan(&mut scanner, NODE, at_once).expect("the node lives"),
        None,
        "the next scan has to wait, too"
    );
    let mut operation = Some(operation);
    let freed = leak_detector.scan(&mut scanner, NODE, |progress| {
        if progress == ScanProgress::NextPart {
            return true;
        }
        ledger.0.lock().expect("no panic").push(extent);
        operation = None;
        true
    });
    assert_eq!(freed.expect("the node lives"), Some(Recovered::default()));
    allocator.free(extent).expect("the extent is recorded");
}

#[test]
fn a_node_is_suspect_when_something_may_be_leaked_there() {
    let bed = bed(2);
    let leak_detector = Arc::new(LeakDetector::default());
    let mut client = bed.client_in(3, &leak_detector);
    let extent = client.allocate(NODE, class(1)).expect("room");
    client.free(extent).expect("the extent is this host's");
    client.free(extent).expect_err("the extent was freed");
    assert!(!leak_detector.has_suspects());
    let extent = client.allocate(NODE, class(1)).expect("room");
    client.remove_node(NODE).expect("the node was in use");
    client.free(extent).expect_err("the node was removed");
    assert_eq!(leak_detector.pop_suspects().into_iter().collect::<Vec<_>>(), [NODE]);
    assert!(!leak_detector.has_suspects());
    client.add_node(NODE, bed.endpoint(3)).expect("a good node");
    let freed =
        leak_detector.scan(&mut client, NODE, at_once).expect("the node lives").expect("no operation runs");
    assert_eq!((freed.extents, freed.chunks), (1, 2));
}
