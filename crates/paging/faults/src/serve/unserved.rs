//! Memory without a monitor that may still have a process: the memory of a forked child that cannot
//! be served, or of a program that was killed and has not ended yet.
//!
//! The userfaultfd of the memory stays open until the memory is gone, because missing pages read as
//! zeros once it is closed. The canary is filled, so that a child sends its hello and is refused
//! with the reason; then the shim ends the child. A process that faults on another page is
//! identified by that fault, and killed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use aquifer_channel::descriptor_shares::DescriptorCharge;
use aquifer_channel::kill::kill_as;
use aquifer_ipc::HeldKind;
use parking_lot::Mutex;

use super::PagingService;
use super::canary::{Canary, new_nonce};
use super::process::{ProofError, UnprovenProcess};
use super::tenant_threads::TenantThreads;
use crate::kernel::{FillStop, PageFault, UffdMessage};
use crate::uffd::Userfaultfd;

/// Interval at which all unserved memories are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum number of unserved memories of one tenant. The userfaultfds of further ones are closed,
/// because a program that must end must not use up the descriptors of others.
const PER_TENANT_MAX: usize = 1024;
/// Number of descriptors of an unserved memory, including those for the threads of its tenant.
pub(super) const UNSERVED_DESCRIPTORS: usize = 4;

/// The unserved memories of all tenants.
#[derive(Debug)]
pub(super) struct UnservedMemories {
    memories: Mutex<HashMap<u32, Vec<UnservedMemory>>>,
    threads: TenantThreads,
}

/// The unserved memory of one process.
#[derive(Debug)]
pub(super) struct UnservedMemory {
    uffd: Userfaultfd,
    canary: Canary,
    /// The user with whose permissions the processes of the memory are killed.
    tenant: u32,
    /// Whether the keeper holds the memory, under the number of the canary.
    is_in_keeper: bool,
    /// Whether a thread is killing a process of the memory. It may wait for a hostile program.
    is_killing: Arc<AtomicBool>,
    /// Whether waiting threads must be woken once, because another agent may have read their
    /// faults.
    must_wake: bool,
    _descriptors: DescriptorCharge,
}

impl Default for UnservedMemories {
    fn default() -> Self {
        Self { memories: Mutex::default(), threads: TenantThreads::new("unserved") }
    }
}

impl UnservedMemories {
    /// Adds a memory. Its run must have an end reason, or not exist.
    pub fn add(&self, service: &Arc<PagingService>, memory: UnservedMemory) {
        let tenant = memory.tenant;
        self.push(service, memory);
        let weak = Arc::downgrade(service);
        if let Err(error) = self.threads.wake(tenant, move || poll_all(&weak, tenant)) {
            tracing::error!(%error, tenant, "cannot watch the memory of ending programs; it stays");
        }
    }

    fn push(&self, service: &PagingService, memory: UnservedMemory) {
        let mut memories = self.memories.lock();
        let of_tenant = memories.entry(memory.tenant).or_default();
        if of_tenant.len() < PER_TENANT_MAX {
            of_tenant.push(memory);
        } else {
            tracing::error!(
                tenant = memory.tenant,
                limit = PER_TENANT_MAX,
                "too many ending programs of a user: closing the userfaultfd of one"
            );
            if memory.is_in_keeper {
                service.agent.keeper().release(HeldKind::Program, memory.canary.number);
            }
            close_in_thread(memory);
        }
    }

    /// Kills the processes that a fault has identified, and drops memory that is gone.
    fn poll(&self, service: &PagingService, tenant: u32) {
        // The lock must not be held, because a hostile program can make the read of its userfaultfd
        // wait.
        let mut memories = self.memories.lock().remove(&tenant).unwrap_or_default();
        let mut forked = Vec::new();
        memories.retain_mut(|memory| {
            let may_exist = memory.poll(&mut forked, service);
            if !may_exist && memory.is_in_keeper {
                service.agent.keeper().release(HeldKind::Program, memory.canary.number);
            }
            may_exist
        });
        memories.into_iter().chain(forked).for_each(|memory| self.push(service, memory));
    }

    fn has_any(&self, tenant: u32) -> bool {
        self.memories.lock().get(&tenant).is_some_and(|memories| !memories.is_empty())
    }
}

