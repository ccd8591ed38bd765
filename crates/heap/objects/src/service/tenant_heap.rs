//! The heap of one tenant: answers its requests.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::bytes::HeapBytes;
use crate::class::{Class, ClassId, Classes, FRAME_BYTES, SLOT_BYTES_MAX};
use crate::header::ObjectNumber;
use crate::heap::{Heap, HeapError, HeapSettings, Located};
use crate::layout::slot_word;
use crate::ledger::Ledger;
use crate::pointer::Pointer;
use crate::recovery::{Damage, recover};
use crate::slot::{LockRefused, Words as _};
use crate::wire::{Answer, BlockRegion, Refused, Request};

use super::budget::{BATCH_FRAMES, FrameBudget, Shortage};
use super::heat::Heat;
use super::report::{ClassReport, HeapReport};

/// Most merges of one compaction step. Requests are answered between steps.
pub(super) const MERGES_PER_STEP: u64 = 16;
/// A class is compacted if the unused bytes of its blocks are more than 1/`FRAGMENTATION_DIVISOR`
/// of the bytes of its slots in use.
const FRAGMENTATION_DIVISOR: u64 = 8;
/// Value of [`FRAGMENTATION_DIVISOR`] for a hot class.
const HOT_FRAGMENTATION_DIVISOR: u64 = 1;
/// A class is compacted only if its unused bytes are at least those of this number of blocks.
const FRAGMENTATION_BLOCKS: u64 = 2;
/// Bytes of memory in free frames that are tolerated before free frames are cleared.
const SLACK_BYTES: u64 = 1 << 20;
/// A heap is closed when it was found above its limit this number of times more often than not.
const OVERUSES_MAX: u32 = 10;

/// The heap of one tenant.
#[derive(Debug)]
pub(super) struct TenantHeap {
    pub number: u16,
    heap: Heap,
    pub ledger: Ledger<HeapBytes>,
    pub regions: Vec<BlockRegion>,
    /// The bytes and the names, if devices serve them.
    pub raw_regions: Option<[BlockRegion; 2]>,
    /// Whether all frames are reserved from the beginning, and stay reserved.
    is_pinned: bool,
    /// The number of the next object.
    next: u64,
    budget: Arc<FrameBudget>,
    /// Frames of the budget that this heap has reserved.
    granted: u32,
    /// Most frames that the heap may have.
    pub quota: u32,
    /// Frames without a block that the system had filled for reads at the last check.
    filled: u32,
    /// Number of checks that found the heap above its limit, less the number that did not.
    overuses: u32,
    merges: u64,
    corrections: u64,
    /// The number of a class's frees when no blocks could be merged any more, for each class.
    unmergeable_at_frees: Vec<Option<u64>>,
    heat: Heat,
}

/// An object that a request names.
#[derive(Clone, Copy, Debug)]
struct Named {
    found: Located,
    class: Class,
    /// The first word of the object's slot.
    at: u64,
    /// The pointer with the slot where it is.
    pointer: Pointer,
}

fn settings(frames_max: u32) -> HeapSettings {
    HeapSettings { classes: Classes::standard().clone(), may_split: false, workers: 1, frames_max }
}

impl TenantHeap {
    /// Creates a heap.
    pub fn create(number: u16, bytes: HeapBytes, budget: Arc<FrameBudget>, quota: u32) -> Self {
        let layout = bytes.layout();
        let heap = Heap::new(settings(layout.frames_max()));
        Self::with(number, heap, Ledger::create(bytes, layout), budget, quota)
    }

    /// Creates a heap for which all `frames` of its memory are reserved.
    pub fn create_pinned(number: u16, bytes: HeapBytes, budget: Arc<FrameBudget>, frames: u32) -> Self {
        let mut heap = Self::create(number, bytes, budget, frames);
        (heap.is_pinned, heap.granted) = (true, frames);
        heap.heap.set_frames_limit(frames);
        heap
    }

