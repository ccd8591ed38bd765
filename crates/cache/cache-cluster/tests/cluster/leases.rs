//! Servers that run although their leases end.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_cache::server::PARTITION_TIMEOUT;
use aquifer_cache_cluster::records::ServerRecord;
use aquifer_directory::names::decode;
use aquifer_directory::{
    Directory, DirectoryEntry, DirectoryError, Lease, LeaseId, Listing, Transaction, TransactionOutcome,
    Watch,
};

use aquifer_tests_support::eventually::eventually;

use crate::faults::{Faults, unavailable};
use crate::harness::{Cluster, Kind};
use crate::keeping::{KEYS, read_all, set_all, try_read_all};
use crate::owners::ask;

/// A connection to a directory that can be cut.
#[derive(Debug)]
struct CutDirectory {
    inner: Arc<dyn Directory>,
    is_cut: AtomicBool,
}

impl CutDirectory {
    fn reach(&self) -> Result<&dyn Directory, DirectoryError> {
        if self.is_cut.load(Ordering::SeqCst) { Err(unavailable()) } else { Ok(&*self.inner) }
    }
}

impl Directory for CutDirectory {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        self.reach()?.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.reach()?.list(prefix)
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.reach()?.transaction(transaction)
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.reach()?.lease_grant(ttl)
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.reach()?.lease_keep_alive(id)
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.reach()?.lease_revoke(id)
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        self.reach()?.watch(prefix, from_revision)
    }
}

/// The entries of the servers in the directory, by their epochs.
fn servers(cluster: &Cluster) -> BTreeMap<u64, DirectoryEntry> {
    let entries = cluster.directory.list("caches/test/servers/").unwrap().entries;
    entries.into_iter().map(|entry| (decode::<ServerRecord>(&entry).unwrap().epoch, entry)).collect()
}

fn wait_for_all(cluster: &Cluster) {
    cluster
        .wait_until("all partitions have a server", |cluster| cluster.owners().iter().all(Option::is_some));
}

/// Moves partitions so that each server has as many.
fn divide(cluster: &Cluster) {
    for (partition, owner) in cluster.owners().into_iter().enumerate() {
        let (owner, to) = (owner.unwrap(), partition % cluster.servers.len());
        if owner != to {
            eventually("a partition to move", || cluster.move_to(partition, owner, to).ok());
        }
    }
}

/// Ends all leases at once, as if the directory had been stopped for longer than they last.
#[test]
fn items_outlive_the_leases_of_all_servers() {
    for count in [1, 3] {
        // The items of a partition that is moving at that moment would be lost.
        let mut cluster = Cluster::start_with(Kind::default(), 0, Some(Arc::new(Faults::of_balancer())));
        // The servers join again however slow the machine is.
        cluster.return_time = Duration::from_secs(600);
        (0..count).for_each(|_| cluster.add(Kind::default()));
        wait_for_all(&cluster);
        divide(&cluster);
        let mut stream = BufReader::new(cluster.connect(0));
        set_all(&mut stream);
        let before = read_all(&mut stream);
        assert!(before.iter().all(|line| line.starts_with("VA")));
        for _ in 0..3 {
            let ended = servers(&cluster);
            assert_eq!(ended.len(), count);
            for entry in ended.values() {
                cluster.directory.lease_revoke(entry.lease.unwrap()).unwrap();
            }
            cluster.wait_until("all servers to join again", |cluster| {
                let joined = servers(cluster);
                joined.len() == count && joined.keys().all(|epoch| !ended.contains_key(epoch))
            });
            wait_for_all(&cluster);
            assert!(read_all(&mut stream) == before, "items are lost");
        }
        set_all(&mut stream);
        cluster.stop();
    }
}

/// Returns the lines of [`read_all`]; `None` if the server has closed the connection, as it does
/// with those that it was serving when its lease ended. Then the stream is connected again.
fn read_or_connect(
    cluster: &Cluster,
    server: usize,
    stream: &mut BufReader<TcpStream>,
) -> Option<Vec<String>> {
    let found = try_read_all(stream).ok();
    if found.is_none() {
        *stream = BufReader::new(cluster.connect(server));
    }
    found
}

