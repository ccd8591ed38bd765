//! Partitions that outlive their server: the machine's keeper holds their memory until the next
//! server of the cache starts there.
//!
//! The next server adopts a partition only if its record in the directory is still that of the
//! ended server: then no server has had the partition since, and no item in the memory is stale.

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
/// Partitions that one transaction claims. Small, because a conflict with another server over one
/// of them fails it.
const CLAIMS_MAX: usize = 8;
/// Interval between attempts to claim partitions whose last owner still has a lease.
const CLAIM_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time for which a server that stops waits for the end of incoming hand-overs.
const INCOMING_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the end of incoming hand-overs is polled.
const INCOMING_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The directory's records of partitions, by the partitions' numbers.
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

/// Returns the number of a partition's item in the keeper.
pub(crate) const fn item_number(cache: u64, partition: usize) -> u64 {
    cache & !PARTITION_MASK | partition as u64 & PARTITION_MASK
}

/// Partitions of a cache that the keeper holds when a server starts.
#[derive(Debug)]
pub(crate) struct Kept {
    client: KeeperClient,
    cache: u64,
    /// Records of the partitions, from the servers that have ended.
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
            tracing::warn!(
                %error,
                keeper = %keeper.display(),
                "cannot connect to the keeper: partitions do not outlive this server"
            );
        }
    });
    connected.ok()
}

impl Kept {
    /// Returns the partitions of a cache that the keeper holds, and their memory. The keeper still
    /// holds them until [`Self::release`].
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

    /// Releases all partitions of the cache from the keeper.
    pub fn release(self) {
        for partition in self.records.keys() {
            self.client.release(HeldKind::Partition, item_number(self.cache, *partition));
        }
    }
}

/// Stores the memory and records of partitions in the keeper, for the next server.
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
            Err(error) => tracing::warn!(%error, partition, "cannot store a partition in the keeper"),
        }
    }
    tracing::info!(count, "the keeper holds partitions for the next server");
}

impl Member {
    /// Returns the records of the partitions that this server owns and does not hand over. Must be
    /// called when the server stops, so that no hand-over begins. Waits for the end of incoming
    /// hand-overs, and returns `None` if one does not end within 10 s.
    pub(crate) fn records_at_end(&self) -> Option<Records> {
        let deadline = Instant::now() + INCOMING_TIMEOUT;
        while self.slots.iter().any(|slot| slot.lock().incoming.is_some()) {
            if Instant::now() >= deadline {
                tracing::warn!("an incoming hand-over has not ended within 10 s: no partition is kept");
                return None;
            }
            std::thread::sleep(INCOMING_POLL_INTERVAL);
        }
        Some(
            self.slots
                .iter()
                .enumerate()
                .filter_map(|(partition, slot)| Some((partition, slot.lock().owned_record()?)))
                .collect(),
        )
    }

    /// Serves the partitions whose memory the store has adopted, if no server has had them since.
    /// Forgets the others.
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
            std::thread::sleep(CLAIM_RETRY_INTERVAL);
        }
        pending.keys().for_each(|partition| self.forget(*partition, Presence::Unknown));
        self.server().wake();
        tracing::info!(resumed, of = count, "resumed partitions with the items of an earlier server");
    }

    /// Tries once to claim kept partitions. Serves those that were claimed, and forgets those that
    /// another server has had since. Returns how many are served.
    ///
    /// # Errors
    /// Errors of the directory. Then some partitions are still pending.
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
        let mut state = self.slots[partition].lock();
        state.holder = Holder::owner(self.life(), generation);
        state.record = Some(SegmentRecord::new(self.life(), generation));
        self.server().store().resume(partition, generation);
    }
}

/// Claims partitions whose items this server has from an earlier lease, its own or another
/// server's.
///
/// `pending` has their records under that lease. A partition is removed from it and passed to
/// `decided` once it was claimed, with its new generation, or once another server has had it since,
/// with `None`.
///
/// # Errors
/// Errors of the directory. A partition that is still pending may have been claimed: another call
/// finds that out.
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
    for claims in claims.chunks(CLAIMS_MAX) {
        for (partition, generation) in registry.claim(own, claims)? {
            pending.remove(&partition);
            decided(partition, Some(generation));
        }
    }
    for (partition, expected) in pending.clone() {
        let generation = match registry.observe(partition, None)? {
            Some((record, _)) if record == expected => continue,
            // The partition was claimed, and the answer was lost.
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
