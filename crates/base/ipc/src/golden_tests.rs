//! Golden bytes of `docs/formats/ipc.md`: frames, control memory, ring, names of variables.
//! A changed golden file needs a new version there (`frame::VERSION`).

use aquifer_tests_support::{golden, golden_layout};

use crate::control::{
    BatchRecord, CONTROL_BYTES, CONTROL_MAGIC, CONTROL_VERSION, PINS_MAX, STATUS_MOVED, STATUS_PENDING,
    WorkerControl,
};
use crate::frame::{FRAME_BYTES_MAX, Frame, HeldItem, HeldKind, HoldSpans, KeeperShare, RunToken, SetLimit};
use crate::hello::{
    CANARY_BYTES, CONNECT_BACK_REQUESTS_MAX, ProgramHello, connect_back_page, socket_address,
};
use crate::open_run::OpenRun;
use crate::ring::tests::HeapWords;
use crate::ring::{
    DATA_AT, DATA_BYTES, ExtentName, MAGIC, RING_BYTES, RingAnswer, RingRequest, RingStatus, SLOTS,
    STRETCH_SECTIONS_MAX, SessionRing, TransferRange,
};

const TOKEN: RunToken = RunToken([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
const HELLO: ProgramHello = ProgramHello {
    token: TOKEN,
    is_child: true,
    child_number: 0x0102_0304_0506_0708,
    bounce_buffer: 0x1111_1000,
    staging: 0x2222_2000,
    canary: 0x3333_3000,
    private_start: 0x4444_4000,
    private_end: 0x5555_5000,
    paged_start: 0x6666_6000,
    paged_end: 0x7777_7000,
};

fn hold(kind: HeldKind) -> Frame {
    Frame::Hold(HeldItem {
        kind,
        id: 0x0102_0304_0506_0708,
        pid: 0x1112_1314,
        uid: 0x2122_2324,
        record: "{}".into(),
    })
}

fn frames() -> Vec<(&'static str, Frame)> {
    vec![
        ("hello", Frame::Hello(HELLO)),
        (
            "hello of a first process",
            Frame::Hello(ProgramHello { is_child: false, paged_start: 0, paged_end: 0, ..HELLO }),
        ),
        ("welcome", Frame::Welcome),
        ("refused", Frame::Refused("né".into())),
        (
            "open run",
            Frame::OpenRun(OpenRun {
                limit_bytes: 0x0102_0304_0506_0708,
                limit_max_bytes: None,
                replicas: 0x1112_1314,
                backup: None,
                outlives_owner: true,
                is_strict: false,
                wait_for_room_ms: None,
                name: "ls".into(),
            }),
        ),
        (
            "open run that says how long it waits for room",
            Frame::OpenRun(OpenRun {
                limit_bytes: 0x0102_0304_0506_0708,
                limit_max_bytes: None,
                replicas: 0x1112_1314,
                backup: None,
                outlives_owner: false,
                is_strict: true,
                wait_for_room_ms: Some(0x2122_2324_2526_2728),
                name: "ls".into(),
            }),
        ),
        (
            "open run that may have idle memory",
            Frame::OpenRun(OpenRun {
                limit_bytes: 0x0102_0304_0506_0708,
                limit_max_bytes: Some(0x3132_3334_3536_3738),
                replicas: 0x1112_1314,
                backup: None,
                outlives_owner: false,
                is_strict: true,
                wait_for_room_ms: None,
                name: "ls".into(),
            }),
        ),
        ("run opened", Frame::RunOpened(TOKEN)),
        ("close run", Frame::CloseRun),
        ("statistics", Frame::Statistics("{}".into())),
        ("ended", Frame::Ended("why".into())),
        ("status", Frame::StatusRequest),
        ("status is", Frame::StatusReport("{}".into())),
        ("put host", hold(HeldKind::Host)),
        ("put run", hold(HeldKind::Run)),
        ("put program", hold(HeldKind::Program)),
        ("put orphan", hold(HeldKind::Orphan)),
        ("put session", hold(HeldKind::Session)),
        ("put node", hold(HeldKind::Node)),
        ("put heap", hold(HeldKind::Heap)),
        ("put segment", hold(HeldKind::Segment)),
        ("put partition", hold(HeldKind::Partition)),
        ("drop", Frame::Release(HeldKind::Session, 0x0102_0304_0506_0708)),
        ("news", Frame::Notice("so".into())),
        ("take of the agent", Frame::Claim(KeeperShare::Agent)),
        ("take of node 0", Frame::Claim(KeeperShare::Node(0))),
        ("take of node 65535", Frame::Claim(KeeperShare::Node(u16::MAX))),
        ("take of heaps 0", Frame::Claim(KeeperShare::Heaps(0))),
        ("take of heaps 65535", Frame::Claim(KeeperShare::Heaps(u16::MAX))),
        ("take of cache 513", Frame::Claim(KeeperShare::Cache(513))),
        ("taken", Frame::Sync),
        (
            "set limit",
            Frame::SetLimit(SetLimit {
                pid: 0x1112_1314,
                limit_bytes: 0x0102_0304_0506_0708,
                limit_max_bytes: None,
            }),
        ),
        (
            "set limit with idle memory",
            Frame::SetLimit(SetLimit {
                pid: 0x1112_1314,
                limit_bytes: 0x0102_0304_0506_0708,
                limit_max_bytes: Some(0x3132_3334_3536_3738),
            }),
        ),
        ("want device", Frame::DeviceRequest(TOKEN)),
        ("device", Frame::Device),
        ("borrow", Frame::ClusterAccessRequest),
        ("lent", Frame::ClusterAccess("{}".into())),
        ("heap access request", Frame::HeapAccessRequest(0x0102)),
        ("heap access", Frame::HeapAccess("[]".into())),
        ("open heap", Frame::OpenHeap(0x1112_1314)),
        ("heap opened", Frame::HeapOpened),
        ("hold spans", Frame::HoldSpans(HoldSpans { spans: 0x1112_1314, kept_ms: 0x2122_2324_2526_2728 })),
        ("spans held", Frame::SpansHeld(0x1112_1314)),
        ("segment call", Frame::SegmentCall("[]".into())),
        ("segment answer", Frame::SegmentAnswer("{}".into())),
        ("swap opened", Frame::SwapOpened("name".into())),
        ("open session", Frame::OpenSession),
        ("session opened", Frame::SessionOpened),
        ("watch", Frame::WatchDaemon { pid: 0x1112_1314, name: "node-1".into() }),
        (
            "hold refused",
            Frame::HoldRefused { kind: HeldKind::Program, id: 0x0102_0304_0506_0708, reason: "né".into() },
        ),
    ]
}

#[test]
fn golden_frames() {
    let mut golden = golden!("frames");
    for (name, frame) in frames() {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        assert_eq!(Frame::parse(&bytes), Ok(frame.clone()), "{name}");
        if matches!(frame, Frame::Hello(_) | Frame::DeviceRequest(_)) {
            let mut fixed = [0; 256];
            let length = frame.write_fixed(&mut fixed);
            assert_eq!(fixed[..length], bytes, "{name}");
        }
        golden.bytes(name, &bytes);
    }
    golden.text("longest frame", &FRAME_BYTES_MAX.to_string());
    golden.text("token", &TOKEN.to_hex());
    assert_eq!(RunToken::from_hex(TOKEN.to_hex().as_bytes()), Some(TOKEN));
    golden.check();
}

#[test]
fn golden_control_memory() {
    let mut golden = golden!("control");
    golden_layout!(
        golden,
        "control memory",
        WorkerControl {
            magic,
            version,
            command,
            done,
            worker,
            core,
            buffer,
            process_ended,
            has_fork_advice,
            pins_locked,
            batches,
            pin_count,
            pins_overflowed,
            pins
        }
    );
    golden_layout!(golden, "buffer", BatchRecord { count, reserved, addresses, statuses });
    golden.text("bytes", &CONTROL_BYTES.to_string());
    golden.text("buffers", &crate::STAGING_BUFFERS.to_string());
    golden.text("pages of a buffer", &crate::BATCH_PAGES_MAX.to_string());
    golden.text("pins", &PINS_MAX.to_string());
    golden.text("magic", &format!("{CONTROL_MAGIC:#x}"));
    golden.text("version", &CONTROL_VERSION.to_string());
    let [first, second] = [connect_back_page(0), connect_back_page(1)];
    golden.text("knocks", &format!("{CONNECT_BACK_REQUESTS_MAX} {first} {second} {CANARY_BYTES}"));
    let socket = socket_address([0, 1, 0x2a, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);
    golden.text("socket", std::str::from_utf8(&socket).unwrap());
    golden.text("status of a page that was moved", &STATUS_MOVED.to_string());
    golden.text("status of a page that is to be moved", &STATUS_PENDING.to_string());
    golden.check();
}

fn requests() -> Vec<(&'static str, RingRequest)> {
    let name = ExtentName { node: 0x0102, class: 9, key: 0x1112_1314, addr: 0x2122_2324_2526_2728 };
    let range = TransferRange { offset: 0x3132_3334, len: 0x4142, data: 0x5152 };
    vec![
        ("allocate", RingRequest::Allocate(7)),
        ("allocate a stretch", RingRequest::AllocateStretch(0x0102)),
        ("free", RingRequest::Free(name)),
        ("read", RingRequest::Read(name, range)),
        ("write", RingRequest::Write(name, range)),
    ]
}

#[test]
fn golden_ring() {
    let mut golden = golden!("ring");
    let ring = SessionRing::initialise(HeapWords::new());
    for (number, (name, request)) in (0..).zip(requests()) {
        ring.put_request(number, &request);
        assert_eq!(ring.request(number), Some(request), "{name}");
    }
    let extent = ExtentName { node: 0x0102, class: 9, key: 0x1112_1314, addr: 0x2122_2324_2526_2728 };
    let statuses = [
        RingStatus::Done,
        RingStatus::Full,
        RingStatus::Quota,
        RingStatus::Refused,
        RingStatus::NodeGone,
        RingStatus::TooMany,
        RingStatus::BadRequest,
        RingStatus::Failed,
        RingStatus::KeyNotTried,
    ];
    for (number, status) in (0..).zip(statuses) {
        let answer =
            if number == 0 { RingAnswer { status, extent } } else { RingAnswer::without_extent(status) };
        ring.put_answer(number, &answer);
        assert_eq!(ring.answer(number), Ok(answer));
    }
    // The offset of the last slot fixes the number of slots.
    ring.put_request(SLOTS - 1, &RingRequest::Allocate(1));
    ring.put_answer(SLOTS - 1, &RingAnswer::without_extent(RingStatus::Failed));
    ring.publish_requests(0x6162_6364);
    ring.publish_answers(0x7172_7374);
    assert!(ring.begin_program_sleep(0x7172_7374) && ring.begin_agent_sleep(0x6162_6364));

    golden.memory(&ring.words().to_bytes());
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
    golden.text("resident memory of the allocator while its host is idle", crate::LOCAL_MAX_VARIABLE);
    golden.text("copies of the allocator's pages", crate::REPLICAS_VARIABLE);
    golden.text("the symbol of the shim", crate::SHIM_SYMBOL.to_str().expect("the name is UTF-8"));
    golden.text("exit code of a program that could not be paged", &crate::EXIT_FAILED.to_string());
    golden.check();
}
