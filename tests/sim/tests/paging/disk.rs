//! A node whose data are on a disk that may fail.

use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use aquifer_fabric::sim::Rng;
use aquifer_fabric::{Memory, PageStore, WorkError};
use aquifer_pager::Backup;
use aquifer_pool::NodeId;

/// Decides which schedules have a disk node, by the seed only, so that other schedules do not
/// change.
const DISKS: u64 = 0x0000_D15C;
/// Bytes of the region of a node with one section: metadata and data.
const REGION_BYTES: usize = 4 << 20;
const PAGE: usize = 4096;

/// The disk node of a schedule.
#[derive(Debug)]
pub struct DiskNode {
    pub node: NodeId,
    pub backup: Backup,
    pub store: Arc<SimDisk>,
    /// Whether any access may have failed.
    pub has_failed: bool,
    pub rng: Rng,
}

impl DiskNode {
    /// The disk node of a schedule with this number of memory nodes; `None` if it has none.
    pub fn of(seed: u64, memory_nodes: usize) -> Option<Self> {
        let mut rng = Rng::new(seed ^ DISKS);
        if !rng.chance(1, 4) {
            return None;
        }
        let backup = if rng.chance(1, 2) { Backup::IfNeeded } else { Backup::Always };
        Some(Self {
            node: NodeId(u16::try_from(memory_nodes).expect("few nodes")),
            backup,
            store: Arc::new(SimDisk::new(rng.next_u64())),
            has_failed: false,
            rng,
        })
    }

    /// Lets the disk fail at times from now on, or work again. Returns whether it begins to fail.
    pub fn step(&mut self) -> bool {
        if !self.rng.chance(1, 64) {
            return false;
        }
        let is_failing = !self.store.is_failing.load(Relaxed) && self.rng.chance(1, 2);
        self.store.is_failing.store(is_failing, Relaxed);
        self.has_failed |= is_failing;
        is_failing
    }

    /// The disk works again.
    pub fn repair(&self) {
        self.store.is_failing.store(false, Relaxed);
    }
}

/// A disk. While it fails, some accesses are errors. A failed write may have changed some pages.
#[derive(Debug)]
pub struct SimDisk {
    memory: Memory,
    is_failing: AtomicBool,
    rng: Mutex<Rng>,
}

impl SimDisk {
    /// A disk that works.
    pub fn new(seed: u64) -> Self {
        let memory = Memory::private("disk", REGION_BYTES).expect("memory");
        Self { memory, is_failing: AtomicBool::new(false), rng: Mutex::new(Rng::new(seed)) }
    }

    /// The data, at the offsets of the node's region.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The seed of the disk that replaces this one.
    pub fn next_seed(&self) -> u64 {
        self.rng.lock().expect("no thread panics with it").next_u64()
    }

    /// The number of pages up to which an access succeeds, if it fails.
    fn failure(&self, bytes: usize) -> Option<usize> {
        if !self.is_failing.load(Relaxed) {
            return None;
        }
        let mut rng = self.rng.lock().expect("no thread panics with it");
        rng.chance(1, 3).then(|| rng.index(bytes.div_ceil(PAGE)))
    }
}

fn at(offset: u64) -> usize {
    usize::try_from(offset).expect("small")
}

impl PageStore for SimDisk {
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), WorkError> {
        if self.failure(out.len()).is_some() {
            return Err(WorkError::Storage);
        }
        self.memory.read(at(offset), out);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &mut [u8]) -> Result<(), WorkError> {
        assert!(offset.is_multiple_of(PAGE as u64) && bytes.len().is_multiple_of(PAGE), "whole pages");
        let failure = self.failure(bytes.len());
        let written = failure.map_or(bytes.len(), |pages| pages * PAGE);
        self.memory.write(at(offset), &bytes[..written]);
        if failure.is_some() { Err(WorkError::Storage) } else { Ok(()) }
    }

    fn clear(&self, range: Range<u64>) {
        self.memory.write(at(range.start), &vec![0; at(range.end - range.start)]);
    }
}
