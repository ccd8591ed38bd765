//! `aquifer run --swap`: programs without the shim run with a quarter of their memory, and deaths
//! of programs and daemons affect no others and leave nothing behind.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;

use aquifer_tests_e2e::cluster::{find, text};
use aquifer_tests_e2e::network::RunningDaemon;
use aquifer_tests_e2e::run::{self, Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build, eventually, processes, swap};
use aquifer_tests_support::openmetrics::scrape;
use aquifer_tests_support::state_folder;
use rustix::process::Signal;
use serde_json::Value;

const LIMIT: &str = "34M";
const BYTES: &str = "128M";
/// Exit code if `aquifer run` failed or ended the program.
const EXIT_FAILED: i32 = 125;
const EXIT_NOT_EXECUTABLE: i32 = 126;

fn checker() -> String {
    build::programs().join("checker-static").to_str().expect("a plain path").to_owned()
}

/// Starts `aquifer run --swap` with further options.
fn start(cluster: &Cluster, options: &[&str], program: &[&str]) -> Running {
    let mut command = cluster.command();
    command.args(["run", "--swap", "--local", LIMIT]).args(options).arg("--").args(program);
    Running::start(&mut command, false, Box::new(|| 0))
}

fn endless(cluster: &Cluster) -> Running {
    start(cluster, &[], &[&checker(), "pages", "--bytes", BYTES, "--rounds", "1000000"])
}

/// Waits until much of the program is swapped out, and returns the name of the only device.
fn await_swapping(cluster: &Cluster) -> String {
    eventually("a program to be swapped", || {
        let devices = swap::devices(cluster);
        devices.into_iter().find(|name| swap::swapped_bytes(name) > 48 << 20)
    })
}

/// Asserts that nothing is left of the device on this machine, and that the pool is free.
fn assert_nothing_left(cluster: &Cluster, name: &str) {
    eventually("all traces to be gone", || swap::traces(name).is_empty().then_some(()));
    eventually("the server to be gone", || swap::servers(cluster).is_empty().then_some(()));
    assert!(swap::devices(cluster).is_empty(), "folders are left in {}", cluster.state().display());
}

/// Asserts that the checker, which was killed, has reported no wrong byte.
fn assert_no_wrong_byte(stderr: &str) {
    assert!(!stderr.contains("FAILED"), "the program saw wrong memory: {stderr}");
}

fn program_of(run: &Running) -> u32 {
    let is_program =
        |pid: &u32| processes::arguments(*pid).first().is_some_and(|word| word.ends_with("checker-static"));
    eventually("the program to be there", || processes::descendants(run.pid()).into_iter().find(is_program))
}

fn keeps_its_bytes(fabric: &str) {
    if !swap::is_possible() {
        return;
    }
    let cluster = Cluster::up_with(3, "256M", &["--fabric", fabric]);
    let stats = cluster.state().join("stats.json");
    let checker = checker();
    let program = [checker.as_str(), "pages", "--bytes", BYTES];
    let run = start(&cluster, &["--stats", stats.to_str().expect("a plain path")], &program);
    let name = eventually("the device to be there", || swap::devices(&cluster).pop());
    let outcome = run.wait();
    outcome.assert_success("a static program on swap");
    assert_eq!(text(&outcome.stdout), text(&run_plainly(&program, false).stdout));
    assert!(outcome.stderr.is_empty(), "{}", outcome.stderr);
    let stats: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    let number = |key: &str| find(&stats, key).and_then(Value::as_u64).expect("a figure");
    assert!(number("remote_reads") > 1000 && number("remote_writes") > 1000, "{stats}");
    assert!(number("resident_peak_bytes") <= 34 << 20, "{stats}");
    assert_eq!(number("lost_pages"), 0);
    assert_nothing_left(&cluster, &name);
    cluster.assert_all_free();
}

#[test]
fn a_static_program_keeps_its_bytes() {
    keeps_its_bytes("shm");
}

