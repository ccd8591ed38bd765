//! The queue of jobs that must not be done in the thread that answers messages.

use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

use super::SegmentKey;
use aquifer_ownership::Output;

/// A job of the worker thread of a host's segments.
#[derive(Debug)]
pub(super) enum Job {
    /// Carry out the outputs of a holder.
    CarryOut(SegmentKey, Vec<Output>),
    /// Free the copies of the segment's generations up to the given one.
    Release(SegmentKey, u64),
}

/// The sending end of the queue; `None` after [`Self::end`].
#[derive(Debug)]
pub(super) struct JobQueue(Mutex<Option<Sender<Job>>>);

impl JobQueue {
    pub fn new() -> (Self, Receiver<Job>) {
        let (sender, receiver) = channel();
        (Self(Mutex::new(Some(sender))), receiver)
    }

    /// Appends a job, which is dropped if the queue has ended.
    pub fn push(&self, job: Job) {
        if let Some(sender) = &*self.0.lock() {
            // Fails if the worker has ended.
            let _is_sent = sender.send(job);
        }
    }

    /// Closes the queue. The worker ends when it has done the jobs in it.
    pub fn end(&self) {
        self.0.lock().take();
    }

    pub fn has_ended(&self) -> bool {
        self.0.lock().is_none()
    }
}
