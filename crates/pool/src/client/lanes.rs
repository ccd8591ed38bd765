//! Giving back many extents: those of one section one after another, those of different sections side by side, so that one trip serves all.
//!
//! The machines of a client take what is remembered of a word for what they expected there, so no two may be at one word. Sections have none in
//! common.

use std::collections::{BTreeMap, VecDeque};

use aquifer_fabric::Host;

use super::node::{Failure, Node};
use super::wire::{LANES_MAX, Place};
use crate::cache::NodeCache;
use crate::op::{Action, FreeOp, Grant, Machine, OpError, Step, StepResult};
use crate::size::SECTION_CHUNKS;

/// What is given back of one section.
#[derive(Debug)]
struct Lane {
    /// Numbers of those that come later.
    left: VecDeque<usize>,
    number: usize,
    op: FreeOp,
    action: Action,
    /// Of its operations the first in the batch.
    first: usize,
}

/// What came of each, and what is given back.
#[derive(Debug)]
struct Work<'a> {
    host: Host,
    grants: &'a [Grant],
    outcomes: Vec<Result<(), OpError>>,
}

impl Work<'_> {
    /// Begin with the next of a section; `None` if there is none any more.
    fn begin(&mut self, cache: &mut NodeCache, mut left: VecDeque<usize>) -> Option<Lane> {
        while let Some(number) = left.pop_front() {
            let mut op = FreeOp::new(self.host, self.grants[number]);
            match op.start(cache) {
                Step::Post(action) => return Some(Lane { left, number, op, action, first: 0 }),
                Step::Done(outcome) => self.outcomes[number] = outcome,
            }
        }
        None
    }

    /// Go on after an answer.
    fn go_on(&mut self, cache: &mut NodeCache, mut lane: Lane, result: StepResult<'_>) -> Option<Lane> {
        match lane.op.step(cache, result) {
            Step::Post(action) => Some(Lane { action, ..lane }),
            Step::Done(outcome) => {
                self.outcomes[lane.number] = outcome;
                self.begin(cache, lane.left)
            }
        }
    }
}

impl Node {
    /// Give all of these back; what came of each.
    pub(super) fn free_all(
        &mut self,
        host: Host,
        grants: &[Grant],
    ) -> Result<Vec<Result<(), OpError>>, Failure> {
        let mut by_section: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
        for (number, grant) in grants.iter().enumerate() {
            by_section.entry(grant.chunk / SECTION_CHUNKS).or_default().push_back(number);
        }
        let mut sections = by_section.into_values();
        let mut work = Work { host, grants, outcomes: vec![Ok(()); grants.len()] };
        let mut lanes: Vec<Lane> = Vec::with_capacity(LANES_MAX);
        loop {
            let more = sections.by_ref().filter_map(|left| work.begin(&mut self.cache, left));
            lanes.extend(more.take(LANES_MAX - lanes.len()));
            if lanes.is_empty() {
                return Ok(work.outcomes);
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
                let result = self.wire.answer(&lane.action, Place::lane(place), lane.first, &mut self.words);
                lanes.extend(work.go_on(&mut self.cache, lane, result));
            }
        }
    }
}