    /// Restores the heap of an earlier process.
    pub fn restore(
        number: u16,
        mut bytes: HeapBytes,
        budget: Arc<FrameBudget>,
        quota: u32,
        is_pinned: bool,
    ) -> Result<Self, Damage> {
        let layout = bytes.layout();
        let settings = settings(layout.frames_max());
        let restored = recover(&mut bytes, layout, &settings.classes)?;
        let heap = Heap::restore(settings, &restored.addresses, restored.blocks);
        let used = heap.used_frames().next_multiple_of(BATCH_FRAMES);
        let reserved = if is_pinned { layout.frames_max() } else { used };
        budget.reserve_kept(reserved);
        let mut heap = Self::with(number, heap, Ledger::reopen(bytes, layout), budget, quota);
        heap.granted = reserved;
        heap.heap.set_frames_limit(reserved);
        heap.is_pinned = is_pinned;
        heap.correct_root();
        Ok(heap)
    }

    fn with(
        number: u16,
        mut heap: Heap,
        mut ledger: Ledger<HeapBytes>,
        budget: Arc<FrameBudget>,
        quota: u32,
    ) -> Self {
        let classes = heap.classes().iter().count();
        heap.set_frames_limit(0);
        let next = match ledger.first_number() {
            next if next > ObjectNumber::FIRST.get() => next,
            // No number was ever reserved.
            _ => first_number(SystemTime::now()),
        };
        Self {
            number,
            heap,
            ledger,
            regions: Vec::new(),
            raw_regions: None,
            is_pinned: false,
            next,
            budget,
            granted: 0,
            quota,
            filled: 0,
            overuses: 0,
            merges: 0,
            corrections: 0,
            unmergeable_at_frees: vec![None; classes],
            heat: Heat::new(classes),
        }
    }

    /// Answers a request. Bytes that the answer borrows are in `read`.
    pub fn answer<'a>(&mut self, request: Request<'_>, read: &'a mut Vec<u8>) -> Result<Answer<'a>, Refused> {
        match request {
            Request::Open => Ok(Answer::Opened(self.regions.clone())),
            Request::OpenRaw => {
                let [data, names] = self.raw_regions.ok_or(Refused::Invalid)?;
                Ok(Answer::OpenedRaw { frames: self.ledger.words.layout().frames_max(), data, names })
            }
            Request::Allocate { bytes } => Ok(Answer::Pointer(self.allocate(bytes, &[])?, false)),
            Request::Create { bytes, first } => Ok(Answer::Pointer(self.allocate(bytes, first)?, false)),
            Request::Root { bytes } => self.root(bytes),
            Request::Free(pointer) => self.free(pointer),
            Request::Read(pointer) => {
                let named = self.named(pointer)?;
                if named.class.slot_bytes > SLOT_BYTES_MAX {
                    return Err(Refused::TooLarge);
                }
                read.resize(named.class.payload_bytes() as usize, 0);
                self.ledger.words.read(named.at, read);
                Ok(Answer::Bytes(named.pointer, named.found.is_old, read))
            }
            Request::Write(pointer, bytes) => self.write(pointer, 0, bytes),
            Request::WriteAt { pointer, offset, bytes } => self.write(pointer, offset, bytes),
            Request::WriteIf { pointer, expected, bytes } => {
                let named = self.named(pointer)?;
                if self.ledger.words.load(named.at + 1) != expected {
                    return Err(Refused::Changed);
                }
                self.write(pointer, 0, bytes)
            }
            Request::Replace { pointer, staged, bytes } => self.replace(pointer, staged, bytes),
            Request::Correct(pointer) => {
                let named = self.named(pointer)?;
                self.corrections += 1;
                Ok(Answer::Pointer(named.pointer, named.found.is_old))
            }
            Request::Release(pointer) => {
                let named = self.named(pointer)?;
                let id = pointer.number.get();
                let address = self.heap.release(pointer.address, id, &mut self.ledger).map_err(refused)?;
                if self.ledger.root().is_some_and(|(root, ..)| root == pointer.number) {
                    self.ledger.set_root(pointer.number, address, pointer.class);
                }
                Ok(Answer::Pointer(Pointer { address, ..named.pointer }, false))
            }
            Request::Report { .. } | Request::Compact { .. } | Request::SetLimit { .. } => {
                Err(Refused::Invalid)
            }
        }
    }

