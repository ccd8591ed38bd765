//! One-sided verbs: READ, WRITE, compare-and-swap, fetch-and-add and messages between
//! reliable connected endpoints, with keys that open ranges of the peer's memory.
//!
//! The interface has the shape of RDMA verbs, so that a NIC can stand behind it: work is
//! *posted* in batches, *completions* are polled, every error is a completion with a cause.
//! Providers: [`shm`] (two processes of one machine), [`tcp`] (a software RNIC over a network), [`verbs`] (RDMA devices) and [`sim`] (seeded virtual time).
//!
//! This crate does not know what the memory is used for.

pub mod control;
mod forward;
#[cfg(test)]
mod golden_tests;
pub mod handshake;
pub mod key_table;
pub mod keys;
pub mod lasting;
pub mod limits;
mod locals;
pub mod mail;
pub mod memory;
mod reach;
pub mod rescue;
pub mod shm;
pub mod sim;
pub mod tables;
pub mod target;
pub mod tcp;
pub mod view;
pub mod wake;
pub mod work;

pub use handshake::ClusterKey;
pub use key_table::{KeyEntry, KeyTable};
pub use keys::{REGIONS_LIMIT, WINDOWS_LIMIT};
pub use memory::Memory;
pub use reach::{Reach, VerbsProvider, WITHOUT_VERBS};
pub use rustix::event::PollFd;
pub use target::{Access, Host, Identity, Region, Scope, Served, Target, TargetError, Tenant, WindowSpec};
pub use view::View;
pub use work::{
    Completion, Endpoint, EndpointError, Key, Late, Limits, LocalKey, LocalSlice, PostError, RemoteAddr,
    Verb, Work, WorkError,
};
