//! The state of a segment or partition at one host: a state machine.
//!
//! For segments it is journaled before its outputs are carried out, so that it survives restarts of
//! the agent.

use serde::{Deserialize, Serialize};

use crate::Mutation;
use crate::{Change, Life, Retraction, SegmentRecord};

/// The state of one segment at one life.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Holder {
    own: Life,
    holding: Holding,
    /// Every hand-over up to this number is decided here: received, or refused for ever.
    decided: u64,
    /// Number of the last hand-over that was received here.
    received: u64,
}

/// How a life holds a segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Holding {
    /// The life does not have the segment.
    Absent,
    /// The life becomes the owner when the source's [`Message::Transfer`] arrives.
    Prepared {
        /// The source.
        from: Life,
        /// The number of the hand-over.
        generation: u64,
    },
    /// The life owns the segment, which may be used.
    Owned {
        /// The greatest number of a hand-over that is known to be used.
        generation: u64,
        /// Progress of the hand-over, or of the owner's confirmation.
        stage: Stage,
    },
    /// The life has sent [`Message::Transfer`], and does not know whether it has arrived.
    Sent {
        /// The target.
        to: Life,
        /// The number of the hand-over.
        generation: u64,
    },
}

/// The operation that an owner has under way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Stage {
    /// Confirmation: the record in the directory does not name the owner yet.
    Unconfirmed,
    /// No operation: the record names the owner and has no intent.
    Settled,
    /// Waiting for the target's answer to [`Message::Prepare`].
    Preparing(Life),
    /// Writing the intent to the directory.
    Intending(Life),
    /// Ready: one [`Message::Transfer`] hands the segment over.
    Ready(Life),
    /// Retracting the intent in the directory.
    Retracting,
    /// Reading the record, because it is unknown whether it has an intent.
    Unknown,
}

/// An event that a holder handles.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Input {
    /// The user of the segment wants to hand it over to this life.
    Connect(Life),
    /// The user hands the segment over, and has no access any more.
    Transfer,
    /// The user cancels the hand-over.
    Abort,
    /// A message of another life has arrived.
    Message(Life, Message),
    /// A transaction has ended: whether it was carried out.
    Written(Change, bool),
    /// The directory's answer to [`Output::Observe`]: the record, and whether the target of the
    /// sent hand-over lives.
    Observed(SegmentRecord, bool),
    /// A new process of the agent has read the journal.
    Restarted,
    /// Some time has passed.
    Tick,
}

/// A message between the source and the target of a hand-over, with its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Message {
    /// Source to target: prepare to receive the segment.
    Prepare(u64),
    /// Target to source: the target is prepared.
    Accept(u64),
    /// Target to source: the target is not prepared.
    Decline(u64),
    /// Source to target: the target owns the segment.
    Transfer(u64),
    /// Target to source: the target has received the segment.
    Received(u64),
    /// Source to target: answer whether [`Message::Transfer`] has arrived, and refuse it if not.
    Query(u64),
    /// Target to source: the transfer has not arrived, and the target refuses it from now on.
    NotReceived(u64),
}

