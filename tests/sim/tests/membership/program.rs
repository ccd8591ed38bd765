//! A program that owns a segment, on the machine of a host.

use std::time::Duration;

use aquifer_channel::answer_deadline::{AnswerDeadline, TimeoutAction};
use aquifer_channel::boot_time::BootInstant;

use super::host::LEASE_TTL;
use super::world::{HostMachine, World};

/// A program that has access to a segment until its agent has not answered for some time.
#[derive(Debug)]
pub struct SegmentProgram {
    machine: usize,
    /// The epoch under which the owner of the segment claimed its host number.
    owner: u64,
    grace: Duration,
    deadline: AnswerDeadline,
    /// The time until which the program waits for an answer, or until the next request.
    until: BootInstant,
    is_asking: bool,
    /// The epoch of the agent to which the program is connected; `None` without a connection.
    agent: Option<u64>,
    /// The time at which the program lost its access, in milliseconds.
    pub lost_ms: Option<u64>,
}

fn at(now_ms: u64) -> BootInstant {
    BootInstant::START + Duration::from_millis(now_ms)
}

/// Whether an agent answers programs: it runs, and its lease is known to last.
fn answers(machine: &HostMachine, now_ms: u64) -> bool {
    let lasts = |acknowledged_ms: u64| Duration::from_millis(now_ms - acknowledged_ms) < LEASE_TTL;
    !machine.is_halted() && machine.host.as_ref().is_some_and(|host| lasts(host.acknowledged_ms))
}

impl SegmentProgram {
    /// A program on a machine whose host runs.
    pub fn start(world: &World, machine: usize) -> Self {
        let host = world.machines[machine].host.as_ref().expect("the host runs");
        // The agent passes this part of the grace time to programs; other hosts wait for all of it.
        let grace = Duration::from_millis(world.grace.host_ms).mul_f64(0.75);
        let (now, deadline) = (at(world.now_ms), AnswerDeadline::new(grace, at(world.now_ms)));
        Self {
            machine,
            owner: host.record.claim_epoch,
            grace,
            deadline,
            until: deadline.wait_until(now),
            is_asking: false,
            agent: Some(host.record.epoch),
            lost_ms: None,
        }
    }

    /// Advances the program: it sends its agent a request, connects to the next agent, or loses its
    /// access.
    pub fn step(&mut self, world: &World) {
        let machine = &world.machines[self.machine];
        let now = at(world.now_ms);
        if machine.is_suspended || self.lost_ms.is_some() {
            return;
        }
        let present = machine.host.as_ref().map(|host| host.record.epoch);
        if self.agent.is_some() && self.agent != present {
            self.agent = None;
        }
        let is_over = match self.agent {
            Some(_) => self.ask(answers(machine, world.now_ms), now),
            None => now >= self.deadline.end() || !self.connect(machine, world.now_ms),
        };
        if is_over {
            self.lost_ms = Some(world.now_ms);
        }
    }

    /// Receives an answer, and sends the next request if it is due. Returns true if the program has
    /// waited for too long.
    fn ask(&mut self, answers: bool, now: BootInstant) -> bool {
        if self.is_asking && answers {
            self.deadline.handle_answer();
            (self.is_asking, self.until) = (false, self.deadline.wait_until(now));
        }
        if now < self.until {
            return false;
        }
        match self.deadline.handle_timeout(now) {
            TimeoutAction::Expire => return true,
            TimeoutAction::Query => (self.is_asking, self.until) = (true, self.deadline.wait_until(now)),
        }
        false
    }

    /// Connects to the agent if it answers. Returns false if its host does not own the segment.
    fn connect(&mut self, machine: &HostMachine, now_ms: u64) -> bool {
        match &machine.host {
            Some(host) if answers(machine, now_ms) => {
                self.deadline = AnswerDeadline::new(self.grace, at(now_ms));
                (self.is_asking, self.until) = (false, self.deadline.wait_until(at(now_ms)));
                self.agent = Some(host.record.epoch);
                host.record.claim_epoch == self.owner
            }
            _ => true,
        }
    }
}
