//! A keeper, and daemons that connect and disconnect.
//!
//! The held items are writing ends of pipes, so that the reading end reports the end of the file
//! when the keeper has released the item.

use std::io::{PipeReader, Read, pipe};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_channel::socket::listen_at;
use aquifer_channel::{connect, frame_socket, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{CLAIM_TIMEOUT, ITEMS_MAX, KeeperClient, KeeperOptions, KeeperStore, serve};
use rustix::io::FdFlags;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

const LONG_GRACE: Duration = Duration::from_secs(1000);

struct TestKeeper {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestKeeper {
    fn start(folder: &Path, grace: Duration) -> Self {
        Self::start_with(folder, grace, ITEMS_MAX)
    }

    fn start_with(folder: &Path, grace: Duration, items_max: usize) -> Self {
        Self::start_at(folder.join("keeper"), None, grace, items_max)
    }

    fn start_at(socket: PathBuf, listener: Option<OwnedFd>, grace: Duration, items_max: usize) -> Self {
        let options =
            KeeperOptions { socket: socket.clone(), grace, listener, items_max, when_unused: Arc::default() };
        let stop = Arc::new(AtomicBool::new(false));
        let keeper_stop = Arc::clone(&stop);
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            serve(&options, &keeper_stop, || sender.send(()).expect("the test waits"))
                .expect("it can listen");
        });
        receiver.recv().expect("it serves");
        Self { socket, stop, thread: Some(thread) }
    }

    /// Connects a daemon. Returns the items that it finds in its share.
    fn connect(&self, share: KeeperShare) -> (KeeperClient, Vec<(HeldKind, u64)>) {
        let (client, kept) = KeeperClient::connect(&self.socket, share, CLAIM_TIMEOUT).expect("it serves");
        (client, kept.iter().map(|kept| (kept.item.kind, kept.item.id)).collect())
    }
}

impl Drop for TestKeeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
}

fn item(kind: HeldKind, id: u64) -> HeldItem {
    HeldItem { kind, id, pid: 0, uid: 0, record: String::new() }
}

/// Holds an item. Returns the pipe that ends when the item is released.
fn hold(client: &KeeperClient, kind: HeldKind, id: u64) -> PipeReader {
    let (reader, writer) = pipe().expect("a pipe");
    client.hold(&item(kind, id), &[writer.as_fd()]).expect("the keeper has room");
    reader
}

/// Waits until the item is released.
fn await_release(mut reader: PipeReader) {
    assert_eq!(reader.read(&mut [0]).expect("a pipe can be read"), 0);
}

/// Waits until the keeper has handled all earlier frames.
fn synchronise(keeper: &TestKeeper) {
    let socket = connect(&keeper.socket).expect("it serves");
    send_frame(&socket, &Frame::Sync, &[]).expect("it listens");
    assert!(matches!(receive_frame(&socket), Ok((Frame::Sync, _))));
}

#[test]
fn each_daemon_has_its_own_share() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let (agent, found) = keeper.connect(KeeperShare::Agent);
    assert_eq!(found, []);
    let (first, _) = keeper.connect(KeeperShare::Node(1));
    let (second, _) = keeper.connect(KeeperShare::Node(2));
    let _held = [hold(&agent, HeldKind::Run, 1), hold(&agent, HeldKind::Session, 2)];
    let one = hold(&first, HeldKind::Node, 1);
    let two = hold(&second, HeldKind::Node, 2);
    // A daemon cannot store an item in the share of another.
    let foreign = hold(&first, HeldKind::Node, 2);
    drop((agent, first));
    await_release(foreign);
    assert_eq!(keeper.connect(KeeperShare::Agent).1, [(HeldKind::Run, 1), (HeldKind::Session, 2)]);
    let (first, found) = keeper.connect(KeeperShare::Node(1));
    assert_eq!(found, [(HeldKind::Node, 1)]);
    assert_eq!(keeper.connect(KeeperShare::Node(3)).1, []);
    first.release(HeldKind::Node, 1);
    await_release(one);
    drop(second);
    assert_eq!(keeper.connect(KeeperShare::Node(2)).1, [(HeldKind::Node, 2)]);
    drop(keeper);
    await_release(two);
}

#[test]
fn items_of_an_absent_daemon_are_released_after_the_grace_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), Duration::from_millis(1));
    let (first, _) = keeper.connect(KeeperShare::Node(1));
    let (second, _) = keeper.connect(KeeperShare::Node(2));
    let gone = hold(&first, HeldKind::Node, 1);
    let _there = hold(&second, HeldKind::Node, 2);
    drop(first);
    await_release(gone);
    assert_eq!(keeper.connect(KeeperShare::Node(1)).1, []);
    // The owner of the other share is connected.
    assert_eq!(keeper.connect(KeeperShare::Node(2)).1, [(HeldKind::Node, 2)]);
}

