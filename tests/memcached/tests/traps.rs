//! Requests that have made a server hang, grow or end: long lines, slow clients, clients that do
//! not read.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use aquifer_tests_memcached::{Batch, Connection, End, Request, Script, Server, assert_equal};

use crate::{Servers, start_aquifer};

const MIB: u64 = 1 << 20;
/// Receive buffer in bytes of a client that reads slowly: the server cannot write all its replies.
const SMALL_BUFFER: usize = 4096;
/// Connections that are used while one is slow, so that each thread has several.
const OTHERS: usize = 4;

fn script(batches: &[&[u8]]) -> Script {
    let batches = batches.iter().map(|bytes| Batch::new(vec![Request::literal(*bytes)])).collect();
    Script { batches, keys: Vec::new() }
}

fn value(length: usize) -> Vec<u8> {
    (0..=u8::MAX).cycle().take(length).collect()
}

fn set(server: &Server, key: &str, value: &[u8]) {
    let line = format!("set {key} 0 0 {}\r\n", value.len());
    let reply = server.connect().request([line.as_bytes(), value, b"\r\n"].concat());
    assert_eq!(reply, b"STORED\r\n");
}

/// Reads the reply to a get of one key.
fn receive_value(connection: &mut Connection, key: &str, value: &[u8]) {
    let line = connection.receive_until(b"\r\n");
    assert_eq!(line, format!("VALUE {key} 0 {}\r\n", value.len()).into_bytes());
    let data = connection.receive_exactly(value.len() + b"\r\nEND\r\n".len());
    assert!(data == [value, b"\r\nEND\r\n"].concat(), "the value has changed");
}

/// Asserts that other connections are served, in `rounds` rounds.
fn assert_others_are_served(server: &Server, rounds: usize) {
    let mut others: Vec<Connection> = (0..OTHERS).map(|_| server.connect()).collect();
    for round in 0..rounds {
        for other in &mut others {
            let request = format!("set other 0 0 4\r\n{round:04}\r\nget other\r\n");
            let expected = format!("STORED\r\nVALUE other 0 4\r\n{round:04}\r\nEND\r\n");
            assert_eq!(other.request(request), expected.into_bytes());
        }
    }
}

fn assert_growth(server: &Server, resident_before: u64, most: u64) {
    let grown = server.resident_bytes().saturating_sub(resident_before);
    assert!(grown <= most, "the server has grown by {} MiB", grown / MIB);
}

/// Requests after `quit` are not read. If the server closed the socket at once, the kernel would
/// drop replies that the client has not received.
#[test]
fn replies_before_a_quit_arrive_although_requests_follow_it() {
    let server = start_aquifer(&[]);
    let value = value(300_000);
    set(&server, "large", &value);
    for _ in 0..20 {
        let mut client = server.connect_with_receive_buffer(SMALL_BUFFER);
        client.send(&[&b"get large\r\nquit\r\n"[..], &b"get large\r\n".repeat(8000)].concat());
        receive_value(&mut client, "large", &value);
        assert_eq!(client.receive(1), b"", "the server closes the connection");
    }
}

#[test]
fn a_long_line_without_an_end_closes_the_connection() {
    let Some(servers) = Servers::start(&[]) else { return };
    let starts: [&[u8]; 5] = [b" ", b"x", b"gat 0 x ", b"mg x ", b"set x "];
    for start in starts {
        let line = start.repeat(65_535usize.div_ceil(start.len()));
        assert_equal(servers.pair(), "a long line", script(&[&line, b"version\r\n"]));
    }
    let spaces_and_get = [b" ".repeat(101), b"get ".to_vec(), b"x ".repeat(30_000)].concat();
    assert_equal(servers.pair(), "over 100 spaces and get", script(&[&spaces_and_get]));
}

