//! One program, and the thread that turns its monitor.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aquifer_channel::descriptor_shares::{DescriptorCharge, ShareExceeded};
use aquifer_channel::kill::kill_as;
use aquifer_ipc::{HeldKind, ProgramHello, STAGING_BUFFERS};
use aquifer_pager::{PAGE_BYTES, PageNumber, Volume};
use aquifer_report::ProgramStatistics;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::PagingService;
use super::attach::AttachError;
use super::attachment::Attachment;
use super::canary::{Canary, Nonce, new_nonce};
use super::count::shared_bytes;
use super::edge::ProcessEdge;
use super::exit_watcher::{ProgramExitWatcher, WatchedEnd};
use super::interrupt;
use super::monitor_thread::spawn;
use super::process::{ProgramProcess, UnprovenProcess, has_ended};
use super::run::{PROGRAMS_MAX, Run};
use super::sampler;
use super::unserved::{UNSERVED_DESCRIPTORS, UnservedMemory};
use crate::areas::{Area, Areas};
use crate::edge::SenderEvent;
use crate::journal::Journal;
use crate::kernel::FillStop;
use crate::maps::{self, PagingBounds};
use crate::monitor::Monitor;
use crate::stats::FaultStats;
use crate::uffd::Userfaultfd;
use crate::worker::ControlMemory;

/// Number of descriptors of a program, including those for its thread.
pub(super) const PROGRAM_DESCRIPTORS: usize = 16;

/// A request of another thread to a program's monitor.
#[derive(Debug)]
pub(crate) enum MonitorRequest {
    /// Adopt these areas.
    Areas(Vec<Area>),
    /// Attach this forked child, which has sent its hello.
    Attach(Box<Attachment>, UnprovenProcess),
}

/// One process that the agent pages.
#[derive(Debug)]
pub struct Program {
    pub(crate) id: u64,
    /// The nonce of the program's canary.
    pub(crate) nonce: Nonce,
    _descriptors: DescriptorCharge,
    process: OnceLock<ProgramProcess>,
    pub(crate) stats: Arc<FaultStats>,
    /// Resident pages that the monitor controls.
    pub(crate) held: AtomicU64,
    /// Whether the program owned blocks of the mempool after the last turn.
    pub(crate) owns_blocks: AtomicBool,
    /// Whether the program waits for a block of another program of the run.
    pub(crate) waits_for_block: AtomicBool,
    /// Whether the program had no block of the mempool after the last turn, and could not get one.
    pub(crate) waits_in_mempool: AtomicBool,
    /// The [`PagingBounds`]: shim range, paged range, canary.
    bounds: [AtomicU64; 5],
    /// The control memory, once the worker is attached.
    control: OnceLock<Arc<ControlMemory>>,
    sender_events: Mutex<VecDeque<SenderEvent>>,
    requests: Mutex<Vec<MonitorRequest>>,
    has_sender_events: AtomicBool,
    has_requests: AtomicBool,
    is_signalled: AtomicBool,
    is_asleep: AtomicBool,
    /// Whether faults wait for the sender or for room.
    pub(crate) has_pending_faults: AtomicBool,
    pub(super) wakeup: OwnedFd,
    /// The userfaultfd; `None` before it is shared, and after the removal of the program. Threads
    /// that serve other users may have this struct longer, and must not close the userfaultfd.
    uffd: Mutex<Option<Userfaultfd>>,
    /// Whether the range of the shim's memory is known from the hello. Before that no area may be
    /// registered: an area may be the worker's stack, and a worker that faults on its own memory
    /// waits for itself.
    pub(crate) is_attached: AtomicBool,
    /// Whether the program was forked and has not executed another program since, so that its
    /// pages may be shared with its parent.
    pub(crate) is_forked: AtomicBool,
    /// The user that a forked child had at its fork; `u32::MAX` if that is not known.
    pub(crate) user_at_fork: AtomicU32,
    /// Whether the program is a forked child whose inherited memory was not checked yet.
    pub(crate) must_check_inheritance: AtomicBool,
    /// Whether the program may have less memory than its parent had, because of an advice
    /// (`MADV_DONTFORK`, `MADV_WIPEONFORK`).
    pub(crate) has_fork_advice: AtomicBool,
    is_killed: AtomicBool,
    pub(super) has_process_ended: AtomicBool,
    pub(super) has_exited: AtomicBool,
    /// The thread of the program's monitor; 0 if it does not run.
    pub(super) thread: AtomicI32,
}

