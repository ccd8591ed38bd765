//! The partition of a key, as the servers compute it.

use aquifer_cache::store::hash::KeyHasher;

use super::super::items::key_text;

/// Partitions of a cache: the default of `aquifer cache`.
pub const PARTITIONS: usize = 128;

/// Computes the partitions of keys, with the hash of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Partitions(pub KeyHasher);

impl Partitions {
    /// The number of a key's partition.
    pub fn of(self, key: u32) -> usize {
        let scaled = (self.0.hash(&key_text(key)) >> 32) * PARTITIONS as u64;
        usize::try_from(scaled >> 32).expect("below the number of partitions")
    }

    /// The first `count` keys of a partition with numbers from `first` on.
    pub fn keys_of(self, partition: usize, first: u32, count: usize) -> Vec<u32> {
        (first..).filter(|key| self.of(*key) == partition).take(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_partition_are_in_it() {
        let partitions = Partitions(KeyHasher::random().unwrap());
        let keys = partitions.keys_of(5, 1000, 20);
        assert!(keys.len() == 20 && keys[0] >= 1000 && keys.is_sorted());
        assert!(keys.iter().all(|key| partitions.of(*key) == 5));
    }
}