    /// Records the address of the root that stays valid. A process that was killed while
    /// the root was released leaves the old one in the record.
    fn correct_root(&mut self) {
        if let Some((number, address, class)) = self.ledger.root()
            && let Ok(home) = self.heap.home_address(address, number.get())
        {
            self.ledger.set_root(number, home, class);
        }
    }

    /// The root object, which is allocated if there is none.
    fn root<'a>(&mut self, bytes: u32) -> Result<Answer<'a>, Refused> {
        let BlockRegion { heap, node, .. } = self.regions[0];
        if let Some((number, address, class)) = self.ledger.root()
            && let Ok(named) = self.named(Pointer { node, heap, class, address, number })
        {
            return Ok(Answer::Pointer(named.pointer, false));
        }
        let pointer = self.allocate(bytes, &[])?;
        self.ledger.set_root(pointer.number, pointer.address, pointer.class);
        Ok(Answer::Pointer(pointer, false))
    }

    fn allocate(&mut self, bytes: u32, first: &[u8]) -> Result<Pointer, Refused> {
        if first.len() > SLOT_BYTES_MAX as usize {
            return Err(Refused::TooLarge);
        }
        let class = self.heap.classes().class_for(bytes).ok_or(Refused::TooLarge)?;
        let shape = self.heap.classes().get(class).ok_or(Refused::TooLarge)?;
        self.ledger.reserve_number(self.next);
        let allocated = match self.try_allocate(class) {
            Err(HeapError::Full) => {
                let grown = self.grow(shape);
                if grown.is_err() && !self.compact_to_grow(class, shape) {
                    return Err(grown.err().map_or(Refused::Full, shortage));
                }
                self.try_allocate(class)
            }
            allocated => allocated,
        };
        let allocated = allocated.map_err(refused)?;
        let number = ObjectNumber::new(allocated.id).ok_or(Refused::Full)?;
        // The memory of a new block is all zeros.
        let words =
            if shape.is_single() { first.len().div_ceil(8) } else { shape.payload_bytes() as usize / 8 };
        let mut payload = vec![0; words];
        for (word, part) in payload.iter_mut().zip(first.chunks(8)) {
            let mut whole = [0; 8];
            whole[..part.len()].copy_from_slice(part);
            *word = u64::from_le_bytes(whole);
        }
        self.ledger.create_object(slot_word(allocated.frames, allocated.slot, shape), number, &payload);
        let BlockRegion { heap, node, .. } = self.regions[0];
        Ok(Pointer { node, heap, class, address: allocated.address, number })
    }

    fn try_allocate(&mut self, class: ClassId) -> Result<crate::heap::Allocated, HeapError> {
        let next = &mut self.next;
        let mut draw = || std::mem::replace(next, *next + 1);
        self.heap.allocate(0, class, &mut draw, &mut self.ledger)
    }

    /// Reserves frames for another block, if the quota and the budget allow it.
    fn grow(&mut self, shape: Class) -> Result<(), Shortage> {
        let used = self.heap.used_frames();
        let wanted = (used + shape.frames()).next_multiple_of(BATCH_FRAMES);
        let more = wanted.saturating_sub(self.granted);
        if used + shape.frames() > self.quota {
            return Err(Shortage::Full);
        }
        self.budget.reserve(more)?;
        self.granted += more;
        self.heap.set_frames_limit(self.granted);
        Ok(())
    }

    /// Makes room for another block by compaction. Begins with the block's class, in which
    /// compaction may free a slot.
    fn compact_to_grow(&mut self, class: ClassId, shape: Class) -> bool {
        let others = self.heap.classes().iter().map(|(id, _)| id).filter(|id| *id != class);
        for class in std::iter::once(class).chain(others.collect::<Vec<_>>()) {
            let merges = self.heap.compact(class, MERGES_PER_STEP, &mut self.ledger);
            self.merges += merges;
            if merges > 0 && (self.heap.has_room(shape) || self.grow(shape).is_ok()) {
                return true;
            }
        }
        false
    }

    /// Returns unneeded frames to the budget.
    fn shrink(&mut self) {
        let needed = self.heap.used_frames() + self.filled;
        let wanted = needed.next_multiple_of(BATCH_FRAMES) + BATCH_FRAMES;
        if self.granted > wanted && !self.is_pinned {
            self.budget.release(self.granted - wanted);
            self.granted = wanted;
            self.heap.set_frames_limit(wanted);
        }
    }

