//! An endpoint that the pool shares with its user.
//!
//! Both have operations in flight on it at the same time, and each polls. Completions of the user's
//! operations that the pool polls are kept until the user polls.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_fabric::{Completion, Endpoint, PostError, Work, forward_endpoint};

/// Completions of the user's operations that the pool has polled.
#[derive(Debug, Default)]
pub(crate) struct UserCompletions {
    /// Length of the queue, so that polling an empty queue takes no lock.
    count: AtomicUsize,
    queue: Mutex<VecDeque<Completion>>,
}

impl UserCompletions {
    /// Puts completions in front of the queue, in their order.
    pub(crate) fn put_back(&self, completions: &mut Vec<Completion>) {
        if completions.is_empty() {
            return;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        for completion in completions.drain(..).rev() {
            queue.push_front(completion);
        }
        self.count.store(queue.len(), Ordering::Release);
    }

    fn drain(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        if self.len() == 0 {
            return 0;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
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
    kept: Arc<UserCompletions>,
}

impl SharedEndpoint {
    /// Wraps an endpoint; the pool puts completions into `kept`.
    pub(crate) fn new(inner: Box<dyn Endpoint>, kept: Arc<UserCompletions>) -> Self {
        Self { inner, kept }
    }
}

impl Endpoint for SharedEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        // The queue of kept completions is as bounded as the endpoint's: the user must poll first.
        if self.kept.len() >= self.inner.limits().queue_depth {
            return Err(PostError::QueueFull { accepted: 0 });
        }
        self.inner.post(batch)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let kept = self.kept.drain(out, max);
        if kept == max { kept } else { kept + self.inner.poll(out, max - kept) }
    }

    fn wait(&mut self, patience: Duration) {
        if self.kept.len() == 0 {
            self.inner.wait(patience);
        }
    }

    forward_endpoint!(
        inner: poll_fd, register_local, receive, regions, limits, is_broken, is_away, give_up, drain_handle
    );
}
