//! A real etcd that is killed, restarted, loses its leader, or is disconnected.
//!
//! Calls succeed or fail as unavailable, and never return a wrong answer; a watch has no gap.
//! Further tests cover properties that only etcd has: keys of other users, its own clock, TLS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aquifer_directory::{
    Compare, Directory, DirectoryError, KeyOperation, Transaction, TransactionOutcome, Watch, WatchEvent,
    WatchEventKind,
};
use aquifer_directory_etcd::{self as etcd, EtcdAddress, TlsFiles};
use aquifer_tests_support::{EtcdCluster, TcpRelay};

/// Timeout of each wait, which only a failing test reaches.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A time to live that is longer than any outage of etcd in these tests.
const TTL: Duration = Duration::from_secs(300);

fn connect(address: &str) -> etcd::EtcdDirectory {
    etcd::connect(&address.parse().unwrap(), &TlsFiles::default()).unwrap()
}

fn is_unavailable(error: &DirectoryError) -> bool {
    matches!(error, DirectoryError::Unavailable { .. })
}

fn event(watch: &mut dyn Watch) -> WatchEvent {
    watch.next(TEST_TIMEOUT).unwrap().expect("an event is due")
}

/// The next event. A watch that fails is opened again after the last event.
fn event_over_failures(
    directory: &dyn Directory,
    watch: &mut Box<dyn Watch>,
    prefix: &str,
    last: u64,
) -> WatchEvent {
    loop {
        match watch.next(TEST_TIMEOUT) {
            Ok(Some(event)) => return event,
            Ok(None) => panic!("an event is due"),
            Err(error) => assert!(is_unavailable(&error), "{error}"),
        }
        match directory.watch(prefix, last + 1) {
            Ok(new) => *watch = new,
            Err(error) => assert!(is_unavailable(&error), "{error}"),
        }
    }
}

/// Repeats a call until it does not fail as unavailable.
fn until_available<T>(mut call: impl FnMut() -> Result<T, DirectoryError>) -> Result<T, DirectoryError> {
    loop {
        match call() {
            Err(error) if is_unavailable(&error) => {}
            answer => return answer,
        }
    }
}

/// A writer that increments a number in a key, and checks that no increment is lost or repeated.
struct Counter {
    done: AtomicBool,
    /// Increments that were acknowledged.
    acknowledged: AtomicU64,
    failed: AtomicU64,
}

impl Counter {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            done: AtomicBool::new(false),
            acknowledged: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        })
    }

    /// Increments the number by compare-and-set until `done`. Returns the last value.
    fn run(&self, directory: &dyn Directory) -> u64 {
        let mut written = 0;
        while !self.done.load(Ordering::SeqCst) || self.acknowledged.load(Ordering::SeqCst) < 20 {
            let found = until_available(|| directory.get("n/count")).unwrap();
            let (value, version) = found.map_or((0, 0), |entry| (number(&entry.value), entry.version));
            assert!(value == written || value == written + 1, "{value} was never written after {written}");
            let transaction = Transaction {
                compares: vec![Compare::version("n/count", version)],
                operations: vec![KeyOperation::put("n/count", (value + 1).to_le_bytes(), None)],
            };
            match directory.transaction(&transaction) {
                Ok(TransactionOutcome::Committed { revision }) => {
                    assert!(revision > version);
                    self.acknowledged.fetch_add(1, Ordering::SeqCst);
                    written = value + 1;
                }
                // An earlier call that failed as unavailable took effect.
                Ok(TransactionOutcome::Conflict { .. }) => written = value,
                Err(error) => {
                    assert!(is_unavailable(&error), "{error}");
                    self.failed.fetch_add(1, Ordering::SeqCst);
                    written = value;
                }
            }
        }
        number(&until_available(|| directory.get("n/count")).unwrap().unwrap().value)
    }
}

fn number(value: &[u8]) -> u64 {
    u64::from_le_bytes(value.try_into().unwrap())
}

