//! What an agent knows of a segment: a state machine, which is journaled before its outputs are
//! carried out.

use serde::{Deserialize, Serialize};

use crate::Mutation;
use crate::{Change, Life, Retraction, SegmentRecord};

/// A segment at one agent.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Holder {
    own: Life,
    holding: Holding,
    /// Hand-overs up to this number were received here, or will never be.
    decided: u64,
    /// The last hand-over that was received here.
    received: u64,
}

/// How an agent holds a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Holding {
    /// Not at all.
    Absent,
    /// It will own the segment when the source's message arrives.
    Prepared {
        /// The source.
        from: Life,
        /// The number of the hand-over.
        generation: u64,
    },
    /// It owns the segment: its program may read and write.
    Owned {
        /// The last number that is known to be used.
        generation: u64,
        /// What is being done about it.
        stage: Stage,
    },
    /// It has sent the segment away. Whether the message has arrived is unknown.
    Sent {
        /// The target.
        to: Life,
        /// The number of the hand-over.
        generation: u64,
    },
}

/// What an owner does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Stage {
    /// The directory does not know the owner yet.
    Unconfirmed,
    /// Nothing.
    Settled,
    /// It asks the target whether it is prepared.
    Preparing(Life),
    /// It writes its intent.
    Intending(Life),
    /// The segment can be handed over by one message.
    Ready(Life),
    /// It takes its intent back.
    Retracting,
    /// The directory must be asked whether there is an intent.
    Unknown,
}

/// What happens to a holder.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Input {
    /// The program wants to hand the segment over to a process on this host.
    Connect(Life),
    /// The program hands it over. It has no access any more.
    Transfer,
    /// The program does not want to hand it over.
    Abort,
    /// A message of another agent.
    Message(Life, Message),
    /// A transaction has ended: whether it was carried out.
    Written(Change, bool),
    /// The directory's answer to [`Output::Observe`]: the record, and whether the lease lasts of
    /// the agent to which the segment was sent.
    Observed(SegmentRecord, bool),
    /// The agent has a new process, which has found the journal.
    Restarted,
    /// Nothing has happened for some time.
    Tick,
}

/// Messages between agents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Message {
    /// To the target: be prepared.
    Prepare(u64),
    /// To the source: the target is prepared.
    Accept(u64),
    /// To the source: the target is not prepared.
    Decline(u64),
    /// To the target: it owns the segment.
    Transfer(u64),
    /// To the source: the target owns the segment.
    Received(u64),
    /// To the target: answer whether [`Message::Transfer`] has arrived, and refuse it if not.
    Query(u64),
    /// To the source: it has not arrived, and is refused from now on.
    NotReceived(u64),
}

/// What a holder has done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Output {
    /// Send a message.
    Send(Life, Message),
    /// Carry out a transaction.
    Write(Change),
    /// Read the record.
    Observe,
}

impl Holder {
    /// A holder without a segment.
    #[must_use]
    pub const fn absent(own: Life) -> Self {
        Self { own, holding: Holding::Absent, decided: 0, received: 0 }
    }

    /// The owner of a new segment, whose record was written with this generation.
    #[must_use]
    pub const fn owner(own: Life, generation: u64) -> Self {
        let holding = Holding::Owned { generation, stage: Stage::Settled };
        Self { holding, decided: generation, ..Self::absent(own) }
    }

    /// The holder after the segment was deallocated: it is not here, and nothing of what has
    /// happened to it is forgotten. `None` if it is being handed over, or owned elsewhere.
    #[must_use]
    pub fn deallocated(&self) -> Option<Self> {
        let Holding::Owned { stage: Stage::Settled, .. } = self.holding else { return None };
        Some(Self { holding: Holding::Absent, ..self.clone() })
    }

    /// The agent that this is.
    #[must_use]
    pub const fn own(&self) -> Life {
        self.own
    }

    /// How the segment is held.
    #[must_use]
    pub const fn holding(&self) -> Holding {
        self.holding
    }

    /// Whether the program may read and write the segment, as long as the lease lasts.
    #[must_use]
    pub fn has_access(&self) -> bool {
        let keeps = Mutation::KeepSent.is_active() && matches!(self.holding, Holding::Sent { .. });
        matches!(self.holding, Holding::Owned { .. }) || keeps
    }

