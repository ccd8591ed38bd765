//! The three runs of the demo.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::show_bytes;
use aquifer_bench::support::child::{self, Moment, ProgramOutcome, Streams, Watched};
use aquifer_bench::support::cluster::{Cluster, read_statistics};
use indicatif::{ProgressBar, ProgressStyle};

use super::program::Program;
use crate::peers::{Peer, PeerSetup, ReadAhead};

/// Time between two queries of the memory held by cluster or kernel. A query takes processor time
/// from the program.
const QUERY_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two points of the curve.
const POINT_INTERVAL: Duration = Duration::from_millis(100);

/// A run of the demo: the backend of the program's memory.
#[derive(Clone, Copy, Debug)]
pub enum DemoRun<'a> {
    /// Without a limit.
    Plain,
    /// With a limit, and the rest on memory nodes.
    Pool {
        /// The cluster.
        cluster: &'a Cluster,
        /// The limit.
        limit_bytes: u64,
    },
    /// With a limit, and the rest in a swap file.
    Swap {
        /// The limit.
        limit_bytes: u64,
        /// Size of the swap file.
        swap_bytes: u64,
    },
}

impl DemoRun<'_> {
    /// Name of the plain run, and of its output file.
    pub const PLAIN: &'static str = "plainly";
    /// Name of the run on the pool, and of its output file.
    pub const POOL: &'static str = "on the pool";
    /// Name of the run on kernel swap, and of its output file.
    pub const SWAP: &'static str = "on swap";

    fn name(&self) -> &'static str {
        match self {
            Self::Plain => Self::PLAIN,
            Self::Pool { .. } => Self::POOL,
            Self::Swap { .. } => Self::SWAP,
        }
    }
}

/// A point of a run's curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Time since the start.
    pub elapsed_s: f64,
    /// Resident anonymous memory.
    pub resident_bytes: u64,
}

/// Results of a run.
#[derive(Clone, Debug, Default)]
pub struct Played {
    /// Name of the run.
    pub name: &'static str,
    /// Time from start to end.
    pub seconds: f64,
    /// Peak of resident anonymous memory.
    pub resident_peak_bytes: u64,
    /// Peak of resident memory plus the run's part of the mempool.
    pub local_peak_bytes: u64,
    /// Peak on memory nodes or in the swap file.
    pub elsewhere_peak_bytes: u64,
    /// Faults that read a page from there.
    pub faults: Option<u64>,
    /// Size of the output.
    pub output_bytes: u64,
    /// Resident memory over time.
    pub curve: Vec<Point>,
    /// Why the run failed, if it did.
    pub failure: Option<String>,
}

impl Played {
    /// A run that failed before it started.
    fn failed(name: &'static str, failure: String) -> Self {
        Self { name, failure: Some(failure), ..Self::default() }
    }

    /// The time, or the failure.
    pub fn time(&self) -> String {
        match &self.failure {
            None => format!("{:.1} s", self.seconds),
            Some(failure) if self.seconds > 0.0 => format!("{failure}, after {:.1} s", self.seconds),
            Some(failure) => failure.clone(),
        }
    }

    /// One-line summary.
    pub fn line(&self) -> String {
        format!(
            "{:<12} {}, {} resident at the peak, {} elsewhere",
            self.name,
            self.time(),
            show_bytes(self.resident_peak_bytes),
            show_bytes(self.elsewhere_peak_bytes)
        )
    }
}

/// The program, and the folder for its outputs.
#[derive(Debug)]
pub struct Stage {
    program: Program,
    folder: PathBuf,
}

impl Stage {
    /// A stage whose runs write their outputs to files in `folder`, with the names of the runs.
    pub fn new(program: Program, folder: PathBuf) -> Self {
        Self { program, folder }
    }

