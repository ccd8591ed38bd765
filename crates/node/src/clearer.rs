//! Clears memory that was used and is free again, so that other tenants than its last may have it.
//!
//! The node takes a group of free spans; when nobody can get at it any more it is cleared and given back, nobody's. Its last tenant may have been faster, and
//! takes it as it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquifer_fabric::Target;
use aquifer_pool::NodeMemory;

use crate::own::{OwnError, OwnPool, take_group};
use crate::shutdown::Shutdown;

/// Sections that are cleared in one look: a quarter of a gigabyte.
const SECTIONS_AT_ONCE: u32 = 128;

/// A section as it was at the last look.
#[derive(Clone, Copy, Default)]
struct Seen {
    word: u64,
    /// There was nothing to be cleared in it, and there is not as long as its word stays so.
    is_clear: bool,
}

/// What is cleared, and what not yet.
pub(crate) struct Clearer {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    seen: Vec<Seen>,
    cleared_bytes: Arc<AtomicU64>,
}

impl Clearer {
    /// Nothing was looked at yet. `cleared_bytes` counts what it clears.
    pub fn new(node_memory: NodeMemory, target: Arc<dyn Target>, cleared_bytes: Arc<AtomicU64>) -> Self {
        let seen = vec![Seen::default(); node_memory.layout.sections() as usize];
        Self { node_memory, target, seen, cleared_bytes }
    }

    /// Clear what has been left alone since the last look: whoever goes on taking and giving back keeps its own. Returns whether that was all: others have
    /// something to do, too.
    ///
    /// # Errors
    /// If the node cannot get at its memory.
    pub fn look(&mut self, own: &mut OwnPool, stop: &Shutdown) -> Result<bool, OwnError> {
        let mut cleared = 0;
        for section in 0..self.node_memory.layout.sections() {
            if stop.is_requested() || cleared >= SECTIONS_AT_ONCE {
                return Ok(false);
            }
            let word = self.node_memory.section_word(section);
            let seen = &mut self.seen[section as usize];
            if seen.word != word {
                *seen = Seen { word, is_clear: false };
            } else if !seen.is_clear {
                self.clear_section(section, own, stop)?;
                cleared += 1;
            }
        }
        Ok(true)
    }

    fn clear_section(&mut self, section: u32, own: &mut OwnPool, stop: &Shutdown) -> Result<(), OwnError> {
        let outcome = self.clear_free_groups(section, own, stop);
        // Other sections shall not wait for one that is damaged.
        let is_damaged = outcome.as_ref().is_err_and(OwnError::is_damage);
        self.seen[section as usize].is_clear =
            is_damaged || self.node_memory.find_uncleared(section).is_none();
        outcome
    }

    fn clear_free_groups(&self, section: u32, own: &mut OwnPool, stop: &Shutdown) -> Result<(), OwnError> {
        while self.clear_some(section, own)? && !stop.is_requested() {}
        Ok(())
    }

    /// Clear one group of a section; whether there was one.
    fn clear_some(&self, section: u32, own: &mut OwnPool) -> Result<bool, OwnError> {
        let Some(group) = self.node_memory.find_uncleared(section) else { return Ok(false) };
        own.change(section, |pool, node| {
            let Some(taken) = take_group(pool, node, section, group)? else { return Ok(false) };
            self.node_memory.revoke_keys(&taken);
            self.target.expel(taken.addr..taken.addr + taken.class.bytes());
            self.node_memory.clear(&taken);
            pool.free(taken)?;
            self.cleared_bytes.fetch_add(taken.class.bytes(), Relaxed);
            Ok(true)
        })
    }
}
