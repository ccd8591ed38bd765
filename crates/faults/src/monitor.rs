//! The monitor of one program: it hears faults and events, decides, and acts through its [`Edge`]. One thread turns it.
//!
//! The rules that keep every byte right are in `docs/formats/paging.md`. The chief ones:
//! events are heeded before any fault that was read with them; a fill that the kernel refuses as busy is decided anew; pages are taken only
//! while nothing is read; a page that was given up is not taken before the program has faulted on it again.

mod adoption;
mod eviction;
mod recovery;
mod repack;

pub(crate) use eviction::SPARE_PAGES;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aquifer_pager::{
    BLOCK_PAGES, Batch, Budget, FETCH_PAGES_MAX, Location, Mutation, PageNumber, PageState, Slot, Volume,
};

use crate::areas::{Area, Areas};
use crate::edge::{Done, Edge};
use crate::journal::Remembered;
use crate::kernel::{Fault, Filled, Message, Source, Stop, Taken};
use crate::stats::FaultStats;
use crate::stream::Streams;

pub use recovery::Before;
use recovery::Unplaced;
use repack::Repacking;

/// Pages filled at one fault of a walk.
const WINDOW_MAX: usize = 32;
/// Pages that may be written again at one fault on a protected one.
const UNPROTECT_MAX: usize = 64;
/// Attempts to protect pages, one after the other.
const PROTECT_TRIES: u32 = 64;
/// Messages read in one go.
const MESSAGES_MAX: usize = 64;

/// What to do after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Turn again at once.
    Again,
    /// Nothing to do before the kernel or the sender says something.
    Sleep,
    /// The program is gone.
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    fault: Fault,
    since_ns: u64,
}

/// What became of one attempt to serve a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Served {
    Yes,
    /// It waits for the sender.
    Later,
    /// It waits for the kernel: very soon.
    Soon,
}

/// The monitor of one program.
#[derive(Debug)]
pub struct Monitor<E: Edge> {
    edge: E,
    volume: Volume,
    budget: Arc<Budget>,
    stats: Arc<FaultStats>,
    areas: Areas,
    /// Events that were read before a restart are to be heeded before anything else.
    is_behind: bool,
    /// Registered and not yet looked through.
    adopting: Areas,
    /// Given up by the program outside of `areas`: what is present there may be about to be dropped.
    given_up: Areas,
    /// Places that were moved away from, and of which the kernel is still to say that they are unmapped.
    vacated: Vec<Area>,
    streams: Streams,
    inbox: Vec<Message<E::Child>>,
    waiting: Vec<Waiting>,
    serving: Vec<Waiting>,
    done: Vec<Done>,
    free_buffers: Vec<usize>,
    victims: Batch,
    taken: Vec<Taken>,
    locations: Vec<Location>,
    present: Vec<PageNumber>,
    stalled_until_ns: u64,
    next_review_ns: u64,
    /// The others know that this program has nothing to give: told again and again they would answer again and again.
    has_nudged: bool,
    /// Room could be made if a relative passed a block on.
    lacks_block: bool,
    /// It waits for a block.
    wants_block: bool,
    /// Batches that had left the program before a restart, and wait for their blocks.
    unplaced: Vec<Unplaced>,
    /// Since a fork, until the kernel allows it.
    is_to_protect: bool,
    repacking: Repacking,
    ended: bool,
}

