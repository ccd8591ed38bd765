//! The runs of a partition's log: the table of their states, and the gaps between them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::Layout;
use super::memory::{Memory, PAGE_BYTES};

/// The state of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum RunState {
    /// The run has no items, and may be part of a gap.
    Free = 0,
    /// Items are appended to the run.
    Open = 1,
    /// The run has items, and no more are appended.
    Sealed = 2,
    /// All items of the run were flushed.
    Flushed = 3,
    /// The items of the run are in the pool, not in this memory.
    Remote = 4,
    /// The items of the run were in the pool, and are lost.
    Lost = 5,
}

impl RunState {
    /// Whether the bytes of the items are not in this memory.
    #[inline]
    #[must_use]
    pub fn is_away(self) -> bool {
        matches!(self, Self::Remote | Self::Lost)
    }
}

/// The queue of a run, by the items that it has (S3-FIFO, SOSP 2023).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    /// New items, until the eviction finds that they were read.
    Probation = 0,
    /// Items that were read while they were on probation.
    Main = 1,
}

impl Queue {
    /// Both queues.
    pub const ALL: [Self; 2] = [Self::Probation, Self::Main];
}

/// The entry of a run in the table.
///
/// Only the holder of the partition's lock writes the words. Readers without the lock use the
/// state, the cas base, the serial number with the fill, and the second of opening.
#[derive(Clone, Copy, Debug)]
pub struct RunEntry<'a> {
    memory: &'a Memory,
    at: usize,
}

impl<'a> RunEntry<'a> {
    /// The entry of a run.
    #[inline]
    pub fn new(memory: &'a Memory, layout: &Layout, run: u32) -> Self {
        Self { memory, at: layout.run_entry(run) }
    }

    #[inline]
    fn word(&self, number: usize) -> &'a AtomicU64 {
        self.memory.word(self.at + number * 8)
    }

    #[inline]
    fn get(&self, number: usize) -> u64 {
        self.word(number).load(Ordering::Acquire)
    }

    #[inline]
    fn set(&self, number: usize, value: u64) {
        self.word(number).store(value, Ordering::Release);
    }

    /// The run's state.
    #[inline]
    pub fn state(&self) -> RunState {
        match self.get(0) {
            1 => RunState::Open,
            2 => RunState::Sealed,
            3 => RunState::Flushed,
            4 => RunState::Remote,
            5 => RunState::Lost,
            _ => RunState::Free,
        }
    }

    /// Sets the run's state.
    pub fn set_state(&self, state: RunState) {
        self.set(0, state as u64);
    }

    /// The base to which the cas numbers of the run's items are relative.
    #[inline]
    pub fn cas_base(&self) -> u64 {
        self.get(1)
    }

    /// Sets the base to which the cas numbers of the run's items are relative.
    pub fn set_cas_base(&self, cas: u64) {
        self.set(1, cas);
    }

    /// Bytes from the start that items and marks have filled.
    pub fn fill(&self) -> usize {
        self.serial_and_fill().1
    }

    /// The serial number, which counts how often the run was opened, modulo 2^32; and the bytes
    /// that were filled since. While the serial number stays the same, those bytes do not change.
    pub fn serial_and_fill(&self) -> (u32, usize) {
        let word = self.get(2);
        (low_half(word >> 32), to_usize(word & u64::from(u32::MAX)))
    }

    /// Sets the number of filled bytes.
    pub fn set_fill(&self, bytes: usize) {
        self.set(2, self.get(2) & !u64::from(u32::MAX) | bytes as u64);
    }

    /// Increments the serial number, and sets the filled bytes to 0.
    pub fn reopen(&self) {
        let (serial, _) = self.serial_and_fill();
        self.set(2, u64::from(serial.wrapping_add(1)) << 32);
    }

    /// Bytes of items that the index points to.
    pub fn live(&self) -> usize {
        to_usize(self.get(3))
    }

    /// Sets the bytes of items that the index points to.
    pub fn set_live(&self, bytes: usize) {
        self.set(3, bytes as u64);
    }

    /// The place in the order in which runs were opened on this server.
    pub fn sequence(&self) -> u64 {
        self.get(4)
    }

    /// Sets the place in the order.
    pub fn set_sequence(&self, sequence: u64) {
        self.set(4, sequence);
    }

    /// The second in which the run was opened, and the last second in which an item expires, or 0
    /// if none expires.
    pub fn times(&self) -> (u32, u32) {
        let word = self.get(5);
        (low_half(word), low_half(word >> 32))
    }

    /// Sets the second in which the run was opened, and the last second in which an item expires.
    pub fn set_times(&self, opened_s: u32, expires_s: u32) {
        self.set(5, u64::from(opened_s) | u64::from(expires_s) << 32);
    }

    /// The expiry class of the run's items.
    pub fn class(&self) -> usize {
        to_usize(self.get(6) & 0xFFFF)
    }

    /// The queue of the run.
    #[inline]
    pub fn queue(&self) -> Queue {
        if self.get(6) >> 16 & 1 == 0 { Queue::Probation } else { Queue::Main }
    }

    /// The number of consecutive runs of which the run consists.
    pub fn runs(&self) -> u32 {
        low_half(self.get(6) >> 32)
    }

    /// Sets the queue, the expiry class, and the number of consecutive runs.
    pub fn set_kind(&self, queue: Queue, class: usize, runs: u32) {
        self.set(6, class as u64 | (queue as u64) << 16 | u64::from(runs) << 32);
    }

    /// Bytes of the budget that are charged for the run: whole pages.
    pub fn charged(&self) -> usize {
        to_usize(self.get(7) & u64::from(u32::MAX))
    }

    /// Sets the bytes of the budget that are charged for the run.
    pub fn set_charged(&self, bytes: usize) {
        self.set(7, self.get(7) & !u64::from(u32::MAX) | bytes as u64);
    }

    /// The second of the last mark, in which the last items were stored.
    pub fn marked_s(&self) -> u32 {
        low_half(self.get(7) >> 32)
    }

    /// Sets the second of the last mark.
    pub fn set_marked_s(&self, second: u32) {
        self.set(7, self.get(7) & u64::from(u32::MAX) | u64::from(second) << 32);
    }

    /// Bytes that must be charged before the run can have `fill` filled bytes.
    pub fn lacks(&self, fill: usize) -> usize {
        fill.next_multiple_of(PAGE_BYTES).saturating_sub(self.charged())
    }
}

