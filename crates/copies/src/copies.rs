//! Keeps the copies of a segment the same, with the record of where they are.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_arena::copies::{COPIES_MAX, CopyRecord, CopyTree, FORMER_MAX, FormerRoot};
use aquifer_objects::pointer::Pointer;

use crate::cleaning::clean;
use crate::mutation::Mutation;
use crate::reader::{len_of, load};
use crate::store::Store;
use crate::tree::{CHUNK_BYTES, Tree, chunks_of, sum_of};
use crate::writer::{Chunk, Writer};

/// Attempts to sync, while nodes fail.
const ATTEMPTS_MAX: usize = 3;
/// Chunks that are read before they are written.
const BATCH: usize = 64;

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// There are no copies.
    #[error("there are no copies: the segment was never synced")]
    None,
    /// A node failed.
    #[error("node {node} failed: {why}")]
    Node {
        /// The node.
        node: u16,
        /// Why.
        why: String,
    },
    /// A copy is not what was written.
    #[error("the copy on node {node} is damaged: the node has lost its heaps, or an object was freed")]
    Damaged {
        /// The node.
        node: u16,
    },
    /// There are too few nodes.
    #[error("{wanted} copies need as many nodes that serve heaps, and {found} can be used{why}")]
    TooFew {
        /// The number of copies.
        wanted: usize,
        /// The number of nodes.
        found: usize,
        /// Why one of the others cannot be used; empty if there are no others.
        why: String,
    },
    /// The number of copies is not possible.
    #[error("{0} copies are not possible: give 1 to {COPIES_MAX}")]
    Count(usize),
    /// The record of the copies was not replaced. It may have been.
    #[error("cannot record where the copies are: {0}")]
    Record(String),
}

impl CopyError {
    /// That a node failed.
    pub(crate) fn of<E: std::error::Error>(node: u16) -> impl FnOnce(E) -> Self {
        move |error| Self::Node { node, why: error.to_string() }
    }
}

/// What surrounds the copies of a segment.
pub trait Environment {
    /// Objects on a node.
    type Store: Store;

    /// Opens the user's heap on a node.
    ///
    /// # Errors
    /// Why it cannot be used.
    fn connect(&mut self, node: u16) -> Result<Self::Store, String>;

    /// The record of the copies, and the nodes that could have some.
    ///
    /// # Errors
    /// Why they are not known.
    fn load(&mut self) -> Result<(Option<CopyRecord>, CopyNodes), String>;

    /// Replaces the record, whose revision was this one, or 0 if there was none. The next one has
    /// the next revision.
    ///
    /// # Errors
    /// Why it was not replaced. It may have been.
    fn replace(&mut self, revision: u64, record: Option<&CopyRecord>) -> Result<(), String>;

    /// The time, in seconds since 1970.
    fn now_s(&self) -> u64;
}

/// The nodes that could have copies, the best ones first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CopyNodes {
    /// Those of other machines.
    pub elsewhere: Vec<u16>,
    /// Those of this machine.
    pub here: Vec<u16>,
}

impl CopyNodes {
    /// All of them: first those of other machines, and of these the ones that have a copy.
    fn in_order(&self, record: &CopyRecord) -> Vec<u16> {
        let has_copy = |node: &u16| record.trees.iter().any(|tree| tree.node == *node);
        let sorted = |nodes: &[u16]| {
            let (with, without): (Vec<u16>, Vec<u16>) = nodes.iter().partition(|node| has_copy(node));
            [with, without].concat()
        };
        [sorted(&self.elsewhere), sorted(&self.here)].concat()
    }
}

/// What a sync has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Synced {
    /// The number of the sync.
    pub version: u64,
    /// The nodes that have copies.
    pub nodes: Vec<u16>,
    /// How many of them are on other machines. Only these copies outlive this one.
    pub elsewhere: usize,
    /// Bytes of the segment that were written to each node, at most.
    pub written_bytes: u64,
}

/// Which chunks may be others than at the last look.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Any.
    All,
    /// These.
    Chunks(BTreeSet<usize>),
}

/// The copies of a segment, as its owner writes them.
#[derive(Debug)]
pub struct Copies<S> {
    bytes: u64,
    /// As the directory has it; `None` if that is not known.
    record: Option<CopyRecord>,
    writers: Vec<Writer<S>>,
    /// Nodes of this machine.
    here: Vec<u16>,
    /// What has changed since the last sync.
    changed: Change,
    /// Roots that are freed, and that the record still names.
    freed: Vec<FormerRoot>,
}

