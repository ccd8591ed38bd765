//! The source of a hand-over: this server hands a partition over to another one.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_ownership::{Holding, Input, Message, Output, Stage};

use crate::member::{Member, OutgoingHandover};
use crate::wire::{Answer, Ask, Handover};

/// Interval at which a hand-over is checked for a timeout or a failed target.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Time for which a partition may be paused until the target has copied it. Later, the hand-over is
/// aborted.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without a request of the target after which the hand-over is aborted. A target that copies
/// sends several requests in this time.
const TARGET_TIMEOUT: Duration = Duration::from_secs(60);

const ABORTED: &str = "the source has aborted the hand-over";
const UNKNOWN_OUTCOME: &str = "the outcome of the hand-over is not known yet";

impl Member {
    /// Hands a partition over to server `to`, and waits for the end of the hand-over.
    ///
    /// # Errors
    /// Why the partition was not handed over. This server then serves it, or the outcome is not
    /// known yet.
    pub(crate) fn run_handover(&self, partition: usize, to: u16) -> Result<(), String> {
        let own = self.life();
        let target = self.server_record(to).filter(|target| target.life() != own);
        let target = target.ok_or_else(|| format!("the cache has no other server {to}"))?;
        let handover = self.begin_handover(partition, own, target.life())?;
        let offered = self.prepare(partition, handover, &target);
        if let Err(reason) = offered {
            self.cancel(handover, reason.clone());
            return Err(reason);
        }
        self.wait_for_end(partition, handover)
    }

    fn begin_handover(
        &self,
        partition: usize,
        from: aquifer_ownership::Life,
        to: aquifer_ownership::Life,
    ) -> Result<Handover, String> {
        let mut state = self.slots[partition].lock();
        if self.stops.load(Ordering::Acquire) {
            return Err("the source is stopping".to_owned());
        }
        if state.outgoing.is_some() || state.incoming.is_some() {
            return Err("the partition is already moving".to_owned());
        }
        let Holding::Owned { generation, stage: Stage::Settled } = state.holder.holding() else {
            return Err("the source does not own the partition".to_owned());
        };
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let handover = Handover { partition, generation: generation + 1, attempt, from, to };
        let mut outputs = Vec::new();
        state.holder.step(&Input::Connect(to), &mut outputs);
        debug_assert_eq!(outputs, [Output::Send(to, Message::Prepare(generation + 1))]);
        state.outgoing = Some(OutgoingHandover {
            handover,
            offered: None,
            last_request: Instant::now(),
            is_paused: false,
            abort_reason: None,
        });
        state.outcome = None;
        Ok(handover)
    }

