//! The end of a schedule: all processes run and reach the directory, dead hosts are recovered, and
//! no memory is leaked.

use aquifer_directory::Directory;
use aquifer_directory::names;
use aquifer_fabric::{Host, Identity};
use aquifer_pool::PoolClient;

use super::link::{Outcome, TENANT};
use super::world::World;

/// Largest number of recovery steps at the end of a schedule.
const RECOVERY_TURNS_MAX: u32 = 1_000;
/// Time in seconds after which the leases of ended processes have expired, and operations on
/// stopped nodes have been answered.
const IDLE_SECONDS: u32 = 40;

impl World {
    /// Ends all faults, frees the memory of all hosts, which leave, recovers dead hosts, and checks
    /// that no memory is lost.
    pub fn end(&mut self) -> Result<(), String> {
        self.heal()?;
        for _ in 0..IDLE_SECONDS {
            self.pass_time(1_000, |_| true)?;
            for index in 0..self.machines.len() {
                self.use_memory(index)?;
            }
        }
        for index in 0..self.machines.len() {
            self.free_all(index)?;
            if let Some(host) = self.machines[index].host.take() {
                host.directory.lease_revoke(host.lease.id).map_err(|error| error.to_string())?;
            }
            (self.machines[index].left, self.machines[index].takeover) = (None, None);
        }
        self.start_host(0, None)?;
        for _ in 0..RECOVERY_TURNS_MAX {
            let host = self.machines[0].host.as_ref().ok_or("at the end, no host can start")?;
            let dead = names::dead_hosts(&self.direct).map_err(|error| error.to_string())?;
            if host.worker.current().is_none() && dead.is_empty() {
                return self.nothing_is_leaked();
            }
            self.pass_time(500, |_| true)?;
            self.recover(0, false)?;
        }
        Err(format!("at the end, dead hosts are not recovered within {RECOVERY_TURNS_MAX} steps"))
    }

    fn heal(&mut self) -> Result<(), String> {
        (self.all_cut, self.is_directory_stopped) = (false, false);
        for machine in &mut self.machines {
            (machine.is_cut, machine.is_stopped, machine.is_suspended) = (false, false, false);
        }
        for node in &mut self.nodes {
            node.is_cut = false;
            node.directory.set_disconnected(false);
            node.set_stopped(false, self.now_ms);
            // A lost call may hit the first attempt.
            let mut attempts = 0;
            while !node.is_running && node.start(self.now_ms).is_err() {
                attempts += 1;
                assert!(attempts < 10, "the directory is reachable");
            }
        }
        self.apply_cuts();
        for machine in &mut self.machines {
            if let Some(host) = &mut machine.host {
                host.worker.finish(machine.machine.uptime());
            }
        }
        Ok(())
    }

    /// Checks and frees all extents of a host, which has a valid lease.
    fn free_all(&mut self, index: usize) -> Result<(), String> {
        let Some(host) = &mut self.machines[index].host else { return Ok(()) };
        if !host.left.is_empty() {
            return Err(format!("at the end, host {} waits for nodes that serve", host.record.host));
        }
        let number = host.record.host;
        for link in &mut host.links {
            let node = self.nodes.iter().find(|node| node.id == link.seen.id).expect("the node exists");
            let may_be_lost = link.has_stale_record || node.may_be_lost(&link.seen, self.now_ms);
            while !link.extents.is_empty() {
                let polled = link.poll_pending();
                let checked = if polled == Outcome::Done { link.check(0) } else { polled };
                if may_be_lost && matches!(checked, Outcome::Lost(_)) {
                    break;
                }
                if checked != Outcome::Done {
                    return Err(format!("at the end, host {number} on node {}: {checked:?}", link.seen.id.0));
                }
                // A broken connection frees nothing; the recovery of the host does.
                match link.free(0) {
                    Outcome::Done | Outcome::Waits => {}
                    freed => return Err(format!("at the end, host {number} cannot free: {freed:?}")),
                }
            }
        }
        Ok(())
    }

    fn nothing_is_leaked(&mut self) -> Result<(), String> {
        for node in &self.nodes {
            let identity = Identity { host: Host(u16::MAX - 1), epoch: 1, tenant: TENANT };
            let mut pool = PoolClient::new(identity.host, TENANT);
            let target = &node.memory.as_ref().expect("the node runs").target;
            let endpoint = self.fabric.connect(target.node(), identity).map_err(|error| error.to_string())?;
            pool.add_node(node.id, endpoint).map_err(|error| error.to_string())?;
            pool.refresh(node.id).map_err(|error| error.to_string())?;
            let (free, total) = (pool.free_bytes(node.id), pool.total_bytes(node.id));
            if free != total {
                let (id, lost) = (node.id.0, total - free);
                return Err(format!("at the end, {lost} of {total} bytes of node {id} are lost"));
            }
        }
        Ok(())
    }
}
