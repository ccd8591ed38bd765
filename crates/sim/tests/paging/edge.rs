//! The simulated edge: what a monitor asks for, answered by the model while the rest of the world goes on.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use aquifer_faults::journal::PersistentRanges;
use aquifer_faults::kernel::{
    FillOutcome, FillSource, FillStop, Kernel, MoveOutcome, ProgramEnded, UffdMessage,
};
use aquifer_faults::{Areas, Edge, EvictedBatch, SenderEvent};
use aquifer_pager::{
    BlockId, FetchError, Fetcher, Location, Mutation, PAGE_BYTES, PageNumber, SlabSet, Volume, view,
};

use super::memory::{Frame, decode, index};
use super::process::{Event, Process};
use super::world::World;

/// Most messages of one read.
const MESSAGES_MAX: usize = 16;

#[derive(Debug)]
pub struct SimEdge {
    world: Rc<RefCell<World>>,
    process: usize,
    fetcher: Fetcher,
    /// Whether a node had what was fetched last.
    is_held: bool,
    /// Whether all nodes that should have it have heard that our lease is over.
    is_refused: bool,
}

impl SimEdge {
    pub fn new(world: &Rc<RefCell<World>>, process: usize) -> Self {
        let fetcher =
            Fetcher::new(world.borrow().cluster.connector(super::cluster::FETCHERS)).expect("memory");
        Self { world: Rc::clone(world), process, fetcher, is_held: false, is_refused: false }
    }

    /// The world, after it has gone on for a while; if the agent lives to see it.
    fn later(&self) -> RefMut<'_, World> {
        super::death::pass();
        self.meanwhile()
    }

    /// The world goes on, and the agent lives.
    fn meanwhile(&self) -> RefMut<'_, World> {
        let mut world = self.world.borrow_mut();
        let pace = world.pace;
        world.bustle(pace);
        world
    }

    /// What is at a page, of those looked at from `start` on: the world goes on meanwhile.
    fn frame(&self, start: PageNumber, page: PageNumber) -> Option<Frame> {
        let mut world = if (page - start).is_multiple_of(8) { self.later() } else { self.world.borrow_mut() };
        world.page(self.process, page).frame
    }

    fn stamp(&self, world: &World, source: FillSource, offset: usize) -> Option<u64> {
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

    /// What the kernel says before it looks at the first page.
    fn obstacle(process: &Process, page: PageNumber, pages: usize) -> Option<FillStop> {
        if !process.alive {
            Some(FillStop::Ended)
        } else if process.changing > 0 {
            Some(FillStop::Busy)
        } else if !process.is_fillable(page, pages) {
            Some(FillStop::NoArea)
        } else {
            None
        }
    }

    /// One page's way out of the program.
    fn take_one(&self, page: PageNumber) -> Result<(MoveOutcome, u64), ProgramEnded> {
        let mut is_private = false;
        loop {
            let mut world = self.meanwhile();
            let ignores_events = Mutation::EvictDuringEvents.is_active();
            let process = &mut world.processes[self.process];
            if !process.alive {
                return Err(ProgramEnded);
            }
            let place = &mut process.pages[index(page)];
            if is_private && place.mapped {
                if place.registered && place.frame.is_none() {
                    // The real worker would wait here: see "What is left" in docs/formats/paging.md.
                    world.seen.stuck_workers += 1;
                    return Ok((MoveOutcome::Kept, 0));
                }
                let frame = place.frame.get_or_insert(Frame::ZERO);
                if frame.protected {
                    world.failure =
                        Some(format!("the worker waits for page {page:#x}, and the agent for the worker"));
                    return Err(ProgramEnded);
                }
                frame.exclusive = true;
            }
            let taken = match place.frame {
                _ if process.changing > 0 && !ignores_events => MoveOutcome::Kept,
                _ if !place.mapped || place.poisoned => MoveOutcome::Kept,
                None => MoveOutcome::Absent,
                Some(Frame { pinned: true, .. }) => MoveOutcome::Kept,
                Some(Frame { exclusive: false, .. }) => {
                    process.unprotect(index(page), index(page) + 1);
                    is_private = true;
                    world.seen.privatised += 1;
                    continue;
                }
                Some(Frame { stamp, .. }) => {
                    assert!(!process.kept.contains(&page), "page {page:#x} was to stay");
                    place.frame = None;
                    tell!("{} takes {} = {stamp}", self.process, index(page));
                    return Ok((MoveOutcome::Moved, stamp));
                }
            };
            if taken == MoveOutcome::Kept {
                world.seen.kept += 1;
            } else {
                world.seen.absent += 1;
            }
            return Ok((taken, 0));
        }
    }
}

