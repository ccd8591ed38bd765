//! The service's lease and record in the directory, and the fencing of hosts that have left.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, HeapsRecord};
use aquifer_directory::{ConnectDirectory, Directory, DirectoryError, FailureLog, Lease};
use aquifer_fabric::{Host, Target};

use crate::absent_hosts::AbsentHosts;

/// Keeps the service's record in the directory, over failures of the connection to it, and fences
/// hosts that have left.
pub struct Membership {
    connect: ConnectDirectory,
    directory: Arc<dyn Directory>,
    lease: Lease,
    record: HeapsRecord,
    ttl: Duration,
    renewed: Instant,
    failures: FailureLog,
    hosts: AbsentHosts,
    /// Targets to which programs connect with tickets.
    targets: Vec<Arc<dyn Target>>,
}

impl Membership {
    /// Puts the record into the directory at the time `now`, with the epoch of a new lease.
    /// `targets` are the targets that admit tickets.
    ///
    /// # Errors
    /// Errors of the directory.
    pub fn join(
        connect: ConnectDirectory,
        mut record: HeapsRecord,
        ttl: Duration,
        targets: Vec<Arc<dyn Target>>,
        now: Instant,
    ) -> Result<Self, DirectoryError> {
        let directory = connect()?;
        let lease = register(&*directory, &mut record, ttl)?;
        let (failures, hosts) = (FailureLog::default(), AbsentHosts::new(lease.epoch));
        Ok(Self { connect, directory, lease, record, ttl, renewed: now, failures, hosts, targets })
    }

    /// Renews the lease and lists the hosts, if that is due. Reconnects after a failure, and
    /// registers again if the lease has ended.
    pub fn renew(&mut self, now: Instant) {
        if now.saturating_duration_since(self.renewed) < self.ttl / 3 {
            return;
        }
        self.renewed = now;
        if let Err(error) = self.try_renew(now)
            && let Some(failures) = self.failures.record(now)
        {
            tracing::warn!(
                node = self.record.node,
                %error,
                failures,
                "connection to the directory failed; reconnecting"
            );
        }
    }

    fn try_renew(&mut self, now: Instant) -> Result<(), DirectoryError> {
        match self.directory.lease_keep_alive(self.lease.id) {
            Ok(()) => {}
            Err(DirectoryError::LeaseGone(_)) => {
                self.lease = register(&*self.directory, &mut self.record, self.ttl)?;
            }
            Err(error) => {
                self.directory = (self.connect)()?;
                return Err(error);
            }
        }
        self.fence_absent_hosts(now)
    }

    /// Fences hosts that have left, which ends their tickets and connections.
    fn fence_absent_hosts(&mut self, now: Instant) -> Result<(), DirectoryError> {
        let agents = names::agents(&*self.directory)?;
        let present: BTreeMap<Host, u64> =
            agents.iter().map(|agent| (Host(agent.host), agent.epoch)).collect();
        for (host, epoch) in self.hosts.list(&present, now) {
            tracing::debug!(host = host.0, epoch, "ending the tickets of a host without a lease");
            self.targets.iter().for_each(|target| target.fence(host, epoch));
        }
        Ok(())
    }

    /// Ends the lease, which removes the record.
    pub fn leave(&self) {
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "revoking the lease failed; it expires by itself");
        }
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership").field("record", &self.record).finish_non_exhaustive()
    }
}

fn register(
    directory: &dyn Directory,
    record: &mut HeapsRecord,
    ttl: Duration,
) -> Result<Lease, DirectoryError> {
    let lease = directory.lease_grant(ttl)?;
    record.epoch = lease.epoch;
    names::register_heaps(directory, lease, record)?;
    Ok(lease)
}

#[cfg(test)]
mod tests {
    use aquifer_directory::sim::DirectoryWorld;
    use aquifer_fabric::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
    use aquifer_fabric::{Admission, ClusterKey, Endpoint, EndpointError, Tenant, Ticket};

    use super::*;
    use crate::absent_hosts::ABSENCE_TIMEOUT;

    const KEY: ClusterKey = ClusterKey([3; 32]);
    const SERVICE: u8 = 7;
    const TTL: Duration = Duration::from_secs(5);

    fn connect(target: &TcpTarget, host: u16, epoch: u64) -> Result<Box<dyn Endpoint>, EndpointError> {
        let (host, tenant) = (Host(host), Tenant(1000));
        let ticket = Ticket { tenant, host, epoch, expiry_s: u64::MAX, service: SERVICE };
        tcp::connect_with_ticket(target.address(), &ticket, &ticket.secret(&KEY), ConnectOptions::default())
    }

    #[test]
    fn tickets_of_a_host_that_has_left_end() {
        let start = Instant::now();
        let world = DirectoryWorld::new(1);
        let (own, host) = (world.host(1), world.host(2));
        let claim = || {
            let lease = host.lease_grant(TTL).unwrap();
            names::claim_host(&host, lease, "/socket", 0).unwrap()
        };
        let (stays, leaves) = (claim(), claim());
        let options = TcpOptions { admission: Admission::Tickets(SERVICE), ..TcpOptions::default() };
        let target = Arc::new(TcpTarget::listen("127.0.0.1:0".parse().unwrap(), &KEY, options).unwrap());
        let record = HeapsRecord {
            node: 1,
            address: target.address().to_string(),
            device: None,
            memory_bytes: 0,
            kept_ms: 0,
            epoch: 0,
        };
        let directory = Box::new(move || Ok(Arc::new(own.clone()) as Arc<dyn Directory>));
        let targets = vec![Arc::clone(&target) as Arc<dyn Target>];
        let mut membership = Membership::join(directory, record, TTL, targets, start).unwrap();
        membership.fence_absent_hosts(start).unwrap();
        let key = names::agent_key(leaves.host);
        host.lease_revoke(host.get(&key).unwrap().unwrap().lease.unwrap()).unwrap();
        membership.fence_absent_hosts(start).unwrap();
        assert!(connect(&target, leaves.host, leaves.epoch).is_ok());
        membership.fence_absent_hosts(start + ABSENCE_TIMEOUT).unwrap();
        assert!(connect(&target, leaves.host, leaves.epoch).is_err());
        assert!(connect(&target, stays.host, stays.epoch).is_ok());
        // A host that left before this process started.
        assert!(connect(&target, 9, 1).is_err());
    }
}
