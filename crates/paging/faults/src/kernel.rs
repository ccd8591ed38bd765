//! The interface of the monitor to the kernel and to the program's worker.
//!
//! The product implements it with both. The simulator implements it with a model that interleaves
//! threads of the program at every call.

use aquifer_pager::{PageNumber, Slot};

use crate::areas::{Area, Areas};
use crate::journal::PersistentRanges;

/// A fault on which a thread of the program waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageFault {
    /// Page on which the thread waits.
    pub page: PageNumber,
    /// Whether the access is a write.
    pub is_write: bool,
    /// Whether the page is present and write-protected, see [`Kernel::protect`].
    pub is_protected: bool,
    /// Thread that waits, by its number in its own PID namespace.
    pub thread: u32,
}

/// A message of a userfaultfd.
///
/// All but faults are events: changes of the address space. While an event is unread, the kernel
/// refuses to fill and to move pages.
#[derive(PartialEq, Eq, Debug)]
pub enum UffdMessage<C> {
    /// A thread touched a page that is missing or write-protected.
    Fault(PageFault),
    /// The program forked; with the userfaultfd of the child.
    Fork(C),
    /// `mremap` moved pages.
    Remap {
        /// First page of the old range.
        from: PageNumber,
        /// First page of the new range.
        to: PageNumber,
        /// Length of the range.
        pages: u64,
    },
    /// The kernel is about to drop pages (`MADV_DONTNEED`, `MADV_FREE`).
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
    /// An upper bound of the pages that the message names.
    pub(crate) fn last_page(&self) -> PageNumber {
        match self {
            Self::Fault(fault) => fault.page.saturating_add(1),
            Self::Fork(_) => 0,
            Self::Remap { from, to, pages } => (*from).max(*to).saturating_add(*pages),
            Self::Remove { end, .. } | Self::Unmap { end, .. } => *end,
        }
    }

    /// Converts the descriptor of a forked child with `make`.
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

/// The source of the bytes of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillSource {
    /// The fetch buffer, from page `index` on.
    Fetched(usize),
    /// Slots of the mempool, from this one on.
    Slot(Slot),
    /// Zeros.
    Zeros {
        /// Whether each page gets memory of its own at once, for a write that follows. Otherwise
        /// the kernel maps its shared zero page.
        is_private: bool,
    },
}

/// The reason why a fill stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FillStop {
    /// The next page is present.
    Exists,
    /// The range is not one registered area.
    NoArea,
    /// An event is unread, or its thread has not run since it was read.
    Busy,
    /// The program has ended.
    Ended,
    /// The host has no memory.
    NoMemory,
}

/// Outcome of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FillOutcome {
    /// Number of leading pages that were filled. Threads that waited for them were woken.
    pub pages: usize,
    /// Why no page was filled; `None` if some or all pages were.
    pub stop: Option<FillStop>,
}

/// The outcome of the worker's attempt to move a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveOutcome {
    /// The page left the program and is in the staging buffer.
    Moved,
    /// The page stays: it is pinned, locked or busy, or an event was unread.
    Kept,
    /// The page was missing.
    Absent,
}

/// The outcome of [`Kernel::read_more_messages`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoreMessages {
    /// All pending messages were read.
    Read,
    /// There is no room for more messages before those that were read are applied.
    NoRoom,
}

/// Error: the program has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramEnded;

/// A program's memory, through the kernel and the worker.
pub trait Kernel {
    /// Userfaultfd of a forked child.
    type Child;

    /// Appends the pending messages, without waiting.
    ///
    /// Must be called only after all events of the previous call were applied.
    fn read_messages(&mut self, out: &mut Vec<UffdMessage<Self::Child>>);

    /// Appends the messages that have arrived since the previous call, without waiting, although
    /// the events of that call are not applied. Their indices follow those of the previous call.
    fn read_more_messages(&mut self, out: &mut Vec<UffdMessage<Self::Child>>) -> MoreMessages;

    /// Records that event `index` is about to be applied before events that were read earlier, so
    /// that an agent that takes over does the same.
    fn begin_before_others(&mut self, index: usize);

