//! `aquifer bench apps`: real programs with a part of their memory, on the pool and on kernel swap.

mod backends;
mod learn;
mod memcached;
mod postgres;
pub(super) mod redis;
pub(super) mod resp;
mod store;
mod summary;
mod unprivileged;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::child::{ProgramOutcome, Watched};
use aquifer_bench::support::cluster;
use aquifer_bench::support::progress;
use aquifer_bench::support::random::Access;
use aquifer_bench::support::report::Report;
use aquifer_swap::setup::cleanup_stale;
use indicatif::ProgressBar;

use super::{BenchArgs, BenchError};
pub(super) use backends::find_program;
use backends::{AppBackend, Fit, Stage};
use learn::Learn;
use memcached::Memcached;
use postgres::Postgres;
use redis::Redis;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str = "targets: with a quarter or half of its memory each program is faster \
    than on a swap file; with the host idle ≤ 1.1× plain, and with a page cache ≤ 1.1× shared memory; \
    limits are kept";

/// Percentage of a program's memory at which all targets are judged.
const JUDGED_PERCENT: u64 = 25;

/// Amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    rounds: usize,
    /// Limits in percent of a program's peak.
    fits: &'static [u64],
    redis_keys: usize,
    redis_requests: usize,
    /// Scale factor of pgbench: 100,000 accounts each.
    postgres_scale: u64,
    postgres_transactions: u64,
    /// Size of the array of scikit-learn's models, and their iterations or trees.
    learn_bytes: u64,
    learn_rounds: u64,
}

impl Size {
    const QUICK: Self = Self {
        rounds: 1,
        fits: &[JUDGED_PERCENT],
        redis_keys: 30_000,
        redis_requests: 10_000,
        postgres_scale: 2,
        postgres_transactions: 2,
        learn_bytes: 48 * MIB,
        learn_rounds: 2,
    };
    const FULL: Self = Self {
        rounds: 2,
        fits: &[100, 75, 50, 25],
        redis_keys: 100_000,
        redis_requests: 40_000,
        postgres_scale: 3,
        postgres_transactions: 2,
        learn_bytes: 128 * MIB,
        learn_rounds: 4,
    };
}

/// A measured program and its load.
pub trait App {
    /// Name in the report.
    fn name(&self) -> &'static str;

    /// Path of the program.
    fn program(&self) -> &Path;

    /// Whether the program refuses to run as root.
    fn refuses_root(&self) -> bool {
        false
    }

    /// Bytes of the program's shared memory. Aquifer pages private memory only, but a cgroup's
    /// limit counts both, so this is added to the limit of a cgroup.
    fn shared_bytes(&self) -> u64 {
        0
    }

    /// Runs the program and its load. `command` lacks the program's arguments. Returns how the
    /// program ended, and the results of the load.
    ///
    /// # Errors
    /// If the program cannot be started, or a signal asks to stop.
    fn play(
        &self,
        command: Command,
        watched: Watched,
        output: &Path,
    ) -> Result<(ProgramOutcome, Result<Played, BenchError>), BenchError>;
}

/// Results of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// Time in seconds.
    pub seconds: f64,
    /// Latency of each request or transaction, sorted; empty if there are none.
    pub latencies_us: Vec<f64>,
    /// Digest of the data, which must be the same in every run.
    pub digest: String,
}

impl Played {
    /// Results with latencies in any order.
    pub fn new(seconds: f64, mut latencies_us: Vec<f64>, digest: String) -> Self {
        latencies_us.sort_by(f64::total_cmp);
        Self { seconds, latencies_us, digest }
    }
}

/// The figures of one run, by name.
pub type Sample = BTreeMap<&'static str, f64>;

/// The index of a program, its limit in percent of its peak, and the backend. Plain runs have 100
/// %.
type Key = (usize, u64, AppBackend);

/// Samples by program, limit and backend, one for each round; `None` if the kernel killed the
/// program.
pub type Samples = BTreeMap<Key, Vec<Option<Sample>>>;

