//! A run: the shared state of the programs of one `aquifer run`, with limit, slabs, sender and
//! statistics.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

use aquifer_channel::HoldRefused;
use aquifer_channel::descriptor_shares::DescriptorCharge;
use aquifer_channel::kill::kill_all_as;
use aquifer_channel::peer::{peer_credentials, peer_pidfd};
use aquifer_ipc::{HeldItem, HeldKind, OpenRun, RunToken};
use aquifer_latency::LatencyHistogram;
use aquifer_pager::{
    Backup, Budget, CopyPolicy, LIMIT_BYTES_MIN, PAGE_BYTES, REPLICAS_MAX, RecalledBytes, SlabSet,
};
use aquifer_report::{FaultWaitUs, LatencyUs, RecalledRunMemory, RunStatistics, UnpagedProcess};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use super::process::{ProgramProcess, has_ended};
use super::program::Program;
use super::records::RunRecord;
use super::sender::SenderThread;
use super::{OpenRunError, PagingService};
use crate::edge::OtherPrograms;
use crate::stats::{FaultStats, FaultWait};

/// Default of the time for which a run waits for room in a full pool.
const WAIT_FOR_ROOM: Duration = Duration::from_mins(10);
/// Reason why pages of a run cannot be evicted if it cannot get a block of the mempool.
pub(super) const NO_BLOCK: &str = "the mempool of this host has no free block for pages of the run";
/// Maximum number of programs (processes) of one run at once.
pub const PROGRAMS_MAX: usize = 4096;

/// The process that has opened a run.
#[derive(Clone, Debug)]
pub struct RunOwner {
    /// The connection of the process.
    pub socket: Arc<OwnedFd>,
    /// The process id; 0 if the agent does not see the process.
    pub pid: u32,
    /// The pidfd; `None` if the process had ended.
    pub process: Option<Arc<OwnedFd>>,
}

impl RunOwner {
    /// Makes the owner from the record and the descriptors of an earlier agent.
    pub(crate) fn restore(socket: OwnedFd, pid: Option<u32>, process: Option<OwnedFd>) -> Self {
        let (pid, process) = match pid {
            Some(pid) => (pid, process),
            None => (peer_credentials(&socket).map_or(0, |peer| peer.pid), peer_pidfd(&socket).ok()),
        };
        Self { socket: Arc::new(socket), pid, process: process.map(Arc::new) }
    }
}

/// A run: the processes of one `aquifer run`.
#[derive(Debug)]
pub struct Run {
    id: u64,
    token: RunToken,
    name: String,
    tenant: u32,
    descriptors: DescriptorCharge,
    outlives_owner: bool,
    is_strict: bool,
    wait_for_room_ms: Option<u64>,
    pub(super) limit_bytes: AtomicU64,
    /// The limit while the host has idle memory; not more than `limit_bytes` if the run is not
    /// elastic.
    pub(super) limit_max_bytes: AtomicU64,
    /// Whether the limit was changed after the start. Such a limit may be less than the memory that
    /// cannot be paged, and the run is not ended for that.
    is_limit_changed: AtomicBool,
    owner: RunOwner,
    pub(crate) service: Weak<PagingService>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) slabs: Arc<SlabSet>,
    pub(crate) sender: SenderThread,
    programs: Mutex<Vec<Arc<Program>>>,
    changed: Condvar,
    ended_programs: FaultStats,
    end_reason: Mutex<Option<String>>,
    notices: Mutex<Vec<String>>,
    /// Whether pages of the run wait for a block of the mempool, and the owner is notified.
    waits_in_mempool: AtomicBool,
    /// Processes of the run that are not paged.
    unpaged: Mutex<Vec<UnpagedProcess>>,
    /// Readable while there are notices, or an end reason, that the owner has not received.
    notices_fd: OwnedFd,
    programs_seen: AtomicU64,
    /// Whether there are programs that the sampler has not seen.
    pub(crate) has_new_programs: AtomicBool,
}

