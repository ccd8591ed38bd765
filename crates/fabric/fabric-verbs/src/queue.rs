//! The queue of an endpoint's work, from posting to completion.
//!
//! A device does the work of one endpoint in order and reports it in order, so one signalled
//! completion stands for all work that was posted before it. Two rules follow from what devices do
//! not guarantee. A WRITE or an atomic can overtake an earlier READ or atomic unless it is fenced.
//! After a refusal a device executes no further work, so later work is posted again over another
//! connection.

use std::collections::VecDeque;

use aquifer_fabric::work::{Completion, Verb, Work, WorkError};

/// A piece of work and its outcome, if known.
#[derive(Clone, Copy, Debug)]
struct QueuedWork {
    work: Work,
    outcome: Option<Result<u64, WorkError>>,
}

/// The work of one endpoint, numbered from zero.
#[derive(Debug, Default)]
pub(super) struct WorkQueue {
    entries: VecDeque<QueuedWork>,
    /// Number of the first entry.
    first: u64,
    /// Number of the first entry that was not posted to the device.
    next: u64,
    /// One more than the number of the last READ, and of the last atomic, that the device may not
    /// have finished.
    reads_until: u64,
    atomics_until: u64,
}

impl WorkQueue {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn push(&mut self, work: Work) {
        self.entries.push_back(QueuedWork { work, outcome: None });
    }

    /// The next work to be posted, with its number.
    pub fn next(&self) -> Option<(u64, Work)> {
        Some((self.next, self.entries.get(self.place(self.next)?)?.work))
    }

    /// Completes the next work without the device.
    pub fn complete_next(&mut self, outcome: Result<u64, WorkError>) {
        self.complete(self.next, outcome);
        self.skip_to_next();
    }

    /// Advances to the next work without an outcome. After a repost, work behind an unanswered
    /// message may be done already.
    fn skip_to_next(&mut self) {
        self.next += 1;
        self.skip_completed();
    }

    fn skip_completed(&mut self) {
        let behind = self.place(self.next).unwrap_or(self.entries.len());
        let known = self.entries.iter().skip(behind).take_while(|entry| entry.outcome.is_some()).count();
        self.next += known as u64;
    }

    /// Marks the next work as posted. Returns whether it must be fenced.
    pub fn post_next(&mut self) -> bool {
        let Some((number, work)) = self.next() else { return false };
        self.skip_to_next();
        let is_read = matches!(work.verb, Verb::Read { .. });
        let is_atomic = matches!(work.verb, Verb::CompareSwap { .. } | Verb::FetchAdd { .. });
        let must_wait =
            !is_read && (self.reads_until > self.first || !is_atomic && self.atomics_until > self.first);
        if must_wait {
            self.reads_until = 0;
            self.atomics_until = 0;
        }
        if is_read {
            self.reads_until = number + 1;
        }
        if is_atomic {
            self.atomics_until = number + 1;
        }
        must_wait
    }

    /// Completes all work up to and including `number`. `outcome` returns the value of each piece
    /// of work without an outcome, or `None` if another message reports it.
    pub fn done_through(&mut self, number: u64, mut outcome: impl FnMut(u64, &Work) -> Option<u64>) {
        let Some(last) = self.place(number) else { return };
        for (place, entry) in self.entries.iter_mut().take(last + 1).enumerate() {
            let number = self.first + place as u64;
            if entry.outcome.is_none() {
                entry.outcome = outcome(number, &entry.work).map(Ok);
            }
        }
    }

    /// Completes one piece of work.
    pub fn complete(&mut self, number: u64, outcome: Result<u64, WorkError>) {
        if let Some(entry) = self.place(number).and_then(|place| self.entries.get_mut(place)) {
            entry.outcome.get_or_insert(outcome);
        }
    }

    /// Resets all work without an outcome to be posted again. The device must not have done any of
    /// it.
    pub fn repost_all(&mut self) {
        self.next = self.first;
        self.skip_completed();
        self.reads_until = 0;
        self.atomics_until = 0;
    }

    /// Fails all work without an outcome. The first fails with the cause, the others are flushed.
    /// Returns whether there was any.
    pub fn fail_all(&mut self, cause: WorkError) -> bool {
        let mut cause = Some(cause);
        for entry in &mut self.entries {
            entry.outcome.get_or_insert_with(|| Err(cause.take().unwrap_or(WorkError::Flushed)));
        }
        self.next = self.first + self.entries.len() as u64;
        cause.is_none()
    }

    /// Completes a message by the target's answer.
    pub fn complete_message(&mut self, number: u64, had_room: bool) {
        if let Some(Work { verb: Verb::Send { local }, .. }) = self.work(number) {
            self.complete(
                number,
                if had_room { Ok(u64::from(local.len)) } else { Err(WorkError::ReceiverNotReady) },
            );
        }
    }

    /// The work with the given number.
    pub fn work(&self, number: u64) -> Option<Work> {
        Some(self.entries.get(self.place(number)?)?.work)
    }

    /// The number of the oldest work that was not polled. All work before it has ended.
    pub fn done(&self) -> u64 {
        self.first
    }

    /// Whether the oldest work has an outcome.
    pub fn has_completions(&self) -> bool {
        self.entries.front().is_some_and(|entry| entry.outcome.is_some())
    }

