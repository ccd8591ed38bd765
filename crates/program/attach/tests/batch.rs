//! Batches leave a program on a model of the kernel that fails in every way: it moves pages without
//! counting them, refuses pages, has an event unread, or has pages in the bounce buffer already.

use std::cell::RefCell;

use aquifer_attach::batch::{PageBatch, PageMover, move_batch};
use aquifer_ipc::BATCH_PAGES_MAX;
use aquifer_ipc::control::{STATUS_MOVED, STATUS_PENDING};
use proptest::prelude::*;

const PAGE: usize = 4096;
/// Pages of the program.
const PROGRAM_PAGES: usize = 128;
const MISSING: u32 = libc::ENOENT as u32;
/// Contents of a page that a debugger has left, or that was in the staging buffer before.
const FOREIGN: u64 = u64::MAX;

/// A page of the program, with its contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProgramPage {
    Missing,
    Private(u64),
    /// Shared since a fork. It cannot be moved before it is private.
    Shared(u64),
    /// Never movable, for example because a device has it.
    Unmovable(u64),
    /// The kernel is about to migrate it to other physical memory. A move waits for that, once.
    Migrating(u64),
}

impl ProgramPage {
    fn new(kind: u8, content: u64) -> Self {
        match kind {
            0 => Self::Missing,
            1 => Self::Shared(content),
            2 => Self::Unmovable(content),
            3..=5 => Self::Migrating(content),
            _ => Self::Private(content),
        }
    }

    fn content(self) -> Option<u64> {
        match self {
            Self::Missing => None,
            Self::Private(content)
            | Self::Shared(content)
            | Self::Unmovable(content)
            | Self::Migrating(content) => Some(content),
        }
    }
}

fn errno(error: i32) -> isize {
    -(error as isize)
}

/// `UFFDIO_MOVE`: if any page is counted, the error is EAGAIN, whatever ended the move.
fn move_pages(from: &mut [ProgramPage], to: &mut [Option<u64>]) -> (usize, isize) {
    let (moved, error) = try_move_pages(from, to);
    (moved, if moved > 0 && error != 0 { errno(libc::EAGAIN) } else { error })
}

