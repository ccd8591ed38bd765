//! The service's lease and record in the directory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, HeapsRecord};
use aquifer_directory::{Directory, DirectoryError, FailureLog, Lease};

use crate::serve::ConnectDirectory;

/// Keeps the service's record in the directory, whatever happens to the connection to it.
pub(crate) struct Membership {
    connect: ConnectDirectory,
    directory: Arc<dyn Directory>,
    lease: Lease,
    record: HeapsRecord,
    ttl: Duration,
    renewed: Instant,
    failures: FailureLog,
}

impl Membership {
    /// Puts the record into the directory. Its epoch is that of the lease.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn join(
        connect: ConnectDirectory,
        mut record: HeapsRecord,
        ttl: Duration,
    ) -> Result<Self, DirectoryError> {
        let directory = connect()?;
        let lease = register(&*directory, &mut record, ttl)?;
        let failures = FailureLog::default();
        Ok(Self { connect, directory, lease, record, ttl, renewed: Instant::now(), failures })
    }

    /// Renews the lease, if that is due. After failures it connects again, and registers again if
    /// the lease has ended.
    pub fn renew(&mut self) {
        if self.renewed.elapsed() < self.ttl / 3 {
            return;
        }
        self.renewed = Instant::now();
        if let Err(error) = self.try_renew()
            && let Some(failures) = self.failures.record(Instant::now())
        {
            tracing::warn!(
                node = self.record.node,
                %error,
                failures,
                "connection to the directory failed; reconnecting"
            );
        }
    }

    fn try_renew(&mut self) -> Result<(), DirectoryError> {
        match self.directory.lease_keep_alive(self.lease.id) {
            Ok(()) => Ok(()),
            Err(DirectoryError::LeaseGone(_)) => {
                self.lease = register(&*self.directory, &mut self.record, self.ttl)?;
                Ok(())
            }
            Err(error) => {
                self.directory = (self.connect)()?;
                Err(error)
            }
        }
    }

    /// Removes the record.
    pub fn leave(&self) {
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "the record of the service ends with its lease");
        }
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
