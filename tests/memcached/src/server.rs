//! Starts and stops memcached and `aquifer cache`.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use aquifer_tests_e2e::eventually::eventually;
use aquifer_tests_e2e::{build, processes};
use aquifer_tests_support::skip;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, connect, getsockname, socket, sockopt};
use rustix::process::Signal;

use crate::connection::Connection;

/// Most attempts to start a server, each on another free port.
const ATTEMPTS: usize = 10;

/// A program that serves memcached's protocols.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// Debian's memcached.
    Memcached,
    /// `aquifer cache`.
    Aquifer,
}

/// The options with which a server is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program.
    pub program: Program,
    /// The limit of memory, in MiB.
    pub memory_mib: u32,
    /// Further arguments, which both programs accept.
    pub arguments: Vec<String>,
    /// The path of a Unix socket, which replaces the port.
    pub socket_path: Option<PathBuf>,
    /// The file for standard error.
    pub log: Option<PathBuf>,
    /// Environment variables.
    pub environment: Vec<(String, String)>,
    /// Whether memcached's threads that move items between its queues are disabled. While they
    /// refer to an item, `decr` does not pad it.
    pub is_deterministic: bool,
}

impl Options {
    /// Options of a program. memcached has more memory, because it reuses freed memory late.
    #[must_use]
    pub fn new(program: Program) -> Self {
        let memory_mib = match program {
            Program::Memcached => 1024,
            Program::Aquifer => 64,
        };
        Self {
            program,
            memory_mib,
            arguments: Vec::new(),
            socket_path: None,
            log: None,
            environment: Vec::new(),
            is_deterministic: true,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(ToString::to_string));
        self
    }

    /// Listens on a socket instead of a port.
    #[must_use]
    pub fn on_socket(mut self, path: &Path) -> Self {
        self.socket_path = Some(path.to_owned());
        self
    }

    /// Writes standard error to a file.
    #[must_use]
    pub fn with_log(mut self, path: &Path) -> Self {
        self.log = Some(path.to_owned());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Keeps memcached's background threads.
    #[must_use]
    pub fn with_background_threads(mut self) -> Self {
        self.is_deterministic = false;
        self
    }

    fn command(&self, port: u16) -> Command {
        let mut command = match self.program {
            Program::Aquifer => {
                let mut command = Command::new(build::binary());
                command.arg("cache");
                command
            }
            Program::Memcached => {
                let mut command = Command::new("memcached");
                command.args(["-U", "0"]);
                if self.is_deterministic {
                    command.args(["-o", "no_lru_maintainer,no_lru_crawler"]);
                }
                if rustix::process::geteuid().is_root() {
                    command.args(["-u", "root"]);
                }
                command
            }
        };
        command.args(["-t", "2", "-m", &self.memory_mib.to_string()]);
        match &self.socket_path {
            Some(path) => command.arg("-s").arg(path),
            None => command.args(["-p", &port.to_string(), "-l", "127.0.0.1"]),
        };
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null());
        let log = self.log.as_ref().map(|path| fs::File::create(path).expect("the log can be written"));
        command.stderr(log.map_or_else(Stdio::null, Stdio::from));
        command
    }
}

/// A running server. It is killed when it is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    port: u16,
    options: Options,
}

impl Server {
    /// Starts a server and waits until it listens.
    ///
    /// # Panics
    /// If the server does not start.
    #[must_use]
    pub fn start(options: Options) -> Self {
        // Another process may bind the free port first. The server ends then.
        (0..ATTEMPTS)
            .find_map(|_| Self::try_start(&options))
            .unwrap_or_else(|| panic!("{:?} ended {ATTEMPTS} times while it started", options.command(0)))
    }

    fn try_start(options: &Options) -> Option<Self> {
        let port = free_port();
        let mut command = options.command(port);
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let mut server = Self { child, port, options: options.clone() };
        eventually("the server to listen", || {
            if server.child.try_wait().expect("the child is not waited for elsewhere").is_some() {
                return Some(None);
            }
            server.try_connect(None).map(Some)
        })?;
        Some(server)
    }

