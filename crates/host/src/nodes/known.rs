//! What a host knows of the memory nodes, by what the directory said last. Pure: time is an argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aquifer_directory::names::{NodeLife, NodeRecord};
use aquifer_fabric::FabricAddress;
use aquifer_pool::NodeId;

/// A node that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub reach: FabricAddress,
    /// Tells its memory from that of another life of the node.
    pub epoch: u64,
    /// For so long its memory outlives it.
    pub kept: Duration,
}

impl Place {
    fn of(record: &NodeRecord) -> Option<Self> {
        match FabricAddress::parse(&record.fabric, &record.address) {
            Ok(reach) => {
                Some(Self { reach, epoch: record.epoch, kept: Duration::from_millis(record.kept_ms) })
            }
            Err(reason) => {
                tracing::warn!(node = record.id, reason, "a memory node cannot be used");
                None
            }
        }
    }
}

/// What is known of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// It is there.
    Here(Place),
    /// It may come back with its memory.
    Away,
    /// Nothing, or it is gone for good.
    Unknown,
}

#[derive(Debug, Default)]
pub(super) struct Known {
    here: BTreeMap<NodeId, Place>,
    /// Until when they are waited for.
    away: BTreeMap<NodeId, Instant>,
    /// The revision of the last listing that was taken in: an older change that a watch brings late is not heeded.
    listed_at: u64,
    /// The revision of the last change that was heeded: an older listing that comes late is not taken in.
    heard_at: u64,
}

impl Known {
    /// These are all nodes that there are, as of a revision.
    pub fn list(&mut self, records: &[NodeRecord], revision: u64, now: Instant) {
        if self.listed_at.max(self.heard_at) > revision {
            return;
        }
        self.listed_at = revision;
        let missing: Vec<NodeId> = self
            .here
            .keys()
            .copied()
            .filter(|node| records.iter().all(|record| record.id != node.0))
            .collect();
        missing.into_iter().for_each(|node| self.lose(node, now));
        records.iter().for_each(|record| self.meet(record));
    }

    /// A change of one node, as of a revision: it is there, has moved, or is gone. Nothing changes if that is known better.
    pub fn change(&mut self, node: NodeId, record: Option<&NodeRecord>, revision: u64, now: Instant) {
        if revision <= self.listed_at {
            return;
        }
        self.heard_at = self.heard_at.max(revision);
        match record {
            Some(record) => self.meet(record),
            None => self.lose(node, now),
        }
    }

    /// Memory that there was before anybody here looked: who of its nodes is not there may come back.
    pub fn remember(&mut self, lives: &[NodeLife], now: Instant) {
        for life in lives.iter().filter(|life| life.kept_ms > 0) {
            let node = NodeId(life.node);
            if !self.here.contains_key(&node) {
                self.away.insert(node, now + Duration::from_millis(life.kept_ms));
            }
        }
    }

    fn meet(&mut self, record: &NodeRecord) {
        let node = NodeId(record.id);
        self.away.remove(&node);
        if let Some(place) = Place::of(record) {
            self.here.insert(node, place);
        }
    }

    fn lose(&mut self, node: NodeId, now: Instant) {
        let kept = self.here.remove(&node).map_or(Duration::ZERO, |place| place.kept);
        if !kept.is_zero() {
            self.away.insert(node, now + kept);
        }
    }

    pub fn standing(&self, node: NodeId, now: Instant) -> Standing {
        if let Some(place) = self.here.get(&node) {
            return Standing::Here(place.clone());
        }
        let is_awaited = self.away.get(&node).is_some_and(|until| now < *until);
        if is_awaited { Standing::Away } else { Standing::Unknown }
    }

    /// Those that are there.
    pub fn here(&self) -> impl ExactSizeIterator<Item = NodeId> {
        self.here.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u16, epoch: u64, kept_ms: u64) -> NodeRecord {
        NodeRecord {
            id,
            fabric: "shm".into(),
            address: format!("/node-{id}"),
            memory_bytes: 1 << 20,
            memory_bytes_max: 1 << 20,
            requested_memory_bytes: 1 << 20,
            resize_blocker: None,
            kept_ms,
            epoch,
        }
    }

    #[test]
    fn a_node_whose_memory_is_kept_is_waited_for() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut known = Known::default();
        known.list(&[record(1, 7, 500), record(2, 8, 0)], 10, start);
        known.change(NodeId(1), None, 11, at(100));
        known.change(NodeId(2), None, 12, at(100));
        assert_eq!(known.standing(NodeId(1), at(599)), Standing::Away);
        assert_eq!(known.standing(NodeId(1), at(600)), Standing::Unknown);
        assert_eq!(known.standing(NodeId(2), at(100)), Standing::Unknown);
        known.change(NodeId(1), Some(&record(1, 7, 500)), 13, at(200));
        assert!(matches!(known.standing(NodeId(1), at(900)), Standing::Here(Place { epoch: 7, .. })));
        // A listing in which it is missing says the same as its deletion.
        known.list(&[], 14, at(1000));
        assert_eq!(known.standing(NodeId(1), at(1400)), Standing::Away);
    }

    #[test]
    fn what_there_was_before_is_waited_for_if_it_is_kept() {
        let start = Instant::now();
        let life = |node, kept_ms| NodeLife { node, epoch: 1, kept_ms };
        let mut known = Known::default();
        known.list(&[record(1, 1, 500)], 10, start);
        known.remember(&[life(1, 500), life(2, 500), life(3, 0)], start);
        assert_eq!(known.standing(NodeId(2), start), Standing::Away);
        assert_eq!(known.standing(NodeId(3), start), Standing::Unknown);
        assert!(matches!(known.standing(NodeId(1), start), Standing::Here(_)));
        assert_eq!(known.here().len(), 1);
    }
}
