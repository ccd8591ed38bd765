//! Size classes: the sizes of slots, and the sizes of the blocks that have them.
//!
//! A class wastes at most an eighth of what an object needs, or less than 8 bytes, the unused end
//! of its blocks included. An object that needs more than [`SLOT_BYTES_MAX`] is a *large object*,
//! which has a block of whole pages for itself.

use std::ops::RangeInclusive;
use std::sync::LazyLock;

use crate::header::HEADER_BYTES;

/// Bytes of the smallest block, and of a frame.
pub const FRAME_BYTES: u64 = 4096;
const PAGE_BYTES: u32 = 4096;
const _: () = assert!(PAGE_BYTES as u64 == FRAME_BYTES);
/// Size of the largest block with several slots, as a power of two of frames.
pub const BLOCK_ORDER_MAX: u8 = 8;
/// Number of block sizes: 4 KiB to 128 MiB. Those above 1 MiB are for large objects.
pub const BLOCK_ORDERS: usize = 16;
/// Bytes of the largest slot that shares a block with others.
pub const SLOT_BYTES_MAX: u32 = 32 << 10;
/// Bytes of the largest object.
pub const OBJECT_BYTES_MAX: u32 = 64 << 20;
/// Bytes of the smallest slot: a header and one word.
const SLOT_BYTES_MIN: u32 = 16;
/// Least number of slots of a block by default, unless the block would be larger than 1 MiB.
const SLOTS_MIN: u32 = 32;
/// Most size classes that a pointer can name.
const CLASSES_MAX: usize = 256;

/// The number of a size class.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ClassId(pub u8);

/// A size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class {
    /// Bytes of a slot, the header included; a multiple of 8.
    pub slot_bytes: u32,
    /// Size order of a block: it has addresses for 4 KiB · 2^`order`.
    pub order: u8,
}

impl Class {
    /// Frames of a block.
    #[must_use]
    pub fn frames(self) -> u32 {
        if self.slot_bytes > SLOT_BYTES_MAX { self.slot_bytes / PAGE_BYTES } else { 1 << self.order }
    }

    /// Bytes of a block's memory.
    #[must_use]
    pub fn block_bytes(self) -> u64 {
        FRAME_BYTES * u64::from(self.frames())
    }

    /// Bytes of a block's addresses. The block's memory is at the first of them.
    #[must_use]
    pub fn address_bytes(self) -> u64 {
        FRAME_BYTES << self.order
    }

    /// Slots of a block.
    #[must_use]
    pub fn slots(self) -> u32 {
        let slots = self.block_bytes() / u64::from(self.slot_bytes);
        u32::try_from(slots).expect("at most 65,536")
    }

    /// Whether each object has a block for itself. Such a block is never merged.
    #[must_use]
    pub fn is_single(self) -> bool {
        self.slots() == 1
    }

    /// Bytes of the largest object.
    #[must_use]
    pub fn payload_bytes(self) -> u32 {
        self.slot_bytes - HEADER_BYTES
    }

    /// Whether objects of `needed` bytes, with their header, waste at most an eighth or 7 bytes.
    fn suits(self, needed: u32) -> bool {
        let slots = u64::from(self.slots());
        let used = slots * u64::from(needed);
        slots > 0 && self.block_bytes() - used <= (used / 8).max(8 * slots - 1)
    }
}

/// The sizes of the blocks with slots of this size: the smallest with enough slots, and somewhat
/// larger ones, whose unused end may be smaller.
fn order_range(slot_bytes: u32) -> RangeInclusive<u8> {
    let frames = (u64::from(slot_bytes) * u64::from(SLOTS_MIN)).div_ceil(FRAME_BYTES);
    let order = frames.next_power_of_two().trailing_zeros();
    let order = u8::try_from(order).expect("small").min(BLOCK_ORDER_MAX);
    order..=(order + 2).min(BLOCK_ORDER_MAX)
}

/// The classes of a heap, the smallest slots first.
#[derive(Clone, Debug)]
pub struct Classes(Vec<Class>);

