//! Frees many extents: in one section word by word, in different sections concurrently, so that one
//! trip to the node serves several sections.
//!
//! A state machine expects the words of the cache, so two machines of a client must not change the
//! same word at a time. Two sections have no word in common.

use std::collections::{BTreeMap, VecDeque};

use aquifer_fabric::Host;

use super::connection::{Buffers, LANES_MAX};
use super::node::{ClientNode, Failure};
use crate::op::{Action, FreeOp, Grant, OpError, StateMachine, Step, WordAt, word_of};
use crate::size::SECTION_CHUNKS;

/// Indexes of the extents of one section, grouped by control word.
type WordQueue = VecDeque<Vec<usize>>;

/// A section whose extents are being freed.
#[derive(Debug)]
struct Lane {
    op: FreeOp,
    /// Indexes of the extents that the state machine frees.
    indexes: Vec<usize>,
    waiting: WordQueue,
    action: Action,
    /// The index of the action's first operation in the batch.
    first: usize,
}

/// The extents to be freed, and their outcomes.
#[derive(Debug)]
struct FreeAll<'a> {
    host: Host,
    grants: &'a [Grant],
    outcomes: Vec<Result<(), OpError>>,
}

impl FreeAll<'_> {
    /// Starts with the next word of a section; `None` if no free that needs an access to the node
    /// is left.
    fn start(&mut self, node: &mut ClientNode, mut waiting: WordQueue) -> Option<Lane> {
        let indexes = waiting.pop_front()?;
        let mut op = FreeOp::many(self.host, indexes.iter().map(|index| self.grants[*index]));
        let step = op.start(&mut node.cache);
        self.follow(node, step, op, indexes, waiting)
    }

    fn follow(
        &mut self,
        node: &mut ClientNode,
        step: Step<<FreeOp as StateMachine>::Output>,
        op: FreeOp,
        indexes: Vec<usize>,
        waiting: WordQueue,
    ) -> Option<Lane> {
        match step {
            Step::Post(action) => Some(Lane { op, indexes, waiting, action, first: 0 }),
            Step::Done(ended) => {
                for (place, index) in indexes.into_iter().enumerate() {
                    self.outcomes[index] =
                        ended.as_ref().map_or_else(|error| Err(*error), |outcomes| outcomes[place]);
                }
                self.start(node, waiting)
            }
        }
    }
}

impl ClientNode {
    /// Frees extents; returns the outcome of each.
    pub(super) fn free_all(
        &mut self,
        host: Host,
        grants: &[Grant],
    ) -> Result<Vec<Result<(), OpError>>, Failure> {
        let mut sections = by_section(grants).into_iter();
        let mut free = FreeAll { host, grants, outcomes: vec![Ok(()); grants.len()] };
        let mut lanes: Vec<Lane> = Vec::with_capacity(LANES_MAX);
        loop {
            while lanes.len() < LANES_MAX
                && let Some(words) = sections.next()
            {
                lanes.extend(free.start(self, words));
            }
            if lanes.is_empty() {
                return Ok(free.outcomes);
            }
            self.connection.begin();
            for (place, lane) in lanes.iter_mut().enumerate() {
                lane.first = self.connection.add(&lane.action, Buffers::lane(place));
            }
            if let Err(error) = self.connection.execute() {
                self.cache.forget_saved_records();
                return Err(Failure::Work(error));
            }
            for (place, lane) in std::mem::take(&mut lanes).into_iter().enumerate() {
                let Lane { mut op, indexes, waiting, action, first } = lane;
                let result = self.connection.answer(&action, Buffers::lane(place), first, &mut self.words);
                let step = op.step(&mut self.cache, result);
                lanes.extend(free.follow(self, step, op, indexes, waiting));
            }
        }
    }
}

/// The extents by section and control word.
fn by_section(grants: &[Grant]) -> impl IntoIterator<Item = WordQueue> + use<> {
    let mut sections: BTreeMap<u32, BTreeMap<WordAt, Vec<usize>>> = BTreeMap::new();
    for (index, grant) in grants.iter().enumerate() {
        let words = sections.entry(grant.chunk / SECTION_CHUNKS).or_default();
        words.entry(word_of(*grant)).or_default().push(index);
    }
    sections.into_values().map(|words| words.into_values().collect())
}
