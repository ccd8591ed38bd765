//! Restarts of the agent under programs that check every byte of their own memory.

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{await_time, figure, restart_agent, start_missing};
use aquifer_tests_e2e::run::{Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};

/// The checker's memory and its limit: a quarter.
const BYTES: &str = "32M";
const LIMIT: &str = "12M";
/// Most restarts of the agent under one program.
const RESTARTS_MAX: usize = 8;
/// Faults that an agent serves before it is killed.
const FAULTS: u64 = 300;

#[test]
fn a_run_reports_that_it_waits_for_an_agent_that_has_ended() {
    let cluster = Cluster::up_with(1, "64M", &["--grace", "1h"]);
    processes::kill(cluster.daemon("agent", None));
    let mut run = Running::start(&mut cluster.run_command(LIMIT, &["true"]), false, Box::new(|| 0));
    eventually("the run to say what it waits for", || {
        assert!(!run.has_ended(), "it does not wait: {}", run.stderr_so_far());
        let said = run.stderr_so_far();
        (said.contains("waiting for the agent at") && said.contains("aquifer up")).then_some(())
    });
    start_missing(&cluster, "Started agent");
    run.wait().assert_success("the run whose agent has come");
}

/// Runs the checker while its agents are killed, and compares with a plain run.
fn check(fabric: &str, test: &str, options: &[&str]) {
    let checker = build::programs().join("checker");
    let mut program = vec![checker.to_str().expect("a plain path"), test, "--bytes", BYTES];
    program.extend(options);
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let cluster = Cluster::up_with(2, "512M", &["--fabric", fabric]);
    let mut run = Running::start(&mut cluster.run_command(LIMIT, &program), true, Box::new(|| 0));
    let mut restarts = 0;
    while restarts < RESTARTS_MAX {
        let wanted = FAULTS * (1 + restarts as u64 % 4);
        let is_running = await_time(&mut run, "faults to be served", || {
            figure(&cluster, "faults").is_some_and(|faults| faults >= wanted)
        });
        if !is_running {
            break;
        }
        restart_agent(&cluster);
        restarts += 1;
    }
    let outcome = run.wait();
    outcome.assert_success("the run whose agents died");
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    assert!(restarts > 0, "no agent died");
    println!("{test} over {fabric}: {restarts} agents died");
    cluster.assert_all_free();
}

macro_rules! checks {
    ($($name:ident: $fabric:literal $test:literal $options:expr;)*) => {
        $(
            #[test]
            fn $name() {
                check($fabric, $test, &$options);
            }
        )*
    };
}

checks! {
    pages_survive_a_restart: "shm" "pages" ["--rounds", "3"];
    forks_survive_a_restart: "shm" "fork" [];
    moved_pages_survive_a_restart: "shm" "mremap" [];
    discarded_pages_stay_discarded: "shm" "madvise" [];
    threads_survive_a_restart: "shm" "threads" [];
    the_heap_survives_a_restart: "shm" "brk" ["--bytes", "512M"];
}

mod long {
    use super::*;

    checks! {
        a_process_that_outlives_another_survives_a_restart: "shm" "outlive" ["--rounds", "4"];
        a_child_of_a_parent_that_ends_survives_a_restart: "shm" "fork-exit" ["--rounds", "3"];
        pages_survive_a_restart_over_tcp: "tcp" "pages" ["--rounds", "3"];
        a_child_that_inherits_less_survives_a_restart: "shm" "dont-fork" ["--rounds", "3"];
        a_process_alone_survives_a_restart: "shm" "alone" [];
        a_sandboxed_process_survives_a_restart: "shm" "sandboxed" ["--rounds", "4"];
        a_process_without_threads_survives_a_restart: "shm" "raw-exit" [];
        a_stopped_process_survives_a_restart: "shm" "stopped" [];
        a_traced_process_survives_a_restart: "shm" "traced" [];
        wiped_memory_survives_a_restart: "shm" "wipe-on-fork" ["--rounds", "3"];
        guarded_memory_survives_a_restart: "shm" "guard" ["--rounds", "3"];
        replaced_memory_survives_a_restart: "shm" "shm-remap" ["--rounds", "3"];
        a_process_alone_survives_a_restart_over_tcp: "tcp" "alone" [];
        a_sandboxed_process_survives_a_restart_over_tcp: "tcp" "sandboxed" ["--rounds", "4"];
        a_process_without_threads_survives_a_restart_over_tcp: "tcp" "raw-exit" [];
        a_stopped_process_survives_a_restart_over_tcp: "tcp" "stopped" [];
        a_traced_process_survives_a_restart_over_tcp: "tcp" "traced" [];
        a_process_that_outlives_another_survives_a_restart_over_tcp: "tcp" "outlive" ["--rounds", "4"];
        a_child_of_a_parent_that_ends_survives_a_restart_over_tcp: "tcp" "fork-exit" ["--rounds", "3"];
        a_child_that_inherits_less_survives_a_restart_over_tcp: "tcp" "dont-fork" ["--rounds", "3"];
        wiped_memory_survives_a_restart_over_tcp: "tcp" "wipe-on-fork" ["--rounds", "3"];
        guarded_memory_survives_a_restart_over_tcp: "tcp" "guard" ["--rounds", "3"];
        replaced_memory_survives_a_restart_over_tcp: "tcp" "shm-remap" ["--rounds", "3"];
    }
}

#[test]
fn a_program_that_starts_without_an_agent_waits_for_one() {
    let cluster = Cluster::up(2, "256M");
    processes::kill(cluster.daemon("agent", None));
    let run = Running::start(&mut cluster.run_command("64M", &["echo", "here"]), false, Box::new(|| 0));
    eventually("aquifer run to start", || processes::is_alive(run.pid()).then_some(()));
    start_missing(&cluster, "Started agent");
    let outcome = run.wait();
    outcome.assert_success("the run that started without an agent");
    assert_eq!(outcome.stdout, b"here\n");
    cluster.assert_all_free();
}