/// The loop of Linux 6.18: once it has waited, it moves as many pages as it can, does not count
/// them, and tries the first of them again.
fn try_move_pages(from: &mut [ProgramPage], to: &mut [Option<u64>]) -> (usize, isize) {
    let mut moved = 0;
    let mut has_waited = false;
    while moved < from.len() {
        if to[moved].is_some() {
            return (moved, errno(libc::EEXIST));
        }
        match from[moved] {
            ProgramPage::Missing => return (moved, errno(libc::ENOENT)),
            ProgramPage::Shared(_) | ProgramPage::Unmovable(_) => return (moved, errno(libc::EBUSY)),
            ProgramPage::Migrating(content) => {
                from[moved] = ProgramPage::Private(content);
                has_waited = true;
            }
            ProgramPage::Private(_) => {
                let mut at = moved;
                while let Some(ProgramPage::Private(content)) = from.get(at).copied()
                    && to[at].is_none()
                {
                    to[at] = Some(content);
                    from[at] = ProgramPage::Missing;
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

/// A program, its buffers and its kernel.
struct KernelModel {
    program: Vec<ProgramPage>,
    bounce_buffer: Vec<Option<u64>>,
    staging: Vec<Option<u64>>,
    /// For each call that checks for events, whether one is unread. Later calls find none.
    unread: Vec<bool>,
    /// For each index, whether the page migrates on its way to the staging buffer.
    migrates: Vec<bool>,
    /// For each index, how many more moves to the staging buffer are refused, because another
    /// process reads the page.
    held: Vec<u32>,
    calls: usize,
}

impl KernelModel {
    fn is_event_unread(&mut self) -> bool {
        self.calls += 1;
        self.unread.get(self.calls - 1).copied().unwrap_or(false)
    }
}

impl PageMover for KernelModel {
    fn find_occupied(&mut self, occupied: &mut [bool]) {
        for (is_occupied, page) in occupied.iter_mut().zip(&self.bounce_buffer) {
            *is_occupied = page.is_some();
        }
    }

    fn move_out(&mut self, address: usize, index: usize, pages: usize) -> (usize, isize) {
        if self.is_event_unread() {
            return (0, errno(libc::EAGAIN));
        }
        let first = address / PAGE;
        move_pages(&mut self.program[first..first + pages], &mut self.bounce_buffer[index..index + pages])
    }

    fn make_private(&mut self, address: usize) -> isize {
        if self.is_event_unread() {
            return errno(libc::EBUSY);
        }
        let page = &mut self.program[address / PAGE];
        if let ProgramPage::Shared(content) = *page {
            *page = ProgramPage::Migrating(content);
        }
        0
    }

    fn stage(&mut self, index: usize, pages: usize) -> (usize, isize) {
        let range = index..index + pages;
        let mut from: Vec<ProgramPage> = range
            .clone()
            .map(|index| match self.bounce_buffer[index] {
                None => ProgramPage::Missing,
                Some(content) if self.held[index] > 0 => {
                    self.held[index] -= 1;
                    ProgramPage::Unmovable(content)
                }
                Some(content) if std::mem::take(&mut self.migrates[index]) => ProgramPage::Migrating(content),
                Some(content) => ProgramPage::Private(content),
            })
            .collect();
        let outcome = move_pages(&mut from, &mut self.staging[range.clone()]);
        for (index, page) in range.zip(from) {
            self.bounce_buffer[index] = page.content();
        }
        outcome
    }

    fn empty_staging(&mut self) -> bool {
        self.staging.fill(None);
        true
    }
}

/// A batch of pages of the program, by page number.
struct BatchModel {
    pages: Vec<usize>,
    statuses: RefCell<Vec<u32>>,
}

impl PageBatch for BatchModel {
    fn count(&self) -> usize {
        self.pages.len()
    }

    fn address(&self, index: usize) -> usize {
        self.pages[index] * PAGE
    }

    fn set_status(&self, index: usize, status: u32) {
        self.statuses.borrow_mut()[index] = status;
    }

    fn is_moved(&self, index: usize) -> bool {
        self.statuses.borrow()[index] == STATUS_MOVED
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn each_page_is_where_its_status_says(
        kinds in prop::collection::vec(0u8..16, PROGRAM_PAGES),
        wanted in prop::sample::subsequence(
            (0..PROGRAM_PAGES).collect::<Vec<usize>>(),
            0..=BATCH_PAGES_MAX,
        ),
        unread in prop::collection::vec(prop::bool::weighted(0.1), 0..20),
        migrates in prop::collection::vec(prop::bool::weighted(0.2), BATCH_PAGES_MAX),
        foreign in prop::collection::vec(prop::bool::weighted(0.02), BATCH_PAGES_MAX),
        held in prop::collection::vec(prop_oneof![20 => Just(0), 1 => 1..5u32], BATCH_PAGES_MAX),
    ) {
        let before: Vec<ProgramPage> =
            kinds.iter().zip(1..).map(|(kind, content)| ProgramPage::new(*kind, content)).collect();
        let mut model = KernelModel {
            program: before.clone(),
            bounce_buffer: foreign.iter().map(|is_foreign| is_foreign.then_some(FOREIGN)).collect(),
            staging: vec![Some(FOREIGN); BATCH_PAGES_MAX],
            unread,
            migrates,
            held,
            calls: 0,
        };
        let statuses = RefCell::new(vec![STATUS_PENDING; wanted.len()]);
        let batch = BatchModel { statuses, pages: wanted };
        prop_assert!(move_batch(&mut model, &batch).is_ok());
        prop_assert!(model.bounce_buffer.iter().all(Option::is_none), "the bounce buffer is empty");
        for (index, page) in batch.pages.iter().enumerate() {
            let content = before[*page].content();
            let (program, staged) = (model.program[*page].content(), model.staging[index]);
            match batch.statuses.borrow()[index] {
                STATUS_MOVED => prop_assert_eq!((program, staged, content.is_some()), (None, content, true)),
                MISSING => prop_assert_eq!((program, content), (None, None)),
                _ => prop_assert_eq!((program, staged), (content, None)),
            }
        }
        let is_other = |(page, _): &(usize, &ProgramPage)| !batch.pages.contains(page);
        for (page, was) in before.iter().enumerate().filter(is_other) {
            let content = model.program[page].content();
            prop_assert_eq!(content, was.content(), "page {} is not in the batch", page);
        }
    }
}

/// A reader may wait for the agent, which waits for the batch.
#[test]
fn nothing_moves_while_a_reader_holds_a_page_of_the_bounce_buffer() {
    let before: Vec<ProgramPage> = (1..=10).map(ProgramPage::Private).collect();
    let mut bounce_buffer = vec![None; BATCH_PAGES_MAX];
    bounce_buffer[3] = Some(FOREIGN);
    let mut held = vec![0; BATCH_PAGES_MAX];
    held[3] = u32::MAX;
    let mut model = KernelModel {
        program: before.clone(),
        bounce_buffer,
        staging: vec![None; BATCH_PAGES_MAX],
        unread: Vec::new(),
        migrates: vec![false; BATCH_PAGES_MAX],
        held,
        calls: 0,
    };
    let batch = BatchModel { pages: (0..10).collect(), statuses: RefCell::new(vec![STATUS_PENDING; 10]) };
    assert!(move_batch(&mut model, &batch).is_ok());
    assert!(batch.statuses.borrow().iter().all(|status| *status == libc::EBUSY as u32));
    assert_eq!(model.program, before);
    model.held[3] = 0;
    assert!(move_batch(&mut model, &batch).is_ok());
    assert!(batch.statuses.borrow().iter().all(|status| *status == STATUS_MOVED));
}
