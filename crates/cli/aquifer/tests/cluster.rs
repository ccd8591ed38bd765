//! Clusters on one machine: up, status and down, with dead daemons and with bad input.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

/// Time after which a test fails. A test that passes does not wait for it.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A state folder whose cluster is stopped when the test ends.
pub struct TestCluster {
    folder: tempfile::TempDir,
}

impl TestCluster {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    pub fn aquifer(&self, arguments: &[&str]) -> Output {
        aquifer(&self.state(), arguments)
    }

    /// The output of `aquifer status --json`.
    pub fn status(&self) -> Value {
        serde_json::from_slice(&self.aquifer(&["status", "--json"]).stdout).unwrap()
    }

    /// Waits until one line of a daemon's log has all these words.
    fn await_log(&self, daemon: &str, words: &[&str]) {
        let path = self.state().join("log").join(format!("{daemon}.log"));
        let has_all = |line: &str| words.iter().all(|word| line.contains(word));
        while !std::fs::read_to_string(&path).unwrap().lines().any(has_all) {
            std::thread::yield_now();
        }
    }

    /// Names and process numbers of the daemons that run.
    pub fn running(&self) -> Vec<(String, i32)> {
        let status = self.status();
        let daemon = |daemon: &Value| {
            let pid = i32::try_from(daemon["pid"].as_i64()?).ok()?;
            daemon["alive"].as_bool()?.then(|| (daemon["name"].as_str().unwrap().to_owned(), pid))
        };
        status["parts"].as_array().unwrap().iter().filter_map(daemon).collect()
    }

    pub fn pid(&self, name: &str) -> i32 {
        self.running()
            .into_iter()
            .find(|(running, _)| running == name)
            .unwrap_or_else(|| panic!("{name} does not run"))
            .1
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        drop(self.aquifer(&["down"]));
    }
}

/// Runs `aquifer`. A cluster that it starts has no supervisor: a daemon that a test kills stays
/// dead.
pub fn aquifer(state: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .arg("--state")
        .arg(state)
        .args(arguments)
        .args(arguments.first().filter(|command| **command == "up").map(|_| "--no-restart"))
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

pub fn succeed(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Asserts that a command failed with this exit code and a message, and returns its standard error.
pub fn fail(output: &Output, code: i32) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    if code == 1 {
        assert!(stderr.starts_with("aquifer: "), "{stderr}");
    }
    stderr
}

/// Sends a signal and waits for the end of the process.
pub fn end(pid: i32, signal: Signal) {
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_send_signal(&pidfd, signal).unwrap();
    wait_readable(&pidfd);
}

fn wait_readable(descriptor: &impl AsFd) {
    let timeout = Timespec::try_from(TIMEOUT).unwrap();
    let polled = rustix::event::poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(polled, 1, "nothing to read in time");
}

pub const SMALL: [&str; 5] = ["up", "--nodes", "2", "--memory", "16M"];
const DAEMONS: [&str; 5] = ["directory", "keeper", "node-1", "node-2", "agent"];

#[test]
fn a_node_lends_more_and_less_while_it_is_up() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&["up", "--nodes", "2", "--memory", "16M", "--memory-max", "32M"]));
    let lends = |index: usize| cluster.status()["nodes"][index]["memory_bytes"].as_u64().unwrap() >> 20;
    assert_eq!((lends(0), lends(1)), (16, 16));
    let said = succeed(&cluster.aquifer(&["lend", "32M", "--node", "2"]));
    assert_eq!(said, "node 2 lends 32 MiB\n");
    assert_eq!((lends(0), lends(1)), (16, 32));
    assert_eq!(cluster.status()["nodes"][1]["free_bytes"], 32 << 20);
    succeed(&cluster.aquifer(&["lend", "0", "--node", "2"]));
    assert_eq!(cluster.status()["nodes"][1]["free_bytes"], 0);
    let refused = [
        (&["lend", "64M", "--node", "2"][..], "node 2 can lend 32 MiB at most"),
        (&["lend", "1M", "--node", "2"], "a node lends in steps of 2 MiB"),
        (&["lend", "8M"], "give the node with --node NUMBER; nodes: 1, 2"),
        (&["lend", "8M", "--node", "9"], "there is no node 9; nodes: 1, 2"),
    ];
    for (words, why) in refused {
        let output = cluster.aquifer(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{words:?}: {said}");
    }
    succeed(&cluster.aquifer(&["lend", "8M", "--node", "1", "--no-wait"]));
    succeed(&cluster.aquifer(&["down"]));
}

