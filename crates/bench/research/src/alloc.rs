//! `aquifer-research alloc`: the cost of allocating an extent under a cost model of RDMA, beside
//! peers, after the evaluation of FineMem (OSDI 2025; design.md, section 15).

pub mod allocators;
mod ladder;
mod metadata;
mod model;
mod pool_client;
mod recovery;
pub mod words;

use std::collections::BTreeMap;
use std::path::Path;

use aquifer_bench::BenchError;
use aquifer_bench::support::allocation_trace;
use aquifer_bench::support::bytes::float;
use aquifer_bench::support::progress;
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::{Spread, short};
use aquifer_pool::SizeClass;

use crate::ResearchArgs;
use allocators::Allocator;
use model::{Load, ModelResult, Scene, play};

/// Targets, for `aquifer-research list`.
pub const TARGETS: &str = "targets: under the cost model, at 16 clients and more, no slower than the best \
    peer, and ≤ 0.05 of registration on demand; CASes per allocation ≤ 1.1 (4 KiB), ≤ 1.6 (32 KiB), ≤ 2.1 \
    (64 KiB), retries ≤ 1.33 at 512 clients; metadata ≤ 0.45 %; recovery of a million chunks ≤ 2 s";

/// Size classes of the tables: 4 KiB, 32 KiB, 64 KiB, 128 KiB, 512 KiB and 2 MiB.
const CLASSES: [u8; 6] = [0, 3, 4, 5, 7, 9];
const CLIENTS: [usize; 5] = [1, 4, 16, 64, 128];
const NODES: [usize; 4] = [1, 2, 4, 6];
/// Clients in the tables that vary the number of nodes.
const CLIENTS_AT_NODES: usize = 64;
/// Clients in the tables with most contention.
const CLIENTS_MAX: usize = 512;
/// Clients that replay a trace.
const REPLAY_CLIENTS: usize = 16;
/// Sections of all nodes together: 3 GiB, on 1, 2, 4 or 6 nodes.
const SECTIONS: u32 = 1536;

/// Amount of work.
#[derive(Clone, Copy, Debug)]
struct Volume {
    allocations: usize,
    seeds: u64,
    rounds: usize,
}

/// Runs the bench.
///
/// # Errors
/// If an allocator fails.
pub fn run(args: &ResearchArgs) -> Result<Report, BenchError> {
    let volume = if args.quick {
        Volume { allocations: 4_000, seeds: 1, rounds: 1 }
    } else {
        Volume { allocations: 20_000, seeds: 3, rounds: 5 }
    };
    if let Some(path) = &args.trace {
        return replay(path, args.quick, volume);
    }
    let mut report = Report::new("alloc-model", args.quick);
    report.notes.push(
        "the cost model: a READ, WRITE or atomic takes 1.7 µs, and each further one of the same doorbell \
         0.1 µs; an RPC takes 4 µs, of which 2.3 µs are on the node's only core, where RPCs queue; on \
         that core registration takes 450 µs for 4 MiB, in proportion, and a window 1.3 µs"
            .into(),
    );
    report.notes.push(
        "with the cost model clients allocate extents without a pause, and free one at random when they hold \
         enough; at most half of the memory is allocated. A node's card does any number of one-sided \
         operations at once, and freeing costs the node's core as much as allocating. Ours are the \
         product's state machines, with keys and logs; peers have neither, except where a window is named. \
         The spread is over seeds"
            .into(),
    );
    let mut scenes = Scenes { volume, played: Vec::new() };
    scenes.play_all()?;
    let (recovery, recovery_targets) = recovery::measure(volume.rounds)?;
    let ladder = ladder::measure(SECTIONS, volume.allocations, volume.seeds)?;
    report.tables = scenes.tables();
    report.tables.extend(ladder);
    report.tables.push(recovery);
    report.tables.push(metadata::table());
    report.targets = scenes.targets();
    report.targets.extend(recovery_targets);
    Ok(report)
}

/// Replays a trace, and measures nothing else.
fn replay(path: &Path, quick: bool, volume: Volume) -> Result<Report, BenchError> {
    let arrivals = allocation_trace::read(path)?;
    let mut report = Report::new("alloc-model-trace", quick);
    let last_s = arrivals.last().map_or(0.0, |last| float(last.at_ns) / 1e9);
    report.notes.push(format!(
        "{} allocations in {} s, by {REPLAY_CLIENTS} clients in turn; the delay of a busy client counts. A \
         client that holds its share of half of the memory frees its oldest extent first",
        arrivals.len(),
        short(last_s)
    ));
    let mut rows = Vec::new();
    for allocator in Allocator::ALL {
        let scene = Scene { allocator, clients: REPLAY_CLIENTS, nodes: 1, sections: SECTIONS };
        let outcomes: Result<Vec<ModelResult>, String> =
            (0..volume.seeds).map(|seed| play(&scene, &Load::Trace(&arrivals), seed)).collect();
        rows.push(row(allocator, &outcomes.map_err(|reason| BenchError::Allocator { reason })?));
    }
    rows.reverse();
    report.tables.push(table(format!("trace with the cost model: {REPLAY_CLIENTS} clients, 1 node"), rows));
    Ok(report)
}

/// Size, clients and nodes of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    k: u8,
    clients: usize,
    nodes: usize,
}

#[derive(Debug)]
struct Played {
    allocator: Allocator,
    case: Case,
    outcomes: Vec<ModelResult>,
}

#[derive(Debug)]
struct Scenes {
    volume: Volume,
    played: Vec<Played>,
}

