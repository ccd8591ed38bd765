//! A cluster of `aquifer cache` servers, as processes, and its directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use aquifer_tests_e2e::build;
use aquifer_tests_e2e::eventually::eventually;
use aquifer_tests_support::state_folder;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::server::{Options, Program, Server};

/// Arguments of servers whose requests wait long enough for the move of a partition on a busy
/// machine.
pub const LONG_PARTITION_TIMEOUT: [&str; 2] = ["--partition-timeout", "60s"];

/// A cache of several servers.
#[derive(Debug)]
pub struct Cluster {
    folder: TempDir,
    daemons: Vec<Child>,
    arguments: Vec<String>,
}

impl Cluster {
    /// Starts a directory. Servers that [`Self::add`] starts have these arguments.
    ///
    /// # Panics
    /// If the directory does not start.
    #[must_use]
    pub fn start(arguments: &[&str]) -> Self {
        let folder = state_folder();
        let key = folder.path().join("cluster.key");
        fs::write(&key, "5a".repeat(32)).expect("the folder is writable");
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).expect("the path belongs to this user");
        let state = folder.path().display().to_string();
        let own = ["--directory", "embedded", "--state", &state].map(str::to_owned);
        let arguments = own.into_iter().chain(arguments.iter().map(ToString::to_string)).collect();
        let mut cluster = Self { folder, daemons: Vec::new(), arguments };
        cluster.start_daemon("directory");
        cluster
    }

    /// Starts a daemon of the cluster, such as the keeper, and waits until it listens.
    ///
    /// # Panics
    /// If the daemon does not start.
    pub fn start_daemon(&mut self, name: &str) {
        let mut command = Command::new(build::binary());
        command.arg(name).arg("--state").arg(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let daemon = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        self.daemons.push(daemon);
        let socket = self.folder.path().join(format!("{name}.sock"));
        eventually("a daemon to listen", || socket.exists().then_some(()));
    }

    /// Sends a signal to the directory, such as one that stops it.
    ///
    /// # Panics
    /// If the directory has ended.
    pub fn signal_directory(&self, signal: Signal) {
        let directory = self.daemons.first().expect("the directory was started first");
        kill_process(Pid::from_child(directory), signal).expect("the directory runs");
    }

    /// Starts a server.
    #[must_use]
    pub fn add(&self) -> Server {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        Server::start(Options::new(Program::Aquifer).with(&arguments))
    }

    /// Runs a command such as `aquifer cache status`.
    ///
    /// # Panics
    /// If the command cannot be started.
    #[must_use]
    pub fn operate(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(build::binary());
        command.arg("cache").args(arguments).args(["--directory", "embedded", "--state"]);
        command.arg(self.folder.path()).output().expect("the binary can be started")
    }

    /// Waits until each partition has a server.
    ///
    /// # Panics
    /// If the status does not show it in time.
    pub fn wait_for_partitions(&self) {
        self.wait_for("128 partitions");
    }

    /// Waits until `aquifer cache status` succeeds and shows this text.
    ///
    /// # Panics
    /// If the status does not show it in time.
    pub fn wait_for(&self, shown: &str) {
        eventually(shown, || {
            let output = self.operate(&["status"]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            (output.status.success() && text.contains(shown)).then_some(())
        });
    }

    /// The folder of the directory and the key.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            // Fails if the daemon has ended.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
