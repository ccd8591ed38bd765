//! A host's view of the memory nodes, from the directory's listings and events.
//!
//! Pure: time is an argument.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::{Duration, Instant};

use aquifer_directory::FailureLog;
use aquifer_directory::names::{LifeRecord, NodeLife, NodeRecord};
use aquifer_fabric::{FabricAddress, FabricAddressError};
use aquifer_pool::{NodeClass, NodeId};

use super::away::{AwayNode, FailedAttempts};

/// The address and the life of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PresentNode {
    pub address: FabricAddress,
    /// The class; memory if it is not known.
    pub class: NodeClass,
    /// The epoch of the life of the node's memory.
    pub epoch: u64,
    /// The time for which the node's memory outlives its process; zero if it does not.
    pub grace: Duration,
}

impl PresentNode {
    /// Parses a record.
    ///
    /// # Errors
    /// The reason why the address cannot be used.
    fn from_record(record: &NodeRecord) -> Result<Self, FabricAddressError> {
        let address = FabricAddress::parse(&record.fabric, &record.address)?;
        let class = if record.is_disk { NodeClass::Disk } else { NodeClass::Memory };
        Ok(Self { address, class, epoch: record.epoch, grace: Duration::from_millis(record.kept_ms) })
    }

    /// Parses the record of a life; `None` if an earlier version has written the record.
    fn from_life(record: &LifeRecord) -> Option<Self> {
        let NodeLife { epoch, kept_ms, .. } = record.life;
        let address = FabricAddress::parse(&record.fabric, &record.address).ok()?;
        let class = NodeClass::Memory;
        Some(Self { address, class, epoch, grace: Duration::from_millis(kept_ms) })
    }
}

/// The state of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum NodeState {
    /// The directory has the node.
    Present(PresentNode),
    /// The node's lease has ended, and its memory ends with its process. Only a failed connection
    /// shows that the process has ended, and that its pages are lost. The node gets no new pages.
    Suspect(PresentNode),
    /// The node's lease has ended, and its memory outlives its process: the node may serve, or
    /// return. It gets no new pages. Contains the address if the next attempt to connect is due.
    Away(Option<PresentNode>),
    /// The node was never seen, or its memory is lost.
    Unknown,
}

/// The memory nodes, as of the latest listing and the events since.
#[derive(Debug, Default)]
pub(super) struct NodeView {
    present: BTreeMap<NodeId, PresentNode>,
    /// Nodes whose lease has ended and whose memory is not kept, with their last record.
    suspects: BTreeMap<NodeId, PresentNode>,
    /// Nodes whose lease has ended and whose memory is kept.
    away: BTreeMap<NodeId, AwayNode>,
    /// Failed attempts to connect, of nodes in all states.
    failed: BTreeMap<NodeId, FailedAttempts>,
    /// Nodes that have left the directory and not returned, with the time when they left.
    missing: BTreeMap<NodeId, Instant>,
    /// Revision of the latest applied listing. Older events are ignored.
    listing_revision: u64,
    /// Revision of the latest applied event. Older listings are ignored.
    event_revision: u64,
    /// Limits the log lines about invalid records, which each repeated listing contains again.
    invalid_records: FailureLog,
}

impl NodeView {
    /// Replaces all nodes by those of a listing that began at `begun`, unless a newer listing or
    /// event was applied.
    pub fn apply_listing(&mut self, records: &[NodeRecord], revision: u64, begun: Instant, now: Instant) {
        if self.listing_revision.max(self.event_revision) > revision {
            return;
        }
        self.listing_revision = revision;
        let missing: Vec<NodeId> = self
            .present
            .keys()
            .copied()
            .filter(|node| records.iter().all(|record| record.id != node.0))
            .collect();
        missing.into_iter().for_each(|node| self.remove(node, now));
        records.iter().for_each(|record| self.insert(record, now));
        self.away.values_mut().for_each(|away| away.note_absence(begun));
    }

