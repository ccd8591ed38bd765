//! A client of a host, which runs one state machine at a time, one access at a time.

use std::collections::VecDeque;

use aquifer_fabric::Host;
use aquifer_pool::SizeClass;
use aquifer_pool::cache::NodeCache;
use aquifer_pool::op::{
    Action, AllocOp, FreeOp, Grant, OpError, RecoverOp, StateMachine, Step, StepResult, WordAccess,
};

use super::{SparseMemory, TENANT};
use crate::pool::model::PoolModel;

/// An upper bound of the number of clients.
pub const CLIENTS_MAX: u32 = 16;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum ActorOp {
    Alloc(AllocOp),
    Free(FreeOp),
    Recover(Box<RecoverOp>, Host),
}

/// An operation that an actor may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Goal {
    Alloc(SizeClass),
    /// The extent with this index.
    Free(usize),
    Recover(Host),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Actor {
    pub host: Host,
    /// Number of operations that the actor may still begin.
    operations_left: u8,
    owned: Vec<Grant>,
    cache: NodeCache,
    running: Option<ActorOp>,
    /// The last action, its accesses that are not executed yet, and the answer so far.
    posted: Action,
    waiting: VecDeque<WordAccess>,
    answer: Vec<u64>,
    recovered: Vec<Host>,
}

impl Actor {
    pub fn new(host: Host, operations: u8, cache: NodeCache) -> Self {
        Self {
            host,
            operations_left: operations,
            owned: Vec::new(),
            cache,
            running: None,
            posted: Action::default(),
            waiting: VecDeque::new(),
            answer: Vec::new(),
            recovered: Vec::new(),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_none()
    }

    /// Whether the host would leave extents or unfinished operations behind if it died.
    pub fn has_anything(&self) -> bool {
        !self.is_idle() || !self.owned.is_empty()
    }

    pub fn has_recovered(&self) -> bool {
        !self.recovered.is_empty()
    }

    /// Ends the client, because its host has died.
    pub fn forget(&mut self) {
        self.running = None;
        self.operations_left = 0;
        self.owned.clear();
        self.posted = Action::default();
        self.waiting.clear();
        self.answer.clear();
    }

    /// The operations that the actor may begin now.
    pub fn goals(&self, classes: &[u8], dead: &[Host]) -> Vec<Goal> {
        let unrecovered = dead.iter().filter(|dead| !self.recovered.contains(dead));
        let mut goals: Vec<Goal> = unrecovered.map(|dead| Goal::Recover(*dead)).collect();
        if self.operations_left > 0 {
            goals.extend(classes.iter().map(|k| Goal::Alloc(SizeClass::new(*k).expect("a class"))));
            goals.extend((0..self.owned.len()).map(Goal::Free));
        }
        goals
    }

    pub fn begin(&mut self, goal: Goal) {
        match goal {
            Goal::Alloc(class) => {
                self.operations_left -= 1;
                let mut op = AllocOp::new(self.host, class);
                let step = op.start(&mut self.cache);
                self.started(ActorOp::Alloc(op), step);
            }
            Goal::Free(number) => {
                self.operations_left -= 1;
                let mut op = FreeOp::new(self.host, self.owned.swap_remove(number));
                let step = op.start(&mut self.cache);
                self.started(ActorOp::Free(op), step);
            }
            Goal::Recover(dead) => {
                let mut op = Box::new(RecoverOp::new(self.host, dead));
                let step = op.start(&mut self.cache);
                self.started(ActorOp::Recover(op, dead), step);
            }
        }
    }

    fn started<T>(&mut self, running: ActorOp, step: Step<T>) {
        match step {
            Step::Post(action) => self.post(running, action),
            Step::Done(_) => panic!("{running:?} is done before it has done anything"),
        }
    }

    fn post(&mut self, running: ActorOp, action: Action) {
        self.running = Some(running);
        self.waiting = action.accesses().iter().copied().collect();
        self.posted = action;
        self.answer.clear();
    }

    /// Executes the next access, and runs the next step after the last access of an action.
    pub fn access(&mut self, memory: &mut SparseMemory, model: &mut PoolModel) -> Result<(), String> {
        let access = self.waiting.pop_front().ok_or("no operation is in progress")?;
        memory.access(&access, &mut self.answer);
        model.observe(memory, &[(self.host, self.posted.clone())])?;
        if !self.waiting.is_empty() {
            return Ok(());
        }
        let (running, answer) = (self.running.take(), std::mem::take(&mut self.answer));
        self.posted = Action::default();
        let result = StepResult(&answer);
        match running.ok_or("no operation is in progress")? {
            ActorOp::Alloc(mut op) => match op.step(&mut self.cache, result) {
                Step::Post(action) => self.post(ActorOp::Alloc(op), action),
                Step::Done(Ok(grant)) => {
                    model.granted_to(memory, &grant, TENANT)?;
                    self.owned.push(grant);
                    // Sorted, so that states are equal whatever the order.
                    self.owned.sort_unstable();
                }
                Step::Done(Err(OpError::Full)) => {}
                Step::Done(Err(error)) => return Err(format!("an allocation failed: {error:?}")),
            },
            ActorOp::Free(mut op) => match op.step(&mut self.cache, result) {
                Step::Post(action) => self.post(ActorOp::Free(op), action),
                Step::Done(outcomes) => {
                    let outcome = outcomes.and_then(|outcomes| outcomes[0]);
                    outcome.map_err(|error| format!("a free failed: {error:?}"))?;
                }
            },
            ActorOp::Recover(mut op, dead) => match op.step(&mut self.cache, result) {
                Step::Post(action) => self.post(ActorOp::Recover(op, dead), action),
                Step::Done(Ok(recovered)) => {
                    if recovered.unowned > 0 || model.owns_anything(dead) {
                        return Err(format!("{dead:?} still owns something after {recovered:?}"));
                    }
                    self.recovered.push(dead);
                }
                Step::Done(Err(error)) => return Err(format!("a recovery failed: {error:?}")),
            },
        }
        Ok(())
    }
}
