//! What the monitor needs beside the kernel: the sender, the memory nodes, the other programs of the run, the time.

use aquifer_pager::{BlockId, FetchError, Location, SlabSet, StageOutcome, Volume, WrittenBatch};

use crate::areas::Areas;
use crate::kernel::Kernel;

/// A batch that waits in a staging buffer of the program, to be copied into a block of the mempool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EvictedBatch {
    /// Where it goes.
    pub block: BlockId,
    /// Where it waits.
    pub buffer: usize,
    /// Page `i` of the batch waits at `positions[i]` of the buffer.
    pub positions: Vec<u8>,
    /// Where page `i` came from, if it still refers to that; empty if none does.
    pub copies: Vec<Option<Location>>,
}

/// What the sender has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SenderEvent {
    /// A batch is in the mempool and its staging buffer is free.
    Staged {
        /// The block.
        block: BlockId,
        /// The buffer.
        buffer: usize,
        /// What each page was.
        found: Vec<StageOutcome>,
    },
    /// A batch is on memory nodes.
    Written(Box<WrittenBatch>),
}

/// Everything around one monitor.
pub trait Edge: Kernel {
    /// Hand a batch to the sender.
    fn submit_batch(&mut self, job: EvictedBatch);

    /// Hand a block to the sender whose pages, bit `i` of `slots` for slot `i`, are in the mempool already: since before a restart, or because they are moved.
    fn submit_block(&mut self, block: BlockId, slots: u64);

    /// Append what the sender has done since.
    fn poll_sender(&mut self, out: &mut Vec<SenderEvent>);

    /// Wait until the sender has done something, or for a bounded time; false if the run is being ended.
    fn wait_for_sender(&mut self) -> bool;

    /// Read pages from memory nodes into the fetch buffer; how many, from the first, are whole.
    ///
    /// # Errors
    /// If the first cannot be had.
    fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError>;

    /// Page `index` of the fetch buffer.
    fn fetched_page(&self, index: usize) -> &[u8];

    /// The program forked: serve the child from now on.
    fn start_child(&mut self, child: Self::Child, volume: Volume, areas: Areas);

    /// This program has nothing left to take and the run is over its limit: the others should look.
    fn wake_other_programs(&mut self);

    /// A page is lost: say so to people.
    fn report_lost(&mut self, page: u64, error: &FetchError);

    /// A clock, in nanoseconds.
    fn now_ns(&self) -> u64;
}
