//! Bad input and missing resources: each gets one message and its exit code.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::{Cluster, build};
use aquifer_tests_support::{skip, state_folder};
use tempfile::TempDir;

const EXIT_FAILED: i32 = 125;
const EXIT_NOT_EXECUTABLE: i32 = 126;
const EXIT_NOT_FOUND: i32 = 127;
const EXIT_USAGE: i32 = 2;

/// Asserts that a command failed with this exit code and a message with these words.
fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{}: {stderr}", output.status);
    for word in words {
        assert!(stderr.contains(word), "the message lacks {word:?}: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn run_without_a_cluster_fails() {
    let state = state_folder();
    let output = Command::new(build::binary())
        .arg("--state")
        .arg(state.path())
        .args(["run", "--local", "64M", "--", "true"])
        .output()
        .expect("aquifer can be started");
    assert_refused(&output, EXIT_FAILED, &["no cluster is up", "aquifer up"]);
}

/// A swap device has one copy of each page; the option must not be accepted and ignored.
#[test]
fn replicas_of_a_swap_device_are_refused() {
    let state = state_folder();
    let output = Command::new(build::binary())
        .arg("--state")
        .arg(state.path())
        .args(["run", "--swap", "--replicas", "2", "--local", "64M", "--", "true"])
        .output()
        .expect("aquifer can be started");
    assert_refused(&output, EXIT_FAILED, &["--swap keeps one copy", "--replicas"]);
}

#[test]
fn programs_that_cannot_be_run_are_refused() {
    let cluster = Cluster::up(1, "64M");
    let folder = cluster.state();
    let missing = cluster.run("64M", &["no-such-program-anywhere"]);
    assert_refused(&missing, EXIT_NOT_FOUND, &["no-such-program-anywhere", "no such program"]);
    let missing = cluster.run("64M", &["./no/such/file"]);
    assert_refused(&missing, EXIT_NOT_FOUND, &["no such program"]);

    let plain = folder.join("plain");
    std::fs::write(&plain, "words\n").expect("a file can be written");
    let plain_path = plain.to_str().expect("a plain path");
    assert_refused(&cluster.run("64M", &[plain_path]), EXIT_NOT_EXECUTABLE, &["not an executable"]);
    std::fs::set_permissions(&plain, PermissionsExt::from_mode(0o755)).expect("our own file");
    assert_refused(&cluster.run("64M", &[plain_path]), EXIT_NOT_EXECUTABLE, &["not an executable"]);
    assert_refused(&cluster.run("64M", &["/usr"]), EXIT_NOT_EXECUTABLE, &["not an executable"]);

    let fixed = build::compile(folder, "fixed", "int main(void) { return 0; }\n", &["-static"]);
    let output = cluster.run("64M", &[fixed.to_str().expect("a plain path")]);
    assert_refused(&output, EXIT_NOT_EXECUTABLE, &["statically linked", "dynamically linked", "swap"]);
    assert_eq!(cluster.run("64M", &["true"]).status.code(), Some(0), "the cluster still works");
}

#[test]
fn invalid_sizes_are_refused() {
    let cluster = Cluster::up(1, "64M");
    for size in ["", "12Q", "M", "-5M", "1.5.5G", "99999999999999999999"] {
        let output =
            cluster.command().arg("run").arg(format!("--local={size}")).args(["--", "true"]).output();
        assert_refused(&output.expect("aquifer can be started"), EXIT_USAGE, &["--local"]);
    }
    let output = cluster.command().args(["run", "--local", "64M"]).output().expect("aquifer can be started");
    assert_eq!(output.status.code(), Some(EXIT_USAGE), "a program is required: {}", text(&output.stderr));
}

#[test]
fn limits_that_are_too_small_are_refused() {
    let cluster = Cluster::up(1, "256M");
    let output = cluster.run("1M", &["true"]);
    assert_refused(&output, EXIT_FAILED, &["too small", "--local 8M"]);
    assert_eq!(cluster.run("8M", &["true"]).status.code(), Some(0), "the smallest limit works");

    let text_of = "#include <stdlib.h>\n#include <string.h>\n#include <sys/mman.h>\n#include <unistd.h>\n\
                   int main(void) { size_t n = 96u << 20; char *p = malloc(n); memset(p, 1, n);\n\
                   if (mlock(p, n)) return 9; for (;;) pause(); }\n";
    let locked = build::compile(cluster.state(), "locked", text_of, &[]);
    let output = cluster.run("16M", &[locked.to_str().expect("a plain path")]);
    assert_refused(&output, EXIT_FAILED, &["cannot be paged", "give at least --local"]);
    cluster.assert_all_free();
}

#[test]
fn a_statistics_file_that_cannot_be_created_is_refused_before_the_program_starts() {
    let cluster = Cluster::up(1, "64M");
    let mut command = cluster.command();
    command.args(["run", "--local", "64M", "--stats", "/no/such/folder/stats.json", "--", "echo", "ran"]);
    let output = command.output().expect("aquifer can be started");
    assert_refused(&output, EXIT_FAILED, &["/no/such/folder/stats.json"]);
    assert!(output.stdout.is_empty(), "the program must not have run");
}

#[test]
fn statistics_that_cannot_be_written_keep_the_programs_exit_code() {
    let cluster = Cluster::up(1, "64M");
    let mut command = cluster.command();
    command.args(["run", "--local", "64M", "--stats", "/dev/full", "--", "sh", "-c", "exit 7"]);
    let output = command.output().expect("aquifer can be started");
    assert_refused(&output, 7, &["cannot write statistics to /dev/full"]);
}

#[test]
fn a_user_without_rights_to_userfaultfd_gets_instructions() {
    const UNPRIVILEGED_UID: &str = "65534";
    let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if !rustix::process::geteuid().is_root() || sysctl.trim() == "1" {
        skip("needs root, and a machine on which other users may not use userfaultfd");
        return;
    }
    // The other user must have access.
    let folder = TempDir::with_prefix("aquifer-e2e-user-").expect("a temporary folder can be made");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).expect("our own folder");
    for name in ["aquifer", "libaquifer_shim.so"] {
        std::fs::copy(build::binary().with_file_name(name), folder.path().join(name))
            .expect("a program can be copied");
    }
    let aquifer = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", UNPRIVILEGED_UID, "--regid", UNPRIVILEGED_UID, "--clear-groups"]);
        command
            .arg(folder.path().join("aquifer"))
            .arg("--state")
            .arg(folder.path().join("state"))
            .args(words);
        command.output().expect("setpriv can be started")
    };
    // The user's own agent would hide the agent of all users.
    let refused = aquifer(&["up", "--nodes", "1", "--memory", "32M"]);
    assert_refused(&refused, 1, &["CAP_SYS_PTRACE", "--shared-socket", "--agent", "--without-runs"]);
    assert!(!folder.path().join("state").exists(), "nothing is left");
    let up = aquifer(&["up", "--nodes", "1", "--memory", "32M", "--without-runs"]);
    let output = aquifer(&["run", "--local", "64M", "--", "true"]);
    let down = aquifer(&["down"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let advice = ["/dev/userfaultfd", "vm.unprivileged_userfaultfd", "--agent", "aquifer down"];
    assert_refused(&output, EXIT_FAILED, &advice);
    assert!(down.status.success(), "{}", text(&down.stderr));
}

/// As in `aquifer status | true`.
#[test]
fn a_closed_standard_output_does_not_fail_a_command() {
    let folder = state_folder();
    // There is no cluster, which `aquifer status` also reports by its exit code.
    for (words, code) in [(&["status"][..], 4), (&["status", "--json"], 4), (&["bench", "list"], 0)] {
        let (reader, writer) = std::io::pipe().expect("a pipe can be made");
        drop(reader);
        let mut command = Command::new(build::binary());
        let output = command.arg("--state").arg(folder.path()).args(words).stdout(writer).output();
        let output = output.expect("aquifer can be started");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(code), ""), "{words:?}");
    }
}