#[test]
fn a_cluster_starts_reports_its_status_and_stops() {
    let cluster = TestCluster::new();
    let said = succeed(&cluster.aquifer(&SMALL));
    assert!(said.contains("Started directory, keeper, node-1, node-2, agent"), "{said}");
    assert!(said.contains("2 nodes of 16 MiB"), "{said}");

    let status = cluster.status();
    assert_eq!(status["up"], true);
    assert_eq!(cluster.running().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), DAEMONS);
    assert_eq!(status["nodes"].as_array().unwrap().len(), 2);
    assert_eq!(status["nodes"][0]["id"], 1);
    assert_eq!(status["nodes"][0]["memory_bytes"], 16 << 20);
    assert_eq!(status["nodes"][0]["free_bytes"], 16 << 20);
    assert_eq!(status["agents"][0]["host"], 1);
    assert_eq!(status["agent"]["runs"], serde_json::json!([]));
    assert_eq!(status["problems"], serde_json::json!([]));
    let words = succeed(&cluster.aquifer(&["status"]));
    for word in DAEMONS.iter().chain(&["The cluster is up", "16 MiB free", "mempool"]) {
        assert!(words.contains(word), "{word} is missing in:\n{words}");
    }

    let pids = cluster.running();
    let said = succeed(&cluster.aquifer(&["down"]));
    assert!(said.contains("Stopped agent, node-1, node-2, keeper, directory"), "{said}");
    assert!(!said.contains("killed"), "{said}");
    for (name, pid) in pids {
        // A process that has ended and was not reaped yet has an empty command line.
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(command.is_empty(), "{name} still runs");
    }
    let left = std::fs::read_dir(cluster.state()).unwrap().map(|file| file.unwrap().path());
    let sockets: Vec<_> =
        left.filter(|path| path.extension().is_some_and(|extension| extension == "sock")).collect();
    assert!(sockets.is_empty(), "{sockets:?}");
    assert_eq!(cluster.status()["up"], false);
}

#[test]
fn up_twice_starts_nothing_twice() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    let before = cluster.running();
    for again in [&SMALL[..], &["up"]] {
        assert!(succeed(&cluster.aquifer(again)).contains("up already"));
        assert_eq!(cluster.running(), before);
    }
    let said = fail(&cluster.aquifer(&["up", "--nodes", "3"]), 1);
    assert!(said.contains("other settings") && said.contains("2 nodes of 16 MiB"), "{said}");
    assert!(said.contains("--nodes 2 instead of 3"), "{said}");
    let said = fail(&cluster.aquifer(&["up", "--nodes", "4", "--memory", "32M", "--keep-memory"]), 1);
    for word in ["--nodes 2 instead of 4", "--memory 16 MiB instead of 32 MiB", "no --keep-memory"] {
        assert!(said.contains(word), "{word} is missing in: {said}");
    }
    assert_eq!(cluster.running(), before);
}

#[test]
fn a_socket_that_is_gone_is_noticed() {
    let cluster = TestCluster::new();
    let shared = cluster.folder.path().join("shared.sock");
    let up = ["up", "--nodes=1", "--memory=16M", "--shared-socket", shared.to_str().unwrap()];
    succeed(&cluster.aquifer(&up));
    succeed(&cluster.aquifer(&["status"]));
    std::fs::remove_file(&shared).unwrap();
    let path = shared.to_str().unwrap();
    assert!(fail(&cluster.aquifer(&up), 1).contains(path));
    let status = cluster.aquifer(&["status"]);
    assert_eq!(status.status.code(), Some(3));
    assert!(String::from_utf8(status.stdout).unwrap().contains(&format!("{path} is gone")));
}

#[test]
fn the_shared_socket_replaces_no_file_and_no_living_agent() {
    let (cluster, other) = (TestCluster::new(), TestCluster::new());
    let shared = cluster.folder.path().join("shared.sock");
    std::fs::write(&shared, "a file").unwrap();
    let up = ["up", "--nodes=1", "--memory=16M", "--shared-socket", shared.to_str().unwrap()];
    assert!(fail(&cluster.aquifer(&up), 1).contains("not a socket"));
    assert_eq!(std::fs::read_to_string(&shared).unwrap(), "a file");
    std::fs::remove_file(&shared).unwrap();
    succeed(&cluster.aquifer(&up));
    assert!(fail(&other.aquifer(&up), 1).contains("another process listens there"));
    succeed(&cluster.aquifer(&["status"]));
}

