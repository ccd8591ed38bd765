//! What a host does, one operation on the node's memory at a time.

use crate::recovery_model::fault::Fault;
use crate::recovery_model::memory::{
    CHUNK_NUMBERS, CHUNKS, Code, Entry, Group, HOSTS, Holding, Host, Memory, SPAN_NUMBERS, SPANS, Section,
    Span, SpanLog,
};
use crate::recovery_model::truth::Truth;

/// A change of a word that commits something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Goal {
    /// A1; A3 if the span is ours to open.
    Take { span: u8, chunk: u8, is_ours: bool },
    /// A2, and then A3 for a chunk.
    Open { span: u8, chunk: u8 },
    /// A7.
    TakeWhole(Group),
    /// F1, F3. If the span is closed by it, it may rest.
    Give { span: u8, chunk: u8, rests: bool },
    /// F7, and then F4.
    Sign { span: u8 },
    /// F4.
    Close { span: u8 },
    /// F5.
    GiveWhole(Group),
}

/// What a host is about to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum At {
    Idle,
    /// The record that the goal will write over goes to the log first.
    ReadEntry(Goal),
    ProbeAgain(Goal, Seen),
    WriteEntry(Goal, Seen),
    /// The CAS itself.
    Commit(Goal),
    /// Our own record, after A1 or A7.
    Record(Goal),
    /// The same before A3, of all chunks of the span.
    RecordFirst(Goal),
    /// Is the span ready for a new life? For A2 or A7; of a group the span with this place is next.
    ProbeReady(Goal, u8),
    /// It is not marked. Is its last life over?
    ProbeSection(Goal, u8),
    Mark(Goal, u8),
    /// A fault: the section is read only now.
    ReadSection(Goal, u8),
    /// After F4 of our own.
    MarkOwn(u8),
    /// Recovery begins with the section.
    LookAtSection,
    LookAtSpan(u8),
    LookAtSectionAgain(u8),
    LookAtChunkLog(u8, u8),
    LookAtSpanLog(u8),
}

/// What an entry of the log was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Seen {
    Chunk(Entry<Host>),
    Span(Entry<Holding>),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Actor {
    pub host: Host,
    pub at: At,
    /// What it remembers.
    pub section: Section,
    pub spans: [Span; SPANS],
    pub chunks: [[bool; CHUNKS]; SPANS],
    pub groups: [Option<Group>; SPANS],
    /// What it gave back, and whose record it left in the log: as long as it knows of no change by others.
    left_chunks: [[bool; CHUNKS]; SPANS],
    left_groups: [Option<Group>; SPANS],
    /// The spans that it has closed, and may open again.
    resting: [bool; SPANS],
    /// The words, by their stamps, whose records it may write over: it has seen them in the log, or put them there.
    settled_spans: [u8; SPANS],
    settled_section: u8,
    /// Operations that it may still begin.
    pub left: u8,
    pub recovering: Option<Host>,
    pub recovered: [bool; HOSTS],
    pub fault: Fault,
}

/// The world, as one host's operation changes it.
pub struct World<'a> {
    pub memory: &'a mut Memory,
    pub truth: &'a mut Truth,
}

impl Actor {
    pub fn new(host: Host, left: u8, fault: Fault) -> Self {
        Self {
            host,
            at: At::Idle,
            section: Memory::NEW.section,
            spans: Memory::NEW.spans,
            chunks: [[false; CHUNKS]; SPANS],
            groups: [None; SPANS],
            left_chunks: [[false; CHUNKS]; SPANS],
            left_groups: [None; SPANS],
            resting: [false; SPANS],
            settled_spans: [0; SPANS],
            settled_section: 0,
            left,
            recovering: None,
            recovered: [false; HOSTS],
            fault,
        }
    }

