//! Random syncs with crashes, failing nodes, and processes that still write after other hosts
//! consider them dead. After each sync, the test restores the recorded copy and compares it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use aquifer_arena::copies::{CopyRecord, CopyTree};
use aquifer_copies::copies::discard;
use aquifer_copies::tree::{CHUNK_BYTES, LEAF_CHUNKS, ROOT_HEAD_BYTES, decode};
use aquifer_copies::{Change, Copies, CopyError, CopyNodes, Environment, Mutation, Store, restore};
use aquifer_mutation::Mutations;
use aquifer_objects::class::ClassId;
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::pointer::Pointer;

const NODES: u16 = 3;
/// Two leaves, and a chunk of one page.
const CHUNKS: usize = 2 * LEAF_CHUNKS + 1;
const BYTES: u64 = (2 * LEAF_CHUNKS * CHUNK_BYTES) as u64 + 4096;
const STEPS: usize = 12;
const SEEDS: u64 = 24;
/// Maximum number of objects that a crashed process leaks on each node: a batch of chunks, a leaf,
/// and two roots.
const LEAKED_MAX: usize = 19;

/// The content of a segment: chunks that are not zeros.
type Memory = BTreeMap<usize, u64>;
type Objects = BTreeMap<u64, Vec<u8>>;

#[derive(Debug, thiserror::Error)]
#[error("the node does not answer")]
struct Failed;

/// The nodes and the directory, which all processes share.
#[derive(Default)]
struct World {
    nodes: BTreeMap<u16, Objects>,
    last_number: u64,
    record: Option<CopyRecord>,
    /// The process that may replace the record.
    owner: u64,
}

/// A fault during a sync.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    /// The process ends after some operations. `is_done`: whether the last one is carried out.
    Crash { after: usize, is_done: bool },
    /// A node fails after some operations, until the sync has ended.
    Node { node: u16, after: usize },
    /// The process is suspended after some operations, and resumes when another one has synced.
    Stop { after: usize },
    /// The record's replacement is carried out, and its answer is lost.
    Answer,
}

/// The progress of one process in its sync.
struct Progress {
    operations: usize,
    fault: Option<Fault>,
    is_over: bool,
    /// Whether the fault has occurred.
    has_failed: bool,
    gate: Option<(Sender<()>, Receiver<()>)>,
}

#[derive(Clone)]
struct Process {
    world: Arc<Mutex<World>>,
    progress: Arc<Mutex<Progress>>,
    number: u64,
}

impl Process {
    fn new(world: &Arc<Mutex<World>>, number: u64) -> Self {
        world.lock().unwrap().owner = number;
        let progress = Progress { operations: 0, fault: None, is_over: false, has_failed: false, gate: None };
        Self { world: Arc::clone(world), progress: Arc::new(Mutex::new(progress)), number }
    }

    /// Carries out an operation, unless a fault prevents it.
    fn operate<T>(&self, node: u16, work: impl FnOnce(&mut World) -> T) -> Result<T, Failed> {
        let mut progress = self.progress.lock().unwrap();
        progress.operations += 1;
        let count = progress.operations;
        match progress.fault {
            _ if progress.is_over => return Err(Failed),
            Some(Fault::Crash { after, is_done }) if count >= after => {
                (progress.is_over, progress.has_failed) = (true, true);
                if is_done {
                    work(&mut self.world.lock().unwrap());
                }
                return Err(Failed);
            }
            Some(Fault::Node { node: failing, after }) if failing == node && count >= after => {
                progress.has_failed = true;
                return Err(Failed);
            }
            Some(Fault::Stop { after }) if count == after => {
                let gate = progress.gate.take().expect("the process is suspended once");
                gate.0.send(()).unwrap();
                gate.1.recv().unwrap();
            }
            _ => {}
        }
        Ok(work(&mut self.world.lock().unwrap()))
    }
}

struct NodeStore(Process, u16);

impl NodeStore {
    fn with<T>(&self, work: impl FnOnce(&mut Objects) -> Result<T, Failed>) -> Result<T, Failed> {
        self.0.operate(self.1, |world| work(world.nodes.entry(self.1).or_default()))?
    }
}

impl Store for NodeStore {
    type Error = Failed;

    fn create(&mut self, bytes: &[u8]) -> Result<Pointer, Failed> {
        self.0.operate(self.1, |world| {
            world.last_number += 1;
            let number = world.last_number;
            world.nodes.entry(self.1).or_default().insert(number, bytes.to_vec());
            let number = ObjectNumber::new(number).unwrap();
            Pointer { node: self.1, heap: 1, class: ClassId(1), address: 0, number }
        })
    }

