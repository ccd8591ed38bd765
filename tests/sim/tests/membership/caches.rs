//! The rows of caches in `docs/formats/directory.md`: two servers, of which the first one stops,
//! ends or is cut off, or a directory that stalls.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_cache_cluster::keeping::{Records, claim_again};
use aquifer_cache_cluster::lease::{
    KEEP_ALIVE_INTERVAL, LEASE_TTL, RETURN_TIME, ServingDeadline, keep_alive,
};
use aquifer_cache_cluster::lost::{LostPartitions, ServerView};
use aquifer_cache_cluster::records::{CacheKey, Claim, Registry, ServerRecord};
use aquifer_channel::boot_time::BootInstant;
use aquifer_directory::names::decode;
use aquifer_directory::sim::{DirectoryWorld, SimDirectory};
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_ownership::{Life, SegmentRecord};

const PARTITIONS: usize = 16;
/// Interval between steps, in milliseconds.
const STEP_MS: u64 = 100;
/// Time before the event, which begins 200 ms after a keep-alive, in milliseconds.
const BEFORE_MS: u64 = 10_200;
/// Time after the event, in milliseconds.
const AFTER_MS: u64 = 10_000;
/// The server with the event.
const FIRST: usize = 0;

/// An event that lasts for some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Stall,
    CutAll,
    Cut,
    Stop,
    Suspend,
    /// The process shuts down, and the next one starts: the keeper holds its items.
    End,
    /// The process is killed, and the next one starts.
    Kill,
}
use Event::*;

/// The server that has claimed a partition of the first server.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Claimed {
    NoServer,
    /// The first server or its next process, with the items.
    First,
    /// Any server, without items, within this time after the begin of the event, in milliseconds.
    Empty(RangeInclusive<u64>),
}
use Claimed::*;

/// The time at which a partition is first not served, in milliseconds after the begin of the event.
type Unserved = Option<RangeInclusive<u64>>;

/// A row: its name, the event, its duration in milliseconds, the time from which partitions are not
/// served, and the server that claims them.
type Row = (&'static str, Event, u64, Unserved, Claimed);

/// End of serving: 2.7 s after the last keep-alive, which is 0.2 s old when the event begins.
const DEADLINE_MS: RangeInclusive<u64> = 2_500..=2_600;
/// Claim by another server: the lease ends 3 s after the last keep-alive, and the return time is
/// 1.5 s.
const RETURN_MS: RangeInclusive<u64> = 4_300..=4_500;
/// Claim after a shutdown: the server revokes its lease at once, and the return time is 1.5 s.
const REVOKED_MS: RangeInclusive<u64> = 1_500..=1_700;
const AT_ONCE_MS: RangeInclusive<u64> = 0..=STEP_MS;

const ROWS: &[Row] = &[
    ("cache-stall-1", Stall, 1_000, None, NoServer),
    ("cache-stall-5", Stall, 5_000, Some(DEADLINE_MS), NoServer),
    ("cache-stall-20", Stall, 20_000, Some(DEADLINE_MS), NoServer),
    ("cache-stall-60", Stall, 60_000, Some(DEADLINE_MS), NoServer),
    ("cache-cut-1", Cut, 1_000, None, NoServer),
    ("cache-cut-3", Cut, 3_000, Some(DEADLINE_MS), First),
    ("cache-cut-60", Cut, 60_000, Some(DEADLINE_MS), Empty(RETURN_MS)),
    ("cache-cut-all-60", CutAll, 60_000, Some(DEADLINE_MS), First),
    ("cache-stop-2", Stop, 2_000, Some(AT_ONCE_MS), NoServer),
    ("cache-stop-60", Stop, 60_000, Some(AT_ONCE_MS), Empty(RETURN_MS)),
    ("cache-suspend-2", Suspend, 2_000, Some(AT_ONCE_MS), NoServer),
    ("cache-suspend-60", Suspend, 60_000, Some(AT_ONCE_MS), Empty(RETURN_MS)),
    ("cache-end-1", End, 1_000, Some(AT_ONCE_MS), First),
    ("cache-end-10", End, 10_000, Some(AT_ONCE_MS), Empty(REVOKED_MS)),
    ("cache-kill-1", Kill, 1_000, Some(AT_ONCE_MS), Empty(RETURN_MS)),
    ("cache-kill-10", Kill, 10_000, Some(AT_ONCE_MS), Empty(RETURN_MS)),
];

/// The names of all rows.
pub fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.0)
}

