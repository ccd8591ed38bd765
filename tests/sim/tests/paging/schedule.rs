//! Plays one schedule: monitors turn, threads run, the sender sends, and faults are injected. At
//! the end all pages are checked, and all memory must be free.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_faults::{Areas, Journal, Monitor, TurnOutcome};
use aquifer_pager::Volume;

use aquifer_fabric::sim::Rng;

use super::cluster::SimCluster;
use super::counts::PagingCounts;
use super::death::{self, StepKind};
use super::disk::DiskNode;
use super::edge::SimEdge;
use super::focus::Focus;
use super::memory::{ModelPage, number};
use super::process::{SimProcess, ThreadState};
use super::world::PagingWorld;

/// More rounds than any schedule needs to become idle.
const ROUNDS_MAX: u32 = 60_000;

/// Largest numbers of steps until the agent dies: at once, in its next action, or later.
const DEATH_STEPS: [u64; 3] = [10, 60, 400];

pub struct PagingSchedule {
    pub world: Rc<RefCell<PagingWorld>>,
    /// Monitors by process; `None` before the fork was served and after the end of the process.
    pub monitors: Vec<Option<Monitor<SimEdge>>>,
    pub buffers: usize,
    /// The faults that may be injected.
    faults_planned: PagingFaults,
    has_many_faults: bool,
}

/// The kinds of faults that a schedule injects.
#[derive(Clone, Copy)]
struct PagingFaults {
    crashes: bool,
    damage: bool,
    full: bool,
    kills: bool,
    slow: bool,
    restarts: bool,
    cuts: bool,
    expiry: bool,
    absence: bool,
}

impl PagingFaults {
    const NONE: Self = Self {
        crashes: false,
        damage: false,
        full: false,
        kills: false,
        slow: false,
        restarts: false,
        cuts: false,
        expiry: false,
        absence: false,
    };

    fn choose(rng: &mut Rng, focus: Focus, cluster: &SimCluster) -> Self {
        match focus {
            Focus::Replicas => {
                let crashes = rng.chance(1, 2);
                Self { crashes, cuts: !crashes, slow: rng.chance(1, 2), ..Self::NONE }
            }
            Focus::Absences => {
                Self { absence: true, restarts: rng.chance(1, 4), slow: rng.chance(1, 4), ..Self::NONE }
            }
            Focus::Writes => {
                let crashes = rng.chance(2, 3);
                Self { crashes, slow: !cluster.has_slow_sender(), ..Self::NONE }
            }
            Focus::Reuse => Self { restarts: rng.chance(1, 2), ..Self::NONE },
            Focus::Restarts => Self { restarts: true, ..Self::choose_any(rng, cluster) },
            Focus::None | Focus::Events => Self::choose_any(rng, cluster),
        }
    }

    fn choose_any(rng: &mut Rng, cluster: &SimCluster) -> Self {
        let mut faults_planned = Self {
            crashes: rng.chance(1, 5),
            damage: rng.chance(1, 8),
            full: rng.chance(1, 6),
            kills: rng.chance(1, 3),
            slow: rng.chance(1, 4),
            restarts: rng.chance(1, 2),
            ..Self::NONE
        };
        if cluster.replicas > 1 {
            // Single replicas may be lost or damaged, but not all of a page, so no lost page is
            // excused.
            faults_planned.damage = rng.chance(1, 3);
            faults_planned.crashes = !faults_planned.damage && rng.chance(2, 3);
            faults_planned.full = !faults_planned.damage && rng.chance(1, 2);
            faults_planned.slow |= rng.chance(1, 3);
        }
        faults_planned.cuts = !faults_planned.crashes && !faults_planned.damage && rng.chance(1, 3);
        faults_planned.expiry =
            !faults_planned.crashes && !faults_planned.damage && !faults_planned.cuts && rng.chance(1, 3);
        let has_faults = faults_planned.crashes
            || faults_planned.damage
            || faults_planned.cuts
            || faults_planned.expiry
            || faults_planned.full;
        faults_planned.absence = cluster.keeps_memory() && !has_faults;
        faults_planned
    }
}