impl<E: Edge> Monitor<E> {
    /// A monitor for a program whose pages are in `volume` and whose registered areas are `areas`.
    #[must_use]
    pub fn new(
        edge: E,
        volume: Volume,
        budget: Arc<Budget>,
        stats: Arc<FaultStats>,
        areas: Areas,
        buffers: usize,
    ) -> Self {
        Self {
            edge,
            volume,
            budget,
            stats,
            areas,
            is_behind: false,
            adopting: Areas::default(),
            given_up: Areas::default(),
            vacated: Vec::new(),
            streams: Streams::default(),
            inbox: Vec::with_capacity(MESSAGES_MAX),
            waiting: Vec::with_capacity(MESSAGES_MAX),
            serving: Vec::with_capacity(MESSAGES_MAX),
            done: Vec::with_capacity(8),
            free_buffers: (0..buffers).collect(),
            victims: Batch::with_capacity(BLOCK_PAGES),
            taken: Vec::with_capacity(BLOCK_PAGES),
            locations: Vec::with_capacity(FETCH_PAGES_MAX),
            present: Vec::new(),
            stalled_until_ns: 0,
            next_review_ns: 0,
            has_nudged: false,
            lacks_block: false,
            wants_block: false,
            unplaced: Vec::new(),
            is_to_protect: false,
            repacking: Repacking::default(),
            ended: false,
        }
    }

    /// The edge.
    pub fn edge(&mut self) -> &mut E {
        &mut self.edge
    }

    /// The program's pages.
    pub fn volume(&mut self) -> &mut Volume {
        &mut self.volume
    }

    /// The registered areas.
    #[must_use]
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// The program is known to be gone.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Give everything back that the program had. Nobody waits any more for the pages that it has under way.
    pub fn close(mut self) {
        while self.volume.is_in_flight() {
            self.edge.wait();
            self.collect();
        }
        self.volume.end();
        self.tell_of_block();
    }

    /// Do all that can be done now.
    pub fn turn(&mut self) -> Next {
        self.collect();
        if !self.ended && !self.place_unplaced() {
            // Nobody tells when the host's mempool has a block again: it is asked now and then.
            self.ended = !self.edge.wait();
            return if self.ended { Next::Ended } else { Next::Again };
        }
        if std::mem::take(&mut self.is_behind) && !Mutation::AdoptBehind.is_active() {
            // Of what a monitor before this one had heard and not heeded the kernel says nothing any more: no proof would fail for it.
            self.listen();
        }
        // Before the faults are served, for it may hear of some.
        self.look_through();
        self.listen();
        self.protect();
        std::mem::swap(&mut self.waiting, &mut self.serving);
        let mut soon = self.is_to_protect;
        let mut serving = std::mem::take(&mut self.serving);
        for waiting in serving.drain(..) {
            if self.ended {
                break;
            }
            match self.serve(waiting.fault) {
                Served::Yes => {
                    FaultStats::add(&self.stats.faults, 1);
                    self.stats.latency.record(self.edge.now_ns().saturating_sub(waiting.since_ns));
                }
                Served::Later => self.waiting.push(waiting),
                Served::Soon => {
                    soon = true;
                    self.waiting.push(waiting);
                }
            }
        }
        self.serving = serving;
        self.make_room();
        let moves_more = self.repack();
        if self.ended {
            Next::Ended
        } else if soon {
            self.edge.pause();
            Next::Again
        } else if moves_more || self.adopting.iter().next().is_some() {
            Next::Again
        } else {
            Next::Sleep
        }
    }

    /// Whether faults wait for the sender or for room.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// A page is there of which nothing was known, or which was thought to be elsewhere because it was filled just before a restart. It
    /// can be taken, unless the kernel may be about to drop it.
    fn hold_present(&mut self, page: PageNumber) {
        if self.volume.state(page) != PageState::Zero {
            self.volume.hold_found(page);
        } else if self.given_up.contains(page) && !Mutation::TrustRemoveEvent.is_active() {
            self.volume.doubt(page);
        } else {
            self.volume.hold(page, false);
        }
    }