    /// Applies a change of one node, unless a newer listing was applied. `record` is `None` if the
    /// node's record was deleted.
    pub fn apply_event(&mut self, node: NodeId, record: Option<&NodeRecord>, revision: u64, now: Instant) {
        if revision <= self.listing_revision {
            return;
        }
        self.event_revision = self.event_revision.max(revision);
        match record {
            Some(record) => self.insert(record, now),
            None => self.remove(node, now),
        }
    }

    /// Adds nodes that have no record now, and that may run nevertheless or return with their
    /// memory.
    pub fn add_lives(&mut self, lives: &[LifeRecord], now: Instant) {
        for record in lives {
            let node = NodeId(record.life.node);
            let is_known = self.present.contains_key(&node) || self.suspects.contains_key(&node);
            let last = PresentNode::from_life(record);
            if is_known {
                continue;
            }
            if record.life.kept_ms > 0 {
                let grace = Duration::from_millis(record.life.kept_ms);
                self.away.entry(node).or_insert_with(|| AwayNode::unseen(last, grace, now));
            } else if let Some(last) = last {
                self.suspects.insert(node, last);
            }
        }
    }

    /// Logs that the record at a key of the directory cannot be parsed.
    pub fn log_unreadable_record(&mut self, key: &str, error: &dyn Display, now: Instant) {
        if let Some(failures) = self.invalid_records.record(now) {
            tracing::warn!(key, %error, failures, "ignored memory node: unreadable record in the directory");
        }
    }

    fn insert(&mut self, record: &NodeRecord, now: Instant) {
        let node = NodeId(record.id);
        self.missing.remove(&node);
        self.away.remove(&node);
        self.suspects.remove(&node);
        self.failed.remove(&node);
        match PresentNode::from_record(record) {
            Ok(present) => {
                self.present.insert(node, present);
            }
            Err(reason) => {
                if let Some(failures) = self.invalid_records.record(now) {
                    tracing::warn!(
                        node = record.id,
                        fabric = record.fabric,
                        address = record.address,
                        %reason,
                        failures,
                        "ignored memory node: unusable address in the directory"
                    );
                }
            }
        }
    }

    fn remove(&mut self, node: NodeId, now: Instant) {
        let last = self.present.remove(&node);
        if last.is_some() {
            self.missing.insert(node, now);
        }
        match last {
            Some(present) if present.grace.is_zero() => drop(self.suspects.insert(node, present)),
            Some(present) => drop(self.away.insert(node, AwayNode::left(present, now))),
            None => {}
        }
    }

    /// The state of a node.
    pub fn state(&self, node: NodeId, now: Instant) -> NodeState {
        if let Some(present) = self.present.get(&node) {
            return NodeState::Present(present.clone());
        }
        if let Some(suspect) = self.suspects.get(&node) {
            return NodeState::Suspect(suspect.clone());
        }
        let failed = self.failed.get(&node).copied();
        match self.away.get(&node) {
            Some(away) if !away.is_lost(failed, now) => {
                NodeState::Away(away.due_attempt(failed, now).cloned())
            }
            Some(_) | None => NodeState::Unknown,
        }
    }

    /// Whether only a listing of the directory can show that a node that is away is lost, or has
    /// returned.
    pub fn wants_listing(&self, node: NodeId, now: Instant) -> bool {
        self.away.get(&node).is_some_and(|away| away.wants_listing(self.failed.get(&node).copied(), now))
    }

    /// Records that an attempt to connect to a node, begun at `begun`, has found no target.
    pub fn note_failed_attempt(&mut self, node: NodeId, begun: Instant) {
        self.failed.entry(node).or_insert_with(|| FailedAttempts::new(begun)).add(begun);
    }

    /// Records that a node has accepted a connection.
    pub fn note_connection(&mut self, node: NodeId) {
        self.failed.remove(&node);
    }

