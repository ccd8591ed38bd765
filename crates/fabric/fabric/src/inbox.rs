//! Messages of all initiators that a target has not received yet, for providers over a network.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::target::Sender;

/// The number of unreceived messages of one session. Changed only under the inbox's lock.
pub type UntakenCount = Arc<AtomicUsize>;

/// Messages in the order of their arrival.
#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<InboxState>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    messages: VecDeque<InboxMessage>,
    /// Threads in [`Inbox::wait`].
    waiting: usize,
    /// Sessions that ended with unreceived messages, oldest first.
    ended: VecDeque<UntakenCount>,
}

#[derive(Debug)]
struct InboxMessage {
    from: Sender,
    untaken: UntakenCount,
    bytes: Vec<u8>,
}

impl Inbox {
    /// Stores a message of a session. Returns false if the session has `depth` unreceived messages.
    pub fn deliver(&self, from: Sender, untaken: &UntakenCount, bytes: Vec<u8>, depth: usize) -> bool {
        let mut state = self.state.lock();
        if untaken.load(Ordering::Relaxed) >= depth {
            return false;
        }
        untaken.fetch_add(1, Ordering::Relaxed);
        state.messages.push_back(InboxMessage { from, untaken: Arc::clone(untaken), bytes });
        // Notifying costs a system call.
        if state.waiting > 0 {
            self.arrived.notify_all();
        }
        true
    }

    /// Takes the oldest message and appends it to `out`. Returns the sender.
    pub fn receive(&self, out: &mut Vec<u8>) -> Option<Sender> {
        let InboxMessage { from, untaken, bytes } = self.state.lock().messages.pop_front()?;
        untaken.fetch_sub(1, Ordering::Relaxed);
        out.extend_from_slice(&bytes);
        Some(from)
    }

    /// Keeps the unreceived messages of a session that has ended. If more than `ended_max` ended
    /// sessions have some, the messages of the oldest session are dropped.
    pub fn end(&self, untaken: &UntakenCount, ended_max: usize) {
        let mut state = self.state.lock();
        let InboxState { messages, ended, .. } = &mut *state;
        if untaken.load(Ordering::Relaxed) == 0 {
            return;
        }
        ended.push_back(Arc::clone(untaken));
        if ended.len() <= ended_max {
            return;
        }
        ended.retain(|ended| ended.load(Ordering::Relaxed) > 0);
        if ended.len() > ended_max
            && let Some(oldest) = ended.pop_front()
        {
            messages.retain(|message| !Arc::ptr_eq(&message.untaken, &oldest));
        }
    }

    /// Waits until there is a message, for at most `timeout`.
    pub fn wait(&self, timeout: Duration) {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.messages.is_empty() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match left {
                Some(Duration::ZERO) => break,
                Some(left) => drop(self.arrived.wait_for(&mut state, left)),
                None => self.arrived.wait(&mut state),
            }
        }
        state.waiting -= 1;
    }
}
