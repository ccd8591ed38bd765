//! A volume: where each of its pages is, and the steps between the places. A pure state machine,
//! which does no I/O.
//!
//! The owner, which is one thread, asks the volume what a fault needs and which pages to evict, and
//! reports the outcome of each step. `docs/formats/paging.md` lists the steps of a page; each step
//! is one method of [`Volume`].

mod absorb;
mod blocks;
mod cached;
mod owned_blocks;
mod recovery;
mod repack;

use std::collections::VecDeque;
use std::sync::Arc;

use aquifer_fabric::Memory;

use crate::budget::{Budget, BudgetMember};
use crate::mempool::{BLOCK_PAGES, BlockId, Mempool};
use crate::mutation::Mutation;
use crate::page::{Location, PageNumber, PageState, PageWord};
use crate::slabs::SlabSet;
use crate::table::{PageTable, TableError};

use owned_blocks::{OwnedBlocks, VolumeBlock};

pub use absorb::SealedBlock;

/// Maximum number of times that a page with rounds left is passed over in one search for pages to
/// evict (see [`PageWord::held`]).
const VISITS_PER_PAGE: usize = 8;

/// A page *returned soon* if the number of pages that left since it left is at most
/// 1/`SOON_DIVISOR` of the number of held pages.
const SOON_DIVISOR: u64 = 2;

pub use recovery::{RecoveredVolume, finish_move};

/// The pages of one eviction, at most [`BLOCK_PAGES`].
pub type Batch = Vec<PageNumber>;

/// The outcome of staging a page of a batch in the mempool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StageOutcome {
    /// The page's bytes are in the slot.
    Data,
    /// The page's bytes are in the slot, and are the same as in the page's clean copy.
    ///
    /// The sender owns the reference to that location from now on, and passes it back to
    /// [`Volume::written`].
    Unchanged,
    /// All bytes are zero: the slot is not used.
    Zeros,
    /// The page could not be read, because the process has exited.
    Unreadable,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BlockPhase {
    /// The batch is on its way into the mempool.
    Leaving,
    /// The batch is in the mempool, and the sender writes it to memory nodes.
    Staged,
    /// The batch is acknowledged, and the block is in the reclaimable queue.
    Reclaimable,
}

/// The pages of one process or of one device. A volume that was cloned for `fork` shares slabs with
/// its parent.
#[derive(Debug)]
pub struct Volume {
    table: PageTable,
    slabs: Arc<SlabSet>,
    mempool: Arc<Mempool>,
    budget: BudgetMember,
    /// The resident queue: pages in the order in which they became resident. Hot pages are queued
    /// again. An entry counts only while its page is held and has the *queued* flag.
    resident: VecDeque<PageNumber>,
    /// Pages that were resident when this volume was cloned. They are shared with the parent until
    /// they are claimed, so they are evicted last.
    inherited: VecDeque<PageNumber>,
    held: u64,
    /// Number of pages that were picked for eviction so far.
    departures: u64,
    blocks: OwnedBlocks,
    reclaimable: VecDeque<BlockId>,
    /// Blocks for batches that had left the program before a restart.
    reserved: Vec<BlockId>,
    /// The number of blocks whose batch is leaving or staged.
    blocks_in_flight: usize,
    /// Entries of reclaimed blocks, kept so that an eviction allocates no memory.
    spare_blocks: Vec<VolumeBlock>,
    /// Pages of the block that was reclaimed last, with the index of their slots.
    reclaimed_pages: Vec<(usize, Location)>,
    /// Whether this volume has no block and waits until the mempool has one for it.
    waits_in_mempool: bool,
    /// Whether held pages may have a clean copy.
    may_have_clean_copies: bool,
    before_store: Option<fn()>,
}

impl Volume {
    /// A volume whose pages are all zero.
    ///
    /// # Errors
    /// If there is no memory for its page table.
    pub fn new(slabs: Arc<SlabSet>, mempool: Arc<Mempool>, budget: Arc<Budget>) -> Result<Self, TableError> {
        Ok(Self {
            table: PageTable::new()?,
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
        })
    }

    /// Bytes of memory that the page table occupies.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Sets the hook of [`PageTable::before_store`], also for volumes that are cloned from this
    /// one.
    pub fn before_store(&mut self, hook: fn()) {
        self.before_store = Some(hook);
        self.table.before_store(hook);
    }

