//! Memory that the node holds for the heaps of objects on its machine: free spans, which no host
//! can allocate meanwhile. Their pages are returned to the system, and heaps allocate as many.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquifer_fabric::{Key, Target};
use aquifer_pool::size::SPAN_BYTES;
use aquifer_pool::word::AlignedRun;
use aquifer_pool::{Extent, NodeId, NodeMemory, SizeClass};

use crate::self_client::{SelfClient, SelfClientError, allocate_group};

/// Longest time of one change. The next change continues.
const CHANGE_TIME: Duration = Duration::from_millis(100);
/// Maximum number of groups that are freed in one change.
const GROUPS_FREED_MAX: usize = 256;
/// The order of a group of spans that is a whole section.
const SECTION_ORDER: u8 = 4;

/// The held spans.
pub(crate) struct HeapSpans {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    client: SelfClient,
    held: Vec<Extent>,
    /// The file that records the held extents, for the node's next process.
    record: PathBuf,
    /// The epoch of the memory's life.
    epoch: u64,
    /// Number of held bytes, for metrics.
    held_bytes: Arc<AtomicU64>,
    is_failing: bool,
}

impl HeapSpans {
    /// Starts with the spans that an earlier process has recorded for this life of the memory.
    /// `client` acts as [`aquifer_fabric::Host::HEAPS`].
    pub fn new(
        node_memory: NodeMemory,
        target: Arc<dyn Target>,
        client: SelfClient,
        held_bytes: Arc<AtomicU64>,
        record: PathBuf,
        epoch: u64,
    ) -> Self {
        let held = recorded(&record, epoch, &node_memory);
        held_bytes.store(u64::from(spans_of(&held)) * SPAN_BYTES, Relaxed);
        Self { node_memory, target, client, held, record, epoch, held_bytes, is_failing: false }
    }

    /// Records the held extents. Extents without a record are freed with the next connection.
    fn record(&self) -> Result<(), SelfClientError> {
        let extents: Vec<(u64, u8)> =
            self.held.iter().map(|extent| (extent.addr, extent.class.k())).collect();
        let json = serde_json::to_vec(&(self.epoch, extents)).map_err(std::io::Error::from)?;
        let new = self.record.with_extension("new");
        std::fs::write(&new, json)?;
        Ok(std::fs::rename(&new, &self.record)?)
    }

    /// Holds `goal` spans, or as many as are free. Returns the number of held spans, which may be
    /// greater than `goal`, because a group that was allocated whole is also freed whole.
    pub fn hold(&mut self, goal: u32) -> u32 {
        let outcome = self.change_to(goal, Instant::now() + CHANGE_TIME);
        let was_failing = std::mem::replace(&mut self.is_failing, outcome.is_err());
        if let Err(error) = outcome {
            self.client.disconnect();
            if !was_failing {
                tracing::warn!(%error, "cannot change the memory that is held for heaps; retrying");
            }
        }
        let held = spans_of(&self.held);
        self.held_bytes.store(u64::from(held) * SPAN_BYTES, Relaxed);
        held
    }

    fn change_to(&mut self, goal: u32, deadline: Instant) -> Result<(), SelfClientError> {
        if spans_of(&self.held) == goal && !self.client.has_unfinished_change() {
            return Ok(());
        }
        let recorded: HashSet<u64> = self.held.iter().map(|extent| extent.addr).collect();
        self.client.connect_with(|pool, node, sections| {
            pool.free_unrecorded(node, sections, &|addr| recorded.contains(&addr))
        })?;
        if spans_of(&self.held) > goal {
            return self.free_down_to(goal);
        }
        let allocated = self.allocate_up_to(goal, deadline);
        // Extents that were allocated before a failure are recorded, too.
        self.record().and(allocated)
    }

    fn allocate_up_to(&mut self, goal: u32, deadline: Instant) -> Result<(), SelfClientError> {
        loop {
            let missing = goal - spans_of(&self.held).min(goal);
            if missing == 0 || !self.allocate(missing)? || Instant::now() >= deadline {
                return Ok(());
            }
        }
    }

    /// Allocates one group of at most `spans` spans. Returns false if none is free.
    fn allocate(&mut self, spans: u32) -> Result<bool, SelfClientError> {
        let order_max = u8::try_from(spans.ilog2()).unwrap_or(SECTION_ORDER).min(SECTION_ORDER);
        for order in (0..=order_max).rev() {
            // Sections in use come first, so that free ones stay free for large extents.
            for in_use in [true, false] {
                for section in (0..self.node_memory.layout.sections()).rev() {
                    if let Some(group) = self.node_memory.find_free(section, order, in_use)
                        && self.allocate_group(section, group)?
                    {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }

    /// Allocates a group. Returns false if a host has allocated the group meanwhile.
    fn allocate_group(&mut self, section: u32, group: AlignedRun) -> Result<bool, SelfClientError> {
        let Self { node_memory, target, .. } = self;
        let taken = self.client.change(section, |pool, node| {
            let Some(extent) = allocate_group(pool, node, section, group)? else { return Ok(None) };
            node_memory.revoke_keys(&extent);
            target.expel(extent.addr..extent.addr + extent.class.bytes());
            node_memory.release_pages(&extent)?;
            Ok(Some(extent))
        });
        let taken = self.checked(taken)?.flatten();
        self.held.extend(taken);
        Ok(taken.is_some())
    }

    /// Frees groups, the smallest first, as long as at least `goal` spans stay.
    fn free_down_to(&mut self, goal: u32) -> Result<(), SelfClientError> {
        self.held.sort_by_key(|extent| std::cmp::Reverse(extent.class));
        let (mut held, mut kept) = (spans_of(&self.held), self.held.len());
        while kept > 0 && self.held.len() - kept < GROUPS_FREED_MAX {
            held -= spans_of(&self.held[kept - 1..kept]);
            if held < goal {
                break;
            }
            kept -= 1;
        }
        let freed = self.held.split_off(kept);
        // Recorded before they are freed: the next process must not treat them as held.
        self.record()?;
        for extent in freed {
            let section = self.node_memory.section_of(&extent);
            let outcome = self.client.change(section, |pool, _| Ok(pool.free(extent)?));
            self.checked(outcome)?;
        }
        Ok(())
    }

    /// The outcome of a change; `None` if the section is damaged.
    fn checked<T>(&self, changed: Result<T, SelfClientError>) -> Result<Option<T>, SelfClientError> {
        match changed {
            Ok(changed) => Ok(Some(changed)),
            Err(error) if error.is_damage() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Reads the extents that an earlier process has recorded for this life of the memory.
fn recorded(record: &Path, epoch: u64, node_memory: &NodeMemory) -> Vec<Extent> {
    let Ok(json) = std::fs::read(record) else { return Vec::new() };
    let Ok((of_epoch, extents)) = serde_json::from_slice::<(u64, Vec<(u64, u8)>)>(&json) else {
        tracing::warn!(path = %record.display(), "the record of memory for heaps is not valid");
        return Vec::new();
    };
    let node = NodeId(node_memory.layout.node());
    let extent = |(addr, k): (u64, u8)| Some(Extent { node, addr, class: SizeClass::new(k)?, key: Key(0) });
    let is_of_life = of_epoch == epoch;
    extents.into_iter().filter(|_| is_of_life).filter_map(extent).collect()
}

fn spans_of(extents: &[Extent]) -> u32 {
    let bytes: u64 = extents.iter().map(|extent| extent.class.bytes()).sum();
    u32::try_from(bytes / SPAN_BYTES).unwrap_or(u32::MAX)
}