    /// What it could begin, by what it remembers and has.
    pub fn wishes(&self) -> Vec<Goal> {
        let mut goals = Vec::new();
        for span in SPAN_NUMBERS {
            let word = self.spans[usize::from(span)];
            let group = |is_pair| Group { first: span, is_pair };
            let free = CHUNK_NUMBERS.into_iter().find(|chunk| !word.has(*chunk));
            match (self.section.codes[usize::from(span)], free) {
                (Code::Open, Some(chunk)) if !word.is_closed() => {
                    goals.push(Goal::Take { span, chunk, is_ours: false });
                }
                (Code::Empty, _) => {
                    goals.push(Goal::Open { span, chunk: 0 });
                    goals.push(Goal::TakeWhole(group(false)));
                    if span == 0 && self.section.is_empty(group(true)) {
                        goals.push(Goal::TakeWhole(group(true)));
                    }
                }
                _ => {}
            }
            let ours =
                CHUNK_NUMBERS.into_iter().filter(|chunk| self.chunks[usize::from(span)][usize::from(*chunk)]);
            goals.extend(ours.flat_map(|chunk| {
                [false, true].into_iter().map(move |rests| Goal::Give { span, chunk, rests })
            }));
            if self.resting[usize::from(span)] {
                let left = self.left_chunks[usize::from(span)];
                let left = CHUNK_NUMBERS.into_iter().filter(|chunk| left[usize::from(*chunk)]);
                goals.extend(left.map(|chunk| Goal::Take { span, chunk, is_ours: false }));
                goals.push(Goal::Sign { span });
            }
            goals.extend(self.groups[usize::from(span)].map(Goal::GiveWhole));
        }
        goals
    }

    /// The first step towards a goal.
    pub fn begin(&mut self, goal: Goal) {
        self.at = match goal {
            Goal::Open { .. } | Goal::TakeWhole(_) if self.fault != Fault::SkipMark => {
                At::ProbeReady(goal, first_span(goal))
            }
            _ => self.before(goal),
        };
    }

    /// Its CAS, or first the record that this would write over.
    fn before(&self, goal: Goal) -> At {
        let is_own = |host: Host| host == self.host && self.fault == Fault::OwnIsKnown;
        let is_known = match target(goal) {
            Some(span) => {
                let (word, settled) = (self.spans[usize::from(span)], self.settled_spans[usize::from(span)]);
                match word.log {
                    SpanLog::Alloc(host, _) => word.stamp == settled || is_own(host),
                    _ => true,
                }
            }
            None => match self.section.log {
                Some(Holding::Alloc(host, _)) => self.section.stamp == self.settled_section || is_own(host),
                Some(Holding::Open(..)) => self.section.stamp == self.settled_section,
                None => true,
            },
        };
        if is_known || self.fault == Fault::SkipFlush { At::Commit(goal) } else { At::ReadEntry(goal) }
    }

    /// It came to nothing.
    fn give_up(&mut self) {
        self.at = if self.recovering.is_some() { At::LookAtSection } else { At::Idle };
    }

    /// Do what is next.
    pub fn step(&mut self, world: &mut World<'_>) {
        match self.at {
            At::Idle => {}
            At::ReadEntry(goal) => self.read_entry(goal, world),
            At::ProbeAgain(goal, seen) => {
                if self.probe_again(goal, world) {
                    self.at = At::WriteEntry(goal, seen);
                } else {
                    self.lost(goal, world);
                }
            }
            At::WriteEntry(goal, seen) => self.write_entry(goal, seen, world),
            At::Commit(goal) => self.commit(goal, world),
            At::Record(goal) => self.record(goal, world),
            At::RecordFirst(goal) => self.record_first(goal, world),
            At::ProbeReady(goal, span) => self.probe_ready(goal, span, world),
            At::ProbeSection(goal, span) => {
                let section = world.memory.section;
                let is_as_before = section == self.section;
                self.learn_section(section);
                if is_as_before { self.at = At::Mark(goal, span) } else { self.give_up() }
            }
            At::Mark(goal, span) => self.mark(goal, span, world),
            At::ReadSection(goal, span) => {
                self.learn_section(world.memory.section);
                let is_empty = match goal {
                    Goal::TakeWhole(group) => self.section.is_empty(group),
                    _ => self.section.codes[usize::from(span)] == Code::Empty,
                };
                if is_empty { self.at = self.after_ready(goal, span) } else { self.give_up() }
            }
            At::MarkOwn(span) => {
                if !self.mark_ready(span, world) {
                    self.learn_span(span, world.memory.spans[usize::from(span)]);
                }
                self.give_up();
            }
            At::LookAtSection => self.look_at_section(world),
            At::LookAtSpan(span) => self.look_at_span(span, world),
            At::LookAtSectionAgain(span) => self.look_at_section_again(span, world),
            At::LookAtChunkLog(span, chunk) => self.look_at_chunk_log(span, chunk, world),
            At::LookAtSpanLog(span) => {
                let found = world.memory.span_logs[usize::from(span)].what;
                self.judge_span(span, found);
            }
        }
    }

