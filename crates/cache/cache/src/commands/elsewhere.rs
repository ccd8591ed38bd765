//! Requests for keys whose partitions are on other servers.
//!
//! A request for one key is forwarded unchanged. A request for several keys or for all partitions
//! is *scattered*: it becomes an [`Entry`] for each of them, and their replies are combined when
//! all entries were answered.

use super::{Context, Protocol, REPLIES_MAX, Replies, Session, Step};
use crate::operations::Deletion;
use crate::protocol::words;
use crate::store::Refusal;
use crate::store::presence::Presence;

/// Most keys of a `get` that are scattered at a time.
const KEYS_MAX: usize = 32;

/// A task in a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task<'a> {
    /// A whole request for one key.
    Request(Protocol, &'a [u8]),
    /// Flush the partition now if this is 0, or schedule the flush in this number of seconds.
    Flush(u32),
    /// Cancel the scheduled flush of the partition.
    CancelFlush,
    /// Delete the item of this key.
    Delete(&'a [u8]),
}

/// A part of a request that concerns one partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The partition.
    pub partition: usize,
    task: Task<'static>,
    /// The request or key, which is empty in `task`.
    bytes: Vec<u8>,
}

impl Entry {
    /// A part of a request.
    pub(super) fn new(partition: usize, task: Task<'_>) -> Self {
        let (task, bytes) = match task {
            Task::Request(protocol, bytes) => (Task::Request(protocol, &[]), bytes.to_vec()),
            Task::Delete(key) => (Task::Delete(&[]), key.to_vec()),
            Task::Flush(seconds) => (Task::Flush(seconds), Vec::new()),
            Task::CancelFlush => (Task::CancelFlush, Vec::new()),
        };
        Self { partition, task, bytes }
    }

    /// A part of a `get` for one key. `command` is the text of the request before its keys.
    pub(super) fn get(partition: usize, command: &[u8], key: &[u8]) -> Self {
        let request = [command, b" ", key, b"\r\n"].concat();
        Self::new(partition, Task::Request(Protocol::Text, &request))
    }

    /// The task.
    #[must_use]
    pub fn task(&self) -> Task<'_> {
        match self.task {
            Task::Request(protocol, _) => Task::Request(protocol, &self.bytes),
            Task::Delete(_) => Task::Delete(&self.bytes),
            other => other,
        }
    }
}

/// The result of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryEnd {
    /// The entry was executed, and its reply written.
    Done,
    /// The partition is not on this server; nothing was changed.
    Elsewhere,
    /// The entry must be retried: memory is short, or an item is being fetched from the pool.
    NoRoom,
    /// The entry is invalid.
    Malformed,
}

/// A request that was divided into entries.
#[derive(Debug)]
pub struct Scatter {
    /// The parts, in the order of their replies.
    pub entries: Vec<Entry>,
    /// The continuation when all entries have ended.
    end: ScatterEnd,
}

#[derive(Debug)]
enum ScatterEnd {
    /// The `get` continues at `resume_at` in its line, which has `used` bytes with its end.
    Get { resume_at: usize, used: usize },
    /// `reply` is sent. `used` bytes of the input were used, and the next `skip_bytes` are skipped.
    Reply { reply: Vec<u8>, used: usize, skip_bytes: usize },
}

impl Scatter {
    /// A request whose replies to entries are ignored, and that is answered by `reply`.
    pub(super) fn then(entries: Vec<Entry>, reply: Vec<u8>, used: usize, skip_bytes: usize) -> Self {
        Self { entries, end: ScatterEnd::Reply { reply, used, skip_bytes } }
    }

    /// Bytes of the request in the input, without those that are skipped.
    #[must_use]
    pub fn used(&self) -> usize {
        match self.end {
            ScatterEnd::Get { used, .. } | ScatterEnd::Reply { used, .. } => used,
        }
    }

    /// Whether the request is a `get`, whose keys are missing if they cannot be read.
    #[must_use]
    pub fn is_get(&self) -> bool {
        matches!(self.end, ScatterEnd::Get { .. })
    }

    /// Adds `line` bytes to the length of the request.
    pub(super) fn add_used(&mut self, line: usize) {
        match &mut self.end {
            ScatterEnd::Get { used, .. } | ScatterEnd::Reply { used, .. } => *used += line,
        }
    }
}

impl Session {
    /// Resets the state of the current request, which was answered by another server.
    pub fn skip(&mut self) {
        (self.get_offset, self.searched_bytes) = (0, 0);
    }

