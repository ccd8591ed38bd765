//! Keeps a monitor's thread on the core where its program faults.
//!
//! A wake-up on the same core costs a third of one across cores. The kernel cannot know that two threads take turns, so the
//! monitor looks now and then where the last faulting thread ran, and moves there if it finds it at the same place twice. A thread that
//! the scheduler keeps taking away again is held, if that pays.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::hold::{hold_while, only};
use super::stat::{PROCESSOR, field};
use super::trial::Trial;
use crate::journal::Journal;

/// Faults between looks; a look costs some microseconds.
const FAULTS_PER_LOOK: u64 = 256;
/// Faults in a row by one thread, after which it is worth holding.
const FAULTS_TO_HOLD: u32 = 64;

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
    /// Whether the thread is held.
    trial: Trial,
    began: Instant,
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
            trial: Trial::default(),
            began: Instant::now(),
            faults: 0,
        }
    }

    /// A thread of a process raised a fault.
    pub(crate) fn faulted(&mut self, process: u32, thread: u32) {
        let in_row = if self.streak.0 == thread { self.streak.1.saturating_add(1) } else { 1 };
        self.streak = (thread, in_row);
        self.faults += 1;
        let began = self.began;
        self.trial.faulted(|| began.elapsed());
        if self.faults >= self.next_look && process != 0 && thread != 0 {
            self.next_look = self.faults + FAULTS_PER_LOOK;
            self.look(process, thread);
        }
    }

    fn look(&mut self, process: u32, thread: u32) {
        let (Some(allowed), Some(core)) = (self.allowed, self.core_of(process, thread)) else {
            return;
        };
        if self.pinned.is_some_and(|pinned| pinned != core) {
            self.trial.drifted(self.began.elapsed());
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

    /// Wake `thread`, which waits for this, by `fill`: so that it goes on on this core, if it alone faults and was seen to drift.
    pub(crate) fn wake_by<T>(
        &self,
        journal: &Journal,
        process: u32,
        thread: u32,
        fill: impl FnOnce() -> T,
    ) -> T {
        let is_known = self.stat.as_ref().is_some_and(|(known, _)| *known == thread);
        let is_wanted =
            is_known && self.trial.holds() && self.streak.0 == thread && self.streak.1 >= FAULTS_TO_HOLD;
        match self.pinned.filter(|_| is_wanted) {
            Some(core) => hold_while(journal, process, thread, core, fill),
            None => fill(),
        }
    }

    /// Nothing where the process has no such thread: the number is that of the thread's own name space, and may be anybody's here.
    fn core_of(&mut self, process: u32, thread: u32) -> Option<usize> {
        if self.stat.as_ref().is_none_or(|(known, _)| *known != thread) {
            self.trial.forget();
            self.stat = Some((thread, File::open(format!("/proc/{process}/task/{thread}/stat")).ok()?));
        }
        let mut buffer = [0; 1024];
        let length = self.stat.as_ref()?.1.read_at(&mut buffer, 0).ok()?;
        usize::try_from(field(&buffer[..length], PROCESSOR)?).ok()
    }
}
