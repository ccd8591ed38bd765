//! A monitor takes over a program whose monitor has died with its agent.
//!
//! The program went on meanwhile, as long as it needed nothing. What is registered is looked through as if it were new: pages are
//! there that were filled and not noted. Threads that wait for pages are woken by the edge, and ask again.

use std::collections::BTreeSet;
use std::sync::Arc;

use aquifer_pager::{Batch, BlockId, Budget, PageNumber, PageState, Recovered};

use super::Monitor;
use crate::areas::{Area, Areas};
use crate::edge::{Edge, Job};
use crate::kernel::Taken;
use crate::stats::FaultStats;

/// What the monitor before this one left.
#[derive(Debug)]
pub struct Before {
    /// The program's pages.
    pub recovered: Recovered,
    /// What the kernel says is registered.
    pub registered: Areas,
    /// See [`crate::journal::Remembered`].
    pub vacated: Vec<Area>,
    /// See [`crate::journal::Remembered`]. All that is registered, if it is not known.
    pub given_up: Areas,
    /// By staging buffer, what was to be taken, place by place, and what became of it.
    pub batches: Vec<Vec<(PageNumber, Taken)>>,
}

/// A batch in a staging buffer that has no block of the mempool yet.
#[derive(Debug)]
pub(super) struct Unplaced {
    buffer: usize,
    pages: Batch,
    /// Where in the buffer they are.
    positions: Vec<u8>,
}

impl<E: Edge> Monitor<E> {
    /// Go on where a monitor before this one was stopped, at whatever it did. Events that it did not heed are read again first.
    #[must_use]
    pub fn resume(edge: E, before: Before, budget: Arc<Budget>, stats: Arc<FaultStats>) -> Self {
        let Before { recovered, registered, vacated, given_up, batches } = before;
        let Recovered { volume, leaving, staged } = recovered;
        let mut monitor = Self::new(edge, volume, budget, stats, Areas::default(), batches.len());
        monitor.is_behind = true;
        monitor.adopting = registered;
        monitor.vacated = vacated;
        monitor.given_up = given_up;
        let leaving = leaving.into_iter().collect();
        let torn: Vec<Option<BlockId>> =
            batches.iter().map(|batch| monitor.unstage_torn(batch, &leaving)).collect();
        for (block, slots) in staged.into_iter().filter(|(block, _)| !torn.contains(&Some(*block))) {
            monitor.edge.submit_again(block, slots);
        }
        monitor.resume_batches(leaving, &batches, &torn);
        monitor
    }

    /// If a batch was being noted as staged, one part of it is leaving and the other is in a block: that block.
    fn unstage_torn(
        &mut self,
        batch: &[(PageNumber, Taken)],
        leaving: &BTreeSet<PageNumber>,
    ) -> Option<BlockId> {
        let moved = batch.iter().filter(|(_, taken)| *taken == Taken::Moved).map(|(page, _)| *page);
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
        batches: &[Vec<(PageNumber, Taken)>],
        torn: &[Option<BlockId>],
    ) {
        for ((buffer, batch), torn) in batches.iter().enumerate().zip(torn) {
            let mut pages = Batch::new();
            let mut positions = Vec::new();
            for (position, (page, taken)) in batch.iter().enumerate() {
                if *taken != Taken::Moved {
                    continue;
                }
                let is_leaving =
                    leaving.remove(page) || torn.is_some() && self.volume.state(*page) == PageState::Leaving;
                if is_leaving {
                    pages.push(*page);
                    positions.push(u8::try_from(position).expect("batches are small"));
                }
            }
            if pages.is_empty() {
                self.edge.emptied(buffer);
                continue;
            }
            self.free_buffers.retain(|free| *free != buffer);
            let unplaced = Unplaced { buffer, pages, positions };
            match torn {
                Some(block) => self.place(*block, unplaced),
                None => self.unplaced.push(unplaced),
            }
        }
        for page in leaving {
            self.volume.refused(page);
        }
    }

    fn place(&mut self, block: BlockId, Unplaced { buffer, pages, positions }: Unplaced) {
        self.volume.left(block, &pages);
        self.edge.submit(Job { block, buffer, positions, copies: Vec::new() });
    }

    /// Find blocks for what had left before the restart. As long as there are none nothing else is done: pages on their way change neither
    /// number nor owner. Whether all have theirs.
    pub(super) fn place_unplaced(&mut self) -> bool {
        while let Some(unplaced) = self.unplaced.pop() {
            let Some(block) = self.take_block() else {
                self.unplaced.push(unplaced);
                return false;
            };
            self.place(block, unplaced);
        }
        self.volume.return_reserved();
        true
    }
}
