//! A modelled process with its memory, threads and userfaultfd. This file is the kernel's side:
//! touches, events and waking.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::RawFd;
use std::rc::Rc;

use aquifer_fabric::sim::Rng;
use aquifer_faults::takeover::Origin;
use aquifer_faults::{Area, Areas, PageFault, SenderEvent, UffdMessage, WorkerPort};
use aquifer_pager::{Memory, PageNumber};

use super::memory::{ModelFrame, ModelPage, index, number};

/// The remaining work of a system call after its events were read.
#[derive(Clone, Copy, Debug)]
pub enum AfterEvents {
    Nothing,
    /// Drop the present pages, or mark them as droppable.
    Drop {
        start: usize,
        end: usize,
        lazy: bool,
    },
}

/// The progress of the first event of a system call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventStage {
    /// The change is made, and the event is not in the queue yet.
    Raised,
    Queued,
    /// The event was read, and the thread has not run since.
    Read,
}

/// The state of a thread.
#[derive(Debug)]
pub enum ThreadState {
    Idle,
    Touch {
        page: usize,
        write: bool,
    },
    /// Waiting in a page fault.
    Blocked {
        page: usize,
        write: bool,
    },
    /// Waiting to touch a pinned page, until no eviction of the agent is in progress.
    Pinning {
        page: usize,
    },
    /// In a system call that raises events.
    RaisingEvents {
        events: VecDeque<KernelEvent>,
        stage: EventStage,
        after: AfterEvents,
    },
    Dropping {
        start: usize,
        end: usize,
        lazy: bool,
    },
}

#[derive(Debug)]
pub struct Thread {
    pub state: ThreadState,
    /// The page that was touched last, because programs tend to touch neighbours.
    pub last: usize,
}

impl Thread {
    /// Whether the thread has moved or unmapped memory, and the event is not in the queue yet.
    fn has_unreported_change(&self) -> bool {
        let ThreadState::RaisingEvents { events, stage, .. } = &self.state else { return false };
        let unreported = events.iter().skip(usize::from(*stage != EventStage::Raised));
        unreported
            .into_iter()
            .any(|event| !matches!(event, KernelEvent::Remove { .. } | KernelEvent::Fork(_)))
    }
}

/// A change of the address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelEvent {
    Fork(usize),
    Remap { from: usize, to: usize, pages: u64 },
    Remove { start: usize, end: usize },
    Unmap { start: usize, end: usize },
}

/// A process, as the sender sees it.
#[derive(Clone, Debug)]
pub struct SentProcess(pub Rc<SenderSide>);

/// State that the sender shares with a process.
#[derive(Debug)]
pub struct SenderSide {
    pub id: usize,
    pub is_alive: Cell<bool>,
    /// The pages in each staging buffer.
    pub staging: RefCell<Vec<Vec<Option<u64>>>>,
    /// Completions of the sender that the monitor has not read yet.
    pub done: RefCell<VecDeque<SenderEvent>>,
}

/// Memory of a served process that the keeper holds.
#[derive(Debug)]
pub struct KeptMemory {
    pub table: Memory,
    pub journal: Memory,
    /// The fork that created the process.
    pub origin: Option<Origin>,
}

#[derive(Debug)]
pub struct SimProcess {
    pub id: usize,
    pub is_alive: bool,
    /// Whether the process runs. A child starts after its parent's fork event was read.
    pub is_started: bool,
    pub pages: Vec<ModelPage>,
    pub threads: Vec<Thread>,
    pub changing: u32,
    pub faults: VecDeque<(usize, PageFault)>,
    pub events: VecDeque<(usize, KernelEvent)>,
    pub sender_side: Rc<SenderSide>,
    /// The program's mapping of its control memory.
    pub control: WorkerPort,
    /// Number of checks of the agent whether a batch is finished.
    pub batch_checks: u64,
    /// Number of checks after which a child's worker exists.
    pub checks_until_worker: u32,
    /// Number of staging buffers.
    pub buffers: usize,
    /// Pages that are known to be lost.
    pub lost: BTreeSet<PageNumber>,
    pub parent: Option<usize>,
    pub scans: Vec<Vec<Area>>,
    pub is_nudged: bool,
    /// Whether the process's monitor waits for a block of another process.
    pub waits_for_block: bool,
    /// Changes that threads have begun while a change of another thread is not reported yet.
    pub changes_meanwhile: u32,
    /// The range that was moved away last, which the kernel tends to use again.
    pub moved_from: (usize, usize),
    /// The memory that a child has inherited. The child's thread waits until the agent has
    /// discarded the rest.
    pub inherited: Option<Areas>,
}

