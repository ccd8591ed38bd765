//! Executes actions of state machines over a node's endpoint, of one machine or of several
//! concurrently.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_fabric::{
    Completion, DrainHandle, Endpoint, Key, LocalKey, LocalSlice, Memory, PostError, RemoteAddr, Verb, Work,
    WorkError,
};

use super::node::connection_error;
use super::{NodeId, POOL_WORK_ID};
use crate::error::{FormatError, PoolError};
use crate::figures::{FIGURES_BYTES, NodeFigures};
use crate::layout::{HEADER_BYTES, Layout};
use crate::op::{Action, READ_WORDS_MAX, SURVEY_SECTIONS_MAX, StepResult, WordAccess};
use crate::shared_endpoint::{SharedEndpoint, SharedState};
use crate::size::{SECTION_SPANS, SPAN_CHUNKS};

/// Most state machines that run concurrently.
pub(super) const LANES_MAX: usize = 16;
/// Most words that one of several machines reads, or writes, in one action.
const LANE_WORDS: u32 = 2 * SECTION_SPANS;
/// Bytes of the buffer for the largest reply: a header, or [`READ_WORDS_MAX`] words.
const REPLY_BYTES: usize = HEADER_BYTES;
/// Offset of the words that a single machine writes.
const WRITTEN_AT: usize = REPLY_BYTES;
/// Offset of the buffers of several machines.
const LANES_AT: usize = 2 * REPLY_BYTES;
/// Bytes of the buffers of one of several machines.
const LANE_BYTES: usize = 2 * LANE_WORDS as usize * 8;
/// Bytes of local memory for all buffers.
const WORDS_BYTES: usize = LANES_AT + LANES_MAX * LANE_BYTES;
/// Length of the READ of the header.
const HEADER_LEN: u32 = 4096;
const _: () = assert!(HEADER_LEN as usize == HEADER_BYTES);
/// Length of the READ of a node's figures, in bytes.
const FIGURES_LEN: u32 = 40;
const _: () = assert!(FIGURES_LEN as usize == FIGURES_BYTES);
const _: () = assert!(READ_WORDS_MAX as usize * 8 <= REPLY_BYTES);
/// Polls before the thread yields the processor.
const SPINS_MAX: u32 = 256;
/// Longest wait between two polls of an endpoint that can wait, and the most that a pause of this
/// process counts of a node's [`AnswerTimeout`].
const WAIT_MAX: Duration = Duration::from_millis(20);
/// Most operations of a batch: each of several machines may revoke all keys of a span in one
/// action.
const BATCH_MAX: usize = SPAN_CHUNKS as usize * LANES_MAX;
const _: () = assert!(BATCH_MAX > SURVEY_SECTIONS_MAX as usize);
/// Most completions of one poll.
const POLL_MAX: usize = 32;

/// A monotonic clock.
pub trait Clock: Send + Sync + Debug {
    /// The time since any fixed moment.
    fn now(&self) -> Duration;
}

/// The time for which a client waits for the answer of a node, after which the node counts as away
/// ([`Endpoint::treat_as_away`]).
#[derive(Clone, Debug)]
pub struct AnswerTimeout {
    /// The time without an answer.
    pub time: Duration,
    /// The clock by which it is measured.
    pub clock: Arc<dyn Clock>,
}

/// The time for which a batch has had no answer.
#[derive(Debug)]
struct AnswerWait<'a> {
    answer_timeout: &'a AnswerTimeout,
    looked_at: Duration,
    waited: Duration,
    has_ended: bool,
}

impl<'a> AnswerWait<'a> {
    fn new(answer_timeout: &'a AnswerTimeout) -> Self {
        Self {
            answer_timeout,
            looked_at: answer_timeout.clock.now(),
            waited: Duration::ZERO,
            has_ended: false,
        }
    }

    fn restart(&mut self) {
        self.waited = Duration::ZERO;
        self.looked_at = self.answer_timeout.clock.now();
    }

