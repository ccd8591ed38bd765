//! Looks from outside at how much of each program is resident, and finds the areas that are worth paging.
//!
//! Nothing is registered before a run comes near its limit: until then it runs at full speed. How often to look follows from how
//! soon the limit could be reached.

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::thread::Thread;
use std::time::{Duration, Instant};

use aquifer_pager::{Budget, PAGE_BYTES};

use super::PagingService;
use super::count::{MemoryUsage, ResidentCounter, shared_pages};
use super::observed::ObservedDuration;
use super::priority::{URGENT, set_niceness};
use super::program::{MonitorRequest, Program};
use super::run::Run;
use crate::areas::Areas;
use crate::maps;
use crate::monitor::SPARE_PAGES;

/// Areas are registered once half of the limit is resident...
const ARM_DIVISOR: u64 = 2;
/// ...or, under a small limit, while a program still needs as long to fill the rest as a late look may take...
const ARM_MARGIN_PAGES: u64 = (48 << 20) / PAGE_BYTES as u64;
/// ...but not before this part of it is.
const ARM_DIVISOR_MAX: u64 = 5;
/// Pages that a program can make resident in a millisecond, all cores together, without asking us.
const PAGES_PER_MS: u64 = 1500;
const TICK_MIN: Duration = Duration::from_millis(1);
const TICK_MAX: Duration = Duration::from_millis(50);
/// Shared pages are counted by a costlier look, which may take this share of the time between two; less and less, as long as what is shared
/// hardly changes: by less than this share of the limit.
const SHARED_REST: u32 = 4;
const SHARED_REST_MAX: u32 = 128;
const SHARED_CHANGE_DIVISOR: u64 = 64;
/// However costly a look is, the next is not later than this.
const SHARED_WAIT_MAX: Duration = Duration::from_millis(200);
/// A scan may take this share of the time between scans...
const SCAN_REST: u32 = 4;
/// ...once what is not controlled has grown by this...
const GROWTH_PAGES: u64 = 256;
/// ...and whatever it takes once it has grown by this: a scan that had to wait for the program's own lock would else let it fill all that is tolerated.
const GROWTH_URGENT_PAGES: u64 = TOLERANCE_PAGES / 4;
/// Room over the limit within which a run is left alone: 10 % and 16 MiB.
const TOLERANCE_PAGES: u64 = (16 << 20) / PAGE_BYTES as u64;
/// How long a run may stay over its limit, while we watch, with nothing left to take.
const TOO_SMALL_AFTER: Duration = Duration::from_secs(10);
/// How long evicted pages may wait, while we watch, for room in a full pool.
const FULL_AFTER: Duration = Duration::from_secs(5);

/// Start the thread. It ends with the service.
pub(crate) fn start(service: &Arc<PagingService>) -> std::io::Result<Thread> {
    let weak = Arc::downgrade(service);
    let thread = std::thread::Builder::new().name("sampler".into()).spawn(move || sample_all(&weak))?;
    Ok(thread.thread().clone())
}

/// What the sampler remembers of a program.
#[derive(Debug)]
struct SampledProgram {
    id: u64,
    size: u64,
    /// Resident and not controlled, the least since the last scan.
    uncontrolled: u64,
    is_armed: bool,
    next_scan: Instant,
    areas: Areas,
    counter: ResidentCounter,
}

impl SampledProgram {
    fn first(id: u64) -> Self {
        Self {
            id,
            size: 0,
            uncontrolled: 0,
            is_armed: false,
            next_scan: Instant::now(),
            areas: Areas::default(),
            counter: ResidentCounter::new(),
        }
    }

    /// Whether its areas are to be looked for now.
    fn wants_scan(&mut self, size: u64, uncontrolled: u64, now: Instant) -> bool {
        // What was found by the last scan comes under control by and by. It must not hide what has grown since.
        self.uncontrolled = self.uncontrolled.min(uncontrolled);
        let growth = uncontrolled - self.uncontrolled;
        let is_worth_it = !self.is_armed || self.size != size || growth > GROWTH_PAGES;
        is_worth_it && (now >= self.next_scan || growth > GROWTH_URGENT_PAGES)
    }

