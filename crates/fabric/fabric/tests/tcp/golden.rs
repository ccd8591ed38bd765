//! Golden bytes of `docs/formats/fabric-tcp.md`: requests and answers of an open connection.
//! A changed golden file needs a new version there (`VERSION` of `crates/base/secure-channel`).

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use aquifer_fabric::handshake::hello::{self, Hello, Reply, Welcome};
use aquifer_fabric::handshake::secure;
use aquifer_fabric::tcp::wire::{ANSWER_BYTES, AnswerHead, REQUEST_BYTES, padded};
use aquifer_fabric::{Limits, tcp};
use aquifer_tests_support::{golden, golden_layout};
use zerocopy::{FromBytes, IntoBytes};

use super::*;

/// The address of the only region.
const BASE: u64 = 0x0001_0203_0400_0000;

fn region() -> Region {
    Region { base: BASE, len: 1 << 20, key: Key(0x1112_1314) }
}

fn work(local: LocalKey) -> [(&'static str, Verb); 5] {
    let remote = |offset| RemoteAddr { addr: BASE + offset, key: region().key };
    let slice = |len| LocalSlice { key: local, offset: 64, len };
    [
        ("WRITE", Verb::Write { local: slice(5), remote: remote(0x2120) }),
        ("READ", Verb::Read { local: slice(13), remote: remote(0x2120) }),
        ("CAS", Verb::CompareSwap { remote: remote(0x3130), expected: 0, desired: 0x5152_5354_5556_5758 }),
        ("FAA", Verb::FetchAdd { remote: remote(0x3130), add: 0x0102_0304_0506_0708 }),
        ("SEND", Verb::Send { local: slice(3) }),
    ]
}

/// Bytes that follow a request's head.
fn tail(name: &str) -> u32 {
    match name {
        "WRITE" => 5,
        "CAS" => 8,
        "SEND" => 3,
        _ => 0,
    }
}

fn exactly(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).expect("the bytes were sent");
    bytes
}

/// Records the requests of an endpoint, whose target is simulated here, then sends the same bytes
/// to a real target and records its answers.
#[test]
fn golden_requests_and_answers() {
    let mut golden = golden!("tcp");
    let listener = TcpListener::bind("127.0.0.1:0").expect("there are ports");
    let address = listener.local_addr().expect("the listener is bound");
    let endpoint = std::thread::spawn(move || {
        let options =
            ConnectOptions { encrypt: false, operation_time: TEST_TIMEOUT, ..ConnectOptions::default() };
        let mut endpoint = tcp::connect(address, &KEY, WHO, options).expect("the target is played");
        let memory = Arc::new(Memory::create("local", 4096).unwrap());
        memory.write(64, b"hello");
        let local = endpoint.register_local(Arc::clone(&memory)).unwrap();
        let mut client = TcpClient { endpoint, memory, local };
        let outcomes = work(local).map(|(_, verb)| client.one(verb));
        let mut message = Vec::new();
        while !client.endpoint.receive(&mut message) {
            client.endpoint.wait(Duration::from_millis(50));
        }
        let mut read = [0; 13];
        client.memory.read(64, &mut read);
        (outcomes, message, read)
    });
    let (stream, _) = listener.accept().expect("the endpoint connects");
    let mut secured = secure::respond(stream, &KEY).expect("the peer has the key");
    let parsed =
        hello::parse_hello(&secured.receive().expect("a message arrives")).expect("the message is a hello");
    assert_eq!(parsed, Hello { who: WHO, encrypt: false, resume: None });
    let welcome = Welcome {
        session: [9; 16],
        done: 0,
        encrypt: false,
        limits: Limits::default(),
        regions: vec![region()],
    };
    secured.send(&hello::encode_reply(&Reply::Welcome(welcome))).expect("the endpoint waits");
    let (mut stream, _) = secured.into_parts();
    let answers: [(&[u8], AnswerHead); 5] = [
        (b"", AnswerHead::new(1, Ok(0), 0)),
        (b"0123456789abc\0\0\0", AnswerHead::new(1, Ok(13), 13)),
        (b"", AnswerHead::new(1, Ok(0), 0)),
        (b"", AnswerHead::new(1, Ok(0x5152_5354_5556_5758), 0)),
        (b"", AnswerHead::new(1, Err(WorkError::ReceiverNotReady), 0)),
    ];
    let mut requests = Vec::new();
    for ((name, _), (bytes, answer)) in work(LocalKey(0)).into_iter().zip(answers) {
        let request = exactly(&mut stream, REQUEST_BYTES + padded(tail(name)));
        golden.bytes(name, &request);
        requests.push((name, request));
        stream
            .write_all(answer.as_bytes())
            .and_then(|()| stream.write_all(bytes))
            .expect("the endpoint waits");
    }
    let message = AnswerHead::new(2, Ok(0), 6);
    golden.bytes("message", &[message.as_bytes(), b"hello!\0\0"].concat());
    stream
        .write_all(message.as_bytes())
        .and_then(|()| stream.write_all(b"hello!\0\0"))
        .expect("the endpoint waits");
    golden.bytes("CREDIT", &exactly(&mut stream, REQUEST_BYTES));
    golden.bytes("BYE", &exactly(&mut stream, REQUEST_BYTES));
    let (outcomes, message, read) = endpoint.join().expect("the endpoint's thread does not panic");
    assert_eq!(outcomes[2..], [Ok(0), Ok(0x5152_5354_5556_5758), Err(WorkError::ReceiverNotReady)]);
    assert!(outcomes[0].is_ok() && outcomes[1].is_ok());
    assert_eq!((&message[..], &read), (&b"hello!"[..], b"0123456789abc"));

    send_to_a_target(&mut golden, &requests);
    golden_layout!(
        golden,
        "head of a request",
        RequestHead { kind, reserved, len, addr, value, key, reserved2 }
    );
    golden_layout!(golden, "head of an answer", AnswerHead { kind, status, reserved, len, value });
    let errors = [
        ("no access", WorkError::RemoteAccess),
        ("misaligned", WorkError::Misaligned),
        ("too long", WorkError::TooLong),
        ("no room for the message", WorkError::ReceiverNotReady),
        ("fenced", WorkError::Fenced),
        ("storage", WorkError::Storage),
    ];
    for (name, error) in errors {
        let answer = AnswerHead::new(1, Err(error), 0);
        assert_eq!(answer.outcome(), Some(Err(error)));
        golden.bytes(name, answer.as_bytes());
    }
    golden.check();
}

