//! How a server gives a partition to another one.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_ownership::{Holding, Input, Message, Output, Stage};

use crate::member::{Giving, Member};
use crate::wire::{Answer, Ask, Handover};

/// Interval at which the hand-over is looked after.
const LOOK: Duration = Duration::from_millis(100);
/// A target that has let the partition rest must have copied the rest by then.
const REST_MAX: Duration = Duration::from_secs(2);
/// A target that copies asks several times in so long.
const SILENCE_MAX: Duration = Duration::from_secs(60);

const TAKEN_BACK: &str = "the hand-over was taken back";

impl Member {
    /// Gives a partition to another server, and waits until it has it.
    ///
    /// # Errors
    /// Why it has not. The partition is served here then, or its outcome will be known later.
    pub(crate) fn give(&self, partition: usize, to: u16) -> Result<(), String> {
        let own = self.life();
        let target = self.server_record(to).filter(|target| target.life() != own);
        let target = target.ok_or_else(|| format!("there is no other server {to}"))?;
        let handover = self.begin_giving(partition, own, target.life())?;
        let offered = self.prepare(partition, handover, &target);
        if let Err(why) = offered {
            self.cancel(handover, why.clone());
            return Err(why);
        }
        self.wait_for_end(partition, handover)
    }

    fn begin_giving(
        &self,
        partition: usize,
        from: aquifer_ownership::Life,
        to: aquifer_ownership::Life,
    ) -> Result<Handover, String> {
        let mut state = self.seats[partition].lock();
        if self.stops.load(Ordering::Acquire) {
            return Err("the server ends".to_owned());
        }
        if state.giving.is_some() || state.receiving.is_some() {
            return Err("it is moving already".to_owned());
        }
        let Holding::Owned { generation, stage: Stage::Settled } = state.holder.holding() else {
            return Err("it is not on this server".to_owned());
        };
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let handover = Handover { partition, generation: generation + 1, attempt, from, to };
        let mut outputs = Vec::new();
        state.holder.step(&Input::Connect(to), &mut outputs);
        debug_assert_eq!(outputs, [Output::Send(to, Message::Prepare(generation + 1))]);
        let heard = Instant::now();
        state.giving = Some(Giving { handover, offered: None, heard, rests: false, why: None });
        state.ended = None;
        Ok(handover)
    }