/// Plays a schedule.
pub fn run(seed: u64) -> Result<PagingCounts, String> {
    let mut world = PagingWorld::new(seed);
    let buffers = 1 + world.rng.index(3);
    let faults_planned = PagingFaults::choose(&mut world.rng, world.focus, &world.cluster);
    world.agent_may_die = faults_planned.restarts;
    let rng = &mut world.rng;
    let threads = match () {
        () if world.moves_often => 2 + rng.index(2),
        // A program with one thread may move pages onto others.
        () if world.focus == Focus::Events => 1 + rng.index(2) * rng.index(3),
        () => 1 + rng.index(3),
    };
    let pages = 24
        + rng.index(match world.focus {
            Focus::Events => 60,
            Focus::Writes | Focus::Reuse => 30,
            _ => 170,
        });
    let has_many_faults = [Focus::Replicas, Focus::Absences, Focus::Writes].contains(&world.focus);
    let process = first_process(&mut world, pages, threads, buffers);
    world.processes.push(process);
    let mut schedule = PagingSchedule {
        has_many_faults,
        world: Rc::new(RefCell::new(world)),
        monitors: Vec::new(),
        buffers,
        faults_planned,
    };
    death::schedule(0);
    let played = schedule.play();
    death::schedule(0);
    played?;
    let counts = schedule.world.borrow().counts;
    Ok(counts)
}

/// The first process, whose threads own parts of its memory, with some pinned pages.
fn first_process(world: &mut PagingWorld, pages: usize, threads: usize, buffers: usize) -> SimProcess {
    let mut process = SimProcess::new(0, pages, threads, buffers);
    let rng = &mut world.rng;
    let mut at = 0;
    while at < pages {
        let end = (at + 1 + rng.index(60)).min(pages);
        if rng.chance(4, 5) {
            process.pages[at..end].fill(ModelPage::mapped_by(rng.index(threads), false));
        }
        at = end;
    }
    for _ in 0..rng.below(3) {
        let at = rng.index(pages);
        process.control.control().pin(number(at));
        process.pages[at].is_kept = true;
    }
    process
}

impl PagingSchedule {
    fn play(&mut self) -> Result<(), String> {
        self.adopt_first()?;
        for _ in 0..ROUNDS_MAX {
            self.step();
            self.check()?;
            let world = self.world.borrow();
            if world.operations == 0 || world.processes.iter().all(|process| !process.is_alive) {
                break;
            }
        }
        self.run_until_idle()?;
        self.empty()?;
        self.heal()?;
        self.damage_before_reading();
        self.check_all_pages()?;
        self.end_all()
    }

    /// With replicas: injects faults before the last reads.
    fn damage_before_reading(&mut self) {
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        if world.cluster.replicas > 1 && self.faults_planned.slow {
            world.counts.slow += u64::from(world.cluster.slow(&mut world.rng));
        }
        for _ in 0..if world.cluster.replicas > 1 && self.faults_planned.damage { 8 } else { 0 } {
            world.damage();
        }
    }

    /// Waits until a node that wants its memory back has it, if nothing prevents that. Then the
    /// node lends its memory again, or dies, if nothing of ours is on it.
    fn empty(&mut self) -> Result<(), String> {
        let must_become_empty = self.world.borrow().is_withdrawn();
        for _ in 0..if must_become_empty { ROUNDS_MAX } else { 0 } {
            let mut world = self.world.borrow_mut();
            world.counts.leaks_freed += world.cluster.scan_for_leaks();
            if world.is_emptied() {
                break;
            }
            world.run_sender();
            world.cluster.fabric.step();
        }
        let mut world = self.world.borrow_mut();
        if must_become_empty && !world.is_emptied() {
            return Err(format!("a node is not emptied: {:?}", world.sending.sender.stats()));
        }
        world.end_withdrawal();
        drop(world);
        self.run_until_idle()
    }

    /// With replicas: waits until all missing replicas are made, and then kills nodes again before
    /// everything is read.
    fn heal(&mut self) -> Result<(), String> {
        if !self.faults_planned.crashes || self.world.borrow().cluster.replicas == 1 {
            return Ok(());
        }
        for _ in 0..ROUNDS_MAX {
            let mut world = self.world.borrow_mut();
            if world.has_all_replicas() || !world.cluster.can_have_all_copies() {
                world.crash();
                return Ok(());
            }
            world.run_sender();
            world.cluster.fabric.step();
            world.cluster.await_disk();
        }
        let world = self.world.borrow();
        Err(format!(
            "missing replicas are not made, although there are nodes for them: {}",
            world.describe_missing_replicas()
        ))
    }

    fn adopt_first(&mut self) -> Result<(), String> {
        let (slabs, mempool, budget) = {
            let world = self.world.borrow();
            (Arc::clone(&world.slabs), Arc::clone(&world.mempool), Arc::clone(&world.budget))
        };
        let mut volume = Volume::new(slabs, mempool, budget).map_err(|error| error.to_string())?;
        volume.before_store(death::step);
        let journal = Journal::new().expect("memory");
        self.world.borrow_mut().keep(0, volume.table_memory(), &journal, None);
        self.add_monitor(0, volume, Areas::default(), journal);
        if self.world.borrow_mut().rng.chance(3, 4) {
            self.scan(0);
        }
        self.check()
    }

