//! A process writes with a revoked key while another tenant allocates the extent.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use aquifer_fabric::{
    Host, Identity, Key, LocalSlice, Memory, RemoteAddr, Tenant, Verb, Work, WorkError, shm,
};
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::harness::{NodeHarness, SectionBuffer};

const NODE: NodeId = NodeId(1);
const FIRST: Tenant = Tenant(1);
const SECOND: Tenant = Tenant(2);
const VARIABLE: &str = "AQUIFER_TEST_WRITER";
const WORD: &str = "written";
const ROUNDS: usize = 8;
/// Maximum number of rounds. On a busy machine a writer is sometimes stopped between two writes,
/// which tests nothing, so rounds are added until one was stopped in the middle of a write.
const ROUNDS_MAX: usize = 200;
/// Number of tries, which take far longer than a node needs to clear a section without a wait for
/// the writer.
const TRIES: usize = 2000;

/// The writing process, not a test: fills an extent repeatedly until its key is refused.
#[test]
fn writer() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let [socket, addr, key] = arguments.split(' ').collect::<Vec<_>>().try_into().expect("three words");
    let identity = Identity { host: Host(3), epoch: 1, tenant: FIRST };
    let mut endpoint = shm::connect(socket.as_ref(), identity).expect("it listens");
    let len = u32::try_from(SECTION_BYTES).expect("it is small");
    let memory = Arc::new(Memory::create("writer", len as usize).expect("memory"));
    memory.write(0, &vec![7; len as usize]);
    let local = LocalSlice { key: endpoint.register_local(memory).expect("room"), offset: 0, len };
    let remote =
        RemoteAddr { addr: addr.parse().expect("a number"), key: Key(key.parse().expect("a number")) };
    let mut done = Vec::new();
    for turn in 0.. {
        endpoint
            .post(&[Work { id: turn, verb: Verb::Write { local, remote }, signalled: true }])
            .expect("room");
        while endpoint.poll(&mut done, 1) == 0 {}
        match done.pop().expect("it ended").outcome {
            Ok(_) if turn == 0 => println!("\n{WORD}"),
            Ok(_) => {}
            Err(WorkError::RemoteAccess) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

struct Writer {
    child: Child,
    pid: Pid,
    /// Kept open because the process writes to it until it ends.
    _stdout: BufReader<ChildStdout>,
}

impl Writer {
    /// Starts a writer, and waits until it has written once.
    fn start(harness: &NodeHarness, extent: &Extent) -> Self {
        let arguments = format!("{} {} {}", harness.socket().display(), extent.addr, extent.key.0);
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "old_keys::writer", "--nocapture"]).env(VARIABLE, arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it can be started");
        let mut stdout = BufReader::new(child.stdout.take().expect("it was asked for"));
        assert!(stdout.by_ref().lines().map_while(Result::ok).any(|line| line == WORD), "it has written");
        let pid = Pid::from_child(&child);
        Self { child, pid, _stdout: stdout }
    }

    /// Stops the process, usually in the middle of a write.
    fn stop(&self) {
        kill_process(self.pid, Signal::STOP).expect("it is there");
        let (_, status) =
            waitpid(Some(self.pid), WaitOptions::UNTRACED).expect("it is ours").expect("it stopped");
        assert!(status.stopped(), "{status:?}");
    }

    /// Resumes the process, and waits until its key is refused and it ends.
    fn resume(mut self) {
        kill_process(self.pid, Signal::CONT).expect("it was not waited for");
        assert!(self.child.wait().expect("it is ours").success());
    }
}

/// Allocates a section; `None` if the node has none.
fn try_allocate(client: &mut PoolClient) -> Option<Extent> {
    match client.allocate(NODE, SizeClass::SECTION) {
        Ok(extent) => Some(extent),
        Err(PoolError::Full { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Allocates a section, and retries until the node has one.
fn allocate(client: &mut PoolClient) -> Extent {
    loop {
        if let Some(extent) = try_allocate(client) {
            return extent;
        }
        std::thread::yield_now();
    }
}

/// Waits until the node has allocated the free section to clear it. If the node has cleared the
/// section already, returns the section, allocated by the second client.
fn wait_for_clearing(first: &mut PoolClient, second: &mut PoolClient) -> Option<Extent> {
    loop {
        if let Some(extent) = try_allocate(second) {
            return Some(extent);
        }
        first.refresh(NODE).expect("it answers");
        if first.free_bytes(NODE) == 0 {
            return None;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_write_with_a_revoked_key_does_not_reach_the_next_tenant() {
    let harness = NodeHarness::new();
    let node = harness.start(1);
    let mut first = harness.client_of_tenant(1, 1, FIRST).expect("it listens");
    let mut second = harness.client_of_tenant(2, 1, SECOND).expect("it listens");
    let buffer = SectionBuffer::new(&mut second);
    let mut waiting_rounds = 0;
    for round in 0..ROUNDS_MAX {
        if round >= ROUNDS && waiting_rounds > 0 {
            break;
        }
        // All memory of the node.
        let held = [(); 2].map(|()| allocate(&mut first));
        let writer = Writer::start(&harness, &held[0]);
        writer.stop();
        first.free(held[0]).expect("it is ours");
        let mut taken = wait_for_clearing(&mut first, &mut second);
        for _ in 0..TRIES {
            taken = taken.or_else(|| try_allocate(&mut second));
            std::thread::yield_now();
        }
        waiting_rounds += usize::from(taken.is_none());
        writer.resume();
        let taken = taken.unwrap_or_else(|| allocate(&mut second));
        assert_eq!(taken.addr, held[0].addr);
        assert!(buffer.is_zero(&mut second, &taken), "round {round}: the revoked key has written");
        second.free(taken).expect("the client owns it");
        first.free(held[1]).expect("it is ours");
    }
    assert!(waiting_rounds > 0, "no writer was stopped in the middle of a write");
    node.stop();
}