impl Kernel for SimEdge {
    type Child = usize;

    fn read_messages(&mut self, out: &mut Vec<UffdMessage<usize>>) {
        let mut world = self.later();
        let journal = &mut world.processes[self.process].journal;
        journal.read.clear();
        (journal.heeded, journal.moving) = (0, None);
        for index in 0..MESSAGES_MAX {
            let Some(message) = world.processes[self.process].next_message(index) else {
                break;
            };
            if let UffdMessage::Fork(child) = message {
                world.processes[child].started = true;
            }
            out.push(message);
            tell!("{} reads {:?}", self.process, out.last());
            if world.rng.chance(1, 8) {
                world.bustle(1);
            } else if world.moves_often {
                // So that a read brings several moves, of the same place too.
                world.bustle(6);
            }
        }
        // Moves to a place that was just moved away from: whoever takes them up in the wrong order mixes pages up.
        let read = &world.processes[self.process].journal.read;
        let moves = read.iter().filter_map(|(_, event)| match event {
            Event::Remap { from, to, pages } => Some((*from, *to, usize::try_from(*pages).expect("few"))),
            _ => None,
        });
        let is_chain = |(first, (from, _, pages)): (usize, (usize, usize, usize))| {
            moves.clone().skip(first + 1).any(|(_, to, _)| (from..from + pages).contains(&to))
        };
        if moves.clone().enumerate().any(is_chain) && world.agent_may_die && world.rng.chance(3, 4) {
            super::death::set_at_events(1);
        }
    }

    fn event_applied(&mut self, index: usize, ranges: PersistentRanges<'_>) {
        super::death::pass_event();
        let journal = &mut self.world.borrow_mut().processes[self.process].journal;
        assert!(journal.read.iter().any(|(place, _)| *place == index), "it is an event of the last read");
        journal.heeded = index + 1;
        journal.vacated = ranges.pending_unmaps.to_vec();
        journal.given_up.clone_from(ranges.removed);
    }

    fn persist_ranges(&mut self, ranges: PersistentRanges<'_>) {
        super::death::pass();
        let journal = &mut self.world.borrow_mut().processes[self.process].journal;
        journal.vacated = ranges.pending_unmaps.to_vec();
        journal.given_up.clone_from(ranges.removed);
    }

    fn begin_remap(&mut self, index: usize) {
        super::death::pass_event();
        let mut world = self.world.borrow_mut();
        if !Mutation::ForgetMoving.is_active() {
            world.processes[self.process].journal.moving = Some(index);
        }
    }

    fn release_buffer(&mut self, buffer: usize) {
        super::death::pass();
        self.world.borrow_mut().processes[self.process].batches[buffer].clear();
    }

