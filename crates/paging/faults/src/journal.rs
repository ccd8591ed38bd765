//! The journal: messages that a monitor has read and not yet applied.
//!
//! The kernel delivers an event once, and the program continues as soon as it is read. So the
//! kernel writes messages directly into memory that outlives the agent, and the next agent applies
//! the events that are left. Faults are not kept: their threads are woken and fault again.
//!
//! The layout is in `docs/formats/paging.md`. The ranges that the monitor remembers are kept in
//! two copies. One word names the valid copy, so that the ranges and the count of applied messages
//! change together.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_pager::{Memory, Mutation as PagingMutation, PageNumber};

use crate::areas::{Area, Areas};
use crate::kernel::UffdMessage;
use crate::mutation::Mutation;
use crate::uffd::{MESSAGE_BYTES, is_event, parse};

const MAGIC: u32 = 0x4a46_5141;
const VERSION: u32 = 5;

const READER_AT: usize = 8;
const GOOD_COPY_AT: usize = 12;
const REMAP_AT: usize = 16;
const FIRST_AT: usize = 20;
const MESSAGES_AT: usize = 64;
/// Maximum number of messages of one read.
const MESSAGES_MAX: usize = 64;
const COPIES_AT: usize = 4096;
const COPY_BYTES: usize = 8192;
const BYTES: usize = COPIES_AT + 2 * COPY_BYTES;

const PENDING_UNMAPS_COUNT_AT: usize = 4;
const REMOVED_COUNT_AT: usize = 8;
const SEQUENCE_AT: usize = 16;
const APPLIED_AT: usize = 24;
const PENDING_UNMAPS_AT: usize = 64;
const REMOVED_AT: usize = 2048;
const AREA_BYTES: usize = 16;
/// Maximum number of ranges that were moved away and are not yet reported as unmapped.
const PENDING_UNMAPS_MAX: usize = (REMOVED_AT - PENDING_UNMAPS_AT) / AREA_BYTES;
/// Maximum number of removed ranges outside of the registered areas.
const REMOVED_MAX: usize = (COPY_BYTES - REMOVED_AT) / AREA_BYTES;
/// Count that stands for more ranges than fit.
const TOO_MANY: u32 = u32::MAX;

/// Ranges that the monitor must know after a restart.
#[derive(Clone, Copy, Debug)]
pub struct PersistentRanges<'a> {
    /// Ranges that a remap moved away, and for which the kernel has not yet reported the unmap.
    pub pending_unmaps: &'a [Area],
    /// Ranges outside of the registered areas that the program has removed (`MADV_DONTNEED`).
    pub removed: &'a Areas,
}

/// The contents of a journal that another agent has left.
#[derive(Debug, Default)]
pub struct JournalContents {
    /// Process id of the agent that read last: descriptors in messages are numbers in that process.
    pub reader_pid: u32,
    /// See [`PersistentRanges::pending_unmaps`]. `None` if there were too many; then the program
    /// cannot be resumed.
    pub pending_unmaps: Option<Vec<Area>>,
    /// See [`PersistentRanges::removed`]. `None` if there were too many; then any page may have
    /// been removed.
    pub removed: Option<Areas>,
    /// Events that were read and not applied, in order, with the position of each.
    pub unapplied: Vec<(usize, UffdMessage<RawFd>)>,
    /// Index in `unapplied` of the remap that had begun: its new range is already discarded.
    pub remapping: Option<usize>,
}

/// The journal of one program.
#[derive(Debug)]
pub struct Journal {
    memory: Memory,
    /// Position of each message of the last read.
    positions: Vec<usize>,
    /// Positions that hold messages of the last read.
    used: usize,
    /// Whether one of them is an event.
    has_event: bool,
}

impl Journal {
    /// Creates an empty journal.
    ///
    /// # Errors
    /// If memory cannot be allocated or locked. The kernel must not have to wait when it writes
    /// a message.
    pub fn new() -> io::Result<Self> {
        let memory = Memory::create("aquifer-journal", BYTES)?;
        let journal = Self { memory, positions: Vec::with_capacity(MESSAGES_MAX), used: 0, has_event: false };
        journal.lock()?;
        journal.word(4).store(VERSION, Relaxed);
        journal.word(READER_AT).store(std::process::id(), Relaxed);
        journal.word(0).store(MAGIC, Release);
        Ok(journal)
    }

