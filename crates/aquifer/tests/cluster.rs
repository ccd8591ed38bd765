//! Clusters as their users see them: up, status, down, and what happens when parts die or something is wrong.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

/// Long enough for any machine; a test that works never waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A state folder whose cluster ends with the test.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    fn aquifer(&self, arguments: &[&str]) -> Output {
        aquifer(&self.state(), arguments)
    }

    fn status(&self) -> Value {
        serde_json::from_str(&succeed(&self.aquifer(&["status", "--json"]))).unwrap()
    }

    /// Wait until one line of a part's log has all these words.
    fn await_log(&self, part: &str, words: &[&str]) {
        let path = self.state().join("log").join(format!("{part}.log"));
        let has_all = |line: &str| words.iter().all(|word| line.contains(word));
        while !std::fs::read_to_string(&path).unwrap().lines().any(has_all) {
            std::thread::yield_now();
        }
    }

    /// Names of the living parts and their processes.
    fn alive(&self) -> Vec<(String, i32)> {
        let status = self.status();
        let part = |part: &Value| {
            let pid = i32::try_from(part["pid"].as_i64()?).ok()?;
            part["alive"].as_bool()?.then(|| (part["name"].as_str().unwrap().to_owned(), pid))
        };
        status["parts"].as_array().unwrap().iter().filter_map(part).collect()
    }

    fn pid(&self, name: &str) -> i32 {
        self.alive()
            .into_iter()
            .find(|(alive, _)| alive == name)
            .unwrap_or_else(|| panic!("{name} is not alive"))
            .1
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.aquifer(&["down"]));
    }
}

