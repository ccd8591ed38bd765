//! The sampler: measures the resident size of each program, and finds areas to register.
//!
//! No area is registered before a run approaches its limit, so that the run is not slowed down
//! until then. The time to the next sample is at most the time in which the run could reach its
//! limit.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use aquifer_pager::PAGE_BYTES;

use super::MORE_MEMORY_ADVICE;
use super::PagingService;
use super::count::{MemoryUsage, ResidentCounter};
use super::excess::{self, DueStep, OverLimit};
use super::observed::ObservedDuration;
use super::priority::{URGENT, set_niceness};
use super::program::{MonitorRequest, Program};
use super::resident_estimator::ResidentEstimator;
use super::run::{NO_BLOCK, Run, average_held};
use crate::areas::Area;
use crate::maps::{self, KeptPages};
use crate::monitor::SPARE_PAGES;

/// Areas of a run are registered when 1/`REGISTER_DIVISOR` of its limit is resident.
const REGISTER_DIVISOR: u64 = 2;
/// Number of pages that a program can fill while a sample is late. If this is more than half of the
/// limit, areas are registered this far below the limit.
const LATE_SAMPLE_PAGES: u64 = (48 << 20) / PAGE_BYTES as u64;
/// Areas of a run are never registered before 1/`REGISTER_DIVISOR_MAX` of its limit is resident.
const REGISTER_DIVISOR_MAX: u64 = 5;
/// Number of pages that a program can make resident in a millisecond with all cores, without a
/// fault.
const PAGES_PER_MS: u64 = 1500;
/// Minimum time to the next sample.
const INTERVAL_MIN: Duration = Duration::from_millis(1);
/// Maximum time to the next sample.
const INTERVAL_MAX: Duration = Duration::from_millis(50);
/// Number of consecutive samples without a change after which a run counts as idle.
const IDLE_SAMPLES: u32 = 250;
/// Minimum time to the next sample of an idle run. It bounds the memory that a program can fill
/// meanwhile.
const IDLE_INTERVAL: Duration = Duration::from_millis(4);
/// Time to the next sample of a run without a program.
const EMPTY_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two scans of the maps, as a multiple of the duration of a scan.
const SCAN_INTERVAL_FACTOR: u32 = 4;
/// Growth in uncontrolled pages that makes a scan worthwhile.
const GROWTH_PAGES: u64 = 256;
/// Growth in uncontrolled pages that makes a scan due at once. A scan can wait for the program's
/// own lock and so take long; without this, the program could fill the whole tolerance meanwhile.
const GROWTH_URGENT_PAGES: u64 = TOLERANCE_PAGES / 4;
/// Number of pages over the limit that are tolerated, in addition to a tenth of the limit.
const TOLERANCE_PAGES: u64 = (16 << 20) / PAGE_BYTES as u64;
/// Duration of scans after which the run is counted again: it may have grown while they waited for
/// the program.
const SLOW_SCAN: Duration = Duration::from_millis(10);
/// Observed time after which the owner of a run is notified that faults wait for room in the pool.
const SHORTAGE_AFTER: Duration = Duration::from_secs(1);
/// Minimum time between two notices of a shortage to the owner of a run.
const SHORTAGE_INTERVAL: Duration = Duration::from_secs(60);

/// Advice if the mempool has no free block.
const MORE_MEMPOOL_ADVICE: &str =
    "wait until other runs have ended, or give the agent a larger mempool (aquifer up --mempool)";

/// Wakes the sampler of a run's tenant for a new program, which may reach its limit before the next
/// sample.
///
/// # Errors
/// If the tenant has no sampler, and none can be started.
pub(crate) fn announce_program(service: &Arc<PagingService>, run: &Run) -> std::io::Result<()> {
    run.has_new_programs.store(true, Relaxed);
    let (weak, tenant) = (Arc::downgrade(service), run.tenant());
    service.samplers.wake(tenant, move || sample_all(&weak, tenant))
}

/// The samples and scans of one program.
#[derive(Debug)]
struct SampledProgram {
    id: u64,
    /// Size of the address space at the last scan, in pages.
    size: u64,
    /// Minimum number of resident pages outside of the monitor's control since the last scan.
    uncontrolled: u64,
    /// Whether the maps were scanned at least once.
    is_scanned: bool,
    next_scan: Instant,
    /// The areas that the last scan found.
    areas: Vec<Area>,
    counter: ResidentCounter,
}

