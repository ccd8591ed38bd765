//! Many runs at once: a lack of endpoints, descriptors or memory delays programs and loses no page.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::{Cluster, build};

/// Starts `count` runs, each with 12 MiB in 8, and checks that all see the right pages.
fn all_succeed(cluster: &Cluster, count: usize) {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "12M", "--threads", "1"];
    let start = |_| -> Child {
        let mut command = cluster.run_command("8M", &program);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("aquifer can be started")
    };
    let runs: Vec<_> = (0..count).map(start).collect();
    let mut failures = BTreeMap::new();
    for run in runs {
        let output = run.wait_with_output().expect("it ends");
        if !output.status.success() {
            *failures.entry(format!("{}: {}", output.status, text(&output.stderr))).or_insert(0) += 1;
        }
    }
    assert!(failures.is_empty(), "of {count} runs: {failures:#?}");
    cluster.assert_all_free();
}

#[test]
fn thirty_runs_at_once() {
    all_succeed(&Cluster::up(4, "256M"), 30);
}

/// 64 children have 256 MiB if pages that they share are counted for each of them.
#[test]
fn pages_that_many_children_share_are_counted_once() {
    let cluster = Cluster::up(2, "512M");
    let checker = build::programs().join("checker");
    let stats = cluster.state().join("statistics.json");
    let mut command = cluster.command();
    command.args(["run", "--local", "16M", "--stats"]).arg(&stats).arg("--").arg(checker);
    command.args(["family", "--bytes", "4M"]);
    let output = command.output().expect("aquifer can be started");
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    let stats = std::fs::read(&stats).expect("the statistics were written");
    let stats: serde_json::Value = serde_json::from_slice(&stats).expect("the statistics are JSON");
    let peak = stats["resident_peak_bytes"].as_u64().expect("a number");
    assert!(peak < 64 << 20, "{} MiB: {stats:#}", peak >> 20);
    cluster.assert_all_free();
}

mod long {
    use super::*;

    /// The agent needs about 20,000 descriptors for this number of runs.
    #[test]
    fn a_thousand_runs_at_once() {
        all_succeed(&Cluster::up(8, "1G"), 1000);
    }
}
