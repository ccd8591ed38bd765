//! Invalid frames, old versions and forged tokens at the agent's socket, while a program runs.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use aquifer_ipc::{
    FRAME_BYTES_MAX, Frame, HeldItem, HeldKind, KeeperShare, OpenRun, ProgramHello, RUN_VARIABLE, RunToken,
    SOCKET_SECRET_BYTES,
};
use aquifer_tests_e2e::agent::Connection;
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::run::{Running, mempool_share, status};
use aquifer_tests_e2e::{Cluster, build, eventually, processes};
use aquifer_tests_support::skip;
use rustix::net::{RecvFlags, SocketAddrUnix};

fn hello(token: RunToken, is_child: bool) -> Frame {
    Frame::Hello(ProgramHello {
        token,
        is_child,
        child_number: 1,
        bounce_buffer: 0x1000_0000,
        staging: 0x2000_0000,
        canary: 0x3000_0000,
        private_start: 0x1000_0000,
        private_end: 0x4000_0000,
        paged_start: 0,
        paged_end: 0,
    })
}

fn bytes_of(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.write(&mut bytes);
    bytes
}

/// The agent's answer to one packet.
fn answer(cluster: &Cluster, bytes: &[u8]) -> Option<Frame> {
    let connection = Connection::open(cluster.agent_socket()).expect("the agent listens");
    // The agent may close the connection before it has read the packet.
    let _ = connection.send(bytes);
    connection.receive().expect("an answer or an end")
}

fn refusal(cluster: &Cluster, bytes: &[u8]) -> String {
    match answer(cluster, bytes) {
        Some(Frame::Refused(reason)) => reason,
        other => panic!("{bytes:02x?} was answered by {other:?}"),
    }
}

fn assert_serves(cluster: &Cluster) {
    assert!(status(cluster.agent_socket()).is_some(), "the agent answers no more");
}

/// A program that must not be affected.
fn unaffected_program(cluster: &Cluster) -> Running {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "pages", "--bytes", "96M", "--rounds", "2"];
    Running::start(&mut cluster.run_command("24M", &program), false, mempool_share(cluster.agent_socket()))
}

#[test]
fn a_flood_of_refused_programs_does_not_fill_the_log() {
    const FLOOD: usize = 2000;
    let cluster = Cluster::up(1, "64M");
    let forged = bytes_of(&hello(RunToken([7; 16]), false));
    for _ in 0..FLOOD {
        refusal(&cluster, &forged);
    }
    let log = std::fs::read_to_string(cluster.state().join("log/agent.log")).expect("the agent has a log");
    let lines = log.lines().filter(|line| line.contains("refused a program")).count();
    // One more line every 10 s, on a machine that may be slow.
    assert!((100..FLOOD / 4).contains(&lines), "{lines} lines:\n{log}");
    assert_serves(&cluster);
}

#[test]
fn cut_changed_and_foreign_frames_are_refused_with_a_reason() {
    let cluster = Cluster::up(1, "256M");
    let program = unaffected_program(&cluster);
    let open = bytes_of(&Frame::OpenRun(OpenRun {
        limit_bytes: 1 << 30,
        limit_max_bytes: None,
        replicas: 1,
        backup: None,
        outlives_owner: true,
        is_strict: false,
        wait_for_room_ms: None,
        name: "name".into(),
    }));
    for end in 1..open.len() {
        refusal(&cluster, &open[..end]);
    }
    let mut old = open.clone();
    old[4] = 99;
    assert!(refusal(&cluster, &old).contains("version 99"), "{}", refusal(&cluster, &old));
    let mut longer = open.clone();
    longer.push(0);
    refusal(&cluster, &longer);
    assert!(refusal(&cluster, b"GET / HTTP/1.1\r\n\r\n").contains("not an Aquifer message"));
    refusal(&cluster, &vec![b'A'; FRAME_BYTES_MAX + 1]);
    let put = HeldItem { kind: HeldKind::Program, id: 1, pid: 1, uid: 0, record: String::new() };
    let drop = Frame::Release(HeldKind::Program, 1);
    for frame in [
        Frame::Welcome,
        Frame::CloseRun,
        Frame::Hold(put),
        drop,
        Frame::Claim(KeeperShare::Agent),
        Frame::Sync,
    ] {
        assert!(refusal(&cluster, &bytes_of(&frame)).contains("not for an agent"));
    }
    assert_eq!(answer(&cluster, &[]), None, "an empty packet is an end");
    program.wait().assert_success("the program beside it all");
    cluster.assert_all_free();
}

#[test]
fn the_corpus_of_the_parser_does_no_harm_to_the_agent() {
    let cluster = Cluster::up(1, "64M");
    let corpus = build::root().join("crates/base/ipc/corpus/frame");
    let mut files = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus is there") {
        let path = entry.expect("an entry can be read").path();
        let bytes = std::fs::read(path).expect("a file of the corpus can be read");
        let connection = Connection::open(cluster.agent_socket()).expect("the agent listens");
        let _ = connection.send(&bytes);
        // A frame that opens a run keeps the connection open; closing it ends the run.
        drop(connection);
        files += 1;
    }
    assert!(files > 10, "the corpus is there");
    assert_serves(&cluster);
    cluster.assert_all_free();
}

