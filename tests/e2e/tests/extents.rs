//! Programs with extents: each size, over each fabric; with agents, nodes and programs that die;
//! and users that access extents of others.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use aquifer_channel::{RingMapping, connect, receive_frame, send_frame};
use aquifer_client::{Error, Extent, ReadJob, Session, WriteJob};
use aquifer_ipc::Frame;
use aquifer_ipc::ring::{DATA_AT, RingRequest, RingWords, SessionRing};
use aquifer_tests_e2e::checked::{Checked, Random, stamped};
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::restart_agent;
use aquifer_tests_e2e::{Cluster, SharedCluster, build, eventually, processes};
use aquifer_tests_support::skip;
use tempfile::TempDir;

const ANNE: u32 = 65_533;
const BERT: u32 = 65_532;
const EDQUOT: &str = "122";
const EACCES: &str = "13";
/// Linker options that select the library beside the program. That in `LD_LIBRARY_PATH`, which
/// cargo sets, may be of another build.
const OWN_LIBRARY: [&str; 2] = ["-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"];

/// Builds the C program in a folder that all users can enter.
fn program(folder: &Path) -> PathBuf {
    let library = build::binary().with_file_name("libaquifer.so");
    std::fs::copy(&library, folder.join("libaquifer.so")).expect("the library can be copied");
    let source = std::fs::read_to_string(build::sources().join("extents.c")).expect("its source");
    let header = format!("-I{}", build::root().join("bindings/c").display());
    let folder_flag = format!("-L{}", folder.display());
    let flags = ["-Wall", "-Wextra", "-Werror", &header, "-Wl,--no-as-needed", &folder_flag, "-laquifer"];
    let program = build::compile(folder, "extents", &source, &[&flags[..], &OWN_LIBRARY].concat());
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("our own file");
    program
}

/// A program that prints a line and then waits for its end.
struct Holder {
    child: Child,
    said: String,
}

impl Holder {
    fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it can be started");
        let mut said = String::new();
        let stdout = child.stdout.as_mut().expect("it is a pipe");
        BufReader::new(stdout).read_line(&mut said).expect("it says something");
        if said.is_empty() {
            let mut error = String::new();
            child.stderr.as_mut().expect("it is a pipe").read_to_string(&mut error).expect("text");
            panic!("the program printed only: {error}");
        }
        Self { child, said: said.trim().to_owned() }
    }

    fn kill(mut self) {
        self.child.kill().expect("it lives");
        self.child.wait().expect("it has ended");
    }
}

