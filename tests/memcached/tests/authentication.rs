//! Authentication with a file of users (`-Y`).

use std::io::Write;

use aquifer_tests_memcached::{End, Server};
use tempfile::NamedTempFile;

use crate::{Servers, start_aquifer};

/// Most bytes by which the memory of a server may grow.
const GROWTH_MAX: u64 = 16 << 20;
const LOGIN: &[u8] = b"set x 0 0 9\r\nuser pass\r\n";

/// Lists of bytes that are sent in order on one connection, each answered by one line. Both servers
/// must send equal lines.
const STEPS: &[&[&str]] = &[
    &["version\r\n", "mn\r\n", "set x 0 0 9\r\nuser pass\r\n", "version\r\n", "set x 0 0 9\r\nuser pasx\r\n"],
    &["set x 0 0 9\r\nuser pasx\r\n", "version\r\n", "set x 0 0 9\r\nuser pass\r\n", "mn\r\n"],
    &["set x 0 0 9\r\nusex pass\r\n"],
    &["set x 0 0 10\r\nother word\r\n", "mn\r\n"],
    &["set x 0 0 9\r\nuser word\r\n"],
    &["set x 0 0 5\r\nusers\r\n", "set x 0 0 9\r\nuser pass\r\n"],
    &["set x 0 0 0\r\n\r\n", "set x 0 0 9\r\nuser pass\r\n"],
    &["set x 0 0 9\r\nuser passXY", "\r\n", "set x 0 0 9\r\nuser pass\r\n"],
    &["set x 0 0 9\nuser pass\r\n", "mn\r\n"],
    &["set x 0 0 -1\r\n", "\r\n", "set x 0 0 9\r\nuser pass\r\n"],
    &["set x 0 0 x\r\n", "user pass\r\n"],
    &["set x 0 0 9 noreply\r\nuser pass\r\n", "mn\r\n"],
    &["set x 0 0 9 a b c\r\nuser pass\r\n"],
    &["set x 0 0\r\n", "user pass\r\n"],
    &["set x y z 9\r\nuser pass\r\n"],
    &["set x 0 0 11\r\nuser pass x\r\n", "mn\r\n"],
    &["set x 0 0 10\r\n user pass\r\n", "mn\r\n"],
    &["set x 0 0 10\r\nuser  pass\r\n", "mn\r\n"],
    &["set x 0 0 8\r\nuser pas\r\n"],
    &["set x 0 0 6\r\nuser p\r\n"],
    &["ms x 9\r\n", "add x 0 0 9\r\n", "SET x 0 0 9\r\n", "get x\r\n", "quit\r\n", "GET / HTTP/1.0\r\n"],
    &["\r\n", "\r\n", "   \r\n", "set x 0 0 9\r\nuser pass\r\n"],
];

fn users() -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(b"user:pass\nother:word\n").expect("the file is writable");
    file
}

fn path(file: &NamedTempFile) -> &str {
    file.path().to_str().expect("the bytes are text")
}

fn replies(server: &Server, steps: &[&str]) -> Vec<String> {
    let mut connection = server.connect();
    steps
        .iter()
        .map(|step| {
            connection.send(step.as_bytes());
            let line = connection.receive_until(b"\r\n").escape_ascii().to_string();
            if line.starts_with("VERSION") { "VERSION".to_owned() } else { line }
        })
        .collect()
}

#[test]
fn authentication_gets_the_replies_of_memcached() {
    let file = users();
    let Some(servers) = Servers::start(&["-Y", path(&file)]) else { return };
    for steps in STEPS {
        let [expected, actual] = servers.both().map(|server| replies(server, steps));
        assert_eq!(actual, expected, "{steps:?}");
    }
}

#[test]
fn a_long_line_before_authentication_closes_the_connection() {
    let file = users();
    let Some(servers) = Servers::start(&["-Y", path(&file)]) else { return };
    for server in servers.both() {
        let mut connection = server.connect();
        connection.send(&vec![b'x'; 20_000]);
        assert_eq!(connection.receive(100), b"");
    }
}

/// Asserts that the server has not grown, and authenticates a new connection.
fn assert_serves(server: &Server, resident_before: u64) {
    let grown = server.resident_bytes().saturating_sub(resident_before);
    assert!(grown <= GROWTH_MAX, "the server has grown by {grown} bytes");
    let mut connection = server.connect();
    connection.send(LOGIN);
    assert_eq!(connection.receive_until(b"\r\n"), b"STORED\r\n");
    assert_eq!(connection.request("get missing\r\n"), b"END\r\n");
}

#[test]
fn a_token_that_is_announced_as_gigabytes_uses_no_memory() {
    let file = users();
    let server = start_aquifer(&["-Y", path(&file)]);
    let lengths = [
        "2000000000",
        "2147483645",
        "2147483646",
        "2147483647",
        "2147483648",
        "4294967293",
        "4294967294",
        "4294967295",
        "9223372036854775807",
        "18446744073709551615",
    ];
    for length in lengths {
        let before = server.resident_bytes();
        let mut connection = server.connect();
        let line = format!("set x 0 0 {length}\r\n");
        let token = vec![b'x'; 4 << 20];
        // The server may close the connection, or answer errors.
        let answer = connection.exchange(&[line.as_bytes(), &token], End::HalfClose);
        assert!(!answer.is_stalled, "{length}: the connection stays open after its end");
        assert!(!String::from_utf8_lossy(&answer.bytes).contains("STORED"), "{length}");
        assert_serves(&server, before);
    }
}

#[test]
fn empty_lines_before_authentication_use_no_memory() {
    let file = users();
    let server = start_aquifer(&["-Y", path(&file)]);
    let before = server.resident_bytes();
    let mut connection = server.connect();
    for chunk in b"\r\n".repeat(100_000).chunks(2000) {
        connection.send(chunk);
        // memcached does not answer each line. The other replies are received below.
        connection.receive(1 << 20);
    }
    connection.send(LOGIN);
    connection.receive_until(b"STORED\r\n");
    assert_eq!(connection.request("get missing\r\n"), b"END\r\n");
    assert_serves(&server, before);
}