impl SampledProgram {
    fn first(id: u64) -> Self {
        Self {
            id,
            size: 0,
            uncontrolled: 0,
            is_scanned: false,
            next_scan: Instant::now(),
            areas: Vec::new(),
            counter: ResidentCounter::new(),
        }
    }

    /// Whether the maps must be scanned for new areas now.
    fn wants_scan(&mut self, size: u64, uncontrolled: u64, now: Instant) -> bool {
        // The areas of the last scan are adopted over several turns, so `uncontrolled` falls. Later
        // growth must be noticed at once.
        self.uncontrolled = self.uncontrolled.min(uncontrolled);
        let growth = uncontrolled - self.uncontrolled;
        let is_worth_it = !self.is_scanned || self.size != size || growth > GROWTH_PAGES;
        is_worth_it && (now >= self.next_scan || growth > GROWTH_URGENT_PAGES)
    }

    /// Records a scan that began at `began` and has found `areas`.
    fn scanned(&mut self, size: u64, uncontrolled: u64, began: Instant, areas: Vec<Area>) {
        self.areas = areas;
        self.is_scanned = true;
        self.size = size;
        self.uncontrolled = uncontrolled;
        self.next_scan = Instant::now() + began.elapsed() * SCAN_INTERVAL_FACTOR;
    }
}

/// The samples of one run.
#[derive(Debug)]
struct SampledRun {
    run: Weak<Run>,
    programs: Vec<SampledProgram>,
    next_sample: Instant,
    over_limit: Option<OverLimit>,
    /// Whether the owner was notified that the run is over its limit.
    is_excess_notified: bool,
    room_shortage: Option<RoomShortage>,
    /// Whether the owner was notified that pages are on a disk.
    is_disk_notified: bool,
    /// The time of the last notice of a shortage to the owner.
    shortage_notified: Option<Instant>,
    /// The time for which a program of the run has waited for a block of the mempool.
    mempool_wait: Option<ObservedDuration>,
    /// The time of the last notice of a wait for the mempool to the owner.
    mempool_wait_notified: Option<Instant>,
    estimator: ResidentEstimator,
    idle: IdleDetector,
}

/// Detects that a run is idle: its counts have not changed for [`IDLE_SAMPLES`] samples.
#[derive(Debug, Default)]
struct IdleDetector {
    /// Resident pages, held pages, and evictions at the last sample.
    last: [u64; 3],
    /// Number of consecutive samples without a change.
    samples: u32,
}

impl IdleDetector {
    /// Records a sample, and returns the time to the next one: `wanted`, or longer if the run is
    /// idle.
    fn next_sample(&mut self, counts: [u64; 3], has_pending_faults: bool, wanted: Duration) -> Duration {
        if counts == self.last && !has_pending_faults {
            self.samples = self.samples.saturating_add(1);
        } else {
            *self = Self { last: counts, samples: 0 };
        }
        if self.samples > IDLE_SAMPLES { wanted.max(IDLE_INTERVAL) } else { wanted }
    }
}

/// A time during which the pool has no room for evicted pages of a run.
#[derive(Debug)]
struct RoomShortage {
    /// Number of the shortage: between two samples one may have ended and another begun.
    shortage: u64,
    duration: ObservedDuration,
    /// Whether the owner was notified.
    is_notified: bool,
}

/// The loop of a tenant's thread, which ends when the tenant has no program.
fn sample_all(service: &Weak<PagingService>, tenant: u32) {
    set_niceness(URGENT);
    let mut sampled_runs: HashMap<u64, SampledRun> = HashMap::new();
    while let Some(service) = service.upgrade() {
        let runs = service.runs_of(tenant);
        let is_idle = || service.runs_of(tenant).iter().all(|run| run.programs().is_empty());
        if runs.iter().all(|run| run.programs().is_empty()) && service.samplers.ends(tenant, is_idle) {
            return;
        }
        for run in runs {
            sampled_runs.entry(run.id()).or_insert_with(|| SampledRun::new(&run));
        }
        sampled_runs.retain(|_, sampled| sampled.run.strong_count() > 0);
        drop(service);
        let now = Instant::now();
        let mut next = now + INTERVAL_MAX;
        for sampled in sampled_runs.values_mut() {
            if let Some(run) = sampled.run.upgrade()
                && (run.has_new_programs.swap(false, Relaxed) || sampled.next_sample <= now)
            {
                sampled.next_sample = Instant::now() + sampled.sample(&run);
            }
            next = next.min(sampled.next_sample);
        }
        std::thread::park_timeout(next.saturating_duration_since(Instant::now()).max(INTERVAL_MIN));
    }
}

