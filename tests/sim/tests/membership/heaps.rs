//! The rows of services of heaps in `docs/formats/directory.md`: a service, an agent whose host has
//! a ticket, and programs that find the service in the directory.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_directory::names::{self, AgentRecord, HeapsRecord};
use aquifer_directory::sim::{DirectoryWorld, SimDirectory};
use aquifer_directory::{Directory, DirectoryError, Lease};
use aquifer_fabric::sim::{SimFabric, SimOptions, SimTarget};
use aquifer_fabric::{Host, Identity, Target};
use aquifer_heaps::LEASE_TTL;
use aquifer_heaps::membership::Membership;
use aquifer_host::membership::{Renewal, renew};

use super::host;
use super::link::TENANT;

/// Interval between steps, in milliseconds.
const STEP_MS: u64 = 100;
/// Time before the event, in milliseconds: longer than the timeout of absent hosts.
const BEFORE_MS: u64 = 70_000;
/// Time after the event, in milliseconds.
const AFTER_MS: u64 = 70_000;
/// Interval between keep-alives of the agent, in milliseconds.
const AGENT_RENEWAL_MS: u64 = 3_000;
const GRACE_MS: u64 = 30_000;
const NODE: u16 = 1;

/// An event that lasts for some time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Stall,
    CutService,
    CutBoth,
    StopService,
    SuspendService,
    KillService,
    KillAgent,
}
use Event::*;

/// A row: its name, the event and its duration in seconds, the time from which programs do not find
/// the service, whether connected programs wait for it, whether the heaps are lost, and the time at
/// which the ticket of the agent's host ends. Times count from the begin of the event, in
/// milliseconds.
type Row = (&'static str, Event, u64, Option<RangeInclusive<u64>>, bool, bool, Option<RangeInclusive<u64>>);

const WAITS: bool = true;
const LOST: bool = true;
const AT_ONCE_MS: RangeInclusive<u64> = 0..=STEP_MS;
/// End of the service's lease: 5 s after the last keep-alive, which is at most 1.7 s old.
const LEASE_MS: RangeInclusive<u64> = 3_200..=5_000;
/// End of the ticket: the agent's lease ends 12 to 15 s after the begin, and the ticket 60 s after
/// a listing without the host.
const TICKET_MS: RangeInclusive<u64> = 72_000..=77_000;

const ROWS: &[Row] = &[
    ("heap-stall-1", Stall, 1, Some(AT_ONCE_MS), !WAITS, !LOST, None),
    ("heap-stall-5", Stall, 5, Some(AT_ONCE_MS), !WAITS, !LOST, None),
    ("heap-stall-20", Stall, 20, Some(AT_ONCE_MS), !WAITS, !LOST, None),
    ("heap-stall-60", Stall, 60, Some(AT_ONCE_MS), !WAITS, !LOST, None),
    ("heap-cut-service-60", CutService, 60, Some(LEASE_MS), !WAITS, !LOST, None),
    ("heap-cut-both-60", CutBoth, 60, Some(AT_ONCE_MS), !WAITS, !LOST, None),
    ("heap-stop-2", StopService, 2, Some(AT_ONCE_MS), WAITS, !LOST, None),
    ("heap-stop-20", StopService, 20, Some(AT_ONCE_MS), WAITS, !LOST, None),
    ("heap-suspend-60", SuspendService, 60, Some(AT_ONCE_MS), WAITS, !LOST, None),
    ("heap-kill-10", KillService, 10, Some(AT_ONCE_MS), WAITS, !LOST, None),
    ("heap-kill-60", KillService, 60, Some(AT_ONCE_MS), WAITS, LOST, None),
    ("heap-kill-agent-60", KillAgent, 60, Some(AT_ONCE_MS), !WAITS, !LOST, None),
    ("heap-kill-agent-90", KillAgent, 90, Some(AT_ONCE_MS), !WAITS, !LOST, Some(TICKET_MS)),
];

/// The names of all rows.
pub fn names() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.0)
}

/// Plays all rows. Returns the failed ones with their errors.
pub fn play_all() -> Vec<String> {
    ROWS.iter().filter_map(|row| Some(format!("{}: {}", row.0, play(row).err()?))).collect()
}

fn play((_, event, seconds, unfound, waits, is_lost, ticket_end): &Row) -> Result<(), String> {
    let mut world = HeapWorld::new().map_err(|error| error.to_string())?;
    world.pass(BEFORE_MS);
    if world.unfound_ms.is_some() || world.ticket_end_ms.is_some() {
        return Err("programs cannot use the service before the event".to_owned());
    }
    world.began_ms = world.now_ms;
    world.set_event(*event, true);
    world.pass(seconds * 1_000);
    world.set_event(*event, false);
    world.pass(AFTER_MS);
    let is_right = |found: Option<u64>, expected: &Option<RangeInclusive<u64>>| match (found, expected) {
        (Some(found), Some(expected)) => expected.contains(&found),
        (found, expected) => found.is_none() && expected.is_none(),
    };
    let found = (world.unfound_ms, world.has_waited, world.is_lost, world.ticket_end_ms);
    let matches = is_right(found.0, unfound) && is_right(found.3, ticket_end);
    if !matches || (found.1, found.2) != (*waits, *is_lost) {
        return Err(format!("not found, waits, lost, end of the ticket: {found:?}"));
    }
    if world.finds_service() { Ok(()) } else { Err("the service is not found at the end".to_owned()) }
}

/// The agent of a host.
struct Agent {
    directory: SimDirectory,
    lease: Lease,
    record: AgentRecord,
    is_running: bool,
}

