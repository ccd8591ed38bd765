//! Stop of daemons in steps, all on one clock.
//!
//! A step begins when all daemons of the step before have ended, and each step has a deadline. The
//! deadlines count from the start of the first step. So later steps can use the time that a step
//! has left, and the whole stop takes a bounded time however many daemons hang.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use aquifer_channel::exiting::is_exiting;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, pidfd_send_signal};

use super::daemon::Daemon;
use super::lock::LockHolder;

/// Time within which killed daemons must end.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks for processes that run no more, but that the kernel has not removed. A
/// process that is found twice in a row is abandoned.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How a daemon was stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopOutcome {
    /// The daemon ended after SIGTERM.
    Terminated,
    /// The daemon did not end in time, and was killed by SIGKILL.
    Killed,
    /// The daemon does not run any longer, but the kernel has not removed its process yet: the
    /// kernel frees much memory, or waits to close a descriptor that a user has sent.
    Unremoved(u32),
}

/// Why daemons could not be stopped.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// The system does not let this process wait for the daemons.
    #[error("cannot wait for the end of {daemons}: {source}")]
    Wait {
        /// The daemons.
        daemons: ProcessList,
        /// The system's error.
        source: io::Error,
    },
    /// Some daemons do not end.
    #[error("these did not end within {} s of SIGKILL: {daemons}", KILL_TIMEOUT.as_secs())]
    Unkillable {
        /// The daemons.
        daemons: ProcessList,
    },
}

/// Names and processes of daemons.
#[derive(Debug)]
pub struct ProcessList(Vec<(Daemon, u32)>);

impl ProcessList {
    fn of(running: &[(Daemon, LockHolder)]) -> Self {
        Self(running.iter().map(|(daemon, process)| (*daemon, process.pid)).collect())
    }
}

impl fmt::Display for ProcessList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (daemon, pid)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{daemon} (process {pid})")?;
        }
        Ok(())
    }
}

/// Sends SIGTERM to daemons, all at once, and SIGKILL to those that have not ended at `deadline`.
/// Returns the daemons in their order.
///
/// # Errors
/// If a daemon does not end even then.
pub fn stop(
    running: Vec<(Daemon, LockHolder)>,
    deadline: Instant,
) -> Result<Vec<(Daemon, StopOutcome)>, StopError> {
    let mut stop = Stop { running, exiting: Vec::new(), ended: Vec::new() };
    for (signal, outcome, deadline) in [
        (Signal::TERM, StopOutcome::Terminated, deadline),
        (Signal::KILL, StopOutcome::Killed, deadline.max(Instant::now()) + KILL_TIMEOUT),
    ] {
        for (_, process) in &stop.running {
            // Fails if the process has ended meanwhile.
            let _gone = pidfd_send_signal(&process.pidfd, signal);
        }
        stop.wait_until_ended(outcome, deadline)
            .map_err(|source| StopError::Wait { daemons: ProcessList::of(&stop.running), source })?;
    }
    if stop.running.is_empty() {
        stop.ended.sort_unstable_by_key(|(daemon, _)| *daemon);
        return Ok(stop.ended);
    }
    Err(StopError::Unkillable { daemons: ProcessList::of(&stop.running) })
}

/// Daemons that are stopped.
struct Stop {
    running: Vec<(Daemon, LockHolder)>,
    /// The processes of `running` that ran no more at the last check.
    exiting: Vec<u32>,
    ended: Vec<(Daemon, StopOutcome)>,
}