impl SampledRun {
    fn new(run: &Arc<Run>) -> Self {
        Self {
            run: Arc::downgrade(run),
            programs: Vec::new(),
            next_sample: Instant::now(),
            over_limit: None,
            is_excess_notified: false,
            room_shortage: None,
            is_disk_notified: false,
            shortage_notified: None,
            mempool_wait: None,
            mempool_wait_notified: None,
            estimator: ResidentEstimator::new(),
            idle: IdleDetector::default(),
        }
    }

    /// Samples one run. Returns the time to the next sample.
    fn sample(&mut self, run: &Run) -> Duration {
        let programs = run.programs();
        if programs.is_empty() {
            // `announce_program` wakes this thread for a new program.
            self.programs.clear();
            return EMPTY_INTERVAL;
        }
        programs.iter().for_each(|program| program.interrupt_if_ended());
        self.programs.retain(|seen| programs.iter().any(|program| program.id == seen.id));
        let (usages, mut total, mut held) = self.count(run, &programs);
        let max = run.budget.resident_target();
        let register_at = (max / REGISTER_DIVISOR)
            .min(max.saturating_sub(LATE_SAMPLE_PAGES))
            .max(max / REGISTER_DIVISOR_MAX);
        let began = Instant::now();
        for (program, usage) in &usages {
            self.scan_if_needed(program, usage, total > register_at);
        }
        if began.elapsed() > SLOW_SCAN {
            (_, total, held) = self.count(run, &programs);
        }
        // Monitors are woken for work that no message reports:
        // - Faults wait for room, and the run is below its limit again.
        // - The run is near its limit, and a program holds more than the others, which could
        //   otherwise only evict their own pages.
        // - The pool is short for the run's user, so the programs of this user release their clean
        //   copies.
        // - Slabs of the run are to be emptied, so its programs move pages.
        let (is_over, is_near) = (run.budget.excess() > 0, run.budget.surplus(SPARE_PAGES) > 0);
        let is_short = run.budget.mempool_user().is_pool_short();
        let is_vacating = run.slabs.vacating_round().is_some();
        let average = average_held(&programs);
        programs
            .iter()
            .filter(|program| {
                is_short
                    || is_vacating
                    || !is_over && program.has_pending_faults.load(SeqCst)
                    || is_near && program.held.load(Relaxed) >= average
            })
            .for_each(|program| program.signal());
        self.enforce_limit(run, &programs, total, held);
        let wanted = Duration::from_millis(register_at.saturating_sub(total) / PAGES_PER_MS)
            .clamp(INTERVAL_MIN, INTERVAL_MAX);
        let evictions = programs.iter().map(|program| program.stats.evictions.load(Relaxed)).sum();
        let has_pending_faults = programs.iter().any(|program| program.has_pending_faults.load(SeqCst));
        self.idle.next_sample([total, held, evictions], has_pending_faults, wanted)
    }

