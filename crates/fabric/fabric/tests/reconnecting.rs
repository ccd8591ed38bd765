//! Reconnecting endpoints in the simulator. One host writes, reads and counts while its node is
//! killed and restarted, and while the link to it is cut. Acknowledged writes must be there, a read
//! must not return a value older than an acknowledged write, and no operation of a broken
//! connection may take effect late.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_fabric::reconnecting::{
    AfterFence, AwayPolicy, Reconnect, ReconnectOutcome, ReconnectingEndpoint, TargetDescription,
};
use aquifer_fabric::sim::{Rng, SimFabric, SimNodeId, SimOptions, SimTarget};
use aquifer_fabric::{
    Access, Completion, Endpoint, Host, Identity, LocalKey, LocalSlice, Memory, Region, RemoteAddr, Scope,
    Target, Tenant, Verb, Work, WorkError,
};

const WHO: Identity = Identity { host: Host(1), epoch: 1, tenant: Tenant(1) };
/// Number of words that are written. One more word is a counter.
const WORDS: usize = 8;
const DEPTH: usize = 16;

#[derive(Debug)]
struct SimReconnect {
    fabric: SimFabric,
    node: SimNodeId,
    who: Identity,
    is_hopeless: AtomicBool,
}

impl Reconnect for SimReconnect {
    fn attempt(&self) -> ReconnectOutcome {
        match self.fabric.connect(self.node, self.who) {
            Ok(endpoint) => ReconnectOutcome::Connected(endpoint),
            Err(_) if self.is_hopeless.load(Ordering::Relaxed) => ReconnectOutcome::Gone,
            Err(_) => ReconnectOutcome::Retry,
        }
    }

    fn is_blocking(&self) -> bool {
        false
    }
}

/// An operation that was posted.
#[derive(Clone, Copy, Debug)]
enum Did {
    Write,
    Read { expected: u64 },
    Count,
}

struct Play {
    fabric: SimFabric,
    target: SimTarget,
    reconnect: Arc<SimReconnect>,
    region: Region,
    remote: Arc<Memory>,
    local: Arc<Memory>,
    endpoint: ReconnectingEndpoint,
    rng: Rng,
    in_flight: VecDeque<(u64, usize, Did)>,
    free_slots: Vec<usize>,
    /// The value of each word once all posted operations are done.
    words: [u64; WORDS],
    next: u64,
    counted: u64,
    perhaps_counted: u64,
    away: u64,
    is_down: bool,
    is_cut: bool,
}

impl Play {
    fn new(seed: u64, policy: AwayPolicy) -> Self {
        let fabric = SimFabric::new(
            seed,
            SimOptions { timeout_ns: 100_000, has_strays: true, ..SimOptions::default() },
        );
        let target = fabric.add_node();
        let remote = Arc::new(Memory::create("remote", 4096).unwrap());
        let region = target.register(Arc::clone(&remote), Access::ALL, Scope::Anyone).unwrap();
        let is_hopeless = AtomicBool::new(false);
        let reconnect =
            Arc::new(SimReconnect { fabric: fabric.clone(), node: target.node(), who: WHO, is_hopeless });
        let first = fabric.connect(target.node(), WHO).unwrap();
        let mut endpoint =
            ReconnectingEndpoint::new(first, Some(Arc::clone(&reconnect) as Arc<dyn Reconnect>), policy);
        let local = Arc::new(Memory::create("local", 4096).unwrap());
        assert_eq!(endpoint.register_local(Arc::clone(&local)).unwrap(), LocalKey(1));
        Self {
            fabric,
            target,
            reconnect,
            region,
            remote,
            local,
            endpoint,
            rng: Rng::new(seed ^ 0xA11CE),
            in_flight: VecDeque::new(),
            free_slots: (0..DEPTH).collect(),
            words: [0; WORDS],
            next: 0,
            counted: 0,
            perhaps_counted: 0,
            away: 0,
            is_down: false,
            is_cut: false,
        }
    }

    fn remote_at(&self, word: usize) -> RemoteAddr {
        RemoteAddr { addr: self.region.base + (word * 8) as u64, key: self.region.key }
    }

