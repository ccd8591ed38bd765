//! The progress of a drain.

use std::time::{Duration, Instant};

use aquifer_directory::names::{NodeRecord, ResizeBlocker};
use aquifer_ipc::size::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};

use crate::cluster::lend::OBSTACLE_TIMEOUT;
use crate::say::say_error;

/// Time without progress after which a drain counts as stalled.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// [`STALL_TIMEOUT`] if no other node lends memory. Hosts have read the figures of the node by
/// then, and have recorded which of their runs it recalls memory from.
const ALONE_STALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The state of a drain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum DrainState {
    Continues,
    /// Nothing has moved for some time.
    Stalled,
    /// The node cannot be emptied, for this reason.
    Blocked(String),
}

/// The progress of a drain, and a bar that shows it.
pub(super) struct DrainProgress {
    bar: ProgressBar,
    /// The most memory that the node has recalled.
    total: u64,
    /// The rest of it, and the time since when.
    left: Option<(u64, Instant)>,
    /// The reason why the node does not lend less, other than memory in use, and the time since
    /// when.
    blocker: Option<(ResizeBlocker, Instant)>,
}

impl DrainProgress {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::new(0);
        let template = "{elapsed} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let bar = match ProgressStyle::with_template(template) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        Self { bar, total: 0, left: None, blocker: None }
    }

    /// Shows the progress, and returns the state of the drain. `is_alone`: whether no other node
    /// lends memory.
    pub(super) fn update(&mut self, record: &NodeRecord, is_alone: bool) -> DrainState {
        let left = record.recalled_bytes;
        if left > self.total {
            self.total = left;
            self.bar.set_length(left);
        }
        self.bar.set_position(self.total - left);
        let blocker = record.resize_blocker.filter(|blocker| *blocker != ResizeBlocker::InUse);
        if blocker != self.blocker.map(|(before, _)| before) {
            self.blocker = blocker.map(|blocker| (blocker, Instant::now()));
        }
        if let Some((blocker, since)) = self.blocker
            && since.elapsed() >= OBSTACLE_TIMEOUT
        {
            let lent = ByteSize(record.memory_bytes);
            return DrainState::Blocked(format!("node {} lends {lent}: {blocker}", record.id));
        }
        match self.left {
            Some((before, since)) if before == left => {
                let timeout = if is_alone { ALONE_STALL_TIMEOUT } else { STALL_TIMEOUT };
                if left > 0 && since.elapsed() >= timeout {
                    return DrainState::Stalled;
                }
            }
            _ => self.left = Some((left, Instant::now())),
        }
        DrainState::Continues
    }

    /// Prints a line above the bar.
    pub(super) fn say(&self, line: &str) {
        // The bar is hidden if standard error is not a terminal.
        if self.bar.is_hidden() { say_error!("{line}") } else { self.bar.println(line) }
    }

    /// Removes the bar.
    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