    fn free<'a>(&mut self, pointer: Pointer) -> Result<Answer<'a>, Refused> {
        let named = self.named(pointer)?;
        self.ledger.free_object(named.at, pointer.number).map_err(busy)?;
        self.heap.free(pointer.address, pointer.number.get(), &mut self.ledger).map_err(refused)?;
        Ok(Answer::Pointer(named.pointer, false))
    }

    fn write<'a>(&mut self, pointer: Pointer, offset: u32, bytes: &[u8]) -> Result<Answer<'a>, Refused> {
        let named = self.named(pointer)?;
        let end = u64::from(offset) + bytes.len() as u64;
        if end > named.class.payload_bytes().into() || bytes.len() > SLOT_BYTES_MAX as usize {
            return Err(Refused::TooLarge);
        }
        let first = u64::from(offset / 8);
        let mut payload = Vec::with_capacity(bytes.len().div_ceil(8));
        for (word, part) in (named.at + 1 + first..).zip(bytes.chunks(8)) {
            // The rest of the last word stays.
            let mut whole = if part.len() < 8 { self.ledger.words.load(word).to_le_bytes() } else { [0; 8] };
            whole[..part.len()].copy_from_slice(part);
            payload.push(u64::from_le_bytes(whole));
        }
        self.ledger.write_object(named.at, pointer.number, first, &payload).map_err(busy)?;
        Ok(Answer::Pointer(named.pointer, named.found.is_old))
    }

    /// Replaces the first bytes of a large object by those of another one, which is freed.
    fn replace<'a>(&mut self, pointer: Pointer, staged: Pointer, bytes: u32) -> Result<Answer<'a>, Refused> {
        let (named, other) = (self.named(pointer)?, self.named(staged)?);
        let is_possible = named.class.is_single() && pointer.class == staged.class;
        if !is_possible || bytes > named.class.payload_bytes() {
            return Err(Refused::Invalid);
        }
        let rest = bytes % 8;
        if rest > 0 {
            // The last word keeps some bytes of the object.
            let word = 1 + u64::from(bytes / 8);
            let mask = (1 << (8 * rest)) - 1;
            let new = self.ledger.words.load(other.at + word) & mask;
            let old = self.ledger.words.load(named.at + word) & !mask;
            self.ledger.words.store(other.at + word, new | old);
        }
        let of = |pointer: Pointer| (pointer.address, pointer.number.get());
        let words = bytes.div_ceil(8);
        self.heap.replace(of(pointer), of(staged), words, &mut self.ledger).map_err(refused)?;
        Ok(Answer::Pointer(named.pointer, named.found.is_old))
    }

    fn named(&self, pointer: Pointer) -> Result<Named, Refused> {
        let found = self.heap.locate(pointer.address, pointer.number.get()).map_err(refused)?;
        let class = self.heap.classes().get(pointer.class).ok_or(Refused::NoObject)?;
        let BlockRegion { heap, node, .. } = self.regions[0];
        let is_of_class = self.heap.class_of(found.block) == Some(pointer.class);
        if !is_of_class || (pointer.heap, pointer.node) != (heap, node) {
            return Err(Refused::NoObject);
        }
        let at = slot_word(found.frames, found.slot, class);
        Ok(Named { found, class, at, pointer: Pointer { address: found.address, ..pointer } })
    }

    /// Compacts a class by at most `merges_max` merges. Returns the number of merges.
    pub fn compact_step(&mut self, class: ClassId, merges_max: u64) -> u64 {
        let merges = self.heap.compact(class, merges_max, &mut self.ledger);
        self.merges += merges;
        if merges == 0 {
            self.unmergeable_at_frees[usize::from(class.0)] = Some(self.heap.class_frees(class));
        }
        self.shrink();
        merges
    }

