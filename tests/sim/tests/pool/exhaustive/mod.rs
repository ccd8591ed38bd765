//! Every interleaving of a few operations of a few hosts on two spans, at each access to the node's
//! memory, with deaths at any moment and recovery by other hosts.
//!
//! The state machines are those of the product. The simulator's model checks each change.

mod actor;

use std::collections::BTreeMap;

use aquifer_fabric::{Host, Tenant};
use aquifer_mutation::Mutations;
use aquifer_pool::SizeClass;
use aquifer_pool::cache::{NodeCache, NumberSource};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{AllocOp, Mutation, StateMachine, Step, StepResult, WordAccess, WordAt};
use aquifer_pool::size::SECTION_SPANS;
use aquifer_pool::word::SpanState;
use stateright::{Checker, Model, Property};

use super::model::{PoolModel, ReadWord, SpanMode};
use actor::{Actor, CLIENTS_MAX, Goal};

/// Spans that the actors share; all others are allocated beforehand.
const SPANS: u32 = 2;
const TENANT: Tenant = Tenant(0);
/// The host that owns all other spans.
const FILLER: Host = Host(9);

/// The parameters of a check.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// The host of each actor, and the operations that it may begin.
    actors: &'static [(u16, u8)],
    /// Largest number of hosts that die.
    deaths: usize,
    /// The size classes that are allocated. Class 4 is half a span, so that two extents fill one.
    classes: &'static [u8],
    mutation: Option<Mutation>,
}

/// A node's memory; missing words are zero.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct SparseMemory(BTreeMap<WordAt, u64>);

impl ReadWord for SparseMemory {
    fn word(&self, at: WordAt) -> u64 {
        self.0.get(&at).copied().unwrap_or(0)
    }
}

impl SparseMemory {
    fn set(&mut self, at: WordAt, word: u64) {
        if word == 0 {
            self.0.remove(&at);
        } else {
            self.0.insert(at, word);
        }
    }

    /// Executes one access; appends its answer to `answer`.
    fn access(&mut self, access: &WordAccess, answer: &mut Vec<u64>) {
        match *access {
            WordAccess::Cas { at, expected, desired } => {
                let found = self.word(at);
                answer.push(found);
                if found == expected {
                    self.set(at, desired);
                }
            }
            WordAccess::Probe { at } => answer.push(self.word(at)),
            WordAccess::Read { at, count } => {
                answer.extend((0..count).map(|number| self.word(neighbour(at, number))));
            }
            WordAccess::Write { at, .. } => {
                for (number, word) in (0..).zip(access.written()) {
                    self.set(neighbour(at, number), word);
                }
            }
        }
    }
}

fn neighbour(at: WordAt, number: u32) -> WordAt {
    match at {
        WordAt::Section(index) => WordAt::Section(index + number),
        WordAt::Span(index) => WordAt::Span(index + number),
        WordAt::Log(index) => WordAt::Log(index + number),
        WordAt::Key(index) => WordAt::Key(index + number),
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct ModelState {
    memory: SparseMemory,
    model: PoolModel,
    actors: Vec<Actor>,
    /// The first error.
    failure: Option<String>,
}

impl ModelState {
    fn new(trial: &Trial) -> Self {
        let layout = Layout::new(1, 1).expect("one section");
        let (mut memory, mut model) = (SparseMemory::default(), PoolModel::of(layout));
        let mut cache = NodeCache::new(&layout, 0, TENANT, NumberSource::counted(0, CLIENTS_MAX));
        for _ in SPANS..SECTION_SPANS {
            allocate(&mut memory, &mut model, &mut cache);
        }
        let actor = |(number, (host, operations)): (u32, &(u16, u8))| {
            // The cache has the words as they are now.
            let numbers = NumberSource::counted(number, CLIENTS_MAX);
            Actor::new(Host(*host), *operations, cache.clone().with_numbers(numbers))
        };
        let actors = (1..).zip(trial.actors).map(actor).collect();
        Self { memory, model, actors, failure: None }
    }

    fn is_dead(&self, host: Host) -> bool {
        self.model.dead.contains(&host)
    }

    fn is_quiet(&self) -> bool {
        self.actors.iter().all(Actor::is_idle)
    }

    /// Whether each span with a full hint is full. To be checked while no operation is in progress
    /// and no host is dead.
    fn has_right_hints(&self) -> bool {
        (0..SECTION_SPANS).all(|span| {
            let is_hinted_full = self.model.modes[span as usize] == SpanMode::Chunks
                && self.model.state_of(span) == SpanState::Full;
            !is_hinted_full || self.model.span(span).is_full()
        })
    }
}

/// Allocates a span for [`FILLER`], while no other operation is in progress.
fn allocate(memory: &mut SparseMemory, model: &mut PoolModel, cache: &mut NodeCache) {
    let mut op = AllocOp::new(FILLER, SizeClass::SPAN);
    let mut step = op.start(cache);
    while let Step::Post(action) = step {
        let mut answer = Vec::new();
        for access in action.accesses() {
            memory.access(access, &mut answer);
            model.observe(memory, &[(FILLER, action.clone())]).expect("no other operation is in progress");
        }
        step = op.step(cache, StepResult(&answer));
    }
    assert!(matches!(step, Step::Done(Ok(_))), "there is room: {step:?}");
}

/// An event that changes the state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ModelEvent {
    Begin(usize, Goal),
    /// One access of this actor, and its next step if the answer is complete.
    Access(usize),
    Die(Host),
}

impl Model for Trial {
    type State = ModelState;
    type Action = ModelEvent;

    fn init_states(&self) -> Vec<ModelState> {
        vec![ModelState::new(self)]
    }

    fn actions(&self, state: &ModelState, events: &mut Vec<ModelEvent>) {
        if state.failure.is_some() {
            return;
        }
        for (at, actor) in state.actors.iter().enumerate().filter(|(_, actor)| !state.is_dead(actor.host)) {
            if actor.is_idle() {
                let goals = actor.goals(self.classes, &state.model.dead);
                events.extend(goals.into_iter().map(|goal| ModelEvent::Begin(at, goal)));
            } else {
                events.push(ModelEvent::Access(at));
            }
            if state.model.dead.len() < self.deaths && actor.has_anything() {
                events.push(ModelEvent::Die(actor.host));
            }
        }
    }

    fn next_state(&self, last: &ModelState, event: ModelEvent) -> Option<ModelState> {
        let mut state = last.clone();
        let play = || {
            match event {
                ModelEvent::Begin(at, goal) => state.actors[at].begin(goal),
                ModelEvent::Access(at) => {
                    let ModelState { memory, model, actors, failure } = &mut state;
                    *failure = actors[at].access(memory, model).err();
                }
                ModelEvent::Die(host) => {
                    state.model.dead.push(host);
                    // Cleared, so that states are equal whatever the dead host was about to do.
                    state.actors.iter_mut().filter(|actor| actor.host == host).for_each(Actor::forget);
                }
            }
            state
        };
        Some(match self.mutation {
            Some(mutation) => mutation.while_active(play),
            None => play(),
        })
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing goes wrong", |_, state: &ModelState| state.failure.is_none()),
            Property::always("hints are right", |_, state: &ModelState| {
                !state.is_quiet() || !state.model.dead.is_empty() || state.has_right_hints()
            }),
            Property::sometimes("a host that died is recovered", |trial, state: &ModelState| {
                trial.deaths == 0 || state.actors.iter().any(Actor::has_recovered)
            }),
        ]
    }
}

