//! Partitions that move while clients use them.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_tests_support::eventually::eventually;

use crate::checker::Checker;
use crate::faults::Faults;
use crate::harness::{Cluster, Kind, PARTITIONS};

/// Moves partitions while clients of all servers check all replies.
fn move_under_load(kind: Kind, servers: usize, moves: usize) {
    move_in(&Cluster::start(kind, servers), servers, moves);
}

fn move_in(cluster: &Cluster, servers: usize, moves: usize) {
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
            // The balancer may be moving the partition.
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
}

/// Moves partitions under load while messages between servers and answers of the directory are
/// lost.
fn move_with_losses(seed: u64, moves: usize) {
    let faults = Arc::new(Faults::new(seed));
    let cluster = Cluster::start_with(Kind::default(), 3, Some(Arc::clone(&faults)));
    faults.set_active(true);
    move_in(&cluster, 3, moves);
    faults.set_active(false);
    assert!(faults.lost.load(Ordering::SeqCst) > 10, "nothing was lost");
    cluster
        .wait_until("each partition has one server", |cluster| cluster.owners().iter().all(Option::is_some));
    cluster.stop();
}

#[test]
fn items_survive_moves_while_messages_are_lost() {
    move_with_losses(1, 25);
}

mod long {
    #[test]
    fn items_survive_many_moves_while_messages_are_lost() {
        (2..30).for_each(|seed| super::move_with_losses(seed, 60));
    }
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
fn a_partition_stays_if_the_target_has_no_memory() {
    let kind = Kind { evicts: false, ..Kind::default() };
    let mut cluster = Cluster::start(kind, 1);
    // Each partition is larger than the limit of the other server.
    let mut stream = cluster.connect(0);
    for key in 0..30_000 {
        let request = format!("set fill{key} 0 0 1000 noreply\r\n{key:01000}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
    }
    let mut checker = Checker::new(cluster.connect(0), "c", 200);
    let (stops, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            checker.run(50, &stops, &requests);
            checker
        });
        cluster.add(Kind { limit: 1 << 20, ..kind });
        cluster.wait_until("the servers know each other", |cluster| {
            cluster.move_to(99, 0, 1).is_err_and(|why| why.contains("99"))
        });
        let items = |cluster: &Cluster| -> u64 {
            cluster.status(0).partitions.iter().map(|partition| partition.items).sum()
        };
        cluster.wait_until("all is stored", |cluster| items(cluster) >= 30_000);
        for partition in 0..PARTITIONS {
            assert!(cluster.move_to(partition, 0, 1).is_err(), "{partition} has no room there");
        }
        assert_eq!(cluster.status(0).partitions.len(), PARTITIONS);
        stops.store(true, Ordering::Relaxed);
        running.join().unwrap();
    });
    cluster.stop();
}