#[test]
fn a_limit_without_a_cluster_says_what_to_do() {
    let said = fail(&TestCluster::new().aquifer(&["limit", "1", "64M"]), 1);
    for word in ["no cluster is up", "agent.sock", "aquifer up", "--state"] {
        assert!(said.contains(word), "{word} is missing in: {said}");
    }
}

#[test]
fn concurrent_starts_make_one_cluster() {
    let cluster = TestCluster::new();
    let others: Vec<_> = (0..3)
        .map(|_| {
            let state = cluster.state();
            std::thread::spawn(move || succeed(&aquifer(&state, &SMALL)))
        })
        .collect();
    let said: Vec<_> = others.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(said.iter().filter(|said| said.contains("Started")).count(), 1, "{said:?}");
    assert_eq!(cluster.running().len(), DAEMONS.len());
}

#[test]
fn down_without_a_cluster_says_so() {
    let cluster = TestCluster::new();
    assert!(succeed(&cluster.aquifer(&["down"])).contains("No cluster is up"));
    assert!(!cluster.state().exists(), "down creates no state folder");
    let status = cluster.aquifer(&["status"]);
    assert_eq!(status.status.code(), Some(4));
    let hint = format!("aquifer --state {} up", cluster.state().display());
    let words = String::from_utf8(status.stdout).unwrap();
    assert!(words.contains(&hint), "{words}");
    assert_eq!(cluster.status()["up"], false);
    assert!(!cluster.state().exists());
    succeed(&cluster.aquifer(&SMALL));
    assert!(succeed(&cluster.aquifer(&["down"])).contains("key, the logs and the directory stay"));
    assert!(cluster.state().join("cluster.key").exists());
    assert!(succeed(&cluster.aquifer(&["down"])).contains("No cluster is up"));
}

#[test]
fn a_purged_cluster_leaves_nothing_but_other_files() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    assert!(succeed(&cluster.aquifer(&["down", "--purge"])).contains("Removed"));
    assert!(!cluster.state().exists());
    succeed(&cluster.aquifer(&["up", "--nodes=1", "--memory=16M", "--heap-memory=8M"]));
    succeed(&cluster.aquifer(&["down", "--purge"]));
    assert!(!cluster.state().exists(), "heaps leave nothing");
    succeed(&cluster.aquifer(&SMALL));
    let other = cluster.state().join("notes.txt");
    std::fs::write(&other, "mine").unwrap();
    succeed(&cluster.aquifer(&["down"]));
    assert!(succeed(&cluster.aquifer(&["down", "--purge"])).contains("other files"));
    let left: Vec<_> = std::fs::read_dir(cluster.state()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(left, [other]);
}

#[test]
fn clusters_live_side_by_side() {
    let (one, two) = (TestCluster::new(), TestCluster::new());
    succeed(&one.aquifer(&SMALL));
    succeed(&two.aquifer(&["up", "--nodes", "1", "--memory", "8M"]));
    let of_two = two.running();
    assert_eq!(two.status()["nodes"].as_array().unwrap().len(), 1);
    assert_eq!(one.status()["nodes"].as_array().unwrap().len(), 2);
    // The option precedes the environment, also for the agent.
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
    command.env("AQUIFER_AGENT", two.state().join("agent.sock")).arg("--state").arg(one.state());
    let status: Value =
        serde_json::from_str(&succeed(&command.args(["status", "--json"]).output().unwrap())).unwrap();
    assert_eq!(status["nodes"][0]["free_bytes"], 16 << 20);
    succeed(&one.aquifer(&["down"]));
    assert_eq!(two.running(), of_two);
}

#[test]
fn dead_daemons_are_started_again() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    for victims in [&["node-2"][..], &["directory"], &["agent"], &["keeper", "node-1"], &DAEMONS] {
        let before = cluster.running();
        for victim in victims {
            end(cluster.pid(victim), Signal::KILL);
        }
        assert_eq!(cluster.status()["up"], false, "{victims:?} died");
        assert_eq!(cluster.running().len(), DAEMONS.len() - victims.len());
        let status = cluster.aquifer(&["status"]);
        assert_eq!(status.status.code(), Some(3), "{victims:?} died");
        let words = String::from_utf8(status.stdout).unwrap();
        assert!(words.contains(&format!("aquifer --state {} up", cluster.state().display())), "{words}");

        let said = succeed(&cluster.aquifer(&["up"]));
        let started = said.lines().find_map(|line| line.strip_prefix("Started ")).unwrap();
        assert_eq!(started.split(", ").collect::<Vec<_>>(), victims, "only the dead daemons are started");
        assert_eq!(cluster.status()["up"], true);
        for (name, pid) in before {
            assert_eq!(cluster.pid(&name) == pid, !victims.contains(&name.as_str()), "{name}");
            if victims.contains(&name.as_str()) && !victims.contains(&"keeper") {
                cluster.await_log(
                    "keeper",
                    &[&format!("name=\"{name}\" pid={pid}"), "killed by a signal", "signal=9"],
                );
            }
        }
    }
    assert_eq!(cluster.status()["nodes"].as_array().unwrap().len(), 2);
}