impl<S: Store> Copies<S> {
    /// The copies of a segment of `bytes` bytes, of which this process knows nothing yet.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let (writers, here, freed) = (Vec::new(), Vec::new(), Vec::new());
        Self { bytes, record: None, writers, here, changed: Change::All, freed }
    }

    /// Writes what has changed to `copies` nodes. `change` says what may have since the last call;
    /// `read` reads a chunk, and returns false if it is zeros.
    ///
    /// # Errors
    /// If there are too few nodes, one fails and no other takes its place, or the record cannot be
    /// replaced. Then the copies of the last sync count.
    pub fn sync<E: Environment<Store = S>>(
        &mut self,
        environment: &mut E,
        copies: usize,
        change: Change,
        mut read: impl FnMut(usize, &mut [u8]) -> bool,
    ) -> Result<Synced, CopyError> {
        match (&mut self.changed, change) {
            (Change::Chunks(changed), Change::Chunks(more)) => changed.extend(more),
            (changed, _) => *changed = Change::All,
        }
        if copies == 0 || copies > COPIES_MAX {
            return Err(CopyError::Count(copies));
        }
        let mut failed = BTreeMap::new();
        loop {
            let synced = self
                .prepare(environment, copies, &failed)
                .and_then(|()| self.write(&mut read))
                .and_then(|written| self.commit(environment, written));
            match synced {
                // Another node may take its place.
                Err(CopyError::Node { node, why }) if failed.len() + 1 < ATTEMPTS_MAX => {
                    failed.insert(node, why);
                    self.writers.retain(|writer| writer.node() != node);
                }
                Err(error) => {
                    if Mutation::ForgetChanges.is_active() {
                        self.changed = Change::Chunks(BTreeSet::new());
                    }
                    return Err(error);
                }
                synced => return synced,
            }
        }
    }

    /// Has as many writers as there shall be copies.
    fn prepare<E: Environment<Store = S>>(
        &mut self,
        environment: &mut E,
        copies: usize,
        failed: &BTreeMap<u16, String>,
    ) -> Result<(), CopyError> {
        self.writers.truncate(copies);
        if self.writers.len() == copies && self.record.is_some() {
            return Ok(());
        }
        let (found, nodes) = environment.load().map_err(CopyError::Record)?;
        if self.record.is_some() && self.record != found {
            // Its roots may be in no record any more.
            self.writers.clear();
        }
        // What is left in it may be of an earlier segment with this number.
        let record = CopyRecord { bytes: self.bytes, ..found.unwrap_or_default() };
        let mut why = failed.iter().next().map(|(node, why)| format!(": node {node} failed: {why}"));
        let mut opened: Vec<Writer<S>> = Vec::new();
        for node in nodes.in_order(&record) {
            if self.writers.len() + opened.len() == copies {
                break;
            }
            if failed.contains_key(&node) || self.writers.iter().any(|writer| writer.node() == node) {
                continue;
            }
            match self.open(environment, &record, node) {
                Ok(writer) => opened.push(writer),
                Err(error) => why = Some(format!(": {error}")),
            }
        }
        self.record = Some(record);
        self.here = nodes.here;
        let found = self.writers.len() + opened.len();
        if found < copies {
            opened.into_iter().for_each(Writer::abandon);
            if Mutation::AbandonWritten.is_active() {
                std::mem::take(&mut self.writers).into_iter().for_each(Writer::abandon);
            }
            return Err(CopyError::TooFew { wanted: copies, found, why: why.unwrap_or_default() });
        }
        if opened.is_empty() {
            return Ok(());
        }
        self.writers.extend(opened);
        self.announce(environment)?;
        // What earlier processes have left may be in the way.
        self.free_former(environment);
        Ok(())
    }

    /// A writer on a node. It goes on from the copy there, but with roots of its own: the process
    /// that wrote that may still write to its roots, although other hosts take it for dead.
    fn open<E: Environment<Store = S>>(
        &self,
        environment: &mut E,
        record: &CopyRecord,
        node: u16,
    ) -> Result<Writer<S>, CopyError> {
        let mut store = environment.connect(node).map_err(|why| CopyError::Node { node, why })?;
        let tree = record.trees.iter().find(|tree| tree.node == node);
        let loaded = match tree.map(|tree| load(&mut store, tree, self.bytes)) {
            Some(Err(error @ CopyError::Node { .. })) => return Err(error),
            Some(Ok(loaded)) => loaded,
            // What is damaged is written anew.
            Some(Err(_)) | None => Tree::zeros(self.bytes),
        };
        if Mutation::ReuseRoots.is_active()
            && let Some(tree) = tree
        {
            let roots = tree.roots.map(|root| Pointer::from_words(root.0).expect("it was written"));
            return Ok(Writer::reusing(store, self.bytes, loaded, roots, tree));
        }
        Writer::new(store, node, self.bytes, loaded).map_err(CopyError::of(node))
    }

    /// Records the roots of new writers, so that what they write is found if the sync does not end.
    fn announce<E: Environment<Store = S>>(&mut self, environment: &mut E) -> Result<(), CopyError> {
        let record = self.record.clone().unwrap_or_default();
        // First, because only so many are kept.
        let new = self.writers.iter().filter(|writer| writer.is_new()).flat_map(Writer::roots);
        let former = new.chain(record.former.iter().copied()).collect();
        let next = CopyRecord { former, ..record };
        self.replace(environment, next)
    }

    /// Replaces the record.
    fn replace<E: Environment<Store = S>>(
        &mut self,
        environment: &mut E,
        mut next: CopyRecord,
    ) -> Result<(), CopyError> {
        let revision = self.record.as_ref().map_or(0, |record| record.revision);
        next.revision = revision + 1;
        let mut seen = BTreeSet::new();
        next.former.retain(|root| !self.freed.contains(root) && seen.insert(*root));
        // The memory of nodes that never come back need not be freed.
        next.former.truncate(FORMER_MAX);
        if let Err(why) = environment.replace(revision, Some(&next)) {
            // Which of both records there is must be found out.
            self.forget();
            return Err(CopyError::Record(why));
        }
        self.record = Some(next);
        self.freed.clear();
        Ok(())
    }

    /// The next sync reads the record, and has roots of its own.
    fn forget(&mut self) {
        self.record = None;
        self.writers.clear();
        self.freed.clear();
    }

    /// Writes the chunks to all nodes. Returns the new copies, and how many bytes were written.
    fn write(
        &mut self,
        read: &mut impl FnMut(usize, &mut [u8]) -> bool,
    ) -> Result<(Vec<CopyTree>, u64), CopyError> {
        let version = self.record.as_ref().map_or(0, |record| record.version) + 1;
        let is_any_new = self.writers.iter().any(Writer::is_new);
        let chunks = match &self.changed {
            Change::Chunks(chunks) if !is_any_new => chunks.iter().copied().collect(),
            _ => Vec::from_iter(0..chunks_of(self.bytes)),
        };
        self.for_each_writer(|writer| writer.begin(version))?;
        let (mut buffer, mut batch, mut written_bytes) = (vec![0; CHUNK_BYTES], Vec::new(), 0);
        for (at, chunk) in chunks.iter().copied().enumerate() {
            batch.push(read_chunk(chunk, &mut buffer[..len_of(chunk, self.bytes)], read));
            if batch.len() == BATCH || at + 1 == chunks.len() {
                let puts = |writer: &mut Writer<S>| {
                    batch.iter().try_fold(0, |bytes, chunk| Ok(bytes + writer.put(chunk)?))
                };
                let written = self.for_each_writer(puts)?;
                written_bytes += written.into_iter().max().unwrap_or(0) as u64;
                batch.clear();
            }
        }
        Ok((self.for_each_writer(Writer::finish)?, written_bytes))
    }

    /// Has each writer do something, at the same time.
    fn for_each_writer<T: Send>(
        &mut self,
        work: impl Fn(&mut Writer<S>) -> Result<T, S::Error> + Sync,
    ) -> Result<Vec<T>, CopyError> {
        let one = |writer: &mut Writer<S>| {
            let node = writer.node();
            work(writer).map_err(CopyError::of(node))
        };
        if let [writer] = &mut self.writers[..] {
            return Ok(vec![one(writer)?]);
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = self.writers.iter_mut().map(|writer| scope.spawn(|| one(writer))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a writer does not panic")).collect()
        })
    }

    /// Records the new copies, and frees what they have replaced.
    fn commit<E: Environment<Store = S>>(
        &mut self,
        environment: &mut E,
        (trees, written_bytes): (Vec<CopyTree>, u64),
    ) -> Result<Synced, CopyError> {
        let record = self.record.clone().unwrap_or_default();
        let own: Vec<FormerRoot> = self.writers.iter().flat_map(Writer::roots).collect();
        let replaced = record.trees.iter().flat_map(|tree| tree.former(self.bytes));
        let former = replaced.chain(record.former.iter().copied());
        let former = former.filter(|root| !own.contains(root)).collect();
        let (version, nodes) = (record.version + 1, Vec::from_iter(trees.iter().map(|tree| tree.node)));
        let elsewhere = nodes.iter().filter(|node| !self.here.contains(node)).count();
        let synced_at_s = environment.now_s();
        self.replace(environment, CopyRecord { version, synced_at_s, trees, former, ..record })?;
        self.writers.iter_mut().for_each(Writer::commit);
        self.changed = Change::Chunks(BTreeSet::new());
        self.free_former(environment);
        Ok(Synced { version, nodes, elsewhere, written_bytes })
    }

    /// Frees what former roots name, and those. What cannot be freed now is tried after the next
    /// sync.
    fn free_former<E: Environment<Store = S>>(&mut self, environment: &mut E) {
        let Some(record) = self.record.clone() else { return };
        if Mutation::SkipCleaning.is_active() {
            return;
        }
        let own: Vec<FormerRoot> = self.writers.iter().flat_map(Writer::roots).collect();
        let is_written = |node: u16| self.writers.iter().any(|writer| writer.node() == node);
        // The copy on a node without a writer may need what such a root names.
        let is_needed = |root: &FormerRoot| {
            own.contains(root)
                || !is_written(root.node) && record.trees.iter().any(|tree| tree.node == root.node)
        };
        let is_due = |root: &&FormerRoot| !is_needed(root) && !self.freed.contains(root);
        let former: Vec<FormerRoot> = record.former.iter().filter(is_due).copied().collect();
        for root in former {
            let freed = match self.writers.iter_mut().find(|writer| writer.node() == root.node) {
                Some(writer) => {
                    let kept = writer.tree().clone();
                    free_root(writer.store(), root, &kept).is_ok()
                }
                None => free_on(environment, root),
            };
            if freed {
                self.freed.push(root);
            }
        }
    }
}

