//! Actions of hosts, and the checks of each step.

use aquifer_directory::names::{self, AgentRecord, DeadHost, HolderRecord};
use aquifer_directory::sim::CallFault;
use aquifer_directory::{Directory, DirectoryError, DirectoryRetries};
use aquifer_host::environment::HostEnvironment;
use aquifer_host::membership::repeats_resume;
use std::sync::Arc;
use std::time::Duration;

use super::host::SimHost;
use super::link::{NodeLink, Outcome, TENANT};
use super::world::{Takeover, World};

/// Largest number of connections of a host to one node.
const LINKS_MAX: usize = 2;
/// Time within which an operation must end on a node that serves the host, in milliseconds.
const WAIT_MS_MAX: u64 = 15_000;

impl World {
    /// Starts a process on a machine. A process that takes over retries as the product does.
    pub fn start_host(&mut self, index: usize, fault: Option<(u32, CallFault)>) -> Result<(), String> {
        let directory = self.directory.host(self.rng.next_u64());
        directory.set_disconnected(self.is_unreachable() || self.machines[index].is_cut);
        if let Some((count, fault)) = fault {
            directory.fail(count, fault);
        }
        let (now_ms, grace_ms) = (self.now_ms, self.grace.host_ms);
        let machine = &mut self.machines[index];
        let before = machine.left.as_ref().map(|(record, _)| record.clone());
        let now = machine.machine.now();
        let takeover = machine.takeover.get_or_insert_with(|| Takeover {
            retries: DirectoryRetries::until(now + Duration::from_millis(grace_ms), &Arc::default()),
            began_ms: now_ms,
            attempts: 0,
        });
        takeover.attempts += 1;
        match SimHost::start(directory, &machine.machine, before.as_ref(), grace_ms, now_ms) {
            Ok(mut host) => {
                self.counts.taken_over_late += u64::from(before.is_some() && takeover.attempts > 1);
                machine.takeover = None;
                if let Some((_, left)) = machine.left.take() {
                    self.counts.resumed += 1;
                    host.left = left;
                }
                machine.host = Some(host);
                Ok(())
            }
            Err(error) => self.fail_start(index, before.as_ref(), &error),
        }
    }

    fn fail_start(
        &mut self,
        index: usize,
        before: Option<&AgentRecord>,
        error: &DirectoryError,
    ) -> Result<(), String> {
        let machine = &mut self.machines[index];
        let Some(before) = before else { return Ok(()) };
        let Takeover { retries, began_ms, .. } = machine.takeover.as_ref().expect("a process takes over");
        let (now, host) = (machine.machine.now(), before.host);
        if matches!(error, DirectoryError::Taken { .. }) {
            if !self.claims.contains_key(&(host, before.claim_epoch)) {
                return Err(format!("host {host} cannot resume, though no other host has claimed it"));
            }
            self.counts.too_late += 1;
        } else if repeats_resume(retries, error, now) {
            return Ok(());
        } else if self.now_ms - began_ms < self.grace.host_ms {
            return Err(format!("the next process of host {host} failed in its grace time: {error}"));
        }
        (machine.left, machine.takeover) = (None, None);
        Ok(())
    }

    /// Runs an operation of a host on a node's memory. Connects the host to the node before if it
    /// has less than [`LINKS_MAX`] connections.
    pub fn use_memory(&mut self, index: usize) -> Result<(), String> {
        if self.machines[index].is_halted() || self.machines[index].host.is_none() {
            return Ok(());
        }
        self.adopt(index)?;
        let host = self.machines[index].host.as_mut().expect("the host runs");
        let known = host.nodes.list();
        if !known.is_empty() {
            let node = known[self.rng.index(known.len())];
            let count = host.links.iter().filter(|link| link.seen.id == node).count();
            let seen = self.nodes.iter().find(|other| other.id == node).and_then(|node| node.seen());
            if count < LINKS_MAX
                && let Some(seen) = seen
                && let Ok(mut link) = NodeLink::open(&host.nodes, seen)
            {
                link.has_stale_record = host.known.get(&node) != Some(&seen.life);
                host.links.push(link);
            }
        }
        if host.links.is_empty() {
            return Ok(());
        }
        let link = self.rng.index(host.links.len());
        // An allocation from a stopped node would wait for the node's answer.
        let id = host.links[link].seen.id;
        if self.nodes.iter().any(|node| node.id == id && node.is_stopped) {
            return Ok(());
        }
        self.content += 1;
        let outcome = host.links[link].act(&mut self.rng, self.content);
        self.count_operation(index, link, &outcome);
        self.check_outcome(index, link, outcome, true)
    }

