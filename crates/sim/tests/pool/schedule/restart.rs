//! Processes that are killed while they give something back, and come again: they go on with it, while what the dead ones had posted may be on its way yet. What cannot be
//! told by what is written down is left to an audit. Nodes refuse what comes of an agent that another has followed, as soon as they have heard of it; here they never do.

use std::collections::BTreeSet;

use aquifer_fabric::Host;
use aquifer_pool::op::{Action, Grant, OpError};

use super::Schedule;
use crate::pool::client::{Client, Try};
use crate::pool::shadow::ensure;

/// What is known of them.
#[derive(Debug)]
pub struct Restarts {
    /// Numbers that clients have had.
    clients: u32,
    /// What was posted by those that were killed, and may come late.
    late: Vec<(Host, Action)>,
    /// Hosts that may have something that is not written down.
    in_doubt: BTreeSet<Host>,
}

impl Restarts {
    pub fn new(clients: u64) -> Self {
        let clients = u32::try_from(clients).unwrap();
        Self { clients, late: Vec::new(), in_doubt: BTreeSet::new() }
    }

    pub fn late(&self) -> impl Iterator<Item = (Host, Action)> {
        self.late.iter().cloned()
    }

    pub fn is_any_in_doubt(&self) -> bool {
        !self.in_doubt.is_empty()
    }
}

impl Schedule {
    /// A host's process is killed, and comes again, with all its clients, one of which gives something back; unless another is at something that only an audit could tell.
    pub fn restart(&mut self) {
        let is_giving = |client: &&Client| client.alive && client.may_be_killed() && !client.is_idle();
        let giving: Vec<Host> = self.clients.iter().filter(is_giving).map(|client| client.host).collect();
        if giving.is_empty() {
            return;
        }
        let host = giving[self.rng.index(giving.len())];
        let mut all = self.clients.iter().filter(|client| client.host == host);
        if !all.all(|client| client.alive && client.may_be_killed()) {
            return;
        }
        self.seen.restarts += 1;
        for client in self.clients.iter_mut().filter(|client| client.host == host) {
            self.restarts.clients += 1;
            let late = client.start_again(&self.fabric, self.restarts.clients);
            self.restarts.late.extend(late.map(|action| (host, action)));
        }
    }

    /// As `PoolClient::free_begun` does.
    pub fn resumed(
        &mut self,
        index: usize,
        grant: Grant,
        number: Try,
        outcome: &Result<(), OpError>,
    ) -> Result<(), String> {
        let client = &mut self.clients[index];
        match outcome {
            Ok(()) => self.seen.resumed += 1,
            Err(OpError::NotAllocated | OpError::NotOurs(_)) => {
                // If its key was not struck out it is ours still, and something else of the word has changed.
                let is_opened = self.shadow.is_opened(&self.node_memory, &grant, client.tenant).is_ok();
                if number == Try::First && is_opened {
                    let ended = client.free_after_all(grant);
                    return ended.map_or(Ok(()), |ended| self.ended(index, ended));
                }
                self.seen.left_to_audit += 1;
                self.restarts.in_doubt.insert(client.host);
            }
            Err(error) => return Err(format!("{grant:?} could not be given back: {error:?}")),
        }
        Ok(())
    }

    /// All have given back all that they know of: what those in doubt have is what nobody knows of.
    pub fn audit_all(&mut self) -> Result<(), String> {
        for host in std::mem::take(&mut self.restarts.in_doubt) {
            let of_host = |client: &Client| client.alive && client.host == host;
            if let Some(index) = self.clients.iter().position(of_host) {
                let ended = self.alone(index, |client| client.recover(host))?;
                self.ended(index, ended)?;
            }
        }
        let traces = self.clients.iter().find(|client| self.shadow.has_traces_of(client.host));
        ensure!(traces.is_none(), "{:?} has something yet", traces.map(|client| client.host));
        Ok(())
    }
}
