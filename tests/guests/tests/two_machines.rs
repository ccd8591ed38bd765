//! Tests with two guests, and long tests with one.

use std::path::Path;
use std::time::Duration;

use aquifer_tests_e2e::build;
use aquifer_tests_guests::{Guest, GuestError, GuestOutcome, Kernel, kernel, script, test_program};

/// Time limit of a guest with redis, and of two guests at a time on two processors.
const TIME_LIMIT: Duration = Duration::from_secs(600);
/// Time limit of a test that kills more than a thousand processes, each with a connection.
const KILLED_TIME_LIMIT: Duration = Duration::from_secs(3600);

/// A path as an argument.
fn word(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn assert_paged(outcome: &GuestOutcome) {
    let statistics = outcome.statistics();
    assert!(statistics["remote_reads"].as_u64().is_some_and(|reads| reads > 100), "{outcome}");
    assert_eq!(statistics["lost_pages"], 0, "{outcome}");
}

#[test]
fn a_guest_ends_at_its_time_limit() {
    let kernel = kernel();
    let guest = Guest { time_limit: Duration::from_secs(60), ..Guest::default() };
    let error = guest.run(&kernel, &["sh", "-c", "echo here; exec sleep infinity"]).unwrap_err();
    assert!(matches!(&error, GuestError::TimedOut(outcome) if outcome.stdout == "here\n"), "{error}");
}

#[test]
fn two_guests_share_a_network() {
    let kernel = kernel();
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = Guest::pair(folder.path());
    let server = one.start(&kernel, &["ibv_rc_pingpong", "-d", "rxe0", "-g", "1", "-n", "100"]).unwrap();
    let script = "until ibv_rc_pingpong -d rxe0 -g 1 -n 100 10.9.0.1; do :; done";
    let client = two.run(&kernel, &["timeout", "120", "sh", "-c", script]).unwrap().success();
    let server = server.wait().unwrap().success();
    assert!(client.stdout.contains("100 iters") && server.stdout.contains("100 iters"), "{client}{server}");
}

#[test]
fn the_conformance_suite_passes_between_two_guests() {
    let kernel = kernel();
    let folder = tempfile::tempdir().unwrap();
    let [mut tests, mut initiators] = Guest::pair(folder.path());
    (tests.time_limit, initiators.time_limit) = (TIME_LIMIT, TIME_LIMIT);
    let suite = test_program("aquifer-fabric", "conformance-verbs");
    let initiators_at = "AQUIFER_INITIATORS=10.9.0.2:9000";
    // The initiators serve until the other guest reports the end of the tests.
    let serve = script("initiators.sh");
    let holder = test_program("aquifer-fabric", "initiators-verbs");
    let served = initiators.start(&kernel, &["env", initiators_at, word(&serve), word(&holder)]).unwrap();
    let run = script("afar.sh");
    let address = "AQUIFER_VERBS_ADDRESS=10.9.0.1";
    let outcome = tests.run(&kernel, &["env", initiators_at, address, word(&run), word(&suite)]);
    let served = served.wait().map_or_else(|error| error.to_string(), |served| served.to_string());
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}{served}")).success();
    assert!(outcome.stdout.contains("41 passed"), "{outcome}{served}");
}

#[test]
fn hosts_are_killed_and_stopped_between_steps_over_verbs() {
    let kernel = kernel();
    let guest = Guest { time_limit: KILLED_TIME_LIMIT, ..Guest::default() };
    let suite = test_program("aquifer-pool", "killed-verbs");
    let address = "AQUIFER_VERBS_ADDRESS=10.9.0.1";
    // Every step takes an hour under emulation. The providers that run here test each of them.
    let stride = "AQUIFER_KILLED_STRIDE=8";
    let outcome = guest.run(&kernel, &["env", address, stride, word(&suite), "--test-threads=1"]);
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}")).success();
    assert!(outcome.stdout.contains("5 passed"), "{outcome}");
}

#[test]
fn redis_is_paged_over_verbs() {
    let kernel = kernel();
    let guest = Guest { time_limit: TIME_LIMIT, ..Guest::default() };
    let (redis, check) = (script("redis.sh"), build::sources().join("redis_check.py"));
    let outcome = guest.run(&kernel, &[word(&redis), word(build::binary()), "9M", "6M", word(&check)]);
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}")).success();
    assert!(outcome.stdout.contains("digest "), "{outcome}");
    assert_paged(&outcome);
}

