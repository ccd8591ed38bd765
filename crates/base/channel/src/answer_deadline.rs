//! Deadline of a process that asks its agent at intervals whether it runs.
//!
//! What the process has by the agent's lease ends a grace time after the latest answer, because
//! other hosts may have it afterwards.
//!
//! Pure: time is an argument.

use std::time::Duration;

use crate::boot_time::BootInstant;
use crate::mutation::Mutation;

/// Questions to the agent in the grace time.
const QUESTIONS: u32 = 8;

/// The next step of a process when no answer has arrived in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterSilence {
    /// Ask the agent.
    Ask,
    /// Go on without the agent: [`AnswerDeadline::end`] has passed.
    GiveUp,
}

/// The questions of a process to its agent, and the latest answer.
#[derive(Clone, Copy, Debug)]
pub struct AnswerDeadline {
    grace: Duration,
    /// When the question was asked that was answered last: a late answer says what was so then.
    answered: BootInstant,
    /// When the question was asked that has no answer yet.
    asked: Option<BootInstant>,
}

impl AnswerDeadline {
    /// The deadline of a process that may be without an answer for `grace`, and whose latest
    /// answer is to a question that was asked at `answered`.
    #[must_use]
    pub const fn new(grace: Duration, answered: BootInstant) -> Self {
        Self { grace, answered, asked: None }
    }

    /// The end of what the process has, unless an answer comes.
    #[must_use]
    pub fn end(&self) -> BootInstant {
        self.answered + self.grace
    }

    /// The time until which to wait for an answer, or for the next question.
    #[must_use]
    pub fn wait_until(&self, now: BootInstant) -> BootInstant {
        let interval = self.grace / QUESTIONS;
        match self.asked {
            Some(asked) if Mutation::WaitPastDeadline.is_active() => asked + 2 * self.grace,
            Some(asked) => self.end().max(asked + interval),
            // After the end, this process was stopped, and asks at once.
            None => self.end().min(now + interval),
        }
    }

    /// Says what to do when nothing has arrived until [`Self::wait_until`]. The caller then asks at
    /// once, or gives up.
    pub fn note_silence(&mut self, now: BootInstant) -> AfterSilence {
        if self.asked.is_some() {
            return AfterSilence::GiveUp;
        }
        self.asked = Some(now);
        AfterSilence::Ask
    }

    /// The agent has answered.
    pub const fn note_answer(&mut self) {
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
    fn a_process_asks_at_intervals_and_gives_up_after_the_grace_time() {
        let mut deadline = AnswerDeadline::new(GRACE, at(100));
        assert_eq!(deadline.wait_until(at(100)), at(101));
        assert_eq!(deadline.note_silence(at(101)), AfterSilence::Ask);
        assert_eq!(deadline.wait_until(at(101)), at(108));
        // The answer is late: it says what was so when it was asked for.
        deadline.note_answer();
        assert_eq!(deadline.end(), at(109));
        assert_eq!(deadline.note_silence(at(107)), AfterSilence::Ask);
        assert_eq!(deadline.wait_until(at(107)), at(109));
        assert_eq!(deadline.note_silence(at(109)), AfterSilence::GiveUp);
    }

    #[test]
    fn a_process_that_was_stopped_for_long_asks_before_it_gives_up() {
        let mut deadline = AnswerDeadline::new(GRACE, at(100));
        assert!(deadline.wait_until(at(500)) <= at(500));
        assert_eq!(deadline.note_silence(at(500)), AfterSilence::Ask);
        assert_eq!(deadline.wait_until(at(500)), at(501));
        deadline.note_answer();
        assert_eq!(deadline.end(), at(508));
    }
}