    fn write_at(&mut self, object: Pointer, offset: usize, bytes: &[u8]) -> Result<(), Failed> {
        assert!(bytes.len() <= 32 << 10 && offset.is_multiple_of(8));
        self.with(|objects| {
            let object = objects.get_mut(&object.number.get()).ok_or(Failed)?;
            object[offset..offset + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })
    }

    fn read(&mut self, reads: &mut [(Pointer, &mut [u8])]) -> Result<bool, Failed> {
        self.with(|objects| {
            Ok(reads.iter_mut().all(|(object, out)| {
                let found = objects.get(&object.number.get()).and_then(|bytes| bytes.get(..out.len()));
                found.map(|bytes| out.copy_from_slice(bytes)).is_some()
            }))
        })
    }

    fn free(&mut self, object: Pointer) -> Result<(), Failed> {
        self.with(|objects| {
            objects.remove(&object.number.get());
            Ok(())
        })
    }
}

impl Environment for Process {
    type Store = NodeStore;

    fn connect(&mut self, node: u16) -> Result<NodeStore, String> {
        self.operate(node, |_| ()).map_err(|error| error.to_string())?;
        Ok(NodeStore(self.clone(), node))
    }

    fn load(&mut self) -> Result<(Option<CopyRecord>, CopyNodes), String> {
        let record = self.operate(0, |world| world.record.clone()).map_err(|error| error.to_string())?;
        // The last node is on the machine of the process.
        let nodes = CopyNodes { elsewhere: (1..NODES).collect(), here: vec![NODES] };
        Ok((record, nodes))
    }

