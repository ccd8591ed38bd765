//! The pager: volumes of 4 KiB pages that live with the program, in the host's mempool, or on memory nodes.
//!
//! - [`volume`]: which page is where, and the steps from place to place: a pure state machine on [`page`] words in a
//!   [`table`].
//! - [`mempool`], [`budget`]: the host's cache in blocks, and each run's share of it and of resident memory.
//! - [`slabs`], [`filler`]: extents of the pool that hold pages, shared by the volumes of a run, and which is filled next.
//! - [`sender`], [`fetch`]: the way to the memory nodes and back, over [`ports`].
//! - [`latency`]: how long front ends took, for their figures.
//!
//! This crate does not know how pages get in and out of a program: its front ends do (`faults`, `block`).

pub mod budget;
mod digest;
pub mod fetch;
pub mod filler;
#[cfg(test)]
mod golden_tests;
pub mod integrity;
pub mod latency;
pub mod mempool;
mod mempool_share;
pub mod mutation;
mod node_joiner;
pub mod page;
pub mod ports;
pub mod sender;
pub mod slabs;
pub mod table;
pub mod view;
pub mod volume;

/// Memory that other processes may map, and that can outlive its maker.
pub use aquifer_fabric::Memory;
pub use budget::{Budget, LIMIT_BYTES_MIN};
pub use fetch::{FETCH_PAGES_MAX, FetchError, Fetcher};
pub use filler::NoRoom;
pub use mempool::{BLOCK_PAGES, BlockId, Mempool};
pub use mutation::Mutation;
pub use node_joiner::NodeJoiner;
pub use page::{Location, PAGE_BYTES, PageNumber, PageState, Slot};
pub use ports::Connector;
pub use sender::{Sender, SenderStats, WrittenBatch};
pub use slabs::{REPLICAS_MAX, SlabSet};
pub use volume::{Batch, RecoveredVolume, SealedBlock, StageOutcome, Volume, finish_move};