/// Drops a value with the userfaultfd of a program, in a new thread: its last close waits for the
/// lock of the memory, which a hostile program can hold for ever.
pub(super) fn close_in_thread(value: impl Send + 'static) {
    // If no thread can be started, the value is dropped here.
    let _started = std::thread::Builder::new().name("close".into()).spawn(move || drop(value));
}

/// The loop of a tenant's thread, which ends when the tenant has no unserved memory.
fn poll_all(service: &Weak<PagingService>, tenant: u32) {
    while let Some(service) = service.upgrade() {
        let unserved = &service.unserved;
        unserved.poll(&service, tenant);
        if unserved.threads.ends(tenant, || !unserved.has_any(tenant)) {
            return;
        }
        drop(service);
        std::thread::park_timeout(POLL_INTERVAL);
    }
}

impl UnservedMemory {
    pub fn new(
        uffd: Userfaultfd,
        canary: Canary,
        tenant: u32,
        is_in_keeper: bool,
        descriptors: DescriptorCharge,
    ) -> Self {
        let is_killing = Arc::default();
        Self { uffd, canary, tenant, is_in_keeper, is_killing, must_wake: true, _descriptors: descriptors }
    }

    /// Kills the process if a fault has identified it. Returns whether the memory may still exist.
    /// Appends the memories of forked children to `forked`.
    fn poll(&mut self, forked: &mut Vec<Self>, service: &PagingService) -> bool {
        // Repeated, because the kernel refuses the fill while an event is unread.
        if self.canary.fill(&self.uffd).stop == Some(FillStop::Ended) {
            return false;
        }
        if std::mem::take(&mut self.must_wake) {
            self.uffd.wake_all();
        }
        for message in self.uffd.read_messages() {
            match message {
                // The child finds no socket, and ends.
                UffdMessage::Fault(fault) if self.canary.is_connect_back(fault.page) => {
                    self.uffd.zero(fault.page, 1);
                }
                UffdMessage::Fault(fault) => self.kill_or_refuse(fault),
                UffdMessage::Fork(fd) => {
                    let uffd = Userfaultfd::from(fd);
                    // Without random bytes the nonce is predictable. That is harmless: it only
                    // selects the process to kill, with the permissions of the user.
                    let nonce = new_nonce().unwrap_or_default();
                    let canary = Canary { number: service.next_program(), nonce, ..self.canary };
                    let shares = service.agent.descriptors();
                    match shares.charge_reserved(self.tenant, UNSERVED_DESCRIPTORS) {
                        Ok(charge) => forked.push(Self::new(uffd, canary, self.tenant, false, charge)),
                        Err(error) => tracing::error!(%error, "closing the userfaultfd of a forked child"),
                    }
                }
                _ => {}
            }
        }
        true
    }

    /// Kills the process that faults, if it has this memory and its first thread faults. Poisons
    /// the page for any other process that reads this memory: no process would fill the page, and
    /// the memory exists as long as the reader waits.
    ///
    /// Uses a thread, because the proof may wait for a hostile program.
    fn kill_or_refuse(&self, fault: PageFault) {
        let pid = fault.thread;
        if self.is_killing.swap(true, Relaxed) {
            // The thread touches the page again, so that the fault is reported again.
            self.uffd.wake(fault.page);
            return;
        }
        let (canary, tenant, is_killing) = (self.canary, self.tenant, Arc::clone(&self.is_killing));
        let uffd = self.uffd.clone();
        let kill = move || {
            match kill_found(pid, canary, tenant) {
                Ok(()) => tracing::warn!(pid, "killed a process that cannot be served"),
                Err(error) => {
                    tracing::debug!(%error, pid, "did not kill a process that cannot be served");
                    uffd.poison(fault.page);
                }
            }
            is_killing.store(false, Relaxed);
        };
        if let Err(error) = std::thread::Builder::new().name("kill".into()).spawn(kill) {
            tracing::warn!(%error, pid, "cannot kill a process that cannot be served");
            self.is_killing.store(false, Relaxed);
        }
    }
}

/// Kills a process that has the canary, with the permissions of the tenant. The canary is no safe
/// proof here, because it may have been read before.
fn kill_found(pid: u32, canary: Canary, tenant: u32) -> Result<(), ProofError> {
    let process = UnprovenProcess::numbered(pid)?.prove(|| Some(canary))?;
    Ok(kill_as(tenant, process.pidfd())?)
}