    /// Returns true once, when the time has passed.
    fn is_over(&mut self) -> bool {
        let now = self.answer_timeout.clock.now();
        self.waited += now.saturating_sub(self.looked_at).min(WAIT_MAX);
        self.looked_at = now;
        let is_over = self.waited >= self.answer_timeout.time && !self.has_ended;
        self.has_ended |= is_over;
        is_over
    }
}

/// The buffers of a machine in local memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    reply_at: usize,
    written_at: usize,
    words_max: u32,
}

impl Buffers {
    /// The buffers of a single machine.
    pub const ALONE: Self = Self { reply_at: 0, written_at: WRITTEN_AT, words_max: READ_WORDS_MAX };

    /// The buffers of one of several machines.
    pub const fn lane(index: usize) -> Self {
        let reply_at = LANES_AT + index * LANE_BYTES;
        Self { reply_at, written_at: reply_at + LANE_BYTES / 2, words_max: LANE_WORDS }
    }
}

/// The connection to a node's region.
#[derive(Debug)]
pub(super) struct NodeConnection {
    endpoint: Box<dyn Endpoint>,
    shared: Arc<SharedState>,
    layout: Layout,
    base: u64,
    key: Key,
    /// Words that are read or written, in the buffers of [`Buffers`].
    local: Arc<Memory>,
    local_key: LocalKey,
    next_id: u64,
    batch: Vec<Work>,
    /// The value that each operation of the last batch found.
    outcomes: [u64; BATCH_MAX],
    polled: Vec<Completion>,
    /// Completions of the user's operations.
    others: Vec<Completion>,
    /// The timeout of operations; `None` to use only the endpoint's.
    answer_timeout: Option<AnswerTimeout>,
}

impl NodeConnection {
    /// Reads the header, and checks that it is of this node and version.
    pub fn open(node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<Self, PoolError> {
        let format = |cause| PoolError::Format { node, cause };
        let shared = Arc::new(SharedState::default());
        let mut endpoint: Box<dyn Endpoint> = Box::new(SharedEndpoint::new(endpoint, Arc::clone(&shared)));
        let region = endpoint.regions().first().cloned().ok_or(format(FormatError::NoRegion))?;
        let header_bytes = HEADER_BYTES as u64;
        if region.len < header_bytes {
            return Err(format(FormatError::TooShort { needed: header_bytes, found: region.len }));
        }
        let local = Memory::private("aquifer-pool-words", WORDS_BYTES)
            .map(Arc::new)
            .map_err(|cause| PoolError::LocalMemory { node, cause })?;
        let local_key = endpoint
            .register_local(Arc::clone(&local))
            .map_err(|cause| PoolError::Endpoint { node, cause })?;
        let layout = Layout::new(node.0, 1).map_err(format)?;
        let mut connection = Self {
            endpoint,
            shared,
            layout,
            base: region.base,
            key: region.key,
            local,
            local_key,
            next_id: 0,
            batch: Vec::with_capacity(BATCH_MAX),
            outcomes: [0; BATCH_MAX],
            polled: Vec::with_capacity(POLL_MAX),
            others: Vec::new(),
            answer_timeout: None,
        };
        connection.layout = connection.read_header(node)?;
        if connection.layout.node() != node.0 {
            return Err(format(FormatError::OtherNode { found: connection.layout.node() }));
        }
        if connection.layout.region_bytes() > region.len {
            let needed = connection.layout.region_bytes();
            return Err(format(FormatError::TooShort { needed, found: region.len }));
        }
        Ok(connection)
    }

    fn read_header(&mut self, node: NodeId) -> Result<Layout, PoolError> {
        self.begin();
        self.push_read(0, 0, HEADER_LEN);
        self.execute().map_err(|cause| connection_error(node, cause))?;
        let mut page = [0; HEADER_BYTES];
        self.local.read(0, &mut page);
        Layout::decode(&page).map_err(|cause| PoolError::Format { node, cause })
    }

    /// Reads the node's figures; `None` if it was writing them.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn read_figures(&mut self) -> Result<Option<NodeFigures>, WorkError> {
        self.begin();
        self.push_read(0, self.layout.figures_at(), FIGURES_LEN);
        self.execute()?;
        let mut bytes = [0; FIGURES_BYTES];
        self.local.read(0, &mut bytes);
        Ok(NodeFigures::decode(&bytes))
    }

