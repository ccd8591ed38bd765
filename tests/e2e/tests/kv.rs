//! Key-value stores: the commands, and stores whose service and clients are killed.

use std::collections::HashMap;
use std::io::Write;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_kv::{KvError, KvStore};
use aquifer_objects::client::{ClientError, HeapClient};
use aquifer_tests_e2e::checked::Random;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::restart_heaps;
use aquifer_tests_e2e::{Cluster, eventually};

use super::heaps::{OnDrop, client, remote_client, up};

const KEYS: usize = 200;
const SIZES: [usize; 5] = [0, 20, 300, 4000, 60_000];

fn kv(cluster: &Cluster, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = cluster.command();
    command.arg("kv").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("aquifer can be started");
    // A command that reads no input may have ended.
    let _ = child.stdin.take().expect("it is a pipe").write_all(input);
    child.wait_with_output().expect("it ends")
}

fn done(cluster: &Cluster, arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let output = kv(cluster, arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    output.stdout
}

fn refused(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = kv(cluster, arguments, b"");
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", text(&output.stdout));
    text(&output.stderr).to_owned()
}

#[test]
fn values_are_put_read_scanned_and_deleted_by_commands() {
    let cluster = up();
    assert!(refused(&cluster, &["get", "a"]).contains("there is no store of this name"));
    done(&cluster, &["put", "a", "one"], b"");
    done(&cluster, &["put", "a", "two"], b"");
    assert_eq!(done(&cluster, &["get", "a"], b""), b"two");
    let large: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    done(&cluster, &["put", "large"], &large);
    assert!(done(&cluster, &["get", "large"], b"") == large);
    done(&cluster, &["put", "large", ""], b"");
    assert_eq!(done(&cluster, &["get", "large"], b""), b"");
    done(&cluster, &["put", "a\nb", "x\ty"], b"");
    assert_eq!(done(&cluster, &["scan", "--prefix", "a\n", "--values"], b""), b"a\\nb\tx\\ty\n");
    assert_eq!(text(&done(&cluster, &["scan"], b"")).lines().count(), 3);
    assert_eq!(text(&done(&cluster, &["scan", "--limit", "2"], b"")).lines().count(), 2);
    assert_eq!(refused(&cluster, &["del", "a", "other"]), "aquifer: key `other` has no value\n");
    assert_eq!(refused(&cluster, &["get", "a"]), "aquifer: key `a` has no value\n");
    assert!(refused(&cluster, &["put", "", "x"]).contains("a key has 1 to 32000 bytes"));
    done(&cluster, &["create", "--store", "sessions", "--keys", "1000000"], b"");
    assert!(refused(&cluster, &["create", "--store", "sessions"]).contains("already"));
    assert_eq!(done(&cluster, &["list"], b""), b"default\nsessions\n");
    ["sessions", "default"].iter().for_each(|store| drop(done(&cluster, &["drop", "--store", store], b"")));
    assert_eq!(done(&cluster, &["list"], b""), b"");
}

/// A client with the expected values of its keys.
pub(super) struct CheckedStore {
    store: KvStore<HeapClient>,
    name: String,
    /// The values that each key may have: several after operations whose outcome is unknown.
    keys: HashMap<String, Vec<Option<Vec<u8>>>>,
    random: Random,
    /// Operations whose outcome is unknown, because the service was killed.
    pub unknown: u64,
}

impl CheckedStore {
    pub fn new(mut client: HeapClient, name: &str, seed: u64) -> Self {
        match KvStore::create(&mut client, "checked", 1000) {
            Ok(()) | Err(KvError::Exists) => {}
            Err(error) => panic!("{error}"),
        }
        let store = KvStore::open(client, "checked").expect("it was made");
        Self { store, name: name.to_owned(), keys: HashMap::new(), random: Random(seed), unknown: 0 }
    }

    /// The result, or none if its outcome is unknown.
    fn known<T>(&mut self, result: Result<T, KvError<ClientError>>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(
                KvError::Objects(ClientError::Connection(_) | ClientError::Timeout)
                | KvError::NotCreated(ClientError::Connection(_) | ClientError::Timeout),
            ) => {
                self.unknown += 1;
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub fn operate(&mut self) {
        let key = format!("{}:{}", self.name, self.random.below(KEYS));
        match self.random.below(8) {
            0..3 => self.put(&key),
            3 => self.delete(&key),
            _ => self.check(&key),
        }
    }

    fn put(&mut self, key: &str) {
        let size = SIZES[self.random.below(SIZES.len())];
        let stamp = self.random.below(1 << 30).to_le_bytes();
        let value: Vec<u8> = stamp.into_iter().cycle().take(size).collect();
        let result = self.store.put(key.as_bytes(), &value);
        self.note(key, Some(value), result.map(|()| true));
    }

    fn delete(&mut self, key: &str) {
        let result = self.store.delete(key.as_bytes());
        self.note(key, None, result);
    }

    /// Records the values that a key may have after an operation.
    fn note(&mut self, key: &str, value: Option<Vec<u8>>, result: Result<bool, KvError<ClientError>>) {
        let is_known = self.known(result).is_some();
        let values = self.keys.entry(key.to_owned()).or_insert_with(|| vec![None]);
        if is_known {
            values.clear();
        }
        values.push(value);
    }

    /// Reads a key and compares it.
    fn check(&mut self, key: &str) {
        let result = self.store.get(key.as_bytes());
        let Some(found) = self.known(result) else { return };
        let values = self.keys.entry(key.to_owned()).or_insert_with(|| vec![None]);
        assert!(values.contains(&found), "{key} has another value than it can have: {found:?}");
        *values = vec![found];
    }

    pub fn check_all(&mut self) {
        let keys: Vec<String> = self.keys.keys().cloned().collect();
        keys.iter().for_each(|key| self.check(key));
    }
}

#[test]
fn a_store_outlives_services_that_are_killed() {
    const KILLS_MIN: usize = 4;
    const KILLS_MAX: usize = 100;
    let cluster = up();
    let (is_over, operations, interrupted) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let work = |client: HeapClient, name: &str, seed| {
        let mut store = CheckedStore::new(client, name, seed);
        while !is_over.load(Ordering::SeqCst) {
            let unknown = store.unknown;
            store.operate();
            operations.fetch_add(1, Ordering::SeqCst);
            interrupted.fetch_add(store.unknown - unknown, Ordering::SeqCst);
        }
        store.check_all();
    };
    // Both connect before the first kill.
    let (shared, remote) = (client(&cluster), remote_client(&cluster));
    std::thread::scope(|scope| {
        let work = &work;
        let workers =
            [scope.spawn(move || work(shared, "shared", 3)), scope.spawn(move || work(remote, "remote", 4))];
        let _end = OnDrop(&is_over);
        for kills in 0..KILLS_MAX {
            if kills >= KILLS_MIN && interrupted.load(Ordering::SeqCst) > 0 {
                break;
            }
            let before = operations.load(Ordering::SeqCst);
            let has_ended = || workers.iter().any(|worker| worker.is_finished());
            eventually("the programs to continue", || {
                (operations.load(Ordering::SeqCst) > before + 100 || has_ended()).then_some(())
            });
            assert!(!has_ended(), "a program has ended");
            restart_heaps(&cluster, 1);
        }
        is_over.store(true, Ordering::SeqCst);
        workers.into_iter().for_each(|worker| worker.join().expect("all is as it was written"));
    });
    assert!(interrupted.load(Ordering::SeqCst) > 0, "no operation was interrupted");
}
