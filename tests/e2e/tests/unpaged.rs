//! Processes of a run that execute a program without the shim: they are named, and end a strict
//! run.

use std::path::Path;
use std::process::{Command, Stdio};

use aquifer_tests_e2e::cluster::{find, text};
use aquifer_tests_e2e::{Cluster, build, eventually};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

const EXIT_FAILED: i32 = 125;
const LIMIT: &str = "32M";
/// A program that waits for ever.
const WAITING: &str = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n";
const REMOVED: &str = "LD_PRELOAD was removed or replaced";

/// Scripts with a process that waits for ever without the shim, and the reason why it has none.
fn scripts(folder: &Path) -> Vec<(String, &'static str)> {
    let program = build::compile(folder, "waiting", WAITING, &[]);
    let fixed = build::compile(folder, "fixed", WAITING, &["-static"]);
    let (program, fixed) = (program.display(), fixed.display());
    vec![
        (format!("exec env -i {program}"), REMOVED),
        (format!("env -i {program}; true"), REMOVED),
        (format!("unset LD_PRELOAD; {program} & wait"), REMOVED),
        (format!("LD_PRELOAD=/lib/x86_64-linux-gnu/libdl.so.2 {program}; true"), REMOVED),
        (format!("{fixed}; true"), "it is statically linked"),
    ]
}

fn process_in(message: &str) -> Pid {
    let words: Vec<&str> = message.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "process").expect("the message names a process");
    Pid::from_raw(words[at + 1].parse().expect("a number")).expect("a process")
}

#[test]
fn an_unpaged_process_ends_a_strict_run() {
    let cluster = Cluster::up(1, "64M");
    let folder = TempDir::new().expect("a folder");
    for (script, reason) in scripts(folder.path()) {
        let mut command = cluster.command();
        command.args(["run", "--strict", "--local", LIMIT, "--", "sh", "-c", &script]);
        let output = command.output().expect("aquifer can be started");
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_FAILED), "{script}: {message}");
        assert!(message.contains("--strict") && message.contains(reason), "{script}: {message}");
        let process = process_in(&message);
        eventually("the process has ended", || test_kill_process(process).err());
    }
    cluster.assert_all_free();
}

#[test]
fn an_unpaged_process_is_named_once_and_in_the_status() {
    let cluster = Cluster::up(1, "64M");
    let folder = TempDir::new().expect("a folder");
    for (script, reason) in scripts(folder.path()) {
        let mut command = cluster.run_command(LIMIT, &["sh", "-c", &script]);
        let running = command.stderr(Stdio::piped()).spawn().expect("aquifer can be started");
        let named = eventually("a process is named", || {
            find(&cluster.status(), "unpaged").and_then(|unpaged| unpaged.get(0)).cloned()
        });
        assert!(named["reason"].as_str().is_some_and(|why| why.contains(reason)), "{script}: {named}");
        let shown = cluster.command().arg("status").output().expect("aquifer can be started");
        assert!(text(&shown.stdout).contains("is not paged"), "{}", text(&shown.stdout));
        let number = named["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a number");
        let process = Pid::from_raw(number).expect("a process");
        kill_process(process, Signal::TERM).expect("it can be ended");
        let output = running.wait_with_output().expect("the run ends");
        let message = text(&output.stderr);
        assert_eq!(message.matches("is not paged").count(), 1, "{script}: {message}");
        assert!(process_in(&message) == process && message.contains(reason), "{script}: {message}");
    }
    cluster.assert_all_free();
}

/// The program is named once, however often it is executed.
#[test]
fn a_program_is_named_once() {
    let cluster = Cluster::up(1, "64M");
    let folder = TempDir::new().expect("a folder");
    let waiting = build::compile(folder.path(), "waiting", WAITING, &[]);
    let script = format!("for i in 1 2 3; do env -i {} & done; wait", waiting.display());
    let mut command = cluster.run_command(LIMIT, &["sh", "-c", &script]);
    let running = command.stderr(Stdio::piped()).spawn().expect("aquifer can be started");
    let named = eventually("three processes are shown", || {
        let status = cluster.status();
        let unpaged = find(&status, "unpaged")?.as_array()?.clone();
        (unpaged.len() == 3).then_some(unpaged)
    });
    for process in named {
        let number = process["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a number");
        kill_process(Pid::from_raw(number).expect("a process"), Signal::TERM).expect("it can be ended");
    }
    let output = running.wait_with_output().expect("the run ends");
    assert_eq!(text(&output.stderr).matches("is not paged").count(), 1, "{}", text(&output.stderr));
}

/// The list of LD_PRELOAD has no way to name such a path.
#[test]
fn a_folder_that_cannot_be_preloaded_from_is_refused() {
    let cluster = Cluster::up(1, "64M");
    for name in ["with space", "with:colon"] {
        let parent = TempDir::new().expect("a folder");
        let folder = parent.path().join(name);
        std::fs::create_dir(&folder).expect("a folder can be made");
        let own = build::binary();
        for file in ["aquifer", "libaquifer_shim.so"] {
            let from = own.with_file_name(file);
            std::fs::hard_link(&from, folder.join(file))
                .or_else(|_| std::fs::copy(&from, folder.join(file)).map(drop))
                .expect("a file can be copied");
        }
        let mut command = Command::new(folder.join("aquifer"));
        command.arg("--state").arg(cluster.state()).args(["run", "--local", LIMIT, "--", "true"]);
        let output = command.output().expect("aquifer can be started");
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_FAILED), "{message}");
        assert!(message.contains("a space or a colon"), "{message}");
    }
}

#[test]
fn shared_memory_is_shown_with_its_size() {
    const SHARING: &str =
        "import mmap\nshared = mmap.mmap(-1, 48 << 20)\nshared.write(bytes(48 << 20))\ninput()";
    let cluster = Cluster::up(1, "64M");
    let mut command = cluster.run_command(LIMIT, &["python3", "-c", SHARING]);
    let mut running = command.stdin(Stdio::piped()).spawn().expect("aquifer can be started");
    eventually("shared memory is counted", || {
        let bytes = find(&cluster.status(), "shared_bytes")?.as_u64()?;
        (bytes >= 48 << 20).then_some(())
    });
    let shown = cluster.command().arg("status").output().expect("aquifer can be started");
    assert!(text(&shown.stdout).contains("in shared memory, which is not paged"), "{}", text(&shown.stdout));
    drop(running.stdin.take());
    let _ = running.wait();
}
