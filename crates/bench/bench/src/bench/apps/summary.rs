//! Tables and targets of the samples.

use std::collections::BTreeMap;

use aquifer_bench::support::report::{Column, Report, Row, Table, Target};
use aquifer_bench::support::spread::Spread;

use super::backends::AppBackend;
use super::{JUDGED_PERCENT, Sample, Samples, Size};

/// The samples of one program with a part of its memory.
struct View<'a> {
    rounds: usize,
    app: usize,
    name: &'static str,
    percent: u64,
    samples: &'a Samples,
}

impl View<'_> {
    fn sample(&self, backend: AppBackend, round: usize) -> Option<&Sample> {
        // The plain run has all its memory at each percentage.
        let percent = if backend == AppBackend::Plain { 100 } else { self.percent };
        self.samples.get(&(self.app, percent, backend))?.get(round)?.as_ref()
    }

    fn figure(&self, backend: AppBackend, name: &str, round: usize) -> Option<f64> {
        self.sample(backend, round)?.get(name).copied()
    }

    fn spread(&self, pick: impl Fn(usize) -> Option<f64>) -> Option<Spread> {
        Spread::of(&(0..self.rounds).filter_map(pick).collect::<Vec<_>>())
    }

    /// Time on another backend ÷ that on this one, in the same round.
    fn ahead_of(&self, other: AppBackend, backend: AppBackend) -> Option<Spread> {
        self.spread(|round| Some(self.figure(other, "s", round)? / self.figure(backend, "s", round)?))
    }

    fn row(&self, backend: AppBackend) -> Row {
        let names = (0..self.rounds).filter_map(|round| self.sample(backend, round)).flat_map(BTreeMap::keys);
        let mut figures: BTreeMap<&'static str, Spread> = names
            .filter_map(|&name| Some((name, self.spread(|round| self.figure(backend, name, round))?)))
            .collect();
        let mut put = |name, spread: Option<Spread>| figures.extend(spread.map(|spread| (name, spread)));
        if backend != AppBackend::Plain {
            put(
                "s ÷ plain",
                self.spread(|round| {
                    Some(self.figure(backend, "s", round)? / self.figure(AppBackend::Plain, "s", round)?)
                }),
            );
        }
        if backend != AppBackend::SwapFile {
            put("swap file's s ÷ this", self.ahead_of(AppBackend::SwapFile, backend));
        }
        Row { name: backend.name().into(), figures }
    }

    fn table(&self, backends: &[AppBackend]) -> Table {
        Table {
            title: format!("{}, {} % fit", self.name, self.percent),
            columns: vec![
                Column::full("s"),
                Column::middle("p50 µs"),
                Column::middle("p99 µs"),
                Column::middle("CPU s"),
                Column::middle("resident MiB"),
                Column::middle("beyond limit MiB"),
                Column::middle("in want"),
                Column::full("s ÷ plain"),
                Column::full("swap file's s ÷ this"),
            ],
            pictured: Some("s"),
            ratio: Some("swap file's s ÷ this"),
            rows: backends
                .iter()
                .filter(|backend| backend.is_measured_at(self.percent))
                .chain([&AppBackend::Plain])
                .map(|&backend| self.row(backend))
                .collect(),
        }
    }

    /// The target for the resident memory on the pool.
    fn limit_holds(&self, backend: AppBackend) -> Option<Target> {
        let figure = |name, round| self.figure(backend, name, round);
        let over = |round| Some(figure("resident MiB", round)? - 1.1 * figure("limit MiB", round)?);
        let name = format!(
            "{}, {} % fit: resident MiB over limit + 10 %, {}",
            self.name,
            self.percent,
            backend.name()
        );
        Some(Target { name, value: self.spread(over)?, bound: 16.0, at_most: true })
    }

    fn pools(&self, backends: &[AppBackend]) -> impl Iterator<Item = AppBackend> + Clone {
        let is_judged = [JUDGED_PERCENT, 2 * JUDGED_PERCENT].contains(&self.percent);
        backends.iter().copied().filter(move |backend| backend.is_limited_pool() && is_judged)
    }

    fn targets(&self, backends: &[AppBackend]) -> Vec<Target> {
        let pools = self.pools(backends);
        let target = |backend: AppBackend| {
            let name = format!("{}, {} % fit: swap file's s ÷ {}'s", self.name, self.percent, backend.name());
            Some(Target {
                name,
                value: self.ahead_of(AppBackend::SwapFile, backend)?,
                bound: 1.0,
                at_most: false,
            })
        };
        pools
            .clone()
            .filter_map(target)
            .chain(pools.filter_map(|backend| self.limit_holds(backend)))
            .chain(self.idle_memory(backends))
            .collect()
    }

    /// Targets of the host's idle memory: what it has not yet cost.
    fn idle_memory(&self, backends: &[AppBackend]) -> Vec<Target> {
        let pairs = [
            (AppBackend::PoolTcpCached, AppBackend::PoolShm, 1.1),
            (AppBackend::PoolElastic, AppBackend::Plain, 1.1),
            (AppBackend::PoolElasticHalf, AppBackend::PoolTcpHalf, 1.2),
        ];
        let measured = pairs.iter().filter(|_| self.percent == JUDGED_PERCENT);
        let target = |(backend, peer, bound): &(AppBackend, AppBackend, f64)| {
            let (name, of) = (backend.name(), peer.name());
            Some(Target {
                name: format!("{}, {} % fit: {name}'s s ÷ {of}'s", self.name, self.percent),
                value: self.ahead_of(*backend, *peer)?,
                bound: *bound,
                at_most: true,
            })
        };
        measured.filter(|(backend, ..)| backends.contains(backend)).filter_map(target).collect()
    }

    /// Notes about pools without a comparison, because the kernel killed the peer in each round.
    fn unjudged(&self, backends: &[AppBackend]) -> Vec<String> {
        let without_peer = self.pools(backends).filter(|backend| {
            backends.contains(&AppBackend::SwapFile)
                && self.ahead_of(AppBackend::SwapFile, *backend).is_none()
        });
        let note = |backend: AppBackend| {
            format!(
                "not judged: {}, {} % fit, {}: no run on the swap file ended well",
                self.name,
                self.percent,
                backend.name()
            )
        };
        without_peer.map(note).collect()
    }
}

