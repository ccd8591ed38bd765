//! The reference model of the pool.
//!
//! It derives from the inline logs alone what the control words must mean, and checks at each
//! moment that words and full log name the owner of each extent, as recovery needs.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_fabric::{Host, Key, KeyEntry, Tenant};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{Action, Grant, WordAccess, WordAt};
use aquifer_pool::size::{SECTION_CHUNKS, SECTION_SPANS, SPAN_CHUNKS};
use aquifer_pool::word::{AlignedRun, InlineLog, LogEntry, LogOp, STAMPS, SectionWord, SpanState, SpanWord};
use aquifer_pool::{NodeMemory, SizeClass};
use std::sync::atomic::Ordering;

/// The words of a node.
pub trait ReadWord {
    /// The present value of a word.
    fn word(&self, at: WordAt) -> u64;
}

impl ReadWord for NodeMemory {
    fn word(&self, at: WordAt) -> u64 {
        let offset = usize::try_from(self.layout.word_at(at)).unwrap();
        self.memory.atomic_u64(offset).load(Ordering::SeqCst)
    }
}

/// The true state of a span.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SpanMode {
    Closed,
    Opening(Host),
    Chunks,
    Closing(Host),
    Whole(Host),
}

/// The kind of a change, counted to see that a simulation covers all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Open,
    /// A2 that also sets the full hint of another span.
    OpenAndSetFull,
    AllocateChunks,
    FirstChunks,
    AllocateWhole,
    FreeChunks,
    FreeLast,
    Close,
    FreeWhole,
    SetFull,
    ClearFull,
    SetContended,
    ClearContended,
    Ready,
    /// A free of what a dead host owned.
    Recover,
}

/// The reference model.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PoolModel {
    layout: Layout,
    sections: Vec<SectionWord>,
    spans: Vec<SpanWord>,
    pub modes: Vec<SpanMode>,
    pub owners: Vec<Option<Host>>,
    /// The extents with their owners, by first chunk.
    extents: BTreeMap<u32, (Host, ExtentRun)>,
    /// Hosts that are dead and fenced: others may act for them.
    pub dead: Vec<Host>,
    /// The tenant whose data each chunk may hold; `None` if the chunk is clear.
    pub used_by: Vec<Option<Tenant>>,
    /// Keys that clients have been granted, with their entries.
    granted_keys: BTreeSet<(WordAt, Key)>,
}

/// The place of an extent in its control word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum ExtentRun {
    Chunks(AlignedRun),
    Whole(AlignedRun),
}

/// The outcome of a check; the error says what is wrong.
type Check<T = ()> = Result<T, String>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(format!($($message)*));
        }
    };
}
pub(crate) use ensure;

impl PoolModel {
    /// The model of a new node, of which some sections may be offline.
    pub fn new(node_memory: &NodeMemory) -> Self {
        let mut model = Self::of(node_memory.layout);
        for section in (0..node_memory.layout.sections()).filter(|section| node_memory.is_offline(*section)) {
            let (before, after) = (SectionWord::default(), SectionWord::OFFLINE);
            let change = model.section_changed(section, before, after, Host::NODE);
            assert_eq!(change, Ok(Change::AllocateWhole), "the node allocates it");
            model.sections[section as usize] = after;
        }
        model
    }

    /// The model of a new node that lends all of its memory.
    pub fn of(layout: Layout) -> Self {
        Self {
            layout,
            sections: vec![SectionWord::default(); layout.sections() as usize],
            spans: vec![SpanWord::default(); layout.spans() as usize],
            modes: vec![SpanMode::Closed; layout.spans() as usize],
            owners: vec![None; layout.chunks() as usize],
            extents: BTreeMap::new(),
            dead: Vec::new(),
            used_by: vec![None; layout.chunks() as usize],
            granted_keys: BTreeSet::new(),
        }
    }

    pub fn state_of(&self, span: u32) -> SpanState {
        let index = u8::try_from(span % SECTION_SPANS).unwrap();
        self.sections[(span / SECTION_SPANS) as usize].state(index)
    }

    pub fn span(&self, span: u32) -> SpanWord {
        self.spans[span as usize]
    }