    /// Title of the picture.
    pub fn title(&self) -> &'static str {
        "sqlite3 indexes the Linux kernel's documentation in memory"
    }

    /// Runs the program, with progress on the terminal.
    ///
    /// # Errors
    /// If the run cannot be set up, fails, or a signal asks to stop.
    pub fn run(&mut self, run: DemoRun<'_>) -> Result<Played, BenchError> {
        match run {
            DemoRun::Plain => {
                let command = Command::new(self.program.executable());
                self.play(&run, command, Watched::All, u64::MAX, || None)
            }
            DemoRun::Pool { cluster, limit_bytes } => {
                let stats = self.folder.join("stats.json");
                let command = cluster.pooled_command(limit_bytes, &stats, self.program.executable())?;
                let ask = || {
                    let runs = cluster.status()?.runs;
                    Some(runs.iter().map(|run| (run.mempool_bytes, run.remote_bytes)).fold((0, 0), add))
                };
                let mut played = self.play(&run, command, Watched::Started, limit_bytes, ask)?;
                let stats = read_statistics(&stats)?;
                played.elsewhere_peak_bytes = stats.remote_peak_bytes;
                played.faults = Some(stats.faults);
                Ok(played)
            }
            DemoRun::Swap { limit_bytes, swap_bytes } => match self.swap(limit_bytes, swap_bytes) {
                Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
                // A failure of the peer is a result, not an error of the demo.
                outcome => {
                    Ok(outcome.unwrap_or_else(|error| Played::failed(DemoRun::SWAP, error.to_string())))
                }
            },
        }
    }

    fn swap(&self, limit_bytes: u64, swap_bytes: u64) -> Result<Played, BenchError> {
        let mut setup = PeerSetup::new(Peer::SwapFile, limit_bytes, swap_bytes)?;
        setup.set_read_ahead(ReadAhead::EightPages)?;
        let command = setup.command(self.program.executable())?;
        let run = DemoRun::Swap { limit_bytes, swap_bytes };
        let ask = || Some((0, setup.usage().ok()?.swap_bytes));
        let (mut played, outcome) = self.watch(&run, command, Watched::All, limit_bytes, ask)?;
        let usage = setup.usage()?;
        if usage.oom_kills > 0 {
            played.failure = Some("killed by the kernel for lack of memory".into());
        } else if let Err(error) = self.check(&run, &outcome) {
            played.failure = Some(error.to_string());
        }
        played.faults = Some(usage.major_faults);
        if let Some(peak_bytes) = usage.swap_peak_bytes {
            played.elsewhere_peak_bytes = played.elsewhere_peak_bytes.max(peak_bytes);
        }
        setup.close()?;
        Ok(played)
    }

    /// Like [`Self::watch`], but a failure of the program is an error.
    fn play(
        &self,
        run: &DemoRun<'_>,
        command: Command,
        watched: Watched,
        limit_bytes: u64,
        ask: impl Fn() -> Option<(u64, u64)>,
    ) -> Result<Played, BenchError> {
        let (played, outcome) = self.watch(run, command, watched, limit_bytes, ask)?;
        self.check(run, &outcome)?;
        Ok(played)
    }

    /// Runs the program and samples its memory. `ask` returns the bytes in the mempool and the
    /// bytes on nodes or in the swap file.
    fn watch(
        &self,
        run: &DemoRun<'_>,
        mut command: Command,
        watched: Watched,
        limit_bytes: u64,
        ask: impl Fn() -> Option<(u64, u64)>,
    ) -> Result<(Played, ProgramOutcome), BenchError> {
        self.program.arrange(&mut command);
        let output = self.folder.join(run.name());
        let streams = Streams { input: Some(&self.program.script), output: &output };
        let mut watcher = Watcher::new(run.name(), limit_bytes);
        let outcome = child::run(command, &streams, watched, |moment| watcher.record(moment, &ask))?;
        watcher.bar.finish_and_clear();
        let mut played = watcher.played;
        played.seconds = outcome.elapsed.as_secs_f64();
        played.resident_peak_bytes = outcome.resident_peak_bytes;
        played.local_peak_bytes = played.local_peak_bytes.max(outcome.resident_peak_bytes);
        played.output_bytes = std::fs::metadata(&output).map_err(BenchError::io("read", &output))?.len();
        Ok((played, outcome))
    }

    fn check(&self, run: &DemoRun<'_>, outcome: &ProgramOutcome) -> Result<(), BenchError> {
        if outcome.status.success() {
            return Ok(());
        }
        Err(BenchError::Program {
            program: self.program.executable().display().to_string(),
            context: run.name().into(),
            status: outcome.status.to_string(),
            message: outcome.message.clone(),
        })
    }
}

fn add(sum: (u64, u64), next: (u64, u64)) -> (u64, u64) {
    (sum.0 + next.0, sum.1 + next.1)
}

/// Progress, curve and peaks of a run.
struct Watcher {
    bar: ProgressBar,
    limit_bytes: u64,
    queried: Option<Instant>,
    answer: (u64, u64),
    played: Played,
}

impl Watcher {
    fn new(name: &'static str, limit_bytes: u64) -> Self {
        let bar = ProgressBar::new_spinner();
        let bar = match ProgressStyle::with_template("{msg} {spinner}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        let played = Played { name, ..Played::default() };
        Self { bar, limit_bytes, queried: None, answer: (0, 0), played }
    }

    fn record(&mut self, moment: Moment, ask: &impl Fn() -> Option<(u64, u64)>) {
        let Moment { elapsed, resident_bytes } = moment;
        let elapsed_s = elapsed.as_secs_f64();
        if self.queried.is_none_or(|queried| queried.elapsed() >= QUERY_INTERVAL) {
            self.queried = Some(Instant::now());
            self.answer = ask().unwrap_or(self.answer);
            // Only now are both values of the same time.
            let local_bytes = resident_bytes + self.answer.0;
            self.played.local_peak_bytes = self.played.local_peak_bytes.max(local_bytes);
        }
        let elsewhere_bytes = self.answer.1;
        self.played.elsewhere_peak_bytes = self.played.elsewhere_peak_bytes.max(elsewhere_bytes);
        let last_s = self.played.curve.last().map_or(f64::NEG_INFINITY, |point| point.elapsed_s);
        if elapsed_s - last_s >= POINT_INTERVAL.as_secs_f64() {
            self.played.curve.push(Point { elapsed_s, resident_bytes });
        }
        let limit = match self.limit_bytes {
            u64::MAX => String::new(),
            bytes => format!(" of {}", show_bytes(bytes)),
        };
        self.bar.set_message(format!(
            "{:<12} {elapsed_s:5.1} s  {}{limit} resident, {} elsewhere",
            self.played.name,
            show_bytes(resident_bytes),
            show_bytes(elsewhere_bytes)
        ));
        self.bar.tick();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_and_curve_are_kept() {
        let mut watcher = Watcher::new(DemoRun::POOL, 100);
        let moment = |ms, resident_bytes| Moment { elapsed: Duration::from_millis(ms), resident_bytes };
        watcher.record(moment(0, 70), &|| Some((20, 500)));
        watcher.record(moment(10, 60), &|| Some((90, 400)));
        watcher.record(moment(150, 80), &|| Some((90, 400)));
        // The interval allows one query only, so the second answer is not used.
        assert_eq!(watcher.played.local_peak_bytes, 90);
        assert_eq!(watcher.played.elsewhere_peak_bytes, 500);
        let residents: Vec<u64> = watcher.played.curve.iter().map(|point| point.resident_bytes).collect();
        assert_eq!(residents, [70, 80]);
    }
}
