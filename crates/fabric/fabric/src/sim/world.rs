//! The state of a simulated fabric, and the events that change it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};

use super::link::{InFlightOp, SimLink};
use super::{Rng, SimNodeId, SimOptions};
use crate::Memory;
use crate::handshake::RefusalReason;
use crate::key_table::PlacedTable;
use crate::keys::{AddressSpace, KeyGrant, KeySlots, Right, admits};
use crate::limits::ANNOUNCED_MAX;
use crate::target::{Host, Identity, Region, Scope};
use crate::unit_map::RegionMemory;
use crate::work::{Completion, EndpointError, Key, LocalSlice, PostError, RemoteAddr, Verb, Work, WorkError};

/// The greatest time until an endpoint detects that its node has crashed.
const CRASH_NOTICE_NS: u64 = 1_000_000;
/// Number of checks within the timeout whether a stopped node was resumed.
const STOPPED_CHECKS: u64 = 100;
/// The greatest factor by which strays are slower than other operations.
const STRAY_FACTOR_MAX: u64 = 64;

/// The whole state of a simulated fabric.
#[derive(Debug)]
pub(super) struct FabricWorld {
    pub options: SimOptions,
    pub now_ns: u64,
    rng: Rng,
    events: BinaryHeap<Reverse<ScheduledEvent>>,
    serial: u64,
    pub nodes: Vec<SimNode>,
    pub links: Vec<SimLink>,
    cuts: HashSet<(Host, SimNodeId)>,
    stopped: HashSet<SimNodeId>,
    /// Polls play no event after this time.
    pub polled_until_ns: u64,
    slowness: HashMap<Host, u64>,
    slow_nodes: HashMap<SimNodeId, u64>,
}

/// A scheduled event. The earliest comes first, then the order of scheduling applies.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ScheduledEvent {
    at_ns: u64,
    serial: u64,
    link: usize,
    event: SimEvent,
}

#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
enum SimEvent {
    /// An operation reaches the node.
    Apply(u64),
    /// The answer to an operation reaches the host.
    Complete(u64),
    /// A message from the node reaches the host.
    Deliver(Vec<u8>),
    /// The timeout of operations that wait from this time on for a stopped node.
    EndWait(u64),
    /// The host detects the loss of the peer.
    Fail(FailCause),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum FailCause {
    Timeout,
    PeerGone,
}

/// The state of a memory node.
#[derive(Debug)]
pub(super) struct SimNode {
    pub alive: bool,
    /// The regions by slot.
    pub regions: BTreeMap<usize, SimRegion>,
    pub space: AddressSpace,
    pub keys: KeySlots,
    pub grants: HashMap<Key, KeyGrant>,
    pub fenced: HashMap<Host, u64>,
    /// Waiting messages, each with the index of its connection.
    pub inbox: VecDeque<(usize, Vec<u8>)>,
}

/// A registered region.
#[derive(Debug)]
pub(super) struct SimRegion {
    pub memory: RegionMemory,
    pub scope: Scope,
    pub region: Region,
    pub table: Option<PlacedTable>,
}

impl FabricWorld {
    pub fn new(seed: u64, options: SimOptions) -> Self {
        Self {
            options,
            now_ns: 0,
            rng: Rng::new(seed),
            events: BinaryHeap::new(),
            serial: 0,
            nodes: Vec::new(),
            links: Vec::new(),
            cuts: HashSet::new(),
            stopped: HashSet::new(),
            polled_until_ns: u64::MAX,
            slowness: HashMap::new(),
            slow_nodes: HashMap::new(),
        }
    }

    pub fn add_node(&mut self) -> SimNodeId {
        let secret = self.rng.next_u64();
        self.nodes.push(SimNode {
            alive: true,
            regions: BTreeMap::new(),
            space: AddressSpace::default(),
            keys: KeySlots::new(self.options.regions_max, self.options.windows_max, secret),
            grants: HashMap::new(),
            fenced: HashMap::new(),
            inbox: VecDeque::new(),
        });
        SimNodeId(self.nodes.len() - 1)
    }

