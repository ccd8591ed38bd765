//! The client itself, as the product runs it, under a scheduler that switches threads at every access to the node's memory: no chunk is anybody's twice, none is
//! lost, whoever dies or is audited at any moment.

use std::collections::VecDeque;
use std::sync::Arc as StdArc;
use std::sync::atomic::Ordering::SeqCst;

use aquifer_fabric::{
    Completion, Endpoint, EndpointError, Host, Key, KeyEntry, Limits, LocalKey, LocalSlice, Memory,
    PostError, Region, RemoteAddr, Tenant, Verb, Work, WorkError,
};
use aquifer_pool::layout::Layout;
use aquifer_pool::op::{Grant, Recovered, WordAt};
use aquifer_pool::{Extent, LeakDetector, Ledger, NodeId, PoolClient, PoolError, SizeClass};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::AtomicU16;
use shuttle::sync::{Arc, Mutex};
use shuttle::{Config, Runner, thread};

const NODE: NodeId = NodeId(1);
const BASE: u64 = 1 << 32;
const REGION: Key = Key(7);
const TENANT: Tenant = Tenant(0);
const SCHEDULES: usize = 4000;
const STACK_BYTES: usize = 256 << 10;
/// What a taker does, one after the other.
const TURNS: usize = 5;
/// Most accesses of a host that dies.
const LIFE_MAX: u64 = 60;
/// Half a span, so that spans fill and empty; and small ones among them.
const CLASSES: [u8; 3] = [0, 3, 4];
const DYING: Host = Host(3);

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// The node's compare-and-swap is none: others come in between.
    Torn,
    /// The dead host is not fenced: its last access comes after it was recovered.
    Unfenced,
    /// A taker does not write down what it takes before the taking is over.
    NotedLate,
}

/// The node, and what is true of it.
struct Scene {
    memory: StdArc<Memory>,
    layout: Layout,
    owners: Vec<AtomicU16>,
    stray: Mutex<Option<Verb>>,
    fault: Fault,
}

/// A connection whose work is done where it is posted, with others in between.
struct Watched {
    scene: Arc<Scene>,
    regions: [Region; 1],
    locals: Vec<StdArc<Memory>>,
    done: VecDeque<Completion>,
    /// Accesses until the host is dead.
    left: u64,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watched").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Scene {
    fn new(fault: Fault) -> Self {
        let layout = Layout::new(NODE.0, 1).expect("a layout");
        let len = usize::try_from(layout.region_bytes()).expect("it is small");
        let memory = Memory::create("interleavings", len).expect("memory");
        memory.write(0, &layout.encode());
        Self {
            memory: StdArc::new(memory),
            layout,
            owners: (0..layout.chunks()).map(|_| AtomicU16::new(0)).collect(),
            stray: Mutex::new(None),
            fault,
        }
    }

    fn client(self: &Arc<Self>, host: Host, leak_detector: &StdArc<LeakDetector>, left: u64) -> PoolClient {
        let region = Region { base: BASE, len: self.layout.region_bytes(), key: REGION };
        let endpoint = Watched {
            scene: Arc::clone(self),
            regions: [region],
            locals: Vec::new(),
            done: VecDeque::new(),
            left,
        };
        let mut client = PoolClient::with_leak_detector(host, TENANT, StdArc::clone(leak_detector));
        // Who dies here has done nothing yet.
        let _died = client.add_node(NODE, Box::new(endpoint));
        client
    }

    fn at(&self, remote: RemoteAddr) -> usize {
        assert_eq!(remote.key, REGION, "only metadata is accessed here");
        usize::try_from(remote.addr - BASE).expect("it is inside")
    }

    /// The chunks are somebody's from now on, and were nobody's; or the other way round.
    fn change_owner(&self, extent: &Extent, from: u16, to: u16) {
        let first = self.layout.chunk_of(extent.addr - BASE).expect("it is an extent");
        for chunk in first..first + extent.class.chunks() {
            let before = self.owners[chunk as usize].swap(to, SeqCst);
            assert_eq!(before, from, "chunk {chunk} goes from {from} to {to}");
        }
    }

    /// Whoever has an extent gets at it by its key.
    fn assert_opened(&self, extent: &Extent) {
        let chunk = self.layout.chunk_of(extent.addr - BASE).expect("it is an extent");
        let at = WordAt::key_of(Grant { chunk, class: extent.class, key: extent.key });
        let at = usize::try_from(self.layout.word_at(at)).expect("it is inside");
        let entry = KeyEntry(self.memory.atomic_u64(at).load(SeqCst));
        assert_eq!(entry, KeyEntry::opened(extent.key, TENANT), "{extent:?}");
    }

