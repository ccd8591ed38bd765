//! The model: what the control words must mean, derived from their inline logs alone; and whether words and full log together tell at
//! every moment who holds what, as a host that recovers must find it.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_fabric::{Host, Key, KeyEntry, Tenant};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{Access, Action, Grant, WordAt};
use aquifer_pool::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use aquifer_pool::word::{InlineLog, LogEntry, LogOp, Run, STAMPS, SectionWord, SpanState, SpanWord};
use aquifer_pool::{NodeMemory, SizeClass};
use std::sync::atomic::Ordering;

/// The words of a node.
pub trait Words {
    /// The word as it is now.
    fn word(&self, at: WordAt) -> u64;
}

impl Words for NodeMemory {
    fn word(&self, at: WordAt) -> u64 {
        let offset = usize::try_from(self.layout.word_at(at)).unwrap();
        self.memory.atomic_u64(offset).load(Ordering::SeqCst)
    }
}

/// What a span is, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
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
    /// And another span was said to be full.
    OpenBeside,
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
    Ready,
    /// What a dead host held, given back by another.
    Recover,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Shadow {
    layout: Layout,
    sections: Vec<SectionWord>,
    spans: Vec<SpanWord>,
    pub modes: Vec<Mode>,
    pub owners: Vec<Option<Host>>,
    /// Who holds which extent, by its first chunk.
    extents: BTreeMap<u32, (Host, Extent)>,
    /// Hosts that are dead and fenced: others may act for them.
    pub dead: Vec<Host>,
    /// Whose data a chunk may have in it; nobody's if it was cleared since.
    pub used_by: Vec<Option<Tenant>>,
    /// Keys that clients were told, and where they open.
    told: BTreeSet<(WordAt, Key)>,
}