    fn fill(&mut self, page: PageNumber, pages: usize, source: FillSource) -> FillOutcome {
        let mut world = self.later();
        let mut stop = Self::obstacle(&world.processes[self.process], page, pages);
        if world.rng.chance(1, 500) {
            stop = Some(FillStop::NoMemory);
        }
        let mut filled = 0;
        while filled < pages && stop.is_none() {
            let stamp = self.stamp(&world, source, filled);
            let place = world.page(self.process, page + filled as u64);
            if place.frame.is_some() || place.poisoned {
                stop = Some(FillStop::Exists);
                break;
            }
            let Some(stamp) = stamp else {
                world.failure = Some(format!("page {page:#x} + {filled} was filled with a mixture"));
                break;
            };
            place.frame = Some(Frame { stamp, ..Frame::ZERO });
            filled += 1;
        }
        let count = filled as u64;
        tell!("{} fill {}+{pages} {source:?}: {filled} {stop:?}", self.process, index(page));
        match source {
            FillSource::Zeros { .. } => world.seen.zero_fills += count,
            FillSource::Slot(_) => world.seen.staging_fills += count,
            FillSource::Fetched(_) => world.seen.remote_fills += count,
        }
        world.seen.busy += u64::from(stop == Some(FillStop::Busy));
        let first = index(page);
        world.processes[self.process].wake(first, first + filled);
        world.run_woken(self.process);
        // What stopped a fill that had begun shows when the rest is tried.
        FillOutcome { pages: filled, stop: stop.filter(|_| filled == 0) }
    }

    fn wake(&mut self, page: PageNumber) {
        let mut world = self.later();
        let at = index(page);
        world.processes[self.process].wake(at, at + 1);
    }

    fn poison(&mut self, page: PageNumber) -> FillOutcome {
        let mut world = self.later();
        let mut stop = Self::obstacle(&world.processes[self.process], page, 1);
        if world.rng.chance(1, 8) {
            stop = Some(FillStop::NoMemory);
        }
        let place = world.page(self.process, page);
        if stop.is_none() && (place.frame.is_some() || place.poisoned) {
            stop = Some(FillStop::Exists);
        }
        if stop.is_some() {
            return FillOutcome { pages: 0, stop };
        }
        place.poisoned = true;
        let at = index(page);
        world.processes[self.process].wake(at, at + 1);
        FillOutcome { pages: 1, stop }
    }

    fn protect(&mut self, areas: &Areas) -> bool {
        let mut world = self.later();
        let is_done = world.processes[self.process].protect(areas);
        world.seen.protections += u64::from(is_done);
        is_done
    }

    fn protect_child(&mut self, child: &usize, areas: &Areas) {
        let mut world = self.later();
        world.processes[*child].protect(areas);
    }

    fn unprotect(&mut self, page: PageNumber, pages: usize) -> FillOutcome {
        let mut world = self.later();
        let process = &mut world.processes[self.process];
        let stop = Self::obstacle(process, page, pages);
        if stop.is_none() {
            process.unprotect(index(page), index(page) + pages);
            world.seen.unprotected += 1;
            tell!("{} unprotects {}+{pages}", self.process, index(page));
            world.run_woken(self.process);
        }
        FillOutcome { pages: if stop.is_none() { pages } else { 0 }, stop }
    }

    fn register(&mut self, start: PageNumber, end: PageNumber) -> bool {
        let mut world = self.later();
        let pages = &mut world.processes[self.process].pages[index(start)..index(end)];
        let mut any = false;
        // Holes are no obstacle to the kernel.
        tell!("{} registers {}..{}", self.process, index(start), index(end));
        for page in pages.iter_mut().filter(|page| page.mapped) {
            page.registered = true;
            any = true;
        }
        any
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
        end
    }

    fn exclusive_pages(&mut self, start: PageNumber, end: PageNumber, out: &mut Vec<PageNumber>) {
        out.extend((start..end).filter(|page| self.frame(start, *page).is_some_and(|frame| frame.exclusive)));
    }

    fn move_out(
        &mut self,
        buffer: usize,
        pages: &[PageNumber],
        out: &mut Vec<MoveOutcome>,
    ) -> Result<(), ProgramEnded> {
        let mut world = self.later();
        let process = &mut world.processes[self.process];
        process.batches[buffer] = pages.iter().map(|page| (*page, MoveOutcome::Kept)).collect();
        if world.rng.chance(1, 2048) {
            world.kill(self.process);
        }
        drop(world);
        super::death::pass();
        self.world.borrow_mut().processes[self.process].staging[buffer].fill(None);
        for (position, page) in pages.iter().enumerate() {
            let (taken, stamp) = self.take_one(*page)?;
            let process = &mut self.world.borrow_mut().processes[self.process];
            process.batches[buffer][position].1 = taken;
            if taken == MoveOutcome::Moved {
                process.staging[buffer][position] = Some(stamp);
            }
            out.push(taken);
        }
        // The worker goes on to the end of its command, whether or not the agent sees that.
        super::death::pass();
        Ok(())
    }

