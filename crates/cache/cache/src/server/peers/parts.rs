//! The parts of a request that was divided among servers.

use std::time::Instant;

use super::frame::{AnswerEnd, ENTRIES_MAX};
use super::links::FrameEnd;
use super::waiting::ConnectionTurn;
use crate::commands::elsewhere::{self, EntryEnd, Scatter, Task};
use crate::commands::peek::is_repeatable;
use crate::commands::{Context, Replies};
use crate::store::presence::{Place, Presence};

/// The parts of a request that was divided.
#[derive(Debug)]
pub struct Parts {
    /// The request.
    pub scatter: Scatter,
    ends: Vec<Option<PartEnd>>,
    /// The frames that were not answered yet.
    frames: Vec<PartsFrame>,
    /// Partitions that have moved, with the places that servers have answered.
    moved: Vec<(usize, Place)>,
    /// Indices of parts that have waited for items of the pool.
    fetching: Vec<usize>,
    /// Indices of parts for whose partitions their server may not answer at present.
    unavailable: Vec<usize>,
    /// The time until which parts that were lost with a connection may take effect.
    effective_until: Option<Instant>,
    /// Whether a server has rejected a part as malformed although this one has accepted it.
    pub is_malformed: bool,
}

/// The end of a part.
#[derive(Clone, PartialEq, Eq, Debug)]
enum PartEnd {
    /// The part was served, with this reply.
    Served(Vec<u8>),
    /// The part was not served, as far as is known.
    Unserved,
}

/// A frame with some of the parts.
#[derive(Debug)]
struct PartsFrame {
    number: u64,
    ends: Instant,
    parts: Vec<usize>,
}

impl Parts {
    /// The parts of a request, none of which has ended.
    pub fn new(scatter: Scatter) -> Self {
        Self {
            ends: vec![None; scatter.entries.len()],
            scatter,
            frames: Vec::new(),
            moved: Vec::new(),
            fetching: Vec::new(),
            unavailable: Vec::new(),
            effective_until: None,
            is_malformed: false,
        }
    }

    /// Whether answers of other servers are pending.
    pub fn is_awaiting(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Whether all parts have ended, and none can take effect any more.
    pub fn is_done(&self, now: Instant) -> bool {
        let is_final = self.effective_until.is_none_or(|until| now >= until);
        is_final && self.frames.is_empty() && self.ends.iter().all(Option::is_some)
    }

    /// The replies to the parts; a part that was not served gets `unserved`.
    pub fn replies(&self, unserved: &[u8]) -> Vec<Vec<u8>> {
        let reply = |end: &Option<PartEnd>| match end {
            Some(PartEnd::Served(reply)) => reply.clone(),
            Some(PartEnd::Unserved) | None => unserved.to_vec(),
        };
        self.ends.iter().map(reply).collect()
    }

    /// The number of parts that were not served.
    pub fn unserved(&self) -> usize {
        self.ends.iter().filter(|end| **end == Some(PartEnd::Unserved)).count()
    }

    /// Ends all pending parts as not served.
    pub fn end_pending(&mut self) {
        for end in &mut self.ends {
            end.get_or_insert(PartEnd::Unserved);
        }
    }

    /// Executes the parts of this server's partitions, and forwards the others until `end`. If
    /// `fail_fast`, parts that would wait for a partition end as not served.
    pub fn dispatch(&mut self, turn: &mut ConnectionTurn<'_, '_>, end: Instant, fail_fast: bool) {
        self.moved.drain(..).for_each(|(partition, place)| turn.context.learn(partition, place));
        let unavailable = std::mem::take(&mut self.unavailable);
        let mut groups: Vec<(u16, Vec<usize>)> = Vec::new();
        for at in 0..self.scatter.entries.len() {
            if self.ends[at].is_some() {
                continue;
            }
            let would_wait = match turn.context.access.presence(self.scatter.entries[at].partition) {
                Presence::Here => !self.execute(at, turn.context),
                Presence::Elsewhere(place) => {
                    let would_wait = unavailable.contains(&at) || turn.links.is_unresponsive(place.server);
                    if !(fail_fast && would_wait) {
                        add_to_group(&mut groups, place.server, at);
                    }
                    would_wait
                }
                Presence::Leaving | Presence::Unknown => true,
            };
            if fail_fast && would_wait {
                self.ends[at] = Some(PartEnd::Unserved);
            }
        }
        for (server, parts) in groups {
            let entries: Vec<_> = parts
                .iter()
                .map(|at| (self.scatter.entries[*at].partition, self.scatter.entries[*at].task()))
                .collect();
            if let Some(sent) = turn.links.forward(server, turn.waiter, &entries, end, !fail_fast) {
                self.frames.push(PartsFrame { number: sent.number, ends: sent.ends, parts });
            }
        }
    }

    /// Executes a part. Returns false if the partition is not on this server any more.
    fn execute(&mut self, at: usize, context: &Context<'_>) -> bool {
        let entry = &self.scatter.entries[at];
        let mut reply = Replies::new(Vec::new());
        let (counters, is_fetched) = (context.access.counters, self.fetching.contains(&at));
        let hits_before = counters.get_hits.get();
        match elsewhere::execute((entry.partition, entry.task()), context, &mut reply) {
            EntryEnd::Done => {
                if is_fetched {
                    counters.fetched_hits.add(counters.get_hits.get() - hits_before);
                }
                self.ends[at] = Some(PartEnd::Served(reply.parts().concat()));
            }
            EntryEnd::NoRoom if !is_fetched => self.fetching.push(at),
            EntryEnd::Elsewhere => return false,
            EntryEnd::NoRoom => {}
            EntryEnd::Malformed => self.is_malformed = true,
        }
        true
    }

    /// Notes that a frame has ended.
    pub fn note_end(&mut self, number: u64, end: FrameEnd) {
        let Some(found) = self.frames.iter().position(|frame| frame.number == number) else { return };
        let frame = self.frames.remove(found);
        match end {
            FrameEnd::Answered(replies, end) => {
                match end {
                    AnswerEnd::Malformed => self.is_malformed = true,
                    AnswerEnd::Moved(partition, place) => self.moved.push((partition, place)),
                    AnswerEnd::Unavailable => self.unavailable.extend(frame.parts.get(replies.len())),
                    AnswerEnd::Done | AnswerEnd::Again | AnswerEnd::Late => {}
                }
                for (at, reply) in frame.parts.into_iter().zip(replies) {
                    self.ends[at] = Some(PartEnd::Served(reply));
                }
            }
            FrameEnd::NotSent => {}
            FrameEnd::Expired => self.end_unserved(&frame.parts),
            // Parts that only read are sent again.
            FrameEnd::Lost if frame.parts.iter().all(|at| is_read(self.scatter.entries[*at].task())) => {}
            FrameEnd::Lost => {
                self.effective_until = self.effective_until.max(Some(frame.ends));
                self.end_unserved(&frame.parts);
            }
        }
    }

    fn end_unserved(&mut self, parts: &[usize]) {
        parts.iter().for_each(|at| self.ends[*at] = Some(PartEnd::Unserved));
    }
}

fn add_to_group(groups: &mut Vec<(u16, Vec<usize>)>, server: u16, at: usize) {
    match groups.iter_mut().find(|(other, parts)| *other == server && parts.len() < ENTRIES_MAX) {
        Some((_, parts)) => parts.push(at),
        None => groups.push((server, vec![at])),
    }
}

fn is_read(task: Task<'_>) -> bool {
    matches!(task, Task::Request(protocol, request) if is_repeatable(protocol, request))
}
