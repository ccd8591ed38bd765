//! What giving back does once it is judged that it may: a CAS on the very words that were judged, and what follows from it.

use aquifer_fabric::Host;

use super::flush::{Flush, Flushed};
use super::hint::Hint;
use super::{ATTEMPTS_MAX, Action, CONTENDED_AFTER, Mutation, OpError, StepResult, WordAt, damaged};
use crate::cache::{NodeCache, place_in_section};
use crate::error::Damage;
use crate::size::SECTION_SPANS;
use crate::word::{Run, SpanState, SpanWord};

/// What is given back.
#[derive(Clone, Copy, Debug)]
pub(super) enum Gift {
    /// Chunks of an open span, of which `run` is some.
    Chunks { span: u32, mask: u32, run: Run },
    /// A group that was taken whole.
    Whole { section: u32, group: Run },
    /// A span that rests, or that a dead host was about to open, or to close.
    Span { span: u32 },
}

/// Something being given back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Give {
    host: Host,
    gift: Gift,
    /// Races lost so far.
    lost: u32,
    /// Whether a span that this closes may rest.
    rests: bool,
    /// The word says that nobody but this ends the span's life.
    is_signed: bool,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// F1, F3, F5, or F4 of another: the record before goes to the log first.
    Flushing(Flush),
    /// F7.
    Signing,
    /// F1, F3.
    GivingChunks,
    /// F5.
    GivingGroup,
    /// F4, first the record, then the change.
    FlushingClose(Flush),
    Closing,
    /// F6.
    Marking,
    /// F2, C1, C2; all is given back already.
    Hinting(Hint),
}

/// What a step led to.
#[derive(Debug)]
pub(super) enum Given {
    Post(Action),
    Done,
    /// The word that was judged has changed. It is remembered as it is now, and nothing was done.
    Overtaken,
}

type Next = Result<Given, OpError>;

impl Give {
    /// Give back what was judged by the words as they are remembered. `lost`: races lost for it before.
    pub(super) fn begin(host: Host, gift: Gift, lost: u32, cache: &NodeCache) -> (Self, Action) {
        let (rests, is_signed) = (false, matches!(gift, Gift::Chunks { .. }));
        let mut give = Self { host, gift, lost, rests, is_signed, state: State::Closing };
        if let Gift::Span { span } = gift
            && cache.span(span).is_half_closed()
            && !Mutation::SkipSign.is_active()
        {
            let action = give.sign(cache, span);
            return (give, action);
        }
        let action = match Flush::begin(host, give.at(), cache) {
            Some((flush, action)) => {
                give.state = State::Flushing(flush);
                action
            }
            None => give.commit(cache),
        };
        (give, action)
    }

    /// A span that this closes may rest.
    pub(super) const fn resting(self, rests: bool) -> Self {
        Self { rests, ..self }
    }

    pub(super) fn step(&mut self, cache: &mut NodeCache, result: StepResult<'_>) -> Next {
        match self.state {
            State::Flushing(mut flush) => Ok(match flush.step(cache, result)? {
                Flushed::Post(action) => self.post(State::Flushing(flush), action),
                Flushed::Done => Given::Post(self.commit(cache)),
                Flushed::Overtaken => Given::Overtaken,
            }),
            State::Signing => self.signed(cache, result.found()),
            State::GivingChunks => self.chunks_given(cache, result.found()),
            State::GivingGroup => self.group_given(cache, result.found()),
            State::FlushingClose(mut flush) => match flush.step(cache, result)? {
                Flushed::Post(action) => Ok(self.post(State::FlushingClose(flush), action)),
                Flushed::Done => Ok(self.post_close(cache)),
                Flushed::Overtaken => self.close_again(cache),
            },
            State::Closing => self.closed(cache, result.found()),
            State::Marking => self.marked(cache, result.found()),
            State::Hinting(mut hint) => Ok(match hint.step(cache, result) {
                Some(action) => self.post(State::Hinting(hint), action),
                None => Given::Done,
            }),
        }
    }

    fn post(&mut self, state: State, action: Action) -> Given {
        self.state = state;
        Given::Post(action)
    }

    /// What is given back.
    pub(super) const fn gift(&self) -> Gift {
        self.gift
    }

    /// The word whose change gives it back.
    fn at(&self) -> WordAt {
        match self.gift {
            Gift::Chunks { span, .. } => WordAt::Span(span),
            Gift::Whole { section, .. } => WordAt::Section(section),
            Gift::Span { span } => WordAt::Section(span / SECTION_SPANS),
        }
    }

    fn commit(&mut self, cache: &NodeCache) -> Action {
        let at = self.at();
        let expected = cache.word(at);
        let (state, desired) = match self.gift {
            Gift::Chunks { span, mask, run } => {
                let desired = cache.span(span).give_all(mask, run, self.host);
                if desired.is_closed() && Mutation::CloseFirst.is_active() {
                    return self.close(cache, span);
                }
                (State::GivingChunks, desired.0)
            }
            Gift::Whole { section, group } => {
                (State::GivingGroup, cache.section(section).give(group, self.host).0)
            }
            Gift::Span { span } => return self.close(cache, span),
        };
        self.state = state;
        Action::commit(at, expected, desired)
    }

    /// F7: from now on whoever might have opened the span again, or ended its life as well, finds another word.
    fn sign(&mut self, cache: &NodeCache, span: u32) -> Action {
        self.state = State::Signing;
        let before = cache.span(span);
        Action::commit(WordAt::Span(span), before.0, before.sign(self.host).0)
    }

