//! A cluster on hosts in network namespaces, with delays on the network and with etcd.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use aquifer_client::segments::Process;
use aquifer_tests_e2e::cluster::find;
use aquifer_tests_e2e::network::{Machine, Network, RunningDaemon};
use aquifer_tests_e2e::run::{Outcome, Running, mempool_share, status};
use aquifer_tests_e2e::{build, eventually, processes};
use aquifer_tests_support::{EtcdCluster, EtcdOptions, TcpRelay, state_folder};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::segments::{self, PipedProgram, Programs, Relay, WordCounts};

/// Delay in one direction, to a node and to etcd.
const DELAY: Duration = Duration::from_micros(200);
const LIMIT: &str = "8M";
const BYTES: &str = "16M";
const NODES: u8 = 3;

/// A node, and the relays between it and the other hosts.
struct Node {
    // Dropped before the node: its service of heaps, and the keeper of those.
    heaps: Option<(RunningDaemon, RunningDaemon)>,
    /// The command line of the service of heaps.
    heap_words: Vec<String>,
    machine: Machine,
    // Dropped first: the node ends its lease through a relay.
    _part: RunningDaemon,
    relay: TcpRelay,
    to_etcd: TcpRelay,
    state: TempDir,
}

/// A host with an agent.
struct Host {
    // Dropped before the keeper.
    agent: Option<RunningDaemon>,
    machine: Machine,
    /// The command line of the agent.
    words: Vec<String>,
    keeper: Option<RunningDaemon>,
    to_etcd: Option<TcpRelay>,
    grace: String,
    state: TempDir,
}

/// A cluster. Fields are dropped in their order, and the network is last.
struct Cluster {
    hosts: Vec<Host>,
    nodes: Vec<Node>,
    _etcd: EtcdCluster,
    _network: Network,
    _key: TempDir,
}

impl Cluster {
    fn up() -> Self {
        Self::up_with_grace("30s")
    }

    /// A cluster whose agents may be away for so long.
    fn up_with_grace(grace: &str) -> Self {
        Self::up_with(grace, false)
    }

    /// The same; agents that are relayed can be cut off from etcd.
    fn up_with(grace: &str, is_relayed: bool) -> Self {
        let key = TempDir::with_prefix("aquifer-e2e-").expect("a temporary folder can be made");
        let key_file = key.path().join("cluster.key");
        write_private(&key_file, &"5a".repeat(32));
        let mut network = Network::new();
        let place = network.add("etcd", 2);
        let options = EtcdOptions { host: place.address, wrapper: place.wrapper(), tls: None };
        let etcd = EtcdCluster::start_with(1, &options);
        let nodes = (1..=NODES).map(|id| Node::start(&mut network, id, &etcd, &key_file)).collect();
        let hosts = (1..=2)
            .map(|number| Host::start(&mut network, number, &etcd, (&key_file, grace, is_relayed)))
            .collect();
        let cluster = Self { hosts, nodes, _etcd: etcd, _network: network, _key: key };
        cluster.hosts.iter().for_each(|host| host.await_nodes(usize::from(NODES)));
        cluster
    }
}

fn write_private(path: &Path, text: &str) {
    std::fs::write(path, text).expect("a temporary file can be written");
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("it is ours");
}

/// A relay in the namespace of the bridge.
fn relay(hub: &Machine, to: SocketAddr) -> TcpRelay {
    hub.inside(|| TcpRelay::start(SocketAddr::new(hub.address, 0), to, DELAY))
        .expect("the hub has free ports")
}

