use proptest::prelude::*;

use super::*;

fn samples() -> Vec<Frame> {
    let hello = ProgramHello {
        token: RunToken([7; 16]),
        is_child: true,
        child_number: 5,
        bounce_buffer: 0x1000,
        staging: 0x2000,
        canary: 0x3000,
        private_start: 0x4000,
        private_end: 0x9000,
        paged_start: 0,
        paged_end: 0,
    };
    vec![
        Frame::Hello(hello),
        Frame::Hello(ProgramHello { paged_start: 0x10_0000, paged_end: 0x20_0000, ..hello }),
        Frame::Welcome,
        Frame::Refused("no".into()),
        Frame::OpenRun(OpenRun {
            limit_bytes: 1 << 30,
            limit_max_bytes: None,
            replicas: 2,
            backup: None,
            outlives_owner: true,
            is_strict: false,
            wait_for_room_ms: None,
            name: "sort".into(),
        }),
        Frame::OpenRun(OpenRun {
            limit_bytes: 1 << 30,
            limit_max_bytes: None,
            replicas: 1,
            backup: None,
            outlives_owner: false,
            is_strict: true,
            wait_for_room_ms: Some(60_000),
            name: "sort".into(),
        }),
        Frame::OpenRun(OpenRun {
            limit_bytes: 1 << 30,
            limit_max_bytes: Some(3 << 30),
            replicas: 1,
            backup: None,
            outlives_owner: false,
            is_strict: true,
            wait_for_room_ms: None,
            name: "sort".into(),
        }),
        Frame::RunOpened(RunToken([9; 16])),
        Frame::CloseRun,
        Frame::Statistics("{}".into()),
        Frame::Ended("the pool is full".into()),
        Frame::StatusRequest,
        Frame::StatusReport("{}".into()),
        Frame::Hold(HeldItem { kind: HeldKind::Program, id: 3, pid: 77, uid: 88, record: "{}".into() }),
        Frame::Release(HeldKind::Run, 3),
        Frame::Notice("a page is lost".into()),
        Frame::Claim(KeeperShare::Agent),
        Frame::Claim(KeeperShare::Node(u16::MAX)),
        Frame::Claim(KeeperShare::Heaps(0)),
        Frame::Claim(KeeperShare::Heaps(u16::MAX)),
        Frame::Claim(KeeperShare::Cache(0)),
        Frame::Claim(KeeperShare::Cache(u16::MAX)),
        Frame::Release(HeldKind::Partition, u64::MAX),
        Frame::Release(HeldKind::Heap, 9 << 16),
        Frame::Release(HeldKind::Segment, 10),
        Frame::HeapAccessRequest(7),
        Frame::OpenHeap(1000),
        Frame::HeapOpened,
        Frame::HoldSpans(HoldSpans { spans: 9, kept_ms: 30_000 }),
        Frame::SpansHeld(9),
        Frame::HeapAccess("[]".into()),
        Frame::SegmentCall("[]".into()),
        Frame::SegmentAnswer("{}".into()),
        Frame::Release(HeldKind::Node, 9),
        Frame::Sync,
        Frame::SetLimit(SetLimit { pid: 77, limit_bytes: 4096, limit_max_bytes: None }),
        Frame::SetLimit(SetLimit { pid: 77, limit_bytes: 4096, limit_max_bytes: Some(8192) }),
        Frame::DeviceRequest(RunToken([9; 16])),
        Frame::Device,
        Frame::ClusterAccessRequest,
        Frame::ClusterAccess("{}".into()),
        Frame::SwapOpened("aquifer-setup-1-2-3".into()),
        Frame::OpenSession,
        Frame::SessionOpened,
        Frame::WatchDaemon { pid: 77, name: "node-1".into() },
        Frame::HoldRefused { kind: HeldKind::Program, id: 9, reason: "full".into() },
    ]
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    bytes
}

