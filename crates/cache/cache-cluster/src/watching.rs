//! The thread that follows a cache's servers and partitions in the directory, and claims partitions
//! that no server owns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_cache::store::presence::Presence;
use aquifer_directory::names::decode;
use aquifer_directory::{DirectoryEntry, DirectoryError, FailureLog, WatchEvent, WatchEventKind};
use aquifer_ownership::{Holder, Holding, Life};

use crate::keeping::Records;
use crate::lease::KeptLease;
use crate::lost::{LostPartitions, ServerView};
use crate::member::{Member, PartitionState};
use crate::placement;
use crate::records::{CacheKey, Claim, ServerRecord};

/// Longest wait for a change in the directory, between two checks for partitions to claim.
const TICK: Duration = Duration::from_millis(100);
/// Pause before partitions are claimed again after a conflict with another server.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);
/// Pause after a failed request to the directory, and interval at which the end of incoming
/// hand-overs is polled.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The thread that follows the directory.
#[derive(Debug)]
pub(crate) struct Watcher {
    pub member: Arc<Member>,
    pub lease: KeptLease,
    pub lost: LostPartitions,
    /// Numbers and epochs of the servers at the last change.
    pub lives: BTreeMap<u16, u64>,
    /// Records of partitions that this server owned when its lease ended, and whose items it still
    /// has.
    pub kept: Records,
}

