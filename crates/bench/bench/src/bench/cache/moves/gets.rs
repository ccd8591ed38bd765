//! Clients that get keys by Zipf's law, each connected to one of the servers.

use std::time::Instant;

use aquifer_bench::BenchError;

use super::super::connection::Operation;
use super::super::items::{Items, Lengths, Lifetime};
use super::super::load::Load;
use super::super::zipf::Zipf;
use super::VALUE_BYTES;
use super::cluster::{CacheCluster, failed};
use super::partitions::PARTITIONS;
use super::samples::{Sample, play_beside};

/// Closed-loop clients, each a connection with one request in flight.
pub const CLIENTS: u32 = 100;
const SKEW: f64 = 0.99;

/// Clients of all servers that get keys by Zipf's law.
pub struct Gets {
    load: Load,
    zipf: Zipf,
}

impl Gets {
    /// Connects clients, sets all keys, and checks that the servers have them in the partitions
    /// that the bench computes.
    ///
    /// # Errors
    /// If the servers cannot be used.
    pub fn connect(cluster: &CacheCluster, keys: u32) -> Result<Self, BenchError> {
        let items = Items::new(keys, Lengths::Fixed(VALUE_BYTES), Lifetime::Unlimited);
        let mut load = Load::connect_all(&cluster.servers, CLIENTS, items)?;
        load.set_all(0..keys)?;
        let mut expected = vec![0; PARTITIONS];
        (0..keys).for_each(|key| expected[cluster.partitions.of(key)] += 1);
        if cluster.status()?.items() != expected {
            return Err(failed(
                &"its partitions have other keys than the bench computes; correct partitions.rs",
            ));
        }
        Ok(Self { load, zipf: Zipf::new(keys, SKEW, 5) })
    }

    /// Gets keys while `work` runs.
    ///
    /// # Errors
    /// Those of [`play_beside`].
    pub fn beside<T>(
        &mut self,
        began: Instant,
        work: impl FnOnce() -> Result<T, BenchError>,
    ) -> Result<(Vec<Sample>, T), BenchError> {
        let Self { load, zipf } = self;
        play_beside(load, 1, began, &mut std::iter::repeat_with(|| Operation::Get(zipf.rank())), work)
    }
}