impl Program {
    fn new(id: u64, nonce: Nonce, descriptors: DescriptorCharge) -> io::Result<Self> {
        Ok(Self {
            id,
            nonce,
            _descriptors: descriptors,
            process: OnceLock::new(),
            stats: Arc::new(FaultStats::default()),
            held: AtomicU64::new(0),
            owns_blocks: AtomicBool::new(true),
            waits_for_block: AtomicBool::new(false),
            waits_in_mempool: AtomicBool::new(false),
            bounds: [const { AtomicU64::new(0) }; 5],
            control: OnceLock::new(),
            sender_events: Mutex::new(VecDeque::new()),
            requests: Mutex::new(Vec::new()),
            has_sender_events: AtomicBool::new(false),
            has_requests: AtomicBool::new(false),
            is_signalled: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            has_pending_faults: AtomicBool::new(false),
            wakeup: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            uffd: Mutex::new(None),
            is_attached: AtomicBool::new(false),
            is_forked: AtomicBool::new(false),
            user_at_fork: AtomicU32::new(u32::MAX),
            must_check_inheritance: AtomicBool::new(false),
            has_fork_advice: AtomicBool::new(false),
            is_killed: AtomicBool::new(false),
            has_process_ended: AtomicBool::new(false),
            has_exited: AtomicBool::new(false),
            thread: AtomicI32::new(0),
        })
    }

    /// Whether a process of this user may be the forked child, before it has proved that it is.
    pub(crate) fn may_be_of(&self, user: u32, tenant: u32) -> bool {
        let at_fork = self.user_at_fork.load(Relaxed);
        user == tenant || [user, u32::MAX].contains(&at_fork)
    }