    pub fn connect(&mut self, node: SimNodeId, who: Identity) -> Result<(usize, Vec<Region>), EndpointError> {
        let address = format!("simulated node {}", node.0);
        let state = self.nodes.get(node.0).filter(|state| state.alive);
        let Some(state) = state.filter(|_| !self.is_cut(who.host, node)) else {
            let is_silent = self.stopped.contains(&node);
            let kind =
                if is_silent { std::io::ErrorKind::TimedOut } else { std::io::ErrorKind::ConnectionRefused };
            let source = kind.into();
            return Err(EndpointError::Unreachable { address, source });
        };
        let present = self.links.iter().filter(|link| link.node == node && !link.closed).count();
        let fenced = state.fenced.get(&who.host).filter(|&&epoch| who.epoch <= epoch);
        let reason = if let Some(&fenced) = fenced {
            RefusalReason::Fenced { host: who.host, fenced, epoch: who.epoch }
        } else if present >= self.options.endpoints_max {
            RefusalReason::Full(present)
        } else {
            let regions = state.visible_regions(who);
            if let Some(epoch) = who.epoch.checked_sub(1) {
                let last = self.nodes[node.0].fenced.entry(who.host).or_insert(epoch);
                *last = epoch.max(*last);
            }
            self.links.push(SimLink::new(who, node, self.now_ns));
            return Ok((self.links.len() - 1, regions));
        };
        Err(EndpointError::Refused { address, refusal: reason.to_refusal() })
    }

    pub fn next_event_ns(&self) -> Option<u64> {
        self.events.peek().map(|Reverse(scheduled)| scheduled.at_ns)
    }

    /// Plays the next event. Returns false if there is none.
    pub fn step(&mut self) -> bool {
        let Some(Reverse(ScheduledEvent { at_ns, link, event, .. })) = self.events.pop() else {
            return false;
        };
        self.now_ns = self.now_ns.max(at_ns);
        match event {
            SimEvent::Apply(serial) => self.apply(link, serial),
            SimEvent::Complete(serial) => self.complete(link, serial),
            SimEvent::Deliver(message) => {
                self.links[link].delivering -= 1;
                self.links[link].inbox.push_back(message);
            }
            SimEvent::EndWait(since_ns) if self.links[link].silent_since_ns != Some(since_ns) => {}
            SimEvent::EndWait(_) | SimEvent::Fail(FailCause::Timeout) => {
                let is_open = !self.links[link].is_broken() && !self.links[link].closed;
                let has_strays = self.options.has_strays && is_open;
                let on_the_wire = if has_strays { self.leave_on_the_wire(link) } else { Vec::new() };
                self.links[link].fail(WorkError::Timeout, &on_the_wire);
            }
            SimEvent::Fail(FailCause::PeerGone) => self.links[link].fail(WorkError::PeerGone, &[]),
        }
        true
    }

    /// Puts a batch in flight.
    pub fn post(&mut self, id: usize, batch: &[Work]) -> Result<(), PostError> {
        let depth = self.options.limits.queue_depth;
        for (accepted, work) in batch.iter().enumerate() {
            let link = &mut self.links[id];
            if link.in_flight.len() + link.done.len() >= depth {
                return Err(PostError::QueueFull { accepted });
            }
            let obstacle = if link.broken { Some(WorkError::Flushed) } else { link.pending_error };
            if let Some(cause) = obstacle {
                link.broken = true;
                link.done.push_back(Completion { id: work.id, outcome: Err(cause) });
                continue;
            }
            let serial = link.next_serial;
            link.next_serial += 1;
            link.in_flight.push_back(InFlightOp { serial, work: *work, applied: None, data: Vec::new() });
            let at_ns = (self.now_ns + self.delay_ns(id)).max(self.links[id].apply_after_ns + 1);
            self.links[id].apply_after_ns = at_ns;
            self.schedule(at_ns, id, SimEvent::Apply(serial));
        }
        Ok(())
    }

