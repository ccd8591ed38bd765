//! Segments that move between real programs, on one host and between hosts.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_client::segments::{Event, Process, Pulling, Segment};
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::restart_agent;
use aquifer_tests_e2e::{Cluster, build, eventually};
use tempfile::TempDir;

/// Longest time to wait for a segment.
const SEGMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Programs that use segments.
pub(super) struct Programs {
    folder: TempDir,
    libraries: PathBuf,
}

impl Programs {
    pub fn build() -> Self {
        let folder = TempDir::new().expect("a folder");
        let source = std::fs::read_to_string(build::sources().join("segments.c")).expect("its source");
        let header = format!("-I{}", build::root().join("bindings/c").display());
        let libraries = build::binary().parent().expect("it lies in a folder").to_owned();
        let library = format!("-L{}", libraries.display());
        let flags = ["-Wall", "-Wextra", "-Werror", &header, "-Wl,--no-as-needed", &library, "-laquifer"];
        let _program = build::compile(folder.path(), "segments", &source, &flags);
        Self { folder, libraries }
    }

    /// Starts the program in C.
    pub fn start(&self, agent: &Path, words: &[&str]) -> Child {
        self.start_by(Command::new(self.path()), agent, words)
    }

    /// Path of the program in C.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("segments")
    }

    /// Starts the program by a command that needs only its arguments.
    pub fn start_by(&self, mut command: Command, agent: &Path, words: &[&str]) -> Child {
        start(command.args(words).env("LD_LIBRARY_PATH", &self.libraries), agent)
    }
}

pub(super) fn start(command: &mut Command, agent: &Path) -> Child {
    command.env("AQUIFER_AGENT", agent).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("it can be started")
}

/// A program that waits for lines and prints some.
pub(super) struct PipedProgram {
    program: Child,
    printed: BufReader<ChildStdout>,
}

impl PipedProgram {
    pub fn with(mut program: Child) -> Self {
        let printed = BufReader::new(program.stdout.take().expect("it is piped"));
        Self { program, printed }
    }

    /// Sends a line.
    pub fn request(&mut self) {
        let input = self.program.stdin.as_mut().expect("it is piped");
        input.write_all(b"\n").expect("it reads");
    }

    /// The next line that it prints.
    pub fn next_line(&mut self) -> String {
        let mut found = String::new();
        self.printed.read_line(&mut found).expect("it prints");
        found
    }

    pub fn expect(&mut self, line: &str) {
        let found = self.next_line();
        if found.trim_end() != line {
            panic!("{found:?} instead of {line:?}: {}", self.errors());
        }
    }

    /// The program's standard error, read until the program ends.
    pub fn errors(&mut self) -> String {
        let mut errors = String::new();
        let _read = self.program.stderr.take().map(|mut stderr| stderr.read_to_string(&mut errors));
        errors
    }
}

impl Drop for PipedProgram {
    fn drop(&mut self) {
        let _killed = self.program.kill();
        let _waited = self.program.wait();
    }
}

