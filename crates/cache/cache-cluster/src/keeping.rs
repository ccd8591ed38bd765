//! Partitions that outlive their server: the machine's keeper holds their memory until the next
//! server of the cache starts there.
//!
//! That server adopts a partition only if the directory still has the record of the server that has
//! ended: then no server has had the partition since, and nothing in the memory is stale.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use aquifer_cache::store::presence::Presence;
use aquifer_channel::RestoredItem;
use aquifer_directory::DirectoryError;
use aquifer_ipc::{HeldItem, HeldKind, KeeperShare};
use aquifer_keeper::{CLAIM_TIMEOUT, KeeperClient, KeeperStore};
use aquifer_ownership::{Holder, Life, SegmentRecord};
use serde::{Deserialize, Serialize};

use crate::lease::LEASE_TTL;
use crate::member::{Member, warn_of_directory};
use crate::records::{Claim, Registry};

/// Mask of the partition's number in the number of an item.
const PARTITION_MASK: u64 = u16::MAX as u64;
/// Partitions that are claimed at a time: another server may claim some of them, too.
const CLAIMS: usize = 8;
/// Pause before partitions are claimed again whose last owner still lives, as the directory says.
const CLAIM_PAUSE: Duration = Duration::from_millis(100);
/// Longest time for a partition that is still being received when the server ends.
const RECEIVE_MAX: Duration = Duration::from_secs(10);
/// Pause before that is looked at again.
const RECEIVE_PAUSE: Duration = Duration::from_millis(10);

/// The directory's records of partitions, by their numbers.
pub type Records = BTreeMap<usize, SegmentRecord>;

/// The keeper's record of a partition.
#[derive(PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct KeptRecord {
    /// The identity of the cache.
    pub id: u64,
    /// The directory's record of the partition.
    #[serde(flatten)]
    pub partition: SegmentRecord,
}

/// The number of the item of a partition.
pub(crate) const fn item_number(cache: u64, partition: usize) -> u64 {
    cache & !PARTITION_MASK | partition as u64 & PARTITION_MASK
}

/// The partitions of a cache that the keeper holds when a server starts.
#[derive(Debug)]
pub(crate) struct Kept {
    client: KeeperClient,
    cache: u64,
    /// The records of the servers that have ended.
    pub records: Records,
}