    /// A scan that has begun then has found these areas.
    fn scanned(&mut self, size: u64, uncontrolled: u64, began: Instant, areas: Areas) {
        self.areas = areas;
        self.is_armed = true;
        self.size = size;
        self.uncontrolled = uncontrolled;
        self.next_scan = Instant::now() + began.elapsed() * SCAN_REST;
    }
}

#[derive(Debug)]
struct SampledRun {
    run: Weak<Run>,
    programs: Vec<SampledProgram>,
    next: Instant,
    over: Option<OverLimit>,
    shortage_seen: Option<RoomShortage>,
    shared: SharedPages,
}

/// A run's pages wait for room in the pool.
#[derive(Debug)]
struct RoomShortage {
    /// Which of the times that the pool had no room: it may have had some between two looks.
    shortage: u64,
    duration: ObservedDuration,
}

/// A run is over its limit.
#[derive(Clone, Copy, Debug)]
struct OverLimit {
    duration: ObservedDuration,
    /// Pages that had been taken out of its programs by then.
    evictions: u64,
}

impl OverLimit {
    /// Whether that will not change: what cannot be taken is too much, or nothing was taken all the time.
    fn is_hopeless(self, evictions: u64, untakable: u64, max: u64) -> bool {
        untakable > max || evictions == self.evictions
    }
}

/// How much the resident sizes of relatives overlap, by the last costly look.
#[derive(Debug)]
struct SharedPages {
    overlap: u64,
    /// Pages granted until then: what was granted since is shared no longer.
    granted: u64,
    next: Instant,
    /// How many times as long as a look took it is until the next.
    rest: u32,
    /// How many programs there were at the last look, and the newest: one that was just forked shares all it has.
    programs: (usize, u64),
}

fn sample_all(service: &Weak<PagingService>) {
    set_niceness(URGENT);
    let mut watches: Vec<SampledRun> = Vec::new();
    while let Some(service) = service.upgrade() {
        for run in service.runs() {
            if !watches.iter().any(|watch| watch.run.as_ptr() == Arc::as_ptr(&run)) {
                watches.push(SampledRun {
                    run: Arc::downgrade(&run),
                    programs: Vec::new(),
                    next: Instant::now(),
                    over: None,
                    shortage_seen: None,
                    shared: SharedPages::new(),
                });
            }
        }
        watches.retain(|watch| watch.run.strong_count() > 0);
        let now = Instant::now();
        if service.has_new_programs.swap(false, Relaxed) {
            watches.iter_mut().for_each(|watch| watch.next = now);
        }
        drop(service);
        let mut next = now + TICK_MAX;
        for watch in &mut watches {
            if watch.next <= now
                && let Some(run) = watch.run.upgrade()
            {
                watch.next = Instant::now() + watch.sample(&run);
            }
            next = next.min(watch.next);
        }
        std::thread::park_timeout(next.saturating_duration_since(Instant::now()).max(TICK_MIN));
    }
}

