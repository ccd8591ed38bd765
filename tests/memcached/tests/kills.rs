//! Servers of a cluster that are killed, while clients check what they read.
//!
//! Before a kill the clients store all their keys, and the keys of the victim are listed. So the
//! test knows which keys may be missing afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquifer_tests_memcached::Server;
use aquifer_tests_memcached::cluster::Cluster;
use rustix::process::Signal;

use crate::cluster::move_until_stopped;

const KEYS: usize = 500;
const SERVERS: usize = 3;
const CLIENTS: usize = 2;

/// The values that a client may find for one of its keys.
#[derive(Clone, Debug, Default)]
struct Known {
    /// The number whose store was acknowledged last, and how many kills had ended before.
    stored: Option<(u64, usize)>,
    /// Numbers of later sets whose outcome is unknown.
    unknown: Vec<u64>,
}

/// The kills so far.
#[derive(Debug, Default)]
struct Kills {
    /// For each begun or ended kill the keys that may be missing since; `None` if they are unknown.
    lost: Vec<Option<BTreeSet<String>>>,
    ended: usize,
    /// The ports of the servers that are not killed.
    ports: Vec<u16>,
}

/// A client that checks what it reads.
struct Client<'a> {
    kills: &'a Mutex<Kills>,
    stream: Option<BufReader<TcpStream>>,
    name: String,
    known: BTreeMap<usize, Known>,
    next: u64,
    /// The statistic `partition_misses` of the connected server, as last read; `None` if it was not
    /// read yet.
    unavailable: Option<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Client<'a> {
    fn new(name: String, kills: &'a Mutex<Kills>) -> Self {
        Self { kills, stream: None, name, known: BTreeMap::new(), next: 0, unavailable: None }
    }

    fn ask(&mut self, request: &str) -> Option<String> {
        if self.stream.is_none() {
            let port = {
                let kills = lock(self.kills);
                kills.ports[usize::try_from(self.next).expect("64 bits") % kills.ports.len()]
            };
            let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a socket has it");
            self.stream = Some(BufReader::new(stream));
            self.unavailable = None;
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

    /// Stores a number. Returns whether the store was acknowledged.
    fn set(&mut self, key: usize) -> bool {
        self.next += 1;
        let (number, ended) = (self.next, lock(self.kills).ended);
        let reply = self.ask(&format!("set {}-{key} 0 0 20\r\n{number:020}\r\n", self.name));
        let known = self.known.entry(key).or_default();
        match reply.as_deref() {
            Some("STORED\r\n") => {
                *known = Known { stored: Some((number, ended)), unknown: Vec::new() };
                return true;
            }
            Some(error) => {
                assert!(error.starts_with("SERVER_ERROR"), "{error}");
                known.unknown.push(number);
            }
            None => known.unknown.push(number),
        }
        false
    }

    /// Stores all keys.
    fn fill(&mut self) {
        for key in 0..KEYS {
            while !self.set(key) {}
        }
    }

    /// Whether any read has found nothing since the last call because no server could answer for
    /// its partition. `None` if that is unknown.
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
        self.unavailable.replace(count).map(|before| count > before)
    }

    /// Whether a key may be missing that was stored when `ended` kills had ended.
    fn may_be_lost(&self, name: &str, ended: usize) -> bool {
        let kills = lock(self.kills);
        kills.lost[ended..].iter().any(|lost| lost.as_ref().is_none_or(|names| names.contains(name)))
    }

    fn get(&mut self, key: usize) {
        if self.unavailable.is_none() {
            self.were_unavailable();
        }
        let name = format!("{}-{key}", self.name);
        let Some(line) = self.ask(&format!("get {name}\r\n")) else { return };
        if line == "END\r\n" {
            if self.were_unavailable() != Some(false) {
                return;
            }
            let known = self.known.remove(&key).unwrap_or_default();
            let is_right = known.stored.is_none_or(|(_, ended)| self.may_be_lost(&name, ended));
            assert!(is_right, "{name} is missing, {known:?}, and no server that had it was killed since");
            return;
        }
        let known = self.known.entry(key).or_default();
        if line.starts_with("SERVER_ERROR") {
            return;
        }
        assert_eq!(line, format!("VALUE {name} 0 20\r\n"));
        let mut rest = [0; 20 + 2 + 5];
        let stream = self.stream.as_mut().expect("the server has answered");
        if stream.read_exact(&mut rest).is_err() {
            self.stream = None;
            return;
        }
        let number: u64 = std::str::from_utf8(&rest[..20]).expect("digits").parse().expect("digits");
        let is_right =
            known.stored.is_some_and(|(stored, _)| stored == number) || known.unknown.contains(&number);
        assert!(is_right, "{name} has {number}, but {known:?}");
    }

    fn turn(&mut self, turn: usize) {
        let key = turn * 7919 % KEYS;
        if turn.is_multiple_of(3) {
            self.set(key);
        } else {
            self.get(key);
        }
    }
}

