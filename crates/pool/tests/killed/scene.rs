//! A node, a host that lives, and one after another of which each dies at the next step.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{
    Completion, Host, Identity, KeyEntry, LocalKey, LocalSlice, Memory, Reach, RemoteAddr, Target, Verb, Work,
};
use aquifer_pool::op::{Grant, Recovered, WordAt};
use aquifer_pool::size::{SECTION_BYTES, SECTION_CHUNKS};
use aquifer_pool::{Extent, LeakDetector, NodeMemory, PoolClient, PoolError, ScanProgress, SizeClass};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};
use tempfile::TempDir;

use super::victim::{self, DATA_BYTES, EARLIER, End, KEY, Moment, NODE, TENANT, VICTIM, Victim};

const SECTIONS: u64 = 5;
const LIVING: Host = Host(1);
/// Sizes that the living host holds all the while, in sections that the victim uses too.
const HELD: [u8; 4] = [0, 0, 2, 5];
const STAMP: u64 = 0x5a5a_0001_0002_0003;

/// What was told is looked at for so many epochs. Keys are 27 random bits: among the hundred thousands of all steps one is like an earlier one now and then, by chance.
const TOLD_EPOCHS: u64 = 8;
/// The script has at least so many steps.
const STEPS_MIN: usize = 100;

/// A victim ends before and after each step of the script, or of every so many.
pub fn at_every_step(scene: &Scene, end: End, heir: Heir, stride: usize) {
    for (moment, first) in [(Moment::Before, 0), (Moment::After, stride / 2)] {
        let mut step = first;
        while scene.play(step, moment, end, heir) {
            step += stride;
        }
        assert!(step >= STEPS_MIN, "it was over after {step} steps");
    }
}

/// Who gives back what the dead had.
#[derive(Clone, Copy, Debug)]
pub enum Heir {
    /// Another host.
    Another,
    /// The same, when it comes again.
    Itself,
}

pub struct Scene {
    _folder: Option<TempDir>,
    target: Box<dyn Target>,
    reach: Reach,
    node_memory: NodeMemory,
    living: RefCell<Living>,
    /// Of the next victim.
    epoch: Cell<u64>,
    /// What anybody was told of, and in which epoch.
    told: RefCell<HashMap<Extent, u64>>,
}

/// The host that lives, and what it holds.
struct Living {
    client: PoolClient,
    held: Vec<Extent>,
    /// What it took since it was looked at last.
    told: Vec<Extent>,
    data: Arc<Memory>,
    local: LocalKey,
}

impl Scene {
    /// A scene at that target, which is reached like this; something in `folder` may be in use.
    pub fn on(folder: Option<TempDir>, target: Box<dyn Target>, reach: Reach) -> Self {
        let node_memory = NodeMemory::create(&*target, NODE, SECTIONS * SECTION_BYTES).expect("memory");
        let mut client = connect(&reach, LIVING, 1);
        let data = Arc::new(Memory::create("data", 2 << 20).expect("memory"));
        let endpoint = client.endpoint(NODE).expect("it is connected");
        let local = endpoint.register_local(Arc::clone(&data)).expect("room");
        let mut living = Living { client, held: Vec::new(), told: Vec::new(), data, local };
        for k in HELD {
            let extent = living.take(k).expect("all is free");
            living.held.push(extent);
        }
        Self {
            _folder: folder,
            target,
            reach,
            node_memory,
            living: RefCell::new(living),
            epoch: Cell::new(1),
            told: RefCell::default(),
        }
    }

