//! Endpoints of a host that nodes have fenced.
//!
//! A node fences a host because the host's lease has ended: the host was stopped, or cut off from
//! the directory. Its memory is not lost by that. Until other hosts free it, the next process of
//! the host resumes it with a new epoch, as after a crash. So the operations of the fenced process
//! wait until it ends, as they would for a node that is away.

use std::os::fd::OwnedFd;
use std::time::Duration;

use aquifer_fabric::reconnecting::AwayPolicy;
use aquifer_fabric::{Completion, Endpoint, PollFd, PostError, Work, WorkError, forward_endpoint};
use aquifer_pool::NodeId;
use rustix::event::{EventfdFlags, PollFlags, eventfd};

/// What becomes of the operations of a host that a node has fenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterFence {
    /// They wait for the end of this process. The next one resumes the host.
    Wait,
    /// They fail. No process resumes the host.
    Fail,
}

/// Longest sleep in a wait for a completion that cannot come.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// An endpoint on which no operation fails because of a fence.
///
/// With [`AwayPolicy::Wait`] operations that the fence has stopped never complete. With
/// [`AwayPolicy::Fail`] they end with [`WorkError::Away`].
#[derive(Debug)]
pub(super) struct FenceTolerant {
    endpoint: Box<dyn Endpoint>,
    node: NodeId,
    policy: AwayPolicy,
    is_fenced: bool,
    /// A descriptor that never becomes readable. It is what is polled while operations wait.
    unreadable: Option<OwnedFd>,
}

impl FenceTolerant {
    pub fn new(endpoint: Box<dyn Endpoint>, node: NodeId, policy: AwayPolicy) -> Self {
        Self { endpoint, node, policy, is_fenced: false, unreadable: None }
    }

    /// Whether operations wait for the end of this process.
    fn is_holding(&self) -> bool {
        self.is_fenced && self.policy == AwayPolicy::Wait
    }

    /// Notes a fence, and replaces or removes the failures among the completions from `start` on.
    fn handle_fence(&mut self, completions: &mut Vec<Completion>, start: usize) {
        let is_fence = |completion: &Completion| completion.outcome == Err(WorkError::Fenced);
        if !self.is_fenced && completions[start..].iter().any(is_fence) {
            self.is_fenced = true;
            // Without one, a thread that waits would poll without a pause until this process ends.
            self.unreadable = eventfd(0, EventfdFlags::CLOEXEC).ok();
            tracing::debug!(node = self.node.0, policy = ?self.policy, "a memory node has fenced this host");
        }
        if !self.is_fenced {
            return;
        }
        for completion in &mut completions[start..] {
            completion.outcome = completion.outcome.map_err(|_| WorkError::Away);
        }
        if self.policy == AwayPolicy::Wait {
            let ended = completions.split_off(start);
            completions.extend(ended.into_iter().filter(|completion| completion.outcome.is_ok()));
        }
    }
}

impl Endpoint for FenceTolerant {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        if self.is_holding() { Ok(()) } else { self.endpoint.post(batch) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let start = out.len();
        if self.endpoint.poll(out, max) > 0 && out[start..].iter().any(|ended| ended.outcome.is_err()) {
            self.handle_fence(out, start);
        }
        out.len() - start
    }

    fn wait(&mut self, timeout: Duration) {
        if self.is_holding() {
            std::thread::sleep(timeout.min(SLEEP_MAX));
        } else {
            self.endpoint.wait(timeout);
        }
    }

    fn poll_fd(&self) -> Option<PollFd<'_>> {
        if self.is_holding() {
            return self.unreadable.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
        }
        self.endpoint.poll_fd()
    }

    fn is_broken(&self) -> bool {
        !self.is_fenced && self.endpoint.is_broken()
    }

    fn is_away(&self) -> bool {
        self.is_fenced || self.endpoint.is_away()
    }

    forward_endpoint!(endpoint: register_local, receive, regions, limits, give_up, drain_handle);
}