/// A server that the directory does not reach serves none of its partitions. It forwards requests
/// for others, and has its items again afterwards, except those of partitions that were moving.
#[test]
fn a_server_without_the_directory_costs_its_keys_and_no_others() {
    let mut cluster = Cluster::start(Kind::default(), 0);
    cluster.return_time = Duration::from_secs(600);
    cluster.partition_timeout = PARTITION_TIMEOUT;
    let direct = Arc::clone(&cluster.directory);
    let cut = Arc::new(CutDirectory { inner: Arc::clone(&direct), is_cut: AtomicBool::new(false) });
    cluster.directory = Arc::clone(&cut) as Arc<dyn Directory>;
    cluster.add(Kind::default());
    cluster.directory = direct;
    cluster.add(Kind::default());
    cluster.wait_until("the second server has partitions", |cluster| {
        !cluster.status(1).partitions.is_empty() && cluster.owners().iter().all(Option::is_some)
    });
    let mut streams = [0, 1].map(|server| BufReader::new(cluster.connect(server)));
    for key in 0..KEYS {
        let request = format!("set key{key} 0 0 1\r\nx\r\n");
        eventually("an item to be stored", || (ask(&mut streams[0], &request) == "STORED\r\n").then_some(()));
    }
    cut.is_cut.store(true, Ordering::SeqCst);
    let is_missing = |line: &String| {
        assert!(line == "EN\r\n" || line.ends_with("\r\nx\r\n"), "{line}");
        line == "EN\r\n"
    };
    let missing = [0, 1].map(|server| {
        eventually("some keys to be missing and others not", || {
            let found = read_or_connect(&cluster, server, &mut streams[server])?;
            let missing: Vec<bool> = found.iter().map(is_missing).collect();
            (missing.contains(&true) && missing.contains(&false)).then_some(missing)
        })
    });
    cut.is_cut.store(false, Ordering::SeqCst);
    for server in [0, 1] {
        eventually("items to be found again", || {
            let found = read_or_connect(&cluster, server, &mut streams[server])?;
            let is_found = |key: usize| !is_missing(&found[key]);
            (0..KEYS).any(|key| missing[0][key] && missing[1][key] && is_found(key)).then_some(())
        });
    }
    cluster.stop();
}

#[test]
fn a_partition_that_another_server_has_had_since_is_not_served() {
    let mut cluster = Cluster::start(Kind::default(), 1);
    let direct = Arc::clone(&cluster.directory);
    let cut = Arc::new(CutDirectory { inner: Arc::clone(&direct), is_cut: AtomicBool::new(false) });
    cluster.directory = Arc::clone(&cut) as Arc<dyn Directory>;
    cluster.add(Kind::default());
    cluster.directory = direct;
    cluster.wait_until("the second server has partitions", |cluster| {
        !cluster.status(1).partitions.is_empty() && cluster.owners().iter().all(Option::is_some)
    });
    let mut stream = BufReader::new(cluster.connect(0));
    set_all(&mut stream);
    cut.is_cut.store(true, Ordering::SeqCst);
    cluster.wait_until("the first server to have all partitions", |cluster| {
        cluster.status(0).partitions.len() == cluster.owners().len()
    });
    for key in 0..KEYS {
        assert_eq!(ask(&mut stream, &format!("set key{key} 0 0 3\r\nnew\r\n")), "STORED\r\n");
    }
    cut.is_cut.store(false, Ordering::SeqCst);
    cluster.wait_until("both servers are there", |cluster| servers(cluster).len() == 2);
    wait_for_all(&cluster);
    for server in [0, 1] {
        let found = read_all(&mut BufReader::new(cluster.connect(server)));
        assert!(found.iter().all(|line| line.ends_with("new\r\n")), "an item is stale or lost");
    }
    cluster.stop();
}
