//! Copies of segments on memory nodes: syncs, and restores after the death of a host.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_arena::calls::{Answer, Call};
use aquifer_arena::copies::CopyRecord;
use aquifer_arena::{Mapping, WrittenPages};
use aquifer_copies::copies::discard;
use aquifer_copies::tree::{CHUNK_BYTES, chunks_of};
use aquifer_copies::{Change, Copies, CopyError, CopyNodes, Environment, Synced, restore};
use aquifer_objects::client::HeapClient;
use rustix::fs::{SeekFrom, seek};

use super::connections::ask;
use super::link::{AgentSocket, pause};
use super::{Error, Process, Segment, TransferFailure, done, error_of};
use crate::error::connect;

/// The state that an owner of a segment keeps between syncs.
#[derive(Debug)]
pub(super) struct SyncState {
    copies: Copies<HeapClient>,
    /// Tracks the pages that were written since the last sync; `None` if the kernel cannot.
    written: Option<WrittenPages>,
}

/// Access to the directory's record by the agent, and to the heaps of the user.
struct AgentEnvironment<'a, F> {
    agent: &'a Path,
    /// The number of the segment.
    id: u64,
    ask: F,
    /// The error of the last call that the agent did not answer.
    failure: Option<Error>,
}

impl<F: FnMut(&Call) -> Result<Answer, Error>> Environment for AgentEnvironment<'_, F> {
    type Store = HeapClient;

    fn connect(&mut self, node: u16) -> Result<HeapClient, String> {
        HeapClient::connect_at(self.agent.to_owned(), Some(node)).map_err(|error| error.to_string())
    }

    fn load(&mut self) -> Result<(Option<CopyRecord>, CopyNodes), String> {
        match self.ask(&Call::Copies { id: self.id })? {
            Answer::Copies { record, nodes: elsewhere, nodes_here: here } => {
                Ok((record, CopyNodes { elsewhere, here }))
            }
            answer => Err(error_of(answer).to_string()),
        }
    }

    fn replace(&mut self, revision: u64, record: Option<&CopyRecord>) -> Result<(), String> {
        let call = Call::SetCopies { id: self.id, revision, record: record.cloned() };
        let answer = self.ask(&call)?;
        done((answer, Vec::new())).map_err(|error| error.to_string())
    }

    fn now_s(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }
}

impl<F: FnMut(&Call) -> Result<Answer, Error>> AgentEnvironment<'_, F> {
    fn ask(&mut self, call: &Call) -> Result<Answer, String> {
        (self.ask)(call).map_err(|error| {
            let why = error.to_string();
            self.failure = Some(error);
            why
        })
    }

    /// Converts the result of an operation. If a call to the agent has failed, returns its error.
    fn outcome<T>(self, outcome: Result<T, CopyError>) -> Result<T, Error> {
        outcome.map_err(|error| self.failure.unwrap_or_else(|| error.into()))
    }
}

impl Process {
    fn environment(
        &self,
        id: u64,
    ) -> AgentEnvironment<'_, impl FnMut(&Call) -> Result<Answer, Error> + use<'_>> {
        let ask = |call: &Call| self.ask(call);
        AgentEnvironment { agent: self.link.agent(), id, ask, failure: None }
    }

    /// For each chunk of a segment of this process, whether it has data, or is a hole. `None` if
    /// that is not known.
    fn data_chunks(&self, id: u64, bytes: usize) -> Option<Vec<bool>> {
        let (_, fds) = self.link.ask(|_| Call::Copies { id }).ok()?;
        data_chunks(&fds.into_iter().next()?, bytes as u64).ok()
    }

    /// Frees the copies of a segment that this process owns.
    pub(super) fn discard_copies(&self, id: u64) -> Result<(), Error> {
        let mut environment = self.environment(id);
        let discarded = discard(&mut environment);
        environment.outcome(discarded)
    }

