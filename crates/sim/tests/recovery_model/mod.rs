//! Every interleaving of hosts that take and give back extents of one section, of which some die at any step and are recovered by others: no chunk has two owners,
//! nothing is closed under anybody, and when a dead host is recovered nothing of its is left. Hints (full, contended) are left out: they commit nothing. The protocol is that of `docs/decisions/0011`; each rule of it is
//! left out once, and that is found out; but for F7 (docs/formats/pool.md), which is needed only where a living host is audited, and that is for the simulator (`tests/pool`).

mod fault;
mod host;
mod memory;
mod recover;
mod truth;

use fault::Fault;
use host::{Actor, At, Goal, World};
use memory::{HOST_NUMBERS, HOSTS, Memory};
use stateright::{Checker, Model, Property};
use truth::Truth;

/// How much is tried.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Operations that each host may begin.
    operations: [u8; HOSTS],
    /// Whose threads they are.
    hosts: [u8; HOSTS],
    deaths: usize,
    /// Whether all that is taken are whole spans: then more operations can be tried.
    is_of_wholes: bool,
    /// Whether spans may rest.
    has_rest: bool,
    fault: Fault,
}

impl Trial {
    const THREE_HOSTS: [u8; HOSTS] = HOST_NUMBERS;
    const TWO_OF_ONE: [u8; HOSTS] = [0, 0, 1];

    const fn new(operations: [u8; HOSTS], hosts: [u8; HOSTS], deaths: usize) -> Self {
        Self { operations, hosts, deaths, is_of_wholes: false, has_rest: false, fault: Fault::None }
    }

    const fn of_wholes(self) -> Self {
        Self { is_of_wholes: true, ..self }
    }

    const fn with_rest(self) -> Self {
        Self { has_rest: true, ..self }
    }

    fn allows(&self, goal: &Goal) -> bool {
        if !self.has_rest && matches!(goal, Goal::Give { rests: true, .. }) {
            return false;
        }
        !self.is_of_wholes || matches!(goal, Goal::TakeWhole(_) | Goal::GiveWhole(_))
    }
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
    Die(u8),
}

impl Model for Trial {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let actors = self.hosts.into_iter().zip(self.operations);
        let actors = actors.map(|(host, operations)| Actor::new(host, operations, self.fault)).collect();
        vec![State { memory: Memory::NEW, truth: Truth::NEW, actors }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.truth.broken.is_some() {
            return;
        }
        let dead = state.truth.dead;
        for (at, actor) in state.actors.iter().enumerate().filter(|(_, actor)| !dead[usize::from(actor.host)])
        {
            if actor.at != At::Idle {
                actions.push(Action::Step(at));
            } else {
                if actor.left > 0 {
                    let wishes = actor.wishes().into_iter().filter(|goal| self.allows(goal));
                    actions.extend(wishes.map(|goal| Action::Begin(at, goal)));
                }
                let lost = HOST_NUMBERS.into_iter().filter(|other| {
                    let other = usize::from(*other);
                    dead[other] && !actor.recovered[other]
                });
                actions.extend(lost.map(|other| Action::Recover(at, other)));
            }
            if dead.iter().filter(|dead| **dead).count() < self.deaths && state.memory != Memory::NEW {
                actions.push(Action::Die(actor.host));
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
            Action::Die(host) => {
                truth.dead[usize::from(host)] = true;
                // It does nothing any more, whatever it was about to do: one state for all.
                for actor in actors.iter_mut().filter(|actor| actor.host == host) {
                    *actor = Actor::new(host, 0, self.fault);
                }
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
            // States without a next step have all of it behind them: nobody waits for ever.
            Property::eventually("nothing dead is left in the end", |trial, state: &State| {
                let live = state.actors.iter().filter(|actor| !state.truth.dead[usize::from(actor.host)]);
                let recovered = |actor: &Actor| actor.recovered.iter().filter(|is| **is).count();
                state.memory == Memory::NEW || { live }.any(|actor| recovered(actor) == trial.deaths)
            }),
            Property::sometimes("all who die are recovered by one host", |trial, state: &State| {
                let recovered = |actor: &Actor| actor.recovered.iter().filter(|is| **is).count();
                state.actors.iter().any(|actor| recovered(actor) == trial.deaths)
            }),
        ]
    }
}

/// Together some fifteen million states.
const TRIALS: [Trial; 7] = [
    Trial::new([5, 3, 0], Trial::THREE_HOSTS, 1).of_wholes(),
    Trial::new([4, 2, 1], Trial::THREE_HOSTS, 1).of_wholes(),
    Trial::new([3, 2, 0], Trial::THREE_HOSTS, 1).with_rest(),
    Trial::new([2, 1, 1], Trial::THREE_HOSTS, 2).with_rest(),
    Trial::new([2, 2, 0], Trial::TWO_OF_ONE, 1).with_rest(),
    Trial::new([3, 1, 0], Trial::TWO_OF_ONE, 1).with_rest(),
    Trial::new([2, 1, 1], Trial::TWO_OF_ONE, 1).with_rest(),
];
/// In these each fault shows, the smallest first.
const FAULT_TRIALS: [Trial; 4] = [
    Trial::new([2, 2, 0], Trial::TWO_OF_ONE, 1),
    Trial::new([2, 2, 0], Trial::THREE_HOSTS, 1),
    Trial::new([4, 2, 0], Trial::THREE_HOSTS, 1).of_wholes(),
    Trial::new([3, 2, 0], Trial::THREE_HOSTS, 1),
];

fn check(trial: Trial) -> impl Checker<Trial> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    trial.checker().threads(threads).spawn_bfs().join()
}

mod long {
    use super::*;

    #[test]
    fn no_interleaving_loses_a_chunk_or_gives_it_to_two() {
        for trial in TRIALS {
            let checker = check(trial);
            println!("{trial:?}: {} states", checker.unique_state_count());
            checker.assert_properties();
        }
    }

    #[test]
    fn each_rule_is_needed() {
        for fault in Fault::ALL {
            let found = FAULT_TRIALS.into_iter().find(|trial| {
                let checker = check(Trial { fault, ..*trial });
                checker.discoveries().keys().any(|name| name.starts_with("nothing"))
            });
            println!("{fault:?}: found by {found:?}");
            assert!(found.is_some(), "nothing goes wrong with {fault:?}");
        }
    }
}
