//! The partition of a key, as the servers compute it.

use aquifer_cache::store::hash_of;

use super::super::items::key_text;

/// Partitions of a cache: the default of `aquifer cache`.
pub const PARTITIONS: usize = 128;

/// The number of a key's partition.
pub fn partition_of(key: u32) -> usize {
    let scaled = (hash_of(&key_text(key)) >> 32) * PARTITIONS as u64;
    usize::try_from(scaled >> 32).expect("below the number of partitions")
}

/// The first `count` keys of a partition with numbers from `first` on.
pub fn keys_of(partition: usize, first: u32, count: usize) -> Vec<u32> {
    (first..).filter(|key| partition_of(*key) == partition).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_partition_are_in_it() {
        let keys = keys_of(5, 1000, 20);
        assert!(keys.len() == 20 && keys[0] >= 1000 && keys.is_sorted());
        assert!(keys.iter().all(|key| partition_of(*key) == 5));
    }
}
