//! A cluster of the built program, in a folder of its own.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::run::Running;
use crate::{build, eventually, processes};

/// A cluster that is up. It goes down when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    state: TempDir,
    run_options: Vec<String>,
    nodes: usize,
    agent_socket: PathBuf,
}

impl Cluster {
    /// Start one. `memory` is each node's.
    ///
    /// # Panics
    /// If it does not come up.
    #[must_use]
    pub fn up(nodes: usize, memory: &str) -> Self {
        Self::up_with(nodes, memory, &[])
    }

    /// Start one with further options of `aquifer up`.
    ///
    /// # Panics
    /// If it does not come up.
    #[must_use]
    pub fn up_with(nodes: usize, memory: &str, options: &[&str]) -> Self {
        let state = TempDir::with_prefix("aquifer-e2e-").expect("a temporary folder can be made");
        // As `aquifer up` would make it for root: programs that become somebody else still reach
        // their agent.
        std::fs::set_permissions(state.path(), Permissions::from_mode(0o711)).expect("our own folder");
        let mut cluster = Self { state, run_options: Vec::new(), nodes, agent_socket: PathBuf::new() };
        let mut up = cluster.command();
        up.args(["up", "--nodes", &nodes.to_string(), "--memory", memory]).args(options);
        let output = up.output().expect("aquifer can be started");
        assert!(output.status.success(), "aquifer up failed: {}", text(&output.stderr));
        cluster.agent_socket = cluster.find_agent_socket();
        cluster
    }

    /// What a program on the pool is told.
    fn find_agent_socket(&self) -> PathBuf {
        let output = self.run("64M", &["printenv", aquifer_ipc::SOCKET_VARIABLE]);
        assert!(output.status.success(), "a first program failed: {}", text(&output.stderr));
        PathBuf::from(text(&output.stdout).trim())
    }

    /// `aquifer --state …`.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(build::binary());
        command.arg("--state").arg(self.state.path());
        command
    }

    /// `aquifer run --local LIMIT -- …`, not started yet.
    #[must_use]
    pub fn run_command(&self, limit: &str, program: &[&str]) -> Command {
        let mut command = self.command();
        command.arg("run").args(&self.run_options).args(["--local", limit, "--"]).args(program);
        command
    }

    /// What every `aquifer run` is told from now on.
    pub fn set_run_options(&mut self, options: &[&str]) {
        self.run_options = options.iter().map(ToString::to_string).collect();
    }

    /// See [`Self::set_run_options`].
    #[must_use]
    pub fn run_options(&self) -> &[String] {
        &self.run_options
    }

    /// Run a program to its end, without input.
    ///
    /// # Panics
    /// If `aquifer` cannot be started, or the program does not end.
    #[must_use]
    pub fn run(&self, limit: &str, program: &[&str]) -> Output {
        let mut command = self.run_command(limit, program);
        let outcome = Running::start(&mut command, false, Box::new(|| 0)).wait();
        Output { status: outcome.status, stdout: outcome.stdout, stderr: outcome.stderr.into_bytes() }
    }

    /// The folder of its state.
    #[must_use]
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Where its agent listens.
    #[must_use]
    pub fn agent_socket(&self) -> &Path {
        &self.agent_socket
    }

    /// `aquifer status --json`.
    ///
    /// # Panics
    /// If it fails or is no JSON.
    #[must_use]
    pub fn status(&self) -> Value {
        let output = self.command().args(["status", "--json"]).output().expect("aquifer can be started");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!("aquifer status --json: {error}: {} {}", text(&output.stdout), text(&output.stderr))
        })
    }

    /// The process that plays a part: `agent`, `keeper`, `directory`, or `node` with a number.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn part(&self, part: &str, number: Option<usize>) -> u32 {
        let mut playing = self.parts();
        playing.retain(|pid| {
            let arguments = processes::arguments(*pid);
            let is_number = |wanted: usize| arguments.iter().any(|word| *word == wanted.to_string());
            arguments.iter().any(|word| word == part) && number.is_none_or(is_number)
        });
        // The agent's shadow looks like it, and may have the lower number.
        let is_shadow = |pid: u32| playing.iter().any(|other| processes::descendants(*other).contains(&pid));
        let found = playing.iter().copied().find(|pid| !is_shadow(*pid));
        found.unwrap_or_else(|| panic!("no process plays the part of {part} {number:?}"))
    }

    /// All its daemons: they name its folder.
    #[must_use]
    pub fn parts(&self) -> Vec<u32> {
        let state = self.state.path().to_str().expect("temporary folders have plain names");
        let names_us = |pid: &u32| {
            let arguments = processes::arguments(*pid);
            let is_daemon = |word: &str| ["agent", "keeper", "directory", "node"].contains(&word);
            arguments.iter().any(|word| word.contains(state))
                && arguments.iter().any(|word| is_daemon(word))
                && !arguments.iter().any(|word| word == "run")
        };
        processes::all().into_iter().filter(names_us).collect()
    }

    /// Wait until the directory knows of so many nodes.
    ///
    /// # Panics
    /// If it does not come to that.
    pub fn await_nodes(&self, count: usize) {
        eventually("nodes to come or to go", || {
            let status = self.status();
            (find(&status, "nodes")?.as_array()?.len() == count).then_some(())
        });
    }

    /// Wait until no run is left and everything lent has come back: to nodes and mempool.
    ///
    /// # Panics
    /// If something is not given back.
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
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let output = self.command().arg("down").output();
        let parts = self.parts();
        for part in &parts {
            processes::signal(*part, rustix::process::Signal::KILL);
        }
        if std::thread::panicking() {
            eprintln!("the cluster's logs are:\n{}", self.logs());
            return;
        }
        let output = output.expect("aquifer can be started");
        assert!(output.status.success(), "aquifer down failed: {}", text(&output.stderr));
        assert!(parts.is_empty(), "aquifer down left processes: {parts:?}");
    }
}

impl Cluster {
    /// The ends of its daemons' logs.
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

/// The value of a key, wherever in a JSON value it is.
#[must_use]
pub fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|inner| find(inner, key))),
        Value::Array(values) => values.iter().find_map(|inner| find(inner, key)),
        _ => None,
    }
}

/// Bytes for people.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
