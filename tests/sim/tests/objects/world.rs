//! The state of one schedule: heap, memory, readers, and what they must find.

use std::panic::resume_unwind;

use aquifer_fabric::sim::Rng;
use aquifer_objects::class::{Class, ClassId, Classes};
use aquifer_objects::header::{Header, Lock, ObjectNumber};
use aquifer_objects::heap::{Heap, HeapError, HeapSettings};
use aquifer_objects::layout::{HeapWords, Layout, slot_word};
use aquifer_objects::ledger::Ledger;
use aquifer_objects::slot::{self, ReadVerdict, Words, verdict};

use super::memory::HeapMemory;
use super::reader::{DirectRead, ReadOutcome, Translation};

mod crash;

use crash::{InProgress, Killed};

const FRAMES: u32 = 32;
const OPERATIONS: u32 = 400;
const READERS: usize = 4;
const OBJECTS_MAX: usize = 700;
const CLASS_BYTES: [u32; 4] = [24, 110, 120, 250];
/// The class of objects in schedules in which each object has its own block.
const SINGLE: Class = Class { slot_bytes: 2304, order: 0 };

/// Counts of events in a schedule, or in all schedules.
#[derive(Clone, Copy, Debug, Default)]
pub struct ObjectsCounts {
    allocations: u64,
    frees: u64,
    writes: u64,
    merges: u64,
    splits: u64,
    released: u64,
    corrected: u64,
    full: u64,
    valid: u64,
    busy: u64,
    elsewhere: u64,
    outdated: u64,
    crashes: u64,
    completed: u64,
    undone: u64,
    replaced: u64,
}

