//! How a server receives a partition from another one.

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

/// When so little was written during a round, the partition is to rest.
const LITTLE_BYTES: u64 = 1 << 20;
/// Rounds after which it is to rest in any case.
const ROUNDS_MAX: u32 = 16;
/// Pause before the source is asked again that has not yet written its intent.
const PAUSE: Duration = Duration::from_millis(1);
/// How often it is asked.
const ASKS_MAX: u32 = 5000;
/// A round of copying tells the source in this interval that it goes on, after so many pieces.
const SAY_INTERVAL: Duration = Duration::from_secs(10);
const PIECES_BETWEEN: usize = 64;
/// How often the source is told of the end of a hand-over.
const TELLS_MAX: u32 = 3;

impl Member {
    /// Answers a source that wants to give a partition, and begins to copy it.
    pub(crate) fn begin_receiving(self: &Arc<Self>, handover: Handover, offer: Offer) -> Answer {
        let partition = handover.partition;
        let Some(source) = self.server_of(handover.from) else {
            return Answer::Declined("the server is not known to the other one".to_owned());
        };
        if self.drains.load(Ordering::Relaxed) {
            return Answer::Declined("the other server drains".to_owned());
        }
        let store = self.server().store();
        let Some(layout) = Layout::of_parts(offer.runs, offer.buckets) else {
            return Answer::Declined("the layout is not known to the other server".to_owned());
        };
        if offer.bytes > store.budget().limit() {
            let text = format!("the other server has {} bytes of memory", store.budget().limit());
            return Answer::Declined(text);
        }
        let mut outputs = Vec::new();
        {
            let mut state = self.seats[partition].lock();
            // With the lock: a server that ends waits for what is being received.
            if self.stops.load(Ordering::Acquire) {
                return Answer::Declined("the other server ends".to_owned());
            }
            if state.holder.own() != handover.to {
                return Answer::Declined("the lease of the other server has ended".to_owned());
            }
            if state.receiving.is_some() || state.giving.is_some() {
                return Answer::Declined("the other server is still moving it".to_owned());
            }
            let message = Message::Prepare(handover.generation);
            state.holder.step(&Input::Message(handover.from, message), &mut outputs);
            let accept = Output::Send(handover.from, Message::Accept(handover.generation));
            if outputs != [accept] {
                return Answer::Declined("the other server has it, or has refused it before".to_owned());
            }
            state.receiving = Some(handover);
        }
        let member = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("cache-receive".into())
            .spawn(move || member.receive(handover, &offer, layout, &source));
        match spawned {
            Ok(_) => Answer::Done,
            Err(error) => {
                self.give_up(handover);
                Answer::Declined(format!("the other server has no thread for it: {error}"))
            }
        }
    }

    fn receive(&self, handover: Handover, offer: &Offer, layout: Layout, source: &ServerRecord) {
        let why = match self.copy(handover, offer, layout, source) {
            Ok(()) => match self.ask(source, &Ask::Give(handover)) {
                Ok(Answer::Given) => {
                    self.loads.set(handover.partition, offer.requests_per_s);
                    return self.own(handover, source);
                }
                other => {
                    // It may have been given, and the answer was lost.
                    self.refuse(handover);
                    other.map_or_else(|why| why, unexpected)
                }
            },
            Err(why) => why,
        };
        let (partition, from) = (handover.partition, handover.from.host);
        tracing::warn!(partition, from, why, "a partition was not received");
        self.give_up(handover);
        self.tell(source, &Ask::GiveUp(handover, why));
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
            .map_err(|error| format!("its memory cannot be reached: {error}"))?;
        // The source takes a partition back if it hears nothing of it.
        let say = || drop(self.ask(source, &Ask::Extent(handover)));
        let mut memory = Audible { memory, say, interval: SAY_INTERVAL, said: Instant::now() };
        let mut copy = Copy::new(partition, layout);
        let mut reservation = store.reservation();
        let mut reserve = |bytes| reservation.resize(bytes, server.now_s());
        for _ in 0..ROUNDS_MAX {
            let runs_end = match self.ask(source, &Ask::Extent(handover))? {
                Answer::Extent(runs_end) => runs_end,
                other => return Err(unexpected(other)),
            };
            let copied =
                copy.round(runs_end, &mut memory, &mut reserve).map_err(|error| error.to_string())?;
            if copied < LITTLE_BYTES {
                break;
            }
        }
        let mut asked = 0;
        let departure = loop {
            match self.ask(source, &Ask::Rest(handover))? {
                Answer::Rests(departure) => break departure,
                Answer::NotYet if asked < ASKS_MAX => std::thread::sleep(PAUSE),
                other => return Err(unexpected(other)),
            }
            asked += 1;
        };
        copy.finish(&departure, &mut memory, &mut reserve).map_err(|error| error.to_string())?;
        drop(reservation);
        store
            .arrive(handover.partition, &departure, server.now_s())
            .map_err(|_| "what came contradicts itself".to_owned())
    }

