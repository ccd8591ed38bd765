//! Servers that forward requests to each other. The tests place the partitions.

mod servers;
mod unavailable;

use std::io::{BufReader, Read, Write};
use std::sync::OnceLock;

use aquifer_cache::store::presence::{Place, Presence};

use crate::servers::{Client, Servers, partition_of};

#[test]
fn any_server_answers_for_any_key() {
    let servers = Servers::start(3);
    let mut clients: Vec<_> = (0..3).map(|server| servers.connect(server)).collect();
    for key in 0..60 {
        clients[key % 3].ask(&format!("set key{key} 5 0 4\r\n{key:04}\r\n"), "STORED\r\n");
    }
    for client in &mut clients {
        for key in 0..60 {
            client.ask(&format!("get key{key}\r\n"), &format!("VALUE key{key} 5 4\r\n{key:04}\r\nEND\r\n"));
        }
        client.ask("get missing1 missing2\r\n", "END\r\n");
    }
    servers.stop();
}

#[test]
fn a_get_of_many_keys_has_its_values_in_order() {
    let servers = Servers::start(3);
    let mut client = servers.connect(0);
    let keys: Vec<String> = (0..200).map(|key| format!("key{key}")).collect();
    for key in &keys {
        client.ask(&format!("set {key} 0 0 {}\r\n{key}\r\n", key.len()), "STORED\r\n");
    }
    let value = |key: &String| format!("VALUE {key} 0 {}\r\n{key}\r\n", key.len());
    let all: String = keys.iter().map(value).collect();
    client.ask(
        &format!("get {}\r\nget none {}\r\n", keys.join(" "), keys[5]),
        &format!("{all}END\r\n{}END\r\n", value(&keys[5])),
    );
    client.ask(
        &format!("gat 100 {} none {}\r\n", keys[0], keys[1]),
        &format!("{}{}END\r\n", value(&keys[0]), value(&keys[1])),
    );
    client.send(&format!("gets {}\r\n", keys[..3].join(" ")));
    for key in &keys[..3] {
        assert!(client.line().starts_with(&format!("VALUE {key} 0 4 ")));
        client.line();
    }
    client.expect("END\r\n");
    servers.stop();
}

#[test]
fn pipelined_requests_take_effect_and_are_answered_in_order() {
    let servers = Servers::start(3);
    let mut client = servers.connect(1);
    let (mut requests, mut replies) = (String::new(), String::new());
    for key in 0..40 {
        requests += &format!("set n{key} 0 0 1\r\n{}\r\nincr n{key} 7\r\n", key % 3);
        replies += &format!("STORED\r\n{}\r\n", key % 3 + 7);
        requests += &format!("delete x{key}\r\nversion\r\nmg n{key} v\r\n");
        let number = (key % 3 + 7).to_string();
        replies += &format!("NOT_FOUND\r\nVERSION 1.6.18\r\nVA {}\r\n{number}\r\n", number.len());
        requests += &format!("append n{key} 0 0 1 noreply\r\n0\r\nget none n{key}\r\n");
        let number = format!("{number}0");
        replies += &format!("VALUE n{key} 0 {}\r\n{number}\r\nEND\r\n", number.len());
    }
    client.ask(&requests, &replies);
    servers.stop();
}

#[test]
fn all_partitions_are_flushed() {
    let servers = Servers::start(3);
    let mut client = servers.connect(2);
    for key in 0..50 {
        client.ask(&format!("set key{key} 0 0 1\r\nx\r\n"), "STORED\r\n");
    }
    client.ask("flush_all\r\nget key1 key2 key3 key4 key5\r\n", "OK\r\nEND\r\n");
    for key in 0..50 {
        client.ask(&format!("get key{key}\r\n"), "END\r\n");
    }
    client.ask("set key1 0 0 1\r\nx\r\nflush_all noreply\r\nget key1\r\n", "STORED\r\nEND\r\n");
    servers.stop();
}