/// Waits until a program has ended well. Returns what it has printed.
pub(super) fn end(program: Child) -> String {
    let output = program.wait_with_output().expect("it was started");
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// Waits until all programs have ended well. Returns what they have printed.
fn end_all(programs: Vec<Child>) -> String {
    let outputs: Vec<_> =
        programs.into_iter().map(|program| program.wait_with_output().expect("it was started")).collect();
    let errors: Vec<_> = outputs.iter().map(|output| (output.status, text(&output.stderr))).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{errors:?}");
    outputs.iter().map(|output| text(&output.stdout)).collect()
}

/// Two programs that hand a ring to each other.
pub(super) struct Relay(Vec<Child>);

impl Relay {
    /// Starts the programs at their agents, for a number of turns.
    pub fn start(agents: [&Path; 2], turns: u32) -> Self {
        let program = super::examples::rust_example("relay");
        let names = ["first", "second"];
        let players = [0, 1].map(|player| {
            let words = [names[player], names[1 - player], &turns.to_string()];
            start(Command::new(&program).args(words), agents[player])
        });
        Self(players.into())
    }

    /// Whether one of the programs has ended.
    pub fn has_ended(&mut self) -> bool {
        self.0.iter_mut().any(|player| player.try_wait().expect("it was started").is_some())
    }

    /// Waits for the ends of the programs, and checks their results.
    pub fn assert_success(self, turns: u32) {
        let printed = end_all(self.0);
        assert!(printed.starts_with(&format!("{turns} turns, {turns}000 visits")), "{printed}");
    }
}

/// Two programs that count the words of the project's documents.
pub(super) struct WordCounts {
    players: Vec<Child>,
    partitions: u32,
    _folder: TempDir,
}

impl WordCounts {
    /// Starts the programs at their agents. They count the documents `times` times.
    pub fn start(agents: [&Path; 2], program: &Path, partitions: u32, times: usize) -> Self {
        let folder = TempDir::new().expect("a folder");
        let file = folder.path().join("words.txt");
        let documents = ["ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md", "docs/formats/paging.md"];
        let read = |name: &str| std::fs::read_to_string(build::root().join(name)).expect("a document");
        let text = documents.map(read).concat().repeat(times);
        std::fs::write(&file, text).expect("a file can be written");
        let libraries = build::binary().parent().expect("it lies in a folder");
        let players = [0, 1].map(|player| {
            let names = ["first", "second"];
            let mut command = Command::new(program);
            command.args([names[player], names[1 - player]]).arg(&file).arg(partitions.to_string());
            start(command.env("LD_LIBRARY_PATH", libraries), agents[player])
        });
        Self { players: players.into(), partitions, _folder: folder }
    }

    /// Whether one of the programs has ended.
    pub fn has_ended(&mut self) -> bool {
        self.players.iter_mut().any(|player| player.try_wait().expect("it was started").is_some())
    }

    /// Waits for the ends of the programs, which compare the counts themselves.
    pub fn assert_success(self) {
        let printed = end_all(self.players);
        let middle = format!(" in {} partitions, ", self.partitions);
        let moves = printed.trim().rsplit_once(&middle);
        let moves = moves.and_then(|(_, moves)| moves.strip_suffix(" hand-overs"));
        // Half of them at first, and all of those back.
        let moves: u32 = moves.and_then(|moves| moves.parse().ok()).unwrap_or_else(|| panic!("{printed}"));
        assert!(moves >= self.partitions, "{printed}");
    }
}

#[test]
fn two_programs_share_out_the_counting_of_words() {
    let cluster = Cluster::up(1, "64M");
    let agent = cluster.agent_socket();
    WordCounts::start([agent, agent], &super::examples::rust_example("word_counts"), 8, 1).assert_success();
    let folder = TempDir::new().expect("a folder");
    let program = build::compile_cpp(folder.path(), &build::root().join("examples/word_counts.cpp"));
    WordCounts::start([agent, agent], &program, 8, 1).assert_success();
}

#[test]
fn programs_of_a_host_hand_segments_to_each_other() {
    let cluster = Cluster::up(1, "64M");
    let agent = cluster.agent_socket();
    let programs = Programs::build();
    let peer = programs.start(agent, &["peer", "away", "home"]);
    assert_eq!(end(programs.start(agent, &["home", "home", "away"])), "done\n");
    assert_eq!(end(peer), "done\n");
    Relay::start([agent, agent], 101).assert_success(101);
}

/// The commands by which an operator lists, moves and frees segments.
#[test]
fn an_operator_moves_and_frees_a_segment() {
    let cluster = Cluster::up(1, "64M");
    let agent = cluster.agent_socket();
    let programs = Programs::build();
    let mut second = PipedProgram::with(programs.start(agent, &["orphan", "second", "ahead"]));
    second.expect("open");
    let first = Process::open_at(agent, "first").expect("the name is free");
    let segment = first.allocate(7, 64 << 10).expect("there is memory");
    segment.words().iter().for_each(|word| word.store(1, Relaxed));
    let command = |words: &[&str]| {
        let output = cluster.command().arg("segment").args(words).output().expect("it can be started");
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    };
    let expect = |words: &[&str], is_success: bool, part: &str| {
        let (found, printed) = command(words);
        assert!(found == is_success && printed.contains(part), "{words:?}: {printed}");
    };
    expect(&["list"], true, "segment 7: 64 KiB, process first\nsegments: 1, 64 KiB; handed over: 0;");
    expect(&["status", "7"], true, "address: 0x30");
    let status = cluster.command().arg("status").output().expect("it can be started");
    assert!(text(&status.stdout).contains("segments: 1, 64 KiB; handed over: 0;"));
    expect(&["status", "8"], false, "segment 8 is not on this host");
    expect(&["free", "7"], false, "in use by process \"first\"");
    expect(&["move", "7", "absent"], false, "no other process of this user has the name \"absent\"");
    expect(&["move", "7", "second", "--timeout", "1ms"], false, "was asked to hand segment 7 over to second");
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| command(&["move", "7", "second"]));
        let event = first.next_event(Pulling::Ahead, SEGMENT_TIMEOUT).expect("the agent runs");
        let Some(Event::Asked { id: 7, process }) = event else { panic!("{event:?}") };
        segment.connect(&process).expect("it is open");
        segment.transfer().expect("it accepts it");
        // The request before was still there, so the second one may have come too late.
        assert!(moved.join().unwrap().0);
    });
    second.request();
    second.expect("received");
    drop(second);
    eventually("the process to be seen to have ended", || {
        command(&["list"]).1.contains("of second, which is away").then_some(())
    });
    let json: serde_json::Value = serde_json::from_str(&command(&["list", "--json"]).1).expect("JSON");
    assert_eq!((&json["segments"][0]["id"], &json["segments"][0]["process"]), (&7.into(), &"second".into()));
    expect(&["free", "7"], true, "segment 7 of user");
    expect(&["list"], true, "segments: 0");
}

