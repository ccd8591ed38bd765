//! A node, a live host, and victims, each of which ends at the next step.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{
    Completion, FabricAddress, Host, Identity, KeyEntry, LocalKey, LocalSlice, Memory, RemoteAddr, Target,
    Verb, Work,
};
use aquifer_pool::op::{Grant, Recovered, WordAt};
use aquifer_pool::size::{SECTION_BYTES, SECTION_CHUNKS};
use aquifer_pool::{Extent, LeakDetector, NodeMemory, PoolClient, PoolError, ScanProgress, SizeClass};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};
use tempfile::TempDir;

use super::victim::{self, DATA_BYTES, EARLIER, KEY, NODE, StepMoment, TENANT, VICTIM, Victim, VictimEnd};

const SECTIONS: u64 = 5;
const LIVE: Host = Host(1);
/// Size classes of the extents that the live host owns throughout, in sections that the victim
/// uses, too.
const OWNED: [u8; 4] = [0, 0, 2, 5];
const STAMP: u64 = 0x5a5a_0001_0002_0003;

/// Epochs for which the keys of extents are checked. Keys have 27 random bits, so that over all
/// steps some key is equal to an earlier one by chance.
const CHECKED_EPOCHS: u64 = 8;
/// Least number of steps of the victim's script.
const STEPS_MIN: usize = 100;

/// Runs a victim for every `stride`-th step of the script, which ends before the step, and another
/// that ends after it.
pub fn at_every_step(scene: &KilledScene, end: VictimEnd, recoverer: Recoverer, stride: usize) {
    for (moment, first) in [(StepMoment::Before, 0), (StepMoment::After, stride / 2)] {
        let mut step = first;
        while scene.play(step, moment, end, recoverer) {
            step += stride;
        }
        assert!(step >= STEPS_MIN, "the script has only {step} steps");
    }
}

/// The host that frees the victim's extents.
#[derive(Clone, Copy, Debug)]
pub enum Recoverer {
    /// Another host, by recovery.
    AnotherHost,
    /// The victim's host after a restart, by a leak scan.
    SameHost,
}

/// A node and its live host.
pub struct KilledScene {
    _folder: Option<TempDir>,
    target: Box<dyn Target>,
    reach: FabricAddress,
    node_memory: NodeMemory,
    live: RefCell<LiveHost>,
    /// The epoch of the next victim.
    epoch: Cell<u64>,
    /// Extents that were granted to any host, with the epoch of the grant.
    granted: RefCell<HashMap<Extent, u64>>,
}

/// The live host and its extents.
struct LiveHost {
    client: PoolClient,
    owned: Vec<Extent>,
    /// Extents that were granted since the last check.
    granted: Vec<Extent>,
    data: Arc<Memory>,
    local: LocalKey,
}

impl KilledScene {
    /// Creates a scene at the target with the address `reach`. The target may use files in
    /// `folder`.
    pub fn on(folder: Option<TempDir>, target: Box<dyn Target>, reach: FabricAddress) -> Self {
        let node_memory = NodeMemory::create(&*target, NODE, SECTIONS * SECTION_BYTES).expect("memory");
        let mut client = connect(&reach, LIVE, 1);
        let data = Arc::new(Memory::create("data", 2 << 20).expect("memory"));
        let endpoint = client.endpoint(NODE).expect("the node is connected");
        let local = endpoint.register_local(Arc::clone(&data)).expect("room");
        let mut live = LiveHost { client, owned: Vec::new(), granted: Vec::new(), data, local };
        for k in OWNED {
            let extent = live.allocate(k).expect("all is free");
            live.owned.push(extent);
        }
        Self {
            _folder: folder,
            target,
            reach,
            node_memory,
            live: RefCell::new(live),
            epoch: Cell::new(1),
            granted: RefCell::default(),
        }
    }

    /// Runs a victim that ends at a step, and frees its extents. Returns false if the victim's
    /// script ended before.
    pub fn play(&self, step: usize, moment: StepMoment, end: VictimEnd, recoverer: Recoverer) -> bool {
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        self.run_earlier_victim(epoch);
        let mut child = victim::start(&self.reach, epoch, step, moment, end);
        let has_ended = !wait_for(child.pid, end);
        self.granted.borrow_mut().extend(victim::granted(&mut child).map(|extent| (extent, epoch)));
        self.target.fence(VICTIM, epoch);
        let when = format!("step {step}, {moment:?}, {end:?}");
        for dead in [VICTIM, EARLIER] {
            let recovered = match recoverer {
                Recoverer::AnotherHost => connect(&self.reach, Host(4), 1).recover(NODE, dead),
                Recoverer::SameHost => self.scan_for_leaks(dead),
            };
            assert_eq!(recovered.expect("the node lives").unowned, 0, "{when}");
        }
        self.assert_all_else_free(&when);
        let mut live = self.live.borrow_mut();
        if end == VictimEnd::Kill {
            let others = live.allocate_everything();
            assert_eq!(self.node_memory.free_bytes(), 0, "{when}: everything can be allocated");
            others
                .into_iter()
                .for_each(|extent| live.client.free(extent).expect("the extent is this host's"));
        }
        if end == VictimEnd::Stop && !has_ended {
            let was_killed = self.continue_stopped(&mut live, child);
            assert!(!was_killed, "the victim was stopped between two accesses");
        }
        let owned = live.owned.clone();
        owned.iter().for_each(|extent| live.verify(extent));
        !has_ended
    }

