//! A cluster of one's own, in a folder that goes with it.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aquifer_host::report::{AgentStatus, RunStatistics};
use tempfile::TempDir;

use super::procs;
use crate::bench::BenchError;
use aquifer::Fabric;

/// The start of a state folder's name; the owner's process number follows.
const PREFIX: &str = "aquifer-own-";
/// Where there are processors for them.
const NODES_MAX: usize = 2;

/// Memory nodes that leave a processor to the program. Each would have a machine of its own; with more of them than processors, they take turns.
pub fn nodes() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors - 1).clamp(1, NODES_MAX)
}

/// A private cluster: brought up by [`Cluster::up`], down when dropped.
#[derive(Debug)]
pub struct Cluster {
    state: TempDir,
    daemons: Vec<u32>,
}

impl Cluster {
    /// [`nodes`] memory nodes over `fabric` that lend `memory_bytes` together, a keeper and an agent, as `aquifer up` starts them. All
    /// users find the agent at `shared_socket`, if there is one.
    ///
    /// # Errors
    /// If `aquifer up` fails, or no temporary folder can be made.
    pub fn up(memory_bytes: u64, fabric: Fabric, shared_socket: Option<&Path>) -> Result<Self, BenchError> {
        take_down_stale();
        let parent = std::env::temp_dir();
        let state = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{}-", std::process::id()))
            .tempdir_in(&parent)
            .map_err(BenchError::io("make a folder in", &parent))?;
        let mut cluster = Self { state, daemons: Vec::new() };
        let memory = format!("{}M", memory_bytes.div_ceil(nodes() as u64).div_ceil(1 << 20));
        let nodes = nodes().to_string();
        let mut args: Vec<&OsStr> =
            ["--nodes", &nodes, "--memory", &memory, "--fabric", fabric.name()].map(OsStr::new).to_vec();
        if let Some(socket) = shared_socket {
            args.extend([OsStr::new("--shared-socket"), socket.as_os_str()]);
        }
        cluster.control("up", &args)?;
        cluster.daemons = procs::with_argument(cluster.state());
        Ok(cluster)
    }

    /// Its folder.
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Processor time that all its daemons have used until now.
    pub fn cpu_us(&self) -> u64 {
        self.daemons.iter().map(|&pid| procs::cpu_us(pid)).sum()
    }

    /// The command line of `aquifer run` for a program: within `limit_bytes`, with statistics in `stats`.
    pub fn pooled_command(
        &self,
        limit_bytes: u64,
        stats: &Path,
        program: impl AsRef<OsStr>,
    ) -> Result<Command, BenchError> {
        let mut command = aquifer(self.state())?;
        command.args(["run", "--local", &limit_bytes.to_string(), "--stats"]).arg(stats).arg("--");
        command.arg(program);
        Ok(command)
    }

    /// What the agent says of its runs; `None` if it does not answer just now.
    pub fn status(&self) -> Option<AgentStatus> {
        let output = aquifer(self.state()).ok()?.args(["status", "--json"]).output().ok()?;
        find_agent(&serde_json::from_slice(&output.stdout).ok()?)
    }

    /// When nothing else helps. A number may be another process's by now: what has this cluster's folder among its
    /// arguments is not.
    fn kill(&self) {
        for pid in procs::with_argument(self.state()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                // One that has just ended by itself is as good as killed.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
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
            aquifer::say::say_error!("{error}; its daemons are killed instead");
            self.kill();
        }
    }
}

fn aquifer(state: &Path) -> Result<Command, BenchError> {
    let mut command = Command::new(aquifer_program()?);
    // These would lead to another cluster than the bench's own.
    for variable in ["AQUIFER_AGENT", "AQUIFER_REPLICAS", "AQUIFER_STATE"] {
        command.env_remove(variable);
    }
    command.arg("--state").arg(state);
    Ok(command)
}

/// The `aquifer` beside this program.
///
/// # Errors
/// If the system does not tell where this program is.
pub fn aquifer_program() -> Result<PathBuf, BenchError> {
    let link = Path::new("/proc/self/exe");
    let own = std::env::current_exe().map_err(BenchError::io("find the program of", link))?;
    Ok(own.with_file_name("aquifer"))
}

/// This program. If its file was replaced meanwhile, by a build, the running one is still to be had: what was brought up
/// must be taken down.
///
/// # Errors
/// If the system does not tell.
pub fn own_program() -> Result<PathBuf, BenchError> {
    let link = Path::new("/proc/self/exe");
    let own = std::env::current_exe().map_err(BenchError::io("find the program of", link))?;
    Ok(if own.exists() { own } else { link.to_owned() })
}

/// Output goes to a file, not a pipe: daemons may inherit it, and a pipe would then never end.
fn control(state: &Path, what: &'static str, args: &[&OsStr]) -> Result<(), BenchError> {
    let path = state.join(format!("own-{what}.log"));
    let log = std::fs::File::create(&path).map_err(BenchError::io("create", &path))?;
    let errors = log.try_clone().map_err(BenchError::io("share", &path))?;
    let status = aquifer(state)?
        .arg(what)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .status()
        .map_err(BenchError::io("start aquifer for", &path))?;
    if status.success() {
        return Ok(());
    }
    let message = std::fs::read_to_string(&path).unwrap_or_default().trim().to_owned();
    Err(BenchError::Cluster { what, status: status.to_string(), message })
}

/// Takes down clusters whose owner was killed before it could.
fn take_down_stale() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_stale = owner(&path).is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        // What another user has put there may be a trap: files would be written through its links.
        if is_stale && is_own_folder(&path) && control(&path, "down", &[]).is_ok() {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

/// Whether it is a folder of this user's that no other user can write to.
fn is_own_folder(path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == own && found.mode() & 0o022 == 0)
}

fn owner(path: &Path) -> Option<u32> {
    let (pid, _) = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split_once('-')?;
    pid.parse().ok()
}

/// The agent's part of what `aquifer status --json` prints, wherever it stands.
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

/// What a run has written to its statistics file.
///
/// # Errors
/// If there is none, or it is not what `aquifer run` writes.
pub fn read_statistics(path: &PathBuf) -> Result<RunStatistics, BenchError> {
    let text = std::fs::read_to_string(path).map_err(BenchError::io("read the statistics in", path))?;
    serde_json::from_str(&text)
        .map_err(|error| BenchError::io("understand the statistics in", path)(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_found_wherever_it_stands() {
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
    fn what_cannot_be_taken_down_is_killed() {
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
        // Its folder goes, but there is no cluster in it that could be taken down.
        let Cluster { state, .. } = &cluster;
        assert!(state.path().exists());
        std::mem::forget(cluster);
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_ours() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        assert!(is_own_folder(folder.path()));
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        assert!(!is_own_folder(&link));
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!is_own_folder(folder.path()));
        assert!(!is_own_folder(Path::new("/nonexistent")));
    }

    #[test]
    fn only_own_folders_have_an_owner() {
        assert_eq!(owner(Path::new("/tmp/aquifer-own-12-abc")), Some(12));
        assert_eq!(owner(Path::new("/tmp/aquifer-own-x-abc")), None);
        assert_eq!(owner(Path::new("/tmp/aquifer-own-12")), None);
        assert_eq!(owner(Path::new("/tmp/other-12-abc")), None);
    }
}
