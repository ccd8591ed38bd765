//! Exhaustive exploration of hand-overs: all orders of their steps, with agents that crash and
//! hosts that die.
//!
//! Each reachable state is visited once. In each, at most one host has access, and if no fault
//! follows, the segment gets exactly one owner, unless its last one has died.

use std::collections::{HashSet, VecDeque};

use aquifer_mutation::Mutations;
use aquifer_ownership::{
    Change, Evidence, Holder, Holding, Input, Life, Message, Mutation, Output, SegmentRecord, Stage,
};

/// Number of events of each kind that may still happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Budget {
    connects: u8,
    aborts: u8,
    ticks: u8,
    crashes: u8,
    deaths: u8,
    restores: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Host {
    /// The journaled holder.
    holder: Holder,
    is_alive: bool,
    /// Whether the agent runs. The program continues without it.
    is_running: bool,
    /// Outputs that the agent has not carried out yet; lost in a crash.
    outbox: Vec<Output>,
}

/// A message, transaction or answer in flight.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Parcel {
    Message {
        from: u8,
        to: u8,
        message: Message,
    },
    /// A transaction, and whether its author waits for the answer.
    Write {
        by: u8,
        change: Change,
        is_awaited: bool,
    },
    /// An answer.
    Written {
        to: u8,
        change: Change,
        is_done: bool,
    },
    /// A read of the record.
    Observe {
        by: u8,
    },
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    hosts: Vec<Host>,
    record: SegmentRecord,
    /// Sorted, so that equal states compare equal.
    parcels: Vec<Parcel>,
    budget: Budget,
    /// The host that had access last.
    last: u8,
    /// The host that restores the segment, and the evidence that it has collected.
    restoring: Option<(u8, Evidence)>,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Connect(u8, u8),
    Abort(u8),
    Transfer(u8),
    Tick(u8),
    Crash(u8),
    Restart(u8),
    Die(u8),
    /// The agent carries out the first of its outputs.
    Post(u8),
    Deliver(usize),
    /// A host begins to restore the segment: it asks the target of the intent.
    Fence(u8),
    /// The restoring host becomes the owner if the segment is lost.
    Restore,
}

const fn life(host: u8) -> Life {
    Life { host: host as u16 + 1, epoch: 1 }
}

fn host_of(life: Life) -> u8 {
    u8::try_from(life.host - 1).unwrap()
}

impl World {
    fn new(hosts: u8, budget: Budget) -> Self {
        let holder = |host| if host == 0 { Holder::owner(life(0), 0) } else { Holder::absent(life(host)) };
        let host = |host| Host { holder: holder(host), is_alive: true, is_running: true, outbox: Vec::new() };
        let record = SegmentRecord::new(life(0), 0);
        Self {
            hosts: (0..hosts).map(host).collect(),
            record,
            parcels: Vec::new(),
            budget,
            last: 0,
            restoring: None,
        }
    }

    fn numbers(&self) -> std::ops::Range<u8> {
        0..u8::try_from(self.hosts.len()).unwrap()
    }

