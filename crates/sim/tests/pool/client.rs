//! One client of the simulated pool: a machine at a time, over an endpoint.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::sim::{Node, SimFabric};
use aquifer_fabric::{
    Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Tenant, Verb,
    Work,
};
use aquifer_pool::cache::{NodeCache, Numbers};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{
    Access, Action, AllocManyOp, AllocOp, FreeOp, Grant, GrantBatch, Machine, OpError, Outcomes, RecoverOp,
    Recovered, Step, StepResult, StretchOp, WordAt,
};
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
    /// What was begun by the process before.
    Resumed(FreeOp, Grant, Try),
    Recover(Box<RecoverOp>),
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
    Many(Result<GrantBatch, OpError>),
    /// So many sections, from this one on.
    Stretch(u32, Result<Grant, OpError>),
    Free(Result<Outcomes, OpError>),
    /// It was begun by the process before; and this was tried for the first or the second time.
    Resumed(Grant, Try, Result<(), OpError>),
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
        (host, tenant): (Host, Tenant),
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
            cache: NodeCache::new(&layout, 0, tenant, Numbers::counted(number, CLIENTS_MAX)),
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

    /// Extents that share a control word.
    pub fn free(&mut self, grants: &[Grant]) -> Option<Ended> {
        self.note_giving(grants);
        let mut op = FreeOp::many(self.host, grants.iter().copied());
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Free(op));
        self.follow(step).map(Ended::Free)
    }

    fn note_giving(&mut self, grants: &[Grant]) {
        self.giving = grants.iter().map(|grant| (*grant, self.cache.last_record(*grant))).collect();
    }

    /// Whether what is under way, if anything is, could be gone on with by what is written down.
    pub fn may_be_killed(&self) -> bool {
        matches!(self.running, None | Some(Running::Free(_) | Running::Resumed(..)))
    }

    /// The process is killed, and comes again as client number `number` with what it had written down. What it had posted, of which this is the last, may be on its way yet.
    pub fn start_again(&mut self, fabric: &SimFabric, number: u32) -> Option<Action> {
        let who = (self.host, self.tenant);
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
        self.follow(step).map(|result| Ended::Resumed(grant, number, only(result)))
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
        let posted = self.posted.take().expect("something was posted");
        let words = self.answer(&posted);
        let result = StepResult(&words);
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
            Running::Resumed(mut op, grant, number) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Resumed(op, grant, number));
                self.follow(step).map(|result| Ended::Resumed(grant, number, only(result)))
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

    fn answer(&self, action: &Action) -> Vec<u64> {
        let (mut words, mut replied) = (Vec::new(), 0);
        for (access, outcome) in action.accesses().iter().zip(&self.outcomes) {
            match access {
                Access::Cas { .. } | Access::Probe { .. } => words.push(*outcome),
                Access::Read { count, .. } => {
                    words.extend((replied..replied + *count as usize).map(|index| self.word(index)));
                    replied += *count as usize;
                }
                Access::Write { .. } => {}
            }
        }
        words
    }

    fn post(&mut self, action: Action) {
        let (mut replied, mut written) = (0, 0);
        self.outcomes.clear();
        self.awaited = action.accesses().len();
        for access in action.accesses() {
            let verb = match *access {
                Access::Cas { at, expected, desired } => {
                    Verb::CompareSwap { remote: self.remote(at), expected, desired }
                }
                Access::Probe { at } => Verb::FetchAdd { remote: self.remote(at), add: 0 },
                Access::Read { at, count } => {
                    replied += count;
                    self.read(replied - count, at, count)
                }
                Access::Write { at, .. } => {
                    let words: Vec<u64> = access.written().collect();
                    written += words.len();
                    self.write(written - words.len(), at, &words)
                }
            };
            self.endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("so few fit");
        }
        self.posted = Some(action);
    }

    fn remote(&self, at: WordAt) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + self.layout.word_at(at), key: self.region.key }
    }

    fn read(&self, place: u32, at: WordAt, count: u32) -> Verb {
        let local = LocalSlice { key: self.reply_key, offset: u64::from(place) * 8, len: count * 8 };
        Verb::Read { local, remote: self.remote(at) }
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

/// What became of the only extent that was freed.
fn only(outcomes: Result<Outcomes, OpError>) -> Result<(), OpError> {
    outcomes.and_then(|outcomes| outcomes[0])
}
