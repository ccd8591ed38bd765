//! Recovers a volume after a restart of the agent. All state that matters is in its page table.
//!
//! - Pages in the mempool are written to memory nodes again, whether or not the previous agent's
//!   WRITEs were acknowledged: the slots have the newest bytes, and the locations that were written
//!   before are free (see `slabs/recovery`).
//! - Leaving pages are in the program or in its staging buffers; the front end determines which.
//! - The order of the resident queue, heat, and clean copies are lost.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use aquifer_fabric::Memory;

use super::{BlockPhase, OwnedBlocks, Volume, VolumeBlock};
use crate::budget::{Budget, BudgetMember};
use crate::mempool::{BLOCK_PAGES, BlockId, Mempool};
use crate::page::{PageNumber, PageState, PageWord};
use crate::slabs::SlabSet;
use crate::table::{PAGES_MAX, PageTable, TableError};

/// Marks a slot of a recovered block that holds no page. No page of a program is page 0.
const NO_PAGE: PageNumber = 0;

/// A recovered volume, and the pages and blocks that must be handled before it is used.
#[derive(Debug)]
pub struct RecoveredVolume {
    /// The volume.
    pub volume: Volume,
    /// Pages that were leaving. The caller must pass each to [`Volume::left`], [`Volume::refused`]
    /// or [`Volume::vanished`].
    pub leaving: Vec<PageNumber>,
    /// Blocks with pages that must be written again, with bit `i` set if slot `i` holds a page.
    /// They count as in flight.
    pub staged: Vec<(BlockId, u64)>,
}

impl Volume {
    /// Recovers the volume whose page table an earlier agent left in `memory`.
    ///
    /// # Errors
    /// If the memory does not contain a page table.
    pub fn recover(
        memory: Memory,
        slabs: Arc<SlabSet>,
        mempool: Arc<Mempool>,
        budget: Arc<Budget>,
    ) -> Result<RecoveredVolume, TableError> {
        let mut volume = Self {
            table: PageTable::recover(memory)?,
            slabs,
            mempool,
            budget: BudgetMember::new(budget),
            resident: VecDeque::with_capacity(4096),
            inherited: VecDeque::new(),
            held: 0,
            departures: 0,
            blocks: OwnedBlocks::default(),
            reclaimable: VecDeque::new(),
            reserved: Vec::new(),
            blocks_in_flight: 0,
            spare_blocks: Vec::new(),
            reclaimed_pages: Vec::with_capacity(BLOCK_PAGES),
            waits_in_mempool: false,
            may_have_clean_copies: false,
            before_store: None,
        };
        let mut leaving = Vec::new();
        let mut staged = BTreeMap::<u32, [PageNumber; BLOCK_PAGES]>::new();
        for (page, word) in volume.table.words(0, PAGES_MAX) {
            volume.recover_page(page, word, &mut leaving, &mut staged);
        }
        let staged =
            staged.into_iter().map(|(id, pages)| (BlockId(id), volume.recover_block(BlockId(id), pages)));
        let staged = staged.collect();
        Ok(RecoveredVolume { volume, leaving, staged })
    }

    fn recover_page(
        &mut self,
        page: PageNumber,
        word: PageWord,
        leaving: &mut Vec<PageNumber>,
        staged: &mut BTreeMap<u32, [PageNumber; BLOCK_PAGES]>,
    ) {
        let word = if word.clean_copy().is_some() { word.with_clean_copy(None) } else { word };
        let mut unqueued = word.with_queued(false);
        match word.state() {
            PageState::Held if word.is_queued() => {
                self.table.set(page, word);
                self.claim(page);
                return;
            }
            PageState::Held => self.inherited.push_back(page),
            PageState::Leaving => {
                self.count_held(1);
                leaving.push(page);
            }
            PageState::Staged(slot) | PageState::Reclaimable(slot) => {
                let (id, index) = slot.block();
                staged.entry(id.0).or_insert([NO_PAGE; BLOCK_PAGES])[index] = page;
                unqueued = unqueued.with_state(PageState::Staged(slot));
            }
            PageState::Remote(location) => self.slabs.recover_reference(location),
            PageState::Zero | PageState::Doubtful | PageState::Lost => {}
        }
        self.table.set(page, unqueued);
    }

    /// Records that this volume owns a block again, and returns a bit mask of its slots that hold
    /// pages.
    fn recover_block(&mut self, id: BlockId, pages: [PageNumber; BLOCK_PAGES]) -> u64 {
        let locations = vec![None; BLOCK_PAGES];
        let block = VolumeBlock { id, pages: pages.to_vec(), locations, phase: BlockPhase::Staged };
        self.blocks.insert(block);
        self.blocks_in_flight += 1;
        self.budget.count_recovered_block();
        self.budget.mempool_user().count_recovered();
        pages.iter().enumerate().filter(|(_, page)| **page != NO_PAGE).fold(0, |mask, (at, _)| mask | 1 << at)
    }

    /// Reverts a batch of which the killed agent had recorded only some pages as staged: they are
    /// leaving again, so that the whole batch can be staged in the same block. Returns these pages.
    pub fn unstage(&mut self, id: BlockId) -> Vec<PageNumber> {
        let mut leaving = Vec::new();
        let block = self.remove_block(id, BlockPhase::Staged);
        self.blocks_in_flight -= 1;
        for (index, page) in block.pages.iter().enumerate() {
            let word = self.table.get(*page);
            if word.state() == PageState::Staged(id.slot(index)) {
                self.count_held(1);
                self.table.set(*page, word.with_state(PageState::Leaving));
                leaving.push(*page);
            }
        }
        self.spare_blocks.push(block);
        leaving
    }

    /// Reserves blocks for batches that left the program before the restart and did not reach the
    /// mempool.
    ///
    /// Must be called when all volumes are recovered and before any program runs: then the mempool
    /// still has as many blocks as when the batches left.
    pub fn reserve_blocks(&mut self, batches: usize) {
        for block in std::iter::repeat_with(|| self.mempool.allocate_any(self.budget.mempool_user()))
            .take(batches)
            .flatten()
        {
            self.budget.count_recovered_block();
            self.reserved.push(block);
        }
    }

    /// Frees the reserved blocks that are left when all batches have their blocks.
    pub fn free_reserved_blocks(&mut self) {
        while let Some(block) = self.reserved.pop() {
            self.free_block(block);
        }
    }

    /// The blocks of the mempool that this volume owns.
    pub fn blocks_in_use(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.blocks.iter().map(|block| block.id)
    }

    /// Records that a page is resident although its word says that it is elsewhere, because the
    /// killed agent had filled it and not recorded that.
    pub fn hold_present(&mut self, page: PageNumber) {
        let state = self.state(page);
        if matches!(state, PageState::Staged(_) | PageState::Reclaimable(_) | PageState::Remote(_)) {
            self.hold(page, false);
        }
    }
}

/// Completes a move of pages that an earlier agent had begun in the page table in `memory`. That
/// agent had already forgotten the pages at the new place.
///
/// `before_store`: see [`PageTable::before_store`].
///
/// # Errors
/// If the memory does not contain a page table.
pub fn finish_move(
    memory: Memory,
    (from, to, pages): (PageNumber, PageNumber, u64),
    before_store: Option<fn()>,
) -> Result<(), TableError> {
    let mut table = PageTable::recover(memory)?;
    if let Some(hook) = before_store {
        table.before_store(hook);
    }
    for (page, word) in table.words(from, from + pages) {
        table.set(page - from + to, word);
    }
    table.update_range(from, from + pages, |_, _| PageWord::default());
    Ok(())
}
