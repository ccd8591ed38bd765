//! Runs a server while a client works with it.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::child::{self, ProgramOutcome, Streams, Watched};
use super::interrupt;
use crate::BenchError;

/// Time within which a server must accept connections.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two attempts to connect.
const RETRY_PAUSE: Duration = Duration::from_millis(5);

/// A running server, for the client's side.
#[derive(Debug, Default)]
pub struct Server {
    has_ended: AtomicBool,
}

impl Server {
    /// Calls `attempt` until it returns a connection.
    ///
    /// # Errors
    /// If the server ends, does not accept in time, or a signal asks to stop.
    pub fn connect<T>(&self, program: &str, mut attempt: impl FnMut() -> Option<T>) -> Result<T, BenchError> {
        let start = Instant::now();
        loop {
            if let Some(reached) = attempt() {
                return Ok(reached);
            }
            interrupt::check()?;
            if self.has_ended.load(Ordering::SeqCst) || start.elapsed() > START_TIMEOUT {
                return Err(BenchError::Server {
                    program: program.into(),
                    reason: "the server does not answer".into(),
                });
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    }
}

/// Runs a server, calls `work`, and then sends the signal `end` to the server.
///
/// # Errors
/// If the server cannot be started, or a signal asks to stop. If `work` fails, the server is
/// killed.
pub fn beside<T: Send>(
    command: Command,
    streams: &Streams<'_>,
    watched: Watched,
    end: Signal,
    work: impl FnOnce(&Server) -> Result<T, BenchError> + Send,
) -> Result<(ProgramOutcome, Result<T, BenchError>), BenchError> {
    let server = Server::default();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let done = work(&server);
            failed.store(done.is_err(), Ordering::SeqCst);
            done
        });
        let mut asked = false;
        let outcome = child::run_with_pid(command, streams, watched, |pid, _| {
            if worker.is_finished() && !asked {
                asked = true;
                let signal = if failed.load(Ordering::SeqCst) { Signal::KILL } else { end };
                // Fails if the server has ended.
                let _ = rustix::process::kill_process(pid, signal);
            }
        });
        server.has_ended.store(true, Ordering::SeqCst);
        let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((outcome?, done))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn shell(
        script: &str,
        work: impl FnOnce(&Server) -> Result<u8, BenchError> + Send,
    ) -> (ProgramOutcome, Result<u8, BenchError>) {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder.path());
        beside(command, &Streams { input: None, output: &output }, Watched::All, Signal::TERM, work).unwrap()
    }

    /// Creates the file `ready`, and runs until SIGTERM.
    const SERVER: &str = "trap 'exit 3' TERM; : > ready; while :; do :; done";

    #[test]
    fn a_server_gets_the_end_signal_when_the_work_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let ready = folder.path().join("ready");
        let script = format!("cd {}; {SERVER}", folder.path().display());
        let (outcome, done) = shell(&script, |server| server.connect("sh", || ready.exists().then_some(7)));
        assert_eq!((outcome.status.code(), done.unwrap()), (Some(3), 7));
    }

    #[test]
    fn a_server_whose_work_fails_is_killed() {
        let (outcome, done) = shell(SERVER, |_| Err(BenchError::Missing { what: "work" }));
        assert_eq!(outcome.status.signal(), Some(9));
        assert!(done.is_err());
    }

    #[test]
    fn a_server_that_has_ended_is_not_waited_for() {
        let (outcome, done) = shell("exit 5", |server| server.connect("sh", || None));
        assert_eq!(outcome.status.code(), Some(5));
        assert!(done.unwrap_err().to_string().contains("sh"));
    }
}
