//! The implementations, behind one face.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_directory::clock::ManualClock;
use aquifer_directory::embedded::{Embedded, ServeOptions, Server, connect};
use aquifer_directory::{
    Directory, DirectoryError, Entry, Lease, LeaseId, Listing, Transaction, TransactionOutcome, Watch,
    limits, sim,
};
use aquifer_directory_etcd::{self as etcd, TlsFiles};

/// A directory under test.
pub trait Harness {
    /// One more caller's access to it.
    fn directory(&self) -> Arc<dyn Directory>;
    /// Let its time pass.
    fn advance(&self, by: Duration);
    /// So much has happened, up to `revision`, that changes before that may be forgotten: those who forget only when they are told do
    /// it now.
    fn forget(&self, _revision: u64) {}
}

/// A file in this process.
pub struct InProcess {
    directory: Embedded,
    clock: Arc<ManualClock>,
    _folder: tempfile::TempDir,
}

impl InProcess {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::default());
        let directory =
            Embedded::open_with_clock(&folder.path().join("directory.redb"), clock.clone()).unwrap();
        Self { directory, clock, _folder: folder }
    }
}

impl Harness for InProcess {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.directory.clone())
    }

    fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.directory.tick().unwrap();
    }
}

/// A file served over a socket.
pub struct OverSocket {
    // Dropped in this order: the server before its folder.
    _server: Server,
    inner: InProcess,
}

impl OverSocket {
    pub fn start() -> Self {
        let inner = InProcess::start();
        let socket = inner._folder.path().join("socket");
        let server = Server::start(inner.directory.clone(), &socket, ServeOptions::default()).unwrap();
        Self { _server: server, inner }
    }
}

impl Harness for OverSocket {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(connect(&self.inner._folder.path().join("socket")).unwrap())
    }

    fn advance(&self, by: Duration) {
        self.inner.advance(by);
    }
}

/// The simulated one.
pub struct Simulated {
    world: sim::World,
}

impl Simulated {
    pub fn start() -> Self {
        Self { world: sim::World::new(1) }
    }
}

impl Harness for Simulated {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.world.host(1))
    }

    fn advance(&self, by: Duration) {
        self.world.advance(by);
    }
}

/// A real etcd.
///
/// Its time cannot be moved, so leases are granted for longer than a test takes, and ended by this harness when their time would be up: by
/// a revocation, which is what etcd itself does then. That etcd's own clock ends leases is tested elsewhere.
pub struct InEtcd {
    server: aquifer_tests_support::Etcd,
    leases: Arc<Mutex<Leases>>,
}

#[derive(Debug, Default)]
struct Leases {
    now: Duration,
    /// Life and end of each.
    living: HashMap<LeaseId, (Duration, Duration)>,
}

impl InEtcd {
    pub fn start() -> Self {
        Self { server: aquifer_tests_support::Etcd::start(), leases: Arc::default() }
    }

    fn connect(&self) -> etcd::Etcd {
        let address = self.server.address().parse().unwrap();
        etcd::connect(&address, &TlsFiles::default()).unwrap()
    }
}

impl Harness for InEtcd {
    fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(Timed { directory: self.connect(), leases: Arc::clone(&self.leases) })
    }

    fn advance(&self, by: Duration) {
        let mut leases = self.leases.lock().unwrap();
        leases.now += by;
        let now = leases.now;
        let mut due: Vec<_> = leases.living.iter().filter(|(_, (_, end))| *end <= now).collect();
        due.sort_unstable_by_key(|(_, (_, end))| *end);
        let due: Vec<_> = due.into_iter().map(|(id, _)| *id).collect();
        let directory = self.connect();
        for id in due {
            leases.living.remove(&id);
            match directory.lease_revoke(id) {
                Ok(()) | Err(DirectoryError::LeaseGone(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn forget(&self, revision: u64) {
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

/// A directory whose leases live by the harness' clock.
#[derive(Debug)]
struct Timed {
    directory: etcd::Etcd,
    leases: Arc<Mutex<Leases>>,
}

impl Directory for Timed {
    fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError> {
        self.directory.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.directory.list(prefix)
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.directory.transaction(transaction)
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        let is_fit = (limits::TTL_MIN..=limits::TTL_MAX).contains(&ttl);
        let lease = self.directory.lease_grant(if is_fit { limits::TTL_MAX } else { ttl })?;
        let mut leases = self.leases.lock().unwrap();
        let end = leases.now + ttl;
        leases.living.insert(lease.id, (ttl, end));
        Ok(lease)
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.directory.lease_keep_alive(id)?;
        let mut leases = self.leases.lock().unwrap();
        let now = leases.now;
        if let Some((ttl, end)) = leases.living.get_mut(&id) {
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
