//! An endpoint that the pool shares with its user.
//!
//! Both have operations in flight on it at the same time, and each polls. Completions of the user's
//! operations that the pool polls are kept until the user polls.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use aquifer_fabric::{Completion, Endpoint, PostError, Work, forward_endpoint};
use parking_lot::Mutex;

/// State of a shared endpoint that the pool and the endpoint both use.
#[derive(Debug, Default)]
pub(crate) struct SharedState {
    /// Completions of the user's operations that the pool has polled.
    queue: Mutex<VecDeque<Completion>>,
    /// Length of the queue, so that polling an empty queue takes no lock.
    count: AtomicUsize,
    /// Whether operations were posted while the connection was up, since the last check.
    has_posted: AtomicBool,
}

impl SharedState {
    /// Whether operations were posted while the connection was up, since this was called last. If
    /// the connection is down now, it has broken since.
    pub(crate) fn pop_has_posted(&self) -> bool {
        self.has_posted.swap(false, Ordering::Relaxed)
    }

    /// Puts completions in front of the queue, in their order.
    pub(crate) fn put_back(&self, completions: &mut Vec<Completion>) {
        if completions.is_empty() {
            return;
        }
        let mut queue = self.queue.lock();
        for completion in completions.drain(..).rev() {
            queue.push_front(completion);
        }
        self.count.store(queue.len(), Ordering::Release);
    }

    fn drain(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        if self.len() == 0 {
            return 0;
        }
        let mut queue = self.queue.lock();
        let drained = queue.len().min(max);
        out.extend(queue.drain(..drained));
        self.count.store(queue.len(), Ordering::Release);
        drained
    }

    fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }
}

/// The user's view of the endpoint: a poll returns kept completions first.
#[derive(Debug)]
pub(crate) struct SharedEndpoint {
    inner: Box<dyn Endpoint>,
    state: Arc<SharedState>,
}

impl SharedEndpoint {
    /// Wraps an endpoint.
    pub(crate) fn new(inner: Box<dyn Endpoint>, state: Arc<SharedState>) -> Self {
        Self { inner, state }
    }
}

impl Endpoint for SharedEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        // The queue of kept completions has the endpoint's bound: the user must poll first.
        if self.state.len() >= self.inner.limits().queue_depth {
            return Err(PostError::QueueFull { accepted: 0 });
        }
        let posted = self.inner.post(batch);
        // An endpoint that was down may reconnect when work is posted.
        if !self.inner.is_away() && !self.inner.is_broken() {
            self.state.has_posted.store(true, Ordering::Relaxed);
        }
        posted
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let kept = self.state.drain(out, max);
        if kept == max { kept } else { kept + self.inner.poll(out, max - kept) }
    }

    fn wait(&mut self, timeout: Duration) {
        if self.state.len() == 0 {
            self.inner.wait(timeout);
        }
    }

    forward_endpoint!(
        inner: poll_fd, register_local, receive, regions, limits, is_broken, is_away, treat_as_away,
        drain_handle
    );
}
