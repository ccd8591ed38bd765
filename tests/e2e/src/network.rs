//! Hosts in network namespaces on a bridge; needs root.
//!
//! The namespaces have this process's number in their names. They are removed when the network is
//! dropped, and those of a killed test by the next test.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fd::AsFd;
use rustix::process::{Pid, Signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const PREFIX: &str = "aquifer-e2e";
/// Name of the namespace with the bridge.
const HUB: &str = "hub";
const HUB_HOST: u8 = 254;

/// A bridge, and the hosts on it.
#[derive(Debug)]
pub struct Network {
    machines: Vec<String>,
}

/// A host: a namespace with an address.
#[derive(Clone, Debug)]
pub struct Machine {
    namespace: String,
    /// The host's address on the bridge.
    pub address: IpAddr,
}

fn ip(words: &[&str]) {
    let output = Command::new("ip")
        .args(words)
        .output()
        .expect("ip is installed; scripts/install-deps.sh test does so");
    assert!(output.status.success(), "ip {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
}

fn name(machine: &str) -> String {
    format!("{PREFIX}-{}-{machine}", std::process::id())
}

fn address(host: u8) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, host).into()
}

impl Network {
    /// Creates a bridge without hosts.
    ///
    /// # Panics
    /// Without root, or without ip.
    #[must_use]
    pub fn new() -> Self {
        remove_abandoned();
        let mut network = Self { machines: Vec::new() };
        let hub = name(HUB);
        ip(&["netns", "add", &hub]);
        network.machines.push(hub.clone());
        ip(&["-n", &hub, "link", "set", "lo", "up"]);
        ip(&["-n", &hub, "link", "add", "br0", "type", "bridge"]);
        ip(&["-n", &hub, "address", "add", &format!("{}/24", address(HUB_HOST)), "dev", "br0"]);
        ip(&["-n", &hub, "link", "set", "br0", "up"]);
        network
    }

    /// Adds a host with the address 10.77.0.`host`.
    ///
    /// # Panics
    /// If its namespace cannot be created.
    pub fn add(&mut self, machine: &str, host: u8) -> Machine {
        let (namespace, hub, port) = (name(machine), name(HUB), format!("p{host}"));
        ip(&["netns", "add", &namespace]);
        self.machines.push(namespace.clone());
        ip(&["-n", &hub, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &namespace]);
        ip(&["-n", &hub, "link", "set", &port, "master", "br0", "up"]);
        ip(&["-n", &namespace, "link", "set", "lo", "up"]);
        ip(&["-n", &namespace, "address", "add", &format!("{}/24", address(host)), "dev", "eth0"]);
        ip(&["-n", &namespace, "link", "set", "eth0", "up"]);
        Machine { namespace, address: address(host) }
    }

    /// The namespace with the bridge, as a host.
    #[must_use]
    pub fn hub(&self) -> Machine {
        Machine { namespace: name(HUB), address: address(HUB_HOST) }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The links are removed with their namespaces.
        self.machines.iter().for_each(|namespace| delete(namespace));
    }
}

fn delete(namespace: &str) {
    let deleted = Command::new("ip").args(["netns", "del", namespace]).status();
    if !deleted.is_ok_and(|status| status.success()) {
        eprintln!("the network namespace {namespace} could not be removed");
    }
}

/// Removes the namespaces of killed tests.
fn remove_abandoned() {
    let output = Command::new("ip").args(["netns", "list"]).output().expect("ip is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.split(' ').next());
    for namespace in names {
        let pid = namespace.strip_prefix(PREFIX).and_then(|rest| rest.split('-').nth(1)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| pid != std::process::id() && !crate::processes::is_alive(pid)) {
            delete(namespace);
        }
    }
}

impl Machine {
    /// The words of a command line that start a program on this host.
    #[must_use]
    pub fn wrapper(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.namespace].map(str::to_owned).to_vec()
    }

    /// Runs `act` on a thread in this host's namespace. Its sockets and threads are in the
    /// namespace, too.
    ///
    /// # Panics
    /// If `act` panics, or the namespace does not exist any more.
    pub fn inside<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.namespace)).expect("the namespace is there");
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root may");
                act()
            });
            thread.join().expect("it does not panic")
        })
    }
}

/// A daemon of a cluster, on a host of the network or on this machine. It is stopped when it is
/// dropped.
#[derive(Debug)]
pub struct RunningDaemon {
    process: Child,
    log: PathBuf,
}

impl RunningDaemon {
    /// Starts a daemon on a host, and waits until it serves.
    ///
    /// # Panics
    /// If it does not serve.
    #[must_use]
    pub fn start(machine: &Machine, state: &Path, arguments: &[&str]) -> Self {
        let wrapper = machine.wrapper();
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).arg(crate::build::binary());
        Self::start_by(command, state, arguments)
    }

    /// Starts a daemon on this machine, and waits until it serves.
    ///
    /// # Panics
    /// If it does not serve.
    #[must_use]
    pub fn start_here(state: &Path, arguments: &[&str]) -> Self {
        Self::start_by(Command::new(crate::build::binary()), state, arguments)
    }

    fn start_by(mut command: Command, state: &Path, arguments: &[&str]) -> Self {
        let log = state.join(format!("{}.stderr", arguments[0]));
        let mut process = command
            .arg("--state")
            .arg(state)
            .args(arguments)
            .arg("--detached")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("a temporary file can be written"))
            .spawn()
            .expect("it can be started");
        let said = std::io::read_to_string(process.stdout.take().expect("it is piped"));
        let daemon = Self { process, log };
        assert_eq!(said.expect("a pipe can be read"), "ready\n", "{arguments:?} does not serve");
        daemon
    }
}

impl RunningDaemon {
    /// Sends the daemon a signal.
    ///
    /// # Panics
    /// If it has ended before.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.process), signal).expect("it is ours");
    }

    /// Whether the daemon has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(Some(_)))
    }

    /// Kills the daemon and waits for its end.
    ///
    /// # Panics
    /// If it has ended before.
    pub fn kill(mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }
}

impl Drop for RunningDaemon {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ended = rustix::process::kill_process(Pid::from_child(&self.process), Signal::TERM);
        }
        let ended = crate::eventually::eventually_within(Duration::from_secs(20), || {
            self.process.try_wait().ok().flatten()
        });
        if ended.is_none() {
            let _killed = self.process.kill();
            let _waited = self.process.wait();
        }
        if std::thread::panicking() {
            let said = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<&str> = said.lines().collect();
            eprintln!("-- {}\n{}", self.log.display(), lines[lines.len().saturating_sub(20)..].join("\n"));
        }
    }
}
