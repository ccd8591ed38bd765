//! A client of the simulated pool, which runs one state machine at a time over an endpoint.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::sim::{SimFabric, SimNodeId};
use aquifer_fabric::{
    Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Tenant, Verb,
    Work,
};
use aquifer_pool::cache::{NodeCache, NumberSource};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{
    Action, AllocManyOp, AllocOp, FreeOp, Grant, GrantBatch, OpError, Outcomes, RecoverOp, Recovered,
    StateMachine, Step, StepResult, StretchOp, WordAccess, WordAt,
};
use aquifer_pool::word::AlignedRun;

const REPLY_WORDS: usize = 512;
/// Words of written values, behind the replies.
const WRITTEN_WORDS: usize = 80;
const WRITTEN_AT: usize = REPLY_WORDS * 8;

/// An operation in progress.
#[derive(Debug)]
enum RunningOp {
    Alloc(AllocOp),
    Many(Box<AllocManyOp>),
    /// A stretch of this number of sections.
    Stretch(Box<StretchOp>, u32),
    Free(FreeOp),
    /// A free that the killed process of this host had begun.
    Resumed(FreeOp, Grant, FreeAttempt),
    Recover(Box<RecoverOp>),
}

/// An attempt at a resumed free: resumed first, and then as a new free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreeAttempt {
    First,
    Second,
}

/// The outcome of an operation.
#[derive(Debug)]
pub enum OpOutcome {
    Alloc(Result<Grant, OpError>),
    Many(Result<GrantBatch, OpError>),
    /// A stretch of this number of sections, from this one on.
    Stretch(u32, Result<Grant, OpError>),
    Free(Result<Outcomes, OpError>),
    /// A free that the killed process had begun.
    Resumed(Grant, FreeAttempt, Result<(), OpError>),
    /// A recovery of this dead host.
    Recover(Host, Result<Recovered, OpError>),
}

/// A client of a host.
#[derive(Debug)]
pub struct SimClient {
    pub host: Host,
    pub tenant: Tenant,
    pub alive: bool,
    /// Extents that the client owns and has not begun to free.
    pub owned: Vec<Grant>,
    /// Extents that the client keeps until the end of the schedule.
    pub kept: Vec<Grant>,
    /// The ledger of extents that the client is freeing, each with the record that its word had
    /// when the free began.
    freeing: Vec<(Grant, u32)>,
    /// The extents that the killed process was freeing.
    unfinished: Vec<(Grant, u32)>,
    node: SimNodeId,
    endpoint: Box<dyn Endpoint>,
    reply: Arc<Memory>,
    reply_key: LocalKey,
    region: Region,
    layout: Layout,
    cache: NodeCache,
    running: Option<RunningOp>,
    /// The number of missing answers to the last action, and the answers that have come.
    awaited: usize,
    outcomes: Vec<u64>,
    /// The dead host that the client recovers.
    recovering: Option<Host>,
    /// The last action, while its answer is missing.
    pub posted: Option<Action>,
}

/// An upper bound of the number of clients. The last number is used for keys that no client has.
pub const CLIENTS_MAX: u32 = 64;

impl SimClient {
    pub fn new(
        (fabric, node): (&SimFabric, SimNodeId),
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
            freeing: Vec::new(),
            unfinished: Vec::new(),
            node,
            endpoint,
            reply,
            reply_key,
            region,
            layout,
            // All searches begin at section 0, so that clients meet often.
            cache: NodeCache::new(&layout, 0, tenant, NumberSource::counted(number, CLIENTS_MAX)),
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
        matches!(self.running, Some(RunningOp::Recover(_)))
    }

