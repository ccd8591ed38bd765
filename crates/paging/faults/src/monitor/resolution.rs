//! Resolution of faults: fills missing pages and removes write protection.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aquifer_pager::{Mutation, PageNumber, PageState, Slot, Volume};

use super::{Monitor, PendingFault};
use crate::edge::{Edge, OtherPrograms};
use crate::kernel::{FillOutcome, FillSource, FillStop, PageFault};
use crate::stats::{FaultStats, FaultWait};

/// Maximum number of pages that are filled at one fault of a sequential access.
const WINDOW_MAX: usize = 32;
/// Maximum number of pages whose write protection is removed at one fault.
const UNPROTECT_MAX: usize = 64;

/// Outcome of one attempt to resolve a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultOutcome {
    /// The fault is resolved.
    Resolved,
    /// The fault waits for the sender or for room.
    WaitForSender,
    /// The fault waits for the kernel, for a short time.
    RetrySoon,
}

impl<E: Edge> Monitor<E> {
    /// Serves the faults that were read. Returns whether some must be retried soon.
    pub(super) fn serve_pending(&mut self) -> bool {
        let mut must_retry = false;
        let mut being_served = std::mem::take(&mut self.being_served);
        std::mem::swap(&mut self.pending, &mut being_served);
        for pending in being_served.drain(..) {
            if self.has_ended {
                break;
            }
            self.fault_wait = FaultWait::Nothing;
            match self.serve_fault(pending.fault) {
                FaultOutcome::Resolved => {
                    FaultStats::add(&self.stats.faults, 1);
                    let wait = if pending.has_waited { FaultWait::Room } else { self.fault_wait };
                    let latency_ns = self.edge.now_ns().saturating_sub(pending.since_ns);
                    self.stats.latency_of(wait).record(latency_ns);
                }
                FaultOutcome::WaitForSender => {
                    self.pending.push(PendingFault { has_waited: true, ..pending })
                }
                FaultOutcome::RetrySoon => {
                    must_retry = true;
                    self.pending.push(pending);
                }
            }
        }
        self.being_served = being_served;
        must_retry
    }

    /// Attempts to resolve a fault, by the state of its page.
    pub(super) fn serve_fault(&mut self, fault: PageFault) -> FaultOutcome {
        if self.budget.excess() > 0 && self.must_wait_for_room() {
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
            PageState::Lost if Mutation::FillLost.is_active() => {
                self.volume.discard(page, page + 1);
                self.serve_zero(fault)
            }
            PageState::Lost => {
                let filled = self.edge.poison(page);
                match filled.stop {
                    Some(FillStop::Busy | FillStop::NoMemory) => FaultOutcome::RetrySoon,
                    // The page was poisoned for another thread, or unmapped. The waiting thread
                    // must access it again.
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
        if self.budget.excess() == 0 {
            return false;
        }
        if self.volume.is_in_flight() || self.lacks_block {
            return true;
        }
        self.edge.wake_others(OtherPrograms::WithPages);
        false
    }

    /// Removes the write protection of a page, and of its neighbours as far as there is room.
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

    /// Resolves a fault by a page of zeros.
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

    /// Resolves a fault from consecutive slots: pages that left together are adjacent in the
    /// mempool.
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
        self.fault_wait = FaultWait::Host;
        let filled = self.fill(page, pages, FillSource::Slot(slot));
        self.streams.filled(page, window, filled.pages);
        self.record_fill(page, filled, window, Some(counter))
    }

    /// Resolves a fault from the page cache. Returns `None` if the page is not cached.
    fn serve_cached(&mut self, page: PageNumber, window: usize) -> Option<FaultOutcome> {
        let PageState::Remote(location) = self.volume.state(page) else { return None };
        let cache = self.volume.slabs().cache()?;
        cache.slot_of(location)?;
        let cache = Arc::clone(cache);
        let pinned = cache.pin(location)?;
        let pages = self.volume.cached_pages(page, pinned.slot(), window);
        if pages == 0 {
            return None;
        }
        self.fault_wait = FaultWait::Host;
        let filled = self.fill(page, pages, FillSource::Slot(pinned.slot()));
        self.streams.filled(page, window, filled.pages);
        Some(self.record_fill(page, filled, window, Some(|stats| &stats.cache_hits)))
    }

    /// Resolves a fault from the page cache, or else from memory nodes. A page that no replica can
    /// provide is lost.
    fn serve_remote(&mut self, page: PageNumber) -> FaultOutcome {
        let window = self.window(page);
        if let Some(outcome) = self.serve_cached(page, window) {
            return outcome;
        }
        self.fault_wait = FaultWait::Node;
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

    /// Fills pages; fills only the first if the range is not one area.
    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome {
        let filled = self.edge.fill(page, pages, source);
        if pages > 1 && filled == (FillOutcome { pages: 0, stop: Some(FillStop::NoArea) }) {
            return self.edge.fill(page, 1, source);
        }
        filled
    }

    /// Returns the number of pages to fill at a fault: more than one only while there is room.
    fn window(&mut self, page: PageNumber) -> usize {
        let max = self.room_ahead().clamp(1, WINDOW_MAX);
        self.streams.window(page, max)
    }

    /// Returns the number of pages that may be filled ahead: half of the room below the limit.
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

    /// Records a page that was found present.
    ///
    /// The page word is Zero, or has the location of the page before it was filled shortly before a
    /// restart. The page becomes doubtful if the kernel may be about to drop it.
    pub(super) fn hold_present(&mut self, page: PageNumber) {
        if self.volume.state(page) != PageState::Zero {
            self.volume.hold_present(page);
        } else if self.removed.contains(page) && !Mutation::TrustRemoveEvent.is_active() {
            self.volume.mark_doubtful(page);
        } else {
            self.volume.hold(page, false);
        }
    }
}