    fn count_operation(&mut self, index: usize, link: usize, outcome: &Outcome) {
        self.counts.waits += u64::from(*outcome == Outcome::Waits);
        if *outcome == Outcome::Done {
            let id = self.machines[index].host.as_ref().expect("the host runs").links[link].seen.id;
            let has_lease = self.nodes.iter().any(|node| node.id == id && node.has_lease());
            self.counts.operations += 1;
            self.counts.cut_off += u64::from(self.is_unreachable() || self.machines[index].is_cut);
            self.counts.after_lease += u64::from(!self.has_lease(index));
            self.counts.without_node_lease += u64::from(!has_lease);
        }
    }

    /// Connects to the extents that the previous process has left.
    fn adopt(&mut self, index: usize) -> Result<(), String> {
        let now_ms = self.now_ms;
        let host = self.machines[index].host.as_mut().expect("the host runs");
        for left in std::mem::take(&mut host.left) {
            let node = self.nodes.iter().find(|node| node.id == left.seen.id).expect("the node exists");
            if node.serves() && node.memory.as_ref().is_some_and(|memory| memory.life != left.seen.life) {
                // The keys of the extents open nothing in new memory.
                self.counts.lost_memory += 1;
                continue;
            }
            match NodeLink::open(&host.nodes, left.seen) {
                Ok(mut link) => {
                    self.counts.adopted += 1;
                    link.adopt(left);
                    host.links.push(link);
                }
                Err(Outcome::Lost(why)) => {
                    // A process that has never seen the node's record does not know its address.
                    let is_blind =
                        !host.known.contains_key(&left.seen.id) && now_ms - host.started_ms >= node.kept_ms;
                    if !is_blind && !node.may_be_lost(&left.seen, now_ms) {
                        let (number, id) = (host.record.host, left.seen.id.0);
                        return Err(format!(
                            "a process of host {number} treats its memory of node {id} as lost: {why}"
                        ));
                    }
                    self.counts.lost_memory += 1;
                }
                Err(_) => host.left.push(left),
            }
        }
        Ok(())
    }

    /// Polls all waiting operations of a host.
    pub fn poll_links(&mut self, index: usize) -> Result<(), String> {
        let Some(host) = &self.machines[index].host else { return Ok(()) };
        for link in (0..host.links.len()).rev() {
            let host = self.machines[index].host.as_mut().expect("the host runs");
            let outcome = host.links[link].poll_pending();
            self.check_outcome(index, link, outcome, false)?;
        }
        Ok(())
    }

    /// Checks the outcome of an operation. `is_new`: it was posted in this step.
    pub fn check_outcome(
        &mut self,
        index: usize,
        link: usize,
        outcome: Outcome,
        is_new: bool,
    ) -> Result<(), String> {
        let host = self.machines[index].host.as_mut().expect("the host runs");
        let (number, epoch) = (host.record.host, host.record.epoch);
        let seen = host.links[link].seen;
        let id = seen.id.0;
        match outcome {
            Outcome::Done | Outcome::Full => {
                host.links[link].waits_since_ms = None;
                let freed = self.freed.get(&(seen.life, number)).copied().unwrap_or(0);
                if is_new && epoch < freed && outcome == Outcome::Done {
                    return Err(format!(
                        "host {number} uses node {id} under epoch {epoch}, though its memory there was freed \
                         under epoch {freed}"
                    ));
                }
                Ok(())
            }
            Outcome::Waits => self.check_wait(index, link),
            Outcome::Lost(why) => {
                let has_stale_record = host.links.swap_remove(link).has_stale_record;
                self.counts.lost_memory += 1;
                let node = self.nodes.iter().find(|node| node.id == seen.id).expect("the node exists");
                if has_stale_record || node.may_be_lost(&seen, self.now_ms) {
                    return Ok(());
                }
                Err(format!(
                    "host {number} treats its memory on node {id} as lost at {} ms: {why}; {}",
                    self.now_ms,
                    node.describe()
                ))
            }
            Outcome::Wrong(why) => Err(format!("host {number}, epoch {epoch}: {why}")),
        }
    }