impl ObjectsCounts {
    pub fn labelled(&self) -> [(&'static str, u64); 16] {
        [
            ("allocations", self.allocations),
            ("frees", self.frees),
            ("writes", self.writes),
            ("merges", self.merges),
            ("addresses that name two blocks", self.splits),
            ("released pointers", self.released),
            ("corrected pointers", self.corrected),
            ("times the heap was full", self.full),
            ("valid reads", self.valid),
            ("reads of objects that changed", self.busy),
            ("reads of objects that were elsewhere", self.elsewhere),
            ("reads of freed objects", self.outdated),
            ("crashes", self.crashes),
            ("operations that a crash did not undo", self.completed),
            ("operations that a crash has undone", self.undone),
            ("replaced objects", self.replaced),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        self.allocations += other.allocations;
        self.frees += other.frees;
        self.writes += other.writes;
        self.merges += other.merges;
        self.splits += other.splits;
        self.released += other.released;
        self.corrected += other.corrected;
        self.full += other.full;
        self.valid += other.valid;
        self.busy += other.busy;
        self.elsewhere += other.elsewhere;
        self.outdated += other.outdated;
        self.crashes += other.crashes;
        self.completed += other.completed;
        self.undone += other.undone;
        self.replaced += other.replaced;
    }
}

/// An object, with all versions of its bytes.
#[derive(Debug)]
struct ModelObject {
    number: ObjectNumber,
    class: Class,
    /// All pointers that may still be used.
    pointers: Vec<u64>,
    /// Stamps of the object's bytes, with the times at which the writes began and ended.
    versions: Vec<(u64, u64, u64)>,
    freed_at: Option<u64>,
}

/// The readers, and the memory that they read.
#[derive(Debug)]
struct ReaderWorld {
    rng: Rng,
    memory: HeapMemory,
    readers: Vec<DirectRead>,
    /// Writes of other workers: objects, and the places where they were found.
    writes: Vec<(usize, u64)>,
    objects: Vec<ModelObject>,
    next_stamp: u64,
    time: u64,
    counts: ObjectsCounts,
    failure: Option<String>,
    layout: Layout,
    /// Stores until the service is killed.
    crash_in: Option<u64>,
}

impl ReaderWorld {
    /// Kills the service if the time of its crash has come.
    fn crash_if_due(&mut self) {
        if let Some(left) = &mut self.crash_in {
            if *left == 0 {
                self.crash_in = None;
                resume_unwind(Box::new(Killed));
            }
            *left -= 1;
        }
    }

    /// Runs some writes of other workers, and some steps of readers.
    fn run_others(&mut self) {
        if self.rng.chance(1, 16)
            && let Some((object, at)) = self.writes.pop()
        {
            // These writes are not recorded, so the service is not killed meanwhile.
            let crash_in = self.crash_in.take();
            self.write(object, at);
            self.crash_in = crash_in;
        }
        let steps = self.rng.below(4);
        for _ in 0..steps {
            self.time += 1;
            if self.readers.len() < READERS {
                self.begin_read();
            }
            if self.readers.is_empty() {
                return;
            }
            let at = self.rng.index(self.readers.len());
            if let Some(outcome) = self.readers[at].step(&self.memory) {
                let read = self.readers.swap_remove(at);
                self.check(&read, outcome);
            }
        }
    }

    /// Writes an object at the place where it was found, if it is there still.
    fn write(&mut self, object: usize, at: u64) -> Option<()> {
        let number = self.objects[object].number;
        let header = slot::lock(self, at, number, Lock::Writing).ok()?;
        let payload = self.begin_write(object);
        slot::write(self, at, header, 0, &payload);
        self.end_write(object);
        Some(())
    }

    /// The new bytes of an object. Until the write ends, a reader may find either version.
    fn begin_write(&mut self, object: usize) -> Vec<u64> {
        self.next_stamp += 1;
        let model = &mut self.objects[object];
        model.versions.push((self.next_stamp, self.time, u64::MAX));
        bytes_of(self.next_stamp, model.class)
    }

    fn end_write(&mut self, object: usize) {
        self.objects[object].versions.last_mut().expect("it was pushed").2 = self.time;
        self.counts.writes += 1;
    }

    fn begin_read(&mut self) {
        if self.objects.is_empty() {
            return;
        }
        // Mostly one of the newest, so that many readers meet at an object.
        let among = if self.rng.chance(3, 4) { self.objects.len().min(8) } else { self.objects.len() };
        let object = self.objects.len() - 1 - self.rng.index(among);
        let model = &self.objects[object];
        if model.freed_at.is_some() && self.rng.chance(3, 4) {
            return;
        }
        let address = model.pointers[self.rng.index(model.pointers.len())];
        let pointer = (address, model.number, model.class);
        let translation = if self.rng.chance(1, 2) { Translation::Once } else { Translation::Each };
        self.readers.push(DirectRead::new(object, self.time, pointer, translation));
    }

    fn check(&mut self, read: &DirectRead, outcome: ReadOutcome) {
        let model = &self.objects[read.object];
        match outcome {
            ReadOutcome::Bytes(bytes) => {
                let stamp = bytes[0];
                let is_torn = bytes != bytes_of(stamp, model.class);
                let was_current = |at: usize| {
                    let (version, _, _) = model.versions[at];
                    let replaced_at =
                        model.versions.get(at + 1).map(|(_, _, ended)| *ended).or(model.freed_at);
                    version == stamp && replaced_at.is_none_or(|replaced| replaced >= read.began)
                };
                if is_torn || !(0..model.versions.len()).any(was_current) {
                    let number = model.number;
                    self.failure.get_or_insert(format!("{number:?} reads {bytes:x?}: {model:?}, {read:?}"));
                }
                self.counts.valid += 1;
            }
            ReadOutcome::Invalid(ReadVerdict::Busy) => self.counts.busy += 1,
            ReadOutcome::Invalid(_) if model.freed_at.is_some() => self.counts.outdated += 1,
            ReadOutcome::Invalid(_) => self.counts.elsewhere += 1,
        }
    }
}

impl Words for ReaderWorld {
    fn load(&mut self, at: u64) -> u64 {
        self.memory.get(at)
    }

    fn store(&mut self, at: u64, word: u64) {
        self.run_others();
        self.crash_if_due();
        self.counts.splits += u64::from(self.layout.is_second_name(at) && word & u64::from(u32::MAX) != 0);
        self.memory.store(at, word);
        self.run_others();
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        self.run_others();
        self.crash_if_due();
        self.memory.compare_swap(at, old, new)
    }
}

impl HeapWords for ReaderWorld {
    fn discard(&mut self, at: u64, words: u64) {
        self.run_others();
        self.crash_if_due();
        self.memory.discard(at, words);
        self.run_others();
    }

    fn peek(&mut self, at: u64, out: &mut [u64]) {
        self.memory.peek(at, out);
    }
}

/// Plays the schedule with a seed.
///
/// # Errors
/// If a read or the heap is wrong.
pub fn run(seed: u64) -> Result<ObjectsCounts, String> {
    let mut schedule = Schedule::new(seed);
    for _ in 0..OPERATIONS {
        schedule.operate_or_crash()?;
    }
    schedule.end()
}

struct Schedule {
    settings: HeapSettings,
    heap: Heap,
    ledger: Ledger<ReaderWorld>,
    in_progress: InProgress,
    next_number: u64,
    /// The objects that live, by their index in the model.
    live: Vec<usize>,
    /// Share of frees among the operations, in sixteenths.
    frees: u64,
    classes: Vec<(ClassId, Class)>,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let has_single = rng.chance(1, 8);
        let small = Class { slot_bytes: 112, order: 0 };
        let classes = if has_single { Classes::of(vec![small, SINGLE]) } else { Classes::standard().clone() };
        let count = 1 + rng.index(2);
        let chosen = (0..count).filter_map(|_| {
            let id = classes.class_for(CLASS_BYTES[rng.index(CLASS_BYTES.len())])?;
            Some((id, classes.get(id)?))
        });
        let mut chosen: Vec<(ClassId, Class)> = chosen.collect();
        chosen.extend(classes.iter().filter(|(_, class)| class.is_single() && has_single));
        let settings = HeapSettings {
            classes,
            may_split: rng.chance(1, 2),
            workers: 1 + u16::try_from(rng.below(4)).expect("small"),
            frames_max: FRAMES,
        };
        let frees = 3 + rng.below(6);
        let layout = Layout::new(FRAMES);
        let world = ReaderWorld {
            rng,
            memory: HeapMemory::new(layout),
            readers: Vec::new(),
            writes: Vec::new(),
            objects: Vec::new(),
            next_stamp: 1,
            time: 0,
            counts: ObjectsCounts::default(),
            failure: None,
            layout,
            crash_in: None,
        };
        Self {
            heap: Heap::new(settings.clone()),
            settings,
            ledger: Ledger::create(world, layout),
            in_progress: InProgress::Nothing,
            next_number: 1,
            live: Vec::new(),
            frees,
            classes: chosen,
        }
    }

    fn operate(&mut self) -> Result<(), String> {
        let what = self.ledger.words.rng.below(16);
        match what {
            _ if self.live.is_empty() => self.allocate()?,
            0 => self.heap.expire_released(&mut self.ledger),
            1..3 => self.write()?,
            3 => self.compact()?,
            4 if self.classes.iter().any(|(_, class)| *class == SINGLE) => self.replace()?,
            4 => self.release()?,
            5 => self.correct()?,
            _ if what - 6 < self.frees => {
                // Allocations and frees come in bursts, so that blocks fill and become sparse.
                for _ in 0..1 + self.ledger.words.rng.below(12) {
                    self.free()?;
                }
            }
            _ => {
                for _ in 0..1 + self.ledger.words.rng.below(30) {
                    self.allocate()?;
                }
            }
        }
        self.ledger.words.failure.take().map_or(Ok(()), Err)
    }

    fn allocate(&mut self) -> Result<(), String> {
        if self.live.len() == OBJECTS_MAX {
            return Ok(());
        }
        let (id, class) = self.classes[self.ledger.words.rng.index(self.classes.len())];
        let worker =
            u16::try_from(self.ledger.words.rng.below(u64::from(self.heap.workers()))).expect("small");
        self.ledger.words.next_stamp += 1;
        let (stamp, began) = (self.ledger.words.next_stamp, self.ledger.words.time);
        self.in_progress = InProgress::Allocate(stamp);
        self.ledger.reserve_number(self.next_number);
        let next = &mut self.next_number;
        let mut draw = || std::mem::replace(next, *next + 1);
        let allocated = match self.heap.allocate(worker, id, &mut draw, &mut self.ledger) {
            Ok(allocated) => allocated,
            Err(HeapError::Full) => {
                self.in_progress = InProgress::Nothing;
                self.ledger.words.counts.full += 1;
                return self.compact();
            }
            Err(error) => return Err(error.to_string()),
        };
        let number = ObjectNumber::new(allocated.id).ok_or("not a number")?;
        let at = slot_word(allocated.frames, allocated.slot, class);
        let payload = bytes_of(stamp, class);
        // No reader has the pointer yet.
        self.ledger.create_object(at, number, &payload);
        self.in_progress = InProgress::Nothing;
        self.ledger.words.objects.push(ModelObject {
            number,
            class,
            pointers: vec![allocated.address],
            versions: vec![(stamp, began, self.ledger.words.time)],
            freed_at: None,
        });
        self.live.push(self.ledger.words.objects.len() - 1);
        self.ledger.words.counts.allocations += 1;
        Ok(())
    }

    /// The place of an object in `live`, one of the newest in most cases.
    fn some_live(&mut self) -> Option<usize> {
        let count = self.live.len();
        let among = if self.ledger.words.rng.chance(1, 2) { count.min(8) } else { count };
        (count > 0).then(|| count - 1 - self.ledger.words.rng.index(among))
    }

    fn pointer_of(&mut self, object: usize) -> (u64, u64) {
        let model = &self.ledger.words.objects[object];
        let address = model.pointers[self.ledger.words.rng.index(model.pointers.len())];
        (address, model.number.get())
    }

    fn write(&mut self) -> Result<(), String> {
        let Some((object, at)) = self.find_some()? else { return Ok(()) };
        let number = self.ledger.words.objects[object].number;
        let payload = self.ledger.words.begin_write(object);
        self.in_progress = InProgress::Write(object);
        self.ledger
            .write_object(at, number, 0, &payload)
            .map_err(|error| format!("{number:?}: {error:?}"))?;
        self.in_progress = InProgress::Nothing;
        self.ledger.words.end_write(object);
        Ok(())
    }

    /// Gives an object that has a block for itself the bytes of another one.
    fn replace(&mut self) -> Result<(), String> {
        let world = &mut self.ledger.words;
        let singles: Vec<usize> =
            self.live.iter().copied().filter(|object| world.objects[*object].class == SINGLE).collect();
        if singles.len() < 2 {
            return Ok(());
        }
        let target = world.rng.index(singles.len());
        let other = (target + 1 + world.rng.index(singles.len() - 1)) % singles.len();
        let (target, staged) = (singles[target], singles[other]);
        let stamp = world.objects[staged].versions.last().expect("it was written").0;
        let began = world.time;
        world.objects[target].versions.push((stamp, began, u64::MAX));
        let (to, from) = (self.pointer_of(target), self.pointer_of(staged));
        self.in_progress = InProgress::Replace(target, staged);
        let words = SINGLE.slot_bytes / 8 - 1;
        self.heap.replace(to, from, words, &mut self.ledger).map_err(|error| broken(to.0, to.1, error))?;
        self.in_progress = InProgress::Nothing;
        self.end_replacement(target, staged);
        Ok(())
    }

    /// One object has the bytes of another, which has ended.
    fn end_replacement(&mut self, target: usize, staged: usize) {
        let world = &mut self.ledger.words;
        world.objects[staged].freed_at = Some(world.time);
        world.objects[target].versions.last_mut().expect("it was pushed").2 = world.time;
        self.live.retain(|object| *object != staged);
        world.counts.replaced += 1;
    }

    /// One of the objects that live, and where it is.
    fn find_some(&mut self) -> Result<Option<(usize, u64)>, String> {
        let Some(at) = self.some_live() else { return Ok(None) };
        let object = self.live[at];
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        Ok(Some((object, slot_word(found.frames, found.slot, self.ledger.words.objects[object].class))))
    }

    fn free(&mut self) -> Result<(), String> {
        let Some(at) = self.some_live() else { return Ok(()) };
        let object = self.live.swap_remove(at);
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        let ModelObject { class, number, .. } = self.ledger.words.objects[object];
        let at = slot_word(found.frames, found.slot, class);
        self.in_progress = InProgress::Free(object);
        self.ledger.free_object(at, number).map_err(|error| format!("{id}: {error:?}"))?;
        self.ledger.words.objects[object].freed_at = Some(self.ledger.words.time);
        self.heap.free(address, id, &mut self.ledger).map_err(|error| broken(address, id, error))?;
        self.in_progress = InProgress::Nothing;
        if self.heap.locate(address, id).is_ok() {
            return Err(format!("object {id} was freed and is found"));
        }
        self.ledger.words.counts.frees += 1;
        Ok(())
    }

    fn compact(&mut self) -> Result<(), String> {
        for _ in 0..self.ledger.words.rng.below(4) {
            let found = self.find_some()?;
            self.ledger.words.writes.extend(found);
        }
        let (class, _) = self.classes[self.ledger.words.rng.index(self.classes.len())];
        let most = 1 + self.ledger.words.rng.below(6);
        self.ledger.words.counts.merges += self.heap.compact(class, most, &mut self.ledger);
        self.ledger.words.writes.clear();
        Ok(())
    }

    /// Corrects a pointer, as a client does after a failed read.
    fn correct(&mut self) -> Result<(), String> {
        let Some(at) = self.some_live() else { return Ok(()) };
        let object = self.live[at];
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        let pointers = &mut self.ledger.words.objects[object].pointers;
        if !pointers.contains(&found.address) {
            pointers.push(found.address);
            self.ledger.words.counts.corrected += 1;
        }
        // While nothing changes, each object can be read where it is.
        let ModelObject { number, class, ref versions, .. } = self.ledger.words.objects[object];
        let at = slot_word(found.frames, found.slot, class);
        let header = Header::from_word(self.ledger.words.memory.get(at));
        let stamp = versions.last().expect("it was written").0;
        let bytes: Vec<u64> = (1..u64::from(class.slot_bytes / 8))
            .map(|word| self.ledger.words.memory.get(at + word))
            .collect();
        if verdict(number, header, header) != ReadVerdict::Valid || bytes != bytes_of(stamp, class) {
            return Err(format!("{number:?} is not as it was written: {header:?}, {bytes:x?}"));
        }
        Ok(())
    }

    /// Replaces all pointers to an object by one to its new address.
    fn release(&mut self) -> Result<(), String> {
        let Some(at) = self.some_live() else { return Ok(()) };
        self.release_object(self.live[at])
    }

    fn release_object(&mut self, object: usize) -> Result<(), String> {
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        self.in_progress = InProgress::Release(object);
        // The client has replaced all copies of the old pointers before.
        self.ledger.words.readers.retain(|read| read.object != object);
        let next =
            self.heap.release(address, id, &mut self.ledger).map_err(|error| broken(address, id, error))?;
        self.in_progress = InProgress::Nothing;
        self.ledger.words.objects[object].pointers = vec![next];
        self.ledger.words.counts.released += u64::from(found.is_old);
        Ok(())
    }

    fn end(mut self) -> Result<ObjectsCounts, String> {
        while !self.live.is_empty() {
            self.free()?;
        }
        (0..2).for_each(|_| self.heap.expire_released(&mut self.ledger));
        let usage = self.heap.usage();
        if usage.held_bytes != 0 || usage.live_bytes != 0 || self.heap.addresses().0 != 0 {
            return Err(format!("not all is free: {usage:?}, addresses {:?}", self.heap.addresses()));
        }
        let ReaderWorld { counts, failure, .. } = self.ledger.words;
        failure.map_or(Ok(counts), Err)
    }
}

/// The bytes of an object with a stamp. Half of its words look like the headers of objects.
fn bytes_of(stamp: u64, class: Class) -> Vec<u64> {
    let decoy = 1 + stamp.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 64;
    (1..class.slot_bytes / 8).map(|word| if word % 2 == 1 { stamp } else { decoy }).collect()
}

fn broken(address: u64, id: u64, error: HeapError) -> String {
    format!("the pointer {address:#x} to object {id} is broken: {error}")
}
