//! What a program's kernel has told and the monitor has not yet heeded, in memory that outlives the agent.
//!
//! An event can be read only once: the program goes on as soon as it is. So the kernel writes messages straight into this memory, and an
//! agent that takes over heeds those that are left. Faults need no such care: who waits for a page is woken and tries again.
//!
//! The layout is in `docs/formats/paging.md`. What the monitor remembers between messages is kept in two copies, and a word
//! says which is good, so that it changes together with the count of messages heeded, or not at all.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use aquifer_pager::{Memory, PageNumber};

use crate::areas::{Area, Areas};
use crate::kernel::Message;
use crate::uffd::{MESSAGE_BYTES, Userfaultfd, is_event, parse};

const MAGIC: u32 = 0x4a46_5141;
const VERSION: u32 = 4;

const READER_AT: usize = 8;
const GOOD_COPY_AT: usize = 12;
const MOVING_AT: usize = 16;
const MESSAGES_AT: usize = 64;
/// Messages read in one go.
const MESSAGES_MAX: usize = 64;
const COPIES_AT: usize = 4096;
const COPY_BYTES: usize = 8192;
const BYTES: usize = COPIES_AT + 2 * COPY_BYTES;

const HEEDED_AT: usize = 0;
const VACATED_COUNT_AT: usize = 4;
const GIVEN_UP_COUNT_AT: usize = 8;
const SEQUENCE_AT: usize = 16;
const VACATED_AT: usize = 64;
const GIVEN_UP_AT: usize = 2048;
const AREA_BYTES: usize = 16;
/// Areas that were moved away from and are still to be reported as unmapped.
const VACATED_MAX: usize = (GIVEN_UP_AT - VACATED_AT) / AREA_BYTES;
/// Areas given up outside of those registered.
const GIVEN_UP_MAX: usize = (COPY_BYTES - GIVEN_UP_AT) / AREA_BYTES;
/// Stands for more than there is room for.
const TOO_MANY: u32 = u32::MAX;

/// What the monitor remembers between messages and must know after a restart.
#[derive(Clone, Copy, Debug)]
pub struct Remembered<'a> {
    /// Places that were moved away from, and of which the kernel is still to say that they are unmapped.
    pub vacated: &'a [Area],
    /// Given up by the program outside of the registered areas.
    pub given_up: &'a Areas,
}

/// What an agent before this one left.
#[derive(Debug, Default)]
pub struct Left {
    /// The process id of the agent that read last.
    pub reader: u32,
    /// See [`Remembered::vacated`]; `None` if there were too many to remember: the program cannot go on.
    pub vacated: Option<Vec<Area>>,
    /// See [`Remembered::given_up`]; `None` if there were too many: then any page might have been.
    pub given_up: Option<Areas>,
    /// Events in the order in which they came, with the place of each in the journal.
    pub unheeded: Vec<(usize, Message<RawFd>)>,
    /// Whether the first of them, a move of pages, was being done: what was at the new place is gone already.
    pub is_moving: bool,
}

/// The journal of one program.
#[derive(Debug)]
pub struct Journal {
    memory: Memory,
    /// Where each message of the last read lies.
    places: Vec<usize>,
    /// How many places hold messages, if any of them is an event.
    written: usize,
}

impl Journal {
    /// An empty journal.
    ///
    /// # Errors
    /// If the system gives no memory that stays resident: the kernel must never wait to write there.
    pub fn new() -> io::Result<Self> {
        let memory = Memory::create("aquifer-journal", BYTES)?;
        let journal = Self { memory, places: Vec::with_capacity(MESSAGES_MAX), written: 0 };
        journal.lock()?;
        journal.word(4).store(VERSION, Relaxed);
        journal.word(READER_AT).store(std::process::id(), Relaxed);
        journal.word(0).store(MAGIC, Release);
        Ok(journal)
    }

