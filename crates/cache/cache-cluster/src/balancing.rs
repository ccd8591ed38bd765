//! The balancer: the server with the lowest number asks all servers for their loads, and moves
//! partitions.

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
const BALANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Largest number of moves at a time.
const MOVES_MAX: usize = 2;
/// Pause of a server that drains after a round in which it could not hand over any partition.
const DRAIN_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time after the begin of a move for which the balancer does not move the partition again.
const MOVE_COOLDOWN: Duration = Duration::from_secs(10);

/// Moves that the balancer has begun.
#[derive(Debug, Default)]
pub(crate) struct Balancer {
    moved: BTreeMap<usize, Instant>,
    running: Arc<AtomicUsize>,
}

impl Member {
    /// Returns the status of this server.
    pub(crate) fn status(&self) -> ServerStatus {
        let (own, server) = (self.own_record(), self.server());
        let mut partitions = Vec::new();
        for (partition, slot) in self.slots.iter().enumerate() {
            let state = slot.lock();
            if !state.holder.has_access() {
                continue;
            }
            let is_settled = matches!(state.holder.holding(), Holding::Owned { stage: Stage::Settled, .. });
            let moves = state.outgoing.is_some() || !is_settled;
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

    /// Sets whether the server drains, here and in its record in the directory.
    pub(crate) fn set_drains(&self, drains: bool) -> Result<(), DirectoryError> {
        self.drains.store(drains, Ordering::Relaxed);
        let record = {
            let mut own = self.own.write();
            own.drains = drains;
            own.clone()
        };
        self.registry.update_server(&record)
    }

    /// Hands all partitions over to other servers, until `timeout`. Returns how many are left.
    pub(crate) fn drain_partitions(&self, timeout: Duration) -> usize {
        let deadline = Instant::now() + timeout;
        let mut is_recorded = false;
        loop {
            let own = self.life();
            let owned: Vec<usize> =
                (0..self.slots.len()).filter(|at| self.slots[*at].lock().holder.has_access()).collect();
            let others: Vec<u16> = {
                let servers = self.servers.read();
                let others = servers.values().filter(|server| server.life() != own && !server.drains);
                others.map(|server| server.server).collect()
            };
            if owned.is_empty() || others.is_empty() || Instant::now() >= deadline {
                return owned.len();
            }
            if !std::mem::replace(&mut is_recorded, true)
                && let Err(error) = self.set_drains(true)
            {
                tracing::warn!(%error, "cannot record in the directory that this server drains");
            }
            let mut handed_over = 0;
            for partition in owned {
                let to = claimant(partition, others.iter().copied()).expect("there are others");
                match self.run_handover(partition, to) {
                    Ok(()) => handed_over += 1,
                    // The balancer may be moving the partition.
                    Err(reason) => {
                        tracing::debug!(partition, to, reason, "cannot hand a partition over yet; retrying");
                    }
                }
                if Instant::now() >= deadline {
                    break;
                }
            }
            if handed_over == 0 {
                std::thread::park_timeout(DRAIN_RETRY_INTERVAL);
            }
        }
    }

    /// Measures and balances until the server stops.
    pub(crate) fn balance(self: &Arc<Self>) {
        let mut balancer = Balancer::default();
        let mut measured = Instant::now();
        while !self.stops.load(Ordering::Acquire) {
            std::thread::park_timeout(BALANCE_INTERVAL);
            if measured.elapsed() >= BALANCE_INTERVAL {
                measured = Instant::now();
                self.loads.update(&self.server().partition_requests(), measured);
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
        balancer.moved.retain(|_, at| at.elapsed() < MOVE_COOLDOWN);
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
                member.run_move(next);
                running.fetch_sub(1, Ordering::AcqRel);
                balancing.unpark();
            });
            if let Err(error) = spawned {
                let partition = next.partition;
                tracing::warn!(%error, partition, "cannot start a thread that moves a partition");
                balancer.running.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Plans moves and carries them out, whether or not this server is the balancer.
    pub(crate) fn balance_now(self: &Arc<Self>) -> Vec<(usize, u16)> {
        let Some(loads) = self.loads_of_all(|_| true) else { return Vec::new() };
        let moves = plan(&loads, self.slots.len());
        moves.iter().for_each(|next| self.run_move(*next));
        moves.into_iter().map(|next| (next.partition, next.to)).collect()
    }

    /// Returns the loads of all servers; `None` if one does not answer.
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

    /// Hands a partition over, or asks its owner to do so.
    fn run_move(&self, Move { partition, from, to }: Move) {
        let result = if from == self.life().host {
            self.run_handover(partition, to)
        } else {
            let Some(source) = self.server_record(from) else { return };
            match self.channels.ask_with_long_timeout(&source, &Ask::Move { partition, to }) {
                Ok(Answer::Done) => Ok(()),
                Ok(Answer::Declined(reason)) => Err(reason),
                Ok(other) => Err(format!("server {from} answered {other:?} to move")),
                Err(error) => Err(error.to_string()),
            }
        };
        match result {
            Ok(()) => tracing::info!(partition, from, to, "moved a partition"),
            Err(reason) => tracing::warn!(partition, from, to, reason, "cannot move a partition"),
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
