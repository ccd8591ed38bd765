//! Tests of entries, transactions, leases, watches and limits, for every implementation.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use aquifer_directory::{
    Compare, Directory, DirectoryError, KeyOperation, Lease, LeaseId, LimitKind, Transaction,
    TransactionOutcome, Watch, WatchEvent, WatchEventKind, limits,
};

use super::harness::DirectoryHarness;
pub use super::numbers::*;

/// Timeout of each wait, which only a failing test reaches.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const TTL: Duration = Duration::from_secs(10);

fn event(watch: &mut dyn Watch) -> WatchEvent {
    watch.next(TEST_TIMEOUT).unwrap().expect("an event is due")
}

fn limit<T: std::fmt::Debug>(result: Result<T, DirectoryError>) -> LimitKind {
    match result {
        Err(DirectoryError::Limit { kind, .. }) => kind,
        other => panic!("a limit was expected, not {other:?}"),
    }
}

fn increment(directory: &dyn Directory, key: &str) -> u64 {
    loop {
        let entry = directory.get(key).unwrap();
        let (count, version) = entry.map_or((0, 0), |entry| {
            (u64::from_le_bytes(entry.value.as_slice().try_into().unwrap()), entry.version)
        });
        let transaction = Transaction {
            compares: vec![Compare::version(key, version)],
            operations: vec![KeyOperation::put(key, (count + 1).to_le_bytes(), None)],
        };
        if directory.transaction(&transaction).unwrap().is_committed() {
            return count + 1;
        }
    }
}

pub fn put_get_delete(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    assert_eq!(directory.get("a/b").unwrap(), None);
    let revision = directory.put("a/b", b"\0value\xff", None).unwrap();
    let entry = directory.get("a/b").unwrap().unwrap();
    assert_eq!((entry.value.as_slice(), entry.version, entry.lease), (&b"\0value\xff"[..], revision, None));
    assert_eq!(directory.delete("a/b").unwrap(), revision + 1);
    assert_eq!(directory.get("a/b").unwrap(), None);
    assert_eq!(directory.delete("a/b").unwrap(), revision + 1, "deleting an absent key changes nothing");
}

pub fn list_is_ordered_and_by_prefix(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    for key in ["b/2", "b/10", "b", "c/1", "a/1", "b/é"] {
        directory.put(key, key.as_bytes(), None).unwrap();
    }
    let keys = |prefix| -> Vec<String> {
        directory.list(prefix).unwrap().entries.into_iter().map(|entry| entry.key).collect()
    };
    assert_eq!(keys("b/"), ["b/10", "b/2", "b/é"]);
    assert_eq!(keys("b"), ["b", "b/10", "b/2", "b/é"]);
    assert_eq!(keys("").len(), 6);
    assert!(keys("d").is_empty());
}

pub fn versions_are_revisions(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let first = directory.put("a", b"", None).unwrap();
    let second = directory.put("b", b"", None).unwrap();
    let third = directory.put("a", b"", None).unwrap();
    assert_eq!([second, third], [first + 1, first + 2]);
    assert_eq!(directory.get("a").unwrap().unwrap().version, third);
    assert_eq!(directory.get("b").unwrap().unwrap().version, second);
    assert_eq!(directory.list("").unwrap().revision, third);
}

pub fn a_transaction_is_all_or_nothing(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let version = directory.put("a", b"1", None).unwrap();
    let mut transaction = Transaction {
        compares: vec![Compare::version("a", version), Compare::absent("b")],
        operations: vec![
            KeyOperation::put("b", "2", None),
            KeyOperation::delete("a"),
            KeyOperation::put("c", "3", None),
        ],
    };
    let TransactionOutcome::Committed { revision } = directory.transaction(&transaction).unwrap() else {
        panic!("both compares hold");
    };
    assert_eq!(directory.get("a").unwrap(), None);
    for key in ["b", "c"] {
        assert_eq!(directory.get(key).unwrap().unwrap().version, revision, "all changes have one revision");
    }
    let conflict = TransactionOutcome::Conflict { key: "a".to_owned(), version: 0 };
    assert_eq!(directory.transaction(&transaction).unwrap(), conflict);

    transaction.compares = vec![Compare::absent("b")];
    transaction.operations = vec![KeyOperation::put("d", "4", None)];
    let conflict = TransactionOutcome::Conflict { key: "b".to_owned(), version: revision };
    assert_eq!(directory.transaction(&transaction).unwrap(), conflict);
    assert_eq!(directory.get("d").unwrap(), None);

    transaction.compares.clear();
    transaction.operations.push(KeyOperation::put("e", "5", Some(LeaseId(999))));
    assert_eq!(directory.transaction(&transaction), Err(DirectoryError::LeaseGone(LeaseId(999))));
    assert_eq!(directory.get("d").unwrap(), None, "an error undoes the rest");
    assert_eq!(directory.list("").unwrap().revision, revision);
}