fn aquifer(state: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .arg("--state")
        .arg(state)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn succeed(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What it says on stderr; it must fail with this code and one message of its own.
fn fail(output: &Output, code: i32) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    if code == 1 {
        assert!(stderr.starts_with("aquifer: "), "{stderr}");
    }
    stderr
}

/// Send a signal and wait for the end of the process.
fn end(pid: i32, signal: Signal) {
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_send_signal(&pidfd, signal).unwrap();
    wait_readable(&pidfd);
}

fn wait_readable(descriptor: &impl AsFd) {
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    let polled = rustix::event::poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(polled, 1, "it does not come");
}

const SMALL: [&str; 5] = ["up", "--nodes", "2", "--memory", "16M"];
const PARTS: [&str; 5] = ["directory", "keeper", "node-1", "node-2", "agent"];

#[test]
fn a_node_lends_more_and_less_while_it_is_up() {
    let place = Place::new();
    succeed(&place.aquifer(&["up", "--nodes", "2", "--memory", "16M", "--memory-max", "32M"]));
    let lends = |index: usize| place.status()["nodes"][index]["memory_bytes"].as_u64().unwrap() >> 20;
    assert_eq!((lends(0), lends(1)), (16, 16));
    let said = succeed(&place.aquifer(&["lend", "32M", "--node", "2"]));
    assert_eq!(said, "node 2 lends 32 MiB\n");
    assert_eq!((lends(0), lends(1)), (16, 32));
    assert_eq!(place.status()["nodes"][1]["free_bytes"], 32 << 20);
    succeed(&place.aquifer(&["lend", "0", "--node", "2"]));
    assert_eq!(place.status()["nodes"][1]["free_bytes"], 0);
    let refused = [
        (&["lend", "64M", "--node", "2"][..], "node 2 can lend 32 MiB at most"),
        (&["lend", "1M", "--node", "2"], "a node lends in steps of 2 MiB"),
        (&["lend", "8M"], "say which memory node, with --node NUMBER; there are: 1, 2"),
        (&["lend", "8M", "--node", "9"], "no memory node has the number 9; there are: 1, 2"),
    ];
    for (words, why) in refused {
        let output = place.aquifer(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{words:?}: {said}");
    }
    succeed(&place.aquifer(&["lend", "8M", "--node", "1", "--no-wait"]));
    succeed(&place.aquifer(&["down"]));
}

#[test]
fn a_cluster_comes_up_tells_of_itself_and_goes_down() {
    let place = Place::new();
    let said = succeed(&place.aquifer(&SMALL));
    assert!(said.contains("Started directory, keeper, node-1, node-2, agent"), "{said}");
    assert!(said.contains("2 nodes of 16 MiB"), "{said}");

    let status = place.status();
    assert_eq!(status["up"], true);
    assert_eq!(place.alive().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), PARTS);
    assert_eq!(status["nodes"].as_array().unwrap().len(), 2);
    assert_eq!(status["nodes"][0]["id"], 1);
    assert_eq!(status["nodes"][0]["memory_bytes"], 16 << 20);
    assert_eq!(status["nodes"][0]["free_bytes"], 16 << 20);
    assert_eq!(status["agents"][0]["host"], 1);
    assert_eq!(status["agent"]["runs"], serde_json::json!([]));
    assert_eq!(status["problems"], serde_json::json!([]));
    let words = succeed(&place.aquifer(&["status"]));
    for word in PARTS.iter().chain(&["The cluster is up", "16 MiB free", "mempool"]) {
        assert!(words.contains(word), "{word} is missing in:\n{words}");
    }

    let pids = place.alive();
    let said = succeed(&place.aquifer(&["down"]));
    assert!(said.contains("Stopped agent, node-1, node-2, keeper, directory"), "{said}");
    assert!(!said.contains("killed"), "{said}");
    for (name, pid) in pids {
        // One that has ended and was not reaped yet has no command line.
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(command.is_empty(), "{name} is still there");
    }
    let left = std::fs::read_dir(place.state()).unwrap().map(|file| file.unwrap().path());
    let sockets: Vec<_> =
        left.filter(|path| path.extension().is_some_and(|extension| extension == "sock")).collect();
    assert!(sockets.is_empty(), "{sockets:?}");
    assert_eq!(place.status()["up"], false);
}

#[test]
fn up_twice_starts_nothing_twice() {
    let place = Place::new();
    succeed(&place.aquifer(&SMALL));
    let before = place.alive();
    for again in [&SMALL[..], &["up"]] {
        assert!(succeed(&place.aquifer(again)).contains("up already"));
        assert_eq!(place.alive(), before);
    }
    let said = fail(&place.aquifer(&["up", "--nodes", "3"]), 1);
    assert!(said.contains("another shape") && said.contains("2 nodes of 16 MiB"), "{said}");
    fail(&place.aquifer(&["up", "--memory", "32M"]), 1);
    assert_eq!(place.alive(), before);
}

#[test]
fn two_who_bring_it_up_at_once_start_one_cluster() {
    let place = Place::new();
    let others: Vec<_> = (0..3)
        .map(|_| {
            let state = place.state();
            std::thread::spawn(move || succeed(&aquifer(&state, &SMALL)))
        })
        .collect();
    let said: Vec<_> = others.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(said.iter().filter(|said| said.contains("Started")).count(), 1, "{said:?}");
    assert_eq!(place.alive().len(), PARTS.len());
}

#[test]
fn down_without_a_cluster_says_so() {
    let place = Place::new();
    assert!(succeed(&place.aquifer(&["down"])).contains("No cluster is up"));
    assert!(!place.state().exists(), "nothing is made to be taken down");
    assert!(succeed(&place.aquifer(&["status"])).contains("aquifer up"));
    assert_eq!(place.status()["up"], false);
    assert!(!place.state().exists());
    succeed(&place.aquifer(&SMALL));
    succeed(&place.aquifer(&["down"]));
    assert!(succeed(&place.aquifer(&["down"])).contains("No cluster is up"));
}

#[test]
fn clusters_live_side_by_side() {
    let (one, two) = (Place::new(), Place::new());
    succeed(&one.aquifer(&SMALL));
    succeed(&two.aquifer(&["up", "--nodes", "1", "--memory", "8M"]));
    let of_two = two.alive();
    assert_eq!(two.status()["nodes"].as_array().unwrap().len(), 1);
    assert_eq!(one.status()["nodes"].as_array().unwrap().len(), 2);
    succeed(&one.aquifer(&["down"]));
    assert_eq!(two.alive(), of_two);
}

#[test]
fn what_died_is_brought_back() {
    let place = Place::new();
    succeed(&place.aquifer(&SMALL));
    for victims in [&["node-2"][..], &["directory"], &["agent"], &["keeper", "node-1"], &PARTS] {
        let before = place.alive();
        for victim in victims {
            end(place.pid(victim), Signal::KILL);
        }
        assert_eq!(place.status()["up"], false, "{victims:?} died");
        assert_eq!(place.alive().len(), PARTS.len() - victims.len());
        let words = succeed(&place.aquifer(&["status"]));
        assert!(words.contains("aquifer up"), "{words}");

        let said = succeed(&place.aquifer(&["up"]));
        let started = said.lines().find_map(|line| line.strip_prefix("Started ")).unwrap();
        assert_eq!(started.split(", ").collect::<Vec<_>>(), victims, "its shape is remembered");
        assert_eq!(place.status()["up"], true);
        for (name, pid) in before {
            assert_eq!(place.pid(&name) == pid, !victims.contains(&name.as_str()), "{name}");
            if victims.contains(&name.as_str()) && !victims.contains(&"keeper") {
                place.await_log(
                    "keeper",
                    &[&format!("name=\"{name}\" pid={pid}"), "killed by a signal", "signal=9"],
                );
            }
        }
    }
    assert_eq!(place.status()["nodes"].as_array().unwrap().len(), 2);
}

#[test]
fn a_cluster_that_died_whole_may_come_back_in_another_shape() {
    let place = Place::new();
    succeed(&place.aquifer(&SMALL));
    for (_, pid) in place.alive() {
        end(pid, Signal::KILL);
    }
    assert!(succeed(&place.aquifer(&["up", "--nodes", "1", "--memory", "8M"])).contains("1 node of 8 MiB"));
    assert_eq!(place.alive().len(), 4);
}

#[test]
fn a_part_in_the_foreground_ends_cleanly_when_asked() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let mut child = Command::new(env!("CARGO_BIN_EXE_aquifer"))
            .arg("--state")
            .arg(place.state())
            .args(["directory", "--detached"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        wait_readable(&output);
        assert_eq!(std::io::read_to_string(&mut output).unwrap(), "ready\n", "and then its output is closed");

        let second = fail(&place.aquifer(&["directory"]), 1);
        assert!(second.contains("running already"), "{second}");

        end(i32::try_from(child.id()).unwrap(), signal);
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal:?}");
        assert!(!place.state().join("directory.sock").exists());
    }
}