impl Watcher {
    /// Follows the directory until the server stops. Then ends the lease.
    pub fn run(mut self) {
        let mut failures = FailureLog::default();
        while !self.member.stops.load(Ordering::Acquire) {
            if self.lease.is_lost() {
                self.join_again();
            }
            if let Err(error) = self.follow() {
                if let Some(failures) = failures.record(Instant::now()) {
                    tracing::warn!(%error, failures, "cannot follow the directory; retrying every 200 ms");
                }
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        self.lease.end();
    }

    /// Lists the entries of the cache, and follows their changes.
    fn follow(&mut self) -> Result<(), DirectoryError> {
        self.resume_kept()?;
        let (entries, revision) = self.member.registry.list()?;
        self.apply_listing(&entries)?;
        self.place_all();
        let mut watch = self.member.registry.watch(revision + 1)?;
        while !self.member.stops.load(Ordering::Acquire) && !self.lease.is_lost() {
            let mut has_changed = false;
            let mut event = watch.next(TICK)?;
            while let Some(next) = event {
                has_changed |= self.apply_event(&next)?;
                event = watch.next(Duration::ZERO)?;
            }
            if has_changed {
                self.place_all();
            }
            self.claim_lost()?;
        }
        Ok(())
    }

    /// Claims the kept partitions again, until each is claimed or another server has had it.
    fn resume_kept(&mut self) -> Result<(), DirectoryError> {
        let (count, mut resumed) = (self.kept.len(), 0);
        while !self.kept.is_empty() {
            if self.lease.is_lost() || self.member.stops.load(Ordering::Acquire) {
                return Ok(());
            }
            resumed += self.member.resume_kept(&mut self.kept)?;
            self.member.server().wake();
            if !self.kept.is_empty() {
                // Another server has changed some of the records at the same time.
                std::thread::sleep(CONFLICT_PAUSE);
            }
        }
        if count > 0 {
            tracing::info!(resumed, of = count, "resumed partitions after the lease had ended");
        }
        Ok(())
    }

    fn apply_listing(&self, entries: &[DirectoryEntry]) -> Result<(), DirectoryError> {
        let mut servers = BTreeMap::new();
        for entry in entries {
            match self.member.registry.parse_key(&entry.key) {
                Some(CacheKey::Server(number)) => {
                    servers.insert(number, decode::<ServerRecord>(entry)?);
                }
                Some(CacheKey::Partition(partition)) => {
                    if let Some(slot) = self.member.slots.get(partition) {
                        slot.lock().record = Some(decode(entry)?);
                    }
                }
                None => {}
            }
        }
        *self.member.servers.write() = servers;
        Ok(())
    }

    /// Applies a change; returns whether it concerns a partition or a server.
    fn apply_event(&self, event: &WatchEvent) -> Result<bool, DirectoryError> {
        let Some(key) = self.member.registry.parse_key(&event.key) else { return Ok(false) };
        let entry = match &event.kind {
            WatchEventKind::Put { value, lease } => Some(DirectoryEntry {
                key: event.key.clone(),
                value: value.clone(),
                version: event.revision,
                lease: *lease,
            }),
            WatchEventKind::Delete => None,
        };
        match key {
            CacheKey::Server(number) => {
                let record = entry.as_ref().map(decode::<ServerRecord>).transpose()?;
                let mut servers = self.member.servers.write();
                match record {
                    Some(record) => servers.insert(number, record),
                    None => servers.remove(&number),
                };
            }
            CacheKey::Partition(partition) => {
                if let Some(slot) = self.member.slots.get(partition) {
                    slot.lock().record = entry.as_ref().map(decode).transpose()?;
                }
            }
        }
        Ok(true)
    }

    /// Sets the presence of all partitions that are not here, and closes links and connections to
    /// ended servers.
    fn place_all(&mut self) {
        let member = Arc::clone(&self.member);
        let mut has_changed = false;
        for (partition, slot) in member.slots.iter().enumerate() {
            let state = slot.lock();
            let is_absent = matches!(state.holder.holding(), Holding::Absent | Holding::Prepared { .. });
            let items = &member.server().store().partitions()[partition];
            let known = items.presence();
            if !is_absent || matches!(known, Presence::Here | Presence::Leaving) {
                continue;
            }
            let lives = |life| life != state.holder.own() && member.server_of(life).is_some();
            let is_server = |server| member.server_record(server).is_some();
            let next = placement::elsewhere(state.record.as_ref(), known, lives, is_server);
            if next != known {
                items.set_absent(next);
                has_changed = true;
            }
        }
        member.channels.retain(|life| member.server_of(life).is_some());
        self.end_links();
        if has_changed {
            member.server().wake();
        }
    }

    /// Closes the workers' links to servers that have ended.
    fn end_links(&mut self) {
        let lives: BTreeMap<u16, u64> = {
            let servers = self.member.servers.read();
            servers.values().map(|server| (server.server, server.epoch)).collect()
        };
        for (server, epoch) in &self.lives {
            if lives.get(server) != Some(epoch) {
                self.member.server().workers().iter().for_each(|worker| worker.deal_link(*server, None));
            }
        }
        self.lives = lives;
    }

    /// Claims partitions that no server owns. They begin without items.
    fn claim_lost(&mut self) -> Result<(), DirectoryError> {
        let member = Arc::clone(&self.member);
        let own = member.life();
        // A copy: the slots must be locked before the servers.
        let servers = member.servers.read().clone();
        let view = ServerView::new(own, &servers);
        if !view.lives(own) {
            return Ok(());
        }
        let claims = self.next_claims(&view);
        if claims.is_empty() {
            return Ok(());
        }
        let claimed = member.registry.claim(own, &claims)?;
        let count = claimed.len();
        for (partition, generation) in claimed {
            self.begin_empty(partition, own, generation);
        }
        if count > 0 {
            tracing::info!(count, "claimed partitions, which begin without items");
            member.server().wake();
        }
        Ok(())
    }

    /// Returns the partitions that this server claims now.
    fn next_claims(&mut self, view: &ServerView<'_>) -> Vec<Claim> {
        let (member, now) = (Arc::clone(&self.member), Instant::now());
        let mut claims = Vec::new();
        for (partition, slot) in member.slots.iter().enumerate() {
            let state = slot.lock();
            let is_absent = matches!(state.holder.holding(), Holding::Absent | Holding::Prepared { .. });
            if is_absent && state.incoming.is_none() {
                claims.extend(self.lost.next_claim(partition, state.record.as_ref(), view, now));
            } else {
                self.lost.remove(partition);
            }
        }
        claims
    }

    fn begin_empty(&mut self, partition: usize, own: Life, generation: u64) {
        self.lost.remove(partition);
        let member = &self.member;
        let mut state = member.slots[partition].lock();
        // The new generation refuses a hand-over to this server that had begun.
        state.holder = Holder::owner(own, generation);
        state.record = Some(aquifer_ownership::SegmentRecord::new(own, generation));
        member.forget(partition, Presence::Unknown);
        member.server().store().begin_empty(partition, generation);
    }

    /// Joins again when the lease has ended: this server owns no partition any more. The items of
    /// its partitions stay until it is known whether another server has had the partitions since.
    fn join_again(&mut self) {
        let member = Arc::clone(&self.member);
        let (store, now_s) = (member.server().store(), member.server().now_s());
        let is_here = |partition: &usize| {
            matches!(store.partitions()[*partition].presence(), Presence::Here | Presence::Leaving)
        };
        let here: Vec<usize> = (0..member.slots.len()).filter(is_here).collect();
        store.suspend(&here);
        for (partition, slot) in member.slots.iter().enumerate() {
            let mut state = slot.lock();
            if store.partitions()[partition].presence() == Presence::Here {
                // The partition has arrived meanwhile.
                store.suspend(&[partition]);
            }
            let is_suspended = store.partitions()[partition].presence() == Presence::Leaving;
            match state.owned_record() {
                Some(record) if is_suspended => drop(self.kept.insert(partition, record)),
                // Kept since an earlier lease, and not claimed yet.
                _ if self.kept.contains_key(&partition) => {}
                _ if is_suspended => {
                    store.leave(partition, now_s);
                    member.forget(partition, Presence::Unknown);
                }
                _ => {}
            }
            if let Some(outgoing) = state.outgoing.take()
                && let Some(offered) = outgoing.offered
            {
                member.memories.withdraw(&offered);
            }
            state.outcome = Some(Err("the lease of this server has ended".to_owned()));
            state.holder = Holder::absent(state.holder.own());
            slot.changed.notify_all();
        }
        // A copy in progress must not arrive after the partition is claimed.
        while member.slots.iter().any(|slot| slot.lock().incoming.is_some()) {
            if member.stops.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(RETRY_PAUSE);
        }
        let granted = KeptLease::grant(member.registry.directory(), &member.serving_deadline);
        let joined = granted.map(|lease| {
            let added = member.registry.add_server(&member.own_record(), lease.lease());
            (lease, added)
        });
        match joined {
            Ok((lease, Ok(record))) => {
                let own = record.life();
                *member.own.write() = record;
                for slot in &member.slots {
                    // A hand-over that was accepted meanwhile under the ended lease fails.
                    loop {
                        let mut state = slot.lock();
                        if state.incoming.is_none() {
                            *state = PartitionState::new(own);
                            break;
                        }
                        drop(state);
                        std::thread::sleep(RETRY_PAUSE);
                    }
                }
                std::mem::replace(&mut self.lease, lease).end();
                self.lost.clear();
            }
            Ok((lease, Err(error))) => {
                tracing::warn!(%error, "cannot put the record of this server into the directory; retrying");
                lease.end();
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot get a new lease for this server; retrying");
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}
