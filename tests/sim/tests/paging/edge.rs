//! The simulated edge of a monitor: it answers the monitor's calls from the model while the rest of
//! the world runs.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use aquifer_fabric::WorkError;
use aquifer_faults::{
    Area, Areas, Edge, EvictedBatch, FillOutcome, FillSource, FillStop, Journal, Kernel, MoreMessages,
    MoveOutcome, OtherPrograms, PersistentRanges, ProgramEnded, SenderEvent, UffdMessage, WorkerPort,
};
use aquifer_pager::{
    BlockId, FetchError, Fetcher, Location, PAGE_BYTES, PageNumber, SlabSet, TableError, Volume, view,
};

use super::death::StepKind;
use super::focus::Focus;
use super::memory::{ModelFrame, decode, index};
use super::process::SimProcess;
use super::world::PagingWorld;

#[derive(Debug)]
pub struct SimEdge {
    world: Rc<RefCell<PagingWorld>>,
    process: usize,
    fetcher: Fetcher,
    journal: Journal,
    /// Events that another agent has read and not applied.
    unapplied: Vec<UffdMessage<usize>>,
    /// The agent's mapping of the control memory.
    worker: WorkerPort,
    /// Whether a node still had the pages of the last fetch.
    is_stored: bool,
    /// Whether all nodes with replicas of the last fetch have fenced our host.
    is_fenced: bool,
    /// The first page of the last fetch.
    fetched: Option<Location>,
}

impl SimEdge {
    pub fn new(
        world: &Rc<RefCell<PagingWorld>>,
        process: usize,
        journal: Journal,
        unapplied: Vec<UffdMessage<usize>>,
    ) -> Self {
        let connector = world.borrow().cluster.connector(super::cluster::FETCHERS);
        let fetcher = Fetcher::new(connector).expect("memory");
        let worker = world.borrow().processes[process].agent_port();
        Self {
            world: Rc::clone(world),
            process,
            fetcher,
            journal,
            unapplied,
            worker,
            is_stored: false,
            is_fenced: false,
            fetched: None,
        }
    }

    /// Runs the world for some steps. The agent may die here.
    fn run_world(&self) -> RefMut<'_, PagingWorld> {
        super::death::step();
        self.run_world_alive()
    }

    /// Runs the world for some steps, and the agent survives.
    fn run_world_alive(&self) -> RefMut<'_, PagingWorld> {
        let mut world = self.world.borrow_mut();
        let steps_per_call = world.steps_per_call;
        world.run_others(steps_per_call);
        world
    }

    /// Whether the worker has not finished a batch yet: true in every 64th call. No random number
    /// is drawn for it, so that recorded schedules stay valid.
    fn is_unfinished(&self) -> bool {
        let checks = &mut self.world.borrow_mut().processes[self.process].batch_checks;
        *checks += 1;
        checks.is_multiple_of(64)
    }

    /// Lets the agent die with a high probability if it has read moves that mix pages up when they
    /// are applied in the wrong order: a move to a range that was just moved away.
    fn may_die_among(&self, messages: &[UffdMessage<usize>]) {
        let moves = messages.iter().filter_map(|message| match message {
            UffdMessage::Remap { from, to, pages } => Some((*from, *to, *pages)),
            _ => None,
        });
        let is_chain = |(first, (from, _, pages)): (usize, (PageNumber, PageNumber, u64))| {
            moves.clone().skip(first + 1).any(|(_, to, _)| (from..from + pages).contains(&to))
        };
        let mut world = self.world.borrow_mut();
        // With `Focus::Reuse` any move is critical, because its old place is used at once.
        let is_critical = match world.focus {
            Focus::Reuse => moves.clone().next().is_some(),
            _ => moves.clone().enumerate().any(is_chain),
        };
        if is_critical && world.agent_may_die && world.rng.chance(3, 4) {
            super::death::schedule_at(StepKind::Event, 1);
        }
    }

    /// The contents of a page, during a search that began at `start`. The world runs meanwhile.
    fn frame(&self, start: PageNumber, page: PageNumber) -> Option<ModelFrame> {
        let mut world =
            if (page - start).is_multiple_of(8) { self.run_world() } else { self.world.borrow_mut() };
        world.page(self.process, page).frame
    }

    fn stamp(&self, world: &PagingWorld, source: FillSource, offset: usize) -> Option<u64> {
        let mut bytes = [0; PAGE_BYTES];
        match source {
            FillSource::Zeros { .. } => {}
            FillSource::Slot(slot) => {
                world.mempool.memory().read(slot.offset() + offset * PAGE_BYTES, &mut bytes);
            }
            FillSource::Fetched(first) => {
                self.fetcher.buffer().read((first + offset) * PAGE_BYTES, &mut bytes);
            }
        }
        decode(&bytes)
    }

    /// The error that the kernel returns before it examines the first page, if any.
    fn fill_error(process: &SimProcess, page: PageNumber, pages: usize) -> Option<FillStop> {
        if !process.is_alive {
            Some(FillStop::Ended)
        } else if process.changing > 0 {
            Some(FillStop::Busy)
        } else if !process.is_fillable(page, pages) {
            Some(FillStop::NoArea)
        } else {
            None
        }
    }
}