fn output(command: &mut Command) -> String {
    let output = command.output().expect("it can be started");
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

fn sessions_side_by_side(fabric: &str) {
    let cluster = Cluster::up_with(2, "512M", &["--fabric", fabric]);
    std::thread::scope(|scope| {
        for seed in 1..=3 {
            let cluster = &cluster;
            scope.spawn(move || {
                let mut checked = Checked::open(cluster, seed);
                (0..600).for_each(|_| checked.turn());
                checked.verify_all();
            });
        }
    });
    cluster.assert_all_free();
}

#[test]
fn sessions_keep_their_extents() {
    sessions_side_by_side("shm");
}

#[test]
fn sessions_keep_their_extents_over_tcp() {
    sessions_side_by_side("tcp");
}

/// A freed span is cleared before another tenant can allocate it. Meanwhile most of the node is not
/// free, but no allocation is refused.
#[test]
fn most_of_a_node_can_be_allocated_again_at_once() {
    const BYTES: u64 = 400 << 20;
    let cluster = Cluster::up_with(1, "512M", &["--extents-per-user", "512M"]);
    let mut session = Session::open_at(cluster.agent_socket()).expect("a session");
    for round in 0..6_u64 {
        // Ten times a second the node clears spans that have not been used since its last check.
        (0..20 + 6 * round).for_each(|_| drop(output(cluster.command().arg("status"))));
        let extent = session.allocate(BYTES).expect("what was there a moment ago");
        let stamp = round.to_le_bytes();
        session.write(&extent, BYTES - 8, &stamp).expect("room");
        let mut read = [0; 8];
        session.read(&extent, BYTES - 8, &mut read).expect("it is there");
        assert_eq!(read, stamp);
        session.free(extent).expect("it is ours");
    }
    drop(session);
    cluster.assert_all_free();
}

fn sessions_survive_agents(fabric: &str) {
    let cluster = Cluster::up_with(2, "512M", &["--fabric", fabric]);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let turns = [const { std::sync::atomic::AtomicU64::new(0) }; 2];
    std::thread::scope(|scope| {
        for (seed, turns) in (5..).zip(&turns) {
            let (cluster, stop) = (&cluster, &stop);
            scope.spawn(move || {
                let mut checked = Checked::open(cluster, seed);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    checked.turn();
                    turns.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
                checked.verify_all();
            });
        }
        for _ in 0..6 {
            let count = || turns.each_ref().map(|turns| turns.load(std::sync::atomic::Ordering::Relaxed));
            let before = count();
            eventually("both sessions to continue", || {
                count().iter().zip(before).all(|(now, before)| *now > before + 20).then_some(())
            });
            restart_agent(&cluster);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    cluster.assert_all_free();
}

#[test]
fn sessions_continue_when_the_agent_is_killed() {
    sessions_survive_agents("shm");
}

#[test]
fn sessions_continue_when_the_agent_is_killed_over_tcp() {
    sessions_survive_agents("tcp");
}

#[test]
fn a_program_in_c_has_every_size_and_forks() {
    let cluster = Cluster::up(2, "256M");
    let folder = TempDir::new().expect("a folder");
    let mut command = Command::new(program(folder.path()));
    assert_eq!(output(command.arg("check").env("AQUIFER_AGENT", cluster.agent_socket())), "fine");
    cluster.assert_all_free();
}

#[test]
fn extents_of_a_killed_program_are_freed() {
    let cluster = Cluster::up(2, "256M");
    let folder = TempDir::new().expect("a folder");
    let program = program(folder.path());
    let hold = |count: &str, bytes: &str| {
        let mut command = Command::new(&program);
        Holder::start(command.args(["hold", count, bytes]).env("AQUIFER_AGENT", cluster.agent_socket()))
    };
    let holders = [hold("5000", "4096"), hold("50", "2097152"), hold("300", "16384")];
    let sessions = cluster.status()["agent"]["sessions"].as_array().map_or(0, Vec::len);
    assert_eq!(sessions, 3);
    holders.into_iter().for_each(Holder::kill);
    cluster.assert_all_free();
}

#[test]
fn extents_of_a_program_that_was_killed_without_an_agent_are_freed() {
    let cluster = Cluster::up(2, "256M");
    let folder = TempDir::new().expect("a folder");
    let mut command = Command::new(program(folder.path()));
    let command = command.args(["hold", "3000", "4096"]).env("AQUIFER_AGENT", cluster.agent_socket());
    let holder = Holder::start(command);
    processes::kill(cluster.daemon("agent", None));
    holder.kill();
    let up = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(up.status.success(), "{}", text(&up.stderr));
    cluster.assert_all_free();
}

#[test]
fn a_dead_node_loses_only_its_own_extents() {
    let cluster = Cluster::up(2, "256M");
    let mut session = Session::open_at(cluster.agent_socket()).expect("a session");
    let extents = session.allocate_many(64 << 10, 64).expect("there is room");
    for (extent, stamp) in extents.iter().zip(0..) {
        session.write(extent, 0, &stamped(extent, stamp)).expect("it is ours");
    }
    processes::kill(cluster.daemon("node", Some(1)));
    let read = |session: &mut Session, extent: &Extent, stamp| {
        let mut bytes = vec![0; 64 << 10];
        session
            .read(extent, 0, &mut bytes)
            .map(|()| assert!(bytes == stamped(extent, stamp), "what is read is right"))
    };
    let mut counts = [0, 0];
    for (extent, stamp) in extents.iter().zip(0..) {
        match (extent.node(), read(&mut session, extent, stamp)) {
            (1, Err(Error::DataLost)) => counts[0] += 1,
            // Until the agent learns of the node's end, the memory is mapped and has the right
            // data.
            (1, Ok(())) => {
                eventually("the end of node 1 to be known", || {
                    let outcome = read(&mut session, extent, stamp);
                    assert!(matches!(outcome, Ok(()) | Err(Error::DataLost)), "{outcome:?}");
                    outcome.err()
                });
                counts[0] += 1;
            }
            (2, Ok(())) => counts[1] += 1,
            (node, outcome) => panic!("{outcome:?} of node {node}"),
        }
    }
    assert!(counts.iter().all(|count| *count > 0), "both nodes were used: {counts:?}");
    session.free_many(&extents).expect("a lost extent can be freed");
    let more = session.allocate_many(64 << 10, 8).expect("the other node has room");
    assert!(more.iter().all(|extent| extent.node() == 2));
    // The node restarts with new memory.
    let up = cluster.command().arg("up").output().expect("aquifer can be started");
    assert!(up.status.success(), "{}", text(&up.stderr));
    // All extents are kept until the end: freed ones would be allocated again, on the other node.
    let mut held = Vec::new();
    eventually("the node to be used again", || {
        held.extend(session.allocate_many(2 << 20, 8).ok()?);
        held.iter().any(|extent: &Extent| extent.node() == 1).then_some(())
    });
    session.free_many(&held).expect("they are ours");
    drop(session);
    cluster.assert_all_free();
}

#[test]
fn vectored_access_works_and_errors_name_the_piece() {
    let cluster = Cluster::up(2, "256M");
    let mut session = Session::open_at(cluster.agent_socket()).expect("a session");
    let extents = session.allocate_many(8 << 10, 1000).expect("there is room");
    let pages: Vec<Vec<u8>> = extents.iter().zip(7..).map(|(at, stamp)| stamped(at, stamp)).collect();
    let jobs: Vec<WriteJob<'_>> = extents
        .iter()
        .zip(&pages)
        .map(|(extent, bytes)| WriteJob { extent: *extent, offset: 0, bytes })
        .collect();
    session.write_many(&jobs).expect("they are ours");
    let mut found = vec![vec![0; 100]; extents.len()];
    let mut jobs: Vec<ReadJob<'_>> = extents
        .iter()
        .zip(&mut found)
        .map(|(extent, out)| ReadJob { extent: *extent, offset: 8092, out })
        .collect();
    session.read_many(&mut jobs).expect("they are ours");
    for (found, page) in found.iter().zip(&pages) {
        assert_eq!(found[..], page[8092..]);
    }
    assert!(matches!(session.read(&extents[0], 8000, &mut [0; 200]), Err(Error::OutOfRange { .. })));
    assert!(matches!(session.allocate((64 << 30) + 1), Err(Error::Size { .. })));
    assert!(matches!(session.allocate(64 << 30), Err(Error::QuotaExceeded | Error::PoolFull)));
    assert!(matches!(session.allocate_many(2 << 20, 1000), Err(Error::QuotaExceeded | Error::PoolFull)));
    session.free_many(&extents).expect("they are ours");
    assert!(matches!(session.free(extents[5]), Err(Error::AccessDenied)));
    let again = session.allocate(4096).expect("the session is as it was");
    session.free(again).expect("it is ours");
    drop(session);
    cluster.assert_all_free();
}

#[test]
fn a_session_ends_with_a_message_when_the_agent_stops() {
    let cluster = Cluster::up(1, "64M");
    let mut session = Session::open_at(cluster.agent_socket()).expect("a session");
    let extent = session.allocate(4096).expect("there is room");
    let down = cluster.command().arg("down").output().expect("aquifer can be started");
    assert!(down.status.success(), "{}", text(&down.stderr));
    match session.read(&extent, 0, &mut [0; 8]) {
        Err(Error::SessionEnded(reason)) => assert!(reason.contains("stopping"), "{reason}"),
        outcome => panic!("{outcome:?}"),
    }
    assert!(session.allocate(4096).is_err());
    assert!(Session::open_at(cluster.agent_socket()).is_err());
}

/// A program that writes random data into its ring can only end its own session.
#[test]
fn a_ring_of_noise_does_not_disturb_other_sessions() {
    let cluster = Cluster::up(2, "256M");
    let mut checked = Checked::open(&cluster, 77);
    let mut random = Random(99);
    for round in 0..60 {
        let socket = connect(cluster.agent_socket()).expect("the agent listens");
        send_frame(&socket, &Frame::OpenSession, &[]).expect("the agent reads");
        let (frame, fds) = receive_frame(&socket).expect("it answers");
        assert_eq!(frame, Frame::SessionOpened);
        let ring = RingMapping::new(&fds[0]).expect("memory");
        for _ in 0..200 {
            // Requests with valid kinds, and counters that are plausible from time to time.
            let at = 64 + random.below(DATA_AT / 8 - 8) * 8;
            let noise = (random.below(1 << 31) as u64) << 33 ^ random.below(1 << 31) as u64;
            ring.word_u64(at).store(noise & !0xf8, std::sync::atomic::Ordering::Relaxed);
            let requested = ring.word_u32(64);
            let answered = ring.word_u32(128).load(std::sync::atomic::Ordering::Relaxed);
            let count = u32::try_from(random.below(if round % 2 == 0 { 20 } else { 400 })).expect("small");
            requested.store(answered.wrapping_add(count), std::sync::atomic::Ordering::Release);
            aquifer_channel::wakeup::notify(&socket);
        }
        checked.turn();
    }
    checked.verify_all();
    drop(checked);
    cluster.assert_all_free();
}

/// The agent's record of a session is in memory that the program cannot write.
#[test]
fn a_damaged_ring_loses_nothing_when_the_agent_is_killed() {
    let cluster = Cluster::up(2, "256M");
    let socket = connect(cluster.agent_socket()).expect("the agent listens");
    send_frame(&socket, &Frame::OpenSession, &[]).expect("the agent reads");
    let (_, fds) = receive_frame(&socket).expect("it answers");
    let ring = SessionRing::open(RingMapping::new(&fds[0]).expect("memory")).expect("a ring");
    for number in 0..100 {
        let class = u8::try_from(number % 11).expect("small");
        let request = if class < 10 { RingRequest::Allocate(class) } else { RingRequest::AllocateStretch(3) };
        ring.put_request(number, &request);
    }
    ring.publish_requests(100);
    aquifer_channel::wakeup::notify(&socket);
    eventually("all to be answered", || (ring.answered() == 100).then_some(()));
    for offset in (0..DATA_AT).step_by(8) {
        ring.words().word_u64(offset).store(0, std::sync::atomic::Ordering::Relaxed);
    }
    restart_agent(&cluster);
    drop(socket);
    cluster.assert_all_free();
}

/// Whether this process can start programs of other users, which needs root.
fn can_change_user() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/usr/bin/setpriv").exists();
    if !can {
        skip("only root can be another user");
    }
    can
}

#[test]
fn one_users_extents_are_closed_to_another_and_its_quota_is_its_own() {
    if !can_change_user() {
        return;
    }
    let shared = SharedCluster::up_with(2, &["--extents-per-user", "96M"]);
    let folder = shared.path("");
    program(&folder);
    let command = |uid: u32, words: &[&str]| {
        let mut command = shared.plain_command(uid, &folder.join("extents"));
        command.args(words).env("AQUIFER_AGENT", shared.path("agent.sock"));
        command
    };
    let anne = Holder::start(&mut command(ANNE, &["hold", "10", "65536"]));
    let named: Vec<&str> = anne.said.split(' ').collect();
    let read = [&["read"], &named[..]].concat();
    assert_eq!(output(&mut command(ANNE, &read)), "0", "another program of hers reads it");
    assert_eq!(output(&mut command(BERT, &read)), EACCES, "he has the key, and it is not his");
    assert_eq!(output(&mut command(BERT, &["guess", "200"])), "fine");
    // Bert exhausts his quota. Anne's quota is not affected.
    let bert = Holder::start(&mut command(BERT, &["fill", "1048576"]));
    let (taken, why) = bert.said.split_once(' ').expect("two numbers");
    assert_eq!(why, EDQUOT);
    let taken: u64 = taken.parse().expect("a number");
    assert!((80 << 20..=96 << 20).contains(&taken), "{taken} of 96M");
    let more = Holder::start(&mut command(BERT, &["fill", "1048576"]));
    assert!(more.said.ends_with(EDQUOT), "sessions of one user count together: {}", more.said);
    let hers = Holder::start(&mut command(ANNE, &["hold", "40", "2097152"]));
    let status = shared.command(ANNE, &["status", "--json"]).output().expect("setpriv can be started");
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("it is JSON");
    let sessions = status["agent"]["sessions"].as_array().expect("sessions");
    assert!(sessions.len() == 2 && sessions.iter().all(|of| of["tenant"] == ANNE), "{sessions:?}");
    for holder in [anne, bert, more, hers] {
        holder.kill();
    }
    shared.cluster.assert_all_free();
}

mod long {
    use super::*;

    /// The extents of a session on a node that was unreachable when the session ended are freed
    /// when the node returns.
    #[test]
    fn extents_on_an_unreachable_node_are_freed_later() {
        let cluster = Cluster::up_with(2, "256M", &["--fabric", "tcp"]);
        let mut session = Session::open_at(cluster.agent_socket()).expect("a session");
        let held = session.allocate_many(1 << 20, 40).expect("there is room");
        assert!(held.iter().any(|extent| extent.node() == 2), "both nodes are used");
        let node = cluster.daemon("node", Some(2));
        processes::signal(node, rustix::process::Signal::STOP);
        cluster.await_nodes(1);
        drop(session);
        eventually("the session to end", || {
            let status = cluster.status();
            status["agent"]["sessions"].as_array()?.is_empty().then_some(())
        });
        processes::signal(node, rustix::process::Signal::CONT);
        cluster.await_nodes(2);
        cluster.assert_all_free();
    }
}
