//! Requests for partitions for which no server may answer.

use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_cache::server::PARTITION_TIMEOUT;
use aquifer_cache::store::presence::{Place, Presence};

use crate::servers::{Client, PARTITIONS, Servers, key_on, partition_of};

const ERROR: &str = "SERVER_ERROR";

/// Stores an item, and retries until its server answers in time.
fn set(client: &mut Client, key: &str, value: &str) {
    loop {
        client.send(&format!("set {key} 0 0 {}\r\n{value}\r\n", value.len()));
        let reply = client.line();
        if reply == "STORED\r\n" {
            return;
        }
        assert!(reply.starts_with(ERROR), "{reply}");
    }
}

/// Sends a request until its reply begins with `expected`.
fn ask_until(client: &mut Client, request: &str, expected: &str) {
    loop {
        client.send(request);
        let reply = client.line();
        if reply.starts_with(expected) {
            return;
        }
        assert!(reply.starts_with(ERROR) || reply == "END\r\n" || reply == "EN\r\n", "{reply}");
    }
}

/// A statistic of the server of a client.
fn stat(client: &mut Client, name: &str) -> u64 {
    client.send("stats\r\n");
    let mut found = None;
    loop {
        let line = client.line();
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["END"] => return found.expect("the statistic is shown"),
            ["STAT", shown, value] if shown == name => found = value.parse().ok(),
            _ => {}
        }
    }
}

/// Sends requests for a partition without a server, and others, in one pipeline. Checks the
/// replies.
fn check_unavailable(client: &mut Client, lost: &str, own: &str) {
    client.send(&format!(
        "get {lost}\r\nset {lost} 0 0 1\r\nx\r\nget {own}\r\nmg {lost} v\r\nmg {lost} v q\r\n\
         set {own} 0 0 1\r\ny\r\nget {own} {lost}\r\nincr {lost} 1\r\ntouch {lost} 0 noreply\r\n\
         ms {lost} 1 q\r\nz\r\ngat 0 {lost}\r\nversion\r\n"
    ));
    client.expect("END\r\n");
    assert!(client.line().starts_with(ERROR));
    client.expect(&format!("VALUE {own} 0 1\r\nx\r\nEND\r\nEN\r\nSTORED\r\n"));
    client.expect(&format!("VALUE {own} 0 1\r\ny\r\nEND\r\n"));
    assert!(client.line().starts_with(ERROR), "incr");
    assert!(client.line().starts_with(ERROR), "ms, although it is quiet");
    client.expect("END\r\nVERSION 1.6.18\r\n");
}

#[test]
fn reads_miss_and_changes_fail_while_no_server_has_a_partition() {
    let servers = Servers::start_with(2, PARTITION_TIMEOUT);
    let (own, lost) = (key_on(0, 0), key_on(1, 0));
    let mut client = servers.connect(0);
    set(&mut client, &own, "x");
    let first = servers.0[0].handle();
    first.store().partitions()[partition_of(&lost)].set_absent(Presence::Unknown);
    check_unavailable(&mut client, &lost, &own);
    // The gets of one key, of two keys, the two meta gets, and gat; and three changes, and touch.
    assert_eq!(stat(&mut client, "partition_misses"), 5);
    assert_eq!(stat(&mut client, "partition_errors"), 4);
    let place = Place { server: 1, generation: 1 };
    assert!(first.store().learn(partition_of(&lost), place));
    set(&mut client, &lost, "x");
    ask_until(&mut client, &format!("mg {lost} s\r\n"), "HD s1\r\n");
    servers.stop();
}

#[test]
fn reads_miss_and_changes_fail_while_a_partition_is_suspended_on_another_server() {
    let servers = Servers::start_with(2, PARTITION_TIMEOUT);
    let (own, lost) = (key_on(0, 0), key_on(1, 0));
    let mut client = servers.connect(0);
    set(&mut client, &own, "x");
    set(&mut client, &lost, "before");
    let second = servers.0[1].handle();
    second.store().suspend(&[partition_of(&lost)]);
    check_unavailable(&mut client, &lost, &own);
    second.store().stay(partition_of(&lost));
    ask_until(&mut client, &format!("mg {lost} s\r\n"), "HD s6\r\n");
    servers.stop();
}

#[test]
fn a_server_without_a_lease_forwards_and_serves_nothing_of_its_own() {
    let servers = Servers::start_with(2, PARTITION_TIMEOUT);
    let (own, other) = (key_on(0, 0), key_on(1, 0));
    let (mut first, mut second) = (servers.connect(0), servers.connect(1));
    set(&mut first, &own, "before");
    servers.1.is_fenced.store(true, Ordering::SeqCst);
    ask_until(&mut first, &format!("get {own}\r\n"), "END\r\n");
    first.send(&format!("set {own} 0 0 1\r\nx\r\nflush_all\r\nlru_crawler metadump all\r\n"));
    assert!(first.line().starts_with(ERROR) && first.line().starts_with(ERROR));
    first.expect("END\r\n");
    set(&mut first, &other, "forwarded");
    ask_until(&mut first, &format!("mg {other} s\r\n"), "HD s9\r\n");
    second.ask(&format!("get {own}\r\n"), "END\r\n");
    servers.1.is_fenced.store(false, Ordering::SeqCst);
    // The other partitions were flushed, and these items were stored before.
    ask_until(&mut first, &format!("mg {own} s\r\n"), "HD s6\r\n");
    servers.stop();
}

