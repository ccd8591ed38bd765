//! Synchronous use of an endpoint: runs batches of operations, and waits for messages.

use std::time::{Duration, Instant};

use crate::work::{Completion, Endpoint, PostError, Verb, Work, WorkError};

/// Interval at which a waiting thread checks the endpoint: one that breaks wakes no thread.
const BROKEN_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The id of the last operation of a batch. The operations before it are done when it is.
const LAST_ID: u64 = u64::MAX;

/// Why a batch was not completed, or no message arrived.
///
/// Operations may still be in flight, and write to local memory later. So the endpoint must not be
/// used for other work afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BatchError {
    /// The deadline passed.
    #[error("the peer did not answer in time")]
    Timeout,
    /// The endpoint broke.
    #[error("the connection broke")]
    Broken,
    /// The endpoint has room for this number of operations only.
    #[error("the send queue has room for {0} operations only")]
    QueueFull(usize),
}

/// Operations for one endpoint. Reused for one batch after the other, it allocates nothing.
#[derive(Debug, Default)]
pub struct Batch {
    works: Vec<Work>,
    completions: Vec<Completion>,
    failures: Vec<(u64, WorkError)>,
}

impl Batch {
    /// Creates an empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operation. Several may have the same `id`.
    pub fn push(&mut self, id: u64, verb: Verb) {
        self.works.push(Work { id, verb, signalled: false });
    }

    /// Posts all operations and waits until each has completed or failed. The batch is empty
    /// afterwards; [`Self::failures`] returns the failed operations.
    ///
    /// # Errors
    /// If not all operations completed by the deadline, the endpoint is broken, or its queue is too
    /// short.
    pub fn run(&mut self, endpoint: &mut dyn Endpoint, deadline: Instant) -> Result<(), BatchError> {
        self.failures.clear();
        let Some(last) = self.works.last_mut() else { return Ok(()) };
        last.signalled = true;
        let last_id = std::mem::replace(&mut last.id, LAST_ID);
        let posted = endpoint.post(&self.works);
        let count = self.works.len();
        self.works.clear();
        posted.map_err(|PostError::QueueFull { accepted }| BatchError::QueueFull(accepted))?;
        loop {
            self.completions.clear();
            endpoint.poll(&mut self.completions, count);
            for completion in &self.completions {
                let is_last = completion.id == LAST_ID;
                if let Err(error) = completion.outcome {
                    self.failures.push((if is_last { last_id } else { completion.id }, error));
                }
                if is_last {
                    return Ok(());
                }
            }
            if self.completions.is_empty() {
                wait(endpoint, deadline)?;
            }
        }
    }

    /// The operations of the last run that failed, by their ids, in the order of posting.
    #[must_use]
    pub fn failures(&self) -> &[(u64, WorkError)] {
        &self.failures
    }

    /// The first failure of an operation with this id in the last run.
    #[must_use]
    pub fn failure_of(&self, id: u64) -> Option<WorkError> {
        self.failures.iter().find(|(failed, _)| *failed == id).map(|(_, error)| *error)
    }
}

/// Waits for a message, and appends it to `out`.
///
/// # Errors
/// If no message arrives by the deadline, or the endpoint is broken.
pub fn receive_until(
    endpoint: &mut dyn Endpoint,
    out: &mut Vec<u8>,
    deadline: Instant,
) -> Result<(), BatchError> {
    while !endpoint.receive(out) {
        wait(endpoint, deadline)?;
    }
    Ok(())
}

fn wait(endpoint: &mut dyn Endpoint, deadline: Instant) -> Result<(), BatchError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(BatchError::Timeout);
    }
    if endpoint.is_broken() {
        return Err(BatchError::Broken);
    }
    endpoint.wait(left.min(BROKEN_CHECK_INTERVAL));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::tcp::{self, ConnectOptions, TcpOptions, TcpTarget};
    use crate::{
        Access, ClusterKey, Host, Identity, Key, LocalSlice, Memory, RemoteAddr, Scope, Target, Tenant,
    };

    const KEY: ClusterKey = ClusterKey([3; 32]);

    #[test]
    fn a_batch_reports_which_operations_failed() {
        let address = "127.0.0.1:0".parse().unwrap();
        let target = TcpTarget::listen(address, &KEY, TcpOptions::default()).unwrap();
        let memory = Arc::new(Memory::create("remote", 4096).unwrap());
        memory.write(8, &7_u64.to_le_bytes());
        let region = target.register(memory, Access::READ, Scope::Anyone).unwrap();
        let identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(1) };
        let mut endpoint = tcp::connect(target.address(), &KEY, identity, ConnectOptions::default()).unwrap();
        let own = Arc::new(Memory::create("local", 4096).unwrap());
        let local = endpoint.register_local(Arc::clone(&own)).unwrap();
        let mut batch = Batch::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        for wrong in 0..3 {
            for id in 0..3 {
                let key = if id == wrong { Key(!region.key.0) } else { region.key };
                let remote = RemoteAddr { addr: region.base + 8, key };
                batch.push(
                    id,
                    Verb::Read { local: LocalSlice { key: local, offset: 8 * id, len: 8 }, remote },
                );
            }
            assert_eq!(batch.run(&mut *endpoint, deadline), Ok(()));
            assert_eq!(batch.failures(), [(wrong, WorkError::RemoteAccess)]);
            assert_eq!(batch.failure_of((wrong + 1) % 3), None);
        }
        assert_eq!(own.load_u64(0), 7);
        assert_eq!(batch.run(&mut *endpoint, deadline), Ok(()), "the batch is empty");
    }
}
