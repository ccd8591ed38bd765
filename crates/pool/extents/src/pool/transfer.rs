//! Transfers between extents and the ring's data area.
//!
//! The endpoints read and write the ring's memory directly, so no bytes are copied here.

use std::time::Duration;

use aquifer_fabric::{LocalKey, LocalSlice, PostError, RemoteAddr, Verb, Work, WorkError};
use aquifer_ipc::ring::{DATA_AT, RingStatus};
use aquifer_pool::NodeId;

use super::ConnectedPool;
use crate::core::Transfer;

/// Maximum number of completions that are polled at a time.
pub(super) const COMPLETIONS_MAX: usize = 64;
/// Maximum sleep of an endpoint until the next completion.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// Polls without a completion after which the thread yields the processor, and after which the
/// operations of a broken endpoint count as lost.
const EMPTY_POLLS_MAX: u32 = 256;

/// The outcome of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TransferOutcome {
    Done,
    /// The key does not open the range.
    Refused,
    /// There is no connection, or it broke.
    Broken,
    /// The operation is invalid.
    Failed,
}

impl TransferOutcome {
    fn status(self) -> RingStatus {
        match self {
            Self::Done => RingStatus::Done,
            Self::Refused => RingStatus::Refused,
            Self::Broken => RingStatus::NodeGone,
            Self::Failed => RingStatus::Failed,
        }
    }

    fn of(error: WorkError) -> Self {
        match error {
            WorkError::RemoteAccess => Self::Refused,
            WorkError::LocalAccess
            | WorkError::Misaligned
            | WorkError::TooLong
            | WorkError::ReceiverNotReady
            | WorkError::Storage => Self::Failed,
            WorkError::Fenced
            | WorkError::PeerGone
            | WorkError::Timeout
            | WorkError::Away
            | WorkError::Flushed => Self::Broken,
        }
    }
}

/// Operations on one node.
#[derive(Debug)]
struct NodeQueue {
    node: NodeId,
    work: Vec<Work>,
    posted: usize,
    completed: usize,
    /// Polls without a completion since the connection broke.
    empty_polls: u32,
}

impl NodeQueue {
    fn is_complete(&self) -> bool {
        self.completed == self.work.len()
    }
}

impl ConnectedPool {
    /// Carries out transfers on all nodes at once, and waits for all of them.
    pub(super) fn run_transfers(&mut self, transfers: &[Transfer]) -> Vec<RingStatus> {
        let mut outcomes = vec![TransferOutcome::Broken; transfers.len()];
        for transfer in transfers {
            if !self.ring_keys.contains_key(&transfer.extent.node) {
                self.try_connect(transfer.extent.node);
            }
        }
        let mut queues = self.queues(transfers, &mut outcomes);
        self.run_queues(&mut queues, &mut outcomes);
        for queue in queues {
            let is_broken = self.client.endpoint(queue.node).is_none_or(|endpoint| endpoint.is_broken());
            if is_broken {
                self.disconnect(queue.node);
            }
        }
        outcomes.into_iter().map(TransferOutcome::status).collect()
    }

    fn run_queues(&mut self, queues: &mut [NodeQueue], outcomes: &mut [TransferOutcome]) {
        let mut empty_polls = 0u32;
        while queues.iter().any(|queue| !queue.is_complete()) {
            let mut has_progress = false;
            for queue in &mut *queues {
                has_progress |= self.advance(queue, outcomes);
            }
            empty_polls = if has_progress { 0 } else { empty_polls + 1 };
            if empty_polls > EMPTY_POLLS_MAX {
                std::thread::yield_now();
            }
            if !has_progress {
                let waiting = queues.iter().find(|queue| !queue.is_complete());
                if let Some(endpoint) = waiting.and_then(|queue| self.client.endpoint(queue.node)) {
                    endpoint.wait(WAIT_MAX);
                }
            }
        }
    }

    /// Sorts the transfers by node, and cuts them into operations.
    fn queues(&mut self, transfers: &[Transfer], outcomes: &mut [TransferOutcome]) -> Vec<NodeQueue> {
        let mut queues: Vec<NodeQueue> = Vec::new();
        for ((id, transfer), outcome) in (0u64..).zip(transfers).zip(outcomes) {
            let node = transfer.extent.node;
            let Some((key, endpoint)) = self.ring_keys.get(&node).zip(self.client.endpoint(node)) else {
                continue;
            };
            *outcome = TransferOutcome::Done;
            let at = queues.iter().position(|queue| queue.node == node).unwrap_or_else(|| {
                queues.push(NodeQueue { node, work: Vec::new(), posted: 0, completed: 0, empty_polls: 0 });
                queues.len() - 1
            });
            let bytes_max = endpoint.limits().transfer_bytes_max.clamp(1, 1 << 30);
            let verbs = verbs(transfer, *key, bytes_max);
            queues[at].work.extend(verbs.map(|verb| Work { id, verb, signalled: true }));
        }
        queues
    }

    /// Posts operations that fit into the endpoint's queue, and polls completions. Returns whether
    /// the queue has made progress.
    fn advance(&mut self, queue: &mut NodeQueue, outcomes: &mut [TransferOutcome]) -> bool {
        if queue.is_complete() {
            return false;
        }
        let Some(endpoint) = self.client.endpoint(queue.node) else {
            queue.completed = queue.work.len();
            return true;
        };
        if queue.posted < queue.work.len() {
            queue.posted += match endpoint.post(&queue.work[queue.posted..]) {
                Ok(()) => queue.work.len() - queue.posted,
                Err(PostError::QueueFull { accepted }) => accepted,
            };
        }
        let was_broken = endpoint.is_broken();
        self.completions.clear();
        endpoint.poll(&mut self.completions, COMPLETIONS_MAX);
        for completion in &self.completions {
            queue.completed += 1;
            if let (Err(error), Ok(index)) = (completion.outcome, usize::try_from(completion.id))
                && let Some(outcome) = outcomes.get_mut(index)
            {
                *outcome = TransferOutcome::of(error);
            }
        }
        let has_progress = !self.completions.is_empty();
        queue.empty_polls = if was_broken && !has_progress { queue.empty_polls + 1 } else { 0 };
        // Each accepted operation completes while the endpoint works. A broken endpoint without
        // completions will have none.
        if queue.empty_polls > EMPTY_POLLS_MAX {
            for work in &queue.work {
                outcomes[usize::try_from(work.id).unwrap_or(0)] = TransferOutcome::Broken;
            }
            queue.completed = queue.work.len();
            return true;
        }
        has_progress
    }
}

/// The operations of a transfer, each of at most `bytes_max` bytes.
fn verbs(transfer: &Transfer, key: LocalKey, bytes_max: u32) -> impl Iterator<Item = Verb> {
    let Transfer { extent, range, is_write } = *transfer;
    (0..range.len).step_by(bytes_max as usize).map(move |from| {
        let len = bytes_max.min(range.len - from);
        let local = LocalSlice { key, offset: DATA_AT as u64 + u64::from(range.data + from), len };
        let remote =
            RemoteAddr { addr: extent.addr + u64::from(range.offset) + u64::from(from), key: extent.key };
        if is_write { Verb::Write { local, remote } } else { Verb::Read { local, remote } }
    })
}
