//! One schedule: several hosts, a few sections, many operations, and perhaps crashes. At the end
//! everything is freed, and nothing may be missing.

mod node;
mod restart;

use aquifer_fabric::sim::{Rng, SimFabric, SimOptions, SimTarget};
use aquifer_fabric::{Host, Key, Target, Tenant};
use aquifer_pool::op::{Action, Grant, GrantBatch, OpError};
use aquifer_pool::size::{SECTION_BYTES, SECTION_CHUNKS, SPAN_CHUNKS};
use aquifer_pool::word::SpanState;
use aquifer_pool::{NodeId, NodeMemory, SizeClass};

use aquifer_sim::asked_seed;
use node::NodeHost;
use restart::Restarts;

use crate::pool::client::{CLIENTS_MAX, OpOutcome, SimClient};
use crate::pool::model::{Change, PoolModel, SpanMode, ensure};

/// Counts of what happened, over many schedules.
#[derive(Default, Debug)]
pub struct PoolCounts {
    changes: [u64; 15],
    schedules: u64,
    crashes: u64,
    crashed_in_operation: u64,
    full: u64,
    /// Dead hosts that were recovered while others continued.
    recovered: u64,
    /// Crashes of hosts that were recovering another.
    crashed_recovering: u64,
    /// Groups that the node has cleared while others continued.
    cleared: u64,
    /// Allocations of several extents at once, and of stretches; and frees of several extents at
    /// once.
    batches: u64,
    stretches: u64,
    freed_together: u64,
    /// Processes that were killed and restarted, the frees that the next process has finished, and
    /// those that were left to a leak scan.
    restarts: u64,
    resumed: u64,
    left_to_scan: u64,
    /// Sections that went offline while others continued, and that were lent again.
    went_offline: u64,
    lent: u64,
}

impl PoolCounts {
    pub fn add(&mut self, other: &Self) {
        for (mine, others) in self.changes.iter_mut().zip(other.changes) {
            *mine += others;
        }
        self.schedules += 1;
        self.crashes += other.crashes;
        self.crashed_in_operation += other.crashed_in_operation;
        self.full += other.full;
        self.recovered += other.recovered;
        self.crashed_recovering += other.crashed_recovering;
        self.cleared += other.cleared;
        self.went_offline += other.went_offline;
        self.batches += other.batches;
        self.stretches += other.stretches;
        self.freed_together += other.freed_together;
        self.restarts += other.restarts;
        self.resumed += other.resumed;
        self.left_to_scan += other.left_to_scan;
        self.lent += other.lent;
    }

    /// Asserts that everything that can happen has happened often.
    pub fn assert_complete(&self) {
        assert!(self.changes.iter().all(|&count| count >= 10), "{self:?}");
        assert!(self.crashed_in_operation >= 100 && self.full >= 10, "{self:?}");
        assert!(self.recovered >= 100 && self.crashed_recovering >= 2, "{self:?}");
        assert!(self.batches >= 100 && self.stretches >= 10 && self.freed_together >= 100, "{self:?}");
        assert!(self.restarts >= 100 && self.resumed >= 100 && self.left_to_scan >= 10, "{self:?}");
        assert!(self.cleared >= 100 && self.went_offline >= 100 && self.lent >= 100, "{self:?}");
    }
}

struct Schedule {
    rng: Rng,
    fabric: SimFabric,
    target: SimTarget,
    node_memory: NodeMemory,
    model: PoolModel,
    clients: Vec<SimClient>,
    node_host: NodeHost,
    restarts: Restarts,
    /// Whether its processes are often killed during a free.
    is_of_restarts: bool,
    classes: &'static [u8],
    /// A client that does not poll for this number of steps, while others continue.
    stalled: Option<(usize, u64)>,
    counts: PoolCounts,
    /// Whether to print every change: when one schedule is played alone.
    trace: bool,
}