    /// Sends a message from a node to a host. Returns the number of endpoints that have room for
    /// it.
    pub fn send(&mut self, node: SimNodeId, to: Host, message: &[u8]) -> usize {
        let of_host = (0..self.links.len()).filter(|id| self.links[*id].who.host == to);
        let of_host: Vec<usize> = of_host.collect();
        of_host.into_iter().filter(|id| self.send_to(node, *id, message)).count()
    }

    /// Sends a message from a node to one endpoint. Returns false if it is gone or has no room.
    pub fn send_to(&mut self, node: SimNodeId, id: usize, message: &[u8]) -> bool {
        let link = &self.links[id];
        let to = link.who.host;
        let state = &self.nodes[node.0];
        let is_fenced = state.fenced.get(&to).is_some_and(|&epoch| link.who.epoch <= epoch);
        let has_room = message.len() <= self.options.limits.message_bytes_max as usize
            && link.delivering + link.inbox.len() < self.options.limits.receive_depth;
        let open = link.node == node && !link.closed && !link.is_broken();
        let lost = self.is_cut(to, node) || !state.alive;
        if !open || is_fenced || !has_room || lost {
            return false;
        }
        let at_ns = (self.now_ns + self.delay_ns(id)).max(self.links[id].deliver_after_ns + 1);
        self.links[id].deliver_after_ns = at_ns;
        self.links[id].delivering += 1;
        self.schedule(at_ns, id, SimEvent::Deliver(message.to_vec()));
        true
    }

    pub fn crash_node(&mut self, node: SimNodeId) {
        for id in 0..self.links.len() {
            if self.links[id].node != node || self.links[id].closed || !self.nodes[node.0].alive {
                continue;
            }
            for serial in self.random_prefix(id) {
                self.apply(id, serial);
            }
            self.links[id].requests_lost = true;
            let noticed_ns = self.now_ns + 1 + self.rng.below(self.options.timeout_ns.min(CRASH_NOTICE_NS));
            self.schedule(noticed_ns, id, SimEvent::Fail(FailCause::PeerGone));
        }
        self.nodes[node.0].alive = false;
    }

    pub fn restart_node(&mut self, node: SimNodeId) {
        // The buffers of the crashed process are gone.
        self.links.iter_mut().filter(|link| link.node == node).for_each(|link| link.strays.clear());
        let state = &mut self.nodes[node.0];
        state.alive = true;
        state.fenced.clear();
        state.inbox.clear();
    }

    pub fn crash_host(&mut self, host: Host) {
        for id in 0..self.links.len() {
            if self.links[id].who.host == host {
                self.close(id);
            }
        }
    }

    /// Closes the host's end. A random prefix of its operations is on the wire already.
    pub fn close(&mut self, id: usize) {
        if self.links[id].closed {
            return;
        }
        self.leave_on_the_wire(id);
        let link = &mut self.links[id];
        link.closed = true;
        link.pending_error = Some(WorkError::PeerGone);
        link.in_flight.clear();
        link.done.clear();
    }

    /// Turns a random prefix of the operations in flight into strays, which may stay on the wire
    /// for long: in a switch or in a buffer of the node. Returns the serials of that prefix.
    fn leave_on_the_wire(&mut self, id: usize) -> Vec<u64> {
        let on_the_wire = self.random_prefix(id);
        let limits = &self.options.limits;
        let longest = limits.transfer_bytes_max.max(limits.message_bytes_max);
        let link = &self.links[id];
        let mut strays = Vec::new();
        for op in &link.in_flight {
            if op.applied.is_some() || !on_the_wire.contains(&op.serial) {
                continue;
            }
            let mut data = Vec::new();
            // Bytes on the wire do not change with the host's memory.
            if let Verb::Write { local, .. } | Verb::Send { local } = op.work.verb
                && let Ok((memory, offset)) = link.transfer(local, longest)
            {
                data.resize(local.len as usize, 0);
                memory.read(offset, &mut data);
            }
            strays.push(InFlightOp { serial: 0, work: op.work, applied: None, data });
        }
        let mut at_ns = self.now_ns;
        for mut stray in strays {
            at_ns += self.delay_ns(id) * self.rng.range(&(1..STRAY_FACTOR_MAX)) + 1;
            stray.serial = self.links[id].next_serial;
            self.links[id].next_serial += 1;
            self.schedule(at_ns, id, SimEvent::Apply(stray.serial));
            self.links[id].strays.push(stray);
        }
        on_the_wire
    }