    fn read_entry(&mut self, goal: Goal, world: &World<'_>) {
        let (seen, is_there) = match target(goal) {
            Some(span) => {
                let SpanLog::Alloc(host, chunk) = self.spans[usize::from(span)].log else { return };
                let entry = world.memory.chunk_logs[usize::from(span)][usize::from(chunk)];
                (Seen::Chunk(entry), entry.what == Some(host))
            }
            None => {
                let Some(log) = self.section.log else { return };
                let entry = world.memory.span_logs[log.first()];
                (Seen::Span(entry), entry.what == Some(log))
            }
        };
        if is_there {
            self.settle(target(goal));
        }
        self.at = match self.fault {
            _ if is_there => At::Commit(goal),
            Fault::BlindFlush | Fault::SkipLookAgain => At::WriteEntry(goal, seen),
            _ => At::ProbeAgain(goal, seen),
        };
    }

    /// The record that a word has now may be written over.
    fn settle(&mut self, span: Option<u8>) {
        match span {
            Some(span) => {
                self.settled_spans[usize::from(span)] = self.spans[usize::from(span)].stamp;
            }
            None => self.settled_section = self.section.stamp,
        }
    }

    /// Whether the word is still what we remember: then no record that is newer was in the log when we read it.
    fn probe_again(&mut self, goal: Goal, world: &World<'_>) -> bool {
        match target(goal) {
            Some(span) => self.spans[usize::from(span)] == world.memory.spans[usize::from(span)],
            None => self.section == world.memory.section,
        }
    }

    fn write_entry(&mut self, goal: Goal, seen: Seen, world: &mut World<'_>) {
        let is_blind = self.fault == Fault::BlindFlush;
        let written = match (target(goal), seen) {
            (Some(span), Seen::Chunk(before)) => {
                let SpanLog::Alloc(host, chunk) = self.spans[usize::from(span)].log else { return };
                let entry = &mut world.memory.chunk_logs[usize::from(span)][usize::from(chunk)];
                let may = is_blind || *entry == before;
                if may {
                    entry.write(host);
                }
                may
            }
            (None, Seen::Span(before)) => {
                let Some(log) = self.section.log else { return };
                let entry = &mut world.memory.span_logs[log.first()];
                let may = is_blind || *entry == before;
                if may {
                    entry.write(log);
                }
                may
            }
            _ => return,
        };
        if written {
            self.settle(target(goal));
        }
        self.at = if written { At::Commit(goal) } else { At::ReadEntry(goal) };
    }

    /// The goal's word has changed: learn it, and try again what must be done.
    fn lost(&mut self, goal: Goal, world: &mut World<'_>) {
        match target(goal) {
            Some(span) => self.learn_span(span, world.memory.spans[usize::from(span)]),
            None => self.learn_section(world.memory.section),
        }
        match goal {
            // Nobody else does it any more.
            Goal::Close { span } if self.has_signed(span) => self.at = self.before(goal),
            _ if self.recovering.is_some() => self.give_up(),
            Goal::Take { is_ours: true, .. }
            | Goal::Give { .. }
            | Goal::Close { .. }
            | Goal::GiveWhole(_) => {
                self.at = self.before(goal);
            }
            _ => self.give_up(),
        }
    }

    fn has_signed(&self, span: u8) -> bool {
        self.spans[usize::from(span)].log == SpanLog::Close(self.host)
    }

