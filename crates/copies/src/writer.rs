//! Writes the copy on one node.
//!
//! It has two roots. One has the copy that the record names. The other one is written while a sync
//! is under way, before each of the objects that it names is needed: so an object that a sync has
//! allocated is found again if it does not end, but for the last few.

use std::sync::Arc;

use aquifer_arena::copies::{CopyTree, FormerRoot, WordPair};
use aquifer_objects::pointer::Pointer;

use crate::cleaning::clean;
use crate::mutation::Mutation;
use crate::store::Store;
use crate::tree::{ENTRY_BYTES, Entry, LEAF_CHUNKS, ROOT_HEAD_BYTES, Root, Tree, encode, sum_of};

/// Chunks that are allocated before the leaf names them.
const BATCH: usize = 16;
/// Bytes of an object that are written at once.
const PART_BYTES: usize = 32 << 10;

/// A chunk of the segment to be written.
#[derive(Debug)]
pub struct Chunk {
    /// Its number.
    pub chunk: usize,
    /// Its bytes, and their checksum; `None` if it is zeros.
    pub content: Option<(Vec<u8>, WordPair)>,
}

/// The copy on one node.
#[derive(Debug)]
pub struct Writer<S> {
    store: S,
    node: u16,
    bytes: u64,
    roots: [Pointer; 2],
    /// Which root has the copy, if one has.
    current: Option<usize>,
    /// The copy.
    tree: Tree,
    /// The tree that is being written, its version, and what it replaces.
    pending: Option<Pending>,
    /// Whether the other root names nothing that must be freed.
    is_clean: bool,
}

#[derive(Debug)]
struct Pending {
    version: u64,
    tree: Tree,
    replaced: Vec<Pointer>,
    /// The leaf that is being written: its number, and the entries that it does not name yet.
    open: Option<(usize, Vec<usize>)>,
}

impl<S: Store> Writer<S> {
    /// A writer with roots of its own, on the node of the store. `tree` is the copy of an earlier
    /// process, or zeros.
    ///
    /// # Errors
    /// Those of the store.
    pub fn new(mut store: S, node: u16, bytes: u64, tree: Tree) -> Result<Self, S::Error> {
        let empty = vec![0; Root::len_of(bytes)];
        let first = store.create(&empty)?;
        let second = store.create(&empty)?;
        let roots = [first, second];
        Ok(Self { store, node, bytes, roots, current: None, tree, pending: None, is_clean: true })
    }

    /// A writer that goes on with the roots of another process.
    #[must_use]
    pub fn reusing(store: S, bytes: u64, tree: Tree, roots: [Pointer; 2], record: &CopyTree) -> Self {
        let current = Some(usize::from(record.current));
        Self { store, node: record.node, bytes, roots, current, tree, pending: None, is_clean: false }
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> u16 {
        self.node
    }

    /// The objects on the node.
    pub fn store(&mut self) -> &mut S {
        &mut self.store
    }

    /// The copy.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Its roots, as those that are to be freed.
    #[must_use]
    pub fn roots(&self) -> [FormerRoot; 2] {
        let former =
            |root: Pointer| FormerRoot { node: self.node, root: WordPair(root.words()), bytes: self.bytes };
        self.roots.map(former)
    }

    /// Whether no record has named its copy yet: then all chunks must be compared with it.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.current.is_none()
    }

    /// Frees the roots, which are in no record.
    pub fn abandon(mut self) {
        for root in self.roots {
            // The user's heap keeps a small object otherwise.
            let _is_freed = self.store.free(root);
        }
    }

    /// Begins a sync.
    ///
    /// # Errors
    /// Those of the store.
    pub fn begin(&mut self, version: u64) -> Result<(), S::Error> {
        if !self.is_clean && !Mutation::SkipCleaning.is_active() {
            let root = self.spare();
            clean(&mut self.store, root, self.bytes, &self.tree)?;
        }
        self.is_clean = false;
        let (tree, replaced) = (self.tree.clone(), Vec::new());
        self.pending = Some(Pending { version, tree, replaced, open: None });
        self.write_root()
    }

    /// Writes a chunk, if it is another one than in the copy. Chunks come in order. Returns how
    /// many bytes were written.
    ///
    /// # Errors
    /// Those of the store.
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
        let (_, unnamed) = pending.open.as_mut().expect("it was opened");
        unnamed.push(at);
        if unnamed.len() >= BATCH {
            self.name_chunks()?;
        }
        Ok(chunk.content.as_ref().map_or(0, |(bytes, _)| bytes.len()))
    }

    /// Ends the writing: the other root has the new copy.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Panics
    /// If no sync has begun.
    pub fn finish(&mut self) -> Result<CopyTree, S::Error> {
        self.close_leaf()?;
        self.write_root()?;
        let at = self.spare_index();
        let pending = self.pending.as_mut().expect("a sync has begun");
        let Pending { version, ref tree, .. } = *pending;
        let root = Root { bytes: self.bytes, version, leaves: tree.leaves.clone() };
        let sum = sum_of(&root.encode());
        if Mutation::FreeEarly.is_active() {
            let replaced = std::mem::take(&mut pending.replaced);
            replaced.into_iter().try_for_each(|object| self.store.free(object))?;
        }
        let roots = self.roots.map(|root| WordPair(root.words()));
        Ok(CopyTree { node: self.node, roots, current: u8::from(at == 1), sum })
    }

    /// The record names the new copy: what it has replaced is freed.
    pub fn commit(&mut self) {
        let at = self.spare_index();
        let Some(pending) = self.pending.take() else { return };
        self.tree = pending.tree;
        self.current = Some(at);
        // What is not freed now is found through the root when the next sync begins.
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

    /// Begins to write a leaf: a copy of the one before, which the root names at once.
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

    /// Has the open leaf name its new chunks.
    fn name_chunks(&mut self) -> Result<(), S::Error> {
        let pending = self.pending.as_mut().expect("a sync has begun");
        let Some((leaf, unnamed)) = &mut pending.open else { return Ok(()) };
        let unnamed = std::mem::take(unnamed);
        let (Some(first), Some(last)) = (unnamed.first(), unnamed.last()) else { return Ok(()) };
        let object = pending.tree.leaves[*leaf].object().expect("it was allocated");
        let content = encode(&pending.tree.chunks[*leaf][*first..=*last]);
        self.store.write_at(object, first * ENTRY_BYTES, &content)
    }

    fn close_leaf(&mut self) -> Result<(), S::Error> {
        self.name_chunks()?;
        let pending = self.pending.as_mut().expect("a sync has begun");
        let Some((leaf, _)) = pending.open.take() else { return Ok(()) };
        // After its chunks: as long as it exists, they are found.
        pending.replaced.extend(self.tree.leaves[leaf].object());
        let object = pending.tree.leaves[leaf].object().expect("it was allocated");
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
        let Pending { version, tree, .. } = self.pending.as_ref().expect("a sync has begun");
        let root = Root { bytes: self.bytes, version: *version, leaves: tree.leaves.clone() }.encode();
        let at = self.spare();
        let mut parts = root.chunks(PART_BYTES).enumerate();
        parts.try_for_each(|(part, bytes)| self.store.write_at(at, part * PART_BYTES, bytes))
    }
}
