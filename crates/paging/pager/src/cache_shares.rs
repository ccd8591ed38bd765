//! How the users of a host share its page cache.

use std::collections::HashMap;

use crate::mempool::BLOCK_BYTES;

/// The weights and the limit of users. By default all have the same weight, and there is no limit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheShares {
    /// Most bytes of the cache that one user may have.
    pub bytes_per_user: Option<u64>,
    /// Weights of users that have another one than 1: when the cache is full, a user with weight 2
    /// keeps twice as much as one with weight 1.
    pub weights: HashMap<u32, u32>,
}

impl CacheShares {
    /// The most blocks of a user.
    pub(crate) fn blocks_max(&self) -> Option<usize> {
        let blocks = |bytes: u64| usize::try_from(bytes / BLOCK_BYTES as u64).unwrap_or(usize::MAX);
        self.bytes_per_user.map(blocks)
    }

    /// A measure of how much of the cache a user has for its weight.
    pub(crate) fn weighed(&self, uid: u32, blocks: usize) -> u64 {
        // Blocks are less than 2^20.
        ((blocks as u64) << 32) / u64::from(self.weights.get(&uid).copied().unwrap_or(1).max(1))
    }
}
