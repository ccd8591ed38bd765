//! Servers that are one cache.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aquifer_tests_memcached::cluster::{Cluster, PATIENT};
use aquifer_tests_memcached::server::memcached_is_installed;
use aquifer_tests_memcached::stream::chosen_seeds;
use aquifer_tests_memcached::{Options, Pair, Program, Server, Stream, assert_equal};
use rustix::process::Signal;

/// Moves partitions to the servers in turn, until `stops`. Returns how many have moved.
fn move_all_the_time(cluster: &Cluster, servers: usize, stops: &AtomicBool) -> usize {
    let mut moved = 0;
    for turn in 0.. {
        if stops.load(Ordering::Relaxed) {
            break;
        }
        let (partition, to) = ((turn * 37 % 128).to_string(), (turn % servers + 1).to_string());
        let output = cluster.operate(&["move", &partition, &to]);
        moved += usize::from(output.status.success() && !output.stdout.ends_with(b"already\n"));
    }
    moved
}

/// Sends these seeds of each stream to memcached and to servers whose partitions move.
fn compare_cluster(seeds: Range<u64>) {
    if !memcached_is_installed() {
        return;
    }
    let reference = Server::start(Options::new(Program::Memcached));
    let cluster = Cluster::start(&PATIENT);
    let servers: Vec<Server> = (0..3).map(|_| cluster.add()).collect();
    cluster.wait_for_partitions();
    let stops = AtomicBool::new(false);
    let moved = std::thread::scope(|scope| {
        let mover = scope.spawn(|| move_all_the_time(&cluster, 3, &stops));
        // The thread must end if a comparison fails.
        let compared = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let seeds = chosen_seeds(seeds);
            let large = seeds.start..seeds.start + (seeds.end - seeds.start) / 20;
            for (stream, seeds) in [
                (Stream::Text, seeds.clone()),
                (Stream::Meta, seeds.clone()),
                (Stream::Mixed, seeds.clone()),
                (Stream::Malformed, seeds),
                (Stream::Large, large),
            ] {
                for seed in seeds {
                    let server = usize::try_from(seed % 3).expect("a small number");
                    let pair = Pair { reference: &reference, candidate: &servers[server] };
                    let what = format!("a cluster, {stream:?}, seed {seed}");
                    assert_equal(pair, &what, stream.script(seed));
                }
            }
        }));
        stops.store(true, Ordering::Relaxed);
        let moved = mover.join().expect("the mover does not panic");
        compared.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        moved
    });
    assert!(moved > 0, "no partition has moved");
}

#[test]
fn replies_of_a_cluster_are_equal_while_partitions_move() {
    compare_cluster(0..40);
}

#[test]
fn a_server_that_is_stopped_in_order_loses_nothing() {
    let cluster = Cluster::start(&PATIENT);
    let first = cluster.add();
    cluster.wait_for_partitions();
    let mut connection = first.connect();
    for key in 0..500 {
        assert_eq!(connection.request(format!("set key{key} 0 0 1\r\nx\r\n")), b"STORED\r\n");
    }
    let second = cluster.add();
    cluster.wait_for("on 2 servers");
    assert!(first.end_by(Signal::TERM), "it ends with success");
    let mut connection = second.connect();
    for key in 0..500 {
        let expected = format!("VALUE key{key} 0 1\r\nx\r\nEND\r\n");
        assert_eq!(String::from_utf8_lossy(&connection.request(format!("get key{key}\r\n"))), expected);
    }
    cluster.wait_for_partitions();
}

#[test]
fn the_only_server_has_its_items_again_after_a_restart() {
    let mut cluster = Cluster::start(&PATIENT);
    cluster.start_daemon("keeper");
    for restart in 0..3 {
        let server = cluster.add();
        cluster.wait_for_partitions();
        let mut connection = server.connect();
        for key in 0..500 {
            let expected = if restart == 0 { "EN\r\n" } else { "VA 1 t-1\r\nx\r\n" };
            let found = connection.request(format!("mg key{key} t v\r\n"));
            assert_eq!(String::from_utf8_lossy(&found), expected, "restart {restart}");
            assert_eq!(connection.request(format!("set key{key} 0 0 1\r\nx\r\n")), b"STORED\r\n");
        }
        assert!(server.end_by(Signal::TERM), "it ends with success");
    }
    // Nothing is known of what a killed server had in the making.
    let server = cluster.add();
    cluster.wait_for_partitions();
    let _killed = server.end_by(Signal::KILL);
    let server = cluster.add();
    cluster.wait_for_partitions();
    assert_eq!(server.connect().request("mg key1 v\r\n"), b"EN\r\n");
}

