//! Freeing of the objects that a root names and no copy needs: a sync has replaced them, or an
//! interrupted sync has left them.

use std::collections::HashSet;

use aquifer_objects::pointer::Pointer;

use crate::store::Store;
use crate::tree::{Entry, LEAF_BYTES, Root, Tree, decode};

/// Frees all objects that the root at `root` names, except those of `kept`. Keeps the root itself.
///
/// The call may be repeated after an error or a crash: the chunks of a leaf are freed before the
/// leaf, so they can still be found.
///
/// # Errors
/// The error of the store.
pub fn clean<S: Store>(store: &mut S, root: Pointer, bytes: u64, kept: &Tree) -> Result<(), S::Error> {
    let Some(root) = read_root(store, root, bytes)? else { return Ok(()) };
    let of = |entries: &[Entry]| -> HashSet<[u64; 2]> {
        entries.iter().filter_map(Entry::object).map(Pointer::words).collect()
    };
    let kept_leaves = of(&kept.leaves);
    let mut kept_chunks: Option<HashSet<[u64; 2]>> = None;
    for leaf in root.leaves.iter().filter_map(Entry::object) {
        if kept_leaves.contains(&leaf.words()) {
            continue;
        }
        let mut content = vec![0; LEAF_BYTES];
        if !store.read(&mut [(leaf, &mut content)])? {
            continue;
        }
        let kept_chunks =
            kept_chunks.get_or_insert_with(|| kept.chunks.iter().flat_map(|leaf| of(leaf)).collect());
        for chunk in decode(&content).iter().filter_map(Entry::object) {
            if !kept_chunks.contains(&chunk.words()) {
                store.free(chunk)?;
            }
        }
        store.free(leaf)?;
    }
    Ok(())
}

/// Reads a root; `None` if there is no object, or it was never written.
///
/// # Errors
/// The error of the store.
pub fn read_root<S: Store>(store: &mut S, root: Pointer, bytes: u64) -> Result<Option<Root>, S::Error> {
    let mut content = vec![0; Root::len_of(bytes)];
    let is_there = store.read(&mut [(root, &mut content)])?;
    Ok(is_there.then(|| Root::decode(&content, bytes)).flatten())
}