/// Connects to the keeper, if there is one and the cache has an identity.
fn connect(keeper: &Path, cache: u64) -> Option<(KeeperClient, Vec<RestoredItem>)> {
    if cache == 0 {
        return None;
    }
    let share = KeeperShare::of(HeldKind::Partition, item_number(cache, 0))?;
    let connected = KeeperClient::connect(keeper, share, CLAIM_TIMEOUT);
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

impl Kept {
    /// The partitions of a cache that the keeper holds, and their memory. It holds them until
    /// [`Self::release`].
    pub fn restore(keeper: &Path, cache: u64) -> Option<(Self, BTreeMap<usize, OwnedFd>)> {
        let (client, items) = connect(keeper, cache)?;
        let (mut memories, mut records) = (BTreeMap::new(), Records::new());
        for RestoredItem { item, fds } in items {
            let partition = usize::try_from(item.id & PARTITION_MASK).expect("16 bits");
            if let Ok(record) = serde_json::from_str::<KeptRecord>(&item.record)
                && record.id == cache
                && let Some(memory) = fds.into_iter().next()
            {
                memories.insert(partition, memory);
                records.insert(partition, record.partition);
            }
        }
        Some((Self { client, cache, records }, memories))
    }

    /// Has the keeper release all partitions of the cache.
    pub fn release(self) {
        for partition in self.records.keys() {
            self.client.release(HeldKind::Partition, item_number(self.cache, *partition));
        }
    }
}

/// Has the keeper hold partitions for the next server.
pub(crate) fn hold(keeper: &Path, cache: u64, memories: BTreeMap<usize, OwnedFd>, records: &Records) {
    if memories.is_empty() {
        return;
    }
    let Some((client, restored)) = connect(keeper, cache) else { return };
    drop(restored);
    let mut count = 0;
    for (partition, memory) in memories {
        let Some(record) = records.get(&partition) else { continue };
        let record = KeptRecord { id: cache, partition: record.clone() };
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
    /// The records of the partitions that this server owns and does not hand over. Hand-overs no
    /// longer begin when the server stops; this waits for those to this server to end. `None` if
    /// one does not.
    pub(crate) fn records_at_end(&self) -> Option<Records> {
        let deadline = Instant::now() + RECEIVE_MAX;
        while self.seats.iter().any(|seat| seat.lock().receiving.is_some()) {
            if Instant::now() >= deadline {
                tracing::warn!("a partition is still being received: the keeper holds none");
                return None;
            }
            std::thread::sleep(RECEIVE_PAUSE);
        }
        Some(
            self.seats
                .iter()
                .enumerate()
                .filter_map(|(partition, seat)| Some((partition, seat.lock().settled_record()?)))
                .collect(),
        )
    }

    /// Serves the partitions of which the store has adopted the memory, if no server has had them
    /// since. Forgets the others.
    pub(crate) fn resume(&self, kept: &Records) {
        let adopted = self.server().store().adopted();
        let mut pending: Records = kept
            .iter()
            .filter(|(partition, _)| adopted.contains(partition))
            .map(|(partition, record)| (*partition, record.clone()))
            .collect();
        if pending.is_empty() {
            return;
        }
        let count = pending.len();
        let mut resumed = 0;
        let deadline = Instant::now() + LEASE_TTL;
        loop {
            match self.resume_kept(&mut pending) {
                Ok(more) => resumed += more,
                Err(error) => warn_of_directory(&error),
            }
            if pending.is_empty() || Instant::now() >= deadline {
                break;
            }
            // The lease of the last owner has not ended yet, or the directory does not answer.
            std::thread::sleep(CLAIM_PAUSE);
        }
        pending.keys().for_each(|partition| self.forget(*partition, Presence::Unknown));
        self.server().wake();
        tracing::info!(resumed, of = count, "partitions continue with the items of an earlier server");
    }

    /// Tries once to claim kept partitions again. Serves those that were claimed, and forgets those
    /// that another server has had since. Returns how many are served.
    ///
    /// # Errors
    /// Those of the directory. Then some are still pending.
    pub(crate) fn resume_kept(&self, pending: &mut Records) -> Result<usize, DirectoryError> {
        let mut resumed = 0;
        claim_again(&self.registry, self.life(), pending, |partition, generation| match generation {
            Some(generation) => {
                resumed += 1;
                self.serve_kept(partition, generation);
            }
            None => self.forget(partition, Presence::Unknown),
        })?;
        Ok(resumed)
    }

    fn serve_kept(&self, partition: usize, generation: u64) {
        let mut state = self.seats[partition].lock();
        state.holder = Holder::owner(self.life(), generation);
        state.record = Some(SegmentRecord::new(self.life(), generation));
        self.server().store().resume(partition, generation);
    }
}

/// Claims partitions whose items this server has although an earlier lease of theirs has ended.
/// `pending` has their records at that time. Removes from it, and passes to `decided`, each
/// partition that was claimed, with its generation, and each that another server has had since,
/// with `None`.
///
/// # Errors
/// Those of the directory. What is still pending may have been claimed: another call finds out.
pub fn claim_again(
    registry: &Registry,
    own: Life,
    pending: &mut Records,
    mut decided: impl FnMut(usize, Option<u64>),
) -> Result<(), DirectoryError> {
    let claims: Vec<Claim> = pending
        .iter()
        .map(|(partition, record)| Claim { partition: *partition, record: Some(record.clone()) })
        .collect();
    for claims in claims.chunks(CLAIMS) {
        for (partition, generation) in registry.claim(own, claims)? {
            pending.remove(&partition);
            decided(partition, Some(generation));
        }
    }
    for (partition, expected) in pending.clone() {
        let generation = match registry.observe(partition, None)? {
            Some((record, _)) if record == expected => continue,
            // It was claimed although the answer was lost.
            Some((record, _)) if record == SegmentRecord::new(own, expected.generation + 2) => {
                Some(record.generation)
            }
            _ => None,
        };
        pending.remove(&partition);
        decided(partition, generation);
    }
    Ok(())
}