    /// The hosts whose programs may use the segment now.
    fn accessors(&self) -> Vec<u8> {
        let has_access = |host: &u8| {
            let host = &self.hosts[usize::from(*host)];
            host.is_alive && host.holder.has_access()
        };
        self.numbers().filter(has_access).collect()
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions: Vec<Action> = (0..self.parcels.len()).map(Action::Deliver).collect();
        let Budget { connects, aborts, ticks, crashes, deaths, restores } = self.budget;
        let alive = self.hosts.iter().filter(|host| host.is_alive).count();
        if self.restoring.is_some() {
            actions.push(Action::Restore);
        }
        for number in self.numbers() {
            let host = &self.hosts[usize::from(number)];
            if !host.is_alive {
                continue;
            }
            if restores > 0 && host.is_running && self.restoring.is_none() && !self.lives(self.record.owner) {
                actions.push(Action::Fence(number));
            }
            if deaths > 0 && alive > 1 {
                actions.push(Action::Die(number));
            }
            if !host.is_running {
                actions.push(Action::Restart(number));
                continue;
            }
            if !host.outbox.is_empty() {
                actions.push(Action::Post(number));
            }
            if crashes > 0 {
                actions.push(Action::Crash(number));
            }
            if ticks > 0 && host.outbox.is_empty() {
                actions.push(Action::Tick(number));
            }
            match host.holder.holding() {
                Holding::Owned { stage: Stage::Settled, .. } if connects > 0 => {
                    let targets = self.numbers().filter(|to| *to != number);
                    actions.extend(targets.map(|to| Action::Connect(number, to)));
                }
                Holding::Owned { stage: Stage::Ready(_), .. } => {
                    actions.push(Action::Transfer(number));
                    if aborts > 0 {
                        actions.push(Action::Abort(number));
                    }
                }
                _ => {}
            }
        }
        actions
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Connect(host, to) => {
                self.budget.connects -= 1;
                self.step(host, &Input::Connect(life(to)));
            }
            Action::Abort(host) => {
                self.budget.aborts -= 1;
                self.step(host, &Input::Abort);
            }
            Action::Transfer(host) => self.step(host, &Input::Transfer),
            Action::Tick(host) => {
                self.budget.ticks = self.budget.ticks.saturating_sub(1);
                self.step(host, &Input::Tick);
            }
            Action::Crash(number) => {
                self.budget.crashes -= 1;
                let host = &mut self.hosts[usize::from(number)];
                host.is_running = false;
                host.outbox.clear();
                self.restoring.take_if(|(by, _)| *by == number);
                let host = &self.hosts[usize::from(number)];
                let is_absent = host.holder.holding() == Holding::Absent;
                self.forget_answers(number);
                if is_absent {
                    self.forget_decisions(number);
                }
            }
            Action::Restart(host) => {
                self.hosts[usize::from(host)].is_running = true;
                self.step(host, &Input::Restarted);
            }
            Action::Die(number) => {
                self.budget.deaths -= 1;
                let host = &mut self.hosts[usize::from(number)];
                (host.is_alive, host.is_running) = (false, false);
                host.outbox.clear();
                host.holder = Holder::absent(life(number));
                self.restoring.take_if(|(by, _)| *by == number);
                self.forget_answers(number);
            }
            Action::Post(number) => {
                let output = self.hosts[usize::from(number)].outbox.remove(0);
                let parcel = match output {
                    Output::Send(to, message) => Parcel::Message { from: number, to: host_of(to), message },
                    Output::Write(change) => Parcel::Write { by: number, change, is_awaited: true },
                    Output::Observe => Parcel::Observe { by: number },
                };
                self.add(parcel);
            }
            Action::Deliver(at) => self.deliver(at),
            Action::Fence(host) => self.fence(host),
            Action::Restore => self.restore(),
        }
        if let [accessor] = self.accessors()[..] {
            self.last = accessor;
        }
    }

    fn lives(&self, life: Life) -> bool {
        self.hosts[usize::from(host_of(life))].is_alive
    }

    /// Sends a query to the target of the intent in the name of the dead source.
    fn fence(&mut self, by: u8) {
        self.budget.restores -= 1;
        let record = &self.record;
        let mut evidence = Evidence::default();
        if let Some(to) = record.intent.filter(|to| self.hosts[usize::from(host_of(*to))].is_running) {
            let number = record.generation + 1;
            let host = &mut self.hosts[usize::from(host_of(to))];
            let mut answers = Vec::new();
            host.holder.step(&Input::Message(record.owner, Message::Query(number)), &mut answers);
            let refusal = Output::Send(record.owner, Message::NotReceived(number));
            evidence.refused = answers.contains(&refusal).then_some((to, number));
        }
        self.restoring = Some((by, evidence));
    }

    /// Ends the restoration. The record may have changed since it began.
    fn restore(&mut self) {
        let Some((by, evidence)) = self.restoring.take() else { return };
        if !self.record.is_lost(evidence, |life| self.lives(life)) {
            return;
        }
        let generation = self.record.generation + 1;
        self.record = SegmentRecord::new(life(by), generation);
        self.hosts[usize::from(by)].holder = Holder::owner(life(by), generation);
    }

    /// Drops the answers to a crashed process. A transaction in flight may still be carried out.
    fn forget_answers(&mut self, host: u8) {
        self.parcels.retain(|parcel| match parcel {
            Parcel::Written { to, .. } => *to != host,
            Parcel::Observe { by } => *by != host,
            _ => true,
        });
        for parcel in &mut self.parcels {
            if let Parcel::Write { by, is_awaited, .. } = parcel
                && *by == host
            {
                *is_awaited = false;
            }
        }
        self.parcels.sort_unstable();
    }

    /// Drops the decisions of an agent that holds nothing: they are journaled in the memory of the
    /// segment. Messages in flight to the agent are lost with their connections.
    fn forget_decisions(&mut self, host: u8) {
        self.hosts[usize::from(host)].holder = Holder::absent(life(host));
        self.parcels.retain(|parcel| !matches!(parcel, Parcel::Message { to, .. } if *to == host));
    }

    fn add(&mut self, parcel: Parcel) {
        let at = self.parcels.partition_point(|other| *other < parcel);
        self.parcels.insert(at, parcel);
    }

    fn deliver(&mut self, at: usize) {
        let parcel = self.parcels.remove(at);
        let alive: Vec<bool> = self.hosts.iter().map(|host| host.is_alive).collect();
        let lives = |life: Life| alive[usize::from(host_of(life))];
        match parcel {
            // A message to an agent that does not run is lost with the connection.
            Parcel::Message { from, to, message } => {
                self.step(to, &Input::Message(life(from), message));
            }
            Parcel::Write { by, change, is_awaited } => {
                let is_done = self.record.apply(&change, lives);
                if is_awaited {
                    self.add(Parcel::Written { to: by, change, is_done });
                }
            }
            Parcel::Written { to, change, is_done } => self.step(to, &Input::Written(change, is_done)),
            Parcel::Observe { by } => {
                let lives = match self.hosts[usize::from(by)].holder.holding() {
                    Holding::Sent { to, .. } => lives(to),
                    _ => true,
                };
                self.step(by, &Input::Observed(self.record.clone(), lives));
            }
        }
    }

    fn step(&mut self, number: u8, input: &Input) {
        let host = &mut self.hosts[usize::from(number)];
        if host.is_alive && host.is_running {
            host.holder.step(input, &mut host.outbox);
        }
    }

    /// Runs without further faults until nothing is in flight. Returns false if that takes too many
    /// steps.
    fn run_to_idle(&mut self) -> bool {
        for _ in 0..8 {
            for number in self.numbers() {
                if !self.hosts[usize::from(number)].is_running {
                    self.hosts[usize::from(number)].is_running = self.hosts[usize::from(number)].is_alive;
                    self.step(number, &Input::Restarted);
                }
            }
            for step in 0.. {
                if step > STEPS_MAX {
                    return false;
                }
                let posts = self.numbers().find(|host| !self.hosts[usize::from(*host)].outbox.is_empty());
                match posts {
                    Some(host) => self.perform(Action::Post(host)),
                    None if !self.parcels.is_empty() => self.perform(Action::Deliver(0)),
                    None => break,
                }
            }
            self.numbers().for_each(|number| self.step(number, &Input::Tick));
        }
        true
    }
}

