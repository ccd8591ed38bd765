//! The state of one schedule: volume, pump, cluster and model.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use aquifer_block::{BlockError, BlockVolume, Mover, Pump, VolumeReader};
use aquifer_fabric::sim::Rng;
use aquifer_fabric::{Completion, Endpoint, EndpointError, PostError, Work, forward_endpoint};
use aquifer_pager::{BLOCK_PAGES, Budget, Connector, Mempool, PAGE_BYTES};
use aquifer_pool::NodeId;

use crate::blocks::model::PageModel;
use crate::paging::cluster::{FETCHERS, SENDER, SimCluster};
use crate::paging::focus::Focus;
use crate::paging::memory::encode;

/// Turns of the pump after which an operation fails for lack of room.
const TURNS_MAX: u32 = 400;

/// Counts of events in a schedule, or in all schedules.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlocksCounts {
    reads: u64,
    writes: u64,
    partial_writes: u64,
    failed_writes: u64,
    discards: u64,
    flushes: u64,
    crashes: u64,
    damages: u64,
    full: u64,
    lost: u64,
    interleaved: u64,
    remote_reads: u64,
    moved: u64,
}

impl BlocksCounts {
    pub fn labelled(&self) -> [(&'static str, u64); 13] {
        [
            ("reads", self.reads),
            ("writes", self.writes),
            ("writes of parts of pages", self.partial_writes),
            ("writes that failed", self.failed_writes),
            ("discards", self.discards),
            ("flushes", self.flushes),
            ("crashed nodes", self.crashes),
            ("damaged pages", self.damages),
            ("times the pool was full", self.full),
            ("reads of lost pages", self.lost),
            ("changes in the middle of a read", self.interleaved),
            ("pages from memory nodes", self.remote_reads),
            ("pages moved", self.moved),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.partial_writes += other.partial_writes;
        self.failed_writes += other.failed_writes;
        self.discards += other.discards;
        self.flushes += other.flushes;
        self.crashes += other.crashes;
        self.damages += other.damages;
        self.full += other.full;
        self.lost += other.lost;
        self.interleaved += other.interleaved;
        self.remote_reads += other.remote_reads;
        self.moved += other.moved;
    }
}

#[derive(Debug)]
struct BlocksWorld {
    rng: Rng,
    cluster: SimCluster,
    volume: Arc<BlockVolume>,
    pump: Pump,
    /// The reader for writes to a part of a page.
    reader: VolumeReader,
    pages: Vec<PageModel>,
    stamps: u64,
    counts: BlocksCounts,
    failure: Option<String>,
}

/// A connector whose endpoints run operations of other threads while a reader waits for a node.
#[derive(Debug)]
struct InterleavingConnector {
    inner: Arc<dyn Connector>,
    world: Weak<Mutex<BlocksWorld>>,
}

impl Connector for InterleavingConnector {
    fn connect(&self, node: NodeId) -> Result<Box<dyn Endpoint>, EndpointError> {
        let inner = self.inner.connect(node)?;
        Ok(Box::new(InterleavingEndpoint { inner, world: self.world.clone() }))
    }
}

#[derive(Debug)]
struct InterleavingEndpoint {
    inner: Box<dyn Endpoint>,
    world: Weak<Mutex<BlocksWorld>>,
}

impl Endpoint for InterleavingEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        self.inner.post(batch)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        if let Some(world) = self.world.upgrade() {
            lock(&world).interleave();
        }
        self.inner.poll(out, max)
    }

    forward_endpoint!(inner: register_local, receive, regions, limits, is_broken, is_away, drain_handle);
}

fn lock(world: &Mutex<BlocksWorld>) -> std::sync::MutexGuard<'_, BlocksWorld> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The parts of a range by page, as (page, offset in the page, offset in the range, length).
fn parts(offset: usize, len: usize) -> Vec<(usize, usize, usize, usize)> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < len {
        let here = offset + at;
        let part = (PAGE_BYTES - here % PAGE_BYTES).min(len - at);
        parts.push((here / PAGE_BYTES, here % PAGE_BYTES, at, part));
        at += part;
    }
    parts
}

