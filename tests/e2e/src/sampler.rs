//! Watches a process tree's memory from outside, every few milliseconds.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::processes::{descendants, proportional_anonymous_bytes, resident_anonymous_bytes};

const TICK: Duration = Duration::from_millis(4);
/// To sum up what is shared takes the kernel a walk through all pages.
const SHARED_TICK: Duration = Duration::from_millis(20);

/// The most that was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peak {
    /// Resident anonymous memory of all processes together, in bytes.
    pub anonymous_bytes: u64,
    /// That, and the share of the mempool at the same moment.
    pub total_bytes: u64,
    /// How often was looked.
    pub samples: u64,
}

/// Resident anonymous memory of these processes together, in bytes; what they share by `fork` is
/// counted once if `forks`.
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

/// Tells a run's share of the mempool, in bytes.
pub type MempoolShare = Box<dyn FnMut() -> u64 + Send>;

impl Sampler {
    /// Watch all descendants of `pid`, but not itself; what it forks is counted once if `forks`.
    ///
    /// # Panics
    /// If there is no thread.
    #[must_use]
    pub fn start(pid: u32, forks: bool, mut mempool: MempoolShare) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut peak = Peak::default();
            let tick = if forks { SHARED_TICK } else { TICK };
            loop {
                let before = descendants(pid);
                let anonymous = anonymous_bytes(&before, forks);
                // What a fork or an exit in between would count twice is no sample.
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

    /// Stop, and tell the most that was seen.
    ///
    /// # Panics
    /// If sampling has failed.
    #[must_use]
    pub fn stop(self) -> Peak {
        drop(self.stop);
        self.thread.join().expect("sampling does not fail")
    }
}