impl SampledRun {
    /// Look at one run; returns when to look again.
    fn sample(&mut self, run: &Run) -> Duration {
        let programs = run.programs();
        self.programs.retain(|seen| programs.iter().any(|program| program.id == seen.id));
        let mut total = 0;
        let mut held = 0;
        let mut usages = Vec::with_capacity(programs.len());
        for program in &programs {
            let Some(usage) = self.seen(program.id).counter.usage(program) else { continue };
            total += usage.counted;
            held += program.held.load(Relaxed);
            usages.push((program, usage));
        }
        total = total.saturating_sub(self.shared.overlap(&usages, total, &run.budget));
        run.budget.set_sample(total.saturating_sub(held), total);
        let max = run.budget.resident_max();
        let arm_at = (max / ARM_DIVISOR).min(max.saturating_sub(ARM_MARGIN_PAGES)).max(max / ARM_DIVISOR_MAX);
        for (program, usage) in &usages {
            self.scan_if_needed(program, usage, total > arm_at);
        }
        // Also when it is over no longer: faults that waited for room would wait on. And who sleeps on more than its share must give
        // some of it to those who work, for they have no more than what they take from themselves. And all give up copies while the pool is short, and move
        // pages while slabs are to become empty.
        let (is_over, is_near) = (run.budget.excess(0) > 0, run.budget.excess(SPARE_PAGES) > 0);
        let is_short = run.service.upgrade().is_some_and(|service| service.mempool.is_pool_short());
        let is_vacating = run.slabs.vacating_round().is_some();
        let share = max / (programs.len() as u64).max(1);
        programs
            .iter()
            .filter(|program| {
                is_over
                    || is_short
                    || is_vacating
                    || program.has_pending_faults.load(SeqCst)
                    || is_near && program.held.load(Relaxed) > share
            })
            .for_each(|program| program.signal());
        self.enforce_limit(run, &programs, total, held);
        Duration::from_millis(arm_at.saturating_sub(total) / PAGES_PER_MS).clamp(TICK_MIN, TICK_MAX)
    }

    fn seen(&mut self, id: u64) -> &mut SampledProgram {
        let at = self.programs.iter().position(|seen| seen.id == id).unwrap_or_else(|| {
            self.programs.push(SampledProgram::first(id));
            self.programs.len() - 1
        });
        &mut self.programs[at]
    }

    fn scan_if_needed(&mut self, program: &Arc<Program>, usage: &MemoryUsage, is_near: bool) {
        let began = Instant::now();
        let uncontrolled = usage.counted.saturating_sub(program.held.load(Relaxed));
        let seen = self.seen(program.id);
        if !is_near || !seen.wants_scan(usage.size, uncontrolled, began) || !program.is_attached.load(SeqCst)
        {
            return;
        }
        let Some(text) = program.read_proc("maps") else {
            return;
        };
        let found = maps::pageable_areas(&text, &program.bounds());
        let mut areas = Areas::default();
        for area in &found {
            seen.areas.missing(*area).into_iter().for_each(|new| program.register_early(new));
            areas.insert(*area);
        }
        program.request(MonitorRequest::Areas(found));
        seen.scanned(usage.size, uncontrolled, began, areas);
    }

    /// Why the pool has no room for the run's pages, when it has had none for too long.
    fn lasting_room_shortage(&mut self, run: &Run) -> Option<String> {
        let Some((shortage, reason)) = run.sender.room_shortage() else {
            self.shortage_seen = None;
            return None;
        };
        let now = Instant::now();
        self.shortage_seen.take_if(|shortage_seen| shortage_seen.shortage != shortage);
        let shortage_seen = self
            .shortage_seen
            .get_or_insert_with(|| RoomShortage { shortage, duration: ObservedDuration::begin(now) });
        (shortage_seen.duration.observe(now) > FULL_AFTER).then_some(reason)
    }