    /// The journal that an agent before this one left in `memory`.
    ///
    /// # Errors
    /// If it is none, or of another version.
    pub fn recover(memory: Memory) -> io::Result<(Self, Left)> {
        let mut journal = Self { memory, places: Vec::with_capacity(MESSAGES_MAX), written: MESSAGES_MAX };
        let is_known = journal.memory.len() >= BYTES
            && journal.word(0).load(Acquire) == MAGIC
            && journal.word(4).load(Relaxed) == VERSION;
        if !is_known {
            return Err(io::Error::other("it was left by another version of the agent"));
        }
        journal.lock()?;
        let heeded = journal.in_good_copy(HEEDED_AT) as usize;
        let mut left = Left {
            reader: journal.word(READER_AT).load(Relaxed),
            vacated: journal.areas(VACATED_COUNT_AT, VACATED_AT, VACATED_MAX),
            ..Left::default()
        };
        left.given_up = journal.areas(GIVEN_UP_COUNT_AT, GIVEN_UP_AT, GIVEN_UP_MAX).map(|areas| {
            let mut set = Areas::default();
            areas.into_iter().for_each(|area| set.insert(area));
            set
        });
        for place in heeded..MESSAGES_MAX {
            let mut bytes = [0; MESSAGE_BYTES];
            journal.memory.read(MESSAGES_AT + place * MESSAGE_BYTES, &mut bytes);
            if is_event(&bytes)
                && let Some(message) = parse(&bytes)
            {
                left.unheeded.push((place, message));
            }
        }
        let moving = journal.word(MOVING_AT).load(Relaxed) as usize;
        left.is_moving = left.unheeded.first().is_some_and(|(place, _)| place + 1 == moving);
        journal.places = left.unheeded.iter().map(|(place, _)| *place).collect();
        Ok((journal, left))
    }

