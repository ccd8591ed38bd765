//! The edge of a real program: its userfaultfd, its worker, `/proc`, and the run's sender.

mod connect_back;
mod pool;
mod worker_end;

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_channel::HoldRefused;
use aquifer_ipc::{BATCH_PAGES_MAX, STAGING_BUFFERS};
use aquifer_pager::{FETCH_PAGES_MAX, Fetcher, PAGE_BYTES, PageNumber, Volume};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ConnectBackName;
use super::attach::AttachError;
use super::attachment::{Attachment, shut_down, unless_ended};
use super::backoff::Backoff;
use super::canary::Canary;
use super::core_follower::CoreFollower;
use super::exit_watcher::{ProgramExitWatcher, WatchedEnd};
use super::process::{ProgramProcess, ProofError, UnprovenProcess, has_ended};
use super::program::Program;
use super::records::{HelloRecord, ProgramRecord};
use super::run::Run;
use super::unserved::{UNSERVED_DESCRIPTORS, UnservedMemory};
use crate::areas::{Area, Areas};
use crate::journal::{Journal, PersistentRanges};
use crate::kernel::{
    FillOutcome, FillSource, FillStop, Kernel, MoreMessages, MoveOutcome, ProgramEnded, UffdMessage,
};
use crate::maps::{self, PagingBounds};
use crate::pagemap;
use crate::uffd::{self, Userfaultfd};

const PAGE: u64 = PAGE_BYTES as u64;
/// Timeout of one wait for the sender, after which the program's end is checked.
const SENDER_TIMEOUT: rustix::fs::Timespec = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// The edge of one real program.
#[derive(Debug)]
pub(crate) struct ProcessEdge {
    run: Arc<Run>,
    program: Arc<Program>,
    uffd: Userfaultfd,
    /// Memory of the page table.
    table: Arc<OwnedFd>,
    /// See [`ProgramRecord::origin`].
    origin: Option<(u64, u64)>,
    fetcher: Fetcher,
    zeros: Box<[u8]>,
    attachment: Option<Attachment>,
    started: Instant,
    is_loss_reported: bool,
    /// The time since which the worker of a program whose process has ended has completed no
    /// command.
    stalled_since: Cell<Option<Instant>>,
    core_follower: CoreFollower,
    journal: Journal,
    messages: Vec<UffdMessage<RawFd>>,
    /// Events that another agent has read and not applied.
    unapplied: Vec<UffdMessage<OwnedFd>>,
    /// See [`Kernel::inherited_areas`].
    inherited: Option<Areas>,
    backoff: Backoff,
    /// Number of connect-back requests that were answered.
    connect_back_requests: usize,
    /// A bit for each page of a connect-back request that was answered.
    answered_connect_back_pages: u32,
    /// Connect-back requests with an open socket.
    open_connect_backs: Vec<ConnectBackName>,
}

impl ProcessEdge {
    pub(crate) fn new(
        run: &Arc<Run>,
        program: &Arc<Program>,
        uffd: Userfaultfd,
        volume: &Volume,
        journal: Journal,
        origin: Option<(u64, u64)>,
    ) -> io::Result<Self> {
        let service = run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        Ok(Self {
            run: Arc::clone(run),
            program: Arc::clone(program),
            uffd,
            table: volume.table_memory().shared_fd(),
            origin,
            fetcher: Fetcher::new(service.agent.fetch_connector(run.tenant()))?,
            zeros: vec![0; FETCH_PAGES_MAX * PAGE_BYTES].into_boxed_slice(),
            attachment: None,
            started: Instant::now(),
            is_loss_reported: false,
            stalled_since: Cell::new(None),
            core_follower: CoreFollower::new(),
            journal,
            messages: Vec::new(),
            unapplied: Vec::new(),
            inherited: None,
            backoff: Backoff::new(),
            connect_back_requests: 0,
            answered_connect_back_pages: 0,
            open_connect_backs: Vec::new(),
        })
    }

