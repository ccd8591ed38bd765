//! The limit of a running program is changed while it checks every byte of its own memory.

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn start(cluster: &Cluster) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "96M", "--rounds", "1000000"];
    Running::start(&mut cluster.run_command("256M", &program), false, Box::new(|| 0))
}

fn set(cluster: &Cluster, pid: u32, size: &str) {
    let output =
        cluster.command().args(["limit", &pid.to_string(), size]).output().expect("it can be started");
    assert!(output.status.success(), "aquifer limit failed: {}", text(&output.stderr));
    assert!(text(&output.stdout).contains("checker: may have"), "{}", text(&output.stdout));
}

fn await_run(cluster: &Cluster, what: &str, mut fits: impl FnMut(&Value) -> bool) {
    eventually(what, || {
        let status = status(cluster.agent_socket())?;
        status["runs"].as_array()?.first().filter(|run| fits(run)).map(drop)
    });
}

fn figure(run: &Value, name: &str) -> u64 {
    run[name].as_u64().unwrap_or_else(|| panic!("the run tells no {name}: {run:#}"))
}

#[test]
fn a_limit_follows_the_wish_down_to_a_few_pages_and_up_again() {
    let cluster = Cluster::up(2, "256M");
    let run = start(&cluster);
    await_run(&cluster, "the program to be whole in memory", |run| figure(run, "resident_bytes") >= 90 * MIB);
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    set(&cluster, program, "32M");
    await_run(&cluster, "it to be within 32 MiB", |run| {
        figure(run, "limit_bytes") == 32 * MIB && figure(run, "resident_bytes") <= 36 * MIB
    });
    set(&cluster, run.pid(), "64K");
    let held = |run: &Value| run["programs"][0]["held_bytes"].as_u64();
    await_run(&cluster, "it to have a few pages", |run| held(run).is_some_and(|held| held <= MIB / 2));
    // It goes on even so.
    let mut faults = None;
    await_run(&cluster, "faults to be served", |run| {
        let now = figure(run, "faults");
        now > *faults.get_or_insert(now) + 100
    });
    set(&cluster, program, "256M");
    await_run(&cluster, "it to be whole again", |run| figure(run, "resident_bytes") >= 90 * MIB);
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
    cluster.assert_all_free();
}

#[test]
fn who_does_not_run_on_the_pool_has_no_limit() {
    let cluster = Cluster::up(1, "64M");
    let output = cluster.command().args(["limit", "1", "64M"]).output().expect("it can be started");
    assert!(!output.status.success());
    let error = text(&output.stderr);
    assert!(error.contains("process 1") && error.contains("aquifer status"), "{error}");
}
