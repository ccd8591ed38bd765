//! The copies of a segment on several nodes, which a sync keeps identical, and their record.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_arena::copies::{COPIES_MAX, CopyRecord, CopyTree, FORMER_MAX, FormerRoot};
use aquifer_objects::pointer::Pointer;

use crate::cleaning::clean;
use crate::mutation::Mutation;
use crate::reader::{len_of, load};
use crate::store::Store;
use crate::tree::{CHUNK_BYTES, Tree, chunks_of, sum_of};
use crate::writer::{Chunk, Writer};

/// Maximum number of attempts of one sync, each without the nodes that have failed.
const ATTEMPTS_MAX: usize = 3;
/// Number of chunks that are read from the segment before they are written to the nodes.
const BATCH: usize = 64;

/// An error of copying or restoring a segment.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The segment has no copies.
    #[error("there are no copies: the segment was never synced")]
    None,
    /// A node failed.
    #[error("node {node} failed: {why}")]
    Node {
        /// The node.
        node: u16,
        /// The reason of the failure.
        why: String,
    },
    /// A copy differs from what was written.
    #[error("the copy on node {node} is damaged: the node has lost its heaps, or an object was freed")]
    Damaged {
        /// The node.
        node: u16,
    },
    /// Fewer nodes can be used than copies are wanted.
    #[error("{wanted} copies need as many nodes that serve heaps, and {found} can be used{why}")]
    TooFew {
        /// The number of copies.
        wanted: usize,
        /// The number of usable nodes.
        found: usize,
        /// The reason why another node cannot be used; empty if there is no other node.
        why: String,
    },
    /// The number of copies is invalid.
    #[error("{0} copies are not possible: use 1 to {COPIES_MAX}")]
    Count(usize),
    /// The record of the copies cannot be read, or its replacement was not confirmed: the old or
    /// the new record may be in effect.
    #[error("cannot read or replace the record of the copies: {0}")]
    Record(String),
}

impl CopyError {
    /// Makes [`CopyError::Node`] of a store's error.
    pub(crate) fn of<E: std::error::Error>(node: u16) -> impl FnOnce(E) -> Self {
        move |error| Self::Node { node, why: error.to_string() }
    }
}

/// Access to the nodes, the record of the copies, and the clock.
pub trait Environment {
    /// The type of a user's heap on a node.
    type Store: Store;

    /// Opens the user's heap on a node.
    ///
    /// # Errors
    /// The reason why the heap cannot be used.
    fn connect(&mut self, node: u16) -> Result<Self::Store, String>;

    /// Reads the record of the copies, and the nodes that could store copies.
    ///
    /// # Errors
    /// The reason why they cannot be read.
    fn load(&mut self) -> Result<(Option<CopyRecord>, CopyNodes), String>;

    /// Replaces the record if its revision is `revision`, or 0 if there is none. The new record has
    /// the next revision.
    ///
    /// # Errors
    /// The reason why the replacement is not confirmed. It may have taken effect.
    fn replace(&mut self, revision: u64, record: Option<&CopyRecord>) -> Result<(), String>;

    /// The time, in seconds since 1970.
    fn now_s(&self) -> u64;
}

/// The nodes that could store copies, the best ones first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CopyNodes {
    /// Nodes of other machines.
    pub elsewhere: Vec<u16>,
    /// Nodes of this machine.
    pub here: Vec<u16>,
}

impl CopyNodes {
    /// All nodes: first those of other machines, in each group first those that have a copy.
    fn in_order(&self, record: &CopyRecord) -> Vec<u16> {
        let has_copy = |node: &u16| record.trees.iter().any(|tree| tree.node == *node);
        let sorted = |nodes: &[u16]| {
            let (with, without): (Vec<u16>, Vec<u16>) = nodes.iter().partition(|node| has_copy(node));
            [with, without].concat()
        };
        [sorted(&self.elsewhere), sorted(&self.here)].concat()
    }
}

/// The result of a successful sync.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Synced {
    /// The number of the sync.
    pub version: u64,
    /// The nodes that have copies.
    pub nodes: Vec<u16>,
    /// The number of copies on other machines: only these survive the loss of this machine.
    pub elsewhere: usize,
    /// Most bytes of the segment that were written to one node.
    pub written_bytes: u64,
}

/// The chunks of a segment that may have changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Any chunk may have changed.
    All,
    /// Only these chunks may have changed.
    Chunks(BTreeSet<usize>),
}

