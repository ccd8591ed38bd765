//! An agent takes over from one that has died: everything it needs is in what the keeper holds.
//!
//! Programs went on all that time, as long as they needed no page; those that wait for one are woken in the end, and ask again. What
//! cannot be gone on with is ended, with a reason: no program ever reads a page that is not its own.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, PoisonError};

use aquifer_channel::{Kept, send_frame};
use aquifer_ipc::{Frame, KeptKind};
use aquifer_pager::{BlockId, Budget, Memory, REPLICAS_MAX, Recovered, SlabSet, Volume, finish_move};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::Service;
use super::edge::{Attachment, ProcessEdge};
use super::program::{Program, new_program, or_forget, spawn};
use super::records::{ProgramRecord, RunRecord, decode};
use super::run::Run;
use crate::areas::Area;
use crate::journal::{Journal, Left, Remembered};
use crate::kernel::Message;
use crate::monitor::{Before, Monitor};
use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// How long a killed program may take to be gone.
const DEATH_PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A run that goes on.
#[derive(Debug)]
pub struct Restored {
    /// The run.
    pub run: Arc<Run>,
    /// Whoever started it.
    pub owner: OwnedFd,
}

/// Userfaultfds of children that were forked and not yet served, by [`aquifer_ipc::Put::id`].
type Orphans = HashMap<u64, OwnedFd>;

impl Service {
    /// Go on with what an agent before this one left with the keeper. The mempool is the one that it had, and is recovered by this. After it all that runs have of
    /// the pool is known of.
    pub fn restore(self: &Arc<Self>, kept: Vec<Kept>) -> Vec<Restored> {
        let mut runs = BTreeMap::new();
        let mut programs = Vec::new();
        let mut orphans = Orphans::new();
        for kept in kept {
            match kept.put.kind {
                KeptKind::Run => match OpenRun::from_kept(kept) {
                    Ok(run) => drop(runs.insert(run.id, run)),
                    Err(error) => tracing::error!(%error, "a run cannot be gone on with"),
                },
                KeptKind::Program => programs.push(kept),
                KeptKind::Orphan => orphans.extend(kept.fds.into_iter().next().map(|fd| (kept.put.id, fd))),
                KeptKind::Host | KeptKind::Session | KeptKind::Node => {}
            }
        }
        // Now: an audit finds what nobody knows of, and a run is known of before it goes on.
        runs.values().for_each(|run| self.surroundings.custody().enter(&run.slabs));
        for kept in programs {
            self.sort_in(kept, &mut runs);
        }
        let mut used = HashSet::new();
        for run in runs.values_mut() {
            run.recover(self, &mut orphans, &mut used);
        }
        self.mempool.finish_recovery(&used);
        // Before anybody else can take them.
        runs.values_mut().flat_map(|run| &mut run.ready).for_each(Ready::reserve_blocks);
        for id in orphans.into_keys() {
            self.surroundings.unkeep(KeptKind::Orphan, id);
        }
        runs.into_values().filter_map(|run| self.go_on(run)).collect()
    }

    /// What an agent before this one left makes no sense without its mempool: end its programs.
    pub fn refuse(&self, kept: Vec<Kept>) -> Vec<Restored> {
        for kept in kept {
            match kept.put.kind {
                KeptKind::Program if kept.put.pid != 0 => {
                    self.put_to_death(vec![(kept.put.id, kept.fds.into_iter().next_back())]);
                }
                // Its process is unknown: it waits, for ever if need be.
                KeptKind::Program => {}
                // By now that is this agent itself.
                KeptKind::Host => {}
                kind => self.surroundings.unkeep(kind, kept.put.id),
            }
        }
        Vec::new()
    }

