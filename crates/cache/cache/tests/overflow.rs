//! A server whose items overflow into a pool, which is memory of the test.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_cache::server::{
    Listener, ListenerAddress, RemoteError, RemoteMemory, RemoteRead, Server, ServerOptions,
};
use aquifer_cache::store::StoreOptions;
use aquifer_cache::store::hash::{HashSecret, KeyHasher};

/// The contents of the pool, and the faults that it simulates.
#[derive(Debug, Default)]
struct State {
    runs: HashMap<u64, Vec<u8>>,
    last: u64,
    is_full: bool,
    /// Bytes that reads return, repeated, instead of the stored bytes.
    wrong_bytes: Option<&'static [u8]>,
}

#[derive(Clone, Debug, Default)]
struct Pool(Arc<Mutex<State>>);

impl RemoteMemory for Pool {
    fn store(&mut self, runs: &[&[u8]]) -> Result<Vec<u64>, RemoteError> {
        let mut state = self.0.lock().unwrap();
        if state.is_full {
            return Err(RemoteError("the pool of the test is full".to_owned()));
        }
        let mut places = Vec::new();
        for run in runs {
            state.last += 1;
            let place = state.last;
            state.runs.insert(place, run.to_vec());
            places.push(place);
        }
        Ok(places)
    }

