//! The ladder: the cost of each mechanism of the pool.
//!
//! Every rung runs the product's state machines. Operations of mechanisms above the rung are
//! carried out, but take no time and are not counted.

use std::collections::BTreeMap;

use aquifer_bench::BenchError;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Row, Table};
use aquifer_bench::support::spread::Spread;
use aquifer_pool::SizeClass;
use aquifer_pool::op::{Action, WordAccess, WordAt};
use aquifer_pool::word::{LogOp, SpanWord};

use super::allocators::Allocator;
use super::model::{Load, ModelResult, Scene, play};
use super::words::Arrived;

/// A rung. Each includes the mechanisms of those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rung {
    /// Control words of sections and spans, and CASes on them.
    Bitmap,
    /// Contention control: clients start at different spans, mark and avoid contended ones, and
    /// re-read stale words.
    Contention,
    /// Keys of extents, and owners of spans.
    Keys,
    /// The full log and the record *ready*: the whole pool.
    Log,
    /// The agent's service, with a stock of extents.
    Service,
}

impl Rung {
    /// All rungs from the lowest.
    const ALL: [Self; 5] = [Self::Bitmap, Self::Contention, Self::Keys, Self::Log, Self::Service];

    /// Name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bitmap => "bitmap alone",
            Self::Contention => "+ contention control",
            Self::Keys => "+ windows (keys)",
            Self::Log => "+ log",
            Self::Service => "+ service",
        }
    }

    /// Whether the rung has contention control.
    pub fn has_contention_control(self) -> bool {
        self >= Self::Contention
    }
}

/// The mechanism that an operation belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum For {
    Bitmap,
    Keys,
    Log,
}

/// Decides which operations count on a rung.
#[derive(Clone, Debug)]
pub struct Account {
    rung: Rung,
    /// The previous action, if the next one may belong to the same step.
    before: Before,
    /// The mechanism that the current action belongs to.
    wanted_for: For,
    /// Whether words of sections were read, so that a following survey searches for free memory.
    searches: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Other,
    /// An entry of the log was read (step L), and its word is next.
    LogEntry,
    /// The spans of a section were read.
    Survey,
}

impl Account {
    /// The account of one client.
    pub fn new(rung: Rung) -> Self {
        Self { rung, before: Before::Other, wanted_for: For::Bitmap, searches: false }
    }

    /// Starts the account of another operation.
    pub fn begin(&mut self) {
        *self = Self::new(self.rung);
    }

    /// Records the next action of the operation.
    pub fn note(&mut self, action: &Action) {
        let is_ready = |at: WordAt, desired: u64| {
            matches!(at, WordAt::Span(_))
                && SpanWord(desired).log().ok().flatten().is_some_and(|log| log.op == LogOp::Ready)
        };
        let first = action.accesses().iter().find(|access| !matches!(access, WordAccess::Write { .. }));
        let is_survey = action.accesses().len() > 1 && matches!(first, Some(WordAccess::Read { .. }));
        self.wanted_for = match first.copied() {
            Some(WordAccess::Cas { at: WordAt::Key(_), .. }) => For::Keys,
            Some(WordAccess::Cas { at: WordAt::Log(_), .. } | WordAccess::Probe { at: WordAt::Log(_) }) => {
                For::Log
            }
            // F6, and A0 of a span that another client has emptied.
            Some(WordAccess::Cas { at, desired, .. }) if is_ready(at, desired) => For::Log,
            // The second read of L, and A0's read of the section.
            Some(WordAccess::Probe { .. }) if self.before != Before::Other => For::Log,
            // A0 reads the owners of the spans, and whether they are ready.
            Some(WordAccess::Read { .. }) if is_survey && !self.searches => For::Keys,
            _ => For::Bitmap,
        };
        self.searches |= matches!(first, Some(WordAccess::Read { at: WordAt::Section(_), .. }));
        self.before = match first {
            Some(WordAccess::Probe { at: WordAt::Log(_) }) => Before::LogEntry,
            _ if is_survey => Before::Survey,
            _ => Before::Other,
        };
    }

    fn has(&self, what: For) -> bool {
        match what {
            For::Bitmap => true,
            For::Keys => self.rung >= Rung::Keys,
            For::Log => self.rung >= Rung::Log,
        }
    }

    /// Whether no operation of an action counts on this rung.
    pub fn is_left_out(&self, action: &Action) -> bool {
        !self.has(self.wanted_for) || self.spared(action) == action.accesses().len() as u64
    }

