//! Lifetimes of one and two seconds.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_tests_e2e::eventually::eventually;
use aquifer_tests_memcached::{Connection, Server};

use crate::Servers;

/// Lifetime of the items in seconds.
const LIFETIME_S: u64 = 2;
/// Shortest time until an item may expire: servers count whole seconds.
const LIFETIME_MIN: Duration = Duration::from_secs(LIFETIME_S - 1);
/// Most attempts with a server whose clock is late or early on a loaded machine.
const ATTEMPTS: usize = 5;

/// Runs a test on both servers at the same time.
fn for_each(servers: &Servers, test: impl Fn(&Server) + Sync) {
    std::thread::scope(|scope| {
        for server in servers.both() {
            let test = &test;
            scope.spawn(move || test(server));
        }
    });
}

/// Commands that set the lifetime of the item `KEY`, and their replies.
fn commands(unix_time: u64) -> Vec<(String, &'static str)> {
    let stored = "set KEY 0 0 1\r\na\r\n";
    vec![
        (format!("set KEY 0 {LIFETIME_S} 1\r\na\r\n"), "STORED\r\n"),
        (format!("set KEY 0 {} 1\r\na\r\n", unix_time + LIFETIME_S + 1), "STORED\r\n"),
        (format!("add KEY 0 {LIFETIME_S} 1\r\na\r\n"), "STORED\r\n"),
        (format!("{stored}touch KEY {LIFETIME_S}\r\n"), "STORED\r\nTOUCHED\r\n"),
        (format!("{stored}gat {LIFETIME_S} KEY\r\n"), "STORED\r\nVALUE KEY 0 1\r\na\r\nEND\r\n"),
        (format!("{stored}mg KEY T{LIFETIME_S}\r\n"), "STORED\r\nHD\r\n"),
        (format!("{stored}md KEY I T{LIFETIME_S}\r\n"), "STORED\r\nHD\r\n"),
        (format!("ms KEY 1 T{LIFETIME_S}\r\na\r\n"), "HD\r\n"),
        (format!("mg KEY N{LIFETIME_S}\r\n"), "HD W\r\n"),
        (format!("ma KEY N{LIFETIME_S}\r\n"), "HD\r\n"),
        (format!("set KEY 0 0 1\r\n1\r\nma KEY T{LIFETIME_S}\r\n"), "STORED\r\nHD\r\n"),
    ]
}

fn has(connection: &mut Connection, key: &str) -> bool {
    // The request changes neither the time of the last access nor the lifetime.
    match connection.request(format!("mg {key} u\r\n")).as_slice() {
        b"EN\r\n" => false,
        reply if reply.starts_with(b"HD") => true,
        reply => panic!("{key}: {}", reply.escape_ascii()),
    }
}

/// Waits until items have expired. Returns whether none has expired too early.
fn expire_in_time(server: &Server, attempt: usize) -> bool {
    let mut connection = server.connect();
    let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970").as_secs();
    let started = Instant::now();
    let mut waiting = Vec::new();
    for (number, (command, reply)) in commands(unix_time).into_iter().enumerate() {
        let key = format!("expires-{attempt}-{number}");
        let actual = connection.request(command.replace("KEY", &key));
        assert_eq!(String::from_utf8_lossy(&actual), reply.replace("KEY", &key), "{command}");
        waiting.push((key, command));
    }
    let mut in_time = true;
    for (key, command) in waiting {
        eventually(&command, || (!has(&mut connection, &key)).then_some(()));
        in_time &= started.elapsed() >= LIFETIME_MIN;
        let stored = connection.request(format!("add {key} 0 0 1\r\nb\r\n"));
        assert_eq!(stored, b"STORED\r\n", "{command}: an expired item must not prevent add");
    }
    in_time
}

#[test]
fn items_expire_after_their_lifetime_and_not_before() {
    let Some(servers) = Servers::start(&[]) else { return };
    for_each(&servers, |server| {
        let in_time = (0..ATTEMPTS).any(|attempt| expire_in_time(server, attempt));
        assert!(in_time, "{:?}: items expired within {LIFETIME_MIN:?}", server.options());
    });
}

#[test]
fn a_delayed_flush_deletes_all_items() {
    let Some(servers) = Servers::start(&[]) else { return };
    for_each(&servers, |server| {
        let in_time = (0..ATTEMPTS).any(|attempt| {
            let mut connection = server.connect();
            let key = format!("flushed-{attempt}");
            let started = Instant::now();
            let replies = connection.request(format!("set {key} 0 0 1\r\na\r\nflush_all {LIFETIME_S}\r\n"));
            assert_eq!(replies, b"STORED\r\nOK\r\n");
            eventually("the flush", || (!has(&mut connection, &key)).then_some(()));
            started.elapsed() >= LIFETIME_MIN
        });
        assert!(in_time, "{:?}: items were flushed within {LIFETIME_MIN:?}", server.options());
    });
}

#[test]
fn the_remaining_lifetime_decreases() {
    let Some(servers) = Servers::start(&[]) else { return };
    for_each(&servers, |server| {
        let mut connection = server.connect();
        connection.request("set k 0 1000 1\r\na\r\n");
        let mut remaining = || {
            let reply = String::from_utf8(connection.request("mg k t\r\n")).expect("the bytes are text");
            let seconds: u64 = reply.trim().trim_start_matches("HD t").parse().expect("a number");
            seconds
        };
        assert!(remaining() <= 1000);
        eventually("a second to pass", || (remaining() < 1000).then_some(()));
    });
}
