//! Golden bytes of `docs/formats/fabric-verbs.md`: the messages and the private data.
//! A changed golden file needs a new version there (the seventh byte of the private data).

use aquifer_fabric::keys::KeyId;
use aquifer_fabric::target::Access;
use aquifer_fabric::work::Key;
use aquifer_tests_support::golden;

use crate::messages::{HEAD_BYTES, InitiatorMessage, OpenedKey, TargetMessage};

const NUMBER: u64 = 0x0102_0304_0506_0708;

#[test]
fn golden_messages() {
    let mut golden = golden!("messages");
    golden.bytes("private data", &crate::sys::connection::MAGIC);
    golden.text("bytes of a head", &HEAD_BYTES.to_string());
    golden.text("bytes of a message, at most", &crate::MESSAGE_SLOT_BYTES.to_string());
    let window = KeyId::at(Key(0x1112_1314), NUMBER);
    let run = KeyId::at(Key::of_run(3, 0x0102_0304), NUMBER);
    let requests = [
        ("ask", InitiatorMessage::Ask(window)),
        ("ask for a key of a table", InitiatorMessage::Ask(run)),
        ("forget", InitiatorMessage::Forget(window)),
        ("forget a key of a table", InitiatorMessage::Forget(run)),
        ("message of an initiator", InitiatorMessage::Message(NUMBER, b"hello")),
        ("taken", InitiatorMessage::Taken(NUMBER)),
    ];
    let mut bytes = Vec::new();
    for (name, request) in requests {
        request.write(&mut bytes);
        assert_eq!(InitiatorMessage::parse(&bytes), Some(request), "{name}");
        golden.bytes(name, &bytes);
    }
    let opened = |read, write, atomic| {
        let access = Access { read, write, atomic };
        Some(OpenedKey { addr: NUMBER, len: 0x2122_2324_2526_2728, access, device_key: 0x3132_3334 })
    };
    let answers = [
        ("answer that opens READ", TargetMessage::Opened(window, opened(true, false, false))),
        ("answer that opens WRITE", TargetMessage::Opened(window, opened(false, true, false))),
        ("answer that opens atomics", TargetMessage::Opened(window, opened(false, false, true))),
        ("answer for a key of a table", TargetMessage::Opened(run, opened(true, true, false))),
        ("answer that opens nothing", TargetMessage::Opened(run, None)),
        ("full", TargetMessage::Full(run)),
        ("delivered", TargetMessage::Delivered(NUMBER, true)),
        ("not delivered", TargetMessage::Delivered(NUMBER, false)),
        ("message of a target", TargetMessage::Message(NUMBER, b"hello")),
    ];
    for (name, answer) in answers {
        answer.write(&mut bytes);
        assert_eq!(TargetMessage::parse(&bytes), Some(answer), "{name}");
        golden.bytes(name, &bytes);
    }
    golden.check();
}
