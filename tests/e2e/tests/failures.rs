//! Deaths of programs and daemons: others are not affected, all memory is freed, and no wrong byte
//! is read.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use aquifer_ipc::{HeldKind, KeeperShare};
use aquifer_keeper::{CLAIM_TIMEOUT, KeeperClient};
use aquifer_tests_e2e::cluster::{find, text};
use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::restart::{figure, start_missing};
use aquifer_tests_e2e::run::{Running, mempool_share, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use aquifer_tests_support::openmetrics::scrape;
use aquifer_tests_support::state_folder;
use rustix::process::Signal;
use serde_json::Value;

const LIMIT: &str = "32M";

/// A checker that runs until it is ended.
fn endless(cluster: &Cluster, limit: &str, bytes: &str) -> Running {
    start_checker(cluster, limit, &["pages", "--bytes", bytes, "--rounds", "1000000"])
}

fn start_checker(cluster: &Cluster, limit: &str, arguments: &[&str]) -> Running {
    let checker = build::programs().join("checker");
    let mut program = vec![checker.to_str().expect("a plain path")];
    program.extend(arguments);
    Running::start(&mut cluster.run_command(limit, &program), false, mempool_share(cluster.agent_socket()))
}

/// Waits until this many bytes of the pool are allocated.
fn await_paging(cluster: &Cluster, bytes: u64) {
    eventually("a program to be paged", || {
        let status = status(cluster.agent_socket())?;
        let runs = status["runs"].as_array()?;
        let taken: u64 = runs.iter().filter_map(|run| run["remote_bytes"].as_u64()).sum();
        (taken >= bytes).then_some(())
    });
}

fn program_of(run: &Running) -> u32 {
    eventually("the program to be there", || processes::descendants(run.pid()).first().copied())
}

/// Asserts that the checker, which was killed, has reported no wrong byte.
fn assert_no_wrong_byte(stderr: &str) {
    assert!(!stderr.contains("FAILED"), "the program saw wrong memory: {stderr}");
}

#[test]
fn a_killed_programs_memory_is_freed() {
    let cluster = Cluster::up(3, "128M");
    let run = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    processes::signal(program_of(&run), Signal::KILL);
    let outcome = run.wait();
    assert_eq!(
        outcome.status.signal(),
        Some(Signal::KILL.as_raw()),
        "{}: {}",
        outcome.status,
        outcome.stderr
    );
    cluster.assert_all_free();
}

/// The pause of `checker steps` in which the state folder is deleted. The program exceeds its limit
/// then.
const DELETION_STEP: usize = 7;

/// Deletes the state folder while a program pauses, and waits for the ends of the program and of
/// all daemons.
fn delete_state_under_a_program(options: &[&str]) {
    let cluster = Cluster::up_with(2, "128M", options);
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "steps", "--bytes", "128M"];
    let mut command = cluster.run_command(LIMIT, &program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = command.spawn().expect("aquifer can be started");
    let mut output = BufReader::new(run.stdout.take().expect("it is a pipe"));
    let mut input = run.stdin.take().expect("it is a pipe");
    let mut daemons = Vec::new();
    for step in 1.. {
        let mut line = String::new();
        output.read_line(&mut line).expect("the program's output can be read");
        if line.is_empty() {
            break;
        }
        if step == DELETION_STEP {
            await_paging(&cluster, 1 << 20);
            daemons = cluster.daemons();
            assert!(daemons.len() >= 5, "agent, two nodes, keeper and directory: {daemons:?}");
            std::fs::remove_dir_all(cluster.state()).expect("it is our folder");
        }
        for daemon in &daemons {
            assert!(processes::is_alive(*daemon), "daemon {daemon} has ended under a program");
        }
        input.write_all(b"\n").expect("the program waits for a line");
    }
    let outcome = run.wait_with_output().expect("our own child can be waited for");
    assert!(outcome.status.success(), "{}: {}", outcome.status, text(&outcome.stderr));
    eventually("all daemons to end", || cluster.daemons().is_empty().then_some(()));
}

#[test]
fn daemons_without_a_state_folder_end_after_their_last_program() {
    delete_state_under_a_program(&[]);
}

#[test]
fn a_program_ends_when_its_run_is_killed() {
    let cluster = Cluster::up(3, "128M");
    let run = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    let program = program_of(&run);
    processes::signal(run.pid(), Signal::KILL);
    let _ = run.wait();
    eventually("the program to end", || (!processes::is_alive(program)).then_some(()));
    cluster.assert_all_free();
}

#[test]
fn a_detached_program_keeps_its_limit_after_its_run_was_killed() {
    let cluster = Cluster::up(3, "128M");
    let mut command = cluster.command();
    let checker = build::programs().join("checker");
    command.args(["run", "--detach", "--local", LIMIT, "--"]).arg(checker);
    command.args(["pages", "--bytes", "128M", "--rounds", "1000000"]);
    let run = Running::start(&mut command, false, mempool_share(cluster.agent_socket()));
    await_paging(&cluster, 64 << 20);
    let program = program_of(&run);
    processes::signal(run.pid(), Signal::KILL);
    let before = figure(&cluster, "evictions").expect("the agent answers");
    eventually("more pages to leave", || {
        assert!(processes::is_alive(program), "the program must continue");
        (figure(&cluster, "evictions")? > before + 20_000).then_some(())
    });
    processes::signal(program, Signal::KILL);
    let _ = run.wait();
    cluster.assert_all_free();
}

#[test]
fn two_runs_side_by_side_do_not_harm_each_other() {
    let cluster = Cluster::up(3, "256M");
    let doomed = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 32 << 20);
    let steady = start_checker(&cluster, LIMIT, &["pages", "--bytes", "128M", "--seed", "5"]);
    await_paging(&cluster, 96 << 20);
    processes::signal(program_of(&doomed), Signal::SEGV);
    let doomed = doomed.wait();
    assert_eq!(doomed.status.signal(), Some(Signal::SEGV.as_raw()), "{}", doomed.stderr);
    assert_no_wrong_byte(&doomed.stderr);
    steady.wait().assert_success("the run beside a failing one");
    cluster.assert_all_free();
}