    pub(crate) fn uffd(&self) -> &Userfaultfd {
        &self.uffd
    }

    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.run
    }

    /// Registers the canary, which a forked child touches first, and the pages that follow it.
    pub(crate) fn register_canary(&self) {
        let pages = self.canary().pages();
        if let Err(error) = self.uffd.register(pages.start, pages.end) {
            tracing::warn!(%error, "cannot register the canary: forked children will be identified late");
        }
    }

    /// Sets the program's process, which proves by the first missing canary that it has the memory.
    fn identify_by(
        &mut self,
        canaries: impl IntoIterator<Item = Canary>,
        process: UnprovenProcess,
    ) -> Result<(), ProofError> {
        let process = process.prove(|| canaries.into_iter().find_map(|canary| canary.filled(&self.uffd)))?;
        self.program.set_process(process, &*self.exit_watcher()?);
        // A program that was not forked is held with its worker, see `Self::attach`. If the keeper
        // refuses a forked child, the attachment of its worker fails later.
        let _held = self.origin.is_some().then(|| self.keep());
        self.read_inherited_areas();
        // This may have taken long. A run that was ended meanwhile did not know the process.
        if self.run.end_reason().is_some() {
            self.program.kill(self.run.tenant());
        }
        Ok(())
    }

    /// Reads which areas a forked child has inherited.
    ///
    /// A child of libc's `fork` waits for its canary, and then for the answer to its hello, until
    /// its monitor has used the result.
    fn read_inherited_areas(&mut self) {
        if !self.program.must_check_inheritance.load(Relaxed) {
            return;
        }
        let Some(process) = self.program.process() else { return };
        // The kernel needs some 10 ms per GiB of resident memory for `smaps`.
        let has_advice = self.program.has_fork_advice.load(Relaxed);
        let text = if has_advice { process.read("smaps") } else { process.read_maps().ok() };
        if text.is_none() && !has_ended(process.pidfd(), Duration::ZERO) {
            // Without it the child could read what it has not inherited.
            self.run.end("the memory map of a forked child cannot be read");
        }
        self.inherited = text.and_then(|text| {
            if has_advice {
                Some(maps::inherited_areas(&text))
            } else {
                maps::registered_lines(&text, |area| self.uffd.is_registered(area.start))
            }
        });
        if self.inherited.is_none() {
            // The child was not made by libc's `fork`, and is already changing its memory.
            self.program.must_check_inheritance.store(false, Relaxed);
        }
    }

    /// Identifies the process by the program's own canary, which must be missing.
    pub(crate) fn identify(&mut self, process: UnprovenProcess) -> Result<(), ProofError> {
        self.identify_by([self.canary()], process)
    }

    /// Identifies the process of a forked child that has sent its hello.
    ///
    /// Writes nothing at an address from the hello, because any process of the run may have sent
    /// it.
    pub(crate) fn identify_child(&mut self, process: UnprovenProcess) -> Result<(), ProofError> {
        let proofs = self.canary().of_proof(self.connect_back_requests)?;
        self.identify_by(proofs, process)
    }

    /// Whether the program's worker is attached.
    pub(crate) fn is_attached(&self) -> bool {
        self.attachment.is_some()
    }

    /// Attaches the program's worker and welcomes the program.
    ///
    /// The keeper must hold all descriptors before the program continues, and a program that was
    /// not forked only with this socket: without it the program would send a second hello to the
    /// next agent, and two monitors would read the messages of one userfaultfd.
    pub(crate) fn attach(&mut self, attachment: Attachment) -> Result<(), AttachError> {
        let first = attachment.hello.bounce_buffer / PAGE;
        self.uffd.register(first, first + BATCH_PAGES_MAX as u64)?;
        self.exit_watcher()?.watch(&self.program, WatchedEnd::Worker, &attachment.socket);
        self.program.set_control(attachment.worker.memory());
        self.attachment = Some(attachment);
        self.end_connect_backs();
        self.keep()?;
        Ok(self.attachment.iter().try_for_each(|attachment| attachment.welcome(&self.uffd))?)
    }

    /// The connection to the worker, if it is attached.
    pub(crate) fn worker_socket(&self) -> Option<Arc<OwnedFd>> {
        self.attachment.as_ref().map(|attachment| Arc::clone(&attachment.socket))
    }

    /// Detaches the worker, which has ended or ends when no other process has the memory.
    ///
    /// The worker detects the shutdown of its socket, and then ignores its control memory, whatever
    /// the program has written there.
    pub(crate) fn detach(&mut self) {
        if let Some(attachment) = self.attachment.take() {
            shut_down(&attachment.socket);
        }
    }

    /// Attaches a worker that another agent has attached.
    ///
    /// Sends a welcome unless the worker runs, because the other agent may not have sent it. A
    /// program ignores a second welcome. A worker that has ended by itself cannot be distinguished
    /// from one that does not run yet.
    pub(crate) fn reattach(&mut self, attachment: Attachment) -> io::Result<()> {
        self.exit_watcher()?.watch(&self.program, WatchedEnd::Worker, &attachment.socket);
        let is_running = attachment.worker.process() != 0;
        self.program.set_control(attachment.worker.memory());
        let attachment = self.attachment.insert(attachment);
        if is_running { Ok(()) } else { unless_ended(attachment.welcome(&self.uffd)) }
    }

    /// Stores in the keeper the record and the descriptors for a resumption by another agent.
    pub(crate) fn keep(&self) -> Result<(), HoldRefused> {
        let bounds = self.program.bounds();
        let record = ProgramRecord {
            run: self.run.id(),
            origin: self.origin,
            private: [bounds.shim_range.start, bounds.shim_range.end, bounds.canary],
            nonce: self.program.nonce,
            only: [bounds.paged_range.start, bounds.paged_range.end],
            must_check_inheritance: self.program.must_check_inheritance.load(Relaxed),
            hello: self.attachment.as_ref().map(|attachment| HelloRecord::from(&attachment.hello)),
        };
        let journal = self.journal.memory().shared_fd();
        let mut fds = vec![self.uffd.shared_fd(), Arc::clone(&self.table), journal];
        if let Some(Attachment { socket, worker, .. }) = &self.attachment {
            fds.extend([worker.shared_fd(), Arc::clone(socket)]);
        }
        let process = self.program.process();
        fds.extend(process.iter().flat_map(|process| process.kept_fds()));
        let pid = process.map_or(0, ProgramProcess::pid);
        self.run.keep(&record.put(self.program.id, pid, self.run.tenant()), fds)
    }

    /// Sets events that another agent has read and not applied, to be read first.
    pub(crate) fn set_unapplied_events(&mut self, messages: Vec<UffdMessage<OwnedFd>>) {
        self.unapplied = messages;
    }

    /// Returns another agent's batch per staging buffer; `None` if the program has ended.
    pub(crate) fn batches(&mut self) -> Option<Vec<Vec<(PageNumber, MoveOutcome)>>> {
        self.read_inherited_areas();
        self.find_worker();
        let Some(attachment) = &self.attachment else { return Some(vec![Vec::new(); STAGING_BUFFERS]) };
        attachment.worker.batches(|| !self.is_over())
    }

    /// Returns the registered ranges as the kernel reports them, without those of the shim.
    pub(crate) fn registered(&self) -> Areas {
        let text = self.program.process().and_then(|process| process.read("smaps"));
        let mut areas = text.map_or_else(Areas::default, |text| maps::registered_areas(&text));
        let PagingBounds { shim_range, .. } = self.program.bounds();
        areas.remove(Area { start: shim_range.start / PAGE, end: shim_range.end / PAGE });
        let canary = self.canary().pages();
        areas.remove(Area { start: canary.start, end: canary.end });
        areas
    }

    /// Whether the program's memory exists. The check does not fill the canary, which may be needed
    /// to identify a process.
    pub(crate) fn is_alive(&self) -> bool {
        self.uffd.is_alive(self.canary().page)
    }

    fn canary(&self) -> Canary {
        self.program.canary()
    }

    /// Refuses a forked child that cannot be served, and ends the run.
    fn refuse(&self, uffd: Userfaultfd, error: &dyn std::fmt::Display) {
        self.run.end(&format!("a forked child cannot be served: {error}"));
        let service = self.run.service.upgrade().expect("the service outlives its programs");
        let canary = Canary { number: service.next_program(), ..self.canary() };
        let tenant = self.run.tenant();
        match service.agent.descriptors().charge_reserved(tenant, UNSERVED_DESCRIPTORS) {
            Ok(descriptors) => {
                let memory = UnservedMemory::new(uffd, canary, tenant, false, descriptors);
                service.unserved.add(&service, memory);
            }
            Err(error) => tracing::error!(%error, tenant, "closing the userfaultfd of a forked child"),
        }
    }

    fn exit_watcher(&self) -> io::Result<Arc<ProgramExitWatcher>> {
        let service = self.run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        Ok(Arc::clone(&service.exit_watcher))
    }

    /// Identifies the process of a forked child by the thread of its first fault.
    ///
    /// The number of the thread comes from its own PID namespace. In the agent's namespace it may
    /// belong to another user's process, whose files in `/proc` must not be opened: that could wait
    /// for ever.
    fn identify_by_thread(&mut self, thread: u32) {
        if !self.thread_search(false).is_child(thread) {
            return;
        }
        let identified = UnprovenProcess::numbered(thread).and_then(|process| self.identify(process));
        if let Err(error) = identified {
            // The next fault retries if the kernel has refused the fill. Otherwise the hello
            // identifies the process.
            tracing::debug!(%error, thread, "a fault does not identify its process");
        }
    }

    /// Whether the worker runs. Also finds the worker's process, which has statistics of the memory
    /// after the program's process has ended.
    fn find_worker(&self) -> bool {
        let (Some(attachment), Some(process)) = (&self.attachment, self.program.process()) else {
            return false;
        };
        let worker = attachment.worker.process();
        if worker != 0 {
            process.find_worker(worker, self.canary());
        }
        worker != 0
    }

    /// Appends messages that were just read, and handles the faults that the monitor does not.
    fn append_messages(
        &mut self,
        mut messages: Vec<UffdMessage<RawFd>>,
        out: &mut Vec<UffdMessage<OwnedFd>>,
    ) {
        // SAFETY: the kernel has created each descriptor for the process that reads the message,
        // once.
        out.extend(
            messages.drain(..).map(|message| message.map_child(|fd| unsafe { OwnedFd::from_raw_fd(fd) })),
        );
        self.messages = messages;
        for message in out.iter() {
            if let UffdMessage::Fault(fault) = message {
                self.core_follower.faulted(self.program.process(), fault.thread);
            }
        }
        if self.program.pid() == 0
            && let Some(thread) = out.iter().find_map(|message| match message {
                UffdMessage::Fault(fault) => Some(fault.thread),
                _ => None,
            })
        {
            self.identify_by_thread(thread);
        }
        for message in out.iter() {
            if let UffdMessage::Fault(fault) = message
                && self.canary().is_connect_back(fault.page)
            {
                self.answer_connect_back(*fault);
            }
        }
    }
}

