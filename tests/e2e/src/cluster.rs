//! Clusters of the built program, each in a folder of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use aquifer_ipc::SOCKET_VARIABLE;
use aquifer_tests_support::state_folder;
use serde_json::Value;
use tempfile::TempDir;

use crate::run::Running;
use crate::{build, eventually, processes};

/// A running cluster. It is stopped when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    binary: PathBuf,
    state: TempDir,
    run_options: Vec<String>,
    nodes: usize,
    agent_socket: PathBuf,
    environment: Vec<(String, String)>,
}

impl Cluster {
    /// Starts a cluster. Each node lends `memory`. A daemon that is killed stays dead.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn up(nodes: usize, memory: &str) -> Self {
        Self::up_with(nodes, memory, &[])
    }

    /// Starts a cluster with further options of `aquifer up`.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn up_with(nodes: usize, memory: &str, options: &[&str]) -> Self {
        Self::up_in(&[], nodes, memory, options)
    }

    /// Starts a cluster with environment variables for its daemons.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn up_in(environment: &[(&str, &str)], nodes: usize, memory: &str, options: &[&str]) -> Self {
        let of_pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let environment = environment.iter().map(of_pair).collect();
        let options = [&["--no-restart"], options].concat();
        Self::start(build::binary(), environment, nodes, memory, &options)
    }

    /// Starts a cluster whose supervisor starts daemons again.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn up_with_supervisor(nodes: usize, memory: &str, options: &[&str]) -> Self {
        Self::up_by(build::binary(), nodes, memory, options)
    }

    /// Starts a cluster by another `aquifer`.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn up_by(binary: &Path, nodes: usize, memory: &str, options: &[&str]) -> Self {
        Self::start(binary, Vec::new(), nodes, memory, options)
    }

    fn start(
        binary: &Path,
        environment: Vec<(String, String)>,
        nodes: usize,
        memory: &str,
        options: &[&str],
    ) -> Self {
        let state = state_folder();
        let (binary, agent_socket) = (binary.to_owned(), PathBuf::new());
        let mut cluster = Self { binary, state, run_options: Vec::new(), nodes, agent_socket, environment };
        let mut up = cluster.command();
        up.args(["up", "--nodes", &nodes.to_string(), "--memory", memory]).args(options);
        let output = up.output().expect("aquifer can be started");
        assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
        cluster.agent_socket = cluster.find_agent_socket();
        cluster
    }

    /// The agent's socket, as a program on the pool gets it.
    fn find_agent_socket(&self) -> PathBuf {
        let output = self.run("64M", &["printenv", aquifer_ipc::SOCKET_VARIABLE]);
        assert!(output.status.success(), "a first program failed: {}", text(&output.stderr));
        PathBuf::from(text(&output.stdout).trim())
    }

    /// The command `aquifer --state …`.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("--state").arg(self.state.path());
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// The `aquifer` of all later commands.
    #[must_use]
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Sets the `aquifer` of all later commands.
    pub fn set_binary(&mut self, binary: &Path) {
        binary.clone_into(&mut self.binary);
    }

    /// The command `aquifer run --local LIMIT -- …`.
    #[must_use]
    pub fn run_command(&self, limit: &str, program: &[&str]) -> Command {
        let mut command = self.command();
        command.arg("run").args(&self.run_options).args(["--local", limit, "--"]).args(program);
        command
    }

    /// Sets options for each later `aquifer run`.
    pub fn set_run_options(&mut self, options: &[&str]) {
        self.run_options = options.iter().map(ToString::to_string).collect();
    }

    /// The options of [`Self::set_run_options`].
    #[must_use]
    pub fn run_options(&self) -> &[String] {
        &self.run_options
    }

    /// Runs a program to its end, without input.
    ///
    /// # Panics
    /// If `aquifer` cannot be started, or the program does not end.
    #[must_use]
    pub fn run(&self, limit: &str, program: &[&str]) -> Output {
        let mut command = self.run_command(limit, program);
        let outcome = Running::start(&mut command, false, Box::new(|| 0)).wait();
        Output { status: outcome.status, stdout: outcome.stdout, stderr: outcome.stderr.into_bytes() }
    }

    /// The state folder.
    #[must_use]
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// The agent's socket.
    #[must_use]
    pub fn agent_socket(&self) -> &Path {
        &self.agent_socket
    }

    /// The output of `aquifer status --json`.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn status(&self) -> Value {
        let output = self.command().args(["status", "--json"]).output().expect("aquifer can be started");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!("aquifer status --json: {error}: {} {}", text(&output.stdout), text(&output.stderr))
        })
    }

    /// Process number of a daemon: `agent`, `keeper`, `directory`, `supervisor`, or `node` with a
    /// number.
    ///
    /// # Panics
    /// If it does not run.
    #[must_use]
    pub fn daemon(&self, name: &str, number: Option<usize>) -> u32 {
        let mut candidates = self.daemons();
        candidates.retain(|pid| {
            let arguments = processes::arguments(*pid);
            let is_number = |wanted: usize| arguments.iter().any(|word| *word == wanted.to_string());
            arguments.iter().any(|word| word == name) && number.is_none_or(is_number)
        });
        // The agent's shadow has the same arguments.
        let is_shadow =
            |pid: u32| candidates.iter().any(|other| processes::descendants(*other).contains(&pid));
        let found = candidates.iter().copied().find(|pid| !is_shadow(*pid));
        found.unwrap_or_else(|| panic!("{name} {number:?} does not run"))
    }

    /// Process numbers of all daemons: those with the state folder among their arguments.
    #[must_use]
    pub fn daemons(&self) -> Vec<u32> {
        let state = self.state.path().to_str().expect("temporary folders have plain names");
        let is_of_cluster = |pid: &u32| {
            let arguments = processes::arguments(*pid);
            let names = ["agent", "keeper", "directory", "node", "heap-service", "supervisor"];
            let is_daemon = |word: &str| names.contains(&word);
            arguments.iter().any(|word| word.contains(state))
                && arguments.iter().any(|word| is_daemon(word))
                && !arguments.iter().any(|word| word == "run")
        };
        let own = rustix::process::geteuid().as_raw();
        // The command line of a stranger cannot be read while the stranger locks its memory.
        let is_own = |pid: &u32| processes::user(*pid) == Some(own);
        processes::all().into_iter().filter(is_own).filter(is_of_cluster).collect()
    }

    /// Waits until the directory has this number of nodes.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn await_nodes(&self, count: usize) {
        eventually("the number of nodes to change", || {
            let status = self.status();
            (find(&status, "nodes")?.as_array()?.len() == count).then_some(())
        });
    }

    /// The workers of programs of this cluster that have not ended.
    #[must_use]
    pub fn workers(&self) -> Vec<u32> {
        let variable = format!("{SOCKET_VARIABLE}={}", self.agent_socket().display());
        let is_ours = |pid: &u32| {
            let read = |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let environment = read("environ");
            let mut entries = environment.split(|byte| *byte == 0);
            read("comm") == b"aquifer-worker\n" && entries.any(|entry| entry == variable.as_bytes())
        };
        let processes = std::fs::read_dir("/proc").expect("there is /proc").flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(is_ours).collect()
    }

    /// Waits until there is no run, all memory of nodes and mempool is free, and no worker is left.
    ///
    /// # Panics
    /// If memory is not freed.
    pub fn assert_all_free(&self) {
        let mut last = Value::Null;
        let what = format!("all memory to be free again in {}", self.state.path().display());
        let is_free = |status: &Value| {
            let nodes = find(status, "nodes").and_then(Value::as_array).cloned().unwrap_or_default();
            let runs = find(status, "runs").and_then(Value::as_array).map_or(1, Vec::len);
            let used = find(status, "mempool_used_bytes").and_then(Value::as_u64);
            let is_node_free = |node: &Value| node["free_bytes"].as_u64() == node["memory_bytes"].as_u64();
            nodes.len() == self.nodes && nodes.iter().all(is_node_free) && runs == 0 && used == Some(0)
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually(&what, || {
                last = self.status();
                is_free(&last).then_some(())
            });
        }));
        assert!(result.is_ok(), "{what}: {last:#}");
        eventually("all workers to end", || self.workers().is_empty().then_some(()));
        eventually("the keeper to hold no program", || (self.held_userfaultfds() == 0).then_some(()));
    }

    /// The userfaultfds that the keeper has.
    fn held_userfaultfds(&self) -> usize {
        let is_keeper = |pid: &u32| processes::arguments(*pid).iter().any(|word| word == "keeper");
        self.daemons().into_iter().filter(is_keeper).map(processes::userfaultfds).sum()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let output = self.command().arg("down").output();
        let daemons = self.daemons();
        for daemon in &daemons {
            processes::signal(*daemon, rustix::process::Signal::KILL);
        }
        if std::thread::panicking() {
            eprintln!("the cluster's logs are:\n{}", self.logs());
            return;
        }
        let output = output.expect("aquifer can be started");
        assert!(output.status.success(), "aquifer down failed: {}", text(&output.stderr));
        assert!(daemons.is_empty(), "aquifer down left processes: {daemons:?}");
    }
}

impl Cluster {
    /// The last lines of the daemons' logs.
    #[must_use]
    pub fn logs(&self) -> String {
        let mut all = String::new();
        for entry in std::fs::read_dir(self.state.path().join("log")).into_iter().flatten().flatten() {
            let log = std::fs::read_to_string(entry.path()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            all.push_str(&format!("-- {}\n{end}\n", entry.path().display()));
        }
        all
    }
}

/// Finds the value of a key in a JSON value, at any depth.
#[must_use]
pub fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|inner| find(inner, key))),
        Value::Array(values) => values.iter().find_map(|inner| find(inner, key)),
        _ => None,
    }
}

/// Bytes as text.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
