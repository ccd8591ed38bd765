//! The model: what the control words must mean, derived from their inline logs alone, as a host that
//! recovers would.

use aquifer_fabric::{Host, Memory};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{Action, WordAt};
use aquifer_pool::size::{SECTION_SPANS, SPAN_CHUNKS};
use aquifer_pool::word::{InlineLog, LogOp, Run, STAMPS, SectionWord, SpanState, SpanWord};
use std::sync::atomic::Ordering;

/// What a span is, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Closed,
    Opening(Host),
    Chunks,
    Closing(Host),
    Whole(Host),
}

/// What came to pass, for telling whether a run of the simulator was worth it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Open,
    TakeChunks,
    FirstChunks,
    TakeWhole,
    GiveChunks,
    GiveLast,
    Close,
    GiveWhole,
    HintFull,
    HintOpen,
    MarkContended,
    Calm,
}

#[derive(Debug)]
pub struct Shadow {
    layout: Layout,
    sections: Vec<SectionWord>,
    spans: Vec<SpanWord>,
    pub modes: Vec<Mode>,
    pub owners: Vec<Option<Host>>,
}

type Verdict<T = ()> = Result<T, String>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}
pub(crate) use ensure;

impl Shadow {
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            sections: vec![SectionWord::default(); layout.sections() as usize],
            spans: vec![SpanWord::default(); layout.spans() as usize],
            modes: vec![Mode::Closed; layout.spans() as usize],
            owners: vec![None; layout.chunks() as usize],
        }
    }

    pub fn state_of(&self, span: u32) -> SpanState {
        let index = u8::try_from(span % SECTION_SPANS).unwrap();
        self.sections[(span / SECTION_SPANS) as usize].state(index)
    }

    pub fn span(&self, span: u32) -> SpanWord {
        self.spans[span as usize]
    }

    /// Look at the words; one of them may have been changed, by one of the CASes that are under way.
    pub fn observe(&mut self, memory: &Memory, under_way: &[(Host, Action)]) -> Verdict<Option<Change>> {
        let mut change = None;
        for section in 0..self.layout.sections() {
            let new = SectionWord(self.load(memory, WordAt::Section(section)));
            let old = std::mem::replace(&mut self.sections[section as usize], new);
            if old != new {
                let by = author(under_way, WordAt::Section(section), old.0, new.0)?;
                let told = self.section_changed(section, old, new, by);
                change =
                    Some(told.map_err(|why| {
                        format!("section {section} {:#018x} -> {:#018x}: {why}", old.0, new.0)
                    })?);
            }
        }
        for span in 0..self.layout.spans() {
            let new = SpanWord(self.load(memory, WordAt::Span(span)));
            let old = std::mem::replace(&mut self.spans[span as usize], new);
            if old != new {
                let by = author(under_way, WordAt::Span(span), old.0, new.0)?;
                let told = self.span_changed(span, old, new, by);
                change = Some(
                    told.map_err(|why| format!("span {span} {:#018x} -> {:#018x}: {why}", old.0, new.0))?,
                );
            }
        }
        Ok(change)
    }

    fn load(&self, memory: &Memory, at: WordAt) -> u64 {
        let offset = usize::try_from(self.layout.word_at(at)).unwrap();
        memory.atomic_u64(offset).load(Ordering::SeqCst)
    }

    fn section_changed(
        &mut self,
        section: u32,
        old: SectionWord,
        new: SectionWord,
        by: Host,
    ) -> Verdict<Change> {
        new.check().map_err(|error| error.to_string())?;
        let before = old.log().map_err(|error| error.to_string())?;
        let log = new.log().map_err(|error| error.to_string())?.ok_or("the log is gone")?;
        stamp_follows(before, log)?;
        let record = |log: InlineLog| (log.op, log.run, log.host);
        if before.map(record) == Some(record(log)) {
            return self.hint_changed(section, old, new);
        }
        ensure!(log.host == by, "{by:?} signs as {:?}", log.host);
        let spans = log.run.first()..log.run.first() + log.run.len();
        let same_elsewhere = (0..16).filter(|i| !spans.contains(i)).all(|i| old.state(i) == new.state(i));
        ensure!(same_elsewhere, "other spans than those of its log {log:?} changed");
        for index in spans.clone() {
            let span = section * SECTION_SPANS + u32::from(index);
            self.span_state_changed(span, log, (old.state(index), new.state(index)))?;
        }
        Ok(match log.op {
            LogOp::Open => Change::Open,
            LogOp::Close => Change::Close,
            LogOp::Alloc => Change::TakeWhole,
            LogOp::Free => Change::GiveWhole,
        })
    }

    fn span_state_changed(&mut self, span: u32, log: InlineLog, states: (SpanState, SpanState)) -> Verdict {
        let mode = self.modes[span as usize];
        let (right, after) = match log.op {
            LogOp::Open => (
                mode == Mode::Closed && states == (SpanState::Empty, SpanState::Partial),
                Mode::Opening(log.host),
            ),
            LogOp::Close => (mode == Mode::Closing(log.host) && states.1 == SpanState::Empty, Mode::Closed),
            LogOp::Alloc => {
                (mode == Mode::Closed && states == (SpanState::Empty, SpanState::Full), Mode::Whole(log.host))
            }
            LogOp::Free => {
                (mode == Mode::Whole(log.host) && states == (SpanState::Full, SpanState::Empty), Mode::Closed)
            }
        };
        ensure!(right, "{log:?} takes span {span} from {states:?}, but it is {mode:?}");
        ensure!(self.span(span).is_closed(), "{log:?} while span {span} has chunks");
        self.modes[span as usize] = after;
        match log.op {
            LogOp::Alloc => self.own(span, 0..32, None, Some(log.host)),
            LogOp::Free => self.own(span, 0..32, Some(log.host), None),
            _ => Ok(()),
        }
    }

    fn hint_changed(&self, section: u32, old: SectionWord, new: SectionWord) -> Verdict<Change> {
        let changed: Vec<u8> = (0..16).filter(|&i| old.state(i) != new.state(i)).collect();
        let [index] = changed[..] else {
            return Err(format!("a change of hints changes the spans {changed:?}"));
        };
        let mode = self.modes[(section * SECTION_SPANS + u32::from(index)) as usize];
        let right = matches!(mode, Mode::Chunks | Mode::Closing(_));
        ensure!(right, "a change of hints on span {index} of the section, which is {mode:?}");
        match (old.state(index), new.state(index)) {
            (SpanState::Partial | SpanState::Contended, SpanState::Full) => Ok(Change::HintFull),
            (SpanState::Full, SpanState::Partial) => Ok(Change::HintOpen),
            (SpanState::Partial, SpanState::Contended) => Ok(Change::MarkContended),
            (SpanState::Contended, SpanState::Partial) => Ok(Change::Calm),
            states => Err(format!("a change of hints takes span {index} from and to {states:?}")),
        }
    }

    fn span_changed(&mut self, span: u32, old: SpanWord, new: SpanWord, by: Host) -> Verdict<Change> {
        new.check().map_err(|error| error.to_string())?;
        let before = old.log().map_err(|error| error.to_string())?;
        let log = new.log().map_err(|error| error.to_string())?.ok_or("the log is gone")?;
        stamp_follows(before, log)?;
        ensure!(log.host == by, "{by:?} signs as {:?}", log.host);
        let mode = self.modes[span as usize];
        let mask = log.run.mask();
        let (right, after, change) = match log.op {
            LogOp::Alloc if mode == Mode::Opening(by) => {
                (new.bits() == mask, Mode::Chunks, Change::FirstChunks)
            }
            LogOp::Alloc => {
                (mode == Mode::Chunks && new.bits() == old.bits() | mask, Mode::Chunks, Change::TakeChunks)
            }
            LogOp::Free => {
                (mode == Mode::Chunks && new.bits() == old.bits() & !mask, Mode::Chunks, Change::GiveChunks)
            }
            LogOp::Close => (
                mode == Mode::Chunks && old.bits() == mask && new.bits() == 0,
                Mode::Closing(by),
                Change::GiveLast,
            ),
            LogOp::Open => (false, mode, Change::Open),
        };
        ensure!(right, "{log:?} on a span that is {mode:?}");
        let state = self.state_of(span);
        ensure!(state != SpanState::Empty, "{log:?} on a span whose section says {state:?}");
        self.modes[span as usize] = after;
        let chunks = places(log.run);
        if log.op == LogOp::Alloc {
            self.own(span, chunks, None, Some(by))?;
        } else {
            self.own(span, chunks, Some(by), None)?;
        }
        Ok(change)
    }

    fn own(
        &mut self,
        span: u32,
        chunks: std::ops::Range<u32>,
        from: Option<Host>,
        to: Option<Host>,
    ) -> Verdict {
        for chunk in chunks {
            let owner = &mut self.owners[(span * SPAN_CHUNKS + chunk) as usize];
            ensure!(*owner == from, "chunk {chunk} of span {span} goes to {to:?} from {owner:?}");
            *owner = to;
        }
        Ok(())
    }
}

fn places(run: Run) -> std::ops::Range<u32> {
    u32::from(run.first())..u32::from(run.first()) + u32::from(run.len())
}

fn stamp_follows(before: Option<InlineLog>, log: InlineLog) -> Verdict {
    let expected = before.map_or(1, |before| (before.stamp + 1) % STAMPS);
    ensure!(log.stamp == expected, "timestamp {} where {expected} is due", log.stamp);
    Ok(())
}

/// Whose CAS it was.
fn author(under_way: &[(Host, Action)], at: WordAt, old: u64, new: u64) -> Verdict<Host> {
    let action = Action::Cas { at, expected: old, desired: new };
    let author = under_way.iter().find(|(_, posted)| *posted == action);
    author.map(|(host, _)| *host).ok_or_else(|| format!("{at} changed, and nobody did it"))
}
