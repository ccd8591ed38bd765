//! Giving back many extents: those of one section by one machine, those of different sections side by side, so that one trip serves all.
//!
//! The machines of a client take what is remembered of a word for what they expected there, so no two may be at one word. Sections have none in
//! common.

use std::collections::BTreeMap;

use aquifer_fabric::Host;

use super::node::{Failure, Node};
use super::wire::{LANES_MAX, Place};
use crate::op::{Action, FreeManyOp, Grant, Machine, OpError, Step};
use crate::size::SECTION_CHUNKS;

/// What is given back of one section.
#[derive(Debug)]
struct Lane {
    /// Numbers of its extents.
    numbers: Vec<usize>,
    op: FreeManyOp,
    action: Action,
    /// Of its operations the first in the batch.
    first: usize,
}

/// What came of each.
type Outcomes = Vec<Result<(), OpError>>;

impl Lane {
    /// Go on, unless that was all.
    fn follow(
        numbers: Vec<usize>,
        op: FreeManyOp,
        step: Step<Outcomes>,
        outcomes: &mut Outcomes,
    ) -> Option<Self> {
        match step {
            Step::Post(action) => Some(Self { numbers, op, action, first: 0 }),
            Step::Done(ended) => {
                let ended = ended.unwrap_or_else(|error| vec![Err(error); numbers.len()]);
                numbers.into_iter().zip(ended).for_each(|(number, outcome)| outcomes[number] = outcome);
                None
            }
        }
    }
}

impl Node {
    /// Give all of these back; what came of each.
    pub(super) fn free_all(&mut self, host: Host, grants: &[Grant]) -> Result<Outcomes, Failure> {
        let mut by_section: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (number, grant) in grants.iter().enumerate() {
            by_section.entry(grant.chunk / SECTION_CHUNKS).or_default().push(number);
        }
        let mut sections = by_section.into_values();
        let mut outcomes = vec![Ok(()); grants.len()];
        let mut lanes: Vec<Lane> = Vec::with_capacity(LANES_MAX);
        loop {
            while lanes.len() < LANES_MAX
                && let Some(numbers) = sections.next()
            {
                let mut op = FreeManyOp::new(host, numbers.iter().map(|number| grants[*number]).collect());
                let step = op.start(&mut self.cache);
                lanes.extend(Lane::follow(numbers, op, step, &mut outcomes));
            }
            if lanes.is_empty() {
                return Ok(outcomes);
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
                let Lane { numbers, mut op, action, first } = lane;
                let result = self.wire.answer(&action, Place::lane(place), first, &mut self.words);
                let step = op.step(&mut self.cache, result);
                lanes.extend(Lane::follow(numbers, op, step, &mut outcomes));
            }
        }
    }
}
