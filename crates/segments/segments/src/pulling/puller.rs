//! The puller: decides which page an owner reads from which copy.
//!
//! Two rules prevent torn and outdated pages:
//!
//! - A page is in one READ at a time, and in none once it is present: the program may have changed
//!   it since.
//! - If an older copy of the page is in the owner's own memory, a READ must not overwrite it before
//!   it is known that a newer copy has the page.

use std::collections::HashMap;

use super::{Lineage, Link};
use crate::mutation::Mutation;
use aquifer_ownership::Life;

/// The state machine that pulls the pages of a segment for one owner in one generation.
#[derive(Clone, Debug)]
pub struct Puller {
    own: Life,
    lineage: Lineage,
    /// One bit for each page: whether it is present at the owner.
    present: Vec<u64>,
    pages: u32,
    missing: u32,
    in_flight: HashMap<u32, InFlight>,
    /// All pages below this number are present or in flight.
    cursor: u32,
    /// Whether the segment is being handed over, so that READs have no effect.
    is_finished: bool,
}

/// A READ in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The index of its copy in the lineage.
    link: usize,
    mode: ReadMode,
    is_demanded: bool,
}

/// How a page is read from a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadMode {
    /// READ the presence bit, then the bytes, then the presence bit again.
    Page,
    /// READ the presence bit only.
    Presence,
    /// Check the presence bit of an earlier generation of this host. The bytes are in place.
    Own,
}

/// A READ to perform.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOrder {
    /// The page.
    pub page: u32,
    /// The copy.
    pub from: Link,
    /// How the page is read.
    pub mode: ReadMode,
    /// Whether a thread waits for the page. Such READs have an endpoint of their own, so that none
    /// waits behind READs ahead of the program.
    pub is_urgent: bool,
}

/// The result of a READ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadEnd {
    /// The page is present in the copy, before and after its bytes were read.
    Found,
    /// The page is not present in the copy.
    NotThere,
    /// The copy does not exist any more.
    Gone,
}

/// An action for the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Perform a READ.
    Read(ReadOrder),
    /// Record that the page is present, and then map it in the program.
    Complete {
        /// The page.
        page: u32,
        /// Whether a thread waits for it.
        is_demanded: bool,
    },
    /// The page is lost.
    Lost {
        /// The page.
        page: u32,
        /// Whether a thread waits for it.
        is_demanded: bool,
    },
}

impl Puller {
    /// A puller for owner `own`, which has just received a segment of `pages` pages.
    ///
    /// # Panics
    /// If the lineage does not begin with the owner.
    #[must_use]
    pub fn new(own: Life, pages: u32, lineage: Lineage) -> Self {
        assert_eq!(lineage.links()[0].at, own, "the first copy is the owner's");
        let present = vec![0; pages.div_ceil(64) as usize];
        Self {
            own,
            lineage,
            present,
            pages,
            missing: pages,
            in_flight: HashMap::new(),
            cursor: 0,
            is_finished: false,
        }
    }

    /// A puller for an owner whose agent was restarted, which has some of the pages.
    ///
    /// # Panics
    /// If the lineage does not begin with the owner.
    #[must_use]
    pub fn resumed(own: Life, pages: u32, lineage: Lineage, is_present: impl Fn(u32) -> bool) -> Self {
        let mut puller = Self::new(own, pages, lineage);
        for page in (0..pages).filter(|page| is_present(*page)) {
            puller.present[(page / 64) as usize] |= 1 << (page % 64);
            puller.missing -= 1;
        }
        puller
    }

    /// The copies from which the owner pulls, its own first.
    #[must_use]
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// Number of pages that are not present yet.
    #[must_use]
    pub fn missing(&self) -> u32 {
        self.missing
    }