/// Starts a process that claims a share and ends. Returns its connection, which stays open, as in a
/// shadow that is stopped.
fn claim_and_end(keeper: &Path, share: KeeperShare) -> OwnedFd {
    let socket = frame_socket().expect("a socket");
    rustix::io::fcntl_setfd(&socket, FdFlags::empty()).expect("it is open");
    // The peer of the keeper is the process that connects.
    let connect = format!(
        "import socket; socket.socket(fileno={}).connect('{}')",
        socket.as_raw_fd(),
        keeper.display()
    );
    let connected = Command::new("python3").args(["-c", &connect]).status().expect("python3 is installed");
    assert!(connected.success());
    send_frame(&socket, &Frame::Claim(share), &[]).expect("the keeper listens");
    socket
}

#[test]
fn a_daemon_that_has_ended_is_absent_although_its_connection_is_open() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), Duration::from_millis(1));
    let socket = claim_and_end(&keeper.socket, KeeperShare::Node(1));
    let (reader, writer) = pipe().expect("a pipe");
    send_frame(&socket, &Frame::Hold(item(HeldKind::Node, 1)), &[writer.as_fd()]).expect("it listens");
    drop(writer);
    await_release(reader);
}

#[test]
fn a_daemon_that_has_ended_changes_nothing_of_the_next_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let socket = claim_and_end(&keeper.socket, KeeperShare::Node(1));
    let (next, _) = keeper.connect(KeeperShare::Node(1));
    let _held = hold(&next, HeldKind::Node, 1);
    synchronise(&keeper);
    let (reader, writer) = pipe().expect("a pipe");
    send_frame(&socket, &Frame::Release(HeldKind::Node, 1), &[]).expect("it listens");
    send_frame(&socket, &Frame::Hold(item(HeldKind::Node, 1)), &[writer.as_fd()]).expect("it listens");
    drop(writer);
    await_release(reader);
    drop(next);
    assert_eq!(keeper.connect(KeeperShare::Node(1)).1, [(HeldKind::Node, 1)]);
}

/// All is sent before the keeper runs, as if it was stopped in between.
#[test]
fn what_a_daemon_has_sent_precedes_the_claim_of_the_next_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keeper");
    let listener = listen_at(&path, 0o600).expect("a socket");
    let ended = claim_and_end(&path, KeeperShare::Agent);
    let items = 1..=40;
    for id in items.clone() {
        send_frame(&ended, &Frame::Hold(item(HeldKind::Run, id)), &[]).expect("the socket has room");
        send_frame(&ended, &Frame::Sync, &[]).expect("the socket has room");
    }
    shutdown(&ended, Shutdown::Write).expect("it is connected");
    let next = connect(&path).expect("it listens");
    send_frame(&next, &Frame::Claim(KeeperShare::Agent), &[]).expect("the socket has room");
    let _keeper = TestKeeper::start_at(path, Some(listener), LONG_GRACE, ITEMS_MAX);
    for id in items {
        let (frame, _) = receive_frame(&next).expect("the keeper answers");
        assert!(matches!(&frame, Frame::Hold(item) if item.id == id), "{frame:?}");
    }
    assert!(matches!(receive_frame(&next).expect("the keeper answers").0, Frame::Sync));
}

#[test]
fn a_daemon_sends_its_items_to_the_next_keeper() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let (client, _) = keeper.connect(KeeperShare::Node(7));
    let held = hold(&client, HeldKind::Node, 7);
    synchronise(&keeper);
    drop(keeper);
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    client.reconnect_if_closed();
    drop(client);
    let (client, found) = keeper.connect(KeeperShare::Node(7));
    assert_eq!(found, [(HeldKind::Node, 7)]);
    client.release(HeldKind::Node, 7);
    await_release(held);
}

#[test]
fn a_restored_item_is_sent_again_with_all_its_descriptors() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let (agent, _) = keeper.connect(KeeperShare::Agent);
    let mut program = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep is installed");
    let process = Pid::from_child(&program);
    let pidfd = pidfd_open(process, PidfdFlags::empty()).expect("it runs");
    let (_reader, writer) = pipe().expect("a pipe");
    let uid = rustix::process::geteuid().as_raw();
    let item = HeldItem { kind: HeldKind::Program, id: 1, pid: program.id(), uid, record: String::new() };
    agent.hold(&item, &[writer.as_fd(), pidfd.as_fd()]).expect("the keeper has room");
    synchronise(&keeper);
    drop(agent);
    let (agent, _) = keeper.connect(KeeperShare::Agent);
    drop(keeper);
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    agent.reconnect_if_closed();
    drop(agent);
    let (_agent, kept) =
        KeeperClient::connect(&keeper.socket, KeeperShare::Agent, CLAIM_TIMEOUT).expect("it serves");
    assert_eq!(kept.iter().map(|kept| (kept.item.pid, kept.fds.len())).collect::<Vec<_>>(), [(item.pid, 2)]);
    program.kill().expect("it may have ended");
    program.wait().expect("it is ours");
}