    /// Scans for leaks as the same host after a restart, without a ledger.
    fn scan_for_leaks(&self, host: Host) -> Result<Recovered, PoolError> {
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        let mut client = connect(&self.reach, host, epoch);
        let outcome =
            LeakDetector::default().scan(&mut client, NODE, |progress| progress == ScanProgress::NextPart);
        self.target.fence(host, epoch);
        outcome.map(|freed| freed.expect("no operation runs"))
    }

    /// Stops a victim that writes all the time, usually in the middle of a WRITE, and fences it.
    /// Returns whether it was killed where it was stopped.
    pub fn stop_in_the_middle(&self) -> bool {
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        let mut child = victim::start(&self.reach, epoch, usize::MAX, StepMoment::Before, VictimEnd::Write);
        let layout = self.node_memory.layout;
        let written = (0..layout.sections())
            .map(|section| layout.chunk_data_at(section * SECTION_CHUNKS))
            .map(|at| usize::try_from(at).expect("the memory is mapped") + DATA_BYTES - 8);
        let ends: Vec<usize> = written.collect();
        let word = |at: &usize| self.node_memory.memory.atomic_u64(*at).load(Ordering::SeqCst);
        for at in &ends {
            self.node_memory.memory.atomic_u64(*at).store(0, Ordering::SeqCst);
        }
        while ends.iter().all(|at| word(at) == 0) {
            let ended = waitpid(Some(child.pid), WaitOptions::NOHANG).expect("the victim is a child");
            assert!(ended.is_none(), "the victim has ended: {ended:?}");
            std::thread::yield_now();
        }
        kill_process(child.pid, Signal::STOP).expect("the victim runs");
        assert!(wait_for(child.pid, VictimEnd::Stop));
        self.granted.borrow_mut().extend(victim::granted(&mut child).map(|extent| (extent, epoch)));
        self.target.fence(VICTIM, epoch);
        let mut recoverer = connect(&self.reach, Host(4), 1);
        assert_eq!(recoverer.recover(NODE, VICTIM).expect("the node lives").extents, 1);
        drop(recoverer);
        self.assert_all_else_free("stopped in the middle");
        self.continue_stopped(&mut self.live.borrow_mut(), child)
    }

    /// Continues a stopped victim after the live host has allocated all memory of the victim.
    /// Returns whether the victim was killed instead.
    fn continue_stopped(&self, live: &mut LiveHost, child: Victim) -> bool {
        let others = live.allocate_everything();
        assert_eq!(self.node_memory.free_bytes(), 0, "everything can be allocated");
        kill_process(child.pid, Signal::CONT).expect("the victim is a child");
        drop(child.stdin);
        // It finds that it is fenced; or it was killed, if it was stopped in the middle of an
        // access.
        let ended = waitpid(Some(child.pid), WaitOptions::empty()).expect("the victim is a child");
        let (_, status) = ended.expect("waitpid has returned the child");
        others.iter().for_each(|extent| live.verify(extent));
        for extent in others {
            live.client.free(extent).expect("the extent is this host's");
        }
        status.signaled()
    }

    /// Runs a host that allocates extents of several sizes, and then counts as dead.
    fn run_earlier_victim(&self, epoch: u64) {
        let mut earlier = connect(&self.reach, EARLIER, epoch);
        for k in [0, 1, 4, 6] {
            let extent = earlier.allocate(NODE, SizeClass::new(k).expect("a class")).expect("there is room");
            self.granted.borrow_mut().insert(extent, epoch);
        }
        drop(earlier);
        self.target.fence(EARLIER, epoch);
    }

