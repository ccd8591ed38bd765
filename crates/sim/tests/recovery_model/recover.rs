//! What a live host does for a dead one: find all that was its, by words and logs, and give it back.
//!
//! Everything is judged by what was read *after* a word, and changed by a CAS on that very word: then it was so in between.

use crate::recovery_model::fault::Fault;
use crate::recovery_model::host::{Actor, At, Goal, World};
use crate::recovery_model::memory::{CHUNK_NUMBERS, Code, Group, Holding, SPANS, SpanLog};

impl Actor {
    pub fn recover(&mut self, dead: u8) {
        self.recovering = Some(dead);
        self.at = At::LookAtSection;
    }

    pub(crate) fn look_at_section(&mut self, world: &World<'_>) {
        self.learn_section(world.memory.section);
        self.at = At::LookAtSpan(0);
    }

    pub(crate) fn look_at_span(&mut self, span: u8, world: &World<'_>) {
        let at = usize::from(span);
        self.learn_span(span, world.memory.spans[at]);
        if self.fault == Fault::SectionLast {
            self.learn_section(world.memory.section);
        }
        let word = self.spans[at];
        if !word.is_closed() {
            return self.go_through(span, 0);
        }
        let dead = self.recovering;
        match (word.log, self.section.codes[at]) {
            (_, Code::Empty) => self.go_on(span + 1),
            (SpanLog::Close(host), _) if Some(host) == dead => self.begin(Goal::Sign { span }),
            // Whoever it was opens it again, or will tell the section, or is recovered, too.
            (SpanLog::Close(_), _) => self.go_on(span + 1),
            _ if self.fault == Fault::SkipSectionAgain => self.look_up_span(span),
            _ => self.at = At::LookAtSectionAgain(span),
        }
    }

    /// Section and span must have been so at one time: else an entry that nobody needs any more would count.
    pub(crate) fn look_at_section_again(&mut self, span: u8, world: &World<'_>) {
        if world.memory.section == self.section {
            self.look_up_span(span);
        } else {
            self.at = At::LookAtSection;
        }
    }

    fn look_up_span(&mut self, span: u8) {
        match self.section.log {
            Some(log) if log.first() == usize::from(span) => self.judge_span(span, Some(log)),
            _ => self.at = At::LookAtSpanLog(span),
        }
    }

    /// Look whose the chunks from this one on are.
    fn go_through(&mut self, span: u8, from: u8) {
        let word = self.spans[usize::from(span)];
        let Some(chunk) = CHUNK_NUMBERS.into_iter().find(|chunk| *chunk >= from && word.has(*chunk)) else {
            return self.go_on(span + 1);
        };
        match word.log {
            SpanLog::Alloc(host, last) if last == chunk => self.judge_chunk(span, chunk, Some(host)),
            _ => self.at = At::LookAtChunkLog(span, chunk),
        }
    }

    pub(crate) fn look_at_chunk_log(&mut self, span: u8, chunk: u8, world: &World<'_>) {
        let owner = world.memory.chunk_logs[usize::from(span)][usize::from(chunk)].what;
        self.judge_chunk(span, chunk, owner);
    }

    fn judge_chunk(&mut self, span: u8, chunk: u8, owner: Option<u8>) {
        if owner == self.recovering {
            self.begin(Goal::Give { span, chunk, rests: false });
        } else {
            self.go_through(span, chunk + 1);
        }
    }

    /// A closed span that is ready, and yet not empty: being opened, or taken whole.
    pub(crate) fn judge_span(&mut self, span: u8, log: Option<Holding>) {
        let dead = self.recovering;
        match log {
            Some(Holding::Open(host, _)) if Some(host) == dead => self.begin(Goal::Close { span }),
            Some(Holding::Alloc(host, group)) if Some(host) == dead => self.begin(Goal::GiveWhole(group)),
            Some(Holding::Alloc(_, Group { is_pair: true, .. })) => self.go_on(span + 2),
            _ => self.go_on(span + 1),
        }
    }

    fn go_on(&mut self, span: u8) {
        if usize::from(span) < SPANS {
            self.at = At::LookAtSpan(span);
        } else if let Some(dead) = self.recovering.take() {
            self.recovered[usize::from(dead)] = true;
            self.at = At::Idle;
        }
    }
}
