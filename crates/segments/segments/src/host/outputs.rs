//! Carries out what a holder has decided, and the worker that does so in the background.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::SegmentKey;
use super::jobs::Job;
use super::peer::{Lane, Peer};
use super::peers::SharedPeer;
use super::shared::{HostShared, Segment, warn_of_directory};
use super::wire::{Answer, Ask, Request};
use aquifer_ownership::{Holding, Input, Life, Message, Output};

/// Interval at which hand-overs are looked after whose outcome is unknown.
const TICK: Duration = Duration::from_millis(200);

impl HostShared {
    /// Handles an input, and all that follows from it.
    pub(super) fn run(&self, segment: SegmentKey, entry: &Mutex<Segment>, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let (mut outputs, mut returned) = (Vec::new(), None);
            {
                let mut entry = entry.lock();
                let was_sent = matches!(entry.holder.holding(), Holding::Sent { .. });
                entry.holder.step(&input, &mut outputs);
                if was_sent && entry.holder.has_access() && !entry.is_awaited {
                    // It has not left after all.
                    returned = Some(entry.process.clone());
                }
                self.follow_access(&mut entry);
                entry.save();
                if was_sent && entry.holder.holding() == Holding::Absent && entry.released > 0 {
                    self.jobs.push(Job::Release(segment, entry.released));
                }
            }
            if let Some(process) = returned {
                self.arrive(segment, &process);
            }
            inputs.extend(outputs.into_iter().filter_map(|output| self.carry_out(segment, entry, output)));
        }
    }

    /// Ends pulling when a segment leaves, and goes on when it has not left after all.
    fn follow_access(&self, entry: &mut Segment) {
        let has_access = entry.holder.has_access();
        match &mut entry.puller {
            Some(puller) if has_access => {
                if puller.go_on()
                    && let Some(served) = &entry.served
                {
                    // READs for some of them have ended meanwhile, and brought nothing.
                    served.wake_all();
                }
            }
            Some(puller) => puller.finish(),
            None => {}
        }
        entry.pulled.notify_all();
        // A program that gets it back at once has its faults served still.
        if entry.holder.holding() == Holding::Absent {
            entry.served = None;
        }
    }

    /// Carries an output out. Returns what comes of it.
    pub(super) fn carry_out(
        &self,
        segment: SegmentKey,
        entry: &Mutex<Segment>,
        output: Output,
    ) -> Option<Input> {
        match output {
            Output::Send(to, message) => self.send(segment, entry, to, message),
            Output::Write(change) => {
                let result = self.registry.carry_out(segment, &change);
                // If it is not known, the record is read.
                let is_done = result.inspect_err(warn_of_directory).unwrap_or(false);
                Some(Input::Written(change, is_done))
            }
            Output::Observe => {
                let other = match entry.lock().holder.holding() {
                    Holding::Sent { to, .. } => Some(to),
                    _ => None,
                };
                let observed =
                    self.registry.observe(segment, other).inspect_err(warn_of_directory).ok()??;
                Some(Input::Observed(observed.0, observed.1))
            }
        }
    }

    /// Sends a question, and returns the answer.
    pub(super) fn send(
        &self,
        segment: SegmentKey,
        entry: &Mutex<Segment>,
        to: Life,
        message: Message,
    ) -> Option<Input> {
        let (generation, ask) = match message {
            Message::Prepare(generation) => {
                let entry = entry.lock();
                let (bytes, address, process) = (entry.bytes()?, entry.address, entry.target.clone());
                (generation, Ask::Prepare { generation, bytes, address, process })
            }
            Message::Transfer(generation) => {
                (generation, Ask::Transfer { generation, copies: entry.lock().copies.clone() })
            }
            Message::Query(generation) => (generation, Ask::Query { generation }),
            _ => return None,
        };
        let answer = self.ask(&Request { segment, from: self.own, to, ask })?;
        Some(Input::Message(to, answer.message(generation)?))
    }

    pub(super) fn ask(&self, request: &Request) -> Option<Answer> {
        let peer = self.peer(request.to, Lane::Urgent, None)?;
        let answer = peer.lock().ask(request);
        if answer.is_none() {
            self.peers.remove(request.to, Lane::Urgent, &peer);
        }
        answer
    }

    /// The connection to an agent; `None` if it cannot be reached.
    pub(super) fn peer(&self, life: Life, lane: Lane, address: Option<SocketAddr>) -> Option<SharedPeer> {
        match self.peers.get(life, lane) {
            // The next connection has no such memory. Users of this one go on with it.
            Some(peer) if peer.try_lock().is_some_and(|peer| peer.has_unused_memory()) => {
                self.peers.remove(life, lane, &peer);
            }
            Some(peer) => return Some(peer),
            None => {}
        }
        let address = match address {
            Some(address) => address,
            None => self.registry.address(life).inspect_err(warn_of_directory).ok()??,
        };
        Some(self.peers.add(life, lane, Peer::connect(address, &self.key, self.identity)?))
    }

    /// Does the work that the handler has left, and looks after what is unknown.
    pub(super) fn work(&self, jobs: &Receiver<Job>) {
        let mut next_tick = Instant::now() + TICK;
        loop {
            if Instant::now() >= next_tick {
                self.tick();
                next_tick = Instant::now() + TICK;
            }
            self.memories.close_retired();
            match jobs.recv_timeout(next_tick.saturating_duration_since(Instant::now())) {
                Ok(Job::CarryOut(segment, outputs)) => {
                    let entry = self.segments.get(segment);
                    let Some(entry) = entry else { continue };
                    for output in outputs {
                        if let Some(input) = self.carry_out(segment, &entry, output) {
                            self.run(segment, &entry, input);
                        }
                    }
                }
                Ok(Job::Release(segment, generation)) => self.release(segment, generation),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    pub(super) fn tick(&self) {
        // A host that does not answer is asked once.
        let mut silent = Vec::new();
        for (segment, entry) in self.segments.all() {
            let target = match entry.lock().holder.holding() {
                Holding::Sent { to, .. } => Some(to),
                _ => None,
            };
            if !entry.lock().is_unsettled() || target.is_some_and(|to| silent.contains(&to)) {
                continue;
            }
            let began = Instant::now();
            self.run(segment, &entry, Input::Tick);
            silent.extend(target.filter(|_| began.elapsed() > TICK));
        }
    }

    /// Gives up the memory of a segment that has left. What was decided of it is not forgotten.
    pub(super) fn release(&self, segment: SegmentKey, generation: u64) {
        let Some(entry) = self.segments.get(segment) else { return };
        let memory = {
            let mut entry = entry.lock();
            // It may not know yet that the segment has arrived, and looks again when it does.
            entry.released = entry.released.max(generation);
            let released = entry.released;
            let newest = entry.copies.first().map(|place| place.link.generation);
            let is_absent = entry.holder.holding() == Holding::Absent;
            let is_needed = !is_absent || newest.is_some_and(|newest| newest > released);
            if is_needed { None } else { entry.memory.take() }
        };
        if let Some(memory) = memory {
            self.memories.free(&memory);
        }
    }
}