/// Steps after which agents are taken to answer each other for ever.
const STEPS_MAX: u32 = 200;

/// Explores all states; returns their number, and the first violation.
fn explore(hosts: u8, budget: Budget) -> (usize, Option<String>) {
    let first = World::new(hosts, budget);
    let (mut seen, mut waiting) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    while let Some(world) = waiting.pop_front() {
        if let Some(fault) = fault_of(&world) {
            return (seen.len(), Some(format!("{fault}: {world:#?}")));
        }
        for action in world.actions() {
            let mut next = world.clone();
            next.perform(action);
            if !seen.contains(&next) {
                seen.insert(next.clone());
                waiting.push_back(next);
            }
        }
    }
    (seen.len(), None)
}

fn fault_of(world: &World) -> Option<String> {
    if world.accessors().len() > 1 {
        return Some("several owners".into());
    }
    let mut idle = world.clone();
    if !idle.run_to_idle() {
        return Some(format!("not idle after {STEPS_MAX} steps: {idle:#?}"));
    }
    let accessors = idle.accessors();
    let may_be_lost = !idle.hosts[usize::from(world.last)].is_alive;
    match accessors[..] {
        [] if may_be_lost => None,
        [] => Some(format!("no owner after {idle:#?}")),
        [owner] => {
            // The directory knows the owner, and the next hand-over can begin.
            let is_settled = matches!(
                idle.hosts[usize::from(owner)].holder.holding(),
                Holding::Owned { stage: Stage::Settled | Stage::Ready(_), .. }
            );
            let is_known = idle.record.owner == life(owner);
            (!is_settled || !is_known).then(|| format!("the owner is not settled after {idle:#?}"))
        }
        _ => Some("several owners later".into()),
    }
}

