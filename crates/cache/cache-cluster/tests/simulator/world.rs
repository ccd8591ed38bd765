//! The world of a seed: directory, network, servers and clients.

use std::collections::BTreeMap;

use aquifer_cache_cluster::placement::{Move, PartitionLoad, ServerLoad, plan};
use aquifer_directory::sim::DirectoryWorld;
use aquifer_ownership::{Holder, Holding, Life, Stage};

use crate::clients::Clients;
use crate::handover::{Answer, Ask};
use crate::server::{KeptPartition, Request, Server};

/// Partitions of the cache.
pub const PARTITIONS: usize = 4;
/// Largest number of servers at a time.
const SERVERS_MAX: usize = 4;
/// Load of each partition, in the order of their numbers: the first one is hot.
const RATES: [f64; PARTITIONS] = [900.0, 300.0, 250.0, 200.0];
/// Steps without faults within which all requests and hand-overs must end.
const IDLE_STEPS: usize = 60_000;
/// Largest number of forwards of a request while no partition moves: usually two, but each server
/// may know an older place.
const FORWARDS_MAX: u32 = 8;

/// A rule that is broken on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// A source continues to serve while the target copies the remaining bytes.
    ServeLeaving,
    /// A server serves although its lease may have ended.
    IgnoreFence,
    /// Servers learn places from replies only, and not from the directory.
    IgnoreRecords,
    /// Attempts to hand a partition over with the same generation are not distinguished.
    ForgetAttempts,
    /// A server that starts resumes partitions of the keeper that another server has had since.
    AdoptAnything,
    /// Older places replace newer ones.
    LearnAnything,
    /// A source that aborts a hand-over serves again without checking whether the target owns it.
    RetractTransferred,
    /// A forwarded request is carried out after its client has received a failure.
    ServeLate,
}

impl Mutant {
    pub const ALL: [Self; 8] = [
        Self::ServeLeaving,
        Self::IgnoreFence,
        Self::IgnoreRecords,
        Self::AdoptAnything,
        Self::ForgetAttempts,
        Self::LearnAnything,
        Self::RetractTransferred,
        Self::ServeLate,
    ];
}

/// Counts of events in a seed.
#[derive(Clone, Copy, Default, Debug)]
pub struct Totals {
    pub hits: u64,
    pub forwards: u64,
    pub moves: u64,
    pub retracted: u64,
    pub claims: u64,
    pub moved_replies: u64,
    pub resumed: u64,
    pub expired: u64,
}

impl Totals {
    pub fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.forwards += other.forwards;
        self.moves += other.moves;
        self.retracted += other.retracted;
        self.claims += other.claims;
        self.moved_replies += other.moved_replies;
        self.resumed += other.resumed;
        self.expired += other.expired;
    }
}

/// A message between servers. If it is lost, its sender notices.
#[derive(Clone, Debug)]
pub enum Packet {
    Ask { from: Life, to: Life, number: u64, ask: Ask },
    Answer { to: Life, number: u64, answer: Option<Answer> },
    Forward { from: Life, to: u16, request: Request },
    Reply { to: Life, request: Request, reply: Reply },
}

/// The outcome of a forwarded request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// The request was served; a get has found this version, or nothing.
    Served(Option<u64>),
    /// The partition is on another server.
    Moved(aquifer_cache::store::presence::Place),
    /// The other server has ended before the request was sent.
    NotSent,
    /// The connection broke: the request was served, or not.
    Lost,
}

/// Numbers below a bound, from a seed.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).expect("below a usize")
    }

    pub fn one_in(&mut self, parts: usize) -> bool {
        self.below(parts) == 0
    }
}

pub struct World {
    pub random: Random,
    pub directory: DirectoryWorld,
    pub servers: Vec<Server>,
    pub packets: Vec<Packet>,
    pub clients: Clients,
    pub totals: Totals,
    pub mutant: Option<Mutant>,
    /// Losses of each partition's items.
    pub losses: [u64; PARTITIONS],
    /// Changes of each partition's owner.
    pub changes: [u64; PARTITIONS],
    pub wrong: Option<String>,
    /// Partitions that the keeper holds.
    pub kept: BTreeMap<usize, KeptPartition>,
    /// Whether faults have stopped.
    pub is_calm: bool,
    started: u64,
    /// Hand-overs that have begun.
    pub attempts: u64,
}