    /// Appends up to `max` completions to `out`, in order. Returns their number.
    pub fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut count = 0;
        while count < max
            && let Some(QueuedWork { work, outcome: Some(outcome) }) = self.entries.front().copied()
        {
            self.entries.pop_front();
            self.first += 1;
            if work.signalled || outcome.is_err() {
                out.push(Completion { id: work.id, outcome });
                count += 1;
            }
        }
        self.next = self.next.max(self.first);
        count
    }

    fn place(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.first)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_fabric::work::{Key, LocalKey, LocalSlice, RemoteAddr};

    const LOCAL: LocalSlice = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    const REMOTE: RemoteAddr = RemoteAddr { addr: 0, key: Key(1) };
    const READ: Verb = Verb::Read { local: LOCAL, remote: REMOTE };
    const WRITE: Verb = Verb::Write { local: LOCAL, remote: REMOTE };
    const ADD: Verb = Verb::FetchAdd { remote: REMOTE, add: 1 };
    const SEND: Verb = Verb::Send { local: LOCAL };

    fn queue(verbs: &[Verb]) -> WorkQueue {
        let mut queue = WorkQueue::default();
        for (id, verb) in (0..).zip(verbs) {
            queue.push(Work { id, verb: *verb, signalled: true });
        }
        queue
    }

    fn completed(queue: &mut WorkQueue) -> Vec<(u64, Result<u64, WorkError>)> {
        let mut out = Vec::new();
        queue.poll(&mut out, 100);
        out.iter().map(|done| (done.id, done.outcome)).collect()
    }

    #[test]
    fn work_that_could_overtake_is_fenced_once() {
        let mut given = queue(&[WRITE, READ, READ, WRITE, WRITE, ADD, READ, ADD, ADD, SEND]);
        let fenced: Vec<bool> = (0..10).map(|_| given.post_next()).collect();
        assert_eq!(fenced, [false, false, false, true, false, false, false, true, false, true]);
        let mut after = queue(&[READ, WRITE]);
        after.post_next();
        after.done_through(0, |_, _| Some(8));
        assert_eq!(completed(&mut after), [(0, Ok(8))]);
        assert!(!after.post_next(), "the READ is done");
    }

    #[test]
    fn one_completion_stands_for_all_before_it_but_not_for_messages() {
        let mut queue = queue(&[WRITE, SEND, READ]);
        while queue.next().is_some_and(|(number, _)| number < 3) {
            queue.post_next();
        }
        queue.done_through(2, |number, work| (work.verb != SEND).then_some(number));
        assert_eq!(completed(&mut queue), [(0, Ok(0))]);
        queue.complete_message(1, false);
        assert_eq!(completed(&mut queue), [(1, Err(WorkError::ReceiverNotReady)), (2, Ok(2))]);
        assert_eq!((queue.len(), queue.done()), (0, 3));
    }

    #[test]
    fn work_behind_a_refusal_is_posted_again_in_order() {
        let mut queue = queue(&[WRITE, READ, ADD, WRITE]);
        while queue.next().is_some_and(|(number, _)| number < 3) {
            queue.post_next();
        }
        queue.done_through(0, |_, _| Some(8));
        queue.complete(1, Err(WorkError::RemoteAccess));
        queue.repost_all();
        assert_eq!(queue.next().map(|(number, _)| number), Some(2));
        assert_eq!(completed(&mut queue), [(0, Ok(8)), (1, Err(WorkError::RemoteAccess))]);
        assert!(!queue.post_next());
        assert!(queue.post_next(), "the WRITE waits for the atomic");
    }

    #[test]
    fn done_work_behind_an_unanswered_message_is_not_posted_again() {
        let mut queue = queue(&[SEND, ADD, READ, WRITE]);
        while queue.next().is_some() {
            queue.post_next();
        }
        queue.done_through(1, |_, work| (work.verb == ADD).then_some(8));
        queue.complete(2, Err(WorkError::RemoteAccess));
        queue.repost_all();
        let mut again = Vec::new();
        while let Some((number, _)) = queue.next() {
            queue.post_next();
            again.push(number);
        }
        assert_eq!(again, [0, 3]);
    }

    #[test]
    fn the_first_work_without_an_outcome_gets_the_cause() {
        let mut queue = queue(&[WRITE, WRITE, WRITE]);
        queue.post_next();
        queue.done_through(0, |_, _| Some(8));
        assert!(queue.fail_all(WorkError::PeerGone));
        let gone = [(0, Ok(8)), (1, Err(WorkError::PeerGone)), (2, Err(WorkError::Flushed))];
        assert_eq!(completed(&mut queue), gone);
        assert!(!queue.fail_all(WorkError::PeerGone), "all work has an outcome");
    }

    #[test]
    fn unsignalled_work_completes_only_if_it_fails() {
        let mut queue = WorkQueue::default();
        for id in 0..3 {
            queue.push(Work { id, verb: WRITE, signalled: false });
            queue.post_next();
        }
        queue.complete(1, Err(WorkError::RemoteAccess));
        queue.done_through(2, |_, _| Some(8));
        assert_eq!(completed(&mut queue), [(1, Err(WorkError::RemoteAccess))]);
        assert_eq!(queue.len(), 0);
    }
}
