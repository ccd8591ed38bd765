//! Tests of host and node numbers, for every implementation.

use aquifer_directory::{DirectoryError, names};

use super::harness::DirectoryHarness;
use super::suite::TTL;

pub fn hosts_are_claimed_in_turn(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let claim = || {
        let lease = directory.lease_grant(TTL).unwrap();
        let record = names::claim_host(&*directory, lease, "socket", 0).unwrap();
        assert_eq!(record.epoch, lease.epoch);
        (lease, record.host)
    };
    let (first, one) = claim();
    let (_, two) = claim();
    directory.lease_revoke(first.id).unwrap();
    let (_, three) = claim();
    assert_eq!([one, two, three], [1, 2, 3], "a number is not reused at once");

    // After the greatest number the search continues at 1, and skips numbers in use.
    directory.put("hosts/next", b"4093", None).unwrap();
    let hosts = [claim().1, claim().1, claim().1];
    assert_eq!(hosts, [4093, 4, 5], "host 1 is dead, and may own memory");
    let mut living: Vec<_> =
        names::agents(&*directory).unwrap().into_iter().map(|agent| agent.host).collect();
    living.sort_unstable();
    assert_eq!(living, [2, 3, 4, 5, 4093]);
}

pub fn a_dead_hosts_number_is_free_once_it_owns_nothing(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = || directory.lease_grant(TTL).unwrap();
    let listed = || names::dead_hosts(&*directory).unwrap();
    let dead = || listed().into_iter().map(|dead| dead.record).collect::<Vec<_>>();
    let is_taken = |outcome: Result<_, DirectoryError>| matches!(outcome, Err(DirectoryError::Taken { .. }));
    let (first, second) = (lease(), lease());
    let record = names::claim_host(&*directory, first, "socket", 0).unwrap();
    names::claim_host(&*directory, second, "another", 0).unwrap();
    assert_eq!(dead(), []);
    let held = |record: &names::AgentRecord, remaining_lives| names::HolderRecord {
        host: record.host,
        claim_epoch: record.claim_epoch,
        grace_ms: 0,
        remaining_lives,
    };
    let version = directory.list(names::HOLDERS).unwrap().entries[0].version;
    let of_first = names::DeadHost { record: held(&record, None), version };
    assert!(
        is_taken(names::claim_dead_host(&*directory, lease(), &of_first, "too early")),
        "the host is alive"
    );
    directory.lease_revoke(first.id).unwrap();
    assert_eq!(listed(), std::slice::from_ref(&of_first));
    // One recovery claims the number; then neither another recovery nor the host itself can.
    let third = lease();
    let successor = names::claim_dead_host(&*directory, third, &of_first, "successor").unwrap();
    assert_eq!((successor.host, successor.epoch), (record.host, third.epoch));
    assert_eq!(dead(), []);
    assert!(is_taken(names::claim_dead_host(&*directory, lease(), &of_first, "late")));
    assert!(is_taken(names::resume_host(&*directory, lease(), &record, 0)));
    // The recovery dies.
    directory.lease_revoke(third.id).unwrap();
    assert_eq!(dead(), [held(&successor, None)]);
    let forgotten = names::finish_recovery(&*directory, &successor, Vec::new());
    assert!(is_taken(forgotten.map(|()| successor.clone())));
    assert!(is_taken(names::claim_dead_host(&*directory, lease(), &of_first, "with an old record")));
    // A node is absent, and its memory may return.
    let fourth = names::claim_dead_host(&*directory, lease(), &listed()[0], "fourth").unwrap();
    let absent = vec![names::NodeLife { node: 7, epoch: 3, kept_ms: 0 }];
    names::finish_recovery(&*directory, &fourth, absent.clone()).unwrap();
    assert_eq!(dead(), [held(&fourth, Some(absent))]);
    let last = names::claim_dead_host(&*directory, lease(), &listed()[0], "last").unwrap();
    names::finish_recovery(&*directory, &last, Vec::new()).unwrap();
    assert_eq!(dead(), []);
    assert_eq!(names::agents(&*directory).unwrap().len(), 1);
    assert!(
        is_taken(names::resume_host(&*directory, lease(), &record, 0)),
        "other hosts may own its memory now"
    );
    directory.put("hosts/next", b"1", None).unwrap();
    assert_eq!(names::claim_host(&*directory, lease(), "new", 0).unwrap().host, record.host);
}

