//! Carries out the outputs of holders, also in the worker thread.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::SegmentKey;
use super::jobs::Job;
use super::peer::{Lane, Peer};
use super::peers::SharedPeer;
use super::shared::{HostShared, Segment, log_directory_failure};
use super::wire::{Answer, Ask, Request};
use aquifer_ownership::{Holding, Input, Life, Message, Output};

/// Interval at which the worker retries hand-overs whose outcome is unknown.
const TICK: Duration = Duration::from_millis(200);

impl HostShared {
    /// Passes an input to the holder of a segment, and carries out its outputs until no input
    /// results from them.
    pub(super) fn run(&self, segment: SegmentKey, entry: &Mutex<Segment>, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let (mut outputs, mut returned) = (Vec::new(), None);
            {
                let mut entry = entry.lock();
                let was_sent = matches!(entry.holder.holding(), Holding::Sent { .. });
                entry.holder.step(&input, &mut outputs);
                if was_sent && entry.holder.has_access() && !entry.is_awaited {
                    // The hand-over was retracted.
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

    /// Stops pulling when a segment is handed over, and resumes it when the hand-over is retracted.
    fn follow_access(&self, entry: &mut Segment) {
        let has_access = entry.holder.has_access();
        match &mut entry.puller {
            Some(puller) if has_access => {
                if puller.resume()
                    && let Some(served) = &entry.served
                {
                    // READs for which threads wait may have ended meanwhile without effect.
                    served.wake_all();
                }
            }
            Some(puller) => puller.finish(),
            None => {}
        }
        entry.pulled.notify_all();
        // Kept while the outcome is unknown: a retracted hand-over leaves the program's mapping
        // served.
        if entry.holder.holding() == Holding::Absent {
            entry.served = None;
        }
    }

    /// Carries out an output. Returns the input that results from it.
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
                // If the outcome is not known, the holder reads the record.
                let is_done = result.inspect_err(log_directory_failure).unwrap_or(false);
                Some(Input::Written(change, is_done))
            }
            Output::Observe => {
                let other = match entry.lock().holder.holding() {
                    Holding::Sent { to, .. } => Some(to),
                    _ => None,
                };
                let observed =
                    self.registry.observe(segment, other).inspect_err(log_directory_failure).ok()??;
                Some(Input::Observed(observed.0, observed.1))
            }
        }
    }

    /// Sends a message of the ownership protocol, and returns the answer as an input.
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

    /// Sends a request to another agent; `None` if it does not answer.
    pub(super) fn ask(&self, request: &Request) -> Option<Answer> {
        let peer = self.peer(request.to, Lane::Urgent, None)?;
        let answer = peer.lock().ask(request);
        if answer.is_none() {
            self.peers.remove(request.to, Lane::Urgent, &peer);
        }
        answer
    }

    /// Returns a connection to an agent; `None` if the agent cannot be reached.
    pub(super) fn peer(&self, life: Life, lane: Lane, address: Option<SocketAddr>) -> Option<SharedPeer> {
        match self.peers.get(life, lane) {
            // A new connection has no registered memory. Threads that use this one continue.
            Some(peer) if peer.try_lock().is_some_and(|peer| peer.has_unused_memory()) => {
                self.peers.remove(life, lane, &peer);
            }
            Some(peer) => return Some(peer),
            None => {}
        }
        let address = match address {
            Some(address) => address,
            None => self.registry.address(life).inspect_err(log_directory_failure).ok()??,
        };
        Some(self.peers.add(life, lane, Peer::connect(address, &self.key, self.identity)?))
    }

    /// The worker: does the jobs of the queue, and retries hand-overs whose outcome is unknown.
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

    /// Retries all hand-overs whose outcome is unknown, and all writes to the directory that are
    /// due.
    pub(super) fn tick(&self) {
        // Hosts that did not answer. Each is asked only once in a tick.
        let mut unresponsive = Vec::new();
        for (segment, entry) in self.segments.all() {
            let target = match entry.lock().holder.holding() {
                Holding::Sent { to, .. } => Some(to),
                _ => None,
            };
            if !entry.lock().needs_directory() || target.is_some_and(|to| unresponsive.contains(&to)) {
                continue;
            }
            let began = Instant::now();
            self.run(segment, &entry, Input::Tick);
            unresponsive.extend(target.filter(|_| began.elapsed() > TICK));
        }
    }

    /// Frees the memory of a segment that has left, if its copies have no generation above
    /// `generation`. The holder remembers the decided hand-overs.
    pub(super) fn release(&self, segment: SegmentKey, generation: u64) {
        let Some(entry) = self.segments.get(segment) else { return };
        let memory = {
            let mut entry = entry.lock();
            // This host may not know yet that the segment has arrived at the target. Once it does,
            // another release job is queued.
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
