//! Machines in network namespaces, on a bridge: what needs a network of its own, and root.
//!
//! Names have this process' number in them. All goes when it is dropped, and what a killed test
//! left is removed by the next.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fd::AsFd;
use rustix::process::{Pid, Signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const PREFIX: &str = "aquifer-e2e";
/// The bridge is in this namespace, and whoever has no machine.
const HUB: &str = "hub";
const HUB_HOST: u8 = 254;

/// A bridge, and machines on it.
#[derive(Debug)]
pub struct Network {
    machines: Vec<String>,
}

/// A machine: a namespace with an address.
#[derive(Clone, Debug)]
pub struct Machine {
    namespace: String,
    /// Its address on the bridge.
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
    /// A bridge with nobody on it.
    ///
    /// # Panics
    /// Without root, or without ip.
    #[must_use]
    pub fn new() -> Self {
        remove_left_behind();
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

    /// One more machine, with the address 10.77.0.`host`.
    ///
    /// # Panics
    /// If it cannot be had.
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

    /// The machine that the bridge is in.
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
        // The links go with their namespaces.
        self.machines.iter().for_each(|namespace| delete(namespace));
    }
}

fn delete(namespace: &str) {
    let deleted = Command::new("ip").args(["netns", "del", namespace]).status();
    if !deleted.is_ok_and(|status| status.success()) {
        eprintln!("the network namespace {namespace} could not be removed");
    }
}

/// Namespaces of tests that were killed.
fn remove_left_behind() {
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
    /// What starts a program on it.
    #[must_use]
    pub fn wrapper(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.namespace].map(str::to_owned).to_vec()
    }

    /// Do something as a thread of this machine: sockets that it makes, and threads that it starts,
    /// are there too.
    ///
    /// # Panics
    /// If `act` does, or there is no such machine any more.
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

/// A part of a cluster, on one of the machines or on this one. It ends when it is dropped.
#[derive(Debug)]
pub struct Part {
    process: Child,
    log: PathBuf,
}

impl Part {
    /// Start a part, and wait until it serves.
    ///
    /// # Panics
    /// If it does not.
    #[must_use]
    pub fn start(machine: &Machine, state: &Path, arguments: &[&str]) -> Self {
        let wrapper = machine.wrapper();
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).arg(crate::build::binary());
        Self::start_by(command, state, arguments)
    }

    /// The same, on this machine.
    ///
    /// # Panics
    /// If it does not serve.
    #[must_use]
    pub fn start_here(state: &Path, arguments: &[&str]) -> Self {
        Self::start_by(Command::new(crate::build::binary()), state, arguments)
    }

    fn start_by(mut command: Command, state: &Path, arguments: &[&str]) -> Self {
        let log = state.join(format!("{}.said", arguments[0]));
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
        let part = Self { process, log };
        assert_eq!(said.expect("a pipe can be read"), "ready\n", "{arguments:?} does not serve");
        part
    }
}

impl Part {
    /// Kill it, and wait until it is gone.
    ///
    /// # Panics
    /// If it cannot be.
    pub fn kill(mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ended = rustix::process::kill_process(Pid::from_child(&self.process), Signal::TERM);
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