/// Plays all rows. Returns the failed ones with their errors.
pub fn play_all() -> Vec<String> {
    ROWS.iter().filter_map(|row| Some(format!("{}: {}", row.0, play(row).err()?))).collect()
}

fn play((_, event, lasts_ms, unserved, claimed): &Row) -> Result<(), String> {
    let mut world = CacheWorld::new();
    world.pass(BEFORE_MS)?;
    let first = world.servers[FIRST].owned();
    if first.is_empty() || world.unserved_ms.is_some() {
        return Err("the servers do not serve all partitions before the event".to_owned());
    }
    world.began_ms = world.now_ms;
    world.set_event(*event, true)?;
    world.pass(*lasts_ms)?;
    world.set_event(*event, false)?;
    world.pass(AFTER_MS)?;
    let of_first = |(partition, _): &(&usize, &Claimed)| first.contains_key(*partition);
    let found: Vec<&Claimed> = world.claimed.iter().filter(of_first).map(|(_, claimed)| claimed).collect();
    let is_expected = |found: &&Claimed| match (found, claimed) {
        (Empty(found), Empty(expected)) => expected.contains(found.start()),
        (found, expected) => *found == expected,
    };
    let count = if *claimed == NoServer { 0 } else { first.len() };
    if found.len() != count || !found.iter().all(is_expected) {
        return Err(format!("partitions were claimed by {found:?}"));
    }
    let is_unserved_right = match (world.unserved_ms, unserved) {
        (Some(found), Some(expected)) => expected.contains(&found),
        (found, expected) => found.is_none() && expected.is_none(),
    };
    if !is_unserved_right {
        return Err(format!("partitions are not served from {:?} ms on", world.unserved_ms));
    }
    match world.servers.iter().map(|server| server.owned().len()).sum::<usize>() {
        PARTITIONS => Ok(()),
        count => Err(format!("{count} partitions have a server at the end")),
    }
}

struct CacheWorld {
    directory: DirectoryWorld,
    servers: Vec<CacheServer>,
    is_directory_stopped: bool,
    now_ms: u64,
    began_ms: u64,
    unserved_ms: Option<u64>,
    claimed: BTreeMap<usize, Claimed>,
    /// The last number that was written to each partition since it began empty.
    written: [u64; PARTITIONS],
}

impl CacheWorld {
    fn new() -> Self {
        let directory = DirectoryWorld::new(1);
        let servers = [1, 2].map(|name| CacheServer::new(&directory, name));
        let mut world = Self {
            directory,
            servers: servers.into(),
            is_directory_stopped: false,
            now_ms: 0,
            began_ms: 0,
            unserved_ms: None,
            claimed: BTreeMap::new(),
            written: [0; PARTITIONS],
        };
        for server in &mut world.servers {
            server.join(0).expect("the directory answers");
        }
        world
    }

    fn set_event(&mut self, event: Event, begins: bool) -> Result<(), String> {
        let (now_ms, first) = (self.now_ms, &mut self.servers[FIRST]);
        match event {
            Stall => self.is_directory_stopped = begins,
            CutAll => self.servers.iter().for_each(|server| server.directory.set_disconnected(begins)),
            Cut => first.directory.set_disconnected(begins),
            Stop => first.is_stopped = begins,
            Suspend => first.is_suspended = begins,
            End if begins => first.end(),
            Kill if begins => first.kill(),
            End | Kill => first.join(now_ms).map_err(|error| error.to_string())?,
        }
        if event == Stall {
            self.servers.iter().for_each(|server| server.directory.set_disconnected(begins));
        }
        Ok(())
    }

    fn pass(&mut self, ms: u64) -> Result<(), String> {
        for _ in 0..ms / STEP_MS {
            self.now_ms += STEP_MS;
            if !self.is_directory_stopped {
                self.directory.advance(Duration::from_millis(STEP_MS));
            }
            for index in 0..self.servers.len() {
                let claims = self.servers[index].step(self.now_ms);
                claims.into_iter().for_each(|claim| self.note_claim(index, claim));
            }
            (0..PARTITIONS).try_for_each(|partition| self.write(partition))?;
        }
        Ok(())
    }