#[test]
fn operators_see_and_move_partitions() {
    let cluster = Cluster::start(&PATIENT);
    let servers: Vec<Server> = (0..2).map(|_| cluster.add()).collect();
    cluster.wait_for_partitions();
    let text = |arguments: &[&str]| {
        let output = cluster.operate(arguments);
        let text = if output.status.success() { output.stdout } else { output.stderr };
        (output.status.success(), String::from_utf8(text).expect("text"))
    };
    let (is_well, status) = text(&["status"]);
    assert!(is_well && status.contains("cache main: 128 partitions on 2 servers"), "{status}");
    let (is_well, drained) = text(&["drain", "1"]);
    assert!(is_well && drained.contains("server 1 has no partitions"), "{drained}");
    let (is_well, moved) = text(&["move", "5", "2"]);
    assert!(is_well && moved.contains("has partition 5 already"), "{moved}");
    let (is_well, refused) = text(&["move", "5", "1"]);
    assert!(!is_well && refused.contains("drains"), "{refused}");
    let (is_well, undone) = text(&["drain", "1", "--undo"]);
    assert!(is_well, "{undone}");
    let (is_well, moved) = text(&["move", "5", "1"]);
    // The balancer may have moved it first.
    assert!(
        is_well && (moved.contains("has moved from server 2 to 1") || moved.contains("already")),
        "{moved}"
    );
    let (is_well, refused) = text(&["move", "128", "1"]);
    assert!(!is_well && refused.contains("from 0 to 127"), "{refused}");
    let (is_well, refused) = text(&["move", "5", "7"]);
    assert!(!is_well && refused.contains("the servers are 1, 2"), "{refused}");
    let (_, json) = text(&["status", "--json"]);
    assert!(json.contains("\"requests_per_s\""), "{json}");
    drop(servers);
    // Another cache in the same directory has servers of its own.
    let (is_well, refused) = text(&["status", "--name", "other"]);
    assert!(!is_well && refused.contains("no server of a cache \"other\""), "{refused}");
}

/// What a client knows of a key of its own.
#[derive(Clone, Debug, Default)]
struct Known {
    /// The number that was stored last for sure, and how many servers had been killed then.
    stored: Option<(u64, u64)>,
    /// Numbers of later sets whose outcome is not known.
    perhaps: Vec<u64>,
}

/// A client that checks what it reads, while servers are killed.
struct Client<'a> {
    ports: Vec<u16>,
    stream: Option<BufReader<TcpStream>>,
    name: String,
    known: BTreeMap<usize, Known>,
    killed: &'a AtomicU64,
    next: u64,
    /// Reads of the server's clients that have ended because no server might answer, as seen last.
    unavailable: u64,
}