    /// Drops the strays of a connection, as a node does when it closes the connection.
    pub fn drop_strays(&mut self, id: usize) -> Result<(), EndpointError> {
        let SimLink { who, node, .. } = self.links[id];
        if self.is_cut(who.host, node) {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(EndpointError::Unreachable { address: format!("simulated node {}", node.0), source });
        }
        self.links[id].strays.clear();
        Ok(())
    }

    pub fn partition(&mut self, host: Host, node: SimNodeId, cut: bool) {
        if cut {
            self.cuts.insert((host, node));
        } else {
            self.cuts.remove(&(host, node));
        }
    }

    pub fn stop_node(&mut self, node: SimNodeId, is_stopped: bool) {
        if is_stopped {
            self.stopped.insert(node);
        } else {
            self.stopped.remove(&node);
        }
    }

    /// Whether the link between a host and a node is cut now.
    fn is_cut(&self, host: Host, node: SimNodeId) -> bool {
        self.stopped.contains(&node) || self.cuts.contains(&(host, node))
    }

    pub fn slow(&mut self, host: Host, factor: u64) {
        self.slowness.insert(host, factor.max(1));
    }

    pub fn slow_node(&mut self, node: SimNodeId, factor: u64) {
        self.slow_nodes.insert(node, factor.max(1));
    }

    /// Serials of a random number of the oldest operations that have not reached the node.
    fn random_prefix(&mut self, id: usize) -> Vec<u64> {
        let in_flight = self.links[id].in_flight.iter();
        let mut posted: Vec<u64> = in_flight.filter(|f| f.applied.is_none()).map(|f| f.serial).collect();
        posted.truncate(self.rng.index(posted.len() + 1));
        posted
    }

    fn delay_ns(&mut self, id: usize) -> u64 {
        let SimLink { who, node, .. } = &self.links[id];
        let host = self.slowness.get(&who.host).copied().unwrap_or(1);
        let node = self.slow_nodes.get(node).copied().unwrap_or(1);
        self.rng.range(&self.options.delay_ns).saturating_mul(host).saturating_mul(node)
    }

    fn schedule(&mut self, at_ns: u64, link: usize, event: SimEvent) {
        self.serial += 1;
        self.events.push(Reverse(ScheduledEvent { at_ns, serial: self.serial, link, event }));
    }

    /// An operation reaches the node.
    fn apply(&mut self, id: usize, serial: u64) {
        let link = &self.links[id];
        let node = link.node;
        let cut = self.is_cut(link.who.host, node);
        let Some(index) = link.in_flight.iter().position(|op| op.serial == serial) else {
            if !cut && self.nodes[node.0].alive {
                self.apply_stray(id, serial);
            }
            return;
        };
        if link.requests_lost || link.in_flight[index].applied.is_some() {
            return;
        }
        if self.stopped.contains(&node) {
            self.wait_for_stopped(id, serial);
            return;
        }
        self.links[id].silent_since_ns = None;
        if cut || !self.nodes[node.0].alive {
            self.links[id].requests_lost = true;
            let noticed_ns = self.now_ns + self.options.timeout_ns;
            self.schedule(noticed_ns, id, SimEvent::Fail(FailCause::Timeout));
            return;
        }
        let verb = self.links[id].in_flight[index].work.verb;
        let mut data = std::mem::take(&mut self.links[id].in_flight[index].data);
        let outcome = self.execute(id, &verb, &mut data);
        let op = &mut self.links[id].in_flight[index];
        op.applied = Some(outcome);
        op.data = data;
        let at_ns = (self.now_ns + self.delay_ns(id)).max(self.links[id].complete_after_ns + 1);
        self.links[id].complete_after_ns = at_ns;
        self.schedule(at_ns, id, SimEvent::Complete(serial));
    }

