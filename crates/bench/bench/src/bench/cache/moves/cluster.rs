//! Servers that are one cache, and their directory, as processes; and the commands that operate
//! them.

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use aquifer::DirectoryLocation;
use aquifer::state::StateDir;
use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::aquifer_program;
use aquifer_bench::support::{folder, interrupt};
use aquifer_cache::store::hash::KeyHasher;
use aquifer_cache_cluster::records::Registry;
use tempfile::TempDir;

use super::super::processors::Place;
use super::super::servers::{AQUIFER, Programs, Server, Settings};
use super::partitions::Partitions;
use super::status::{CacheStatus, Order};

/// Number of servers.
pub const SERVERS: usize = 4;
/// Time within which each partition must have a server.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of attempts to reach the directory, to find all servers, and to move a partition that
/// the balancer is moving.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time from the end of the command that shows the status to a move, so that the command's
/// processor time is not in a window with the move.
const STATUS_LEAD: Duration = Duration::from_millis(200);
/// Attempts to move a partition, or to find its owner.
const ATTEMPTS: usize = 20;

/// The servers of a cache. All processes are killed when this is dropped.
#[derive(Debug)]
pub struct CacheCluster {
    pub servers: Vec<Server>,
    /// The numbers of the servers in the cache, in the order of `servers`.
    pub numbers: Vec<u16>,
    pub partitions: Partitions,
    _directory: DirectoryProcess,
    program: PathBuf,
    folder: TempDir,
}

/// The directory, which is killed when this is dropped.
#[derive(Debug)]
struct DirectoryProcess(Child);

impl Drop for DirectoryProcess {
    fn drop(&mut self) {
        // Errors mean that the process has ended before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A move that succeeded.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    pub order: Order,
    /// When the command was started, and when it had ended.
    pub began: Instant,
    pub ended: Instant,
    /// The duration that the command prints, in whole ms.
    pub duration_ms: f64,
}

impl CacheCluster {
    /// Starts the directory and all servers, and waits until each partition has a server.
    ///
    /// # Errors
    /// If a process does not start, or the servers do not find each other.
    pub fn start(programs: &Programs, memory_mib: u32) -> Result<Self, BenchError> {
        let folder = folder::temporary()?;
        let program = aquifer_program()?;
        let state = StateDir::locate(Some(folder.path())).map_err(|error| failed(&error))?;
        write_key(&state)?;
        let directory = start_directory(&program, &state)?;
        // A pause that exceeds the default timeout must be measured, too.
        let options = ["--partition-timeout", "10s", "--directory", "embedded", "--state"];
        let options = options.map(OsString::from);
        let options = [&options[..], &[folder.path().into()]].concat();
        let settings = Settings { place: Place::All, ..Settings::with_memory(memory_mib) };
        let start = |_| programs.start_with(&programs.all[0], settings, &options);
        let servers = (0..SERVERS).map(start).collect::<Result<_, _>>()?;
        let partitions = Partitions(hasher_of(&state)?);
        let numbers = Vec::new();
        let mut cluster = Self { servers, numbers, partitions, _directory: directory, program, folder };
        let status = cluster.wait_until_whole()?;
        let numbers = cluster.servers.iter().map(|server| status.number_at(server.port()));
        cluster.numbers = numbers.collect::<Option<_>>().ok_or_else(|| failed(&"a server has no number"))?;
        Ok(cluster)
    }

    /// The servers and their partitions.
    ///
    /// # Errors
    /// If the command fails.
    pub fn status(&self) -> Result<CacheStatus, BenchError> {
        let output = self.operate(["status", "--json"])?;
        let error = |_| BenchError::Cluster {
            what: "cache status --json",
            status: output.status.to_string(),
            message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        };
        serde_json::from_slice(&output.stdout).map_err(error)
    }

    /// The number of the server that owns a partition. Waits while the balancer moves the
    /// partition.
    ///
    /// # Errors
    /// If the partition still moves after some attempts.
    pub fn wait_for_owner(&self, partition: usize) -> Result<u16, BenchError> {
        for _ in 0..ATTEMPTS {
            if let Some(owner) = self.status()?.owner(partition) {
                return Ok(owner);
            }
            pause(RETRY_INTERVAL)?;
        }
        Err(failed(&format!("no server has partition {partition} at rest")))
    }

    /// Makes the move that `choose` selects from the current status. Retries if the balancer is
    /// moving the partition.
    ///
    /// # Errors
    /// If the move failed in all attempts.
    pub fn make_move(&self, choose: &dyn Fn(&CacheStatus) -> Option<Order>) -> Result<Moved, BenchError> {
        let mut reason = "no server has a partition that can move".to_owned();
        for _ in 0..ATTEMPTS {
            if let Some(order) = choose(&self.status()?) {
                pause(STATUS_LEAD)?;
                match self.try_move(order)? {
                    Ok(moved) => return Ok(moved),
                    Err(why) => reason = why,
                }
            }
            pause(RETRY_INTERVAL)?;
        }
        Err(failed(&reason))
    }

