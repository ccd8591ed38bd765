//! Copies of segments on memory nodes: a sync writes them, and a segment whose host has died is
//! restored from them.

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
use super::link::{Line, pause};
use super::{Error, Process, Segment, TransferFailure, done, error_of};
use crate::error::connect;

/// The copies of a segment, as its owner writes them.
#[derive(Debug)]
pub(super) struct SyncState {
    copies: Copies<HeapClient>,
    /// Which pages were written since the last sync, if the kernel can say it.
    written: Option<WrittenPages>,
}

/// The directory's record, and the heaps of the user.
struct AgentEnvironment<'a, F> {
    agent: &'a Path,
    /// The number of the segment.
    id: u64,
    ask: F,
    /// Why the agent could not be asked.
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

    /// The outcome of what was done: if the agent could not be asked, why not.
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

    /// The chunks of a segment of this process that are no holes; `None` if that is not known.
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

    /// Restores a segment from its copies, as the last [`Segment::sync`] has written them: its host
    /// has died, or it was lost with its agent. Waits until the cluster is sure of that, which is
    /// after the grace time of that host.
    ///
    /// # Errors
    /// If a host still has it when the time is over, there are no copies, or none can be read.
    pub fn restore(&self, id: u64, timeout: Duration) -> Result<Segment<'_>, Error> {
        self.check_owner()?;
        let began = Instant::now();
        loop {
            let restored = self.try_restore(id);
            if restored.is_err() {
                // The agent has memory for it still.
                let _has_ended = self.ask(&Call::Abort { id });
            }
            match restored? {
                Some(segment) => return Ok(segment),
                None if began.elapsed() < timeout => pause(),
                None => return Err(Error::Owned(id)),
            }
        }
    }

    /// `None` if a host may have it, or the agent was restarted meanwhile.
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
        self.link.ask_and(
            Line::Calls,
            |is_repeated| Call::Restored { id, is_repeated },
            |answer, fds, _| match answer {
                Answer::Nothing => Ok(None),
                answer => self.map(&answer, fds.into_iter().next()).map(Some),
            },
        )
    }
}

impl Segment<'_> {
    /// Writes what has changed to `copies` memory nodes, as one consistent copy each: what no sync
    /// has written is lost if this host dies, and [`Process::restore`] brings the last one back.
    /// No other thread writes to the segment meanwhile.
    ///
    /// The copies are in the heaps of the user, on nodes of other machines as far as there are
    /// some: see [`Synced::elsewhere`]. The first sync of a process pulls what is
    /// elsewhere, and compares all of the segment with the copies that there are; later ones look
    /// only at pages that were written. Writes by devices into memory that was registered with
    /// them before, such as fixed buffers of `io_uring`, and memory that `madvise` has removed, are
    /// not noticed.
    ///
    /// # Errors
    /// If too few nodes serve heaps, one fails and no other can take its place, or a page is lost.
    /// Then the copies of the last sync count.
    pub fn sync(&mut self, copies: usize) -> Result<Synced, Error> {
        self.process.check_owner()?;
        let is_first = self.sync.get_mut().is_none();
        if is_first {
            self.close()?;
        }
        let (process, id, mapping) = (self.process, self.id, &self.mapping);
        let state = self.sync.get_mut();
        let state = state.get_or_insert_with(|| Box::new(SyncState::new(mapping.bytes() as u64)));
        let change = state.look(mapping);
        let data = OnceCell::new();
        let known = match &change {
            Change::All => BTreeSet::new(),
            Change::Chunks(chunks) => chunks.clone(),
        };
        let read = |chunk: usize, out: &mut [u8]| {
            // A touch of what was never written would allocate memory.
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

    /// Gives the segment up, and keeps its copies: then it is lost, and can be restored from them,
    /// by this process, too. For segments of which pages are lost, because the host that had them
    /// has died before they were pulled.
    ///
    /// # Errors
    /// If there are no copies; the segment is unmapped in any case.
    pub fn give_up(self) -> Result<(), Error> {
        let (process, id) = (self.process, self.id);
        drop(self);
        done((process.ask(&Call::GiveUp { id })?, Vec::new()))
    }

    /// Gives the segment the bytes again that the last [`Self::sync`] has written, of this process
    /// or an earlier owner: such as after a crash in the middle of a change.
    ///
    /// # Errors
    /// If a page is lost: see [`Self::give_up`]. If there are no copies, or none can be read. Then
    /// the segment may be partly as it was.
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
    /// Hands the segment over as [`Self::transfer`] does, and syncs it before: whatever dies then,
    /// it can be restored as it was handed over ([`Self::give_up`]). With one copy, that may be on
    /// the machine of the target.
    ///
    /// # Errors
    /// Those of [`Self::sync`] and of [`Self::transfer`].
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

    /// Which chunks may have changed since the last look.
    fn look(&mut self, mapping: &Mapping<'_>) -> Change {
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
        // The former watch ends first. From here on the kernel notes what is written, if it can.
        self.written = None;
        self.written =
            WrittenPages::watch(mapping).ok().filter(|written| written.drain_written(drop).is_ok());
        Change::All
    }

    /// Ends the watch over writes, so that the mapping can be moved at once. The next sync compares
    /// all of the segment.
    pub(super) fn end_watch(&mut self) {
        self.written = None;
    }
}

/// Frees the copies of a segment that no live host owns, and with them its number and addresses.
/// `agent` is the agent's socket. Returns false if it has none.
///
/// # Errors
/// If a host may own it, or the agent refuses.
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

/// The chunks of a segment that are no holes of its memory.
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

/// The words of a chunk.
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