/// Writes the copies of a segment for the process that owns it.
#[derive(Debug)]
pub struct Copies<S> {
    bytes: u64,
    /// The record in the directory; `None` if it must be read.
    record: Option<CopyRecord>,
    writers: Vec<Writer<S>>,
    /// Nodes of this machine.
    here: Vec<u16>,
    /// The chunks that may have changed since the last successful sync.
    changed: Change,
    /// Roots that are freed, and that the record still names.
    freed: Vec<FormerRoot>,
}

impl<S: Store> Copies<S> {
    /// Creates the state before the first sync, which reads the record of existing copies. `bytes`
    /// is the length of the segment.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let (writers, here, freed) = (Vec::new(), Vec::new(), Vec::new());
        Self { bytes, record: None, writers, here, changed: Change::All, freed }
    }

    /// Writes the chunks that have changed to `copies` nodes. `change` has the chunks that may have
    /// changed since the last call; `read` reads a chunk, and returns false if it is zeros.
    ///
    /// # Errors
    /// If there are too few nodes, a node fails and no other can replace it, or the record cannot
    /// be replaced. Then the copies of the last sync remain in effect.
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
                // Another node may replace the failed one.
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

    /// Opens or closes writers so that there is one for each of `copies` copies.
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
            // The record may not name the roots of the writers any more.
            self.writers.clear();
        }
        // The obsolete roots in it may belong to an earlier segment with this number.
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
        self.record_new_roots(environment)?;
        // Objects of earlier processes may take the memory that this sync needs.
        self.free_former(environment);
        Ok(())
    }

    /// Opens a writer on a node. It shares the chunks of the copy there, but has new roots: the
    /// process that wrote that copy may still write to its roots, although other hosts consider it
    /// dead.
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
            // A damaged copy is written again from the beginning.
            Some(Err(_)) | None => Tree::zeros(self.bytes),
        };
        if Mutation::ReuseRoots.is_active()
            && let Some(tree) = tree
        {
            let roots = tree.roots.map(|root| Pointer::from_words(root.0).expect("a valid pointer"));
            return Ok(Writer::reusing(store, self.bytes, loaded, roots, tree));
        }
        Writer::new(store, node, self.bytes, loaded).map_err(CopyError::of(node))
    }

    /// Records the roots of new writers, so that their objects can be found if the sync is
    /// interrupted.
    fn record_new_roots<E: Environment<Store = S>>(&mut self, environment: &mut E) -> Result<(), CopyError> {
        let record = self.record.clone().unwrap_or_default();
        // New roots come first, because the list is truncated.
        let new = self.writers.iter().filter(|writer| writer.is_new()).flat_map(Writer::roots);
        let former = new.chain(record.former.iter().copied()).collect();
        let next = CopyRecord { former, ..record };
        self.replace(environment, next)
    }

    /// Replaces the record by `next`, with the next revision.
    fn replace<E: Environment<Store = S>>(
        &mut self,
        environment: &mut E,
        mut next: CopyRecord,
    ) -> Result<(), CopyError> {
        let revision = self.record.as_ref().map_or(0, |record| record.revision);
        next.revision = revision + 1;
        let mut seen = BTreeSet::new();
        next.former.retain(|root| !self.freed.contains(root) && seen.insert(*root));
        // The oldest roots are dropped: they are probably on nodes that have left for good, whose
        // memory need not be freed.
        next.former.truncate(FORMER_MAX);
        if let Err(why) = environment.replace(revision, Some(&next)) {
            // The old or the new record is in effect: the next sync must read it.
            self.reset();
            return Err(CopyError::Record(why));
        }
        self.record = Some(next);
        self.freed.clear();
        Ok(())
    }

    /// Makes the next sync read the record, and allocate new roots.
    fn reset(&mut self) {
        self.record = None;
        self.writers.clear();
        self.freed.clear();
    }

    /// Writes the changed chunks to all nodes. Returns the new copies, and the number of bytes that
    /// were written to one node at most.
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

    /// Runs `work` for all writers concurrently, each on a thread of its own.
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

    /// Records the new copies, and frees the objects that they have replaced.
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

    /// Frees the obsolete roots with the objects that only they name. The next sync retries roots
    /// that cannot be freed now.
    fn free_former<E: Environment<Store = S>>(&mut self, environment: &mut E) {
        let Some(record) = self.record.clone() else { return };
        if Mutation::SkipCleaning.is_active() {
            return;
        }
        let own: Vec<FormerRoot> = self.writers.iter().flat_map(Writer::roots).collect();
        let is_written = |node: u16| self.writers.iter().any(|writer| writer.node() == node);
        // The copy on a node without a writer may need the objects that such a root names.
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

/// Frees all copies of a segment, and removes their record. If a node fails, the record keeps the
/// roots on it.
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

/// Frees a root with the objects that it names, except those of `kept`.
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
