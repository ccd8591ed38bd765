//! Clears freed spans, so that tenants other than the last one can allocate them.
//!
//! The node allocates a group of free spans, waits until no access by an old key is in flight,
//! clears the group, and frees it without an owner. The last tenant may allocate the spans before
//! the node does; it gets them uncleared.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::Target;
use aquifer_pool::NodeMemory;

use crate::self_client::{SelfClient, SelfClientError, allocate_group};
use crate::shutdown::Shutdown;

/// Maximum number of sections that are cleared in one turn: 256 MiB.
const SECTIONS_PER_TURN: u32 = 128;

/// The state of a section in the last turn.
#[derive(Clone, Copy, Default)]
struct SeenSection {
    word: u64,
    /// The section has nothing to clear as long as its word is unchanged.
    is_clear: bool,
}

/// Clears freed spans in turns.
pub(crate) struct Clearer {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    seen: Vec<SeenSection>,
    cleared_bytes: Arc<AtomicU64>,
}

impl Clearer {
    /// Creates a clearer, which counts the cleared bytes in `cleared_bytes`.
    pub fn new(node_memory: NodeMemory, target: Arc<dyn Target>, cleared_bytes: Arc<AtomicU64>) -> Self {
        let seen = vec![SeenSection::default(); node_memory.layout.sections() as usize];
        Self { node_memory, target, seen, cleared_bytes }
    }

    /// Clears spans in sections that have not changed since the last turn: a tenant that keeps
    /// allocating and freeing in a section can reuse its spans. Returns true if all was cleared.
    ///
    /// # Errors
    /// If the node cannot access its memory.
    pub fn run(&mut self, client: &mut SelfClient, stop: &Shutdown) -> Result<bool, SelfClientError> {
        let mut cleared = 0;
        for section in 0..self.node_memory.layout.sections() {
            if stop.is_requested() || cleared >= SECTIONS_PER_TURN {
                return Ok(false);
            }
            let word = self.node_memory.section_word(section);
            let seen = &mut self.seen[section as usize];
            if seen.word != word {
                *seen = SeenSection { word, is_clear: false };
            } else if !seen.is_clear {
                self.clear_section(section, client, stop)?;
                cleared += 1;
            }
        }
        Ok(true)
    }

    fn clear_section(
        &mut self,
        section: u32,
        client: &mut SelfClient,
        stop: &Shutdown,
    ) -> Result<(), SelfClientError> {
        let outcome = self.clear_free_groups(section, client, stop);
        // A damaged section must not delay other sections.
        let is_damaged = outcome.as_ref().is_err_and(SelfClientError::is_damage);
        self.seen[section as usize].is_clear =
            is_damaged || self.node_memory.find_uncleared(section).is_none();
        outcome
    }

    fn clear_free_groups(
        &self,
        section: u32,
        client: &mut SelfClient,
        stop: &Shutdown,
    ) -> Result<(), SelfClientError> {
        while self.clear_group(section, client)? && !stop.is_requested() {}
        Ok(())
    }

    /// Clears one group of a section. Returns false if there is none.
    fn clear_group(&self, section: u32, client: &mut SelfClient) -> Result<bool, SelfClientError> {
        let Some(group) = self.node_memory.find_uncleared(section) else { return Ok(false) };
        client.change(section, |pool, node| {
            let Some(extent) = allocate_group(pool, node, section, group)? else { return Ok(false) };
            self.node_memory.revoke_keys(&extent);
            self.target.expel(extent.addr..extent.addr + extent.class.bytes());
            self.node_memory.clear(&extent);
            pool.free(extent)?;
            self.cleared_bytes.fetch_add(extent.class.bytes(), Relaxed);
            Ok(true)
        })
    }
}