    /// End a run that cannot be kept within its limit, before it takes the host's memory.
    fn enforce_limit(&mut self, run: &Run, programs: &[Arc<Program>], total: u64, held: u64) {
        let max = run.budget.resident_max();
        let page = PAGE_BYTES as u64;
        if let Some(reason) = self.lasting_room_shortage(run)
            && run.budget.excess(0) > 0
        {
            run.end(&format!(
                "{reason}. Give the pool more memory (aquifer up --memory), or the program a larger --local"
            ));
        }
        let is_over = total > max + max / 10 + TOLERANCE_PAGES;
        if !is_over {
            self.over = None;
            return;
        }
        let evictions = programs.iter().map(|program| program.stats.evictions.load(Relaxed)).sum();
        let now = Instant::now();
        let over =
            self.over.get_or_insert_with(|| OverLimit { duration: ObservedDuration::begin(now), evictions });
        if over.duration.observe(now) <= TOO_SMALL_AFTER {
            return;
        }
        let over = *over;
        self.over = None;
        if over.is_hopeless(evictions, total.saturating_sub(held), max) {
            let kept_mb = (total * page) >> 20;
            let wanted_mb = kept_mb * 5 / 4 + 8;
            let what = format!(
                "it keeps {kept_mb} MiB resident that cannot be paged (stacks, locked, read-only or small areas), more than its limit allows"
            );
            if run.is_limit_changed() {
                tracing::warn!(run = ?run.token(), "{what}");
            } else {
                run.end(&format!("{what}: give at least --local {wanted_mb}M"));
            }
        }
    }
}

impl SharedPages {
    fn new() -> Self {
        Self { overlap: 0, granted: 0, next: Instant::now(), rest: SHARED_REST, programs: (0, 0) }
    }

    /// Pages that are in `total`, the sum over all programs, more than once: those that relatives share since a fork.
    fn overlap(&mut self, programs: &[(&Arc<Program>, MemoryUsage)], total: u64, budget: &Budget) -> u64 {
        let granted = budget.granted();
        let newest = programs.iter().map(|(program, _)| program.id).max().unwrap_or(0);
        let are_others = (programs.len(), newest) != self.programs;
        if !programs.iter().any(|(program, _)| program.is_forked.load(Relaxed)) {
            self.overlap = 0;
        } else if Instant::now() >= self.next || are_others {
            let start = Instant::now();
            let shares: Option<u64> = programs.iter().map(|(program, _)| shared_pages(program)).sum();
            let overlap = shares.map_or(0, |shares| total.saturating_sub(shares));
            let is_steady =
                !are_others && overlap.abs_diff(self.overlap) < budget.resident_max() / SHARED_CHANGE_DIVISOR;
            self.rest = if is_steady { (self.rest * 2).min(SHARED_REST_MAX) } else { SHARED_REST };
            self.overlap = overlap;
            self.granted = granted;
            self.next = Instant::now() + (start.elapsed() * self.rest).min(SHARED_WAIT_MAX);
        }
        self.programs = (programs.len(), newest);
        self.overlap.saturating_sub(granted - self.granted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_fast_is_looked_for_whatever_the_last_scan_took() {
        let mut seen = SampledProgram::first(1);
        let now = Instant::now();
        assert!(seen.wants_scan(1000, 0, now), "the first");
        seen.scanned(1000, 600, now, Areas::default());
        seen.next_scan = now + Duration::from_secs(60);
        assert!(!seen.wants_scan(1000, 700, now), "nothing much has changed");
        assert!(!seen.wants_scan(2000, 700, now), "a larger program with a few pages more can wait");
        assert!(!seen.wants_scan(1000, 0, now), "what the scan found has come under control");
        assert!(!seen.wants_scan(1000, GROWTH_URGENT_PAGES, now));
        assert!(
            seen.wants_scan(1000, GROWTH_URGENT_PAGES + 1, now),
            "a quarter of what is tolerated, since then"
        );
        seen.next_scan = now;
        assert!(!seen.wants_scan(1000, GROWTH_PAGES, now));
        assert!(seen.wants_scan(1000, GROWTH_PAGES + 1, now));
        assert!(seen.wants_scan(2000, 0, now));
    }

    #[test]
    fn a_run_that_still_gives_pages_away_is_only_slow() {
        let over = OverLimit { duration: ObservedDuration::begin(Instant::now()), evictions: 100 };
        assert!(!over.is_hopeless(101, 900, 1000));
        assert!(over.is_hopeless(100, 900, 1000), "nothing leaves");
        assert!(over.is_hopeless(5000, 1001, 1000), "what cannot leave is too much");
    }
}