/// Runs a writer, a watch and a lease while `disturb` disturbs the etcd, and checks their results.
fn survives(address: &str, disturb: impl FnOnce(&dyn Fn(u64))) {
    let (writer, watcher, keeper) = (connect(address), connect(address), connect(address));
    let lease = until_available(|| keeper.lease_grant(TTL)).unwrap();
    until_available(|| keeper.put("leased", b"", Some(lease.id))).unwrap();
    let counter = Counter::new();
    let mut watch = until_available(|| watcher.watch("n/", 1)).unwrap();
    std::thread::scope(|scope| {
        let count = scope.spawn(|| counter.run(&writer));
        // Waits until `steps` more increments are acknowledged.
        let progress = |steps: u64| {
            let from = counter.acknowledged.load(Ordering::SeqCst);
            while counter.acknowledged.load(Ordering::SeqCst) < from + steps {
                assert!(!count.is_finished(), "the writer has failed");
                std::thread::yield_now();
            }
        };
        disturb(&progress);
        counter.done.store(true, Ordering::SeqCst);
        let last = count.join().unwrap();
        assert!(last >= counter.acknowledged.load(Ordering::SeqCst));
        // The watch reports every value once, in order.
        let mut revision = 0;
        for value in 1..=last {
            let WatchEvent { kind: WatchEventKind::Put { value: seen, .. }, revision: at, .. } =
                event_over_failures(&watcher, &mut watch, "n/", revision)
            else {
                panic!("nothing was deleted")
            };
            assert_eq!(number(&seen), value);
            assert!(at > revision);
            revision = at;
        }
    });
    assert_eq!(watch.next(Duration::ZERO).unwrap(), None);
    until_available(|| keeper.lease_keep_alive(lease.id)).unwrap();
    assert_eq!(until_available(|| keeper.get("leased")).unwrap().unwrap().lease, Some(lease.id));
    let next = until_available(|| keeper.lease_grant(TTL)).unwrap();
    assert!(next.epoch > lease.epoch);
}

#[test]
fn an_etcd_that_is_killed_and_restarted_loses_nothing() {
    let mut etcd = EtcdCluster::start();
    let address = etcd.address();
    survives(&address, |progress| {
        for _ in 0..3 {
            progress(10);
            etcd.member(0).kill();
            etcd.member(0).restart();
        }
        progress(10);
    });
}

#[test]
fn a_watch_continues_after_a_restart() {
    let mut etcd = EtcdCluster::start();
    let directory = connect(&etcd.address());
    let mut watch = directory.watch("w/", 0).unwrap();
    directory.put("w/1", b"", None).unwrap();
    assert_eq!(event(&mut *watch).key, "w/1");
    etcd.member(0).kill();
    etcd.member(0).restart();
    let operations = vec![KeyOperation::put("w/2", "", None), KeyOperation::put("w/3", "", None)];
    let both = Transaction { compares: Vec::new(), operations };
    let TransactionOutcome::Committed { revision } =
        until_available(|| directory.transaction(&both)).unwrap()
    else {
        panic!("nothing was compared")
    };
    let seen = [event(&mut *watch), event(&mut *watch)];
    assert_eq!(
        seen.each_ref().map(|event| (event.revision, event.key.as_str())),
        [(revision, "w/2"), (revision, "w/3")]
    );
}

#[test]
fn the_death_of_a_leader_of_three_loses_nothing() {
    let mut etcd = EtcdCluster::start_with(3, &Default::default());
    let address = etcd.address();
    survives(&address, |progress| {
        progress(10);
        // Each member is killed once, so the leader is too.
        for member in 0..3 {
            etcd.member(member).kill();
            progress(10);
            etcd.member(member).restart();
        }
    });
}

#[test]
fn connections_that_break_often_lose_nothing() {
    let etcd = EtcdCluster::start();
    let relay =
        TcpRelay::start("127.0.0.1:0".parse().unwrap(), etcd.members()[0].client(), Duration::ZERO).unwrap();
    survives(&format!("etcd://{}", relay.address()), |progress| {
        for _ in 0..20 {
            progress(3);
            relay.cut();
            relay.resume();
        }
    });
}

/// A client that knows several members does not wait for one that has stopped.
#[test]
fn a_stopped_member_is_skipped() {
    let etcd = EtcdCluster::start_with(3, &Default::default());
    let relay =
        TcpRelay::start("127.0.0.1:0".parse().unwrap(), etcd.members()[0].client(), Duration::ZERO).unwrap();
    let address = format!("etcd://{},{}", relay.address(), etcd.members()[1].client());
    let directory = connect(&address);
    directory.put("k", b"1", None).unwrap();
    relay.stop();
    assert_eq!(directory.get("k").unwrap().unwrap().value, b"1", "a read is repeated at another member");
    directory.put("k", b"2", None).unwrap();
    assert_eq!(directory.get("k").unwrap().unwrap().value, b"2");
}