impl Kernel for SimEdge {
    type Child = usize;

    fn read_messages(&mut self, out: &mut Vec<UffdMessage<usize>>) {
        if !self.unapplied.is_empty() {
            let _ = self.run_world();
            out.append(&mut self.unapplied);
            self.may_die_among(out);
            return;
        }
        drop(self.run_world());
        let mut messages = Vec::new();
        let (world, process) = (&self.world, self.process);
        self.journal.read(|buffer| world.borrow_mut().read_uffd(process, buffer), &mut messages);
        let child = |fd| usize::try_from(fd).expect("the number of a process");
        out.extend(messages.into_iter().map(|message| message.map_child(child)));
        trace!("{} reads {out:?}", self.process);
        self.may_die_among(out);
    }

    fn read_more_messages(&mut self, out: &mut Vec<UffdMessage<usize>>) -> MoreMessages {
        drop(self.run_world());
        let mut messages = Vec::new();
        let (world, process) = (&self.world, self.process);
        let has_room =
            self.journal.read_more(|buffer| world.borrow_mut().read_uffd(process, buffer), &mut messages);
        let child = |fd| usize::try_from(fd).expect("the number of a process");
        out.extend(messages.into_iter().map(|message| message.map_child(child)));
        trace!("{} reads more: {out:?}", self.process);
        if has_room { MoreMessages::Read } else { MoreMessages::NoRoom }
    }

    fn begin_before_others(&mut self, index: usize) {
        super::death::step_of(StepKind::Event);
        self.journal.begin_before_others(index);
    }

    fn event_applied(&mut self, index: usize, ranges: PersistentRanges<'_>) {
        super::death::step_of(StepKind::Event);
        trace!("{} has applied {index}, pending unmaps {:?}", self.process, ranges.pending_unmaps);
        self.journal.event_applied(index, ranges);
    }

    fn persist_ranges(&mut self, ranges: PersistentRanges<'_>) {
        super::death::step();
        self.journal.persist_ranges(ranges);
    }

    fn begin_remap(&mut self, index: usize) {
        super::death::step_of(StepKind::Event);
        trace!("{} moves the pages of {index}", self.process);
        self.journal.begin_remap(index);
    }

    fn release_buffer(&mut self, buffer: usize) {
        super::death::step();
        self.worker.release_buffer(buffer);
    }

