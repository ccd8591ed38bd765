//! Requests and replies of a connection.
//!
//! A [`Session`] is the state of a connection between requests. It takes the bytes that have
//! arrived and does what the first request in them asks for. It knows no sockets.

mod authentication;
mod binary;
pub mod elsewhere;
mod get;
pub mod lookahead;
mod meta;
mod metadump;
pub mod peek;
mod replies;
mod stats;
mod text;
pub mod unavailable;

use std::sync::atomic::AtomicU32;

use self::elsewhere::{Entry, EntryEnd, Scatter, Task};
use metadump::DumpPosition;
pub use replies::Replies;
pub use stats::ServerReport;
pub use text::PROTOCOL_VERSION;

use aquifer_mutation::mutations;

use crate::operations::Access;
use crate::protocol::binary::REQUEST_MAGIC;
use crate::store::Until;
use crate::store::presence::Place;
use crate::tokens::Tokens;

mutations! {
    /// Checks of requests that their fuzz target leaves out on purpose.
    pub enum Mutation {
        /// The end of a value is not looked at.
        AcceptAnyEnd,
    }
}

/// A line without its end that is longer than this ends the connection, unless it may be a `get`
/// with many keys.
const LINE_MAX: usize = 2048;
/// A `get` that is longer than this ends the connection.
const GET_LINE_MAX: usize = 8 << 20;
/// Spaces at the start of a long `get`.
const LEADING_SPACES_MAX: usize = 100;
/// Most bytes of replies that are gathered before they are sent, without the last reply.
pub const REPLIES_MAX: usize = 256 << 10;

/// What became of the first bytes of the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// So many bytes were used; more may follow.
    Used(usize),
    /// The request is not complete: it has at least this many bytes.
    Incomplete(usize),
    /// The request is to be tried again. Nothing was done.
    Again(Until),
    /// The request is for a key whose partition is not here. It has so many bytes, and nothing was
    /// done.
    Elsewhere {
        /// The partition.
        partition: usize,
        /// Bytes of the request.
        len: usize,
    },
    /// The request concerns other servers, too: see [`Session::pop_scatter`].
    Scatter,
    /// The connection is to be closed when its replies are sent.
    Close,
}

/// What the sessions of a server share.
#[derive(Debug)]
pub struct Service {
    /// What clients must know to be served, if anything.
    pub tokens: Option<Tokens>,
    /// The protocol of all connections, or none if the first byte shows it.
    pub protocol: Option<Protocol>,
    /// Whether clients may flush all items.
    pub flush_is_enabled: bool,
    /// Whether clients may list keys.
    pub dump_is_enabled: bool,
    /// Whether clients may stop the server.
    pub shutdown_is_enabled: bool,
    /// How much the server logs; clients can change it.
    pub verbosity: AtomicU32,
    /// Statistics.
    pub report: Box<dyn ServerReport>,
}

/// What a session needs during a turn of its thread.
#[derive(Clone, Copy, Debug)]
pub struct Context<'p> {
    /// The items.
    pub access: Access<'p>,
    /// What sessions share.
    pub service: &'p Service,
}

/// The state of a connection between requests.
#[derive(Debug, Default)]
pub struct Session {
    /// Bytes of a refused value that are still to come.
    skip_bytes: usize,
    /// Where a `get` goes on, in its line.
    get_offset: usize,
    /// The position at which a list of keys resumes.
    dump: Option<DumpPosition>,
    /// Bytes of a line without an end that were looked at.
    searched_bytes: usize,
    /// Whether the client has shown a token.
    is_authenticated: bool,
    /// The protocol, once the first byte has shown it.
    protocol: Option<Protocol>,
    /// A request that the last step has divided.
    scatter: Option<Box<Scatter>>,
}

/// A protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// Text commands and meta commands.
    Text,
    /// The binary protocol.
    Binary,
}