#[test]
fn a_part_without_what_it_needs_says_so() {
    let place = Place::new();
    let said = fail(&place.aquifer(&["node", "--id", "1", "--memory", "8M"]), 1);
    assert!(said.contains("directory"), "{said}");
    let said = fail(&place.aquifer(&["agent"]), 1);
    assert!(said.contains("directory") || said.contains("keeper"), "{said}");
    fail(&place.aquifer(&["agent", "--mempool", "900T"]), 1);
}

#[test]
fn a_part_that_cannot_start_shows_its_log_and_leaves_nothing_behind() {
    let place = Place::new();
    succeed(&place.aquifer(&SMALL));
    succeed(&place.aquifer(&["down"]));
    std::fs::write(place.state().join("directory.redb"), "no database\n".repeat(1000)).unwrap();
    let said = fail(&place.aquifer(&SMALL), 1);
    assert!(said.contains("directory did not start"), "{said}");
    assert!(said.contains("cannot be used as a directory"), "the log's last lines are shown: {said}");
    assert_eq!(place.status()["parts"], serde_json::json!([]));

    // A node's socket cannot be made: what was started before it is stopped again.
    std::fs::remove_file(place.state().join("directory.redb")).unwrap();
    std::fs::create_dir_all(place.state().join("node-2.sock/in-the-way")).unwrap();
    let said = fail(&place.aquifer(&SMALL), 1);
    assert!(said.contains("node-2 did not start"), "{said}");
    assert_eq!(place.status()["up"], false);
    assert!(place.alive().is_empty(), "{:?}", place.alive());
    std::fs::remove_dir_all(place.state().join("node-2.sock")).unwrap();
    succeed(&place.aquifer(&SMALL));
}

#[test]
fn wrong_sizes_and_numbers_are_usage_errors() {
    let place = Place::new();
    let wrong: [&[&str]; 8] = [
        &["up", "--memory", "lots"],
        &["up", "--memory", "0"],
        &["up", "--nodes", "0"],
        &["up", "--nodes", "65"],
        &["up", "--nodes", "-1"],
        &["up", "--grace", "2h"],
        &["node", "--id", "0", "--memory", "1G"],
        &["nonsense"],
    ];
    for arguments in wrong {
        fail(&place.aquifer(arguments), 2);
    }
    let said = fail(&place.aquifer(&["up", "--memory", "1X"]), 2);
    assert!(said.contains("\"1X\" is not a size"), "{said}");
    assert!(!place.state().exists());
}

