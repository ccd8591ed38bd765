//! The way to a node's memory: what machines want done becomes work for the endpoint, of one machine or of several at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer_fabric::{
    Completion, Endpoint, Key, Late, LocalKey, LocalSlice, Memory, PostError, RemoteAddr, Verb, Work,
    WorkError,
};

use super::node::lost;
use super::{NodeId, POOL_WORK_ID};
use crate::error::{FormatError, PoolError};
use crate::layout::{HEADER_BYTES, Layout};
use crate::link::{Kept, Link};
use crate::op::{Action, Chain, READ_WORDS_MAX, SURVEY_SECTIONS_MAX, StepResult, Strikes, WordAt, Writes};
use crate::size::{SECTION_SPANS, SPAN_CHUNKS};

/// Machines that may have something done at once.
pub(super) const LANES_MAX: usize = 16;
/// Words that one of several machines may read, or write, at once.
const LANE_WORDS: u32 = 2 * SECTION_SPANS;
/// Room for the largest reply: a header, or [`READ_WORDS_MAX`] words.
const REPLY_BYTES: usize = HEADER_BYTES;
/// Where there is room for what is written.
const WRITTEN_AT: usize = REPLY_BYTES;
const LANES_AT: usize = 2 * REPLY_BYTES;
const LANE_BYTES: usize = 2 * LANE_WORDS as usize * 8;
const WORDS_BYTES: usize = LANES_AT + LANES_MAX * LANE_BYTES;
/// As the length of a READ.
const HEADER_LEN: u32 = 4096;
const _: () = assert!(HEADER_LEN as usize == HEADER_BYTES);
const _: () = assert!(READ_WORDS_MAX as usize * 8 <= REPLY_BYTES);
/// Polls before the processor is offered to others.
const SPINS_MAX: u32 = 256;
/// An endpoint over a network is asked again after so long.
const PATIENCE: Duration = Duration::from_millis(20);
/// Most operations at once.
const BATCH_MAX: usize = (Strikes::MAX + 1) * LANES_MAX;
/// As the length of a READ of the entries that belong to strikes.
const STRIKES_LEN: u32 = SPAN_CHUNKS * 8;
const _: () = assert!(Strikes::MAX as u64 == SPAN_CHUNKS as u64 && SPAN_CHUNKS <= LANE_WORDS);
const _: () = assert!(Strikes::MAX > Writes::PARTS_MAX);
const _: () = assert!(BATCH_MAX >= Chain::MAX);
const _: () = assert!(BATCH_MAX > SURVEY_SECTIONS_MAX as usize);
/// Completions taken at a time.
const POLL_MAX: usize = 32;

/// Where a machine's words are on this side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    reply_at: usize,
    written_at: usize,
    words_max: u32,
}

impl Place {
    /// For a machine that is alone.
    pub const ALONE: Self = Self { reply_at: 0, written_at: WRITTEN_AT, words_max: READ_WORDS_MAX };

    /// For one of several.
    pub const fn lane(number: usize) -> Self {
        let reply_at = LANES_AT + number * LANE_BYTES;
        Self { reply_at, written_at: reply_at + LANE_BYTES / 2, words_max: LANE_WORDS }
    }
}

