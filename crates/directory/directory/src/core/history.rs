//! Past changes, kept for watches: a bounded queue that drops its oldest events.

use std::collections::VecDeque;

use crate::DirectoryError;
use crate::model::{WatchEvent, WatchEventKind, limits};

/// The position of a watch in the history.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cursor {
    prefix: String,
    from_revision: u64,
    /// Index of the next event among all events ever pushed.
    position: u64,
}

/// The most recent changes.
#[derive(Debug, Default)]
pub(super) struct History {
    events: VecDeque<WatchEvent>,
    bytes: usize,
    /// Index of the oldest event that is kept, among all events ever pushed.
    first: u64,
    /// The greatest revision of a dropped event. All events of greater revisions are kept.
    dropped_revision: u64,
    last_revision: u64,
}

impl History {
    /// Creates a history without the events up to `revision`.
    pub(super) fn after(revision: u64) -> Self {
        Self { dropped_revision: revision, last_revision: revision, ..Self::default() }
    }

    pub(super) fn push(&mut self, event: WatchEvent) {
        assert!(event.revision >= self.last_revision, "events are pushed in the order of their revisions");
        self.last_revision = event.revision;
        self.bytes += size(&event);
        self.events.push_back(event);
        while self.events.len() > limits::HISTORY_EVENTS_MAX || self.bytes > limits::HISTORY_BYTES_MAX {
            let dropped = self.events.pop_front().expect("a queue over its limit is not empty");
            self.bytes -= size(&dropped);
            self.first += 1;
            self.dropped_revision = dropped.revision;
        }
    }

    pub(super) fn cursor(&self, prefix: &str, from_revision: u64) -> Result<Cursor, DirectoryError> {
        let prefix = prefix.to_owned();
        if from_revision == 0 {
            return Ok(Cursor { prefix, from_revision, position: self.end() });
        }
        if from_revision <= self.dropped_revision {
            return Err(DirectoryError::Compacted {
                asked: from_revision,
                oldest: self.dropped_revision + 1,
            });
        }
        let before = self.events.partition_point(|event| event.revision < from_revision);
        Ok(Cursor { prefix, from_revision, position: self.first + count(before) })
    }

    pub(super) fn next(&self, cursor: &mut Cursor) -> Result<Option<WatchEvent>, DirectoryError> {
        if cursor.position < self.first {
            let oldest = self.dropped_revision + 1;
            return Err(DirectoryError::Compacted { asked: cursor.from_revision, oldest });
        }
        while cursor.position < self.end() {
            let index =
                usize::try_from(cursor.position - self.first).expect("an index in the queue fits usize");
            let event = &self.events[index];
            cursor.position += 1;
            // `from_revision` may be in the future when the cursor is made.
            if event.revision >= cursor.from_revision && event.key.starts_with(&cursor.prefix) {
                cursor.from_revision = event.revision;
                return Ok(Some(event.clone()));
            }
        }
        Ok(None)
    }

    fn end(&self) -> u64 {
        self.first + count(self.events.len())
    }
}

fn count(length: usize) -> u64 {
    u64::try_from(length).expect("a length fits 64 bits")
}

fn size(event: &WatchEvent) -> usize {
    event.key.len()
        + match &event.kind {
            WatchEventKind::Put { value, .. } => value.len(),
            WatchEventKind::Delete => 0,
        }
}
