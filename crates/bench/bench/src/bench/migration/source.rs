//! The cost of pulling for the source: the speed that its programs keep, and the processor time of
//! its agent.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::interrupt;
use aquifer_bench::support::random::Random;
use aquifer_bench::support::report::{Column, Row, Table, Target};
use aquifer_bench::support::spread::Spread;
use aquifer_client::segments::{Process, Pulling};
use serde::{Deserialize, Serialize};

use super::hosts::Hosts;
use super::player::{self, PEER_TIMEOUT, Play, now_ns, segment_error};

const SEGMENT: u64 = 70;
/// The pull rate of the second row.
const RATE: &str = "64M";
const MIB: u64 = 1 << 20;
/// Duration of the source's work before the hand-over, and after it.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(3);
/// Time that one count of the source's work covers.
const SLICE: Duration = Duration::from_millis(20);
/// Words of the memory in which the source works: more than processor caches hold.
const WORDS: u64 = 8 << 20;
/// Steps of work between two readings of the clock.
const STEPS: u32 = 1000;
/// Interval of attempts to connect, and of checks whether all pages have arrived.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const COLUMNS: [&str; 3] = ["pull MiB/s", "source keeps", "agent's CPU s per GiB"];

/// Counts of the source's work, each with its start time in ns.
#[derive(Serialize, Deserialize)]
pub struct Work(Vec<(u64, u32)>);

/// When the first and the last page arrived.
#[derive(Serialize, Deserialize)]
pub struct Pulled {
    began_ns: u64,
    ended_ns: u64,
}

/// Measures without a limit, and with one.
pub fn table(is_quick: bool) -> Result<(Table, Vec<Target>), BenchError> {
    let mut rows = Vec::new();
    let mut kept = f64::NAN;
    let sizes = if is_quick { [64 * MIB, 32 * MIB] } else { [512 * MIB, 128 * MIB] };
    for (name, rate, bytes) in [("no limit", None, sizes[0]), ("64 MiB/s", Some(RATE), sizes[1])] {
        interrupt::check()?;
        let hosts = Hosts::start(rate)?;
        let before = hosts.agent_cpu_s();
        let plays = [Play::Give { bytes }, Play::Follow];
        let (work, pulled): (Work, Pulled) = player::run(hosts.agents(), plays)?;
        let cpu_s = hosts.agent_cpu_s() - before;
        let seconds = float(pulled.ended_ns - pulled.began_ns) / 1e9;
        kept = work.kept(&pulled);
        let gib = float(bytes) / f64::from(1 << 30);
        let figures = [Spread::one(gib * 1024.0 / seconds), Spread::one(kept), Spread::one(cpu_s / gib)];
        rows.push(Row { name: name.into(), figures: COLUMNS.into_iter().zip(figures).collect() });
    }
    let table = Table {
        title: "what pulling ahead costs the source, by --segment-pull-rate of the target".into(),
        columns: COLUMNS.map(Column::middle).to_vec(),
        pictured: None,
        ratio: None,
        rows,
    };
    let value = Spread::one(kept);
    let target =
        Target { name: "speed that the source keeps at 64 MiB/s".into(), value, bound: 0.95, at_most: false };
    Ok((table, vec![target]))
}

impl Work {
    /// Rate of work while pages were pulled ÷ rate before the hand-over.
    fn kept(&self, pulled: &Pulled) -> f64 {
        let slice_ns = u64::try_from(SLICE.as_nanos()).unwrap_or(u64::MAX);
        let mean = |is_wanted: &dyn Fn(u64) -> bool| {
            let counts: Vec<f64> = self
                .0
                .iter()
                .filter(|(began, _)| is_wanted(*began))
                .map(|(_, count)| f64::from(*count))
                .collect();
            counts.iter().sum::<f64>() / float(counts.len() as u64)
        };
        let meanwhile = mean(&|began| began >= pulled.began_ns && began + slice_ns <= pulled.ended_ns);
        meanwhile / mean(&|began| began + slice_ns < pulled.began_ns)
    }
}

/// Works, hands a segment over, and continues to work.
pub fn transfer_segment(process: &Process, peer: &str, bytes: u64) -> Result<Work, BenchError> {
    let segment = process.allocate(SEGMENT, bytes).map_err(segment_error)?;
    segment.words().iter().step_by(512).for_each(|word| word.store(1, Relaxed));
    let began = Instant::now();
    while let Err(error) = segment.connect(peer) {
        if began.elapsed() > PEER_TIMEOUT {
            return Err(segment_error(error));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let mut words = vec![1_u64; usize::try_from(WORDS).map_err(segment_error)?];
    let mut work = Work(Vec::new());
    let mut random = Random::new(3);
    work.run_for(&mut words, &mut random, BEFORE);
    segment.transfer().map_err(|failure| segment_error(failure.error))?;
    work.run_for(&mut words, &mut random, AFTER);
    Ok(work)
}

impl Work {
    fn run_for(&mut self, words: &mut [u64], random: &mut Random, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let (began, began_ns) = (Instant::now(), now_ns());
            let mut count = 0;
            while began.elapsed() < SLICE {
                for _ in 0..STEPS {
                    let at = usize::try_from(random.word_below(WORDS)).unwrap_or(0);
                    words[at] = words[at].wrapping_mul(3);
                }
                count += 1;
            }
            self.0.push((began_ns, count));
        }
        std::hint::black_box(words);
    }
}

/// Receives a segment, and waits until all pages have arrived.
pub fn receive_pages(process: &Process) -> Result<Pulled, BenchError> {
    let received = process.receive(Pulling::Ahead, PEER_TIMEOUT).map_err(segment_error)?;
    let segment = received.ok_or_else(|| segment_error("nothing was handed over"))?;
    let began_ns = now_ns();
    while process.list().map_err(segment_error)?.iter().any(|status| status.missing_bytes > 0) {
        std::thread::sleep(POLL_INTERVAL);
    }
    let ended_ns = now_ns();
    segment.deallocate().map_err(segment_error)?;
    Ok(Pulled { began_ns, ended_ns })
}
