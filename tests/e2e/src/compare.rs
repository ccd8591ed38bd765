//! Comparison of a program on the pool, with a quarter of its memory, with a plain run.
//! [`crate::steps`] tests that a program stays within its limit.

use serde_json::Value;

use crate::cluster::{Cluster, find, text};
use crate::run::{Running, run_plainly};

const MIB: u64 = 1 << 20;

/// A program to compare.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The program and its arguments.
    pub program: &'a [&'a str],
    /// Whether the program forks.
    pub forks: bool,
}

/// The least limit that a run can have, in bytes.
const LIMIT_BYTES_MIN: u64 = 8 << 20;

/// Runs a program plainly, then with a quarter of its peak memory or the least limit, and compares
/// the outputs.
///
/// Returns the statistics of the paged run.
///
/// # Panics
/// If a run fails, the outputs differ, or memory is not freed.
pub fn compare(cluster: &Cluster, case: Case<'_>) -> Value {
    let plain = run_plainly(case.program, case.forks);
    plain.assert_success("the plain run");
    let limit = (plain.peak.anonymous_bytes / 4).max(LIMIT_BYTES_MIN);
    let stats = cluster.state().join("stats.json");
    let mut command = cluster.command();
    command
        .arg("run")
        .arg("--local")
        .arg(limit.to_string())
        .arg("--stats")
        .arg(&stats)
        .arg("--")
        .args(case.program);
    let paged = Running::start(&mut command, case.forks, Box::new(|| 0)).wait();
    paged.assert_success("the paged run");
    assert!(
        paged.stdout == plain.stdout,
        "the outputs differ; plainly:\n{}\non the pool:\n{}",
        text(&plain.stdout),
        text(&paged.stdout)
    );
    let stats = std::fs::read(&stats).expect("the statistics were written");
    let stats = serde_json::from_slice(&stats).expect("the statistics are JSON");
    assert_statistics(&stats, plain.peak.anonymous_bytes, limit);
    println!(
        "{:?}: plainly {} MiB, limit {} MiB, measured {} MiB",
        case.program,
        plain.peak.anonymous_bytes / MIB,
        limit / MIB,
        paged.peak.anonymous_bytes / MIB
    );
    cluster.assert_all_free();
    stats
}

/// Asserts that the statistics have all fields, and that the program's memory was on memory nodes.
fn assert_statistics(stats: &Value, peak: u64, limit: u64) {
    let figure = |name: &str| {
        find(stats, name)
            .and_then(Value::as_u64)
            .unwrap_or_else(|| panic!("the statistics lack {name}: {stats:#}"))
    };
    for name in ["faults", "zero_pages", "mempool_hits", "staging_hits", "cache_hits", "prefetched"] {
        let _ = figure(name);
    }
    assert!(figure("evictions") > 0 && figure("remote_writes") > 0, "nothing was paged: {stats:#}");
    assert_eq!(figure("lost_pages"), 0, "pages were lost: {stats:#}");
    assert!(figure("resident_peak_bytes") > 0, "{stats:#}");
    // Pages of zeros, and pages that were freed before they were evicted, use no memory there.
    let least = (peak - limit) / 4;
    assert!(
        figure("remote_peak_bytes") >= least,
        "memory nodes held {} MiB of {} MiB that were not local",
        figure("remote_peak_bytes") / MIB,
        (peak - limit) / MIB
    );
    for name in ["p50", "p99", "p999"] {
        assert!(stats["fault_latency_us"][name].is_number(), "the latency lacks {name}: {stats:#}");
    }
}
