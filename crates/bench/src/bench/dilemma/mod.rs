//! `aquifer bench dilemma`: throughput and allocated memory by block size, for page writes and
//! frees through the pager: the dilemma of FineMem (OSDI 2025; design.md, section 15).

mod load;
mod store;

use std::collections::BTreeMap;

use aquifer_pager::SlabSizing;
use aquifer_pool::SizeClass;

use super::support::cluster::Cluster;
use super::support::progress;
use super::support::report::{Column, Report, Row, Table, Target};
use super::support::spread::Spread;
use super::{BenchArgs, BenchError};
use aquifer::Fabric;
use load::{LoadResult, Plan, play};
use store::Host;

/// Targets, for `aquifer bench list`.
pub const TARGETS: &str =
    "targets: with blocks of 4 KiB, at least 0.9 of the throughput of 16 MiB, and at most 0.55 of its memory";

/// Memory that the nodes lend together.
const MEMORY_BYTES: u64 = 768 << 20;
const COARSEST: &str = "16 MiB";
/// Factor of the number of rounds over shared memory, where a round takes only a second and varies
/// more.
const SHM_ROUNDS: usize = 3;

/// Slabs of one size.
const fn blocks(k: u8, group_slabs: u32) -> SlabSizing {
    match SizeClass::new(k) {
        Some(class) => SlabSizing::Fixed { class, group_slabs },
        None => SlabSizing::AsNeeded,
    }
}

const GRAINS: [(&str, SlabSizing); 8] = [
    ("4 KiB", blocks(0, 1)),
    ("16 KiB", blocks(2, 1)),
    ("64 KiB", blocks(4, 1)),
    ("256 KiB", blocks(6, 1)),
    ("2 MiB", blocks(9, 1)),
    ("4 MiB", blocks(9, 2)),
    (COARSEST, blocks(9, 8)),
    ("as needed", SlabSizing::AsNeeded),
];

/// Runs the bench.
///
/// # Errors
/// If a cluster cannot be started, or fails.
pub fn run(args: &BenchArgs) -> Result<Report, BenchError> {
    let mut report = Report::new("dilemma", args.quick);
    let (keys, waves, rounds) = if args.quick { (16 << 10, 1, 1) } else { (40 << 10, 2, 3) };
    let plan = Plan { keys, least_permille: 200, waves, threads: 2 };
    report.notes.push(format!(
        "{keys} pages of 4 KiB, two threads, half reads and half writes of whole pages with a Zipf \
         distribution (0.99). Every sixteenth operation frees a page until a fifth is in use, then writes a \
         free one until all are, {waves} times. Every page that is read is compared with what was written"
    ));
    report.notes.push(
        "a block of one size is freed when all of it is free, except a reserve of an eighth if blocks have \
         at most 2 MiB, and refilled when half of it is free. \"as needed\" is the setting of runs: slabs \
         of 4 KiB to 2 MiB, with repacking of sparse ones. Allocated memory is the mean over the operations"
            .into(),
    );
    let fabrics = args.fabric.map_or(vec![Fabric::Shm, Fabric::Tcp], |one| vec![one]);
    let grains = choose(args.only.as_deref())?;
    let rounds_of = |fabric| if fabric == Fabric::Shm { rounds * SHM_ROUNDS } else { rounds };
    let bar = progress::bar(fabrics.iter().map(|fabric| rounds_of(*fabric)).sum::<usize>() * grains.len());
    for fabric in fabrics {
        let cluster = Cluster::up(MEMORY_BYTES, fabric, None)?;
        let host = Host::join(cluster.state())?;
        let mut outcomes: Vec<Vec<LoadResult>> = vec![Vec::new(); grains.len()];
        for _ in 0..rounds_of(fabric) {
            for ((name, sizing), outcomes) in grains.iter().zip(&mut outcomes) {
                bar.set_message(format!("{name} over {}", fabric.name()));
                let store = host.volume(plan.keys, *sizing)?;
                let outcome = play(&store, plan);
                store.close();
                outcomes.push(outcome?);
                bar.inc(1);
            }
        }
        host.leave();
        let rows = rows(&grains, &outcomes);
        report.targets.extend(targets(&rows, fabric));
        report.tables.push(Table {
            title: format!("by block size, over {}", fabric.name()),
            columns: vec![
                Column::full("operations/s"),
                Column::full("÷ 16 MiB"),
                Column::full("allocated MiB"),
                Column::full("allocated, ÷ 16 MiB"),
                Column::middle("peak MiB"),
                Column::middle("in use MiB"),
                Column::middle("pages moved"),
            ],
            pictured: Some("allocated MiB"),
            ratio: Some("÷ 16 MiB"),
            rows,
        });
    }
    bar.finish_and_clear();
    Ok(report)
}