    /// A class that is fragmented, and has had frees since compaction last found no merge.
    pub fn fragmented_class(&self) -> Option<ClassId> {
        let mut classes = self.heap.classes().iter();
        classes.find_map(|(id, shape)| {
            let usage = self.heap.class_usage(id);
            let excess = usage.held_bytes - usage.live_bytes;
            let is_hot = self.heat.is_hot(usize::from(id.0));
            let divisor = if is_hot { HOT_FRAGMENTATION_DIVISOR } else { FRAGMENTATION_DIVISOR };
            let is_fragmented =
                excess > usage.live_bytes / divisor && excess >= FRAGMENTATION_BLOCKS * shape.block_bytes();
            let is_unmergeable =
                self.unmergeable_at_frees[usize::from(id.0)] == Some(self.heap.class_frees(id));
            (is_fragmented && !is_unmergeable).then_some(id)
        })
    }

    /// Updates which classes are hot. To be called once a second.
    pub fn update_heat(&mut self) {
        let classes = self.heap.classes().iter();
        let changes = classes.map(|(id, _)| (self.heap.class_changes(id), self.heap.class_usage(id).objects));
        self.heat.update(changes);
    }

    /// The classes of the heap.
    pub fn classes(&self) -> Vec<ClassId> {
        self.heap.classes().iter().map(|(id, _)| id).collect()
    }

    /// Frees addresses that were released some time ago.
    pub fn expire_released(&mut self) {
        self.heap.expire_released(&mut self.ledger);
    }

    /// Returns memory of free frames to the system: a read of an old address creates pages.
    /// Meanwhile they count as the heap's, up to its limit. To be called once a second.
    ///
    /// Returns true if the heap must be closed, because its programs keep filling more memory than
    /// its limit.
    pub fn clear_free_frames(&mut self) -> bool {
        let used = u64::from(self.heap.used_frames()) * FRAME_BYTES;
        let limit = u64::from(self.quota) * FRAME_BYTES;
        let (data, tables) = self.ledger.words.allocated_bytes().unwrap_or_default();
        self.filled = 0;
        if data > used + SLACK_BYTES || tables > used / 8 + SLACK_BYTES {
            self.heap.clear_free_frames(&mut self.ledger);
            let filled = limit.min(data).saturating_sub(used) / FRAME_BYTES;
            self.filled = u32::try_from(filled).unwrap_or(u32::MAX);
        }
        self.reserve_filled();
        self.shrink();
        let is_over = !self.is_pinned && data > used.max(limit) + SLACK_BYTES;
        self.overuses = if is_over { self.overuses + 1 } else { self.overuses.saturating_sub(1) };
        self.overuses >= OVERUSES_MAX
    }

    /// Reserves the frames that reads have filled, so that no other heap can reserve that memory.
    /// Does nothing if the budget has too few frames.
    fn reserve_filled(&mut self) {
        let missing = (self.heap.used_frames() + self.filled).saturating_sub(self.granted);
        if missing > 0 && self.budget.reserve(missing).is_ok() {
            self.granted += missing;
            self.heap.set_frames_limit(self.granted);
        }
    }

    /// Ends the heap, and truncates its memory.
    ///
    /// # Errors
    /// If the memory cannot be truncated.
    pub fn end(self) -> std::io::Result<()> {
        self.budget.release(self.granted);
        self.ledger.words.revoke()
    }

    /// The report on the heap.
    pub fn report(&self, node: u16, tenant: u32) -> HeapReport {
        let usage = self.heap.usage();
        let (allocated_bytes, table_bytes) = self.ledger.words.allocated_bytes().unwrap_or_default();
        let classes = self.heap.classes().iter().filter_map(|(id, shape)| {
            let usage = self.heap.class_usage(id);
            (usage.held_bytes > 0).then_some(ClassReport {
                slot_bytes: shape.slot_bytes,
                block_bytes: shape.block_bytes(),
                held_bytes: usage.held_bytes,
                objects: usage.objects,
                is_hot: self.heat.is_hot(usize::from(id.0)),
            })
        });
        HeapReport {
            node,
            tenant,
            limit_bytes: u64::from(self.quota) * FRAME_BYTES,
            held_bytes: usage.held_bytes,
            live_bytes: usage.live_bytes,
            objects: usage.objects,
            allocated_bytes,
            table_bytes,
            addresses: self.heap.addresses().0 as u64,
            merges: self.merges,
            corrections: self.corrections,
            classes: classes.collect(),
        }
    }
}

