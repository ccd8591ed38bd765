//! The fabric's provider `verbs` over Soft-RoCE: its tests, and programs that are paged over it.

use std::io::Write;

use aquifer_tests_e2e::build;
use aquifer_tests_guests::{Guest, GuestOutcome, Kernel, kernel, script, test_program};

/// Address at which conformance tests of verbs listen.
const ADDRESS_VARIABLE: &str = "AQUIFER_VERBS_ADDRESS=10.9.0.1";

fn run(kernel: &Kernel, command: &[&str]) -> GuestOutcome {
    Guest::default().run(kernel, command).unwrap_or_else(|error| panic!("{error}")).success()
}

/// Summary of the conformance suite and of tests of devices alone.
const CONFORMANCE: &str = "41 passed";

/// Summary of the tests of the pool's client.
const POOL: &str = "21 passed";

/// Summary of the tests of heaps.
const HEAPS: &str = "8 passed";

/// Summary of the tests with killed hosts.
const KILLED: &str = "5 passed";
/// The tests kill hosts at every 31st step.
const STRIDE: &str = "AQUIFER_KILLED_STRIDE=31";

/// The lines of a text that have these words.
fn lines_with(text: &str, words: &str) -> String {
    text.split_inclusive('\n').filter(|line| line.contains(words)).collect()
}

#[test]
fn the_conformance_suite_passes() {
    let kernel = kernel();
    let suite = test_program("aquifer-fabric", "conformance-verbs");
    let suite = suite.to_str().expect("a plain path");
    let outcome = run(&kernel, &["env", ADDRESS_VARIABLE, suite, "--nocapture"]);
    assert!(outcome.stdout.contains(CONFORMANCE), "{outcome}");
    let failed = lines_with(&outcome.stdout, "expected to fail");
    assert!(
        !failed.is_empty(),
        "Soft-RoCE checks the bounds of windows now: change the test so that it requires the check. {outcome}"
    );
    // This kernel has no on-demand paging for Soft-RoCE.
    let remapped = lines_with(&outcome.stdout, "memory is remapped by re-registration");
    assert!(!remapped.is_empty(), "{outcome}");
    // Standard error itself: the test runner would hold back what a macro prints.
    std::io::stderr().write_all((failed + &remapped).as_bytes()).expect("standard error can be written");
}

#[test]
fn the_tests_of_the_pools_client_pass_over_verbs() {
    let kernel = kernel();
    let suite = test_program("aquifer-pool", "client-verbs");
    let outcome = run(&kernel, &["env", ADDRESS_VARIABLE, suite.to_str().expect("a plain path")]);
    assert!(outcome.stdout.contains(POOL), "{outcome}");
}

#[test]
fn heaps_are_read_over_verbs() {
    let kernel = kernel();
    let suite = test_program("aquifer-objects", "heaps-verbs");
    let suite = suite.to_str().expect("a plain path");
    let outcome = run(&kernel, &["env", ADDRESS_VARIABLE, suite, "--test-threads=1"]);
    assert!(outcome.stdout.contains(HEAPS), "{outcome}");
}

#[test]
fn hosts_are_killed_and_stopped_over_verbs() {
    let kernel = kernel();
    let suite = test_program("aquifer-pool", "killed-verbs");
    let suite = suite.to_str().expect("a plain path");
    let outcome = run(&kernel, &["env", ADDRESS_VARIABLE, STRIDE, suite, "--test-threads=1"]);
    assert!(outcome.stdout.contains(KILLED), "{outcome}");
}

#[test]
fn a_program_that_checks_its_memory_is_paged_over_verbs() {
    let kernel = kernel();
    let paths = [script("on-pool.sh"), build::binary().to_owned(), build::programs().join("checker")];
    let [on_pool, binary, checker] = paths.each_ref().map(|path| path.to_str().expect("a plain path"));
    let outcome = run(&kernel, &[on_pool, binary, "8M", checker, "fork", "--bytes", "20M", "--rounds", "1"]);
    let statistics = outcome.statistics();
    assert!(statistics["remote_reads"].as_u64().is_some_and(|reads| reads > 300), "{outcome}");
    assert_eq!(statistics["lost_pages"], 0, "{outcome}");
}

#[test]
fn devices_are_listed() {
    let kernel = kernel();
    let binary = build::binary().to_str().expect("a plain path");
    let outcome = run(&kernel, &[binary, "fabric", "info"]);
    assert!(outcome.stdout.starts_with("rxe0: can lend and borrow\n"), "{outcome}");
}