    fn sort_in(&self, kept: Kept, runs: &mut BTreeMap<u64, OpenRun>) {
        let id = kept.put.id;
        let pidfd = if kept.put.pid == 0 { None } else { kept.fds.last().and_then(|fd| fd.try_clone().ok()) };
        let record = decode::<ProgramRecord>(&kept.put).ok();
        let Some((run, record)) = record.and_then(|record| Some((runs.get_mut(&record.run)?, record))) else {
            tracing::error!(program = id, "a program of no known run is ended");
            return self.put_to_death(vec![(id, pidfd)]);
        };
        match Found::open(kept, record) {
            Ok(found) => run.found.push(found),
            Err(error) => {
                run.doom(format!("a program of it cannot be gone on with: {error}"));
                run.victims.push((id, pidfd));
            }
        }
    }

    /// Start a run's threads.
    fn go_on(self: &Arc<Self>, open: OpenRun) -> Option<Restored> {
        let OpenRun { id, record, owner, slabs, budget, ready, doom, mut victims, .. } = open;
        slabs.finish_recovery();
        let again = owner.try_clone();
        let kept = Arc::clone(&slabs);
        let run = match again.and_then(|owner| Run::with(self, id, &record, slabs, budget, owner)) {
            Ok(run) => run,
            Err(error) => {
                // It is left to another agent, with all that it has.
                self.unserved.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
                tracing::error!(%error, run = record.name, "a run cannot be gone on with");
                return None;
            }
        };
        self.lock().insert(run.token(), Arc::clone(&run));
        let mut doom = doom;
        if doom.is_none() && ready.is_empty() {
            // Whoever started it may not have been told that it did.
            let _gone = send_frame(&owner, &Frame::RunOpened(run.token()), &[]);
        }
        for ready in ready {
            if doom.is_some() {
                victims.push((ready.found.id, ready.found.pidfd));
            } else if let Err(error) = ready.start(self, &run) {
                doom = Some(format!("a program of it cannot be gone on with: {error}"));
            }
        }
        if let Some(reason) = doom {
            run.end(&reason);
            self.put_to_death(victims);
        }
        tracing::info!(run = record.name, programs = run.programs().len(), "a run goes on");
        Some(Restored { run, owner })
    }

    /// Kill programs that nobody can serve; only then may their descriptors close.
    fn put_to_death(&self, victims: Vec<(u64, Option<OwnedFd>)>) {
        for (_, pidfd) in &victims {
            if let Some(Err(error)) = pidfd.as_ref().map(|pidfd| pidfd_send_signal(pidfd, Signal::KILL)) {
                tracing::debug!(%error, "it has ended already");
            }
        }
        for (id, pidfd) in victims {
            if pidfd.is_some_and(|pidfd| is_ready(&pidfd, DEATH_PATIENCE)) {
                self.surroundings.unkeep(KeptKind::Program, id);
            }
        }
    }
}

/// A run with what is known of it so far.
struct OpenRun {
    id: u64,
    record: RunRecord,
    owner: OwnedFd,
    slabs: Arc<SlabSet>,
    budget: Arc<Budget>,
    found: Vec<Found>,
    ready: Vec<Ready>,
    /// Programs that must be killed, for they cannot be served.
    victims: Vec<(u64, Option<OwnedFd>)>,
    doom: Option<String>,
}

impl OpenRun {
    fn from_kept(kept: Kept) -> io::Result<Self> {
        let record: RunRecord = decode(&kept.put)?;
        let mut fds = kept.fds.into_iter();
        let (Some(slabs), Some(owner)) = (fds.next(), fds.next()) else {
            return Err(io::Error::other("the keeper lacks descriptors of it"));
        };
        if !(1..=REPLICAS_MAX).contains(&record.replicas) {
            return Err(io::Error::other(format!("its record names {} replicas", record.replicas)));
        }
        Ok(Self {
            id: kept.put.id,
            owner,
            slabs: Arc::new(SlabSet::recover(Memory::whole(slabs)?, record.replicas)),
            budget: Arc::new(Budget::new(record.limit_bytes)),
            record,
            found: Vec::new(),
            ready: Vec::new(),
            victims: Vec::new(),
            doom: None,
        })
    }

    fn doom(&mut self, reason: String) {
        self.doom.get_or_insert(reason);
    }

