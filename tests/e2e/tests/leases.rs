//! Parties that are stopped or cut off from the directory for a while, or that take over from one
//! that has ended.

use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::run::{Running, mempool_share, status};
use aquifer_tests_e2e::{build, eventually, processes};
use aquifer_tests_support::{EtcdCluster, TcpRelay, state_folder};

/// Seconds for which a node must be missing in the directory before the tests continue.
const MISSED_S: u64 = 3;

/// A node is used as long as it answers, also when its grace time would have passed.
#[test]
fn a_node_that_is_cut_off_from_the_directory_keeps_its_pages() {
    let etcd = EtcdCluster::start();
    let local = "127.0.0.1:0".parse().expect("an address");
    let relay = TcpRelay::start(local, etcd.members()[0].client(), Duration::ZERO).expect("a free port");
    let (direct, relayed) = (etcd.address(), format!("etcd://{}", relay.address()));
    let folder = state_folder();
    let state = folder.path();
    let _keeper = RunningDaemon::start_here(state, &["keeper", "--grace", "1s"]);
    let node = ["node", "--id", "1", "--memory", "256M", "--grace", "1s", "--directory", &relayed];
    let _node = RunningDaemon::start_here(state, &node);
    let agent = ["agent", "--mempool", "8M", "--grace", "1s", "--directory", &direct];
    let _agent = RunningDaemon::start_here(state, &agent);
    let socket = state.join("agent.sock");
    let mut command = Command::new(build::binary());
    command.arg("--state").arg(state).args(["run", "--local", "8M", "--"]);
    // Its children connect to the node anew.
    command.arg(build::programs().join("checker")).args(["fork", "--bytes", "16M", "--rounds", "1000000"]);
    let run = Running::start(&mut command, false, mempool_share(&socket));
    let faults = || -> Option<u64> {
        status(&socket)?["runs"].as_array()?.iter().map(|run| run["faults"].as_u64()).sum()
    };
    eventually("the program to be paged", || faults().filter(|faults| *faults > 2_000));
    relay.stop();
    eventually("the agent to miss the node", || {
        let since_s = status(&socket)?["missing_nodes"][0]["since_s"].as_u64()?;
        (UNIX_EPOCH.elapsed().ok()?.as_secs() >= since_s + MISSED_S).then_some(())
    });
    let before = eventually("the agent to answer", faults);
    eventually("the program to continue", || faults().filter(|faults| *faults > before + 5_000));
    relay.resume();
    eventually("the node to return", || {
        status(&socket)?["missing_nodes"].as_array()?.is_empty().then_some(())
    });
    let program = processes::descendants(run.pid()).first().copied().expect("it runs");
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
}

mod long {
    use aquifer_client::segments::Process;
    use aquifer_tests_e2e::{eventually, processes};

    use crate::network::cluster::{Cluster, Stopped, assert_no_wrong_byte};
    use crate::segments::{PipedProgram, Programs};

    /// The programs wait for it as long as for an agent.
    #[test]
    fn a_successor_waits_for_the_directory() {
        let mut cluster = Cluster::up_with("5m", true);
        let first = &mut cluster.hosts[0];
        let run = first.checker("1000000");
        first.await_paging();
        first.kill_agent();
        let (relay, log) =
            (first.to_etcd.take().expect("it is relayed"), first.state.path().join("agent.stderr"));
        relay.stop();
        std::thread::scope(|scope| {
            scope.spawn(|| first.start_agent());
            eventually("the successor to wait", || {
                let said = std::fs::read_to_string(&log).ok()?;
                said.contains("cannot take over from the previous daemon yet").then_some(())
            });
            relay.resume();
        });
        first.to_etcd = Some(relay);
        let faults = eventually("the next agent to serve", || first.faults());
        eventually("the program to continue", || first.faults().filter(|now| *now > faults + 2_000));
        let program = processes::descendants(run.pid()).first().copied().expect("it runs");
        processes::kill(program);
        assert_no_wrong_byte(&run.wait());
    }

    /// The keeper holds the socket of an agent that has ended: connections to it succeed, and
    /// nothing answers.
    #[test]
    fn a_process_loses_its_segments_before_another_host_can_have_them() {
        // Shorter than the wait for one answer of an agent, of 10 s.
        let mut cluster = Cluster::up_with("8s", true);
        let [first, second] = &mut cluster.hosts[..] else { panic!("there are two hosts") };
        let agents = [&first, &second].map(|host| host.state.path().join("agent.sock"));
        let mut owner = PipedProgram::with(Programs::build().start(&agents[0], &["own", "owner"]));
        owner.expect("own");
        let taker = Process::open_at(&agents[1], "taker").expect("the agent runs");
        first.to_etcd.as_ref().expect("it is relayed").stop();
        eventually("its lease to end", || second.count_hosts().filter(|count| *count == 1));
        let _stopped = Stopped::new(first.keeper.as_ref().expect("it runs"));
        first.agent.take().expect("it runs").kill();
        let killed = nanoseconds();
        let _segment = eventually("another host to have the segment", || taker.allocate(1, 4096).ok());
        let taken = nanoseconds();
        owner.expect("SIGSEGV");
        let line = owner.next_line();
        let touched: i64 = line.trim_end().parse().expect("nanoseconds");
        assert!(touched < taken, "two processes have it");
        let after_ms = |end: i64| (end - killed) / 1_000_000;
        println!(
            "the process lost its access {} ms after its agent's end, and another host had it after {} ms",
            after_ms(touched),
            after_ms(taken)
        );
    }

    /// The time of the monotonic clock.
    fn nanoseconds() -> i64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        now.tv_sec * 1_000_000_000 + now.tv_nsec
    }

    /// By docs/guide/cluster.md, nodes refuse the host, and the next agent resumes its programs.
    #[test]
    fn programs_wait_for_an_agent_that_is_cut_off_from_the_directory() {
        let mut cluster = Cluster::up_with("5m", true);
        let [first, second] = &mut cluster.hosts[..] else { panic!("there are two hosts") };
        let run = first.checker("1000000");
        first.await_paging();
        let agent = first.agent_process().expect("it runs");
        first.to_etcd.as_ref().expect("it is relayed").stop();
        eventually("its lease to end", || second.count_hosts().filter(|count| *count == 1));
        first.to_etcd.as_ref().expect("it is relayed").resume();
        let end = || first.agent.as_mut().expect("it was started").has_ended().then_some(());
        eventually("the agent to end", end);
        let next = eventually("the next agent", || first.agent_process().filter(|next| *next != agent));
        let faults = eventually("the next agent to serve", || first.faults());
        eventually("the program to continue", || first.faults().filter(|now| *now > faults + 2_000));
        let program = processes::descendants(run.pid()).first().copied().expect("it runs");
        processes::kill(program);
        assert_no_wrong_byte(&run.wait());
        processes::kill(next);
    }
}
