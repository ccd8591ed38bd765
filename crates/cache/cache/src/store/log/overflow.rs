//! The runs of a log whose items are in the pool, or are being copied there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use super::super::Shared;
use super::super::runs::RunState;
use super::{Log, RetiredUse};

/// An item of a run in the pool: the bits of its key's hash that the index uses, and its offset in
/// the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteItem {
    /// The lower half of the hash.
    pub hash: u32,
    /// The offset in the run.
    pub offset: u16,
}

/// Bytes of the budget that are charged for each item in the pool.
const REMOTE_ITEM_BYTES: usize = std::mem::size_of::<RemoteItem>();

/// A run in the pool.
#[derive(Debug)]
struct RemoteRun {
    /// The place in the pool.
    place: u64,
    /// The items that the run had when it was copied.
    kept: Box<[RemoteItem]>,
    /// Number of these items to which the index still points.
    items: usize,
    /// The place in the order in which runs were opened.
    sequence: u64,
}

/// Runs in the pool, and runs that are being copied there.
#[derive(Debug, Default)]
pub struct OverflowRuns {
    remote: BTreeMap<u32, RemoteRun>,
    /// Sequences and numbers of the runs in the pool, in the order in which they were opened.
    order: BTreeSet<(u64, u32)>,
    /// The serial numbers of runs that are being copied to the pool.
    leaving: BTreeMap<u32, u32>,
}

impl Log {
    /// Whether a run's items are in the pool, or were lost there.
    pub fn is_remote(&self, run: u32) -> bool {
        !self.overflow.remote.is_empty() && self.overflow.remote.contains_key(&run)
    }

    /// Notes that a run, which is in no queue, is being copied to the pool. `live` of its bytes are
    /// in use.
    pub fn begin_leaving(&mut self, run: u32, live: usize) {
        let entry = self.entry(run);
        let (serial, _) = entry.serial_and_fill();
        let before = entry.live();
        entry.set_live(live);
        self.live_bytes -= (before - live) as u64;
        self.overflow.leaving.insert(run, serial);
    }

    /// Whether a run is still the one that was copied to the pool.
    pub fn is_leaving(&self, run: u32, serial: u32) -> bool {
        self.overflow.leaving.get(&run) == Some(&serial)
            && self.entry(run).serial_and_fill().0 == serial
            && self.entry(run).state() == RunState::Sealed
    }

    /// Returns a run to its queue because its copy was cancelled; returns whether it is in use.
    pub fn stop_leaving(&mut self, shared: &Shared, run: u32, serial: u32) -> bool {
        let is_leaving = self.is_leaving(run, serial);
        if self.overflow.leaving.get(&run) == Some(&serial) {
            self.overflow.leaving.remove(&run);
        }
        if is_leaving {
            self.link(run);
            self.note_cleanable(shared, run, 0);
        }
        is_leaving
    }

    /// Notes that the items of a run are in the pool now, at `place`. The index points to `items`
    /// of those in `kept`.
    pub fn leave(&mut self, shared: &Shared, run: u32, place: u64, kept: Box<[RemoteItem]>, items: usize) {
        let entry = self.entry(run);
        let (live, fill, charged) = (entry.live(), entry.fill(), entry.charged());
        let (sequence, runs, queue) = (entry.sequence(), entry.runs(), entry.queue());
        entry.set_live(0);
        entry.set_state(RunState::Remote);
        self.overflow.leaving.remove(&run);
        shared.free_queue(queue, charged);
        shared.budget.retire(charged as u64);
        shared.budget.charge_always((kept.len() * REMOTE_ITEM_BYTES) as u64);
        shared.pool.items.fetch_add(kept.len() as u64, Ordering::Relaxed);
        self.live_bytes -= live as u64;
        self.filled_bytes -= fill as u64;
        self.overflow.remote.insert(run, RemoteRun { place, kept, items, sequence });
        self.overflow.order.insert((sequence, run));
        self.retire_as(shared, run, runs, RetiredUse::Remote);
    }

    /// The place of a run in the pool, if the run still has this serial number.
    pub fn place_in_pool(&self, run: u32, serial: u32) -> Option<u64> {
        let entry = self.entry(run);
        let is_same = entry.state() == RunState::Remote && entry.serial_and_fill().0 == serial;
        if is_same { self.overflow.remote.get(&run).map(|remote| remote.place) } else { None }
    }

