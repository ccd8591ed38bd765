//! Attacks on the memory and the descriptors of the agent: the attacker is ended, the agent serves.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use aquifer_tests_e2e::SharedCluster;
use aquifer_tests_e2e::cluster::text;

use crate::user::{ANNE, Attack, MALLORY, Victim};

#[test]
fn a_page_table_cannot_outgrow_the_limit() {
    let victim = Victim::up();
    let output = victim.paged_attacker("sparse", "32M").output().expect("setpriv can be started");
    let said = text(&output.stderr);
    assert!(said.contains("page table"), "{}: {said}", output.status);
    victim.0.cluster.assert_all_free();
    let another = victim.0.command(MALLORY, &["run", "--local", "24M", "--", "true"]).output();
    assert!(another.expect("setpriv can be started").status.success(), "the agent serves on");
}

/// A run of another user that evicts all of its memory twice, and checks it. Returns the most that
/// was resident, in bytes.
fn another_run_goes_on(victim: &Victim, bytes: &str) -> u64 {
    let checker = victim.0.path("checker");
    let checker = checker.to_str().expect("a plain path");
    let stats = victim.0.private_folder("anne", ANNE).join("stats.json");
    let options = ["run", "--local", "16M", "--wait-for-room", "20s", "--stats"];
    let mut command = victim.0.command(ANNE, &options);
    command.arg(&stats).args(["--", checker, "pages", "--bytes", bytes, "--rounds", "2"]);
    let output = command.output().expect("setpriv can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stats = std::fs::read(stats).expect("the statistics were written");
    let stats: serde_json::Value = serde_json::from_slice(&stats).expect("JSON");
    stats["resident_peak_bytes"].as_u64().expect("a number")
}

#[test]
fn an_idle_run_does_not_keep_the_mempool_from_others() {
    let victim = Victim::of(SharedCluster::up_with(2, &["--mempool", "16M"]));
    // Its share is as large as the mempool.
    let idle = Attack::start(victim.paged_attacker("fill", "512M").arg("700"));
    let peak = another_run_goes_on(&victim, "160M");
    assert!(peak < 80 << 20, "{peak} bytes were resident at a limit of 16 MiB");
    idle.end();
}

#[test]
fn a_user_that_fills_the_pool_leaves_a_share_to_others() {
    let victim = Victim::of(SharedCluster::up_with(1, &[]));
    let mut filling = victim.paged_attacker("fill", "32M");
    let mut filling = filling.arg("600").stderr(Stdio::piped()).spawn().expect("setpriv can be started");
    let said = BufReader::new(filling.stderr.take().expect("it is piped")).lines();
    let is_full = |line: std::io::Result<String>| line.expect("text").contains("waits for room");
    assert!(said.map(is_full).any(|is_full| is_full), "the pool is larger");
    another_run_goes_on(&victim, "20M");
    filling.kill().expect("it runs");
    filling.wait().expect("it ends");
}
