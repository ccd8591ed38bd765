//! Limits of programs, and changes of the limit while a program checks every byte of its own
//! memory.

use std::fs::OpenOptions;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::run::{Running, status};
use aquifer_tests_e2e::steps::{Steps, assert_all_within_limit, assert_within_limit};
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
    assert!(text(&output.stdout).contains("checker: limit "), "{}", text(&output.stdout));
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

fn judge_checker(limit: u64, options: &[&str]) {
    let checker = build::programs().join("checker");
    let mut program =
        vec![checker.to_str().expect("a plain path"), "steps", "--bytes", "128M", "--rounds", "1"];
    program.extend(options);
    let cluster = Cluster::up(2, "256M");
    assert_within_limit(&cluster, &mut cluster.run_command(&limit.to_string(), &program), limit);
    cluster.assert_all_free();
}

#[test]
fn a_program_stays_within_its_limit_as_it_grows() {
    judge_checker(32 * MIB, &["--threads", "1"]);
}

#[test]
fn a_program_with_many_threads_stays_within_its_limit() {
    judge_checker(24 * MIB, &["--threads", "16"]);
}

#[test]
fn the_processes_of_a_run_share_one_limit() {
    const LIMIT: u64 = 48 * MIB;
    let cluster = Cluster::up(2, "512M");
    let checker = build::programs().join("checker");
    let pipe = |name: &str| {
        let path = cluster.state().join(name);
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a pipe with a name");
        // Opened for reading and writing, so that opening does not wait for the program.
        OpenOptions::new().read(true).write(true).open(&path).expect("our own pipe")
    };
    let mut checkers = [1, 2].map(|n| Steps::new(pipe(&format!("to{n}")), pipe(&format!("from{n}"))));
    let script = "cd \"$1\"; $0 steps --bytes 64M --rounds 1 --threads 2 <to1 >from1 &
                  $0 steps --bytes 64M --rounds 1 --seed 2 <to2 >from2 && wait $!";
    let folder = cluster.state().to_str().expect("a plain path");
    let program = ["sh", "-c", script, checker.to_str().expect("a plain path"), folder];
    let mut run = cluster.run_command(&LIMIT.to_string(), &program).spawn().expect("aquifer can be started");
    assert_all_within_limit(&cluster, run.id(), &mut checkers, LIMIT);
    let status = run.wait().expect("our own child can be waited for");
    assert!(status.success(), "the checkers ended with {status}");
    cluster.assert_all_free();
}

#[test]
fn a_limit_can_be_lowered_to_a_few_pages_and_raised_again() {
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
    // The program continues with few pages.
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

/// One call makes all pages resident, unless it is divided. How far a program exceeds its limit
/// while it grows depends on the machine.
#[test]
fn memory_that_is_populated_at_once_waits_for_room() {
    const BYTES: u64 = 1024 * MIB;
    let cluster = Cluster::up(2, "256M");
    let checker = build::programs().join("checker");
    let bytes = BYTES.to_string();
    let program = [checker.to_str().expect("a plain path"), "populate-all", "--bytes", &bytes];
    let outcome = Running::start(&mut cluster.run_command("32M", &program), false, Box::new(|| 0)).wait();
    outcome.assert_success("the program that populates its memory");
    let peak = outcome.peak.anonymous_bytes;
    assert!(peak < BYTES * 3 / 4, "{} MiB were resident at once", peak / MIB);
    cluster.assert_all_free();
}

#[test]
fn the_owner_is_told_of_protected_memory_beyond_the_limit() {
    let cluster = Cluster::up(2, "256M");
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "read-only", "--bytes", "256M"];
    let run = Running::start(&mut cluster.run_command("24M", &program), false, Box::new(|| 0));
    eventually("the owner to be told", || {
        let told = run.stderr_so_far();
        (told.contains("MiB resident") && told.contains("protected against writes")).then_some(())
    });
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    processes::signal(program, rustix::process::Signal::USR1);
    run.wait().assert_success("the program that has protected its memory");
    cluster.assert_all_free();
}

#[test]
fn a_process_outside_the_pool_has_no_limit() {
    let cluster = Cluster::up(1, "64M");
    let output = cluster.command().args(["limit", "1", "64M"]).output().expect("it can be started");
    assert!(!output.status.success());
    let error = text(&output.stderr);
    assert!(error.contains("process 1") && error.contains("aquifer status"), "{error}");
}
