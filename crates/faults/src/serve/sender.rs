//! The sender's thread: copies batches from staging buffers, and writes blocks to memory nodes.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_ipc::BATCH_PAGES_MAX;
use aquifer_pager::{
    BLOCK_PAGES, BlockId, Mempool, NoRoom, NodeJoiner, PAGE_BYTES, Sender, SenderStats, SlabSet, StageOutcome,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::priority::{ELEVATED, set_niceness};
use super::program::Program;
use super::{AgentServices, PagingService};
use crate::edge::{EvictedBatch, SenderEvent};

/// Interval at which an idle sender checks for empty slabs, and for room in a full pool.
const IDLE_TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Interval at which memory nodes are probed, and degraded slabs are looked for.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// Polls for acknowledgements before the thread yields.
const POLLS_BEFORE_YIELD: u32 = 64;

/// A batch or block to be staged, and its program.
#[derive(Debug)]
struct StageRequest {
    program: Arc<Program>,
    source: PageSource,
}

#[derive(Debug)]
enum PageSource {
    /// An evicted batch, with the address of the staging buffers.
    Batch { batch: EvictedBatch, staging: u64 },
    /// Slots of a block that holds their bytes already.
    Block { block: BlockId, slots: u64 },
}

#[derive(Debug, Default)]
struct RequestQueue {
    requests: VecDeque<StageRequest>,
    abandoned: Vec<u64>,
    is_stopping: bool,
}

#[derive(Debug)]
struct SenderShared {
    queue: Mutex<RequestQueue>,
    wakeup: OwnedFd,
    writes: AtomicU64,
    pages: AtomicU64,
    zero_pages: AtomicU64,
    unchanged_pages: AtomicU64,
    degraded_slabs: AtomicU64,
    copied_slabs: AtomicU64,
    repaired_pages: AtomicU64,
    vacated_slabs: AtomicU64,
    /// Number of times that the pool has begun to have no room.
    shortages: AtomicU64,
    is_short_of_room: AtomicBool,
    shortage_reason: Mutex<String>,
}

/// Handle of the sender of a run.
#[derive(Debug)]
pub(crate) struct SenderThread {
    shared: Arc<SenderShared>,
}

impl SenderThread {
    /// Registers the slabs as a ledger and starts the thread.
    pub(crate) fn start(
        service: &Arc<PagingService>,
        slabs: Arc<SlabSet>,
        tenant: u32,
        seed: u64,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(SenderShared::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        // Here and not in the thread: the leak scan must know the slabs before the run is used.
        service.agent.leak_detector().register_ledger(&slabs);
        let mempool = Arc::clone(&service.mempool);
        let agent = Arc::clone(&service.agent);
        let for_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("sender".into()).spawn(move || {
            let node_joiner = NodeJoiner::new(agent.connector(tenant));
            let sender = Sender::new(slabs, &mempool, agent.connector(tenant), agent.pool(tenant), seed);
            SenderLoop {
                sender,
                mempool,
                shared: for_thread,
                programs: Vec::new(),
                probed: Instant::now(),
                node_joiner,
                agent,
            }
            .run();
        })?;
        Ok(Self { shared })
    }

    /// Queues a batch in a staging buffer of the program.
    pub(crate) fn submit_batch(&self, program: &Arc<Program>, staging: u64, batch: EvictedBatch) {
        self.push(program, PageSource::Batch { batch, staging });
    }

    /// Queues a block whose bytes are in the mempool.
    pub(crate) fn submit_block(&self, program: &Arc<Program>, block: BlockId, slots: u64) {
        self.push(program, PageSource::Block { block, slots });
    }

    fn push(&self, program: &Arc<Program>, source: PageSource) {
        self.shared.lock().requests.push_back(StageRequest { program: Arc::clone(program), source });
        self.shared.signal();
    }

    /// Notes that a program has ended, so that its pages need not be written.
    pub(crate) fn abandon(&self, program: u64) {
        self.shared.lock().abandoned.push(program);
        self.shared.signal();
    }

    /// Lets the thread end when all requests are completed.
    pub(crate) fn stop(&self) {
        self.shared.lock().is_stopping = true;
        self.shared.signal();
    }

    /// Number and reason of the current shortage of room in the pool; `None` if there is room.
    pub(crate) fn room_shortage(&self) -> Option<(u64, String)> {
        if !self.shared.is_short_of_room.load(Relaxed) {
            return None;
        }
        let text = self.shared.shortage_reason.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some((self.shared.shortages.load(Relaxed), text))
    }

    pub(crate) fn stats(&self) -> SenderStats {
        SenderStats {
            writes: self.shared.writes.load(Relaxed),
            pages: self.shared.pages.load(Relaxed),
            zero_pages: self.shared.zero_pages.load(Relaxed),
            unchanged_pages: self.shared.unchanged_pages.load(Relaxed),
            degraded_slabs: self.shared.degraded_slabs.load(Relaxed),
            copied_slabs: self.shared.copied_slabs.load(Relaxed),
            repaired_pages: self.shared.repaired_pages.load(Relaxed),
            vacated_slabs: self.shared.vacated_slabs.load(Relaxed),
        }
    }
}

impl SenderShared {
    fn new(wakeup: OwnedFd) -> Self {
        Self {
            queue: Mutex::default(),
            wakeup,
            writes: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
            unchanged_pages: AtomicU64::new(0),
            degraded_slabs: AtomicU64::new(0),
            copied_slabs: AtomicU64::new(0),
            repaired_pages: AtomicU64::new(0),
            vacated_slabs: AtomicU64::new(0),
            shortages: AtomicU64::new(0),
            is_short_of_room: AtomicBool::new(false),
            shortage_reason: Mutex::default(),
        }
    }

    fn signal(&self) {
        // A write to an eventfd fails only when its count is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RequestQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SenderLoop {
    sender: Sender,
    mempool: Arc<Mempool>,
    shared: Arc<SenderShared>,
    /// Programs with staged batches that are not acknowledged, and the number of batches.
    programs: Vec<(Arc<Program>, usize)>,
    /// When memory nodes were probed last.
    probed: Instant,
    node_joiner: NodeJoiner,
    agent: Arc<dyn AgentServices>,
}

impl SenderLoop {
    fn run(mut self) {
        set_niceness(ELEVATED);
        let mut written = Vec::new();
        let mut found = Vec::with_capacity(BLOCK_PAGES);
        let mut polls = 0;
        let mut is_waiting_for_acks = false;
        loop {
            let Some(request) = self.next_request(is_waiting_for_acks) else {
                break;
            };
            let before = self.sender.stats();
            is_waiting_for_acks = request.is_none();
            if let Some(request) = request {
                self.stage(&request, &mut found);
            }
            self.probe();
            self.node_joiner.poll(&mut self.sender, || self.agent.nodes());
            let no_room = self.sender.advance(&mut written).err();
            self.record_shortage(no_room);
            is_waiting_for_acks &= written.is_empty() && self.sender.stats() == before;
            for written in written.drain(..) {
                self.deliver(written);
            }
            self.publish();
            polls += 1;
            if polls % POLLS_BEFORE_YIELD == 0 {
                std::thread::yield_now();
            }
        }
        self.sender.close();
        self.publish();
    }

    /// The next request; `Some(None)` to poll for acknowledgements, `None` when the run has ended.
    ///
    /// Waits if there is nothing to do. If there are only acknowledgements to wait for
    /// (`is_waiting_for_acks`), waits for those too.
    fn next_request(&mut self, is_waiting_for_acks: bool) -> Option<Option<StageRequest>> {
        let mut queue = self.shared.lock();
        let is_short_of_room = self.shared.is_short_of_room.load(Relaxed);
        let is_idle = (self.sender.is_idle() || is_short_of_room) && !self.sender.is_healing();
        if queue.requests.is_empty() && !queue.is_stopping && (is_idle || is_waiting_for_acks) {
            drop(queue);
            self.wait(is_idle);
            queue = self.shared.lock();
        }
        for owner in std::mem::take(&mut queue.abandoned) {
            self.sender.abandon(owner);
            // Blocks that are not yet staged need not be written either: there may be no room.
            for request in queue.requests.iter_mut().filter(|request| request.program.id == owner) {
                if let PageSource::Block { slots, .. } = &mut request.source {
                    *slots = 0;
                }
            }
        }
        if queue.is_stopping {
            self.sender.stop_healing();
        }
        if queue.is_stopping && queue.requests.is_empty() && self.sender.is_idle() {
            return None;
        }
        Some(if self.sender.has_capacity() { queue.requests.pop_front() } else { None })
    }

    /// Waits for requests or for acknowledgements; returns at once if nodes answer without delay.
    fn wait(&mut self, is_idle: bool) {
        let mut polled = vec![PollFd::new(&self.shared.wakeup, PollFlags::IN)];
        if !is_idle {
            let Some(fds) = self.sender.poll_fds() else { return };
            polled.extend(fds);
        }
        // Whatever ended the wait, the caller checks all sources.
        let _ = poll(&mut polled, Some(&IDLE_TICK));
        if polled[0].revents().contains(PollFlags::IN) {
            // The count carries no information, so a failed read loses nothing.
            let _ = rustix::io::read(&self.shared.wakeup, &mut [0; 8]);
        }
    }

    fn probe(&mut self) {
        if self.probed.elapsed() >= PROBE_INTERVAL {
            self.probed = Instant::now();
            self.sender.probe();
        }
    }

    fn stage(&mut self, request: &StageRequest, found: &mut Vec<StageOutcome>) {
        match &request.source {
            PageSource::Batch { batch, staging } => {
                self.copy_and_stage(&request.program, batch, *staging, found);
                let (block, buffer) = (batch.block, batch.buffer);
                request.program.push_sender_event(SenderEvent::Staged {
                    block,
                    buffer,
                    found: found.clone(),
                });
            }
            PageSource::Block { block, slots } => {
                let is_wanted = |index: usize| slots >> index & 1 == 1;
                self.sender.stage_with_clean_copies(
                    request.program.id,
                    *block,
                    BLOCK_PAGES,
                    is_wanted,
                    &[],
                    found,
                );
            }
        }
        match self.programs.iter_mut().find(|(program, _)| program.id == request.program.id) {
            Some((_, batches)) => *batches += 1,
            None => self.programs.push((Arc::clone(&request.program), 1)),
        }
    }

    /// Copies a batch into its block, and stages it.
    fn copy_and_stage(
        &mut self,
        program: &Program,
        batch: &EvictedBatch,
        staging: u64,
        found: &mut Vec<StageOutcome>,
    ) {
        let readable = self.read_staging(program, batch, staging).unwrap_or_else(|error| {
            // The threads of a program end before the kernel reports its end.
            let has_ended = error.raw_os_error() == Some(libc::ESRCH);
            if has_ended || program.has_exited() || program.is_killed() {
                tracing::debug!(%error, pid = program.pid(), "cannot read a batch: its program has ended");
            } else {
                tracing::warn!(%error, pid = program.pid(), "cannot read a batch of a program that is alive");
            }
            0
        });
        let (block, count) = (batch.block, batch.positions.len());
        self.sender.stage_with_clean_copies(
            program.id,
            block,
            count,
            |index| index < readable,
            &batch.clean_copies,
            found,
        );
    }

    /// Copies pages from a staging buffer of the program; returns how many arrived, from the first.
    fn read_staging(&self, program: &Program, batch: &EvictedBatch, staging: u64) -> std::io::Result<usize> {
        let process = program.process().ok_or(std::io::ErrorKind::NotFound)?;
        let base = staging.wrapping_add((batch.buffer * BATCH_PAGES_MAX * PAGE_BYTES) as u64);
        let offset = batch.block.slot(0).offset();
        let bytes = batch.positions.len() * PAGE_BYTES;
        // SAFETY: the block belongs to this batch until it is written, and is inside the mempool's
        // mapping.
        let block =
            unsafe { std::slice::from_raw_parts_mut(self.mempool.memory().as_ptr().add(offset), bytes) };
        let mut done = 0;
        for stretch in batch.positions.chunk_by(|one, next| *next == one + 1) {
            let start = base.wrapping_add(u64::from(stretch[0]) * PAGE_BYTES as u64);
            let wanted = stretch.len();
            let pages = &mut block[done * PAGE_BYTES..][..wanted * PAGE_BYTES];
            let found = process.read_memory(start, pages)? / PAGE_BYTES;
            done += found;
            if found < wanted {
                break;
            }
        }
        Ok(done)
    }

    fn deliver(&mut self, written: aquifer_pager::WrittenBatch) {
        let at = self.programs.iter().position(|(program, _)| program.id == written.owner);
        let at = at.expect("its batch was staged");
        let (program, batches) = &mut self.programs[at];
        program.push_sender_event(SenderEvent::Written(Box::new(written)));
        *batches -= 1;
        if *batches == 0 {
            self.programs.swap_remove(at);
        }
    }

    fn record_shortage(&self, no_room: Option<NoRoom>) {
        let was_short_of_room = self.shared.is_short_of_room.load(Relaxed);
        // A node that is away either returns or is removed. Only what follows is a lasting
        // shortage.
        let is_another = !was_short_of_room || matches!(no_room, Some(NoRoom::Away(_)));
        if no_room.is_some() && is_another {
            // Before the flag: a reader must not take this shortage for the previous one.
            self.shared.shortages.fetch_add(1, Relaxed);
        }
        let text = no_room.map(|error| match error {
            NoRoom::NoNodes => match self.agent.connection_failure() {
                Some(failure) => format!("{error}: {failure}"),
                None => error.to_string(),
            },
            _ => error.to_string(),
        });
        if text.is_some() && !was_short_of_room {
            tracing::warn!(reason = text, "evicted pages find no room");
        }
        self.shared.is_short_of_room.store(text.is_some(), Relaxed);
        let Some(text) = text else { return };
        *self.shared.shortage_reason.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    fn publish(&self) {
        let stats = self.sender.stats();
        self.shared.writes.store(stats.writes, Relaxed);
        self.shared.pages.store(stats.pages, Relaxed);
        self.shared.zero_pages.store(stats.zero_pages, Relaxed);
        self.shared.unchanged_pages.store(stats.unchanged_pages, Relaxed);
        self.shared.degraded_slabs.store(stats.degraded_slabs, Relaxed);
        self.shared.copied_slabs.store(stats.copied_slabs, Relaxed);
        self.shared.repaired_pages.store(stats.repaired_pages, Relaxed);
        self.shared.vacated_slabs.store(stats.vacated_slabs, Relaxed);
    }
}