    /// Offers the partition's memory to the target, and writes the intent when it has accepted.
    fn prepare(
        &self,
        partition: usize,
        handover: Handover,
        target: &crate::records::ServerRecord,
    ) -> Result<(), String> {
        let items = &self.server().store().partitions()[partition];
        let offered = self.memories.offer(items, handover.to).map_err(|error| error.to_string())?;
        let offer = self.memories.describe(&offered, items, self.loads.rate(partition));
        match &mut self.slots[partition].lock().outgoing {
            Some(outgoing) if outgoing.handover == handover => outgoing.offered = Some(offered),
            _ => {
                self.memories.withdraw(&offered);
                return Err("the lease of the source has ended".to_owned());
            }
        }
        match self.channels.ask(target, &Ask::Prepare { handover, offer }) {
            Ok(Answer::Done) => {
                self.run(partition, Input::Message(handover.to, Message::Accept(handover.generation)));
                Ok(())
            }
            Ok(Answer::Declined(reason)) => Err(reason),
            Ok(other) => Err(format!("server {} answered {other:?} to prepare", handover.to.host)),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Cancels a hand-over whose intent was not written.
    fn cancel(&self, handover: Handover, reason: String) {
        let partition = handover.partition;
        {
            let mut state = self.slots[partition].lock();
            let outgoing = state.outgoing.take_if(|outgoing| outgoing.handover == handover);
            let Some(outgoing) = outgoing else { return };
            if let Some(offered) = &outgoing.offered {
                self.memories.withdraw(offered);
            }
            state.outcome = Some(Err(reason));
        }
        self.run(partition, Input::Abort);
    }

    fn wait_for_end(&self, partition: usize, handover: Handover) -> Result<(), String> {
        let slot = &self.slots[partition];
        let mut paused_since: Option<Instant> = None;
        loop {
            let mut state = slot.lock();
            let Some(outgoing) = &mut state.outgoing else {
                return state.outcome.clone().unwrap_or_else(|| Err(UNKNOWN_OUTCOME.to_owned()));
            };
            if outgoing.handover != handover {
                return Err(UNKNOWN_OUTCOME.to_owned());
            }
            if outgoing.is_paused {
                paused_since.get_or_insert_with(Instant::now);
            }
            let has_timed_out = paused_since.is_some_and(|since| since.elapsed() > PAUSE_TIMEOUT)
                || outgoing.last_request.elapsed() > TARGET_TIMEOUT;
            let is_target_gone = self.server_of(handover.to).is_none();
            let is_aborted = outgoing.abort_reason.is_some();
            if has_timed_out && !is_aborted {
                outgoing.abort_reason = Some("the target did not copy the partition in time".to_owned());
            } else if is_target_gone && !is_aborted {
                outgoing.abort_reason = Some("the target has ended".to_owned());
            }
            if has_timed_out || is_target_gone || is_aborted {
                drop(state);
                // Without effect if the target may own the partition already: `resolve_all` finds
                // the outcome.
                self.run(partition, Input::Abort);
                if !is_aborted {
                    tracing::warn!(partition, to = handover.to.host, "aborting a hand-over");
                }
                state = slot.lock();
                if state.outgoing.is_none() {
                    continue;
                }
            }
            slot.changed.wait_for(&mut state, CHECK_INTERVAL);
        }
    }

    /// Answers a target with the end of the runs in use.
    pub(crate) fn extent(&self, handover: Handover) -> Answer {
        match &mut self.slots[handover.partition].lock().outgoing {
            Some(outgoing) if outgoing.handover == handover => {
                outgoing.last_request = Instant::now();
                Answer::Extent(self.server().store().partitions()[handover.partition].runs_end())
            }
            _ => Answer::Declined(ABORTED.to_owned()),
        }
    }

    /// Pauses a partition for a target that has copied nearly all of it.
    pub(crate) fn pause(&self, handover: Handover) -> Answer {
        let partition = handover.partition;
        let mut state = self.slots[partition].lock();
        let stage = state.holder.holding();
        let Some(outgoing) = state.outgoing.as_mut().filter(|outgoing| outgoing.handover == handover) else {
            return Answer::Declined(ABORTED.to_owned());
        };
        outgoing.last_request = Instant::now();
        match stage {
            Holding::Owned { stage: Stage::Ready(to), .. } if to == handover.to => {}
            Holding::Owned { stage: Stage::Preparing(_) | Stage::Intending(_), .. } => {
                return Answer::NotYet;
            }
            _ => return Answer::Declined(ABORTED.to_owned()),
        }
        if outgoing.is_paused || outgoing.abort_reason.is_some() {
            return Answer::Declined(ABORTED.to_owned());
        }
        outgoing.is_paused = true;
        // With the slot locked: an abort must find the partition paused.
        let server = self.server();
        let departure = server.store().leave(partition, server.now_s());
        self.slots[partition].changed.notify_all();
        Answer::Rests(departure)
    }

    /// Transfers the ownership of a partition to a target that has copied all of it.
    pub(crate) fn transfer(&self, handover: Handover) -> Answer {
        let mut state = self.slots[handover.partition].lock();
        let Some(outgoing) = state.outgoing.as_ref().filter(|outgoing| outgoing.handover == handover) else {
            return Answer::Declined(ABORTED.to_owned());
        };
        if !outgoing.is_paused || outgoing.abort_reason.is_some() || !self.serving_deadline.is_ahead() {
            return Answer::Declined(ABORTED.to_owned());
        }
        let mut outputs = Vec::new();
        state.holder.step(&Input::Transfer, &mut outputs);
        match outputs[..] {
            [Output::Send(to, Message::Transfer(generation))]
                if to == handover.to && generation == handover.generation =>
            {
                Answer::Given
            }
            _ => Answer::Declined(ABORTED.to_owned()),
        }
    }

    /// Records that a target owns the partition.
    pub(crate) fn note_received(&self, handover: Handover) -> Answer {
        let message = Message::Received(handover.generation);
        self.run(handover.partition, Input::Message(handover.to, message));
        Answer::Done
    }

    /// Records that a target has aborted the hand-over.
    pub(crate) fn note_abort(&self, handover: Handover, reason: String) -> Answer {
        let slot = &self.slots[handover.partition];
        let is_current = {
            let mut state = slot.lock();
            match &mut state.outgoing {
                Some(outgoing) if outgoing.handover == handover => {
                    outgoing.abort_reason = Some(reason);
                    true
                }
                _ => false,
            }
        };
        if is_current {
            // If the partition was transferred, the target has refused it.
            let message = Message::NotReceived(handover.generation);
            self.run(handover.partition, Input::Message(handover.to, message));
            self.run(handover.partition, Input::Abort);
            slot.changed.notify_all();
        }
        Answer::Done
    }
}