struct HeapWorld {
    world: DirectoryWorld,
    fabric: SimFabric,
    target: SimTarget,
    /// The directory as the service reaches it.
    directory: SimDirectory,
    service: Option<Membership>,
    agent: Agent,
    /// The ticket of a connected program: the identity of its host when the ticket was issued.
    ticket: Identity,
    is_directory_stopped: bool,
    is_stopped: bool,
    is_suspended: bool,
    started: Instant,
    /// The monotonic clock of the service's machine, in milliseconds.
    monotonic_ms: u64,
    now_ms: u64,
    began_ms: u64,
    ended_ms: Option<u64>,
    is_lost: bool,
    has_waited: bool,
    unfound_ms: Option<u64>,
    ticket_end_ms: Option<u64>,
}

impl HeapWorld {
    fn new() -> Result<Self, DirectoryError> {
        let world = DirectoryWorld::new(1);
        let fabric = SimFabric::new(1, SimOptions::default());
        let (target, access) = (fabric.add_node(), world.host(1));
        let lease = access.lease_grant(host::LEASE_TTL)?;
        let record = names::claim_host(&access, lease, "a host", GRACE_MS)?;
        let ticket = Identity { host: Host(record.host), epoch: record.epoch, tenant: TENANT };
        let mut heaps = Self {
            directory: world.host(2),
            world,
            fabric,
            target,
            service: None,
            agent: Agent { directory: access, lease, record, is_running: true },
            ticket,
            is_directory_stopped: false,
            is_stopped: false,
            is_suspended: false,
            started: Instant::now(),
            monotonic_ms: 0,
            now_ms: 0,
            began_ms: 0,
            ended_ms: None,
            is_lost: false,
            has_waited: false,
            unfound_ms: None,
            ticket_end_ms: None,
        };
        heaps.start()?;
        Ok(heaps)
    }

    /// Starts a process of the service.
    fn start(&mut self) -> Result<(), DirectoryError> {
        let record = HeapsRecord {
            node: NODE,
            address: "127.0.0.1:1".to_owned(),
            device: None,
            memory_bytes: 0,
            kept_ms: GRACE_MS,
            epoch: 0,
        };
        let directory = self.directory.clone();
        let connect = Box::new(move || Ok(Arc::new(directory.clone()) as Arc<dyn Directory>));
        let targets = vec![Arc::new(self.target.clone()) as Arc<dyn Target>];
        self.service = Some(Membership::join(connect, record, LEASE_TTL, targets, self.monotonic())?);
        self.ended_ms = None;
        Ok(())
    }

    fn monotonic(&self) -> Instant {
        self.started + Duration::from_millis(self.monotonic_ms)
    }

    fn set_event(&mut self, event: Event, begins: bool) {
        match event {
            Stall => {
                self.is_directory_stopped = begins;
                self.directory.set_disconnected(begins);
                self.agent.directory.set_disconnected(begins);
            }
            CutService => self.directory.set_disconnected(begins),
            CutBoth => {
                self.directory.set_disconnected(begins);
                self.agent.directory.set_disconnected(begins);
            }
            StopService => self.is_stopped = begins,
            SuspendService => self.is_suspended = begins,
            KillService if begins => (self.service, self.ended_ms) = (None, Some(self.now_ms)),
            KillService => self.start().expect("the directory answers"),
            KillAgent => self.agent.is_running = !begins,
        }
    }

    fn pass(&mut self, ms: u64) {
        for _ in 0..ms / STEP_MS {
            self.now_ms += STEP_MS;
            if !self.is_directory_stopped {
                self.world.advance(Duration::from_millis(STEP_MS));
            }
            self.monotonic_ms += if self.is_suspended { 0 } else { STEP_MS };
            let now = self.monotonic();
            if let Some(service) = self.service.as_mut().filter(|_| !self.is_stopped && !self.is_suspended) {
                service.renew(now);
            }
            self.renew_agent();
            self.observe();
        }
    }

    /// Keeps the agent's lease alive. If the lease has ended, the agent resumes its host.
    fn renew_agent(&mut self) {
        let Agent { directory, lease, record, is_running } = &mut self.agent;
        if !*is_running || !self.now_ms.is_multiple_of(AGENT_RENEWAL_MS) {
            return;
        }
        if matches!(renew(directory, *lease), Renewal::Ended) {
            let granted = directory.lease_grant(host::LEASE_TTL).expect("the directory has just answered");
            let resumed = names::resume_host(directory, granted, record, GRACE_MS);
            (*lease, *record) = (granted, resumed.expect("no host recovers others"));
        }
    }

    /// Whether a running agent finds an answering service.
    fn finds_service(&self) -> bool {
        let records = names::heaps(&self.agent.directory).unwrap_or_default();
        self.agent.is_running && self.answers() && records.iter().any(|record| record.node == NODE)
    }

    fn answers(&self) -> bool {
        self.service.is_some() && !self.is_stopped && !self.is_suspended
    }

    fn observe(&mut self) {
        let after_ms = self.now_ms - self.began_ms;
        if !self.finds_service() {
            self.unfound_ms.get_or_insert(after_ms);
        }
        self.has_waited |= !self.answers();
        // After the grace time the keeper releases the heaps.
        self.is_lost |= self.ended_ms.is_some_and(|ended_ms| self.now_ms - ended_ms >= GRACE_MS);
        if self.fabric.connect(self.target.node(), self.ticket).is_err_and(|error| error.is_fence()) {
            self.ticket_end_ms.get_or_insert(after_ms);
        }
    }
}
