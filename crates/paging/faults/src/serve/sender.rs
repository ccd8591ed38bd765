//! The sender's thread: copies batches from staging buffers, and writes blocks to memory nodes.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_ipc::BATCH_PAGES_MAX;
use aquifer_pager::{
    BlockId, Mempool, NoRoom, NodeJoiner, PAGE_BYTES, RecalledBytes, Sender, SenderStats, SlabSet,
};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::pool_shares::{ByClass, PoolShare};
use super::priority::{ELEVATED, set_niceness};
use super::program::Program;
use super::{AgentServices, PagingService};
use crate::edge::{EvictedBatch, SenderEvent};
use crate::send_loop::{NextStep, SendLoop, SendQueue, SentProgram};

/// Interval at which a sender without requests checks for empty slabs, and for room in a full pool.
const IDLE_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Interval of a sender that has been idle for [`LONG_IDLE_AFTER`]: it only probes nodes.
const LONG_IDLE_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };
/// Idle time after which a sender uses [`LONG_IDLE_INTERVAL`].
const LONG_IDLE_AFTER: Duration = Duration::from_secs(2);
/// Interval at which the sender probes memory nodes, and searches for degraded slabs.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// Number of polls for acknowledgements before the thread yields.
const POLLS_BEFORE_YIELD: u32 = 64;

/// A program whose pages are sent, with the address of its staging buffers.
#[derive(Clone, Debug)]
struct StagingProgram {
    program: Arc<Program>,
    staging: u64,
}

impl SentProgram for StagingProgram {
    fn id(&self) -> u64 {
        self.program.id
    }

    fn copy_batch(&self, mempool: &Mempool, batch: &EvictedBatch) -> usize {
        let program = &self.program;
        self.read_staging(mempool, batch).unwrap_or_else(|error| {
            // The threads of a program end before the kernel reports its end.
            let has_ended = error.raw_os_error() == Some(libc::ESRCH);
            if has_ended || program.has_exited() || program.is_killed() {
                tracing::debug!(%error, pid = program.pid(), "cannot read a batch: its program has ended");
            } else {
                tracing::warn!(%error, pid = program.pid(), "cannot read a batch of a program that is alive");
            }
            0
        })
    }

    fn push_event(&self, event: SenderEvent) {
        self.program.push_sender_event(event);
    }
}

impl StagingProgram {
    /// Copies pages from a staging buffer of the program. Returns the number of leading pages that
    /// were copied.
    fn read_staging(&self, mempool: &Mempool, batch: &EvictedBatch) -> std::io::Result<usize> {
        let process = self.program.process().ok_or(std::io::ErrorKind::NotFound)?;
        let base = self.staging.wrapping_add((batch.buffer * BATCH_PAGES_MAX * PAGE_BYTES) as u64);
        let offset = batch.block.slot(0).offset();
        let bytes = batch.positions.len() * PAGE_BYTES;
        // SAFETY: the block belongs to this batch until it is written, and is inside the mempool's
        // mapping.
        let block = unsafe { std::slice::from_raw_parts_mut(mempool.memory().as_ptr().add(offset), bytes) };
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
}

/// State that a sender's thread shares with its handle.
#[derive(Debug)]
struct SenderShared {
    queue: Mutex<SendQueue<StagingProgram>>,
    wakeup: OwnedFd,
    writes: AtomicU64,
    pages: AtomicU64,
    zero_pages: AtomicU64,
    unchanged_pages: AtomicU64,
    degraded_slabs: AtomicU64,
    copied_slabs: AtomicU64,
    repaired_pages: AtomicU64,
    vacated_slabs: AtomicU64,
    moved_bytes: AtomicU64,
    backup_bytes: AtomicU64,
    displaced_slabs: AtomicU64,
    disk_errors: AtomicU64,
    recalled: Mutex<Vec<RecalledBytes>>,
    /// Number of shortages of room in the pool so far.
    shortages: AtomicU64,
    is_short_of_room: AtomicBool,
    shortage_reason: Mutex<String>,
    slabs: Arc<SlabSet>,
}

/// Handle of the thread that is the sender of a run.
#[derive(Debug)]
pub(crate) struct SenderThread {
    shared: Arc<SenderShared>,
}

impl SenderThread {
    /// Registers the slabs as a ledger, and starts the thread. `(tenant, owner)`: the user of the
    /// run, and the owner of its user id.
    pub(crate) fn start(
        service: &Arc<PagingService>,
        slabs: Arc<SlabSet>,
        run: u64,
        (tenant, owner): (u32, u32),
        seed: u64,
    ) -> std::io::Result<Self> {
        let shared = {
            let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            Arc::new(SenderShared::new(wakeup, Arc::clone(&slabs)))
        };
        // Must be registered before the thread starts, because the leak scan must know the slabs
        // before the run is used.
        service.agent.leak_detector().register_ledger(&slabs);
        let mempool = Arc::clone(&service.mempool);
        let move_rate = Arc::clone(&service.move_rate);
        let agent = Arc::clone(&service.agent);
        let for_thread = Arc::clone(&shared);
        let share = PoolShare::join(&service.pool_shares, run, owner);
        std::thread::Builder::new().name("sender".into()).spawn(move || {
            let connector = agent.connector(tenant, slabs.replicas_wanted());
            let node_joiner = NodeJoiner::new(Arc::clone(&connector));
            let mut sender = Sender::new(slabs, &mempool, connector, agent.pool(tenant), seed);
            sender.set_mempool_user(&mempool.user(owner));
            sender.set_move_rate(&move_rate);
            let send_loop = SendLoop::new(sender, mempool);
            let now = Instant::now();
            SenderTurns { send_loop, shared: for_thread, share, probed: now, busy: now, node_joiner, agent }
                .run();
        })?;
        Ok(Self { shared })
    }

