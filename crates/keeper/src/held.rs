//! What the keeper holds.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use aquifer_channel::socket::wait_readable;
use aquifer_ipc::{HeldItem, HeldKind};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::TICK;

/// Things held at once.
const THINGS_MAX: usize = 65_536;

#[derive(Debug)]
struct Thing {
    put: HeldItem,
    fds: Vec<OwnedFd>,
    /// Of a program whose process is known.
    pidfd: Option<OwnedFd>,
}

/// Everything that is held of a share: of the agent's the host first, then runs, then programs.
#[derive(Debug, Default)]
pub(super) struct Held {
    things: BTreeMap<(HeldKind, u64), Thing>,
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.things.is_empty()
    }

    pub fn programs(&self) -> usize {
        self.things.keys().filter(|(kind, _)| *kind == HeldKind::Program).count()
    }

    /// Hold a thing, in place of what was held under its name.
    pub fn put(&mut self, put: HeldItem, fds: Vec<OwnedFd>) {
        let key = (put.kind, put.id);
        let old = self.things.remove(&key);
        if self.things.len() >= THINGS_MAX {
            tracing::error!(?key, "there is no room for more: should the agent die, this would be lost");
            return;
        }
        let same = old.filter(|old| old.put.pid == put.pid).and_then(|old| old.pidfd);
        let pidfd = same.or_else(|| {
            let pid = i32::try_from(put.pid).ok().and_then(Pid::from_raw)?;
            pidfd_open(pid, PidfdFlags::empty()).ok()
        });
        self.things.insert(key, Thing { put, fds, pidfd });
    }

    pub fn drop(&mut self, kind: HeldKind, id: u64) {
        self.things.remove(&(kind, id));
    }

    /// Everything, with its descriptors, and a program's pidfd behind them if its process is known.
    pub fn iter(&self) -> impl Iterator<Item = (HeldItem, Vec<BorrowedFd<'_>>)> {
        self.things.values().map(|thing| {
            let fds = thing.fds.iter().chain(&thing.pidfd).map(AsFd::as_fd).collect();
            // Without a pidfd the process is as good as unknown: it has ended.
            let pid = if thing.pidfd.is_some() { thing.put.pid } else { 0 };
            (HeldItem { pid, ..thing.put.clone() }, fds)
        })
    }

    /// Kill every program; only then, when nobody is left to read zeros, may descriptors close. Those of programs that could not be
    /// ended stay open as long as this process lives.
    pub fn end_all(&mut self, patience: Duration) {
        for thing in self.things.values() {
            thing.end();
        }
        let deadline = Instant::now() + patience;
        while self.things.values().any(Thing::is_dying) && Instant::now() < deadline {
            std::thread::sleep(TICK);
        }
        self.things.retain(|_, thing| thing.is_alive());
        for (_, thing) in std::mem::take(&mut self.things) {
            std::mem::forget(thing);
        }
    }
}

impl Thing {
    /// A program whose process is unknown counts as alive: its memory may be.
    fn is_alive(&self) -> bool {
        match &self.pidfd {
            Some(pidfd) => !wait_readable(&[pidfd], Duration::ZERO).unwrap_or(true),
            None => match self.put.kind {
                HeldKind::Program => self.put.pid == 0,
                HeldKind::Orphan => true,
                HeldKind::Host | HeldKind::Run | HeldKind::Session | HeldKind::Node => false,
            },
        }
    }

    /// Whether its end can be waited for.
    fn is_dying(&self) -> bool {
        self.pidfd.is_some() && self.is_alive()
    }

    fn end(&self) {
        let Some(pidfd) = &self.pidfd else { return };
        tracing::error!(pid = self.put.pid, "ended: no agent came back for it");
        if let Err(error) = pidfd_send_signal(pidfd, Signal::KILL) {
            tracing::debug!(%error, pid = self.put.pid, "it had ended already");
        }
    }
}
