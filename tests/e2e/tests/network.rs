//! A cluster on hosts in network namespaces: paging, and segments that move between hosts.

pub mod cluster;

use std::path::Path;
use std::process::Command;

use aquifer_client::segments::Process;
use aquifer_tests_e2e::{build, eventually};

use self::cluster::{Cluster, Host, NODES, Node, Stopped, assert_no_wrong_byte};
use crate::segments::{self, PipedProgram, Programs, Relay, WordCounts};

#[test]
fn hosts_and_nodes_on_a_network_of_their_own() {
    let cluster = Cluster::up();
    // Both hosts at the same time, with half of the memory.
    let runs: Vec<_> = cluster.hosts.iter().map(|host| host.checker("1")).collect();
    for run in runs {
        run.wait().assert_success("the checker on a host of its own");
    }
    // A node that cannot reach etcd for a while loses only its record in the directory.
    cluster.nodes[0].to_etcd.stop();
    cluster.hosts.iter().for_each(|host| host.await_nodes(usize::from(NODES) - 1));
    cluster.nodes[0].to_etcd.resume();
    cluster.hosts.iter().for_each(|host| host.await_nodes(usize::from(NODES)));
    cluster.hosts[1].checker("1").wait().assert_success("the checker after a node has come back");
    // This host has no cluster of `aquifer up`, and reaches no etcd from here.
    let mut status = Command::new(build::binary());
    let told = status.arg("--state").arg(cluster.hosts[0].state.path()).arg("status").output();
    let told = String::from_utf8(told.expect("aquifer can be started").stdout).expect("text");
    assert!(told.contains("agent      running") && told.contains("node-1 "), "{told}");
}

/// The source program ends while the target still pulls, and the pages are all there.
#[test]
fn segments_move_between_hosts() {
    let cluster = Cluster::up();
    let [first, second] = [0, 1].map(|host: usize| cluster.hosts[host].state.path().join("agent.sock"));
    Relay::start([&first, &second], 150).assert_success(150);
    let program = super::examples::rust_example("word_counts");
    WordCounts::start([&first, &second], &program, 8, 1).assert_success();
    let programs = Programs::build();
    for (source, target) in [(&first, &second), (&second, &first)] {
        let get = programs.start(target, &["get", "target"]);
        assert_eq!(segments::end(programs.start(source, &["give", "source", "target"])), "done\n");
        assert_eq!(segments::end(get), "done\n");
    }
    let peer = programs.start(&second, &["peer", "away", "home"]);
    assert_eq!(segments::end(programs.start(&first, &["home", "home", "away"])), "done\n");
    assert_eq!(segments::end(peer), "done\n");
}

/// A page that cannot be pulled raises a signal, and is never read as zeros.
#[test]
fn a_touch_of_a_page_that_is_elsewhere_is_a_fault_when_the_agent_has_ended() {
    let mut cluster = Cluster::up_with_grace("2s");
    let [first, second] = [0, 1].map(|host: usize| cluster.hosts[host].state.path().join("agent.sock"));
    let programs = Programs::build();
    let mut orphans = ["explicit", "ahead"].map(|pulling| {
        let mut orphan = PipedProgram::with(programs.start(&second, &["orphan", pulling, pulling]));
        orphan.expect("open");
        assert_eq!(segments::end(programs.start(&first, &["give", "giver", pulling])), "done\n");
        orphan
    });
    let [first, second] = &mut cluster.hosts[..] else { panic!("there are two hosts") };
    // This agent sends no page any more, and the target cannot detect why.
    let _stopped = Stopped::new(first.agent());
    for orphan in &mut orphans {
        orphan.request();
        orphan.expect("received");
    }
    second.kill_agent();
    let [explicit, ahead] = &mut orphans;
    explicit.request();
    explicit.expect("SIGBUS");
    // No agent has come in time, and the process has lost its segments.
    ahead.expect("SIGSEGV");
}