    /// Makes a move. The inner error is the reason why the servers declined.
    ///
    /// # Errors
    /// If the command cannot be started.
    pub fn try_move(&self, order: Order) -> Result<Result<Moved, String>, BenchError> {
        let began = Instant::now();
        let output = self.operate(["move", &order.partition.to_string(), &order.to.to_string()])?;
        let ended = Instant::now();
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(match parse_duration_ms(&text).filter(|_| output.status.success()) {
            Some(duration_ms) => Ok(Moved { order, began, ended, duration_ms }),
            None => Err(format!("{}{}", text.trim(), String::from_utf8_lossy(&output.stderr).trim())),
        })
    }

    /// The error of a server that has ended; `None` if all run.
    pub fn ending(&mut self) -> Option<BenchError> {
        let numbers = self.numbers.iter().zip(&mut self.servers);
        let mut endings = numbers.filter_map(|(number, server)| Some((number, server.ending()?)));
        endings.next().map(|(number, ending)| failed(&format!("server {number} of the cache: {ending}")))
    }

    /// Runs a command of `aquifer cache` for this cache.
    fn operate<const N: usize>(&self, arguments: [&str; N]) -> Result<Output, BenchError> {
        interrupt::check()?;
        let mut command = own_command(&self.program, self.folder.path().as_os_str());
        command.arg("cache").args(arguments).stdin(Stdio::null());
        command.output().map_err(BenchError::io("start", &self.program))
    }

    fn wait_until_whole(&self) -> Result<CacheStatus, BenchError> {
        let began = Instant::now();
        loop {
            // The command fails until a server has joined.
            let status = self.status();
            if let Ok(status) = &status
                && status.is_whole()
            {
                return Ok(status.clone());
            }
            if began.elapsed() > START_TIMEOUT {
                status?;
                return Err(failed(&"not all partitions have a server; free some memory"));
            }
            pause(RETRY_INTERVAL)?;
        }
    }
}

/// An error of the cache.
pub fn failed(reason: &impl std::fmt::Display) -> BenchError {
    BenchError::Server { program: AQUIFER.into(), reason: reason.to_string() }
}

/// Sleeps for some time.
///
/// # Errors
/// If a signal asks to stop.
pub fn pause(time: Duration) -> Result<(), BenchError> {
    let end = Instant::now() + time;
    loop {
        interrupt::check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(RETRY_INTERVAL));
    }
}

/// The program `aquifer` with a state folder.
fn own_command(program: &Path, state: &OsStr) -> Command {
    let mut command = Command::new(program);
    for variable in ["AQUIFER_AGENT", "AQUIFER_REPLICAS", "AQUIFER_STATE"] {
        command.env_remove(variable);
    }
    command.arg("--state").arg(state);
    command
}

fn write_key(state: &StateDir) -> Result<(), BenchError> {
    let path = state.key_file();
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let written = file.and_then(|mut file| file.write_all("5a".repeat(32).as_bytes()));
    written.map_err(BenchError::io("write", &path))
}

/// Starts the directory and waits until it accepts connections.
fn start_directory(program: &Path, state: &StateDir) -> Result<DirectoryProcess, BenchError> {
    let mut command = own_command(program, state.path().as_os_str());
    command.arg("directory").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(BenchError::io("start", program))?;
    let (mut directory, began) = (DirectoryProcess(child), Instant::now());
    while UnixStream::connect(state.socket("directory")).is_err() {
        if let Ok(Some(status)) = directory.0.try_wait() {
            return Err(failed(&format!(
                "its directory has ended ({status}); run `aquifer directory` to see why"
            )));
        }
        if began.elapsed() > START_TIMEOUT {
            return Err(failed(&format!("no directory after {} s", START_TIMEOUT.as_secs())));
        }
        pause(RETRY_INTERVAL)?;
    }
    Ok(directory)
}

/// The hash of the cache, whose secret the first server has written to the directory.
fn hasher_of(state: &StateDir) -> Result<KeyHasher, BenchError> {
    let directory = DirectoryLocation::Embedded.connect(state).map_err(|error| failed(&error))?;
    let settings = Registry::new(directory, "main").settings().map_err(|error| failed(&error))?;
    let settings = settings.ok_or_else(|| failed(&"no server has joined the cache"))?;
    Ok(KeyHasher::new(settings.hash_secret))
}

/// The time in the output of `aquifer cache move`: `... in 12 ms`.
fn parse_duration_ms(text: &str) -> Option<f64> {
    text.trim().strip_suffix(" ms")?.rsplit_once(" in ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_time_is_read() {
        let text = "partition 3 has moved from server 2 to 1 in 14 ms\n";
        assert_eq!(parse_duration_ms(text), Some(14.0));
        assert_eq!(parse_duration_ms("server 1 has partition 3 already\n"), None);
    }
}
