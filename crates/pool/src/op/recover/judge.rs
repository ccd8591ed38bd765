//! Whose is what: a section's spans, judged by words and log.

use super::{CHUNKS, Held, Quest, RecoverOp, Recovered, SPANS};
use crate::cache::NodeCache;
use crate::op::free::Freed;
use crate::op::{Grant, WordAt};
use crate::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS, SizeClass};
use crate::word::{InlineLog, LogEntry, LogOp, Run, SectionWord, SpanState, SpanWord};
use aquifer_fabric::{Key, KeyEntry};

/// What a span of the dead host, or of another, calls for.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Nothing; the span after it is next.
    Pass(u8),
    Free(Freed, Recovered),
    /// It is said to be full, and is not.
    Unhint,
    /// Nothing tells whose something is; the log may be of later.
    Doubt,
}

impl RecoverOp {
    /// What a span calls for.
    pub(super) fn judge(&mut self, cache: &NodeCache, place: u8) -> Verdict {
        let span = self.section * SECTION_SPANS + u32::from(place);
        let section = cache.section(self.section);
        let word = SpanWord(self.spans[usize::from(place)]);
        let state = section.state(place);
        if !word.is_closed() {
            let mut quest = std::mem::take(&mut self.quest);
            let told = quest.told();
            let (dead, unknown) = self.chunks_of_dead(word, place, &mut quest);
            self.quest = quest;
            if unknown > 0 && self.certain != Some(place) {
                self.quest.take_back(told);
                return Verdict::Doubt;
            }
            self.unknown += unknown;
            return match dead {
                Some((mask, run, found)) => Verdict::Free(Freed::Chunks { span, mask, run }, found),
                None if state == SpanState::Full && !word.is_full() => Verdict::Unhint,
                None => Verdict::Pass(place + 1),
            };
        }
        match word.log() {
            _ if state == SpanState::Empty => Verdict::Pass(place + 1),
            Ok(Some(log)) if log.op == LogOp::Close && log.host == self.dead => self.judge_half(place, log),
            // The host that emptied it closes it in the section, or is recovered, too.
            Ok(Some(InlineLog { op: LogOp::Close, .. })) => Verdict::Pass(place + 1),
            _ => self.judge_ready(section, place),
        }
    }

    /// A span that the dead host was about to open, or to close, by this record.
    fn judge_half(&mut self, place: u8, log: InlineLog) -> Verdict {
        let span = self.section * SECTION_SPANS + u32::from(place);
        let word = self.spans[usize::from(place)];
        if !self.quest.meet(Some(Held::Span { span, word, stamp: log.stamp })) {
            return Verdict::Pass(place + 1);
        }
        Verdict::Free(Freed::Span { span }, Recovered { spans: 1, ..Recovered::default() })
    }

    /// A closed span that is ready, and yet not empty: about to be opened, or taken whole.
    fn judge_ready(&mut self, section: SectionWord, place: u8) -> Verdict {
        let is_of_it =
            |log: &InlineLog| log.run.first() == place && matches!(log.op, LogOp::Open | LogOp::Alloc);
        let kept = || {
            let entry = self.span_log.get(usize::from(place)).map(|entry| LogEntry(*entry))?;
            entry.of_section().ok().flatten().filter(is_of_it)
        };
        let Some(log) = self.record.filter(is_of_it).or_else(kept) else { return Verdict::Pass(place + 1) };
        let group = log.run;
        match log.op {
            LogOp::Alloc if log.host != self.dead => Verdict::Pass(place + group.len()),
            LogOp::Alloc if section.all(group, SpanState::Full) => {
                let held = self.group_held(group);
                if !self.quest.meet(held) {
                    return Verdict::Pass(place + group.len());
                }
                let chunks = u64::from(group.len()) * u64::from(SPAN_CHUNKS);
                let found = Recovered { extents: 1, chunks, ..Recovered::default() };
                Verdict::Free(Freed::Whole { section: self.section, group }, found)
            }
            LogOp::Open if log.host == self.dead => self.judge_half(place, log),
            _ => Verdict::Pass(place + 1),
        }
    }

    /// An extent of whole spans, by the key that was there before it was judged.
    fn group_held(&self, group: Run) -> Option<Held> {
        let class = SizeClass::new(group.order() + SizeClass::SPAN.k())?;
        let chunk = self.section * SECTION_CHUNKS + u32::from(group.first()) * SPAN_CHUNKS;
        let grant = Grant { chunk, class, key: Key(0) };
        let grant = Grant { key: self.key_of(grant), ..grant };
        Some(Held::extent(grant, self.span_log.get(usize::from(group.first()))))
    }

    /// The dead host's chunks of an open span, the first of its extents there, and how many; and of how many chunks nothing tells whose they are.
    fn chunks_of_dead(
        &self,
        word: SpanWord,
        place: u8,
        quest: &mut Quest,
    ) -> (Option<(u32, Run, Recovered)>, u64) {
        let entries = self.chunk_log.get(usize::from(place) * CHUNKS..).unwrap_or_default();
        let last = word.log().ok().flatten().filter(|log| log.op == LogOp::Alloc);
        let (mut mask, mut first, mut found, mut unknown) = (0, None, Recovered::default(), 0);
        let mut chunk = 0_u8;
        while u32::from(chunk) < SPAN_CHUNKS {
            if word.bits() >> chunk & 1 == 0 {
                chunk += 1;
                continue;
            }
            let is_of_it = |log: &InlineLog| {
                let is_within = log.run.order() < SizeClass::SPAN.k() && word.holds(log.run);
                log.op == LogOp::Alloc && log.run.first() == chunk && is_within
            };
            let kept = || {
                let entry = LogEntry(*entries.get(usize::from(chunk))?);
                entry.of_span().ok().flatten().filter(is_of_it)
            };
            let Some(log) = last.filter(is_of_it).or_else(kept) else {
                unknown += 1;
                chunk += 1;
                continue;
            };
            if log.host == self.dead && quest.meet(self.chunks_held(place, log.run)) {
                mask |= log.run.mask();
                first.get_or_insert(log.run);
                found.extents += 1;
                found.chunks += u64::from(log.run.len());
            }
            chunk += log.run.len();
        }
        (first.map(|run| (mask, run, found)), unknown)
    }

    /// An extent of chunks, by the key that was there before it was judged.
    fn chunks_held(&self, place: u8, run: Run) -> Option<Held> {
        let at = usize::from(place) * CHUNKS + usize::from(run.first());
        let chunk = self.section * SECTION_CHUNKS + u32::try_from(at).ok()?;
        let class = SizeClass::new(run.order())?;
        let grant = Grant { chunk, class, key: Key(0) };
        let grant = Grant { key: self.key_of(grant), ..grant };
        Some(Held::extent(grant, self.chunk_log.get(at)))
    }

    /// The key of something in this section, as last read.
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