#[test]
fn whole_frames_parse_and_truncated_frames_do_not() {
    for frame in samples() {
        let mut bytes = bytes_of(&frame);
        assert_eq!(Frame::parse(&bytes), Ok(frame.clone()));
        if let Frame::Hello(_) | Frame::DeviceRequest(_) = frame {
            let mut fixed = [0; 128];
            let length = frame.write_fixed(&mut fixed);
            assert_eq!(fixed[..length], bytes);
        }
        for end in 0..bytes.len() {
            assert_eq!(Frame::parse(&bytes[..end]), Err(FrameError::Truncated));
        }
        bytes.push(0);
        assert_eq!(Frame::parse(&bytes), Err(FrameError::TooLong));
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = bytes_of(&Frame::StatusRequest);
    bytes[4] = 77;
    let error = Frame::parse(&bytes).unwrap_err();
    assert_eq!(error, FrameError::OtherVersion(77));
    assert!(error.to_string().contains("version 77"));
}

#[test]
fn long_texts_are_truncated_to_fit_a_frame() {
    let frame = Frame::Statistics("é".repeat(FRAME_BYTES_MAX));
    assert!(Frame::parse(&bytes_of(&frame)).is_ok());
}

#[test]
fn tokens_are_hexadecimal() {
    let token = RunToken([0xa5; 16]);
    assert_eq!(RunToken::from_hex(token.to_hex().as_bytes()), Some(token));
    assert_eq!(RunToken::from_hex(b"a5"), None);
    assert_eq!(RunToken::from_hex(&[b'x'; 32]), None);
    assert!(!format!("{token:?}").contains("a5a5a5"), "a log must not contain a token");
}

/// The parser's result for each file of the corpus.
///
/// The version in which its form came up is in bytes 4 and 5 of each file but `version-1`.
const CORPUS: [(&str, Result<(), FrameError>); 24] = [
    ("hello", Ok(())),
    ("hello-range", Ok(())),
    ("open-run", Ok(())),
    ("hold", Ok(())),
    ("refused", Ok(())),
    ("status", Ok(())),
    ("claim", Ok(())),
    ("watch", Ok(())),
    ("welcome", Ok(())),
    ("release-cut", Err(FrameError::Truncated)),
    ("empty", Err(FrameError::Truncated)),
    ("run-opened-cut", Err(FrameError::Truncated)),
    ("refused-length-overflow", Err(FrameError::Truncated)),
    ("hello-child-2", Err(FrameError::BadField("is_child"))),
    ("hello-kernel-address", Err(FrameError::BadField("bounce_buffer"))),
    ("hello-range-backwards", Err(FrameError::BadField("paged_end"))),
    ("hello-unaligned", Err(FrameError::BadField("bounce_buffer"))),
    ("hold-kind-10", Err(FrameError::BadField("kind"))),
    ("refused-not-utf8", Err(FrameError::BadField("text"))),
    ("kind-0", Err(FrameError::UnknownKind(0))),
    ("kind-65535", Err(FrameError::UnknownKind(65535))),
    ("magic", Err(FrameError::BadMagic)),
    ("watch-cut", Err(FrameError::Truncated)),
    ("version-1", Err(FrameError::OtherVersion(1))),
];

#[test]
fn the_corpus_is_parsed_as_expected() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/frame");
    for (name, expected) in &CORPUS {
        let bytes = std::fs::read(format!("{folder}/{name}")).unwrap();
        assert_eq!(Frame::parse(&bytes).map(drop), *expected, "{name}");
        check(&bytes);
    }
    assert_eq!(
        std::fs::read_dir(folder).unwrap().count(),
        CORPUS.len(),
        "a file of the corpus is not in the list"
    );
}

/// A frame that parses must be written as the same bytes.
fn check(bytes: &[u8]) {
    if let Ok(frame) = Frame::parse(bytes) {
        assert_eq!(bytes_of(&frame), bytes);
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check(&bytes);
    }

    #[test]
    fn damaged_frames_never_panic(
        which in 0..samples().len(),
        at in 0usize..120,
        value in any::<u8>(),
        cut in 0usize..120,
    ) {
        let mut bytes = bytes_of(&samples()[which]);
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
        check(&bytes);
        bytes.truncate(cut);
        check(&bytes);
    }
}
