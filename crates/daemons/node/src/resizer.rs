//! The resizer: changes the amount of lent memory while hosts use it.
//!
//! To lend less, the node takes free sections offline: it allocates them and returns their pages to
//! the system. If there are too few, it recalls memory that is in use (`recalled_spans`). To lend
//! more, it frees such sections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::ResizeBlocker;
use aquifer_fabric::Target;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::word::AlignedRun;
use aquifer_pool::{NodeFigures, NodeMemory};

use crate::lending::{Lending, LendingStatus};
use crate::memory::{AvailableMemory, Shortage, affordable_bytes, next_lent_bytes};
use crate::recalled_spans::RecalledSpans;
use crate::self_client::{SelfClient, SelfClientError, allocate_group};
use crate::shutdown::Shutdown;

/// Smallest change because of the available memory, in bytes. A change that fulfils a request may
/// be smaller.
const STEP_BYTES: u64 = 64 << 20;
/// Interval between two updates of the node's figures.
const FIGURES_INTERVAL: Duration = Duration::from_millis(250);
/// The interval is at least this multiple of the time that the figures take: with a tebibyte, they
/// take milliseconds.
const FIGURES_TIME_FACTOR: u32 = 20;

/// Number of sections that are changed before the status is updated and the request is read again.
const SECTIONS_PER_STEP: u64 = 256;

/// Changes the amount of lent memory, in turns.
pub(crate) struct Resizer {
    node_memory: NodeMemory,
    target: Arc<dyn Target>,
    lending: Arc<Lending>,
    is_pinned: bool,
    available: AvailableMemory,
    /// True if the status is known to be correct, because no change has failed since.
    status_is_certain: bool,
    shortage: Shortage,
    spans: RecalledSpans,
    /// The last figures, and the time at which they were written.
    figures: Option<(NodeFigures, Instant)>,
    /// The time that the last figures took.
    figures_time: Duration,
}

impl Resizer {
    /// Creates a resizer.
    ///
    /// - `is_pinned`: the lent memory cannot be changed.
    /// - `status_is_certain`: false if an earlier process may have changed more than `lending`
    ///   says.
    pub fn new(
        node_memory: NodeMemory,
        target: Arc<dyn Target>,
        lending: Arc<Lending>,
        is_pinned: bool,
        available: AvailableMemory,
        status_is_certain: bool,
    ) -> Self {
        Self {
            spans: RecalledSpans::new(node_memory.clone(), Arc::clone(&target)),
            shortage: Shortage::new(available),
            node_memory,
            target,
            lending,
            is_pinned,
            available,
            status_is_certain,
            figures: None,
            figures_time: Duration::ZERO,
        }
    }

    /// Changes the lent memory to the requested amount, as far as that is possible now.
    ///
    /// # Errors
    /// If the node cannot access its memory, or pages cannot be released.
    pub fn run(&mut self, client: &mut SelfClient, stop: &Shutdown) -> Result<(), SelfClientError> {
        let requested_bytes = self.lending.requested_bytes();
        let before = self.lending.status();
        let (requested, lent) = (requested_bytes / SECTION_BYTES, before.lent_bytes / SECTION_BYTES);
        let needs_no_change = self.is_pinned
            || requested == lent && self.available.keep_free_bytes.is_none() && !self.spans.is_active();
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
        &mut self,
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
                let is_short_for_long = self.shortage.is_lasting(lent > goal, Instant::now());
                let must_recall =
                    blocker == Some(ResizeBlocker::InUse) && (requested < lent || is_short_for_long);
                let boundary = must_recall.then(|| self.boundary(lent - goal));
                self.spans.recall_from(boundary, client, stop)?;
                let is_short = lent < requested && goal < requested;
                return Ok(if is_short { Some(ResizeBlocker::NoMemory) } else { blocker });
            }
            let lent_bytes = lent * SECTION_BYTES;
            self.lending.set_status(LendingStatus { lent_bytes, requested_bytes, blocker: None });
        }
    }

    /// The number of sections to lend, from the request and the machine's available memory.
    fn goal_sections(&mut self, requested_bytes: u64, lent: u64) -> std::io::Result<u64> {
        let lent_bytes = lent * SECTION_BYTES;
        let AvailableMemory { keep_free_bytes, measure, .. } = self.available;
        let (allocated, available) = (self.node_memory.memory.allocated_bytes()?, measure()?);
        let affordable = affordable_bytes(allocated, available, keep_free_bytes.unwrap_or(0));
        let lent_under_pressure = lent_bytes.saturating_sub(STEP_BYTES);
        let affordable = affordable.min(self.shortage.limit(available, lent_under_pressure, Instant::now()));
        // Without keep_free_bytes, a node continues to lend more than is available.
        let affordable = if keep_free_bytes.is_some() { affordable } else { affordable.max(lent_bytes) };
        Ok(next_lent_bytes(requested_bytes, lent_bytes, affordable, STEP_BYTES) / SECTION_BYTES)
    }

    /// The first section to recall, so that `count` sections become free. Sections with memory of
    /// heaps, which does not move, do not count.
    fn boundary(&self, count: u64) -> u32 {
        let may_become_free =
            |section: &u32| !self.node_memory.is_offline(*section) && self.spans.is_movable(*section);
        let mut sections = (0..self.node_memory.layout.sections()).rev().filter(may_become_free);
        let last = usize::try_from(count.saturating_sub(1)).unwrap_or(usize::MAX);
        sections.nth(last).unwrap_or(0)
    }

    /// Writes the figures that hosts read, if they are due.
    pub fn write_figures(&mut self) {
        let now = Instant::now();
        let interval = FIGURES_INTERVAL.max(self.figures_time * FIGURES_TIME_FACTOR);
        let is_due = |at: Instant| now.saturating_duration_since(at) >= interval;
        if !self.figures.is_none_or(|(_, at)| is_due(at)) {
            return;
        }
        let recalled = self.spans.recalled();
        let (first_recalled, recalled_bytes) =
            recalled.as_ref().map_or((0, 0), |recalled| (recalled.first_section, recalled.bytes));
        self.lending
            .set_recalled(recalled_bytes, recalled.map_or_else(Vec::new, |recalled| recalled.holders));
        let figures = NodeFigures {
            free_bytes: self.node_memory.free_bytes(),
            lent_bytes: self.node_memory.lent_bytes().saturating_sub(self.spans.held_bytes()),
            recalled_bytes,
            first_recalled,
        };
        if self.figures.is_none_or(|(last, _)| last != figures) {
            self.node_memory.write_figures(figures);
        }
        self.figures = Some((figures, now));
        self.figures_time = now.elapsed();
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
                match set_section_offline(&self.node_memory, &*self.target, section, client) {
                    Ok(is_offline) => remaining -= u64::from(is_offline),
                    Err(error) if error.is_damage() => continue,
                    Err(error) => return Err(error),
                }
            }
            blocker = ResizeBlocker::InUse;
        }
        Ok((remaining > 0).then_some(blocker))
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

/// Takes a section offline. Returns false if it is in use.
pub(crate) fn set_section_offline(
    node_memory: &NodeMemory,
    target: &dyn Target,
    section: u32,
    client: &mut SelfClient,
) -> Result<bool, SelfClientError> {
    client.change(section, |pool, node| {
        let Some(extent) = allocate_group(pool, node, section, AlignedRun::SECTION)? else {
            return Ok(false);
        };
        node_memory.revoke_keys(&extent);
        target.expel(extent.addr..extent.addr + extent.class.bytes());
        node_memory.release_pages(&extent)?;
        Ok(true)
    })
}
