//! The state of one schedule: heap, memory, readers, and what they must find.

use aquifer_fabric::sim::Rng;
use aquifer_objects::class::{Class, ClassId, Classes};
use aquifer_objects::header::{Header, Lock, ObjectNumber};
use aquifer_objects::heap::{Heap, HeapError, HeapSettings, Mover};
use aquifer_objects::id::IdMode;
use aquifer_objects::pointer::BlockAddress;
use aquifer_objects::slot::{self, ReadVerdict, Words, verdict};
use aquifer_objects::space::FrameRun;

use super::memory::{HeapMemory, slot_word};
use super::reader::{DirectRead, ReadOutcome, Translation};

const FRAMES: u32 = 32;
const OPERATIONS: u32 = 400;
const READERS: usize = 4;
const OBJECTS_MAX: usize = 700;
const CLASS_BYTES: [u32; 4] = [24, 110, 120, 250];

/// How often things happened in a schedule, or in all.
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
}

impl ObjectsCounts {
    pub fn labelled(&self) -> [(&'static str, u64); 12] {
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
    }
}

/// An object, and the bytes that it had.
#[derive(Debug)]
struct ModelObject {
    number: ObjectNumber,
    class: Class,
    /// All pointers that may be used still.
    pointers: Vec<u64>,
    /// Stamps of its bytes, with the times at which the writes began and ended.
    versions: Vec<(u64, u64, u64)>,
    freed_at: Option<u64>,
}

/// What readers see, and the readers.
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
}

