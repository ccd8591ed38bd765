//! A client's cache of pointers to items, with which most gets read only the item.

use aquifer_objects::pointer::Pointer;

/// The cached pointer of an item.
#[derive(Clone, Copy, Debug)]
struct CachedItem {
    hash: u64,
    pointer: Pointer,
    /// Whether the pointer has the address of a merged block, which it keeps in use.
    is_old: bool,
}

/// A direct-mapped cache from the hash of a key to the pointer of its item.
#[derive(Debug)]
pub struct ItemCache {
    places: Vec<Option<CachedItem>>,
}

impl ItemCache {
    /// Creates a cache with 2^`bits` places.
    #[must_use]
    pub fn new(bits: u32) -> Self {
        Self { places: vec![None; 1 << bits] }
    }

    fn place(&self, hash: u64) -> usize {
        usize::try_from(hash & (self.places.len() as u64 - 1)).expect("less than the number of places")
    }

    /// Returns the cached pointer to the item of a hash.
    #[must_use]
    pub fn get(&self, hash: u64) -> Option<Pointer> {
        self.item(hash).map(|item| item.pointer)
    }

    /// Whether the item of a hash was found at the address of a merged block.
    #[must_use]
    pub fn is_old(&self, hash: u64) -> bool {
        self.item(hash).is_some_and(|item| item.is_old)
    }

    fn item(&self, hash: u64) -> Option<CachedItem> {
        self.places[self.place(hash)].filter(|item| item.hash == hash)
    }

    /// Caches the pointer to the item of a hash.
    pub fn put(&mut self, hash: u64, pointer: Pointer, is_old: bool) {
        let place = self.place(hash);
        self.places[place] = Some(CachedItem { hash, pointer, is_old });
    }

    /// Removes the item of a hash.
    pub fn remove(&mut self, hash: u64) {
        let place = self.place(hash);
        self.places[place].take_if(|item| item.hash == hash);
    }
}
