//! Where a client has found items last. With it most gets are one read of the item alone.

use aquifer_objects::pointer::Pointer;

/// What a client remembers of an item.
#[derive(Clone, Copy, Debug)]
struct CachedItem {
    hash: u64,
    pointer: Pointer,
    /// The pointer names an old block, and so keeps an address in use.
    is_old: bool,
}

/// Remembers a pointer for each of many hashes; hashes that share a place replace each other.
#[derive(Debug)]
pub struct ItemCache {
    places: Vec<Option<CachedItem>>,
}

impl ItemCache {
    /// A cache of 2^`bits` places.
    #[must_use]
    pub fn new(bits: u32) -> Self {
        Self { places: vec![None; 1 << bits] }
    }

    fn place(&self, hash: u64) -> usize {
        usize::try_from(hash & (self.places.len() as u64 - 1)).expect("it is an index")
    }

    /// Where the item of a hash was.
    #[must_use]
    pub fn get(&self, hash: u64) -> Option<Pointer> {
        self.item(hash).map(|item| item.pointer)
    }

    /// Whether the item of a hash was found at an old address.
    #[must_use]
    pub fn is_old(&self, hash: u64) -> bool {
        self.item(hash).is_some_and(|item| item.is_old)
    }

    fn item(&self, hash: u64) -> Option<CachedItem> {
        self.places[self.place(hash)].filter(|item| item.hash == hash)
    }

    /// Remembers where the item of a hash is.
    pub fn put(&mut self, hash: u64, pointer: Pointer, is_old: bool) {
        let place = self.place(hash);
        self.places[place] = Some(CachedItem { hash, pointer, is_old });
    }

    /// Forgets the item of a hash.
    pub fn remove(&mut self, hash: u64) {
        let place = self.place(hash);
        self.places[place].take_if(|item| item.hash == hash);
    }
}