/// Fills tables and targets.
pub fn fill(
    report: &mut Report,
    size: Size,
    names: &[&'static str],
    backends: &[AppBackend],
    samples: &Samples,
) {
    for (app, &name) in names.iter().enumerate() {
        for &percent in size.fits {
            let view = View { rounds: size.rounds, app, name, percent, samples };
            report.tables.push(view.table(backends));
            report.targets.extend(view.targets(backends));
            report.notes.extend(view.unjudged(backends));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKENDS: [AppBackend; 3] = [AppBackend::PoolShm, AppBackend::PoolTcp, AppBackend::SwapFile];

    fn samples() -> Samples {
        let of = |seconds: &[f64]| -> Vec<Option<Sample>> {
            seconds
                .iter()
                .map(|&s| {
                    (s > 0.0).then(|| {
                        Sample::from([
                            ("s", s),
                            ("p50 µs", 10.0 * s),
                            ("resident MiB", 30.0),
                            ("limit MiB", 10.0),
                        ])
                    })
                })
                .collect()
        };
        Samples::from([
            ((0, 100, AppBackend::Plain), of(&[1.0, 2.0])),
            ((0, 100, AppBackend::PoolShm), of(&[1.0, 2.0])),
            ((0, 25, AppBackend::PoolShm), of(&[2.0, 4.0])),
            ((0, 25, AppBackend::PoolTcp), of(&[8.0, 8.0])),
            // In the second round the kernel killed the program.
            ((0, 25, AppBackend::SwapFile), of(&[4.0, 0.0])),
        ])
    }

    fn report() -> Report {
        let mut report = Report::new("apps", true);
        let size = Size { rounds: 2, ..Size::QUICK };
        fill(&mut report, size, &["redis"], &BACKENDS, &samples());
        report
    }

    #[test]
    fn ratios_are_of_rounds_in_which_both_were_measured() {
        let report = report();
        let table = report.tables.iter().find(|table| table.title == "redis, 25 % fit").unwrap();
        let names: Vec<_> = table.rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["pool over shm", "pool over tcp", "swap file", "plain, all resident"]);
        let shm = &table.rows[0].figures;
        assert_eq!(shm["swap file's s ÷ this"], Spread { min: 2.0, median: 2.0, max: 2.0 });
        assert_eq!(shm["s ÷ plain"], Spread { min: 2.0, median: 2.0, max: 2.0 });
        assert_eq!(shm["p50 µs"].median, 30.0);
        assert!(!table.rows[2].figures.contains_key("swap file's s ÷ this"));
        assert_eq!(table.rows[3].figures["s"].median, 1.5);
    }

    #[test]
    fn the_pool_must_be_ahead_where_a_quarter_fits_over_both_fabrics() {
        let judged: Vec<_> =
            report().targets.iter().map(|target| (target.name.clone(), target.is_met())).collect();
        assert_eq!(
            judged,
            [
                ("redis, 25 % fit: swap file's s ÷ pool over shm's".to_owned(), true),
                ("redis, 25 % fit: swap file's s ÷ pool over tcp's".to_owned(), false),
                ("redis, 25 % fit: resident MiB over limit + 10 %, pool over shm".to_owned(), false),
                ("redis, 25 % fit: resident MiB over limit + 10 %, pool over tcp".to_owned(), false),
            ]
        );
    }

    #[test]
    fn a_pool_whose_peer_was_always_killed_is_reported_as_not_judged() {
        let mut samples = samples();
        samples.insert((0, 25, AppBackend::SwapFile), vec![None, None]);
        let mut report = Report::new("apps", true);
        fill(&mut report, Size { rounds: 2, ..Size::QUICK }, &["redis"], &BACKENDS, &samples);
        assert_eq!(report.targets.len(), 2, "that limits hold");
        assert_eq!(
            report.notes,
            [
                "not judged: redis, 25 % fit, pool over shm: no run on the swap file ended well",
                "not judged: redis, 25 % fit, pool over tcp: no run on the swap file ended well",
            ]
        );
    }
}
