//! A simulated host: other programs take memory and return it, runs grow and shrink, and the
//! governor lends what is idle. Seeded; each step is one look of the governor.

use aquifer_fabric::sim::Rng;
use aquifer_mutation::Mutations;
use aquifer_pager::{BLOCK_PAGES, Budget, LIMIT_BYTES_MIN, PAGE_BYTES};

use super::borrowing::{Activity, BorrowLimits, Borrower, Lender};
use super::mutation::Mutation;
use super::{CacheGovernor, default_keep_free};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes that other programs take in a step at most: 500 MB/s.
const OTHERS_GROWTH_MAX: u64 = 50 * MIB;
/// Bytes by which the page cache grows in a step at most, with the pages that several runs evict.
const CACHED_MAX: u64 = 40 * MIB;
/// Bytes by which all runs together grow in a step at most.
const GROWTH_MAX: u64 = 150 * MIB;
/// Bytes that all runs together evict in a step, as measured.
const EVICTED: u64 = 16 * MIB;
/// Free bytes below which the simulated kernel reports pressure.
const PRESSURE_BYTES: u64 = 256 * MIB;
/// Steps after the last change after which memory must be in use again.
const UNCHANGED_STEPS: u32 = 420;
const STEPS: u32 = 6_000;
const SCHEDULES: u64 = 60;

struct SimRun {
    owner: u32,
    activity: Activity,
    budget: Budget,
    /// Most bytes that the run may have beyond its limit.
    range: u64,
    /// Bytes that the program would like to have beyond its limit.
    demand: u64,
}

impl SimRun {
    fn new(rng: &mut Rng, total: u64) -> Self {
        let budget = Budget::new(LIMIT_BYTES_MIN);
        budget.add_held(pages(budget.guaranteed() * PAGE_BYTES as u64));
        let owner = u32::try_from(rng.below(3)).expect("small");
        Self { owner, activity: Activity::High, budget, range: total / 16 + rng.below(total), demand: 0 }
    }

    fn borrowed(&self) -> u64 {
        self.budget.borrowed() * PAGE_BYTES as u64
    }

    fn borrower(&self) -> Borrower {
        Borrower {
            owner: self.owner,
            range: self.range,
            borrowed: self.borrowed(),
            max: self.budget.borrowed_max() * PAGE_BYTES as u64,
            activity: self.activity,
        }
    }

    /// Frees and evicts pages, and touches more. Returns the number of bytes that it has touched.
    fn step(&self, evicted_max: u64, growth_max: u64) -> u64 {
        // Memory that a program frees is free at once.
        self.budget.add_held(-pages(self.borrowed().saturating_sub(self.demand)));
        let (mut to_evict, mut to_grow) = (evicted_max / PAGE_BYTES as u64, growth_max / PAGE_BYTES as u64);
        loop {
            let evicted = self.budget.surplus(0).min(to_evict).min(BLOCK_PAGES as u64);
            self.budget.add_held(-i64::try_from(evicted).expect("few"));
            self.budget.note_evicted(evicted);
            let demand = self.budget.guaranteed() + self.demand / PAGE_BYTES as u64;
            let more = self.budget.resident_max().min(demand).saturating_sub(self.budget.resident());
            let more = more.min(to_grow);
            self.budget.add_held(i64::try_from(more).expect("few"));
            (to_evict, to_grow) = (to_evict - evicted, to_grow - more);
            if evicted == 0 {
                return growth_max - to_grow * PAGE_BYTES as u64;
            }
        }
    }
}

fn pages(bytes: u64) -> i64 {
    i64::try_from(bytes / PAGE_BYTES as u64).expect("few")
}

struct SimHost {
    rng: Rng,
    total: u64,
    keep_free: u64,
    /// Bytes of the kernel and of the guaranteed part of runs.
    fixed: u64,
    /// Bytes that count as available although no program can use them.
    overstated: u64,
    /// Bytes of other programs, and the number to which they are growing.
    others: u64,
    others_goal: u64,
    mempool: u64,
    runs: Vec<SimRun>,
    governor: CacheGovernor,
    lender: Lender,
    unchanged: u32,
}