    /// Let a victim end at that step, and clear up after it; false if it came to the end of its life before.
    pub fn play(&self, step: usize, moment: Moment, end: End, heir: Heir) -> bool {
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        self.let_an_earlier_one_die(epoch);
        let mut child = victim::start(&self.reach, epoch, step, moment, end);
        let has_ended = !wait_for(child.pid, end);
        self.told.borrow_mut().extend(victim::told(&mut child).map(|extent| (extent, epoch)));
        self.target.fence(VICTIM, epoch);
        let when = format!("step {step}, {moment:?}, {end:?}");
        for dead in [VICTIM, EARLIER] {
            let recovered = match heir {
                Heir::Another => connect(&self.reach, Host(4), 1).recover(NODE, dead),
                Heir::Itself => self.audit(dead),
            };
            assert_eq!(recovered.expect("the node lives").unowned, 0, "{when}");
        }
        self.all_else_is_free(&when);
        let mut living = self.living.borrow_mut();
        if end == End::Kill {
            let others = living.take_everything();
            assert_eq!(self.node_memory.free_bytes(), 0, "{when}: everything is free for others");
            others.into_iter().for_each(|extent| living.client.free(extent).expect("it is ours"));
        }
        if end == End::Stop && !has_ended {
            let was_ended = self.let_it_go_on(&mut living, child);
            assert!(!was_ended, "it stood between two accesses");
        }
        let held = living.held.clone();
        held.iter().for_each(|extent| living.verify(extent));
        !has_ended
    }

    /// The same host has come again, and knows of nothing.
    fn audit(&self, host: Host) -> Result<Recovered, PoolError> {
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        let mut client = connect(&self.reach, host, epoch);
        let audited =
            LeakDetector::default().scan(&mut client, NODE, |pause| pause == ScanProgress::NextPart);
        self.target.fence(host, epoch);
        audited.map(|found| found.expect("nobody takes anything"))
    }

    /// A victim that writes all the while is stopped, most often in the middle of that, and shut out; whether it was ended where it stood.
    pub fn stop_in_the_middle(&self) -> bool {
        let epoch = self.epoch.replace(self.epoch.get() + 1);
        let mut child = victim::start(&self.reach, epoch, usize::MAX, Moment::Before, End::Write);
        let layout = self.node_memory.layout;
        let written = (0..layout.sections())
            .map(|section| layout.chunk_data_at(section * SECTION_CHUNKS))
            .map(|at| usize::try_from(at).expect("it is mapped") + DATA_BYTES - 8);
        let ends: Vec<usize> = written.collect();
        let word = |at: &usize| self.node_memory.memory.atomic_u64(*at).load(Ordering::SeqCst);
        for at in &ends {
            self.node_memory.memory.atomic_u64(*at).store(0, Ordering::SeqCst);
        }
        while ends.iter().all(|at| word(at) == 0) {
            let ended = waitpid(Some(child.pid), WaitOptions::NOHANG).expect("it is ours");
            assert!(ended.is_none(), "the victim has ended: {ended:?}");
            std::thread::yield_now();
        }
        kill_process(child.pid, Signal::STOP).expect("it is there");
        assert!(wait_for(child.pid, End::Stop));
        self.told.borrow_mut().extend(victim::told(&mut child).map(|extent| (extent, epoch)));
        self.target.fence(VICTIM, epoch);
        let mut recoverer = connect(&self.reach, Host(4), 1);
        assert_eq!(recoverer.recover(NODE, VICTIM).expect("the node lives").extents, 1);
        drop(recoverer);
        self.all_else_is_free("stopped in the middle");
        self.let_it_go_on(&mut self.living.borrow_mut(), child)
    }

    /// A victim that stands still goes on when all that it held is another's; whether it was ended instead.
    fn let_it_go_on(&self, living: &mut Living, child: Victim) -> bool {
        let others = living.take_everything();
        assert_eq!(self.node_memory.free_bytes(), 0, "everything was free for others");
        kill_process(child.pid, Signal::CONT).expect("it was not waited for");
        drop(child.leash);
        // It has found itself shut out; or was ended where it stood still, if that was in the middle of an access.
        let ended = waitpid(Some(child.pid), WaitOptions::empty()).expect("it is ours");
        let (_, status) = ended.expect("it was waited for");
        others.iter().for_each(|extent| living.verify(extent));
        for extent in others {
            living.client.free(extent).expect("it is ours");
        }
        status.signaled()
    }

    /// Somebody holds a bit of everything, and is dead.
    fn let_an_earlier_one_die(&self, epoch: u64) {
        let mut earlier = connect(&self.reach, EARLIER, epoch);
        for k in [0, 1, 4, 6] {
            let extent = earlier.allocate(NODE, SizeClass::new(k).expect("a class")).expect("there is room");
            self.told.borrow_mut().insert(extent, epoch);
        }
        drop(earlier);
        self.target.fence(EARLIER, epoch);
    }

