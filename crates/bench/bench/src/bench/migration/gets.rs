//! Figure 4: gets of a map before and after it is handed over.

use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Series, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_client::segments::Process;
use aquifer_containers::{Map, Owned};
use foldhash::quality::FixedState;
use hashbrown::HashMap;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::hosts::Hosts;
use super::pages::read_mib_s;
use super::player::{self, Mode, PEER_TIMEOUT, Play, now_ns, segment_error};

const MAP: u64 = 60;
const VALUE_BYTES: usize = 128;
/// The time that one point of the figure covers.
const SLICE: Duration = Duration::from_millis(100);
/// Duration of the gets before the hand-over, and after it.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(3);
/// Rounds of the comparison with a map on the heap, and gets of each round.
const ROUNDS: usize = 7;
const GETS: u64 = 300_000;
const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// Points after the first get in the target that the table shows.
const FIRST_SLICES: usize = 5;
const COLUMNS: [&str; 6] = [
    "longest gap ms",
    "mean µs, first 0.5 s",
    "p95 µs, first 0.5 s",
    "p95 µs before",
    "elevated s",
    "map ÷ heap",
];

type Value = [u8; VALUE_BYTES];
type TheMap = Map<u64, Value>;

/// Gets of one `SLICE`.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Slice {
    began_ns: u64,
    mean_us: f64,
    p95_us: f64,
}

/// Results of the source.
#[derive(Serialize, Deserialize)]
pub struct Source {
    slices: Vec<Slice>,
    longest_gap_ns: u64,
    last_ns: u64,
    /// The time of a get on the heap ÷ that of one in the segment, for each round.
    of_heap: Vec<f64>,
}

/// Results of the target.
#[derive(Serialize, Deserialize)]
pub struct TargetResult {
    slices: Vec<Slice>,
    longest_gap_ns: u64,
    first_ns: u64,
    /// Rate at which all pages were pulled before the first get; `None` if they were not.
    pull_mib_s: Option<f64>,
}

/// Tables, series and targets of the figure.
pub struct Figure {
    pub tables: Vec<Table>,
    pub series: Vec<Series>,
    pub targets: Vec<Target>,
}

/// Measures gets with each mode of pulling.
pub fn figure(hosts: &Hosts, is_quick: bool) -> Result<Figure, BenchError> {
    let entries = if is_quick { 100_000 } else { 1_000_000 };
    let (mut rows, mut series, mut of_heap) = (Vec::new(), Vec::new(), Vec::new());
    let mut pull = None;
    let modes = [("on touch", Mode::OnTouch), ("ahead", Mode::Ahead), ("stop and copy", Mode::StopAndCopy)];
    for (name, mode) in modes {
        interrupt::check()?;
        let plays = [Play::Source { entries }, Play::Target { entries, mode }];
        let (source, target): (Source, TargetResult) = player::run(hosts.agents(), plays)?;
        let shown = Shown::of(&source, &target);
        series.extend(shown.series(name));
        rows.push(Row {
            name: name.into(),
            figures: COLUMNS.into_iter().zip(shown.figures(&source)).collect(),
        });
        of_heap.extend(source.of_heap);
        pull = target.pull_mib_s.or(pull);
    }
    let figure = Table {
        title: format!("figure 4: gets of a map of {entries} keys that is handed over"),
        columns: COLUMNS.map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    };
    let bytes = segment_bytes(entries);
    let reads = read_mib_s(bytes.min(256 << 20))?;
    let pull = pull.ok_or_else(|| segment_error("nothing was pulled"))?;
    let pulls = Table {
        title: "all pages of the map's segment".into(),
        columns: ["pull MiB/s", "READs MiB/s", "pull ÷ READs"].map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows: vec![Row {
            name: "4 KiB pages".into(),
            figures: [
                ("pull MiB/s", Spread::one(pull)),
                ("READs MiB/s", Spread::one(reads)),
                ("pull ÷ READs", Spread::one(pull / reads)),
            ]
            .into(),
        }],
    };
    let targets = vec![
        Target { name: "pull ÷ READs".into(), value: Spread::one(pull / reads), bound: 0.8, at_most: false },
        Target {
            name: "gets of a map in a segment ÷ on the heap".into(),
            value: Spread::of(&of_heap).ok_or_else(|| segment_error("nothing was measured"))?,
            bound: 0.98,
            at_most: false,
        },
    ];
    Ok(Figure { tables: vec![figure, pulls], series, targets })
}

