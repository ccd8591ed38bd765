//! Clusters of servers.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_tests_memcached::cluster::{Cluster, LONG_PARTITION_TIMEOUT};
use aquifer_tests_memcached::server::memcached_is_installed;
use aquifer_tests_memcached::stream::chosen_seeds;
use aquifer_tests_memcached::{Options, Pair, Program, Server, Stream, assert_equal};
use rustix::process::Signal;

/// Moves partitions to the servers in turn, until `stops` is set. Returns how many have moved.
pub fn move_until_stopped(cluster: &Cluster, servers: usize, stops: &AtomicBool) -> usize {
    let mut moved = 0;
    for turn in 0.. {
        if stops.load(Ordering::Relaxed) {
            break;
        }
        let (partition, to) = ((turn * 37 % 128).to_string(), (turn % servers + 1).to_string());
        let output = cluster.operate(&["move", &partition, &to]);
        moved += usize::from(output.status.success() && !output.stdout.ends_with(b"already\n"));
    }
    moved
}

/// Compares the replies of memcached with those of servers whose partitions move, for these seeds
/// of each stream.
fn compare_cluster(seeds: Range<u64>) {
    if !memcached_is_installed() {
        return;
    }
    let reference = Server::start(Options::new(Program::Memcached));
    let cluster = Cluster::start(&LONG_PARTITION_TIMEOUT);
    let servers: Vec<Server> = (0..3).map(|_| cluster.add()).collect();
    cluster.wait_for_partitions();
    let stops = AtomicBool::new(false);
    let moved = std::thread::scope(|scope| {
        let mover = scope.spawn(|| move_until_stopped(&cluster, 3, &stops));
        // The thread must end if a comparison fails.
        let compared = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let seeds = chosen_seeds(seeds);
            let large = seeds.start..seeds.start + (seeds.end - seeds.start) / 20;
            for (stream, seeds) in [
                (Stream::Text, seeds.clone()),
                (Stream::Meta, seeds.clone()),
                (Stream::Mixed, seeds.clone()),
                (Stream::Malformed, seeds),
                (Stream::Large, large),
            ] {
                for seed in seeds {
                    let server = usize::try_from(seed % 3).expect("a small number");
                    let pair = Pair { reference: &reference, candidate: &servers[server] };
                    let what = format!("a cluster, {stream:?}, seed {seed}");
                    assert_equal(pair, &what, stream.script(seed));
                }
            }
        }));
        stops.store(true, Ordering::Relaxed);
        let moved = mover.join().expect("the mover does not panic");
        compared.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moved
    });
    assert!(moved > 0, "no partition has moved");
}

#[test]
fn replies_of_a_cluster_are_equal_while_partitions_move() {
    compare_cluster(0..24);
}

#[test]
fn an_orderly_stop_of_a_server_loses_no_items() {
    let cluster = Cluster::start(&LONG_PARTITION_TIMEOUT);
    let first = cluster.add();
    cluster.wait_for_partitions();
    let mut connection = first.connect();
    for key in 0..500 {
        assert_eq!(connection.request(format!("set key{key} 0 0 1\r\nx\r\n")), b"STORED\r\n");
    }
    let second = cluster.add();
    cluster.wait_for("on 2 servers");
    assert!(first.end_by(Signal::TERM), "the server ends with success");
    let mut connection = second.connect();
    for key in 0..500 {
        let expected = format!("VALUE key{key} 0 1\r\nx\r\nEND\r\n");
        assert_eq!(String::from_utf8_lossy(&connection.request(format!("get key{key}\r\n"))), expected);
    }
    cluster.wait_for_partitions();
}

#[test]
fn the_only_server_keeps_its_items_over_a_restart() {
    let mut cluster = Cluster::start(&LONG_PARTITION_TIMEOUT);
    cluster.start_daemon("keeper");
    for restart in 0..3 {
        let server = cluster.add();
        cluster.wait_for_partitions();
        let mut connection = server.connect();
        for key in 0..500 {
            let expected = if restart == 0 { "EN\r\n" } else { "VA 1 t-1\r\nx\r\n" };
            let found = connection.request(format!("mg key{key} t v\r\n"));
            assert_eq!(String::from_utf8_lossy(&found), expected, "restart {restart}");
            assert_eq!(connection.request(format!("set key{key} 0 0 1\r\nx\r\n")), b"STORED\r\n");
        }
        assert!(server.end_by(Signal::TERM), "the server ends with success");
    }
    // The memory of a killed server may be inconsistent, so that it is not kept.
    let server = cluster.add();
    cluster.wait_for_partitions();
    let _killed = server.end_by(Signal::KILL);
    let server = cluster.add();
    cluster.wait_for_partitions();
    assert_eq!(server.connect().request("mg key1 v\r\n"), b"EN\r\n");
}

#[test]
fn operators_see_and_move_partitions() {
    let cluster = Cluster::start(&LONG_PARTITION_TIMEOUT);
    let servers: Vec<Server> = (0..2).map(|_| cluster.add()).collect();
    cluster.wait_for_partitions();
    let text = |arguments: &[&str]| {
        let output = cluster.operate(arguments);
        let text = if output.status.success() { output.stdout } else { output.stderr };
        (output.status.success(), String::from_utf8(text).expect("text"))
    };
    let (is_well, status) = text(&["status"]);
    assert!(is_well && status.contains("cache main: 128 partitions on 2 servers"), "{status}");
    let (is_well, drained) = text(&["drain", "1"]);
    assert!(is_well && drained.contains("server 1 has no partitions"), "{drained}");
    let (is_well, moved) = text(&["move", "5", "2"]);
    assert!(is_well && moved.contains("has partition 5 already"), "{moved}");
    let (is_well, refused) = text(&["move", "5", "1"]);
    assert!(!is_well && refused.contains("is draining"), "{refused}");
    let (is_well, undone) = text(&["drain", "1", "--undo"]);
    assert!(is_well, "{undone}");
    let (is_well, moved) = text(&["move", "5", "1"]);
    // The balancer may have moved the partition first.
    assert!(
        is_well && (moved.contains("has moved from server 2 to 1") || moved.contains("already")),
        "{moved}"
    );
    let (is_well, refused) = text(&["move", "128", "1"]);
    assert!(!is_well && refused.contains("from 0 to 127"), "{refused}");
    let (is_well, refused) = text(&["move", "5", "7"]);
    assert!(!is_well && refused.contains("the servers are 1, 2"), "{refused}");
    let (_, json) = text(&["status", "--json"]);
    assert!(json.contains("\"requests_per_s\""), "{json}");
    drop(servers);
    // Another cache in the same directory has its own servers.
    let (is_well, refused) = text(&["status", "--name", "other"]);
    assert!(!is_well && refused.contains("no server of a cache \"other\""), "{refused}");
}

/// Long versions of the tests, with many more seeds.
mod long {
    #[test]
    fn many_replies_of_a_cluster_are_equal_while_partitions_move() {
        super::compare_cluster(1000..3000);
    }
}