impl Client<'_> {
    fn ask(&mut self, request: &str) -> Option<String> {
        if self.stream.is_none() {
            let port = self.ports[usize::try_from(self.next).expect("64 bits") % self.ports.len()];
            let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a socket has it");
            self.stream = Some(BufReader::new(stream));
        }
        let stream = self.stream.as_mut()?;
        let mut line = String::new();
        let asked = stream.get_mut().write_all(request.as_bytes()).and_then(|()| stream.read_line(&mut line));
        if asked.is_ok_and(|len| len > 0) {
            return Some(line);
        }
        self.stream = None;
        None
    }

    fn set(&mut self, key: usize) {
        self.next += 1;
        let (number, killed) = (self.next, self.killed.load(Ordering::SeqCst));
        let reply = self.ask(&format!("set {}-{key} 0 0 20\r\n{number:020}\r\n", self.name));
        let known = self.known.entry(key).or_default();
        match reply.as_deref() {
            Some("STORED\r\n") => *known = Known { stored: Some((number, killed)), perhaps: Vec::new() },
            Some(error) => {
                assert!(error.starts_with("SERVER_ERROR"), "{error}");
                known.perhaps.push(number);
            }
            None => known.perhaps.push(number),
        }
    }

    /// Whether reads have found nothing since the last call because no server might answer for
    /// their partition. `None` if the server does not say.
    fn were_unavailable(&mut self) -> Option<bool> {
        let mut line = self.ask("stats\r\n")?;
        let mut count = None;
        while line != "END\r\n" {
            if let Some(value) = line.strip_prefix("STAT partition_misses ") {
                count = value.trim_end().parse().ok();
            }
            line = self.ask("")?;
        }
        let count = count.expect("the statistic is shown");
        Some(count > std::mem::replace(&mut self.unavailable, count))
    }

    fn get(&mut self, key: usize) {
        let name = format!("{}-{key}", self.name);
        let Some(line) = self.ask(&format!("get {name}\r\n")) else { return };
        if line == "END\r\n" {
            if self.were_unavailable() != Some(false) {
                return;
            }
            let known = self.known.entry(key).or_default();
            let killed = self.killed.load(Ordering::SeqCst);
            let is_lost = known.stored.is_none_or(|(_, before)| before < killed);
            assert!(is_lost, "{name} is missing, {known:?}, and no server was killed since");
            *known = Known::default();
            return;
        }
        let known = self.known.entry(key).or_default();
        if line.starts_with("SERVER_ERROR") {
            return;
        }
        assert_eq!(line, format!("VALUE {name} 0 20\r\n"));
        let mut rest = [0; 20 + 2 + 5];
        let stream = self.stream.as_mut().expect("it has answered");
        if stream.read_exact(&mut rest).is_err() {
            self.stream = None;
            return;
        }
        let number: u64 = std::str::from_utf8(&rest[..20]).expect("digits").parse().expect("digits");
        let is_right =
            known.stored.is_some_and(|(stored, _)| stored == number) || known.perhaps.contains(&number);
        assert!(is_right, "{name} has {number}, but {known:?}");
    }

    fn run(&mut self, stops: &AtomicBool) {
        let mut turn = 0;
        while !stops.load(Ordering::Relaxed) {
            turn += 1;
            let key = turn * 7919 % 500;
            if turn % 3 == 0 { self.set(key) } else { self.get(key) }
        }
        for key in 0..500 {
            self.get(key);
        }
    }
}

/// Kills servers and moves partitions, while clients check what they read.
fn kill_servers(kills: usize) {
    let cluster = Cluster::start(&[]);
    let mut servers: Vec<Server> = (0..3).map(|_| cluster.add()).collect();
    cluster.wait_for_partitions();
    let (stops, killed) = (AtomicBool::new(false), AtomicU64::new(0));
    // The first server is not killed, so that clients can always connect.
    let port = servers[0].port();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..2)
            .map(|number| {
                let (stops, killed) = (&stops, &killed);
                scope.spawn(move || {
                    let mut client = Client {
                        ports: vec![port],
                        stream: None,
                        name: format!("c{number}"),
                        known: BTreeMap::new(),
                        killed,
                        next: 0,
                        unavailable: 0,
                    };
                    client.run(stops);
                })
            })
            .collect();
        let mover = scope.spawn(|| move_all_the_time(&cluster, 3, &stops));
        for kill in 0..kills {
            if clients.iter().any(|client| client.is_finished()) {
                break;
            }
            // Before the kill: what is stored meanwhile may be lost.
            killed.fetch_add(1, Ordering::SeqCst);
            let victim = servers.remove(1 + kill % 2);
            let _killed = victim.end_by(Signal::KILL);
            killed.fetch_add(1, Ordering::SeqCst);
            servers.push(cluster.add());
            cluster.wait_for_partitions();
        }
        stops.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().expect("a reply was wrong"));
        assert!(mover.join().expect("the mover does not panic") > 0, "no partition has moved");
    });
    cluster.wait_for_partitions();
}

#[test]
fn servers_are_killed_and_nothing_is_stale() {
    kill_servers(4);
}

/// The same, more often.
mod long {
    #[test]
    fn many_replies_of_a_cluster_are_equal_while_partitions_move() {
        super::compare_cluster(1000..3000);
    }

    #[test]
    fn many_servers_are_killed_and_nothing_is_stale() {
        super::kill_servers(60);
    }
}
