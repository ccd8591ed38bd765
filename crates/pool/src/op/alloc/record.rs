//! A8, by itself or before A3: the key and the record of what is taken. And the hints that come after.

use aquifer_fabric::KeyEntry;

use super::{AllocOp, State};
use crate::cache::NodeCache;
use crate::op::hint::Hint;
use crate::op::{Action, Grant, Mutation, Step, WordAt, record_at, word_of};
use crate::size::{SECTION_CHUNKS, SPAN_CHUNKS, SizeClass};
use crate::word::LogEntry;

impl AllocOp {
    /// A8 before A3: whose the span is, the extent's key, and the record that the CAS is about to commit.
    pub(super) fn first_record(&self, cache: &mut NodeCache, grant: Grant, word: u64) -> Action {
        let span = grant.chunk / SPAN_CHUNKS;
        let (opened, shut) = entries(cache, grant);
        let mut action = Action::write(WordAt::key_of(grant), opened);
        if !Mutation::SkipOwner.is_active() {
            action = action.then(Action::write(WordAt::span_key(span), shut));
        }
        if !Mutation::SkipRecord.is_active() {
            action = action.then(self.log_entry(cache, grant, word));
        }
        action
    }

    /// A8. No other client can free the extent before it is granted, so these WRITEs need no care.
    pub(super) fn record(&mut self, cache: &mut NodeCache, grant: Grant) -> Step<Grant> {
        let mut action = self.keys(cache, grant);
        if !Mutation::SkipRecord.is_active() {
            let word = cache.word(word_of(grant));
            action = action.then(self.log_entry(cache, grant, word));
        }
        if self.leaves_record {
            // It is written before this client changes the word again.
            self.record = action;
            cache.settle(word_of(grant));
            return self.recorded(cache, grant);
        }
        if action.is_empty() {
            return self.recorded(cache, grant);
        }
        self.post(State::Recording(grant), action)
    }

    fn log_entry(&self, cache: &mut NodeCache, grant: Grant, word: u64) -> Action {
        Action::write(record_at(grant), LogEntry::of(word, cache.nonce(self.host)).0)
    }

    /// The key of what was allocated; and whose the spans are, if it is whole spans.
    fn keys(&self, cache: &mut NodeCache, grant: Grant) -> Action {
        if self.is_for_node() {
            return Action::default();
        }
        let (opened, shut) = entries(cache, grant);
        if grant.class.is_within_span() || Mutation::SkipOwners.is_active() {
            return Action::write(WordAt::key_of(grant), opened);
        }
        let first = grant.chunk / SPAN_CHUNKS;
        let others = u8::try_from(grant.class.chunks() / SPAN_CHUNKS - 1).unwrap_or(u8::MAX);
        (first..=first + u32::from(others)).for_each(|span| cache.learn_owner(span, KeyEntry(shut)));
        let spans = |value| Action::write_run(WordAt::span_key(first), value, others, shut);
        if grant.class == SizeClass::SECTION {
            return Action::write(WordAt::key_of(grant), opened).then(spans(shut));
        }
        spans(opened)
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

/// The entry that opens an extent, and that of memory of the same tenant which no key opens.
fn entries(cache: &NodeCache, grant: Grant) -> (u64, u64) {
    (KeyEntry::opened(grant.key, cache.tenant()).0, KeyEntry::shut(cache.tenant()).0)
}
