//! The ways to take an extent that are compared, as clients of the model.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use aquifer_fabric::{Host, Tenant};
use aquifer_pool::SizeClass;
use aquifer_pool::cache::{NodeCache, Nonces};
use aquifer_pool::layout::{Layout, SECTION_ENTRIES};
use aquifer_pool::op::{Action, AllocOp, FreeOp, Grant, Machine, Step, StepResult, WordAt};
use aquifer_pool::size::{SECTION_CHUNKS, SECTION_SPANS};

use super::model::Scene;

/// Entries of an array that one READ brings.
const ARRAY_READ: u32 = 64;

/// How extents are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Asked for by RPC; the node registers each when it is asked (CoRM's way).
    OnDemandRpc,
    /// Asked for by RPC, of memory that is registered; no window of its own (FUSEE's way).
    Rpc,
    /// The same, with a window for each.
    RpcWindow,
    /// Taken by CAS in an array with an entry for each 4 KiB; no windows, no log (CXL-SHM's way).
    Array,
    /// The pool.
    Ours,
}

impl Way {
    /// All of them, ours last.
    pub const ALL: [Self; 5] = [Self::OnDemandRpc, Self::Rpc, Self::RpcWindow, Self::Array, Self::Ours];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnDemandRpc => "RPC, registered on demand",
            Self::Rpc => "RPC, registered beforehand",
            Self::RpcWindow => "the same, a window for each",
            Self::Array => "one-sided array",
            Self::Ours => "ours",
        }
    }

    /// What an RPC takes of the node's core beside the RPC itself, for an extent of this size.
    pub fn core_ns(self, k: u8, register_4m_ns: u64, bind_ns: u64) -> u64 {
        match self {
            Self::OnDemandRpc => (register_4m_ns << k) / 1024,
            Self::RpcWindow => bind_ns,
            Self::Rpc | Self::Array | Self::Ours => 0,
        }
    }
}

/// What a client is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// It takes an extent.
    Allocate,
    /// It gives one back.
    Free,
}

/// What a client's operations did at the node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrived {
    /// At which.
    pub node: usize,
    /// So many operations.
    pub operations: u64,
    /// Of them CASes.
    pub swaps: u64,
    /// CASes that found something else.
    pub lost: u64,
    /// It was an RPC.
    pub rpc: bool,
}

/// The nodes' memory, as far as it matters.
#[derive(Debug)]
pub struct World {
    nodes: Vec<NodeWords>,
}

/// The metadata of a node.
#[derive(Clone, Debug, Default)]
pub struct NodeWords {
    pub sections: Vec<u64>,
    pub spans: Vec<u64>,
    pub logs: Vec<u64>,
    pub keys: Vec<u64>,
    /// Of the array: who has a chunk.
    owners: Vec<u16>,
}

impl World {
    /// All free.
    pub fn new(way: Way, sections: u32, nodes: usize) -> Self {
        Self { nodes: (0..nodes).map(|_| NodeWords::new(way, sections)).collect() }
    }
}

impl NodeWords {
    /// All free.
    pub fn new(way: Way, sections: u32) -> Self {
        let of = |is_used: bool, each: u32| if is_used { (sections * each) as usize } else { 0 };
        let (ours, array) = (way == Way::Ours, way == Way::Array);
        Self {
            sections: vec![0; of(ours, 1)],
            spans: vec![0; of(ours, SECTION_SPANS)],
            logs: vec![0; of(ours, SECTION_ENTRIES)],
            keys: vec![0; of(ours, SECTION_ENTRIES)],
            owners: vec![0; of(array, SECTION_CHUNKS)],
        }
    }

    fn words(&mut self, at: WordAt, count: usize) -> &mut [u64] {
        let (all, first) = match at {
            WordAt::Section(index) => (&mut self.sections, index),
            WordAt::Span(index) => (&mut self.spans, index),
            WordAt::Log(index) => (&mut self.logs, index),
            WordAt::Key(index) => (&mut self.keys, index),
        };
        &mut all[first as usize..][..count]
    }