/// An action that the caller carries out for a holder.
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

    /// The owner of a new or claimed segment, whose record was written with this generation.
    #[must_use]
    pub const fn owner(own: Life, generation: u64) -> Self {
        let holding = Holding::Owned { generation, stage: Stage::Settled };
        Self { holding, decided: generation, ..Self::absent(own) }
    }

    /// Returns the holder after the segment was deallocated: absent, with the same decisions about
    /// hand-overs. `None` if the segment is not owned here, or if an operation is under way.
    #[must_use]
    pub fn deallocated(&self) -> Option<Self> {
        let Holding::Owned { stage: Stage::Settled, .. } = self.holding else { return None };
        Some(Self { holding: Holding::Absent, ..self.clone() })
    }

    /// The life that this holder belongs to.
    #[must_use]
    pub const fn own(&self) -> Life {
        self.own
    }

    /// How the segment is held.
    #[must_use]
    pub const fn holding(&self) -> Holding {
        self.holding
    }

    /// Whether the segment may be used here, as long as the lease lasts.
    #[must_use]
    pub fn has_access(&self) -> bool {
        let keeps = Mutation::KeepSent.is_active() && matches!(self.holding, Holding::Sent { .. });
        matches!(self.holding, Holding::Owned { .. }) || keeps
    }

    /// Handles an input, and appends the actions to carry out to `out`.
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

    /// Step 1: ask the target to prepare.
    fn connect(&mut self, to: Life, out: &mut Vec<Output>) {
        if let Holding::Owned { generation, stage: Stage::Settled } = self.holding {
            self.set_stage(generation, Stage::Preparing(to));
            out.push(Output::Send(to, Message::Prepare(generation + 1)));
        }
    }

    /// Step 5: send the transfer.
    fn transfer(&mut self, out: &mut Vec<Output>) {
        if let Holding::Owned { generation, stage: Stage::Ready(to) } = self.holding {
            let generation = generation + 1;
            self.holding = Holding::Sent { to, generation };
            out.push(Output::Send(to, Message::Transfer(generation)));
        }
    }

    fn abort(&mut self, out: &mut Vec<Output>) {
        match self.holding {
            // The target may become prepared, which has no effect without an intent.
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
                // If the target received the segment and no longer knows it, it has confirmed it
                // before. Then this transaction fails.
                let because = Retraction::Refused;
                out.push(Output::Write(Change::Retract { owner: self.own, generation, because }));
            }
            _ => {}
        }
    }

    /// Step 2: the target accepts or declines.
    fn prepare(&mut self, from: Life, generation: u64, out: &mut Vec<Output>) {
        let is_free = matches!(self.holding, Holding::Absent | Holding::Prepared { .. });
        if is_free && generation > self.decided {
            self.holding = Holding::Prepared { from, generation };
            out.push(Output::Send(from, Message::Accept(generation)));
        } else {
            out.push(Output::Send(from, Message::Decline(generation)));
        }
    }

    /// Step 6: the target owns the segment if it is prepared.
    fn transferred(&mut self, from: Life, generation: u64, out: &mut Vec<Output>) {
        let is_prepared = self.holding == Holding::Prepared { from, generation };
        let accepts_unprepared = Mutation::AcceptUnprepared.is_active() && self.holding == Holding::Absent;
        if !is_prepared && !accepts_unprepared {
            return self.query(from, generation, out);
        }
        (self.decided, self.received) = (generation, generation);
        self.holding = Holding::Owned { generation, stage: Stage::Unconfirmed };
        out.push(Output::Send(from, Message::Received(generation)));
        self.confirm(generation, out);
    }

    /// Step 7: the new owner confirms in the directory.
    fn confirm(&self, generation: u64, out: &mut Vec<Output>) {
        if !Mutation::NeverConfirm.is_active() {
            out.push(Output::Write(Change::Confirm { to: self.own, generation }));
        }
    }

    /// Answers whether a hand-over was received, and refuses it for ever if not.
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
                    self.read_record(generation, out);
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
                    self.read_record(generation, out);
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
                    // The intent was retracted, and the answer was lost.
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
            // Hand-overs that an earlier process of the agent has begun are retracted.
            Holding::Owned { generation, .. } => self.read_record(generation, out),
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

    /// Retracts the intent of the next hand-over.
    fn retract(&mut self, generation: u64, out: &mut Vec<Output>) {
        self.set_stage(generation, Stage::Retracting);
        let (owner, generation, because) = (self.own, generation + 1, Retraction::Refused);
        out.push(Output::Write(Change::Retract { owner, generation, because }));
    }

    fn read_record(&mut self, generation: u64, out: &mut Vec<Output>) {
        self.set_stage(generation, Stage::Unknown);
        out.push(Output::Observe);
    }

    fn set_stage(&mut self, generation: u64, stage: Stage) {
        self.holding = Holding::Owned { generation, stage };
    }
}