/// The first object's number in a new heap. It is greater than those of a heap that was lost or
/// closed before, if that has allocated fewer than 16,384 objects a second: no pointer of that heap
/// names an object of this one.
fn first_number(now: SystemTime) -> u64 {
    const YEAR_2025: Duration = Duration::from_secs(1_735_689_600);
    let elapsed = now.duration_since(UNIX_EPOCH + YEAR_2025).unwrap_or_default();
    let number = elapsed.as_secs() << 14 | 1;
    // Until 2041 at most half of the numbers are used.
    ObjectNumber::new(number).unwrap_or(ObjectNumber::FIRST).get()
}

fn refused(error: HeapError) -> Refused {
    match error {
        HeapError::Full => Refused::Full,
        HeapError::NoObject | HeapError::NoClass => Refused::NoObject,
    }
}

fn shortage(shortage: Shortage) -> Refused {
    match shortage {
        Shortage::Full => Refused::Full,
        Shortage::SourceUnreachable => Refused::Busy,
    }
}

fn busy(refused: LockRefused) -> Refused {
    match refused {
        LockRefused::Busy => Refused::Busy,
        LockRefused::Elsewhere => Refused::NoObject,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn create(frames: u32) -> TenantHeap {
        let budget = Arc::new(FrameBudget::new(frames, None));
        let mut heap = TenantHeap::create(0, HeapBytes::create(frames).unwrap(), budget, frames);
        heap.regions = vec![BlockRegion { heap: 0, node: 1, base: 0, key: 1 }];
        heap
    }

    /// The heap as the next process restores it.
    fn restart(heap: TenantHeap) -> TenantHeap {
        let fds = heap.ledger.words.fds().map(|fd| fd.as_fd().try_clone_to_owned().unwrap());
        drop(heap);
        let budget = Arc::new(FrameBudget::new(2048, None));
        let bytes = HeapBytes::open(fds).unwrap();
        let mut heap = TenantHeap::restore(0, bytes, budget, 2048, false).unwrap();
        heap.regions = vec![BlockRegion { heap: 0, node: 1, base: 0, key: 1 }];
        heap
    }

    fn root_of(heap: &mut TenantHeap) -> Pointer {
        match heap.answer(Request::Root { bytes: 100 }, &mut Vec::new()) {
            Ok(Answer::Pointer(pointer, _)) => pointer,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_later_heap_has_later_numbers() {
        let at = |seconds| first_number(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), ObjectNumber::FIRST.get());
        assert!(at(1_800_000_001) - at(1_800_000_000) >= 16_384);
        assert!(at(2_270_000_000) < 1 << 43, "half of the numbers are left in 2041");
        assert_eq!(at(u32::MAX.into()), ObjectNumber::FIRST.get(), "there are no more numbers");
        let mut heap = create(2048);
        let first = heap.allocate(100, &[]).unwrap().number;
        assert!(first.get() > at(1_700_000_000 + 60_000_000), "a heap of last year has smaller numbers");
        let next = heap.allocate(100, &[]).unwrap().number;
        assert!(restart(heap).next > next.get(), "the next process continues with greater numbers");
    }

    #[test]
    fn a_root_stays_that_was_being_released_when_the_service_was_killed() {
        let mut heap = create(2048);
        let root = root_of(&mut heap);
        let others: Vec<Pointer> = (0..2000).map(|_| heap.allocate(100, &[]).unwrap()).collect();
        // In the first block only the root is left, so it is moved.
        for (at, pointer) in others.iter().enumerate() {
            if at < 500 || at % 5 > 0 {
                heap.free(*pointer).unwrap();
            }
        }
        while heap.compact_step(root.class, 100) > 0 {}
        let found = heap.named(root).unwrap();
        assert!(found.found.is_old, "the root was moved");
        // Killed before the new address is recorded as that of the root.
        heap.heap.release(root.address, root.number.get(), &mut heap.ledger).unwrap();
        let mut heap = restart(heap);
        (0..3).for_each(|_| heap.expire_released());
        assert_eq!(root_of(&mut heap).number, root.number, "the root is the same object");
    }
}
