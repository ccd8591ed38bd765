//! Faults: messages and answers of the directory that are lost, chosen by a seed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use aquifer_cache_cluster::channel::Interference;
use aquifer_cache_cluster::wire::Ask;
use aquifer_directory::embedded::EmbeddedDirectory;
use aquifer_directory::{
    Directory, DirectoryEntry, DirectoryError, Lease, LeaseId, Listing, Transaction, TransactionOutcome,
    Watch,
};

/// One message in this number is lost.
const LOST_ONE_IN: u64 = 12;

/// Decides which messages are lost.
#[derive(Debug)]
pub struct Faults {
    state: AtomicU64,
    is_active: AtomicBool,
    /// Whether the balancer gets no answers to its questions, so that it plans no moves.
    is_balancer_cut_off: AtomicBool,
    pub lost: AtomicU64,
}

impl Faults {
    pub fn new(seed: u64) -> Self {
        Self {
            state: AtomicU64::new(seed),
            is_active: AtomicBool::new(false),
            is_balancer_cut_off: AtomicBool::new(false),
            lost: AtomicU64::new(0),
        }
    }

    /// Loses no messages but those of the balancer.
    pub fn of_balancer() -> Self {
        Self { is_balancer_cut_off: AtomicBool::new(true), ..Self::new(0) }
    }

    /// Sets whether messages are lost from now on.
    pub fn set_active(&self, is_active: bool) {
        self.is_active.store(is_active, Ordering::SeqCst);
    }

    fn loses(&self) -> bool {
        // SplitMix64.
        let state = self.state.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::SeqCst);
        let mixed = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let is_lost =
            self.is_active.load(Ordering::SeqCst) && (mixed ^ mixed >> 31).is_multiple_of(LOST_ONE_IN);
        self.lost.fetch_add(u64::from(is_lost), Ordering::SeqCst);
        is_lost
    }
}

impl Interference for Faults {
    fn loses_question(&self, ask: &Ask) -> bool {
        match ask {
            Ask::Status => self.is_balancer_cut_off.load(Ordering::SeqCst),
            _ => self.loses(),
        }
    }

    fn loses_answer(&self, ask: &Ask) -> bool {
        !matches!(ask, Ask::Status) && self.loses()
    }
}

/// A directory whose transactions fail before or after they are carried out.
#[derive(Debug)]
pub struct FaultyDirectory {
    pub inner: EmbeddedDirectory,
    pub faults: std::sync::Arc<Faults>,
}

pub fn unavailable() -> DirectoryError {
    DirectoryError::Unavailable { address: "the test".to_owned(), cause: "lost".to_owned() }
}

impl Directory for FaultyDirectory {
    fn get(&self, key: &str) -> Result<Option<DirectoryEntry>, DirectoryError> {
        if self.faults.loses() { Err(unavailable()) } else { self.inner.get(key) }
    }

    fn list(&self, prefix: &str) -> Result<Listing, DirectoryError> {
        self.inner.list(prefix)
    }

    fn transaction(&self, transaction: &Transaction) -> Result<TransactionOutcome, DirectoryError> {
        if self.faults.loses() {
            return Err(unavailable());
        }
        let outcome = self.inner.transaction(transaction);
        // The transaction was carried out, and its answer may be lost.
        if self.faults.loses() { Err(unavailable()) } else { outcome }
    }

    fn lease_grant(&self, ttl: Duration) -> Result<Lease, DirectoryError> {
        self.inner.lease_grant(ttl)
    }

    fn lease_keep_alive(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.inner.lease_keep_alive(id)
    }

    fn lease_revoke(&self, id: LeaseId) -> Result<(), DirectoryError> {
        self.inner.lease_revoke(id)
    }

    fn watch(&self, prefix: &str, from_revision: u64) -> Result<Box<dyn Watch>, DirectoryError> {
        self.inner.watch(prefix, from_revision)
    }
}
