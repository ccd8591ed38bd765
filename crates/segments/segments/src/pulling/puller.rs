//! Decides which page an owner reads from where.
//!
//! The rules that keep a page whole:
//!
//! - A page is in one READ at a time, and in none once it is present: the program may have changed
//!   it since.
//! - Where an older copy is in the owner's own memory, a READ must not end on top of it before it
//!   is known that a newer copy has the page.

use std::collections::HashMap;

use super::{Lineage, Link};
use crate::mutation::Mutation;
use aquifer_ownership::Life;

/// Pulls the pages of a segment.
#[derive(Clone, Debug)]
pub struct Puller {
    own: Life,
    lineage: Lineage,
    /// A bit for each page.
    present: Vec<u64>,
    pages: u32,
    missing: u32,
    in_flight: HashMap<u32, InFlight>,
    /// All pages below are present or in flight.
    cursor: u32,
    /// Whether the segment has moved on.
    is_over: bool,
}

/// A page on its way.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    /// The place of its copy in the lineage.
    link: usize,
    mode: ReadMode,
    is_demanded: bool,
}

/// How a page is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadMode {
    /// READ whether the page is present there, then its bytes, then whether it is still present.
    Page,
    /// READ whether the page is present there, and nothing else.
    Presence,
    /// Look whether the page was present here in an earlier generation. Its bytes are in place.
    Own,
}

/// A READ that is to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOrder {
    /// The page.
    pub page: u32,
    /// The copy.
    pub from: Link,
    /// What is read.
    pub mode: ReadMode,
    /// Whether a thread waits for the page. Such READs have an endpoint of their own, so that none
    /// waits behind those ahead of the program.
    pub is_urgent: bool,
}

