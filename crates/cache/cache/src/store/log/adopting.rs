//! Adoption of a log in memory that another store has filled, and preparation for the next store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::Shared;
use super::super::classes::CLASSES;
use super::super::layout::Layout;
use super::super::memory::PAGE_BYTES;
use super::super::runs::{RunEntry, RunState, SharedMemory};
use super::super::slot::RUN_BYTES;
use super::{Log, RetiredUse};

/// The table of runs in the memory of a partition is inconsistent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged;

/// The store that has filled adopted memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// An earlier store of this server.
    Restart,
    /// The store of another server.
    Move {
        /// The next sequence of the other store.
        sequence_end: u64,
        /// The end of the runs in use.
        runs_end: u32,
    },
}

impl Log {
    /// Adopts the log in memory that another store has filled.
    ///
    /// # Errors
    /// If the table of runs is damaged. Nothing is charged then.
    pub fn adopt(
        number: usize,
        memory: SharedMemory,
        layout: Layout,
        shared: &Shared,
        cas: u64,
        origin: Origin,
    ) -> Result<Self, Damaged> {
        let shift = match origin {
            Origin::Restart => 0,
            // The newest run of the other server becomes as new as the newest run of this store.
            Origin::Move { sequence_end, .. } => {
                shared.sequence.load(Ordering::Relaxed).wrapping_sub(sequence_end)
            }
        };
        let mut log = Self::new(number, Arc::clone(&memory), layout, cas);
        let runs_end = match origin {
            Origin::Restart => u32::try_from(layout.runs).map_err(|_| Damaged)?,
            // The remainder of the table was never written, and reading it would allocate memory.
            Origin::Move { runs_end, .. } => runs_end,
        };
        let mut used = Vec::new();
        let mut run = 1;
        while run < runs_end {
            let entry = RunEntry::new(&memory, &layout, run);
            if entry.state() == RunState::Free {
                if origin != Origin::Restart {
                    // The pages that the source had for the run were not copied.
                    entry.set_charged(0);
                }
                run += 1;
                continue;
            }
            let (runs, fill, live) = (entry.runs(), entry.fill(), entry.live());
            let is_valid = runs >= 1
                && runs <= runs_end - run
                && fill <= runs as usize * RUN_BYTES
                && live <= fill
                && (origin != Origin::Restart || entry.lacks(fill) == 0)
                && entry.class() < CLASSES
                && log.gaps.allocate_at(run, runs);
            if !is_valid {
                return Err(Damaged);
            }
            if origin != Origin::Restart {
                (run + 1..run + runs).for_each(|inner| RunEntry::new(&memory, &layout, inner).set_charged(0));
            }
            used.push(run);
            run += runs;
        }
        let mut last_sequence = 0;
        for run in used {
            let entry = RunEntry::new(&memory, &layout, run);
            let sequence = entry.sequence().wrapping_add(shift);
            let fill = entry.fill();
            last_sequence = last_sequence.max(sequence);
            entry.set_sequence(sequence);
            if origin != Origin::Restart {
                // Only the filled bytes were copied.
                entry.set_charged(fill.next_multiple_of(PAGE_BYTES));
            }
            shared.budget.charge_always(entry.charged() as u64);
            shared.charge_queue(entry.queue(), entry.charged());
            let is_flushed = entry.state() == RunState::Flushed;
            log.live_bytes += entry.live() as u64;
            log.filled_bytes += fill as u64;
            log.link(run);
            if !is_flushed {
                log.set_sealed(shared, run);
            }
        }
        shared.advance_sequence(last_sequence);
        Ok(log)
    }

    /// Returns the charges of all runs to the budget. No thread may use the partition any more, and
    /// the log must not be used again.
    pub fn release_all(&mut self, shared: &Shared) {
        for run in self.queues.iter().flat_map(BTreeMap::values) {
            let entry = RunEntry::new(&self.memory, &self.layout, *run);
            shared.free_queue(entry.queue(), entry.charged());
            shared.budget.free(entry.charged() as u64);
        }
        for run in self.spare.drain(..) {
            shared.budget.free(RunEntry::new(&self.memory, &self.layout, run).charged() as u64);
        }
        for retired in self.retired.drain(..) {
            let entry = RunEntry::new(&self.memory, &self.layout, retired.run);
            let charged = entry.charged() as u64;
            // A run that was moved to the pool and then freed there is retired twice.
            entry.set_charged(0);
            if retired.then == RetiredUse::Spare {
                shared.budget.free(charged);
            } else {
                shared.budget.free_retired(charged);
            }
        }
        self.release_overflow(shared);
    }

    /// Bytes of the budget that are charged for runs in use.
    pub fn charged(&self) -> u64 {
        self.queues.iter().flat_map(BTreeMap::values).map(|run| self.entry(*run).charged() as u64).sum()
    }

    /// The end of the runs in use.
    pub fn runs_end(&self) -> u32 {
        let ends = self.queues.iter().flat_map(BTreeMap::values).map(|run| run + self.entry(*run).runs());
        ends.max().unwrap_or(1)
    }

    /// Seals all runs, and returns the memory of free runs to the system. No thread may have pinned
    /// an epoch.
    pub fn complete(&mut self, shared: &Shared) {
        self.seal_all(shared);
        self.collect(shared);
        while let Some(run) = self.spare.pop() {
            let entry = self.entry(run);
            self.memory.discard(self.layout.run(run), entry.charged());
            entry.set_charged(0);
            self.gaps.free(run, 1);
        }
    }
}
