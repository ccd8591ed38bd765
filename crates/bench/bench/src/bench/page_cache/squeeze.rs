//! Another program takes the memory of the host, at 500 MB/s and all at once: how fast the page
//! cache and elastic runs return theirs.
//!
//! The other program is simulated: the agent reads the available memory of the host from a file,
//! which the bench computes from what the agent's mempool and runs have. So the bench needs neither
//! the memory of such a host nor its speed, and endangers no program.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, float, show_bytes};
use aquifer_bench::support::cluster::{Cluster, KEPT_FREE_BYTES};
use aquifer_bench::support::folder;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::programs::{self, Programs};
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use tempfile::TempDir;

use crate::bench::BenchError;

/// Speed at which a program takes memory.
const BYTES_PER_S: f64 = 500e6;
/// Limits of the elastic run, and of the run whose pages are in the cache.
const LIMIT_BYTES: u64 = 32 * MIB;
/// The other program takes memory when the runs have at least this part of theirs, in percent.
const FILLED_PERCENT: u64 = 90;
/// Longest time to wait until memory is lent or returned.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// How the other program takes memory.
#[derive(Clone, Copy, Debug)]
enum Pace {
    Steady,
    AtOnce,
}

impl Pace {
    const ALL: [Self; 2] = [Self::Steady, Self::AtOnce];

    fn name(self) -> &'static str {
        match self {
            Self::Steady => "at 500 MB/s",
            Self::AtOnce => "all at once",
        }
    }

    /// Bytes that were taken after some time.
    fn taken(self, elapsed: Duration) -> u64 {
        match self {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "far below 2^63")]
            Self::Steady => (elapsed.as_secs_f64() * BYTES_PER_S) as u64,
            Self::AtOnce => u64::MAX,
        }
    }
}

/// A program that runs until it is dropped.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        // Fails if the program has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A host with a run whose pages are in the cache, and an elastic run.
struct Host {
    cluster: Cluster,
    /// Bytes of the elastic run beyond its limit, and of the other run.
    lent_bytes: u64,
    cached_bytes: u64,
    /// Memory that is idle if neither run has any, beyond what stays free.
    idle_bytes: u64,
}

/// The state of the host at a moment.
#[derive(Clone, Copy, Debug)]
struct Moment {
    cached: u64,
    borrowed: u64,
    /// Memory that is available beyond what should stay free.
    available: i64,
}

impl Host {
    fn start(lent_bytes: u64, cached_bytes: u64) -> Result<Self, BenchError> {
        let cluster = Cluster::up_with_idle_memory_and_cache(3 * (lent_bytes + cached_bytes), Fabric::Shm)?;
        // Elastic runs have at most a quarter of what is idle or borrowed.
        let idle_bytes = 4 * lent_bytes + cached_bytes;
        Ok(Self { cluster, lent_bytes, cached_bytes, idle_bytes })
    }

    /// Starts a program that reads pages at random until it is dropped.
    fn run(
        &self,
        programs: &Programs,
        folder: &TempDir,
        bytes: u64,
        options: &[&str],
    ) -> Result<Background, BenchError> {
        let stats = folder.path().join(format!("stats-{}.json", options.len()));
        let mut command =
            self.cluster.pooled_command_with(options, LIMIT_BYTES, &stats, &programs.faultbench)?;
        command.args(["--bytes", &(bytes + LIMIT_BYTES).to_string(), "--pattern", "random", "--op", "read"]);
        command.args(["--passes", "1000000"]).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(BenchError::io("start", &programs.faultbench))?;
        Ok(Background(child))
    }

    /// Reads what the agent has, and sets the available memory if another program has `taken`.
    fn observe(&self, taken: u64) -> Result<Moment, BenchError> {
        interrupt::check()?;
        let status = self.cluster.status().ok_or_else(|| BenchError::Figures {
            program: "aquifer status".into(),
            context: "while memory is taken".into(),
            text: "the agent does not answer".into(),
        })?;
        let (cached, borrowed) = (status.cached_bytes, status.borrowed_bytes);
        let used = i128::from(cached) + i128::from(borrowed) + i128::from(taken);
        let available = i64::try_from(i128::from(self.idle_bytes) - used).unwrap_or(i64::MIN);
        self.cluster.set_idle(available)?;
        Ok(Moment { cached, borrowed, available })
    }

    /// Observes until the moment is as wanted. Returns the time that this has taken.
    fn wait_for(&self, taken: u64, is_wanted: impl Fn(&Moment) -> bool) -> Result<f64, BenchError> {
        let began = Instant::now();
        while !is_wanted(&self.observe(taken)?) {
            check_time(began, taken)?;
        }
        Ok(began.elapsed().as_secs_f64())
    }