fn cases() -> Vec<Case> {
    let by_size = CLASSES.into_iter().map(|k| Case { k, clients: 16, nodes: 1 });
    let by_clients = CLIENTS.into_iter().map(|clients| Case { k: 0, clients, nodes: 1 });
    let by_nodes = NODES.into_iter().map(|nodes| Case { k: 0, clients: CLIENTS_AT_NODES, nodes });
    let crowds = [0, 3, 4].into_iter().map(|k| Case { k, clients: CLIENTS_MAX, nodes: 1 });
    let large = [(9, 1), (9, 128), (5, 128)].into_iter().map(|(k, clients)| Case { k, clients, nodes: 1 });
    let mut all: Vec<Case> = Vec::new();
    for case in by_size.chain(by_clients).chain(by_nodes).chain(crowds).chain(large) {
        if !all.contains(&case) {
            all.push(case);
        }
    }
    all
}

impl Scenes {
    fn play_all(&mut self) -> Result<(), BenchError> {
        let cases = cases();
        let bar = progress::bar(cases.len() * Allocator::ALL.len());
        for case in cases {
            for allocator in Allocator::ALL {
                bar.set_message(format!("{}, {}", allocator.name(), case.name()));
                let Case { k, clients, nodes } = case;
                let class = SizeClass::new(k).unwrap_or(SizeClass::SECTION);
                let load = Load::Closed { class, allocations: self.volume.allocations };
                let scene = Scene { allocator, clients, nodes, sections: SECTIONS };
                let outcomes = (0..self.volume.seeds).map(|seed| play(&scene, &load, seed));
                let outcomes: Result<_, _> = outcomes.collect();
                let outcomes = outcomes.map_err(|reason| BenchError::Allocator { reason })?;
                self.played.push(Played { allocator, case, outcomes });
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    fn of(&self, allocator: Allocator, case: Case) -> Option<&Played> {
        self.played.iter().find(|played| played.allocator == allocator && played.case == case)
    }

    fn tables(&self) -> Vec<Table> {
        cases().into_iter().map(|case| self.table(case)).collect()
    }

    fn table(&self, case: Case) -> Table {
        let rows = Allocator::ALL.iter().rev().filter_map(|allocator| {
            let played = self.of(*allocator, case)?;
            Some(row(*allocator, &played.outcomes))
        });
        table(format!("cost model: {}", case.name()), rows.collect())
    }

    fn targets(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for case in cases().into_iter().filter(|case| case.clients >= 16) {
            let Some(ours) = self.of(Allocator::Pool, case) else { continue };
            let ratio = |allocator| Spread::of_ratios(&ours.means(), &self.of(allocator, case)?.means());
            let mut target = |name: String, value: Option<Spread>, bound| {
                targets.extend(value.map(|value| Target { name, value, bound, at_most: true }));
            };
            let name = case.name();
            target(format!("{name}: ÷ registered on demand"), ratio(Allocator::OnDemandRpc), 0.05);
            let peers =
                [Allocator::Rpc, Allocator::RpcWindow, Allocator::Array].into_iter().filter_map(ratio);
            let closest = peers.max_by(|one, other| one.median.total_cmp(&other.median));
            target(format!("{name}: ÷ the best peer"), closest, 1.0);
            if case.clients == CLIENTS_MAX {
                let bound = match case.k {
                    0 => 1.1,
                    3 => 1.6,
                    _ => 2.1,
                };
                target(format!("{name}: CASes for each"), ours.figure(|of| of.each(of.swaps)), bound);
                target(format!("{name}: failed CASes for each"), ours.figure(|of| of.each(of.lost)), 1.33);
            }
        }
        let metadata = Spread::of(&[metadata::percent()]);
        targets.extend(metadata.map(|value| Target {
            name: "metadata, % of the memory".into(),
            value,
            bound: 0.45,
            at_most: true,
        }));
        targets
    }
}

impl Case {
    fn name(&self) -> String {
        let size = match 4u64 << self.k {
            kib if kib < 1024 => format!("{kib} KiB"),
            kib => format!("{} MiB", kib / 1024),
        };
        let plural = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
        format!("{size}, {}, {}", plural(self.clients, "client"), plural(self.nodes, "node"))
    }
}

impl Played {
    fn figure(&self, of: impl Fn(&ModelResult) -> f64) -> Option<Spread> {
        Spread::of(&self.outcomes.iter().map(of).collect::<Vec<f64>>())
    }

    fn means(&self) -> Vec<f64> {
        self.outcomes.iter().map(ModelResult::mean_us).collect()
    }
}

fn table(title: String, rows: Vec<Row>) -> Table {
    let columns =
        ["mean µs", "p50 µs", "p99 µs", "trips", "CASes", "failed CASes", "node's CPU µs", "free µs"];
    let columns = columns.map(Column::middle).to_vec();
    Table { title, columns, pictured: Some("mean µs"), ratio: None, rows }
}

fn row(allocator: Allocator, outcomes: &[ModelResult]) -> Row {
    let figure =
        |of: &dyn Fn(&ModelResult) -> f64| Spread::of(&outcomes.iter().map(of).collect::<Vec<f64>>());
    let figures = [
        ("mean µs", figure(&ModelResult::mean_us)),
        ("p50 µs", figure(&|of| of.permille_us(500))),
        ("p99 µs", figure(&|of| of.permille_us(990))),
        ("trips", figure(&|of| of.each(of.trips))),
        ("CASes", figure(&|of| of.each(of.swaps))),
        ("failed CASes", figure(&|of| of.each(of.lost))),
        ("node's CPU µs", figure(&|of| of.each(of.node_cpu_ns) / 1e3)),
        ("free µs", figure(&ModelResult::free_us)),
    ];
    let figures: BTreeMap<_, _> =
        figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
    Row { name: allocator.name().into(), figures }
}
