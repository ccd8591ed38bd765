//! Restarts of nodes whose memory is kept, under programs that check every byte of their own
//! memory. Programs end with a message if the memory was not kept.

use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_tests_e2e::checked::Checked;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::restart::{await_time, figure, restart_node, start_missing};
use aquifer_tests_e2e::run::{Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build, eventually, processes, swap};
use rustix::process::Signal;

/// The checker's memory and its limit: a quarter.
const BYTES: &str = "32M";
const LIMIT: &str = "12M";
/// Most restarts of nodes under one program.
const RESTARTS_MAX: usize = 8;
/// Faults that the agent serves before the next restart.
const FAULTS: u64 = 300;
const NODES: usize = 2;

fn cluster(fabric: &str) -> Cluster {
    Cluster::up_with(NODES, "512M", &["--fabric", fabric, "--keep-memory"])
}

/// Runs the checker while nodes are restarted, and compares with a plain run.
fn check(fabric: &str, options: &[&str], test: &[&str], restart: impl Fn(&Cluster, usize)) {
    let checker = build::programs().join("checker");
    let mut program = vec![checker.to_str().expect("a plain path")];
    program.extend(test);
    program.extend(["--bytes", BYTES]);
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let mut cluster = cluster(fabric);
    cluster.set_run_options(options);
    let mut run = Running::start(&mut cluster.run_command(LIMIT, &program), true, Box::new(|| 0));
    let (mut restarts, mut seen) = (0, 0);
    while restarts < RESTARTS_MAX {
        let goes_on = await_time(&mut run, "faults to be served", || {
            figure(&cluster, "faults").is_some_and(|faults| {
                // A new agent counts from 0.
                seen = seen.min(faults);
                faults >= seen + FAULTS
            })
        });
        if !goes_on {
            break;
        }
        seen = figure(&cluster, "faults").unwrap_or(0);
        restart(&cluster, 1 + restarts % NODES);
        restarts += 1;
    }
    let outcome = run.wait();
    outcome.assert_success("the run whose nodes went");
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    assert!(restarts > 0, "no node went");
    println!("{test:?} over {fabric}: {restarts} nodes went and came back");
    cluster.assert_all_free();
}

macro_rules! checks {
    ($($name:ident: $fabric:literal $options:expr, $test:expr, $go_and_come:expr;)*) => {
        $(
            #[test]
            fn $name() {
                check($fabric, &$options, &$test, $go_and_come);
            }
        )*
    };
}

/// Stops a node with SIGTERM, as an upgrade does, and starts it again.
fn stop_and_start(cluster: &Cluster, number: usize) {
    let node = cluster.daemon("node", Some(number));
    processes::signal(node, Signal::TERM);
    eventually("the node to end", || (!processes::is_alive(node)).then_some(()));
    start_missing(cluster, &format!("Started node-{number}"));
}

/// Kills the agent while the node is down, so that the next agent has to wait for the node.
fn restart_with_agent(cluster: &Cluster, number: usize) {
    processes::kill(cluster.daemon("node", Some(number)));
    processes::kill(cluster.daemon("agent", None));
    start_missing(cluster, "Started");
}

checks! {
    pages_outlive_a_nodes_process: "shm" [], ["pages", "--rounds", "3"], restart_node;
    pages_outlive_a_nodes_process_over_tcp: "tcp" [], ["pages", "--rounds", "3"], restart_node;
    copies_outlive_a_nodes_process: "tcp" ["--replicas", "2"], ["pages", "--rounds", "3"], restart_node;
    forks_outlive_a_nodes_process: "shm" [], ["fork"], restart_node;
    pages_outlive_a_nodes_upgrade: "shm" [], ["pages", "--rounds", "3"], stop_and_start;
    pages_outlive_node_and_agent: "shm" [], ["pages", "--rounds", "3"], restart_with_agent;
}

/// Uses sessions while nodes are restarted.
fn extents_survive_nodes(fabric: &str) {
    let cluster = cluster(fabric);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (cluster, is_over) = (&cluster, &is_over);
        let sessions = (1..4).map(|seed| {
            scope.spawn(move || {
                let mut checked = Checked::open(cluster, seed);
                let mut turns = 0;
                while !is_over.load(Ordering::Relaxed) || turns < 500 {
                    checked.turn();
                    turns += 1;
                }
                checked.verify_all();
            })
        });
        let sessions: Vec<_> = sessions.collect();
        for restart in 0..RESTARTS_MAX {
            restart_node(cluster, 1 + restart % NODES);
        }
        is_over.store(true, Ordering::Relaxed);
        sessions.into_iter().for_each(|session| session.join().expect("what it had is what it wrote"));
    });
    cluster.assert_all_free();
}

#[test]
fn extents_survive_a_restart() {
    extents_survive_nodes("shm");
}

#[test]
fn extents_survive_a_restart_over_tcp() {
    extents_survive_nodes("tcp");
}

/// A program that runs until it is ended, with most of its memory on one node.
/// Option of `aquifer up`: all pages that are not in the program are on nodes alone.
const WITHOUT_CACHE: &str = "--cache-per-user=0";