/// Measures.
///
/// # Errors
/// If something could not be measured, or a program computed something wrong.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let size = choose_fits(if args.quick { Size::QUICK } else { Size::FULL }, args.fit)?;
    let mut stage = Stage::new()?;
    let mut apps = find_apps(size, &mut stage)?;
    if let Some(only) = &args.only {
        apps.retain(|app| app.name().to_lowercase().contains(&only.to_lowercase()));
        if apps.is_empty() {
            return Err(BenchError::NoSuchApp { name: only.clone() });
        }
    }
    let backends = choose_backends(&mut stage.notes);
    let mut bench = Bench { size, apps, stage, digests: BTreeMap::new(), samples: Samples::new() };
    let peaks = bench.measure(&backends)?;
    let mut report = Report::new("apps", args.quick);
    report.notes = notes(size);
    for (app, peak_bytes) in bench.apps.iter().zip(&peaks) {
        report.notes.push(format!("{}: peak memory {}, in a plain run", app.name(), show_bytes(*peak_bytes)));
    }
    report.notes.append(&mut bench.stage.notes);
    let names: Vec<&'static str> = bench.apps.iter().map(|app| app.name()).collect();
    summary::fill(&mut report, size, &names, &backends, &bench.samples);
    Ok(report)
}

fn choose_fits(size: Size, only: Option<u64>) -> Result<Size, BenchError> {
    let Some(percent) = only else { return Ok(size) };
    let fit = size.fits.iter().find(|fit| **fit == percent);
    let fit = fit.ok_or(BenchError::NoSuchFit { percent, fits: size.fits })?;
    Ok(Size { fits: std::slice::from_ref(fit), ..size })
}

fn notes(size: Size) -> Vec<String> {
    vec![
        format!(
            "{} rounds in alternation; every value was checked, and results are the same in every run",
            size.rounds
        ),
        format!("memory nodes of each pool: {}, on this machine like the programs", cluster::nodes()),
        "a limit is a percentage of the program's peak anonymous resident memory in a plain run".into(),
        "a cgroup also counts page cache and kernel memory; Aquifer counts private memory and the run's \
         part of the mempool. Shared memory (PostgreSQL's buffers) is added to the limit of cgroups"
            .into(),
        "s: the measured requests of redis and memcached, pgbench from start to end, models from the \
         program's start to its end; p50 and p99 are of requests and of transactions"
            .into(),
        "CPU is of the whole run with fill and checks: the program's and, on the pool, the daemons'; kernel \
         threads that swap are not counted"
            .into(),
        "redis' main thread and its client are on one processor in every run, as the scheduler would \
         choose: an answer across processors takes several times as long"
            .into(),
        "swap file and zram have the kernel's usual read-ahead of eight pages. Where the kernel would kill \
         a program because all its resident memory is in use, the program waits up to 5 ms and retries \
         (cgroup v1; \"in want\" is 1 if that happened, which costs time). A run that is killed \
         nevertheless is repeated"
            .into(),
    ]
}

/// All installed programs. A note names each of the others.
fn find_apps(size: Size, stage: &mut Stage) -> Result<Vec<Box<dyn App>>, BenchError> {
    let folder = stage.folder.path();
    let mut found: Vec<(&str, Option<Box<dyn App>>)> = Vec::new();
    for access in [Access::Uniform, Access::Zipf] {
        found.push((
            "redis-server",
            Redis::find(access, size.redis_keys, size.redis_requests, folder)
                .map(|app| Box::new(app) as Box<dyn App>),
        ));
    }
    let postgres = Postgres::find(size, &stage.user, folder)?;
    found.push(("PostgreSQL", postgres.map(|app| Box::new(app) as Box<dyn App>)));
    let memcached = Memcached::find(size, folder);
    found.push(("memcached", memcached.map(|app| Box::new(app) as Box<dyn App>)));
    match Learn::find(size, folder)? {
        Some(models) => found.extend(models.into_iter().map(|app| ("", Some(Box::new(app) as Box<dyn App>)))),
        None => found.push(("python3-sklearn", None)),
    }
    let mut apps = Vec::new();
    for (name, app) in found {
        match app {
            Some(app) => apps.push(app),
            None => stage.notes.push(format!(
                "not measured: {name} is not installed; install it with scripts/install-deps.sh bench"
            )),
        }
    }
    if apps.is_empty() { Err(BenchError::NoApps) } else { Ok(apps) }
}

