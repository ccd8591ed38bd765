//! Golden bytes of `docs/formats/ipc.md`: frames, control memory, ring, names of variables.
//! A changed golden file needs a new version there (`frame::VERSION`).

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use aquifer_tests_support::{golden, golden_layout};

use crate::control::{
    BatchRecord, CONTROL_BYTES, CONTROL_MAGIC, Control, PINS_MAX, STATUS_MOVED, STATUS_PENDING,
};
use crate::frame::{FRAME_BYTES_MAX, Frame, KeptKind, OpenRun, Put, SetLimit, Share, Token};
use crate::hello::Hello;
use crate::ring::{
    Answer, DATA_AT, DATA_BYTES, ExtentName, MAGIC, Piece, RING_BYTES, Request, Ring, SLOTS,
    STRETCH_SECTIONS_MAX, Status, Words,
};

const TOKEN: Token = Token([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
const HELLO: Hello = Hello {
    token: TOKEN,
    is_child: true,
    number: 0x0102_0304_0506_0708,
    antechamber: 0x1111_1000,
    staging: 0x2222_2000,
    canary: 0x3333_3000,
    private_start: 0x4444_4000,
    private_end: 0x5555_5000,
    only_start: 0x6666_6000,
    only_end: 0x7777_7000,
};

fn put(kind: KeptKind) -> Frame {
    Frame::Put(Put { kind, id: 0x0102_0304_0506_0708, pid: 0x1112_1314, record: "{}".into() })
}

fn frames() -> Vec<(&'static str, Frame)> {
    vec![
        ("hello", Frame::Hello(HELLO)),
        (
            "hello of a first process",
            Frame::Hello(Hello { is_child: false, only_start: 0, only_end: 0, ..HELLO }),
        ),
        ("welcome", Frame::Welcome),
        ("refused", Frame::Refused("né".into())),
        (
            "open run",
            Frame::OpenRun(OpenRun {
                limit_bytes: 0x0102_0304_0506_0708,
                replicas: 0x1112_1314,
                name: "ls".into(),
            }),
        ),
        ("run opened", Frame::RunOpened(TOKEN)),
        ("close run", Frame::CloseRun),
        ("statistics", Frame::Statistics("{}".into())),
        ("ended", Frame::Ended("why".into())),
        ("status", Frame::Status),
        ("status is", Frame::StatusIs("{}".into())),
        ("put host", put(KeptKind::Host)),
        ("put run", put(KeptKind::Run)),
        ("put program", put(KeptKind::Program)),
        ("put orphan", put(KeptKind::Orphan)),
        ("put session", put(KeptKind::Session)),
        ("put node", put(KeptKind::Node)),
        ("drop", Frame::Drop(KeptKind::Session, 0x0102_0304_0506_0708)),
        ("news", Frame::News("so".into())),
        ("take of the agent", Frame::Take(Share::Agent)),
        ("take of node 0", Frame::Take(Share::Node(0))),
        ("take of node 65535", Frame::Take(Share::Node(u16::MAX))),
        ("taken", Frame::Taken),
        ("set limit", Frame::SetLimit(SetLimit { pid: 0x1112_1314, limit_bytes: 0x0102_0304_0506_0708 })),
        ("want device", Frame::WantDevice(TOKEN)),
        ("device", Frame::Device),
        ("borrow", Frame::Borrow),
        ("lent", Frame::Lent("{}".into())),
        ("swap opened", Frame::SwapOpened("name".into())),
        ("open session", Frame::OpenSession),
        ("session opened", Frame::SessionOpened),
        ("watch", Frame::Watch { pid: 0x1112_1314, name: "node-1".into() }),
    ]
}

#[test]
fn golden_frames() {
    let mut golden = golden!("frames");
    for (name, frame) in frames() {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        assert_eq!(Frame::parse(&bytes), Ok(frame.clone()), "{name}");
        if matches!(frame, Frame::Hello(_) | Frame::WantDevice(_)) {
            let mut fixed = [0; 256];
            let length = frame.write_fixed(&mut fixed);
            assert_eq!(fixed[..length], bytes, "{name}");
        }
        golden.bytes(name, &bytes);
    }
    golden.text("longest frame", &FRAME_BYTES_MAX.to_string());
    golden.text("token", &TOKEN.to_hex());
    assert_eq!(Token::from_hex(TOKEN.to_hex().as_bytes()), Some(TOKEN));
    golden.check();
}

#[test]
fn golden_control_memory() {
    let mut golden = golden!("control");
    golden_layout!(
        golden,
        "control memory",
        Control {
            magic,
            version,
            command,
            done,
            worker,
            reserved,
            buffer,
            reserved_too,
            batches,
            pin_count,
            pins_overflowed,
            pins
        }
    );
    golden_layout!(golden, "buffer", BatchRecord { count, reserved, addresses, statuses });
    golden.text("bytes", &CONTROL_BYTES.to_string());
    golden.text("buffers", &crate::BUFFERS.to_string());
    golden.text("pages of a buffer", &crate::TAKE_PAGES_MAX.to_string());
    golden.text("pins", &PINS_MAX.to_string());
    golden.text("magic", &format!("{CONTROL_MAGIC:#x}"));
    golden.text("version", &crate::VERSION.to_string());
    golden.text("status of a page that was moved", &STATUS_MOVED.to_string());
    golden.text("status of a page that is to be moved", &STATUS_PENDING.to_string());
    golden.check();
}

/// A ring's words without its data area.
struct Heap(Vec<AtomicU64>);

impl Words for Heap {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: half of a word that lives as long as `self`; only atomics touch it.
        unsafe { AtomicU32::from_ptr(self.0[offset / 8].as_ptr().cast::<u32>().add(offset % 8 / 4)) }
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        &self.0[offset / 8]
    }
}

fn requests() -> Vec<(&'static str, Request)> {
    let name = ExtentName { node: 0x0102, class: 9, key: 0x1112_1314, addr: 0x2122_2324_2526_2728 };
    let piece = Piece { offset: 0x3132_3334, len: 0x4142, data: 0x5152 };
    vec![
        ("allocate", Request::Allocate(7)),
        ("allocate a stretch", Request::AllocateStretch(0x0102)),
        ("free", Request::Free(name)),
        ("read", Request::Read(name, piece)),
        ("write", Request::Write(name, piece)),
    ]
}

#[test]
fn golden_ring() {
    let mut golden = golden!("ring");
    let ring = Ring::initialise(Heap((0..DATA_AT / 8).map(|_| AtomicU64::new(0)).collect()));
    for (number, (name, request)) in (0..).zip(requests()) {
        ring.put_request(number, &request);
        assert_eq!(ring.request(number), Some(request), "{name}");
    }
    let extent = ExtentName { node: 0x0102, class: 9, key: 0x1112_1314, addr: 0x2122_2324_2526_2728 };
    let statuses = [
        Status::Done,
        Status::Full,
        Status::Quota,
        Status::Refused,
        Status::NodeGone,
        Status::TooMany,
        Status::BadRequest,
        Status::Failed,
    ];
    for (number, status) in (0..).zip(statuses) {
        let answer = if number == 0 { Answer { status, extent } } else { Answer::of(status) };
        ring.put_answer(number, &answer);
        assert_eq!(ring.answer(number), Ok(answer));
    }
    // The last slot, too: its place says how many there are.
    ring.put_request(SLOTS - 1, &Request::Allocate(1));
    ring.put_answer(SLOTS - 1, &Answer::of(Status::Failed));
    ring.publish_requests(0x6162_6364);
    ring.publish_answers(0x7172_7374);
    assert!(ring.program_may_sleep(0x7172_7374) && ring.agent_may_sleep(0x6162_6364));

    let bytes: Vec<u8> = ring.words().0.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
    golden.memory(&bytes);
    golden.text("slots", &SLOTS.to_string());
    golden.text("magic", &format!("{MAGIC:#x}"));
    golden.text("data", &format!("{DATA_BYTES} bytes at {DATA_AT}"));
    golden.text("bytes", &RING_BYTES.to_string());
    golden.text("sections of a stretch, at most", &STRETCH_SECTIONS_MAX.to_string());
    golden.check();
}

#[test]
fn golden_names_in_a_program() {
    let mut golden = golden!("environment");
    golden.text("where the agent listens", crate::SOCKET_VARIABLE);
    golden.text("the run's token", crate::RUN_VARIABLE);
    golden.text("how much of the allocator's memory may be resident", crate::LOCAL_VARIABLE);
    golden.text("copies of the allocator's pages", crate::REPLICAS_VARIABLE);
    golden.text("the symbol of the shim", crate::SHIM_SYMBOL.to_str().expect("the name is UTF-8"));
    golden.text("exit code of a program that could not be paged", &crate::EXIT_FAILED.to_string());
    golden.check();
}