#[test]
fn long_values_are_forwarded() {
    let servers = Servers::start(2);
    let mut client = servers.connect(0);
    let value = "v".repeat(1_000_000);
    for key in 0..8 {
        client.ask(&format!("set key{key} 0 0 1000000\r\n{value}\r\n"), "STORED\r\n");
    }
    for key in 0..8 {
        client.ask(&format!("get key{key}\r\n"), &format!("VALUE key{key} 0 1000000\r\n{value}\r\nEND\r\n"));
    }
    // A value that is too large is skipped, and the item with its key is deleted.
    let large = "v".repeat(1_100_000);
    for key in 0..4 {
        client.ask(
            &format!("set key{key} 0 0 1100000\r\n{large}\r\nget key{key}\r\n"),
            "SERVER_ERROR object too large for cache\r\nEND\r\n",
        );
    }
    servers.stop();
}

#[test]
fn requests_wait_while_no_server_has_a_partition() {
    let servers = Servers::start(2);
    let key = (0..).map(|key| format!("key{key}")).find(|key| partition_of(key) == 1).unwrap();
    let (mut here, mut there) = (servers.connect(0), servers.connect(1));
    here.ask(&format!("set {key} 0 0 1\r\nx\r\n"), "STORED\r\n");
    let (first, second) = (servers.0[0].handle(), servers.0[1].handle());
    let departure = second.store().leave(1, second.now_s());
    assert_eq!(departure.items, 1);
    here.send(&format!("get {key}\r\nget {key}2\r\n"));
    there.send(&format!("incr {key} 1\r\nset {key} 0 0 1 noreply\r\ny\r\nget {key}\r\n"));
    // The partition moves without its items, in another generation.
    first.store().begin_empty(1, 2);
    second.store().forget(1, Presence::Elsewhere(Place { server: 0, generation: 2 })).unwrap();
    first.wake();
    second.wake();
    there.expect(&format!("NOT_FOUND\r\nVALUE {key} 0 1\r\ny\r\nEND\r\n"));
    let reply = here.line();
    assert!(["END\r\n".to_owned(), format!("VALUE {key} 0 1\r\n")].contains(&reply), "{reply}");
    servers.stop();
}

#[test]
fn requests_for_an_ended_server_are_answered_when_another_has_the_partition() {
    let mut servers = Servers::start(2);
    let key = (0..).map(|key| format!("key{key}")).find(|key| partition_of(key) == 1).unwrap();
    let mut client = servers.connect(0);
    client.ask(&format!("set {key} 0 0 1\r\nx\r\n"), "STORED\r\n");
    servers.1.servers.lock().unwrap()[1] = OnceLock::new();
    servers.0.remove(1).stop();
    client.send(&format!("get {key}\r\nset {key} 0 0 1\r\ny\r\nget {key}\r\n"));
    let first = servers.0[0].handle();
    first.store().partitions()[1].set_absent(Presence::Unknown);
    first.store().begin_empty(1, 2);
    first.wake();
    client.expect(&format!("END\r\nSTORED\r\nVALUE {key} 0 1\r\ny\r\nEND\r\n"));
    servers.stop();
}

#[test]
fn binary_requests_are_forwarded() {
    let servers = Servers::start(2);
    let mut client = servers.connect(0);
    let request = |opcode: u8, key: &str, extras: &[u8], value: &str, opaque: u8| {
        let mut bytes = vec![0x80, opcode, 0, u8::try_from(key.len()).unwrap()];
        bytes.extend([u8::try_from(extras.len()).unwrap(), 0, 0, 0]);
        bytes.extend(u32::try_from(extras.len() + key.len() + value.len()).unwrap().to_be_bytes());
        bytes.extend([0, 0, 0, opaque, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend(extras);
        bytes.extend(key.as_bytes());
        bytes.extend(value.as_bytes());
        bytes
    };
    let mut stream = client.0.into_inner();
    let mut pipeline = Vec::new();
    for key in 0..20 {
        // Quiet sets, and gets that answer.
        pipeline.extend(request(0x11, &format!("k{key}"), &[0; 8], "val", key));
        pipeline.extend(request(0x00, &format!("k{key}"), &[], "", 100 + key));
    }
    stream.write_all(&pipeline).unwrap();
    for key in 0..20 {
        let mut reply = [0; 24 + 4 + 3];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!((reply[0], reply[1], &reply[6..8], reply[15]), (0x81, 0, &[0, 0][..], 100 + key));
        assert_eq!(&reply[28..], b"val");
    }
    client = Client(BufReader::new(stream));
    drop(client);
    servers.stop();
}