#[test]
fn more_memory_than_there_is_is_refused_before_anything_starts() {
    let place = Place::new();
    let said = fail(&place.aquifer(&["up", "--memory", "100T"]), 1);
    assert!(said.contains("3 nodes of 100 TiB are 300 TiB") && said.contains("--memory"), "{said}");
    assert_eq!(place.status()["parts"], serde_json::json!([]));
    succeed(&place.aquifer(&SMALL));
}

#[test]
fn a_state_folder_that_cannot_be_ours_is_refused() {
    let place = Place::new();
    let said = fail(&aquifer(Path::new("/proc/aquifer"), &["up"]), 1);
    assert!(said.contains("/proc/aquifer") && said.contains("--state"), "{said}");

    let file = place.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(fail(&aquifer(&file, &["up"]), 1).contains("is not a folder"));

    let foreign = place.folder.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    let foreign = if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&foreign, Some(4242), None).unwrap();
        foreign
    } else {
        PathBuf::from("/")
    };
    for command in ["up", "down", "status", "agent"] {
        assert!(fail(&aquifer(&foreign, &[command]), 1).contains("belongs to user"), "{command}");
    }
    let run = aquifer(&foreign, &["run", "--local", "64M", "--", "true"]);
    assert!(fail(&run, 125).contains("belongs to user"));

    let long = place.folder.path().join("l".repeat(120));
    assert!(fail(&aquifer(&long, &["up"]), 1).contains("shorter"));
}

#[test]
fn a_shape_that_makes_no_sense_is_refused_and_down_removes_it() {
    let place = Place::new();
    succeed(&place.aquifer(&SMALL));
    std::fs::write(place.state().join("cluster.json"), "{\"version\":9}").unwrap();
    let said = fail(&place.aquifer(&["up"]), 1);
    assert!(said.contains("cluster.json") && said.contains("aquifer down"), "{said}");
    assert!(succeed(&place.aquifer(&["down"])).contains("Stopped agent, node-1, node-2, keeper, directory"));
    succeed(&place.aquifer(&SMALL));
}

#[test]
fn the_state_folder_can_come_from_the_environment() {
    let place = Place::new();
    succeed(&place.aquifer(&SMALL));
    let output = Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .env("AQUIFER_STATE", place.state())
        .args(["status", "--json"])
        .output()
        .unwrap();
    let status: Value = serde_json::from_str(&succeed(&output)).unwrap();
    assert_eq!(status["up"], true);
}

#[test]
fn the_help_teaches() {
    let place = Place::new();
    let help = succeed(&place.aquifer(&["--help"]));
    for word in ["up", "down", "status", "run", "An example", "aquifer run --local 256M -- python3"] {
        assert!(help.contains(word), "{word} is missing in:\n{help}");
    }
    assert!(succeed(&place.aquifer(&["--version"])).starts_with("aquifer "));
}

/// A device on which nothing can be written, as on a full disk.
fn full() -> Stdio {
    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn a_daemon_outlives_a_log_that_cannot_be_written() {
    let place = Place::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_aquifer"))
        .arg("--state")
        .arg(place.state())
        .arg("keeper")
        .stderr(full())
        .spawn()
        .unwrap();
    let socket = place.state().join("keeper.sock");
    while !socket.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended instead of serving");
        std::thread::yield_now();
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn commands_keep_their_exit_codes_when_nothing_can_be_written() {
    let place = Place::new();
    let code = |words: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer"));
        command.arg("--state").arg(place.state()).args(words).stdout(stdout).stderr(stderr);
        command.status().unwrap().code()
    };
    assert_eq!(code(&["run", "--local", "64M", "--", "true"], Stdio::null(), full()), Some(125));
    assert_eq!(code(&["status", "--json"], Stdio::null(), Stdio::null()), Some(0));
    assert_eq!(
        code(&["status", "--json"], full(), Stdio::null()),
        Some(1),
        "what is not written is no success"
    );
}
