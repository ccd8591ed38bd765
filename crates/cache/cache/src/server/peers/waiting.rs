//! The state of a client's connection whose request is for a partition that is not on this server.
//!
//! A connection waits for one frame at a time, or for the frames of one request that was divided.
//! So its requests take effect and are answered in order, whatever the servers of their keys.
//!
//! If no server may answer for the partition of a request, the request ends after the time of its
//! [`WaitPolicy`]: a read finds nothing, and a change fails. A forwarded request ends only when the
//! frame's time has passed. No server makes its change after that, so that it does not overwrite a
//! later change.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::frame::{AnswerEnd, ENTRIES_MAX};
use super::links::{FrameEnd, Links, Waiter};
use super::parts::Parts;
use super::wait_policy::WaitPolicy;
use crate::commands::elsewhere::{Scatter, Task};
use crate::commands::peek::{is_repeatable, peek};
use crate::commands::unavailable::{UnavailableReply, error_reply};
use crate::commands::{Context, Protocol, Replies, Session};
use crate::store::presence::Presence;

/// Bytes of requests above which no more requests are added to a frame.
const FRAME_BYTES: usize = 64 << 10;
const NO_SERVER: &str = "no server has the partition of this key at present; try again later";
const SERVER_LOST: &str =
    "the server of this key was lost; whether the command has taken effect is not known";
const NO_ANSWER: &str =
    "the server of this key does not answer; whether the command has taken effect is not known";
const PARTLY_SERVED: &str =
    "not all servers answer at present; whether the command has taken effect is not known";
/// The reply to a part of a `get` that was not served.
const MISS: &[u8] = b"END\r\n";

/// The event for which a connection waits.
#[derive(Debug)]
pub enum Waiting {
    /// A server of the partition, an item of the pool, or room. The request is retried regularly.
    Parked,
    /// The answer to requests that were forwarded.
    Group(RequestGroup),
    /// The parts of a request that was divided.
    Scatter(Box<Parts>),
}

/// Requests that were forwarded in one frame.
#[derive(Debug)]
pub struct RequestGroup {
    /// The number of the frame.
    frame: u64,
    /// The time after which the frame may not be served any more.
    ends: Instant,
    /// Lengths of the requests.
    lens: SmallVec<[usize; 8]>,
    /// The end of the frame, once it is known.
    end: Option<FrameEnd>,
}

/// The next step of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resumed {
    /// The number of used bytes of the input; the next request can be served.
    Used(usize),
    /// The request waits.
    Waits,
    /// The connection must be closed: a server has rejected the request as malformed although this
    /// one has accepted it.
    Closes,
}

/// The access of a connection to other servers during a turn.
#[derive(Debug)]
pub struct PeerAccess<'l> {
    /// The links of the worker.
    pub links: &'l mut Links,
    /// The connection.
    pub waiter: Waiter,
    /// The time at which the turn has begun.
    pub now: Instant,
}

impl PeerAccess<'_> {
    /// The turn of the connection for the requests in `input`.
    pub fn turn<'t, 'p>(
        &'t mut self,
        input: &'t [u8],
        session: &'t mut Session,
        context: &'t Context<'p>,
        replies: &'t mut Replies<'p>,
    ) -> ConnectionTurn<'t, 'p> {
        let Self { links, waiter, now } = self;
        ConnectionTurn { input, session, context, links, waiter: *waiter, now: *now, replies }
    }
}

/// The state of a connection that its requests use during one turn of its thread.
#[derive(Debug)]
pub struct ConnectionTurn<'t, 'p> {
    /// The input from the served request on.
    pub input: &'t [u8],
    /// The requests and replies of the connection.
    pub session: &'t mut Session,
    /// The store of this server, and the places of partitions.
    pub context: &'t Context<'p>,
    /// The links of the worker.
    pub links: &'t mut Links,
    /// The connection.
    pub waiter: Waiter,
    /// The time at which the turn has begun.
    pub now: Instant,
    /// The replies of the turn.
    pub replies: &'t mut Replies<'p>,
}

/// The state of a connection whose requests are forwarded, or wait for a partition.
#[derive(Debug)]
pub struct ForwardingState {
    /// The event for which the connection waits.
    pub waiting: Option<Waiting>,
    policy: WaitPolicy,
}

impl ForwardingState {
    /// The state of a connection that does not wait. Its requests wait for a server of their
    /// partition for at most `timeout`.
    pub fn new(timeout: Duration) -> Self {
        Self { waiting: None, policy: WaitPolicy::new(timeout) }
    }

