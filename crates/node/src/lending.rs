//! How much the node lends: what is asked of it at run time, and what it could do of that.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Shared by who is asked, who does it, and who tells of it.
#[derive(Debug)]
pub(crate) struct Lending {
    wanted_bytes: AtomicU64,
    lent_bytes: AtomicU64,
    held_up: Mutex<Option<HeldUp>>,
}

/// Why it does not lend what is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum HeldUp {
    /// Sections are never taken from those who use them.
    #[error("the rest is in use, and follows when it is given back")]
    InUse,
    /// The RDMA device keeps what it was once given.
    #[error("over verbs memory is pinned for good: start the node anew with another --memory")]
    Pinned,
    /// This machine has no more.
    #[error("the machine has no more memory to spare")]
    NoMemory,
}

impl Lending {
    /// So much is lent, and nothing else is wanted.
    pub const fn new(bytes: u64) -> Self {
        let (wanted_bytes, lent_bytes) = (AtomicU64::new(bytes), AtomicU64::new(bytes));
        Self { wanted_bytes, lent_bytes, held_up: Mutex::new(None) }
    }

    /// Ask for so much.
    pub fn want(&self, bytes: u64) {
        self.wanted_bytes.store(bytes, Relaxed);
    }

    /// What is asked for.
    pub fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes.load(Relaxed)
    }

    /// What is lent.
    pub fn lent_bytes(&self) -> u64 {
        self.lent_bytes.load(Relaxed)
    }

    /// Why it is not what is asked for, if that is known.
    pub fn held_up(&self) -> Option<HeldUp> {
        *self.held_up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Say what came of it.
    pub fn tell(&self, lent_bytes: u64, held_up: Option<HeldUp>) {
        *self.held_up.lock().unwrap_or_else(PoisonError::into_inner) = held_up;
        self.lent_bytes.store(lent_bytes, Relaxed);
    }
}