/// The reason why a run waits for room in the pool, once there is one.
fn await_shortage(cluster: &Cluster, program: &str) -> String {
    eventually("a run to wait for room", || {
        let status = status(cluster.agent_socket())?;
        let runs = status["runs"].as_array()?;
        let run = runs.iter().find(|run| run["name"] == program && run["short_of_room"].is_string())?;
        Some(run["short_of_room"].as_str()?.to_owned())
    })
}

#[test]
fn a_program_waits_for_room_until_there_is_some() {
    let cluster = Cluster::up(1, "48M");
    let full = endless(&cluster, LIMIT, "64M");
    await_paging(&cluster, 24 << 20);
    let waiting = start_checker(&cluster, "16M", &["pages", "--bytes", "48M"]);
    await_shortage(&cluster, "checker");
    eventually("the message about the wait", || {
        waiting.stderr_so_far().contains("--wait-for-room").then_some(())
    });
    processes::signal(program_of(&full), Signal::KILL);
    assert_no_wrong_byte(&full.wait().stderr);
    let outcome = waiting.wait();
    outcome.assert_success("the program that waited");
    assert!(outcome.stderr.contains("the pool has room again"), "{}", outcome.stderr);
    cluster.assert_all_free();
}

#[test]
fn a_program_says_that_it_waits_for_the_mempool() {
    let cluster = Cluster::up_with(1, "256M", &["--fabric", "tcp", "--mempool", "2M"]);
    let first = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    // The stopped node acknowledges no page, so the first run holds all blocks of its user.
    let node = cluster.daemon("node", None);
    processes::signal(node, Signal::STOP);
    let waiting = start_checker(&cluster, "16M", &["pages", "--bytes", "48M"]);
    let said = "the mempool of this host has no free block";
    assert!(await_shortage(&cluster, "checker").starts_with(said));
    eventually("the message about the wait", || waiting.stderr_so_far().contains(said).then_some(()));
    processes::signal(node, Signal::CONT);
    waiting.wait().assert_success("the program that waited");
    processes::signal(program_of(&first), Signal::KILL);
    assert_no_wrong_byte(&first.wait().stderr);
    cluster.assert_all_free();
}