impl World {
    pub fn new(seed: u64, mutant: Option<Mutant>) -> Self {
        let mut world = Self {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            directory: DirectoryWorld::new(seed),
            servers: Vec::new(),
            packets: Vec::new(),
            clients: Clients::new(),
            totals: Totals::default(),
            mutant,
            losses: [0; PARTITIONS],
            changes: [0; PARTITIONS],
            wrong: None,
            kept: BTreeMap::new(),
            is_calm: false,
            started: 0,
            attempts: 0,
        };
        (0..3).for_each(|_| world.add_server());
        world
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The first violation.
    pub fn wrong(&self) -> Option<String> {
        self.wrong.clone()
    }

    pub fn fail(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }

    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn add_server(&mut self) {
        self.started += 1;
        if let Some(server) = Server::start(&self.directory, self.started) {
            self.servers.push(server);
            self.resume(self.servers.len() - 1);
        }
    }

    /// The index of a running server.
    pub fn place_of(&self, life: Life) -> Option<usize> {
        self.servers.iter().position(|server| server.life == life)
    }

    /// One random step.
    pub fn step(&mut self) {
        let kind = self.random.below(100);
        let at = self.random.below(self.servers.len());
        match kind {
            0..=44 => self.deliver(),
            45..=56 => self.refresh(at),
            57..=74 => self.ask_something(at),
            75..=80 => self.retry_waiting(at),
            81..=87 => {
                let partition = self.random.below(PARTITIONS);
                self.check_handover(at, partition);
            }
            88..=91 => self.balance(),
            92..=93 if !self.is_calm => self.fault(at),
            _ => self.move_one(at),
        }
        self.check_owners();
    }

    /// Runs without faults until all requests and hand-overs have ended.
    pub fn run_to_idle(&mut self) {
        self.is_calm = true;
        for server in &mut self.servers {
            server.directory.set_disconnected(false);
            server.set_drains(false);
        }
        while let Some(at) = self.servers.iter().position(|server| server.is_fenced) {
            self.begin_anew(at);
        }
        for _ in 0..IDLE_STEPS {
            self.step();
            if self.wrong.is_some() {
                return;
            }
        }
        self.clients.is_ending = true;
        for _ in 0..IDLE_STEPS {
            self.step();
            if self.wrong.is_some() || (self.clients.are_idle() && self.is_idle()) {
                break;
            }
        }
        if self.wrong.is_none() && !(self.clients.are_idle() && self.is_idle()) {
            let state = |server: &Server| {
                let holdings: Vec<_> = server.holders.iter().map(Holder::holding).collect();
                (server.life, server.drains, holdings, server.outgoing.clone(), server.incoming.clone())
            };
            let states: Vec<_> = self.servers.iter().map(state).collect();
            let (planned, packets) = (plan(&self.loads(), 1), &self.packets);
            self.fail(format!("not idle after {IDLE_STEPS} steps: {planned:?}, {packets:?}, {states:#?}"));
        }
    }

    fn is_idle(&self) -> bool {
        let owners = self.owners();
        let settled = |server: &Server| {
            (0..PARTITIONS).all(|partition| {
                matches!(
                    server.holders[partition].holding(),
                    Holding::Absent | Holding::Prepared { .. } | Holding::Owned { stage: Stage::Settled, .. }
                )
            })
        };
        owners.iter().all(|owners| owners.len() == 1)
            && self.servers.iter().all(settled)
            && plan(&self.loads(), 1).is_empty()
    }

    /// The servers that serve each partition.
    fn owners(&self) -> Vec<Vec<Life>> {
        let of = |partition: usize| {
            let serves = |server: &&Server| server.serves(partition, self.is(Mutant::IgnoreFence));
            self.servers.iter().filter(serves).map(|server| server.life).collect()
        };
        (0..PARTITIONS).map(of).collect()
    }

    fn check_owners(&mut self) {
        for (partition, owners) in self.owners().into_iter().enumerate() {
            if owners.len() > 1 {
                self.fail(format!("partition {partition} is served by {owners:?}"));
            }
        }
    }

    /// Delivers a packet, or loses it.
    fn deliver(&mut self) {
        if self.packets.is_empty() {
            return;
        }
        let at = self.random.below(self.packets.len());
        let packet = self.packets.swap_remove(at);
        if !self.is_calm && self.random.one_in(25) {
            return self.lose(packet);
        }
        match packet {
            Packet::Ask { from, to, number, ask } => {
                let answer = self.place_of(to).map(|at| self.answer(at, ask));
                self.packets.push(Packet::Answer { to: from, number, answer });
            }
            Packet::Answer { to, number, answer } => {
                if let Some(at) = self.place_of(to) {
                    self.answered(at, number, answer);
                }
            }
            Packet::Forward { from, to, request } => {
                match self.servers.iter().position(|server| server.life.host == to) {
                    Some(at) => self.serve(at, request, Some(from)),
                    None => self.packets.push(Packet::Reply { to: from, request, reply: Reply::NotSent }),
                }
            }
            Packet::Reply { to, request, reply } => {
                if let Some(at) = self.place_of(to) {
                    self.replied(at, request, reply);
                }
            }
        }
    }

    fn lose(&mut self, packet: Packet) {
        match packet {
            Packet::Ask { from, number, .. } | Packet::Answer { to: from, number, .. } => {
                if let Some(at) = self.place_of(from) {
                    self.answered(at, number, None);
                }
            }
            Packet::Forward { from: to, request, .. } | Packet::Reply { to, request, .. } => {
                self.packets.push(Packet::Reply { to, request, reply: Reply::Lost });
            }
        }
    }

    fn fault(&mut self, at: usize) {
        match self.random.below(10) {
            0 if self.servers.len() > 1 => self.kill(at),
            7 if self.servers.len() > 1 || self.random.one_in(4) => self.stop(at),
            1 | 2 if self.servers.len() < SERVERS_MAX => self.add_server(),
            3 => self.servers[at].is_fenced = true,
            4 if self.servers[at].is_fenced && self.random.one_in(2) => self.begin_anew(at),
            // The server does not notice that yet.
            4 if self.servers[at].is_fenced => self.servers[at].end_lease(&self.directory),
            8 => self.expire_request(),
            5 => {
                let calls = u32::try_from(self.random.below(4)).expect("small") + 1;
                self.servers[at].directory.fail(calls, crate::server::fault(self.random.one_in(2)));
            }
            6 => {
                let is_disconnected = self.random.one_in(3);
                self.servers[at].directory.set_disconnected(is_disconnected);
            }
            _ => {
                let drains = self.random.one_in(3);
                self.servers[at].set_drains(drains);
            }
        }
    }

    /// Fails a client's request that has waited too long. No server carries it out later.
    fn expire_request(&mut self) {
        let Some(request) = self.clients.expire_one(&mut self.random) else { return };
        self.totals.expired += 1;
        if self.is(Mutant::ServeLate) {
            return;
        }
        let is_it = |other: &Request| other.number == request.number;
        self.packets.retain(|packet| match packet {
            Packet::Forward { request, .. } | Packet::Reply { request, .. } => !is_it(request),
            Packet::Ask { .. } | Packet::Answer { .. } => true,
        });
        for server in &mut self.servers {
            server.waiting.retain(|(request, _)| !is_it(request));
        }
    }

    /// Stops a server: the keeper holds its partitions. If it was the only server, the next one
    /// starts.
    fn stop(&mut self, at: usize) {
        let server = self.servers.remove(at);
        self.kept.extend(server.kept());
        self.break_connections(server);
        if self.servers.is_empty() {
            self.add_server();
        }
    }

    /// Kills a server.
    fn kill(&mut self, at: usize) {
        let server = self.servers.remove(at);
        self.break_connections(server);
    }

    /// Restarts a server that notices the end of its lease.
    fn begin_anew(&mut self, at: usize) {
        let server = self.servers.remove(at);
        self.break_connections(server);
        self.add_server();
    }

    /// Loses all messages that a server has sent, also requests that wait at other servers.
    fn break_connections(&mut self, mut server: Server) {
        let life = server.life;
        let is_its = |packet: &Packet| match packet {
            Packet::Ask { from, .. } | Packet::Forward { from, .. } => *from == life,
            Packet::Answer { .. } | Packet::Reply { .. } => false,
        };
        self.packets.retain(|packet| !is_its(packet));
        for other in &mut self.servers {
            other.waiting.retain(|(_, from)| *from != Some(life));
        }
        let waiting = std::mem::take(&mut server.waiting);
        waiting.into_iter().for_each(|(request, from)| self.lose_request(request, from));
        // The outcome of its clients' requests is unknown.
        self.clients.disconnect(life);
        server.end_lease(&self.directory);
    }

    fn lose_request(&mut self, request: Request, from: Option<Life>) {
        if let Some(to) = from {
            self.packets.push(Packet::Reply { to, request, reply: Reply::Lost });
        }
    }

    /// The loads, as the balancer sees them.
    fn loads(&self) -> BTreeMap<u16, ServerLoad> {
        let load = |server: &Server| {
            let owned = (0..PARTITIONS).filter(|partition| server.holders[*partition].has_access());
            let partitions = owned.map(|partition| PartitionLoad {
                partition,
                rate: RATES[partition],
                bytes: 1,
                may_move: server.outgoing[partition].is_none(),
            });
            let partitions = partitions.collect();
            let load = ServerLoad { memory_bytes: 1 << 20, used_bytes: 0, drains: server.drains, partitions };
            (server.life.host, load)
        };
        self.servers.iter().filter(|server| !server.is_fenced).map(load).collect()
    }

    fn balance(&mut self) {
        for Move { partition, from, to } in plan(&self.loads(), 1) {
            if let Some(at) = self.servers.iter().position(|server| server.life.host == from) {
                self.begin_handover(at, partition, to);
            }
        }
    }

    fn move_one(&mut self, at: usize) {
        if self.is_calm {
            return;
        }
        let (partition, to) = (self.random.below(PARTITIONS), self.random.below(self.servers.len()));
        let to = self.servers[to].life.host;
        self.begin_handover(at, partition, to);
    }

    /// Forwards a request, and checks that it is not forwarded too often.
    pub fn forward(&mut self, at: usize, to: u16, mut request: Request) {
        let from = self.servers[at].life;
        self.totals.forwards += 1;
        request.forwards += 1;
        let changes = self.changes[request.partition()] - request.changes;
        if request.is_calm && changes == 0 && request.forwards > FORWARDS_MAX {
            let partition = request.partition();
            let state = |server: &Server| {
                let holding = server.holders[partition].holding();
                (server.life, server.presences[partition].get(), holding)
            };
            let states: Vec<_> = self.servers.iter().map(state).collect();
            self.fail(format!("{request:?} is forwarded again by {from:?}: {states:#?}"));
        }
        self.packets.push(Packet::Forward { from, to, request });
    }
}