    /// Reads all words and checks the one that has changed, if any. A CAS in flight must account
    /// for the change.
    pub fn observe(&mut self, memory: &impl ReadWord, in_flight: &[(Host, Action)]) -> Check<Option<Change>> {
        let mut change = None;
        for section in 0..self.layout.sections() {
            let new = SectionWord(memory.word(WordAt::Section(section)));
            let old = std::mem::replace(&mut self.sections[section as usize], new);
            if old != new {
                let by = author(in_flight, WordAt::Section(section), old.0, new.0)?;
                let outcome = self.section_changed(section, old, new, by);
                change =
                    Some(outcome.map_err(|why| {
                        format!("section {section} {:#018x} -> {:#018x}: {why}", old.0, new.0)
                    })?);
            }
        }
        for span in 0..self.layout.spans() {
            let new = SpanWord(memory.word(WordAt::Span(span)));
            let old = std::mem::replace(&mut self.spans[span as usize], new);
            if old != new {
                let by = author(in_flight, WordAt::Span(span), old.0, new.0)?;
                let outcome = self.span_changed(span, old, new, by);
                change = Some(
                    outcome
                        .map_err(|why| format!("span {span} {:#018x} -> {:#018x}: {why}", old.0, new.0))?,
                );
            }
        }
        self.check_owners(memory)?;
        // A wrong key is found at the next change of a control word.
        if change.is_some() {
            self.check_keys(memory)?;
        }
        Ok(change)
    }

