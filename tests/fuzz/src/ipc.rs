//! Frames between processes of one machine, and the ring of a session.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use aquifer_ipc::ring::{
    DATA_AT, DATA_BYTES, ExtentName, RingAnswer, RingRequest, RingStatus, RingWords, SLOTS, SessionRing,
    TransferRange,
};
use aquifer_ipc::{
    FRAME_BYTES_MAX, Frame, HeldItem, HeldKind, KeeperShare, Mutation, OpenRun, ProgramHello, RunToken,
    SetLimit,
};
use aquifer_mutation::Mutations;

use crate::Target;

pub(crate) const FRAME: Target = Target {
    name: "ipc-frame",
    run: parse_frame,
    seeds: || frames().into_iter().map(|(name, frame)| (name, frame_bytes(&frame))).collect(),
    with_mutation: |work| Mutation::AcceptAnyFlag.while_active(work),
};

pub(crate) const RING: Target = Target {
    name: "session-ring",
    run: serve_ring,
    seeds: rings,
    with_mutation: |work| Mutation::IgnoreDataEnd.while_active(work),
};

fn frame_bytes(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    bytes
}

fn parse_frame(bytes: &[u8]) -> bool {
    let Ok(frame) = Frame::parse(bytes) else { return false };
    assert!(bytes.len() <= FRAME_BYTES_MAX);
    // A text that nearly fills a frame is truncated when it is written.
    if bytes.len() < FRAME_BYTES_MAX / 2 {
        assert_eq!(frame_bytes(&frame), bytes, "{frame:?}");
    }
    if let Frame::Hello(hello) = &frame {
        assert!(hello.private_start < hello.private_end && hello.paged_start <= hello.paged_end);
        let mut fixed = [0; 128];
        let length = frame.write_fixed(&mut fixed);
        assert_eq!(fixed[..length], *bytes);
    }
    true
}

fn frames() -> Vec<(&'static str, Frame)> {
    let hello = ProgramHello {
        token: RunToken([7; 16]),
        is_child: false,
        child_number: 5,
        bounce_buffer: 0x1000,
        staging: 0x2000,
        canary: 0x3000,
        private_start: 0x4000,
        private_end: 0x9000,
        paged_start: 0,
        paged_end: 0,
    };
    let open = OpenRun {
        limit_bytes: 1 << 30,
        limit_max_bytes: None,
        replicas: 2,
        backup: None,
        outlives_owner: true,
        is_strict: false,
        wait_for_room_ms: None,
        name: "sort".to_owned(),
    };
    let item = HeldItem { kind: HeldKind::Program, id: 3, pid: 77, uid: 88, record: "{}".to_owned() };
    vec![
        ("hello", Frame::Hello(hello)),
        (
            "hello-range",
            Frame::Hello(ProgramHello {
                is_child: true,
                paged_start: 0x10_0000,
                paged_end: 0x20_0000,
                ..hello
            }),
        ),
        ("refused", Frame::Refused("no".to_owned())),
        ("open-run-elastic", Frame::OpenRun(OpenRun { limit_max_bytes: Some(u64::MAX), ..open.clone() })),
        ("open-run", Frame::OpenRun(open)),
        ("run-opened", Frame::RunOpened(RunToken([9; 16]))),
        ("close-run", Frame::CloseRun),
        ("hold", Frame::Hold(item)),
        ("release", Frame::Release(HeldKind::Session, 3)),
        ("claim-agent", Frame::Claim(KeeperShare::Agent)),
        ("claim-node", Frame::Claim(KeeperShare::Node(7))),
        ("set-limit", Frame::SetLimit(SetLimit { pid: 77, limit_bytes: 4096, limit_max_bytes: None })),
        (
            "set-limit-elastic",
            Frame::SetLimit(SetLimit { pid: 77, limit_bytes: 4096, limit_max_bytes: Some(8192) }),
        ),
        ("watch-daemon", Frame::WatchDaemon { pid: 77, name: "node-1".to_owned() }),
        (
            "hold-refused",
            Frame::HoldRefused { kind: HeldKind::Run, id: 3, reason: "the keeper is full".to_owned() },
        ),
    ]
}

/// Offset of the first 8-byte word of a ring; only words of 4 bytes lie below.
const WORDS_AT: usize = 256;
const REQUEST_BYTES: usize = 32;
const ANSWER_BYTES: usize = 16;
/// Offset of the answers.
const ANSWERS_AT: usize = WORDS_AT + SLOTS as usize * REQUEST_BYTES;

/// The words of a ring on the heap, without the data area.
#[derive(Debug)]
struct HeapWords {
    counters: Vec<AtomicU32>,
    slots: Vec<AtomicU64>,
}

