//! Golden bytes of `docs/formats/fabric-verbs.md`: the messages and the private data.
//! A changed golden file needs a new version there (the seventh byte of the private data).

use aquifer_fabric::keys::KeyId;
use aquifer_fabric::target::Access;
use aquifer_fabric::work::Key;
use aquifer_tests_support::golden;

use crate::messages::{Answer, HEAD_BYTES, OpenedKey, Request};

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
        ("ask", Request::Ask(window)),
        ("ask for a key of a table", Request::Ask(run)),
        ("forget", Request::Forget(window)),
        ("forget a key of a table", Request::Forget(run)),
        ("message of an initiator", Request::Message(NUMBER, b"hello")),
        ("taken", Request::Taken(NUMBER)),
    ];
    let mut bytes = Vec::new();
    for (name, request) in requests {
        request.write(&mut bytes);
        assert_eq!(Request::parse(&bytes), Some(request), "{name}");
        golden.bytes(name, &bytes);
    }
    let opened = |read, write, atomic| {
        let access = Access { read, write, atomic };
        Some(OpenedKey { addr: NUMBER, len: 0x2122_2324_2526_2728, access, device_key: 0x3132_3334 })
    };
    let answers = [
        ("answer that opens READ", Answer::Opened(window, opened(true, false, false))),
        ("answer that opens WRITE", Answer::Opened(window, opened(false, true, false))),
        ("answer that opens atomics", Answer::Opened(window, opened(false, false, true))),
        ("answer for a key of a table", Answer::Opened(run, opened(true, true, false))),
        ("answer that opens nothing", Answer::Opened(run, None)),
        ("full", Answer::Full(run)),
        ("delivered", Answer::Delivered(NUMBER, true)),
        ("not delivered", Answer::Delivered(NUMBER, false)),
        ("message of a target", Answer::Message(NUMBER, b"hello")),
    ];
    for (name, answer) in answers {
        answer.write(&mut bytes);
        assert_eq!(Answer::parse(&bytes), Some(answer), "{name}");
        golden.bytes(name, &bytes);
    }
    golden.check();
}
