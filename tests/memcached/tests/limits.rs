//! The largest accepted value, by length of the key and by flags.

use aquifer_tests_memcached::Server;

use crate::Servers;

/// Length in bytes of a value that is refused in all tests.
const TOO_LONG: usize = 5 << 20;

/// Whether a value is accepted.
fn is_accepted(server: &Server, command: &str, length: usize) -> bool {
    let mut bytes = format!("{command}\r\n").replace("LENGTH", &length.to_string()).into_bytes();
    bytes.resize(bytes.len() + length, b'x');
    bytes.extend_from_slice(b"\r\n");
    let reply = server.connect().request(bytes);
    match reply.as_slice() {
        b"STORED\r\n" | b"HD\r\n" => true,
        b"SERVER_ERROR object too large for cache\r\n" => false,
        reply => panic!("{command}: {}", reply.escape_ascii()),
    }
}

/// Finds the largest accepted length.
fn limit(server: &Server, command: &str) -> usize {
    let (mut accepted, mut refused) = (0, TOO_LONG);
    while refused - accepted > 1 {
        let middle = accepted.midpoint(refused);
        if is_accepted(server, command, middle) {
            accepted = middle;
        } else {
            refused = middle;
        }
    }
    accepted
}

fn assert_equal_limits(arguments: &[&str]) {
    let Some(servers) = Servers::start(arguments) else { return };
    for length in [1, 2, 100, 250] {
        let key = "k".repeat(length);
        let commands =
            [format!("set {key} 0 0 LENGTH"), format!("set {key} 5 0 LENGTH"), format!("ms {key} LENGTH F5")];
        for command in commands {
            let limit = limit(&servers.memcached, &command);
            let accepted = is_accepted(&servers.aquifer, &command, limit);
            assert!(accepted, "{arguments:?} {command}: {limit} bytes are refused");
            let accepted = is_accepted(&servers.aquifer, &command, limit + 1);
            assert!(!accepted, "{arguments:?} {command}: {} bytes are accepted", limit + 1);
        }
    }
}

#[test]
fn the_largest_value_is_as_in_memcached() {
    assert_equal_limits(&[]);
}

#[test]
fn the_largest_value_without_cas_is_as_in_memcached() {
    assert_equal_limits(&["-C"]);
}

#[test]
fn the_largest_value_follows_the_option() {
    assert_equal_limits(&["-I", "512k"]);
    assert_equal_limits(&["-I", "2m"]);
}