    fn swap(&mut self, at: WordAt, expected: u64, desired: u64) -> u64 {
        let word = &mut self.words(at, 1)[0];
        let found = *word;
        if found == expected {
            *word = desired;
        }
        found
    }

    /// Do what a machine of ours wants done; what it hears, and what that was.
    pub fn carry_out(&mut self, action: &Action, heard: &mut Vec<u64>) -> Arrived {
        heard.clear();
        match *action {
            Action::Cas { at, expected, desired } => {
                heard.push(self.swap(at, expected, desired));
                swapped(1, heard[0] != expected)
            }
            Action::CasThen { at, expected, desired, then } => {
                heard.push(self.swap(at, expected, desired));
                heard.push(self.words(then, 1)[0]);
                swapped(2, heard[0] != expected)
            }
            Action::WriteThen { entry, value, at, expected, desired } => {
                self.words(entry, 1)[0] = value;
                heard.push(self.swap(at, expected, desired));
                swapped(2, heard[0] != expected)
            }
            Action::Probe { at } => {
                heard.push(self.words(at, 1)[0]);
                plain(1)
            }
            Action::Read { at, count } => {
                heard.extend_from_slice(self.words(at, count as usize));
                plain(1)
            }
            Action::Survey { section } => {
                let (first, count) = (section * SECTION_SPANS, SECTION_SPANS as usize);
                heard.extend_from_slice(self.words(WordAt::Span(first), count));
                heard.extend_from_slice(self.words(WordAt::span_key(first), count));
                plain(2)
            }
            Action::Write(writes) => {
                let mut operations = 0;
                for part in writes.parts() {
                    operations += 1;
                    for (word, value) in self.words(part.at, part.count()).iter_mut().zip(part.words()) {
                        *word = value;
                    }
                }
                plain(operations)
            }
            Action::Strike(strikes) => {
                let mut arrived = plain(0);
                for (at, expected, desired) in strikes.swaps() {
                    arrived.operations += 1;
                    arrived.swaps += 1;
                    arrived.lost += u64::from(self.swap(at, expected, desired) != expected);
                }
                arrived
            }
        }
    }
}

/// What a machine hears that wanted this done.
pub fn answer<'a>(action: &Action, heard: &'a [u64]) -> StepResult<'a> {
    match action {
        Action::Cas { .. } | Action::Probe { .. } | Action::WriteThen { .. } => StepResult::Found(heard[0]),
        Action::CasThen { .. } => StepResult::FoundThen(heard[0], heard[1]),
        Action::Read { .. } | Action::Survey { .. } => StepResult::Words(heard),
        Action::Write(_) | Action::Strike(_) => StepResult::Written,
    }
}

fn plain(operations: u64) -> Arrived {
    Arrived { operations, ..Arrived::default() }
}

fn swapped(operations: u64, is_lost: bool) -> Arrived {
    Arrived { swaps: 1, lost: u64::from(is_lost), ..plain(operations) }
}

/// An operation of ours.
#[derive(Debug)]
enum Operation {
    Alloc(AllocOp),
    Free(FreeOp),
}

/// A client, of one way.
#[derive(Debug)]
pub struct Client {
    class: SizeClass,
    random: u64,
    nodes: usize,
    /// Where it is at work.
    node: usize,
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Rpc { held: u64, task: Task },
    Array(Box<ArrayClient>),
    Ours(Box<OurClient>),
}

#[derive(Debug)]
struct OurClient {
    host: Host,
    caches: Vec<NodeCache>,
    held: Vec<(usize, Grant)>,
    operation: Option<Operation>,
    action: Option<Action>,
    heard: Vec<u64>,
}

#[derive(Debug)]
struct ArrayClient {
    host: u16,
    /// What it knows of each node's entries.
    views: Vec<Vec<u16>>,
    held: Vec<(usize, u32)>,
    task: Task,
    /// The extent that it is at.
    first: u32,
    /// Of its entries those that it got.
    got: Vec<u32>,
    has_lost: bool,
    cursor: u32,
}