    /// Checks that each granted key is in the entry of an extent of its size.
    fn check_keys(&mut self, memory: &impl ReadWord) -> Check {
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
                    Some((_, ExtentRun::Chunks(run))) => run.order(),
                    Some((_, ExtentRun::Whole(run))) => run.order() + SizeClass::SPAN.k(),
                    None if self.granted_keys.contains(&(at, key)) => {
                        return Err(format!("{at} opens chunk {chunk}, which begins no extent"));
                    }
                    // A8 before A3.
                    None => continue,
                };
                let is_right = key.class() == Some(class) || !self.granted_keys.contains(&(at, key));
                ensure!(is_right, "{at} has {key:?} for an extent of class {class}");
            }
        }
        Ok(())
    }

    /// Checks that the entry of an extent has its key and tenant.
    pub fn has_key(&self, memory: &impl ReadWord, grant: &Grant, tenant: Tenant) -> Check {
        let entry = KeyEntry(memory.word(WordAt::key_of(*grant)));
        let is_right = entry == KeyEntry::open(grant.key, tenant);
        ensure!(is_right, "the key of {grant:?} is not in its entry: {entry:?}");
        Ok(())
    }

    /// Records that an extent is granted to a client of this tenant.
    pub fn granted_to(&mut self, memory: &impl ReadWord, grant: &Grant, tenant: Tenant) -> Check {
        self.has_key(memory, grant, tenant)?;
        let at = WordAt::key_of(*grant);
        ensure!(self.granted_keys.insert((at, grant.key)), "{grant:?}: this key was granted before");
        for chunk in grant.chunk..grant.chunk + grant.class.chunks() {
            let used_by = self.used_by[chunk as usize].replace(tenant);
            let may = used_by.is_none_or(|user| user == tenant);
            ensure!(may, "{tenant:?} gets chunk {chunk} with data of {used_by:?} in it");
        }
        Ok(())
    }

    /// Checks that the owner of each extent is in the inline log of its word or in its entry of the
    /// full log.
    fn check_owners(&self, memory: &impl ReadWord) -> Check {
        for (&chunk, &(host, extent)) in &self.extents {
            let (inline, kept, run) = match extent {
                ExtentRun::Chunks(run) => {
                    let entry = LogEntry(memory.word(WordAt::chunk_entry(chunk)));
                    (self.span(chunk / SPAN_CHUNKS).log(), entry.of_span(), run)
                }
                ExtentRun::Whole(run) => {
                    let entry = LogEntry(memory.word(WordAt::span_entry(chunk / SPAN_CHUNKS)));
                    (self.sections[(chunk / SECTION_CHUNKS) as usize].log(), entry.of_section(), run)
                }
            };
            let of_extent =
                |log: Option<InlineLog>| log.filter(|log| log.op == LogOp::Alloc && log.run == run);
            let record = of_extent(inline.unwrap_or(None)).or_else(|| of_extent(kept.unwrap_or(None)));
            let owner = record.map(|log| log.host);
            ensure!(
                owner == Some(host),
                "{host:?} owns {extent:?} at chunk {chunk}, but the logs say {owner:?}"
            );
        }
        Ok(())
    }

    /// Whether a host owns an extent, or a span that is being opened or closed.
    pub fn owns_anything(&self, host: Host) -> bool {
        let is_owned = |mode: &SpanMode| match mode {
            SpanMode::Opening(of) | SpanMode::Closing(of) | SpanMode::Whole(of) => *of == host,
            SpanMode::Closed | SpanMode::Chunks => false,
        };
        self.modes.iter().any(is_owned) || self.owners.contains(&Some(host))
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
    ) -> Check<Change> {
        new.check().map_err(|error| error.to_string())?;
        let before = old.log().map_err(|error| error.to_string())?;
        let log = new.log().map_err(|error| error.to_string())?.ok_or("the log is gone")?;
        check_timestamp(before, log)?;
        let record = |log: InlineLog| (log.op, log.run, log.host);
        if before.map(record) == Some(record(log)) {
            let changed: Vec<u8> = (0..16).filter(|&i| old.state(i) != new.state(i)).collect();
            return self.hint_changed(section, &changed, (old, new));
        }
        ensure!(log.host == by, "{by:?} writes a record of {:?}", log.host);
        let spans = log.run.first()..log.run.first() + log.run.len();
        let is_other = |i: &u8| !spans.contains(i) && old.state(*i) != new.state(*i);
        let others: Vec<u8> = (0..16).filter(is_other).collect();
        if let [_, ..] = others[..] {
            // A2 may set the full hint of another span.
            let hint = self.hint_changed(section, &others, (old, new))?;
            let may = log.op == LogOp::Open && hint == Change::SetFull;
            ensure!(may, "other spans than those of its log {log:?} changed: {hint:?}");
        }
        for index in spans.clone() {
            let span = section * SECTION_SPANS + u32::from(index);
            self.span_state_changed(span, log, (old.state(index), new.state(index)))?;
        }
        let chunk = section * SECTION_CHUNKS + u32::from(log.run.first()) * SPAN_CHUNKS;
        Ok(match log.op {
            LogOp::Ready => return Err("ready in the word of a section".to_owned()),
            LogOp::Open if !others.is_empty() => Change::OpenAndSetFull,
            LogOp::Open => Change::Open,
            LogOp::Close => Change::Close,
            LogOp::Alloc => {
                self.extents.insert(chunk, (log.host, ExtentRun::Whole(log.run)));
                Change::AllocateWhole
            }
            LogOp::Free => match self.extents.remove(&chunk) {
                Some((of, ExtentRun::Whole(run))) if run == log.run => {
                    if of == by {
                        Change::FreeWhole
                    } else {
                        Change::Recover
                    }
                }
                other => return Err(format!("{log:?} frees {other:?}")),
            },
        })
    }

    fn span_state_changed(&mut self, span: u32, log: InlineLog, states: (SpanState, SpanState)) -> Check {
        let mode = self.modes[span as usize];
        let (right, after) = match log.op {
            LogOp::Ready => (false, mode),
            LogOp::Open => (
                mode == SpanMode::Closed && states == (SpanState::Empty, SpanState::Partial),
                SpanMode::Opening(log.host),
            ),
            LogOp::Close => {
                let may = match mode {
                    SpanMode::Closing(of) => self.may_act(log.host, of),
                    SpanMode::Opening(of) => of != log.host && self.may_act(log.host, of),
                    _ => false,
                };
                (may && states.1 == SpanState::Empty, SpanMode::Closed)
            }
            LogOp::Alloc => (
                mode == SpanMode::Closed && states == (SpanState::Empty, SpanState::Full),
                SpanMode::Whole(log.host),
            ),
            LogOp::Free => {
                let may = matches!(mode, SpanMode::Whole(of) if self.may_act(log.host, of));
                (may && states == (SpanState::Full, SpanState::Empty), SpanMode::Closed)
            }
        };
        ensure!(right, "{log:?} takes span {span} from {states:?}, but it is {mode:?}");
        ensure!(self.span(span).is_closed(), "{log:?} while span {span} has chunks");
        self.modes[span as usize] = after;
        match log.op {
            LogOp::Open | LogOp::Alloc if !self.span(span).is_ready() => {
                Err(format!("{log:?} opens or allocates span {span}, which is not ready"))
            }
            LogOp::Alloc => self.allocate(span, u32::MAX, log.host),
            LogOp::Free => self.free(span, u32::MAX, log.host),
            _ => Ok(()),
        }
    }

    fn hint_changed(
        &self,
        section: u32,
        changed: &[u8],
        (old, new): (SectionWord, SectionWord),
    ) -> Check<Change> {
        let [index] = *changed else {
            return Err(format!("a change of hints changes the spans {changed:?}"));
        };
        let mode = self.modes[(section * SECTION_SPANS + u32::from(index)) as usize];
        let right = matches!(mode, SpanMode::Chunks | SpanMode::Closing(_));
        ensure!(right, "a change of hints on span {index} of the section, which is {mode:?}");
        match (old.state(index), new.state(index)) {
            (SpanState::Partial | SpanState::Contended, SpanState::Full) => Ok(Change::SetFull),
            (SpanState::Full, SpanState::Partial) => Ok(Change::ClearFull),
            (SpanState::Partial, SpanState::Contended) => Ok(Change::SetContended),
            (SpanState::Contended, SpanState::Partial) => Ok(Change::ClearContended),
            states => Err(format!("a change of hints takes span {index} from and to {states:?}")),
        }
    }

    fn span_changed(&mut self, span: u32, old: SpanWord, new: SpanWord, by: Host) -> Check<Change> {
        new.check().map_err(|error| error.to_string())?;
        let before = old.log().map_err(|error| error.to_string())?;
        let log = new.log().map_err(|error| error.to_string())?.ok_or("the log is gone")?;
        check_timestamp(before, log)?;
        ensure!(log.host == by, "{by:?} writes a record of {:?}", log.host);
        let mode = self.modes[span as usize];
        let (mask, gone) = (log.run.mask(), old.bits() & !new.bits());
        let (right, after, change) = match log.op {
            LogOp::Alloc if mode == SpanMode::Opening(by) => {
                (new.bits() == mask, SpanMode::Chunks, Change::FirstChunks)
            }
            LogOp::Alloc => (
                mode == SpanMode::Chunks && new.bits() == old.bits() | mask,
                SpanMode::Chunks,
                Change::AllocateChunks,
            ),
            LogOp::Free => {
                (mode == SpanMode::Chunks && gone & mask == mask, SpanMode::Chunks, Change::FreeChunks)
            }
            LogOp::Close => {
                let is_last = gone == old.bits() && gone & mask == mask;
                (mode == SpanMode::Chunks && is_last, SpanMode::Closing(by), Change::FreeLast)
            }
            LogOp::Ready => (mode == SpanMode::Closed && old.is_closed(), mode, Change::Ready),
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
                self.allocate(span, mask, by)?;
                self.extents.insert(first, (by, ExtentRun::Chunks(log.run)));
            }
            LogOp::Free | LogOp::Close => return self.chunks_freed(span, gone, log, change),
            LogOp::Open | LogOp::Ready => {}
        }
        Ok(change)
    }

    /// Removes the extents that were freed: some of the host itself, or all of a dead host in the
    /// span.
    fn chunks_freed(&mut self, span: u32, gone: u32, log: InlineLog, change: Change) -> Check<Change> {
        let by = log.host;
        self.free(span, gone, by)?;
        let first = span * SPAN_CHUNKS;
        let mut freed = 0;
        let mut others = false;
        let mut is_named = false;
        self.extents.retain(|&chunk, &mut (of, extent)| match extent {
            ExtentRun::Chunks(run)
                if chunk / SPAN_CHUNKS * SPAN_CHUNKS == first && run.mask() & gone != 0 =>
            {
                freed |= run.mask();
                is_named |= run == log.run;
                others |= of != by;
                false
            }
            _ => true,
        });
        ensure!(freed == gone, "{log:?} frees {gone:#010x} of extents {freed:#010x}");
        ensure!(is_named, "{log:?} names none of the extents that it frees");
        Ok(if others { Change::Recover } else { change })
    }

    fn allocate(&mut self, span: u32, mask: u32, by: Host) -> Check {
        for chunk in places(mask) {
            let owner = self.owners[(span * SPAN_CHUNKS + chunk) as usize].replace(by);
            ensure!(owner.is_none(), "chunk {chunk} of span {span} goes to {by:?} from {owner:?}");
        }
        Ok(())
    }

    fn free(&mut self, span: u32, mask: u32, by: Host) -> Check {
        for chunk in places(mask) {
            let owner = self.owners[(span * SPAN_CHUNKS + chunk) as usize].take();
            let may = owner.is_some_and(|of| self.may_act(by, of));
            ensure!(may, "chunk {chunk} of span {span}, of {owner:?}, is freed by {by:?}");
        }
        Ok(())
    }
}

fn places(mask: u32) -> impl Iterator<Item = u32> {
    (0..SPAN_CHUNKS).filter(move |chunk| mask >> chunk & 1 == 1)
}

fn check_timestamp(before: Option<InlineLog>, log: InlineLog) -> Check {
    let expected = before.map_or(1, |before| (before.stamp + 1) % STAMPS);
    ensure!(log.stamp == expected, "timestamp {} where {expected} is due", log.stamp);
    Ok(())
}

/// The host whose CAS made a change.
fn author(in_flight: &[(Host, Action)], at: WordAt, old: u64, new: u64) -> Check<Host> {
    let cas = WordAccess::Cas { at, expected: old, desired: new };
    let is_it = |posted: &Action| posted.accesses().contains(&cas);
    let author = in_flight.iter().find(|(_, posted)| is_it(posted));
    author.map(|(host, _)| *host).ok_or_else(|| format!("{at} changed, and no CAS in flight does that"))
}