/// Epochs increase across restarts and across clients.
#[test]
fn epochs_increase_across_restarts_and_clients() {
    let mut etcd = EtcdCluster::start();
    let mut last = 0;
    for round in 0..3 {
        let callers = [connect(&etcd.address()), connect(&etcd.address())];
        for caller in &callers {
            let lease = caller.lease_grant(TTL).unwrap();
            assert!(lease.epoch > last, "{} comes after {last}", lease.epoch);
            last = lease.epoch;
        }
        if round < 2 {
            etcd.member(0).kill();
            etcd.member(0).restart();
        }
    }
}

#[test]
fn clusters_in_one_etcd_are_separate() {
    let etcd = EtcdCluster::start();
    let [one, two] = ["one", "on"].map(|name| connect(&format!("{}/{name}", etcd.address())));
    let mut watch = one.watch("", 0).unwrap();
    two.put("nodes/1", b"two", None).unwrap();
    let lease = two.lease_grant(TTL).unwrap();
    two.put("agents/1", b"", Some(lease.id)).unwrap();
    one.lease_grant(TTL).unwrap();
    assert_eq!(one.get("nodes/1").unwrap(), None);
    assert!(one.list("").unwrap().entries.is_empty(), "the epoch key is not listed");
    one.put("nodes/1", b"one", None).unwrap();
    assert_eq!(event(&mut *watch).kind, WatchEventKind::Put { value: b"one".to_vec(), lease: None });
    assert_eq!(two.get("nodes/1").unwrap().unwrap().value, b"two");
    assert_eq!(two.list("").unwrap().entries.len(), 2);
}

#[test]
fn tls_without_its_files_is_refused_with_a_reason() {
    let address: EtcdAddress = "etcds://127.0.0.1:1".parse().unwrap();
    let refusal = |files: TlsFiles| match etcd::connect(&address, &files) {
        Err(DirectoryError::Refused { why, .. }) => why,
        other => panic!("a refusal was expected, not {other:?}"),
    };
    assert!(refusal(TlsFiles::default()).contains("certificate of the authority"));
    let missing = TlsFiles { ca: Some("/nonexistent/ca.pem".into()), ..Default::default() };
    assert!(refusal(missing).contains("/nonexistent/ca.pem"));
}

