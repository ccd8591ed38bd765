//! Suspends nodes that are away, so that nothing waits for a node while other nodes have replicas.
//!
//! Only with several replicas, operations end while a node is away ([`WorkError::Away`]), and are
//! given up when a node does not answer. Then:
//!
//! - Slabs with a replica on the node are not filled. So their replicas there stay complete, and
//!   count again when the node answers.
//! - A replica that lacks a WRITE is dropped if another replica has it. Otherwise the pages are
//!   written to other slabs.
//! - Nothing is copied to or from the node. If its memory is lost, an operation ends with another
//!   error, and the node is dropped.
//!
//! [`WorkError::Away`]: aquifer_fabric::WorkError::Away

use std::sync::Arc;
use std::time::Duration;

use aquifer_pool::{AnswerTimeout, Clock, NodeId};

use super::Sender;
use super::batch::BatchWrite;
use crate::mutation::Mutation;
use crate::ports::Connector;
use crate::slabs::SlabSet;

/// The time without an answer of a node after which its operations are given up, if batches are in
/// flight, for which programs may wait.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(50);
/// The same if only probes or copies are in flight. The time above doubles up to this one each time
/// that a node is given up, so that a busy machine does not drop and make replicas all the time.
const QUIET_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The time after which it is as short again as it was.
const CALM_TIME: Duration = Duration::from_secs(10);
/// The most that the time between two calls counts, so that nodes are not blamed for a pause of
/// this process.
const STEP_MAX: Duration = Duration::from_millis(20);
/// The interval of the calls that [`Sender::call_interval`] asks for.
const CALL_INTERVAL: Duration = Duration::from_millis(10);

/// How long answers are awaited while batches are in flight.
#[derive(Debug)]
pub(super) struct AnswerWaits {
    timeout: Duration,
    /// When it has become longer for the last time.
    lengthened_at: Duration,
}

impl Default for AnswerWaits {
    fn default() -> Self {
        Self { timeout: ANSWER_TIMEOUT, lengthened_at: Duration::ZERO }
    }
}

impl AnswerWaits {
    fn timeout(&mut self, now: Duration) -> Duration {
        if now.saturating_sub(self.lengthened_at) >= CALM_TIME {
            self.timeout = ANSWER_TIMEOUT;
        }
        self.timeout
    }

    fn lengthen(&mut self, now: Duration) {
        self.timeout = (self.timeout * 2).min(QUIET_ANSWER_TIMEOUT);
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

/// How long allocations wait for a node, in a run with several replicas.
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

    /// Counts the slabs with a replica on a suspended node, for the statistics: with many slabs it
    /// takes too long to count them at each call of [`Self::stats`].
    pub(super) fn count_suspended_slabs(&mut self) {
        self.suspended_slabs = self.filler.suspended_with_pages();
    }

    /// With several replicas, opens the port to a node that has just answered: to connect at the
    /// first WRITE would wait for a node that does not answer by then.
    pub(super) fn open_port_early(&mut self, node: NodeId) {
        if self.slabs.replicas_wanted() > 1
            && let Err(error) = self.ports.port(node)
        {
            tracing::debug!(node = node.0, %error, "cannot connect to a memory node yet");
        }
    }

    /// Uses a node again that has answered a probe.
    pub(super) fn resume_node(&mut self, node: NodeId) {
        if self.filler.resume(node) {
            tracing::info!(node = node.0, "memory node answers again");
            self.slabs.set_slow(node, false);
            self.healer.search_soon();
            self.count_suspended_slabs();
        }
    }

    /// The time after which [`Self::advance`] must be called again, whatever completes; `None` if
    /// nothing depends on it.
    #[must_use]
    pub fn call_interval(&self) -> Option<Duration> {
        (self.slabs.replicas_wanted() > 1 && !self.batches.is_empty()).then_some(CALL_INTERVAL)
    }

    /// Gives up the operations on nodes that do not answer, if other nodes have acknowledged what
    /// they have to acknowledge.
    pub(super) fn give_up_unanswered(&mut self) {
        if self.slabs.replicas_wanted() == 1 {
            return;
        }
        let now = self.ports.now();
        let passed = now.saturating_sub(self.looked_at).min(STEP_MAX);
        self.looked_at = now;
        let timeout =
            if self.batches.is_empty() { QUIET_ANSWER_TIMEOUT } else { self.answer_waits.timeout(now) };
        for (node, port) in self.ports.open_ports() {
            port.unanswered += if port.in_flight > 0 { passed } else { Duration::ZERO };
            let is_late = port.unanswered >= timeout && !port.endpoint.is_away();
            if is_late && !self.batches.iter().any(|batch| batch.awaits_others_with(&self.slabs, node)) {
                tracing::debug!(node = node.0, in_flight = port.in_flight, "giving up on a memory node");
                port.endpoint.treat_as_away();
                port.unanswered = Duration::ZERO;
                // Not all endpoints can give up.
                if port.endpoint.is_away() {
                    self.stats.given_up += 1;
                    self.answer_waits.lengthen(now);
                }
            }
        }
    }

    /// Drops the replicas that lack a page group which another replica has.
    pub(super) fn drop_incomplete_replicas(&mut self, at: usize, first: usize) {
        let batch = &self.batches[at];
        let failed_places = batch.group_failed[first];
        if failed_places == 0 || batch.is_confirming(first) || Mutation::KeepIncomplete.is_active() {
            return;
        }
        let slab = batch.locations[first].expect("it was posted to a location").slab();
        for (place, replica) in self.slabs.replicas(slab).placed() {
            if failed_places & 1 << place != 0 {
                self.filler.drop_replica(slab, replica.node);
                // A scan frees it when the node is back.
                self.pool.suspect_leak(replica.node);
                self.stats.incomplete_replicas += 1;
                self.healer.search_soon();
                self.count_suspended_slabs();
            }
        }
    }
}

impl BatchWrite {
    /// Whether a page group awaits this node and another, of which none has acknowledged it. Then
    /// it is not this node that is late.
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
    fn nodes_are_given_up_later_if_that_has_just_happened() {
        let at = Duration::from_millis;
        let mut waits = AnswerWaits::default();
        assert_eq!(waits.timeout(at(5)), ANSWER_TIMEOUT);
        waits.lengthen(at(60));
        assert_eq!(waits.timeout(at(61)), 2 * ANSWER_TIMEOUT);
        (0..9).for_each(|_| waits.lengthen(at(70)));
        assert_eq!(waits.timeout(at(10_069)), QUIET_ANSWER_TIMEOUT);
        assert_eq!(waits.timeout(at(10_070)), ANSWER_TIMEOUT);
    }
}
