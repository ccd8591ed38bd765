//! Partitions that move while they are used.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_tests_support::eventually::eventually;

use crate::checker::Checker;
use crate::harness::{Cluster, Kind, PARTITIONS};

/// Moves partitions while clients of all servers check all replies.
fn move_under_load(kind: Kind, servers: usize, moves: usize) {
    let cluster = Cluster::start(kind, servers);
    let (stops, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let checkers: Vec<_> = (0..4)
            .map(|number| {
                let stream = cluster.connect(number % servers);
                let (stops, requests) = (&stops, &requests);
                scope.spawn(move || {
                    let mut checker = Checker::new(stream, &format!("c{number}"), 200);
                    checker.run(if number % 2 == 0 { 1 } else { 50 }, stops, requests);
                })
            })
            .collect();
        let mut moved = 0;
        while moved < moves && !checkers.iter().any(|checker| checker.is_finished()) {
            let partition = moved * 7 % PARTITIONS;
            let Some(from) = cluster.owners()[partition] else { continue };
            let to = (from + 1 + moved % (servers - 1)) % servers;
            let before = requests.load(Ordering::Relaxed);
            // The balancer may be moving it.
            if cluster.move_to(partition, from, to).is_ok() {
                moved += 1;
            }
            eventually("requests are answered", || {
                let has_ended = checkers.iter().any(|checker| checker.is_finished());
                (has_ended || requests.load(Ordering::Relaxed) >= before + 100).then_some(())
            });
        }
        stops.store(true, Ordering::Relaxed);
        checkers.into_iter().for_each(|checker| checker.join().unwrap());
    });
    let received: u64 = (0..servers).map(|server| cluster.status(server).received).sum();
    assert!(received >= moves as u64, "{received}");
    cluster.stop();
}

#[test]
fn partitions_move_over_shared_memory_under_load() {
    move_under_load(Kind::default(), 3, 60);
}

#[test]
fn partitions_move_over_tcp_under_load() {
    move_under_load(Kind { is_local: false, encrypt: true, ..Kind::default() }, 3, 60);
}

#[test]
fn partitions_move_in_both_directions_at_once() {
    let cluster = Cluster::start(Kind::default(), 2);
    let (stops, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let checker = {
            let (stream, stops, requests) = (cluster.connect(0), &stops, &requests);
            scope.spawn(move || Checker::new(stream, "c", 300).run(20, stops, requests))
        };
        let movers: Vec<_> = [0, 1]
            .into_iter()
            .map(|partition| {
                let cluster = &cluster;
                scope.spawn(move || {
                    let mut moved = 0;
                    while moved < 20 {
                        let Some(from) = cluster.owners()[partition] else { continue };
                        moved += usize::from(cluster.move_to(partition, from, 1 - from).is_ok());
                    }
                })
            })
            .collect();
        movers.into_iter().for_each(|mover| mover.join().unwrap());
        stops.store(true, Ordering::Relaxed);
        checker.join().unwrap();
    });
    cluster.stop();
}

#[test]
fn a_partition_stays_if_the_other_server_has_no_memory() {
    let mut cluster = Cluster::start(Kind { evicts: false, ..Kind::default() }, 1);
    let mut checker = Checker::new(cluster.connect(0), "c", 2000);
    let (stops, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            checker.run(50, &stops, &requests);
            checker
        });
        eventually("much is written", || {
            let is_much = requests.load(Ordering::Relaxed) >= 100_000;
            (is_much || running.is_finished()).then_some(())
        });
        cluster.add(Kind { limit: 1 << 20, evicts: false, ..Kind::default() });
        cluster.wait_until("the servers know each other", |cluster| {
            cluster.move_to(99, 0, 1).is_err_and(|why| why.contains("99"))
        });
        let mut failures = 0;
        for partition in 0..PARTITIONS {
            failures += usize::from(cluster.move_to(partition, 0, 1).is_err());
        }
        assert!(failures > 0, "1 MiB has room for nothing like this");
        stops.store(true, Ordering::Relaxed);
        running.join().unwrap();
    });
    cluster.stop();
}
