//! Gets over time, while partitions move: latencies by stage, and the dip of the throughput.

use std::ops::Range;
use std::time::Duration;

use aquifer_bench::support::bytes::float;

use super::cluster::Moved;
use super::samples::{Latencies, Sample, Windows, duration_us, overlap};

/// Length of a window.
pub const WINDOW: Duration = Duration::from_millis(100);
/// A window is part of a dip if its rate is below this part of the rate before the moves.
const DIP_PART: f64 = 0.9;
/// Time after a move in which a dip is searched.
const DIP_TIME: Duration = Duration::from_secs(1);

/// Gets, and the moves that were made meanwhile.
#[derive(Debug)]
pub struct Timeline {
    /// Samples in the order of the answers.
    pub samples: Vec<Sample>,
    pub moves: Vec<Moved>,
    /// When each move began and ended, in µs since the start of the measurement.
    pub times: Vec<Range<u32>>,
    /// Moves that the balancer made.
    pub other_moves: u64,
}

/// Position of a window relative to the moves. A window that overlaps a move is `InMoves`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    Before,
    InMoves,
    After,
}

/// The throughput of all clients, in gets a second.
#[derive(Clone, PartialEq, Debug)]
pub struct Throughput {
    /// The mean before the first move.
    pub before: f64,
    /// The mean of the windows that overlap a move, for each move.
    pub in_moves: Vec<f64>,
    pub dip: Dip,
}

/// Windows with a low rate, within a second of a move.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Dip {
    /// The greatest difference to the rate before, in % of it.
    pub depth_percent: f64,
    pub width_ms: f64,
    /// The sum of all differences, each multiplied with its window's length.
    pub area_percent_ms: f64,
}

impl Timeline {
    /// All gets by windows.
    pub fn windows(&self) -> Windows<'_> {
        Windows::of(&self.samples, WINDOW)
    }

    /// The latencies of a server in the windows of a stage.
    pub fn latencies(&self, server: usize, stage: Stage) -> Latencies {
        let windows = self.windows();
        let wanted = windows.iter().filter(|(time, _)| self.stage(time) == stage);
        let samples = wanted.flat_map(|(_, samples)| samples);
        Latencies::of(samples.filter(|sample| sample.server == server))
    }

    /// The throughput by stage.
    pub fn throughput(&self) -> Throughput {
        let windows = self.windows();
        let rates: Vec<(Range<u32>, f64)> =
            windows.iter().map(|(time, samples)| (time, windows.rate(samples))).collect();
        let before = mean_rate(&rates, |time| self.stage(time) == Stage::Before);
        let in_move = |of_move: &Range<u32>| mean_rate(&rates, |time| overlap(of_move, time));
        let near = rates.iter().filter(|(time, _)| self.may_dip(time)).map(|(_, rate)| *rate);
        Throughput { before, in_moves: self.times.iter().map(in_move).collect(), dip: Dip::of(near, before) }
    }

    fn stage(&self, time: &Range<u32>) -> Stage {
        if self.times.iter().any(|of_move| overlap(of_move, time)) {
            Stage::InMoves
        } else if self.times.first().is_none_or(|first| time.end <= first.start) {
            Stage::Before
        } else {
            Stage::After
        }
    }

    /// Whether a window is within a move, or soon after one.
    fn may_dip(&self, time: &Range<u32>) -> bool {
        let soon = duration_us(DIP_TIME);
        self.times.iter().any(|of_move| overlap(&(of_move.start..of_move.end + soon), time))
    }
}

impl Dip {
    /// The dip of windows with these rates, relative to the rate before the moves.
    fn of(rates: impl Iterator<Item = f64>, before: f64) -> Self {
        let window_ms = WINDOW.as_secs_f64() * 1e3;
        let mut dip = Self::default();
        for rate in rates.filter(|rate| *rate < DIP_PART * before) {
            let percent = 100.0 * (1.0 - rate / before);
            dip.depth_percent = dip.depth_percent.max(percent);
            dip.width_ms += window_ms;
            dip.area_percent_ms += percent * window_ms;
        }
        dip
    }
}

/// The mean of the rates of some windows; not a number if there are none.
fn mean_rate(rates: &[(Range<u32>, f64)], is_wanted: impl Fn(&Range<u32>) -> bool) -> f64 {
    let wanted: Vec<f64> = rates.iter().filter(|(time, _)| is_wanted(time)).map(|(_, rate)| *rate).collect();
    wanted.iter().sum::<f64>() / float(wanted.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW_US: u32 = 100_000;

    /// Moves in the windows 10 and 20.
    fn timeline(samples: Vec<Sample>) -> Timeline {
        let times = [10, 20].map(|window| window * WINDOW_US + 10..window * WINDOW_US + 20).to_vec();
        Timeline { samples, moves: Vec::new(), times, other_moves: 0 }
    }

    /// Samples by the count for each window. Latencies in µs are the number of the window.
    fn samples(counts: impl Iterator<Item = u32>) -> Vec<Sample> {
        let window = |(window, count): (u32, u32)| {
            (0..count).map(move |at| Sample {
                server: 0,
                ended_us: window * WINDOW_US + at,
                latency_ns: window * 1000,
            })
        };
        (0..).zip(counts).flat_map(window).collect()
    }

    #[test]
    fn stages_are_by_the_moves() {
        let timeline = timeline(Vec::new());
        let stage = |window: u32| timeline.stage(&(window * WINDOW_US..(window + 1) * WINDOW_US));
        assert_eq!([9, 10, 11, 20, 21].map(stage), {
            use Stage::{After, Before, InMoves};
            [Before, InMoves, After, InMoves, After]
        });
        let may_dip = |window: u32| timeline.may_dip(&(window * WINDOW_US..(window + 1) * WINDOW_US));
        assert!(!may_dip(9) && may_dip(10) && may_dip(11) && may_dip(30) && !may_dip(31));
    }

    #[test]
    fn latencies_are_by_server_and_stage() {
        let timeline = timeline(samples([2; 30].into_iter()));
        let mean = |server, stage| timeline.latencies(server, stage).mean_us();
        assert_eq!((mean(0, Stage::Before), mean(0, Stage::InMoves)), (Some(4.5), Some(15.0)));
        assert_eq!(mean(1, Stage::InMoves), None);
    }

    #[test]
    fn throughput_in_moves_is_beside_that_before() {
        let counts = (0..30).map(|window| if window == 20 { 50 } else { 100 });
        let throughput = timeline(samples(counts)).throughput();
        assert!((throughput.before - 1000.0).abs() < 1e-6, "{throughput:?}");
        assert!((throughput.in_moves[1] - 500.0).abs() < 1e-6, "{throughput:?}");
        assert!((throughput.dip.area_percent_ms - 5000.0).abs() < 1e-6, "{throughput:?}");
    }

    #[test]
    fn a_dip_has_depth_and_width() {
        let dip = Dip::of([100.0, 50.0, 95.0, 75.0].into_iter(), 100.0);
        assert_eq!(dip, Dip { depth_percent: 50.0, width_ms: 200.0, area_percent_ms: 7500.0 });
        assert_eq!(Dip::of([90.0].into_iter(), 100.0), Dip::default());
    }
}
