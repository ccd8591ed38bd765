//! `aquifer run PROGRAM` behaves as the program: exit codes, signals, input, output and
//! environment.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::{Cluster, processes};
use rustix::process::Signal;

const LIMIT: &str = "64M";

fn shell(cluster: &Cluster, script: &str) -> Output {
    cluster.run(LIMIT, &["sh", "-c", script])
}

#[test]
fn exit_codes_pass_through() {
    let cluster = Cluster::up(1, "64M");
    for code in [0, 1, 3, 125, 255] {
        let output = shell(&cluster, &format!("exit {code}"));
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    }
    cluster.assert_all_free();
}

#[test]
fn a_signal_that_ends_the_program_ends_the_run() {
    let cluster = Cluster::up(1, "64M");
    for signal in [Signal::SEGV, Signal::KILL, Signal::ABORT, Signal::TERM] {
        let output = shell(&cluster, &format!("kill -{} $$", signal.as_raw()));
        assert_eq!(
            output.status.signal(),
            Some(signal.as_raw()),
            "{}: {}",
            output.status,
            text(&output.stderr)
        );
    }
    cluster.assert_all_free();
}

#[test]
fn signals_to_the_run_reach_the_program() {
    let cluster = Cluster::up(1, "64M");
    let script = "import signal, sys\n\
                  signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n\
                  print('ready', flush=True)\n\
                  while True: signal.pause()";
    let mut child = cluster
        .run_command(LIMIT, &["/usr/bin/python3", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .expect("aquifer can be started");
    let mut ready = [0; 6];
    child
        .stdout
        .as_mut()
        .expect("it was asked for")
        .read_exact(&mut ready)
        .expect("the program says that it is ready");
    processes::signal(child.id(), Signal::TERM);
    let status = child.wait().expect("our own child can be waited for");
    assert_eq!(status.code(), Some(42), "{status}");
}

/// A program that prints the number of each signal that it receives.
const LISTENER: &str = "import signal, sys\n\
    own = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}\n\
    def got(number, frame):\n\
    \x20   print(number, flush=True)\n\
    for number in signal.valid_signals() - own:\n\
    \x20   signal.signal(number, got)\n\
    print('ready', flush=True)\n\
    while True: signal.pause()";

/// Signals that a program can handle, in groups: job control, signals of a terminal or of the
/// kernel, and real-time signals.
const HANDLED_SIGNALS: [i32; 26] =
    [1, 2, 3, 5, 6, 10, 12, 13, 14, 15, 16, 17, 18, 23, 24, 25, 26, 27, 28, 29, 30, 31, 34, 40, 50, 64];

/// A shell that executes a script, in which a command is `"$@"`.
fn in_shell(script: &str, command: &Command) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", script, "sh"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

/// Sends signals to a run, one after the other, and checks that its program receives each.
fn assert_signals_arrive(command: &mut Command, run_of: impl Fn(u32) -> u32) {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it can be started");
    let mut lines = BufReader::new(child.stdout.take().expect("it was asked for")).lines();
    let mut next = || lines.next().expect("the program runs").expect("it writes text");
    assert_eq!(next(), "ready");
    let run = run_of(child.id());
    let send = |signal: i32| {
        let sent = Command::new("/bin/sh").args(["-c", &format!("kill -{signal} {run}")]).status();
        assert!(sent.expect("there is a shell").success());
    };
    for signal in HANDLED_SIGNALS {
        send(signal);
        assert_eq!(next(), signal.to_string());
    }
    // The first one stops the run when it has reached the program.
    for signal in [Signal::TSTP, Signal::CONT] {
        send(signal.as_raw());
        assert_eq!(next(), signal.as_raw().to_string());
    }
    processes::signal(run, Signal::KILL);
    child.wait().expect("our own child can be waited for");
}

#[test]
fn every_signal_reaches_the_program() {
    let cluster = Cluster::up(1, "64M");
    assert_signals_arrive(&mut cluster.run_command(LIMIT, &["/usr/bin/python3", "-c", LISTENER]), |run| run);
}

#[test]
fn signals_reach_a_program_that_a_script_has_started_in_the_background() {
    let cluster = Cluster::up(1, "64M");
    let run = cluster.run_command(LIMIT, &["/usr/bin/python3", "-c", LISTENER]);
    // A shell starts background jobs with SIGINT and SIGQUIT ignored.
    let mut shell = in_shell("\"$@\" & wait", &run);
    assert_signals_arrive(&mut shell, |shell| {
        let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"));
        children.expect("the shell runs").trim().parse().expect("it has one child")
    });
}

#[test]
fn a_run_that_ignores_stop_signals_continues() {
    let cluster = Cluster::up(1, "64M");
    let run = cluster.run_command(LIMIT, &["/usr/bin/python3", "-c", LISTENER]);
    let mut child = in_shell("trap '' TSTP; exec \"$@\"", &run)
        .stdout(Stdio::piped())
        .spawn()
        .expect("it can be started");
    let mut lines = BufReader::new(child.stdout.take().expect("it was asked for")).lines();
    let mut next = || lines.next().expect("the program runs").expect("it writes text");
    assert_eq!(next(), "ready");
    // The second one reaches the program only if the first one has not stopped the run.
    for signal in [Signal::TSTP, Signal::USR1] {
        processes::signal(child.id(), signal);
        assert_eq!(next(), signal.as_raw().to_string());
    }
    processes::signal(child.id(), Signal::KILL);
    child.wait().expect("our own child can be waited for");
}

#[test]
fn signals_that_the_run_ignores_are_ignored_by_the_program() {
    let cluster = Cluster::up(1, "64M");
    let script = "trap '' INT HUP USR1; exec \"$@\"";
    let read = ["grep", "SigIgn", "/proc/self/status"];
    let output = |command: &Command| in_shell(script, command).output().expect("there is a shell");
    let paged = output(&cluster.run_command(LIMIT, &read));
    let plain = output(Command::new(read[0]).args(&read[1..]));
    assert_eq!(text(&paged.stdout), text(&plain.stdout));
}

#[test]
fn input_and_output_are_the_programs() {
    const BYTES: usize = 8 << 20;
    let cluster = Cluster::up(1, "64M");
    let mut child = cluster
        .run_command(LIMIT, &["cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("aquifer can be started");
    let sent: Vec<u8> = (0..BYTES).map(|at| u8::try_from(at * 31 % 251).expect("below 251")).collect();
    let mut stdin = child.stdin.take().expect("it was asked for");
    let for_writer = sent.clone();
    let writer =
        std::thread::spawn(move || stdin.write_all(&for_writer).expect("the program reads its input"));
    let output = child.wait_with_output().expect("our own child can be waited for");
    writer.join().expect("all was written");
    assert!(output.status.success());
    assert!(output.stdout == sent, "the program's output is not what it was sent");
}

#[test]
fn arguments_environment_and_folder_are_the_programs() {
    let cluster = Cluster::up(1, "64M");
    let script = "printf '%s|' \"$0\" \"$@\" \"$AQUIFER_TEST\"; pwd";
    let mut command =
        cluster.run_command(LIMIT, &["sh", "-c", script, "name", "a b", "", "--local", "--", "ü\n"]);
    let output = command
        .env("AQUIFER_TEST", "kept = all")
        .current_dir("/usr")
        .output()
        .expect("aquifer can be started");
    assert_eq!(text(&output.stdout), "name|a b||--local|--|ü\n|kept = all|/usr\n");
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn shells_pipelines_and_background_jobs_work() {
    let cluster = Cluster::up(1, "64M");
    let script = "seq 1 50000 | sort -rn | head -n 2; (exit 7); echo $?; \
                  for i in 1 2 3; do (echo child $i >&2) & done; wait; echo `echo deep $(echo deeper)`";
    let plain = Command::new("sh").args(["-c", script]).output().expect("sh can be started");
    let paged = shell(&cluster, script);
    assert_eq!(text(&paged.stdout), text(&plain.stdout));
    assert_eq!(paged.status.code(), plain.status.code());
    assert_eq!(paged.stderr.len(), plain.stderr.len(), "{}", text(&paged.stderr));
    cluster.assert_all_free();
}

#[test]
fn statistics_of_an_unpaged_program_say_so() {
    let cluster = Cluster::up(1, "64M");
    let stats = cluster.state().join("stats.json");
    let stats_path = stats.to_str().expect("a plain path");
    let output =
        cluster.command().args(["run", "--local", LIMIT, "--stats", stats_path, "--", "true"]).output();
    let output = output.expect("aquifer can be started");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stats = std::fs::read(&stats).expect("the statistics were written");
    let stats: serde_json::Value = serde_json::from_slice(&stats).expect("they are JSON");
    for name in ["evictions", "remote_reads", "remote_writes", "remote_peak_bytes", "lost_pages"] {
        assert_eq!(stats[name].as_u64(), Some(0), "{name} in {stats:#}");
    }
}