pub fn a_transaction_may_not_change_a_key_twice(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let operations = vec![KeyOperation::put("a", "1", None), KeyOperation::delete("a")];
    let refused = directory.transaction(&Transaction { compares: Vec::new(), operations });
    assert_eq!(refused, Err(DirectoryError::ChangedTwice { key: "a".to_owned() }));
}

pub fn contended_increments_are_all_counted(harness: &dyn DirectoryHarness) {
    const THREADS: u64 = 4;
    const EACH: u64 = 25;
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let directory = harness.directory();
            scope.spawn(move || {
                for _ in 0..EACH {
                    increment(&*directory, "count");
                }
            });
        }
    });
    assert_eq!(increment(&*harness.directory(), "count"), THREADS * EACH + 1);
}

pub fn one_of_many_wins_an_absent_key(harness: &dyn DirectoryHarness) {
    const THREADS: usize = 6;
    let start = Arc::new(Barrier::new(THREADS));
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let (directory, start) = (harness.directory(), Arc::clone(&start));
            std::thread::spawn(move || {
                start.wait();
                let transaction = Transaction {
                    compares: vec![Compare::absent("leader")],
                    operations: vec![KeyOperation::put("leader", number.to_string(), None)],
                };
                directory.transaction(&transaction).unwrap().is_committed()
            })
        })
        .collect();
    let won: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(won.iter().filter(|won| **won).count(), 1);
    let winner = won.iter().position(|won| *won).unwrap().to_string();
    assert_eq!(harness.directory().get("leader").unwrap().unwrap().value, winner.as_bytes());
}

pub fn keys_are_deleted_with_their_lease(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let short = directory.lease_grant(TTL).unwrap();
    let long = directory.lease_grant(TTL * 2).unwrap();
    directory.put("short/1", b"", Some(short.id)).unwrap();
    directory.put("short/2", b"", Some(short.id)).unwrap();
    directory.put("long", b"", Some(long.id)).unwrap();
    directory.put("free", b"", None).unwrap();
    assert_eq!(directory.get("long").unwrap().unwrap().lease, Some(long.id));
    harness.advance(TTL - Duration::from_millis(1));
    assert_eq!(directory.list("short/").unwrap().entries.len(), 2);
    harness.advance(Duration::from_millis(1));
    assert!(directory.list("short/").unwrap().entries.is_empty());
    assert!(directory.get("long").unwrap().is_some());
    harness.advance(TTL);
    assert!(directory.get("long").unwrap().is_none());
    assert!(directory.get("free").unwrap().is_some());
}

