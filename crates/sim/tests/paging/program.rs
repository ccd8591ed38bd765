//! What the threads of a modelled program do: touch, drop, unmap, map, move, pin, fork.

use aquifer_fabric::sim::Rng;

use super::memory::{Page, number};
use super::process::{After, Doing, Event, Process};
use super::world::World;

/// Most processes of a schedule.
const PROCESSES_MAX: usize = 4;
/// The first of the numbers that stand for a move.
const MOVE: u64 = 16;

impl World {
    /// A random thread of a random process runs for a moment.
    pub fn run_some_thread(&mut self) {
        let process = self.rng.index(self.processes.len());
        let target = &self.processes[process];
        if !target.alive || !target.started {
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
        match target.threads[thread].doing {
            Doing::Idle if self.winding_down => Ok(()),
            Doing::Idle => self.begin(process, thread),
            Doing::Touch { page, write } => target.touch(thread, page, write.then_some(stamp)),
            Doing::Blocked { page, .. } => {
                if !self.winding_down && self.rng.chance(1, 64) {
                    // A signal: the thread comes back to the same fault.
                    target.wake(page, page + 1);
                }
                Ok(())
            }
            Doing::Telling { .. } => {
                target.go_on_telling(thread);
                Ok(())
            }
            Doing::Zapping { start, end, lazy } => {
                target.zap(start, end, lazy);
                target.threads[thread].doing = Doing::Idle;
                Ok(())
            }
        }
    }

    /// Threads that were just woken run at once, mostly: else tiny limits take their pages again and again.
    pub fn run_woken(&mut self, process: usize) {
        for thread in 0..self.processes[process].threads.len() {
            let doing = &self.processes[process].threads[thread].doing;
            if matches!(doing, Doing::Touch { .. })
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
            0..6 => drop_content(target, rng, thread, late),
            6..10 => unmap(target, rng, thread),
            10..16 => {
                map(target, rng, thread);
            }
            MOVE..22 => {
                if remap(target, rng, thread).is_some() {
                    self.seen.remaps += 1;
                }
            }
            22..24 => self.fork(process, thread),
            24..26 => pin(target, rng, thread),
            _ => return self.touch_some(process, thread),
        }
        Ok(())
    }

    fn touch_some(&mut self, process: usize, thread: usize) -> Result<(), String> {
        let stamp = self.new_stamp();
        let target = &mut self.processes[process];
        let next = target.threads[thread].last + 1;
        let is_own =
            |target: &Process, at: usize| target.pages.get(at).is_some_and(|page| page.owner == Some(thread));
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

    fn fork(&mut self, process: usize, thread: usize) {
        let id = self.processes.len();
        if id >= PROCESSES_MAX || self.processes[process].is_moving() {
            return;
        }
        let worker_in = u32::try_from(self.rng.below(30)).expect("small");
        let parent = &mut self.processes[process];
        let child = parent.fork(id, worker_in);
        parent.tell(thread, vec![Event::Fork(id)], After::Nothing, false);
        self.processes.push(child);
        self.seen.forks += 1;
    }
}

fn drop_content(target: &mut Process, rng: &mut Rng, thread: usize, late: bool) {
    let Some((start, end)) = target.own_range(rng, thread, 8) else {
        return;
    };
    let lazy = rng.chance(1, 3);
    if !target.pages[start].registered {
        // The kernel does it under one lock, which registering needs too.
        target.zap(start, end, lazy);
        return;
    }
    target.pages[start..end].iter_mut().for_each(|page| page.unstable = true);
    let event = Event::Remove { start, end };
    target.tell(thread, vec![event], After::Zap { start, end, lazy }, late);
}

/// Unmap; or map anew in one call, for another thread to use at once.
fn unmap(target: &mut Process, rng: &mut Rng, thread: usize) {
    let Some((start, end)) = target.own_range(rng, thread, 8) else {
        return;
    };
    let events = target.unmap(start, end);
    if rng.chance(1, 3) {
        let heir = rng.index(target.threads.len());
        target.pages[start..end].fill(Page::mapped_by(heir, false));
    }
    target.tell(thread, events, After::Nothing, false);
}

fn map(target: &mut Process, rng: &mut Rng, thread: usize) {
    if let Some((start, end)) = target.free_range(rng, 12) {
        target.pages[start..end].fill(Page::mapped_by(thread, false));
        tell!("{}.{thread} maps {start}..{end}", target.id);
    }
}

/// Grow in place, or move to a free or an own place, and perhaps grow there.
fn remap(target: &mut Process, rng: &mut Rng, thread: usize) -> Option<()> {
    let (mut start, mut end) = target.own_range(rng, thread, 8)?;
    let last = target.threads[thread].last;
    let used = &target.pages[last.min(target.pages.len() - 1)];
    if rng.chance(1, 2) && used.owner == Some(thread) && used.mapped && !used.unstable {
        // Programs like to move what they have just used.
        let kind = used.registered;
        let fits = |at: &usize| {
            let page = &target.pages[*at];
            page.owner == Some(thread) && page.mapped && !page.unstable && page.registered == kind
        };
        start = last;
        end = (last..target.pages.len().min(last + 1 + rng.index(8))).take_while(fits).last().unwrap_or(last)
            + 1;
    }
    let registered = target.pages[start].registered;
    if rng.chance(1, 4) {
        let room = (end..target.pages.len()).take_while(|at| !target.pages[*at].mapped).count();
        let growth = rng.index(room.min(4) + 1);
        target.pages[end..end + growth].fill(Page::mapped_by(thread, registered));
        return None;
    }
    let pages = end - start;
    let is_fixed = rng.chance(1, 3);
    let vacated = target.vacated;
    let is_free = target.pages[vacated.0..vacated.1].iter().all(|page| !page.mapped);
    let (to, stop) = if is_fixed {
        target.own_range(rng, thread, pages + 2)?
    } else if is_free && vacated.1 - vacated.0 >= pages && rng.chance(7, 8) {
        vacated
    } else {
        target.free_range(rng, pages + 2)?
    };
    if stop - to < pages || (to < end && start < stop) {
        return None;
    }
    // A call that tells of several changes has made them all before the first is heard. What others do meanwhile at a place that it
    // vacated may then be told before the vacating: see "What is left" in docs/formats/paging.md.
    let is_alone = target.threads.len() == 1;
    if !is_alone && target.pages[to..stop].iter().any(|page| page.registered) {
        return None;
    }
    let mut events = target.unmap(to, stop);
    // `MREMAP_DONTUNMAP` leaves the old place mapped, and empty.
    let is_left = stop - to == pages && rng.chance(1, 4);
    for offset in 0..stop - to {
        let fresh = Page::mapped_by(thread, registered);
        target.pages[to + offset] = if offset < pages {
            if target.lost.remove(&number(start + offset)) {
                target.lost.insert(number(to + offset));
            }
            let left = if is_left { fresh } else { Page::default() };
            std::mem::replace(&mut target.pages[start + offset], left)
        } else {
            fresh
        };
    }
    if !is_left {
        target.vacated = (start, end);
    }
    if registered {
        events.push(Event::Remap { from: start, to, pages: pages as u64 });
        if !is_left {
            events.push(Event::Unmap { start, end });
        }
    }
    target.tell(thread, events, After::Nothing, false);
    registered.then_some(())
}

/// A device takes hold of a page that is there, or lets go.
fn pin(target: &mut Process, rng: &mut Rng, thread: usize) {
    if let Some((at, _)) = target.own_range(rng, thread, 1)
        && let Some(frame) = &mut target.pages[at].frame
        && frame.exclusive
        && !frame.lazy
    {
        frame.pinned = !frame.pinned;
        tell!("{} pins {at}: {}", target.id, frame.pinned);
    }
}