    fn wait_until_lent(&self) -> Result<f64, BenchError> {
        let part = |bytes: u64| bytes * FILLED_PERCENT / 100;
        self.wait_for(0, |now| now.borrowed >= part(self.lent_bytes) && now.cached >= part(self.cached_bytes))
    }

    /// Takes all idle memory, and returns it when the runs have returned theirs.
    fn squeeze(&self, pace: Pace) -> Result<BTreeMap<&'static str, f64>, BenchError> {
        let lent_s = self.wait_until_lent()?;
        let began = Instant::now();
        // A program that takes all at once finds what is available, and the cache a moment later.
        let all = match pace {
            Pace::Steady => self.idle_bytes,
            Pace::AtOnce => self.idle_bytes - self.lent_bytes,
        };
        let (mut least, mut last) = (i64::MAX, Moment { cached: u64::MAX, borrowed: 0, available: 0 });
        let (mut below_since, mut below_max) = (None::<Instant>, Duration::ZERO);
        let mut taken = 0;
        while taken < all || last.available < 0 {
            taken = pace.taken(began.elapsed()).min(all);
            last = self.observe(taken)?;
            least = least.min(last.available);
            if last.available >= 0 {
                below_since = None;
            } else {
                below_max = below_max.max(below_since.get_or_insert_with(Instant::now).elapsed());
            }
            check_time(began, taken)?;
        }
        let returned_s = began.elapsed().as_secs_f64();
        let free = float(KEPT_FREE_BYTES) + if least < 0 { -float(least.unsigned_abs()) } else { 0.0 };
        Ok(BTreeMap::from([
            ("least available MiB", free / float(MIB)),
            ("longest below reserve ms", below_max.as_secs_f64() * 1e3),
            ("s until returned", returned_s),
            ("s until lent", lent_s),
        ]))
    }
}

/// Fails if memory has not been lent or returned in time.
fn check_time(began: Instant, taken: u64) -> Result<(), BenchError> {
    if began.elapsed() <= WAIT_MAX {
        return Ok(());
    }
    Err(BenchError::Wrong {
        program: "aquifer agent".into(),
        context: format!("{} were taken", show_bytes(taken)),
        what: format!("memory was not lent or returned within {WAIT_MAX:?}"),
    })
}

/// Measures how fast idle memory is returned.
///
/// # Errors
/// If something cannot be measured.
pub fn measure(report: &mut Report, quick: bool) -> Result<(), BenchError> {
    let (rounds, lent_bytes, cached_bytes) =
        if quick { (1, 64 * MIB, 128 * MIB) } else { (3, 256 * MIB, 768 * MIB) };
    let folder = folder::temporary()?;
    let programs = programs::build(folder.path())?;
    let host = Host::start(lent_bytes, cached_bytes)?;
    host.cluster.set_idle(i64::try_from(host.idle_bytes).unwrap_or(i64::MAX))?;
    let _elastic = host.run(&programs, &folder, lent_bytes, &["--local-max", "auto"])?;
    let _cached = host.run(&programs, &folder, cached_bytes, &[])?;
    let bar = progress::bar(rounds * Pace::ALL.len());
    let mut rows: Vec<BTreeMap<&'static str, Vec<f64>>> = vec![BTreeMap::new(); Pace::ALL.len()];
    for round in 1..=rounds {
        for (pace, row) in Pace::ALL.into_iter().zip(&mut rows) {
            bar.set_message(format!("round {round}: memory is taken {}", pace.name()));
            for (name, value) in host.squeeze(pace)? {
                row.entry(name).or_default().push(value);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let spreads = |row: &BTreeMap<&'static str, Vec<f64>>| -> BTreeMap<&'static str, Spread> {
        row.iter().filter_map(|(name, values)| Some((*name, Spread::of(values)?))).collect()
    };
    let rows: Vec<Row> = Pace::ALL
        .iter()
        .zip(&rows)
        .map(|(pace, row)| Row { name: pace.name().into(), figures: spreads(row) })
        .collect();
    let steady = &rows[0].figures;
    let bounds = [("least available MiB", 0.0, false), ("longest below reserve ms", 1000.0, true)];
    for (name, bound, at_most) in bounds {
        report.targets.extend(steady.get(name).map(|value| Target {
            name: format!("a program takes all memory at 500 MB/s: {name}"),
            value: *value,
            bound,
            at_most,
        }));
    }
    report.tables.push(Table {
        title: format!(
            "another program takes all idle memory: {} of an elastic run, {} of the cache; {} stay free",
            show_bytes(lent_bytes),
            show_bytes(cached_bytes),
            show_bytes(KEPT_FREE_BYTES)
        ),
        columns: vec![
            Column::full("least available MiB"),
            Column::full("longest below reserve ms"),
            Column::full("s until returned"),
            Column::full("s until lent"),
        ],
        pictured: None,
        ratio: None,
        rows,
    });
    Ok(())
}
