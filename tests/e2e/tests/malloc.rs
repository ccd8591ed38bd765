//! Programs with `libaquifer-malloc`, linked or preloaded: data, limit, freed memory, restarts of
//! the agent, and error messages.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};

use aquifer_ipc::{LOCAL_MAX_VARIABLE, LOCAL_VARIABLE, REPLICAS_VARIABLE};
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::redis::PYTHON;
use aquifer_tests_e2e::restart::{await_time, figure, restart_agent};
use aquifer_tests_e2e::run::{Outcome, Running, mempool_share, run_plainly, status};
use aquifer_tests_e2e::steps::assert_within_limit;
use aquifer_tests_e2e::{Cluster, build, eventually};

use super::idle_memory::{IDLE_MIB, Meminfo};

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 32 * MIB;
/// Memory of the program that its allocator has not allocated.
const BESIDE: u64 = 16 * MIB;
const THREADS: &str = "4";
const EXIT_FAILED: i32 = aquifer_ipc::EXIT_FAILED;

fn library() -> PathBuf {
    build::binary().with_file_name("libaquifer_malloc.so")
}

fn checker() -> PathBuf {
    build::programs().join("malloccheck")
}

/// A command that runs a program with the library preloaded, as the child of a shell without it:
/// the sampler reads descendants only.
fn preloaded(socket: &Path, local: Option<&str>, program: &[&str]) -> Command {
    let mut preload = std::ffi::OsString::from("LD_PRELOAD=");
    preload.push(library());
    let mut command = Command::new("sh");
    // Without `exit` the shell would execute the program in its own process.
    command.args(["-c", "\"$@\"; exit $?", "sh", "env"]).arg(preload);
    if let Some(local) = local {
        command.arg(format!("{LOCAL_VARIABLE}={local}"));
    }
    command.args(program).env("AQUIFER_AGENT", socket).env_remove(REPLICAS_VARIABLE);
    command
}

fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().expect("it can be started")
}

/// Runs a program with the library, within the limit.
fn run_within(cluster: &Cluster, program: &[&str]) -> Outcome {
    let mut command = preloaded(cluster.agent_socket(), Some(&LIMIT.to_string()), program);
    let outcome = Running::start(&mut command, true, mempool_share(cluster.agent_socket())).wait();
    outcome.assert_success("the preloaded program");
    outcome
}

fn torture(cluster: &Cluster) -> Command {
    let (checker, bytes) = (checker(), (4 * LIMIT).to_string());
    let program = [checker.to_str().expect("a plain path"), "torture", &bytes, THREADS];
    preloaded(cluster.agent_socket(), Some(&LIMIT.to_string()), &program)
}

#[test]
fn functions_behave_as_the_manual_says() {
    let checker = checker();
    let program = [checker.to_str().expect("a plain path"), "functions"];
    let cluster = Cluster::up(1, "512M");
    for local in [None, Some("16M")] {
        let output = output(&mut preloaded(cluster.agent_socket(), local, &program));
        assert!(output.status.success(), "{local:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "all functions do what they should\n");
    }
    cluster.assert_all_free();
}

/// A program that prints a line at some places and waits there.
struct Stopping {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Stopping {
    fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it can be started");
        let stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, stdin, stdout }
    }

    fn await_place(&mut self, place: &str) {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("text");
        assert_eq!(line.trim(), place);
    }

    fn proceed(&mut self) {
        self.stdin.write_all(b"\n").expect("it reads");
    }
}

#[test]
fn freed_memory_is_freed_on_the_nodes() {
    let cluster = Cluster::up(1, "512M");
    let (checker, bytes) = (checker(), (6 * LIMIT).to_string());
    let program = [checker.to_str().expect("a plain path"), "giveback", &bytes];
    let mut program =
        Stopping::start(&mut preloaded(cluster.agent_socket(), Some(&LIMIT.to_string()), &program));
    let remote_bytes = || figure(&cluster, "remote_bytes").expect("the agent answers");
    program.await_place("held");
    eventually("most of it to be on the node", || (remote_bytes() > 4 * LIMIT).then_some(()));
    program.proceed();
    program.await_place("freed");
    eventually("the memory to be freed", || (remote_bytes() < LIMIT / 2).then_some(()));
    program.proceed();
    assert!(program.child.wait().expect("it ends").success());
    cluster.assert_all_free();
}

