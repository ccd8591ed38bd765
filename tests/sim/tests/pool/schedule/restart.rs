//! Processes that are killed while they free extents, and are restarted.
//!
//! The next process resumes the free from the ledger, while operations of the killed process may
//! still be in flight. Frees that the ledger cannot decide are left to a leak scan. A real node
//! refuses operations of an earlier agent as soon as it knows of the next one; the simulated node
//! never does.

use std::collections::BTreeSet;

use aquifer_fabric::Host;
use aquifer_pool::op::{Action, Grant, OpError};

use super::Schedule;
use crate::pool::client::{FreeAttempt, SimClient};
use crate::pool::model::ensure;

/// The restarts of a schedule.
#[derive(Debug)]
pub struct Restarts {
    /// The number of clients so far, which numbers the next one.
    clients: u32,
    /// The last actions of killed processes, which may still be in flight.
    in_flight: Vec<(Host, Action)>,
    /// Hosts that may own extents that are not in a ledger.
    suspects: BTreeSet<Host>,
}

impl Restarts {
    pub fn new(clients: u64) -> Self {
        let clients = u32::try_from(clients).unwrap();
        Self { clients, in_flight: Vec::new(), suspects: BTreeSet::new() }
    }

    pub fn in_flight(&self) -> impl Iterator<Item = (Host, Action)> {
        self.in_flight.iter().cloned()
    }

    pub fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }
}

impl Schedule {
    /// Kills and restarts the process of a host with all of its clients, of which one is freeing
    /// extents. No effect if another client runs an operation that only a leak scan could finish.
    pub fn restart(&mut self) {
        let is_freeing = |client: &&SimClient| client.alive && client.can_be_killed() && !client.is_idle();
        let freeing: Vec<Host> = self.clients.iter().filter(is_freeing).map(|client| client.host).collect();
        if freeing.is_empty() {
            return;
        }
        let host = freeing[self.rng.index(freeing.len())];
        let mut all = self.clients.iter().filter(|client| client.host == host);
        if !all.all(|client| client.alive && client.can_be_killed()) {
            return;
        }
        self.counts.restarts += 1;
        for client in self.clients.iter_mut().filter(|client| client.host == host) {
            self.restarts.clients += 1;
            let last = client.restart(&self.fabric, self.restarts.clients);
            self.restarts.in_flight.extend(last.map(|action| (host, action)));
        }
    }

    /// Handles the outcome of a resumed free as `PoolClient::resume_free` does.
    pub fn resumed(
        &mut self,
        index: usize,
        grant: Grant,
        attempt: FreeAttempt,
        outcome: &Result<(), OpError>,
    ) -> Result<(), String> {
        let client = &mut self.clients[index];
        match outcome {
            Ok(()) => self.counts.resumed += 1,
            Err(OpError::NotAllocated | OpError::NotOurs(_)) => {
                // If the key was not revoked, the host still owns the extent, and another part of
                // the word has changed.
                let has_key = self.model.has_key(&self.node_memory, &grant, client.tenant).is_ok();
                if attempt == FreeAttempt::First && has_key {
                    let ended = client.free_plainly(grant);
                    return ended.map_or(Ok(()), |ended| self.ended(index, ended));
                }
                self.counts.left_to_scan += 1;
                self.restarts.suspects.insert(client.host);
            }
            Err(error) => return Err(format!("{grant:?} could not be freed: {error:?}")),
        }
        Ok(())
    }

    /// Frees the leaked extents of suspects. All clients have freed the extents in their ledgers,
    /// so a recovery of the host frees exactly the leaked ones.
    pub fn scan_all_for_leaks(&mut self) -> Result<(), String> {
        for host in std::mem::take(&mut self.restarts.suspects) {
            let of_host = |client: &SimClient| client.alive && client.host == host;
            if let Some(index) = self.clients.iter().position(of_host) {
                let ended = self.alone(index, |client| client.recover(host))?;
                self.ended(index, ended)?;
            }
        }
        let owner = self.clients.iter().find(|client| self.model.owns_anything(client.host));
        ensure!(owner.is_none(), "{:?} still owns something", owner.map(|client| client.host));
        Ok(())
    }
}
