//! Private clusters for benches and the demo.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aquifer_report::{AgentStatus, RunStatistics};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{folder, procs};
use crate::BenchError;
use aquifer::Fabric;

/// Start of the name of a state folder; the owner's process number follows.
const PREFIX: &str = "aquifer-own-";
/// Most memory nodes of a private cluster.
const NODES_MAX: usize = 2;

/// Number of memory nodes of a private cluster: one for each processor except that of the program,
/// at least one and at most `NODES_MAX`.
pub fn nodes() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors - 1).clamp(1, NODES_MAX)
}

/// Options of all clusters: without a page cache, so that pages are where the measurement expects
/// them.
const COMMON: [&str; 2] = ["--no-restart", WITHOUT_CACHE];
/// Option that switches the page cache of the host off.
const WITHOUT_CACHE: &str = "--cache-per-user=0";
/// Variable with the file that the agent reads instead of `/proc/meminfo`, and the name of the file
/// in the state folder.
const MEMINFO: (&str, &str) = ("AQUIFER_MEMINFO", "meminfo");
/// Memory of a host whose idle memory the bench sets.
const HOST_BYTES: u64 = 16 << 30;
/// Memory that stays free on such a host.
pub const KEPT_FREE_BYTES: u64 = HOST_BYTES / 16;
/// Elastic runs have at most a quarter of the memory that is idle or borrowed, so a third of what
/// is idle.
const IDLE_FACTOR: u64 = 3;
/// Grace time of nodes with kept memory: longer than any measurement.
const KEPT_TIME: &str = "10m";

/// A private cluster: started by [`Cluster::up`], stopped when dropped.
#[derive(Debug)]
pub struct Cluster {
    state: TempDir,
    daemons: Vec<u32>,
}

impl Cluster {
    /// Starts a cluster without a supervisor, with [`nodes`] memory nodes over `fabric`, which lend
    /// `memory_bytes` together.
    ///
    /// With `shared_socket` the agent serves all users, at that socket.
    ///
    /// # Errors
    /// If `aquifer up` fails, or the state folder cannot be created.
    pub fn up(memory_bytes: u64, fabric: Fabric, shared_socket: Option<&Path>) -> Result<Self, BenchError> {
        Self::start(memory_bytes, fabric, shared_socket, &COMMON)
    }