impl BlocksWorld {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let cluster = SimCluster::new(rng.next_u64(), &mut rng, Focus::None);
        let pages = 40 + rng.index(300);
        let blocks = 1 + rng.index(5);
        let mempool = Arc::new(Mempool::new(blocks * BLOCK_PAGES * PAGE_BYTES).expect("memory"));
        let budget = Arc::new(Budget::new(16 << 20));
        let bytes = (pages * PAGE_BYTES) as u64;
        let volume = BlockVolume::new(bytes, mempool, budget, Duration::ZERO).expect("memory");
        let (connector, pool) = (cluster.connector(SENDER), cluster.pool(SENDER));
        let pump = Pump::new(Arc::clone(&volume), connector, pool, rng.next_u64());
        let reader = volume.reader(cluster.connector(FETCHERS)).expect("memory");
        Self {
            rng,
            cluster,
            volume,
            pump,
            reader,
            pages: vec![PageModel::new(); pages],
            stamps: 0,
            counts: BlocksCounts::default(),
            failure: None,
        }
    }

    fn range(&mut self, pages_max: usize) -> (usize, usize) {
        let first = self.rng.index(self.pages.len());
        let pages = (1 + self.rng.index(pages_max)).min(self.pages.len() - first);
        (first * PAGE_BYTES, pages * PAGE_BYTES)
    }

    fn ragged_range(&mut self, pages_max: usize) -> (usize, usize) {
        let (offset, len) = self.range(pages_max);
        let (cut_front, cut_back) = (self.rng.index(PAGE_BYTES), self.rng.index(PAGE_BYTES));
        if cut_front + cut_back < len {
            (offset + cut_front, len - cut_front - cut_back)
        } else {
            (offset, len)
        }
    }

    /// Runs some operations of other threads while a reader waits.
    fn interleave(&mut self) {
        if self.rng.chance(1, 3) {
            self.counts.interleaved += 1;
            for _ in 0..=self.rng.index(3) {
                self.act();
            }
        }
    }

    /// Runs one random operation other than a read.
    fn act(&mut self) {
        match self.rng.below(40) {
            0..12 => self.write_pages(),
            12..15 => self.write_part(),
            15..18 => self.discard(),
            18..30 => {
                self.pump.turn();
            }
            30..36 => {
                self.cluster.fabric.step();
            }
            36 if self.rng.chance(1, 2) => {
                self.counts.flushes += 1;
                // The flush cannot wait here; it only seals the open block.
                let _ = self.volume.flush();
            }
            37 if self.rng.chance(1, 25) => {
                self.counts.crashes += u64::from(self.cluster.crash(&mut self.rng))
            }
            38 if self.rng.chance(1, 25) => {
                self.counts.damages += u64::from(self.cluster.damage(&mut self.rng))
            }
            36 => self.pump.repack_all(),
            39 if self.cluster.is_full() => self.cluster.free_room(),
            39 if self.rng.chance(1, 20) => {
                self.cluster.fill_up(&mut self.rng);
                self.counts.full += 1;
            }
            _ => {}
        }
    }

    fn write_pages(&mut self) {
        // A write without room is repeated from the start, so it must fit into one block.
        let (offset, len) = self.range(60);
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            self.stamps += 1;
            let stamp = if self.rng.chance(1, 8) { 0 } else { self.stamps };
            bytes.extend_from_slice(&encode(stamp));
        }
        self.write(offset, &bytes);
    }

    fn write_part(&mut self) {
        let (offset, len) = self.ragged_range(4);
        self.stamps += 1;
        let fill = u8::try_from(self.stamps % 5 * 51).expect("a byte");
        self.counts.partial_writes += 1;
        self.write(offset, &vec![fill; len]);
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let result = self.with_room(|volume, reader| volume.write(reader, offset as u64, bytes));
        self.counts.writes += 1;
        self.record_write(offset, bytes, result);
    }

    /// Retries an operation that lacks room, and runs the pump in between.
    fn with_room(
        &mut self,
        act: impl Fn(&BlockVolume, &mut VolumeReader) -> Result<(), BlockError>,
    ) -> Result<(), BlockError> {
        let mut turns = 0;
        loop {
            match act(&self.volume, &mut self.reader) {
                Err(BlockError::NoRoom { .. }) if turns < TURNS_MAX => {
                    turns += 1;
                    self.pump.turn();
                    self.cluster.fabric.step();
                }
                result => return result,
            }
        }
    }

    fn record_write(&mut self, offset: usize, bytes: &[u8], result: Result<(), BlockError>) {
        let is_harmed = self.is_harmed();
        match &result {
            Ok(()) => {}
            Err(BlockError::NoRoom { .. }) if self.cluster.is_full() || is_harmed => {
                self.counts.failed_writes += 1
            }
            Err(BlockError::Lost { .. } | BlockError::StillLost { .. }) if is_harmed => {
                self.counts.failed_writes += 1;
            }
            Err(error) => self.fail(&format!("a write failed: {error}")),
        }
        let lost_page = match result {
            Err(BlockError::Lost { offset, .. } | BlockError::StillLost { offset }) => {
                usize::try_from(offset).ok().map(|offset| offset / PAGE_BYTES)
            }
            _ => None,
        };
        for (page, within, at, len) in parts(offset, bytes.len()) {
            if lost_page == Some(page) {
                self.pages[page].lost();
            } else {
                self.pages[page].write(within, &bytes[at..at + len], result.is_ok());
            }
        }
    }

    fn discard(&mut self) {
        let (offset, len) = if self.rng.chance(1, 2) { self.range(100) } else { self.ragged_range(6) };
        let result = self.with_room(|volume, reader| volume.discard(reader, offset as u64, len as u64));
        self.counts.discards += 1;
        self.record_write(offset, &vec![0; len], result);
    }

    /// Whether a fault was injected that may lose pages.
    fn is_harmed(&self) -> bool {
        self.cluster.has_lost_node || self.cluster.damaged.contains(&true)
    }

    fn fail(&mut self, what: &str) {
        self.failure.get_or_insert_with(|| what.to_owned());
    }

    fn check_read(&mut self, offset: usize, bytes: &[u8], result: Result<usize, BlockError>) {
        self.counts.reads += 1;
        let whole = match result {
            Ok(whole) => whole,
            Err(error) => {
                if !self.is_harmed() {
                    self.fail(&format!("a read failed: {error}"));
                }
                0
            }
        };
        for (page, within, at, len) in parts(offset, bytes.len()) {
            if at >= whole {
                if !self.is_harmed() {
                    self.fail("a read was cut short");
                }
                self.counts.lost += 1;
                self.pages[page].not_found();
                return;
            }
            if let Err(error) = self.pages[page].found(within, &bytes[at..at + len]) {
                self.fail(&format!("page {page}: {error}"));
            }
        }
    }

    fn check_end(mut self) -> Result<BlocksCounts, String> {
        self.cluster.free_room();
        self.counts.remote_reads = self.volume.stats().remote_reads;
        self.counts.moved = self.volume.stats().repacked_pages;
        let volume = Arc::clone(&self.volume);
        self.pump.close();
        let stats = volume.stats();
        self.cluster.scan_all_for_leaks();
        let taken = self.cluster.used_bytes();
        if stats.mempool_bytes != 0 {
            return Err(format!("{} bytes of the mempool were not freed", stats.mempool_bytes));
        }
        if taken != 0 {
            return Err(format!("{taken} bytes of memory nodes were not freed"));
        }
        Ok(self.counts)
    }
}