    /// Hear everything. Events take effect at once and in order; faults wait until all events are heard.
    fn listen(&mut self) {
        let mut inbox = std::mem::take(&mut self.inbox);
        self.edge.read(&mut inbox);
        if Mutation::ServeFaultsBeforeEvents.is_active() {
            let faults: Vec<Fault> = inbox
                .iter()
                .filter_map(|message| if let Message::Fault(fault) = message { Some(*fault) } else { None })
                .collect();
            faults.into_iter().for_each(|fault| {
                self.serve(fault);
            });
        }
        let now_ns = self.edge.now_ns();
        for (index, message) in inbox.drain(..).enumerate() {
            match message {
                Message::Fault(fault) => {
                    self.waiting.push(Waiting { fault, since_ns: now_ns });
                    continue;
                }
                Message::Fork(child) => self.fork(child),
                Message::Remap { from, to, pages } => self.remap(index, from, to, pages),
                Message::Remove { start, end } => self.give_up(Area { start, end }),
                Message::Unmap { start, end } => self.unmap(Area { start, end }),
            }
            if self.ended {
                break;
            }
            let remembered = Remembered { vacated: &self.vacated, given_up: &self.given_up };
            self.edge.heeded(index, remembered);
        }
        self.inbox = inbox;
    }

    fn give_up(&mut self, area: Area) {
        self.volume.give_up(area.start, area.end);
        for part in self.areas.missing(area) {
            self.given_up.insert(part);
        }
    }

    fn unmap(&mut self, area: Area) {
        if let Some(at) = self.vacated.iter().position(|other| *other == area)
            && !Mutation::HeedVacating.is_active()
        {
            // What is there now, if anything, another thread has moved there since.
            self.vacated.swap_remove(at);
            return;
        }
        self.volume.discard(area.start, area.end);
        self.forget_area(area);
    }

    /// The kernel has filled, or looked: so no event was outstanding.
    fn nothing_outstanding(&mut self) {
        if !self.vacated.is_empty() {
            self.vacated.clear();
            self.edge.remember(Remembered { vacated: &[], given_up: &self.given_up });
        }
    }

    fn forget_area(&mut self, area: Area) {
        self.areas.remove(area);
        self.adopting.remove(area);
        self.given_up.remove(area);
    }

    fn collect(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        self.edge.collect(&mut done);
        for what in done.drain(..) {
            self.book(what);
        }
        self.done = done;
    }

    /// Book what the sender has done.
    fn book(&mut self, what: Done) {
        match what {
            Done::Staged { block, buffer, found } => {
                self.volume.staged(block, &found);
                self.edge.emptied(buffer);
                self.free_buffers.push(buffer);
            }
            Done::Written(written) => {
                self.repacking.written(written.block);
                self.volume.written(written.block, &written.locations[..written.count]);
            }
        }
    }

    fn wait_while(&mut self, condition: impl Fn(&Volume) -> bool) {
        while condition(&self.volume) && !self.ended {
            if !self.edge.wait() {
                self.ended = true;
            }
            self.collect();
        }
    }

    fn fork(&mut self, child: E::Child) {
        // What both sides write they will have twice. Where that does not fit they ask before they write; and both run already.
        if self.budget.resident() + self.volume.held() > self.budget.resident_max() {
            self.edge.protect_child(&child, &self.areas);
            self.is_to_protect = true;
            self.protect();
        }
        if Mutation::ForkWithoutFlush.is_active() {
            self.wait_while(|volume| volume.is_in_flight() && !volume.is_leaving());
        } else {
            self.wait_while(Volume::is_in_flight);
        }
        if self.ended {
            return;
        }
        self.volume.reclaim_all();
        let child_volume = self.volume.clone_for_fork();
        // Also because each may count on less now that there is one more.
        self.tell_of_block();
        match child_volume {
            Ok(volume) => self.edge.forked(child, volume, self.areas.clone()),
            Err(error) => {
                tracing::error!(%error, "a forked program cannot be served: it will wait for ever")
            }
        }
    }

