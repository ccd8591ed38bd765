//! The writer of the copy on one node.
//!
//! A copy has two roots. One, the current root, is named by the record. A sync writes to the other
//! one: each new object is named there soon after it is allocated. So the next sync finds and frees
//! the objects of an interrupted one. At most the last [`BATCH`] chunks, a leaf and two new roots
//! leak.

use std::sync::Arc;

use aquifer_arena::copies::{CopyTree, FormerRoot, WordPair};
use aquifer_objects::pointer::Pointer;

use crate::cleaning::clean;
use crate::mutation::Mutation;
use crate::store::Store;
use crate::tree::{ENTRY_BYTES, Entry, LEAF_CHUNKS, ROOT_HEAD_BYTES, Root, Tree, encode, sum_of};

/// Maximum number of chunks that are allocated, but not named by their leaf yet.
const BATCH: usize = 16;
/// Maximum number of bytes in one write to an object.
const PART_BYTES: usize = 32 << 10;

/// A chunk of the segment that may have changed.
#[derive(Debug)]
pub struct Chunk {
    /// The number of the chunk in the segment.
    pub chunk: usize,
    /// The bytes of the chunk, and their checksum; `None` if all bytes are 0.
    pub content: Option<(Vec<u8>, WordPair)>,
}

/// Writes the copy on one node.
#[derive(Debug)]
pub struct Writer<S> {
    store: S,
    node: u16,
    bytes: u64,
    roots: [Pointer; 2],
    /// The index of the root that the record names; `None` before the first commit.
    current: Option<usize>,
    /// The entries of the committed copy.
    tree: Tree,
    /// The sync in progress.
    pending: Option<PendingSync>,
    /// Whether the other root names no object that must be freed.
    is_clean: bool,
}

/// The copy that a sync is writing.
#[derive(Debug)]
struct PendingSync {
    version: u64,
    tree: Tree,
    /// Objects of the committed copy that the new copy does not need.
    replaced: Vec<Pointer>,
    /// The leaf that is being written: its number, and the indexes of new chunks that the object
    /// does not name yet.
    open: Option<(usize, Vec<usize>)>,
}

impl<S: Store> Writer<S> {
    /// Creates a writer with new roots on the node of the store. `tree` is the copy of an earlier
    /// process, or zeros.
    ///
    /// # Errors
    /// The error of the store.
    pub fn new(mut store: S, node: u16, bytes: u64, tree: Tree) -> Result<Self, S::Error> {
        let empty = vec![0; Root::len_of(bytes)];
        let first = store.create(&empty)?;
        let second = store.create(&empty)?;
        let roots = [first, second];
        Ok(Self { store, node, bytes, roots, current: None, tree, pending: None, is_clean: true })
    }

    /// Creates a writer that reuses the roots of another process, for a mutation.
    #[must_use]
    pub fn reusing(store: S, bytes: u64, tree: Tree, roots: [Pointer; 2], record: &CopyTree) -> Self {
        let current = Some(usize::from(record.current));
        Self { store, node: record.node, bytes, roots, current, tree, pending: None, is_clean: false }
    }

    /// The node of the copy.
    #[must_use]
    pub fn node(&self) -> u16 {
        self.node
    }

    /// The heap on the node.
    pub fn store(&mut self) -> &mut S {
        &mut self.store
    }

    /// The entries of the committed copy.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Both roots of the copy, in the form of obsolete ones.
    #[must_use]
    pub fn roots(&self) -> [FormerRoot; 2] {
        let former =
            |root: Pointer| FormerRoot { node: self.node, root: WordPair(root.words()), bytes: self.bytes };
        self.roots.map(former)
    }

