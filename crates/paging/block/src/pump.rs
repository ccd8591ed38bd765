//! The pump: passes sealed blocks to the sender, and acknowledgements to the volume.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquifer_pager::{
    BLOCK_PAGES, Connector, MoveRate, NoRoom, NodeJoiner, Sender, StageOutcome, WrittenBatch,
};
use aquifer_pool::{NodeId, PoolClient};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::mover::Mover;
use crate::volume::BlockVolume;

/// The volume is the only owner of its sender.
const OWNER: u64 = 0;
/// The interval at which an idle pump checks for emptied slabs, and for free memory if the pool is
/// full.
const IDLE_TICK: Duration = Duration::from_millis(50);
/// The interval at which the pump looks for new nodes, and for memory that nodes recall.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(250);
/// Number of polls for acknowledgements before the thread yields.
const POLLS_BEFORE_YIELD: u32 = 64;
/// The time for which a closing pump waits for acknowledgements.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The writing side of a volume. One thread uses it.
#[derive(Debug)]
pub struct Pump {
    volume: Arc<BlockVolume>,
    sender: Sender,
    found: Vec<StageOutcome>,
    done: Vec<WrittenBatch>,
    is_pool_full: bool,
    is_awaiting_node: bool,
    node_joiner: NodeJoiner,
    maintained_at: Option<Instant>,
}

impl Pump {
    /// A pump that allocates slabs from `pool`. `seed` distributes volumes over the nodes.
    #[must_use]
    pub fn new(volume: Arc<BlockVolume>, connector: Arc<dyn Connector>, pool: PoolClient, seed: u64) -> Self {
        let node_joiner = NodeJoiner::new(Arc::clone(&connector));
        let sender = Sender::new(Arc::clone(&volume.slabs), &volume.mempool, connector, pool, seed);
        Self {
            volume,
            sender,
            found: Vec::with_capacity(BLOCK_PAGES),
            done: Vec::with_capacity(BLOCK_PAGES),
            is_pool_full: false,
            is_awaiting_node: false,
            node_joiner,
            maintained_at: None,
        }
    }

    /// Sets the rate of moves off memory that nodes recall.
    pub fn set_move_rate(&mut self, rate: &Arc<MoveRate>) {
        self.sender.set_move_rate(rate);
    }

    /// Begins a round in which the volume's [`Mover`] vacates all slabs, sparse or not. Only used
    /// by tests.
    pub fn repack_all(&mut self) {
        self.sender.repack_all();
    }

    /// Connects to those of `nodes` that the pump does not use yet, and determines the memory that
    /// nodes recall, if that is due.
    pub fn maintain(&mut self, nodes: impl FnOnce() -> Vec<NodeId>) {
        if self.maintained_at.is_none_or(|at| at.elapsed() >= MAINTENANCE_INTERVAL) {
            self.maintained_at = Some(Instant::now());
            self.sender.probe();
        }
        self.node_joiner.poll(&mut self.sender, nodes);
    }

    /// Makes all progress that is possible without blocking. Returns whether there was any.
    ///
    /// # Panics
    /// If a page of a block has become zero since it was written there: memory is corrupt, and must
    /// not be served.
    pub fn turn(&mut self) -> bool {
        let before = self.sender.stats();
        let mut has_moved = false;
        while self.sender.has_capacity()
            && let Some(sealed) = self.volume.next_sealed_block()
        {
            let is_newest = |index: usize| sealed.newest >> index & 1 == 1;
            self.sender.stage(OWNER, sealed.block, sealed.count, is_newest, &mut self.found);
            let is_data = |index: usize| !is_newest(index) || self.found[index] == StageOutcome::Data;
            assert!((0..sealed.count).all(is_data), "a page of {:?} has become zero", sealed.block);
            has_moved = true;
        }
        let refused = self.sender.advance(&mut self.done).err();
        let is_away = matches!(refused, Some(NoRoom::Away(_)));
        let pool_full = refused.map(|error| error.to_string());
        if self.is_pool_full || pool_full.is_some() {
            self.is_pool_full = pool_full.is_some();
            self.volume.set_pool_full(pool_full);
        }
        let is_awaiting_node = self.sender.is_awaiting_node() || is_away;
        if self.is_awaiting_node != is_awaiting_node {
            self.is_awaiting_node = is_awaiting_node;
            self.volume.set_awaiting_node(is_awaiting_node);
        }
        if !self.done.is_empty() {
            self.volume.written(&self.done);
            self.done.clear();
            has_moved = true;
        }
        let stats = self.sender.stats();
        self.volume.counters.remote_writes.store(stats.pages, Relaxed);
        self.volume.counters.remote_write_trips.store(stats.writes, Relaxed);
        self.volume.counters.vacated_slabs.store(stats.vacated_slabs, Relaxed);
        self.volume.counters.moved_bytes.store(stats.moved_bytes, Relaxed);
        self.volume.set_recalled(self.sender.recalled());
        has_moved || stats != before
    }

