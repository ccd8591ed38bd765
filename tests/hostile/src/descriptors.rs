//! Descriptors whose last close waits for as long as the attacker wants, sent to the agent.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::{connect, send_frame};
use aquifer_ipc::Frame;
use rustix::net::sockopt::set_socket_linger;

use crate::{fuse, identity};

/// Connections with such a descriptor.
const CONNECTIONS: usize = 24;
/// Seconds for which a socket lingers.
const LINGER_S: u64 = 100_000;

/// Sends TCP sockets with `SO_LINGER` and unsent data, in requests and in other packets, and keeps
/// the connections open until standard input ends.
pub fn lingering_sockets() -> bool {
    let agent = agent_socket();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut connections = Vec::new();
    let mut peers = Vec::new();
    for number in 0..CONNECTIONS {
        let (socket, peer) = lingering_socket(&listener);
        peers.push(peer);
        connections.extend(attempt(&agent, number, socket.as_fd()));
        // The one in the packet is to be the last, and this close waits if none was sent.
        std::thread::spawn(move || drop(socket));
    }
    wait_for_end();
    true
}

/// A connected socket whose last close waits.
fn lingering_socket(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let address = listener.local_addr().expect("it listens");
    let mut socket = TcpStream::connect(address).expect("it listens");
    let (peer, _) = listener.accept().expect("a connection");
    socket.set_nonblocking(true).expect("a socket");
    while socket.write(&[0; 65_536]).is_ok() {}
    set_socket_linger(&socket, Some(std::time::Duration::from_secs(LINGER_S))).expect("a socket");
    (socket, peer)
}

/// Sends files of a FUSE server that answers no FLUSH. The arguments are the path of a FUSE device
/// and an empty folder.
pub fn waiting_files() -> bool {
    let agent = agent_socket();
    let argument = |number| std::env::args().nth(number).expect("a path");
    let mounted = fuse::mount(Path::new(&argument(2)), Path::new(&argument(3)));
    let mut connections = Vec::new();
    for number in 0..CONNECTIONS {
        connections.extend(attempt(&agent, number, mounted.file.as_fd()));
    }
    wait_for_end();
    true
}

/// Sends a descriptor in one of several ways. Returns the connection, if the agent takes it.
fn attempt(agent: &Path, number: usize, descriptor: std::os::fd::BorrowedFd<'_>) -> Option<OwnedFd> {
    let socket = connect(agent).ok()?;
    let sent = match number % 4 {
        0 => send_frame(&socket, &Frame::StatusRequest, &[descriptor]),
        1 => send_frame(&socket, &Frame::Welcome, &[descriptor; 12]),
        // As if it were a userfaultfd.
        2 => send_frame(&socket, &identity::hello(aquifer_ipc::RunToken([7; 16]), 0x3000_0000), &[descriptor]),
        // Behind a request that the agent answers.
        _ => send_frame(&socket, &Frame::StatusRequest, &[])
            .and_then(|()| send_frame(&socket, &Frame::StatusRequest, &[descriptor])),
    };
    // Some are refused with EPERM.
    let _is_refused = sent;
    (number % 8 < 4).then_some(socket)
}

/// Says that all is sent, and waits for the end of standard input.
fn wait_for_end() {
    println!("sent");
    let _end = std::io::stdin().read(&mut [0]);
}
