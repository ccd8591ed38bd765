//! A keeper, and daemons that come and go. What is held is the writing end of a pipe: who reads the other finds its end when nobody holds it any more.

use std::io::{PipeReader, Read, pipe};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{KeeperOptions, KeeperPort, serve};

const LONG: Duration = Duration::from_secs(1000);

struct Keeper {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    fn start(folder: &Path, grace: Duration) -> Self {
        let socket = folder.join("keeper");
        let options = KeeperOptions { socket: socket.clone(), grace, listener: None };
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            serve(&options, &theirs, || tell.send(()).expect("the test waits")).expect("it can listen");
        });
        told.recv().expect("it serves");
        Self { socket, stop, thread: Some(thread) }
    }

    fn port(&self, share: KeeperShare) -> (KeeperPort, Vec<(HeldKind, u64)>) {
        let (port, kept) = KeeperPort::connect(&self.socket, share).expect("it serves");
        (port, kept.iter().map(|kept| (kept.item.kind, kept.item.id)).collect())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
}

/// Have something kept; its end can be waited for.
fn keep(port: &KeeperPort, kind: HeldKind, id: u64) -> PipeReader {
    let (reader, writer) = pipe().expect("a pipe");
    port.keep(&HeldItem { kind, id, pid: 0, record: String::new() }, &[writer.as_fd()]);
    reader
}

/// Wait until nobody holds it any more.
fn await_end(mut reader: PipeReader) {
    assert_eq!(reader.read(&mut [0]).expect("a pipe can be read"), 0);
}

/// The keeper has read all that was said before.
fn settle(keeper: &Keeper) {
    let socket = connect(&keeper.socket).expect("it serves");
    send_frame(&socket, &Frame::Sync, &[]).expect("it listens");
    assert!(matches!(receive_frame(&socket), Ok((Frame::Sync, _))));
}

#[test]
fn each_daemon_has_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = Keeper::start(folder.path(), LONG);
    let (agent, found) = keeper.port(KeeperShare::Agent);
    assert_eq!(found, []);
    let (first, _) = keeper.port(KeeperShare::Node(1));
    let (second, _) = keeper.port(KeeperShare::Node(2));
    let _held = [keep(&agent, HeldKind::Run, 1), keep(&agent, HeldKind::Session, 2)];
    let one = keep(&first, HeldKind::Node, 1);
    let two = keep(&second, HeldKind::Node, 2);
    // Nobody puts anything in another's share.
    let foreign = keep(&first, HeldKind::Node, 2);
    drop((agent, first));
    await_end(foreign);
    assert_eq!(keeper.port(KeeperShare::Agent).1, [(HeldKind::Run, 1), (HeldKind::Session, 2)]);
    let (first, found) = keeper.port(KeeperShare::Node(1));
    assert_eq!(found, [(HeldKind::Node, 1)]);
    assert_eq!(keeper.port(KeeperShare::Node(3)).1, []);
    first.unkeep(HeldKind::Node, 1);
    await_end(one);
    drop(second);
    assert_eq!(keeper.port(KeeperShare::Node(2)).1, [(HeldKind::Node, 2)]);
    drop(keeper);
    await_end(two);
}

#[test]
fn what_nobody_comes_for_is_let_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = Keeper::start(folder.path(), Duration::from_millis(1));
    let (first, _) = keeper.port(KeeperShare::Node(1));
    let (second, _) = keeper.port(KeeperShare::Node(2));
    let gone = keep(&first, HeldKind::Node, 1);
    let _there = keep(&second, HeldKind::Node, 2);
    drop(first);
    await_end(gone);
    assert_eq!(keeper.port(KeeperShare::Node(1)).1, []);
    // Its owner is there: it is kept for as long.
    assert_eq!(keeper.port(KeeperShare::Node(2)).1, [(HeldKind::Node, 2)]);
}

#[test]
fn another_keeper_is_given_what_the_last_one_had() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = Keeper::start(folder.path(), LONG);
    let (port, _) = keeper.port(KeeperShare::Node(7));
    let held = keep(&port, HeldKind::Node, 7);
    settle(&keeper);
    drop(keeper);
    let keeper = Keeper::start(folder.path(), LONG);
    port.refresh();
    drop(port);
    let (port, found) = keeper.port(KeeperShare::Node(7));
    assert_eq!(found, [(HeldKind::Node, 7)]);
    port.unkeep(HeldKind::Node, 7);
    await_end(held);
}

#[test]
fn who_owns_nothing_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let keeper = Keeper::start(folder.path(), LONG);
    let (port, _) = keeper.port(KeeperShare::Node(1));
    let _held = keep(&port, HeldKind::Node, 1);
    settle(&keeper);
    let stranger = connect(&keeper.socket).expect("it serves");
    send_frame(&stranger, &Frame::Release(HeldKind::Node, 1), &[]).expect("it listens");
    // An owner of one share takes no other.
    let (other, _) = keeper.port(KeeperShare::Node(2));
    other.unkeep(HeldKind::Node, 1);
    drop(port);
    settle(&keeper);
    assert_eq!(keeper.port(KeeperShare::Node(1)).1, [(HeldKind::Node, 1)]);
}
