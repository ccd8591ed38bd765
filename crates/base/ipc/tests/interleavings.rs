//! Wakeups of the ring under a scheduler that switches threads at every access to its memory: no
//! side sleeps while the other side has published something.

use std::sync::atomic::{AtomicU32, AtomicU64};

use aquifer_ipc::ring::{DATA_AT, RingAnswer, RingRequest, RingStatus, RingWords, SessionRing};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

const REQUESTS: u32 = 3;
const SCHEDULES: usize = 20_000;

/// The words of a ring. The scheduler may switch threads at each access.
struct YieldingWords(Vec<AtomicU64>);

impl RingWords for YieldingWords {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        thread::yield_now();
        let word = self.0[offset / 8].as_ptr().cast::<u32>();
        // SAFETY: half of an aligned word that lives as long as `self`, and is only accessed
        // atomically.
        unsafe { AtomicU32::from_ptr(word.add(offset % 8 / 4)) }
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        thread::yield_now();
        &self.0[offset / 8]
    }
}

/// A model of the session's socket: a wakeup stays until the sleeper receives it.
#[derive(Default)]
struct WakeupModel {
    is_pending: Mutex<bool>,
    notified: Condvar,
}

impl WakeupModel {
    fn notify(&self) {
        *self.is_pending.lock().unwrap() = true;
        self.notified.notify_one();
    }

    fn wait(&self) {
        let mut is_pending = self.is_pending.lock().unwrap();
        while !*is_pending {
            is_pending = self.notified.wait(is_pending).unwrap();
        }
        *is_pending = false;
    }
}

/// A step of the protocol that both sides omit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Omission {
    None,
    /// A side sleeps although the other side has published something.
    CheckBeforeSleep,
    /// A side does not wake the other side.
    Wakeup,
}

/// A program and an agent at one ring.
struct RingPlay {
    ring: SessionRing<YieldingWords>,
    agent: WakeupModel,
    program: WakeupModel,
    omission: Omission,
}

impl RingPlay {
    fn may_sleep(&self, may_sleep: bool) -> bool {
        may_sleep || self.omission == Omission::CheckBeforeSleep
    }

    fn must_wake(&self, must_wake: bool) -> bool {
        must_wake && self.omission != Omission::Wakeup
    }

    fn run_program(&self) {
        let mut answered = 0;
        for number in 0..REQUESTS {
            self.ring.put_request(number, &RingRequest::Allocate(u8::try_from(number).unwrap()));
            if self.must_wake(self.ring.publish_requests(number + 1)) {
                self.agent.notify();
            }
            // One request stays in flight.
            while answered < number {
                answered = self.wait_for_answers(answered);
            }
        }
        while answered < REQUESTS {
            answered = self.wait_for_answers(answered);
        }
        for number in 0..REQUESTS {
            let answer = self.ring.answer(number).unwrap();
            assert_eq!(u32::from(answer.extent.class), number, "the answer belongs to this request");
        }
    }

    fn wait_for_answers(&self, seen: u32) -> u32 {
        loop {
            let answered = self.ring.answered();
            if answered != seen {
                return answered;
            }
            if self.may_sleep(self.ring.begin_program_sleep(seen)) {
                self.program.wait();
            }
        }
    }

    fn run_agent(&self) {
        let mut answered = 0;
        while answered < REQUESTS {
            let requested = self.ring.requested(answered).unwrap();
            if requested == answered {
                if self.may_sleep(self.ring.begin_agent_sleep(answered)) {
                    self.agent.wait();
                }
                continue;
            }
            while answered < requested {
                let Some(RingRequest::Allocate(class)) = self.ring.request(answered) else {
                    panic!("the request is not the one that was written")
                };
                let mut answer = RingAnswer::without_extent(RingStatus::Done);
                answer.extent.class = class;
                self.ring.put_answer(answered, &answer);
                answered += 1;
            }
            if self.must_wake(self.ring.publish_answers(answered)) {
                self.program.notify();
            }
        }
    }
}

fn play(omission: Omission) {
    let words = YieldingWords((0..DATA_AT / 8).map(|_| AtomicU64::new(0)).collect());
    let ring = SessionRing::initialise(words);
    let agent = WakeupModel::default();
    let play = Arc::new(RingPlay { ring, agent, program: WakeupModel::default(), omission });
    let of_agent = Arc::clone(&play);
    let agent = thread::spawn(move || of_agent.run_agent());
    play.run_program();
    agent.join().unwrap();
}

#[test]
fn no_side_sleeps_while_the_other_has_published_something() {
    shuttle::check_random(|| play(Omission::None), SCHEDULES);
    shuttle::check_pct(|| play(Omission::None), SCHEDULES, 3);
}

#[test]
fn each_step_is_necessary() {
    for omission in [Omission::CheckBeforeSleep, Omission::Wakeup] {
        let outcome = std::panic::catch_unwind(|| shuttle::check_random(move || play(omission), SCHEDULES));
        assert!(outcome.is_err(), "an omitted step was not noticed");
    }
}
