//! Lends more or less while hosts use the memory: sections are withdrawn when nobody has anything in them, and lent again.

use std::sync::Arc;

use aquifer_directory::names::HeldUp;
use aquifer_fabric::Target;
use aquifer_pool::Donation;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::word::Run;

use crate::lending::{Lending, Told};
use crate::memory::{affordable_bytes, available_bytes, settled_bytes};
use crate::own::{OwnError, OwnPool};
use crate::shutdown::Shutdown;

/// More is lent in steps of at least so much, unless that is all that is wanted.
const STEP_BYTES: u64 = 64 << 20;

/// What a node does for those who change how much it lends.
pub(crate) struct Resizer {
    donation: Donation,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    is_pinned: bool,
    keep_free: Option<u64>,
}

impl Resizer {
    /// It begins with what is lent. Memory that is pinned stays as it is. `keep_free`: so many bytes are to stay available to the machine, whatever is wanted.
    pub const fn new(
        donation: Donation,
        target: Arc<dyn Target>,
        lending: Arc<Lending>,
        is_pinned: bool,
        keep_free: Option<u64>,
    ) -> Self {
        Self { donation, target, lending, is_pinned, keep_free }
    }

    /// Lend as much as is wanted, as far as that is possible now.
    ///
    /// # Errors
    /// If the node cannot get at its memory, or the system takes nothing back.
    pub fn look(&self, own: &mut OwnPool, stop: &Shutdown) -> Result<(), OwnError> {
        let wanted_bytes = self.lending.wanted_bytes();
        let before = self.lending.told();
        let (wanted, lent) = (wanted_bytes / SECTION_BYTES, before.lent_bytes / SECTION_BYTES);
        if self.is_pinned || wanted == lent && self.keep_free.is_none() {
            let held_up = (wanted != lent).then_some(HeldUp::Pinned);
            self.lending.tell(Told { wanted_bytes, held_up, ..before });
            return Ok(());
        }
        let outcome = self.settle(wanted_bytes, own, stop);
        // Said also of what was done before it failed.
        let held_up = outcome.as_ref().map_or(None, |held_up| *held_up);
        self.lending.tell(Told { lent_bytes: self.lent() * SECTION_BYTES, wanted_bytes, held_up });
        outcome.map(drop)
    }

    fn settle(
        &self,
        wanted_bytes: u64,
        own: &mut OwnPool,
        stop: &Shutdown,
    ) -> Result<Option<HeldUp>, OwnError> {
        let lent = self.lent();
        let (allocated, available) = (self.donation.memory.allocated_bytes()?, available_bytes()?);
        let affordable = affordable_bytes(allocated, available, self.keep_free.unwrap_or(0));
        // Unless it is to look after its machine a node that lends more than there is goes on: that was its promise.
        let is_watched = self.keep_free.is_some();
        let affordable = if is_watched { affordable } else { affordable.max(lent * SECTION_BYTES) };
        let settled =
            settled_bytes(wanted_bytes, lent * SECTION_BYTES, affordable, STEP_BYTES) / SECTION_BYTES;
        let held_up = (settled < wanted_bytes / SECTION_BYTES).then_some(HeldUp::NoMemory);
        let in_use = if settled < lent {
            self.withdraw(settled, own, stop)?
        } else {
            self.lend(settled, own, stop)?;
            None
        };
        Ok(held_up.or(in_use))
    }

    /// Sections that are lent, by their words.
    fn lent(&self) -> u64 {
        let lent =
            (0..self.donation.layout.sections()).filter(|section| !self.donation.is_withheld(*section));
        lent.count() as u64
    }

    /// From the end, so that what is lent stays together.
    fn withdraw(&self, wanted: u64, own: &mut OwnPool, stop: &Shutdown) -> Result<Option<HeldUp>, OwnError> {
        let mut left = self.lent().saturating_sub(wanted);
        for section in (0..self.donation.layout.sections()).rev() {
            if left == 0 || stop.is_requested() {
                return Ok(None);
            }
            if self.donation.is_free(section) {
                match self.withdraw_section(section, own) {
                    Ok(is_withdrawn) => left -= u64::from(is_withdrawn),
                    Err(error) if error.is_damage() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((left > 0).then_some(HeldUp::InUse))
    }

    /// Whether it was free still.
    fn withdraw_section(&self, section: u32, own: &mut OwnPool) -> Result<bool, OwnError> {
        own.change(section, |pool, node| {
            let Some(taken) = pool.take_group(node, section, Run::SECTION)? else { return Ok(false) };
            self.donation.shut(&taken);
            self.target.expel(taken.addr..taken.addr + taken.class.bytes());
            self.donation.release(&taken)?;
            Ok(true)
        })
    }

    fn lend(&self, wanted: u64, own: &mut OwnPool, stop: &Shutdown) -> Result<(), OwnError> {
        let mut left = wanted.saturating_sub(self.lent());
        for section in 0..self.donation.layout.sections() {
            if left == 0 || stop.is_requested() {
                break;
            }
            if self.donation.is_withheld(section) {
                own.change(section, |pool, _| Ok(pool.free(self.donation.section(section))?))?;
                left -= 1;
            }
        }
        Ok(())
    }
}
