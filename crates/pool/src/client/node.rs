//! One node as a client sees it: its endpoint, its layout, and what is remembered of its words.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_fabric::{
    Completion, Endpoint, Key, KeyEntry, Late, LocalKey, LocalSlice, Memory, PostError, RemoteAddr, Tenant,
    Verb, Work, WorkError,
};

use super::{Extent, NodeId, POOL_WORK_ID};
use crate::cache::{NodeCache, Nonces};
use crate::error::{FormatError, PoolError};
use crate::layout::{HEADER_BYTES, Layout};
use crate::link::{Kept, Link};
use crate::op::{
    Action, Grant, Machine, OpError, READ_WORDS_MAX, Step, StepResult, Strikes, WordAt, Writes, word_of,
};
use crate::size::{CHUNK_BYTES, SECTION_SPANS};
use crate::word::record_of;

/// Room for the largest reply: a header, or [`READ_WORDS_MAX`] words.
const REPLY_BYTES: usize = HEADER_BYTES;
/// Room for replies, and after it for a word that is written.
const WORDS_BYTES: usize = 2 * REPLY_BYTES;
/// As the length of a READ.
const HEADER_LEN: u32 = 4096;
const _: () = assert!(HEADER_LEN as usize == HEADER_BYTES);
const _: () = assert!(READ_WORDS_MAX as usize * 8 <= REPLY_BYTES);
/// Polls before the processor is offered to others.
const SPINS_MAX: u32 = 256;
/// An endpoint over a network is asked again after so long.
const PATIENCE: Duration = Duration::from_millis(20);
/// Most operations of one action.
const BATCH_MAX: usize = Strikes::MAX;
const _: () = assert!(BATCH_MAX >= Writes::PARTS_MAX);
/// Completions taken at a time.
const POLL_MAX: usize = 32;

#[derive(Debug)]
pub(super) struct Node {
    id: NodeId,
    wire: Wire,
    cache: NodeCache,
    words: Vec<u64>,
    is_given_up: bool,
}

/// The way to the node's memory.
#[derive(Debug)]
struct Wire {
    endpoint: Box<dyn Endpoint>,
    kept: Arc<Kept>,
    layout: Layout,
    base: u64,
    key: Key,
    reply: Arc<Memory>,
    reply_key: LocalKey,
    next_id: u64,
    batch: Vec<Work>,
    outcomes: [u64; BATCH_MAX],
    polled: Vec<Completion>,
    others: Vec<Completion>,
}

/// Why an operation came to nothing.
#[derive(Debug)]
pub(super) enum Failure {
    Op(OpError),
    Work(WorkError),
}

impl Failure {
    /// The error, told of this extent.
    pub(super) fn of(self, node: NodeId, addr: u64, bytes: u64) -> PoolError {
        match self {
            Self::Work(cause) => lost(node, cause),
            Self::Op(OpError::Full) => PoolError::Full { node, bytes },
            Self::Op(OpError::NotAllocated) => PoolError::NotAllocated { node, addr, bytes },
            Self::Op(OpError::NotOurs(owner)) => PoolError::NotOurs { node, addr, owner },
            Self::Op(OpError::Busy { attempts }) => PoolError::Busy { node, attempts },
            Self::Op(OpError::Damaged { at, word, cause }) => PoolError::Damaged { node, at, word, cause },
        }
    }
}

/// The node, or the way to it, failed.
fn lost(node: NodeId, cause: WorkError) -> PoolError {
    match cause {
        WorkError::Away => PoolError::Away { node },
        cause => PoolError::NodeGone { node, cause },
    }
}