/// How an extent was taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Extent {
    Chunks(Run),
    Whole(Run),
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
    /// What a node begins with: some sections may be withheld.
    pub fn new(node_memory: &NodeMemory) -> Self {
        let mut shadow = Self::of(node_memory.layout);
        for section in (0..node_memory.layout.sections()).filter(|section| node_memory.is_offline(*section)) {
            let (before, after) = (SectionWord::default(), SectionWord::OFFLINE);
            let taken = shadow.section_changed(section, before, after, Host::NODE);
            assert_eq!(taken, Ok(Change::TakeWhole), "the node takes it");
            shadow.sections[section as usize] = after;
        }
        shadow
    }

    /// A node that lends all of its memory.
    pub fn of(layout: Layout) -> Self {
        Self {
            layout,
            sections: vec![SectionWord::default(); layout.sections() as usize],
            spans: vec![SpanWord::default(); layout.spans() as usize],
            modes: vec![Mode::Closed; layout.spans() as usize],
            owners: vec![None; layout.chunks() as usize],
            extents: BTreeMap::new(),
            dead: Vec::new(),
            used_by: vec![None; layout.chunks() as usize],
            told: BTreeSet::new(),
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
    pub fn observe(&mut self, memory: &impl Words, under_way: &[(Host, Action)]) -> Verdict<Option<Change>> {
        let mut change = None;
        for section in 0..self.layout.sections() {
            let new = SectionWord(memory.word(WordAt::Section(section)));
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
            let new = SpanWord(memory.word(WordAt::Span(span)));
            let old = std::mem::replace(&mut self.spans[span as usize], new);
            if old != new {
                let by = author(under_way, WordAt::Span(span), old.0, new.0)?;
                let told = self.span_changed(span, old, new, by);
                change = Some(
                    told.map_err(|why| format!("span {span} {:#018x} -> {:#018x}: {why}", old.0, new.0))?,
                );
            }
        }
        self.holders_are_known(memory)?;
        // A key that was written wrongly is found at the next change.
        if change.is_some() {
            self.keys_are_of_extents(memory)?;
        }
        Ok(change)
    }

    /// No key that anybody was told opens what nobody holds, or more or less than an extent.
    fn keys_are_of_extents(&mut self, memory: &impl Words) -> Verdict {
        for section in 0..self.layout.sections() {
            let first = section * SECTION_CHUNKS;
            let chunks = (first..first + SECTION_CHUNKS).map(|chunk| (WordAt::chunk_key(chunk), chunk));
            let spans = (0..SECTION_SPANS).map(|span| first + span * SPAN_CHUNKS);
            let spans = spans.map(|chunk| (WordAt::span_key(chunk / SPAN_CHUNKS), chunk));
            let whole = std::iter::once((WordAt::section_key(section), first));
            for (at, chunk) in chunks.chain(spans).chain(whole) {
                let key = KeyEntry(memory.word(at)).key();
                if key == Key(0) {
                    continue;
                }
                let class = match self.extents.get(&chunk) {
                    Some((_, Extent::Chunks(run))) => run.order(),
                    Some((_, Extent::Whole(run))) => run.order() + SizeClass::SPAN.k(),
                    None if self.told.contains(&(at, key)) => {
                        return Err(format!("{at} opens chunk {chunk}, which begins no extent"));
                    }
                    // A8 before A3.
                    None => continue,
                };
                let is_right = key.class() == Some(class) || !self.told.contains(&(at, key));
                ensure!(is_right, "{at} has {key:?} for an extent of class {class}");
            }
        }
        Ok(())
    }

    /// What a client of this tenant holds is opened by its key.
    pub fn is_opened(&self, memory: &impl Words, grant: &Grant, tenant: Tenant) -> Verdict {
        let entry = KeyEntry(memory.word(WordAt::key_of(*grant)));
        let is_right = entry == KeyEntry::open(grant.key, tenant);
        ensure!(is_right, "{grant:?} is not opened by its key: {entry:?}");
        Ok(())
    }

    /// An extent is handed out to a client of this tenant.
    pub fn handed_out(&mut self, memory: &impl Words, grant: &Grant, tenant: Tenant) -> Verdict {
        self.is_opened(memory, grant, tenant)?;
        let at = WordAt::key_of(*grant);
        ensure!(self.told.insert((at, grant.key)), "{grant:?}: somebody was told of that key before");
        for chunk in grant.chunk..grant.chunk + grant.class.chunks() {
            let used_by = self.used_by[chunk as usize].replace(tenant);
            let may = used_by.is_none_or(|user| user == tenant);
            ensure!(may, "{tenant:?} gets chunk {chunk} with what {used_by:?} left in it");
        }
        Ok(())
    }

    /// The holder of each extent is in its word's inline log or in its entry of the full log.
    fn holders_are_known(&self, memory: &impl Words) -> Verdict {
        for (&chunk, &(host, extent)) in &self.extents {
            let (inline, kept, run) = match extent {
                Extent::Chunks(run) => {
                    let entry = LogEntry(memory.word(WordAt::chunk_entry(chunk)));
                    (self.span(chunk / SPAN_CHUNKS).log(), entry.of_span(), run)
                }
                Extent::Whole(run) => {
                    let entry = LogEntry(memory.word(WordAt::span_entry(chunk / SPAN_CHUNKS)));
                    (self.sections[(chunk / SECTION_CHUNKS) as usize].log(), entry.of_section(), run)
                }
            };
            let tells = |log: Option<InlineLog>| log.filter(|log| log.op == LogOp::Alloc && log.run == run);
            let told = tells(inline.unwrap_or(None)).or_else(|| tells(kept.unwrap_or(None)));
            let holder = told.map(|log| log.host);
            ensure!(
                holder == Some(host),
                "{host:?} holds {extent:?} at chunk {chunk}, but the logs say {holder:?}"
            );
        }
        Ok(())
    }

    /// Whether anything of that host's is left.
    pub fn has_traces_of(&self, host: Host) -> bool {
        let is_of_it = |mode: &Mode| matches!(mode, Mode::Opening(of) | Mode::Closing(of) | Mode::Whole(of) if *of == host);
        self.modes.iter().any(is_of_it) || self.owners.contains(&Some(host))
    }

    fn may_act(&self, by: Host, of: Host) -> bool {
        by == of || self.dead.contains(&of)
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
            let changed: Vec<u8> = (0..16).filter(|&i| old.state(i) != new.state(i)).collect();
            return self.hint_changed(section, &changed, (old, new));
        }
        ensure!(log.host == by, "{by:?} signs as {:?}", log.host);
        let spans = log.run.first()..log.run.first() + log.run.len();
        let is_other = |i: &u8| !spans.contains(i) && old.state(*i) != new.state(*i);
        let others: Vec<u8> = (0..16).filter(is_other).collect();
        if let [_, ..] = others[..] {
            // A2 may say of another span that it is full.
            let hint = self.hint_changed(section, &others, (old, new))?;
            let may = log.op == LogOp::Open && hint == Change::HintFull;
            ensure!(may, "other spans than those of its log {log:?} changed: {hint:?}");
        }
        for index in spans.clone() {
            let span = section * SECTION_SPANS + u32::from(index);
            self.span_state_changed(span, log, (old.state(index), new.state(index)))?;
        }
        let chunk = section * SECTION_CHUNKS + u32::from(log.run.first()) * SPAN_CHUNKS;
        Ok(match log.op {
            LogOp::Ready => return Err("a section is no span".to_owned()),
            LogOp::Open if !others.is_empty() => Change::OpenBeside,
            LogOp::Open => Change::Open,
            LogOp::Close => Change::Close,
            LogOp::Alloc => {
                self.extents.insert(chunk, (log.host, Extent::Whole(log.run)));
                Change::TakeWhole
            }
            LogOp::Free => match self.extents.remove(&chunk) {
                Some((of, Extent::Whole(run))) if run == log.run => {
                    if of == by {
                        Change::GiveWhole
                    } else {
                        Change::Recover
                    }
                }
                other => return Err(format!("{log:?} gives back {other:?}")),
            },
        })
    }

    fn span_state_changed(&mut self, span: u32, log: InlineLog, states: (SpanState, SpanState)) -> Verdict {
        let mode = self.modes[span as usize];
        let (right, after) = match log.op {
            LogOp::Ready => (false, mode),
            LogOp::Open => (
                mode == Mode::Closed && states == (SpanState::Empty, SpanState::Partial),
                Mode::Opening(log.host),
            ),
            LogOp::Close => {
                let may = match mode {
                    Mode::Closing(of) => self.may_act(log.host, of),
                    Mode::Opening(of) => of != log.host && self.may_act(log.host, of),
                    _ => false,
                };
                (may && states.1 == SpanState::Empty, Mode::Closed)
            }
            LogOp::Alloc => {
                (mode == Mode::Closed && states == (SpanState::Empty, SpanState::Full), Mode::Whole(log.host))
            }
            LogOp::Free => {
                let may = matches!(mode, Mode::Whole(of) if self.may_act(log.host, of));
                (may && states == (SpanState::Full, SpanState::Empty), Mode::Closed)
            }
        };
        ensure!(right, "{log:?} takes span {span} from {states:?}, but it is {mode:?}");
        ensure!(self.span(span).is_closed(), "{log:?} while span {span} has chunks");
        self.modes[span as usize] = after;
        match log.op {
            LogOp::Open | LogOp::Alloc if !self.span(span).is_ready() => {
                Err(format!("{log:?} begins a new life of span {span}, which is not ready"))
            }
            LogOp::Alloc => self.take(span, u32::MAX, log.host),
            LogOp::Free => self.give(span, u32::MAX, log.host),
            _ => Ok(()),
        }
    }

    fn hint_changed(
        &self,
        section: u32,
        changed: &[u8],
        (old, new): (SectionWord, SectionWord),
    ) -> Verdict<Change> {
        let [index] = *changed else {
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
        let (mask, gone) = (log.run.mask(), old.bits() & !new.bits());
        let (right, after, change) = match log.op {
            LogOp::Alloc if mode == Mode::Opening(by) => {
                (new.bits() == mask, Mode::Chunks, Change::FirstChunks)
            }
            LogOp::Alloc => {
                (mode == Mode::Chunks && new.bits() == old.bits() | mask, Mode::Chunks, Change::TakeChunks)
            }
            LogOp::Free => (mode == Mode::Chunks && gone & mask == mask, Mode::Chunks, Change::GiveChunks),
            LogOp::Close => {
                let is_last = gone == old.bits() && gone & mask == mask;
                (mode == Mode::Chunks && is_last, Mode::Closing(by), Change::GiveLast)
            }
            LogOp::Ready => (mode == Mode::Closed && old.is_closed(), mode, Change::Ready),
            LogOp::Open => (false, mode, Change::Open),
        };
        ensure!(right, "{log:?} on a span that is {mode:?}");
        let state = self.state_of(span);
        let is_right = state != SpanState::Empty || log.op == LogOp::Ready;
        ensure!(is_right, "{log:?} on a span whose section says {state:?}");
        self.modes[span as usize] = after;
        let first = span * SPAN_CHUNKS + u32::from(log.run.first());
        match log.op {
            LogOp::Alloc => {
                self.take(span, mask, by)?;
                self.extents.insert(first, (by, Extent::Chunks(log.run)));
            }
            LogOp::Free | LogOp::Close => return self.chunks_given(span, gone, log, change),
            LogOp::Open | LogOp::Ready => {}
        }
        Ok(change)
    }

    /// Extents of the host itself, or all that a dead one had in the span.
    fn chunks_given(&mut self, span: u32, gone: u32, log: InlineLog, change: Change) -> Verdict<Change> {
        let by = log.host;
        self.give(span, gone, by)?;
        let first = span * SPAN_CHUNKS;
        let mut given = 0;
        let mut others = false;
        let mut is_named = false;
        self.extents.retain(|&chunk, &mut (of, extent)| match extent {
            Extent::Chunks(run) if chunk / SPAN_CHUNKS * SPAN_CHUNKS == first && run.mask() & gone != 0 => {
                given |= run.mask();
                is_named |= run == log.run;
                others |= of != by;
                false
            }
            _ => true,
        });
        ensure!(given == gone, "{log:?} gives back {gone:#010x} of extents {given:#010x}");
        ensure!(is_named, "{log:?} names none of the extents that go");
        Ok(if others { Change::Recover } else { change })
    }

    fn take(&mut self, span: u32, mask: u32, by: Host) -> Verdict {
        for chunk in places(mask) {
            let owner = self.owners[(span * SPAN_CHUNKS + chunk) as usize].replace(by);
            ensure!(owner.is_none(), "chunk {chunk} of span {span} goes to {by:?} from {owner:?}");
        }
        Ok(())
    }

    fn give(&mut self, span: u32, mask: u32, by: Host) -> Verdict {
        for chunk in places(mask) {
            let owner = self.owners[(span * SPAN_CHUNKS + chunk) as usize].take();
            let may = owner.is_some_and(|of| self.may_act(by, of));
            ensure!(may, "chunk {chunk} of span {span}, of {owner:?}, is given back by {by:?}");
        }
        Ok(())
    }
}

fn places(mask: u32) -> impl Iterator<Item = u32> {
    (0..SPAN_CHUNKS).filter(move |chunk| mask >> chunk & 1 == 1)
}

fn stamp_follows(before: Option<InlineLog>, log: InlineLog) -> Verdict {
    let expected = before.map_or(1, |before| (before.stamp + 1) % STAMPS);
    ensure!(log.stamp == expected, "timestamp {} where {expected} is due", log.stamp);
    Ok(())
}

/// Whose CAS it was.
fn author(under_way: &[(Host, Action)], at: WordAt, old: u64, new: u64) -> Verdict<Host> {
    let cas = Access::Cas { at, expected: old, desired: new };
    let is_it = |posted: &Action| posted.accesses().contains(&cas);
    let author = under_way.iter().find(|(_, posted)| is_it(posted));
    author.map(|(host, _)| *host).ok_or_else(|| format!("{at} changed, and nobody did it"))
}