    /// Counts the resident pages of a run. Returns the memory of each program, the resident pages
    /// of the run, and the number of those that its monitors control.
    fn count<'a>(
        &mut self,
        run: &Run,
        programs: &'a [Arc<Program>],
    ) -> (Vec<(&'a Arc<Program>, MemoryUsage)>, u64, u64) {
        let mut held = 0;
        let mut usages = Vec::with_capacity(programs.len());
        for program in programs {
            let Some(usage) = self.sampled_program(program.id).counter.usage(program) else { continue };
            held += program.held.load(Relaxed);
            usages.push((program, usage));
        }
        let total = self.estimator.resident(&usages, &run.budget);
        run.budget.set_sample(total.saturating_sub(held), total);
        (usages, total, held)
    }

    /// Returns the entry of a program, and makes it if the program was not sampled before.
    fn sampled_program(&mut self, id: u64) -> &mut SampledProgram {
        let at = self.programs.iter().position(|seen| seen.id == id).unwrap_or_else(|| {
            self.programs.push(SampledProgram::first(id));
            self.programs.len() - 1
        });
        &mut self.programs[at]
    }

    /// Scans the maps of a program for new areas, if a scan is due and the run is near its limit.
    fn scan_if_needed(&mut self, program: &Arc<Program>, usage: &MemoryUsage, is_near: bool) {
        let began = Instant::now();
        let uncontrolled = usage.counted.saturating_sub(program.held.load(Relaxed));
        let seen = self.sampled_program(program.id);
        let is_ready = program.is_attached.load(SeqCst) && program.has_mapped_control();
        if !is_near || !seen.wants_scan(usage.size, uncontrolled, began) || !is_ready {
            return;
        }
        let Some(text) = program.process().and_then(|process| process.read_maps().ok()) else {
            return;
        };
        let bounds = program.bounds();
        let found = maps::pageable_areas(&text, &bounds, &program.pins());
        for (area, room) in found.iter().zip(maps::room_to_grow(&text, &found, &bounds)) {
            // The whole area is registered, because the part that the last scan found may have been
            // unmapped and mapped anew.
            if seen.areas.binary_search(area).is_err() {
                program.register_early(*area, room);
            }
        }
        program.request(MonitorRequest::Areas(found.clone()));
        seen.scanned(usage.size, uncontrolled, began, found);
    }

    /// Notifies the owner of a run that its faults wait for room in the pool, and ends the run if
    /// that lasts longer than the owner wants to wait.
    fn check_room(&mut self, run: &Run) {
        let now = Instant::now();
        let shortage = run.sender.room_shortage();
        let number = shortage.as_ref().map(|(number, _)| *number);
        if let Some(ended) = self.room_shortage.take_if(|known| Some(known.shortage) != number)
            && ended.is_notified
        {
            run.notify_owner("the pool has room again, and the program continues");
        }
        let Some((number, reason)) = shortage else { return };
        let known = self.room_shortage.get_or_insert_with(|| RoomShortage {
            shortage: number,
            duration: ObservedDuration::begin(now),
            is_notified: false,
        });
        let waited = known.duration.observe(now);
        if run.budget.excess() == 0 {
            return;
        }
        let wait = run.wait_for_room();
        if waited > wait {
            run.end(&format!(
                "{reason}, and it has waited for room for {}. Run it with a larger --local or \
                 --wait-for-room, {MORE_MEMORY_ADVICE}",
                show_time(wait)
            ));
        } else if waited > SHORTAGE_AFTER
            && !known.is_notified
            && self.shortage_notified.is_none_or(|last| now.duration_since(last) > SHORTAGE_INTERVAL)
        {
            known.is_notified = true;
            self.shortage_notified = Some(now);
            run.notify_owner(&format!(
                "{reason}. The program waits for room for up to {} (--wait-for-room): \
                 {MORE_MEMORY_ADVICE}",
                show_time(wait)
            ));
        }
    }

    /// Notifies the owner of a run once that pages of it go to a disk, because memory nodes have no
    /// room.
    fn check_disk(&mut self, run: &Run) {
        if !self.is_disk_notified && run.sender.stats().displaced_slabs > 0 {
            self.is_disk_notified = true;
            run.notify_owner(&format!(
                "the memory nodes have no room for all pages of the program, so some are on a disk, which \
                 is slower (--backup never: wait instead): {MORE_MEMORY_ADVICE}"
            ));
        }
    }

    /// Notifies the owner of a run that pages of it wait for a block of the mempool.
    fn check_mempool(&mut self, run: &Run, programs: &[Arc<Program>]) {
        let now = Instant::now();
        if !programs.iter().any(|program| program.waits_in_mempool.load(Relaxed)) {
            self.mempool_wait = None;
            run.set_waits_in_mempool(false);
            return;
        }
        let waited = self.mempool_wait.get_or_insert_with(|| ObservedDuration::begin(now)).observe(now);
        if waited > SHORTAGE_AFTER
            && !run.set_waits_in_mempool(true)
            && self.mempool_wait_notified.is_none_or(|last| now.duration_since(last) > SHORTAGE_INTERVAL)
        {
            self.mempool_wait_notified = Some(now);
            run.notify_owner(&format!(
                "{NO_BLOCK}. The program waits until one is written to a memory node: \
                 {MORE_MEMPOOL_ADVICE}"
            ));
        }
    }

    /// Notifies the owner of a run that is over its limit, and ends a run that will stay over its
    /// limit, before it uses the host's memory.
    fn enforce_limit(&mut self, run: &Run, programs: &[Arc<Program>], total: u64, held: u64) {
        let max = run.budget.resident_max();
        self.check_room(run);
        self.check_disk(run);
        self.check_mempool(run, programs);
        let is_over = total > max + max / 10 + TOLERANCE_PAGES;
        if !is_over {
            self.over_limit = None;
            return;
        }
        let evictions = programs.iter().map(|program| program.stats.evictions.load(Relaxed)).sum();
        let now = Instant::now();
        let over = self.over_limit.get_or_insert_with(|| OverLimit::begin(now, evictions));
        match over.observe(now, total, max) {
            DueStep::Nothing => {}
            DueStep::Notify => {
                // No notice is needed for a run whose limit was lowered, which is over it for a
                // while, nor for a run that waits for the mempool, which has a notice of its own.
                if !run.is_limit_changed()
                    && self.mempool_wait.is_none()
                    && !std::mem::replace(&mut self.is_excess_notified, true)
                {
                    run.notify_owner(&excess::notice(total, max, &excess::kept_pages(programs)));
                }
            }
            DueStep::Decide => {
                let over = *over;
                self.over_limit = None;
                let kept = excess::kept_pages(programs);
                let unevictable = total.saturating_sub(held).max(kept.lasting());
                if over.will_stay(evictions, unevictable, max) {
                    // The mempool is the reason only if the unevictable pages fit into the limit.
                    let waits_in_mempool = self.mempool_wait.is_some() && unevictable <= max;
                    end_over_limit(run, total, &kept, waits_in_mempool);
                }
            }
        }
    }
}

