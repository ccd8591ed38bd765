//! The runs of this host with memory that nodes recall, for `aquifer drain`.
//!
//! A drain of a node names the runs that it waits for, on whatever host they are. Each agent
//! writes its own into the directory while there are any.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, RECALLED_RUNS_MAX, RecalledRecord, RecalledRun};
use aquifer_directory::{Directory, DirectoryError, FailureLog, Lease};
use aquifer_faults::serve::PagingService;
use aquifer_host::membership::Membership;
use aquifer_report::RecalledRunMemory;

use crate::swap_servers::SwapServers;

/// Interval at which the runs are examined.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum length of a name in a record, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// The thread that writes the record. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct RecalledRuns {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RecalledRuns {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(
        membership: &Membership,
        paging: &Arc<PagingService>,
        swap_servers: &Arc<SwapServers>,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut writer = RecordWriter {
            directory: Arc::clone(membership.directory()),
            lease: membership.lease(),
            host: membership.host().0,
            written: None,
            failures: FailureLog::default(),
        };
        let (stopped, paging, swap_servers) =
            (Arc::clone(&stop), Arc::clone(paging), Arc::clone(swap_servers));
        let run = move || {
            while !stopped.load(Relaxed) {
                let paged = paging.runs();
                let paged = paged.iter().map(|run| (run.name().to_owned(), run.tenant(), run.recalled()));
                let swapped = swap_servers.reports();
                let swapped = swapped.into_iter().map(|report| report.statistics);
                let swapped = swapped.map(|run| (run.name, run.tenant, run.recalled));
                writer.write(recalled_runs(paged.chain(swapped)));
                std::thread::park_timeout(INTERVAL);
            }
        };
        let thread = std::thread::Builder::new().name("recalled-runs".into()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for RecalledRuns {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        if thread.join().is_err() {
            tracing::error!("the thread of recalled runs panicked");
        }
    }
}

/// Writes the record when it has changed.
struct RecordWriter {
    directory: Arc<dyn Directory>,
    lease: Lease,
    host: u16,
    /// The runs in the record; `None` if it may be another one.
    written: Option<Vec<RecalledRun>>,
    failures: FailureLog,
}

impl RecordWriter {
    fn write(&mut self, runs: Vec<RecalledRun>) {
        if self.written.as_ref() == Some(&runs) {
            return;
        }
        match self.put(&runs) {
            Ok(()) => self.written = Some(runs),
            Err(error) => {
                self.written = None;
                if let Some(failures) = self.failures.record(Instant::now()) {
                    tracing::warn!(%error, failures, "recording recalled runs failed");
                }
            }
        }
    }

    fn put(&self, runs: &[RecalledRun]) -> Result<(), DirectoryError> {
        let key = names::recalled_key(self.host);
        if runs.is_empty() {
            return self.directory.delete(&key).map(drop);
        }
        let record = RecalledRecord { host: self.host, runs: runs.to_vec() };
        self.directory.put(&key, &names::encode(&record), Some(self.lease.id)).map(drop)
    }
}

/// The memory that is recalled from runs, given the name, the tenant and the memory of each. The
/// largest comes first.
fn recalled_runs(runs: impl Iterator<Item = (String, u32, Vec<RecalledRunMemory>)>) -> Vec<RecalledRun> {
    let mut found = Vec::new();
    for (mut name, tenant, recalled) in runs {
        name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
        found.extend(recalled.iter().map(|recalled| RecalledRun {
            node: recalled.node,
            name: name.clone(),
            tenant,
            bytes: recalled.bytes,
            only_copy_bytes: recalled.only_copy_bytes,
        }));
    }
    found.sort_by_key(|run| std::cmp::Reverse(run.bytes));
    found.truncate(RECALLED_RUNS_MAX);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_runs_are_recorded() {
        let run = |name: &str, bytes: u64| {
            let recalled = RecalledRunMemory { node: 1, bytes, only_copy_bytes: bytes / 2 };
            (name.to_owned(), 7, vec![recalled])
        };
        let idle = ("idle".to_owned(), 7, Vec::new());
        let runs = recalled_runs([run("small", 2), idle, run(&"é".repeat(100), 4)].into_iter());
        let expected = |name: &str, bytes: u64| RecalledRun {
            node: 1,
            name: name.to_owned(),
            tenant: 7,
            bytes,
            only_copy_bytes: bytes / 2,
        };
        assert_eq!(runs, [expected(&"é".repeat(NAME_BYTES_MAX / 2), 4), expected("small", 2)]);
        let many = (0..1000).map(|bytes| run("many", bytes));
        let most = recalled_runs(many);
        assert_eq!((most.len(), most[0].bytes), (RECALLED_RUNS_MAX, 999));
    }
}
