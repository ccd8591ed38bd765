//! Actions of the threads of a modelled program: touch, drop, unmap, map, move, pin, fork.

use aquifer_fabric::sim::Rng;

use super::focus::Focus;
use super::memory::{ModelPage, number};
use super::process::{AfterEvents, KernelEvent, SimProcess, ThreadState};
use super::world::PagingWorld;

/// Largest number of processes of a schedule.
const PROCESSES_MAX: usize = 4;
/// The first of the numbers that stand for a move.
const MOVE: u64 = 16;

impl PagingWorld {
    /// Runs a random thread of a random process for one step.
    pub fn run_random_thread(&mut self) {
        let process = self.rng.index(self.processes.len());
        let target = &self.processes[process];
        if !target.is_alive || !target.is_started || target.inherited.is_some() {
            return;
        }
        let thread = self.rng.index(target.threads.len());
        if let Err(error) = self.run_thread(process, thread) {
            self.failure.get_or_insert(error);
        }
    }

    fn run_thread(&mut self, process: usize, thread: usize) -> Result<(), String> {
        let stamp = self.new_stamp();
        let target = &mut self.processes[process];
        match target.threads[thread].state {
            ThreadState::Idle if self.is_winding_down => Ok(()),
            ThreadState::Idle => self.begin(process, thread),
            ThreadState::Touch { page, write } => target.touch(thread, page, write.then_some(stamp)),
            ThreadState::Blocked { page, .. } => {
                if !self.is_winding_down && self.rng.chance(1, 64) {
                    // A signal interrupts the thread, which then repeats its fault.
                    target.wake(page, page + 1);
                }
                Ok(())
            }
            ThreadState::Pinning { page } => {
                if target.control.control().are_pins_locked() {
                    self.counts.pins_awaited += 1;
                    return Ok(());
                }
                target.pages[page].is_kept = target.pages[page].is_mapped;
                target.touch(thread, page, Some(stamp))
            }
            ThreadState::RaisingEvents { .. } => {
                target.continue_raising(thread);
                Ok(())
            }
            ThreadState::Dropping { start, end, lazy } => {
                target.drop_range(start, end, lazy);
                target.threads[thread].state = ThreadState::Idle;
                Ok(())
            }
        }
    }

    /// Runs threads that were just woken, with a high probability. Otherwise small limits would
    /// evict their pages before each touch.
    pub fn run_woken(&mut self, process: usize) {
        for thread in 0..self.processes[process].threads.len() {
            let state = &self.processes[process].threads[thread].state;
            if matches!(state, ThreadState::Touch { .. })
                && self.rng.chance(3, 4)
                && let Err(error) = self.run_thread(process, thread)
            {
                self.failure.get_or_insert(error);
            }
        }
    }

    fn new_stamp(&mut self) -> u64 {
        self.stamps += 1;
        if self.rng.chance(1, 12) { 0 } else { self.stamps }
    }

    fn begin(&mut self, process: usize, thread: usize) -> Result<(), String> {
        if self.operations == 0 {
            return Ok(());
        }
        self.operations -= 1;
        let what = if self.moves_often && self.rng.chance(1, 4) { MOVE } else { self.rng.below(self.mix) };
        let rng = &mut self.rng;
        let target = &mut self.processes[process];
        let late = self.late_events && rng.chance(1, 2);
        match what {
            0..22 if !target.may_change(self.changes_overlap && !self.agent_may_die) => {
                return self.touch_some(process, thread);
            }
            0..6 => drop_content(target, rng, thread, late),
            6..10 => unmap(target, rng, thread, late),
            10..16 => {
                map(target, rng, thread);
            }
            MOVE..22 => {
                if remap(target, rng, thread, !self.changes_overlap, late).is_some() {
                    self.counts.remaps += 1;
                }
            }
            22..24 => self.fork(process, thread),
            24..26 => pin_for_device(target, rng, thread),
            26 => pin(target, rng, thread),
            _ => return self.touch_some(process, thread),
        }
        Ok(())
    }

    fn touch_some(&mut self, process: usize, thread: usize) -> Result<(), String> {
        let stamp = self.new_stamp();
        let target = &mut self.processes[process];
        let next = target.threads[thread].last + 1;
        let is_own = |target: &SimProcess, at: usize| {
            target.pages.get(at).is_some_and(|page| page.owner == Some(thread))
        };
        if self.rng.chance(1, 6) {
            let at = self.rng.index(target.pages.len());
            return target.touch(thread, at, None);
        }
        let at = if is_own(target, next) && self.rng.chance(2, 3) {
            next
        } else if let Some((at, _)) = target.own_range(&mut self.rng, thread, 1) {
            at
        } else {
            map(target, &mut self.rng, thread);
            return Ok(());
        };
        let write = self.rng.chance(1, 2).then_some(stamp);
        target.touch(thread, at, write)
    }