#[test]
fn a_program_keeps_its_name_arguments_and_exit_code() {
    if !swap::is_possible() {
        return;
    }
    let cluster = Cluster::up(1, "128M");
    let run = |script: &str| start(&cluster, &[], &["sh", "-c", script]).wait();
    let outcome = run("echo out; echo err >&2; exit 7");
    assert_eq!((outcome.status.code(), outcome.stdout.as_slice()), (Some(7), b"out\n".as_slice()));
    assert_eq!(outcome.stderr, "err\n");
    assert_eq!(run("kill -SEGV $$").status.signal(), Some(Signal::SEGV.as_raw()));
    let missing = start(&cluster, &[], &["/no/such/program"]).wait();
    assert_eq!(missing.status.code(), Some(127));
    let folder = start(&cluster, &[], &["/tmp"]).wait();
    assert_eq!(folder.status.code(), Some(EXIT_NOT_EXECUTABLE), "{}", folder.stderr);
    // A program in the background keeps limit and device until it ends; `aquifer run` does not wait
    // for it.
    let outcome = run("sleep 600 >/dev/null 2>&1 & echo $!");
    let pid: u32 = text(&outcome.stdout).trim().parse().expect("a process number");
    let name = swap::devices(&cluster).pop().expect("the device is still there");
    assert!(processes::is_alive(pid) && !swap::traces(&name).is_empty());
    processes::signal(pid, Signal::KILL);
    assert_nothing_left(&cluster, &name);
    cluster.assert_all_free();
}

/// The only run in the status, when it fits.
fn await_run(cluster: &Cluster, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    eventually(what, || {
        let status = run::status(cluster.agent_socket())?;
        let runs = status["runs"].as_array()?;
        assert!(runs.len() < 2, "{runs:#?}");
        runs.first().filter(|run| fits(run)).cloned()
    })
}

#[test]
fn a_run_is_in_status_and_metrics_and_its_limit_can_be_changed() {
    if !swap::is_possible() {
        return;
    }
    let cluster = Cluster::up(3, "128M");
    let run = endless(&cluster);
    let name = await_swapping(&cluster);
    let set = |pid: u32, size: &str| {
        cluster.command().args(["limit", &pid.to_string(), size]).output().expect("aquifer can be started")
    };
    let is_whole = |run: &Value| run["processes"] == 1 && run["remote_bytes"].as_u64() > Some(48 << 20);
    let shown = await_run(&cluster, "the run to be in the status", is_whole);
    assert_eq!((&shown["name"], &shown["limit_bytes"]), (&"checker-static".into(), &(34 << 20).into()));
    assert!(shown["swap_bytes"].as_u64() > Some(128 << 20), "{shown:#}");
    assert_eq!(shown["programs"][0]["pid"], program_of(&run));
    let shown = text(&cluster.command().arg("status").output().expect("aquifer can be started").stdout);
    assert!(shown.contains("run checker-static of root, by swap: "), "{shown}");

    let own_limit = swap::limit_bytes(&name);
    let refused = set(run.pid(), "8M");
    assert!(!refused.status.success() && text(&refused.stderr).contains("too small"), "{refused:?}");
    for (pid, size, bytes) in [(run.pid(), "64M", 64 << 20), (program_of(&run), "20M", 20 << 20)] {
        let changed = set(pid, size);
        assert!(changed.status.success(), "{}", text(&changed.stderr));
        assert!(text(&changed.stdout).contains("checker-static: limit "), "{}", text(&changed.stdout));
        let share_bytes = (34 << 20) - own_limit;
        eventually("the cgroup to have the limit", || {
            (swap::limit_bytes(&name) == bytes - share_bytes).then_some(())
        });
        await_run(&cluster, "the status to have the limit", |run| run["limit_bytes"] == bytes);
    }

    // The next agent gets reports, too.
    processes::kill(cluster.daemon("agent", None));
    let place = format!("unix:{}", cluster.state().join("agent.metrics").display());
    let _agent = RunningDaemon::start_here(cluster.state(), &["agent", "--metrics", &place]);
    await_run(&cluster, "the next agent to have the run", |run| run["limit_bytes"] == 20 << 20);
    let samples = scrape(&place).expect("metrics");
    assert_eq!(samples.sum("aquifer_agent_limit_bytes", &[]), Some(f64::from(20 << 20)));
    assert!(samples.sum("aquifer_agent_evictions_total", &[]) > Some(0.0));
    processes::kill(program_of(&run));
    assert_no_wrong_byte(&run.wait().stderr);
    await_none(&cluster);
    assert_nothing_left(&cluster, &name);
    cluster.assert_all_free();
}

/// Waits until the status has no run.
fn await_none(cluster: &Cluster) {
    eventually("the run to be gone from the status", || {
        run::status(cluster.agent_socket())?["runs"].as_array()?.is_empty().then_some(())
    });
}