impl SimProcess {
    pub fn new(id: usize, pages: usize, threads: usize, buffers: usize) -> Self {
        Self {
            id,
            is_alive: true,
            is_started: true,
            pages: vec![ModelPage::default(); pages],
            threads: (0..threads).map(|_| Thread { state: ThreadState::Idle, last: 0 }).collect(),
            changing: 0,
            faults: VecDeque::new(),
            events: VecDeque::new(),
            sender_side: Rc::new(SenderSide {
                id,
                is_alive: Cell::new(true),
                staging: RefCell::new(vec![vec![None; 64]; buffers]),
                done: RefCell::default(),
            }),
            control: WorkerPort::new().expect("memory"),
            batch_checks: 0,
            checks_until_worker: 0,
            buffers,
            lost: BTreeSet::new(),
            parent: None,
            scans: Vec::new(),
            is_nudged: false,
            waits_for_block: false,
            changes_meanwhile: 0,
            moved_from: (0, 0),
            inherited: None,
        }
    }

    /// The agent's mapping of the control memory.
    pub fn agent_port(&self) -> WorkerPort {
        let fd = self.control.fd().try_clone_to_owned().expect("a descriptor");
        WorkerPort::recover(fd).expect("it is of this version")
    }

    /// Creates the child of a fork, which has one thread and shares all pages that are not pinned.
    pub fn fork(&mut self, id: usize, checks_until_worker: u32) -> Self {
        let mut child = Self::new(id, self.pages.len(), 1, self.buffers);
        child.is_started = false;
        child.checks_until_worker = checks_until_worker;
        child.parent = Some(self.id);
        child.lost.clone_from(&self.lost);
        for (mine, theirs) in self.pages.iter_mut().zip(&mut child.pages) {
            *theirs = *mine;
            theirs.owner = mine.is_mapped.then_some(0);
            theirs.may_be_zero |= mine.is_being_dropped;
            theirs.is_being_dropped = false;
            theirs.is_kept = false;
            if let (Some(mine), Some(theirs)) = (&mut mine.frame, &mut theirs.frame) {
                theirs.is_exclusive = mine.is_pinned;
                theirs.is_pinned = false;
                mine.is_exclusive = mine.is_pinned;
            }
        }
        child.inherited = Some(child.registered());
        child
    }

    /// Removes a range from a child that was just forked, as `MADV_DONTFORK` does, or empties the
    /// range, as `MADV_WIPEONFORK` does.
    pub fn disinherit(&mut self, start: usize, end: usize, is_kept: bool) {
        for page in &mut self.pages[start..end] {
            let (owner, is_registered) = (page.owner, page.is_registered);
            *page = ModelPage::default();
            if is_kept {
                *page = ModelPage { owner, is_mapped: true, is_registered, ..ModelPage::default() };
            }
        }
        self.lost.retain(|page| !(number(start)..number(end)).contains(page));
        let inherited = self.inherited.as_mut().expect("it was just forked");
        inherited.remove(Area { start: number(start), end: number(end) });
    }

    /// Maps new memory where a child has inherited none. The sampler finds it before the child
    /// touches it.
    pub fn replace_uninherited(&mut self, inherited: &Areas) {
        for at in 0..self.pages.len() {
            if !self.pages[at].is_mapped && !inherited.contains(number(at)) {
                self.pages[at] = ModelPage::mapped_by(0, false);
                self.threads[0].last = at.saturating_sub(1);
            }
        }
        let areas = self.areas();
        self.scans.push(areas);
    }