#[test]
fn long_lines_of_get_are_served() {
    let Some(servers) = Servers::start(&[]) else { return };
    for start in ["get ", "gets ", "   get "] {
        let line = [start.as_bytes(), &b"missing ".repeat(40_000), b"\r\n"].concat();
        assert_equal(servers.pair(), "a long get", script(&[&line, b"version\r\n"]));
    }
    let key = [b"get ".to_vec(), b"x".repeat(200_000), b"\r\n".to_vec()].concat();
    assert_equal(servers.pair(), "a long key", script(&[&key, b"version\r\n"]));
}

#[test]
fn a_line_of_spaces_is_an_error() {
    let Some(servers) = Servers::start(&[]) else { return };
    for count in [1, 2, 100, 101, 2000] {
        let line = [b" ".repeat(count), b"\r\n".to_vec()].concat();
        assert_equal(servers.pair(), "spaces", script(&[&line, &line.repeat(50)]));
    }
}

#[test]
fn a_million_opaques_that_are_too_long_use_no_memory() {
    const LINES: usize = 100_000;
    const ROUNDS: usize = 10;
    let server = start_aquifer(&[]);
    set(&server, "k", b"value");
    for command in ["mg k v T1000", "mg missing v"] {
        let line = format!("{command} O{}\r\n", "x".repeat(32));
        let reply = b"CLIENT_ERROR opaque token too long\r\n";
        let mut connection = server.connect();
        assert!(connection.request(line.repeat(LINES)) == reply.repeat(LINES), "other replies");
        let before = server.resident_bytes();
        for _ in 0..ROUNDS / 2 {
            assert!(connection.request(line.repeat(LINES)) == reply.repeat(LINES), "other replies");
        }
        assert_growth(&server, before, 16 * MIB);
    }
}

#[test]
fn values_without_their_line_end_are_bad_chunks() {
    let Some(servers) = Servers::start(&[]) else { return };
    for length in [0, 1, 100, 5000, 16_384, 70_000, 524_288, 600_000, 1_000_000] {
        for end in ["x\n", "\nX", "xx", "\r\r", "\n\r"] {
            for line in
                [format!("set k 0 0 {length}"), format!("ms k {length}"), format!("append k 0 0 {length}")]
            {
                let bad = [line.as_bytes(), b"\r\n", &value(length), end.as_bytes(), b"version\r\n"].concat();
                let batches: [&[u8]; 3] = [b"set k 0 0 3\r\nold\r\n", &bad, b"get k\r\n"];
                assert_equal(servers.pair(), &format!("{line}, end {end:?}"), script(&batches));
            }
        }
    }
}

#[test]
fn one_of_two_clients_with_the_same_cas_value_wins() {
    const ROUNDS: usize = 300;
    let Some(servers) = Servers::start(&[]) else { return };
    for server in servers.both() {
        set(server, "k", b"0");
        let (barrier, winners) = (Barrier::new(2), AtomicUsize::new(0));
        let run = |name: u8| {
            let mut connection = server.connect();
            for _ in 0..ROUNDS {
                let reply = String::from_utf8(connection.request("gets k\r\n")).expect("the bytes are text");
                let cas = reply.lines().next().and_then(|line| line.rsplit(' ').next()).expect("a cas value");
                let request = format!("cas k 0 0 1 {cas}\r\n{name}\r\n");
                barrier.wait();
                match connection.request(request).as_slice() {
                    b"STORED\r\n" => _ = winners.fetch_add(1, Ordering::Relaxed),
                    b"EXISTS\r\n" => {}
                    other => panic!("{}", other.escape_ascii()),
                }
                barrier.wait();
            }
        };
        let run = &run;
        thread::scope(|scope| {
            for name in [1, 2] {
                scope.spawn(move || run(name));
            }
        });
        assert_eq!(winners.into_inner(), ROUNDS, "{:?}", server.options());
    }
}

