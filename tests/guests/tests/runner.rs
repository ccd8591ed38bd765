//! Tests of the guests themselves.

use aquifer_tests_guests::{Guest, kernel};

#[test]
fn a_command_runs_on_the_hosts_files_beside_a_working_rdma_device() {
    let kernel = kernel();
    let script = "rdma link && test -c /dev/infiniband/uverbs0 && cat Cargo.toml && echo 'a \
        \"complaint\"' >&2 && echo > left-behind && exit 7";
    let outcome = Guest::default().run(&kernel, &["sh", "-c", script]).unwrap();
    assert_eq!(outcome.exit_code, 7, "{outcome}");
    assert!(outcome.stdout.contains("rxe0/1 state ACTIVE"), "{outcome}");
    assert!(outcome.stdout.contains("[workspace]"), "{outcome}");
    assert_eq!(outcome.stderr, "a \"complaint\"\n");
    assert!(
        !aquifer_tests_guests::workspace().join("left-behind").exists(),
        "the guest keeps its writes in memory"
    );
}