pub fn a_lease_lasts_while_it_is_kept_alive(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = directory.lease_grant(TTL).unwrap();
    for _ in 0..5 {
        harness.advance(TTL - Duration::from_millis(1));
        directory.lease_keep_alive(lease.id).unwrap();
    }
    harness.advance(TTL);
    assert_eq!(directory.lease_keep_alive(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
}

pub fn a_revoked_lease_is_gone(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = directory.lease_grant(TTL).unwrap();
    directory.put("k", b"", Some(lease.id)).unwrap();
    directory.lease_revoke(lease.id).unwrap();
    assert_eq!(directory.get("k").unwrap(), None);
    assert_eq!(directory.lease_revoke(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
    assert_eq!(directory.lease_keep_alive(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
}

pub fn no_key_is_attached_to_an_ended_lease(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = directory.lease_grant(TTL).unwrap();
    harness.advance(TTL);
    assert_eq!(directory.put("late", b"", Some(lease.id)), Err(DirectoryError::LeaseGone(lease.id)));
    assert_eq!(directory.get("late").unwrap(), None);
}

pub fn epochs_increase(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let mut last = 0;
    for round in 0..20 {
        let Lease { id, epoch } = directory.lease_grant(TTL).unwrap();
        assert!(epoch > last, "{epoch} comes after {last}");
        last = epoch;
        if round % 2 == 0 {
            directory.lease_revoke(id).unwrap();
        }
    }
}

pub fn ttl_limits(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let tick = Duration::from_millis(1);
    assert_eq!(limit(directory.lease_grant(limits::TTL_MIN - tick)), LimitKind::TtlMin);
    directory.lease_grant(limits::TTL_MIN).unwrap();
    directory.lease_grant(limits::TTL_MAX).unwrap();
    assert_eq!(limit(directory.lease_grant(limits::TTL_MAX + tick)), LimitKind::TtlMax);
    assert_eq!(limit(directory.lease_grant(Duration::MAX)), LimitKind::TtlMax);
}

pub fn a_watch_reports_all_changes_in_order(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    directory.put("w/before", b"", None).unwrap();
    let mut watch = directory.watch("w/", 0).unwrap();
    let first = directory.put("w/1", b"one", None).unwrap();
    directory.put("other", b"", None).unwrap();
    directory.delete("w/1").unwrap();
    let operations = vec![KeyOperation::put("w/2", "two", None), KeyOperation::put("w/3", "three", None)];
    directory.transaction(&Transaction { compares: Vec::new(), operations }).unwrap();

    let put = |value: &str| WatchEventKind::Put { value: value.as_bytes().to_vec(), lease: None };
    let expected = [
        (first, "w/1", put("one")),
        (first + 2, "w/1", WatchEventKind::Delete),
        (first + 3, "w/2", put("two")),
        (first + 3, "w/3", put("three")),
    ];
    for (revision, key, kind) in expected {
        assert_eq!(event(&mut *watch), WatchEvent { revision, key: key.to_owned(), kind });
    }
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
}

pub fn a_watch_reports_the_end_of_a_lease(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = directory.lease_grant(TTL).unwrap();
    let mut watch = directory.watch("agents/", 0).unwrap();
    directory.put("agents/1", b"", Some(lease.id)).unwrap();
    assert_eq!(event(&mut *watch).kind, WatchEventKind::Put { value: Vec::new(), lease: Some(lease.id) });
    harness.advance(TTL);
    let ended = event(&mut *watch);
    assert_eq!((ended.key.as_str(), ended.kind), ("agents/1", WatchEventKind::Delete));
}

pub fn a_watch_continues_from_a_revision(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let revisions: Vec<_> =
        (0..10).map(|number| directory.put(&format!("w/{number}"), b"", None).unwrap()).collect();
    let mut seen = Vec::new();
    let mut from = revisions[0];
    // Each watch is dropped after three events, and the next one continues.
    while seen.len() < revisions.len() {
        let mut watch = directory.watch("w/", from).unwrap();
        for _ in 0..3.min(revisions.len() - seen.len()) {
            seen.push(event(&mut *watch).revision);
        }
        from = seen[seen.len() - 1] + 1;
    }
    assert_eq!(seen, revisions);
}

pub fn a_listing_and_a_watch_leave_no_gap(harness: &dyn DirectoryHarness) {
    const CHANGES: u64 = 60;
    let directory = harness.directory();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let writer = &*directory;
            for _ in 0..CHANGES {
                increment(writer, "n/count");
            }
        });
        let reader = &*directory;
        let listing = reader.list("n/").unwrap();
        let count = |value: &[u8]| u64::from_le_bytes(value.try_into().unwrap());
        let mut last = listing.entries.first().map_or(0, |entry| count(&entry.value));
        let mut watch = reader.watch("n/", listing.revision + 1).unwrap();
        while last < CHANGES {
            let Some(WatchEvent { kind: WatchEventKind::Put { value, .. }, .. }) =
                watch.next(TEST_TIMEOUT).unwrap()
            else {
                // A simulated watch does not wait.
                std::thread::yield_now();
                continue;
            };
            assert_eq!(count(&value), last + 1);
            last += 1;
        }
    });
}

pub fn a_watch_reports_changes_of_threads_completely_and_in_order(harness: &dyn DirectoryHarness) {
    const THREADS: u64 = 3;
    const EACH: u64 = 20;
    let directory = harness.directory();
    let mut watch = directory.watch("t/", 0).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let directory = harness.directory();
            scope.spawn(move || {
                for number in 0..EACH {
                    directory.put(&format!("t/{thread}"), &number.to_le_bytes(), None).unwrap();
                }
            });
        }
    });
    let mut last = 0;
    let mut next = vec![0; usize::try_from(THREADS).unwrap()];
    for _ in 0..THREADS * EACH {
        let event = event(&mut *watch);
        assert!(event.revision > last);
        last = event.revision;
        let thread: usize = event.key["t/".len()..].parse().unwrap();
        let WatchEventKind::Put { value, .. } = event.kind else { panic!("nothing was deleted") };
        assert_eq!(u64::from_le_bytes(value.try_into().unwrap()), next[thread]);
        next[thread] += 1;
    }
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
}