impl Kernel for ProcessEdge {
    type Child = OwnedFd;

    fn read_messages(&mut self, out: &mut Vec<UffdMessage<OwnedFd>>) {
        if !self.unapplied.is_empty() {
            out.append(&mut self.unapplied);
            return;
        }
        let mut messages = std::mem::take(&mut self.messages);
        self.journal.read(|buffer| self.uffd.read(buffer), &mut messages);
        self.append_messages(messages, out);
    }

    fn read_more_messages(&mut self, out: &mut Vec<UffdMessage<OwnedFd>>) -> MoreMessages {
        let mut messages = std::mem::take(&mut self.messages);
        let has_room = self.journal.read_more(|buffer| self.uffd.read(buffer), &mut messages);
        self.append_messages(messages, out);
        if has_room { MoreMessages::Read } else { MoreMessages::NoRoom }
    }

    fn begin_before_others(&mut self, index: usize) {
        self.journal.begin_before_others(index);
    }

    fn event_applied(&mut self, index: usize, ranges: PersistentRanges<'_>) {
        self.journal.event_applied(index, ranges);
    }

    fn persist_ranges(&mut self, ranges: PersistentRanges<'_>) {
        self.journal.persist_ranges(ranges);
    }

    fn begin_remap(&mut self, index: usize) {
        self.journal.begin_remap(index);
    }

