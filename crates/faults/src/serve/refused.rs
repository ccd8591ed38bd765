//! Forked children that cannot be served, and must end.
//!
//! Their userfaultfds stay open: when one is closed, missing pages read as zeros. The canary is
//! filled, so that the child says hello and is refused with the reason; then the shim ends it.
//! A child that faults on another page first is identified by that fault, and killed.

use std::sync::{Mutex, PoisonError};

use aquifer_ipc::HeldKind;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::PagingService;
use super::canary::Canary;
use crate::kernel::{FillStop, UffdMessage};
use crate::uffd::Userfaultfd;

/// Children that were refused and may still be alive.
#[derive(Debug, Default)]
pub(super) struct RefusedChildren(Mutex<Vec<RefusedChild>>);

/// One refused child.
#[derive(Debug)]
pub(super) struct RefusedChild {
    pub uffd: Userfaultfd,
    pub canary: Canary,
    /// Whether the keeper holds the child, under the number of its canary.
    pub is_in_keeper: bool,
}

impl RefusedChildren {
    /// Refuses a child. Its run must have an end reason, or not exist.
    pub fn add(&self, child: RefusedChild) {
        child.canary.fill(&child.uffd);
        // A fault that another agent has read is reported once more.
        child.uffd.wake_all();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }

    /// Kills the children that a fault has identified, and drops those that have ended.
    pub fn poll(&self, service: &PagingService) {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut forked = Vec::new();
        children.retain(|child| {
            let may_be_alive = child.poll(&mut forked, || service.next_program());
            if !may_be_alive && child.is_in_keeper {
                service.agent.remove_from_keeper(HeldKind::Program, child.canary.number);
            }
            may_be_alive
        });
        children.append(&mut forked);
    }
}

impl RefusedChild {
    /// Kills the child if a fault has identified it; returns whether it may still be alive.
    ///
    /// Children that it has forked are appended to `forked`.
    fn poll(&self, forked: &mut Vec<Self>, next_number: impl Fn() -> u64) -> bool {
        // Repeated, because the kernel refuses the fill while an event is unread.
        if self.canary.fill(&self.uffd).stop == Some(FillStop::Ended) {
            return false;
        }
        for message in self.uffd.read_messages() {
            match message {
                UffdMessage::Fault(fault) => self.kill_if_own(fault.thread),
                UffdMessage::Fork(fd) => {
                    let uffd = Userfaultfd::from(fd);
                    let canary = Canary { number: next_number(), ..self.canary };
                    forked.push(Self { uffd, canary, is_in_keeper: false });
                }
                _ => {}
            }
        }
        true
    }

    /// Kills a process if it has the child's memory. It must be named by its first thread.
    ///
    /// The pidfd is opened before the canary is read: if the number is reused in between, the
    /// signal goes to the process that has ended, and not to the next one with that number.
    fn kill_if_own(&self, pid: u32) {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(rustix::io::Errno::SRCH);
        let pidfd = number.and_then(|number| pidfd_open(number, PidfdFlags::empty()));
        if self.canary.is_in(pid) {
            log_kill(pid, pidfd.and_then(|pidfd| pidfd_send_signal(pidfd, Signal::KILL)));
        }
    }
}

fn log_kill(pid: u32, killed: rustix::io::Result<()>) {
    match killed {
        Ok(()) => tracing::warn!(pid, "killed a forked child that cannot be served"),
        Err(error) => tracing::debug!(%error, pid, "cannot kill a forked child that cannot be served"),
    }
}