#[test]
fn a_full_pool_ends_only_the_program_that_filled_it() {
    let mut cluster = Cluster::up(1, "32M");
    cluster.set_run_options(&["--wait-for-room", "1s"]);
    // This program fits into its limit and uses no memory of the pool.
    let modest = endless(&cluster, "128M", "32M");
    let modest_program = program_of(&modest);
    let greedy = start_checker(&cluster, LIMIT, &["pages", "--bytes", "256M"]).wait();
    assert!(!greedy.status.success());
    assert!(greedy.stderr.contains("the pool is full"), "{}", greedy.stderr);
    assert!(greedy.stderr.contains("has waited for room for 1 s"), "{}", greedy.stderr);
    assert!(greedy.stderr.contains("aquifer up --memory"), "it should say what to do: {}", greedy.stderr);
    assert_no_wrong_byte(&greedy.stderr);
    assert!(processes::is_alive(modest_program), "the other program was harmed");
    processes::signal(modest_program, Signal::KILL);
    assert_no_wrong_byte(&modest.wait().stderr);
    cluster.assert_all_free();
}

#[test]
fn a_dead_node_elsewhere_costs_its_readers_a_message_and_no_wrong_byte() {
    kill_the_node("tcp");
}

fn kill_the_node(fabric: &str) {
    let mut cluster = Cluster::up_with(1, "256M", &["--fabric", fabric]);
    cluster.set_run_options(&["--wait-for-room", "1s"]);
    let run = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    processes::signal(cluster.daemon("node", None), Signal::KILL);
    let outcome = run.wait();
    assert!(!outcome.status.success());
    assert!(outcome.stderr.contains("memory node"), "it should name the node: {}", outcome.stderr);
    assert_no_wrong_byte(&outcome.stderr);
    // The node is started again, and works.
    let up = cluster
        .command()
        .args(["up", "--nodes", "1", "--memory", "256M"])
        .output()
        .expect("aquifer can be started");
    assert!(up.status.success(), "{}", text(&up.stderr));
    start_checker(&cluster, LIMIT, &["pages", "--bytes", "64M"])
        .wait()
        .assert_success("a run on the node that came back");
    cluster.assert_all_free();
}

/// Programs wait for a stopped node, as long as its machine acknowledges packets.
#[test]
fn a_stopped_node_is_waited_for() {
    const CHECKS: usize = 40;
    let cluster = Cluster::up_with(2, "256M", &["--fabric", "tcp"]);
    let run = start_checker(&cluster, LIMIT, &["pages", "--bytes", "96M", "--rounds", "2"]);
    await_paging(&cluster, 48 << 20);
    let node = cluster.daemon("node", Some(1));
    processes::signal(node, Signal::STOP);
    let program = program_of(&run);
    let (mut last, mut unchanged) = (0, 0);
    eventually("the program to wait, too", || {
        let faults = processes::faults(program);
        unchanged = if faults == last { unchanged + 1 } else { 0 };
        last = faults;
        (unchanged >= CHECKS).then_some(())
    });
    assert!(processes::is_alive(program), "a stopped node must not end a program");
    processes::signal(node, Signal::CONT);
    run.wait().assert_success("the run with a node that was stopped");
    cluster.assert_all_free();
}

