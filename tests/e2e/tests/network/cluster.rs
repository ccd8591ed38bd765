//! A cluster on hosts in network namespaces, with delays on the network and with etcd.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use aquifer_tests_e2e::cluster::find;
use aquifer_tests_e2e::network::{Machine, Network, RunningDaemon};
use aquifer_tests_e2e::run::{Outcome, Running, mempool_share, status};
use aquifer_tests_e2e::{build, eventually, processes};
use aquifer_tests_support::{EtcdCluster, EtcdOptions, TcpRelay, state_folder};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// Delay in one direction, to a node and to etcd.
pub const DELAY: Duration = Duration::from_micros(200);
pub const LIMIT: &str = "8M";
pub const BYTES: &str = "16M";
pub const NODES: u8 = 3;

/// A node, and the relays between it and the other hosts.
pub struct Node {
    // Dropped before the node: its service of heaps, and the keeper of those.
    pub heaps: Option<(RunningDaemon, RunningDaemon)>,
    /// The command line of the service of heaps.
    pub heap_words: Vec<String>,
    pub machine: Machine,
    // Dropped first: the node ends its lease through a relay.
    pub _part: RunningDaemon,
    pub relay: TcpRelay,
    pub to_etcd: TcpRelay,
    pub state: TempDir,
}

/// A host with an agent.
pub struct Host {
    // Dropped before the keeper.
    pub agent: Option<RunningDaemon>,
    pub machine: Machine,
    /// The command line of the agent.
    pub words: Vec<String>,
    pub keeper: Option<RunningDaemon>,
    pub to_etcd: Option<TcpRelay>,
    pub grace: String,
    pub state: TempDir,
}

/// A cluster. Fields are dropped in their order, and the network is last.
pub struct Cluster {
    pub hosts: Vec<Host>,
    pub nodes: Vec<Node>,
    pub _etcd: EtcdCluster,
    pub _network: Network,
    pub _key: TempDir,
}

impl Cluster {
    pub fn up() -> Self {
        Self::up_with_grace("30s")
    }

    /// A cluster with this grace time of the agents.
    pub fn up_with_grace(grace: &str) -> Self {
        Self::up_with(grace, false)
    }

    /// A cluster with this grace time of the agents. Relayed agents can be cut off from etcd.
    pub fn up_with(grace: &str, is_relayed: bool) -> Self {
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

pub fn write_private(path: &Path, text: &str) {
    std::fs::write(path, text).expect("a temporary file can be written");
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("it is ours");
}

/// A relay in the namespace of the bridge.
pub fn relay(hub: &Machine, to: SocketAddr) -> TcpRelay {
    hub.inside(|| TcpRelay::start(SocketAddr::new(hub.address, 0), to, DELAY))
        .expect("the hub has free ports")
}

impl Node {
    pub fn start(network: &mut Network, id: u8, etcd: &EtcdCluster, key: &Path) -> Self {
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

    pub fn start_heaps(&mut self) {
        let words: Vec<&str> = self.heap_words.iter().map(String::as_str).collect();
        let keeper = RunningDaemon::start(&self.machine, self.state.path(), &["keeper"]);
        self.heaps = Some((RunningDaemon::start(&self.machine, self.state.path(), &words), keeper));
    }

    /// Kills the service of heaps and its keeper, so that no heap is left.
    pub fn kill_heaps(&mut self) {
        let (service, keeper) = self.heaps.take().expect("it runs");
        service.kill();
        keeper.kill();
    }

    /// Discards all packets to and from the node, without an error to either end.
    pub fn cut_off(&self) {
        self.relay.stop();
        self.to_etcd.stop();
    }

    pub fn reconnect(&self) {
        self.relay.resume();
        self.to_etcd.resume();
    }
}

impl Host {
    pub fn start(
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

    pub fn start_daemons(&mut self) {
        let words = ["keeper", "--grace", &self.grace];
        self.keeper = Some(RunningDaemon::start(&self.machine, self.state.path(), &words));
        self.start_agent();
    }

    /// A program on this host, without its arguments.
    pub fn inside(&self, program: &Path) -> Command {
        let wrapper = self.machine.wrapper();
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).arg(program);
        command
    }

    /// Kills the agent and its keeper, so that nothing of the host is left.
    pub fn die(&mut self) {
        self.kill_agent();
        self.keeper.take().expect("it runs").kill();
    }

    pub fn start_agent(&mut self) {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        self.agent = Some(RunningDaemon::start(&self.machine, self.state.path(), &words));
    }

    pub fn agent(&self) -> &RunningDaemon {
        self.agent.as_ref().expect("it runs")
    }

    pub fn kill_agent(&mut self) {
        self.agent.take().expect("it runs").kill();
    }

    /// The process that holds the agent's lock.
    pub fn agent_process(&self) -> Option<u32> {
        let text = std::fs::read_to_string(self.state.path().join("agent.lock")).ok()?;
        text.trim().parse().ok().filter(|pid| processes::is_alive(*pid))
    }

    /// The number of hosts with a lease, by the directory.
    pub fn count_hosts(&self) -> Option<usize> {
        let at = self.words.iter().position(|word| word == "--directory").expect("it has one");
        let mut command = self.inside(build::binary());
        command.arg("--state").arg(self.state.path()).args(["status", "--json"]);
        let output = command.args(&self.words[at..at + 2]).output().expect("aquifer can be started");
        let status: Value = serde_json::from_slice(&output.stdout).ok()?;
        find(&status, "agents")?.as_array().map(Vec::len)
    }

    pub fn faults(&self) -> Option<u64> {
        let status = status(&self.state.path().join("agent.sock"))?;
        status["runs"].as_array()?.iter().map(|run| run["faults"].as_u64()).sum()
    }

    /// Waits until the host's agent has this number of usable nodes.
    pub fn await_nodes(&self, count: usize) {
        eventually(&format!("the agent to see {count} nodes"), || {
            let nodes = status(&self.state.path().join("agent.sock"))?["nodes"].as_array()?.len();
            (nodes == count).then_some(())
        });
    }

    pub fn checker(&self, rounds: &str) -> Running {
        let checker = build::programs().join("checker");
        let mut command = Command::new(build::binary());
        command.arg("--state").arg(self.state.path()).args(["run", "--local", LIMIT, "--"]);
        command.arg(checker).args(["pages", "--bytes", BYTES, "--rounds", rounds]);
        Running::start(&mut command, false, mempool_share(&self.state.path().join("agent.sock")))
    }

    pub fn await_paging(&self) {
        eventually("a program to be paged", || {
            let status = status(&self.state.path().join("agent.sock"))?;
            let remote: u64 =
                status["runs"].as_array()?.iter().filter_map(|run| run["remote_bytes"].as_u64()).sum();
            (remote >= 6 << 20).then_some(())
        });
    }
}

pub fn assert_no_wrong_byte(outcome: &Outcome) {
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
}
/// A stopped daemon, which is continued when this is dropped.
pub struct Stopped<'a>(&'a RunningDaemon);

impl<'a> Stopped<'a> {
    pub fn new(daemon: &'a RunningDaemon) -> Self {
        daemon.signal(Signal::STOP);
        Self(daemon)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}