    /// Opens the journal that another agent has left in `memory`.
    ///
    /// # Errors
    /// If `memory` is not a journal of this version, or cannot be locked.
    pub fn recover(memory: Memory) -> io::Result<(Self, JournalContents)> {
        let positions = Vec::with_capacity(MESSAGES_MAX);
        let mut journal = Self { memory, positions, used: 0, has_event: true };
        let is_known = journal.memory.len() >= BYTES
            && journal.word(0).load(Acquire) == MAGIC
            && journal.word(4).load(Relaxed) == VERSION;
        if !is_known {
            return Err(io::Error::other("its journal was written by another version of the agent"));
        }
        journal.lock()?;
        let applied = journal.applied();
        let mut contents = JournalContents {
            reader_pid: journal.word(READER_AT).load(Relaxed),
            pending_unmaps: journal.areas(PENDING_UNMAPS_COUNT_AT, PENDING_UNMAPS_AT, PENDING_UNMAPS_MAX),
            ..JournalContents::default()
        };
        contents.removed = journal.areas(REMOVED_COUNT_AT, REMOVED_AT, REMOVED_MAX).map(|areas| {
            let mut set = Areas::default();
            areas.into_iter().for_each(|area| set.insert(area));
            set
        });
        for position in 0..MESSAGES_MAX {
            let bytes = journal.message(position);
            if bytes[0] != 0 {
                journal.used = position + 1;
            }
            if is_event(&bytes)
                && applied >> position & 1 == 0
                && let Some(message) = parse(&bytes)
            {
                contents.unapplied.push((position, message));
            }
        }
        // The event that was to be applied before the others comes first.
        let first = journal.word(FIRST_AT).load(Relaxed) as usize;
        if let Some(at) = contents.unapplied.iter().position(|(position, _)| position + 1 == first) {
            contents.unapplied[..=at].rotate_right(1);
        }
        let remapping = journal.word(REMAP_AT).load(Relaxed) as usize;
        contents.remapping = contents.unapplied.iter().position(|(position, _)| position + 1 == remapping);
        journal.positions = contents.unapplied.iter().map(|(position, _)| *position).collect();
        Ok((journal, contents))
    }

