//! The implementations under test, behind one trait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_directory::clock::ManualClock;
use aquifer_directory::embedded::{DirectoryServer, DirectoryServerOptions, EmbeddedDirectory, connect};
use aquifer_directory::{
    Directory, DirectoryEntry, DirectoryError, Lease, LeaseId, Listing, Transaction, TransactionOutcome,
    Watch, limits, sim,
};
use aquifer_directory_etcd::{self as etcd, TlsFiles};

/// A directory under test.
pub trait DirectoryHarness {
    /// Creates the access of one more user.
    fn directory(&self) -> Arc<dyn Directory>;
    /// Advances the directory's clock.
    fn advance(&self, by: Duration);
    /// Compacts changes up to `revision`, if the implementation does so on request only.
    fn compact(&self, _revision: u64) {}
}

/// A redb file in this process.
pub struct InProcess {
    directory: EmbeddedDirectory,
    clock: Arc<ManualClock>,
    _folder: tempfile::TempDir,
}

impl InProcess {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::default());
        let directory =
            EmbeddedDirectory::open_with_clock(&folder.path().join("directory.redb"), clock.clone()).unwrap();
        Self { directory, clock, _folder: folder }
    }
}

impl DirectoryHarness for InProcess {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.directory.clone())
    }

    fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.directory.tick().unwrap();
    }
}

/// A redb file behind a socket.
pub struct OverSocket {
    // Fields are dropped in order: the server before its folder.
    _server: DirectoryServer,
    inner: InProcess,
}

impl OverSocket {
    pub fn start() -> Self {
        let inner = InProcess::start();
        let socket = inner._folder.path().join("socket");
        let server =
            DirectoryServer::start(inner.directory.clone(), &socket, DirectoryServerOptions::default())
                .unwrap();
        Self { _server: server, inner }
    }
}

impl DirectoryHarness for OverSocket {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(connect(&self.inner._folder.path().join("socket")).unwrap())
    }

    fn advance(&self, by: Duration) {
        self.inner.advance(by);
    }
}

/// The simulated directory.
pub struct Simulated {
    world: sim::DirectoryWorld,
}

impl Simulated {
    pub fn start() -> Self {
        Self { world: sim::DirectoryWorld::new(1) }
    }
}

impl DirectoryHarness for Simulated {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.world.host(1))
    }

    fn advance(&self, by: Duration) {
        self.world.advance(by);
    }
}

/// A real etcd.
///
/// etcd's clock cannot be advanced.
/// The harness grants leases that are longer than a test, and revokes them when their time is up.
/// The tests in `etcd.rs` cover expiry by etcd's own clock.
pub struct InEtcd {
    server: aquifer_tests_support::EtcdCluster,
    leases: Arc<Mutex<GrantedLeases>>,
}

#[derive(Debug, Default)]
struct GrantedLeases {
    now: Duration,
    /// Time to live and end of each lease.
    active: HashMap<LeaseId, (Duration, Duration)>,
}

impl InEtcd {
    pub fn start() -> Self {
        Self { server: aquifer_tests_support::EtcdCluster::start(), leases: Arc::default() }
    }

    fn connect(&self) -> etcd::EtcdDirectory {
        let address = self.server.address().parse().unwrap();
        etcd::connect(&address, &TlsFiles::default()).unwrap()
    }
}

impl DirectoryHarness for InEtcd {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(EtcdWithClock { directory: self.connect(), leases: Arc::clone(&self.leases) })
    }

    fn advance(&self, by: Duration) {
        let mut leases = self.leases.lock().unwrap();
        leases.now += by;
        let now = leases.now;
        let mut due: Vec<_> = leases.active.iter().filter(|(_, (_, end))| *end <= now).collect();
        due.sort_unstable_by_key(|(_, (_, end))| *end);
        let due: Vec<_> = due.into_iter().map(|(id, _)| *id).collect();
        let directory = self.connect();
        for id in due {
            leases.active.remove(&id);
            match directory.lease_revoke(id) {
                Ok(()) | Err(DirectoryError::LeaseGone(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn compact(&self, revision: u64) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut client =
                etcd_client::Client::connect([self.server.members()[0].client().to_string()], None)
                    .await
                    .unwrap();
            client.compact(i64::try_from(revision).unwrap(), None).await.unwrap();
        });
    }
}

/// An etcd whose leases end by the harness' clock.
#[derive(Debug)]
struct EtcdWithClock {
    directory: etcd::EtcdDirectory,
    leases: Arc<Mutex<GrantedLeases>>,
}

impl Directory for EtcdWithClock {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        self.directory.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.directory.list(prefix)
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.directory.transaction(transaction)
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        let is_valid = (limits::TTL_MIN..=limits::TTL_MAX).contains(&ttl);
        let lease = self.directory.lease_grant(if is_valid { limits::TTL_MAX } else { ttl })?;
        let mut leases = self.leases.lock().unwrap();
        let end = leases.now + ttl;
        leases.active.insert(lease.id, (ttl, end));
        Ok(lease)
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.directory.lease_keep_alive(id)?;
        let mut leases = self.leases.lock().unwrap();
        let now = leases.now;
        if let Some((ttl, end)) = leases.active.get_mut(&id) {
            *end = now + *ttl;
        }
        Ok(())
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.directory.lease_revoke(id)
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        self.directory.watch(prefix, from_revision)
    }
}
