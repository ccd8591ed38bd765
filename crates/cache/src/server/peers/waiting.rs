//! What a client's connection waits for, whose request is for a partition that is not here.
//!
//! A connection waits for one frame at a time, or for the frames of one request that was divided.
//! So its requests take effect and are answered in order, wherever their keys are.

use smallvec::SmallVec;

use super::frame::{AnswerEnd, ENTRIES_MAX};
use super::links::{FrameEnd, Links, Waiter};
use crate::commands::elsewhere::{self, EntryEnd, Scatter, Task};
use crate::commands::peek::{error_reply, is_repeatable, peek};
use crate::commands::{Context, Protocol, Replies, Session};
use crate::store::presence::{Place, Presence};

/// Bytes of requests after which no more are added to a frame.
const FRAME_BYTES: usize = 64 << 10;
/// Seconds that a request waits for a server that has its partition.
const PATIENCE_S: u32 = 10;
const NO_SERVER: &str = "no server has the partition of this key at present; try again later";
const LOST: &str = "the server of this key was lost; whether the command has taken effect is not known";

/// What a connection waits for.
#[derive(Debug)]
pub enum Waiting {
    /// A server that has the partition. The request is looked at again.
    Parked,
    /// The answer to requests that were forwarded, of which these are the lengths.
    Run {
        /// The number of the frame.
        frame: u64,
        /// Lengths of the requests.
        lens: SmallVec<[usize; 8]>,
        /// The answer, when it has arrived.
        end: Option<FrameEnd>,
    },
    /// The parts of a request that was divided.
    Scatter(Box<Parts>),
}

/// The parts of a request that was divided.
#[derive(Debug)]
pub struct Parts {
    scatter: Scatter,
    replies: Vec<Option<Vec<u8>>>,
    /// The frames that are not yet answered, and which parts each of them has.
    frames: Vec<(u64, Vec<usize>)>,
    /// Partitions of which a server has said where they are.
    moved: Vec<(usize, Place)>,
    /// Parts that have waited for items of the pool.
    fetching: Vec<usize>,
    is_malformed: bool,
    /// A server could not be reached.
    is_not_sent: bool,
}

/// How a connection goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resumed {
    /// So many bytes of the input were used; the next request can be looked at.
    Used(usize),
    /// It waits.
    Waits,
    /// The other server calls the request malformed, which this one does not understand.
    Closes,
}

/// The state of a connection that has to do with requests elsewhere.
#[derive(Debug, Default)]
pub struct Elsewhere {
    /// What it waits for.
    pub waiting: Option<Waiting>,
    /// Since which second it waits for a server.
    parked_s: Option<u32>,
}

impl Elsewhere {
    /// Whether the connection waits for a server that has the partition.
    pub fn is_parked(&self) -> bool {
        matches!(self.waiting, Some(Waiting::Parked))
    }

    /// Whether a frame with this number is awaited, and notes that it has ended.
    pub fn note_end(&mut self, number: u64, ended: FrameEnd) -> bool {
        match &mut self.waiting {
            Some(Waiting::Run { frame, end, .. }) if *frame == number => {
                *end = Some(ended);
                true
            }
            Some(Waiting::Scatter(parts)) => {
                parts.note_end(number, ended);
                parts.frames.is_empty()
            }
            _ => false,
        }
    }