    /// The nodes that have left the directory since this view exists, with the time when they left.
    pub fn missing(&self) -> impl Iterator<Item = (NodeId, Instant)> {
        self.missing.iter().map(|(node, since)| (*node, *since))
    }

    /// The nodes in the directory.
    pub fn present(&self) -> impl ExactSizeIterator<Item = NodeId> {
        self.present.keys().copied()
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
            recalled_bytes: 0,
            recalled_from: Vec::new(),
            kept_ms,
            epoch,
            is_disk: false,
        }
    }

    #[test]
    fn a_deleted_node_is_away_if_its_memory_is_kept() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut view = NodeView::default();
        view.apply_listing(&[record(1, 7, 500), record(2, 8, 0)], 10, start, start);
        view.apply_event(NodeId(1), None, 11, at(100));
        view.apply_event(NodeId(2), None, 12, at(100));
        let is_away = |view: &NodeView, ms| {
            matches!(view.state(NodeId(1), at(ms)), NodeState::Away(Some(PresentNode { epoch: 7, .. })))
        };
        assert!(is_away(&view, 599));
        assert!(matches!(view.state(NodeId(2), at(100)), NodeState::Suspect(PresentNode { epoch: 8, .. })));
        assert!(view.present().all(|node| node != NodeId(2)), "it gets no new pages");
        assert!(view.missing().eq([(NodeId(1), at(100)), (NodeId(2), at(100))]));
        view.apply_event(NodeId(1), Some(&record(1, 7, 500)), 13, at(200));
        assert!(matches!(view.state(NodeId(1), at(900)), NodeState::Present(PresentNode { epoch: 7, .. })));
        assert!(view.missing().eq([(NodeId(2), at(100))]), "the other one has returned");
        // A listing without the node has the effect of a deletion.
        view.apply_listing(&[], 14, at(1000), at(1000));
        assert!(is_away(&view, 1400));
    }

    #[test]
    fn kept_memory_is_lost_only_when_directory_and_node_say_so_after_the_grace_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut view = NodeView::default();
        let state = |view: &NodeView, ms| view.state(NodeId(1), at(ms));
        view.apply_listing(&[record(1, 7, 500)], 10, start, start);
        view.apply_event(NodeId(1), None, 11, at(100));
        // Time alone shows nothing, nor do listings and attempts before its end.
        view.apply_listing(&[], 12, at(599), at(650));
        view.note_failed_attempt(NodeId(1), at(50));
        view.note_failed_attempt(NodeId(1), at(599));
        assert!(matches!(state(&view, 100_000), NodeState::Away(Some(_))));
        assert!(!view.wants_listing(NodeId(1), at(599)) && view.wants_listing(NodeId(1), at(600)));
        // A listing alone or an attempt alone shows nothing either.
        view.apply_listing(&[], 12, at(700), at(700));
        assert!(matches!(state(&view, 100_000), NodeState::Away(Some(_))));
        view.note_failed_attempt(NodeId(1), at(700));
        assert_eq!(state(&view, 700), NodeState::Unknown);
        assert!(!view.wants_listing(NodeId(1), at(700)));
        // The node has returned.
        view.apply_event(NodeId(1), Some(&record(1, 7, 500)), 13, at(800));
        assert!(matches!(state(&view, 800), NodeState::Present(_)));
    }

    #[test]
    fn the_grace_time_of_a_node_that_outlives_its_lease_begins_with_its_end() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut view = NodeView::default();
        view.apply_listing(&[record(1, 7, 500)], 10, start, start);
        view.apply_listing(&[], 11, at(100), at(100));
        view.note_failed_attempt(NodeId(1), at(200));
        view.note_connection(NodeId(1));
        for ms in [9_000, 9_499] {
            view.note_failed_attempt(NodeId(1), at(ms));
            view.apply_listing(&[], 11, at(ms), at(ms));
            assert!(matches!(view.state(NodeId(1), at(ms)), NodeState::Away(_)), "{ms} ms");
        }
        view.note_failed_attempt(NodeId(1), at(9_500));
        view.apply_listing(&[], 11, at(9_500), at(9_500));
        assert_eq!(view.state(NodeId(1), at(9_500)), NodeState::Unknown);
    }

    /// No caller waited for the node for a while, so the node may have been back in between.
    #[test]
    fn the_grace_time_of_a_node_begins_again_after_a_time_without_attempts() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut view = NodeView::default();
        view.apply_listing(&[record(1, 7, 30_000)], 10, start, start);
        view.apply_listing(&[], 11, at(1), at(1));
        for seconds in [2, 12, 35, 45, 55, 64] {
            view.note_failed_attempt(NodeId(1), at(seconds));
            view.apply_listing(&[], 11, at(seconds), at(seconds));
            assert!(matches!(view.state(NodeId(1), at(seconds)), NodeState::Away(_)), "{seconds} s");
        }
        view.note_failed_attempt(NodeId(1), at(65));
        view.apply_listing(&[], 11, at(65), at(65));
        assert_eq!(view.state(NodeId(1), at(65)), NodeState::Unknown);
    }

    #[test]
    fn attempts_to_connect_to_an_away_node_have_an_interval() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut view = NodeView::default();
        view.apply_listing(&[record(1, 7, 500)], 10, start, start);
        view.apply_event(NodeId(1), None, 11, start);
        view.note_failed_attempt(NodeId(1), at(10));
        assert_eq!(view.state(NodeId(1), at(109)), NodeState::Away(None));
        assert!(matches!(view.state(NodeId(1), at(110)), NodeState::Away(Some(_))));
        // After a success, the next attempt need not wait.
        view.note_connection(NodeId(1));
        assert!(matches!(view.state(NodeId(1), at(11)), NodeState::Away(Some(_))));
    }

    #[test]
    fn a_node_without_a_record_is_found_by_its_life() {
        let start = Instant::now();
        let life = |node, kept_ms| LifeRecord::of(&record(node, 1, kept_ms));
        let mut view = NodeView::default();
        view.apply_listing(&[record(1, 1, 500)], 10, start, start);
        view.add_lives(&[life(1, 500), life(2, 500), life(3, 0)], start);
        assert!(matches!(view.state(NodeId(1), start), NodeState::Present(_)));
        let NodeState::Away(Some(present)) = view.state(NodeId(2), start) else { panic!("it is away") };
        assert_eq!(Some(present), PresentNode::from_life(&life(2, 500)));
        assert!(matches!(view.state(NodeId(3), start), NodeState::Suspect(PresentNode { epoch: 1, .. })));
        assert_eq!(view.present().len(), 1);
        let later = start + Duration::from_millis(500);
        view.apply_listing(&[record(1, 1, 500)], 10, later, later);
        assert!(matches!(view.state(NodeId(2), later), NodeState::Away(Some(_))), "none has tried it");
    }

    /// An earlier version has written such records.
    #[test]
    fn a_life_without_an_address_is_a_node_that_is_away_if_its_memory_is_kept() {
        let start = Instant::now();
        let life = |node, kept_ms| {
            let life = NodeLife { node, epoch: 1, kept_ms };
            LifeRecord { life, fabric: String::new(), address: String::new() }
        };
        let mut view = NodeView::default();
        view.add_lives(&[life(2, 500), life(3, 0)], start);
        assert_eq!(view.state(NodeId(2), start), NodeState::Away(None));
        assert_eq!(view.state(NodeId(3), start), NodeState::Unknown);
        let later = start + Duration::from_millis(500);
        assert_eq!(view.state(NodeId(2), later), NodeState::Away(None));
        view.apply_listing(&[], 10, later, later);
        assert_eq!(view.state(NodeId(2), later), NodeState::Unknown, "it has no address to try");
    }
}