    fn forget_move(&mut self, buffer: usize, position: usize) {
        super::death::step();
        self.worker.forget_move(buffer, position);
    }

    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome {
        let mut world = self.run_world();
        let mut stop = Self::fill_error(&world.processes[self.process], page, pages);
        if world.rng.chance(1, 500) {
            stop = Some(FillStop::NoMemory);
        }
        let mut filled = 0;
        while filled < pages && stop.is_none() {
            let stamp = self.stamp(&world, source, filled);
            let place = world.page(self.process, page + filled as u64);
            if place.frame.is_some() || place.is_poisoned {
                stop = Some(FillStop::Exists);
                break;
            }
            let Some(stamp) = stamp else {
                world.failure = Some(format!("page {page:#x} + {filled} was filled with mixed bytes"));
                break;
            };
            place.frame = Some(ModelFrame { stamp, ..ModelFrame::ZERO });
            filled += 1;
        }
        let count = filled as u64;
        trace!("{} fill {}+{pages} {source:?}: {filled} {stop:?}", self.process, index(page));
        match source {
            FillSource::Zeros { .. } => world.counts.zero_fills += count,
            FillSource::Slot(_) => world.counts.staging_fills += count,
            FillSource::Fetched(_) => world.counts.remote_fills += count,
        }
        world.counts.busy += u64::from(stop == Some(FillStop::Busy));
        let first = index(page);
        world.processes[self.process].wake(first, first + filled);
        world.run_woken(self.process);
        // If a fill stops after some pages, the reason shows when the rest is tried.
        FillOutcome { pages: filled, stop: stop.filter(|_| filled == 0) }
    }

    fn wake(&mut self, page: PageNumber) {
        let mut world = self.run_world();
        let at = index(page);
        world.processes[self.process].wake(at, at + 1);
    }

    fn poison(&mut self, page: PageNumber) -> FillOutcome {
        let mut world = self.run_world();
        let mut stop = Self::fill_error(&world.processes[self.process], page, 1);
        if world.rng.chance(1, 8) {
            stop = Some(FillStop::NoMemory);
        }
        let place = world.page(self.process, page);
        if stop.is_none() && (place.frame.is_some() || place.is_poisoned) {
            stop = Some(FillStop::Exists);
        }
        if stop.is_some() {
            return FillOutcome { pages: 0, stop };
        }
        place.is_poisoned = true;
        let at = index(page);
        world.processes[self.process].wake(at, at + 1);
        FillOutcome { pages: 1, stop }
    }

    fn protect(&mut self, areas: &Areas) -> bool {
        let mut world = self.run_world();
        let is_done = world.processes[self.process].protect(areas);
        world.counts.protections += u64::from(is_done);
        is_done
    }

    fn protect_child(&mut self, child: &usize, areas: &Areas) {
        let mut world = self.run_world();
        world.processes[*child].protect(areas);
    }

    fn unprotect(&mut self, page: PageNumber, pages: usize) -> FillOutcome {
        let mut world = self.run_world();
        let process = &mut world.processes[self.process];
        let stop = Self::fill_error(process, page, pages);
        if stop.is_none() {
            process.unprotect(index(page), index(page) + pages);
            world.counts.unprotected += 1;
            trace!("{} unprotects {}+{pages}", self.process, index(page));
            world.run_woken(self.process);
        }
        FillOutcome { pages: if stop.is_none() { pages } else { 0 }, stop }
    }

    fn register(&mut self, start: PageNumber, end: PageNumber) -> bool {
        let mut world = self.run_world();
        let pages = &mut world.processes[self.process].pages[index(start)..index(end)];
        let mut any = false;
        // The kernel skips holes.
        trace!("{} registers {}..{}", self.process, index(start), index(end));
        for page in pages.iter_mut().filter(|page| page.is_mapped) {
            page.is_registered = true;
            any = true;
        }
        any
    }

    fn registered_areas(&mut self, _ranges: &[Area]) -> Option<Areas> {
        let world = self.run_world();
        let process = &world.processes[self.process];
        (process.changing == 0).then(|| process.registered())
    }

    fn present_pages(
        &mut self,
        start: PageNumber,
        end: PageNumber,
        max: usize,
        out: &mut Vec<PageNumber>,
    ) -> PageNumber {
        let before = out.len();
        for page in start..end {
            if out.len() - before == max || page > start && self.world.borrow_mut().rng.chance(1, 64) {
                return page;
            }
            if self.frame(start, page).is_some() {
                out.push(page);
            }
        }
        let world = &mut *self.world.borrow_mut();
        if world.focus != Focus::Reuse
            && out.len() > before
            && !world.is_winding_down
            && world.rng.chance(1, 2)
        {
            let at = out[before + world.rng.index(out.len() - before)];
            world.move_onto(self.process, index(at));
        }
        end
    }