use aquifer_fabric::tcp::wire::RequestHead;

/// Sends the requests to a target whose region has another address and key. Records the answers, a
/// message of the target and its farewell.
fn send_to_a_target(golden: &mut aquifer_tests_support::Golden, requests: &[(&str, Vec<u8>)]) {
    let (target, _, region) = node(TcpOptions::default());
    let stream = TcpStream::connect(target.address()).expect("the target listens");
    let mut secured = secure::initiate(stream, &KEY).expect("the peer has the key");
    let hello = Hello { who: WHO, encrypt: false, resume: None };
    secured.send(&hello::encode_hello(&hello)).expect("the target listens");
    let reply =
        hello::parse_reply(&secured.receive().expect("the target answers")).expect("the message is a reply");
    assert!(matches!(reply, Reply::Welcome(_)), "{reply:?}");
    let (mut stream, _) = secured.into_parts();
    for (name, request) in requests {
        let mut request = request.clone();
        let (head, _) = RequestHead::mut_from_prefix(&mut request).expect("the request has a head");
        if *name != "SEND" {
            head.addr = (head.addr.get() - BASE + region.base).into();
            head.key = region.key.0.into();
        }
        stream.write_all(&request).expect("the target listens");
        let bytes = if *name == "READ" { padded(13) } else { 0 };
        golden.bytes(&format!("answer to {name}"), &exactly(&mut stream, ANSWER_BYTES + bytes));
    }
    let mut wrong = RequestHead::new(1, 8);
    wrong.addr = region.base.into();
    stream.write_all(wrong.as_bytes()).expect("the target listens");
    golden.bytes("answer to a READ with key 0", &exactly(&mut stream, ANSWER_BYTES));
    assert_eq!(target.send(WHO.host, b"from the target"), 1);
    golden.bytes("message of a target", &exactly(&mut stream, ANSWER_BYTES + padded(15)));
    drop(target);
    golden.bytes("farewell", &exactly(&mut stream, ANSWER_BYTES));
    let _ = stream.shutdown(Shutdown::Both);
}