/// The lease of a stopped agent may have ended for the other hosts, so its processes lose their
/// segments in time.
#[test]
fn a_process_whose_agent_is_stopped_loses_its_segments() {
    let cluster = Cluster::up_with_grace("2s");
    let agent = cluster.hosts[0].state.path().join("agent.sock");
    let programs = Programs::build();
    let mut orphan = PipedProgram::with(programs.start(&agent, &["own", "owner"]));
    orphan.expect("own");
    let _stopped = Stopped::new(cluster.hosts[0].agent());
    orphan.expect("SIGSEGV");
    let told = orphan.errors();
    assert!(told.contains("a touch of a segment that this process does not own (SIGSEGV)"), "{told}");
}

/// Both agents are killed and started again repeatedly. Programs wait for them, and find each
/// number where the pointers say.
#[test]
fn segments_move_between_hosts_whose_agents_are_killed() {
    move_and_kill(150, 12);
}

fn move_and_kill(turns: u32, kills_max: usize) {
    let mut cluster = Cluster::up();
    let sockets = [0, 1].map(|host: usize| cluster.hosts[host].state.path().join("agent.sock"));
    let mut players = Relay::start([&sockets[0], &sockets[1]], turns);
    let mut kills = 0;
    while !players.has_ended() {
        // After each, the segment moves at least once.
        for _ in 0..2 {
            let is_here = has_segments(&sockets[0]);
            eventually("the segment to move", || {
                (players.has_ended() || has_segments(&sockets[0]) != is_here).then_some(())
            });
        }
        if kills < kills_max {
            cluster.hosts[kills % 2].kill_agent();
            cluster.hosts[kills % 2].start_agent();
            kills += 1;
        }
    }
    players.assert_success(turns);
    assert_eq!(kills, kills_max);
}

/// Kills agents while maps of texts move, several at a time. The programs compare all counts.
fn count_and_kill(partitions: u32, times: usize, kills_max: usize) {
    let mut cluster = Cluster::up();
    let sockets = [0, 1].map(|host: usize| cluster.hosts[host].state.path().join("agent.sock"));
    let program = super::examples::rust_example("word_counts");
    let mut players = WordCounts::start([&sockets[0], &sockets[1]], &program, partitions, times);
    // An agent that is killed opens no names.
    eventually("partitions to move", || segments_at(&sockets[1])?.first().map(drop));
    let mut kills = 0;
    while !players.has_ended() && kills < kills_max {
        cluster.hosts[kills % 2].kill_agent();
        cluster.hosts[kills % 2].start_agent();
        kills += 1;
        eventually("the agent to answer", || segments_at(&sockets[(kills - 1) % 2]));
    }
    players.assert_success();
    assert_eq!(kills, kills_max);
}

/// The segments of processes at an agent; `None` if it does not answer.
fn segments_at(agent: &Path) -> Option<Vec<u64>> {
    let list = Process::open_at(agent, "observer").and_then(|observer| observer.list()).ok()?;
    Some(list.iter().map(|segment| segment.id).collect())
}

/// Whether processes at an agent own segments.
fn has_segments(agent: &Path) -> bool {
    segments_at(agent).is_some_and(|all| !all.is_empty())
}

/// A program with accounts on a host, and the number of payments that it has confirmed.
struct Ledger {
    program: PipedProgram,
    confirmed: u64,
}

impl Ledger {
    fn start(host: &Host, name: &str) -> Self {
        let mut command = host.inside(&super::examples::rust_example("ledger"));
        command.args([name, "7", "2"]);
        let agent = host.state.path().join("agent.sock");
        Self { program: PipedProgram::with(segments::start(&mut command, &agent)), confirmed: 0 }
    }

    /// The number in the next line that it prints, between these words.
    fn next(&mut self, before: &str, after: &str) -> u64 {
        let line = self.program.next_line();
        let number = line.trim_end().strip_prefix(before).and_then(|line| line.strip_suffix(after));
        let number = number.and_then(|number| number.parse().ok());
        number.unwrap_or_else(|| panic!("{line:?}: {}", self.program.errors()))
    }