/// A process dies in the middle of a change, and the next one reverts to the synced copies.
#[test]
fn a_segment_is_synced_and_reverted() {
    let cluster = Cluster::up_with(2, "160M", &["--heap-memory", "64M"]);
    let agent = cluster.agent_socket();
    let fill = |segment: &Segment<'_>, from: usize, value: u64| {
        segment.words().iter().skip(from).step_by(512).for_each(|word| word.store(value, Relaxed));
    };
    let process = Process::open_at(agent, "first").expect("the name is free");
    // 65 chunks, of which the last one is a page.
    let mut segment = process.allocate(7, (4 << 20) + 4096).expect("there is memory");
    let error = segment.sync(3).expect_err("there are two nodes");
    assert!(error.to_string().contains("3 copies need as many nodes that serve heaps, and 2"), "{error}");
    fill(&segment, 0, 1);
    let synced = segment.sync(2).expect("two nodes serve heaps");
    assert_eq!((synced.version, synced.nodes.len(), synced.written_bytes), (1, 2, (4 << 20) + 4096));
    // Nothing has changed.
    assert_eq!(segment.sync(2).expect("they serve").written_bytes, 0);
    segment.words()[9000].store(5, Relaxed);
    let synced = segment.sync(2).expect("they serve");
    assert_eq!((synced.version, synced.written_bytes), (3, 64 << 10));
    let all: Vec<u64> = segment.words().iter().map(|word| word.load(Relaxed)).collect();
    fill(&segment, 3, 77);
    drop(segment);
    drop(process);
    let process = eventually("the agent to see that it has ended", || Process::open_at(agent, "first").ok());
    let received = process.receive(Pulling::Ahead, SEGMENT_TIMEOUT).expect("the agent runs");
    let mut segment = received.expect("it was left");
    let error = process.restore(7, Duration::ZERO).expect_err("it is not lost");
    assert!(error.to_string().contains("segment 7 cannot be restored: a host has it"), "{error}");
    segment.revert().expect("there are copies");
    assert!(segment.words().iter().zip(&all).all(|(word, value)| word.load(Relaxed) == *value));
    // Another process continues from the copies of the first one.
    assert_eq!(segment.sync(2).expect("they serve").written_bytes, 0);
    segment.words()[0].store(0, Relaxed);
    assert_eq!(segment.sync(1).expect("they serve").written_bytes, 64 << 10);
    segment.deallocate().expect("it is here");
    let objects: Vec<u64> = super::heaps::reports(&cluster).iter().map(|heap| heap.objects).collect();
    assert_eq!(objects, [0, 0], "all objects of the copies are freed");
    let segment = process.allocate(7, 4096).expect("the number is free");
    assert!(segment.words().iter().all(|word| word.load(Relaxed) == 0));
}

