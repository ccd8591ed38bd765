//! The balancer: one server asks all for their loads, and has partitions moved.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use aquifer_directory::DirectoryError;
use aquifer_ownership::{Holding, Stage};

use crate::member::Member;
use crate::placement::{Move, PartitionLoad, ServerLoad, claimant, plan};
use crate::wire::{Answer, Ask, PartitionStatus, ServerStatus};

/// Interval at which loads are measured and balanced.
const INTERVAL: Duration = Duration::from_secs(1);
/// Moves at a time.
const MOVES_MAX: usize = 2;
/// Pause before partitions are given again that could not be.
const RETRY: Duration = Duration::from_millis(100);
/// A partition that has moved stays for so long.
const REST: Duration = Duration::from_secs(10);

/// What the balancer of a server knows.
#[derive(Debug, Default)]
pub(crate) struct Balancer {
    moved: BTreeMap<usize, Instant>,
    running: Arc<AtomicUsize>,
}

impl Member {
    /// How this server is.
    pub(crate) fn status(&self) -> ServerStatus {
        let (own, server) = (self.own_record(), self.server());
        let mut partitions = Vec::new();
        for (partition, seat) in self.seats.iter().enumerate() {
            let state = seat.lock();
            if !state.holder.has_access() {
                continue;
            }
            let is_settled = matches!(state.holder.holding(), Holding::Owned { stage: Stage::Settled, .. });
            let moves = state.giving.is_some() || !is_settled;
            drop(state);
            let items = &server.store().partitions()[partition];
            partitions.push(PartitionStatus {
                partition,
                items: items.content().items,
                bytes: items.charged(),
                requests_per_s: self.loads.rate(partition),
                moves,
            });
        }
        ServerStatus {
            server: own.server,
            clients: own.clients,
            memory_bytes: server.store().budget().limit(),
            used_bytes: server.store().budget().used(),
            drains: self.drains.load(Ordering::Relaxed),
            partitions,
            given: self.given.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    /// Has the server drain, or have partitions again.
    pub(crate) fn set_drains(&self, drains: bool) -> Result<(), DirectoryError> {
        self.drains.store(drains, Ordering::Relaxed);
        let record = {
            let mut own = self.own.write();
            own.drains = drains;
            own.clone()
        };
        self.registry.update_server(&record)
    }

    /// Gives all partitions to other servers within this time. Returns how many are left.
    pub(crate) fn give_all(&self, time: Duration) -> usize {
        let deadline = Instant::now() + time;
        let mut is_noted = false;
        loop {
            let own = self.life();
            let owned: Vec<usize> =
                (0..self.seats.len()).filter(|at| self.seats[*at].lock().holder.has_access()).collect();
            let others: Vec<u16> = {
                let servers = self.servers.read();
                let others = servers.values().filter(|server| server.life() != own && !server.drains);
                others.map(|server| server.server).collect()
            };
            if owned.is_empty() || others.is_empty() || Instant::now() >= deadline {
                return owned.len();
            }
            if !std::mem::replace(&mut is_noted, true)
                && let Err(error) = self.set_drains(true)
            {
                tracing::warn!(%error, "the other servers do not know that this one drains");
            }
            let mut given = 0;
            for partition in owned {
                let to = claimant(partition, others.iter().copied()).expect("there are others");
                match self.give(partition, to) {
                    Ok(()) => given += 1,
                    // The balancer may be moving it.
                    Err(why) => tracing::debug!(partition, to, why, "a partition is not given yet"),
                }
                if Instant::now() >= deadline {
                    break;
                }
            }
            if given == 0 {
                std::thread::park_timeout(RETRY);
            }
        }
    }

    /// Measures and balances until the server stops.
    pub(crate) fn balance(self: &Arc<Self>) {
        let mut balancer = Balancer::default();
        let mut measured = Instant::now();
        while !self.stops.load(Ordering::Acquire) {
            std::thread::park_timeout(INTERVAL);
            if measured.elapsed() >= INTERVAL {
                measured = Instant::now();
                self.loads.note(&self.server().partition_requests(), measured);
            }
            if self.is_leader() {
                self.balance_once(&mut balancer);
            }
        }
    }

    /// The server with the lowest number balances.
    fn is_leader(&self) -> bool {
        let servers = self.servers.read();
        servers.keys().next() == Some(&self.life().host)
    }

    fn balance_once(self: &Arc<Self>, balancer: &mut Balancer) {
        balancer.moved.retain(|_, at| at.elapsed() < REST);
        let running = balancer.running.load(Ordering::Acquire);
        if running >= MOVES_MAX {
            return;
        }
        let Some(loads) = self.loads_of_all(|partition| !balancer.moved.contains_key(&partition)) else {
            return;
        };
        for next in plan(&loads, MOVES_MAX - running) {
            balancer.moved.insert(next.partition, Instant::now());
            balancer.running.fetch_add(1, Ordering::AcqRel);
            let (member, running) = (Arc::clone(self), Arc::clone(&balancer.running));
            let balancing = std::thread::current();
            let spawned = std::thread::Builder::new().name("cache-balance".into()).spawn(move || {
                member.order(next);
                running.fetch_sub(1, Ordering::AcqRel);
                balancing.unpark();
            });
            if let Err(error) = spawned {
                tracing::warn!(%error, "no thread moves a partition");
                balancer.running.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Plans the next moves and has them begin, whether or not this server balances.
    pub(crate) fn balance_now(self: &Arc<Self>) -> Vec<(usize, u16)> {
        let Some(loads) = self.loads_of_all(|_| true) else { return Vec::new() };
        let moves = plan(&loads, self.seats.len());
        moves.iter().for_each(|next| self.order(*next));
        moves.into_iter().map(|next| (next.partition, next.to)).collect()
    }

    /// The loads of all servers; `None` if one does not answer.
    fn loads_of_all(&self, may_move: impl Fn(usize) -> bool) -> Option<BTreeMap<u16, ServerLoad>> {
        let servers = self.servers.read().clone();
        let mut loads = BTreeMap::new();
        for (number, record) in servers {
            let status = if record.life() == self.life() {
                self.status()
            } else {
                match self.channels.ask(&record, &Ask::Status) {
                    Ok(Answer::Status(status)) => *status,
                    _ => return None,
                }
            };
            loads.insert(number, load_of(&status, &may_move));
        }
        Some(loads)
    }

    fn order(&self, Move { partition, from, to }: Move) {
        let ended = if from == self.life().host {
            self.give(partition, to)
        } else {
            let Some(source) = self.server_record(from) else { return };
            match self.channels.ask_for_long(&source, &Ask::Move { partition, to }) {
                Ok(Answer::Done) => Ok(()),
                Ok(Answer::Declined(why)) => Err(why),
                Ok(_) => Err("it has answered something else".to_owned()),
                Err(error) => Err(error.to_string()),
            }
        };
        match ended {
            Ok(()) => tracing::info!(partition, from, to, "a partition was moved"),
            Err(why) => tracing::warn!(partition, from, to, why, "a partition was not moved"),
        }
    }
}

fn load_of(status: &ServerStatus, may_move: &impl Fn(usize) -> bool) -> ServerLoad {
    let partition = |status: &PartitionStatus| PartitionLoad {
        partition: status.partition,
        rate: status.requests_per_s,
        bytes: status.bytes,
        may_move: !status.moves && may_move(status.partition),
    };
    ServerLoad {
        memory_bytes: status.memory_bytes,
        used_bytes: status.used_bytes,
        drains: status.drains,
        partitions: status.partitions.iter().map(partition).collect(),
    }
}
