//! Restarts the agent: another agent takes over, as `serve/restore` in `crates/faults` does.

use std::collections::HashSet;
use std::sync::Arc;

use aquifer_faults::{Area, FaultStats, Monitor, ResumeState};
use aquifer_pager::{Mutation, Volume, finish_move};

use super::death;
use super::edge::SimEdge;
use super::focus::Focus;
use super::process::KernelEvent;
use super::schedule::PagingSchedule;
use super::world::reopen;

impl PagingSchedule {
    /// Takes over the state of the dead agent. This agent may die during that, too.
    pub fn restart(&mut self) {
        trace!("the agent has died");
        self.monitors.iter_mut().for_each(|monitor| *monitor = None);
        self.world.borrow_mut().restart();
        let count = self.world.borrow().processes.len();
        let mut used = HashSet::new();
        let mut found = Vec::new();
        for process in 0..count {
            if let Some(before) = self.recover(process) {
                used.extend(before.recovered.volume.blocks_in_use());
                found.push((process, before));
            }
        }
        self.world.borrow_mut().finish_restart(&used);
        if !Mutation::ReserveNothing.is_active() {
            found.iter_mut().for_each(|(_, before)| reserve_blocks(before));
        }
        for (process, before) in found {
            let edge = SimEdge::new(&self.world, process);
            let budget = Arc::clone(&self.world.borrow().budget);
            let monitor = Monitor::resume(edge, before, budget, Arc::new(FaultStats::default()));
            self.put_monitor(process, monitor);
            self.scan_early(process);
        }
    }

    /// With [`Focus::Reuse`]: before the first turn of the new agent's monitor, the program uses
    /// the place from which it has moved pages, and the sampler scans the process.
    fn scan_early(&mut self, process: usize) {
        let mut world = self.world.borrow_mut();
        if world.focus != Focus::Reuse || world.is_winding_down {
            return;
        }
        let moved = world.processes[process].journal.again.iter().find_map(|event| match event {
            KernelEvent::Remap { from, pages, .. } => Some((*from, *pages)),
            _ => None,
        });
        if let Some((from, pages)) = moved {
            world.use_range(process, from, from + usize::try_from(pages).expect("few"));
        }
        drop(world);
        self.scan(process);
    }

    fn recover(&self, process: usize) -> Option<ResumeState> {
        let mut world = self.world.borrow_mut();
        let world = &mut *world;
        let kept: Vec<bool> = world.kept.iter().map(Option::is_some).collect();
        let is_served = |child: usize| kept.get(child) == Some(&true);
        let target = &mut world.processes[process];
        let moving = target.agent_died(is_served);
        if !target.is_alive {
            // A child whose fork was not served would read zeros, so it is killed.
            let unserved = target.unserved_children();
            unserved.into_iter().for_each(|child| world.kill(child));
            return None;
        }
        let table = world.kept.get(process)?.as_ref()?;
        if let Some((from, to, pages)) = moving {
            finish_move(reopen(table), from, to, pages).expect("a page table");
            let journal = &mut target.journal;
            journal.again.pop_front();
            journal.pending_unmaps.push(Area { start: from, end: from + pages });
            journal.removed.remove(Area { start: to, end: to + pages });
        }
        let (slabs, mempool) = (Arc::clone(&world.slabs), Arc::clone(&world.mempool));
        let recovered = Volume::recover(reopen(table), slabs, mempool, Arc::clone(&world.budget));
        let mut recovered = recovered.expect("a page table");
        recovered.volume.before_store(death::step);
        let target = &mut world.processes[process];
        // Faults that the dead agent had read are raised again only if their threads are woken.
        target.wake(0, target.pages.len());
        let mut batches = target.batches.clone();
        if Mutation::ForgetLeaving.is_active() {
            batches.iter_mut().for_each(Vec::clear);
        }
        trace!(
            "{process} has batches {batches:?}, leaving {:?}, staged {:?}",
            recovered.leaving, recovered.staged
        );
        Some(ResumeState {
            recovered,
            registered: target.registered(),
            pending_unmaps: target.journal.pending_unmaps.clone(),
            removed: target.journal.removed.clone(),
            batches,
        })
    }
}

fn reserve_blocks(ResumeState { recovered, batches, .. }: &mut ResumeState) {
    let leaving = &recovered.leaving;
    let unemptied = batches.iter().filter(|batch| batch.iter().any(|(page, _)| leaving.contains(page)));
    recovered.volume.reserve_blocks(unemptied.count());
}
