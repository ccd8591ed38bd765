//! Resumption of the programs of an agent that has died, from the items of the keeper.
//!
//! Since then the programs have run as long as they needed no page. At the end, all threads that
//! wait for pages are woken and fault again. A run that cannot be resumed is ended with a reason,
//! because no program may read a page that is not its own.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use aquifer_channel::descriptor_shares::THREAD_DESCRIPTORS;
use aquifer_channel::kill::kill_as;
use aquifer_channel::owners;
use aquifer_channel::{RestoredItem, send_frame};
use aquifer_ipc::{Frame, HeldKind};
use aquifer_pager::{BlockId, Budget, CopyPolicy, Memory, Mempool, PAGE_BYTES, SlabSet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::attachment::{Attachment, shut_down};
use super::canary::Canary;
use super::edge::ProcessEdge;
use super::monitor_thread::spawn;
use super::process::{KeptProcess, ProgramProcess, has_ended};
use super::program::{PROGRAM_DESCRIPTORS, Program, new_program};
use super::records::{ProgramRecord, RunRecord, decode};
use super::run::{Run, RunOwner};
use super::unserved::{UNSERVED_DESCRIPTORS, UnservedMemory, close_in_thread};
use super::{PagingService, RUN_DESCRIPTORS};
use crate::kernel::FillStop;
use crate::monitor::{EvictionBatch, Monitor};
use crate::pagemap;
use crate::takeover::{self, Origin, TakenPages, TakenProgram};
use crate::uffd::Userfaultfd;
use crate::worker::WorkerPort;

/// Timeout of the wait for the end of a killed program.
const DEATH_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Timeout of the wait until the kernel has freed the memory of all processes that have ended.
const MEMORY_END_TIMEOUT: Duration = Duration::from_secs(5);
const MEMORY_END_INTERVAL: Duration = Duration::from_millis(1);
/// Index of the connection to the worker among the descriptors that the keeper holds of a program
/// that has sent its hello.
const SOCKET_INDEX: usize = 4;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A run that was resumed.
#[derive(Debug)]
pub struct RestoredRun {
    /// The run.
    pub run: Arc<Run>,
    /// The connection of the process that opened the run.
    pub owner: Arc<OwnedFd>,
}

/// Userfaultfds of forked children that were not yet served, by [`aquifer_ipc::HeldItem::id`].
type Orphans = HashMap<u64, OwnedFd>;

impl PagingService {
    /// Resumes the programs of another agent, with its mempool, which is recovered here.
    ///
    /// Afterwards, all slabs of runs are ledgers of the leak detection.
    pub fn restore(self: &Arc<Self>, kept: Vec<RestoredItem>) -> Vec<RestoredRun> {
        let mut runs = BTreeMap::new();
        let mut programs = Vec::new();
        let mut orphans = Orphans::new();
        for kept in kept {
            match kept.item.kind {
                HeldKind::Run => match RecoveringRun::from_kept(kept, &self.mempool) {
                    Ok(run) => drop(runs.insert(run.id, run)),
                    Err(error) => tracing::error!(%error, "cannot resume a run"),
                },
                HeldKind::Program => programs.push(kept),
                HeldKind::Orphan => orphans.extend(kept.fds.into_iter().next().map(|fd| (kept.item.id, fd))),
                HeldKind::Host
                | HeldKind::Session
                | HeldKind::Node
                | HeldKind::Heap
                | HeldKind::Segment
                | HeldKind::Partition => {}
            }
        }
        // Must come first, because the leak scan must know the slabs before it scans a node.
        runs.values().for_each(|run| self.agent.leak_detector().register_ledger(&run.slabs));
        for kept in programs {
            self.assign_program(kept, &mut runs);
        }
        let mut used = HashSet::new();
        let deadline = Instant::now() + MEMORY_END_TIMEOUT;
        for run in runs.values_mut() {
            run.recover(self, &mut orphans, &mut used, deadline);
        }
        let resumable = runs.values_mut().flat_map(|run| &mut run.resumable);
        takeover::finish(&self.mempool, &used, resumable.map(ResumableProgram::unfinished_batches));
        for id in orphans.into_keys() {
            self.agent.keeper().release(HeldKind::Orphan, id);
        }
        runs.into_values().filter_map(|run| self.resume_run(run)).collect()
    }

    /// Ends the programs of another agent whose mempool is lost, so that they cannot be resumed.
    pub fn end_kept(self: &Arc<Self>, kept: Vec<RestoredItem>) {
        let is_program = |kept: &RestoredItem| kept.item.kind == HeldKind::Program;
        let (programs, others): (Vec<_>, Vec<_>) = kept.into_iter().partition(is_program);
        self.end_programs(programs.iter().map(UnservableProgram::from_kept).collect());
        // The item of the host already belongs to this agent.
        for kept in others.into_iter().filter(|kept| kept.item.kind != HeldKind::Host) {
            self.agent.keeper().release(kept.item.kind, kept.item.id);
        }
    }

    /// Adds a program to its run, or ends it if it has none.
    fn assign_program(self: &Arc<Self>, kept: RestoredItem, runs: &mut BTreeMap<u64, RecoveringRun>) {
        let unservable = UnservableProgram::from_kept(&kept);
        let record = decode::<ProgramRecord>(&kept.item).ok();
        let Some((run, record)) = record.and_then(|record| Some((runs.get_mut(&record.run)?, record))) else {
            tracing::error!(program = unservable.id, "ending a program without a run");
            return self.end_programs(vec![unservable]);
        };
        match RecoveredProgram::open(kept, record) {
            Ok(program) => run.programs.push(program),
            Err(error) => {
                run.fail(format!("a program of it cannot be resumed: {error}"));
                run.unservable.push(unservable);
            }
        }
    }

    /// Starts the threads of a run.
    fn resume_run(self: &Arc<Self>, open: RecoveringRun) -> Option<RestoredRun> {
        let RecoveringRun { id, record, owner, slabs, budget, resumable, end_reason, mut unservable, .. } =
            open;
        slabs.finish_recovery();
        let kept = Arc::clone(&slabs);
        let socket = Arc::clone(&owner.socket);
        // With the connection of its owner.
        let count = RUN_DESCRIPTORS + THREAD_DESCRIPTORS;
        let descriptors = self.agent.descriptors().charge_always(record.tenant, count);
        let run = match Run::start(self, id, &record, slabs, budget, owner, descriptors) {
            Ok(run) => run,
            Err(error) => {
                // The keeper still holds all items of the run, so another agent can resume it.
                self.unserved_slabs.lock().push(kept);
                tracing::error!(%error, run = record.name, "cannot resume a run");
                return None;
            }
        };
        self.runs.lock().insert(run.token(), Arc::clone(&run));
        super::unpaged::announce_run(self, run.tenant());
        // The keeper does not refuse an update of an item that it holds.
        let _held = run.put_record_in_keeper();
        let mut end_reason = end_reason;
        if end_reason.is_none() && resumable.is_empty() {
            // The process that opened the run may not have received the answer.
            let _gone = send_frame(&socket, &Frame::RunOpened(run.token()), &[]);
        }
        for resumable in resumable {
            let program = resumable.to_unservable(run.tenant());
            if end_reason.is_none() {
                let Err(error) = resumable.start(self, &run) else { continue };
                end_reason = Some(format!("a program of it cannot be resumed: {error}"));
            }
            unservable.push(program);
        }
        if let Some(reason) = end_reason {
            run.end(&reason);
            self.end_programs(unservable);
        }
        tracing::info!(run = record.name, programs = run.programs().len(), "run resumed");
        Some(RestoredRun { run, owner: socket })
    }

    /// Ends programs that cannot be served. The keeper must hold their descriptors until then.
    fn end_programs(self: &Arc<Self>, programs: Vec<UnservableProgram>) {
        for UnservableProgram { pidfd, tenant, socket, .. } in &programs {
            // Without this, the worker would wait until this agent has copied its staging buffers.
            socket.iter().for_each(shut_down);
            if let Some(Err(error)) = pidfd.as_ref().map(|pidfd| kill_as(*tenant, pidfd.as_fd())) {
                tracing::warn!(%error, "cannot kill a program");
            }
        }
        for UnservableProgram { id, pidfd, tenant, memory, .. } in programs {
            match (memory, pidfd) {
                (Some((uffd, canary)), _) => {
                    let descriptors = self.agent.descriptors().charge_always(tenant, UNSERVED_DESCRIPTORS);
                    let memory = UnservedMemory::new(uffd, canary, tenant, true, descriptors);
                    self.unserved.add(self, memory);
                }
                (None, Some(pidfd)) if is_ready(&pidfd, DEATH_TIMEOUT) => {
                    self.agent.keeper().release(HeldKind::Program, id);
                }
                (None, _) => tracing::error!(program = id, "cannot end a program: its record is invalid"),
            }
        }
    }
}

/// A program that cannot be served and must end.
struct UnservableProgram {
    id: u64,
    /// The pidfd of the process; `None` for a forked child that is not yet identified.
    pidfd: Option<OwnedFd>,
    tenant: u32,
    /// The connection to the worker, if there is one.
    socket: Option<OwnedFd>,
    /// The userfaultfd and the canary; `None` if the record is invalid.
    memory: Option<(Userfaultfd, Canary)>,
}

impl UnservableProgram {
    fn from_kept(kept: &RestoredItem) -> Self {
        let clone = |fd: Option<&OwnedFd>| fd.and_then(|fd| fd.try_clone().ok());
        let pidfd = if kept.item.pid == 0 { None } else { clone(kept.fds.last()) };
        let record = decode::<ProgramRecord>(&kept.item).ok();
        let id = kept.item.id;
        let has_worker = record.as_ref().is_some_and(|record| record.hello.is_some());
        let socket = if has_worker { clone(kept.fds.get(SOCKET_INDEX)) } else { None };
        let memory =
            record.and_then(|record| Some((Userfaultfd::from(clone(kept.fds.first())?), record.canary(id))));
        Self { id, pidfd, tenant: kept.item.uid, socket, memory }
    }

    fn of(
        id: u64,
        tenant: u32,
        process: Option<&KeptProcess>,
        worker: Option<&(WorkerPort, OwnedFd)>,
        uffd: &Userfaultfd,
        record: &ProgramRecord,
    ) -> Self {
        let pidfd = process.and_then(|process| process.pidfd.try_clone().ok());
        let socket = worker.and_then(|(_, socket)| socket.try_clone().ok());
        Self { id, pidfd, tenant, socket, memory: Some((uffd.clone(), record.canary(id))) }
    }
}

/// A run that is being recovered.
struct RecoveringRun {
    id: u64,
    record: RunRecord,
    owner: RunOwner,
    slabs: Arc<SlabSet>,
    budget: Arc<Budget>,
    programs: Vec<RecoveredProgram>,
    resumable: Vec<ResumableProgram>,
    /// Programs that cannot be served and must be killed.
    unservable: Vec<UnservableProgram>,
    end_reason: Option<String>,
}

impl RecoveringRun {
    fn from_kept(kept: RestoredItem, mempool: &Mempool) -> io::Result<Self> {
        let record: RunRecord = decode(&kept.item)?;
        let mut fds = kept.fds.into_iter();
        let (Some(slabs), Some(owner)) = (fds.next(), fds.next()) else {
            return Err(io::Error::other("the keeper lacks descriptors of the run"));
        };
        let policy = CopyPolicy::decode(record.copies)
            .ok_or_else(|| io::Error::other(format!("its record names {} replicas", record.copies)))?;
        let slabs = SlabSet::recover(Memory::whole(slabs)?, policy);
        slabs.set_cache(mempool.new_cache_index()?);
        let budget = Budget::of_user(record.limit_bytes, mempool.user(owners::owner(record.tenant)));
        if let Some(max_bytes) = record.limit_max_bytes {
            // What the run had borrowed stays until the agent knows how much memory is idle.
            let pages = max_bytes.saturating_sub(record.limit_bytes) / PAGE_BYTES as u64;
            budget.set_borrowed(pages, pages);
        }
        Ok(Self {
            id: kept.item.id,
            owner: RunOwner::restore(owner, record.owner_pid, fds.next()),
            slabs: Arc::new(slabs),
            budget: Arc::new(budget),
            record,
            programs: Vec::new(),
            resumable: Vec::new(),
            unservable: Vec::new(),
            end_reason: None,
        })
    }

    /// Records that the run must be ended. Only the first reason is kept.
    fn fail(&mut self, reason: String) {
        self.end_reason.get_or_insert(reason);
    }

    /// Recovers all volumes, and adds their blocks of the mempool to `used`.
    fn recover(
        &mut self,
        service: &PagingService,
        orphans: &mut Orphans,
        used: &mut HashSet<BlockId>,
        deadline: Instant,
    ) {
        let served: HashSet<_> = self.programs.iter().filter_map(|program| program.record.origin).collect();
        let mut blocks = Vec::new();
        for program in std::mem::take(&mut self.programs) {
            let id = program.id;
            if program.has_ended() {
                if !program.is_memory_gone(deadline) {
                    self.fail("a process shares the memory of one that has ended".into());
                    self.unservable.push(program.to_unservable());
                    continue;
                }
                if program.kept.has_unserved_fork(&served) {
                    self.fail("a program of it was killed together with the agent while it forked".into());
                }
                service.agent.keeper().release(HeldKind::Program, id);
                // A hostile program may only pretend that it has ended, and its close could wait.
                close_in_thread(program);
                continue;
            }
            let unservable = program.to_unservable();
            let memory = (Arc::clone(&self.slabs), Arc::clone(&service.mempool), Arc::clone(&self.budget));
            match program.recover(&served, orphans, memory) {
                Ok(resumable) => {
                    blocks.extend(resumable.taken.pages.volume().blocks_in_use());
                    self.resumable.push(resumable);
                }
                Err(error) => {
                    self.fail(format!("a program of it cannot be resumed: {error}"));
                    self.unservable.push(unservable);
                }
            }
        }
        if self.end_reason.is_none() {
            used.extend(blocks);
        }
    }
}

/// A program that is being recovered from its item of the keeper.
struct RecoveredProgram {
    id: u64,
    pid: u32,
    tenant: u32,
    record: ProgramRecord,
    uffd: Userfaultfd,
    kept: takeover::KeptProgram,
    worker: Option<(WorkerPort, OwnedFd)>,
    process: Option<KeptProcess>,
}

impl RecoveredProgram {
    fn open(kept: RestoredItem, record: ProgramRecord) -> io::Result<Self> {
        let mut fds = kept.fds.into_iter();
        let mut next =
            || fds.next().ok_or_else(|| io::Error::other("the keeper lacks descriptors of the program"));
        let uffd = Userfaultfd::from(next()?);
        let (table, journal) = (Memory::whole(next()?)?, Memory::whole(next()?)?);
        let opened = takeover::KeptProgram::open(kept.item.id, table, journal)?;
        let worker = match record.hello {
            Some(_) => Some((WorkerPort::recover(next()?)?, next()?)),
            None => None,
        };
        let process = match kept.item.pid {
            0 => None,
            _ => Some(KeptProcess { memory: next()?, pagemap: next()?, maps: next()?, pidfd: next()? }),
        };
        Ok(Self {
            id: kept.item.id,
            pid: kept.item.pid,
            tenant: kept.item.uid,
            record,
            uffd,
            kept: opened,
            worker,
            process,
        })
    }

    fn to_unservable(&self) -> UnservableProgram {
        let (process, worker) = (self.process.as_ref(), self.worker.as_ref());
        UnservableProgram::of(self.id, self.tenant, process, worker, &self.uffd, &self.record)
    }

    /// Whether the program's worker has ended, or its process if there is no worker.
    fn has_ended(&self) -> bool {
        match (&self.worker, &self.process) {
            (Some((_, socket)), _) => is_ready(socket, NO_WAIT),
            (None, Some(process)) => has_ended(&process.pidfd, Duration::ZERO),
            (None, None) => false,
        }
    }

    /// Waits until the memory of a program that has ended is gone, at most until `deadline`.
    /// Returns whether it is.
    fn is_memory_gone(&self, deadline: Instant) -> bool {
        if let Some((worker, _)) = &self.worker
            && worker.is_last()
        {
            worker.release_all();
            return true;
        }
        let canary = self.record.canary(self.id);
        loop {
            // The check by pagemap needs no lock of the memory, which a hostile process could hold.
            let is_gone = match &self.process {
                Some(process) => pagemap::is_memory_gone(process.pagemap.as_fd()),
                None => canary.fill(&self.uffd).stop == Some(FillStop::Ended),
            };
            if is_gone {
                return true;
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(MEMORY_END_INTERVAL);
        }
    }

    fn recover(
        self,
        served: &HashSet<Origin>,
        orphans: &mut Orphans,
        memory: (Arc<SlabSet>, Arc<Mempool>, Arc<Budget>),
    ) -> io::Result<ResumableProgram> {
        let Self { id, pid, record, uffd, kept, worker, process, .. } = self;
        let find_child = |reader_pid: u32, fd: RawFd| {
            let number = u32::try_from(fd).ok()?;
            orphans.remove(&(u64::from(reader_pid) << 32 | u64::from(number)))
        };
        let taken = kept.recover(served, find_child, memory)?;
        Ok(ResumableProgram { id, pid, record, uffd, worker, process, taken })
    }
}

/// A program that can be resumed.
struct ResumableProgram {
    id: u64,
    pid: u32,
    record: ProgramRecord,
    uffd: Userfaultfd,
    worker: Option<(WorkerPort, OwnedFd)>,
    process: Option<KeptProcess>,
    taken: TakenProgram<OwnedFd>,
}

impl ResumableProgram {
    /// Returns the pages of the program, with the batch in each staging buffer.
    fn unfinished_batches(&mut self) -> (&mut TakenPages, Vec<EvictionBatch>) {
        let worker = self.worker.as_ref();
        let batches = worker.map_or_else(Vec::new, |(worker, _)| worker.unfinished_batches());
        (&mut self.taken.pages, batches)
    }

    fn to_unservable(&self, tenant: u32) -> UnservableProgram {
        let (process, worker) = (self.process.as_ref(), self.worker.as_ref());
        UnservableProgram::of(self.id, tenant, process, worker, &self.uffd, &self.record)
    }

    fn start(self, service: &PagingService, run: &Arc<Run>) -> io::Result<()> {
        let Self { id, pid, record, uffd, worker, process, taken } = self;
        let TakenProgram { journal, unapplied, pages } = taken;
        let descriptors = service.agent.descriptors().charge_always(run.tenant(), PROGRAM_DESCRIPTORS);
        let program = new_program(run, id, record.nonce, descriptors)?;
        let start = || {
            program.set_bounds(&record.bounds());
            program.is_attached.store(record.hello.is_some(), SeqCst);
            if let Some(kept) = process {
                program.set_process(ProgramProcess::recovered(pid, kept), &service.exit_watcher);
            }
            program.is_forked.store(record.origin.is_some(), Relaxed);
            program.must_check_inheritance.store(record.must_check_inheritance, Relaxed);
            // The advice is not recorded. If there is none, the check only takes longer.
            program.has_fork_advice.store(record.must_check_inheritance, Relaxed);
            program.share_uffd(&uffd);
            let mut edge = ProcessEdge::new(run, &program, uffd, pages.volume(), journal, record.origin)?;
            if let (Some((worker, socket)), Some(hello)) = (worker, record.hello(run.token())) {
                edge.reattach(Attachment { hello, socket: Arc::new(socket), worker })?;
            }
            edge.set_unapplied_events(unapplied);
            // The client of the keeper has copies of the descriptors that came from the keeper.
            let _held = edge.keep();
            spawn(run, &program, edge, move |run, program, edge| resume(run, program, edge, pages))
        };
        // The keeper must hold a program that cannot be started until it has ended.
        start().inspect_err(|_| {
            service.exit_watcher.unwatch(id);
            run.remove(&program);
        })
    }
}

/// Makes the monitor, and wakes the threads of the program. Returns `None` if the program has
/// ended.
///
/// Runs in the program's thread.
fn resume(
    run: &Run,
    program: &Program,
    mut edge: ProcessEdge,
    pages: TakenPages,
) -> Option<Monitor<ProcessEdge>> {
    let Some(batches) = edge.batches() else {
        pages.close();
        edge.detach();
        return None;
    };
    let before = pages.into_resume_state(edge.registered(), batches);
    let mut monitor = Monitor::resume(edge, before, Arc::clone(&run.budget), Arc::clone(&program.stats));
    monitor.edge().uffd().wake_all();
    Some(monitor)
}

/// Waits until a descriptor is readable, at most `timeout`. Returns whether it is.
fn is_ready(fd: &impl AsFd, timeout: Timespec) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}