/// A Python program that touches 96 MiB until it receives a line.
const PYTHON_TOUCHES: &str = "
import select, sys
held = [bytearray(4096) for _ in range(24 * 1024)]
print('held', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for page in held: page[0] = 1
";

#[test]
fn an_elastic_allocator_has_idle_memory_of_the_host() {
    let meminfo = Meminfo::new(IDLE_MIB);
    let cluster = meminfo.up();
    let program = ["PYTHONMALLOC=malloc", PYTHON, "-c", PYTHON_TOUCHES];
    let mut command = preloaded(cluster.agent_socket(), Some(&LIMIT.to_string()), &program);
    let mut program = Stopping::start(command.env(LOCAL_MAX_VARIABLE, "auto"));
    program.await_place("held");
    assert_eq!(figure(&cluster, "limit_max_bytes"), Some(u64::MAX));
    eventually("all of it to be resident", || {
        (figure(&cluster, "resident_bytes")? > 3 * LIMIT - BESIDE).then_some(())
    });
    program.proceed();
    assert!(program.child.wait().expect("it ends").success());
    cluster.assert_all_free();
}

/// A Python program with 100,000s of objects, a database in memory, and a child that checks all.
const PYTHON_WORK: &str = r#"
import hashlib, os, sqlite3, sys
def value(i): return hashlib.sha256(str(i).encode()).digest() * 20
held = {i: value(i) for i in range(100000)}
base = sqlite3.connect(":memory:")
base.execute("create table t (k integer primary key, v blob)")
base.executemany("insert into t values (?, ?)", ((i, value(-i)) for i in range(50000)))
for i in range(0, 100000, 3): held[i] = value(i + 1)
def check():
    for i, found in held.items(): assert found == value(i + 1 if i % 3 == 0 else i), i
    for i, found in base.execute("select k, v from t"): assert found == value(-i), i
child = os.fork()
check()
if child == 0: os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("all is there")
"#;

#[test]
fn an_unmodified_program_has_the_same_output() {
    let plain = run_plainly(&["env", "PYTHONMALLOC=malloc", PYTHON, "-c", PYTHON_WORK], true);
    plain.assert_success("the plain run");
    let cluster = Cluster::up_with(2, "512M", &["--fabric", "tcp"]);
    let outcome = run_within(&cluster, &["PYTHONMALLOC=malloc", PYTHON, "-c", PYTHON_WORK]);
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    cluster.assert_all_free();
}

/// Memory that a program maps itself is not paged, and does not count towards the limit.
#[test]
fn other_memory_of_the_program_neither_counts_nor_is_paged() {
    let cluster = Cluster::up(1, "512M");
    let work = "import mmap\n\
                m = mmap.mmap(-1, 200 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n\
                for at in range(0, 200 << 20, 4096): m[at] = at >> 12 & 255\n\
                blocks = [bytes([i & 255]) * 100000 for i in range(1000)]\n\
                assert all(block == bytes([i & 255]) * 100000 for i, block in enumerate(blocks))\n\
                assert all(m[at] == at >> 12 & 255 for at in range(0, 200 << 20, 4096))\n\
                resident = next(int(l.split()[1]) >> 10 for l in open('/proc/self/status') if \
                l.startswith('RssAnon'))\n\
                assert 200 <= resident < 300, resident\n\
                print('both are there')\n";
    let program = ["PYTHONMALLOC=malloc", PYTHON, "-c", work];
    let output = output(&mut preloaded(cluster.agent_socket(), Some("24M"), &program));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "both are there\n");
    cluster.assert_all_free();
}

#[test]
fn a_child_survives_the_parent_that_opened_the_run() {
    let cluster = Cluster::up(1, "512M");
    let work = "import os\n\
                blocks = [bytes([i & 255]) * 50000 for i in range(3000)]\n\
                pipe = os.pipe()\n\
                if os.fork(): os._exit(0)\n\
                os.close(pipe[1])\n\
                os.read(pipe[0], 1)\n\
                assert all(block == bytes([i & 255]) * 50000 for i, block in enumerate(blocks))\n\
                more = [bytes([i & 255]) * 50001 for i in range(1000)]\n\
                assert all(block == bytes([i & 255]) * 50001 for i, block in enumerate(more))\n\
                print('it went on')\n";
    let program = ["PYTHONMALLOC=malloc", PYTHON, "-c", work];
    // The output ends with the child.
    let output = output(&mut preloaded(cluster.agent_socket(), Some("24M"), &program));
    assert_eq!(text(&output.stdout), "it went on\n", "{}", text(&output.stderr));
    cluster.assert_all_free();
}

#[test]
fn an_error_is_printed_and_ends_the_program() {
    let nowhere = Path::new("/nowhere/agent.sock");
    let checker = checker();
    let program = [checker.to_str().expect("a plain path"), "functions"];
    let refused = |socket: &Path, local: &str, more: &[&str], expected: &[&str]| {
        let words: Vec<&str> = more.iter().chain(&program).copied().collect();
        let output = output(&mut preloaded(socket, Some(local), &words));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_FAILED), "{local}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with("aquifer: ") && expected.iter().all(|words| said.contains(words)), "{said}");
        assert!(output.stdout.is_empty());
    };
    refused(nowhere, "lots", &[], &["AQUIFER_LOCAL", "\"lots\" is not a size"]);
    refused(nowhere, "", &[], &["AQUIFER_LOCAL", "\"\" is not a size"]);
    refused(nowhere, "64M", &["AQUIFER_REPLICAS=4"], &["AQUIFER_REPLICAS", "\"4\" is not 1, 2 or 3"]);
    refused(nowhere, "64M", &[], &["no agent answers at /nowhere/agent.sock", "aquifer up", "AQUIFER_AGENT"]);
    let cluster = Cluster::up(1, "512M");
    refused(cluster.agent_socket(), "4K", &[], &["4096 bytes is too small"]);
    refused(cluster.agent_socket(), "64M", &["AQUIFER_REPLICAS=3"], &["3 memory nodes", "has 1"]);
    cluster.assert_all_free();
}