    /// Leaves an operation in the buffers of a stopped node, until the node is resumed or
    /// the timeout has passed.
    fn wait_for_stopped(&mut self, id: usize, serial: u64) {
        if self.links[id].silent_since_ns.is_none() {
            let since_ns = self.now_ns;
            self.links[id].silent_since_ns = Some(since_ns);
            self.schedule(since_ns + self.options.timeout_ns, id, SimEvent::EndWait(since_ns));
        }
        // Operations stay in order.
        let at_ns =
            (self.now_ns + self.options.timeout_ns / STOPPED_CHECKS).max(self.links[id].apply_after_ns + 1);
        self.links[id].apply_after_ns = at_ns;
        self.schedule(at_ns, id, SimEvent::Apply(serial));
    }

    /// A stray reaches the node.
    fn apply_stray(&mut self, id: usize, serial: u64) {
        let link = &mut self.links[id];
        let Some(at) = link.strays.iter().position(|stray| stray.serial == serial) else { return };
        let mut stray = link.strays.remove(at);
        // The outcome is not reported.
        let _ = self.execute(id, &stray.work.verb, &mut stray.data);
    }

    /// The answer to an operation reaches the host.
    fn complete(&mut self, id: usize, serial: u64) {
        let SimLink { who, node, closed, answers_lost, .. } = self.links[id];
        if closed || answers_lost {
            return;
        }
        let is_cut = self.cuts.contains(&(who.host, node));
        let link = &mut self.links[id];
        if is_cut {
            link.answers_lost = true;
            let noticed_ns = self.now_ns + self.options.timeout_ns;
            self.schedule(noticed_ns, id, SimEvent::Fail(FailCause::Timeout));
            return;
        }
        // Answers come in order. An operation that was flushed in the meantime is not in the queue
        // any more.
        let Some(op) = link.in_flight.pop_front_if(|op| op.serial == serial) else {
            return;
        };
        let outcome = op.applied.unwrap_or(Err(WorkError::Timeout));
        if let Verb::Read { local, .. } = op.work.verb
            && outcome.is_ok()
            && let Ok((memory, offset)) = link.local(local)
        {
            memory.write(offset, &op.data);
        }
        if op.work.signalled || outcome.is_err() {
            link.done.push_back(Completion { id: op.work.id, outcome });
        }
        if outcome == Err(WorkError::Fenced) {
            link.fail(WorkError::Fenced, &[]);
            link.broken = true;
        }
    }

    /// Executes an operation at the node.
    fn execute(&mut self, id: usize, verb: &Verb, data: &mut Vec<u8>) -> Result<u64, WorkError> {
        let link = &self.links[id];
        let node = &self.nodes[link.node.0];
        if node.fenced.get(&link.who.host).is_some_and(|&epoch| link.who.epoch <= epoch) {
            return Err(WorkError::Fenced);
        }
        let transfer_max = self.options.limits.transfer_bytes_max;
        match *verb {
            Verb::Read { local, remote } => {
                link.transfer(local, transfer_max)?;
                let len = u64::from(local.len);
                let (memory, offset) = node.remote(link.who, remote, len, Right::Read)?;
                data.clear();
                if let Some(store) = memory.store(offset, len)? {
                    data.resize(local.len as usize, 0);
                    return store.read(offset, data).map(|()| len);
                }
                for part in memory.parts(offset, len) {
                    let (at, bytes) = memory.offset_of(part?);
                    let start = data.len();
                    data.resize(start + bytes, 0);
                    memory.memory.read(at, &mut data[start..]);
                }
                Ok(len)
            }
            Verb::Write { local, remote } => {
                let len = u64::from(local.len);
                link.payload(local, transfer_max, data)?;
                let (memory, offset) = node.remote(link.who, remote, len, Right::Write)?;
                if let Some(store) = memory.store(offset, len)? {
                    return store.write(offset, data).map(|()| len);
                }
                let mut rest = &data[..];
                for part in memory.parts(offset, len) {
                    let (at, bytes) = memory.offset_of(part?);
                    memory.memory.write(at, &rest[..bytes]);
                    rest = &rest[bytes..];
                }
                Ok(len)
            }
            Verb::CompareSwap { remote, expected, desired } => {
                let (memory, offset) = node.word(link.who, remote)?;
                let word = memory.atomic_u64(offset);
                let order = std::sync::atomic::Ordering::SeqCst;
                Ok(word.compare_exchange(expected, desired, order, order).unwrap_or_else(|w| w))
            }
            Verb::FetchAdd { remote, add } => {
                let (memory, offset) = node.word(link.who, remote)?;
                let word = memory.atomic_u64(offset);
                Ok(word.fetch_add(add, std::sync::atomic::Ordering::SeqCst))
            }
            Verb::Send { local } => self.deliver_to_node(id, local, data),
        }
    }