#[test]
fn a_cluster_without_running_daemons_can_get_other_settings() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    for (_, pid) in cluster.running() {
        end(pid, Signal::KILL);
    }
    assert!(succeed(&cluster.aquifer(&["up", "--nodes", "1", "--memory", "8M"])).contains("1 node of 8 MiB"));
    assert_eq!(cluster.running().len(), 4);
}

#[test]
fn a_daemon_in_the_foreground_stops_cleanly_on_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let cluster = TestCluster::new();
        let mut child = Command::new(env!("CARGO_BIN_EXE_aquifer"))
            .arg("--state")
            .arg(cluster.state())
            .args(["directory", "--detached"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        wait_readable(&output);
        assert_eq!(
            std::io::read_to_string(&mut output).unwrap(),
            "ready\n",
            "its output is closed after that"
        );

        let second = fail(&cluster.aquifer(&["directory"]), 1);
        assert!(second.contains("is already running"), "{second}");

        end(i32::try_from(child.id()).unwrap(), signal);
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal:?}");
        assert!(!cluster.state().join("directory.sock").exists());
    }
}

#[test]
fn a_daemon_without_its_directory_fails() {
    let cluster = TestCluster::new();
    let said = fail(&cluster.aquifer(&["node", "--id", "1", "--memory", "8M"]), 1);
    assert!(said.contains("directory"), "{said}");
    let said = fail(&cluster.aquifer(&["agent"]), 1);
    assert!(said.contains("directory") || said.contains("keeper"), "{said}");
    fail(&cluster.aquifer(&["agent", "--mempool", "900T"]), 1);
}

#[test]
fn a_failed_start_shows_the_log_and_stops_what_was_started() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    succeed(&cluster.aquifer(&["down"]));
    std::fs::write(cluster.state().join("directory.redb"), "no database\n".repeat(1000)).unwrap();
    let said = fail(&cluster.aquifer(&SMALL), 1);
    assert!(said.contains("directory did not start"), "{said}");
    assert!(said.contains("cannot be used as a directory"), "the end of the log is shown: {said}");
    assert_eq!(cluster.status()["parts"], serde_json::json!([]));

    // The socket of a node cannot be created: daemons that were started before are stopped.
    std::fs::remove_file(cluster.state().join("directory.redb")).unwrap();
    std::fs::create_dir_all(cluster.state().join("node-2.sock/file")).unwrap();
    let said = fail(&cluster.aquifer(&SMALL), 1);
    assert!(said.contains("node-2 did not start"), "{said}");
    assert_eq!(cluster.status()["up"], false);
    assert!(cluster.running().is_empty(), "{:?}", cluster.running());
    std::fs::remove_dir_all(cluster.state().join("node-2.sock")).unwrap();
    succeed(&cluster.aquifer(&SMALL));
}

#[test]
fn wrong_sizes_and_numbers_are_usage_errors() {
    let cluster = TestCluster::new();
    let wrong: [&[&str]; 11] = [
        &["up", "--memory", "lots"],
        &["up", "--memory", "0"],
        &["up", "--nodes", "0"],
        &["up", "--nodes", "65"],
        &["up", "--nodes", "-1"],
        &["up", "--grace", "2d"],
        &["up", "--grace", "0"],
        &["up", "--mempool", "1"],
        &["up", "--memory", "1"],
        &["node", "--id", "0", "--memory", "1G"],
        &["nonsense"],
    ];
    for arguments in wrong {
        fail(&cluster.aquifer(arguments), 2);
    }
    let said = fail(&cluster.aquifer(&["up", "--memory", "1X"]), 2);
    assert!(said.contains("\"1X\" is not a size"), "{said}");
    assert!(!cluster.state().exists());
}

