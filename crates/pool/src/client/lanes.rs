//! Freeing many extents: those of one section one word after another, those of different sections side by side, so that one trip to the node serves all.
//!
//! A machine takes what the cache has of a word for what it expected there, so no two machines of a client may be at one word at a time. Sections have no word in
//! common.

use std::collections::{BTreeMap, VecDeque};

use aquifer_fabric::Host;

use super::node::{Failure, Node};
use super::wire::{LANES_MAX, Place};
use crate::op::{Action, FreeOp, Grant, Machine, OpError, Step, WordAt, word_of};
use crate::size::SECTION_CHUNKS;

/// Numbers of extents of one section, by the word that they share.
type Words = VecDeque<Vec<usize>>;

/// The extents of one section that are being freed.
#[derive(Debug)]
struct Lane {
    op: FreeOp,
    /// Numbers of the extents that it frees.
    numbers: Vec<usize>,
    waiting: Words,
    action: Action,
    /// The number of its first operation in the batch.
    first: usize,
}

/// All that is being freed.
#[derive(Debug)]
struct Job<'a> {
    host: Host,
    grants: &'a [Grant],
    outcomes: Vec<Result<(), OpError>>,
}

impl Job<'_> {
    /// Starts with the next words of a section; `None` if they are done without an access to the node.
    fn start(&mut self, node: &mut Node, mut waiting: Words) -> Option<Lane> {
        let numbers = waiting.pop_front()?;
        let mut op = FreeOp::many(self.host, numbers.iter().map(|number| self.grants[*number]));
        let step = op.start(&mut node.cache);
        self.follow(node, step, op, numbers, waiting)
    }

    fn follow(
        &mut self,
        node: &mut Node,
        step: Step<<FreeOp as Machine>::Output>,
        op: FreeOp,
        numbers: Vec<usize>,
        waiting: Words,
    ) -> Option<Lane> {
        match step {
            Step::Post(action) => Some(Lane { op, numbers, waiting, action, first: 0 }),
            Step::Done(ended) => {
                for (place, number) in numbers.into_iter().enumerate() {
                    self.outcomes[number] =
                        ended.as_ref().map_or_else(|error| Err(*error), |outcomes| outcomes[place]);
                }
                self.start(node, waiting)
            }
        }
    }
}

impl Node {
    /// Frees all of these; returns what became of each.
    pub(super) fn free_all(
        &mut self,
        host: Host,
        grants: &[Grant],
    ) -> Result<Vec<Result<(), OpError>>, Failure> {
        let mut sections = by_section(grants).into_iter();
        let mut job = Job { host, grants, outcomes: vec![Ok(()); grants.len()] };
        let mut lanes: Vec<Lane> = Vec::with_capacity(LANES_MAX);
        loop {
            while lanes.len() < LANES_MAX
                && let Some(words) = sections.next()
            {
                lanes.extend(job.start(self, words));
            }
            if lanes.is_empty() {
                return Ok(job.outcomes);
            }
            self.wire.begin();
            for (place, lane) in lanes.iter_mut().enumerate() {
                lane.first = self.wire.add(&lane.action, Place::lane(place));
            }
            if let Err(error) = self.wire.execute() {
                self.cache.unsettle_all();
                return Err(Failure::Work(error));
            }
            for (place, lane) in std::mem::take(&mut lanes).into_iter().enumerate() {
                let Lane { mut op, numbers, waiting, action, first } = lane;
                let result = self.wire.answer(&action, Place::lane(place), first, &mut self.words);
                let step = op.step(&mut self.cache, result);
                lanes.extend(job.follow(self, step, op, numbers, waiting));
            }
        }
    }
}

fn by_section(grants: &[Grant]) -> impl IntoIterator<Item = Words> + use<> {
    let mut sections: BTreeMap<u32, BTreeMap<WordAt, Vec<usize>>> = BTreeMap::new();
    for (number, grant) in grants.iter().enumerate() {
        let words = sections.entry(grant.chunk / SECTION_CHUNKS).or_default();
        words.entry(word_of(*grant)).or_default().push(number);
    }
    sections.into_values().map(|words| words.into_values().collect())
}
