//! How much the node lends: what is asked of it at run time, and what it could do of that.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use aquifer_directory::names::ResizeBlocker;

/// Shared by who is asked, who does it, and who tells of it.
#[derive(Debug)]
pub(crate) struct Lending {
    wanted_bytes: AtomicU64,
    told: Mutex<Told>,
}

/// What is so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Told {
    /// What is lent.
    pub lent_bytes: u64,
    /// What was asked for when that was done.
    pub wanted_bytes: u64,
    /// Why it is not the same, if that is known.
    pub held_up: Option<ResizeBlocker>,
}

impl Lending {
    /// So much is lent, and so much is wanted.
    pub const fn new(lent_bytes: u64, wanted_bytes: u64) -> Self {
        let told = Told { lent_bytes, wanted_bytes, held_up: None };
        Self { wanted_bytes: AtomicU64::new(wanted_bytes), told: Mutex::new(told) }
    }

    /// Ask for so much.
    pub fn want(&self, bytes: u64) {
        self.wanted_bytes.store(bytes, Relaxed);
    }

    /// What is asked for.
    pub fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes.load(Relaxed)
    }

    /// What was done.
    pub fn told(&self) -> Told {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Say what was done.
    pub fn tell(&self, told: Told) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = told;
    }
}