fn check(trial: Trial) -> impl Checker<Trial> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    trial.checker().threads(threads).spawn_dfs().join()
}

const fn trial(actors: &'static [(u16, u8)], deaths: usize, classes: &'static [u8]) -> Trial {
    Trial { actors, deaths, classes, mutation: None }
}

/// About 50,000 states.
const SHORT: [Trial; 4] = [
    trial(&[(1, 2), (2, 1)], 0, &[4, 5]),
    trial(&[(1, 2), (2, 2)], 1, &[4]),
    trial(&[(1, 2), (2, 1)], 1, &[4, 5, 6]),
    trial(&[(1, 2), (1, 1), (2, 0)], 1, &[4]),
];

fn assert_nothing_goes_wrong(trials: &[Trial]) {
    for trial in trials {
        let began = std::time::Instant::now();
        let checker = check(*trial);
        println!("{trial:?}: {} states, {:?}", checker.unique_state_count(), began.elapsed());
        checker.assert_properties();
    }
}

#[test]
fn no_interleaving_of_few_operations_goes_wrong() {
    assert_nothing_goes_wrong(&SHORT);
}

mod long {
    use super::*;

    const TRIALS: [Trial; 5] = [
        trial(&[(1, 3), (2, 3)], 1, &[4]),
        trial(&[(1, 2), (2, 2)], 1, &[4, 5, 6]),
        trial(&[(1, 1), (2, 1), (3, 0)], 2, &[4]),
        trial(&[(1, 1), (1, 1), (2, 0)], 1, &[4, 5]),
        trial(&[(1, 1), (2, 1), (3, 1)], 0, &[4]),
    ];

    #[test]
    fn no_interleaving_goes_wrong() {
        assert_nothing_goes_wrong(&TRIALS);
    }

    /// Mutations of steps without which a recovery would leak something or free too much.
    const RULES: [Mutation; 9] = [
        Mutation::SkipFlush,
        Mutation::SkipReady,
        Mutation::ReadyFromCache,
        Mutation::SkipRecord,
        Mutation::RecoverBlind,
        Mutation::AllocateFromStale,
        Mutation::EnterClosed,
        Mutation::CloseFirst,
        Mutation::SkipRevoke,
    ];

    #[test]
    fn each_rule_is_needed() {
        for mutation in RULES {
            let found = SHORT.into_iter().chain(TRIALS).find(|trial| {
                let checker = check(Trial { mutation: Some(mutation), ..*trial });
                checker.discovery("nothing goes wrong").is_some()
            });
            println!("{mutation:?}: found by {found:?}");
            assert!(found.is_some(), "nothing goes wrong with {mutation:?}");
        }
    }
}