    /// Whether no operation is in flight.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.sender.is_idle() && !self.volume.has_sealed()
    }

    /// Closes the volume and frees everything. No thread may read it any more.
    pub fn close(mut self) {
        self.volume.close();
        self.sender.stop_healing();
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while self.volume.next_sealed_block().is_some() {}
        while !self.sender.is_idle() && Instant::now() < deadline {
            self.sender.abandon(OWNER);
            // The batches are abandoned, so an error that the pool is full does not matter.
            let _ = self.sender.advance(&mut self.done);
            for written in self.done.drain(..) {
                self.volume.written(&[written]);
            }
            std::thread::yield_now();
        }
        self.volume.forget_all();
        self.sender.close();
    }

    /// Waits for the wake event and for completions. Returns at once if a fabric completes without
    /// a descriptor.
    fn wait(&mut self) {
        let is_idle = (self.sender.is_idle() || self.is_pool_full) && !self.sender.is_healing();
        let interval = self.sender.call_interval().unwrap_or(IDLE_TICK);
        let timeout = Timespec::try_from(interval).expect("the interval is short");
        let wake_event = self.volume.wake_event();
        let mut polled = vec![PollFd::from_borrowed_fd(wake_event, PollFlags::IN)];
        if !is_idle {
            let Some(fds) = self.sender.poll_fds() else { return };
            polled.extend(fds);
        }
        // The outcome is not needed, because the caller checks everything.
        let _ = poll(&mut polled, Some(&timeout));
        if polled[0].revents().contains(PollFlags::IN) {
            // The event only wakes; nothing is lost if it was read already.
            let _ = rustix::io::read(wake_event.as_fd(), &mut [0; 8]);
        }
    }
}

/// A pump with its mover, in a thread of its own.
#[derive(Debug)]
pub struct PumpThread {
    volume: Arc<BlockVolume>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl PumpThread {
    /// Starts the thread. `nodes` lists the memory nodes of the cluster.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start(
        mut pump: Pump,
        mut mover: Mover,
        nodes: impl Fn() -> Vec<NodeId> + Send + 'static,
    ) -> std::io::Result<Self> {
        let volume = Arc::clone(&pump.volume);
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("pump".into()).spawn(move || {
            let mut turns = 0u32;
            while !asked.load(Relaxed) {
                let has_moved = mover.turn();
                pump.maintain(&nodes);
                if !pump.turn() && !has_moved {
                    pump.wait();
                }
                turns = turns.wrapping_add(1);
                if turns.is_multiple_of(POLLS_BEFORE_YIELD) {
                    std::thread::yield_now();
                }
            }
            drop(mover);
            pump.close();
        })?;
        Ok(Self { volume, stop, thread })
    }

    /// Closes the volume and frees everything. No thread may read it any more.
    pub fn stop(self) {
        self.stop.store(true, Relaxed);
        self.volume.wake_pump();
        if self.thread.join().is_err() {
            tracing::error!("the thread of the pump panicked; its memory on nodes is not freed");
        }
    }
}
