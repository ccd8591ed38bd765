//! Unmodified programs on the pool: their page faults, served through userfaultfd.
//!
//! - [`monitor`]: decides. A state machine that sees the world through [`edge::Edge`] and [`kernel::Kernel`], so that the simulator drives the
//!   very code that serves programs.
//! - [`serve`]: the real edge and its threads: [`uffd`] calls, the program's worker, `/proc`.
//! - [`journal`]: what must be heeded even if the agent dies, in memory that outlives it.
//! - [`stream`], [`areas`], [`maps`], [`stats`]: how far to fill ahead, what is registered, what is worth paging, what happened.
//! - [`pagemap`]: which pages are present.
//!
//! This crate does not know where pages go when they leave: that is the pager's.

pub mod areas;
pub mod edge;
#[cfg(test)]
mod golden_tests;
pub mod journal;
pub mod kernel;
pub mod maps;
pub mod monitor;
pub mod pagemap;
pub mod serve;
pub mod stats;
pub mod stream;
pub mod uffd;
pub mod worker;

pub use areas::{Area, Areas};
pub use edge::{Edge, EvictedBatch, SenderEvent};
pub use monitor::{Monitor, TurnOutcome};
pub use stats::FaultStats;
