//! Every interleaving of hosts that take and give back extents of one section, of which some die at any step and are recovered by others: no chunk has two owners,
//! nothing is closed under anybody, and when a dead host is recovered nothing of its is left. Hints (full, contended) are left out: they commit nothing. The protocol is that of `docs/decisions/0011`; each rule of it is
//! left out once, and that is found out.

mod host;
mod memory;
mod recover;
mod truth;

use host::{Actor, At, Fault, Goal, World};
use memory::{HOST_NUMBERS, HOSTS, Memory};
use stateright::{Checker, Model, Property};
use truth::Truth;

/// How much is tried.
#[derive(Clone, Copy)]
struct Trial {
    /// Operations that each host may begin.
    operations: [u8; HOSTS],
    deaths: usize,
    fault: Fault,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    memory: Memory,
    truth: Truth,
    actors: Vec<Actor>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Begin(usize, Goal),
    Recover(usize, u8),
    Step(usize),
    Die(usize),
}

impl Model for Trial {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let actor = |host: u8| Actor::new(host, self.operations[usize::from(host)], self.fault);
        vec![State { memory: Memory::NEW, truth: Truth::NEW, actors: HOST_NUMBERS.map(actor).to_vec() }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.truth.broken.is_some() {
            return;
        }
        let dead = state.truth.dead;
        for (at, actor) in state.actors.iter().enumerate().filter(|(at, _)| !dead[*at]) {
            if actor.at != At::Idle {
                actions.push(Action::Step(at));
            } else {
                if actor.left > 0 {
                    actions.extend(actor.wishes().into_iter().map(|goal| Action::Begin(at, goal)));
                }
                let lost = HOST_NUMBERS.into_iter().filter(|other| {
                    let other = usize::from(*other);
                    dead[other] && !actor.recovered[other]
                });
                actions.extend(lost.map(|other| Action::Recover(at, other)));
            }
            if dead.iter().filter(|dead| **dead).count() < self.deaths && state.memory != Memory::NEW {
                actions.push(Action::Die(at));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let State { memory, truth, actors } = &mut state;
        match action {
            Action::Begin(at, goal) => {
                actors[at].left -= 1;
                actors[at].begin(goal);
            }
            Action::Recover(at, dead) => actors[at].recover(dead),
            Action::Step(at) => actors[at].step(&mut World { memory, truth }),
            Action::Die(at) => {
                truth.dead[at] = true;
                // It does nothing any more, whatever it was about to do: one state for all.
                actors[at] = Actor::new(HOST_NUMBERS[at], 0, self.fault);
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing has two owners", |_, state: &State| state.truth.broken.is_none()),
            Property::always("nothing of a recovered host is left", |_, state: &State| {
                let live = state.actors.iter().filter(|actor| !state.truth.dead[usize::from(actor.host)]);
                let recovered = |actor: &Actor| {
                    let recovered = actor.recovered;
                    HOST_NUMBERS.into_iter().filter(move |dead| recovered[usize::from(*dead)])
                };
                !live.flat_map(recovered).any(|dead| state.truth.has_traces_of(dead))
            }),
            Property::sometimes("all who die are recovered by one host", |trial, state: &State| {
                let recovered = |actor: &Actor| actor.recovered.iter().filter(|is| **is).count();
                state.actors.iter().any(|actor| recovered(actor) == trial.deaths)
            }),
        ]
    }
}

/// Operations of each host, and deaths: together some 10 seconds, and six million states.
const TRIALS: [([u8; HOSTS], usize); 4] = [([2, 2, 0], 1), ([2, 1, 1], 1), ([2, 1, 1], 2), ([3, 2, 0], 1)];

fn check(operations: [u8; HOSTS], deaths: usize, fault: Fault) -> impl Checker<Trial> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Trial { operations, deaths, fault }.checker().threads(threads).spawn_bfs().join()
}

#[test]
fn no_interleaving_loses_a_chunk_or_gives_it_to_two() {
    for (operations, deaths) in TRIALS {
        let checker = check(operations, deaths, Fault::None);
        println!("{operations:?} operations, {deaths} deaths: {} states", checker.unique_state_count());
        checker.assert_properties();
    }
}

#[test]
fn each_rule_is_needed() {
    for fault in
        [Fault::SkipFlush, Fault::BlindFlush, Fault::SkipMark, Fault::MarkFromMemory, Fault::SectionLast]
    {
        let found = TRIALS.into_iter().any(|(operations, deaths)| {
            let checker = check(operations, deaths, fault);
            checker.discoveries().keys().any(|name| name.starts_with("nothing"))
        });
        assert!(found, "nothing goes wrong with {fault:?}");
    }
}
