//! Reading of a copy: the tree of its objects, or all bytes of the segment.

use std::sync::Arc;

use aquifer_arena::copies::{CopyRecord, CopyTree, WordPair};
use aquifer_objects::pointer::Pointer;

use crate::cleaning::read_root;
use crate::copies::CopyError;
use crate::mutation::Mutation;
use crate::store::Store;
use crate::tree::{CHUNK_BYTES, Entry, LEAF_BYTES, LEAF_CHUNKS, Tree, decode, sum_of};

/// Number of objects in one batch of concurrent reads.
const BATCH: usize = 8;

/// Restores the bytes of a segment from its copies: calls `put` with the number and the bytes of
/// each chunk that is not zeros. Tries one copy after the other.
///
/// # Errors
/// The error of the last copy, if no copy can be read completely. The chunks passed to `put` until
/// then are valid, but some are missing.
pub fn restore<S: Store, C: std::fmt::Display>(
    record: &CopyRecord,
    mut connect: impl FnMut(u16) -> Result<S, C>,
    mut put: impl FnMut(usize, &[u8]),
) -> Result<(), CopyError> {
    let mut failure = CopyError::None;
    for tree in &record.trees {
        let restored = connect(tree.node)
            .map_err(|error| CopyError::Node { node: tree.node, why: error.to_string() })
            .and_then(|mut store| restore_from(&mut store, tree, record.bytes, &mut put));
        match restored {
            Ok(()) => return Ok(()),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn restore_from<S: Store>(
    store: &mut S,
    tree: &CopyTree,
    bytes: u64,
    put: &mut impl FnMut(usize, &[u8]),
) -> Result<(), CopyError> {
    let loaded = load(store, tree, bytes)?;
    let chunks: Vec<(usize, Entry)> = loaded
        .chunks
        .iter()
        .flat_map(|leaf| leaf.iter().copied())
        .enumerate()
        .filter(|(_, entry)| entry.object().is_some())
        .collect();
    let mut buffers = vec![vec![0; CHUNK_BYTES]; BATCH];
    for batch in chunks.chunks(BATCH) {
        read_all(store, tree.node, batch.iter().map(|(_, entry)| *entry), &mut buffers, |at| {
            len_of(batch[at].0, bytes)
        })?;
        for ((chunk, _), content) in batch.iter().zip(&buffers) {
            put(*chunk, &content[..len_of(*chunk, bytes)]);
        }
    }
    Ok(())
}

/// Length of a chunk in bytes; the last chunk of a segment may be shorter.
#[must_use]
pub fn len_of(chunk: usize, segment_bytes: u64) -> usize {
    let left = segment_bytes - chunk as u64 * CHUNK_BYTES as u64;
    usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES)
}

/// Reads all entries of a copy: its root and its leaves.
///
/// # Errors
/// If the copy cannot be read, or is damaged.
pub fn load<S: Store>(store: &mut S, tree: &CopyTree, bytes: u64) -> Result<Tree, CopyError> {
    let node = tree.node;
    let damaged = || CopyError::Damaged { node };
    let current = Pointer::from_words(tree.roots[usize::from(tree.current)].0).ok_or_else(damaged)?;
    let root = read_root(store, current, bytes).map_err(CopyError::of(node))?.ok_or_else(damaged)?;
    if sum_of(&root.encode()) != tree.sum && !Mutation::TrustBytes.is_active() {
        return Err(damaged());
    }
    let mut loaded = Tree::zeros(bytes);
    let mut buffers = vec![vec![0; LEAF_BYTES]; BATCH];
    let leaves: Vec<(usize, Entry)> =
        root.leaves.iter().copied().enumerate().filter(|(_, entry)| entry.object().is_some()).collect();
    for batch in leaves.chunks(BATCH) {
        read_all(store, node, batch.iter().map(|(_, entry)| *entry), &mut buffers, |_| LEAF_BYTES)?;
        for ((leaf, _), content) in batch.iter().zip(&buffers) {
            loaded.chunks[*leaf] = Arc::new(decode(content));
            debug_assert_eq!(loaded.chunks[*leaf].len(), LEAF_CHUNKS);
        }
    }
    loaded.leaves = root.leaves;
    Ok(loaded)
}

/// Reads objects concurrently, and compares them with their checksums.
fn read_all<S: Store>(
    store: &mut S,
    node: u16,
    entries: impl Iterator<Item = Entry>,
    buffers: &mut [Vec<u8>],
    len: impl Fn(usize) -> usize,
) -> Result<(), CopyError> {
    let damaged = || CopyError::Damaged { node };
    let mut sums: Vec<WordPair> = Vec::new();
    let mut reads = Vec::new();
    for (at, (entry, buffer)) in entries.zip(buffers.iter_mut()).enumerate() {
        let (object, sum) = entry.object().zip(entry.sum()).ok_or_else(damaged)?;
        sums.push(sum);
        reads.push((object, &mut buffer[..len(at)]));
    }
    if !store.read(&mut reads).map_err(CopyError::of(node))? {
        return Err(damaged());
    }
    let is_right = reads.iter().zip(&sums).all(|((_, content), sum)| sum_of(content) == *sum);
    if is_right || Mutation::TrustBytes.is_active() { Ok(()) } else { Err(damaged()) }
}
