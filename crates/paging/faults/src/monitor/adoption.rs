//! Adoption: brings the pages of newly registered areas under the monitor's control.

use aquifer_pager::{Mutation, PageNumber, PageState};

use super::Monitor;
use crate::areas::Area;
use crate::edge::Edge;
use crate::kernel::{FillSource, FillStop};

/// Maximum number of present pages that are adopted in one turn.
const ADOPT_PAGES_MAX: usize = 4096;
/// Maximum number of pages that one call scans for presence. Holes cost next to nothing.
const ADOPT_SPAN_PAGES: u64 = 1 << 18;
/// Maximum number of areas that are scanned in one turn.
const ADOPT_AREAS_MAX: usize = 16;
/// Maximum number of pages that one fill proves registered.
const PROVE_PAGES_MAX: usize = 512;

impl<E: Edge> Monitor<E> {
    /// Sets the areas that the next turn registers.
    ///
    /// `found`: all pageable areas of the program's memory map. They replace those that were found
    /// before and are not registered.
    pub fn adopt(&mut self, found: Vec<Area>) {
        self.found = found;
    }

    /// Registers newly found areas, and queues them for adoption.
    ///
    /// From now on their missing pages are faults. Pages that are present are adopted over the
    /// next turns, and can then be evicted.
    ///
    /// Also drops the pending unmaps, soon after a remap that leaves its old range mapped.
    ///
    /// Waits for a turn in which no event is unread. Otherwise an area may be where memory was
    /// moved by a Remap that is unread, and that Remap would seem to move pages onto others.
    pub(super) fn register_found(&mut self) {
        let is_nothing_due =
            self.found.is_empty() && self.pending_unmaps.is_empty() && self.unconfirmed.is_empty();
        if is_nothing_due || !self.edge.has_no_unread_event() {
            return;
        }
        self.forget_pending_unmaps();
        // All are registered before any is adopted: a registered area cannot grow unnoticed.
        let found = std::mem::take(&mut self.found);
        let unknown = found.iter().flat_map(|area| self.areas.missing(*area));
        let gaps: Vec<Area> = unknown.flat_map(|area| self.adopting.missing(area)).collect();
        for gap in gaps {
            if self.edge.register(gap.start, gap.end) {
                self.unconfirmed.insert(gap);
            }
        }
        // What was unmapped since the areas were found was not registered, and has raised no event.
        // Something else may be mapped there now.
        self.confirm(&[]);
    }

    /// Adopts a part of the registered ranges.
    ///
    /// The rest waits for later turns, so that faults do not wait for adoption, and adopted pages
    /// can be evicted early: the program keeps writing to present pages without a fault.
    ///
    /// Returns whether adoption must wait for an event.
    pub(super) fn adopt_some(&mut self) -> bool {
        let mut pages = 0;
        for _ in 0..ADOPT_AREAS_MAX {
            let Some(area) = self.adopting.iter().next().filter(|_| pages < ADOPT_PAGES_MAX) else {
                return false;
            };
            let part = Area { start: area.start, end: area.end.min(area.start + ADOPT_SPAN_PAGES) };
            if !self.can_adopt(part) {
                return true;
            }
            pages += self.adopt_part(part, ADOPT_PAGES_MAX - pages);
        }
        false
    }

    /// Whether an unmap of this range that is read from now on concerns the memory that is mapped
    /// there now.
    ///
    /// While an event is unread, it may concern memory that a remap has moved away, and would be
    /// ignored.
    fn can_adopt(&mut self, part: Area) -> bool {
        let has_pending_unmap = self.pending_unmaps.iter().any(|area| area.overlaps(part));
        if has_pending_unmap && self.edge.has_no_unread_event() {
            self.forget_pending_unmaps();
            return true;
        }
        !has_pending_unmap
    }

    /// Adopts a range up to `max` present pages. Returns the number of present pages.
    fn adopt_part(&mut self, part: Area, max: usize) -> usize {
        let mut present = std::mem::take(&mut self.present);
        present.clear();
        let mut end = self.edge.present_pages(part.start, part.end, max, &mut present);
        let ranges = present.chunk_by(|one, next| one + 1 == *next);
        for range in ranges.flat_map(|range| range.chunks(PROVE_PAGES_MAX)) {
            if let Some(stale_from) = self.adopt_range(range[0], range.len()) {
                end = stale_from;
                break;
            }
        }
        let pages = present.len();
        self.present = present;
        // A part that was unmapped meanwhile is not in `adopting` any more.
        for area in self.adopting.extract(Area { start: part.start, end }) {
            self.areas.insert(area);
            self.removed.remove(area);
        }
        pages
    }

    /// Adopts consecutive pages that were seen present after their range was registered.
    ///
    /// Since then they may have been unmapped, and unregistered memory mapped in their place. Such
    /// pages must never be evicted, because their faults would not be reported. A trial fill
    /// detects them: the kernel first checks that the whole range is one registered area, and then
    /// finds the first page present. That proves that the pages are registered, and that no event
    /// was unread.
    ///
    /// If an event was unread, it is applied, and the page from which on the presence must be
    /// determined again is returned: a remap may have put an evicted page where a present one was
    /// seen.
    fn adopt_range(&mut self, first: PageNumber, pages: usize) -> Option<PageNumber> {
        let end = first + pages as u64;
        let mut page = first;
        while page < end && !self.has_ended {
            let pages = match self.volume.state(page) {
                PageState::Zero => {
                    (page..end).take_while(|page| self.volume.state(*page) == PageState::Zero).count()
                }
                // Filled shortly before a restart.
                PageState::Staged(_) | PageState::Reclaimable(_) | PageState::Remote(_) => 1,
                PageState::Held | PageState::Leaving | PageState::Doubtful | PageState::Lost => {
                    page += 1;
                    continue;
                }
            };
            match self.prove_registered(page, pages) {
                0 if Mutation::AdoptFromOldList.is_active() => {}
                0 => return Some(page),
                decided => page += decided as u64,
            }
        }
        None
    }

    /// Proves that pages are registered, or that they are not.
    ///
    /// Returns the number of pages for which this is decided; 0 if an event was unread.
    fn prove_registered(&mut self, first: PageNumber, pages: usize) -> usize {
        let filled = self.edge.fill(first, pages, FillSource::Zeros { is_private: false });
        let is_known_elsewhere = !matches!(self.volume.state(first), PageState::Zero);
        if filled.pages > 0 && is_known_elsewhere {
            self.edge.end_run(&format!(
                "a program of it changes its userfaultfd: the page {first:#x} was present and is missing"
            ));
            self.has_ended = true;
            return pages;
        }
        match filled.stop {
            None | Some(FillStop::Exists) => {
                self.forget_pending_unmaps();
                (first..first + pages as u64).for_each(|page| self.hold_present(page));
                pages
            }
            Some(FillStop::Busy) => {
                self.read_and_apply();
                self.edge.yield_now();
                0
            }
            // The range may span several areas.
            Some(FillStop::NoArea) if pages > 1 => self.prove_registered(first, pages / 2),
            Some(FillStop::NoArea | FillStop::NoMemory) => 1,
            Some(FillStop::Ended) => {
                self.has_ended = true;
                pages
            }
        }
    }
}