    /// Recover all volumes; which blocks of the mempool they have.
    fn recover(&mut self, service: &Service, orphans: &mut Orphans, used: &mut HashSet<BlockId>) {
        let served: HashSet<_> = self.found.iter().filter_map(|found| found.record.origin).collect();
        let mut blocks = Vec::new();
        for mut found in std::mem::take(&mut self.found) {
            let id = found.id;
            if found.has_ended() {
                if found.has_unserved_fork(&served) {
                    self.doom("a program of it was killed while it forked, and the agent, too".into());
                }
                service.surroundings.unkeep(KeptKind::Program, id);
                continue;
            }
            let pidfd = found.pidfd.as_ref().and_then(|fd| fd.try_clone().ok());
            let recovered = found.finish_first(&served).and_then(|()| {
                let mempool = Arc::clone(&service.mempool);
                let slabs = Arc::clone(&self.slabs);
                let again = found.take_unheeded(orphans)?;
                let recovered =
                    Volume::recover(reopen(&found.table)?, slabs, mempool, Arc::clone(&self.budget));
                Ok((again, recovered.map_err(io::Error::other)?))
            });
            match recovered {
                Ok((again, recovered)) => {
                    blocks.extend(recovered.volume.blocks_in_use());
                    self.ready.push(Ready { found, recovered, again });
                }
                Err(error) => {
                    self.doom(format!("a program of it cannot be gone on with: {error}"));
                    self.victims.push((id, pidfd));
                }
            }
        }
        if self.doom.is_none() {
            used.extend(blocks);
        }
    }
}

/// A program as the keeper gave it back.
struct Found {
    id: u64,
    pid: u32,
    record: ProgramRecord,
    uffd: Userfaultfd,
    table: Memory,
    journal: Journal,
    left: Left,
    worker: Option<(WorkerPort, OwnedFd)>,
    pidfd: Option<OwnedFd>,
}

impl Found {
    fn open(kept: Kept, record: ProgramRecord) -> io::Result<Self> {
        let mut fds = kept.fds.into_iter();
        let mut next = || fds.next().ok_or_else(|| io::Error::other("the keeper lacks descriptors of it"));
        let uffd = Userfaultfd::from(next()?);
        let table = Memory::whole(next()?)?;
        let (journal, left) = Journal::recover(Memory::whole(next()?)?)?;
        let worker = match record.hello {
            Some(_) => Some((WorkerPort::recover(next()?)?, next()?)),
            None => None,
        };
        let pidfd = if kept.put.pid == 0 { None } else { Some(next()?) };
        Ok(Self { id: kept.put.id, pid: kept.put.pid, record, uffd, table, journal, left, worker, pidfd })
    }

    /// Whether its process is gone, or has executed another program.
    fn has_ended(&self) -> bool {
        self.pidfd.as_ref().is_some_and(|pidfd| is_ready(pidfd, AT_ONCE))
            || self.worker.as_ref().is_some_and(|(_, socket)| is_ready(socket, AT_ONCE))
    }

    fn is_first_served(&self, served: &HashSet<(u64, u64)>) -> bool {
        matches!(self.left.unheeded.first(), Some((_, Message::Fork(_))))
            && served.contains(&(self.id, self.journal.sequence()))
    }

    fn has_unserved_fork(&self, served: &HashSet<(u64, u64)>) -> bool {
        let skipped = usize::from(self.is_first_served(served));
        self.left.unheeded.iter().skip(skipped).any(|(_, message)| matches!(message, Message::Fork(_)))
    }

    /// The first event may be all but heeded: a fork whose child is there, or a move of pages that was begun.
    fn finish_first(&mut self, served: &HashSet<(u64, u64)>) -> io::Result<()> {
        let too_many =
            || io::Error::other("it had more moves of memory under way than the agent can remember");
        let vacated = self.left.vacated.as_mut().ok_or_else(too_many)?;
        let mut given_up = self.left.given_up.clone().unwrap_or_default();
        if self.left.is_moving
            && let Some((_, Message::Remap { from, to, pages })) = self.left.unheeded.first()
        {
            finish_move(reopen(&self.table)?, *from, *to, *pages).map_err(io::Error::other)?;
            vacated.push(Area { start: *from, end: from + pages });
            given_up.remove(Area { start: *to, end: to + pages });
        } else if !self.is_first_served(served) {
            return Ok(());
        }
        let vacated = self.left.vacated.as_ref().ok_or_else(too_many)?;
        self.journal.skip_first(Remembered { vacated, given_up: &given_up });
        if let Some(left) = &mut self.left.given_up {
            *left = given_up;
        }
        self.left.unheeded.remove(0);
        Ok(())
    }