/// Mixes of size classes, each of which stresses some part of the protocol.
const MIXES: [&[u8]; 10] = [
    &[4, 4, 5],
    &[0],
    &[0, 0, 0, 1, 4],
    &[4, 4, 4, 3],
    &[4, 4, 5, 6, 9],
    &[3, 4, 4, 4, 4, 5, 5],
    &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    &[2, 3, 4, 8],
    &[5, 6, 7, 8, 9, 4],
    &[9, 9, 4],
];

/// Plays one schedule.
pub fn run(seed: u64) -> Result<PoolCounts, String> {
    let mut schedule = Schedule::new(seed);
    schedule.fill_most_spans()?;
    let bursts = 1 + schedule.rng.below(4);
    let crashes = [(); 2].map(|()| schedule.rng.below(2 * bursts));
    let count = if schedule.is_of_restarts { 12 } else { 2 };
    let restarts: Vec<u64> = (0..count).map(|_| schedule.rng.below(2 * bursts)).collect();
    for burst in 0..bursts {
        let rounds = 2 + schedule.rng.below(14);
        let mut during = |events: &[u64]| -> Vec<u64> {
            let now = events.iter().filter(|at| **at == burst);
            now.map(|_| schedule.rng.below(rounds * 12)).collect()
        };
        let (crashes, restarts) = (during(&crashes), during(&restarts));
        schedule.play(rounds, &crashes, &restarts)?;
        schedule.hints_are_right()?;
        schedule.all_keys_are_in_place()?;
    }
    schedule.free_all()?;
    schedule.recover_all()?;
    schedule.scan_all_for_leaks()?;
    schedule.lend_all()?;
    schedule.nothing_is_leaked()?;
    schedule.wrong_frees_are_refused()?;
    schedule.all_can_be_allocated_again()?;
    Ok(schedule.counts)
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let spread = 1 + rng.below(30_000);
        let options = SimOptions { delay_ns: 100..100 + spread, ..SimOptions::default() };
        let fabric = SimFabric::new(rng.next_u64(), options);
        let target = fabric.add_node();
        let sections = 1 + rng.below(3);
        let lent = 1 + rng.below(sections);
        let node_memory = NodeMemory::create_resizable(
            &target,
            NodeId(1),
            lent * SECTION_BYTES,
            sections * SECTION_BYTES,
            None,
        );
        let node_memory = node_memory.expect("a small pool");
        let is_of_restarts = rng.chance(1, 3);
        // Sometimes a host has two clients, as with two threads.
        let per_host = if is_of_restarts { 2 } else { 1 + rng.below(2) };
        let count = (2 + rng.below(3)) * per_host;
        let tenants = 1 + u32::try_from(rng.below(2)).unwrap();
        let client = |i| {
            let host = Host(u16::try_from(1 + i / per_host).unwrap());
            let tenant = Tenant(u32::from(host.0) % tenants);
            let who = (host, tenant);
            let number = 1 + u32::try_from(i).unwrap();
            SimClient::new((&fabric, target.node()), node_memory.layout, who, number)
        };
        let who = (Host::NODE, Tenant(u32::MAX));
        let node_host = SimClient::new((&fabric, target.node()), node_memory.layout, who, 0);
        let node_host = NodeHost::new(node_host, &node_memory);
        let clients: Vec<SimClient> = (0..count).map(client).collect();
        if rng.chance(1, 2) {
            let slowness_max = if rng.chance(1, 2) { 4 } else { 30 };
            let slow = clients[rng.index(clients.len())].host;
            fabric.slow(slow, 2 + rng.below(slowness_max));
        }
        let mixes = if is_of_restarts { &MIXES[..4] } else { &MIXES[..] };
        let classes = mixes[rng.index(mixes.len())];
        let model = PoolModel::new(&node_memory);
        Self {
            rng,
            fabric,
            target,
            node_memory,
            model,
            clients,
            node_host,
            restarts: Restarts::new(count),
            is_of_restarts,
            classes,
            stalled: None,
            counts: PoolCounts::default(),
            trace: asked_seed().is_some(),
        }
    }

    /// Usually, one host allocates most spans, so that all clients share the rest.
    fn fill_most_spans(&mut self) -> Result<(), String> {
        let spans = self.node_memory.layout.spans();
        if self.rng.chance(1, 3) {
            return Ok(());
        }
        let shared = 1 + u32::try_from(self.rng.below(5)).unwrap();
        for _ in shared..spans {
            let ended = self.alone(0, |client| client.alloc(SizeClass::SPAN))?;
            self.ended(0, ended)?;
        }
        let client = &mut self.clients[0];
        client.kept.append(&mut client.owned);
        Ok(())
    }

    /// All clients allocate and free at random, at the same time.
    fn play(&mut self, rounds: u64, crashes: &[u64], restarts: &[u64]) -> Result<(), String> {
        let mut left = vec![rounds; self.clients.len()];
        let mut steps = 0;
        loop {
            for (index, left) in left.iter_mut().enumerate() {
                let client = &self.clients[index];
                if client.alive && client.is_idle() && *left > 0 && self.rng.chance(1, 2) {
                    *left -= 1;
                    self.begin_operation(index)?;
                }
            }
            self.begin_node_task()?;
            if crashes.contains(&steps) {
                self.crash();
            }
            if restarts.contains(&steps) {
                self.restart();
            }
            steps += 1;
            let waiting = left.iter().zip(&self.clients).any(|(left, client)| client.alive && *left > 0);
            if !self.step()? && !waiting {
                return Ok(());
            }
        }
    }

    fn begin_operation(&mut self, index: usize) -> Result<(), String> {
        if self.clients[index].has_unfinished() && self.rng.chance(2, 3) {
            let ended = self.clients[index].resume();
            return ended.map_or(Ok(()), |ended| self.ended(index, ended));
        }
        if let Some(dead) = self.choose_dead_host(index) {
            let ended = self.clients[index].recover(dead);
            return ended.map_or(Ok(()), |ended| self.ended(index, ended));
        }
        let owned = self.clients[index].owned.len();
        let ended = if owned > 0 && (owned > 8 || self.rng.chance(1, 2)) {
            let which = self.rng.index(owned);
            let client = &mut self.clients[index];
            let grant = client.owned.swap_remove(which);
            let is_near = |other: &mut Grant| grant.class.is_within_span() && shares_span(other, &grant);
            let mut grants = vec![grant];
            if self.rng.chance(1, 4) {
                grants.extend(client.owned.extract_if(.., is_near));
            }
            client.free(&grants)
        } else {
            let k = self.classes[self.rng.index(self.classes.len())];
            let sections = self.node_memory.layout.sections();
            if SizeClass::new(k) == Some(SizeClass::SECTION) && sections > 1 && self.rng.chance(5, 6) {
                let more = if self.rng.chance(1, 4) { self.rng.below(u64::from(sections) - 1) } else { 0 };
                self.clients[index].stretch(2 + u32::try_from(more).unwrap())
            } else if self.rng.chance(1, 3) {
                let count = 1 + u32::try_from(self.rng.below(4)).unwrap();
                self.clients[index].alloc_many(SizeClass::new(k).unwrap(), count)
            } else {
                self.clients[index].alloc(SizeClass::new(k).unwrap())
            }
        };
        ended.map_or(Ok(()), |ended| self.ended(index, ended))
    }

    fn crash(&mut self) {
        let host = self.clients[self.rng.index(self.clients.len())].host;
        if self.is_dead(host) || self.clients.iter().all(|client| client.host == host || !client.alive) {
            return;
        }
        self.fabric.crash_host(host);
        self.counts.crashes += 1;
        for client in self.clients.iter_mut().filter(|client| client.host == host) {
            client.alive = false;
            self.counts.crashed_in_operation += u64::from(!client.is_idle());
            self.counts.crashed_recovering += u64::from(client.is_recovering());
        }
    }

    /// Chooses, now and then, a dead host to recover. It is fenced first, so that its operations in
    /// flight take no effect.
    fn choose_dead_host(&mut self, index: usize) -> Option<Host> {
        let dead: Vec<Host> =
            self.clients.iter().filter(|client| !client.alive).map(|client| client.host).collect();
        if dead.is_empty() || !self.rng.chance(1, 4) {
            return None;
        }
        let host = dead[self.rng.index(dead.len())];
        self.fence(host);
        (host != self.clients[index].host).then_some(host)
    }

    fn fence(&mut self, host: Host) {
        if !self.model.dead.contains(&host) {
            self.target.fence(host, 1);
            self.model.dead.push(host);
        }
    }

    fn is_dead(&self, host: Host) -> bool {
        self.clients.iter().any(|client| client.host == host && !client.alive)
    }

    /// Lets the next event happen and checks it; false if nothing is in flight.
    fn step(&mut self) -> Result<bool, String> {
        let all = self.clients.iter().chain(std::iter::once(&self.node_host.client));
        let posted = all.filter_map(|client| Some((client.host, client.posted.clone()?)));
        let in_flight: Vec<(Host, Action)> = posted.chain(self.restarts.in_flight()).collect();
        if !self.fabric.step() && self.stalled.take().is_none() {
            return Ok(false);
        }
        self.stall();
        if let Some(change) = self.model.observe(&self.node_memory, &in_flight)? {
            if self.trace {
                println!("{:>9} ns: {change:?}", self.fabric.now_ns());
            }
            self.counts.changes[change as usize] += 1;
        }
        if let Some(ended) = self.node_host.client.poll() {
            self.node_task_ended(ended)?;
        }
        for index in 0..self.clients.len() {
            let is_stalled = self.stalled.is_some_and(|(stalled, _)| stalled == index);
            if self.clients[index].alive
                && !is_stalled
                && let Some(ended) = self.clients[index].poll()
            {
                self.ended(index, ended)?;
            }
        }
        Ok(true)
    }

    /// Stalls a client for a while, now and then.
    fn stall(&mut self) {
        self.stalled = match self.stalled {
            Some((client, steps)) => steps.checked_sub(1).map(|steps| (client, steps)),
            None if self.rng.chance(1, 100) => {
                Some((self.rng.index(self.clients.len()), self.rng.below(200)))
            }
            None => None,
        };
    }

    fn ended(&mut self, index: usize, ended: OpOutcome) -> Result<(), String> {
        if self.trace {
            println!("{:>9} ns: client {index}: {ended:?}", self.fabric.now_ns());
        }
        match ended {
            OpOutcome::Alloc(Ok(grant)) => self.granted(index, grant)?,
            OpOutcome::Many(Ok(GrantBatch { grants, failure: None })) => {
                self.counts.batches += u64::from(grants.len() > 1);
                grants.into_iter().try_for_each(|grant| self.granted(index, grant))?;
            }
            OpOutcome::Stretch(sections, Ok(first)) => {
                self.counts.stretches += 1;
                for section in 0..sections {
                    let chunk = first.chunk + section * SECTION_CHUNKS;
                    self.granted(index, Grant { chunk, ..first })?;
                }
            }
            OpOutcome::Alloc(Err(OpError::Full))
            | OpOutcome::Many(Err(OpError::Full))
            | OpOutcome::Stretch(_, Err(OpError::Full)) => {
                self.counts.full += 1;
            }
            OpOutcome::Resumed(grant, attempt, outcome) => self.resumed(index, grant, attempt, &outcome)?,
            OpOutcome::Free(Ok(outcomes)) => {
                self.counts.freed_together += u64::from(outcomes.len() > 1);
                ensure!(outcomes.iter().all(Result::is_ok), "client {index}: {outcomes:?}");
            }
            OpOutcome::Recover(dead, Ok(recovered)) => {
                ensure!(!self.model.owns_anything(dead), "{dead:?} still owns something after {recovered:?}");
                ensure!(recovered.unowned == 0, "no record names the owner of some chunks: {recovered:?}");
                self.counts.recovered += u64::from(recovered.extents > 0);
            }
            other => return Err(format!("client {index}: {other:?}")),
        }
        Ok(())
    }

    fn granted(&mut self, index: usize, grant: Grant) -> Result<(), String> {
        let host = self.clients[index].host;
        let chunks = grant.chunk..grant.chunk + grant.class.chunks();
        let ours = chunks.clone().all(|c| self.model.owners[c as usize] == Some(host));
        ensure!(ours, "{host:?} is granted {grant:?} but does not own it");
        let alive = self.clients.iter().filter(|client| client.alive);
        let others = alive.flat_map(|client| client.owned.iter().chain(&client.kept));
        let twice = others.filter(|other| overlap(other, &grant)).count();
        ensure!(twice == 0, "{grant:?} is owned twice");
        let tenant = self.clients[index].tenant;
        self.model.granted_to(&self.node_memory, &grant, tenant)?;
        self.clients[index].owned.push(grant);
        Ok(())
    }

    /// Runs one operation of a client to its end, while no other operation is in progress.
    fn alone(
        &mut self,
        index: usize,
        start: impl FnOnce(&mut SimClient) -> Option<OpOutcome>,
    ) -> Result<OpOutcome, String> {
        let mut ended = start(&mut self.clients[index]);
        while ended.is_none() {
            let posted = self.clients[index].posted.clone();
            let in_flight: Vec<(Host, Action)> =
                posted.map(|action| (self.clients[index].host, action)).into_iter().collect();
            ensure!(self.fabric.step(), "an operation waits, and nothing is in flight");
            self.model.observe(&self.node_memory, &in_flight)?;
            ended = self.clients[index].poll();
        }
        ended.ok_or_else(|| "no end".to_owned())
    }

    fn free_all(&mut self) -> Result<(), String> {
        for client in &mut self.clients {
            client.owned.append(&mut client.kept);
        }
        loop {
            for index in 0..self.clients.len() {
                let client = &mut self.clients[index];
                if !client.alive || !client.is_idle() {
                    continue;
                }
                let ended = match client.owned.pop() {
                    Some(grant) => client.free(&[grant]),
                    None if client.has_unfinished() => client.resume(),
                    None => None,
                };
                if let Some(ended) = ended {
                    self.ended(index, ended)?;
                }
            }
            let has_more = |client: &SimClient| !client.owned.is_empty() || client.has_unfinished();
            let more = self.clients.iter().any(|client| client.alive && has_more(client));
            if !self.step()? && !more {
                return Ok(());
            }
        }
    }

    /// Recovers all dead hosts, while no other operation is in progress.
    fn recover_all(&mut self) -> Result<(), String> {
        let Some(alive) = self.clients.iter().position(|client| client.alive) else { return Ok(()) };
        for index in 0..self.clients.len() {
            let dead = self.clients[index].host;
            if self.is_dead(dead) {
                self.fence(dead);
                let ended = self.alone(alive, |client| client.recover(dead))?;
                self.ended(alive, ended)?;
            }
        }
        Ok(())
    }

    /// Checks, while nothing is in flight, that each span with a full hint is full, unless the
    /// client that should have cleared the hint is dead or was killed.
    fn hints_are_right(&self) -> Result<(), String> {
        let may_owe_hint = |client: &SimClient| !client.alive || client.has_unfinished();
        let is_hint_owed = self.restarts.has_suspects() || self.clients.iter().any(may_owe_hint);
        for span in 0..self.node_memory.layout.spans() {
            let (mode, state) = (self.model.modes[span as usize], self.model.state_of(span));
            let is_hinted_full = mode == SpanMode::Chunks && state == SpanState::Full;
            let right = !is_hinted_full || self.model.span(span).is_full() || is_hint_owed;
            ensure!(right, "span {span} has a full hint that is never cleared, and is not full");
        }
        Ok(())
    }

    /// Checks that the key of each extent that a client owns is in its entry.
    fn all_keys_are_in_place(&self) -> Result<(), String> {
        for client in self.clients.iter().filter(|client| client.alive) {
            let mut held = client.owned.iter().chain(&client.kept);
            held.try_for_each(|grant| self.model.has_key(&self.node_memory, grant, client.tenant))?;
        }
        Ok(())
    }

    /// Checks that every chunk is free: live hosts have freed all, and dead hosts were recovered.
    fn nothing_is_leaked(&self) -> Result<(), String> {
        let owned = self.model.owners.iter().position(Option::is_some);
        ensure!(owned.is_none(), "chunk {owned:?} is lost");
        for span in 0..self.node_memory.layout.spans() {
            let (mode, state) = (self.model.modes[span as usize], self.model.state_of(span));
            let right =
                mode == SpanMode::Closed && state == SpanState::Empty && self.model.span(span).is_closed();
            ensure!(right, "at the end span {span} is {mode:?}, {state:?}");
        }
        Ok(())
    }

    /// Checks that frees of free memory are refused and change nothing.
    fn wrong_frees_are_refused(&mut self) -> Result<(), String> {
        let Some(index) = self.clients.iter().position(|client| client.alive) else {
            return Ok(());
        };
        for k in 0..SizeClass::COUNT {
            let class = SizeClass::new(k).unwrap();
            let places = self.node_memory.layout.chunks() / class.chunks();
            let chunk = u32::try_from(self.rng.below(places.into())).unwrap() * class.chunks();
            let grant = Grant { chunk, class, key: Key::of_run(k, CLIENTS_MAX - 1) };
            let owners = &self.model.owners[chunk as usize..(chunk + class.chunks()) as usize];
            if owners.iter().all(Option::is_some) {
                continue;
            }
            let before = self.model.owners.clone();
            let ended = self.alone(index, |client| client.free(&[grant]))?;
            let refused = match &ended {
                OpOutcome::Free(Ok(outcomes)) => {
                    matches!(outcomes[0], Err(OpError::NotAllocated | OpError::NotOurs(_)))
                }
                _ => false,
            };
            ensure!(refused, "{grant:?} was not allocated, and yet it could be freed: {ended:?}");
            ensure!(self.model.owners == before, "a refused free of {grant:?} changed something");
        }
        Ok(())
    }

    /// Checks that all free memory can be allocated by a client whose cached words are out of date.
    fn all_can_be_allocated_again(&mut self) -> Result<(), String> {
        let alive: Vec<usize> = (0..self.clients.len()).filter(|&index| self.clients[index].alive).collect();
        let class = SizeClass::SECTION;
        let expected = self.node_memory.layout.sections();
        for &index in &alive {
            self.clear_all()?;
            let mut allocated = Vec::new();
            loop {
                match self.alone(index, |client| client.alloc(class))? {
                    OpOutcome::Alloc(Ok(grant)) => allocated.push(grant),
                    OpOutcome::Alloc(Err(OpError::Full)) => break,
                    other => return Err(format!("client {index}: {other:?}")),
                }
            }
            ensure!(
                allocated.len() == expected as usize,
                "{} of {expected} could be allocated",
                allocated.len()
            );
            // The other clients cache that all is full, before it is freed.
            for &other in &alive {
                let full = self.alone(other, |client| client.alloc(class))?;
                ensure!(matches!(full, OpOutcome::Alloc(Err(OpError::Full))), "full, and yet {full:?}");
            }
            for grant in allocated {
                let ended = self.alone(index, |client| client.free(&[grant]))?;
                let is_freed = matches!(&ended, OpOutcome::Free(Ok(outcomes)) if outcomes[0].is_ok());
                ensure!(is_freed, "{grant:?} could not be freed: {ended:?}");
            }
        }
        Ok(())
    }
}

fn shares_span(a: &Grant, b: &Grant) -> bool {
    a.class.is_within_span() && a.chunk / SPAN_CHUNKS == b.chunk / SPAN_CHUNKS
}

fn overlap(a: &Grant, b: &Grant) -> bool {
    a.chunk < b.chunk + b.class.chunks() && b.chunk < a.chunk + a.class.chunks()
}

/// [`PoolCounts::changes`] has a place for each change.
const _: () = assert!(Change::Recover as usize == 14);