    /// Whether a sleeping monitor would be woken.
    pub fn has_work(&self) -> bool {
        !self.faults.is_empty()
            || !self.events.is_empty()
            || !self.sender_side.done.borrow().is_empty()
            || !self.scans.is_empty()
            || self.is_nudged
    }

    pub fn is_idle(&self) -> bool {
        !self.is_alive || self.threads.iter().all(|thread| matches!(thread.state, ThreadState::Idle))
    }

    /// Touches a page by a thread, and compares the contents with the expected ones.
    pub fn touch(&mut self, thread: usize, at: usize, write: Option<u64>) -> Result<(), String> {
        let process = self.id;
        let page = &mut self.pages[at];
        trace!(
            "{process}.{thread} touches {at}, write {write:?}, expected {}, {:?}",
            page.expected, page.frame
        );
        self.threads[thread].last = at;
        self.threads[thread].state = ThreadState::Idle;
        if !page.is_mapped || (write.is_some() && page.owner != Some(thread)) {
            return Ok(());
        }
        if page.is_poisoned {
            page.is_dead = true;
            return if self.lost.contains(&number(at)) {
                Ok(())
            } else {
                Err(format!("process {process}: SIGBUS at page {at}, which is not lost"))
            };
        }
        let Some(frame) = &mut page.frame else {
            if page.is_registered {
                self.threads[thread].state = ThreadState::Blocked { page: at, write: write.is_some() };
                let fault =
                    PageFault { page: number(at), is_write: write.is_some(), is_protected: false, thread: 0 };
                self.faults.push_back((thread, fault));
                return Ok(());
            }
            page.frame = Some(ModelFrame::ZERO);
            return self.touch(thread, at, write);
        };
        if page.is_dead {
            return Err(format!("process {process}: page {at} was lost and is readable again"));
        }
        if !page.is_being_dropped && frame.stamp != page.expected {
            if frame.stamp != 0 || !page.may_be_zero {
                return Err(format!(
                    "process {process}: page {at} reads {} instead of {}",
                    frame.stamp, page.expected
                ));
            }
            page.expected = 0;
        }
        if write.is_some() && frame.is_protected {
            self.threads[thread].state = ThreadState::Blocked { page: at, write: true };
            self.faults.push_back((
                thread,
                PageFault { page: number(at), is_write: true, is_protected: true, thread: 0 },
            ));
            return Ok(());
        }
        if let Some(stamp) = write {
            *frame = ModelFrame { stamp, is_pinned: frame.is_pinned, ..ModelFrame::ZERO };
            page.expected = stamp;
            page.may_be_zero = false;
        }
        Ok(())
    }

    /// Wakes the threads that wait for these pages, which then retry.
    pub fn wake(&mut self, start: usize, end: usize) {
        for (number, thread) in self.threads.iter_mut().enumerate() {
            if let ThreadState::Blocked { page, write } = thread.state
                && (start..end).contains(&page)
            {
                thread.state = ThreadState::Touch { page, write };
                self.faults.retain(|(other, _)| *other != number);
            }
        }
    }

    /// Whether a thread is in a call that raises several events, or moves pages.
    ///
    /// The kernel may deliver a fork between these events. No program may depend on the state in
    /// between, so the simulator does not fork then.
    pub fn is_moving(&self) -> bool {
        self.threads.iter().any(|thread| match &thread.state {
            ThreadState::RaisingEvents { events, .. } => {
                events.len() > 1 || matches!(events.front(), Some(KernelEvent::Remap { .. }))
            }
            _ => false,
        })
    }

    /// Whether a thread may begin a change. While another thread has moved or unmapped memory and
    /// not reported it, there is at most one change, if changes may overlap at all.
    pub fn may_change(&mut self, may_overlap: bool) -> bool {
        if !self.threads.iter().any(Thread::has_unreported_change) {
            self.changes_meanwhile = 0;
            return true;
        }
        self.changes_meanwhile += 1;
        self.changes_meanwhile == 1 && may_overlap
    }

