//! The target of a hand-over: this server copies a partition of another one, and becomes its owner.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_cache::store::layout::Layout;
use aquifer_cache::store::presence::Presence;
use aquifer_ownership::{Input, Message, Output};

use crate::copying::{Copy, CopyError, Piece, Source};
use crate::member::Member;
use crate::memories::RemoteMemory;
use crate::records::ServerRecord;
use crate::wire::{Answer, Ask, Handover, Offer};

/// A round that copied fewer bytes than this is the last one before the source pauses the
/// partition.
const LAST_ROUND_BYTES: u64 = 1 << 20;
/// Rounds after which the source pauses the partition in any case.
const ROUNDS_MAX: u32 = 16;
/// Interval between requests to pause, while the source has not written its intent yet.
const PAUSE_RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Requests to pause that the source may answer with "not yet".
const PAUSE_RETRIES_MAX: u32 = 5000;
/// Interval between keep-alives to the source during a round of copying.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Pieces that are read between two checks whether a keep-alive is due.
const PIECES_PER_CHECK: usize = 64;
/// Attempts to report the end of a hand-over to the source.
const REPORT_ATTEMPTS_MAX: u32 = 3;

impl Member {
    /// Accepts or declines a hand-over that a source offers, and begins to copy the partition.
    pub(crate) fn accept_handover(self: &Arc<Self>, handover: Handover, offer: Offer) -> Answer {
        let partition = handover.partition;
        let Some(source) = self.server_of(handover.from) else {
            return Answer::Declined("the target does not know the source".to_owned());
        };
        if self.drains.load(Ordering::Relaxed) {
            return Answer::Declined("the target is draining".to_owned());
        }
        let store = self.server().store();
        let Some(layout) = Layout::of_parts(offer.runs, offer.buckets) else {
            return Answer::Declined("the target does not know the layout of the partition".to_owned());
        };
        if offer.bytes > store.budget().limit() {
            let limit = store.budget().limit();
            let text = format!("the partition has {} bytes, and the target a limit of {limit}", offer.bytes);
            return Answer::Declined(text);
        }
        let mut outputs = Vec::new();
        {
            let mut state = self.slots[partition].lock();
            // With the slot locked: a server that stops waits for incoming hand-overs.
            if self.stops.load(Ordering::Acquire) {
                return Answer::Declined("the target is stopping".to_owned());
            }
            if state.holder.own() != handover.to {
                return Answer::Declined("the lease of the target has ended".to_owned());
            }
            if state.incoming.is_some() || state.outgoing.is_some() {
                return Answer::Declined("the target is already moving the partition".to_owned());
            }
            let message = Message::Prepare(handover.generation);
            state.holder.step(&Input::Message(handover.from, message), &mut outputs);
            let accept = Output::Send(handover.from, Message::Accept(handover.generation));
            if outputs != [accept] {
                let text = "the target owns the partition, or has refused this hand-over before";
                return Answer::Declined(text.to_owned());
            }
            state.incoming = Some(handover);
        }
        let member = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("cache-receive".into())
            .spawn(move || member.copy_and_serve(handover, &offer, layout, &source));
        match spawned {
            Ok(_) => Answer::Done,
            Err(error) => {
                self.abandon(handover);
                Answer::Declined(format!("the target cannot start a thread: {error}"))
            }
        }
    }

    fn copy_and_serve(&self, handover: Handover, offer: &Offer, layout: Layout, source: &ServerRecord) {
        let reason = match self.copy(handover, offer, layout, source) {
            Ok(()) => match self.ask(source, &Ask::Give(handover)) {
                Ok(Answer::Given) => {
                    self.loads.set(handover.partition, offer.requests_per_s);
                    return self.begin_serving(handover, source);
                }
                other => {
                    // The partition may be this server's: the answer may have been lost.
                    self.refuse(handover);
                    other.map_or_else(|reason| reason, |answer| decline_reason(&answer, source, "give"))
                }
            },
            Err(reason) => reason,
        };
        let (partition, from) = (handover.partition, handover.from.host);
        tracing::warn!(partition, from, reason, "aborting a hand-over to this server");
        self.abandon(handover);
        self.report(source, &Ask::GiveUp(handover, reason));
    }

    /// Copies a partition, and adopts it.
    fn copy(
        &self,
        handover: Handover,
        offer: &Offer,
        layout: Layout,
        source: &ServerRecord,
    ) -> Result<(), String> {
        let server = self.server();
        let store = server.store();
        let partition = &store.partitions()[handover.partition];
        let access = self.channels.access();
        let memory = RemoteMemory::connect(offer, partition, handover.to, &access.key, access.encrypt)
            .map_err(|error| format!("the target cannot connect to the source's memory: {error}"))?;
        // The source aborts the hand-over if it receives no request for some time.
        let mut memory = KeepAliveSource {
            memory,
            send_keep_alive: || drop(self.ask(source, &Ask::Extent(handover))),
            interval: KEEP_ALIVE_INTERVAL,
            last_sent: Instant::now(),
        };
        let mut copy = Copy::new(partition, layout);
        let mut reservation = store.reservation();
        let mut reserve = |bytes| reservation.resize(bytes, server.now_s());
        for _ in 0..ROUNDS_MAX {
            let runs_end = match self.ask(source, &Ask::Extent(handover))? {
                Answer::Extent(runs_end) => runs_end,
                other => return Err(decline_reason(&other, source, "extent")),
            };
            let copied =
                copy.round(runs_end, &mut memory, &mut reserve).map_err(|error| error.to_string())?;
            if copied < LAST_ROUND_BYTES {
                break;
            }
        }
        let mut retries = 0;
        let departure = loop {
            match self.ask(source, &Ask::Rest(handover))? {
                Answer::Rests(departure) => break departure,
                Answer::NotYet if retries < PAUSE_RETRIES_MAX => std::thread::sleep(PAUSE_RETRY_INTERVAL),
                other => return Err(decline_reason(&other, source, "rest")),
            }
            retries += 1;
        };
        copy.finish(&departure, &mut memory, &mut reserve).map_err(|error| error.to_string())?;
        drop(reservation);
        store
            .arrive(handover.partition, &departure, server.now_s())
            .map_err(|_| "the copied partition is inconsistent".to_owned())
    }