    fn ask(&self, source: &ServerRecord, ask: &Ask) -> Result<Answer, String> {
        self.channels.ask(source, ask).map_err(|error| error.to_string())
    }

    /// Serves a partition that the source has given.
    fn own(&self, handover: Handover, source: &ServerRecord) {
        let partition = handover.partition;
        let mut outputs = Vec::new();
        let is_owner = {
            let mut state = self.seats[partition].lock();
            let message = Message::Transfer(handover.generation);
            state.holder.step(&Input::Message(handover.from, message), &mut outputs);
            let is_owner = state.holder.has_access();
            if is_owner {
                self.server().store().stay(partition);
            } else {
                // The lease has ended meanwhile.
                self.forget(partition, Presence::Unknown);
            }
            state.receiving = None;
            is_owner
        };
        if !is_owner {
            return;
        }
        self.server().wake();
        self.received.fetch_add(1, Ordering::Relaxed);
        self.tell(source, &Ask::Received(handover));
        for output in outputs {
            if let Some(input) = self.carry_out(partition, output) {
                self.run(partition, input);
            }
        }
    }

    /// Refuses a hand-over from now on.
    fn refuse(&self, handover: Handover) {
        let message = Message::Query(handover.generation);
        let mut state = self.seats[handover.partition].lock();
        state.holder.step(&Input::Message(handover.from, message), &mut Vec::new());
    }

    /// Gives up what was copied. A hand-over that was not asked for can be prepared again: its
    /// number is not used up before the source has written its intent.
    fn give_up(&self, handover: Handover) {
        let mut state = self.seats[handover.partition].lock();
        if state.receiving != Some(handover) {
            return;
        }
        let presence = self.server().store().partitions()[handover.partition].presence();
        self.forget(handover.partition, presence);
        state.receiving = None;
    }

    /// Tells the source, which also finds out by itself later.
    fn tell(&self, source: &ServerRecord, ask: &Ask) {
        for _ in 0..TELLS_MAX {
            match self.channels.ask(source, ask) {
                Ok(_) => return,
                Err(error) => tracing::debug!(%error, "the source of a partition is not told"),
            }
        }
    }

    /// Answers a source that asks whether a partition has arrived.
    pub(crate) fn query(&self, handover: Handover) -> Answer {
        let mut outputs = Vec::new();
        let mut state = self.seats[handover.partition].lock();
        let message = Message::Query(handover.generation);
        state.holder.step(&Input::Message(handover.from, message), &mut outputs);
        match outputs[..] {
            [Output::Send(_, Message::Received(_))] => Answer::Received,
            _ => Answer::NotReceived,
        }
    }
}

/// A source that is told regularly that it is still being read.
struct Audible<S, F> {
    memory: S,
    say: F,
    interval: Duration,
    said: Instant,
}

impl<S: Source, F: Fn()> Source for Audible<S, F> {
    fn read(&mut self, pieces: &[Piece]) -> Result<(), CopyError> {
        for pieces in pieces.chunks(PIECES_BETWEEN) {
            self.memory.read(pieces)?;
            if self.said.elapsed() >= self.interval {
                (self.say)();
                self.said = Instant::now();
            }
        }
        Ok(())
    }
}

fn unexpected(answer: Answer) -> String {
    match answer {
        Answer::Declined(why) => why,
        _ => "the other server has answered something else".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct Nothing;

    impl Source for Nothing {
        fn read(&mut self, _: &[Piece]) -> Result<(), CopyError> {
            Ok(())
        }
    }

    #[test]
    fn a_long_round_is_heard_at_the_source() {
        let pieces = vec![Piece { from: 0, to: 0, len: 1 }; 3 * PIECES_BETWEEN];
        for (interval, expected) in [(Duration::ZERO, 3), (Duration::MAX, 0)] {
            let count = Cell::new(0);
            let say = || count.set(count.get() + 1);
            Audible { memory: Nothing, say, interval, said: Instant::now() }.read(&pieces).unwrap();
            assert_eq!(count.get(), expected);
        }
    }
}