    /// Waits until it has opened the accounts with all payments that were confirmed before.
    fn expect_at_least(&mut self, confirmed: u64) {
        self.confirmed = self.next("opened with ", " payments");
        assert!(self.confirmed >= confirmed, "{} of {confirmed} payments", self.confirmed);
    }

    fn confirm(&mut self, times: usize) {
        for _ in 0..times {
            let confirmed = self.next("", " payments");
            assert_eq!(confirmed, self.confirmed + 100);
            self.confirmed = confirmed;
        }
    }
}

/// A host dies with its processes repeatedly, and another one continues from the synced copies.
/// Services of nodes are killed as well.
#[test]
fn synced_data_outlive_their_host() {
    outlive(1);
}

fn outlive(deaths: usize) {
    let mut cluster = Cluster::up_with_grace("2s");
    cluster.nodes.iter_mut().for_each(Node::start_heaps);
    let mut confirmed = 0;
    for death in 0..=deaths {
        let (here, node) = (death % 2, death % usize::from(NODES));
        let mut ledger = Ledger::start(&cluster.hosts[here], ["bank", "branch"][here]);
        ledger.expect_at_least(confirmed);
        if death > 0 {
            cluster.hosts[1 - here].start_daemons();
        }
        ledger.confirm(3 + death % 5);
        cluster.nodes[node].kill_heaps();
        ledger.confirm(3);
        cluster.nodes[node].start_heaps();
        ledger.confirm(1 + death % 3);
        confirmed = ledger.confirmed;
        // In the middle of a sync, or of payments.
        drop(ledger);
        cluster.hosts[here].die();
    }
}

mod long {
    use super::*;

    /// Pages that a host has not handed over are lost with it, and restored as they were synced.
    #[test]
    fn synced_data_outlive_the_host_that_has_handed_them_over() {
        let mut cluster = Cluster::up_with_grace("2s");
        cluster.nodes.iter_mut().for_each(Node::start_heaps);
        let programs = Programs::build();
        let start = |host: &Host, words: &[&str]| {
            let agent = host.state.path().join("agent.sock");
            PipedProgram::with(programs.start_by(host.inside(&programs.path()), &agent, words))
        };
        let mut target = start(&cluster.hosts[1], &["lost", "target"]);
        let mut source = start(&cluster.hosts[0], &["synced", "first", "2"]);
        source.expect("synced");
        let mut request = Command::new(build::binary());
        request.arg("--state").arg(cluster.hosts[0].state.path()).args(["segment", "move", "9", "target"]);
        assert!(request.status().expect("aquifer can be started").success());
        target.expect("received");
        source.expect("done");
        cluster.hosts[0].die();
        target.request();
        target.expect("done");
    }

    #[test]
    fn synced_data_outlive_their_host() {
        outlive(40);
    }

    #[test]
    fn partitions_move_between_hosts_whose_agents_are_killed() {
        count_and_kill(24, 200, 6);
    }

    #[test]
    fn segments_move_between_hosts_whose_agents_are_killed() {
        move_and_kill(2500, 500);
    }

    /// As docs/guide/cluster.md says: the node's lease ends, programs with pages on it are ended
    /// with a message, and others continue.
    #[test]
    fn a_node_that_is_cut_off_costs_its_readers_a_message_and_no_wrong_byte() {
        let cluster = Cluster::up();
        let [first, second] = &cluster.hosts[..] else { panic!("there are two hosts") };
        let run = first.checker("1000000");
        first.await_paging();
        cluster.nodes[2].cut_off();
        let outcome = run.wait();
        assert!(!outcome.status.success(), "pages on that node are lost");
        assert_no_wrong_byte(&outcome);
        first.await_nodes(usize::from(NODES) - 1);
        second.await_nodes(usize::from(NODES) - 1);
        second.checker("1").wait().assert_success("the checker on the nodes that are left");
        cluster.nodes[2].reconnect();
        first.await_nodes(usize::from(NODES));
        first.checker("1").wait().assert_success("the checker when the node is back");
    }
}