    /// Goes on when what was awaited has come.
    pub fn resume<'p>(
        &mut self,
        input: &[u8],
        session: &mut Session,
        context: &Context<'p>,
        links: &mut Links,
        waiter: Waiter,
        out: &mut Replies<'p>,
    ) -> Resumed {
        match self.waiting.take() {
            None | Some(Waiting::Parked) => Resumed::Used(0),
            // The client has gone, with its requests.
            Some(Waiting::Run { lens, .. }) if lens.iter().sum::<usize>() > input.len() => {
                Resumed::Used(input.len())
            }
            Some(Waiting::Run { lens, end: Some(end), .. }) => {
                let (used, is_malformed) = finish_run(input, &lens, &end, session, context, out);
                if used > 0 {
                    self.parked_s = None;
                } else if end == FrameEnd::NotSent {
                    // The server may be gone: wait until another one has the partition.
                    return self.park(context);
                }
                if is_malformed { Resumed::Closes } else { Resumed::Used(used) }
            }
            Some(Waiting::Scatter(parts)) if parts.frames.is_empty() => {
                self.go_on(*parts, session, context, links, waiter, out)
            }
            waits => {
                self.waiting = waits;
                Resumed::Waits
            }
        }
    }

    /// Notes that a request was served here.
    #[inline]
    pub fn note_served(&mut self) {
        self.parked_s = None;
    }

    /// Has the connection wait until an item has come from the pool.
    pub fn wait_for_fetch(&mut self) {
        self.waiting = Some(Waiting::Parked);
    }

    /// Has the connection wait until the partition comes or is known to be elsewhere.
    fn park(&mut self, context: &Context<'_>) -> Resumed {
        self.parked_s.get_or_insert(context.access.now_s);
        self.waiting = Some(Waiting::Parked);
        Resumed::Waits
    }

    fn has_waited_long(&self, context: &Context<'_>) -> bool {
        self.parked_s.is_some_and(|since| context.access.now_s.saturating_sub(since) > PATIENCE_S)
    }

    /// Forwards the request of `len` bytes at the start of the input, and usual ones after it that
    /// are for the same server.
    #[expect(clippy::too_many_arguments, reason = "the parts of a connection")]
    pub fn forward<'p>(
        &mut self,
        (partition, len): (usize, usize),
        input: &[u8],
        session: &mut Session,
        context: &Context<'p>,
        links: &mut Links,
        waiter: Waiter,
        out: &mut Replies<'p>,
    ) -> Resumed {
        let protocol = session.protocol();
        let presence = context.access.store.partitions()[partition].presence();
        // It may have come in this moment.
        if presence != Presence::Here && self.has_waited_long(context) {
            self.parked_s = None;
            out.push(&error_reply(protocol, &input[..len], NO_SERVER));
            session.skip();
            return Resumed::Used(len);
        }
        let place = match presence {
            Presence::Here => return Resumed::Used(0),
            Presence::Elsewhere(place) => place,
            Presence::Leaving | Presence::Unknown => return self.park(context),
        };
        let mut entries = vec![(partition, Task::Request(protocol, &input[..len]))];
        let mut lens = SmallVec::from_slice(&[len]);
        let mut at = len;
        while entries.len() < ENTRIES_MAX
            && at < FRAME_BYTES
            && let Some(next) = peek(protocol, &input[at..], context.access.value_max())
        {
            let partition = context.access.store.partition_number(context.access.key(next.key).hash);
            let is_same = match context.access.store.partitions()[partition].presence() {
                Presence::Elsewhere(other) => other.server == place.server,
                _ => false,
            };
            if !is_same {
                break;
            }
            entries.push((partition, Task::Request(protocol, &input[at..at + next.len])));
            lens.push(next.len);
            at += next.len;
        }
        match links.forward(place.server, waiter, &entries) {
            Some(frame) => {
                self.waiting = Some(Waiting::Run { frame, lens, end: None });
                Resumed::Waits
            }
            None => self.park(context),
        }
    }

    /// Begins with a request that was divided.
    pub fn scatter<'p>(
        &mut self,
        scatter: Scatter,
        session: &mut Session,
        context: &Context<'p>,
        links: &mut Links,
        waiter: Waiter,
        out: &mut Replies<'p>,
    ) -> Resumed {
        let replies = vec![None; scatter.entries.len()];
        let parts = Parts {
            scatter,
            replies,
            frames: Vec::new(),
            moved: Vec::new(),
            fetching: Vec::new(),
            is_malformed: false,
            is_not_sent: false,
        };
        self.go_on(parts, session, context, links, waiter, out)
    }

    fn go_on<'p>(
        &mut self,
        mut parts: Parts,
        session: &mut Session,
        context: &Context<'p>,
        links: &mut Links,
        waiter: Waiter,
        out: &mut Replies<'p>,
    ) -> Resumed {
        if parts.is_malformed {
            return Resumed::Closes;
        }
        if std::mem::take(&mut parts.is_not_sent) {
            self.parked_s.get_or_insert(context.access.now_s);
        }
        if self.has_waited_long(context) {
            self.parked_s = None;
            let error = format!("SERVER_ERROR {NO_SERVER}\r\n");
            return Resumed::Used(session.fail(&parts.scatter, error.as_bytes(), out));
        }
        if parts.dispatch(context, links, waiter) {
            self.parked_s = None;
            let replies: Vec<Vec<u8>> = parts.replies.into_iter().flatten().collect();
            return Resumed::Used(session.gather(&parts.scatter, &replies, out));
        }
        if parts.frames.is_empty() {
            self.parked_s.get_or_insert(context.access.now_s);
        }
        self.waiting = Some(Waiting::Scatter(Box::new(parts)));
        Resumed::Waits
    }

    /// Whether the connection waits for a partition, of which nothing is said when it comes.
    pub fn must_look_again(&self) -> bool {
        match &self.waiting {
            Some(Waiting::Parked) => true,
            Some(Waiting::Scatter(parts)) => parts.frames.is_empty(),
            Some(Waiting::Run { .. }) | None => false,
        }
    }
}

