//! Processes that are about to end: what they have is theirs until the last of them is gone, and that takes a moment.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

/// Nobody takes longer to give up what it has.
const PATIENCE: Duration = Duration::from_secs(10);

/// Whether a process that has not ended is about to: it was killed, or it is giving up what it had, which takes a while where that is much.
pub fn is_ending(pid: u32) -> bool {
    /// `PF_EXITING` of the kernel.
    const EXITING: u64 = 4;
    /// Of `/proc/PID/stat`, counted from the one behind the name.
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

/// If a process is about to end, wait until it has.
pub fn await_ending(pid: u32) {
    if !is_ending(pid) {
        return;
    }
    let found = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(pidfd) = found.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) {
        let patience = Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
        // Any outcome means: the caller looks again.
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&patience));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_was_killed_is_ending() {
        use rustix::process::{WaitId, WaitIdOptions, waitid};

        assert!(!is_ending(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!is_ending(child.id()));
        child.kill().unwrap();
        assert!(is_ending(child.id()), "whether or not it has noticed");
        await_ending(child.id());
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        assert!(is_ending(child.id()), "it has ended, and nobody has heard of it");
        child.wait().unwrap();
        assert!(is_ending(child.id()), "there is no such process");
    }

    #[test]
    fn nobody_waits_for_one_that_lives() {
        await_ending(std::process::id());
    }
}