    fn replace(&mut self, revision: u64, record: Option<&CopyRecord>) -> Result<(), String> {
        let replaced = self.operate(0, |world| {
            let found = world.record.as_ref().map_or(0, |record| record.revision);
            let is_permitted = world.owner == self.number && found == revision;
            if is_permitted {
                assert!(record.is_none_or(CopyRecord::is_valid));
                world.record = record.cloned();
            }
            is_permitted
        });
        let is_lost = self.progress.lock().unwrap().fault == Some(Fault::Answer);
        match replaced {
            Ok(true) if !is_lost => Ok(()),
            Ok(_) => Err("fenced, or the answer was lost".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn now_s(&self) -> u64 {
        1
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ word >> 31) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap()
    }
}

/// A history of processes. Each begins with the memory of its predecessor, or restores a copy.
struct Run {
    world: Arc<Mutex<World>>,
    random: Random,
    process: Process,
    copies: Copies<NodeStore>,
    memory: Memory,
    /// Chunks that were written since the last call of sync, also if that failed.
    written: BTreeSet<usize>,
    knows_written: bool,
    /// The contents of each version: one for each attempt.
    versions: BTreeMap<u64, Vec<Memory>>,
    processes: u64,
    faults: usize,
}

fn read(memory: &Memory, chunk: usize, out: &mut [u8]) -> bool {
    out.fill(0);
    let value = memory.get(&chunk).copied().unwrap_or(0);
    let at = chunk % 500 * 8;
    out[at..at + 8].copy_from_slice(&value.to_le_bytes());
    value != 0
}

impl Run {
    fn new(seed: u64) -> Self {
        let world = Arc::default();
        let process = Process::new(&world, 1);
        let versions = BTreeMap::from([(0, vec![Memory::new()])]);
        Self {
            world,
            random: Random(seed),
            process,
            copies: Copies::new(BYTES),
            memory: Memory::new(),
            written: BTreeSet::new(),
            knows_written: false,
            versions,
            processes: 1,
            faults: 0,
        }
    }

    fn write_some(&mut self) {
        let most = if self.random.below(3) == 0 { 150 } else { 10 };
        for _ in 0..=self.random.below(most) {
            let chunk = match self.random.below(8) {
                0 => CHUNKS - 1,
                1 => self.random.index(LEAF_CHUNKS),
                _ => self.random.index(120),
            };
            let value = self.random.below(5) * (1 + self.random.below(1 << 40));
            self.memory.insert(chunk, value);
            self.written.insert(chunk);
        }
    }

    fn sync(&mut self, count: usize) -> Result<(), CopyError> {
        let change = match self.knows_written {
            true => Change::Chunks(std::mem::take(&mut self.written)),
            false => Change::All,
        };
        (self.knows_written, self.written) = (true, BTreeSet::new());
        let record = self.world.lock().unwrap().record.clone();
        let next = record.map_or(0, |record| record.version) + 1;
        self.versions.entry(next).or_default().push(self.memory.clone());
        let memory = self.memory.clone();
        let reads = |chunk: usize, out: &mut [u8]| read(&memory, chunk, out);
        let synced = self.copies.sync(&mut self.process, count, change, reads)?;
        // No other attempt with this number can have been recorded.
        assert_eq!(synced.version, next);
        assert_eq!(synced.nodes.len(), count);
        self.versions.insert(next, vec![memory]);
        Ok(())
    }

    /// Replaces the process by another one, which has the same memory or restores a copy.
    fn replace_process(&mut self) {
        self.processes += 1;
        self.process = Process::new(&self.world, self.processes);
        (self.copies, self.knows_written) = (Copies::new(BYTES), false);
        if self.random.below(2) == 0 {
            self.memory = self.restored();
        }
    }

    /// Restores the recorded copy, which must be the content of its version.
    fn restored(&self) -> Memory {
        let record = self.world.lock().unwrap().record.clone();
        let Some(record) = record.filter(CopyRecord::has_copies) else { return Memory::new() };
        let restored = self.restore(&record).expect("each copy is whole");
        let known = &self.versions[&record.version];
        let is_known =
            known.iter().any(|memory| memory.iter().filter(|(_, value)| **value != 0).eq(restored.iter()));
        assert!(is_known, "version {} has other contents: {restored:?}", record.version);
        restored
    }

    fn restore(&self, record: &CopyRecord) -> Result<Memory, CopyError> {
        let reader = Process { number: 0, ..self.reader() };
        let mut restored = Memory::new();
        let connect = |node| reader.clone().connect(node);
        restore(record, connect, |chunk, bytes| {
            let at = chunk % 500 * 8;
            let value = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            assert!(bytes.iter().enumerate().all(|(other, byte)| *byte == 0 || other / 8 == at / 8));
            restored.insert(chunk, value);
        })?;
        Ok(restored)
    }

    /// A process without faults.
    fn reader(&self) -> Process {
        let progress = Progress { operations: 0, fault: None, is_over: false, has_failed: false, gate: None };
        Process { world: Arc::clone(&self.world), progress: Arc::new(Mutex::new(progress)), number: 0 }
    }

    fn step(&mut self) {
        self.write_some();
        let count = 1 + self.random.index(3);
        let after = 1 + self.random.index(250);
        let fault = match self.random.below(8) {
            0 | 1 => Some(Fault::Crash { after, is_done: self.random.below(2) == 0 }),
            2 => {
                let node = 1 + u16::try_from(self.random.below(NODES.into())).unwrap();
                Some(Fault::Node { node, after })
            }
            3 => Some(Fault::Answer),
            4 => return self.step_with_stopped(after),
            _ => None,
        };
        let progress = Arc::clone(&self.process.progress);
        *progress.lock().unwrap() =
            Progress { operations: 0, fault, is_over: false, has_failed: false, gate: None };
        let synced = self.sync(count);
        progress.lock().unwrap().fault = None;
        assert!(fault.is_some() || synced.is_ok(), "{synced:?}");
        self.faults += usize::from(progress.lock().unwrap().has_failed);
        self.restored();
        if progress.lock().unwrap().is_over || self.random.below(6) == 0 {
            self.replace_process();
        }
    }

    /// Suspends a process in its sync, and resumes it when another one, which has restored the
    /// segment, has synced.
    fn step_with_stopped(&mut self, after: usize) {
        self.faults += 1;
        let mutation = Mutation::replace_active(None);
        Mutation::replace_active(mutation);
        let ((stopped, is_stopped), (resume, is_resumed)) = (channel(), channel());
        let gate = Some((stopped, is_resumed));
        let fault = Some(Fault::Stop { after });
        let own = self.process.clone();
        *own.progress.lock().unwrap() =
            Progress { operations: 0, fault, is_over: false, has_failed: false, gate };
        let mut copies = std::mem::replace(&mut self.copies, Copies::new(BYTES));
        let memory = self.memory.clone();
        let record = self.world.lock().unwrap().record.clone();
        let next = record.map_or(0, |record| record.version) + 1;
        // The sync may have been recorded before the process was stopped.
        self.versions.entry(next).or_default().push(memory.clone());
        let other = std::thread::spawn(move || {
            Mutation::replace_active(mutation);
            let mut process = own;
            let reads = |chunk: usize, out: &mut [u8]| read(&memory, chunk, out);
            drop(copies.sync(&mut process, 1, Change::All, reads));
            // Ends the wait for the stop, if the sync has ended before.
            process.progress.lock().unwrap().gate = None;
        });
        // False if the process has ended its sync before it was to stop.
        let was_stopped = is_stopped.recv().is_ok();
        self.replace_process();
        self.memory = self.restored();
        self.write_some();
        self.sync(1).expect("the other process is stopped");
        self.restored();
        if was_stopped {
            resume.send(()).unwrap();
        }
        other.join().unwrap();
        self.restored();
    }

    /// Counts objects without a name, after syncs without faults.
    fn leaked(&mut self) -> usize {
        for _ in 0..3 {
            self.sync(2).unwrap();
        }
        self.restored();
        let world = self.world.lock().unwrap();
        let record = world.record.as_ref().unwrap();
        let mut leaked = 0;
        for (node, objects) in &world.nodes {
            let needed = match record.trees.iter().find(|tree| tree.node == *node) {
                None => 0,
                Some(tree) => count_objects(tree, objects),
            };
            leaked += objects.len() - needed;
        }
        leaked
    }
}

/// Counts the objects of a copy.
fn count_objects(tree: &CopyTree, objects: &Objects) -> usize {
    let number = |words: [u64; 2]| Pointer::from_words(words).unwrap().number.get();
    let root = &objects[&number(tree.roots[usize::from(tree.current)].0)];
    let leaves = decode(&root[ROOT_HEAD_BYTES..]);
    let leaves: Vec<_> = leaves.iter().filter_map(|entry| entry.object()).collect();
    let chunks = leaves.iter().flat_map(|leaf| decode(&objects[&leaf.number.get()]));
    2 + leaves.len() + chunks.filter(|entry| entry.object().is_some()).count()
}

fn run(seed: u64) {
    let mut run = Run::new(seed);
    for _ in 0..STEPS {
        run.step();
    }
    let leaked = run.leaked();
    let most = LEAKED_MAX * usize::from(NODES) * run.faults;
    assert!(leaked <= most, "seed {seed}: {leaked} objects, {} faults", run.faults);
    // A byte of an object changes: the restore returns the right bytes, or fails.
    let record = run.world.lock().unwrap().record.clone().unwrap();
    for _ in 0..6 {
        let mut world = run.world.lock().unwrap();
        let node = record.trees[0].node;
        let objects = world.nodes.get_mut(&node).unwrap();
        let at = run.random.index(objects.len());
        let object = objects.values_mut().nth(at).unwrap();
        let byte = run.random.index(object.len());
        object[byte] ^= 0x10;
        drop(world);
        let mut one = record.clone();
        one.trees.truncate(1);
        if run.restore(&one).is_ok() {
            run.restored();
        }
        assert!(run.restore(&record).is_ok(), "the other copy is whole");
    }
}

#[test]
fn syncs_with_faults_leave_complete_copies() {
    (0..SEEDS).for_each(run);
}

#[test]
fn syncs_without_faults_leak_no_object() {
    let mut run = Run::new(1);
    for count in [2, 2, 1, 3, 3, 1] {
        run.write_some();
        run.sync(count).unwrap();
        run.restored();
        if count == 3 {
            run.replace_process();
        }
    }
    assert_eq!(run.leaked(), 0);
    discard(&mut run.process).unwrap();
    let world = run.world.lock().unwrap();
    assert_eq!(world.record, None);
    assert!(world.nodes.values().all(BTreeMap::is_empty), "{:?}", world.nodes.keys());
}

/// Ends a sync of a hundred chunks at each operation in turn. Only objects without a name at that
/// moment may leak.
fn crash_everywhere() {
    for after in (1..).step_by(7) {
        let mut run = Run::new(after as u64);
        let write = |run: &mut Run, value: u64| run.memory.extend((0..100).map(|chunk| (chunk, value)));
        write(&mut run, 1);
        run.sync(1).unwrap();
        write(&mut run, 2);
        run.knows_written = false;
        let fault = Some(Fault::Crash { after, is_done: after % 2 == 0 });
        run.process.progress.lock().unwrap().operations = 0;
        run.process.progress.lock().unwrap().fault = fault;
        drop(run.sync(1));
        let has_failed = run.process.progress.lock().unwrap().has_failed;
        run.restored();
        run.replace_process();
        let leaked = run.leaked();
        assert!(leaked <= LEAKED_MAX, "{leaked} objects after a crash at operation {after}");
        if !has_failed {
            assert!(after > 200);
            return;
        }
    }
}

#[test]
fn a_crash_at_any_operation_leaks_few_objects() {
    crash_everywhere();
}

#[test]
fn each_mutation_is_detected() {
    for mutation in Mutation::ALL {
        let is_detected = |work: &dyn Fn()| {
            let work = std::panic::AssertUnwindSafe(|| mutation.while_active(work));
            std::panic::catch_unwind(work).is_err()
        };
        let detected = is_detected(&crash_everywhere) || (0..SEEDS).any(|seed| is_detected(&|| run(seed)));
        assert!(detected, "{mutation:?}");
    }
}

mod long {
    use super::*;

    #[test]
    fn syncs_with_faults_leave_complete_copies() {
        (SEEDS..1500).for_each(run);
    }
}
