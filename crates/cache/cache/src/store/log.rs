//! The log of a partition: runs to which items are appended, in the order in which they are
//! evicted.

mod adopting;
mod overflow;

pub use adopting::{Damaged, Origin};
pub use overflow::{OverflowRuns, RemoteItem};

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use super::Shared;
use super::cas;
use super::classes::{CLASSES, class_of, open_max_s};
use super::item::{self, EncodedHeader, Header};
use super::layout::Layout;
use super::memory::PAGE_BYTES;
use super::runs::{Gaps, Queue, RunEntry, RunState, SharedMemory};
use super::slot::{Location, RUN_BYTES};

/// Bytes that are reserved for the header of an item and a mark before it.
const HEADER_ROOM: usize = 32;
/// The unused bytes of a run are counted in eighths of the run.
const UNUSED_PARTS: usize = 8;
/// A sealed run is cleaned if at least this many eighths of it are unused.
const SEALED_UNUSED_MIN: usize = 2;
/// An open run is cleaned if at least this many eighths of it are unused, and at least
/// [`OPEN_UNUSED_BYTES`].
const OPEN_UNUSED_MIN: usize = 4;
const OPEN_UNUSED_BYTES: usize = 4 * PAGE_BYTES;

/// The memory is full: something must be evicted first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom {
    /// Bytes that are needed.
    pub bytes: usize,
}

/// Whether an append may exceed the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Charge {
    /// The append is refused if the budget has too few free bytes.
    IfFree,
    /// The append is always charged: the item is a copy of one whose memory is about to be freed.
    Always,
}

/// The run to which an item is appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// The newest run of a queue.
    Newest(Queue),
    /// A run that replaces cleaned runs, the first of which had this sequence.
    Cleaned(Queue, u64),
}

impl Target {
    fn queue(self) -> Queue {
        match self {
            Self::Newest(queue) | Self::Cleaned(queue, _) => queue,
        }
    }

    /// The number of the list of open runs.
    fn list(self) -> usize {
        match self {
            Self::Newest(queue) => queue as usize,
            Self::Cleaned(queue, _) => 2 + queue as usize,
        }
    }
}

/// A run whose bytes are not needed any more, and that a thread may still read.
#[derive(Debug)]
struct Retired {
    epoch: u64,
    run: u32,
    runs: u32,
    then: RetiredUse,
}

/// The use of a retired run once no thread can read it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RetiredUse {
    /// The run is free, and its memory returns to the system.
    Free,
    /// The run is free, and keeps its pages.
    Spare,
    /// The items of the run are in the pool; its memory returns to the system.
    Remote,
}

/// An item to append.
#[derive(Clone, Copy, Debug)]
pub struct NewItem<'a> {
    /// The fields other than key and value.
    pub header: Header,
    /// The key.
    pub key: &'a [u8],
    /// The value, in two parts.
    pub value: [&'a [u8]; 2],
    /// The second in which the item was stored.
    pub stored_s: u32,
    /// Largest error of the stored second that the log may note, in seconds.
    pub tolerance_s: u32,
}

impl NewItem<'_> {
    fn value_len(&self) -> usize {
        self.value[0].len() + self.value[1].len()
    }
}

/// The runs of a partition, and the state of the log that the partition's lock protects.
#[derive(Debug)]
pub struct Log {
    /// The partition's number.
    number: usize,
    memory: SharedMemory,
    layout: Layout,
    gaps: Gaps,
    /// The open runs of each list, by expiry class; 0 if there is none.
    open: [[u32; CLASSES]; 4],
    /// The runs of each queue, by sequence: the first is evicted first.
    queues: [BTreeMap<u64, u32>; 2],
    /// Runs that should be cleaned: the number of unused eighths, and the sequence.
    cleanable: BTreeSet<(usize, u64)>,
    /// Sealed runs by the second in which their last item expires.
    expiring: BinaryHeap<Reverse<(u32, u64, u32)>>,
    /// Free runs that have kept their pages.
    spare: Vec<u32>,
    retired: VecDeque<Retired>,
    /// Runs whose items are in the pool, or are being copied there.
    overflow: OverflowRuns,
    /// Number of runs that were opened since this was last set to 0.
    pub opened: u32,
    /// Bytes of items that the index points to.
    pub live_bytes: u64,
    /// Bytes of items that were written to runs in use.
    filled_bytes: u64,
    /// The last cas number.
    pub cas: u64,
}