    /// The options with which the server was started.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Whether items have cas values.
    #[must_use]
    pub fn has_cas(&self) -> bool {
        !self.options.arguments.iter().any(|argument| argument == "-C")
    }

    /// The port on which the server listens.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sends a signal, and waits for the end; returns whether the server ended with success.
    ///
    /// # Panics
    /// If the signal cannot be sent.
    pub fn end_by(mut self, signal: Signal) -> bool {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the server runs");
        self.child.wait().expect("the process is a child of this one").success()
    }

    /// Waits until the process ends by itself. Returns whether it has succeeded.
    ///
    /// # Panics
    /// If the process does not end.
    pub fn await_end(mut self) -> bool {
        let end = || self.child.try_wait().expect("the process is a child of this one");
        eventually("the server to end", end).success()
    }

    /// Sends a signal to the process and to its children.
    ///
    /// # Panics
    /// If the signal cannot be sent to all of them.
    pub fn signal_all(&self, signal: Signal) {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.expect("the server runs");
        let children = children.split_whitespace().map(|pid| pid.parse::<i32>().expect("a number"));
        let own = rustix::process::Pid::from_child(&self.child);
        let children = children.filter_map(rustix::process::Pid::from_raw);
        for pid in children.chain([own]) {
            rustix::process::kill_process(pid, signal).expect("the server runs");
        }
    }

    /// Whether the process runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        processes::is_alive(self.child.id())
    }

    /// The resident memory of the process, in bytes.
    ///
    /// # Panics
    /// If the process has ended.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the server runs");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
        kib << 10
    }

    /// Opens a connection.
    ///
    /// # Panics
    /// If the server does not accept the connection.
    #[must_use]
    pub fn connect(&self) -> Connection {
        self.try_connect(None).unwrap_or_else(|| panic!("{:?} refuses connections", self.options))
    }

    /// Opens a connection with a receive buffer of about this size.
    ///
    /// # Panics
    /// If the server does not accept the connection.
    #[must_use]
    pub fn connect_with_receive_buffer(&self, bytes: usize) -> Connection {
        self.try_connect(Some(bytes)).unwrap_or_else(|| panic!("{:?} refuses connections", self.options))
    }

    fn try_connect(&self, receive_buffer: Option<usize>) -> Option<Connection> {
        let socket: OwnedFd = match &self.options.socket_path {
            Some(path) => UnixStream::connect(path).ok()?.into(),
            None => {
                let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
                if let Some(bytes) = receive_buffer {
                    // The size must be set before the connection is made.
                    sockopt::set_socket_recv_buffer_size(&socket, bytes).expect("a buffer size");
                }
                let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.port);
                match connect(&socket, &address) {
                    Ok(()) => {}
                    Err(Errno::CONNREFUSED) => return None,
                    Err(error) => panic!("cannot connect to {address}: {error}"),
                }
                // If the kernel chooses the same port for the client, it is connected to itself.
                if getsockname(&socket) == Ok(address.into()) {
                    return None;
                }
                sockopt::set_tcp_nodelay(&socket, true).expect("TCP has it");
                socket
            }
        };
        rustix::io::ioctl_fionbio(&socket, true).expect("a socket may be non-blocking");
        Some(Connection::new(socket))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the server has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether memcached is installed. If not, reports the test as skipped; the caller must return.
#[must_use]
pub fn memcached_is_installed() -> bool {
    let output = Command::new("memcached").arg("--version").output();
    let is_installed = output.is_ok();
    if !is_installed {
        skip("memcached is not installed");
    }
    is_installed
}

/// A TCP port of this machine that was free a moment ago.
///
/// # Panics
///
/// If none is.
#[must_use]
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    listener.local_addr().expect("the listener is bound").port()
}