    /// Notes the end of a frame. Returns whether the connection can continue: it was waiting for
    /// this frame and for no other.
    pub fn note_end(&mut self, number: u64, ended: FrameEnd) -> bool {
        match &mut self.waiting {
            Some(Waiting::Group(group)) if group.frame == number => {
                group.end = Some(ended);
                true
            }
            Some(Waiting::Scatter(parts)) => {
                parts.note_end(number, ended);
                !parts.is_awaiting()
            }
            _ => false,
        }
    }

    /// Continues the connection if the awaited event has occurred.
    pub fn resume(&mut self, turn: &mut ConnectionTurn<'_, '_>) -> Resumed {
        match self.waiting.take() {
            None | Some(Waiting::Parked) => Resumed::Used(0),
            // The connection has failed, and its input was dropped.
            Some(Waiting::Group(group)) if group.lens.iter().sum::<usize>() > turn.input.len() => {
                Resumed::Used(turn.input.len())
            }
            Some(Waiting::Group(mut group)) => match group.end.take() {
                Some(end) => self.end_group(group, end, turn),
                None => {
                    self.waiting = Some(Waiting::Group(group));
                    Resumed::Waits
                }
            },
            Some(Waiting::Scatter(parts)) if parts.is_awaiting() => {
                self.waiting = Some(Waiting::Scatter(parts));
                Resumed::Waits
            }
            Some(Waiting::Scatter(parts)) => self.resume_parts(*parts, turn),
        }
    }

    /// Notes that a request was served by this server.
    #[inline]
    pub fn note_served(&mut self) {
        self.policy.note_served();
    }

    /// Parks the connection until an item was fetched from the pool.
    pub fn wait_for_fetch(&mut self) {
        self.waiting = Some(Waiting::Parked);
    }

    /// Parks the connection until the partition arrives or is known to be on another server.
    fn park(&mut self, now: Instant) -> Resumed {
        self.policy.wait(now);
        self.waiting = Some(Waiting::Parked);
        Resumed::Waits
    }

    /// Replies to forwarded requests whose frame has ended, or retries or ends them.
    fn end_group(
        &mut self,
        group: RequestGroup,
        end: FrameEnd,
        turn: &mut ConnectionTurn<'_, '_>,
    ) -> Resumed {
        let (replies, end) = match end {
            FrameEnd::Answered(replies, end) => (replies, end),
            // The server may have ended: wait until another one has the partition.
            FrameEnd::NotSent => return self.park(turn.now),
            FrameEnd::Lost
                if requests(turn.input, &group.lens)
                    .all(|one| is_repeatable(turn.session.protocol(), one)) =>
            {
                return Resumed::Used(0);
            }
            FrameEnd::Lost if turn.now < group.ends => {
                self.waiting = Some(Waiting::Group(RequestGroup { end: Some(end), ..group }));
                return Resumed::Waits;
            }
            FrameEnd::Lost => return self.end_unserved(&group.lens, SERVER_LOST, turn),
            FrameEnd::Expired => {
                return self.end_unserved(&group.lens, NO_ANSWER, turn);
            }
        };
        if let AnswerEnd::Moved(partition, place) = end {
            turn.context.learn(partition, place);
        }
        replies.iter().take(group.lens.len()).for_each(|reply| turn.replies.push(reply));
        let used: usize = group.lens.iter().take(replies.len()).sum();
        if used > 0 {
            self.policy.note_served();
            turn.session.skip();
        }
        match end {
            AnswerEnd::Malformed => Resumed::Closes,
            AnswerEnd::Unavailable if used == 0 && self.policy.is_over(turn.now) => {
                self.end_unserved(&group.lens[..1], NO_SERVER, turn)
            }
            AnswerEnd::Unavailable if used == 0 => self.park(turn.now),
            _ => Resumed::Used(used),
        }
    }

    /// Ends requests of these lengths that were not served. Error replies have this text.
    fn end_unserved(&mut self, lens: &[usize], text: &str, turn: &mut ConnectionTurn<'_, '_>) -> Resumed {
        let counters = turn.context.access.counters;
        for request in requests(turn.input, lens) {
            let (counter, reply) = match UnavailableReply::to(turn.session.protocol(), request, text) {
                UnavailableReply::Miss(reply) => (&counters.partition_misses, reply),
                UnavailableReply::Error(reply) => (&counters.partition_errors, reply),
            };
            counter.add(1);
            turn.replies.push(&reply);
        }
        self.policy.note_ended(turn.now);
        turn.session.skip();
        Resumed::Used(lens.iter().sum())
    }