    /// Whether no READ is in flight. The host must not receive the segment again before that.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether a page is present.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn is_present(&self, page: u32) -> bool {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        self.present[(page / 64) as usize] & 1 << (page % 64) != 0
    }

    /// Stops pulling because the segment is handed over. READs in flight have no effect.
    pub fn finish(&mut self) {
        self.is_finished = true;
    }

    /// Makes each page lost that is neither present nor in flight.
    pub fn discard(&mut self) {
        self.lineage = Lineage::of(self.lineage.links().iter().copied().take(1));
        self.cursor = self.pages;
    }

    /// Resumes pulling after a hand-over was retracted. Returns whether pulling was stopped: then
    /// the caller must wake the waiting threads, because READs have ended without effect.
    pub fn resume(&mut self) -> bool {
        let was_finished = std::mem::replace(&mut self.is_finished, false);
        if was_finished {
            self.cursor = 0;
        }
        was_finished
    }

    /// Requests a page for which a thread waits. Returns `None` if a READ of it is in flight.
    pub fn demand(&mut self, page: u32) -> Option<Step> {
        if self.is_present(page) {
            return Some(Step::Complete { page, is_demanded: true });
        }
        match self.in_flight.get_mut(&page) {
            Some(read) if !Mutation::ReadTwice.is_active() => {
                read.is_demanded = true;
                None
            }
            _ => self.read_copy(page, 1, true),
        }
    }

    /// Requests the next page ahead of the program; `None` if all are present or in flight.
    pub fn ahead(&mut self) -> Option<Step> {
        while self.cursor < self.pages && !self.is_finished {
            let page = self.cursor;
            self.cursor += 1;
            if !self.is_present(page) && !self.in_flight.contains_key(&page) {
                return self.read_copy(page, 1, false);
            }
        }
        None
    }

    /// Applies the result of a READ.
    pub fn read_ended(&mut self, page: u32, end: ReadEnd) -> Option<Step> {
        let InFlight { link, mode, is_demanded } = self.in_flight.remove(&page)?;
        match end {
            _ if self.is_finished => None,
            ReadEnd::Found if mode == ReadMode::Presence => {
                self.order(page, InFlight { link, mode: ReadMode::Page, is_demanded })
            }
            ReadEnd::Found => {
                self.present[(page / 64) as usize] |= 1 << (page % 64);
                self.missing -= 1;
                Some(Step::Complete { page, is_demanded })
            }
            ReadEnd::NotThere => self.read_copy(page, link + 1, is_demanded),
            ReadEnd::Gone => Some(Step::Lost { page, is_demanded }),
        }
    }

    /// Orders a READ of a page from the copy at index `link`. If there is none, the page is lost.
    fn read_copy(&mut self, page: u32, link: usize, is_demanded: bool) -> Option<Step> {
        let Some(from) = self.lineage.links().get(link) else {
            return Some(Step::Lost { page, is_demanded });
        };
        let is_own = |link: &Link| link.at == self.own;
        let has_older = self.lineage.links()[link..].iter().any(is_own);
        let mode = if is_own(from) {
            ReadMode::Own
        } else if has_older && !Mutation::ReadOntoOlder.is_active() {
            ReadMode::Presence
        } else {
            ReadMode::Page
        };
        self.order(page, InFlight { link, mode, is_demanded })
    }

    fn order(&mut self, page: u32, read: InFlight) -> Option<Step> {
        let InFlight { link, mode, is_demanded } = read;
        let Some(from) = self.lineage.links().get(link).copied() else {
            return Some(Step::Lost { page, is_demanded });
        };
        self.in_flight.insert(page, read);
        Some(Step::Read(ReadOrder { page, from, mode, is_urgent: is_demanded }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn link(host: u16, generation: u64) -> Link {
        Link { at: Life { host, epoch: 1 }, generation }
    }

    fn order(step: Option<Step>) -> ReadOrder {
        match step {
            Some(Step::Read(order)) => order,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_page_is_read_from_the_newest_copy_that_has_it() {
        let lineage = Lineage::whole(link(1, 0)).handed_to(link(2, 1)).unwrap();
        let lineage = lineage.handed_to(link(3, 2)).unwrap();
        let mut puller = Puller::new(link(3, 2).at, 100, lineage);
        let first = order(puller.demand(70));
        assert_eq!(first, ReadOrder { page: 70, from: link(2, 1), mode: ReadMode::Page, is_urgent: true });
        assert_eq!(puller.demand(70), None, "a READ is in flight");
        assert_eq!(order(puller.read_ended(70, ReadEnd::NotThere)).from, link(1, 0));
        let complete = Step::Complete { page: 70, is_demanded: true };
        assert_eq!(puller.read_ended(70, ReadEnd::Found), Some(complete));
        assert_eq!(puller.demand(70), Some(complete), "the page is present");
        assert!(puller.is_present(70) && puller.is_idle());
        let lost = Step::Lost { page: 9, is_demanded: false };
        (0..10).for_each(|page| assert_eq!(order(puller.ahead()).page, page));
        assert_eq!(puller.read_ended(9, ReadEnd::Gone), Some(lost));
        assert_eq!(puller.demand(3), None);
        let urgent = Step::Complete { page: 3, is_demanded: true };
        assert_eq!(puller.read_ended(3, ReadEnd::Found), Some(urgent), "a thread waits by now");
        assert_eq!(puller.missing(), 98);
    }

    #[test]
    fn an_older_copy_in_the_same_memory_is_overwritten_only_by_a_newer_page() {
        let lineage = Lineage::whole(link(1, 0)).handed_to(link(2, 1)).unwrap();
        let mut puller = Puller::new(link(1, 2).at, 10, lineage.handed_to(link(1, 2)).unwrap());
        assert_eq!(order(puller.demand(4)).mode, ReadMode::Presence);
        assert_eq!(order(puller.read_ended(4, ReadEnd::Found)).mode, ReadMode::Page);
        assert_eq!(order(puller.demand(5)).mode, ReadMode::Presence);
        let own = order(puller.read_ended(5, ReadEnd::NotThere));
        assert_eq!((own.mode, own.from), (ReadMode::Own, link(1, 0)));
        assert!(matches!(puller.read_ended(5, ReadEnd::Found), Some(Step::Complete { .. })));
    }

    #[test]
    fn discarded_pages_are_lost_unless_a_read_is_in_flight() {
        let lineage = Lineage::whole(link(1, 0)).handed_to(link(2, 1)).unwrap();
        let mut puller = Puller::new(link(2, 1).at, 10, lineage);
        let (found, missed) = (order(puller.demand(1)), order(puller.demand(2)));
        puller.discard();
        let complete = Step::Complete { page: 1, is_demanded: true };
        assert_eq!(puller.read_ended(found.page, ReadEnd::Found), Some(complete));
        let lost = |page| Some(Step::Lost { page, is_demanded: true });
        assert_eq!(puller.read_ended(missed.page, ReadEnd::NotThere), lost(2));
        assert_eq!((puller.demand(3), puller.ahead()), (lost(3), None));
        assert_eq!(puller.demand(1), Some(complete));
    }

    #[test]
    fn pulling_resumes_after_a_restart_and_after_a_retracted_hand_over() {
        let lineage = Lineage::whole(link(1, 0)).handed_to(link(2, 1)).unwrap();
        let mut puller = Puller::resumed(link(2, 1).at, 100, lineage, |page| page % 2 == 0);
        assert_eq!((puller.missing(), order(puller.ahead()).page), (50, 1));
        let ended = order(puller.demand(3));
        puller.finish();
        assert_eq!(puller.read_ended(ended.page, ReadEnd::Found), None, "pulling is stopped");
        assert!(puller.resume() && !puller.resume());
        assert_eq!(order(puller.ahead()).page, 3, "the page is read again");
        let complete = Step::Complete { page: 1, is_demanded: false };
        assert_eq!(puller.read_ended(1, ReadEnd::Found), Some(complete), "the READ was in flight meanwhile");
    }

    #[test]
    fn the_number_of_copies_is_limited() {
        let mut lineage = Lineage::whole(link(1, 0));
        for generation in 1..8 {
            lineage = lineage.handed_to(link(2, generation)).unwrap();
        }
        assert_eq!(lineage.handed_to(link(1, 8)), None);
        assert_eq!(lineage.links()[7], link(1, 0));
    }
}