    /// The events that are still to be heeded, each fork with its child's descriptor.
    fn take_unheeded(&mut self, orphans: &mut Orphans) -> io::Result<Vec<Message<OwnedFd>>> {
        let reader = u64::from(self.left.reader) << 32;
        let with_child = |(_, message): (usize, Message<_>)| {
            if let Message::Fork(fd) = &message {
                let number = u32::try_from(*fd).map_err(io::Error::other)?;
                let child = orphans.remove(&(reader | u64::from(number)));
                let child =
                    child.ok_or_else(|| io::Error::other("a forked child of it was lost with the agent"))?;
                return Ok(message.map_child(|_| child));
            }
            Ok(message.map_child(|_| unreachable!("only forks have children")))
        };
        self.left.unheeded.drain(..).map(with_child).collect()
    }
}

/// A program that can go on.
struct Ready {
    found: Found,
    recovered: Recovered,
    again: Vec<Message<OwnedFd>>,
}

impl Ready {
    /// Each batch that had left the program has a block of the mempool from now on, as it had when it left.
    fn reserve_blocks(&mut self) {
        if let Some((worker, _)) = &self.found.worker {
            let leaving: HashSet<_> = self.recovered.leaving.iter().copied().collect();
            let batches = worker.unemptied(|page| leaving.contains(&page));
            self.recovered.volume.reserve_blocks(batches);
        }
    }

    fn start(self, service: &Service, run: &Arc<Run>) -> io::Result<()> {
        let Self { found, recovered, again } = self;
        let Found { id, pid, record, uffd, journal, left, worker, .. } = found;
        let program = new_program(run, id)?;
        or_forget(run, &program, || {
            if pid != 0 {
                program.set_pid(pid, &service.obituary);
            }
            program.set_bounds(&record.bounds());
            program.is_attached.store(record.hello.is_some(), SeqCst);
            program.is_forked.store(record.origin.is_some(), Relaxed);
            program.lend(&uffd)?;
            let mut edge = ProcessEdge::new(run, &program, uffd, &recovered.volume, journal, record.origin)?;
            if let (Some((worker, socket)), Some(hello)) = (worker, record.hello(run.token())) {
                edge.attach_again(Attachment { hello, socket, worker })?;
            }
            edge.read_again(again);
            spawn(run, &program, edge, move |run, program, edge| resume(run, program, edge, recovered, left))
        })
    }
}

/// In the program's thread: its monitor, and its threads woken; `None` if it has ended.
fn resume(
    run: &Run,
    program: &Program,
    edge: ProcessEdge,
    recovered: Recovered,
    left: Left,
) -> Option<Monitor<ProcessEdge>> {
    let Some(batches) = edge.batches() else {
        let mut volume = recovered.volume;
        volume.end();
        return None;
    };
    let registered = edge.registered();
    let before = Before {
        recovered,
        vacated: left.vacated.unwrap_or_default(),
        given_up: left.given_up.unwrap_or_else(|| registered.clone()),
        registered,
        batches,
    };
    let mut monitor = Monitor::resume(edge, before, Arc::clone(&run.budget), Arc::clone(&program.stats));
    monitor.edge().uffd().wake_all();
    Some(monitor)
}

fn reopen(memory: &Memory) -> io::Result<Memory> {
    Memory::whole(memory.fd().try_clone_to_owned()?)
}

fn is_ready(fd: &impl AsFd, patience: Timespec) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&patience)).is_ok_and(|ready| ready > 0)
}
