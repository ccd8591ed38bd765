//! A directory for one machine: a redb file, in process or served to the user's other processes over a Unix socket.

mod client;
mod frame;
mod server;
mod socket;
mod store;
pub mod wire;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::engine::Engine;
use crate::model::{Entry, Lease, LeaseId, Listing, Transaction, TransactionOutcome};
use crate::{Directory, DirectoryError, Watch};

pub use client::{Client, connect};
pub use server::{ServeOptions, Server, serve};
pub use store::FORMAT;
use store::RedbStore;

/// The directory in this process. Clones are handles on the same one.
#[derive(Clone, Debug)]
pub struct Embedded {
    engine: Arc<Engine>,
}

impl Embedded {
    /// Open the file, or create it (mode 0600). After a restart every lease has its full time again.
    ///
    /// # Errors
    /// The file is damaged, of another version, another program's, or open in another process.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        Self::open_with_clock(path, Arc::new(SystemClock::default()))
    }

    /// Open the file, with leases measured by `clock`.
    ///
    /// # Errors
    /// As [`Embedded::open`].
    pub fn open_with_clock(path: &Path, clock: Arc<dyn Clock>) -> Result<Self, DirectoryError> {
        let (store, core) = RedbStore::open(path, clock.now_ms())?;
        Ok(Self { engine: Arc::new(Engine::new(core, Box::new(store), clock)) })
    }

    /// End the leases whose time is up, and wake the watchers who see it. Every call does so first;
    /// only a clock that was moved by hand needs this.
    ///
    /// # Errors
    /// The file could not be written.
    pub fn tick(&self) -> Result<(), DirectoryError> {
        self.engine.tick()
    }

    fn engine_watch(&self, prefix: &str, from: u64) -> Result<crate::engine::EngineWatch, DirectoryError> {
        self.engine.watch(prefix, from)
    }
}

impl Directory for Embedded {
    fn get(&self, key: &str) -> Result<Option<Entry>, DirectoryError> {
        self.engine.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.engine.list(prefix)
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        self.engine.transaction(transaction)
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.engine.lease_grant(ttl)
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.engine.lease_keep_alive(id)
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.engine.lease_revoke(id)
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        Ok(Box::new(self.engine.watch(prefix, from_revision)?))
    }
}