impl Run {
    /// Opens a new run.
    pub(crate) fn open(
        service: &Arc<PagingService>,
        open: &OpenRun,
        owner: RunOwner,
        tenant: u32,
        descriptors: DescriptorCharge,
    ) -> Result<Arc<Self>, OpenRunError> {
        let OpenRun { limit_bytes, limit_max_bytes, outlives_owner, is_strict, wait_for_room_ms, .. } = *open;
        let policy = policy_of(open)?;
        let mut token = [0; 16];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())
            .map_err(std::io::Error::from)?;
        let record = RunRecord {
            token: RunToken(token).to_hex(),
            name: printable(&open.name),
            limit_bytes,
            limit_max_bytes: limit_max_bytes.filter(|max| *max > limit_bytes),
            tenant,
            copies: policy.encode(),
            outlives_owner,
            is_strict,
            wait_for_room_ms,
            owner_pid: Some(owner.pid),
        };
        let budget = Arc::new(Budget::of_user(limit_bytes, service.mempool.user(descriptors.owner())));
        let (id, slabs) = (service.next_program(), Arc::new(SlabSet::with_policy(policy)?));
        slabs.set_cache(service.mempool.new_cache_index()?);
        let run = Self::start(service, id, &record, slabs, budget, owner, descriptors)?;
        run.put_record_in_keeper().inspect_err(|_| run.close())?;
        Ok(run)
    }

    pub(super) fn put_record_in_keeper(&self) -> Result<(), HoldRefused> {
        let record = RunRecord {
            token: self.token.to_hex(),
            name: self.name.clone(),
            limit_bytes: self.limit_bytes.load(Relaxed),
            limit_max_bytes: self.limit_max_bytes(),
            tenant: self.tenant,
            copies: self.slabs.policy().encode(),
            outlives_owner: self.outlives_owner,
            is_strict: self.is_strict,
            wait_for_room_ms: self.wait_for_room_ms,
            owner_pid: Some(self.owner.pid),
        };
        let mut fds = vec![self.slabs.memory().shared_fd(), Arc::clone(&self.owner.socket)];
        fds.extend(self.owner.process.clone());
        self.keep(&record.put(self.id), fds)
    }

    /// Starts a run, new or restored, with its slabs and budget.
    pub(crate) fn start(
        service: &Arc<PagingService>,
        id: u64,
        record: &RunRecord,
        slabs: Arc<SlabSet>,
        budget: Arc<Budget>,
        owner: RunOwner,
        descriptors: DescriptorCharge,
    ) -> std::io::Result<Arc<Self>> {
        let token = record.token()?;
        let seed = u64::from_le_bytes(token.0[..8].try_into().expect("8 bytes"));
        let user = (record.tenant, descriptors.owner());
        let sender = SenderThread::start(service, Arc::clone(&slabs), id, user, seed)?;
        Ok(Arc::new(Self {
            id,
            token,
            name: record.name.clone(),
            tenant: record.tenant,
            descriptors,
            outlives_owner: record.outlives_owner,
            is_strict: record.is_strict,
            wait_for_room_ms: record.wait_for_room_ms,
            limit_bytes: AtomicU64::new(record.limit_bytes),
            limit_max_bytes: AtomicU64::new(record.limit_max_bytes.unwrap_or(0)),
            is_limit_changed: AtomicBool::new(record.limit_bytes < LIMIT_BYTES_MIN),
            owner,
            service: Arc::downgrade(service),
            budget,
            slabs,
            sender,
            programs: Mutex::new(Vec::new()),
            changed: Condvar::new(),
            ended_programs: FaultStats::default(),
            end_reason: Mutex::new(None),
            notices: Mutex::new(Vec::new()),
            waits_in_mempool: AtomicBool::new(false),
            unpaged: Mutex::default(),
            notices_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            programs_seen: AtomicU64::new(0),
            has_new_programs: AtomicBool::new(false),
        }))
    }

    /// The number of the run, unique on this host over restarts of the agent.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether the programs of the run continue when the process that opened it is killed.
    #[must_use]
    pub fn outlives_owner(&self) -> bool {
        self.outlives_owner
    }

    /// Whether the run must end if one of its processes is not paged.
    pub(crate) fn is_strict(&self) -> bool {
        self.is_strict
    }

    /// The time for which the run waits for room in a full pool before it is ended.
    pub(crate) fn wait_for_room(&self) -> Duration {
        self.wait_for_room_ms.map_or(WAIT_FOR_ROOM, Duration::from_millis)
    }

    /// Returns the process id of the owner, if the agent sees the process and it lives. Then no
    /// other process has the number.
    pub(crate) fn living_owner(&self) -> Option<u32> {
        let RunOwner { pid, process, .. } = &self.owner;
        let lives = process.as_ref().is_some_and(|pidfd| !has_ended(pidfd, Duration::ZERO));
        (*pid != 0 && lives).then_some(*pid)
    }

    /// Sets whether pages of the run wait for a block of the mempool. Returns the previous value.
    pub(crate) fn set_waits_in_mempool(&self, waits: bool) -> bool {
        self.waits_in_mempool.swap(waits, Relaxed)
    }

    /// Returns the reason why pages of the run find no room now; `None` if they do.
    /// The run's memory that nodes recall.
    #[must_use]
    pub fn recalled(&self) -> Vec<RecalledRunMemory> {
        let show = |recalled: RecalledBytes| {
            let RecalledBytes { node, bytes, only_copy_bytes } = recalled;
            RecalledRunMemory { node: node.0, bytes, only_copy_bytes }
        };
        self.sender.recalled().into_iter().map(show).collect()
    }

    fn short_of_room(&self) -> Option<String> {
        let of_mempool = || self.waits_in_mempool.load(Relaxed).then(|| NO_BLOCK.to_owned());
        self.sender.room_shortage().map(|(_, reason)| reason).or_else(of_mempool)
    }

    /// Sets the processes of the run that are not paged now.
    pub(crate) fn set_unpaged(&self, unpaged: Vec<UnpagedProcess>) {
        *self.unpaged.lock() = unpaged;
    }

    /// Name of the run's program.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The user that the run belongs to.
    #[must_use]
    pub fn tenant(&self) -> u32 {
        self.tenant
    }

    /// The owner of the tenant's user id. The run counts against the limits of that user.
    #[must_use]
    pub fn id_owner(&self) -> u32 {
        self.descriptors.owner()
    }

    /// The secret that admits programs to the run.
    #[must_use]
    pub fn token(&self) -> RunToken {
        self.token
    }

    /// Changes the limit of a running run, and also `max_bytes`, the limit while the host has idle
    /// memory, if it is given.
    ///
    /// Pages above the limit are evicted at once, or as soon as the pool has room.
    pub fn set_limit(&self, limit_bytes: u64, max_bytes: Option<u64>) {
        tracing::info!(run = self.name, limit_bytes, max_bytes, "limit changed");
        self.limit_bytes.store(limit_bytes, Relaxed);
        if let Some(max_bytes) = max_bytes {
            self.limit_max_bytes.store(max_bytes, Relaxed);
        }
        if self.limit_max_bytes().is_none() {
            self.budget.set_borrowed(0, 0);
        }
        self.is_limit_changed.store(true, Relaxed);
        self.budget.set_limit(limit_bytes);
        // The keeper does not refuse an update of an item that it holds.
        let _held = self.put_record_in_keeper();
        for program in self.programs() {
            program.signal();
        }
    }

    /// Whether [`Self::set_limit`] was called.
    pub(crate) fn is_limit_changed(&self) -> bool {
        self.is_limit_changed.load(Relaxed)
    }

    /// Whether a process belongs to the run or has started it.
    #[must_use]
    pub fn has_process(&self, pid: u32) -> bool {
        self.owner.pid == pid || self.programs.lock().iter().any(|program| program.pid() == pid)
    }

    /// The programs that are alive.
    #[must_use]
    pub fn programs(&self) -> Vec<Arc<Program>> {
        self.programs.lock().clone()
    }

    /// Number of programs that are alive.
    #[must_use]
    pub fn program_count(&self) -> usize {
        self.programs.lock().len()
    }

    /// Number of programs since the start of the run.
    #[must_use]
    pub fn programs_seen(&self) -> u64 {
        self.programs_seen.load(Relaxed)
    }

    /// Adds a program. Returns false if the run has [`PROGRAMS_MAX`] programs.
    pub(crate) fn add(&self, program: &Arc<Program>) -> bool {
        let mut programs = self.programs.lock();
        if programs.len() >= PROGRAMS_MAX {
            return false;
        }
        programs.push(Arc::clone(program));
        self.programs_seen.fetch_add(1, Relaxed);
        true
    }

    /// Removes a program and keeps its statistics.
    pub(crate) fn remove(&self, program: &Program) {
        let mut programs = self.programs.lock();
        // Must be merged with the lock held, so that [`Self::stats`] counts the program exactly
        // once.
        self.ended_programs.merge(&program.stats);
        programs.retain(|other| other.id != program.id);
        drop(programs);
        self.changed.notify_all();
    }

    /// Wakes the monitors of the selected programs, except `waker`.
    pub(crate) fn wake_others(&self, waker: u64, others: OtherPrograms) {
        let programs = self.programs.lock();
        let average = average_held(&programs);
        programs
            .iter()
            .filter(|program| program.id != waker)
            .filter(|program| match others {
                OtherPrograms::WithPages => program.held.load(Relaxed) >= average,
                OtherPrograms::WithBlocks | OtherPrograms::AllWithBlocks => program.owns_blocks.load(SeqCst),
                OtherPrograms::WithoutBlock | OtherPrograms::UsersWithoutBlock => {
                    program.waits_for_block.load(SeqCst)
                }
            })
            .for_each(|program| program.signal());
    }

    /// Waits until the run has no program, at most `timeout`. Returns whether it has none.
    #[must_use]
    pub fn wait_empty(&self, timeout: Duration) -> bool {
        let mut programs = self.programs.lock();
        let _late = self.changed.wait_while_for(&mut programs, |programs| !programs.is_empty(), timeout);
        programs.is_empty()
    }

    /// Queues a notice for the process that opened the run.
    pub(crate) fn notify_owner(&self, text: &str) {
        self.notices.lock().push(text.to_owned());
        self.wake_owner();
    }

    /// The eventfd that is readable when there are notices for the owner, or the reason of an end.
    #[must_use]
    pub fn notices_fd(&self) -> &OwnedFd {
        &self.notices_fd
    }

    fn wake_owner(&self) {
        // A write to an eventfd fails only when its count is full, and then it is readable.
        let _ = rustix::io::write(&self.notices_fd, &1_u64.to_ne_bytes());
    }

    /// Returns the notices since the last call.
    #[must_use]
    pub fn drain_notices(&self) -> Vec<String> {
        // Must be read before the notices, so that a later notice makes it readable again.
        let _ = rustix::io::read(&self.notices_fd, &mut [0; 8]);
        std::mem::take(&mut *self.notices.lock())
    }

    /// Ends all programs of the run. Only the reason of the first call is kept.
    pub fn end(&self, reason: &str) {
        let mut end_reason = self.end_reason.lock();
        if end_reason.is_none() {
            tracing::error!(run = self.name, reason, "run ended by the agent");
            *end_reason = Some(reason.to_owned());
        }
        drop(end_reason);
        self.wake_owner();
        let programs = self.programs();
        // Must be marked before they are killed, because a monitor must not see the end of a worker
        // first.
        programs.iter().for_each(|program| program.mark_killed());
        let processes = programs.iter().filter_map(|program| program.process());
        let pidfds: Vec<_> = processes.map(ProgramProcess::pidfd).collect();
        if let Err(error) = kill_all_as(self.tenant, &pidfds) {
            tracing::warn!(%error, run = self.name, uid = self.tenant, "cannot kill a program of a run");
        }
    }

    /// Returns the reason why the agent ended the run; `None` if it did not.
    #[must_use]
    pub fn end_reason(&self) -> Option<String> {
        self.end_reason.lock().clone()
    }

    pub(crate) fn close(&self) {
        self.sender.stop();
        if let Some(service) = self.service.upgrade() {
            service.mempool.forget_cached(self.budget.mempool_user(), &self.slabs);
            service.agent.keeper().release(HeldKind::Run, self.id);
        }
    }

    /// Returns the counters of all programs, ended ones included.
    #[must_use]
    pub fn stats(&self) -> FaultStats {
        let total = FaultStats::default();
        let programs = self.programs.lock();
        total.merge(&self.ended_programs);
        programs.iter().for_each(|program| total.merge(&program.stats));
        total
    }

    /// Returns the statistics of the run now.
    #[must_use]
    pub fn report(&self) -> RunStatistics {
        self.report_with(&self.stats())
    }

    /// Returns the statistics of the run now, with counters from [`Self::stats`].
    #[must_use]
    pub fn report_with(&self, total: &FaultStats) -> RunStatistics {
        let programs: Vec<_> = self.programs().iter().map(|program| program.report()).collect();
        let load = |counter: &AtomicU64| counter.load(Relaxed);
        let page = PAGE_BYTES as u64;
        let sent = self.sender.stats();
        let (remote_bytes, remote_peak_bytes) = self.slabs.bytes();
        RunStatistics {
            name: self.name.clone(),
            tenant: self.tenant,
            limit_bytes: self.limit_bytes.load(Relaxed),
            limit_max_bytes: self.limit_max_bytes(),
            borrowed_bytes: self.limit_max_bytes().map_or(0, |_| self.budget.borrowed() * page),
            cached_bytes: self.cached_bytes(),
            replicas: self.slabs.replicas_wanted(),
            degraded_slabs: sent.degraded_slabs,
            copied_slabs: sent.copied_slabs,
            repaired_pages: sent.repaired_pages,
            vacated_slabs: sent.vacated_slabs,
            repacked_pages: load(&total.repacked),
            moved_bytes: sent.moved_bytes,
            backup: self.slabs.policy().backup.to_string(),
            disk_bytes: sent.backup_bytes,
            displaced_slabs: sent.displaced_slabs,
            disk_errors: sent.disk_errors,
            recalled: self.recalled(),
            unchanged_pages: sent.unchanged_pages,
            processes: programs.len(),
            shared_bytes: programs.iter().map(|program| program.shared_bytes).sum(),
            programs,
            swap_bytes: None,
            short_of_room: self.short_of_room(),
            unpaged: self.unpaged.lock().clone(),
            faults: load(&total.faults),
            zero_pages: load(&total.zero_pages),
            mempool_hits: load(&total.mempool_hits),
            staging_hits: load(&total.staging_hits),
            cache_hits: load(&total.cache_hits),
            remote_reads: load(&total.remote_reads),
            remote_read_trips: load(&total.remote_read_trips),
            prefetched: load(&total.prefetched),
            remote_writes: sent.pages,
            remote_write_trips: sent.writes,
            evictions: load(&total.evictions),
            lost_pages: load(&total.lost_pages),
            resident_bytes: self.budget.resident() * page,
            resident_peak_bytes: self.budget.peak() * page,
            mempool_bytes: self.budget.mempool_bytes(),
            remote_bytes,
            remote_peak_bytes,
            fault_latency_us: latency_us(&total.latency()),
            fault_wait_us: FaultWaitUs {
                host: latency_us(total.latency_of(FaultWait::Host)),
                node: latency_us(total.latency_of(FaultWait::Node)),
                room: latency_us(total.latency_of(FaultWait::Room)),
            },
        }
    }

    /// Stores an item of the run in the keeper.
    pub(crate) fn keep(&self, put: &HeldItem, fds: Vec<Arc<OwnedFd>>) -> Result<(), HoldRefused> {
        self.service.upgrade().map_or(Ok(()), |service| service.agent.keeper().hold_shared(put, fds))
    }
}