    fn remap(&mut self, index: usize, from: PageNumber, to: PageNumber, pages: u64) {
        // Staging knows pages by the number they had when they left.
        if !Mutation::RemapWhileLeaving.is_active() {
            self.wait_while(Volume::is_leaving);
        }
        if self.ended {
            return;
        }
        self.volume.discard(to, to + pages);
        self.edge.moving(index);
        self.volume.move_range(from, to, pages);
        let vacated = Area { start: from, end: from + pages };
        self.forget_area(vacated);
        self.vacated.push(vacated);
        self.given_up.remove(Area { start: to, end: to + pages });
        self.areas.insert(Area { start: to, end: to + pages });
    }

    fn serve(&mut self, fault: Fault) -> Served {
        if self.budget.excess(0) > 0 && self.must_wait_for_room() {
            return Served::Later;
        }
        let page = fault.page;
        if fault.protected {
            return self.serve_protected(page);
        }
        match self.volume.state(page) {
            PageState::Zero => self.serve_zero(fault),
            PageState::Held | PageState::Doubtful => {
                let filled = self.edge.fill(page, 1, Source::Zeros { private: fault.write });
                self.settle(page, filled, 1, None)
            }
            PageState::Leaving => Served::Later,
            PageState::Staged(slot) => {
                self.serve_slots(page, slot, PageState::Staged, |stats| &stats.staging_hits)
            }
            PageState::Reclaimable(slot) => {
                self.serve_slots(page, slot, PageState::Reclaimable, |stats| &stats.mempool_hits)
            }
            PageState::Remote(_) => self.serve_remote(page),
            PageState::Lost => {
                let filled = self.edge.poison(page);
                match filled.stop {
                    Some(Stop::Busy | Stop::NoMemory) => Served::Soon,
                    // It was poisoned for another thread, or is unmapped: whoever still waits finds out by trying again.
                    Some(Stop::Exists | Stop::NoArea) => {
                        self.edge.wake(page);
                        Served::Yes
                    }
                    None | Some(Stop::Ended) => Served::Yes,
                }
            }
        }
    }

    /// Over the limit a fault waits, as long as there is something to wait for.
    fn must_wait_for_room(&mut self) -> bool {
        self.make_room();
        if self.budget.excess(0) == 0 {
            return false;
        }
        if self.volume.is_in_flight() || self.lacks_block {
            return true;
        }
        self.edge.nudge_others();
        false
    }

    /// Protect what there is, as soon as the kernel lets us: the thread that forked must have run first. It does so just now; but other
    /// changes may be unread, and are heard before the next attempt.
    fn protect(&mut self) {
        for _ in 0..PROTECT_TRIES {
            if !self.is_to_protect || self.edge.protect(&self.areas) {
                self.is_to_protect = false;
                return;
            }
            self.edge.pause();
        }
    }

    /// A page that was shared when the program forked is about to be written: there will be one more. Its neighbours are let go with it, as
    /// far as there is room.
    fn serve_protected(&mut self, page: PageNumber) -> Served {
        if Mutation::WakeProtected.is_active() {
            self.edge.wake(page);
            return Served::Yes;
        }
        let area_end = self.areas.end_of(page).unwrap_or(page + 1);
        let max = usize::try_from(area_end - page).unwrap_or(usize::MAX).min(UNPROTECT_MAX);
        let pages = self.room_ahead().clamp(1, max);
        let mut freed = self.edge.unprotect(page, pages);
        if pages > 1 && freed.stop == Some(Stop::NoArea) {
            freed = self.edge.unprotect(page, 1);
        }
        match freed.stop {
            None => {
                self.has_nudged = false;
                self.budget.grant(freed.pages as u64);
            }
            Some(Stop::Busy | Stop::NoMemory) => return Served::Soon,
            Some(Stop::NoArea | Stop::Exists) => self.edge.wake(page),
            Some(Stop::Ended) => self.ended = true,
        }
        Served::Yes
    }