    /// Has the target be prepared, and writes the intent.
    fn prepare(
        &self,
        partition: usize,
        handover: Handover,
        target: &crate::records::ServerRecord,
    ) -> Result<(), String> {
        let items = &self.server().store().partitions()[partition];
        let offered = self.memories.offer(items, handover.to).map_err(|error| error.to_string())?;
        let offer = self.memories.describe(&offered, items, self.loads.rate(partition));
        match &mut self.seats[partition].lock().giving {
            Some(giving) if giving.handover == handover => giving.offered = Some(offered),
            _ => {
                self.memories.withdraw(&offered);
                return Err("the lease of this server has ended".to_owned());
            }
        }
        match self.channels.ask(target, &Ask::Prepare { handover, offer }) {
            Ok(Answer::Done) => {
                self.run(partition, Input::Message(handover.to, Message::Accept(handover.generation)));
                Ok(())
            }
            Ok(Answer::Declined(why)) => Err(why),
            Ok(_) => Err("the other server has answered something else".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Takes back a hand-over for which nothing was written yet.
    fn cancel(&self, handover: Handover, why: String) {
        let partition = handover.partition;
        {
            let mut state = self.seats[partition].lock();
            let giving = state.giving.take_if(|giving| giving.handover == handover);
            let Some(giving) = giving else { return };
            if let Some(offered) = &giving.offered {
                self.memories.withdraw(offered);
            }
            state.ended = Some(Err(why));
        }
        self.run(partition, Input::Abort);
    }

    fn wait_for_end(&self, partition: usize, handover: Handover) -> Result<(), String> {
        let seat = &self.seats[partition];
        let mut rests_since: Option<Instant> = None;
        loop {
            let mut state = seat.lock();
            let Some(giving) = &mut state.giving else {
                return state.ended.clone().unwrap_or_else(|| Err("its end is not known".to_owned()));
            };
            if giving.handover != handover {
                return Err("its end is not known".to_owned());
            }
            if giving.rests {
                rests_since.get_or_insert_with(Instant::now);
            }
            let is_late = rests_since.is_some_and(|since| since.elapsed() > REST_MAX);
            let is_silent = giving.heard.elapsed() > SILENCE_MAX;
            let is_alone = self.server_of(handover.to).is_none();
            let gives_up = giving.why.is_some();
            if (is_late || is_silent) && giving.why.is_none() {
                giving.why = Some("the other server has not copied it in time".to_owned());
            }
            if is_alone && giving.why.is_none() {
                giving.why = Some("the other server has ended".to_owned());
            }
            if is_late || is_silent || is_alone || gives_up {
                drop(state);
                // Nothing comes of it if the partition was given already: the tick finds out then.
                self.run(partition, Input::Abort);
                if !gives_up {
                    tracing::warn!(partition, to = handover.to.host, "a hand-over is taken back");
                }
                state = seat.lock();
                if state.giving.is_none() {
                    continue;
                }
            }
            seat.changed.wait_for(&mut state, LOOK);
        }
    }

    /// Answers a target that asks how far the runs in use go.
    pub(crate) fn extent(&self, handover: Handover) -> Answer {
        match &mut self.seats[handover.partition].lock().giving {
            Some(giving) if giving.handover == handover => {
                giving.heard = Instant::now();
                Answer::Extent(self.server().store().partitions()[handover.partition].runs_end())
            }
            _ => Answer::Declined(TAKEN_BACK.to_owned()),
        }
    }

    /// Lets a partition rest for a target that has copied it up to what is being written.
    pub(crate) fn rest(&self, handover: Handover) -> Answer {
        let partition = handover.partition;
        let mut state = self.seats[partition].lock();
        let stage = state.holder.holding();
        let Some(giving) = state.giving.as_mut().filter(|giving| giving.handover == handover) else {
            return Answer::Declined(TAKEN_BACK.to_owned());
        };
        giving.heard = Instant::now();
        match stage {
            Holding::Owned { stage: Stage::Ready(to), .. } if to == handover.to => {}
            Holding::Owned { stage: Stage::Preparing(_) | Stage::Intending(_), .. } => {
                return Answer::NotYet;
            }
            _ => return Answer::Declined(TAKEN_BACK.to_owned()),
        }
        if giving.rests || giving.why.is_some() {
            return Answer::Declined(TAKEN_BACK.to_owned());
        }
        giving.rests = true;
        // With the lock: a hand-over that is taken back must find the partition at rest.
        let server = self.server();
        let departure = server.store().leave(partition, server.now_s());
        self.seats[partition].changed.notify_all();
        Answer::Rests(departure)
    }

    /// Gives a partition to a target that has copied all.
    pub(crate) fn give_now(&self, handover: Handover) -> Answer {
        let mut state = self.seats[handover.partition].lock();
        let Some(giving) = state.giving.as_ref().filter(|giving| giving.handover == handover) else {
            return Answer::Declined(TAKEN_BACK.to_owned());
        };
        if !giving.rests || giving.why.is_some() || !self.serving_deadline.is_ahead() {
            return Answer::Declined(TAKEN_BACK.to_owned());
        }
        let mut outputs = Vec::new();
        state.holder.step(&Input::Transfer, &mut outputs);
        match outputs[..] {
            [Output::Send(to, Message::Transfer(generation))]
                if to == handover.to && generation == handover.generation =>
            {
                Answer::Given
            }
            _ => Answer::Declined(TAKEN_BACK.to_owned()),
        }
    }

    /// Notes that a target has the partition.
    pub(crate) fn note_received(&self, handover: Handover) -> Answer {
        let message = Message::Received(handover.generation);
        self.run(handover.partition, Input::Message(handover.to, message));
        Answer::Done
    }

    /// Notes that a target gives up.
    pub(crate) fn note_given_up(&self, handover: Handover, why: String) -> Answer {
        let seat = &self.seats[handover.partition];
        let is_its = {
            let mut state = seat.lock();
            match &mut state.giving {
                Some(giving) if giving.handover == handover => {
                    giving.why = Some(why);
                    true
                }
                _ => false,
            }
        };
        if is_its {
            // If it was given, the target has refused it.
            let message = Message::NotReceived(handover.generation);
            self.run(handover.partition, Input::Message(handover.to, message));
            self.run(handover.partition, Input::Abort);
            seat.changed.notify_all();
        }
        Answer::Done
    }
}