    /// Begins to raise the events of changes that a thread has made. Without events the thread
    /// continues.
    pub fn raise_events(&mut self, thread: usize, events: Vec<KernelEvent>, after: AfterEvents, late: bool) {
        self.changing += u32::try_from(events.len()).expect("a few");
        trace!("{}.{thread} raises {events:?} {after:?}", self.id);
        let events = VecDeque::from(events);
        if let Some(first) = events.front() {
            if !late {
                self.events.push_back((thread, *first));
            }
            let stage = if late { EventStage::Raised } else { EventStage::Queued };
            self.threads[thread].state = ThreadState::RaisingEvents { events, stage, after };
        } else {
            self.threads[thread].state = after.into();
        }
    }

    /// Continues the system call of a thread, if its present event was read.
    pub fn continue_raising(&mut self, thread: usize) {
        let ThreadState::RaisingEvents { events, stage, after } = &mut self.threads[thread].state else {
            return;
        };
        match *stage {
            EventStage::Queued => {}
            EventStage::Raised => {
                *stage = EventStage::Queued;
                self.events.push_back((thread, events[0]));
            }
            EventStage::Read => {
                self.changing -= 1;
                events.pop_front();
                if let Some(next) = events.front() {
                    *stage = EventStage::Queued;
                    self.events.push_back((thread, *next));
                } else {
                    self.threads[thread].state = (*after).into();
                }
            }
        }
    }

    /// Drops a range: the last step of `madvise`.
    pub fn drop_range(&mut self, start: usize, end: usize, lazy: bool) {
        trace!("{} zaps {start}..{end} lazy {lazy}", self.id);
        for at in start..end {
            let page = &mut self.pages[at];
            if !lazy {
                page.drop_content();
                self.lost.remove(&number(at));
                continue;
            }
            page.is_being_dropped = false;
            page.may_be_zero = true;
            if let Some(frame) = &mut page.frame {
                frame.is_lazy = !frame.is_pinned;
            }
        }
    }

    /// The next message: faults come first, then events. The child of a fork is its number.
    pub fn next_message(&mut self) -> Option<UffdMessage<RawFd>> {
        if let Some((_, fault)) = self.faults.pop_front() {
            return Some(UffdMessage::Fault(fault));
        }
        let (thread, event) = self.events.pop_front()?;
        if let ThreadState::RaisingEvents { stage, .. } = &mut self.threads[thread].state {
            *stage = EventStage::Read;
        }
        Some(event.into())
    }

    /// Whether the agent can read a message.
    pub fn has_message(&self) -> bool {
        !self.events.is_empty() || !self.faults.is_empty()
    }

    /// Prepares the process for another agent, after its agent has died.
    pub fn agent_died(&mut self) {
        self.sender_side.done.borrow_mut().clear();
        self.scans.clear();
        self.is_nudged = true;
    }

    /// The registered pages, as the kernel knows them.
    pub fn registered(&self) -> Areas {
        let mut areas = Areas::default();
        for (at, page) in self.pages.iter().enumerate() {
            if page.is_mapped && page.is_registered {
                areas.insert(Area { start: number(at), end: number(at) + 1 });
            }
        }
        areas
    }

    /// Ends the process. Returns the children whose fork will not be served.
    pub fn die(&mut self) -> Vec<usize> {
        self.is_alive = false;
        self.sender_side.is_alive.set(false);
        self.faults.clear();
        self.changing = 0;
        self.pages.fill(ModelPage::default());
        let mut unserved = Vec::new();
        for thread in &mut self.threads {
            if let ThreadState::RaisingEvents { events, stage, .. } = &thread.state
                && *stage != EventStage::Read
            {
                unserved.extend(events.iter().filter_map(|event| match event {
                    KernelEvent::Fork(child) => Some(*child),
                    _ => None,
                }));
            }
            thread.state = ThreadState::Idle;
        }
        self.events.clear();
        unserved
    }

