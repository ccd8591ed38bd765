//! Processes that are exiting: they were killed, and still hold their memory and descriptors.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

/// Longest time to wait for an exiting process.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// True if a process has been killed or is freeing its memory, or if there is no such process.
pub fn is_exiting(pid: u32) -> bool {
    /// `PF_EXITING` of the kernel.
    const EXITING: u64 = 4;
    /// Index of the flags in `/proc/PID/stat`, counted from the field behind the name.
    const FLAGS: usize = 6;
    let read = |file| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
    let (Ok(stat), Ok(status)) = (read("stat"), read("status")) else {
        return true;
    };
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let flags = fields.split_ascii_whitespace().nth(FLAGS).and_then(|flags| flags.parse::<u64>().ok());
    let kill = 1 << (Signal::KILL.as_raw() - 1);
    let is_killed = status.lines().any(|line| {
        let pending = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        let mask = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask & kill != 0)
    });
    is_killed || flags.is_none_or(|flags| flags & EXITING != 0)
}

/// Waits until a process has ended, if it is exiting.
pub fn wait_if_exiting(pid: u32) {
    if !is_exiting(pid) {
        return;
    }
    let found = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(pidfd) = found.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) {
        let timeout = Timespec { tv_sec: EXIT_TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
        // Whatever the outcome is, the caller checks again.
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_process_is_exiting() {
        use rustix::process::{WaitId, WaitIdOptions, waitid};

        assert!(!is_exiting(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!is_exiting(child.id()));
        child.kill().unwrap();
        assert!(is_exiting(child.id()), "the signal may be pending");
        wait_if_exiting(child.id());
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        assert!(is_exiting(child.id()), "it is a zombie");
        child.wait().unwrap();
        assert!(is_exiting(child.id()), "there is no such process");
    }

    #[test]
    fn a_running_process_is_not_waited_for() {
        wait_if_exiting(std::process::id());
    }
}