    /// The process id; 0 while it is not known.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().map_or(0, ProgramProcess::pid)
    }

    /// The process; `None` for a forked child that is not yet identified.
    pub(crate) fn process(&self) -> Option<&ProgramProcess> {
        self.process.get()
    }

    /// Returns the process id while the process lives, so that no other process has the number.
    pub(crate) fn living_process(&self) -> Option<u32> {
        let process = self.process()?;
        (!has_ended(process.pidfd(), Duration::ZERO)).then(|| process.pid())
    }

    /// Sets the process and watches for its end.
    pub(crate) fn set_process(self: &Arc<Self>, process: ProgramProcess, exit_watcher: &ProgramExitWatcher) {
        exit_watcher.watch(self, WatchedEnd::Process, process.pidfd());
        let _ = self.process.set(process);
    }

    /// Sets the ranges from the hello, and marks the program as attached.
    pub(crate) fn attached(&self, hello: &ProgramHello) {
        self.set_bounds(&PagingBounds {
            shim_range: hello.private_start..hello.private_end,
            canary: hello.canary,
            paged_range: hello.paged_start..hello.paged_end,
        });
        self.is_attached.store(true, SeqCst);
    }

    /// Sets the ranges of the program.
    pub(crate) fn set_bounds(&self, bounds: &PagingBounds) {
        let PagingBounds { shim_range, canary, paged_range } = bounds;
        let values = [shim_range.start, shim_range.end, paged_range.start, paged_range.end, *canary];
        self.bounds.iter().zip(values).for_each(|(place, value)| place.store(value, Relaxed));
    }

    /// Returns the ranges from the hello. Before its hello, a child has the ranges of its parent.
    pub(crate) fn bounds(&self) -> PagingBounds {
        let [start, end, paged_start, paged_end, canary] =
            self.bounds.each_ref().map(|place| place.load(Relaxed));
        PagingBounds { shim_range: start..end, canary, paged_range: paged_start..paged_end }
    }

    /// Gives other threads access to the control memory.
    pub(crate) fn set_control(&self, control: Arc<ControlMemory>) {
        let _ = self.control.set(control);
    }

    /// Returns the pages that the program has pinned so far, sorted.
    pub(crate) fn pins(&self) -> Vec<PageNumber> {
        self.control.get().map_or_else(Vec::new, |control| control.pins())
    }

    pub(crate) fn canary(&self) -> Canary {
        let page = self.bounds[4].load(Relaxed) / PAGE_BYTES as u64;
        Canary { page, number: self.id, nonce: self.nonce }
    }

    /// Registers an area before its monitor adopts it, so that it cannot grow unnoticed. Includes
    /// its growth since it was found, up to `room`.
    ///
    /// No part of a mapping may stay unregistered, because the kernel does not move a range of two
    /// mappings. Private memory that was mapped up to `room` since then is served, too, as if the
    /// area had grown.
    pub(crate) fn register_early(&self, area: Area, room: PageNumber) {
        let Some(uffd) = self.uffd.lock().clone() else { return };
        let registered = uffd.register(area.start, room).or_else(|_| uffd.register(area.start, area.end));
        if let Err(error) = registered {
            tracing::debug!(%error, ?area, "cannot register an area: it has changed");
            return;
        }
        let text =
            if room > area.end { self.process().and_then(|process| process.read_maps().ok()) } else { None };
        // Shared mappings are not paged.
        for shared in
            text.iter().flat_map(|text| maps::shared_within(text, Area { start: area.end, end: room }))
        {
            if let Err(error) = uffd.unregister(shared.start, shared.end) {
                tracing::debug!(%error, ?shared, "a shared mapping stays registered");
            }
        }
    }

    /// Whether the program has mapped its control memory: the worker has stored its process id
    /// there.
    ///
    /// Before that, no area may be registered up to `room`, because the control memory may be
    /// mapped there.
    pub(crate) fn has_mapped_control(&self) -> bool {
        self.control.get().is_some_and(|control| control.process() != 0)
    }

    /// Gives other threads access to the userfaultfd, see [`Self::register_early`].
    pub(crate) fn share_uffd(&self, uffd: &Userfaultfd) {
        *self.uffd.lock() = Some(uffd.clone());
    }

    pub(crate) fn report(&self) -> ProgramStatistics {
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        ProgramStatistics {
            pid: self.pid(),
            held_bytes: load(&self.held) * PAGE_BYTES as u64,
            faults: load(&self.stats.faults),
            remote_reads: load(&self.stats.remote_reads),
            evictions: load(&self.stats.evictions),
            lost_pages: load(&self.stats.lost_pages),
            shared_bytes: self.process().and_then(shared_bytes).unwrap_or(0),
        }
    }

    /// Kills the process, if it is known, with the permissions of a user.
    ///
    /// A forked child that is not yet identified is served until it sends its hello and is refused.
    pub(crate) fn kill(&self, uid: u32) {
        let Some(process) = self.process() else { return };
        if let Err(error) = kill_as(uid, process.pidfd()) {
            tracing::warn!(%error, pid = self.pid(), uid, "cannot kill a program");
        }
        self.mark_killed();
    }

    /// Records that the process was killed, if it is known: its monitor ends now, and the memory is
    /// unserved until it is gone.
    pub(crate) fn mark_killed(&self) {
        if self.process().is_some() {
            self.is_killed.store(true, SeqCst);
            self.wake();
        }
    }

    /// Records that the process has ended. Its worker continues if another process has the memory.
    pub(crate) fn mark_process_ended(&self) {
        self.has_process_ended.store(true, SeqCst);
        if !self.is_attached.load(SeqCst) {
            self.has_exited.store(true, SeqCst);
        }
        self.signal();
    }

    /// Records that the worker has ended, or that the process has ended without a worker.
    pub(crate) fn mark_exited(&self) {
        self.has_exited.store(true, SeqCst);
        self.signal();
    }

    pub(crate) fn has_exited(&self) -> bool {
        self.has_exited.load(Relaxed)
    }

    pub(crate) fn is_killed(&self) -> bool {
        self.is_killed.load(Relaxed)
    }

    /// Interrupts the thread of a program that has ended, in case the program has made it wait in a
    /// read.
    pub(crate) fn interrupt_if_ended(&self) {
        let thread = self.thread.load(SeqCst);
        if thread != 0 && (self.is_killed() || self.has_exited()) {
            interrupt::interrupt(thread);
        }
    }

    /// Passes a completion of the sender to the monitor.
    pub(crate) fn push_sender_event(&self, event: SenderEvent) {
        self.sender_events.lock().push_back(event);
        self.has_sender_events.store(true, SeqCst);
        self.signal();
    }

    /// Queues a request for the monitor.
    ///
    /// Returns whether it is queued. A second hello is not queued before the first one is handled.
    pub(crate) fn request(&self, request: MonitorRequest) -> bool {
        let mut requests = self.requests.lock();
        let is_hello = |request: &MonitorRequest| matches!(request, MonitorRequest::Attach(..));
        if is_hello(&request) && requests.iter().any(is_hello) {
            return false;
        }
        requests.push(request);
        drop(requests);
        self.has_requests.store(true, SeqCst);
        self.signal();
        true
    }

    /// Returns the requests since the last call.
    pub(super) fn drain_requests(&self) -> Vec<MonitorRequest> {
        // The flag is cleared first: a request that comes after the queue was read sets it again.
        if !self.has_requests.load(Relaxed) || !self.has_requests.swap(false, SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut *self.requests.lock())
    }

    /// Makes the monitor turn, if it sleeps.
    pub(crate) fn signal(&self) {
        self.is_signalled.store(true, SeqCst);
        if self.is_asleep.swap(false, SeqCst) {
            self.wake();
        }
    }

    /// Wakes the monitor's thread from a wait for messages or for the sender.
    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.wakeup, &1u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot wake the monitor of a program");
        }
    }

    /// Appends the completions of the sender since the last call.
    pub(crate) fn drain_sender_events(&self, out: &mut Vec<SenderEvent>) {
        // The flag is cleared first: an event that comes after the queue was read sets it again.
        if self.has_sender_events.load(Relaxed) && self.has_sender_events.swap(false, SeqCst) {
            out.extend(self.sender_events.lock().drain(..));
        }
    }

    /// Announces that the monitor will sleep. Returns false if it was signalled, so that it must
    /// turn first.
    pub(super) fn begin_sleep(&self) -> bool {
        self.is_asleep.store(true, SeqCst);
        if self.is_signalled.swap(false, SeqCst) {
            self.is_asleep.store(false, SeqCst);
            return false;
        }
        true
    }

    pub(super) fn end_sleep(&self) {
        self.is_asleep.store(false, SeqCst);
        self.is_signalled.store(false, SeqCst);
    }

    /// Sleeps until [`Self::signal`] is called, for a bounded time.
    pub(crate) fn sleep_until_signalled(&self, timeout: rustix::fs::Timespec) {
        if !self.begin_sleep() {
            return;
        }
        let mut fds = [PollFd::new(&self.wakeup, PollFlags::IN)];
        // The result does not matter, because the caller checks all sources.
        let _ = poll(&mut fds, Some(&timeout));
        self.end_sleep();
        self.drain_wakeup();
    }

    pub(super) fn drain_wakeup(&self) {
        let mut count = [0; 8];
        // There may be nothing to read.
        let _ = rustix::io::read(&self.wakeup, &mut count);
    }
}