pub fn a_host_that_resumes_in_time_keeps_its_number(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = || directory.lease_grant(TTL).unwrap();
    let first = lease();
    let record = names::claim_host(&*directory, first, "socket", 0).unwrap();
    directory.lease_revoke(first.id).unwrap();
    let death = names::dead_hosts(&*directory).unwrap().remove(0);
    let again = names::resume_host(&*directory, lease(), &record, 0).unwrap();
    assert_eq!(again.host, record.host);
    assert!(again.epoch > record.epoch);
    // The agent dies before it stores its new record: the next one resumes from the old record,
    // although the lease of the dead one has not ended.
    let third_lease = lease();
    let third = names::resume_host(&*directory, third_lease, &record, 0).unwrap();
    assert!(third.epoch > again.epoch);
    assert_eq!(names::dead_hosts(&*directory).unwrap(), []);
    // It dies again, with the same record. A recovery that saw its first death must wait again.
    directory.lease_revoke(third_lease.id).unwrap();
    let again = names::dead_hosts(&*directory).unwrap().remove(0);
    assert_eq!(again.record, death.record);
    let claimed = names::claim_dead_host(&*directory, lease(), &death, "with an old version");
    assert!(matches!(claimed, Err(DirectoryError::Taken { .. })));
    names::claim_dead_host(&*directory, lease(), &again, "successor").unwrap();
}

pub fn an_invalid_record_of_a_host_does_not_block_other_recoveries(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let lease = directory.lease_grant(TTL).unwrap();
    let record = names::claim_host(&*directory, lease, "socket", 0).unwrap();
    directory.put(&format!("{}4000", names::HOLDERS), b"{}", None).unwrap();
    directory.lease_revoke(lease.id).unwrap();
    let dead = names::dead_hosts(&*directory).unwrap();
    assert_eq!(dead.iter().map(|dead| dead.record.host).collect::<Vec<_>>(), [record.host]);
    directory.put("hosts/next", b"4000", None).unwrap();
    let next = directory.lease_grant(TTL).unwrap();
    assert_eq!(names::claim_host(&*directory, next, "another", 0).unwrap().host, 4001);
}

pub fn hosts_claimed_at_once_differ(harness: &dyn DirectoryHarness) {
    let threads: Vec<_> = (0..6)
        .map(|_| {
            let directory = harness.directory();
            std::thread::spawn(move || {
                let lease = directory.lease_grant(TTL).unwrap();
                names::claim_host(&*directory, lease, "socket", 0).unwrap().host
            })
        })
        .collect();
    let mut hosts: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    hosts.sort_unstable();
    assert_eq!(hosts, [1, 2, 3, 4, 5, 6]);
}

pub fn a_node_number_has_one_holder(harness: &dyn DirectoryHarness) {
    let directory = harness.directory();
    let register = || {
        let lease = directory.lease_grant(TTL).unwrap();
        let (fabric, address) = ("shm".to_owned(), "node-7.sock".to_owned());
        let record = names::NodeRecord {
            id: 7,
            fabric,
            address,
            memory_bytes: 1 << 30,
            memory_bytes_max: 1 << 30,
            requested_memory_bytes: 1 << 30,
            resize_blocker: None,
            recalled_bytes: 0,
            recalled_from: Vec::new(),
            kept_ms: 0,
            epoch: lease.epoch,
            is_disk: false,
        };
        names::register_node(&*directory, lease, &record).map(|()| record)
    };
    let record = register().unwrap();
    assert_eq!(names::nodes(&*directory).unwrap(), [record]);
    assert_eq!(register(), Err(DirectoryError::Taken { key: "nodes/7".to_owned() }));
    harness.advance(TTL);
    register().expect("the number is free after the node's lease has ended");
    directory.put("nodes/8", b"{", None).unwrap();
    assert!(matches!(names::nodes(&*directory), Err(DirectoryError::Protocol { .. })));
}
