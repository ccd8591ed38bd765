//! Taking several extents of one span at once: one CAS after another of its word, each of which expects what the one before makes of it. All are posted together. If
//! others change the word in between, those before are done, and those after are not; unless a client of the same host has just done what one of ours was to do, and so
//! has made of the word what the next expects.
//!
//! Only of what is ready to be taken by a CAS alone: key and record of each are there.

use aquifer_fabric::Host;

use super::WordAt;
use crate::size::{SPAN_CHUNKS, SizeClass};
use crate::word::{Run, SpanWord};

/// See above.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chain {
    host: Host,
    span: u32,
    word: SpanWord,
    class: SizeClass,
    /// Where extents begin, a bit for each chunk.
    firsts: u32,
}

impl Chain {
    /// Most CASes of one action: so many extents has a span.
    pub const MAX: usize = SPAN_CHUNKS as usize;

    /// Take what begins at these chunks of a span whose word is this, and where all of that is free.
    pub(crate) const fn new(host: Host, span: u32, word: SpanWord, class: SizeClass, firsts: u32) -> Self {
        Self { host, span, word, class, firsts }
    }

    /// What is taken, in order.
    pub(crate) fn runs(self) -> impl Iterator<Item = Run> {
        let begins = move |first: &u8| self.firsts >> *first & 1 == 1;
        (0..32).filter(begins).filter_map(move |first| Run::new(first, self.class.order()))
    }

    pub(crate) const fn span(&self) -> u32 {
        self.span
    }

    pub(crate) const fn class(&self) -> SizeClass {
        self.class
    }

    /// The word, what it must be each time, and what it becomes.
    pub fn swaps(self) -> impl Iterator<Item = (WordAt, u64, u64)> {
        let step = move |word: &mut SpanWord, run: Run| {
            let before = *word;
            *word = before.take(run, self.host);
            Some((WordAt::Span(self.span), before.0, word.0))
        };
        self.runs().scan(self.word, step)
    }

    /// What came of it, by what each swap has found.
    pub fn outcome(self, found: impl IntoIterator<Item = u64>) -> Chained {
        let mut chained = Chained { taken: 0, is_whole: true, word: self.word };
        for (number, ((_, expected, desired), found)) in self.swaps().zip(found).enumerate() {
            let is_taken = found == expected;
            chained.taken |= u32::from(is_taken) << number;
            chained.is_whole &= is_taken;
            chained.word = SpanWord(if is_taken { desired } else { found });
        }
        chained
    }
}

/// What came of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chained {
    /// A bit for each swap that was done, in order.
    pub(crate) taken: u32,
    /// All were.
    pub(crate) is_whole: bool,
    /// What the word was after the last.
    pub(crate) word: SpanWord,
}