const NOTHING: Budget = Budget { connects: 0, aborts: 0, ticks: 0, crashes: 0, deaths: 0, restores: 0 };

/// Numbers of hosts and budgets that the test explores.
const CASES: [(u8, Budget); 7] = [
    (2, Budget { connects: 3, aborts: 1, ticks: 2, ..NOTHING }),
    (2, Budget { connects: 2, ticks: 1, crashes: 2, ..NOTHING }),
    (2, Budget { connects: 2, aborts: 1, ticks: 1, crashes: 1, deaths: 1, restores: 0 }),
    (3, Budget { connects: 2, aborts: 1, ticks: 1, crashes: 1, ..NOTHING }),
    (3, Budget { connects: 2, ticks: 1, crashes: 0, deaths: 1, ..NOTHING }),
    (3, Budget { connects: 2, crashes: 1, deaths: 1, restores: 1, ..NOTHING }),
    (3, Budget { connects: 2, deaths: 2, restores: 2, ..NOTHING }),
];

fn explore_all(cases: &[(u8, Budget)]) {
    for &(hosts, budget) in cases {
        let (states, fault) = explore(hosts, budget);
        println!("{hosts} hosts, {budget:?}: {states} states");
        assert!(fault.is_none(), "{}", fault.unwrap_or_default());
        assert!(states > 1000, "only {states} states were explored");
    }
}

#[test]
fn a_segment_has_one_owner_in_all_states() {
    explore_all(&CASES);
}

mod long {
    use super::*;

    #[test]
    fn a_segment_has_one_owner_in_all_states() {
        explore_all(&[
            (2, Budget { connects: 4, aborts: 1, ticks: 2, ..NOTHING }),
            (2, Budget { connects: 3, aborts: 1, ticks: 1, crashes: 2, ..NOTHING }),
            (2, Budget { connects: 3, aborts: 1, ticks: 1, crashes: 1, deaths: 1, restores: 0 }),
            (3, Budget { connects: 2, aborts: 1, ticks: 1, crashes: 1, deaths: 1, restores: 0 }),
            (3, Budget { connects: 2, ticks: 1, crashes: 2, ..NOTHING }),
            (3, Budget { connects: 3, aborts: 1, ticks: 1, deaths: 1, ..NOTHING }),
            (3, Budget { connects: 2, ticks: 1, crashes: 1, deaths: 2, restores: 2, ..NOTHING }),
        ]);
    }
}

/// All mutations of the crate.
const MUTATIONS: [Mutation; 9] = [
    Mutation::AcceptUnprepared,
    Mutation::ForgetRefusal,
    Mutation::RetakeUnfenced,
    Mutation::KeepSent,
    Mutation::NeverConfirm,
    Mutation::ForgetSent,
    Mutation::ReplaceIntent,
    Mutation::RetractAny,
    Mutation::RestoreUnfenced,
];

#[test]
fn the_model_notices_each_mutation() {
    for mutation in MUTATIONS {
        let found = mutation.while_active(|| {
            CASES.iter().find_map(|(hosts, budget)| explore(*hosts, *budget).1.map(|_| (hosts, budget)))
        });
        println!("{mutation:?}: {found:?}");
        assert!(found.is_some(), "{mutation:?} is not noticed");
    }
}
