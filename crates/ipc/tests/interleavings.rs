//! The ring under a scheduler that switches threads at every access to its memory: nobody sleeps while there is something for him.

use std::sync::atomic::{AtomicU32, AtomicU64};

use aquifer_ipc::ring::{DATA_AT, ExtentAnswer, ExtentRequest, ExtentStatus, RingWords, SessionRing};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

const REQUESTS: u32 = 3;
const SCHEDULES: usize = 20_000;

/// A ring's words; each access is a place where others may run.
struct Watched(Vec<AtomicU64>);

impl RingWords for Watched {
    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        thread::yield_now();
        let word = self.0[offset / 8].as_ptr().cast::<u32>();
        // SAFETY: half of a word that lives as long as `self`; only atomics touch it.
        unsafe { AtomicU32::from_ptr(word.add(offset % 8 / 4)) }
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        thread::yield_now();
        &self.0[offset / 8]
    }
}

/// As the sockets are: a stroke is heard whenever somebody comes to listen.
#[derive(Default)]
struct Bell {
    has_rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.has_rung.lock().unwrap() = true;
        self.heard.notify_one();
    }

    fn await_ring(&self) {
        let mut has_rung = self.has_rung.lock().unwrap();
        while !*has_rung {
            has_rung = self.heard.wait(has_rung).unwrap();
        }
        *has_rung = false;
    }
}

/// What a side does wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// It sleeps without having looked once more.
    SleepBlind,
    /// It wakes nobody.
    WakeNobody,
}

struct Scene {
    ring: SessionRing<Watched>,
    agent: Bell,
    program: Bell,
    fault: Fault,
}

impl Scene {
    fn may_sleep(&self, may: bool) -> bool {
        may || self.fault == Fault::SleepBlind
    }

    fn must_wake(&self, must: bool) -> bool {
        must && self.fault != Fault::WakeNobody
    }

    fn be_program(&self) {
        let mut heeded = 0;
        for number in 0..REQUESTS {
            self.ring.put_request(number, &ExtentRequest::Allocate(u8::try_from(number).unwrap()));
            if self.must_wake(self.ring.publish_requests(number + 1)) {
                self.agent.ring();
            }
            // One is left under way.
            while heeded < number {
                heeded = self.await_answers(heeded);
            }
        }
        while heeded < REQUESTS {
            heeded = self.await_answers(heeded);
        }
        for number in 0..REQUESTS {
            let answer = self.ring.answer(number).unwrap();
            assert_eq!(u32::from(answer.extent.class), number, "the answer is to this request");
        }
    }

    fn await_answers(&self, seen: u32) -> u32 {
        loop {
            let answered = self.ring.answered();
            if answered != seen {
                return answered;
            }
            if self.may_sleep(self.ring.begin_program_sleep(seen)) {
                self.program.await_ring();
            }
        }
    }

    fn be_agent(&self) {
        let mut taken = 0;
        while taken < REQUESTS {
            let requested = self.ring.requested(taken).unwrap();
            if requested == taken {
                if self.may_sleep(self.ring.begin_agent_sleep(taken)) {
                    self.agent.await_ring();
                }
                continue;
            }
            while taken < requested {
                let Some(ExtentRequest::Allocate(class)) = self.ring.request(taken) else {
                    panic!("another request")
                };
                let mut answer = ExtentAnswer::without_extent(ExtentStatus::Done);
                answer.extent.class = class;
                self.ring.put_answer(taken, &answer);
                taken += 1;
            }
            if self.must_wake(self.ring.publish_answers(taken)) {
                self.program.ring();
            }
        }
    }
}

fn play(fault: Fault) {
    let words = Watched((0..DATA_AT / 8).map(|_| AtomicU64::new(0)).collect());
    let ring = SessionRing::initialise(words);
    let scene = Arc::new(Scene { ring, agent: Bell::default(), program: Bell::default(), fault });
    let agent = Arc::clone(&scene);
    let agent = thread::spawn(move || agent.be_agent());
    scene.be_program();
    agent.join().unwrap();
}

#[test]
fn nobody_sleeps_while_there_is_something_for_him() {
    shuttle::check_random(|| play(Fault::None), SCHEDULES);
    shuttle::check_pct(|| play(Fault::None), SCHEDULES, 3);
}

#[test]
fn each_step_is_needed() {
    for fault in [Fault::SleepBlind, Fault::WakeNobody] {
        let outcome = std::panic::catch_unwind(|| shuttle::check_random(move || play(fault), SCHEDULES));
        assert!(outcome.is_err(), "a fault went unnoticed");
    }
}
