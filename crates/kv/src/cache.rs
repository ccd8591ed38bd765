//! Where a client has found items last. With it most gets are one read of the item alone.

use aquifer_objects::pointer::Pointer;

/// Remembers a pointer for each of many hashes; hashes that share a place replace each other.
#[derive(Debug)]
pub struct ItemCache {
    places: Vec<Option<(u64, Pointer)>>,
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
        self.places[self.place(hash)].filter(|(of, _)| *of == hash).map(|(_, pointer)| pointer)
    }

    /// Remembers where the item of a hash is.
    pub fn put(&mut self, hash: u64, pointer: Pointer) {
        let place = self.place(hash);
        self.places[place] = Some((hash, pointer));
    }

    /// Forgets the item of a hash.
    pub fn remove(&mut self, hash: u64) {
        let place = self.place(hash);
        self.places[place].take_if(|(of, _)| *of == hash);
    }
}