    fn has_worker(&self) -> bool {
        let worker_in = &mut self.later().processes[self.process].worker_in;
        *worker_in = worker_in.saturating_sub(1);
        *worker_in == 0
    }

    fn is_pinned(&self, page: PageNumber) -> bool {
        self.world.borrow().processes[self.process].kept.contains(&page)
    }

    fn has_no_unread_event(&mut self) -> bool {
        self.later().processes[self.process].changing == 0
    }

    fn yield_now(&mut self) {
        self.later().run_some_thread();
    }
}

impl Edge for SimEdge {
    fn submit_batch(&mut self, job: EvictedBatch) {
        self.later().submit(self.process, job);
    }

    fn submit_block(&mut self, block: BlockId, slots: u64) {
        self.later().submit_again(self.process, block, slots);
    }

    fn poll_sender(&mut self, out: &mut Vec<SenderEvent>) {
        out.extend(self.later().processes[self.process].done.drain(..));
    }

    fn wait_for_sender(&mut self) -> bool {
        let mut world = self.later();
        world.run_sender();
        if !world.cluster.fabric.step() && world.rng.chance(1, 8) {
            world.cluster.relent();
        }
        world.waits += 1;
        assert!(world.waits < 100_000, "a monitor waits for ever");
        true
    }

    fn fetch(&mut self, slabs: &SlabSet, locations: &[Location]) -> Result<usize, FetchError> {
        drop(self.later());
        let bad_copies = self.fetcher.bad_copies();
        let outcome = self.fetcher.fetch(slabs, locations);
        let mut world = self.world.borrow_mut();
        let copies = slabs.replicas(locations[0].slab());
        self.is_held = copies.iter().any(|copy| world.cluster.holds(&copy));
        self.is_refused = copies.iter().all(|copy| world.cluster.refuses(copy.node));
        world.seen.late += u64::from(self.fetcher.late() > 0);
        if self.fetcher.bad_copies() > bad_copies && !world.cluster.damaged.contains(&true) {
            world.failure = Some(format!("a copy among {locations:?} is not what was written"));
        }
        outcome
    }

    fn fetched_page(&self, index: usize) -> &[u8] {
        super::death::pass();
        self.world.borrow_mut().seen.repacked += 1;
        view::page(self.fetcher.buffer(), index * PAGE_BYTES)
    }

    fn start_child(&mut self, child: usize, volume: Volume, areas: Areas) {
        let mut world = self.later();
        world.keep(child, volume.table_memory());
        world.newborn.push((child, volume, areas));
    }

    fn wake_other_programs(&mut self) {
        let mut world = self.later();
        for process in &mut world.processes {
            process.nudged |= process.id != self.process;
        }
    }

    fn report_lost(&mut self, page: PageNumber, error: &FetchError) {
        let mut world = self.later();
        let (node, is_fault) = match error {
            FetchError::NodeGone { node, .. } | FetchError::Refused { node, .. } => {
                (node, !self.is_held || world.cluster.was_cut(*node))
            }
            FetchError::Damaged { node, .. } => (node, world.cluster.damaged[usize::from(node.0)]),
        };
        let is_excused = if world.cluster.replicas == 1 { is_fault } else { self.is_refused };
        if !is_excused {
            world.failure = Some(format!("page {page:#x} was lost at {node:?} without cause: {error}"));
        }
        world.seen.lost += 1;
        world.note_lost(self.process, page);
    }

    fn now_ns(&self) -> u64 {
        self.world.borrow().clock_ns
    }
}