impl Protocol {
    fn of(first: u8) -> Self {
        if first == REQUEST_MAGIC { Self::Binary } else { Self::Text }
    }
}

/// What became of a command that flushes all items.
enum Flushed {
    /// Clients may not.
    Refused,
    /// It is done.
    Done,
    /// It is left to do on other servers.
    Elsewhere(Vec<Entry>),
}

impl Context<'_> {
    /// Notes what another server says of a partition that is not here.
    pub fn learn(&self, partition: usize, place: Place) {
        if let Some(partition) = self.access.store.partitions().get(partition) {
            partition.learn(place);
        }
    }

    /// Flushes all items, now or at a time that a client says.
    fn flush_all(&self, exptime: i32) -> Flushed {
        self.access.counters.cmd_flush.add(1);
        if !self.service.flush_is_enabled {
            return Flushed::Refused;
        }
        let task = if exptime <= 0 {
            Task::Flush(0)
        } else {
            // A time that has passed takes back an earlier command, and flushes nothing.
            match self.access.expires_s(exptime).saturating_sub(self.access.now_s) {
                0 => Task::CancelFlush,
                seconds => Task::Flush(seconds),
            }
        };
        let mut left = Vec::new();
        for partition in 0..self.access.store.partitions().len() {
            let end = elsewhere::execute((partition, task), self, &mut Replies::new(Vec::new()));
            if end != EntryEnd::Done {
                left.push(Entry::new(partition, task));
            }
        }
        if left.is_empty() { Flushed::Done } else { Flushed::Elsewhere(left) }
    }
}

impl Session {
    /// A session of a peer that has proven itself, and that speaks this protocol.
    fn trusted(protocol: Protocol) -> Self {
        Self { is_authenticated: true, protocol: Some(protocol), ..Self::default() }
    }

    /// Whether the next byte begins a request.
    #[must_use]
    pub fn is_at_request(&self) -> bool {
        self.skip_bytes == 0 && self.get_offset == 0 && self.dump.is_none()
    }

    /// The protocol, once the first byte has shown it.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol.unwrap_or(Protocol::Text)
    }

    /// Does what the first request in `input` asks for. `input` is not empty.
    #[inline]
    pub fn step<'p>(&mut self, input: &'p [u8], context: &Context<'p>, out: &mut Replies<'p>) -> Step {
        if self.skip_bytes > 0 {
            let skipped = self.skip_bytes.min(input.len());
            self.skip_bytes -= skipped;
            return Step::Used(skipped);
        }
        if out.len() >= REPLIES_MAX {
            return Step::Again(Until::NextTurn);
        }
        if let Some(tokens) = &context.service.tokens
            && !self.is_authenticated
        {
            return self.authenticate(input, tokens, context, out);
        }
        let service = context.service;
        let protocol = self.protocol.or(service.protocol).unwrap_or_else(|| Protocol::of(input[0]));
        self.protocol = Some(protocol);
        if protocol == Protocol::Binary {
            return self.binary(input, context, out);
        }
        let Some(newline) = memchr::memchr(b'\n', &input[self.searched_bytes..]) else {
            return self.incomplete_line(input);
        };
        let newline = self.searched_bytes + newline;
        let step = self.line(input, newline, context, out);
        // A request that is tried again has the same line, whose end is found again at once.
        self.searched_bytes = if matches!(step, Step::Used(_)) { 0 } else { newline };
        step
    }

    fn incomplete_line(&mut self, input: &[u8]) -> Step {
        self.searched_bytes = input.len();
        if input.len() > LINE_MAX {
            let spaces = input.iter().take_while(|byte| **byte == b' ').count();
            let text = &input[spaces..];
            let may_be_get = text.starts_with(b"get ") || text.starts_with(b"gets ");
            if spaces > LEADING_SPACES_MAX || !may_be_get || input.len() > GET_LINE_MAX {
                return Step::Close;
            }
        }
        Step::Incomplete(input.len() + 1)
    }
}