#[test]
fn a_program_survives_the_death_of_a_node_in_another_guest() {
    let kernel = kernel();
    let folder = tempfile::tempdir().unwrap();
    let [mut lender, mut borrower] = Guest::pair(folder.path());
    (lender.time_limit, borrower.time_limit) = (TIME_LIMIT, TIME_LIMIT);
    let [lend, borrow] = ["lender.sh", "borrower.sh"].map(script);
    let checker = build::programs().join("checker");
    let lender = lender.start(&kernel, &[word(&lend), word(build::binary())]).unwrap();
    let program = [word(&checker), "pages", "--bytes", "20M", "--rounds", "3"];
    let command = [&[word(&borrow), word(build::binary()), "9M"][..], &program].concat();
    let borrowed = borrower.run(&kernel, &command).unwrap_or_else(|error| panic!("{error}"));
    let lent = lender.wait().unwrap_or_else(|error| panic!("{error}{borrowed}"));
    let (borrowed, lent) = (borrowed.success(), lent.success());
    assert!(borrowed.stdout.contains("the command runs; a node is killed"), "{borrowed}");
    assert!(lent.stdout.contains("a node ended with 137"), "{lent}");
    assert_paged(&borrowed);
}

#[test]
fn a_store_of_another_guest_is_read_by_its_device() {
    let kernel = kernel();
    let folder = tempfile::tempdir().unwrap();
    let [mut lender, mut borrower] = Guest::pair(folder.path());
    (lender.time_limit, borrower.time_limit) = (TIME_LIMIT, TIME_LIMIT);
    let [lend, borrow] = ["heap-lender.sh", "heap-borrower.sh"].map(script);
    let lender = lender.start(&kernel, &[word(&lend), word(build::binary())]).unwrap();
    let borrowed = borrower.run(&kernel, &[word(&borrow), word(build::binary())]);
    let borrowed = borrowed.unwrap_or_else(|error| panic!("{error}"));
    let lent = lender.wait().unwrap_or_else(|error| panic!("{error}{borrowed}"));
    let (borrowed, _) = (borrowed.success(), lent.success());
    for found in ["value 1", "value 4", "far away"] {
        assert!(borrowed.stdout.contains(found), "{found}: {borrowed}");
    }
    let packets =
        borrowed.stdout.split("the device has received ").nth(1).and_then(|rest| rest.split(' ').next());
    let packets: u32 = packets.and_then(|count| count.parse().ok()).expect("it says how many");
    // Packets have at most 4 KiB each.
    assert!(packets > 48, "the value came another way: {borrowed}");
}

#[test]
fn the_check_of_two_hosts_finds_what_soft_roce_lacks() {
    let kernel = kernel();
    let command = script("check.sh");
    let outcome = Guest::default().run(&kernel, &[word(&command), word(build::binary())]);
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(outcome.exit_code, 1, "{outcome}");
    for found in [
        "READ of 4 KiB",
        "a window enforces its rights",
        "a known defect of Soft-RoCE",
        "remapped by",
        "failed tests: 1",
    ] {
        assert!(outcome.stdout.contains(found), "{found}: {outcome}");
    }
}

/// Suite of Debian whose kernel supports on-demand paging for Soft-RoCE.
const PAGING: &str = "trixie-backports";

#[test]
fn memory_is_remapped_by_on_demand_paging_where_the_kernel_has_it() {
    let kernel = Kernel::prepare_of(Some(PAGING)).unwrap_or_else(|error| panic!("{error}"));
    let suite = test_program("aquifer-fabric", "conformance-verbs");
    let guest = Guest { time_limit: TIME_LIMIT, ..Guest::default() };
    let command = ["env", "AQUIFER_VERBS_ADDRESS=10.9.0.1", word(&suite), "--nocapture"];
    let outcome = guest.run(&kernel, &command).unwrap_or_else(|error| panic!("{error}")).success();
    let how = outcome.stdout.lines().find(|line| line.contains("memory is remapped by on-demand paging"));
    eprintln!("{}", how.unwrap_or_else(|| panic!("{outcome}")));
}