    fn signed(&mut self, cache: &mut NodeCache, found: u64) -> Next {
        let (at, before) = (WordAt::Span(self.span()), cache.span(self.span()));
        if found != before.0 {
            cache.learn(at, found)?;
            return Ok(Given::Overtaken);
        }
        let now = before.sign(self.host);
        cache.change_span(self.span(), now).map_err(|cause| damaged(at, now.0, cause))?;
        cache.rest_no_more(self.span());
        self.is_signed = true;
        Ok(self.begin_close(cache))
    }

    fn chunks_given(&mut self, cache: &mut NodeCache, found: u64) -> Next {
        let Gift::Chunks { span, mask, run } = self.gift else { return Ok(Given::Done) };
        let before = cache.span(span);
        if found != before.0 {
            cache.learn(WordAt::Span(span), found)?;
            return Ok(Given::Overtaken);
        }
        let now = before.give_all(mask, run, self.host);
        cache.change_span(span, now).map_err(|cause| damaged(WordAt::Span(span), now.0, cause))?;
        if now.is_closed() && self.rests && cache.rest(span) {
            return Ok(Given::Done);
        }
        if now.is_closed() {
            let skip = Mutation::SkipClose.is_active() || Mutation::CloseFirst.is_active();
            return Ok(if skip { Given::Done } else { self.begin_close(cache) });
        }
        let hint = Hint::opened(span, before.is_full(), cache).or_else(|| match self.lost {
            0 => Hint::calm(span, cache),
            1..=CONTENDED_AFTER => None,
            _ => Hint::mark(span, cache),
        });
        Ok(match hint {
            Some((hint, action)) => self.post(State::Hinting(hint), action),
            None => Given::Done,
        })
    }

    fn group_given(&mut self, cache: &mut NodeCache, found: u64) -> Next {
        let Gift::Whole { section, group } = self.gift else { return Ok(Given::Done) };
        let (at, before) = (WordAt::Section(section), cache.section(section));
        if found != before.0 {
            cache.learn(at, found)?;
            return Ok(Given::Overtaken);
        }
        let now = before.give(group, self.host);
        cache.change_section(section, now).map_err(|cause| damaged(at, now.0, cause))?;
        Ok(Given::Done)
    }

    fn span(&self) -> u32 {
        match self.gift {
            Gift::Chunks { span, .. } | Gift::Span { span } => span,
            Gift::Whole { section, group } => section * SECTION_SPANS + u32::from(group.first()),
        }
    }

    /// F4: only we may, since we emptied the span, or have signed for it; hints that others set meanwhile are written over.
    fn begin_close(&mut self, cache: &NodeCache) -> Given {
        let section = WordAt::Section(self.span() / SECTION_SPANS);
        match Flush::begin(self.host, section, cache) {
            Some((flush, action)) => self.post(State::FlushingClose(flush), action),
            None => self.post_close(cache),
        }
    }

    fn post_close(&mut self, cache: &NodeCache) -> Given {
        let action = self.close(cache, self.span());
        Given::Post(action)
    }

    fn close(&mut self, cache: &NodeCache, span: u32) -> Action {
        self.state = State::Closing;
        let section = span / SECTION_SPANS;
        let expected = cache.section(section);
        let desired = expected.close(place_in_section(span), self.host);
        Action::commit(WordAt::Section(section), expected.0, desired.0)
    }

    /// The section has changed before it was told that the span is closed.
    fn close_again(&mut self, cache: &NodeCache) -> Next {
        if !self.is_signed {
            return Ok(Given::Overtaken);
        }
        self.lost += 1;
        if self.lost > ATTEMPTS_MAX {
            return Err(OpError::Busy { attempts: ATTEMPTS_MAX });
        }
        let (section, index) = (self.span() / SECTION_SPANS, place_in_section(self.span()));
        let word = cache.section(section);
        if word.state(index) == SpanState::Empty {
            return Err(damaged(WordAt::Section(section), word.0, Damage::Intruder));
        }
        Ok(self.begin_close(cache))
    }

    fn closed(&mut self, cache: &mut NodeCache, found: u64) -> Next {
        let (span, section) = (self.span(), self.span() / SECTION_SPANS);
        let (at, before) = (WordAt::Section(section), cache.section(section));
        if found != before.0 {
            cache.learn(at, found)?;
            if Mutation::CloseFromStale.is_active() && self.is_signed {
                let desired = before.close(place_in_section(span), self.host);
                return Ok(self.post(State::Closing, Action::commit(at, found, desired.0)));
            }
            return self.close_again(cache);
        }
        let now = before.close(place_in_section(span), self.host);
        cache.change_section(section, now).map_err(|cause| damaged(at, now.0, cause))?;
        if let Gift::Chunks { mask, run, .. } = self.gift
            && Mutation::CloseFirst.is_active()
        {
            let word = cache.span(span);
            let desired = word.give_all(mask, run, self.host);
            return Ok(self.post(State::GivingChunks, Action::commit(WordAt::Span(span), word.0, desired.0)));
        }
        let word = cache.span(span);
        if word.is_ready() {
            return Ok(Given::Done);
        }
        let action = Action::commit(WordAt::Span(span), word.0, word.mark_ready(self.host).0);
        Ok(self.post(State::Marking, action))
    }

    /// F6. If it fails somebody was faster.
    fn marked(&self, cache: &mut NodeCache, found: u64) -> Next {
        let (span, before) = (self.span(), cache.span(self.span()));
        let told = if found == before.0 {
            cache.change_span(span, before.mark_ready(self.host))
        } else {
            cache.set_span(span, SpanWord(found))
        };
        told.map_err(|cause| damaged(WordAt::Span(span), found, cause))?;
        Ok(Given::Done)
    }
}
