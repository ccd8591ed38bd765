//! Tables and targets of the samples.

use std::collections::BTreeMap;

use aquifer::Fabric;
use aquifer_bench::support::bytes::{MIB, float};
use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::backends::FaultBackend;
use super::calm::Calm;
use super::{Case, Reads, Sample, Samples, Size};

const PAGE_BYTES: u64 = 4096;

/// Returns a value of a round; `None` if it was not measured in that round.
type Pick<'a> = &'a dyn Fn(usize) -> Option<f64>;

/// The samples of one case.
struct View<'a> {
    size: Size,
    case: Case,
    samples: &'a Samples,
    reads: &'a Reads,
}

impl View<'_> {
    fn sample(&self, backend: FaultBackend, round: usize) -> Option<&Sample> {
        self.samples.get(&(self.case, backend))?.get(round)?.as_ref()
    }

    fn figure(&self, backend: FaultBackend, name: &str, round: usize) -> Option<f64> {
        self.sample(backend, round)?.get(name).copied()
    }

    fn spread(&self, pick: Pick<'_>) -> Option<Spread> {
        Spread::of(&(0..self.size.rounds).filter_map(pick).collect::<Vec<_>>())
    }

    fn ratio(&self, ours: Pick<'_>, theirs: Pick<'_>) -> Option<Spread> {
        self.spread(&|round| Some(ours(round)? / theirs(round)?))
    }

    /// Median latency of the fastest bare userfaultfd in a round.
    fn floor_us(&self, round: usize) -> Option<f64> {
        let place = |other| self.figure(FaultBackend::Bare { other }, "p50 µs", round);
        [place(false), place(true)].into_iter().flatten().reduce(f64::min)
    }

    /// Median latency of the fastest bare userfaultfd plus one READ: the lower bound of a page from
    /// a memory node.
    fn floor_with_read_us(&self, round: usize) -> Option<f64> {
        Some(self.floor_us(round)? + self.reads.us.get(round)?)
    }

    fn best(
        &self,
        backends: &[FaultBackend],
        name: &str,
        round: usize,
        better: fn(f64, f64) -> f64,
    ) -> Option<f64> {
        backends.iter().filter_map(|&backend| self.figure(backend, name, round)).reduce(better)
    }

    /// Processor time for each accessed page, less that of a plain run.
    fn cpu_us_per_page(&self, backend: FaultBackend, round: usize) -> Option<f64> {
        let pages = self.size.bytes / PAGE_BYTES * self.size.walks();
        let spent =
            self.figure(backend, "CPU µs", round)? - self.figure(FaultBackend::Plain, "CPU µs", round)?;
        Some(spent / float(pages))
    }

    fn row(&self, backend: FaultBackend) -> Row {
        let names: Vec<&'static str> =
            self.sample_names(backend).into_iter().filter(|name| *name != "seconds").collect();
        let mut figures = BTreeMap::new();
        let mut put = |name, spread: Option<Spread>| {
            if let Some(spread) = spread {
                figures.insert(name, spread);
            }
        };
        for name in names {
            put(name, self.spread(&|round| self.figure(backend, name, round)));
        }
        let p50 = |backend| move |round| self.figure(backend, "p50 µs", round);
        let speed = |backend| move |round| self.figure(backend, "MB/s", round);
        if backend.is_pool() || backend.is_peer() {
            put("CPU µs/page", self.spread(&|round| self.cpu_us_per_page(backend, round)));
            put("p50 ÷ floor", self.ratio(&p50(backend), &|round| self.floor_us(round)));
            put("p50 ÷ (floor + READ)", self.ratio(&p50(backend), &|round| self.floor_with_read_us(round)));
        }
        if backend.is_peer() {
            put("pool's p50 ÷ this", self.ratio(&p50(FaultBackend::Pool), &p50(backend)));
            put("pool's MB/s ÷ this", self.ratio(&speed(FaultBackend::Pool), &speed(backend)));
        }
        Row { name: backend.name().into(), figures }
    }

    fn sample_names(&self, backend: FaultBackend) -> Vec<&'static str> {
        let samples = self.samples.get(&(self.case, backend)).into_iter().flatten().flatten();
        let mut names: Vec<_> = samples.flat_map(|sample| sample.keys().copied()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn table(&self, backends: &[FaultBackend]) -> Table {
        let order: &[fn(&FaultBackend) -> bool] =
            &[|backend| backend.is_pool(), |backend| backend.is_peer(), |_| true];
        let mut sorted: Vec<FaultBackend> =
            backends.iter().copied().filter(|backend| *backend != FaultBackend::Plain).collect();
        sorted.sort_by_key(|backend| order.iter().position(|is| is(backend)));
        Table {
            title: self.case.name(),
            columns: vec![
                Column::full("p50 µs"),
                Column::middle("p90 µs"),
                Column::middle("p99 µs"),
                Column::full("MB/s"),
                Column::middle("CPU µs/page"),
                Column::full("p50 ÷ floor"),
                Column::full("p50 ÷ (floor + READ)"),
                Column::full("pool's p50 ÷ this"),
                Column::full("pool's MB/s ÷ this"),
            ],
            ratio: Some(if self.case.random { "pool's p50 ÷ this" } else { "pool's MB/s ÷ this" }),
            pictured: Some(if self.case.random { "p50 µs" } else { "MB/s" }),
            rows: sorted.into_iter().map(|backend| self.row(backend)).collect(),
        }
    }

    fn targets(&self, backends: &[FaultBackend]) -> Vec<Target> {
        let name = self.case.name();
        let of = |backend: FaultBackend, name: &'static str| move |round| self.figure(backend, name, round);
        let mut targets = Vec::new();
        let mut add = |name: String, value: Option<Spread>, bound: f64, at_most: bool| {
            targets.extend(value.map(|value| Target { name, value, bound, at_most }));
        };
        let files: Vec<FaultBackend> = backends
            .iter()
            .copied()
            .filter(|backend| matches!(backend, FaultBackend::Swap { zram: false, .. }))
            .collect();
        let swaps: Vec<FaultBackend> = backends.iter().copied().filter(|backend| backend.is_peer()).collect();
        let p50 = of(FaultBackend::Pool, "p50 µs");
        if self.case.random {
            if self.reads.fabric == Fabric::Shm {
                let floor = self.ratio(&p50, &|round| self.floor_us(round));
                add(format!("{name}: p50 ÷ cheapest bare userfaultfd"), floor, 1.5, true);
            } else if !self.case.write {
                let floor = self.ratio(&p50, &|round| self.floor_with_read_us(round));
                add(format!("{name}: p50 ÷ (cheapest bare userfaultfd + raw tcp READ)"), floor, 1.4, true);
            }
            if !self.case.write {
                let hit = of(FaultBackend::PoolCached, "p50 µs");
                let floor = self.ratio(&hit, &|round| self.floor_us(round));
                add(
                    format!("{name}, from the page cache: p50 ÷ cheapest bare userfaultfd"),
                    floor,
                    1.35,
                    true,
                );
                if self.reads.fabric == Fabric::Tcp {
                    let pool = self.ratio(&hit, &p50);
                    add(format!("{name}, from the page cache: p50 ÷ without it"), pool, 0.5, true);
                }
            }
            let file = self.ratio(&p50, &|round| self.best(&files, "p50 µs", round, f64::min));
            add(format!("{name}: p50 ÷ the swap file's (better read-ahead)"), file, 1.0, true);
        } else {
            let best = |round| self.best(&swaps, "MB/s", round, f64::max);
            let bound = if self.reads.fabric == Fabric::Shm { 1.5 } else { 1.0 };
            let speed = self.ratio(&of(FaultBackend::Pool, "MB/s"), &best);
            add(format!("{name}: MB/s ÷ the best kernel swap's"), speed, bound, false);
        }
        let mib = |bytes: u64| float(bytes) / float(MIB);
        let whole = mib(self.size.bytes);
        let remote = self.ratio(&of(FaultBackend::Pool, "elsewhere MiB"), &|_| Some(whole));
        add(format!("{name}: peak on memory nodes ÷ working set"), remote, 1.1, true);
        let resident = self.spread(&of(FaultBackend::Pool, "resident MiB"));
        let allowed = mib(self.size.limit_bytes) * 1.1 + 16.0;
        add(format!("{name}: peak resident memory in MiB (limit + 10 % + 16)"), resident, allowed, true);
        targets
    }
}

