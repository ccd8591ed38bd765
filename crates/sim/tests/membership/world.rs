//! One schedule: hosts, nodes, the directory and what happens to them.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_directory::names::{self, AgentRecord, DeadHost};
use aquifer_directory::sim::{CallFault, DirectoryWorld, SimDirectory};
use aquifer_directory::{Directory, DirectoryError};
use aquifer_fabric::sim::{Rng, SimFabric, SimOptions};
use aquifer_fabric::{Host, Identity};
use aquifer_host::membership::{Renewal, renew};
use aquifer_host::recovery::RecoveryClaim;
use aquifer_pool::{NodeId, PoolClient, SizeClass, recover_node};

use super::host::{Failure, GRACE_MS, NodeLink, SimHost, TENANT};
use super::node::SimNode;

/// How long a host waits between keep-alives.
const RENEWAL_MS: u64 = 3_000;
/// Most steps of recoveries at the end of a schedule.
const RECOVERY_TURNS_MAX: u32 = 1_000;
/// Most extents of a host on a node.
const EXTENTS_MAX: usize = 12;

/// How often things happened in a schedule, or in all.
#[derive(Clone, Copy, Debug, Default)]
pub struct MembershipCounts {
    operations: u64,
    /// Operations of hosts that are cut off from the directory.
    cut_off: u64,
    /// Operations of hosts whose lease has ended.
    after_lease: u64,
    fenced: u64,
    fenced_by_nodes: u64,
    leases_lost: u64,
    /// Hosts that a next process has resumed.
    resumed: u64,
    /// Hosts that no process could resume, because another host has claimed them.
    too_late: u64,
    recovered_nodes: u64,
    recoveries: u64,
    /// Recoveries that ended before they had come to all nodes.
    ended_early: u64,
    /// Recoveries that left nodes for later.
    with_nodes_away: u64,
    /// Recoveries that another one has overtaken.
    overtaken: u64,
    stops: u64,
    all_cut: u64,
    directory_stops: u64,
    /// Requests to the directory, or their answers, that are to be lost.
    lost_calls: u64,
}