pub fn a_watch_that_is_too_old_is_refused(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let first = directory.put("0", b"", None).unwrap();
    let mut slow = directory.watch("", first).unwrap();
    // The history holds 256 values of 64 KiB, and a transaction 7.
    let value = vec![0; limits::VALUE_BYTES_MAX];
    for _ in 0..40 {
        let operations =
            (0..7).map(|number| KeyOperation::put(format!("{number}"), value.clone(), None)).collect();
        assert!(
            directory.transaction(&Transaction { compares: Vec::new(), operations }).unwrap().is_committed()
        );
    }
    let end = first + 40;
    harness.compact(end - 4);
    let Err(DirectoryError::Compacted { asked, oldest }) = directory.watch("", first) else {
        panic!("the revision is compacted");
    };
    assert_eq!(asked, first);
    assert_eq!(directory.watch("", oldest).unwrap().next(TEST_TIMEOUT).unwrap().unwrap().revision, oldest);

    // The first watch reports all changes in order, or fails: it never has a gap.
    let mut last = first;
    loop {
        match slow.next(TEST_TIMEOUT) {
            Ok(Some(event)) => {
                assert!(event.revision == last || event.revision == last + 1, "{last} → {}", event.revision);
                last = event.revision;
                if last == end {
                    break;
                }
            }
            Ok(None) => panic!("events are due"),
            Err(DirectoryError::Compacted { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
}

/// A watch does not begin at the last compacted revision: a deletion at that revision is not known.
pub fn a_watch_begins_after_compacted_revisions(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    directory.put("k", b"", None).unwrap();
    let deleted = directory.delete("k").unwrap();
    let last = directory.put("other", b"", None).unwrap();
    harness.compact(deleted);
    match directory.watch("", deleted) {
        Ok(mut watch) => assert_eq!(event(&mut *watch).kind, WatchEventKind::Delete),
        Err(error) => assert_eq!(error, DirectoryError::Compacted { asked: deleted, oldest: last }),
    }
    assert_eq!(event(&mut *directory.watch("", last).unwrap()).key, "other");
}

/// The error names the lease that has ended, of several in a transaction.
pub fn an_ended_lease_is_named(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let [living, gone] = [(); 2].map(|()| directory.lease_grant(TTL).unwrap().id);
    directory.lease_revoke(gone).unwrap();
    for id in [gone, LeaseId(0), LeaseId(u64::MAX)] {
        let operations = vec![KeyOperation::put("a", "", Some(living)), KeyOperation::put("b", "", Some(id))];
        let refused = directory.transaction(&Transaction { compares: Vec::new(), operations });
        assert_eq!(refused, Err(DirectoryError::LeaseGone(id)));
        assert_eq!(directory.lease_keep_alive(id), Err(DirectoryError::LeaseGone(id)));
        assert_eq!(directory.lease_revoke(id), Err(DirectoryError::LeaseGone(id)));
    }
    assert_eq!(directory.get("a").unwrap(), None);
    // Compares are checked before leases.
    let operations = vec![KeyOperation::put("b", "", Some(gone))];
    let compares = vec![Compare::version("b", 7)];
    let outcome = directory.transaction(&Transaction { compares, operations }).unwrap();
    assert_eq!(outcome, TransactionOutcome::Conflict { key: "b".to_owned(), version: 0 });
}

/// A listing of several pages has one revision, although keys change meanwhile.
pub fn a_long_listing_has_one_revision(harness: &dyn DirectoryHarness) {
    const KEYS: usize = 600;
    let directory = harness.directory();
    let write = |value: u32| {
        for chunk in (0..KEYS).collect::<Vec<_>>().chunks(limits::TRANSACTION_PARTS_MAX) {
            let put = |number: &usize| KeyOperation::put(format!("n/{number}"), value.to_string(), None);
            let operations = chunk.iter().map(put).collect();
            directory.transaction(&Transaction { compares: Vec::new(), operations }).unwrap();
        }
    };
    write(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| (1..20).for_each(write));
        while !writer.is_finished() {
            let listing = directory.list("n/").unwrap();
            assert_eq!(listing.entries.len(), KEYS);
            assert!(listing.entries.iter().all(|entry| entry.version <= listing.revision));
            // Keys of one transaction have one value.
            let value = |number: usize| {
                let key = format!("n/{number}");
                listing.entries.iter().find(|entry| entry.key == key).unwrap().value.clone()
            };
            for first in (0..KEYS).step_by(limits::TRANSACTION_PARTS_MAX) {
                let last = (first + limits::TRANSACTION_PARTS_MAX).min(KEYS) - 1;
                assert_eq!(value(first), value(last), "keys {first} to {last}");
            }
        }
    });
}

pub fn key_limits(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let longest = "k".repeat(limits::KEY_BYTES_MAX);
    directory.put(&longest, b"", None).unwrap();
    assert_eq!(directory.list(&longest).unwrap().entries.len(), 1);
    let over = longest + "k";
    assert_eq!(limit(directory.put(&over, b"", None)), LimitKind::KeyBytes);
    assert_eq!(limit(directory.get(&over)), LimitKind::KeyBytes);
    assert_eq!(limit(directory.list(&over)), LimitKind::KeyBytes);
    assert_eq!(limit(directory.watch(&over, 0)), LimitKind::KeyBytes);
    let compares = vec![Compare::absent(over)];
    assert_eq!(
        limit(directory.transaction(&Transaction { compares, operations: Vec::new() })),
        LimitKind::KeyBytes
    );
    for bad in ["", "a\0b", "a\nb"] {
        assert!(matches!(directory.get(bad), Err(DirectoryError::InvalidKey { .. })), "{bad:?}");
        assert!(matches!(directory.put(bad, b"", None), Err(DirectoryError::InvalidKey { .. })), "{bad:?}");
    }
}

pub fn value_limits(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let longest = vec![7; limits::VALUE_BYTES_MAX];
    directory.put("k", &longest, None).unwrap();
    assert_eq!(directory.get("k").unwrap().unwrap().value, longest);
    assert_eq!(limit(directory.put("k", &[longest, vec![7]].concat(), None)), LimitKind::ValueBytes);
    directory.put("k", b"", None).unwrap();
    assert!(directory.get("k").unwrap().unwrap().value.is_empty());
}

pub fn list_limits(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let fill = |range: std::ops::Range<usize>| {
        let keys: Vec<_> = range.collect();
        for chunk in keys.chunks(limits::TRANSACTION_PARTS_MAX) {
            let operations =
                chunk.iter().map(|number| KeyOperation::put(format!("n/{number}"), "", None)).collect();
            assert!(
                directory
                    .transaction(&Transaction { compares: Vec::new(), operations })
                    .unwrap()
                    .is_committed()
            );
        }
    };
    fill(0..limits::LIST_ENTRIES_MAX);
    assert_eq!(directory.list("n/").unwrap().entries.len(), limits::LIST_ENTRIES_MAX);
    fill(limits::LIST_ENTRIES_MAX..limits::LIST_ENTRIES_MAX + 1);
    assert_eq!(limit(directory.list("n/")), LimitKind::ListEntries);
    assert!(directory.list("n/1").is_ok(), "a narrower prefix is listed");

    let count = limits::LIST_BYTES_MAX / limits::VALUE_BYTES_MAX;
    for number in 10..10 + count {
        directory.put(&format!("b/{number}"), &vec![0; limits::VALUE_BYTES_MAX - 4], None).unwrap();
    }
    assert_eq!(directory.list("b/").unwrap().entries.len(), count);
    directory.put("b/10", &vec![0; limits::VALUE_BYTES_MAX - 3], None).unwrap();
    assert_eq!(limit(directory.list("b/")), LimitKind::ListBytes);
}

pub fn transaction_limits(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let parts = |count: usize| Transaction {
        compares: vec![Compare::absent("absent")],
        operations: (1..count).map(|number| KeyOperation::put(format!("{number}"), "", None)).collect(),
    };
    assert!(directory.transaction(&parts(limits::TRANSACTION_PARTS_MAX)).unwrap().is_committed());
    assert_eq!(
        limit(directory.transaction(&parts(limits::TRANSACTION_PARTS_MAX + 1))),
        LimitKind::TransactionParts
    );

    let each = limits::TRANSACTION_BYTES_MAX / 16;
    let mut bytes = Transaction {
        compares: Vec::new(),
        operations: (10..26)
            .map(|number| KeyOperation::put(number.to_string(), vec![0; each - 2], None))
            .collect(),
    };
    assert!(directory.transaction(&bytes).unwrap().is_committed());
    bytes.operations.push(KeyOperation::delete("x"));
    assert_eq!(limit(directory.transaction(&bytes)), LimitKind::TransactionBytes);
}
