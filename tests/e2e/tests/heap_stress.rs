//! All uses of heaps at once: objects and stores, in shared memory and over TCP, while the heap is
//! compacted repeatedly and services and clients are killed. Every byte is compared.
//!
//! Runs for a third of `AQUIFER_SOAK_S` seconds; without the variable, for a quarter of a minute.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_objects::client::HeapClient;
use aquifer_tests_e2e::checked::Random;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::restart_heaps;
use aquifer_tests_e2e::{Cluster, eventually};

use super::heaps::{CheckedHeap, OnDrop, client, remote_client, reports};
use super::kv::CheckedStore;

const SECONDS_VARIABLE: &str = "AQUIFER_SOAK_S";

/// Counts of events during the test.
#[derive(Debug, Default)]
struct Counts {
    operations: AtomicU64,
    interrupted: AtomicU64,
    compactions: AtomicU64,
    killed_clients: AtomicU64,
}

impl Counts {
    fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::SeqCst);
    }

    /// Waits until the workers have done this number of operations more, or it is over.
    fn await_operations(&self, count: usize, is_over: &AtomicBool) {
        let end = self.operations.load(Ordering::SeqCst) + count as u64;
        eventually("the programs to continue", || {
            (self.operations.load(Ordering::SeqCst) >= end || is_over.load(Ordering::SeqCst)).then_some(())
        });
    }
}

/// Works on objects until it is over, and frees them.
fn use_objects(client: HeapClient, seed: u64, is_over: &AtomicBool, counts: &Counts) {
    let mut heap = CheckedHeap::new(client, seed);
    while !is_over.load(Ordering::SeqCst) {
        heap.operate();
        Counts::add(&counts.operations, 1);
    }
    heap.check_all();
    heap.free_all();
    Counts::add(&counts.interrupted, heap.unknown);
}

fn use_store(client: HeapClient, name: &str, seed: u64, is_over: &AtomicBool, counts: &Counts) {
    let mut store = CheckedStore::new(client, name, seed);
    while !is_over.load(Ordering::SeqCst) {
        store.operate();
        Counts::add(&counts.operations, 1);
    }
    store.check_all();
    Counts::add(&counts.interrupted, store.unknown);
}

/// The values that each key may have, with `None` until a put has succeeded.
type Possible = HashMap<String, Vec<Option<String>>>;

/// Kills clients that put values, each at a random time. A value must be the last one whose put
/// succeeded, or one of a later put.
fn kill_clients(cluster: &Cluster, is_over: &AtomicBool, counts: &Counts) {
    let mut random = Random(77);
    let mut possible: Possible = HashMap::new();
    let kv = |arguments: &[&str]| {
        let mut command = cluster.command();
        command.args(["kv", "--store", "killed"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("aquifer can be started")
    };
    let mut number = 0_u64;
    while !is_over.load(Ordering::SeqCst) {
        number += 1;
        let key = format!("key {}", random.below(5));
        let value = format!("{number} ").repeat(1 + random.below(2000));
        let mut child = kv(&["put", &key, &value]);
        // Some are killed before they have begun, and some after they have ended.
        counts.await_operations(random.below(200), is_over);
        // It may have ended.
        let _ = child.kill();
        let is_done = child.wait().expect("it is a child").success();
        let values = possible.entry(key).or_insert_with(|| vec![None]);
        if is_done {
            values.clear();
        } else {
            Counts::add(&counts.killed_clients, 1);
        }
        values.push(Some(value));
        if number.is_multiple_of(20) {
            check_values(&possible, &kv);
        }
    }
    // No service is killed any more, so each key can be read.
    assert_eq!(check_values(&possible, &kv), possible.len());
}

/// Returns the number of keys that could be read. Reads fail when the service is killed.
fn check_values(possible: &Possible, kv: &dyn Fn(&[&str]) -> std::process::Child) -> usize {
    let mut read = 0;
    for (key, values) in possible {
        let output = kv(&["get", key]).wait_with_output().expect("it ends");
        let (found, error) = (text(&output.stdout), text(&output.stderr));
        let has_none = error.contains("has no value") || error.contains("there is no store of this name");
        let found = match output.status.success() {
            true => Some(found),
            false if has_none => None,
            false => continue,
        };
        assert!(values.contains(&found), "{key} is {found:.60?}");
        read += 1;
    }
    read
}

fn stress(time: Duration) {
    let cluster = Cluster::up_with(1, "544M", &["--heap-memory", "512M"]);
    let uid = rustix::process::geteuid().as_raw().to_string();
    let (is_over, counts) = (AtomicBool::new(false), Counts::default());
    let (is_over, counts, cluster) = (&is_over, &counts, &cluster);
    let began = Instant::now();
    let mut kills = 0;
    std::thread::scope(|scope| {
        let workers = [
            scope.spawn(|| use_objects(client(cluster), 1, is_over, counts)),
            scope.spawn(|| use_objects(remote_client(cluster), 2, is_over, counts)),
            scope.spawn(|| use_store(client(cluster), "shared", 3, is_over, counts)),
            scope.spawn(|| use_store(remote_client(cluster), "remote", 4, is_over, counts)),
            scope.spawn(|| kill_clients(cluster, is_over, counts)),
        ];
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let compacted = cluster.command().args(["heap", "compact", &uid]).output();
                // It fails while the service is being restarted.
                let is_done = compacted.expect("aquifer can be started").status.success();
                Counts::add(&counts.compactions, u64::from(is_done));
            }
        });
        let _end = OnDrop(is_over);
        let mut random = Random(5);
        while began.elapsed() < time {
            counts.await_operations(2000 + random.below(10_000), is_over);
            assert!(!workers.iter().any(|worker| worker.is_finished()), "a program has ended");
            restart_heaps(cluster, 1);
            kills += 1;
        }
        is_over.store(true, Ordering::SeqCst);
        workers.into_iter().for_each(|worker| worker.join().expect("all is as it was written"));
    });
    println!("{kills} services were killed; {counts:?}");
    assert!(counts.interrupted.load(Ordering::SeqCst) > 0, "no operation was interrupted");
    assert!(counts.killed_clients.load(Ordering::SeqCst) > 0, "no client was killed");
    for store in ["checked", "killed"] {
        let dropped = cluster.command().args(["kv", "drop", "--store", store]).output();
        let dropped = dropped.expect("aquifer can be started");
        assert!(dropped.status.success(), "{}", text(&dropped.stderr));
    }
    // What clients leave that were killed or interrupted: an item, a bucket, an object.
    let left = counts.interrupted.load(Ordering::SeqCst) + counts.killed_clients.load(Ordering::SeqCst);
    let report = &reports(cluster)[0];
    assert!(report.objects <= 1 + 3 * left, "{left} were interrupted, and leave {report:?}");
}

mod long {
    use super::*;

    #[test]
    fn data_are_right_while_services_and_clients_are_killed() {
        let seconds = std::env::var(SECONDS_VARIABLE).ok().map(|text| text.parse().expect("a number"));
        stress(Duration::from_secs(seconds.map_or(15, |seconds: u64| seconds / 3)));
    }
}