    /// Starts a cluster like [`Self::up`], with a page cache on the host.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_cache(
        memory_bytes: u64,
        fabric: Fabric,
        shared_socket: Option<&Path>,
    ) -> Result<Self, BenchError> {
        Self::start(memory_bytes, fabric, shared_socket, &["--no-restart"])
    }

    fn start(
        memory_bytes: u64,
        fabric: Fabric,
        shared_socket: Option<&Path>,
        options: &[&str],
    ) -> Result<Self, BenchError> {
        stop_abandoned();
        Self::start_in(folder::create(PREFIX)?, memory_bytes, fabric, shared_socket, options)
    }

    fn start_in(
        state: TempDir,
        memory_bytes: u64,
        fabric: Fabric,
        shared_socket: Option<&Path>,
        options: &[&str],
    ) -> Result<Self, BenchError> {
        let mut cluster = Self { state, daemons: Vec::new() };
        let memory = format!("{}M", memory_bytes.div_ceil(nodes() as u64).div_ceil(1 << 20));
        let nodes = nodes().to_string();
        let args = ["--nodes", &nodes, "--memory", &memory, "--fabric", fabric.name()];
        let mut args: Vec<&OsStr> = options.iter().chain(&args).map(OsStr::new).collect();
        if let Some(socket) = shared_socket {
            args.extend([OsStr::new("--shared-socket"), socket.as_os_str()]);
        }
        cluster.control("up", &args)?;
        cluster.daemons = procs::with_argument(cluster.state());
        Ok(cluster)
    }

    /// Starts a cluster like [`Self::up_with_cache`], where no user has more than `cache_bytes` of
    /// the page cache.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_limited_cache(
        memory_bytes: u64,
        fabric: Fabric,
        cache_bytes: u64,
    ) -> Result<Self, BenchError> {
        let cache = format!("--cache-per-user={cache_bytes}");
        Self::start(memory_bytes, fabric, None, &["--no-restart", &cache])
    }

    /// Starts a cluster like [`Self::up`], on a host whose idle memory is what
    /// [`Self::set_lendable`] says, and none at first.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_idle_memory(
        memory_bytes: u64,
        fabric: Fabric,
        shared_socket: Option<&Path>,
    ) -> Result<Self, BenchError> {
        stop_abandoned();
        let state = folder::create(PREFIX)?;
        write_meminfo(state.path(), KEPT_FREE_BYTES)?;
        Self::start_in(state, memory_bytes, fabric, shared_socket, &COMMON)
    }

    /// Starts a cluster like [`Self::up_with_idle_memory`], with a page cache.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_idle_memory_and_cache(memory_bytes: u64, fabric: Fabric) -> Result<Self, BenchError> {
        stop_abandoned();
        let state = folder::create(PREFIX)?;
        write_meminfo(state.path(), HOST_BYTES / 2)?;
        let mempool = format!("--mempool={}", HOST_BYTES / 4);
        Self::start_in(state, memory_bytes, fabric, None, &["--no-restart", &mempool])
    }

    /// Sets how much idle memory elastic runs may have on the host of
    /// [`Self::up_with_idle_memory`].
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn set_lendable(&self, bytes: u64) -> Result<(), BenchError> {
        write_meminfo(self.state(), KEPT_FREE_BYTES + IDLE_FACTOR * bytes)
    }

    /// Sets how much memory is available on that host, beyond what stays free.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn set_idle(&self, bytes: i64) -> Result<(), BenchError> {
        write_meminfo(self.state(), KEPT_FREE_BYTES.saturating_add_signed(bytes))
    }

    /// Starts a cluster with one node: it lends `memory_bytes`, and has `heap_bytes` for heaps.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_heaps(memory_bytes: u64, heap_bytes: u64) -> Result<Self, BenchError> {
        stop_abandoned();
        let mut cluster = Self { state: folder::create(PREFIX)?, daemons: Vec::new() };
        let (memory, heap) = ((memory_bytes + heap_bytes).to_string(), heap_bytes.to_string());
        let args = ["--nodes", "1", "--memory", &memory, "--heap-memory", &heap];
        cluster.control("up", &COMMON.iter().chain(&args).map(OsStr::new).collect::<Vec<_>>())?;
        cluster.daemons = procs::with_argument(cluster.state());
        Ok(cluster)
    }

    /// Starts a cluster of `nodes` nodes, each of which lends `memory_bytes`. The memory outlives
    /// the process of its node.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_kept_memory(nodes: u16, memory_bytes: u64, fabric: Fabric) -> Result<Self, BenchError> {
        stop_abandoned();
        let mut cluster = Self { state: folder::create(PREFIX)?, daemons: Vec::new() };
        let (nodes, memory) = (nodes.to_string(), memory_bytes.to_string());
        let args = ["--nodes", &nodes, "--memory", &memory, "--fabric", fabric.name()];
        let grace = ["--keep-memory", "--grace", KEPT_TIME];
        let args = COMMON.iter().chain(&args).chain(&grace);
        cluster.control("up", &args.map(OsStr::new).collect::<Vec<_>>())?;
        cluster.daemons = procs::with_argument(cluster.state());
        Ok(cluster)
    }

    /// Starts a cluster of `nodes` nodes, each of which lends `memory_bytes`, with further options
    /// of `aquifer up`.
    ///
    /// # Errors
    /// Those of [`Self::up`].
    pub fn up_with_nodes(
        nodes: u16,
        memory_bytes: u64,
        fabric: Fabric,
        options: &[&str],
    ) -> Result<Self, BenchError> {
        stop_abandoned();
        let mut cluster = Self { state: folder::create(PREFIX)?, daemons: Vec::new() };
        let (nodes, memory) = (nodes.to_string(), memory_bytes.to_string());
        let args = ["--nodes", &nodes, "--memory", &memory, "--fabric", fabric.name()];
        let args = COMMON.iter().chain(options).chain(&args);
        cluster.control("up", &args.map(OsStr::new).collect::<Vec<_>>())?;
        cluster.daemons = procs::with_argument(cluster.state());
        Ok(cluster)
    }

    /// Empties a memory node.
    ///
    /// # Errors
    /// If `aquifer drain` fails.
    pub fn drain(&self, node: u16) -> Result<(), BenchError> {
        self.control("drain", &[OsStr::new(&node.to_string())])
    }

    /// The state folder.
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Processor time that all daemons have used, in µs.
    pub fn cpu_us(&self) -> u64 {
        self.daemons.iter().map(|&pid| procs::cpu_us(pid)).sum()
    }

    /// The command `aquifer run` for a program, with a limit and a file for statistics.
    ///
    /// # Errors
    /// If the path of the binary `aquifer` is not known.
    pub fn pooled_command(
        &self,
        limit_bytes: u64,
        stats: &Path,
        program: impl AsRef<OsStr>,
    ) -> Result<Command, BenchError> {
        self.pooled_command_with(&[], limit_bytes, stats, program)
    }

    /// As [`Self::pooled_command`], with further options of `aquifer run`.
    ///
    /// # Errors
    /// Those of [`Self::pooled_command`].
    pub fn pooled_command_with(
        &self,
        options: &[&str],
        limit_bytes: u64,
        stats: &Path,
        program: impl AsRef<OsStr>,
    ) -> Result<Command, BenchError> {
        let mut command = aquifer(self.state())?;
        command.args(["run", "--local", &limit_bytes.to_string()]).args(options);
        command.arg("--stats").arg(stats).arg("--").arg(program);
        Ok(command)
    }

    /// The status of the agent; `None` if it is not available.
    pub fn status(&self) -> Option<AgentStatus> {
        let output = aquifer(self.state()).ok()?.args(["status", "--json"]).output().ok()?;
        find_agent(&serde_json::from_slice(&output.stdout).ok()?)
    }

    /// Kills the agent, and starts another by `aquifer up`.
    ///
    /// # Errors
    /// If the agent's process is not known, or `aquifer up` fails.
    pub fn restart_agent(&self) -> Result<(), BenchError> {
        self.signal_part("agent", Signal::KILL)?;
        self.start_missing()
    }

    /// Sends a signal to a memory node.
    ///
    /// # Errors
    /// If the node's process is not known.
    pub fn signal_node(&self, node: u16, signal: Signal) -> Result<(), BenchError> {
        self.signal_part(&format!("node-{node}"), signal)
    }

    /// Starts the daemons that do not run, by `aquifer up`.
    ///
    /// # Errors
    /// If `aquifer up` fails.
    pub fn start_missing(&self) -> Result<(), BenchError> {
        self.control("up", &[])
    }

    /// The process of a memory node.
    ///
    /// # Errors
    /// If it is not known.
    pub fn node_pid(&self, node: u16) -> Result<Pid, BenchError> {
        self.part_pid(&format!("node-{node}"))
    }

    fn part_pid(&self, name: &str) -> Result<Pid, BenchError> {
        let output = aquifer(self.state())?.args(["status", "--json"]).output();
        let output = output.map_err(BenchError::io("ask for the status of", self.state()))?;
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let mut parts = status["parts"].as_array().into_iter().flatten();
        let pid = parts.find(|part| part["name"] == name).and_then(|part| part["pid"].as_i64());
        let pid = pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let error = BenchError::io("find a daemon of", self.state());
        pid.ok_or_else(|| error(std::io::ErrorKind::NotFound.into()))
    }

    fn signal_part(&self, name: &str, signal: Signal) -> Result<(), BenchError> {
        let signalled = kill_process(self.part_pid(name)?, signal);
        signalled.map_err(|source| BenchError::io("signal a daemon of", self.state())(source.into()))
    }

    /// Kills the daemons: the processes with the state folder among their arguments. Their stored
    /// numbers may belong to other processes by now.
    fn kill(&self) {
        for pid in procs::with_argument(self.state()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                // Fails if the process has ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }

    fn control(&self, what: &'static str, args: &[&OsStr]) -> Result<(), BenchError> {
        control(self.state(), what, args)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.control("down", &[]) {
            aquifer::say::say_error!("{error}; killing the daemons of the bench's cluster");
            self.kill();
        }
    }
}

fn aquifer(state: &Path) -> Result<Command, BenchError> {
    let mut command = Command::new(aquifer_program()?);
    // These variables would select another cluster or policy than that of the bench.
    for variable in ["AQUIFER_AGENT", "AQUIFER_BACKUP", "AQUIFER_REPLICAS", "AQUIFER_STATE"] {
        command.env_remove(variable);
    }
    let meminfo = state.join(MEMINFO.1);
    if meminfo.exists() {
        command.env(MEMINFO.0, meminfo);
    }
    command.arg("--state").arg(state);
    Ok(command)
}

/// Writes the memory of a host on which this is available.
fn write_meminfo(state: &Path, available: u64) -> Result<(), BenchError> {
    let text = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", HOST_BYTES >> 10, available >> 10);
    let (path, next) = (state.join(MEMINFO.1), state.join("meminfo.next"));
    std::fs::write(&next, text).map_err(BenchError::io("write", &next))?;
    std::fs::rename(&next, &path).map_err(BenchError::io("replace", &path))
}

/// Path of the binary `aquifer`, in the folder of this one.
///
/// # Errors
/// If the path of this binary is not known.
pub fn aquifer_program() -> Result<PathBuf, BenchError> {
    let link = Path::new("/proc/self/exe");
    let own = std::env::current_exe().map_err(BenchError::io("find the program of", link))?;
    Ok(own.with_file_name("aquifer"))
}

/// Path of this binary. If a build has replaced the file, the path in `/proc` of the running one.
///
/// # Errors
/// If the path is not known.
pub fn own_program() -> Result<PathBuf, BenchError> {
    let link = Path::new("/proc/self/exe");
    let own = std::env::current_exe().map_err(BenchError::io("find the program of", link))?;
    Ok(if own.exists() { own } else { link.to_owned() })
}

/// Runs `aquifer COMMAND` for a state folder.
///
/// Output goes to a file: daemons may inherit it, and a pipe would not end before they do.
fn control(state: &Path, what: &'static str, args: &[&OsStr]) -> Result<(), BenchError> {
    let path = state.join(format!("own-{what}.log"));
    let log = std::fs::File::create(&path).map_err(BenchError::io("create", &path))?;
    let errors = log.try_clone().map_err(BenchError::io("duplicate the descriptor of", &path))?;
    let status = aquifer(state)?
        .arg(what)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .status()
        .map_err(BenchError::io("start aquifer with the log", &path))?;
    if status.success() {
        return Ok(());
    }
    let message = std::fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
    Err(BenchError::Cluster { what, status: status.to_string(), message })
}

/// Stops and removes the clusters of benches that were killed.
fn stop_abandoned() {
    for path in folder::abandoned(&std::env::temp_dir(), PREFIX) {
        if control(&path, "down", &[]).is_ok() {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

/// Finds the agent's status in the output of `aquifer status --json`, at any depth.
fn find_agent(value: &serde_json::Value) -> Option<AgentStatus> {
    if value.get("runs").is_some()
        && let Ok(status) = serde_json::from_value(value.clone())
    {
        return Some(status);
    }
    match value {
        serde_json::Value::Object(fields) => fields.values().find_map(find_agent),
        serde_json::Value::Array(items) => items.iter().find_map(find_agent),
        _ => None,
    }
}

/// Reads the statistics file of a run.
///
/// # Errors
/// If the file cannot be read, or does not have the format of `aquifer run`.
pub fn read_statistics(path: &PathBuf) -> Result<RunStatistics, BenchError> {
    let text = std::fs::read_to_string(path).map_err(BenchError::io("read the statistics in", path))?;
    serde_json::from_str(&text).map_err(|error| BenchError::io("parse the statistics in", path)(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_status_is_found_at_any_depth() {
        let agent =
            r#"{"host":1,"mempool_bytes":8,"mempool_used_bytes":4,"nodes":[],"tenants":[],"runs":[]}"#;
        for text in [agent.to_owned(), format!(r#"{{"state":"x","agent":{agent}}}"#), format!("[1,{agent}]")]
        {
            let status = find_agent(&serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(status.mempool_used_bytes, 4);
        }
        assert!(find_agent(&serde_json::json!({"runs": 3, "agent": null})).is_none());
    }

    #[test]
    fn daemons_that_cannot_be_stopped_are_killed() {
        let state = tempfile::tempdir().unwrap();
        let mut daemon = Command::new("sh")
            .args(["-c", "read forever; true"])
            .arg(state.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let cluster = Cluster { state, daemons: vec![daemon.id()] };
        while procs::with_argument(cluster.state()).is_empty() {
            std::thread::yield_now();
        }
        cluster.kill();
        assert!(!daemon.wait().unwrap().success());
        // Dropping the cluster would call `aquifer down`, for which there is no cluster.
        let Cluster { state, .. } = &cluster;
        assert!(state.path().exists());
        std::mem::forget(cluster);
    }
}