impl Node {
    /// Read the header and make sure that we understand it.
    pub(super) fn open(
        id: NodeId,
        endpoint: Box<dyn Endpoint>,
        salt: u64,
        (tenant, nonces): (Tenant, Nonces),
    ) -> Result<Self, PoolError> {
        let format = |cause| PoolError::Format { node: id, cause };
        let kept = Arc::new(Kept::default());
        let mut endpoint: Box<dyn Endpoint> = Box::new(Link::new(endpoint, Arc::clone(&kept)));
        let region = endpoint.regions().first().cloned().ok_or(format(FormatError::NoRegion))?;
        let header_bytes = HEADER_BYTES as u64;
        if region.len < header_bytes {
            return Err(format(FormatError::TooShort { needed: header_bytes, found: region.len }));
        }
        let reply = Memory::create("aquifer-pool-words", WORDS_BYTES)
            .map(Arc::new)
            .map_err(|cause| PoolError::LocalMemory { node: id, cause })?;
        let reply_key = endpoint
            .register_local(Arc::clone(&reply))
            .map_err(|cause| PoolError::Endpoint { node: id, cause })?;
        let layout = Layout::new(id.0, 1).map_err(format)?;
        let mut wire = Wire {
            endpoint,
            kept,
            layout,
            base: region.base,
            key: region.key,
            reply,
            reply_key,
            next_id: 0,
            batch: Vec::with_capacity(BATCH_MAX),
            outcomes: [0; BATCH_MAX],
            polled: Vec::with_capacity(POLL_MAX),
            others: Vec::new(),
        };
        wire.layout = wire.read_header(id)?;
        let layout = wire.layout;
        if layout.node() != id.0 {
            return Err(format(FormatError::OtherNode { found: layout.node() }));
        }
        if layout.region_bytes() > region.len {
            return Err(format(FormatError::TooShort { needed: layout.region_bytes(), found: region.len }));
        }
        let cache = NodeCache::new(&layout, salt, tenant, nonces);
        let mut node =
            Self { id, wire, cache, words: Vec::with_capacity(READ_WORDS_MAX as usize), is_given_up: false };
        node.refresh()?;
        Ok(node)
    }

    /// Take what has come of itself: what it was is kept for who waits for it, and a break shows.
    pub(super) fn tend(&mut self) {
        self.wire.poll_for(0, 0, &mut None);
        self.wire.kept.put_back(&mut self.wire.others);
    }

    /// Something is begun: if the connection is there, its break is another than that of one before it.
    pub(super) fn begin(&mut self) {
        let endpoint = &self.wire.endpoint;
        self.is_given_up &= endpoint.is_away() || endpoint.is_broken();
    }

    /// What of its connection may yet take effect when that is given up; said once.
    pub(super) fn take_late(&mut self) -> Option<Box<dyn Late>> {
        let late = self.wire.endpoint.late().filter(|_| !self.is_given_up)?;
        self.is_given_up = true;
        Some(late)
    }

    pub(super) const fn region_key(&self) -> Key {
        self.wire.key
    }

    pub(super) fn into_endpoint(self) -> Box<dyn Endpoint> {
        self.wire.endpoint
    }

    pub(super) fn endpoint(&mut self) -> &mut Box<dyn Endpoint> {
        &mut self.wire.endpoint
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.cache.free_chunks() * CHUNK_BYTES
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.cache.lent_chunks() * CHUNK_BYTES
    }

    pub(super) const fn sections(&self) -> u32 {
        self.wire.layout.sections()
    }

    pub(super) fn chunk_of(&self, addr: u64) -> Option<u32> {
        self.wire.layout.chunk_of(addr.checked_sub(self.wire.base)?)
    }

    /// Run a machine to its end.
    pub(super) fn run<M: Machine>(&mut self, mut machine: M) -> Result<M::Output, Failure> {
        let mut step = machine.start(&mut self.cache);
        loop {
            let action = match step {
                Step::Done(result) => return result.map_err(Failure::Op),
                Step::Post(action) => action,
            };
            let result = self.wire.carry_out(action, &mut self.words).map_err(Failure::Work)?;
            step = machine.step(&mut self.cache, result);
        }
    }

    /// Read all control words again.
    pub(super) fn refresh(&mut self) -> Result<(), PoolError> {
        let layout = self.wire.layout;
        for first in (0..layout.sections()).step_by(READ_WORDS_MAX as usize) {
            let count = READ_WORDS_MAX.min(layout.sections() - first);
            self.read(WordAt::Section(first), count)?;
            // A torn word is no damage; whoever wants to change it finds out.
            self.cache.learn_sections(first, count, StepResult::Words(&self.words)).ok();
        }
        for first in (0..layout.spans()).step_by(READ_WORDS_MAX as usize) {
            let count = READ_WORDS_MAX.min(layout.spans() - first);
            self.read(WordAt::Span(first), count)?;
            self.cache.learn_spans(first, count, StepResult::Words(&self.words)).ok();
        }
        Ok(())
    }

    /// The record in the word that an extent is taken in, as last seen.
    pub(super) fn seen_record(&self, grant: Grant) -> u32 {
        record_of(self.cache.word(word_of(grant)))
    }