    /// Queues a batch in a staging buffer of the program. `staging`: the address of the buffers.
    pub(crate) fn submit_batch(&self, program: &Arc<Program>, staging: u64, batch: EvictedBatch) {
        let program = StagingProgram { program: Arc::clone(program), staging };
        self.shared.queue.lock().push_batch(program, batch);
        self.shared.signal();
    }

    /// Queues a block whose bytes are in the mempool.
    pub(crate) fn submit_block(&self, program: &Arc<Program>, block: BlockId, slots: u64) {
        let program = StagingProgram { program: Arc::clone(program), staging: 0 };
        self.shared.queue.lock().push_block(program, block, slots);
        self.shared.signal();
    }

    /// Records that a program has ended, so that its pages need not be written.
    pub(crate) fn abandon(&self, program: u64) {
        self.shared.queue.lock().abandon(program);
        self.shared.signal();
    }

    /// Requests that the thread ends when all requests are completed.
    pub(crate) fn stop(&self) {
        self.shared.queue.lock().stop();
        self.shared.signal();
    }

    /// Returns the number and reason of the current shortage of room in the pool; `None` if there
    /// is room.
    pub(crate) fn room_shortage(&self) -> Option<(u64, String)> {
        if !self.shared.is_short_of_room.load(Relaxed) {
            return None;
        }
        let text = self.shared.shortage_reason.lock().clone();
        Some((self.shared.shortages.load(Relaxed), text))
    }

    /// The run's memory that nodes recall.
    pub(crate) fn recalled(&self) -> Vec<RecalledBytes> {
        self.shared.recalled.lock().clone()
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
            moved_bytes: self.shared.moved_bytes.load(Relaxed),
            backup_bytes: self.shared.backup_bytes.load(Relaxed),
            displaced_slabs: self.shared.displaced_slabs.load(Relaxed),
            disk_errors: self.shared.disk_errors.load(Relaxed),
            ..SenderStats::default()
        }
    }
}

impl SenderShared {
    fn new(wakeup: OwnedFd, slabs: Arc<SlabSet>) -> Self {
        Self {
            slabs,
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
            moved_bytes: AtomicU64::new(0),
            backup_bytes: AtomicU64::new(0),
            displaced_slabs: AtomicU64::new(0),
            disk_errors: AtomicU64::new(0),
            recalled: Mutex::default(),
            shortages: AtomicU64::new(0),
            is_short_of_room: AtomicBool::new(false),
            shortage_reason: Mutex::default(),
        }
    }

    fn signal(&self) {
        // A write to an eventfd fails only when its count is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wakeup, &1_u64.to_ne_bytes());
    }
}

/// The loop of a sender's thread.
struct SenderTurns {
    send_loop: SendLoop<StagingProgram>,
    shared: Arc<SenderShared>,
    share: PoolShare,
    /// The time of the last probe of memory nodes.
    probed: Instant,
    /// The end of the last turn with work.
    busy: Instant,
    node_joiner: NodeJoiner,
    agent: Arc<dyn AgentServices>,
}

impl SenderTurns {
    fn run(mut self) {
        set_niceness(ELEVATED);
        let mut polls = 0;
        let mut is_waiting_for_acks = false;
        loop {
            let step = self.next_step(is_waiting_for_acks);
            let before = self.send_loop.sender.stats();
            match step {
                NextStep::Stage(request) => {
                    is_waiting_for_acks = false;
                    self.send_loop.stage(request);
                }
                NextStep::Poll => is_waiting_for_acks = true,
                NextStep::End => break,
            }
            self.probe();
            let slabs = &self.shared.slabs;
            let bytes = ByClass { memory: slabs.bytes().0, disk: slabs.backup_bytes() };
            self.share.update(&mut self.send_loop.sender, bytes);
            self.node_joiner.poll(&mut self.send_loop.sender, || self.agent.nodes());
            let (has_written, result) = self.send_loop.advance();
            self.record_shortage(result.err());
            let is_unchanged = !has_written && self.send_loop.sender.stats() == before;
            is_waiting_for_acks &= is_unchanged;
            if !is_unchanged || !self.send_loop.sender.is_idle() {
                self.busy = Instant::now();
            }
            self.publish();
            polls += 1;
            if polls % POLLS_BEFORE_YIELD == 0 {
                std::thread::yield_now();
            }
        }
        self.send_loop.sender.close();
        self.share.leave();
        self.publish();
    }