/// Maximum number of programs of one process at once. A process has several for a moment when it
/// executes other programs.
const PROGRAMS_PER_PROCESS_MAX: usize = 16;

/// Begins to serve a program that has sent its hello.
pub(crate) fn serve_root(
    run: &Arc<Run>,
    process: UnprovenProcess,
    uffd: Userfaultfd,
    attachment: Attachment,
) -> Result<(), AttachError> {
    let service = run.service.upgrade().ok_or(io::Error::from(io::ErrorKind::NotConnected))?;
    let hellos = run.programs().iter().filter(|program| program.pid() == process.pid()).count();
    if hellos >= PROGRAMS_PER_PROCESS_MAX {
        return Err(AttachError::TooManyHellos(hellos));
    }
    let descriptors = charge(&service, run).map_err(io::Error::other)?;
    let program = new_program(run, service.next_program(), new_nonce()?, descriptors)?;
    or_remove(run, &program, || {
        program.attached(&attachment.hello);
        let mempool = Arc::clone(&service.mempool);
        let volume = Volume::new(Arc::clone(&run.slabs), mempool, Arc::clone(&run.budget))
            .map_err(io::Error::other)?;
        program.share_uffd(&uffd);
        let mut edge = ProcessEdge::new(run, &program, uffd, &volume, Journal::new()?, None)?;
        edge.register_canary();
        edge.identify(process)?;
        edge.attach(attachment)?;
        Ok(spawn(run, &program, edge, |run, program, edge| {
            Some(monitor(run, program, edge, volume, Areas::default()))
        })?)
    })
}

/// The state that a forked child begins with.
pub(crate) struct ForkedProgram {
    pub uffd: Userfaultfd,
    pub volume: Volume,
    pub areas: Areas,
    /// See [`super::records::ProgramRecord::origin`].
    pub origin: (u64, u64),
    /// See [`Program::has_fork_advice`].
    pub has_fork_advice: bool,
    /// The user of the parent, if it is known.
    pub user: Option<u32>,
}

