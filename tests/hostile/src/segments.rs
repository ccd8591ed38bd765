//! Attacks of a program with segments on those of other users.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::Frame;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::descriptors::LockedMemory;

/// Userfaultfds that replace each other.
const USERFAULTFDS: usize = 32;
/// Longest wait for an answer of an agent that may have been stopped.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a request. Returns whether there was room for it.
fn call(socket: &OwnedFd, json: &str, fds: &[BorrowedFd<'_>]) -> bool {
    send_frame(socket, &Frame::SegmentCall(json.into()), fds).is_ok()
}

/// Sends a request and waits for its answer.
pub fn ask(socket: &OwnedFd, json: &str) -> String {
    assert!(call(socket, json, &[]), "the agent listens");
    match receive_frame(socket).expect("the agent answers").0 {
        Frame::SegmentAnswer(answer) => answer,
        other => panic!("no answer: {other:?}"),
    }
}

/// Opens a process, and returns its connections: for requests, and for arrivals.
pub fn open_process(name: &str) -> (OwnedFd, OwnedFd) {
    let agent = agent_socket();
    let requests = connect(&agent).expect("the agent listens");
    let opened = ask(&requests, &format!(r#"{{"open":{{"process":"{name}"}}}}"#));
    assert!(opened.contains("opened"), "{opened}");
    let arrivals = connect(&agent).expect("the agent listens");
    let attended = ask(&arrivals, &format!(r#"{{"attend":{{"process":"{name}"}}}}"#));
    assert!(attended.contains("done"), "{attended}");
    (requests, arrivals)
}

/// Keeps the memory of a segment that it has deallocated, which counts to no user. Returns whether
/// the agent has freed it.
pub fn kept_segments() -> bool {
    let (requests, _arrivals) = open_process("attacker");
    assert!(call(&requests, r#"{"allocate":{"id":1,"bytes":1048576}}"#, &[]), "the agent listens");
    let (_, descriptors) = receive_frame(&requests).expect("the agent answers");
    let memory = std::fs::File::from(descriptors.into_iter().next().expect("a segment"));
    memory.write_all_at(&vec![1; 1 << 20], 0).expect("it is this user's");
    let freed = ask(&requests, r#"{"deallocate":{"id":1}}"#);
    assert!(freed.contains("done"), "{freed}");
    memory.metadata().expect("it is open").blocks() == 0
}

/// Registers userfaultfds for the faults of a segment, one after the other. They are of a memory
/// whose lock a process holds for ever. The arguments are the path of a FUSE device and an empty
/// folder.
pub fn locked_segments() -> bool {
    let argument = |number| std::env::args().nth(number).expect("a path");
    // Before this process enters a namespace, where the agent's user has no number.
    let (requests, arrivals) = open_process("attacker");
    let mut memory = LockedMemory::new(&argument(2), &argument(3), USERFAULTFDS);
    let allocated = ask(&requests, r#"{"allocate":{"id":1,"bytes":4096}}"#);
    assert!(allocated.contains("segment"), "{allocated}");
    set_socket_timeout(&arrivals, Timeout::Send, Some(ANSWER_TIMEOUT)).expect("a socket");
    set_socket_timeout(&arrivals, Timeout::Recv, Some(ANSWER_TIMEOUT)).expect("a socket");
    for userfaultfd in std::mem::take(&mut memory.userfaultfds) {
        if !call(&arrivals, r#"{"serve":{"id":1,"pulls":false}}"#, &[userfaultfd.as_fd()]) {
            break;
        }
        // The agent must have the last descriptor. If it has none, this close waits.
        std::thread::spawn(move || drop(userfaultfd));
    }
    // All have been received when this is answered.
    let is_answered =
        call(&arrivals, r#"{"receive":{"timeout_ms":0}}"#, &[]) && receive_frame(&arrivals).is_ok();
    println!("sent");
    let _end = std::io::stdin().read(&mut [0]);
    is_answered
}
