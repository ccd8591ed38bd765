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
use crate::edge::{Edge, SenderEvent};
use crate::journal::PersistentRanges;
use crate::kernel::{FillOutcome, FillSource, FillStop, MoveOutcome, PageFault, UffdMessage};
use crate::stats::FaultStats;
use crate::stream::StreamDetector;

pub use recovery::ResumeState;
use recovery::UnplacedBatch;
use repack::RepackProgress;

/// Pages filled at one fault of a walk.
const WINDOW_MAX: usize = 32;
/// Pages that may be written again at one fault on a protected one.
const UNPROTECT_MAX: usize = 64;
/// Attempts to protect pages, one after the other.
const PROTECT_TRIES_MAX: u32 = 64;
/// Messages read in one go.
const MESSAGES_MAX: usize = 64;

/// What to do after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnOutcome {
    /// Turn again at once.
    Again,
    /// Nothing to do before the kernel or the sender says something.
    Sleep,
    /// The program is gone.
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct PendingFault {
    fault: PageFault,
    since_ns: u64,
}

/// What became of one attempt to serve a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FaultOutcome {
    Resolved,
    /// It waits for the sender.
    WaitForSender,
    /// It waits for the kernel: very soon.
    RetrySoon,
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
    has_unapplied_events: bool,
    /// Registered and not yet looked through.
    adopting: Areas,
    /// Given up by the program outside of `areas`: what is present there may be about to be dropped.
    removed: Areas,
    /// Places that were moved away from, and of which the kernel is still to say that they are unmapped.
    pending_unmaps: Vec<Area>,
    streams: StreamDetector,
    messages: Vec<UffdMessage<E::Child>>,
    pending: Vec<PendingFault>,
    being_served: Vec<PendingFault>,
    sender_events: Vec<SenderEvent>,
    free_buffers: Vec<usize>,
    victims: Batch,
    move_outcomes: Vec<MoveOutcome>,
    locations: Vec<Location>,
    present: Vec<PageNumber>,
    stalled_until_ns: u64,
    next_claim_ns: u64,
    /// The others know that this program has nothing to give: told again and again they would answer again and again.
    has_woken_others: bool,
    /// Room could be made if a relative passed a block on.
    lacks_block: bool,
    /// It waits for a block.
    wants_block: bool,
    /// Batches that had left the program before a restart, and wait for their blocks.
    unplaced_batches: Vec<UnplacedBatch>,
    /// Since a fork, until the kernel allows it.
    must_protect: bool,
    repacking: RepackProgress,
    has_ended: bool,
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
            has_unapplied_events: false,
            adopting: Areas::default(),
            removed: Areas::default(),
            pending_unmaps: Vec::new(),
            streams: StreamDetector::default(),
            messages: Vec::with_capacity(MESSAGES_MAX),
            pending: Vec::with_capacity(MESSAGES_MAX),
            being_served: Vec::with_capacity(MESSAGES_MAX),
            sender_events: Vec::with_capacity(8),
            free_buffers: (0..buffers).collect(),
            victims: Batch::with_capacity(BLOCK_PAGES),
            move_outcomes: Vec::with_capacity(BLOCK_PAGES),
            locations: Vec::with_capacity(FETCH_PAGES_MAX),
            present: Vec::new(),
            stalled_until_ns: 0,
            next_claim_ns: 0,
            has_woken_others: false,
            lacks_block: false,
            wants_block: false,
            unplaced_batches: Vec::new(),
            must_protect: false,
            repacking: RepackProgress::default(),
            has_ended: false,
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
        self.has_ended = true;
    }

    /// Give everything back that the program had. Nobody waits any more for the pages that it has under way.
    pub fn close(mut self) {
        while self.volume.is_in_flight() {
            self.edge.wait_for_sender();
            self.apply_sender_events();
        }
        self.volume.close();
        self.announce_free_block();
    }

    /// Do all that can be done now.
    pub fn turn(&mut self) -> TurnOutcome {
        self.apply_sender_events();
        if !self.has_ended && !self.place_batches() {
            // Nobody tells when the host's mempool has a block again: it is asked now and then.
            self.has_ended = !self.edge.wait_for_sender();
            return if self.has_ended { TurnOutcome::Ended } else { TurnOutcome::Again };
        }
        if std::mem::take(&mut self.has_unapplied_events) && !Mutation::AdoptBeforeEvents.is_active() {
            // Of what a monitor before this one had heard and not heeded the kernel says nothing any more: no proof would fail for it.
            self.read_and_apply();
        }
        // Before the faults are served, for it may hear of some.
        self.adopt_some();
        self.read_and_apply();
        self.protect();
        std::mem::swap(&mut self.pending, &mut self.being_served);
        let mut soon = self.must_protect;
        let mut being_served = std::mem::take(&mut self.being_served);
        for pending in being_served.drain(..) {
            if self.has_ended {
                break;
            }
            match self.serve_fault(pending.fault) {
                FaultOutcome::Resolved => {
                    FaultStats::add(&self.stats.faults, 1);
                    self.stats.latency.record(self.edge.now_ns().saturating_sub(pending.since_ns));
                }
                FaultOutcome::WaitForSender => self.pending.push(pending),
                FaultOutcome::RetrySoon => {
                    soon = true;
                    self.pending.push(pending);
                }
            }
        }
        self.being_served = being_served;
        self.make_room();
        let moves_more = self.repack();
        if self.has_ended {
            TurnOutcome::Ended
        } else if soon {
            self.edge.yield_now();
            TurnOutcome::Again
        } else if moves_more || self.adopting.iter().next().is_some() {
            TurnOutcome::Again
        } else {
            TurnOutcome::Sleep
        }
    }

    /// Whether faults wait for the sender or for room.
    #[must_use]
    pub fn has_pending_faults(&self) -> bool {
        !self.pending.is_empty()
    }

    /// A page is there of which nothing was known, or which was thought to be elsewhere because it was filled just before a restart. It
    /// can be taken, unless the kernel may be about to drop it.
    fn hold_present(&mut self, page: PageNumber) {
        if self.volume.state(page) != PageState::Zero {
            self.volume.hold_present(page);
        } else if self.removed.contains(page) && !Mutation::TrustRemoveEvent.is_active() {
            self.volume.mark_doubtful(page);
        } else {
            self.volume.hold(page, false);
        }
    }

    /// Hear everything. Events take effect at once and in order; faults wait until all events are heard.
    fn read_and_apply(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.edge.read_messages(&mut messages);
        if Mutation::ServeFaultsBeforeEvents.is_active() {
            let faults: Vec<PageFault> = messages
                .iter()
                .filter_map(
                    |message| if let UffdMessage::Fault(fault) = message { Some(*fault) } else { None },
                )
                .collect();
            faults.into_iter().for_each(|fault| {
                self.serve_fault(fault);
            });
        }
        let now_ns = self.edge.now_ns();
        for (index, message) in messages.drain(..).enumerate() {
            match message {
                UffdMessage::Fault(fault) => {
                    self.pending.push(PendingFault { fault, since_ns: now_ns });
                    continue;
                }
                UffdMessage::Fork(child) => self.apply_fork(child),
                UffdMessage::Remap { from, to, pages } => self.apply_remap(index, from, to, pages),
                UffdMessage::Remove { start, end } => self.apply_remove(Area { start, end }),
                UffdMessage::Unmap { start, end } => self.apply_unmap(Area { start, end }),
            }
            if self.has_ended {
                break;
            }
            let ranges = PersistentRanges { pending_unmaps: &self.pending_unmaps, removed: &self.removed };
            self.edge.event_applied(index, ranges);
        }
        self.messages = messages;
    }

    fn apply_remove(&mut self, area: Area) {
        self.volume.remove_range(area.start, area.end);
        for part in self.areas.missing(area) {
            self.removed.insert(part);
        }
    }

    fn apply_unmap(&mut self, area: Area) {
        if let Some(at) = self.pending_unmaps.iter().position(|other| *other == area)
            && !Mutation::ApplyStaleUnmap.is_active()
        {
            // What is there now, if anything, another thread has moved there since.
            self.pending_unmaps.swap_remove(at);
            return;
        }
        self.volume.discard(area.start, area.end);
        self.forget_area(area);
    }

    /// The kernel has filled, or looked: so no event was outstanding.
    fn forget_pending_unmaps(&mut self) {
        if !self.pending_unmaps.is_empty() {
            self.pending_unmaps.clear();
            self.edge.persist_ranges(PersistentRanges { pending_unmaps: &[], removed: &self.removed });
        }
    }

    fn forget_area(&mut self, area: Area) {
        self.areas.remove(area);
        self.adopting.remove(area);
        self.removed.remove(area);
    }

    fn apply_sender_events(&mut self) {
        let mut done = std::mem::take(&mut self.sender_events);
        self.edge.poll_sender(&mut done);
        for what in done.drain(..) {
            self.apply_sender_event(what);
        }
        self.sender_events = done;
    }

    /// Book what the sender has done.
    fn apply_sender_event(&mut self, what: SenderEvent) {
        match what {
            SenderEvent::Staged { block, buffer, found } => {
                self.volume.staged(block, &found);
                self.edge.release_buffer(buffer);
                self.free_buffers.push(buffer);
            }
            SenderEvent::Written(written) => {
                self.repacking.written(written.block);
                self.volume.written(written.block, &written.locations[..written.count]);
            }
        }
    }

    fn wait_while(&mut self, condition: impl Fn(&Volume) -> bool) {
        while condition(&self.volume) && !self.has_ended {
            if !self.edge.wait_for_sender() {
                self.has_ended = true;
            }
            self.apply_sender_events();
        }
    }

    fn apply_fork(&mut self, child: E::Child) {
        // What both sides write they will have twice. Where that does not fit they ask before they write; and both run already.
        if self.budget.resident() + self.volume.held() > self.budget.resident_max() {
            self.edge.protect_child(&child, &self.areas);
            self.must_protect = true;
            self.protect();
        }
        if Mutation::ForkWithoutFlush.is_active() {
            self.wait_while(|volume| volume.is_in_flight() && !volume.is_leaving());
        } else {
            self.wait_while(Volume::is_in_flight);
        }
        if self.has_ended {
            return;
        }
        self.volume.reclaim_all();
        let child_volume = self.volume.clone_for_fork();
        // Also because each may count on less now that there is one more.
        self.announce_free_block();
        match child_volume {
            Ok(volume) => self.edge.start_child(child, volume, self.areas.clone()),
            Err(error) => {
                tracing::error!(%error, "a forked program cannot be served: it will wait for ever")
            }
        }
    }

    fn apply_remap(&mut self, index: usize, from: PageNumber, to: PageNumber, pages: u64) {
        // Staging knows pages by the number they had when they left.
        if !Mutation::RemapWhileLeaving.is_active() {
            self.wait_while(Volume::is_leaving);
        }
        if self.has_ended {
            return;
        }
        self.volume.discard(to, to + pages);
        self.edge.begin_remap(index);
        self.volume.move_range(from, to, pages);
        let pending_unmaps = Area { start: from, end: from + pages };
        self.forget_area(pending_unmaps);
        self.pending_unmaps.push(pending_unmaps);
        self.removed.remove(Area { start: to, end: to + pages });
        self.areas.insert(Area { start: to, end: to + pages });
    }

    fn serve_fault(&mut self, fault: PageFault) -> FaultOutcome {
        if self.budget.excess(0) > 0 && self.must_wait_for_room() {
            return FaultOutcome::WaitForSender;
        }
        let page = fault.page;
        if fault.is_protected {
            return self.serve_protected(page);
        }
        match self.volume.state(page) {
            PageState::Zero => self.serve_zero(fault),
            PageState::Held | PageState::Doubtful => {
                let filled = self.edge.fill(page, 1, FillSource::Zeros { is_private: fault.is_write });
                self.record_fill(page, filled, 1, None)
            }
            PageState::Leaving => FaultOutcome::WaitForSender,
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
                    Some(FillStop::Busy | FillStop::NoMemory) => FaultOutcome::RetrySoon,
                    // It was poisoned for another thread, or is unmapped: whoever still waits finds out by trying again.
                    Some(FillStop::Exists | FillStop::NoArea) => {
                        self.edge.wake(page);
                        FaultOutcome::Resolved
                    }
                    None | Some(FillStop::Ended) => FaultOutcome::Resolved,
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
        self.edge.wake_other_programs();
        false
    }

    /// Protect what there is, as soon as the kernel lets us: the thread that forked must have run first. It does so just now; but other
    /// changes may be unread, and are heard before the next attempt.
    fn protect(&mut self) {
        for _ in 0..PROTECT_TRIES_MAX {
            if !self.must_protect || self.edge.protect(&self.areas) {
                self.must_protect = false;
                return;
            }
            self.edge.yield_now();
        }
    }

    /// A page that was shared when the program forked is about to be written: there will be one more. Its neighbours are let go with it, as
    /// far as there is room.
    fn serve_protected(&mut self, page: PageNumber) -> FaultOutcome {
        if Mutation::WakeProtected.is_active() {
            self.edge.wake(page);
            return FaultOutcome::Resolved;
        }
        let area_end = self.areas.end_of(page).unwrap_or(page + 1);
        let max = usize::try_from(area_end - page).unwrap_or(usize::MAX).min(UNPROTECT_MAX);
        let pages = self.room_ahead().clamp(1, max);
        let mut freed = self.edge.unprotect(page, pages);
        if pages > 1 && freed.stop == Some(FillStop::NoArea) {
            freed = self.edge.unprotect(page, 1);
        }
        match freed.stop {
            None => {
                self.has_woken_others = false;
                self.budget.grant(freed.pages as u64);
            }
            Some(FillStop::Busy | FillStop::NoMemory) => return FaultOutcome::RetrySoon,
            Some(FillStop::NoArea | FillStop::Exists) => self.edge.wake(page),
            Some(FillStop::Ended) => self.has_ended = true,
        }
        FaultOutcome::Resolved
    }

    fn serve_zero(&mut self, fault: PageFault) -> FaultOutcome {
        let window = self.window(fault.page);
        let mut pages = 1;
        while pages < window && self.volume.state(fault.page + pages as u64) == PageState::Zero {
            pages += 1;
        }
        let filled = self.fill(fault.page, pages, FillSource::Zeros { is_private: fault.is_write });
        self.streams.filled(fault.page, window, filled.pages);
        self.record_fill(fault.page, filled, window, Some(|stats| &stats.zero_pages))
    }

    /// Pages that left side by side are side by side in the mempool, too.
    fn serve_slots(
        &mut self,
        page: PageNumber,
        slot: Slot,
        state: fn(Slot) -> PageState,
        counter: fn(&FaultStats) -> &AtomicU64,
    ) -> FaultOutcome {
        let window = self.window(page);
        let is_next = |volume: &mut Volume, offset: u32| {
            volume.state(page + u64::from(offset)) == state(Slot(slot.0 + offset))
        };
        let pages =
            (1..).take(window - 1).take_while(|offset| is_next(&mut self.volume, *offset)).count() + 1;
        let filled = self.fill(page, pages, FillSource::Slot(slot));
        self.streams.filled(page, window, filled.pages);
        self.record_fill(page, filled, window, Some(counter))
    }

    fn serve_remote(&mut self, page: PageNumber) -> FaultOutcome {
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
                self.volume.mark_lost(page);
                FaultStats::add(&self.stats.lost_pages, 1);
                return FaultOutcome::RetrySoon;
            }
        };
        let filled = self.fill(page, fetched, FillSource::Fetched(0));
        FaultStats::add(&self.stats.remote_read_trips, 1);
        FaultStats::add(&self.stats.prefetched, filled.pages.saturating_sub(1));
        self.streams.filled(page, window, filled.pages);
        self.record_fill(page, filled, window, Some(|stats| &stats.remote_reads))
    }

    /// Fill so many pages; one, if the area ends before.
    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome {
        let filled = self.edge.fill(page, pages, source);
        if pages > 1 && filled == (FillOutcome { pages: 0, stop: Some(FillStop::NoArea) }) {
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
    fn record_fill(
        &mut self,
        page: PageNumber,
        filled: FillOutcome,
        window: usize,
        counter: Option<fn(&FaultStats) -> &AtomicU64>,
    ) -> FaultOutcome {
        if !matches!(filled.stop, Some(FillStop::Busy | FillStop::NoMemory)) {
            self.forget_pending_unmaps();
        }
        for filled_page in page..page + filled.pages as u64 {
            self.volume.hold(filled_page, filled_page == page && window == 1);
        }
        if let Some(counter) = counter {
            FaultStats::add(counter(&self.stats), filled.pages);
        }
        if filled.pages > 0 {
            self.has_woken_others = false;
            return FaultOutcome::Resolved;
        }
        match filled.stop {
            None | Some(FillStop::NoArea) => self.edge.wake(page),
            Some(FillStop::Exists) => {
                self.hold_present(page);
                self.edge.wake(page);
            }
            Some(FillStop::Busy | FillStop::NoMemory) => return FaultOutcome::RetrySoon,
            Some(FillStop::Ended) => self.has_ended = true,
        }
        FaultOutcome::Resolved
    }
}