/// Creates certificates of two authorities with openssl.
fn certificates(folder: &std::path::Path) {
    let script = r#"
set -e
authority() {
    openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=$1" -keyout "$1.key" -out "$1.pem"
}
signed() {
    openssl req -newkey rsa:2048 -nodes -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
    printf 'subjectAltName=IP:127.0.0.1\n' >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial \
        -days 2 -extfile "$1.ext" -out "$1.pem"
}
authority ca
authority other
signed server ca
signed client ca
signed stranger other
"#;
    let made = std::process::Command::new("sh").args(["-c", script]).current_dir(folder).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

mod long {
    use super::*;

    #[test]
    fn a_minority_of_members_is_unavailable() {
        let mut etcd = EtcdCluster::start_with(3, &Default::default());
        let directory = connect(&etcd.address());
        until_available(|| directory.put("k", b"before", None)).unwrap();
        etcd.member(0).kill();
        etcd.member(1).kill();
        let errors = [
            directory.get("k").unwrap_err(),
            directory.put("k", b"lost", None).unwrap_err(),
            directory.list("").unwrap_err(),
            directory.lease_grant(TTL).unwrap_err(),
        ];
        for error in &errors {
            assert!(is_unavailable(error), "{error}");
            assert!(error.to_string().contains(&etcd.address()), "{error}");
        }
        etcd.member(0).restart();
        etcd.member(1).restart();
        let value = until_available(|| directory.get("k")).unwrap().unwrap().value;
        assert!(value == b"before" || value == b"lost");
    }

    #[test]
    fn tls_admits_only_known_certificates() {
        let folder = tempfile::tempdir().unwrap();
        certificates(folder.path());
        let file = |name: &str| folder.path().join(name);
        let arguments =
            [("--cert-file", "server.pem"), ("--key-file", "server.key"), ("--trusted-ca-file", "ca.pem")];
        let mut tls: Vec<_> = arguments
            .iter()
            .flat_map(|(name, value)| [(*name).to_owned(), file(value).display().to_string()])
            .collect();
        tls.push("--client-cert-auth".to_owned());
        let etcd = EtcdCluster::start_with(
            1,
            &aquifer_tests_support::EtcdOptions { tls: Some(tls), ..Default::default() },
        );
        let address: EtcdAddress = etcd.address().replace("etcd://", "etcds://").parse().unwrap();
        let files = |ca: &str, own: Option<&str>| TlsFiles {
            ca: Some(file(ca)),
            certificate: own.map(|own| file(&format!("{own}.pem"))),
            key: own.map(|own| file(&format!("{own}.key"))),
        };
        let directory = etcd::connect(&address, &files("ca.pem", Some("client"))).unwrap();
        let mut watch = directory.watch("", 0).unwrap();
        directory.put("k", b"v", None).unwrap();
        assert_eq!(event(&mut *watch).key, "k");
        for stranger in
            [files("ca.pem", None), files("ca.pem", Some("stranger")), files("other.pem", Some("client"))]
        {
            let error = etcd::connect(&address, &stranger).unwrap_err();
            assert!(is_unavailable(&error), "{stranger:?}: {error}");
        }
        let plain = etcd.address().parse().unwrap();
        assert!(is_unavailable(&etcd::connect(&plain, &TlsFiles::default()).unwrap_err()));
    }

    /// As in a network partition, bytes are lost without an error.
    #[test]
    fn a_partitioned_client_fails_and_continues_afterwards() {
        let etcd = EtcdCluster::start();
        let relay =
            TcpRelay::start("127.0.0.1:0".parse().unwrap(), etcd.members()[0].client(), Duration::ZERO)
                .unwrap();
        let there = connect(&etcd.address());
        survives(&format!("etcd://{}", relay.address()), |progress| {
            for _ in 0..2 {
                progress(10);
                relay.stop();
                // The other side of the partition is still served.
                there.put("there", b"", None).unwrap();
                let cut_off = etcd::connect(
                    &format!("etcd://{}", relay.address()).parse().unwrap(),
                    &TlsFiles::default(),
                );
                assert!(is_unavailable(&cut_off.unwrap_err()));
                relay.resume();
            }
            progress(10);
        });
    }

    #[test]
    fn a_lease_ends_by_etcds_own_clock_unless_it_is_kept_alive() {
        let etcd = EtcdCluster::start();
        let directory = connect(&etcd.address());
        let mut watch = directory.watch("", 0).unwrap();
        let grant = |name: &str, ttl_ms: u64| {
            // On a machine that stalls for a moment, the lease may end before it is used.
            let lease = loop {
                let lease = directory.lease_grant(Duration::from_millis(ttl_ms)).unwrap();
                match directory.put(name, b"", Some(lease.id)) {
                    Err(DirectoryError::LeaseGone(_)) => {}
                    put => break put.map(|_| lease).unwrap(),
                }
            };
            assert_eq!(event(&mut *directory.watch(name, 1).unwrap()).key, name);
            lease
        };
        // etcd rounds the first up to a second. When `long` has ended, `kept` is older than its
        // time to live, and exists because it was kept alive.
        let (short, kept, long) = (grant("short", 100), grant("kept", 3000), grant("long", 4000));
        let mut ended = Vec::new();
        while !ended.contains(&"long".to_owned()) {
            directory.lease_keep_alive(kept.id).unwrap();
            let event = watch.next(Duration::from_millis(100)).unwrap();
            ended.extend(event.filter(|event| event.kind == WatchEventKind::Delete).map(|event| event.key));
        }
        assert_eq!(ended, ["short", "long"]);
        for lease in [short, long] {
            assert_eq!(directory.lease_keep_alive(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
        }
        assert!(directory.get("kept").unwrap().is_some());
        let ended = event(&mut *watch);
        assert_eq!((ended.key.as_str(), ended.kind), ("kept", WatchEventKind::Delete));
    }

    #[test]
    fn an_absent_etcd_is_reported_within_the_time_limit() {
        // The port is free again, so connections are refused.
        let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("etcd://{}", held.local_addr().unwrap());
        drop(held);
        let error = etcd::connect(&address.parse().unwrap(), &TlsFiles::default()).unwrap_err();
        assert!(is_unavailable(&error) && error.to_string().contains(&address), "{error}");
        assert!(error.to_string().to_lowercase().contains("refused"), "{error}");
    }
}