/// The backends with a limit that this machine and user support. A note names each of the others.
fn choose_backends(notes: &mut Vec<String>) -> Vec<AppBackend> {
    // Swap devices and cgroups of a killed run would slow this one down.
    if let Err(error) = cleanup_stale() {
        notes.push(format!("cleanup after an earlier run failed: {error}"));
    }
    let mut backends = Vec::new();
    for backend in AppBackend::LIMITED {
        match backend.try_out() {
            Ok(()) => backends.push(backend),
            Err(error) => notes.push(format!("not measured: {}: {error}", backend.name())),
        }
    }
    backends
}

struct Bench {
    size: Size,
    apps: Vec<Box<dyn App>>,
    stage: Stage,
    /// Digest of each program's first run.
    digests: BTreeMap<usize, String>,
    samples: Samples,
}

impl Bench {
    /// Measures all programs in each round. Returns each program's peak.
    fn measure(&mut self, backends: &[AppBackend]) -> Result<Vec<u64>, BenchError> {
        let Size { rounds, fits, .. } = self.size;
        let of_fit =
            |percent: &u64| backends.iter().filter(|backend| backend.is_measured_at(*percent)).count();
        let limited: usize = fits.iter().map(of_fit).sum();
        let bar = progress::bar(rounds * self.apps.len() * (1 + limited));
        let mut peaks = Vec::new();
        for at in 0..self.apps.len() {
            peaks.push(self.plain(at, 1, &bar)?);
        }
        // Three times the largest program, so that memory that is freed late does not fill the
        // nodes.
        self.stage.bring_up(peaks.iter().copied().max().unwrap_or(0).max(MIB) * 3)?;
        for round in 1..=rounds {
            for (at, &peak_bytes) in peaks.iter().enumerate() {
                if round > 1 {
                    self.plain(at, round, &bar)?;
                }
                for &percent in fits {
                    for &backend in backends.iter().filter(|backend| backend.is_measured_at(percent)) {
                        self.limited(at, backend, Fit { percent, peak_bytes }, round, &bar)?;
                    }
                }
            }
        }
        bar.finish_and_clear();
        Ok(peaks)
    }

    /// Runs a program without a limit. Returns the peak of resident memory.
    fn plain(&mut self, at: usize, round: usize, bar: &ProgressBar) -> Result<u64, BenchError> {
        bar.set_message(format!("round {round}: {}, plainly", self.apps[at].name()));
        let (sample, played, peak_bytes) = self.stage.plain(self.apps[at].as_ref())?;
        self.keep((at, 100, AppBackend::Plain), Some((sample, played)))?;
        bar.inc(1);
        Ok(peak_bytes)
    }

    fn limited(
        &mut self,
        at: usize,
        backend: AppBackend,
        fit: Fit,
        round: usize,
        bar: &ProgressBar,
    ) -> Result<(), BenchError> {
        let app = self.apps[at].as_ref();
        bar.set_message(format!("round {round}: {}, {} % fit, {}", app.name(), fit.percent, backend.name()));
        let run = self.stage.limited(app, backend, fit)?;
        self.keep((at, fit.percent, backend), run)?;
        bar.inc(1);
        Ok(())
    }

    fn keep(&mut self, key: Key, run: Option<(Sample, Played)>) -> Result<(), BenchError> {
        let (at, percent, backend) = key;
        let sample = match run {
            Some((sample, played)) => {
                let first = self.digests.entry(at).or_insert_with(|| played.digest.clone());
                if *first != played.digest {
                    return Err(BenchError::Wrong {
                        program: self.apps[at].name().into(),
                        context: format!("{}, {percent} % fit", backend.name()),
                        what: format!("{:?}, and the first run gave {first:?}", played.digest),
                    });
                }
                Some(sample)
            }
            None => None,
        };
        self.samples.entry(key).or_default().push(sample);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_fit_is_chosen_from_those_that_are_measured() {
        assert_eq!(choose_fits(Size::FULL, None).unwrap().fits, [100, 75, 50, 25]);
        assert_eq!(choose_fits(Size::FULL, Some(50)).unwrap().fits, [50]);
        let error = choose_fits(Size::QUICK, Some(50)).unwrap_err().to_string();
        assert!(error.contains("give one of 25"), "{error}");
    }
}
