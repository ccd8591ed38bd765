//! Stopped servers of a cluster, and a stopped directory.

use std::time::{Duration, Instant};

use aquifer_tests_e2e::eventually::eventually;
use aquifer_tests_memcached::cluster::Cluster;
use aquifer_tests_memcached::connection::Connection;
use aquifer_tests_memcached::{Server, stats};
use rustix::process::Signal;

const KEYS: usize = 100;
/// Longest stop of a server after which its lease is certainly valid.
const LEASE_VALID_TIME: Duration = Duration::from_secs(1);
/// Most attempts to stop a server for less than [`LEASE_VALID_TIME`] on a busy machine.
const ATTEMPTS: usize = 50;

fn set(connection: &mut Connection, key: usize, value: &str) -> String {
    let reply = connection.request(format!("set key{key} 0 0 {}\r\n{value}\r\n", value.len()));
    let reply = String::from_utf8(reply).expect("text");
    assert!(reply == "STORED\r\n" || reply.starts_with("SERVER_ERROR "), "{reply}");
    reply
}

fn get(connection: &mut Connection, key: usize) -> String {
    String::from_utf8(connection.request(format!("get key{key}\r\n"))).expect("text")
}

fn set_all(connection: &mut Connection, value: &str) {
    for key in 0..KEYS {
        eventually("an item to be stored", || (set(connection, key, value) == "STORED\r\n").then_some(()));
    }
}

fn value(key: usize, value: &str) -> String {
    format!("VALUE key{key} 0 {}\r\n{value}\r\nEND\r\n", value.len())
}

fn count(connection: &mut Connection, name: &str) -> u64 {
    stats::values(connection, "stats")[name].parse().expect("a number")
}

/// Stops a server, and sends requests for all keys through another one. Returns the keys whose
/// items were not found meanwhile, after checking that sets of them fail; `None` if the server was
/// stopped for so long that it may have lost its lease.
fn with_stopped(server: &Server, through: &mut Connection) -> Option<Vec<usize>> {
    let began = Instant::now();
    server.signal_all(Signal::STOP);
    let is_missing = |key: &usize| {
        let found = get(through, *key);
        assert!(found == "END\r\n" || found == value(*key, "old"), "{found}");
        found == "END\r\n"
    };
    let missing: Vec<usize> = (0..KEYS).filter(is_missing).collect();
    let replies: Vec<String> = missing.iter().map(|key| set(through, *key, "failed")).collect();
    server.signal_all(Signal::CONT);
    let has_lease = began.elapsed() < LEASE_VALID_TIME;
    has_lease.then(|| {
        assert!(replies.iter().all(|reply| reply.starts_with("SERVER_ERROR ")), "{replies:?}");
        missing
    })
}

#[test]
fn a_stopped_server_makes_only_its_keys_unavailable() {
    let cluster = Cluster::start(&[]);
    let servers: Vec<Server> = (0..2).map(|_| cluster.add()).collect();
    cluster.wait_for("on 2 servers");
    cluster.wait_for_partitions();
    for partition in 0..32 {
        // The balancer may also move them.
        let _moved = cluster.operate(&["move", &partition.to_string(), "2"]);
    }
    let mut connection = servers[0].connect();
    for _ in 0..ATTEMPTS {
        set_all(&mut connection, "old");
        let Some(missing) = with_stopped(&servers[1], &mut connection) else { continue };
        assert!(!missing.is_empty() && missing.len() < KEYS, "{} keys are missing", missing.len());
        assert!(count(&mut connection, "partition_misses") >= missing.len() as u64);
        assert!(count(&mut connection, "partition_errors") >= missing.len() as u64);
        // Sets that have failed are not executed when the server continues, and all items exist.
        for key in 0..KEYS {
            for server in &servers {
                let mut connection = server.connect();
                eventually("an item to be found", || {
                    let found = get(&mut connection, key);
                    assert!(found == "END\r\n" || found == value(key, "old"), "{found}");
                    (found != "END\r\n").then_some(())
                });
            }
        }
        return;
    }
    panic!("each stop of the server exceeded the time for which its lease is certainly valid");
}

#[test]
fn items_stay_while_the_directory_is_stopped() {
    let cluster = Cluster::start(&[]);
    let server = cluster.add();
    cluster.wait_for_partitions();
    let mut connection = server.connect();
    set_all(&mut connection, "old");
    cluster.signal_directory(Signal::STOP);
    // The lease ends.
    eventually("reads to find nothing", || (get(&mut connection, 0) == "END\r\n").then_some(()));
    assert!(set(&mut connection, 0, "failed").starts_with("SERVER_ERROR "));
    assert!(connection.request("version\r\n").starts_with(b"VERSION "));
    cluster.signal_directory(Signal::CONT);
    for key in 0..KEYS {
        eventually("an item to be found", || {
            let found = get(&mut connection, key);
            assert!(found == "END\r\n" || found == value(key, "old"), "{found}");
            (found != "END\r\n").then_some(())
        });
    }
}