    fn post_some(&mut self) {
        let mut batch = Vec::new();
        for _ in 0..self.rng.index(4) {
            let Some(slot) = self.free_slots.pop() else { break };
            self.next += 1;
            let word = self.rng.index(WORDS);
            let local = LocalSlice { key: LocalKey(1), offset: (slot * 8) as u64, len: 8 };
            let remote = self.remote_at(word);
            let (did, verb) = match self.rng.index(8) {
                0..4 => {
                    let value = self.next;
                    self.local.write(slot * 8, &value.to_le_bytes());
                    self.words[word] = value;
                    (Did::Write, Verb::Write { local, remote })
                }
                4..7 => (Did::Read { expected: self.words[word] }, Verb::Read { local, remote }),
                _ => (Did::Count, Verb::FetchAdd { remote: self.remote_at(WORDS), add: 1 }),
            };
            self.in_flight.push_back((self.next, slot, did));
            batch.push(Work { id: self.next, verb, signalled: true });
        }
        self.endpoint.post(&batch).expect("there are fewer than its depth");
    }

    fn poll(&mut self) {
        let mut done = Vec::new();
        self.endpoint.poll(&mut done, 64);
        for Completion { id, outcome } in done {
            let at = self
                .in_flight
                .iter()
                .position(|(other, ..)| *other == id)
                .expect("the operation was posted once");
            let (_, slot, did) = self.in_flight.remove(at).expect("the operation is in flight");
            self.free_slots.push(slot);
            match (did, outcome) {
                (Did::Read { expected }, Ok(_)) => {
                    let mut found = [0; 8];
                    self.local.read(slot * 8, &mut found);
                    let found = u64::from_le_bytes(found);
                    // A repeated READ may find a value that was written after it.
                    assert!(found >= expected, "{found} was read where {expected} had been written");
                }
                (Did::Write, Ok(_)) => {}
                (Did::Count, Ok(_)) => self.counted += 1,
                (Did::Count, Err(WorkError::Away)) => {
                    self.perhaps_counted += 1;
                    self.away += 1;
                }
                (did, outcome) => panic!("{did:?} came to {outcome:?}"),
            }
        }
    }

    fn disturb(&mut self) {
        match self.rng.index(40) {
            0 if !self.is_down => {
                self.fabric.crash_node(self.target.node());
                self.is_down = true;
            }
            1..8 if self.is_down => {
                self.fabric.restart_node(self.target.node());
                self.is_down = false;
            }
            8 if !self.is_cut => {
                self.fabric.partition(WHO.host, self.target.node(), true);
                self.is_cut = true;
            }
            9..15 if self.is_cut => {
                self.fabric.partition(WHO.host, self.target.node(), false);
                self.is_cut = false;
            }
            _ => {}
        }
    }

    fn run(mut self, seed: u64) -> u64 {
        for _ in 0..400 {
            self.disturb();
            self.post_some();
            for _ in 0..self.rng.index(12) {
                self.fabric.step();
                self.poll();
            }
        }
        self.fabric.restart_node(self.target.node());
        self.fabric.partition(WHO.host, self.target.node(), false);
        while !self.in_flight.is_empty() {
            self.poll();
            self.fabric.step();
        }
        // Operations of earlier connections that are still on the wire must change nothing.
        self.fabric.run();
        for (word, value) in self.words.iter().enumerate() {
            let found = self.remote.atomic_u64(word * 8).load(Ordering::Relaxed);
            assert_eq!(found, *value, "seed {seed}: word {word}");
        }
        let found = self.remote.atomic_u64(WORDS * 8).load(Ordering::Relaxed);
        let bounds = self.counted..=self.counted + self.perhaps_counted;
        assert!(bounds.contains(&found), "seed {seed}: counted {found}, and not {bounds:?}");
        self.away
    }
}

#[test]
fn work_in_flight_is_done_when_the_target_is_back() {
    let away: u64 = (0..2000).map(|seed| Play::new(seed, AwayPolicy::Wait).run(seed)).sum();
    assert!(away > 1000, "{away} counts were in flight when an endpoint broke");
}

#[test]
fn a_target_that_does_not_come_back_ends_everything() {
    for policy in [AwayPolicy::Wait, AwayPolicy::Fail] {
        let mut play = Play::new(1, policy);
        play.fabric.crash_node(play.target.node());
        play.reconnect.is_hopeless.store(true, Ordering::Relaxed);
        let verb = Verb::FetchAdd { remote: play.remote_at(0), add: 1 };
        let work = |id| Work { id, verb, signalled: true };
        play.endpoint.post(&[work(1), work(2)]).unwrap();
        play.fabric.run();
        let mut done = Vec::new();
        while done.len() < 2 || !play.endpoint.is_broken() {
            play.endpoint.poll(&mut done, 1);
        }
        assert!(done.iter().all(|completion| completion.outcome.is_err()), "{done:?}");
        play.endpoint.post(&[work(3)]).unwrap();
        play.endpoint.poll(&mut done, 9);
        assert_eq!(done[2], Completion { id: 3, outcome: Err(WorkError::PeerGone) });
    }
}

