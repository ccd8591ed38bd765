//! Items for which others must be evicted or overwritten.

use std::thread;

use aquifer_tests_memcached::{Options, Program, Server};

use crate::start_aquifer;

const SHORT_ITEMS: u32 = 600_000;
const WRITERS: usize = 20;
const LONG_ITEMS: u32 = 20;
const LONG_BYTES: usize = 500_000;

#[test]
fn long_items_find_room_among_short_ones() {
    let server = start_aquifer(&[]);
    let mut connection = server.connect();
    for batch in (0..SHORT_ITEMS).step_by(1000) {
        let mut requests = String::new();
        for number in batch..batch + 1000 {
            requests += &format!("set short-{number} 0 0 200 noreply\r\n{}\r\n", "s".repeat(200));
        }
        connection.send(requests.as_bytes());
        assert_eq!(connection.request("mn\r\n"), b"MN\r\n");
    }
    let value = vec![b'l'; LONG_BYTES];
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (server, value) = (&server, &value);
            scope.spawn(move || {
                let mut connection = server.connect();
                for number in 0..LONG_ITEMS {
                    let key = format!("long-{writer}-{number}");
                    let line = format!("set {key} 0 0 {LONG_BYTES}\r\n");
                    let request = [line.as_bytes(), value, b"\r\n"].concat();
                    assert_eq!(connection.request(request), b"STORED\r\n");
                    let found = connection.request(format!("get {key}\r\n"));
                    // The item may have been evicted for another writer meanwhile.
                    assert!(found == b"END\r\n" || found.len() > LONG_BYTES, "{}", found.len());
                }
            });
        }
    });
    assert_eq!(connection.request("set short 0 0 1\r\ns\r\n"), b"STORED\r\n");
    let resident = server.resident_bytes();
    assert!(resident < 160 << 20, "{resident} bytes with a limit of 64 MiB");
}

#[test]
fn an_item_that_is_larger_than_the_memory_is_refused() {
    let options = Options { memory_mib: 2, ..Options::new(Program::Aquifer).with(&["-I", "8m"]) };
    let server = Server::start(options);
    let mut connection = server.connect();
    for bytes in [3 << 20, 1 << 20] {
        let line = format!("set long 0 0 {bytes}\r\n");
        let request = [line.as_bytes(), &vec![b'l'; bytes], b"\r\n"].concat();
        // The first item never fits. The second one may fit when all others are evicted.
        let reply = connection.request(request);
        let is_refused = reply == b"SERVER_ERROR out of memory storing object\r\n";
        assert!(is_refused || bytes < 2 << 20 && reply == b"STORED\r\n", "{}", reply.escape_ascii());
        assert_eq!(connection.request("set short 0 0 1\r\ns\r\n"), b"STORED\r\n");
    }
}

#[test]
fn each_command_is_refused_if_nothing_may_be_evicted() {
    let options = Options { memory_mib: 2, ..Options::new(Program::Aquifer).with(&["-M"]) };
    let server = Server::start(options);
    let mut connection = server.connect();
    let value = "v".repeat(200_000);
    assert_eq!(connection.request("set n 0 0 1\r\n1\r\n"), b"STORED\r\n");
    let refused = b"SERVER_ERROR out of memory storing object\r\n";
    let mut number = 0;
    while number < 100 {
        let reply = connection.request(format!("set k{number} 0 0 {}\r\n{value}\r\n", value.len()));
        if reply != b"STORED\r\n" {
            assert_eq!(reply, refused);
            break;
        }
        number += 1;
    }
    assert!((1..100).contains(&number), "{number} items are stored in 2 MiB");
    let long = format!("set k0 0 0 {}\r\n{value}\r\n", value.len());
    let commands = [long.as_str(), "touch k0 100\r\n", "gat 100 k0\r\n", "mg k0 T100\r\n", "md k0 I\r\n"];
    for command in commands {
        let reply = connection.request(command);
        assert!(reply.starts_with(b"SERVER_ERROR out of memory"), "{command}: {}", reply.escape_ascii());
    }
    // Commands that need no memory succeed, and free memory.
    assert_eq!(connection.request("delete k0\r\n"), b"DELETED\r\n");
    assert_eq!(connection.request(long), b"STORED\r\n");
    assert_eq!(connection.request("incr n 1\r\n"), b"2\r\n");
}

#[test]
fn without_evictions_overwritten_items_make_room() {
    let server = start_aquifer(&["-M"]);
    let mut connection = server.connect();
    for round in 0..4 {
        for batch in (0..40_000_u32).step_by(200) {
            // Each round has another order, so that all runs have items in use.
            let requests: String = (batch..batch + 200)
                .map(|key| key.wrapping_mul(7919 + 2 * round) % 40_000)
                .map(|key| format!("set key{key} 0 0 1000\r\n{round:01000}\r\n"))
                .collect();
            connection.send(requests.as_bytes());
            let replies = connection.receive_exactly(200 * "STORED\r\n".len());
            assert_eq!(String::from_utf8_lossy(&replies), "STORED\r\n".repeat(200), "round {round}");
        }
    }
    assert_eq!(connection.request("get key0\r\n").len(), "VALUE key0 0 1000\r\n\r\nEND\r\n".len() + 1000);
}