/// Programs in C and C++ sync, and hand over the segments that an operator requests.
#[test]
fn programs_in_c_sync_and_are_asked() {
    let cluster = Cluster::up_with(2, "160M", &["--heap-memory", "64M"]);
    let agent = cluster.agent_socket();
    let command = |words: &[&str]| {
        let output = cluster.command().arg("segment").args(words).output().expect("it can be started");
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let programs = Programs::build();
    let mut source = PipedProgram::with(programs.start(agent, &["synced", "first", "1"]));
    source.expect("synced");
    let listed = command(&["list"]);
    assert!(listed.contains("segment 9: 4 MiB, process first, synced "), "{listed}");
    let mut second = PipedProgram::with(programs.start(agent, &["orphan", "second", "ahead"]));
    second.expect("open");
    command(&["move", "9", "second"]);
    second.request();
    second.expect("received");
    source.expect("done");
    let json: serde_json::Value = serde_json::from_str(&command(&["list", "--json"])).expect("JSON");
    let copies = &json["copies"][0];
    assert_eq!((&copies["version"], copies["nodes"].as_array().map(Vec::len)), (&2.into(), Some(1)));
    drop(second);
    eventually("the process to be seen to have ended", || {
        command(&["list"]).contains("of second, which is away").then_some(())
    });
    command(&["free", "9"]);
    assert!(command(&["list"]).starts_with("segments: 0"));
    let folder = TempDir::new().expect("a folder");
    let program = build::compile_cpp(folder.path(), &build::sources().join("synced.cpp"));
    let libraries = build::binary().parent().expect("it lies in a folder");
    let mut synced = Command::new(program);
    assert_eq!(end(start(synced.arg("third").env("LD_LIBRARY_PATH", libraries), agent)), "done\n");
    let objects: Vec<u64> = super::heaps::reports(&cluster).iter().map(|heap| heap.objects).collect();
    assert_eq!(objects, [0, 0], "all objects of the copies are freed");
}

/// Segments move by descriptors, while the agent is killed and started again repeatedly.
#[test]
fn segments_move_on_a_host_whose_agent_is_killed() {
    const TURNS: u32 = 2000;
    let cluster = Cluster::up(1, "64M");
    let agent = cluster.agent_socket();
    let mut players = Relay::start([agent, agent], TURNS);
    // An agent that is killed opens no names.
    let observer = Process::open_at(agent, "observer").expect("the name is free");
    eventually("a segment to move", || {
        let list = observer.list().expect("the agent runs");
        list.iter().any(|segment| segment.process == "second").then_some(())
    });
    let mut kills = 0;
    while !players.has_ended() && kills < 100 {
        restart_agent(&cluster);
        kills += 1;
    }
    players.assert_success(TURNS);
    assert!(kills > 0);
}
