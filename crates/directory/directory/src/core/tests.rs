use super::*;
use crate::model::Compare;

fn commit(core: &mut Core, operations: Vec<KeyOperation>) -> Result<TransactionOutcome, DirectoryError> {
    let (outcome, delta) = core.plan_transaction(&Transaction { compares: Vec::new(), operations })?;
    if let Some(delta) = delta {
        core.apply(&delta, 0);
    }
    Ok(outcome)
}

fn put(core: &mut Core, key: impl Into<String>, bytes: usize) -> Result<TransactionOutcome, DirectoryError> {
    commit(core, vec![KeyOperation::put(key, vec![7; bytes], None)])
}

fn grant(core: &mut Core, ttl_ms: u64, now_ms: u64) -> Result<Lease, DirectoryError> {
    let (lease, delta) = core.plan_grant(ttl_ms)?;
    core.apply(&delta, now_ms);
    Ok(lease)
}

fn limit<T: std::fmt::Debug>(result: Result<T, DirectoryError>) -> LimitKind {
    match result {
        Err(DirectoryError::Limit { kind, .. }) => kind,
        other => panic!("a limit was expected, not {other:?}"),
    }
}

#[test]
fn planning_changes_nothing() {
    let mut core = Core::new();
    put(&mut core, "a", 1).unwrap();
    let operations = vec![KeyOperation::put("a", "new", None), KeyOperation::put("b", "new", None)];
    core.plan_transaction(&Transaction { compares: Vec::new(), operations }).unwrap();
    core.plan_grant(1000).unwrap();
    assert_eq!(core.revision(), 1);
    assert_eq!(core.list("").unwrap().entries.len(), 1);
    assert_eq!(core.next_deadline_ms(), None);
}

#[test]
fn a_lease_ends_at_its_deadline_and_not_before() {
    let mut core = Core::new();
    let lease = grant(&mut core, 1000, 500).unwrap();
    commit(&mut core, vec![KeyOperation::put("k", "v", Some(lease.id))]).unwrap();
    assert_eq!(core.next_deadline_ms(), Some(1500));
    assert_eq!(core.plan_expiry(1499), None);
    core.keep_alive(lease.id, 1499).unwrap();
    assert_eq!(core.plan_expiry(2498), None);
    let delta = core.plan_expiry(2499).unwrap();
    core.apply(&delta, 2499);
    assert_eq!(core.get("k").unwrap(), None);
    assert_eq!(core.keep_alive(lease.id, 2499), Err(DirectoryError::LeaseGone(lease.id)));
    assert_eq!(core.plan_expiry(u64::MAX), None);
}

#[test]
fn a_key_is_deleted_only_with_its_present_lease() {
    let mut core = Core::new();
    let first = grant(&mut core, 1000, 0).unwrap();
    let second = grant(&mut core, 1000, 0).unwrap();
    commit(&mut core, vec![KeyOperation::put("moved", "", Some(first.id))]).unwrap();
    commit(&mut core, vec![KeyOperation::put("moved", "", Some(second.id))]).unwrap();
    commit(&mut core, vec![KeyOperation::put("freed", "", Some(first.id))]).unwrap();
    commit(&mut core, vec![KeyOperation::put("freed", "", None)]).unwrap();
    let delta = core.plan_end(first.id).unwrap();
    core.apply(&delta, 0);
    assert!(core.get("moved").unwrap().is_some());
    assert!(core.get("freed").unwrap().is_some());
    let delta = core.plan_end(second.id).unwrap();
    core.apply(&delta, 0);
    assert!(core.get("moved").unwrap().is_none());
}

#[test]
fn the_number_of_keys_is_bounded() {
    let mut core = Core::new();
    for number in 0..limits::KEYS_MAX {
        put(&mut core, format!("{number}"), 0).unwrap();
    }
    assert_eq!(limit(put(&mut core, "over", 0)), LimitKind::Keys);
    put(&mut core, "0", 1).expect("an existing key may change at the limit");
    commit(&mut core, vec![KeyOperation::delete("0"), KeyOperation::put("swapped", "", None)])
        .expect("one key replaces another");
}