#[test]
fn without_its_agent_a_program_waits_and_ends_with_a_message() {
    let cluster = Cluster::up_with(2, "128M", &["--grace", "1s"]);
    let run = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    let program = program_of(&run);
    processes::signal(cluster.daemon("agent", None), Signal::KILL);
    let outcome = run.wait();
    assert!(!outcome.status.success());
    assert!(outcome.stderr.contains("agent"), "it should say why: {}", outcome.stderr);
    assert_no_wrong_byte(&outcome.stderr);
    assert!(!processes::is_alive(program));
    let up = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(up.status.success(), "{}", text(&up.stderr));
    let output = cluster.run("64M", &["true"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn aquifer_down_ends_programs_with_a_message() {
    let cluster = Cluster::up(1, "256M");
    let run = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    let down = cluster.command().arg("down").output().expect("aquifer can be started");
    assert!(down.status.success(), "{}", text(&down.stderr));
    let outcome = run.wait();
    assert!(!outcome.status.success());
    assert!(outcome.stderr.contains("the agent is stopping"), "{}", outcome.stderr);
    assert_no_wrong_byte(&outcome.stderr);
    assert_eq!(cluster.daemons(), Vec::<u32>::new());
}

/// An agent that is stopping holds its lock until it has ended its programs.
#[test]
fn an_agent_that_is_stopping_is_started_again() {
    let cluster = Cluster::up(1, "256M");
    let run = endless(&cluster, LIMIT, "64M");
    await_paging(&cluster, 16 << 20);
    let agent = cluster.daemon("agent", None);
    processes::signal(agent, Signal::TERM);
    let lock = cluster.state().join("agent.lock");
    eventually("the agent to stop", || {
        let is_ending = std::fs::read_to_string(&lock).is_ok_and(|text| text.ends_with("ending\n"));
        (is_ending || !processes::is_alive(agent)).then_some(())
    });
    start_missing(&cluster, "Started agent");
    assert_ne!(cluster.daemon("agent", None), agent);
    assert!(!run.wait().status.success());
    cluster.assert_all_free();
}

#[test]
fn a_keeper_that_stops_ends_the_programs_of_a_dead_agent() {
    let cluster = Cluster::up_with(1, "256M", &["--grace", "1h"]);
    let run = endless(&cluster, LIMIT, "128M");
    await_paging(&cluster, 64 << 20);
    let keeper = cluster.daemon("keeper", None);
    processes::kill(cluster.daemon("agent", None));
    eventually("the shadow to pass userfaultfds on", || {
        let socket = cluster.state().join("keeper.sock");
        let (_, kept) = KeeperClient::connect(&socket, KeeperShare::Agent, CLAIM_TIMEOUT).ok()?;
        kept.iter().any(|kept| kept.item.kind == HeldKind::Orphan).then_some(())
    });
    processes::signal(keeper, Signal::TERM);
    eventually("the keeper to end", || (!processes::is_alive(keeper)).then_some(()));
    let outcome = run.wait();
    assert!(!outcome.status.success());
    assert_no_wrong_byte(&outcome.stderr);
}

#[test]
fn a_restarted_keeper_gets_all_items_again() {
    let cluster = Cluster::up(1, "256M");
    let run = start_checker(&cluster, LIMIT, &["pages", "--bytes", "128M", "--rounds", "3"]);
    await_paging(&cluster, 32 << 20);
    processes::signal(cluster.daemon("keeper", None), Signal::KILL);
    let up = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(up.status.success(), "{}", text(&up.stderr));
    run.wait().assert_success("a run whose keeper was replaced");
    cluster.assert_all_free();
}

#[test]
fn clusters_live_side_by_side() {
    let cluster = Cluster::up(1, "64M");
    let other = state_folder();
    let aquifer = |words: &[&str]| {
        let mut command = Command::new(build::binary());
        command.arg("--state").arg(other.path()).args(words);
        command.output().expect("aquifer can be started")
    };
    let up = aquifer(&["up", "--nodes", "2", "--memory", "32M"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let status = aquifer(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("the status is JSON");
    assert_eq!(find(&status, "nodes").and_then(|nodes| nodes.as_array()).map(Vec::len), Some(2));
    assert!(aquifer(&["run", "--local", "64M", "--", "true"]).status.success());
    assert!(aquifer(&["down"]).status.success());
    assert!(!aquifer(&["run", "--local", "64M", "--", "true"]).status.success(), "that cluster is down");
    assert!(cluster.run("64M", &["true"]).status.success(), "this one is not");
}

mod long {
    use super::*;

    #[test]
    fn programs_continue_when_the_directory_is_stopped_for_longer_than_their_leases_last() {
        let cluster = Cluster::up(3, "128M");
        processes::kill(cluster.daemon("agent", None));
        let place = format!("unix:{}", cluster.state().join("agent.metrics").display());
        let _agent = RunningDaemon::start_here(cluster.state(), &["agent", "--metrics", &place]);
        let agents = || find(&cluster.status(), "agents").expect("they are listed").clone();
        let before = agents();
        let run = endless(&cluster, LIMIT, "128M");
        await_paging(&cluster, 64 << 20);
        let directory = cluster.daemon("directory", None);
        processes::signal(directory, Signal::STOP);
        // A keep-alive fails after 10 s, and a lease lasts for 15 s.
        let renewals = |name: &str| {
            let samples = scrape(&place).expect("metrics");
            samples.sum(&format!("aquifer_agent_lease_{name}_total"), &[]).unwrap_or(0.0)
        };
        eventually("two keep-alives to fail", || (renewals("renewal_failures") >= 2.0).then_some(()));
        processes::signal(directory, Signal::CONT);
        let renewed = renewals("renewals");
        eventually("leases to be kept alive again", || (renewals("renewals") > renewed + 1.0).then_some(()));
        assert_eq!(agents(), before, "no lease has ended");
        end(&cluster, run);
    }

    #[test]
    fn programs_continue_when_the_agent_is_stopped_for_longer_than_its_lease_lasts() {
        stop_the_agent(&Cluster::up_with(3, "128M", &["--grace", "5m", "--fabric", "tcp"]));
    }

    #[test]
    fn programs_continue_when_the_agent_of_kept_memory_is_stopped() {
        let options = ["--grace", "5m", "--fabric", "tcp", "--keep-memory"];
        stop_the_agent(&Cluster::up_with(3, "128M", &options));
    }

    /// The agent starts the next one, and so may the supervisor.
    #[test]
    fn one_agent_follows_one_that_was_stopped_beside_a_supervisor() {
        let options = ["--grace", "5m", "--fabric", "tcp"];
        let cluster = Cluster::up_with_supervisor(3, "128M", &options);
        stop_the_agent(&cluster);
        let is_agent = |pid: &u32| processes::arguments(*pid).iter().any(|word| word == "agent");
        let agent = eventually("one agent to be left", || {
            let agents: Vec<_> = cluster.daemons().into_iter().filter(is_agent).collect();
            let agent = cluster.daemon("agent", None);
            // The shadow shares the agent's arguments.
            let is_of_it = |pid: &u32| *pid == agent || processes::descendants(agent).contains(pid);
            agents.iter().all(is_of_it).then_some(agent)
        });
        processes::kill(agent);
        eventually("the supervisor to start another", || figure(&cluster, "faults"));
        assert!(cluster.run("64M", &["true"]).status.success());
    }

    /// Kills a program that has read no wrong byte, and waits until its memory is free.
    fn end(cluster: &Cluster, run: Running) {
        processes::kill(program_of(&run));
        let outcome = run.wait();
        assert_eq!(outcome.status.signal(), Some(Signal::KILL.as_raw()), "{}", outcome.stderr);
        assert_no_wrong_byte(&outcome.stderr);
        cluster.assert_all_free();
    }

    /// Stops the agent until the nodes have fenced the host. The resumed agent starts the next one.
    /// Not with shared memory: a node kills an agent that was stopped in the middle of an access.
    fn stop_the_agent(cluster: &Cluster) {
        let run = endless(cluster, LIMIT, "128M");
        await_paging(cluster, 64 << 20);
        let agent = cluster.daemon("agent", None);
        processes::signal(agent, Signal::STOP);
        let directory = format!("unix:{}", cluster.state().join("directory.sock").display());
        eventually("the lease to end", || {
            let words = ["status", "--json", "--directory", &directory];
            let output = cluster.command().args(words).output().expect("aquifer can be started");
            let status: Value = serde_json::from_slice(&output.stdout).expect("the status is JSON");
            let agents = find(&status, "agents").and_then(Value::as_array).expect("they are listed");
            agents.is_empty().then_some(())
        });
        processes::signal(agent, Signal::CONT);
        eventually("the agent to end", || (!processes::is_alive(agent)).then_some(()));
        let faults = eventually("the next agent", || figure(cluster, "faults"));
        eventually("the program to continue", || {
            (figure(cluster, "faults")? > faults + 20_000).then_some(())
        });
        end(cluster, run);
    }

    #[test]
    fn daemons_without_a_state_folder_release_kept_memory() {
        delete_state_under_a_program(&["--keep-memory", "--fabric", "tcp"]);
    }

    /// Agent and keeper are dead, and only the nodes' logs record the host's memory. The next agent
    /// frees it from there once the lease has ended.
    #[test]
    fn memory_of_a_dead_host_is_freed() {
        let cluster = Cluster::up_with(2, "128M", &["--grace", "1s"]);
        let run = endless(&cluster, LIMIT, "128M");
        await_paging(&cluster, 64 << 20);
        let parts = ["keeper", "agent"].map(|part| cluster.daemon(part, None));
        // The program waits for its memory for ever, so the test kills it.
        processes::signal(program_of(&run), Signal::STOP);
        for process in parts.into_iter().chain([program_of(&run), run.pid()]) {
            processes::signal(process, Signal::KILL);
        }
        assert!(!run.wait().status.success());
        let up = cluster.command().arg("up").output().expect("aquifer can be started");
        assert!(up.status.success(), "{}", text(&up.stderr));
        cluster.assert_all_free();
        start_checker(&cluster, LIMIT, &["pages", "--bytes", "128M", "--rounds", "1"])
            .wait()
            .assert_success("a run in the freed memory");
        cluster.assert_all_free();
    }

    #[test]
    fn a_dead_node_costs_its_readers_a_message_and_no_wrong_byte() {
        kill_the_node("shm");
    }
}

/// The agent reads the key when it starts, so a changed key is noticed by the next one.
#[test]
fn a_wrong_cluster_key_is_reported_as_such() {
    let mut cluster = Cluster::up_with(1, "64M", &["--fabric", "tcp"]);
    cluster.set_run_options(&["--wait-for-room", "1s"]);
    processes::kill(cluster.daemon("agent", None));
    let key = cluster.state().join("cluster.key");
    std::fs::write(&key, format!("{}\n", "ab".repeat(32))).expect("the state folder is ours");
    start_missing(&cluster, "Started agent");
    let outcome = start_checker(&cluster, "16M", &["pages", "--bytes", "64M"]).wait();
    assert!(!outcome.status.success());
    assert!(outcome.stderr.contains("the cluster keys differ"), "{}", outcome.stderr);
}

/// The programs of dead agents are ended by a keeper or an agent, and neither is left here.
#[test]
fn a_program_ends_when_agent_and_keeper_are_killed_together() {
    let cluster = Cluster::up(1, "128M");
    let run = endless(&cluster, LIMIT, "64M");
    await_paging(&cluster, 16 << 20);
    let program = program_of(&run);
    // With the agent's shadow, which has the same command line.
    let (keeper, agent) = (cluster.daemon("keeper", None), cluster.daemon("agent", None));
    let daemons: Vec<u32> = cluster.daemons().into_iter().filter(|pid| is_agent(*pid)).collect();
    assert!(daemons.contains(&agent), "{daemons:?}");
    // The shadow may end by itself.
    [keeper].into_iter().chain(daemons).for_each(|pid| processes::signal_if_alive(pid, Signal::KILL));
    let outcome = run.wait();
    assert_eq!(outcome.status.code(), Some(125), "{}: {}", outcome.status, outcome.stderr);
    assert!(outcome.stderr.contains("no agent took over"), "{}", outcome.stderr);
    assert_no_wrong_byte(&outcome.stderr);
    eventually("the program to end", || (!processes::is_alive(program)).then_some(()));
}

fn is_agent(pid: u32) -> bool {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).any(|word| word == b"agent")
}