#[test]
fn a_connection_cannot_release_items_of_a_share_it_does_not_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let (client, _) = keeper.connect(KeeperShare::Node(1));
    let _held = hold(&client, HeldKind::Node, 1);
    synchronise(&keeper);
    let stranger = connect(&keeper.socket).expect("it serves");
    send_frame(&stranger, &Frame::Release(HeldKind::Node, 1), &[]).expect("it listens");
    // The owner of one share cannot release items of another.
    let (other, _) = keeper.connect(KeeperShare::Node(2));
    other.release(HeldKind::Node, 1);
    drop(client);
    synchronise(&keeper);
    assert_eq!(keeper.connect(KeeperShare::Node(1)).1, [(HeldKind::Node, 1)]);
}

#[test]
fn a_full_keeper_refuses_new_items_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start_with(folder.path(), LONG_GRACE, 2);
    let (client, _) = keeper.connect(KeeperShare::Agent);
    let _first = hold(&client, HeldKind::Run, 1);
    let second = hold(&client, HeldKind::Program, 2);
    let (reader, writer) = pipe().expect("a pipe");
    let refused = client.hold(&item(HeldKind::Program, 3), &[writer.as_fd()]).unwrap_err();
    assert!(refused.to_string().contains("2 items"), "{refused}");
    drop(writer);
    await_release(reader);
    // It replaces the item of the same number.
    let replaced = hold(&client, HeldKind::Program, 2);
    await_release(second);
    client.release(HeldKind::Program, 2);
    await_release(replaced);
    let third = hold(&client, HeldKind::Program, 3);
    // The limit must not release the userfaultfd of a process whose agent has died.
    let shadow = connect(&keeper.socket).expect("it serves");
    let (reader, writer) = pipe().expect("a pipe");
    let orphan = Frame::Hold(item(HeldKind::Orphan, 4));
    send_frame(&shadow, &orphan, &[writer.as_fd()]).expect("it listens");
    synchronise(&keeper);
    // The shares of nodes have limits of their own.
    let (node, _) = keeper.connect(KeeperShare::Node(7));
    let _memory = hold(&node, HeldKind::Node, 7);
    drop(client);
    let (next, kept) = keeper.connect(KeeperShare::Agent);
    assert_eq!(kept, [(HeldKind::Run, 1), (HeldKind::Program, 3), (HeldKind::Orphan, 4)]);
    // While the daemon is connected, the keeper does not wait for its programs.
    drop(keeper);
    drop((next, third, reader));
}

#[test]
fn a_full_next_keeper_refuses_items_of_the_last_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let (client, _) = keeper.connect(KeeperShare::Agent);
    let _first = hold(&client, HeldKind::Run, 1);
    let _second = hold(&client, HeldKind::Program, 2);
    drop(keeper);
    let keeper = TestKeeper::start_with(folder.path(), LONG_GRACE, 2);
    let (_, writer) = pipe().expect("a pipe");
    client.hold(&item(HeldKind::Program, 3), &[writer.as_fd()]).unwrap_err();
    client.release(HeldKind::Program, 2);
    let _third = hold(&client, HeldKind::Program, 3);
    synchronise(&keeper);
    drop(client);
    let (next, kept) = keeper.connect(KeeperShare::Agent);
    assert_eq!(kept, [(HeldKind::Run, 1), (HeldKind::Program, 3)]);
    drop(keeper);
    drop(next);
}

#[test]
fn a_daemon_does_not_wait_for_a_silent_keeper() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keeper.sock");
    let _silent = aquifer_channel::socket::listen_at(&path, 0o600).unwrap();
    assert!(KeeperClient::connect(&path, KeeperShare::Agent, CLAIM_TIMEOUT).is_err());
}

#[test]
fn a_daemon_of_another_version_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let keeper = TestKeeper::start(folder.path(), LONG_GRACE);
    let socket = connect(&keeper.socket).unwrap();
    let frame = include_bytes!("../../ipc/corpus/frame/version-1");
    rustix::net::send(&socket, frame, rustix::net::SendFlags::empty()).unwrap();
    let (answer, _) = receive_frame(&socket).unwrap();
    assert!(matches!(&answer, Frame::Refused(reason) if reason.contains("version 1")), "{answer:?}");
    assert!(receive_frame(&socket).is_err(), "the connection is closed");
}
