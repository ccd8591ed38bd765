//! State that the threads of a server of the cluster share.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use std::time::{Duration, Instant};

use aquifer_cache::server::ServerHandle;
use aquifer_cache::store::presence::{Place, Presence};
use aquifer_directory::DirectoryError;
use aquifer_ownership::{Holder, Holding, Input, Life, Message, Output, SegmentRecord, Stage};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use crate::channel::Channels;
use crate::lease::ServingDeadline;
use crate::load::Loads;
use crate::memories::{Memories, Offered};
use crate::records::{Registry, ServerRecord};
use crate::wire::{Answer, Ask, Handover};

/// Interval at which hand-overs with an unknown outcome are checked.
const TICK: Duration = Duration::from_millis(100);

/// A server of the cluster.
#[derive(Debug)]
pub struct Member {
    pub(crate) server: OnceLock<ServerHandle>,
    pub(crate) registry: Registry,
    pub(crate) channels: Channels,
    pub(crate) memories: Memories,
    pub(crate) serving_deadline: Arc<ServingDeadline>,
    /// The record of this server under its current lease.
    pub(crate) own: RwLock<ServerRecord>,
    /// Records of all servers, as last read from the directory.
    pub(crate) servers: RwLock<BTreeMap<u16, ServerRecord>>,
    pub(crate) slots: Box<[PartitionSlot]>,
    pub(crate) loads: Loads,
    pub(crate) drains: AtomicBool,
    pub(crate) stops: AtomicBool,
    /// Hand-overs from this server that have begun.
    pub(crate) attempts: AtomicU64,
    pub(crate) given: AtomicU64,
    pub(crate) received: AtomicU64,
}

/// A partition of the cache as this server knows it, owned or not.
#[derive(Debug)]
pub(crate) struct PartitionSlot {
    pub state: Mutex<PartitionState>,
    /// Notified when the state of a hand-over changes.
    pub changed: Condvar,
}

/// State of a [`PartitionSlot`].
#[derive(Debug)]
pub(crate) struct PartitionState {
    pub holder: Holder,
    /// The partition's record, as last read from the directory.
    pub record: Option<SegmentRecord>,
    /// The hand-over from this server that is in progress.
    pub outgoing: Option<OutgoingHandover>,
    /// The hand-over to this server that is in progress.
    pub incoming: Option<Handover>,
    /// Outcome of the last hand-over from this server.
    pub outcome: Option<Result<(), String>>,
}

/// A hand-over from this server.
#[derive(Debug)]
pub(crate) struct OutgoingHandover {
    pub handover: Handover,
    pub offered: Option<Offered>,
    /// The time of the target's last request.
    pub last_request: Instant,
    /// Whether the partition is paused: requests wait, and no thread changes it.
    pub is_paused: bool,
    /// The reason, once the hand-over is to be aborted.
    pub abort_reason: Option<String>,
}

impl PartitionSlot {
    fn new(own: Life) -> Self {
        Self { state: Mutex::new(PartitionState::new(own)), changed: Condvar::new() }
    }

    pub fn lock(&self) -> MutexGuard<'_, PartitionState> {
        self.state.lock()
    }
}

impl PartitionState {
    pub fn new(own: Life) -> Self {
        Self { holder: Holder::absent(own), record: None, outgoing: None, incoming: None, outcome: None }
    }

    /// Returns the directory's record if this server owns the partition and does not hand it over.
    pub fn owned_record(&self) -> Option<SegmentRecord> {
        match self.holder.holding() {
            Holding::Owned { generation, stage: Stage::Settled } if self.outgoing.is_none() => {
                Some(SegmentRecord::new(self.holder.own(), generation))
            }
            _ => None,
        }
    }
}

/// Returns the slots of a server that owns no partition, under the lease of `own`.
pub(crate) fn slots(partitions: usize, own: Life) -> Box<[PartitionSlot]> {
    (0..partitions).map(|_| PartitionSlot::new(own)).collect()
}

pub(crate) fn warn_of_directory(error: &DirectoryError) {
    tracing::warn!(%error, "a request to the directory failed");
}

impl Member {
    pub(crate) fn server(&self) -> &ServerHandle {
        self.server.get().expect("the server has started")
    }

    pub(crate) fn life(&self) -> Life {
        self.own_record().life()
    }

    pub(crate) fn own_record(&self) -> ServerRecord {
        self.own.read().clone()
    }

    /// Returns the record of server `life`, unless its lease is known to have ended.
    pub(crate) fn server_of(&self, life: Life) -> Option<ServerRecord> {
        self.server_record(life.host).filter(|record| record.epoch == life.epoch)
    }

    pub(crate) fn server_record(&self, number: u16) -> Option<ServerRecord> {
        self.servers.read().get(&number).cloned()
    }