    /// The memory of the journal.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The number of events applied since the program was attached.
    ///
    /// Identifies one fork of a program.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.memory.atomic_u64(self.copy_at(self.good_copy()) + SEQUENCE_AT).load(Relaxed)
    }

    /// Appends the messages that `source`, the kernel, writes to the buffer that it is given.
    ///
    /// `source` returns the number of bytes written. Must be called only after all events of the
    /// previous read were applied.
    pub fn read(&mut self, source: impl FnOnce(&mut [u8]) -> usize, out: &mut Vec<UffdMessage<RawFd>>) {
        self.clear();
        self.read_behind(source, out);
    }

    /// Appends more messages, as [`Self::read`], although events of the previous read are not
    /// applied. The indices of those events stay valid.
    ///
    /// Returns false if there is no room.
    pub fn read_more(
        &mut self,
        source: impl FnOnce(&mut [u8]) -> usize,
        out: &mut Vec<UffdMessage<RawFd>>,
    ) -> bool {
        let has_room = self.used < MESSAGES_MAX;
        if has_room {
            self.read_behind(source, out);
        }
        has_room
    }

    /// Reads messages to the positions behind those that are in use.
    fn read_behind(&mut self, source: impl FnOnce(&mut [u8]) -> usize, out: &mut Vec<UffdMessage<RawFd>>) {
        let at = MESSAGES_AT + self.used * MESSAGE_BYTES;
        // SAFETY: the range is inside the mapping, and only this thread accesses it. The agent that
        // mapped it before has ended.
        let buffer = unsafe {
            let start = self.memory.as_ptr().add(at);
            std::slice::from_raw_parts_mut(start, (MESSAGES_MAX - self.used) * MESSAGE_BYTES)
        };
        let length = source(buffer);
        let end = self.used + length / MESSAGE_BYTES;
        for position in self.used..end {
            let bytes = self.message(position);
            self.has_event |= is_event(&bytes);
            if let Some(message) = parse(&bytes) {
                out.push(message);
                self.positions.push(position);
            }
        }
        self.used = end;
    }

    fn message(&self, position: usize) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        self.memory.read(MESSAGES_AT + position * MESSAGE_BYTES, &mut bytes);
        bytes
    }

    /// Records that message `index` of the last read, a remap, is about to move page words.
    ///
    /// The new range must already be discarded.
    pub fn begin_remap(&self, index: usize) {
        if PagingMutation::ForgetMoving.is_active() {
            return;
        }
        self.word(REMAP_AT).store(u32_of(self.positions[index] + 1), Release);
    }

    /// Records that message `index` of the last read is about to be applied before earlier ones.
    pub fn begin_before_others(&self, index: usize) {
        self.word(FIRST_AT).store(u32_of(self.positions[index] + 1), Release);
    }

    /// Records that message `index` of the last read was applied.
    pub fn event_applied(&self, index: usize, ranges: PersistentRanges<'_>) {
        let sequence = self.sequence() + 1;
        self.commit(self.applied() | 1 << self.positions[index], sequence, ranges);
    }

    /// Records that event `index` of [`JournalContents::unapplied`] was applied.
    pub fn skip_event(&mut self, index: usize, ranges: PersistentRanges<'_>) {
        self.event_applied(index, ranges);
        self.positions.remove(index);
    }

    /// Records the ranges without an event.
    pub fn persist_ranges(&self, ranges: PersistentRanges<'_>) {
        self.commit(self.applied(), self.sequence(), ranges);
    }

    /// Writes the copy that is not valid, then makes it the valid one.
    fn commit(&self, applied: u64, sequence: u64, ranges: PersistentRanges<'_>) {
        let next = 1 - self.good_copy();
        let at = self.copy_at(next);
        self.memory.atomic_u64(at + APPLIED_AT).store(applied, Relaxed);
        self.memory.atomic_u64(at + SEQUENCE_AT).store(sequence, Relaxed);
        let pending_unmaps = ranges.pending_unmaps.iter().copied();
        self.write_areas(
            at + PENDING_UNMAPS_COUNT_AT,
            at + PENDING_UNMAPS_AT,
            PENDING_UNMAPS_MAX,
            pending_unmaps,
        );
        self.write_areas(at + REMOVED_COUNT_AT, at + REMOVED_AT, REMOVED_MAX, ranges.removed.iter());
        self.word(GOOD_COPY_AT).store(u32_of(next), Release);
    }

    fn write_areas(&self, count_at: usize, at: usize, max: usize, areas: impl Iterator<Item = Area>) {
        let mut count = 0;
        for area in areas {
            if count == max {
                self.word(count_at).store(TOO_MANY, Relaxed);
                return;
            }
            self.memory.atomic_u64(at + count * AREA_BYTES).store(area.start, Relaxed);
            self.memory.atomic_u64(at + count * AREA_BYTES + 8).store(area.end, Relaxed);
            count += 1;
        }
        self.word(count_at).store(u32_of(count), Relaxed);
    }

    fn areas(&self, count_at: usize, at: usize, max: usize) -> Option<Vec<Area>> {
        let count = self.in_good_copy(count_at) as usize;
        let at = self.copy_at(self.good_copy()) + at;
        let page = |at: usize| -> PageNumber { self.memory.atomic_u64(at).load(Relaxed) };
        let area = |index: usize| Area {
            start: page(at + index * AREA_BYTES),
            end: page(at + index * AREA_BYTES + 8),
        };
        let is_bounded = count <= max || (count <= 2 * max && Mutation::TrustRangeCount.is_active());
        is_bounded.then(|| (0..count).map(area).collect())
    }

    /// Clears the messages of the previous read, so that a restart does not apply them again.
    ///
    /// A read that brought only faults leaves nothing to clear.
    fn clear(&mut self) {
        self.positions.clear();
        let used = std::mem::take(&mut self.used);
        if !std::mem::take(&mut self.has_event) {
            return;
        }
        self.word(REMAP_AT).store(0, Relaxed);
        self.word(FIRST_AT).store(0, Relaxed);
        for position in 0..used {
            self.word(MESSAGES_AT + position * MESSAGE_BYTES).store(0, Release);
        }
        self.memory.atomic_u64(self.copy_at(self.good_copy()) + APPLIED_AT).store(0, Release);
        // From now on, descriptors in messages are numbers in this process.
        self.word(READER_AT).store(std::process::id(), Release);
    }

    /// The positions of the messages that were applied, as a bit mask.
    fn applied(&self) -> u64 {
        self.memory.atomic_u64(self.copy_at(self.good_copy()) + APPLIED_AT).load(Acquire)
    }

    fn in_good_copy(&self, at: usize) -> u32 {
        self.word(self.copy_at(self.good_copy()) + at).load(Acquire)
    }

    fn good_copy(&self) -> usize {
        self.word(GOOD_COPY_AT).load(Acquire) as usize & 1
    }

    fn copy_at(&self, copy: usize) -> usize {
        COPIES_AT + copy * COPY_BYTES
    }

    fn word(&self, at: usize) -> &std::sync::atomic::AtomicU32 {
        self.memory.atomic_u32(at)
    }

    fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is inside the mapping, which lives as long as `memory`.
        unsafe { rustix::mm::mlock(self.memory.as_ptr().cast(), COPIES_AT)? };
        Ok(())
    }
}

