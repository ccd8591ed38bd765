//! The log in memory that another store has filled, and what another store is to find.

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

/// The memory of a partition has a table that no store has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged;

/// Which store has filled memory that is adopted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// An earlier one of this server.
    Restart,
    /// One of another server, whose next sequence was this one.
    Move {
        /// The next sequence.
        sequence_end: u64,
        /// The end of the runs in use.
        runs_end: u32,
    },
}

impl Log {
    /// The log in memory that another store has filled.
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
            // What was written last elsewhere is taken for as young as what was written last here.
            Origin::Move { sequence_end, .. } => {
                shared.sequence.load(Ordering::Relaxed).wrapping_sub(sequence_end)
            }
        };
        let mut log = Self::new(number, Arc::clone(&memory), layout, cas);
        let runs_end = match origin {
            Origin::Restart => u32::try_from(layout.runs).map_err(|_| Damaged)?,
            // The rest of the table was never written, and would have memory if it was read.
            Origin::Move { runs_end, .. } => runs_end,
        };
        let mut used = Vec::new();
        let mut run = 1;
        while run < runs_end {
            let entry = RunEntry::new(&memory, &layout, run);
            if entry.state() == RunState::Free {
                if origin != Origin::Restart {
                    // The pages that the source had for it were not copied.
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
                // Only what is filled was copied.
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

    /// Returns the charges of all runs. No thread may see the partition any more, and the log is
    /// not to be used again.
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
            // A run that left for the pool and is not needed there any more is retired twice.
            entry.set_charged(0);
            if retired.then == RetiredUse::Spare {
                shared.budget.free(charged);
            } else {
                shared.budget.free_retired(charged);
            }
        }
        self.release_overflow(shared);
    }

    /// Bytes of the budget that runs in use have.
    pub fn charged(&self) -> u64 {
        self.queues.iter().flat_map(BTreeMap::values).map(|run| self.entry(*run).charged() as u64).sum()
    }

    /// The end of the runs in use.
    pub fn runs_end(&self) -> u32 {
        let ends = self.queues.iter().flat_map(BTreeMap::values).map(|run| run + self.entry(*run).runs());
        ends.max().unwrap_or(1)
    }

    /// Seals all runs, and returns the memory of free ones to the system. No thread may have pinned
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