    fn commit(&mut self, goal: Goal, world: &mut World<'_>) {
        if !self.probe_again(goal, world) {
            return self.lost(goal, world);
        }
        let host = self.host;
        let whole = |span| Group { first: span, is_pair: false };
        match goal {
            Goal::Take { span, chunk, is_ours } => {
                world.truth.take(span.into(), chunk, host);
                self.set_span(world, span, |word| word.take(chunk, host));
                self.resting[usize::from(span)] = false;
                // Who opened a span is needed only until its first chunk is taken.
                if is_ours && self.section.log == Some(Holding::Open(host, span)) {
                    self.settle(None);
                }
                let is_left = &mut self.left_chunks[usize::from(span)][usize::from(chunk)];
                if std::mem::replace(is_left, false) { self.hold(goal) } else { self.at = At::Record(goal) }
            }
            Goal::Open { span, chunk } => {
                world.truth.open(span.into(), host);
                let log = Some(Holding::Open(host, span));
                self.set_section(world, |word| word.with(whole(span), Code::Open, log));
                self.left_groups[usize::from(span)] = None;
                let first = Goal::Take { span, chunk, is_ours: true };
                self.at = At::RecordFirst(first);
            }
            Goal::TakeWhole(group) => {
                world.truth.take_whole(group, host);
                let log = Some(Holding::Alloc(host, group));
                self.set_section(world, |word| word.with(group, Code::Whole, log));
                let is_left = self.left_groups[usize::from(group.first)] == Some(group);
                if is_left {
                    self.left_groups[usize::from(group.first)] = None;
                    self.hold(goal);
                } else {
                    self.at = At::Record(goal);
                }
            }
            Goal::Sign { span } => {
                world.truth.sign(span.into(), host);
                self.set_span(world, span, |word| word.sign(host));
                self.resting[usize::from(span)] = false;
                self.at = self.before(Goal::Close { span });
            }
            Goal::Give { span, chunk, rests } => {
                world.truth.give(span.into(), chunk, host);
                self.chunks[usize::from(span)][usize::from(chunk)] = false;
                self.set_span(world, span, |word| word.give(chunk, host));
                self.left_chunks[usize::from(span)][usize::from(chunk)] = self.recovering.is_none();
                let is_closed = self.spans[usize::from(span)].is_closed();
                if is_closed && rests {
                    self.resting[usize::from(span)] = true;
                    self.give_up();
                } else if is_closed {
                    self.at = self.before(Goal::Close { span });
                } else {
                    self.give_up();
                }
            }
            Goal::Close { span } => {
                world.truth.close(span.into(), host);
                self.set_section(world, |word| word.with(whole(span), Code::Empty, None));
                let is_unmarked = matches!(self.spans[usize::from(span)].log, SpanLog::Close(_));
                if is_unmarked && self.fault != Fault::SkipMark {
                    self.at = At::MarkOwn(span);
                } else {
                    self.give_up();
                }
            }
            Goal::GiveWhole(group) => {
                world.truth.give_whole(group, host);
                self.groups[usize::from(group.first)] = None;
                self.set_section(world, |word| word.with(group, Code::Empty, None));
                self.left_groups[usize::from(group.first)] =
                    Some(group).filter(|_| self.recovering.is_none());
                self.give_up();
            }
        }
    }

    fn set_span(&mut self, world: &mut World<'_>, span: u8, change: impl Fn(Span) -> Span) {
        let word = &mut world.memory.spans[usize::from(span)];
        *word = change(*word);
        self.spans[usize::from(span)] = *word;
    }

    fn set_section(&mut self, world: &mut World<'_>, change: impl Fn(Section) -> Section) {
        world.memory.section = change(world.memory.section);
        self.section = world.memory.section;
    }

    /// The extent is handed out when its record is in the log: by a WRITE, since nobody else can have taken it meanwhile.
    fn record(&mut self, goal: Goal, world: &mut World<'_>) {
        self.write_record(goal, world);
        self.hold(goal);
    }

    /// Nobody else can take a chunk of a span that we open.
    fn record_first(&mut self, goal: Goal, world: &mut World<'_>) {
        if let Goal::Take { span, is_ours, .. } = goal {
            for chunk in CHUNK_NUMBERS {
                self.write_record(Goal::Take { span, chunk, is_ours }, world);
            }
            self.left_chunks[usize::from(span)] = [true; CHUNKS];
        }
        self.at = self.before(goal);
    }

