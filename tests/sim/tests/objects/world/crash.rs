//! Crashes of the service between any two stores, and checks of the objects afterwards.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use aquifer_objects::class::ClassId;
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::heap::Heap;
use aquifer_objects::layout::slot_word;
use aquifer_objects::recovery::recover;

use super::{ModelObject, Schedule, broken};

/// The payload with which a killed service unwinds.
pub(super) struct Killed;

/// The operation of the service at its crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InProgress {
    Nothing,
    Write(usize),
    Free(usize),
    Release(usize),
    /// A replacement of the bytes of the first object by those of the second.
    Replace(usize, usize),
    /// An allocation of an object whose bytes have this stamp.
    Allocate(u64),
}

impl Schedule {
    /// Runs one operation, in which the service may be killed and started again.
    pub(super) fn operate_or_crash(&mut self) -> Result<(), String> {
        let world = &mut self.ledger.words;
        world.crash_in = world.rng.chance(1, 12).then(|| {
            let most = [4, 40, 400][world.rng.index(3)];
            world.rng.below(most)
        });
        let operated = catch_unwind(AssertUnwindSafe(|| self.operate()));
        self.ledger.words.crash_in = None;
        match operated {
            Ok(result) => result,
            Err(killed) if killed.is::<Killed>() => self.recover(),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Restarts the service, which may be killed again while it restores the heap.
    fn recover(&mut self) -> Result<(), String> {
        let layout = self.ledger.words.layout;
        self.ledger.words.writes.clear();
        self.ledger.words.counts.crashes += 1;
        let restored = loop {
            let world = &mut self.ledger.words;
            world.crash_in = world.rng.chance(1, 3).then(|| world.rng.below(20));
            let recovered = catch_unwind(AssertUnwindSafe(|| recover(world, layout, &self.settings.classes)));
            match recovered {
                Ok(restored) => break restored.map_err(|error| format!("after a crash: {error}"))?,
                Err(killed) if killed.is::<Killed>() => {}
                Err(panic) => resume_unwind(panic),
            }
        };
        self.ledger.words.crash_in = None;
        let found: Vec<(u64, ClassId, u64)> = restored
            .blocks
            .iter()
            .flat_map(|block| {
                let shape = self.settings.classes.get(block.class).expect("it has a class");
                let objects = block.objects.iter();
                objects.map(move |(slot, record)| {
                    let address = record.home.at(u64::from(*slot) * u64::from(shape.slot_bytes));
                    (record.id, block.class, address)
                })
            })
            .collect();
        self.heap = Heap::restore(self.settings.clone(), &restored.addresses, restored.blocks);
        self.next_number = self.ledger.first_number();
        self.resolve_operation(&found)
    }

    /// Resolves whether the operation at the crash has taken effect.
    fn resolve_operation(&mut self, found: &[(u64, ClassId, u64)]) -> Result<(), String> {
        let is_there = |object: &ModelObject| found.iter().any(|(id, ..)| *id == object.number.get());
        let mut is_completed = true;
        match std::mem::replace(&mut self.in_progress, InProgress::Nothing) {
            InProgress::Nothing => {}
            InProgress::Write(object) => {
                let (address, id) = self.pointer_of(object);
                let found = self.heap.locate(address, id).map_err(|error| broken(address, id, error))?;
                let class = self.ledger.words.objects[object].class;
                let stamp = self.ledger.words.memory.get(slot_word(found.frames, found.slot, class) + 1);
                let time = self.ledger.words.time;
                let versions = &mut self.ledger.words.objects[object].versions;
                let pending = versions.last_mut().expect("it was pushed");
                is_completed = pending.0 == stamp;
                if is_completed {
                    pending.2 = time;
                } else if pending.2 == u64::MAX {
                    versions.pop();
                }
            }
            InProgress::Free(object) => {
                is_completed = !is_there(&self.ledger.words.objects[object]);
                if is_completed {
                    self.ledger.words.objects[object].freed_at = Some(self.ledger.words.time);
                } else {
                    self.live.push(object);
                }
            }
            InProgress::Replace(target, staged) => {
                is_completed = !is_there(&self.ledger.words.objects[staged]);
                if is_completed {
                    self.end_replacement(target, staged);
                } else {
                    self.ledger.words.objects[target].versions.pop();
                }
            }
            // The client retries with the old pointer.
            InProgress::Release(object) => self.release_object(object)?,
            InProgress::Allocate(stamp) => {
                let known = self.ledger.words.objects.len();
                is_completed = found.iter().any(|(id, ..)| {
                    !self.ledger.words.objects.iter().any(|object| object.number.get() == *id)
                });
                if is_completed {
                    self.adopt_unknown(found, stamp)?;
                    assert_eq!(self.ledger.words.objects.len(), known + 1, "one was being allocated");
                }
            }
        }
        let counts = &mut self.ledger.words.counts;
        *(if is_completed { &mut counts.completed } else { &mut counts.undone }) += 1;
        for object in &self.live {
            let model = &self.ledger.words.objects[*object];
            if !is_there(model) && model.number.get() < self.next_number {
                return Err(format!("{:?} is lost in a crash", model.number));
            }
        }
        match found.len() == self.live.len() {
            true => Ok(()),
            false => Err(format!("{} objects after a crash, and not {}", found.len(), self.live.len())),
        }
    }

    /// Adopts an allocated object whose pointer no client has received.
    fn adopt_unknown(&mut self, found: &[(u64, ClassId, u64)], stamp: u64) -> Result<(), String> {
        let world = &mut self.ledger.words;
        let is_unknown = |id: &u64| !world.objects.iter().any(|object| object.number.get() == *id);
        let (id, class, address) = *found.iter().find(|(id, ..)| is_unknown(id)).ok_or("there is one")?;
        let number = ObjectNumber::new(id).ok_or("not a number")?;
        let class = self.settings.classes.get(class).ok_or("not a class")?;
        let versions = vec![(stamp, 0, world.time)];
        world.objects.push(ModelObject { number, class, pointers: vec![address], versions, freed_at: None });
        self.live.push(world.objects.len() - 1);
        Ok(())
    }
}
