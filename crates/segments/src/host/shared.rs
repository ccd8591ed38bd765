//! What the parts of a host share.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use aquifer_directory::{DirectoryError, LeaseId};
use aquifer_fabric::tcp::TcpTarget;
use aquifer_fabric::{ClusterKey, Identity};

use super::SegmentKey;
use super::memory::SegmentMemory;
use super::peer::{Lane, Peer};
use super::registry::Registry;
use super::wire::{Ask, CopyPlace, Request};
use crate::ownership::{Holder, Holding, Life, Message, Output, Stage};
use crate::pulling::Puller;
use crate::pulling::lineage::LINKS_MAX;

/// Connections to other agents.
type Peers = HashMap<(Life, Lane), Arc<Mutex<Peer>>>;

#[derive(Debug)]
pub(super) struct HostShared {
    pub own: Life,
    pub identity: Identity,
    pub key: ClusterKey,
    pub registry: Registry,
    pub target: TcpTarget,
    pub segments: Mutex<BTreeMap<SegmentKey, Arc<Mutex<Segment>>>>,
    pub peers: Mutex<Peers>,
    /// The host's lease, with which its processes end.
    pub lease: LeaseId,
    /// The processes that accept segments, by tenant and name.
    pub processes: Mutex<BTreeSet<(u32, String)>>,
    /// What has arrived for them.
    pub arrived: Mutex<VecDeque<(String, SegmentKey)>>,
    pub has_arrived: Condvar,
    /// For the worker; `None` at the end.
    pub jobs: Mutex<Option<Sender<Job>>>,
}

/// Work that must not be done in the thread that answers messages.
#[derive(Debug)]
pub(super) enum Job {
    CarryOut(SegmentKey, Vec<Output>),
    /// The copies of generations up to this one are not needed.
    Release(SegmentKey, u64),
}

#[derive(Debug)]
pub(super) struct Segment {
    pub holder: Holder,
    /// Absent if it has left for good.
    pub memory: Option<SegmentMemory>,
    /// The copies, the newest first; the first is its own while it owns.
    pub copies: Vec<CopyPlace>,
    /// While pages are elsewhere.
    pub puller: Option<Puller>,
    /// The process that is to own it: after a hand-over from here or to here.
    pub process: String,
}

impl Segment {
    /// Whether the directory must be asked or told something before it can be handed over.
    pub(super) fn is_unsettled(&self) -> bool {
        matches!(
            self.holder.holding(),
            Holding::Sent { .. } | Holding::Owned { stage: Stage::Unconfirmed | Stage::Unknown, .. }
        )
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        self.memory.as_ref().map(SegmentMemory::bytes)
    }

    /// The message that a request is; `None` if it must be declined without a step.
    pub(super) fn admitted(&self, request: &Request) -> Option<Message> {
        let message = request.message()?;
        let is_idle = self.puller.as_ref().is_none_or(Puller::is_idle);
        Some(match &request.ask {
            // Its pages are still on their way here from the last time: as if the number was used.
            Ask::Prepare { bytes, .. } if !is_idle || self.bytes() != Some(*bytes) => Message::Prepare(0),
            // It cannot be accepted, so it never will be.
            Ask::Transfer { generation, copies } if copies.is_empty() || copies.len() >= LINKS_MAX => {
                Message::Query(*generation)
            }
            _ => message,
        })
    }
}

pub(super) fn warn_of_directory(error: &DirectoryError) {
    tracing::warn!(%error, "the directory failed during a hand-over");
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
