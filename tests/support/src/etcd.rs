//! A real etcd, as `scripts/install-deps.sh test` installs it: on free ports, in temporary folders, gone when it is dropped.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// etcd says so when a member serves. Versions from 3.4 on agree in this.
const READY: &str = "ready to serve client requests";
/// A free port may be taken by another between looking and using.
const ATTEMPTS_MAX: u32 = 5;

/// How members are started.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where they listen, an address of the machine.
    pub host: IpAddr,
    /// What they are started by, such as `ip netns exec NAME`; as a rule nothing.
    pub wrapper: Vec<String>,
    /// Whether clients are spoken to by TLS, and the further arguments that this takes.
    pub tls: Option<Vec<String>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { host: Ipv4Addr::LOCALHOST.into(), wrapper: Vec::new(), tls: None }
    }
}

/// One member.
#[derive(Debug)]
pub struct Member {
    command: Vec<String>,
    _data: TempDir,
    client: SocketAddr,
    process: Option<Child>,
}

/// A cluster of members; most have one.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<Member>,
}

impl Etcd {
    /// Start one of a single member.
    ///
    /// # Panics
    /// If etcd is not installed or does not start.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(1, &Options::default())
    }

    /// Start one of so many members.
    ///
    /// # Panics
    /// If etcd is not installed or does not start.
    #[must_use]
    pub fn start_with(count: usize, options: &Options) -> Self {
        for _ in 0..ATTEMPTS_MAX {
            let mut etcd = Self { members: members(count, options) };
            // All before any is waited for: they serve when most of them are there.
            let outputs: Vec<_> = etcd.members.iter_mut().map(Member::spawn).collect();
            if outputs.into_iter().all(wait_ready) {
                return etcd;
            }
        }
        panic!("etcd does not start; its words are above");
    }

    /// Its members.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// One of its members.
    pub fn member(&mut self, number: usize) -> &mut Member {
        &mut self.members[number]
    }

    /// `etcd://HOST:PORT,…`
    #[must_use]
    pub fn address(&self) -> String {
        let members: Vec<_> = self.members.iter().map(|member| member.client.to_string()).collect();
        format!("etcd://{}", members.join(","))
    }
}

impl Member {
    /// Where its clients connect to.
    #[must_use]
    pub fn client(&self) -> SocketAddr {
        self.client
    }

    /// Kill it, as by SIGKILL or a loss of power of its machine's processor alone: what it wrote, is written.
    ///
    /// # Panics
    /// If it was dead.
    pub fn kill(&mut self) {
        let mut process = self.process.take().expect("it is alive");
        process.kill().expect("it can be killed");
        process.wait().expect("it is dead");
    }

    /// Start it again, with the data that it has.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self) {
        assert!(self.process.is_none(), "it is alive");
        assert!(wait_ready(self.spawn()), "etcd does not start again; its words are above");
    }

    /// Let it stand still, or go on.
    ///
    /// # Panics
    /// If it is dead.
    pub fn set_stopped(&self, stopped: bool) {
        let process = self.process.as_ref().expect("it is alive");
        let pid = Pid::from_child(process);
        let signal = if stopped { Signal::STOP } else { Signal::CONT };
        rustix::process::kill_process(pid, signal).expect("it is ours");
    }

    fn spawn(&mut self) -> ChildStderr {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap_or_else(|error| {
            panic!("{}: {error}; scripts/install-deps.sh test installs it", self.command[0])
        });
        let output = process.stderr.take().expect("it is piped");
        self.process = Some(process);
        output
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _dead = process.kill();
            let _waited = process.wait();
        }
    }
}

fn members(count: usize, options: &Options) -> Vec<Member> {
    // In another namespace no port is looked for here; whoever asks for one has it to itself.
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
            // Nobody to agree with, nothing to wait for.
            command.extend(["--heartbeat-interval", "10", "--election-timeout", "100"].map(str::to_owned));
        }
        command.extend(options.tls.iter().flatten().cloned());
        Member { command, _data: data, client, process: None }
    };
    (0..count).map(member).collect()
}

fn free_ports(count: usize) -> Vec<u16> {
    let held: Vec<_> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port")).collect();
    held.iter().map(|held| held.local_addr().expect("it is bound").port()).collect()
}

/// Read what a member says until it serves; `false` if it ends before.
fn wait_ready(output: ChildStderr) -> bool {
    let mut lines = BufReader::new(output).lines();
    let mut said = Vec::new();
    for line in lines.by_ref().map_while(Result::ok) {
        if line.contains(READY) {
            // It would stand still if nobody read on.
            std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
            return true;
        }
        said.push(line);
    }
    eprintln!("etcd said:\n{}", said[said.len().saturating_sub(20)..].join("\n"));
    false
}
