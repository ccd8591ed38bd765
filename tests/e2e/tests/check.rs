//! `aquifer check`, and the programs that `aquifer run` refuses with the same reasons.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::{Cluster, SharedCluster, build};
use aquifer_tests_support::{skip, state_folder};
use rustix::fs::{XattrFlags, setxattr};
use tempfile::TempDir;

const EMPTY: &str = "int main(void) { return 0; }";
/// Exit code of `aquifer run` for programs that cannot be paged.
const EXIT_NOT_EXECUTABLE: i32 = 126;
/// `cap_net_raw=p`, as the kernel stores it (`struct vfs_cap_data`, revision 2).
const CAPABILITY: [u8; 20] = [0, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Runs `aquifer check`; returns its exit code and output.
fn check(cluster: &Cluster, program: &Path) -> (Option<i32>, String) {
    let output = cluster.command().args(["check", "--"]).arg(program).output();
    let output = output.expect("aquifer can be started");
    (output.status.code(), text(&output.stdout))
}

#[test]
fn a_cluster_with_a_usual_program_is_checked() {
    let cluster = Cluster::up(2, "64M");
    let (code, shown) = check(&cluster, Path::new("sh"));
    assert_eq!(code, Some(0), "{shown}");
    for word in ["kernel   ok", "user     ok", "memory nodes: 2", "/sh can be paged", "RLIMIT_NPROC"] {
        assert!(shown.contains(word), "it lacks {word}: {shown}");
    }
    let elsewhere = state_folder();
    let mut command = Command::new(build::binary());
    command.arg("--state").arg(elsewhere.path()).arg("check");
    let output = command.output().expect("aquifer can be started");
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains("cluster  no") && shown.contains("aquifer up"), "{shown}");
}

#[test]
fn programs_that_cannot_be_paged_are_refused_with_the_reason() {
    let cluster = Cluster::up(1, "64M");
    let folder = TempDir::new().expect("a folder");
    let cases: [(&str, &[&str], &str); 3] = [
        ("static", &["-static"], "statically linked"),
        ("musl", &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"], "another C library"),
        ("asan", &["-fsanitize=address"], "-static-libasan"),
    ];
    for (name, options, reason) in cases {
        let program = build::compile(folder.path(), name, EMPTY, options);
        let (code, shown) = check(&cluster, &program);
        assert!(code == Some(1) && shown.contains(reason), "{name}: {code:?} {shown}");
        let output = cluster.run_command("16M", &[program.to_str().expect("a plain path")]).output();
        let output = output.expect("aquifer can be started");
        assert_eq!(output.status.code(), Some(EXIT_NOT_EXECUTABLE), "{name}");
        assert!(text(&output.stderr).contains(reason), "{name}: {}", text(&output.stderr));
    }
    let asan = build::compile(folder.path(), "linked", EMPTY, &["-fsanitize=address", "-static-libasan"]);
    assert_eq!(check(&cluster, &asan).0, Some(0), "with its runtime linked it is paged");
}

/// A program with an executable heap, as SBCL has it.
const EXECUTABLE_HEAP: &str = "unsigned long dynamic_space_size, DYNAMIC_SPACE_START;\n\
                               int main(void) { return 0; }";

#[test]
fn a_program_with_an_executable_heap_is_known() {
    let cluster = Cluster::up(1, "64M");
    let folder = TempDir::new().expect("a folder");
    let program = build::compile(folder.path(), "lisp", EXECUTABLE_HEAP, &["-rdynamic"]);
    let (code, shown) = check(&cluster, &program);
    assert!(code == Some(1) && shown.contains("may be executed"), "{code:?} {shown}");
    let run = cluster.run("16M", &[program.to_str().expect("a plain path")]);
    assert!(run.status.success(), "it may run: {}", text(&run.stderr));
}

/// A key file with the same digit in each place.
fn write_key(state: &Path, digit: &str) {
    let key = state.join("cluster.key");
    std::fs::write(&key, digit.repeat(64)).expect("our own folder");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("our own file");
}

#[test]
fn an_agent_with_another_key_is_refused_at_once() {
    let (lender, borrower) = (state_folder(), state_folder());
    write_key(lender.path(), "1");
    write_key(borrower.path(), "2");
    let _directory = RunningDaemon::start_here(lender.path(), &["directory"]);
    let node = ["node", "--id", "1", "--memory", "64M", "--listen", "127.0.0.1:0"];
    let _node = RunningDaemon::start_here(lender.path(), &node);
    let _keeper = RunningDaemon::start_here(borrower.path(), &["keeper"]);
    let directory = lender.path().join("directory.sock");
    let agent = ["agent", "--mempool", "16M", "--directory", directory.to_str().expect("a plain path")];
    let _agent = RunningDaemon::start_here(borrower.path(), &agent);
    let aquifer = |words: &[&str]| {
        let mut command = Command::new(build::binary());
        command.arg("--state").arg(borrower.path()).args(words);
        let output = command.output().expect("aquifer can be started");
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    for (words, code) in
        [(&["run", "--local", "16M", "--", "true"][..], 125), (&["check"], 1), (&["status"], 0)]
    {
        let (found, said) = aquifer(words);
        assert!(
            found == Some(code) && said.contains("the cluster keys differ"),
            "{words:?}: {found:?} {said}"
        );
        // The folder has no configuration: the agent says where its directory is.
        assert!(words != ["status"] || said.contains("node-1     at 127.0.0.1:"), "{said}");
    }
}

#[test]
fn programs_with_capabilities_are_refused_for_users() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can give a file capabilities");
    }
    let shared = SharedCluster::up();
    let program = build::compile(TempDir::new().expect("a folder").keep().as_path(), "capable", EMPTY, &[]);
    let copy = shared.path("capable");
    std::fs::copy(&program, &copy).expect("a program can be copied");
    std::fs::remove_dir_all(program.parent().expect("a folder")).expect("it is ours");
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    if setxattr(&copy, "security.capability", &CAPABILITY, XattrFlags::empty()).is_err() {
        return skip("this file system has no capabilities");
    }
    let copy = copy.to_str().expect("a plain path");
    let output = shared.command(65_533, &["run", "--local", "16M", "--", copy]).output();
    let output = output.expect("setpriv can be started");
    assert_eq!(output.status.code(), Some(EXIT_NOT_EXECUTABLE), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("file capabilities"), "{}", text(&output.stderr));
    let by_root = shared.cluster.run("16M", &[copy]);
    assert!(by_root.status.success(), "{}", text(&by_root.stderr));
    shared.cluster.assert_all_free();
}