/// Fills tables and targets.
pub fn fill(
    report: &mut Report,
    size: Size,
    backends: &[FaultBackend],
    samples: &Samples,
    calm: &[Calm],
    reads: &Reads,
) {
    let views = Case::ALL.map(|case| View { size, case, samples, reads });
    report.tables.extend(views.iter().map(|view| view.table(backends)));
    report.tables.push(memory(&views, backends));
    report.tables.extend(floor(reads));
    report.tables.push(calm_table(calm));
    report.targets.extend(views.iter().flat_map(|view| view.targets(backends)));
    for calm in calm {
        if let Some(value) = Spread::of_ratios(&calm.pool_s, &calm.plain_s) {
            let name = format!("without pressure, {}: time ÷ plain", calm.name);
            report.targets.push(Target { name, value, bound: 1.03, at_most: true });
        }
    }
}

fn memory(views: &[View<'_>], backends: &[FaultBackend]) -> Table {
    let pages = |backend: &&FaultBackend| backend.is_pool() || backend.is_peer();
    let rows = views.iter().flat_map(|view| {
        backends.iter().filter(pages).map(|&backend| {
            let row = view.row(backend);
            Row { name: format!("{}, {}", row.name, view.case.name()), figures: row.figures }
        })
    });
    let columns = [
        "resident MiB",
        "elsewhere MiB",
        "store beside limit MiB",
        "faults",
        "cache hits",
        "READs/page",
        "WRITEs/page",
        "agent's p50 µs",
    ];
    Table {
        title: "memory and round trips of the whole run, with fill and check".into(),
        columns: columns.into_iter().map(Column::middle).collect(),
        pictured: None,
        ratio: None,
        rows: rows.collect(),
    }
}

fn floor(reads: &Reads) -> Option<Table> {
    let name = if reads.fabric == Fabric::Shm {
        "shm READ, cold"
    } else {
        "tcp READ, cold, best placement of \
            both ends"
    };
    let figures = BTreeMap::from([("READ µs", Spread::of(&reads.us)?)]);
    Some(Table {
        title: "lower bound: one READ of a 4 KiB page from another process".into(),
        columns: vec![Column::full("READ µs")],
        pictured: None,
        ratio: None,
        rows: vec![Row { name: name.into(), figures }],
    })
}

fn calm_table(calm: &[Calm]) -> Table {
    let row = |calm: &Calm| {
        let spreads = [
            ("plain s", Spread::of(&calm.plain_s)),
            ("pool s", Spread::of(&calm.pool_s)),
            ("pool ÷ plain", Spread::of_ratios(&calm.pool_s, &calm.plain_s)),
            ("CPU ÷ plain", Spread::of_ratios(&calm.pool_cpu_us, &calm.plain_cpu_us)),
        ];
        let figures = spreads.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
        Row { name: calm.name.into(), figures }
    };
    Table {
        title: "without pressure: 64 MiB used with a limit of 512 MiB, from start to end of the \
            program"
            .into(),
        columns: ["plain s", "pool s", "pool ÷ plain", "CPU ÷ plain"].into_iter().map(Column::full).collect(),
        pictured: None,
        ratio: None,
        rows: calm.iter().map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWAP: FaultBackend = FaultBackend::Swap { zram: false, eight: false };

    fn sample(p50: f64, speed: f64, cpu: f64) -> Option<Sample> {
        Some(BTreeMap::from([("p50 µs", p50), ("MB/s", speed), ("CPU µs", cpu), ("elsewhere MiB", 50.0)]))
    }

    fn samples(case: Case) -> Samples {
        Samples::from([
            ((case, FaultBackend::Plain), vec![sample(0.0, 0.0, 0.0), sample(0.0, 0.0, 0.0)]),
            (
                (case, FaultBackend::Bare { other: false }),
                vec![sample(10.0, 0.0, 0.0), sample(20.0, 0.0, 0.0)],
            ),
            ((case, FaultBackend::Bare { other: true }), vec![sample(5.0, 0.0, 0.0), sample(40.0, 0.0, 0.0)]),
            ((case, FaultBackend::Pool), vec![sample(10.0, 200.0, 1e6), sample(20.0, 100.0, 1e6)]),
            // In the second round the kernel killed the program.
            ((case, SWAP), vec![sample(20.0, 400.0, 1e6), None]),
        ])
    }

    fn targets(case: Case, fabric: Fabric) -> Vec<Target> {
        let samples = samples(case);
        let reads = Reads { fabric, us: vec![5.0, 20.0] };
        let size = Size { rounds: 2, ..Size::QUICK };
        View { size, case, samples: &samples, reads: &reads }.targets(&[FaultBackend::Pool, SWAP])
    }

    #[test]
    fn the_floor_is_the_cheapest_of_its_round_and_lost_rounds_do_not_count() {
        let case = Case { random: true, write: false };
        let samples = samples(case);
        let reads = Reads { fabric: Fabric::Shm, us: vec![5.0, 20.0] };
        let view = View { size: Size { rounds: 2, ..Size::QUICK }, case, samples: &samples, reads: &reads };
        let pool = view.row(FaultBackend::Pool).figures;
        assert_eq!(pool["p50 ÷ floor"], Spread { min: 1.0, median: 1.5, max: 2.0 });
        assert_eq!(pool["p50 ÷ (floor + READ)"], Spread { min: 0.5, median: 0.75, max: 1.0 });
        let swap = view.row(SWAP).figures;
        assert_eq!(swap["pool's p50 ÷ this"], Spread { min: 0.5, median: 0.5, max: 0.5 });
        assert_eq!(swap["pool's MB/s ÷ this"].median, 0.5);
        let pages = float(Size::QUICK.bytes / PAGE_BYTES * Size::QUICK.walks());
        assert!((pool["CPU µs/page"].median - 1e6 / pages).abs() < 1e-9);
    }

    #[test]
    fn random_is_judged_by_latency_and_sequential_by_speed() {
        let random = targets(Case { random: true, write: true }, Fabric::Shm);
        assert!(random[0].name.contains("p50 ÷ cheapest bare") && random[0].is_met());
        assert!(random[1].name.contains("swap file") && random[1].is_met());
        let sequential = targets(Case { random: false, write: true }, Fabric::Shm);
        assert!(sequential[0].name.contains("MB/s ÷ the best") && !sequential[0].is_met());
        assert!(sequential[1].name.contains("memory nodes") && sequential[1].is_met());
    }

    #[test]
    fn each_fabric_has_targets_of_its_own() {
        let bound = |case, fabric| {
            let first = targets(case, fabric).swap_remove(0);
            (first.bound, first.name)
        };
        let sequential = Case { random: false, write: false };
        assert_eq!(bound(sequential, Fabric::Shm).0, 1.5);
        assert_eq!(bound(sequential, Fabric::Tcp).0, 1.0);
        let (most, name) = bound(Case { random: true, write: false }, Fabric::Tcp);
        assert!(most == 1.4 && name.contains("userfaultfd + raw tcp READ"), "{name}");
        // Over TCP there is a target for reads; writes are compared with the peer only.
        let (most, name) = bound(Case { random: true, write: true }, Fabric::Tcp);
        assert!(most == 1.0 && name.contains("swap file"), "{name}");
    }
}
