//! A cluster in virtual time, whose jobs keep half of their peak memory local and swap the rest to
//! the pool.

use aquifer_bench::support::bytes::float;
use aquifer_bench::support::random::Random;
use aquifer_pool::SizeClass;
use aquifer_pool::size::SECTION_CHUNKS;

use super::jobs::{Job, Mix};
use super::pool::{Extent, SimulatedPool};

/// Number of hosts.
pub const HOSTS: usize = 8;
/// Pages of a host: 2 GiB.
pub const HOST_PAGES: u64 = 524_288;
/// Step of the virtual time.
const TICK_S: u64 = 5;
/// Time until the cluster is full.
pub const WARM_S: u64 = 3600;
/// Sections of a block of static memory: 16 MiB.
const BLOCK_SECTIONS: u64 = 8;
/// Most pages of a batch, as in the pager.
const BATCH_PAGES: u64 = 64;
/// Percentage of the pool that is not used to start jobs.
const RESERVE_PERCENT: u64 = 10;
/// Least number of ended jobs whose mean need is used.
const KNOWN_MIN: u64 = 20;

/// Allocation policy of remote memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// A job allocates its maximum at its start.
    Static,
    /// A job allocates at eviction, and frees memory with its pages.
    Dynamic,
}

/// Parameters of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Allocation policy.
    pub policy: Policy,
    /// Mix of jobs.
    pub mix: Mix,
    /// Sections that all nodes lend.
    pub sections: u32,
    /// Simulated time after the cluster is full, in seconds.
    pub time_s: u64,
}

/// The state of the cluster at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ClusterSample {
    /// Virtual time in seconds.
    pub at_s: u64,
    /// Pages that are in use.
    pub used: u64,
    /// Pages that are allocated.
    pub held: u64,
    /// Running jobs.
    pub jobs: u64,
}

/// Results of a simulation.
#[derive(Clone, Debug, Default)]
pub struct PackingResult {
    /// Samples since the cluster was full.
    pub samples: Vec<ClusterSample>,
    /// Pages of the pool.
    pub donated: u64,
    /// Jobs that ended since the cluster was full, and all started jobs.
    pub ended: u64,
    pub jobs_in_all: u64,
    /// Total time of jobs, and the part in which they waited for memory, in seconds.
    pub job_s: u64,
    pub stalled_s: u64,
    /// Allocations, and operations for allocations and frees, from the start.
    pub taken: u64,
    pub trips: u64,
    /// Mean need of the ended jobs ÷ their maximum.
    pub mean_to_max: f64,
}

#[derive(Debug)]
struct Running {
    job: Job,
    host: usize,
    ran_s: u64,
    extents: Vec<Extent>,
    held: u64,
}

/// Simulates a cluster.
///
/// # Errors
/// A message if an allocator fails, or memory is not free after all jobs have freed theirs.
pub fn play(setting: &Setting, seed: u64) -> Result<PackingResult, String> {
    let mut cluster = SimulatedCluster::new(*setting, seed);
    let mut now_s = 0;
    while now_s < WARM_S + setting.time_s {
        cluster.start_jobs()?;
        cluster.run_jobs(now_s)?;
        now_s += TICK_S;
        if now_s > WARM_S {
            cluster.sample(now_s);
        }
    }
    cluster.close()
}

#[derive(Debug)]
struct SimulatedCluster {
    setting: Setting,
    pool: SimulatedPool,
    local_free: [u64; HOSTS],
    /// Running jobs, the oldest first.
    running: Vec<Running>,
    random: Random,
    /// The next job to start.
    next: Job,
    /// Number of ended jobs, and the sum of their mean needs ÷ maximum.
    known: u64,
    mean_to_max: f64,
    outcome: PackingResult,
}

impl SimulatedCluster {
    fn new(setting: Setting, seed: u64) -> Self {
        let mut random = Random::new(seed + 1);
        let next = Job::draw(setting.mix, &mut random);
        Self {
            setting,
            pool: SimulatedPool::new(setting.sections, HOSTS),
            local_free: [HOST_PAGES; HOSTS],
            running: Vec::new(),
            random,
            next,
            known: 0,
            mean_to_max: 0.0,
            outcome: PackingResult::default(),
        }
    }

    /// Starts jobs in their order, until one does not fit.
    fn start_jobs(&mut self) -> Result<(), String> {
        loop {
            let job = self.next;
            let host = (0..HOSTS).max_by_key(|host| self.local_free[*host]).unwrap_or(0);
            if self.local_free[host] < job.local_pages() || !self.admits(&job) {
                return Ok(());
            }
            let mut running = Running { job, host, ran_s: 0, extents: Vec::new(), held: 0 };
            if self.setting.policy == Policy::Static && !self.premap(&mut running)? {
                return Ok(());
            }
            self.local_free[host] -= job.local_pages();
            self.running.push(running);
            self.outcome.jobs_in_all += 1;
            self.next = Job::draw(self.setting.mix, &mut self.random);
        }
    }

