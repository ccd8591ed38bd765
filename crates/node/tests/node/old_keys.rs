//! A process that goes on writing by a key that is no more, while the extent goes to another tenant.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use aquifer_fabric::{
    Host, Identity, Key, LocalSlice, Memory, RemoteAddr, Tenant, Verb, Work, WorkError, shm,
};
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::bed::{Bed, Stamp};

const NODE: NodeId = NodeId(1);
const OURS: Tenant = Tenant(1);
const THEIRS: Tenant = Tenant(2);
const VARIABLE: &str = "AQUIFER_TEST_WRITER";
const WORD: &str = "written";
const ROUNDS: usize = 8;
/// Far more than a node takes to clear a section, if it does not wait for anybody.
const TRIES: usize = 2000;

/// Not a test by itself: it writes all over an extent until its key opens nothing any more.
#[test]
fn writer() {
    let Ok(told) = std::env::var(VARIABLE) else { return };
    let [socket, addr, key] = told.split(' ').collect::<Vec<_>>().try_into().expect("three words");
    let who = Identity { host: Host(3), epoch: 1, tenant: OURS };
    let mut endpoint = shm::connect(socket.as_ref(), who).expect("it listens");
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
    /// Open until its end: it has more to say.
    _said: BufReader<ChildStdout>,
}

impl Writer {
    /// One that has written.
    fn start(bed: &Bed, extent: &Extent) -> Self {
        let told = format!("{} {} {}", bed.socket().display(), extent.addr, extent.key.0);
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "old_keys::writer", "--nocapture"]).env(VARIABLE, told);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it can be started");
        let mut said = BufReader::new(child.stdout.take().expect("it was asked for"));
        assert!(said.by_ref().lines().map_while(Result::ok).any(|line| line == WORD), "it has written");
        let pid = Pid::from_child(&child);
        Self { child, pid, _said: said }
    }

    /// Most often in the middle of a write.
    fn stop(&self) {
        kill_process(self.pid, Signal::STOP).expect("it is there");
        let (_, status) =
            waitpid(Some(self.pid), WaitOptions::UNTRACED).expect("it is ours").expect("it stopped");
        assert!(status.stopped(), "{status:?}");
    }

    /// Until it is refused.
    fn go_on(mut self) {
        kill_process(self.pid, Signal::CONT).expect("it was not waited for");
        assert!(self.child.wait().expect("it is ours").success());
    }
}

fn section(client: &mut PoolClient) -> Option<Extent> {
    match client.allocate(NODE, SizeClass::SECTION) {
        Ok(extent) => Some(extent),
        Err(PoolError::Full { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn section_some_time(client: &mut PoolClient) -> Extent {
    loop {
        if let Some(extent) = section(client) {
            return extent;
        }
        std::thread::yield_now();
    }
}

/// Until the node has taken what is free, to clear it; or until that is over already, and the client has it.
fn being_cleared(ours: &mut PoolClient, theirs: &mut PoolClient) -> Option<Extent> {
    loop {
        if let Some(extent) = section(theirs) {
            return Some(extent);
        }
        ours.refresh(NODE).expect("it answers");
        if ours.free_bytes(NODE) == 0 {
            return None;
        }
        std::thread::yield_now();
    }
}

#[test]
fn who_still_writes_by_an_old_key_does_not_reach_the_next_tenant() {
    let bed = Bed::new();
    let node = bed.start(1);
    let mut ours = bed.client_of(1, 1, OURS).expect("it listens");
    let mut theirs = bed.client_of(2, 1, THEIRS).expect("it listens");
    let stamp = Stamp::new(&mut theirs);
    let mut waited = 0;
    for round in 0..ROUNDS {
        // All that there is.
        let held = [(); 2].map(|()| section_some_time(&mut ours));
        let writer = Writer::start(&bed, &held[0]);
        writer.stop();
        ours.free(held[0]).expect("it is ours");
        let mut taken = being_cleared(&mut ours, &mut theirs);
        for _ in 0..TRIES {
            taken = taken.or_else(|| section(&mut theirs));
            std::thread::yield_now();
        }
        waited += usize::from(taken.is_none());
        writer.go_on();
        let taken = taken.unwrap_or_else(|| section_some_time(&mut theirs));
        assert_eq!(taken.addr, held[0].addr);
        assert!(stamp.finds_zeros(&mut theirs, &taken), "round {round}: it was written by the old key");
        theirs.free(taken).expect("it is theirs");
        ours.free(held[1]).expect("it is ours");
    }
    assert!(waited > 0, "no writer stood in the middle of a write");
    node.stop();
}
