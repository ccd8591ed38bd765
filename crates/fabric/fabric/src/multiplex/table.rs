//! The table of operations in flight and of completions that users have not polled yet. Pure.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::wake::WakeFd;
use crate::work::{Completion, Work};

/// All users and their operations.
#[derive(Debug)]
pub(super) struct WorkTable {
    /// The operation of each identifier that is in use at the endpoint.
    entries: Vec<Option<Entry>>,
    /// Identifiers that are free.
    free: Vec<usize>,
    users: Vec<Option<User>>,
    /// Number of operations so far, which is the number of the last operation.
    posted: u64,
    local_memories: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    user: usize,
    /// The user's identifier.
    id: u64,
    signalled: bool,
    /// The number of the operation.
    number: u64,
}

#[derive(Debug)]
struct User {
    in_flight: usize,
    done: VecDeque<Completion>,
    wake: Arc<OnceLock<WakeFd>>,
    is_dropped: bool,
}

impl WorkTable {
    /// Creates a table for at most `depth` operations in flight.
    pub fn new(depth: usize) -> Self {
        Self {
            entries: vec![None; depth],
            free: (0..depth).collect(),
            users: Vec::new(),
            posted: 0,
            local_memories: 0,
        }
    }

    pub fn add_user(&mut self, wake: Arc<OnceLock<WakeFd>>) -> usize {
        let user = User { in_flight: 0, done: VecDeque::new(), wake, is_dropped: false };
        let at = self.users.iter().position(Option::is_none).unwrap_or_else(|| {
            self.users.push(None);
            self.users.len() - 1
        });
        self.users[at] = Some(user);
        at
    }

    /// Removes a user, now or when its operations in flight are completed.
    pub fn remove_user(&mut self, user: usize) {
        let entry = self.users[user].as_mut().expect("a user is removed once");
        entry.is_dropped = true;
        if entry.in_flight == 0 {
            self.users[user] = None;
        }
    }

    /// Number of users, and of dropped users with operations in flight.
    pub fn users(&self) -> usize {
        self.users.iter().flatten().count()
    }

    pub fn count_local_memory(&mut self) {
        self.local_memories += 1;
    }

    /// Number of local memories that were registered so far, also by users that were dropped.
    pub fn local_memories(&self) -> usize {
        self.local_memories
    }

    /// Number of operations of all users that are in flight.
    pub fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Number of operations of a user that are in flight, or whose completion it has not polled.
    pub fn pending(&self, user: usize) -> usize {
        self.users[user].as_ref().map_or(0, |user| user.in_flight + user.done.len())
    }

    /// Records an operation. Returns its identifier at the endpoint.
    pub fn insert(&mut self, user: usize, work: &Work) -> u64 {
        let at = self.free.pop().expect("the depths of all users together are the table's");
        self.users[user].as_mut().expect("a user that posts is in the table").in_flight += 1;
        self.posted += 1;
        self.entries[at] = Some(Entry { user, id: work.id, signalled: work.signalled, number: self.posted });
        at as u64
    }

    /// Passes a completion to its user, and wakes it unless it is `caller`.
    pub fn complete(&mut self, completion: &Completion, caller: Option<usize>) {
        let at = usize::try_from(completion.id).expect("the table has chosen the id");
        let entry = self.entries[at].take().expect("an operation completes once");
        self.free.push(at);
        let user = self.users[entry.user].as_mut().expect("a user stays until its operations complete");
        user.in_flight -= 1;
        if user.is_dropped {
            if user.in_flight == 0 {
                self.users[entry.user] = None;
            }
            return;
        }
        if entry.signalled || completion.outcome.is_err() {
            user.done.push_back(Completion { id: entry.id, outcome: completion.outcome });
            if caller != Some(entry.user)
                && let Some(wake) = user.wake.get()
            {
                wake.wake();
            }
        }
    }

    pub fn has_done(&self, user: usize) -> bool {
        self.users[user].as_ref().is_some_and(|user| !user.done.is_empty())
    }

    /// Appends up to `max` completions of a user; returns their number.
    pub fn drain_done(&mut self, user: usize, out: &mut Vec<Completion>, max: usize) -> usize {
        let done = &mut self.users[user].as_mut().expect("a user that polls is in the table").done;
        let count = done.len().min(max);
        out.extend(done.drain(..count));
        count
    }

    /// The numbers of a user's operations in flight.
    pub fn in_flight_of(&self, user: usize) -> Vec<u64> {
        self.entries.iter().flatten().filter(|entry| entry.user == user).map(|entry| entry.number).collect()
    }

    /// Whether one of these operations is in flight.
    pub fn has_any(&self, numbers: &[u64]) -> bool {
        self.entries.iter().flatten().any(|entry| numbers.contains(&entry.number))
    }
}
