//! The interface of the monitor to everything besides the kernel: the sender, memory nodes, the
//! other programs of the run, and a clock.

use aquifer_pager::{
    BLOCK_PAGES, BlockId, FetchError, Location, SlabSet, StageOutcome, TableError, Volume, WrittenBatch,
};
use smallvec::SmallVec;

use crate::areas::Areas;
use crate::kernel::Kernel;

/// Evicted pages in a staging buffer, to be copied into a block of the mempool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EvictedBatch {
    /// Block that receives the pages.
    pub block: BlockId,
    /// Number of the staging buffer.
    pub buffer: usize,
    /// Position in the buffer of each page of the batch.
    pub positions: SmallVec<[u8; BLOCK_PAGES]>,
    /// Clean copy of each page, if it has one; empty if no page has.
    pub clean_copies: SmallVec<[Option<Location>; BLOCK_PAGES]>,
}

/// A completion by the sender.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SenderEvent {
    /// A batch is in the mempool, and its staging buffer may be used again.
    Staged {
        /// Block that has received the pages.
        block: BlockId,
        /// Number of the staging buffer.
        buffer: usize,
        /// The outcome of each page, in the order of the batch.
        found: Vec<StageOutcome>,
    },
    /// All live replicas have acknowledged a block.
    Written(Box<WrittenBatch>),
}

/// Selects other programs of the run, or of several runs, whose monitors are to be woken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OtherPrograms {
    /// Programs of the run with the most pages, which must make room.
    WithPages,
    /// Programs of the run that own blocks, which must pass one on.
    WithBlocks,
    /// Programs of the run that wait for a block ([`Edge::set_waits_for_block`]).
    WithoutBlock,
    /// Programs of all runs that own blocks of the mempool, which may have to free some.
    AllWithBlocks,
    /// Programs of all runs of the user that wait for a block.
    UsersWithoutBlock,
}

/// The environment of one monitor.
///
/// The product implements it with real programs and memory nodes, the simulator with models.
pub trait Edge: Kernel {
    /// Passes a batch to the sender.
    fn submit_batch(&mut self, batch: EvictedBatch);

    /// Passes a block whose bytes are already in the mempool to the sender.
    ///
    /// Bit `i` of `slots` is set if slot `i` is to be written. Such blocks come from before a
    /// restart, or hold pages that are moved between slabs.
    fn submit_block(&mut self, block: BlockId, slots: u64);

    /// Appends the completions of the sender since the last call.
    fn poll_sender(&mut self, out: &mut Vec<SenderEvent>);

    /// Waits for a bounded time until the sender has completed something.
    ///
    /// Returns false if the program has ended or its run is being ended.
    fn wait_for_sender(&mut self) -> bool;

    /// Reads pages from memory nodes into the fetch buffer.
    ///
    /// Returns the number of leading pages that have arrived with the right checksum.
    ///
    /// # Errors
    /// If the first page cannot be read from any replica.
    fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError>;

    /// Returns page `index` of the fetch buffer.
    fn fetched_page(&self, index: usize) -> &[u8];

    /// Begins to serve a forked child.
    fn start_child(&mut self, child: Self::Child, volume: Volume, areas: Areas);

    /// Ends the run, because a forked child cannot get a page table.
    ///
    /// The child's userfaultfd must stay open as long as the child lives.
    fn refuse_child(&mut self, child: Self::Child, error: &TableError);

    /// Ends the run, because the parent of a forked child is not served any more, so that the child
    /// cannot be served either.
    ///
    /// The child's userfaultfd must stay open as long as the child lives.
    fn abandon_child(&mut self, child: Self::Child);

    /// Ends the run, because the program used its userfaultfd itself.
    fn end_run(&mut self, reason: &str);

    /// Sets whether this program waits for a block of another program of the run.
    fn set_waits_for_block(&mut self, waits: bool);

    /// Wakes the monitors of other programs, which can free memory for this program, or can use
    /// memory that it has freed.
    fn wake_others(&mut self, others: OtherPrograms);

    /// Reports the loss of a page to the log and to the owner of the run.
    fn report_lost(&mut self, page: u64, error: &FetchError);

    /// Monotonic time in nanoseconds.
    fn now_ns(&self) -> u64;
}
