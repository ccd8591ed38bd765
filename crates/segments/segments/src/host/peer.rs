//! Connections to other agents, for requests and for READs of pages.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::batch::{Batch, receive_until};
use aquifer_fabric::tcp::{self, ConnectOptions};
use aquifer_fabric::{ClusterKey, Endpoint, Identity, Key, LocalKey, LocalSlice, Memory, RemoteAddr, Verb};

use super::memory::PAGE_BYTES;
use super::wire::{Answer, CopyPlace, MESSAGE_BYTES_MAX, Request};
use crate::pulling::{ReadEnd, ReadMode};

/// Time after which a request or a batch of READs fails.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of pages that are read at once.
pub(super) const PAGES_MAX: u32 = 128;
/// Maximum number of pages of one READ: while one READ is received, the other end prepares the
/// next.
const RUN_PAGES_MAX: u32 = 32;
/// Maximum number of operations that are posted at once; an endpoint accepts more.
const POSTED_MAX: usize = 192;
/// Number of registered memories of freed segments at which a connection is replaced. Each has a
/// descriptor and a mapping.
const UNUSED_MEMORIES_MAX: usize = 8;
/// Offset in bytes of presence words in the connection's memory: behind the message.
const WORDS_AT: u64 = MESSAGE_BYTES_MAX as u64;
const _: () = assert!(PAGES_MAX * 16 <= MESSAGE_BYTES_MAX);

/// A connection to an agent.
#[derive(Debug)]
pub(super) struct Peer {
    endpoint: Box<dyn Endpoint>,
    /// Memory for a message to send, and behind it for presence words.
    memory: Arc<Memory>,
    local: LocalKey,
    /// Registered memories of segments, into which pages are read.
    segments: Vec<(Arc<Memory>, LocalKey)>,
    batch: Batch,
    /// Whether an operation has failed or timed out. Its bytes could still arrive when the program
    /// uses the page already, so the connection is not used any more.
    is_broken: bool,
}

/// The presence words of a run of adjacent pages, which are read before and after the pages.
#[derive(Clone, Copy)]
struct PresenceWords {
    /// Index of the first word.
    first: u64,
    count: u64,
    /// Offset at which the words are stored that are read before the pages.
    before_at: u64,
}

impl PresenceWords {
    /// Splits pages into runs of adjacent ones. Their words need at most 16 bytes for each page.
    fn of_runs(pages: &[u32]) -> impl Iterator<Item = (&[u32], Self)> {
        let mut at = WORDS_AT;
        let runs = pages.chunk_by(|page, next| *next == page + 1);
        runs.flat_map(|run| run.chunks(RUN_PAGES_MAX as usize)).map(move |run| {
            let (first, last) = (u64::from(run[0]) / 64, u64::from(run[run.len() - 1]) / 64);
            let words = Self { first, count: last - first + 1, before_at: at };
            at += 2 * u64::from(words.bytes());
            (run, words)
        })
    }

    fn bytes(self) -> u32 {
        u32::try_from(8 * self.count).expect("few pages are read at once")
    }

    /// Offset at which the words are stored that are read after the pages.
    fn after_at(self) -> u64 {
        self.before_at + u64::from(self.bytes())
    }
}

/// The purpose of a connection to an agent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Lane {
    /// Requests, and pages for which threads wait.
    Urgent,
    /// Pages that are pulled ahead of the program.
    Ahead,
}

impl Peer {
    /// Connects to an agent; `None` if it cannot be reached.
    pub fn connect(address: SocketAddr, key: &ClusterKey, identity: Identity) -> Option<Self> {
        let connect = || -> Result<Self, Box<dyn std::error::Error>> {
            let mut endpoint = tcp::connect(address, key, identity, ConnectOptions::default())?;
            let memory = Arc::new(Memory::private("aquifer-segment-peer", 2 * MESSAGE_BYTES_MAX as usize)?);
            let local = endpoint.register_local(Arc::clone(&memory))?;
            Ok(Self { endpoint, memory, local, segments: Vec::new(), batch: Batch::new(), is_broken: false })
        };
        connect().inspect_err(|error| tracing::debug!(%address, %error, "cannot connect to an agent")).ok()
    }