#[test]
fn a_forged_token_opens_nothing() {
    let cluster = Cluster::up(1, "64M");
    for is_child in [false, true] {
        let reason = refusal(&cluster, &bytes_of(&hello(RunToken([7; 16]), is_child)));
        assert!(reason.contains("no such run"), "{reason}");
    }
    // A program with a forged token does not run without paging.
    let path = cluster.agent_socket().to_str().expect("a plain path");
    let mut command = std::process::Command::new("true");
    command.env("LD_PRELOAD", build::binary().with_file_name("libaquifer_shim.so"));
    command.env(aquifer_ipc::SOCKET_VARIABLE, path);
    for (token, words) in [("00".repeat(16), "no such run"), ("zz".repeat(16), "is not a run's token")] {
        let output = command.env(RUN_VARIABLE, token).output().expect("true can be started");
        assert_eq!(output.status.code(), Some(aquifer_ipc::EXIT_FAILED), "{:?}", output.status.signal());
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
    cluster.assert_all_free();
}

#[test]
fn a_programs_own_token_does_not_let_in_what_has_no_userfaultfd() {
    let cluster = Cluster::up(1, "256M");
    let connection = Connection::open(cluster.agent_socket()).expect("the agent listens");
    connection
        .send_frame(&Frame::OpenRun(OpenRun {
            limit_bytes: 64 << 20,
            limit_max_bytes: None,
            replicas: 1,
            backup: None,
            outlives_owner: true,
            is_strict: false,
            wait_for_room_ms: None,
            name: "ours".into(),
        }))
        .expect("the agent reads");
    let Some(Frame::RunOpened(token)) = connection.receive().expect("an answer") else {
        panic!("no run was opened")
    };
    let reason = refusal(&cluster, &bytes_of(&hello(token, false)));
    assert!(reason.contains("userfaultfd"), "{reason}");
    let reason = refusal(&cluster, &bytes_of(&hello(token, true)));
    assert!(reason.contains("has forked this process"), "{reason}");
    drop(connection);
    cluster.assert_all_free();
}

#[test]
fn silent_connections_do_not_delay_others() {
    let cluster = Cluster::up(1, "64M");
    let silent: Vec<_> =
        (0..200).map(|_| Connection::open(cluster.agent_socket()).expect("the agent listens")).collect();
    assert_serves(&cluster);
    assert!(cluster.run("64M", &["true"]).status.success());
    drop(silent);
    eventually("the agent to continue to serve", || status(cluster.agent_socket()));
}

/// The worker shares the program's memory, so a program can make the worker run any code.
#[test]
fn a_program_gains_nothing_from_the_stack_of_its_worker() {
    let cluster = Cluster::up(1, "128M");
    let proof = cluster.state().join("proof");
    let steer = build::programs().join("steer");
    let program = [steer.to_str().expect("a plain path"), proof.to_str().expect("a plain path")];
    let outcome = cluster.run("16M", &program);
    assert_eq!(text(&outcome.stdout), "steered\n", "{}", text(&outcome.stderr));
    assert!(text(&outcome.stderr).contains("was killed, so its memory"), "{}", text(&outcome.stderr));
    assert!(!proof.exists(), "the worker created a file");
    assert_serves(&cluster);
    cluster.assert_all_free();
}

/// The worker has the memory of the program, so other processes must have no access to it either.
#[test]
fn a_process_without_capabilities_cannot_access_a_worker() {
    if !rustix::process::geteuid().is_root() {
        skip("only root has capabilities");
        return;
    }
    let cluster = Cluster::up(1, "256M");
    let run = unaffected_program(&cluster);
    let worker = eventually("the worker to be there", || cluster.workers().first().copied());
    let opens = |program: &[&str]| {
        let open = format!("exec 3<>/proc/{worker}/mem");
        let (first, rest) = program.split_first().expect("a program");
        let output = Command::new(first).args(rest).args(["sh", "-c", &open]).output();
        output.expect("it can be started").status.success()
    };
    assert!(opens(&["env"]), "root may, with its capabilities");
    assert!(!opens(&["setpriv", "--bounding-set=-all", "--inh-caps=-all"]));
    run.wait().assert_success("the program whose worker was looked into");
    cluster.assert_all_free();
}

/// The answer at the socket of a connect-back request to a request that only the agent's own user
/// may make; `None` if there is no such socket now.
fn answer_at_connect_back_socket() -> Option<Frame> {
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("the kernel has sockets");
    let name = sockets.lines().find_map(|line| line.split_once(" @aquifer-"))?.1;
    let name = format!("aquifer-{name}");
    let socket = aquifer_channel::frame_socket().expect("a socket");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("the name is short");
    rustix::net::connect(&socket, &address).ok()?;
    aquifer_channel::send_frame(&socket, &Frame::ClusterAccessRequest, &[]).ok()?;
    // The secret by which a child knows the agent.
    let mut secret = [0; 64];
    let (length, _) = rustix::net::recv(&socket, &mut secret, RecvFlags::empty()).ok()?;
    if length == 0 {
        // The socket was that of a run that has ended, perhaps of another test.
        return None;
    }
    assert_eq!(length, SOCKET_SECRET_BYTES);
    Some(aquifer_channel::receive_frame(&socket).ok()?.0)
}

/// Sockets of knocks are in the namespaces of sandboxes, and open to all users there.
#[test]
fn sockets_of_connect_back_requests_serve_nothing_but_programs() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can change its root");
    }
    let cluster = Cluster::up(1, "256M");
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "chroot", "--bytes", "8M", "--rounds", "1000000"];
    let mut run = Running::start(&mut cluster.run_command("16M", &program), false, Box::new(|| 0));
    let answer = eventually("a connect-back request of a child", || {
        assert!(!run.has_ended(), "it forks all the time");
        answer_at_connect_back_socket()
    });
    assert!(matches!(&answer, Frame::Refused(_)), "{answer:?}");
    let program = eventually("the program", || processes::descendants(run.pid()).first().copied());
    processes::kill(program);
    let outcome = run.wait();
    assert!(!outcome.stderr.contains("FAILED"), "the program saw wrong memory: {}", outcome.stderr);
}