    /// Applies an input, carries its outputs out, and applies the inputs that these return.
    pub(crate) fn run(&self, partition: usize, input: Input) {
        let mut inputs = VecDeque::from([input]);
        let mut has_observed = false;
        while let Some(input) = inputs.pop_front() {
            let mut outputs = Vec::new();
            self.slots[partition].lock().holder.step(&input, &mut outputs);
            self.resolve_handover(partition);
            // At most one read of the record: if a transaction fails again, the next tick retries,
            // because the lease may have ended.
            outputs
                .retain(|output| *output != Output::Observe || !std::mem::replace(&mut has_observed, true));
            inputs.extend(outputs.into_iter().filter_map(|output| self.carry_out(partition, output)));
        }
    }

    /// Carries an output out. Returns the input that results from it.
    pub(crate) fn carry_out(&self, partition: usize, output: Output) -> Option<Input> {
        match output {
            // Only queries are sent here. All other messages are sent by `prepare`, by `report`, or
            // as answers.
            Output::Send(to, Message::Query(generation)) => {
                let handover = Handover { partition, generation, attempt: 0, from: self.life(), to };
                let server = self.server_of(to)?;
                let message = match self.channels.ask(&server, &Ask::Query(handover)).ok()? {
                    Answer::Received => Message::Received(generation),
                    Answer::NotReceived => Message::NotReceived(generation),
                    _ => return None,
                };
                Some(Input::Message(to, message))
            }
            Output::Send(..) => None,
            Output::Write(change) => {
                let result = self.registry.carry_out(partition, &change);
                // An unknown outcome counts as not done: the holder then reads the record.
                let is_done = result.inspect_err(warn_of_directory).unwrap_or(false);
                Some(Input::Written(change, is_done))
            }
            Output::Observe => {
                let other = match self.slots[partition].lock().holder.holding() {
                    Holding::Sent { to, .. } => Some(to),
                    _ => None,
                };
                let observed = self.registry.observe(partition, other);
                let (record, lives) = observed.inspect_err(warn_of_directory).ok()??;
                Some(Input::Observed(record, lives))
            }
        }
    }

    /// Ends the hand-over of a partition from this server, if its outcome is known by now.
    fn resolve_handover(&self, partition: usize) {
        let slot = &self.slots[partition];
        let mut state = slot.lock();
        let Some(outgoing) = &state.outgoing else { return };
        let (handover, is_paused) = (outgoing.handover, outgoing.is_paused);
        match state.holder.holding() {
            Holding::Absent => {
                let Some(outgoing) = state.outgoing.take() else { return };
                if let Some(offered) = &outgoing.offered {
                    self.memories.withdraw(offered);
                }
                let place = Place { server: handover.to.host, generation: handover.generation };
                self.forget(partition, Presence::Elsewhere(place));
                state.outcome = Some(Ok(()));
                self.given.fetch_add(1, Ordering::Relaxed);
            }
            Holding::Owned { generation, stage }
                if generation >= handover.generation || stage == Stage::Settled =>
            {
                // The intent was retracted.
                let Some(outgoing) = state.outgoing.take() else { return };
                if let Some(offered) = &outgoing.offered {
                    self.memories.withdraw(offered);
                }
                if is_paused {
                    self.server().store().stay(partition);
                }
                let reason = outgoing
                    .abort_reason
                    .unwrap_or_else(|| format!("server {} did not answer in time", handover.to.host));
                state.outcome = Some(Err(reason));
            }
            _ => return,
        }
        drop(state);
        slot.changed.notify_all();
        self.server().wake();
    }

    /// Returns the memory of a partition to the system, and sets its presence.
    pub(crate) fn forget(&self, partition: usize, presence: Presence) {
        if let Err(error) = self.server().store().forget(partition, presence) {
            tracing::error!(%error, partition, "cannot return the memory of a partition to the system");
        }
    }

    /// Resolves hand-overs with an unknown outcome, until the server stops.
    pub(crate) fn resolve_all(&self) {
        while !self.stops.load(Ordering::Acquire) {
            std::thread::park_timeout(TICK);
            // Under an ended lease no transaction succeeds.
            if self.serving_deadline.is_ahead() {
                self.tick();
            }
        }
    }

    fn tick(&self) {
        for (partition, slot) in self.slots.iter().enumerate() {
            let is_unresolved = {
                let state = slot.lock();
                match state.holder.holding() {
                    Holding::Absent | Holding::Prepared { .. } => false,
                    Holding::Sent { .. } => true,
                    Holding::Owned { stage, .. } => {
                        matches!(stage, Stage::Unconfirmed | Stage::Unknown | Stage::Retracting)
                    }
                }
            };
            if is_unresolved {
                self.run(partition, Input::Tick);
            }
        }
    }
}