    /// Whether the connection must be replaced, because it has at least [`UNUSED_MEMORIES_MAX`]
    /// registered memories of freed segments. An endpoint cannot deregister memory.
    pub fn has_unused_memory(&self) -> bool {
        // The references of this connection and of its endpoint.
        let is_unused = |(memory, _): &&(Arc<Memory>, LocalKey)| Arc::strong_count(memory) == 2;
        self.segments.iter().filter(is_unused).count() >= UNUSED_MEMORIES_MAX
    }

    /// Sends a request to the agent and waits for the answer. Returns `None` if there is none; then
    /// the connection cannot be used any more.
    pub fn ask(&mut self, request: &Request) -> Option<Answer> {
        let message = serde_json::to_vec(request).ok()?;
        let len = u32::try_from(message.len()).ok().filter(|len| *len <= MESSAGE_BYTES_MAX)?;
        self.memory.write(0, &message);
        let local = LocalSlice { key: self.local, offset: 0, len };
        let deadline = Instant::now() + TIMEOUT;
        if !self.carry_out(&[Verb::Send { local }], deadline) {
            return None;
        }
        let mut answer = Vec::new();
        if receive_until(&mut *self.endpoint, &mut answer, deadline).is_err() {
            // A late answer must not be taken for the answer to another request.
            self.is_broken = true;
            return None;
        }
        serde_json::from_slice(&answer).ok()
    }

    /// Reads at most [`PAGES_MAX`] pages of a copy into the memory of the segment. Returns the
    /// result of each READ. Returns `None` if the agent does not answer; then the connection cannot
    /// be used any more.
    pub fn read(
        &mut self,
        into: &Arc<Memory>,
        from: &CopyPlace,
        pages: &[u32],
        mode: ReadMode,
    ) -> Option<Vec<ReadEnd>> {
        let segment = self.local_key_of(into)?;
        let slice = |key, offset, len| LocalSlice { key, offset, len };
        let remote = |(base, key): (u64, u32), offset| RemoteAddr { addr: base + offset, key: Key(key) };
        let mut verbs = Vec::new();
        for (run, words) in PresenceWords::of_runs(pages) {
            let present = remote(from.present, words.first * 8);
            let len = words.bytes();
            verbs.push(Verb::Read { local: slice(self.local, words.before_at, len), remote: present });
            if mode != ReadMode::Page {
                continue;
            }
            let at = u64::from(run[0]) * PAGE_BYTES;
            let bytes = u32::try_from(run.len() as u64 * PAGE_BYTES).expect("few pages are read at once");
            verbs.push(Verb::Read { local: slice(segment, at, bytes), remote: remote(from.data, at) });
            verbs.push(Verb::Read { local: slice(self.local, words.after_at(), len), remote: present });
        }
        if !self.carry_out(&verbs, Instant::now() + TIMEOUT) {
            return None;
        }
        let mut ends = Vec::with_capacity(pages.len());
        for (run, words) in PresenceWords::of_runs(pages) {
            let is_set = |words_at: u64, page: u32| {
                let word = words_at + (u64::from(page) / 64 - words.first) * 8;
                let word = usize::try_from(word).expect("the word is in the connection's memory");
                self.memory.load_u64(word) & 1 << (page % 64) != 0
            };
            ends.extend(run.iter().map(|page| {
                let is_found = is_set(words.before_at, *page)
                    && (mode != ReadMode::Page || is_set(words.after_at(), *page));
                if is_found { ReadEnd::Found } else { ReadEnd::NotThere }
            }));
        }
        Some(ends)
    }

    /// Carries out operations in order. Returns whether all of them succeeded.
    fn carry_out(&mut self, verbs: &[Verb], deadline: Instant) -> bool {
        let is_done =
            !self.is_broken && verbs.chunks(POSTED_MAX).all(|verbs| self.try_carry_out(verbs, deadline));
        self.is_broken |= !is_done;
        is_done
    }

    fn try_carry_out(&mut self, verbs: &[Verb], deadline: Instant) -> bool {
        verbs.iter().for_each(|verb| self.batch.push(0, *verb));
        self.batch.run(&mut *self.endpoint, deadline).is_ok() && self.batch.failures().is_empty()
    }

    fn local_key_of(&mut self, memory: &Arc<Memory>) -> Option<LocalKey> {
        let found = self.segments.iter().find(|(known, _)| Arc::ptr_eq(known, memory));
        if let Some((_, key)) = found {
            return Some(*key);
        }
        let key = self.endpoint.register_local(Arc::clone(memory)).ok()?;
        self.segments.push((Arc::clone(memory), key));
        Some(key)
    }
}
