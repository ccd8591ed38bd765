//! A program's whole life, watched: plainly and on the pool.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_ipc::Frame;
use rustix::process::Signal;
use serde_json::Value;

use crate::agent::Connection;
use crate::eventually::eventually_within;
use crate::processes;
use crate::sampler::{MempoolShare, Peak, Sampler};

/// No program here takes longer, unless it hangs.
const RUN_TIME_MAX: Duration = Duration::from_secs(300);

/// What became of a program.
#[derive(Debug)]
pub struct Outcome {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote.
    pub stdout: Vec<u8>,
    /// What it, or `aquifer run`, complained of.
    pub stderr: String,
    /// The most memory that was seen.
    pub peak: Peak,
}

impl Outcome {
    /// Fails unless it ended well.
    ///
    /// # Panics
    /// If it did not.
    pub fn assert_success(&self, what: &str) {
        assert!(self.status.success(), "{what} ended with {}: {}", self.status, self.stderr);
    }
}

/// A program that runs, its output being collected.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<Vec<u8>>,
    sampler: Sampler,
}

impl Running {
    /// Start a command and watch its descendants; a plain program is started under a shell that has
    /// none of its own memory.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(command: &mut Command, forks: bool, mempool: MempoolShare) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let sampler = Sampler::start(child.id(), forks, mempool);
        let stdout = collect(child.stdout.take().expect("it was asked for"));
        let stderr = collect(child.stderr.take().expect("it was asked for"));
        Self { child, stdout, stderr, sampler }
    }

    /// The process that was started.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// If that cannot be told.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("our own child can be asked").is_some()
    }

    /// Wait for its end.
    ///
    /// # Panics
    /// If it does not end; then it is killed with all that it started.
    #[must_use]
    pub fn wait(self) -> Outcome {
        self.wait_for(RUN_TIME_MAX)
    }

    /// The same, of a program that may take so long.
    ///
    /// # Panics
    /// As [`Self::wait`].
    #[must_use]
    pub fn wait_for(mut self, patience: Duration) -> Outcome {
        let status =
            eventually_within(patience, || self.child.try_wait().expect("our own child can be asked"));
        let Some(status) = status else {
            let of_it: Vec<u32> =
                [self.child.id()].into_iter().chain(processes::descendants(self.child.id())).collect();
            let is_agent = |pid: &u32| processes::arguments(*pid).iter().any(|word| word == "agent");
            let agents = processes::all().into_iter().filter(is_agent);
            let reports: String = of_it.iter().copied().chain(agents).map(processes::report).collect();
            of_it.iter().for_each(|pid| processes::signal(*pid, Signal::KILL));
            panic!(
                "a program did not end within {patience:?} and was killed; it, and the agents, \
                    were:\n{reports}"
            );
        };
        let peak = self.sampler.stop();
        Outcome {
            status,
            stdout: self.stdout.join().expect("output can be read"),
            stderr: String::from_utf8_lossy(&self.stderr.join().expect("output can be read")).into_owned(),
            peak,
        }
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        bytes
    })
}

/// A command that runs `program` plainly, as the child of a shell, so that the sampler sees it as
/// it sees a paged one: as a descendant.
#[must_use]
pub fn plain_command(program: &[&str]) -> Command {
    let mut command = Command::new("sh");
    // Without the last words the shell would become the program.
    command.args(["-c", "\"$@\"; exit $?", "sh"]).args(program);
    command
}

/// Run it plainly.
#[must_use]
pub fn run_plainly(program: &[&str], forks: bool) -> Outcome {
    Running::start(&mut plain_command(program), forks, Box::new(|| 0)).wait()
}

/// The mempool's share of the only run that the agent at `socket` has. Asked anew only now and
/// then: it changes slowly, and asking takes the agent's time.
#[must_use]
pub fn mempool_share(socket: &Path) -> MempoolShare {
    const ASK_EVERY: u32 = 10;
    let socket = socket.to_owned();
    let (mut last, mut calls) = (0, 0u32);
    Box::new(move || {
        if calls.is_multiple_of(ASK_EVERY) {
            last = status(&socket).map_or(last, |status| {
                let runs = status["runs"].as_array().cloned().unwrap_or_default();
                runs.iter().filter_map(|run| run["mempool_bytes"].as_u64()).sum()
            });
        }
        calls += 1;
        last
    })
}

/// What the agent says of itself, without the detour by `aquifer status`.
#[must_use]
pub fn status(socket: &Path) -> Option<Value> {
    let connection = Connection::open(socket).ok()?;
    connection.send_frame(&Frame::StatusRequest).ok()?;
    match connection.receive().ok()?? {
        Frame::StatusReport(text) => serde_json::from_str(&text).ok(),
        _ => None,
    }
}