    fn admits(&self, job: &Job) -> bool {
        if self.setting.policy == Policy::Static {
            return blocks_of(job) * BLOCK_SECTIONS * u64::from(SECTION_CHUNKS) <= self.pool.free_pages();
        }
        let part = if self.known < KNOWN_MIN { 1.0 } else { self.mean_to_max / float(self.known) };
        let expected = |job: &Job| super::jobs::whole(part * float(job.remote_pages_max()));
        let those: u64 = self.running.iter().map(|running| expected(&running.job)).sum();
        let held = self.pool.pages() - self.pool.free_pages();
        let room = self.pool.pages() / 100 * (100 - RESERVE_PERCENT);
        let new = Claim { held: 0, max: job.remote_pages_max() };
        those.max(held) + expected(job) <= room && is_safe(self.pool.free_pages(), self.claims().chain([new]))
    }

    fn claims(&self) -> impl Iterator<Item = Claim> {
        let claim = |running: &Running| Claim {
            held: running.held,
            max: running.job.remote_pages_max().max(running.held),
        };
        self.running.iter().map(claim)
    }

    /// Allocates the maximum of a job; returns false, without an allocation, if it does not fit.
    fn premap(&mut self, running: &mut Running) -> Result<bool, String> {
        for _ in 0..blocks_of(&running.job) * BLOCK_SECTIONS {
            let Some(extent) = self.pool.allocate(running.host, SizeClass::SECTION)? else {
                free_all(&mut self.pool, running)?;
                return Ok(false);
            };
            running.held += extent.pages();
            running.extents.push(extent);
        }
        Ok(true)
    }

    fn run_jobs(&mut self, now_s: u64) -> Result<(), String> {
        self.pool.recheck();
        let is_measured = now_s >= WARM_S;
        for at in 0..self.running.len() {
            let wanted = self.running[at].job.remote_pages(self.running[at].ran_s + TICK_S);
            let can_continue = self.setting.policy == Policy::Static || self.resize(at, wanted)?;
            if can_continue {
                self.running[at].ran_s += TICK_S;
            }
            if is_measured {
                self.outcome.job_s += TICK_S;
                self.outcome.stalled_s += if can_continue { 0 } else { TICK_S };
            }
        }
        let (ended, running) =
            std::mem::take(&mut self.running).into_iter().partition(|job| job.ran_s >= job.job.time_s);
        self.running = running;
        let ended: Vec<Running> = ended;
        for mut running in ended {
            free_all(&mut self.pool, &mut running)?;
            self.local_free[running.host] += running.job.local_pages();
            self.known += 1;
            self.mean_to_max += running.job.mean_to_max();
            self.outcome.ended += u64::from(is_measured);
        }
        Ok(())
    }

    /// Adjusts a job's memory to its need; returns false if the job must wait. Frees the newest
    /// extents first.
    fn resize(&mut self, at: usize, wanted: u64) -> Result<bool, String> {
        if wanted > self.running[at].held {
            let more = wanted - self.running[at].held;
            if more > self.pool.free_pages() {
                return Ok(false);
            }
            let after = self.claims().enumerate().map(|(other, claim)| Claim {
                held: claim.held + if other == at { more } else { 0 },
                ..claim
            });
            if !is_safe(self.pool.free_pages() - more, after) {
                return Ok(false);
            }
            grow(&mut self.pool, &mut self.running[at], more)?;
            return Ok(true);
        }
        let running = &mut self.running[at];
        while let Some(last) = running.extents.last().copied() {
            if running.held - last.pages() < wanted {
                break;
            }
            running.extents.pop();
            running.held -= last.pages();
            self.pool.free(running.host, last)?;
        }
        Ok(true)
    }

    fn sample(&mut self, at_s: u64) {
        let used =
            self.running.iter().map(|running| running.job.remote_pages(running.ran_s).min(running.held));
        self.outcome.samples.push(ClusterSample {
            at_s,
            used: used.sum(),
            held: self.pool.pages() - self.pool.free_pages(),
            jobs: self.running.len() as u64,
        });
    }

    /// Frees the memory of all jobs.
    fn close(mut self) -> Result<PackingResult, String> {
        for mut running in std::mem::take(&mut self.running) {
            free_all(&mut self.pool, &mut running)?;
        }
        if !self.pool.is_all_free() {
            return Err("memory is still allocated after all jobs have freed theirs".into());
        }
        let (taken, trips, donated) = (self.pool.taken, self.pool.trips, self.pool.pages());
        Ok(PackingResult {
            taken,
            trips,
            donated,
            mean_to_max: self.mean_to_max / float(self.known),
            ..self.outcome
        })
    }
}