    fn exclusive_pages(&mut self, start: PageNumber, end: PageNumber, out: &mut Vec<PageNumber>) {
        out.extend(
            (start..end).filter(|page| self.frame(start, *page).is_some_and(|frame| frame.is_exclusive)),
        );
    }

    fn inherited_areas(&mut self) -> Option<Areas> {
        self.run_world().processes[self.process].inherited.clone()
    }

    fn inheritance_checked(&mut self) {
        super::death::step();
        let world = &mut *self.world.borrow_mut();
        let inherited = world.processes[self.process].inherited.take();
        if let Some(inherited) = inherited.filter(|_| world.rng.chance(1, 2)) {
            world.processes[self.process].replace_uninherited(&inherited);
        }
    }

    fn begin_move_out(&mut self, buffer: usize, pages: &[PageNumber]) {
        drop(self.run_world());
        self.worker.begin_batch(buffer, pages);
        let mut world = self.world.borrow_mut();
        if world.rng.chance(1, 2048) {
            world.kill(self.process);
        }
        let may_replace = world.focus == Focus::Reuse && !world.agent_may_die && !world.is_winding_down;
        if may_replace && world.rng.chance(1, 4) {
            let at = index(pages[world.rng.index(pages.len())]);
            world.replace_page(self.process, at);
        }
        drop(world);
        super::death::step();
    }

    fn finish_move_out(
        &mut self,
        buffer: usize,
        pages: &[PageNumber],
        out: &mut Vec<MoveOutcome>,
    ) -> Result<bool, ProgramEnded> {
        if self.is_unfinished() {
            let _ = self.run_world();
            return Ok(false);
        }
        super::worker::run(&self.world, self.process)?;
        // The worker completes its command, whether or not the agent survives.
        super::death::step();
        assert!(self.worker.finish_batch(buffer, pages.len(), out), "the worker has completed it");
        Ok(true)
    }

    fn has_worker(&self) -> bool {
        let checks_until_worker = &mut self.run_world().processes[self.process].checks_until_worker;
        *checks_until_worker = checks_until_worker.saturating_sub(1);
        *checks_until_worker == 0
    }

    fn lock_pins(&mut self) {
        drop(self.run_world());
        self.worker.lock_pins();
    }

    fn unlock_pins(&mut self) {
        self.worker.unlock_pins();
    }

    fn is_pinned(&self, page: PageNumber) -> bool {
        self.worker.is_pinned(page)
    }

    fn has_no_unread_event(&mut self) -> bool {
        self.run_world().processes[self.process].changing == 0
    }

    fn has_message(&mut self) -> bool {
        self.run_world().processes[self.process].has_message()
    }

    fn yield_now(&mut self) {
        self.run_world().run_random_thread();
    }
}

impl Edge for SimEdge {
    fn submit_batch(&mut self, job: EvictedBatch) {
        self.run_world().submit(self.process, job);
    }

    fn submit_block(&mut self, block: BlockId, slots: u64) {
        self.run_world().submit_again(self.process, block, slots);
    }

    fn poll_sender(&mut self, out: &mut Vec<SenderEvent>) {
        out.extend(self.run_world().processes[self.process].sender_side.done.borrow_mut().drain(..));
    }

    fn wait_for_sender(&mut self) -> bool {
        let mut world = self.run_world();
        let is_forking = !world.unserved_children(self.process).is_empty();
        if is_forking && world.queue.has_request_of(self.process as u64) && world.rng.chance(1, 8) {
            // The process's staging buffers are gone, and children inherit the pages in them.
            world.kill(self.process);
        }
        world.run_sender();
        if !world.cluster.fabric.step() && world.rng.chance(1, 8) {
            world.cluster.free_room();
        }
        world.waits += 1;
        assert!(world.waits < 100_000, "a monitor waits for ever");
        true
    }

    fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError> {
        let mut world = self.run_world();
        if world.focus == Focus::Writes && self.fetcher.late_reads() > 0 {
            // The fetch polls for late READs, which steps the fabric. With other operations in
            // flight, the late READ may stay in flight during the fetch.
            world.sending.sender.probe();
        }
        drop(world);
        let damaged_pages = self.fetcher.damaged_pages();
        let outcome = self.fetcher.fetch(slabs, locations);
        self.fetched = Some(locations[0]);
        let mut world = self.world.borrow_mut();
        let copies = slabs.replicas(locations[0].slab());
        self.is_stored = copies.iter().any(|copy| world.cluster.holds(&copy));
        self.is_fenced = copies.iter().all(|copy| world.cluster.refuses(copy.node));
        world.counts.late += u64::from(self.fetcher.late_reads() > 0);
        if self.fetcher.damaged_pages() > damaged_pages && !world.cluster.damaged.contains(&true) {
            world.failure = Some(format!("a replica among {locations:?} is damaged without cause"));
        }
        outcome
    }

    fn fetched_page(&self, index: usize) -> &[u8] {
        super::death::step_of(StepKind::Move);
        self.world.borrow_mut().counts.repacked += 1;
        view::page(self.fetcher.buffer(), index * PAGE_BYTES)
    }

    fn start_child(&mut self, child: usize, volume: Volume, areas: Areas) {
        let mut world = self.run_world();
        let journal = Journal::new().expect("memory");
        let origin = (self.process as u64, self.journal.sequence());
        world.keep(child, volume.table_memory(), &journal, Some(origin));
        world.new_children.push((child, volume, areas, journal));
        if world.processes[child].inherited.is_some() && world.agent_may_die && world.rng.chance(1, 2) {
            // Before the child's monitor has discarded the memory that the child did not inherit.
            let steps = 1 + u32::try_from(world.rng.below(4)).expect("small");
            super::death::schedule(steps);
        }
    }

    fn refuse_child(&mut self, child: usize, error: &TableError) {
        self.run_world().failure = Some(format!("child {child} was refused: {error}"));
    }

    fn abandon_child(&mut self, child: usize) {
        self.run_world().failure = Some(format!("child {child} was abandoned"));
    }

    fn end_run(&mut self, reason: &str) {
        panic!("{reason}");
    }

    fn set_waits_for_block(&mut self, waits: bool) {
        self.run_world().processes[self.process].waits_for_block = waits;
    }

    fn wake_others(&mut self, others: OtherPrograms) {
        let mut world = self.run_world();
        for process in world.processes.iter_mut().filter(|process| process.id != self.process) {
            process.is_nudged |= others != OtherPrograms::WithoutBlock || process.waits_for_block;
        }
    }

    fn report_lost(&mut self, page: PageNumber, error: &FetchError) {
        let mut world = self.run_world();
        let (node, is_fault) = match error {
            FetchError::NodeGone { node, .. } | FetchError::Refused { node, .. } => {
                let was_fenced = self.fetched.is_some_and(|location| world.was_fenced(location, *node));
                (node, !self.is_stored || world.cluster.was_cut(*node) || was_fenced)
            }
            FetchError::Damaged { node, .. } => (node, world.cluster.damaged[usize::from(node.0)]),
        };
        // A disk that fails is no excuse while memory has the page.
        let copies = self.fetched.map(|location| world.slabs.replicas(location.slab()));
        let is_on_disk = copies.is_some_and(|copies| copies.in_memory() == 0);
        let is_of_disk = matches!(error, FetchError::Refused { cause: WorkError::Storage, .. }) && is_on_disk;
        let is_excused = if world.cluster.replicas == 1 { is_fault } else { self.is_fenced } || is_of_disk;
        if !is_excused {
            world.failure = Some(format!("page {page:#x} was lost at {node:?} without cause: {error}"));
        }
        world.counts.lost += 1;
        world.note_lost(self.process, page);
    }

    fn now_ns(&self) -> u64 {
        self.world.borrow().clock_ns
    }
}
