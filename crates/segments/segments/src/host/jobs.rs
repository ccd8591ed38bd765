//! The queue of work that must not be done in the thread that answers messages.

use std::sync::mpsc::{Receiver, Sender, channel};

use parking_lot::Mutex;

use super::SegmentKey;
use aquifer_ownership::Output;

/// Work for the thread of a host's segments.
#[derive(Debug)]
pub(super) enum Job {
    /// Carries out what a holder has decided.
    CarryOut(SegmentKey, Vec<Output>),
    /// Frees the copies of generations up to this one.
    Release(SegmentKey, u64),
}

/// The sending end of the queue; `None` after its end.
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
            // It fails if the worker has ended.
            let _is_sent = sender.send(job);
        }
    }

    /// Ends the queue: the worker ends after the jobs in it.
    pub fn end(&self) {
        self.0.lock().take();
    }

    pub fn has_ended(&self) -> bool {
        self.0.lock().is_none()
    }
}