impl Node {
    fn start(network: &mut Network, id: u8, etcd: &EtcdCluster, key: &Path) -> Self {
        let machine = network.add(&format!("node{id}"), 10 + id);
        let hub = network.hub();
        let listen = SocketAddr::new(machine.address, 7400);
        let relay_to_node = relay(&hub, listen);
        let to_etcd = relay(&hub, etcd.members()[0].client());
        let state = state_folder();
        let config = state.path().join("node.toml");
        let text = format!(
            "id = {id}\nmemory = \"64M\"\nlisten = \"{listen}\"\nadvertise = \"{}\"\nkey = \
                \"{}\"\nencrypt = true\n\
             [directory]\naddress = \"etcd://{}/net\"\n",
            relay_to_node.address(),
            key.display(),
            to_etcd.address(),
        );
        std::fs::write(&config, text).expect("a temporary file can be written");
        let config = config.to_str().expect("a plain path").to_owned();
        let part = RunningDaemon::start(&machine, state.path(), &["node", "--config", &config]);
        let heaps = format!("{}:7401", machine.address);
        let (directory, number) = (format!("etcd://{}/net", to_etcd.address()), id.to_string());
        let key = key.to_str().expect("a plain path");
        let words = ["heap-service", "--id", &number, "--memory", "32M", "--listen", &heaps, "--key", key];
        let words = [&words[..], &["--directory", &directory]].concat();
        let heap_words = words.into_iter().map(str::to_owned).collect();
        Self { heaps: None, heap_words, machine, _part: part, relay: relay_to_node, to_etcd, state }
    }

    fn start_heaps(&mut self) {
        let words: Vec<&str> = self.heap_words.iter().map(String::as_str).collect();
        let keeper = RunningDaemon::start(&self.machine, self.state.path(), &["keeper"]);
        self.heaps = Some((RunningDaemon::start(&self.machine, self.state.path(), &words), keeper));
    }

    /// Nothing of the heaps is left.
    fn kill_heaps(&mut self) {
        let (service, keeper) = self.heaps.take().expect("it runs");
        service.kill();
        keeper.kill();
    }

    /// Discards all packets to and from the node, without an error to either end.
    fn cut_off(&self) {
        self.relay.stop();
        self.to_etcd.stop();
    }

    fn reconnect(&self) {
        self.relay.resume();
        self.to_etcd.resume();
    }
}

impl Host {
    fn start(
        network: &mut Network,
        number: u8,
        etcd: &EtcdCluster,
        (key, grace, is_relayed): (&Path, &str, bool),
    ) -> Self {
        let machine = network.add(&format!("host{number}"), 20 + number);
        let state = state_folder();
        let to_etcd = is_relayed.then(|| relay(&network.hub(), etcd.members()[0].client()));
        let address = to_etcd.as_ref().map(|relay| format!("etcd://{}", relay.address()));
        let directory = format!("{}/net", address.unwrap_or_else(|| etcd.address()));
        let key = key.to_str().expect("a plain path");
        let listen = SocketAddr::new(machine.address, 7500).to_string();
        let words = ["agent", "--mempool", "8M", "--key", key, "--directory", &directory, "--grace", grace];
        let words = [&words[..], &["--segment-listen", &listen]].concat();
        let words = words.into_iter().map(str::to_owned).collect();
        let grace = grace.to_owned();
        let mut host = Self { agent: None, machine, words, keeper: None, to_etcd, grace, state };
        host.start_daemons();
        host
    }

    fn start_daemons(&mut self) {
        let words = ["keeper", "--grace", &self.grace];
        self.keeper = Some(RunningDaemon::start(&self.machine, self.state.path(), &words));
        self.start_agent();
    }

