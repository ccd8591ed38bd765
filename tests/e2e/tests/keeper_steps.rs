//! An agent that is killed between two items that it gives to the keeper.
//!
//! A relay stands between the agent and the keeper. It knows when the keeper has an item and the
//! agent has not done what comes next.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use aquifer_channel::socket::{accept, listen_at};
use aquifer_channel::{ReceiveError, connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldKind};
use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::{await_time, start_missing};
use aquifer_tests_e2e::run::{Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build, processes};
use rustix::net::{Shutdown, shutdown};

/// Agents that are killed under one program.
const KILLS_MAX: usize = 24;
/// Records that an agent gives to the keeper of one program, one after the other: most of them
/// after a fork.
const RECORDS_MAX: usize = 4;

/// A relay between the agents of a cluster and its keeper.
struct KeeperRelay {
    socket: PathBuf,
    moved: PathBuf,
    kills: Arc<AtomicUsize>,
    /// Number of killed agents that have a successor, which serves.
    started: Arc<AtomicUsize>,
}

impl KeeperRelay {
    /// Takes the place of the keeper's socket. Kills the agents that connect, each when the keeper
    /// has the first, second, third or fourth record of a program, in turn.
    fn start(cluster: &Cluster) -> Self {
        let socket = cluster.state().join("keeper.sock");
        let moved = cluster.state().join("keeper-moved.sock");
        std::fs::rename(&socket, &moved).expect("the keeper listens");
        let listener = listen_at(&socket, 0o600).expect("the socket is gone");
        let (kills, started) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let records = Arc::<Mutex<BTreeMap<u64, usize>>>::default();
        let relay =
            Self { socket, moved: moved.clone(), kills: Arc::clone(&kills), started: Arc::clone(&started) };
        std::thread::spawn(move || {
            while let Ok((daemon, peer)) = accept(&listener) {
                let keeper = connect(&moved).expect("the keeper listens");
                let (daemon, keeper) = (Arc::new(daemon), Arc::new(keeper));
                let back = (Arc::clone(&keeper), Arc::clone(&daemon));
                std::thread::spawn(move || relay_frames(&back.0, &back.1, |_| ()));
                let (kills, started) = (Arc::clone(&kills), Arc::clone(&started));
                let records = Arc::clone(&records);
                std::thread::spawn(move || {
                    relay_frames(&daemon, &keeper, |frame| {
                        let Frame::Hold(item) = frame else { return };
                        if item.kind != HeldKind::Program {
                            return;
                        }
                        let mut records = records.lock().expect("no thread panics");
                        let count = records.entry(item.id).or_default();
                        *count += 1;
                        let killed = kills.load(Ordering::Relaxed);
                        let serves = started.load(Ordering::Acquire) == killed;
                        if serves && killed < KILLS_MAX && *count == killed % RECORDS_MAX + 1 {
                            processes::kill(peer.pid);
                            kills.store(killed + 1, Ordering::Release);
                        }
                    });
                });
            }
        });
        relay
    }
}

impl Drop for KeeperRelay {
    fn drop(&mut self) {
        std::fs::rename(&self.moved, &self.socket).expect("the keeper's socket is there");
    }
}

/// Passes frames on until a side closes, and calls `passed` after each.
fn relay_frames(from: &OwnedFd, to: &OwnedFd, mut passed: impl FnMut(&Frame)) {
    loop {
        let (frame, fds) = match receive_frame(from) {
            Err(ReceiveError::System(error)) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => break,
            Ok(received) => received,
        };
        let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
        if send_frame(to, &frame, &fds).is_err() {
            break;
        }
        passed(&frame);
    }
    for socket in [from, to] {
        // The call fails if the other side has ended.
        let _gone = shutdown(socket, Shutdown::Both);
    }
}

#[test]
fn an_agent_may_end_after_each_record_of_a_program() {
    let checker = build::programs().join("checker");
    let program = [checker.to_str().expect("a plain path"), "fork", "--bytes", "32M", "--rounds", "4"];
    let plain = run_plainly(&program, true);
    plain.assert_success("the plain run");
    let cluster = Cluster::up_with(2, "512M", &[]);
    let relay = KeeperRelay::start(&cluster);
    processes::kill(cluster.daemon("agent", None));
    start_missing(&cluster, "Started agent");
    let mut run = Running::start(&mut cluster.run_command("12M", &program), true, Box::new(|| 0));
    let mut started = 0;
    loop {
        let is_killed = || relay.kills.load(Ordering::Acquire) > started;
        if !await_time(&mut run, "an agent to be killed", is_killed) {
            break;
        }
        start_missing(&cluster, "Started agent");
        started += 1;
        relay.started.store(started, Ordering::Release);
    }
    let outcome = run.wait();
    outcome.assert_success("the run whose agents died");
    assert_eq!(text(&outcome.stdout), text(&plain.stdout));
    assert!(started > RECORDS_MAX, "only {started} agents died");
    println!("{started} agents died");
    drop(relay);
    cluster.assert_all_free();
}