/// Checks that a change that has failed while its server was unreachable is not made when the
/// server is reachable again: a value that was stored in between stays.
#[test]
fn a_change_that_has_failed_is_not_made_later() {
    let servers = Servers::start_with(2, PARTITION_TIMEOUT);
    let (own, key, marker) = (key_on(0, 0), key_on(1, 0), key_on(1, 100));
    let (mut first, mut second) = (servers.connect(0), servers.connect(1));
    set(&mut first, &own, "x");
    for round in 0..5 {
        set(&mut first, &key, "old");
        servers.1.is_stalled.store(true, Ordering::SeqCst);
        first.send(&format!("set {key} 0 0 6\r\nfailed\r\n"));
        let reply = first.line();
        assert!(reply.starts_with(ERROR), "{reply}");
        for request in ["delete", "get"] {
            first.send(&format!("{request} {key}\r\nget {own} {key}\r\n"));
            let reply = first.line();
            assert!(reply.starts_with(ERROR) || reply == "END\r\n", "{reply}");
            first.expect(&format!("VALUE {own} 0 1\r\nx\r\nEND\r\n"));
        }
        first.send("flush_all\r\n");
        let reply = first.line();
        assert!(reply.starts_with(ERROR), "{reply}");
        set(&mut first, &own, "x");
        let newer = format!("newer{round}");
        second.ask(&format!("set {key} 0 0 6\r\n{newer}\r\n"), "STORED\r\n");
        servers.1.is_stalled.store(false, Ordering::SeqCst);
        // The requests that were sent before have arrived before this one.
        set(&mut first, &marker, "x");
        second.send(&format!("get {key}\r\n"));
        assert_eq!(second.line(), format!("VALUE {key} 0 6\r\n"));
        second.expect(&format!("{newer}\r\nEND\r\n"));
    }
    servers.stop();
}

/// Checks that a pipeline does not wait for one timeout per request: that would exceed the timeout
/// of the test.
#[test]
fn a_pipeline_for_a_lost_partition_waits_once_a_second() {
    let servers = Servers::start_with(2, Duration::from_secs(1));
    let (own, key) = (key_on(0, 0), key_on(1, 0));
    let mut client = servers.connect(0);
    set(&mut client, &own, "x");
    let count = 5000;
    let pipeline = format!("get {key}\r\nmg {own} v\r\n").repeat(count);
    let replies = "END\r\nVA 1\r\nx\r\n".repeat(count);
    // The server is unreachable, its partition is suspended, or no server has the partition.
    set(&mut client, &key, "x");
    servers.1.is_stalled.store(true, Ordering::SeqCst);
    client.ask(&pipeline, &replies);
    servers.1.is_stalled.store(false, Ordering::SeqCst);
    set(&mut client, &key, "x");
    let (first, second) = (servers.0[0].handle(), servers.0[1].handle());
    second.store().suspend(&(0..PARTITIONS).filter(|partition| partition % 2 == 1).collect::<Vec<_>>());
    client.ask(&pipeline, &replies);
    first.store().partitions()[partition_of(&key)].set_absent(Presence::Unknown);
    client.ask(&pipeline, &replies);
    servers.stop();
}

/// Checks the statuses of the replies to a binary pipeline.
#[test]
fn binary_requests_end_with_their_status() {
    use std::io::{Read, Write};
    let servers = Servers::start_with(2, PARTITION_TIMEOUT);
    let lost = key_on(1, 0);
    servers.0[0].handle().store().partitions()[partition_of(&lost)].set_absent(Presence::Unknown);
    let mut stream = servers.connect(0).0.into_inner();
    let request = |opcode: u8, key: &str, extras: usize, opaque: u8| {
        let mut bytes = vec![0x80, opcode, 0, u8::try_from(key.len()).unwrap()];
        bytes.extend([u8::try_from(extras).unwrap(), 0, 0, 0]);
        bytes.extend(u32::try_from(extras + key.len()).unwrap().to_be_bytes());
        bytes.extend([0, 0, 0, opaque, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(vec![0; extras]);
        bytes.extend(key.as_bytes());
        bytes
    };
    // get, set, quiet get, quiet set, quiet get with key, delete, quiet flush, version.
    let requests = [(0, 0), (1, 8), (9, 0), (0x11, 8), (0x0d, 0), (4, 0)];
    let mut pipeline: Vec<u8> =
        (1..).zip(requests).flat_map(|(at, (code, extras))| request(code, &lost, extras, at)).collect();
    pipeline.extend(request(0x18, "", 0, 7));
    pipeline.extend(request(0x0b, "", 0, 8));
    stream.write_all(&pipeline).unwrap();
    for (opaque, status) in [(1, 1), (2, 0x86), (4, 0x86), (6, 0x86), (7, 0x86), (8, 0)] {
        let mut head = [0; 24];
        stream.read_exact(&mut head).unwrap();
        assert_eq!((head[15], head[7]), (opaque, status));
        let mut body = vec![0; u32::from_be_bytes(head[8..12].try_into().unwrap()) as usize];
        stream.read_exact(&mut body).unwrap();
    }
    servers.stop();
}
