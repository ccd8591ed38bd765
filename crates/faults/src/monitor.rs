//! The monitor of one program: resolves its faults and chooses its evictions.
//!
//! One thread turns it. It acts through an [`Edge`] and makes no system call of its own.
//! `docs/formats/paging.md` has the rules that keep every byte right. The most important ones:
//!
//! - Events are applied before any fault that was read with them.
//! - A fill that the kernel refuses as busy is decided anew after the next read.
//! - No message is read while the worker moves pages out.
//! - A page that the program has removed is not evicted before the program has faulted on it again.

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

/// Most pages that are filled at one fault of a sequential access.
const WINDOW_MAX: usize = 32;
/// Most pages whose write protection is removed at one fault.
const UNPROTECT_MAX: usize = 64;
/// Attempts to write-protect all pages within one turn.
const PROTECT_TRIES_MAX: u32 = 64;
/// Messages that fit without a new allocation; the journal reads at most as many at once.
const MESSAGES_MAX: usize = 64;

/// What the caller must do after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnOutcome {
    /// Turn again at once.
    Again,
    /// Sleep until the kernel or the sender has something for the monitor.
    Sleep,
    /// Close the monitor: the program has ended.
    Ended,
}

/// A fault that was read and is not resolved.
#[derive(Clone, Copy, Debug)]
struct PendingFault {
    fault: PageFault,
    since_ns: u64,
}

/// Outcome of one attempt to resolve a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FaultOutcome {
    Resolved,
    /// The fault waits for the sender or for room.
    WaitForSender,
    /// The fault waits for the kernel, for a short time.
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
    /// Whether events that were read before a restart must be applied before anything else.
    has_unapplied_events: bool,
    /// Registered ranges that are not yet adopted.
    adopting: Areas,
    /// Ranges outside of `areas` that the program has removed: the kernel may not yet have
    /// dropped what is present there.
    removed: Areas,
    /// Ranges that a remap moved away, and for which the kernel has not yet reported the unmap.
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
    /// Whether the other programs know that this one cannot make room. Without it, two idle
    /// monitors wake each other for ever.
    has_woken_others: bool,
    /// Whether other programs hold the blocks that this one needs to make room.
    lacks_block: bool,
    /// Whether this program is queued for a block.
    wants_block: bool,
    /// Batches that were evicted before a restart and have no block yet.
    unplaced_batches: Vec<UnplacedBatch>,
    /// Whether the pages must be write-protected, because of a fork.
    must_protect: bool,
    repacking: RepackProgress,
    has_ended: bool,
}

impl<E: Edge> Monitor<E> {
    /// Creates a monitor for a program with pages in `volume` and registered `areas`.
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

    /// The pages of the program.
    pub fn volume(&mut self) -> &mut Volume {
        &mut self.volume
    }

    /// The registered and adopted areas.
    #[must_use]
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// Notes that the program has ended.
    pub fn end(&mut self) {
        self.has_ended = true;
    }

    /// Frees all that the program had, after its batches in flight have ended.
    ///
    /// The sender must have been told to abandon the program, so that no batch waits for room.
    pub fn close(mut self) {
        while self.volume.is_in_flight() {
            self.edge.wait_for_sender();
            self.apply_sender_events();
        }
        self.volume.close();
        self.announce_free_block();
    }

    /// Does all that can be done without waiting.
    pub fn turn(&mut self) -> TurnOutcome {
        self.apply_sender_events();
        if !self.has_ended && !self.place_batches() {
            // Nothing notifies this monitor when the mempool has a free block, so it polls.
            self.has_ended = !self.edge.wait_for_sender();
            return if self.has_ended { TurnOutcome::Ended } else { TurnOutcome::Again };
        }
        if std::mem::take(&mut self.has_unapplied_events) && !Mutation::AdoptBeforeEvents.is_active() {
            // The kernel counts these events as read, so a proof of adoption would not fail for
            // them.
            self.read_and_apply();
        }
        // Adoption reads messages too: the faults among them are served below.
        self.adopt_some();
        self.read_and_apply();
        self.protect();
        let must_retry = self.serve_pending() || self.must_protect;
        self.make_room();
        let moves_more = self.repack();
        if self.has_ended {
            TurnOutcome::Ended
        } else if must_retry {
            self.edge.yield_now();
            TurnOutcome::Again
        } else if moves_more || self.adopting.iter().next().is_some() {
            TurnOutcome::Again
        } else {
            TurnOutcome::Sleep
        }
    }

