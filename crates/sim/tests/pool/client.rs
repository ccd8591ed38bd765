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
    Action, AllocOp, FreeOp, Grant, Machine, Mutation, OpError, RecoverOp, Recovered, Step, StepResult,
};

const REPLY_WORDS: usize = 512;
/// After the replies, a word that is written.
const WRITTEN_AT: usize = REPLY_WORDS * 8;

/// An operation under way.
#[derive(Debug)]
enum Running {
    Alloc(AllocOp),
    Free(FreeOp),
    Recover(Box<RecoverOp>),
}

/// How an operation ended.
#[derive(Debug)]
pub enum Ended {
    Alloc(Result<Grant, OpError>),
    Free(Result<(), OpError>),
    /// Of this dead host.
    Recover(Host, Result<Recovered, OpError>),
}

#[derive(Debug)]
pub struct Client {
    pub host: Host,
    pub alive: bool,
    /// What it was granted and has not begun to free.
    pub owned: Vec<Grant>,
    /// What it was granted and keeps to the end.
    pub kept: Vec<Grant>,
    endpoint: Box<dyn Endpoint>,
    reply: Arc<Memory>,
    reply_key: LocalKey,
    region: Region,
    layout: Layout,
    cache: NodeCache,
    running: Option<Running>,
    /// Which dead host it recovers.
    recovering: Option<Host>,
    /// What was posted last, if its answer has not been heard.
    pub posted: Option<Action>,
    mutation: Mutation,
}

impl Client {
    pub fn new(
        (fabric, node): (&SimFabric, Node),
        layout: Layout,
        (host, nonces): (Host, Nonces),
        mutation: Mutation,
    ) -> Self {
        let who = Identity { host, epoch: 1, tenant: Tenant(0) };
        let mut endpoint = fabric.connect(node, who).expect("the node is alive");
        let reply = Arc::new(Memory::create("replies", WRITTEN_AT + 8).expect("memory"));
        let reply_key = endpoint.register_local(Arc::clone(&reply)).expect("room for one");
        let region = endpoint.regions()[0].clone();
        Self {
            host,
            alive: true,
            owned: Vec::new(),
            kept: Vec::new(),
            endpoint,
            reply,
            reply_key,
            region,
            layout,
            // All begin at one place: the more they meet the better.
            cache: NodeCache::new(&layout, 0, nonces),
            running: None,
            recovering: None,
            posted: None,
            mutation,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_none()
    }

    pub fn is_recovering(&self) -> bool {
        matches!(self.running, Some(Running::Recover(_)))
    }

    pub fn alloc(&mut self, class: aquifer_pool::SizeClass) -> Option<Ended> {
        let mut op = AllocOp::mutated(self.host, class, self.mutation);
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Alloc(op));
        self.follow(step).map(Ended::Alloc)
    }

    pub fn free(&mut self, grant: Grant) -> Option<Ended> {
        let mut op = FreeOp::mutated(self.host, grant, self.mutation);
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Free(op));
        self.follow(step).map(Ended::Free)
    }

    pub fn recover(&mut self, dead: Host) -> Option<Ended> {
        let mut op = Box::new(RecoverOp::mutated(self.host, dead, self.mutation));
        let step = op.start(&mut self.cache);
        self.running = Some(Running::Recover(op));
        self.recovering = Some(dead);
        self.follow(step).map(|result| Ended::Recover(dead, result))
    }

    /// Take in an answer if one is there.
    pub fn poll(&mut self) -> Option<Ended> {
        let mut completions: Vec<Completion> = Vec::new();
        self.endpoint.poll(&mut completions, 1);
        let found = completions.pop()?.outcome.expect("the node lives and knows us");
        let mut words = Vec::new();
        let result = match self.posted.take().expect("something was posted") {
            Action::Read { count, .. } => {
                words.extend((0..count as usize).map(|i| self.word(i)));
                StepResult::Words(&words)
            }
            Action::Write { .. } => StepResult::Written,
            _ => StepResult::Found(found),
        };
        match self.running.take().expect("an operation is under way") {
            Running::Alloc(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Alloc(op));
                self.follow(step).map(Ended::Alloc)
            }
            Running::Free(mut op) => {
                let step = op.step(&mut self.cache, result);
                self.running = Some(Running::Free(op));
                self.follow(step).map(Ended::Free)
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
        let remote =
            |at| RemoteAddr { addr: self.region.base + self.layout.word_at(at), key: self.region.key };
        let verb = match action {
            Action::Cas { at, expected, desired } => {
                Verb::CompareSwap { remote: remote(at), expected, desired }
            }
            Action::Probe { at } => Verb::FetchAdd { remote: remote(at), add: 0 },
            Action::Read { at, count } => Verb::Read {
                local: LocalSlice { key: self.reply_key, offset: 0, len: count * 8 },
                remote: remote(at),
            },
            Action::Write { at, value } => {
                self.reply.write(WRITTEN_AT, &value.to_le_bytes());
                let local = LocalSlice { key: self.reply_key, offset: WRITTEN_AT as u64, len: 8 };
                Verb::Write { local, remote: remote(at) }
            }
        };
        self.posted = Some(action);
        self.endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("one at a time fits");
    }
}