    /// Checks that a waiting operation has a reason to wait.
    fn check_wait(&mut self, index: usize, link: usize) -> Result<(), String> {
        let (now_ms, has_lease) = (self.now_ms, self.has_lease(index));
        let host = self.machines[index].host.as_mut().expect("the host runs");
        let (identity, link) = (host.identity(), &mut host.links[link]);
        let node = self.nodes.iter().find(|node| node.id == link.seen.id).expect("the node exists");
        let Some(memory) = node.memory.as_ref().filter(|_| node.serves()) else {
            link.waits_since_ms = None;
            return Ok(());
        };
        let fence = self.fabric.connect(memory.target.node(), identity);
        if fence.is_err_and(|error| error.is_fence()) {
            link.waits_since_ms = None;
            self.counts.fenced += 1;
            if has_lease {
                let (id, number) = (node.id.0, identity.host.0);
                return Err(format!("node {id} has fenced host {number}, whose lease is valid"));
            }
            return Ok(());
        }
        let is_pending = link.is_pending();
        let since_ms = *link.waits_since_ms.get_or_insert(now_ms);
        if is_pending && memory.life == link.seen.life && now_ms - since_ms > WAIT_MS_MAX {
            return Err(format!(
                "host {} waits since {since_ms} ms until {now_ms} ms for node {}, which serves: {}",
                identity.host.0,
                node.id.0,
                node.describe()
            ));
        }
        Ok(())
    }

    /// Advances the recovery of dead hosts: claims one, recovers it on the next node, or ends the
    /// recovery. With `ends_early`, an unfinished recovery is ended.
    pub fn recover(&mut self, index: usize, ends_early: bool) -> Result<(), String> {
        if self.machines[index].is_halted() {
            return Ok(());
        }
        let now = self.machines[index].machine.uptime();
        let Some(host) = self.machines[index].host.as_mut() else { return Ok(()) };
        if host.worker.current().is_none() {
            return self.claim(index, now);
        }
        let (_, claim) = host.worker.current().expect("the host recovers another one");
        let (number, epoch) = (claim.identity(TENANT).host.0, claim.lease().epoch);
        let (has_left, has_away) = (claim.present().next().is_some(), claim.away().next().is_some());
        if !ends_early && let Some((node, is_recovered)) = host.worker.recover_next() {
            let node = self.nodes.iter().find(|other| other.id == node).expect("the node exists");
            if is_recovered && let Some(memory) = &node.memory {
                self.counts.recovered_nodes += 1;
                let freed = self.freed.entry((memory.life, number)).or_insert(0);
                *freed = epoch.max(*freed);
            }
            return Ok(());
        }
        match host.worker.finish(now) {
            true => {
                self.counts.recoveries += u64::from(!has_left);
                self.counts.ended_early += u64::from(has_left);
                self.counts.with_nodes_away += u64::from(has_away);
            }
            false => self.counts.overtaken += 1,
        }
        Ok(())
    }

    /// Lists the dead hosts and claims one that is due.
    fn claim(&mut self, index: usize, now: Duration) -> Result<(), String> {
        self.note_deaths();
        let dead = names::dead_hosts(&self.direct).map_err(|error| error.to_string())?;
        let host = self.machines[index].host.as_mut().expect("the host runs");
        host.worker.list(now);
        host.worker.claim_next(now);
        self.check_claims(&dead)
    }

    /// Checks that newly claimed dead hosts have had their grace times. The directory is read,
    /// because the answer to a claim may have been lost.
    fn check_claims(&mut self, dead: &[DeadHost]) -> Result<(), String> {
        for DeadHost { record, version } in dead {
            let entry =
                self.direct.get(&names::holder_key(record.host)).map_err(|error| error.to_string())?;
            let holder =
                entry.map(|entry| names::decode::<HolderRecord>(&entry).expect("the record is valid"));
            if holder.is_some_and(|holder| holder.claim_epoch == record.claim_epoch) {
                continue;
            }
            self.claims.entry((record.host, record.claim_epoch)).or_insert(self.now_ms);
            let began_ms = self.deaths[&(record.host, *version)];
            if self.now_ms - began_ms < record.grace_ms {
                return Err(format!(
                    "host {} was claimed at {} ms, in its grace time, which began at {began_ms} ms",
                    record.host, self.now_ms
                ));
            }
        }
        Ok(())
    }
}
