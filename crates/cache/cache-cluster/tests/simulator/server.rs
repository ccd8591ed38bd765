//! A simulated server: its state, its claims, and how it serves requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aquifer_cache::store::presence::{Presence, PresenceCell};
use aquifer_cache_cluster::placement;
use aquifer_cache_cluster::records::{CacheKey, Claim, Registry, ServerRecord};
use aquifer_directory::names::decode;
use aquifer_directory::sim::{CallFault, DirectoryWorld, SimDirectory};
use aquifer_directory::{Directory, Lease};
use aquifer_ownership::{Holder, Holding, Life, SegmentRecord, Stage};

use crate::handover::{Ask, IncomingHandover, OutgoingHandover};
use crate::world::{Mutant, PARTITIONS, Packet, Reply, World};

/// Lifetime of leases, longer than a seed: leases end when the world ends them.
const TTL: Duration = Duration::from_hours(1);

pub fn fault(has_effect: bool) -> CallFault {
    if has_effect { CallFault::AnswerLost } else { CallFault::Lost }
}

/// A partition that the keeper holds.
#[derive(Clone, Debug)]
pub struct KeptPartition {
    pub record: SegmentRecord,
    pub items: BTreeMap<usize, u64>,
}

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    Get,
    /// Stores this version.
    Set(u64),
}

/// A request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub client: usize,
    pub number: u64,
    pub key: usize,
    pub operation: Operation,
    /// Number of times that the request was forwarded.
    pub forwards: u32,
    /// Whether faults had stopped when the request began.
    pub is_calm: bool,
    /// Number of changes of the partition's owner when the request began.
    pub changes: u64,
    /// Number of losses of the partition's items when the request began.
    pub losses: u64,
}

impl Request {
    pub fn partition(&self) -> usize {
        self.key % PARTITIONS
    }
}

pub struct Server {
    pub life: Life,
    lease: Lease,
    pub directory: SimDirectory,
    pub registry: Registry,
    pub holders: Vec<Holder>,
    pub presences: Vec<PresenceCell>,
    pub items: Vec<BTreeMap<usize, u64>>,
    pub outgoing: Vec<Option<OutgoingHandover>>,
    pub incoming: Vec<Option<IncomingHandover>>,
    /// Requests to other servers without an answer yet, by number.
    pub asks: BTreeMap<u64, Ask>,
    pub last_ask: u64,
    /// Servers, as last read from the directory.
    pub known: BTreeMap<u16, ServerRecord>,
    /// Records of partitions, as last read from the directory.
    records: Vec<Option<SegmentRecord>>,
    /// Requests that wait, with the server that has forwarded them.
    pub waiting: Vec<(Request, Option<Life>)>,
    /// Whether the server's lease may have ended: it serves no partition of its own.
    pub is_fenced: bool,
    pub drains: bool,
}

impl Server {
    pub fn start(world: &DirectoryWorld, name: u64) -> Option<Self> {
        let directory = world.host(name);
        let registry = Registry::new(Arc::new(directory.clone()), "sim");
        let lease = directory.lease_grant(TTL).ok()?;
        let address = "127.0.0.1:1".parse().ok()?;
        let record = ServerRecord {
            server: 0,
            epoch: 0,
            address,
            memory_address: address,
            machine: String::new(),
            memory_socket: String::new(),
            clients: Vec::new(),
            memory_bytes: 1 << 20,
            drains: false,
        };
        let record = registry.add_server(&record, lease).ok()?;
        let life = record.life();
        let presence = |_| {
            let cell = PresenceCell::here();
            cell.set(Presence::Unknown);
            cell
        };
        Some(Self {
            life,
            lease,
            directory,
            registry,
            holders: vec![Holder::absent(life); PARTITIONS],
            presences: (0..PARTITIONS).map(presence).collect(),
            items: vec![BTreeMap::new(); PARTITIONS],
            outgoing: vec![None; PARTITIONS],
            incoming: vec![None; PARTITIONS],
            asks: BTreeMap::new(),
            last_ask: 0,
            known: BTreeMap::from([(life.host, record)]),
            records: vec![None; PARTITIONS],
            waiting: Vec::new(),
            is_fenced: false,
            drains: false,
        })
    }

