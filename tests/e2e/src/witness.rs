//! Threads that find out how late this machine lets even the most urgent ones run.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{JoinHandle, available_parallelism};
use std::time::{Duration, Instant};

use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, sched_setaffinity};

const TICK: Duration = Duration::from_millis(1);
/// As urgent as a common thread can be.
const NICENESS: i32 = -20;

/// One thread on each processor that asks to be woken every millisecond. One that is late was kept from running by others on the same hardware, or by
/// this machine's kernel: whoever had to be in time was late as well then.
#[derive(Debug)]
pub struct Witness {
    threads: Vec<(Sender<()>, JoinHandle<Duration>)>,
}

impl Witness {
    /// Begin to look.
    #[must_use]
    pub fn start() -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        let threads = (0..processors).map(|processor| {
            let (stop, stopped) = channel();
            (stop, std::thread::spawn(move || latest_wake(processor, &stopped)))
        });
        Self { threads: threads.collect() }
    }

    /// By how much the latest wake since then was late.
    ///
    /// # Panics
    /// If a thread has failed.
    #[must_use]
    pub fn stop(self) -> Duration {
        let lateness = self.threads.into_iter().map(|(stop, thread)| {
            drop(stop);
            thread.join().expect("to wait does not fail")
        });
        lateness.max().unwrap_or_default()
    }
}

/// On one processor, until it is told to stop.
fn latest_wake(processor: usize, stopped: &Receiver<()>) -> Duration {
    let mut only = CpuSet::new();
    only.set(processor);
    // Where one or the other is forbidden, it is a witness of less.
    let _ = sched_setaffinity(None, &only);
    let _ = setpriority_process(None, NICENESS);
    let mut latest = Duration::ZERO;
    let mut asleep = Instant::now();
    while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        latest = latest.max(asleep.elapsed().saturating_sub(TICK));
        asleep = Instant::now();
    }
    latest
}
