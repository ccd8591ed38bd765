//! Suspends nodes that are away, so that no operation waits for a node while other nodes have
//! replicas.
//!
//! Only with several replicas, operations end while a node is away ([`WorkError::Away`]), and are
//! abandoned when a node does not answer. Then:
//!
//! - Slabs with a replica on the node are not filled. So their replicas there stay complete, and
//!   count again when the node answers.
//! - Pages that a suspended node has not acknowledged are written to other slabs, even if another
//!   node has them: without the old replica, the loss of the other nodes would lose the whole slab.
//!   Only after some attempts the replica is dropped.
//! - No page is copied to or from the node. If its memory is lost, an operation ends with another
//!   error, and the node is dropped.
//!
//! [`WorkError::Away`]: aquifer_fabric::WorkError::Away

use std::sync::Arc;
use std::time::Duration;

use aquifer_pool::{AnswerTimeout, Clock, NodeId};

use super::Sender;
use super::batch::BatchWrite;
use crate::ports::Connector;
use crate::slabs::{SlabId, SlabSet};

/// Time without an answer of a node after which its operations are abandoned, if batches are in
/// flight, for which programs may wait.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(50);
/// Time without an answer after which operations are abandoned if only probes or copies are in
/// flight. The timeout of batches doubles up to this one with each timeout, so that a busy machine
/// does not drop and make replicas all the time.
const ANSWER_TIMEOUT_MAX: Duration = Duration::from_secs(1);
/// Time without an answer of a disk node after which its operations are abandoned: a busy disk
/// takes longer than a network.
const DISK_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for which nothing is written to a node whose disk could not be written.
const UNWRITABLE_TIME: Duration = Duration::from_secs(5);
/// Time without a timeout after which the timeout of batches is the shortest again.
const TIMEOUT_RESET_TIME: Duration = Duration::from_secs(10);
/// Longest time between two calls that counts, so that a pause of this process does not cause
/// timeouts.
const COUNTED_STEP_MAX: Duration = Duration::from_millis(20);
/// The interval that [`Sender::call_interval`] returns.
const CALL_INTERVAL: Duration = Duration::from_millis(10);

/// The timeout of answers while batches are in flight.
#[derive(Debug)]
pub(super) struct AnswerWaits {
    timeout: Duration,
    /// The time of the last increase.
    lengthened_at: Duration,
}

impl Default for AnswerWaits {
    fn default() -> Self {
        Self { timeout: ANSWER_TIMEOUT, lengthened_at: Duration::ZERO }
    }
}

impl AnswerWaits {
    fn timeout(&mut self, now: Duration) -> Duration {
        if now.saturating_sub(self.lengthened_at) >= TIMEOUT_RESET_TIME {
            self.timeout = ANSWER_TIMEOUT;
        }
        self.timeout
    }

    fn lengthen(&mut self, now: Duration) {
        self.timeout = (self.timeout * 2).min(ANSWER_TIMEOUT_MAX);
        self.lengthened_at = now;
    }
}

/// The clock of a connector.
#[derive(Debug)]
struct ConnectorClock(Arc<dyn Connector>);

impl Clock for ConnectorClock {
    fn now(&self) -> Duration {
        self.0.now()
    }
}

/// The timeout of allocations on a node, in a run with several replicas.
pub(super) fn answer_timeout(connector: &Arc<dyn Connector>) -> AnswerTimeout {
    AnswerTimeout { time: ANSWER_TIMEOUT, clock: Arc::new(ConnectorClock(Arc::clone(connector))) }
}

impl Sender {
    /// Suspends a node whose operations end because it is away.
    pub(super) fn suspend_node(&mut self, node: NodeId) {
        if self.uses_node(node) && self.filler.suspend(node) {
            tracing::warn!(node = node.0, "memory node is away; writing to other nodes until it answers");
            self.slabs.set_slow(node, true);
            self.count_suspended_slabs();
        }
    }

    /// Suspends a node whose disk could not be written. Its pages are read as before.
    pub(super) fn suspend_writes(&mut self, node: NodeId) {
        if self.uses_node(node) && self.filler.suspend(node) {
            tracing::warn!(node = node.0, "node cannot write its disk; writing to other nodes for a while");
            self.unwritable.push((node, self.ports.now() + UNWRITABLE_TIME));
            self.count_suspended_slabs();
        }
    }

    /// Uses the nodes again whose disk could not be written some time ago.
    pub(super) fn resume_writable_nodes(&mut self) {
        let now = self.ports.now();
        let due: Vec<(NodeId, Duration)> =
            self.unwritable.extract_if(.., |(_, until)| *until <= now).collect();
        due.into_iter().for_each(|(node, _)| self.resume_node(node));
    }