    fn add_monitor(&mut self, process: usize, volume: Volume, areas: Areas, journal: Journal) {
        let edge = SimEdge::new(&self.world, process, journal, Vec::new());
        let budget = Arc::clone(&self.world.borrow().budget);
        let stats = Arc::clone(&self.world.borrow().stats);
        let monitor = Monitor::new(edge, volume, budget, stats, areas, self.buffers);
        self.put_monitor(process, monitor);
    }

    pub fn put_monitor(&mut self, process: usize, monitor: Monitor<SimEdge>) {
        while self.monitors.len() <= process {
            self.monitors.push(None);
        }
        self.monitors[process] = Some(monitor);
        self.world.borrow_mut().processes[process].is_nudged = true;
    }

    fn check(&self) -> Result<(), String> {
        self.world.borrow_mut().failure.take().map_or(Ok(()), Err)
    }

    fn step(&mut self) {
        let what = self.world.borrow_mut().rng.below(64);
        let process = {
            let mut world = self.world.borrow_mut();
            let count = world.processes.len();
            world.rng.index(count)
        };
        match what {
            0..30 => self.turn(process),
            30..34 => self.scan(process),
            34 => self.inject_fault(process),
            40..44 if self.has_many_faults => self.inject_fault(process),
            35..37 if self.faults_planned.restarts => {
                let world = &mut *self.world.borrow_mut();
                let rng = &mut world.rng;
                let has_focus = [Focus::Restarts, Focus::Reuse].contains(&world.focus);
                if rng.chance(1, if has_focus { 1 } else { 3 }) {
                    let steps = 1 + u32::try_from(rng.below(4)).expect("small");
                    let is_at_move = has_focus && rng.chance(1, 3);
                    death::schedule_at(if is_at_move { StepKind::Move } else { StepKind::Event }, steps);
                    return;
                }
                let within = DEATH_STEPS[rng.index(DEATH_STEPS.len())];
                death::schedule(u32::try_from(rng.below(within)).expect("small"));
            }
            _ => self.world.borrow_mut().run_others(4),
        }
        self.fence_in_a_move();
        self.start_children();
    }

    /// At times, ends our lease at a node while a slab is moved off another one.
    fn fence_in_a_move(&mut self) {
        let mut world = self.world.borrow_mut();
        let is_moving = world.is_withdrawn() && world.sending.sender.is_healing();
        if is_moving && self.faults_planned.expiry && world.rng.chance(1, 16) {
            world.fence_one();
        }
    }

    fn start_children(&mut self) {
        let new_children = std::mem::take(&mut self.world.borrow_mut().new_children);
        for (child, volume, areas, journal) in new_children {
            self.add_monitor(child, volume, areas, journal);
        }
    }

    /// Runs the sampler on a process. The areas that it finds are adopted some time later.
    pub fn scan(&mut self, process: usize) {
        let mut world = self.world.borrow_mut();
        let target = &world.processes[process];
        if target.is_alive && target.is_started {
            let mut areas = target.areas();
            if !areas.is_empty() && world.rng.chance(1, 2) {
                let keep = 1 + world.rng.index(areas.len());
                world.rng.shuffle(&mut areas);
                areas.truncate(keep);
                areas.sort_unstable();
            }
            world.processes[process].scans.push(areas);
        }
    }

    fn inject_fault(&mut self, process: usize) {
        let faults_planned = self.faults_planned;
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        let is_slow_likely = world.focus == Focus::Writes && faults_planned.slow;
        match if is_slow_likely && world.rng.chance(1, 2) { 5 } else { world.rng.below(7) } {
            0..3 if faults_planned.absence => {
                world.counts.absences += u64::from(world.cluster.begin_absence(&mut world.rng))
            }
            6 if faults_planned.cuts => world.cut(),
            6 if faults_planned.expiry => world.fence_one(),
            0 if faults_planned.crashes && world.rng.chance(1, 2) => world.crash(),
            5 if faults_planned.slow => world.counts.slow += u64::from(world.cluster.slow(&mut world.rng)),
            1 if faults_planned.damage => world.damage(),
            2 if faults_planned.full && !world.cluster.is_full() => {
                world.cluster.fill_up(&mut world.rng);
                world.counts.full += 1;
            }
            3 => world.cluster.free_room(),
            4 if faults_planned.kills && world.rng.chance(1, 3) => world.kill(process),
            _ => {}
        }
    }

    /// Runs a turn of a monitor. If the agent dies, another agent takes over.
    fn turn(&mut self, process: usize) {
        let mut is_alive = death::survives(|| self.turn_alive(process));
        while !is_alive {
            is_alive = death::survives(|| self.restart());
        }
    }