impl Stop {
    /// Waits until all daemons have ended, until `deadline` at most.
    fn wait_until_ended(&mut self, outcome: StopOutcome, deadline: Instant) -> io::Result<()> {
        let mut next_check = Instant::now() + EXIT_CHECK_INTERVAL;
        while !self.running.is_empty() {
            let now = Instant::now();
            let left = deadline.min(next_check).saturating_duration_since(now);
            let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
            // A pidfd is readable once its process has ended.
            let mut entries: Vec<_> =
                self.running.iter().map(|(_, process)| PollFd::new(&process.pidfd, PollFlags::IN)).collect();
            match rustix::event::poll(&mut entries, Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => continue,
                polled => polled?,
            };
            let has_ended: Vec<_> = entries.iter().map(|entry| !entry.revents().is_empty()).collect();
            let mut has_ended = has_ended.into_iter();
            let removed = self.running.extract_if(.., |_| has_ended.next().unwrap_or(false));
            let before = self.ended.len();
            self.ended.extend(removed.map(|(daemon, _)| (daemon, outcome)));
            if now >= next_check {
                self.leave_unremoved();
                next_check = now + EXIT_CHECK_INTERVAL;
            }
            if self.ended.len() == before && now >= deadline {
                break;
            }
        }
        Ok(())
    }

    /// Abandons processes that run no more, and did not at the last check either.
    fn leave_unremoved(&mut self) {
        let exiting: Vec<_> =
            self.running.iter().map(|(_, process)| process.pid).filter(|pid| is_exiting(*pid)).collect();
        let is_unremoved = |pid: u32| exiting.contains(&pid) && self.exiting.contains(&pid);
        let removed = self.running.extract_if(.., |(_, process)| is_unremoved(process.pid));
        let left = removed.map(|(daemon, process)| (daemon, StopOutcome::Unremoved(process.pid)));
        self.ended.extend(left.collect::<Vec<_>>());
        self.exiting = exiting;
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    /// A shell that has run `script` and then waits for its end.
    fn process(script: &str) -> (Child, LockHolder) {
        let script = format!("{script}; echo ready; while :; do read line; done");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        io::BufRead::read_line(&mut io::BufReader::new(output), &mut line).unwrap();
        assert_eq!(line, "ready\n");
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let holder = LockHolder {
            pid: child.id(),
            pidfd: pidfd_open(pid, PidfdFlags::empty()).unwrap(),
            is_ending: false,
        };
        (child, holder)
    }

    #[test]
    fn each_daemon_that_does_not_end_is_killed_and_named() {
        const IGNORES_TERM: &str = "trap '' TERM";
        let scripts = [
            (Daemon::Node(1), IGNORES_TERM),
            (Daemon::Node(2), ":"),
            (Daemon::Node(3), IGNORES_TERM),
            (Daemon::Node(4), ":"),
        ];
        let (mut children, mut running) = (Vec::new(), Vec::new());
        for (daemon, script) in scripts {
            let (child, holder) = process(script);
            children.push(child);
            running.push((daemon, holder));
        }
        // The other two must end before, however slow the machine is.
        let deadline = Instant::now() + Duration::from_secs(2);
        let ended = stop(running, deadline).unwrap();
        let outcome = |daemon| ended.iter().find(|(ended, _)| *ended == daemon).map(|(_, outcome)| *outcome);
        assert_eq!(ended.len(), scripts.len());
        assert_eq!(outcome(Daemon::Node(1)), Some(StopOutcome::Killed));
        assert_eq!(outcome(Daemon::Node(3)), Some(StopOutcome::Killed));
        for mut child in children {
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_step_whose_deadline_has_passed_is_stopped_nevertheless() {
        let (mut child, holder) = process("trap '' TERM");
        let ended = stop(vec![(Daemon::Agent, holder)], Instant::now()).unwrap();
        assert_eq!(ended, [(Daemon::Agent, StopOutcome::Killed)]);
        child.wait().unwrap();
    }

    #[test]
    fn daemons_are_named_with_their_processes() {
        let list = ProcessList(vec![(Daemon::Agent, 12), (Daemon::Node(3), 15)]);
        let error = StopError::Unkillable { daemons: list };
        assert_eq!(
            error.to_string(),
            "these did not end within 5 s of SIGKILL: agent (process 12), node-3 (process 15)"
        );
    }
}
