//! The factor ladder: what each mechanism of the pool adds. The machines are those of the product on every rung; what the mechanisms above a rung want done to the node is done there,
//! but takes no time and is not counted.

use std::collections::BTreeMap;

use aquifer_pool::SizeClass;
use aquifer_pool::op::{Action, WordAt};
use aquifer_pool::word::{LogOp, SpanWord};

use super::model::{Load, Outcome, Scene, play};
use super::ways::Way;
use super::words::Arrived;
use crate::bench::BenchError;
use crate::bench::support::progress;
use crate::bench::support::report::{Column, Row, Table};
use crate::bench::support::spread::Spread;

/// A rung; each has what those before it have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rung {
    /// Words of sections and spans, and CASes on them.
    Bitmap,
    /// Clients spread, avoid and mark what is contended, and read anew what may be stale.
    Contention,
    /// Each extent has a key, each span an owner.
    Keys,
    /// Who holds what is in the full log, and a closed span is not mistaken.
    Log,
    /// Who gives something back leaves its next key and its record there, and takes that first: ours.
    Reuse,
    /// A program has an agent, which keeps extents ready.
    Service,
}

impl Rung {
    /// From the lowest on.
    const ALL: [Self; 6] =
        [Self::Bitmap, Self::Contention, Self::Keys, Self::Log, Self::Reuse, Self::Service];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bitmap => "bitmap alone",
            Self::Contention => "+ contention control",
            Self::Keys => "+ windows (keys)",
            Self::Log => "+ log",
            Self::Reuse => "+ keys and records left",
            Self::Service => "+ service",
        }
    }

    /// Whether what is given back is left so that it can be taken again by one CAS.
    pub fn has_reuse(self) -> bool {
        self >= Self::Reuse
    }

    /// Whether clients keep out of each other's way.
    pub fn has_contention_control(self) -> bool {
        self >= Self::Contention
    }
}

/// Which mechanism wants something done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum For {
    Bitmap,
    Keys,
    Log,
}

/// What of an operation's actions counts on a rung.
#[derive(Clone, Debug)]
pub struct Account {
    rung: Rung,
    /// What the action before was, of those whose next is part of the same step.
    before: Before,
    /// What was asked for last is wanted by this mechanism.
    wanted_for: For,
    /// Words of sections were read: a survey that follows looks for room.
    searches: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Other,
    /// An entry of the log was looked at (L), and its word is next.
    LogEntry,
    /// A section's spans were looked at.
    Survey,
}

impl Account {
    /// Of one client.
    pub fn new(rung: Rung) -> Self {
        Self { rung, before: Before::Other, wanted_for: For::Bitmap, searches: false }
    }

    /// Another operation begins.
    pub fn begin(&mut self) {
        *self = Self::new(self.rung);
    }

