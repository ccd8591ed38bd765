//! What the monitor needs besides the kernel.
//!
//! That is the sender, reads from memory nodes, the other programs of the run, and a clock.

use aquifer_pager::{BlockId, FetchError, Location, SlabSet, StageOutcome, TableError, Volume, WrittenBatch};

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
    pub positions: Vec<u8>,
    /// Clean copy of each page, if it has one; empty if no page has.
    pub clean_copies: Vec<Option<Location>>,
}

/// What the sender has completed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SenderEvent {
    /// A batch is in the mempool, and its staging buffer may be used again.
    Staged {
        /// Block that has received the pages.
        block: BlockId,
        /// Number of the staging buffer.
        buffer: usize,
        /// What the sender found each page to be, in the order of the batch.
        found: Vec<StageOutcome>,
    },
    /// All live replicas have acknowledged a block.
    Written(Box<WrittenBatch>),
}

/// Some of the other programs of a run, or of other runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Relatives {
    /// Those with the most pages, which must make room.
    WithPages,
    /// Those that own blocks, which must pass one.
    WithBlocks,
    /// Those that wait for a block ([`Edge::set_waits_for_block`]).
    WithoutBlock,
    /// Programs of all runs that own blocks of the mempool, which may have to free some.
    AllWithBlocks,
    /// Programs of all runs of the user that wait for a block.
    UsersWithoutBlock,
}

/// The world around one monitor.
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

    /// Appends what the sender has completed since the last call.
    fn poll_sender(&mut self, out: &mut Vec<SenderEvent>);

    /// Waits for a bounded time until the sender has completed something.
    ///
    /// Returns false if the program has ended or its run is being ended.
    fn wait_for_sender(&mut self) -> bool;

    /// Reads pages from memory nodes into the fetch buffer.
    ///
    /// Returns how many pages, from the first, have arrived with the right checksum.
    ///
    /// # Errors
    /// If the first page cannot be read from any replica.
    fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError>;

    /// Page `index` of the fetch buffer.
    fn fetched_page(&self, index: usize) -> &[u8];

    /// Begins to serve a forked child.
    fn start_child(&mut self, child: Self::Child, volume: Volume, areas: Areas);

    /// Ends the run, because a forked child cannot get a page table.
    ///
    /// The child's userfaultfd must stay open as long as the child lives.
    fn refuse_child(&mut self, child: Self::Child, error: &TableError);

    /// Ends the run, because the parent of a forked child is served no more and the child cannot
    /// be.
    ///
    /// The child's userfaultfd must stay open as long as the child lives.
    fn abandon_child(&mut self, child: Self::Child);

    /// Ends the run, because a program does what no program does that leaves its userfaultfd alone.
    fn end_run(&mut self, reason: &str);

    /// Sets whether this program waits for a block of another program of the run.
    fn set_waits_for_block(&mut self, waits: bool);

    /// Wakes the monitors of other programs of the run that can help this one, or that it has
    /// helped.
    fn wake_relatives(&mut self, relatives: Relatives);

    /// Reports the loss of a page to the log and to the owner of the run.
    fn report_lost(&mut self, page: u64, error: &FetchError);

    /// Monotonic time in nanoseconds.
    fn now_ns(&self) -> u64;
}
