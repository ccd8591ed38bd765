//! Samples of requests, and their latencies over time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;

use super::super::connection::{Counts, Operation};
use super::super::load::{Answered, Load, Pace};
use super::super::servers::AQUIFER;
use super::cluster::SERVERS;

/// A batch of requests that was answered. A client has one in flight at a time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Index of the server that the client is connected to.
    pub server: usize,
    /// When the batch was answered, in µs since the start of the measurement.
    pub ended_us: u32,
    pub latency_ns: u32,
}

/// Sets a flag when dropped, also by a panic.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` and plays operations in batches of `depth` until it ends. Returns a sample of each
/// batch, with times since `began`, and the result of the work.
///
/// # Errors
/// Those of [`Load::play`] and of `work`, or if a key was not found or a set was refused.
pub fn play_beside<T>(
    load: &mut Load,
    depth: usize,
    began: Instant,
    operations: &mut (dyn Iterator<Item = Operation> + Send),
    work: impl FnOnce() -> Result<T, BenchError>,
) -> Result<(Vec<Sample>, T), BenchError> {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guard = StopGuard(&is_done);
        let player = scope.spawn(|| {
            let mut operations = operations.take_while(|_| !is_done.load(Ordering::Relaxed));
            record(load, depth, began, &mut operations)
        });
        let outcome = work();
        drop(guard);
        let samples = player.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((samples, outcome?))
    })
}

/// Plays operations to their end.
fn record(
    load: &mut Load,
    depth: usize,
    began: Instant,
    operations: &mut dyn Iterator<Item = Operation>,
) -> Result<Vec<Sample>, BenchError> {
    let mut samples = Vec::new();
    let mut push = |Answered { connection, sent, ended, .. }: Answered| {
        let since = |from| ended.saturating_duration_since(from);
        samples.push(Sample {
            server: connection % SERVERS,
            ended_us: u32::try_from(since(began).as_micros()).unwrap_or(u32::MAX),
            latency_ns: u32::try_from(since(sent).as_nanos()).unwrap_or(u32::MAX),
        });
    };
    // The load sleeps, because servers and load share all processors.
    let pace = Pace { sleeps: true, ..Pace::of_depth(depth) };
    let (counts, _) = load.play_observed(pace, None, operations, &mut push)?;
    check(counts)?;
    Ok(samples)
}

/// Fails if a key was not found or a set was refused.
///
/// # Errors
/// The number of each kind.
pub fn check(counts: Counts) -> Result<(), BenchError> {
    if counts.misses + counts.refused == 0 {
        return Ok(());
    }
    let what = format!("{} keys were not found, {} sets refused", counts.misses, counts.refused);
    Err(BenchError::Wrong { program: AQUIFER.into(), context: "moves".into(), what })
}

/// A time in µs since the start of a measurement.
pub fn since_us(began: Instant, at: Instant) -> u32 {
    u32::try_from(at.saturating_duration_since(began).as_micros()).unwrap_or(u32::MAX)
}

/// A duration in µs.
pub fn duration_us(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Latencies in order.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    sorted_ns: Vec<u32>,
}

impl Latencies {
    /// The latencies of samples.
    pub fn of<'a>(samples: impl Iterator<Item = &'a Sample>) -> Self {
        let mut sorted_ns: Vec<u32> = samples.map(|sample| sample.latency_ns).collect();
        sorted_ns.sort_unstable();
        Self { sorted_ns }
    }

    /// The mean in µs; `None` if there are none.
    pub fn mean_us(&self) -> Option<f64> {
        let sum: u64 = self.sorted_ns.iter().map(|ns| u64::from(*ns)).sum();
        (!self.sorted_ns.is_empty()).then(|| float(sum) / float(self.sorted_ns.len() as u64) / 1e3)
    }

    /// The smallest latency that this many percent do not exceed, in µs; `None` if there are none.
    pub fn percentile_us(&self, percent: usize) -> Option<f64> {
        let at = (self.sorted_ns.len() * percent).div_ceil(100).saturating_sub(1);
        self.sorted_ns.get(at).map(|ns| f64::from(*ns) / 1e3)
    }
}

/// Samples by windows of equal length.
#[derive(Debug)]
pub struct Windows<'a> {
    length_us: u32,
    windows: Vec<&'a [Sample]>,
}

impl<'a> Windows<'a> {
    /// Divides samples, which are in the order of their answers. The last window, which may be
    /// incomplete, is left out.
    pub fn of(samples: &'a [Sample], length: Duration) -> Self {
        let length_us = duration_us(length);
        let count = samples.last().map_or(0, |last| last.ended_us / length_us);
        let start = |window: u32| samples.partition_point(|sample| sample.ended_us < window * length_us);
        Self { length_us, windows: (0..count).map(|at| &samples[start(at)..start(at + 1)]).collect() }
    }

    /// The windows, each with its time in µs.
    pub fn iter(&self) -> impl Iterator<Item = (Range<u32>, &'a [Sample])> {
        let times = (0..).map(|at| at * self.length_us..(at + 1) * self.length_us);
        times.zip(self.windows.iter().copied())
    }

    /// Answers a second in a window.
    pub fn rate(&self, window: &[Sample]) -> f64 {
        float(window.len() as u64) * 1e6 / f64::from(self.length_us)
    }
}

/// Whether two times overlap.
pub fn overlap(one: &Range<u32>, other: &Range<u32>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ended_us: u32, latency_ns: u32) -> Sample {
        Sample { server: 0, ended_us, latency_ns }
    }

    #[test]
    fn latencies_have_mean_and_percentiles() {
        let samples: Vec<Sample> = (1..=200).rev().map(|number| sample(0, number * 1000)).collect();
        let latencies = Latencies::of(samples.iter());
        assert_eq!(latencies.mean_us(), Some(100.5));
        let percentiles = [1, 50, 99, 100].map(|percent| latencies.percentile_us(percent));
        assert_eq!(percentiles, [Some(2.0), Some(100.0), Some(198.0), Some(200.0)]);
        assert_eq!(Latencies::default().mean_us(), None);
        assert_eq!(Latencies::default().percentile_us(50), None);
    }

    #[test]
    fn each_sample_is_in_its_window() {
        let samples: Vec<Sample> = [0, 99, 100, 350, 420].map(|ended_us| sample(ended_us, 1)).to_vec();
        let windows = Windows::of(&samples, Duration::from_micros(100));
        let counts: Vec<(u32, usize)> = windows.iter().map(|(time, all)| (time.start, all.len())).collect();
        assert_eq!(counts, [(0, 2), (100, 1), (200, 0), (300, 1)]);
        assert!((windows.rate(&samples[..2]) - 20_000.0).abs() < 1e-6);
        assert_eq!(Windows::of(&[], Duration::from_micros(100)).iter().count(), 0);
    }

    #[test]
    fn times_that_touch_do_not_overlap() {
        assert!(overlap(&(0..10), &(9..20)) && overlap(&(5..6), &(0..10)));
        assert!(!overlap(&(0..10), &(10..20)) && !overlap(&(10..20), &(0..10)));
    }
}
