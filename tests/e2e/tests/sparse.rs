//! Slabs that have become sparse are emptied into others, and the pool gets their memory back; the
//! program finds every page as it left it.

use aquifer_tests_e2e::restart::{figure, restart_agent};
use aquifer_tests_e2e::run::Running;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use rustix::process::Signal;

const BYTES: &str = "128M";
const LIMIT: &str = "32M";
/// An eighth of the program's pages are left, 16 MiB; slabs that hold them well have little more.
const SPARSE_BYTES: u64 = 24 << 20;
const FULL_BYTES: u64 = 64 << 20;

fn start(cluster: &Cluster) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "sparse", "--bytes", BYTES];
    Running::start(&mut cluster.run_command(LIMIT, &program), false, Box::new(|| 0))
}

/// The program may verify what it has.
fn go_on(run: &Running) {
    let of_it = processes::descendants(run.pid());
    of_it.into_iter().for_each(|pid| processes::signal(pid, Signal::USR1));
}

fn check(fabric: &str, replicas: u64) {
    let mut cluster = Cluster::up_with(3, "512M", &["--fabric", fabric]);
    cluster.set_run_options(&["--replicas", &replicas.to_string()]);
    let run = start(&cluster);
    eventually("the pool to get back what the program has given up", || {
        let peak = figure(&cluster, "remote_peak_bytes")?;
        let is_small = figure(&cluster, "remote_bytes")? < SPARSE_BYTES * replicas;
        let has_moved = figure(&cluster, "vacated_slabs")? > 0 && figure(&cluster, "repacked_pages")? > 0;
        (peak > FULL_BYTES * replicas && is_small && has_moved).then_some(())
    });
    go_on(&run);
    run.wait().assert_success("the checker");
    cluster.assert_all_free();
}

#[test]
fn what_a_program_gave_up_here_and_there_goes_back_to_the_pool() {
    check("shm", 1);
}

#[test]
fn and_over_tcp_with_copies() {
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
    go_on(&run);
    run.wait().assert_success("the checker");
    cluster.assert_all_free();
}
