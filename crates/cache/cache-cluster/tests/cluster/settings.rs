//! The settings of a cache: which servers may join, and the replacement of settings of an earlier
//! version.

use std::sync::Arc;

use aquifer_cache::store::hash::HashSecret;
use aquifer_cache_cluster::records::{CacheSettings, JoinError, Registry};
use aquifer_directory::embedded::EmbeddedDirectory;
use aquifer_directory::{Directory, KeyOperation, Transaction};

const KEY: &str = "caches/test/settings";

struct Cache {
    _folder: tempfile::TempDir,
    directory: Arc<dyn Directory>,
    registry: Registry,
}

impl Cache {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let directory = EmbeddedDirectory::open(&folder.path().join("directory")).unwrap();
        let directory: Arc<dyn Directory> = Arc::new(directory);
        let registry = Registry::new(Arc::clone(&directory), "test");
        Self { _folder: folder, directory, registry }
    }

    fn put(&self, key: &str, value: &str) {
        let operations = vec![KeyOperation::put(key, value.as_bytes().to_vec(), None)];
        let put = Transaction { compares: Vec::new(), operations };
        assert!(self.directory.transaction(&put).unwrap().is_committed());
    }
}

fn settings(id: u64) -> CacheSettings {
    CacheSettings { partitions: 16, has_cas: true, id, hash_secret: HashSecret([id, id]) }
}

#[test]
fn all_servers_have_the_secret_of_the_first() {
    let cache = Cache::new();
    assert_eq!(cache.registry.settings().unwrap(), None);
    assert_eq!(cache.registry.join(&settings(1)).unwrap(), settings(1));
    assert_eq!(cache.registry.join(&settings(2)).unwrap(), settings(1));
    assert_eq!(cache.registry.settings().unwrap(), Some(settings(1)));
    let other = CacheSettings { partitions: 8, ..settings(3) };
    assert!(matches!(cache.registry.join(&other), Err(JoinError::Settings { .. })));
}

#[test]
fn settings_of_an_earlier_version_are_replaced_when_its_servers_have_stopped() {
    const SERVER: &str = r#"{"server":1,"epoch":10,"address":"10.0.0.1:1","memory_address":"10.0.0.1:2",
        "machine":"m","memory_socket":"/s","clients":[],"memory_bytes":64,"drains":false}"#;
    let cache = Cache::new();
    cache.put(KEY, r#"{"partitions":16,"has_cas":true,"id":7}"#);
    cache.put("caches/test/servers/1", SERVER);
    let refused = cache.registry.join(&settings(1)).unwrap_err();
    assert!(matches!(refused, JoinError::EarlierServers { .. }), "{refused}");
    assert!(refused.to_string().contains("stop all of them first"), "{refused}");
    let stop =
        Transaction { compares: Vec::new(), operations: vec![KeyOperation::delete("caches/test/servers/1")] };
    assert!(cache.directory.transaction(&stop).unwrap().is_committed());
    assert_eq!(cache.registry.join(&settings(1)).unwrap(), settings(1));
    assert_eq!(cache.registry.join(&settings(2)).unwrap(), settings(1));
    // A server of the earlier version reads these fields, and does not join.
    let record = cache.directory.get(KEY).unwrap().unwrap();
    assert!(record.value.starts_with(br#"{"version":2,"cache":{"#));
}

#[test]
fn settings_of_a_later_version_are_refused() {
    let cache = Cache::new();
    cache.put(KEY, r#"{"version":3}"#);
    let refused = cache.registry.join(&settings(1)).unwrap_err();
    assert!(matches!(refused, JoinError::Version { version: 3, .. }), "{refused}");
}
