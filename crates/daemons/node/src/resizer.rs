//! The resizer: changes the amount of lent memory while hosts use it.
//!
//! To lend less, the node takes free sections offline: it allocates them and returns their pages to
//! the system. To lend more, it frees such sections.

use std::sync::Arc;

use aquifer_directory::names::ResizeBlocker;
use aquifer_fabric::Target;
use aquifer_host_memory::available_bytes;
use aquifer_pool::NodeMemory;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::word::AlignedRun;

use crate::lending::{Lending, LendingStatus};
use crate::memory::{affordable_bytes, next_lent_bytes};
use crate::self_client::{SelfClient, SelfClientError, allocate_group};
use crate::shutdown::Shutdown;

/// Smallest change because of the available memory, in bytes. A change that fulfils a request may
/// be smaller.
const STEP_BYTES: u64 = 64 << 20;

/// Number of sections that are changed before the status is updated and the request is read again.
const SECTIONS_PER_STEP: u64 = 256;

/// Changes the amount of lent memory, in turns.
pub(crate) struct Resizer {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    is_pinned: bool,
    keep_free_bytes: Option<u64>,
    /// True if the status is known to be correct, because no change has failed since.
    status_is_certain: bool,
}

impl Resizer {
    /// Creates a resizer.
    ///
    /// - `is_pinned`: the lent memory cannot be changed.
    /// - `keep_free_bytes`: memory that stays available to the machine even if more is requested.
    /// - `status_is_certain`: false if an earlier process may have changed more than `lending`
    ///   says.
    pub const fn new(
        node_memory: NodeMemory,
        target: Arc<dyn Target>,
        lending: Arc<Lending>,
        is_pinned: bool,
        keep_free_bytes: Option<u64>,
        status_is_certain: bool,
    ) -> Self {
        Self { node_memory, target, lending, is_pinned, keep_free_bytes, status_is_certain }
    }

    /// Changes the lent memory to the requested amount, as far as that is possible now.
    ///
    /// # Errors
    /// If the node cannot access its memory, or pages cannot be released.
    pub fn run(&mut self, client: &mut SelfClient, stop: &Shutdown) -> Result<(), SelfClientError> {
        let requested_bytes = self.lending.requested_bytes();
        let before = self.lending.status();
        let (requested, lent) = (requested_bytes / SECTION_BYTES, before.lent_bytes / SECTION_BYTES);
        let needs_no_change = self.is_pinned || requested == lent && self.keep_free_bytes.is_none();
        if needs_no_change && self.status_is_certain {
            let blocker = (requested != lent).then_some(ResizeBlocker::Pinned);
            self.lending.set_status(LendingStatus { requested_bytes, blocker, ..before });
            return Ok(());
        }
        // All pinned memory is lent, including sections that an earlier process had taken offline.
        let requested_bytes =
            if self.is_pinned { self.node_memory.layout.data_bytes() } else { requested_bytes };
        // Incomplete changes are undone first. Until then the words do not show the lent amount.
        let outcome = client.connect().map(drop).and_then(|()| self.resize(requested_bytes, client, stop));
        self.status_is_certain = outcome.is_ok();
        match outcome {
            Ok(blocker) => {
                let lent_bytes = self.lent_sections() * SECTION_BYTES;
                self.lending.set_status(LendingStatus { lent_bytes, requested_bytes, blocker });
                Ok(())
            }
            Err(error) => {
                let blocker = Some(ResizeBlocker::Failing);
                let status = self.lending.status();
                self.lending.set_status(LendingStatus { requested_bytes, blocker, ..status });
                Err(error)
            }
        }
    }