    /// Nothing is left of anybody but the living: no chunk, and no key that anybody was told.
    fn all_else_is_free(&self, when: &str) {
        let mut living = self.living.borrow_mut();
        let held: u64 = living.held.iter().map(|extent| extent.class.bytes()).sum();
        assert_eq!(self.node_memory.free_bytes(), self.node_memory.layout.data_bytes() - held, "{when}");
        for extent in &living.held {
            assert!(self.is_bound(extent), "{when}: the key of {extent:?} is not bound");
        }
        let epoch = self.epoch.get();
        let mut told = self.told.borrow_mut();
        told.extend(living.told.drain(..).map(|extent| (extent, epoch)));
        told.retain(|_, since| *since + TOLD_EPOCHS >= epoch);
        for extent in told.keys().filter(|extent| !living.held.contains(extent)) {
            assert!(!self.is_bound(extent), "{when}: {extent:?} was told, and its key is bound still");
        }
    }

    /// Whether its key opens it.
    fn is_bound(&self, extent: &Extent) -> bool {
        let layout = self.node_memory.layout;
        let chunk =
            layout.chunk_of(extent.addr - self.node_memory.region.base).expect("it is an extent's address");
        let entry = WordAt::key_of(Grant { chunk, class: extent.class, key: extent.key });
        let at = usize::try_from(layout.word_at(entry)).expect("it is mapped");
        KeyEntry(self.node_memory.memory.atomic_u64(at).load(Ordering::SeqCst)).key() == extent.key
    }
}

impl Living {
    fn take(&mut self, k: u8) -> Option<Extent> {
        let extent = self.client.allocate(NODE, SizeClass::new(k).expect("a class")).ok()?;
        self.told.push(extent);
        for at in places(&extent) {
            self.data.write(at, &stamp(&extent, at).to_le_bytes());
        }
        let (local, remote) = self.ends(&extent);
        self.execute(Verb::Write { local, remote });
        Some(extent)
    }

    /// Whatever there is, in pieces as large as possible.
    fn take_everything(&mut self) -> Vec<Extent> {
        let mut taken = Vec::new();
        for k in (0..SizeClass::COUNT).rev() {
            while let Some(extent) = self.take(k) {
                taken.push(extent);
            }
        }
        taken
    }

    /// It is as we wrote it.
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
        let endpoint = self.client.endpoint(NODE).expect("it is connected");
        endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("room");
        let mut done: Vec<Completion> = Vec::new();
        while endpoint.poll(&mut done, 1) == 0 {
            std::thread::yield_now();
        }
        done[0].outcome.expect("the key opens it");
    }
}

/// A word of each chunk.
fn places(extent: &Extent) -> impl Iterator<Item = usize> + use<> {
    (0..extent.class.chunks() as usize).map(|chunk| chunk * 4096 + 8)
}

fn stamp(extent: &Extent, at: usize) -> u64 {
    STAMP ^ extent.addr ^ (at as u64) << 32
}

fn connect(reach: &Reach, host: Host, epoch: u64) -> PoolClient {
    let who = Identity { host, epoch, tenant: TENANT };
    let endpoint = reach.connect(who, Some(&KEY), &ConnectOptions::default()).expect("the node listens");
    let mut client = PoolClient::new(host, TENANT);
    client.add_node(NODE, endpoint).expect("a good node");
    client
}

/// Wait until the victim has what was meant for it; false if it has ended by itself.
fn wait_for(child: Pid, end: End) -> bool {
    let status = waitpid(Some(child), WaitOptions::UNTRACED).expect("it is ours");
    let (_, status): (Pid, WaitStatus) = status.expect("it was waited for");
    match (status.exit_status(), end) {
        (Some(code), _) => {
            assert_eq!(code, 0, "the victim failed before its end");
            false
        }
        (None, End::Kill) => {
            assert_eq!(status.terminating_signal(), Some(Signal::KILL.as_raw()));
            true
        }
        (None, End::Stop | End::Write) => {
            assert!(status.stopped(), "it stands still: {status:?}");
            true
        }
    }
}
