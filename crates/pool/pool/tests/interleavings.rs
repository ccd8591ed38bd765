//! The pool client under a scheduler that switches threads at every access to the node's memory.
//!
//! No chunk has two owners and none is lost, while a host dies, is recovered, or is scanned for
//! leaks at any moment.

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
const SCHEDULES: usize = 2000;
const STACK_BYTES: usize = 256 << 10;
/// Allocations and frees of each worker.
const TURNS: usize = 5;
/// Most accesses of a host that dies.
const LIFE_MAX: u64 = 60;
/// Size classes; half a span is among them, so that spans fill and empty.
const CLASSES: [u8; 3] = [0, 3, 4];
const DYING: Host = Host(3);

/// A fault of a step, which the test must detect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ClientFault {
    None,
    /// The node's CAS is not atomic.
    TornCas,
    /// The dead host is not fenced: its last access takes effect after it was recovered.
    Unfenced,
    /// A worker records an extent only after the operation that allocated it has ended.
    RecordedLate,
}

/// The node, and the true owners of its chunks.
struct SharedNode {
    memory: StdArc<Memory>,
    layout: Layout,
    /// The worker that owns each chunk; 0 for none.
    owners: Vec<AtomicU16>,
    /// The last access of the dead host.
    stray: Mutex<Option<Verb>>,
    fault: ClientFault,
}

/// An endpoint that executes operations when they are posted, and lets other threads run in
/// between.
struct YieldingEndpoint {
    scene: Arc<SharedNode>,
    regions: [Region; 1],
    locals: Vec<StdArc<Memory>>,
    done: VecDeque<Completion>,
    /// Accesses until the host dies.
    accesses_left: u64,
}

impl std::fmt::Debug for YieldingEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("YieldingEndpoint").field("accesses_left", &self.accesses_left).finish_non_exhaustive()
    }
}