#[test]
fn a_killed_server_ends_its_program_with_a_message() {
    if !swap::is_possible() {
        return;
    }
    let cluster = Cluster::up(3, "128M");
    let run = endless(&cluster);
    let name = await_swapping(&cluster);
    let servers = swap::servers(&cluster);
    assert_eq!(servers.len(), 1);
    processes::signal(servers[0], Signal::KILL);
    let outcome = run.wait();
    assert_eq!(outcome.status.code(), Some(EXIT_FAILED), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("its swap server died"), "{}", outcome.stderr);
    assert_no_wrong_byte(&outcome.stderr);
    assert_nothing_left(&cluster, &name);
}

#[test]
fn refusals_have_a_reason() {
    let nowhere = state_folder();
    let run = |options: &[&str]| {
        let mut command = std::process::Command::new(build::binary());
        command.arg("--state").arg(nowhere.path()).args(["run", "--swap"]).args(options).args(["--", "true"]);
        let output = command.output().expect("aquifer can be started");
        (output.status.code(), text(&output.stderr))
    };
    let (code, message) = run(&["--local", "64M"]);
    assert_eq!(code, Some(EXIT_FAILED));
    assert!(message.contains("aquifer up"), "{message}");
    let (code, message) = run(&["--local", "4M"]);
    assert_eq!(code, Some(EXIT_FAILED));
    assert!(message.contains("--local 8M"), "{message}");

    // Another user without rights, but with read access to the program.
    let public = tempfile::tempdir().expect("a temporary folder can be made");
    std::fs::set_permissions(public.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let copy = public.path().join("aquifer");
    std::fs::copy(build::binary(), &copy).expect("a program can be copied");
    let mut command = std::process::Command::new(&copy);
    command.args(["--state", "/tmp/aquifer-unprivileged", "run", "--swap", "--local", "64M", "--", "true"]);
    command.uid(65_534).gid(65_534).current_dir(Path::new("/"));
    let output = command.output().expect("aquifer can be started as another user");
    assert_eq!(output.status.code(), Some(EXIT_FAILED));
    assert!(text(&output.stderr).contains("needs root"), "{}", text(&output.stderr));
}

#[test]
fn the_refusal_of_a_static_program_names_swap() {
    let cluster = Cluster::up(1, "64M");
    let outcome =
        Running::start(&mut cluster.run_command(LIMIT, &[&checker()]), false, Box::new(|| 0)).wait();
    assert_eq!(outcome.status.code(), Some(EXIT_NOT_EXECUTABLE));
    assert!(outcome.stderr.contains("aquifer run --swap"), "{}", outcome.stderr);
}

mod long {
    use super::*;

    /// Nothing of its I/O may wait then: the kernel could not end the program.
    #[test]
    fn a_server_whose_lease_has_ended_ends_its_program() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "128M");
        let run = endless(&cluster);
        let name = await_swapping(&cluster);
        let hosts = || {
            let status = cluster.status();
            find(&status, "agents").and_then(Value::as_array).expect("they are listed").len()
        };
        let before = hosts();
        let servers = swap::servers(&cluster);
        processes::signal(servers[0], Signal::STOP);
        eventually("its lease to end", || (hosts() < before).then_some(()));
        processes::signal(servers[0], Signal::CONT);
        let outcome = run.wait();
        assert!(!outcome.status.success());
        assert_no_wrong_byte(&outcome.stderr);
        assert_nothing_left(&cluster, &name);
    }

    #[test]
    fn children_are_swapped_too() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "256M");
        let checker = checker();
        let outcome = start(&cluster, &[], &[&checker, "fork", "--bytes", BYTES]).wait();
        outcome.assert_success("a forking program on swap");
        cluster.assert_all_free();
    }

    #[test]
    fn a_program_too_large_for_its_device_ends_with_a_message() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(1, "256M");
        let checker = checker();
        let outcome = start(&cluster, &["--swap-size", "32M"], &[&checker, "pages", "--bytes", BYTES]).wait();
        assert_eq!(outcome.status.code(), Some(EXIT_FAILED), "{}", outcome.stderr);
        for word in ["needed more memory", "--swap-size"] {
            assert!(outcome.stderr.contains(word), "{word}: {}", outcome.stderr);
        }
        assert_no_wrong_byte(&outcome.stderr);
        cluster.assert_all_free();
    }

    #[test]
    fn a_full_pool_ends_the_program_that_filled_it() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(1, "32M");
        let checker = checker();
        let outcome =
            start(&cluster, &["--swap-size", "256M"], &[&checker, "pages", "--bytes", BYTES]).wait();
        assert_eq!(outcome.status.code(), Some(EXIT_FAILED), "{}", outcome.stderr);
        for word in ["the pool is full", "aquifer up --memory"] {
            assert!(outcome.stderr.contains(word), "{word}: {}", outcome.stderr);
        }
        assert_no_wrong_byte(&outcome.stderr);
        cluster.assert_all_free();
    }

    #[test]
    fn a_static_program_keeps_its_bytes_over_tcp() {
        keeps_its_bytes("tcp");
    }

    #[test]
    fn a_restart_of_the_agent_does_not_affect_a_device() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "256M");
        let checker = checker();
        let run = start(&cluster, &[], &[&checker, "pages", "--bytes", BYTES, "--rounds", "4"]);
        let name = await_swapping(&cluster);
        processes::kill(cluster.daemon("agent", None));
        let up = cluster.command().arg("up").output().expect("aquifer can be started");
        assert!(up.status.success(), "{}", text(&up.stderr));
        run.wait().assert_success("a program whose agent was killed");
        assert_nothing_left(&cluster, &name);
        cluster.assert_all_free();
    }

    #[test]
    fn two_devices_side_by_side_do_not_harm_each_other() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "256M");
        let doomed = endless(&cluster);
        let doomed_name = await_swapping(&cluster);
        let steady = start(&cluster, &[], &[&checker(), "pages", "--bytes", BYTES, "--seed", "5"]);
        eventually("the other device to be there", || (swap::devices(&cluster).len() == 2).then_some(()));
        processes::signal(program_of(&doomed), Signal::SEGV);
        let doomed = doomed.wait();
        assert_eq!(doomed.status.signal(), Some(Signal::SEGV.as_raw()), "{}", doomed.stderr);
        assert_no_wrong_byte(&doomed.stderr);
        steady.wait().assert_success("the run beside a failing one");
        assert_nothing_left(&cluster, &doomed_name);
        cluster.assert_all_free();
    }

    #[test]
    fn a_program_ends_when_its_run_is_killed() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "128M");
        let run = endless(&cluster);
        let name = await_swapping(&cluster);
        let program = program_of(&run);
        processes::signal(run.pid(), Signal::KILL);
        let _ = run.wait();
        eventually("the program to end", || (!processes::is_alive(program)).then_some(()));
        assert_nothing_left(&cluster, &name);
        cluster.assert_all_free();
    }

    #[test]
    fn a_dead_node_costs_its_readers_a_message_and_no_wrong_byte() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up_with(2, "256M", &["--fabric", "tcp"]);
        let run = endless(&cluster);
        let name = await_swapping(&cluster);
        processes::signal(cluster.daemon("node", Some(1)), Signal::KILL);
        let outcome = run.wait();
        assert!(!outcome.status.success());
        assert!(outcome.stderr.contains("cannot be read back: memory node 1"), "{}", outcome.stderr);
        assert_no_wrong_byte(&outcome.stderr);
        assert_nothing_left(&cluster, &name);
    }

    #[test]
    fn the_next_run_cleans_up_after_killed_ones() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "128M");
        let run = endless(&cluster);
        let name = await_swapping(&cluster);
        processes::signal(run.pid(), Signal::KILL);
        for server in swap::servers(&cluster) {
            processes::signal(server, Signal::KILL);
        }
        // Until then the program may wait for memory that no process provides.
        let next = start(&cluster, &[], &["true"]).wait();
        next.assert_success("the next run");
        assert_no_wrong_byte(&run.wait().stderr);
        assert_nothing_left(&cluster, &name);
    }

    #[test]
    fn the_end_of_the_cluster_ends_its_programs_with_a_message() {
        if !swap::is_possible() {
            return;
        }
        let cluster = Cluster::up(3, "128M");
        let run = endless(&cluster);
        let name = await_swapping(&cluster);
        let down = cluster.command().arg("down").output().expect("aquifer can be started");
        assert!(down.status.success(), "{}", text(&down.stderr));
        let outcome = run.wait();
        assert_eq!(outcome.status.code(), Some(EXIT_FAILED), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("the agent is stopping"), "{}", outcome.stderr);
        assert_no_wrong_byte(&outcome.stderr);
        assert_nothing_left(&cluster, &name);
    }
}