    /// The areas, as the sampler finds them in the maps.
    pub fn areas(&self) -> Vec<Area> {
        let mut areas: Vec<Area> = Vec::new();
        let mut last = None;
        for (at, page) in self.pages.iter().enumerate() {
            let kind = page.is_mapped.then_some(page.is_registered);
            match areas.last_mut() {
                Some(area) if kind.is_some() && kind == last => area.end += 1,
                _ if kind.is_some() => areas.push(Area { start: number(at), end: number(at) + 1 }),
                _ => {}
            }
            last = kind;
        }
        areas
    }

    /// A random range that the thread owns, of one kind, with no system call in progress.
    pub fn own_range(&self, rng: &mut Rng, thread: usize, max: usize) -> Option<(usize, usize)> {
        let fits = |at: usize| {
            let page = &self.pages[at];
            page.owner == Some(thread) && page.is_mapped && !page.is_being_dropped
        };
        let (start, end) = super::memory::random_run(rng, self.pages.len(), max, fits)?;
        let kind = self.pages[start].is_registered;
        let end = (start..end).find(|at| self.pages[*at].is_registered != kind).unwrap_or(end);
        Some((start, end))
    }

    /// A random unmapped range.
    pub fn free_range(&self, rng: &mut Rng, max: usize) -> Option<(usize, usize)> {
        super::memory::random_run(rng, self.pages.len(), max, |at| !self.pages[at].is_mapped)
    }

    /// Unmaps a range, and returns the events for it.
    pub fn unmap(&mut self, start: usize, end: usize) -> Vec<KernelEvent> {
        let mut events = Vec::new();
        let mut at = start;
        while at < end {
            let kind = self.pages[at].is_registered;
            let stop = (at..end).find(|other| self.pages[*other].is_registered != kind).unwrap_or(end);
            if kind {
                events.push(KernelEvent::Unmap { start: at, end: stop });
            }
            at = stop;
        }
        for at in start..end {
            self.pages[at] = ModelPage::default();
            self.lost.remove(&number(at));
        }
        events
    }

    /// Write-protects the present pages of these areas. Returns false while events are unread.
    pub fn protect(&mut self, areas: &Areas) -> bool {
        if self.changing > 0 {
            return false;
        }
        let is_meant = |at: usize, page: &ModelPage| page.is_registered && areas.contains(number(at));
        let pages = self.pages.iter_mut().enumerate().filter(|(at, page)| is_meant(*at, page));
        pages.filter_map(|(_, page)| page.frame.as_mut()).for_each(|frame| frame.is_protected = true);
        true
    }

    /// Permits writes to pages, and wakes the threads that wait for that.
    pub fn unprotect(&mut self, start: usize, end: usize) {
        self.pages[start..end].iter_mut().filter_map(|page| page.frame.as_mut()).for_each(|frame| {
            frame.is_protected = false;
        });
        self.wake(start, end);
    }

    /// Whether a range is inside one registered area, as the kernel requires for a fill.
    pub fn is_fillable(&self, start: PageNumber, pages: usize) -> bool {
        let first = index(start);
        first + pages <= self.pages.len()
            && self.pages[first..first + pages].iter().all(|page| page.is_mapped && page.is_registered)
    }
}

impl From<KernelEvent> for UffdMessage<RawFd> {
    fn from(event: KernelEvent) -> Self {
        match event {
            KernelEvent::Fork(child) => Self::Fork(RawFd::try_from(child).expect("few")),
            KernelEvent::Remap { from, to, pages } => {
                Self::Remap { from: number(from), to: number(to), pages }
            }
            KernelEvent::Remove { start, end } => Self::Remove { start: number(start), end: number(end) },
            KernelEvent::Unmap { start, end } => Self::Unmap { start: number(start), end: number(end) },
        }
    }
}

impl From<AfterEvents> for ThreadState {
    fn from(after: AfterEvents) -> Self {
        match after {
            AfterEvents::Nothing => Self::Idle,
            AfterEvents::Drop { start, end, lazy } => Self::Dropping { start, end, lazy },
        }
    }
}
