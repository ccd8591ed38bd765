//! Hand-overs: the steps of `giving` and `receiving`.

use std::collections::{BTreeMap, VecDeque};

use aquifer_cache::store::presence::{Place, Presence};
use aquifer_cache_cluster::wire::Handover;
use aquifer_ownership::{Holding, Input, Life, Message, Output, Stage};

use crate::server::Server;
use crate::world::{Mutant, Packet, World};

/// A hand-over from a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Giving {
    pub handover: Handover,
    rests: bool,
    gives_up: bool,
}

/// A hand-over to a server, and what it has copied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Receiving {
    handover: Handover,
    items: BTreeMap<usize, u64>,
}

/// What servers ask each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ask {
    Prepare(Handover),
    Rest(Handover),
    Give(Handover),
    Received(Handover),
    GiveUp(Handover),
    Query(Handover),
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    Done,
    Declined,
    NotYet,
    Rests(BTreeMap<usize, u64>),
    Given,
    Received,
    NotReceived,
}

impl Server {
    fn giving_of(&mut self, handover: Handover) -> Option<&mut Giving> {
        self.givings[handover.partition].as_mut().filter(|giving| giving.handover == handover)
    }

    fn step(&mut self, partition: usize, input: &Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.holders[partition].step(input, &mut outputs);
        outputs
    }
}

impl World {
    fn ask(&mut self, at: usize, to: Life, ask: Ask) {
        let server = &mut self.servers[at];
        server.last_ask += 1;
        let (from, number) = (server.life, server.last_ask);
        server.asks.insert(number, ask.clone());
        self.packets.push(Packet::Ask { from, to, number, ask });
    }

    /// A server begins to give a partition to another one, if it is here and at rest.
    pub fn begin_giving(&mut self, at: usize, partition: usize, to: u16) {
        let forgets_attempts = self.is(Mutant::ForgetAttempts);
        let server = &mut self.servers[at];
        let target = server.known.get(&to).map(aquifer_cache_cluster::records::ServerRecord::life);
        let Some(to) = target.filter(|to| *to != server.life) else { return };
        let is_moving = server.givings[partition].is_some() || server.receivings[partition].is_some();
        let Holding::Owned { generation, stage: Stage::Settled } = server.holders[partition].holding() else {
            return;
        };
        if is_moving {
            return;
        }
        server.step(partition, &Input::Connect(to));
        self.attempts += 1;
        let attempt = if forgets_attempts { 0 } else { self.attempts };
        let handover = Handover { partition, generation: generation + 1, attempt, from: server.life, to };
        server.givings[partition] = Some(Giving { handover, rests: false, gives_up: false });
        self.ask(at, to, Ask::Prepare(handover));
    }

    /// What a server answers.
    pub fn answer(&mut self, at: usize, ask: Ask) -> Answer {
        match ask {
            Ask::Prepare(handover) => self.begin_receiving(at, handover),
            Ask::Rest(handover) => self.rest(at, handover),
            Ask::Give(handover) => self.give_now(at, handover),
            Ask::Received(handover) => {
                let message = Message::Received(handover.generation);
                self.run(at, handover.partition, Input::Message(handover.to, message));
                Answer::Done
            }
            Ask::GiveUp(handover) => {
                let Some(giving) = self.servers[at].giving_of(handover) else { return Answer::Done };
                giving.gives_up = true;
                let message = Message::NotReceived(handover.generation);
                self.run(at, handover.partition, Input::Message(handover.to, message));
                self.run(at, handover.partition, Input::Abort);
                Answer::Done
            }
            Ask::Query(handover) => {
                let message = Message::Query(handover.generation);
                let input = Input::Message(handover.from, message);
                match self.servers[at].step(handover.partition, &input)[..] {
                    [Output::Send(_, Message::Received(_))] => Answer::Received,
                    _ => Answer::NotReceived,
                }
            }
        }
    }