    /// Sets the time for which operations wait for an answer.
    pub fn set_answer_timeout(&mut self, answer_timeout: Option<AnswerTimeout>) {
        self.answer_timeout = answer_timeout;
    }

    /// The offsets of the region's parts.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The region's address.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// The region's key.
    pub const fn key(&self) -> Key {
        self.key
    }

    /// The endpoint for the user's operations.
    pub fn endpoint(&mut self) -> &mut Box<dyn Endpoint> {
        &mut self.endpoint
    }

    pub fn into_endpoint(self) -> Box<dyn Endpoint> {
        self.endpoint
    }

    /// A handle that drains the operations in flight of a connection that has broken. Returned once
    /// for each break; `None` if nothing is in flight.
    pub fn pop_drain(&mut self) -> Option<Box<dyn DrainHandle>> {
        self.endpoint.drain_handle().filter(|_| self.shared.pop_has_posted())
    }

    /// Polls the endpoint, to detect a break. The user's completions are kept.
    pub fn poll(&mut self) {
        self.poll_for(0, 0, &mut None);
        self.shared.put_back(&mut self.others);
    }

    /// Executes an action of a single machine; `words` holds the answer.
    pub fn execute_action<'a>(
        &mut self,
        action: &Action,
        words: &'a mut Vec<u64>,
    ) -> Result<StepResult<'a>, WorkError> {
        self.begin();
        let first = self.add(action, Buffers::ALONE);
        self.execute()?;
        Ok(self.answer(action, Buffers::ALONE, first, words))
    }

    /// Begins a batch. The actions that are added to it are posted together.
    pub fn begin(&mut self) {
        self.batch.clear();
    }

    /// Adds an action to the batch; returns the index of its first operation, for [`Self::answer`].
    ///
    /// # Panics
    /// If its words do not fit into the buffers.
    pub fn add(&mut self, action: &Action, buffers: Buffers) -> usize {
        let first = self.batch.len();
        let (mut reply_at, mut written_at) = (buffers.reply_at, buffers.written_at);
        let room = buffers.words_max as usize * 8;
        for access in action.accesses() {
            match *access {
                WordAccess::Cas { at, expected, desired } => {
                    let remote = self.remote(self.layout.word_at(at));
                    self.push(Verb::CompareSwap { remote, expected, desired });
                }
                WordAccess::Probe { at } => {
                    let remote = self.remote(self.layout.word_at(at));
                    self.push(Verb::FetchAdd { remote, add: 0 });
                }
                WordAccess::Read { at, count } => {
                    self.push_read(reply_at, self.layout.word_at(at), count * 8);
                    reply_at += count as usize * 8;
                }
                WordAccess::Write { at, .. } => {
                    let offset = written_at;
                    for word in access.written() {
                        self.local.write(written_at, &word.to_le_bytes());
                        written_at += 8;
                    }
                    let len = u32::try_from(written_at - offset).unwrap_or(u32::MAX);
                    let local = LocalSlice { key: self.local_key, offset: offset as u64, len };
                    self.push(Verb::Write { local, remote: self.remote(self.layout.word_at(at)) });
                }
            }
        }
        assert!(reply_at <= buffers.reply_at + room, "the buffer holds the words that are read");
        assert!(written_at <= buffers.written_at + room, "the buffer holds the words that are written");
        first
    }

    /// Collects the answer to an executed action in `words`; `first` is the index of its first
    /// operation.
    pub fn answer<'a>(
        &self,
        action: &Action,
        buffers: Buffers,
        first: usize,
        words: &'a mut Vec<u64>,
    ) -> StepResult<'a> {
        words.clear();
        let mut replied = 0;
        for (access, outcome) in action.accesses().iter().zip(&self.outcomes[first..]) {
            match access {
                WordAccess::Cas { .. } | WordAccess::Probe { .. } => words.push(*outcome),
                WordAccess::Read { count, .. } => {
                    let count = *count as usize;
                    words.extend((replied..replied + count).map(|index| self.replied(buffers, index)));
                    replied += count;
                }
                WordAccess::Write { .. } => {}
            }
        }
        StepResult(words)
    }

    fn replied(&self, buffers: Buffers, index: usize) -> u64 {
        self.local.atomic_u64(buffers.reply_at + index * 8).load(Ordering::Relaxed)
    }

    fn push(&mut self, verb: Verb) {
        // The id is set when the batch is posted.
        self.batch.push(Work { id: 0, verb, signalled: true });
    }

    fn push_read(&mut self, reply_at: usize, offset: u64, len: u32) {
        let local = LocalSlice { key: self.local_key, offset: reply_at as u64, len };
        self.push(Verb::Read { local, remote: self.remote(offset) });
    }

    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.base + offset, key: self.key }
    }

    /// Posts the batch in order and waits until all operations have completed. `outcomes` then has
    /// the value that each found. Completions of the user's operations are kept.
    pub fn execute(&mut self) -> Result<(), WorkError> {
        let first = self.next_id;
        let mut count = self.batch.len();
        // The ids of one batch are consecutive.
        self.next_id = if first + 2 * (count as u64) < POOL_WORK_ID { first + count as u64 } else { 0 };
        for (id, work) in (first..).zip(&mut self.batch) {
            work.id = POOL_WORK_ID | id;
        }
        let (mut posted, mut ended, mut failed) = (0, 0, None);
        let mut spins = 0;
        let answer_timeout = self.answer_timeout.clone();
        let mut wait = answer_timeout.as_ref().map(AnswerWait::new);
        while ended < count {
            if posted < count {
                posted += match self.endpoint.post(&self.batch[posted..]) {
                    Ok(()) => count - posted,
                    Err(PostError::QueueFull { accepted }) => accepted,
                };
            }
            let broken = self.endpoint.is_broken();
            let before = ended;
            ended += self.poll_for(first, count, &mut failed);
            if failed.is_some() {
                // Operations behind one that failed are not executed, and the rest is not posted.
                count = posted;
            }
            if ended > before {
                wait.iter_mut().for_each(AnswerWait::restart);
                continue;
            }
            if wait.as_mut().is_some_and(AnswerWait::is_over) {
                self.endpoint.treat_as_away();
                continue;
            }
            // Every accepted operation completes, but a broken endpoint may report nothing more.
            if broken && spins > SPINS_MAX {
                failed = failed.or(Some(WorkError::PeerGone));
                break;
            }
            self.endpoint.wait(WAIT_MAX);
            spins = pause(spins);
        }
        self.shared.put_back(&mut self.others);
        failed.map_or(Ok(()), Err)
    }

    /// Polls once. Returns the number of completed operations of the batch; stores the first
    /// failure.
    fn poll_for(&mut self, first: u64, count: usize, failed: &mut Option<WorkError>) -> usize {
        self.polled.clear();
        self.endpoint.poll(&mut self.polled, POLL_MAX);
        let mut ended = 0;
        for completion in self.polled.drain(..) {
            let Some(id) = completion.id.checked_sub(POOL_WORK_ID) else {
                self.others.push(completion);
                continue;
            };
            let index = id.checked_sub(first).and_then(|index| usize::try_from(index).ok());
            // Other ids are of an earlier batch that was abandoned.
            let Some(index) = index.filter(|index| *index < count) else { continue };
            ended += 1;
            match completion.outcome {
                Ok(found) => self.outcomes[index] = found,
                Err(error) => *failed = failed.or(Some(error)),
            }
        }
        ended
    }
}

/// Spins for [`SPINS_MAX`] polls, then yields the processor at each poll.
fn pause(spins: u32) -> u32 {
    if spins < SPINS_MAX {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
    spins.saturating_add(1)
}