    fn carry_out(&self, verb: Verb, locals: &[StdArc<Memory>]) -> u64 {
        thread::yield_now();
        let local = |slice: LocalSlice| {
            let offset = usize::try_from(slice.offset).expect("it is small");
            (&locals[slice.key.0 as usize], offset, slice.len as usize / 8)
        };
        match verb {
            Verb::CompareSwap { remote, expected, desired } => {
                let word = self.memory.atomic_u64(self.at(remote));
                if self.fault == Fault::Torn {
                    let found = word.load(SeqCst);
                    thread::yield_now();
                    if found == expected {
                        word.store(desired, SeqCst);
                    }
                    return found;
                }
                word.compare_exchange(expected, desired, SeqCst, SeqCst).unwrap_or_else(|found| found)
            }
            Verb::FetchAdd { remote, add } => self.memory.atomic_u64(self.at(remote)).fetch_add(add, SeqCst),
            Verb::Read { local: to, remote } => {
                let (memory, offset, words) = local(to);
                // A READ is of no one moment.
                let pause = thread_rng().gen_range(0..=words);
                for word in 0..words {
                    if word == pause {
                        thread::yield_now();
                    }
                    let found = self.memory.atomic_u64(self.at(remote) + word * 8).load(SeqCst);
                    memory.write(offset + word * 8, &found.to_le_bytes());
                }
                words as u64 * 8
            }
            Verb::Write { local: from, remote } => {
                let (memory, offset, words) = local(from);
                for word in 0..words {
                    let value = memory.atomic_u64(offset + word * 8).load(SeqCst);
                    self.memory.atomic_u64(self.at(remote) + word * 8).store(value, SeqCst);
                    thread::yield_now();
                }
                words as u64 * 8
            }
            Verb::Send { .. } => panic!("the pool sends no messages"),
        }
    }
}

impl Endpoint for Watched {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        for Work { id, verb, .. } in batch {
            if self.left == 1 && self.scene.fault == Fault::Unfenced {
                let mut stray = self.scene.stray.lock().expect("no panic");
                // A WRITE has its bytes in memory that goes with its client.
                *stray = Some(*verb).filter(|verb| matches!(verb, Verb::CompareSwap { .. }));
            }
            self.left = self.left.saturating_sub(1);
            let outcome = if self.left == 0 {
                Err(WorkError::PeerGone)
            } else {
                Ok(self.scene.carry_out(*verb, &self.locals))
            };
            self.done.push_back(Completion { id: *id, outcome });
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let count = max.min(self.done.len());
        out.extend(self.done.drain(..count));
        count
    }

    fn register_local(&mut self, memory: StdArc<Memory>) -> Result<LocalKey, EndpointError> {
        self.locals.push(memory);
        Ok(LocalKey(u32::try_from(self.locals.len() - 1).expect("few")))
    }

    fn receive(&mut self, _: &mut Vec<u8>) -> bool {
        false
    }

    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn is_broken(&self) -> bool {
        self.left == 0
    }
}

/// What a taker has written down.
#[derive(Default)]
struct Notes(std::sync::Mutex<Vec<Extent>>);

impl std::fmt::Debug for Notes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notes").finish_non_exhaustive()
    }
}

impl Notes {
    fn change(&self, change: impl FnOnce(&mut Vec<Extent>)) {
        change(&mut self.0.lock().expect("no panic"));
    }
}

impl Ledger for Notes {
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        self.0.lock().expect("no panic").iter().for_each(|extent| each(*extent));
    }
}

/// Takes and gives back, and has nothing in the end, unless it dies over it.
fn take_and_give(
    scene: &Arc<Scene>,
    client: &mut PoolClient,
    name: u16,
    notes: &Notes,
) -> Result<(), PoolError> {
    let mut held: Vec<Extent> = Vec::new();
    for _ in 0..TURNS {
        if held.is_empty() || thread_rng().gen_bool(0.6) {
            let class = SizeClass::new(CLASSES[thread_rng().gen_range(0..CLASSES.len())]).expect("a class");
            let under_way = Some(client.begin_operation()).filter(|_| scene.fault != Fault::NotedLate);
            let taken = match thread_rng().gen_range(0..4) {
                0 => client.allocate_many(NODE, class, 3),
                _ => client.allocate(NODE, class).map(|extent| vec![extent]),
            };
            match taken {
                Ok(extents) => {
                    extents.iter().for_each(|extent| scene.change_owner(extent, 0, name));
                    extents.iter().for_each(|extent| scene.assert_opened(extent));
                    thread::yield_now();
                    notes.change(|notes| notes.extend_from_slice(&extents));
                    held.extend(extents);
                }
                Err(PoolError::Full { .. }) => {}
                Err(error) => return Err(error),
            }
            drop(under_way);
        } else {
            let extent = held.swap_remove(thread_rng().gen_range(0..held.len()));
            give(scene, client, name, notes, &[extent])?;
        }
    }
    give(scene, client, name, notes, &held)
}

