//! Servers whose partitions outlive them, because a keeper holds their memory.

use std::collections::BTreeSet;
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_keeper::{ITEMS_MAX, KeeperOptions};

use crate::harness::{Cluster, Kind};
use crate::owners::{ask, try_ask};

pub const KEYS: usize = 500;

/// A keeper that runs in a thread.
struct KeeperThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl KeeperThread {
    fn start(socket: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let options = KeeperOptions {
            socket,
            grace: Duration::from_secs(600),
            listener: None,
            items_max: ITEMS_MAX,
            when_unused: Arc::default(),
        };
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || aquifer_keeper::serve(&options, &stop, || ready.send(()).unwrap()).unwrap()
        });
        is_ready.recv().unwrap();
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for KeeperThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Starts a cluster of one server, and its keeper.
fn start() -> (Cluster, KeeperThread) {
    let mut cluster = Cluster::start(Kind::default(), 0);
    let socket = cluster.folder().join("keeper");
    let keeper = KeeperThread::start(socket.clone());
    cluster.keeper = Some(socket);
    (add(cluster), keeper)
}

/// Starts another server, and waits until all partitions have an owner.
fn add(mut cluster: Cluster) -> Cluster {
    cluster.add(Kind::default());
    cluster
        .wait_until("all partitions have a server", |cluster| cluster.owners().iter().all(Option::is_some));
    cluster
}

fn end(cluster: &mut Cluster) {
    cluster.servers.pop().unwrap().stop();
}

pub fn set_all(stream: &mut BufReader<TcpStream>) {
    for key in 0..KEYS {
        let value = format!("value{key}");
        let request = format!("set key{key} {key} 0 {}\r\n{value}\r\n", value.len());
        assert_eq!(ask(stream, &request), "STORED\r\n");
    }
}

/// Reads the value, flags, cas number and remaining seconds of all keys.
pub fn read_all(stream: &mut BufReader<TcpStream>) -> Vec<String> {
    try_read_all(stream).unwrap()
}

