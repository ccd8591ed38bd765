//! Pages unmodified programs: resolves their page faults through userfaultfd.
//!
//! - `monitor`: the state machine that resolves faults and chooses evictions. It acts through
//!   [`Edge`] and [`Kernel`], so that the simulator runs the same code.
//! - [`serve`]: the edge of real programs and its threads.
//! - `uffd`, `worker`, `maps`, `pagemap`: requests to the kernel and to a program's worker.
//! - `journal`: events that are read and not yet applied, in memory that outlives the agent.
//! - [`send_loop`]: the turns of a run's sender.
//! - [`takeover`]: recovery of a program whose agent has died.
//! - `areas`, `stream`, `stats`: sets of pages, detection of sequential access, statistics.
//!
//! The crate does not know where evicted pages go: that is the part of the pager.

mod areas;
mod edge;
#[cfg(test)]
mod golden_tests;
mod journal;
mod kernel;
mod maps;
mod monitor;
mod mutation;
mod pagemap;
pub mod send_loop;
pub mod serve;
mod stats;
mod stream;
pub mod takeover;
mod uffd;
mod worker;

pub use areas::{Area, Areas};
pub use edge::{Edge, EvictedBatch, OtherPrograms, SenderEvent};
pub use journal::{Journal, JournalContents, PersistentRanges};
pub use kernel::{
    FillOutcome, FillSource, FillStop, Kernel, MoreMessages, MoveOutcome, PageFault, ProgramEnded,
    UffdMessage,
};
pub use monitor::{Monitor, ResumeState, TurnOutcome};
pub use mutation::Mutation;
pub use stats::{FaultStats, FaultWait};
pub use uffd::{MESSAGE_BYTES, to_bytes};
pub use worker::WorkerPort;