    /// Handles an input, and appends what is to be done.
    pub fn step(&mut self, input: &Input, out: &mut Vec<Output>) {
        match input {
            Input::Connect(to) => self.connect(*to, out),
            Input::Transfer => self.transfer(out),
            Input::Abort => self.abort(out),
            Input::Message(from, message) => self.receive(*from, *message, out),
            Input::Written(change, is_done) => self.written(*change, *is_done, out),
            Input::Observed(record, lives) => self.observed(record, *lives, out),
            Input::Restarted => self.restarted(out),
            Input::Tick => self.tick(out),
        }
    }

    /// Step 1.
    fn connect(&mut self, to: Life, out: &mut Vec<Output>) {
        if let Holding::Owned { generation, stage: Stage::Settled } = self.holding {
            self.set_stage(generation, Stage::Preparing(to));
            out.push(Output::Send(to, Message::Prepare(generation + 1)));
        }
    }

    /// Step 5.
    fn transfer(&mut self, out: &mut Vec<Output>) {
        if let Holding::Owned { generation, stage: Stage::Ready(to) } = self.holding {
            let generation = generation + 1;
            self.holding = Holding::Sent { to, generation };
            out.push(Output::Send(to, Message::Transfer(generation)));
        }
    }

    fn abort(&mut self, out: &mut Vec<Output>) {
        match self.holding {
            // If the target prepares itself, that means nothing without an intent.
            Holding::Owned { generation, stage: Stage::Preparing(_) } => {
                self.set_stage(generation, Stage::Settled);
            }
            Holding::Owned { generation, stage: Stage::Ready(_) } => self.retract(generation, out),
            _ => {}
        }
    }

    fn receive(&mut self, from: Life, message: Message, out: &mut Vec<Output>) {
        match (message, self.holding) {
            (Message::Prepare(generation), _) => self.prepare(from, generation, out),
            (Message::Accept(next), Holding::Owned { generation, stage: Stage::Preparing(to) })
                if to == from && next == generation + 1 =>
            {
                self.set_stage(generation, Stage::Intending(to));
                out.push(Output::Write(Change::Intend { owner: self.own, generation: next, to }));
            }
            (Message::Decline(next), Holding::Owned { generation, stage: Stage::Preparing(to) })
                if to == from && next == generation + 1 =>
            {
                self.set_stage(generation, Stage::Settled);
            }
            (Message::Transfer(generation), _) => self.transferred(from, generation, out),
            (Message::Query(generation), _) => self.query(from, generation, out),
            (Message::Received(received), Holding::Sent { to, generation })
                if to == from && received == generation =>
            {
                self.holding = Holding::Absent;
            }
            (Message::NotReceived(refused), Holding::Sent { to, generation })
                if to == from && refused == generation =>
            {
                // A target that had it, and has forgotten, has confirmed it: then this fails.
                let because = Retraction::Refused;
                out.push(Output::Write(Change::Retract { owner: self.own, generation, because }));
            }
            _ => {}
        }
    }

    /// Step 2.
    fn prepare(&mut self, from: Life, generation: u64, out: &mut Vec<Output>) {
        let is_free = matches!(self.holding, Holding::Absent | Holding::Prepared { .. });
        if is_free && generation > self.decided {
            self.holding = Holding::Prepared { from, generation };
            out.push(Output::Send(from, Message::Accept(generation)));
        } else {
            out.push(Output::Send(from, Message::Decline(generation)));
        }
    }

    /// Step 6.
    fn transferred(&mut self, from: Life, generation: u64, out: &mut Vec<Output>) {
        let is_prepared = self.holding == Holding::Prepared { from, generation };
        let is_trusting = Mutation::AcceptUnprepared.is_active() && self.holding == Holding::Absent;
        if !is_prepared && !is_trusting {
            return self.query(from, generation, out);
        }
        (self.decided, self.received) = (generation, generation);
        self.holding = Holding::Owned { generation, stage: Stage::Unconfirmed };
        out.push(Output::Send(from, Message::Received(generation)));
        self.confirm(generation, out);
    }

    /// Step 7.
    fn confirm(&self, generation: u64, out: &mut Vec<Output>) {
        if !Mutation::NeverConfirm.is_active() {
            out.push(Output::Write(Change::Confirm { to: self.own, generation }));
        }
    }

    /// Answers whether a hand-over was received. If not, it never will be.
    fn query(&mut self, from: Life, generation: u64, out: &mut Vec<Output>) {
        if generation <= self.received {
            return out.push(Output::Send(from, Message::Received(generation)));
        }
        if !Mutation::ForgetRefusal.is_active() {
            self.decided = self.decided.max(generation);
            if matches!(self.holding, Holding::Prepared { generation, .. } if generation <= self.decided) {
                self.holding = Holding::Absent;
            }
        }
        out.push(Output::Send(from, Message::NotReceived(generation)));
    }