fn endless(cluster: &Cluster) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", BYTES, "--rounds", "1000000"];
    let run = Running::start(&mut cluster.run_command(LIMIT, &program), false, Box::new(|| 0));
    eventually("a program to be paged", || (figure(cluster, "remote_bytes")? >= 16 << 20).then_some(()));
    run
}

/// Node and agent are killed, and the agent is started first, while the directory still has the
/// node.
#[test]
fn an_agent_waits_for_a_node_before_it_resumes() {
    for fabric in ["shm", "tcp"] {
        let cluster = Cluster::up_with(1, "512M", &["--fabric", fabric, "--keep-memory"]);
        let checker = build::programs().join("checker");
        let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", BYTES, "--rounds", "3"];
        let mut run = Running::start(&mut cluster.run_command(LIMIT, &program), false, Box::new(|| 0));
        let is_paged = || figure(&cluster, "remote_bytes").is_some_and(|bytes| bytes >= 16 << 20);
        assert!(await_time(&mut run, "a program to be paged", is_paged), "it has ended");
        processes::kill(cluster.daemon("node", Some(1)));
        processes::kill(cluster.daemon("agent", None));
        let agent = std::thread::scope(|scope| {
            let agent =
                scope.spawn(|| RunningDaemon::start_here(cluster.state(), &["agent", "--grace", "30s"]));
            // Then `aquifer up` knows that it runs.
            eventually("the agent to have its lock", || {
                let holder = std::fs::read_to_string(cluster.state().join("agent.lock")).ok()?;
                holder.trim().parse().is_ok_and(processes::is_alive).then_some(())
            });
            start_missing(&cluster, "Started node-1");
            agent.join().expect("it serves")
        });
        let outcome = run.wait();
        outcome.assert_success("the run whose node and agent went");
        assert_eq!(text(&outcome.stdout), text(&run_plainly(&program, false).stdout));
        cluster.assert_all_free();
        drop(agent);
    }
}

fn assert_ended_with_message(run: Running) {
    let outcome = run.wait();
    assert!(!outcome.status.success(), "it cannot have gone on");
    assert!(!outcome.stderr.contains("FAILED"), "it saw wrong memory: {}", outcome.stderr);
    assert!(outcome.stderr.contains("memory node"), "{}", outcome.stderr);
}

#[test]
fn a_node_that_restarts_without_its_memory_ends_programs() {
    for fabric in ["shm", "tcp"] {
        let options = ["--fabric", fabric, "--keep-memory", WITHOUT_CACHE];
        let cluster = Cluster::up_with(1, "512M", &options);
        let run = endless(&cluster);
        processes::kill(cluster.daemon("keeper", None));
        processes::kill(cluster.daemon("node", Some(1)));
        start_missing(&cluster, "Started");
        assert_ended_with_message(run);
        cluster.assert_all_free();
    }
}

mod long {
    use super::*;

    checks! {
        forks_outlive_a_nodes_process_over_tcp: "tcp" [], ["fork"], restart_node;
        pages_outlive_a_nodes_upgrade_over_tcp: "tcp" [], ["pages", "--rounds", "3"], stop_and_start;
        pages_outlive_node_and_agent_over_tcp: "tcp" [], ["pages", "--rounds", "3"], restart_with_agent;
    }

    #[test]
    fn a_node_that_does_not_restart_ends_programs() {
        let options = ["--fabric", "tcp", "--keep-memory", "--grace", "3s", WITHOUT_CACHE];
        let mut cluster = Cluster::up_with(1, "512M", &options);
        // A program that needs no page of the node, but room for another one, waits for a node.
        cluster.set_run_options(&["--wait-for-room", "3s"]);
        let run = endless(&cluster);
        processes::kill(cluster.daemon("node", Some(1)));
        assert_ended_with_message(run);
        start_missing(&cluster, "Started node-1");
        cluster.assert_all_free();
    }

    #[test]
    fn swap_devices_survive_a_restart() {
        if !swap::is_possible() {
            return;
        }
        for fabric in ["shm", "tcp"] {
            let cluster = cluster(fabric);
            let checker = build::programs().join("checker-static");
            let program =
                [checker.to_str().expect("a plain path"), "pages", "--bytes", BYTES, "--rounds", "3"];
            let mut command = cluster.command();
            command.args(["run", "--swap", "--local", LIMIT, "--"]).args(program);
            let mut run = Running::start(&mut command, false, Box::new(|| 0));
            let is_swapping =
                || swap::devices(&cluster).iter().any(|name| swap::swapped_bytes(name) > 12 << 20);
            if await_time(&mut run, "a program to be swapped", is_swapping) {
                for restart in 0..RESTARTS_MAX {
                    restart_node(&cluster, 1 + restart % NODES);
                }
            }
            let outcome = run.wait();
            outcome.assert_success("a program on swap whose nodes went");
            assert_eq!(text(&outcome.stdout), text(&run_plainly(&program, false).stdout));
            cluster.assert_all_free();
        }
    }
}