    /// Changes sections until `requested_bytes` are lent or no more can be changed. Returns the
    /// reason why less was changed than requested.
    fn resize(
        &self,
        requested_bytes: u64,
        client: &mut SelfClient,
        stop: &Shutdown,
    ) -> Result<Option<ResizeBlocker>, SelfClientError> {
        let requested = requested_bytes / SECTION_BYTES;
        loop {
            let lent = self.lent_sections();
            let goal = self.goal_sections(requested_bytes, lent)?;
            let next = goal.clamp(lent.saturating_sub(SECTIONS_PER_STEP), lent + SECTIONS_PER_STEP);
            let blocker = if next < lent {
                self.set_offline(lent - next, client, stop)?
            } else {
                self.bring_online(next - lent, client, stop)?
            };
            let lent = self.lent_sections();
            if lent == goal
                || blocker.is_some()
                || self.lending.requested_bytes() != requested_bytes
                || stop.is_requested()
            {
                let is_short = lent < requested && goal < requested;
                return Ok(if is_short { Some(ResizeBlocker::NoMemory) } else { blocker });
            }
            let lent_bytes = lent * SECTION_BYTES;
            self.lending.set_status(LendingStatus { lent_bytes, requested_bytes, blocker: None });
        }
    }

    /// The number of sections to lend, from the request and the machine's available memory.
    fn goal_sections(&self, requested_bytes: u64, lent: u64) -> std::io::Result<u64> {
        let lent_bytes = lent * SECTION_BYTES;
        let (allocated, available) = (self.node_memory.memory.allocated_bytes()?, available_bytes()?);
        let affordable = affordable_bytes(allocated, available, self.keep_free_bytes.unwrap_or(0));
        // Without keep_free_bytes, a node continues to lend more than is available.
        let affordable = if self.keep_free_bytes.is_some() { affordable } else { affordable.max(lent_bytes) };
        Ok(next_lent_bytes(requested_bytes, lent_bytes, affordable, STEP_BYTES) / SECTION_BYTES)
    }

    /// The number of lent sections, from their words.
    fn lent_sections(&self) -> u64 {
        self.node_memory.lent_bytes() / SECTION_BYTES
    }

    /// Takes `count` sections offline, the last first, so that lent sections are neighbours.
    /// Returns the reason if there are fewer.
    fn set_offline(
        &self,
        count: u64,
        client: &mut SelfClient,
        stop: &Shutdown,
    ) -> Result<Option<ResizeBlocker>, SelfClientError> {
        let (mut remaining, mut blocker) = (count, ResizeBlocker::Failing);
        for section in (0..self.node_memory.layout.sections()).rev() {
            if remaining == 0 || stop.is_requested() {
                return Ok(None);
            }
            if self.node_memory.is_offline(section) {
                continue;
            }
            if self.node_memory.is_section_free(section) {
                match self.set_section_offline(section, client) {
                    Ok(is_offline) => remaining -= u64::from(is_offline),
                    Err(error) if error.is_damage() => continue,
                    Err(error) => return Err(error),
                }
            }
            blocker = ResizeBlocker::InUse;
        }
        Ok((remaining > 0).then_some(blocker))
    }

    /// Takes a section offline. Returns false if it is in use.
    fn set_section_offline(&self, section: u32, client: &mut SelfClient) -> Result<bool, SelfClientError> {
        client.change(section, |pool, node| {
            let Some(extent) = allocate_group(pool, node, section, AlignedRun::SECTION)? else {
                return Ok(false);
            };
            self.node_memory.revoke_keys(&extent);
            self.target.expel(extent.addr..extent.addr + extent.class.bytes());
            self.node_memory.release_pages(&extent)?;
            Ok(true)
        })
    }

    /// Frees `count` sections that are offline. Returns the reason if there are fewer.
    fn bring_online(
        &self,
        count: u64,
        client: &mut SelfClient,
        stop: &Shutdown,
    ) -> Result<Option<ResizeBlocker>, SelfClientError> {
        let mut remaining = count;
        for section in 0..self.node_memory.layout.sections() {
            if remaining == 0 || stop.is_requested() {
                return Ok(None);
            }
            if self.node_memory.is_offline(section) {
                match client
                    .change(section, |pool, _| Ok(pool.free(self.node_memory.section_extent(section))?))
                {
                    Ok(()) => remaining -= 1,
                    Err(error) if error.is_damage() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((remaining > 0).then_some(ResizeBlocker::Failing))
    }
}