impl SharedNode {
    fn new(fault: ClientFault) -> Self {
        let layout = Layout::new(NODE.0, 1).expect("a layout");
        let len = usize::try_from(layout.region_bytes()).expect("the number is small");
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

    fn client(
        self: &Arc<Self>,
        host: Host,
        leak_detector: &StdArc<LeakDetector>,
        accesses: u64,
    ) -> PoolClient {
        let region = Region { base: BASE, len: self.layout.region_bytes(), key: REGION };
        let endpoint = YieldingEndpoint {
            scene: Arc::clone(self),
            regions: [region],
            locals: Vec::new(),
            done: VecDeque::new(),
            accesses_left: accesses,
        };
        let mut client = PoolClient::with_leak_detector(host, TENANT, StdArc::clone(leak_detector));
        // A host that dies here has changed nothing yet.
        let _died = client.add_node(NODE, Box::new(endpoint));
        client
    }

    fn at(&self, remote: RemoteAddr) -> usize {
        assert_eq!(remote.key, REGION, "only metadata is accessed here");
        usize::try_from(remote.addr - BASE).expect("the address is inside the memory")
    }

    /// Changes the owner of an extent's chunks, and asserts the owner before.
    fn change_owner(&self, extent: &Extent, from: u16, to: u16) {
        let first = self.layout.chunk_of(extent.addr - BASE).expect("the address is an extent's");
        for chunk in first..first + extent.class.chunks() {
            let before = self.owners[chunk as usize].swap(to, SeqCst);
            assert_eq!(before, from, "chunk {chunk} goes from {from} to {to}");
        }
    }

    /// Asserts that the extent's key is in its entry.
    fn assert_opened(&self, extent: &Extent) {
        let chunk = self.layout.chunk_of(extent.addr - BASE).expect("the address is an extent's");
        let at = WordAt::key_of(Grant { chunk, class: extent.class, key: extent.key });
        let at = usize::try_from(self.layout.word_at(at)).expect("the address is inside the memory");
        let entry = KeyEntry(self.memory.atomic_u64(at).load(SeqCst));
        assert_eq!(entry, KeyEntry::open(extent.key, TENANT), "{extent:?}");
    }

    fn execute(&self, verb: Verb, locals: &[StdArc<Memory>]) -> u64 {
        thread::yield_now();
        let local = |slice: LocalSlice| {
            let offset = usize::try_from(slice.offset).expect("the number is small");
            (&locals[slice.key.0 as usize], offset, slice.len as usize / 8)
        };
        match verb {
            Verb::CompareSwap { remote, expected, desired } => {
                let word = self.memory.atomic_u64(self.at(remote));
                if self.fault == ClientFault::TornCas {
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
                // The words of a READ are of different moments.
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

impl Endpoint for YieldingEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        for Work { id, verb, .. } in batch {
            if self.accesses_left == 1 && self.scene.fault == ClientFault::Unfenced {
                let mut stray = self.scene.stray.lock().expect("no panic");
                // The bytes of a WRITE are in memory that is dropped with the client.
                *stray = Some(*verb).filter(|verb| matches!(verb, Verb::CompareSwap { .. }));
            }
            self.accesses_left = self.accesses_left.saturating_sub(1);
            let outcome = if self.accesses_left == 0 {
                Err(WorkError::PeerGone)
            } else {
                Ok(self.scene.execute(*verb, &self.locals))
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
        self.accesses_left == 0
    }
}

/// The ledger of a worker.
#[derive(Default)]
struct WorkerLedger(std::sync::Mutex<Vec<Extent>>);

impl std::fmt::Debug for WorkerLedger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerLedger").finish_non_exhaustive()
    }
}

impl WorkerLedger {
    fn change(&self, change: impl FnOnce(&mut Vec<Extent>)) {
        change(&mut self.0.lock().expect("no panic"));
    }
}

impl Ledger for WorkerLedger {
    fn extents(&self, each: &mut dyn FnMut(Extent)) {
        self.0.lock().expect("no panic").iter().for_each(|extent| each(*extent));
    }
}

/// Allocates and frees extents. Owns none at the end.
fn run_worker(
    scene: &Arc<SharedNode>,
    client: &mut PoolClient,
    name: u16,
    ledger: &WorkerLedger,
) -> Result<(), PoolError> {
    let mut owned: Vec<Extent> = Vec::new();
    for _ in 0..TURNS {
        if owned.is_empty() || thread_rng().gen_bool(0.6) {
            let class = SizeClass::new(CLASSES[thread_rng().gen_range(0..CLASSES.len())]).expect("a class");
            let operation =
                Some(client.begin_operation()).filter(|_| scene.fault != ClientFault::RecordedLate);
            let outcome = match thread_rng().gen_range(0..4) {
                0 => client.allocate_many(NODE, class, 3),
                _ => client.allocate(NODE, class).map(|extent| vec![extent]),
            };
            match outcome {
                Ok(extents) => {
                    extents.iter().for_each(|extent| scene.change_owner(extent, 0, name));
                    extents.iter().for_each(|extent| scene.assert_opened(extent));
                    thread::yield_now();
                    ledger.change(|recorded| recorded.extend_from_slice(&extents));
                    owned.extend(extents);
                }
                Err(PoolError::Full { .. }) => {}
                Err(error) => return Err(error),
            }
            drop(operation);
        } else {
            let extent = owned.swap_remove(thread_rng().gen_range(0..owned.len()));
            free(scene, client, name, ledger, &[extent])?;
        }
    }
    free(scene, client, name, ledger, &owned)
}

/// Frees extents, and removes them from the ledger.
fn free(
    scene: &SharedNode,
    client: &mut PoolClient,
    name: u16,
    ledger: &WorkerLedger,
    extents: &[Extent],
) -> Result<(), PoolError> {
    extents.iter().for_each(|extent| scene.assert_opened(extent));
    extents.iter().for_each(|extent| scene.change_owner(extent, name, 0));
    client.free_many(NODE, extents)?.into_iter().collect::<Result<(), _>>()?;
    ledger.change(|recorded| recorded.retain(|extent| !extents.contains(extent)));
    Ok(())
}

/// Allocates all spans but two, so that all clients use these two.
fn fill_all_but_two(scene: &Arc<SharedNode>) -> (PoolClient, Vec<Extent>) {
    let mut client = scene.client(Host(9), &StdArc::default(), u64::MAX);
    let spans = (0..14).map(|_| client.allocate(NODE, SizeClass::SPAN).expect("there is room")).collect();
    (client, spans)
}

/// Runs two workers of one host, which is scanned for leaks meanwhile; one worker of another host;
/// and one that dies and is recovered.
fn play(fault: ClientFault) {
    let scene = Arc::new(SharedNode::new(fault));
    let (mut filler, filled) = fill_all_but_two(&scene);
    let leak_detector = StdArc::new(LeakDetector::default());
    let mut threads = Vec::new();
    for (name, host, leak_detector) in [
        (1, Host(1), StdArc::clone(&leak_detector)),
        (2, Host(1), StdArc::clone(&leak_detector)),
        (3, Host(2), StdArc::default()),
    ] {
        let scene = Arc::clone(&scene);
        let ledger = StdArc::new(WorkerLedger::default());
        leak_detector.register_ledger(&ledger);
        threads.push(thread::spawn(move || {
            let mut client = scene.client(host, &leak_detector, u64::MAX);
            run_worker(&scene, &mut client, name, &ledger).expect("the worker's host lives");
        }));
    }
    let dying = Arc::clone(&scene);
    threads.push(thread::spawn(move || die_and_be_recovered(&dying)));
    for _ in 0..2 {
        let mut scanner = scene.client(Host(1), &leak_detector, u64::MAX);
        let outcome = leak_detector.scan(&mut scanner, NODE, |_| {
            thread::yield_now();
            true
        });
        let freed = outcome.expect("the node lives").expect("the scan waits for the others");
        assert_eq!(freed, Recovered::default(), "everything is in a ledger");
    }
    threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
    for extent in filled {
        filler.free(extent).expect("the extent is the filler's");
    }
    filler.refresh(NODE).expect("the node lives");
    assert_eq!(filler.free_bytes(NODE), filler.total_bytes(NODE), "something is lost");
    for _ in 0..16 {
        filler.allocate(NODE, SizeClass::SPAN).expect("every span is free");
    }
}

/// Runs a client that dies at some moment, and then another host that recovers it.
fn die_and_be_recovered(scene: &Arc<SharedNode>) {
    let accesses = thread_rng().gen_range(1..LIFE_MAX);
    let mut client = scene.client(DYING, &StdArc::default(), accesses);
    // The client does not record the owners of its chunks, which would be unknown at its death.
    let mut owned = Vec::new();
    while let Ok(extents) = client.allocate_many(NODE, SizeClass::new(1).expect("a class"), 2) {
        owned.extend(extents);
        if owned.len() > 2 && client.free(owned.swap_remove(0)).is_err() {
            break;
        }
    }
    drop(client);
    let mut recoverer = scene.client(Host(4), &StdArc::default(), u64::MAX);
    assert_eq!(recoverer.recover(NODE, DYING).expect("the node lives").unowned, 0);
    let stray = scene.stray.lock().expect("no panic").take();
    if let Some(verb) = stray {
        scene.execute(verb, &[]);
    }
}

/// A runner with larger stacks: a client needs more than the default.
fn runner<S: Scheduler + 'static>(scheduler: S) -> Runner<S> {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    Runner::new(scheduler, config)
}

#[test]
fn no_chunk_has_two_owners_and_none_is_lost() {
    runner(RandomScheduler::new(SCHEDULES)).run(|| play(ClientFault::None));
    runner(PctScheduler::new(3, SCHEDULES)).run(|| play(ClientFault::None));
}

#[test]
fn faults_are_detected() {
    for fault in [ClientFault::TornCas, ClientFault::Unfenced, ClientFault::RecordedLate] {
        let outcome = std::panic::catch_unwind(|| {
            runner(RandomScheduler::new(20 * SCHEDULES)).run(move || play(fault));
        });
        assert!(outcome.is_err(), "{fault:?} was not detected");
    }
}