/// What a READ has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadEnd {
    /// The page is present there, before and after.
    Found,
    /// It is not present there.
    NotThere,
    /// The host is gone, with its copy.
    Gone,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Make this READ.
    Read(ReadOrder),
    /// The page is whole: record that it is present. Then let the program have it, if it waits.
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
    /// The owner `own` of a segment of `pages` pages that it has just received.
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
            is_over: false,
        }
    }

    /// The owner after its agent was restarted, with the pages that are present.
    ///
    /// # Panics
    /// Those of [`Self::new`].
    #[must_use]
    pub fn resumed(own: Life, pages: u32, lineage: Lineage, is_present: impl Fn(u32) -> bool) -> Self {
        let mut puller = Self::new(own, pages, lineage);
        for page in (0..pages).filter(|page| is_present(*page)) {
            puller.present[(page / 64) as usize] |= 1 << (page % 64);
            puller.missing -= 1;
        }
        puller
    }

    /// The copies from which it pulls, its own first.
    #[must_use]
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// Pages that are not present yet.
    #[must_use]
    pub fn missing(&self) -> u32 {
        self.missing
    }

    /// Whether no READ is in flight. Before that, the host must not get the segment again.
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

    /// The segment moves on. READs that are on their way are waited for, and bring nothing.
    pub fn finish(&mut self) {
        self.is_over = true;
    }

    /// What is not present is lost from now on, except what is on its way.
    pub fn discard(&mut self) {
        self.lineage = Lineage::of(self.lineage.links().iter().copied().take(1));
        self.cursor = self.pages;
    }

    /// The segment has not moved on after all. Returns whether it had seemed so: then READs may
    /// have ended meanwhile that threads wait for.
    pub fn go_on(&mut self) -> bool {
        let was_over = std::mem::replace(&mut self.is_over, false);
        if was_over {
            self.cursor = 0;
        }
        was_over
    }

    /// A thread waits for a page.
    pub fn demand(&mut self, page: u32) -> Option<Step> {
        if self.is_present(page) {
            return Some(Step::Complete { page, is_demanded: true });
        }
        match self.in_flight.get_mut(&page) {
            Some(read) if !Mutation::ReadTwice.is_active() => {
                read.is_demanded = true;
                None
            }
            _ => self.look(page, 1, true),
        }
    }

    /// The next page ahead of the program; `None` if all are present or in flight.
    pub fn ahead(&mut self) -> Option<Step> {
        while self.cursor < self.pages && !self.is_over {
            let page = self.cursor;
            self.cursor += 1;
            if !self.is_present(page) && !self.in_flight.contains_key(&page) {
                return self.look(page, 1, false);
            }
        }
        None
    }

    /// A READ has ended.
    pub fn read_ended(&mut self, page: u32, end: ReadEnd) -> Option<Step> {
        let InFlight { link, mode, is_demanded } = self.in_flight.remove(&page)?;
        match end {
            _ if self.is_over => None,
            ReadEnd::Found if mode == ReadMode::Presence => {
                self.order(page, InFlight { link, mode: ReadMode::Page, is_demanded })
            }
            ReadEnd::Found => {
                self.present[(page / 64) as usize] |= 1 << (page % 64);
                self.missing -= 1;
                Some(Step::Complete { page, is_demanded })
            }
            ReadEnd::NotThere => self.look(page, link + 1, is_demanded),
            ReadEnd::Gone => Some(Step::Lost { page, is_demanded }),
        }
    }

    /// Looks for a page in a copy.
    fn look(&mut self, page: u32, link: usize, is_demanded: bool) -> Option<Step> {
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
    fn a_page_is_looked_for_in_one_copy_after_the_other() {
        let lineage = Lineage::whole(link(1, 0)).handed_to(link(2, 1)).unwrap();
        let lineage = lineage.handed_to(link(3, 2)).unwrap();
        let mut puller = Puller::new(link(3, 2).at, 100, lineage);
        let first = order(puller.demand(70));
        assert_eq!(first, ReadOrder { page: 70, from: link(2, 1), mode: ReadMode::Page, is_urgent: true });
        assert_eq!(puller.demand(70), None, "it is on its way");
        assert_eq!(order(puller.read_ended(70, ReadEnd::NotThere)).from, link(1, 0));
        let complete = Step::Complete { page: 70, is_demanded: true };
        assert_eq!(puller.read_ended(70, ReadEnd::Found), Some(complete));
        assert_eq!(puller.demand(70), Some(complete), "it is present");
        assert!(puller.is_present(70) && puller.is_idle());
        let lost = Step::Lost { page: 9, is_demanded: false };
        (0..10).for_each(|page| assert_eq!(order(puller.ahead()).page, page));
        assert_eq!(puller.read_ended(9, ReadEnd::Gone), Some(lost));
        assert_eq!(puller.demand(3), None);
        let urgent = Step::Complete { page: 3, is_demanded: true };
        assert_eq!(puller.read_ended(3, ReadEnd::Found), Some(urgent), "a thread waits since");
        assert_eq!(puller.missing(), 98);
    }

    #[test]
    fn nothing_is_read_onto_an_older_copy_of_its_own() {
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
    fn what_is_given_up_is_lost_but_not_what_is_on_its_way() {
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
    fn pulling_goes_on_after_a_restart_and_after_a_hand_over_that_did_not_take_place() {
        let lineage = Lineage::whole(link(1, 0)).handed_to(link(2, 1)).unwrap();
        let mut puller = Puller::resumed(link(2, 1).at, 100, lineage, |page| page % 2 == 0);
        assert_eq!((puller.missing(), order(puller.ahead()).page), (50, 1));
        let ended = order(puller.demand(3));
        puller.finish();
        assert_eq!(puller.read_ended(ended.page, ReadEnd::Found), None, "it has moved on");
        assert!(puller.go_on() && !puller.go_on());
        assert_eq!(order(puller.ahead()).page, 3, "it is read again");
        let complete = Step::Complete { page: 1, is_demanded: false };
        assert_eq!(puller.read_ended(1, ReadEnd::Found), Some(complete), "it was on its way all the time");
    }

    #[test]
    fn a_segment_has_few_copies() {
        let mut lineage = Lineage::whole(link(1, 0));
        for generation in 1..8 {
            lineage = lineage.handed_to(link(2, generation)).unwrap();
        }
        assert_eq!(lineage.handed_to(link(1, 8)), None);
        assert_eq!(lineage.links()[7], link(1, 0));
    }
}
