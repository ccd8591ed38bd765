//! Attacks on the agent's knowledge of which process has which memory.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use aquifer_channel::paths::agent_socket;
use aquifer_channel::{connect, receive_frame, send_frame};
use aquifer_ipc::{Frame, OpenRun, ProgramHello, RunToken};

use crate::sys::{self, PAGE};

const SHIM: usize = 0x1000_0000;
const SHIM_BYTES: usize = 0x100_0000;
const CANARY: usize = 0x3000_0000;

fn ask(socket: impl AsFd, frame: &Frame, fds: &[&OwnedFd]) -> (Frame, Vec<OwnedFd>) {
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    send_frame(&socket, frame, &fds).expect("the agent listens");
    receive_frame(&socket).expect("the agent answers")
}

/// Opens a run; it lasts as long as the socket.
fn open_run(agent: &Path) -> (OwnedFd, RunToken) {
    let socket = connect(agent).expect("the agent listens");
    let open = OpenRun {
        limit_bytes: 64 << 20,
        limit_max_bytes: None,
        replicas: 1,
        backup: None,
        outlives_owner: true,
        is_strict: false,
        wait_for_room_ms: None,
        name: "attack".into(),
    };
    match ask(&socket, &Frame::OpenRun(open), &[]) {
        (Frame::RunOpened(token), _) => (socket, token),
        (other, _) => panic!("no run: {other:?}"),
    }
}

/// The agent's `/dev/userfaultfd`.
fn device(agent: &Path, token: RunToken) -> OwnedFd {
    let socket = connect(agent).expect("the agent listens");
    let (frame, mut fds) = ask(&socket, &Frame::DeviceRequest(token), &[]);
    fds.pop().unwrap_or_else(|| panic!("no device: {frame:?}"))
}

pub fn hello(token: RunToken, canary: usize) -> Frame {
    Frame::Hello(ProgramHello {
        token,
        is_child: false,
        child_number: 0,
        bounce_buffer: SHIM as u64,
        staging: (SHIM + SHIM_BYTES / 2) as u64,
        canary: canary as u64,
        private_start: SHIM as u64,
        private_end: (SHIM + SHIM_BYTES) as u64,
        paged_start: 0,
        paged_end: 0,
    })
}

/// One process says hello with the userfaultfd of another one. The agent would read the memory of
/// the first, which may execute a set-user-ID program next, for pages of the second.
pub fn foreign_userfaultfd() -> bool {
    let agent = agent_socket();
    let (_run, token) = open_run(&agent);
    let device = device(&agent, token);
    sys::map_at(SHIM, SHIM_BYTES);
    sys::map_at(CANARY, 2 * PAGE);
    let own = sys::userfaultfd(&device);
    let (to_parent, from_child) = UnixDatagram::pair().expect("descriptors");
    let child = sys::fork(|| {
        let uffd = sys::userfaultfd(&device);
        send_frame(&to_parent, &Frame::Welcome, &[uffd.as_fd()]).expect("the parent receives");
    });
    let (_, mut fds) = receive_frame(&from_child).expect("the child sends");
    let foreign = fds.pop().expect("a descriptor");
    let say = |uffd: &OwnedFd, canary| {
        let socket = connect(&agent).expect("the agent listens");
        let (answer, _) = ask(&socket, &hello(token, canary), &[uffd]);
        (answer, socket)
    };
    let (refused, _) = say(&foreign, CANARY);
    println!("{refused:?}");
    // Only the other process' userfaultfd is refused: a hello with the own one is accepted.
    let (welcome, _socket) = say(&own, CANARY + PAGE);
    println!("{welcome:?}");
    sys::kill(child);
    matches!(refused, Frame::Refused(reason) if reason.contains("another process"))
        && welcome == Frame::Welcome
}

/// Clears `O_NONBLOCK` of the userfaultfd that this program shares with the agent, and then lets
/// the agent find nothing to read in it.
pub fn clear_nonblocking() -> bool {
    let stolen = sys::steal_userfaultfds();
    for fd in &stolen {
        rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::empty()).expect("it is open");
    }
    println!("cleared the flag of {} userfaultfds", stolen.len());
    // More than the limit, twice: pages must leave and return.
    let mut pages = vec![0_u64; (48 << 20) / 8];
    let mut right = true;
    for round in 1..3 {
        for (index, word) in pages.iter_mut().enumerate().step_by(PAGE / 8) {
            right &= *word == if round == 1 { 0 } else { index as u64 };
            *word = index as u64;
        }
    }
    right && !stolen.is_empty()
}

/// Makes the agent wait in reads of the userfaultfds of forked children, which then end: the kernel
/// knows no way to read them that cannot wait, so the flag is cleared just before the agent reads.
pub fn hold_up_monitors() -> bool {
    const CHILDREN: usize = 8;
    let mut pages = vec![1_u64; (48 << 20) / 8];
    pages.iter_mut().step_by(PAGE / 8).for_each(|word| *word += 1);
    (0..CHILDREN).all(|_| hold_up_monitor(&pages))
}

fn hold_up_monitor(pages: &[u64]) -> bool {
    const ROUNDS: usize = 100_000;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let child = sys::fork(|| {
        let stolen = sys::steal_userfaultfds();
        let found = u8::try_from(stolen.len()).expect("a few");
        let spin = move || {
            for round in 0.. {
                for fd in &stolen {
                    rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::empty()).expect("it is open");
                }
                if round == ROUNDS {
                    rustix::io::write(&writer, &[found]).expect("the parent reads");
                }
            }
        };
        std::thread::spawn(spin);
        // Waits for ever when the monitor hangs, and keeps it awake before.
        std::hint::black_box(pages.iter().step_by(PAGE / 8).sum::<u64>());
    });
    let mut found = [0];
    let read = rustix::io::read(&reader, &mut found);
    sys::kill(child);
    sys::wait(child);
    println!("cleared the flag of {} userfaultfds: {read:?}", found[0]);
    found[0] > 0
}