    fn begin_receiving(&mut self, at: usize, handover: Handover) -> Answer {
        let server = &mut self.servers[at];
        let partition = handover.partition;
        let is_moving = server.givings[partition].is_some() || server.receivings[partition].is_some();
        if is_moving || server.drains || !server.knows(handover.from) {
            return Answer::Declined;
        }
        let message = Message::Prepare(handover.generation);
        let outputs = server.step(partition, &Input::Message(handover.from, message));
        if outputs != [Output::Send(handover.from, Message::Accept(handover.generation))] {
            return Answer::Declined;
        }
        server.receivings[partition] = Some(Receiving { handover, items: BTreeMap::new() });
        self.ask(at, handover.from, Ask::Rest(handover));
        Answer::Done
    }

    fn rest(&mut self, at: usize, handover: Handover) -> Answer {
        let server = &mut self.servers[at];
        let holding = server.holders[handover.partition].holding();
        let Some(giving) = server.giving_of(handover) else { return Answer::Declined };
        match holding {
            Holding::Owned { stage: Stage::Ready(to), .. } if to == handover.to => {}
            Holding::Owned { stage: Stage::Preparing(_) | Stage::Intending(_), .. } => return Answer::NotYet,
            _ => return Answer::Declined,
        }
        if giving.rests || giving.gives_up {
            return Answer::Declined;
        }
        giving.rests = true;
        server.presences[handover.partition].set(Presence::Leaving);
        Answer::Rests(server.items[handover.partition].clone())
    }

    fn give_now(&mut self, at: usize, handover: Handover) -> Answer {
        let ignores_fence = self.is(Mutant::IgnoreFence);
        let server = &mut self.servers[at];
        let is_fenced = server.is_fenced && !ignores_fence;
        let Some(giving) = server.giving_of(handover) else { return Answer::Declined };
        if !giving.rests || giving.gives_up || is_fenced {
            return Answer::Declined;
        }
        let given = Output::Send(handover.to, Message::Transfer(handover.generation));
        if server.step(handover.partition, &Input::Transfer) == [given] {
            Answer::Given
        } else {
            Answer::Declined
        }
    }

    /// A server gets an answer, or none.
    pub fn answered(&mut self, at: usize, number: u64, answer: Option<Answer>) {
        let Some(ask) = self.servers[at].asks.remove(&number) else { return };
        match (ask, answer) {
            (Ask::Prepare(handover), Some(Answer::Done)) => {
                let message = Message::Accept(handover.generation);
                self.run(at, handover.partition, Input::Message(handover.to, message));
            }
            (Ask::Prepare(handover), _) => {
                let giving = &mut self.servers[at].givings[handover.partition];
                if giving.take_if(|giving| giving.handover == handover).is_some() {
                    self.run(at, handover.partition, Input::Abort);
                }
            }
            (Ask::Rest(handover), Some(Answer::Rests(items))) => {
                let receiving = &mut self.servers[at].receivings[handover.partition];
                if receiving.as_ref().is_some_and(|receiving| receiving.handover == handover) {
                    *receiving = Some(Receiving { handover, items });
                    self.ask(at, handover.from, Ask::Give(handover));
                }
            }
            (Ask::Rest(handover), Some(Answer::NotYet)) => {
                self.ask(at, handover.from, Ask::Rest(handover));
            }
            (Ask::Give(handover), Some(Answer::Given)) => self.own(at, handover),
            (Ask::Rest(handover), _) => self.give_up(at, handover),
            (Ask::Give(handover), _) => {
                // It may have been given, and the answer was lost.
                let message = Message::Query(handover.generation);
                self.servers[at].step(handover.partition, &Input::Message(handover.from, message));
                self.give_up(at, handover);
            }
            (Ask::Query(handover), Some(answer)) => {
                let generation = handover.generation;
                let message = match answer {
                    Answer::Received => Message::Received(generation),
                    Answer::NotReceived => Message::NotReceived(generation),
                    _ => return,
                };
                self.run(at, handover.partition, Input::Message(handover.to, message));
            }
            (Ask::Query(_) | Ask::Received(_) | Ask::GiveUp(_), _) => {}
        }
    }

    /// A target gives up what it has copied, and tells the source.
    fn give_up(&mut self, at: usize, handover: Handover) {
        let receiving = &mut self.servers[at].receivings[handover.partition];
        receiving.take_if(|receiving| receiving.handover == handover);
        self.ask(at, handover.from, Ask::GiveUp(handover));
    }

