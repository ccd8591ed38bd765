//! Hostile bytes: from peers without the key, and from a host of the cluster after the handshake.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use aquifer_fabric::handshake::PENDING_LIMIT;
use aquifer_fabric::handshake::hello::{Hello, encode_hello, parse_reply};
use aquifer_fabric::handshake::secure::initiate;
use aquifer_fabric::tcp::TcpOptions;
use aquifer_fabric::tcp::wire::{self, RequestHead};
use aquifer_fabric::{RemoteAddr, Target, Verb};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use zerocopy::IntoBytes;

use super::{KEY, WHO, client, node};

/// A connection of a host with the key that sends `bytes` after the welcome.
fn hostile_host(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut secured = initiate(stream, &KEY).unwrap();
    secured.send(&encode_hello(&Hello { who: WHO, encrypt: false, resume: None })).unwrap();
    parse_reply(&secured.receive().unwrap()).unwrap();
    let (mut stream, _) = secured.into_parts();
    // The target may hang up before it has read all bytes.
    let _ = stream.write_all(bytes);
    stream
}

/// Whether the target hangs up instead of waiting for more.
fn is_closed_by_target(mut stream: TcpStream) -> bool {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn request(kind: u8, len: u32) -> Vec<u8> {
    RequestHead::new(kind, len).as_bytes().to_vec()
}

#[test]
fn a_protocol_violation_closes_only_its_own_connection() {
    let (target, _, region) = node(TcpOptions::default());
    let mut good = client(target.address());
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let over = TcpOptions::default().limits.transfer_bytes_max + 1;
    let nonsense = [
        request(0, 0),
        request(200, 8),
        request(wire::READ, over),
        request(wire::WRITE, u32::MAX),
        request(wire::SEND, 4097),
        request(wire::CREDIT, 1),
        request(wire::CREDIT, u32::MAX),
        vec![0xff; 100_000],
    ];
    for (round, bytes) in nonsense.iter().enumerate() {
        assert!(is_closed_by_target(hostile_host(target.address(), bytes)), "round {round} was accepted");
        assert_eq!(good.one(Verb::FetchAdd { remote, add: 1 }), Ok(round as u64));
    }
}

#[test]
fn random_requests_are_parsed_without_a_panic() {
    let (target, _, region) = node(TcpOptions::default());
    let good = std::cell::RefCell::new(client(target.address()));
    let remote = RemoteAddr { addr: region.base, key: region.key };
    let request = (
        0_u8..9,
        0_u32..5000,
        any::<u64>(),
        any::<u64>(),
        any::<u32>(),
        prop::collection::vec(any::<u8>(), 0..64),
    );
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    let result = runner.run(&prop::collection::vec(request, 1..20), |requests| {
        let mut bytes = Vec::new();
        for (kind, len, addr, value, key, payload) in requests {
            let key = if key % 3 == 0 { region.key.0 } else { key };
            let addr = if addr % 3 == 0 { region.base + addr % 8192 } else { addr };
            let head = RequestHead {
                addr: addr.into(),
                value: value.into(),
                key: key.into(),
                ..RequestHead::new(kind, len)
            };
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&payload);
        }
        drop(hostile_host(target.address(), &bytes));
        let mut good = good.borrow_mut();
        let local = good.slice(0, 8);
        let outcome = good.one(Verb::Read { local, remote });
        prop_assert_eq!(outcome, Ok(8));
        Ok(())
    });
    result.unwrap();
}

/// A peer that sends nothing or half a message must not delay others.
#[test]
fn silent_and_half_open_connections_delay_no_other() {
    let (target, _, region) = node(TcpOptions::default());
    let mut silent: Vec<TcpStream> =
        (0..3 * PENDING_LIMIT).map(|_| TcpStream::connect(target.address()).unwrap()).collect();
    for (at, stream) in silent.iter_mut().enumerate() {
        let half = &b"AQFTCP\x02\0\x30\0abc"[..at % 13];
        // The oldest ones may have been ended already.
        let _ = stream.write_all(half);
    }
    let mut good = client(target.address());
    let remote = RemoteAddr { addr: region.base, key: region.key };
    assert_eq!(good.one(Verb::FetchAdd { remote, add: 1 }), Ok(0));
    drop(silent);
}

/// A recorded handshake that is replayed fails: its messages need the fresh keys.
#[test]
fn a_replayed_handshake_fails() {
    let (target, _, _) = node(TcpOptions::default());
    let recorded = record(target.address());
    let before = target.endpoints();
    let mut stream = TcpStream::connect(target.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&recorded).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() < 200, "the target answered with {} bytes", answer.len());
    assert_eq!(target.endpoints(), before);
}

/// Records all bytes that an initiator sends up to its welcome.
fn record(address: SocketAddr) -> Vec<u8> {
    struct Recorder(TcpStream, Vec<u8>);
    impl Read for Recorder {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(buffer)
        }
    }
    impl Write for Recorder {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1.extend_from_slice(bytes);
            self.0.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut secured = initiate(Recorder(TcpStream::connect(address).unwrap(), Vec::new()), &KEY).unwrap();
    secured.send(&encode_hello(&Hello { who: WHO, encrypt: false, resume: None })).unwrap();
    parse_reply(&secured.receive().unwrap()).unwrap();
    secured.into_parts().0.1
}
