//! Requests and replies of a connection.
//!
//! A [`Session`] is the state of a connection between requests. [`Session::step`] executes the
//! first request in the received bytes. A session knows no sockets.

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
        /// The end of a value is not checked.
        AcceptAnyEnd,
    }
}

/// Longest incomplete line in bytes. A longer one ends the connection, unless it may be a `get`
/// with many keys.
const LINE_MAX: usize = 2048;
/// Longest line of a `get` in bytes. A longer one ends the connection.
const GET_LINE_MAX: usize = 8 << 20;
/// Most spaces at the start of a long `get`.
const LEADING_SPACES_MAX: usize = 100;
/// Bytes of replies at which a turn executes no more requests until the replies are sent.
pub const REPLIES_MAX: usize = 256 << 10;

/// The result of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The number of used bytes; more requests may follow.
    Used(usize),
    /// The request is not complete: it has at least this many bytes.
    Incomplete(usize),
    /// The request must be retried. Nothing was changed.
    Again(Until),
    /// The request is for a key whose partition is not on this server. Nothing was changed.
    Elsewhere {
        /// The partition.
        partition: usize,
        /// Bytes of the request.
        len: usize,
    },
    /// The request also concerns other servers: see [`Session::pop_scatter`].
    Scatter,
    /// The connection must be closed once its replies are sent.
    Close,
}

/// The state that the sessions of a server share.
#[derive(Debug)]
pub struct Service {
    /// The tokens of which a client must show one, if clients must authenticate.
    pub tokens: Option<Tokens>,
    /// The protocol of all connections, or none if the first byte of each determines it.
    pub protocol: Option<Protocol>,
    /// Whether clients may flush all items.
    pub flush_is_enabled: bool,
    /// Whether clients may list keys.
    pub dump_is_enabled: bool,
    /// Whether clients may stop the server.
    pub shutdown_is_enabled: bool,
    /// The verbosity of the log, which clients can change.
    pub verbosity: AtomicU32,
    /// The statistics and control of the server.
    pub report: Box<dyn ServerReport>,
}

/// The state that a session uses during a turn of its thread.
#[derive(Clone, Copy, Debug)]
pub struct Context<'p> {
    /// The items.
    pub access: Access<'p>,
    /// The state that sessions share.
    pub service: &'p Service,
}

/// The state of a connection between requests.
#[derive(Debug, Default)]
pub struct Session {
    /// Bytes of a refused value that are not yet received and must be skipped.
    skip_bytes: usize,
    /// The offset in its line at which a `get` continues, or 0.
    get_offset: usize,
    /// The position at which a list of keys continues.
    dump: Option<DumpPosition>,
    /// Bytes of an incomplete line that were searched for its end.
    searched_bytes: usize,
    /// Whether the client has shown a token.
    is_authenticated: bool,
    /// The protocol, once the first byte has determined it.
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

/// The result of a command that flushes all items.
enum Flushed {
    /// Clients are not allowed to flush.
    Refused,
    /// All partitions were flushed.
    Done,
    /// Other servers must flush these partitions.
    Elsewhere(Vec<Entry>),
}

impl Context<'_> {
    /// Notes the place of a partition that another server has answered.
    pub fn learn(&self, partition: usize, place: Place) {
        if let Some(partition) = self.access.store.partitions().get(partition) {
            partition.learn(place);
        }
    }

    /// Flushes all items now, or schedules the flush for the time of a client.
    fn flush_all(&self, exptime: i32) -> Flushed {
        self.access.counters.cmd_flush.add(1);
        if !self.service.flush_is_enabled {
            return Flushed::Refused;
        }
        let task = if exptime <= 0 {
            Task::Flush(0)
        } else {
            // A time that has passed cancels an earlier command, and flushes nothing.
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
    /// A session for a request that an authenticated peer has forwarded.
    fn trusted(protocol: Protocol) -> Self {
        Self { is_authenticated: true, protocol: Some(protocol), ..Self::default() }
    }

    /// Whether the next byte begins a request.
    #[must_use]
    pub fn is_at_request(&self) -> bool {
        self.skip_bytes == 0 && self.get_offset == 0 && self.dump.is_none()
    }

    /// The protocol; [`Protocol::Text`] before the first byte.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol.unwrap_or(Protocol::Text)
    }

    /// Executes the first request in `input`, which must not be empty.
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
        // A request that is retried has the same line, whose end is found at once.
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