    fn ask(&self, source: &ServerRecord, ask: &Ask) -> Result<Answer, String> {
        self.channels.ask(source, ask).map_err(|error| error.to_string())
    }

    /// Serves a partition that the source has transferred.
    fn begin_serving(&self, handover: Handover, source: &ServerRecord) {
        let partition = handover.partition;
        let mut outputs = Vec::new();
        let is_owner = {
            let mut state = self.slots[partition].lock();
            let message = Message::Transfer(handover.generation);
            state.holder.step(&Input::Message(handover.from, message), &mut outputs);
            let is_owner = state.holder.has_access();
            if is_owner {
                self.server().store().stay(partition);
            } else {
                // The lease has ended meanwhile.
                self.forget(partition, Presence::Unknown);
            }
            state.incoming = None;
            is_owner
        };
        if !is_owner {
            return;
        }
        self.server().wake();
        self.received.fetch_add(1, Ordering::Relaxed);
        self.report(source, &Ask::Received(handover));
        for output in outputs {
            if let Some(input) = self.carry_out(partition, output) {
                self.run(partition, input);
            }
        }
    }

    /// Refuses a hand-over from now on.
    fn refuse(&self, handover: Handover) {
        let message = Message::Query(handover.generation);
        let mut state = self.slots[handover.partition].lock();
        state.holder.step(&Input::Message(handover.from, message), &mut Vec::new());
    }

    /// Discards the copied bytes. Unless this server has refused it, a hand-over with this number
    /// can be prepared again: a number is used up only when the source writes its intent.
    fn abandon(&self, handover: Handover) {
        let mut state = self.slots[handover.partition].lock();
        if state.incoming != Some(handover) {
            return;
        }
        let presence = self.server().store().partitions()[handover.partition].presence();
        self.forget(handover.partition, presence);
        state.incoming = None;
    }

    /// Reports the end of a hand-over to the source. If all attempts fail, the source finds it out
    /// by a query or from the directory.
    fn report(&self, source: &ServerRecord, ask: &Ask) {
        for _ in 0..REPORT_ATTEMPTS_MAX {
            match self.channels.ask(source, ask) {
                Ok(_) => return,
                Err(error) => {
                    tracing::debug!(%error, source = source.server, "cannot report the end of a hand-over");
                }
            }
        }
    }

    /// Answers a source that asks whether this server has received a partition.
    pub(crate) fn query(&self, handover: Handover) -> Answer {
        let mut outputs = Vec::new();
        let mut state = self.slots[handover.partition].lock();
        let message = Message::Query(handover.generation);
        state.holder.step(&Input::Message(handover.from, message), &mut outputs);
        match outputs[..] {
            [Output::Send(_, Message::Received(_))] => Answer::Received,
            _ => Answer::NotReceived,
        }
    }
}

/// A source of memory, to whose server keep-alives are sent at `interval` while it is read.
struct KeepAliveSource<S, F> {
    memory: S,
    send_keep_alive: F,
    interval: Duration,
    last_sent: Instant,
}

impl<S: Source, F: Fn()> Source for KeepAliveSource<S, F> {
    fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError> {
        for pieces in pieces.chunks(PIECES_PER_CHECK) {
            self.memory.read(pieces)?;
            if self.last_sent.elapsed() >= self.interval {
                (self.send_keep_alive)();
                self.last_sent = Instant::now();
            }
        }
        Ok(())
    }
}

/// Returns the reason of a declined request, or names an unexpected answer.
fn decline_reason(answer: &Answer, source: &ServerRecord, ask: &str) -> String {
    match answer {
        Answer::Declined(reason) => reason.clone(),
        other => format!("server {} answered {other:?} to {ask}", source.server),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct EmptySource;

    impl Source for EmptySource {
        fn read(&mut self, _: &[Piece]) -> Result<(), CopyError> {
            Ok(())
        }
    }

    #[test]
    fn a_long_round_sends_keep_alives_to_the_source() {
        let pieces = vec![Piece { from: 0, to: 0, len: 1 }; 3 * PIECES_PER_CHECK];
        for (interval, expected) in [(Duration::ZERO, 3), (Duration::MAX, 0)] {
            let count = Cell::new(0);
            let send_keep_alive = || count.set(count.get() + 1);
            let (memory, last_sent) = (EmptySource, Instant::now());
            KeepAliveSource { memory, send_keep_alive, interval, last_sent }.read(&pieces).unwrap();
            assert_eq!(count.get(), expected);
        }
    }
}