    /// Restores a lost segment from the copies that the last [`Segment::sync`] has written: its
    /// host has died, or its agent has ended for good. Waits at most `timeout` for the end of that
    /// host's grace time.
    ///
    /// # Errors
    /// [`Error::Owned`] if a host still has the segment after `timeout`. Also if there are no
    /// copies, or none can be read.
    pub fn restore(&self, id: u64, timeout: Duration) -> Result<Segment<'_>, Error> {
        self.check_owner()?;
        let began = Instant::now();
        loop {
            let restored = self.try_restore(id);
            if restored.is_err() {
                // The agent still has memory for the restore.
                let _has_ended = self.ask(&Call::Abort { id });
            }
            match restored? {
                Some(segment) => return Ok(segment),
                None if began.elapsed() < timeout => pause(),
                None => return Err(Error::Owned(id)),
            }
        }
    }

    /// Tries once to restore a segment. Returns `None` if a host may have it, or the agent was
    /// restarted meanwhile.
    fn try_restore(&self, id: u64) -> Result<Option<Segment<'_>>, Error> {
        let (record, fds) = match self.link.ask(|_| Call::Restore { id })? {
            (Answer::Restoring { record, .. }, fds) => (record, fds),
            (Answer::Nothing, _) => return Ok(None),
            (Answer::Copies { .. }, _) => return Err(CopyError::None.into()),
            (answer, _) => return Err(error_of(answer)),
        };
        let memory = File::from(fds.into_iter().next().ok_or(Error::Answer)?);
        let mut environment = self.environment(id);
        let mut failure = None;
        restore(
            &record,
            |node| environment.connect(node),
            |chunk, bytes| {
                failure = memory.write_all_at(bytes, (chunk * CHUNK_BYTES) as u64).err().or(failure.take());
            },
        )?;
        if let Some(error) = failure {
            return Err(Error::Memory(error));
        }
        self.link.ask_then(
            AgentSocket::Calls,
            |is_repeated| Call::Restored { id, is_repeated },
            |answer, fds, _| match answer {
                Answer::Nothing => Ok(None),
                answer => self.map(&answer, fds.into_iter().next()).map(Some),
            },
        )
    }
}

impl Segment<'_> {
    /// Writes the changed chunks to `copies` memory nodes, each of which then has a consistent
    /// copy. If this host dies, [`Process::restore`] restores the state of the last sync; later
    /// writes are lost. No other thread may write to the segment during the call.
    ///
    /// The copies are in the heaps of the user, preferably on nodes of other machines: see
    /// [`Synced::elsewhere`]. The first sync of a process pulls all missing pages, and compares the
    /// whole segment with the existing copies; later syncs read only the written pages. Two kinds
    /// of changes are not noticed: writes by devices into memory that was registered with them
    /// before, such as fixed buffers of `io_uring`, and the removal of memory by `madvise`.
    ///
    /// # Errors
    /// If too few nodes serve heaps, a node fails and no other can replace it, or a page is lost.
    /// Then the copies of the last sync remain in effect.
    pub fn sync(&mut self, copies: usize) -> Result<Synced, Error> {
        self.process.check_owner()?;
        let is_first = self.sync.get_mut().is_none();
        if is_first {
            self.close()?;
        }
        let (process, id, mapping) = (self.process, self.id, &self.mapping);
        let state = self.sync.get_mut();
        let state = state.get_or_insert_with(|| Box::new(SyncState::new(mapping.bytes() as u64)));
        let change = state.drain_changes(mapping);
        let data = OnceCell::new();
        let known = match &change {
            Change::All => BTreeSet::new(),
            Change::Chunks(chunks) => chunks.clone(),
        };
        let read = |chunk: usize, out: &mut [u8]| {
            // A touch of a page that was never written would allocate memory.
            let is_data = known.contains(&chunk)
                || data
                    .get_or_init(|| process.data_chunks(id, mapping.bytes()))
                    .as_ref()
                    .is_none_or(|data| data[chunk]);
            if is_data {
                copy_chunk(mapping.words(), chunk, out);
            }
            is_data
        };
        let mut environment = process.environment(id);
        let synced = state.copies.sync(&mut environment, copies, change, read);
        environment.outcome(synced)
    }

    /// Releases the segment, and keeps its copies: any process of the user can then restore it from
    /// them. Useful for a segment with lost pages, whose host died before they were pulled.
    ///
    /// # Errors
    /// If there are no copies. The segment is unmapped in any case.
    pub fn give_up(self) -> Result<(), Error> {
        let (process, id) = (self.process, self.id);
        drop(self);
        done((process.ask(&Call::GiveUp { id })?, Vec::new()))
    }

    /// Restores the bytes of the last [`Self::sync`] of this process or an earlier owner, for
    /// example after a crash in the middle of a change.
    ///
    /// # Errors
    /// If a page is lost (see [`Self::give_up`]), if there are no copies, or if none can be read.
    /// Then some chunks of the segment may be restored, and others not.
    pub fn revert(&mut self) -> Result<(), Error> {
        self.close()?;
        let mut environment = self.process.environment(self.id);
        let loaded = environment.load().map_err(CopyError::Record);
        let (record, _) = match loaded {
            Ok(loaded) => loaded,
            failed => return environment.outcome(failed.map(drop)),
        };
        let record = record.unwrap_or_default();
        let words = self.mapping.words();
        let mut zeros: BTreeSet<usize> = (0..chunks_of(record.bytes)).collect();
        restore(
            &record,
            |node| environment.connect(node),
            |chunk, bytes| {
                zeros.remove(&chunk);
                let values =
                    bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")));
                put_chunk(words, chunk, values);
            },
        )?;
        let data = self.process.data_chunks(self.id, self.mapping.bytes());
        let is_data = |chunk: &usize| data.as_ref().is_none_or(|data| data[*chunk]);
        zeros.into_iter().filter(is_data).for_each(|chunk| put_chunk(words, chunk, std::iter::repeat(0)));
        Ok(())
    }
}

