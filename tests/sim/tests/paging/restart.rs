//! Restarts the agent: another agent takes over, as `serve/restore` in `crates/paging/faults` does.

use std::collections::HashSet;
use std::sync::Arc;

use aquifer_faults::takeover::{self, KeptProgram, Origin, TakenProgram};
use aquifer_faults::{Area, Monitor, MoveOutcome, UffdMessage};
use aquifer_pager::PageNumber;

use super::death;
use super::edge::SimEdge;
use super::focus::Focus;
use super::memory::index;
use super::schedule::PagingSchedule;
use super::worker;
use super::world::reopen;

impl PagingSchedule {
    /// Takes over the state of the dead agent. This agent may die during that, too.
    pub fn restart(&mut self) {
        trace!("the agent has died");
        self.monitors.iter_mut().for_each(|monitor| *monitor = None);
        self.world.borrow_mut().restart();
        let served: HashSet<Origin> =
            self.world.borrow().kept.iter().flatten().filter_map(|kept| kept.origin).collect();
        let count = self.world.borrow().processes.len();
        let mut taken = Vec::new();
        for process in 0..count {
            taken.extend(self.recover(process, &served).map(|program| (process, program)));
        }
        let used: HashSet<_> =
            taken.iter().flat_map(|(_, program)| program.pages.volume().blocks_in_use()).collect();
        let mempool = Arc::clone(&self.world.borrow().mempool);
        let begun = taken.iter_mut().map(|(process, program)| {
            let port = self.world.borrow().processes[*process].agent_port();
            (&mut program.pages, port.unfinished_batches())
        });
        takeover::finish(&mempool, &used, begun);
        self.world.borrow_mut().finish_restart();
        // The programs resume in threads of their own.
        self.world.borrow_mut().rng.shuffle(&mut taken);
        for (process, program) in taken {
            self.resume(process, program);
        }
    }

    /// Recovers a process; `None` if it has ended.
    fn recover(&self, process: usize, served: &HashSet<Origin>) -> Option<TakenProgram<usize>> {
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        world.processes[process].agent_died();
        let kept = world.kept.get(process)?.as_ref()?;
        let mut program = KeptProgram::open(process as u64, reopen(&kept.table), reopen(&kept.journal))
            .expect("it is a journal");
        program.before_store(death::step);
        if !world.processes[process].is_alive {
            // Such a child would read zeros, so the run is ended. Here only the child is.
            let has_unserved_fork = program.has_unserved_fork(served);
            for child in world.unserved_children(process) {
                assert!(has_unserved_fork, "child {child} is forgotten");
                world.kill(child);
            }
            return None;
        }
        let find_child = |reader: u32, fd| {
            assert_eq!(reader, std::process::id());
            usize::try_from(fd).ok()
        };
        let memory = (Arc::clone(&world.slabs), Arc::clone(&world.mempool), Arc::clone(&world.budget));
        Some(program.recover(served, find_child, memory).expect("it can be served on"))
    }

    /// Starts the monitor of a process.
    fn resume(&mut self, process: usize, program: TakenProgram<usize>) {
        let TakenProgram { journal, unapplied, pages } = program;
        let early = self.used_early(&unapplied);
        let Some(batches) = self.batches(process) else {
            pages.close();
            return;
        };
        let registered = self.world.borrow().processes[process].registered();
        let has_moved = batches.iter().flatten().any(|(_, outcome)| *outcome == MoveOutcome::Moved);
        let before = pages.into_resume_state(registered, batches);
        trace!(
            "{process} resumes with {unapplied:?}, pending unmaps {:?}, registered {:?}, leaving {:?}",
            before.pending_unmaps, before.registered, before.recovered.leaving
        );
        let edge = SimEdge::new(&self.world, process, journal, unapplied);
        let (budget, stats) = {
            let world = self.world.borrow();
            (Arc::clone(&world.budget), Arc::clone(&world.stats))
        };
        let monitor = Monitor::resume(edge, before, budget, stats);
        self.put_monitor(process, monitor);
        let mut world = self.world.borrow_mut();
        if has_moved && world.agent_may_die && world.rng.chance(1, 2) {
            // While the staging buffers of the dead agent are in use.
            let steps = 1 + u32::try_from(world.rng.below(150)).expect("small");
            death::schedule(steps);
        }
        // Faults that the dead agent had read are raised again only if their threads are woken.
        let count = world.processes[process].pages.len();
        world.processes[process].wake(0, count);
        if let Some(area) = early {
            world.use_range(process, index(area.start), index(area.end));
            drop(world);
            self.scan(process);
        }
    }

    /// Returns the state of each staging buffer, after the worker has completed its command.
    fn batches(&self, process: usize) -> Option<Vec<Vec<(PageNumber, MoveOutcome)>>> {
        worker::run(&self.world, process).ok()?;
        let port = self.world.borrow().processes[process].agent_port();
        let mut batches = port.batches(|| false)?;
        batches.truncate(self.buffers);
        Some(batches)
    }

    /// Returns the place from which the program has moved pages, with [`Focus::Reuse`]. The program
    /// uses this place before the first turn of the new agent's monitor, and the sampler scans the
    /// process.
    fn used_early(&self, unapplied: &[UffdMessage<usize>]) -> Option<Area> {
        let world = self.world.borrow();
        if world.focus != Focus::Reuse || world.is_winding_down {
            return None;
        }
        unapplied.iter().find_map(|message| match message {
            UffdMessage::Remap { from, pages, .. } => Some(Area { start: *from, end: from + pages }),
            _ => None,
        })
    }
}