    /// Forwards the request of `len` bytes at the start of the input, and the simple requests after
    /// it that are for the same server.
    pub fn forward(
        &mut self,
        (partition, len): (usize, usize),
        turn: &mut ConnectionTurn<'_, '_>,
    ) -> Resumed {
        let place = match turn.context.access.presence(partition) {
            // The partition has just arrived.
            Presence::Here => return Resumed::Used(0),
            Presence::Elsewhere(place) => Some(place),
            Presence::Leaving | Presence::Unknown => None,
        };
        let would_wait = place.is_none_or(|place| turn.links.is_unresponsive(place.server));
        let fail_fast = self.policy.fails_fast(turn.now);
        if self.policy.has_waited(turn.now) || fail_fast && would_wait {
            return self.end_unserved(&[len], NO_SERVER, turn);
        }
        let Some(place) = place else { return self.park(turn.now) };
        let end = self.policy.wait(turn.now);
        let (entries, lens) =
            collect_group((partition, len), place.server, turn.input, turn.session.protocol(), turn.context);
        match turn.links.forward(place.server, turn.waiter, &entries, end, !fail_fast) {
            Some(sent) => {
                let group = RequestGroup { frame: sent.number, ends: sent.ends, lens, end: None };
                self.waiting = Some(Waiting::Group(group));
                Resumed::Waits
            }
            None => self.park(turn.now),
        }
    }

    /// Serves a request that was divided.
    pub fn scatter(&mut self, scatter: Scatter, turn: &mut ConnectionTurn<'_, '_>) -> Resumed {
        self.resume_parts(Parts::new(scatter), turn)
    }

    fn resume_parts(&mut self, mut parts: Parts, turn: &mut ConnectionTurn<'_, '_>) -> Resumed {
        if parts.is_malformed {
            return Resumed::Closes;
        }
        if self.policy.has_waited(turn.now) {
            parts.end_pending();
        } else {
            let fail_fast = self.policy.fails_fast(turn.now);
            parts.dispatch(turn, self.policy.wait(turn.now), fail_fast);
        }
        if !parts.is_done(turn.now) {
            self.waiting = Some(Waiting::Scatter(Box::new(parts)));
            return Resumed::Waits;
        }
        let unserved = parts.unserved() as u64;
        if unserved == 0 {
            self.policy.note_served();
        } else {
            self.policy.note_ended(turn.now);
        }
        if unserved > 0 && !parts.scatter.is_get() {
            turn.context.access.counters.partition_errors.add(1);
            let request = &turn.input[..parts.scatter.used().min(turn.input.len())];
            let error = error_reply(turn.session.protocol(), request, PARTLY_SERVED);
            return Resumed::Used(turn.session.fail(&parts.scatter, &error, turn.replies));
        }
        turn.context.access.counters.partition_misses.add(unserved);
        Resumed::Used(turn.session.gather(&parts.scatter, &parts.replies(MISS), turn.replies))
    }

    /// Whether the connection must be retried at intervals: no event announces a partition that
    /// arrives, or the end of a time.
    pub fn must_retry(&self) -> bool {
        match &self.waiting {
            Some(Waiting::Parked) => true,
            Some(Waiting::Scatter(parts)) => !parts.is_awaiting(),
            Some(Waiting::Group(group)) => group.end.is_some(),
            None => false,
        }
    }
}

/// The requests of these lengths at the start of the input.
fn requests<'i>(input: &'i [u8], lens: &[usize]) -> impl Iterator<Item = &'i [u8]> {
    lens.iter().scan(input, |rest, len| {
        let (request, after) = rest.split_at(*len);
        *rest = after;
        Some(request)
    })
}

/// Collects the request of `len` bytes at the start of the input, and the simple requests after it
/// that are for the same server. Returns the entries of a frame, and the lengths of the requests.
fn collect_group<'i>(
    (partition, len): (usize, usize),
    server: u16,
    input: &'i [u8],
    protocol: Protocol,
    context: &Context<'_>,
) -> (Vec<(usize, Task<'i>)>, SmallVec<[usize; 8]>) {
    let mut entries = vec![(partition, Task::Request(protocol, &input[..len]))];
    let mut lens = SmallVec::from_slice(&[len]);
    let mut at = len;
    while entries.len() < ENTRIES_MAX
        && at < FRAME_BYTES
        && let Some(next) = peek(protocol, &input[at..], context.access.value_max())
    {
        let partition = context.access.store.partition_number(context.access.key(next.key).hash);
        match context.access.presence(partition) {
            Presence::Elsewhere(other) if other.server == server => {}
            _ => break,
        }
        entries.push((partition, Task::Request(protocol, &input[at..at + next.len])));
        lens.push(next.len);
        at += next.len;
    }
    (entries, lens)
}