    /// Whether no sync of this writer was committed yet: then all chunks must be passed to
    /// [`Self::put`].
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.current.is_none()
    }

    /// Frees the roots, which no record names.
    pub fn abandon(mut self) {
        for root in self.roots {
            // If this fails, a small object leaks in the user's heap.
            let _is_freed = self.store.free(root);
        }
    }

    /// Begins a sync: frees the objects of an interrupted one, and writes the other root.
    ///
    /// # Errors
    /// The error of the store.
    pub fn begin(&mut self, version: u64) -> Result<(), S::Error> {
        if !self.is_clean && !Mutation::SkipCleaning.is_active() {
            let root = self.spare();
            clean(&mut self.store, root, self.bytes, &self.tree)?;
        }
        self.is_clean = false;
        let (tree, replaced) = (self.tree.clone(), Vec::new());
        self.pending = Some(PendingSync { version, tree, replaced, open: None });
        self.write_root()
    }

    /// Writes a chunk, if its checksum differs from that in the copy. Must be called in the order
    /// of chunks. Returns the number of bytes that were written.
    ///
    /// # Errors
    /// The error of the store.
    ///
    /// # Panics
    /// If no sync has begun.
    pub fn put(&mut self, chunk: &Chunk) -> Result<usize, S::Error> {
        let (leaf, at) = (chunk.chunk / LEAF_CHUNKS, chunk.chunk % LEAF_CHUNKS);
        let former = self.tree.chunks[leaf][at];
        if chunk.content.as_ref().map(|(_, sum)| *sum) == former.sum() {
            return Ok(0);
        }
        self.open_leaf(leaf)?;
        let entry = match &chunk.content {
            Some((bytes, sum)) => Entry::new(self.store.create(bytes)?, *sum),
            None => Entry::default(),
        };
        let pending = self.pending.as_mut().expect("a sync has begun");
        Arc::make_mut(&mut pending.tree.chunks[leaf])[at] = entry;
        pending.replaced.extend(former.object());
        let (_, unnamed) = pending.open.as_mut().expect("the leaf is open");
        unnamed.push(at);
        if unnamed.len() >= BATCH {
            self.name_chunks()?;
        }
        Ok(chunk.content.as_ref().map_or(0, |(bytes, _)| bytes.len()))
    }

    /// Completes the new copy, and returns the entry for the record. The copy takes effect when the
    /// record names it; then call [`Self::commit`].
    ///
    /// # Errors
    /// The error of the store.
    ///
    /// # Panics
    /// If no sync has begun.
    pub fn finish(&mut self) -> Result<CopyTree, S::Error> {
        self.close_leaf()?;
        self.write_root()?;
        let at = self.spare_index();
        let pending = self.pending.as_mut().expect("a sync has begun");
        let PendingSync { version, ref tree, .. } = *pending;
        let root = Root { bytes: self.bytes, version, leaves: tree.leaves.clone() };
        let sum = sum_of(&root.encode());
        if Mutation::FreeEarly.is_active() {
            let replaced = std::mem::take(&mut pending.replaced);
            replaced.into_iter().try_for_each(|object| self.store.free(object))?;
        }
        let roots = self.roots.map(|root| WordPair(root.words()));
        Ok(CopyTree { node: self.node, roots, current: u8::from(at == 1), sum })
    }

    /// Ends the sync, because the record names the new copy: frees the objects that were replaced.
    pub fn commit(&mut self) {
        let at = self.spare_index();
        let Some(pending) = self.pending.take() else { return };
        self.tree = pending.tree;
        self.current = Some(at);
        // The next sync finds objects that are not freed now through the root.
        self.is_clean = pending.replaced.into_iter().try_for_each(|object| self.store.free(object)).is_ok();
    }

    /// The root that the record does not name.
    fn spare(&self) -> Pointer {
        self.roots[self.spare_index()]
    }

    fn spare_index(&self) -> usize {
        match self.current {
            Some(current) if Mutation::WriteCurrentRoot.is_active() => current,
            Some(current) => 1 - current,
            None => 0,
        }
    }

    /// Begins to write a leaf: allocates a copy of the committed leaf, and names it in the root.
    fn open_leaf(&mut self, leaf: usize) -> Result<(), S::Error> {
        let pending = self.pending.as_mut().expect("a sync has begun");
        if pending.open.as_ref().is_some_and(|(open, _)| *open == leaf) {
            return Ok(());
        }
        self.close_leaf()?;
        let object = self.store.create(&encode(&self.tree.chunks[leaf]))?;
        let pending = self.pending.as_mut().expect("a sync has begun");
        pending.tree.leaves[leaf] = Entry::new(object, WordPair::default());
        pending.open = Some((leaf, Vec::new()));
        if Mutation::FreeLeafFirst.is_active() {
            pending.replaced.extend(self.tree.leaves[leaf].object());
        }
        self.write_root_entry(leaf)
    }

    /// Writes the entries of new chunks to the open leaf.
    fn name_chunks(&mut self) -> Result<(), S::Error> {
        let pending = self.pending.as_mut().expect("a sync has begun");
        let Some((leaf, unnamed)) = &mut pending.open else { return Ok(()) };
        let unnamed = std::mem::take(unnamed);
        let (Some(first), Some(last)) = (unnamed.first(), unnamed.last()) else { return Ok(()) };
        let object = pending.tree.leaves[*leaf].object().expect("an open leaf is allocated");
        let content = encode(&pending.tree.chunks[*leaf][*first..=*last]);
        self.store.write_at(object, first * ENTRY_BYTES, &content)
    }

    /// Completes the open leaf, if there is one.
    fn close_leaf(&mut self) -> Result<(), S::Error> {
        self.name_chunks()?;
        let pending = self.pending.as_mut().expect("a sync has begun");
        let Some((leaf, _)) = pending.open.take() else { return Ok(()) };
        // The old leaf follows its chunks in `replaced`: as long as it exists, they can be found.
        pending.replaced.extend(self.tree.leaves[leaf].object());
        let object = pending.tree.leaves[leaf].object().expect("an open leaf is allocated");
        let sum = sum_of(&encode(&pending.tree.chunks[leaf]));
        pending.tree.leaves[leaf] = Entry::new(object, sum);
        Ok(())
    }

    fn write_root_entry(&mut self, leaf: usize) -> Result<(), S::Error> {
        let entry = self.pending.as_ref().expect("a sync has begun").tree.leaves[leaf];
        let root = self.spare();
        self.store.write_at(root, ROOT_HEAD_BYTES + leaf * ENTRY_BYTES, &encode(&[entry]))
    }

    fn write_root(&mut self) -> Result<(), S::Error> {
        let PendingSync { version, tree, .. } = self.pending.as_ref().expect("a sync has begun");
        let root = Root { bytes: self.bytes, version: *version, leaves: tree.leaves.clone() }.encode();
        let at = self.spare();
        let mut parts = root.chunks(PART_BYTES).enumerate();
        parts.try_for_each(|(part, bytes)| self.store.write_at(at, part * PART_BYTES, bytes))
    }
}
