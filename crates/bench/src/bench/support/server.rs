//! Runs a server for as long as something is done with it.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::child::{self, Outcome, Streams, Watched};
use super::interrupt;
use crate::bench::BenchError;

/// A server that does not answer for so long after its start never will.
const START: Duration = Duration::from_secs(60);
/// Between two tries to reach it.
const PAUSE: Duration = Duration::from_millis(5);

/// A running server, as those see it who work with it.
#[derive(Debug, Default)]
pub struct Server {
    gone: AtomicBool,
}

impl Server {
    /// Tries to reach it until it can be reached.
    ///
    /// # Errors
    /// If it ends before, takes too long, or a signal asks to stop.
    pub fn reach<T>(&self, program: &str, mut attempt: impl FnMut() -> Option<T>) -> Result<T, BenchError> {
        let start = Instant::now();
        loop {
            if let Some(reached) = attempt() {
                return Ok(reached);
            }
            interrupt::check()?;
            if self.gone.load(Ordering::SeqCst) || start.elapsed() > START {
                return Err(BenchError::Server {
                    program: program.into(),
                    reason: "it does not answer".into(),
                });
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Runs `command`, does `work` beside it, and then sends it `end`, by which it is to end well.
///
/// # Errors
/// If it cannot be started, `work` fails, or a signal asks to stop: then it is killed. How it ended
/// is in the outcome.
pub fn beside<T: Send>(
    command: Command,
    streams: &Streams<'_>,
    watched: Watched,
    end: Signal,
    work: impl FnOnce(&Server) -> Result<T, BenchError> + Send,
) -> Result<(Outcome, Result<T, BenchError>), BenchError> {
    let server = Server::default();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let done = work(&server);
            failed.store(done.is_err(), Ordering::SeqCst);
            done
        });
        let mut asked = false;
        let outcome = child::attend(command, streams, watched, |pid, _| {
            if worker.is_finished() && !asked {
                asked = true;
                let signal = if failed.load(Ordering::SeqCst) { Signal::KILL } else { end };
                // One that has just ended by itself needs no signal.
                let _ = rustix::process::kill_process(pid, signal);
            }
        });
        server.gone.store(true, Ordering::SeqCst);
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
    ) -> (Outcome, Result<u8, BenchError>) {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder.path());
        beside(command, &Streams { input: None, output: &output }, Watched::All, Signal::TERM, work).unwrap()
    }

    /// Says that it is ready, and waits without end.
    const SERVER: &str = "trap 'exit 3' TERM; : > ready; while :; do :; done";

    #[test]
    fn a_server_is_asked_to_end_when_the_work_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let ready = folder.path().join("ready");
        let script = format!("cd {}; {SERVER}", folder.path().display());
        let (outcome, done) = shell(&script, |server| server.reach("sh", || ready.exists().then_some(7)));
        assert_eq!((outcome.status.code(), done.unwrap()), (Some(3), 7));
    }

    #[test]
    fn a_server_whose_work_fails_is_killed() {
        let (outcome, done) = shell(SERVER, |_| Err(BenchError::Missing { what: "work" }));
        assert_eq!(outcome.status.signal(), Some(9));
        assert!(done.is_err());
    }

    #[test]
    fn a_server_that_is_gone_is_not_waited_for() {
        let (outcome, done) = shell("exit 5", |server| server.reach("sh", || None));
        assert_eq!(outcome.status.code(), Some(5));
        assert!(done.unwrap_err().to_string().contains("sh"));
    }
}
