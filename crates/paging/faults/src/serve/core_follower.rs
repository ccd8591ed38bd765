//! Keeps a monitor's thread on the core where its program faults.
//!
//! A wake-up on the same core costs a third of a wake-up across cores. The kernel does not know
//! that the two threads take turns. So the monitor checks at intervals where the last faulting
//! thread ran, and moves there if two checks agree.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::process::ProgramProcess;
use super::stat::{PROCESSOR, field};

/// Number of faults between two checks. A check takes some microseconds.
const FAULTS_PER_CHECK: u64 = 256;

/// Chooses the core of a monitor's thread and of its program's worker.
#[derive(Debug)]
pub(crate) struct CoreFollower {
    allowed: Option<CpuSet>,
    seen: Option<usize>,
    pinned: Option<usize>,
    next_check: u64,
    stat: Option<(u32, File)>,
    faults: u64,
}

impl CoreFollower {
    /// Begins with the cores on which the calling thread may run.
    pub(crate) fn new() -> Self {
        Self {
            allowed: sched_getaffinity(None).ok(),
            seen: None,
            pinned: None,
            next_check: FAULTS_PER_CHECK,
            stat: None,
            faults: 0,
        }
    }

    /// Records a fault of a thread, and checks the core of every
    /// [`FAULTS_PER_CHECK`]th faulting thread.
    pub(crate) fn faulted(&mut self, process: Option<&ProgramProcess>, thread: u32) {
        self.faults += 1;
        if self.faults >= self.next_check
            && let Some(process) = process
        {
            self.next_check = self.faults + FAULTS_PER_CHECK;
            self.check(process, thread);
        }
    }

    fn check(&mut self, process: &ProgramProcess, thread: u32) {
        let (Some(allowed), Some(core)) = (self.allowed, self.core_of(process, thread)) else {
            return;
        };
        let is_steady = self.seen.replace(core) == Some(core);
        let wanted = (is_steady && allowed.is_set(core)).then_some(core);
        if wanted != self.pinned {
            let set = wanted.map_or(allowed, single_core);
            if sched_setaffinity(None, &set).is_ok() {
                self.pinned = wanted;
            }
        }
    }

    /// The core of the monitor, or `None` if the monitor may run anywhere. The program's worker
    /// should run there, too: pages that it frees are in this core's cache at the next fault.
    pub(crate) fn core(&self) -> Option<usize> {
        self.pinned
    }

    /// Returns the core on which a thread ran last; `None` if the process has no such thread.
    ///
    /// The number comes from the thread's own PID namespace, and may name another thread here.
    fn core_of(&mut self, process: &ProgramProcess, thread: u32) -> Option<usize> {
        if self.stat.as_ref().is_none_or(|(known, _)| *known != thread) {
            self.stat = Some((thread, process.open_of_thread(thread, "stat").ok()?));
        }
        let mut buffer = [0; 1024];
        let length = self.stat.as_ref()?.1.read_at(&mut buffer, 0).ok()?;
        usize::try_from(field(&buffer[..length], PROCESSOR)?).ok()
    }
}

/// Returns a set with one core.
fn single_core(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}