fn to_usize(word: u64) -> usize {
    usize::try_from(word).expect("64 bits")
}

fn low_half(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).expect("32 bits")
}

/// The gaps between runs.
#[derive(Debug)]
pub struct Gaps {
    /// Length of each gap, by its first run.
    gaps: BTreeMap<u32, u32>,
}

impl Gaps {
    /// All runs of a log except run 0.
    #[must_use]
    pub fn all(layout: &Layout) -> Self {
        let runs = u32::try_from(layout.runs - 1).expect("at most 2^21 runs");
        Self { gaps: BTreeMap::from([(1, runs)]) }
    }

    /// Whether there is a gap of at least this many runs.
    #[must_use]
    pub fn has(&self, runs: u32) -> bool {
        self.gaps.values().any(|len| *len >= runs)
    }

    /// Allocates consecutive runs in the first gap that is large enough; returns the first of them.
    pub fn allocate(&mut self, runs: u32) -> Option<u32> {
        let (first, len) =
            self.gaps.iter().find(|(_, len)| **len >= runs).map(|(&first, &len)| (first, len))?;
        self.gaps.remove(&first);
        if len > runs {
            self.gaps.insert(first + runs, len - runs);
        }
        Some(first)
    }

    /// Allocates these consecutive runs; returns whether they were in a gap.
    pub fn allocate_at(&mut self, first: u32, runs: u32) -> bool {
        let gap = self.gaps.range(..=first).next_back().map(|(&start, &len)| (start, len));
        let Some((start, len)) = gap.filter(|(start, len)| start + len >= first + runs) else { return false };
        self.gaps.remove(&start);
        if start < first {
            self.gaps.insert(start, first - start);
        }
        if first + runs < start + len {
            self.gaps.insert(first + runs, start + len - first - runs);
        }
        true
    }

    /// Frees consecutive runs, which become part of a gap.
    ///
    /// # Panics
    /// If a run of them is in a gap.
    pub fn free(&mut self, first: u32, runs: u32) {
        let mut gap = (first, runs);
        if let Some((&before, &len)) = self.gaps.range(..=first).next_back() {
            assert!(before + len <= first, "run {first} is free");
            if before + len == first {
                self.gaps.remove(&before);
                gap = (before, len + runs);
            }
        }
        let end = first + runs;
        if let Some((&after, &len)) = self.gaps.range(end - runs + 1..).next() {
            assert!(after >= end, "run {after} is free");
            if after == end {
                self.gaps.remove(&after);
                gap.1 += len;
            }
        }
        self.gaps.insert(gap.0, gap.1);
    }
}

/// Memory that the parts of a partition share.
pub type SharedMemory = Arc<Memory>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_used_from_the_start_and_joined() {
        let layout = Layout::for_limit(1 << 20);
        let mut gaps = Gaps::all(&layout);
        let last = u32::try_from(layout.runs).unwrap();
        assert_eq!((gaps.allocate(1), gaps.allocate(3), gaps.allocate(2)), (Some(1), Some(2), Some(5)));
        gaps.free(2, 3);
        assert_eq!((gaps.allocate(4), gaps.allocate(2)), (Some(7), Some(2)));
        gaps.free(5, 2);
        gaps.free(1, 1);
        gaps.free(2, 2);
        assert_eq!(gaps.gaps, BTreeMap::from([(1, 6), (11, last - 11)]));
        gaps.free(7, 4);
        assert_eq!(gaps.gaps, BTreeMap::from([(1, last - 1)]));
        assert_eq!(gaps.allocate(last), None);
    }
}