    /// Whether the server serves requests for a partition.
    pub fn serves(&self, partition: usize, ignores_fence: bool) -> bool {
        self.presences[partition].is_here() && (!self.is_fenced || ignores_fence)
    }

    /// Whether another server lives, as far as this one knows.
    pub fn knows(&self, life: Life) -> bool {
        self.known.get(&life.host).is_some_and(|record| record.epoch == life.epoch)
    }

    pub fn set_drains(&mut self, drains: bool) {
        self.drains = drains;
        if let Some(record) = self.known.get(&self.life.host) {
            // If this fails, the other servers do not know that this one drains.
            let _ = self.registry.update_server(&ServerRecord { drains, ..record.clone() });
        }
    }

    /// Returns the partitions that the keeper holds after the server's end: those that the server
    /// owns and does not hand over.
    pub fn kept(&self) -> impl Iterator<Item = (usize, KeptPartition)> {
        let owned = |partition: usize| match self.holders[partition].holding() {
            Holding::Owned { generation, stage: Stage::Settled } if self.outgoing[partition].is_none() => {
                let record = SegmentRecord::new(self.life, generation);
                Some((partition, KeptPartition { record, items: self.items[partition].clone() }))
            }
            _ => None,
        };
        (0..PARTITIONS).filter_map(owned)
    }

    pub fn end_lease(&self, world: &DirectoryWorld) {
        // Fails if the lease has ended.
        let _ = world.expire(self.lease.id);
    }

    /// Reads all records from the directory.
    fn list(&mut self) -> Option<()> {
        let (entries, _) = self.registry.list().ok()?;
        self.known.clear();
        self.records.fill(None);
        for entry in &entries {
            match self.registry.parse_key(&entry.key)? {
                CacheKey::Server(number) => drop(self.known.insert(number, decode(entry).ok()?)),
                CacheKey::Partition(partition) => self.records[partition] = Some(decode(entry).ok()?),
            }
        }
        Some(())
    }

    fn is_absent(&self, partition: usize) -> bool {
        matches!(self.holders[partition].holding(), Holding::Absent | Holding::Prepared { .. })
    }

    fn place_all(&self) {
        for (partition, cell) in self.presences.iter().enumerate() {
            let known = cell.get();
            if !self.is_absent(partition) || matches!(known, Presence::Here | Presence::Leaving) {
                continue;
            }
            let lives = |life| life != self.life && self.knows(life);
            let is_server = |server| self.known.contains_key(&server);
            cell.set(placement::elsewhere(self.records[partition].as_ref(), known, lives, is_server));
        }
    }

    /// Returns the partitions that this server claims now.
    fn claims(&self, is_late: bool) -> Vec<Claim> {
        let claim = |partition: &usize| {
            let record = self.records[*partition].as_ref();
            let servers = self.known.values().map(|server| (server.server, server.drains));
            let claimants = placement::claimants(servers);
            self.is_absent(*partition)
                && self.incoming[*partition].is_none()
                && placement::may_claim(record, self.life, |life| self.knows(life))
                && placement::should_claim((*partition, record), self.life, is_late, &claimants)
        };
        let claimed = (0..PARTITIONS).filter(claim);
        claimed.map(|partition| Claim { partition, record: self.records[partition].clone() }).collect()
    }
}

impl World {
    /// Reads the directory at a server, which claims partitions that no server owns.
    pub fn refresh(&mut self, at: usize) {
        let is_late = self.random.one_in(3);
        let ignores_records = self.is(Mutant::IgnoreRecords);
        let server = &mut self.servers[at];
        if server.list().is_none() {
            return;
        }
        if !ignores_records {
            server.place_all();
        }
        if !server.knows(server.life) {
            return;
        }
        let claims = server.claims(is_late);
        let Ok(claimed) = server.registry.claim(server.life, &claims) else { return };
        for (partition, generation) in claimed {
            let server = &mut self.servers[at];
            server.holders[partition] = Holder::owner(server.life, generation);
            server.items[partition].clear();
            server.presences[partition].set(Presence::Here);
            self.losses[partition] += 1;
            self.changes[partition] += 1;
            self.totals.claims += 1;
        }
    }