fn give(
    scene: &Scene,
    client: &mut PoolClient,
    name: u16,
    notes: &Notes,
    extents: &[Extent],
) -> Result<(), PoolError> {
    extents.iter().for_each(|extent| scene.assert_opened(extent));
    extents.iter().for_each(|extent| scene.change_owner(extent, name, 0));
    client.free_many(NODE, extents)?.into_iter().collect::<Result<(), _>>()?;
    notes.change(|notes| notes.retain(|noted| !extents.contains(noted)));
    Ok(())
}

/// All spans but two are allocated, so that all clients meet there.
fn crowd(scene: &Arc<Scene>) -> (PoolClient, Vec<Extent>) {
    let mut client = scene.client(Host(9), &StdArc::default(), u64::MAX);
    let taken = (0..14).map(|_| client.allocate(NODE, SizeClass::SPAN).expect("there is room")).collect();
    (client, taken)
}

/// Two takers of one host, which is audited meanwhile; one of another; and one that dies, and is recovered.
fn play(fault: Fault) {
    let scene = Arc::new(Scene::new(fault));
    let (mut crowd, taken) = crowd(&scene);
    let leak_detector = StdArc::new(LeakDetector::default());
    let mut threads = Vec::new();
    for (name, host, leak_detector) in [
        (1, Host(1), StdArc::clone(&leak_detector)),
        (2, Host(1), StdArc::clone(&leak_detector)),
        (3, Host(2), StdArc::default()),
    ] {
        let scene = Arc::clone(&scene);
        let notes = StdArc::new(Notes::default());
        leak_detector.register_ledger(&notes);
        threads.push(thread::spawn(move || {
            let mut client = scene.client(host, &leak_detector, u64::MAX);
            take_and_give(&scene, &mut client, name, &notes).expect("it lives");
        }));
    }
    let dying = Arc::clone(&scene);
    threads.push(thread::spawn(move || be_mortal(&dying)));
    for _ in 0..2 {
        let mut auditor = scene.client(Host(1), &leak_detector, u64::MAX);
        let audited = leak_detector.scan(&mut auditor, NODE, |_| {
            thread::yield_now();
            true
        });
        let found = audited.expect("the node lives").expect("it waits for the others");
        assert_eq!(found, Recovered::default(), "everything is in a ledger");
    }
    threads.into_iter().for_each(|thread| thread.join().expect("it does not panic"));
    for extent in taken {
        crowd.free(extent).expect("it is ours");
    }
    crowd.refresh(NODE).expect("the node lives");
    assert_eq!(crowd.free_bytes(NODE), crowd.total_bytes(NODE), "something is lost");
    for _ in 0..16 {
        crowd.allocate(NODE, SizeClass::SPAN).expect("every span is free");
    }
}

/// Dies at some moment; then another host gives back what it had.
fn be_mortal(scene: &Arc<Scene>) {
    let left = thread_rng().gen_range(1..LIFE_MAX);
    let mut client = scene.client(DYING, &StdArc::default(), left);
    // It does not say what it has: at its death nobody could tell.
    let mut held = Vec::new();
    while let Ok(extents) = client.allocate_many(NODE, SizeClass::new(1).expect("a class"), 2) {
        held.extend(extents);
        if held.len() > 2 && client.free(held.swap_remove(0)).is_err() {
            break;
        }
    }
    drop(client);
    let mut heir = scene.client(Host(4), &StdArc::default(), u64::MAX);
    assert_eq!(heir.recover(NODE, DYING).expect("the node lives").unowned, 0);
    let stray = scene.stray.lock().expect("no panic").take();
    if let Some(verb) = stray {
        scene.carry_out(verb, &[]);
    }
}

/// A client and what it is about to do take more than the stacks that threads have by default.
fn runner<S: Scheduler + 'static>(scheduler: S) -> Runner<S> {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    Runner::new(scheduler, config)
}

#[test]
fn nothing_is_twice_anybodys_and_nothing_is_lost() {
    runner(RandomScheduler::new(SCHEDULES)).run(|| play(Fault::None));
    runner(PctScheduler::new(3, SCHEDULES)).run(|| play(Fault::None));
}

#[test]
fn faults_are_noticed() {
    for fault in [Fault::Torn, Fault::Unfenced, Fault::NotedLate] {
        let outcome = std::panic::catch_unwind(|| {
            runner(RandomScheduler::new(10 * SCHEDULES)).run(move || play(fault));
        });
        assert!(outcome.is_err(), "{fault:?} was not noticed");
    }
}
