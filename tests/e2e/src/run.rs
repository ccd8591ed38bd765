//! Programs that run plainly or on the pool, with their output and peak memory.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_ipc::Frame;
use rustix::process::Signal;
use serde_json::Value;

use crate::agent::Connection;
use crate::eventually::eventually_within;
use crate::processes;
use crate::sampler::{MempoolShare, Peak, Sampler};

/// Time after which a program that has not ended is killed.
const RUN_TIME_MAX: Duration = Duration::from_secs(300);

/// Exit status, output and peak memory of a program.
#[derive(Debug)]
pub struct Outcome {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error of the program and of `aquifer run`.
    pub stderr: String,
    /// Peak memory.
    pub peak: Peak,
}

impl Outcome {
    /// Asserts that the program succeeded.
    ///
    /// # Panics
    /// If the program failed.
    pub fn assert_success(&self, what: &str) {
        assert!(self.status.success(), "{what} ended with {}: {}", self.status, self.stderr);
    }
}

/// A running program, whose output is collected.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<()>,
    stderr_so_far: Arc<Mutex<Vec<u8>>>,
    sampler: Sampler,
}

impl Running {
    /// Starts a command and samples the memory of its descendants.
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
        let stdout = collect(child.stdout.take().expect("it is a pipe"));
        let stderr_so_far = Arc::default();
        let stderr = show(child.stderr.take().expect("it is a pipe"), Arc::clone(&stderr_so_far));
        Self { child, stdout, stderr, stderr_so_far, sampler }
    }

    /// Process number of the started process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the process has ended.
    ///
    /// # Panics
    /// If it was waited for before.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it was not waited for").is_some()
    }

    /// The bytes that the process has written to stderr so far.
    ///
    /// # Panics
    /// If the thread that reads it has panicked.
    #[must_use]
    pub fn stderr_so_far(&self) -> String {
        text_of(&self.stderr_so_far)
    }

    /// Waits for the end of the program.
    ///
    /// # Panics
    /// If it does not end in time; then it is killed with its descendants.
    #[must_use]
    pub fn wait(self) -> Outcome {
        self.wait_for(RUN_TIME_MAX)
    }

    /// Waits for the end of the program, at most for `timeout`.
    ///
    /// # Panics
    /// If it does not end in time; then it is killed with its descendants.
    #[must_use]
    pub fn wait_for(mut self, timeout: Duration) -> Outcome {
        let status = eventually_within(timeout, || self.child.try_wait().expect("it was not waited for"));
        let Some(status) = status else {
            let tree: Vec<u32> =
                [self.child.id()].into_iter().chain(processes::descendants(self.child.id())).collect();
            let is_agent = |pid: &u32| processes::arguments(*pid).iter().any(|word| word == "agent");
            let agents = processes::all().into_iter().filter(is_agent);
            let reports: String = tree.iter().copied().chain(agents).map(processes::report).collect();
            tree.iter().for_each(|pid| processes::signal(*pid, Signal::KILL));
            panic!("a program did not end within {timeout:?} and was killed; it and the agents:\n{reports}");
        };
        let peak = self.sampler.stop();
        Outcome {
            status,
            stdout: self.stdout.join().expect("output can be read"),
            stderr: {
                self.stderr.join().expect("output can be read");
                text_of(&self.stderr_so_far)
            },
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

/// Collects a pipe, and prints its lines among the test's own, so that a failing test shows the
/// program's output until then.
fn show(pipe: impl Read + Send + 'static, so_far: Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let (mut pipe, mut line) = (BufReader::new(pipe), Vec::new());
        while pipe.read_until(b'\n', &mut line).expect("a pipe can be read") > 0 {
            eprint!("{}", String::from_utf8_lossy(&line));
            so_far.lock().expect("no thread panics with it").append(&mut line);
        }
    })
}

fn text_of(bytes: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&bytes.lock().expect("no thread panics with it")).into_owned()
}

/// A command that runs a program plainly, as the child of a shell: the sampler reads descendants
/// only.
#[must_use]
pub fn plain_command(program: &[&str]) -> Command {
    let mut command = Command::new("sh");
    // Without `exit` the shell would execute the program in its own process.
    command.args(["-c", "\"$@\"; exit $?", "sh"]).args(program);
    command
}

/// Runs a program plainly.
#[must_use]
pub fn run_plainly(program: &[&str], forks: bool) -> Outcome {
    Running::start(&mut plain_command(program), forks, Box::new(|| 0)).wait()
}

/// Function that returns the mempool's bytes of the agent's runs. It asks the agent at every tenth
/// call only, since an answer takes processor time of the agent.
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

/// The agent's status, read from its socket; `None` if it does not answer.
#[must_use]
pub fn status(socket: &Path) -> Option<Value> {
    let connection = Connection::open(socket).ok()?;
    connection.send_frame(&Frame::StatusRequest).ok()?;
    match connection.receive().ok()?? {
        Frame::StatusReport(text) => serde_json::from_str(&text).ok(),
        _ => None,
    }
}
