//! Sparse slabs are emptied and freed, and the program finds all pages unchanged.

use aquifer_tests_e2e::restart::{figure, restart_agent};
use aquifer_tests_e2e::run::Running;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;

const BYTES: &str = "128M";
const LIMIT: &str = "32M";
/// An eighth of the program's pages remain, 16 MiB. Well filled slabs for them have little more.
const SPARSE_BYTES: u64 = 24 << 20;
const FULL_BYTES: u64 = 64 << 20;

fn start(cluster: &Cluster) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "sparse", "--bytes", BYTES];
    Running::start(&mut cluster.run_command(LIMIT, &program), false, Box::new(|| 0))
}

/// Lets the program verify its pages.
fn proceed(run: &Running) {
    let of_it = processes::descendants(run.pid());
    of_it.into_iter().for_each(|pid| processes::signal(pid, Signal::USR1));
}

fn check(fabric: &str, replicas: u64) {
    let mut cluster = Cluster::up_with(3, "512M", &["--fabric", fabric]);
    cluster.set_run_options(&["--replicas", &replicas.to_string()]);
    let run = start(&cluster);
    eventually("the memory of freed pages to be free in the pool", || {
        let peak = figure(&cluster, "remote_peak_bytes")?;
        let is_small = figure(&cluster, "remote_bytes")? < SPARSE_BYTES * replicas;
        let has_moved = figure(&cluster, "vacated_slabs")? > 0 && figure(&cluster, "repacked_pages")? > 0;
        (peak > FULL_BYTES * replicas && is_small && has_moved).then_some(())
    });
    proceed(&run);
    run.wait().assert_success("the checker");
    cluster.assert_all_free();
}

#[test]
fn scattered_freed_pages_are_freed_in_the_pool() {
    check("shm", 1);
}

#[test]
fn scattered_freed_pages_are_freed_over_tcp_with_replicas() {
    check("tcp", 2);
}

#[test]
fn an_agent_that_is_killed_while_pages_are_moved_loses_none() {
    let cluster = Cluster::up(3, "512M");
    let run = start(&cluster);
    eventually("pages to be moved", || (figure(&cluster, "repacked_pages")? > 0).then_some(()));
    restart_agent(&cluster);
    eventually("the pool to get its memory back all the same", || {
        (figure(&cluster, "remote_bytes")? < SPARSE_BYTES).then_some(())
    });
    proceed(&run);
    run.wait().assert_success("the checker");
    cluster.assert_all_free();
}
