//! Resumption of a program whose monitor has died with its agent.
//!
//! Since then the program has run as long as it needed no page. All registered ranges are adopted
//! anew, because pages may have been filled and not recorded. The edge wakes all threads that wait
//! for pages, and they fault again.

use std::collections::BTreeSet;
use std::sync::Arc;

use aquifer_pager::{
    BLOCK_PAGES, Batch, BlockId, Budget, Mutation, PageNumber, PageState, RecoveredVolume, Volume,
};
use smallvec::SmallVec;

use super::Monitor;
use crate::areas::{Area, Areas};
use crate::edge::{Edge, EvictedBatch};
use crate::kernel::MoveOutcome;
use crate::stats::FaultStats;

/// The pages of the last command for one staging buffer, with the outcome of each.
pub type EvictionBatch = Vec<(PageNumber, MoveOutcome)>;

/// The state with which the monitor of a resumed program starts.
#[derive(Debug)]
pub struct ResumeState {
    /// Pages of the program, from its page table.
    pub recovered: RecoveredVolume,
    /// Ranges that are registered, as the kernel reports them.
    pub registered: Areas,
    /// See [`crate::journal::PersistentRanges::pending_unmaps`].
    pub pending_unmaps: Vec<Area>,
    /// See [`crate::journal::PersistentRanges::removed`]; all registered ranges if it is not known.
    pub removed: Areas,
    /// The batch of each staging buffer.
    pub batches: Vec<EvictionBatch>,
}

/// A batch in a staging buffer that has no block of the mempool yet.
#[derive(Debug)]
pub(super) struct UnplacedBatch {
    buffer: usize,
    pages: Batch,
    /// Position of each page in the buffer.
    positions: SmallVec<[u8; BLOCK_PAGES]>,
}

impl UnplacedBatch {
    pub(super) fn buffer(&self) -> usize {
        self.buffer
    }
}

/// Returns the block of a batch that was being recorded as staged: some of its pages are staged,
/// and others are leaving.
pub fn partly_staged_block(
    volume: &mut Volume,
    batch: &[(PageNumber, MoveOutcome)],
    leaving: &BTreeSet<PageNumber>,
) -> Option<BlockId> {
    let moved = batch.iter().filter(|(_, outcome)| *outcome == MoveOutcome::Moved).map(|(page, _)| *page);
    if !moved.clone().any(|page| leaving.contains(&page)) {
        return None;
    }
    moved.enumerate().find_map(|(index, page)| match volume.state(page) {
        PageState::Staged(slot) if slot.block().1 == index => Some(slot.block().0),
        _ => None,
    })
}

impl<E: Edge> Monitor<E> {
    /// Creates a monitor that resumes where another was stopped at any moment.
    ///
    /// The first turn reads and applies the events that the other monitor has not applied.
    #[must_use]
    pub fn resume(edge: E, state: ResumeState, budget: Arc<Budget>, stats: Arc<FaultStats>) -> Self {
        let ResumeState { recovered, registered, pending_unmaps, removed, batches } = state;
        let RecoveredVolume { volume, leaving, staged } = recovered;
        let mut monitor = Self::new(edge, volume, budget, stats, Areas::default(), batches.len());
        monitor.has_unapplied_events = true;
        monitor.adopting = registered;
        monitor.are_areas_exact = false;
        monitor.pending_unmaps = pending_unmaps;
        monitor.removed = removed;
        let mut leaving = leaving.into_iter().collect();
        let partly_staged: Vec<Option<BlockId>> =
            batches.iter().map(|batch| monitor.unstage_partly_staged(batch, &mut leaving)).collect();
        for (block, slots) in staged.into_iter().filter(|(block, _)| !partly_staged.contains(&Some(*block))) {
            monitor.edge.submit_block(block, slots);
        }
        monitor.resume_batches(leaving, &batches, &partly_staged);
        monitor
    }

    /// Undoes the staging of a batch that was being recorded as staged.
    ///
    /// Such a batch has pages that are leaving and pages that are staged. Returns its block, and
    /// adds the staged pages to `leaving`.
    fn unstage_partly_staged(
        &mut self,
        batch: &[(PageNumber, MoveOutcome)],
        leaving: &mut BTreeSet<PageNumber>,
    ) -> Option<BlockId> {
        let block = partly_staged_block(&mut self.volume, batch, leaving)?;
        leaving.extend(self.volume.unstage(block));
        Some(block)
    }

    /// Places the batches that were evicted; all other leaving pages are still in the program.
    ///
    /// Only the outcome "moved" counts: a page that one buffer reports as kept may have been
    /// evicted later through another buffer.
    fn resume_batches(
        &mut self,
        mut leaving: BTreeSet<PageNumber>,
        batches: &[EvictionBatch],
        partly_staged: &[Option<BlockId>],
    ) {
        for ((buffer, batch), partly_staged) in batches.iter().enumerate().zip(partly_staged) {
            let mut pages = Batch::new();
            let mut positions = SmallVec::new();
            for (position, (page, outcome)) in batch.iter().enumerate() {
                if *outcome != MoveOutcome::Moved || Mutation::ForgetLeaving.is_active() {
                    continue;
                }
                // The program can write the lists, so a page may be in several of them. Only its
                // first entry counts.
                if leaving.remove(page) {
                    pages.push(*page);
                    positions.push(u8::try_from(position).expect("batches are small"));
                } else {
                    // The page may be evicted again through another buffer before the next restart.
                    self.edge.forget_move(buffer, position);
                }
            }
            if pages.is_empty() {
                self.edge.release_buffer(buffer);
                continue;
            }
            self.free_buffers.retain(|free| *free != buffer);
            let batch = UnplacedBatch { buffer, pages, positions };
            match partly_staged {
                Some(block) => self.place_batch(*block, batch),
                None => self.unplaced_batches.push(batch),
            }
        }
        for page in leaving {
            self.volume.refused(page);
        }
    }

    fn place_batch(&mut self, block: BlockId, UnplacedBatch { buffer, pages, positions }: UnplacedBatch) {
        self.volume.left(block, &pages);
        self.edge.submit_batch(EvictedBatch { block, buffer, positions, clean_copies: SmallVec::new() });
    }

    /// Allocates blocks for the unplaced batches. Returns whether all have one.
    ///
    /// Until then the monitor must do nothing else: pages in flight must not change their number
    /// or their owner.
    pub(super) fn place_batches(&mut self) -> bool {
        while let Some(batch) = self.unplaced_batches.pop() {
            let Some(block) = self.allocate_block() else {
                self.unplaced_batches.push(batch);
                return false;
            };
            self.place_batch(block, batch);
        }
        self.volume.free_reserved_blocks();
        true
    }
}
