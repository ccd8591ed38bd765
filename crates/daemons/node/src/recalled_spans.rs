//! Memory that the node recalls, although hosts use it: the sections behind a boundary.
//!
//! Hosts read the boundary from the node's figures, and move what they have behind it. The node
//! allocates the spans there as they become free, and returns their pages to the system. So hosts
//! open and allocate no span there; they still find room in spans that are in use. When the node
//! has all spans of a section, the section goes offline.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_directory::names::{MEMORY_HOLDERS_MAX, MemoryHolder};
use aquifer_fabric::Target;
use aquifer_pool::size::{SECTION_SPANS, SPAN_BYTES};
use aquifer_pool::{Extent, NodeMemory};

use crate::resizer::set_section_offline;
use crate::self_client::{SelfClient, SelfClientError, allocate_group};
use crate::shutdown::Shutdown;

/// The largest order of a group of spans that is less than a section.
const ORDER_MAX: u8 = 3;
/// Maximum number of sections of which spans are held in one turn, so that the request is read
/// again and the figures are written.
const SECTIONS_PER_TURN: usize = 64;

/// Memory that the node recalls.
pub(crate) struct Recalled {
    /// The first section that is recalled.
    pub first_section: u32,
    /// Bytes in use from there on.
    pub bytes: u64,
    /// The users that have the most of them.
    pub holders: Vec<MemoryHolder>,
}

/// The spans that the node holds in sections that it recalls.
pub(crate) struct RecalledSpans {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    /// The first section that is recalled, if any is.
    boundary: Option<u32>,
    /// The groups of spans that the node holds, by section.
    held: BTreeMap<u32, Vec<Extent>>,
}

impl RecalledSpans {
    /// Creates the state of a node that recalls nothing.
    pub const fn new(node_memory: NodeMemory, target: Arc<dyn Target>) -> Self {
        Self { node_memory, target, boundary: None, held: BTreeMap::new() }
    }

    /// Whether the node recalls or holds anything.
    pub fn is_active(&self) -> bool {
        self.boundary.is_some() || !self.held.is_empty()
    }

    /// Whether a section may become free: no span of it belongs to heaps, which do not move.
    pub fn is_movable(&self, section: u32) -> bool {
        let mut used = self.node_memory.used_spans(section);
        used.all(|(span, tenant)| tenant.is_some() || self.is_held(section, span))
    }

    /// Whether the node holds a span of a section.
    fn is_held(&self, section: u32, span: u32) -> bool {
        let held = self.held.get(&section).map_or(&[][..], Vec::as_slice);
        held.iter().any(|extent| self.node_memory.spans_of(extent).contains(&span))
    }

    /// Bytes that the node holds.
    pub fn held_bytes(&self) -> u64 {
        self.held.values().flatten().map(|extent| extent.class.bytes()).sum()
    }

    /// The memory that is recalled; `None` if none is.
    pub fn recalled(&self) -> Option<Recalled> {
        let first_section = self.boundary?;
        let mut bytes_of: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        for section in first_section..self.node_memory.layout.sections() {
            if self.node_memory.is_offline(section) {
                continue;
            }
            for (span, tenant) in self.node_memory.used_spans(section) {
                if !self.is_held(section, span) {
                    *bytes_of.entry(tenant.map(|tenant| tenant.0)).or_default() += SPAN_BYTES;
                }
            }
        }
        let bytes: u64 = bytes_of.values().sum();
        let mut holders: Vec<MemoryHolder> =
            bytes_of.into_iter().map(|(tenant, bytes)| MemoryHolder { tenant, bytes }).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        holders.truncate(MEMORY_HOLDERS_MAX);
        (bytes > 0).then_some(Recalled { first_section, bytes, holders })
    }

    /// Recalls all sections from `boundary` on, or nothing. Holds the spans there that are free,
    /// and frees what is held elsewhere.
    ///
    /// # Errors
    /// If the node cannot access its memory, or pages cannot be released.
    pub fn recall_from(
        &mut self,
        boundary: Option<u32>,
        client: &mut SelfClient,
        stop: &Shutdown,
    ) -> Result<(), SelfClientError> {
        self.boundary = boundary;
        client.connect()?;
        for recovered in client.drain_recovered() {
            self.held.retain(|section, _| !recovered.contains(section));
        }
        let kept = boundary.unwrap_or(u32::MAX);
        let surplus: Vec<u32> = self.held.range(..kept).map(|(section, _)| *section).collect();
        for section in surplus {
            self.free_held(section, client)?;
        }
        let Some(boundary) = boundary else { return Ok(()) };
        let mut sections = 0;
        for section in (boundary..self.node_memory.layout.sections()).rev() {
            if stop.is_requested() || sections >= SECTIONS_PER_TURN {
                break;
            }
            if !self.node_memory.is_offline(section) && self.node_memory.has_free_spans(section)
                || self.is_complete(section)
            {
                self.hold_free_spans(section, client)?;
                sections += 1;
            }
        }
        Ok(())
    }

    fn hold_free_spans(&mut self, section: u32, client: &mut SelfClient) -> Result<(), SelfClientError> {
        for order in (0..=ORDER_MAX).rev() {
            while let Some(group) = self.node_memory.find_free(section, order, true) {
                let held = client.change(section, |pool, node| {
                    let Some(extent) = allocate_group(pool, node, section, group)? else { return Ok(None) };
                    self.node_memory.revoke_keys(&extent);
                    self.target.expel(extent.addr..extent.addr + extent.class.bytes());
                    self.node_memory.release_pages(&extent)?;
                    Ok(Some(extent))
                });
                match held {
                    Ok(Some(extent)) => self.held.entry(section).or_default().push(extent),
                    // A host was faster, or the section is damaged.
                    Ok(None) => break,
                    Err(error) if error.is_damage() => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        }
        if self.is_complete(section) {
            self.free_held(section, client)?;
        }
        if self.node_memory.is_section_free(section) {
            match set_section_offline(&self.node_memory, &*self.target, section, client) {
                // A damaged section must not delay the others.
                Err(error) if !error.is_damage() => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Whether the node holds all spans of a section.
    fn is_complete(&self, section: u32) -> bool {
        self.held.get(&section).into_iter().flatten().map(spans_of).sum::<u32>() == SECTION_SPANS
    }

    fn free_held(&mut self, section: u32, client: &mut SelfClient) -> Result<(), SelfClientError> {
        while let Some(extent) = self.held.get_mut(&section).and_then(Vec::pop) {
            match client.change(section, |pool, _| Ok(pool.free(extent)?)) {
                Err(error) if !error.is_damage() => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        self.held.remove(&section);
        Ok(())
    }
}

fn spans_of(extent: &Extent) -> u32 {
    u32::try_from(extent.class.bytes() / SPAN_BYTES).unwrap_or(u32::MAX)
}