    fn note_claim(&mut self, index: usize, (partition, has_items): (usize, bool)) {
        let after_ms = self.now_ms - self.began_ms;
        if !has_items {
            self.written[partition] = 0;
        }
        let claimed = match has_items {
            true if index == FIRST => First,
            true => NoServer,
            false => Empty(after_ms..=after_ms),
        };
        if self.began_ms > 0 {
            self.claimed.entry(partition).or_insert(claimed);
        }
    }

    /// Writes the next number to a partition, at the server that serves it. The server must have
    /// the last number.
    fn write(&mut self, partition: usize) -> Result<(), String> {
        let now_ms = self.now_ms;
        let mut serving = self.servers.iter_mut().filter_map(|server| server.serve(partition, now_ms));
        let Some(item) = serving.next() else {
            // All partitions are claimed in the first seconds.
            if self.began_ms > 0 {
                self.unserved_ms.get_or_insert(now_ms - self.began_ms);
            }
            return Ok(());
        };
        let is_alone = serving.next().is_none();
        let written = &mut self.written[partition];
        if !is_alone || *item != *written {
            return Err(format!("partition {partition} has two owners or old items at {now_ms} ms"));
        }
        *written += 1;
        *item = *written;
        Ok(())
    }
}

/// A machine with a server of the cache, and its keeper.
struct CacheServer {
    directory: SimDirectory,
    registry: Registry,
    process: Option<Process>,
    /// Records and items of the partitions that the keeper holds.
    held: (Records, BTreeMap<usize, u64>),
    is_stopped: bool,
    is_suspended: bool,
    started: Instant,
    /// The machine's monotonic clock, in milliseconds.
    monotonic_ms: u64,
}

/// A process of a server.
struct Process {
    record: ServerRecord,
    lease: Lease,
    deadline: ServingDeadline,
    kept_alive_ms: u64,
    is_lease_lost: bool,
    servers: BTreeMap<u16, ServerRecord>,
    records: BTreeMap<usize, SegmentRecord>,
    lost: LostPartitions,
    /// The partitions that the process owns, with their generations.
    generations: BTreeMap<usize, u64>,
    /// Records of partitions that the process owned under an earlier lease.
    pending: Records,
    /// An item of each partition: the last number that was written.
    items: BTreeMap<usize, u64>,
}

fn at(now_ms: u64) -> BootInstant {
    BootInstant::START + Duration::from_millis(now_ms)
}

impl CacheServer {
    fn new(world: &DirectoryWorld, name: u64) -> Self {
        let directory = world.host(name);
        Self {
            registry: Registry::new(Arc::new(directory.clone()), "cache"),
            directory,
            process: None,
            held: (Records::new(), BTreeMap::new()),
            is_stopped: false,
            is_suspended: false,
            started: Instant::now(),
            monotonic_ms: 0,
        }
    }

    /// Starts a process.
    fn join(&mut self, now_ms: u64) -> Result<(), DirectoryError> {
        let address = "127.0.0.1:1".parse().expect("an address");
        let record = ServerRecord {
            server: 0,
            epoch: 0,
            address,
            memory_address: address,
            machine: String::new(),
            memory_socket: String::new(),
            clients: Vec::new(),
            memory_bytes: 1 << 20,
            drains: false,
        };
        let deadline = ServingDeadline::passed();
        let (lease, record) = self.grant(&record, &deadline, now_ms)?;
        let (pending, items) = std::mem::take(&mut self.held);
        self.process = Some(Process {
            record,
            lease,
            deadline,
            kept_alive_ms: now_ms,
            is_lease_lost: false,
            servers: BTreeMap::new(),
            records: BTreeMap::new(),
            lost: LostPartitions::new(RETURN_TIME),
            generations: BTreeMap::new(),
            pending,
            items,
        });
        Ok(())
    }

    fn grant(
        &self,
        record: &ServerRecord,
        deadline: &ServingDeadline,
        now_ms: u64,
    ) -> Result<(Lease, ServerRecord), DirectoryError> {
        let lease = self.directory.lease_grant(LEASE_TTL)?;
        deadline.renew(at(now_ms));
        let added = self.registry.add_server(record, lease);
        Ok((lease, added.expect("the directory has just answered")))
    }

    fn end(&mut self) {
        let process = self.process.take().expect("the process runs");
        self.held = (process.owned(), process.items);
        self.directory.lease_revoke(process.lease.id).expect("the directory answers");
    }

    fn kill(&mut self) {
        self.process = None;
    }

    /// The records of the partitions that the process owns.
    fn owned(&self) -> Records {
        self.process.as_ref().map(Process::owned).unwrap_or_default()
    }