    /// Counts the slabs with a replica on a suspended node, for the statistics. With many slabs, a
    /// count at each call of [`Self::stats`] would take too long.
    pub(super) fn count_suspended_slabs(&mut self) {
        self.suspended_slabs = self.filler.suspended_with_pages();
    }

    /// With several replicas, opens the port to a node that has just answered. A connection at the
    /// first WRITE would wait if the node does not answer then.
    pub(super) fn open_port_early(&mut self, node: NodeId) {
        if self.slabs.may_have_several_copies()
            && let Err(error) = self.ports.port(node)
        {
            tracing::debug!(node = node.0, %error, "cannot connect to a memory node yet");
        }
    }

    /// Uses a node again that has answered a probe.
    pub(super) fn resume_node(&mut self, node: NodeId) {
        if self.unwritable.iter().any(|(other, _)| *other == node) {
            return;
        }
        if self.filler.resume(node) {
            tracing::info!(node = node.0, "memory node answers again");
            self.slabs.set_slow(node, false);
            self.healer.search_soon();
            self.count_suspended_slabs();
        }
    }

    /// The time after which [`Self::advance`] must be called again even if no operation completes;
    /// `None` if there is no such time.
    #[must_use]
    pub fn call_interval(&self) -> Option<Duration> {
        let awaits_answers = self.slabs.may_have_several_copies() && !self.batches.is_empty();
        (awaits_answers || self.healer.is_delayed()).then_some(CALL_INTERVAL)
    }

    /// Abandons the operations on nodes that do not answer, if other nodes have acknowledged the
    /// same page groups.
    pub(super) fn abandon_unanswered(&mut self) {
        if !self.slabs.may_have_several_copies() {
            return;
        }
        let now = self.ports.now();
        let passed = now.saturating_sub(self.unanswered_checked_at).min(COUNTED_STEP_MAX);
        self.unanswered_checked_at = now;
        let timeout =
            if self.batches.is_empty() { ANSWER_TIMEOUT_MAX } else { self.answer_waits.timeout(now) };
        for (node, port) in self.ports.open_ports() {
            port.unanswered += if port.in_flight > 0 { passed } else { Duration::ZERO };
            let timeout = if self.pool.is_disk(node) { timeout.max(DISK_ANSWER_TIMEOUT) } else { timeout };
            let is_late = port.unanswered >= timeout && !port.endpoint.is_away();
            if is_late && !self.batches.iter().any(|batch| batch.awaits_others_with(&self.slabs, node)) {
                tracing::debug!(node = node.0, in_flight = port.in_flight, "memory node timed out");
                port.endpoint.treat_as_away();
                port.unanswered = Duration::ZERO;
                // Not all endpoints can abandon operations.
                if port.endpoint.is_away() {
                    self.stats.node_timeouts += 1;
                    self.answer_waits.lengthen(now);
                }
            }
        }
    }
}

impl Sender {
    /// Drops the replicas of a slab at these places, which lack pages that another replica has.
    pub(super) fn drop_incomplete_replicas(&mut self, slab: SlabId, places: u8) {
        for (place, replica) in self.slabs.replicas(slab).placed() {
            if places & 1 << place != 0 {
                tracing::warn!(
                    node = replica.node.0,
                    "memory node does not answer WRITEs; dropping a replica"
                );
                self.filler.drop_replica(slab, replica.node);
                // A leak scan frees the replica when the node has returned.
                self.pool.suspect_leak(replica.node);
                self.healer.search_soon();
                self.count_suspended_slabs();
            }
        }
    }
}

impl BatchWrite {
    /// Whether a page group awaits this node and another, of which none has acknowledged the group.
    /// Then this node alone cannot be the cause.
    fn awaits_others_with(&self, slabs: &SlabSet, node: NodeId) -> bool {
        super::bits(self.awaited_groups).any(|first| {
            let replicas = self.locations[first].map(|location| slabs.replicas(location.slab()));
            replicas.is_some_and(|replicas| replicas.len() > 1 && replicas.on(node).is_some())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_doubles_with_each_timeout_and_is_reset_after_a_while() {
        let at = Duration::from_millis;
        let mut waits = AnswerWaits::default();
        assert_eq!(waits.timeout(at(5)), ANSWER_TIMEOUT);
        waits.lengthen(at(60));
        assert_eq!(waits.timeout(at(61)), 2 * ANSWER_TIMEOUT);
        (0..9).for_each(|_| waits.lengthen(at(70)));
        assert_eq!(waits.timeout(at(10_069)), ANSWER_TIMEOUT_MAX);
        assert_eq!(waits.timeout(at(10_070)), ANSWER_TIMEOUT);
    }
}