/// Begins to serve a forked child, before its hello.
pub(crate) fn serve_child(run: &Arc<Run>, parent: &Program, forked: ForkedProgram) -> io::Result<()> {
    let ForkedProgram { uffd, mut volume, areas, origin, has_fork_advice, user } = forked;
    let service = run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
    let charged = charge(&service, run).map_err(io::Error::other);
    let added = charged.and_then(|charge| new_program(run, service.next_program(), new_nonce()?, charge));
    let program = added.inspect_err(|_| volume.close())?;
    or_remove(run, &program, || {
        program.set_bounds(&parent.bounds());
        program.is_forked.store(true, Relaxed);
        program.user_at_fork.store(user.unwrap_or(u32::MAX), Relaxed);
        program.must_check_inheritance.store(true, Relaxed);
        program.has_fork_advice.store(has_fork_advice, Relaxed);
        program.share_uffd(&uffd);
        let edge = ProcessEdge::new(run, &program, uffd, &volume, Journal::new()?, Some(origin))?;
        edge.keep().map_err(io::Error::other).inspect_err(|_| volume.close())?;
        spawn(run, &program, edge, |run, program, edge| Some(monitor(run, program, edge, volume, areas)))
    })
}

/// Charges the descriptors of another program to the user of a run.
fn charge(service: &PagingService, run: &Run) -> Result<DescriptorCharge, ShareExceeded> {
    service.agent.descriptors().charge(run.tenant(), PROGRAM_DESCRIPTORS)
}

/// Adds a program to a run.
///
/// # Errors
/// If the run has too many programs, or a system call fails.
pub(crate) fn new_program(
    run: &Arc<Run>,
    id: u64,
    nonce: Nonce,
    descriptors: DescriptorCharge,
) -> io::Result<Arc<Program>> {
    let service = run.service.upgrade().ok_or(io::ErrorKind::NotConnected)?;
    let program = Arc::new(Program::new(id, nonce, descriptors)?);
    if !run.add(&program) {
        return Err(io::Error::other(format!("the run has {PROGRAMS_MAX} processes already")));
    }
    sampler::announce_program(&service, run)?;
    Ok(program)
}

/// Starts a program, and removes it from its run if the start fails.
fn or_remove<E>(
    run: &Arc<Run>,
    program: &Arc<Program>,
    start: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    // No page has left the program, so its userfaultfd need not stay open.
    start().inspect_err(|_| forget_program(run, program))
}

/// Removes a program from its run, the exit watcher and the keeper.
fn forget_program(run: &Run, program: &Program) {
    let _closed_at_last = program.uffd.lock().take();
    if let Some(service) = run.service.upgrade() {
        service.exit_watcher.unwatch(program.id);
        service.agent.keeper().release(HeldKind::Program, program.id);
    }
    run.remove(program);
}

/// Removes a program that was served from its run, the exit watcher, and, once its memory is gone,
/// the keeper.
///
/// The program's memory may still exist: a thread that was killed may not have ended yet, and
/// another process may share the memory. Then the userfaultfd stays open, here and in the keeper.
pub(super) fn remove_program(run: &Run, program: &Program) {
    let uffd = program.uffd.lock().take();
    if let Some(service) = run.service.upgrade() {
        service.exit_watcher.unwatch(program.id);
        let (canary, tenant) = (program.canary(), run.tenant());
        match uffd {
            Some(uffd) if canary.fill(&uffd).stop != Some(FillStop::Ended) => {
                let descriptors = service.agent.descriptors().charge_always(tenant, UNSERVED_DESCRIPTORS);
                let memory = UnservedMemory::new(uffd, canary, tenant, true, descriptors);
                service.unserved.add(&service, memory);
            }
            _ => service.agent.keeper().release(HeldKind::Program, program.id),
        }
    }
    run.remove(program);
}

/// Makes the monitor of a new program.
fn monitor(
    run: &Run,
    program: &Program,
    edge: ProcessEdge,
    volume: Volume,
    areas: Areas,
) -> Monitor<ProcessEdge> {
    Monitor::new(edge, volume, Arc::clone(&run.budget), Arc::clone(&program.stats), areas, STAGING_BUFFERS)
}