/// Ends a run that stays over its limit with `total` resident pages. `kept`: those that cannot be
/// evicted, by reason.
fn end_over_limit(run: &Run, total: u64, kept: &KeptPages, waits_in_mempool: bool) {
    let kept_mb = (total * PAGE_BYTES as u64) >> 20;
    let wanted_mb = kept_mb * 5 / 4 + 8;
    if run.is_limit_changed() {
        tracing::warn!(
            run = run.id(),
            kept_mb,
            "resident memory that cannot be paged exceeds the changed limit"
        );
        return;
    }
    if waits_in_mempool {
        return run.end(&format!(
            "it keeps {kept_mb} MiB resident, more than its limit allows, because {NO_BLOCK}: \
             {MORE_MEMPOOL_ADVICE}"
        ));
    }
    let reasons = excess::show_kept(kept).unwrap_or_else(|| "held by devices or io_uring".to_owned());
    run.end(&format!(
        "it keeps {kept_mb} MiB resident that cannot be paged ({reasons}), more than its limit allows: \
         give at least --local {wanted_mb}M"
    ));
}

/// Formats a duration in ms, seconds, or whole minutes.
fn show_time(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds if seconds.is_multiple_of(60) => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_growth_makes_a_scan_due_at_once() {
        let mut seen = SampledProgram::first(1);
        let now = Instant::now();
        assert!(seen.wants_scan(1000, 0, now), "the first");
        seen.scanned(1000, 600, now, Vec::new());
        seen.next_scan = now + Duration::from_secs(60);
        assert!(!seen.wants_scan(1000, 700, now), "few pages more");
        assert!(!seen.wants_scan(2000, 700, now), "a larger program with a few pages more can wait");
        assert!(!seen.wants_scan(1000, 0, now), "the areas of the scan are adopted");
        assert!(!seen.wants_scan(1000, GROWTH_URGENT_PAGES, now));
        assert!(
            seen.wants_scan(1000, GROWTH_URGENT_PAGES + 1, now),
            "a quarter of the tolerance since the scan"
        );
        seen.next_scan = now;
        assert!(!seen.wants_scan(1000, GROWTH_PAGES, now));
        assert!(seen.wants_scan(1000, GROWTH_PAGES + 1, now));
        assert!(seen.wants_scan(2000, 0, now));
    }
}