impl Client {
    /// One of a scene's.
    pub fn new(scene: &Scene, number: usize, sections: u32, seed: u64) -> Self {
        let class = SizeClass::new(scene.k).unwrap_or(SizeClass::SECTION);
        let host = u16::try_from(number + 1).unwrap_or(u16::MAX);
        let inner = match scene.way {
            Way::OnDemandRpc | Way::Rpc | Way::RpcWindow => Inner::Rpc { held: 0, task: Task::Allocate },
            Way::Array => Inner::Array(Box::new(ArrayClient::new(host, sections, scene.nodes, seed))),
            Way::Ours => Inner::Ours(Box::new(OurClient::new(host, sections, scene.nodes, seed))),
        };
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number as u64 + 1) << 17;
        Self { class, random, nodes: scene.nodes, node: 0, inner }
    }

    /// Extents that it has.
    pub fn held(&self) -> u64 {
        match &self.inner {
            Inner::Rpc { held, .. } => *held,
            Inner::Array(array) => array.held.len() as u64,
            Inner::Ours(ours) => ours.held.len() as u64,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from((self.random >> 20) % bound.max(1) as u64).unwrap_or(0)
    }

    /// Begin a task; whether it is over already, without a trip.
    ///
    /// # Errors
    /// If there is no extent.
    pub fn begin(&mut self, task: Task) -> Result<bool, String> {
        let node = self.below(self.nodes);
        let held = usize::try_from(self.held()).unwrap_or(0);
        let chosen = self.below(held);
        self.node = node;
        match &mut self.inner {
            Inner::Rpc { task: now, .. } => *now = task,
            Inner::Array(array) => {
                if task == Task::Free {
                    let (at, first) = array.held.swap_remove(chosen);
                    (self.node, array.first) = (at, first);
                } else {
                    array.first = array.find(node, self.class).ok_or("the array is full")?;
                }
                array.task = task;
            }
            Inner::Ours(ours) => {
                let (at, operation) = if task == Task::Free {
                    let (at, grant) = ours.held.swap_remove(chosen);
                    (at, Operation::Free(FreeOp::new(ours.host, grant)))
                } else {
                    (node, Operation::Alloc(AllocOp::new(ours.host, self.class)))
                };
                self.node = at;
                return ours.start(at, operation);
            }
        }
        Ok(false)
    }

    /// What it has posted is at the node.
    pub fn arrive(&mut self, world: &mut World) -> Arrived {
        let node = &mut world.nodes[self.node];
        let arrived = match &mut self.inner {
            Inner::Rpc { .. } => Arrived { rpc: true, ..plain(1) },
            Inner::Array(array) => array.arrive(self.node, node, self.class.chunks()),
            Inner::Ours(ours) => match ours.action {
                Some(action) => node.carry_out(&action, &mut ours.heard),
                None => plain(0),
            },
        };
        Arrived { node: self.node, ..arrived }
    }

    /// The answer is here; whether that was all.
    ///
    /// # Errors
    /// If there is no extent.
    pub fn proceed(&mut self) -> Result<bool, String> {
        match &mut self.inner {
            Inner::Rpc { held, task } => {
                *held = if *task == Task::Allocate { *held + 1 } else { *held - 1 };
                Ok(true)
            }
            Inner::Array(array) => array.proceed(self.node, self.class),
            Inner::Ours(ours) => ours.proceed(self.node),
        }
    }
}

impl OurClient {
    fn new(host: u16, sections: u32, nodes: usize, seed: u64) -> Self {
        let nonces: Nonces = Arc::new(AtomicU32::new(0));
        let cache = |node: usize| {
            let layout = Layout::new(u16::try_from(node + 1).unwrap_or(1), sections);
            let salt = seed << 32 | u64::from(host) << 8 | node as u64;
            NodeCache::new(&layout.expect("so many sections fit"), salt, Tenant(0), Arc::clone(&nonces))
        };
        let caches = (0..nodes).map(cache).collect();
        Self { host: Host(host), caches, held: Vec::new(), operation: None, action: None, heard: Vec::new() }
    }