/// Reads the value, flags, cas number and remaining seconds of all keys.
///
/// # Errors
/// If the server has closed the connection.
pub fn try_read_all(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<String>> {
    let read = |key| {
        let line = try_ask(stream, &format!("mg key{key} v f c t\r\n"))?;
        Ok(if line.starts_with("VA") { line + &try_ask(stream, "")? } else { line })
    };
    (0..KEYS).map(read).collect()
}

fn cas_of(line: &str) -> u64 {
    let word = line.split_whitespace().find_map(|word| word.strip_prefix('c'));
    word.unwrap_or_else(|| panic!("{line}")).parse().unwrap()
}

#[test]
fn a_server_that_is_restarted_has_its_items() {
    let (mut cluster, _keeper) = start();
    let mut stream = BufReader::new(cluster.connect(0));
    set_all(&mut stream);
    assert_eq!(ask(&mut stream, "set brief 0 3600 1\r\nx\r\n"), "STORED\r\n");
    assert_eq!(ask(&mut stream, "delete key3\r\n"), "DELETED\r\n");
    let before = read_all(&mut stream);
    end(&mut cluster);
    let mut cluster = add(cluster);
    let mut stream = BufReader::new(cluster.connect(0));
    assert_eq!(read_all(&mut stream), before);
    let left = ask(&mut stream, "mg brief t\r\n");
    let left_s: u32 = left.trim().strip_prefix("HD t").unwrap().parse().unwrap();
    assert!((3000..=3600).contains(&left_s), "{left_s}");
    // No cas number is used again, and `cas` compares with the numbers from before the restart.
    let cas = cas_of(&before[7]);
    assert_eq!(ask(&mut stream, &format!("cas key7 0 0 1 {cas}\r\ny\r\n")), "STORED\r\n");
    assert_eq!(ask(&mut stream, &format!("cas key7 0 0 1 {cas}\r\nz\r\n")), "EXISTS\r\n");
    set_all(&mut stream);
    let after: BTreeSet<u64> = read_all(&mut stream).iter().map(|line| cas_of(line)).collect();
    let known = before.iter().filter(|line| line.starts_with("VA")).map(|line| cas_of(line));
    assert!(known.into_iter().all(|cas| !after.contains(&cas)), "a cas number comes again");
    // A second restart restores them, too.
    let before = read_all(&mut stream);
    end(&mut cluster);
    let cluster = add(cluster);
    assert_eq!(read_all(&mut BufReader::new(cluster.connect(0))), before);
    cluster.stop();
}

#[test]
fn a_partition_that_another_server_has_had_since_is_not_restored() {
    let (mut cluster, _keeper) = start();
    set_all(&mut BufReader::new(cluster.connect(0)));
    end(&mut cluster);
    // A server of another machine claims all partitions.
    let keeper = cluster.keeper.take();
    let mut cluster = add(cluster);
    let mut stream = BufReader::new(cluster.connect(0));
    assert!(read_all(&mut stream).iter().all(|line| line == "EN\r\n"));
    assert_eq!(ask(&mut stream, "set key1 0 0 3\r\nnew\r\n"), "STORED\r\n");
    end(&mut cluster);
    cluster.keeper = keeper;
    let cluster = add(cluster);
    let mut stream = BufReader::new(cluster.connect(0));
    assert!(read_all(&mut stream).iter().all(|line| line == "EN\r\n"), "an item is stale");
    // The memory is usable.
    set_all(&mut stream);
    assert!(read_all(&mut stream).iter().all(|line| line.starts_with("VA")));
    cluster.stop();
}

#[test]
fn flushed_items_stay_flushed() {
    let (mut cluster, _keeper) = start();
    let mut stream = BufReader::new(cluster.connect(0));
    set_all(&mut stream);
    assert_eq!(ask(&mut stream, "flush_all\r\n"), "OK\r\n");
    assert_eq!(ask(&mut stream, "set key1 0 0 1\r\nx\r\n"), "STORED\r\n");
    end(&mut cluster);
    let mut cluster = add(cluster);
    let mut stream = BufReader::new(cluster.connect(0));
    let found = read_all(&mut stream).iter().filter(|line| line.starts_with("VA")).count();
    assert_eq!(found, 1);
    // Partitions with a flush in the future are not kept: they would never be flushed.
    assert_eq!(ask(&mut stream, "flush_all 3600\r\n"), "OK\r\n");
    end(&mut cluster);
    let cluster = add(cluster);
    let mut stream = BufReader::new(cluster.connect(0));
    assert!(read_all(&mut stream).iter().all(|line| line == "EN\r\n"));
    cluster.stop();
}

#[test]
fn two_caches_on_one_keeper_have_their_own_items() {
    let (mut cluster, _keeper) = start();
    let mut stream = BufReader::new(cluster.connect(0));
    set_all(&mut stream);
    let before = read_all(&mut stream);
    // A cache of the same name in another directory, with the same history.
    let mut other = Cluster::start(Kind::default(), 0);
    other.keeper.clone_from(&cluster.keeper);
    let mut other = add(other);
    let mut stream = BufReader::new(other.connect(0));
    assert_eq!(ask(&mut stream, "set key1 0 0 5\r\nother\r\n"), "STORED\r\n");
    end(&mut cluster);
    end(&mut other);
    let (cluster, other) = (add(cluster), add(other));
    let mut stream = BufReader::new(other.connect(0));
    let found = read_all(&mut stream);
    assert_eq!(found.iter().filter(|line| line.starts_with("VA")).count(), 1);
    assert!(found[1].ends_with("other\r\n"), "{}", found[1]);
    assert_eq!(read_all(&mut BufReader::new(cluster.connect(0))), before);
    cluster.stop();
    other.stop();
}

#[test]
fn two_servers_that_stop_at_once_leave_their_items() {
    let (mut cluster, _keeper) = start();
    cluster.add(Kind::default());
    cluster.wait_until("the second server has partitions", |cluster| {
        !cluster.status(1).partitions.is_empty() && cluster.owners().iter().all(Option::is_some)
    });
    set_all(&mut BufReader::new(cluster.connect(0)));
    std::thread::scope(|scope| {
        for server in cluster.servers.drain(..) {
            scope.spawn(|| server.stop());
        }
    });
    let cluster = add(cluster);
    // The server that ended last may have claimed partitions of the first, without items.
    let mut stream = BufReader::new(cluster.connect(0));
    let found = read_all(&mut stream);
    assert!(found.iter().all(|line| line.starts_with("VA 6")
        || line.starts_with("VA 7")
        || line.starts_with("VA 8")
        || line == "EN\r\n"));
    assert!(found.iter().any(|line| line.starts_with("VA")));
    cluster.stop();
}

#[test]
fn a_server_with_other_memory_begins_empty() {
    let (mut cluster, _keeper) = start();
    set_all(&mut BufReader::new(cluster.connect(0)));
    end(&mut cluster);
    cluster.add(Kind { limit: 32 << 20, ..Kind::default() });
    let mut stream = BufReader::new(cluster.connect(0));
    assert!(read_all(&mut stream).iter().all(|line| line == "EN\r\n"));
    set_all(&mut stream);
    assert!(read_all(&mut stream).iter().all(|line| line.starts_with("VA")));
    cluster.stop();
}