    /// That is to be done next.
    pub fn note(&mut self, action: &Action) {
        let is_ready = |at: WordAt, desired: u64| {
            matches!(at, WordAt::Span(_))
                && SpanWord(desired).log().ok().flatten().is_some_and(|log| log.op == LogOp::Ready)
        };
        self.wanted_for = match *action {
            Action::Cas { at: WordAt::Key(_), .. }
            | Action::CasThen { at: WordAt::Key(_), .. }
            | Action::Strike(_)
            | Action::StrikeThen(_) => For::Keys,
            Action::Cas { at: WordAt::Log(_), .. } | Action::Probe { at: WordAt::Log(_) } => For::Log,
            // F6, and A0 of what another left.
            Action::Cas { at, desired, .. } if is_ready(at, desired) => For::Log,
            // The second look of L, and A0's at the section.
            Action::Probe { .. } if self.before != Before::Other => For::Log,
            // A0 wants to know whose spans are, and whether they are ready.
            Action::Survey { .. } if !self.searches => For::Keys,
            _ => For::Bitmap,
        };
        self.searches |= matches!(action, Action::Read { at: WordAt::Section(_), .. });
        self.before = match action {
            Action::Probe { at: WordAt::Log(_) } => Before::LogEntry,
            Action::Survey { .. } => Before::Survey,
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

    /// Whether nothing of what is to be done counts.
    pub fn is_left_out(&self, action: &Action) -> bool {
        !self.has(self.wanted_for) || self.spared(action) == operations(action)
    }

    /// Operations of an action that do not count.
    fn spared(&self, action: &Action) -> u64 {
        let (keys, log) = (u64::from(!self.has(For::Keys)), u64::from(!self.has(For::Log)));
        match action {
            // Whether the log tells of what is given back.
            Action::CasThen { then: WordAt::Log(_), .. } => log,
            // The entry that says whose the span is.
            Action::CasThen { .. } => keys,
            Action::Survey { count, .. } => keys * u64::from(*count),
            Action::Write(writes) | Action::WriteThen { writes, .. } => {
                let of = |part: aquifer_pool::op::Part| match part.at {
                    WordAt::Key(_) => keys,
                    WordAt::Log(_) => log,
                    WordAt::Section(_) | WordAt::Span(_) => 0,
                };
                writes.parts().map(of).sum()
            }
            // Whether the log tells of what is given back.
            Action::StrikeThen(_) => log,
            // The owner and the keys; the records.
            Action::PlantThen { .. } => 2 * keys + log,
            _ => 0,
        }
    }

    /// What counts of that.
    pub fn charge(&self, action: &Action, arrived: Arrived) -> Arrived {
        if !self.has(self.wanted_for) {
            return Arrived::default();
        }
        Arrived { operations: arrived.operations - self.spared(action).min(arrived.operations), ..arrived }
    }
}

fn operations(action: &Action) -> u64 {
    match action {
        Action::Cas { .. } | Action::Probe { .. } | Action::Read { .. } => 1,
        Action::CasThen { .. } | Action::CasProbe { .. } => 2,
        Action::Survey { count, .. } => 1 + u64::from(*count),
        Action::Write(writes) => writes.parts().count() as u64,
        Action::WriteThen { writes, .. } => writes.parts().count() as u64 + 1,
        Action::PlantThen { plant, .. } => plant.writes().count() as u64 + 1,
        Action::Chain(chain) => chain.swaps().count() as u64,
        Action::Strike(strikes) => strikes.swaps().count() as u64,
        Action::StrikeThen(strikes) => strikes.swaps().count() as u64 + 1,
    }
}

/// 4 KiB and 64 KiB, by few clients and by many.
const CASES: [(u8, usize); 4] = [(0, 16), (0, 128), (4, 16), (4, 128)];

/// A table for each case.
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
            let scene = Scene { way: Way::Part(rung), clients, nodes: 1, sections };
            let outcomes: Result<Vec<Outcome>, String> =
                (0..seeds).map(|seed| play(&scene, &Load::Closed { class, allocations }, seed)).collect();
            let outcomes = outcomes.map_err(|reason| BenchError::Allocator { reason })?;
            rows.push(row(rung, &outcomes));
            bar.inc(1);
        }
        tables.push(Table {
            title: format!("the ladder, under the model: {} KiB, {clients} clients", 4u64 << k),
            columns: ["mean µs", "p99 µs", "trips", "CASes", "CASes in vain", "free µs"]
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

fn row(rung: Rung, outcomes: &[Outcome]) -> Row {
    let figure = |of: &dyn Fn(&Outcome) -> f64| Spread::of(&outcomes.iter().map(of).collect::<Vec<f64>>());
    let figures = [
        ("mean µs", figure(&Outcome::mean_us)),
        ("p99 µs", figure(&|of| of.permille_us(990))),
        ("trips", figure(&|of| of.each(of.trips))),
        ("CASes", figure(&|of| of.each(of.swaps))),
        ("CASes in vain", figure(&|of| of.each(of.lost))),
        ("free µs", figure(&Outcome::free_us)),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: rung.name().into(), figures }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(way: Way) -> Outcome {
        let scene = Scene { way, clients: 16, nodes: 1, sections: 1536 };
        play(&scene, &Load::Closed { class: SizeClass::CHUNK, allocations: 2000 }, 1).unwrap()
    }

    #[test]
    fn each_mechanism_costs_what_it_does() {
        let all = Rung::ALL.map(|rung| played(Way::Part(rung)));
        let [bitmap, contention, keys, log, reuse, service] = &all;
        let trips = |of: &Outcome| of.each(of.trips);
        assert!(bitmap.lost > contention.lost, "{} and {} CASes in vain", bitmap.lost, contention.lost);
        assert!(trips(keys) > trips(contention) + 0.9, "the key is written by a trip of its own");
        let us = |of: &Outcome| (of.mean_us(), of.free_us());
        assert!(
            log.mean_us() > keys.mean_us() && log.free_us() >= keys.free_us(),
            "{:?} {:?}",
            us(log),
            us(keys)
        );
        assert!(trips(reuse) < trips(log) - 0.9, "key and record are there");
        assert_eq!(service.trips, 0, "what was given back is ready");
    }

    #[test]
    fn without_the_service_it_is_ours() {
        let (ours, part) = (played(Way::Ours), played(Way::Part(Rung::Reuse)));
        assert_eq!(ours.latencies_ns, part.latencies_ns);
        assert_eq!((ours.trips, ours.swaps, ours.free_ns), (part.trips, part.swaps, part.free_ns));
    }
}