    fn written(&mut self, change: Change, is_done: bool, out: &mut Vec<Output>) {
        match (change, self.holding) {
            (
                Change::Intend { generation: next, .. },
                Holding::Owned { generation, stage: Stage::Intending(to) },
            ) if next == generation + 1 => {
                if is_done {
                    self.set_stage(generation, Stage::Ready(to));
                } else {
                    self.find_out(generation, out);
                }
            }
            (
                Change::Confirm { generation: of, .. },
                Holding::Owned { generation, stage: Stage::Unconfirmed },
            ) if of == generation => {
                if is_done {
                    self.set_stage(generation, Stage::Settled);
                } else {
                    out.push(Output::Observe);
                }
            }
            (
                Change::Retract { generation: next, .. },
                Holding::Owned { generation, stage: Stage::Retracting },
            ) if next == generation + 1 => {
                if is_done {
                    self.set_stage(next, Stage::Settled);
                } else {
                    self.find_out(generation, out);
                }
            }
            (Change::Retract { generation: of, .. }, Holding::Sent { generation, .. })
                if of == generation =>
            {
                if is_done {
                    self.set_stage(generation, Stage::Settled);
                } else {
                    out.push(Output::Observe);
                }
            }
            _ => {}
        }
    }

    fn observed(&mut self, record: &SegmentRecord, lives: bool, out: &mut Vec<Output>) {
        let is_own = record.owner == self.own;
        match self.holding {
            Holding::Owned { stage: Stage::Unknown, .. } if is_own => match record.intent {
                Some(_) => self.retract(record.generation, out),
                None => self.set_stage(record.generation, Stage::Settled),
            },
            Holding::Owned { generation, stage: Stage::Unconfirmed } => {
                if is_own && record.generation == generation {
                    self.set_stage(generation, Stage::Settled);
                } else {
                    self.confirm(generation, out);
                }
            }
            Holding::Sent { to, generation } => {
                if !is_own {
                    self.holding = Holding::Absent;
                } else if record.generation >= generation {
                    // It was retracted, and the answer was lost.
                    self.set_stage(record.generation, Stage::Settled);
                } else if !lives || Mutation::RetakeUnfenced.is_active() {
                    let because = Retraction::Fenced;
                    out.push(Output::Write(Change::Retract { owner: self.own, generation, because }));
                } else {
                    out.push(Output::Send(to, Message::Query(generation)));
                }
            }
            _ => {}
        }
    }

    fn restarted(&mut self, out: &mut Vec<Output>) {
        match self.holding {
            Holding::Owned { generation, stage: Stage::Unconfirmed } => self.confirm(generation, out),
            Holding::Owned { stage: Stage::Settled, .. } => {}
            // The program that has begun a hand-over has not heard its end.
            Holding::Owned { generation, .. } => self.find_out(generation, out),
            Holding::Sent { generation, .. } if Mutation::ForgetSent.is_active() => {
                self.retract(generation - 1, out);
            }
            Holding::Sent { .. } => out.push(Output::Observe),
            Holding::Absent | Holding::Prepared { .. } => {}
        }
    }

    fn tick(&mut self, out: &mut Vec<Output>) {
        match self.holding {
            // The target does not answer.
            Holding::Owned { generation, stage: Stage::Preparing(_) } => {
                self.set_stage(generation, Stage::Settled);
            }
            Holding::Owned { stage: Stage::Unconfirmed | Stage::Unknown, .. } | Holding::Sent { .. } => {
                out.push(Output::Observe);
            }
            _ => {}
        }
    }

    /// Takes the intent of the next hand-over back. The program has access again.
    fn retract(&mut self, generation: u64, out: &mut Vec<Output>) {
        self.set_stage(generation, Stage::Retracting);
        let (owner, generation, because) = (self.own, generation + 1, Retraction::Refused);
        out.push(Output::Write(Change::Retract { owner, generation, because }));
    }

    fn find_out(&mut self, generation: u64, out: &mut Vec<Output>) {
        self.set_stage(generation, Stage::Unknown);
        out.push(Output::Observe);
    }

    fn set_stage(&mut self, generation: u64, stage: Stage) {
        self.holding = Holding::Owned { generation, stage };
    }
}