    /// The same, as it is now.
    pub(super) fn record(&mut self, grant: Grant) -> Result<u32, PoolError> {
        let found = self.wire.carry_out(Action::Probe { at: word_of(grant) }, &mut self.words);
        let found = found.map_err(|cause| lost(self.id, cause))?;
        Ok(record_of(found.found()))
    }

    fn read(&mut self, at: WordAt, count: u32) -> Result<(), PoolError> {
        let done = self.wire.carry_out(Action::Read { at, count }, &mut self.words);
        done.map(drop).map_err(|cause| lost(self.id, cause))
    }

    /// What was granted there, with the key that it has now.
    pub(super) fn with_key(&mut self, grant: Grant) -> Result<Grant, PoolError> {
        self.read(WordAt::key_of(grant), 1)?;
        let key = self.words.first().map_or(Key(0), |entry| KeyEntry(*entry).key());
        Ok(Grant { key, ..grant })
    }

    /// What was granted, as users know it.
    pub(super) fn extent(&self, grant: Grant) -> Extent {
        let addr = self.wire.base + self.wire.layout.chunk_data_at(grant.chunk);
        Extent { node: self.id, addr, class: grant.class, key: grant.key }
    }
}

impl Wire {
    fn read_header(&mut self, id: NodeId) -> Result<Layout, PoolError> {
        let verb = self.read_verb(0, HEADER_LEN);
        self.execute(verb).map_err(|cause| lost(id, cause))?;
        let mut page = [0; HEADER_BYTES];
        self.reply.read(0, &mut page);
        Layout::open(&page).map_err(|cause| PoolError::Format { node: id, cause })
    }

