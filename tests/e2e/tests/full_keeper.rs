//! A keeper at its limit of items: what it cannot hold is refused, and nothing else is affected.

use std::io::{Read, Write};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use aquifer_ipc::Frame;
use aquifer_keeper::KeeperOptions;
use aquifer_tests_e2e::agent::Connection;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::{Cluster, build, eventually, processes};

const LIMIT: &str = "32M";

/// Replaces the cluster's keeper by one in this process that holds at most `items_max` items.
fn replace_keeper(cluster: &Cluster, items_max: usize) {
    processes::kill(cluster.daemon("keeper", None));
    let options = KeeperOptions {
        socket: cluster.state().join("keeper.sock"),
        grace: Duration::from_secs(60),
        listener: None,
        items_max,
        when_unused: Arc::default(),
    };
    let (ready, is_ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let never = AtomicBool::new(false);
        aquifer_keeper::serve(&options, &never, || ready.send(()).expect("the test waits"))
    });
    is_ready.recv().expect("the keeper serves");
}

/// A run whose program ends when its input is closed.
fn start_cat(cluster: &Cluster) -> Child {
    let mut command = cluster.run_command(LIMIT, &["cat"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = command.spawn().expect("aquifer can be started");
    run.stdin.as_mut().expect("it is a pipe").write_all(b"line\n").expect("it reads");
    let mut line = [0; 5];
    run.stdout.as_mut().expect("it is a pipe").read_exact(&mut line).expect("it answers");
    run
}

#[test]
fn a_run_that_a_full_keeper_cannot_hold_is_refused() {
    let cluster = Cluster::up(1, "128M");
    // The agent's own item, a run and its program.
    replace_keeper(&cluster, 3);
    let mut first = start_cat(&cluster);
    let refused = cluster.run(LIMIT, &["true"]);
    assert_eq!(refused.status.code(), Some(125), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("the keeper holds 3 items"), "{}", text(&refused.stderr));
    drop(first.stdin.take());
    assert!(first.wait().expect("our own child").success(), "the first run must not be affected");
    eventually("room in the keeper", || cluster.run(LIMIT, &["true"]).status.success().then_some(()));
    cluster.assert_all_free();
}

#[test]
fn a_program_that_a_full_keeper_cannot_hold_is_refused() {
    let cluster = Cluster::up(1, "128M");
    // The agent's own item and a run.
    replace_keeper(&cluster, 2);
    let refused = cluster.run(LIMIT, &["true"]);
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("the keeper holds 2 items"), "{}", text(&refused.stderr));
    cluster.assert_all_free();
}

#[test]
fn a_forked_child_that_a_full_keeper_cannot_hold_is_ended() {
    let cluster = Cluster::up(1, "128M");
    replace_keeper(&cluster, 3);
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "fork", "--bytes", "64M"];
    let refused = cluster.run(LIMIT, &program);
    assert!(!refused.status.success(), "a child ran that the keeper does not hold");
    assert!(!text(&refused.stderr).contains("FAILED"), "{}", text(&refused.stderr));
    cluster.assert_all_free();
}

#[test]
fn a_session_that_a_full_keeper_cannot_hold_is_refused() {
    let cluster = Cluster::up(1, "128M");
    replace_keeper(&cluster, 1);
    let program = Connection::open(cluster.agent_socket()).expect("the agent listens");
    program.send_frame(&Frame::OpenSession).expect("the agent reads");
    match program.receive().expect("the agent answers") {
        Some(Frame::Refused(reason)) => assert!(reason.contains("the keeper holds 1 items"), "{reason}"),
        other => panic!("answered by {other:?}"),
    }
}