    /// The memory that it lies in.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Counts the events heeded ever since: tells one fork of a program from another.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.memory.atomic_u64(self.copy_at(self.good_copy()) + SEQUENCE_AT).load(Relaxed)
    }

    /// Append the messages that the kernel has, without waiting. All that were read before must have been heeded.
    pub fn read(&mut self, uffd: &Userfaultfd, out: &mut Vec<Message<RawFd>>) {
        self.clear();
        // SAFETY: the range lies inside the mapping, and nobody else uses it meanwhile.
        let length = unsafe {
            let buffer = self.memory.as_ptr().add(MESSAGES_AT);
            uffd.read(buffer, MESSAGES_MAX * MESSAGE_BYTES)
        };
        for place in 0..length / MESSAGE_BYTES {
            let mut bytes = [0; MESSAGE_BYTES];
            self.memory.read(MESSAGES_AT + place * MESSAGE_BYTES, &mut bytes);
            if is_event(&bytes) {
                self.written = length / MESSAGE_BYTES;
            }
            if let Some(message) = parse(&bytes) {
                out.push(message);
                self.places.push(place);
            }
        }
    }

    /// Message `index` of the last read is about to have pages moved; what was at the new place is gone.
    pub fn moving(&self, index: usize) {
        self.word(MOVING_AT).store(u32_of(self.places[index] + 1), Release);
    }

    /// Message `index` of the last read, and all before it, have been heeded, and this is what there is to remember.
    pub fn heeded(&self, index: usize, remembered: Remembered<'_>) {
        let sequence = self.sequence() + 1;
        self.commit(self.places[index] + 1, sequence, remembered);
    }

    /// The first message that an agent before this one left was all but heeded: what is left begins with the next.
    pub fn skip_first(&mut self, remembered: Remembered<'_>) {
        self.heeded(0, remembered);
        self.places.remove(0);
    }

    /// What there is to remember has changed.
    pub fn remember(&self, remembered: Remembered<'_>) {
        self.commit(self.in_good_copy(HEEDED_AT) as usize, self.sequence(), remembered);
    }

    fn commit(&self, heeded: usize, sequence: u64, remembered: Remembered<'_>) {
        let next = 1 - self.good_copy();
        let at = self.copy_at(next);
        self.word(at + HEEDED_AT).store(u32_of(heeded), Relaxed);
        self.memory.atomic_u64(at + SEQUENCE_AT).store(sequence, Relaxed);
        let vacated = remembered.vacated.iter().copied();
        self.write_areas(at + VACATED_COUNT_AT, at + VACATED_AT, VACATED_MAX, vacated);
        self.write_areas(at + GIVEN_UP_COUNT_AT, at + GIVEN_UP_AT, GIVEN_UP_MAX, remembered.given_up.iter());
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
        (count <= max).then(|| (0..count).map(area).collect())
    }

    /// Nothing of what was read before is to be heeded again. Where only faults were read there is nothing to do.
    fn clear(&mut self) {
        self.places.clear();
        if self.written == 0 {
            return;
        }
        self.word(MOVING_AT).store(0, Relaxed);
        for place in 0..self.written {
            self.word(MESSAGES_AT + place * MESSAGE_BYTES).store(0, Release);
        }
        self.word(self.copy_at(self.good_copy()) + HEEDED_AT).store(0, Release);
        // From now on descriptors in messages are numbers of this process.
        self.word(READER_AT).store(std::process::id(), Release);
        self.written = 0;
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
        // SAFETY: the range lies in the mapping, which lives as long as `memory`.
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

    fn reopened(journal: &Journal) -> (Journal, Left) {
        let fd = journal.memory.fd().try_clone_to_owned().unwrap();
        Journal::recover(Memory::from_fd(fd, BYTES).unwrap()).unwrap()
    }

    /// As if the kernel had written them.
    fn tell(journal: &mut Journal, messages: &[[u64; 4]]) {
        journal.clear();
        for (place, message) in messages.iter().enumerate() {
            for (word, value) in message.iter().enumerate() {
                let at = MESSAGES_AT + place * MESSAGE_BYTES + word * 8;
                journal.memory.atomic_u64(at).store(*value, Relaxed);
            }
            journal.places.push(place);
        }
        journal.written = messages.len();
    }

    const REMOVE: [u64; 4] = [0x15, 4096, 8192, 0];
    const UNMAP: [u64; 4] = [0x16, 4096, 12288, 0];
    const FAULT: [u64; 4] = [0x12, 0, 4096, 7];
    const REMAP: [u64; 4] = [0x14, 4096, 40960, 2 * 4096];

    fn nothing() -> Areas {
        Areas::default()
    }

    #[test]
    fn what_was_not_heeded_is_told_again() {
        let mut journal = Journal::new().unwrap();
        tell(&mut journal, &[FAULT, REMOVE, UNMAP, REMAP]);
        let vacated = [Area { start: 7, end: 9 }];
        let mut given_up = Areas::default();
        given_up.insert(Area { start: 1, end: 2 });
        journal.heeded(1, Remembered { vacated: &vacated, given_up: &given_up });
        journal.moving(2);
        let (_, left) = reopened(&journal);
        assert_eq!(left.vacated, Some(vacated.to_vec()));
        assert!(left.given_up.unwrap().contains(1));
        let unheeded: Vec<usize> = left.unheeded.iter().map(|(place, _)| *place).collect();
        assert_eq!(unheeded, [2, 3]);
        assert!(left.is_moving);
        journal.heeded(2, Remembered { vacated: &[], given_up: &nothing() });
        let (again, left) = reopened(&journal);
        assert_eq!(left.unheeded.len(), 1);
        assert!(!left.is_moving, "the move belonged to the one before");
        again.heeded(0, Remembered { vacated: &[], given_up: &nothing() });
        assert!(reopened(&journal).1.unheeded.is_empty());
        assert_eq!(journal.sequence(), 3);
    }

    #[test]
    fn what_was_heeded_is_never_told_again() {
        let mut journal = Journal::new().unwrap();
        tell(&mut journal, &[REMOVE, REMOVE, UNMAP]);
        for index in 0..3 {
            journal.heeded(index, Remembered { vacated: &[], given_up: &nothing() });
        }
        tell(&mut journal, &[REMOVE]);
        assert_eq!(reopened(&journal).1.unheeded.len(), 1, "only what was read last");
        journal.heeded(0, Remembered { vacated: &[], given_up: &nothing() });
        journal.clear();
        assert!(reopened(&journal).1.unheeded.is_empty());
    }

    #[test]
    fn more_than_there_is_room_for_is_known_to_be_too_much() {
        let mut journal = Journal::new().unwrap();
        tell(&mut journal, &[REMOVE]);
        let many: Vec<Area> = (0..1000).map(|at| Area { start: at * 2, end: at * 2 + 1 }).collect();
        let mut given_up = Areas::default();
        many.iter().for_each(|area| given_up.insert(*area));
        journal.heeded(0, Remembered { vacated: &many, given_up: &given_up });
        let (_, left) = reopened(&journal);
        assert!(left.vacated.is_none() && left.given_up.is_none());
        journal.remember(Remembered { vacated: &many[..VACATED_MAX], given_up: &nothing() });
        assert_eq!(reopened(&journal).1.vacated.unwrap().len(), VACATED_MAX);
    }

    #[test]
    fn another_memory_is_no_journal() {
        assert!(Journal::recover(Memory::create("other", BYTES).unwrap()).is_err());
    }
}
