//! The lease of a server, and how long it lasts for sure.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_channel::boot_time::BootInstant;
use aquifer_directory::{Directory, DirectoryError, FailureLog, Lease};

/// The time after which a server that says nothing is taken for dead. Its partitions begin anew
/// elsewhere then.
pub const LEASE_TTL: Duration = Duration::from_secs(3);
/// Default time for which partitions of a server whose lease has ended are left to it.
pub const RETURN_TIME: Duration = Duration::from_millis(1500);
/// Interval between keep-alives.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// The server serves no partition when the lease may end so soon: the clock of the directory may be
/// faster.
const MARGIN: Duration = Duration::from_millis(300);

/// The time at which a server ends serving, because its lease may have ended: by a clock that runs
/// while the machine is suspended.
#[derive(Debug)]
pub struct ServingDeadline {
    /// In milliseconds since the machine was started.
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

    /// Whether the server may serve at this moment.
    #[must_use]
    pub fn is_ahead(&self) -> bool {
        self.is_ahead_at(BootInstant::now())
    }

    /// Whether the server may serve at a moment.
    #[must_use]
    pub fn is_ahead_at(&self, now: BootInstant) -> bool {
        ms(now.since_start()) < self.deadline_ms.load(Ordering::Acquire)
    }

    /// Renews the deadline after a grant or keep-alive that has succeeded and was sent at `sent`.
    pub fn renew(&self, sent: BootInstant) {
        self.deadline_ms.store(ms((sent + (LEASE_TTL - MARGIN)).since_start()), Ordering::Release);
    }

    /// Ends serving at once.
    pub fn end(&self) {
        self.deadline_ms.store(0, Ordering::Release);
    }
}

/// Sends a keep-alive at `now`. Renews the deadline if it succeeds, and ends it if the lease has
/// ended.
///
/// # Errors
/// Those of the directory: [`DirectoryError::LeaseGone`] if the lease has ended.
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
    /// Grants a lease, and renews the deadline as long as it lasts.
    ///
    /// # Errors
    /// Those of the directory, or if no thread can be started.
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

    /// Whether the lease has ended. The server has nothing any more.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Ends the lease.
    pub fn end(self) {
        self.stops.store(true, Ordering::Release);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            tracing::error!("the thread that kept the lease alive has panicked");
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
                            "the lease has ended; this server serves no partition until it has joined again"
                        );
                    }
                    // From now on the next lease may renew the deadline.
                    self.is_lost.store(true, Ordering::Release);
                    return;
                }
                Err(error) => {
                    if let Some(failures) = failures.record(Instant::now()) {
                        tracing::warn!(%error, failures, "the lease cannot be kept alive");
                    }
                }
            }
        }
        self.deadline.end();
    }
}
