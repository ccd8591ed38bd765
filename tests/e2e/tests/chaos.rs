//! redis, PostgreSQL and the checker on one cluster over TCP, while its parts are killed, stopped and started: nothing may be lost.
//! For as long as `AQUIFER_SOAK_S` says (`make test-long`); without it, every fault once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_tests_e2e::postgres::Postgres;
use aquifer_tests_e2e::redis::Redis;
use aquifer_tests_e2e::restart::{figure, restart_agent};
use aquifer_tests_e2e::{Cluster, House, build, eventually, processes};
use aquifer_tests_support::Etcd;
use rustix::process::Signal;

const SECONDS_VARIABLE: &str = "AQUIFER_SOAK_S";
const REDIS_BYTES: &str = "32M";
const REDIS_LIMIT: u64 = 12 << 20;
const TRANSACTIONS: usize = 50;
/// Faults that are served between two that are made.
const SERVED: u64 = 500;

/// Goes on until it is told to stop; returns how often it did it.
fn again_and_again(stop: &AtomicBool, mut once: impl FnMut()) -> usize {
    let mut times = 0;
    loop {
        once();
        times += 1;
        if stop.load(Ordering::Relaxed) {
            return times;
        }
    }
}

fn check_once(cluster: &Cluster) {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "fork", "--bytes", "32M", "--rounds", "1"];
    let output = cluster.run("12M", &program);
    assert!(output.status.success(), "the checker: {}", String::from_utf8_lossy(&output.stderr));
}

/// Wait until programs have been served again.
fn await_service(cluster: &Cluster) {
    let mut before = None;
    eventually("programs to be served", || {
        let faults = figure(cluster, "faults")?;
        // Runs that end take their figures with them.
        let least = *before.get_or_insert(faults);
        before = Some(least.min(faults));
        (faults >= least.min(faults) + SERVED).then_some(())
    });
}

fn make_one_fault(cluster: &Cluster, etcd: &mut Etcd, number: usize) {
    match number % 4 {
        0 => restart_agent(cluster),
        1 | 3 => {
            let node = cluster.part("node", Some(number % 4 / 2 + 1));
            processes::signal(node, Signal::STOP);
            let stopped = cluster.status();
            processes::signal(node, Signal::CONT);
            assert!(stopped.is_object());
        }
        _ => {
            etcd.member(0).kill();
            await_service(cluster);
            etcd.member(0).restart();
            restart_agent(cluster);
        }
    }
}

#[test]
fn nothing_is_lost_while_parts_die_and_stop() {
    assert!(rustix::process::geteuid().is_root(), "it takes root to start PostgreSQL as somebody else");
    let seconds =
        std::env::var(SECONDS_VARIABLE).map_or(0, |text| text.parse().expect("a number of seconds"));
    let mut etcd = Etcd::start();
    let house = House::build_with(&["--fabric", "tcp", "--directory", &etcd.address()]);
    let cluster = &house.cluster;
    let postgres = Postgres::start(&house, "24M");
    postgres.open_books();
    let redis = Redis::paged(cluster, cluster.state(), REDIS_LIMIT);
    let expected = redis.check("load", REDIS_BYTES);
    let stop = AtomicBool::new(false);
    let (faults, transactions) = std::thread::scope(|scope| {
        let books = scope.spawn(|| {
            let transactions = TRANSACTIONS.to_string();
            again_and_again(&stop, || {
                let _ = postgres.ask("pgbench", &["-n", "-c", "2", "-t", &transactions]);
            })
        });
        scope.spawn(|| {
            again_and_again(&stop, || assert_eq!(redis.check("load", REDIS_BYTES), expected));
        });
        scope.spawn(|| again_and_again(&stop, || check_once(cluster)));
        let started = Instant::now();
        let mut faults = 0;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while faults < 4 || started.elapsed() < Duration::from_secs(seconds) {
                await_service(cluster);
                make_one_fault(cluster, &mut etcd, faults);
                faults += 1;
            }
        }));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        let times = books.join().expect("PostgreSQL is served");
        (faults, times * 2 * TRANSACTIONS)
    });
    println!("{faults} faults, {transactions} transactions");
    postgres.assert_books(transactions);
    assert_eq!(redis.check("verify", REDIS_BYTES), expected);
    redis.stop().assert_success("redis-server on the pool");
    postgres.stop().assert_success("PostgreSQL on the pool");
    cluster.assert_all_free();
}
