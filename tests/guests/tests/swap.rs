//! Kernel swap on the pool with cgroups of version 2 and all rights of root, which containers lack.

use aquifer_tests_e2e::build;
use aquifer_tests_guests::{Guest, kernel, script};

#[test]
fn the_limit_of_a_swapped_run_is_lowered_and_raised() {
    let kernel = kernel();
    let paths = [script("swap.sh"), build::binary().to_owned(), build::programs().join("checker-static")];
    let [swap, binary, checker] = paths.each_ref().map(|path| path.to_str().expect("a plain path"));
    let command = [swap, binary, checker, "pages", "--bytes", "100M", "--rounds", "1000000"];
    // Emulated processors can run an instruction that another one has just replaced, which ends the
    // guest. Cgroups make the kernel replace some of its own.
    let guest = Guest { processors: 1, ..Guest::default() };
    let outcome = guest.run(&kernel, &command).unwrap_or_else(|error| panic!("{error}")).success();
    for line in ["the limit is 36 MiB", "the limit is 96 MiB", "limit 100 MiB"] {
        assert!(outcome.stdout.contains(line), "{outcome}");
    }
    // The server has all rights: without them it would not set the flag.
    assert!(!outcome.stdout.contains("PR_SET_IO_FLUSHER"), "{outcome}");
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {outcome}");
}
