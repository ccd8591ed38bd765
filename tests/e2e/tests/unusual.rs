//! Rare operations of programs, which the checker performs with a quarter of its memory.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{await_time, figure};
use aquifer_tests_e2e::run::{Running, run_plainly, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use aquifer_tests_support::skip;

const BYTES: &str = "32M";
const LIMIT: &str = "12M";
const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";

fn check(test: &str) {
    check_with(test, None, 1);
}

/// Runs a check, which must evict at least `evictions_min` pages.
fn check_with(test: &str, preload: Option<&str>, evictions_min: u64) {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), test, "--bytes", BYTES];
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let mut cluster = Cluster::up(2, "256M");
    cluster.set_run_options(&["--strict"]);
    let mut command = cluster.run_command(LIMIT, &program);
    if let Some(library) = preload {
        command.env("LD_PRELOAD", library);
    }
    let mut run = Running::start(&mut command, true, Box::new(|| 0));
    let was_paged = await_time(&mut run, "pages to leave", || {
        figure(&cluster, "evictions").is_some_and(|evictions| evictions >= evictions_min)
    });
    let outcome = run.wait();
    outcome.assert_success(test);
    assert!(was_paged, "nothing of it was paged");
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    cluster.assert_all_free();
}

/// Functions that copy and set memory, and use other memory of the program for that.
const MEMORY_FUNCTIONS: &str = r#"
#include <stddef.h>
#include <sys/mman.h>
enum { TABLE_BYTES = 4 << 20 };
static volatile unsigned char *table;
static unsigned turn;
__attribute__((constructor)) static void begin(void) {
    table = mmap(NULL, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < TABLE_BYTES; at += 4096) table[at] = 1;
}
static void look_up(void) {
    if (table != NULL) (void)table[(turn++ * 65537u * 4096u) % TABLE_BYTES];
}
void *memmove(void *to, const void *from, size_t length) {
    volatile unsigned char *out = to;
    const volatile unsigned char *in = from;
    look_up();
    if (out <= in) for (size_t at = 0; at < length; at++) out[at] = in[at];
    else while (length-- > 0) out[length] = in[length];
    return to;
}
void *memcpy(void *to, const void *from, size_t length) { return memmove(to, from, length); }
void *memset(void *to, int byte, size_t length) {
    volatile unsigned char *out = to;
    look_up();
    while (length-- > 0) out[length] = (unsigned char)byte;
    return to;
}
int memcmp(const void *one, const void *other, size_t length) {
    const volatile unsigned char *a = one, *b = other;
    look_up();
    for (size_t at = 0; at < length; at++) if (a[at] != b[at]) return a[at] < b[at] ? -1 : 1;
    return 0;
}
int bcmp(const void *one, const void *other, size_t length) { return memcmp(one, other, length); }
"#;

#[test]
fn a_program_may_have_its_own_functions_for_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ["-shared", "-fPIC", "-fno-builtin"];
    let library = build::compile(folder.path(), "memory.so", MEMORY_FUNCTIONS, &options);
    check_with("pages", library.to_str(), 1);
}

#[test]
fn a_daemon_that_closes_all_descriptors_stays_paged() {
    check("daemon");
}

#[test]
fn a_program_that_becomes_another_user_keeps_no_rights_and_may_fork() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can become another user");
        return;
    }
    check("setuid");
}

#[test]
fn a_mapping_that_grows_in_place_stays_one() {
    check("grow");
}

#[test]
fn mappings_made_side_by_side_grow_and_move_as_one() {
    check("joined");
}

#[test]
fn several_mappings_move_at_once_where_the_kernel_can() {
    check("move-several");
}

#[test]
fn large_blocks_with_guards_are_no_stacks() {
    // More than all other memory of the program has.
    check_with("guarded-blocks", None, 4096);
}

#[test]
fn the_end_of_a_thread_is_reported_in_ordinary_memory() {
    check("cleared-word");
}

#[test]
fn a_process_without_free_descriptors_may_fork() {
    check("full-fork");
}

#[test]
fn a_process_that_can_have_no_more_descriptors_may_fork() {
    check("fullest-fork");
}

#[test]
fn a_process_that_may_have_few_files_may_fork() {
    check("fewest-fork");
}

#[test]
fn a_process_that_may_have_too_few_files_ends_with_the_reason() {
    let cluster = Cluster::up(1, "64M");
    // Root may raise the limit, but not from a user namespace.
    let outcome = cluster.run("16M", &["unshare", "--user", "sh", "-c", "ulimit -n 4; exec true"]);
    let error = text(&outcome.stderr);
    assert_eq!(outcome.status.code(), Some(125), "{error}");
    assert!(error.contains("may have 4 open files") && error.contains("RLIMIT_NOFILE"), "{error}");
    cluster.assert_all_free();
}