    /// Resumes the partitions that the keeper holds at a server that starts, if no server has had
    /// them since.
    pub fn resume(&mut self, at: usize) {
        let adopts_anything = self.is(Mutant::AdoptAnything);
        for (partition, kept) in std::mem::take(&mut self.kept) {
            let server = &self.servers[at];
            let record = if adopts_anything {
                server.registry.observe(partition, None).ok().flatten().map(|(record, _)| record)
            } else {
                Some(kept.record)
            };
            let claimed = server.registry.claim(server.life, &[Claim { partition, record }]);
            let Some(&(_, generation)) = claimed.ok().as_ref().and_then(|claimed| claimed.first()) else {
                continue;
            };
            let server = &mut self.servers[at];
            server.holders[partition] = Holder::owner(server.life, generation);
            server.items[partition] = kept.items;
            server.presences[partition].set(Presence::Here);
            self.changes[partition] += 1;
            self.totals.resumed += 1;
        }
    }

    /// Serves a request of a client of this server, or of another server.
    pub fn serve(&mut self, at: usize, request: Request, from: Option<Life>) {
        let partition = request.partition();
        let (serves_leaving, ignores_fence) = (self.is(Mutant::ServeLeaving), self.is(Mutant::IgnoreFence));
        let server = &mut self.servers[at];
        let presence = match server.presences[partition].get() {
            Presence::Leaving if serves_leaving => Presence::Here,
            Presence::Here if server.is_fenced && !ignores_fence => Presence::Leaving,
            presence => presence,
        };
        match presence {
            Presence::Here => {
                let items = &mut server.items[partition];
                let found = match request.operation {
                    Operation::Get => items.get(&request.key).copied(),
                    Operation::Set(version) => {
                        items.insert(request.key, version);
                        None
                    }
                };
                self.reply(request, from, Reply::Served(found));
            }
            Presence::Elsewhere(place) if from.is_some() => self.reply(request, from, Reply::Moved(place)),
            // The server has claimed the partition, and has not applied that yet.
            Presence::Elsewhere(place) if place.server == server.life.host => {
                server.waiting.push((request, from));
            }
            Presence::Elsewhere(place) => self.forward(at, place.server, request),
            Presence::Leaving | Presence::Unknown => server.waiting.push((request, from)),
        }
    }

    fn reply(&mut self, request: Request, from: Option<Life>, reply: Reply) {
        match (from, reply) {
            (Some(to), reply) => self.packets.push(Packet::Reply { to, request, reply }),
            (None, Reply::Served(found)) => self.done(request, found),
            (None, _) => {}
        }
    }

    /// Delivers the reply to a forwarded request.
    pub fn replied(&mut self, at: usize, request: Request, reply: Reply) {
        match reply {
            Reply::Served(found) => self.done(request, found),
            Reply::Moved(place) => {
                let learns_anything = self.is(Mutant::LearnAnything);
                let cell = &self.servers[at].presences[request.partition()];
                if learns_anything {
                    cell.set(Presence::Elsewhere(place));
                } else {
                    cell.learn(place);
                }
                self.totals.moved_replies += 1;
                self.serve(at, request, None);
            }
            Reply::NotSent => self.servers[at].waiting.push((request, None)),
            // Reads are retried.
            Reply::Lost if request.operation == Operation::Get => self.serve(at, request, None),
            Reply::Lost => self.clients.unknown(request),
        }
    }

    /// Retries the requests of a server that wait for a partition.
    pub fn retry_waiting(&mut self, at: usize) {
        for (request, from) in std::mem::take(&mut self.servers[at].waiting) {
            self.serve(at, request, from);
        }
    }
}