    /// Notes that a slot no longer points to an item of a run in the pool. Frees the run if that
    /// was its last item.
    pub fn release_remote(&mut self, shared: &Shared, run: u32) {
        let Some(remote) = self.overflow.remote.get_mut(&run) else { return };
        remote.items = remote.items.saturating_sub(1);
        if remote.items == 0 {
            self.free_remote(shared, run);
        }
    }

    /// Frees a run in the pool to whose items no slot points any more.
    pub fn free_remote(&mut self, shared: &Shared, run: u32) {
        let Some(remote) = self.overflow.remote.remove(&run) else { return };
        self.overflow.order.remove(&(remote.sequence, run));
        free_remote_items(shared, &remote.kept);
        shared.pool.free(remote.place);
        let entry = self.entry(run);
        let runs = entry.runs();
        entry.set_state(RunState::Free);
        // A thread may still be about to read the state of the run.
        self.retire_as(shared, run, runs, RetiredUse::Free);
    }

    /// The sequence and number of the run in the pool that was opened first.
    pub fn oldest_remote(&self) -> Option<(u64, u32)> {
        self.overflow.order.first().copied()
    }

    /// A run in the pool whose items were lost or have expired, and to which slots still point.
    pub fn unreadable_remote(&self, now_s: u32) -> Option<u32> {
        let is_unreadable = |run: &&u32| {
            let entry = self.entry(**run);
            entry.state() == RunState::Lost || entry.class() != 0 && entry.times().1 <= now_s
        };
        self.overflow.remote.keys().find(is_unreadable).copied()
    }

    /// Runs in the pool.
    pub fn remote_runs(&self) -> Vec<u32> {
        self.overflow.remote.keys().copied().collect()
    }

    /// Items in the pool.
    pub fn items_in_pool(&self) -> u64 {
        self.overflow.remote.values().map(|remote| remote.items as u64).sum()
    }

    /// The items that a run had when it was copied to the pool.
    pub fn remote_items(&self, run: u32) -> Box<[RemoteItem]> {
        self.overflow.remote.get(&run).map_or(Box::default(), |remote| remote.kept.clone())
    }

    /// Notes that the pool has lost the items of a run.
    pub fn lose_remote(&mut self, run: u32) {
        if self.overflow.remote.contains_key(&run) {
            self.entry(run).set_state(RunState::Lost);
        }
    }

    /// Cancels the copies of all runs that are being copied to the pool.
    pub fn stop_all_leaving(&mut self, shared: &Shared) {
        let leaving: Vec<(u32, u32)> =
            self.overflow.leaving.iter().map(|(run, serial)| (*run, *serial)).collect();
        for (run, serial) in leaving {
            self.stop_leaving(shared, run, serial);
        }
    }

    /// Marks all items in the pool as lost, and those that are being copied there as flushed.
    pub(super) fn flush_overflow(&mut self, shared: &Shared) {
        for run in self.overflow.remote.keys() {
            self.entry(*run).set_state(RunState::Lost);
        }
        let leaving: Vec<(u32, u32)> =
            self.overflow.leaving.iter().map(|(run, serial)| (*run, *serial)).collect();
        for (run, serial) in leaving {
            if self.stop_leaving(shared, run, serial) {
                self.entry(run).set_state(RunState::Flushed);
            }
        }
    }

    /// Frees the places of this log in the pool. The log must not be used again.
    pub(super) fn release_overflow(&mut self, shared: &Shared) {
        self.overflow.order.clear();
        for remote in std::mem::take(&mut self.overflow.remote).into_values() {
            free_remote_items(shared, &remote.kept);
            shared.pool.free(remote.place);
        }
        for (run, serial) in self.overflow.leaving.clone() {
            if self.is_leaving(run, serial) {
                let entry = self.entry(run);
                shared.free_queue(entry.queue(), entry.charged());
                shared.budget.free(entry.charged() as u64);
            }
        }
        self.overflow.leaving.clear();
    }
}

fn free_remote_items(shared: &Shared, kept: &[RemoteItem]) {
    shared.budget.free((kept.len() * REMOTE_ITEM_BYTES) as u64);
    shared.pool.items.fetch_sub(kept.len() as u64, Ordering::Relaxed);
}
