//! Spans that rest: emptied by this client, and as yet only by it, so that it takes of them again by a CAS alone (docs/decisions/0017). Nobody else can use one, so
//! whoever has the client sees to it that they are given up when they are not used for a while, when there is little room, and in the end.

use super::node::Node;
use super::{NodeId, PoolClient};
use crate::op::SettleOp;
use crate::word::SpanWord;

/// Spans rest on a node only while at least this part of what it lends is free.
const ROOM_DIVISOR: u64 = 4;

impl PoolClient {
    /// The same client, of whose spans some on each node may rest. Whoever has it calls [`Self::settle_unused`] now and then, or [`Self::settle`].
    #[must_use]
    pub const fn resting(mut self) -> Self {
        self.may_rest = true;
        self
    }

    /// See whether nodes are still there, so that a way back is looked for to those that went away. To be called now and then while nothing is asked of them.
    pub fn tend(&mut self) {
        self.nodes.values_mut().for_each(Node::tend);
    }

    /// Give up what has rested on these nodes since the last call, or where there is little room.
    pub fn settle_unused(&mut self, mut nodes: impl FnMut(NodeId) -> bool) {
        let mut unused = Vec::new();
        for (id, node) in self.nodes.iter_mut().filter(|(id, _)| nodes(**id)) {
            let cache = &node.cache;
            let resting: Vec<_> = cache.resting().iter().map(|span| (*span, cache.span(*span))).collect();
            let has_room = has_room(node);
            let is_unused = |rest: &&(u32, SpanWord)| !has_room || node.rested.contains(rest);
            unused.extend(resting.iter().filter(is_unused).map(|(span, _)| (*id, *span)));
            node.rested = resting;
        }
        for (id, span) in unused {
            self.settle_span(id, span);
        }
    }

    /// Whether any does.
    #[must_use]
    pub fn has_any_resting(&self) -> bool {
        self.nodes.values().any(|node| !node.cache.resting().is_empty())
    }

    /// Give up all spans that rest. An audit looks for those of which a node does not say that it is done.
    pub fn settle(&mut self) {
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        nodes.into_iter().for_each(|id| self.settle_node(id));
    }

    pub(super) fn settle_node(&mut self, id: NodeId) {
        let resting = self.nodes.get(&id).map_or(&[][..], |node| node.cache.resting()).to_vec();
        // If one fails the connection has broken, and none rests any more.
        let _ = resting.into_iter().all(|span| self.settle_span(id, span));
    }

    /// Whether that was done.
    fn settle_span(&mut self, id: NodeId, span: u32) -> bool {
        let outcome = match self.run(id, SettleOp::new(self.host, span)) {
            Ok(outcome) => outcome.map_err(|failure| failure.of(id, 0, 0)),
            Err(error) => Err(error),
        };
        if let Err(error) = &outcome {
            tracing::debug!(node = id.0, %error, "a span could not be closed");
            self.custody.doubt(id);
        }
        outcome.is_ok()
    }

    pub(super) fn has_resting(&self, id: NodeId) -> bool {
        self.nodes.get(&id).is_some_and(|node| !node.cache.resting().is_empty())
    }

    /// Whether a span may rest there; if there is little room none does any longer.
    pub(super) fn may_rest_on(&mut self, id: NodeId) -> bool {
        let has_room = self.nodes.get(&id).is_some_and(has_room);
        if !has_room {
            self.settle_node(id);
        }
        has_room && self.may_rest
    }

    /// What rests there is left to an audit.
    pub(super) fn forget_resting(&self, id: NodeId) {
        if self.has_resting(id) {
            self.custody.doubt(id);
        }
    }
}

fn has_room(node: &Node) -> bool {
    node.free_bytes() >= node.total_bytes() / ROOM_DIVISOR
}

impl Drop for PoolClient {
    fn drop(&mut self) {
        self.nodes.keys().for_each(|id| self.forget_resting(*id));
    }
}