/// The gets of both processes, by time.
struct Shown {
    /// Slices with their times relative to the hand-over, in s.
    slices: Vec<(f64, Slice)>,
    longest_gap_ms: f64,
}

impl Shown {
    fn of(source: &Source, target: &TargetResult) -> Self {
        let moved = source.last_ns;
        let slices = source.slices.iter().chain(&target.slices).map(|slice| {
            let after =
                float(slice.began_ns.saturating_sub(moved)) - float(moved.saturating_sub(slice.began_ns));
            (after / 1e9, *slice)
        });
        let gap = target.first_ns.saturating_sub(source.last_ns);
        let longest = gap.max(source.longest_gap_ns).max(target.longest_gap_ns);
        Self { slices: slices.collect(), longest_gap_ms: float(longest) / 1e6 }
    }

    fn series(&self, name: &str) -> Vec<Series> {
        let line = |title: &str, value: fn(&Slice) -> f64| Series {
            title: title.into(),
            name: name.into(),
            points: self.slices.iter().map(|(at, slice)| (*at, value(slice))).collect(),
        };
        vec![
            line("mean of a get in µs, by s from the hand-over", |slice| slice.mean_us),
            line("p95 of a get in µs, by s from the hand-over", |slice| slice.p95_us),
        ]
    }

    fn figures(&self, source: &Source) -> [Spread; 6] {
        let median = |values: Vec<f64>| Spread::of(&values).map_or(f64::NAN, |spread| spread.median);
        let before =
            median(self.slices.iter().filter(|(at, _)| *at < -0.1).map(|(_, slice)| slice.p95_us).collect());
        let mean_before =
            median(self.slices.iter().filter(|(at, _)| *at < -0.1).map(|(_, slice)| slice.mean_us).collect());
        let first: Vec<&Slice> = self
            .slices
            .iter()
            .filter(|(at, _)| *at > 0.0)
            .take(FIRST_SLICES)
            .map(|(_, slice)| slice)
            .collect();
        let greatest =
            |value: fn(&Slice) -> f64| first.iter().map(|slice| value(slice)).fold(f64::NAN, f64::max);
        let elevated =
            self.slices.iter().filter(|(at, slice)| *at > 0.0 && slice.mean_us > 1.5 * mean_before);
        let elevated = elevated.map(|(at, _)| at + SLICE.as_secs_f64()).fold(0.0, f64::max);
        [
            Spread::one(self.longest_gap_ms),
            Spread::one(greatest(|slice| slice.mean_us)),
            Spread::one(greatest(|slice| slice.p95_us)),
            Spread::one(before),
            Spread::one(elevated),
            Spread::of(&source.of_heap).unwrap_or(Spread::one(f64::NAN)),
        ]
    }
}

/// The segment's length: a hash table has up to twice as many places as keys.
fn segment_bytes(entries: u64) -> u64 {
    (entries * 2).next_power_of_two() * 160 + (1 << 20)
}

fn value_of(key: u64) -> Value {
    let mut value = [0; VALUE_BYTES];
    value[..8].copy_from_slice(&key.to_le_bytes());
    value
}

