//! Keeps a monitor's thread on the core where its program faults.
//!
//! A wake-up on the same core costs a third of one across cores. The kernel cannot know that two threads take turns, so the
//! monitor looks now and then where the last faulting thread ran, and moves there if it finds it at the same place twice.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Faults between looks: a look costs as much as two faults.
const FAULTS_PER_LOOK: u64 = 256;
/// Faults in a row by one thread, after which it is worth holding.
const FAULTS_TO_HOLD: u32 = 64;
/// A thread that was seen to drift to another core is held for so many faults; then it is tried again without, for holding costs.
const FAULTS_HELD: u64 = 65_536;
/// Field of `/proc/TID/stat` that names the core, counted from the one behind the name's closing parenthesis.
const PROCESSOR_FIELD: usize = 36;

/// Where a monitor's thread runs.
#[derive(Debug)]
pub(crate) struct Follow {
    allowed: Option<CpuSet>,
    seen: Option<usize>,
    pinned: Option<usize>,
    next_look: u64,
    stat: Option<(u32, File)>,
    /// Where the worker was put: pages that it frees on this core are in this core's cache when the next fault needs one.
    worker: Option<usize>,
    /// The thread that raised the last faults, and how many in a row.
    streak: (u32, u32),
    /// Hold the thread until so many faults were served.
    hold_until: u64,
    faults: u64,
}

impl Follow {
    /// Begin where the thread may run now.
    pub(crate) fn new() -> Self {
        Self {
            allowed: sched_getaffinity(None).ok(),
            seen: None,
            pinned: None,
            next_look: FAULTS_PER_LOOK,
            stat: None,
            worker: None,
            streak: (0, 0),
            hold_until: 0,
            faults: 0,
        }
    }

    /// A thread raised a fault.
    pub(crate) fn faulted(&mut self, thread: u32) {
        let in_row = if self.streak.0 == thread { self.streak.1.saturating_add(1) } else { 1 };
        self.streak = (thread, in_row);
        self.faults += 1;
        if self.faults >= self.next_look && thread != 0 {
            self.next_look = self.faults + FAULTS_PER_LOOK;
            self.look(thread);
        }
    }

    fn look(&mut self, thread: u32) {
        let (Some(allowed), Some(core)) = (self.allowed, self.core_of(thread)) else {
            return;
        };
        if self.pinned.is_some_and(|pinned| pinned != core) {
            self.hold_until = self.faults + FAULTS_HELD;
        }
        let is_steady = self.seen.replace(core) == Some(core);
        let wanted = (is_steady && allowed.is_set(core)).then_some(core);
        if wanted != self.pinned {
            let set = wanted.map_or(allowed, only);
            if sched_setaffinity(None, &set).is_ok() {
                self.pinned = wanted;
            }
        }
    }

    /// Have the program's worker run where its pages are needed again.
    pub(crate) fn bring(&mut self, worker: u32) {
        let pid = i32::try_from(worker).ok().and_then(Pid::from_raw);
        let (Some(pid), Some(allowed)) = (pid, self.allowed) else { return };
        if self.worker != self.pinned
            && sched_setaffinity(Some(pid), &self.pinned.map_or(allowed, only)).is_ok()
        {
            self.worker = self.pinned;
        }
    }

    /// Wake a thread by `fill`, so that it goes on where it was, on this core, if it alone faults.
    ///
    /// The scheduler would rather wake it on an idle core: a migration, and from then on two wake-ups across cores for each fault. So
    /// it is allowed no other core just while it is woken. It is blocked all that time and cannot notice.
    pub(crate) fn hold_while<T>(&self, thread: u32, fill: impl FnOnce() -> T) -> T {
        let is_wanted =
            self.faults < self.hold_until && self.streak.0 == thread && self.streak.1 >= FAULTS_TO_HOLD;
        let held = self.pinned.filter(|_| is_wanted);
        let pid = i32::try_from(thread).ok().and_then(Pid::from_raw);
        let (Some(core), Some(pid)) = (held, pid) else { return fill() };
        let Some(allowed) =
            sched_getaffinity(Some(pid)).ok().filter(|set| set.count() > 1 && set.is_set(core))
        else {
            return fill();
        };
        let is_held = sched_setaffinity(Some(pid), &only(core)).is_ok();
        let result = fill();
        if is_held && let Err(error) = sched_setaffinity(Some(pid), &allowed) {
            tracing::debug!(%error, thread, "the thread has ended");
        }
        result
    }

    fn core_of(&mut self, thread: u32) -> Option<usize> {
        if self.stat.as_ref().is_none_or(|(known, _)| *known != thread) {
            self.stat = Some((thread, File::open(format!("/proc/{thread}/stat")).ok()?));
        }
        let mut buffer = [0; 1024];
        let length = self.stat.as_ref()?.1.read_at(&mut buffer, 0).ok()?;
        processor(&buffer[..length])
    }
}

fn only(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

/// The core in the text of `/proc/TID/stat`. The thread's name may hold anything, parentheses and spaces too.
fn processor(text: &[u8]) -> Option<usize> {
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&text[end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(PROCESSOR_FIELD)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_core_is_found_whatever_the_name() {
        let text = b"7 (a ) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 5 37";
        assert_eq!(processor(text), Some(5));
        assert_eq!(processor(b"7 (a"), None);
        assert_eq!(processor(b"7 (a) S 1"), None);
        let own = std::fs::read("/proc/thread-self/stat").unwrap();
        assert!(processor(&own).is_some());
    }
}