    fn serve_zero(&mut self, fault: Fault) -> Served {
        let window = self.window(fault.page);
        let mut pages = 1;
        while pages < window && self.volume.state(fault.page + pages as u64) == PageState::Zero {
            pages += 1;
        }
        let filled = self.fill(fault.page, pages, Source::Zeros { private: fault.write });
        self.streams.filled(fault.page, window, filled.pages);
        self.settle(fault.page, filled, window, Some(|stats| &stats.zero_pages))
    }

    /// Pages that left side by side are side by side in the mempool, too.
    fn serve_slots(
        &mut self,
        page: PageNumber,
        slot: Slot,
        state: fn(Slot) -> PageState,
        counter: fn(&FaultStats) -> &AtomicU64,
    ) -> Served {
        let window = self.window(page);
        let is_next = |volume: &mut Volume, offset: u32| {
            volume.state(page + u64::from(offset)) == state(Slot(slot.0 + offset))
        };
        let pages =
            (1..).take(window - 1).take_while(|offset| is_next(&mut self.volume, *offset)).count() + 1;
        let filled = self.fill(page, pages, Source::Slot(slot));
        self.streams.filled(page, window, filled.pages);
        self.settle(page, filled, window, Some(counter))
    }

    fn serve_remote(&mut self, page: PageNumber) -> Served {
        let window = self.window(page);
        self.locations.clear();
        for next in page..page + window as u64 {
            let PageState::Remote(location) = self.volume.state(next) else {
                break;
            };
            self.locations.push(location);
        }
        let fetched = match self.edge.fetch(self.volume.slabs(), &self.locations) {
            Ok(fetched) => fetched,
            Err(error) => {
                self.edge.report_lost(page, &error);
                self.volume.lose(page);
                FaultStats::add(&self.stats.lost_pages, 1);
                return Served::Soon;
            }
        };
        let filled = self.fill(page, fetched, Source::Fetched(0));
        FaultStats::add(&self.stats.remote_read_trips, 1);
        FaultStats::add(&self.stats.prefetched, filled.pages.saturating_sub(1));
        self.streams.filled(page, window, filled.pages);
        self.settle(page, filled, window, Some(|stats| &stats.remote_reads))
    }

    /// Fill so many pages; one, if the area ends before.
    fn fill(&mut self, page: PageNumber, pages: usize, source: Source) -> Filled {
        let filled = self.edge.fill(page, pages, source);
        if pages > 1 && filled == (Filled { pages: 0, stop: Some(Stop::NoArea) }) {
            return self.edge.fill(page, 1, source);
        }
        filled
    }

    /// How many pages to fill at a fault; ahead of the program only if there is room.
    fn window(&mut self, page: PageNumber) -> usize {
        let max = self.room_ahead().clamp(1, WINDOW_MAX);
        self.streams.window(page, max)
    }

    fn room_ahead(&self) -> usize {
        let room = self.budget.resident_max().saturating_sub(self.budget.resident()) / 2;
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    /// Book a fill: what was filled is held by the program now. A page that a walk comes by, with a window of several, is not wanted for
    /// itself.
    fn settle(
        &mut self,
        page: PageNumber,
        filled: Filled,
        window: usize,
        counter: Option<fn(&FaultStats) -> &AtomicU64>,
    ) -> Served {
        if !matches!(filled.stop, Some(Stop::Busy | Stop::NoMemory)) {
            self.nothing_outstanding();
        }
        for filled_page in page..page + filled.pages as u64 {
            self.volume.hold(filled_page, filled_page == page && window == 1);
        }
        if let Some(counter) = counter {
            FaultStats::add(counter(&self.stats), filled.pages);
        }
        if filled.pages > 0 {
            self.has_nudged = false;
            return Served::Yes;
        }
        match filled.stop {
            None | Some(Stop::NoArea) => self.edge.wake(page),
            Some(Stop::Exists) => {
                self.hold_present(page);
                self.edge.wake(page);
            }
            Some(Stop::Busy | Stop::NoMemory) => return Served::Soon,
            Some(Stop::Ended) => self.ended = true,
        }
        Served::Yes
    }
}
