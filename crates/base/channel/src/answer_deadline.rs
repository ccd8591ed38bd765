//! Deadline of a process that queries its agent at intervals.
//!
//! The process may use what the agent's lease protects until a grace time after the latest answer.
//! Afterwards, another host may own it.
//!
//! Pure: time is an argument.

use std::time::Duration;

use crate::boot_time::BootInstant;
use crate::mutation::Mutation;

/// Queries to the agent per grace time.
const QUERIES_PER_GRACE: u32 = 8;

/// The action of a process after a timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeoutAction {
    /// Query the agent.
    Query,
    /// Continue without the agent: [`AnswerDeadline::end`] has passed.
    Expire,
}

/// The times of a process's queries and of the latest answer.
#[derive(Clone, Copy, Debug)]
pub struct AnswerDeadline {
    grace: Duration,
    /// The time of the latest query that was answered. The time of the answer does not count,
    /// because a late answer proves only that the agent ran at the query.
    answered: BootInstant,
    /// The time of the query that has no answer yet.
    asked: Option<BootInstant>,
}

impl AnswerDeadline {
    /// Creates the deadline of a process that may be without an answer for `grace`, and whose
    /// latest answered query was sent at `answered`.
    #[must_use]
    pub const fn new(grace: Duration, answered: BootInstant) -> Self {
        Self { grace, answered, asked: None }
    }

    /// The end of the grace time after the latest answered query.
    #[must_use]
    pub fn end(&self) -> BootInstant {
        self.answered + self.grace
    }

    /// The time until which to wait for an answer, or until the next query.
    #[must_use]
    pub fn wait_until(&self, now: BootInstant) -> BootInstant {
        let interval = self.grace / QUERIES_PER_GRACE;
        match self.asked {
            Some(asked) if Mutation::WaitPastDeadline.is_active() => asked + 2 * self.grace,
            Some(asked) => self.end().max(asked + interval),
            // After the end, this process was stopped, and queries at once.
            None => self.end().min(now + interval),
        }
    }

    /// Returns the action when no packet has arrived until [`Self::wait_until`]. The caller must
    /// perform it at once.
    pub fn handle_timeout(&mut self, now: BootInstant) -> TimeoutAction {
        if self.asked.is_some() {
            return TimeoutAction::Expire;
        }
        self.asked = Some(now);
        TimeoutAction::Query
    }

    /// Records that the agent has answered the query.
    pub const fn handle_answer(&mut self) {
        if let Some(asked) = self.asked.take() {
            self.answered = asked;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(8);

    fn at(seconds: u64) -> BootInstant {
        BootInstant::START + Duration::from_secs(seconds)
    }

    #[test]
    fn a_process_queries_at_intervals_and_expires_after_the_grace_time() {
        let mut deadline = AnswerDeadline::new(GRACE, at(100));
        assert_eq!(deadline.wait_until(at(100)), at(101));
        assert_eq!(deadline.handle_timeout(at(101)), TimeoutAction::Query);
        assert_eq!(deadline.wait_until(at(101)), at(108));
        // The answer is late: the grace time begins at the query.
        deadline.handle_answer();
        assert_eq!(deadline.end(), at(109));
        assert_eq!(deadline.handle_timeout(at(107)), TimeoutAction::Query);
        assert_eq!(deadline.wait_until(at(107)), at(109));
        assert_eq!(deadline.handle_timeout(at(109)), TimeoutAction::Expire);
    }

    #[test]
    fn a_process_that_was_stopped_for_long_queries_before_it_expires() {
        let mut deadline = AnswerDeadline::new(GRACE, at(100));
        assert!(deadline.wait_until(at(500)) <= at(500));
        assert_eq!(deadline.handle_timeout(at(500)), TimeoutAction::Query);
        assert_eq!(deadline.wait_until(at(500)), at(501));
        deadline.handle_answer();
        assert_eq!(deadline.end(), at(508));
    }
}