impl MembershipCounts {
    pub fn labelled(&self) -> [(&'static str, u64); 17] {
        [
            ("operations", self.operations),
            ("operations of hosts that are cut off", self.cut_off),
            ("operations after the lease", self.after_lease),
            ("operations that were refused by a fence", self.fenced),
            ("fences that nodes have set", self.fenced_by_nodes),
            ("leases that hosts have lost", self.leases_lost),
            ("resumed hosts", self.resumed),
            ("hosts that could not be resumed", self.too_late),
            ("recoveries of a node", self.recovered_nodes),
            ("whole recoveries", self.recoveries),
            ("recoveries that ended early", self.ended_early),
            ("recoveries with nodes away", self.with_nodes_away),
            ("recoveries that were overtaken", self.overtaken),
            ("stopped hosts", self.stops),
            ("times when all were cut off", self.all_cut),
            ("stops of the directory", self.directory_stops),
            ("lost calls", self.lost_calls),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.cut_off += other.cut_off;
        self.after_lease += other.after_lease;
        self.fenced += other.fenced;
        self.fenced_by_nodes += other.fenced_by_nodes;
        self.leases_lost += other.leases_lost;
        self.resumed += other.resumed;
        self.too_late += other.too_late;
        self.recovered_nodes += other.recovered_nodes;
        self.recoveries += other.recoveries;
        self.ended_early += other.ended_early;
        self.with_nodes_away += other.with_nodes_away;
        self.overtaken += other.overtaken;
        self.stops += other.stops;
        self.all_cut += other.all_cut;
        self.directory_stops += other.directory_stops;
        self.lost_calls += other.lost_calls;
    }
}

struct World {
    rng: Rng,
    fabric: SimFabric,
    directory: DirectoryWorld,
    /// Access to the directory that is never cut off.
    direct: SimDirectory,
    nodes: Vec<SimNode>,
    /// The machines; `None` if no process of a host runs there now.
    hosts: Vec<Option<SimHost>>,
    /// What a process that has ended on each machine has left to the next one.
    left: Vec<Option<(AgentRecord, Vec<NodeLink>)>>,
    /// Whether each machine of a host, and each node, is cut off from the directory.
    host_cuts: Vec<bool>,
    node_cuts: Vec<bool>,
    all_cut: bool,
    /// The directory's process is stopped: it answers nothing, and leases get no older.
    is_directory_stopped: bool,
    /// For each node and host number: the greatest epoch under which its memory was freed.
    freed: BTreeMap<(NodeId, u16), u64>,
    /// When the directory had each death first: by the host's number and the version of its record,
    /// in milliseconds.
    deaths: BTreeMap<(u16, u64), u64>,
    content: u64,
    counts: MembershipCounts,
}

/// Plays one schedule.
pub fn run(seed: u64) -> Result<MembershipCounts, String> {
    let mut world = World::new(seed);
    let turns = 100 + world.rng.below(200);
    for _ in 0..turns {
        world.turn()?;
    }
    world.end()?;
    Ok(world.counts)
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let options = SimOptions { step_on_poll: true, ..SimOptions::default() };
        let fabric = SimFabric::new(rng.next_u64(), options);
        let directory = DirectoryWorld::new(rng.next_u64());
        let count = 1 + u16::try_from(rng.below(3)).unwrap();
        let node = |id: u16| SimNode::new(&fabric, NodeId(id), directory.host(100 + u64::from(id)));
        let nodes: Vec<SimNode> = (1..=count).map(node).collect();
        let hosts = 2 + rng.index(3);
        let direct = directory.host(0);
        let mut world = Self {
            rng,
            fabric,
            direct,
            directory,
            host_cuts: vec![false; hosts],
            node_cuts: vec![false; nodes.len()],
            hosts: (0..hosts).map(|_| None).collect(),
            left: (0..hosts).map(|_| None).collect(),
            nodes,
            all_cut: false,
            is_directory_stopped: false,
            freed: BTreeMap::new(),
            deaths: BTreeMap::new(),
            content: 0,
            counts: MembershipCounts::default(),
        };
        for index in 0..world.nodes.len() {
            world.node_turn(index);
        }
        world
    }

    fn turn(&mut self) -> Result<(), String> {
        let host = self.rng.index(self.hosts.len());
        match self.rng.below(20) {
            0..9 => self.host_turn(host)?,
            9..12 => self.pass_time()?,
            12..14 => {
                let node = self.rng.index(self.nodes.len());
                self.node_turn(node);
            }
            14..17 => self.recovery_turn(host)?,
            17 if self.rng.chance(1, 2) => self.cut_or_heal(),
            17 => self.lose_call(host),
            18 if self.rng.chance(1, 4) => self.end_process(host),
            19 if self.rng.chance(1, 3) => {
                if let Some(host) = &mut self.hosts[host] {
                    host.stopped_turns = 1 + u32::try_from(self.rng.below(8)).unwrap();
                    self.counts.stops += 1;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Loses one of the next requests of a host or node to the directory, or the answer to it.
    fn lose_call(&mut self, host: usize) {
        let fault = if self.rng.chance(1, 2) { CallFault::Lost } else { CallFault::AnswerLost };
        let count = 1 + u32::try_from(self.rng.below(6)).unwrap();
        let node = self.rng.index(self.nodes.len());
        let directory = match &self.hosts[host] {
            Some(host) if self.rng.chance(3, 4) => &host.directory,
            _ => &self.nodes[node].directory,
        };
        directory.fail(count, fault);
        self.counts.lost_calls += 1;
    }

    /// Cuts a host, a node or all off from the directory, or stops the directory; or ends that.
    fn cut_or_heal(&mut self) {
        match self.rng.below(5) {
            0 => {
                self.all_cut = !self.all_cut;
                self.counts.all_cut += u64::from(self.all_cut);
            }
            1 => {
                self.is_directory_stopped = !self.is_directory_stopped;
                self.counts.directory_stops += u64::from(self.is_directory_stopped);
            }
            2 => {
                let node = self.rng.index(self.nodes.len());
                self.node_cuts[node] = !self.node_cuts[node];
            }
            _ => {
                let host = self.rng.index(self.hosts.len());
                self.host_cuts[host] = !self.host_cuts[host];
            }
        }
        self.apply_cuts();
    }

    /// Whether no host and no node reaches the directory.
    fn is_unreachable(&self) -> bool {
        self.all_cut || self.is_directory_stopped
    }

    fn apply_cuts(&self) {
        for (host, is_cut) in self.hosts.iter().zip(&self.host_cuts) {
            if let Some(host) = host {
                host.directory.set_disconnected(*is_cut || self.is_unreachable());
            }
        }
        for (node, is_cut) in self.nodes.iter().zip(&self.node_cuts) {
            node.directory.set_disconnected(*is_cut || self.is_unreachable());
        }
    }

    /// Advances the time. Most hosts and nodes keep their leases alive.
    fn pass_time(&mut self) -> Result<(), String> {
        let passed = Duration::from_millis(500 + self.rng.below(3_000));
        if !self.is_directory_stopped {
            self.directory.advance(passed);
        }
        for index in 0..self.hosts.len() {
            if let Some(host) = &mut self.hosts[index]
                && host.stopped_turns > 0
            {
                host.stopped_turns -= 1;
            } else {
                self.renew(index)?;
            }
        }
        for index in 0..self.nodes.len() {
            if self.rng.chance(3, 4) {
                self.node_turn(index);
            }
        }
        Ok(())
    }

    /// Lets a host keep its lease alive, if that is due. A host that has lost it ends.
    fn renew(&mut self, index: usize) -> Result<(), String> {
        let now_ms = self.directory.now_ms();
        let Some(host) = &mut self.hosts[index] else { return Ok(()) };
        if host.renewed_ms + RENEWAL_MS > now_ms {
            return Ok(());
        }
        host.renewed_ms = now_ms;
        if let Some(recovery) = &host.recovery {
            // If it has ended, another host recovers, and fences this one.
            let _ = host.directory.lease_keep_alive(recovery.lease().id);
        }
        match renew(&host.directory, host.lease) {
            Renewal::Renewed | Renewal::Unknown(_) => {}
            Renewal::Ended => {
                self.counts.leases_lost += 1;
                if self.has_lease(index) {
                    return Err("a host with a valid lease has given up".to_owned());
                }
                self.end_process(index);
            }
        }
        Ok(())
    }

    /// Ends a host's process. In most cases a next one resumes the host.
    fn end_process(&mut self, index: usize) {
        let Some(SimHost { record, links, lease, .. }) = self.hosts[index].take() else { return };
        // The directory may have ended the lease before: then the host is dead at once.
        if self.rng.chance(1, 3) {
            let _was_ended = self.direct.lease_revoke(lease.id);
        }
        self.left[index] = self.rng.chance(3, 4).then_some((record, links));
    }

    /// Whether the directory has a host's record with its epoch.
    fn has_lease(&self, index: usize) -> bool {
        let record = self.hosts[index].as_ref().map(|host| &host.record).expect("it runs");
        let agents = names::agents(&self.direct).expect("it is never cut off");
        agents.iter().any(|agent| agent.host == record.host && agent.epoch == record.epoch)
    }

    fn node_turn(&mut self, index: usize) {
        // A node that is cut off does nothing.
        self.counts.fenced_by_nodes += self.nodes[index].act().unwrap_or(0);
    }

    /// Starts a host, or lets it use the memory of a node.
    fn host_turn(&mut self, index: usize) -> Result<(), String> {
        let Some(host) = &mut self.hosts[index] else { return self.start_host(index) };
        if host.stopped_turns > 0 {
            return Ok(());
        }
        let node = self.rng.index(host.links.len());
        if host.links[node].is_fenced {
            return Ok(());
        }
        self.content += 1;
        let outcome = use_memory(&mut self.rng, &mut host.links[node], self.content);
        let (number, epoch) = (host.record.host, host.record.epoch);
        let id = self.nodes[node].id;
        match outcome {
            // The node has not answered.
            Ok(Answer::Awaited) | Err(Failure::Full) => Ok(()),
            Ok(Answer::Received) => {
                self.counts.operations += 1;
                self.counts.cut_off += u64::from(self.is_unreachable() || self.host_cuts[index]);
                self.counts.after_lease += u64::from(!self.has_lease(index));
                let freed = self.freed.get(&(id, number)).copied().unwrap_or(0);
                if epoch < freed {
                    return Err(format!(
                        "host {number} uses node {} under epoch {epoch}, though its memory there was freed \
                         under epoch {freed}",
                        id.0
                    ));
                }
                Ok(())
            }
            Err(Failure::Fenced) => {
                self.counts.fenced += 1;
                if self.has_lease(index) {
                    return Err(format!("node {} has fenced host {number}, whose lease is valid", id.0));
                }
                self.hosts[index].as_mut().expect("it runs").links[node].is_fenced = true;
                Ok(())
            }
            Err(Failure::Wrong(why)) => Err(format!("host {number}, epoch {epoch}: {why}")),
        }
    }

    fn start_host(&mut self, index: usize) -> Result<(), String> {
        let directory = self.directory.host(self.rng.next_u64());
        directory.set_disconnected(self.is_unreachable() || self.host_cuts[index]);
        let now_ms = self.directory.now_ms();
        let started = match &self.left[index] {
            Some((before, _)) => SimHost::resume(directory, before, now_ms),
            None => SimHost::join(directory, now_ms),
        };
        let mut host = match started {
            Ok(host) => host,
            Err(DirectoryError::Taken { .. }) => {
                self.counts.too_late += u64::from(self.left[index].take().is_some());
                return Ok(());
            }
            Err(_) => return Ok(()),
        };
        let left = self.left[index].take();
        self.counts.resumed += u64::from(left.is_some());
        let links = left.map(|(_, links)| links).unwrap_or_default();
        host.connect(&self.fabric, &self.nodes)
            .and_then(|()| host.inherit(links))
            .map_err(|failure| format!("a new process of host {}: {failure:?}", host.record.host))?;
        self.hosts[index] = Some(host);
        Ok(())
    }

    /// Begins a recovery, or recovers the next node, or ends the recovery, also an unfinished one.
    fn recovery_turn(&mut self, index: usize) -> Result<(), String> {
        let Some(host) = self.hosts[index].as_mut().filter(|host| host.stopped_turns == 0) else {
            return Ok(());
        };
        let Some(recovery) = host.recovery.take() else {
            let now_ms = self.directory.now_ms();
            for dead in names::dead_hosts(&self.direct).map_err(|error| error.to_string())? {
                self.deaths.entry((dead.record.host, dead.version)).or_insert(now_ms);
            }
            let due = host.list_due(Duration::from_millis(now_ms));
            if !due.is_empty() {
                let dead = &due[self.rng.index(due.len())];
                // Another host may be faster.
                host.recovery = host.claim(dead).unwrap_or(None);
                if host.recovery.is_some() {
                    self.check_grace(dead, now_ms)?;
                }
            }
            return Ok(());
        };
        let next = recovery.present().next();
        match next.filter(|_| !self.rng.chance(1, 8)) {
            Some(node) => {
                let recovery = self.recover_on(node, recovery)?;
                self.hosts[index].as_mut().expect("it runs").recovery = recovery;
            }
            None => self.finish_recovery(index, recovery),
        }
        Ok(())
    }

    /// Checks that a dead host that is recovered now has had its grace time.
    fn check_grace(&self, dead: &DeadHost, now_ms: u64) -> Result<(), String> {
        let DeadHost { record, version } = dead;
        match self.deaths.get(&(record.host, *version)) {
            Some(seen_ms) if now_ms - seen_ms >= record.grace_ms => Ok(()),
            seen_ms => Err(format!(
                "host {} was recovered at {now_ms} ms, in its grace time, which began at {seen_ms:?} ms",
                record.host
            )),
        }
    }

    fn finish_recovery(&mut self, index: usize, recovery: RecoveryClaim) {
        let directory = &self.hosts[index].as_ref().expect("it runs").directory;
        let has_left = recovery.present().next().is_some();
        let has_away = recovery.away().next().is_some();
        match recovery.finish(directory) {
            Ok(()) => {
                self.counts.recoveries += u64::from(!has_left);
                self.counts.ended_early += u64::from(has_left);
                self.counts.with_nodes_away += u64::from(has_away);
            }
            Err(DirectoryError::Taken { .. }) => self.counts.overtaken += 1,
            // The directory has not answered, and the lease will end.
            Err(_) => {}
        }
    }

    /// Recovers a dead host on a node; `None` if another recovery was faster.
    fn recover_on(
        &mut self,
        id: NodeId,
        mut recovery: RecoveryClaim,
    ) -> Result<Option<RecoveryClaim>, String> {
        let node = self.nodes.iter().find(|node| node.id == id).expect("there is one").target.node();
        let identity = recovery.identity(TENANT);
        let host = identity.host;
        let connect = || self.fabric.connect(node, identity).map_err(Failure::from);
        match recover_node(id, host, TENANT, &connect) {
            Ok(_) => {
                self.counts.recovered_nodes += 1;
                let freed = self.freed.entry((id, host.0)).or_insert(0);
                *freed = recovery.lease().epoch.max(*freed);
                recovery.recovered(id);
                Ok(Some(recovery))
            }
            Err(Failure::Fenced) => {
                self.counts.overtaken += 1;
                Ok(None)
            }
            Err(failure) => Err(format!("recovery of host {} on node {}: {failure:?}", host.0, id.0)),
        }
    }

    /// All are connected again, hosts free what they have and leave, the dead are recovered, and no
    /// memory is lost.
    fn end(&mut self) -> Result<(), String> {
        (self.all_cut, self.is_directory_stopped) = (false, false);
        self.host_cuts.fill(false);
        self.node_cuts.fill(false);
        self.apply_cuts();
        for index in 0..self.hosts.len() {
            if let Some(host) = &mut self.hosts[index] {
                host.stopped_turns = 0;
                host.recovery = None;
            }
            self.renew(index)?;
        }
        // All leases of recoveries end, and none of those that are kept alive.
        for _ in 0..20 {
            self.directory.advance(Duration::from_secs(1));
            for index in 0..self.hosts.len() {
                self.renew(index)?;
            }
            for index in 0..self.nodes.len() {
                self.node_turn(index);
            }
        }
        for index in 0..self.hosts.len() {
            self.free_all(index)?;
            if let Some(host) = self.hosts[index].take() {
                host.directory.lease_revoke(host.lease.id).map_err(|error| error.to_string())?;
            }
        }
        self.hosts.truncate(1);
        self.left.fill_with(|| None);
        self.start_host(0)?;
        // The host lists the dead hosts, and then their grace times pass.
        self.recovery_turn(0)?;
        self.directory.advance(Duration::from_millis(GRACE_MS));
        for _ in 0..RECOVERY_TURNS_MAX {
            let host = self.hosts[0].as_ref().expect("it has just started");
            let dead = names::dead_hosts(&self.direct).map_err(|error| error.to_string())?;
            if host.recovery.is_none() && dead.is_empty() {
                return self.nothing_is_leaked();
            }
            self.recovery_turn(0)?;
        }
        Err("at the end, the recovery of dead hosts goes on and on".to_owned())
    }

    /// Checks and frees all extents of a host, which has a valid lease.
    fn free_all(&mut self, index: usize) -> Result<(), String> {
        let Some(host) = &mut self.hosts[index] else { return Ok(()) };
        for link in &mut host.links {
            while !link.extents.is_empty() {
                let outcome = link.check(0).and_then(|()| link.free(0));
                outcome.map_err(|failure| format!("at the end, host {}: {failure:?}", host.record.host))?;
            }
        }
        Ok(())
    }

    fn nothing_is_leaked(&mut self) -> Result<(), String> {
        for node in &self.nodes {
            let identity = Identity { host: Host(u16::MAX - 1), epoch: 1, tenant: TENANT };
            let mut pool = PoolClient::new(identity.host, TENANT);
            let endpoint =
                self.fabric.connect(node.target.node(), identity).map_err(|error| error.to_string())?;
            pool.add_node(node.id, endpoint).map_err(|error| error.to_string())?;
            pool.refresh(node.id).map_err(|error| error.to_string())?;
            let (free, total) = (pool.free_bytes(node.id), pool.total_bytes(node.id));
            if free != total {
                return Err(format!(
                    "at the end, {} of {total} bytes of node {} are lost",
                    total - free,
                    node.id.0
                ));
            }
        }
        Ok(())
    }
}

/// Whether the node has answered an operation.
enum Answer {
    Awaited,
    Received,
}

/// Does something with the memory of a node.
fn use_memory(rng: &mut Rng, link: &mut NodeLink, content: u64) -> Result<Answer, Failure> {
    let count = link.extents.len();
    if count == 0 || count < EXTENTS_MAX && rng.chance(1, 3) {
        let class = [SizeClass::CHUNK, SizeClass::SPAN][rng.index(2)];
        return link.allocate(class, content).map(|()| Answer::Received);
    }
    let index = rng.index(count);
    match rng.below(5) {
        0 => link.free(index)?,
        1 => link.rewrite(index, content)?,
        2 => return link.post_rewrite(index, content).map(|()| Answer::Awaited),
        _ => link.check(index)?,
    }
    Ok(Answer::Received)
}
