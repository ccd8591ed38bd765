//! V3: decides from words and log which spans and extents of a section the host owns.

use super::{CHUNKS, Holding, RecoverOp, Recovered, RecoveryScope, SPANS};
use crate::cache::NodeCache;
use crate::op::free::Freed;
use crate::op::{Grant, WordAt};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{AlignedRun, InlineLog, LogEntry, LogOp, SectionWord, SpanState, SpanWord};
use aquifer_fabric::{Key, KeyEntry};

/// The action that a span needs.
#[derive(Debug)]
pub(super) enum SpanVerdict {
    /// No action. The payload is the place of the next span.
    Pass(u8),
    /// Memory of the dead host is to be freed.
    Free(Freed, Recovered),
    /// The span has the full hint, and is not full.
    ClearFullHint,
    /// No record names the owner of some chunks. The log may be newer than the word, so the word
    /// must be read once more.
    Unclear,
}

impl RecoverOp {
    /// The action that the span at this place needs.
    pub(super) fn judge(&mut self, cache: &NodeCache, place: u8) -> SpanVerdict {
        let span = self.section * SECTION_SPANS + u32::from(place);
        let section = cache.section(self.section);
        let word = SpanWord(self.spans[usize::from(place)]);
        let state = section.state(place);
        if !word.is_closed() {
            let mut scope = std::mem::take(&mut self.scope);
            let listed = scope.listed_count();
            let (dead, unowned) = self.chunks_of_dead(word, place, &mut scope);
            self.scope = scope;
            if unowned > 0 && self.confirmed != Some(place) {
                self.scope.truncate_list(listed);
                return SpanVerdict::Unclear;
            }
            self.unowned += unowned;
            return match dead {
                Some((mask, run, found)) => SpanVerdict::Free(Freed::Chunks { span, mask, run }, found),
                None if state == SpanState::Full && !word.is_full() => SpanVerdict::ClearFullHint,
                None => SpanVerdict::Pass(place + 1),
            };
        }
        match word.log() {
            _ if state == SpanState::Empty => SpanVerdict::Pass(place + 1),
            Ok(Some(log)) if log.op == LogOp::Close && log.host == self.dead => {
                self.judge_transition(place, log)
            }
            // The host that emptied the span closes it in the section, or is recovered itself.
            Ok(Some(InlineLog { op: LogOp::Close, .. })) => SpanVerdict::Pass(place + 1),
            _ => self.judge_ready(section, place),
        }
    }

    /// The action for a span that a host was opening or closing, by this record.
    fn judge_transition(&mut self, place: u8, log: InlineLog) -> SpanVerdict {
        let span = self.section * SECTION_SPANS + u32::from(place);
        let word = self.spans[usize::from(place)];
        if !self.scope.admit(Some(Holding::Span { span, word, stamp: log.stamp })) {
            return SpanVerdict::Pass(place + 1);
        }
        SpanVerdict::Free(Freed::Span { span }, Recovered { spans: 1, ..Recovered::default() })
    }

    /// The action for a span that is closed and ready, and not empty in its section's word: it is
    /// being opened, or is part of a group that was allocated whole.
    fn judge_ready(&mut self, section: SectionWord, place: u8) -> SpanVerdict {
        let begins_here =
            |log: &InlineLog| log.run.first() == place && matches!(log.op, LogOp::Open | LogOp::Alloc);
        let from_full_log = || {
            let entry = self.span_log.get(usize::from(place)).map(|entry| LogEntry(*entry))?;
            entry.of_section().ok().flatten().filter(begins_here)
        };
        let Some(log) = self.record.filter(begins_here).or_else(from_full_log) else {
            return SpanVerdict::Pass(place + 1);
        };
        let group = log.run;
        match log.op {
            LogOp::Alloc if log.host != self.dead => SpanVerdict::Pass(place + group.len()),
            LogOp::Alloc if section.all(group, SpanState::Full) => {
                let holding = self.group_holding(group);
                if !self.scope.admit(holding) {
                    return SpanVerdict::Pass(place + group.len());
                }
                let chunks = u64::from(group.len()) * u64::from(SPAN_CHUNKS);
                let found = Recovered { extents: 1, chunks, ..Recovered::default() };
                SpanVerdict::Free(Freed::Whole { section: self.section, group }, found)
            }
            LogOp::Open if log.host == self.dead => self.judge_transition(place, log),
            _ => SpanVerdict::Pass(place + 1),
        }
    }