#[test]
fn without_a_limit_it_is_an_ordinary_allocator() {
    let checker = checker();
    let program = [checker.to_str().expect("a plain path"), "torture", "60000000", THREADS];
    // There is no agent, and the library does not connect to one.
    let output = output(&mut preloaded(Path::new("/nowhere/agent.sock"), None, &program));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(
        (text(&output.stdout).as_str(), text(&output.stderr).as_str()),
        ("all is as it was written\n", "")
    );
}

mod long {
    use super::*;

    #[test]
    fn the_arena_stays_within_the_limit_as_it_grows() {
        let checker = build::programs().join("checker");
        let program = [checker.to_str().expect("a plain path"), "steps", "--bytes", "192M", "--rounds", "1"];
        let cluster = Cluster::up(2, "256M");
        let mut command = preloaded(cluster.agent_socket(), Some(&LIMIT.to_string()), &program);
        assert_within_limit(&cluster, &mut command, LIMIT + BESIDE);
        cluster.assert_all_free();
    }

    #[test]
    fn nothing_is_lost_when_agents_die() {
        let cluster = Cluster::up(2, "512M");
        let mut run = Running::start(&mut torture(&cluster), true, Box::new(|| 0));
        let mut restarts = 0;
        while restarts < 4 {
            let goes_on = await_time(&mut run, "faults to be served", || {
                figure(&cluster, "faults").is_some_and(|faults| faults >= 300)
            });
            if !goes_on {
                break;
            }
            restart_agent(&cluster);
            restarts += 1;
        }
        let outcome = run.wait();
        outcome.assert_success("the program whose agents died");
        assert_eq!(text(&outcome.stdout), "all is as it was written\n");
        assert!(restarts > 0, "no agent died");
        cluster.assert_all_free();
    }

    #[test]
    fn parent_and_child_keep_four_times_the_limit() {
        let cluster = Cluster::up(2, "512M");
        let (checker, bytes) = (checker(), (4 * LIMIT).to_string());
        run_within(&cluster, &[checker.to_str().expect("a plain path"), "torture", &bytes, THREADS]);
        cluster.assert_all_free();
    }

    #[test]
    fn under_aquifer_run_all_is_paged_once() {
        let cluster = Cluster::up(1, "512M");
        let (checker, preload) = (checker(), format!("LD_PRELOAD={}", library().display()));
        let (bytes, local) = ((2 * LIMIT).to_string(), format!("{LOCAL_VARIABLE}=16M"));
        let shim = build::binary().with_file_name("libaquifer_shim.so");
        let both = format!("{preload}:{}", shim.display());
        let program = ["env", &both, &local, checker.to_str().expect("a plain path"), "torture", &bytes, "2"];
        let output = cluster.run("40M", &program);
        assert!(output.status.success(), "{}", text(&output.stderr));
        cluster.assert_all_free();
    }

    #[test]
    fn a_linked_program_works_like_a_preloaded_one() {
        let cluster = Cluster::up(1, "512M");
        let folder = tempfile::tempdir().expect("a folder");
        // The name of the installed library.
        std::fs::copy(library(), folder.path().join("libaquifer-malloc.so"))
            .expect("the library can be copied");
        let source = std::fs::read_to_string(build::sources().join("malloccheck.c")).expect("its source");
        let search = format!("-L{}", folder.path().display());
        let options = [
            "-fno-builtin",
            "-pthread",
            "-Wl,--no-as-needed",
            &search,
            "-laquifer-malloc",
            "-Wl,-rpath,$ORIGIN",
        ];
        let program = build::compile(folder.path(), "linked", &source, &options);
        let torture = |local: Option<&str>| {
            let mut command = Command::new(&program);
            command
                .args(["torture", &(4 * LIMIT).to_string(), "2"])
                .env("AQUIFER_AGENT", cluster.agent_socket());
            local.map(|local| command.env(LOCAL_VARIABLE, local));
            let output = output(&mut command);
            assert!(output.status.success(), "{}", text(&output.stderr));
        };
        // The sum over this user's runs, closed ones included.
        let faults = || {
            eventually("the run to be closed", || {
                let status = status(cluster.agent_socket()).expect("the agent answers");
                let is_closed = status["runs"].as_array().is_none_or(Vec::is_empty);
                is_closed.then(|| status["tenants"][0]["faults"].as_u64().unwrap_or(0))
            })
        };
        let before = faults();
        torture(Some("32M"));
        let served = faults();
        assert!(served > before, "nothing was paged");
        torture(None);
        assert_eq!(faults(), served, "it went unpaged");
        cluster.assert_all_free();
    }
}