    /// Returns the first step of the next turn.
    ///
    /// Waits if there is no work, or if all work waits for acknowledgements
    /// (`is_waiting_for_acks`).
    fn next_step(&mut self, is_waiting_for_acks: bool) -> NextStep<StagingProgram> {
        let mut queue = self.shared.queue.lock();
        let sender = &self.send_loop.sender;
        let is_short_of_room = self.shared.is_short_of_room.load(Relaxed);
        let is_idle = (sender.is_idle() || is_short_of_room) && !sender.is_healing();
        if queue.is_idle() && (is_idle || is_waiting_for_acks) {
            drop(queue);
            self.wait(is_idle);
            queue = self.shared.queue.lock();
        }
        self.send_loop.next_step(&mut queue)
    }

    /// Waits for requests or for acknowledgements. Returns at once if nodes answer without delay.
    fn wait(&mut self, is_idle: bool) {
        let mut polled = vec![PollFd::new(&self.shared.wakeup, PollFlags::IN)];
        let is_busy = self.busy.elapsed() < LONG_IDLE_AFTER;
        let mut timeout = if is_busy { IDLE_INTERVAL } else { LONG_IDLE_INTERVAL };
        if !is_idle {
            let interval = self.send_loop.sender.call_interval();
            timeout = interval.and_then(|interval| interval.try_into().ok()).unwrap_or(timeout);
            let Some(fds) = self.send_loop.sender.poll_fds() else { return };
            polled.extend(fds);
        }
        // The result does not matter, because the caller checks all sources.
        let _ = poll(&mut polled, Some(&timeout));
        if polled[0].revents().contains(PollFlags::IN) {
            // The count carries no information, so a failed read loses nothing.
            let _ = rustix::io::read(&self.shared.wakeup, &mut [0; 8]);
        }
    }

    fn probe(&mut self) {
        if self.probed.elapsed() >= PROBE_INTERVAL {
            self.probed = Instant::now();
            self.send_loop.sender.probe();
            self.share.update_rank(&mut self.send_loop.sender);
        }
    }

    fn record_shortage(&self, no_room: Option<NoRoom>) {
        let was_short_of_room = self.shared.is_short_of_room.load(Relaxed);
        // A node that is away either returns or is removed. Only the state after that is a lasting
        // shortage.
        let is_another = !was_short_of_room || matches!(no_room, Some(NoRoom::Away(_)));
        if no_room.is_some() && is_another {
            // Must be counted before the flag is set, so that a reader does not mistake this
            // shortage for the previous one.
            self.shared.shortages.fetch_add(1, Relaxed);
        }
        let text = no_room.map(|error| match error {
            NoRoom::NoNodes => match self.agent.connection_failure() {
                Some(failure) => format!("{error}: {failure}"),
                None => error.to_string(),
            },
            NoRoom::NotAllowed => self.share.over_quota(),
            _ => error.to_string(),
        });
        if text.is_some() && !was_short_of_room {
            tracing::warn!(reason = text, "evicted pages find no room");
        }
        self.shared.is_short_of_room.store(text.is_some(), Relaxed);
        let Some(text) = text else { return };
        *self.shared.shortage_reason.lock() = text;
    }

    fn publish(&self) {
        let stats = self.send_loop.sender.stats();
        self.shared.writes.store(stats.writes, Relaxed);
        self.shared.pages.store(stats.pages, Relaxed);
        self.shared.zero_pages.store(stats.zero_pages, Relaxed);
        self.shared.unchanged_pages.store(stats.unchanged_pages, Relaxed);
        self.shared.degraded_slabs.store(stats.degraded_slabs, Relaxed);
        self.shared.copied_slabs.store(stats.copied_slabs, Relaxed);
        self.shared.repaired_pages.store(stats.repaired_pages, Relaxed);
        self.shared.vacated_slabs.store(stats.vacated_slabs, Relaxed);
        self.shared.moved_bytes.store(stats.moved_bytes, Relaxed);
        self.shared.backup_bytes.store(stats.backup_bytes, Relaxed);
        self.shared.displaced_slabs.store(stats.displaced_slabs, Relaxed);
        self.shared.disk_errors.store(stats.disk_errors, Relaxed);
        let (recalled, mut published) = (self.send_loop.sender.recalled(), self.shared.recalled.lock());
        if *published != recalled {
            recalled.clone_into(&mut published);
        }
    }
}