/// All sizes, or one and the largest.
fn choose(only: Option<&str>) -> Result<Vec<(&'static str, SlabSizing)>, BenchError> {
    let Some(only) = only else { return Ok(GRAINS.to_vec()) };
    if GRAINS.iter().all(|(name, _)| *name != only) {
        let sizes = GRAINS.iter().map(|(name, _)| *name).collect();
        return Err(BenchError::NoSuchSize { name: only.to_owned(), sizes });
    }
    Ok(GRAINS.into_iter().filter(|(name, _)| [only, COARSEST].contains(name)).collect())
}

fn rows(grains: &[(&'static str, SlabSizing)], outcomes: &[Vec<LoadResult>]) -> Vec<Row> {
    let coarsest = grains.iter().position(|(name, _)| *name == COARSEST).unwrap_or(0);
    let all = |of: fn(&LoadResult) -> f64, at: usize| -> Vec<f64> { outcomes[at].iter().map(of).collect() };
    let row = |(at, (name, _)): (usize, &(&str, SlabSizing))| {
        let ratios = |of: fn(&LoadResult) -> f64| Spread::of_ratios(&all(of, at), &all(of, coarsest));
        let figures = [
            ("operations/s", Spread::of(&all(|one| one.ops_per_s, at))),
            ("÷ 16 MiB", ratios(|one| one.ops_per_s)),
            ("allocated MiB", Spread::of(&all(|one| one.held_mib, at))),
            ("allocated, ÷ 16 MiB", ratios(|one| one.held_mib)),
            ("peak MiB", Spread::of(&all(|one| one.peak_mib, at))),
            ("in use MiB", Spread::of(&all(|one| one.live_mib, at))),
            ("pages moved", Spread::of(&all(|one| one.moved, at))),
        ];
        let figures: BTreeMap<_, _> =
            figures.into_iter().filter_map(|(name, spread)| Some((name, spread?))).collect();
        Row { name: (*name).into(), figures }
    };
    grains.iter().enumerate().map(row).collect()
}

fn targets(rows: &[Row], fabric: Fabric) -> Vec<Target> {
    let aims = [
        ("÷ 16 MiB", "throughput", 0.9, false),
        (
            "allocated, ÷ 16 MiB",
            "allocated \
        memory",
            0.55,
            true,
        ),
    ];
    let of = |row: &Row, (figure, what, bound, at_most): (&str, &str, f64, bool)| {
        let value = row.figures.get(figure).copied()?;
        let name = format!("{}, over {}: {what} ÷ that of 16 MiB", row.name, fabric.name());
        Some(Target { name, value, bound, at_most })
    };
    let measured = rows.iter().filter(|row| row.name == GRAINS[0].0 || row.name == "as needed");
    measured.flat_map(|row| aims.into_iter().filter_map(move |aim| of(row, aim))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_size_is_measured_beside_the_coarsest() {
        let names =
            |only| choose(only).map(|grains| grains.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        assert_eq!(names(Some("4 KiB")).unwrap(), ["4 KiB", COARSEST]);
        assert_eq!(names(None).unwrap().len(), GRAINS.len());
        let error = names(Some("5 KiB")).unwrap_err().to_string();
        assert!(error.contains("5 KiB") && error.contains("as needed"), "{error}");
    }
}
