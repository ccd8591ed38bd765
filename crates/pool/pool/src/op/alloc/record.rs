//! A8: writes the key and the record of an extent, and sets the hints that follow.

use aquifer_fabric::KeyEntry;

use super::{AllocOp, AllocState};
use crate::cache::NodeCache;
use crate::op::hint::Hint;
use crate::op::{Action, Grant, Mutation, Step, WordAt, record_at, word_of};
use crate::size::{SECTION_CHUNKS, SPAN_CHUNKS, SizeClass};
use crate::word::LogEntry;

impl AllocOp {
    /// A8 before A3: the owner of the span, the extent's key, and the record that the CAS is about
    /// to commit.
    pub(super) fn record_before_commit(&self, cache: &mut NodeCache, grant: Grant, word: u64) -> Action {
        let span = grant.chunk / SPAN_CHUNKS;
        let (with_key, without_key) = entries(cache, grant);
        let mut action = Action::write(WordAt::key_of(grant), with_key);
        if !Mutation::SkipOwner.is_active() {
            action = action.then(Action::write(WordAt::span_key(span), without_key));
        }
        if !Mutation::SkipRecord.is_active() {
            action = action.then(self.log_entry(cache, grant, word));
        }
        action
    }

    /// A8. No other client can free the extent before it is granted, so WRITEs suffice.
    pub(super) fn record(&mut self, cache: &mut NodeCache, grant: Grant) -> Step<Grant> {
        let mut action = self.keys(cache, grant);
        if !Mutation::SkipRecord.is_active() {
            let word = cache.word(word_of(grant));
            action = action.then(self.log_entry(cache, grant, word));
        }
        if self.defers_record {
            // The caller posts the action before this client changes the word again.
            self.record = action;
            cache.mark_saved(word_of(grant));
            return self.recorded(cache, grant);
        }
        if action.is_empty() {
            return self.recorded(cache, grant);
        }
        self.post(AllocState::Recording(grant), action)
    }

    fn log_entry(&self, cache: &mut NodeCache, grant: Grant, word: u64) -> Action {
        Action::write(record_at(grant), LogEntry::of(word, cache.nonce(self.host)).0)
    }

    /// Writes the key entries of an extent, including the owners of whole spans.
    fn keys(&self, cache: &mut NodeCache, grant: Grant) -> Action {
        if self.is_for_node() {
            return Action::default();
        }
        let (with_key, without_key) = entries(cache, grant);
        if grant.class.is_within_span() || Mutation::SkipGroupOwners.is_active() {
            return Action::write(WordAt::key_of(grant), with_key);
        }
        let first = grant.chunk / SPAN_CHUNKS;
        let others = u8::try_from(grant.class.chunks() / SPAN_CHUNKS - 1).unwrap_or(u8::MAX);
        (first..=first + u32::from(others)).for_each(|span| cache.learn_owner(span, KeyEntry(without_key)));
        let spans = |value| Action::write_run(WordAt::span_key(first), value, others, without_key);
        if grant.class == SizeClass::SECTION {
            return Action::write(WordAt::key_of(grant), with_key).then(spans(without_key));
        }
        spans(with_key)
    }

    /// Ends the operation after A8. The next search begins at the extent.
    pub(super) fn recorded(&mut self, cache: &mut NodeCache, grant: Grant) -> Step<Grant> {
        let before = cache.first_section(self.class);
        cache.set_first_section(self.class, grant.chunk / SECTION_CHUNKS);
        if !self.class.is_within_span() {
            return Step::Done(Ok(grant));
        }
        // In the same section, A2 has set the hint.
        let is_elsewhere = self.has_opened && before != grant.chunk / SECTION_CHUNKS;
        let full_span = if is_elsewhere { cache.pop_unhinted_full(before) } else { None };
        self.hint(cache, grant, full_span)
    }

    /// A4 to A6 of another span that this client has filled, or C2; then the operation is done.
    pub(super) fn hint(
        &mut self,
        cache: &mut NodeCache,
        grant: Grant,
        full_span: Option<u32>,
    ) -> Step<Grant> {
        let span = grant.chunk / SPAN_CHUNKS;
        // A full span may soon have free chunks again, so the full hint is set only when another
        // span had to be opened instead (decision 13).
        cache.mark_if_full(span);
        let has_won_at_once = self.last_losses.is_none_or(|(last, _)| last != span);
        let hint = match full_span {
            Some(full) => Hint::set_full(full, cache),
            None if has_won_at_once => Hint::clear_contended(span, cache),
            None => None,
        };
        match hint {
            Some((hint, action)) => self.post(AllocState::Hinting(hint, grant), action),
            None => Step::Done(Ok(grant)),
        }
    }
}

/// The key entry of an extent, and the entry without a key of a span of the same tenant.
fn entries(cache: &NodeCache, grant: Grant) -> (u64, u64) {
    (KeyEntry::open(grant.key, cache.tenant()).0, KeyEntry::closed(cache.tenant()).0)
}