#[test]
fn the_first_process_of_a_namespace_finds_itself_alone() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can make name spaces");
    }
    check("first");
}

#[test]
fn a_process_under_another_root_may_fork() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can change its root");
    }
    check("chroot");
}

#[test]
fn a_process_in_other_namespaces_may_fork() {
    check("namespaces");
}

#[test]
fn memory_may_be_populated_at_once() {
    check("populate");
}

#[test]
fn direct_io_works_with_evicted_pages() {
    check("direct");
}

#[test]
fn a_program_has_no_thread_and_no_child_that_it_has_not_made() {
    check("alone");
}

#[test]
fn a_program_that_sandboxes_all_its_threads_stays_paged() {
    check("sandboxed");
}

#[test]
fn a_sandbox_may_refuse_what_the_worker_asks() {
    check("no-unshare");
}

/// The first process of the new name space would be the worker, and its end that of the name space.
#[test]
fn a_program_that_cannot_have_a_worker_ends_with_the_reason() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can make name spaces");
        return;
    }
    let cluster = Cluster::up(1, "64M");
    let outcome = cluster.run("16M", &["unshare", "--pid", "true"]);
    assert_eq!(outcome.status.code(), Some(125));
    assert!(text(&outcome.stderr).contains("use unshare --fork"), "{}", text(&outcome.stderr));
    cluster.assert_all_free();
}

#[test]
fn a_process_ends_with_its_last_thread() {
    check("raw-exit");
}

#[test]
fn a_stopped_process_holds_up_no_relative() {
    check("stopped");
}

#[test]
fn a_traced_process_holds_up_no_relative() {
    check("traced");
}

#[test]
fn a_process_that_shares_the_memory_of_one_that_has_ended_stays_paged() {
    check("outlive");
}

#[test]
fn a_child_has_all_pages_of_a_parent_that_ends_at_once() {
    check("fork-exit");
}

#[test]
fn memory_that_is_wiped_on_fork_is_empty_in_the_child() {
    check("wipe-on-fork");
}

#[test]
fn wiped_memory_is_empty_in_a_child_that_libc_does_not_make() {
    check("wipe-on-clone");
}

#[test]
fn all_memory_may_be_locked_and_unlocked() {
    check("lock-all");
}

#[test]
fn a_mapping_where_a_child_did_not_inherit_is_empty() {
    check("dont-fork");
}

#[test]
fn guards_drop_contents_that_are_away() {
    check("guard");
}

#[test]
fn shared_memory_replaces_contents_that_are_away() {
    check("shm-remap");
}

#[test]
fn signals_are_handled_on_a_stack_that_may_be_evicted() {
    check("signal-stack");
}

#[test]
fn a_robust_mutex_survives_its_owner() {
    check("robust");
}

#[test]
fn jemalloc_can_replace_malloc() {
    assert!(Path::new(JEMALLOC).exists(), "there is no jemalloc: scripts/install-deps.sh test installs it");
    check_with("pages", Some(JEMALLOC), 1);
    check_with("fork", Some(JEMALLOC), 1);
}

#[test]
fn a_static_program_runs_unpaged_in_a_run_and_is_refused_as_one() {
    let cluster = Cluster::up(1, "64M");
    let source = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\
                  int main(void) { char *p = malloc(64 << 20); memset(p, 7, 64 << 20); printf(\"%d\\n\", \
                  p[12345]); return 3; }\n";
    let program = build::compile(cluster.state(), "static", source, &["-static"]);
    let program = program.to_str().expect("a plain path");
    let inside = cluster.run("16M", &["sh", "-c", &format!("{program}; echo $?")]);
    assert_eq!(text(&inside.stdout), "7\n3\n", "{}", text(&inside.stderr));
    let alone = cluster.run("16M", &[program]);
    assert_eq!(alone.status.code(), Some(126));
    assert!(text(&alone.stderr).contains("is statically linked"), "{}", text(&alone.stderr));
    cluster.assert_all_free();
}

/// Process numbers of all runs, as the agent reports them; 0 for unknown ones.
fn pids(cluster: &Cluster) -> Vec<u64> {
    let Some(status) = status(cluster.agent_socket()) else { return Vec::new() };
    let runs = status["runs"].as_array().into_iter().flatten();
    let programs = runs.flat_map(|run| run["programs"].as_array().into_iter().flatten());
    programs.filter_map(|program| program["pid"].as_u64()).collect()
}

/// Process numbers below this are used only in a new PID namespace.
const FIRST_NUMBERS: u64 = 300;

/// Process numbers in a PID namespace differ from those that the agent sees.
#[test]
fn children_in_a_pid_namespace_are_known_by_their_outer_numbers() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can make name spaces");
        return;
    }
    let cluster = Cluster::up(2, "256M");
    let checker = build::programs().join("checker");
    let words = ["by-fork", "--bytes", "32M", "--rounds", "3"];
    let mut program = vec!["unshare", "--pid", "--fork", checker.to_str().expect("a plain path")];
    program.extend(words);
    let mut run = Running::start(&mut cluster.run_command("256M", &program), true, Box::new(|| 0));
    let mut seen = HashSet::new();
    while !run.has_ended() {
        let known = pids(&cluster);
        let mistaken = known.iter().filter(|pid| (1..FIRST_NUMBERS).contains(*pid)).count();
        assert_eq!(mistaken, 0, "{known:?}");
        seen.extend(known);
    }
    run.wait().assert_success("the checker in a name space of its own");
    assert!(seen.len() > 2, "its children were never seen: {seen:?}");
    cluster.assert_all_free();
}

