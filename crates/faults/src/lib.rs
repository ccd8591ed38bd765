//! Pages unmodified programs: resolves their page faults through userfaultfd.
//!
//! - [`monitor`]: the state machine that resolves faults and chooses evictions. It acts through
//!   [`edge::Edge`] and [`kernel::Kernel`], so that the simulator runs the same code.
//! - [`serve`]: the edge of real programs and its threads.
//! - [`uffd`], [`worker`], [`maps`], [`pagemap`]: requests to the kernel and to a program's worker.
//! - [`journal`]: events that are read and not yet applied, in memory that outlives the agent.
//! - [`areas`], [`stream`], [`stats`]: sets of pages, detection of sequential access, statistics.
//!
//! The crate does not know where evicted pages go: that is the part of the pager.

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