    /// Records that event `index` of the last read was applied, together with the ranges.
    ///
    /// After a restart, events that were not recorded are read again. Faults need no record:
    /// their threads are woken and fault again.
    fn event_applied(&mut self, index: usize, ranges: PersistentRanges<'_>);

    /// Records the ranges without an event.
    fn persist_ranges(&mut self, ranges: PersistentRanges<'_>);

    /// Records that event `index` of the last read, a remap, is about to move page words.
    ///
    /// After a restart the move is completed before anything else is done.
    fn begin_remap(&mut self, index: usize);

    /// Fills missing pages and wakes the threads that wait for them.
    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome;

    /// Wakes the threads that wait for a page, so that they access it again.
    fn wake(&mut self, page: PageNumber);

    /// Poisons a missing page: each access to it raises SIGBUS from now on.
    fn poison(&mut self, page: PageNumber) -> FillOutcome;

    /// Write-protects each present page, so that its next write is a fault.
    ///
    /// Returns false if an event is unread; the caller must try again.
    fn protect(&mut self, areas: &Areas) -> bool;

    /// Write-protects each present page of a child that was just forked.
    fn protect_child(&mut self, child: &Self::Child, areas: &Areas);

    /// Removes write protection and wakes the threads that wait for it.
    fn unprotect(&mut self, page: PageNumber, pages: usize) -> FillOutcome;

    /// Registers a range, so that its missing pages are faults. Returns false if nothing is mapped.
    fn register(&mut self, start: PageNumber, end: PageNumber) -> bool;

    /// The registered areas that overlap some ranges; `None` while an event is unread.
    fn registered_areas(&mut self, ranges: &[Area]) -> Option<Areas>;

    /// Appends present pages of a range, at most `max`. Returns the page at which the scan ended.
    fn present_pages(
        &mut self,
        start: PageNumber,
        end: PageNumber,
        max: usize,
        out: &mut Vec<PageNumber>,
    ) -> PageNumber;

    /// Appends the pages of a range that are present and that no other process shares.
    fn exclusive_pages(&mut self, start: PageNumber, end: PageNumber, out: &mut Vec<PageNumber>);

    /// The registered areas that a forked child has inherited from its parent. Returned only once;
    /// `None` afterwards, or if nothing has to be checked.
    fn inherited_areas(&mut self) -> Option<Areas>;

    /// Records that the pages outside of [`Self::inherited_areas`] were discarded.
    fn inheritance_checked(&mut self);

    /// Commands the worker to move pages into a staging buffer.
    ///
    /// No messages may be read before it has finished: an event that is raised meanwhile stays
    /// unread, so the kernel refuses the moves that it would make wrong.
    fn begin_move_out(&mut self, buffer: usize, pages: &[PageNumber]);

    /// Waits for the worker for a bounded time. Returns whether it has finished; then one outcome
    /// for each page is appended.
    ///
    /// The worker may be unable to run for any length of time.
    ///
    /// # Errors
    /// If the program has ended.
    fn finish_move_out(
        &mut self,
        buffer: usize,
        pages: &[PageNumber],
        out: &mut Vec<MoveOutcome>,
    ) -> Result<bool, ProgramEnded>;

    /// Marks a staging buffer as copied, so that a restart does not read it again.
    fn release_buffer(&mut self, buffer: usize);

    /// Makes a staging buffer report a page as kept, because it is not in the buffer any more.
    fn forget_move(&mut self, buffer: usize, position: usize);

    /// Whether the program has a worker; a forked child has none until it has attached.
    fn has_worker(&self) -> bool;

    /// Reads which pages must stay resident. A thread that pins a page waits from now on, until
    /// [`Self::unlock_pins`].
    fn lock_pins(&mut self);

    /// Resumes the threads that have pinned pages since [`Self::lock_pins`].
    fn unlock_pins(&mut self);

    /// Whether the program had asked that a page stays resident, at [`Self::lock_pins`].
    fn is_pinned(&self, page: PageNumber) -> bool;

    /// Whether each change of the address space that has begun was read as an event.
    ///
    /// Checked by a trial fill, which the kernel refuses while an event is unread.
    fn has_no_unread_event(&mut self) -> bool;

    /// Whether a message is pending.
    fn has_message(&mut self) -> bool;

    /// Lets other threads run before the caller tries again.
    fn yield_now(&mut self);
}