/// See above.
#[derive(Debug)]
pub(super) struct Wire {
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

impl Wire {
    /// Read the header and make sure that we understand it.
    pub fn open(node: NodeId, endpoint: Box<dyn Endpoint>) -> Result<Self, PoolError> {
        let format = |cause| PoolError::Format { node, cause };
        let kept = Arc::new(Kept::default());
        let mut endpoint: Box<dyn Endpoint> = Box::new(Link::new(endpoint, Arc::clone(&kept)));
        let region = endpoint.regions().first().cloned().ok_or(format(FormatError::NoRegion))?;
        let header_bytes = HEADER_BYTES as u64;
        if region.len < header_bytes {
            return Err(format(FormatError::TooShort { needed: header_bytes, found: region.len }));
        }
        let reply = Memory::create("aquifer-pool-words", WORDS_BYTES)
            .map(Arc::new)
            .map_err(|cause| PoolError::LocalMemory { node, cause })?;
        let reply_key = endpoint
            .register_local(Arc::clone(&reply))
            .map_err(|cause| PoolError::Endpoint { node, cause })?;
        let layout = Layout::new(node.0, 1).map_err(format)?;
        let mut wire = Self {
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
        wire.layout = wire.read_header(node)?;
        if wire.layout.node() != node.0 {
            return Err(format(FormatError::OtherNode { found: wire.layout.node() }));
        }
        if wire.layout.region_bytes() > region.len {
            let needed = wire.layout.region_bytes();
            return Err(format(FormatError::TooShort { needed, found: region.len }));
        }
        Ok(wire)
    }

    fn read_header(&mut self, node: NodeId) -> Result<Layout, PoolError> {
        self.begin();
        self.push_read(0, 0, HEADER_LEN);
        self.execute().map_err(|cause| lost(node, cause))?;
        let mut page = [0; HEADER_BYTES];
        self.reply.read(0, &mut page);
        Layout::open(&page).map_err(|cause| PoolError::Format { node, cause })
    }

    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The region's first address.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// The region's key.
    pub const fn key(&self) -> Key {
        self.key
    }

    pub fn endpoint(&mut self) -> &mut Box<dyn Endpoint> {
        &mut self.endpoint
    }

    pub fn into_endpoint(self) -> Box<dyn Endpoint> {
        self.endpoint
    }

    pub fn is_down(&self) -> bool {
        self.endpoint.is_away() || self.endpoint.is_broken()
    }

    pub fn late(&mut self) -> Option<Box<dyn Late>> {
        self.endpoint.late()
    }

    /// Take what has come of itself: what it was is kept for who waits for it, and a break shows.
    pub fn tend(&mut self) {
        self.poll_for(0, 0, &mut None);
        self.kept.put_back(&mut self.others);
    }

    /// Do what a machine wants done; words that it reads go into `words`.
    pub fn carry_out<'a>(
        &mut self,
        action: Action,
        words: &'a mut Vec<u64>,
    ) -> Result<StepResult<'a>, WorkError> {
        self.begin();
        let first = self.add(&action, Place::ALONE);
        self.execute()?;
        Ok(self.answer(&action, Place::ALONE, first, words))
    }

    /// What is added from now on is done at once.
    pub fn begin(&mut self) {
        self.batch.clear();
    }

    /// One more thing to be done; the number of its first operation, for [`Self::answer`].
    ///
    /// # Panics
    /// If there is no room for its words at that place: the caller's machines do no such things.
    pub fn add(&mut self, action: &Action, place: Place) -> usize {
        let first = self.batch.len();
        let reply_at = place.reply_at;
        match *action {
            Action::Cas { at, expected, desired } => self.push_swap(at, expected, desired),
            Action::CasThen { at, expected, desired, then } => {
                self.push_swap(at, expected, desired);
                self.push_read(reply_at, self.layout.word_at(then), 8);
            }
            Action::CasProbe { at, expected, desired, probe } => {
                self.push_swap(at, expected, desired);
                self.push_probe(probe);
            }
            Action::WriteThen { writes, at, expected, desired } => {
                self.push_writes(&writes, place);
                self.push_swap(at, expected, desired);
            }
            Action::PlantThen { plant, at, expected, desired } => {
                self.push_parts(plant.writes(), place);
                self.push_swap(at, expected, desired);
            }
            Action::Chain(chain) => {
                for (at, expected, desired) in chain.swaps() {
                    self.push_swap(at, expected, desired);
                }
            }
            Action::Probe { at } => self.push_probe(at),
            Action::Read { at, count } => {
                assert!(count <= place.words_max, "{count} words are longer than their room");
                self.push_read(reply_at, self.layout.word_at(at), count * 8);
            }
            Action::Survey { section, count } => {
                assert!(
                    2 * count * SECTION_SPANS <= place.words_max,
                    "{count} sections are longer than their room"
                );
                let spans_bytes = SECTION_SPANS * 8;
                let spans = self.layout.word_at(WordAt::Span(section * SECTION_SPANS));
                self.push_read(reply_at, spans, count * spans_bytes);
                for (number, section) in (count..).zip(section..section + count) {
                    let keys = self.layout.word_at(WordAt::span_key(section * SECTION_SPANS));
                    self.push_read(reply_at + (number * spans_bytes) as usize, keys, spans_bytes);
                }
            }
            Action::Write(writes) => self.push_writes(&writes, place),
            Action::Strike(strikes) => self.push_strikes(strikes),
            Action::StrikeThen(strikes) => {
                self.push_strikes(strikes);
                self.push_read(reply_at, self.layout.word_at(strikes.log()), STRIKES_LEN);
            }
        }
        first
    }