#[test]
fn a_reader_that_stalls_in_a_value_does_not_stop_others() {
    const GETS: usize = 16;
    let Some(servers) = Servers::start(&[]) else { return };
    for server in servers.both() {
        let value = value(1_000_000);
        set(server, "k", &value);
        let mut slow = server.connect_with_receive_buffer(SMALL_BUFFER);
        slow.send(&b"get k\r\n".repeat(GETS));
        let line = slow.receive_until(b"\r\n");
        assert_eq!(line, b"VALUE k 0 1000000\r\n");
        let (first, second) = value.split_at(value.len() / 2);
        assert!(slow.receive_exactly(first.len()) == first, "the value has changed");
        // The value is replaced while it is being sent.
        assert_others_are_served(server, 50);
        set(server, "k", b"another");
        let end = [second, b"\r\nEND\r\n"].concat();
        assert!(slow.receive_exactly(end.len()) == end, "the value has changed");
        let rest = slow.request("mn\r\n");
        assert!(rest.ends_with(b"END\r\nMN\r\n"), "the rest has no end");
        assert!(server.is_alive());
    }
}

#[test]
fn replies_that_are_not_read_use_no_memory() {
    const GETS: usize = 1000;
    let server = start_aquifer(&[]);
    let value = value(100_000);
    set(&server, "k", &value);
    assert_others_are_served(&server, 20);
    let before = server.resident_bytes();
    let mut slow = server.connect_with_receive_buffer(SMALL_BUFFER);
    slow.send(&b"get k\r\n".repeat(GETS));
    slow.wait_for_bytes();
    assert_others_are_served(&server, 50);
    assert_growth(&server, before, 32 * MIB);
    for _ in 0..GETS {
        receive_value(&mut slow, "k", &value);
    }
    assert_growth(&server, before, 32 * MIB);
}

#[test]
fn a_client_that_ends_without_reading_leaves_no_memory() {
    const CLIENTS: usize = 20;
    let server = start_aquifer(&[]);
    let value = value(1_000_000);
    set(&server, "k", &value);
    assert_others_are_served(&server, 20);
    let before = server.resident_bytes();
    for _ in 0..CLIENTS {
        let slow = &mut server.connect_with_receive_buffer(SMALL_BUFFER);
        slow.send(&b"get k\r\n".repeat(50));
        slow.wait_for_bytes();
    }
    assert_others_are_served(&server, 20);
    assert_growth(&server, before, 32 * MIB);
}

#[test]
fn a_value_that_arrives_slowly_does_not_stop_others() {
    const PART: usize = 1000;
    let Some(servers) = Servers::start(&[]) else { return };
    for server in servers.both() {
        let value = value(1_000_000);
        let mut slow = server.connect();
        slow.send(format!("set slow 0 0 {}\r\n", value.len()).as_bytes());
        let mut other = server.connect();
        for (number, part) in value.chunks(PART).enumerate() {
            slow.send(part);
            let expected = format!("VALUE other 0 4\r\n{number:04}\r\nEND\r\n").into_bytes();
            other.request(format!("set other 0 0 4\r\n{number:04}\r\n"));
            assert_eq!(other.request("get other\r\n"), expected);
            // The received part of the value is not visible.
            assert_eq!(other.request("get slow\r\n"), b"END\r\n");
        }
        assert_eq!(slow.request("\r\n"), b"STORED\r\n");
        other.send(b"get slow\r\n");
        receive_value(&mut other, "slow", &value);
    }
}

#[test]
fn values_that_never_arrive_leave_no_memory() {
    const CLIENTS: usize = 100;
    let server = start_aquifer(&[]);
    assert_others_are_served(&server, 20);
    let before = server.resident_bytes();
    for _ in 0..CLIENTS {
        let answer = server.connect().exchange(&[b"set k 0 0 1000000\r\nxyz"], End::HalfClose);
        assert!(answer.is_closed && answer.bytes.is_empty());
    }
    assert_others_are_served(&server, 20);
    assert_growth(&server, before, 32 * MIB);
    assert_eq!(server.connect().request("get k\r\n"), b"END\r\n");
}
