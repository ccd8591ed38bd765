//! The end of a worker and of its program. A program that overwrites the control memory, which it
//! shares with its worker, is ended, whatever it has written there.

use std::time::{Duration, Instant};

use super::super::process::has_ended;
use super::ProcessEdge;

/// Timeout of a command that the program has overwritten, from the end of the program's process on.
const STALL_MAX: Duration = Duration::from_secs(5);
/// Maximum time between the end of a worker that is killed together with its program, and the end
/// of the program.
const WORKER_END_TIMEOUT: Duration = Duration::from_secs(5);

impl ProcessEdge {
    /// Whether the monitor must stop waiting for a worker that does not complete a command.
    ///
    /// Ends the run if the program has overwritten the command. The program may have overwritten
    /// other words as well, so this reports the end of its process to the worker again, and checks
    /// whether the memory still exists.
    pub(super) fn is_over(&self) -> bool {
        if self.program.is_killed() || self.program.has_exited() {
            return true;
        }
        let is_overwritten =
            self.attachment.as_ref().is_some_and(|attachment| attachment.worker.is_command_overwritten());
        if is_overwritten {
            let pid = self.program.pid();
            self.run.end(&format!("process {pid} has overwritten memory of the library that pages it"));
        }
        let process = self.program.process();
        if !process.is_some_and(|process| has_ended(process.pidfd(), Duration::ZERO)) {
            return false;
        }
        self.report_process_end();
        if !self.is_alive() {
            return true;
        }
        if !is_overwritten {
            // Another process may have the memory, and the worker may be stopped.
            self.stalled_since.set(None);
            return false;
        }
        let now = Instant::now();
        let since = self.stalled_since.get().unwrap_or(now);
        self.stalled_since.set(Some(since));
        now - since > STALL_MAX
    }

    /// Commands the worker to check whether it is the last process that has the memory.
    pub(crate) fn report_process_end(&self) {
        if let Some(attachment) = &self.attachment {
            attachment.worker.report_process_end();
        }
    }

    /// Whether the worker is the last process that has the memory.
    pub(crate) fn is_worker_last(&self) -> bool {
        self.attachment.as_ref().is_some_and(|attachment| attachment.worker.is_last())
    }

    /// Ends the run if the worker, whose socket is closed, was killed or could not bring a page to
    /// staging.
    ///
    /// Waits for a moment, because the program may just be ending together with its worker.
    pub(crate) fn end_run_if_worker_failed(&self) {
        let (Some(attachment), Some(process)) = (&self.attachment, self.program.process()) else { return };
        let has_failed = attachment.worker.process() != 0 && !attachment.worker.is_last();
        if has_failed && !has_ended(process.pidfd(), WORKER_END_TIMEOUT) {
            self.run.end(&format!(
                "the worker of process {} was killed, so its memory cannot be paged any more",
                process.pid()
            ));
        }
    }
}
