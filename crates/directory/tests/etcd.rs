//! A real etcd that dies, comes back, loses its leader, is cut off: calls fail as unavailable or succeed, never wrong, and a watch has no
//! gap. Beside that, what only an etcd has: other users' keys, its own clock, TLS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aquifer_directory::{
    Compare, Directory, DirectoryError, Event, EventKind, Operation, Transaction, TransactionOutcome, Watch,
};
use aquifer_directory_etcd::{self as etcd, EtcdAddress, TlsFiles};
use aquifer_tests_support::{Etcd, Relay};

/// Long enough for any machine; a test that works never waits for it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than etcd is away in any test.
const TTL: Duration = Duration::from_secs(300);

fn connect(address: &str) -> etcd::Etcd {
    etcd::connect(&address.parse().unwrap(), &TlsFiles::default()).unwrap()
}

fn is_unavailable(error: &DirectoryError) -> bool {
    matches!(error, DirectoryError::Unavailable { .. })
}

fn event(watch: &mut dyn Watch) -> Event {
    watch.next(PATIENCE).unwrap().expect("an event is due")
}

/// The next event, whatever it takes: a watch that fails is taken up again from where it was.
fn event_over_failures(
    directory: &dyn Directory,
    watch: &mut Box<dyn Watch>,
    prefix: &str,
    last: u64,
) -> Event {
    loop {
        match watch.next(PATIENCE) {
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

/// Repeat what is unavailable until it is not.
fn until_available<T>(mut call: impl FnMut() -> Result<T, DirectoryError>) -> Result<T, DirectoryError> {
    loop {
        match call() {
            Err(error) if is_unavailable(&error) => {}
            answer => return answer,
        }
    }
}

/// One writer that counts in a key while the etcd suffers, and knows of each step whether it was made, or may have been.
struct Counter {
    done: AtomicBool,
    /// Steps that were acknowledged.
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

    /// Count up by compare-and-set; each value is written once, whatever happens on the way. Returns the last value.
    fn run(&self, directory: &dyn Directory) -> u64 {
        let mut written = 0;
        while !self.done.load(Ordering::SeqCst) || self.acknowledged.load(Ordering::SeqCst) < 20 {
            let found = until_available(|| directory.get("n/count")).unwrap();
            let (value, version) = found.map_or((0, 0), |entry| (number(&entry.value), entry.version));
            assert!(value == written || value == written + 1, "{value} was never written after {written}");
            let transaction = Transaction {
                compares: vec![Compare::version("n/count", version)],
                operations: vec![Operation::put("n/count", (value + 1).to_le_bytes(), None)],
            };
            match directory.transaction(&transaction) {
                Ok(TransactionOutcome::Committed { revision }) => {
                    assert!(revision > version);
                    self.acknowledged.fetch_add(1, Ordering::SeqCst);
                    written = value + 1;
                }
                // Made late, by a call that was unavailable.
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

/// A writer, a watcher and a lease, while `suffering` does its worst. In the end everything must add up.
fn survives(address: &str, suffering: impl FnOnce(&dyn Fn(u64))) {
    let (writer, watcher, keeper) = (connect(address), connect(address), connect(address));
    let lease = until_available(|| keeper.lease_grant(TTL)).unwrap();
    until_available(|| keeper.put("leased", b"", Some(lease.id))).unwrap();
    let counter = Counter::new();
    let mut watch = until_available(|| watcher.watch("n/", 1)).unwrap();
    std::thread::scope(|scope| {
        let count = scope.spawn(|| counter.run(&writer));
        // Waits for so many more steps to be acknowledged, as a change that is seen.
        let progress = |steps: u64| {
            let from = counter.acknowledged.load(Ordering::SeqCst);
            while counter.acknowledged.load(Ordering::SeqCst) < from + steps {
                assert!(!count.is_finished(), "the writer has failed");
                std::thread::yield_now();
            }
        };
        suffering(&progress);
        counter.done.store(true, Ordering::SeqCst);
        let last = count.join().unwrap();
        assert!(last >= counter.acknowledged.load(Ordering::SeqCst));
        // Every value, once, in order.
        let mut revision = 0;
        for value in 1..=last {
            let Event { kind: EventKind::Put { value: seen, .. }, revision: at, .. } =
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
fn an_etcd_that_is_killed_and_started_again_loses_nothing() {
    let mut etcd = Etcd::start();
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
fn a_watch_outlives_a_restart_by_itself() {
    let mut etcd = Etcd::start();
    let directory = connect(&etcd.address());
    let mut watch = directory.watch("w/", 0).unwrap();
    directory.put("w/1", b"", None).unwrap();
    assert_eq!(event(&mut *watch).key, "w/1");
    etcd.member(0).kill();
    etcd.member(0).restart();
    let operations = vec![Operation::put("w/2", "", None), Operation::put("w/3", "", None)];
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
fn the_death_of_a_leader_of_three_is_survived() {
    let mut etcd = Etcd::start_with(3, &Default::default());
    let address = etcd.address();
    survives(&address, |progress| {
        progress(10);
        // Whoever leads is among the first two, or is killed third, when the others are back.
        for member in 0..3 {
            etcd.member(member).kill();
            progress(10);
            etcd.member(member).restart();
        }
    });
}

#[test]
fn connections_that_break_all_the_time_lose_nothing() {
    let etcd = Etcd::start();
    let relay =
        Relay::start("127.0.0.1:0".parse().unwrap(), etcd.members()[0].client(), Duration::ZERO).unwrap();
    survives(&format!("etcd://{}", relay.address()), |progress| {
        for _ in 0..20 {
            progress(3);
            relay.cut();
            relay.resume();
        }
    });
}

/// A member that stands still is passed over by those who know others.
#[test]
fn a_member_that_stands_still_is_passed_over() {
    let etcd = Etcd::start_with(3, &Default::default());
    let relay =
        Relay::start("127.0.0.1:0".parse().unwrap(), etcd.members()[0].client(), Duration::ZERO).unwrap();
    let address = format!("etcd://{},{}", relay.address(), etcd.members()[1].client());
    let directory = connect(&address);
    directory.put("k", b"1", None).unwrap();
    relay.stop();
    assert_eq!(directory.get("k").unwrap().unwrap().value, b"1", "a question is asked again of another");
    directory.put("k", b"2", None).unwrap();
    assert_eq!(directory.get("k").unwrap().unwrap().value, b"2");
}

/// Epochs go on over restarts, and over all who ask.
#[test]
fn epochs_increase_over_restarts_and_callers() {
    let mut etcd = Etcd::start();
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
fn clusters_in_one_etcd_do_not_see_each_other() {
    let etcd = Etcd::start();
    let [one, two] = ["one", "on"].map(|name| connect(&format!("{}/{name}", etcd.address())));
    let mut watch = one.watch("", 0).unwrap();
    two.put("nodes/1", b"two", None).unwrap();
    let lease = two.lease_grant(TTL).unwrap();
    two.put("agents/1", b"", Some(lease.id)).unwrap();
    one.lease_grant(TTL).unwrap();
    assert_eq!(one.get("nodes/1").unwrap(), None);
    assert!(one.list("").unwrap().entries.is_empty(), "not even what counts leases");
    one.put("nodes/1", b"one", None).unwrap();
    assert_eq!(event(&mut *watch).kind, EventKind::Put { value: b"one".to_vec(), lease: None });
    assert_eq!(two.get("nodes/1").unwrap().unwrap().value, b"two");
    assert_eq!(two.list("").unwrap().entries.len(), 2);
}

#[test]
fn tls_without_its_files_is_refused_with_a_reason() {
    let address: EtcdAddress = "etcds://127.0.0.1:1".parse().unwrap();
    let refusal = |files: TlsFiles| match etcd::connect(&address, &files) {
        Err(DirectoryError::Refused { why, .. }) => why,
        other => panic!("it was to be refused, not {other:?}"),
    };
    assert!(refusal(TlsFiles::default()).contains("certificate of who signed"));
    let missing = TlsFiles { ca: Some("/nonexistent/ca.pem".into()), ..Default::default() };
    assert!(refusal(missing).contains("/nonexistent/ca.pem"));
}

/// Certificates as a cluster's own authority makes them, by openssl.
fn certificates(folder: &std::path::Path) {
    let script = r#"
set -e
authority() { openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=$1" -keyout "$1.key" -out "$1.pem"; }
signed() {
    openssl req -newkey rsa:2048 -nodes -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
    printf 'subjectAltName=IP:127.0.0.1\n' >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days 2 -extfile "$1.ext" -out "$1.pem"
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
    fn a_minority_that_is_left_serves_nobody_and_says_so() {
        let mut etcd = Etcd::start_with(3, &Default::default());
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
    fn tls_lets_in_those_whose_certificate_is_known_and_nobody_else() {
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
        let etcd = Etcd::start_with(
            1,
            &aquifer_tests_support::etcd::Options { tls: Some(tls), ..Default::default() },
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

    /// As a partition does it: bytes go nowhere, nobody is told.
    #[test]
    fn a_client_that_is_cut_off_in_silence_finds_out_and_comes_back() {
        let etcd = Etcd::start();
        let relay =
            Relay::start("127.0.0.1:0".parse().unwrap(), etcd.members()[0].client(), Duration::ZERO).unwrap();
        let there = connect(&etcd.address());
        survives(&format!("etcd://{}", relay.address()), |progress| {
            for _ in 0..2 {
                progress(10);
                relay.stop();
                // The other side of the partition goes on.
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
    fn a_lease_ends_by_etcds_own_clock_and_lives_while_it_is_kept_alive() {
        let etcd = Etcd::start();
        let directory = connect(&etcd.address());
        let mut watch = directory.watch("", 0).unwrap();
        let grant = |name: &str, ttl_ms: u64| {
            // On a machine that stands still for a moment it is over before it is used.
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
        // The first is rounded up to a second. The longest is let go of; when it has ended, the one that is kept alive is over its first life.
        let (short, kept, long) = (grant("short", 100), grant("kept", 3000), grant("long", 4000));
        let mut ended = Vec::new();
        while !ended.contains(&"long".to_owned()) {
            directory.lease_keep_alive(kept.id).unwrap();
            let event = watch.next(Duration::from_millis(100)).unwrap();
            ended.extend(event.filter(|event| event.kind == EventKind::Delete).map(|event| event.key));
        }
        assert_eq!(ended, ["short", "long"]);
        for lease in [short, long] {
            assert_eq!(directory.lease_keep_alive(lease.id), Err(DirectoryError::LeaseGone(lease.id)));
        }
        assert!(directory.get("kept").unwrap().is_some());
        let ended = event(&mut *watch);
        assert_eq!((ended.key.as_str(), ended.kind), ("kept", EventKind::Delete));
    }

    #[test]
    fn nobody_there_is_said_within_the_calls_time() {
        // Bound and not listening: connections are refused.
        let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("etcd://{}", held.local_addr().unwrap());
        drop(held);
        let error = etcd::connect(&address.parse().unwrap(), &TlsFiles::default()).unwrap_err();
        assert!(is_unavailable(&error) && error.to_string().contains(&address), "{error}");
        assert!(error.to_string().to_lowercase().contains("refused"), "{error}");
    }
}
