//! The mover: moves pages out of slabs that are being vacated. It reads the pages and absorbs them
//! as if they had just been written.

use std::sync::Arc;

use aquifer_pager::{
    Connector, FETCH_PAGES_MAX, Fetcher, Location, Mutation, PAGE_BYTES, PageNumber, PageState, view,
};

use crate::stats::Counters;
use crate::volume::BlockVolume;

/// Number of leaves of the page table, with 512 pages each, that are searched under one lock.
const PARTS_PER_TURN: usize = 8;

/// The mover of a volume. One thread uses it.
#[derive(Debug)]
pub struct Mover {
    volume: Arc<BlockVolume>,
    fetcher: Fetcher,
    round: u64,
    /// The page at which the search continues; `None` after the end.
    next: Option<PageNumber>,
    /// Pages that were found and not moved yet.
    pages: Vec<PageNumber>,
    /// The pages that are being fetched, and their locations, which are retained.
    fetching: Vec<PageNumber>,
    locations: Vec<Location>,
}

impl Mover {
    /// A mover that reaches the nodes through `connector`.
    ///
    /// # Errors
    /// If there is no memory for its buffer.
    pub fn new(volume: Arc<BlockVolume>, connector: Arc<dyn Connector>) -> std::io::Result<Self> {
        Ok(Self {
            volume,
            fetcher: Fetcher::new(connector)?,
            round: 0,
            next: None,
            pages: Vec::new(),
            fetching: Vec::with_capacity(FETCH_PAGES_MAX),
            locations: Vec::with_capacity(FETCH_PAGES_MAX),
        })
    }

    /// Searches for pages to move, and moves some of them. Returns whether there is more to do at
    /// once.
    pub fn turn(&mut self) -> bool {
        let Some(round) = self.volume.slabs.vacating_round() else { return false };
        if round != self.round {
            self.round = round;
            self.next = Some(0);
            self.pages.clear();
        }
        if self.pages.is_empty() {
            self.find_pages();
        }
        if self.pages.is_empty() {
            return self.next.is_some();
        }
        let has_room = self.plan();
        self.fetch();
        has_room
    }

    fn find_pages(&mut self) {
        let mut state = self.volume.lock();
        for _ in 0..PARTS_PER_TURN {
            let Some(from) = self.next else { break };
            self.next = state.volume.find_pages_to_move(from, &mut self.pages);
        }
    }

    /// Moves pages that are in the mempool, and retains the locations of those that must be
    /// fetched. Returns false if there is no room for more.
    fn plan(&mut self) -> bool {
        let volume = Arc::clone(&self.volume);
        let mut state = volume.lock();
        while self.fetching.len() < FETCH_PAGES_MAX
            && let Some(page) = self.pages.pop()
        {
            if !volume.ensure_open_block(&mut state) {
                self.pages.push(page);
                return false;
            }
            match state.volume.state_if_to_move(page) {
                Some(PageState::Reclaimable(slot)) => {
                    let mut bytes = [0; PAGE_BYTES];
                    volume.mempool.memory().read(slot.offset(), &mut bytes);
                    volume.absorb_page(&mut state, page, &bytes);
                    Counters::add(&volume.counters.repacked_pages, 1);
                }
                Some(PageState::Remote(location)) => {
                    volume.slabs.retain(location);
                    self.fetching.push(page);
                    self.locations.push(location);
                }
                _ => {}
            }
        }
        true
    }

    /// Fetches the retained pages and absorbs them.
    ///
    /// A page that was written meanwhile is elsewhere already. A page that cannot be read stays:
    /// its next reader gets the error.
    fn fetch(&mut self) {
        let mut at = 0;
        while at < self.locations.len() {
            match self.fetcher.fetch(&self.volume.slabs, &self.locations[at..]) {
                Ok(fetched) => {
                    let mut state = self.volume.lock();
                    for number in 0..fetched {
                        let (page, location) = (self.fetching[at + number], self.locations[at + number]);
                        let is_there = state.volume.state(page) == PageState::Remote(location)
                            || Mutation::MoveUnchecked.is_active();
                        if is_there && self.volume.ensure_open_block(&mut state) {
                            let bytes = view::page(self.fetcher.buffer(), number * PAGE_BYTES);
                            self.volume.absorb_page(&mut state, page, bytes);
                            Counters::add(&self.volume.counters.repacked_pages, 1);
                        }
                    }
                    at += fetched;
                }
                Err(_) => {
                    // Trying a dead node for each page would delay all writes.
                    self.pages.clear();
                    self.next = None;
                    break;
                }
            }
        }
        self.fetching.clear();
        for location in self.locations.drain(..) {
            self.volume.slabs.release(location);
        }
        self.volume.wake_pump_if_emptied();
    }
}
