//! What the monitor needs of the kernel and of the program's worker. The product asks the real ones; the simulator asks a
//! model that interleaves program threads at every call.

use aquifer_pager::{PageNumber, Slot};

use crate::areas::Areas;
use crate::journal::PersistentRanges;

/// A thread of the program waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageFault {
    /// The page.
    pub page: PageNumber,
    /// Whether it wants to write.
    pub is_write: bool,
    /// The page is there, and may not be written yet: see [`Kernel::protect`].
    pub is_protected: bool,
    /// The waiting thread, as the kernel numbers it.
    pub thread: u32,
}

/// What a userfaultfd tells. Events (all but faults) keep every answer to a fault waiting until they are read.
#[derive(PartialEq, Eq, Debug)]
pub enum UffdMessage<C> {
    /// A missing page was touched.
    Fault(PageFault),
    /// The program forked; the child's descriptor.
    Fork(C),
    /// Pages have moved (`mremap`).
    Remap {
        /// First page before.
        from: PageNumber,
        /// First page after.
        to: PageNumber,
        /// How many.
        pages: u64,
    },
    /// Pages are about to be dropped (`MADV_DONTNEED`, `MADV_FREE`).
    Remove {
        /// First page.
        start: PageNumber,
        /// Page after the last.
        end: PageNumber,
    },
    /// Pages were unmapped.
    Unmap {
        /// First page.
        start: PageNumber,
        /// Page after the last.
        end: PageNumber,
    },
}

impl<C> UffdMessage<C> {
    /// The same, with another kind of descriptor.
    pub fn map_child<D>(self, make: impl FnOnce(C) -> D) -> UffdMessage<D> {
        match self {
            Self::Fault(fault) => UffdMessage::Fault(fault),
            Self::Fork(child) => UffdMessage::Fork(make(child)),
            Self::Remap { from, to, pages } => UffdMessage::Remap { from, to, pages },
            Self::Remove { start, end } => UffdMessage::Remove { start, end },
            Self::Unmap { start, end } => UffdMessage::Unmap { start, end },
        }
    }
}

/// Where the bytes of filled pages come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillSource {
    /// Page `index` of the fetch buffer and those behind it.
    Fetched(usize),
    /// A slot of the mempool; one page only.
    Slot(Slot),
    /// Zeros. `private` pages are the program's own at once; others share the kernel's zero page until they are written.
    Zeros {
        /// See above.
        is_private: bool,
    },
}

/// What ended a fill early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillStop {
    /// The next page is there already.
    Exists,
    /// There is no memory at that address any more.
    NoArea,
    /// An event is unread (or was, a moment ago): nothing may be filled before it is heeded.
    Busy,
    /// The program is gone.
    Ended,
    /// The host has no memory.
    NoMemory,
}

/// The outcome of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FillOutcome {
    /// Pages filled, from the first; their waiters were woken.
    pub pages: usize,
    /// Why not all.
    pub stop: Option<FillStop>,
}

/// What became of a page that the worker was told to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveOutcome {
    /// It left the program and waits in staging.
    Moved,
    /// It stays: pinned, locked, busy, or something changed meanwhile.
    Kept,
    /// There was none.
    Absent,
}

/// The program is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramEnded;

/// A program's memory, as the kernel and the worker let us handle it.
pub trait Kernel {
    /// The descriptor of a forked child.
    type Child;

    /// Append what there is to hear, without waiting. What was read before has been heeded.
    fn read_messages(&mut self, out: &mut Vec<UffdMessage<Self::Child>>);

    /// Message `index` of the last read, an event, has been heeded: after a restart it is not told again, and this is remembered. Of
    /// messages that were not heeded, events are read again after a restart; faults come again by themselves.
    fn event_applied(&mut self, index: usize, ranges: PersistentRanges<'_>);

    /// What there is to remember over a restart has changed.
    fn persist_ranges(&mut self, ranges: PersistentRanges<'_>);

    /// Message `index` of the last read is about to move pages. After a restart in the middle of it the move is finished first.
    fn begin_remap(&mut self, index: usize);

    /// Fill missing pages and wake who waits for them.
    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome;

    /// Wake who waits for a page, to try again.
    fn wake(&mut self, page: PageNumber);

    /// Whoever touches the missing page from now on gets SIGBUS.
    fn poison(&mut self, page: PageNumber) -> FillOutcome;

    /// Have the first write to each present page reported before it is done. False if that cannot be done yet, for a change is under way.
    fn protect(&mut self, areas: &Areas) -> bool;

    /// The same in a child that was just forked.
    fn protect_child(&mut self, child: &Self::Child, areas: &Areas);

    /// Let pages be written again, and wake who waits for that.
    fn unprotect(&mut self, page: PageNumber, pages: usize) -> FillOutcome;

    /// Have missing pages of this range reported; false if there is no such memory.
    fn register(&mut self, start: PageNumber, end: PageNumber) -> bool;

    /// Append the pages of the range that are present, at most so many; returns how far it has looked.
    fn present_pages(
        &mut self,
        start: PageNumber,
        end: PageNumber,
        max: usize,
        out: &mut Vec<PageNumber>,
    ) -> PageNumber;

    /// Append the pages of the range that are present and that no other process shares.
    fn exclusive_pages(&mut self, start: PageNumber, end: PageNumber, out: &mut Vec<PageNumber>);

    /// Have the worker move pages into a staging buffer, and wait until it has. One outcome for each page. While it waits it reads no
    /// messages: that is what makes taking safe against everything the program does to its address space.
    ///
    /// # Errors
    /// If the program has ended.
    fn move_out(
        &mut self,
        buffer: usize,
        pages: &[PageNumber],
        out: &mut Vec<MoveOutcome>,
    ) -> Result<(), ProgramEnded>;

    /// What waited in a staging buffer is in the mempool.
    fn release_buffer(&mut self, buffer: usize);

    /// Whether there is a worker: a child has none until it has attached.
    fn has_worker(&self) -> bool;

    /// Whether the program asked that a page stay.
    fn is_pinned(&self, page: PageNumber) -> bool;

    /// Whether the kernel has told of all changes that were begun, as it says by letting pages be filled.
    fn has_no_unread_event(&mut self) -> bool;

    /// Let others run for a moment: something will change soon.
    fn yield_now(&mut self);
}