    /// Operations of an action that do not count: READs and WRITEs of keys or logs that the rung
    /// does not have.
    fn spared(&self, action: &Action) -> u64 {
        let is_spared = |access: &&WordAccess| match access {
            WordAccess::Read { at, .. } | WordAccess::Write { at, .. } => match at {
                WordAt::Key(_) => !self.has(For::Keys),
                WordAt::Log(_) => !self.has(For::Log),
                WordAt::Section(_) | WordAt::Span(_) => false,
            },
            WordAccess::Cas { .. } | WordAccess::Probe { .. } => false,
        };
        action.accesses().iter().filter(is_spared).count() as u64
    }

    /// The part of an action's operations that counts on this rung.
    pub fn charge(&self, action: &Action, arrived: Arrived) -> Arrived {
        if !self.has(self.wanted_for) {
            return Arrived::default();
        }
        Arrived { operations: arrived.operations - self.spared(action), ..arrived }
    }
}

/// Sizes and numbers of clients: 4 KiB and 64 KiB, few clients and many.
const CASES: [(u8, usize); 4] = [(0, 16), (0, 128), (4, 16), (4, 128)];

/// Measures, and returns a table for each case.
///
/// # Errors
/// If an allocator fails.
pub fn measure(sections: u32, allocations: usize, seeds: u64) -> Result<Vec<Table>, BenchError> {
    let bar = progress::bar(CASES.len() * Rung::ALL.len());
    let mut tables = Vec::new();
    for (k, clients) in CASES {
        let class = SizeClass::new(k).unwrap_or(SizeClass::CHUNK);
        let mut rows = Vec::new();
        for rung in Rung::ALL {
            bar.set_message(format!("the ladder: {}", rung.name()));
            let scene = Scene { allocator: Allocator::Part(rung), clients, nodes: 1, sections };
            let outcomes: Result<Vec<ModelResult>, String> =
                (0..seeds).map(|seed| play(&scene, &Load::Closed { class, allocations }, seed)).collect();
            let outcomes = outcomes.map_err(|reason| BenchError::Allocator { reason })?;
            rows.push(row(rung, &outcomes));
            bar.inc(1);
        }
        tables.push(Table {
            title: format!("the ladder, under the model: {} KiB, {clients} clients", 4u64 << k),
            columns: ["mean µs", "p99 µs", "trips", "CASes", "failed CASes", "free µs"]
                .map(Column::middle)
                .to_vec(),
            pictured: Some("mean µs"),
            ratio: None,
            rows,
        });
    }
    bar.finish_and_clear();
    Ok(tables)
}

fn row(rung: Rung, outcomes: &[ModelResult]) -> Row {
    let figure =
        |of: &dyn Fn(&ModelResult) -> f64| Spread::of(&outcomes.iter().map(of).collect::<Vec<f64>>());
    let figures = [
        ("mean µs", figure(&ModelResult::mean_us)),
        ("p99 µs", figure(&|of| of.permille_us(990))),
        ("trips", figure(&|of| of.each(of.trips))),
        ("CASes", figure(&|of| of.each(of.swaps))),
        ("failed CASes", figure(&|of| of.each(of.lost))),
        ("free µs", figure(&ModelResult::free_us)),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: rung.name().into(), figures }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(allocator: Allocator) -> ModelResult {
        let scene = Scene { allocator, clients: 16, nodes: 1, sections: 1536 };
        play(&scene, &Load::Closed { class: SizeClass::CHUNK, allocations: 2000 }, 1).unwrap()
    }

    #[test]
    fn each_mechanism_has_its_cost() {
        let all = Rung::ALL.map(|rung| played(Allocator::Part(rung)));
        let [bitmap, contention, keys, log, service] = &all;
        let trips = |of: &ModelResult| of.each(of.trips);
        assert!(bitmap.lost > contention.lost, "{} and {} failed CASes", bitmap.lost, contention.lost);
        assert!(trips(keys) > trips(contention) + 0.9, "the key is written by a trip of its own");
        let us = |of: &ModelResult| (of.mean_us(), of.free_us());
        assert!(
            log.mean_us() > keys.mean_us() && log.free_us() >= keys.free_us(),
            "{:?} {:?}",
            us(log),
            us(keys)
        );
        assert_eq!(service.trips, 0, "a freed extent is in stock");
    }

    #[test]
    fn the_rung_below_the_service_costs_as_much_as_the_pool() {
        let (ours, part) = (played(Allocator::Pool), played(Allocator::Part(Rung::Log)));
        assert_eq!(ours.latencies_ns, part.latencies_ns);
        assert_eq!((ours.trips, ours.swaps, ours.free_ns), (part.trips, part.swaps, part.free_ns));
    }
}
