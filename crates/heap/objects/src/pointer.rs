//! Pointers to objects: 128 bits that programs may store, send, and use in any process of the
//! tenant.
//!
//! ```text
//! word 0:  bits 0..48   virtual address in the heap   bits 48..64  number of the heap on its node
//! word 1:  bits 0..44   number of the object          bits 44..52  size class
//!          bits 52..64  node
//! ```
//!
//! The address names the block where the object was allocated, and is only a hint for the slot
//! (§3.2): a reader compares the number in the header that it finds there with the pointer's.

use crate::class::{BLOCK_ORDERS, ClassId, FRAME_BYTES};
use crate::header::{NUMBER_BITS, ObjectNumber};

/// Bits of a virtual address.
const ADDRESS_BITS: u32 = 48;
/// Address bits of one block size, which has 2^44 bytes of addresses of its own.
const ZONE_BITS: u32 = 44;
const CLASS_BITS: u32 = 8;
const _: () = assert!(BLOCK_ORDERS <= 1 << (ADDRESS_BITS - ZONE_BITS));

/// The virtual address of a block: its size and its number among the blocks of that size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct BlockAddress {
    /// Size order of the block: it has addresses for 4 KiB · 2^`order`.
    pub order: u8,
    /// Number of the block.
    pub number: u32,
}

impl BlockAddress {
    /// The address of a byte of the block.
    #[must_use]
    pub fn at(self, offset: u64) -> u64 {
        let bytes = FRAME_BYTES << self.order;
        debug_assert!(offset < bytes, "{offset} is not in a block of {bytes}");
        (u64::from(self.order) << ZONE_BITS) + u64::from(self.number) * bytes + offset
    }

    /// The block that contains an address, and the offset in it; `None` if no block can contain it.
    #[must_use]
    pub fn containing(address: u64) -> Option<(Self, u64)> {
        let order = u8::try_from(address >> ZONE_BITS).ok()?;
        if usize::from(order) >= BLOCK_ORDERS {
            return None;
        }
        let bytes = FRAME_BYTES << order;
        let within = address & ((1 << ZONE_BITS) - 1);
        let number = u32::try_from(within / bytes).ok()?;
        Some((Self { order, number }, within % bytes))
    }
}

/// A pointer to an object.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pointer {
    /// The node on which the heap lives, 0..4096.
    pub node: u16,
    /// The number of the heap on its node.
    pub heap: u16,
    /// The size class.
    pub class: ClassId,
    /// The virtual address where the object is expected.
    pub address: u64,
    /// The object.
    pub number: ObjectNumber,
}

impl Pointer {
    /// The two words.
    #[must_use]
    pub fn words(self) -> [u64; 2] {
        let first = self.address | u64::from(self.heap) << ADDRESS_BITS;
        let second = self.number.get()
            | u64::from(self.class.0) << NUMBER_BITS
            | u64::from(self.node) << (NUMBER_BITS + CLASS_BITS);
        [first, second]
    }

    /// The pointer with these words; `None` if no object has it.
    #[must_use]
    pub fn from_words(words: [u64; 2]) -> Option<Self> {
        let [first, second] = words;
        let part = |word: u64, from: u32, bits: u32| word >> from & ((1 << bits) - 1);
        Some(Self {
            node: u16::try_from(second >> (NUMBER_BITS + CLASS_BITS)).ok()?,
            heap: u16::try_from(first >> ADDRESS_BITS).ok()?,
            class: ClassId(u8::try_from(part(second, NUMBER_BITS, CLASS_BITS)).ok()?),
            address: part(first, 0, ADDRESS_BITS),
            number: ObjectNumber::new(part(second, 0, NUMBER_BITS))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn words_name_one_pointer(first: u64, second: u64) {
            match Pointer::from_words([first, second]) {
                Some(pointer) => prop_assert_eq!(pointer.words(), [first, second]),
                None => prop_assert_eq!(second & ((1 << NUMBER_BITS) - 1), 0),
            }
        }

        #[test]
        fn an_address_names_one_place(order in 0_u8..16, number: u32, part in 0.0..1.0_f64) {
            let number = number >> order;
            let block = BlockAddress { order, number };
            let bytes = FRAME_BYTES << order;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let offset = (part * bytes as f64) as u64;
            prop_assert_eq!(BlockAddress::containing(block.at(offset)), Some((block, offset)));
        }
    }

    #[test]
    fn addresses_of_no_block_are_refused() {
        assert_eq!(BlockAddress::containing(16 << ZONE_BITS), None, "there are 16 sizes");
        assert_eq!(BlockAddress::containing(u64::MAX), None);
        assert!(BlockAddress::containing((15 << ZONE_BITS) + (1 << 43)).is_some());
    }
}
