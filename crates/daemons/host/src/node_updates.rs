//! Updates of the memory nodes from the directory: events of a watch, and listings after failures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names;
use aquifer_directory::{Directory, DirectoryError, FailureLog, Watch};

use crate::nodes::NodeRegistry;

/// The watch that keeps a [`NodeRegistry`] up to date.
///
/// The watch has no thread: the caller calls [`NodeUpdates::step`] repeatedly.
#[derive(Debug)]
pub struct NodeUpdates {
    directory: Arc<dyn Directory>,
    nodes: Arc<NodeRegistry>,
    /// The revision of the latest listing or event.
    revision: u64,
    watch: Option<Box<dyn Watch>>,
    has_failed: bool,
    watch_failures: FailureLog,
    listing_failures: FailureLog,
}

impl NodeUpdates {
    /// Lists the nodes. The watch begins with the first step.
    ///
    /// # Errors
    /// Those of the directory.
    pub fn start(directory: Arc<dyn Directory>, nodes: Arc<NodeRegistry>) -> Result<Self, DirectoryError> {
        let revision = nodes.refresh()?;
        Ok(Self {
            directory,
            nodes,
            revision,
            watch: None,
            has_failed: false,
            watch_failures: FailureLog::default(),
            listing_failures: FailureLog::default(),
        })
    }

    /// Waits for the next event for at most `timeout`, and applies it. If the watch has failed,
    /// lists the nodes first, and starts another watch. Returns false if the watch fails now.
    pub fn step(&mut self, timeout: Duration) -> bool {
        if std::mem::take(&mut self.has_failed) {
            self.list();
        }
        let Err(error) = self.apply_next(timeout) else { return true };
        if let Some(failures) = self.watch_failures.record(Instant::now()) {
            tracing::warn!(%error, failures, "watch over memory nodes failed; listing them again");
        }
        self.watch = None;
        self.has_failed = true;
        false
    }

    fn list(&mut self) {
        match self.nodes.refresh() {
            Ok(listed_at) => self.revision = listed_at,
            Err(error) => {
                if let Some(failures) = self.listing_failures.record(Instant::now()) {
                    tracing::warn!(%error, failures, "listing memory nodes failed; retrying");
                }
            }
        }
    }

    fn apply_next(&mut self, timeout: Duration) -> Result<(), DirectoryError> {
        let watch = match &mut self.watch {
            Some(watch) => watch,
            None => self.watch.insert(self.directory.watch(names::NODES, self.revision + 1)?),
        };
        if let Some(event) = watch.next(timeout)? {
            self.nodes.apply_event(&event);
            self.revision = event.revision;
        }
        Ok(())
    }
}
