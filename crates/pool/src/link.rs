//! An endpoint shared by the pool, which waits for its own work, and the pool's user, who has work
//! under way at the same time: completions that one polls and the other expects are kept for it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_fabric::{Completion, Endpoint, PostError, Work, forward_endpoint};

/// Completions of the user that the pool has polled.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Length of the queue, so that polling costs no lock when it is empty.
    count: AtomicUsize,
    queue: Mutex<VecDeque<Completion>>,
}

impl Kept {
    /// Keep completions, in their order, before those that are kept already.
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

    fn take(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        if self.len() == 0 {
            return 0;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = queue.len().min(max);
        out.extend(queue.drain(..taken));
        self.count.store(queue.len(), Ordering::Release);
        taken
    }

    fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }
}

/// The endpoint with its kept completions.
#[derive(Debug)]
pub(crate) struct Link {
    inner: Box<dyn Endpoint>,
    kept: Arc<Kept>,
}

impl Link {
    /// Wrap an endpoint; `kept` is shared with the pool.
    pub(crate) fn new(inner: Box<dyn Endpoint>, kept: Arc<Kept>) -> Self {
        Self { inner, kept }
    }
}

impl Endpoint for Link {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        // So many are kept that the user must poll first: the queue has its bound whatever the pool does.
        if self.kept.len() >= self.inner.limits().queue_depth {
            return Err(PostError::QueueFull { accepted: 0 });
        }
        self.inner.post(batch)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let kept = self.kept.take(out, max);
        if kept == max { kept } else { kept + self.inner.poll(out, max - kept) }
    }

    fn wait(&mut self, patience: Duration) {
        if self.kept.len() == 0 {
            self.inner.wait(patience);
        }
    }

    forward_endpoint!(inner: poll_fd, register_local, receive, regions, limits, is_broken, is_away, late);
}
