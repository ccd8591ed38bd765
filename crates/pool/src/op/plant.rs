//! What a host writes into the entries of a span that it is about to open: whose the span is; and a key and a record for each extent of one size that can be taken
//! there (A3). So each of them takes one CAS from then on, as long as others take nothing in between.

use aquifer_fabric::{Host, Key, KeyEntry, Tenant};

use super::{Action, WordAt};
use crate::cache::NodeCache;
use crate::size::{SPAN_CHUNKS, SizeClass};
use crate::word::{LogEntry, Run, SpanWord};

const CHUNKS: usize = SPAN_CHUNKS as usize;

/// See above.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Plant {
    span: u32,
    host: Host,
    tenant: Tenant,
    class: SizeClass,
    /// By chunk; none where no extent of that size begins.
    keys: [Key; CHUNKS],
    /// Of the records; they follow one another.
    first_nonce: u32,
    has_owner: bool,
    has_records: bool,
}

impl std::fmt::Debug for Plant {
    /// Keys stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Plant in span {} for {:?} of {:?}", self.span, self.class, self.host)
    }
}

/// Which entries.
#[derive(Clone, Copy)]
enum Part {
    Owner,
    Keys,
    Records,
}

impl Plant {
    /// For extents of this size, which is within a span.
    pub(super) fn new(host: Host, span: u32, class: SizeClass, cache: &mut NodeCache) -> Self {
        let mut keys = [Key(0); CHUNKS];
        keys.iter_mut().step_by(class.chunks() as usize).for_each(|key| *key = cache.fresh_key(class));
        let first_nonce = cache.take_nonces(SPAN_CHUNKS);
        let tenant = cache.tenant();
        Self { span, host, tenant, class, keys, first_nonce, has_owner: true, has_records: true }
    }

    /// Faults, for tests: what is left out.
    pub(super) const fn without(self, owner: bool, records: bool) -> Self {
        Self { has_owner: self.has_owner && !owner, has_records: self.has_records && !records, ..self }
    }

    /// The key of what begins with that chunk of the span.
    pub(super) fn key(&self, run: Run) -> Key {
        self.keys[usize::from(run.first())]
    }

    pub(crate) const fn span(&self) -> u32 {
        self.span
    }

    /// What can be taken in the span, and by which key it opens.
    pub(crate) fn places(&self) -> impl Iterator<Item = (u32, Key)> {
        (self.span * SPAN_CHUNKS..).zip(self.keys).filter(|(_, key)| *key != Key(0))
    }

    /// What is written: the first of neighbouring entries, and their values.
    pub fn writes(&self) -> impl Iterator<Item = (WordAt, impl Iterator<Item = u64>)> {
        let chunk = self.span * SPAN_CHUNKS;
        let parts = [
            self.has_owner.then_some((WordAt::span_key(self.span), Part::Owner, 1)),
            Some((WordAt::chunk_key(chunk), Part::Keys, CHUNKS)),
            self.has_records.then_some((WordAt::chunk_entry(chunk), Part::Records, CHUNKS)),
        ];
        let plant = *self;
        let words = move |part, count| (0..count).map(move |place| plant.word(part, place));
        parts.into_iter().flatten().map(move |(at, part, count)| (at, words(part, count)))
    }

    fn word(&self, part: Part, place: usize) -> u64 {
        let key = self.keys[place];
        match part {
            Part::Owner => KeyEntry::shut(self.tenant).0,
            _ if key == Key(0) => 0,
            Part::Keys => KeyEntry::opened(key, self.tenant).0,
            Part::Records => {
                let place = u32::try_from(place).unwrap_or(0);
                let run = Run::new(u8::try_from(place).unwrap_or(0), self.class.order());
                let word = SpanWord::default().take(run.unwrap_or(Run::single(0)), self.host);
                LogEntry::of(word.0, NodeCache::nonce_of(self.host, self.first_nonce.wrapping_add(place))).0
            }
        }
    }

    /// Write it, then compare and swap.
    pub(super) const fn then(self, at: WordAt, expected: u64, desired: u64) -> Action {
        Action::PlantThen { plant: self, at, expected, desired }
    }
}