impl SimHost {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let total = GIB * (4 + rng.below(12));
        let keep_free = default_keep_free(total);
        let runs = (0..rng.below(6)).map(|_| SimRun::new(&mut rng, total)).collect();
        // Programs that take memory at once need what is kept free, so there are none where memory
        // is overstated.
        let overstated = if rng.chance(1, 3) { rng.below(2 * keep_free) } else { 0 };
        Self {
            total,
            keep_free,
            fixed: total / 8 + rng.below(total / 4),
            overstated,
            others: 0,
            others_goal: 0,
            mempool: 0,
            runs,
            governor: CacheGovernor::new(keep_free),
            lender: Lender::new(keep_free),
            unchanged: 0,
            rng,
        }
    }

    fn borrowed(&self) -> u64 {
        self.runs.iter().map(SimRun::borrowed).sum()
    }

    /// The memory that the kernel calls available; negative if it had to kill a program.
    fn available(&self) -> i64 {
        let used = self.fixed + self.others + self.mempool + self.borrowed();
        i64::try_from(self.total).expect("small") - i64::try_from(used).expect("small")
    }

    fn step(&mut self) -> Result<(), String> {
        self.change_plans();
        self.run_others();
        self.run_programs();
        let free = self.available() - i64::try_from(self.overstated).expect("small");
        if free < 0 {
            let bytes = [self.total, self.others, self.mempool, self.borrowed()];
            let [total, others, mempool, borrowed] = bytes.map(|bytes| bytes >> 20);
            return Err(format!(
                "{} of {total} MiB are missing: others have {others}, the mempool {mempool}, runs {borrowed}",
                -free >> 20,
            ));
        }
        self.govern(free.unsigned_abs() < PRESSURE_BYTES)?;
        self.check_unchanged()
    }

    fn change_plans(&mut self) {
        if self.rng.chance(1, 500) {
            // All that the others can have without a victim, less what is free at all times.
            let room = (self.total - self.fixed).saturating_sub(GIB / 8);
            self.others_goal = if self.rng.chance(1, 2) { 0 } else { self.rng.below(room) };
            if self.overstated > 0 {
                self.others_goal = 0;
            }
            self.unchanged = 0;
        }
        if self.rng.chance(1, 500) && !self.runs.is_empty() {
            let at = self.rng.index(self.runs.len());
            let run = &mut self.runs[at];
            run.demand = self.rng.below(2 * run.range);
            run.activity = [Activity::Idle, Activity::Low, Activity::High][self.rng.index(3)];
            self.unchanged = 0;
        }
    }

    fn run_others(&mut self) {
        if self.others > self.others_goal {
            self.others = self.others_goal;
        } else {
            self.others += OTHERS_GROWTH_MAX.min(self.others_goal - self.others);
        }
    }

    fn run_programs(&mut self) {
        let first = self.rng.index(self.runs.len());
        self.runs.rotate_left(first);
        let evicting = self.runs.iter().filter(|run| run.budget.surplus(0) > 0).count() as u64;
        let mut growth = GROWTH_MAX;
        for run in &self.runs {
            growth -= run.step(EVICTED / evicting.max(1), growth);
        }
    }

    fn govern(&mut self, has_pressure: bool) -> Result<(), String> {
        let available = self.available().unsigned_abs();
        let borrowers: Vec<_> = self.runs.iter().map(SimRun::borrower).collect();
        let limits = self.lender.lend(available + self.mempool, &borrowers);
        for (run, BorrowLimits { max, target }) in self.runs.iter().zip(limits) {
            run.budget.set_borrowed(max / PAGE_BYTES as u64, target / PAGE_BYTES as u64);
            if run.budget.excess() > 0 {
                return Err(format!("threads wait for {} pages", run.budget.excess()));
            }
        }
        let max = self.governor.mempool_max(self.mempool, available, has_pressure);
        // The cache shrinks at once, and grows with evictions.
        self.mempool = max.min(self.mempool + CACHED_MAX);
        Ok(())
    }

    /// Some time after the last change the cache has all that need not stay free, and each run has
    /// what it wants if there is enough for all.
    fn check_unchanged(&mut self) -> Result<(), String> {
        self.unchanged = if self.others == self.others_goal { self.unchanged + 1 } else { 0 };
        if self.unchanged < UNCHANGED_STEPS || self.overstated > 0 {
            return Ok(());
        }
        let unused = self.available().unsigned_abs().saturating_sub(self.keep_free);
        if unused > MIB {
            return Err(format!("{} MiB are unused", unused >> 20));
        }
        let wanted = |run: &SimRun| run.demand.min(run.range);
        let needed: u64 = self.runs.iter().map(|run| wanted(run) * 3 / 2 + GIB / 4).sum();
        if needed > (self.mempool + self.borrowed()) / 4 {
            return Ok(());
        }
        match self.runs.iter().find(|run| run.borrowed() + MIB < wanted(run)) {
            Some(run) => Err(format!("a run lacks {} MiB", (wanted(run) - run.borrowed()) >> 20)),
            None => Ok(()),
        }
    }
}

fn play(seed: u64) -> Result<(), String> {
    let mut host = SimHost::new(seed);
    (0..STEPS).try_for_each(|step| host.step().map_err(|error| format!("seed {seed}, step {step}: {error}")))
}

#[test]
fn no_program_lacks_memory_and_no_thread_waits() {
    (0..SCHEDULES).try_for_each(play).unwrap();
}

#[test]
fn every_mutation_of_the_governor_is_noticed() {
    let find = || (0..SCHEDULES).find_map(|seed| play(seed).err());
    for mutation in Mutation::ALL {
        assert!(mutation.while_active(find).is_some(), "{mutation:?} was not noticed");
    }
    let of_budget = aquifer_pager::Mutation::LetGrow;
    assert!(of_budget.while_active(find).is_some(), "{of_budget:?} was not noticed");
}