impl HeapWords {
    fn new() -> Self {
        Self {
            counters: (0..WORDS_AT / 4).map(|_| AtomicU32::new(0)).collect(),
            slots: (0..(DATA_AT - WORDS_AT) / 8).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The words of a slot.
    fn slot(&self, at: usize, number: u32, bytes: usize) -> Vec<u64> {
        let first = at + (number % SLOTS) as usize * bytes;
        (first..first + bytes).step_by(8).map(|at| self.word_u64(at).load(Relaxed)).collect()
    }
}

impl RingWords for &HeapWords {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        &self.counters[offset / 4]
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        &self.slots[(offset - WORDS_AT) / 8]
    }
}

/// Reads a ring that the other side has written, as the agent and as the program.
///
/// The input has the number of answered requests and of published requests, as u32 each, and then
/// the first requests. Each of these is followed by its answer.
fn serve_ring(bytes: &[u8]) -> bool {
    let Some((counters, slots)) = bytes.split_at_checked(8) else { return false };
    let counter = |at: usize| u32::from_le_bytes(counters[at..at + 4].try_into().expect("4 bytes"));
    let (answered, published) = (counter(0), counter(4));
    let words = HeapWords::new();
    let ring = SessionRing::initialise(&words);
    for (slot, number) in slots.chunks_exact(REQUEST_BYTES + ANSWER_BYTES).zip(0..SLOTS) {
        let index = (answered.wrapping_add(number) % SLOTS) as usize;
        let places = (WORDS_AT + index * REQUEST_BYTES..)
            .step_by(8)
            .take(REQUEST_BYTES / 8)
            .chain((ANSWERS_AT + index * ANSWER_BYTES..).step_by(8));
        for (word, at) in slot.chunks_exact(8).zip(places) {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            (&words).word_u64(at).store(word, Relaxed);
        }
    }
    ring.publish_answers(answered);
    ring.publish_requests(published);
    let Ok(requested) = ring.requested(ring.answered()) else { return false };
    let waiting = requested.wrapping_sub(answered);
    assert!(waiting <= SLOTS, "{waiting} requests wait");
    let mut is_valid = true;
    for number in (0..waiting).map(|at| answered.wrapping_add(at)) {
        is_valid &= check_request(&ring, &words, number) & check_answer(&ring, &words, number);
    }
    is_valid
}

/// Returns whether the request is valid.
fn check_request(ring: &SessionRing<&HeapWords>, words: &HeapWords, number: u32) -> bool {
    let Some(request) = ring.request(number) else { return false };
    if let RingRequest::Read(_, range) | RingRequest::Write(_, range) = request {
        let end = u64::from(range.data) + u64::from(range.len);
        assert!(range.len > 0 && end <= u64::from(DATA_BYTES), "{range:?} is outside of the data area");
    }
    let before = words.slot(WORDS_AT, number, REQUEST_BYTES);
    ring.put_request(number, &request);
    assert_eq!(words.slot(WORDS_AT, number, REQUEST_BYTES), before, "{request:?}");
    true
}

/// Returns whether the answer is valid.
fn check_answer(ring: &SessionRing<&HeapWords>, words: &HeapWords, number: u32) -> bool {
    let Ok(answer) = ring.answer(number) else { return false };
    let before = words.slot(ANSWERS_AT, number, ANSWER_BYTES);
    ring.put_answer(number, &answer);
    assert_eq!(words.slot(ANSWERS_AT, number, ANSWER_BYTES), before, "{answer:?}");
    true
}

fn rings() -> Vec<(&'static str, Vec<u8>)> {
    let extent = ExtentName { node: 3, class: 4, key: 0x8765_4321, addr: 1 << 30 };
    let range = TransferRange { offset: 64, len: 4096, data: 8192 };
    let with = |answered: u32, requests: &[RingRequest]| {
        let published = answered.wrapping_add(u32::try_from(requests.len()).expect("few"));
        let mut bytes = [answered.to_le_bytes(), published.to_le_bytes()].concat();
        for (request, number) in requests.iter().zip(0..) {
            let words = HeapWords::new();
            let ring = SessionRing::initialise(&words);
            ring.put_request(number, request);
            ring.put_answer(number, &RingAnswer { status: RingStatus::Done, extent });
            let slots =
                [words.slot(WORDS_AT, number, REQUEST_BYTES), words.slot(ANSWERS_AT, number, ANSWER_BYTES)];
            bytes.extend(slots.concat().into_iter().flat_map(u64::to_le_bytes));
        }
        bytes
    };
    let allocate = [RingRequest::Allocate(3), RingRequest::AllocateStretch(7), RingRequest::Free(extent)];
    let transfer = [RingRequest::Read(extent, range), RingRequest::Write(extent, range)];
    vec![("empty", with(9, &[])), ("allocate", with(255, &allocate)), ("transfer", with(u32::MAX, &transfer))]
}
