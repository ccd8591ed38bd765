//! Golden tests of the formats in `docs/formats/objects.md`.

use crate::bytes::HeapBytes;
use crate::class::{ClassId, Classes};
use crate::header::{Header, Lock, ObjectNumber};
use crate::ledger::Ledger;
use crate::pointer::{BlockAddress, Pointer};
use crate::slot::Words;
use crate::wire::{Answer, BlockRegion, Refused, Request};

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
    let sizes = [1, 8, 9, 24, 64, 100, 256, 1000, 1024, 4096, 16_384, 32_760, 32_761, 1 << 20, 64 << 20];
    let shapes: Vec<_> = sizes.iter().filter_map(|bytes| shape(*bytes)).collect();
    assert_eq!(shapes, GOLDEN);
    assert_eq!(classes.iter().count(), GOLDEN_COUNT);
}

const GOLDEN_COUNT: usize = 135;
const GOLDEN: [(u8, u32, u8); 15] = [
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
    (66, 36_864, 4),
    (98, 1_052_672, 9),
    (134, 67_112_960, 15),
];

#[test]
fn golden_records() {
    use crate::heap::Mover;
    use crate::layout::{FRAME_WORDS, Layout, NAMES, RECORDS};
    use crate::space::FrameRun;

    let layout = Layout::new(1024);
    let names: Vec<u64> = (0..4).map(|order| layout.names_before(order)).collect();
    assert_eq!(names, [0, 16_384, 24_576, 28_672]);
    let mut ledger = Ledger::create(HeapBytes::create(1024).unwrap(), layout);
    let (class, shape) = (ClassId(7), Classes::standard().get(ClassId(7)).unwrap());
    let [one, other, third] = [8, 16, 32].map(|first| FrameRun { first, count: shape.frames() });
    let address = BlockAddress { order: shape.order, number: 5 };
    ledger.add(one, class, address);
    ledger.reserve_number(1);
    ledger.begin_merge(one, &[other, third]);
    ledger.map_address(address, [Some(other), Some(third)]);
    ledger.set_home((other, 3), Some(9));
    let number = ObjectNumber::new(77).unwrap();
    assert!(ledger.write_object(0, number, 2, &[3, 4]).is_err(), "there is no such object");
    ledger.set_root(number, 0x1000, class);
    let mut records = |at: u64| ledger.words.load(RECORDS + at);
    assert_eq!([0, 1, 2, 3, 5].map(&mut records), [0x0200_5041_4548_5141, 1024, 65_537, 10, 6]);
    assert_eq!([24, 25, 26, 27].map(&mut records), [1, 8, 16, 33]);
    assert_eq!([20, 21, 22].map(&mut records), [77, 0x1000, 7]);
    assert_eq!([28, 29, 30, 31, 32, 33].map(&mut records), [0, 77, 2, 2, 3, 4]);
    let (blocks, seconds) = (4608, 4608 + 1024);
    assert_eq!(records(blocks + 8), 0x8000_0007_0000_0005);
    assert_eq!(records(seconds + 16_384 + 5), 0x0000_0007_0000_0021);
    let homes = seconds + layout.name_words();
    assert_eq!(records(homes + (16 * 256 + 3) / 2), 10 << 32);
    assert_eq!(ledger.words.load(NAMES + 16_384 + 5), 17);
    assert_eq!(layout.record_words(), homes + 1024 * 128);
    assert_eq!(FRAME_WORDS, 512);
}

#[test]
fn golden_messages() {
    let pointer =
        Pointer { node: 1, heap: 2, class: ClassId(3), address: 0x40, number: ObjectNumber::new(5).unwrap() };
    let of_pointer = "40000000000002000500000000301000";
    let none = "0".repeat(32);
    let requests = [
        (Request::Open, format!("0103000000000000{none}")),
        (Request::OpenRaw, format!("1003000000000000{none}")),
        (Request::Allocate { bytes: 100 }, format!("0203000064000000{none}")),
        (Request::Free(pointer), format!("0303000000000000{of_pointer}")),
        (Request::Read(pointer), format!("0403000000000000{of_pointer}")),
        (Request::Write(pointer, b"ab"), format!("0503000002000000{of_pointer}6162")),
        (Request::Create { bytes: 100, first: b"ab" }, format!("0b03000064000000{none}6162")),
        (Request::WriteAt { pointer, offset: 8, bytes: b"ab" }, format!("0c03000008000000{of_pointer}6162")),
        (
            Request::WriteIf { pointer, expected: 0x0102, bytes: b"ab" },
            format!("0d03000002000000{of_pointer}02010000000000006162"),
        ),
        (
            Request::Replace { pointer, staged: pointer, bytes: 9 },
            format!("0e03000009000000{of_pointer}{of_pointer}"),
        ),
        (Request::Root { bytes: 100 }, format!("0f03000064000000{none}")),
        (Request::Correct(pointer), format!("0603000000000000{of_pointer}")),
        (Request::Release(pointer), format!("0703000000000000{of_pointer}")),
        (Request::Report { from: 0x0102 }, format!("0803000002010000{none}")),
        (Request::Compact { tenant: 0x0102 }, format!("0903000002010000{none}")),
        (
            Request::SetLimit { tenant: 0x0102, bytes: 0x0304 },
            format!("0a030000020100000403{}", "0".repeat(28)),
        ),
    ];
    for (request, golden) in requests {
        let mut message = Vec::new();
        request.encode(&mut message);
        assert_eq!(hex(&message), golden, "{request:?}");
    }
    let region = BlockRegion { base: 0x10, key: 0x20, heap: 0x30, node: 0x40 };
    let of_region = "10000000000000002000000030004000";
    let answers = [
        (Answer::Opened(vec![region]), format!("8103000001000000{none}{of_region}")),
        (
            Answer::OpenedRaw { frames: 0x0102, data: region, names: BlockRegion { base: 0x50, ..region } },
            format!("8703000002010000{none}{of_region}50000000000000002000000030004000"),
        ),
        (Answer::Pointer(pointer, true), format!("8203010000000000{of_pointer}")),
        (Answer::Bytes(pointer, false, b"ab"), format!("8303000002000000{of_pointer}6162")),
        (Answer::Refused(Refused::NoObject), format!("8403000001000000{none}")),
        (Answer::Refused(Refused::Full), format!("8403000002000000{none}")),
        (Answer::Refused(Refused::TooLarge), format!("8403000003000000{none}")),
        (Answer::Refused(Refused::Busy), format!("8403000004000000{none}")),
        (Answer::Refused(Refused::Invalid), format!("8403000005000000{none}")),
        (Answer::Refused(Refused::Changed), format!("8403000006000000{none}")),
        (Answer::Refused(Refused::Closed), format!("8403000007000000{none}")),
    ];
    for (answer, golden) in answers {
        let mut message = Vec::new();
        answer.encode(&mut message);
        assert_eq!(hex(&message), golden, "{answer:?}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