/// Allocates pages in extents of the sizes of batches, or in smaller ones if no such extent is
/// free.
fn grow(pool: &mut SimulatedPool, running: &mut Running, more: u64) -> Result<(), String> {
    let goal = running.held + more;
    while running.held < goal {
        let batch = (goal - running.held).min(BATCH_PAGES);
        let largest = u8::try_from(batch.ilog2()).unwrap_or(0);
        let mut taken = None;
        for class in (0..=largest).rev().filter_map(SizeClass::new) {
            taken = pool.allocate(running.host, class)?;
            if taken.is_some() {
                break;
            }
        }
        let extent = taken.ok_or("pages are free, and no extent is")?;
        running.held += extent.pages();
        running.extents.push(extent);
    }
    Ok(())
}

fn free_all(pool: &mut SimulatedPool, running: &mut Running) -> Result<(), String> {
    running.held = 0;
    running.extents.drain(..).try_for_each(|extent| pool.free(running.host, extent))
}

fn blocks_of(job: &Job) -> u64 {
    job.remote_pages_max().div_ceil(BLOCK_SECTIONS * u64::from(SECTION_CHUNKS))
}

/// Held and maximum memory of a job.
#[derive(Clone, Copy, Debug)]
struct Claim {
    held: u64,
    max: u64,
}

/// The banker's algorithm: whether the jobs can get their maximum and end in some order, so that no
/// job waits for ever.
fn is_safe(free: u64, claims: impl Iterator<Item = Claim>) -> bool {
    let mut claims: Vec<Claim> = claims.collect();
    claims.sort_by_key(|claim| claim.max - claim.held.min(claim.max));
    let mut free = free;
    claims.into_iter().all(|claim| {
        let is_enough = claim.max.saturating_sub(claim.held) <= free;
        free += claim.held;
        is_enough
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time that is played, in seconds.
    const TIME_S: u64 = 300;

    fn setting(policy: Policy, mix: usize, sections: u32) -> Setting {
        Setting { policy, mix: Mix::ALL[mix], sections, time_s: TIME_S }
    }

    #[test]
    fn jobs_hold_at_most_the_pool_and_free_all() {
        for policy in [Policy::Static, Policy::Dynamic] {
            let outcome = play(&setting(policy, 0, 512), 1).unwrap();
            assert_eq!(outcome.samples.len() as u64, TIME_S / 5);
            for sample in &outcome.samples {
                assert!(sample.used <= sample.held && sample.held <= 512 * 512, "{sample:?}");
                assert!(sample.jobs > 0);
            }
            assert!(outcome.ended > 0 && outcome.taken > 0 && outcome.trips > outcome.taken);
        }
    }

    #[test]
    fn the_same_seed_plays_the_same() {
        let play = |seed| {
            let outcome = play(&setting(Policy::Dynamic, 2, 256), seed).unwrap();
            (outcome.samples, outcome.ended, outcome.stalled_s)
        };
        let first = play(2);
        assert_eq!(play(2), first);
        assert_ne!(play(3), first);
    }

    #[test]
    fn a_static_job_never_stalls_and_holds_blocks() {
        let outcome = play(&setting(Policy::Static, 0, 1024), 4).unwrap();
        assert_eq!(outcome.stalled_s, 0);
        let block = 8 * 512;
        assert!(outcome.samples.iter().all(|sample| sample.held % block == 0));
    }

    #[test]
    fn a_state_is_safe_if_there_is_an_order() {
        let claims = |of: &[(u64, u64)]| {
            of.iter().map(|&(held, max)| Claim { held, max }).collect::<Vec<Claim>>().into_iter()
        };
        assert!(is_safe(2, claims(&[(4, 6), (3, 9)])), "the first, then the second");
        assert!(!is_safe(1, claims(&[(4, 6), (3, 9)])));
        assert!(!is_safe(2, claims(&[(4, 6), (2, 9)])), "even all of the first is too little");
        assert!(is_safe(0, claims(&[])));
    }

    #[test]
    fn a_pool_that_runs_short_stalls_jobs_and_lets_them_end() {
        // The smallest pool in which each job fits.
        let outcome = play(&Setting { time_s: 3600, ..setting(Policy::Dynamic, 0, 512) }, 7).unwrap();
        assert!(outcome.stalled_s > 0, "there was always room");
        assert!(outcome.ended > 10, "{}", outcome.ended);
    }
}
