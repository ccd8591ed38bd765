//! New areas come under the monitor's control.

use aquifer_pager::{Mutation, PageNumber, PageState};

use super::Monitor;
use crate::areas::Area;
use crate::edge::Edge;
use crate::kernel::{FillSource, FillStop};

/// Present pages of new areas looked through in one turn.
const ADOPT_PAGES_MAX: usize = 4096;
/// Places looked at in one go, whatever is there: holes take next to no time.
const ADOPT_SPAN_PAGES: u64 = 1 << 18;
/// And areas.
const ADOPT_AREAS_MAX: usize = 16;
/// Pages proved registered by one fill.
const PROVE_PAGES_MAX: usize = 512;

impl<E: Edge> Monitor<E> {
    /// Take newly found areas under control: from now on their missing pages are reported; the present ones are looked through by and by
    /// and may then be taken.
    pub fn adopt(&mut self, found: &[Area]) {
        // All are registered before any is looked at: from then on none of them grows unheard.
        let unknown = found.iter().flat_map(|area| self.areas.missing(*area));
        let gaps: Vec<Area> = unknown.flat_map(|area| self.adopting.missing(area)).collect();
        for gap in gaps {
            if self.edge.register(gap.start, gap.end) {
                self.adopting.insert(gap);
            }
        }
    }

    /// Look through a part of what was registered. The rest waits for the next turn, so that faults do not wait for it, and what was
    /// found can be taken already: the program goes on writing into pages that it has.
    pub(super) fn adopt_some(&mut self) {
        let mut pages = 0;
        for _ in 0..ADOPT_AREAS_MAX {
            let Some(area) = self.adopting.iter().next().filter(|_| pages < ADOPT_PAGES_MAX) else {
                return;
            };
            let part = Area { start: area.start, end: area.end.min(area.start + ADOPT_SPAN_PAGES) };
            if !self.can_adopt(part) {
                return;
            }
            pages += self.adopt_part(part, ADOPT_PAGES_MAX - pages);
        }
    }

    /// Whether an Unmap of the part that is heard from now on is of what is there now. It may be of what was moved away, and would be passed over, as long
    /// as something is outstanding.
    fn can_adopt(&mut self, part: Area) -> bool {
        let is_touched =
            self.pending_unmaps.iter().any(|area| area.start < part.end && part.start < area.end);
        if is_touched && self.edge.has_no_unread_event() {
            self.forget_pending_unmaps();
            return true;
        }
        !is_touched
    }

    /// Look through a part as far as there are at most so many pages; how many there were.
    fn adopt_part(&mut self, part: Area, max: usize) -> usize {
        let mut present = std::mem::take(&mut self.present);
        present.clear();
        let end = self.edge.present_pages(part.start, part.end, max, &mut present);
        let part = Area { start: part.start, end };
        for run in present.chunk_by(|one, next| one + 1 == *next).flat_map(|run| run.chunks(PROVE_PAGES_MAX))
        {
            self.adopt_run(run[0], run.len());
        }
        let pages = present.len();
        self.present = present;
        // What was unmapped meanwhile is not there any more.
        for area in self.adopting.extract(part) {
            self.areas.insert(area);
            self.removed.remove(area);
        }
        pages
    }

    /// Pages were seen present at a place that was registered a moment ago. Meanwhile they may have been unmapped and other,
    /// unregistered memory mapped there, whose pages must never be taken: their faults would not be told. A fill looks first whether
    /// all of its range is one registered area, and then finds the first page present: that proves that it is registered, and
    /// that whatever happens to it later will be heard.
    fn adopt_run(&mut self, first: PageNumber, pages: usize) {
        let end = first + pages as u64;
        let mut page = first;
        while page < end && !self.has_ended {
            let pages = match self.volume.state(page) {
                PageState::Zero => {
                    (page..end).take_while(|page| self.volume.state(*page) == PageState::Zero).count()
                }
                // Filled just before a restart.
                PageState::Staged(_) | PageState::Reclaimable(_) | PageState::Remote(_) => 1,
                PageState::Held | PageState::Leaving | PageState::Doubtful | PageState::Lost => {
                    page += 1;
                    continue;
                }
            };
            page += self.prove_registered(page, pages) as u64;
        }
    }

    /// Prove pages registered, or decide that they are not; how many were decided, none if something happened meanwhile.
    fn prove_registered(&mut self, first: PageNumber, pages: usize) -> usize {
        if Mutation::AdoptUnproved.is_active() {
            (first..first + pages as u64).for_each(|page| self.volume.hold(page, false));
            return pages;
        }
        let filled = self.edge.fill(first, pages, FillSource::Zeros { is_private: false });
        let is_known_elsewhere = !matches!(self.volume.state(first), PageState::Zero);
        assert!(filled.pages == 0 || !is_known_elsewhere, "page {first:#x} was seen present, and was not");
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
            // It may be more than one area.
            Some(FillStop::NoArea) if pages > 1 => self.prove_registered(first, pages / 2),
            Some(FillStop::NoArea | FillStop::NoMemory) => 1,
            Some(FillStop::Ended) => {
                self.has_ended = true;
                pages
            }
        }
    }
}
