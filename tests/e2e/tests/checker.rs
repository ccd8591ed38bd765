//! The checker, which checks every byte of its own memory, with a quarter of that memory.

use aquifer_tests_e2e::restart::{await_time, figure};
use aquifer_tests_e2e::run::Running;
use aquifer_tests_e2e::{Case, Cluster, build, compare};

/// Memory of the checker: a test takes a few seconds, and a quarter is far more than what cannot be
/// paged.
const BYTES: &str = "32M";

fn check(test: &str, options: &[&str], forks: bool) {
    check_on("shm", test, options, forks);
}

fn check_on(fabric: &str, test: &str, options: &[&str], forks: bool) {
    let checker = build::programs().join("checker");
    let mut program = vec![checker.to_str().expect("a plain path"), test, "--bytes", BYTES];
    program.extend(options);
    let cluster = Cluster::up_with(3, "512M", &["--fabric", fabric]);
    compare(&cluster, Case { program: &program, forks });
}

/// Pages that were only read are not written again when they are evicted. The program also changes
/// pages, and verifies all of them.
#[test]
fn pages_that_were_only_read_are_not_written_again() {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", BYTES, "--rounds", "4"];
    let cluster = Cluster::up(3, "512M");
    let mut run = Running::start(&mut cluster.run_command("10M", &program), false, Box::new(|| 0));
    let was_spared = await_time(&mut run, "pages that leave unchanged", || {
        figure(&cluster, "unchanged_pages").is_some_and(|pages| pages > 0)
    });
    run.wait().assert_success("the checker");
    assert!(was_spared, "unchanged pages were written again");
    cluster.assert_all_free();
}

macro_rules! checks {
    ($($name:ident: $test:literal $options:expr, forks: $forks:literal;)*) => {
        $(
            #[test]
            fn $name() {
                check($test, &$options, $forks);
            }
        )*
    };
}

checks! {
    pages_keep_their_bytes: "pages" [], forks: false;
    pages_keep_their_bytes_with_one_thread: "pages" ["--threads", "1", "--seed", "8"], forks: false;
    pages_keep_their_bytes_with_many_threads: "pages" ["--threads", "16", "--seed", "7"], forks: false;
    moved_pages_keep_their_bytes: "mremap" [], forks: false;
    pages_moved_without_unmapping_keep_their_bytes: "dontunmap" [], forks: false;
    the_heaps_end_moves: "brk" ["--bytes", "256M"], forks: false;
    pages_given_up_read_as_zeros: "madvise" [], forks: false;
    pages_mapped_anew_at_the_same_place_are_new: "remap" [], forks: false;
    threads_come_and_go: "threads" [], forks: false;
    the_kernel_reads_and_writes_missing_pages: "syscalls" [], forks: true;
    pages_that_the_kernel_holds_are_not_evicted: "pinned" [], forks: false;
}

#[test]
fn parent_and_child_have_their_own_pages() {
    check("fork", &[], true);
}

#[test]
fn parent_and_child_write_all_that_they_share_within_their_limit() {
    check("fork-storm", &["--rounds", "1"], true);
}

#[test]
fn protected_pages_keep_their_bytes() {
    check("protect", &[], false);
}

mod long {
    use super::*;

    #[test]
    fn pages_keep_their_bytes_over_tcp() {
        check_on("tcp", "pages", &[], false);
    }

    #[test]
    fn parent_and_child_have_their_own_pages_over_tcp() {
        check_on("tcp", "fork", &[], true);
    }
}
