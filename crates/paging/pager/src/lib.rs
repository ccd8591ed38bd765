//! The pager: volumes of 4 KiB pages that are resident in a program, in the host's mempool, or on
//! memory nodes.
//!
//! - `volume`: where each page of a volume is, and the steps between the places. A pure state
//!   machine on `page` words in a `table`.
//! - `mempool`, `budget`: the host's cache of pages in blocks, and the share of it and of
//!   resident memory that a run may have.
//! - `page_cache`, `cached_blocks`, `cache_shares`: pages in blocks that no volume needs, which of
//!   these blocks go first, and how users share them.
//! - `copy_policy`: how many copies the pages of a run have, and on which nodes.
//! - `slabs`, `filler`: extents of the pool that hold pages, shared by the volumes of a run,
//!   and the choice of the slab that is filled next.
//! - `sender`, `fetch`: writing pages to memory nodes and reading them back, over `ports`.
//! - `move_rate`: how fast a host moves pages off memory that nodes recall.
//! - `node_joiner`: adds memory nodes to a user of nodes while it continues.
//!
//! The front ends, the crates `faults` and `block`, move pages into and out of programs. Format and
//! protocol: `docs/formats/paging.md`.

mod allowance;
mod budget;
mod cache_shares;
mod cached_blocks;
mod copy_policy;
mod digest;
mod fetch;
mod filler;
#[cfg(debug_assertions)]
#[doc(hidden)]
pub mod fuzz_target;
#[cfg(test)]
mod golden_tests;
mod integrity;
mod mempool;
mod mempool_share;
mod move_rate;
mod mutation;
mod node_joiner;
mod page;
mod page_cache;
mod ports;
mod sender;
mod slabs;
mod sync;
mod table;
pub mod view;
mod volume;

pub use allowance::Allowance;
/// Memory that other processes may map and that can outlive the process that created it.
pub use aquifer_fabric::Memory;
pub use budget::{Budget, LIMIT_BYTES_MIN};
pub use cache_shares::CacheShares;
pub use copy_policy::{Backup, CopyPolicy};
pub use fetch::{FETCH_PAGES_MAX, FetchError, Fetcher};
pub use filler::NoRoom;
pub use integrity::is_zero;
pub use mempool::{BLOCK_PAGES, BlockId, Mempool, MempoolUser};
pub use move_rate::MoveRate;
pub use mutation::Mutation;
pub use node_joiner::{NodeJoiner, NodeUser};
pub use page::{Location, PAGE_BYTES, PageNumber, PageState, Slot};
pub use page_cache::{CacheIndex, PinnedSlot};
pub use ports::Connector;
pub use sender::{RecalledBytes, Sender, SenderStats, WrittenBatch};
pub use slabs::{REPLICAS_MAX, SlabId, SlabReplicas, SlabSet, page_of};
pub use table::{PAGES_MAX, TABLE_BYTES_MAX, TableError};
pub use volume::{Batch, RecoveredVolume, SealedBlock, StageOutcome, Volume, finish_move};
