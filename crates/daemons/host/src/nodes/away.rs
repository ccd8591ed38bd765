//! Nodes that are away: decides when their memory is lost.
//!
//! Pure: time is an argument.

use std::time::{Duration, Instant};

use super::view::PresentNode;
use crate::mutation::Mutation;

/// Interval between attempts to connect to a node that is away, by all threads together.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(100);

/// Longest time between two failed attempts that prove that the node was away in between. An
/// attempt may take half of it.
const ATTEMPT_GAP_MAX: Duration = Duration::from_secs(10);

/// A series of failed attempts to connect to a node, at most [`ATTEMPT_GAP_MAX`] apart, without a
/// success in between.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedAttempts {
    /// The start of the first attempt.
    pub first: Instant,
    /// The start of the latest attempt.
    pub latest: Instant,
}

impl FailedAttempts {
    /// The first failed attempt, begun at `begun`.
    pub const fn new(begun: Instant) -> Self {
        Self { first: begun, latest: begun }
    }

    /// Adds a failed attempt. If the latest one was long before, a new series begins, because the
    /// node may have been back meanwhile.
    pub fn add(&mut self, begun: Instant) {
        if begun.saturating_duration_since(self.latest) > ATTEMPT_GAP_MAX {
            self.first = begun;
        }
        self.latest = self.latest.max(begun);
    }
}

/// A node without a lease whose memory outlives its process.
///
/// No timer decides that the memory is lost: the node may be cut off from the directory and serve,
/// and this host may have been stopped or cut off while the node returned.
#[derive(Debug)]
pub(super) struct AwayNode {
    /// The last address of the node; `None` if unknown.
    last: Option<PresentNode>,
    /// The time for which the memory outlives its process.
    grace: Duration,
    /// The time when this host observed the end of the lease.
    left_at: Instant,
    /// The start of the latest listing without the node.
    absent_at: Option<Instant>,
}

impl AwayNode {
    /// A node that was present until now.
    pub const fn left(last: PresentNode, now: Instant) -> Self {
        Self { grace: last.grace, last: Some(last), left_at: now, absent_at: None }
    }

    /// A node that was away before this process started; `last` is its last address, if known.
    pub const fn unseen(last: Option<PresentNode>, grace: Duration, now: Instant) -> Self {
        Self { last, grace, left_at: now, absent_at: None }
    }

    /// Records that a listing which began at `begun` does not have the node.
    pub const fn note_absence(&mut self, begun: Instant) {
        self.absent_at = Some(begun);
    }

    /// The time until which the node's memory is kept, if the node's process has ended. A process
    /// may outlive its lease, so it counts as ended only from the first failed attempt on.
    fn kept_until(&self, failed: Option<FailedAttempts>) -> Instant {
        let ended_at = failed.map_or(self.left_at, |failed| failed.first.max(self.left_at));
        ended_at + self.grace
    }

    /// Whether the memory is lost: its time has passed, and neither an attempt to connect nor a
    /// listing of the directory, both begun later, has found the node.
    pub fn is_lost(&self, failed: Option<FailedAttempts>, now: Instant) -> bool {
        if Mutation::LoseByTimer.is_active() {
            return now >= self.left_at + self.grace;
        }
        let kept_until = self.kept_until(failed);
        let is_absent = self.absent_at.is_some_and(|begun| begun >= kept_until);
        let is_unreachable = self.last.is_none() || failed.is_some_and(|failed| failed.latest >= kept_until);
        is_absent && is_unreachable
    }

    /// Whether only a listing of the directory can show that the memory is lost, or that the node
    /// has returned.
    pub fn wants_listing(&self, failed: Option<FailedAttempts>, now: Instant) -> bool {
        now >= self.kept_until(failed) && !self.is_lost(failed, now)
    }

    /// The last address of the node, if the next attempt to connect is due.
    pub fn due_attempt(&self, failed: Option<FailedAttempts>, now: Instant) -> Option<&PresentNode> {
        let is_due = failed.is_none_or(|failed| now >= failed.latest + ATTEMPT_INTERVAL);
        self.last.as_ref().filter(|_| is_due && !Mutation::ForgetAddress.is_active())
    }
}