impl Classes {
    /// The classes with blocks of the default sizes, which have enough slots and little waste.
    #[must_use]
    pub fn standard() -> &'static Self {
        static STANDARD: LazyLock<Classes> =
            LazyLock::new(|| Classes::derive(order_range).with_large_objects());
        &STANDARD
    }

    /// Creates the classes with blocks of 4 KiB · 2^`order`, as in the figures of the paper.
    #[must_use]
    pub fn with_blocks(order: u8) -> Self {
        Self::derive(|_| order..=order)
    }

    /// Creates a set of classes, the smallest slots first.
    ///
    /// # Panics
    /// If there are too many, or they are in another order.
    #[must_use]
    pub fn of(classes: Vec<Class>) -> Self {
        assert!(classes.len() <= CLASSES_MAX, "a pointer has 8 bits for the class");
        assert!(classes.is_sorted_by_key(|class| class.slot_bytes));
        Self(classes)
    }

    /// Adds the classes of large objects.
    fn with_large_objects(mut self) -> Self {
        let pages_max = (OBJECT_BYTES_MAX + HEADER_BYTES).div_ceil(PAGE_BYTES);
        let mut needed = SLOT_BYTES_MAX + 1;
        while needed <= pages_max * PAGE_BYTES {
            // The most pages of which the smallest object wastes at most an eighth.
            let pages = ((needed + needed / 8) / PAGE_BYTES).clamp(needed.div_ceil(PAGE_BYTES), pages_max);
            let order = pages.next_power_of_two().trailing_zeros();
            let order = u8::try_from(order).expect("at most 15");
            self.0.push(Class { slot_bytes: pages * PAGE_BYTES, order });
            needed = pages * PAGE_BYTES + 1;
        }
        Self::of(self.0)
    }

    /// Derives the classes: each has the largest slots that suit the smallest object in it.
    ///
    /// `orders`: the block sizes that slots of a size may have.
    fn derive(orders: impl Fn(u32) -> RangeInclusive<u8>) -> Self {
        let mut classes = Vec::new();
        let mut needed = HEADER_BYTES + 1;
        while needed <= SLOT_BYTES_MAX {
            let smallest = needed.next_multiple_of(8).max(SLOT_BYTES_MIN);
            let sizes = (smallest..=SLOT_BYTES_MAX).step_by(8);
            let sizes = sizes.take_while(|size| size - needed < 8.max(needed / 8 + 1));
            let suiting = sizes.filter_map(|slot_bytes| {
                let mut of_size = orders(slot_bytes).map(|order| Class { slot_bytes, order });
                of_size.find(|class| class.suits(needed))
            });
            // With large slots in small blocks no class may suit. Then the waste is larger.
            let any = Class { slot_bytes: smallest, order: *orders(smallest).start() };
            let class = suiting.last().unwrap_or(any);
            if class.slots() == 0 {
                break;
            }
            needed = class.slot_bytes + 1;
            classes.push(class);
        }
        Self::of(classes)
    }

    /// The class for objects of `bytes` bytes; `None` if they are too large.
    #[must_use]
    pub fn class_for(&self, bytes: u32) -> Option<ClassId> {
        let needed = bytes.max(1).checked_add(HEADER_BYTES)?;
        let at = self.0.partition_point(|class| class.slot_bytes < needed);
        (at < self.0.len()).then(|| ClassId(u8::try_from(at).expect("at most 256 classes")))
    }

    /// The class with this number.
    #[must_use]
    pub fn get(&self, id: ClassId) -> Option<Class> {
        self.0.get(usize::from(id.0)).copied()
    }

    /// All classes with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (ClassId, Class)> + '_ {
        (0..).map(ClassId).zip(self.0.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_class_wastes_more_than_an_eighth_or_seven_bytes() {
        let classes = Classes::standard();
        let large = (0..2000).map(|step| OBJECT_BYTES_MAX - step * 33_331);
        for bytes in (1..=2 * SLOT_BYTES_MAX).chain(large) {
            let class = classes.get(classes.class_for(bytes).unwrap()).unwrap();
            let needed = bytes + HEADER_BYTES;
            assert!(class.payload_bytes() >= bytes);
            assert!(class.suits(needed), "{bytes} bytes in {class:?}");
        }
        assert!(classes.class_for(OBJECT_BYTES_MAX).is_some());
        assert_eq!(classes.class_for(OBJECT_BYTES_MAX + PAGE_BYTES), None);
        assert_eq!(classes.class_for(u32::MAX), None);
        assert_eq!(classes.class_for(0), classes.class_for(1), "an object of no bytes has an address, too");
    }

    #[test]
    fn slots_are_words_and_blocks_have_many() {
        for (_, class) in Classes::standard().iter() {
            assert_eq!(class.slot_bytes % 8, 0);
            assert!(class.is_single() || class.slots() >= SLOTS_MIN.min((1 << 20) / class.slot_bytes));
            assert!(usize::from(class.order) < BLOCK_ORDERS);
            assert_eq!(class.is_single(), class.slot_bytes > SLOT_BYTES_MAX);
            assert!(class.block_bytes() <= class.address_bytes());
            assert!(2 * class.block_bytes() > class.address_bytes());
        }
        let sizes: Vec<u32> = Classes::standard().iter().map(|(_, class)| class.slot_bytes).collect();
        assert!(sizes.is_sorted_by(|one, next| one < next));
    }
}
