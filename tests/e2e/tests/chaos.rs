//! redis, PostgreSQL and the checker on one cluster over TCP, while its daemons are killed, stopped
//! and started, and cut off from the directory one at a time, and while nodes are emptied. No data
//! may be lost.
//!
//! Runs for `AQUIFER_SOAK_S` seconds; without the variable, each fault is injected once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_tests_e2e::cluster::{find, text};
use aquifer_tests_e2e::postgres::Postgres;
use aquifer_tests_e2e::redis::Redis;
use aquifer_tests_e2e::restart::{figure, restart_agent, restart_node, start_missing};
use aquifer_tests_e2e::run::status;
use aquifer_tests_e2e::{Cluster, SharedCluster, build, eventually, processes};
use aquifer_tests_support::{EtcdCluster, TcpRelay};
use rustix::process::Signal;

const SECONDS_VARIABLE: &str = "AQUIFER_SOAK_S";
/// Number of nodes: one more than replicas, so that a lost replica can be made again.
const NODES: usize = 3;
const REDIS_BYTES: &str = "32M";
const REDIS_LIMIT: u64 = 12 << 20;
const TRANSACTIONS: usize = 50;
/// Page faults that are served between two injected faults.
const SERVED: u64 = 500;

/// Calls `once` until `stop` is set; returns the number of calls.
fn repeat(stop: &AtomicBool, mut once: impl FnMut()) -> usize {
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

/// Waits until page faults are served again.
fn await_service(cluster: &Cluster) {
    let mut before = None;
    eventually("programs to be served", || {
        let faults = figure(cluster, "faults")?;
        // The statistics of a run end with it.
        let least = *before.get_or_insert(faults);
        before = Some(least.min(faults));
        (faults >= least.min(faults) + SERVED).then_some(())
    });
}

/// The directory, which daemons reach through a relay.
struct Directory {
    etcd: EtcdCluster,
    relay: TcpRelay,
}

impl Directory {
    fn start() -> Self {
        let etcd = EtcdCluster::start();
        let local = "127.0.0.1:0".parse().expect("an address");
        let relay = TcpRelay::start(local, etcd.members()[0].client(), Duration::ZERO).expect("a free port");
        Self { etcd, relay }
    }

    /// The address for daemons.
    fn address(&self) -> String {
        format!("etcd://{}", self.relay.address())
    }
}

type Fault = fn(&Cluster, &mut Directory, usize);

/// Faults for nodes whose memory is lost with their processes.
const FAULTS: [Fault; 8] =
    [kill_agent, stop_node, kill_node, kill_etcd, cut_node_off, stop_agent, kill_node, cut_agent_off];
/// Faults for nodes whose memory is kept, so that one replica suffices.
const FAULTS_OF_KEPT: [Fault; 9] = [
    restart_kept_node,
    kill_agent,
    stop_kept_node,
    restart_kept_node,
    cut_node_off,
    kill_etcd,
    restart_kept_node_with_agent,
    cut_agent_off,
    stop_agent,
];
/// Faults for nodes that are emptied before their memory is lost, so that one replica suffices.
const FAULTS_OF_EMPTIED: [Fault; 5] =
    [withdraw_memory, replace_nodes, kill_agent_while_emptied, withdraw_memory, cut_node_off];
/// Faults for nodes that are killed while they are emptied.
const FAULTS_WHILE_EMPTIED: [Fault; 5] = [
    kill_emptied_node,
    kill_other_node_while_emptied,
    kill_agent_while_emptied,
    withdraw_memory,
    replace_nodes,
];

fn kill_agent(cluster: &Cluster, _: &mut Directory, _: usize) {
    restart_agent(cluster);
}

/// A stopped process, which is continued when this is dropped.
struct Stopped(u32);

impl Stopped {
    fn new(pid: u32) -> Self {
        processes::signal(pid, Signal::STOP);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        processes::signal(self.0, Signal::CONT);
    }
}

/// The node for a fault. Over the rounds, each node gets each fault.
fn node_of(time: usize) -> usize {
    (time + time / FAULTS.len()) % NODES + 1
}

fn restart_kept_node(cluster: &Cluster, _: &mut Directory, time: usize) {
    restart_node(cluster, node_of(time));
}

fn restart_kept_node_with_agent(cluster: &Cluster, _: &mut Directory, time: usize) {
    processes::kill(cluster.daemon("node", Some(node_of(time))));
    processes::kill(cluster.daemon("agent", None));
    start_missing(cluster, "Started");
}

/// Stops a node until its lease has ended. Programs that need it wait.
fn stop_kept_node(cluster: &Cluster, _: &mut Directory, time: usize) {
    let _stopped = Stopped::new(cluster.daemon("node", Some(node_of(time))));
    eventually("the agent to miss the node", || {
        let missing = status(cluster.agent_socket())?["missing_nodes"].as_array()?.len();
        (missing > 0).then_some(())
    });
}

fn stop_node(cluster: &Cluster, _: &mut Directory, time: usize) {
    let _stopped = Stopped::new(cluster.daemon("node", Some(node_of(time))));
    await_service(cluster);
}

/// Stops the agent. Meanwhile no fault is served, and requests for the status time out.
fn stop_agent(cluster: &Cluster, _: &mut Directory, _: usize) {
    let _stopped = Stopped::new(cluster.daemon("agent", None));
    assert!(cluster.status().is_object());
}

/// Waits until each page has a replica on another node.
fn await_replicas(cluster: &Cluster) {
    let is_whole = || (figure(cluster, "degraded_slabs")? == 0).then_some(());
    eventually("all pages to be on two nodes", is_whole);
}

fn kill_node(cluster: &Cluster, _: &mut Directory, time: usize) {
    await_replicas(cluster);
    kill_and_start_node(cluster, node_of(time));
}

/// Kills a node, and starts it again when programs are served without it.
fn kill_and_start_node(cluster: &Cluster, node: usize) {
    processes::kill(cluster.daemon("node", Some(node)));
    await_service(cluster);
    control(cluster, &["up"]);
    await_replicas(cluster);
}

/// Runs a command of `aquifer`, which must succeed.
fn control(cluster: &Cluster, words: &[&str]) {
    let output = cluster.command().args(words).output().expect("aquifer can be started");
    assert!(output.status.success(), "aquifer {words:?} failed: {}", text(&output.stderr));
}

/// Takes the memory of a node back in steps, and returns it.
fn withdraw_memory(cluster: &Cluster, _: &mut Directory, time: usize) {
    let node = node_of(time).to_string();
    for memory in ["128M", "32M", "0", "256M"] {
        control(cluster, &["lend", memory, "--node", &node]);
        await_service(cluster);
    }
}

/// Empties the nodes one after another, and starts each again by a file that was replaced.
fn replace_nodes(cluster: &Cluster, _: &mut Directory, _: usize) {
    for node in 1..=NODES {
        control(cluster, &["drain", &node.to_string()]);
        replace_binary(cluster);
        let process = cluster.daemon("node", Some(node));
        processes::signal(process, Signal::TERM);
        eventually("the node to end", || (!processes::is_alive(process)).then_some(()));
        start_missing(cluster, &format!("Started node-{node}"));
        cluster.await_nodes(NODES);
        await_service(cluster);
    }
}

/// Replaces the program of the cluster by a copy, as an upgrade does.
fn replace_binary(cluster: &Cluster) {
    let next = cluster.binary().with_extension("next");
    std::fs::copy(build::binary(), &next).expect("it can be copied");
    std::fs::rename(&next, cluster.binary()).expect("the folder is ours");
}

fn kill_agent_while_emptied(cluster: &Cluster, _: &mut Directory, time: usize) {
    let node = node_of(time).to_string();
    control(cluster, &["drain", &node, "--no-wait"]);
    restart_agent(cluster);
    control(cluster, &["drain", &node]);
    await_service(cluster);
    control(cluster, &["drain", &node, "--undo"]);
}

/// Kills the node from which replicas are moved.
fn kill_emptied_node(cluster: &Cluster, _: &mut Directory, time: usize) {
    await_replicas(cluster);
    let node = node_of(time);
    control(cluster, &["drain", &node.to_string(), "--no-wait"]);
    kill_and_start_node(cluster, node);
}

/// Kills a node to which replicas are moved.
fn kill_other_node_while_emptied(cluster: &Cluster, _: &mut Directory, time: usize) {
    await_replicas(cluster);
    let (node, other) = (node_of(time).to_string(), node_of(time) % NODES + 1);
    control(cluster, &["drain", &node, "--no-wait"]);
    kill_and_start_node(cluster, other);
    control(cluster, &["drain", &node]);
    control(cluster, &["drain", &node, "--undo"]);
}

fn kill_etcd(cluster: &Cluster, directory: &mut Directory, _: usize) {
    directory.etcd.member(0).kill();
    await_service(cluster);
    directory.etcd.member(0).restart();
    restart_agent(cluster);
}

/// Cuts a node off from the directory until its lease has ended. Programs use the node meanwhile.
fn cut_node_off(cluster: &Cluster, directory: &mut Directory, time: usize) {
    directory.relay.cut_off(Some(cluster.daemon("node", Some(node_of(time)))));
    cluster.await_nodes(NODES - 1);
    await_service(cluster);
    directory.relay.cut_off(None);
    cluster.await_nodes(NODES);
}

/// Cuts the agent off from the directory until its lease has ended. The programs wait for the next
/// agent.
fn cut_agent_off(cluster: &Cluster, directory: &mut Directory, _: usize) {
    let agent = cluster.daemon("agent", None);
    directory.relay.cut_off(Some(agent));
    eventually("the lease of the agent to end", || {
        find(&cluster.status(), "agents")?.as_array()?.is_empty().then_some(())
    });
    directory.relay.cut_off(None);
    // The agent starts its successor before it ends.
    eventually("the agent to end", || (!processes::is_alive(agent)).then_some(()));
    await_service(cluster);
}

fn play(cluster_options: &[&str], run_options: &[&str], what_happens: &[Fault]) {
    assert!(rustix::process::geteuid().is_root(), "needs root, to start PostgreSQL as another user");
    let seconds =
        std::env::var(SECONDS_VARIABLE).map_or(0, |text| text.parse().expect("a number of seconds"));
    let mut directory = Directory::start();
    let address = directory.address();
    let options = [&["--fabric", "tcp", "--directory", &address], cluster_options].concat();
    let mut shared = SharedCluster::up_with(NODES, &options);
    shared.cluster.set_run_options(run_options);
    let copy = shared.path("aquifer");
    shared.cluster.set_binary(&copy);
    let cluster = &shared.cluster;
    let postgres = Postgres::start(&shared, "24M");
    postgres.fill_tables();
    let redis = Redis::paged(cluster, cluster.state(), REDIS_LIMIT);
    let expected = redis.check("load", REDIS_BYTES);
    let stop = AtomicBool::new(false);
    let (faults, transactions) = std::thread::scope(|scope| {
        let books = scope.spawn(|| {
            let transactions = TRANSACTIONS.to_string();
            repeat(&stop, || {
                let _ = postgres.ask("pgbench", &["-n", "-c", "2", "-t", &transactions]);
            })
        });
        scope.spawn(|| {
            repeat(&stop, || assert_eq!(redis.check("load", REDIS_BYTES), expected));
        });
        scope.spawn(|| repeat(&stop, || check_once(cluster)));
        let started = Instant::now();
        let mut faults: usize = 0;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // Whole rounds: each fault occurs equally often.
            while faults == 0
                || !faults.is_multiple_of(what_happens.len())
                || started.elapsed() < Duration::from_secs(seconds)
            {
                await_service(cluster);
                what_happens[faults % what_happens.len()](cluster, &mut directory, faults);
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
    postgres.assert_balances(transactions);
    assert_eq!(redis.check("verify", REDIS_BYTES), expected);
    redis.stop().assert_success("redis-server on the pool");
    postgres.stop().assert_success("PostgreSQL on the pool");
    cluster.assert_all_free();
}

mod long {
    use super::*;

    #[test]
    fn nothing_is_lost_while_daemons_die_and_stop() {
        play(&[], &["--replicas", "2"], &FAULTS);
    }

    #[test]
    fn nothing_is_lost_while_nodes_restart_with_their_memory() {
        play(&["--keep-memory"], &[], &FAULTS_OF_KEPT);
    }

    #[test]
    fn nothing_is_lost_while_nodes_are_emptied() {
        play(&[], &[], &FAULTS_OF_EMPTIED);
    }

    #[test]
    fn nothing_is_lost_while_nodes_that_are_emptied_die() {
        play(&[], &["--replicas", "2"], &FAULTS_WHILE_EMPTIED);
    }
}