impl Parts {
    /// Does what can be done here, and has other servers do the rest. Returns whether all is done.
    fn dispatch(&mut self, context: &Context<'_>, links: &mut Links, waiter: Waiter) -> bool {
        self.moved.drain(..).for_each(|(partition, place)| context.learn(partition, place));
        let mut groups: Vec<(u16, Vec<usize>)> = Vec::new();
        for (at, entry) in self.scatter.entries.iter().enumerate() {
            if self.replies[at].is_some() {
                continue;
            }
            match context.access.store.partitions()[entry.partition].presence() {
                Presence::Here => {
                    let mut reply = Replies::new(Vec::new());
                    let (counters, is_fetched) = (context.access.counters, self.fetching.contains(&at));
                    let hits_before = counters.get_hits.get();
                    match elsewhere::execute((entry.partition, entry.task()), context, &mut reply) {
                        EntryEnd::Done => {
                            if is_fetched {
                                counters.fetched_hits.add(counters.get_hits.get() - hits_before);
                            }
                            self.replies[at] = Some(reply.parts().concat());
                        }
                        EntryEnd::NoRoom if !is_fetched => self.fetching.push(at),
                        EntryEnd::Elsewhere | EntryEnd::NoRoom => {}
                        EntryEnd::Malformed => self.is_malformed = true,
                    }
                }
                Presence::Elsewhere(place) => {
                    match groups
                        .iter_mut()
                        .find(|(server, ats)| *server == place.server && ats.len() < ENTRIES_MAX)
                    {
                        Some((_, ats)) => ats.push(at),
                        None => groups.push((place.server, vec![at])),
                    }
                }
                Presence::Leaving | Presence::Unknown => {}
            }
        }
        for (server, ats) in groups {
            let entries: Vec<_> = ats
                .iter()
                .map(|at| (self.scatter.entries[*at].partition, self.scatter.entries[*at].task()))
                .collect();
            if let Some(frame) = links.forward(server, waiter, &entries) {
                self.frames.push((frame, ats));
            }
        }
        self.replies.iter().all(Option::is_some)
    }

    fn note_end(&mut self, number: u64, end: FrameEnd) {
        let Some(found) = self.frames.iter().position(|(frame, _)| *frame == number) else { return };
        let (_, ats) = self.frames.remove(found);
        self.is_not_sent |= end == FrameEnd::NotSent;
        // Parts only read, flush or delete, so they can be done twice if an answer was lost.
        if let FrameEnd::Answered(replies, end) = end {
            self.is_malformed |= end == AnswerEnd::Malformed;
            if let AnswerEnd::Moved(partition, place) = end {
                self.moved.push((partition, place));
            }
            for (at, reply) in ats.into_iter().zip(replies) {
                self.replies[at] = Some(reply);
            }
        }
    }
}

/// Writes the replies to requests that were forwarded. Returns how many bytes of the input they
/// were, and whether the next one is malformed.
fn finish_run<'p>(
    input: &[u8],
    lens: &[usize],
    end: &FrameEnd,
    session: &mut Session,
    context: &Context<'p>,
    out: &mut Replies<'p>,
) -> (usize, bool) {
    let protocol = session.protocol();
    let used = match end {
        FrameEnd::Answered(replies, end) => {
            if let AnswerEnd::Moved(partition, place) = end {
                context.learn(*partition, *place);
            }
            for reply in replies.iter().take(lens.len()) {
                out.push(reply);
            }
            lens.iter().take(replies.len()).sum()
        }
        FrameEnd::NotSent => 0,
        FrameEnd::Lost => lost(protocol, input, lens, out),
    };
    if used > 0 {
        session.skip();
    }
    (used, matches!(end, FrameEnd::Answered(_, AnswerEnd::Malformed)))
}

/// Requests that only read are sent again; others may have taken effect.
fn lost(protocol: Protocol, input: &[u8], lens: &[usize], out: &mut Replies<'_>) -> usize {
    let mut requests = Vec::new();
    let mut at = 0;
    for len in lens {
        requests.push(&input[at..at + len]);
        at += len;
    }
    if requests.iter().all(|request| is_repeatable(protocol, request)) {
        return 0;
    }
    for request in requests {
        out.push(&error_reply(protocol, request, LOST));
    }
    at
}