    fn deliver_to_node(
        &mut self,
        id: usize,
        local: LocalSlice,
        data: &mut Vec<u8>,
    ) -> Result<u64, WorkError> {
        let limits = &self.options.limits;
        let link = &mut self.links[id];
        link.payload(local, limits.message_bytes_max, data)?;
        if link.waiting_at_node >= limits.receive_depth {
            return Err(WorkError::ReceiverNotReady);
        }
        link.waiting_at_node += 1;
        let node = link.node;
        self.nodes[node.0].inbox.push_back((id, std::mem::take(data)));
        Ok(u64::from(local.len))
    }
}

impl SimNode {
    /// The regions that are announced to an endpoint. Keys that are not for it are zero.
    fn visible_regions(&self, who: Identity) -> Vec<Region> {
        let is_for = |registered: &&SimRegion| registered.table.is_some() || admits(registered.scope, who);
        let announce = |registered: &SimRegion| {
            let key = if admits(registered.scope, who) { registered.region.key } else { Key(0) };
            Region { key, ..registered.region.clone() }
        };
        let mut regions: Vec<Region> = self.regions.values().filter(is_for).map(announce).collect();
        regions.sort_unstable_by_key(|region| region.base);
        regions.truncate(ANNOUNCED_MAX);
        regions
    }

    /// The memory of a range and the offset in its region, if the key opens the range.
    fn remote(
        &self,
        who: Identity,
        remote: RemoteAddr,
        len: u64,
        right: Right,
    ) -> Result<(&RegionMemory, u64), WorkError> {
        let of_table = || {
            let (slot, _) = self.space.find(remote.addr, 0)?;
            let registered = self.regions.get(&slot)?;
            let table = registered.table.as_ref().filter(|table| table.holds(remote.addr))?;
            table.grant(&registered.memory.memory, who, remote.key, remote.addr)
        };
        let grant = self.grants.get(&remote.key).copied();
        let grant = grant.or_else(of_table).ok_or(WorkError::RemoteAccess)?;
        grant.check(who, right, remote.addr, len)?;
        let registered = self.regions.get(&grant.region).ok_or(WorkError::RemoteAccess)?;
        Ok((&registered.memory, remote.addr - registered.region.base))
    }

    /// The memory of a word and its offset there.
    fn word(&self, who: Identity, remote: RemoteAddr) -> Result<(&Memory, usize), WorkError> {
        if !remote.addr.is_multiple_of(8) {
            return Err(WorkError::Misaligned);
        }
        let (memory, offset) = self.remote(who, remote, 8, Right::Atomic)?;
        if memory.store(offset, 8)?.is_some() {
            return Err(WorkError::RemoteAccess);
        }
        let (at, _) = memory.offset_of((memory.part(offset, 8)?, 8));
        Ok((&memory.memory, at))
    }
}
