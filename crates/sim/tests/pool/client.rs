//! One client of the simulated pool: a machine at a time, over an endpoint.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::sim::{Node, SimFabric};
use aquifer_fabric::{
    Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Tenant, Verb,
    Work,
};
use aquifer_pool::cache::{NodeCache, Nonces};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{
    Action, AllocManyOp, AllocOp, FreeManyOp, FreeOp, Grant, Held, HeldOp, Machine, OpError, RecoverOp,
    Recovered, SettleOp, Several, Step, StepResult, StretchOp, Strikes, WordAt,
};
use aquifer_pool::size::SECTION_SPANS;
use aquifer_pool::word::Run;

const REPLY_WORDS: usize = 512;
/// After the replies, what is written.
const WRITTEN_WORDS: usize = 80;
const WRITTEN_AT: usize = REPLY_WORDS * 8;

/// An operation under way.
#[derive(Debug)]
enum Running {
    Alloc(AllocOp),
    Many(Box<AllocManyOp>),
    /// So many sections.
    Stretch(Box<StretchOp>, u32),
    Free(FreeOp),
    FreeMany(Box<FreeManyOp>),
    /// What was begun by the process before.
    Resumed(FreeOp, Grant, Try),
    Settle(SettleOp),
    Recover(Box<RecoverOp>),
    /// What its host has, and giving back of what nobody there knows of.
    Look(Box<HeldOp>),
    GiveHeld(Box<RecoverOp>),
}

/// Of giving back what was begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Try {
    First,
    Second,
}

/// How an operation ended.
#[derive(Debug)]
pub enum Ended {
    Alloc(Result<Grant, OpError>),
    Many(Result<Several, OpError>),
    /// So many sections, from this one on.
    Stretch(u32, Result<Grant, OpError>),
    Free(Result<(), OpError>),
    FreeMany(Result<Vec<Result<(), OpError>>, OpError>),
    /// It was begun by the process before; and this was tried for the first or the second time.
    Resumed(Grant, Try, Result<(), OpError>),
    Settle(Result<(), OpError>),
    Look(Result<Vec<Held>, OpError>),
    GiveHeld(Result<Recovered, OpError>),
    /// Of this dead host.
    Recover(Host, Result<Recovered, OpError>),
}

#[derive(Debug)]
pub struct Client {
    pub host: Host,
    pub tenant: Tenant,
    pub alive: bool,
    /// What it was granted and has not begun to free.
    pub owned: Vec<Grant>,
    /// What it was granted and keeps to the end.
    pub kept: Vec<Grant>,
    /// What it is giving back, as it would be written down: the record in each one's word when that was begun.
    giving: Vec<(Grant, u32)>,
    /// What the process before was giving back.
    begun: Vec<(Grant, u32)>,
    node: Node,
    endpoint: Box<dyn Endpoint>,
    reply: Arc<Memory>,
    reply_key: LocalKey,
    region: Region,
    layout: Layout,
    cache: NodeCache,
    running: Option<Running>,
    /// Answers to what was posted last that have not been heard, and those that have.
    awaited: usize,
    outcomes: Vec<u64>,
    /// Which dead host it recovers.
    recovering: Option<Host>,
    /// What was posted last, if its answer has not been heard.
    pub posted: Option<Action>,
}

/// More clients than there are. The last draws no keys.
pub const CLIENTS_MAX: u32 = 64;

impl Client {
    pub fn new(
        (fabric, node): (&SimFabric, Node),
        layout: Layout,
        (host, tenant, nonces): (Host, Tenant, Nonces),
        number: u32,
    ) -> Self {
        let who = Identity { host, epoch: 1, tenant };
        let mut endpoint = fabric.connect(node, who).expect("the node is alive");
        let reply = Arc::new(Memory::create("replies", WRITTEN_AT + WRITTEN_WORDS * 8).expect("memory"));
        let reply_key = endpoint.register_local(Arc::clone(&reply)).expect("room for one");
        let region = endpoint.regions()[0].clone();
        Self {
            host,
            tenant,
            alive: true,
            owned: Vec::new(),
            kept: Vec::new(),
            giving: Vec::new(),
            begun: Vec::new(),
            node,
            endpoint,
            reply,
            reply_key,
            region,
            layout,
            // All begin at one place, the first: the more they meet the better.
            cache: NodeCache::new(&layout, 0, tenant, nonces).with_counted_keys(number, CLIENTS_MAX),
            running: None,
            awaited: 0,
            outcomes: Vec::new(),
            recovering: None,
            posted: None,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_none()
    }

    pub fn is_recovering(&self) -> bool {
        matches!(self.running, Some(Running::Recover(_)))
    }

    pub fn alloc(&mut self, class: aquifer_pool::SizeClass) -> Option<Ended> {
        let mut op = AllocOp::new(self.host, class);
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Alloc(op));
        self.follow(step).map(Ended::Alloc)
    }

