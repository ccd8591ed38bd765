//! A directory for one machine: a redb file, in process or behind a Unix socket.
//!
//! The socket serves the processes of one user. The formats are in `docs/formats/directory.md`.

mod client;
#[doc(hidden)]
pub mod frame;
mod server;
mod socket;
mod store;
pub mod wire;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, RunningClock};
use crate::engine::{Engine, EngineWatch};
use crate::model::{DirectoryEntry, Lease, LeaseId, Listing, Transaction, TransactionOutcome};
use crate::{Directory, DirectoryError, Watch};

pub use client::{DirectoryClient, connect};
pub use server::{DirectoryServer, DirectoryServerOptions};
pub use store::FORMAT;
use store::RedbStore;

/// A directory in this process. Clones share the directory.
#[derive(Clone, Debug)]
pub struct EmbeddedDirectory {
    engine: Arc<Engine>,
}

impl EmbeddedDirectory {
    /// Opens the file, or creates it with mode 0600.
    ///
    /// Each lease in the file gets its full time to live again. While this process is stopped,
    /// leases do not expire.
    ///
    /// # Errors
    /// [`DirectoryError::Format`] if the file is damaged, of another version or of another program;
    /// [`DirectoryError::Storage`] if it cannot be read, is open in another process, or no thread
    /// can be started.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        let clock = RunningClock::start().map_err(|error| DirectoryError::Storage {
            path: path.display().to_string(),
            cause: format!("cannot start the thread of its clock: {error}"),
        })?;
        Self::open_with_clock(path, Arc::new(clock))
    }

    /// Opens the file, with `clock` as the clock of leases.
    ///
    /// # Errors
    /// The errors of [`EmbeddedDirectory::open`].
    pub fn open_with_clock(path: &Path, clock: Arc<dyn Clock>) -> Result<Self, DirectoryError> {
        let (store, core) = RedbStore::open(path, clock.now_ms())?;
        Ok(Self { engine: Arc::new(Engine::new(core, Box::new(store), clock)) })
    }

    /// Ends the leases whose time is up, and wakes the watches that report it.
    ///
    /// Every other call does this first, so a call is needed only after a manual clock was
    /// advanced.
    ///
    /// # Errors
    /// [`DirectoryError::Storage`].
    pub fn tick(&self) -> Result<(), DirectoryError> {
        self.engine.tick()
    }

    fn engine_watch(&self, prefix: &str, from: u64) -> Result<EngineWatch, DirectoryError> {
        self.engine.watch(prefix, from)
    }
}

impl Directory for EmbeddedDirectory {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
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