    /// A program on this host, without its arguments.
    fn inside(&self, program: &Path) -> Command {
        let wrapper = self.machine.wrapper();
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).arg(program);
        command
    }

    /// Nothing of the host is left.
    fn die(&mut self) {
        self.kill_agent();
        self.keeper.take().expect("it runs").kill();
    }

    fn start_agent(&mut self) {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        self.agent = Some(RunningDaemon::start(&self.machine, self.state.path(), &words));
    }

    fn agent(&self) -> &RunningDaemon {
        self.agent.as_ref().expect("it runs")
    }

    fn kill_agent(&mut self) {
        self.agent.take().expect("it runs").kill();
    }

    /// The process that holds the agent's lock.
    fn agent_process(&self) -> Option<u32> {
        let text = std::fs::read_to_string(self.state.path().join("agent.lock")).ok()?;
        text.trim().parse().ok().filter(|pid| processes::is_alive(*pid))
    }

    /// The number of hosts with a lease, by the directory.
    fn count_hosts(&self) -> Option<usize> {
        let at = self.words.iter().position(|word| word == "--directory").expect("it has one");
        let mut command = self.inside(build::binary());
        command.arg("--state").arg(self.state.path()).args(["status", "--json"]);
        let output = command.args(&self.words[at..at + 2]).output().expect("aquifer can be started");
        let status: Value = serde_json::from_slice(&output.stdout).ok()?;
        find(&status, "agents")?.as_array().map(Vec::len)
    }

    fn faults(&self) -> Option<u64> {
        let status = status(&self.state.path().join("agent.sock"))?;
        status["runs"].as_array()?.iter().map(|run| run["faults"].as_u64()).sum()
    }

    /// Waits until its agent has this number of usable nodes.
    fn await_nodes(&self, count: usize) {
        eventually(&format!("the agent to see {count} nodes"), || {
            let nodes = status(&self.state.path().join("agent.sock"))?["nodes"].as_array()?.len();
            (nodes == count).then_some(())
        });
    }

    fn checker(&self, rounds: &str) -> Running {
        let checker = build::programs().join("checker");
        let mut command = Command::new(build::binary());
        command.arg("--state").arg(self.state.path()).args(["run", "--local", LIMIT, "--"]);
        command.arg(checker).args(["pages", "--bytes", BYTES, "--rounds", rounds]);
        Running::start(&mut command, false, mempool_share(&self.state.path().join("agent.sock")))
    }

    fn await_paging(&self) {
        eventually("a program to be paged", || {
            let status = status(&self.state.path().join("agent.sock"))?;
            let remote: u64 =
                status["runs"].as_array()?.iter().filter_map(|run| run["remote_bytes"].as_u64()).sum();
            (remote >= 6 << 20).then_some(())
        });
    }
}

fn assert_no_wrong_byte(outcome: &Outcome) {
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
}

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

/// A stopped daemon, which is continued when this is dropped.
struct Stopped<'a>(&'a RunningDaemon);

impl<'a> Stopped<'a> {
    fn new(daemon: &'a RunningDaemon) -> Self {
        daemon.signal(Signal::STOP);
        Self(daemon)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

/// A page that cannot come is a fault, and never zeros.
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
    // No page comes from here any more, and the target does not know why.
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

/// An agent that is stopped may have been given up by the other hosts: its processes lose their
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

/// Both agents are killed and started again all the time. Programs wait for them, and find each
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

/// The same with maps of texts, of which several move at a time. The programs compare all counts.
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

/// A program with accounts on a host, and what it has confirmed.
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

/// A host dies with its processes, again and again, and another one goes on from what was synced.
/// Services of nodes are killed as well.
#[test]
fn what_was_synced_outlives_its_host() {
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
    fn what_was_synced_outlives_the_host_that_has_handed_it_over() {
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
    fn what_was_synced_outlives_its_host() {
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
        let _segment = eventually("another host to have the segment", || taker.allocate(1, 4096).ok());
        let taken = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        owner.expect("SIGSEGV");
        let line = owner.next_line();
        let touched: i64 = line.trim_end().parse().expect("nanoseconds");
        assert!(touched < taken.tv_sec * 1_000_000_000 + taken.tv_nsec, "two processes have it");
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
        eventually("the program to go on", || first.faults().filter(|now| *now > faults + 2_000));
        let program = processes::descendants(run.pid()).first().copied().expect("it runs");
        processes::kill(program);
        assert_no_wrong_byte(&run.wait());
        processes::kill(next);
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