    fn read(&mut self, reads: &mut [RemoteRead<'_>]) {
        let state = self.0.lock().unwrap();
        for read in reads {
            if let Some(run) = state.runs.get(&read.place) {
                read.out.copy_from_slice(&run[read.offset..read.offset + read.out.len()]);
                if let Some(wrong_bytes) = state.wrong_bytes {
                    read.out.iter_mut().zip(wrong_bytes.iter().cycle()).for_each(|(out, byte)| *out = *byte);
                }
                read.is_done = true;
            }
        }
    }

    fn free(&mut self, places: &[u64]) {
        let mut state = self.0.lock().unwrap();
        for place in places {
            // The test may have dropped the run.
            state.runs.remove(place);
        }
    }

    fn bytes_of(&self, len: usize) -> u64 {
        len.next_power_of_two().max(4096) as u64
    }
}

struct Cache {
    server: Server,
    pool: Pool,
    client: BufReader<TcpStream>,
}

impl Cache {
    fn start(memory: u64, pool_bytes: u64) -> Self {
        let pool = Pool::default();
        let options = ServerOptions {
            listeners: vec![Listener::tcp((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap()],
            store: StoreOptions {
                limit: memory,
                partitions: 4,
                threads: 2,
                has_cas: true,
                evicts: true,
                pool: pool_bytes,
                hasher: KeyHasher::new(HashSecret([1, 2])),
            },
            memory_file: None,
            kept: BTreeMap::new(),
            connections_max: 16,
            item_size_max: 1 << 20,
            requests_per_turn: 0,
            idle_timeout_s: 0,
            tokens: None,
            tls: None,
            protocol: None,
            flush_is_enabled: true,
            dump_is_enabled: true,
            shutdown_is_enabled: false,
            verbosity: 0,
            pool: Some(Box::new(pool.clone())),
            pool_wait: Duration::from_secs(60),
            partition_timeout: Duration::from_secs(60),
            connector: None,
            version: "test",
        };
        let server = Server::start(options).unwrap();
        let ListenerAddress::Tcp(address) = server.addresses()[0] else { unreachable!() };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Self { server, pool, client: BufReader::new(stream) }
    }

    fn send(&mut self, text: &str) {
        self.client.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.client.read_line(&mut line).unwrap();
        line
    }

    fn ask(&mut self, text: &str) -> String {
        self.send(text);
        self.line()
    }

    fn set(&mut self, key: &str, value: &str) {
        let reply = self.ask(&format!("set {key} 0 0 {}\r\n{value}\r\n", value.len()));
        assert_eq!(reply, "STORED\r\n", "{key}");
    }

    /// Reads a reply to `get` of one key.
    fn value(&mut self, key: &str) -> Option<String> {
        let line = self.line();
        if line == "END\r\n" {
            return None;
        }
        let len = line.strip_prefix(&format!("VALUE {key} 0 ")).unwrap_or_else(|| panic!("{line}"));
        let mut value = vec![0; len.trim().parse::<usize>().unwrap() + 7];
        self.client.read_exact(&mut value).unwrap();
        assert!(value.ends_with(b"\r\nEND\r\n"));
        value.truncate(value.len() - 7);
        Some(String::from_utf8(value).unwrap())
    }

    fn get(&mut self, key: &str) -> Option<String> {
        self.send(&format!("get {key}\r\n"));
        self.value(key)
    }

    fn statistic(&mut self, name: &str) -> u64 {
        self.send("stats\r\n");
        let mut found = None;
        loop {
            let line = self.line();
            if line == "END\r\n" {
                return found.unwrap_or_else(|| panic!("no {name}"));
            }
            if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
                found = Some(value.trim().parse().unwrap());
            }
        }
    }
}

fn value_of(key: usize, version: usize) -> String {
    format!("{key}:{version}:{}", "v".repeat(key * 31 % 400))
}

/// Sets `keys` keys, of which only a part has room in memory. The pool has the others.
fn fill(cache: &mut Cache, keys: usize) {
    for key in 0..keys {
        cache.set(&format!("key{key}"), &value_of(key, 0));
    }
}

#[test]
fn items_without_room_are_moved_to_the_pool_and_fetched() {
    let mut cache = Cache::start(4 << 20, 256 << 20);
    fill(&mut cache, 60_000);
    assert!(cache.statistic("pool_items") > 20_000);
    let mut missing = 0;
    for key in (0..60_000).step_by(7) {
        match cache.get(&format!("key{key}")) {
            Some(value) => assert_eq!(value, value_of(key, 0)),
            None => missing += 1,
        }
    }
    // Writes do not wait for the pool: if it is slow, some runs are evicted.
    assert!(missing < 60_000 / 7 / 2, "{missing} are missing");
    assert!(cache.statistic("pool_hits") > 1000);
    cache.server.stop();
}

#[test]
fn hits_and_their_latencies_are_counted_for_memory_and_pool() {
    let mut cache = Cache::start(4 << 20, 256 << 20);
    fill(&mut cache, 60_000);
    assert_eq!((cache.statistic("local_hits"), cache.statistic("pool_hits")), (0, 0));
    assert_eq!((cache.statistic("local_hit_max_us"), cache.statistic("pool_hit_max_us")), (0, 0));
    // The newest item is in memory; some of the oldest ones are in the pool.
    let newest = cache.get("key59999");
    assert_eq!(newest, Some(value_of(59_999, 0)));
    assert_eq!((cache.statistic("local_hits"), cache.statistic("pool_hits")), (1, 0));
    let found = (0..60_000).step_by(7).filter(|key| cache.get(&format!("key{key}")).is_some()).count();
    let (of_pool, hits) = (cache.statistic("pool_hits"), found as u64 + 1);
    assert_eq!(cache.statistic("get_hits"), hits);
    let fetched = hits - cache.statistic("local_hits");
    // An item may also be fetched for another key, which is missing.
    assert!(fetched > 1000 && fetched <= of_pool, "{fetched} of {of_pool}");
    for tier in ["local", "pool"] {
        let times = ["p50", "p99", "max"].map(|name| cache.statistic(&format!("{tier}_hit_{name}_us")));
        assert!(times.is_sorted() && times[2] > 0, "{tier}: {times:?}");
    }
    cache.server.stop();
}

#[test]
fn a_changed_item_is_never_read_with_its_old_value() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    let mut known: BTreeMap<usize, Option<usize>> = BTreeMap::new();
    let mut random = 12345_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random % below as u64).unwrap()
    };
    let (mut found, mut missing) = (0, 0);
    for version in 1..60_000 {
        let key = next(20_000);
        let name = format!("key{key}");
        match next(10) {
            0..=4 => {
                cache.set(&name, &value_of(key, version));
                known.insert(key, Some(version));
            }
            5 => {
                let reply = cache.ask(&format!("delete {name}\r\n"));
                if reply == "DELETED\r\n" {
                    assert!(known.get(&key).is_some_and(Option::is_some), "{name} was not there");
                } else {
                    assert_eq!(reply, "NOT_FOUND\r\n");
                }
                known.insert(key, None);
            }
            6 => {
                let value = value_of(key, version);
                let reply = cache.ask(&format!("add {name} 0 0 {}\r\n{value}\r\n", value.len()));
                match reply.as_str() {
                    "STORED\r\n" => drop(known.insert(key, Some(version))),
                    "NOT_STORED\r\n" => assert!(known.get(&key).is_some_and(Option::is_some), "{name}"),
                    other => panic!("{other}"),
                }
            }
            _ => match cache.get(&name) {
                Some(value) => {
                    found += 1;
                    let version = known.get(&key).copied().flatten();
                    assert_eq!(Some(value), version.map(|version| value_of(key, version)), "{name}");
                }
                None => missing += usize::from(known.get(&key).is_some_and(Option::is_some)),
            },
        }
    }
    assert!(found > 3000 && missing < found, "{found} found, {missing} missing");
    assert!(cache.statistic("pool_hits") > 100);
    cache.server.stop();
}