    fn release_buffer(&mut self, buffer: usize) {
        if let Some(attachment) = &self.attachment {
            attachment.worker.release_buffer(buffer);
        }
    }

    fn forget_move(&mut self, buffer: usize, position: usize) {
        if let Some(attachment) = &self.attachment {
            attachment.worker.forget_move(buffer, position);
        }
    }

    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome {
        // Canary pages are filled one at a time, because the first access to each is a signal.
        let pages = if self.canary().pages().contains(&page) { 1 } else { pages };
        let bytes = match source {
            FillSource::Zeros { .. } if page == self.canary().page => return self.canary().fill(&self.uffd),
            FillSource::Zeros { is_private: false } => {
                return self.uffd.zero(page, pages);
            }
            FillSource::Zeros { is_private: true } => self.zeros.as_ptr(),
            FillSource::Slot(slot) => {
                let service = self.run.service.upgrade().expect("the service outlives its programs");
                // SAFETY: slots are inside the mempool's mapping.
                unsafe { service.mempool.memory().as_ptr().add(slot.offset()) }
            }
            // SAFETY: the fetch buffer has FETCH_PAGES_MAX pages.
            FillSource::Fetched(index) => unsafe { self.fetcher.buffer().as_ptr().add(index * PAGE_BYTES) },
        };
        assert!(pages <= FETCH_PAGES_MAX);
        // SAFETY: each source has at least `pages` pages: a window is shorter than FETCH_PAGES_MAX,
        // and the monitor names only slots that hold pages.
        unsafe { self.uffd.copy(page, bytes, pages) }
    }

    fn wake(&mut self, page: PageNumber) {
        self.uffd.wake(page);
    }

    fn poison(&mut self, page: PageNumber) -> FillOutcome {
        self.uffd.poison(page)
    }