/// Frees all copies of a segment, and removes their record, unless some cannot be freed now.
///
/// # Errors
/// If the record cannot be replaced.
pub fn discard<E: Environment>(environment: &mut E) -> Result<(), CopyError> {
    let (found, _) = environment.load().map_err(CopyError::Record)?;
    let Some(record) = found else { return Ok(()) };
    let of_trees = record.trees.iter().flat_map(|tree| tree.former(record.bytes));
    let mut former: Vec<FormerRoot> = of_trees.chain(record.former.iter().copied()).collect();
    former.truncate(FORMER_MAX);
    let revision = record.revision + 1;
    let mut next = CopyRecord { revision, trees: Vec::new(), former, ..record };
    environment.replace(record.revision, Some(&next)).map_err(CopyError::Record)?;
    let roots = std::mem::take(&mut next.former);
    next.former = roots.into_iter().filter(|root| !free_on(environment, *root)).collect();
    if next.former.is_empty() {
        return environment.replace(revision, None).map_err(CopyError::Record);
    }
    next.revision = revision + 1;
    environment.replace(revision, Some(&next)).map_err(CopyError::Record)
}

fn free_on<E: Environment>(environment: &mut E, root: FormerRoot) -> bool {
    let store = environment.connect(root.node);
    store.is_ok_and(|mut store| free_root(&mut store, root, &Tree::zeros(0)).is_ok())
}

/// Frees what a root names and is not kept, and the root.
fn free_root<S: Store>(store: &mut S, root: FormerRoot, kept: &Tree) -> Result<(), S::Error> {
    let FormerRoot { root, bytes, .. } = root;
    let Some(root) = Pointer::from_words(root.0) else { return Ok(()) };
    clean(store, root, bytes, kept)?;
    store.free(root)
}

fn read_chunk(chunk: usize, buffer: &mut [u8], read: &mut impl FnMut(usize, &mut [u8]) -> bool) -> Chunk {
    let is_data = read(chunk, buffer) && buffer.iter().any(|byte| *byte != 0);
    Chunk { chunk, content: is_data.then(|| (buffer.to_vec(), sum_of(buffer))) }
}