    pub fn alloc(&mut self, class: aquifer_pool::SizeClass) -> Option<OpOutcome> {
        let mut op = AllocOp::new(self.host, class);
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Alloc(op));
        self.follow(step).map(OpOutcome::Alloc)
    }

    pub fn alloc_many(&mut self, class: aquifer_pool::SizeClass, count: u32) -> Option<OpOutcome> {
        let mut op = Box::new(AllocManyOp::new(self.host, class, count));
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Many(op));
        self.follow(step).map(OpOutcome::Many)
    }

    pub fn stretch(&mut self, sections: u32) -> Option<OpOutcome> {
        let mut op = Box::new(StretchOp::new(self.host, sections));
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Stretch(op, sections));
        self.follow(step).map(|result| OpOutcome::Stretch(sections, result))
    }

    /// Frees extents that share a control word.
    pub fn free(&mut self, grants: &[Grant]) -> Option<OpOutcome> {
        self.note_freeing(grants);
        let mut op = FreeOp::many(self.host, grants.iter().copied());
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Free(op));
        self.follow(step).map(OpOutcome::Free)
    }

    fn note_freeing(&mut self, grants: &[Grant]) {
        self.freeing = grants.iter().map(|grant| (*grant, self.cache.last_record(*grant))).collect();
    }

    /// Whether a restarted process could resume from the ledger, if this one were killed now.
    pub fn can_be_killed(&self) -> bool {
        matches!(self.running, None | Some(RunningOp::Free(_) | RunningOp::Resumed(..)))
    }

    /// Kills the process and starts the next one, as client `number`, with the ledger. Returns the
    /// last action, which may still be in flight.
    pub fn restart(&mut self, fabric: &SimFabric, number: u32) -> Option<Action> {
        let who = (self.host, self.tenant);
        let mut next = Self::new((fabric, self.node), self.layout, who, number);
        next.owned = std::mem::take(&mut self.owned);
        next.kept = std::mem::take(&mut self.kept);
        next.unfinished = std::mem::take(&mut self.unfinished);
        if !self.is_idle() {
            next.unfinished.append(&mut self.freeing);
        }
        std::mem::replace(self, next).posted
    }

    /// Whether the killed process has left frees that are not finished.
    pub fn has_unfinished(&self) -> bool {
        !self.unfinished.is_empty()
    }

    /// Resumes an unfinished free of the killed process.
    pub fn resume(&mut self) -> Option<OpOutcome> {
        let (grant, record) = self.unfinished.pop().expect("there is one");
        self.freeing = vec![(grant, record)];
        self.attempt(FreeOp::new(self.host, grant).resumed(record), grant, FreeAttempt::First)
    }

    /// Frees an extent as if no free had been begun.
    pub fn free_plainly(&mut self, grant: Grant) -> Option<OpOutcome> {
        self.attempt(FreeOp::new(self.host, grant), grant, FreeAttempt::Second)
    }

    fn attempt(&mut self, mut op: FreeOp, grant: Grant, attempt: FreeAttempt) -> Option<OpOutcome> {
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Resumed(op, grant, attempt));
        self.follow(step).map(|result| OpOutcome::Resumed(grant, attempt, only(result)))
    }

    pub fn recover(&mut self, dead: Host) -> Option<OpOutcome> {
        let mut op = Box::new(RecoverOp::new(self.host, dead));
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Recover(op));
        self.recovering = Some(dead);
        self.follow(step).map(|result| OpOutcome::Recover(dead, result))
    }

    /// Allocates a group of spans for the node itself.
    pub fn allocate_group(&mut self, section: u32, group: AlignedRun) -> Option<OpOutcome> {
        let mut op = AllocOp::of_group(self.host, section, group);
        let step = op.start(&mut self.cache);
        self.running = Some(RunningOp::Alloc(op));
        self.follow(step).map(OpOutcome::Alloc)
    }

    /// Polls for answers; runs the next step if the answer is complete.
    pub fn poll(&mut self) -> Option<OpOutcome> {
        let mut completions: Vec<Completion> = Vec::new();
        // All completions are polled, because no later event may cause another poll.
        self.endpoint.poll(&mut completions, usize::MAX);
        for completion in completions {
            self.awaited -= 1;
            self.outcomes.push(completion.outcome.expect("the node lives and has not fenced this host"));
        }
        if self.awaited > 0 || self.posted.is_none() {
            return None;
        }
        let posted = self.posted.take().expect("something was posted");
        let words = self.answer(&posted);
        let result = StepResult(&words);
        match self.running.take().expect("an operation is in progress") {
            RunningOp::Alloc(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(RunningOp::Alloc(op));
                self.follow(step).map(OpOutcome::Alloc)
            }
            RunningOp::Many(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(RunningOp::Many(op));
                self.follow(step).map(OpOutcome::Many)
            }
            RunningOp::Stretch(mut op, sections) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(RunningOp::Stretch(op, sections));
                self.follow(step).map(|result| OpOutcome::Stretch(sections, result))
            }
            RunningOp::Free(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(RunningOp::Free(op));
                self.follow(step).map(OpOutcome::Free)
            }
            RunningOp::Resumed(mut op, grant, attempt) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(RunningOp::Resumed(op, grant, attempt));
                self.follow(step).map(|result| OpOutcome::Resumed(grant, attempt, only(result)))
            }
            RunningOp::Recover(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(RunningOp::Recover(op));
                let dead = self.recovering.expect("a host is being recovered");
                self.follow(step).map(|result| OpOutcome::Recover(dead, result))
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
                WordAccess::Cas { .. } | WordAccess::Probe { .. } => words.push(*outcome),
                WordAccess::Read { count, .. } => {
                    words.extend((replied..replied + *count as usize).map(|index| self.word(index)));
                    replied += *count as usize;
                }
                WordAccess::Write { .. } => {}
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
                WordAccess::Cas { at, expected, desired } => {
                    Verb::CompareSwap { remote: self.remote(at), expected, desired }
                }
                WordAccess::Probe { at } => Verb::FetchAdd { remote: self.remote(at), add: 0 },
                WordAccess::Read { at, count } => {
                    replied += count;
                    self.read(replied - count, at, count)
                }
                WordAccess::Write { at, .. } => {
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

/// The outcome of a free of one extent.
fn only(outcomes: Result<Outcomes, OpError>) -> Result<(), OpError> {
    outcomes.and_then(|outcomes| outcomes[0])
}