#[test]
fn too_much_memory_is_refused_before_anything_starts() {
    let cluster = TestCluster::new();
    let said = fail(&cluster.aquifer(&["up", "--memory", "100T"]), 1);
    assert!(said.contains("3 nodes of 100 TiB are 300 TiB") && said.contains("--memory"), "{said}");
    assert!(!cluster.state().exists(), "nothing is left of it");
    succeed(&cluster.aquifer(&SMALL));
}

#[test]
fn an_unusable_state_folder_is_refused() {
    let cluster = TestCluster::new();
    let said = fail(&aquifer(Path::new("/proc/aquifer"), &["up"]), 1);
    assert!(said.contains("/proc/aquifer") && said.contains("--state"), "{said}");

    let file = cluster.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(fail(&aquifer(&file, &["up"]), 1).contains("is not a folder"));

    let of_other = cluster.folder.path().join("of_other");
    std::fs::create_dir(&of_other).unwrap();
    let of_other = if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&of_other, Some(4242), None).unwrap();
        of_other
    } else {
        PathBuf::from("/")
    };
    for command in ["up", "down", "status", "agent"] {
        assert!(fail(&aquifer(&of_other, &[command]), 1).contains("belongs to user"), "{command}");
    }
    let run = aquifer(&of_other, &["run", "--local", "64M", "--", "true"]);
    assert!(fail(&run, 125).contains("belongs to user"));

    let long = cluster.folder.path().join("l".repeat(120));
    assert!(fail(&aquifer(&long, &["up"]), 1).contains("shorter"));
}

#[test]
fn an_invalid_configuration_is_refused_and_down_removes_it() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    std::fs::write(cluster.state().join("cluster.json"), "{\"version\":9}").unwrap();
    let said = fail(&cluster.aquifer(&["up"]), 1);
    assert!(said.contains("cluster.json") && said.contains("aquifer down"), "{said}");
    assert!(
        succeed(&cluster.aquifer(&["down"])).contains("Stopped agent, node-1, node-2, keeper, directory")
    );
    succeed(&cluster.aquifer(&SMALL));
}

#[test]
fn the_state_folder_can_come_from_the_environment() {
    let cluster = TestCluster::new();
    succeed(&cluster.aquifer(&SMALL));
    let output = Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .env("AQUIFER_STATE", cluster.state())
        .args(["status", "--json"])
        .output()
        .unwrap();
    let status: Value = serde_json::from_str(&succeed(&output)).unwrap();
    assert_eq!(status["up"], true);
}

#[test]
fn a_runtime_folder_that_does_not_exist_is_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .env_remove("AQUIFER_STATE")
        .env("XDG_RUNTIME_DIR", "/no/such/folder")
        .arg("up")
        .output()
        .unwrap();
    let said = fail(&output, 1);
    for word in ["/no/such/folder, the value of XDG_RUNTIME_DIR,", "does not exist", "--state"] {
        assert!(said.contains(word), "{word} is missing in: {said}");
    }
}

#[test]
fn the_help_lists_commands_and_has_an_example() {
    let cluster = TestCluster::new();
    let help = succeed(&cluster.aquifer(&["--help"]));
    for word in ["up", "down", "status", "run", "Example", "aquifer run --local 256M -- python3"] {
        assert!(help.contains(word), "{word} is missing in:\n{help}");
    }
    assert!(succeed(&cluster.aquifer(&["--version"])).starts_with("aquifer "));
}

/// A device on which nothing can be written, as on a full disk.
fn full() -> Stdio {
    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn a_daemon_survives_a_log_that_cannot_be_written() {
    let cluster = TestCluster::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .arg("--state")
        .arg(cluster.state())
        .arg("keeper")
        .stderr(full())
        .spawn()
        .unwrap();
    let socket = cluster.state().join("keeper.sock");
    while !socket.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended instead of serving");
        std::thread::yield_now();
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn exit_codes_without_writable_output() {
    let cluster = TestCluster::new();
    let code = |words: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
        command.arg("--state").arg(cluster.state()).args(words).stdout(stdout).stderr(stderr);
        command.status().unwrap().code()
    };
    assert_eq!(code(&["run", "--local", "64M", "--", "true"], Stdio::null(), full()), Some(125));
    assert_eq!(code(&["status", "--json"], Stdio::null(), Stdio::null()), Some(4), "no cluster is up");
    assert_eq!(
        code(&["status", "--json"], full(), Stdio::null()),
        Some(1),
        "a failed write to standard output is a failure"
    );
}
