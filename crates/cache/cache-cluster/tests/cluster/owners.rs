//! Servers that join, drain and stop.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_cache_cluster::wire::{Answer, Ask};

use crate::checker::Checker;
use crate::harness::{Cluster, Kind, PARTITIONS};

pub fn ask(stream: &mut BufReader<TcpStream>, request: &str) -> String {
    try_ask(stream, request).unwrap()
}

/// Sends a request, and returns the first line of the reply.
///
/// # Errors
/// If the server has closed the connection.
pub fn try_ask(stream: &mut BufReader<TcpStream>, request: &str) -> io::Result<String> {
    stream.get_mut().write_all(request.as_bytes())?;
    let mut line = String::new();
    match stream.read_line(&mut line)? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        _ => Ok(line),
    }
}

#[test]
fn a_server_that_joins_gets_partitions_and_one_that_drains_loses_all() {
    let mut cluster = Cluster::start(Kind::default(), 1);
    let (stops, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    let stream = cluster.connect(0);
    std::thread::scope(|scope| {
        let checker = scope.spawn(|| Checker::new(stream, "c", 300).run(10, &stops, &requests));
        cluster.add(Kind::default());
        cluster.wait_until("the second server has partitions", |cluster| {
            cluster.status(1).partitions.len() >= PARTITIONS / 4
        });
        assert_eq!(cluster.ask(0, &Ask::Drain { drains: true }), Answer::Done);
        cluster.wait_until("the first server has none", |cluster| cluster.status(0).partitions.is_empty());
        assert_eq!(cluster.status(1).partitions.len(), PARTITIONS);
        assert!(!checker.is_finished(), "a reply was wrong");
        stops.store(true, Ordering::Relaxed);
        checker.join().unwrap();
    });
    cluster.stop();
}

#[test]
fn the_partitions_of_a_server_that_stops_begin_empty() {
    let mut cluster = Cluster::start(Kind::default(), 3);
    cluster.wait_until("the third server has partitions", |cluster| !cluster.status(2).partitions.is_empty());
    let mut stream = BufReader::new(cluster.connect(0));
    for key in 0..200 {
        assert_eq!(ask(&mut stream, &format!("set key{key} 0 0 1\r\nx\r\n")), "STORED\r\n");
    }
    let lost = cluster.status(2).partitions.len();
    assert!(lost > 0);
    let mut cas_before = Vec::new();
    for key in 0..200 {
        let line = ask(&mut stream, &format!("mg key{key} c\r\n"));
        cas_before.push(line.trim().strip_prefix("HD c").unwrap().parse::<u64>().unwrap());
    }
    cluster.servers.pop().unwrap().stop();
    let began = Instant::now();
    let (mut missing, mut greater) = (0, 0);
    for (key, before) in cas_before.into_iter().enumerate() {
        // The request waits until a server has the partition.
        let line = ask(&mut stream, &format!("mg key{key} c\r\n"));
        if line == "EN\r\n" {
            missing += 1;
            assert_eq!(ask(&mut stream, &format!("set key{key} 0 0 1\r\ny\r\n")), "STORED\r\n");
            let line = ask(&mut stream, &format!("mg key{key} c\r\n"));
            let cas = line.trim().strip_prefix("HD c").unwrap().parse::<u64>().unwrap();
            greater += usize::from(cas > before);
        } else {
            assert_eq!(line, format!("HD c{before}\r\n"));
        }
    }
    assert!(missing > 0 && missing < 200, "{missing} of 200 were lost");
    assert_eq!(greater, missing, "a cas number of a lost item may come again");
    assert!(began.elapsed() < Duration::from_secs(60));
    cluster.wait_until("each partition has a server", |cluster| cluster.owners().iter().all(Option::is_some));
    cluster.stop();
}

#[test]
fn the_first_server_writes_the_settings() {
    let cluster = Cluster::start(Kind::default(), 1);
    let settings = cluster.directory.get("caches/test/settings").unwrap().unwrap();
    let settings = String::from_utf8(settings.value).unwrap();
    let start = r#"{"version":2,"cache":{"partitions":16,"has_cas":true,"id":"#;
    assert!(settings.starts_with(start), "{settings}");
    cluster.stop();
}

#[test]
fn flush_all_reaches_all_partitions() {
    let cluster = Cluster::start(Kind::default(), 3);
    let mut stream = BufReader::new(cluster.connect(1));
    for key in 0..100 {
        assert_eq!(ask(&mut stream, &format!("set key{key} 0 0 1\r\nx\r\n")), "STORED\r\n");
    }
    assert_eq!(ask(&mut stream, "flush_all\r\n"), "OK\r\n");
    for key in 0..100 {
        assert_eq!(ask(&mut stream, &format!("get key{key}\r\n")), "END\r\n");
    }
    cluster.stop();
}