    /// Serves the faults that were read; returns whether some must be tried again soon.
    fn serve_pending(&mut self) -> bool {
        let mut must_retry = false;
        let mut being_served = std::mem::take(&mut self.being_served);
        std::mem::swap(&mut self.pending, &mut being_served);
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
                    must_retry = true;
                    self.pending.push(pending);
                }
            }
        }
        self.being_served = being_served;
        must_retry
    }

    /// Whether faults wait for the sender or for room.
    #[must_use]
    pub fn has_pending_faults(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Records a page that was found present.
    ///
    /// Its word says Zero, or says where the page was before it was filled shortly before a
    /// restart. The page becomes doubtful if the kernel may be about to drop it.
    fn hold_present(&mut self, page: PageNumber) {
        if self.volume.state(page) != PageState::Zero {
            self.volume.hold_present(page);
        } else if self.removed.contains(page) && !Mutation::TrustRemoveEvent.is_active() {
            self.volume.mark_doubtful(page);
        } else {
            self.volume.hold(page, false);
        }
    }

    /// Reads all messages, applies the events in their order, and queues the faults.
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
            // If anything is mapped there now, a later remap has moved it there.
            self.pending_unmaps.swap_remove(at);
            return;
        }
        self.volume.discard(area.start, area.end);
        self.forget_area(area);
    }

    /// Drops the pending unmaps: a fill or a move has just proved that no event is unread.
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
        let mut events = std::mem::take(&mut self.sender_events);
        self.edge.poll_sender(&mut events);
        for event in events.drain(..) {
            self.apply_sender_event(event);
        }
        self.sender_events = events;
    }

    /// Records what the sender has completed.
    fn apply_sender_event(&mut self, event: SenderEvent) {
        match event {
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

    /// Waits for the sender while the condition holds and the program has not ended.
    fn wait_while(&mut self, condition: impl Fn(&Volume) -> bool) {
        while condition(&self.volume) && !self.has_ended {
            if !self.edge.wait_for_sender() {
                self.has_ended = true;
            }
            self.apply_sender_events();
        }
    }

    fn apply_fork(&mut self, child: E::Child) {
        // A page that parent and child both write exists twice afterwards. If that may exceed the
        // limit, the first write must be a fault. Both processes run already.
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
        // Also because the fair share of each program is smaller with one program more.
        self.announce_free_block();
        match child_volume {
            Ok(volume) => self.edge.start_child(child, volume, self.areas.clone()),
            Err(error) => {
                tracing::error!(%error, "a forked program cannot be served: it will wait for ever")
            }
        }
    }

    fn apply_remap(&mut self, index: usize, from: PageNumber, to: PageNumber, pages: u64) {
        // The sender knows the pages of a batch by the numbers with which they left.
        if !Mutation::RemapWhileLeaving.is_active() {
            self.wait_while(Volume::is_leaving);
        }
        if self.has_ended {
            return;
        }
        self.volume.discard(to, to + pages);
        self.edge.begin_remap(index);
        self.volume.move_range(from, to, pages);
        let old = Area { start: from, end: from + pages };
        self.forget_area(old);
        self.pending_unmaps.push(old);
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
                    // It was poisoned for another thread, or unmapped. A thread that still waits
                    // finds out when it accesses the page again.
                    Some(FillStop::Exists | FillStop::NoArea) => {
                        self.edge.wake(page);
                        FaultOutcome::Resolved
                    }
                    None | Some(FillStop::Ended) => FaultOutcome::Resolved,
                }
            }
        }
    }

    /// Whether a fault must wait for room: the run is over its limit and room will be made.
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

    /// Write-protects all pages if that is due.
    ///
    /// The kernel refuses it until the thread that forked has run. That thread runs at this moment,
    /// so it is tried several times; another unread event makes the next turn try again.
    fn protect(&mut self) {
        for _ in 0..PROTECT_TRIES_MAX {
            if !self.must_protect || self.edge.protect(&self.areas) {
                self.must_protect = false;
                return;
            }
            self.edge.yield_now();
        }
    }

    /// Lets a write-protected page be written, and its neighbours as far as there is room.
    ///
    /// The page was shared at a fork, so the write makes one page more resident.
    fn serve_protected(&mut self, page: PageNumber) -> FaultOutcome {
        if Mutation::WakeProtected.is_active() {
            self.edge.wake(page);
            return FaultOutcome::Resolved;
        }
        let area_end = self.areas.end_of(page).unwrap_or(page + 1);
        let max = usize::try_from(area_end - page).unwrap_or(usize::MAX).min(UNPROTECT_MAX);
        let pages = self.room_ahead().clamp(1, max);
        let mut outcome = self.edge.unprotect(page, pages);
        if pages > 1 && outcome.stop == Some(FillStop::NoArea) {
            outcome = self.edge.unprotect(page, 1);
        }
        match outcome.stop {
            None => {
                self.has_woken_others = false;
                self.budget.grant(outcome.pages as u64);
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

    /// Fills from consecutive slots: pages that left together are adjacent in the mempool.
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

    /// Fills pages; only the first if the range is not one area.
    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome {
        let filled = self.edge.fill(page, pages, source);
        if pages > 1 && filled == (FillOutcome { pages: 0, stop: Some(FillStop::NoArea) }) {
            return self.edge.fill(page, 1, source);
        }
        filled
    }

    /// How many pages to fill at a fault; more than one only while there is room.
    fn window(&mut self, page: PageNumber) -> usize {
        let max = self.room_ahead().clamp(1, WINDOW_MAX);
        self.streams.window(page, max)
    }

    /// Pages that may be filled ahead: half of the room below the limit.
    fn room_ahead(&self) -> usize {
        let room = self.budget.resident_max().saturating_sub(self.budget.resident()) / 2;
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    /// Records a fill: the filled pages are held, and the fault is resolved if there are any.
    ///
    /// Only a page that was filled alone counts as wanted for replacement: in a sequential access a
    /// page returns because of its position.
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
