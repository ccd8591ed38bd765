//! The items that the keeper holds in one share.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use aquifer_channel::kill::kill_as;
use aquifer_channel::socket::wait_readable;
use aquifer_ipc::{HeldItem, HeldKind};

use super::memory;

/// Number of the last descriptors of a program whose process is known: `mem`, `pagemap`, `maps` and
/// pidfd.
const FILES_OF_PROCESS: usize = 4;

#[derive(Debug)]
struct Entry {
    item: HeldItem,
    fds: Vec<OwnedFd>,
    /// The `pagemap` of a program that was killed.
    pagemap: Option<OwnedFd>,
}

/// The items of a share in the order of their kinds: in the agent's share the host is first, then
/// runs, then programs.
#[derive(Debug, Default)]
pub(super) struct ShareItems {
    entries: BTreeMap<(HeldKind, u64), Entry>,
}

impl ShareItems {
    /// True if the share has no item.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of programs.
    pub fn program_count(&self) -> usize {
        self.entries.keys().filter(|(kind, _)| *kind == HeldKind::Program).count()
    }

    /// Stores an item. Replaces an item of the same kind and number.
    ///
    /// An orphan is always stored, because its process would read zeros without it. There are at
    /// most as many orphans as programs of the agent that has died.
    ///
    /// # Errors
    /// `items_max`, if the share has that many items.
    pub fn store(&mut self, item: HeldItem, fds: Vec<OwnedFd>, items_max: usize) -> Result<(), usize> {
        let key = (item.kind, item.id);
        let is_full = self.entries.len() >= items_max && item.kind != HeldKind::Orphan;
        if is_full && !self.entries.contains_key(&key) {
            return Err(items_max);
        }
        self.entries.insert(key, Entry { item, fds, pagemap: None });
        Ok(())
    }

    /// Removes an item and closes its descriptors.
    pub fn remove(&mut self, kind: HeldKind, id: u64) {
        close(self.entries.remove(&(kind, id)).into_iter().collect());
    }

    /// The orphans, with their userfaultfds.
    pub fn orphans(&self) -> Vec<(u64, OwnedFd)> {
        let orphans = self.entries.iter().filter(|((kind, _), _)| *kind == HeldKind::Orphan);
        orphans.filter_map(|((_, id), entry)| Some((*id, entry.fds.first()?.try_clone().ok()?))).collect()
    }

    /// All items with their descriptors.
    pub fn iter(&self) -> impl Iterator<Item = (HeldItem, Vec<BorrowedFd<'_>>)> {
        self.entries.values().map(|entry| (entry.item.clone(), entry.fds.iter().map(AsFd::as_fd).collect()))
    }

    /// Kills all programs.
    ///
    /// The userfaultfds stay open until [`Self::release_ended`]: a program whose userfaultfd is
    /// closed reads zeros. The sockets are closed, because workers may wait for an agent.
    pub fn kill_programs(&mut self) {
        for entry in self.entries.values_mut() {
            entry.kill();
        }
    }

    /// Closes the descriptors of all items except programs that have not ended, or whose memory
    /// another process has.
    pub fn release_ended(&mut self) {
        let is_ended = |(key, entry): (&(HeldKind, u64), &Entry)| (!entry.is_alive()).then_some(*key);
        let ended: Vec<_> = self.entries.iter().filter_map(is_ended).collect();
        close(ended.iter().filter_map(|key| self.entries.remove(key)).collect());
    }
}

/// Closes the descriptors of items in a thread: the last close of a userfaultfd waits for the lock
/// of the memory, and the last close of a large memory takes seconds.
fn close(entries: Vec<Entry>) {
    if !entries.is_empty() {
        // If there is no thread, they are dropped here.
        let _ = std::thread::Builder::new().name("close".into()).spawn(move || drop(entries));
    }
}

impl Entry {
    /// The pidfd of a program whose process is known.
    fn pidfd(&self) -> Option<&OwnedFd> {
        let is_known = self.item.kind == HeldKind::Program && self.item.pid != 0;
        self.fds.last().filter(|_| is_known)
    }

    /// True if a process may still use the descriptors; also if the process was never known.
    fn is_alive(&self) -> bool {
        match self.item.kind {
            HeldKind::Program | HeldKind::Orphan => match (&self.pagemap, self.pidfd()) {
                (Some(pagemap), _) => memory::exists(pagemap),
                (None, Some(pidfd)) => !wait_readable(&[pidfd], Duration::ZERO).unwrap_or(true),
                (None, None) => true,
            },
            HeldKind::Host
            | HeldKind::Run
            | HeldKind::Session
            | HeldKind::Node
            | HeldKind::Heap
            | HeldKind::Segment
            | HeldKind::Partition => false,
        }
    }

    /// Kills a program whose process is known, and keeps its userfaultfd and `pagemap` only.
    fn kill(&mut self) {
        let Some(pidfd) = self.pidfd() else { return };
        let (pid, uid) = (self.item.pid, self.item.uid);
        match kill_as(uid, pidfd.as_fd()) {
            Ok(()) => tracing::error!(pid, "killed a program: no agent came back within the grace time"),
            Err(error) => tracing::warn!(%error, pid, uid, "cannot kill a program"),
        }
        if self.fds.len() > FILES_OF_PROCESS {
            let pagemap = self.fds.len() - FILES_OF_PROCESS + 1;
            self.pagemap = Some(self.fds.swap_remove(pagemap));
            self.fds.truncate(1);
            self.item.pid = 0;
        }
    }
}