#[test]
fn the_bytes_are_bounded() {
    let mut core = Core::new();
    let per_key = limits::VALUE_BYTES_MAX;
    // Each key of 8 bytes shortens its value by 8 bytes.
    let full = limits::STORE_BYTES_MAX / per_key;
    for number in 0..full - 1 {
        put(&mut core, format!("{number:08}"), per_key - 8).unwrap();
    }
    assert_eq!(
        limit(put(&mut core, "key.over", per_key - 7).and(put(&mut core, "x", 0))),
        LimitKind::StoreBytes
    );
}

#[test]
fn leases_are_bounded() {
    let mut core = Core::new();
    for _ in 0..limits::LEASES_MAX {
        grant(&mut core, 1000, 0).unwrap();
    }
    assert_eq!(limit(grant(&mut core, 1000, 0)), LimitKind::Leases);
    let delta = core.plan_end(LeaseId(1)).unwrap();
    core.apply(&delta, 0);
    grant(&mut core, 1000, 0).expect("there is room again");
}

#[test]
fn a_watch_that_falls_behind_fails_and_one_at_the_limit_continues() {
    let mut core = Core::new();
    put(&mut core, "k", 0).unwrap();
    let mut slow = core.watch("", 1).unwrap();
    let mut edge = core.watch("", 2).unwrap();
    for _ in 0..limits::HISTORY_EVENTS_MAX {
        put(&mut core, "k", 0).unwrap();
    }
    assert_eq!(core.next_event(&mut slow), Err(DirectoryError::Compacted { asked: 1, oldest: 2 }));
    assert_eq!(core.next_event(&mut edge).unwrap().unwrap().revision, 2);
    assert_eq!(core.watch("", 1), Err(DirectoryError::Compacted { asked: 1, oldest: 2 }));
    core.watch("", 2).unwrap();
}

#[test]
fn past_changes_are_bounded_in_bytes() {
    let mut core = Core::new();
    let mut slow = core.watch("", 1).unwrap();
    let fitting = limits::HISTORY_BYTES_MAX / (limits::VALUE_BYTES_MAX + 1);
    for _ in 0..fitting {
        put(&mut core, "k", limits::VALUE_BYTES_MAX).unwrap();
    }
    assert_eq!(core.next_event(&mut slow).unwrap().unwrap().revision, 1);
    let mut behind = core.watch("", 1).unwrap();
    put(&mut core, "k", limits::VALUE_BYTES_MAX).unwrap();
    assert!(matches!(core.next_event(&mut behind), Err(DirectoryError::Compacted { .. })));
}

#[test]
fn a_watch_from_a_future_revision_begins_there() {
    let mut core = Core::new();
    let mut future = core.watch("", 3).unwrap();
    for _ in 0..3 {
        put(&mut core, "k", 0).unwrap();
    }
    assert_eq!(core.next_event(&mut future).unwrap().unwrap().revision, 3);
}

#[test]
fn a_transaction_without_changes_has_no_revision_of_its_own() {
    let mut core = Core::new();
    let outcome = commit(&mut core, vec![KeyOperation::delete("absent")]).unwrap();
    assert_eq!(outcome, TransactionOutcome::Committed { revision: 0 });
    let check = Transaction { compares: vec![Compare::absent("absent")], operations: Vec::new() };
    assert_eq!(core.plan_transaction(&check).unwrap().1, None);
}

#[test]
fn rows_that_contradict_each_other_are_not_restored() {
    let record = |version, lease| StoredValue { value: Vec::new(), version, lease };
    let restore = |leases: &[(LeaseId, u64)], record| {
        Core::restore(5, 5, leases.iter().copied(), [("k".to_owned(), record)], 0).map(|core| core.revision())
    };
    assert_eq!(restore(&[(LeaseId(5), 1000)], record(5, Some(LeaseId(5)))), Ok(5));
    assert!(restore(&[], record(5, Some(LeaseId(5)))).is_err());
    assert!(restore(&[], record(6, None)).is_err());
    assert!(restore(&[], record(0, None)).is_err());
    assert!(restore(&[(LeaseId(6), 1000)], record(1, None)).is_err());
}
