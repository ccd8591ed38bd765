//! Measured programs in C. Their sources are in this binary; the machine's C compiler builds them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::BenchError;

const SOURCES: [(&str, &str); 5] = [
    ("bench_util.h", include_str!("../../../../../tests/e2e/programs/bench_util.h")),
    ("faultbench.c", include_str!("../../../../../tests/e2e/programs/faultbench.c")),
    ("mallocbench.c", include_str!("../../../../../tests/e2e/programs/mallocbench.c")),
    ("processbench.c", include_str!("../../../../../tests/e2e/programs/processbench.c")),
    ("zerofloor.c", include_str!("../../../../../tests/e2e/programs/zerofloor.c")),
];

/// Paths of the built programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Accesses memory and measures faults.
    pub faultbench: PathBuf,
    /// Malloc benchmarks.
    pub mallocbench: PathBuf,
    /// Forks processes that access memory and measure faults.
    pub processbench: PathBuf,
    /// Measures faults that need no I/O.
    pub zerofloor: PathBuf,
}

/// Builds the programs in `folder`.
///
/// # Errors
/// If there is no compiler, or it fails.
pub fn build(folder: &Path) -> Result<Programs, BenchError> {
    for (name, text) in SOURCES {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(BenchError::io("write", &path))?;
    }
    Ok(Programs {
        faultbench: compile(folder, "faultbench")?,
        mallocbench: compile(folder, "mallocbench")?,
        processbench: compile(folder, "processbench")?,
        zerofloor: compile(folder, "zerofloor")?,
    })
}

fn compile(folder: &Path, name: &str) -> Result<PathBuf, BenchError> {
    let program = folder.join(name);
    let output = Command::new("cc")
        // The compiler must not remove calls of malloc.
        .args(["-std=c11", "-O2", "-fno-builtin-malloc", "-pthread", "-o"])
        .arg(&program)
        .arg(folder.join(format!("{name}.c")))
        .arg("-lm")
        .output()
        .map_err(|error| BenchError::Build { reason: format!("cc: {error}") })?;
    if output.status.success() {
        Ok(program)
    } else {
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(BenchError::Build { reason })
    }
}

/// The results that faultbench and zerofloor print as a line of JSON.
#[derive(Clone, Debug, Deserialize)]
pub struct Figures {
    /// Pages accessed in the measured passes.
    pub ops: u64,
    /// Time of the measured passes.
    pub seconds: f64,
    /// Throughput of the measured passes.
    pub mb_per_s: f64,
    /// Latencies of accesses that faulted.
    pub faults: Latencies,
    /// Number of verified pages.
    pub verified_pages: u64,
    /// Number of wrong words.
    pub errors: u64,
}

/// Quantiles in µs.
#[derive(Clone, Debug, Deserialize)]
pub struct Latencies {
    /// Number of measurements.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_build_from_this_binary_alone_and_print_figures() {
        let folder = tempfile::tempdir().unwrap();
        let programs = build(folder.path()).unwrap();
        for (program, args) in [
            (programs.faultbench, ["--bytes", "1M", "--op", "write"]),
            (programs.zerofloor, ["--bytes", "1M", "--mode", "plain"]),
        ] {
            let output = Command::new(program).args(args).output().unwrap();
            let figures: Figures = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!((figures.verified_pages, figures.errors), (256, 0));
        }
    }

    #[test]
    fn each_malloc_benchmark_finds_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let program = build(folder.path()).unwrap().mallocbench;
        for name in ["larson", "random", "xmalloc", "thrash", "zipf"] {
            let output = Command::new(&program).args([name, "1000000", "2400"]).output().unwrap();
            let figures: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(
                (figures["ops"].as_u64(), figures["errors"].as_u64()),
                (Some(2400), Some(0)),
                "{name}"
            );
        }
    }

    #[test]
    fn a_compilers_complaint_is_passed_on() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("broken.c"), "int main( {").unwrap();
        let error = compile(folder.path(), "broken").unwrap_err().to_string();
        assert!(error.contains("broken.c") && error.contains("install-deps"), "{error}");
    }
}
