//! Batches leave a program whose kernel does its worst: it moves pages without counting them, meets pages that it cannot move, has an
//! event unread, and finds what a debugger has left where the pages go.

use std::cell::RefCell;

use aquifer_attach::batch::{Batch, PLACES_MAX, Pages, obey};
use proptest::prelude::*;

const PAGE: usize = 4096;
const MISSING: u32 = libc::ENOENT as u32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Missing,
    Own(u64),
    Shared(u64),
    Pinned(u64),
    /// The kernel is about to bring it to another place in memory: who moves it waits first, once.
    Migrating(u64),
}

impl Page {
    fn content(self) -> Option<u64> {
        match self {
            Self::Missing => None,
            Self::Own(content) | Self::Shared(content) | Self::Pinned(content) | Self::Migrating(content) => {
                Some(content)
            }
        }
    }
}

fn errno(error: i32) -> isize {
    -(error as isize)
}

/// As `UFFDIO_MOVE` tells it: what stopped a move is told only if nothing was moved.
fn move_pages(from: &mut [Page], to: &mut [Option<u64>]) -> (usize, isize) {
    let (moved, error) = try_move_pages(from, to);
    (moved, if moved > 0 && error != 0 { errno(libc::EAGAIN) } else { error })
}

/// What Linux 6.18 does: once it had to wait, it moves what can be moved, does not count it, and tries the first of it again.
fn try_move_pages(from: &mut [Page], to: &mut [Option<u64>]) -> (usize, isize) {
    let mut moved = 0;
    let mut has_waited = false;
    while moved < from.len() {
        if to[moved].is_some() {
            return (moved, errno(libc::EEXIST));
        }
        match from[moved] {
            Page::Missing => return (moved, errno(libc::ENOENT)),
            Page::Shared(_) | Page::Pinned(_) => return (moved, errno(libc::EBUSY)),
            Page::Migrating(content) => {
                from[moved] = Page::Own(content);
                has_waited = true;
            }
            Page::Own(_) => {
                let mut at = moved;
                while let Some(Page::Own(content)) = from.get(at).copied()
                    && to[at].is_none()
                {
                    to[at] = Some(content);
                    from[at] = Page::Missing;
                    at += 1;
                }
                if !has_waited {
                    moved = at;
                }
            }
        }
    }
    (moved, 0)
}

struct Model {
    program: Vec<Page>,
    antechamber: Vec<Option<u64>>,
    staging: Vec<Option<u64>>,
    /// Of the calls that move pages, which find an event unread; those after the last find none.
    unread: Vec<bool>,
    /// Which pages migrate when they are on their way to staging.
    migrates: Vec<bool>,
    calls: usize,
}

impl Model {
    fn is_event_unread(&mut self) -> bool {
        self.calls += 1;
        self.unread.get(self.calls - 1).copied().unwrap_or(false)
    }
}

impl Pages for Model {
    fn occupied(&mut self, places: &mut [bool]) {
        for (place, page) in places.iter_mut().zip(&self.antechamber) {
            *place = page.is_some();
        }
    }

    fn take(&mut self, address: usize, place: usize, pages: usize) -> (usize, isize) {
        if self.is_event_unread() {
            return (0, errno(libc::EAGAIN));
        }
        let first = address / PAGE;
        move_pages(&mut self.program[first..first + pages], &mut self.antechamber[place..place + pages])
    }

    fn make_own(&mut self, address: usize) -> isize {
        if self.is_event_unread() {
            return errno(libc::EBUSY);
        }
        let page = &mut self.program[address / PAGE];
        if let Page::Shared(content) = *page {
            *page = Page::Migrating(content);
        }
        0
    }

    fn stage(&mut self, place: usize, pages: usize) -> (usize, isize) {
        let range = place..place + pages;
        let mut from: Vec<Page> = range
            .clone()
            .map(|place| match self.antechamber[place] {
                None => Page::Missing,
                Some(content) if std::mem::take(&mut self.migrates[place]) => Page::Migrating(content),
                Some(content) => Page::Own(content),
            })
            .collect();
        let outcome = move_pages(&mut from, &mut self.staging[range.clone()]);
        for (place, page) in range.zip(from) {
            self.antechamber[place] = page.content();
        }
        outcome
    }

    fn empty_staging(&mut self) {
        self.staging.fill(None);
    }
}

struct Addresses {
    pages: Vec<usize>,
    statuses: RefCell<Vec<u32>>,
}

impl Batch for Addresses {
    fn count(&self) -> usize {
        self.pages.len()
    }

    fn address(&self, place: usize) -> usize {
        self.pages[place] * PAGE
    }

    fn set(&self, place: usize, status: u32) {
        self.statuses.borrow_mut()[place] = status;
    }

    fn is_moved(&self, place: usize) -> bool {
        self.statuses.borrow()[place] == 0
    }
}

fn page(kind: u8, content: u64) -> Page {
    match kind {
        0 => Page::Missing,
        1 => Page::Shared(content),
        2 => Page::Pinned(content),
        3..=5 => Page::Migrating(content),
        _ => Page::Own(content),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn no_page_is_anywhere_but_where_it_is_said_to_be(
        kinds in prop::collection::vec(0u8..16, 128),
        wanted in prop::sample::subsequence((0..128).collect::<Vec<usize>>(), 0..=PLACES_MAX),
        unread in prop::collection::vec(prop::bool::weighted(0.1), 0..20),
        migrates in prop::collection::vec(prop::bool::weighted(0.2), PLACES_MAX),
        foreign in prop::collection::vec(prop::bool::weighted(0.02), PLACES_MAX),
    ) {
        let before: Vec<Page> =
            kinds.iter().zip(1..).map(|(kind, content)| page(*kind, content)).collect();
        let mut model = Model {
            program: before.clone(),
            antechamber: foreign.iter().map(|is_foreign| is_foreign.then_some(u64::MAX)).collect(),
            staging: vec![Some(u64::MAX); PLACES_MAX],
            unread,
            migrates,
            calls: 0,
        };
        let batch = Addresses { statuses: RefCell::new(vec![u32::MAX; wanted.len()]), pages: wanted };
        prop_assert!(obey(&mut model, &batch).is_ok());
        prop_assert!(model.antechamber.iter().all(Option::is_none), "the antechamber is empty afterwards");
        for (place, page) in batch.pages.iter().enumerate() {
            let content = before[*page].content();
            let (program, staged) = (model.program[*page].content(), model.staging[place]);
            match batch.statuses.borrow()[place] {
                0 => prop_assert_eq!((program, staged, content.is_some()), (None, content, true)),
                MISSING => prop_assert_eq!((program, content), (None, None)),
                _ => prop_assert_eq!((program, staged), (content, None)),
            }
        }
        for (page, was) in before.iter().enumerate().filter(|(page, _)| !batch.pages.contains(page)) {
            prop_assert_eq!(model.program[page].content(), was.content(), "nobody asked for page {}", page);
        }
    }
}