    fn start(&mut self, node: usize, operation: Operation) -> Result<bool, String> {
        let cache = &mut self.caches[node];
        match operation {
            Operation::Alloc(mut op) => {
                let step = op.start(cache);
                self.operation = Some(Operation::Alloc(op));
                self.granted(node, step)
            }
            Operation::Free(mut op) => {
                let step = op.start(cache);
                self.operation = Some(Operation::Free(op));
                self.given(step)
            }
        }
    }

    fn proceed(&mut self, node: usize) -> Result<bool, String> {
        let cache = &mut self.caches[node];
        let result = self.action.map_or(StepResult::Written, |action| answer(&action, &self.heard));
        match self.operation.as_mut() {
            Some(Operation::Alloc(op)) => {
                let step = op.step(cache, result);
                self.granted(node, step)
            }
            Some(Operation::Free(op)) => {
                let step = op.step(cache, result);
                self.given(step)
            }
            None => Ok(true),
        }
    }

    fn granted(&mut self, node: usize, step: Step<Grant>) -> Result<bool, String> {
        match step {
            Step::Post(action) => self.action = Some(action),
            Step::Done(grant) => {
                self.held.push((node, grant.map_err(|error| format!("an allocation failed: {error:?}"))?));
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn given(&mut self, step: Step<()>) -> Result<bool, String> {
        match step {
            Step::Post(action) => self.action = Some(action),
            Step::Done(outcome) => {
                outcome.map_err(|error| format!("giving back failed: {error:?}"))?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl ArrayClient {
    fn new(host: u16, sections: u32, nodes: usize, seed: u64) -> Self {
        let entries = sections * SECTION_CHUNKS;
        let mixed = (seed ^ u64::from(host)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        // Each begins somewhere else.
        let cursor = u32::try_from(mixed % u64::from(entries)).unwrap_or(0);
        Self {
            host,
            views: vec![vec![0; entries as usize]; nodes],
            held: Vec::new(),
            task: Task::Allocate,
            first: 0,
            got: Vec::new(),
            has_lost: false,
            cursor,
        }
    }

    /// The next run of entries that is free as far as this client knows.
    fn find(&mut self, node: usize, class: SizeClass) -> Option<u32> {
        let view = &self.views[node];
        let step = class.chunks();
        let runs = u32::try_from(view.len()).unwrap_or(u32::MAX) / step;
        let from = self.cursor / step;
        let is_free = |run: &u32| {
            let first = (run * step) as usize;
            view[first..first + step as usize].iter().all(|owner| *owner == 0)
        };
        let run = (from..runs).chain(0..from.min(runs)).find(is_free)?;
        self.cursor = run * step;
        Some(run * step)
    }

    /// Give back, or take: after a lost race what was got goes back, what is there is read, and others are tried, all by one doorbell.
    fn arrive(&mut self, node: usize, words: &mut NodeWords, chunks: u32) -> Arrived {
        let view = &mut self.views[node];
        let mut arrived = Arrived::default();
        if self.task == Task::Free {
            self.got.extend(self.first..self.first + chunks);
        }
        for chunk in self.got.drain(..) {
            words.owners[chunk as usize] = 0;
            view[chunk as usize] = 0;
            arrived.operations += 1;
        }
        if self.task == Task::Free {
            return arrived;
        }
        if std::mem::take(&mut self.has_lost) {
            let first = self.first as usize;
            let near = first..(first + ARRAY_READ.max(chunks) as usize).min(view.len());
            view[near.clone()].copy_from_slice(&words.owners[near]);
            arrived.operations += 1;
        }
        for chunk in self.first..self.first + chunks {
            let owner = &mut words.owners[chunk as usize];
            arrived.operations += 1;
            arrived.swaps += 1;
            if *owner == 0 {
                *owner = self.host;
                self.got.push(chunk);
            } else {
                self.has_lost = true;
                arrived.lost += 1;
            }
            view[chunk as usize] = *owner;
        }
        arrived
    }

    fn proceed(&mut self, node: usize, class: SizeClass) -> Result<bool, String> {
        if self.task == Task::Allocate && self.has_lost {
            self.first = self.find(node, class).ok_or("the array is full")?;
            return Ok(false);
        }
        if self.task == Task::Allocate {
            self.held.push((node, self.first));
            self.got.clear();
        }
        Ok(true)
    }
}