    /// The item of a partition, if the server serves the partition.
    fn serve(&mut self, partition: usize, now_ms: u64) -> Option<&mut u64> {
        if self.is_stopped || self.is_suspended {
            return None;
        }
        let process = self.process.as_mut()?;
        let serves = process.deadline.is_ahead_at(at(now_ms)) && process.generations.contains_key(&partition);
        serves.then(|| process.items.get_mut(&partition).expect("a partition has an item"))
    }

    /// Advances the process by one step. Returns the partitions that it has claimed, and whether it
    /// has their items.
    fn step(&mut self, now_ms: u64) -> Vec<(usize, bool)> {
        if self.is_suspended {
            return Vec::new();
        }
        self.monotonic_ms += STEP_MS;
        if self.is_stopped || self.process.is_none() {
            return Vec::new();
        }
        self.keep_alive(now_ms);
        let mut claimed = Vec::new();
        // If the directory does not answer, the next step retries.
        let _ = self.follow(now_ms, &mut claimed);
        claimed
    }

    fn keep_alive(&mut self, now_ms: u64) {
        let process = self.process.as_mut().expect("the process runs");
        if process.is_lease_lost
            || Duration::from_millis(now_ms - process.kept_alive_ms) < KEEP_ALIVE_INTERVAL
        {
            return;
        }
        process.kept_alive_ms = now_ms;
        let kept_alive = keep_alive(&self.directory, process.lease, &process.deadline, at(now_ms));
        process.is_lease_lost = matches!(kept_alive, Err(DirectoryError::LeaseGone(_)));
    }

    /// Joins again if the lease has ended, reads the directory, and claims unowned partitions.
    fn follow(&mut self, now_ms: u64, claimed: &mut Vec<(usize, bool)>) -> Result<(), DirectoryError> {
        let now = self.started + Duration::from_millis(self.monotonic_ms);
        let mut process = self.process.take().expect("the process runs");
        let followed = self.try_follow(&mut process, now_ms, now, claimed);
        self.process = Some(process);
        followed
    }

    fn try_follow(
        &self,
        process: &mut Process,
        now_ms: u64,
        now: Instant,
        claimed: &mut Vec<(usize, bool)>,
    ) -> Result<(), DirectoryError> {
        if process.is_lease_lost {
            let owned = process.owned();
            process.pending.extend(owned);
            process.generations.clear();
            (process.lease, process.record) = self.grant(&process.record, &process.deadline, now_ms)?;
            (process.kept_alive_ms, process.is_lease_lost) = (now_ms, false);
            process.lost.clear();
        }
        let own = process.record.life();
        let Process { pending, generations, items, .. } = process;
        claim_again(&self.registry, own, pending, |partition, generation| match generation {
            Some(generation) => {
                generations.insert(partition, generation);
                claimed.push((partition, true));
            }
            None => drop(items.remove(&partition)),
        })?;
        process.read(&self.registry)?;
        let claims = process.next_claims(own, now);
        for (partition, generation) in self.registry.claim(own, &claims)? {
            process.generations.insert(partition, generation);
            process.items.insert(partition, 0);
            claimed.push((partition, false));
        }
        Ok(())
    }
}

impl Process {
    fn owned(&self) -> Records {
        let own: Life = self.record.life();
        let record =
            |(partition, generation): (&usize, &u64)| (*partition, SegmentRecord::new(own, *generation));
        self.generations.iter().map(record).collect()
    }

    fn read(&mut self, registry: &Registry) -> Result<(), DirectoryError> {
        let (entries, _) = registry.list()?;
        self.servers.clear();
        for entry in &entries {
            match registry.parse_key(&entry.key) {
                Some(CacheKey::Server(number)) => drop(self.servers.insert(number, decode(entry)?)),
                Some(CacheKey::Partition(partition)) => drop(self.records.insert(partition, decode(entry)?)),
                None => {}
            }
        }
        Ok(())
    }

    fn next_claims(&mut self, own: Life, now: Instant) -> Vec<Claim> {
        let view = ServerView::new(own, &self.servers);
        if !view.lives(own) {
            return Vec::new();
        }
        let absent = (0..PARTITIONS).filter(|partition| !self.generations.contains_key(partition));
        absent
            .filter_map(|partition| self.lost.next_claim(partition, self.records.get(&partition), &view, now))
            .collect()
    }
}
