//! Hand-overs: the steps of `handover_source` and `handover_target`.

use std::collections::{BTreeMap, VecDeque};

use aquifer_cache::store::presence::{Place, Presence};
use aquifer_cache_cluster::wire::Handover;
use aquifer_ownership::{Holding, Input, Life, Message, Output, Stage};

use crate::server::Server;
use crate::world::{Mutant, Packet, World};

/// A hand-over from a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutgoingHandover {
    pub handover: Handover,
    is_paused: bool,
    is_aborted: bool,
}

/// A hand-over to a server, and the copied items.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IncomingHandover {
    handover: Handover,
    items: BTreeMap<usize, u64>,
}

/// A request between servers.
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
    fn outgoing_of(&mut self, handover: Handover) -> Option<&mut OutgoingHandover> {
        self.outgoing[handover.partition].as_mut().filter(|outgoing| outgoing.handover == handover)
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

    /// Begins to hand a partition over to server `to`, if server `at` owns it and does not move it.
    pub fn begin_handover(&mut self, at: usize, partition: usize, to: u16) {
        let forgets_attempts = self.is(Mutant::ForgetAttempts);
        let server = &mut self.servers[at];
        let target = server.known.get(&to).map(aquifer_cache_cluster::records::ServerRecord::life);
        let Some(to) = target.filter(|to| *to != server.life) else { return };
        let is_moving = server.outgoing[partition].is_some() || server.incoming[partition].is_some();
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
        server.outgoing[partition] = Some(OutgoingHandover { handover, is_paused: false, is_aborted: false });
        self.ask(at, to, Ask::Prepare(handover));
    }

    /// Carries out a request at server `at`, and returns the answer.
    pub fn answer(&mut self, at: usize, ask: Ask) -> Answer {
        match ask {
            Ask::Prepare(handover) => self.accept_handover(at, handover),
            Ask::Rest(handover) => self.pause(at, handover),
            Ask::Give(handover) => self.transfer(at, handover),
            Ask::Received(handover) => {
                let message = Message::Received(handover.generation);
                self.run(at, handover.partition, Input::Message(handover.to, message));
                Answer::Done
            }
            Ask::GiveUp(handover) => {
                let Some(outgoing) = self.servers[at].outgoing_of(handover) else { return Answer::Done };
                outgoing.is_aborted = true;
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

    fn accept_handover(&mut self, at: usize, handover: Handover) -> Answer {
        let server = &mut self.servers[at];
        let partition = handover.partition;
        let is_moving = server.outgoing[partition].is_some() || server.incoming[partition].is_some();
        if is_moving || server.drains || !server.knows(handover.from) {
            return Answer::Declined;
        }
        let message = Message::Prepare(handover.generation);
        let outputs = server.step(partition, &Input::Message(handover.from, message));
        if outputs != [Output::Send(handover.from, Message::Accept(handover.generation))] {
            return Answer::Declined;
        }
        server.incoming[partition] = Some(IncomingHandover { handover, items: BTreeMap::new() });
        self.ask(at, handover.from, Ask::Rest(handover));
        Answer::Done
    }

    fn pause(&mut self, at: usize, handover: Handover) -> Answer {
        let server = &mut self.servers[at];
        let holding = server.holders[handover.partition].holding();
        let Some(outgoing) = server.outgoing_of(handover) else { return Answer::Declined };
        match holding {
            Holding::Owned { stage: Stage::Ready(to), .. } if to == handover.to => {}
            Holding::Owned { stage: Stage::Preparing(_) | Stage::Intending(_), .. } => return Answer::NotYet,
            _ => return Answer::Declined,
        }
        if outgoing.is_paused || outgoing.is_aborted {
            return Answer::Declined;
        }
        outgoing.is_paused = true;
        server.presences[handover.partition].set(Presence::Leaving);
        Answer::Rests(server.items[handover.partition].clone())
    }

    fn transfer(&mut self, at: usize, handover: Handover) -> Answer {
        let ignores_fence = self.is(Mutant::IgnoreFence);
        let server = &mut self.servers[at];
        let is_fenced = server.is_fenced && !ignores_fence;
        let Some(outgoing) = server.outgoing_of(handover) else { return Answer::Declined };
        if !outgoing.is_paused || outgoing.is_aborted || is_fenced {
            return Answer::Declined;
        }
        let given = Output::Send(handover.to, Message::Transfer(handover.generation));
        if server.step(handover.partition, &Input::Transfer) == [given] {
            Answer::Given
        } else {
            Answer::Declined
        }
    }

    /// Delivers an answer to a server; `None` if the request or the answer was lost.
    pub fn answered(&mut self, at: usize, number: u64, answer: Option<Answer>) {
        let Some(ask) = self.servers[at].asks.remove(&number) else { return };
        match (ask, answer) {
            (Ask::Prepare(handover), Some(Answer::Done)) => {
                let message = Message::Accept(handover.generation);
                self.run(at, handover.partition, Input::Message(handover.to, message));
            }
            (Ask::Prepare(handover), _) => {
                let outgoing = &mut self.servers[at].outgoing[handover.partition];
                if outgoing.take_if(|outgoing| outgoing.handover == handover).is_some() {
                    self.run(at, handover.partition, Input::Abort);
                }
            }
            (Ask::Rest(handover), Some(Answer::Rests(items))) => {
                let incoming = &mut self.servers[at].incoming[handover.partition];
                if incoming.as_ref().is_some_and(|incoming| incoming.handover == handover) {
                    *incoming = Some(IncomingHandover { handover, items });
                    self.ask(at, handover.from, Ask::Give(handover));
                }
            }
            (Ask::Rest(handover), Some(Answer::NotYet)) => {
                self.ask(at, handover.from, Ask::Rest(handover));
            }
            (Ask::Give(handover), Some(Answer::Given)) => self.begin_serving(at, handover),
            (Ask::Rest(handover), _) => self.abandon(at, handover),
            (Ask::Give(handover), _) => {
                // The partition may be the target's: the answer may have been lost.
                let message = Message::Query(handover.generation);
                self.servers[at].step(handover.partition, &Input::Message(handover.from, message));
                self.abandon(at, handover);
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

    /// Discards what a target has copied, and notifies the source.
    fn abandon(&mut self, at: usize, handover: Handover) {
        let incoming = &mut self.servers[at].incoming[handover.partition];
        incoming.take_if(|incoming| incoming.handover == handover);
        self.ask(at, handover.from, Ask::GiveUp(handover));
    }

    /// Serves a partition at a target to which it was transferred.
    fn begin_serving(&mut self, at: usize, handover: Handover) {
        let partition = handover.partition;
        let server = &mut self.servers[at];
        let message = Message::Transfer(handover.generation);
        let outputs = server.step(partition, &Input::Message(handover.from, message));
        let Some(incoming) = server.incoming[partition].take() else { return };
        if !server.holders[partition].has_access() {
            return;
        }
        server.items[partition] = incoming.items;
        server.presences[partition].set(Presence::Here);
        self.changes[partition] += 1;
        self.ask(at, handover.from, Ask::Received(handover));
        for output in outputs {
            if let Some(input) = self.carry_out(at, partition, output) {
                self.run(at, partition, input);
            }
        }
    }

    /// Checks a hand-over of a server for a timeout or a failed target, and resolves one with an
    /// unknown outcome.
    pub fn check_handover(&mut self, at: usize, partition: usize) {
        let is_pause_over = !self.is_calm && self.random.one_in(4) || self.random.one_in(40);
        let has_timed_out = self.random.one_in(100);
        let (retracts_transferred, server) =
            (self.mutant == Some(Mutant::RetractTransferred), &mut self.servers[at]);
        let is_unresolved = match server.holders[partition].holding() {
            Holding::Absent | Holding::Prepared { .. } => false,
            Holding::Sent { .. } => true,
            Holding::Owned { stage, .. } => {
                matches!(stage, Stage::Unconfirmed | Stage::Unknown | Stage::Retracting)
            }
        };
        if let Some(outgoing) = server.outgoing[partition] {
            let is_target_gone = !server.knows(outgoing.handover.to);
            let has_failed = outgoing.is_paused && is_pause_over || has_timed_out || is_target_gone;
            if has_failed || outgoing.is_aborted {
                server.outgoing[partition] = Some(OutgoingHandover { is_aborted: true, ..outgoing });
                if retracts_transferred && outgoing.is_paused {
                    server.presences[partition].set(Presence::Here);
                }
                self.run(at, partition, Input::Abort);
            }
        }
        if is_unresolved && !self.servers[at].is_fenced {
            self.run(at, partition, Input::Tick);
        }
    }

    /// Applies an input, carries its outputs out, and applies the inputs that these return.
    fn run(&mut self, at: usize, partition: usize, input: Input) {
        let mut inputs = VecDeque::from([input]);
        let mut has_observed = false;
        while let Some(input) = inputs.pop_front() {
            let mut outputs = self.servers[at].step(partition, &input);
            self.resolve_handover(at, partition);
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

    /// Ends a hand-over from a server if its outcome is known by now.
    fn resolve_handover(&mut self, at: usize, partition: usize) {
        let server = &mut self.servers[at];
        let Some(OutgoingHandover { handover, is_paused, .. }) = server.outgoing[partition] else { return };
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
                if is_paused {
                    server.presences[partition].set(Presence::Here);
                }
                self.totals.retracted += 1;
            }
            _ => return,
        }
        self.servers[at].outgoing[partition] = None;
    }
}
