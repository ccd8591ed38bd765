//! Tasks of the node itself: clearing used spans, and lending less or more memory.

use aquifer_fabric::Host;
use aquifer_pool::NodeMemory;
use aquifer_pool::op::{Grant, OpError};
use aquifer_pool::word::AlignedRun;

use super::Schedule;
use crate::pool::client::{OpOutcome, SimClient};
use crate::pool::model::ensure;

/// The node as one of its own hosts.
pub(super) struct NodeHost {
    pub client: SimClient,
    task: NodeTask,
    /// Offline sections of the node.
    offline: Vec<Grant>,
}

/// The task that the node runs.
#[derive(Clone, Copy)]
enum NodeTask {
    Nothing,
    Clearing,
    GoingOffline,
    Lending,
}

impl NodeHost {
    pub fn new(client: SimClient, node_memory: &NodeMemory) -> Self {
        let sections = (0..node_memory.layout.sections()).filter(|section| node_memory.is_offline(*section));
        let grant = |section| {
            let extent = node_memory.section_extent(section);
            let chunk = node_memory.layout.chunk_of(extent.addr - node_memory.region.base).unwrap();
            Grant { chunk, class: extent.class, key: extent.key }
        };
        Self { client, task: NodeTask::Nothing, offline: sections.map(grant).collect() }
    }
}

impl Schedule {
    /// Begins, now and then, to clear a group, or to lend a section less or more.
    pub(super) fn begin_node_task(&mut self) -> Result<(), String> {
        if !self.node_host.client.is_idle() || !self.rng.chance(1, 20) {
            return Ok(());
        }
        let section = u32::try_from(self.rng.below(self.node_memory.layout.sections().into())).unwrap();
        let is_offline = self.node_memory.is_offline(section);
        let ended = if !is_offline && self.node_memory.is_section_free(section) && self.rng.chance(1, 3) {
            self.node_host.task = NodeTask::GoingOffline;
            self.node_host.client.allocate_group(section, AlignedRun::SECTION)
        } else if is_offline && self.rng.chance(1, 3) {
            self.lend(section)
        } else if let Some(group) = self.node_memory.find_uncleared(section) {
            self.node_host.task = NodeTask::Clearing;
            self.node_host.client.allocate_group(section, group)
        } else {
            None
        };
        ended.map_or(Ok(()), |ended| self.node_task_ended(ended))
    }

    fn lend(&mut self, section: u32) -> Option<OpOutcome> {
        let place = self.node_host.offline.iter().position(|grant| grant.chunk / 512 == section);
        let grant = self.node_host.offline.swap_remove(place.expect("the section is offline"));
        self.node_host.task = NodeTask::Lending;
        self.node_host.client.free(&[grant])
    }

    pub(super) fn node_task_ended(&mut self, ended: OpOutcome) -> Result<(), String> {
        match (ended, self.node_host.task) {
            (OpOutcome::Alloc(Ok(grant)), task) => {
                let chunks = grant.chunk..grant.chunk + grant.class.chunks();
                // The simulator has no data to be cleared.
                self.node_memory.clear_entries(grant.chunk, grant.class);
                chunks.for_each(|chunk| self.model.used_by[chunk as usize] = None);
                if matches!(task, NodeTask::GoingOffline) {
                    self.counts.went_offline += 1;
                    self.node_host.offline.push(grant);
                    return Ok(());
                }
                self.counts.cleared += 1;
                let ended = self.node_host.client.free(&[grant]);
                ended.map_or(Ok(()), |ended| self.node_task_ended(ended))
            }
            (OpOutcome::Free(Ok(outcomes)), task) if outcomes[0].is_ok() => {
                self.counts.lent += u64::from(matches!(task, NodeTask::Lending));
                self.node_host.task = NodeTask::Nothing;
                Ok(())
            }
            (OpOutcome::Alloc(Err(OpError::Full)), _) => Ok(()),
            (other, _) => Err(format!("the node: {other:?}")),
        }
    }

    /// Lends all sections, while no other operation is in progress.
    pub(super) fn lend_all(&mut self) -> Result<(), String> {
        for section in 0..self.node_memory.layout.sections() {
            if self.node_memory.is_offline(section) {
                let ended = self.lend(section);
                self.run_node_task(ended)?;
            }
        }
        Ok(())
    }

    /// Clears all free memory, while no other operation is in progress.
    pub(super) fn clear_all(&mut self) -> Result<(), String> {
        for section in 0..self.node_memory.layout.sections() {
            while let Some(group) = self.node_memory.find_uncleared(section) {
                self.node_host.task = NodeTask::Clearing;
                let ended = self.node_host.client.allocate_group(section, group);
                self.run_node_task(ended)?;
            }
        }
        Ok(())
    }

    fn run_node_task(&mut self, mut ended: Option<OpOutcome>) -> Result<(), String> {
        loop {
            if let Some(ended) = ended.take() {
                self.node_task_ended(ended)?;
            }
            let in_flight: Vec<_> =
                self.node_host.client.posted.clone().map(|action| (Host::NODE, action)).into_iter().collect();
            if in_flight.is_empty() {
                return Ok(());
            }
            ensure!(self.fabric.step(), "the node waits, and nothing is in flight");
            self.model.observe(&self.node_memory, &in_flight)?;
            ended = self.node_host.client.poll();
        }
    }
}
