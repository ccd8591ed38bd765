//! A8, by itself or before A3: the key and the record of what is taken. And the hints that come after.

use aquifer_fabric::KeyEntry;

use super::{AllocOp, State};
use crate::cache::NodeCache;
use crate::op::hint::Hint;
use crate::op::{Action, Grant, Mutation, Part, Plant, Step, WordAt, Writes, record_at, word_of};
use crate::size::{SECTION_CHUNKS, SPAN_CHUNKS, SizeClass};
use crate::word::LogEntry;

impl AllocOp {
    /// What goes with A3, since nobody else can take anything in a span that we open: whose it is, and keys and records for this extent and for those to come. It
    /// counts as soon as the span is open.
    pub(super) fn plant(&self, cache: &mut NodeCache, span: u32) -> Plant {
        let plant = Plant::new(self.host, span, self.class, cache);
        cache.leave_planted(&plant, self.class);
        plant.without(Mutation::SkipOwner.is_active(), Mutation::SkipRecord.is_active())
    }

    /// A8: nobody else can give back what is not handed out yet, so these WRITEs need no care.
    pub(super) fn record(&mut self, cache: &mut NodeCache, grant: Grant) -> Step<Grant> {
        let mut writes = self.keys(cache, grant);
        if !Mutation::SkipRecord.is_active() {
            let value = LogEntry::of(cache.word(word_of(grant)), cache.nonce(self.host)).0;
            writes = writes.and(record_at(grant), value);
        }
        if self.owes {
            // It is there before this client changes the word again.
            self.owed = Some(writes);
            cache.settle(word_of(grant));
            return self.recorded(cache, grant);
        }
        self.post(State::Recording(grant), Action::Write(writes))
    }

    /// The key of what was taken; and whose the spans are, if it is whole spans.
    fn keys(&self, cache: &mut NodeCache, grant: Grant) -> Writes {
        if self.is_for_node() {
            return Writes::default();
        }
        let (opened, shut) =
            (KeyEntry::opened(grant.key, cache.tenant()).0, KeyEntry::shut(cache.tenant()).0);
        if grant.class.is_within_span() {
            return Writes::default().and(WordAt::key_of(grant), opened);
        }
        let first = grant.chunk / SPAN_CHUNKS;
        let more = u8::try_from(grant.class.chunks() / SPAN_CHUNKS - 1).unwrap_or(u8::MAX);
        if !Mutation::KeepLeft.is_active() {
            cache.forget_whole(first..first + 1 + u32::from(more));
        }
        if Mutation::SkipOwners.is_active() {
            return Writes::default().and(WordAt::key_of(grant), opened);
        }
        (first..=first + u32::from(more)).for_each(|span| cache.learn_owner(span, KeyEntry(shut)));
        let spans = |value| Part { at: WordAt::span_key(first), value, more, rest: shut };
        if grant.class == SizeClass::SECTION {
            return Writes::default().and(WordAt::key_of(grant), opened).and_run(spans(shut));
        }
        Writes::default().and_run(spans(opened))
    }

    /// The extent is ours, and the log knows it. The next search begins here.
    pub(super) fn recorded(&mut self, cache: &mut NodeCache, grant: Grant) -> Step<Grant> {
        let before = cache.start(self.class);
        cache.set_start(self.class, grant.chunk / SECTION_CHUNKS);
        if !self.class.is_within_span() {
            return Step::Done(Ok(grant));
        }
        // Of what is in the same section A2 has said it.
        let is_elsewhere = self.has_opened && before != grant.chunk / SECTION_CHUNKS;
        let filled = if is_elsewhere { cache.take_filled(before) } else { None };
        self.hint(cache, grant, filled)
    }

    /// A4–A6 of another span that was filled, or C2; and that is all.
    pub(super) fn hint(&mut self, cache: &mut NodeCache, grant: Grant, filled: Option<u32>) -> Step<Grant> {
        let span = grant.chunk / SPAN_CHUNKS;
        // A span that was filled may have room again soon. That it is full is said when another had to be opened in its place.
        cache.note_if_filled(span);
        let calm = self.losing.is_none_or(|(last, _)| last != span);
        let hint = match filled {
            Some(filled) => Hint::filled(filled, cache),
            None if calm => Hint::calm(span, cache),
            None => None,
        };
        match hint {
            Some((hint, action)) => self.post(State::Hinting(hint, grant), action),
            None => Step::Done(Ok(grant)),
        }
    }
}