#[test]
fn work_fails_at_once_without_waiting() {
    let mut play = Play::new(1, AwayPolicy::Fail);
    play.fabric.crash_node(play.target.node());
    let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    let work = |id, remote| Work { id, verb: Verb::Write { local, remote }, signalled: true };
    let remote = play.remote_at(0);
    play.endpoint.post(&[work(1, remote), work(2, remote)]).unwrap();
    play.fabric.run();
    let mut done = Vec::new();
    play.endpoint.poll(&mut done, 9);
    play.endpoint.post(&[work(3, remote)]).unwrap();
    play.endpoint.poll(&mut done, 9);
    let away = |id| Completion { id, outcome: Err(WorkError::Away) };
    assert_eq!(done, [away(1), away(2), away(3)]);
    assert!(!play.endpoint.is_broken(), "the target may come back");
    play.fabric.restart_node(play.target.node());
    done.clear();
    play.local.write(0, &7_u64.to_le_bytes());
    play.endpoint.post(&[work(4, remote)]).unwrap();
    play.fabric.run();
    play.endpoint.poll(&mut done, 9);
    assert_eq!(done, [Completion { id: 4, outcome: Ok(8) }]);
    assert_eq!(play.remote.atomic_u64(0).load(Ordering::Relaxed), 7);
}

#[test]
fn work_in_flight_does_not_take_effect_after_a_peer_was_treated_as_away() {
    for seed in 0..200 {
        let mut play = Play::new(seed, AwayPolicy::Fail);
        let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
        let verb = Verb::Write { local, remote: play.remote_at(0) };
        let work = |id| Work { id, verb, signalled: true };
        let mut done = Vec::new();
        play.local.write(0, &1_u64.to_le_bytes());
        play.endpoint.post(&[work(1), work(2)]).unwrap();
        play.endpoint.treat_as_away();
        assert!(play.endpoint.is_away());
        play.endpoint.poll(&mut done, 9);
        let away = |id| Completion { id, outcome: Err(WorkError::Away) };
        assert_eq!(done, [away(1), away(2)]);
        play.local.write(0, &2_u64.to_le_bytes());
        while done.last() != Some(&Completion { id: 3, outcome: Ok(8) }) {
            done.clear();
            play.endpoint.post(&[work(3)]).unwrap();
            while done.is_empty() {
                play.fabric.step();
                play.endpoint.poll(&mut done, 9);
            }
        }
        play.fabric.run();
        assert_eq!(play.remote.atomic_u64(0).load(Ordering::Relaxed), 2, "seed {seed}");
    }
}

#[test]
fn an_endpoint_made_while_the_target_is_away_waits_for_it() {
    let mut play = Play::new(1, AwayPolicy::Wait);
    play.fabric.crash_node(play.target.node());
    let reconnect = Arc::clone(&play.reconnect) as Arc<dyn Reconnect>;
    play.endpoint = ReconnectingEndpoint::to_away_target(
        TargetDescription::of(&play.endpoint),
        reconnect,
        AwayPolicy::Wait,
    );
    assert!(play.endpoint.is_away());
    assert_eq!(play.endpoint.register_local(Arc::clone(&play.local)).unwrap(), LocalKey(1));
    let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    let verb = Verb::Write { local, remote: play.remote_at(0) };
    play.local.write(0, &7_u64.to_le_bytes());
    play.endpoint.post(&[Work { id: 1, verb, signalled: true }]).unwrap();
    play.fabric.run();
    let mut done = Vec::new();
    assert_eq!(play.endpoint.poll(&mut done, 9), 0);
    play.fabric.restart_node(play.target.node());
    while done.is_empty() {
        play.endpoint.poll(&mut done, 9);
        play.fabric.step();
    }
    assert_eq!(done, [Completion { id: 1, outcome: Ok(8) }]);
    assert_eq!(play.remote.atomic_u64(0).load(Ordering::Relaxed), 7);
}