#[test]
fn commands_that_read_an_item_fetch_it() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    for key in 0..200 {
        cache.set(&format!("n{key}"), "5");
        cache.set(&format!("a{key}"), "begin");
    }
    fill(&mut cache, 20_000);
    let (mut counted, mut appended, mut touched) = (0, 0, 0);
    for key in 0..200 {
        let reply = cache.ask(&format!("incr n{key} 2\r\n"));
        assert!(["7\r\n", "NOT_FOUND\r\n"].contains(&reply.as_str()), "{reply}");
        counted += usize::from(reply == "7\r\n");
        let reply = cache.ask(&format!("append a{key} 0 0 4\r\n-end\r\n"));
        if reply == "STORED\r\n" {
            appended += 1;
            assert_eq!(cache.get(&format!("a{key}")).unwrap(), "begin-end");
        }
        touched += usize::from(cache.ask(&format!("touch a{key} 0\r\n")) == "TOUCHED\r\n");
    }
    assert!(counted > 50 && appended > 50 && touched > 50, "{counted} {appended} {touched}");
    // A pipeline, and many keys at once.
    let keys: Vec<String> = (0..200).map(|key| format!("key{key}")).collect();
    cache.send(&format!("get {}\r\n", keys.join(" ")));
    let mut values = 0;
    loop {
        let line = cache.line();
        if line == "END\r\n" {
            break;
        }
        values += 1;
        let key: usize = line.split(' ').nth(1).unwrap()[3..].parse().unwrap();
        assert_eq!(cache.line(), format!("{}\r\n", value_of(key, 0)));
    }
    assert!(values > 50, "{values}");
    cache.server.stop();
}

#[test]
fn long_items_are_fetched() {
    let mut cache = Cache::start(4 << 20, 256 << 20);
    let value = |key: usize| format!("{key}:{}", "x".repeat(100_000));
    for key in 0..100 {
        cache.set(&format!("long{key}"), &value(key));
    }
    let mut found = 0;
    for key in 0..100 {
        if let Some(got) = cache.get(&format!("long{key}")) {
            assert!(got == value(key));
            found += 1;
        }
    }
    assert!(found > 60, "{found}");
    cache.server.stop();
}

#[test]
fn a_small_pool_keeps_the_newest_runs_and_writes_succeed_while_it_is_full() {
    let mut cache = Cache::start(2 << 20, 4 << 20);
    fill(&mut cache, 60_000);
    assert!(cache.statistic("pool_bytes") <= 4 << 20);
    let runs: u64 = cache.pool.0.lock().unwrap().runs.values().map(|run| run.len() as u64).sum();
    assert!(runs <= 4 << 20, "{runs}");
    cache.pool.0.lock().unwrap().is_full = true;
    for key in 0..20_000 {
        cache.set(&format!("more{key}"), &value_of(key, 1));
    }
    assert_eq!(cache.get("more19999").unwrap(), value_of(19_999, 1));
    // The pool is used when it has room again.
    let last = {
        let mut state = cache.pool.0.lock().unwrap();
        state.is_full = false;
        state.last
    };
    let mut key = 0;
    while cache.pool.0.lock().unwrap().last == last {
        key += 1;
        assert!(key < 5_000_000, "no run is copied to the pool after it has room again");
        cache.set(&format!("again{key}"), &value_of(key, 1));
    }
    cache.server.stop();
}

#[test]
fn items_that_the_pool_loses_are_missing() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    fill(&mut cache, 30_000);
    assert!(cache.statistic("pool_items") > 1000);
    cache.pool.0.lock().unwrap().runs.clear();
    for key in 0..30_000 {
        if let Some(value) = cache.get(&format!("key{key}")) {
            assert_eq!(value, value_of(key, 0));
        }
    }
    assert!(cache.statistic("pool_losses") > 0);
    cache.set("key1", "again");
    assert_eq!(cache.get("key1").unwrap(), "again");
    cache.server.stop();
}