    /// Do what a machine wants done; words that it reads go into `words`.
    fn carry_out<'a>(
        &mut self,
        action: Action,
        words: &'a mut Vec<u64>,
    ) -> Result<StepResult<'a>, WorkError> {
        match action {
            Action::Cas { at, expected, desired } => {
                self.execute(self.swap_verb(at, expected, desired)).map(StepResult::Found)
            }
            Action::CasThen { at, expected, desired, then } => {
                let swap = self.swap_verb(at, expected, desired);
                let read = self.read_verb(self.layout.word_at(then), 8);
                self.execute_all(&[swap, read])?;
                Ok(StepResult::FoundThen(self.outcomes[0], self.replied(0)))
            }
            Action::WriteThen { entry, value, at, expected, desired } => {
                let write = self.write_verb(0, entry, &mut std::iter::once(value));
                let swap = self.swap_verb(at, expected, desired);
                self.execute_all(&[write, swap])?;
                Ok(StepResult::Found(self.outcomes[1]))
            }
            Action::Probe { at } => {
                let remote = self.remote(self.layout.word_at(at));
                self.execute(Verb::FetchAdd { remote, add: 0 }).map(StepResult::Found)
            }
            Action::Read { at, count } => {
                assert!(
                    count <= READ_WORDS_MAX,
                    "a READ of {count} words is longer than the room for replies"
                );
                self.execute(self.read_verb(self.layout.word_at(at), count * 8))?;
                Ok(self.replies(count, words))
            }
            Action::Survey { section } => {
                let first = section * SECTION_SPANS;
                let spans = self.read_verb(self.layout.word_at(WordAt::Span(first)), SECTION_SPANS * 8);
                let keys = self.layout.word_at(WordAt::span_key(first));
                let keys = self.read_verb_to(u64::from(SECTION_SPANS) * 8, keys, SECTION_SPANS * 8);
                self.execute_all(&[spans, keys])?;
                Ok(self.replies(2 * SECTION_SPANS, words))
            }
            Action::Write(writes) => {
                let mut verbs = [None; Writes::PARTS_MAX];
                let mut at = 0;
                for (verb, part) in verbs.iter_mut().zip(writes.parts()) {
                    *verb = Some(self.write_verb(at, part.at, &mut part.words()));
                    at += part.count() * 8;
                }
                match verbs {
                    [Some(first), Some(second), Some(third)] => self.execute_all(&[first, second, third])?,
                    [Some(first), Some(second), None] => self.execute_all(&[first, second])?,
                    [Some(first), None, None] => self.execute_all(&[first])?,
                    _ => {}
                }
                Ok(StepResult::Written)
            }
            Action::Strike(strikes) => {
                let mut verbs = [Verb::FetchAdd { remote: self.remote(0), add: 0 }; Strikes::MAX];
                let mut count = 0;
                for (at, expected, desired) in strikes.swaps() {
                    verbs[count] = self.swap_verb(at, expected, desired);
                    count += 1;
                }
                self.execute_all(&verbs[..count])?;
                Ok(StepResult::Written)
            }
        }
    }

    fn replied(&self, number: usize) -> u64 {
        self.reply.atomic_u64(number * 8).load(Ordering::Relaxed)
    }

    fn replies<'a>(&self, count: u32, words: &'a mut Vec<u64>) -> StepResult<'a> {
        words.clear();
        words.extend((0..count as usize).map(|number| self.replied(number)));
        StepResult::Words(words)
    }

    fn swap_verb(&self, at: WordAt, expected: u64, desired: u64) -> Verb {
        Verb::CompareSwap { remote: self.remote(self.layout.word_at(at)), expected, desired }
    }

    /// A WRITE of words, which wait at this place behind the replies.
    fn write_verb(&self, place: usize, to: WordAt, words: &mut dyn Iterator<Item = u64>) -> Verb {
        let mut len = 0;
        for (number, word) in words.enumerate() {
            self.reply.write(REPLY_BYTES + place + number * 8, &word.to_le_bytes());
            len += 8;
        }
        let local = LocalSlice { key: self.reply_key, offset: (REPLY_BYTES + place) as u64, len };
        Verb::Write { local, remote: self.remote(self.layout.word_at(to)) }
    }

    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.base + offset, key: self.key }
    }

    fn read_verb(&self, offset: u64, len: u32) -> Verb {
        self.read_verb_to(0, offset, len)
    }

    fn read_verb_to(&self, place: u64, offset: u64, len: u32) -> Verb {
        let local = LocalSlice { key: self.reply_key, offset: place, len };
        Verb::Read { local, remote: self.remote(offset) }
    }

    /// Post one operation and wait for its end.
    fn execute(&mut self, verb: Verb) -> Result<u64, WorkError> {
        self.execute_all(&[verb])?;
        Ok(self.outcomes[0])
    }

    /// Post operations, in order, and wait for the end of all; what came of them is in `outcomes`. Completions of the user's work that come by are kept for it.
    fn execute_all(&mut self, verbs: &[Verb]) -> Result<(), WorkError> {
        let first = self.next_id;
        let count = verbs.len() as u64;
        // Ids of one batch are neighbours.
        self.next_id = if first + 2 * count < POOL_WORK_ID { first + count } else { 0 };
        self.batch.clear();
        let work = |(verb, id)| Work { id: POOL_WORK_ID | id, verb, signalled: true };
        self.batch.extend(verbs.iter().copied().zip(first..).map(work));
        let (mut posted, mut ended, mut failed) = (0, 0, None);
        let mut spins = 0;
        while ended < verbs.len() {
            if posted < verbs.len() {
                posted += match self.endpoint.post(&self.batch[posted..]) {
                    Ok(()) => verbs.len() - posted,
                    Err(PostError::QueueFull { accepted }) => accepted,
                };
            }
            let broken = self.endpoint.is_broken();
            let before = ended;
            ended += self.poll_for(first, verbs.len(), &mut failed);
            if ended > before {
                continue;
            }
            // What is accepted completes, come what may; a broken endpoint that says nothing more never will.
            if broken && spins > SPINS_MAX {
                failed = failed.or(Some(WorkError::PeerGone));
                break;
            }
            self.endpoint.wait(PATIENCE);
            spins = pause(spins);
        }
        self.kept.put_back(&mut self.others);
        failed.map_or(Ok(()), Err)
    }

    /// Take completions; how many were of these ids. The first failure is noted.
    fn poll_for(&mut self, first: u64, count: usize, failed: &mut Option<WorkError>) -> usize {
        self.polled.clear();
        self.endpoint.poll(&mut self.polled, POLL_MAX);
        let mut ended = 0;
        for completion in self.polled.drain(..) {
            let Some(id) = completion.id.checked_sub(POOL_WORK_ID) else {
                self.others.push(completion);
                continue;
            };
            let number = id.checked_sub(first).and_then(|number| usize::try_from(number).ok());
            // Others are of a batch that was given up.
            let Some(number) = number.filter(|number| *number < count) else { continue };
            ended += 1;
            match completion.outcome {
                Ok(found) => self.outcomes[number] = found,
                Err(error) => *failed = failed.or(Some(error)),
            }
        }
        ended
    }
}

/// Spin for a while, then let others run.
fn pause(spins: u32) -> u32 {
    if spins < SPINS_MAX {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
    spins.saturating_add(1)
}