    /// The owner of a page unmaps it. Another thread maps memory there and writes to it at once.
    pub fn replace_page(&mut self, process: usize, at: usize) {
        let stamp = self.new_stamp();
        let target = &mut self.processes[process];
        let is_idle = |thread: &usize| matches!(target.threads[*thread].state, ThreadState::Idle);
        let page = &target.pages[at];
        let owner = page.owner.filter(|owner| is_idle(owner) && page.is_mapped && !page.is_being_dropped);
        let heir = (0..target.threads.len()).find(|heir| is_idle(heir) && Some(*heir) != owner);
        let (Some(owner), Some(heir)) = (owner, heir) else { return };
        let events = target.unmap(at, at + 1);
        target.raise_events(owner, events, AfterEvents::Nothing, false);
        target.pages[at] = ModelPage::mapped_by(heir, false);
        let written = target.touch(heir, at, Some(stamp));
        written.unwrap_or_else(|error| panic!("new memory is writable: {error}"));
    }

    /// A thread maps memory in a range that is free, and writes to it at once.
    pub fn use_range(&mut self, process: usize, start: usize, end: usize) {
        let target = &self.processes[process];
        let idle = target.threads.iter().position(|thread| matches!(thread.state, ThreadState::Idle));
        let is_free = target.pages[start..end].iter().all(|page| !page.is_mapped);
        let Some(thread) = idle.filter(|_| is_free) else { return };
        for at in start..end {
            let stamp = self.new_stamp();
            let target = &mut self.processes[process];
            target.pages[at] = ModelPage::mapped_by(thread, false);
            let written = target.touch(thread, at, Some(stamp));
            written.unwrap_or_else(|error| panic!("new memory is writable: {error}"));
        }
    }

    /// The only thread of a process moves an evicted page to the place of a present one.
    pub fn move_onto(&mut self, process: usize, at: usize) {
        let target = &mut self.processes[process];
        let [only] = target.threads.as_slice() else { return };
        let is_own = |page: &ModelPage| page.owner == Some(0) && page.is_mapped && !page.is_being_dropped;
        let is_evicted = |page: &ModelPage| {
            is_own(page) && page.is_registered && page.frame.is_none() && page.expected != 0
        };
        let evicted = target.pages.iter().position(is_evicted).filter(|from| *from != at);
        if matches!(only.state, ThreadState::Idle)
            && is_own(&target.pages[at])
            && let Some(from) = evicted
        {
            move_range(target, 0, (from, from + 1), (at, at + 1), false, false);
        }
    }

    fn fork(&mut self, process: usize, thread: usize) {
        let id = self.processes.len();
        if id >= PROCESSES_MAX || self.focus == Focus::Reuse || self.processes[process].is_moving() {
            return;
        }
        let checks_until_worker = u32::try_from(self.rng.below(30)).expect("small");
        let parent = &mut self.processes[process];
        let mut child = parent.fork(id, checks_until_worker);
        if self.rng.chance(1, 3) {
            let is_mapped = |at: usize| child.pages[at].is_mapped;
            let range = super::memory::random_run(&mut self.rng, child.pages.len(), 20, is_mapped);
            if let Some((start, end)) = range {
                child.disinherit(start, end, self.rng.chance(1, 2));
            }
        }
        parent.raise_events(thread, vec![KernelEvent::Fork(id)], AfterEvents::Nothing, false);
        self.processes.push(child);
        self.counts.forks += 1;
    }
}

fn drop_content(target: &mut SimProcess, rng: &mut Rng, thread: usize, late: bool) {
    let Some((start, end)) = target.own_range(rng, thread, 8) else {
        return;
    };
    let lazy = rng.chance(1, 3);
    if !target.pages[start].is_registered {
        // The kernel drops unregistered pages under one lock, which registration needs, too.
        target.drop_range(start, end, lazy);
        return;
    }
    target.pages[start..end].iter_mut().for_each(|page| page.is_being_dropped = true);
    let event = KernelEvent::Remove { start, end };
    target.raise_events(thread, vec![event], AfterEvents::Drop { start, end, lazy }, late);
}

/// Unmaps a range; or maps it again in the same call, for another thread to use at once.
fn unmap(target: &mut SimProcess, rng: &mut Rng, thread: usize, late: bool) {
    let Some((start, end)) = target.own_range(rng, thread, 8) else {
        return;
    };
    let events = target.unmap(start, end);
    if rng.chance(1, 3) {
        let heir = rng.index(target.threads.len());
        target.pages[start..end].fill(ModelPage::mapped_by(heir, false));
    } else {
        target.moved_from = (start, end);
    }
    target.raise_events(thread, events, AfterEvents::Nothing, late);
}