impl Log {
    /// Creates the log of an empty partition, whose cas numbers begin after `cas`.
    pub fn new(number: usize, memory: SharedMemory, layout: Layout, cas: u64) -> Self {
        Self {
            number,
            gaps: Gaps::all(&layout),
            memory,
            layout,
            open: [[0; CLASSES]; 4],
            queues: [BTreeMap::new(), BTreeMap::new()],
            cleanable: BTreeSet::new(),
            expiring: BinaryHeap::new(),
            spare: Vec::new(),
            retired: VecDeque::new(),
            overflow: OverflowRuns::default(),
            opened: 0,
            live_bytes: 0,
            filled_bytes: 0,
            cas,
        }
    }

    /// The next cas number.
    #[inline]
    pub fn next_cas(&self, shared: &Shared) -> u64 {
        cas::next(self.cas, shared.cas_step)
    }

    /// The entry of a run in the table.
    pub fn entry(&self, run: u32) -> RunEntry<'_> {
        RunEntry::new(&self.memory, &self.layout, run)
    }

    /// Appends an item; returns its location. The item is not yet in the index.
    ///
    /// # Errors
    /// If memory must be freed first. The item is not appended then.
    pub fn append(
        &mut self,
        shared: &Shared,
        now_s: u32,
        item: &NewItem<'_>,
        target: Target,
        charge: Charge,
    ) -> Result<Location, NoRoom> {
        let len_max = HEADER_ROOM + item.key.len() + item.value_len();
        let class = class_of(item.header.expires_s, now_s);
        if len_max > RUN_BYTES {
            return self.append_long(shared, now_s, item, (target.queue(), class), charge);
        }
        let mut run = self.open[target.list()][class];
        if run == 0 || self.entry(run).fill() + len_max > RUN_BYTES || self.is_old(run, now_s) {
            self.seal(shared, target.list(), class);
            run = self.open_run(shared, now_s, target, class, 1).ok_or(NoRoom { bytes: RUN_BYTES })?;
            self.open[target.list()][class] = run;
        }
        self.write(shared, run, item, charge)
    }

    fn append_long(
        &mut self,
        shared: &Shared,
        now_s: u32,
        item: &NewItem<'_>,
        (queue, class): (Queue, usize),
        charge: Charge,
    ) -> Result<Location, NoRoom> {
        self.collect(shared);
        let len_max = HEADER_ROOM + item.key.len() + item.value_len();
        let no_room = NoRoom { bytes: len_max.next_multiple_of(PAGE_BYTES) };
        let runs = u32::try_from(len_max.div_ceil(RUN_BYTES)).map_err(|_| no_room)?;
        if charge == Charge::IfFree && shared.budget.available() < no_room.bytes as u64 {
            return Err(no_room);
        }
        let run = self.open_run(shared, now_s, Target::Newest(queue), class, runs).ok_or(no_room)?;
        match self.write(shared, run, item, charge) {
            Ok(location) => {
                self.set_sealed(shared, run);
                Ok(location)
            }
            Err(no_room) => {
                // Nothing was written, so no thread can read the run.
                self.unlink(run);
                self.entry(run).set_state(RunState::Free);
                self.gaps.free(run, runs);
                Err(no_room)
            }
        }
    }

    fn open_run(
        &mut self,
        shared: &Shared,
        now_s: u32,
        target: Target,
        class: usize,
        runs: u32,
    ) -> Option<u32> {
        self.collect(shared);
        let spare = if runs == 1 { self.spare.pop() } else { None };
        let run = spare.or_else(|| self.gaps.allocate(runs))?;
        let sequence = match target {
            Target::Newest(_) => shared.next_sequence(),
            Target::Cleaned(queue, first) => {
                (first..).find(|sequence| !self.queues[queue as usize].contains_key(sequence))?
            }
        };
        let entry = self.entry(run);
        entry.set_cas_base(self.cas);
        entry.reopen();
        entry.set_live(0);
        entry.set_sequence(sequence);
        entry.set_times(now_s, 0);
        entry.set_marked_s(now_s);
        entry.set_kind(target.queue(), class, runs);
        entry.set_state(RunState::Open);
        let charged = entry.charged();
        self.link(run);
        shared.charge_queue(target.queue(), charged);
        if matches!(target, Target::Newest(_)) {
            self.opened += 1;
        }
        Some(run)
    }

    fn write(
        &mut self,
        shared: &Shared,
        run: u32,
        item: &NewItem<'_>,
        charge: Charge,
    ) -> Result<Location, NoRoom> {
        let entry = self.entry(run);
        let fill = entry.fill();
        let encoded = EncodedHeader::new(&item.header, item.key.len(), item.value_len(), entry.cas_base());
        let is_marked = entry.marked_s().abs_diff(item.stored_s) <= item.tolerance_s;
        let mark = item::mark(item.stored_s);
        let mark = if is_marked { &[][..] } else { &mark };
        let parts = [mark, encoded.as_bytes(), item.key, item.value[0], item.value[1]];
        let filled: usize = parts.iter().map(|part| part.len()).sum();
        let len = filled - mark.len();
        let lacks = entry.lacks(fill + filled);
        if lacks != 0 {
            match charge {
                Charge::Always => shared.budget.charge_always(lacks as u64),
                Charge::IfFree if shared.budget.charge(lacks as u64) => {}
                Charge::IfFree => return Err(NoRoom { bytes: lacks }),
            }
            entry.set_charged(entry.charged() + lacks);
            shared.charge_queue(entry.queue(), lacks);
        }
        let mut at = self.layout.run(run) + fill;
        for part in parts {
            // SAFETY: no slot points to the bytes after the fill of an open run, and no thread has
            // a pin from before the run was reused, so that only this thread, which holds the lock,
            // accesses them.
            unsafe { self.memory.write(at, part) };
            at += part.len();
        }
        let (opened_s, expires_s) = entry.times();
        entry.set_times(opened_s, expires_s.max(item.header.expires_s));
        entry.set_fill(fill + filled);
        entry.set_live(entry.live() + len);
        if !is_marked {
            entry.set_marked_s(item.stored_s);
        }
        let offset = u32::try_from(fill + mark.len()).expect("below the length of a run");
        self.live_bytes += len as u64;
        self.filled_bytes += filled as u64;
        Ok(Location { run, offset })
    }

    fn is_old(&self, run: u32, now_s: u32) -> bool {
        let entry = self.entry(run);
        open_max_s(entry.class()).is_some_and(|max| entry.times().0.saturating_add(max) <= now_s)
    }

    /// Seals the open run of a list and class, if there is one.
    fn seal(&mut self, shared: &Shared, list: usize, class: usize) {
        let run = std::mem::take(&mut self.open[list][class]);
        if run != 0 {
            self.set_sealed(shared, run);
        }
    }

    /// Seals all open runs.
    pub fn seal_all(&mut self, shared: &Shared) {
        for list in 0..self.open.len() {
            for class in 0..CLASSES {
                self.seal(shared, list, class);
            }
        }
    }

    /// Seals a run if it is open.
    fn seal_run(&mut self, shared: &Shared, run: u32) {
        let class = self.entry(run).class();
        for list in 0..self.open.len() {
            if self.open[list][class] == run {
                self.seal(shared, list, class);
            }
        }
    }

    fn set_sealed(&mut self, shared: &Shared, run: u32) {
        let entry = self.entry(run);
        let before = unused_parts(&entry);
        entry.set_state(RunState::Sealed);
        let (sequence, (_, expires_s)) = (entry.sequence(), entry.times());
        if entry.class() != 0 {
            self.expiring.push(Reverse((expires_s, sequence, run)));
        }
        self.note_cleanable(shared, run, before);
    }

    /// Seals runs that have been open for the longest time of their class.
    pub fn seal_old(&mut self, shared: &Shared, now_s: u32) {
        for list in 0..self.open.len() {
            for class in 1..CLASSES {
                if self.open[list][class] != 0 && self.is_old(self.open[list][class], now_s) {
                    self.seal(shared, list, class);
                }
            }
        }
    }

    /// Notes that a slot no longer points to an item of `len` bytes. Retires the run if that was
    /// its last item.
    pub fn release(&mut self, shared: &Shared, run: u32, len: usize) {
        let entry = self.entry(run);
        let before = unused_parts(&entry);
        let live = entry.live() - len;
        entry.set_live(live);
        let is_unused = live == 0 && entry.state() != RunState::Open;
        let has_changed = unused_parts(&entry) != before;
        self.live_bytes -= len as u64;
        if is_unused {
            self.unlink(run);
            self.retire(shared, run, shared.keeps_pages && self.spare.is_empty());
        } else if has_changed {
            self.note_cleanable(shared, run, before);
        }
    }

    /// Updates the noted unused parts of a run, of which `before` were noted.
    fn note_cleanable(&mut self, shared: &Shared, run: u32, before: usize) {
        let entry = self.entry(run);
        let (sequence, parts) = (entry.sequence(), unused_parts(&entry));
        if parts != before {
            self.cleanable.remove(&(before, sequence));
        }
        if parts != 0 {
            if self.cleanable.is_empty() {
                shared.cleanable_in.note(self.number);
            }
            self.cleanable.insert((parts, sequence));
        }
    }

    /// Whether there is a gap for this many bytes.
    pub fn has_gap(&self, bytes: usize) -> bool {
        u32::try_from(bytes.div_ceil(RUN_BYTES)).is_ok_and(|runs| self.gaps.has(runs))
    }

    /// Whether more than half of the log is unused, so that it should be cleaned although memory is
    /// free.
    pub fn is_mostly_unused(&self) -> bool {
        self.filled_bytes > 2 * self.live_bytes + 2 * RUN_BYTES as u64
    }

    /// Whether any run should be cleaned.
    pub fn has_cleanable(&self) -> bool {
        !self.cleanable.is_empty()
    }

    /// Removes the cleanable run with the most unused parts from its queue, and seals it if it is
    /// open. Returns its queue, sequence and number.
    pub fn pop_cleanable(&mut self, shared: &Shared) -> Option<(Queue, u64, u32)> {
        while let Some((_, sequence)) = self.cleanable.pop_last() {
            for queue in Queue::ALL {
                if let Some(run) = self.queues[queue as usize].remove(&sequence) {
                    self.seal_run(shared, run);
                    return Some((queue, sequence, run));
                }
            }
        }
        None
    }

    /// Retires a run to which no slot points, and which is in no queue. The run keeps its pages for
    /// this partition, or returns them to the budget.
    pub fn retire(&mut self, shared: &Shared, run: u32, keeps_pages: bool) {
        self.seal_run(shared, run);
        let entry = self.entry(run);
        let (live, fill, runs, charged) = (entry.live(), entry.fill(), entry.runs(), entry.charged());
        let noted = (unused_parts(&entry), entry.sequence());
        entry.set_live(0);
        entry.set_state(RunState::Free);
        shared.free_queue(entry.queue(), charged);
        let keeps_pages = keeps_pages && runs == 1;
        if !keeps_pages {
            shared.budget.retire(charged as u64);
        }
        self.cleanable.remove(&noted);
        self.live_bytes -= live as u64;
        self.filled_bytes -= fill as u64;
        self.retire_as(shared, run, runs, if keeps_pages { RetiredUse::Spare } else { RetiredUse::Free });
    }

    fn retire_as(&mut self, shared: &Shared, run: u32, runs: u32, then: RetiredUse) {
        if self.retired.is_empty() {
            shared.retired_in.note(self.number);
        }
        self.retired.push_back(Retired { epoch: shared.epochs.retire(), run, runs, then });
    }

    /// Frees the retired runs that no thread can read any more; returns whether others remain.
    pub fn collect(&mut self, shared: &Shared) -> bool {
        if self.retired.is_empty() {
            return false;
        }
        let oldest = shared.epochs.oldest();
        while let Some(retired) = self.retired.pop_front_if(|retired| retired.epoch < oldest) {
            if retired.then == RetiredUse::Spare {
                self.spare.push(retired.run);
                continue;
            }
            let entry = self.entry(retired.run);
            let charged = entry.charged();
            if charged != 0 {
                self.memory.discard(self.layout.run(retired.run), charged);
                entry.set_charged(0);
                shared.budget.free_retired(charged as u64);
            }
            if retired.then == RetiredUse::Free {
                self.gaps.free(retired.run, retired.runs);
            }
        }
        !self.retired.is_empty()
    }

    /// The sequence of the oldest run of a queue, and the run.
    pub fn oldest(&self, queue: Queue) -> Option<(u64, u32)> {
        self.queues[queue as usize].first_key_value().map(|(sequence, run)| (*sequence, *run))
    }

    /// Removes the oldest run from its queue, and seals it if it is open.
    pub fn pop_oldest(&mut self, shared: &Shared, queue: Queue) -> Option<u32> {
        let (_, run) = self.queues[queue as usize].pop_first()?;
        self.seal_run(shared, run);
        Some(run)
    }

    /// Makes a long run that is in no queue the newest run of the main queue.
    pub fn push_newest(&mut self, shared: &Shared, run: u32) {
        let entry = self.entry(run);
        shared.free_queue(entry.queue(), entry.charged());
        shared.charge_queue(Queue::Main, entry.charged());
        entry.set_kind(Queue::Main, entry.class(), entry.runs());
        entry.set_sequence(shared.next_sequence());
        self.link(run);
        self.set_sealed(shared, run);
    }

    /// Removes a run of which all items have expired from its queue, if there is one.
    pub fn pop_expired(&mut self, now_s: u32) -> Option<u32> {
        while let Some(&Reverse((expires_s, sequence, run))) = self.expiring.peek() {
            if expires_s > now_s {
                return None;
            }
            self.expiring.pop();
            let queue = self.entry(run).queue();
            if self.queues[queue as usize].get(&sequence) == Some(&run) {
                self.unlink(run);
                return Some(run);
            }
        }
        None
    }

    /// Marks all items as flushed.
    pub fn flush(&mut self, shared: &Shared) {
        self.seal_all(shared);
        for run in self.queues.iter().flat_map(BTreeMap::values) {
            self.entry(*run).set_state(RunState::Flushed);
        }
        self.flush_overflow(shared);
    }

    fn link(&mut self, run: u32) {
        let entry = self.entry(run);
        let (queue, sequence) = (entry.queue(), entry.sequence());
        self.queues[queue as usize].insert(sequence, run);
    }

    fn unlink(&mut self, run: u32) {
        let entry = self.entry(run);
        let (queue, sequence) = (entry.queue(), entry.sequence());
        self.queues[queue as usize].remove(&sequence);
    }
}

/// The number of unused eighths of a run; 0 if it should not be cleaned.
fn unused_parts(entry: &RunEntry<'_>) -> usize {
    let (fill, live) = (entry.fill(), entry.live());
    let parts = ((fill - live) * UNUSED_PARTS).checked_div(fill).unwrap_or(0);
    let is_unused = match entry.state() {
        RunState::Open => parts >= OPEN_UNUSED_MIN && fill - live >= OPEN_UNUSED_BYTES,
        RunState::Sealed => parts >= SEALED_UNUSED_MIN,
        RunState::Free | RunState::Flushed | RunState::Remote | RunState::Lost => false,
    };
    if is_unused && entry.runs() == 1 { parts } else { 0 }
}
