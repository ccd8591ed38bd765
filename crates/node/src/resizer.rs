//! Lends more or less while hosts use the memory: sections are withdrawn when nobody has anything in them, and lent again.

use std::sync::Arc;

use aquifer_directory::names::ResizeBlocker;
use aquifer_fabric::Target;
use aquifer_pool::NodeMemory;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::word::AlignedRun;

use crate::lending::{Lending, Told};
use crate::memory::{affordable_bytes, available_bytes, settled_bytes};
use crate::own::{OwnError, OwnPool, take_group};
use crate::shutdown::Shutdown;

/// More is lent in steps of at least so much, unless that is all that is wanted.
const STEP_BYTES: u64 = 64 << 20;

/// So many sections are changed before it is told how far that has come, and whether it is wanted still.
const SECTIONS_AT_ONCE: u64 = 256;

/// What a node does for those who change how much it lends.
pub(crate) struct Resizer {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    is_pinned: bool,
    keep_free: Option<u64>,
    /// What was told is so: nothing failed since.
    is_sure: bool,
}

impl Resizer {
    /// It begins with what is lent; if nobody is sure that this is so (`is_sure`), it looks first. Memory that is pinned stays as it is. `keep_free`: so many bytes are to stay available to the machine, whatever is wanted.
    pub const fn new(
        node_memory: NodeMemory,
        target: Arc<dyn Target>,
        lending: Arc<Lending>,
        is_pinned: bool,
        keep_free: Option<u64>,
        is_sure: bool,
    ) -> Self {
        Self { node_memory, target, lending, is_pinned, keep_free, is_sure }
    }

    /// Lend as much as is wanted, as far as that is possible now.
    ///
    /// # Errors
    /// If the node cannot get at its memory, or the system takes nothing back.
    pub fn look(&mut self, own: &mut OwnPool, stop: &Shutdown) -> Result<(), OwnError> {
        let wanted_bytes = self.lending.wanted_bytes();
        let before = self.lending.told();
        let (wanted, lent) = (wanted_bytes / SECTION_BYTES, before.lent_bytes / SECTION_BYTES);
        let is_settled = self.is_pinned || wanted == lent && self.keep_free.is_none();
        if is_settled && self.is_sure {
            let held_up = (wanted != lent).then_some(ResizeBlocker::Pinned);
            self.lending.tell(Told { wanted_bytes, held_up, ..before });
            return Ok(());
        }
        // What is pinned is lent for good: what a process before this one had taken of it is not withheld.
        let wanted_bytes = if self.is_pinned { self.node_memory.layout.data_bytes() } else { wanted_bytes };
        // What a connection that broke has left half done is set right first: until then words do not tell what is lent.
        let outcome = own.connect().map(drop).and_then(|()| self.settle(wanted_bytes, own, stop));
        self.is_sure = outcome.is_ok();
        match outcome {
            Ok(held_up) => {
                self.lending.tell(Told { lent_bytes: self.lent() * SECTION_BYTES, wanted_bytes, held_up });
                Ok(())
            }
            Err(error) => {
                let held_up = Some(ResizeBlocker::Failing);
                self.lending.tell(Told { wanted_bytes, held_up, ..self.lending.told() });
                Err(error)
            }
        }
    }

    fn settle(
        &self,
        wanted_bytes: u64,
        own: &mut OwnPool,
        stop: &Shutdown,
    ) -> Result<Option<ResizeBlocker>, OwnError> {
        let wanted = wanted_bytes / SECTION_BYTES;
        loop {
            let lent = self.lent();
            let aim = self.aim(wanted_bytes, lent)?;
            let next = aim.clamp(lent.saturating_sub(SECTIONS_AT_ONCE), lent + SECTIONS_AT_ONCE);
            let held_up = if next < lent {
                self.withdraw(lent - next, own, stop)?
            } else {
                self.lend(next - lent, own, stop)?
            };
            let lent = self.lent();
            if lent == aim
                || held_up.is_some()
                || self.lending.wanted_bytes() != wanted_bytes
                || stop.is_requested()
            {
                let is_short = lent < wanted && aim < wanted;
                return Ok(if is_short { Some(ResizeBlocker::NoMemory) } else { held_up });
            }
            self.lending.tell(Told { lent_bytes: lent * SECTION_BYTES, wanted_bytes, held_up: None });
        }
    }

    /// Sections to be lent, by what is wanted and what the machine has.
    fn aim(&self, wanted_bytes: u64, lent: u64) -> std::io::Result<u64> {
        let lent_bytes = lent * SECTION_BYTES;
        let (allocated, available) = (self.node_memory.memory.allocated_bytes()?, available_bytes()?);
        let affordable = affordable_bytes(allocated, available, self.keep_free.unwrap_or(0));
        // Unless it is to look after its machine a node that lends more than there is goes on: that was its promise.
        let affordable = if self.keep_free.is_some() { affordable } else { affordable.max(lent_bytes) };
        Ok(settled_bytes(wanted_bytes, lent_bytes, affordable, STEP_BYTES) / SECTION_BYTES)
    }

    /// Sections that are lent, by their words.
    fn lent(&self) -> u64 {
        self.node_memory.lent_bytes() / SECTION_BYTES
    }

    /// So many sections less, from the end, so that what is lent stays together.
    fn withdraw(
        &self,
        count: u64,
        own: &mut OwnPool,
        stop: &Shutdown,
    ) -> Result<Option<ResizeBlocker>, OwnError> {
        let (mut left, mut held_up) = (count, ResizeBlocker::Failing);
        for section in (0..self.node_memory.layout.sections()).rev() {
            if left == 0 || stop.is_requested() {
                return Ok(None);
            }
            if self.node_memory.is_offline(section) {
                continue;
            }
            if self.node_memory.is_section_free(section) {
                match self.withdraw_section(section, own) {
                    Ok(is_withdrawn) => left -= u64::from(is_withdrawn),
                    Err(error) if error.is_damage() => continue,
                    Err(error) => return Err(error),
                }
            }
            held_up = ResizeBlocker::InUse;
        }
        Ok((left > 0).then_some(held_up))
    }

    /// Whether it was free still.
    fn withdraw_section(&self, section: u32, own: &mut OwnPool) -> Result<bool, OwnError> {
        own.change(section, |pool, node| {
            let Some(taken) = take_group(pool, node, section, AlignedRun::SECTION)? else { return Ok(false) };
            self.node_memory.revoke_keys(&taken);
            self.target.expel(taken.addr..taken.addr + taken.class.bytes());
            self.node_memory.release_pages(&taken)?;
            Ok(true)
        })
    }

    /// So many sections more.
    fn lend(
        &self,
        count: u64,
        own: &mut OwnPool,
        stop: &Shutdown,
    ) -> Result<Option<ResizeBlocker>, OwnError> {
        let mut left = count;
        for section in 0..self.node_memory.layout.sections() {
            if left == 0 || stop.is_requested() {
                return Ok(None);
            }
            if self.node_memory.is_offline(section) {
                match own.change(section, |pool, _| Ok(pool.free(self.node_memory.section_extent(section))?))
                {
                    Ok(()) => left -= 1,
                    Err(error) if error.is_damage() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((left > 0).then_some(ResizeBlocker::Failing))
    }
}