    /// The place of a page.
    #[must_use]
    pub fn state(&mut self, page: PageNumber) -> PageState {
        self.table.get(page).state()
    }

    /// The number of held pages that this volume counts. Inherited pages that are not claimed are
    /// not counted.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// The memory of the page table, from which [`Self::recover`] recovers the volume.
    #[must_use]
    pub fn table_memory(&self) -> &Memory {
        self.table.memory()
    }

    /// The slabs of the volume's run.
    #[must_use]
    pub fn slabs(&self) -> &Arc<SlabSet> {
        &self.slabs
    }

    /// The mempool in which the volume's pages are staged.
    #[must_use]
    pub fn mempool(&self) -> &Arc<Mempool> {
        &self.mempool
    }

    /// Whether any batch is leaving, or staged and not yet acknowledged.
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.blocks_in_flight > 0
    }

    /// Whether any batch has left the program and not reached the mempool.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.blocks_in_flight > 0 && self.blocks.iter().any(|block| block.phase == BlockPhase::Leaving)
    }

    /// Records that the page is resident in the program with its newest bytes.
    ///
    /// The location from which it was read becomes its clean copy, unless the pool is short of
    /// memory. `is_wanted` is whether the program faulted on this page. It is false if the page was
    /// filled ahead of a fault, or during a sequential walk; then the page does not become hot.
    pub fn hold(&mut self, page: PageNumber, is_wanted: bool) {
        let word = self.table.get(page);
        let (was_elsewhere, copy) = match word.state() {
            PageState::Held => return,
            PageState::Leaving => panic!("page {page:#x} was filled while it was leaving"),
            PageState::Remote(location) => {
                self.slabs.uncache_held(location);
                (true, Some(location))
            }
            PageState::Reclaimable(slot) => (true, Some(self.remove_slot_location(slot.block()))),
            PageState::Staged(_) => (true, None),
            PageState::Zero | PageState::Doubtful | PageState::Lost => (false, None),
        };
        let is_kept = !self.is_pool_short();
        if let Some(location) = copy.filter(|_| !is_kept) {
            self.slabs.release(location);
        }
        let copy = copy.filter(|_| is_kept);
        self.may_have_clean_copies |= copy.is_some();
        let returned_soon =
            was_elsewhere && word.departures_since(self.departures) <= self.held / SOON_DIVISOR;
        self.count_held(1);
        if !word.is_queued() {
            self.resident.push_back(page);
        }
        self.table.set(page, word.held(returned_soon && is_wanted).with_clean_copy(copy));
    }

    /// Picks up to `max` pages in the order of the resident queue, marks them leaving, and appends
    /// them to `out`.
    ///
    /// Pages for which `pinned` returns true stay. `out` is sorted by page number, so that
    /// neighbours leave together and return together. Pages that are shared with a parent
    /// or a child process are picked only if `include_inherited`.
    pub fn pick_victims(
        &mut self,
        max: usize,
        include_inherited: bool,
        pinned: impl Fn(PageNumber) -> bool,
        out: &mut Batch,
    ) {
        let max = max.min(BLOCK_PAGES);
        let mut visits = self.resident.len() * VISITS_PER_PAGE;
        while out.len() < max && visits > 0 {
            visits -= 1;
            let Some(page) = self.resident.pop_front() else {
                break;
            };
            let word = self.table.get(page);
            // A stale entry may name a page that was moved to this number and is still shared. Such
            // a page is in `inherited`.
            if word.state() != PageState::Held || !word.is_queued() {
                self.table.set(page, word.with_queued(false));
            } else if pinned(page) {
                self.resident.push_back(page);
            } else if let Some(next_round) = word.next_round() {
                self.table.set(page, next_round);
                self.resident.push_back(page);
            } else {
                self.table.set(page, word.with_queued(false).leaving(self.departures));
                out.push(page);
            }
        }
        while include_inherited && out.len() < max {
            let Some(page) = self.inherited.pop_front() else {
                break;
            };
            let word = self.table.get(page);
            if word.state() == PageState::Held && !word.is_queued() && !pinned(page) {
                self.count_held(1);
                self.table.set(page, word.leaving(self.departures));
                out.push(page);
            }
        }
        out.sort_unstable();
        self.departures += out.len() as u64;
    }

    /// Removes up to `max` pages from the queue of inherited pages, so that the caller can check
    /// whether they are still shared.
    ///
    /// Each page must be passed to [`Self::claim`] or [`Self::requeue_inherited`].
    pub fn next_inherited(&mut self, max: usize, out: &mut Batch) {
        while out.len() < max
            && let Some(page) = self.inherited.pop_front()
        {
            let word = self.table.get(page);
            if word.state() == PageState::Held && !word.is_queued() {
                out.push(page);
            }
        }
    }

    /// Records that an inherited page is not shared any more: it is counted and evicted like any
    /// other.
    pub fn claim(&mut self, page: PageNumber) {
        self.count_held(1);
        let word = self.table.get(page);
        self.table.set(page, word.with_queued(true));
        self.resident.push_back(page);
    }

    /// Records that an inherited page is still shared: evicting it would free no memory.
    pub fn requeue_inherited(&mut self, page: PageNumber) {
        self.inherited.push_back(page);
    }

    /// Records that the program kept the page, because it is pinned, locked or busy. The page is
    /// retried after all others.
    pub fn refused(&mut self, page: PageNumber) {
        let word = self.table.get(page);
        assert_eq!(word.state(), PageState::Leaving, "only a leaving page can be refused");
        self.resident.push_back(page);
        self.table
            .set(page, PageWord::new(PageState::Held).with_queued(true).with_clean_copy(word.clean_copy()));
    }

    /// Records that the page was absent when the worker was to move it, because the program had
    /// discarded it.
    pub fn vanished(&mut self, page: PageNumber) {
        let word = self.table.get(page);
        assert_eq!(word.state(), PageState::Leaving);
        if let Some(copy) = word.clean_copy() {
            self.slabs.release(copy);
        }
        self.count_held(-1);
        self.table.set(page, PageWord::default());
    }

    /// Records that the pages have left the program for the block `id`, in this order.
    pub fn left(&mut self, id: BlockId, pages: &[PageNumber]) {
        let mut block = self.spare_blocks.pop().unwrap_or_else(|| VolumeBlock {
            id,
            pages: Vec::with_capacity(BLOCK_PAGES),
            locations: Vec::with_capacity(BLOCK_PAGES),
            phase: BlockPhase::Leaving,
        });
        block.id = id;
        block.phase = BlockPhase::Leaving;
        block.pages.clear();
        block.pages.extend_from_slice(pages);
        block.locations.clear();
        block.locations.resize(pages.len(), None);
        self.blocks.insert(block);
        self.blocks_in_flight += 1;
    }

    /// Records that the sender has copied the batch into the mempool.
    pub fn staged(&mut self, id: BlockId, found: &[StageOutcome]) {
        let mut block = self.remove_block(id, BlockPhase::Leaving);
        assert_eq!(found.len(), block.pages.len(), "the sender answers for every page");
        for (index, what) in found.iter().enumerate() {
            let page = block.pages[index];
            let word = self.table.get(page);
            assert_eq!(word.state(), PageState::Leaving, "page {page:#x} left in {id:?}");
            self.count_held(-1);
            if let Some(copy) = word.clean_copy()
                && *what != StageOutcome::Unchanged
                && !Mutation::ForgetRelease.is_active()
            {
                self.slabs.release(copy);
            }
            let keep_discarded = Mutation::KeepDiscarded.is_active();
            let state = match what {
                _ if word.is_discarded() && !keep_discarded => PageState::Zero,
                StageOutcome::Data | StageOutcome::Unchanged => PageState::Staged(id.slot(index)),
                StageOutcome::Zeros => PageState::Zero,
                StageOutcome::Unreadable => PageState::Lost,
            };
            self.table.set(page, word.with_state(state));
        }
        block.phase = BlockPhase::Staged;
        self.blocks.insert(block);
    }

    /// Records that memory nodes have acknowledged the batch: page `i` of it is at `locations[i]`.
    ///
    /// Update rule: a slot becomes reclaimable only if the newest bytes of its page are still in
    /// that slot. If the page returned to the program or was discarded after the WRITE was posted,
    /// the written bytes are old, and their location is released.
    pub fn written(&mut self, id: BlockId, locations: &[Option<Location>]) {
        let mut block = self.remove_block(id, BlockPhase::Staged);
        assert!(locations.len() >= block.pages.len(), "the sender answers for every page");
        for (index, (page, location)) in block.pages.iter().zip(locations).enumerate() {
            let (page, Some(location)) = (*page, *location) else { continue };
            let slot = id.slot(index);
            let word = self.table.get(page);
            let is_newest = word.state() == PageState::Staged(slot);
            if is_newest {
                block.locations[index] = Some(location);
                self.table.set(page, word.with_state(PageState::Reclaimable(slot)));
            } else if Mutation::DropUpdateFlag.is_active() && matches!(word.state(), PageState::Staged(_)) {
                self.table.set(page, PageWord::new(PageState::Remote(location)));
            } else {
                self.slabs.release(location);
            }
        }
        block.phase = BlockPhase::Reclaimable;
        self.blocks_in_flight -= 1;
        self.blocks.insert(block);
        self.reclaimable.push_back(id);
    }

    /// Whether a page of this range is not Zero. A page that was discarded while it was leaving
    /// counts as Zero.
    pub fn has_pages(&mut self, start: PageNumber, end: PageNumber) -> bool {
        let mut has_pages = false;
        self.table.update_range(start, end, |_, word| {
            has_pages |= word.state() != PageState::Zero && !word.is_discarded();
            word
        });
        has_pages
    }

    /// Records that the program unmapped these pages: their bytes are released wherever they are.
    pub fn discard(&mut self, start: PageNumber, end: PageNumber) {
        self.forget(start, end, PageState::Zero);
    }

    /// Records that the program discarded these pages (`MADV_DONTNEED`), and that the kernel will
    /// drop them *after* this event.
    pub fn remove_range(&mut self, start: PageNumber, end: PageNumber) {
        let after =
            if Mutation::TrustRemoveEvent.is_active() { PageState::Held } else { PageState::Doubtful };
        self.forget(start, end, after);
    }

    /// Records that an untracked page is present although the program discarded it, so that the
    /// kernel may still drop it.
    pub fn mark_doubtful(&mut self, page: PageNumber) {
        let word = self.table.get(page);
        if word.state() == PageState::Zero {
            self.table.set(page, word.with_state(PageState::Doubtful));
        }
    }

    fn forget(&mut self, start: PageNumber, end: PageNumber, held_becomes: PageState) {
        let Self { table, slabs, blocks, .. } = self;
        let mut dropped = 0;
        table.update_range(start, end, |_, word| match word.state() {
            PageState::Zero => word,
            PageState::Held => {
                if held_becomes != PageState::Held {
                    dropped += u64::from(word.is_queued());
                }
                if let Some(copy) = word.clean_copy() {
                    slabs.release(copy);
                }
                word.with_state(held_becomes)
            }
            PageState::Doubtful if held_becomes != PageState::Zero => word,
            PageState::Leaving => word.with_discarded(),
            PageState::Remote(location) => {
                slabs.release(location);
                word.with_state(PageState::Zero)
            }
            PageState::Reclaimable(slot) => {
                let (id, index) = slot.block();
                let block = blocks.owned_mut(id);
                slabs.release(block.locations[index].take().expect("reclaimable pages have a location"));
                word.with_state(PageState::Zero)
            }
            PageState::Staged(_) | PageState::Doubtful | PageState::Lost => word.with_state(PageState::Zero),
        });
        self.count_held(-i64::try_from(dropped).expect("fewer than 2^63 pages"));
    }

    /// Records that the program moved pages to another address (`mremap`), where no page is
    /// recorded. No batch may be leaving.
    ///
    /// Every word is stored at its new number before the first is removed from its old one, so that
    /// an interrupted move can be repeated.
    pub fn move_range(&mut self, from: PageNumber, to: PageNumber, pages: u64) {
        assert!(!self.is_leaving(), "batches reach the mempool before pages change their number");
        for (page, word) in self.table.words(from, from + pages) {
            let page = page - from + to;
            match word.state() {
                PageState::Staged(slot) | PageState::Reclaimable(slot) => {
                    let (id, index) = slot.block();
                    self.blocks.owned_mut(id).pages[index] = page;
                }
                PageState::Held if word.is_queued() => self.resident.push_back(page),
                PageState::Held => self.inherited.push_back(page),
                _ => {}
            }
            let queued = word.is_queued() && word.state() == PageState::Held;
            self.table.set(page, word.with_queued(queued));
        }
        // The resident queue may keep a stale entry for the old number.
        let is_queued = |word: PageWord| PageWord::default().with_queued(word.is_queued());
        self.table.update_range(from, from + pages, |_, word| is_queued(word));
    }

    /// Creates the volume of a forked child, with the same pages.
    ///
    /// The parent must have no pages in the mempool: see [`Self::is_in_flight`] and
    /// [`Self::reclaim_all`]. Locations are shared, each with one more reference.
    ///
    /// # Errors
    /// If there is no memory for the child's page table.
    pub fn clone_for_fork(&mut self) -> Result<Self, TableError> {
        assert!(!self.is_in_flight() && self.reclaimable.is_empty(), "the mempool is emptied before a fork");
        let mut child =
            Self::new(Arc::clone(&self.slabs), Arc::clone(&self.mempool), Arc::clone(self.budget.budget()))?;
        child.departures = self.departures;
        child.may_have_clean_copies = self.may_have_clean_copies;
        if let Some(hook) = self.before_store {
            child.before_store(hook);
        }
        let slabs = &self.slabs;
        self.table.update_range(0, crate::table::PAGES_MAX, |page, word| {
            let state = word.state();
            let remote =
                if let PageState::Remote(location) = state { Some(location) } else { word.clean_copy() };
            if let Some(location) = remote.filter(|_| !Mutation::ForgetForkReference.is_active()) {
                slabs.retain(location);
            }
            if state != PageState::Zero {
                child.table.set(page, word.with_queued(false));
            }
            word
        });
        child.inherited = self.resident.iter().chain(&self.inherited).copied().collect();
        Ok(child)
    }

    /// The clean copy of a held or leaving page, if it has one.
    #[must_use]
    pub fn clean_copy(&mut self, page: PageNumber) -> Option<Location> {
        self.table.get(page).clean_copy()
    }

    fn is_pool_short(&self) -> bool {
        self.mempool.is_pool_short() || self.budget.mempool_user().is_pool_short()
    }

    /// Releases the clean copies of all held pages if the pool is short of memory.
    pub fn release_clean_copies_if_short(&mut self) {
        if !self.may_have_clean_copies || !self.is_pool_short() {
            return;
        }
        self.may_have_clean_copies = false;
        let Self { table, slabs, .. } = self;
        table.update_range(0, crate::table::PAGES_MAX, |_, word| match (word.state(), word.clean_copy()) {
            (PageState::Held, Some(copy)) => {
                slabs.release(copy);
                word.with_clean_copy(None)
            }
            _ => word,
        });
    }

    /// Records that a remote page cannot be read: its nodes are gone, or its bytes are damaged.
    pub fn mark_lost(&mut self, page: PageNumber) {
        if let PageState::Remote(location) = self.state(page) {
            self.slabs.release(location);
            self.table.set(page, PageWord::new(PageState::Lost));
        }
    }

    /// Releases all pages and blocks, because the program has exited. Batches in flight must have
    /// been acknowledged or abandoned.
    pub fn close(&mut self) {
        self.discard(0, crate::table::PAGES_MAX);
        for block in self.blocks.drain() {
            self.mempool.free(self.budget.mempool_user(), block.id);
            self.budget.release_block();
        }
        self.free_reserved_blocks();
        self.leave_block_queue();
        self.reclaimable.clear();
        self.blocks_in_flight = 0;
        self.resident.clear();
        self.count_held(-i64::try_from(self.held).expect("fewer than 2^63 pages"));
    }

    fn count_held(&mut self, change: i64) {
        self.held = self.held.checked_add_signed(change).expect("no more pages leave than were held");
        self.budget.add_held(change);
    }

    fn remove_slot_location(&mut self, (id, index): (BlockId, usize)) -> Location {
        let block = self.blocks.owned_mut(id);
        block.locations[index].take().expect("reclaimable pages have a location")
    }

    fn remove_block(&mut self, id: BlockId, phase: BlockPhase) -> VolumeBlock {
        let block = self.blocks.remove(id);
        assert_eq!(block.phase, phase, "{id:?} is answered for in order");
        block
    }
}