    /// What came of an action whose operations were done, from the one numbered `first` on; words that it has read go into `words`.
    pub fn answer<'a>(
        &self,
        action: &Action,
        place: Place,
        first: usize,
        words: &'a mut Vec<u64>,
    ) -> StepResult<'a> {
        let mut replies = |count: u32| {
            words.clear();
            words.extend((0..count as usize).map(|number| self.replied(place, number)));
        };
        match *action {
            Action::Cas { .. } | Action::Probe { .. } => StepResult::Found(self.outcomes[first]),
            Action::CasThen { .. } => StepResult::FoundThen(self.outcomes[first], self.replied(place, 0)),
            Action::CasProbe { .. } => StepResult::FoundThen(self.outcomes[first], self.outcomes[first + 1]),
            Action::WriteThen { writes, .. } => {
                StepResult::Found(self.outcomes[first + writes.parts().count()])
            }
            Action::PlantThen { plant, .. } => {
                StepResult::Found(self.outcomes[first + plant.writes().count()])
            }
            Action::Chain(chain) => {
                StepResult::Chained(chain.outcome(self.outcomes[first..].iter().copied()))
            }
            Action::Read { count, .. } => {
                replies(count);
                StepResult::Words(words)
            }
            Action::Survey { count, .. } => {
                replies(2 * count * SECTION_SPANS);
                StepResult::Words(words)
            }
            Action::Write(_) => StepResult::Written,
            Action::Strike(strikes) => {
                StepResult::Struck(strikes.struck(self.outcomes[first..].iter().copied()))
            }
            Action::StrikeThen(strikes) => {
                replies(STRIKES_LEN / 8);
                StepResult::StruckThen(strikes.struck(self.outcomes[first..].iter().copied()), words)
            }
        }
    }

    fn replied(&self, place: Place, number: usize) -> u64 {
        self.reply.atomic_u64(place.reply_at + number * 8).load(Ordering::Relaxed)
    }

    fn push(&mut self, verb: Verb) {
        // The id is given when it is posted.
        self.batch.push(Work { id: 0, verb, signalled: true });
    }

    fn push_probe(&mut self, at: WordAt) {
        let remote = self.remote(self.layout.word_at(at));
        self.push(Verb::FetchAdd { remote, add: 0 });
    }

    fn push_swap(&mut self, at: WordAt, expected: u64, desired: u64) {
        let remote = self.remote(self.layout.word_at(at));
        self.push(Verb::CompareSwap { remote, expected, desired });
    }

    fn push_strikes(&mut self, strikes: Strikes) {
        for (at, expected, desired) in strikes.swaps() {
            self.push_swap(at, expected, desired);
        }
    }

    fn push_read(&mut self, reply_at: usize, offset: u64, len: u32) {
        let local = LocalSlice { key: self.reply_key, offset: reply_at as u64, len };
        self.push(Verb::Read { local, remote: self.remote(offset) });
    }

    fn push_writes(&mut self, writes: &Writes, place: Place) {
        self.push_parts(writes.parts().map(|part| (part.at, part.words())), place);
    }

    fn push_parts(&mut self, parts: impl Iterator<Item = (WordAt, impl Iterator<Item = u64>)>, place: Place) {
        let mut at = place.written_at;
        for (first, words) in parts {
            let (offset, mut len) = (at as u64, 0);
            for word in words {
                assert!(
                    at < place.written_at + place.words_max as usize * 8,
                    "there is no room for what is written"
                );
                self.reply.write(at, &word.to_le_bytes());
                at += 8;
                len += 8;
            }
            let local = LocalSlice { key: self.reply_key, offset, len };
            self.push(Verb::Write { local, remote: self.remote(self.layout.word_at(first)) });
        }
    }

    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.base + offset, key: self.key }
    }

    /// Post what was added, in order, and wait for the end of all; what came of each is in `outcomes`. Completions of the user's work that come by are kept for it.
    pub fn execute(&mut self) -> Result<(), WorkError> {
        let first = self.next_id;
        let mut count = self.batch.len();
        // Ids of one batch are neighbours.
        self.next_id = if first + 2 * (count as u64) < POOL_WORK_ID { first + count as u64 } else { 0 };
        for (id, work) in (first..).zip(&mut self.batch) {
            work.id = POOL_WORK_ID | id;
        }
        let (mut posted, mut ended, mut failed) = (0, 0, None);
        let mut spins = 0;
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
                // What comes after something that was not done is not done either.
                count = posted;
            }
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