    fn protect(&mut self, areas: &Areas) -> bool {
        let Some(attachment) = &mut self.attachment else {
            return uffd::protect_all(self.uffd.as_fd(), areas);
        };
        // The kernel could not write to a protected page when a thread ends.
        let mut unpinned = areas.clone();
        attachment.worker.lock_pins();
        attachment.worker.remove_pinned(&mut unpinned);
        let is_done = uffd::protect_all(self.uffd.as_fd(), &unpinned);
        attachment.worker.unlock_pins();
        is_done
    }

    fn protect_child(&mut self, child: &OwnedFd, areas: &Areas) {
        uffd::protect_all(child.as_fd(), areas);
    }

    fn unprotect(&mut self, page: PageNumber, pages: usize) -> FillOutcome {
        self.uffd.unprotect(page, pages)
    }

    fn register(&mut self, start: PageNumber, end: PageNumber) -> bool {
        match self.uffd.register(start, end) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, start, end, "cannot register an area: it has changed");
                false
            }
        }
    }

    fn registered_areas(&mut self, ranges: &[Area]) -> Option<Areas> {
        let maps = self.program.process().map(ProgramProcess::read_maps);
        let text = match maps.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into())) {
            Ok(text) => text,
            // The sampler finds the areas again, unless the program has ended.
            Err(error) => {
                tracing::debug!(pid = self.program.pid(), %error, "cannot read the memory map");
                return Some(Areas::default());
            }
        };
        let is_wanted = |area: Area| ranges.iter().any(|range| range.overlaps(area));
        let registered = maps::registered_lines(&text, |area| {
            if is_wanted(area) { self.uffd.is_registered(area.start) } else { Some(false) }
        });
        // With an unread event, an area that is not in the map may have been moved away.
        registered.filter(|_| self.has_no_unread_event())
    }

    fn present_pages(
        &mut self,
        start: PageNumber,
        end: PageNumber,
        max: usize,
        out: &mut Vec<PageNumber>,
    ) -> PageNumber {
        let Some(process) = self.program.process() else { return end };
        let scanned = pagemap::present(process.pagemap(), start..end, max as u64, |pages| out.extend(pages));
        scanned.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot scan pagemap: the program has ended");
            end
        })
    }

    fn exclusive_pages(&mut self, start: PageNumber, end: PageNumber, out: &mut Vec<PageNumber>) {
        let Some(process) = self.program.process() else { return };
        if let Err(error) = pagemap::exclusive(process.pagemap(), start..end, out) {
            tracing::debug!(%error, "cannot read pagemap: the program has ended");
        }
    }

    fn inherited_areas(&mut self) -> Option<Areas> {
        self.inherited.take()
    }

    fn inheritance_checked(&mut self) {
        self.program.must_check_inheritance.store(false, Relaxed);
        let _held = self.keep();
    }

    fn begin_move_out(&mut self, buffer: usize, pages: &[PageNumber]) {
        let attachment = self.attachment.as_mut().expect("the monitor has checked that there is a worker");
        self.stalled_since.set(None);
        attachment.worker.set_core(self.core_follower.core());
        attachment.worker.begin_batch(buffer, pages);
    }

    fn finish_move_out(
        &mut self,
        buffer: usize,
        pages: &[PageNumber],
        out: &mut Vec<MoveOutcome>,
    ) -> Result<bool, ProgramEnded> {
        let attachment = self.attachment.as_ref().ok_or(ProgramEnded)?;
        if attachment.worker.finish_batch(buffer, pages.len(), out) {
            return Ok(true);
        }
        if self.is_over() { Err(ProgramEnded) } else { Ok(false) }
    }

    fn has_worker(&self) -> bool {
        self.find_worker()
    }

    fn lock_pins(&mut self) {
        self.attachment.iter_mut().for_each(|attachment| attachment.worker.lock_pins());
    }

    fn unlock_pins(&mut self) {
        self.attachment.iter().for_each(|attachment| attachment.worker.unlock_pins());
    }

    fn is_pinned(&self, page: PageNumber) -> bool {
        let shim = self.program.bounds().shim_range;
        page == self.canary().page
            || (shim.start / PAGE..shim.end.div_ceil(PAGE)).contains(&page)
            || self.attachment.as_ref().is_some_and(|attachment| attachment.worker.is_pinned(page))
    }

    fn has_no_unread_event(&mut self) -> bool {
        self.canary().fill(&self.uffd).stop != Some(FillStop::Busy)
    }

    fn has_message(&mut self) -> bool {
        let mut polled = [PollFd::new(&self.uffd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    fn yield_now(&mut self) {
        self.backoff.wait();
    }
}