    /// A target serves a partition that it was given.
    fn own(&mut self, at: usize, handover: Handover) {
        let partition = handover.partition;
        let server = &mut self.servers[at];
        let message = Message::Transfer(handover.generation);
        let outputs = server.step(partition, &Input::Message(handover.from, message));
        let Some(receiving) = server.receivings[partition].take() else { return };
        if !server.holders[partition].has_access() {
            return;
        }
        server.items[partition] = receiving.items;
        server.presences[partition].set(Presence::Here);
        self.changes[partition] += 1;
        self.ask(at, handover.from, Ask::Received(handover));
        for output in outputs {
            if let Some(input) = self.carry_out(at, partition, output) {
                self.run(at, partition, input);
            }
        }
    }

    /// A server looks after a partition that is given, or whose owner is not known.
    pub fn look_after(&mut self, at: usize, partition: usize) {
        let is_late = !self.is_calm && self.random.one_in(4) || self.random.one_in(40);
        let is_silent = self.random.one_in(100);
        let (takes_given, server) = (self.mutant == Some(Mutant::TakeBackGiven), &mut self.servers[at]);
        let is_unsettled = match server.holders[partition].holding() {
            Holding::Absent | Holding::Prepared { .. } => false,
            Holding::Sent { .. } => true,
            Holding::Owned { stage, .. } => {
                matches!(stage, Stage::Unconfirmed | Stage::Unknown | Stage::Retracting)
            }
        };
        if let Some(giving) = server.givings[partition] {
            let is_alone = !server.knows(giving.handover.to);
            if giving.rests && is_late || is_silent || is_alone || giving.gives_up {
                server.givings[partition] = Some(Giving { gives_up: true, ..giving });
                if takes_given && giving.rests {
                    server.presences[partition].set(Presence::Here);
                }
                self.run(at, partition, Input::Abort);
            }
        }
        if is_unsettled && !self.servers[at].is_fenced {
            self.run(at, partition, Input::Tick);
        }
    }

    /// Handles an input, and all that follows from it.
    fn run(&mut self, at: usize, partition: usize, input: Input) {
        let mut inputs = VecDeque::from([input]);
        let mut has_observed = false;
        while let Some(input) = inputs.pop_front() {
            let mut outputs = self.servers[at].step(partition, &input);
            self.settle_giving(at, partition);
            outputs
                .retain(|output| *output != Output::Observe || !std::mem::replace(&mut has_observed, true));
            for output in outputs {
                inputs.extend(self.carry_out(at, partition, output));
            }
        }
    }

    fn carry_out(&mut self, at: usize, partition: usize, output: Output) -> Option<Input> {
        let server = &self.servers[at];
        match output {
            Output::Send(to, Message::Query(generation)) => {
                if server.knows(to) {
                    let handover = Handover { partition, generation, attempt: 0, from: server.life, to };
                    self.ask(at, to, Ask::Query(handover));
                }
                None
            }
            Output::Send(..) => None,
            Output::Write(change) => {
                let is_done = server.registry.carry_out(partition, &change).unwrap_or(false);
                Some(Input::Written(change, is_done))
            }
            Output::Observe => {
                let other = match server.holders[partition].holding() {
                    Holding::Sent { to, .. } => Some(to),
                    _ => None,
                };
                let (record, lives) = server.registry.observe(partition, other).ok()??;
                Some(Input::Observed(record, lives))
            }
        }
    }

    /// Ends a hand-over from a server whose outcome is known by now.
    fn settle_giving(&mut self, at: usize, partition: usize) {
        let server = &mut self.servers[at];
        let Some(Giving { handover, rests, .. }) = server.givings[partition] else { return };
        match server.holders[partition].holding() {
            Holding::Absent => {
                let place = Place { server: handover.to.host, generation: handover.generation };
                server.presences[partition].set(Presence::Elsewhere(place));
                server.items[partition].clear();
                self.totals.moves += 1;
            }
            Holding::Owned { generation, stage }
                if generation >= handover.generation || stage == Stage::Settled =>
            {
                if rests {
                    server.presences[partition].set(Presence::Here);
                }
                self.totals.taken_back += 1;
            }
            _ => return,
        }
        self.servers[at].givings[partition] = None;
    }
}
