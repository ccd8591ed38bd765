//! A process that uses segments. The bench passes its order in a file.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use aquifer_bench::BenchError;
use aquifer_bench::support::cluster::own_program;
use aquifer_bench::support::folder;
use aquifer_client::segments::{Process, Pulling};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{gets, source, transfers};

/// Longest time to wait for the other process.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// The order of a process.
#[derive(Serialize, Deserialize)]
pub struct Order {
    /// The socket of the process' agent.
    pub agent: PathBuf,
    pub name: String,
    pub peer: String,
    pub play: Play,
}

/// The work of a process.
#[derive(Serialize, Deserialize)]
pub enum Play {
    /// Hands a segment back and forth. The first process allocates it.
    Transfers { is_first: bool, bytes: u64, turns: u32 },
    /// Creates a map, gets its keys, and hands it over.
    Source { entries: u64 },
    /// Receives the map, and gets its keys.
    Target { entries: u64, mode: Mode },
    /// Hands a segment over, and works meanwhile.
    Give { bytes: u64 },
    /// Receives a segment, and waits for its pages.
    Follow,
}

/// When the pages are pulled.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    OnTouch,
    Ahead,
    StopAndCopy,
}

impl Mode {
    pub fn pulling(self) -> Pulling {
        match self {
            Self::OnTouch => Pulling::OnTouch,
            Self::Ahead => Pulling::Ahead,
            Self::StopAndCopy => Pulling::Explicit,
        }
    }
}

/// The main function of the process: carries out the order in the file, and prints the result.
///
/// # Errors
/// If the order cannot be carried out.
pub fn serve_at(path: &Path) -> Result<(), BenchError> {
    let text = std::fs::read_to_string(path).map_err(BenchError::io("read", path))?;
    let order: Order = serde_json::from_str(&text).map_err(segment_error)?;
    let process = Process::open_at(&order.agent, &order.name).map_err(segment_error)?;
    match order.play {
        Play::Transfers { is_first, bytes, turns } => {
            print(&transfers::play(&process, &order.peer, is_first, bytes, turns)?)
        }
        Play::Source { entries } => print(&gets::play_source(&process, &order.peer, entries)?),
        Play::Target { entries, mode } => print(&gets::play_target(&process, entries, mode)?),
        Play::Give { bytes } => print(&source::transfer_segment(&process, &order.peer, bytes)?),
        Play::Follow => print(&source::receive_pages(&process)?),
    }
}

fn print(result: &impl Serialize) -> Result<(), BenchError> {
    aquifer::say::say_line!("{}", serde_json::to_string(result).map_err(segment_error)?);
    Ok(())
}

/// Runs two processes, at the two agents, and returns their results.
///
/// # Errors
/// If one of them fails.
pub fn run<A: DeserializeOwned, B: DeserializeOwned>(
    agents: [PathBuf; 2],
    plays: [Play; 2],
) -> Result<(A, B), BenchError> {
    let folder = folder::temporary()?;
    let names = ["first", "second"];
    let mut players = Vec::new();
    for (at, (agent, play)) in agents.into_iter().zip(plays).enumerate() {
        let order = Order { agent, name: names[at].into(), peer: names[1 - at].into(), play };
        let path = folder.path().join(names[at]);
        let text = serde_json::to_string(&order).map_err(segment_error)?;
        std::fs::write(&path, text).map_err(BenchError::io("write", &path))?;
        let mut command = Command::new(own_program()?);
        command.args(["bench", "migration", "--serve-at"]).arg(&path);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        players.push(Player(command.spawn().map_err(BenchError::io("start", &path))?));
    }
    let second = players.pop().expect("there are two");
    let first = players.pop().expect("there are two");
    Ok((first.end()?, second.end()?))
}

/// A process, which is killed when this is dropped.
struct Player(Child);

impl Player {
    fn end<T: DeserializeOwned>(mut self) -> Result<T, BenchError> {
        // Both have little to print, so that neither waits for a reader.
        let status = self.0.wait().map_err(BenchError::io("wait for", Path::new("aquifer-bench")))?;
        let (mut printed, mut message) = (String::new(), String::new());
        let read = |from: Option<&mut dyn std::io::Read>, into: &mut String| {
            from.map(|from| from.read_to_string(into));
        };
        read(self.0.stdout.as_mut().map(|from| from as _), &mut printed);
        read(self.0.stderr.as_mut().map(|from| from as _), &mut message);
        let result = serde_json::from_str(&printed).ok().filter(|_| status.success());
        result.ok_or_else(|| BenchError::Program {
            program: "a process with segments".into(),
            context: "over TCP".into(),
            status: status.to_string(),
            message: message.trim().to_owned(),
        })
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The clock of this machine, in ns, the same in each process.
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::try_from(time).ok().and_then(|time| u64::try_from(time.as_nanos()).ok()).unwrap_or(0)
}

pub fn segment_error(error: impl std::fmt::Display) -> BenchError {
    BenchError::Segment { reason: error.to_string() }
}