impl<'a> Segment<'a> {
    /// Syncs the segment, and then hands it over by [`Self::transfer`]. If a host dies before all
    /// pages are pulled, the segment can be restored as it was handed over (see [`Self::give_up`]).
    /// A single copy may be on the machine of the target.
    ///
    /// # Errors
    /// The errors of [`Self::sync`] and [`Self::transfer`].
    pub fn sync_and_transfer(mut self, copies: usize) -> Result<Synced, TransferFailure<'a>> {
        match self.sync(copies) {
            Ok(synced) => self.transfer().map(|()| synced),
            Err(error) => Err(TransferFailure { segment: Some(self), error }),
        }
    }
}

impl SyncState {
    fn new(bytes: u64) -> Self {
        Self { copies: Copies::new(bytes), written: None }
    }

    /// Returns the chunks that may have changed since the previous call, and counts them as
    /// unchanged from now on.
    fn drain_changes(&mut self, mapping: &Mapping<'_>) -> Change {
        let mut chunks = BTreeSet::new();
        let is_known = match &self.written {
            Some(written) => written
                .drain_written(|range| {
                    chunks.extend(range.start / CHUNK_BYTES..=(range.end - 1) / CHUNK_BYTES)
                })
                .is_ok(),
            None => false,
        };
        if is_known {
            return Change::Chunks(chunks);
        }
        // The previous tracking must end before the next one begins.
        self.written = None;
        self.written =
            WrittenPages::watch(mapping).ok().filter(|written| written.drain_written(drop).is_ok());
        Change::All
    }

    /// Stops the tracking of writes, so that the mapping can be moved fast. The next sync compares
    /// the whole segment.
    pub(super) fn stop_tracking(&mut self) {
        self.written = None;
    }
}

/// Frees the copies of a segment that no live host owns, and so its number and addresses. `agent`
/// is the path of the agent's socket. Returns false if the segment has no copies.
///
/// # Errors
/// If a host may own the segment, or the agent refuses.
pub fn free_copies(agent: &Path, id: u64) -> Result<bool, Error> {
    let socket = connect(agent)?;
    let ask = |call: &Call| Ok(ask(&socket, call)?.0);
    match ask(&Call::Copies { id })? {
        Answer::Copies { record: Some(_), .. } => {}
        Answer::Copies { record: None, .. } => return Ok(false),
        answer => return Err(error_of(answer)),
    }
    let mut environment = AgentEnvironment { agent, id, ask, failure: None };
    let discarded = discard(&mut environment);
    environment.outcome(discarded).map(|()| true)
}

/// For each chunk of a segment's memory, whether it has data, or is a hole.
fn data_chunks(memory: &OwnedFd, bytes: u64) -> rustix::io::Result<Vec<bool>> {
    let mut chunks = vec![false; chunks_of(bytes)];
    let mut at = 0;
    while at < bytes {
        let start = match seek(memory, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => break,
            start => start?,
        };
        at = seek(memory, SeekFrom::Hole(start))?;
        let chunk_of = |offset: u64| usize::try_from(offset / CHUNK_BYTES as u64).unwrap_or(usize::MAX);
        chunks.iter_mut().take(chunk_of(at - 1) + 1).skip(chunk_of(start)).for_each(|chunk| *chunk = true);
    }
    Ok(chunks)
}

/// Returns the words of a chunk.
fn words_of(words: &[AtomicU64], chunk: usize) -> &[AtomicU64] {
    let words = words.get(chunk * CHUNK_BYTES / 8..).unwrap_or_default();
    &words[..words.len().min(CHUNK_BYTES / 8)]
}

fn copy_chunk(words: &[AtomicU64], chunk: usize, out: &mut [u8]) {
    for (word, out) in words_of(words, chunk).iter().zip(out.chunks_exact_mut(8)) {
        out.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
    }
}

fn put_chunk(words: &[AtomicU64], chunk: usize, bytes: impl Iterator<Item = u64>) {
    words_of(words, chunk).iter().zip(bytes).for_each(|(word, value)| word.store(value, Relaxed));
}
