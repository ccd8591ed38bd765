//! A monitor takes over a program whose monitor has died with its agent.
//!
//! The program went on meanwhile, as long as it needed nothing. What is registered is looked through as if it were new: pages are
//! there that were filled and not noted. Threads that wait for pages are woken by the edge, and ask again.

use std::collections::BTreeSet;
use std::sync::Arc;

use aquifer_pager::{Batch, BlockId, Budget, PageNumber, PageState, RecoveredVolume};

use super::Monitor;
use crate::areas::{Area, Areas};
use crate::edge::{Edge, EvictedBatch};
use crate::kernel::MoveOutcome;
use crate::stats::FaultStats;

/// What the monitor before this one left.
#[derive(Debug)]
pub struct ResumeState {
    /// The program's pages.
    pub recovered: RecoveredVolume,
    /// What the kernel says is registered.
    pub registered: Areas,
    /// See [`crate::journal::PersistentRanges`].
    pub pending_unmaps: Vec<Area>,
    /// See [`crate::journal::PersistentRanges`]. All that is registered, if it is not known.
    pub removed: Areas,
    /// By staging buffer, what was to be taken, place by place, and what became of it.
    pub batches: Vec<Vec<(PageNumber, MoveOutcome)>>,
}

/// A batch in a staging buffer that has no block of the mempool yet.
#[derive(Debug)]
pub(super) struct UnplacedBatch {
    buffer: usize,
    pages: Batch,
    /// Where in the buffer they are.
    positions: Vec<u8>,
}

impl<E: Edge> Monitor<E> {
    /// Go on where a monitor before this one was stopped, at whatever it did. Events that it did not heed are read again first.
    #[must_use]
    pub fn resume(edge: E, before: ResumeState, budget: Arc<Budget>, stats: Arc<FaultStats>) -> Self {
        let ResumeState { recovered, registered, pending_unmaps, removed, batches } = before;
        let RecoveredVolume { volume, leaving, staged } = recovered;
        let mut monitor = Self::new(edge, volume, budget, stats, Areas::default(), batches.len());
        monitor.has_unapplied_events = true;
        monitor.adopting = registered;
        monitor.pending_unmaps = pending_unmaps;
        monitor.removed = removed;
        let leaving = leaving.into_iter().collect();
        let partly_staged: Vec<Option<BlockId>> =
            batches.iter().map(|batch| monitor.unstage_partly_staged(batch, &leaving)).collect();
        for (block, slots) in staged.into_iter().filter(|(block, _)| !partly_staged.contains(&Some(*block))) {
            monitor.edge.submit_block(block, slots);
        }
        monitor.resume_batches(leaving, &batches, &partly_staged);
        monitor
    }

    /// If a batch was being noted as staged, one part of it is leaving and the other is in a block: that block.
    fn unstage_partly_staged(
        &mut self,
        batch: &[(PageNumber, MoveOutcome)],
        leaving: &BTreeSet<PageNumber>,
    ) -> Option<BlockId> {
        let moved = batch
            .iter()
            .filter(|(_, move_outcomes)| *move_outcomes == MoveOutcome::Moved)
            .map(|(page, _)| *page);
        if !moved.clone().any(|page| leaving.contains(&page)) {
            return None;
        }
        let block = moved.enumerate().find_map(|(index, page)| match self.volume.state(page) {
            PageState::Staged(slot) if slot.block().1 == index => Some(slot.block().0),
            _ => None,
        })?;
        self.volume.unstage(block);
        Some(block)
    }

    /// Pages that were leaving are in a buffer, or they never left. A page that one buffer tells was kept may be in another by now, so only
    /// what was moved tells anything.
    fn resume_batches(
        &mut self,
        mut leaving: BTreeSet<PageNumber>,
        batches: &[Vec<(PageNumber, MoveOutcome)>],
        partly_staged: &[Option<BlockId>],
    ) {
        for ((buffer, batch), partly_staged) in batches.iter().enumerate().zip(partly_staged) {
            let mut pages = Batch::new();
            let mut positions = Vec::new();
            for (position, (page, move_outcomes)) in batch.iter().enumerate() {
                if *move_outcomes != MoveOutcome::Moved {
                    continue;
                }
                let is_leaving = leaving.remove(page)
                    || partly_staged.is_some() && self.volume.state(*page) == PageState::Leaving;
                if is_leaving {
                    pages.push(*page);
                    positions.push(u8::try_from(position).expect("batches are small"));
                }
            }
            if pages.is_empty() {
                self.edge.release_buffer(buffer);
                continue;
            }
            self.free_buffers.retain(|free| *free != buffer);
            let unplaced_batches = UnplacedBatch { buffer, pages, positions };
            match partly_staged {
                Some(block) => self.place_batch(*block, unplaced_batches),
                None => self.unplaced_batches.push(unplaced_batches),
            }
        }
        for page in leaving {
            self.volume.refused(page);
        }
    }

    fn place_batch(&mut self, block: BlockId, UnplacedBatch { buffer, pages, positions }: UnplacedBatch) {
        self.volume.left(block, &pages);
        self.edge.submit_batch(EvictedBatch { block, buffer, positions, copies: Vec::new() });
    }

    /// Find blocks for what had left before the restart. As long as there are none nothing else is done: pages on their way change neither
    /// number nor owner. Whether all have theirs.
    pub(super) fn place_batches(&mut self) -> bool {
        while let Some(unplaced_batches) = self.unplaced_batches.pop() {
            let Some(block) = self.allocate_block() else {
                self.unplaced_batches.push(unplaced_batches);
                return false;
            };
            self.place_batch(block, unplaced_batches);
        }
        self.volume.free_reserved_blocks();
        true
    }
}