/// Creates the map, gets keys, and hands the map over.
pub fn play_source(process: &Process, peer: &str, entries: u64) -> Result<Source, BenchError> {
    let capacity = usize::try_from(entries).map_err(segment_error)?;
    let mut map: Owned<TheMap> = Owned::create(process, MAP, segment_bytes(entries), |allocator| {
        Map::with_capacity(allocator, capacity)
    })
    .map_err(segment_error)?;
    let mut heap = HashMap::with_capacity_and_hasher(capacity, FixedState::with_seed(4));
    for key in 0..entries {
        map.insert(key, value_of(key)).map_err(segment_error)?;
        heap.insert(key, value_of(key));
    }
    let of_heap = compare(&map, &heap, entries);
    drop(heap);
    let began = Instant::now();
    while let Err(error) = map.connect(peer) {
        if began.elapsed() > PEER_TIMEOUT {
            return Err(segment_error(error));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let gets = Gets::run(&map, entries, BEFORE)?;
    // SAFETY: nothing was moved out of the segment.
    unsafe { map.transfer() }.map_err(|failure| segment_error(failure.error))?;
    Ok(Source { slices: gets.slices, longest_gap_ns: gets.longest_gap_ns, last_ns: gets.last_ns, of_heap })
}

/// Receives the map, and gets keys.
pub fn play_target(process: &Process, entries: u64, mode: Mode) -> Result<TargetResult, BenchError> {
    if mode == Mode::StopAndCopy {
        return play_stopped(process, entries);
    }
    let received = Owned::<TheMap>::receive(process, mode.pulling(), PEER_TIMEOUT);
    let map = received.map_err(segment_error)?.ok_or_else(|| segment_error("nothing was handed over"))?;
    let first_ns = now_ns();
    let gets = Gets::run(&map, entries, AFTER)?;
    // SAFETY: nothing was moved out of the segment.
    unsafe { map.deallocate() }.map_err(segment_error)?;
    Ok(TargetResult { slices: gets.slices, longest_gap_ns: gets.longest_gap_ns, first_ns, pull_mib_s: None })
}

/// Receives the map, and pulls all pages before the first get.
fn play_stopped(process: &Process, entries: u64) -> Result<TargetResult, BenchError> {
    let received = process.receive(Mode::StopAndCopy.pulling(), PEER_TIMEOUT).map_err(segment_error)?;
    let segment = received.ok_or_else(|| segment_error("nothing was handed over"))?;
    let began = Instant::now();
    segment.close().map_err(segment_error)?;
    let mib = float(segment.bytes() as u64) / f64::from(1 << 20);
    let pull_mib_s = Some(mib / began.elapsed().as_secs_f64());
    let map = Owned::<TheMap>::open(segment).map_err(segment_error)?;
    let first_ns = now_ns();
    let gets = Gets::run(&map, entries, AFTER)?;
    // SAFETY: nothing was moved out of the segment.
    unsafe { map.deallocate() }.map_err(segment_error)?;
    Ok(TargetResult { slices: gets.slices, longest_gap_ns: gets.longest_gap_ns, first_ns, pull_mib_s })
}

/// Time of gets on the heap ÷ time of the same gets in the segment, for each round.
fn compare(map: &TheMap, heap: &HashMap<u64, Value, FixedState>, entries: u64) -> Vec<f64> {
    let time = |get: &dyn Fn(u64) -> u8| {
        let mut random = Random::new(7);
        let began = Instant::now();
        let sum: u64 = (0..GETS).map(|_| u64::from(get(random.word_below(entries)))).sum();
        std::hint::black_box(sum);
        began.elapsed().as_secs_f64()
    };
    let of = |value: Option<&Value>| value.map_or(0, |value| value[0]);
    let round = |_| time(&|key| of(heap.get(&key))) / time(&|key| of(map.get(&key)));
    (0..ROUNDS).map(round).collect()
}

/// Results of gets, over time.
struct Gets {
    slices: Vec<Slice>,
    longest_gap_ns: u64,
    last_ns: u64,
}

impl Gets {
    /// Gets random keys for some time, and checks the values.
    fn run(map: &TheMap, entries: u64, time: Duration) -> Result<Self, BenchError> {
        let mut random = Random::new(5);
        let mut histogram = Histogram::<u64>::new_with_max(LATENCY_NS_MAX, 3).map_err(segment_error)?;
        let mut gets = Self { slices: Vec::new(), longest_gap_ns: 0, last_ns: now_ns() };
        let end = gets.last_ns + u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let slice_ns = u64::try_from(SLICE.as_nanos()).unwrap_or(u64::MAX);
        let mut began = gets.last_ns;
        while gets.last_ns < end {
            let key = random.word_below(entries);
            let found = map.get(&key);
            if found.is_none_or(|value| value[..8] != key.to_le_bytes()) {
                return Err(segment_error(format!("key {key} has another value")));
            }
            let now = now_ns();
            let took = now - gets.last_ns;
            gets.longest_gap_ns = gets.longest_gap_ns.max(took);
            gets.last_ns = now;
            histogram.saturating_record(took);
            if now - began >= slice_ns {
                gets.slices.push(Slice {
                    began_ns: began,
                    mean_us: histogram.mean() / 1e3,
                    p95_us: float(histogram.value_at_quantile(0.95)) / 1e3,
                });
                histogram.reset();
                gets.last_ns = now_ns();
                began = gets.last_ns;
            }
        }
        Ok(gets)
    }
}