#[test]
fn a_target_with_other_memory_is_another() {
    let mut play = Play::new(1, AwayPolicy::Wait);
    let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    play.fabric.crash_node(play.target.node());
    let work = Work { id: 1, verb: Verb::Read { local, remote: play.remote_at(0) }, signalled: true };
    play.endpoint.post(&[work]).unwrap();
    play.fabric.run();
    let other = Arc::new(Memory::create("other", 4096).unwrap());
    play.target.register(other, Access::ALL, Scope::Anyone).unwrap();
    play.fabric.restart_node(play.target.node());
    let mut done = Vec::new();
    while !play.endpoint.is_broken() {
        play.endpoint.poll(&mut done, 9);
    }
    play.endpoint.poll(&mut done, 9);
    assert_eq!(done, [Completion { id: 1, outcome: Err(WorkError::PeerGone) }]);
}

#[test]
fn work_of_a_fenced_host_fails_at_once() {
    let mut play = Play::new(1, AwayPolicy::Wait);
    play.target.fence(WHO.host, WHO.epoch);
    let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    let work = |id| Work { id, verb: Verb::Read { local, remote: play.remote_at(0) }, signalled: true };
    let batch = [work(1), work(2), work(3)];
    play.endpoint.post(&batch).unwrap();
    play.fabric.run();
    let mut done = Vec::new();
    while done.len() < 3 {
        play.endpoint.poll(&mut done, 9);
    }
    assert_eq!(done[0], Completion { id: 1, outcome: Err(WorkError::Fenced) });
    assert!(done.iter().all(|completion| completion.outcome.is_err()), "{done:?}");
    play.endpoint.poll(&mut done, 9);
    assert!(play.endpoint.is_broken());
}

/// The completions of three READs that are posted after the target has fenced the host.
fn ends_after_fence(play: &mut Play) -> Vec<Completion> {
    play.target.fence(WHO.host, WHO.epoch);
    let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    let work = |id| Work { id, verb: Verb::Read { local, remote: play.remote_at(0) }, signalled: true };
    let batch = [work(1), work(2), work(3)];
    play.endpoint.post(&batch[..2]).unwrap();
    let mut done = Vec::new();
    for round in 0..4 {
        play.fabric.run();
        play.endpoint.poll(&mut done, 9);
        if round == 1 {
            play.endpoint.post(&batch[2..]).unwrap();
        }
    }
    done
}

#[test]
fn work_of_a_fenced_host_is_held_until_the_process_ends() {
    let mut play = Play::new(1, AwayPolicy::Wait);
    play.endpoint = play.endpoint.with_after_fence(AfterFence::Wait);
    assert_eq!(ends_after_fence(&mut play), []);
    assert!(play.endpoint.is_away() && !play.endpoint.is_broken());
    assert!(play.endpoint.poll_fd().is_some(), "there is something to wait for");
}

#[test]
fn work_that_does_not_wait_ends_after_a_fence() {
    let mut play = Play::new(1, AwayPolicy::Fail);
    play.endpoint = play.endpoint.with_after_fence(AfterFence::Wait);
    let away = |id| Completion { id, outcome: Err(WorkError::Away) };
    assert_eq!(ends_after_fence(&mut play), [away(1), away(2), away(3)]);
    assert!(play.endpoint.is_away() && !play.endpoint.is_broken());
}

#[test]
fn an_endpoint_that_does_not_reconnect_is_broken_with_its_target() {
    let mut play = Play::new(1, AwayPolicy::Wait);
    let first = play.fabric.connect(play.target.node(), WHO).unwrap();
    play.endpoint = ReconnectingEndpoint::new(first, None, AwayPolicy::Wait);
    play.endpoint.register_local(Arc::clone(&play.local)).unwrap();
    let local = LocalSlice { key: LocalKey(1), offset: 0, len: 8 };
    let work = |id| Work { id, verb: Verb::Read { local, remote: play.remote_at(0) }, signalled: true };
    let batch = [work(1), work(2)];
    let mut done = Vec::new();
    for work in batch {
        play.endpoint.post(&[work]).unwrap();
        if work.id == 1 {
            assert!(play.endpoint.drain_handle().is_some(), "operations in flight can be drained");
            play.fabric.crash_node(play.target.node());
        }
        play.fabric.run();
        play.endpoint.poll(&mut done, 9);
    }
    assert_eq!(done.iter().map(|ended| ended.id).collect::<Vec<_>>(), [1, 2]);
    assert!(done.iter().all(|ended| ended.outcome.is_err()), "{done:?}");
    assert!(play.endpoint.is_broken() && !play.endpoint.is_away());
}
