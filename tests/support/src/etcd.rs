//! A real etcd on free ports, with its data in temporary folders. Dropping it stops it.
//!
//! `scripts/install-deps.sh test` installs etcd.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// The log text of a member of etcd that serves, in version 3.4 and newer.
const READY: &str = "ready to serve client requests";
/// Attempts to start: another process may use a port that was free before.
const ATTEMPTS_MAX: u32 = 5;

/// Options of all members.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// The address at which the members listen.
    pub host: IpAddr,
    /// A command that starts the members, such as `ip netns exec NAME`; may be empty.
    pub wrapper: Vec<String>,
    /// The arguments for TLS with clients; `None` without TLS.
    pub tls: Option<Vec<String>>,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self { host: Ipv4Addr::LOCALHOST.into(), wrapper: Vec::new(), tls: None }
    }
}

/// A member of a cluster: one process of etcd.
#[derive(Debug)]
pub struct EtcdServer {
    command: Vec<String>,
    _data: TempDir,
    client: SocketAddr,
    process: Option<Child>,
}

/// A cluster of etcd members.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<EtcdServer>,
}

impl EtcdCluster {
    /// Starts a cluster of one member.
    ///
    /// # Panics
    /// If etcd is not installed, or does not start.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(1, &EtcdOptions::default())
    }

    /// Starts a cluster of `count` members.
    ///
    /// # Panics
    /// If etcd is not installed, or does not start.
    #[must_use]
    pub fn start_with(count: usize, options: &EtcdOptions) -> Self {
        for _ in 0..ATTEMPTS_MAX {
            let mut etcd = Self { members: members(count, options) };
            // Start all before waiting for one: members serve once a majority runs.
            let outputs: Vec<_> = etcd.members.iter_mut().map(EtcdServer::spawn).collect();
            if outputs.into_iter().all(wait_ready) {
                return etcd;
            }
        }
        panic!("etcd does not start; its output is above");
    }

    /// The members.
    #[must_use]
    pub fn members(&self) -> &[EtcdServer] {
        &self.members
    }

    /// A member, by its number from 0.
    pub fn member(&mut self, number: usize) -> &mut EtcdServer {
        &mut self.members[number]
    }

    /// The address of the cluster: `etcd://HOST:PORT,…`.
    #[must_use]
    pub fn address(&self) -> String {
        let members: Vec<_> = self.members.iter().map(|member| member.client.to_string()).collect();
        format!("etcd://{}", members.join(","))
    }
}

impl EtcdServer {
    /// The address for clients.
    #[must_use]
    pub fn client(&self) -> SocketAddr {
        self.client
    }

    /// Kills the process with SIGKILL. Data that it has written stays.
    ///
    /// # Panics
    /// If the process does not run.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("the process runs");
        process.kill().expect("a child can be killed");
        process.wait().expect("a killed child ends");
    }

    /// Starts the process again, with its present data.
    ///
    /// # Panics
    /// If the process runs, or does not start.
    pub fn restart(&mut self) {
        assert!(self.process.is_none(), "the process runs");
        assert!(wait_ready(self.spawn()), "etcd does not start again; its output is above");
    }

    /// Stops the process with SIGSTOP, or resumes it with SIGCONT.
    ///
    /// # Panics
    /// If the process does not run.
    pub fn set_stopped(&self, is_stopped: bool) {
        let process = self.process.as_ref().expect("the process runs");
        let pid = Pid::from_child(process);
        let signal = if is_stopped { Signal::STOP } else { Signal::CONT };
        rustix::process::kill_process(pid, signal).expect("a child can be signalled");
    }

    fn spawn(&mut self) -> ChildStderr {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap_or_else(|error| {
            panic!("{}: {error}; scripts/install-deps.sh test installs it", self.command[0])
        });
        let output = process.stderr.take().expect("standard error is piped");
        self.process = Some(process);
        output
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _dead = process.kill();
            let _waited = process.wait();
        }
    }
}

fn members(count: usize, options: &EtcdOptions) -> Vec<EtcdServer> {
    // With a wrapper, the ports are used in another network namespace, where all ports are free.
    let ports = free_ports(2 * count);
    let at = |port: u16| SocketAddr::new(options.host, port);
    let peer_urls: Vec<_> = ports[count..].iter().map(|port| format!("http://{}", at(*port))).collect();
    let cluster: Vec<_> = peer_urls.iter().enumerate().map(|(name, url)| format!("m{name}={url}")).collect();
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let member = |number: usize| {
        let data = TempDir::with_prefix("aquifer-etcd-").expect("a temporary folder can be made");
        let client = at(ports[number]);
        let client_url = format!("{scheme}://{client}");
        let mut command = options.wrapper.clone();
        command.push("etcd".to_owned());
        command.extend(
            [
                ("--name", format!("m{number}")),
                ("--data-dir", data.path().display().to_string()),
                ("--listen-client-urls", client_url.clone()),
                ("--advertise-client-urls", client_url),
                ("--listen-peer-urls", peer_urls[number].clone()),
                ("--initial-advertise-peer-urls", peer_urls[number].clone()),
                ("--initial-cluster", cluster.join(",")),
            ]
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value]),
        );
        if count == 1 {
            // A single member needs no time for elections.
            command.extend(["--heartbeat-interval", "10", "--election-timeout", "100"].map(str::to_owned));
        }
        command.extend(options.tls.iter().flatten().cloned());
        EtcdServer { command, _data: data, client, process: None }
    };
    (0..count).map(member).collect()
}

fn free_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<_> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("the listener is bound").port()).collect()
}

/// Reads the output of a member until it serves; returns false if it ends before.
fn wait_ready(output: ChildStderr) -> bool {
    let mut lines = BufReader::new(output).lines();
    let mut output_lines = Vec::new();
    for line in lines.by_ref().map_while(Result::ok) {
        if line.contains(READY) {
            // The member would block on a full pipe.
            std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
            return true;
        }
        output_lines.push(line);
    }
    eprintln!("output of etcd:\n{}", output_lines[output_lines.len().saturating_sub(20)..].join("\n"));
    false
}
