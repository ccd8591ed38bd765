//! Two agents that hand segments over to each other.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aquifer::Fabric;
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::cluster::{Cluster, aquifer_program};
use aquifer_bench::support::procs::cpu_us;
use aquifer_bench::support::{folder, interrupt};
use tempfile::TempDir;

/// Longest time to wait for the socket of a daemon.
const START_TIMEOUT: Duration = Duration::from_secs(20);
const SOCKET_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Memory for segments of each agent.
const SEGMENT_MEMORY: &str = "8G";

/// A directory, and two agents as of two hosts. Dropping this ends the processes.
#[derive(Debug)]
pub struct Hosts {
    hosts: [Host; 2],
    _cluster: Cluster,
}

#[derive(Debug)]
struct Host {
    state: TempDir,
    daemons: Vec<Child>,
}

impl Hosts {
    /// Starts the processes, with a limit of the rate at which agents pull ahead of programs.
    ///
    /// # Errors
    /// If a process does not start.
    pub fn start(pull_rate: Option<&str>) -> Result<Self, BenchError> {
        let cluster = Cluster::up(64 << 20, Fabric::Tcp, None)?;
        let hosts = [Host::start(cluster.state(), pull_rate)?, Host::start(cluster.state(), pull_rate)?];
        Ok(Self { hosts, _cluster: cluster })
    }

    /// The processor time of the first agent, in s.
    pub fn agent_cpu_s(&self) -> f64 {
        self.hosts[0].daemons.last().map_or(0.0, |agent| float(cpu_us(agent.id())) / 1e6)
    }

    /// The sockets of the agents.
    pub fn agents(&self) -> [PathBuf; 2] {
        [0, 1].map(|host: usize| self.hosts[host].socket())
    }
}

/// A node with memory for heaps, and an agent as of another host.
#[derive(Debug)]
pub struct SyncHost {
    host: Host,
    _cluster: Cluster,
}

impl SyncHost {
    /// Starts the processes, with `heap_bytes` of memory for heaps.
    ///
    /// # Errors
    /// If a process does not start.
    pub fn start(heap_bytes: u64) -> Result<Self, BenchError> {
        let cluster = Cluster::up_with_heaps(64 << 20, heap_bytes)?;
        Ok(Self { host: Host::start(cluster.state(), None)?, _cluster: cluster })
    }

    /// The socket of the agent.
    pub fn agent(&self) -> PathBuf {
        self.host.socket()
    }
}

impl Host {
    fn start(cluster: &Path, pull_rate: Option<&str>) -> Result<Self, BenchError> {
        let mut host = Self { state: folder::create("aquifer-bench-host-")?, daemons: Vec::new() };
        host.daemon("keeper.sock", &["keeper"])?;
        let (key, directory) = (cluster.join("cluster.key"), cluster.join("directory.sock"));
        let (key, directory) = (key.display().to_string(), format!("unix:{}", directory.display()));
        let words = ["agent", "--mempool", "8M", "--key", &key, "--directory", &directory];
        let listen = ["--segment-listen", "127.0.0.1:0", "--segment-memory", SEGMENT_MEMORY];
        let rate: Vec<&str> = pull_rate.into_iter().flat_map(|rate| ["--segment-pull-rate", rate]).collect();
        host.daemon("agent.sock", &[&words[..], &listen, &rate].concat())?;
        Ok(host)
    }

    fn socket(&self) -> PathBuf {
        self.state.path().join("agent.sock")
    }

    /// Starts a daemon, and waits for its socket.
    fn daemon(&mut self, socket: &str, words: &[&str]) -> Result<(), BenchError> {
        let mut command = Command::new(aquifer_program()?);
        command.arg("--state").arg(self.state.path()).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let daemon = command.spawn().map_err(BenchError::io("start", Path::new("aquifer")))?;
        self.daemons.push(daemon);
        let socket = self.state.path().join(socket);
        let end = Instant::now() + START_TIMEOUT;
        while !socket.exists() {
            interrupt::check()?;
            let newest = self.daemons.last_mut();
            let has_ended = newest.is_some_and(|daemon| daemon.try_wait().is_ok_and(|end| end.is_some()));
            if has_ended || Instant::now() > end {
                return Err(BenchError::Cluster {
                    what: "agent",
                    status: "the daemon has not started".into(),
                    message: words.join(" "),
                });
            }
            std::thread::sleep(SOCKET_POLL_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for mut daemon in self.daemons.drain(..).rev() {
            // The daemons hold nothing that is still needed.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