    pub fn alloc_many(&mut self, class: aquifer_pool::SizeClass, count: u32) -> Option<Ended> {
        let mut op = Box::new(AllocManyOp::new(self.host, class, count));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Many(op));
        self.follow(step).map(Ended::Many)
    }

    pub fn stretch(&mut self, sections: u32) -> Option<Ended> {
        let mut op = Box::new(StretchOp::new(self.host, sections));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Stretch(op, sections));
        self.follow(step).map(|result| Ended::Stretch(sections, result))
    }

    pub fn free(&mut self, grant: Grant) -> Option<Ended> {
        self.give(FreeOp::new(self.host, grant), grant)
    }

    /// If nothing else is taken in its span, that rests.
    pub fn free_resting(&mut self, grant: Grant) -> Option<Ended> {
        self.give(FreeOp::new(self.host, grant).resting(), grant)
    }

    fn give(&mut self, mut op: FreeOp, grant: Grant) -> Option<Ended> {
        self.note_giving(&[grant]);
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Free(op));
        self.follow(step).map(Ended::Free)
    }

    /// Whether a span rests.
    pub fn has_resting(&self) -> bool {
        !self.cache.resting().is_empty()
    }

    pub fn settle(&mut self) -> Option<Ended> {
        let span = *self.cache.resting().first()?;
        let mut op = SettleOp::new(self.host, span);
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Settle(op));
        self.follow(step).map(Ended::Settle)
    }

    /// What its host has.
    pub fn look(&mut self) -> Option<Ended> {
        let mut op = Box::new(HeldOp::new(self.host, 0..self.layout.sections()));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Look(op));
        self.follow(step).map(Ended::Look)
    }

    /// Give back what of these things is still the same.
    pub fn give_held(&mut self, these: Vec<Held>) -> Option<Ended> {
        let mut op = Box::new(RecoverOp::only(self.host, these));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::GiveHeld(op));
        self.follow(step).map(Ended::GiveHeld)
    }

    /// Several, of any sections.
    pub fn free_many(&mut self, grants: Vec<Grant>) -> Option<Ended> {
        self.note_giving(&grants);
        let mut op = Box::new(FreeManyOp::new(self.host, grants));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::FreeMany(op));
        self.follow(step).map(Ended::FreeMany)
    }

    fn note_giving(&mut self, grants: &[Grant]) {
        self.giving = grants.iter().map(|grant| (*grant, self.cache.last_record(*grant))).collect();
    }

    /// Whether what is under way, if anything is, could be gone on with by what is written down.
    pub fn may_be_killed(&self) -> bool {
        use Running::{Free, FreeMany, Resumed, Settle};
        matches!(self.running, None | Some(Free(_) | FreeMany(_) | Resumed(..) | Settle(_)))
    }

    /// The process is killed, and comes again as client number `number` with what it had written down. What it had posted, of which this is the last, may be on its way yet.
    pub fn start_again(&mut self, fabric: &SimFabric, nonces: Nonces, number: u32) -> Option<Action> {
        let who = (self.host, self.tenant, nonces);
        let mut next = Self::new((fabric, self.node), self.layout, who, number);
        next.owned = std::mem::take(&mut self.owned);
        next.kept = std::mem::take(&mut self.kept);
        next.begun = std::mem::take(&mut self.begun);
        if !self.is_idle() {
            next.begun.append(&mut self.giving);
        }
        std::mem::replace(self, next).posted
    }

    /// Whether something is left that the process before was giving back.
    pub fn has_begun(&self) -> bool {
        !self.begun.is_empty()
    }

    /// Go on with one of those.
    pub fn resume(&mut self) -> Option<Ended> {
        let (grant, record) = self.begun.pop().expect("there is one");
        self.giving = vec![(grant, record)];
        self.try_again(FreeOp::new(self.host, grant).resumed(record), grant, Try::First)
    }

    /// As what was not begun.
    pub fn free_after_all(&mut self, grant: Grant) -> Option<Ended> {
        self.try_again(FreeOp::new(self.host, grant), grant, Try::Second)
    }

    fn try_again(&mut self, mut op: FreeOp, grant: Grant, number: Try) -> Option<Ended> {
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Resumed(op, grant, number));
        self.follow(step).map(|result| Ended::Resumed(grant, number, result))
    }

    pub fn recover(&mut self, dead: Host) -> Option<Ended> {
        let mut op = Box::new(RecoverOp::new(self.host, dead));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Recover(op));
        self.recovering = Some(dead);
        self.follow(step).map(|result| Ended::Recover(dead, result))
    }

    /// As the node: take a group of spans.
    pub fn take_group(&mut self, section: u32, group: Run) -> Option<Ended> {
        let mut op = AllocOp::of_group(self.host, section, group);
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Alloc(op));
        self.follow(step).map(Ended::Alloc)
    }

    /// Take in an answer if all of it is there.
    pub fn poll(&mut self) -> Option<Ended> {
        let mut completions: Vec<Completion> = Vec::new();
        // All that are there: nothing else may happen that would call for another look.
        self.endpoint.poll(&mut completions, usize::MAX);
        for completion in completions {
            self.awaited -= 1;
            self.outcomes.push(completion.outcome.expect("the node lives and knows us"));
        }
        if self.awaited > 0 || self.posted.is_none() {
            return None;
        }
        let mut words = Vec::new();
        let result = match self.posted.take().expect("something was posted") {
            Action::Read { count, .. } => {
                words.extend((0..count as usize).map(|i| self.word(i)));
                StepResult::Words(&words)
            }
            Action::Survey { count, .. } => {
                words.extend((0..32 * count as usize).map(|i| self.word(i)));
                StepResult::Words(&words)
            }
            Action::Write(_) => StepResult::Written,
            Action::Strike(strikes) => StepResult::Struck(strikes.struck(self.outcomes.iter().copied())),
            Action::StrikeThen(strikes) => {
                words.extend((0..Strikes::MAX).map(|i| self.word(i)));
                StepResult::StruckThen(strikes.struck(self.outcomes.iter().copied()), &words)
            }
            Action::CasThen { .. } => StepResult::FoundThen(self.outcomes[0], self.word(0)),
            Action::CasProbe { .. } => StepResult::FoundThen(self.outcomes[0], self.outcomes[1]),
            Action::WriteThen { writes, .. } => StepResult::Found(self.outcomes[writes.parts().count()]),
            Action::PlantThen { plant, .. } => StepResult::Found(self.outcomes[plant.writes().count()]),
            Action::Chain(chain) => StepResult::Chained(chain.outcome(self.outcomes.iter().copied())),
            Action::Cas { .. } | Action::Probe { .. } => StepResult::Found(self.outcomes[0]),
        };
        match self.running.take().expect("an operation is under way") {
            Running::Alloc(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Alloc(op));
                self.follow(step).map(Ended::Alloc)
            }
            Running::Many(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Many(op));
                self.follow(step).map(Ended::Many)
            }
            Running::Stretch(mut op, sections) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Stretch(op, sections));
                self.follow(step).map(|result| Ended::Stretch(sections, result))
            }
            Running::Free(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Free(op));
                self.follow(step).map(Ended::Free)
            }
            Running::FreeMany(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::FreeMany(op));
                self.follow(step).map(Ended::FreeMany)
            }
            Running::Resumed(mut op, grant, number) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Resumed(op, grant, number));
                self.follow(step).map(|result| Ended::Resumed(grant, number, result))
            }
            Running::Settle(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Settle(op));
                self.follow(step).map(Ended::Settle)
            }
            Running::Look(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Look(op));
                self.follow(step).map(Ended::Look)
            }
            Running::GiveHeld(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::GiveHeld(op));
                self.follow(step).map(Ended::GiveHeld)
            }
            Running::Recover(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Recover(op));
                let dead = self.recovering.expect("a host is being recovered");
                self.follow(step).map(|result| Ended::Recover(dead, result))
            }
        }
    }

    fn word(&self, index: usize) -> u64 {
        self.reply.atomic_u64(index * 8).load(Ordering::Relaxed)
    }

    fn follow<T>(&mut self, step: Step<T>) -> Option<Result<T, OpError>> {
        match step {
            Step::Done(result) => {
                self.running = None;
                Some(result)
            }
            Step::Post(action) => {
                self.post(action);
                None
            }
        }
    }

    fn post(&mut self, action: Action) {
        let verbs = match action {
            Action::Cas { at, expected, desired } => vec![self.swap(at, expected, desired)],
            Action::CasThen { at, expected, desired, then } => {
                vec![self.swap(at, expected, desired), self.read(0, then, 1)]
            }
            Action::CasProbe { at, expected, desired, probe } => {
                vec![self.swap(at, expected, desired), self.probe(probe)]
            }
            Action::WriteThen { writes, at, expected, desired } => {
                let mut verbs = self.writes(writes.parts().map(|part| (part.at, part.words())));
                verbs.push(self.swap(at, expected, desired));
                verbs
            }
            Action::PlantThen { plant, at, expected, desired } => {
                let mut verbs = self.writes(plant.writes());
                verbs.push(self.swap(at, expected, desired));
                verbs
            }
            Action::Chain(chain) => {
                chain.swaps().map(|(at, expected, desired)| self.swap(at, expected, desired)).collect()
            }
            Action::Probe { at } => vec![self.probe(at)],
            Action::Read { at, count } => vec![self.read(0, at, count)],
            Action::Survey { section, count } => {
                let spans = self.read(0, WordAt::Span(section * SECTION_SPANS), count * SECTION_SPANS);
                let keys = (count..).zip(section..section + count).map(|(number, section)| {
                    let first = WordAt::span_key(section * SECTION_SPANS);
                    self.read(number * SECTION_SPANS, first, SECTION_SPANS)
                });
                std::iter::once(spans).chain(keys).collect()
            }
            Action::Write(writes) => self.writes(writes.parts().map(|part| (part.at, part.words()))),
            Action::Strike(strikes) => self.strikes(strikes).collect(),
            Action::StrikeThen(strikes) => {
                let count = u32::try_from(Strikes::MAX).expect("few");
                self.strikes(strikes).chain([self.read(0, strikes.log(), count)]).collect()
            }
        };
        self.posted = Some(action);
        self.outcomes.clear();
        self.awaited = verbs.len();
        for verb in verbs {
            self.endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("so few fit");
        }
    }

    fn remote(&self, at: WordAt) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + self.layout.word_at(at), key: self.region.key }
    }

    fn probe(&self, at: WordAt) -> Verb {
        Verb::FetchAdd { remote: self.remote(at), add: 0 }
    }

    fn swap(&self, at: WordAt, expected: u64, desired: u64) -> Verb {
        Verb::CompareSwap { remote: self.remote(at), expected, desired }
    }

    fn strikes(&self, strikes: Strikes) -> impl Iterator<Item = Verb> {
        strikes.swaps().map(|(at, expected, desired)| self.swap(at, expected, desired))
    }

    fn read(&self, place: u32, at: WordAt, count: u32) -> Verb {
        let local = LocalSlice { key: self.reply_key, offset: u64::from(place) * 8, len: count * 8 };
        Verb::Read { local, remote: self.remote(at) }
    }

    fn writes(&self, parts: impl Iterator<Item = (WordAt, impl Iterator<Item = u64>)>) -> Vec<Verb> {
        let mut place = 0;
        let parts = parts.map(|(at, words)| {
            let words: Vec<u64> = words.collect();
            let verb = self.write(place, at, &words);
            place += words.len();
            verb
        });
        parts.collect()
    }

    fn write(&self, place: usize, at: WordAt, words: &[u64]) -> Verb {
        for (number, word) in words.iter().enumerate() {
            self.reply.write(WRITTEN_AT + (place + number) * 8, &word.to_le_bytes());
        }
        let offset = (WRITTEN_AT + place * 8) as u64;
        let len = u32::try_from(words.len() * 8).expect("few words");
        Verb::Write { local: LocalSlice { key: self.reply_key, offset, len }, remote: self.remote(at) }
    }
}
