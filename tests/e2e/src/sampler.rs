//! Samples the memory of a process tree every few milliseconds.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::processes::{descendants, proportional_anonymous_bytes, resident_anonymous_bytes};

/// Time between two samples.
const TICK: Duration = Duration::from_millis(4);
/// Time between two samples of shared memory, for which the kernel walks through all pages.
const SHARED_TICK: Duration = Duration::from_millis(20);

/// The maxima of all samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peak {
    /// Resident anonymous memory of all processes together, in bytes.
    pub anonymous_bytes: u64,
    /// Resident anonymous memory plus the run's part of the mempool, in bytes.
    pub total_bytes: u64,
    /// Number of samples.
    pub samples: u64,
}

/// Resident anonymous memory of processes together, in bytes. Memory that they share after a fork
/// is counted once if `forks`.
#[must_use]
pub fn anonymous_bytes(pids: &[u32], forks: bool) -> u64 {
    let bytes = if forks { proportional_anonymous_bytes } else { resident_anonymous_bytes };
    pids.iter().copied().filter_map(bytes).sum()
}

/// A thread that samples until it is stopped.
#[derive(Debug)]
pub struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Peak>,
}

/// Function that returns a run's part of the mempool, in bytes.
pub type MempoolShare = Box<dyn FnMut() -> u64 + Send>;

impl Sampler {
    /// Samples all descendants of `pid`, without `pid` itself.
    ///
    /// # Panics
    /// If the thread cannot be started.
    #[must_use]
    pub fn start(pid: u32, forks: bool, mut mempool: MempoolShare) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut peak = Peak::default();
            let tick = if forks { SHARED_TICK } else { TICK };
            loop {
                let before = descendants(pid);
                let anonymous = anonymous_bytes(&before, forks);
                // A fork or an exit during the sample makes it invalid.
                if !forks || descendants(pid) == before {
                    peak.anonymous_bytes = peak.anonymous_bytes.max(anonymous);
                    peak.total_bytes = peak.total_bytes.max(anonymous + mempool());
                    peak.samples += 1;
                }
                if stopped.recv_timeout(tick) != Err(RecvTimeoutError::Timeout) {
                    return peak;
                }
            }
        });
        Self { stop, thread }
    }

    /// Stops sampling and returns the maxima.
    ///
    /// # Panics
    /// If the thread panicked.
    #[must_use]
    pub fn stop(self) -> Peak {
        drop(self.stop);
        self.thread.join().expect("sampling does not fail")
    }
}
