//! The maintenance thread: clears memory between tenants, and changes the amount of lent memory.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::clearer::Clearer;
use crate::kept_memory::MemoryKeeper;
use crate::resizer::Resizer;
use crate::self_client::{SelfClient, SelfClientError};
use crate::shutdown::Shutdown;

/// Interval between turns.
const TURN_INTERVAL: Duration = Duration::from_millis(100);

/// The maintenance thread. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct MaintenanceThread {
    stop: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl MaintenanceThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        client: SelfClient,
        clearer: Clearer,
        resizer: Resizer,
        keeper: Option<Arc<MemoryKeeper>>,
    ) -> std::io::Result<Self> {
        let stop = Shutdown::new();
        let tasks = MaintenanceTasks { client, clearer, resizer, keeper, failing: BTreeSet::new() };
        let thread_stop = stop.clone();
        let thread =
            std::thread::Builder::new().name("maintenance".into()).spawn(move || tasks.run(&thread_stop))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for MaintenanceThread {
    fn drop(&mut self) {
        self.stop.request();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "the maintenance thread panicked");
        }
    }
}

struct MaintenanceTasks {
    client: SelfClient,
    clearer: Clearer,
    resizer: Resizer,
    keeper: Option<Arc<MemoryKeeper>>,
    /// Names of the tasks whose last attempt has failed.
    failing: BTreeSet<&'static str>,
}

impl MaintenanceTasks {
    fn run(mut self, stop: &Shutdown) {
        let mut pause = TURN_INTERVAL;
        while !stop.wait(pause) {
            pause = TURN_INTERVAL;
            if let Some(keeper) = &self.keeper {
                keeper.reconnect_if_closed();
            }
            // Changes that a broken connection has interrupted are undone at once, and not only
            // when there is another change to make.
            let connected =
                if self.client.has_unfinished_change() { self.client.connect().map(drop) } else { Ok(()) };
            let is_connected = self.record("connection to the node's own memory", connected);
            // Called without a connection, too, because it reports the reason why the change fails.
            let resized = self.resizer.run(&mut self.client, stop);
            self.record("changing the lent memory", resized);
            self.resizer.write_figures();
            if !is_connected {
                continue;
            }
            let cleared = self.clearer.run(&mut self.client, stop);
            if let Ok(false) = cleared {
                pause = Duration::ZERO;
            }
            self.record("clearing freed memory", cleared.map(drop));
        }
    }

    /// Records the outcome of a task; returns true if it has succeeded. After a failure, closes the
    /// connection, and logs the first failure of a series.
    fn record(&mut self, task: &'static str, outcome: Result<(), SelfClientError>) -> bool {
        match &outcome {
            Ok(()) => {
                self.failing.remove(task);
            }
            Err(error) => {
                self.client.disconnect();
                if self.failing.insert(task) {
                    tracing::warn!(task, %error, "maintenance task failed; retrying");
                }
            }
        }
        outcome.is_ok()
    }
}
