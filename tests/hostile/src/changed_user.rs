//! Attacks of a program that root has started, and that has become another user: it has
//! connections of root.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, RunToken};
use rustix::net::{Shutdown, shutdown};
use rustix::thread::{Uid, set_thread_res_uid};

use crate::{identity, segments};

/// Connections of each kind.
const CONNECTIONS: usize = 4;

/// Sends descriptors that no program needs, on connections that root has made. The argument is the
/// number of the user. Returns whether it could become that user.
pub fn changed_user() -> bool {
    let uid = std::env::args().nth(2).and_then(|text| text.parse().ok()).expect("a user");
    let agent = agent_socket();
    let new = || connect(&agent).expect("the agent listens");
    let fresh: Vec<_> = (0..CONNECTIONS).map(|_| new()).collect();
    let sessions: Vec<_> = (0..CONNECTIONS).map(|_| new()).collect();
    for session in &sessions {
        send_frame(session, &Frame::OpenSession, &[]).expect("the agent listens");
        receive_frame(session).expect("the agent answers");
    }
    let processes: Vec<_> =
        (0..CONNECTIONS).map(|number| segments::open_process(&format!("attacker-{number}"))).collect();
    let uid = Uid::from_raw(uid);
    set_thread_res_uid(uid, uid, uid).expect("root may");
    let foreign = File::open("/dev/null").expect("it is there");
    let hello = identity::hello(RunToken([7; 16]), 0x3000_0000);
    let serve = Frame::SegmentCall(r#"{"serve":{"id":1,"pulls":false}}"#.into());
    let with_hello = fresh.iter().chain(&sessions).map(|socket| (socket, &hello));
    for (socket, frame) in with_hello.chain(processes.iter().map(|(_, arrivals)| (arrivals, &serve))) {
        // The kernel may refuse it.
        let _refused = send_frame(socket, frame, &[foreign.as_fd()]);
    }
    for socket in fresh.iter().chain(&sessions).chain(processes.iter().map(|(_, arrivals)| arrivals)) {
        // The closed connection shows that the earlier messages were received.
        let _was_closed = shutdown(socket, Shutdown::Write);
        while receive_frame(socket).is_ok() {}
    }
    println!("sent");
    let _end = std::io::stdin().read(&mut [0]);
    rustix::process::getuid() == uid
}