/// A PID namespace is like a container that reaches the agent of its host.
#[test]
fn the_first_process_of_a_pid_namespace_is_paged() {
    if !rustix::process::geteuid().is_root() {
        skip("only root can make name spaces");
        return;
    }
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "fork", "--bytes", BYTES];
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let cluster = Cluster::up(2, "256M");
    let inner = cluster.run_command(LIMIT, &program);
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork"]).arg(inner.get_program()).args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut run = Running::start(&mut command, true, Box::new(|| 0));
    let was_paged = await_time(&mut run, "pages to leave", || {
        figure(&cluster, "evictions").is_some_and(|evictions| evictions > 0)
    });
    let outcome = run.wait();
    outcome.assert_success("a run in a name space of its own");
    assert!(was_paged, "nothing of it was paged");
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    cluster.assert_all_free();
}

mod long {
    use super::*;

    /// The kernel migrates pages to compact memory. A page that is evicted meanwhile is not lost.
    #[test]
    fn pages_that_the_kernel_migrates_meanwhile_are_kept() {
        const COMPACT: &str = "/proc/sys/vm/compact_memory";
        const RUNS: usize = 3;
        const TIMES: usize = 8;
        if !rustix::process::geteuid().is_root() || !Path::new(COMPACT).exists() {
            skip("memory is compacted for root only, and not by every kernel");
            return;
        }
        let cluster = Cluster::up(2, "512M");
        let checker = build::programs().join("checker");
        let program = [checker.to_str().expect("a plain path"), "daemon", "--bytes", BYTES];
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let compacting = scope.spawn(|| {
                let mut times = 0;
                while !has_ended.load(Ordering::Relaxed) && std::fs::write(COMPACT, "1").is_ok() {
                    times += 1;
                }
                times
            });
            let again = || (0..TIMES).map(|_| cluster.run(LIMIT, &program)).collect::<Vec<_>>();
            let runs: Vec<_> = (0..RUNS).map(|_| scope.spawn(again)).collect();
            let outcomes: Vec<_> =
                runs.into_iter().map(|run| run.join().expect("a run is waited for")).collect();
            has_ended.store(true, Ordering::Relaxed);
            assert_ne!(compacting.join().expect("it writes to a file"), 0, "nothing was compacted");
            outcomes
                .iter()
                .flatten()
                .for_each(|outcome| assert!(outcome.status.success(), "{}", text(&outcome.stderr)));
        });
        cluster.assert_all_free();
    }

    /// gdb can stop and continue a program, but cannot read evicted pages.
    #[test]
    fn gdb_can_attach_and_detach() {
        const VISITS: usize = 3;
        let cluster = Cluster::up(2, "256M");
        let checker = build::programs().join("checker");
        let checker = checker.to_str().expect("a plain path");
        let program = [checker, "pages", "--bytes", BYTES, "--rounds", "60"];
        let mut run = Running::start(&mut cluster.run_command(LIMIT, &program), false, Box::new(|| 0));
        for _ in 0..VISITS {
            let before = figure(&cluster, "evictions").unwrap_or(0);
            eventually("more pages to leave", || {
                assert!(!run.has_ended(), "the program ended before gdb came");
                (figure(&cluster, "evictions")? > before + 100).then_some(())
            });
            let pid = eventually("the program to be there", || processes::descendants(run.pid()).pop());
            let gdb = Command::new("gdb")
                .args(["-q", "-nx", "-batch", "-p", &pid.to_string(), "-ex", "info threads", "-ex", "detach"])
                .output()
                .expect("gdb is installed; scripts/install-deps.sh test does so");
            assert!(text(&gdb.stdout).contains("detached"), "{} {}", text(&gdb.stdout), text(&gdb.stderr));
        }
        run.wait().assert_success("the program that gdb looked at");
        cluster.assert_all_free();
    }
}