    /// The holding of an extent of whole spans, with the key that was read before the words.
    fn group_holding(&self, group: AlignedRun) -> Option<Holding> {
        let class = SizeClass::new(group.order() + SizeClass::SPAN.k())?;
        let chunk = self.section * SECTION_CHUNKS + u32::from(group.first()) * SPAN_CHUNKS;
        let grant = Grant { chunk, class, key: Key(0) };
        let grant = Grant { key: self.key_of(grant), ..grant };
        Some(Holding::extent(grant, self.span_log.get(usize::from(group.first()))))
    }

    /// The dead host's chunks of an open span, the first of its extents there, and their counts.
    ///
    /// The second value is the number of allocated chunks whose owner no record names.
    fn chunks_of_dead(
        &self,
        word: SpanWord,
        place: u8,
        scope: &mut RecoveryScope,
    ) -> (Option<(u32, AlignedRun, Recovered)>, u64) {
        let entries = self.chunk_log.get(usize::from(place) * CHUNKS..).unwrap_or_default();
        let inline = word.log().ok().flatten().filter(|log| log.op == LogOp::Alloc);
        let (mut mask, mut first, mut found, mut unowned) = (0, None, Recovered::default(), 0);
        let mut chunk = 0_u8;
        while u32::from(chunk) < SPAN_CHUNKS {
            if word.bits() >> chunk & 1 == 0 {
                chunk += 1;
                continue;
            }
            let begins_here = |log: &InlineLog| {
                let is_within = log.run.order() < SizeClass::SPAN.k() && word.holds(log.run);
                log.op == LogOp::Alloc && log.run.first() == chunk && is_within
            };
            let from_full_log = || {
                let entry = LogEntry(*entries.get(usize::from(chunk))?);
                entry.of_span().ok().flatten().filter(begins_here)
            };
            let Some(log) = inline.filter(begins_here).or_else(from_full_log) else {
                unowned += 1;
                chunk += 1;
                continue;
            };
            if log.host == self.dead && scope.admit(self.chunks_holding(place, log.run)) {
                mask |= log.run.mask();
                first.get_or_insert(log.run);
                found.extents += 1;
                found.chunks += u64::from(log.run.len());
            }
            chunk += log.run.len();
        }
        (first.map(|run| (mask, run, found)), unowned)
    }

    /// The holding of an extent of chunks, with the key that was read before the words.
    fn chunks_holding(&self, place: u8, run: AlignedRun) -> Option<Holding> {
        let at = usize::from(place) * CHUNKS + usize::from(run.first());
        let chunk = self.section * SECTION_CHUNKS + u32::try_from(at).ok()?;
        let class = SizeClass::new(run.order())?;
        let grant = Grant { chunk, class, key: Key(0) };
        let grant = Grant { key: self.key_of(grant), ..grant };
        Some(Holding::extent(grant, self.chunk_log.get(at)))
    }

    /// The key of an extent of this section, as last read.
    pub(super) fn key_of(&self, grant: Grant) -> Key {
        let within = (grant.chunk % SECTION_CHUNKS) as usize;
        let entry = match WordAt::key_of(grant) {
            at if at == WordAt::section_key(self.section) => self.other_keys[0],
            _ if grant.class.is_within_span() => self.chunk_keys[within],
            _ => self.other_keys[SPANS + within / CHUNKS],
        };
        KeyEntry(entry).key()
    }
}