    /// Runs a turn of a monitor, if it has work.
    fn turn_alive(&mut self, process: usize) {
        let Some(monitor) = self.monitors.get_mut(process).and_then(Option::as_mut) else {
            return;
        };
        let mut world = self.world.borrow_mut();
        let target = &mut world.processes[process];
        if !target.is_alive {
            drop(world);
            self.end(process);
            return;
        }
        if !target.has_work() {
            return;
        }
        target.is_nudged = false;
        let scans = std::mem::take(&mut target.scans);
        drop(world);
        for areas in scans {
            monitor.adopt(areas);
        }
        match monitor.turn() {
            TurnOutcome::Again => self.world.borrow_mut().processes[process].is_nudged = true,
            TurnOutcome::Sleep => {}
            TurnOutcome::Ended => self.end(process),
        }
    }

    /// Ends the monitor of a process that has exited, as the serving thread does.
    fn end(&mut self, process: usize) {
        let Some(mut monitor) = self.monitors[process].take() else {
            return;
        };
        monitor.end();
        self.world.borrow_mut().queue.abandon(process as u64);
        monitor.close();
    }

    /// Begins no new operations, and runs until nothing is in flight.
    fn run_until_idle(&mut self) -> Result<(), String> {
        {
            let mut world = self.world.borrow_mut();
            world.is_winding_down = true;
            world.cluster.free_room();
            world.cluster.disk.iter().for_each(DiskNode::repair);
            if !world.has_room_elsewhere() {
                // The sender would wait for memory for ever.
                world.end_withdrawal();
            }
        }
        for _ in 0..ROUNDS_MAX {
            let count = self.world.borrow().processes.len();
            for process in 0..count {
                self.turn(process);
                self.start_children();
            }
            self.world.borrow_mut().run_others(8);
            self.check()?;
            if self.is_idle() {
                return Ok(());
            }
        }
        Err(format!("the schedule does not become idle: {}", self.describe_stuck()))
    }

    fn is_idle(&self) -> bool {
        let world = self.world.borrow();
        let monitored = |process: &SimProcess| {
            self.monitors.get(process.id).is_some_and(Option::is_some) == process.is_alive
        };
        world.sending.sender.is_idle()
            && !world.sending.sender.is_healing()
            && world.queue.is_idle()
            && world.processes.iter().all(|process| {
                process.is_idle() && (!process.is_alive || !process.has_work()) && monitored(process)
            })
    }

    fn describe_stuck(&self) -> String {
        let world = self.world.borrow();
        let mut text = format!(
            "queue idle {}, sender idle {}, {:?}, blocks free {}, {:?}",
            world.queue.is_idle(),
            world.sending.sender.is_idle(),
            world.sending.sender.stats(),
            world.mempool.free_block_count(),
            world.budget,
        );
        for process in &world.processes {
            let state: Vec<&ThreadState> = process.threads.iter().map(|thread| &thread.state).collect();
            text += &format!(
                "; process {}: alive {}, started {}, changing {}, news {}, {state:?}",
                process.id,
                process.is_alive,
                process.is_started,
                process.changing,
                process.has_work()
            );
        }
        text
    }

    /// Reads and checks every page of every program.
    fn check_all_pages(&mut self) -> Result<(), String> {
        let count = self.world.borrow().processes.len();
        for process in 0..count {
            let pages = self.world.borrow().processes[process].pages.len();
            for at in 0..pages {
                {
                    let mut world = self.world.borrow_mut();
                    let target = &mut world.processes[process];
                    if !target.is_alive || !target.pages[at].is_mapped {
                        continue;
                    }
                    target.touch(0, at, None)?;
                    if target.is_idle() {
                        continue;
                    }
                }
                self.run_until_idle()?;
            }
        }
        Ok(())
    }

    fn end_all(&mut self) -> Result<(), String> {
        death::schedule(0);
        let count = self.monitors.len();
        for process in 0..count {
            self.world.borrow_mut().kill(process);
            self.end(process);
        }
        self.world.borrow_mut().sending.sender.stop_healing();
        self.run_until_idle()?;
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        world.sending.sender.close();
        world.count_sender_stats();
        world.check_cache();
        world.counts.cache_fills += world.stats.cache_hits.load(Relaxed);
        if let Some(failure) = world.failure.take() {
            return Err(failure);
        }
        let pages = world.slabs.pages();
        let held = world.budget.held();
        let mempool_bytes = world.budget.mempool_bytes();
        let blocks = world.mempool.blocks() - world.mempool.free_block_count();
        world.counts.leaks_freed += world.cluster.scan_all_for_leaks();
        let taken = world.cluster.used_bytes();
        if (pages, held, mempool_bytes, blocks, taken) != (0, 0, 0, 0, 0) {
            return Err(format!(
                "not freed: {pages} remote pages, {held} held pages, {mempool_bytes} bytes of the share, \
                 {blocks} blocks, {taken} bytes of the pool"
            ));
        }
        Ok(())
    }
}