fn map(target: &mut SimProcess, rng: &mut Rng, thread: usize) {
    if let Some((start, end)) = target.free_range(rng, 12) {
        target.pages[start..end].fill(ModelPage::mapped_by(thread, false));
        trace!("{}.{thread} maps {start}..{end}", target.id);
    }
}

/// Moves a range to a free or an own place. If `grows` is set, perhaps grows it there, or in place.
fn remap(target: &mut SimProcess, rng: &mut Rng, thread: usize, grows: bool, late: bool) -> Option<()> {
    let (mut start, mut end) = target.own_range(rng, thread, 8)?;
    let last = target.threads[thread].last;
    let used = &target.pages[last.min(target.pages.len() - 1)];
    if rng.chance(1, 2) && used.owner == Some(thread) && used.is_mapped && !used.is_being_dropped {
        // Programs tend to move what they have just used.
        let kind = used.is_registered;
        let fits = |at: &usize| {
            let page = &target.pages[*at];
            page.owner == Some(thread)
                && page.is_mapped
                && !page.is_being_dropped
                && page.is_registered == kind
        };
        start = last;
        end = (last..target.pages.len().min(last + 1 + rng.index(8))).take_while(fits).last().unwrap_or(last)
            + 1;
    }
    let registered = target.pages[start].is_registered;
    if grows && rng.chance(1, 4) {
        let room = (end..target.pages.len()).take_while(|at| !target.pages[*at].is_mapped).count();
        let growth = rng.index(room.min(4) + 1);
        target.pages[end..end + growth].fill(ModelPage::mapped_by(thread, registered));
        return None;
    }
    let pages = end - start;
    let is_fixed = rng.chance(1, 3);
    let moved_from = target.moved_from;
    let is_free = target.pages[moved_from.0..moved_from.1].iter().all(|page| !page.is_mapped);
    let (to, stop) = if is_fixed {
        target.own_range(rng, thread, pages + 2)?
    } else if is_free && moved_from.1 - moved_from.0 >= pages && rng.chance(7, 8) {
        moved_from
    } else {
        target.free_range(rng, pages + 2)?
    };
    let stop = if grows { stop } else { stop.min(to + pages) };
    if stop - to < pages || (to < end && start < stop) {
        return None;
    }
    // `MREMAP_DONTUNMAP` leaves the old place mapped and empty.
    let is_left = stop - to == pages && rng.chance(1, 4) && target.changes_meanwhile == 0;
    move_range(target, thread, (start, end), (to, stop), is_left, late);
    registered.then_some(())
}

/// Moves a range to another place, which is unmapped first and may be longer.
fn move_range(
    target: &mut SimProcess,
    thread: usize,
    (start, end): (usize, usize),
    (to, stop): (usize, usize),
    is_left: bool,
    late: bool,
) {
    let pages = end - start;
    let registered = target.pages[start].is_registered;
    let mut events = target.unmap(to, stop);
    for offset in 0..stop - to {
        let fresh = ModelPage::mapped_by(thread, registered);
        target.pages[to + offset] = if offset < pages {
            if target.lost.remove(&number(start + offset)) {
                target.lost.insert(number(to + offset));
            }
            let left = if is_left { fresh } else { ModelPage::default() };
            let moved = std::mem::replace(&mut target.pages[start + offset], left);
            // The pin names the old place.
            ModelPage { is_kept: false, ..moved }
        } else {
            fresh
        };
    }
    if !is_left {
        target.moved_from = (start, end);
    }
    if registered {
        events.push(KernelEvent::Remap { from: start, to, pages: pages as u64 });
        if !is_left {
            events.push(KernelEvent::Unmap { start, end });
        }
    }
    target.raise_events(thread, events, AfterEvents::Nothing, late);
}

/// Pins a page of the thread: it must stay present.
fn pin(target: &mut SimProcess, rng: &mut Rng, thread: usize) {
    if let Some((at, _)) = target.own_range(rng, thread, 1) {
        target.control.control().pin(number(at));
        target.threads[thread].state = ThreadState::Pinning { page: at };
    }
}

/// Pins a present page for a device, or unpins it.
fn pin_for_device(target: &mut SimProcess, rng: &mut Rng, thread: usize) {
    if let Some((at, _)) = target.own_range(rng, thread, 1)
        && let Some(frame) = &mut target.pages[at].frame
        && frame.is_exclusive
        && !frame.is_lazy
    {
        frame.is_pinned = !frame.is_pinned;
        trace!("{} pins {at}: {}", target.id, frame.is_pinned);
    }
}
