use proptest::prelude::*;

use super::*;

fn samples() -> Vec<Frame> {
    let hello = Hello {
        token: Token([7; 16]),
        is_child: true,
        number: 5,
        antechamber: 0x1000,
        staging: 0x2000,
        canary: 0x3000,
        private_start: 0x4000,
        private_end: 0x9000,
        only_start: 0,
        only_end: 0,
    };
    vec![
        Frame::Hello(hello),
        Frame::Hello(Hello { only_start: 0x10_0000, only_end: 0x20_0000, ..hello }),
        Frame::Welcome,
        Frame::Refused("no".into()),
        Frame::OpenRun(OpenRun { limit_bytes: 1 << 30, replicas: 2, name: "sort".into() }),
        Frame::RunOpened(Token([9; 16])),
        Frame::CloseRun,
        Frame::Statistics("{}".into()),
        Frame::Ended("the pool is full".into()),
        Frame::Status,
        Frame::StatusIs("{}".into()),
        Frame::Put(Put { kind: KeptKind::Program, id: 3, pid: 77, record: "{}".into() }),
        Frame::Drop(KeptKind::Run, 3),
        Frame::News("a page is lost".into()),
        Frame::Take(Share::Agent),
        Frame::Take(Share::Node(u16::MAX)),
        Frame::Drop(KeptKind::Node, 9),
        Frame::Taken,
        Frame::SetLimit(SetLimit { pid: 77, limit_bytes: 4096 }),
        Frame::WantDevice(Token([9; 16])),
        Frame::Device,
        Frame::Borrow,
        Frame::Lent("{}".into()),
        Frame::SwapOpened("aquifer-setup-1-2-3".into()),
        Frame::OpenSession,
        Frame::SessionOpened,
        Frame::Watch { pid: 77, name: "node-1".into() },
    ]
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    bytes
}

#[test]
fn every_frame_survives_the_wire_and_no_cut_one_does() {
    for frame in samples() {
        let mut bytes = bytes_of(&frame);
        assert_eq!(Frame::parse(&bytes), Ok(frame.clone()));
        if let Frame::Hello(_) | Frame::WantDevice(_) = frame {
            let mut fixed = [0; 128];
            let length = frame.write_fixed(&mut fixed);
            assert_eq!(fixed[..length], bytes);
        }
        for end in 0..bytes.len() {
            assert_eq!(Frame::parse(&bytes[..end]), Err(FrameError::Cut));
        }
        bytes.push(0);
        assert_eq!(Frame::parse(&bytes), Err(FrameError::TooLong));
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = bytes_of(&Frame::Status);
    bytes[4] = 77;
    let error = Frame::parse(&bytes).unwrap_err();
    assert_eq!(error, FrameError::Version(77));
    assert!(error.to_string().contains("version 77"));
}

#[test]
fn long_texts_are_cut_to_fit_a_frame() {
    let frame = Frame::Statistics("é".repeat(FRAME_BYTES_MAX));
    assert!(Frame::parse(&bytes_of(&frame)).is_ok());
}

#[test]
fn tokens_are_hexadecimal() {
    let token = Token([0xa5; 16]);
    assert_eq!(Token::from_hex(token.to_hex().as_bytes()), Some(token));
    assert_eq!(Token::from_hex(b"a5"), None);
    assert_eq!(Token::from_hex(&[b'x'; 32]), None);
    assert!(!format!("{token:?}").contains("a5a5a5"), "a log must not give a token away");
}

/// What the parser says to each file of the corpus. A new [`VERSION`] goes into bytes 4 and 5 of all but the last.
const CORPUS: [(&str, Result<(), FrameError>); 24] = [
    ("hello", Ok(())),
    ("hello-only", Ok(())),
    ("open", Ok(())),
    ("put", Ok(())),
    ("refused", Ok(())),
    ("status", Ok(())),
    ("take", Ok(())),
    ("watch", Ok(())),
    ("welcome", Ok(())),
    ("drop-cut", Err(FrameError::Cut)),
    ("empty", Err(FrameError::Cut)),
    ("opened-cut", Err(FrameError::Cut)),
    ("refused-length-overflow", Err(FrameError::Cut)),
    ("hello-child-2", Err(FrameError::BadField("is_child"))),
    ("hello-kernel-address", Err(FrameError::BadField("antechamber"))),
    ("hello-only-backwards", Err(FrameError::BadField("only_end"))),
    ("hello-unaligned", Err(FrameError::BadField("antechamber"))),
    ("put-kind-9", Err(FrameError::BadField("kind"))),
    ("refused-not-utf8", Err(FrameError::BadField("text"))),
    ("kind-0", Err(FrameError::UnknownKind(0))),
    ("kind-65535", Err(FrameError::UnknownKind(65535))),
    ("magic", Err(FrameError::NotAFrame)),
    ("watch-cut", Err(FrameError::Cut)),
    ("version-1", Err(FrameError::Version(1))),
];

#[test]
fn the_corpus_is_parsed_as_expected() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/frame");
    for (name, expected) in &CORPUS {
        let bytes = std::fs::read(format!("{folder}/{name}")).unwrap();
        assert_eq!(Frame::parse(&bytes).map(drop), *expected, "{name}");
        check(&bytes);
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), CORPUS.len(), "a file is not in the list");
}

/// What parses must mean exactly its own bytes.
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
    fn damaged_frames_never_panic(which in 0..samples().len(), at in 0usize..120, value in any::<u8>(), cut in 0usize..120) {
        let mut bytes = bytes_of(&samples()[which]);
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
        check(&bytes);
        bytes.truncate(cut);
        check(&bytes);
    }
}
