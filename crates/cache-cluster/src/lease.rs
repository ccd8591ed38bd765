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
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// The server serves no partition when the lease may end so soon: the clock of the directory may be
/// faster.
const MARGIN: Duration = Duration::from_millis(300);

/// Until when a server may serve.
#[derive(Debug)]
pub struct Fence {
    /// Milliseconds since the machine was started, with those in which it was suspended.
    until_ms: AtomicU64,
}

fn now_ms() -> u64 {
    ms(BootInstant::now().since_start())
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Fence {
    /// A server that may not serve yet.
    #[must_use]
    pub fn closed() -> Self {
        Self { until_ms: AtomicU64::new(0) }
    }

    /// Whether the server may serve.
    #[must_use]
    pub fn is_open(&self) -> bool {
        now_ms() < self.until_ms.load(Ordering::Acquire)
    }

    fn renew(&self, sent_ms: u64) {
        self.until_ms.store(sent_ms + ms(LEASE_TTL - MARGIN), Ordering::Release);
    }

    fn close(&self) {
        self.until_ms.store(0, Ordering::Release);
    }
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
    /// Grants a lease, and opens the fence as long as it lasts.
    ///
    /// # Errors
    /// Those of the directory, or if no thread can be started.
    pub fn grant(directory: &Arc<dyn Directory>, fence: &Arc<Fence>) -> Result<Self, DirectoryError> {
        let sent_ms = now_ms();
        let lease = directory.lease_grant(LEASE_TTL)?;
        fence.renew(sent_ms);
        let (stops, is_lost) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let keeper = Keeper {
            directory: Arc::clone(directory),
            lease,
            fence: Arc::clone(fence),
            stops: Arc::clone(&stops),
            is_lost: Arc::clone(&is_lost),
        };
        let thread = std::thread::Builder::new()
            .name("cache-lease".into())
            .spawn(move || keeper.run())
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

struct Keeper {
    directory: Arc<dyn Directory>,
    lease: Lease,
    fence: Arc<Fence>,
    stops: Arc<AtomicBool>,
    is_lost: Arc<AtomicBool>,
}

impl Keeper {
    fn run(self) {
        let mut failures = FailureLog::default();
        while !self.stops.load(Ordering::Acquire) {
            std::thread::park_timeout(KEEP_ALIVE_INTERVAL);
            let sent_ms = now_ms();
            match self.directory.lease_keep_alive(self.lease.id) {
                Ok(()) => self.fence.renew(sent_ms),
                Err(DirectoryError::LeaseGone { .. }) => {
                    if !self.stops.load(Ordering::Acquire) {
                        tracing::error!(
                            "the lease has ended; this server serves no partition until it has joined again"
                        );
                    }
                    self.is_lost.store(true, Ordering::Release);
                    break;
                }
                Err(error) => {
                    if let Some(failures) = failures.record(Instant::now()) {
                        tracing::warn!(%error, failures, "the lease cannot be kept alive");
                    }
                }
            }
        }
        self.fence.close();
    }
}