fn u32_of(number: usize) -> u32 {
    u32::try_from(number).expect("the journal is small")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reopened(journal: &Journal) -> (Journal, JournalContents) {
        let fd = journal.memory.fd().try_clone_to_owned().unwrap();
        Journal::recover(Memory::from_fd(fd, BYTES).unwrap()).unwrap()
    }

    /// Writes messages as the kernel does.
    fn write_messages(journal: &mut Journal, messages: &[[u64; 4]]) {
        journal.clear();
        for (position, message) in messages.iter().enumerate() {
            for (word, value) in message.iter().enumerate() {
                let at = MESSAGES_AT + position * MESSAGE_BYTES + word * 8;
                journal.memory.atomic_u64(at).store(*value, Relaxed);
            }
            journal.positions.push(position);
        }
        (journal.used, journal.has_event) = (messages.len(), true);
    }

    const REMOVE: [u64; 4] = [0x15, 4096, 8192, 0];
    const UNMAP: [u64; 4] = [0x16, 4096, 12288, 0];
    const FAULT: [u64; 4] = [0x12, 0, 4096, 7];
    const REMAP: [u64; 4] = [0x14, 4096, 40960, 2 * 4096];

    fn no_areas() -> Areas {
        Areas::default()
    }

    #[test]
    fn events_that_were_not_applied_are_recovered() {
        let mut journal = Journal::new().unwrap();
        write_messages(&mut journal, &[FAULT, REMOVE, UNMAP, REMAP]);
        let pending_unmaps = [Area { start: 7, end: 9 }];
        let mut removed = Areas::default();
        removed.insert(Area { start: 1, end: 2 });
        journal.event_applied(1, PersistentRanges { pending_unmaps: &pending_unmaps, removed: &removed });
        journal.begin_remap(2);
        let (_, contents) = reopened(&journal);
        assert_eq!(contents.pending_unmaps, Some(pending_unmaps.to_vec()));
        assert!(contents.removed.unwrap().contains(1));
        let unapplied: Vec<usize> = contents.unapplied.iter().map(|(position, _)| *position).collect();
        assert_eq!(unapplied, [2, 3]);
        assert_eq!(contents.remapping, Some(0));
        journal.event_applied(2, PersistentRanges { pending_unmaps: &[], removed: &no_areas() });
        let (again, contents) = reopened(&journal);
        assert_eq!(contents.unapplied.len(), 1);
        assert!(contents.remapping.is_none(), "the mark belonged to the previous event");
        again.event_applied(0, PersistentRanges { pending_unmaps: &[], removed: &no_areas() });
        assert!(reopened(&journal).1.unapplied.is_empty());
        assert_eq!(journal.sequence(), 3);
    }

    #[test]
    fn applied_events_are_not_recovered() {
        let mut journal = Journal::new().unwrap();
        write_messages(&mut journal, &[REMOVE, REMOVE, UNMAP]);
        for index in 0..3 {
            journal.event_applied(index, PersistentRanges { pending_unmaps: &[], removed: &no_areas() });
        }
        write_messages(&mut journal, &[REMOVE]);
        assert_eq!(reopened(&journal).1.unapplied.len(), 1, "only the last read counts");
        journal.event_applied(0, PersistentRanges { pending_unmaps: &[], removed: &no_areas() });
        journal.clear();
        assert!(reopened(&journal).1.unapplied.is_empty());
    }

    #[test]
    fn more_ranges_than_fit_are_recovered_as_too_many() {
        let mut journal = Journal::new().unwrap();
        write_messages(&mut journal, &[REMOVE]);
        let many: Vec<Area> = (0..1000).map(|at| Area { start: at * 2, end: at * 2 + 1 }).collect();
        let mut removed = Areas::default();
        many.iter().for_each(|area| removed.insert(*area));
        journal.event_applied(0, PersistentRanges { pending_unmaps: &many, removed: &removed });
        let (_, contents) = reopened(&journal);
        assert!(contents.pending_unmaps.is_none() && contents.removed.is_none());
        journal.persist_ranges(PersistentRanges {
            pending_unmaps: &many[..PENDING_UNMAPS_MAX],
            removed: &no_areas(),
        });
        assert_eq!(reopened(&journal).1.pending_unmaps.unwrap().len(), PENDING_UNMAPS_MAX);
    }

    #[test]
    fn other_memory_is_refused() {
        assert!(Journal::recover(Memory::create("other", BYTES).unwrap()).is_err());
    }
}