impl ReaderWorld {
    /// Lets other workers write, and readers take some steps.
    fn run_others(&mut self) {
        if self.rng.chance(1, 16)
            && let Some((object, at)) = self.writes.pop()
        {
            self.write(object, at);
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
        let ModelObject { number, class, .. } = self.objects[object];
        let header = slot::lock(self, at, number, Lock::Writing).ok()?;
        self.next_stamp += 1;
        let (stamp, began) = (self.next_stamp, self.time);
        // Until the write ends, a reader may find either version.
        self.objects[object].versions.push((stamp, began, u64::MAX));
        slot::write(self, at, header, &vec![stamp; class.slot_bytes as usize / 8 - 1]);
        self.objects[object].versions.last_mut().expect("it was pushed").2 = self.time;
        self.counts.writes += 1;
        Some(())
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
        let which = self.rng.index(2);
        self.readers.push(DirectRead::new(object, self.time, pointer, translation, which));
    }

    fn check(&mut self, read: &DirectRead, outcome: ReadOutcome) {
        let model = &self.objects[read.object];
        match outcome {
            ReadOutcome::Bytes(bytes) => {
                let stamp = bytes[0];
                let is_torn = bytes.iter().any(|word| *word != stamp);
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
        self.memory.load(at)
    }

    fn store(&mut self, at: u64, word: u64) {
        self.run_others();
        self.memory.store(at, word);
        self.run_others();
    }

    fn compare_swap(&mut self, at: u64, old: u64, new: u64) -> bool {
        self.run_others();
        let is_old = self.memory.load(at) == old;
        if is_old {
            self.memory.store(at, new);
        }
        is_old
    }
}

impl Mover for ReaderWorld {
    fn lock(&mut self, source: FrameRun, objects: &[(u32, u64)], class: Class) {
        for (number, id) in objects {
            let id = ObjectNumber::new(*id).expect("a number");
            // Writes of other workers run to their end within one step.
            let locked = slot::lock(self, slot_word(source, *number, class), id, Lock::Moving);
            assert!(locked.is_ok(), "{id:?} cannot be locked: {locked:?}");
        }
    }

    fn copy(&mut self, from: (FrameRun, u32), to: (FrameRun, u32), class: Class) {
        let (from, to) = (slot_word(from.0, from.1, class), slot_word(to.0, to.1, class));
        slot::copy(self, from, to, u64::from(class.slot_bytes / 8));
    }

    fn name(&mut self, address: BlockAddress, named: &[FrameRun]) {
        self.run_others();
        self.counts.splits += u64::from(named.len() == 2);
        self.memory.name(address, named);
        self.run_others();
    }

    fn free(&mut self, frames: FrameRun) {
        self.run_others();
        self.memory.free(frames);
        self.run_others();
    }
}

/// Plays the schedule with a seed.
///
/// # Errors
/// If a read or the heap is wrong.
pub fn run(seed: u64) -> Result<ObjectsCounts, String> {
    let mut schedule = Schedule::new(seed);
    for _ in 0..OPERATIONS {
        schedule.operate()?;
    }
    schedule.end()
}

struct Schedule {
    heap: Heap,
    world: ReaderWorld,
    next_number: u64,
    /// The objects that live, by their index in the model.
    live: Vec<usize>,
    /// Out of 16: how often an object is freed.
    frees: u64,
    classes: Vec<(ClassId, Class)>,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let classes = Classes::standard().clone();
        let count = 1 + rng.index(2);
        let chosen = (0..count).filter_map(|_| {
            let id = classes.class_for(CLASS_BYTES[rng.index(CLASS_BYTES.len())])?;
            Some((id, classes.get(id)?))
        });
        let chosen = chosen.collect();
        let settings = HeapSettings {
            classes,
            mode: IdMode::Numbers,
            may_split: rng.chance(1, 2),
            workers: 1 + u16::try_from(rng.below(4)).expect("small"),
            frames_max: FRAMES,
        };
        let frees = 3 + rng.below(6);
        let world = ReaderWorld {
            rng,
            memory: HeapMemory::new(FRAMES),
            readers: Vec::new(),
            writes: Vec::new(),
            objects: Vec::new(),
            next_stamp: 1,
            time: 0,
            counts: ObjectsCounts::default(),
            failure: None,
        };
        Self { heap: Heap::new(settings), world, next_number: 1, live: Vec::new(), frees, classes: chosen }
    }

    fn operate(&mut self) -> Result<(), String> {
        let what = self.world.rng.below(16);
        match what {
            _ if self.live.is_empty() => self.allocate()?,
            0..3 => self.write()?,
            3 => self.compact()?,
            4 => self.release()?,
            5 => self.correct()?,
            _ if what - 6 < self.frees => {
                // Allocations and frees come in bursts, so that blocks fill and become sparse.
                for _ in 0..1 + self.world.rng.below(12) {
                    self.free()?;
                }
            }
            _ => {
                for _ in 0..1 + self.world.rng.below(30) {
                    self.allocate()?;
                }
            }
        }
        self.world.failure.take().map_or(Ok(()), Err)
    }

    fn allocate(&mut self) -> Result<(), String> {
        if self.live.len() == OBJECTS_MAX {
            return Ok(());
        }
        let (id, class) = self.classes[self.world.rng.index(self.classes.len())];
        let worker = u16::try_from(self.world.rng.below(u64::from(self.heap.workers()))).expect("small");
        let next = &mut self.next_number;
        let mut draw = || std::mem::replace(next, *next + 1);
        let allocated = match self.heap.allocate(worker, id, &mut draw) {
            Ok(allocated) => allocated,
            Err(HeapError::Full) => {
                self.world.counts.full += 1;
                return self.compact();
            }
            Err(error) => return Err(error.to_string()),
        };
        let number = ObjectNumber::new(allocated.id).ok_or("not a number")?;
        self.world.next_stamp += 1;
        let (stamp, began) = (self.world.next_stamp, self.world.time);
        let (name, _) = BlockAddress::containing(allocated.address).ok_or("not an address")?;
        if self.world.memory.named(name).is_empty() {
            self.world.name(name, &[allocated.frames]);
        }
        let at = slot_word(allocated.frames, allocated.slot, class);
        let payload = vec![stamp; class.slot_bytes as usize / 8 - 1];
        // No reader has the pointer yet.
        slot::create(&mut self.world, at, number, &payload);
        self.world.objects.push(ModelObject {
            number,
            class,
            pointers: vec![allocated.address],
            versions: vec![(stamp, began, self.world.time)],
            freed_at: None,
        });
        self.live.push(self.world.objects.len() - 1);
        self.world.counts.allocations += 1;
        Ok(())
    }

    /// The place of an object in `live`, one of the newest in most cases.
    fn some_live(&mut self) -> Option<usize> {
        let count = self.live.len();
        let among = if self.world.rng.chance(1, 2) { count.min(8) } else { count };
        (count > 0).then(|| count - 1 - self.world.rng.index(among))
    }

    fn pointer_of(&mut self, object: usize) -> (u64, u64) {
        let model = &self.world.objects[object];
        let address = model.pointers[self.world.rng.index(model.pointers.len())];
        (address, model.number.get())
    }

    fn write(&mut self) -> Result<(), String> {
        let Some((object, at)) = self.find_some()? else { return Ok(()) };
        self.world.write(object, at).ok_or_else(|| format!("object {object} cannot be locked"))
    }

    /// One of the objects that live, and where it is.
    fn find_some(&mut self) -> Result<Option<(usize, u64)>, String> {
        let Some(at) = self.some_live() else { return Ok(None) };
        let object = self.live[at];
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        Ok(Some((object, slot_word(found.frames, found.slot, self.world.objects[object].class))))
    }

    fn free(&mut self) -> Result<(), String> {
        let Some(at) = self.some_live() else { return Ok(()) };
        let object = self.live.swap_remove(at);
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        let ModelObject { class, number, .. } = self.world.objects[object];
        let at = slot_word(found.frames, found.slot, class);
        slot::lock(&mut self.world, at, number, Lock::Writing).map_err(|error| format!("{id}: {error:?}"))?;
        slot::free(&mut self.world, at);
        self.world.objects[object].freed_at = Some(self.world.time);
        self.heap.free(address, id, &mut self.world).map_err(|error| broken(address, id, error))?;
        if self.heap.locate(address, id).is_ok() {
            return Err(format!("object {id} was freed and is found"));
        }
        self.world.counts.frees += 1;
        Ok(())
    }

    fn compact(&mut self) -> Result<(), String> {
        for _ in 0..self.world.rng.below(4) {
            let found = self.find_some()?;
            self.world.writes.extend(found);
        }
        let (class, _) = self.classes[self.world.rng.index(self.classes.len())];
        let most = 1 + self.world.rng.below(6);
        self.world.counts.merges += self.heap.compact(class, most, &mut self.world);
        self.world.writes.clear();
        Ok(())
    }

    /// Corrects a pointer, as a client does after a failed read.
    fn correct(&mut self) -> Result<(), String> {
        let Some(at) = self.some_live() else { return Ok(()) };
        let object = self.live[at];
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        let pointers = &mut self.world.objects[object].pointers;
        if !pointers.contains(&found.address) {
            pointers.push(found.address);
            self.world.counts.corrected += 1;
        }
        // While nothing changes, each object can be read where it is.
        let ModelObject { number, class, ref versions, .. } = self.world.objects[object];
        let at = slot_word(found.frames, found.slot, class);
        let header = Header::from_word(self.world.memory.load(at));
        let stamp = versions.last().expect("it was written").0;
        let bytes: Vec<u64> =
            (1..u64::from(class.slot_bytes / 8)).map(|word| self.world.memory.load(at + word)).collect();
        if verdict(number, header, header) != ReadVerdict::Valid || bytes.iter().any(|word| *word != stamp) {
            return Err(format!("{number:?} is not as it was written: {header:?}, {bytes:x?}"));
        }
        Ok(())
    }

    /// Replaces all pointers to an object by one to its new address.
    fn release(&mut self) -> Result<(), String> {
        let Some(at) = self.some_live() else { return Ok(()) };
        let object = self.live[at];
        let (address, id) = self.pointer_of(object);
        let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
        // The client has replaced all copies of the old pointers before.
        self.world.readers.retain(|read| read.object != object);
        let next =
            self.heap.release(address, id, &mut self.world).map_err(|error| broken(address, id, error))?;
        self.world.objects[object].pointers = vec![next];
        self.world.counts.released += u64::from(found.is_old);
        Ok(())
    }

    fn end(mut self) -> Result<ObjectsCounts, String> {
        while !self.live.is_empty() {
            self.free()?;
        }
        let usage = self.heap.usage();
        if usage.held_bytes != 0 || usage.live_bytes != 0 || self.heap.addresses().0 != 0 {
            return Err(format!("not all is free: {usage:?}, addresses {:?}", self.heap.addresses()));
        }
        self.world.failure.map_or(Ok(self.world.counts), Err)
    }
}

fn broken(address: u64, id: u64, error: HeapError) -> String {
    format!("the pointer {address:#x} to object {id} is broken: {error}")
}
