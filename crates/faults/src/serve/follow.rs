//! Keeps a monitor's thread on the core where its program faults.
//!
//! A wake-up on the same core costs a third of one across cores. The kernel cannot know that two threads take turns, so the
//! monitor looks now and then where the last faulting thread ran, and moves there if it finds it at the same place twice. The program's
//! own threads are left where they are: a set of cores that was narrowed for a moment would be inherited by a child of that moment.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Faults between looks: a look costs as much as two faults.
const FAULTS_PER_LOOK: u64 = 256;
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
            faults: 0,
        }
    }

    /// A thread raised a fault.
    pub(crate) fn faulted(&mut self, thread: u32) {
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
