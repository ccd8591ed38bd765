//! The lease of a server, and the time until which it is known to last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_channel::boot_time::BootInstant;
use aquifer_directory::{Directory, DirectoryError, FailureLog, Lease};

/// Lifetime of a server's lease without a keep-alive. When it has ended, other servers may claim
/// its partitions.
pub const LEASE_TTL: Duration = Duration::from_secs(3);
/// Default time after the end of a server's lease for which others do not claim its partitions.
pub const RETURN_TIME: Duration = Duration::from_millis(1500);
/// Interval between keep-alives.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// Time before the end of the lease from which a server serves no partition, because the clock of
/// the directory may be faster.
const CLOCK_MARGIN: Duration = Duration::from_millis(300);

/// The time until which a server may serve, because its lease is known to last.
#[derive(Debug)]
pub struct ServingDeadline {
    /// Deadline in milliseconds since boot, by a clock that runs while the machine is suspended.
    deadline_ms: AtomicU64,
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl ServingDeadline {
    /// A deadline that has passed: the server has no lease yet.
    #[must_use]
    pub fn passed() -> Self {
        Self { deadline_ms: AtomicU64::new(0) }
    }

    /// Whether the server may serve now.
    #[must_use]
    pub fn is_ahead(&self) -> bool {
        self.is_ahead_at(BootInstant::now())
    }

    /// Whether the server may serve at the time `now`.
    #[must_use]
    pub fn is_ahead_at(&self, now: BootInstant) -> bool {
        ms(now.since_start()) < self.deadline_ms.load(Ordering::Acquire)
    }

    /// Renews the deadline after a grant or keep-alive that has succeeded and was sent at `sent`.
    pub fn renew(&self, sent: BootInstant) {
        self.deadline_ms.store(ms((sent + (LEASE_TTL - CLOCK_MARGIN)).since_start()), Ordering::Release);
    }

    /// Sets the deadline to the past: the server serves nothing from now on.
    pub fn end(&self) {
        self.deadline_ms.store(0, Ordering::Release);
    }
}

/// Sends a keep-alive at `now`. Renews the deadline if it succeeds, and ends it if the lease has
/// ended.
///
/// # Errors
/// Errors of the directory: [`DirectoryError::LeaseGone`] if the lease has ended.
pub fn keep_alive(
    directory: &dyn Directory,
    lease: Lease,
    deadline: &ServingDeadline,
    now: BootInstant,
) -> Result<(), DirectoryError> {
    let kept_alive = directory.lease_keep_alive(lease.id);
    match kept_alive {
        Ok(()) => deadline.renew(now),
        Err(DirectoryError::LeaseGone(_)) => deadline.end(),
        Err(_) => {}
    }
    kept_alive
}

/// A lease that a thread keeps alive.
#[derive(Debug)]
pub struct KeptLease {
    lease: Lease,
    directory: Arc<dyn Directory>,
    stops: Arc<AtomicBool>,
    is_lost: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl KeptLease {
    /// Gets a lease from the directory, and keeps it alive in a thread that renews `deadline`.
    ///
    /// # Errors
    /// Errors of the directory, or if the thread cannot be started.
    pub fn grant(
        directory: &Arc<dyn Directory>,
        deadline: &Arc<ServingDeadline>,
    ) -> Result<Self, DirectoryError> {
        let sent = BootInstant::now();
        let lease = directory.lease_grant(LEASE_TTL)?;
        deadline.renew(sent);
        let (stops, is_lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let keep_alives = KeepAlives {
            directory: Arc::clone(directory),
            lease,
            deadline: Arc::clone(deadline),
            stops: Arc::clone(&stops),
            is_lost: Arc::clone(&is_lost),
        };
        let thread = std::thread::Builder::new()
            .name("cache-lease".into())
            .spawn(move || keep_alives.run())
            .map_err(|error| DirectoryError::Unavailable {
                address: "a thread that keeps the lease alive".to_owned(),
                cause: error.to_string(),
            })?;
        Ok(Self { lease, directory: Arc::clone(directory), stops, is_lost, thread })
    }

    /// The lease.
    #[must_use]
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// Whether the lease has ended: the server owns no partition any more.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Stops the keep-alives and revokes the lease.
    pub fn end(self) {
        self.stops.store(true, Ordering::Release);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            tracing::error!("the thread of lease keep-alives panicked");
        }
        if let Err(error) = self.directory.lease_revoke(self.lease.id) {
            tracing::debug!(%error, "revoking the lease failed; it expires by itself");
        }
    }
}

struct KeepAlives {
    directory: Arc<dyn Directory>,
    lease: Lease,
    deadline: Arc<ServingDeadline>,
    stops: Arc<AtomicBool>,
    is_lost: Arc<AtomicBool>,
}

impl KeepAlives {
    fn run(self) {
        let mut failures = FailureLog::default();
        while !self.stops.load(Ordering::Acquire) {
            std::thread::park_timeout(KEEP_ALIVE_INTERVAL);
            match keep_alive(&*self.directory, self.lease, &self.deadline, BootInstant::now()) {
                Ok(()) => {}
                Err(DirectoryError::LeaseGone(_)) => {
                    if !self.stops.load(Ordering::Acquire) {
                        tracing::error!(
                            "lease of this server ended; serving no partition until it has joined again"
                        );
                    }
                    // Last, because from now on the next lease may renew the deadline.
                    self.is_lost.store(true, Ordering::Release);
                    return;
                }
                Err(error) => {
                    if let Some(failures) = failures.record(Instant::now()) {
                        tracing::warn!(%error, failures, "lease keep-alive failed; retrying every 500 ms");
                    }
                }
            }
        }
        self.deadline.end();
    }
}
