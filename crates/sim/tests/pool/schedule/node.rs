//! The node itself: clears what has been used, and lends now more, now less.

use aquifer_fabric::Host;
use aquifer_pool::NodeMemory;
use aquifer_pool::op::{Grant, OpError};
use aquifer_pool::word::Run;

use super::Schedule;
use crate::pool::client::{Client, Ended};
use crate::pool::shadow::ensure;

/// The node as one of its own hosts.
pub(super) struct Own {
    pub client: Client,
    doing: Doing,
    /// What it does not lend.
    withheld: Vec<Grant>,
}

#[derive(Clone, Copy)]
enum Doing {
    Nothing,
    Clearing,
    Withdrawing,
    Lending,
}

impl Own {
    pub fn new(client: Client, node_memory: &NodeMemory) -> Self {
        let sections = (0..node_memory.layout.sections()).filter(|section| node_memory.is_offline(*section));
        let grant = |section| {
            let extent = node_memory.section_extent(section);
            let chunk = node_memory.layout.chunk_of(extent.addr - node_memory.region.base).unwrap();
            Grant { chunk, class: extent.class, key: extent.key }
        };
        Self { client, doing: Doing::Nothing, withheld: sections.map(grant).collect() }
    }
}

impl Schedule {
    /// The node clears a group, or lends a section less or more, now and then.
    pub(super) fn node_begins(&mut self) -> Result<(), String> {
        if !self.own.client.is_idle() || !self.rng.chance(1, 20) {
            return Ok(());
        }
        let section = u32::try_from(self.rng.below(self.node_memory.layout.sections().into())).unwrap();
        let is_offline = self.node_memory.is_offline(section);
        let ended = if !is_offline && self.node_memory.is_section_free(section) && self.rng.chance(1, 3) {
            self.own.doing = Doing::Withdrawing;
            self.own.client.take_group(section, Run::SECTION)
        } else if is_offline && self.rng.chance(1, 3) {
            self.lend(section)
        } else if let Some(group) = self.node_memory.find_uncleared(section) {
            self.own.doing = Doing::Clearing;
            self.own.client.take_group(section, group)
        } else {
            None
        };
        ended.map_or(Ok(()), |ended| self.node_went_on(ended))
    }

    fn lend(&mut self, section: u32) -> Option<Ended> {
        let place = self.own.withheld.iter().position(|grant| grant.chunk / 512 == section);
        let grant = self.own.withheld.swap_remove(place.expect("it is withheld"));
        self.own.doing = Doing::Lending;
        self.own.client.free(&[grant])
    }

    pub(super) fn node_went_on(&mut self, ended: Ended) -> Result<(), String> {
        match (ended, self.own.doing) {
            (Ended::Alloc(Ok(grant)), doing) => {
                let chunks = grant.chunk..grant.chunk + grant.class.chunks();
                // There is no data here to be cleared.
                self.node_memory.clear_entries(grant.chunk, grant.class);
                chunks.for_each(|chunk| self.shadow.used_by[chunk as usize] = None);
                if matches!(doing, Doing::Withdrawing) {
                    self.seen.withdrawn += 1;
                    self.own.withheld.push(grant);
                    return Ok(());
                }
                self.seen.cleared += 1;
                let ended = self.own.client.free(&[grant]);
                ended.map_or(Ok(()), |ended| self.node_went_on(ended))
            }
            (Ended::Free(Ok(outcomes)), doing) if outcomes[0].is_ok() => {
                self.seen.lent += u64::from(matches!(doing, Doing::Lending));
                self.own.doing = Doing::Nothing;
                Ok(())
            }
            (Ended::Alloc(Err(OpError::Full)), _) => Ok(()),
            (other, _) => Err(format!("the node: {other:?}")),
        }
    }

    /// The node lends everything, with nothing else going on.
    pub(super) fn lend_all(&mut self) -> Result<(), String> {
        for section in 0..self.node_memory.layout.sections() {
            if self.node_memory.is_offline(section) {
                let ended = self.lend(section);
                self.node_goes_on(ended)?;
            }
        }
        Ok(())
    }

    /// The node clears all that is free, with nothing else going on.
    pub(super) fn clear_all(&mut self) -> Result<(), String> {
        for section in 0..self.node_memory.layout.sections() {
            while let Some(group) = self.node_memory.find_uncleared(section) {
                self.own.doing = Doing::Clearing;
                let ended = self.own.client.take_group(section, group);
                self.node_goes_on(ended)?;
            }
        }
        Ok(())
    }

    fn node_goes_on(&mut self, mut ended: Option<Ended>) -> Result<(), String> {
        loop {
            if let Some(ended) = ended.take() {
                self.node_went_on(ended)?;
            }
            let under_way: Vec<_> =
                self.own.client.posted.clone().map(|action| (Host::NODE, action)).into_iter().collect();
            if under_way.is_empty() {
                return Ok(());
            }
            ensure!(self.fabric.step(), "the node waits for nothing");
            self.shadow.observe(&self.node_memory, &under_way)?;
            ended = self.own.client.poll();
        }
    }
}