    fn write_record(&mut self, goal: Goal, world: &mut World<'_>) {
        let is_recorded = self.fault != Fault::SkipRecord;
        match goal {
            Goal::Take { span, chunk, .. } if is_recorded => {
                world.memory.chunk_logs[usize::from(span)][usize::from(chunk)].write(self.host);
            }
            Goal::TakeWhole(group) => {
                group.spans().for_each(|span| self.left_groups[span] = None);
                if is_recorded {
                    let log = Holding::Alloc(self.host, group);
                    world.memory.span_logs[usize::from(group.first)].write(log);
                }
            }
            _ => {}
        }
    }

    /// It is handed out: its record is in the log.
    fn hold(&mut self, goal: Goal) {
        match goal {
            Goal::Take { span, chunk, .. } => {
                self.settle(Some(span));
                self.chunks[usize::from(span)][usize::from(chunk)] = true;
            }
            Goal::TakeWhole(group) => {
                self.settle(None);
                self.groups[usize::from(group.first)] = Some(group);
            }
            _ => {}
        }
        self.at = At::Idle;
    }

    /// Before A2 and A7, when the section is remembered already.
    fn probe_ready(&mut self, goal: Goal, span: u8, world: &World<'_>) {
        let word = world.memory.spans[usize::from(span)];
        self.learn_span(span, word);
        if !word.is_closed() {
            // What we remember of the section is old.
            self.learn_section(world.memory.section);
            return self.give_up();
        }
        self.at = match word.log {
            SpanLog::Close(_) if self.fault == Fault::MarkFromMemory => At::Mark(goal, span),
            SpanLog::Close(_) => At::ProbeSection(goal, span),
            _ if self.fault == Fault::ReadyFirst => At::ReadSection(goal, span),
            _ => self.after_ready(goal, span),
        };
    }

    fn after_ready(&self, goal: Goal, span: u8) -> At {
        match goal {
            Goal::TakeWhole(group) if usize::from(span) + 1 < group.spans().end => {
                At::ProbeReady(goal, span + 1)
            }
            _ => self.before(goal),
        }
    }

    fn mark(&mut self, goal: Goal, span: u8, world: &mut World<'_>) {
        if self.mark_ready(span, world) {
            self.at = self.after_ready(goal, span);
        } else {
            self.learn_span(span, world.memory.spans[usize::from(span)]);
            self.give_up();
        }
    }

    /// If the word is as we remember it.
    fn mark_ready(&mut self, span: u8, world: &mut World<'_>) -> bool {
        let is_as_before = world.memory.spans[usize::from(span)] == self.spans[usize::from(span)];
        if is_as_before {
            self.set_span(world, span, Span::mark);
        }
        is_as_before
    }

    /// The section's word as it was found. If others have changed it they may have had whatever is free in spans that are closed.
    pub(crate) fn learn_section(&mut self, word: Section) {
        if word != self.section {
            for span in SPAN_NUMBERS {
                let is_closed = self.spans[usize::from(span)].is_closed() && !self.resting[usize::from(span)];
                if is_closed || word.codes[usize::from(span)] == Code::Empty {
                    self.forget_left(span);
                }
            }
        }
        self.section = word;
    }

    /// A span's word as it was found. If others have changed it they may have had whatever is free.
    pub(crate) fn learn_span(&mut self, span: u8, word: Span) {
        if word != self.spans[usize::from(span)] {
            self.forget_left(span);
        }
        self.spans[usize::from(span)] = word;
    }

    fn forget_left(&mut self, span: u8) {
        self.resting[usize::from(span)] = false;
        if self.fault != Fault::TrustLeft {
            self.left_chunks[usize::from(span)] = [false; CHUNKS];
            self.left_groups[usize::from(span)] = None;
        }
    }
}

/// The span whose word a goal changes; none for the section's.
fn target(goal: Goal) -> Option<u8> {
    match goal {
        Goal::Take { span, .. } | Goal::Give { span, .. } | Goal::Sign { span } => Some(span),
        Goal::Open { .. } | Goal::TakeWhole(_) | Goal::Close { .. } | Goal::GiveWhole(_) => None,
    }
}

fn first_span(goal: Goal) -> u8 {
    match goal {
        Goal::Take { span, .. }
        | Goal::Open { span, .. }
        | Goal::Give { span, .. }
        | Goal::Sign { span }
        | Goal::Close { span } => span,
        Goal::TakeWhole(group) | Goal::GiveWhole(group) => group.first,
    }
}