/// Plays a schedule.
pub fn run(seed: u64) -> Result<BlocksCounts, String> {
    let world = Arc::new(Mutex::new(BlocksWorld::new(seed)));
    let (volume, operations) = {
        let mut world = lock(&world);
        (Arc::clone(&world.volume), 20 + world.rng.below(150))
    };
    let connector = || -> Arc<dyn Connector> {
        let inner = lock(&world).cluster.connector(FETCHERS + 1);
        Arc::new(InterleavingConnector { inner, world: Arc::downgrade(&world) })
    };
    let mut reader = volume.reader(connector()).expect("memory");
    let mut mover = Mover::new(Arc::clone(&volume), connector()).expect("memory");
    let mut buffer = Vec::new();
    for _ in 0..operations {
        let read = {
            let mut world = lock(&world);
            if world.rng.chance(2, 3) {
                world.act();
                None
            } else {
                let range = if world.rng.chance(3, 4) { world.range(100) } else { world.ragged_range(4) };
                for (page, ..) in parts(range.0, range.1) {
                    world.pages[page].begin_read();
                }
                Some(range)
            }
        };
        if let Some((offset, len)) = read {
            buffer.clear();
            buffer.resize(len, 0xee);
            let result = volume.read(&mut reader, offset as u64, &mut buffer);
            lock(&world).check_read(offset, &buffer, result);
        }
        mover.turn();
        if let Some(failure) = lock(&world).failure.take() {
            return Err(failure);
        }
    }
    drop((reader, mover));
    let world = Arc::into_inner(world).expect("no reader is left").into_inner();
    world.unwrap_or_else(PoisonError::into_inner).check_end()
}