/// Returns the average number of held pages of the programs.
pub(crate) fn average_held(programs: &[Arc<Program>]) -> u64 {
    let held: u64 = programs.iter().map(|program| program.held.load(Relaxed)).sum();
    held / (programs.len() as u64).max(1)
}

/// Returns quantiles of fault latencies.
fn latency_us(latency: &LatencyHistogram) -> LatencyUs {
    let us = |share| Duration::from_nanos(latency.quantile(share)).as_secs_f64() * 1e6;
    LatencyUs { p50: us(0.5), p99: us(0.99), p999: us(0.999) }
}
/// Maximum number of characters of a run's name.
const NAME_CHARS_MAX: usize = 64;

/// Returns a name in the form that all users see: truncated, and without characters that change a
/// terminal or the order of the text.
fn printable(name: &str) -> String {
    let is_plain = |symbol: char| symbol.is_alphanumeric() || symbol == ' ' || symbol.is_ascii_punctuation();
    name.chars().take(NAME_CHARS_MAX).map(|symbol| if is_plain(symbol) { symbol } else { '?' }).collect()
}

/// The copies that a request asks for; without a choice of backups, the usual ones.
pub(super) fn policy_of(open: &OpenRun) -> Result<CopyPolicy, OpenRunError> {
    let replicas = usize::try_from(open.replicas).unwrap_or(usize::MAX);
    if !(1..=REPLICAS_MAX).contains(&replicas) {
        return Err(OpenRunError::Replicas(replicas));
    }
    let backup = match open.backup {
        Some(code) => Backup::from_code(code).ok_or(OpenRunError::Backup(code))?,
        None => Backup::default(),
    };
    Ok(CopyPolicy { replicas, backup })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_change_a_terminal_or_fill_a_screen() {
        assert_eq!(printable("redis-server 6.2"), "redis-server 6.2");
        assert_eq!(printable("naïve 数据"), "naïve 数据");
        assert_eq!(printable("a\u{1b}[2J\r\nb\u{9b}c\u{202e}d"), "a?[2J??b?c?d");
        assert_eq!(printable(&"x".repeat(10_000)).len(), NAME_CHARS_MAX);
    }
}
