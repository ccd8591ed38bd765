//! Partitions that outlive their server: the machine's keeper holds their memory until the next
//! server starts.
//!
//! That server adopts a partition only if the directory still has the record of the one that ended:
//! then no server has had the partition since, and nothing in the memory is stale.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use aquifer_cache::store::presence::Presence;
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::KeeperClient;
use aquifer_segments::ownership::{Holder, Holding, SegmentRecord, Stage};
use serde::{Deserialize, Serialize};

use crate::member::{Member, warn_of_directory};
use crate::records::Claim;

/// Bits of an item's number that are the partition's.
const PARTITION_MASK: u64 = u16::MAX as u64;

/// The memory of partitions, by their numbers.
pub(crate) type KeptMemories = BTreeMap<usize, OwnedFd>;
/// The directory's records of kept partitions, by their numbers.
pub(crate) type KeptRecords = BTreeMap<usize, SegmentRecord>;

/// The keeper's record of a partition.
#[derive(PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct KeptRecord {
    /// The name of the cache.
    pub cache: String,
    /// The directory's record of the partition.
    #[serde(flatten)]
    pub partition: SegmentRecord,
}

/// The number of the item of a partition.
pub(crate) fn item_number(cache: &str, partition: usize) -> u64 {
    let name = xxhash_rust::xxh3::xxh3_64(cache.as_bytes());
    name & !PARTITION_MASK | partition as u64 & PARTITION_MASK
}

/// Connects to the keeper, if there is one.
fn connect(keeper: &Path) -> Option<(KeeperClient, Vec<aquifer_channel::RestoredItem>)> {
    let connected = KeeperClient::connect(keeper, KeeperShare::Caches);
    let connected = connected.inspect_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            tracing::debug!(keeper = %keeper.display(), "no keeper: partitions do not outlive this server");
        }
        _ => {
            tracing::warn!(%error, keeper = %keeper.display(), "partitions do not outlive this server");
        }
    });
    connected.ok()
}

/// What the last servers of a cache on this machine have kept. The keeper holds it no more.
pub(crate) fn restore(keeper: &Path, cache: &str) -> (KeptMemories, KeptRecords) {
    let (mut memories, mut records) = (KeptMemories::new(), KeptRecords::new());
    let Some((client, items)) = connect(keeper) else { return (memories, records) };
    for item in items {
        let Ok(record) = serde_json::from_str::<KeptRecord>(&item.item.record) else { continue };
        let partition = item.item.id & PARTITION_MASK;
        let partition = usize::try_from(partition).expect("16 bits");
        if record.cache != cache {
            continue;
        }
        client.release(item.item.kind, item.item.id);
        if let Some(memory) = item.fds.into_iter().next() {
            memories.insert(partition, memory);
            records.insert(partition, record.partition);
        }
    }
    (memories, records)
}

/// Has the keeper hold partitions for the next server.
pub(crate) fn keep(keeper: &Path, cache: &str, memories: KeptMemories, records: &KeptRecords) {
    if memories.is_empty() {
        return;
    }
    let Some((client, _)) = connect(keeper) else { return };
    let mut count = 0;
    for (partition, memory) in memories {
        let Some(record) = records.get(&partition) else { continue };
        let record = KeptRecord { cache: cache.to_owned(), partition: record.clone() };
        let record = serde_json::to_string(&record).expect("plain structs are JSON");
        let id = item_number(cache, partition);
        let item = HeldItem { kind: HeldKind::Partition, id, pid: 0, uid: 0, record };
        match client.hold(&item, &[memory.as_fd()]) {
            Ok(()) => count += 1,
            Err(error) => tracing::warn!(%error, partition, "a partition is not kept"),
        }
    }
    tracing::info!(count, "the keeper holds partitions for the next server");
}

impl Member {
    /// The records of the partitions that this server owns, and of which no hand-over has begun.
    pub(crate) fn settled(&self) -> KeptRecords {
        let settled = |(partition, seat): (usize, &crate::member::Seat)| {
            let state = seat.lock();
            match state.holder.holding() {
                Holding::Owned { generation, stage: Stage::Settled } => {
                    Some((partition, SegmentRecord::new(state.holder.own(), generation)))
                }
                _ => None,
            }
        };
        self.seats.iter().enumerate().filter_map(settled).collect()
    }

    /// Serves those of the kept partitions that no server has had since, and gives up the others.
    pub(crate) fn resume(&self, kept: &KeptRecords) {
        let own = self.life();
        let claim = |(partition, record): (&usize, &SegmentRecord)| Claim {
            partition: *partition,
            record: Some(record.clone()),
        };
        let claims: Vec<Claim> = kept.iter().map(claim).collect();
        let claimed = self.registry.claim(own, &claims).inspect_err(warn_of_directory).unwrap_or_default();
        let claimed: BTreeMap<usize, u64> = claimed.into_iter().collect();
        for partition in kept.keys().filter(|partition| **partition < self.seats.len()) {
            let mut state = self.seats[*partition].lock();
            let Some(generation) = claimed.get(partition) else {
                self.forget(*partition, Presence::Unknown);
                continue;
            };
            state.holder = Holder::owner(own, *generation);
            state.record = Some(SegmentRecord::new(own, *generation));
            self.server().store().resume(*partition, *generation);
        }
        if !kept.is_empty() {
            self.server().wake();
            tracing::info!(count = claimed.len(), "partitions go on with the items of an earlier server");
        }
    }
}
