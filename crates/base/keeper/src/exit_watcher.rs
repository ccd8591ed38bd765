//! Logs the exit statuses of the daemons of a local cluster, because a killed process cannot.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::exit_status::{ExitStatus, of_reaped, of_zombie};

/// Most daemons watched at once.
const WATCHED_MAX: usize = 4096;

/// Watches processes and logs their exit statuses.
#[derive(Debug, Default)]
pub(crate) struct ExitWatcher {
    watched: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    name: String,
    pid: u32,
    pidfd: OwnedFd,
}

impl ExitWatcher {
    /// Watches a process, unless it is watched already.
    pub fn watch(&mut self, name: String, pid: u32, pidfd: OwnedFd) {
        if self.watched.iter().any(|other| other.pid == pid && !has_ended(&other.pidfd)) {
            return;
        }
        if self.watched.len() >= WATCHED_MAX {
            tracing::warn!(name, pid, limit = WATCHED_MAX, "daemon not watched: limit reached");
            return;
        }
        tracing::debug!(name, pid, "watching a daemon");
        self.watched.push(Watched { name, pid, pidfd });
    }

    /// The pidfds of the daemons. A pidfd is readable once its process has ended.
    pub fn pidfds(&self) -> impl Iterator<Item = &OwnedFd> {
        self.watched.iter().map(|watched| &watched.pidfd)
    }

    /// Logs the daemons that have ended, and removes them.
    pub fn report_ended(&mut self) {
        self.watched.retain(|watched| {
            let has_ended = has_ended(&watched.pidfd);
            if has_ended {
                watched.report();
            }
            !has_ended
        });
    }
}

impl Watched {
    fn report(&self) {
        let Self { name, pid, pidfd } = self;
        let zombie = of_zombie(*pid);
        // Until the process is reaped, no other process can have its pid.
        let status = if events(pidfd).contains(PollFlags::HUP) { None } else { zombie };
        match status.or_else(|| of_reaped(pidfd)) {
            Some(ExitStatus::Code(0)) => tracing::info!(name, pid, "daemon stopped"),
            Some(ExitStatus::Code(code)) => tracing::error!(name, pid, code, "daemon failed"),
            Some(ExitStatus::Signal(signal)) => {
                tracing::error!(name, pid, signal, "daemon was killed by a signal")
            }
            None => tracing::error!(name, pid, "daemon ended; its exit status is unknown on this kernel"),
        }
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    !events(pidfd).is_empty()
}

fn events(pidfd: &OwnedFd) -> PollFlags {
    let mut entries = [PollFd::new(pidfd, PollFlags::IN)];
    let now = Timespec::try_from(Duration::ZERO).expect("zero fits");
    match poll(&mut entries, Some(&now)) {
        Ok(_) => entries[0].revents(),
        // It is polled again.
        Err(_) => PollFlags::empty(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn status_of(script: &str, is_reaped: bool) -> Option<ExitStatus> {
        let mut child =
            Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().expect("there is sh");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process")).expect("a process");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it waits for its input");
        drop(child.stdin.take());
        let mut entries = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut entries, None).expect("a pidfd can be waited for");
        if is_reaped {
            child.wait().expect("it is our child");
            return of_reaped(&pidfd);
        }
        let status = of_zombie(child.id());
        child.wait().expect("it is our child");
        status
    }

    #[test]
    fn the_status_of_a_zombie_is_known() {
        assert_eq!(status_of("read x; exit 0", false), Some(ExitStatus::Code(0)));
        assert_eq!(status_of("read x; exit 7", false), Some(ExitStatus::Code(7)));
        assert_eq!(status_of("read x; kill -9 $$", false), Some(ExitStatus::Signal(9)));
    }

    #[test]
    fn the_status_of_a_reaped_process_is_known_where_the_kernel_keeps_it() {
        let status = status_of("read x; kill -11 $$", true);
        assert!(status.is_none() || status == Some(ExitStatus::Signal(11)), "{status:?}");
    }
}
