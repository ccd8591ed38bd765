//! What the threads of a server of the cluster share.

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

/// Interval at which hand-overs are looked after whose outcome is unknown.
const TICK: Duration = Duration::from_millis(100);

/// A server of the cluster.
#[derive(Debug)]
pub struct Member {
    pub(crate) server: OnceLock<ServerHandle>,
    pub(crate) registry: Registry,
    pub(crate) channels: Channels,
    pub(crate) memories: Memories,
    pub(crate) serving_deadline: Arc<ServingDeadline>,
    /// This server, for the time of its lease.
    pub(crate) own: RwLock<ServerRecord>,
    /// All servers, as the directory says.
    pub(crate) servers: RwLock<BTreeMap<u16, ServerRecord>>,
    pub(crate) seats: Box<[Seat]>,
    pub(crate) loads: Loads,
    pub(crate) drains: AtomicBool,
    pub(crate) stops: AtomicBool,
    /// Hand-overs from this server that have begun.
    pub(crate) attempts: AtomicU64,
    pub(crate) given: AtomicU64,
    pub(crate) received: AtomicU64,
}

/// A partition as this server sees it.
#[derive(Debug)]
pub(crate) struct Seat {
    pub state: Mutex<SeatState>,
    /// Something about a hand-over has changed.
    pub changed: Condvar,
}

/// What a [`Seat`] has.
#[derive(Debug)]
pub(crate) struct SeatState {
    pub holder: Holder,
    /// The record, as the directory said last.
    pub record: Option<SegmentRecord>,
    /// The partition is being given to another server.
    pub giving: Option<Giving>,
    /// The partition is being received.
    pub receiving: Option<Handover>,
    /// How the last hand-over from this server ended.
    pub ended: Option<Result<(), String>>,
}

/// A hand-over from this server.
#[derive(Debug)]
pub(crate) struct Giving {
    pub handover: Handover,
    pub offered: Option<Offered>,
    /// When the target was heard last.
    pub heard: Instant,
    /// Requests wait, and no thread changes the partition.
    pub rests: bool,
    /// Why the target gives up.
    pub why: Option<String>,
}

impl Seat {
    fn new(own: Life) -> Self {
        Self { state: Mutex::new(SeatState::new(own)), changed: Condvar::new() }
    }

    pub fn lock(&self) -> MutexGuard<'_, SeatState> {
        self.state.lock()
    }
}

impl SeatState {
    pub fn new(own: Life) -> Self {
        Self { holder: Holder::absent(own), record: None, giving: None, receiving: None, ended: None }
    }

    /// The directory's record, if this server owns the partition and does not hand it over.
    pub fn settled_record(&self) -> Option<SegmentRecord> {
        match self.holder.holding() {
            Holding::Owned { generation, stage: Stage::Settled } if self.giving.is_none() => {
                Some(SegmentRecord::new(self.holder.own(), generation))
            }
            _ => None,
        }
    }
}

/// The seats of a server, for the time of a lease.
pub(crate) fn seats(partitions: usize, own: Life) -> Box<[Seat]> {
    (0..partitions).map(|_| Seat::new(own)).collect()
}

pub(crate) fn warn_of_directory(error: &DirectoryError) {
    tracing::warn!(%error, "the directory does not answer");
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

    /// The record of a server whose lease lasts, as far as is known.
    pub(crate) fn server_of(&self, life: Life) -> Option<ServerRecord> {
        self.server_record(life.host).filter(|record| record.epoch == life.epoch)
    }

    pub(crate) fn server_record(&self, number: u16) -> Option<ServerRecord> {
        self.servers.read().get(&number).cloned()
    }

    /// Handles an input, and all that follows from it.
    pub(crate) fn run(&self, partition: usize, input: Input) {
        let mut inputs = VecDeque::from([input]);
        let mut has_observed = false;
        while let Some(input) = inputs.pop_front() {
            let mut outputs = Vec::new();
            self.seats[partition].lock().holder.step(&input, &mut outputs);
            self.settle(partition);
            // If a transaction fails again, the next tick goes on: the lease may have ended.
            outputs
                .retain(|output| *output != Output::Observe || !std::mem::replace(&mut has_observed, true));
            inputs.extend(outputs.into_iter().filter_map(|output| self.carry_out(partition, output)));
        }
    }

    /// Carries an output out. Returns what comes of it.
    pub(crate) fn carry_out(&self, partition: usize, output: Output) -> Option<Input> {
        match output {
            // All other messages are answers, or have an offer with them.
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
                // If it is not known, the record is read.
                let is_done = result.inspect_err(warn_of_directory).unwrap_or(false);
                Some(Input::Written(change, is_done))
            }
            Output::Observe => {
                let other = match self.seats[partition].lock().holder.holding() {
                    Holding::Sent { to, .. } => Some(to),
                    _ => None,
                };
                let observed = self.registry.observe(partition, other);
                let (record, lives) = observed.inspect_err(warn_of_directory).ok()??;
                Some(Input::Observed(record, lives))
            }
        }
    }

    /// Ends a hand-over from this server whose outcome is known by now.
    fn settle(&self, partition: usize) {
        let seat = &self.seats[partition];
        let mut state = seat.lock();
        let Some(giving) = &state.giving else { return };
        let (handover, rests) = (giving.handover, giving.rests);
        match state.holder.holding() {
            Holding::Absent => {
                let Some(giving) = state.giving.take() else { return };
                if let Some(offered) = &giving.offered {
                    self.memories.withdraw(offered);
                }
                let place = Place { server: handover.to.host, generation: handover.generation };
                self.forget(partition, Presence::Elsewhere(place));
                state.ended = Some(Ok(()));
                self.given.fetch_add(1, Ordering::Relaxed);
            }
            Holding::Owned { generation, stage }
                if generation >= handover.generation || stage == Stage::Settled =>
            {
                // It was retracted.
                let Some(giving) = state.giving.take() else { return };
                if let Some(offered) = &giving.offered {
                    self.memories.withdraw(offered);
                }
                if rests {
                    self.server().store().stay(partition);
                }
                let why = giving.why.unwrap_or_else(|| "the other server has not answered".to_owned());
                state.ended = Some(Err(why));
            }
            _ => return,
        }
        drop(state);
        seat.changed.notify_all();
        self.server().wake();
    }

    /// Gives up the memory of a partition.
    pub(crate) fn forget(&self, partition: usize, presence: Presence) {
        if let Err(error) = self.server().store().forget(partition, presence) {
            tracing::error!(%error, partition, "memory of a partition cannot be returned");
        }
    }

    /// Looks after hand-overs whose outcome is unknown, until the server stops.
    pub(crate) fn settle_all(&self) {
        while !self.stops.load(Ordering::Acquire) {
            std::thread::park_timeout(TICK);
            // When the lease has ended, nothing is to be settled.
            if self.serving_deadline.is_ahead() {
                self.tick();
            }
        }
    }

    fn tick(&self) {
        for (partition, seat) in self.seats.iter().enumerate() {
            let is_unsettled = {
                let state = seat.lock();
                match state.holder.holding() {
                    Holding::Absent | Holding::Prepared { .. } => false,
                    Holding::Sent { .. } => true,
                    Holding::Owned { stage, .. } => {
                        matches!(stage, Stage::Unconfirmed | Stage::Unknown | Stage::Retracting)
                    }
                }
            };
            if is_unsettled {
                self.run(partition, Input::Tick);
            }
        }
    }
}
