//! The bytes of `docs/formats/objects.md`.

use crate::class::{ClassId, Classes};
use crate::header::{Header, Lock, ObjectNumber};
use crate::pointer::{BlockAddress, Pointer};

#[test]
fn golden_pointer() {
    let pointer = Pointer {
        node: 0xabc,
        heap: 0x1234,
        class: ClassId(0x56),
        address: BlockAddress { order: 3, number: 7 }.at(0x18),
        number: ObjectNumber::new(0xfed_cba9_8765).unwrap(),
    };
    assert_eq!(pointer.words(), [0x1234_3000_0003_8018, 0xabc5_6fed_cba9_8765]);
}

#[test]
fn golden_header() {
    let number = ObjectNumber::new(0xfed_cba9_8765).unwrap();
    let open = Header::new(number, Lock::Open);
    assert_eq!(open.word(), 0x0000_0fed_cba9_8765);
    assert_eq!(open.with_lock(Lock::Writing).word(), 0x0000_1fed_cba9_8765);
    assert_eq!(open.with_lock(Lock::Moving).word(), 0x0000_2fed_cba9_8765);
    assert_eq!(open.next_version().next_version().word(), 0x0000_8fed_cba9_8765);
    assert_eq!(Header::FREE.word(), 0);
}

/// Pointers contain the number of a class, so the classes never change.
#[test]
fn golden_classes() {
    let classes = Classes::standard();
    let of = |bytes: u32| classes.class_for(bytes).map(|id| (id.0, classes.get(id).unwrap()));
    let shape = |bytes: u32| of(bytes).map(|(id, class)| (id, class.slot_bytes, class.order));
    let sizes = [1, 8, 9, 24, 64, 100, 256, 1000, 1024, 4096, 16_384, 32_760];
    let shapes: Vec<_> = sizes.iter().filter_map(|bytes| shape(*bytes)).collect();
    assert_eq!(shapes, GOLDEN);
    assert_eq!(classes.iter().count(), GOLDEN_COUNT);
}

const GOLDEN_COUNT: usize = 66;
const GOLDEN: [(u8, u32, u8); 12] = [
    (0, 16, 0),
    (0, 16, 0),
    (1, 24, 0),
    (2, 32, 0),
    (7, 72, 1),
    (12, 112, 0),
    (21, 264, 2),
    (34, 1096, 6),
    (34, 1096, 6),
    (46, 4224, 6),
    (59, 18_072, 8),
    (65, 32_768, 8),
];