/// The partitions of each server by its number, and whether any is being moved.
fn partitions(cluster: &Cluster) -> (BTreeMap<u64, BTreeSet<u64>>, bool) {
    let output = cluster.operate(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("the status is JSON");
    let mut moves = false;
    let servers = status["servers"].as_array().expect("there are servers").iter().map(|server| {
        let partitions = server["partitions"].as_array().expect("a list").iter();
        let numbers = partitions.map(|partition| {
            moves |= partition["moves"].as_bool().expect("a flag");
            partition["partition"].as_u64().expect("a number")
        });
        (server["server"].as_u64().expect("a number"), numbers.collect())
    });
    (servers.collect(), moves)
}

/// The keys of the items of a server.
fn keys(server: &Server) -> BTreeSet<String> {
    let dump = server.connect().request("lru_crawler metadump all\r\n");
    let dump = String::from_utf8(dump).expect("names of keys are text");
    let key = |line: &str| Some(line.strip_prefix("key=")?.split(' ').next()?.to_owned());
    dump.lines().filter_map(key).collect()
}

/// Kills a server while the clients continue, and starts another. Returns whether the keys that may
/// be missing since are known.
fn kill_one(
    cluster: &Cluster,
    clients: &[Mutex<Client<'_>>],
    kills: &Mutex<Kills>,
    servers: &mut Vec<Server>,
    victim: usize,
) -> bool {
    let mut paused: Vec<_> = clients.iter().map(lock).collect();
    paused.iter_mut().for_each(|client| client.fill());
    let victim = servers.remove(victim);
    let (before, is_moving) = partitions(cluster);
    let held = keys(&victim);
    let at = {
        let mut kills = lock(kills);
        kills.ports.retain(|port| *port != victim.port());
        // The lost keys are unknown until the kill has ended.
        kills.lost.push(None);
        kills.lost.len() - 1
    };
    drop(paused);
    let _killed = victim.end_by(Signal::KILL);
    let paused: Vec<_> = clients.iter().map(lock).collect();
    // A partition that has left another server may have been moved to the victim just before the
    // kill.
    let (after, _) = partitions(cluster);
    let stays = |(server, had): (&u64, &BTreeSet<u64>)| had.is_subset(&after[server]);
    let is_known = !is_moving && before.iter().filter(|(server, _)| after.contains_key(server)).all(stays);
    {
        let mut kills = lock(kills);
        kills.ended += 1;
        if is_known {
            kills.lost[at] = Some(held);
        }
    }
    drop(paused);
    let server = cluster.add();
    lock(kills).ports.push(server.port());
    servers.push(server);
    cluster.wait_for_partitions();
    is_known
}

/// Kills servers, and moves partitions between the kills, while clients check what they read.
fn kill_servers(count: usize) {
    let cluster = Cluster::start(&[]);
    let mut servers: Vec<Server> = (0..SERVERS).map(|_| cluster.add()).collect();
    cluster.wait_for_partitions();
    let kills = Mutex::new(Kills { ports: servers.iter().map(Server::port).collect(), ..Kills::default() });
    let clients: Vec<Mutex<Client<'_>>> =
        (0..CLIENTS).map(|number| Mutex::new(Client::new(format!("c{number}"), &kills))).collect();
    let stops = AtomicBool::new(false);
    let known = std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter()
            .map(|client| {
                let stops = &stops;
                scope.spawn(move || {
                    for turn in 1.. {
                        if stops.load(Ordering::Relaxed) {
                            break;
                        }
                        lock(client).turn(turn);
                        // Another thread may wait for the lock.
                        std::thread::yield_now();
                    }
                    (0..KEYS).for_each(|key| lock(client).get(key));
                })
            })
            .collect();
        let (mut known, mut moved) = (0, 0);
        for kill in 0..count {
            if threads.iter().any(|client| client.is_finished()) {
                break;
            }
            let stops_moves = AtomicBool::new(false);
            moved += std::thread::scope(|scope| {
                let mover = scope.spawn(|| move_until_stopped(&cluster, SERVERS + kill, &stops_moves));
                let begun = lock(&clients[0]).next;
                while lock(&clients[0]).next < begun + 100 && !threads[0].is_finished() {
                    std::thread::yield_now();
                }
                stops_moves.store(true, Ordering::Relaxed);
                mover.join().expect("the mover does not panic")
            });
            known += usize::from(kill_one(&cluster, &clients, &kills, &mut servers, kill % SERVERS));
        }
        stops.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|client| client.join().expect("a reply was wrong"));
        assert!(moved > 0, "no partition has moved");
        known
    });
    assert!(known > 0, "the keys that may be missing are unknown for every kill");
    cluster.wait_for_partitions();
}

#[test]
fn a_kill_loses_only_the_items_of_the_killed_server() {
    kill_servers(4);
}

mod long {
    #[test]
    fn many_kills_lose_only_the_items_of_the_killed_servers() {
        super::kill_servers(60);
    }
}