#[test]
fn a_pool_that_does_not_answer_is_not_waited_for() {
    const KEYS: usize = 20_000;
    let mut cache = Cache::start(2 << 20, 256 << 20);
    fill(&mut cache, KEYS);
    let server = cache.server.handle();
    server.store().pool().set_wait(Duration::ZERO);
    let pool = cache.pool.clone();
    // All calls of the pool wait until this guard is dropped.
    let stopped = pool.0.lock().unwrap();
    let missing: Vec<usize> =
        (0..KEYS).filter(|key| cache.get(&format!("key{key}")).is_none()).step_by(50).collect();
    assert!(missing.len() > 50, "{} keys", missing.len());
    for key in &missing {
        assert_eq!(cache.ask(&format!("add key{key} 0 0 3\r\nnew\r\n")), "STORED\r\n");
        assert_eq!(cache.get(&format!("key{key}")).as_deref(), Some("new"));
    }
    server.store().pool().set_wait(Duration::from_secs(60));
    drop(stopped);
    let mut found = 0;
    for key in 0..KEYS {
        if let Some(value) = cache.get(&format!("key{key}")) {
            let is_new = missing.contains(&key);
            assert_eq!(value, if is_new { "new".to_owned() } else { value_of(key, 0) });
            found += 1;
        }
    }
    assert!(found > KEYS / 2, "{found} keys");
    cache.server.stop();
}

#[test]
fn a_flush_removes_the_items_in_the_pool() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    fill(&mut cache, 30_000);
    assert_eq!(cache.ask("flush_all\r\n"), "OK\r\n");
    for key in (0..30_000).step_by(11) {
        assert_eq!(cache.get(&format!("key{key}")), None);
    }
    cache.set("key1", "again");
    assert_eq!(cache.get("key1").unwrap(), "again");
    cache.server.stop();
}

#[test]
fn fetches_do_not_exceed_the_memory() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    fill(&mut cache, 30_000);
    let is_there = |key: &usize| cache.get(&format!("key{key}")).is_some();
    let found = (0..30_000).filter(is_there).count();
    assert!(found > 20_000, "{found}");
    let used = cache.server.handle().store().budget().used();
    assert!(used <= 3 << 20, "{used} bytes");
    cache.server.stop();
}

#[test]
fn long_items_in_little_memory_do_not_wait_for_ever() {
    let mut cache = Cache::start(16 << 20, 256 << 20);
    let value = |key: usize| format!("{key}:{}", "x".repeat(900_000));
    for key in 0..60 {
        cache.set(&format!("long{key}"), &value(key));
        cache.set(&format!("short{key}"), "short");
    }
    let found = (0..60).filter(|key| {
        let got = cache.get(&format!("long{key}"));
        got.inspect(|got| assert!(*got == value(*key), "{key}")).is_some()
    });
    let found = found.count();
    assert!(found > 30, "{found}");
    cache.server.stop();
}

#[test]
fn short_items_in_the_pool_leave_memory_for_others() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    for keys in 0..200 {
        let sets: Vec<String> =
            (0..1000).map(|key| format!("set k{} 0 0 1 noreply\r\nv\r\n", keys * 1000 + key)).collect();
        cache.send(&sets.concat());
        cache.set("last", "last");
    }
    assert_eq!(cache.get("last").unwrap(), "last");
    let used = cache.server.handle().store().budget().used();
    assert!(used <= 3 << 20, "{used} bytes");
    cache.server.stop();
}

#[test]
fn wrong_bytes_from_the_pool_are_not_returned() {
    let mut cache = Cache::start(2 << 20, 256 << 20);
    fill(&mut cache, 30_000);
    // An item with another key, and one with a key that is too long.
    for wrong_bytes in [&b"\x00\x03\x00\x00\x00key"[..], b"\x00\xFF\x00\x00\x00"] {
        cache.pool.0.lock().unwrap().wrong_bytes = Some(wrong_bytes);
        for key in 0..10_000 {
            if let Some(value) = cache.get(&format!("key{key}")) {
                assert_eq!(value, value_of(key, 0));
            }
        }
        fill(&mut cache, 30_000);
    }
    cache.server.stop();
}