    /// Asserts that only the live host owns chunks, and that no other granted key is bound.
    fn assert_all_else_free(&self, when: &str) {
        let mut live = self.live.borrow_mut();
        let owned: u64 = live.owned.iter().map(|extent| extent.class.bytes()).sum();
        assert_eq!(self.node_memory.free_bytes(), self.node_memory.layout.data_bytes() - owned, "{when}");
        for extent in &live.owned {
            assert!(self.is_bound(extent), "{when}: the key of {extent:?} is not bound");
        }
        let epoch = self.epoch.get();
        let mut granted = self.granted.borrow_mut();
        granted.extend(live.granted.drain(..).map(|extent| (extent, epoch)));
        granted.retain(|_, since| *since + CHECKED_EPOCHS >= epoch);
        for extent in granted.keys().filter(|extent| !live.owned.contains(extent)) {
            assert!(!self.is_bound(extent), "{when}: the key of {extent:?} is still bound");
        }
    }

    /// Whether the key of an extent is in its entry.
    fn is_bound(&self, extent: &Extent) -> bool {
        let layout = self.node_memory.layout;
        let chunk =
            layout.chunk_of(extent.addr - self.node_memory.region.base).expect("the address is an extent's");
        let entry = WordAt::key_of(Grant { chunk, class: extent.class, key: extent.key });
        let at = usize::try_from(layout.word_at(entry)).expect("the memory is mapped");
        KeyEntry(self.node_memory.memory.atomic_u64(at).load(Ordering::SeqCst)).key() == extent.key
    }
}

impl LiveHost {
    fn allocate(&mut self, k: u8) -> Option<Extent> {
        let extent = self.client.allocate(NODE, SizeClass::new(k).expect("a class")).ok()?;
        self.granted.push(extent);
        for at in places(&extent) {
            self.data.write(at, &stamp(&extent, at).to_le_bytes());
        }
        let (local, remote) = self.ends(&extent);
        self.execute(Verb::Write { local, remote });
        Some(extent)
    }

    /// Allocates all free memory, in extents as large as possible.
    fn allocate_everything(&mut self) -> Vec<Extent> {
        let mut allocated = Vec::new();
        for k in (0..SizeClass::COUNT).rev() {
            while let Some(extent) = self.allocate(k) {
                allocated.push(extent);
            }
        }
        allocated
    }

    /// Asserts that an extent has the bytes that this host wrote.
    fn verify(&mut self, extent: &Extent) {
        let (local, remote) = self.ends(extent);
        self.execute(Verb::Read { local, remote });
        for at in places(extent) {
            let mut word = [0; 8];
            self.data.read(at, &mut word);
            assert_eq!(u64::from_le_bytes(word), stamp(extent, at), "{extent:?} was written by another");
        }
    }

    fn ends(&self, extent: &Extent) -> (LocalSlice, RemoteAddr) {
        let len = u32::try_from(extent.class.bytes()).expect("2 MiB at most");
        let local = LocalSlice { key: self.local, offset: 0, len };
        (local, RemoteAddr { addr: extent.addr, key: extent.key })
    }

    fn execute(&mut self, verb: Verb) {
        let endpoint = self.client.endpoint(NODE).expect("the node is connected");
        endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("room");
        let mut done: Vec<Completion> = Vec::new();
        while endpoint.poll(&mut done, 1) == 0 {
            std::thread::yield_now();
        }
        done[0].outcome.expect("the key opens it");
    }
}

/// The offset of one word of each chunk.
fn places(extent: &Extent) -> impl Iterator<Item = usize> + use<> {
    (0..extent.class.chunks() as usize).map(|chunk| chunk * 4096 + 8)
}

fn stamp(extent: &Extent, at: usize) -> u64 {
    STAMP ^ extent.addr ^ (at as u64) << 32
}

fn connect(reach: &FabricAddress, host: Host, epoch: u64) -> PoolClient {
    let who = Identity { host, epoch, tenant: TENANT };
    let endpoint = reach.connect(who, Some(&KEY), &ConnectOptions::default()).expect("the node listens");
    let mut client = PoolClient::new(host, TENANT);
    client.add_node(NODE, endpoint).expect("a good node");
    client
}

/// Waits until the victim is killed or stopped; false if it has exited.
fn wait_for(child: Pid, end: VictimEnd) -> bool {
    let status = waitpid(Some(child), WaitOptions::UNTRACED).expect("the victim is a child");
    let (_, status): (Pid, WaitStatus) = status.expect("waitpid has returned the child");
    match (status.exit_status(), end) {
        (Some(code), _) => {
            assert_eq!(code, 0, "the victim failed before its end");
            false
        }
        (None, VictimEnd::Kill) => {
            assert_eq!(status.terminating_signal(), Some(Signal::KILL.as_raw()));
            true
        }
        (None, VictimEnd::Stop | VictimEnd::Write) => {
            assert!(status.stopped(), "the victim is not stopped: {status:?}");
            true
        }
    }
}