    /// Returns the request that the last step has divided.
    pub fn pop_scatter(&mut self) -> Option<Scatter> {
        self.scatter.take().map(|scatter| *scatter)
    }

    /// Divides a `get` from offset `at` in its line on, which is its first key that is not on this
    /// server.
    pub(super) fn scatter_get(
        &mut self,
        text: &[u8],
        command: &[u8],
        at: usize,
        context: &Context<'_>,
    ) -> Step {
        let (mut entries, mut resume_at) = (Vec::new(), at);
        while entries.len() < KEYS_MAX
            && let Some((key, end)) = words::next(text, resume_at)
        {
            let partition = context.access.store.partition_number(context.access.key(key).hash);
            entries.push(Entry::get(partition, command, key));
            resume_at = end;
        }
        let end = ScatterEnd::Get { resume_at, used: 0 };
        self.scatter = Some(Box::new(Scatter { entries, end }));
        Step::Scatter
    }

    /// Replies with an error to a divided request. Returns the number of used bytes of the input.
    pub fn fail(&mut self, scatter: &Scatter, error: &[u8], out: &mut Replies<'_>) -> usize {
        out.push(error);
        self.skip();
        if let ScatterEnd::Reply { skip_bytes, .. } = scatter.end {
            self.skip_bytes = skip_bytes;
        }
        scatter.used()
    }

    /// Combines the replies of the entries. Returns the number of used bytes of the input.
    pub fn gather(&mut self, scatter: &Scatter, replies: &[Vec<u8>], out: &mut Replies<'_>) -> usize {
        match &scatter.end {
            ScatterEnd::Reply { reply, used, skip_bytes } => {
                out.push(reply);
                self.skip_bytes = *skip_bytes;
                self.skip();
                *used
            }
            ScatterEnd::Get { resume_at, used } => {
                for reply in replies {
                    match reply.strip_suffix(b"END\r\n") {
                        Some(item) => out.push(item),
                        None => {
                            // An error ends the command.
                            out.push(reply);
                            self.skip();
                            return *used;
                        }
                    }
                }
                self.get_offset = *resume_at;
                0
            }
        }
    }
}

/// Executes an entry if its partition is on this server. The sender was authenticated.
pub fn execute<'p>(
    (partition, task): (usize, Task<'p>),
    context: &Context<'p>,
    out: &mut Replies<'p>,
) -> EntryEnd {
    let store = context.access.store;
    if partition >= store.partitions().len() || context.access.presence(partition) != Presence::Here {
        return EntryEnd::Elsewhere;
    }
    let now_s = context.access.now_s;
    match task {
        Task::Request(protocol, bytes) => execute_request(protocol, bytes, context, out),
        Task::Flush(0) => {
            store.flush_at(partition, 0);
            if store.flush(context.access.pin, partition) { EntryEnd::Done } else { EntryEnd::Elsewhere }
        }
        Task::Flush(seconds) => {
            store.flush_at(partition, now_s.saturating_add(seconds));
            EntryEnd::Done
        }
        Task::CancelFlush => {
            store.flush_at(partition, 0);
            EntryEnd::Done
        }
        Task::Delete(key) => match context.access.delete(context.access.key(key), &Deletion::default()) {
            Ok(_) => EntryEnd::Done,
            Err(Refusal::Again(_) | Refusal::Full) => EntryEnd::NoRoom,
            Err(Refusal::Elsewhere(_)) => EntryEnd::Elsewhere,
        },
    }
}

fn execute_request<'p>(
    protocol: Protocol,
    bytes: &'p [u8],
    context: &Context<'p>,
    out: &mut Replies<'p>,
) -> EntryEnd {
    debug_assert!(out.len() < 2 * REPLIES_MAX, "replies are sent between entries");
    let mut session = Session::trusted(protocol);
    match session.step(bytes, context, out) {
        Step::Used(used) if used == bytes.len() => EntryEnd::Done,
        // The value of a request that is refused is skipped.
        Step::Used(used) if session.skip_bytes == bytes.len() - used => EntryEnd::Done,
        Step::Elsewhere { .. } => EntryEnd::Elsewhere,
        Step::Again(_) => EntryEnd::NoRoom,
        Step::Used(_) | Step::Incomplete(_) | Step::Scatter | Step::Close => EntryEnd::Malformed,
    }
}
